//! The queue of the used slots of a pool, from the next to be discarded (head) to the newest (tail), and the list of free slots. A
//! slot is on at most one of the two, so both use the same two links of it.

use super::layout::{LINK_WORDS, Layout, NONE, Words, begin_load, settle};
use super::table::Table;

const PREVIOUS: usize = 0;
const NEXT: usize = 1;

/// Links of all slots. While a region follows them, they remember which slots have changed.
#[derive(Debug)]
pub(super) struct Links {
    table: Table<LINK_WORDS>,
    /// Slots whose links or flags have changed since the last [`Links::take_changed`].
    changed: Vec<u32>,
    are_followed: bool,
}

impl Links {
    pub(super) fn new(layout: &Layout) -> Self {
        Self { table: Table::new(layout.links_at()), changed: Vec::new(), are_followed: false }
    }

    fn get<M: Words>(&self, words: &M, slot: u32, field: usize) -> u32 {
        self.table.get(words, slot, field)
    }

    fn set<M: Words>(&mut self, words: &mut M, slot: u32, field: usize, value: u32) {
        self.table.set(words, slot, field, value);
        self.note(slot);
    }

    /// Begins to load both links of a slot, which are in one cache line.
    pub(super) fn touch<M: Words>(&self, words: &M, slot: u32) {
        begin_load(words, self.table.at(slot) + NEXT);
    }

    /// Begins to load the links of both neighbours of a slot, as far as they are below `limit`.
    pub(super) fn touch_neighbours<M: Words>(&self, words: &M, slot: u32, limit: u32) {
        let neighbours = [PREVIOUS, NEXT].map(|field| self.get(words, slot, field)).into_iter();
        neighbours.filter(|slot| *slot < limit).for_each(|slot| self.touch(words, slot));
    }

    /// Notes that links or flags of a slot have changed.
    #[inline]
    pub(super) fn note(&mut self, slot: u32) {
        if self.are_followed {
            self.changed.push(slot);
        }
    }

    /// Starts to remember changes.
    pub(super) fn begin_to_follow(&mut self) {
        self.changed.clear();
        self.are_followed = true;
    }

    /// Returns whether any slot has changed since the last [`Self::take_changed`].
    #[inline]
    pub(super) fn have_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Removes and returns a slot that has changed, or returns `None` if none is left.
    pub(super) fn take_changed(&mut self) -> Option<u32> {
        self.changed.pop()
    }

    /// Gives a slot the links that it has in another region.
    pub(super) fn copy<M: Words>(&self, words: &mut M, slot: u32, from: &Self, from_words: &M) {
        for field in [PREVIOUS, NEXT] {
            self.table.set(words, slot, field, from.get(from_words, slot, field));
        }
    }

    /// Returns both links of a slot.
    #[cfg(test)]
    pub(super) fn both<M: Words>(&self, words: &M, slot: u32) -> [u32; 2] {
        [PREVIOUS, NEXT].map(|field| self.get(words, slot, field))
    }
}

/// Queue of the used slots of a pool. Its head is in the header; followed from there, the queue is consistent after every store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue {
    /// Position of the word with the first slot.
    head_at: usize,
    tail: u32,
}

impl Queue {
    /// Returns the empty queue.
    pub(super) fn new(head_at: usize) -> Self {
        Self { head_at, tail: NONE }
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
    pub(super) fn after<M: Words>(&self, links: &Links, words: &M, slot: u32) -> u32 {
        links.get(words, slot, NEXT)
    }

    /// Returns the slot before `slot`, or [`NONE`].
    pub(super) fn before<M: Words>(&self, links: &Links, words: &M, slot: u32) -> u32 {
        links.get(words, slot, PREVIOUS)
    }

    /// Sets the slot after `slot`, or the first slot if `slot` is [`NONE`].
    fn set_next<M: Words>(&self, links: &mut Links, words: &mut M, slot: u32, next: u32) {
        if slot == NONE {
            words[self.head_at] = next;
        } else {
            links.set(words, slot, NEXT, next);
        }
    }

    /// Empties the queue.
    pub(super) fn clear<M: Words>(&mut self, words: &mut M) {
        words[self.head_at] = NONE;
        self.tail = NONE;
    }

    /// Removes a slot.
    pub(super) fn remove<M: Words>(&mut self, links: &mut Links, words: &mut M, slot: u32) {
        let (previous, next) = (self.before(links, words, slot), self.after(links, words, slot));
        self.set_next(links, words, previous, next);
        if next == NONE {
            self.tail = previous
        } else {
            links.set(words, next, PREVIOUS, previous)
        }
        settle();
    }

    /// Inserts a slot as the next to be discarded.
    pub(super) fn add_first<M: Words>(&mut self, links: &mut Links, words: &mut M, slot: u32) {
        let first = self.first(words);
        links.set(words, slot, PREVIOUS, NONE);
        links.set(words, slot, NEXT, first);
        if first == NONE {
            self.tail = slot
        } else {
            links.set(words, first, PREVIOUS, slot)
        }
        settle();
        words[self.head_at] = slot;
    }

    /// Inserts a slot as the newest.
    pub(super) fn add_last<M: Words>(&mut self, links: &mut Links, words: &mut M, slot: u32) {
        links.set(words, slot, NEXT, NONE);
        links.set(words, slot, PREVIOUS, self.tail);
        settle();
        self.set_next(links, words, self.tail, slot);
        self.tail = slot;
    }

    /// Inserts a slot after `previous`.
    pub(super) fn add_after<M: Words>(&mut self, links: &mut Links, words: &mut M, previous: u32, slot: u32) {
        let next = self.after(links, words, previous);
        links.set(words, slot, PREVIOUS, previous);
        links.set(words, slot, NEXT, next);
        settle();
        links.set(words, previous, NEXT, slot);
        if next == NONE { self.tail = slot } else { links.set(words, next, PREVIOUS, slot) }
    }

    /// Links `slot` after `last` while the queue is rebuilt from its head. If `slot` is [`NONE`], ends the queue at
    /// `last`.
    pub(super) fn relink<M: Words>(&mut self, links: &mut Links, words: &mut M, last: u32, slot: u32) {
        if slot == NONE {
            self.tail = last;
        } else {
            links.set(words, slot, PREVIOUS, last);
        }
        self.set_next(links, words, last, slot);
    }
}

/// Doubly linked list of free slots, from which any slot can be removed. `PREVIOUS` of the first slot is the last slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct FreeSlots {
    first: u32,
    count: u32,
}

impl FreeSlots {
    /// Returns the empty list.
    pub(super) fn new() -> Self {
        Self { first: NONE, count: 0 }
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
    pub(super) fn add_first<M: Words>(&mut self, links: &mut Links, words: &mut M, slot: u32) {
        let first = self.first;
        self.add_last(links, words, slot);
        if first != NONE {
            let tail = links.get(words, slot, PREVIOUS);
            links.set(words, tail, NEXT, NONE);
            links.set(words, slot, NEXT, first);
        }
        self.first = slot;
    }

    /// Inserts `slot` as the last to be taken.
    pub(super) fn add_last<M: Words>(&mut self, links: &mut Links, words: &mut M, slot: u32) {
        let first = self.first;
        let last = if first == NONE { slot } else { links.get(words, first, PREVIOUS) };
        links.set(words, slot, PREVIOUS, last);
        links.set(words, slot, NEXT, NONE);
        if first == NONE {
            self.first = slot;
        } else {
            links.set(words, last, NEXT, slot);
            links.set(words, first, PREVIOUS, slot);
        }
        self.count += 1;
    }

    /// Removes `slot` from the list.
    pub(super) fn remove<M: Words>(&mut self, links: &mut Links, words: &mut M, slot: u32) {
        let (previous, next) = (links.get(words, slot, PREVIOUS), links.get(words, slot, NEXT));
        if slot == self.first {
            self.first = next;
        } else {
            links.set(words, previous, NEXT, next);
        }
        match (next, self.first) {
            (NONE, NONE) => {}
            (NONE, first) => links.set(words, first, PREVIOUS, previous),
            (next, _) => links.set(words, next, PREVIOUS, previous),
        }
        self.count -= 1;
    }
}
