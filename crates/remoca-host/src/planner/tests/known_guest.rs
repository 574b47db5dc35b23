//! What one guest says and has, and what follows from that alone.

use super::world::UNIT;
use crate::guest::{GuestMemory, Pressure, Unusable};
use crate::limits::Limits;
use crate::planner::guests::KnownGuest;
use crate::planner::{GuestRecord, Moment};
use std::time::Duration;

const HOME: u64 = 128 * UNIT;
const WINDOW: Duration = Duration::from_secs(60);
const START: Moment = Moment { now: Duration::ZERO, unix_s: 1_000_000 };

fn memory(actual_bytes: u64) -> GuestMemory {
    let available_bytes = Some(actual_bytes / 2);
    GuestMemory { boot_bytes: HOME, actual_bytes, available_bytes, ..GuestMemory::default() }
}

fn guest() -> KnownGuest {
    let mut guest = KnownGuest::new(START, WINDOW, None);
    guest.hear(Ok(memory(HOME)));
    guest.hear_resident(START.now, Some(HOME));
    guest
}

fn step(guest: &KnownGuest) -> Option<u64> {
    guest.next_step(START, &Limits::default(), UNIT)
}

#[test]
fn every_sign_of_a_shortage_counts_and_keeps_a_guest_from_lending() {
    assert_eq!((guest().pressure(), step(&guest())), (None, Some(HOME - 8 * UNIT)));
    let pressure = Pressure::default();
    for (memory, sign) in [
        (GuestMemory { pressure: Pressure { swapped_in_per_s: Some(50.1), ..pressure }, ..memory(HOME) }, "swaps in"),
        (GuestMemory { pressure: Pressure { major_faults_per_s: Some(201.), ..pressure }, ..memory(HOME) }, "faults"),
        (GuestMemory { available_bytes: Some(HOME / 16 - 1), ..memory(HOME) }, "is available"),
    ] {
        let mut guest = guest();
        guest.hear(Ok(memory));
        assert!(guest.pressure().unwrap().contains(sign), "{:?}", guest.pressure());
        assert_eq!(step(&guest), None);
    }
    let mut waits = guest();
    waits.hear_waits(START.now, Some(10.1));
    assert!(waits.pressure().unwrap().contains("tasks wait"));
    // Its VM process says nothing from now on.
    for (seconds, is_short) in [(14, true), (15, false)] {
        waits.note_silence(Duration::from_secs(seconds));
        assert_eq!(waits.pressure().is_some(), is_short, "{seconds}");
    }
    let mut needs = guest();
    needs.hear(Ok(GuestMemory { available_bytes: Some(HOME / 16 + 8 * UNIT - 1), ..memory(HOME) }));
    assert_eq!((needs.pressure(), step(&needs)), (None, None), "its programs use what it would give");
}

#[test]
fn a_round_takes_three_quarters_of_the_way_to_the_minimum() {
    let limits = Limits { guest_minimum_bytes: Some(28 * UNIT), ..Limits::default() };
    assert_eq!((guest().could_lend(&limits), guest().could_lend(&Limits::default())), (75 * UNIT, 48 * UNIT));
}

#[test]
fn a_guest_that_does_not_tell_what_is_available_lends_nothing() {
    let mut mute = guest();
    mute.hear(Ok(GuestMemory { available_bytes: None, ..memory(HOME) }));
    assert_eq!((step(&mute), mute.could_lend(&Limits::default()), mute.bond(START.now)), (None, 0, None));
    assert!(mute.held().unwrap().contains("does not tell"));
    mute.hear(Ok(memory(HOME)));
    assert_eq!((step(&mute), mute.held()), (Some(HOME - 8 * UNIT), None));
}

#[test]
fn a_guest_that_comes_with_less_from_each_host_is_not_taken_below_half_of_its_boot() {
    let mut has = HOME;
    for _ in 0..10 {
        let mut guest = KnownGuest::new(START, WINDOW, None);
        guest.hear(Ok(memory(has)));
        has -= guest.could_lend(&Limits::default());
    }
    assert!((HOME / 2..HOME / 2 + UNIT).contains(&has), "{has}");
    // Somebody else has taken more than that.
    let mut guest = KnownGuest::new(START, WINDOW, None);
    guest.hear(Ok(memory(HOME / 4)));
    assert_eq!((guest.minimum(&Limits::default()), guest.could_lend(&Limits::default())), (HOME / 2, 0));
}

#[test]
fn a_step_that_was_planned_is_not_made_if_the_guest_got_more_or_is_spared() {
    let sizes = GuestRecord { home_bytes: HOME, base_bytes: HOME, asked_bytes: 72 * UNIT, ..GuestRecord::default() };
    let objection = |sizes: GuestRecord, memory: GuestMemory| {
        let mut guest = KnownGuest::new(START, WINDOW, Some(sizes));
        guest.hear(Ok(memory));
        guest.objection(START, 80 * UNIT)
    };
    for actual in [72, 76, 80] {
        assert_eq!(objection(sizes, memory(actual * UNIT)), None);
    }
    let spared = GuestRecord { spared_until_s: START.unix_s + 90, ..sizes };
    for (sizes, memory) in [
        (sizes, memory(81 * UNIT)),
        (GuestRecord { asked_bytes: 81 * UNIT, ..sizes }, memory(72 * UNIT)),
        (spared, memory(72 * UNIT)),
        (GuestRecord { is_untold: true, ..sizes }, memory(72 * UNIT)),
        (sizes, GuestMemory { available_bytes: None, ..memory(72 * UNIT) }),
        (sizes, GuestMemory { held: Some("it is migrating".into()), ..memory(72 * UNIT) }),
    ] {
        assert!(objection(sizes, memory.clone()).is_some(), "{sizes:?} {memory:?}");
    }
}

/// A balloon that was asked for as much already may be on its way, whoever asked.
#[test]
fn what_a_guest_was_asked_for_is_known_of_both_directions() {
    let mut guest = guest();
    guest.ask(100 * UNIT);
    let [less, same, more] = [90, 100, 110].map(|units| units * UNIT);
    assert_eq!([less, same, more].map(|bytes| guest.was_asked(true, bytes)), [false, true, true]);
    assert_eq!([less, same, more].map(|bytes| guest.was_asked(false, bytes)), [true, true, false]);
}

#[test]
fn what_somebody_else_took_is_not_lent() {
    let mut guest = guest();
    guest.hear(Ok(memory(100 * UNIT)));
    guest.hear_resident(START.now, Some(100 * UNIT));
    guest.rebase();
    assert_eq!((guest.taken(), guest.lent()), (0, 0));
    guest.ask(92 * UNIT);
    guest.hear(Ok(memory(80 * UNIT)));
    guest.hear_resident(START.now, Some(80 * UNIT));
    assert_eq!((guest.taken(), guest.lent()), (8 * UNIT, 8 * UNIT), "20 units went, and 8 were asked for");
    guest.rebase();
    assert_eq!((guest.taken(), guest.lent()), (8 * UNIT, 8 * UNIT), "it is still lent if the next step is dropped");
    guest.ask(72 * UNIT);
    guest.hear(Ok(memory(72 * UNIT)));
    guest.hear_resident(START.now, Some(72 * UNIT));
    assert_eq!((guest.taken(), guest.lent()), (16 * UNIT, 16 * UNIT));
}

#[test]
fn what_somebody_else_took_from_a_guest_that_lends_is_no_longer_its_own() {
    let asked_bytes = 100 * UNIT;
    let sizes = GuestRecord { home_bytes: HOME, base_bytes: HOME, asked_bytes, ..GuestRecord::default() };
    let mut guest = KnownGuest::new(START, WINDOW, Some(sizes));
    let mut looks = |actual: u64, resident: u64, is_moving: bool, count: u32| {
        for _ in 0..count {
            guest.hear(Ok(memory(actual * UNIT)));
            guest.hear_resident(START.now, Some(resident * UNIT));
            guest.note_shrunk(is_moving, UNIT);
        }
        let sizes = guest.sizes.unwrap();
        (sizes.base_bytes / UNIT, sizes.asked_bytes / UNIT, guest.lent() / UNIT)
    };
    assert_eq!(looks(80, 80, false, 3), (128, 100, 28), "its balloon may not have followed yet");
    assert_eq!(looks(100, 100, false, 1), (128, 100, 28));
    assert_eq!(looks(80, 80, true, 3), (128, 100, 28), "it is told something");
    assert_eq!(looks(80, 100, false, 3), (128, 100, 28), "the host sees nothing of that");
    assert_eq!(looks(90, 90, false, 1), (128, 100, 28));
    assert_eq!(looks(80, 80, false, 1), (128, 100, 28), "it may go on");
    assert_eq!(looks(80, 80, false, 1), (108, 80, 28));
    assert_eq!(looks(80, 80, false, 3), (108, 80, 28));
}

/// A size may be read while it changes, and count for twelve seconds if the monitor is late.
#[test]
fn one_answer_is_no_sign_that_somebody_else_took_memory_however_many_looks_hear_it() {
    let (mut guest, asked_bytes) = (guest(), 100 * UNIT);
    guest.ask(asked_bytes);
    let mut looks = |actual: u64, is_repeated: bool| {
        guest.hear(Ok(GuestMemory { is_repeated, ..memory(actual * UNIT) }));
        guest.hear_resident(START.now, Some(40 * UNIT));
        guest.note_shrunk(false, UNIT);
        guest.sizes.unwrap().base_bytes / UNIT
    };
    for (actual, is_repeated) in [(100, false), (60, false), (60, true), (60, true)] {
        assert_eq!(looks(actual, is_repeated), 128);
    }
    assert_eq!(looks(60, false), 88, "a second answer");
}

#[test]
fn what_somebody_else_gave_is_its_own() {
    let enlarged = GuestMemory { boot_bytes: 2 * HOME, ..memory(HOME + 12 * UNIT) };
    let mut guest = guest();
    guest.rebase();
    guest.ask(100 * UNIT);
    guest.hear(Ok(enlarged));
    assert_eq!(guest.has(), HOME + 12 * UNIT);
    // A guest can say anything: it lends nothing of what the host has not seen in it.
    assert_eq!(step(&guest), None);
    guest.hear_resident(START.now, Some(HOME + 12 * UNIT));
    assert_eq!(step(&guest), Some(HOME + 4 * UNIT));
    guest.rebase();
    guest.ask(HOME + 4 * UNIT);
    assert_eq!(guest.taken(), 8 * UNIT, "it gets back all that it had");
}

#[test]
fn memory_that_a_vm_process_does_not_see_counts_for_a_minute() {
    let mut guest = guest();
    let at = |seconds| Duration::from_secs(seconds);
    guest.hear_resident(at(1), None);
    guest.hear_resident(at(60), None);
    assert_eq!((guest.resident, guest.bond(at(60))), (Some(HOME), None));
    guest.hear_resident(at(61), None);
    assert_eq!((guest.resident, guest.lent()), (None, 0));
    assert!(guest.bond(at(61)).unwrap().contains("does not see"));
}

#[test]
fn what_is_on_record_of_a_guest_that_is_not_asked_is_believed_for_ten_windows() {
    let sizes = GuestRecord { home_bytes: HOME, base_bytes: HOME, asked_bytes: HOME, ..GuestRecord::default() };
    let ends = |sizes: GuestRecord| {
        let mut guest = KnownGuest::new(START, WINDOW, Some(sizes));
        guest.hear(Ok(memory(HOME)));
        guest.hear_resident(START.now, Some(HOME));
        let at = |seconds| Moment { now: Duration::from_secs(seconds), ..START };
        (0..2000).find(|seconds| guest.next_step(at(*seconds), &Limits::default(), UNIT).is_some())
    };
    assert_eq!(ends(sizes), Some(0));
    assert_eq!(ends(GuestRecord { left_until_s: START.unix_s + 90, ..sizes }), Some(90));
    assert_eq!(ends(GuestRecord { left_until_s: u64::MAX, ..sizes }), Some(600));
    assert_eq!(ends(GuestRecord { spared_until_s: START.unix_s + 90, ..sizes }), Some(90));
    assert_eq!(ends(GuestRecord { is_untold: true, ..sizes }), None);
}

#[test]
fn a_vm_process_that_was_started_again_counts_its_reads_anew() {
    let mut guest = guest();
    guest.note_change(START.now, 1 << 30);
    let later = START.now + 10 * WINDOW;
    let is_unsettled = |blocks_read| guest.is_unsettled(later, WINDOW, blocks_read);
    assert_eq!([(1 << 30) + 1023, (1 << 30) + 1024, 1023, 1024].map(is_unsettled), [true, false, true, false]);
}

#[test]
fn a_guest_whose_monitor_falls_silent_is_not_taken_to_leave_any_longer() {
    let mut guest = guest();
    let leaving = GuestMemory { held: Some("it is migrating".into()), leaves: true, ..memory(HOME) };
    guest.hear(Ok(leaving.clone()));
    assert!(guest.leaves());
    guest.hear(Err(Unusable::Silent("its monitor did not answer".into())));
    assert!(!guest.leaves(), "it may have come back, or be gone");
    guest.hear(Ok(leaving));
    assert!(guest.leaves());
}

#[test]
fn what_a_guest_took_back_is_more_than_the_host_may_see_in_one_that_followed_or_a_page_by_its_own_word() {
    let asked_bytes = 100 * UNIT - 1;
    let sizes = GuestRecord { home_bytes: HOME, base_bytes: HOME, asked_bytes, ..GuestRecord::default() };
    let taken_back = |actual: u64, resident: u64| {
        let mut guest = KnownGuest::new(START, WINDOW, Some(sizes));
        guest.hear(Ok(memory(actual)));
        guest.hear_resident(START.now, Some(resident));
        guest.taken_back(UNIT)
    };
    for (actual, resident, expected) in [
        (99 * UNIT, 99 * UNIT, 0),
        // The balloon leaves whole pages.
        (100 * UNIT, 100 * UNIT, 0),
        (100 * UNIT, asked_bytes + UNIT, 0),
        (100 * UNIT, asked_bytes + UNIT + 4096, UNIT + 4096),
        (asked_bytes + 4096, 99 * UNIT, 4096),
        (asked_bytes + 4096, asked_bytes + UNIT, 4096),
        (asked_bytes + 4096, asked_bytes + 2 * UNIT, 2 * UNIT),
        (HOME, HOME, HOME - asked_bytes),
    ] {
        assert_eq!(taken_back(actual, resident), expected, "{actual} {resident}");
    }
}

#[test]
fn a_guest_that_lends_nothing_now_says_why_and_for_how_long() {
    let mut guest = guest();
    guest.note_relief(START, 10 * WINDOW, true);
    for (passed_s, expected) in
        [(0, Some("lends nothing for 10 min")), (599, Some("lends nothing for 1 s")), (600, None)]
    {
        let now = Duration::from_secs(passed_s);
        let why = guest.objection(Moment { now, unix_s: START.unix_s + passed_s }, HOME);
        assert_eq!(why.is_some(), expected.is_some(), "{passed_s}: {why:?}");
        assert!(why.is_none_or(|why| why.ends_with(expected.unwrap_or_default())), "{passed_s}");
    }
    guest.note_untold(true);
    let later = Moment { now: 10 * WINDOW, unix_s: START.unix_s + 600 };
    assert!(guest.objection(later, HOME).unwrap().contains("an earlier size"));
}

#[test]
fn a_step_is_a_sixteenth_of_the_guest_and_at_most_64_mib_but_a_unit_if_that_is_more() {
    let large = 4096 * UNIT;
    let mut of_large = KnownGuest::new(START, WINDOW, None);
    let available_bytes = Some(large / 2);
    of_large.hear(Ok(GuestMemory { boot_bytes: large, available_bytes, ..memory(large) }));
    of_large.hear_resident(START.now, Some(large));
    assert_eq!(step(&of_large), Some(large - (64 << 20)));
    let with_unit = |units: u64| guest().next_step(START, &Limits::default(), units * UNIT);
    assert_eq!([16, 48].map(with_unit), [Some(HOME - 16 * UNIT), Some(HOME - 48 * UNIT)]);
    assert_eq!(with_unit(64), None, "it is more than it lends in a round");
}

#[test]
fn no_more_is_a_guests_own_than_it_has_at_boot() {
    let mut guest = guest();
    guest.hear_resident(START.now, Some(2 * HOME));
    assert_eq!(guest.sizes.unwrap().home_bytes, HOME);
    guest.rebase();
    guest.ask(100 * UNIT);
    // It is booted with less.
    guest.hear(Ok(GuestMemory { boot_bytes: 64 * UNIT, ..memory(64 * UNIT) }));
    let sizes = guest.sizes.unwrap();
    assert_eq!((sizes.home_bytes, sizes.base_bytes), (64 * UNIT, 64 * UNIT));
    assert_eq!((guest.taken(), guest.lent(), guest.missing()), (0, 0, None));
    assert_eq!(guest.has(), 64 * UNIT);
}
