//! Memory that goes from guests to their caches and back.

use super::balloon::{Guest, Manner, signed, with_guests};
use super::world::{Nature, Process, Shape, UNIT, World};
use crate::planner::round::GONE_MAX;
use crate::planner::{GuestRecord, Look, Phase, Planner, Side, unit_of};
use remoca_protocol::control::CURVE_POINTS_MAX;
use std::time::Duration;

pub const HOME: u64 = 128;

/// Returns two VMs with guests of the same size: the first one would read nothing from a disk with `needs` units in guest and cache, the
/// other one gains nothing from more.
pub fn two(needs: u32, manners: [Manner; 2]) -> World {
    let vms =
        vec![Process::new(Shape::Cliff(needs), Nature::Honest, 20), Process::new(Shape::Flat(50), Nature::Honest, 20)];
    let mut world = World::with(with_guests(60, 20), vms);
    for (name, manner) in ["vm0", "vm1"].into_iter().zip(manners) {
        world.add_guest(name, Guest::new(manner, HOME));
    }
    world
}

/// Returns two VMs whose guests have lent to their own caches all that they lend in a round.
pub fn lent_to_own() -> World {
    let mut world = two(170, [Manner::Honest; 2]);
    while phase(&world) != Phase::Observe {
        world.run(1, |_| {});
    }
    assert!(sizes(&world).iter().all(|sizes| *sizes == (HOME - 48, 20 + 48)), "{:?}", sizes(&world));
    world
}

/// Returns four VMs after a round: the cache of the first one has got ten units or more from the guest of each other one.
pub fn three_lent_to_one() -> World {
    let flat = || Process::new(Shape::Flat(50), Nature::Honest, 10);
    let vms = vec![Process::new(Shape::Cliff(270), Nature::Honest, 10), flat(), flat(), flat()];
    let mut world = World::with(with_guests(60, 20), vms);
    (0..4).for_each(|number| world.add_guest(&format!("vm{number}"), Guest::new(Manner::Honest, HOME)));
    run_round(&mut world, |_| {});
    assert!(sizes(&world)[1..].iter().all(|(guest, _)| *guest + 10 <= HOME), "{:?}", sizes(&world));
    world
}

/// Returns the units of the guest and the cache of each VM.
pub fn sizes(world: &World) -> Vec<(u64, u64)> {
    world.processes.iter().map(|(name, vm)| (world.guests[name].actual / UNIT, vm.granted)).collect()
}

pub fn phase(world: &World) -> Phase {
    world.planner.record().round.phase
}

/// Runs until guests are to have their memory back, and no command was sent for that yet.
pub fn run_to_the_return(world: &mut World) {
    let mut looks = 0;
    while phase(world) != Phase::Return || world.planner.record().intent.is_some() {
        world.run(1, |_| {});
        looks += 1;
        assert!(looks < 400, "nothing is returned: {:?}", world.planner.record());
    }
}

/// Runs until the round is over.
pub fn run_round(world: &mut World, check: impl Fn(&World)) {
    let mut looks = 0;
    while phase(world) == Phase::Rest && looks < 10 {
        world.run(1, &check);
        looks += 1;
    }
    while phase(world) != Phase::Rest || world.planner.is_moving() {
        world.run(1, &check);
        looks += 1;
        assert!(looks < 400, "the round does not end: {:?}", world.planner.record());
    }
}

#[test]
fn a_guest_that_needs_it_less_gives_memory_to_the_cache_of_another() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_round(&mut world, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
    let [(guest, tier), (donor, rest)] = sizes(&world)[..] else { panic!() };
    assert_eq!(guest, HOME, "what the first one lent it has back: {:?}", sizes(&world));
    assert!(guest + tier >= 170 && donor < HOME && rest == 1, "{:?}", sizes(&world));
    assert!(donor >= HOME - HOME / 2 / 4 * 3);
}

#[test]
fn guests_have_all_back_if_nobody_gains() {
    let mut world = two(128, [Manner::Honest, Manner::Fresh(100)]);
    world.process("vm0").shape = Shape::Flat(50);
    run_round(&mut world, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
    assert_eq!(sizes(&world), [(HOME, 20), (HOME, 20)]);
    assert!(world.steps.iter().any(|(_, step)| step.side == Side::Guest));
    // Until the next round nothing happens.
    let steps = world.steps.len();
    world.run(100, |_| {});
    assert_eq!(world.steps.len(), steps);
    world.run(300, |_| {});
    assert!(world.steps.len() > steps);
}

/// It may just be late: what its guest lends is on record.
#[test]
fn a_daemon_that_starts_cuts_no_cache_because_the_monitor_of_a_lender_is_late() {
    for looks in [3, 100] {
        let mut world = three_lent_to_one();
        let before = sizes(&world);
        let now = world.looks;
        world.guest("vm1").manner = Manner::Silent(now, looks);
        world.replace_daemon(Duration::from_secs(5));
        world.run(looks.min(5), |world| assert_eq!(sizes(world), before, "{:?}", world.steps));
        world.run(20, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
        // After a minute nothing is waited for any longer.
        assert_eq!(sizes(&world)[0].1 < before[0].1, looks == 100, "{:?} {before:?}", sizes(&world));
    }
}

/// What another one took back meanwhile costs caches that, and not what the late one lends as well.
#[test]
fn caches_are_cut_for_what_a_guest_took_back_and_not_for_what_a_late_one_lends() {
    let mut world = three_lent_to_one();
    // No window is left.
    world.run(10, |_| {});
    let (before, held, now) = (sizes(&world), world.held(), world.looks);
    let [late, taken_back] = [1, 2].map(|number| HOME - before[number].0);
    world.guest("vm1").manner = Manner::Silent(now, 100);
    world.guest("vm2").manner = Manner::Grabs(now + 1);
    world.replace_daemon(Duration::from_secs(5));
    world.run(5, |_| {});
    let cut = held - world.held();
    assert!((taken_back..taken_back + late).contains(&cut), "{cut} {:?} {before:?}", sizes(&world));
    world.run(20, |_| {});
    assert!(world.taken_of_host() <= signed(40 * UNIT), "{:?}", sizes(&world));
}

/// The sizes of the plan before it are not those that tiers get.
#[test]
fn while_guests_lend_no_plan_is_shown() {
    let mut world = two(170, [Manner::Honest; 2]);
    let mut lending = 0;
    while phase(&world) != Phase::Observe {
        world.run(1, |_| {});
        if phase(&world) == Phase::Lend {
            lending += 1;
            let report = world.planner.report(world.at);
            assert!(report.vms.iter().all(|vm| vm.target_bytes == vm.has_bytes), "{report:?}");
        }
    }
    assert!(lending > 0);
}

#[test]
fn a_dry_run_moves_nothing() {
    let mut world = two(170, [Manner::Honest; 2]);
    world.settings.applies = false;
    world.replace_daemon(Duration::ZERO);
    world.run(100, |_| {});
    assert!(world.steps.is_empty());
}

#[test]
fn a_balloon_that_does_not_follow_is_told_to_stop_and_not_asked_again() {
    for manner in [Manner::Stuck, Manner::Lies, Manner::Refuses] {
        let mut world = two(170, [Manner::Honest, manner]);
        run_round(&mut world, |world| assert!(world.taken_of_host() <= signed(40 * UNIT)));
        let log = world.planner.record().decisions;
        let is_told = |decision: &remoca_protocol::host::HostDecision| {
            decision.vm.as_deref() == Some("vm1") && decision.outcome.starts_with("not done: ")
        };
        assert!(log.iter().any(is_told), "{manner:?}: {log:?}");
        assert_eq!(world.guest("vm1").target, HOME * UNIT, "{manner:?}: its balloon is left at work");
        assert_eq!(sizes(&world)[0].0, HOME, "{manner:?}");
        let report = world.planner.report(world.at);
        assert_eq!(report.vms[1].guest.as_ref().unwrap().lent_bytes, 0, "{report:?}");
    }
}

#[test]
fn a_guest_that_is_short_of_memory_gets_its_own_back_from_the_reserve() {
    let mut world = two(190, [Manner::Honest, Manner::Short(0, 0)]);
    // It was booted with more than is its own.
    world.guest("vm1").boot = (HOME + 40) * UNIT;
    run_round(&mut world, |_| {});
    let lent = HOME - sizes(&world)[1].0;
    assert!(lent > 20, "{:?}", sizes(&world));
    world.guest("vm1").manner = Manner::Short(0, u32::MAX);
    let at = world.at.now;
    let steps = world.steps.len();
    world.run(1, |_| {});
    let (when, step) = world.steps[steps].clone();
    assert!(step.side == Side::Guest && step.vm == "vm1" && when - at <= Duration::from_secs(2), "{step:?} {when:?}");
    // At most half of the reserve at once; then that is filled, and it gets more.
    assert_eq!(step.bytes, (HOME - lent + 10) * UNIT);
    world.run(200, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    assert_eq!(sizes(&world)[1].0, HOME, "it has all of its own back: {:#?}", world.steps);
    assert!(world.taken_of_host() <= signed(40 * UNIT), "the reserve is full again");
    // It says so for ever, and gets nothing else.
    assert!(sizes(&world)[1].1 <= 20 && world.guest("vm1").target == HOME * UNIT);
    let log = world.planner.record().decisions;
    assert!(log.iter().any(|decision| decision.why.contains("it is short of memory: it swaps in")), "{log:?}");
}

#[test]
fn a_guest_that_takes_its_memory_back_costs_caches_what_it_took() {
    for grabs in [Manner::Grabs as fn(u32) -> Manner, Manner::GrabsSilently] {
        let mut world = two(170, [Manner::Honest, Manner::Honest]);
        run_round(&mut world, |_| {});
        let now = world.looks;
        world.guest("vm1").manner = grabs(now + 1);
        world.run(40, |_| {});
        assert!(world.taken_of_host() <= signed(40 * UNIT), "{:?}", sizes(&world));
    }
}

/// Returns three VMs after a round in which the guest of `vm1` lent more to the others than its own cache has.
pub fn lent_to_others(needs: u32, third: Shape) -> World {
    let shapes = [Shape::Cliff(needs), Shape::Flat(50), third];
    let vms = shapes.map(|shape| Process::new(shape, Nature::Honest, 20));
    let mut world = World::with(with_guests(80, 20), vms.into());
    for name in ["vm0", "vm1", "vm2"] {
        world.add_guest(name, Guest::new(Manner::Honest, HOME));
    }
    run_round(&mut world, |_| {});
    world
}

#[test]
fn a_guest_gets_no_help_from_what_a_vm_has_lent_that_is_gone() {
    let mut world = lent_to_others(265, Shape::Flat(50));
    assert!(sizes(&world)[1..].iter().all(|(guest, tier)| *guest < HOME - 10 && *tier < 5), "{:?}", sizes(&world));
    world.processes.remove("vm1");
    world.run(1, |_| {});
    world.guest("vm2").manner = Manner::Short(0, u32::MAX);
    // What must hold for each command is in `World::check_step`.
    world.run(60, |_| {});
    assert!(world.taken_of_host() <= signed(60 * UNIT), "{:?}", sizes(&world));
}

#[test]
fn what_a_vm_that_was_stopped_has_lent_is_taken_back_in_order_after_a_minute() {
    let mut world = lent_to_others(170, Shape::Smooth(60));
    let lent = HOME - sizes(&world)[1].0;
    for name in ["vm0", "vm2"] {
        world.process(name).limits.minimum_bytes = 10 * UNIT;
    }
    // Its own cache has less than its guest lent: others have the rest.
    let gone = world.processes.remove("vm1").unwrap();
    assert!(gone.granted < lent, "{gone:?} {lent}");
    let steps = world.steps.len();
    // It may be back soon, so nobody is cut; nor is anything given from what it lent.
    world.run(6, |_| {});
    assert_eq!(world.steps.len(), steps, "{:?}", &world.steps[steps..]);
    world.run(60, |world| {
        let others = ["vm0", "vm2"].map(|name| world.processes[name].wanted);
        assert!(others.iter().all(|units| *units >= 10), "{others:?}");
    });
    assert!(world.taken_of_host() <= signed(60 * UNIT), "{:?}", sizes(&world));
    assert!(world.steps[steps..].iter().any(|(_, step)| step.side == Side::Tier), "{:?}", &world.steps[steps..]);
    let log = world.planner.record().decisions;
    let said = log.iter().position(|decision| decision.why.contains("vm1 is gone")).expect("it is said");
    let cut = |decision: &remoca_protocol::host::HostDecision| decision.why.contains("all have more than the total");
    assert!(log[said..].iter().any(cut) && !log[..said].iter().any(cut), "{log:#?}");
}

#[test]
fn a_vm_that_is_back_within_a_minute_costs_the_others_nothing() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let (before, steps) = (sizes(&world), world.steps.len());
    let process = world.processes.remove("vm1").unwrap();
    world.run(4, |_| {});
    world.processes.insert("vm1".into(), process);
    world.run(20, |_| {});
    assert_eq!((sizes(&world), world.steps.len()), (before, steps), "{:?}", &world.steps[steps..]);
}

/// The total is small beside what the guests could lend.
#[test]
fn on_a_host_with_much_guest_memory_caches_are_divided_and_guests_helped() {
    let vms = (0..64).map(|_| Process::new(Shape::Flat(50), Nature::Honest, 100));
    let mut world = World::with(with_guests(8192, 128), vms.collect());
    let names: Vec<String> = world.processes.keys().cloned().collect();
    for name in &names {
        world.add_guest(name, Guest::new(Manner::Honest, 4608));
    }
    let mut units = vec![world.planner.unit_bytes];
    while units.len() < 3 {
        world.run(1, |world| assert!(world.taken_of_host() <= signed(8064 * UNIT)));
        if *units.last().unwrap() != world.planner.unit_bytes {
            units.push(world.planner.unit_bytes);
            assert!(world.planner.vms.values().all(|vm| vm.curve.is_err()), "they were asked for in other units");
        }
        assert!(world.looks < 1000, "{units:?}");
    }
    run_round(&mut world, |world| assert!(world.taken_of_host() <= signed(8064 * UNIT)));
    world.run(2, |_| {});
    assert!(world.planner.plan.is_ok(), "{:?}", world.planner.plan);
    let lent = world.planner.lent(world.at.now);
    assert!(lent <= unit_of(16 << 30), "what nobody gains by goes back, however large the units were: {lent}");
    assert!(world.planner.unit_bytes <= unit_of(2 * (16 << 30) + 2 * lent), "{} {lent}", world.planner.unit_bytes);
    assert!(world.planner.grid().count <= CURVE_POINTS_MAX);
    // It lends something, and is short of memory.
    let guest = world.guest("vm1");
    let has = guest.actual.min(4000 * UNIT);
    (guest.actual, guest.target, guest.resident, guest.manner) = (has, has, has, Manner::Short(0, u32::MAX));
    world.planner.guests.get_mut("vm1").unwrap().ask(has);
    let steps = world.steps.len();
    world.run(1, |_| {});
    let (_, step) = &world.steps[steps];
    assert_eq!((step.side, &*step.vm, step.bytes), (Side::Guest, "vm1", has + 64 * UNIT), "{step:?}");
}

#[test]
fn a_minimum_that_is_raised_is_given_to_a_guest_that_lends() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    assert!(sizes(&world)[1].0 < HOME - 20, "{:?}", sizes(&world));
    world.process("vm1").limits.guest_minimum_bytes = Some((HOME - 5) * UNIT);
    world.run(60, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    assert!(sizes(&world)[1].0 >= HOME - 5, "{:?}", sizes(&world));
    let log = world.planner.record().decisions;
    assert!(log.iter().any(|decision| decision.why.contains("less than its minimum")), "{log:#?}");
}

/// Lets the guest of `vm2` become short of memory when `vm1` is to get some of the reserve as well because of what `asks` changes, and
/// checks that `vm2` comes first. Returns what there is when both had time to get theirs.
pub fn short_comes_first(asks: impl FnOnce(&mut World)) -> World {
    let mut world = lent_to_others(265, Shape::Flat(50));
    let lent = HOME - sizes(&world)[2].0;
    asks(&mut world);
    world.guest("vm2").manner = Manner::Short(0, u32::MAX);
    let steps = world.steps.len();
    world.run(1, |_| {});
    let (_, step) = &world.steps[steps];
    assert_eq!((&*step.vm, step.bytes), ("vm2", (HOME - lent + 10) * UNIT), "{step:?}");
    // Half of the reserve stays for those that are short of memory next.
    assert!(world.taken_of_host() <= signed(70 * UNIT), "{:?}", sizes(&world));
    world.run(200, |world| assert!(world.taken_of_host() <= signed(80 * UNIT)));
    world
}

#[test]
fn a_guest_that_is_short_of_memory_comes_before_a_minimum() {
    let world = short_comes_first(|world| {
        world.process("vm1").limits.guest_minimum_bytes = Some((HOME - 1) * UNIT);
    });
    assert!(sizes(&world)[1].0 >= HOME - 1, "{:?}", sizes(&world));
}

/// Monitors that nobody has named, and guests with nothing to lend, make no unit larger.
#[test]
fn many_vms_share_a_small_total() {
    let vms = (0..200).map(|_| Process::new(Shape::Flat(50), Nature::Honest, 2));
    let mut world = World::with(with_guests(512, 64), vms.collect());
    let names: Vec<String> = world.processes.keys().cloned().collect();
    for name in &names[..100] {
        world.add_guest(name, Guest::new(Manner::Silent(0, u32::MAX), 128));
    }
    world.run(3, |_| {});
    assert!(world.planner.plan.is_ok() && world.planner.unit_bytes == UNIT, "{:?}", world.planner.plan);
}

#[test]
fn what_a_minimum_brings_uses_up_no_help() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let has = sizes(&world)[1].0;
    world.process("vm1").limits.guest_minimum_bytes = Some((has + 1) * UNIT);
    let steps = world.steps.len();
    world.run(1, |_| {});
    world.guest("vm1").manner = Manner::Short(0, u32::MAX);
    world.run(1, |_| {});
    let given: Vec<_> = world.steps[steps..].iter().map(|(_, step)| (&*step.vm, step.bytes / UNIT)).collect();
    assert_eq!(given[..2], [("vm1", has + 1), ("vm1", has + 11)]);
}

/// Its new QEMU knows nothing of a balloon.
#[test]
fn a_guest_that_was_started_again_lends_again() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    assert!(sizes(&world)[1].0 < HOME);
    let guest = world.guest("vm1");
    (guest.actual, guest.target, guest.resident) = (guest.boot, guest.boot, guest.boot);
    let lends = |world: &World| world.planner.guests["vm1"].lent() > 0;
    for _ in 0..4 {
        world.run(360, |_| {});
        run_round(&mut world, |_| {});
    }
    assert!(lends(&world), "{:#?}", world.planner.record());
}

/// Its VM was made anew, say.
#[test]
fn a_guest_that_lent_nothing_and_comes_back_with_another_size_begins_anew() {
    let mut world = two(170, [Manner::Honest; 2]);
    world.guest("vm1").mute_from = 0;
    world.run(1, |_| {});
    let process = world.processes.remove("vm1").unwrap();
    world.run(12, |_| {});
    world.processes.insert("vm1".into(), process);
    // It has not touched all of that.
    world.add_guest("vm1", Guest::new(Manner::Fresh(HOME), 2 * HOME));
    world.guest("vm1").mute_from = 0;
    world.run(1, |_| {});
    let home = world.planner.guests["vm1"].sizes.map(|sizes| sizes.home_bytes);
    assert_eq!(home, Some(2 * HOME * UNIT));
}

#[test]
fn guests_that_lend_are_looked_at_right_before_all_vms() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let all = world.planner.looked_at.unwrap() + world.settings.interval;
    let mut last = None;
    while let Look::Awaited(at, names) = world.planner.next_look() {
        world.at.now = at;
        world.planner.looked_at_awaited(world.at, &names);
        last = Some((at, names));
    }
    assert_eq!((last, world.planner.next_look()), (Some((all, vec!["vm1".to_owned()])), Look::All(all)));
}

#[test]
fn of_many_guests_that_are_gone_those_that_went_last_are_remembered() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let mut record = world.planner.record();
    assert!(record.guests["vm1"].taken() > 0);
    let gone = GuestRecord { home_bytes: 8, base_bytes: 8, asked_bytes: 6, ..GuestRecord::default() };
    for number in 0..GONE_MAX {
        // A former version says of none when it went.
        record.guests.insert(format!("gone{number:04}"), GuestRecord { gone_s: number as u64, ..gone });
    }
    // A daemon that does not look at guests knows who is there.
    let (terms, guests) = (world.settings.guests.take(), std::mem::take(&mut world.guests));
    world.planner = Planner::new(world.settings, record);
    world.at.now = Duration::ZERO;
    world.run(2, |_| {});
    let record = world.planner.record();
    assert_eq!((record.guests.len(), record.guests["vm1"].gone_s), (GONE_MAX + 1, 0));
    assert_eq!(record.guests["gone0000"].gone_s, world.at.unix_s - 10, "it is seen now");
    (world.settings.guests, world.guests) = (terms, guests);
    world.replace_daemon(Duration::ZERO);
    world.processes.remove("vm1");
    world.run(10, |_| {});
    let guests = world.planner.record().guests;
    assert_eq!((guests.len(), guests["vm1"].gone_s > 0), (GONE_MAX + 1, true));
    assert!(guests.contains_key("gone0000") && !guests.contains_key("gone0001"), "{:?}", guests["vm1"]);
}
