//! Sources of the blocks of a read, and the table of outstanding REQUESTs to one pool.

use super::types::{FetchId, RequestId};
use crate::fingerprint::Fingerprint;
use crate::index::EntryHint;
use crate::units::{BlockId, SlotIndex};

/// Source of one block of a read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    Zero,
    Slot(SlotIndex, Fingerprint, EntryHint),
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
    pub(super) content: Fingerprint,
    /// Offset of the page in the request.
    pub(super) offset: u32,
    /// Whether the read is a probe.
    pub(super) probe: bool,
}

/// Table of outstanding REQUESTs, at most `limit`.
#[derive(Debug)]
pub(super) struct Fetches {
    table: Vec<Option<Fetch>>,
    free: Vec<u32>,
    limit: u32,
}

impl Fetches {
    pub(super) fn new(limit: u32) -> Self {
        Self { table: Vec::new(), free: Vec::new(), limit }
    }

    /// Returns whether `count` more REQUESTs may be outstanding.
    #[inline]
    pub(super) fn has_room(&self, count: u32) -> bool {
        let used = self.table.len() - self.free.len();
        used + count as usize <= self.limit as usize
    }

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

    /// Removes and returns a REQUEST that the server has replied to. Returns `None` if no REQUEST with this ID is
    /// outstanding.
    #[inline]
    pub(super) fn end(&mut self, id: FetchId) -> Option<Fetch> {
        let fetch = self.table.get_mut(id.0 as usize)?.take()?;
        self.free.push(id.0);
        Some(fetch)
    }

    /// Removes and returns all REQUESTs.
    pub(super) fn drain(&mut self) -> Vec<Fetch> {
        self.free.clear();
        self.table.drain(..).flatten().collect()
    }
}
