//! Tables of slots and nodes: entries of a fixed number of words, with a fingerprint, and hash chains through them.

use super::layout::{NONE, Words};
use crate::fingerprint::Fingerprint;
use std::ops::Range;

/// Position of the fingerprint in an entry of either table.
pub(super) const CONTENT: usize = 2;

/// Maximum number of entries that a rebuild puts on one chain. Keyed hashes make chains of a dozen entries at most, and
/// forged words must not cost unbounded time.
const CHAIN_MAX: u32 = 64;

/// Number of entries whose chains are prefetched together, a few more than the loads that a processor can have in
/// flight.
pub(super) const BATCH: u32 = 32;

/// Table of entries of `SIZE` words each, from word `at` on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table<const SIZE: usize> {
    at: usize,
}

impl<const SIZE: usize> Table<SIZE> {
    pub(super) fn new(at: usize) -> Self {
        Self { at }
    }

    /// Returns the word `field` of an entry.
    pub(super) fn get<M: Words>(self, words: &M, entry: u32, field: usize) -> u32 {
        words[self.at + entry as usize * SIZE + field]
    }

    /// Sets the word `field` of an entry.
    pub(super) fn set<M: Words>(self, words: &mut M, entry: u32, field: usize, value: u32) {
        let at = self.at + entry as usize * SIZE + field;
        words[at] = value;
    }

    /// Returns the fingerprint of an entry.
    pub(super) fn content<M: Words>(self, words: &M, entry: u32) -> Fingerprint {
        Fingerprint([0, 1, 2].map(|i| self.get(words, entry, CONTENT + i)))
    }

    /// Stores the fingerprint of an entry.
    pub(super) fn set_content<M: Words>(self, words: &mut M, entry: u32, content: Fingerprint) {
        for (i, word) in content.0.into_iter().enumerate() {
            self.set(words, entry, CONTENT + i, word);
        }
    }
}

/// Whether a chain has room for a new entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    Free,
    /// An equal entry is already on it.
    Taken,
    TooLong,
}

/// Position of the head of a chain in the region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head(usize);

/// Hash chains through one word of the entries of a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chains<const SIZE: usize> {
    table: Table<SIZE>,
    heads_at: usize,
    /// A power of two.
    heads: u32,
    next: usize,
}

impl<const SIZE: usize> Chains<SIZE> {
    /// Returns the chains of `table` that are linked by the word `next` of each entry.
    pub(super) fn new(table: Table<SIZE>, heads_at: usize, heads: u32, next: usize) -> Self {
        Self { table, heads_at, heads, next }
    }

    /// Returns the head of the chain for this hash.
    pub(super) fn head(&self, hash: u32) -> Head {
        Head(self.heads_at + (hash & (self.heads - 1)) as usize)
    }

    /// Returns the first entry of a chain, or [`NONE`].
    pub(super) fn first<M: Words>(&self, words: &M, head: Head) -> u32 {
        words[head.0]
    }

    /// Returns the first entry of a chain for which `is_same` holds, or `None` if there is no such entry.
    pub(super) fn find<M: Words>(&self, words: &M, head: Head, is_same: impl Fn(u32) -> bool) -> Option<u32> {
        let mut entry = words[head.0];
        while entry != NONE {
            if is_same(entry) {
                return Some(entry);
            }
            entry = self.table.get(words, entry, self.next);
        }
        None
    }

    /// Returns whether a well-formed chain has room for a new entry, already has an entry for which `is_same` holds, or
    /// is too long.
    pub(super) fn room<M: Words>(&self, words: &M, head: Head, is_same: impl Fn(u32) -> bool) -> Room {
        let mut entry = words[head.0];
        for _ in 0..CHAIN_MAX {
            match entry {
                NONE => return Room::Free,
                entry if is_same(entry) => return Room::Taken,
                _ => entry = self.table.get(words, entry, self.next),
            }
        }
        Room::TooLong
    }

    /// Inserts an entry at the front of a chain.
    pub(super) fn add<M: Words>(&self, words: &mut M, head: Head, entry: u32) {
        let first = words[head.0];
        self.table.set(words, entry, self.next, first);
        words[head.0] = entry;
    }

    /// Removes an entry from its chain.
    pub(super) fn remove<M: Words>(&self, words: &mut M, head: Head, entry: u32) {
        let next = self.table.get(words, entry, self.next);
        let mut before = words[head.0];
        if before == entry {
            words[head.0] = next;
            return;
        }
        loop {
            let after = self.table.get(words, before, self.next);
            if after == entry {
                break;
            }
            before = after;
        }
        self.table.set(words, before, self.next, next);
    }

    /// Empties all chains.
    pub(super) fn clear<M: Words>(&self, words: &mut M) {
        self.clear_some(words, 0..self.heads);
    }

    /// Empties the chains with these heads.
    pub(super) fn clear_some<M: Words>(&self, words: &mut M, heads: Range<u32>) {
        words[self.heads_at + heads.start as usize..self.heads_at + heads.end as usize].fill(NONE);
    }

    /// Returns the word range of a table of `entries` entries and of the chain heads after it.
    pub(super) fn with_table(&self, entries: u32) -> Range<usize> {
        debug_assert_eq!(self.table.at + entries as usize * SIZE, self.heads_at, "the heads follow the table");
        self.table.at..self.heads_at + self.heads as usize
    }

    /// Returns the number of chains.
    pub(super) fn count(&self) -> u32 {
        self.heads
    }
}
