//! What the report says of the memory of guests.

use super::guests::KnownGuest;
use super::interface::{GuestTerms, Phase};
use super::{Moment, Planner};
use crate::guest::Unusable;
use crate::limits::Limits;
use crate::text::time_left;
use remoca_io::show::show_size;
use remoca_protocol::host::{HostGuest, HostGuests};
use std::time::Duration;

impl Planner {
    pub(super) fn guests_report(&self, at: Moment, terms: GuestTerms) -> HostGuests {
        let lent_bytes = self.lent(at.now);
        let phase = match self.round.phase {
            Phase::Rest => "rest",
            Phase::Lend => "lend",
            Phase::Observe => "observe",
            Phase::Divide => "divide",
            Phase::Return | Phase::End => "return",
        };
        HostGuests {
            reserve_bytes: terms.reserve_bytes,
            lent_bytes,
            phase: phase.into(),
            state: self.round_text(at, terms.rest),
            absent: self.absent_guests(),
        }
    }

    /// Returns the names of the guests that lack memory, and whose VM process does not run.
    fn absent_guests(&self) -> Vec<String> {
        let runs = |name: &String| self.guests.contains_key(name) && self.vms.get(name).is_some_and(|vm| !vm.is_dead());
        let records = self.guest_records().into_iter();
        records.filter(|(name, sizes)| sizes.lacks() && !runs(name)).map(|(name, _)| name).collect()
    }

    /// Returns what the round is about, or when the next one comes.
    fn round_text(&self, at: Moment, rest: Duration) -> String {
        let passed = self.passed(at);
        match self.round.phase {
            Phase::Rest if !self.settings.applies => "in a round, guests would lend at most what is under COULD".into(),
            Phase::Rest if rest == GuestTerms::NO_ROUNDS.rest => "guests lend nothing".into(),
            Phase::Rest if passed >= rest => "a round begins when a guest can lend something".into(),
            Phase::Rest => format!("the next round begins in {}", time_left(rest - passed)),
            Phase::Lend => "guests lend memory to their caches".into(),
            Phase::Observe => format!("the curves are observed, for {} s so far", passed.as_secs()),
            Phase::Divide => "the caches are divided".into(),
            Phase::Return | Phase::End => "guests get back what their caches still have of theirs".into(),
        }
    }

    pub(super) fn guest_report(&self, now: Duration, limits: &Limits, guest: &KnownGuest) -> HostGuest {
        let (short, bond) = (guest.pressure(), guest.bond(now).or_else(|| guest.held()));
        let taken_bytes = guest.taken();
        let (state, why) = match (&guest.unusable, short, bond) {
            (Some(Unusable::Silent(why)), ..) => ("silent", why.clone()),
            (Some(Unusable::Advised(why)), ..) => ("advised", why.clone()),
            (None, Some(why), _) => ("short", format!("it is short of memory: {why}")),
            (None, None, Some(why)) if guest.is_not_asked(now) => ("stuck", why),
            (None, None, Some(why)) => ("advised", why),
            (None, None, None) => ("usable", lender_text(now, guest, limits)),
        };
        HostGuest {
            state: state.into(),
            home_bytes: guest.sizes.map(|sizes| sizes.home_bytes),
            guest_bytes: guest.memory.as_ref().map(|memory| memory.actual_bytes),
            resident_bytes: guest.resident,
            lent_bytes: guest.lent(),
            taken_bytes,
            could_lend_bytes: if state == "usable" { guest.could_lend(limits) } else { 0 },
            minimum_bytes: guest.minimum(limits),
            why,
        }
    }
}

/// Returns what a guest lends or could lend, and for how long it is not asked for more.
fn lender_text(now: Duration, guest: &KnownGuest, limits: &Limits) -> String {
    let could_lend = guest.could_lend(limits);
    let text = match could_lend {
        _ if guest.taken() > 0 => "it lends memory".to_owned(),
        0 if guest.is_enlarged() => {
            "it was given more memory than it had at first, and lends some when the host has seen all of that in it"
                .into()
        }
        0 => "it has too little above its minimum (guest-minimum)".into(),
        bytes => format!("it could lend {}", show_size(bytes)),
    };
    match guest.spared_for(now).filter(|_| could_lend > 0) {
        Some(left) => format!("{text}; it was told to take memory back, and is asked for none for {}", time_left(left)),
        None => text,
    }
}
