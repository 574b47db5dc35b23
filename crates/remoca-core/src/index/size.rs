//! How many slots are usable. That changes slot by slot at the end of the table, some in each turn: a large cache has millions.
//!
//! [`CacheIndex::aim`] and [`CacheIndex::lose_from`] say what should be, [`CacheIndex::resize`] does some of it. The index is whole
//! after each slot, so anything may come between: another aim, a connection that ends, a close.
//! 1. The free slots below the capacity are linked both ways, so that any of them can be cut off.
//! 2. What is beyond the capacity means nothing, but for pins. Nor do the chain heads after a clear, until they are cleared.
//! 3. Pages from `kept` on are lost: they are not found, and released as the capacity sinks. The header has the smaller of the
//!    two as the capacity, so a successor does not find them either.

use super::slots::{META, NEXT, PINS, PREVIOUS, USED};
use super::{CacheIndex, NONE, header, settle};
use crate::units::{PageCount, SlotIndex};
use std::ops::DerefMut;

/// Chain heads that are cleared in place of looking at one slot: two pages of memory.
const HEADS_PER_STEP: u32 = 2048;

/// One move of a shrink: the server is to copy page `from` to slot `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    pub from: SlotIndex,
    pub to: SlotIndex,
}

/// What the capacity becomes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizing {
    /// Wanted capacity.
    pub(super) end: u32,
    /// First slot whose page is lost; `NONE` unless some are below the capacity.
    pub(super) kept: u32,
    /// First slot that has not been looked at in search of a free one.
    spare: u32,
    /// First chain head that is still to be cleared; `NONE` if none is.
    pub(super) stale_heads: u32,
}

impl Sizing {
    pub(super) fn new() -> Self {
        Self { end: 0, kept: NONE, spare: 0, stale_heads: NONE }
    }

    /// Returns the same for a new table of `slots` slots.
    pub(super) fn within(self, slots: u32) -> Self {
        Self { end: self.end.min(slots), stale_heads: NONE, ..self }
    }
}

impl<M: DerefMut<Target = [u32]>> CacheIndex<M> {
    /// Number of slots that are free, used or draining now. While pages are [lost](Self::lose_from) not all of them are usable.
    pub fn capacity(&self) -> PageCount {
        PageCount(self.capacity)
    }

    /// Sets the capacity that [`Self::resize`] works towards.
    pub fn aim(&mut self, capacity: PageCount) {
        let end = capacity.0.min(self.layout.slots);
        if end != self.sizing.end {
            self.sizing.end = end;
            self.sizing.spare = 0;
        }
    }

    /// Gives up the pages of all slots from `slots` on, which the server does not have any more: none is found after this.
    pub fn lose_from(&mut self, slots: PageCount) {
        if slots.0 < self.capacity.min(self.sizing.kept) {
            self.sizing.kept = slots.0;
            self.store_capacity(self.capacity);
        }
    }

    pub(super) fn is_losing(&self) -> bool {
        self.capacity > self.sizing.kept
    }

    /// Returns whether [`Self::resize`] has something to do.
    pub fn is_resizing(&self) -> bool {
        self.sizing.stale_heads != NONE || self.is_losing() || self.capacity != self.sizing.end
    }

    /// Returns whether the words hold all that a successor needs to take them as they are.
    pub(super) fn is_whole(&self) -> bool {
        self.sizing.stale_heads == NONE && !self.is_losing()
    }

    /// Goes on towards the wanted capacity by looking at no more than `slots` slots. When it shrinks, the oldest pages that do
    /// not fit are given up, and the others move to free slots further down (`moves` tells the server).
    pub fn resize(&mut self, slots: u32, mut moves: impl FnMut(Move)) {
        for _ in 0..slots {
            if self.sizing.stale_heads != NONE {
                self.clear_some_heads();
            } else if self.is_losing() {
                self.lose_last();
            } else if self.capacity > self.sizing.end {
                self.shrink_some(&mut moves);
            } else if self.capacity < self.sizing.end {
                self.grow_by_one();
            } else {
                return;
            }
        }
    }

    fn clear_some_heads(&mut self) {
        let from = self.sizing.stale_heads;
        let to = from.saturating_add(HEADS_PER_STEP).min(self.layout.slot_heads);
        let at = self.layout.slot_heads_at();
        self.words[at + from as usize..at + to as usize].fill(NONE);
        self.sizing.stale_heads = if to < self.layout.slot_heads { to } else { NONE };
    }

    fn lose_last(&mut self) {
        let last = self.capacity - 1;
        if self.is_used(last) {
            self.release_slot(last);
        }
        self.cut_off(last);
    }

    fn shrink_some(&mut self, moves: &mut impl FnMut(Move)) {
        if self.counts.used > self.sizing.end {
            return self.discard_victim(self.first());
        }
        let last = self.capacity - 1;
        let meta = self.slot_word(last, META);
        if meta & USED != 0 {
            let may_find = self.free_slot < self.sizing.end || self.sizing.spare < self.sizing.end;
            if meta & PINS == 0 && may_find {
                let Some(to) = self.look_for_spare() else { return };
                self.take_free(to);
                self.log_move(to);
                self.move_page(last, to);
                moves(Move { from: SlotIndex(last), to: SlotIndex(to) });
            } else {
                self.release_slot(last);
            }
        }
        self.cut_off(last);
    }

    /// Looks at one slot below the wanted capacity, and returns it if it is free.
    fn look_for_spare(&mut self) -> Option<u32> {
        if self.free_slot < self.sizing.end {
            return Some(self.free_slot);
        }
        let slot = self.sizing.spare;
        self.sizing.spare += 1;
        (self.slot_word(slot, META) == 0).then_some(slot)
    }

    /// Takes the last slot away, which is free or draining.
    fn cut_off(&mut self, last: u32) {
        if self.slot_word(last, META) == 0 {
            self.take_free(last);
        } else {
            self.counts.draining -= 1;
        }
        self.store_capacity(last);
        if !self.is_losing() {
            self.sizing.kept = NONE;
        }
    }

    fn grow_by_one(&mut self) {
        let slot = self.capacity;
        let pins = self.slot_word(slot, META) & PINS;
        self.set_slot_word(slot, META, pins);
        self.store_capacity(slot + 1);
        if pins == 0 {
            self.append_free(slot);
        } else {
            self.counts.draining += 1;
        }
    }

    pub(super) fn store_capacity(&mut self, capacity: u32) {
        settle();
        self.capacity = capacity;
        self.words[header::CAPACITY] = capacity.min(self.sizing.kept);
    }

    /// Gives up the content of all slots. None is usable until [`Self::resize`] has looked at them.
    pub(super) fn clear_slots(&mut self) {
        if self.counts.used == 0 {
            return;
        }
        self.sizing = Sizing { kept: NONE, spare: 0, stale_heads: 0, ..self.sizing };
        self.store_capacity(0);
        settle();
        self.words[header::QUEUE] = NONE;
        self.tail = NONE;
        self.free_slot = NONE;
        self.counts = super::SlotCounts::default();
    }

    /// Puts `slot` on the free list, where it is the next to be taken.
    pub(super) fn free(&mut self, slot: u32) {
        let first = self.free_slot;
        self.append_free(slot);
        if first != NONE {
            let tail = self.slot_word(slot, PREVIOUS);
            self.set_slot_word(tail, NEXT, NONE);
            self.set_slot_word(slot, NEXT, first);
        }
        self.free_slot = slot;
    }

    /// Puts `slot` on the free list, where it is the last to be taken. The first one's `PREVIOUS` is the last.
    fn append_free(&mut self, slot: u32) {
        let first = self.free_slot;
        let last = if first == NONE { slot } else { self.slot_word(first, PREVIOUS) };
        self.set_slot_word(slot, PREVIOUS, last);
        self.set_slot_word(slot, NEXT, NONE);
        if first == NONE {
            self.free_slot = slot;
        } else {
            self.set_slot_word(last, NEXT, slot);
            self.set_slot_word(first, PREVIOUS, slot);
        }
        self.counts.free += 1;
    }

    /// Takes `slot` off the free list.
    pub(super) fn take_free(&mut self, slot: u32) {
        let (previous, next) = (self.slot_word(slot, PREVIOUS), self.slot_word(slot, NEXT));
        if slot == self.free_slot {
            self.free_slot = next;
        } else {
            self.set_slot_word(previous, NEXT, next);
        }
        match (next, self.free_slot) {
            (NONE, NONE) => {}
            (NONE, first) => self.set_slot_word(first, PREVIOUS, previous),
            (next, _) => self.set_slot_word(next, PREVIOUS, previous),
        }
        self.counts.free -= 1;
    }

    pub(super) fn rebuild_free_list(&mut self) {
        self.free_slot = NONE;
        self.counts.free = 0;
        self.counts.draining = 0;
        for slot in 0..self.capacity {
            match self.slot_word(slot, META) {
                0 => self.append_free(slot),
                meta if meta & USED == 0 => self.counts.draining += 1,
                _ => {}
            }
        }
    }
}
