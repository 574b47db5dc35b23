//! The planner: a state machine from answers of VM processes to commands that change their sizes. No I/O and no clock.
//!
//! The daemon (`daemon.rs`) hands in what the sockets answered ([`Planner::hear_all`]), executes [`Planner::next_step`] after the record is written,
//! and tells what came of it ([`Planner::step_done`]). Owned state: what is known of each VM (`vm.rs`), the changes under way
//! (`moves.rs`; `resume.rs` says which go on), and the log of decisions (`log.rs`). `report.rs` shows all of it. If guests take part, `guests.rs` knows their memory,
//! `round.rs` lends and returns it, `relief.rs` helps those that are short of it, `back.rs` returns all of it, and `guest_report.rs` shows them.
//!
//! 1. No command makes the sum of what counts (granted or wanted, whichever is larger) greater than the total: without the reserve, and with
//!    what guests are seen to have lent. Only a guest that is short of memory gets some of its own back from the reserve.
//! 2. Memory is given only after what was taken for it is seen in the granted sizes.
//! 3. A VM changes at most once in a window, and not while it is silent, off, or its curve says too little. When all have more than the total
//!    with the reserve, no window keeps a VM from being cut to its share.
//! 4. A plan is made only when no change is under way, and no intent of a former daemon is open.
//! 5. What one VM answers, or does not answer, changes the size of another one only by the plan, which keeps bounds and minimums.

mod back;
mod guest_report;
mod guests;
mod interface;
mod log;
mod moves;
mod relief;
mod report;
mod resume;
mod round;
mod steps;
#[cfg(test)]
mod tests;
mod vm;

use crate::guest::Unusable;
use crate::plan::{Memory, Plan, Row, Subject};
use crate::reading::Answer;
use guests::KnownGuest;
use interface::unit_of;
pub use interface::{GuestRecord, GuestTerms, Heard, Look, Moment, Outcome, Phase, Record, Round, Settings, Step};
use log::{Log, percent};
pub use moves::{Intent, Move, Side, Stage};
use remoca_io::show::show_size;
use remoca_protocol::control::CurveGrid;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use vm::{DEAD_FOR, KnownVm};

/// Time between two looks at VMs whose granted size is awaited.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Time between two looks at guests from which memory was taken.
const GUESTS_EVERY: Duration = Duration::from_secs(1);
/// How long a VM may take to give memory back.
const FOLLOW_TIME: Duration = Duration::from_secs(30);

/// The state machine.
#[derive(Debug)]
pub struct Planner {
    settings: Settings,
    vms: BTreeMap<String, KnownVm>,
    /// Sizes by the record of a former daemon.
    recorded: BTreeMap<String, u64>,
    /// When a former daemon changed VMs, until the VMs have been read.
    former_changed: BTreeMap<String, u64>,
    /// VMs that a former daemon saw dead for too long, until the VMs have been read.
    former_dead: BTreeSet<String>,
    /// When all VMs that count were there last, by this daemon or a former one, in seconds since 1970; 0 if nobody says. Those that this
    /// daemon has seen go were there.
    read_s: u64,
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
    /// Unit of memory, and the largest size at which a curve is asked for.
    unit_bytes: u64,
    grid_bytes: u64,
    guests: BTreeMap<String, KnownGuest>,
    /// Memory of guests by the record of a former daemon, and of those that are gone.
    guests_recorded: BTreeMap<String, GuestRecord>,
    round: Round,
    /// When the phase was first seen by this daemon, and how long it had lasted then.
    phase_began: Option<(Duration, Duration)>,
    reliefs: Vec<Move>,
    /// Number of plans that were made to give guests all of their memory back; `None` if nobody asked for that.
    back: Option<u32>,
    guests_looked_at: Duration,
    /// Total of the tier without the reserve, by the operator or the record of a former daemon; 0 if nobody knows it.
    known_total: u64,
}

impl Planner {
    /// Returns a planner that goes on from the record of a former daemon.
    #[must_use]
    pub fn new(settings: Settings, mut record: Record) -> Self {
        let is_moved = settings.applies && settings.guests.is_some();
        let is_same_tier = record.resource == settings.resource;
        if !is_moved || !is_same_tier {
            record.leave_guests(is_same_tier);
        }
        // Sizes of another tier say nothing about this one. What guests have does not depend on it.
        if !is_same_tier {
            record = Record { decisions: record.decisions, guests: record.guests, ..Record::default() };
        }
        for change in record.intent.iter().flat_map(|intent| &intent.moves) {
            // It may have been done.
            if change.side == Side::Tier && change.stage == Stage::Begun {
                record.sizes.entry(change.vm.clone()).and_modify(|bytes| *bytes = change.to_bytes.max(*bytes));
            }
        }
        let reserve_bytes = settings.guests.map_or(0, |terms| terms.reserve_bytes);
        let known_total = match settings.total_bytes {
            0 => record.total_bytes,
            total => total.saturating_sub(reserve_bytes),
        };
        Self {
            settings,
            vms: BTreeMap::new(),
            recorded: record.sizes,
            former_changed: record.changed,
            former_dead: record.dead,
            read_s: record.read_s,
            inherited: record.intent.filter(|_| settings.applies),
            intent: None,
            stepped_at: Duration::ZERO,
            looked_at: None,
            awaited_at: Duration::ZERO,
            plan: Err("the VMs have not been read yet".into()),
            log: Log::new(record.decisions),
            unit_bytes: unit_of(settings.total_bytes),
            grid_bytes: settings.total_bytes,
            guests: BTreeMap::new(),
            guests_recorded: record.guests,
            round: if is_moved { record.round } else { Round::default() },
            phase_began: None,
            // Their balloons can be told again.
            reliefs: record.reliefs.into_iter().map(|relief| Move { stage: Stage::Planned, ..relief }).collect(),
            back: None,
            guests_looked_at: Duration::ZERO,
            known_total,
        }
    }

    /// Returns the sizes at which the curves are asked for, of VMs without another tier in front.
    #[must_use]
    pub fn grid(&self) -> CurveGrid {
        let memory = Memory { total_bytes: self.grid_bytes, unit_bytes: self.unit_bytes };
        let count = u32::try_from(memory.units() + 1).unwrap_or(u32::MAX);
        CurveGrid { first_bytes: 0, step_bytes: memory.unit_bytes, count }
    }

    /// Takes what all control sockets answered. VMs without one are gone, and count for a while. Plans, if nothing is under way.
    pub fn hear_all(&mut self, at: Moment, all: Vec<Heard>) {
        self.looked_at = Some(at.now);
        self.note_phase(at);
        if self.vms.is_empty() {
            self.count_former(at, &all);
        }
        let gone: Vec<String> =
            self.vms.keys().filter(|name| !all.iter().any(|heard| heard.vm == **name)).cloned().collect();
        for name in &gone {
            self.drop_moves(at, name, "the VM is gone");
            if let Some(guest) = self.guests.get_mut(name) {
                guest.unusable = Some(Unusable::Silent("the VM process was stopped".into()));
            }
            let is_over = self.vms.get_mut(name).is_none_or(|vm| {
                vm.stop(at.now);
                vm.is_absent(at.now)
            });
            if is_over {
                self.forget(at, name);
            }
        }
        // One that this daemon has never heard is known from then only: else daemons after one another would count it for ever.
        let is_unheard = |name: &String| self.vms.get(name).is_some_and(|vm| vm.reading.is_none());
        if !gone.iter().any(is_unheard) {
            self.read_s = at.unix_s;
        }
        for Heard { vm, limits, answer } in all {
            let known = self.vms.entry(vm.clone()).or_insert_with(|| KnownVm::new(at.now, None));
            known.hear_limits(limits);
            self.hear(at, &vm, answer);
        }
        self.guests_looked_at = at.now;
        self.note_gone(at);
        self.note_outcomes(at);
        self.give_up(at);
        self.begin_back(at);
        if let Some(intent) = self.inherited.take() {
            self.resume(at, intent);
        }
        self.keep_minimums(at);
        self.fit_unit(at.now);
        self.relieve(at);
        // Curves in other units are to be asked for first.
        if self.intent.is_none() && self.looked_at.is_some() {
            self.go_on(at);
        }
    }

    /// Counts the VMs that a former daemon counted. Those that are gone by now count as if this one had seen them go, unless it has been too
    /// long since the former one read them.
    fn count_former(&mut self, at: Moment, all: &[Heard]) {
        // An older daemon does not say, and the clock may have been set back.
        if self.read_s == 0 || self.read_s > at.unix_s {
            self.read_s = at.unix_s;
        }
        let passed = Duration::from_secs(at.unix_s - self.read_s);
        if passed >= DEAD_FOR + self.settings.interval {
            self.recorded.retain(|name, _| all.iter().any(|heard| heard.vm == *name));
        }
        for (name, bytes) in &self.recorded {
            self.vms.insert(name.clone(), KnownVm::new(at.now, Some(*bytes)));
        }
        for name in std::mem::take(&mut self.former_dead) {
            self.vms.entry(name).or_insert_with(|| KnownVm::new(at.now, None)).was_dead = true;
        }
        for (name, changed_s) in std::mem::take(&mut self.former_changed) {
            if let Some(vm) = self.vms.get_mut(&name) {
                vm.note_former_change(at, self.settings.window, changed_s);
            }
        }
    }

    /// Forgets a VM that has been gone for too long. What its guest lent is no longer divided: the next plan takes it back from caches.
    fn forget(&mut self, at: Moment, name: &str) {
        let guest = self.guests.remove(name);
        let lent = guest.as_ref().map_or(0, KnownGuest::lent);
        if lent > 0 {
            let lent = show_size(lent);
            self.log
                .note(at.unix_s, format!("{name} is gone, and the {lent} that its guest lent are no longer divided"));
        }
        // One that lacks nothing begins anew when it comes back.
        if let Some(sizes) = guest.and_then(|guest| guest.sizes).filter(GuestRecord::lacks) {
            self.guests_recorded.insert(name.into(), GuestRecord { gone_s: at.unix_s, ..sizes });
        }
        self.vms.remove(name);
        self.recorded.remove(name);
        self.log.forget(name);
    }

    /// Takes the answer of one VM.
    pub fn hear(&mut self, at: Moment, name: &str, answer: Answer) {
        let Some(vm) = self.vms.get_mut(name) else { return };
        if vm.hear(at.now, answer) {
            self.drop_move(at, name, Side::Tier, "another process took its place");
        }
        let (is_moving, slack) = (self.moves_guest(name), self.slack());
        let reading = self.vms.get(name).filter(|vm| vm.silent.is_none()).and_then(|vm| vm.reading.as_ref());
        match (reading, self.guests.get_mut(name)) {
            (Some(reading), Some(guest)) => {
                guest.hear_resident(at.now, reading.guest_resident);
                guest.hear_waits(at.now, reading.guest_waits);
                guest.note_shrunk(is_moving, slack);
            }
            (None, Some(guest)) => guest.note_silence(at.now),
            (_, None) => {}
        }
        self.follow(at, name);
        self.follow_guest(at, name);
    }

    /// Returns when to ask whom next.
    #[must_use]
    pub fn next_look(&self) -> Look {
        let all = self.looked_at.map_or(Duration::ZERO, |at| at + self.settings.interval);
        let (soon, guests_at) = (self.awaited_at + LOOK_EVERY, self.guests_looked_at + GUESTS_EVERY);
        let (mut names, guests) = (self.awaited(), self.taken_from());
        // Guests that may need help come right before all VMs, whose processes may be slow.
        match (names.is_empty(), guests.is_empty()) {
            (false, _) if soon < all => {
                let is_last = soon + LOOK_EVERY >= all;
                names.extend(guests.into_iter().filter(|_| guests_at <= soon || is_last));
                names.sort();
                names.dedup();
                Look::Awaited(soon, names)
            }
            (true, false) if self.guests_looked_at < all => Look::Awaited(guests_at.min(all), guests),
            _ => Look::All(all),
        }
    }

    /// Notes that the VMs of [`Look::Awaited`] have been asked.
    pub fn looked_at_awaited(&mut self, at: Moment, names: &[String]) {
        self.awaited_at = at.now;
        if self.taken_from().iter().all(|guest| names.contains(guest)) {
            self.guests_looked_at = at.now;
        }
        self.give_up(at);
        self.relieve(at);
        // Curves in other units are to be asked for first.
        let is_free = self.intent.is_none() && self.back.is_none() && self.looked_at.is_some();
        if is_free && self.is_beyond_reserve(at.now) {
            self.make_plan(at);
        }
    }

    /// Returns what a successor needs. It must be on record before a step is executed.
    #[must_use]
    pub fn record(&self) -> Record {
        let memory = self.memory(Duration::ZERO);
        let size =
            |(name, vm): (&String, &KnownVm)| Some((name.clone(), vm.reading.as_ref().map(|_| vm.counted(memory))?));
        let known = self.vms.iter().filter_map(size);
        let dead = self.vms.iter().filter(|(_, vm)| vm.is_gone(self.guests_looked_at));
        let changed = self.vms.iter().filter(|(_, vm)| vm.changed_s > 0);
        let recorded =
            self.recorded.iter().filter(|(name, _)| self.vms.get(*name).is_some_and(|vm| vm.reading.is_none()));
        Record {
            resource: self.settings.resource,
            total_bytes: self.known_total,
            read_s: self.read_s,
            intent: self.intent.clone().or_else(|| self.inherited.clone()),
            sizes: known.chain(recorded.map(|(name, bytes)| (name.clone(), *bytes))).collect(),
            changed: changed.map(|(name, vm)| (name.clone(), vm.changed_s)).collect(),
            dead: dead.map(|(name, _)| name.clone()).collect(),
            guests: self.guest_records(),
            round: self.round,
            reliefs: self.reliefs.clone(),
            decisions: self.log.decisions().to_vec(),
        }
    }

    /// Returns the number of sizes that VMs were told, and did not take.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.log.failed
    }

    /// Returns whether changes are under way, or may be soon.
    #[must_use]
    pub fn is_moving(&self) -> bool {
        self.intent.is_some()
            || self.back.is_some()
            || !self.reliefs.is_empty()
            || self.round.phase != Phase::Rest
            || self.looked_at.is_none()
            || self.awaits_guests()
    }

    /// Returns the names of the VMs that have a part in the division.
    fn present(&self, now: Duration) -> Vec<String> {
        self.vms.iter().filter(|(_, vm)| !vm.is_absent(now)).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the sum of what all VMs have.
    fn counted(&self, now: Duration) -> u64 {
        // To give all back, nothing need be known of a VM that never answered: it keeps what it has.
        self.counted_by(now, |vm| self.back.is_none() || vm.is_known())
    }

    /// Returns the sum of what the VMs have that `counts` names.
    fn counted_by(&self, now: Duration, counts: impl Fn(&KnownVm) -> bool) -> u64 {
        let memory = self.memory(now);
        let present = self.vms.values().filter(|vm| !vm.is_absent(now) && counts(vm));
        present.fold(0, |sum, vm| sum.saturating_add(vm.counted(memory)))
    }

    /// Returns whether all VMs have more than the total with the reserve: guests took back more than that. The host has no more.
    fn is_beyond_reserve(&self, now: Duration) -> bool {
        let reserve_bytes = self.settings.guests.map_or(0, |terms| terms.reserve_bytes);
        self.counted(now) > self.most(now).saturating_add(reserve_bytes)
    }

    fn make_plan(&mut self, at: Moment) {
        let unheard = self.unheard_lender(at.now);
        let why = unheard.map(|name| format!("it is not known yet how much of its memory the guest of {name} lends"));
        if let Some(why) = why {
            self.plan = Err(why);
            self.log.forget_proposal();
            return;
        }
        let (mut memory, most) = (self.memory(at.now), self.most(at.now));
        if self.counted(at.now) > most {
            memory.total_bytes = most;
        }
        let names = self.present(at.now);
        let subjects: Vec<Subject<'_>> = names.iter().map(|name| self.subject(at.now, name, memory)).collect();
        let plan = Plan::new(&subjects, memory, self.settings.policy);
        let moves =
            plan.as_ref().map(|plan| self.moves_of(at.now, &names, &subjects, plan, memory)).unwrap_or_default();
        self.plan = plan.map_err(|why| self.large_minimum(&names, memory).unwrap_or(why)).map(|plan| (names, plan));
        if moves.is_empty() {
            self.log.forget_proposal();
            return;
        }
        if self.settings.applies {
            if self.counted(at.now) > memory.total_bytes {
                self.keep_taken_back(at);
            }
            self.intent = Some(Intent { at_s: at.unix_s, moves });
            self.stepped_at = at.now;
        } else {
            self.log.propose(at.unix_s, &moves);
        }
    }

    /// Returns what is wrong with the file of a VM whose minimum is more than all that is divided.
    fn large_minimum(&self, names: &[String], memory: Memory) -> Option<String> {
        let minimum = |name: &String| Some((name.clone(), self.vms.get(name)?.limits().minimum_bytes));
        let (name, bytes) = names.iter().filter_map(minimum).find(|(_, bytes)| *bytes > memory.total_bytes)?;
        let (minimum, total) = (show_size(bytes), show_size(memory.total_bytes));
        Some(format!(
            "the minimum of {name} is {minimum}, more than the {total} for all VMs: lower it in the file of {name} ([memory] minimum)"
        ))
    }

    fn subject(&self, now: Duration, name: &str, memory: Memory) -> Subject<'_> {
        let vm = &self.vms[name];
        let lent = self.guests.get(name).map_or(0, KnownGuest::lent);
        vm.subject(memory, lent, self.bond(now, name, vm).as_ref())
    }

    /// Returns the reason why a VM keeps what it has, and whether it also cannot be changed at all; `None` if it is free.
    fn bond(&self, now: Duration, name: &str, vm: &KnownVm) -> Option<(String, bool)> {
        let (window, blocks) = (self.settings.window, vm.blocks_read());
        let is_unsettled = || self.guests.get(name).is_some_and(|guest| guest.is_unsettled(now, window, blocks));
        vm.bond(now, window, self.settings.readings_min, self.is_beyond_reserve(now)).or_else(|| {
            let why = "the memory of its guest changed, and its curve is still that of the former size";
            is_unsettled().then(|| (why.to_owned(), false))
        })
    }

    /// Returns the changes that a plan for `memory` asks for.
    fn moves_of(
        &self,
        now: Duration,
        names: &[String],
        subjects: &[Subject<'_>],
        plan: &Plan,
        memory: Memory,
    ) -> Vec<Move> {
        let Memory { unit_bytes: unit, total_bytes } = memory;
        // Those who have too much may be lying: nobody else gives anything before they have.
        let is_over = self.counted(now) > total_bytes;
        let may = |vm: &Subject<'_>, row: &Row| !is_over || row.target < vm.has && vm.has > row.baseline;
        let rows =
            names.iter().zip(subjects).zip(&plan.rows).filter(|((_, vm), row)| row.target != vm.has && may(vm, row));
        let change = |((name, vm), row): ((&String, &Subject<'_>), &Row)| Move {
            vm: name.clone(),
            side: Side::Tier,
            from_bytes: vm.has_bytes,
            to_bytes: row.target as u64 * unit,
            stage: Stage::Planned,
            why: self.why(now, name, row),
            miss_ratio: row.ratios.map(|(ratio, ..)| ratio),
            miss_ratio_then: row.ratios.map(|(_, then, _)| then),
        };
        rows.map(change).collect()
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
