//! A small buffer between a socket and a parser.

use remoca_io::sizes;

const STAGING_LEN: usize = 8192;

/// Bytes that were received and not parsed yet.
pub(super) struct Staging {
    bytes: Box<[u8; STAGING_LEN]>,
    start: usize,
    end: usize,
}

impl Staging {
    pub(super) fn new() -> Self {
        Self { bytes: Box::new([0; STAGING_LEN]), start: 0, end: 0 }
    }

    /// Creates a buffer that holds `bytes`. Returns `None` if they do not fit.
    pub(super) fn with(bytes: &[u8]) -> Option<Self> {
        let mut staging = Self::new();
        staging.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        staging.end = bytes.len();
        Some(staging)
    }

    pub(super) fn pending(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub(super) fn consume(&mut self, count: usize) {
        assert!(count <= self.end - self.start, "more bytes parsed than there are");
        self.start += count;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Drops those of the next `left` bytes that have been received, and returns how many are still to come.
    pub(super) fn skip(&mut self, left: u32) -> u32 {
        let there = self.pending().len().min(left as usize);
        self.consume(there);
        left - sizes::short(there)
    }

    /// Returns the next `N` bytes, or `None` if not all of them have been received.
    pub(super) fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = *self.pending().first_chunk()?;
        self.consume(N);
        Some(bytes)
    }

    /// Moves bytes to the start of `target`, and returns their number.
    pub(super) fn move_to(&mut self, target: &mut [u8]) -> usize {
        let count = target.len().min(self.pending().len());
        target[..count].copy_from_slice(&self.pending()[..count]);
        self.consume(count);
        count
    }

    /// Returns the place for the next bytes, or `None` while there is no room.
    pub(super) fn room(&mut self) -> Option<&mut [u8]> {
        if self.end == STAGING_LEN && self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        Some(&mut self.bytes[self.end..]).filter(|room| !room.is_empty())
    }

    /// Adds the `count` bytes at the start of the room to the pending bytes.
    pub(super) fn received(&mut self, count: usize) {
        assert!(count <= STAGING_LEN - self.end, "more bytes received than there was room for");
        self.end += count;
    }
}
