//! What the planner does with honest VMs.

use super::world::{Nature, Process, Shape, TOTAL, UNIT, World, honest, settings, sizes};
use crate::curve::Curve;
use crate::limits::Limits;
use crate::plan::{Memory, Plan, Policy, Standing, Subject, Why};
use crate::planner::{Moment, Settings};
use crate::testing::curve_status;
use remoca_protocol::control::{CurveGrid, CurvePoint, CurveStatus};
use remoca_protocol::host::HostVm;
use std::time::Duration;

fn vm<'v>(vms: &'v [HostVm], name: &str) -> &'v HostVm {
    vms.iter().find(|vm| vm.name == name).unwrap()
}

#[test]
fn memory_moves_over_a_cliff_to_the_vm_that_gains_and_then_stays() {
    // Its working set is larger than its share, and nobody gains from a part of it.
    let mut world = World::new(vec![honest(Shape::Cliff(130), 100), honest(Shape::Flat(50), 100)]);
    world.run(40, |world| assert!(world.held() <= TOTAL));
    assert_eq!(sizes(&world)[0], 133, "two percent beyond the cliff");
    assert!(sizes(&world)[1] <= 67);
    assert_eq!(world.steps.len(), 2, "{:?}", world.steps);
    // It waited for the second look at each, and took first.
    assert_eq!((world.steps[0].0, world.steps[0].1.vm.as_str()), (Duration::from_secs(10), "vm1"));
    assert_eq!(world.steps[1].1.vm, "vm0");
    let report = world.planner.report(world.at);
    assert_eq!(report.decisions.len(), 2);
    assert!(report.decisions[1].why.starts_with("it gains, misses 100.0 % -> 5.0 %"), "{:?}", report.decisions[1]);
    assert_eq!(report.state, "all sizes are as they should be");
}

#[test]
fn a_vm_that_was_changed_says_so_and_that_it_waits_for_the_next_plan_when_its_window_is_over() {
    let mut world = World::new(vec![honest(Shape::Cliff(130), 100), honest(Shape::Flat(50), 100)]);
    world.run(3, |_| {});
    for (passed_s, expected) in [(0, "it was changed"), (60, "it keeps what it has until the next plan")] {
        let at = Moment { now: world.at.now + Duration::from_secs(passed_s), ..world.at };
        let why = vm(&world.planner.report(at).vms, "vm0").why.clone();
        assert!(why.starts_with(expected), "{why}");
    }
}

#[test]
fn the_window_of_a_vm_goes_on_after_a_restart_of_the_daemon() {
    let mut world = World::new(vec![honest(Shape::Cliff(130), 100), honest(Shape::Flat(50), 100)]);
    world.run(3, |_| {});
    let (steps, changed_s) = (world.steps.len(), world.at.unix_s - (world.at.now - world.steps[0].0).as_secs());
    assert_eq!(sizes(&world), [133, 67]);
    // Now the other one gains.
    world.process("vm0").shape = Shape::Flat(50);
    world.process("vm1").shape = Shape::Cliff(130);
    world.replace_daemon(Duration::from_secs(5));
    world.run(3, |_| {});
    let report = world.planner.report(world.at);
    assert!(vm(&report.vms, "vm0").why.starts_with("it was changed by a former daemon"), "{report:?}");
    world.run(20, |world| assert!(world.steps.len() == steps || world.at.unix_s >= changed_s + 60));
    assert_eq!(sizes(&world), [67, 133]);
}

/// The record is written before a command, and has no time of it.
#[test]
fn a_vm_that_was_told_when_the_daemon_was_killed_has_a_window_too() {
    for kill in [0, 1] {
        let mut world = World::new(vec![honest(Shape::Cliff(130), 100), honest(Shape::Flat(50), 100)]);
        world.kills.insert(kill, (false, Duration::from_secs(5)));
        while world.steps.len() <= kill {
            world.run(1, |_| {});
        }
        let name = world.steps[kill].1.vm.clone();
        world.run(2, |_| {});
        let report = world.planner.report(world.at);
        assert!(vm(&report.vms, &name).why.starts_with("it was changed by a former daemon"), "{name}: {report:?}");
    }
}

#[test]
fn nothing_is_said_to_be_as_it_should_be_of_vms_that_keep_what_they_have() {
    let blind = || Process::new(Shape::Flat(50), Nature::Blind, 100);
    let states = [("nothing is changed now: all VMs", blind()), ("but for VMs that keep", honest(Shape::Flat(50), 1))];
    for (words, other) in states {
        let mut world = World::new(vec![blind(), other]);
        world.run(20, |_| {});
        let state = world.planner.report(world.at).state;
        assert!(state.contains(words), "{state}");
    }
}

#[test]
fn a_dry_run_says_it_once_and_changes_nothing() {
    let dry = Settings { applies: false, ..settings() };
    let mut world = World::with(dry, vec![honest(Shape::Cliff(130), 100), honest(Shape::Flat(50), 100)]);
    world.run(20, |_| {});
    assert!(world.steps.is_empty());
    let report = world.planner.report(world.at);
    assert_eq!(report.decisions.len(), 2);
    assert!(report.decisions.iter().all(|decision| decision.outcome == "not done: --apply would"));
    let gains = vm(&report.vms, "vm0");
    assert_eq!((gains.has_bytes, gains.target_bytes, gains.baseline_bytes), (100 * UNIT, 133 * UNIT, 100 * UNIT));
    assert_eq!((gains.miss_ratio, gains.miss_ratio_then), (Some(1.), Some(0.05)));
    assert!(gains.saved_ms_per_s.unwrap() > 0. && report.geometric_mean.unwrap() < 0.5);
    assert_eq!(report.state, "would change sizes; --apply does");
}

#[test]
fn a_gain_within_the_error_or_not_worth_the_moving_is_left() {
    let mut world = World::new(vec![honest(Shape::Smooth(10_000), 100), honest(Shape::Flat(50), 100)]);
    world.run(20, |_| {});
    assert!(world.steps.is_empty());
    let report = world.planner.report(world.at);
    assert_eq!(vm(&report.vms, "vm0").why, "what it would gain is not worth moving memory for");
}

#[test]
fn bounds_and_minimums_hold() {
    let mut rich = honest(Shape::Cliff(160), 66);
    rich.limits.weight = 1.;
    let mut poor = honest(Shape::Smooth(20), 67);
    poor.limits.bound = 0.1;
    let mut least = honest(Shape::Flat(90), 67);
    least.limits.minimum_bytes = 50 * UNIT;
    let mut world = World::new(vec![rich, poor, least]);
    world.run(60, |world| {
        let sizes = sizes(world);
        assert!(world.held() <= TOTAL && sizes[2] >= 50);
        let poor = Shape::Smooth(20);
        assert!(poor.ratio(u32::try_from(sizes[1]).unwrap()) <= poor.ratio(66) * 1.1 + 1e-9, "{sizes:?}");
    });
    // The cliff of 160 cannot be reached beside them, and without it memory is worth nothing to the first.
    assert_eq!(sizes(&world), [1, 149, 50]);
}

#[test]
fn a_minimum_is_owed_and_a_maximum_kept() {
    let mut low = honest(Shape::Flat(50), 10);
    low.limits = Limits { minimum_bytes: 40 * UNIT, ..Limits::default() };
    let mut high = honest(Shape::Smooth(20), 150);
    high.limits = Limits { maximum_bytes: Some(120 * UNIT), ..Limits::default() };
    let mut world = World::new(vec![low, high]);
    world.run(20, |world| assert!(world.held() <= TOTAL));
    assert_eq!(sizes(&world), [40, 120]);
}

#[test]
fn a_vm_that_has_nothing_and_may_have_less_than_a_unit_gets_nothing() {
    for (maximum_bytes, gets) in [(0, 0), (UNIT - 1, 0), (UNIT, 1)] {
        let mut none = honest(Shape::Smooth(20), 0);
        none.limits.maximum_bytes = Some(maximum_bytes);
        let mut world = World::new(vec![none, honest(Shape::Flat(50), 100)]);
        world.run(10, |_| {});
        assert_eq!(sizes(&world)[0], gets, "{maximum_bytes}: {:?}", world.planner.report(world.at).vms);
    }
}

#[test]
fn too_much_memory_is_taken_back_first() {
    let mut world = World::new((0..4).map(|_| honest(Shape::Smooth(30), 100)).collect());
    assert_eq!(world.held(), 2 * TOTAL);
    // They are new.
    world.run(1, |_| {});
    let state = world.planner.report(world.at).state;
    assert_eq!(state, "nothing is changed now; all VMs together have 400M more than the total");
    world.run(2, |_| {});
    assert_eq!(sizes(&world), [50, 50, 50, 50]);
    world.run(40, |world| assert!(world.held() <= TOTAL));
    assert_eq!(world.steps.len(), 4);
}

/// Whatever the best division is: who has no more than its share is told nothing, and the others do not count on it.
#[test]
fn too_much_memory_is_taken_from_those_who_have_it() {
    for nature in [Nature::Honest, Nature::Blind] {
        let rich = Process::new(Shape::Cliff(150), nature, 160);
        let mut world = World::new(vec![rich, honest(Shape::Flat(50), 60), honest(Shape::Flat(50), 66)]);
        world.run(3, |world| assert!(sizes(world)[1..] == [60, 66]));
        assert!(world.held() <= TOTAL, "{:?} {:?}", sizes(&world), world.planner.report(world.at));
        // From then on the best division counts.
        world.run(40, |world| assert!(world.held() <= TOTAL));
    }
}

#[test]
fn vms_that_come_are_read_twice_and_those_that_went_leave_their_memory() {
    let mut world = World::new(vec![honest(Shape::Cliff(130), 100), honest(Shape::Flat(50), 60)]);
    world.processes.insert("vm9".into(), honest(Shape::Flat(50), 40));
    world.run(2, |_| {});
    world.processes.remove("vm9");
    world.run(20, |world| assert!(world.held() <= TOTAL));
    assert_eq!(sizes(&world)[0], 133);
    world.processes.insert("vm5".into(), honest(Shape::Flat(10), 1));
    world.run(1, |_| {});
    let report = world.planner.report(world.at);
    assert!(vm(&report.vms, "vm5").why.contains("it is new"), "{:?}", vm(&report.vms, "vm5"));
}

#[test]
fn a_vm_changes_at_most_once_in_a_window() {
    let mut world = World::new(vec![
        honest(Shape::Cliff(100), 66),
        Process::new(Shape::Flat(50), Nature::Alternates(Shape::Cliff(90), 5), 66),
        Process::new(Shape::Flat(40), Nature::Alternates(Shape::Smooth(20), 7), 66),
    ]);
    world.run(300, |world| assert!(world.held() <= TOTAL));
    for name in ["vm0", "vm1", "vm2"] {
        let times: Vec<_> = world.steps.iter().filter(|(_, step)| step.vm == name).map(|(at, _)| *at).collect();
        assert!(times.windows(2).all(|pair| pair[1] - pair[0] >= Duration::from_secs(60)), "{name}: {times:?}");
    }
    assert!(world.steps.len() > 4, "it is a test only if much changes");
}

#[test]
fn a_vm_without_a_trustworthy_curve_keeps_what_it_has_and_says_so() {
    let gains = || honest(Shape::Cliff(130), 90);
    for (nature, looks, expected) in
        [(Nature::Blind, 40, "which is too few"), (Nature::Idle, 70, "has read nothing for 1")]
    {
        let mut world =
            World::new(vec![gains(), Process::new(Shape::Flat(50), nature, 80), honest(Shape::Flat(50), 30)]);
        world.run(1, |_| {});
        assert!(vm(&world.planner.report(world.at).vms, "vm0").why.contains("it is new"));
        world.run(looks, |world| assert!(world.held() <= TOTAL));
        let report = world.planner.report(world.at);
        assert!(vm(&report.vms, "vm1").why.contains(expected), "{:?}", report.vms);
        if nature == Nature::Blind {
            assert_eq!((sizes(&world)[1], world.steps.len()), (80, 0), "120 are not enough: {:?}", world.steps);
        }
    }
}

#[test]
fn a_total_comes_before_what_a_vm_without_a_curve_has() {
    let mut world = World::new(vec![honest(Shape::Smooth(20), 90), Process::new(Shape::Flat(50), Nature::Blind, 180)]);
    world.run(20, |_| {});
    assert_eq!(sizes(&world)[1], 100);
    assert!(world.held() <= TOTAL);
}

#[test]
fn a_mistake_in_a_file_costs_no_vm_its_minimum() {
    for was_read in [false, true] {
        let mut low = honest(Shape::Smooth(20), 40);
        low.limits.minimum_bytes = 40 * UNIT;
        let mut high = honest(Shape::Flat(50), 160);
        high.limits = Limits { minimum_bytes: 150 * UNIT, weight: 9., ..Limits::default() };
        let mut world = World::new(vec![low, high]);
        world.misread = Some("vm1".into()).filter(|_| !was_read);
        world.run(1, |_| {});
        world.misread = Some("vm1".into());
        // All have more than the total.
        (world.process("vm0").wanted, world.process("vm1").wanted) = (60, 190);
        world.run(20, |_| {});
        assert_eq!(sizes(&world), if was_read { [40, 160] } else { [60, 190] }, "{:?}", world.steps);
        assert_eq!(vm(&world.planner.report(world.at).vms, "vm1").why, "its file has a mistake");
    }
}

#[test]
fn a_vm_without_a_curve_gives_nothing_while_all_have_no_more_than_the_total() {
    let mut owed = honest(Shape::Smooth(20), 40);
    owed.limits.minimum_bytes = 90 * UNIT;
    let mut world = World::new(vec![owed, Process::new(Shape::Flat(50), Nature::Blind, 160)]);
    world.run(20, |_| {});
    assert_eq!(sizes(&world), [40, 160]);
    // The others are divided among as far as that goes.
    let all = [(Shape::Cliff(60), 20), (Shape::Smooth(10), 15), (Shape::Flat(50), 15)];
    let mut all: Vec<Process> = all.map(|(shape, units)| honest(shape, units)).into();
    all.push(Process::new(Shape::Flat(50), Nature::Blind, 150));
    let mut world = World::new(all);
    world.run(20, |world| assert!(world.held() <= TOTAL));
    assert_eq!(sizes(&world)[3], 150);
    assert!(sizes(&world)[1] > 40, "{:?}", sizes(&world));
}

#[test]
fn a_minimum_of_more_than_there_is_is_named_and_takes_no_room_in_the_daemon() {
    let mut wrong = honest(Shape::Smooth(20), 40);
    wrong.limits.minimum_bytes = 100 << 40;
    let mut world = World::new(vec![wrong, honest(Shape::Flat(50), 100)]);
    world.run(5, |_| {});
    let state = world.planner.report(world.at).state;
    let said =
        "the minimum of vm0 is 100T, more than the 400M for all VMs: lower it in the file of vm0 ([memory] minimum)";
    assert_eq!(state, format!("nothing is changed: {said}"));
    // A division has a miss ratio for each of these units.
    let vm = &world.planner.vms["vm0"];
    let most = |limits: Limits| {
        let mut vm = vm.clone();
        vm.limits = Some(limits);
        let subject = vm.subject(settings().memory(), 0, None);
        (subject.least as u64, subject.most as u64)
    };
    assert_eq!(most(Limits { minimum_bytes: u64::MAX, ..Limits::default() }), (TOTAL + 1, TOTAL + 1));
    assert_eq!(most(Limits { maximum_bytes: Some(u64::MAX), ..Limits::default() }), (1, TOTAL));
    world.process("vm0").limits.minimum_bytes = 50 * UNIT;
    world.run(5, |_| {});
    assert!(sizes(&world)[0] >= 50, "{:?}", world.planner.plan);
}

#[test]
fn other_policies_are_shown_for_comparison() {
    let targets = |policy: Policy| {
        let dry = Settings { applies: false, policy, ..settings() };
        let mut world = World::with(dry, vec![honest(Shape::Cliff(130), 60), honest(Shape::Cliff(20), 140)]);
        world.run(3, |_| {});
        let vms = world.planner.report(world.at).vms;
        [vms[0].target_bytes / UNIT, vms[1].target_bytes / UNIT]
    };
    assert_eq!(targets(Policy::Optimal), [133, 67]);
    assert_eq!(targets(Policy::Greedy), [100, 100], "it stops in front of the cliff");
    assert_eq!(targets(Policy::Equal), [100, 100]);
    // What the one does not use goes to the other, whether or not that gains.
    assert_eq!(targets(Policy::Esx), [180, 20]);
}

/// Prints how long a plan takes: `cargo test --release -p remoca-host a_hundred -- --nocapture`.
#[test]
fn a_hundred_vms_and_two_thousand_units_are_planned() {
    let memory = Memory { total_bytes: 2000 * UNIT, unit_bytes: UNIT };
    let curve = |number: u32| {
        let grid = CurveGrid { first_bytes: 0, step_bytes: UNIT, count: 2001 };
        let ratio = |at: u32| 1. / (1. + f64::from(at) / f64::from(10 + number));
        let points = (0..grid.count).map(|at| CurvePoint {
            bytes: u64::from(at) * UNIT,
            miss_ratio: ratio(at),
            standard_error: 0.001,
            last_window: None,
        });
        let status = CurveStatus { points: points.collect(), ..curve_status(|_| 0.5) };
        Curve::new(&status, grid).unwrap()
    };
    let curves: Vec<Curve> = (0..100).map(curve).collect();
    let subject = |(number, curve)| Subject {
        has_bytes: 20 * UNIT,
        has: 20,
        least: 1,
        most: 2000,
        own: 0,
        weight: f64::from(1 + number % 3),
        bound: 0.25,
        reads_per_s: Some(1e5),
        standing: Standing::Free(curve),
        is_known: true,
    };
    let subjects: Vec<Subject<'_>> = (0_i32..).zip(&curves).map(subject).collect();
    let began = std::time::Instant::now();
    let plan = Plan::new(&subjects, memory, Policy::Optimal).unwrap();
    println!("100 VMs, 2,000 units: {} us", began.elapsed().as_micros());
    assert!(plan.rows.iter().map(|row| row.target).sum::<usize>() <= 2000);
    assert!(plan.rows.iter().all(|row| row.target >= row.floor) && plan.geometric_mean < 1.);
}

/// One VM hangs with more than its share, and the guest of another one took back what it had lent.
#[test]
fn what_others_have_too_much_comes_back_although_one_cannot_be_changed() {
    let subject = |has: usize, standing: Standing<'static>, is_known| Subject {
        has_bytes: has as u64 * UNIT,
        has,
        least: 1,
        most: 60,
        own: 0,
        weight: 1.,
        bound: 0.25,
        reads_per_s: None,
        standing,
        is_known,
    };
    let memory = Memory { total_bytes: 60 * UNIT, unit_bytes: UNIT };
    let targets = |subjects: &[Subject<'_>]| -> Result<Vec<usize>, String> {
        Ok(Plan::new(subjects, memory, Policy::Optimal)?.rows.iter().map(|row| row.target).collect())
    };
    let (hangs, other) = (subject(40, Standing::Stuck, true), subject(40, Standing::Keeps, true));
    assert_eq!(targets(&[hangs, other]), Ok(vec![40, 30]));
    // Of one that never answered nobody knows whether it has anything: the others are not cut for it, but for what they have themselves.
    let never = || subject(60, Standing::Stuck, false);
    let other = |has| subject(has, Standing::Keeps, true);
    assert!(targets(&[never(), other(40)]).is_err());
    assert_eq!(targets(&[never(), other(40), other(30)]), Ok(vec![60, 20, 20]));
}

/// Whether all have half a unit more than the total, or just that.
#[test]
fn a_part_of_a_unit_that_a_vm_lacks_to_its_minimum_is_given_by_another_one() {
    let memory = Memory { total_bytes: 10 * UNIT, unit_bytes: UNIT };
    let [lacks, gives] = [Shape::Flat(50), Shape::Smooth(5)].map(|shape| shape.curve(0));
    let subject = |has_bytes: u64, has: usize, least: usize, curve| Subject {
        has_bytes,
        has,
        least,
        most: 10,
        own: 0,
        weight: 1.,
        bound: 0.25,
        reads_per_s: Some(1000.),
        standing: Standing::Free(curve),
        is_known: true,
    };
    for of_other in [8 * UNIT, 15 * UNIT / 2] {
        let subjects = [subject(5 * UNIT / 2, 2, 3, &lacks), subject(of_other, 8, 1, &gives)];
        let plan = Plan::new(&subjects, memory, Policy::Optimal).unwrap();
        let targets: Vec<usize> = plan.rows.iter().map(|row| row.target).collect();
        assert_eq!(targets, [3, 7], "{of_other}: {plan:?}");
    }
}

#[test]
fn a_vm_gets_no_more_than_its_guest_fills_in_ten_minutes() {
    let memory = Memory { total_bytes: TOTAL * UNIT, unit_bytes: UNIT };
    let of_gainer = |cliff: u32, reads_per_s: f64| {
        let curves = [Shape::Cliff(cliff), Shape::Flat(50)].map(|shape| shape.curve(0));
        let subject = |(curve, reads_per_s)| Subject {
            has_bytes: 100 * UNIT,
            has: 100,
            least: 1,
            most: 200,
            own: 0,
            weight: 1.,
            bound: 0.25,
            reads_per_s: Some(reads_per_s),
            standing: Standing::Free(curve),
            is_known: true,
        };
        let subjects: Vec<Subject<'_>> = curves.iter().zip([reads_per_s, 1000.]).map(subject).collect();
        let plan = Plan::new(&subjects, memory, Policy::Optimal).unwrap();
        (plan.rows[0].target, plan.rows[0].why)
    };
    // Ten blocks that miss in each second are eleven units in ten minutes.
    assert_eq!(of_gainer(105, 10.), (108, Why::Gains));
    assert_eq!(of_gainer(108, 10.), (111, Why::Gains));
    assert_eq!(of_gainer(109, 10.), (100, Why::Best));
    assert_eq!(of_gainer(105, 0.5), (100, Why::Idle));
    // Its reads would spare less than the pages that move.
    assert_eq!(of_gainer(105, 7.), (100, Why::NotWorth));
}

#[test]
fn a_unit_is_the_smallest_of_which_there_are_not_too_many() {
    let bytes = [0, 1, 2048 * UNIT, 2048 * UNIT + 1, 4096 * UNIT + 1, 1 << 46];
    assert_eq!(bytes.map(crate::planner::unit_of), [UNIT, UNIT, UNIT, 2 * UNIT, 4 * UNIT, 32 << 30]);
}

/// Guests had lent what the minimums need beyond the total, say, and took it back.
#[test]
fn what_is_beyond_the_minimums_comes_back_although_these_are_more_than_the_total() {
    let memory = Memory { total_bytes: 60 * UNIT, unit_bytes: UNIT };
    let targets = |sizes: [(usize, usize); 2], is_known: bool| -> Result<Vec<usize>, String> {
        let subject = |(has, least): (usize, usize)| Subject {
            has_bytes: has as u64 * UNIT,
            has,
            least,
            most: least.max(60),
            own: 0,
            weight: 1.,
            bound: 0.25,
            reads_per_s: None,
            standing: Standing::Keeps,
            is_known,
        };
        Ok(Plan::new(&sizes.map(subject), memory, Policy::Optimal)?.rows.iter().map(|row| row.target).collect())
    };
    assert_eq!(targets([(50, 40), (30, 25)], true), Ok(vec![40, 25]));
    assert_eq!(targets([(20, 40), (50, 25)], true), Ok(vec![20, 25]));
    // Nobody has too much, or nobody knows it.
    for (sizes, is_known) in [([(40, 40), (25, 25)], true), ([(30, 40), (30, 25)], true), ([(50, 40), (30, 25)], false)]
    {
        let why = "the total is less than all VMs must have: their minimums in whole units, and one unit at least";
        assert_eq!(targets(sizes, is_known), Err(why.into()));
    }
    // A mistake in one file costs the others nothing.
    assert!(targets([(50, 61), (30, 1)], true).is_err());
}
