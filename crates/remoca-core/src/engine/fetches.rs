//! Sources of the blocks of a read, and the table of outstanding REQUESTs to all pools.

use super::types::{FetchId, RequestId};
use crate::fingerprint::Fingerprint;
use crate::index::EntryHint;
use crate::units::{BlockId, PoolIndex, SlotIndex};

/// Source of one block of a read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    Zero,
    Slot { slot: SlotIndex, pool: PoolIndex, content: Fingerprint, hint: EntryHint },
    Disk,
}

/// One outstanding REQUEST.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetch {
    pub(super) request: RequestId,
    /// Serial number of the request, which distinguishes it from later requests with the same ID.
    pub(super) serial: u64,
    pub(super) block: BlockId,
    /// Hint of where the index has the node of the block.
    pub(super) hint: EntryHint,
    pub(super) slot: SlotIndex,
    /// Pool that is asked for it.
    pub(super) pool: PoolIndex,
    pub(super) content: Fingerprint,
    /// Offset of the page in the request.
    pub(super) offset: u32,
    /// Whether the read is a probe.
    pub(super) probe: bool,
}

/// Table of outstanding REQUESTs. Their number is bounded by a limit for each pool.
#[derive(Debug, Default)]
pub(super) struct Fetches {
    table: Vec<Option<Fetch>>,
    free: Vec<u32>,
}

impl Fetches {
    /// Adds a REQUEST, for which there must be room, and returns its ID.
    #[inline]
    pub(super) fn begin(&mut self, fetch: Fetch) -> FetchId {
        if let Some(at) = self.free.pop() {
            self.table[at as usize] = Some(fetch);
            return FetchId(at);
        }
        let at = u32::try_from(self.table.len()).expect("a table of REQUESTs is bounded by its limit");
        self.table.push(Some(fetch));
        FetchId(at)
    }

    /// Returns whether no REQUEST is outstanding.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.table.len() == self.free.len()
    }

    /// Removes and returns a REQUEST to `pool` that its server has replied to. Returns `None` if no REQUEST to this pool with
    /// this ID is outstanding.
    #[inline]
    pub(super) fn end(&mut self, pool: PoolIndex, id: FetchId) -> Option<Fetch> {
        let fetch = self.table.get_mut(id.0 as usize)?.take_if(|fetch| fetch.pool == pool)?;
        self.free.push(id.0);
        Some(fetch)
    }

    /// Removes and returns all REQUESTs to a pool.
    pub(super) fn drain(&mut self, pool: PoolIndex) -> Vec<Fetch> {
        let mut drained = Vec::new();
        for (id, entry) in (0..).zip(&mut self.table) {
            if let Some(fetch) = entry.take_if(|fetch| fetch.pool == pool) {
                self.free.push(id);
                drained.push(fetch);
            }
        }
        drained
    }
}
