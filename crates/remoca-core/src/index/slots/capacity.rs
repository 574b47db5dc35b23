//! Changes in the number of usable slots. They are made slot by slot at the end of the table, a few in each turn,
//! because a large cache has millions of slots.
//!
//! [`Slots::aim`] and [`Slots::lose_from`] set the target, and [`Slots::step`] does a part of the work. The table is
//! consistent after each of these calls, so other events may come in between: another target, a lost connection, a
//! close.
//! 1. The free slots below the capacity are doubly linked, so that any of them can be cut off.
//! 2. Words of slots beyond the capacity have no meaning, except for pins. After a clear, the hash table has no
//!    meaning until its lines are cleared as well.
//! 3. Look-ups do not find lost pages (`sizing.rs`), which are released as the capacity falls. Until then, the capacity
//!    in the header is the number of slots that keep their page, so that a successor does not find lost pages either.

use super::{HIT, META, PINS, Place, Slots, USED};
use crate::index::layout::{NONE, Words, settle};

/// Result of one step of a change of the capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) enum Step {
    /// Nothing is left to do.
    Done,
    /// One step was taken; others may follow.
    Taken,
    /// The caller must discard the page of this slot, because there is no room for all pages.
    Discard(u32),
    /// The caller must move the page of the last slot `from` to the slot `to`, which was taken for it, and then call
    /// [`Slots::end_move`].
    Move { from: u32, to: u32 },
}

impl Slots {
    /// Drops the content of all slots. They become usable again as [`Self::step`] processes them.
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

    /// Marks the pages of all slots from `slots` on as lost.
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

    /// Returns whether [`Self::step`] has work left.
    pub(in crate::index) fn are_resizing(&self) -> bool {
        self.sizing.has_stale_lines() || self.are_losing() || self.capacity != self.sizing.wanted()
    }

    /// Returns whether a successor could use the words without a rebuild.
    pub(in crate::index) fn are_whole(&self) -> bool {
        !self.sizing.has_stale_lines() && !self.are_losing()
    }

    /// Works towards the wanted capacity by processing one slot, or by clearing some lines of the hash table. Returns the
    /// work that is left to the caller.
    pub(in crate::index) fn step<M: Words>(&mut self, words: &mut M) -> Step {
        if let Some(lines) = self.sizing.next_stale_lines(self.lines.count()) {
            self.lines.clear_some(words, lines);
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

    /// Moves the entry of the last slot `from` to `to`, at the same position in the queue, and cuts off `from`.
    pub(in crate::index) fn end_move<M: Words>(&mut self, words: &mut M, from: u32, to: u32) {
        let content = self.table.content(words, from);
        let (previous, hit) = (self.queue.before(words, from), self.meta(words, from) & HIT);
        self.release(words, from);
        // The former entry has just left room for this one.
        if self.reserve(words, to, content) {
            self.fill(words, to, Place::Head);
            let meta = self.meta(words, to);
            self.set_meta(words, to, meta | hit);
            if previous != NONE {
                self.queue.remove(words, to);
                self.queue.add_after(words, previous, to);
            }
        }
        self.cut_off(words, from);
    }

    /// Cuts off the last slot, which is free or draining.
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
