//! State of each disk number that the engine keeps for a successor of its process: whether a disk has it, the disk's size,
//! a failed flush, and the swap areas.
//!
//! ```text
//! disk: errno of the failed flush, state, first void granule, bytes x2, number of areas, (first block x2, last page) x8
//! ```
//! Blocks of a number that no disk has, and blocks from the first void granule on, are *void*: they mean nothing, are not
//! looked up, and are forgotten bit by bit (`voids.rs`). One store makes them void. Swap areas are hints (decision 0016).

use super::layout::{
    AREA_WORDS, AREAS, BLOCK_LIMIT, DISK_WORDS, GRANULE_BLOCKS, HEADER_WORDS, Layout, NONE, SWAP_AREAS_MAX, Words,
    long, set_long, settle,
};
use crate::units::{BlockId, DiskIndex};
use std::ops::Range;

const ERRNO: usize = 0;
const STATE: usize = 1;
const VOID: usize = 2;
const BYTES: usize = 3;
const COUNT: usize = 5;

const PRESENT: u32 = 1;
const LEAVING: u32 = 2;

/// Whether a disk has a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskState {
    /// The number is free.
    Absent,
    /// A disk of this size has the number.
    Present { bytes: u64 },
    /// The disk was removed. The number is not free before every trace of it is gone.
    Leaving,
}

/// Words of all disk numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiskWords {
    disks: u16,
}

impl DiskWords {
    pub(super) fn new(layout: &Layout) -> Self {
        Self { disks: layout.disks() }
    }

    /// Returns all disk numbers.
    pub(super) fn numbers(self) -> impl DoubleEndedIterator<Item = DiskIndex> {
        (0..self.disks).map(DiskIndex)
    }

    fn at(self, disk: DiskIndex) -> usize {
        assert!(disk.0 < self.disks, "a disk that the index was not made for");
        HEADER_WORDS + usize::from(disk.0) * DISK_WORDS
    }

    /// Returns whether a disk has the number `disk`.
    pub(super) fn state<M: Words>(self, words: &M, disk: DiskIndex) -> DiskState {
        let at = self.at(disk);
        match words[at + STATE] {
            PRESENT => DiskState::Present { bytes: long(words, at + BYTES) },
            LEAVING => DiskState::Leaving,
            _ => DiskState::Absent,
        }
    }

    /// Gives a free number to a disk of `bytes` bytes.
    pub(super) fn take_up<M: Words>(self, words: &mut M, disk: DiskIndex, bytes: u64) {
        let at = self.at(disk);
        words[at + STATE] = 0;
        settle();
        words[at + VOID] = NONE;
        words[at + COUNT] = 0;
        self.set_bytes(words, disk, bytes);
        settle();
        words[at + STATE] = PRESENT;
    }

    /// Sets the size of a disk.
    pub(super) fn set_bytes<M: Words>(self, words: &mut M, disk: DiskIndex, bytes: u64) {
        set_long(words, self.at(disk) + BYTES, bytes);
    }

    /// Makes all blocks of `disk` void, and marks it as leaving.
    pub(super) fn begin_leaving<M: Words>(self, words: &mut M, disk: DiskIndex) {
        let at = self.at(disk);
        words[at + STATE] = LEAVING;
    }

    /// Frees a number, whose blocks must be forgotten. The record of a failed flush stays.
    pub(super) fn release<M: Words>(self, words: &mut M, disk: DiskIndex) {
        settle();
        let at = self.at(disk);
        words[at + STATE] = 0;
    }

    /// Makes the blocks of `disk` void from the granule of block `bno` on. Returns the first void block.
    pub(super) fn cut<M: Words>(self, words: &mut M, disk: DiskIndex, bno: u64) -> u64 {
        let at = self.at(disk) + VOID;
        let granule = u32::try_from(bno / GRANULE_BLOCKS).unwrap_or(NONE).min(words[at]);
        words[at] = granule;
        u64::from(granule) * GRANULE_BLOCKS
    }

    /// Returns the first void block of `disk`, or `None` if it is not being cut.
    pub(super) fn first_void<M: Words>(self, words: &M, disk: DiskIndex) -> Option<u64> {
        let granule = words[self.at(disk) + VOID];
        (granule != NONE).then(|| u64::from(granule) * GRANULE_BLOCKS)
    }

    /// Ends all cuts: no void block is left.
    pub(super) fn end_cuts<M: Words>(self, words: &mut M) {
        settle();
        for disk in self.numbers() {
            let at = self.at(disk) + VOID;
            if words[at] != NONE {
                words[at] = NONE;
            }
        }
    }

    /// Ends all cuts and frees the numbers of all disks that were removed: no void block is left.
    pub(super) fn end_voids<M: Words>(self, words: &mut M) {
        self.end_cuts(words);
        for disk in self.numbers() {
            if self.state(words, disk) == DiskState::Leaving {
                self.release(words, disk);
            }
        }
    }

    /// Returns whether any block may be void.
    pub(super) fn has_voids<M: Words>(self, words: &M) -> bool {
        self.numbers().any(|disk| match self.state(words, disk) {
            DiskState::Absent => false,
            DiskState::Present { .. } => self.first_void(words, disk).is_some(),
            DiskState::Leaving => true,
        })
    }

    /// Returns whether a block is void.
    #[inline]
    pub(super) fn is_void<M: Words>(self, words: &M, block: BlockId) -> bool {
        if block.disk.0 >= self.disks {
            return true;
        }
        let at = self.at(block.disk);
        words[at + STATE] != PRESENT || block.bno.0 / GRANULE_BLOCKS >= u64::from(words[at + VOID])
    }

    /// Replaces the words of all disks: the disk that has the number `there` in `old` gets the number `here`, for each pair.
    pub(super) fn renumber<M: Words>(self, words: &mut M, old: &[u32], pairs: &[(DiskIndex, DiskIndex)]) {
        let range = |disk: DiskIndex| self.at(disk)..self.at(disk) + DISK_WORDS;
        self.numbers().for_each(|disk| words[range(disk)].fill(0));
        for (there, here) in pairs.iter().filter(|(there, _)| there.0 < self.disks) {
            words[range(*here)].copy_from_slice(&old[range(*there)]);
        }
    }

    /// Returns whether each disk of `pairs` has one number, there and here, and the words hold nothing about any other.
    pub(super) fn keep_numbers<M: Words>(self, words: &M, pairs: &[(DiskIndex, DiskIndex)]) -> bool {
        let is_unused = |disk| self.state(words, disk) == DiskState::Absent && self.flush_failed(words, disk).is_none();
        pairs.iter().all(|(there, here)| there == here)
            && self.numbers().all(|disk| pairs.contains(&(disk, disk)) || is_unused(disk))
    }

    /// Returns the errno of the failed flush of `disk`, or `None` if no failure is recorded.
    pub(super) fn flush_failed<M: Words>(self, words: &M, disk: DiskIndex) -> Option<i32> {
        let errno = words[self.at(disk) + ERRNO].cast_signed();
        (errno != 0).then_some(errno)
    }

    /// Records the errno of a failed flush of `disk`. `None` clears the record.
    pub(super) fn set_flush_failed<M: Words>(self, words: &mut M, disk: DiskIndex, errno: Option<i32>) {
        let at = self.at(disk) + ERRNO;
        words[at] = errno.unwrap_or(0).cast_unsigned();
    }

    /// Returns the swap areas of `disk`.
    pub(super) fn swap_areas<M: Words>(self, words: &M, disk: DiskIndex) -> Vec<Range<u64>> {
        let at = self.at(disk);
        let count = (words[at + COUNT] as usize).min(SWAP_AREAS_MAX);
        let area = |i: usize| {
            let at = at + AREAS + i * AREA_WORDS;
            let start = long(words, at);
            start..start.saturating_add(u64::from(words[at + 2])).saturating_add(1)
        };
        (0..count).map(area).filter(|area| area.start < BLOCK_LIMIT).collect()
    }

    /// Stores the first [`SWAP_AREAS_MAX`] of the swap areas of `disk`. Each must have at least one block.
    pub(super) fn set_swap_areas<'a, M: Words>(
        self,
        words: &mut M,
        disk: DiskIndex,
        areas: impl Iterator<Item = &'a Range<u64>>,
    ) {
        let at = self.at(disk);
        let mut count = 0;
        for (i, area) in areas.take(SWAP_AREAS_MAX).enumerate() {
            let at = at + AREAS + i * AREA_WORDS;
            set_long(words, at, area.start);
            words[at + 2] = u32::try_from(area.end - area.start - 1).expect("the last page of an area has 32 bits");
            count += 1;
        }
        words[at + COUNT] = count;
    }
}
