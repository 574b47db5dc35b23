//! Guests from which nothing may be taken, or that do not tell of their memory.

use super::balloon::{Guest, Manner, signed};
use super::guests::{HOME, lent_to_own, phase, run_round, run_to_the_return, short_comes_first, sizes, two};
use super::half_done::{run_into_a_step, told};
use super::world::{Nature, UNIT, World};
use crate::planner::{Phase, Side};
use remoca_protocol::host::HostGuest;
use std::time::Duration;

fn shown(world: &World) -> HostGuest {
    world.planner.report(world.at).vms[1].guest.clone().unwrap()
}

#[test]
fn a_guest_that_does_not_tell_of_its_memory_lends_nothing_and_the_report_says_why() {
    let mut world = two(170, [Manner::Honest; 2]);
    world.guest("vm1").mute_from = 0;
    run_round(&mut world, |_| {});
    assert!(world.steps.iter().any(|(_, step)| step.vm == "vm0"), "the other one does");
    assert!(told(&world, 0).is_empty(), "{:?}", world.steps);
    let guest = shown(&world);
    assert_eq!((guest.state.as_str(), guest.could_lend_bytes), ("advised", 0));
    assert!(guest.why.contains("does not tell how much memory is available"), "{}", guest.why);
}

#[test]
fn a_guest_that_was_given_more_than_the_host_has_seen_in_it_could_lend_nothing_and_says_why() {
    let mut world = two(170, [Manner::Honest; 2]);
    world.settings.applies = false;
    world.replace_daemon(Duration::ZERO);
    world.process("vm1").limits.guest_minimum_bytes = Some(HOME / 2 * UNIT);
    world.guest("vm1").boot = 2 * HOME * UNIT;
    world.run(1, |_| {});
    assert!(shown(&world).could_lend_bytes > 0, "{:?}", shown(&world));
    let guest = world.guest("vm1");
    (guest.manner, guest.target, guest.actual) = (Manner::Fresh(HOME), 2 * HOME * UNIT, 2 * HOME * UNIT);
    world.run(1, |_| {});
    let guest = shown(&world);
    assert_eq!((guest.state.as_str(), guest.could_lend_bytes), ("usable", 0));
    assert!(guest.why.contains("more memory than it had at first"), "{}", guest.why);
}

#[test]
fn no_step_follows_once_a_guest_falls_silent_or_may_not_be_taken_from() {
    for falls in [|guest: &mut Guest| guest.mute_from = 0, |guest: &mut Guest| guest.held_from = 0] {
        let mut world = two(170, [Manner::Honest; 2]);
        run_into_a_step(&mut world);
        let (steps, target) = (world.steps.len(), world.guests["vm1"].target);
        falls(world.guest("vm1"));
        run_round(&mut world, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
        let told = told(&world, steps);
        assert!(told.iter().all(|(_, bytes)| *bytes >= target), "{target}: {told:?}");
        assert!(sizes(&world)[1].0 > target / UNIT, "it gets back what its tier has: {:?}", sizes(&world));
    }
}

#[test]
fn a_guest_that_may_not_be_taken_from_is_helped_and_gets_all_back() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let lent = HOME - sizes(&world)[1].0;
    assert!(lent > 20, "{:?}", sizes(&world));
    let guest = world.guest("vm1");
    (guest.held_from, guest.manner) = (0, Manner::Short(0, u32::MAX));
    let steps = world.steps.len();
    world.run(1, |_| {});
    assert_eq!(told(&world, steps)[0].1, (HOME - lent + 10) * UNIT, "half of the reserve");
    world.guest("vm1").manner = Manner::Honest;
    world.planner.ask_back();
    while world.planner.gives_back() {
        world.run(1, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    }
    assert_eq!(sizes(&world)[1].0, HOME);
    assert!(shown(&world).why.contains("is migrating"), "{:?}", shown(&world));
}

/// Lets a guest be on its way to another host.
fn leave(world: &mut World, name: &str) {
    let guest = world.guest(name);
    (guest.held_from, guest.leaves) = (0, true);
}

#[test]
fn a_guest_that_migrates_gets_back_what_its_own_cache_has_of_it_at_once() {
    let mut world = lent_to_own();
    leave(&mut world, "vm1");
    let (steps, began) = (world.steps.len(), world.at.now);
    world.run(1, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
    let done: Vec<_> = world.steps[steps..].iter().map(|(_, step)| (&*step.vm, step.side, step.bytes / UNIT)).collect();
    assert_eq!(done, [("vm1", Side::Tier, 20), ("vm1", Side::Guest, HOME)]);
    assert!(world.steps[steps].0 - began <= Duration::from_secs(2), "{:?}", world.steps);
    run_round(&mut world, |_| {});
    assert_eq!((sizes(&world)[1].0, told(&world, steps).len()), (HOME, 1), "it lends again: {:?}", world.steps);
}

/// One that is short of memory would wait half a window, to see whether help was enough.
#[test]
fn a_guest_that_migrates_and_is_helped_does_not_wait_for_what_its_own_cache_has() {
    let mut world = lent_to_own();
    leave(&mut world, "vm1");
    world.guest("vm1").manner = Manner::Short(0, u32::MAX);
    let (steps, began) = (world.steps.len(), world.at.now);
    world.run(1, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    let done = &world.steps[steps..];
    let of = |at: usize| (&*done[at].1.vm, done[at].1.side, done[at].1.bytes / UNIT);
    let expected = [("vm1", Side::Guest, HOME - 38), ("vm1", Side::Tier, 30), ("vm1", Side::Guest, HOME)];
    assert!(done.len() >= 3 && [of(0), of(1), of(2)] == expected, "{done:?}");
    assert!(done[2].0 - began <= Duration::from_secs(5), "{done:?}");
}

#[test]
fn a_guest_that_migrates_does_not_wait_for_the_reserve_because_its_own_cache_gave() {
    let mut world = lent_to_own();
    world.process("vm1").limits.minimum_bytes = 60 * UNIT;
    world.run(1, |_| {});
    leave(&mut world, "vm1");
    let (steps, began) = (world.steps.len(), world.at.now);
    world.run(1, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    let told = told(&world, steps);
    let sizes: Vec<_> = told.iter().map(|(_, bytes)| bytes / UNIT).collect();
    assert_eq!(sizes, [HOME - 40, HOME - 30], "{:?}", &world.steps[steps..]);
    assert!(told[1].0 - began <= Duration::from_secs(5), "{told:?}");
}

#[test]
fn nothing_more_is_taken_from_a_guest_that_begins_to_migrate() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_into_a_step(&mut world);
    let moves = world.planner.record().intent.unwrap().moves;
    let step = moves.iter().find(|change| change.vm == "vm1" && change.side == Side::Guest).unwrap();
    leave(&mut world, "vm1");
    let (steps, began) = (world.steps.len(), world.at.now);
    world.run(6, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    let told = told(&world, steps);
    assert!(told[0].1 == step.from_bytes && told[0].0 - began <= Duration::from_secs(2), "{step:?} {told:?}");
    assert_eq!(world.guests["vm1"].target, HOME * UNIT, "{:?}", &world.steps[steps..]);
}

#[test]
fn a_guest_that_migrates_gets_back_what_others_have_of_it_as_the_reserve_allows() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let (lent, steps) = (HOME - sizes(&world)[1].0, world.steps.len());
    leave(&mut world, "vm1");
    world.run(100, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    let told = told(&world, steps);
    // Half of the reserve stays for those that are short of memory.
    assert_eq!(told[0].1, (HOME - lent + 10) * UNIT, "{told:?}");
    assert!(told.windows(2).all(|two| two[1].0 - two[0].0 >= world.settings.window), "{told:?}");
    assert_eq!(world.guests["vm1"].target, HOME * UNIT);
    assert!(world.taken_of_host() <= signed(40 * UNIT), "the reserve is full again: {:?}", sizes(&world));
}

#[test]
fn a_guest_that_migrates_gets_back_what_others_have_of_it_though_its_vm_process_hangs() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let (lent, steps, looks) = (HOME - sizes(&world)[1].0, world.steps.len(), world.looks);
    leave(&mut world, "vm1");
    world.process("vm1").nature = Nature::Hangs(looks, 1000);
    world.run(1, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    let told = told(&world, steps);
    assert_eq!(told.first().map(|(_, bytes)| *bytes), Some((HOME - lent + 10) * UNIT), "{told:?}");
}

#[test]
fn a_guest_that_is_short_of_memory_comes_before_one_that_migrates() {
    let world = short_comes_first(|world| leave(world, "vm1"));
    assert_eq!(world.guests["vm1"].target, HOME * UNIT, "{:?}", world.steps);
}

#[test]
fn a_guest_that_migrates_does_not_hold_up_what_one_that_is_short_of_memory_has_in_its_own_cache() {
    // Looks after which it begins to migrate. The other one waits meanwhile, to see whether help is enough.
    for looks in [0, 2] {
        let mut world = lent_to_own();
        world.guest("vm1").manner = Manner::Short(0, u32::MAX);
        let (steps, began) = (world.steps.len(), world.at.now);
        world.run(looks, |_| {});
        leave(&mut world, "vm0");
        // Its cache says that it gives, and does not.
        world.process("vm0").nature = Nature::Ignores;
        world.run(5 - looks, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
        let told = told(&world, steps);
        assert_eq!(told.last().unwrap().1, HOME * UNIT, "{looks}: {:?}", &world.steps[steps..]);
        let waited = told.last().unwrap().0 - began;
        assert!(waited <= world.settings.window / 2 + Duration::from_secs(5), "{looks}: {waited:?}");
        let of_vm0 = world.steps[steps..].iter().filter(|(_, step)| step.vm == "vm0");
        let of_vm0: Vec<_> = of_vm0.map(|(at, step)| (*at > told.last().unwrap().0, step.side)).collect();
        assert_eq!(of_vm0, [(true, Side::Tier)], "{looks}: {:?}", &world.steps[steps..]);
    }
}

#[test]
fn a_guest_that_migrates_waits_for_none_that_is_short_of_memory_and_has_nothing_in_its_own_cache() {
    let mut world = lent_to_own();
    world.process("vm1").limits.minimum_bytes = world.process("vm1").granted * UNIT;
    world.run(1, |_| {});
    world.guest("vm1").manner = Manner::Short(0, u32::MAX);
    leave(&mut world, "vm0");
    world.run(1, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    assert_eq!(world.guests["vm0"].target, HOME * UNIT, "{:?}", world.steps);
}

#[test]
fn a_guest_that_migrates_and_is_not_asked_costs_its_cache_nothing() {
    let mut world = lent_to_own();
    leave(&mut world, "vm1");
    let (at, time) = (world.at, Duration::from_secs(25));
    world.planner.guests.get_mut("vm1").unwrap().stop_asking(at, time, "its balloon did not follow".into());
    let steps = world.steps.len();
    world.run(2, |_| {});
    assert_eq!(world.steps.len(), steps, "{:?}", &world.steps[steps..]);
    world.run(2, |_| {});
    assert_eq!(world.guests["vm1"].target, HOME * UNIT, "{:?}", world.steps);
}

/// Otherwise `remoca host --once` would end before the guests that it has asked to tell of their memory have done so.
#[test]
fn guests_that_have_not_told_of_their_memory_yet_are_waited_for() {
    let mute = || {
        let mut world = two(170, [Manner::Honest; 2]);
        world.guests.values_mut().for_each(|guest| guest.mute_from = 0);
        world.run(1, |_| {});
        assert!(phase(&world) == Phase::Rest && world.planner.is_moving());
        world
    };
    let mut world = mute();
    world.guests.values_mut().for_each(|guest| guest.mute_from = u32::MAX);
    world.run(1, |_| {});
    assert_ne!(phase(&world), Phase::Rest);
    let mut world = mute();
    world.run(2, |_| {});
    assert!(!world.planner.is_moving(), "but not for ever");
}

#[test]
fn a_guest_that_is_not_asked_when_memory_is_returned_costs_its_cache_nothing() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_to_the_return(&mut world);
    let (at, time) = (world.at, Duration::from_secs(600));
    world.planner.guests.get_mut("vm0").unwrap().stop_asking(at, time, "its balloon did not follow".into());
    world.hear_next();
    let moves = world.planner.record().intent.map(|intent| intent.moves).unwrap_or_default();
    assert!(!moves.iter().any(|change| change.vm == "vm0"), "{moves:?}");
    assert_eq!(phase(&world), Phase::End);
}
