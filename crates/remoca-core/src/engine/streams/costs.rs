//! Running means of what reads cost, by their size.

/// Number of values before a mean is known. It begins with the least of them.
const VALUES_MIN: u32 = 4;
/// Number of values of which a mean is made; older ones fade out.
const MEAN_OF: u64 = 8;
/// Classes of reads by their size: 1 page, 2 to 3, 4 to 7 ... 256 or more.
const CLASSES: usize = 9;

/// Running mean of durations. A single value moves it by at most an eighth, so that a hiccup does not decide.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    ns: u64,
    values: u32,
}

impl Mean {
    fn note(&mut self, ns: u64) {
        if self.values >= VALUES_MIN {
            let bounded = ns.clamp(self.ns / 2, self.ns.saturating_mul(2));
            self.ns = self.ns - self.ns / MEAN_OF + bounded / MEAN_OF;
            return;
        }
        self.ns = if self.values == 0 { ns } else { ns.min(self.ns) };
        self.values += 1;
    }

    /// Returns the mean in nanoseconds, or `None` while there are too few values.
    fn get(&self) -> Option<u64> {
        (self.values >= VALUES_MIN).then_some(self.ns)
    }
}

/// Mean costs of reads of each size.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Costs {
    /// Means of the cost of a page, by the class of the read.
    page: [Mean; CLASSES],
}

impl Costs {
    /// Adds the cost of a read of `pages` pages, at least 1.
    pub(super) fn note(&mut self, pages: u64, ns: u64) {
        self.page[class(pages)].note(ns / pages);
    }

    /// Returns the cost of a read of `pages` pages, or `None` if reads of about this size are too few.
    pub(super) fn of(&self, pages: u64) -> Option<u64> {
        Some(self.page[class(pages)].get()?.saturating_mul(pages))
    }
}

fn class(pages: u64) -> usize {
    (pages.ilog2() as usize).min(CLASSES - 1)
}
