//! Restoring slots from another process or another region.

use super::{HIT, PINS, Place, Slots, USED};
use crate::index::layout::{NONE, Words, header};
use crate::index::table::BATCH;
use std::hint::black_box;

/// Flag of a slot that the rebuild of the queue has found on it.
const SEEN: u32 = 1 << 18;

impl Slots {
    /// Stores the state that is kept outside the words.
    pub(in crate::index) fn close<M: Words>(&self, words: &mut M) {
        words[header::TAIL] = self.queue.last();
        words[header::FREE_SLOT] = self.free.first();
        words[header::SLOTS_USED] = self.used;
    }

    /// Loads the state that is kept outside the words from the header.
    pub(in crate::index) fn take_as_closed<M: Words>(&mut self, words: &M) {
        self.capacity = words[header::CAPACITY];
        self.sizing.aim(self.capacity);
        self.used = words[header::SLOTS_USED];
        self.queue.set_last(words[header::TAIL]);
        self.free.restore(words[header::FREE_SLOT], self.capacity - self.used);
    }

    /// Rebuilds queue, hash table and free list from the slots of the previous process. Drops the pins of that process.
    pub(in crate::index) fn rebuild<M: Words>(&mut self, words: &mut M) {
        self.lines.clear(words);
        let capacity = words[header::CAPACITY].min(self.limit);
        for slot in 0..self.limit {
            if slot % BATCH == 0 {
                self.touch_lines(words, slot);
            }
            let meta = self.meta(words, slot);
            let stays = meta & USED != 0 && slot < capacity && self.take_up(words, slot);
            self.set_meta(words, slot, if stays { meta & (USED | HIT) } else { 0 });
            self.used += u32::from(stays);
        }
        self.rebuild_queue(words);
        self.store_capacity(words, capacity);
        self.sizing.aim(capacity);
        self.rebuild_free(words);
    }

    /// Loads the lines of the slots from `from` on, so that the loads overlap.
    fn touch_lines<M: Words>(&self, words: &M, from: u32) {
        let batch = from..from.saturating_add(BATCH).min(self.limit);
        let lines = batch.map(|slot| self.lines.touch(words, self.site(self.table.content(words, slot))));
        black_box(lines.fold(0, |sum, line| sum ^ line));
    }

    /// Enters a slot of the previous process in the hash table. Returns `false` if another slot has its content, or if there
    /// is no room.
    fn take_up<M: Words>(&self, words: &mut M, slot: u32) -> bool {
        let content = self.table.content(words, slot);
        let is_same = |other| self.table.content(words, other) == content;
        let is_taken = self.lines.find(words, self.site(content), is_same).is_some();
        content != self.zero && !is_taken && self.enter(words, slot, content)
    }

    /// Rebuilds the queue of used slots in the order of their links, as far as the links go. The other used slots are
    /// inserted at the head.
    fn rebuild_queue<M: Words>(&mut self, words: &mut M) {
        let (mut slot, mut last) = (self.queue.first(words), NONE);
        while slot < self.limit {
            let meta = self.meta(words, slot);
            if meta & SEEN != 0 {
                break;
            }
            self.set_meta(words, slot, meta | SEEN);
            if meta & USED != 0 {
                self.queue.relink(words, last, slot);
                last = slot;
            }
            slot = self.queue.after(words, slot);
        }
        self.queue.relink(words, last, NONE);
        for slot in 0..self.limit {
            let meta = self.meta(words, slot);
            if meta & (USED | SEEN) == USED {
                self.queue.add_first(words, slot);
            }
            self.set_meta(words, slot, meta & !SEEN);
        }
    }

    fn rebuild_free<M: Words>(&mut self, words: &mut M) {
        self.free.clear();
        self.draining = 0;
        for slot in 0..self.capacity {
            match self.meta(words, slot) {
                0 => self.free.add_last(words, slot),
                meta if meta & USED == 0 => self.draining += 1,
                _ => {}
            }
        }
    }

    /// Fills the slots with the pages of `old`. Pages beyond the limit of this table are dropped; pins are kept.
    pub(in crate::index) fn take_from<M: Words>(&mut self, words: &mut M, old: &Self, old_words: &M) {
        self.pins = old.pins;
        if self.limit == old.limit {
            return self.copy_from(words, old, old_words);
        }
        self.sizing = old.sizing.within(self.limit);
        self.store_capacity(words, old.capacity.min(self.limit));
        // Slots that a shrink cut off may also be pinned.
        for slot in 0..self.limit.min(old.limit) {
            self.set_meta(words, slot, old.meta(old_words, slot) & PINS);
        }
        for (slot, content) in old.queue(old_words) {
            if slot.0 < self.capacity && self.enter(words, slot.0, content) {
                self.fill(words, slot.0, Place::Tail);
                let meta = self.meta(words, slot.0) | (old.meta(old_words, slot.0) & HIT);
                self.set_meta(words, slot.0, meta);
            }
        }
        self.rebuild_free(words);
    }

    /// Copies all words of the table `old`, which has the same size.
    fn copy_from<M: Words>(&mut self, words: &mut M, old: &Self, old_words: &M) {
        let all = |this: &Self| this.lines.with_table_at(this.table.at());
        words[all(self)].copy_from_slice(&old_words[all(old)]);
        words[header::QUEUE] = old_words[header::QUEUE];
        self.queue.set_last(old.queue.last());
        self.free.restore(old.free.first(), old.free.count());
        (self.used, self.draining) = (old.used, old.draining);
        self.sizing = old.sizing;
        self.store_capacity(words, old.capacity);
    }
}
