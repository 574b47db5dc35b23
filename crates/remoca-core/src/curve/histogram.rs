//! Histogram of stack distances, each with the weight of the reads that its sample stands for.
//!
//! Bucket `i` counts the distances from `i * width + 1` to `(i + 1) * width`. The width is 1 as long as every block is sampled:
//! then the histogram is exact. It doubles whenever it is less than what one sampled block stands for.
//!
//! The number of all reads is known, that of the hits at each size is estimated. A few often read blocks, sampled or not, make the
//! sampled reads too many or too few; hardly ever are these the reads of blocks that are not in the queue, because nothing is
//! read often and never evicted. So the hits take the whole correction: they are scaled to the reads that are left.

use super::queue::SAMPLES_MAX;

#[derive(Clone)]
pub(super) struct Histogram {
    /// Weight of the reads, by distance.
    pub(super) buckets: Box<[f64]>,
    /// Blocks in a bucket, a power of two.
    pub(super) width: u64,
    /// Number of all reads, sampled or not.
    pub(super) reads: f64,
    /// Weight of the reads of blocks that are not in the queue.
    pub(super) beyond: f64,
}

impl Histogram {
    pub(super) fn new() -> Self {
        Self { buckets: vec![0.; SAMPLES_MAX].into(), width: 1, reads: 0., beyond: 0. }
    }

    /// Returns the bytes that the histogram takes.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.buckets)
    }

    /// Notes the distance of a read of the block that is the `rank`th of the sample, where one sampled block stands for `weight`. Without a
    /// rank the block is not in the queue.
    pub(super) fn note(&mut self, rank: Option<usize>, weight: f64) {
        let Some(rank) = rank else {
            self.beyond += weight;
            return;
        };
        while (self.width as f64) < weight {
            self.widen();
        }
        // The middle of the blocks that the sampled block stands for.
        let distance = (rank as f64 - 0.5) * weight;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rank is at least 1; rounds down"
        )]
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
        let found: f64 = self.buckets.iter().sum();
        let scale = if found > 0. { (self.reads - self.beyond).max(0.) / found } else { 0. };
        let (mut bucket, mut below) = (0, 0.);
        sizes.map(move |size| {
            let end = usize::try_from(size / self.width).unwrap_or(SAMPLES_MAX).min(SAMPLES_MAX);
            below += self.buckets[bucket..end].iter().sum::<f64>();
            bucket = end;
            let part = (size % self.width) as f64 / self.width as f64;
            let hits = below + self.buckets.get(end).map_or(0., |weight| weight * part);
            (1. - hits * scale / self.reads).max(0.)
        })
    }

    fn widen(&mut self) {
        for i in 0..SAMPLES_MAX {
            let pair = |at: usize| self.buckets.get(at).copied().unwrap_or(0.);
            self.buckets[i] = pair(2 * i) + pair(2 * i + 1);
        }
        self.width *= 2;
    }
}
