//! All guests get all of their memory back, because the operator wants it: tiers shrink first, then balloons are told.
//!
//! 1. Neither curves nor windows count, and a balloon that is otherwise not asked now is told as well.
//! 2. What guests lend leaves the tiers: first that of the guest itself, then all others by what they have above their minimum. A guest
//!    gets what was seen to come back, or nobody has.

use super::Planner;
use super::guests::KnownGuest;
use super::interface::{GuestTerms, Moment, Phase};
use super::moves::{Intent, Move, Side};
use super::round::exchange;
use crate::guest::Unusable;
use std::collections::BTreeMap;
use std::time::Duration;

/// Number of plans that are made for it: what cannot be done then has its reason in the report.
const PLANS_MAX: u32 = 3;
const WHY: &str = "all guests get their memory back, as the operator wants it";

impl Planner {
    /// Has all guests get their memory back from the next look on.
    pub fn ask_back(&mut self) {
        if self.back.is_none() {
            self.back = Some(0);
            self.settings.guests.get_or_insert(GuestTerms::NO_ROUNDS);
            self.looked_at = None;
        }
    }

    /// Returns whether the memory of guests is looked at.
    #[must_use]
    pub fn has_guests(&self) -> bool {
        self.settings.guests.is_some()
    }

    /// Returns whether guests are getting all of their memory back.
    #[must_use]
    pub fn gives_back(&self) -> bool {
        self.back.is_some()
    }

    /// Ends what is under way when guests are to get all back. A former daemon's plan is not carried out either.
    pub(super) fn begin_back(&mut self, at: Moment) {
        if self.back != Some(0) {
            return;
        }
        self.intent = self.inherited.take().or_else(|| self.intent.take());
        let names: Vec<String> =
            self.intent.iter().flat_map(|intent| &intent.moves).map(|change| change.vm.clone()).collect();
        for name in names {
            // Memory of its guest goes with it.
            self.drop_move(at, &name, Side::Tier, WHY);
        }
        self.intent = None;
        // Nobody lends again, not even if a successor ends it.
        self.enter(at, Phase::End);
        if self.settings.total_bytes == 0 {
            let used = self.counted(at.now).saturating_sub(self.lent_at_most(at.now));
            self.settings.total_bytes = used.max(self.known_total);
        }
    }

    /// Returns the sum of what guests lend. One that was not looked at from both sides yet counts with all that was taken from it.
    fn lent_at_most(&self, now: Duration) -> u64 {
        let of = |guest: &KnownGuest| match (&guest.memory, guest.resident) {
            (Some(_), Some(_)) => guest.lent(),
            _ => guest.taken(),
        };
        self.guests
            .iter()
            .filter(|(name, _)| self.is_there(now, name))
            .map(|(_, guest)| of(guest))
            .fold(0, u64::saturating_add)
    }

    /// Returns whether a guest may still get some of its memory back, if its monitor or its VM process answers.
    fn is_awaited(&self, now: Duration) -> bool {
        let is_silent = |guest: &KnownGuest| matches!(guest.unusable, Some(Unusable::Silent(_)));
        let is_less = |guest: &KnownGuest| guest.taken() > 0 || guest.is_untold();
        self.guests.iter().any(|(name, guest)| self.is_there(now, name) && is_silent(guest) && is_less(guest))
    }

    /// Begins what is left to do. Ends it if that is nothing, and no guest is awaited.
    pub(super) fn go_back(&mut self, at: Moment, plans: u32) {
        let moves = if plans < PLANS_MAX { self.moves_back(at) } else { Vec::new() };
        if plans == 0 {
            self.log.note(at.unix_s, WHY.into());
        }
        if moves.is_empty() && (plans >= PLANS_MAX || !self.is_awaited(at.now)) {
            self.back = None;
            self.enter(at, Phase::Rest);
            return;
        }
        self.back = Some(plans + 1);
        self.stepped_at = at.now;
        self.intent = Some(Intent { at_s: at.unix_s, moves }).filter(|intent| !intent.is_over());
    }

    fn moves_back(&self, at: Moment) -> Vec<Move> {
        let (memory, unit) = (self.memory(at.now), self.small_unit());
        let is_less = |guest: &KnownGuest| guest.unusable.is_none() && guest.missing().is_some();
        let guests: Vec<_> =
            self.guests.iter().filter(|(name, guest)| self.vms.contains_key(*name) && is_less(guest)).collect();
        let lent = guests.iter().fold(0_u64, |sum, (_, guest)| sum.saturating_add(guest.lent()));
        let mut need = self.counted(at.now).saturating_sub(memory.total_bytes.saturating_sub(lent));
        // What each VM has, and what of that can be taken.
        let mut tiers: BTreeMap<&String, (u64, u64)> = BTreeMap::new();
        for (name, vm) in &self.vms {
            let is_fixed = vm.reading.as_ref().is_none_or(|reading| reading.fixed.is_some());
            // One whose file could never be read may have a minimum.
            let Some(limits) = &vm.limits else { continue };
            if vm.silent.is_none() && !is_fixed {
                let has = vm.counted(memory);
                let least = limits.minimum_bytes.checked_next_multiple_of(unit).unwrap_or(u64::MAX).max(unit);
                tiers.insert(name, (has, has.saturating_sub(least)));
            }
        }
        let mut cuts: BTreeMap<&String, u64> = BTreeMap::new();
        for (name, guest) in &guests {
            let cut = tiers.get(name).map_or(0, |(_, spare)| guest.lent().min(*spare)).min(need);
            need -= cut;
            cuts.insert(name, cut);
        }
        let left = |name: &String, spare: u64| spare - cuts.get(name).copied().unwrap_or_default();
        let spare = tiers.iter().fold(0_u128, |sum, (name, (_, spare))| sum + u128::from(left(name, *spare)));
        let mut moves = Vec::new();
        for (name, (has, most)) in &tiers {
            let left = left(name, *most);
            let share = (u128::from(need) * u128::from(left)).div_ceil(spare.max(1));
            let cut = most - left + u64::try_from(share).unwrap_or(left).min(left);
            let to = ((has - cut) / unit * unit).max(has - most);
            if to < *has {
                moves.push(exchange(name, Side::Tier, *has, to, WHY));
            }
        }
        let gives = guests.iter().filter_map(|(name, guest)| {
            let (from, to) = guest.missing()?;
            Some(exchange(name, Side::Guest, from, to, WHY))
        });
        moves.extend(gives);
        moves
    }
}
