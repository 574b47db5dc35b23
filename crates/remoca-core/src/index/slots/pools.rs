//! The slots of all pools: which pool has a slot, and which takes the next admitted page.

use super::Slots;
use super::pool_slots::{PoolSlots, SlotCounts};
use crate::index::layout::Words;
use crate::index::queue::Links;
use crate::units::{PoolIndex, PoolSet};

impl Slots {
    #[inline]
    pub(super) fn pool(&self, pool: PoolIndex) -> &PoolSlots {
        &self.pools[usize::from(pool.0)]
    }

    #[inline]
    pub(super) fn pool_mut(&mut self, pool: PoolIndex) -> &mut PoolSlots {
        &mut self.pools[usize::from(pool.0)]
    }

    #[inline]
    pub(super) fn pool_and_links(&mut self, pool: PoolIndex) -> (&mut PoolSlots, &mut Links) {
        (&mut self.pools[usize::from(pool.0)], &mut self.links)
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

    /// Returns the number of slots of a pool that have not lost their page.
    pub(in crate::index) fn pool_kept(&self, pool: PoolIndex) -> u32 {
        let it = self.pool(pool);
        it.sizing.kept_of(it.capacity)
    }

    /// Returns whether any pool has slots, or chunks for some.
    pub(in crate::index) fn have_chunks(&self) -> bool {
        PoolIndex::all().any(|pool| self.has_chunks(pool))
    }

    /// Returns whether a pool has slots, or chunks for some.
    pub(in crate::index) fn has_chunks(&self, pool: PoolIndex) -> bool {
        !self.pool(pool).chunks.is_empty()
    }

    /// Returns the pool that takes the next admitted page, among `pools`: the one with most free slots or, if none is free,
    /// each in proportion to its size. So a page stays about as long in any of them as in one queue over all. Returns `None`
    /// if none of the pools has slots, or those that have are losing pages.
    pub(in crate::index) fn choose(&mut self, pools: PoolSet) -> Option<PoolIndex> {
        let takes = |pool: &PoolIndex| {
            let it = self.pool(*pool);
            it.capacity > 0 && !it.is_losing()
        };
        let taking: PoolSet = pools.iter().filter(takes).collect();
        if let Some(pool) = taking.only() {
            // It takes all, so that it has nothing to catch up with.
            return Some(pool);
        }
        let has_free = |pool: &PoolIndex| !self.pool(*pool).needs_victim();
        let free = taking.iter().filter(has_free).max_by_key(|pool| self.pool(*pool).free.count());
        if free.is_some() {
            return free;
        }
        let mut sum = 0;
        let mut best: Option<(i64, PoolIndex)> = None;
        for pool in taking.iter() {
            let it = self.pool_mut(pool);
            sum += i64::from(it.capacity);
            it.credit += i64::from(it.capacity);
            if best.is_none_or(|(credit, _)| it.credit > credit) {
                best = Some((it.credit, pool));
            }
        }
        let (_, pool) = best?;
        self.pool_mut(pool).credit -= sum;
        Some(pool)
    }
}
