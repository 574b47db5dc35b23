//! A daemon that dies between two steps, and VMs that do not follow.

use super::balloon::{Guest, Manner};
use super::guests::{run_round, two as two_guests};
use super::world::{Nature, Process, Shape, TOTAL, UNIT, World};
use crate::planner::{Intent, Move, Outcome, Planner, Record, Settings, Side, Stage, Step};
use std::time::Duration;

fn two() -> Vec<Process> {
    vec![Process::new(Shape::Cliff(130), Nature::Honest, 100), Process::new(Shape::Flat(50), Nature::Honest, 100)]
}

/// Two that could be changed, and `vm2`, which says that it has far more than there is.
fn with_one_that_claims() -> Vec<Process> {
    vec![
        Process::new(Shape::Cliff(130), Nature::Honest, 66),
        Process::new(Shape::Flat(50), Nature::Honest, 66),
        Process::new(Shape::Flat(50), Nature::Claims(500), 66),
    ]
}

/// Runs until the take is on record; its command is sent if `is_sent`. The daemon dies then.
fn dies_at_the_take(world: &mut World, is_sent: bool) {
    world.run(1, |_| {});
    assert!(world.steps.is_empty());
    // The second look plans, and the first step begins.
    let at = crate::planner::Moment { now: world.at.now + Duration::from_secs(10), unix_s: world.at.unix_s + 10 };
    world.at = at;
    let all = world.heard();
    world.planner.hear_all(at, all);
    let step = world.planner.next_step(at).unwrap();
    assert_eq!(step.vm, "vm1");
    if is_sent {
        world.process("vm1").wanted = step.bytes / UNIT;
    }
}

#[test]
fn an_intent_is_carried_out_by_the_next_daemon() {
    for is_sent in [false, true] {
        let mut world = World::new(two());
        dies_at_the_take(&mut world, is_sent);
        world.replace_daemon(Duration::from_secs(5));
        world.run(2, |world| assert!(world.held() <= TOTAL));
        assert_eq!(world.processes["vm0"].wanted, 133, "{:?}", world.steps);
        assert_eq!(world.steps.len(), if is_sent { 1 } else { 2 });
        assert!(world.planner.record().intent.is_none());
        let log = world.planner.report(world.at).decisions;
        assert!(log[0].why.contains("a former daemon ended") && log[0].why.contains("carried out"), "{log:?}");
    }
}

#[test]
fn an_old_intent_is_undone() {
    let mut world = World::new(two());
    dies_at_the_take(&mut world, true);
    world.replace_daemon(Duration::from_secs(3600));
    world.run(2, |world| assert!(world.held() <= TOTAL));
    assert_eq!(world.process("vm1").wanted, 100);
    assert_eq!(world.process("vm0").wanted, 100);
    assert!(world.planner.report(world.at).decisions[0].why.contains("is undone"));
}

#[test]
fn undoing_an_old_intent_takes_no_vm_below_its_minimum() {
    let mut world = World::new(two());
    world.process("vm0").limits.minimum_bytes = 120 * UNIT;
    // It dies when the give was sent.
    world.kills.insert(1, (false, Duration::from_secs(3600)));
    world.run(10, |_| {});
    assert!(world.planner.report(world.at).decisions.iter().any(|decision| decision.why.contains("a former daemon")));
    assert_eq!(world.processes["vm0"].wanted, 133, "{:?}", world.steps);
}

#[test]
fn a_young_intent_takes_no_vm_below_a_minimum_that_was_raised_meanwhile() {
    for is_sent in [false, true] {
        let mut world = World::new(two());
        dies_at_the_take(&mut world, is_sent);
        let before = world.process("vm1").wanted;
        world.process("vm1").limits.minimum_bytes = 90 * UNIT;
        world.replace_daemon(Duration::from_secs(5));
        world.run(20, |world| {
            assert!(world.processes["vm1"].wanted >= before, "{:?}", world.steps);
            assert!(world.processes["vm0"].wanted <= 110 && world.held() <= TOTAL, "{:?}", world.steps);
        });
        assert!(world.process("vm1").wanted >= 90, "{:?}", world.steps);
        let log = world.planner.report(world.at).decisions;
        let is_dropped = |outcome: &str| outcome.contains("leave vm1 less than its minimum");
        assert!(log.iter().any(|decision| is_dropped(&decision.outcome)), "{log:?}");
    }
}

#[test]
fn what_a_vm_gave_that_is_owed_more_by_now_goes_to_nobody_else() {
    let mut world = World::new(two());
    // The take is sent at the second look, and done after the third.
    world.process("vm1").nature = Nature::Ignores;
    world.run(2, |_| {});
    assert_eq!((world.process("vm1").wanted, world.process("vm1").granted), (67, 100));
    world.process("vm1").limits.minimum_bytes = 90 * UNIT;
    world.run(1, |_| {});
    world.process("vm1").nature = Nature::Honest;
    world.run(20, |world| assert!(world.processes["vm0"].wanted <= 110, "{:?}", world.steps));
    assert!(world.process("vm1").wanted >= 90, "{:?}", world.steps);
}

#[test]
fn a_young_step_of_a_guest_ends_if_its_minimum_was_raised_meanwhile() {
    for is_before in [true, false] {
        let mut world = two_guests(170, [Manner::Honest; 2]);
        let home = world.guests["vm1"].home;
        // The first take of a guest was not sent when it dies, or just sent.
        world.kills.insert(0, (is_before, Duration::from_secs(5)));
        let looks = (0..20).find(|_| {
            world.run(1, |_| {});
            world.kills.is_empty()
        });
        assert!(looks.is_some() && (world.guests["vm0"].target == home) == is_before);
        for name in ["vm0", "vm1"] {
            world.process(name).limits.guest_minimum_bytes = Some(home);
        }
        let targets: Vec<u64> = world.guests.values().map(|guest| guest.target).collect();
        world.run(10, |world| {
            let now = world.guests.values().map(|guest| guest.target);
            assert!(now.zip(&targets).all(|(now, before)| now >= *before), "{:?}", world.steps);
        });
        let has_all = |guest: &Guest| (guest.target, guest.actual) == (home, home);
        assert!(world.guests.values().all(has_all), "{:?} {:?}", world.guests, world.steps);
    }
}

/// Returns the record of a daemon that began to give the guest of `vm1` memory back at a time, which its tier has given, and what the guest
/// has with that.
pub fn record_of_a_return(world: &World, at_s: u64, stage: Stage) -> (Record, u64) {
    let (less, tier) = (world.guests["vm1"].actual, world.processes["vm1"].wanted * UNIT);
    let more = less + 4 * UNIT;
    let mut record = world.planner.record();
    record.guests.get_mut("vm1").unwrap().asked_bytes = more;
    let change = |side, from_bytes, to_bytes, stage| Move {
        vm: "vm1".into(),
        side,
        from_bytes,
        to_bytes,
        stage,
        ..Move::default()
    };
    let moves = vec![change(Side::Tier, tier + 4 * UNIT, tier, Stage::Done), change(Side::Guest, less, more, stage)];
    record.intent = Some(Intent { at_s, moves });
    (record, more)
}

/// Lets a daemon die long ago, after it had begun to give the guest of `vm1` memory back, which that has by now. Returns what it has.
fn dies_in_a_return(world: &mut World, stage: Stage) -> u64 {
    run_round(world, |_| {});
    let (record, more) = record_of_a_return(world, world.at.unix_s - 3600, stage);
    let guest = world.guest("vm1");
    (guest.target, guest.actual, guest.resident) = (more, more, more);
    world.planner = Planner::new(world.settings, record);
    world.at.now = Duration::ZERO;
    more
}

#[test]
fn undoing_an_old_return_takes_no_guest_below_its_minimum() {
    let mut world = two_guests(170, [Manner::Honest; 2]);
    let more = dies_in_a_return(&mut world, Stage::Begun);
    let tier = world.processes["vm1"].wanted * UNIT;
    let limits = &mut world.process("vm1").limits;
    (limits.guest_minimum_bytes, limits.minimum_bytes) = (Some(more), tier);
    let steps = world.steps.len();
    world.run(3, |_| {});
    let told = world.steps[steps..].iter().filter(|(_, step)| step.vm == "vm1");
    assert!(
        told.clone().all(|(_, step)| step.side == Side::Guest && step.bytes >= more),
        "{:?}",
        &world.steps[steps..]
    );
    // Its balloon may not have heard of it.
    assert_eq!(told.count(), 1);
}

#[test]
fn undoing_an_old_return_takes_nothing_from_a_guest() {
    for stage in [Stage::Begun, Stage::Done] {
        let mut world = two_guests(170, [Manner::Honest; 2]);
        let more = dies_in_a_return(&mut world, stage);
        let steps = world.steps.len();
        world.run(10, |_| {});
        let told = &world.steps[steps..];
        let is_taken = |step: &Step| step.vm == "vm1" && step.side == Side::Guest && step.bytes < more;
        assert!(!told.iter().any(|(_, step)| is_taken(step)), "{stage:?}: {told:?}");
        assert!(world.guests["vm1"].target >= more, "{stage:?}: {told:?}");
    }
}

#[test]
fn a_young_step_takes_nothing_from_a_guest_that_got_more_meanwhile() {
    let mut world = two_guests(170, [Manner::Crawls; 2]);
    // All that happens is seen at looks at all VMs, so the next daemon has not looked yet.
    world.delay = u32::MAX;
    // In the second step of lending.
    world.kills.insert(4, (true, Duration::from_secs(5)));
    while !world.kills.is_empty() {
        world.run(1, |_| {});
    }
    assert!(world.planner.looked_at.is_none());
    let home = world.guests["vm0"].home;
    let moves = world.planner.record().intent.unwrap().moves;
    let begun = moves.iter().find(|change| change.side == Side::Guest && change.stage == Stage::Begun).unwrap();
    assert!(begun.takes() && begun.from_bytes < home, "{moves:?}");
    // The operator gives it all back.
    let name = begun.vm.clone();
    let guest = world.guest(&name);
    (guest.target, guest.actual, guest.resident) = (home, home, home);
    let steps = world.steps.len();
    world.run(10, |_| {});
    let told = &world.steps[steps..];
    let is_taken = |step: &Step| step.vm == name && step.side == Side::Guest && step.bytes < home;
    assert!(!told.iter().any(|(_, step)| is_taken(step)), "{told:?}");
    // The former daemon may have told the balloon already.
    let is_given = |step: &Step| step.vm == name && step.side == Side::Guest && step.bytes == home;
    assert!(told.iter().any(|(_, step)| is_given(step)), "{told:?}");
}

/// `virsh managedsave` and a later start, with the same daemon or its successor. Balloons are saved with their guests.
#[test]
fn a_guest_that_is_saved_while_it_lends_has_all_back_after_it_is_restored() {
    for is_other_daemon in [false, true] {
        let mut world = two_guests(190, [Manner::Honest; 2]);
        run_round(&mut world, |_| {});
        let before = world.planner.record().guests["vm1"];
        assert!(before.taken() > 20 * UNIT, "{before:?}");
        world.guest("vm1").manner = Manner::Saved;
        world.run(20, |_| {});
        assert_eq!(world.planner.lent(world.at.now), 0, "nobody sees it");
        if is_other_daemon {
            world.replace_daemon(Duration::from_secs(5));
            world.run(1, |_| {});
        }
        world.guest("vm1").manner = Manner::Honest;
        world.run(2, |_| {});
        let after = world.planner.record().guests["vm1"];
        assert_eq!((after.base_bytes, after.asked_bytes), (before.base_bytes, before.asked_bytes));
        assert_eq!(world.planner.lent(world.at.now), before.taken());
        world.planner.ask_back();
        while world.planner.gives_back() {
            world.run(1, |_| {});
        }
        let guest = &world.guests["vm1"];
        assert_eq!((guest.target, guest.actual), (guest.home, guest.home), "{is_other_daemon}: {:?}", world.steps);
    }
}

#[test]
fn a_dry_run_leaves_an_intent_alone() {
    let mut world = World::new(two());
    dies_at_the_take(&mut world, true);
    world.settings = Settings { applies: false, ..world.settings };
    world.replace_daemon(Duration::from_secs(5));
    world.run(5, |_| {});
    assert!(world.steps.is_empty());
}

#[test]
fn a_vm_that_does_not_give_back_is_not_asked_again_and_nobody_gets_its_memory() {
    let mut world = World::new(two());
    world.process("vm1").nature = Nature::Ignores;
    world.run(20, |world| assert!(world.held() <= TOTAL));
    assert_eq!(world.process("vm0").wanted, 100);
    let report = world.planner.report(world.at);
    assert!(report.decisions[0].outcome.contains("did not follow within 30 s"), "{:?}", report.decisions);
    for words in ["did not change its size as told", "the daemon does not ask it again for ", " min"] {
        assert!(report.vms[1].why.contains(words), "{:?}", report.vms[1]);
    }
    assert_eq!(world.steps.len(), 1);
}

#[test]
fn a_command_without_an_answer_counts_until_it_can_no_longer_be_executed() {
    let late = Process::new(Shape::Cliff(100), Nature::Late(4), 60);
    let gives = Process::new(Shape::Flat(50), Nature::Honest, 120);
    // It wants what the first one seems not to have got.
    let mut wants = Process::new(Shape::Flat(50), Nature::Alternates(Shape::Cliff(60), 3), 20);
    wants.limits.minimum_bytes = 20 * UNIT;
    let mut world = World::new(vec![late, gives, wants]);
    world.run(2, |_| {});
    assert_eq!((world.process("vm0").wanted, world.process("vm1").wanted), (60, 77));
    world.run(20, |world| assert!(world.held() <= TOTAL, "{:?}", world.steps));
    assert_eq!(world.process("vm0").wanted, 103);
}

#[test]
fn a_vm_that_is_silent_is_told_nothing() {
    // It has more than its share, and the other one cannot give what is too much.
    let hangs = Process::new(Shape::Smooth(30), Nature::Hangs(2, 50), 120);
    let mut world = World::new(vec![Process::new(Shape::Smooth(30), Nature::Honest, 100), hangs]);
    world.run(20, |_| {});
    assert!(world.steps.is_empty(), "{:?}", world.steps);
    // Without its bound it can.
    world.process("vm0").limits.bound = f64::INFINITY;
    world.process("vm0").wanted = 120;
    world.run(3, |_| {});
    assert_eq!((world.process("vm0").wanted, world.process("vm1").wanted), (80, 120));
}

#[test]
fn others_give_nothing_because_one_says_that_it_has_too_much() {
    let mut world = World::new(with_one_that_claims());
    world.run(30, |_| {});
    assert!(world.steps.iter().all(|(_, step)| step.vm == "vm2"), "{:?}", world.steps);
    assert!(world.planner.report(world.at).state.contains("more than the total"));
}

#[test]
fn a_vm_that_was_stopped_counts_for_a_minute() {
    let mut world = World::new(two());
    world.processes.insert("vm9".into(), Process::new(Shape::Flat(50), Nature::Honest, 40));
    (world.process("vm0").wanted, world.process("vm1").wanted) = (100, 60);
    world.run(1, |_| {});
    world.processes.remove("vm9");
    // Its memory server keeps the pages for it.
    world.run(6, |world| assert!(world.held() <= TOTAL - 40, "{:?}", world.steps));
    let row = |world: &World| world.planner.report(world.at).vms.into_iter().find(|vm| vm.name == "vm9");
    assert_eq!(row(&world).map(|vm| (vm.has_bytes, vm.state)), Some((40 * UNIT, "stuck".into())));
    world.run(1, |_| {});
    assert_eq!((row(&world), world.process("vm0").wanted), (None, 133));
}

/// Nobody has seen it go.
#[test]
fn a_vm_that_left_with_a_former_daemon_counts_for_a_minute_from_the_start_of_the_next_one() {
    for (pause_s, counts) in [(69, true), (70, false)] {
        let mut world = World::new(two());
        world.processes.insert("vm9".into(), Process::new(Shape::Flat(50), Nature::Honest, 40));
        (world.process("vm0").wanted, world.process("vm1").wanted) = (100, 60);
        world.run(1, |_| {});
        world.processes.remove("vm9");
        world.replace_daemon(Duration::from_secs(pause_s));
        let row = |world: &World| world.planner.report(world.at).vms.into_iter().find(|vm| vm.name == "vm9");
        let most = if counts { TOTAL - 40 } else { TOTAL };
        world.run(6, |world| assert!(world.held() <= most, "{:?}", world.steps));
        let expected = counts.then(|| (40 * UNIT, "stuck".to_owned()));
        assert_eq!(row(&world).map(|vm| (vm.has_bytes, vm.state)), expected, "{pause_s}");
        world.run(1, |_| {});
        assert_eq!((row(&world), world.process("vm0").wanted), (None, 133), "{pause_s}");
        assert!(!world.planner.record().sizes.contains_key("vm9"));
    }
}

/// Each daemon looks once, as `--once` does.
#[test]
fn a_vm_that_left_with_a_former_daemon_does_not_count_for_one_daemon_after_the_other() {
    // The clock is right, was set back by an hour, or was not on record yet.
    for read_s in [None, Some(1_003_600), Some(0)] {
        let mut world = World::new(two());
        world.processes.insert("vm9".into(), Process::new(Shape::Flat(50), Nature::Honest, 40));
        (world.process("vm0").wanted, world.process("vm1").wanted) = (100, 60);
        world.run(1, |_| {});
        world.processes.remove("vm9");
        world.planner.read_s = read_s.unwrap_or(world.planner.read_s);
        let counts = |_| {
            world.replace_daemon(Duration::from_secs(30));
            world.run(1, |_| {});
            world.planner.report(world.at).vms.iter().any(|vm| vm.name == "vm9")
        };
        let counts: Vec<bool> = (0..5).map(counts).collect();
        assert!(counts[0] && !counts[4] && counts.is_sorted_by_key(|counts| !counts), "{read_s:?}: {counts:?}");
    }
}

#[test]
fn a_vm_that_dies_with_the_daemon_has_what_it_was_given_last() {
    let mut world = World::new(two());
    world.process("vm0").nature = Nature::Dies(3);
    world.kills.insert(1, (false, Duration::from_secs(3600)));
    world.run(3, |_| {});
    assert_eq!(world.processes["vm0"].wanted, 133, "{:?}", world.steps);
    let has = |world: &World| world.planner.report(world.at).vms[0].has_bytes;
    assert_eq!(has(&world), 133 * UNIT);
    world.replace_daemon(Duration::from_secs(5));
    world.run(1, |_| {});
    assert_eq!(has(&world), 133 * UNIT, "by the record");
}

/// Its socket is still there.
#[test]
fn a_vm_that_was_killed_long_ago_costs_nobody_anything_when_the_next_daemon_comes() {
    let dies = Process::new(Shape::Flat(50), Nature::Dies(2), 100);
    let mut world = World::new(vec![Process::new(Shape::Smooth(60), Nature::Honest, 100), dies]);
    world.run(20, |world| assert!(world.held() <= TOTAL, "{:?}", world.steps));
    let has = world.processes["vm0"].wanted;
    assert!(has > 100, "it has what the other one had: {has}");
    // The second one has not seen it die.
    for _ in 0..2 {
        world.replace_daemon(Duration::from_secs(1));
        world.run(3, |world| assert_eq!(world.processes["vm0"].wanted, has, "{:?}", world.steps));
    }
}

#[test]
fn a_vm_that_comes_back_does_not_have_what_it_had_long_ago() {
    let mut world = World::new(two());
    world.run(1, |_| {});
    world.process("vm1").wanted = 60;
    world.replace_daemon(Duration::ZERO);
    world.run(1, |_| {});
    let mut process = world.processes.remove("vm1").unwrap();
    world.run(8, |_| {});
    process.nature = Nature::Hangs(0, 1000);
    world.processes.insert("vm1".into(), process);
    world.run(1, |_| {});
    let vms = world.planner.report(world.at).vms;
    assert_eq!(vms[1].has_bytes, TOTAL * UNIT, "nobody knows what it has now");
}

#[test]
fn an_intent_that_cannot_be_written_is_not_executed() {
    let mut world = World::new(two());
    dies_at_the_take(&mut world, false);
    let step = crate::planner::Step { vm: "vm1".into(), side: Side::Tier, bytes: UNIT };
    world.planner.step_done(world.at, &step, Outcome::NotSent("the intent cannot be written: no".into()));
    let planner: &Planner = &world.planner;
    assert!(planner.report(world.at).decisions[0].outcome.contains("cannot be written"));
    assert_eq!(world.planner.next_step(world.at), None, "and nothing is given");
    world.hear_next();
    let why = &world.planner.report(world.at).vms[1].why;
    assert!(why.starts_with("it could not be told its new size "), "{why}");
}

#[test]
fn a_vm_that_answers_and_keeps_its_size_is_not_asked_again_for_ten_windows() {
    let mut world = World::new(with_one_that_claims());
    world.run(60, |_| {});
    assert_eq!(world.steps.len(), 1, "{:?}", world.steps);
    assert!(world.planner.report(world.at).decisions[0].outcome.ends_with("it kept its size"));
    world.run(10, |_| {});
    assert_eq!(world.steps.len(), 2, "{:?}", world.steps);
}
