//! Parts of the index other than blocks and pages: the number of usable slots, the pool with the sends to it, and some
//! words of each disk.

use super::layout::header;
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

    /// Marks the pages of all slots from `slots` on as lost, because the server no longer has them. Look-ups no longer
    /// find these pages.
    pub fn lose_from(&mut self, slots: PageCount) {
        self.slots.lose_from(&mut self.words, slots.0);
    }

    /// Returns whether [`Self::resize`] has work left.
    pub fn is_resizing(&self) -> bool {
        self.slots.are_resizing()
    }

    /// Works towards the wanted capacity by processing at most `slots` slots. A shrink discards pages from the head of
    /// the queue until the others fit. Pages beyond the wanted capacity move to free slots below it, each with one call
    /// of `moves`.
    pub fn resize(&mut self, slots: u32, mut moves: impl FnMut(Move)) {
        for _ in 0..slots {
            match self.slots.step(&mut self.words) {
                Step::Done => return,
                Step::Taken => {}
                Step::Discard(slot) => self.discard(slot),
                Step::CutOff(last) => {
                    self.lose(last);
                    self.slots.cut_off(&mut self.words, last);
                }
                Step::Add(slot) => {
                    self.lose(slot);
                    self.slots.add(&mut self.words, slot);
                }
                Step::Move { from, to } => {
                    self.log.note_move(&mut self.words, to);
                    self.slots.end_move(&mut self.words, from, to);
                    self.follow_slot(from);
                    self.follow_slot(to);
                    moves(Move { from: SlotIndex(from), to: SlotIndex(to) });
                }
            }
        }
    }

    // The pool, and the sends to it.

    /// Returns the pool that the slots describe, or `None` if there is none.
    pub fn pool(&self) -> Option<Pool> {
        self.log.pool(&self.words)
    }

    /// Sets the pool that the slots describe from now on, and empties the log of sends. The pool has received `sends`
    /// pages so far.
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

    /// Marks everything logged before `end` as received by the server. Called when the server has answered a frame that
    /// was sent later. Ignores the end of an earlier pool's log.
    pub fn note_taken(&mut self, end: LogEnd) {
        self.log.note_taken(&mut self.words, end);
    }

    /// Drops the slots whose page was lost with a connection, and returns the number of dropped slots. `received` is
    /// the number of pages that the pool has received, by its own count on the new connection.
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

    // The insertion policy.

    /// Returns whether the insertion policy of the previous process was bimodal, and not LRU.
    pub fn is_bimodal(&self) -> bool {
        self.words[header::BIMODAL] == 1
    }

    /// Keeps the insertion policy for a successor.
    pub fn set_bimodal(&mut self, is_bimodal: bool) {
        self.words[header::BIMODAL] = u32::from(is_bimodal);
    }

    // Disks.

    /// Returns the errno of the failed flush of `disk`, or `None` if no failure is recorded.
    pub fn flush_failed(&self, disk: DiskIndex) -> Option<i32> {
        self.disks.flush_failed(&self.words, disk)
    }

    /// Records the errno of a failed flush of `disk`. `None` clears the record, for a disk that was replaced.
    pub fn set_flush_failed(&mut self, disk: DiskIndex, errno: Option<i32>) {
        self.disks.set_flush_failed(&mut self.words, disk, errno);
    }

    /// Returns the swap areas of `disk`.
    pub fn swap_areas(&self, disk: DiskIndex) -> Vec<Range<u64>> {
        self.disks.swap_areas(&self.words, disk)
    }

    /// Sets the swap areas of `disk`. Each must have at least one block.
    pub fn set_swap_areas<'a>(&mut self, disk: DiskIndex, areas: impl Iterator<Item = &'a Range<u64>>) {
        self.disks.set_swap_areas(&mut self.words, disk, areas);
    }
}
