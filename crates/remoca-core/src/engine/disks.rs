//! State of each disk outside the index: its size, I/O in flight, discarded blocks, and swap areas.
//!
//! Disks are found by their number. A number is free, a disk has it, or its disk was removed and *leaves*: it takes no
//! requests, and what is known of it is forgotten. The number is free again when its nodes and requests are gone.

use super::discarded::Discarded;
use super::overlap::Overlaps;
use super::swap::SwapAreas;
use super::types::{GuestOp, RequestId};
use crate::index::{CacheIndex, DiskState, Words};
use crate::rules::Rules;
use crate::units::{BlockId, ByteRange, DiskIndex, PAGE_SIZE, PAGE_SIZE_U64, whole_blocks};
use std::ops::Range;

#[derive(Debug, Default)]
struct Disk {
    /// Size; `None` if no disk has the number.
    bytes: Option<u64>,
    /// End of the part of which the index may be believed: the size, or less while something is being forgotten.
    sound_end: u64,
    overlaps: Overlaps,
    discarded: Discarded,
    swap: SwapAreas,
}

/// Disks of a VM.
#[derive(Debug)]
pub(super) struct Disks {
    /// Disks by number, up to the highest number that a disk had.
    disks: Vec<Disk>,
    /// Numbers of disks that were removed and are not free yet.
    leaving: Vec<DiskIndex>,
    rules: Rules,
}

impl Disks {
    pub(super) fn new(rules: Rules) -> Self {
        Self { disks: Vec::new(), leaving: Vec::new(), rules }
    }

    #[inline]
    fn at(&self, disk: DiskIndex) -> &Disk {
        &self.disks[usize::from(disk.0)]
    }

    #[inline]
    fn at_mut(&mut self, disk: DiskIndex) -> &mut Disk {
        &mut self.disks[usize::from(disk.0)]
    }

    /// Restores the disks that are leaving from the index of the previous process.
    pub(super) fn restore<M: Words>(&mut self, index: &CacheIndex<M>) {
        self.leaving = index.disks().filter(|disk| index.disk_state(*disk) == DiskState::Leaving).collect();
    }

    /// Makes a disk of `bytes` bytes ready for requests; `swap` declares all of it a swap area. If the index has a disk
    /// of this number, it is this one.
    ///
    /// # Panics
    /// If the disk that has the number is leaving.
    pub(super) fn describe<M: Words>(&mut self, disk: DiskIndex, bytes: u64, swap: bool, index: &mut CacheIndex<M>) {
        let number = usize::from(disk.0);
        if self.disks.len() <= number {
            self.disks.resize_with(number + 1, Disk::default);
        }
        match index.disk_state(disk) {
            DiskState::Present { .. } if self.disks[number].bytes.is_none() => {
                self.disks[number].swap.restore(index.swap_areas(disk));
            }
            DiskState::Present { .. } => {}
            DiskState::Absent | DiskState::Leaving => {
                index.take_up_disk(disk, bytes);
                self.leaving.retain(|leaving| *leaving != disk);
                self.disks[number] = Disk::default();
            }
        }
        self.resize(disk, bytes, Some(swap), index);
    }

    /// Sets the size of a disk. `swap` declares all of it a swap area, or not; `None` leaves that as it is.
    pub(super) fn resize<M: Words>(
        &mut self,
        disk: DiskIndex,
        bytes: u64,
        swap: Option<bool>,
        index: &mut CacheIndex<M>,
    ) {
        let first_void = index.resize_disk(disk, bytes);
        let state = self.at_mut(disk);
        if state.bytes.is_some_and(|old| bytes < old) {
            // What these I/Os transfer may lie beyond the end by now.
            state.overlaps.taint_all();
        }
        state.bytes = Some(bytes);
        state.sound_end = sound_end(bytes, first_void);
        state.swap.describe(whole_blocks(bytes), swap.unwrap_or(state.swap.is_declared()));
        self.keep_swap_areas(disk, index);
    }

    /// Begins to forget everything about a disk, also what I/O in flight will transfer.
    pub(super) fn distrust<M: Words>(&mut self, disk: DiskIndex, index: &mut CacheIndex<M>) {
        if matches!(index.disk_state(disk), DiskState::Present { .. }) {
            index.cut_disk(disk, 0);
            if let Some(state) = self.disks.get_mut(usize::from(disk.0)) {
                state.sound_end = 0;
                state.overlaps.taint_all();
            }
        }
    }

    /// Lets no I/O in flight set a fingerprint.
    pub(super) fn taint_all(&mut self) {
        self.disks.iter_mut().for_each(|disk| disk.overlaps.taint_all());
    }

    /// Drops all that the index holds, and begins to forget what it knows of all disks. What I/O in flight transfers may be
    /// learnt.
    pub(super) fn forget_all<M: Words>(&mut self, index: &mut CacheIndex<M>) {
        index.drop_everything();
        for (state, disk) in self.disks.iter_mut().zip((0..).map(DiskIndex)) {
            state.sound_end = state.bytes.map_or(0, |bytes| sound_end(bytes, index.first_void(disk)));
        }
    }

    /// Removes a disk: takes no more requests for it, and begins to forget everything about it.
    pub(super) fn remove<M: Words>(&mut self, disk: DiskIndex, index: &mut CacheIndex<M>) {
        index.remove_disk(disk);
        self.leaving.push(disk);
        if let Some(state) = self.disks.get_mut(usize::from(disk.0)) {
            (state.bytes, state.sound_end) = (None, 0);
            state.overlaps.taint_all();
        }
    }

    /// Returns whether the disk has this part.
    #[inline]
    pub(super) fn has(&self, disk: DiskIndex, range: ByteRange) -> bool {
        self.bytes(disk).is_some_and(|bytes| range.end() <= bytes)
    }

    /// Returns whether the index may be believed in this part of the disk.
    #[inline]
    pub(super) fn is_sound(&self, disk: DiskIndex, range: ByteRange) -> bool {
        range.end() <= self.at(disk).sound_end
    }

    /// Returns the size of a disk in bytes, or `None` if no disk has the number.
    #[inline]
    pub(super) fn bytes(&self, disk: DiskIndex) -> Option<u64> {
        self.disks.get(usize::from(disk.0))?.bytes
    }

    /// Believes the index again, after everything that was to be forgotten is.
    pub(super) fn end_cuts(&mut self) {
        self.disks.iter_mut().for_each(|disk| disk.sound_end = disk.bytes.unwrap_or(0));
    }

    /// Returns the numbers of the disks that were removed and are not free yet.
    pub(super) fn leaving(&self) -> &[DiskIndex] {
        &self.leaving
    }

    /// Frees the numbers of removed disks without nodes that no request `uses`.
    pub(super) fn release<M: Words>(&mut self, index: &mut CacheIndex<M>, uses: impl Fn(DiskIndex) -> bool) {
        let (kept, free): (Vec<_>, Vec<_>) = self.leaving.iter().partition(|disk| uses(**disk));
        for disk in free {
            index.release_disk(disk);
            if let Some(state) = self.disks.get_mut(usize::from(disk.0)) {
                let Disk { overlaps, .. } = std::mem::take(state);
                assert!(overlaps.is_empty(), "the disk {} is gone, and I/O of it is in flight", disk.0);
            }
        }
        self.leaving = kept;
    }

    fn keep_swap_areas<M: Words>(&self, disk: DiskIndex, index: &mut CacheIndex<M>) {
        index.set_swap_areas(disk, self.at(disk).swap.areas());
    }

    /// Adds the disk read of a request to the I/O in flight.
    pub(super) fn begin_read(&mut self, disk: DiskIndex, id: RequestId, range: ByteRange) {
        let rules = self.rules;
        self.at_mut(disk).overlaps.begin(rules, id, range.touched_blocks(), false);
    }

    /// Adds `op`, which changes `range`, to the I/O in flight, and taints I/O that it overlaps. Marks blocks as
    /// discarded if `op` is a discard. Forgets swap areas whose header is in `range`.
    pub(super) fn begin_modification<M: Words>(
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

    /// Removes `blocks`, which were written, from the discarded blocks.
    pub(super) fn note_written(&mut self, disk: DiskIndex, blocks: &Range<u64>) {
        self.at_mut(disk).discarded.remove(blocks);
    }

    /// Returns whether the block may have been discarded. If so, each read may return different data.
    pub(super) fn may_be_discarded(&self, block: BlockId) -> bool {
        self.at(block.disk).discarded.contains(block.bno.0)
    }

    /// Looks for headers of swap areas in the blocks of `range`, which hold `data`.
    pub(super) fn note_swap_headers<M: Words>(
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
        self.disks.get(usize::from(disk.0)).map_or(0, |disk| disk.swap.count())
    }

    /// Returns whether the block is in a swap area.
    #[inline]
    pub(super) fn is_swap(&self, block: BlockId) -> bool {
        self.at(block.disk).swap.contains(block.bno.0)
    }
}

/// Returns the end of the part of a disk of `bytes` bytes that lies before the block `first_void`.
fn sound_end(bytes: u64, first_void: Option<u64>) -> u64 {
    first_void.map_or(bytes, |block| bytes.min(block.saturating_mul(PAGE_SIZE_U64)))
}

/// Returns the bytes of block `bno` in the buffer `data` of a request on `range`, and their offset. Returns `None` if
/// the buffer does not hold the whole block.
pub(super) fn page_of(range: ByteRange, bno: u64, data: &[u8]) -> Option<(u32, &[u8])> {
    let offset = u32::try_from(bno * PAGE_SIZE_U64 - range.offset).ok()?;
    Some((offset, data.get(offset as usize..)?.get(..PAGE_SIZE)?))
}
