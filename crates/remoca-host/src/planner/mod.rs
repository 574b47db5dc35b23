//! The planner: a state machine from answers of VM processes to commands that change their sizes. No I/O and no clock.
//!
//! The daemon (`daemon.rs`) hands in what the sockets answered ([`Planner::hear_all`]), executes [`Planner::next_step`] after the record is written,
//! and tells what came of it ([`Planner::step_done`]). Owned state: what is known of each VM (`vm.rs`), the changes under way
//! (`moves.rs`), and the log of decisions (`log.rs`). `report.rs` shows all of it.
//!
//! 1. No command makes the sum of what counts (granted or wanted, whichever is larger) greater than the total.
//! 2. Memory is given only after what was taken for it is seen in the granted sizes.
//! 3. A VM changes at most once in a window, and not while it is silent, off, or its curve says too little.
//! 4. A plan is made only when no change is under way, and no intent of a former daemon is open.
//! 5. What one VM answers, or does not answer, changes the size of another one only by the plan, which keeps bounds and minimums.

mod log;
mod moves;
mod report;
mod steps;
#[cfg(test)]
mod tests;
mod vm;

use crate::limits::Limits;
use crate::plan::{Memory, Plan, Policy, Row, Subject};
use crate::reading::Answer;
use crate::resource::Resource;
use log::{Log, percent};
pub use moves::{Intent, Move, Stage};
use remoca_protocol::control::CurveGrid;
use remoca_protocol::host::HostDecision;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;
use vm::KnownVm;

/// Most units that memory is divided in.
const UNITS_MAX: u64 = 2048;
/// Smallest unit: memory servers allocate in pieces of that size.
const UNIT_BYTES_MIN: u64 = 2 << 20;
/// Longest time after which the intent of a former daemon is still carried out; an older one is undone.
const INTENT_YOUNG_S: u64 = 600;
/// Time between two looks at VMs whose granted size is awaited.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long a VM may take to give memory back.
const FOLLOW_TIME: Duration = Duration::from_secs(30);

/// How memory is divided.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    pub resource: Resource,
    pub total_bytes: u64,
    pub policy: Policy,
    /// Whether sizes are changed.
    pub applies: bool,
    pub interval: Duration,
    /// Time in which a VM changes at most once.
    pub window: Duration,
    /// Number of times that a process must have been read before it is changed.
    pub readings_min: u32,
}

impl Settings {
    /// Returns what is divided, and in which units.
    #[must_use]
    pub fn memory(&self) -> Memory {
        let unit_bytes = self.total_bytes.div_ceil(UNITS_MAX).max(UNIT_BYTES_MIN).next_power_of_two();
        Memory { total_bytes: self.total_bytes, unit_bytes }
    }

    /// Returns the sizes at which the curves are asked for, of VMs without another tier in front.
    #[must_use]
    pub fn grid(&self) -> CurveGrid {
        let memory = self.memory();
        let count = u32::try_from(memory.units() + 1).unwrap_or(u32::MAX);
        CurveGrid { first_bytes: 0, step_bytes: memory.unit_bytes, count }
    }
}

/// The present, for the planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// Time since the start of the daemon.
    pub now: Duration,
    /// Seconds since 1970.
    pub unix_s: u64,
}

/// What a daemon leaves to its successor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Tier that the sizes are those of.
    #[serde(default)]
    pub resource: Resource,
    pub intent: Option<Intent>,
    /// Newest known size of each VM, in bytes.
    pub sizes: BTreeMap<String, u64>,
    pub decisions: Vec<HostDecision>,
}

/// A VM whose control socket was found, with what is known of it.
#[derive(Clone, Debug)]
pub struct Heard {
    pub vm: String,
    pub limits: Result<Limits, String>,
    pub answer: Answer,
}

/// A command to execute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub vm: String,
    pub bytes: u64,
}

/// What came of a command.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The process answered with its new status.
    Answered(Answer),
    /// The process refused, and says why.
    Refused(String),
    /// No answer came: it may have been executed.
    Unknown(String),
    /// The command was not sent.
    NotSent(String),
}

/// When the daemon asks VMs next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// All of them, with their curves, at this time.
    All(Duration),
    /// Those that are to give memory back, at this time.
    Awaited(Duration, Vec<String>),
}

/// The state machine.
#[derive(Debug)]
pub struct Planner {
    settings: Settings,
    vms: BTreeMap<String, KnownVm>,
    /// Sizes by the record of a former daemon.
    recorded: BTreeMap<String, u64>,
    /// Intent of a former daemon, until the VMs have been read.
    inherited: Option<Intent>,
    intent: Option<Intent>,
    /// When a command was sent last.
    stepped_at: Duration,
    looked_at: Option<Duration>,
    awaited_at: Duration,
    /// Newest plan, by the names of the VMs, or why there is none.
    plan: Result<(Vec<String>, Plan), String>,
    log: Log,
}

impl Planner {
    /// Returns a planner that goes on from the record of a former daemon.
    #[must_use]
    pub fn new(settings: Settings, record: Record) -> Self {
        // Sizes of another tier say nothing about this one.
        let record = match record.resource == settings.resource {
            true => record,
            false => Record { decisions: record.decisions, ..Record::default() },
        };
        Self {
            settings,
            vms: BTreeMap::new(),
            recorded: record.sizes,
            inherited: record.intent.filter(|_| settings.applies),
            intent: None,
            stepped_at: Duration::ZERO,
            looked_at: None,
            awaited_at: Duration::ZERO,
            plan: Err("the VMs have not been read yet".into()),
            log: Log::new(record.decisions),
        }
    }

    /// Takes what all control sockets answered. VMs without one are gone. Plans, if nothing is under way.
    pub fn hear_all(&mut self, at: Moment, all: Vec<Heard>) {
        self.looked_at = Some(at.now);
        let gone: Vec<String> =
            self.vms.keys().filter(|name| !all.iter().any(|heard| heard.vm == **name)).cloned().collect();
        for name in gone {
            self.vms.remove(&name);
            self.drop_move(at, &name, "the VM is gone");
        }
        for Heard { vm, limits, answer } in all {
            let recorded = self.recorded.get(&vm).copied();
            let known = self.vms.entry(vm.clone()).or_insert_with(|| KnownVm::new(at.now, recorded));
            known.limits = limits;
            self.hear(at, &vm, answer);
        }
        self.note_outcomes(at);
        self.give_up(at);
        if let Some(intent) = self.inherited.take() {
            self.resume(at, intent);
        }
        if self.intent.is_none() {
            self.make_plan(at);
        }
    }

    /// Takes the answer of one VM.
    pub fn hear(&mut self, at: Moment, name: &str, answer: Answer) {
        let Some(vm) = self.vms.get_mut(name) else { return };
        if vm.hear(at.now, answer) {
            self.drop_move(at, name, "another process took its place");
        }
        self.follow(at, name);
    }

    /// Returns when to ask whom next.
    #[must_use]
    pub fn next_look(&self) -> Look {
        let all = self.looked_at.map_or(Duration::ZERO, |at| at + self.settings.interval);
        match self.awaited() {
            names if names.is_empty() || self.awaited_at + LOOK_EVERY >= all => Look::All(all),
            names => Look::Awaited(self.awaited_at + LOOK_EVERY, names),
        }
    }

    /// Notes that the VMs of [`Look::Awaited`] have been asked.
    pub fn looked_at_awaited(&mut self, at: Moment) {
        self.awaited_at = at.now;
        self.give_up(at);
    }

    /// Returns what a successor needs. It must be on record before a step is executed.
    #[must_use]
    pub fn record(&self) -> Record {
        let memory = self.settings.memory();
        let size =
            |(name, vm): (&String, &KnownVm)| Some((name.clone(), vm.reading.as_ref().map(|_| vm.counted(memory))?));
        let known = self.vms.iter().filter_map(size);
        let recorded =
            self.recorded.iter().filter(|(name, _)| self.vms.get(*name).is_some_and(|vm| vm.reading.is_none()));
        Record {
            resource: self.settings.resource,
            intent: self.intent.clone().or_else(|| self.inherited.clone()),
            sizes: known.chain(recorded.map(|(name, bytes)| (name.clone(), *bytes))).collect(),
            decisions: self.log.decisions().to_vec(),
        }
    }

    /// Returns whether changes are under way.
    #[must_use]
    pub fn is_moving(&self) -> bool {
        self.intent.is_some()
    }

    /// Returns the names of the VMs that have a part in the division.
    fn present(&self, now: Duration) -> Vec<String> {
        self.vms.iter().filter(|(_, vm)| !vm.is_absent(now)).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the sum of what all VMs have.
    fn counted(&self, now: Duration) -> u64 {
        let memory = self.settings.memory();
        let present = self.vms.values().filter(|vm| !vm.is_absent(now));
        present.fold(0, |sum, vm| sum.saturating_add(vm.counted(memory)))
    }

    fn make_plan(&mut self, at: Moment) {
        let memory = self.settings.memory();
        let names = self.present(at.now);
        let subjects: Vec<Subject<'_>> = names.iter().map(|name| self.subject(at.now, name, memory)).collect();
        let plan = Plan::new(&subjects, memory, self.settings.policy);
        let moves = plan.as_ref().map(|plan| self.moves_of(at.now, &names, &subjects, plan)).unwrap_or_default();
        self.plan = plan.map(|plan| (names, plan));
        if moves.is_empty() {
            self.log.forget_proposal();
            return;
        }
        if self.settings.applies {
            self.intent = Some(Intent { at_s: at.unix_s, moves });
            self.stepped_at = at.now;
        } else {
            self.log.propose(at.unix_s, &moves);
        }
    }

    fn subject(&self, now: Duration, name: &str, memory: Memory) -> Subject<'_> {
        let vm = &self.vms[name];
        vm.subject(memory, self.bond(now, vm).as_ref())
    }

    fn bond(&self, now: Duration, vm: &KnownVm) -> Option<(String, bool)> {
        vm.bond(now, self.settings.window, self.settings.readings_min)
    }

    /// Returns the changes that a plan asks for.
    fn moves_of(&self, now: Duration, names: &[String], subjects: &[Subject<'_>], plan: &Plan) -> Vec<Move> {
        let Memory { unit_bytes: unit, total_bytes } = self.settings.memory();
        // Those who have too much may be lying: nobody else gives anything before they have.
        let is_over = self.counted(now) > total_bytes;
        let may = |vm: &Subject<'_>, row: &Row| !is_over || row.target < vm.has && vm.has > row.baseline;
        let rows =
            names.iter().zip(subjects).zip(&plan.rows).filter(|((_, vm), row)| row.target != vm.has && may(vm, row));
        let change = |((name, vm), row): ((&String, &Subject<'_>), &Row)| Move {
            vm: name.clone(),
            from_bytes: vm.has_bytes,
            to_bytes: row.target as u64 * unit,
            stage: Stage::Planned,
            why: self.why(now, name, row),
            miss_ratio: row.ratios.map(|(ratio, ..)| ratio),
            miss_ratio_then: row.ratios.map(|(_, then, _)| then),
        };
        rows.map(change).collect()
    }

    /// Decides about the intent of a former daemon.
    fn resume(&mut self, at: Moment, intent: Intent) {
        let age_s = at.unix_s.saturating_sub(intent.at_s);
        let is_young = age_s <= INTENT_YOUNG_S;
        let wanted = |name: &str| {
            let vm = self.vms.get(name).filter(|vm| vm.silent.is_none())?;
            Some(vm.reading.as_ref()?.wanted)
        };
        let resumed = intent.resumed(is_young, wanted);
        let what = match (resumed.is_over(), is_young) {
            (true, _) => "nothing is left to do of it",
            (false, true) => "it is carried out",
            (false, false) => "what was done of it is undone",
        };
        self.log
            .note(at.unix_s, format!("a former daemon ended {age_s} s ago or later, with a plan under way: {what}"));
        self.stepped_at = at.now;
        self.intent = Some(resumed).filter(|intent| !intent.is_over());
    }

    /// Notes what the miss ratios became a window after a change.
    fn note_outcomes(&mut self, at: Moment) {
        for (name, vm) in &self.vms {
            let Some(reading) = &vm.reading else { continue };
            let is_due = vm.changed_at.is_some_and(|changed| at.now.saturating_sub(changed) >= self.settings.window);
            self.log.note_answered(name, reading.process, reading.answered, is_due);
        }
    }
}

/// Returns a miss ratio with its change as text.
fn change_text(now: f64, then: f64) -> String {
    format!("misses {} -> {}", percent(now), percent(then))
}
