//! Running means of what reads cost, by their size.

use crate::units::Nanos;

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
            // A mean of hardly anything, as reads have whose ends are seen one right after the other, can grow as well.
            let bounded = ns.clamp(self.ns / 2, self.ns.saturating_mul(2).max(MEAN_OF));
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

/// Newest value of a mean, which further reads may share.
#[derive(Clone, Copy, Debug)]
struct Newest {
    at: Nanos,
    ns: u64,
    /// Reads that share it, and their pages.
    reads: u64,
    pages: u64,
    class: usize,
    /// Mean without it.
    before: Mean,
}

/// Mean costs of reads of each size.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Costs {
    /// Means of the cost of a page, by the class of the read.
    page: [Mean; CLASSES],
    newest: Option<Newest>,
}

impl Costs {
    /// Adds what a read of `pages` pages cost that began at `began` and ended at `now`, where the read before it ended at `before`. Those whose
    /// ends are seen in one turn have one time.
    pub(super) fn note_end(&mut self, now: Nanos, began: Nanos, before: Nanos, pages: u64) {
        if began < now && before == now {
            self.share(now, pages);
        } else {
            self.note(now, pages, now.since_ns(began.max(before)));
        }
    }

    /// Adds the cost of a read of `pages` pages, at least 1, that ended at `at`.
    pub(super) fn note(&mut self, at: Nanos, pages: u64, ns: u64) {
        self.put(Newest { at, ns, reads: 1, pages, class: class(pages), before: Mean::default() });
    }

    /// Adds a read of `pages` pages whose end was seen together with that of the newest value: both took what that one took, and are one
    /// value. Does nothing if no value ended at `at`.
    fn share(&mut self, at: Nanos, pages: u64) {
        let Some(newest) = self.newest.filter(|newest| newest.at == at) else { return };
        self.page[newest.class] = newest.before;
        let (reads, pages) = (newest.reads + 1, newest.pages + pages);
        self.put(Newest { reads, pages, class: class(pages / reads), ..newest });
    }

    fn put(&mut self, newest: Newest) {
        let mean = &mut self.page[newest.class];
        self.newest = Some(Newest { before: *mean, ..newest });
        mean.note(newest.ns / newest.pages);
    }

    /// Returns the cost of a read of `pages` pages, or `None` if reads of about this size are too few.
    pub(super) fn of(&self, pages: u64) -> Option<u64> {
        Some(self.page[class(pages)].get()?.saturating_mul(pages))
    }
}

fn class(pages: u64) -> usize {
    (pages.ilog2() as usize).min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_whose_ends_are_seen_together_share_what_they_took() {
        let mut costs = Costs::default();
        for turn in 1..=100 {
            costs.note(Nanos(turn), 2, 6_000);
            costs.share(Nanos(turn), 2);
            costs.share(Nanos(turn), 2);
            costs.share(Nanos(turn + 1), 2);
        }
        assert_eq!(costs.of(2), Some(2_000));
        // One read of 2 pages and one of 10 are two of 6.
        let mut costs = Costs::default();
        for turn in 1..=4 {
            costs.note(Nanos(turn), 2, 12_000);
            costs.share(Nanos(turn), 10);
        }
        assert_eq!((costs.of(2), costs.of(6), costs.of(10)), (None, Some(6_000), None));
    }

    #[test]
    fn a_mean_that_began_with_no_time_grows() {
        for first_ns in [0, 3] {
            let mut costs = Costs::default();
            (0..4).for_each(|_| costs.note(Nanos(1), 256, 256 * first_ns));
            assert_eq!(costs.of(256), Some(256 * first_ns));
            (0..200).for_each(|_| costs.note(Nanos(2), 256, 256 * 27_000));
            assert!(costs.of(256).unwrap() > 256 * 26_000, "{:?}", costs.of(256));
        }
    }
}
