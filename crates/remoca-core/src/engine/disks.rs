//! State of each disk outside the index: I/O in flight, discarded blocks, and swap areas.

use super::discarded::Discarded;
use super::overlap::Overlaps;
use super::swap::SwapAreas;
use super::types::{GuestOp, RequestId};
use crate::index::CacheIndex;
use crate::rules::Rules;
use crate::units::{BlockId, ByteRange, DiskIndex, PAGE_SIZE, PAGE_SIZE_U64};
use std::ops::{DerefMut, Range};

#[derive(Debug, Default)]
struct Disk {
    overlaps: Overlaps,
    discarded: Discarded,
    swap: SwapAreas,
}

/// Disks of a VM.
#[derive(Debug)]
pub(super) struct Disks {
    disks: Vec<Disk>,
    rules: Rules,
}

impl Disks {
    pub(super) fn new(count: u16, rules: Rules) -> Self {
        Self { disks: (0..count).map(|_| Disk::default()).collect(), rules }
    }

    #[inline]
    fn at(&self, disk: DiskIndex) -> &Disk {
        &self.disks[usize::from(disk.0)]
    }

    #[inline]
    fn at_mut(&mut self, disk: DiskIndex) -> &mut Disk {
        &mut self.disks[usize::from(disk.0)]
    }

    /// Restores the swap areas from the index of the previous process.
    pub(super) fn restore<M: DerefMut<Target = [u32]>>(&mut self, index: &CacheIndex<M>) {
        for (number, disk) in (0..).zip(&mut self.disks) {
            disk.swap.restore(index.swap_areas(DiskIndex(number)));
        }
    }

    /// Sets the number of blocks of a disk; `swap` declares all of them a swap area.
    pub(super) fn describe<M>(&mut self, disk: DiskIndex, blocks: u64, swap: bool, index: &mut CacheIndex<M>)
    where
        M: DerefMut<Target = [u32]>,
    {
        self.at_mut(disk).swap.describe(blocks, swap);
        self.keep_swap_areas(disk, index);
    }

    fn keep_swap_areas<M: DerefMut<Target = [u32]>>(&self, disk: DiskIndex, index: &mut CacheIndex<M>) {
        index.set_swap_areas(disk, self.at(disk).swap.areas());
    }

    /// Adds the disk read of a request to the I/O in flight.
    pub(super) fn begin_read(&mut self, disk: DiskIndex, id: RequestId, range: ByteRange) {
        let rules = self.rules;
        self.at_mut(disk).overlaps.begin(rules, id, range.touched_blocks(), false);
    }

    /// Adds `op`, which changes `range`, to the I/O in flight, and taints I/O that it overlaps. Marks blocks as
    /// discarded if `op` is a discard. Forgets swap areas whose header is in `range`.
    pub(super) fn begin_modification<M: DerefMut<Target = [u32]>>(
        &mut self,
        disk: DiskIndex,
        id: RequestId,
        range: ByteRange,
        op: GuestOp,
        index: &mut CacheIndex<M>,
    ) {
        let (rules, blocks) = (self.rules, range.touched_blocks());
        if self.at_mut(disk).swap.forget(&blocks) {
            self.keep_swap_areas(disk, index);
        }
        let disk = self.at_mut(disk);
        if let GuestOp::Discard(_) = op {
            disk.discarded.add(blocks.clone());
        }
        disk.overlaps.begin(rules, id, blocks, true);
    }

    /// Removes the completed disk I/O of a request from the I/O in flight. Returns `true` if it was not tainted, for
    /// example by an overlapping modification.
    pub(super) fn end_io(&mut self, disk: DiskIndex, id: RequestId) -> bool {
        self.at_mut(disk).overlaps.end(id)
    }

    /// Returns whether no disk I/O is in flight.
    #[cfg(test)]
    pub(super) fn are_idle(&self) -> bool {
        self.disks.iter().all(|disk| disk.overlaps.is_empty())
    }

    /// Taints all I/O in flight on `disk`, so that none of it sets a fingerprint.
    pub(super) fn taint_all(&mut self, disk: DiskIndex) {
        self.at_mut(disk).overlaps.taint_all();
    }

    /// Removes `blocks`, which were written, from the discarded blocks.
    pub(super) fn note_written(&mut self, disk: DiskIndex, blocks: &Range<u64>) {
        self.at_mut(disk).discarded.remove(blocks);
    }

    /// Returns whether the block may have been discarded. If so, each read may return different data.
    pub(super) fn may_be_discarded(&self, block: BlockId) -> bool {
        self.at(block.disk).discarded.contains(block.bno.0)
    }

    /// Looks for headers of swap areas in the blocks of `range`, which hold `data`.
    pub(super) fn note_swap_headers<M: DerefMut<Target = [u32]>>(
        &mut self,
        disk: DiskIndex,
        range: ByteRange,
        data: &[u8],
        index: &mut CacheIndex<M>,
    ) {
        for bno in range.covered_blocks() {
            let Some((_, page)) = page_of(range, bno, data) else { return };
            if self.at_mut(disk).swap.note(bno, page) {
                self.keep_swap_areas(disk, index);
            }
        }
    }

    /// Returns the number of known swap areas of `disk`.
    pub(super) fn swap_areas(&self, disk: DiskIndex) -> usize {
        self.at(disk).swap.count()
    }

    /// Returns whether the block is in a swap area.
    #[inline]
    pub(super) fn is_swap(&self, block: BlockId) -> bool {
        self.at(block.disk).swap.contains(block.bno.0)
    }
}

/// Returns the bytes of block `bno` in the buffer `data` of a request on `range`, and their offset. Returns `None` if
/// the buffer does not hold the whole block.
pub(super) fn page_of(range: ByteRange, bno: u64, data: &[u8]) -> Option<(u32, &[u8])> {
    let offset = u32::try_from(bno * PAGE_SIZE_U64 - range.offset).ok()?;
    Some((offset, data.get(offset as usize..)?.get(..PAGE_SIZE)?))
}
