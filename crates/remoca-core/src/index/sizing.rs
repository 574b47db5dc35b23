//! Progress of a change in the number of usable slots.

use super::layout::NONE;
use std::ops::Range;

/// Number of lines of the hash table cleared in one step (two pages of memory). Such a step processes no slot.
const LINES_PER_STEP: u32 = 128;

/// Target of a change of the capacity, and how far it has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizing {
    /// Wanted capacity.
    wanted: u32,
    /// First slot whose page is lost, or `NONE` if no page below the capacity is lost.
    kept: u32,
    /// Next slot to examine in the search for a free one.
    spare: u32,
    /// First line of the hash table that has yet to be cleared, or `NONE` if none has.
    stale_lines: u32,
}

impl Sizing {
    pub(super) fn new() -> Self {
        Self { wanted: 0, kept: NONE, spare: 0, stale_lines: NONE }
    }

    /// Returns this state for a new table of `slots` slots, which has no stale lines.
    pub(super) fn within(self, slots: u32) -> Self {
        Self { wanted: self.wanted.min(slots), stale_lines: NONE, ..self }
    }

    /// Returns the wanted capacity.
    pub(super) fn wanted(&self) -> u32 {
        self.wanted
    }

    /// Sets the wanted capacity. A new value restarts the search for free slots.
    pub(super) fn aim(&mut self, wanted: u32) {
        if wanted != self.wanted {
            (self.wanted, self.spare) = (wanted, 0);
        }
    }

    /// Marks the pages of all slots from `slots` on as lost.
    pub(super) fn lose_from(&mut self, slots: u32) {
        self.kept = slots;
    }

    /// Forgets the loss of pages, once all lost pages are beyond the capacity.
    pub(super) fn end_loss(&mut self) {
        self.kept = NONE;
    }

    /// Returns whether the page of a slot is lost.
    pub(super) fn is_lost(&self, slot: u32) -> bool {
        slot >= self.kept
    }

    /// Returns how many of the first `capacity` slots keep their page.
    pub(super) fn kept_of(&self, capacity: u32) -> u32 {
        capacity.min(self.kept)
    }

    /// Marks all lines of the hash table as stale and forgets the loss of pages, at the start of a clear: no slot keeps its page.
    pub(super) fn begin_clear(&mut self) {
        *self = Self { kept: NONE, spare: 0, stale_lines: 0, ..*self };
    }

    /// Returns whether stale lines are left.
    pub(super) fn has_stale_lines(&self) -> bool {
        self.stale_lines != NONE
    }

    /// Returns the next lines to clear, or `None` if no stale lines are left. `all` is the number of lines.
    pub(super) fn next_stale_lines(&mut self, all: u32) -> Option<Range<u32>> {
        let from = self.stale_lines;
        if from == NONE {
            return None;
        }
        let to = from.saturating_add(LINES_PER_STEP).min(all);
        self.stale_lines = if to < all { to } else { NONE };
        Some(from..to)
    }

    /// Returns whether there may be a free slot below the wanted capacity. `free` is the first slot of the free list.
    pub(super) fn may_find_spare(&self, free: u32) -> bool {
        free < self.wanted || self.spare < self.wanted
    }

    /// Examines at most one slot, and returns it if it is free and below the wanted capacity. Otherwise returns `None`,
    /// and the search continues with the next call.
    pub(super) fn next_spare(&mut self, free: u32, is_free: impl Fn(u32) -> bool) -> Option<u32> {
        if free < self.wanted {
            return Some(free);
        }
        let slot = self.spare;
        self.spare += 1;
        is_free(slot).then_some(slot)
    }
}
