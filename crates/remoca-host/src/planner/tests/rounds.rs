//! Rounds in which several VMs change at once, and which are cut short: no VM is beyond its bound or its minimum at any moment.

use super::adversaries::{is_beyond_bound, shape};
use super::world::{Nature, Process, TOTAL, UNIT, World};
use crate::limits::Limits;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::time::Duration;

/// Returns what keeps a VM from doing what it is told. Its curve stays as it is, so its bound is known.
fn nature() -> impl Strategy<Value = Nature> {
    prop_oneof![
        6 => Just(Nature::Honest),
        1 => prop_oneof![Just(Nature::Ignores), Just(Nature::Refuses)],
        1 => (1_u32..30, 1_u32..10).prop_map(|(from, count)| Nature::Hangs(from, count)),
        // A command that was not answered can be executed for half a minute.
        1 => (1_u32..5).prop_map(Nature::Late),
        1 => (1_u32..30).prop_map(Nature::Upgrades),
    ]
}

/// Returns VMs with bounds and minimums, all with the same share.
fn processes() -> impl Strategy<Value = Vec<Process>> {
    let vm = (shape(), nature(), 0_u64..25, prop_oneof![Just(0.), Just(0.05), Just(0.25), Just(1.)]);
    prop::collection::vec(vm, 3..8).prop_map(|vms| {
        let share = TOTAL / vms.len() as u64;
        let process = |(shape, nature, minimum, bound)| {
            let minimum_bytes = share.min(minimum) * UNIT;
            let mut process = Process::new(shape, nature, share);
            process.limits = Limits { minimum_bytes, bound, ..Limits::default() };
            process
        };
        vms.into_iter().map(process).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// The daemon is killed before or after commands, its record cannot be written for a while, and the operator raises minimums.
    #[test]
    fn a_round_that_is_cut_short_takes_no_vm_beyond_its_bound_or_below_its_minimum(
        processes in processes(),
        delay in 1_u32..120,
        kills in prop::collection::btree_map(0_usize..12, (any::<bool>(), prop_oneof![Just(5_u64), Just(3600)]), 0..4),
        full in prop::option::of((1_u32..20, 1_u32..5)),
        raised in prop::collection::btree_map(1_u32..30, (0_usize..8, 1_u64..=25), 0..4),
    ) {
        let share = TOTAL / processes.len() as u64;
        let mut world = World::new(processes);
        world.delay = delay;
        world.kills = kills.into_iter().map(|(at, (is_before, s))| (at, (is_before, Duration::from_secs(s)))).collect();
        let names: Vec<String> = world.processes.keys().cloned().collect();
        let mut before: BTreeMap<String, u64> = names.iter().map(|name| (name.clone(), share)).collect();
        let mut told = 0;
        for looks in 0..60 {
            world.is_full = full.is_some_and(|(from, count)| (from..from + count).contains(&looks));
            if let Some((at, units)) = raised.get(&looks) {
                let limits = &mut world.process(&names[at % names.len()]).limits;
                limits.minimum_bytes = limits.minimum_bytes.max(share.min(*units) * UNIT);
            }
            world.run(1, |world| {
                assert!(world.held() <= TOTAL, "{} units are held: {:?}", world.held(), world.steps);
                // The minimum of the moment of the command: one that is executed late may be below a minimum raised since then.
                for (_, step) in &world.steps[told..] {
                    let least = world.processes[&step.vm].limits.minimum_bytes.min(before[&step.vm] * UNIT);
                    assert!(step.bytes >= least, "{} is told to have less than {least}: {:?}", step.vm, world.steps);
                }
                told = world.steps.len();
                for (name, process) in &world.processes {
                    before.insert(name.clone(), process.wanted);
                    assert!(!is_beyond_bound(process, share), "{name} is beyond its bound: {:?}", world.steps);
                }
            });
        }
    }
}
