//! Histogram of stack distances, each with the weight of the reads that its sample stands for.
//!
//! Bucket `i` counts the distances from `i * width + 1` to `(i + 1) * width`. The width is 1 as long as every block is sampled:
//! then the histogram is exact. It doubles whenever it is less than what one sampled block stands for.
//!
//! The number of all reads is known, that of the hits at each size is estimated. A few often read blocks, sampled or not, make the
//! sampled reads too many or too few; hardly ever are these the reads of blocks that are not in the queue, because nothing is
//! read often and never evicted. So the hits take the whole correction: they are scaled to the reads that are left.

use super::priority;
use super::queue::SAMPLES_MAX;

/// Maximum width of a bucket: what one block stands for at the lowest rate.
pub(super) const WIDTH_MAX: u64 = priority::ALL;

#[derive(Clone)]
pub(super) struct Histogram {
    /// Weight of the reads, by distance.
    pub(super) buckets: Box<[f64]>,
    /// Blocks in a bucket, a power of two.
    pub(super) width: u64,
    /// Number of all reads, sampled or not.
    pub(super) reads: f64,
    /// Weight of the reads of blocks that are not in the queue. By chance below 0 where only part of the evictions is seen.
    pub(super) beyond: f64,
}

/// Sums of weights, of which miss ratios are shares.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Totals {
    pub(super) reads: f64,
    pub(super) beyond: f64,
    /// Weight of the reads that have a distance.
    pub(super) found: f64,
}

impl Totals {
    /// Returns the miss ratio of a cache that answers the reads of this weight.
    pub(super) fn miss_ratio(self, within: f64) -> f64 {
        let scale = if self.found > 0. { (self.reads - self.beyond).max(0.) / self.found } else { 0. };
        (1. - within * scale / self.reads).max(0.)
    }
}

impl Histogram {
    pub(super) fn new() -> Self {
        Self { buckets: vec![0.; SAMPLES_MAX].into(), width: 1, reads: 0., beyond: 0. }
    }

    /// Returns the bytes that the histogram takes.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.buckets)
    }

    /// Notes a read of a block at this distance, which stands for `weight` reads.
    pub(super) fn note(&mut self, distance: f64, weight: f64) {
        while (self.width as f64) < weight && self.width < WIDTH_MAX {
            self.widen();
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "never below 0; rounds down")]
        let bucket = (distance / self.width as f64) as usize;
        self.buckets[bucket.min(SAMPLES_MAX - 1)] += weight;
    }

    /// Multiplies all weights by `kept`.
    pub(super) fn age(&mut self, kept: f64) {
        self.buckets.iter_mut().for_each(|weight| *weight *= kept);
        self.reads *= kept;
        self.beyond *= kept;
    }

    /// Returns the share of the reads whose distance is greater than `size`, at each size of `sizes`, which must not decrease.
    pub(super) fn miss_ratios(&self, sizes: impl Iterator<Item = u64>) -> impl Iterator<Item = f64> {
        let totals = self.totals();
        self.weights_within(sizes).map(move |weight| totals.miss_ratio(weight))
    }

    /// Returns the weight of the reads whose distance is at most `size`, at each size of `sizes`, which must not decrease.
    pub(super) fn weights_within(&self, sizes: impl Iterator<Item = u64>) -> impl Iterator<Item = f64> {
        let (mut bucket, mut below) = (0, 0.);
        sizes.map(move |size| {
            let end = usize::try_from(size / self.width).unwrap_or(SAMPLES_MAX).min(SAMPLES_MAX);
            below += self.buckets[bucket..end].iter().sum::<f64>();
            bucket = end;
            let part = (size % self.width) as f64 / self.width as f64;
            below + self.buckets.get(end).map_or(0., |weight| weight * part)
        })
    }

    /// Returns the sums of all weights.
    pub(super) fn totals(&self) -> Totals {
        Totals { reads: self.reads, beyond: self.beyond.max(0.), found: self.buckets.iter().sum() }
    }

    fn widen(&mut self) {
        for i in 0..SAMPLES_MAX {
            let pair = |at: usize| self.buckets.get(at).copied().unwrap_or(0.);
            self.buckets[i] = pair(2 * i) + pair(2 * i + 1);
        }
        self.width *= 2;
    }
}
