//! State of each disk that the engine keeps for a successor of its process: a failed flush, and the swap areas.
//!
//! ```text
//! disk: errno of the failed flush, number of areas, (first block x2, last page) x8
//! ```
//! Swap areas are hints (decision 0016).

use super::layout::{
    AREA_WORDS, AREAS, BLOCK_LIMIT, DISK_WORDS, HEADER_WORDS, Layout, SWAP_AREAS_MAX, Words, long, set_long,
};
use crate::units::DiskIndex;
use std::ops::Range;

/// Words of all disks.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiskWords {
    disks: u16,
}

impl DiskWords {
    pub(super) fn new(layout: &Layout) -> Self {
        Self { disks: layout.disks() }
    }

    fn at(self, disk: DiskIndex) -> usize {
        assert!(disk.0 < self.disks, "a disk that the index was not made for");
        HEADER_WORDS + usize::from(disk.0) * DISK_WORDS
    }

    /// Returns the errno of the failed flush of `disk`, or `None` if no failure is recorded.
    pub(super) fn flush_failed<M: Words>(self, words: &M, disk: DiskIndex) -> Option<i32> {
        let errno = words[self.at(disk)].cast_signed();
        (errno != 0).then_some(errno)
    }

    /// Records the errno of a failed flush of `disk`. `None` clears the record.
    pub(super) fn set_flush_failed<M: Words>(self, words: &mut M, disk: DiskIndex, errno: Option<i32>) {
        let at = self.at(disk);
        words[at] = errno.unwrap_or(0).cast_unsigned();
    }

    /// Returns the swap areas of `disk`.
    pub(super) fn swap_areas<M: Words>(self, words: &M, disk: DiskIndex) -> Vec<Range<u64>> {
        let at = self.at(disk);
        let count = (words[at + 1] as usize).min(SWAP_AREAS_MAX);
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
        words[at + 1] = count;
    }
}
