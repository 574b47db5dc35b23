//! Disks that come, go and change their size. What is known of them is forgotten bit by bit, by
//! [`DiskEngine::handle_timer`]. Decision 0031.

use super::DiskEngine;
use crate::fingerprint::Fingerprint;
use crate::index::{DiskState, Words};
use crate::units::{BlockId, ByteRange, DiskIndex, PAGE_SIZE_U64};

/// Number of entries examined in one turn for each slot that a change of size may process in one turn: both take about as
/// long.
const ENTRIES_PER_SLOT: u32 = 2;

impl<M: Words> DiskEngine<M> {
    /// Makes a disk of `bytes` bytes ready for requests; `swap` declares all of it a swap area. If the index has a disk
    /// of this number, it must be this one, and what is known of it is kept, except where its size has changed. Must be
    /// called once for each disk at the start.
    ///
    /// # Panics
    /// If the disk that has the number is leaving, or `bytes` is above [`DISK_BYTES_MAX`](crate::index::DISK_BYTES_MAX).
    pub fn describe_disk(&mut self, disk: DiskIndex, bytes: u64, swap: bool) {
        if self.disks.bytes(disk).is_none() {
            self.release_disks();
            self.race.reset_disk(disk);
            self.streams.reset_disk(disk);
        }
        self.disks.describe(disk, bytes, swap, &mut self.index);
    }

    /// Adds a disk of `bytes` bytes, of which nothing is known. Returns its number, or `None` if none is free. A number
    /// is free when nothing is left of the disk that had it before.
    pub fn add_disk(&mut self, bytes: u64, swap: bool) -> Option<DiskIndex> {
        self.release_disks();
        let disk = self.index.free_disk()?;
        self.describe_disk(disk, bytes, swap);
        Some(disk)
    }

    /// Removes a disk. From now on every new request for it completes with `EIO`; those in flight go on. The caches of
    /// all other disks stay. Does nothing if no disk has the number.
    pub fn remove_disk(&mut self, disk: DiskIndex) {
        if let DiskState::Present { .. } = self.index.disk_state(disk) {
            self.disks.remove(disk, &mut self.index);
            self.curves.forget(disk);
        }
    }

    /// Sets the size of a disk, before its guest learns of it. What is known of the part that it had and still has is
    /// kept. Does nothing if no disk has the number.
    pub fn resize_disk(&mut self, disk: DiskIndex, bytes: u64) {
        if self.disks.bytes(disk).is_some() {
            self.disks.resize(disk, bytes, None, &mut self.index);
        }
    }

    /// Returns whether a new disk may have the number: nothing is left of the disk that had it, and no flush of that disk
    /// has failed.
    pub fn is_free(&self, disk: DiskIndex) -> bool {
        self.is_unused(disk) && self.index.flush_failed(disk).is_none()
    }

    /// Returns whether nothing is left of the disk that had the number, except perhaps a failed flush.
    pub fn is_unused(&self, disk: DiskIndex) -> bool {
        self.index.disk_state(disk) == DiskState::Absent
    }

    /// Returns whether the index has a disk of this number, described or not.
    pub fn is_known(&self, disk: DiskIndex) -> bool {
        matches!(self.index.disk_state(disk), DiskState::Present { .. })
    }

    /// Forgets all that is void at once, at a start. It examines the whole table.
    pub fn forget_removed(&mut self) {
        self.index.cut(u32::MAX);
        self.disks.end_cuts();
        self.release_disks();
    }

    /// Returns the size of a disk in bytes, or `None` if no disk has the number.
    pub fn disk_bytes(&self, disk: DiskIndex) -> Option<u64> {
        self.disks.bytes(disk)
    }

    /// Returns whether a disk was removed and its number is not free yet.
    pub fn is_leaving(&self, disk: DiskIndex) -> bool {
        self.disks.leaving().contains(&disk)
    }

    /// Returns the number of known swap areas of `disk`.
    pub fn swap_areas(&self, disk: DiskIndex) -> usize {
        self.disks.swap_areas(disk)
    }

    /// Returns the fingerprint of what the disk holds for `block`, or `None` if the block is not known.
    pub fn known(&self, block: BlockId) -> Option<Fingerprint> {
        let range = ByteRange { offset: block.bno.0.checked_mul(PAGE_SIZE_U64)?, length: PAGE_SIZE_U64 };
        self.index.known(block).filter(|_| self.disks.has(block.disk, range) && self.disks.is_sound(block.disk, range))
    }

    /// Drops all that is cached and known, at once if that is little. Otherwise nothing of it is believed from now on, and it is
    /// forgotten in this turn and later ones.
    pub(super) fn forget_everything(&mut self) {
        self.disks.forget_all(&mut self.index);
        self.forget_voids();
        let (used, known) = (self.index.slot_counts().used, self.index.known_blocks().0);
        assert!(used == 0 && (known == 0 || self.index.is_cutting()), "{used} pages and {known} blocks are left");
    }

    fn forget_voids(&mut self) {
        if self.index.is_cutting() {
            self.index.cut(self.pools.slots_per_turn().saturating_mul(ENTRIES_PER_SLOT));
            if !self.index.is_cutting() {
                self.disks.end_cuts();
            }
        }
    }

    /// Continues to forget what is void.
    pub(super) fn forget_disks(&mut self) {
        self.forget_voids();
        if !self.disks.leaving().is_empty() {
            self.release_disks();
        }
    }

    /// Frees the numbers of removed disks of which nothing is left.
    fn release_disks(&mut self) {
        if !self.index.is_cutting() {
            self.disks.release(&mut self.index, |disk| self.requests.has_any_of(disk));
        }
    }
}
