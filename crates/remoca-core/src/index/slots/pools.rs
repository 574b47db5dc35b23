//! The slots of each pool: how many are usable, which are free, and their queue.

use super::Slots;
use crate::index::chunks::Chunks;
use crate::index::layout::{LINK_WORDS, Words, of_pool, pool_word, settle};
use crate::index::queue::{FreeSlots, Queue};
use crate::index::sizing::Sizing;
use crate::index::slots::SlotCounts;
use crate::index::table::Table;
use crate::units::{PoolIndex, PoolSet};

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
    /// How much of the admissions it has to catch up with.
    credit: i64,
}

impl PoolSlots {
    pub(super) fn new(pool: PoolIndex, links: Table<LINK_WORDS>) -> Self {
        Self {
            pool,
            capacity: 0,
            queue: Queue::new(links, pool_word(pool, of_pool::QUEUE)),
            free: FreeSlots::new(links),
            used: 0,
            draining: 0,
            sizing: Sizing::new(),
            chunks: Vec::new(),
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

impl Slots {
    pub(super) fn pool(&self, pool: PoolIndex) -> &PoolSlots {
        &self.pools[usize::from(pool.0)]
    }

    pub(super) fn pool_mut(&mut self, pool: PoolIndex) -> &mut PoolSlots {
        &mut self.pools[usize::from(pool.0)]
    }

    /// Returns the pool of a slot, and the number of the slot at its server. Returns `None` if no pool has the slot.
    pub(in crate::index) fn place<M: Words>(&self, words: &M, slot: u32) -> Option<(PoolIndex, u32)> {
        self.chunks.place(words, slot)
    }

    /// Returns the pool of a slot that is free, used or draining. Returns `None` for any other slot.
    pub(super) fn pool_of<M: Words>(&self, words: &M, slot: u32) -> Option<PoolIndex> {
        let (pool, local) = self.place(words, slot)?;
        (local < self.pool(pool).capacity).then_some(pool)
    }

    /// Returns the numbers of free, used and draining slots of a pool.
    pub(in crate::index) fn pool_counts(&self, pool: PoolIndex) -> SlotCounts {
        self.pool(pool).counts()
    }

    /// Returns the number of slots of a pool that are free, used or draining.
    pub(in crate::index) fn pool_capacity(&self, pool: PoolIndex) -> u32 {
        self.pool(pool).capacity
    }

    /// Returns whether a pool has slots, or chunks for some.
    pub(in crate::index) fn has_chunks(&self, pool: PoolIndex) -> bool {
        !self.pool(pool).chunks.is_empty()
    }

    /// Returns the pool that takes the next admitted page, among `pools`: the one with most free slots or, if none is free,
    /// each in proportion to its size. So a page stays about as long in any of them as in one queue over all. Returns `None`
    /// if none of the pools has slots, or those that have are losing pages.
    pub(in crate::index) fn choose(&mut self, pools: PoolSet) -> Option<PoolIndex> {
        let takes = |it: &PoolSlots| it.capacity > 0 && pools.contains(it.pool) && !it.is_losing();
        let free = self.pools.iter().filter(|it| takes(it) && !it.needs_victim()).max_by_key(|it| it.free.count());
        if let Some(free) = free {
            return Some(free.pool);
        }
        let mut sum = 0;
        let mut best: Option<(i64, PoolIndex)> = None;
        for it in self.pools.iter_mut().filter(|it| takes(it)) {
            sum += i64::from(it.capacity);
            it.credit += i64::from(it.capacity);
            if best.is_none_or(|(credit, _)| it.credit > credit) {
                best = Some((it.credit, it.pool));
            }
        }
        let (_, pool) = best?;
        self.pool_mut(pool).credit -= sum;
        Some(pool)
    }
}
