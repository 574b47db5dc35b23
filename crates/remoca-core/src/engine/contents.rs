//! Contents of sampled blocks that the guest holds, so that an evicted page shows which block was evicted where there is no index:
//! a VM without a cache.
//!
//! ```text
//! set:  8 entries of | 64 bits of the fingerprint | disk (12 bits), block number (40 bits), in use (1 bit) |
//! ```
//! A set that is full forgets its oldest entry. What is forgotten, or freed by the guest without an eviction, costs accuracy alone.

use crate::fingerprint::Fingerprint;
use crate::units::{BlockId, BlockNumber, DiskIndex, PageCount};

/// Entries of a set.
const WAYS: usize = 8;
/// Entries for each block that is to be held: a set is rarely full of blocks that the guest still holds.
const SPARE: usize = 4;
/// Maximum number of blocks that are to be held; the table then takes 2 MiB.
const BLOCKS_MAX: u32 = 32_768;

const BNO_BITS: u32 = 40;
const IN_USE: u64 = 1 << 63;

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    content: u64,
    block: u64,
}

/// Table of sampled blocks by their contents.
#[derive(Debug)]
pub(super) struct Contents {
    guest_memory: PageCount,
    sets: Vec<[Entry; WAYS]>,
}

impl Contents {
    /// Returns an empty table for a guest of this many pages.
    pub(super) fn new(guest_memory: PageCount) -> Self {
        Self { guest_memory, sets: vec![Default::default(); sets_for(guest_memory)] }
    }

    /// Makes it the table of a guest of this many pages, empty if it takes more memory than before, or less.
    pub(super) fn resize(&mut self, guest_memory: PageCount) {
        if sets_for(guest_memory) == self.sets.len() {
            self.guest_memory = guest_memory;
        } else {
            *self = Self::new(guest_memory);
        }
    }

    /// Returns the number of pages of the guest.
    #[inline]
    pub(super) fn guest_memory(&self) -> PageCount {
        self.guest_memory
    }

    /// Returns the share of the guest's blocks that the table can follow.
    pub(super) fn rate(&self) -> f64 {
        f64::from(blocks_of(self.guest_memory)) / f64::from(self.guest_memory.0.max(1))
    }

    /// Makes `block` the one that holds `content`.
    pub(super) fn put(&mut self, content: Fingerprint, block: BlockId) {
        let (content, set) = self.find(content);
        let at = set.iter().position(|entry| entry.content == content).unwrap_or(WAYS - 1);
        set[..=at].rotate_right(1);
        set[0] = Entry { content, block: IN_USE | u64::from(block.disk.0) << BNO_BITS | block.bno.0 };
    }

    /// Removes the entry of `content`, and returns its block; `None` if there is none.
    pub(super) fn take(&mut self, content: Fingerprint) -> Option<BlockId> {
        let (content, set) = self.find(content);
        let at = set.iter().position(|entry| entry.block & IN_USE != 0 && entry.content == content)?;
        let block = set[at].block & !IN_USE;
        set[at..].rotate_left(1);
        set[WAYS - 1] = Entry::default();
        let disk = u16::try_from(block >> BNO_BITS).ok()?;
        Some(BlockId { disk: DiskIndex(disk), bno: BlockNumber(block & ((1 << BNO_BITS) - 1)) })
    }

    fn find(&mut self, content: Fingerprint) -> (u64, &mut [Entry; WAYS]) {
        let [low, high, third] = content.0;
        let at = third as usize & (self.sets.len() - 1);
        (u64::from(high) << 32 | u64::from(low), &mut self.sets[at])
    }
}

/// Returns how many blocks of a guest of this many pages are to be held.
fn blocks_of(guest_memory: PageCount) -> u32 {
    guest_memory.0.clamp(1, BLOCKS_MAX)
}

/// Returns the number of sets for a guest of this many pages.
fn sets_for(guest_memory: PageCount) -> usize {
    (blocks_of(guest_memory) as usize * SPARE).div_ceil(WAYS).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u64) -> BlockId {
        BlockId { disk: DiskIndex(4095), bno: BlockNumber((1 << 40) - 1 - number) }
    }

    #[test]
    fn a_content_leads_to_its_newest_block_once() {
        let mut contents = Contents::new(PageCount(64));
        assert!((contents.rate() - 1.).abs() < 1e-9);
        let content = |number| Fingerprint([number, number * 3, number * 7]);
        assert_eq!(contents.take(Fingerprint([0; 3])), None, "an empty entry is no content");
        (0..64).for_each(|number| contents.put(content(number), block(number.into())));
        contents.put(content(5), block(99));
        assert_eq!(contents.take(content(5)), Some(block(99)));
        assert_eq!(contents.take(content(5)), None);
        assert_eq!(contents.take(content(6)), Some(block(6)));
    }

    #[test]
    fn a_full_set_forgets_its_oldest() {
        let mut contents = Contents::new(PageCount(1));
        assert_eq!(contents.sets.len(), 1);
        let content = |number| Fingerprint([number, 1, 0]);
        (0..9).for_each(|number| contents.put(content(number), block(number.into())));
        let kept: Vec<_> = (0..9).filter(|number| contents.take(content(*number)).is_some()).collect();
        assert_eq!(kept, (1..9).collect::<Vec<_>>());
    }

    #[test]
    fn a_large_guest_is_followed_in_part() {
        let contents = Contents::new(PageCount(1 << 20));
        assert_eq!(size_of_val(&contents.sets[..]), 2 << 20);
        assert!((contents.rate() - 1. / 32.).abs() < 1e-9);
    }

    #[test]
    fn a_table_for_another_guest_keeps_its_blocks_if_it_has_room_for_as_many() {
        let (mut contents, content) = (Contents::new(PageCount(1 << 18)), Fingerprint([1; 3]));
        contents.put(content, block(1));
        contents.resize(PageCount(1 << 20));
        assert!((contents.rate() - 1. / 32.).abs() < 1e-9);
        assert_eq!(contents.take(content), Some(block(1)));
        contents.put(content, block(1));
        contents.resize(PageCount(64));
        assert_eq!((contents.sets.len(), contents.take(content)), (32, None));
    }
}
