//! The best division, by dynamic programming: the logarithm makes the geometric mean a sum of one cost for each VM.
//!
//! Row `i` has the least cost of the first `i` VMs with at most 0, 1, 2 ... units above what they must have. A VM takes only numbers of
//! units with which its miss ratio falls, so steps and cliffs cost little. With `u` units and `n` VMs it takes at most `n * u^2 / 2` additions.

use super::{Allocation, Vm};

/// A number of units above what a VM must have, with the VM's cost.
struct Choice {
    units: usize,
    cost: f64,
}

impl Allocation {
    /// Returns the units of each VM with which the geometric mean is least. Of equal divisions it returns one in which no VM could give
    /// back units without loss.
    #[must_use]
    pub fn optimal(&self) -> Vec<usize> {
        let spare = self.total - self.bounded.iter().sum::<usize>();
        let choices: Vec<Vec<Choice>> =
            self.vms.iter().zip(&self.bounded).map(|(vm, least)| choices(vm, *least, spare)).collect();
        let mut rows = vec![vec![0.; spare + 1]];
        for choices in &choices {
            rows.push(next_row(&rows[rows.len() - 1], choices));
        }
        let mut left = spare;
        let mut units = self.bounded.clone();
        for (i, choices) in choices.iter().enumerate().rev() {
            // The same addition as in `next_row`, so that one is equal.
            let leads_here = |choice: &&Choice| {
                choice.units <= left && rows[i][left - choice.units] + choice.cost == rows[i + 1][left]
            };
            let taken = choices.iter().find(leads_here).map_or(0, |choice| choice.units);
            units[i] += taken;
            left -= taken;
        }
        units
    }
}

/// Returns the numbers of units that a VM may take besides `least`, at most `spare`.
fn choices(vm: &Vm, least: usize, spare: usize) -> Vec<Choice> {
    let most = vm.most.min(least + spare);
    let mut choices = vec![Choice { units: 0, cost: vm.cost(least) }];
    for units in least + 1..=most {
        let cost = vm.cost(units);
        if choices.last().is_some_and(|last| cost < last.cost) {
            choices.push(Choice { units: units - least, cost });
        }
    }
    choices
}

fn next_row(row: &[f64], choices: &[Choice]) -> Vec<f64> {
    let mut next = vec![f64::INFINITY; row.len()];
    for choice in choices {
        for (best, before) in next[choice.units..].iter_mut().zip(row) {
            let cost = before + choice.cost;
            *best = if cost < *best { cost } else { *best };
        }
    }
    next
}
