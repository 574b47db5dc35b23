//! What the index keeps beside blocks and pages: how many slots are usable, the pool that they are about with what is on the way
//! there, and some words of each disk.

use super::log::Lost;
use super::slots::Step;
use super::{CacheIndex, LogEnd, Pool, Words};
use crate::units::{DiskIndex, PageCount, SlotIndex};
use std::ops::Range;

/// One move of a shrink: the server is to copy page `from` to slot `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    pub from: SlotIndex,
    pub to: SlotIndex,
}

impl<M: Words> CacheIndex<M> {
    // The number of usable slots.

    /// Returns the number of slots that are free, used or draining now. While pages are [lost](Self::lose_from) not all of them are
    /// usable.
    pub fn capacity(&self) -> PageCount {
        PageCount(self.slots.capacity())
    }

    /// Sets the capacity that [`Self::resize`] works towards.
    pub fn aim(&mut self, capacity: PageCount) {
        self.slots.aim(capacity.0);
    }

    /// Gives up the pages of all slots from `slots` on, which the server does not have any more: none is found after this.
    pub fn lose_from(&mut self, slots: PageCount) {
        self.slots.lose_from(&mut self.words, slots.0);
    }

    /// Returns whether [`Self::resize`] has something to do.
    pub fn is_resizing(&self) -> bool {
        self.slots.are_resizing()
    }

    /// Goes on towards the wanted capacity by looking at no more than `slots` slots. When it shrinks, the oldest pages that do
    /// not fit are given up, and the others move to free slots further down (`moves` tells the server).
    pub fn resize(&mut self, slots: u32, mut moves: impl FnMut(Move)) {
        for _ in 0..slots {
            match self.slots.step(&mut self.words) {
                Step::Done => return,
                Step::Taken => {}
                Step::Discard(slot) => self.discard(slot),
                Step::Move { from, to } => {
                    self.log.note_move(&mut self.words, to);
                    self.slots.end_move(&mut self.words, from, to);
                    moves(Move { from: SlotIndex(from), to: SlotIndex(to) });
                }
            }
        }
    }

    // The pool, and what is on the way there.

    /// Returns the pool that the slots are about, if there is one.
    pub fn pool(&self) -> Option<Pool> {
        self.log.pool(&self.words)
    }

    /// Begins a pool that has stored `sends` pages: the slots are its slots, and nothing is on the way.
    pub fn begin_pool(&mut self, pool: Pool, sends: u64) {
        self.log.begin_pool(&mut self.words, pool, sends);
    }

    /// Returns the number of SENDPAGEs for this pool since it started.
    pub fn sends(&self) -> u64 {
        self.log.sends(&self.words)
    }

    /// Returns how far the log of sends goes now, for [`Self::note_taken`].
    pub fn log_end(&self) -> LogEnd {
        self.log.end(&self.words)
    }

    /// Notes that the server has taken all that was logged before `end`: it answered what was sent after that.
    pub fn note_taken(&mut self, end: LogEnd) {
        self.log.note_taken(&mut self.words, end);
    }

    /// Gives up the slots whose page the pool does not have, which says on another connection that it has stored `received`
    /// pages. Returns how many.
    pub fn give_up_sends(&mut self, received: u64) -> u64 {
        match self.log.lost(&self.words, received) {
            Lost::All => {
                let lost = self.slot_counts().used;
                self.drop_all_slots();
                u64::from(lost)
            }
            Lost::Slots(lost) => {
                lost.iter().for_each(|slot| self.drop_slot(*slot));
                lost.len() as u64
            }
        }
    }

    // Disks.

    /// Returns the errno of the flush of `disk` that failed, if one did.
    pub fn flush_failed(&self, disk: DiskIndex) -> Option<i32> {
        self.disks.flush_failed(&self.words, disk)
    }

    /// Sets the error of the flush of `disk` that failed; `None`: the disk is another one now.
    pub fn set_flush_failed(&mut self, disk: DiskIndex, errno: Option<i32>) {
        self.disks.set_flush_failed(&mut self.words, disk, errno);
    }

    /// Returns the swap areas of `disk`, as they were set.
    pub fn swap_areas(&self, disk: DiskIndex) -> Vec<Range<u64>> {
        self.disks.swap_areas(&self.words, disk)
    }

    /// Sets the swap areas of `disk`, each with at least one block.
    pub fn set_swap_areas<'a>(&mut self, disk: DiskIndex, areas: impl Iterator<Item = &'a Range<u64>>) {
        self.disks.set_swap_areas(&mut self.words, disk, areas);
    }
}
