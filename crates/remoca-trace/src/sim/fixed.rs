//! The best set of blocks that never changes, known beforehand. No policy without knowledge of the future can count on it; where the blocks in
//! use change, a cache can do better.
//!
//! Each block of the set is cached from when the cache first gets it, and again after each write. The blocks with the most
//! hits are in the local tier, those with the next most in the remote one. One page is fetched for each remote hit, and one
//! sent each time that a remote block enters.

use super::ids::Id;
use super::types::Pages;

#[derive(Clone, Copy, Default)]
struct Block {
    /// Reads that hit if the block is in the set.
    hits: u32,
    /// Times that it entered.
    entries: u32,
    is_valid: bool,
}

#[derive(Default)]
pub(super) struct Fixed {
    blocks: Vec<Block>,
}

/// What the best set would have answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Best {
    pub(super) local_hits: u64,
    pub(super) remote_hits: u64,
    pub(super) sent: u64,
}

impl Fixed {
    pub(super) fn reach(&mut self, count: usize) {
        self.blocks.resize(count.max(self.blocks.len()), Block::default());
    }

    pub(super) fn bytes(&self) -> usize {
        self.blocks.capacity() * size_of::<Block>()
    }

    #[inline]
    pub(super) fn read(&mut self, id: Id) {
        let block = &mut self.blocks[id as usize];
        block.hits = block.hits.saturating_add(u32::from(block.is_valid));
    }

    #[inline]
    pub(super) fn evicted(&mut self, id: Id) {
        let block = &mut self.blocks[id as usize];
        block.entries = block.entries.saturating_add(u32::from(!block.is_valid));
        block.is_valid = true;
    }

    #[inline]
    pub(super) fn forget(&mut self, id: Id) {
        self.blocks[id as usize].is_valid = false;
    }

    /// Returns what the best set of this many pages would have answered.
    pub(super) fn best(mut self, pages: Pages) -> Best {
        self.blocks.sort_unstable_by_key(|block| std::cmp::Reverse(block.hits));
        let local = usize::try_from(pages.local).unwrap_or(usize::MAX).min(self.blocks.len());
        let (local, rest) = self.blocks.split_at(local);
        let remote = &rest[..usize::try_from(pages.remote).unwrap_or(usize::MAX).min(rest.len())];
        let hits = |blocks: &[Block]| blocks.iter().map(|block| u64::from(block.hits)).sum();
        let used = remote.iter().filter(|block| block.hits > 0);
        let sent = used.map(|block| u64::from(block.entries)).sum();
        Best { local_hits: hits(local), remote_hits: hits(remote), sent }
    }
}
