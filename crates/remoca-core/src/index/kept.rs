//! Parts of the index beside blocks and pages: the number of usable slots, the pool with the sends to it, and some words of
//! each disk.

use super::log::Lost;
use super::slots::Step;
use super::{CacheIndex, LogEnd, Pool, Words};
use crate::units::{DiskIndex, PageCount, SlotIndex};
use std::ops::Range;

/// Move of a shrink: the server must copy page `from` to slot `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    pub from: SlotIndex,
    pub to: SlotIndex,
}

impl<M: Words> CacheIndex<M> {
    // The number of usable slots.

    /// Returns the number of slots that are free, used or draining. While pages are [lost](Self::lose_from), not all of them
    /// are usable.
    pub fn capacity(&self) -> PageCount {
        PageCount(self.slots.capacity())
    }

    /// Sets the capacity that [`Self::resize`] works towards.
    pub fn aim(&mut self, capacity: PageCount) {
        self.slots.aim(capacity.0);
    }

    /// Gives up the pages of all slots from `slots` on, which the server no longer has. None of them is found after this.
    pub fn lose_from(&mut self, slots: PageCount) {
        self.slots.lose_from(&mut self.words, slots.0);
    }

    /// Returns whether [`Self::resize`] has something to do.
    pub fn is_resizing(&self) -> bool {
        self.slots.are_resizing()
    }

    /// Works towards the wanted capacity by processing at most `slots` slots. A shrink gives up the oldest pages that do not
    /// fit. The others move to free slots further down, each with a call of `moves`.
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

    // The pool, and the sends to it.

    /// Returns the pool that the slots describe, if there is one.
    pub fn pool(&self) -> Option<Pool> {
        self.log.pool(&self.words)
    }

    /// Begins a pool that has stored `sends` pages, with an empty log. From now on the slots describe this pool.
    pub fn begin_pool(&mut self, pool: Pool, sends: u64) {
        self.log.begin_pool(&mut self.words, pool, sends);
    }

    /// Returns the number of SENDPAGEs for this pool since it started.
    pub fn sends(&self) -> u64 {
        self.log.sends(&self.words)
    }

    /// Returns the current end of the log of sends, for [`Self::note_taken`].
    pub fn log_end(&self) -> LogEnd {
        self.log.end(&self.words)
    }

    /// Notes that the server has received everything logged before `end`, because it answered something sent later.
    pub fn note_taken(&mut self, end: LogEnd) {
        self.log.note_taken(&mut self.words, end);
    }

    /// Gives up the slots whose page was lost with a connection, and returns their number. `received` is the number of pages
    /// that the pool has stored, by its own count on a new connection.
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

    /// Sets the errno of the flush of `disk` that failed; `None` clears it, for a disk that was replaced.
    pub fn set_flush_failed(&mut self, disk: DiskIndex, errno: Option<i32>) {
        self.disks.set_flush_failed(&mut self.words, disk, errno);
    }

    /// Returns the swap areas of `disk`.
    pub fn swap_areas(&self, disk: DiskIndex) -> Vec<Range<u64>> {
        self.disks.swap_areas(&self.words, disk)
    }

    /// Sets the swap areas of `disk`, each with at least one block.
    pub fn set_swap_areas<'a>(&mut self, disk: DiskIndex, areas: impl Iterator<Item = &'a Range<u64>>) {
        self.disks.set_swap_areas(&mut self.words, disk, areas);
    }
}
