//! The slots of one pool: how many are usable, which are free, and their queue.

use crate::index::chunks::Chunks;
use crate::index::layout::{Words, of_pool, pool_word, settle};
use crate::index::queue::{FreeSlots, Queue};
use crate::index::sizing::Sizing;
use crate::units::PoolIndex;

/// Numbers of slots by state, whose sum is the capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotCounts {
    pub free: u32,
    pub used: u32,
    pub draining: u32,
}

/// State of a pool's slots that is kept outside the words. Numbers of slots in it are those of the index.
#[derive(Debug)]
pub(super) struct PoolSlots {
    pub(super) pool: PoolIndex,
    pub(super) capacity: u32,
    pub(super) queue: Queue,
    pub(super) free: FreeSlots,
    pub(super) used: u32,
    pub(super) draining: u32,
    pub(super) sizing: Sizing,
    /// Its chunks, in the order of its own numbers of slots.
    pub(super) chunks: Vec<u32>,
    /// Whether the last chunk can be given back when it is beyond the capacity: no slot in it was found pinned.
    pub(super) may_give_back: bool,
    /// How much of the admissions it has to catch up with.
    pub(super) credit: i64,
}

impl PoolSlots {
    pub(super) fn new(pool: PoolIndex) -> Self {
        Self {
            pool,
            capacity: 0,
            queue: Queue::new(pool_word(pool, of_pool::QUEUE)),
            free: FreeSlots::new(),
            used: 0,
            draining: 0,
            sizing: Sizing::new(),
            chunks: Vec::new(),
            may_give_back: false,
            credit: 0,
        }
    }

    pub(super) fn counts(&self) -> SlotCounts {
        SlotCounts { free: self.free.count(), used: self.used, draining: self.draining }
    }

    /// Returns whether a slot must be emptied before one can be taken.
    pub(super) fn needs_victim(&self) -> bool {
        self.free.count() == 0 || self.used >= self.sizing.wanted()
    }

    /// Returns whether slots below the capacity have lost their page.
    pub(super) fn is_losing(&self) -> bool {
        self.sizing.kept_of(self.capacity) < self.capacity
    }

    /// Returns the number in the index of a slot of the pool.
    pub(super) fn slot(&self, chunks: Chunks, local: u32) -> u32 {
        chunks.first(self.chunks[chunks.of(local) as usize]) | chunks.position(local)
    }

    pub(super) fn store_capacity<M: Words>(&mut self, words: &mut M, capacity: u32) {
        settle();
        self.capacity = capacity;
        words[pool_word(self.pool, of_pool::CAPACITY)] = self.sizing.kept_of(capacity);
    }
}
