//! How many slots are usable. That changes slot by slot at the end of the table, some in each turn: a large cache has millions.
//!
//! [`Slots::aim`] and [`Slots::lose_from`] say what should be, [`Slots::step`] does a part of it. The table is whole after each of
//! them, so anything may come between: another aim, a connection that ends, a close.
//! 1. The free slots below the capacity are linked both ways, so that any of them can be cut off.
//! 2. What is beyond the capacity means nothing, but for pins. Nor do the chain heads after a clear, until they are cleared.
//! 3. Pages that are lost (`sizing.rs`) are not found, and released as the capacity sinks. The header has the number of those that are
//!    kept as the capacity, if that is smaller, so a successor does not find them either.

use super::{HIT, META, PINS, Place, Slots, USED};
use crate::index::layout::{NONE, Words, settle};

/// What a change of the capacity needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) enum Step {
    /// Nothing: it is as it should be.
    Done,
    /// Nothing: a part of it has been done.
    Taken,
    /// This page is discarded: there is no room for all.
    Discard(u32),
    /// The page of the last slot moves to another one, which is taken for it; then [`Slots::end_move`].
    Move { from: u32, to: u32 },
}

impl Slots {
    /// Gives up the content of all slots. None is usable until [`Self::step`] has looked at them.
    pub(in crate::index) fn clear<M: Words>(&mut self, words: &mut M) {
        if self.used == 0 {
            return;
        }
        self.sizing.begin_clear();
        self.store_capacity(words, 0);
        settle();
        self.queue.clear(words);
        self.free.clear();
        (self.used, self.draining) = (0, 0);
    }

    /// Sets the capacity that [`Self::step`] works towards.
    pub(in crate::index) fn aim(&mut self, capacity: u32) {
        self.sizing.aim(capacity.min(self.limit));
    }

    /// Gives up the pages of all slots from `slots` on.
    pub(in crate::index) fn lose_from<M: Words>(&mut self, words: &mut M, slots: u32) {
        if slots < self.sizing.kept_of(self.capacity) {
            self.sizing.lose_from(slots);
            self.store_capacity(words, self.capacity);
        }
    }

    /// Returns whether slots below the capacity have lost their page.
    pub(in crate::index) fn are_losing(&self) -> bool {
        self.sizing.kept_of(self.capacity) < self.capacity
    }

    /// Returns whether [`Self::step`] has something to do.
    pub(in crate::index) fn are_resizing(&self) -> bool {
        self.sizing.has_stale_heads() || self.are_losing() || self.capacity != self.sizing.wanted()
    }

    /// Returns whether the words hold all that a successor needs to take them as they are.
    pub(in crate::index) fn are_whole(&self) -> bool {
        !self.sizing.has_stale_heads() && !self.are_losing()
    }

    /// Goes on towards the wanted capacity by looking at one slot, and returns what the caller has to do for that.
    pub(in crate::index) fn step<M: Words>(&mut self, words: &mut M) -> Step {
        if let Some(heads) = self.sizing.next_stale_heads(self.chains.count()) {
            self.chains.clear_some(words, heads);
        } else if self.are_losing() {
            self.release_last(words);
        } else if self.capacity > self.sizing.wanted() {
            return self.shrink_some(words);
        } else if self.capacity < self.sizing.wanted() {
            self.grow_by_one(words);
        } else {
            return Step::Done;
        }
        Step::Taken
    }

    fn release_last<M: Words>(&mut self, words: &mut M) {
        let last = self.capacity - 1;
        if self.is_used(words, last) {
            self.release(words, last);
        }
        self.cut_off(words, last);
    }

    fn shrink_some<M: Words>(&mut self, words: &mut M) -> Step {
        if self.used > self.sizing.wanted() {
            return Step::Discard(self.queue.first(words));
        }
        let last = self.capacity - 1;
        let meta = self.meta(words, last);
        if meta & USED != 0 && meta & PINS == 0 && self.sizing.may_find_spare(self.free.first()) {
            let (first, table) = (self.free.first(), self.table);
            let Some(to) = self.sizing.next_spare(first, |slot| table.get(words, slot, META) == 0) else {
                return Step::Taken;
            };
            self.free.remove(words, to);
            return Step::Move { from: last, to };
        }
        self.release_last(words);
        Step::Taken
    }

    /// Re-labels the page of the last slot, `from`, as the page of `to`, at the same place of the queue, and takes the last slot away.
    pub(in crate::index) fn end_move<M: Words>(&mut self, words: &mut M, from: u32, to: u32) {
        let content = self.table.content(words, from);
        let (previous, hit) = (self.queue.before(words, from), self.meta(words, from) & HIT);
        self.release(words, from);
        self.fill(words, to, content, Place::Head);
        let meta = self.meta(words, to);
        self.set_meta(words, to, meta | hit);
        if previous != NONE {
            self.queue.remove(words, to);
            self.queue.add_after(words, previous, to);
        }
        self.cut_off(words, from);
    }

    /// Takes the last slot away, which is free or draining.
    fn cut_off<M: Words>(&mut self, words: &mut M, last: u32) {
        if self.meta(words, last) == 0 {
            self.free.remove(words, last);
        } else {
            self.draining -= 1;
        }
        self.store_capacity(words, last);
        if !self.are_losing() {
            self.sizing.end_loss();
        }
    }

    fn grow_by_one<M: Words>(&mut self, words: &mut M) {
        let slot = self.capacity;
        let pins = self.meta(words, slot) & PINS;
        self.set_meta(words, slot, pins);
        self.store_capacity(words, slot + 1);
        if pins == 0 {
            self.free.add_last(words, slot);
        } else {
            self.draining += 1;
        }
    }
}
