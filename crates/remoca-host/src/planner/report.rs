//! The report: everything that the planner knows and thinks, for people and programs.

use super::vm::KnownVm;
use super::{Moment, Planner, Stage, change_text};
use crate::plan::{Row, Why};
use remoca_io::show::show_size;
use remoca_protocol::host::{HostReport, HostVm};
use std::time::Duration;

impl Planner {
    /// Returns the report. What only the daemon knows is left empty.
    #[must_use]
    pub fn report(&self, at: Moment) -> HostReport {
        let memory = self.memory(at.now);
        let plan = self.plan.as_ref().ok();
        let row = |name: &String| {
            let (names, plan) = plan?;
            names.iter().position(|other| other == name).map(|at| &plan.rows[at])
        };
        HostReport {
            at_s: at.unix_s,
            interval_ms: u64::try_from(self.settings.interval.as_millis()).ok(),
            resource: self.settings.resource.name().into(),
            applies: self.settings.applies,
            policy: self.settings.policy.name().into(),
            total_bytes: memory.total_bytes,
            unit_bytes: memory.unit_bytes,
            counted_bytes: self.counted(at.now),
            state: self.state(at.now),
            geometric_mean: plan.map(|(_, plan)| plan.geometric_mean),
            saved_ms_per_s: plan.map(|(_, plan)| plan.saved_ms),
            guests: self.settings.guests.map(|terms| self.guests_report(at, terms)),
            vms: self.vms.iter().map(|(name, vm)| self.vm(at.now, name, vm, row(name))).collect(),
            decisions: self.log.decisions().to_vec(),
            ..HostReport::default()
        }
    }

    /// Returns what the daemon is about to do, or why it does nothing.
    fn state(&self, now: Duration) -> String {
        let (counted, total) = (self.counted(now), self.memory(now).total_bytes);
        let over = match counted > total {
            true => format!("; all VMs together have {} more than the total", show_size(counted - total)),
            false => String::new(),
        };
        let open = |takes: bool| self.intent.as_ref().and_then(|intent| intent.open(takes));
        let text = match (open(true), open(false), &self.plan) {
            (Some(change), ..) if change.stage == Stage::Begun => {
                format!("waits until {} has given memory back", change.vm)
            }
            (Some(change), ..) => format!("takes memory from {}", change.vm),
            (None, Some(change), _) => format!("gives memory to {}", change.vm),
            (None, None, Err(why)) => format!("nothing is changed: {why}"),
            (None, None, Ok(_)) if self.log.has_proposal() => "would change sizes; --apply does".into(),
            (None, None, Ok((_, plan)))
                if counted <= total && plan.rows.iter().all(|row| matches!(row.why, Why::Best | Why::Apart)) =>
            {
                match plan.rows.iter().filter(|row| row.why == Why::Apart).count() {
                    0 => "all sizes are as they should be".into(),
                    all if all == plan.rows.len() => "nothing is changed now: all VMs keep what they have".into(),
                    _ => "all sizes are as they should be, but for VMs that keep what they have: WHY says why".into(),
                }
            }
            (None, None, Ok(_)) => "nothing is changed now".into(),
        };
        text + &over
    }

    fn vm(&self, now: Duration, name: &str, vm: &KnownVm, row: Option<&Row>) -> HostVm {
        let memory = self.memory(now);
        let (limits, bond) = (vm.limits(), self.bond(now, name, vm));
        let lent = self.guests.get(name).map_or(0, super::KnownGuest::lent);
        let bytes = |units: usize| units as u64 * memory.unit_bytes;
        let subject = vm.subject(memory, lent, bond.as_ref());
        let has_bytes = vm.counted(memory);
        let target = |row: &Row| if row.target == subject.has { has_bytes } else { bytes(row.target) };
        HostVm {
            name: name.into(),
            state: match &bond {
                None => "free".into(),
                Some((_, false)) => "keeps".into(),
                Some((_, true)) => "stuck".into(),
            },
            has_bytes,
            granted_bytes: vm.reading.as_ref().map(|reading| reading.granted),
            wanted_bytes: vm.reading.as_ref().map(|reading| reading.wanted),
            target_bytes: row.map_or(has_bytes, target),
            baseline_bytes: row.map_or(0, |row| bytes(row.baseline)),
            floor_bytes: row.map_or(0, |row| bytes(row.floor)),
            minimum_bytes: limits.minimum_bytes,
            maximum_bytes: limits.maximum_bytes.unwrap_or(memory.total_bytes),
            weight: limits.weight,
            bound: Some(limits.bound).filter(|bound| bound.is_finite()),
            miss_ratio: row.and_then(|row| row.ratios).map(|(ratio, ..)| ratio),
            miss_ratio_then: row.and_then(|row| row.ratios).map(|(_, then, _)| then),
            miss_ratio_error: row.and_then(|row| row.ratios).map(|(.., error)| error),
            blocks_read_per_s: vm.reads_per_s(),
            saved_ms_per_s: row.and_then(|row| row.saved_ms),
            why: row.map_or_else(
                || bond.map_or("there is no plan now".into(), |(why, _)| why),
                |row| self.why(now, name, row),
            ),
            guest: self.settings.guests.and_then(|_| Some(self.guest_report(now, &limits, self.guests.get(name)?))),
        }
    }

    /// Returns the reason for the target of a VM.
    pub(super) fn why(&self, now: Duration, name: &str, row: &Row) -> String {
        let fall = row.ratios.map_or_else(String::new, |(ratio, then, _)| format!(", {}", change_text(ratio, then)));
        let bond = || self.vms.get(name).and_then(|vm| self.bond(now, name, vm)).map(|(why, _)| why);
        match row.why {
            // What kept it may have ended since that plan.
            Why::Apart => bond().unwrap_or_else(|| "it keeps what it has until the next plan".into()),
            Why::Best => "it has the best size".into(),
            Why::Gains => format!("it gains{fall}"),
            Why::Gives => format!("others gain more than it loses{fall}"),
            Why::Owed => format!("it has less than its minimum or bound asks for{fall}"),
            Why::TooMuch => "it has more than its maximum, or all have more than the total".into(),
            Why::Unsure => "what it would gain is within the error of its curve".into(),
            Why::Spared => "all have more than the total, and it has no more than its share".into(),
            Why::NotWorth => "what it would gain is not worth moving memory for".into(),
            Why::Idle => "its guest reads too little to fill more in ten minutes".into(),
        }
    }
}
