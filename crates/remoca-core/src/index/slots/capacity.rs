//! Changes in the number of usable slots. They are made slot by slot at the end of the table, a few in each turn,
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

use super::{HIT, KNOWN, PAGE, PINS, Slots};
use crate::index::layout::{NONE, Words, settle};

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
}

impl Slots {
    /// Drops the content of all slots. They become usable again as [`Self::step`] processes them.
    pub(in crate::index) fn clear<M: Words>(&mut self, words: &mut M) {
        if self.used == 0 {
            return;
        }
        self.sizing.begin_again();
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
        self.are_losing() || self.capacity != self.sizing.wanted()
    }

    /// Works towards the wanted capacity by examining one slot. Returns the work that is left to the caller.
    pub(in crate::index) fn step<M: Words>(&mut self, words: &mut M) -> Step {
        if self.are_losing() {
            Step::CutOff(self.capacity - 1)
        } else if self.capacity > self.sizing.wanted() {
            self.shrink_some(words)
        } else if self.capacity < self.sizing.wanted() {
            Step::Add(self.capacity)
        } else {
            Step::Done
        }
    }

    fn shrink_some<M: Words>(&mut self, words: &mut M) -> Step {
        if self.used > self.sizing.wanted() {
            return Step::Discard(self.queue.first(words));
        }
        let last = self.capacity - 1;
        let high = self.high(words, last);
        if high & PAGE != 0 && high & PINS == 0 && self.sizing.may_find_spare(self.free.first()) {
            let (first, entries) = (self.free.first(), self.entries);
            let Some(to) = self.sizing.next_spare(first, |slot| entries.high(words, slot) == 0) else {
                return Step::Taken;
            };
            self.free.remove(words, to);
            return Step::Move { from: last, to };
        }
        Step::CutOff(last)
    }

    /// Moves the page and the block of the last slot `from` to `to`, at the same position in the queue, and cuts off `from`.
    pub(in crate::index) fn end_move<M: Words>(&mut self, words: &mut M, from: u32, to: u32) {
        let (key, high) = (self.entries.key(words, from), self.high(words, from));
        let (key, content) = ((high & KNOWN != 0).then_some(key), self.entries.content(words, from));
        let previous = self.queue.before(words, from);
        self.let_go(words, from);
        self.entries.set_content(words, to, content);
        self.entries.hand_over_content(words, from, to);
        if let Some(key) = key {
            self.entries.hand_over_key(words, key, from, to);
        }
        self.validate(words, to, key, high & HIT);
        match previous {
            NONE => self.queue.add_first(words, to),
            previous => self.queue.add_after(words, previous, to),
        }
        self.cut_off(words, from);
    }

    /// Cuts off the last slot, which is free or draining.
    pub(in crate::index) fn cut_off<M: Words>(&mut self, words: &mut M, last: u32) {
        if self.high(words, last) == 0 {
            self.free.remove(words, last);
        } else {
            self.draining -= 1;
        }
        self.store_capacity(words, last);
        if !self.are_losing() {
            self.sizing.end_loss();
        }
    }

    /// Adds the slot after the last one, which is empty.
    pub(in crate::index) fn add<M: Words>(&mut self, words: &mut M, slot: u32) {
        self.store_capacity(words, slot + 1);
        if self.high(words, slot) & PINS == 0 {
            self.free.add_last(words, slot);
        } else {
            self.draining += 1;
        }
    }
}
