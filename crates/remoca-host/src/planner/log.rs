//! The log of decisions: what was done or proposed, why, what was expected of it, and what came of it.

use super::moves::Move;
use remoca_protocol::host::{DECISIONS_MAX, HostDecision};
use std::collections::BTreeMap;

/// Blocks that a cache answered and that it did not, of one process.
#[derive(Clone, Copy, Debug)]
struct Before {
    process: (u32, u32),
    answered: (u64, u64),
}

/// A change whose effect is not known yet.
#[derive(Debug)]
struct Awaited {
    /// Index of its decision, counted from the first one ever.
    number: usize,
    /// What was answered by the first look after it; `None` until then.
    before: Option<Before>,
}

/// The latest decisions.
#[derive(Debug)]
pub(super) struct Log {
    decisions: Vec<HostDecision>,
    /// Number of decisions that are no longer kept.
    forgotten: usize,
    /// Changes whose effect is not known yet, by VM.
    awaited: BTreeMap<String, Awaited>,
    /// What was proposed last.
    proposed: Vec<(String, u64)>,
    /// Number of changes of sizes that were begun, and did not take place.
    pub(super) failed: usize,
}

impl Log {
    pub(super) fn new(mut decisions: Vec<HostDecision>) -> Self {
        decisions.drain(..decisions.len().saturating_sub(DECISIONS_MAX));
        Self { decisions, forgotten: 0, awaited: BTreeMap::new(), proposed: Vec::new(), failed: 0 }
    }

    pub(super) fn decisions(&self) -> &[HostDecision] {
        &self.decisions
    }

    /// Adds a decision. Returns its index, counted from the first one ever.
    fn push(&mut self, decision: HostDecision) -> usize {
        if self.decisions.len() == DECISIONS_MAX {
            self.decisions.remove(0);
            self.forgotten += 1;
        }
        self.decisions.push(decision);
        self.forgotten + self.decisions.len() - 1
    }

    /// Forgets a VM that is gone. No effect of its last change is awaited any more.
    pub(super) fn forget(&mut self, vm: &str) {
        self.awaited.remove(vm);
    }

    /// Notes something about all VMs.
    pub(super) fn note(&mut self, at_s: u64, why: String) {
        tracing::info!("{why}");
        self.push(HostDecision { at_s, why, ..HostDecision::default() });
    }

    /// Notes a change that was done. Its effect is added a window later.
    pub(super) fn done(&mut self, at_s: u64, change: &Move, outcome: &str) {
        let number = self.tell(at_s, change, outcome);
        self.awaited.insert(change.vm.clone(), Awaited { number, before: None });
    }

    /// Notes a change that was not done.
    pub(super) fn dropped(&mut self, at_s: u64, change: &Move, why: &str) {
        self.tell(at_s, change, &format!("not done: {why}"));
    }

    /// Notes a change, and what came of it. Returns the index of the decision.
    pub(super) fn tell(&mut self, at_s: u64, change: &Move, outcome: &str) -> usize {
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
        let Some(awaited) = self.awaited.get_mut(vm) else { return };
        let number = awaited.number;
        let Some(first) = awaited.before else {
            awaited.before = Some(Before { process, answered });
            return;
        };
        if !is_due {
            return;
        }
        self.awaited.remove(vm);
        let hits = answered.0.saturating_sub(first.answered.0);
        let misses = answered.1.saturating_sub(first.answered.1);
        let all = hits.saturating_add(misses);
        let at = number.checked_sub(self.forgotten);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn change(vm: &str) -> Move {
        Move { vm: vm.into(), from_bytes: 1, to_bytes: 2, ..Move::default() }
    }

    fn outcomes(log: &Log) -> Vec<&str> {
        log.decisions().iter().map(|decision| decision.outcome.as_str()).collect()
    }

    #[test]
    fn what_missed_in_the_window_after_a_change_is_added_to_it_once() {
        let mut log = Log::new(Vec::new());
        log.done(1, &change("a"), "set");
        log.note(2, "something else".into());
        // What was answered before the first look after it does not count.
        log.note_answered("a", (1, 0), (100, 100), true);
        log.note_answered("a", (1, 0), (110, 120), false);
        log.note_answered("b", (1, 0), (0, 1), true);
        assert_eq!(outcomes(&log), ["set", ""]);
        log.note_answered("a", (1, 0), (130, 170), true);
        let measured = ["set; in the window after it 70.0 % of the blocks read missed", ""];
        assert_eq!(outcomes(&log), measured);
        for missed in [200, 300] {
            log.note_answered("a", (1, 0), (130, missed), true);
        }
        assert_eq!(outcomes(&log), measured);
    }

    #[test]
    fn nothing_is_measured_of_another_process_or_without_reads() {
        let mut log = Log::new(Vec::new());
        for (process, answered) in [((1, 1), (5, 5)), ((2, 0), (5, 5)), ((1, 0), (0, 0))] {
            log.done(1, &change("a"), "set");
            log.note_answered("a", (1, 0), (0, 0), false);
            log.note_answered("a", process, answered, true);
        }
        assert_eq!(outcomes(&log), ["set"; 3]);
    }

    #[test]
    fn of_many_decisions_the_newest_stay_and_each_outcome_finds_its_own() {
        let former = |at_s| HostDecision { at_s, ..HostDecision::default() };
        let mut log = Log::new((0..DECISIONS_MAX as u64 + 5).map(former).collect());
        assert_eq!((log.decisions().len(), log.decisions()[0].at_s), (DECISIONS_MAX, 5));
        let more = |log: &mut Log, count: usize| (0..count).for_each(|_| log.note(2000, "more".into()));
        log.done(1000, &change("a"), "set");
        log.note_answered("a", (1, 0), (0, 0), false);
        more(&mut log, DECISIONS_MAX - 1);
        // It is the oldest one now.
        log.note_answered("a", (1, 0), (0, 1), true);
        assert!(outcomes(&log)[0].starts_with("set; in the window after it 100.0 %"), "{:?}", outcomes(&log));
        log.done(3000, &change("b"), "set");
        log.note_answered("b", (1, 0), (0, 0), false);
        more(&mut log, DECISIONS_MAX);
        log.note_answered("b", (1, 0), (0, 1), true);
        assert_eq!(outcomes(&log), [""; DECISIONS_MAX], "it is no longer there");
    }

    #[test]
    fn of_a_vm_that_is_gone_nothing_is_kept_but_its_decisions() {
        let mut log = Log::new(Vec::new());
        for number in 0..3 {
            let vm = format!("vm{number}");
            log.done(1, &change(&vm), "set");
            log.note_answered(&vm, (1, 0), (0, 0), false);
            log.forget(&vm);
        }
        assert_eq!((log.awaited.len(), log.decisions().len()), (0, 3));
        // One of the same name that comes later is another one.
        log.note_answered("vm0", (1, 0), (0, 1), true);
        assert_eq!(outcomes(&log), ["set"; 3]);
    }

    #[test]
    fn a_proposal_is_noted_when_it_changes() {
        let mut log = Log::new(Vec::new());
        let larger = Move { to_bytes: 3, ..change("a") };
        for (moves, count) in [([change("a")], 1), ([change("a")], 1), ([larger.clone()], 2), ([larger.clone()], 2)] {
            log.propose(1, &moves);
            assert_eq!((log.decisions().len(), log.has_proposal()), (count, true));
        }
        log.forget_proposal();
        assert!(!log.has_proposal());
        log.propose(1, &[larger]);
        assert_eq!(log.decisions().len(), 3);
    }
}
