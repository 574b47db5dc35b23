//! Other divisions, to compare the best one with.

use super::{Allocation, least_by};

impl Allocation {
    /// Returns the paper's greedy division: from the baseline on, one unit moves from the VM that loses least by it to the one that
    /// gains most, while the geometric mean falls. It stops in front of a cliff.
    #[must_use]
    pub fn greedy(&self) -> Vec<usize> {
        let mut units = self.baseline.clone();
        loop {
            let gain = |i: usize| self.vms[i].cost(units[i]) - self.vms[i].cost(units[i] + 1);
            let loss = |i: usize| self.vms[i].cost(units[i] - 1) - self.vms[i].cost(units[i]);
            let all = || 0..self.vms.len();
            let Some(taker) = least_by(all().filter(|i| units[*i] < self.vms[*i].most), |i| -gain(i)) else { break };
            let may_give = |i: &usize| *i != taker && units[*i] > self.bounded[*i];
            let Some(giver) = least_by(all().filter(may_give), loss) else { break };
            if gain(taker) <= loss(giver) {
                break;
            }
            units[taker] += 1;
            units[giver] -= 1;
        }
        units
    }

    /// Returns the best division by trying all of them. Their number grows with the power of the number of VMs: for very few only.
    #[must_use]
    pub fn exhaustive(&self) -> Vec<usize> {
        let left = self.total - self.bounded.iter().sum::<usize>();
        let mut best = (f64::INFINITY, Vec::new());
        self.try_all(left, &mut Vec::new(), &mut best);
        best.1
    }

    fn try_all(&self, left: usize, units: &mut Vec<usize>, best: &mut (f64, Vec<usize>)) {
        let i = units.len();
        if i == self.vms.len() {
            let cost = self.cost(units);
            if cost < best.0 {
                *best = (cost, units.clone());
            }
            return;
        }
        let least = self.bounded[i];
        for more in 0..=left.min(self.vms[i].most - least) {
            units.push(least + more);
            self.try_all(left - more, units, best);
            units.pop();
        }
    }

    /// Returns what VMware ESX would do, as the paper emulates it: a VM whose working set is smaller than its baseline gives the share
    /// `tax` of the difference, and those with a larger one divide that by weight. No VM goes below its least, but bounds do
    /// not hold. Working sets are in units: as [`super::Vm::working_set`] has them for the paper's emulation, or all that a VM touches, as
    /// ESX itself would sample it.
    ///
    /// # Panics
    /// If the working set of a VM is missing, or `tax` is not from 0 to 1.
    #[must_use]
    pub fn esx(&self, tax: f64, working_sets: &[usize]) -> Vec<usize> {
        assert!(working_sets.len() == self.vms.len() && (0. ..=1.).contains(&tax));
        let mut units = self.baseline.clone();
        let all = 0..self.vms.len();
        let idle = |i: usize| self.baseline[i].saturating_sub(working_sets[i].max(self.vms[i].least)) as f64;
        let taken = |i: usize, units: &[usize]| self.baseline[i].abs_diff(units[i]) as f64;
        loop {
            let may_take = |i: &usize| working_sets[*i] > self.baseline[*i] && units[*i] < self.vms[*i].most;
            let taker = least_by(all.clone().filter(may_take), |i| (taken(i, &units) + 1.) / self.vms[i].weight);
            let may_give = |i: &usize| taken(*i, &units) + 1. <= tax * idle(*i);
            let giver = least_by(all.clone().filter(may_give), |i| taken(i, &units) - tax * idle(i));
            let (Some(taker), Some(giver)) = (taker, giver) else { break };
            units[taker] += 1;
            units[giver] -= 1;
        }
        units
    }
}
