//! All guests get all of their memory back at once.

use super::balloon::{Guest, Manner, signed};
use super::guests::{HOME, lent_to_own, phase, run_round, sizes, two};
use super::world::{Nature, Process, Shape, UNIT, World};
use crate::planner::{Move, Phase, Planner, Side};
use std::time::Duration;

/// Has guests get all back, and runs until that is over. Returns the number of looks that it took.
fn give_back(world: &mut World, check: impl Fn(&World)) -> u32 {
    world.planner.ask_back();
    assert!(world.planner.is_moving());
    let began = world.looks;
    while world.planner.gives_back() {
        world.run(1, &check);
        assert!(world.looks - began < 40, "{:#?}", world.planner.record());
    }
    world.looks - began
}

#[test]
fn guests_that_lend_have_all_back_in_seconds_whatever_the_curves_say() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let [(HOME, _), (donor, rest)] = sizes(&world)[..] else { panic!("{:?}", sizes(&world)) };
    assert!(donor < HOME && rest == 1);
    // Its tier has the minimum, so that of the other one pays.
    let steps = world.steps.len();
    give_back(&mut world, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
    let now = sizes(&world);
    assert_eq!((now[0].0, now[1], phase(&world)), (HOME, (HOME, 1), Phase::Rest));
    assert!(now[0].1 >= 38, "no more than what was lent leaves the tiers: {now:?}");
    let sides: Vec<_> = world.steps[steps..].iter().map(|(_, step)| step.side).collect();
    assert_eq!(sides, [Side::Tier, Side::Guest], "{:?}", world.steps);
    let first = world.steps[steps].0;
    assert!(world.steps[steps + 1].0 - first <= Duration::from_secs(2), "{:?}", &world.steps[steps..]);
    // The next round is not now.
    let steps = world.steps.len();
    world.run(50, |_| {});
    assert!(world.steps[steps..].iter().all(|(_, step)| step.side == Side::Tier), "{:?}", &world.steps[steps..]);
}

/// Their own caches have given some of it at once.
#[test]
fn guests_wait_for_what_the_cache_of_another_has_of_their_memory() {
    let mut world = lent_to_own();
    // Somebody has moved some of it to the other one.
    for (name, granted) in [("vm0", 98), ("vm1", 38)] {
        let vm = world.process(name);
        (vm.wanted, vm.granted) = (granted, granted);
    }
    world.run(1, |_| {});
    let before = sizes(&world);
    let (lent, own) = (HOME - before[1].0, before[1].1);
    assert!(own > 1 && own <= lent, "{before:?}");
    // It says that it gives, and does not.
    world.process("vm0").nature = Nature::Ignores;
    world.planner.ask_back();
    let steps = world.steps.len();
    world.run(5, |_| {});
    let told = world.steps[steps..].iter().filter(|(_, step)| step.side == Side::Guest && step.vm == "vm1");
    let most = told.map(|(_, step)| step.bytes / UNIT).max();
    assert!(most.is_none_or(|most| most <= before[1].0 + own), "{most:?} {before:?}");
}

#[test]
fn a_step_that_is_under_way_ends_and_one_of_a_former_daemon_too() {
    for is_other in [false, true] {
        for looks in 3..12 {
            let mut world = two(170, [Manner::Honest, Manner::Crawls]);
            world.run(looks, |_| {});
            if is_other {
                world.replace_daemon(Duration::from_secs(3));
                // Nobody says any more how much there is.
                (world.settings.total_bytes, world.settings.guests) = (0, None);
                world.replace_daemon(Duration::from_secs(3));
            }
            let steps = world.steps.len();
            give_back(&mut world, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
            let guests: Vec<_> = world.guests.values().map(|guest| guest.target / UNIT).collect();
            assert_eq!(guests, [HOME, HOME], "{looks} {is_other}: {:#?}", world.planner.record());
            let told = world.steps[steps..].iter().filter(|(_, step)| step.vm == "vm0" && step.side == Side::Guest);
            let told: Vec<_> = told.map(|(_, step)| step.bytes).collect();
            assert!(told.is_sorted(), "it lends again: {looks} {is_other}: {told:?}");
            // What was lent is in no tier yet: by the total that the former daemon had, too.
            assert!(world.held() >= 38, "{looks} {is_other}: {:?}", sizes(&world));
        }
    }
}

#[test]
fn a_guest_gets_only_what_comes_back_and_one_whose_monitor_is_silent_is_left_out() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let lent = HOME - sizes(&world)[1].0;
    let now = world.looks;
    // What was lent is in the tier of a process that hangs.
    world.process("vm0").nature = Nature::Hangs(now, 1000);
    give_back(&mut world, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
    assert!(sizes(&world)[1].0 < HOME);
    world.process("vm0").nature = Nature::Honest;
    let now = world.looks;
    world.guest("vm1").manner = Manner::Silent(now, 20);
    let steps = world.steps.len();
    give_back(&mut world, |_| {});
    assert_eq!(world.steps.len(), steps);
    world.run(20, |_| {});
    give_back(&mut world, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
    assert_eq!(sizes(&world)[1].0, HOME, "{lent}: {:?}", sizes(&world));
}

#[test]
fn a_vm_that_never_answered_and_windows_and_minimums_keep_nobody_from_his_own() {
    let mut world = two(170, [Manner::Honest; 2]);
    let mut third = Process::new(Shape::Flat(50), Nature::Honest, 10);
    third.limits.minimum_bytes = 10 * UNIT;
    world.processes.insert("vm2".into(), third);
    world.settings.total_bytes += 10 * UNIT;
    world.replace_daemon(Duration::ZERO);
    run_round(&mut world, |_| {});
    world.processes.insert("vm3".into(), Process::new(Shape::Flat(50), Nature::Hangs(0, 1000), 0));
    world.add_guest("vm3", Guest::new(Manner::Silent(0, 1000), 64));
    give_back(&mut world, |world| assert!(world.taken_of_host() <= signed(50 * UNIT)));
    let guests: Vec<_> = ["vm0", "vm1"].map(|name| world.guests[name].actual / UNIT).into();
    assert_eq!((guests, world.processes["vm2"].wanted), (vec![HOME, HOME], 10));
}

/// Lets the daemon die, and a process take its place to which nobody says how much there is.
fn leave_alone(world: &mut World) {
    (world.settings.total_bytes, world.settings.guests) = (0, None);
    world.replace_daemon(Duration::from_secs(3));
}

#[test]
fn without_a_daemon_one_that_is_late_is_waited_for_and_nothing_is_handed_out_twice() {
    for (is_process, looks) in [(false, 2), (false, 3), (true, 2)] {
        let mut world = two(170, [Manner::Honest; 2]);
        run_round(&mut world, |_| {});
        assert!(sizes(&world)[1].0 < HOME);
        leave_alone(&mut world);
        // Nor does a record of an older version say that.
        let mut record = world.planner.record();
        record.total_bytes = 0;
        world.planner = Planner::new(world.settings, record);
        let now = world.looks;
        match is_process {
            true => world.process("vm1").nature = Nature::Hangs(now, looks),
            false => world.guest("vm1").manner = Manner::Silent(now, looks),
        }
        let took = give_back(&mut world, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
        assert_eq!(
            (sizes(&world)[1].0, took <= 4),
            (HOME, true),
            "{is_process} {looks}: {:#?}",
            world.planner.record()
        );
    }
}

#[test]
fn a_guest_that_could_not_be_told_is_told_by_the_next_command() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let lent = HOME - sizes(&world)[1].0;
    world.guest("vm1").manner = Manner::Refuses;
    give_back(&mut world, |_| {});
    assert_eq!(sizes(&world)[1].0, HOME - lent);
    world.guest("vm1").manner = Manner::Honest;
    for _ in 0..2 {
        world.replace_daemon(Duration::from_secs(3));
        give_back(&mut world, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
        assert_eq!(world.guests["vm1"].target, HOME * UNIT, "{lent}: {:#?}", world.planner.record());
    }
}

#[test]
fn help_that_a_former_daemon_promised_takes_nothing_from_what_a_guest_got_since() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let less = world.guests["vm1"].actual;
    give_back(&mut world, |_| {});
    let mut record = world.planner.record();
    let help = Move { vm: "vm1".into(), side: Side::Guest, from_bytes: less, to_bytes: less + UNIT, ..Move::default() };
    record.reliefs.push(help);
    world.planner = Planner::new(world.settings, record);
    world.at.now = Duration::ZERO;
    let steps = world.steps.len();
    world.run(3, |_| {});
    assert_eq!(world.steps.len(), steps + 1);
    assert_eq!(world.guests["vm1"].target, HOME * UNIT, "{:?}", &world.steps[steps..]);
}

#[test]
fn a_mistake_in_the_file_of_a_vm_does_not_cost_it_its_minimum() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let [(_, tier), (donor, _)] = sizes(&world)[..] else { panic!() };
    let check = |world: &World| assert!(world.taken_of_host() <= signed(40 * UNIT));
    world.misread = Some("vm0".into());
    world.replace_daemon(Duration::from_secs(3));
    give_back(&mut world, check);
    assert_eq!((sizes(&world)[0].1, sizes(&world)[1].0), (tier, donor), "nobody knows what it has to have");
    world.misread = None;
    world.process("vm0").limits.minimum_bytes = (tier - 4) * UNIT;
    world.run(1, check);
    world.misread = Some("vm0".into());
    give_back(&mut world, check);
    assert_eq!((sizes(&world)[0].1, sizes(&world)[1].0), (tier - 4, donor + 4));
    world.process("vm0").limits.minimum_bytes = 0;
    world.misread = None;
    give_back(&mut world, check);
    assert_eq!(sizes(&world)[1].0, HOME);
}

#[test]
fn a_tier_whose_minimum_is_more_than_there_can_be_gives_nothing() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let tier = sizes(&world)[0].1;
    world.process("vm0").limits.minimum_bytes = u64::MAX;
    give_back(&mut world, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
    assert_eq!(sizes(&world)[0].1, tier);
}

#[test]
fn a_guest_whose_vm_process_does_not_run_is_named_until_it_has_its_own() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let absent = |world: &World| world.planner.report(world.at).guests.unwrap().absent;
    let process = world.processes.remove("vm1").unwrap();
    assert!(absent(&world).is_empty(), "nobody has looked yet");
    world.run(1, |_| {});
    let report = world.planner.report(world.at);
    let counted = (world.processes["vm0"].wanted + process.wanted) * UNIT;
    assert_eq!(report.counted_bytes, counted, "its memory counts for a minute");
    give_back(&mut world, |_| {});
    assert_eq!(absent(&world), ["vm1"]);
    world.processes.insert("vm1".into(), process);
    give_back(&mut world, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
    assert_eq!((sizes(&world)[1].0, absent(&world).len()), (HOME, 0));
}
