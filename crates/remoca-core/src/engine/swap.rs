//! Swap areas, where a write is an eviction. They are recognised by Linux's signature, or declared.
//!
//! ```text
//! page 0 of an area: .. 1024: version u32 (1) | last page u32 | bad pages u32 | .. 4086: "SWAPSPACE2"
//! ```
//! Page 0 is examined whenever a disk I/O transfers it, and an area whose first page changes is forgotten. A mistake
//! here costs hits and is never unsafe: content decides what is admitted. A swap file is assumed to be contiguous;
//! parts of it that lie elsewhere are handled like any other file. Decision 0016.

use crate::index::SWAP_AREAS_MAX;
use crate::units::PAGE_SIZE;
use std::collections::VecDeque;
use std::ops::Range;

const SIGNATURE: &[u8; 10] = b"SWAPSPACE2";
const VERSION: u32 = 1;

/// Swap areas of one disk.
#[derive(Debug)]
pub(super) struct SwapAreas {
    blocks: u64,
    declared: bool,
    /// Blocks from the header to the last page of each area, oldest first. One area too many pushes out the oldest.
    areas: VecDeque<Range<u64>>,
}

impl Default for SwapAreas {
    fn default() -> Self {
        Self { blocks: u64::MAX, declared: false, areas: VecDeque::new() }
    }
}

impl SwapAreas {
    /// Returns whether block `bno` is in an area.
    #[inline]
    pub(super) fn contains(&self, bno: u64) -> bool {
        // Most disks have none.
        self.declared || !self.areas.is_empty() && self.is_in_area(bno)
    }

    fn is_in_area(&self, bno: u64) -> bool {
        self.areas.iter().any(|area| area.start < bno && bno < area.end)
    }

    /// Sets the number of blocks of the disk, and whether all of them are a swap area. Forgets areas that end beyond
    /// the disk.
    pub(super) fn describe(&mut self, blocks: u64, declared: bool) {
        (self.blocks, self.declared) = (blocks, declared);
        self.areas.retain(|area| area.end <= blocks);
    }

    /// Returns whether the whole disk is a swap area.
    pub(super) fn is_declared(&self) -> bool {
        self.declared
    }

    /// Returns the recognised areas, oldest first.
    pub(super) fn areas(&self) -> impl Iterator<Item = &Range<u64>> {
        self.areas.iter()
    }

    /// Sets the areas to those that the previous process recognised.
    pub(super) fn restore(&mut self, areas: Vec<Range<u64>>) {
        self.areas = areas.into();
    }

    /// Forgets areas whose header is among `blocks`, which are about to change. Returns whether there were any.
    pub(super) fn forget(&mut self, blocks: &Range<u64>) -> bool {
        let count = self.areas.len();
        self.areas.retain(|area| !blocks.contains(&area.start));
        self.areas.len() < count
    }

    /// Looks for the header of a swap area in `page`, the content of block `bno`. Returns whether the areas have
    /// changed.
    pub(super) fn note(&mut self, bno: u64, page: &[u8]) -> bool {
        let area = last_page(page).and_then(|last| Some(bno..bno.checked_add(u64::from(last))?.checked_add(1)?));
        let area = area.filter(|area| area.end <= self.blocks);
        let forgotten = self.forget(&(bno..bno + 1));
        let is_new = area.is_some();
        if let Some(area) = area {
            if self.areas.len() == SWAP_AREAS_MAX {
                self.areas.pop_front();
            }
            self.areas.push_back(area);
        }
        forgotten || is_new
    }

    /// Returns the number of areas. A disk that is declared a swap area adds one.
    pub(super) fn count(&self) -> usize {
        self.areas.len() + usize::from(self.declared)
    }
}

/// Returns the number of the last page of a swap area from its header page, or `None` if `page` is not a valid header.
fn last_page(page: &[u8]) -> Option<u32> {
    let word = |at: usize| Some(u32::from_le_bytes(*page.get(at..)?.first_chunk()?));
    let is_header = page.get(PAGE_SIZE - SIGNATURE.len()..) == Some(SIGNATURE) && word(1024) == Some(VERSION);
    word(1028).filter(|last| is_header && *last > 0)
}
