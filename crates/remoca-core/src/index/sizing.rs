//! Progress of a change in the number of usable slots.

use super::layout::NONE;

/// Target of a change of the capacity, and how far it has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizing {
    /// Wanted capacity.
    wanted: u32,
    /// First slot whose page is lost, or `NONE` if no page below the capacity is lost.
    kept: u32,
    /// Next slot to examine in the search for a free one.
    spare: u32,
}

impl Sizing {
    pub(super) fn new() -> Self {
        Self { wanted: 0, kept: NONE, spare: 0 }
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

    /// Returns how many of the first `capacity` slots keep their page.
    pub(super) fn kept_of(&self, capacity: u32) -> u32 {
        capacity.min(self.kept)
    }

    /// Forgets the loss of pages and restarts the search for free slots, because no slot is usable any more.
    pub(super) fn begin_again(&mut self) {
        *self = Self { kept: NONE, spare: 0, ..*self };
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
