//! Disks that come, go and change their size. What is known of a disk, or of a part of it, becomes *void* with one store,
//! and is then forgotten bit by bit. So does what is known of all of them when the cache is turned off. Until they are gone, the number of a removed disk is not free, and the
//! engine looks nothing up beyond the cut of the others.

use super::disk_words::DiskState;
use super::layout::{header, settle};
use super::table::BATCH;
use super::{CacheIndex, Words};
use crate::rules::Rule;
use crate::units::{BlockId, BlockNumber, DiskIndex, whole_blocks};
use std::ops::Range;

impl<M: Words> CacheIndex<M> {
    /// Returns all disk numbers.
    pub fn disks(&self) -> impl DoubleEndedIterator<Item = DiskIndex> + use<M> {
        self.disks.numbers()
    }

    /// Returns whether a disk has the number `disk`.
    pub fn disk_state(&self, disk: DiskIndex) -> DiskState {
        self.disks.state(&self.words, disk)
    }

    /// Returns the lowest number that a new disk may have, or `None` if all are taken. The number of a failed flush is
    /// kept for its image.
    pub fn free_disk(&self) -> Option<DiskIndex> {
        self.disks.numbers().find(|disk| self.is_free(*disk) && self.flush_failed(*disk).is_none())
    }

    fn is_free(&self, disk: DiskIndex) -> bool {
        match self.disk_state(disk) {
            DiskState::Absent => true,
            DiskState::Present { .. } => false,
            DiskState::Leaving => !self.rules.hold(Rule::FreeNumber),
        }
    }

    /// Gives a free number to a disk of `bytes` bytes, of which nothing is known.
    ///
    /// # Panics
    /// If the number is not free.
    pub fn take_up_disk(&mut self, disk: DiskIndex, bytes: u64) {
        assert!(self.is_free(disk), "the number {} is not free", disk.0);
        self.disks.take_up(&mut self.words, disk, bytes);
    }

    /// Sets the size of a disk. If it is larger than before, forgets the block that its end was in, and otherwise all
    /// blocks from the new end on. Returns the first void block, or `None` if the disk is not being cut.
    ///
    /// # Panics
    /// If no disk has the number.
    pub fn resize_disk(&mut self, disk: DiskIndex, bytes: u64) -> Option<u64> {
        let DiskState::Present { bytes: old } = self.disk_state(disk) else {
            panic!("no disk has the number {}", disk.0)
        };
        let end = BlockNumber(whole_blocks(bytes.min(old)));
        if bytes > old {
            self.forget(BlockId { disk, bno: end });
        } else if bytes < old && self.rules.hold(Rule::ForgetCut) {
            self.cut_disk(disk, end.0);
        }
        self.disks.set_bytes(&mut self.words, disk, bytes);
        self.first_void(disk)
    }

    /// Makes what is known of `disk` from block `bno` on void, rounded down to 1 MiB. Returns the first void block.
    pub fn cut_disk(&mut self, disk: DiskIndex, bno: u64) -> u64 {
        let former = self.first_void(disk);
        let first = self.disks.cut(&mut self.words, disk, bno);
        if former != Some(first) || !self.is_cutting() {
            self.uncut = self.entries.limit();
        }
        first
    }

    /// Makes what is known of all disks void.
    pub(super) fn cut_all_disks(&mut self) {
        let is_void = |disk| self.is_void(BlockId { disk, bno: BlockNumber(0) });
        if self.is_cutting() && self.disks.numbers().all(is_void) {
            // Nothing was learnt since, so the pass need not begin again. Or it would never end if that is asked for often.
            return;
        }
        self.uncut = self.entries.limit();
        // A process that is killed before the last disk is void leaves nothing that is known.
        self.words[header::BLOCKS_VALID] = 0;
        settle();
        for disk in self.disks.numbers() {
            self.disks.cut(&mut self.words, disk, 0);
        }
        settle();
        self.words[header::BLOCKS_VALID] = 1;
    }

    /// Returns the first void block of `disk`, or `None` if it is not being cut.
    pub fn first_void(&self, disk: DiskIndex) -> Option<u64> {
        self.disks.first_void(&self.words, disk)
    }

    /// Makes all that is known of `disk` void. Its number is free after [`Self::release_disk`].
    pub fn remove_disk(&mut self, disk: DiskIndex) {
        self.uncut = self.entries.limit();
        self.disks.begin_leaving(&mut self.words, disk);
    }

    /// Frees the number of a disk that was removed. The record of its failed flush stays.
    ///
    /// # Panics
    /// If the disk was not removed, or void blocks are left.
    pub fn release_disk(&mut self, disk: DiskIndex) {
        assert_eq!(self.disk_state(disk), DiskState::Leaving, "the disk {} was not removed", disk.0);
        assert!(!self.is_cutting(), "the number {} is freed before its blocks are forgotten", disk.0);
        self.disks.release(&mut self.words, disk);
    }

    /// Returns whether [`Self::cut`] has work left.
    pub fn is_cutting(&self) -> bool {
        self.uncut > 0
    }

    /// Examines the next `entries` entries, and forgets their blocks if they are void.
    pub fn cut(&mut self, entries: u32) {
        let first = self.entries.limit() - self.uncut;
        let end = first.saturating_add(entries).min(self.entries.limit());
        for from in (first..end).step_by(BATCH as usize) {
            let batch = from..from.saturating_add(BATCH).min(end);
            self.touch_void(batch.clone());
            for entry in batch {
                if self.has_void_block(entry) {
                    self.forget_entry(entry);
                }
            }
        }
        self.uncut = self.uncut.saturating_sub(entries);
        if self.uncut == 0 {
            self.disks.end_cuts(&mut self.words);
        }
    }

    /// Begins to load the lines of the entries of a batch whose block is void, so that the loads overlap.
    fn touch_void(&self, batch: Range<u32>) {
        let void = batch.filter(|entry| self.has_void_block(*entry));
        void.for_each(|entry| self.entries.touch(&self.words, entry));
    }

    fn has_void_block(&self, entry: u32) -> bool {
        self.entries.block(&self.words, entry).is_some_and(|block| self.is_void(block))
    }

    /// Returns whether what the index holds about a block means nothing.
    pub(super) fn is_void(&self, block: BlockId) -> bool {
        self.disks.is_void(&self.words, block)
    }

    /// Returns whether the block of an entry is void and not forgotten yet. Such a block must not move to another entry:
    /// [`Self::cut`] may have examined that one already, and would leave the block there as if it were known.
    pub(super) fn is_doomed(&self, entry: u32) -> bool {
        self.is_cutting() && self.has_void_block(entry)
    }

    /// Starts to look for void blocks in the whole table, if there may be any.
    pub(super) fn look_for_voids(&mut self) {
        self.uncut = if self.disks.has_voids(&self.words) { self.entries.limit() } else { 0 };
    }
}
