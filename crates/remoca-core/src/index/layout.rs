//! Layout of the region of words, and the words of its header.

use crate::units::{PAGE_SIZE_U64, POOLS_MAX, PageCount, PoolIndex};
use std::ops::DerefMut;
use std::sync::atomic::{Ordering, compiler_fence};

pub(super) const NONE: u32 = u32::MAX;
pub(super) const MAGIC: u32 = 0x5845_4449;
pub(super) const LAYOUT_VERSION: u32 = 8;
/// Words of the header: those about everything, then those of each pool.
pub(super) const HEADER_WORDS: usize = header::POOLS + POOLS_MAX as usize * POOL_WORDS;
const POOL_WORDS: usize = 16;
/// Words of an entry: block, flags and fingerprint.
pub(super) const ENTRY_WORDS: usize = 5;
/// Words of the links of a slot.
pub(super) const LINK_WORDS: usize = 2;
/// Words of one line of a hash table, which is a cache line.
pub(super) const LINE_WORDS: usize = 16;
/// Entries for which a line is made.
pub(super) const LINE_ENTRIES: u32 = 14;

/// Maximum number of swap areas of one disk.
pub const SWAP_AREAS_MAX: usize = 8;
pub(super) const AREA_WORDS: usize = 3;
/// Words of a disk before its swap areas.
pub(super) const AREAS: usize = 6;
pub(super) const DISK_WORDS: usize = AREAS + SWAP_AREAS_MAX * AREA_WORDS;

pub(super) const LOG_WORDS: usize = 3;
/// Number of entries of the log of sends, a power of two.
pub(super) const LOG_ENTRIES: u32 = 16 * 1024;

/// Binary logarithms of the smallest and the largest number of slots in a chunk.
const CHUNK_BITS_MIN: u32 = 2;
const CHUNK_BITS_MAX: u32 = 10;
/// Number of chunks that a cache should have at least, so that few slots of a pool's last chunk are unused.
const CHUNKS_MIN: u32 = 1024;

/// Highest block number plus one: 40 bits.
pub(super) const BLOCK_LIMIT: u64 = 1 << 40;
/// Number of blocks in a granule (1 MiB, less in the tests of this crate), the unit in which a disk is cut. A number of
/// granules fits into one word.
pub(super) const GRANULE_BLOCKS: u64 = if cfg!(test) { 8 } else { 256 };
/// Maximum size of a disk in bytes: 4 PiB less one granule, whose number marks disks that are not being cut.
pub const DISK_BYTES_MAX: u64 = (BLOCK_LIMIT - 256) * PAGE_SIZE_U64;

/// Positions of the words of the header. Words without a name are 0.
pub(super) mod header {
    pub(in super::super) const MAGIC: usize = 0;
    pub(in super::super) const VERSION: usize = 1;
    pub(in super::super) const SLOTS: usize = 2;
    /// Number of entries: slots and nodes.
    pub(in super::super) const ENTRIES: usize = 3;
    pub(in super::super) const DISKS: usize = 4;
    /// Fingerprint of a page of zeroes, which shows whether the key is the same.
    pub(in super::super) const ZERO: usize = 5;
    /// 1 if what the entries say about blocks is valid, 0 while the disks become void one after the other.
    pub(in super::super) const BLOCKS_VALID: usize = 8;
    /// Binary logarithm of the number of slots in a chunk.
    pub(in super::super) const CHUNK_BITS: usize = 9;
    /// 1 if the insertion policy in force is bimodal, otherwise LRU.
    pub(in super::super) const BIMODAL: usize = 11;
    /// Number of slots whose block is known, in a closed index.
    pub(in super::super) const SLOTS_KNOWN: usize = 12;
    /// Number of entries of the log of sends, of all pools.
    pub(in super::super) const LOGGED: usize = 23;
    /// Checksum of all other words of the header if the index is closed, otherwise 0. In a closed index the tables are
    /// complete, and the words after this one, [`SLOTS_KNOWN`] and some of each pool hold the state that an open index keeps
    /// outside the region.
    pub(in super::super) const CLOSED: usize = 26;
    pub(in super::super) const FREE_NODE: usize = 29;
    pub(in super::super) const NODES_USED: usize = 30;
    /// First word of the pools.
    pub(in super::super) const POOLS: usize = 32;
}

/// Positions of the words of a pool, counted from the first one. Words without a name are 0.
pub(super) mod of_pool {
    /// 1 if the words after this one name the pool that the slots describe.
    pub(in super::super) const VALID: usize = 0;
    pub(in super::super) const SERVER: usize = 1;
    pub(in super::super) const GENERATION: usize = 2;
    /// Number of SENDPAGEs that the pool had stored when its log began.
    pub(in super::super) const BASE: usize = 4;
    /// Number of SENDPAGEs since then.
    pub(in super::super) const SENDS: usize = 6;
    /// Number of entries of the log, of all pools, that came before what the server is not known to have received. The
    /// next word has the number of SENDPAGEs since [`BASE`] that it has received.
    pub(in super::super) const TAKEN: usize = 7;
    pub(in super::super) const TAKEN_SENDS: usize = 8;
    /// Number of slots of the pool below which a page is valid. The pages of all others are lost.
    pub(in super::super) const CAPACITY: usize = 9;
    /// First slot of the queue; the rest of it is linked in the slots.
    pub(in super::super) const QUEUE: usize = 10;
    /// In a closed index: last slot of the queue, first free slot, and number of used slots.
    pub(in super::super) const TAIL: usize = 11;
    pub(in super::super) const FREE_SLOT: usize = 12;
    pub(in super::super) const SLOTS_USED: usize = 13;
    /// Number of entries of the log, of all pools, up to that of the newest move within the pool.
    pub(in super::super) const MOVED: usize = 14;
}

/// Returns the position of a word of a pool.
#[inline]
pub(super) fn pool_word(pool: PoolIndex, word: usize) -> usize {
    header::POOLS + usize::from(pool.0 % POOLS_MAX) * POOL_WORDS + word
}

/// Region of words. Every access dereferences it again, so an implementation may count or stop accesses.
pub trait Words: DerefMut<Target = [u32]> {}

impl<M: DerefMut<Target = [u32]>> Words for M {}

/// Keeps the compiler from moving a store across this point. A killed process needs no stronger order. Its stores go to
/// memory that outlives it, and the processor makes the stores of one thread visible in program order. A kill falls
/// between two instructions. (After a power cut nothing is left of the region.)
#[inline]
pub(super) fn settle() {
    compiler_fence(Ordering::SeqCst);
}

/// Begins to load the cache line of a word. Nothing waits for it where the processor has an instruction for that, as every x86-64 has;
/// elsewhere the word is read.
#[inline]
pub(super) fn begin_load<M: Words>(words: &M, at: usize) {
    let word = &words[at];
    #[cfg(target_feature = "sse")]
    safe_arch::prefetch_t0(word);
    #[cfg(not(target_feature = "sse"))]
    std::hint::black_box(*word);
}

/// Returns the 64-bit number in the words `at` and `at + 1`, lower half first.
pub(super) fn long<M: Words>(words: &M, at: usize) -> u64 {
    u64::from(words[at]) | (u64::from(words[at + 1]) << 32)
}

/// Stores a 64-bit number in the words `at` and `at + 1`, lower half first.
pub(super) fn set_long<M: Words>(words: &mut M, at: usize, value: u64) {
    let bytes = value.to_le_bytes();
    for (i, half) in bytes.chunks_exact(4).enumerate() {
        words[at + i] = u32::from_le_bytes([half[0], half[1], half[2], half[3]]);
    }
}

/// Sizes and positions of the tables in the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    slots: u32,
    chunk_bits: u32,
    entries: u32,
    disks: u16,
}

impl Layout {
    /// Returns a layout for `disks` disk numbers, with at most `slots` cached pages and, beyond those, `resident` blocks that the
    /// guest holds.
    #[must_use]
    pub fn new(slots: PageCount, resident: PageCount, disks: u16) -> Self {
        let bits = (slots.0 / CHUNKS_MIN).checked_ilog2().unwrap_or(0);
        Self::chunked(slots, resident, disks, bits.clamp(CHUNK_BITS_MIN, CHUNK_BITS_MAX))
    }

    fn chunked(slots: PageCount, resident: PageCount, disks: u16, chunk_bits: u32) -> Self {
        // NONE and the sums below need head room; 2^30 pages are 4 TiB.
        let limit = 1 << 30;
        let slots = slots.0.clamp(1, limit);
        let table = Self { slots, chunk_bits, entries: 0, disks }.table_slots();
        Self { slots, chunk_bits, entries: table.saturating_add(resident.0.clamp(16, limit)), disks }
    }

    /// Returns the layout of other sizes that an index of this layout can move to, if it has a chunk for each slot in use
    /// ([`CacheIndex::least_slots`](super::CacheIndex::least_slots)): slots keep their numbers and chunks.
    #[must_use]
    pub fn resized(&self, slots: PageCount, resident: PageCount) -> Self {
        Self::chunked(slots, resident, self.disks, self.chunk_bits)
    }

    /// Returns the number of slots in the table. Each pool may leave most of its last chunk unused.
    pub(super) fn table_slots(&self) -> u32 {
        self.chunks() << self.chunk_bits
    }

    /// Returns the number of chunks.
    pub(super) fn chunks(&self) -> u32 {
        self.slots.div_ceil(1 << self.chunk_bits) + u32::from(POOLS_MAX)
    }

    /// Returns the least number of slots of a layout with so many chunks of this size.
    pub(super) fn slots_with_chunks(&self, chunks: u32) -> PageCount {
        let full = chunks.saturating_sub(u32::from(POOLS_MAX) + 1);
        PageCount((full << self.chunk_bits) + 1)
    }

    /// Returns the binary logarithm of the number of slots in a chunk.
    pub(super) fn chunk_bits(&self) -> u32 {
        self.chunk_bits
    }

    /// Returns the number of 32-bit words that the region must have.
    #[must_use]
    pub fn words(&self) -> usize {
        self.content_lines_at() + Self::lines(self.entries) as usize * LINE_WORDS
    }

    /// Returns the maximum number of slots that all pools may have together.
    #[must_use]
    pub fn slot_limit(&self) -> PageCount {
        PageCount(self.slots)
    }

    /// Returns the maximum number of known blocks: one for each slot, and one for each node.
    #[must_use]
    pub fn entry_limit(&self) -> PageCount {
        PageCount(self.entries)
    }

    /// Returns the number of nodes, which is the maximum number of known blocks beyond those of the slots.
    #[must_use]
    pub fn resident_limit(&self) -> PageCount {
        PageCount(self.entries - self.table_slots())
    }

    /// Returns the number of disk numbers.
    #[must_use]
    pub fn disks(&self) -> u16 {
        self.disks
    }

    /// Returns the word offset of the log of sends.
    pub(super) fn log_at(&self) -> usize {
        HEADER_WORDS + usize::from(self.disks) * DISK_WORDS
    }

    /// Returns the word offset of the chunks.
    pub(super) fn chunks_at(&self) -> usize {
        self.log_at() + LOG_ENTRIES as usize * LOG_WORDS
    }

    /// Returns the word offset of the links of the slots.
    pub(super) fn links_at(&self) -> usize {
        self.chunks_at() + self.chunks() as usize
    }

    /// Returns the number of lines of a hash table for a table of `entries` entries.
    pub(super) fn lines(entries: u32) -> u32 {
        entries.div_ceil(LINE_ENTRIES)
    }

    /// Returns the word offset of the entries: first the slots, then the nodes.
    pub(super) fn entries_at(&self) -> usize {
        self.links_at() + self.table_slots() as usize * LINK_WORDS
    }

    /// Returns the word offset of the first node.
    pub(super) fn nodes_at(&self) -> usize {
        self.entries_at() + self.table_slots() as usize * ENTRY_WORDS
    }

    /// Returns the word offset of the hash table that finds entries by block.
    pub(super) fn key_lines_at(&self) -> usize {
        (self.entries_at() + self.entries as usize * ENTRY_WORDS).next_multiple_of(LINE_WORDS)
    }

    /// Returns the word offset of the hash table that finds entries by content.
    pub(super) fn content_lines_at(&self) -> usize {
        self.key_lines_at() + Self::lines(self.entries) as usize * LINE_WORDS
    }

    /// Returns the layout of the index that the previous process left in `words`. Returns `None` if `words` hold no
    /// index of this version, or only a part of one.
    #[must_use]
    pub fn read(words: &[u32]) -> Option<Self> {
        let header = words.first_chunk::<HEADER_WORDS>()?;
        if header[header::MAGIC] != MAGIC || header[header::VERSION] != LAYOUT_VERSION {
            return None;
        }
        let (slots, entries) = (header[header::SLOTS], header[header::ENTRIES]);
        let disks = u16::try_from(header[header::DISKS]).ok()?;
        let bits = header[header::CHUNK_BITS];
        if !(CHUNK_BITS_MIN..=CHUNK_BITS_MAX).contains(&bits) {
            return None;
        }
        let empty = Self::chunked(PageCount(slots), PageCount(0), disks, bits);
        let resident = entries.checked_sub(empty.table_slots())?;
        let layout = empty.resized(PageCount(slots), PageCount(resident));
        (layout.slots == slots && layout.entries == entries && layout.words() <= words.len()).then_some(layout)
    }
}
