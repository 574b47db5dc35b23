use super::*;
use proptest::prelude::*;

fn vm(miss_ratios: Vec<f64>) -> Vm {
    let most = miss_ratios.len().saturating_sub(1);
    Vm { miss_ratios, least: 0, most, weight: 1., bound: f64::INFINITY }
}

/// Returns a curve of `units` units that falls to `floor` at `cliff` units.
fn cliff(units: usize, cliff: usize, floor: f64) -> Vec<f64> {
    (0..=units).map(|at| if at < cliff { 1. } else { floor }).collect()
}

/// Returns a curve of `units` units that falls in a line.
fn line(units: usize) -> Vec<f64> {
    (0..=units).map(|at| 1. - 0.9 * at as f64 / units as f64).collect()
}

fn any_vm(units: usize) -> impl Strategy<Value = Vm> {
    // Steps of a few heights, so that curves have cliffs, flat parts and ties.
    let falls = prop::collection::vec(prop_oneof![3 => Just(0_u32), 2 => 1..4_u32, 1 => 10..40_u32], units);
    let bound = prop_oneof![Just(0.), Just(0.05), Just(0.25), Just(f64::INFINITY)];
    (falls, 0..=units, 0..=units, 0.2..5_f64, bound).prop_map(move |(falls, a, b, weight, bound)| {
        let all = f64::from(falls.iter().sum::<u32>() + 1);
        let miss_ratios = std::iter::once(1.).chain(falls.iter().scan(all, |left, fall| {
            *left -= f64::from(*fall);
            Some((*left - 1.) / all)
        }));
        Vm { miss_ratios: miss_ratios.collect(), least: a.min(b) / 2, most: a.max(b), weight, bound }
    })
}

fn any_allocation() -> impl Strategy<Value = Allocation> {
    let vms = (1..=4_usize).prop_flat_map(|count| prop::collection::vec(any_vm(9), count));
    (vms, 0..24_usize).prop_map(|(vms, more)| {
        let total = vms.iter().map(|vm| vm.least).sum::<usize>() + more;
        Allocation::new(vms, total).unwrap()
    })
}

fn check_limits(allocation: &Allocation, units: &[usize]) {
    assert!(units.iter().sum::<usize>() <= allocation.total);
    assert!(allocation.vms.iter().zip(units).all(|(vm, units)| (vm.least..=vm.most).contains(units)));
}

fn check_bounds(allocation: &Allocation, units: &[usize]) {
    for ((vm, units), baseline) in allocation.vms.iter().zip(units).zip(&allocation.baseline) {
        let before = vm.miss_ratios[*baseline].max(MISS_RATIO_FLOOR);
        assert!(vm.miss_ratios[*units] <= before * (1. + vm.bound), "{vm:?} with {units} for {baseline}");
    }
}

proptest! {
    #[test]
    fn the_best_division_is_the_best_of_all(allocation in any_allocation()) {
        let [best, all, greedy] = [allocation.optimal(), allocation.exhaustive(), allocation.greedy()];
        for units in [&best, &all, &greedy] {
            check_limits(&allocation, units);
            check_bounds(&allocation, units);
        }
        let [best_mean, all_mean, greedy_mean] = [&best, &all, &greedy].map(|units| allocation.geometric_mean(units));
        prop_assert!((best_mean - all_mean).abs() < 1e-9, "{best_mean} {all_mean}");
        prop_assert!(best_mean <= greedy_mean + 1e-9 && greedy_mean <= 1. + 1e-9, "{best_mean} {greedy_mean}");
        // Nobody has a unit in vain.
        for (i, vm) in allocation.vms.iter().enumerate() {
            let least = best[i] == allocation.bounded[i];
            prop_assert!(least || vm.ratio(best[i]) < vm.ratio(best[i] - 1));
        }
    }

    #[test]
    fn the_baseline_follows_the_weights(allocation in any_allocation()) {
        let units = allocation.baseline();
        check_limits(&allocation, units);
        let most: usize = allocation.vms.iter().map(|vm| vm.most).sum();
        prop_assert_eq!(units.iter().sum::<usize>(), allocation.total.min(most));
        // Whoever has more than its least would not be poorer for it than one that could have had the unit.
        for (rich, rich_units) in allocation.vms.iter().zip(units).filter(|(vm, units)| **units > vm.least) {
            for (poor, poor_units) in allocation.vms.iter().zip(units).filter(|(vm, units)| **units < vm.most) {
                let before = (*rich_units - 1) as f64 / rich.weight;
                prop_assert!(before <= *poor_units as f64 / poor.weight);
            }
        }
    }

    #[test]
    fn esx_keeps_to_the_limits(allocation in any_allocation(), tax in 0. ..=1., sets in prop::collection::vec(0..12_usize, 4)) {
        let units = allocation.esx(tax, &sets[..allocation.vms.len()]);
        check_limits(&allocation, &units);
        prop_assert_eq!(units.iter().sum::<usize>(), allocation.baseline.iter().sum::<usize>());
    }
}

#[test]
fn a_cliff_is_climbed_that_stops_the_greedy_one() {
    // 30 units: only together do they carry one of the two over its cliff.
    let vms = || vec![vm(cliff(30, 20, 0.1)), vm(line(30))];
    let allocation = Allocation::new(vms(), 30).unwrap();
    assert_eq!(allocation.baseline(), [15, 15]);
    assert_eq!(allocation.optimal(), [20, 10]);
    let mean = |units: &[usize]| allocation.geometric_mean(units);
    assert!(mean(&allocation.greedy()) > 1.1 * mean(&allocation.optimal()));
}

#[test]
fn a_bound_is_kept() {
    let mut vms = vec![vm(cliff(30, 20, 0.1)), vm(line(30))];
    vms[1].bound = 0.05;
    let allocation = Allocation::new(vms.clone(), 30).unwrap();
    // 1 - 0.9 * units / 30 is at most 1.05 * 0.55 from 14.08 units on.
    assert_eq!(allocation.bounded, [0, 15]);
    assert_eq!(allocation.optimal()[0], 0);
    vms[1].bound = 0.28;
    let allocation = Allocation::new(vms, 30).unwrap();
    assert_eq!(allocation.optimal(), [20, 10]);
}

#[test]
fn weights_count() {
    let weighted = |weight| {
        let mut vms = vec![vm(line(100)), vm(line(100))];
        vms[0].weight = weight;
        Allocation::new(vms, 100).unwrap()
    };
    assert_eq!(weighted(3.).baseline(), [75, 25]);
    assert_eq!(weighted(1.).baseline(), [50, 50]);
    // The mean of miss ratios 0.5 and 1, the first counted twice.
    let mut vms = vec![vm(vec![1., 0.5]), vm(vec![1., 0.5])];
    vms[0].weight = 2.;
    let allocation = Allocation::new(vms, 1).unwrap();
    assert_eq!(allocation.baseline(), [1, 0]);
    assert!((allocation.geometric_mean(&[0, 1]) - f64::powf(2. * 2. * 0.5, 1. / 3.)).abs() < 1e-12);
}

#[test]
fn what_helps_nobody_is_given_to_nobody() {
    let allocation = Allocation::new(vec![vm(cliff(50, 10, 0.2)), vm(vec![0.7; 51])], 100).unwrap();
    assert_eq!(allocation.baseline(), [50, 50]);
    assert_eq!(allocation.optimal(), [10, 0]);
    // Below the floor nothing is gained.
    let tiny = (0..=20).map(|at| MISS_RATIO_FLOOR / f64::from(at + 1)).collect();
    assert_eq!(Allocation::new(vec![vm(tiny)], 20).unwrap().optimal(), [0]);
}

#[test]
fn esx_takes_what_is_idle_as_in_the_papers_table_3() {
    // 512 MB each in units of 4 MB; the third VM needs 336 MB.
    let vms = || vec![vm(line(256)), vm(line(256)), vm(cliff(256, 84, 0.1))];
    let allocation = Allocation::new(vms(), 3 * 128).unwrap();
    let by_curve: Vec<usize> = vms().iter().map(|vm| vm.working_set(0.01)).collect();
    assert_eq!(by_curve[2], 84);
    assert_eq!(allocation.esx(1., &by_curve), [150, 150, 84]);
    assert_eq!(allocation.esx(0.75, &by_curve), [145, 144, 95]);
    // All that a light background task touches looks like a working set.
    assert_eq!(allocation.esx(1., &[256, 256, 207]), [128; 3]);
    // Nobody wants it.
    assert_eq!(allocation.esx(1., &[10; 3]), [128; 3]);
}

#[test]
fn a_cliff_that_is_all_of_a_hundred_vms() {
    // Half of 100 VMs can be carried over their cliffs: 40 units each, 2,000 in all.
    let vms: Vec<Vm> = (0..100).map(|_| vm(cliff(2000, 40, 0.5))).collect();
    let allocation = Allocation::new(vms, 2000).unwrap();
    let best = allocation.optimal();
    assert_eq!(best.iter().filter(|units| **units == 40).count(), 50);
    assert_eq!(best.iter().sum::<usize>(), 2000);
    assert_eq!(allocation.greedy(), allocation.baseline());
}

#[test]
fn what_does_not_add_up_is_an_error() {
    let error = |vms: Vec<Vm>, total| Allocation::new(vms, total).err();
    let good = || vm(vec![1., 0.5, 0.1]);
    assert_eq!(error(vec![good()], 0), None);
    assert_eq!(error(vec![], 10), Some(Invalid::NoVms));
    assert_eq!(error(vec![good(), vm(vec![])], 10), Some(Invalid::Curve(1)));
    for curve in [vec![f64::NAN], vec![1., f64::NAN], vec![f64::INFINITY, 1.], vec![1., -0.5], vec![0.5, 0.6]] {
        assert_eq!(error(vec![vm(curve)], 10), Some(Invalid::Curve(0)));
    }
    assert_eq!(error(vec![Vm { least: 2, most: 1, ..good() }], 10), Some(Invalid::Range(0)));
    assert_eq!(error(vec![Vm { most: 3, ..good() }], 10), Some(Invalid::Range(0)));
    for weight in [0., -1., 1e9, f64::NAN, f64::INFINITY] {
        assert_eq!(error(vec![Vm { weight, ..good() }], 10), Some(Invalid::Weight(0)));
    }
    for weight in [1e-3, 1e6] {
        assert_eq!(error(vec![Vm { weight, ..good() }], 10), None);
    }
    assert_eq!(error(vec![Vm { bound: 0., ..good() }], 10), None);
    assert_eq!(error(vec![Vm { most: 0, ..good() }], 10), None);
    for bound in [-0.1, f64::NAN] {
        assert_eq!(error(vec![Vm { bound, ..good() }], 10), Some(Invalid::Bound(0)));
    }
    let needs = |least| Vm { least, ..good() };
    assert_eq!(error(vec![needs(2), needs(2)], 4), None);
    assert_eq!(error(vec![needs(2), needs(2)], 3), Some(Invalid::TotalTooSmall));
}
