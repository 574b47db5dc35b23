//! Allocation: how a total of memory is divided among VMs, given the miss-ratio curve of each.
//!
//! Memory is counted in units of any size; a VM's curve has its miss ratio with 0, 1, 2 ... units. The *baseline* divides the total by
//! weight. The best division has the least weighted geometric mean of miss ratios, each relative to the baseline's
//! (papers/hypervisor-exclusive-cache.txt, section 4.2):
//! 1. Each VM has from `least` to `most` units, and all have at most the total.
//! 2. No VM's miss ratio is above that of its baseline by more than the share `bound` of it.
//! 3. The baseline itself is such a division, so there is always one.
//!
//! `optimal.rs` finds the best division. `compare.rs` has others to compare it with: the paper's greedy one, an exhaustive search, and
//! an emulation of VMware ESX. Units that lower nobody's miss ratio are given to nobody. Nothing here knows how memory is moved, or when
//! it is worth moving. Decision 0038.

mod compare;
mod optimal;
#[cfg(test)]
mod tests;

/// Miss ratio below which nothing is gained: a miss ratio of 0 has no logarithm.
pub const MISS_RATIO_FLOOR: f64 = 1e-4;
/// Least and greatest weight of a VM.
pub const WEIGHTS: std::ops::RangeInclusive<f64> = 1e-3..=1e6;

/// What is known of one VM.
#[derive(Clone, Debug)]
pub struct Vm {
    /// Miss ratio with 0, 1, 2 ... units. Never increases.
    pub miss_ratios: Vec<f64>,
    pub least: usize,
    pub most: usize,
    /// Share of the baseline, and exponent in the geometric mean; in [`WEIGHTS`].
    pub weight: f64,
    /// Greatest loss against the baseline, as a share of the baseline's miss ratio; infinite if the VM has no such bound.
    pub bound: f64,
}

/// Reason why a total cannot be divided among VMs. A number is the index of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalid {
    NoVms,
    /// Its curve is empty, increases, or has a number that is negative, infinite or not a number.
    Curve(usize),
    /// Its least number of units is above its most, or the curve does not reach to its most.
    Range(usize),
    Weight(usize),
    /// Its bound is negative or not a number.
    Bound(usize),
    /// All VMs together must have more than the total.
    TotalTooSmall,
}

/// Memory to be divided among VMs, with their baseline.
#[derive(Clone, Debug)]
pub struct Allocation {
    vms: Vec<Vm>,
    total: usize,
    baseline: Vec<usize>,
    /// Least number of units with which each VM is within its bound.
    bounded: Vec<usize>,
}

impl Allocation {
    /// Returns the problem of dividing `total` units among `vms`.
    ///
    /// # Errors
    /// If a VM or the total is not valid; see [`Invalid`].
    pub fn new(vms: Vec<Vm>, total: usize) -> Result<Self, Invalid> {
        if vms.is_empty() {
            return Err(Invalid::NoVms);
        }
        for (i, vm) in vms.iter().enumerate() {
            check(i, vm)?;
        }
        let least = vms.iter().try_fold(0_usize, |sum, vm| sum.checked_add(vm.least));
        if least.is_none_or(|least| least > total) {
            return Err(Invalid::TotalTooSmall);
        }
        let baseline = baseline(&vms, total);
        let bounded = vms.iter().zip(&baseline).map(|(vm, baseline)| vm.bounded(*baseline)).collect();
        Ok(Self { vms, total, baseline, bounded })
    }

    /// Returns the units of each VM by weight alone, within its least and most.
    #[must_use]
    pub fn baseline(&self) -> &[usize] {
        &self.baseline
    }

    /// Returns the weighted geometric mean of the miss ratios with `units` for each VM, each divided by that of the baseline.
    ///
    /// # Panics
    /// If a VM is missing, or has more units than its curve.
    #[must_use]
    pub fn geometric_mean(&self, units: &[usize]) -> f64 {
        assert_eq!(units.len(), self.vms.len());
        let weights: f64 = self.vms.iter().map(|vm| vm.weight).sum();
        ((self.cost(units) - self.cost(&self.baseline)) / weights).exp()
    }

    /// Returns the sum of the VMs' costs.
    fn cost(&self, units: &[usize]) -> f64 {
        self.vms.iter().zip(units).map(|(vm, units)| vm.cost(*units)).sum()
    }
}

impl Vm {
    /// Returns the least number of units from which more memory, up to `most`, lowers the miss ratio by no more than the share
    /// `tolerance`: the VM's working set, as its curve shows it.
    #[must_use]
    pub fn working_set(&self, tolerance: f64) -> usize {
        self.first_within(self.ratio(self.most) * (1. + tolerance), self.most)
    }

    /// Returns the least number of units that is allowed where the baseline is `baseline`.
    fn bounded(&self, baseline: usize) -> usize {
        self.first_within(self.ratio(baseline) * (1. + self.bound), baseline)
    }

    /// Returns the first number of units, from the least to `end`, whose miss ratio is at most `ratio`; `end` if there is none.
    fn first_within(&self, ratio: f64, end: usize) -> usize {
        (self.least..end).find(|units| self.ratio(*units) <= ratio).unwrap_or(end)
    }

    fn ratio(&self, units: usize) -> f64 {
        self.miss_ratios[units].max(MISS_RATIO_FLOOR)
    }

    /// Returns the logarithm of the VM's part in the geometric mean.
    fn cost(&self, units: usize) -> f64 {
        self.weight * self.ratio(units).ln()
    }
}

fn check(i: usize, vm: &Vm) -> Result<(), Invalid> {
    let is_curve = vm.miss_ratios.iter().all(|ratio| ratio.is_finite() && *ratio >= 0.)
        && vm.miss_ratios.is_sorted_by(|a, b| a >= b);
    if vm.miss_ratios.is_empty() || !is_curve {
        return Err(Invalid::Curve(i));
    }
    if vm.least > vm.most || vm.most >= vm.miss_ratios.len() {
        return Err(Invalid::Range(i));
    }
    if !WEIGHTS.contains(&vm.weight) {
        return Err(Invalid::Weight(i));
    }
    if vm.bound.is_nan() || vm.bound < 0. {
        return Err(Invalid::Bound(i));
    }
    Ok(())
}

/// Divides `total` by weight: after the least of each VM, every unit goes to the one that has fewest for its weight.
fn baseline(vms: &[Vm], total: usize) -> Vec<usize> {
    let mut units: Vec<usize> = vms.iter().map(|vm| vm.least).collect();
    for _ in units.iter().sum()..total {
        let all = 0..vms.len();
        let Some(poorest) = least_by(all.filter(|i| units[*i] < vms[*i].most), |i| units[i] as f64 / vms[i].weight)
        else {
            break;
        };
        units[poorest] += 1;
    }
    units
}

/// Returns the first of `indices` whose value is the least.
fn least_by(indices: impl Iterator<Item = usize>, value: impl Fn(usize) -> f64) -> Option<usize> {
    indices.min_by(|a, b| value(*a).total_cmp(&value(*b)))
}
