//! What the number of usable slots becomes, and what is left to be done for that.

use super::layout::NONE;
use std::ops::Range;

/// Chain heads that are cleared in place of looking at one slot: two pages of memory.
const HEADS_PER_STEP: u32 = 2048;

/// What the capacity becomes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizing {
    /// Wanted capacity.
    wanted: u32,
    /// First slot whose page is lost; `NONE` unless some are below the capacity.
    kept: u32,
    /// First slot that has not been looked at in search of a free one.
    spare: u32,
    /// First chain head that is still to be cleared; `NONE` if none is.
    stale_heads: u32,
}

impl Sizing {
    pub(super) fn new() -> Self {
        Self { wanted: 0, kept: NONE, spare: 0, stale_heads: NONE }
    }

    /// Returns the same for a new table of `slots` slots.
    pub(super) fn within(self, slots: u32) -> Self {
        Self { wanted: self.wanted.min(slots), stale_heads: NONE, ..self }
    }

    /// Returns the wanted capacity.
    pub(super) fn wanted(&self) -> u32 {
        self.wanted
    }

    /// Sets the wanted capacity. Another one has free slots searched for from the first on.
    pub(super) fn aim(&mut self, wanted: u32) {
        if wanted != self.wanted {
            (self.wanted, self.spare) = (wanted, 0);
        }
    }

    /// Loses the pages of all slots from `slots` on.
    pub(super) fn lose_from(&mut self, slots: u32) {
        self.kept = slots;
    }

    /// Ends a loss: all such slots are beyond the capacity.
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

    /// Begins anew with no page in any slot, and with heads of chains that mean nothing.
    pub(super) fn begin_clear(&mut self) {
        *self = Self { kept: NONE, spare: 0, stale_heads: 0, ..*self };
    }

    /// Returns whether heads of chains are to be cleared.
    pub(super) fn has_stale_heads(&self) -> bool {
        self.stale_heads != NONE
    }

    /// Returns the next heads to clear, of `all`.
    pub(super) fn next_stale_heads(&mut self, all: u32) -> Option<Range<u32>> {
        let from = self.stale_heads;
        if from == NONE {
            return None;
        }
        let to = from.saturating_add(HEADS_PER_STEP).min(all);
        self.stale_heads = if to < all { to } else { NONE };
        Some(from..to)
    }

    /// Returns whether there may be a free slot below the wanted capacity. `free`: the first of the free ones.
    pub(super) fn may_find_spare(&self, free: u32) -> bool {
        free < self.wanted || self.spare < self.wanted
    }

    /// Looks at one slot below the wanted capacity, and returns it if it is free.
    pub(super) fn next_spare(&mut self, free: u32, is_free: impl Fn(u32) -> bool) -> Option<u32> {
        if free < self.wanted {
            return Some(free);
        }
        let slot = self.spare;
        self.spare += 1;
        is_free(slot).then_some(slot)
    }
}
