//! Swap areas: where a write is an eviction. They are recognised by Linux's signature, or declared.
//!
//! ```text
//! page 0 of an area: .. 1024: version u32 (1) | last page u32 | bad pages u32 | .. 4086: "SWAPSPACE2"
//! ```
//! The page is looked at when an I/O shows it, and an area whose first page changes is forgotten. To be wrong here costs
//! hits and is never unsafe: content decides what is admitted. A swap file is taken for as contiguous as its header says;
//! what lies elsewhere is written like any file. Called by the engine, for each disk; owns the areas of one. Decision 0016.

use super::{Action, DiskEngine, RequestId};
use crate::fingerprint::Fingerprint;
use crate::index::{Offer, Place, SWAP_AREAS_MAX};
use crate::units::{BlockId, DiskIndex, PAGE_SIZE};
use std::collections::VecDeque;
use std::ops::{DerefMut, Range};

const SIGNATURE: &[u8; 10] = b"SWAPSPACE2";
const VERSION: u32 = 1;

/// The swap areas of one disk.
#[derive(Debug)]
pub(super) struct SwapAreas {
    blocks: u64,
    declared: bool,
    /// From the block with the header to the last page; with one too many the oldest is forgotten.
    areas: VecDeque<Range<u64>>,
}

impl Default for SwapAreas {
    fn default() -> Self {
        Self { blocks: u64::MAX, declared: false, areas: VecDeque::new() }
    }
}

impl SwapAreas {
    fn contains(&self, bno: u64) -> bool {
        self.declared || self.areas.iter().any(|area| area.start < bno && bno < area.end)
    }

    pub(super) fn restore(&mut self, areas: Vec<Range<u64>>) {
        self.areas = areas.into();
    }

    /// Forgets an area whose header is among blocks that are about to change. Returns whether there was one.
    fn forget(&mut self, blocks: &Range<u64>) -> bool {
        let count = self.areas.len();
        self.areas.retain(|area| !blocks.contains(&area.start));
        self.areas.len() < count
    }

    /// Looks for the header of a swap area in block `bno`, which holds `page`. Returns whether that changes anything.
    fn note(&mut self, bno: u64, page: &[u8]) -> bool {
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

    fn count(&self) -> usize {
        self.areas.len() + usize::from(self.declared)
    }
}

/// Returns the last page of the area of which `page` is the header.
fn last_page(page: &[u8]) -> Option<u32> {
    let word = |at: usize| Some(u32::from_le_bytes(*page.get(at..)?.first_chunk()?));
    let is_header = page.get(PAGE_SIZE - SIGNATURE.len()..) == Some(SIGNATURE) && word(1024) == Some(VERSION);
    word(1028).filter(|last| is_header && *last > 0)
}

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// Describes a disk: its blocks, and with `swap` that all of them are a swap area. Call it once for each disk, at
    /// the start.
    pub fn describe_disk(&mut self, disk: DiskIndex, blocks: u64, swap: bool) {
        let known = &mut self.swap[usize::from(disk.0)];
        (known.blocks, known.declared) = (blocks, swap);
        known.areas.retain(|area| area.end <= blocks);
        self.keep_swap_areas(disk);
    }

    fn keep_swap_areas(&mut self, disk: DiskIndex) {
        self.index.set_swap_areas(disk, self.swap[usize::from(disk.0)].areas.iter());
    }

    /// Forgets swap areas whose header is among blocks that are about to change.
    pub(super) fn forget_swap_areas(&mut self, disk: DiskIndex, blocks: &Range<u64>) {
        if self.swap[usize::from(disk.0)].forget(blocks) {
            self.keep_swap_areas(disk);
        }
    }

    /// Looks for the header of a swap area in block `bno`, which holds `page`.
    pub(super) fn note_swap_header(&mut self, disk: DiskIndex, bno: u64, page: &[u8]) {
        if self.swap[usize::from(disk.0)].note(bno, page) {
            self.keep_swap_areas(disk);
        }
    }

    /// Returns the swap areas of `disk` that are known.
    pub fn swap_areas(&self, disk: DiskIndex) -> usize {
        self.swap[usize::from(disk.0)].count()
    }

    pub(super) fn is_swap(&self, block: BlockId) -> bool {
        self.swap[usize::from(block.disk.0)].contains(block.bno.0)
    }

    /// Admits a page that the guest wrote to a swap area: an eviction.
    pub(super) fn admit_swapped_out(&mut self, id: RequestId, content: Fingerprint, offset: usize) {
        if content == self.prints.zero() {
            return;
        }
        // What is cached already becomes the newest, without a send.
        if self.index.cached(content).is_some() || self.may_send() {
            self.admit_block(id, content, offset, Place::Tail);
        } else {
            self.stats.swap_dropped += 1;
        }
    }

    /// Admits a page that came from a swap area's disk, where that costs nothing: the guest may drop its clean copy
    /// without a write.
    pub(super) fn admit_swapped_in(&mut self, id: RequestId, content: Fingerprint, offset: usize) {
        let wanted = content != self.prints.zero() && self.index.cached(content).is_none();
        if wanted && self.index.slot_counts().free > 0 && self.may_send() {
            self.admit_block(id, content, offset, Place::Head);
        }
    }

    fn admit_block(&mut self, id: RequestId, content: Fingerprint, offset: usize, place: Place) {
        if let Offer::Admitted(slot) = self.index.offer(content, place) {
            self.stats.swap_admissions += 1;
            self.link.note_send();
            let offset = u32::try_from(offset).unwrap_or(u32::MAX);
            self.actions.push_back(Action::SendBlock { slot, request: id, offset });
        }
    }
}
