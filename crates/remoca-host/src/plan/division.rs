//! A division under way: the best one, whether it is worth moving for, and the reasons.

use super::subject::{HORIZON_S, Memory, PAGE_BYTES, Plan, Policy, Row, Subject, Why};
use crate::curve::Curve;
use remoca_core::allocation::{Allocation, Invalid, MISS_RATIO_FLOOR, Vm};

/// Least gain of a plan, as a share of the geometric mean.
const GAIN_MIN: f64 = 0.02;
/// Idle memory tax of the emulation of VMware ESX.
const ESX_TAX: f64 = 1.;
/// Share of the miss ratio below which more memory does nothing, for the working sets of that emulation.
const ESX_TOLERANCE: f64 = 0.01;

/// Returns the units of each VM by weight alone: what its guest has lent, and its share of the others.
pub(super) fn baseline(subjects: &[Subject<'_>], total: usize) -> Result<Vec<usize>, String> {
    let vm = |vm: &Subject<'_>| {
        let most = vm.most.saturating_sub(vm.own);
        Vm {
            miss_ratios: vec![1.; most + 1],
            least: vm.least.saturating_sub(vm.own),
            most,
            weight: vm.weight,
            bound: 0.,
        }
    };
    let own: usize = subjects.iter().map(|vm| vm.own).sum();
    let allocation = Allocation::new(subjects.iter().map(vm).collect(), total.saturating_sub(own)).map_err(explain)?;
    Ok(allocation.baseline().iter().zip(subjects).map(|(share, vm)| share + vm.own).collect())
}

fn explain(invalid: Invalid) -> String {
    match invalid {
        Invalid::NoVms => "there is no VM".into(),
        Invalid::TotalTooSmall => {
            "the total is less than all VMs must have: their minimums in whole units, and one unit at least".into()
        }
        Invalid::Curve(_) | Invalid::Range(_) | Invalid::Weight(_) | Invalid::Bound(_) => {
            "a VM has limits that exclude each other".into()
        }
    }
}

/// A division under way.
pub(super) struct Division<'d, 'c> {
    pub(super) subjects: &'d [Subject<'c>],
    pub(super) floors: &'d [usize],
    pub(super) memory: Memory,
    /// Why a VM gets no more than it has.
    pub(super) held: Vec<Option<Why>>,
}

/// How a VM changes.
struct Change {
    at: usize,
    /// Gain of the logarithm of the geometric mean, if the curve is wrong by its error.
    gain: f64,
    is_sure: bool,
    /// Blocks that the disk is spared in each second; negative for a loss.
    spared_per_s: f64,
}

impl Division<'_, '_> {
    /// Returns the indices of the VMs that are divided among, with their curves.
    fn free(&self) -> impl Iterator<Item = (usize, &Curve)> {
        self.subjects.iter().enumerate().filter_map(|(at, vm)| Some((at, vm.curve()?)))
    }

    /// Returns the best division that is worth moving for.
    pub(super) fn worthwhile(&mut self, apart: &[usize]) -> Result<Vec<usize>, String> {
        loop {
            let targets = self.best(apart)?;
            let (doubtful, why) = self.doubtful(&targets);
            if doubtful.is_empty() {
                return Ok(targets);
            }
            doubtful.into_iter().for_each(|at| self.held[at] = Some(why));
        }
    }

    /// Returns the best division, in which VMs that are held get no more than they have.
    fn best(&self, apart: &[usize]) -> Result<Vec<usize>, String> {
        let mut targets = apart.to_vec();
        let free: Vec<usize> = self.free().map(|(at, _)| at).collect();
        if free.is_empty() {
            return Ok(targets);
        }
        for (at, units) in free.iter().zip(self.problem(apart)?.optimal()) {
            targets[*at] = units;
        }
        self.keep_in_place(&mut targets);
        Ok(targets)
    }

    /// Returns the problem of dividing what is left among the VMs that are free, with all margins: those of the curves, and of the bounds.
    fn problem(&self, apart: &[usize]) -> Result<Allocation, String> {
        let vm = |(at, curve): (usize, &Curve)| {
            let most = self.most(at, curve);
            Vm {
                miss_ratios: (0..=most).map(|units| curve.at_worst(units)).collect(),
                least: self.floors[at],
                most,
                weight: self.subjects[at].weight,
                bound: f64::INFINITY,
            }
        };
        Allocation::new(self.free().map(vm).collect(), self.budget(apart)).map_err(explain)
    }

    /// Returns the bytes of a target: a VM that keeps what it has need not have whole units.
    fn bytes_of(&self, at: usize, target: usize) -> u64 {
        let vm = &self.subjects[at];
        if target == vm.has { vm.has_bytes } else { (target as u64).saturating_mul(self.memory.unit_bytes) }
    }

    fn bytes(&self, targets: &[usize]) -> u64 {
        targets.iter().enumerate().fold(0, |sum: u64, (at, target)| sum.saturating_add(self.bytes_of(at, *target)))
    }

    /// Returns whether the VMs that are divided among can have their floors.
    pub(super) fn fits(&self, targets: &[usize]) -> bool {
        let apart = (0..targets.len()).filter(|at| self.subjects[*at].curve().is_none());
        let bytes = apart.map(|at| self.bytes_of(at, targets[at])).fold(0, u64::saturating_add);
        let floors: usize = self.free().map(|(at, _)| self.floors[at]).sum();
        bytes <= self.memory.total_bytes && floors <= self.budget(targets)
    }

    /// Returns the whole units that are left for the VMs that are divided among.
    fn budget(&self, targets: &[usize]) -> usize {
        let is_apart = |at: &usize| self.subjects[*at].curve().is_none();
        let apart = (0..targets.len()).filter(is_apart).map(|at| self.bytes_of(at, targets[at]));
        let left = self.memory.total_bytes.saturating_sub(apart.fold(0, u64::saturating_add));
        Memory { total_bytes: left, ..self.memory }.units()
    }

    /// Returns the most units that a VM may get.
    fn most(&self, at: usize, curve: &Curve) -> usize {
        let vm = &self.subjects[at];
        let more = match self.held[at] {
            Some(_) => vm.has,
            None => vm.fillable(curve, self.memory.unit_bytes),
        };
        more.max(self.floors[at]).min(vm.most)
    }

    /// Gives back units that nobody gains from to those who have them.
    fn keep_in_place(&self, targets: &mut [usize]) {
        for (at, _) in self.free() {
            let vm = &self.subjects[at];
            if targets[at] >= vm.has {
                continue;
            }
            let spare = self.memory.total_bytes.saturating_sub(self.bytes(targets));
            let all = vm.has_bytes.saturating_sub(self.bytes_of(at, targets[at]));
            let units = Memory { total_bytes: spare, ..self.memory }.units();
            let kept = if all <= spare { vm.has } else { vm.has.min(targets[at] + units) };
            targets[at] = kept.min(vm.most);
        }
    }

    /// Returns the VMs whose gains are not worth the plan, and why. There are none if it is worth it, or owed.
    fn doubtful(&self, targets: &[usize]) -> (Vec<usize>, Why) {
        let changes: Vec<Change> = self.free().filter_map(|(at, curve)| self.change(at, curve, targets[at])).collect();
        let gains = |change: &&Change| {
            let (vm, target) = (&self.subjects[change.at], targets[change.at]);
            target > vm.has && vm.has >= self.floors[change.at]
        };
        let unsure: Vec<usize> =
            changes.iter().filter(gains).filter(|change| !change.is_sure).map(|change| change.at).collect();
        if !unsure.is_empty() {
            return (unsure, Why::Unsure);
        }
        let weights: f64 = self.free().map(|(at, _)| self.subjects[at].weight).sum();
        let gain: f64 = changes.iter().map(|change| change.gain).sum::<f64>() / weights;
        let spared: f64 = changes.iter().map(|change| change.spared_per_s * HORIZON_S).sum();
        let units: usize = changes.iter().map(|c| targets[c.at].saturating_sub(self.subjects[c.at].has)).sum();
        // A page that moves was dropped elsewhere, and is read once more from a disk at worst.
        let moved = units as f64 * self.memory.unit_bytes as f64 / PAGE_BYTES;
        if gain >= -(1. - GAIN_MIN).ln() && spared > moved {
            return (Vec::new(), Why::NotWorth);
        }
        // The lesser half at a time: a hundred VMs are divided among seven times at most.
        let mut gainers: Vec<&Change> = changes.iter().filter(gains).collect();
        gainers.sort_by(|a, b| a.gain.total_cmp(&b.gain));
        gainers.truncate(gainers.len().div_ceil(2));
        (gainers.into_iter().map(|change| change.at).collect(), Why::NotWorth)
    }

    fn change(&self, at: usize, curve: &Curve, target: usize) -> Option<Change> {
        let vm = &self.subjects[at];
        if target == vm.has {
            return None;
        }
        let (now, then) = (curve.ratio(vm.has), curve.at_worst(target));
        let error = if target > vm.has { curve.gain_error(now - then) } else { curve.error(now - then) };
        let log = |ratio: f64| ratio.clamp(MISS_RATIO_FLOOR, 1.).ln();
        Some(Change {
            at,
            gain: vm.weight * (log(now) - log(then + error)),
            is_sure: now - then > error,
            spared_per_s: vm.reads_per_s.unwrap_or(0.) * (now - then),
        })
    }

    /// Returns the time that the reads of a VM are shorter by if its miss ratio falls by `fall`, in milliseconds for each second.
    fn saved_ms(&self, at: usize, fall: f64) -> Option<f64> {
        let vm = &self.subjects[at];
        // A VM whose disk was never measured loses as much as the slowest of the others.
        let slowest = || self.free().filter_map(|(_, curve)| curve.saved_us).reduce(f64::max);
        let saved_us = vm.curve()?.saved_us.or_else(slowest)?;
        Some(vm.reads_per_s? * fall * saved_us / 1000.)
    }

    /// Divides by a policy that is shown for comparison.
    pub(super) fn compare(&self, policy: Policy, targets: &mut [usize], baseline: &[usize]) -> Result<(), String> {
        let free: Vec<_> = self.free().collect();
        if free.is_empty() {
            return Ok(());
        }
        let vm = |(at, curve): &(usize, &Curve)| Vm {
            miss_ratios: (0..=self.subjects[*at].most).map(|units| curve.ratio(units)).collect(),
            least: self.subjects[*at].least,
            most: self.subjects[*at].most,
            weight: self.subjects[*at].weight,
            bound: self.subjects[*at].bound,
        };
        let vms: Vec<Vm> = free.iter().map(vm).collect();
        let working_sets: Vec<_> = vms.iter().map(|vm| vm.working_set(ESX_TOLERANCE)).collect();
        let allocation = Allocation::new(vms, self.budget(targets)).map_err(explain)?;
        let units = match policy {
            // With the margins of the best one: it would be no comparison if it broke bounds.
            Policy::Greedy => self.problem(targets)?.greedy(),
            Policy::Esx => allocation.esx(ESX_TAX, &working_sets),
            Policy::Equal | Policy::Optimal => free.iter().map(|(at, _)| baseline[*at]).collect(),
        };
        free.iter().zip(units).for_each(|((at, _), units)| targets[*at] = units);
        Ok(())
    }

    pub(super) fn explain(&self, targets: &[usize], baseline: &[usize]) -> Plan {
        let row = |at: usize| {
            let (vm, floor, target) = (&self.subjects[at], self.floors[at], targets[at]);
            let ratios = vm.curve().map(|curve| {
                let (now, then) = (curve.ratio(vm.has), curve.ratio(target));
                (now, then, curve.gain_error(now - then))
            });
            let saved_ms = ratios.and_then(|(now, then, _)| self.saved_ms(at, now - then));
            Row { baseline: baseline[at], floor, target, ratios, saved_ms, why: self.why(at, target) }
        };
        let rows: Vec<Row> = (0..targets.len()).map(row).collect();
        let log = |ratio: f64| ratio.max(MISS_RATIO_FLOOR).ln();
        let parts = rows.iter().zip(self.subjects).filter_map(|(row, vm)| {
            let (now, then, _) = row.ratios?;
            Some((vm.weight * (log(then) - log(now)), vm.weight))
        });
        let (sum, weights) = parts.fold((0., 0.), |(sum, weights), (part, weight)| (sum + part, weights + weight));
        let geometric_mean = if weights > 0. { f64::exp(sum / weights) } else { 1. };
        // The sum of no numbers is -0.0.
        let saved_ms = rows.iter().filter_map(|row| row.saved_ms).fold(0., |sum, ms| sum + ms);
        Plan { rows, geometric_mean, saved_ms }
    }

    fn why(&self, at: usize, target: usize) -> Why {
        let (vm, floor) = (&self.subjects[at], self.floors[at]);
        let Some(curve) = vm.curve() else {
            return if target < vm.has { Why::TooMuch } else { Why::Apart };
        };
        let must_shrink = vm.has > vm.most
            || self.subjects.iter().fold(0, |sum: u64, vm| sum.saturating_add(vm.has_bytes)) > self.memory.total_bytes;
        match target.cmp(&vm.has) {
            std::cmp::Ordering::Less if must_shrink => Why::TooMuch,
            std::cmp::Ordering::Less => Why::Gives,
            std::cmp::Ordering::Greater if vm.has < floor => Why::Owed,
            std::cmp::Ordering::Greater => Why::Gains,
            std::cmp::Ordering::Equal => match self.held[at] {
                Some(why) => why,
                None if vm.fillable(curve, self.memory.unit_bytes) == vm.has
                    && curve.ratio(vm.has) > curve.ratio(vm.most) =>
                {
                    Why::Idle
                }
                None => Why::Best,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Standing;
    use crate::testing::{GRID, UNIT, curve_status};
    use proptest::prelude::*;

    const TOTAL: usize = 60;

    /// Returns a curve that falls by a share of what is left with each unit: slowly, in steps, or over a cliff.
    fn curve() -> impl Strategy<Value = Curve> {
        let fall = prop_oneof![4 => Just(0_f64), 3 => 0.001..0.05_f64, 1 => 0.2..0.9_f64];
        prop::collection::vec(fall, TOTAL).prop_map(|falls| {
            let ratio = |units: u32| falls.iter().take(units as usize).map(|fall| 1. - *fall).product::<f64>();
            Curve::new(&curve_status(ratio), GRID).unwrap()
        })
    }

    proptest! {
        /// Without its margins the greedy one could be better, and break the bounds.
        #[test]
        fn the_best_division_is_never_above_the_greedy_one_which_keeps_the_same_floors(
            vms in prop::collection::vec((curve(), prop_oneof![Just(0.05), Just(0.25), Just(f64::INFINITY)]), 2..5),
        ) {
            let share = TOTAL / vms.len();
            let subjects = vms.iter().map(|(curve, bound)| Subject {
                has_bytes: share as u64 * UNIT,
                has: share,
                least: 1,
                most: TOTAL,
                own: 0,
                weight: 1.,
                bound: *bound,
                reads_per_s: Some(1000.),
                standing: Standing::Free(curve),
                is_known: true,
            });
            let subjects: Vec<Subject<'_>> = subjects.collect();
            let floors: Vec<usize> = subjects.iter().map(|vm| vm.floor(share)).collect();
            let memory = Memory { total_bytes: TOTAL as u64 * UNIT, unit_bytes: UNIT };
            let division = Division { subjects: &subjects, floors: &floors, memory, held: vec![None; vms.len()] };
            let (best, mut greedy) = (division.best(&floors).unwrap(), floors.clone());
            division.compare(Policy::Greedy, &mut greedy, &vec![share; vms.len()]).unwrap();
            prop_assert!(greedy.iter().zip(&floors).all(|(units, floor)| units >= floor), "{greedy:?} {floors:?}");
            let problem = division.problem(&floors).unwrap();
            let [best, greedy] = [best, greedy].map(|units| problem.geometric_mean(&units));
            prop_assert!(best <= greedy + 1e-9, "{best} {greedy}");
        }
    }
}
