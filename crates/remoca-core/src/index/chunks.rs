//! Chunks of slots: which pool each belongs to, and which of its chunks it is.
//!
//! ```text
//! word of a chunk: pool 4 bits | number of the chunk within the pool 28 bits, or all ones if no pool has it
//! ```
//! A server numbers the slots of its pool from 0; the index numbers the slots of all pools. A chunk maps one to the other, so
//! that no slot needs a bit for its pool (decision 0039). A pool takes a chunk before any slot in it is valid, and gives it back
//! after none is.

use super::layout::{Layout, NONE, Words, of_pool, pool_word};
use crate::units::{POOLS_MAX, PoolIndex};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

const ORDINAL_BITS: u32 = 28;
const ORDINALS: u32 = (1 << ORDINAL_BITS) - 1;

/// Position and size of the chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunks {
    at: usize,
    count: u32,
    bits: u32,
}

impl Chunks {
    pub(super) fn new(layout: &Layout) -> Self {
        Self { at: layout.chunks_at(), count: layout.chunks(), bits: layout.chunk_bits() }
    }

    /// Returns the number of chunks.
    pub(super) fn count(self) -> u32 {
        self.count
    }

    /// Returns the number of slots in a chunk.
    pub(super) fn slots(self) -> u32 {
        1 << self.bits
    }

    /// Returns the number of slots in all chunks.
    pub(super) fn table_slots(self) -> u32 {
        self.count << self.bits
    }

    /// Returns the chunk in which a slot is. Also splits the slots of a pool into its chunks.
    pub(super) fn of(self, slot: u32) -> u32 {
        slot >> self.bits
    }

    /// Returns the number of chunks that a pool of so many slots needs.
    pub(super) fn needed(self, slots: u32) -> usize {
        slots.div_ceil(self.slots()) as usize
    }

    /// Returns whether the chunks of another region have as many slots.
    pub(super) fn are_like(self, other: Self) -> bool {
        self.bits == other.bits
    }

    /// Returns the first slot of a chunk.
    pub(super) fn first(self, chunk: u32) -> u32 {
        chunk << self.bits
    }

    /// Returns the position of a slot in its chunk.
    pub(super) fn position(self, slot: u32) -> u32 {
        slot & (self.slots() - 1)
    }

    /// Returns the pool that has a chunk, and the number of the chunk within the pool. Returns `None` if no pool has it.
    #[inline]
    pub(super) fn owner<M: Words>(self, words: &M, chunk: u32) -> Option<(PoolIndex, u32)> {
        let word = words[self.at + chunk as usize];
        let pool = PoolIndex(u8::try_from(word >> ORDINAL_BITS).unwrap_or(POOLS_MAX));
        (word != NONE).then_some((pool, word & ORDINALS))
    }

    /// Gives a chunk to a pool, as its chunk `ordinal`.
    pub(super) fn give<M: Words>(self, words: &mut M, chunk: u32, pool: PoolIndex, ordinal: u32) {
        words[self.at + chunk as usize] = u32::from(pool.0) << ORDINAL_BITS | ordinal & ORDINALS;
    }

    /// Takes a chunk from its pool.
    pub(super) fn take<M: Words>(self, words: &mut M, chunk: u32) {
        words[self.at + chunk as usize] = NONE;
    }

    /// Makes the owner of a chunk the one that it has in another region.
    pub(super) fn copy<M: Words>(self, words: &mut M, chunk: u32, from: Self, from_words: &M) {
        words[self.at + chunk as usize] = from_words[from.at + chunk as usize];
    }

    /// Returns the pool of a slot, and the number of the slot within it. Returns `None` if no pool has the slot, or it is no
    /// slot.
    #[inline]
    pub(super) fn place<M: Words>(self, words: &M, slot: u32) -> Option<(PoolIndex, u32)> {
        if slot >= self.table_slots() {
            return None;
        }
        let (pool, ordinal) = self.owner(words, self.of(slot))?;
        Some((pool, self.first(ordinal) | self.position(slot)))
    }

    /// Returns whether the page of a slot, if it has one, is valid.
    #[inline]
    pub(super) fn is_valid<M: Words>(self, words: &M, slot: u32) -> bool {
        self.place(words, slot).is_some_and(|(pool, local)| local < words[pool_word(pool, of_pool::CAPACITY)])
    }
}

/// Chunks that no pool has. The lowest one is given first: a smaller region has only low ones.
#[derive(Debug)]
pub(super) struct FreeChunks {
    /// Those that a pool has given back.
    given_back: BinaryHeap<Reverse<u32>>,
    /// Those that no pool has had, all after the others.
    unused: Range<u32>,
    /// The first one that is not given, because the region that the index moves to does not have it.
    end: u32,
}

impl FreeChunks {
    /// Returns free chunks that no pool has had.
    pub(super) fn new(unused: Range<u32>) -> Self {
        Self { given_back: BinaryHeap::new(), unused, end: u32::MAX }
    }

    /// Returns the next chunk to be given, or `None` if none can be.
    fn first(&self) -> Option<u32> {
        let given_back = self.given_back.peek().map(|Reverse(chunk)| *chunk);
        given_back.or((!self.unused.is_empty()).then_some(self.unused.start)).filter(|chunk| *chunk < self.end)
    }

    /// Returns the number of chunks.
    pub(super) fn count(&self) -> usize {
        self.given_back.len() + self.unused.len()
    }

    /// Returns whether no chunk can be given.
    pub(super) fn are_none(&self) -> bool {
        self.first().is_none()
    }

    /// Removes and returns the next chunk to be given, or returns `None` if none can be.
    pub(super) fn take(&mut self) -> Option<u32> {
        let first = self.first()?;
        if self.given_back.pop().is_none() {
            self.unused.next();
        }
        Some(first)
    }

    /// Inserts a chunk.
    pub(super) fn put(&mut self, chunk: u32) {
        self.given_back.push(Reverse(chunk));
    }

    /// Keeps chunks from `end` on from being given, until [`Self::fit_to`].
    pub(super) fn keep_below(&mut self, end: u32) {
        self.end = end;
    }

    /// Makes the free chunks those of a region with `count` chunks.
    pub(super) fn fit_to(&mut self, count: u32) {
        self.given_back.retain(|Reverse(chunk)| *chunk < count);
        self.unused = self.unused.start.min(count)..count;
        self.end = u32::MAX;
    }
}
