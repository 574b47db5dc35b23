//! Reduces a failing plan: first to the fewest steps from its beginning, then by leaving out steps that are not needed
//! (delta debugging: Zeller and Hildebrandt, IEEE TSE 28(2), 2002). A shorter plan is accepted if it breaks the same
//! promise.

use crate::plan::Plan;
use crate::{Failure, Options, run};
use std::collections::BTreeSet;

/// A reduced plan.
#[derive(Clone, Debug)]
pub struct Shrunk {
    /// Options that run only the rest of the plan, which fails.
    pub options: Options,
    pub failure: Failure,
    /// Number of remaining steps.
    pub steps: usize,
}

/// Reduces a plan that failed, in at most `runs_max` runs.
#[must_use]
pub fn shrink(plan: &Plan, failure: &Failure, options: &Options, runs_max: usize) -> Shrunk {
    let mut search = Search { plan, best: failure.clone(), runs_left: runs_max };
    let mut options = options.clone();
    let total =
        options.steps.unwrap_or(usize::MAX).min(plan.steps.iter().map(|step| step.number + 1).max().unwrap_or(0));
    let steps = search.fewest_steps(&options, total);
    options.steps = Some(steps);
    search.leave_out(&mut options, steps);
    let steps = plan.steps.iter().filter(|step| options.includes(step.number)).count();
    Shrunk { options, failure: search.best, steps }
}

struct Search<'a> {
    plan: &'a Plan,
    best: Failure,
    runs_left: usize,
}

impl Search<'_> {
    /// Returns whether the plan breaks the same promise with these options. Returns false if no runs are left.
    fn fails(&mut self, options: &Options) -> bool {
        if self.runs_left == 0 {
            return false;
        }
        self.runs_left -= 1;
        match run(self.plan, options) {
            Err(failure) if failure.violation.promise == self.best.violation.promise => {
                self.best = *failure;
                true
            }
            Err(_) | Ok(_) => false,
        }
    }

    /// Finds, by bisection, a number of steps that fails while one step less does not.
    fn fewest_steps(&mut self, options: &Options, total: usize) -> usize {
        let (mut passes, mut fails) = (0, total);
        while fails - passes > 1 {
            let middle = passes + (fails - passes) / 2;
            if self.fails(&Options { steps: Some(middle), ..options.clone() }) {
                fails = middle;
            } else {
                passes = middle;
            }
        }
        fails
    }

    /// Leaves out chunks of steps, from halves down to single steps, until no single step can be left out.
    fn leave_out(&mut self, options: &mut Options, steps: usize) {
        let mut chunk = steps.div_ceil(2);
        while chunk > 0 && self.runs_left > 0 {
            let mut spared = false;
            let numbers = self.plan.steps.iter().map(|step| step.number);
            let left: Vec<_> = numbers.filter(|step| options.includes(*step)).collect();
            for part in left.chunks(chunk) {
                let without: BTreeSet<_> = options.without.iter().chain(part).copied().collect();
                let shorter = Options { without, ..options.clone() };
                if self.fails(&shorter) {
                    *options = shorter;
                    spared = true;
                }
            }
            if !spared {
                chunk /= 2;
            }
        }
    }
}
