//! Whatever some VMs do: the total is kept, and no honest VM is below its minimum or beyond its bound.

use super::world::{Nature, Process, Shape, TOTAL, UNIT, World};
use crate::limits::Limits;
use proptest::prelude::*;

pub fn shape() -> impl Strategy<Value = Shape> {
    prop_oneof![
        (1_u32..220).prop_map(Shape::Cliff),
        (2_u32..300).prop_map(Shape::Smooth),
        (0_u32..=100).prop_map(Shape::Flat),
    ]
}

fn nature() -> impl Strategy<Value = Nature> {
    prop_oneof![
        4 => Just(Nature::Honest),
        2 => (shape(), 1_u32..20).prop_map(|(shape, looks)| Nature::Alternates(shape, looks)),
        1 => (0_u64..2000).prop_map(Nature::Claims),
        1 => prop_oneof![Just(Nature::Blind), Just(Nature::Idle)],
        1 => Just(Nature::Ignores),
        1 => Just(Nature::Refuses),
        1 => (1_u32..40, 1_u32..20).prop_map(|(from, count)| Nature::Hangs(from, count)),
        1 => (1_u32..40).prop_map(Nature::Dies),
    ]
}

/// Returns VMs that have their sizes by weight at first, or the same share each.
fn processes(nature: impl Strategy<Value = Nature>) -> impl Strategy<Value = Vec<Process>> {
    let vm = (shape(), nature, 0_u64..30, prop_oneof![Just(0.), Just(0.05), Just(0.25), Just(f64::INFINITY)]);
    prop::collection::vec(vm, 1..6).prop_map(|vms| {
        let share = TOTAL / vms.len() as u64;
        let process = |(shape, nature, minimum, bound): (Shape, Nature, u64, f64)| {
            let mut process = Process::new(shape, nature, share);
            process.limits = Limits { minimum_bytes: minimum * UNIT, bound, ..Limits::default() };
            process
        };
        vms.into_iter().map(process).collect()
    })
}

/// Checks that the honest VMs have what they are owed, if each is owed `share` units.
fn check(world: &World, share: u64) {
    for (name, process) in world.processes.iter().filter(|(_, process)| process.nature == Nature::Honest) {
        let wanted = process.wanted;
        assert!(wanted >= process.limits.minimum_bytes / UNIT, "{name} is below its minimum: {wanted}");
        assert!(!is_beyond_bound(process, share), "{name} is beyond its bound with {wanted} of {share}");
    }
}

/// Returns whether a VM that is owed `share` units misses more with what it has than its bound allows.
pub fn is_beyond_bound(process: &Process, share: u64) -> bool {
    let ratio = |units: u64| process.shape.ratio(u32::try_from(units).unwrap()).max(1e-4);
    ratio(process.wanted) > ratio(share) * (1. + process.limits.bound) + 1e-9
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn the_total_the_bounds_and_the_minimums_hold_at_every_moment(
        processes in processes(nature()), delay in 1_u32..200,
    ) {
        // A VM that came or went changes what the others are owed by weight; dead ones do so here.
        let share = (!processes.iter().any(|process| matches!(process.nature, Nature::Dies(_))))
            .then(|| TOTAL / processes.len() as u64);
        let mut world = World::new(processes);
        world.delay = delay;
        world.run(80, |world| {
            assert!(world.held() <= TOTAL, "{} units are held: {:?}", world.held(), world.steps);
            if let Some(share) = share {
                check(world, share);
            }
        });
    }

    #[test]
    fn constant_curves_come_to_rest(processes in processes(Just(Nature::Honest))) {
        let mut world = World::new(processes);
        world.run(60, |_| {});
        let steps = world.steps.len();
        world.run(120, |_| {});
        prop_assert_eq!(world.steps.len(), steps, "{:?}", &world.steps[steps..]);
    }

    #[test]
    fn a_vm_that_lends_and_borrows_gains_nothing_from_the_others(
        processes in processes(Just(Nature::Honest)), greedy in 1_u32..220, looks in 1_u32..20,
    ) {
        let vms = processes.len() + 1;
        let share = TOTAL / vms as u64;
        let mut processes: Vec<Process> = processes;
        processes.iter_mut().for_each(|process| (process.wanted, process.granted) = (share, share));
        processes.iter_mut().for_each(|process| process.limits.minimum_bytes = process.limits.minimum_bytes.min(share * UNIT));
        processes.push(Process::new(Shape::Flat(1), Nature::Alternates(Shape::Cliff(greedy), looks), share));
        let mut world = World::new(processes);
        world.run(120, |world| {
            assert!(world.held() <= TOTAL);
            check(world, share);
        });
    }
}
