//! Restoring slots from another process or another region.

use super::{HIT, PAGE, PIN, PINS, Slots};
use crate::index::entries::{KNOWN, Key};
use crate::index::layout::{NONE, Words, header};
use crate::index::table::BATCH;
use crate::units::{BlockId, DiskIndex};
use std::hint::black_box;

/// Flag of a slot that the rebuild of the queue has found on it, in place of the pins, which were dropped.
const SEEN: u32 = PIN;

impl Slots {
    /// Stores the state that is kept outside the words.
    pub(in crate::index) fn close<M: Words>(&self, words: &mut M) {
        words[header::TAIL] = self.queue.last();
        words[header::FREE_SLOT] = self.free.first();
        words[header::SLOTS_USED] = self.used;
        words[header::SLOTS_KNOWN] = self.known;
    }

    /// Loads the state that is kept outside the words from the header.
    pub(in crate::index) fn take_as_closed<M: Words>(&mut self, words: &M) {
        self.capacity = words[header::CAPACITY];
        self.sizing.aim(self.capacity);
        self.used = words[header::SLOTS_USED];
        self.known = words[header::SLOTS_KNOWN];
        self.queue.set_last(words[header::TAIL]);
        self.free.restore(words[header::FREE_SLOT], self.capacity - self.used);
    }

    /// Enters the slots of the previous process in the cleared hash tables, and rebuilds queue and free list. `disk_of`
    /// returns the number that the disk of a block has now. Drops the pins of that process.
    pub(in crate::index) fn rebuild<M: Words>(
        &mut self,
        words: &mut M,
        disk_of: impl Fn(BlockId) -> Option<DiskIndex>,
    ) {
        let capacity = words[header::CAPACITY].min(self.limit);
        self.store_capacity(words, capacity);
        self.sizing.aim(capacity);
        for slot in 0..self.limit {
            if slot % BATCH == 0 {
                self.touch_lines(words, slot);
            }
            let high = self.take_up(words, slot, &disk_of);
            self.set_high(words, slot, high);
            self.used += u32::from(high & PAGE != 0);
            self.known += u32::from(high & KNOWN != 0);
        }
        self.rebuild_queue(words);
        self.rebuild_free(words);
    }

    /// Loads the lines of the slots from `from` on, so that the loads overlap.
    fn touch_lines<M: Words>(&self, words: &M, from: u32) {
        let batch = from..from.saturating_add(BATCH).min(self.limit);
        black_box(batch.fold(0, |sum, slot| sum ^ self.entries.touch(words, slot)));
    }

    /// Enters a slot of the previous process in the hash tables, and returns what its flags should be. Page or block are
    /// dropped if another entry has the content or the block, or if there is no room.
    fn take_up<M: Words>(&self, words: &mut M, slot: u32, disk_of: impl Fn(BlockId) -> Option<DiskIndex>) -> u32 {
        let (high, content) = (self.high(words, slot), self.entries.content(words, slot));
        let page = if slot < self.capacity { high & PAGE } else { 0 };
        let block = self.entries.block(words, slot).filter(|_| page != 0 || slot >= self.capacity);
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

    /// Rebuilds the queue of used slots in the order of their links, as far as the links go. The other used slots are
    /// inserted at the head.
    fn rebuild_queue<M: Words>(&mut self, words: &mut M) {
        let (mut slot, mut last) = (self.queue.first(words), NONE);
        while slot < self.limit {
            let high = self.high(words, slot);
            if high & SEEN != 0 {
                break;
            }
            self.set_high(words, slot, high | SEEN);
            if high & PAGE != 0 {
                self.queue.relink(words, last, slot);
                last = slot;
            }
            slot = self.queue.after(words, slot);
        }
        self.queue.relink(words, last, NONE);
        for slot in 0..self.limit {
            let high = self.high(words, slot);
            if high & (PAGE | SEEN) == PAGE {
                self.queue.add_first(words, slot);
            }
            self.set_high(words, slot, high & !SEEN);
        }
    }

    fn rebuild_free<M: Words>(&mut self, words: &mut M) {
        self.free.clear();
        self.draining = 0;
        for slot in 0..self.capacity {
            if self.high(words, slot) == 0 {
                self.free.add_last(words, slot);
            }
        }
    }

    /// Forgets the blocks of all slots, after the hash tables were cleared. No slot is used.
    pub(in crate::index) fn clear_blocks<M: Words>(&mut self, words: &mut M) {
        for slot in 0..self.limit {
            let high = self.high(words, slot);
            self.set_high(words, slot, high & PINS);
        }
        self.known = 0;
    }

    // A move to a larger region, where each slot keeps its number.

    /// Gives a slot the page and the block that the slot of this number has in the region of `old`, as far as the hash tables
    /// have room.
    pub(in crate::index) fn follow<M: Words>(&mut self, words: &mut M, slot: u32, old: &Self, old_words: &M) {
        self.release(words, slot);
        let high = old.high(old_words, slot) & !PINS;
        self.entries.set_content(words, slot, old.entries.content(old_words, slot));
        if high & (PAGE | KNOWN) == 0 || !self.entries.enter_content(words, slot) {
            return;
        }
        let key = old.entries.key(old_words, slot);
        self.entries.set_low(words, slot, key.low);
        let is_known = high & KNOWN != 0 && self.entries.enter_key(words, slot, key);
        self.set_high(words, slot, if is_known { high } else { high & (PAGE | HIT) });
        self.known += u32::from(is_known);
    }

    /// Takes over the rest of the slots of `old`, all of which this table has [followed](Self::follow): queue, free list, flags and
    /// pins. A page without room in the hash tables is dropped.
    pub(in crate::index) fn finish_from<M: Words>(&mut self, words: &mut M, old: &Self, old_words: &M) {
        let links = |this: &Self, limit| this.links.at(0)..this.links.at(limit);
        words[links(self, old.limit)].copy_from_slice(&old_words[links(old, old.limit)]);
        words[header::QUEUE] = old_words[header::QUEUE];
        self.queue.set_last(old.queue.last());
        self.free.restore(old.free.first(), old.free.count());
        (self.used, self.draining, self.pins, self.sizing) = (old.used, old.draining, old.pins, old.sizing);
        self.store_capacity(words, old.capacity);
        for slot in 0..old.limit {
            let (high, had) = (self.high(words, slot), old.high(old_words, slot));
            let flags = if high & (PAGE | KNOWN) == 0 { PINS } else { HIT | PINS };
            self.set_high(words, slot, high & !HIT | had & flags);
            if old.is_used(old_words, slot) && high & PAGE == 0 {
                self.queue.remove(words, slot);
                self.used -= 1;
                self.put_back(words, slot);
            }
        }
    }
}
