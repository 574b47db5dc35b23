//! An index made of the words that a former process left.
//!
//! Where that process closed it ([`CacheIndex::close`]), and the checksum of its header is right, it is taken as it is: the
//! tables are not looked at. Else the process may have been killed between
//! any two stores, so nothing is believed but the words of the tables themselves: chains, queue, free lists and counts are
//! made anew. Whoever sends such words (a migration) may have made them up, so they are treated like that, too:
//! then the index holds nonsense, but is whole. Its contents are judged by the same rules as ever: a page of the
//! server is compared with its fingerprint; that a block has a fingerprint is as true as the words' origin.

use super::{
    CacheIndex, Fingerprint, HEADER_WORDS, LAYOUT_VERSION, Layout, MAGIC, NONE, PageCount, SlotCounts, header, settle,
};
use std::ops::DerefMut;

/// Entries of one chain that are looked at. Keyed hashes make chains of a dozen at most; words that were made up must not
/// cost time without end.
const CHAIN_MAX: u32 = 64;

/// Entries whose chains are loaded together: as many loads as a processor has under way, and some more.
pub(super) const BATCH: u32 = 32;

/// Who wrote the words that an index is resumed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A process of this user, in a file that nobody else may write to.
    Own,
    /// Somebody who may have made them up.
    Stranger,
}

/// What a chain has for a new entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chain {
    Room,
    /// The same is on it.
    Taken,
    TooLong,
}

/// Walks a chain of entries that are known to be chained well.
pub(super) fn look_along(first: u32, next: impl Fn(u32) -> u32, same: impl Fn(u32) -> bool) -> Chain {
    let mut entry = first;
    for _ in 0..CHAIN_MAX {
        match entry {
            NONE => return Chain::Room,
            entry if same(entry) => return Chain::Taken,
            _ => entry = next(entry),
        }
    }
    Chain::TooLong
}

/// Words that cannot be resumed from, given back.
#[derive(Debug)]
pub struct Unusable<M> {
    pub words: M,
    pub reason: &'static str,
}

impl Layout {
    /// Reads the layout of what a former process left in `words`; `None` if that is no index of this version, or cut
    /// off.
    #[must_use]
    pub fn read(words: &[u32]) -> Option<Self> {
        let header = words.first_chunk::<{ super::HEADER_WORDS }>()?;
        if header[header::MAGIC] != MAGIC || header[header::VERSION] != LAYOUT_VERSION {
            return None;
        }
        let (slots, nodes) = (header[header::SLOTS], header[header::NODES]);
        let disks = u16::try_from(header[header::DISKS]).ok()?;
        let layout = Self::new(PageCount(slots), PageCount(nodes.checked_sub(slots)?), disks);
        (layout.slots == slots && layout.nodes == nodes && layout.words() <= words.len()).then_some(layout)
    }
}

impl<M: DerefMut<Target = [u32]>> CacheIndex<M> {
    /// Closes the index: the process ends, or gives way to another program, and nothing changes after this. Its successor
    /// takes the index as it is, where it would have to look at every entry (64 GiB of cache: seconds). Does nothing
    /// while a slot is pinned, or lost pages are still in the tables.
    pub fn close(&mut self) {
        if self.pins > 0 || !self.is_whole() {
            return;
        }
        self.words[header::TAIL] = self.tail;
        self.words[header::FREE_SLOT] = self.free_slot;
        self.words[header::FREE_NODE] = self.free_node;
        self.words[header::NODES_USED] = self.nodes_used;
        self.words[header::SLOTS_USED] = self.counts.used;
        settle();
        self.words[header::CLOSED] = checksum(&self.words);
    }

    /// Reopens the index: it may change again.
    pub fn reopen(&mut self) {
        self.words[header::CLOSED] = 0;
        settle();
    }

    /// Returns the index that a former process left in `words`, all of whose requests are over. `zero` tells whether its
    /// key was the same.
    ///
    /// # Errors
    /// If the words hold no index of this version and key for `disks` disks.
    pub fn resume(words: M, origin: Origin, disks: u16, seed: u64, zero: Fingerprint) -> Result<Self, Unusable<M>> {
        let unusable = |words, reason| Err(Unusable { words, reason });
        let Some(layout) = Layout::read(&words) else {
            return unusable(words, "it is no index of this version, or damaged");
        };
        if layout.disks != disks {
            return unusable(words, "it is the index of another number of disks");
        }
        if words[header::ZERO..header::ZERO + 3] != zero.0 {
            return unusable(words, "its fingerprints were made with another key");
        }
        let mut this = Self::over(words, layout, seed, zero);
        let closed = this.words[header::CLOSED] == checksum(&this.words);
        this.reopen();
        this.taken_as_it_was = closed && origin == Origin::Own;
        if this.taken_as_it_was {
            this.take_as_closed();
        } else {
            this.rebuild_slots();
            this.rebuild_nodes();
        }
        Ok(this)
    }

    /// Takes from the header what the index keeps outside the words.
    fn take_as_closed(&mut self) {
        self.capacity = self.words[header::CAPACITY];
        self.sizing.end = self.capacity;
        self.tail = self.words[header::TAIL];
        self.free_slot = self.words[header::FREE_SLOT];
        self.free_node = self.words[header::FREE_NODE];
        self.nodes_used = self.words[header::NODES_USED];
        let used = self.words[header::SLOTS_USED];
        self.counts = SlotCounts { free: self.capacity - used, used, draining: 0 };
    }
}

/// Where the checksum begins. It is another one than that of programs whose free slots were linked one way only: what they closed
/// is looked at like what a killed process left.
const CHECKSUM_BASIS: u32 = 0x811c_9dc6;

/// Returns a checksum of all words of the header but [`header::CLOSED`]; never 0 (FNV-1a of whole words, rotated).
fn checksum(words: &[u32]) -> u32 {
    let others = words[..header::CLOSED].iter().chain(&words[header::CLOSED + 1..HEADER_WORDS]);
    let sum = others.fold(CHECKSUM_BASIS, |sum, word| (sum ^ word).wrapping_mul(0x0100_0193).rotate_left(15));
    sum.max(1)
}
