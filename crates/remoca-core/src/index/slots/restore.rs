//! Restoring slots from another process or another region.

use super::{HIT, PAGE, PIN, PINS, Slots};
use crate::index::chunks::FreeChunks;
use crate::index::entries::{KNOWN, Key};
use crate::index::layout::{NONE, Words, header, of_pool, pool_word};
use crate::index::table::BATCH;
use crate::units::{BlockId, DiskIndex, PoolIndex};

/// Flag of a slot that the rebuild of the queue has found on it, in place of the pins, which were dropped.
const SEEN: u32 = PIN;

impl Slots {
    /// Stores the state that is kept outside the words.
    pub(in crate::index) fn close<M: Words>(&self, words: &mut M) {
        for it in &self.pools {
            words[pool_word(it.pool, of_pool::TAIL)] = it.queue.last();
            words[pool_word(it.pool, of_pool::FREE_SLOT)] = it.free.first();
            words[pool_word(it.pool, of_pool::SLOTS_USED)] = it.used;
        }
        words[header::SLOTS_KNOWN] = self.known;
    }

    /// Loads the state that is kept outside the words from the header.
    pub(in crate::index) fn take_as_closed<M: Words>(&mut self, words: &mut M) {
        self.take_chunks(words);
        for it in &mut self.pools {
            it.used = words[pool_word(it.pool, of_pool::SLOTS_USED)];
            it.queue.set_last(words[pool_word(it.pool, of_pool::TAIL)]);
            it.free.restore(words[pool_word(it.pool, of_pool::FREE_SLOT)], it.capacity - it.used);
        }
        self.known = words[header::SLOTS_KNOWN];
    }

    /// Gives the pools their chunks, and the capacity for which they have chunks. Frees all other chunks.
    fn take_chunks<M: Words>(&mut self, words: &mut M) {
        let mut owned = vec![Vec::new(); self.pools.len()];
        for chunk in 0..self.chunks.count() {
            if let Some((pool, ordinal)) = self.chunks.owner(words, chunk) {
                owned[usize::from(pool.0)].push((ordinal, chunk));
            }
        }
        let mut is_taken = vec![false; self.chunks.count() as usize];
        for (it, mut owned) in self.pools.iter_mut().zip(owned) {
            owned.sort_unstable();
            let mut capacity = words[pool_word(it.pool, of_pool::CAPACITY)];
            it.chunks.clear();
            for (ordinal, chunk) in owned {
                if ordinal as usize == it.chunks.len() && self.chunks.first(ordinal) < capacity {
                    it.chunks.push(chunk);
                    is_taken[chunk as usize] = true;
                }
            }
            let chunks = u32::try_from(it.chunks.len()).unwrap_or(0);
            capacity = capacity.min(chunks.saturating_mul(self.chunks.slots()));
            it.store_capacity(words, capacity);
            it.sizing.aim(capacity);
        }
        self.free_chunks = FreeChunks::new(self.chunks.count()..self.chunks.count());
        for chunk in (0..self.chunks.count()).rev().filter(|chunk| !is_taken[*chunk as usize]) {
            self.chunks.take(words, chunk);
            self.free_chunks.put(chunk);
        }
    }

    /// Enters the slots of the previous process in the cleared hash tables, and rebuilds queues and free lists. `disk_of`
    /// returns the number that the disk of a block has now. Drops the pins of that process.
    pub(in crate::index) fn rebuild<M: Words>(
        &mut self,
        words: &mut M,
        disk_of: impl Fn(BlockId) -> Option<DiskIndex>,
    ) {
        self.take_chunks(words);
        for slot in 0..self.limit() {
            if slot % BATCH == 0 {
                self.touch_lines(words, slot);
            }
            let high = self.take_up(words, slot, &disk_of);
            self.set_high(words, slot, high);
            if high & PAGE != 0
                && let Some(pool) = self.pool_of(words, slot)
            {
                self.pool_mut(pool).used += 1;
            }
            self.known += u32::from(high & KNOWN != 0);
        }
        PoolIndex::all().for_each(|pool| self.rebuild_queue(words, pool));
        self.add_unlinked(words);
        self.rebuild_free(words);
    }

    /// Begins to load the lines of the slots from `from` on, so that the loads overlap.
    fn touch_lines<M: Words>(&self, words: &M, from: u32) {
        let batch = from..from.saturating_add(BATCH).min(self.limit());
        batch.for_each(|slot| self.entries.touch(words, slot));
    }

    /// Enters a slot of the previous process in the hash tables, and returns what its flags should be. Page or block are
    /// dropped if another entry has the content or the block, or if there is no room.
    fn take_up<M: Words>(&self, words: &mut M, slot: u32, disk_of: impl Fn(BlockId) -> Option<DiskIndex>) -> u32 {
        let (high, content) = (self.high(words, slot), self.entries.content(words, slot));
        let is_usable = self.pool_of(words, slot).is_some();
        let page = if is_usable { high & PAGE } else { 0 };
        let block = self.entries.block(words, slot).filter(|_| page != 0 || !is_usable);
        let key = block.and_then(|block| Some(Key::of(BlockId { disk: disk_of(block)?, ..block })));
        let key = key.filter(|key| self.entries.find(words, key.block()).is_none());
        let is_taken = content == self.zero || self.entries.find_content(words, content).is_some();
        if page == 0 && key.is_none() || is_taken || !self.entries.enter_content(words, slot) {
            return 0;
        }
        match key.filter(|key| self.entries.enter_key(words, slot, *key)) {
            Some(key) => page | high & HIT | KNOWN | key.high,
            None if page != 0 => page | high & HIT,
            None => {
                self.entries.leave_content(words, slot);
                0
            }
        }
    }

    /// Rebuilds the queue of the used slots of a pool in the order of their links, as far as the links go.
    fn rebuild_queue<M: Words>(&mut self, words: &mut M, pool: PoolIndex) {
        let mut queue = self.pool(pool).queue;
        let (mut slot, mut last) = (queue.first(words), NONE);
        while slot < self.limit() {
            let high = self.high(words, slot);
            if high & SEEN != 0 {
                break;
            }
            self.set_high(words, slot, high | SEEN);
            let next = queue.after(&self.links, words, slot);
            if high & PAGE != 0 {
                if self.pool_of(words, slot) != Some(pool) {
                    self.set_high(words, slot, high);
                    break;
                }
                queue.relink(&mut self.links, words, last, slot);
                last = slot;
            }
            slot = next;
        }
        queue.relink(&mut self.links, words, last, NONE);
        self.pool_mut(pool).queue = queue;
    }

    /// Inserts the used slots that are on no queue at the head of that of their pool.
    fn add_unlinked<M: Words>(&mut self, words: &mut M) {
        for slot in 0..self.limit() {
            let high = self.high(words, slot);
            if high & (PAGE | SEEN) == PAGE
                && let Some(pool) = self.pool_of(words, slot)
            {
                let (it, links) = self.pool_and_links(pool);
                it.queue.add_first(links, words, slot);
            }
            self.set_high(words, slot, high & !SEEN);
        }
    }

    fn rebuild_free<M: Words>(&mut self, words: &mut M) {
        let (chunks, entries) = (self.chunks, self.entries);
        for it in &mut self.pools {
            it.free.clear();
            it.draining = 0;
            for slot in (0..it.capacity).map(|local| it.slot(chunks, local)).collect::<Vec<_>>() {
                if entries.high(words, slot) == 0 {
                    it.free.add_last(&mut self.links, words, slot);
                }
            }
        }
    }

    // A move to another region, where each slot keeps its number.

    /// Starts to remember which slots [`Self::follow_marks`] must copy. Until the move ends, pools get only chunks that `target`
    /// has: none if those have another size.
    pub(in crate::index) fn begin_to_be_followed(&mut self, target: &Self) {
        self.links.begin_to_follow();
        self.free_chunks.keep_below(if self.chunks.are_like(target.chunks) { target.chunks.count() } else { 0 });
    }

    /// Returns whether links or flags have changed that nobody has followed yet.
    #[inline]
    pub(in crate::index) fn have_changed(&self) -> bool {
        self.links.have_changed()
    }

    /// Removes and returns a slot whose links or flags have changed, or returns `None` if none is left.
    pub(in crate::index) fn take_changed(&mut self) -> Option<u32> {
        self.links.take_changed()
    }

    /// Makes the chunk of a slot belong to the pool that has it in the region of `old`. If chunks have another size there, no pool
    /// has any.
    pub(in crate::index) fn follow_chunk<M: Words>(&self, words: &mut M, slot: u32, old: &Self, old_words: &M) {
        if slot < self.limit() && self.chunks.are_like(old.chunks) {
            self.chunks.copy(words, self.chunks.of(slot), old.chunks, old_words);
        }
    }

    /// Makes as many pages of each pool valid as in the region of `old_words`.
    pub(in crate::index) fn follow_capacities<M: Words>(words: &mut M, old_words: &M) {
        for at in PoolIndex::all().map(|pool| pool_word(pool, of_pool::CAPACITY)) {
            words[at] = old_words[at];
        }
    }

    /// Gives a slot what the slot of this number has in the region of `old`, as far as the hash tables have room. Returns
    /// `false` if there was none for its content: then it has neither page nor block.
    pub(in crate::index) fn follow<M: Words>(&mut self, words: &mut M, slot: u32, old: &Self, old_words: &M) -> bool {
        let pool = self.release(words, slot);
        debug_assert!(pool.is_none(), "no pool has slots in a region that only follows");
        let high = old.high(old_words, slot) & !PINS;
        self.entries.set_content(words, slot, old.entries.content(old_words, slot));
        let is_live = high & (PAGE | KNOWN) != 0;
        let has_room = !is_live || self.entries.enter_content(words, slot);
        if is_live && has_room {
            let key = old.entries.key(old_words, slot);
            self.entries.set_low(words, slot, key.low);
            let is_known = high & KNOWN != 0 && self.entries.enter_key(words, slot, key);
            self.set_high(words, slot, if is_known { high } else { high & (PAGE | HIT) });
            self.known += u32::from(is_known);
        }
        self.follow_marks(words, slot, old, old_words);
        has_room
    }

    /// Gives a slot the links, the flag and the pins that the slot of this number has in the region of `old`.
    pub(in crate::index) fn follow_marks<M: Words>(&self, words: &mut M, slot: u32, old: &Self, old_words: &M) {
        self.links.copy(words, slot, &old.links, old_words);
        let (high, marks) = (self.high(words, slot), old.high(old_words, slot) & (HIT | PINS));
        let marks = if high & (PAGE | KNOWN) == 0 { marks & PINS } else { marks };
        self.set_high(words, slot, high & !(HIT | PINS) | marks);
    }

    /// Asserts that a region that follows this one has place, links, flag and pins of a slot.
    #[cfg(test)]
    pub(in crate::index) fn check_marks<M: Words>(&self, words: &M, slot: u32, other: &Self, other_words: &M) {
        let high = self.high(words, slot);
        let marks = if high & (PAGE | KNOWN) == 0 { PINS } else { HIT | PINS };
        assert_eq!(other.high(other_words, slot) & marks, high & marks, "flags of slot {slot}");
        assert_eq!(other.links.both(other_words, slot), self.links.both(words, slot), "links of slot {slot}");
        assert_eq!(other.place(other_words, slot), self.place(words, slot), "place of slot {slot}");
    }

    /// Takes over what `old` keeps outside its region, after all its slots were [followed](Self::follow).
    pub(in crate::index) fn finish_from(&mut self, old: &mut Self) {
        self.pools = std::mem::take(&mut old.pools);
        if self.chunks.are_like(old.chunks) {
            self.free_chunks = std::mem::replace(&mut old.free_chunks, FreeChunks::new(0..0));
            self.free_chunks.fit_to(self.chunks.count());
        }
        self.pins = old.pins;
    }
}
