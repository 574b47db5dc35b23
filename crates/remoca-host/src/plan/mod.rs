//! One division of memory: from what each VM has and its curve to what each would get, with the reasons. Pure arithmetic.
//!
//! Called by the planner; calls `remoca_core::allocation` for the best division. In units of memory:
//! 1. The targets add up to at most the total, unless VMs that cannot be changed have too much already. Then all others are cut to their
//!    shares by weight, if those that ever said what they have are beyond the total. If all minimums together are more than the total, they
//!    are cut to these, or to what their guests have lent if that is more.
//! 2. No target is below the VM's floor: its minimum, and the least size within its isolation bound; or what it has, if that is less and the
//!    rest is with VMs without a curve.
//! 3. While all have more than the total, VMs with no more than their share by weight give nothing, as far as that suffices.
//! 4. A VM that neither gains nor has to give keeps exactly what it has. Without a gain that exceeds errors and cost, nothing moves.
//!
//! The gain is judged as if each curve were wrong by its error, to the VM's disadvantage. VMs whose own gain does not exceed their error, or is
//! among the least of a plan that is not worth it, are held at their size, and the rest is planned again. Decision 0042.

mod division;
mod subject;

use division::{Division, baseline};
pub use subject::{Memory, Plan, Policy, Row, Standing, Subject, Why};

impl Plan {
    /// Divides `memory` among the VMs.
    ///
    /// # Errors
    /// Why there is no division; then everybody keeps what he has.
    pub fn new(subjects: &[Subject<'_>], memory: Memory, policy: Policy) -> Result<Self, String> {
        let units = memory.units();
        let why = match baseline(subjects, units) {
            Ok(baseline) => return Self::within(subjects, memory, policy, &baseline),
            Err(why) => why,
        };
        // What is beyond the minimums comes back all the same, unless one alone is more than the total.
        if known_bytes(subjects) <= memory.total_bytes || subjects.iter().any(|vm| vm.least > units) {
            return Err(why);
        }
        let least = subjects.iter().fold(0, |sum: usize, vm| sum.saturating_add(vm.least.max(vm.own)));
        let plan = baseline(subjects, least).and_then(|least| Self::within(subjects, memory, policy, &least));
        let cuts = |plan: &Self| plan.rows.iter().zip(subjects).any(|(row, vm)| row.target < vm.has);
        // If nothing is cut, the operator has to hear what is wrong.
        plan.ok().filter(cuts).ok_or(why)
    }

    /// Divides `memory` among the VMs, whose shares by weight are `baseline`.
    fn within(subjects: &[Subject<'_>], memory: Memory, policy: Policy, baseline: &[usize]) -> Result<Self, String> {
        let mut floors: Vec<usize> = subjects.iter().zip(baseline).map(|(vm, baseline)| vm.floor(*baseline)).collect();
        let mut held = vec![None; subjects.len()];
        let is_over = subjects.iter().fold(0, |sum: u64, vm| sum.saturating_add(vm.has_bytes)) > memory.total_bytes;
        for (at, vm) in subjects.iter().enumerate() {
            // Nobody tells them to give anything then, so no other one may count on that.
            if is_over && vm.curve().is_some() && vm.has <= baseline[at] {
                (floors[at], held[at]) = (vm.covering(memory.unit_bytes), Some(Why::Spared));
            }
        }
        let mut targets: Vec<usize> = subjects.iter().zip(&floors).map(|(vm, floor)| vm.apart(*floor)).collect();
        if !(Division { subjects, floors: &floors, memory, held: Vec::new() }).fits(&targets) {
            for (at, vm) in subjects.iter().enumerate() {
                match vm.standing {
                    // The total comes before what VMs without a curve have.
                    Standing::Keeps if is_over => targets[at] = vm.has.min(baseline[at]),
                    // It does not come from them, so the others are owed what they have at most.
                    Standing::Free(_) if !is_over => {
                        floors[at] = floors[at].min(vm.whole(memory.unit_bytes));
                        targets[at] = floors[at];
                    }
                    Standing::Free(_) | Standing::Keeps | Standing::Stuck => {}
                }
            }
        }
        let mut division = Division { subjects, floors: &floors, memory, held };
        if !division.fits(&targets) {
            if known_bytes(subjects) <= memory.total_bytes {
                return Err("VMs that cannot be changed have more than the others could spare".into());
            }
            // What the others have too much comes back all the same.
            for (at, vm) in subjects.iter().enumerate() {
                if !matches!(vm.standing, Standing::Stuck) {
                    targets[at] = vm.has.min(baseline[at]);
                }
            }
            return Ok(division.explain(&targets, baseline));
        }
        match policy {
            Policy::Optimal => targets = division.worthwhile(&targets)?,
            Policy::Greedy | Policy::Esx | Policy::Equal => division.compare(policy, &mut targets, baseline)?,
        }
        Ok(division.explain(&targets, baseline))
    }
}

/// Returns the sum of what the VMs have that ever said what they have.
fn known_bytes(subjects: &[Subject<'_>]) -> u64 {
    subjects.iter().filter(|vm| vm.is_known).fold(0, |sum: u64, vm| sum.saturating_add(vm.has_bytes))
}
