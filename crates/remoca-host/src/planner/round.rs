//! A round: guests lend memory to their caches, the curves are observed, the caches are divided, and each guest gets back what its cache
//! still has of it (papers/hypervisor-exclusive-cache.txt, section 4.3; decision 0046).
//!
//! Each step is an intent of its own, with what is taken and what is given for it, and the next one begins when it is over.

use super::guests::{KnownGuest, SETTLED_WINDOWS};
use super::interface::{GuestRecord, GuestTerms, Moment, Phase, Round};
use super::moves::{Intent, Move, Side};
use super::{DEAD_FOR, Planner};
use crate::guest::{GuestMemory, Unusable};
use crate::plan::Memory;
use remoca_io::show::show_size;
use std::collections::BTreeMap;
use std::time::Duration;

/// Time after which the curves are divided by, whatever they say.
const OBSERVE_TIME: Duration = Duration::from_secs(600);
/// Windows, and the least time, after which no more is lent in a round, however slowly balloons follow.
const LEND_WINDOWS: u32 = 10;
const LEND_TIME_MIN: Duration = Duration::from_secs(60);
/// Number of guests without a VM that are remembered. What they had is on record, which is written before each command.
pub(super) const GONE_MAX: usize = 2000;

impl Planner {
    /// Takes what monitors of guests say. Must come before what the VM processes say at the same time.
    pub fn hear_guests(&mut self, at: Moment, all: BTreeMap<String, Result<GuestMemory, Unusable>>) {
        let window = self.settings.window;
        for (name, answer) in all {
            let guest = self.guests.entry(name).or_insert_with_key(|name| {
                let recorded = self.guests_recorded.remove(name);
                KnownGuest::new(at, window, recorded.map(|sizes| GuestRecord { gone_s: 0, ..sizes }))
            });
            guest.hear(answer);
        }
    }

    /// Notes which guests are gone. Forgets some if they are too many: first those that lack nothing, then those that went first.
    pub(super) fn note_gone(&mut self, at: Moment) {
        for (name, sizes) in &mut self.guests_recorded {
            match self.vms.contains_key(name) {
                true => sizes.gone_s = 0,
                false if sizes.gone_s == 0 => sizes.gone_s = at.unix_s,
                false => {}
            }
        }
        let gone = self.guests_recorded.iter().filter(|(name, _)| !self.vms.contains_key(*name));
        let mut gone: Vec<_> = gone.map(|(name, sizes)| (sizes.lacks(), sizes.gone_s, name.clone())).collect();
        gone.sort();
        for (.., name) in &gone[..gone.len().saturating_sub(GONE_MAX)] {
            self.guests_recorded.remove(name);
        }
    }

    /// Returns what must outlive the daemon about guests.
    pub(super) fn guest_records(&self) -> BTreeMap<String, GuestRecord> {
        let known = self.guests.iter().filter_map(|(name, guest)| Some((name.clone(), guest.sizes?)));
        let mut all = self.guests_recorded.clone();
        all.extend(known);
        // A guest from which nothing was taken begins anew when it comes back.
        all.retain(|name, sizes| sizes.lacks() || self.guests.contains_key(name));
        all
    }

    /// Returns the sum of what guests have lent, as the host has seen it.
    pub(super) fn lent(&self, now: Duration) -> u64 {
        self.lent_by(|name| self.is_there(now, name))
    }

    /// Returns what of that the host does not see now, because a VM process does not answer, or does not see the memory of its guest.
    pub(super) fn lent_unseen(&self, now: Duration) -> u64 {
        let is_unseen = |name: &str| self.vms[name].silent.is_some() || self.guests[name].is_unseen();
        self.lent_by(|name| self.is_there(now, name) && is_unseen(name))
    }

    /// Returns the sum of what the guests have lent whose VM `counts`.
    pub(super) fn lent_by(&self, counts: impl Fn(&str) -> bool) -> u64 {
        let lent = self.guests.iter().filter(|(name, _)| counts(name)).map(|(_, guest)| guest.lent());
        lent.fold(0, u64::saturating_add)
    }

    /// Returns whether the VM of a guest has a part in the division.
    pub(super) fn is_there(&self, now: Duration, name: &str) -> bool {
        self.vms.get(name).is_some_and(|vm| !vm.is_absent(now))
    }

    /// Returns what guests lent to a former daemon that were not looked at from both sides by this one yet, and the first of them. Caches are
    /// not cut for that for a while after the start: a monitor or a VM process may just be late.
    pub(super) fn unheard(&self, now: Duration) -> (Option<&str>, u64) {
        if now >= DEAD_FOR || self.settings.guests.is_none() {
            return (None, 0);
        }
        // Caches give up what the guest of a VM lent that is gone.
        let lends = |name: &String, guest: &KnownGuest| {
            guest.taken() > 0 && self.is_there(now, name) && !self.vms[name].is_dead()
        };
        let is_unheard = |guest: &KnownGuest| guest.memory.is_none() || guest.resident.is_none();
        let unheard: Vec<_> =
            self.guests.iter().filter(|(name, guest)| lends(name, guest) && is_unheard(guest)).collect();
        let taken = unheard.iter().fold(0, |sum: u64, (_, guest)| sum.saturating_add(guest.taken()));
        (unheard.first().map(|(name, _)| name.as_str()), taken)
    }

    /// Returns the most that all VMs may have: what is divided now, and what late guests lent.
    pub(super) fn most(&self, now: Duration) -> u64 {
        self.memory(now).total_bytes.saturating_add(self.unheard(now).1)
    }

    /// Returns a late guest if caches would be cut for nothing but what such guests lend.
    pub(super) fn unheard_lender(&self, now: Duration) -> Option<&str> {
        let counted = self.counted(now);
        let is_for_them = counted > self.memory(now).total_bytes && counted <= self.most(now);
        self.unheard(now).0.filter(|_| is_for_them)
    }

    /// Returns what is divided now: the total without the reserve, with what guests have lent.
    pub(super) fn memory(&self, now: Duration) -> Memory {
        let memory = self.settings.memory();
        let reserve_bytes = self.settings.guests.map_or(0, |terms| terms.reserve_bytes);
        let total_bytes = memory.total_bytes.saturating_sub(reserve_bytes).saturating_add(self.lent(now));
        Memory { total_bytes, unit_bytes: self.unit_bytes.max(memory.unit_bytes) }
    }

    /// Fits units to what there is to divide, after another step of lending too. Between rounds they become smaller again. Curves that were
    /// asked for in other units are forgotten.
    pub(super) fn fit_unit(&mut self, now: Duration) {
        let there = self.guests.iter().filter(|(name, _)| self.is_there(now, name));
        let steps = there.map(|(name, guest)| guest.step_max(&self.vms[name].limits(), self.unit_bytes));
        let lent = self.settings.total_bytes.saturating_add(self.lent(now));
        let most = steps.fold(lent, u64::saturating_add);
        let is_between = self.intent.is_none() && self.round.phase == Phase::Rest;
        let is_too_large = is_between && super::unit_of(most.saturating_add(most / 2)) < self.unit_bytes;
        let unit_bytes = super::unit_of(most);
        if unit_bytes > self.unit_bytes || is_too_large {
            (self.unit_bytes, self.grid_bytes) = (unit_bytes, most);
            self.vms.values_mut().for_each(super::vm::KnownVm::forget_curve);
            self.plan = Err("the curves are asked for once more, at other sizes".into());
            self.looked_at = None;
        }
        self.grid_bytes = most.max(self.grid_bytes);
    }

    /// Returns the unit in which memory goes back to guests, however much they have lent.
    pub(super) fn small_unit(&self) -> u64 {
        self.settings.memory().unit_bytes
    }

    /// Returns how much more the host may see in a guest that has followed. It is the same in all phases: units of what is divided become
    /// smaller after a round, and guests would seem to have taken the difference back.
    pub(super) fn slack(&self) -> u64 {
        self.small_unit()
    }

    /// Decides what comes next when nothing is under way.
    pub(super) fn go_on(&mut self, at: Moment) {
        if let Some(plans) = self.back {
            self.go_back(at, plans);
            return;
        }
        let Some(terms) = self.settings.guests.filter(|_| self.settings.applies) else {
            self.make_plan(at);
            return;
        };
        let is_over = self.counted(at.now) > self.memory(at.now).total_bytes;
        if is_over {
            self.make_plan(at);
            if self.intent.is_some() || self.unheard(at.now).0.is_some() {
                return;
            }
        }
        let passed = self.passed(at);
        match self.round.phase {
            Phase::Rest if passed >= terms.rest && !is_over && self.could_begin(at) => {
                self.enter(at, Phase::Lend);
                // The sizes of the former plan are not those that tiers get from now on.
                self.plan = Err("guests lend memory to their caches".into());
                self.lend(at);
            }
            Phase::Rest => self.make_plan(at),
            // Somebody took memory back: caches give that first, and the others go on.
            Phase::Lend if is_over && !self.lends_too_long(at) => self.stop_asking_takers(at),
            Phase::Lend => self.lend(at),
            Phase::Observe => {
                self.plan = Err(format!("the curves are observed, for {} s so far", passed.as_secs()));
                // A daemon does not know what changed before it came.
                let is_settled = passed >= SETTLED_WINDOWS * self.settings.window && self.has_observed(at);
                if is_settled || passed >= OBSERVE_TIME {
                    self.enter(at, Phase::Divide);
                    self.go_on(at);
                }
            }
            Phase::Divide => {
                self.enter(at, Phase::Return);
                self.make_plan(at);
            }
            Phase::Return => self.give_back(at),
            Phase::End => self.enter(at, Phase::Rest),
        }
    }

    /// Returns how long the phase has lasted. A clock that is set while this daemon runs changes nothing.
    pub(super) fn passed(&self, at: Moment) -> Duration {
        let (then, before) = self.phase_began.unwrap_or((at.now, self.passed_before(at)));
        before.saturating_add(at.now.saturating_sub(then))
    }

    /// Notes how long the phase has lasted when this daemon begins.
    pub(super) fn note_phase(&mut self, at: Moment) {
        if self.phase_began.is_none() {
            self.phase_began = Some((at.now, self.passed_before(at)));
            self.round.since_s = self.round.since_s.min(at.unix_s);
        }
    }

    fn passed_before(&self, at: Moment) -> Duration {
        Duration::from_secs(at.unix_s.saturating_sub(self.round.since_s))
    }

    pub(super) fn enter(&mut self, at: Moment, phase: Phase) {
        self.round = Round { phase, since_s: at.unix_s };
        self.phase_began = Some((at.now, Duration::ZERO));
        let lent = show_size(self.lent(at.now));
        match phase {
            Phase::Lend => self.log.note(at.unix_s, "a round begins: guests lend memory to their caches".into()),
            Phase::Observe => self.log.note(at.unix_s, format!("guests have lent {lent}: the curves are observed")),
            Phase::Rest => self.log.note(at.unix_s, format!("the round is over: caches keep {lent} of guest memory")),
            Phase::Divide | Phase::Return | Phase::End => {}
        }
    }

    /// Returns whether some guest can lend something.
    fn could_begin(&self, at: Moment) -> bool {
        let unit = self.memory(at.now).unit_bytes;
        let could = |(name, guest): (&String, &KnownGuest)| {
            let limits = self.lender(at.now, name)?;
            guest.next_step(at, &limits, unit)
        };
        self.guests.iter().any(|guest| could(guest).is_some())
    }

    /// Returns whether a round may be possible as soon as guests have told of their memory.
    pub(super) fn awaits_guests(&self) -> bool {
        let has_rounds = self.settings.guests.is_some_and(|terms| terms.rest != GuestTerms::NO_ROUNDS.rest);
        has_rounds && self.guests.iter().any(|(name, guest)| self.vms.contains_key(name) && guest.may_tell_soon())
    }

    /// Returns the limits of a VM whose cache can take what its guest lends, and give it back; `None` if it cannot.
    fn lender(&self, now: Duration, name: &str) -> Option<crate::limits::Limits> {
        let vm = self.vms.get(name).filter(|vm| vm.silent.is_none())?;
        let is_not_asked = vm.ignored_until.is_some_and(|until| now < until);
        let is_fixed = vm.reading.as_ref().is_none_or(|reading| reading.fixed.is_some());
        vm.limits.filter(|_| !is_not_asked && !is_fixed)
    }

    fn lends_too_long(&self, at: Moment) -> bool {
        self.passed(at) >= LEND_TIME_MIN.max(LEND_WINDOWS * self.settings.window)
    }

    /// Returns the guests that took back something of what they had lent, and how much. One whose balloon is being told something is not
    /// among them: it would count as told of more than that when it has followed.
    fn takers(&self) -> Vec<(String, u64)> {
        let slack = self.slack();
        let is_told = |name: &str| self.reliefs.iter().any(|relief| relief.vm == name);
        let free = self.guests.iter().filter(|(name, _)| !is_told(name));
        let takers = free.map(|(name, guest)| (name.clone(), guest.taken_back(slack)));
        takers.filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// Lets a guest keep what it took back: else it would be a taker for ever, and never lend again.
    fn let_keep(&mut self, name: &str, bytes: u64) {
        if let Some(guest) = self.guests.get_mut(name) {
            guest.ask_at_least(guest.sizes.unwrap_or_default().asked_bytes.saturating_add(bytes));
            guest.note_untold(true);
        }
    }

    /// Asks nothing for some windows of guests that took back what they had lent.
    fn stop_asking_takers(&mut self, at: Moment) {
        for (name, bytes) in self.takers() {
            self.stop_asking(at, &name, "it took back memory that it had lent".into());
            self.let_keep(&name, bytes);
        }
    }

    /// Lets guests keep what they took back, when caches are cut. One that lets it go and takes it again would have them divided anew each
    /// time: so it lends that in another round only.
    pub(super) fn keep_taken_back(&mut self, at: Moment) {
        if self.round.phase == Phase::Lend {
            // Nor does it lend the rest in this round, and a step may be the next thing that it is asked for.
            self.stop_asking_takers(at);
            return;
        }
        for (name, bytes) in self.takers() {
            self.let_keep(&name, bytes);
            let taken = show_size(bytes);
            self.log
                .note(at.unix_s, format!("the guest of {name} took back {taken}: caches are cut, and it keeps that"));
        }
    }

    /// Begins a step in which guests lend memory to their caches. Ends lending if none does. One that is short of memory comes first.
    pub(super) fn lend(&mut self, at: Moment) {
        self.return_own(at);
        if self.intent.is_some() {
            return;
        }
        let memory = self.memory(at.now);
        self.stop_asking_takers(at);
        let is_late = self.lends_too_long(at);
        let names: Vec<String> = self.guests.keys().filter(|_| !is_late).cloned().collect();
        let mut moves = Vec::new();
        for name in names {
            let Some(limits) = self.lender(at.now, &name) else { continue };
            let has = self.vms[&name].counted(memory);
            let Some(guest) = self.guests.get_mut(&name) else { continue };
            let Some(to) = guest.next_step(at, &limits, memory.unit_bytes) else { continue };
            guest.rebase();
            let from = guest.memory.as_ref().map_or(to, |memory| memory.actual_bytes);
            let grown = has.next_multiple_of(memory.unit_bytes).saturating_add(from - to);
            let why = "its guest lends memory to its cache for this round, to show what it reads with less".to_owned();
            moves.push(exchange(&name, Side::Guest, from, to, &why));
            moves.push(exchange(&name, Side::Tier, has, grown, &why));
        }
        self.stepped_at = at.now;
        if moves.is_empty() {
            self.enter(at, Phase::Observe);
        } else {
            self.intent = Some(Intent { at_s: at.unix_s, moves });
        }
    }

    /// Returns whether the curve of each VM whose guest lends says something.
    fn has_observed(&self, at: Moment) -> bool {
        let lends = |name: &&String| self.guests.get(*name).is_some_and(|guest| guest.lent() > 0);
        self.vms.keys().filter(lends).all(|name| self.bond(at.now, name, &self.vms[name]).is_none())
    }

    /// Begins to give memory back to guests, as far as their caches still have it.
    fn give_back(&mut self, at: Moment) {
        // What nobody has goes back too.
        let mut spare = self.memory(at.now).total_bytes.saturating_sub(self.counted(at.now));
        let mut moves = Vec::new();
        for (name, guest) in &self.guests {
            let (Some((has, kept)), Some(sizes)) = (self.own_back(at.now, name), guest.sizes) else { continue };
            let Some(actual) = guest.memory.as_ref().map(|memory| memory.actual_bytes) else { continue };
            if guest.bond(at.now).is_some() {
                continue;
            }
            let (back, owed) = (has - kept, sizes.base_bytes.saturating_sub(guest.has()));
            let why = "its guest gets back what its cache still has of it".to_owned();
            if back > 0 {
                moves.push(exchange(name, Side::Tier, has, kept, &why));
            }
            let more = spare.min(owed.saturating_sub(back));
            spare -= more;
            // It may also have less than it was asked to have.
            let to = guest.has().saturating_add(back).saturating_add(more).min(sizes.base_bytes);
            if to > actual {
                moves.push(exchange(name, Side::Guest, actual, to, &why));
            }
        }
        self.enter(at, Phase::End);
        self.stepped_at = at.now;
        self.intent = Some(Intent { at_s: at.unix_s, moves }).filter(|intent| !intent.is_over());
    }

    /// Returns what the cache of a VM has, and what it keeps if its guest gets back all that is still there of it. `None` if it cannot change.
    pub(super) fn own_back(&self, now: Duration, name: &str) -> Option<(u64, u64)> {
        let (limits, guest) = (self.lender(now, name)?, self.guests.get(name)?);
        let unit = self.small_unit();
        let has = self.vms[name].counted(self.memory(now));
        let least = limits.minimum_bytes.max(unit);
        let owed = guest.sizes?.base_bytes.saturating_sub(guest.has());
        let kept = has - has.saturating_sub(least).min(owed);
        Some((has, kept.next_multiple_of(unit).min(has)))
    }
}

pub(super) fn exchange(vm: &str, side: Side, from_bytes: u64, to_bytes: u64, why: &str) -> Move {
    Move { vm: vm.into(), side, from_bytes, to_bytes, why: why.into(), ..Move::default() }
}
