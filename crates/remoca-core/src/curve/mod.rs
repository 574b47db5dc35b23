//! Miss-ratio curve: which share of a guest's reads a cache of each size would miss, from a sample of bounded memory.
//!
//! **What it predicts.** The stream is that of an exclusive cache (papers/hypervisor-exclusive-cache.txt, section 3): reads, which the
//! guest's page cache did not answer, and evictions from it. Evicted blocks form a queue; a read takes its block out of it,
//! because the guest then holds it. The *stack distance* of a read is the position of its block from the newest end: an exclusive LRU
//! cache of `size` blocks hits exactly the reads of at most that distance. If the guest holds X pages in LRU order, the distance in
//! its whole memory is X more, so the curve at `size` is also that of a guest with X + `size` pages and no cache. What X alone
//! answers is not in the stream: sizes below X, and the number of those hits, are not known. They become visible when a balloon
//! takes memory from the guest into the cache. Where no eviction is seen, the caller reports each block as evicted right after its
//! read: the curve is then that of an LRU cache into which reads are admitted.
//!
//! **How.** Fixed-size spatial sampling (SHARDS; Waldspurger et al., FAST 2015): blocks of a priority below a threshold are followed,
//! and the threshold falls when they become too many. One sampled block stands for 1 / rate blocks, at the rate of each event.
//! 1. While at most [`SAMPLES_MAX`] blocks were in the queue at once, every block is sampled, and the curve is exact.
//! 2. The curve never increases with the size.
//! 3. What it says holds up to [`MissRatioCurve::reach`]: each block that is not in the queue is deeper. Beyond that it is flat.
//!
//! Evictions may be seen only in part: one of N at random. An evicted block that is seen then stands for N times as many, and so does a
//! read that finds it ([`MissRatioCurve::see_one_of`]). Where it is always the same pages that are seen, those of one class of N, N times as many
//! blocks are sampled, so that no fewer are followed ([`MissRatioCurve::see_class_of`]).
//!
//! `priority.rs` samples, `queue.rs` has the sampled blocks, `histogram.rs` their distances, `bytes.rs` what survives a restart,
//! `window.rs` the forecasts. Decision 0038.

mod bytes;
mod histogram;
mod priority;
mod queue;
#[cfg(test)]
mod tests;
mod window;

use crate::units::{BlockId, BlockNumber, DiskIndex, PageCount};
use histogram::Histogram;
use priority::Priorities;
use queue::{Place, Queue};
use std::ops::Range;

pub use bytes::Unreadable;
pub use queue::SAMPLES_MAX;
pub use window::{Forecasts, Windows};

/// Share of their weight that reads should keep from window to window ([`MissRatioCurve::age`]): close to the best forecasts, and still
/// a curve where a window has few reads (decision 0038).
pub const WINDOW_KEPT: f64 = 0.25;
/// Reach of the curve of a VM whose cache is smaller: 64 GiB.
pub const REACH_MIN: PageCount = PageCount(1 << 24);
/// Size of the largest cache: 4 TiB.
pub const REACH_MAX: PageCount = PageCount(1 << 30);
/// Maximum number of evictions for each one that is seen.
pub const ONE_OF_MAX: u32 = 1024;
/// Number of blocks of a range from which on it is quicker to look at every sampled block.
const WIDE_RANGE: u64 = 32_768;

/// What happened to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The guest has read it.
    Read,
    /// The guest has read it, and counts as evicting it at once.
    ReadAndEvicted,
    /// The guest has evicted it.
    Evicted,
    /// It was overwritten or discarded.
    Discarded,
}

/// Priority of a block: the lowest are followed. All curves with the same key give a block the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Priority(u64);

/// Estimator of the miss-ratio curve of one disk, or of all disks of a VM.
#[derive(Clone)]
pub struct MissRatioCurve {
    priorities: Priorities,
    /// Blocks with a lower priority are sampled.
    threshold: u64,
    queue: Queue,
    histogram: Histogram,
    /// Blocks that are deeper are forgotten.
    reach: PageCount,
    /// Size up to which no block is missing, whatever is in the queue; infinite while none was forgotten.
    complete: f64,
    /// Number of evictions for each one that is seen, 1 to [`ONE_OF_MAX`].
    one_of: u32,
    /// Threshold to return to, while only one class of pages is seen.
    raised_from: Option<u64>,
    /// Sample to which the older blocks of the queue belong.
    older: Sample,
}

/// A way to choose the blocks that are followed: those below a threshold of which an eviction is seen.
#[derive(Clone, Copy, Debug)]
struct Sample {
    threshold: u64,
    one_of: u32,
}

impl Sample {
    const ALL: Self = Self { threshold: priority::ALL, one_of: 1 };

    /// Returns the share of the blocks that is below the threshold.
    fn rate(self) -> f64 {
        self.threshold as f64 / priority::ALL as f64
    }

    /// Returns the number of blocks, and of their reads, that one in the queue stands for.
    fn weight(self) -> f64 {
        f64::from(self.one_of) / self.rate()
    }
}

impl MissRatioCurve {
    /// Returns a curve without reads. `key` must be random and stay secret: it decides which blocks are sampled. Blocks deeper than
    /// `reach` are forgotten: a smaller reach keeps the rate of sampling higher.
    #[must_use]
    pub fn new(key: &[u8; 16], reach: PageCount) -> Self {
        let (queue, histogram) = (Queue::new(), Histogram::new());
        let priorities = Priorities::new(key);
        let (threshold, one_of, raised_from, older) = (priority::ALL, 1, None, Sample::ALL);
        let complete = f64::INFINITY;
        Self { priorities, threshold, queue, histogram, reach, complete, one_of, raised_from, older }
    }

    /// Notes that blocks may have been evicted before the curve begins.
    pub fn begin_late(&mut self) {
        self.complete = 0.;
    }

    /// Follows blocks down to `reach` from now on, if that is deeper than before. Blocks that were forgotten are not known to be in reach
    /// until the queue is deep enough without them.
    pub fn grow_reach(&mut self, reach: PageCount) {
        self.reach = self.reach.max(reach);
    }

    /// Returns the size up to which the curve says something.
    #[must_use]
    pub fn reach(&self) -> PageCount {
        let known = self.complete.max(self.depth()).min(self.reach.0.into());
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to the reach")]
        PageCount(known as u32)
    }

    /// Counts a read of `block` and takes it out of the queue.
    #[inline]
    pub fn read(&mut self, block: BlockId) {
        self.count_reads(1);
        self.note(EventKind::Read, block);
    }

    /// Counts a read of `block`, which the guest evicts at once.
    #[inline]
    pub fn read_and_evicted(&mut self, block: BlockId) {
        self.count_reads(1);
        self.note(EventKind::ReadAndEvicted, block);
    }

    /// Returns whether every block would be followed and none is: all that is read now is beyond every size.
    #[inline]
    #[must_use]
    pub fn follows_nothing(&self) -> bool {
        self.queue.is_empty() && self.limit() == Priority(priority::ALL)
    }

    /// Returns the priority below which blocks may be followed.
    #[inline]
    #[must_use]
    pub fn limit(&self) -> Priority {
        Priority(if self.queue.older() > 0 { self.threshold.max(self.older.threshold) } else { self.threshold })
    }

    /// Returns whether it is known at once that the priority of `block` is not below `limit`. [`Self::find`] tells of the others.
    #[inline]
    #[must_use]
    pub fn leaves_out(&self, block: BlockId, limit: Priority) -> bool {
        self.priorities.leaves_out(priority::name(block), limit.0)
    }

    /// Returns the priority of `block`, or `None` if it is not below `limit`.
    pub fn find(&mut self, block: BlockId, limit: Priority) -> Option<Priority> {
        self.priorities.find(priority::name(block), limit.0).map(Priority)
    }

    /// Counts reads of `blocks` blocks. [`Self::take`] is told of those that may be followed.
    #[inline]
    pub fn count_reads(&mut self, blocks: u64) {
        self.histogram.reads += to_f64(blocks);
    }

    /// Counts reads of `blocks` blocks that no cache answers, whatever its size.
    #[inline]
    pub fn missed(&mut self, blocks: u64) {
        self.count_reads(blocks);
        self.histogram.beyond += to_f64(blocks);
    }

    /// Takes what happened to the block of this priority, if it may be followed. A read must be counted beside
    /// ([`Self::count_reads`]).
    #[inline]
    pub fn take(&mut self, kind: EventKind, priority: Priority) {
        if priority >= self.limit() {
            return;
        }
        let Priority(priority) = priority;
        match kind {
            EventKind::Read => self.note_read(priority),
            EventKind::Discarded => self.queue.forget(priority),
            EventKind::Evicted => self.put(priority),
            EventKind::ReadAndEvicted => match self.queue.renew(priority) {
                Some(rank) => self.note_found(priority, Place { rank, newer: None }),
                None => {
                    self.note_read(priority);
                    self.put(priority);
                }
            },
        }
    }

    fn note(&mut self, kind: EventKind, block: BlockId) {
        let limit = self.limit();
        if !self.leaves_out(block, limit)
            && let Some(priority) = self.find(block, limit)
        {
            self.take(kind, priority);
        }
    }

    /// Makes `block` the newest of the queue: the guest has evicted it.
    #[inline]
    pub fn evicted(&mut self, block: BlockId) {
        self.note(EventKind::Evicted, block);
    }

    /// Takes `block` out of the queue: its content was overwritten or discarded, so no cache has it.
    #[inline]
    pub fn discarded(&mut self, block: BlockId) {
        self.note(EventKind::Discarded, block);
    }

    /// Takes these blocks of a disk out of the queue. A wide range takes as long as 32,768 blocks.
    pub fn discarded_range(&mut self, disk: DiskIndex, blocks: Range<u64>) {
        if blocks.end.saturating_sub(blocks.start) <= WIDE_RANGE {
            return blocks.for_each(|bno| self.discarded(BlockId { disk, bno: BlockNumber(bno) }));
        }
        let is_inside = |block: BlockId| block.disk == disk && blocks.contains(&block.bno.0);
        self.queue.retain(|priority| !is_inside(self.priorities.block(priority)));
    }

    /// Returns whether a block is in the sample now.
    #[inline]
    #[must_use]
    pub fn samples(&mut self, block: BlockId) -> bool {
        self.find(block, Priority(self.threshold)).is_some()
    }

    /// Lowers the share of the blocks that is sampled to at most `rate`, for the rest of the curve's life.
    pub fn limit_rate(&mut self, rate: f64) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "within the bounds of the threshold"
        )]
        let threshold = (rate.clamp(0., 1.) * priority::ALL as f64) as u64;
        if Priority(threshold) < self.limit() {
            self.lower(threshold.max(1));
            self.queue.retain(|priority| priority < threshold.max(1));
        }
    }

    /// Lowers all thresholds to at most `threshold`.
    fn lower(&mut self, threshold: u64) {
        self.threshold = self.threshold.min(threshold);
        self.older.threshold = self.older.threshold.min(threshold);
        // Up to half of a queue that is too full is of the older sample, so this says nothing of the rate at which all pages are seen again.
        self.raised_from = self.raised_from.map(|from| from.min(self.threshold));
    }

    fn sample(&self) -> Sample {
        Sample { threshold: self.threshold, one_of: self.one_of }
    }

    /// Sets that only the evictions of one class of pages of `classes` are seen, always the same ones; with 1 all are seen again. What the caller
    /// says of them must not depend on this curve. `classes` times as many blocks are sampled, as far as there are so many. Blocks that are in the
    /// queue stay there, and stand for as many blocks as before.
    pub fn see_class_of(&mut self, classes: u32) {
        let classes = classes.clamp(1, ONE_OF_MAX);
        if classes == self.classes() {
            return;
        }
        if self.raised_from.is_none() && self.one_of > 1 {
            self.see_one_of(1);
        }
        if self.queue.older() > 0 {
            if self.returns_to_class(classes) {
                return;
            }
            self.note_lost();
        }
        self.queue.begin_sample();
        self.older = self.sample();
        let base = self.raised_from.take().unwrap_or(self.threshold);
        self.one_of = classes;
        self.threshold = raised(base, classes);
        self.raised_from = (classes > 1).then_some(base);
    }

    /// Goes on with the older sample if it is of one class of `classes`, and all pages were seen for a while. Of the blocks of that while as many
    /// stay as make each stand for as many others as those of the class do. Returns whether it goes on.
    fn returns_to_class(&mut self, classes: u32) -> bool {
        let Sample { threshold, one_of } = self.older;
        // A class of which fewer blocks are followed than half of what may be begins anew.
        let goes_on =
            self.raised_from.is_none() && one_of == classes && threshold >= raised(self.threshold, classes) / 2;
        if goes_on {
            self.queue.join(threshold / u64::from(classes));
            self.raised_from = Some(self.threshold.min(threshold));
            (self.threshold, self.one_of) = (threshold, classes);
        }
        goes_on
    }

    /// Sets how many evictions there are for each one that is seen, at random. The queue is thinned out to the same share. If more are
    /// seen than before it is emptied: its distances would be too small.
    pub fn see_one_of(&mut self, one_of: u32) {
        let one_of = one_of.clamp(1, ONE_OF_MAX);
        self.see_class_of(1);
        if one_of == self.one_of {
            return;
        }
        self.note_lost();
        self.queue.forget_older();
        let (was, now) = (u64::from(self.one_of), u64::from(one_of));
        // Drawn anew each time, whatever decides whether a block is sampled.
        let mix = |word: u64| (word ^ word >> 29).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let drawn = |priority: u64| mix(mix(mix(priority ^ now << 56))) >> 32;
        self.queue.retain(|priority| now > was && drawn(priority) * now < was << 32);
        self.one_of = one_of;
    }

    /// Begins a window: the reads so far count `kept` times as much as before.
    ///
    /// # Panics
    /// If `kept` is not from 0 to 1.
    pub fn age(&mut self, kept: f64) {
        assert!((0. ..=1.).contains(&kept));
        self.histogram.age(kept);
    }

    /// Returns the share of the blocks that is sampled, above 0 and at most 1.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.sample().rate()
    }

    /// Returns the number of blocks in the queue that are followed.
    #[must_use]
    pub fn followed(&self) -> usize {
        self.queue.len()
    }

    /// Returns how many evictions there are for each one that is seen.
    #[must_use]
    pub fn one_of(&self) -> u32 {
        self.one_of
    }

    /// Returns the number of classes of pages of which the evictions of one are seen; 1 if it is not always the same pages, or all.
    #[must_use]
    pub fn classes(&self) -> u32 {
        if self.raised_from.is_some() { self.one_of } else { 1 }
    }

    /// Returns the standard error that a miss ratio of this curve has by sampling, as if the followed blocks were drawn at random and
    /// read equally often. It is 0 while every block is followed.
    #[must_use]
    pub fn standard_error(&self, miss_ratio: f64) -> f64 {
        if self.threshold == priority::ALL && self.one_of == 1 && self.queue.older() == 0 {
            return 0.;
        }
        (miss_ratio * (1. - miss_ratio) / (self.queue.len() as f64).max(1.)).sqrt()
    }

    /// Returns the number of reads that the curve is made of. Reads before a window count less; see [`Self::age`].
    #[must_use]
    pub fn reads(&self) -> f64 {
        self.histogram.reads
    }

    /// Returns the bytes that the curve takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.priorities.bytes() + self.queue.bytes() + self.histogram.bytes()
    }

    /// Returns the share of the reads that a cache of `size` blocks would miss, or `None` if nothing was read.
    #[must_use]
    pub fn miss_ratio(&self, size: PageCount) -> Option<f64> {
        self.miss_ratios([size]).map(|ratios| ratios[0])
    }

    /// Returns the miss ratio at each of `sizes`, which must not decrease, or `None` if nothing was read. The ratios never increase.
    #[must_use]
    pub fn miss_ratios(&self, sizes: impl IntoIterator<Item = PageCount>) -> Option<Vec<f64>> {
        let ratios = self.histogram.miss_ratios(sizes.into_iter().map(|size| size.0.into()));
        (self.histogram.reads > 0.).then(|| ratios.collect())
    }

    /// Notes a read of a sampled block and takes it out of the queue.
    fn note_read(&mut self, priority: u64) {
        match self.queue.take(priority) {
            Some(place) => self.note_found(priority, place),
            None => self.histogram.beyond += self.looked_for(priority),
        }
    }

    /// Notes a read of a sampled block that was at this place in the queue.
    fn note_found(&mut self, priority: u64, Place { rank, newer }: Place) {
        let present = self.sample().weight();
        // The middle of the blocks that the sampled block stands for.
        let rank = rank as f64 - 0.5;
        let (distance, weight) = match newer {
            None => (rank * present, present),
            Some(newer) => {
                let older = self.older.weight();
                (newer as f64 * present + rank * older, older)
            }
        };
        self.histogram.note(distance, weight);
        // Where evictions of most blocks are not seen, the others that it stands for were looked for and not found.
        self.histogram.beyond += self.looked_for(priority) - weight;
    }

    /// Returns the number of reads that one of a block of this priority stands for, found or not.
    fn looked_for(&self, priority: u64) -> f64 {
        if priority < self.threshold { 1. / self.rate() } else { 0. }
    }

    /// Makes a block the newest of the queue, if it is in the present sample.
    fn put(&mut self, priority: u64) {
        if priority >= self.threshold {
            return;
        }
        if self.queue.len() == SAMPLES_MAX {
            self.queue.forget(priority);
        }
        if self.queue.len() == SAMPLES_MAX {
            self.thin();
        }
        if priority < self.threshold {
            self.queue.put(priority);
        }
        if self.depth() > f64::from(self.reach.0) {
            self.queue.forget_oldest();
            self.complete = self.reach.0.into();
        }
    }

    /// Follows fewer blocks of a queue that is full: of the older sample alone while most are of it, so that the present one keeps its rate.
    fn thin(&mut self) {
        if self.queue.older() > SAMPLES_MAX / 2 {
            self.older.threshold = self.queue.thin_older();
        } else {
            let threshold = self.queue.thin();
            self.lower(threshold);
        }
    }

    /// Notes that blocks leave the queue because what is seen changes. Up to 64 GiB the curve is believed as before.
    fn note_lost(&mut self) {
        self.complete = self.complete.min(REACH_MIN.0.into());
    }

    /// Returns the number of blocks that those in the queue stand for.
    fn depth(&self) -> f64 {
        let older = self.queue.older();
        (self.queue.len() - older) as f64 * self.sample().weight() + older as f64 * self.older.weight()
    }
}

/// Returns a number as one with a fraction. Small ones take one instruction, others ten.
#[inline]
fn to_f64(number: u64) -> f64 {
    u32::try_from(number).map_or(number as f64, f64::from)
}

/// Returns the threshold of `classes` times as many blocks, as far as there are so many.
fn raised(threshold: u64, classes: u32) -> u64 {
    threshold.saturating_mul(classes.into()).min(priority::ALL)
}
