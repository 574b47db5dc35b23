//! The queue of the used slots of a pool, from the next to be discarded (head) to the newest (tail), and the list of free slots. A
//! slot is on at most one of the two, so both use the same two links of it.

use super::layout::{LINK_WORDS, NONE, Words, settle};
use super::table::Table;

pub(super) const PREVIOUS: usize = 0;
pub(super) const NEXT: usize = 1;

/// Queue of the used slots of a pool. Its head is in the header; followed from there, the queue is consistent after every store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue {
    links: Table<LINK_WORDS>,
    /// Position of the word with the first slot.
    head_at: usize,
    tail: u32,
}

impl Queue {
    /// Returns the empty queue.
    pub(super) fn new(links: Table<LINK_WORDS>, head_at: usize) -> Self {
        Self { links, head_at, tail: NONE }
    }

    /// Returns the next slot to be discarded, or [`NONE`].
    pub(super) fn first<M: Words>(&self, words: &M) -> u32 {
        words[self.head_at]
    }

    /// Returns the newest slot, or [`NONE`].
    pub(super) fn last(&self) -> u32 {
        self.tail
    }

    /// Sets the newest slot of a queue whose links come from another process or region.
    pub(super) fn set_last(&mut self, tail: u32) {
        self.tail = tail;
    }

    /// Returns the slot after `slot`, or [`NONE`].
    pub(super) fn after<M: Words>(&self, words: &M, slot: u32) -> u32 {
        self.links.get(words, slot, NEXT)
    }

    /// Returns the slot before `slot`, or [`NONE`].
    pub(super) fn before<M: Words>(&self, words: &M, slot: u32) -> u32 {
        self.links.get(words, slot, PREVIOUS)
    }

    /// Sets the slot after `slot`, or the first slot if `slot` is [`NONE`].
    fn set_next<M: Words>(&self, words: &mut M, slot: u32, next: u32) {
        if slot == NONE {
            words[self.head_at] = next;
        } else {
            self.links.set(words, slot, NEXT, next);
        }
    }

    /// Empties the queue.
    pub(super) fn clear<M: Words>(&mut self, words: &mut M) {
        words[self.head_at] = NONE;
        self.tail = NONE;
    }

    /// Removes a slot.
    pub(super) fn remove<M: Words>(&mut self, words: &mut M, slot: u32) {
        let (previous, next) = (self.before(words, slot), self.after(words, slot));
        self.set_next(words, previous, next);
        if next == NONE {
            self.tail = previous
        } else {
            self.links.set(words, next, PREVIOUS, previous)
        }
        settle();
    }

    /// Inserts a slot as the next to be discarded.
    pub(super) fn add_first<M: Words>(&mut self, words: &mut M, slot: u32) {
        let first = self.first(words);
        self.links.set(words, slot, PREVIOUS, NONE);
        self.links.set(words, slot, NEXT, first);
        if first == NONE {
            self.tail = slot
        } else {
            self.links.set(words, first, PREVIOUS, slot)
        }
        settle();
        words[self.head_at] = slot;
    }

    /// Inserts a slot as the newest.
    pub(super) fn add_last<M: Words>(&mut self, words: &mut M, slot: u32) {
        self.links.set(words, slot, NEXT, NONE);
        self.links.set(words, slot, PREVIOUS, self.tail);
        settle();
        self.set_next(words, self.tail, slot);
        self.tail = slot;
    }

    /// Inserts a slot after `previous`.
    pub(super) fn add_after<M: Words>(&mut self, words: &mut M, previous: u32, slot: u32) {
        let next = self.after(words, previous);
        self.links.set(words, slot, PREVIOUS, previous);
        self.links.set(words, slot, NEXT, next);
        settle();
        self.links.set(words, previous, NEXT, slot);
        if next == NONE { self.tail = slot } else { self.links.set(words, next, PREVIOUS, slot) }
    }

    /// Links `slot` after `last` while the queue is rebuilt from its head. If `slot` is [`NONE`], ends the queue at
    /// `last`.
    pub(super) fn relink<M: Words>(&mut self, words: &mut M, last: u32, slot: u32) {
        if slot == NONE {
            self.tail = last;
        } else {
            self.links.set(words, slot, PREVIOUS, last);
        }
        self.set_next(words, last, slot);
    }
}

/// Doubly linked list of free slots, from which any slot can be removed. `PREVIOUS` of the first slot is the last slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct FreeSlots {
    links: Table<LINK_WORDS>,
    first: u32,
    count: u32,
}

impl FreeSlots {
    /// Returns the empty list.
    pub(super) fn new(links: Table<LINK_WORDS>) -> Self {
        Self { links, first: NONE, count: 0 }
    }

    /// Returns the next slot to be taken, or [`NONE`].
    pub(super) fn first(&self) -> u32 {
        self.first
    }

    /// Returns the number of free slots.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Sets the list to the `count` slots that are already linked from `first`.
    pub(super) fn restore(&mut self, first: u32, count: u32) {
        (self.first, self.count) = (first, count);
    }

    /// Empties the list.
    pub(super) fn clear(&mut self) {
        self.restore(NONE, 0);
    }

    /// Inserts `slot` as the next to be taken.
    pub(super) fn add_first<M: Words>(&mut self, words: &mut M, slot: u32) {
        let first = self.first;
        self.add_last(words, slot);
        if first != NONE {
            let tail = self.links.get(words, slot, PREVIOUS);
            self.links.set(words, tail, NEXT, NONE);
            self.links.set(words, slot, NEXT, first);
        }
        self.first = slot;
    }

    /// Inserts `slot` as the last to be taken.
    pub(super) fn add_last<M: Words>(&mut self, words: &mut M, slot: u32) {
        let first = self.first;
        let last = if first == NONE { slot } else { self.links.get(words, first, PREVIOUS) };
        self.links.set(words, slot, PREVIOUS, last);
        self.links.set(words, slot, NEXT, NONE);
        if first == NONE {
            self.first = slot;
        } else {
            self.links.set(words, last, NEXT, slot);
            self.links.set(words, first, PREVIOUS, slot);
        }
        self.count += 1;
    }

    /// Removes `slot` from the list.
    pub(super) fn remove<M: Words>(&mut self, words: &mut M, slot: u32) {
        let (previous, next) = (self.links.get(words, slot, PREVIOUS), self.links.get(words, slot, NEXT));
        if slot == self.first {
            self.first = next;
        } else {
            self.links.set(words, previous, NEXT, next);
        }
        match (next, self.first) {
            (NONE, NONE) => {}
            (NONE, first) => self.links.set(words, first, PREVIOUS, previous),
            (next, _) => self.links.set(words, next, PREVIOUS, previous),
        }
        self.count -= 1;
    }
}
