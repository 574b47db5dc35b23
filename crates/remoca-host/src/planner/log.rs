//! The log of decisions: what was done or proposed, why, what was expected of it, and what came of it.

use super::moves::Move;
use remoca_protocol::host::{DECISIONS_MAX, HostDecision};
use std::collections::BTreeMap;

/// Blocks that a cache answered and that it did not, of one process.
#[derive(Clone, Copy, Debug)]
struct Before {
    process: (u32, u32),
    answered: (u64, u64),
    /// Index of the decision, counted from the first one ever.
    number: usize,
}

/// The latest decisions.
#[derive(Debug)]
pub(super) struct Log {
    decisions: Vec<HostDecision>,
    /// Number of decisions that are no longer kept.
    forgotten: usize,
    /// Changes whose effect is not known yet, by VM.
    awaited: BTreeMap<String, Option<Before>>,
    /// Number of the newest decision about each VM.
    newest: BTreeMap<String, usize>,
    /// What was proposed last.
    proposed: Vec<(String, u64)>,
}

impl Log {
    pub(super) fn new(mut decisions: Vec<HostDecision>) -> Self {
        decisions.drain(..decisions.len().saturating_sub(DECISIONS_MAX));
        Self { decisions, forgotten: 0, awaited: BTreeMap::new(), newest: BTreeMap::new(), proposed: Vec::new() }
    }

    pub(super) fn decisions(&self) -> &[HostDecision] {
        &self.decisions
    }

    fn push(&mut self, decision: HostDecision) -> usize {
        if self.decisions.len() == DECISIONS_MAX {
            self.decisions.remove(0);
            self.forgotten += 1;
        }
        self.decisions.push(decision);
        self.forgotten + self.decisions.len() - 1
    }

    /// Notes something about all VMs.
    pub(super) fn note(&mut self, at_s: u64, why: String) {
        tracing::info!("{why}");
        self.push(HostDecision { at_s, why, ..HostDecision::default() });
    }

    /// Notes a change that was done. Its effect is added a window later.
    pub(super) fn done(&mut self, at_s: u64, change: &Move, outcome: &str) {
        let number = self.tell(at_s, change, outcome);
        self.newest.insert(change.vm.clone(), number);
        self.awaited.insert(change.vm.clone(), None);
    }

    /// Notes a change that was not done.
    pub(super) fn dropped(&mut self, at_s: u64, change: &Move, why: &str) {
        self.tell(at_s, change, &format!("not done: {why}"));
    }

    /// Notes a change of the memory of a guest, and what came of it.
    pub(super) fn told(&mut self, at_s: u64, change: &Move, outcome: &str) {
        self.tell(at_s, change, outcome);
    }

    fn tell(&mut self, at_s: u64, change: &Move, outcome: &str) -> usize {
        let decision = decision(at_s, change, outcome);
        tracing::info!("{}", line(&decision));
        self.push(decision)
    }

    /// Notes what would be changed, unless that was said already.
    pub(super) fn propose(&mut self, at_s: u64, moves: &[Move]) {
        let proposed: Vec<_> = moves.iter().map(|change| (change.vm.clone(), change.to_bytes)).collect();
        if proposed != self.proposed {
            for change in moves {
                self.push(decision(at_s, change, "not done: --apply would"));
            }
            self.proposed = proposed;
        }
    }

    /// Returns whether something is proposed.
    pub(super) fn has_proposal(&self) -> bool {
        !self.proposed.is_empty()
    }

    /// Lets the same proposal be noted again.
    pub(super) fn forget_proposal(&mut self) {
        self.proposed.clear();
    }

    /// Counts what the cache of a VM answered since its change. When that `is_due`, adds it to the outcome.
    pub(super) fn note_answered(&mut self, vm: &str, process: (u32, u32), answered: (u64, u64), is_due: bool) {
        let Some(before) = self.awaited.get_mut(vm) else { return };
        let number = self.newest.get(vm).copied().unwrap_or_default();
        let Some(first) = *before else {
            *before = Some(Before { process, answered, number });
            return;
        };
        if !is_due {
            return;
        }
        self.awaited.remove(vm);
        let hits = answered.0.saturating_sub(first.answered.0);
        let misses = answered.1.saturating_sub(first.answered.1);
        let all = hits.saturating_add(misses);
        let at = first.number.checked_sub(self.forgotten);
        if let Some(decision) = at.and_then(|at| self.decisions.get_mut(at))
            && first.process == process
            && all > 0
        {
            let measured = misses as f64 / all as f64;
            decision.outcome += &format!("; in the window after it {} of the blocks read missed", percent(measured));
        }
    }
}

fn decision(at_s: u64, change: &Move, outcome: &str) -> HostDecision {
    HostDecision {
        at_s,
        vm: Some(change.vm.clone()),
        from_bytes: change.from_bytes,
        to_bytes: change.to_bytes,
        why: change.why.clone(),
        miss_ratio: change.miss_ratio,
        miss_ratio_then: change.miss_ratio_then,
        outcome: outcome.into(),
    }
}

/// Returns a decision about a VM as a line for the log.
fn line(decision: &HostDecision) -> String {
    use remoca_io::show::show_size;
    let vm = decision.vm.as_deref().unwrap_or_default();
    let (from, to) = (show_size(decision.from_bytes), show_size(decision.to_bytes));
    format!("{vm}: {from} -> {to}: {}: {}", decision.why, decision.outcome)
}

/// Returns a share as a percentage.
pub(super) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.)
}
