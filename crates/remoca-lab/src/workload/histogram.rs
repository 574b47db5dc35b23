//! A latency histogram with logarithmic buckets, 16 per doubling: quantiles are exact to 6 %, mean and maximum are exact.

use std::time::Duration;

use serde::Serialize;

const SUB_BITS: u32 = 4;
const SUB_COUNT: u64 = 1 << SUB_BITS;

#[derive(Clone, Debug, Default)]
pub struct Histogram {
    counts: Vec<u64>,
    count: u64,
    sum_ns: u64,
    max_ns: u64,
}

/// Summary of a histogram, in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub count: u64,
    pub mean_us: f64,
    pub p50_us: f64,
    pub p90_us: f64,
    pub p99_us: f64,
    pub p999_us: f64,
    pub max_us: f64,
    /// Upper end of each bucket that is not empty, and its count.
    pub buckets: Vec<(f64, u64)>,
}

impl Histogram {
    pub fn record(&mut self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        let index = bucket_of(ns);
        if index >= self.counts.len() {
            self.counts.resize(index + 1, 0);
        }
        self.counts[index] += 1;
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    pub fn summary(&self) -> Summary {
        let filled = self.counts.iter().enumerate().filter(|&(_, &count)| count > 0);
        Summary {
            count: self.count,
            mean_us: self.sum_ns as f64 / self.count.max(1) as f64 / 1e3,
            p50_us: self.quantile_us(0.5),
            p90_us: self.quantile_us(0.9),
            p99_us: self.quantile_us(0.99),
            p999_us: self.quantile_us(0.999),
            max_us: self.max_ns as f64 / 1e3,
            buckets: filled.map(|(index, &count)| (upper_end_of(index) as f64 / 1e3, count)).collect(),
        }
    }

    /// Returns the upper end of the bucket that contains the quantile, but no more than the largest value.
    fn quantile_us(&self, quantile: f64) -> f64 {
        let rank = quantile * self.count as f64;
        let mut seen = 0;
        for (index, &count) in self.counts.iter().enumerate() {
            seen += count;
            if seen > 0 && seen as f64 >= rank {
                return upper_end_of(index).min(self.max_ns) as f64 / 1e3;
            }
        }
        0.0
    }
}

/// Returns the index of a value's bucket. Each value below 16 ns has its own. Above, the top bit and the four bits
/// below it choose the bucket.
fn bucket_of(ns: u64) -> usize {
    let shift = (u64::BITS - ns.leading_zeros()).saturating_sub(SUB_BITS + 1);
    let index = u64::from(shift) * SUB_COUNT + (ns >> shift);
    usize::try_from(index).unwrap_or(usize::MAX)
}

fn upper_end_of(index: usize) -> u64 {
    let index = u64::try_from(index).unwrap_or(u64::MAX);
    if index < 2 * SUB_COUNT {
        return index;
    }
    let shift = index / SUB_COUNT - 1;
    let top = u128::from(index % SUB_COUNT + SUB_COUNT + 1) << shift;
    u64::try_from(top - 1).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_bucket_holds_its_values(ns in any::<u64>()) {
            let index = bucket_of(ns);
            prop_assert!(ns <= upper_end_of(index));
            prop_assert!(index == 0 || ns > upper_end_of(index - 1));
            prop_assert!(u128::from(upper_end_of(index)) <= u128::from(ns) * 17 / 16);
        }
    }

    #[test]
    fn quantiles_of_known_values() {
        let mut histogram = Histogram::default();
        for us in 1..=1000 {
            histogram.record(Duration::from_micros(us));
        }
        let summary = histogram.summary();
        assert_eq!((summary.count, summary.mean_us, summary.max_us), (1000, 500.5, 1000.0));
        assert!((500.0..=500.0 * 1.07).contains(&summary.p50_us), "{}", summary.p50_us);
        assert!((990.0..=1000.0).contains(&summary.p99_us), "{}", summary.p99_us);
        assert_eq!(summary.buckets.iter().map(|&(_, count)| count).sum::<u64>(), 1000);
        assert_eq!(Histogram::default().summary().p99_us, 0.0);
    }
}
