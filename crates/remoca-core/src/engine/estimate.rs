//! Running estimates in a few hundred bytes: quantiles of a latency, and the number of reads that a disk can do at a
//! time.
//!
//! Quantiles come from a histogram with eight buckets per octave, from 1 us to 16 s, so they are off by at most 6 %. After
//! [`WINDOW`] values all counts are halved, so old values fade out. Quantiles are recomputed when an eighth of the values
//! is new, which costs about one step for each value.

const SUB_BUCKETS: usize = 8;
const BUCKETS: usize = SUB_BUCKETS * 24;
/// Number of values at which all counts are halved.
const WINDOW: u32 = 1024;
/// Minimum number of values for an estimate.
const VALUES_MIN: u32 = 16;

/// Quantiles of a latency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    pub p50_ns: u64,
    pub p99_ns: u64,
}

/// Running estimate of one latency.
#[derive(Debug)]
pub(super) struct Estimate {
    counts: [u16; BUCKETS],
    total: u32,
    since_update: u32,
    quantiles: Latency,
}

impl Default for Estimate {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], total: 0, since_update: 0, quantiles: Latency::default() }
    }
}

impl Estimate {
    /// Adds a latency, counted `weight` times.
    pub(super) fn note(&mut self, ns: u64, weight: u16) {
        self.counts[bucket(ns)] += weight;
        self.total += u32::from(weight);
        self.since_update += u32::from(weight);
        if self.total >= WINDOW {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.total = self.counts.iter().map(|count| u32::from(*count)).sum();
        }
        if self.since_update * 8 >= self.total {
            self.since_update = 0;
            self.quantiles = Latency { p50_ns: self.quantile(50), p99_ns: self.quantile(99) };
        }
    }

    /// Returns the quantiles, or `None` while there are fewer than [`VALUES_MIN`] values.
    pub(super) fn quantiles(&self) -> Option<Latency> {
        (self.total >= VALUES_MIN).then_some(self.quantiles)
    }

    /// Returns the middle, in nanoseconds, of the bucket that contains this percentile.
    fn quantile(&self, percent: u32) -> u64 {
        let rank = (self.total * percent).div_ceil(100);
        let mut seen = 0;
        let at = self.counts.iter().position(|count| {
            seen += u32::from(*count);
            seen >= rank
        });
        middle_ns(at.unwrap_or(BUCKETS - 1))
    }
}

/// Maximum of the last few latencies.
#[derive(Debug, Default)]
pub(super) struct RecentMax {
    ns: [u64; 32],
    next: usize,
    slowest_ns: u64,
}

impl RecentMax {
    pub(super) fn note(&mut self, ns: u64) {
        self.ns[self.next] = ns;
        self.next = (self.next + 1) % self.ns.len();
        self.slowest_ns = self.ns.iter().copied().max().unwrap_or(0);
    }

    pub(super) fn slowest_ns(&self) -> u64 {
        self.slowest_ns
    }
}

/// Number of reads that a disk can do at a time without becoming slower.
#[derive(Debug, Default)]
pub(super) struct Concurrency {
    /// Running mean of the latency of reads that found the disk idle; 0 before the first one.
    unloaded_ns: u64,
    /// Number of reads at a time, times [`Self::SCORE_PER_READ`].
    score: u32,
}

impl Concurrency {
    /// Quick reads that raise the number by one; half as many slow ones lower it by one.
    const SCORE_PER_READ: u32 = 4;
    const MAX: u32 = 64 * Self::SCORE_PER_READ;

    /// Returns the number of reads that the disk can do at a time without becoming slower, or 0 while that is unknown.
    pub(super) fn reads(&self) -> u32 {
        self.score / Self::SCORE_PER_READ
    }

    /// Adds the latency of a read that found `queue_depth` others in flight. A quick read counts only if that depth is
    /// at least the current estimate, and a slow read only if it is at most the current estimate.
    pub(super) fn note(&mut self, ns: u64, queue_depth: u32) {
        if queue_depth == 0 {
            self.unloaded_ns =
                if self.unloaded_ns == 0 { ns } else { self.unloaded_ns - self.unloaded_ns / 8 + ns / 8 };
            return;
        }
        let is_quick = ns <= self.unloaded_ns + self.unloaded_ns / 4;
        if is_quick && queue_depth >= self.reads() {
            self.score = (self.score + 1).min(Self::MAX);
        } else if !is_quick && queue_depth <= self.reads() {
            self.score = self.score.saturating_sub(2);
        }
    }
}

fn bucket(ns: u64) -> usize {
    let units = (ns >> 7).max(SUB_BUCKETS as u64);
    let octave = units.ilog2() as usize - 3;
    let sub = usize::try_from((units >> octave) % SUB_BUCKETS as u64).unwrap_or(0);
    (octave * SUB_BUCKETS + sub).min(BUCKETS - 1)
}

fn middle_ns(bucket: usize) -> u64 {
    let (octave, sub) = (bucket / SUB_BUCKETS, bucket % SUB_BUCKETS);
    ((2 * (SUB_BUCKETS + sub) as u64 + 1) << octave) << 6
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(values: impl IntoIterator<Item = u64>) -> Estimate {
        let mut estimate = Estimate::default();
        values.into_iter().for_each(|ns| estimate.note(ns, 1));
        estimate
    }

    #[test]
    fn a_few_values_say_nothing() {
        assert_eq!(of([1000; 15]).quantiles(), None);
        assert!(of([1000; 16]).quantiles().is_some());
    }

    #[test]
    fn what_is_past_fades_out() {
        let mut values = vec![1_000_000; 5000];
        values.extend([100_000; 1100]);
        assert!(of(values).quantiles().unwrap().p50_ns < 110_000);
    }

    #[test]
    fn one_slow_answer_in_a_hundred_shows_in_the_p99_and_not_in_the_median() {
        let known = of((0..4000).map(|i| if i % 50 == 0 { 20_000_000 } else { 200_000 })).quantiles().unwrap();
        assert!(known.p50_ns < 220_000 && known.p99_ns > 18_000_000, "{known:?}");
    }

    #[test]
    fn every_duration_has_a_bucket() {
        for ns in [0, 1, 1023, 1024, 1 << 33, 1 << 34, u64::MAX - 5] {
            assert!(of([ns; 16]).quantiles().is_some());
        }
    }

    #[test]
    fn a_value_with_a_weight_counts_as_many() {
        let mut estimate = of([1_000_000; 1000]);
        (0..200).for_each(|_| estimate.note(100_000, 8));
        assert!(estimate.quantiles().unwrap().p50_ns < 110_000);
    }

    #[test]
    fn the_slowest_is_one_of_the_last_few() {
        let mut recent = RecentMax::default();
        recent.note(9);
        (0..31).for_each(|_| recent.note(3));
        assert_eq!(recent.slowest_ns(), 9);
        recent.note(3);
        assert_eq!(recent.slowest_ns(), 3);
    }

    #[test]
    fn reads_that_are_quick_beside_others_show_how_many_the_disk_does_at_a_time() {
        let mut concurrency = Concurrency::default();
        (0..100).for_each(|_| concurrency.note(1000, 3));
        assert_eq!(concurrency.reads(), 0, "nothing to compare them with");
        concurrency.note(1000, 0);
        (0..4).for_each(|_| concurrency.note(1250, 3));
        assert_eq!(concurrency.reads(), 1);
        (0..100).for_each(|_| concurrency.note(1250, 3));
        assert_eq!(concurrency.reads(), 4, "no more than were seen");
        (0..1000).for_each(|_| concurrency.note(1250, 500));
        assert_eq!(concurrency.reads(), 64);
    }

    #[test]
    fn a_disk_that_becomes_slower_beside_others_does_fewer_at_a_time() {
        let mut concurrency = Concurrency::default();
        concurrency.note(1000, 0);
        (0..100).for_each(|_| concurrency.note(1000, 3));
        (0..100).for_each(|_| concurrency.note(9000, 5));
        assert_eq!(concurrency.reads(), 4, "deeper queues were never free of cost");
        (0..2).for_each(|_| concurrency.note(1260, 4));
        assert_eq!(concurrency.reads(), 3);
        (0..100).for_each(|_| concurrency.note(1260, 1));
        assert_eq!(concurrency.reads(), 0);
        (0..40).for_each(|_| concurrency.note(2000, 0));
        (0..8).for_each(|_| concurrency.note(2000, 1));
        assert_eq!(concurrency.reads(), 2, "an unloaded disk is slower now as well");
    }

    proptest! {
        /// Against the sorted values themselves.
        #[test]
        fn quantiles_are_close(values in prop::collection::vec(2_000_u64..10_000_000_000, 100..1000)) {
            let mut estimate = of(values.iter().copied());
            // So that everything is in the computed quantiles.
            estimate.since_update = estimate.total;
            estimate.quantiles = Latency { p50_ns: estimate.quantile(50), p99_ns: estimate.quantile(99) };
            let mut sorted = values;
            sorted.sort_unstable();
            for (percent, got) in [(50, estimate.quantiles.p50_ns), (99, estimate.quantiles.p99_ns)] {
                let exact = sorted[(sorted.len() * percent).div_ceil(100) - 1];
                prop_assert!(got.abs_diff(exact) <= exact / 15, "{percent}: {got} for {exact}");
            }
        }
    }
}
