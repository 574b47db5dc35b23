//! Latency histograms: logarithmic buckets, eight to the octave, so that a quantile is off by at most 13 %.
//!
//! Owned by the I/O thread; copies go to the control socket.

use remoca_protocol::control::LatencySummary;

const SUB_BUCKETS: usize = 8;
const OCTAVES: usize = 40;

/// Counts of durations in nanoseconds up to 18 minutes; longer ones count as the longest.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Box<[u64; SUB_BUCKETS * OCTAVES]>,
    count: u64,
    sum_ns: u64,
    max_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: Box::new([0; SUB_BUCKETS * OCTAVES]), count: 0, sum_ns: 0, max_ns: 0 }
    }
}

impl Histogram {
    /// Adds a duration of `ns` nanoseconds to the histogram.
    pub fn record(&mut self, ns: u64) {
        self.counts[bucket(ns)] += 1;
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Returns the duration, in nanoseconds, that `share` (0.0 ..= 1.0) of all durations do not exceed, rounded up to
    /// the end of its bucket. Returns 0 if there are no durations.
    #[must_use]
    pub fn quantile_ns(&self, share: f64) -> u64 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of a count, rounded up"
        )]
        let rank = (self.count as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (at, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank.max(1) {
                return upper_ns(at).min(self.max_ns);
            }
        }
        0
    }

    /// Returns count, sum, mean, quantiles and maximum.
    #[must_use]
    pub fn summary(&self) -> LatencySummary {
        LatencySummary {
            count: self.count,
            sum_ns: self.sum_ns,
            mean_us: if self.count == 0 { 0.0 } else { micros(self.sum_ns) / micros(self.count * 1000) },
            p50_us: micros(self.quantile_ns(0.5)),
            p99_us: micros(self.quantile_ns(0.99)),
            p999_us: micros(self.quantile_ns(0.999)),
            max_us: micros(self.max_ns),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn micros(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

fn bucket(ns: u64) -> usize {
    let ns = ns.max(SUB_BUCKETS as u64);
    let octave = ns.ilog2() as usize;
    let sub = usize::try_from((ns >> (octave - 3)) % SUB_BUCKETS as u64).unwrap_or(0);
    ((octave - 3) * SUB_BUCKETS + sub).min(SUB_BUCKETS * OCTAVES - 1)
}

fn upper_ns(bucket: usize) -> u64 {
    let (octave, sub) = (bucket / SUB_BUCKETS, bucket % SUB_BUCKETS);
    ((SUB_BUCKETS + sub + 1) as u64) << octave
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_close() {
        let mut histogram = Histogram::default();
        for ns in 1..=100_000 {
            histogram.record(ns);
        }
        for (share, exact) in [(0.5, 50_000.0), (0.99, 99_000.0), (1.0, 100_000.0)] {
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            let got = histogram.quantile_ns(share) as f64;
            assert!((got / exact - 1.0).abs() < 0.13, "{share}: {got} for {exact}");
        }
        assert_eq!(Histogram::default().quantile_ns(0.5), 0);
    }

    #[test]
    fn every_duration_has_a_bucket_that_holds_it() {
        for shift in 0..64 {
            let ns = 1_u64 << shift;
            let at = bucket(ns);
            assert!(upper_ns(at) >= ns || at == SUB_BUCKETS * OCTAVES - 1, "{ns}");
        }
    }
}
