//! Changes in the number of usable slots of a pool. They are made slot by slot at the end of the pool, a few in each turn,
//! because a large cache has millions of slots.
//!
//! [`Slots::aim`] and [`Slots::lose_from`] set the target, and [`Slots::step`] does a part of the work. The table is
//! consistent after each of these calls, so other events may come in between: another target, a lost connection, a
//! close.
//! 1. The free slots below the capacity are doubly linked, so that any of them can be cut off.
//! 2. Pages of slots beyond the capacity mean nothing. Their blocks stay known, and their pins count. The hash tables name
//!    these slots until they are emptied, before they are added again.
//! 3. Look-ups do not find lost pages (`sizing.rs`), which are released as the capacity falls. Until then, the capacity
//!    in the header is the number of slots that keep their page, so that a successor does not find lost pages either.
//! 4. Chunks beyond the capacity are given back from the last one on, up to one in which a slot is pinned. They wait for its last
//!    pin. A pool that grows uses those that it still has.

use super::{HIT, KNOWN, PAGE, PINS, Slots};
use crate::index::layout::{NONE, Words, settle};
use crate::units::PoolIndex;

/// Result of one step of a change of the capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) enum Step {
    /// Nothing is left to do.
    Done,
    /// One slot was examined; others may follow.
    Taken,
    /// The caller must discard the page of this slot, because there is no room for all pages.
    Discard(u32),
    /// The caller must empty the last slot, and then call [`Slots::cut_off`].
    CutOff(u32),
    /// The caller must empty the slot after the last one, and then call [`Slots::add`].
    Add(u32),
    /// The caller must move the page of the last slot `from` to the slot `to`, which was taken for it, with
    /// [`Slots::end_move`].
    Move { from: u32, to: u32 },
    /// The last chunk, which begins with the slot `first`, was given back, unless a slot in it is pinned. So many slots were
    /// examined.
    GiveBack { first: u32, examined: u32 },
}

impl Slots {
    /// Drops the content of all slots. They become usable again as [`Self::step`] processes them.
    pub(in crate::index) fn clear<M: Words>(&mut self, words: &mut M) {
        PoolIndex::all().for_each(|pool| self.clear_pool(words, pool));
    }

    /// Drops the content of all slots of a pool. They become usable again as [`Self::step`] processes them.
    pub(in crate::index) fn clear_pool<M: Words>(&mut self, words: &mut M, pool: PoolIndex) {
        let it = self.pool_mut(pool);
        if it.used == 0 {
            return;
        }
        it.sizing.begin_again();
        it.store_capacity(words, 0);
        settle();
        it.queue.clear(words);
        it.free.clear();
        (it.used, it.draining) = (0, 0);
        it.may_give_back = true;
    }

    /// Returns whether the next step for a pool is to give back its last chunk: neither its present nor its wanted capacity needs
    /// it, and no slot in it is known to be pinned.
    fn gives_back(&self, pool: PoolIndex) -> bool {
        let it = self.pool(pool);
        it.may_give_back && it.chunks.len() > self.chunks.needed(it.capacity.max(it.sizing.wanted()))
    }

    /// Gives back the last chunk of a pool, unless a slot in it is pinned. While a request for a slot is outstanding, the pool must
    /// not get its number for another slot.
    fn give_back<M: Words>(&mut self, words: &mut M, pool: PoolIndex) -> Step {
        let Some(chunk) = self.pool(pool).chunks.last().copied() else { return Step::Done };
        let (first, slots) = (self.chunks.first(chunk), self.chunks.slots());
        let examined = if self.are_pinned() { slots } else { 0 };
        if (first..first + examined).any(|slot| self.high(words, slot) & PINS != 0) {
            self.pool_mut(pool).may_give_back = false;
        } else {
            self.pool_mut(pool).chunks.pop();
            settle();
            self.chunks.take(words, chunk);
            self.free_chunks.put(chunk);
        }
        Step::GiveBack { first, examined: examined.max(1) }
    }

    /// Sets the capacity of a pool that [`Self::step`] works towards, as far as there are chunks, also in a larger region later.
    pub(in crate::index) fn aim(&mut self, pool: PoolIndex, capacity: u32) {
        self.pool_mut(pool).sizing.aim(capacity);
    }

    /// Marks the pages of all slots of a pool from `slots` on as lost.
    pub(in crate::index) fn lose_from<M: Words>(&mut self, words: &mut M, pool: PoolIndex, slots: u32) {
        let it = self.pool_mut(pool);
        if slots < it.sizing.kept_of(it.capacity) {
            it.sizing.lose_from(slots);
            it.store_capacity(words, it.capacity);
        }
    }

    /// Returns whether slots of any pool below its capacity have lost their page.
    pub(in crate::index) fn are_losing(&self) -> bool {
        self.pools.iter().any(|pool| pool.is_losing())
    }

    /// Returns whether [`Self::step`] has work left in a pool. A pool that cannot grow for want of chunks has none.
    pub(in crate::index) fn is_resizing(&self, pool: PoolIndex) -> bool {
        let it = self.pool(pool);
        let wanted = it.sizing.wanted();
        it.is_losing() || it.capacity > wanted || it.capacity < wanted && self.has_room(pool) || self.gives_back(pool)
    }

    /// Returns whether a pool is changing its capacity, or still has to give back chunks beyond it.
    pub(in crate::index) fn is_settling(&self, pool: PoolIndex) -> bool {
        let it = self.pool(pool);
        self.is_resizing(pool) || it.chunks.len() > self.chunks.needed(it.capacity)
    }

    /// Returns the number of chunks that no pool has.
    pub(in crate::index) fn free_chunks(&self) -> usize {
        self.free_chunks.count()
    }

    /// Returns the number of chunks up to the last one that a pool has.
    pub(in crate::index) fn chunks_needed(&self) -> u32 {
        self.pools.iter().flat_map(|pool| &pool.chunks).max().map_or(0, |last| last + 1)
    }

    /// Returns whether a pool has, or could get, the chunk of the slot after its last one.
    fn has_room(&self, pool: PoolIndex) -> bool {
        let it = self.pool(pool);
        self.chunks.of(it.capacity) < u32::try_from(it.chunks.len()).unwrap_or(0) || !self.free_chunks.are_none()
    }

    /// Works towards the wanted capacity of a pool by examining one slot. Returns the work that is left to the caller.
    pub(in crate::index) fn step<M: Words>(&mut self, words: &mut M, pool: PoolIndex) -> Step {
        let it = self.pool(pool);
        let wanted = it.sizing.wanted();
        if self.gives_back(pool) {
            self.give_back(words, pool)
        } else if it.is_losing() {
            Step::CutOff(it.slot(self.chunks, it.capacity - 1))
        } else if it.capacity > wanted {
            self.shrink_some(words, pool)
        } else if it.capacity < wanted && self.has_room(pool) {
            self.take_chunk(words, pool);
            let it = self.pool(pool);
            Step::Add(it.slot(self.chunks, it.capacity))
        } else {
            Step::Done
        }
    }

    /// Gives a pool a chunk for the slot after its last one, if it has none.
    fn take_chunk<M: Words>(&mut self, words: &mut M, pool: PoolIndex) {
        let it = &mut self.pools[usize::from(pool.0)];
        let ordinal = self.chunks.of(it.capacity);
        if ordinal as usize == it.chunks.len()
            && let Some(chunk) = self.free_chunks.take()
        {
            self.chunks.give(words, chunk, pool, ordinal);
            it.chunks.push(chunk);
            settle();
        }
    }

    fn shrink_some<M: Words>(&mut self, words: &mut M, pool: PoolIndex) -> Step {
        let (chunks, entries) = (self.chunks, self.entries);
        let (it, links) = self.pool_and_links(pool);
        if it.used > it.sizing.wanted() {
            return Step::Discard(it.queue.first(words));
        }
        let last = it.slot(chunks, it.capacity - 1);
        let high = entries.high(words, last);
        let first = match it.free.first() {
            NONE => NONE,
            first => chunks.place(words, first).map_or(NONE, |(_, local)| local),
        };
        if high & PAGE != 0 && high & PINS == 0 && it.sizing.may_find_spare(first) {
            let table = &it.chunks;
            let slot = |local| chunks.first(table[chunks.of(local) as usize]) | chunks.position(local);
            let Some(to) = it.sizing.next_spare(first, |local| entries.high(words, slot(local)) == 0) else {
                return Step::Taken;
            };
            let to = it.slot(chunks, to);
            it.free.remove(links, words, to);
            return Step::Move { from: last, to };
        }
        Step::CutOff(last)
    }

    /// Moves the page and the block of the last slot `from` of a pool to `to`, at the same position in the queue, and cuts
    /// off `from`.
    pub(in crate::index) fn end_move<M: Words>(&mut self, words: &mut M, pool: PoolIndex, from: u32, to: u32) {
        let hit = self.high(words, from) & HIT;
        let previous = self.pool(pool).queue.before(&self.links, words, from);
        self.hand_over(words, from, pool, to, hit);
        let (it, links) = self.pool_and_links(pool);
        match previous {
            NONE => it.queue.add_first(links, words, to),
            previous => it.queue.add_after(links, words, previous, to),
        }
        self.cut_off(words, pool, from);
    }

    /// Moves the page and the block of `from` to `to`, which was taken for them in another `pool`, of which it becomes the newest
    /// page. `from` is free then.
    pub(in crate::index) fn demote<M: Words>(&mut self, words: &mut M, from: u32, pool: PoolIndex, to: u32) {
        self.hand_over(words, from, pool, to, 0);
        let (it, links) = self.pool_and_links(pool);
        it.queue.add_last(links, words, to);
    }

    /// Moves the page and the block of `from` to `to`, a slot of `pool` that is on no queue yet.
    fn hand_over<M: Words>(&mut self, words: &mut M, from: u32, pool: PoolIndex, to: u32, hit: u32) {
        let (key, high) = (self.entries.key(words, from), self.high(words, from));
        let (key, content) = ((high & KNOWN != 0).then_some(key), self.entries.content(words, from));
        if let Some(former) = self.let_go(words, from) {
            self.put_back(words, former, from);
        }
        self.entries.set_content(words, to, content);
        self.entries.hand_over_content(words, from, to);
        if let Some(key) = key {
            self.entries.hand_over_key(words, key, from, to);
        }
        self.validate(words, pool, to, key, hit);
    }

    /// Cuts off the last slot of a pool, which is free or draining. After the first slot of its chunk, the chunk can be given back.
    pub(in crate::index) fn cut_off<M: Words>(&mut self, words: &mut M, pool: PoolIndex, last: u32) {
        let (chunks, is_free) = (self.chunks, self.high(words, last) == 0);
        let (it, links) = self.pool_and_links(pool);
        if is_free {
            it.free.remove(links, words, last);
        } else {
            it.draining -= 1;
        }
        it.store_capacity(words, it.capacity - 1);
        if !it.is_losing() {
            it.sizing.end_loss();
        }
        if chunks.position(last) == 0 {
            it.may_give_back = true;
        }
    }

    /// Adds the slot after the last one of a pool, which is empty.
    pub(in crate::index) fn add<M: Words>(&mut self, words: &mut M, pool: PoolIndex, slot: u32) {
        let is_pinned = self.high(words, slot) & PINS != 0;
        let (it, links) = self.pool_and_links(pool);
        it.store_capacity(words, it.capacity + 1);
        if is_pinned {
            it.draining += 1;
        } else {
            it.free.add_last(links, words, slot);
        }
    }
}
