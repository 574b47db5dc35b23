//! Parts of the index other than blocks and pages: the pools, with their numbers of usable slots and the sends to them, and
//! some words of each disk.

use super::layout::header;
use super::log::Lost;
use super::slots::Step;
use super::table::BATCH;
use super::{CacheIndex, Layout, LogEnd, Pool, SlotCounts, Words};
use crate::units::{DiskIndex, PageCount, PoolIndex, SlotIndex};
use std::ops::Range;

/// Move of a shrink: the server must copy page `from` to slot `to`. The numbers are those of its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    pub from: SlotIndex,
    pub to: SlotIndex,
}

impl<M: Words> CacheIndex<M> {
    // The number of usable slots.

    /// Returns the number of slots of a pool that are free, used or draining. While pages are [lost](Self::lose_from), not all
    /// of them are usable.
    pub fn capacity(&self, pool: PoolIndex) -> PageCount {
        PageCount(self.slots.pool_capacity(pool))
    }

    /// Returns the number of slots of a pool that have not [lost](Self::lose_from) their page.
    pub fn kept_capacity(&self, pool: PoolIndex) -> PageCount {
        PageCount(self.slots.pool_kept(pool))
    }

    /// Returns the number of slots of all pools that are free, used or draining.
    pub fn total_capacity(&self) -> PageCount {
        PageCount(self.slots.capacity())
    }

    /// Returns the numbers of free, used and draining slots of a pool.
    pub fn pool_slot_counts(&self, pool: PoolIndex) -> SlotCounts {
        self.slots.pool_counts(pool)
    }

    /// Sets the capacity of a pool that [`Self::resize`] works towards.
    pub fn aim(&mut self, pool: PoolIndex, capacity: PageCount) {
        self.slots.aim(pool, capacity.0);
    }

    /// Marks the pages of all slots of a pool from `slots` on as lost, because the server no longer has them. Look-ups no
    /// longer find these pages.
    pub fn lose_from(&mut self, pool: PoolIndex, slots: PageCount) {
        self.slots.lose_from(&mut self.words, pool, slots.0);
    }

    /// Returns whether [`Self::resize`] has work left in any pool.
    pub fn is_resizing(&self) -> bool {
        PoolIndex::all().any(|pool| self.is_pool_resizing(pool))
    }

    /// Returns whether [`Self::resize`] has work left in a pool.
    pub fn is_pool_resizing(&self, pool: PoolIndex) -> bool {
        self.slots.is_resizing(pool)
    }

    /// Returns whether any pool is still becoming smaller or larger: [`Self::resize`] has work left, or a page on its way keeps a chunk of
    /// slots that the pool gives back after it.
    pub fn is_settling(&self) -> bool {
        PoolIndex::all().any(|pool| self.slots.is_settling(pool))
    }

    /// Returns the number of chunks of slots that no pool has.
    pub fn free_chunks(&self) -> usize {
        self.slots.free_chunks()
    }

    /// Returns the least number of slots of a layout that this index can move to.
    pub fn least_slots(&self) -> PageCount {
        self.layout.slots_with_chunks(self.slots.chunks_needed())
    }

    /// Returns the layout of other sizes that this index can move to, if they are not less than [`Self::least_slots`]. Chunks are as
    /// large as in a new index of that size if no pool has one, and otherwise as they are.
    pub fn layout_for(&self, slots: PageCount, resident: PageCount) -> Layout {
        if self.slots.have_chunks() {
            self.layout.resized(slots, resident)
        } else {
            Layout::new(slots, resident, self.layout.disks())
        }
    }

    /// Works towards the wanted capacity of a pool by processing at most `slots` slots, and the rest of a chunk that may be given back.
    /// A shrink discards pages from the head of the queue until the others fit. Pages beyond the wanted capacity move to free slots
    /// below it, each with one call of `moves`.
    pub fn resize(&mut self, pool: PoolIndex, slots: u32, mut moves: impl FnMut(Move)) {
        let mut left = slots;
        while left > 0 {
            let mut processed = 1;
            match self.slots.step(&mut self.words, pool) {
                Step::Done => return,
                Step::Taken => {}
                Step::Discard(slot) => self.discard(slot),
                Step::CutOff(last) => {
                    if (last + 1).is_multiple_of(BATCH) {
                        self.prefetch_losses(last, left.min(BATCH));
                    }
                    self.lose(last);
                    self.slots.cut_off(&mut self.words, pool, last);
                }
                Step::GiveBack { first, examined } => {
                    self.follow_chunk(first);
                    processed = examined;
                }
                Step::Add(slot) => {
                    self.lose(slot);
                    self.follow_chunk(slot);
                    self.slots.add(&mut self.words, pool, slot);
                }
                Step::Move { from, to } => {
                    if self.is_doomed(from) {
                        self.remove_block(from);
                    }
                    let places = [from, to].map(|slot| self.slots.place(&self.words, slot));
                    self.log.note_move(&mut self.words, pool, to);
                    self.slots.end_move(&mut self.words, pool, from, to);
                    self.follow_slot(from);
                    self.follow_slot(to);
                    if let [Some((_, from)), Some((_, to))] = places {
                        moves(Move { from: SlotIndex(from), to: SlotIndex(to) });
                    }
                }
            }
            self.follow_changes();
            left = left.saturating_sub(processed);
        }
    }

    // The pools, and the sends to them.

    /// Returns the pool of this number that slots describe, or `None` if there is none.
    pub fn pool(&self, number: PoolIndex) -> Option<Pool> {
        self.log.pool(&self.words, number)
    }

    /// Returns the pools that slots describe, with their numbers.
    pub fn pools(&self) -> impl Iterator<Item = (PoolIndex, Pool)> + '_ {
        PoolIndex::all().filter_map(|number| Some((number, self.pool(number)?)))
    }

    /// Returns the number of the pool at a memory server, or `None` if no slots describe one.
    pub fn pool_of(&self, server: u32) -> Option<PoolIndex> {
        self.pools().find(|(_, pool)| pool.server == server).map(|(number, _)| number)
    }

    /// Returns the lowest number that a new pool may have, or `None` if all are taken. That of an earlier pool is free after
    /// the last of its slots is given up.
    pub fn free_pool(&self) -> Option<PoolIndex> {
        let is_free = |number: &PoolIndex| self.pool(*number).is_none() && !self.slots.has_chunks(*number);
        PoolIndex::all().find(is_free)
    }

    /// Sets the pool that the slots of a number describe from now on, and empties its log of sends. The pool has received
    /// `sends` pages so far.
    pub fn begin_pool(&mut self, number: PoolIndex, pool: Pool, sends: u64) {
        self.log.begin_pool(&mut self.words, number, pool, sends);
    }

    /// Drops a pool with all its pages. Its slots are given up as [`Self::resize`] processes them; then its number is free.
    pub fn drop_pool(&mut self, number: PoolIndex) {
        self.lose_from(number, PageCount(0));
        self.aim(number, PageCount(0));
        self.log.end_pool(&mut self.words, number);
    }

    /// Drops all pages of a pool. Its slots become usable again as [`Self::resize`] processes them.
    pub fn drop_slots_of(&mut self, number: PoolIndex) {
        self.slots.clear_pool(&mut self.words, number);
    }

    /// Returns the pool of a slot, and the number of the slot at its server. Returns `None` if no pool has the slot.
    #[inline]
    pub fn place_of(&self, slot: SlotIndex) -> Option<(PoolIndex, SlotIndex)> {
        self.slots.place(&self.words, slot.0).map(|(pool, local)| (pool, SlotIndex(local)))
    }

    /// Returns the number of SENDPAGEs for a pool since it started.
    pub fn sends(&self, pool: PoolIndex) -> u64 {
        self.log.sends(&self.words, pool)
    }

    /// Returns the current end of a pool's log of sends, for [`Self::note_taken`].
    pub fn log_end(&self, pool: PoolIndex) -> LogEnd {
        self.log.end(&self.words, pool)
    }

    /// Marks everything logged for a pool before `end` as received by its server. Called when the server has answered a
    /// frame that was sent later. Ignores the end of an earlier pool's log.
    pub fn note_taken(&mut self, pool: PoolIndex, end: LogEnd) {
        self.log.note_taken(&mut self.words, pool, end);
    }

    /// Drops the slots of a pool whose page was lost with a connection, and returns the number of dropped slots. `received`
    /// is the number of pages that the pool has received, by its own count on the new connection.
    pub fn give_up_sends(&mut self, pool: PoolIndex, received: u64) -> u64 {
        match self.log.lost(&self.words, pool, received) {
            Lost::All => {
                let lost = self.pool_slot_counts(pool).used;
                self.drop_slots_of(pool);
                u64::from(lost)
            }
            Lost::Slots(lost) => {
                // A slot in the log may have gone to another pool since.
                let own = |slot: &&SlotIndex| self.slots.place(&self.words, slot.0).is_some_and(|(it, _)| it == pool);
                let lost: Vec<_> = lost.iter().filter(own).copied().collect();
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
