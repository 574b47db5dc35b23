//! Steps that end half-way: what a guest was to give, or to get, is not lost to it.

use super::balloon::{Manner, signed};
use super::guests::{HOME, lent_to_own, phase, run_round, run_to_the_return, sizes, three_lent_to_one, two};
use super::recovery::record_of_a_return;
use super::world::{Nature, Shape, UNIT, World};
use crate::planner::{Move, Outcome, Phase, Planner, Side, Stage};
use crate::resource::Resource;
use std::time::Duration;

/// Checks that the guest of `vm1` has its memory, but for what it lends.
fn check_whole(world: &World) {
    let (sizes, guest) = (world.planner.record().guests["vm1"], &world.guests["vm1"]);
    assert!(guest.target >= sizes.asked_bytes, "{guest:?} {sizes:?} {:#?}", world.steps);
    assert_eq!(sizes.base_bytes, HOME * UNIT, "{guest:?}");
}

/// Runs until the balloon of `vm1` is in the middle of a step, with some behind it.
pub fn run_into_a_step(world: &mut World) {
    world.guest("vm1").manner = Manner::Crawls;
    for _ in 0..60 {
        world.run(1, |_| {});
        let guest = &world.guests["vm1"];
        if guest.actual < (HOME - 9) * UNIT && guest.actual > guest.target {
            return;
        }
    }
    panic!("{:?}", world.steps);
}

#[test]
fn a_guest_whose_vm_process_is_replaced_in_the_middle_of_a_step_has_its_memory_back() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_into_a_step(&mut world);
    let looks = world.looks;
    world.process("vm1").nature = Nature::Upgrades(looks);
    world.run(4, |_| {});
    world.process("vm1").nature = Nature::Honest;
    world.guest("vm1").manner = Manner::Honest;
    world.run(500, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
    check_whole(&world);
}

#[test]
fn a_guest_that_is_paused_in_the_middle_of_a_step_has_its_memory_back() {
    for manner in [Manner::Paused as fn(u32, u32) -> Manner, Manner::Silent] {
        let mut world = two(170, [Manner::Honest; 2]);
        run_into_a_step(&mut world);
        world.guest("vm1").manner = manner(world.looks, 8);
        world.run(500, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
        check_whole(&world);
    }
}

/// The next daemon plans to tell the balloon once more, and does not come to that.
#[test]
fn a_step_that_a_former_daemon_began_is_not_forgotten_when_the_vm_goes() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_into_a_step(&mut world);
    world.replace_daemon(Duration::from_secs(5));
    world.hear_next();
    let moves = world.planner.record().intent.unwrap().moves;
    let is_planned = |change: &Move| change.vm == "vm1" && change.side == Side::Guest && change.stage == Stage::Planned;
    assert!(moves.iter().any(is_planned), "{moves:?}");
    let process = world.processes.remove("vm1").unwrap();
    world.hear_next();
    world.processes.insert("vm1".into(), process);
    world.guest("vm1").manner = Manner::Honest;
    let steps = world.steps.len();
    world.run(10, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    let (told, sizes) = (told(&world, steps), world.planner.record().guests["vm1"]);
    assert_eq!(told.first().map(|(_, bytes)| *bytes), Some(sizes.asked_bytes), "{sizes:?}");
    check_whole(&world);
}

/// If the guest is still short of memory by then.
#[test]
fn help_that_was_not_passed_on_comes_later() {
    for is_short in [true, false] {
        let mut world = two(168, [Manner::Honest; 2]);
        // No more than what it gets at once.
        world.process("vm1").limits.guest_minimum_bytes = Some((HOME - 10) * UNIT);
        run_round(&mut world, |_| {});
        assert!((HOME - 10..HOME).contains(&sizes(&world)[1].0), "{:?}", sizes(&world));
        let less = world.guests["vm1"].target;
        world.guest("vm1").manner = Manner::Short(0, u32::MAX);
        // Long enough for several promises. None of them uses up its part of the reserve.
        world.is_full = true;
        world.run(30, |_| {});
        world.is_full = false;
        let manner = if is_short { Manner::Short(0, u32::MAX) } else { Manner::Honest };
        world.guest("vm1").manner = manner;
        world.run(90, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
        let expected = if is_short { HOME * UNIT } else { less };
        assert_eq!(world.guests["vm1"].target, expected, "{:#?}", world.steps);
    }
}

#[test]
fn help_that_a_daemon_without_guests_does_not_pass_on_comes_later() {
    for resource in [Resource::Cache, Resource::Local] {
        let mut world = two(190, [Manner::Honest; 2]);
        run_round(&mut world, |_| {});
        let (settings, less) = (world.settings, world.guests["vm1"].target);
        world.guest("vm1").manner = Manner::Short(0, u32::MAX);
        // It dies before the balloon is told, and the next one does not look at guests.
        world.kills.insert(world.steps.len(), (true, Duration::from_secs(3)));
        (world.settings.guests, world.settings.resource) = (None, resource);
        world.run(1, |_| {});
        assert!(world.kills.is_empty() && world.guests["vm1"].target == less);
        let asked = world.planner.record().guests["vm1"].asked_bytes;
        assert!(asked > less && world.planner.record().reliefs.is_empty());
        world.guest("vm1").manner = Manner::Honest;
        world.settings = settings;
        world.replace_daemon(Duration::from_secs(3));
        world.run(3, |_| {});
        assert_eq!(world.guests["vm1"].target, asked, "{resource:?}");
    }
}

#[test]
fn a_balloon_that_is_told_again_uses_up_no_help() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let lent = HOME - sizes(&world)[1].0;
    assert!(lent > 10, "{:?}", sizes(&world));
    let mut record = world.planner.record();
    record.guests.get_mut("vm1").unwrap().is_untold = true;
    world.planner = Planner::new(world.settings, record);
    world.at.now = Duration::ZERO;
    let steps = world.steps.len();
    world.run(2, |_| {});
    let told = |world: &World| told(world, steps);
    let [(first, same)] = told(&world)[..] else { panic!("{:?}", told(&world)) };
    assert_eq!(same, (HOME - lent) * UNIT);
    world.guest("vm1").manner = Manner::Short(0, u32::MAX);
    world.run(1, |_| {});
    let [_, (second, more)] = told(&world)[..] else { panic!("{:?}", told(&world)) };
    assert!(second - first < world.settings.window, "{first:?} {second:?}");
    assert_eq!(more, (HOME - lent + 10) * UNIT, "half of the reserve");
    // That is used up then.
    world.run(3, |_| {});
    assert_eq!(told(&world).len(), 2, "{:?}", told(&world));
}

#[test]
fn a_guest_that_is_booted_with_less_is_told_what_it_can_follow() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let mut record = world.planner.record();
    record.guests.get_mut("vm1").unwrap().is_untold = true;
    world.planner = Planner::new(world.settings, record);
    world.at.now = Duration::ZERO;
    let (guest, less) = (world.guest("vm1"), 64 * UNIT);
    (guest.boot, guest.home, guest.target, guest.actual, guest.resident) = (less, less, less, less, less);
    let steps = world.steps.len();
    world.run(10, |_| {});
    let told: Vec<_> = told(&world, steps).into_iter().map(|(_, bytes)| bytes).collect();
    assert_eq!((told, world.planner.record().guests["vm1"].is_untold), (vec![less], false));
}

#[test]
fn help_never_takes_memory_from_a_guest_that_took_it_back() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let looks = world.looks;
    // It was booted once more, say, and has all of its memory.
    world.guest("vm1").manner = Manner::Grabs(looks);
    world.run(1, |_| {});
    let boot = world.guest("vm1").boot;
    (world.guest("vm1").target, world.guest("vm1").manner) = (boot, Manner::Short(0, u32::MAX));
    let before = world.steps.len();
    world.run(100, |_| {});
    let told: Vec<_> = world.steps[before..].iter().filter(|(_, step)| step.side == Side::Guest).collect();
    assert!(told.iter().all(|(_, step)| step.bytes == boot), "{told:?}");
}

/// Lets somebody else give a guest more than it had at first. Returns what it has then.
fn enlarge(world: &mut World, name: &str) -> u64 {
    let guest = world.guest(name);
    let bytes = (HOME + 12) * UNIT;
    (guest.boot, guest.target, guest.actual, guest.resident) = (bytes, bytes, bytes, bytes);
    bytes
}

#[test]
fn a_guest_that_somebody_enlarged_while_it_lends_is_not_told_to_shrink() {
    for manner in [Manner::Honest, Manner::Short(0, u32::MAX)] {
        let mut world = two(190, [Manner::Honest; 2]);
        run_round(&mut world, |_| {});
        assert!(sizes(&world)[1].0 < HOME);
        let bytes = enlarge(&mut world, "vm1");
        world.guest("vm1").manner = manner;
        // What must hold for each command is in `World::check_step`.
        world.run(100, |_| {});
        world.planner.ask_back();
        while world.planner.gives_back() {
            world.run(1, |_| {});
        }
        assert_eq!(world.guests["vm1"].target, bytes, "{manner:?}: {:?}", world.steps);
        assert_eq!(world.planner.record().guests["vm1"].taken(), 0, "{manner:?}");
    }
}

#[test]
fn what_somebody_took_from_a_guest_that_lends_is_not_given_back_to_it() {
    let mut world = lent_to_own();
    let guest = world.guest("vm1");
    let less = guest.actual - 10 * UNIT;
    (guest.target, guest.actual, guest.resident) = (less, less, less);
    run_round(&mut world, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
    let own = (HOME - 10) * UNIT;
    assert_eq!(world.planner.record().guests["vm1"].base_bytes, own);
    world.planner.ask_back();
    while world.planner.gives_back() {
        world.run(1, |_| {});
    }
    assert_eq!(world.guests["vm1"].target, own, "{:?}", world.steps);
}

#[test]
fn a_guest_that_somebody_enlarges_while_its_memory_is_returned_keeps_what_it_has() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_to_the_return(&mut world);
    world.hear_next();
    let moves = world.planner.record().intent.unwrap().moves;
    assert!(moves.iter().any(|change| change.vm == "vm0" && change.side == Side::Guest), "{moves:?}");
    let bytes = enlarge(&mut world, "vm0");
    let steps = world.steps.len();
    world.run(60, |_| {});
    let told: Vec<_> =
        world.steps[steps..].iter().filter(|(_, step)| step.vm == "vm0" && step.side == Side::Guest).collect();
    assert!(!told.is_empty() && world.guests["vm0"].target == bytes, "{told:?}");
}

#[test]
fn a_guest_that_takes_back_a_little_again_and_again_ends_no_round_for_others() {
    for other in [Manner::Honest, Manner::Crawls] {
        let mut world = two(170, [other, Manner::Nibbles]);
        let least = std::cell::Cell::new(HOME);
        run_round(&mut world, |world| {
            assert!(world.taken_of_host() <= signed(60 * UNIT));
            least.set(least.get().min(world.guests["vm0"].actual / UNIT));
        });
        assert_eq!(least.get(), HOME - HOME / 2 / 4 * 3, "{:?}", sizes(&world));
        // One that crawls is given up before it has all back.
        assert!(sizes(&world)[0].0 == HOME || other == Manner::Crawls, "{:?}", sizes(&world));
        let told = told(&world, 0);
        let takes = told.windows(2).filter(|two| two[1].1 < two[0].1).count();
        assert!(takes <= 5, "it lends again at once: {told:?}");
    }
}

#[test]
fn a_guest_that_takes_all_back_while_others_lend_does_not_end_that() {
    // Its tier has what it lent in the first step, which the other one makes up for with its next, or what it lent in three: that has to
    // come back, from its tier, which has just changed.
    for lent in [1, 24] {
        let mut world = two(170, [Manner::Crawls, Manner::Honest]);
        while world.processes["vm1"].granted < 20 + lent {
            world.run(1, |_| {});
        }
        let looks = world.looks;
        world.guest("vm1").manner = Manner::Grabs(looks);
        let mut least = HOME;
        while phase(&world) == Phase::Lend {
            world.run(1, |_| {});
            least = least.min(world.guests["vm0"].actual / UNIT);
        }
        assert_eq!(least, HOME - HOME / 2 / 4 * 3, "{lent}");
    }
}

/// Units become smaller after a round: what the host saw more in a guest that followed would seem to have been taken back.
#[test]
fn what_the_host_may_see_more_in_a_guest_that_follows_does_not_depend_on_what_guests_lend() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_into_a_step(&mut world);
    world.planner.unit_bytes = 4 * UNIT;
    let guest = world.guest("vm1");
    let target = guest.target;
    (guest.manner, guest.actual, guest.resident) = (Manner::Lies, target, target + 2 * UNIT);
    world.run(1, |_| {});
    assert_eq!((world.guests["vm1"].target, phase(&world)), (target, Phase::Lend), "{:?}", world.steps);
    world.guest("vm1").resident = target + UNIT;
    world.run(1, |_| {});
    assert!(world.guests["vm1"].target < target, "it has followed, and lends more: {:?}", world.steps);
}

#[test]
fn what_a_guest_lends_is_given_to_nobody_while_its_vm_process_hangs() {
    let mut world = two(128, [Manner::Stuck, Manner::Honest]);
    // Its tier does not get what its guest lends in the first step.
    let looks = world.looks + 2;
    world.process("vm1").nature = Nature::Hangs(looks, 3);
    world.guest("vm1").manner = Manner::GrabsSilently(looks);
    // What must hold for each command is in `World::check_step`.
    world.run(20, |_| {});
    assert!(world.steps.iter().any(|(_, step)| step.vm == "vm1" && step.side == Side::Guest), "it lends");
}

/// It was started again, say, and its guest is not back yet. Nobody is cut for that.
#[test]
fn what_a_guest_lends_pays_for_nothing_while_its_vm_process_does_not_see_it() {
    let mut world = lent_to_own();
    let lent =
        |world: &World| (world.planner.lent(world.at.now) / UNIT, world.planner.lent_unseen(world.at.now) / UNIT);
    assert_eq!(lent(&world), (96, 0));
    world.guest("vm1").manner = Manner::Saved;
    world.run(1, |_| {});
    assert_eq!(lent(&world), (96, 48));
    world.guest("vm1").manner = Manner::Honest;
    world.run(1, |_| {});
    assert_eq!(lent(&world), (96, 0));
}

#[test]
fn a_step_of_a_guest_that_is_short_of_memory_is_dropped() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_into_a_step(&mut world);
    world.guest("vm1").manner = Manner::Short(0, u32::MAX);
    world.run(1, |_| {});
    let moves = world.planner.record().intent.map(|intent| intent.moves).unwrap_or_default();
    let is_taken_from = |change: &Move| change.vm == "vm1" && change.takes() && change.is_open();
    assert!(!moves.iter().any(is_taken_from), "{moves:#?}");
}

#[test]
fn what_somebody_else_takes_before_a_round_is_not_lent_in_it() {
    let mut world = two(170, [Manner::Honest; 2]);
    world.process("vm0").shape = Shape::Flat(50);
    run_round(&mut world, |_| {});
    assert_eq!(sizes(&world)[1].0, HOME);
    let guest = world.guest("vm1");
    (guest.target, guest.actual, guest.resident) = (100 * UNIT, 100 * UNIT, 100 * UNIT);
    let steps = world.steps.len();
    world.run(400, |_| {});
    assert!(!told(&world, steps).is_empty(), "there was no second round");
    assert_eq!(world.planner.record().guests["vm1"].base_bytes, 100 * UNIT);
}

#[test]
fn what_one_guest_is_promised_no_other_one_gets() {
    let mut world = three_lent_to_one();
    ["vm1", "vm2", "vm3"].iter().for_each(|name| world.guest(name).manner = Manner::Short(0, u32::MAX));
    // What the host has is checked before each command.
    world.run(1, |_| {});
    assert!(world.taken_of_host() <= signed(60 * UNIT), "{:?}", sizes(&world));
}

#[test]
fn lending_ends_in_time_however_slow_a_balloon_is() {
    let mut world = two(170, [Manner::Honest, Manner::Crawls]);
    // Each of its steps takes three looks.
    world.settings.window = Duration::from_secs(6);
    world.replace_daemon(Duration::ZERO);
    while phase(&world) != Phase::Lend {
        world.run(1, |_| {});
    }
    let began = world.at.now;
    while phase(&world) == Phase::Lend {
        world.run(1, |_| {});
    }
    assert!(world.at.now - began <= Duration::from_secs(90), "{:?}", world.at.now - began);
    assert!(world.planner.report(world.at).vms[1].guest.as_ref().unwrap().could_lend_bytes > 0);
}

#[test]
fn a_clock_that_is_set_keeps_no_round_going_and_ends_none() {
    for set in [|s: u64| s - 500_000, |s: u64| s + 500_000] {
        let mut world = lent_to_own();
        let at = world.at.now;
        world.at.unix_s = set(world.at.unix_s);
        let mut looks = 0;
        while phase(&world) == Phase::Observe {
            world.run(1, |_| {});
            looks += 1;
            assert!(looks < 100, "it is observed for ever");
        }
        let observed = world.at.now - at;
        assert!(observed >= 2 * world.settings.window, "{observed:?}");
        run_round(&mut world, |_| {});
        // Nor is the next round far away.
        world.at.unix_s -= 400_000;
        let steps = world.steps.len();
        world.run(400, |_| {});
        assert!(world.steps.len() > steps);
    }
}

#[test]
fn a_successor_does_not_ask_the_same_balloons_again() {
    let mut world = two(170, [Manner::Honest, Manner::Stuck]);
    run_round(&mut world, |_| {});
    let why = |world: &World| world.planner.report(world.at).vms[1].guest.as_ref().unwrap().why.clone();
    assert!(why(&world).contains("did not follow within 30 s; the daemon does not ask it again"), "{}", why(&world));
    world.replace_daemon(Duration::from_secs(5));
    world.run(3, |_| {});
    assert!(why(&world).contains("a former daemon asked"), "{}", why(&world));
    // A clock that was set back does not make it longer.
    world.replace_daemon(Duration::ZERO);
    world.at.unix_s -= 500_000;
    world.run(70, |_| {});
    assert!(!why(&world).contains("a former daemon"), "{}", why(&world));
}

/// Returns when the balloon of `vm1` was told something after so many steps, and what.
pub fn told(world: &World, steps: usize) -> Vec<(Duration, u64)> {
    let told = world.steps[steps..].iter().filter(|(_, step)| step.vm == "vm1" && step.side == Side::Guest);
    told.map(|(at, step)| (*at, step.bytes)).collect()
}

#[test]
fn a_guest_is_helped_once_in_a_window() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let steps = world.steps.len();
    world.guest("vm1").manner = Manner::Short(0, u32::MAX);
    world.run(60, |_| {});
    let told = told(&world, steps);
    assert!(told.len() > 1 && told.is_sorted_by_key(|(_, bytes)| *bytes), "{told:?}");
    assert!(told.windows(2).all(|two| two[1].0 - two[0].0 >= world.settings.window), "{told:?}");
}

#[test]
fn a_balloon_that_cannot_be_told_is_told_again_once_in_a_window_and_is_on_record_until_then() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let mut record = world.planner.record();
    let sizes = record.guests.get_mut("vm1").unwrap();
    (sizes.is_untold, sizes.asked_bytes) = (true, sizes.base_bytes);
    world.planner = Planner::new(world.settings, record);
    world.at.now = Duration::ZERO;
    // Nor is it forgotten while its VM is not there.
    let process = world.processes.remove("vm1").unwrap();
    world.run(2, |_| {});
    assert!(world.planner.record().guests["vm1"].is_untold);
    world.processes.insert("vm1".into(), process);
    let steps = world.steps.len();
    world.is_full = true;
    world.run(14, |_| {});
    let told = told(&world, steps);
    assert!(told.len() > 1, "{told:?}");
    assert!(told.windows(2).all(|two| two[1].0 - two[0].0 >= world.settings.window), "{told:?}");
}

#[test]
fn what_a_guest_had_before_its_monitor_fell_silent_is_no_sign_that_its_balloon_was_told() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let has = world.guests["vm1"].actual;
    assert!(has < HOME * UNIT);
    world.planner.guests.get_mut("vm1").unwrap().note_untold(true);
    world.hear_next();
    let step = world.planner.next_step(world.at).unwrap();
    assert_eq!((&*step.vm, step.side, step.bytes), ("vm1", Side::Guest, has));
    // The monitor hangs with that, and says much later that it did not pass it on.
    world.planner.step_done(world.at, &step, Outcome::Told);
    world.guest("vm1").manner = Manner::Silent(0, u32::MAX);
    world.hear_next();
    world.planner.step_done(world.at, &step, Outcome::Unknown("it refused".into()));
    assert!(world.planner.record().guests["vm1"].is_untold);
}

#[test]
fn a_return_that_a_daemon_without_guests_does_not_pass_on_comes_later() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    // It is on record that the balloon is told next. The daemon dies before that.
    let (record, more) = record_of_a_return(&world, world.at.unix_s, Stage::Begun);
    assert!(more <= HOME * UNIT, "{:?}", sizes(&world));
    // The next one does not look at guests.
    let (terms, guests) = (world.settings.guests.take(), std::mem::take(&mut world.guests));
    world.planner = Planner::new(world.settings, record);
    world.at.now = Duration::ZERO;
    world.run(3, |_| {});
    assert!(world.planner.record().intent.is_none());
    (world.settings.guests, world.guests) = (terms, guests);
    world.replace_daemon(Duration::from_secs(3));
    world.run(3, |_| {});
    assert_eq!(world.guests["vm1"].target, more, "{:?}", world.steps);
}
