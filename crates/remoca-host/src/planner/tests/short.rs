//! Guests that are short of memory, while others hang, and while theirs is on its way; and caches when guests take much back.

use super::balloon::{Guest, Manner, signed, with_guests};
use super::guests::{HOME, lent_to_own, phase, run_round, run_to_the_return, sizes, three_lent_to_one, two};
use super::half_done::told;
use super::world::{Nature, Process, Shape, UNIT, World};
use crate::planner::moves::{Intent, Stage};
use crate::planner::{GuestRecord, Move, Outcome, Phase, Planner, Round, Side};
use std::time::Duration;

const ALWAYS: Manner = Manner::Short(0, u32::MAX);

/// Runs until the caches give guests their memory back, and the commands for that come next. That of `vm0` gives at most so many units.
fn run_into_the_return(world: &mut World, most: u64) {
    run_to_the_return(world);
    let process = world.process("vm0");
    process.limits.minimum_bytes = process.granted.saturating_sub(most) * UNIT;
    world.hear_next();
    let moves = world.planner.record().intent.unwrap().moves;
    assert!(moves.iter().any(|change| change.vm == "vm0" && change.side == Side::Guest), "{moves:?}");
}

/// Nobody knows what it has, so the reserve is all that is risked.
#[test]
fn a_vm_that_never_answered_costs_no_guest_its_help_and_the_host_no_more_than_the_reserve() {
    let mut world = three_lent_to_one();
    assert!(sizes(&world)[1..].iter().all(|(_, tier)| *tier == 1), "{:?}", sizes(&world));
    // It may have all of what nobody else has.
    world.settings.total_bytes += 100 * UNIT;
    world.processes.insert("vm9".into(), Process::new(Shape::Flat(50), Nature::Hangs(0, 1000), 0));
    world.replace_daemon(Duration::ZERO);
    world.run(1, |_| {});
    let guests = |world: &World| world.guests.values().map(|guest| guest.target / UNIT).sum::<u64>();
    let before = guests(&world);
    ["vm1", "vm2", "vm3"].iter().for_each(|name| world.guest(name).manner = ALWAYS);
    world.run(1, |_| {});
    assert_eq!(guests(&world), before + 20, "{:?}", world.steps);
    world.run(60, |_| {});
    assert_eq!(guests(&world), before + 20, "{:?}", world.steps);
    // It has nothing.
    world.process("vm9").nature = Nature::Honest;
    world.run(60, |_| {});
    assert_eq!(guests(&world), 4 * HOME, "{:?}", world.guests);
}

/// What each guest of [`lent_to_the_first`] has lent, in units.
const LENT: u64 = 40;

/// Returns VMs whose guests are short of memory at once. What they lent is in the cache of the first VM, which has so many units.
fn lent_to_the_first(units: u64, guests: usize, reserve_bytes: u64) -> World {
    let mut vms = vec![Process::new(Shape::Flat(50), Nature::Honest, units)];
    vms.resize(1 + guests, Process::new(Shape::Flat(50), Nature::Honest, 1));
    let mut settings = with_guests(60, 20);
    settings.guests.as_mut().unwrap().reserve_bytes = reserve_bytes;
    let mut world = World::with(settings, vms);
    let mut record = world.planner.record();
    record.round = Round { phase: Phase::Rest, since_s: world.at.unix_s };
    for number in 1..=guests {
        let name = format!("vm{number}");
        let mut guest = Guest::new(Manner::Honest, HOME);
        let less = (HOME - LENT) * UNIT;
        (guest.target, guest.actual, guest.resident) = (less, less, less);
        world.add_guest(&name, guest);
        let (home_bytes, base_bytes) = (HOME * UNIT, HOME * UNIT);
        record.guests.insert(name, GuestRecord { home_bytes, base_bytes, asked_bytes: less, ..GuestRecord::default() });
    }
    world.planner = Planner::new(world.settings, record);
    world.run(3, |_| {});
    assert!(world.steps.is_empty(), "{:?}", world.steps);
    world.guests.values_mut().for_each(|guest| guest.manner = ALWAYS);
    world
}

/// Returns the least and the most that a guest of [`lent_to_the_first`] has got, in bytes.
fn got(world: &World) -> (u64, u64) {
    let got = || world.guests.values().map(|guest| guest.target + LENT * UNIT - HOME * UNIT);
    (got().min().unwrap(), got().max().unwrap())
}

/// The reserve has two halves. By their names, the first four would share it until they lack nothing.
#[test]
fn of_many_guests_that_are_short_of_memory_each_is_helped_before_one_is_helped_twice() {
    let mut world = lent_to_the_first(235, 5, 20 * UNIT);
    world.run(100, |world| {
        assert!(world.taken_of_host() <= signed(60 * UNIT));
        let (least, most) = got(world);
        assert!(least > 0 || most <= 10 * UNIT, "{:?}", world.steps);
    });
    assert!(world.guests.values().all(|guest| guest.target == HOME * UNIT), "{:?}", world.guests);
}

/// Two get 20 MiB each time, and the third one 2: it would be the last one for ever.
#[test]
fn a_guest_that_gets_only_what_others_have_left_keeps_its_place() {
    let mut world = lent_to_the_first(156, 3, 41 << 20);
    world.run(100, |world| {
        assert!(world.taken_of_host() <= signed(60 * UNIT));
        let (least, most) = got(world);
        assert!(most - least <= 22 << 20, "{:?}", world.steps);
    });
    assert!(world.guests.values().all(|guest| guest.target == HOME * UNIT), "{:?}", world.guests);
}

#[test]
fn a_guest_that_is_still_short_of_memory_gets_what_its_own_cache_has_of_it_whoever_hangs() {
    let mut world = lent_to_own();
    world.process("vm1").limits.minimum_bytes = 25 * UNIT;
    world.process("vm0").nature = Nature::Hangs(world.looks, 1000);
    world.guest("vm1").manner = ALWAYS;
    let (steps, began) = (world.steps.len(), world.at.now);
    // The cache gives before the balloon is told: that is checked before each command.
    world.run(5, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    let told: Vec<_> = world.steps[steps..].iter().map(|(_, step)| (&*step.vm, step.side, step.bytes / UNIT)).collect();
    let expected = [
        ("vm1", Side::Guest, HOME - 38),
        // It has 38 units of it still, and more than its minimum.
        ("vm1", Side::Tier, 30),
        ("vm1", Side::Guest, HOME),
    ];
    assert_eq!(told, expected);
    let waited = world.steps[steps + 1].0 - began;
    assert!(waited >= world.settings.window / 2 && waited < world.settings.window, "{waited:?}");
}

#[test]
fn a_guest_gets_what_its_own_cache_has_given_though_that_of_another_gives_nothing() {
    let mut world = lent_to_own();
    // It says that it gives, and does not.
    world.process("vm0").nature = Nature::Ignores;
    world.guests.values_mut().for_each(|guest| guest.manner = ALWAYS);
    let (steps, began) = (world.steps.len(), world.at.now);
    world.run(5, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    let told = told(&world, steps);
    let last = told.last().unwrap();
    assert_eq!(last.1, HOME * UNIT, "{:?}", &world.steps[steps..]);
    assert!(last.0 - began <= world.settings.window / 2 + Duration::from_secs(5), "{told:?}");
    // What does not come back is given to nobody.
    assert_eq!(world.guests["vm0"].target, (HOME - 38) * UNIT);
}

#[test]
fn a_guest_is_not_short_of_memory_for_as_long_as_its_vm_process_hangs() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    assert!(sizes(&world)[1].0 < HOME - 20, "{:?}", sizes(&world));
    let (steps, looks) = (world.steps.len(), world.looks);
    world.guest("vm1").waits = Some(60.);
    world.run(1, |_| {});
    world.process("vm1").nature = Nature::Hangs(looks, 1000);
    world.run(60, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    assert_eq!(told(&world, steps).len(), 1, "{:?}", &world.steps[steps..]);
    // It answers again, and says the same.
    world.process("vm1").nature = Nature::Honest;
    world.run(1, |_| {});
    assert_eq!(told(&world, steps).len(), 2, "{:?}", &world.steps[steps..]);
}

#[test]
fn a_cache_keeps_its_minimum_whatever_its_guest_lacks() {
    let mut world = lent_to_own();
    world.process("vm1").limits.minimum_bytes = 60 * UNIT;
    world.guest("vm1").manner = ALWAYS;
    world.run(5, |world| assert!(world.processes["vm1"].wanted >= 60));
    assert_eq!((world.processes["vm1"].wanted, world.guests["vm1"].target), (60, (HOME - 38 + 8) * UNIT));
}

#[test]
fn a_guest_that_is_still_short_of_memory_does_not_wait_for_others_to_lend() {
    let mut world = two(170, [Manner::Crawls, Manner::Honest]);
    while world.guests["vm1"].actual > (HOME - 24) * UNIT {
        world.run(1, |_| {});
    }
    world.guest("vm1").manner = ALWAYS;
    world.run(6, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    assert_eq!((world.guests["vm1"].target, phase(&world)), (HOME * UNIT, Phase::Lend), "{:?}", world.steps);
}

#[test]
fn a_guest_that_is_short_of_memory_for_a_moment_goes_on_lending() {
    let mut world = lent_to_own();
    world.guest("vm1").manner = Manner::Short(world.looks, 2);
    world.run(10, |_| {});
    assert_eq!((world.guests["vm1"].target, phase(&world)), ((HOME - 38) * UNIT, Phase::Observe));
    let why = world.planner.report(world.at).vms[1].guest.clone().unwrap().why;
    assert!(why.starts_with("it lends memory; it was told to take memory back, and is asked for none for "), "{why}");
}

#[test]
fn what_is_on_its_way_back_to_a_guest_comes_though_it_becomes_short_of_memory() {
    let mut world = two(170, [Manner::Honest; 2]);
    run_into_the_return(&mut world, HOME);
    world.guest("vm0").manner = ALWAYS;
    world.run(1, |world| assert!(world.taken_of_host() <= signed(60 * UNIT)));
    assert_eq!(world.guests["vm0"].target, HOME * UNIT, "{:?}", world.steps);
}

#[test]
fn what_is_on_its_way_back_to_a_guest_is_no_help_for_another() {
    let vms = (0..4).map(|_| Process::new(Shape::Flat(50), Nature::Honest, 10));
    let mut world = World::with(with_guests(60, 20), vms.collect());
    (0..4).for_each(|number| world.add_guest(&format!("vm{number}"), Guest::new(Manner::Honest, HOME)));
    while phase(&world) != Phase::Observe {
        world.run(1, |_| {});
    }
    // Two use up the reserve, and the third one gets its own from its cache. That of the fourth one has nothing to give.
    world.process("vm3").limits.minimum_bytes = world.process("vm3").granted * UNIT;
    world.run(1, |_| {});
    world.guests.values_mut().for_each(|guest| guest.manner = ALWAYS);
    world.run(2, |world| assert!(world.taken_of_host() <= signed(60 * UNIT), "{:?}", world.steps));
    let has: Vec<_> = world.guests.values().map(|guest| guest.target / UNIT).collect();
    assert_eq!(has, [HOME - 38, HOME - 38, HOME, HOME - 48]);
}

/// Help and a return may name the same size: the return is told last.
#[test]
fn a_return_that_was_not_sent_takes_back_no_help_that_was() {
    let mut world = two(170, [Manner::Honest; 2]);
    // Less than half of the reserve.
    run_into_the_return(&mut world, 5);
    world.guest("vm0").manner = ALWAYS;
    let mut told = Vec::new();
    for _ in 0..10 {
        while let Some(step) = world.planner.next_step(world.at) {
            let outcome = match (step.side, told.len()) {
                (Side::Guest, 1) => Outcome::NotSent("the intent cannot be written: no".into()),
                (Side::Guest, _) => world.guest(&step.vm).told(step.bytes),
                (Side::Tier, _) => {
                    let process = world.process(&step.vm);
                    (process.wanted, process.granted) = (step.bytes / UNIT, step.bytes / UNIT);
                    Outcome::Told
                }
            };
            if step.vm == "vm0" && step.side == Side::Guest {
                told.push(step.bytes);
            }
            world.planner.step_done(world.at, &step, outcome);
        }
        if told.len() > 1 {
            break;
        }
        let names = ["vm0".to_owned(), "vm1".to_owned()];
        world.hear_guests(Some(&names));
        for heard in world.heard() {
            world.planner.hear(world.at, &heard.vm, heard.answer);
        }
        world.planner.looked_at_awaited(world.at, &names);
    }
    assert!(told.len() == 2 && told[0] == told[1], "{told:?}");
    let sizes = world.planner.record().guests["vm0"];
    assert_eq!((sizes.asked_bytes, sizes.is_untold), (told[0], true));
}

#[test]
fn caches_that_changed_lately_shrink_at_once_when_a_guest_takes_back_more_than_the_reserve() {
    let mut world = lent_to_own();
    world.guest("vm1").manner = Manner::Grabs(world.looks);
    let began = world.at.now;
    while world.processes["vm1"].granted > 20 {
        world.run(1, |_| {});
        assert!(world.at.now - began <= Duration::from_secs(20), "{:?}", world.steps);
    }
    let (at, step) = world.steps.iter().rfind(|(_, step)| step.side == Side::Tier).unwrap();
    assert_eq!((&*step.vm, *at - began <= Duration::from_secs(2)), ("vm1", true), "{at:?}");
    assert!(world.taken_of_host() <= signed(40 * UNIT));
}

/// It takes back less than the reserve, or more.
#[test]
fn a_guest_that_takes_its_memory_back_and_lets_it_go_again_has_caches_cut_once() {
    for needs in [170, 190] {
        for takes in [Manner::Grabs(0), Manner::GrabsSilently(0)] {
            let mut world = two(needs, [Manner::Honest; 2]);
            run_round(&mut world, |_| {});
            let (before, lent) = (world.processes["vm0"].wanted, HOME - sizes(&world)[1].0);
            assert_eq!(lent > 20, needs == 190, "{lent}");
            world.guest("vm1").manner = takes;
            world.run(14, |_| {});
            let cut = world.processes["vm0"].wanted;
            assert!(cut < before && world.taken_of_host() <= signed(40 * UNIT), "{:?}", world.steps);
            for _ in 0..8 {
                for manner in [Manner::Honest, takes] {
                    world.guest("vm1").manner = manner;
                    world.run(10, |world| assert_eq!(world.processes["vm0"].wanted, cut, "{:?}", world.steps));
                }
            }
            // Its balloon is told, and it lends again in the next round.
            assert_eq!((world.guests["vm1"].target, phase(&world)), (HOME * UNIT, Phase::Rest));
            assert_eq!(world.planner.record().guests["vm1"].taken(), 0);
            world.guest("vm1").manner = Manner::Honest;
            let steps = world.steps.len();
            world.run(300, |_| {});
            let mut told = world.steps[steps..].iter().filter(|(_, step)| step.vm == "vm1" && step.side == Side::Guest);
            assert!(told.any(|(_, step)| step.bytes < HOME * UNIT), "{:?}", &world.steps[steps..]);
        }
    }
}

#[test]
fn a_guest_that_took_its_memory_back_keeps_it_though_the_daemon_dies_before_it_is_told() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    world.guest("vm1").manner = Manner::Grabs(0);
    // At the command that cuts a cache.
    world.kills.insert(world.steps.len(), (false, Duration::from_secs(3)));
    world.run(1, |_| {});
    assert!(world.kills.is_empty());
    world.guest("vm1").manner = Manner::Honest;
    world.run(10, |_| {});
    assert_eq!(world.guests["vm1"].target, HOME * UNIT, "{:?}", world.steps);
}

/// With a word or without one, and more than the reserve, so that caches are cut at once.
#[test]
fn a_guest_that_takes_all_back_while_guests_lend_is_not_asked_when_caches_are_cut() {
    for grabs in [Manner::Grabs as fn(u32) -> Manner, Manner::GrabsSilently] {
        let mut world = two(170, [Manner::Crawls, Manner::Honest]);
        world.settings = with_guests(48, 8);
        world.replace_daemon(Duration::ZERO);
        while world.processes["vm1"].granted < 44 {
            world.run(1, |_| {});
        }
        world.guest("vm1").manner = grabs(world.looks);
        let (steps, tier) = (world.steps.len(), world.processes["vm1"].granted);
        let mut looks = 0;
        while world.processes["vm1"].granted >= tier {
            world.run(1, |_| {});
            looks += 1;
            assert!(looks < 20, "its tier is not cut: {:?}", &world.steps[steps..]);
        }
        assert_eq!(phase(&world), Phase::Lend);
        assert!(world.planner.guests["vm1"].is_not_asked(world.at.now));
        assert_eq!(world.planner.record().guests["vm1"].taken(), 0);
        world.run(3, |_| {});
        assert!(told(&world, steps).is_empty(), "{:?}", &world.steps[steps..]);
    }
}

/// The host may see a little more in a guest than its balloon leaves to it.
#[test]
fn a_guest_that_took_nothing_back_lends_as_before_when_caches_are_cut() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let before = world.planner.record().guests["vm1"];
    assert!(before.taken() > 0);
    let guest = world.guest("vm1");
    (guest.manner, guest.resident) = (Manner::Lies, guest.actual + UNIT);
    // Somebody has made a cache larger than the total allows.
    let process = world.process("vm0");
    let has = process.granted + 5;
    (process.wanted, process.granted) = (has, has);
    world.run(14, |_| {});
    assert!(world.processes["vm0"].wanted < has, "{:?}", world.steps);
    let after = world.planner.record().guests["vm1"];
    assert_eq!((after.asked_bytes, after.is_untold), (before.asked_bytes, false));
    let log = world.planner.record().decisions;
    assert!(!log.iter().any(|decision| decision.why.contains("took back")), "{log:#?}");
}

#[test]
fn a_guest_that_takes_memory_back_while_its_balloon_is_told_has_what_counts_as_its_own() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    assert!(HOME - sizes(&world)[1].0 > 20, "more than the reserve: {:?}", sizes(&world));
    // Its balloon is still at work on less than it is asked to leave.
    let guest = world.guest("vm1");
    let less = guest.target - UNIT;
    (guest.target, guest.actual, guest.resident) = (less, less, less);
    world.planner.guests.get_mut("vm1").unwrap().note_untold(true);
    world.hear_next();
    let step = world.planner.next_step(world.at).unwrap();
    assert_eq!((&*step.vm, step.side, step.bytes), ("vm1", Side::Guest, less + UNIT));
    let outcome = world.guest("vm1").told(step.bytes);
    world.planner.step_done(world.at, &step, outcome);
    // Before that moves, the guest takes all back without a word.
    world.guest("vm1").resident = HOME * UNIT;
    world.hear_next();
    assert!(world.planner.record().intent.is_some(), "caches are cut");
    world.run(60, |_| {});
    let (guest, sizes) = (&world.guests["vm1"], world.planner.record().guests["vm1"]);
    assert!(guest.target >= sizes.asked_bytes, "{guest:?} {sizes:?}");
}

#[test]
fn caches_that_changed_lately_keep_their_sizes_when_a_guest_takes_back_less() {
    let mut world = lent_to_own();
    let guest = world.guest("vm1");
    let more = guest.actual + 10 * UNIT;
    (guest.manner, guest.actual, guest.resident) = (Manner::Stuck, more, more);
    let steps = world.steps.len();
    world.run(3, |_| {});
    assert_eq!(world.steps.len(), steps, "{:?}", &world.steps[steps..]);
}

#[test]
fn what_a_guest_has_got_back_is_no_longer_on_its_way() {
    let mut world = two(170, [Manner::Honest; 2]);
    world.run(1, |_| {});
    // Each cache has four units less than before.
    let of = |vm: &str, side, from: u64, to: u64, stage| Move {
        vm: vm.into(),
        side,
        from_bytes: from * UNIT,
        to_bytes: to * UNIT,
        stage,
        ..Move::default()
    };
    let moves = |of_vm0| {
        let given = |vm: &str, stage| [of(vm, Side::Tier, 24, 16, Stage::Done), of(vm, Side::Guest, 80, 88, stage)];
        [given("vm0", of_vm0), given("vm1", Stage::Planned)].concat()
    };
    for (of_vm0, units) in [(Stage::Planned, 8), (Stage::Begun, 4), (Stage::Done, 4), (Stage::Dropped, 4)] {
        world.planner.intent = Some(Intent { at_s: 0, moves: moves(of_vm0) });
        assert_eq!(world.planner.on_its_way(world.at.now), units * UNIT, "{of_vm0:?}");
    }
}

#[test]
fn help_is_half_of_the_reserve_in_whole_mib() {
    let mut world = two(190, [Manner::Honest; 2]);
    run_round(&mut world, |_| {});
    let less = world.guests["vm1"].target;
    assert!(HOME * UNIT - less > 5 << 20, "{:?}", sizes(&world));
    world.settings.guests.as_mut().unwrap().reserve_bytes = 5 << 20;
    world.replace_daemon(Duration::ZERO);
    world.guest("vm1").manner = ALWAYS;
    let steps = world.steps.len();
    world.run(1, |_| {});
    assert_eq!(told(&world, steps)[0].1, less + (2 << 20), "{:?}", &world.steps[steps..]);
}
