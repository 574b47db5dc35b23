//! The table of entries, and the two hash tables that find them: by block and by content.
//!
//! ```text
//! entry: block number (low 32 bits) | disk 12, block number (high 8), flags | fingerprint x3
//! ```
//! The first entries are the *slots*, one for each page of the pool (`slots/`). The others are the *nodes*, for blocks whose
//! content is not cached, or is cached for another block (`nodes.rs`). Both say with [`KNOWN`] that the disk holds their content
//! for their block; the other flags differ.
//! 1. At most one entry is known for a given block, and it is found by it.
//! 2. At most one live entry is found by a given content: the slot of its page if there is one, otherwise an entry whose
//!    block is known. Nodes of other blocks with this content are found by their block only.
//! 3. A slot with a page or a known block is in the hash table of contents. It is *dead* if the page is lost and no block is
//!    known; then it is not found.

use super::chunks::Chunks;
use super::layout::{BLOCK_LIMIT, ENTRY_WORDS, Layout, Words, begin_load};
use super::table::{Lines, Site, Table, Vacant};
use crate::fingerprint::Fingerprint;
use crate::units::{BlockId, BlockNumber, DiskIndex};

const KEY_LOW: usize = 0;
const KEY_HIGH: usize = 1;

/// Flag of an entry whose block is known.
pub(super) const KNOWN: u32 = 1 << 31;
/// Flag of a slot with a page. It means nothing beyond the slots of its pool that are valid.
pub(super) const PAGE: u32 = 1 << 30;
const KEY_BITS: u32 = (1 << 20) - 1;

/// Disk and block number, as an entry stores them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) low: u32,
    pub(super) high: u32,
}

impl Key {
    #[inline]
    pub(super) fn of(block: BlockId) -> Self {
        debug_assert!(block.bno.0 < BLOCK_LIMIT && block.disk.0 < 4096, "a block beyond what its key can hold");
        let key = (u64::from(block.disk.0) << 40) | block.bno.0;
        let bytes = key.to_le_bytes();
        let word = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        Self { low: word(0), high: word(4) & KEY_BITS }
    }

    /// Returns the key that the words `low` and `high` of an entry hold.
    #[inline]
    fn read(low: u32, high: u32) -> Self {
        Self { low, high: high & KEY_BITS }
    }

    #[inline]
    pub(super) fn block(self) -> BlockId {
        let disk = u16::try_from(self.high >> 8).expect("a disk has 12 bits of the key");
        BlockId { disk: DiskIndex(disk), bno: BlockNumber((u64::from(self.high & 0xff) << 32) | u64::from(self.low)) }
    }
}

/// Position of a block's entry at some moment. It is a hint: the entry may belong to another block later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryHint(pub(super) u32);

/// What a node has left in both hash tables, for the slot that gets its block.
pub(super) struct Vacancy {
    pub(super) key: Key,
    in_keys: Option<Vacant>,
    in_contents: Vacant,
}

/// Positions of the entries and of their hash tables.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entries {
    table: Table<ENTRY_WORDS>,
    /// All entries whose block is known, by their block.
    keys: Lines,
    /// One live entry of each content.
    contents: Lines,
    chunks: Chunks,
    limit: u32,
    seed: u64,
}

impl Entries {
    pub(super) fn new(layout: &Layout, seed: u64) -> Self {
        let limit = layout.entry_limit().0;
        Self {
            table: Table::new(layout.entries_at()),
            keys: Lines::new(layout.key_lines_at(), limit),
            contents: Lines::new(layout.content_lines_at(), limit),
            chunks: Chunks::new(layout),
            limit,
            seed,
        }
    }

    /// Returns the number of entries.
    pub(super) fn limit(&self) -> u32 {
        self.limit
    }

    // Words of an entry.

    /// Returns the word of an entry with its flags and the upper half of its key.
    #[inline]
    pub(super) fn high<M: Words>(&self, words: &M, entry: u32) -> u32 {
        self.table.get(words, entry, KEY_HIGH)
    }

    /// Stores the word of an entry with its flags and the upper half of its key. This store makes an entry valid or
    /// invalid.
    #[inline]
    pub(super) fn set_high<M: Words>(&self, words: &mut M, entry: u32, high: u32) {
        self.table.set(words, entry, KEY_HIGH, high);
    }

    /// Returns the lower half of the key of an entry.
    pub(super) fn low<M: Words>(&self, words: &M, entry: u32) -> u32 {
        self.table.get(words, entry, KEY_LOW)
    }

    /// Stores the lower half of the key of an entry whose block is not known.
    pub(super) fn set_low<M: Words>(&self, words: &mut M, entry: u32, low: u32) {
        self.table.set(words, entry, KEY_LOW, low);
    }

    /// Returns the fingerprint of an entry.
    pub(super) fn content<M: Words>(&self, words: &M, entry: u32) -> Fingerprint {
        self.table.content(words, entry)
    }

    /// Stores the fingerprint of an entry that is not valid.
    pub(super) fn set_content<M: Words>(&self, words: &mut M, entry: u32, content: Fingerprint) {
        self.table.set_content(words, entry, content);
    }

    /// Returns the key of an entry, whether it is valid or not.
    pub(super) fn key<M: Words>(&self, words: &M, entry: u32) -> Key {
        Key::read(self.low(words, entry), self.high(words, entry))
    }

    /// Returns the block of an entry, or `None` if it is not known.
    pub(super) fn block<M: Words>(&self, words: &M, entry: u32) -> Option<BlockId> {
        (self.high(words, entry) & KNOWN != 0).then(|| self.key(words, entry).block())
    }

    /// Returns whether an entry is a slot whose page is valid.
    #[inline]
    pub(super) fn has_page<M: Words>(&self, words: &M, entry: u32) -> bool {
        self.high(words, entry) & PAGE != 0 && self.chunks.is_valid(words, entry)
    }

    /// Returns whether an entry has a valid page or a known block.
    #[inline]
    pub(super) fn is_live<M: Words>(&self, words: &M, entry: u32) -> bool {
        self.high(words, entry) & KNOWN != 0 || self.has_page(words, entry)
    }

    /// Returns whether the block of `key` is known by `entry`.
    #[inline]
    fn is_about<M: Words>(&self, words: &M, entry: u32, key: Key) -> bool {
        let high = self.high(words, entry) & (KNOWN | KEY_BITS);
        self.low(words, entry) == key.low && high == key.high | KNOWN
    }

    // Look-ups.

    /// Returns the entry of a block, or `None` if the block is not known.
    pub(super) fn find<M: Words>(&self, words: &M, block: BlockId) -> Option<u32> {
        let key = Key::of(block);
        self.keys.find(words, self.key_site(key), |entry| self.is_about(words, entry, key))
    }

    /// Returns the entry of a block, or `None` if the block is not known. Needs no search if the entry is still where
    /// `hint` says.
    pub(super) fn find_again<M: Words>(&self, words: &M, hint: EntryHint, block: BlockId) -> Option<u32> {
        let EntryHint(entry) = hint;
        let is_there = entry < self.limit && self.is_about(words, entry, Key::of(block));
        debug_assert!(!is_there || self.find(words, block) == Some(entry), "a block has two entries");
        if is_there { Some(entry) } else { self.find(words, block) }
    }

    /// Returns the live entry that is found by `content`, or `None` if there is no such entry.
    pub(super) fn find_content<M: Words>(&self, words: &M, content: Fingerprint) -> Option<u32> {
        self.find_content_word(words, content).map(|(entry, _)| entry)
    }

    /// Returns the live entry that is found by `content`, and the position of its word, or `None` if there is no such entry.
    #[inline]
    pub(super) fn find_content_word<M: Words>(&self, words: &M, content: Fingerprint) -> Option<(u32, usize)> {
        let is_it = |entry| self.content(words, entry) == content && self.is_live(words, entry);
        self.contents.find_word(words, self.content_site(content), is_it)
    }

    /// Returns the slot that has a page of this content, or `None` if no slot has one.
    pub(super) fn find_page<M: Words>(&self, words: &M, content: Fingerprint) -> Option<u32> {
        self.find_content(words, content).filter(|entry| self.has_page(words, *entry))
    }

    // The hash tables.

    #[inline]
    fn key_site(&self, key: Key) -> Site {
        let mixed = ((u64::from(key.high) << 32) | u64::from(key.low)) ^ self.seed;
        let mixed = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        let mixed = (mixed ^ (mixed >> 32)).to_be_bytes();
        let half = |i: usize| u32::from_be_bytes([mixed[i], mixed[i + 1], mixed[i + 2], mixed[i + 3]]);
        self.keys.site([half(0), half(4)])
    }

    /// Returns the site of a content in the hash table of contents.
    #[inline]
    pub(super) fn content_site(&self, content: Fingerprint) -> Site {
        self.contents.site_of_content(content)
    }

    /// Makes `entry` the one that is found by `key`. Returns `false` if the hash table has no room for it.
    pub(super) fn enter_key<M: Words>(&self, words: &mut M, entry: u32, key: Key) -> bool {
        self.keys.insert(words, self.key_site(key), entry, |words: &M, other| self.key_site(self.key(words, other)))
    }

    /// Makes `entry` the one that is found by its content. Returns `false` if the hash table has no room for it.
    pub(super) fn enter_content<M: Words>(&self, words: &mut M, entry: u32) -> bool {
        let site_of = |words: &M, other| self.content_site(self.content(words, other));
        self.contents.insert(words, self.content_site(self.content(words, entry)), entry, site_of)
    }

    /// Returns whether the hash table of contents has room for another entry of this content.
    pub(super) fn has_room_for<M: Words>(&self, words: &M, content: Fingerprint) -> bool {
        let site_of = |words: &M, other| self.content_site(self.content(words, other));
        self.contents.has_room(words, self.content_site(content), site_of)
    }

    /// Returns the positions of the lines in which an entry of this content may be.
    #[cfg(test)]
    pub(super) fn lines_of(&self, content: Fingerprint) -> [usize; 2] {
        self.content_site(content).lines()
    }

    /// Removes `entry` from the hash table of blocks, where it was found by `key`.
    pub(super) fn leave_key<M: Words>(&self, words: &mut M, entry: u32, key: Key) {
        self.keys.remove(words, self.key_site(key), entry);
    }

    /// Removes `entry` from the hash table of contents.
    pub(super) fn leave_content<M: Words>(&self, words: &mut M, entry: u32) {
        self.contents.remove(words, self.content_site(self.content(words, entry)), entry);
    }

    /// Removes `entry` from both hash tables: from that of blocks, where it was found by `key`, and from that of contents, where its
    /// word is at `at`. Returns what it leaves to an entry with the same block and content.
    pub(super) fn vacate<M: Words>(&self, words: &mut M, entry: u32, key: Key, at: usize) -> Vacancy {
        debug_assert_eq!(
            self.contents.position(words, self.content_site(self.content(words, entry)), entry),
            Some(at),
            "the word is not that of the entry {entry}"
        );
        let in_contents = self.contents.vacate(words, at);
        let key_at = self.keys.position(words, self.key_site(key), entry);
        Vacancy { key, in_keys: key_at.map(|at| self.keys.vacate(words, at)), in_contents }
    }

    /// Puts `entry`, which has the same content, into the words that [`Self::vacate`] has freed. No entry may have been inserted since.
    /// Returns the key by which it is found, if it is.
    pub(super) fn occupy<M: Words>(&self, words: &mut M, entry: u32, vacancy: Vacancy) -> Option<Key> {
        self.contents.occupy(words, vacancy.in_contents, entry);
        self.keys.occupy(words, vacancy.in_keys?, entry);
        Some(vacancy.key)
    }

    /// Asserts that each word of both hash tables is in a line of its entry, and that no table names an entry twice. Returns the
    /// number of entries that are found by their block.
    #[cfg(test)]
    pub(super) fn check_lines<M: Words>(&self, words: &M) -> usize {
        self.contents.check(words, |entry| self.content_site(self.content(words, entry)));
        self.keys.check(words, |entry| self.key_site(self.key(words, entry)))
    }

    /// Makes `to` the entry that is found by `key`, instead of `from`.
    pub(super) fn hand_over_key<M: Words>(&self, words: &mut M, key: Key, from: u32, to: u32) {
        self.keys.replace(words, self.key_site(key), from, to);
    }

    /// Makes `to`, which has the same content, the entry that is found by it, instead of `from`.
    pub(super) fn hand_over_content<M: Words>(&self, words: &mut M, from: u32, to: u32) {
        self.contents.replace(words, self.content_site(self.content(words, from)), from, to);
    }

    /// Returns the site of a block in the hash table of blocks.
    pub(super) fn site_of(&self, block: BlockId) -> Site {
        self.key_site(Key::of(block))
    }

    /// Begins to load both lines of a site of a block.
    pub(super) fn touch_site<M: Words>(&self, words: &M, site: Site) {
        self.keys.touch(words, site);
    }

    /// Returns the entries that a look-up of a block with this site may examine first, and [`NONE`](super::layout::NONE) for each
    /// that is missing. Neither need be the one looked for.
    pub(super) fn candidates<M: Words>(&self, words: &M, site: Site) -> [u32; 2] {
        self.keys.candidates(words, site)
    }

    /// Begins to load both lines of a site of a content.
    pub(super) fn touch_content_site<M: Words>(&self, words: &M, site: Site) {
        self.contents.touch(words, site);
    }

    /// Returns the entries that a look-up of a content with this site may examine first, and [`NONE`](super::layout::NONE) for
    /// each that is missing. Neither need be the one looked for.
    pub(super) fn content_candidates<M: Words>(&self, words: &M, site: Site) -> [u32; 2] {
        self.contents.candidates(words, site)
    }

    /// Begins to load both lines of the block of an entry.
    pub(super) fn touch_key<M: Words>(&self, words: &M, entry: u32) {
        self.keys.touch(words, self.key_site(self.key(words, entry)));
    }

    /// Begins to load an entry, which may be in two cache lines.
    pub(super) fn touch_entry<M: Words>(&self, words: &M, entry: u32) {
        let at = self.table.at(entry);
        [at, at + ENTRY_WORDS - 1].into_iter().for_each(|at| begin_load(words, at));
    }

    /// Clears both hash tables.
    pub(super) fn clear_lines<M: Words>(&self, words: &mut M) {
        self.keys.clear(words);
        self.contents.clear(words);
    }

    /// Begins to load all lines in which `entry` may be.
    pub(super) fn touch<M: Words>(&self, words: &M, entry: u32) {
        self.touch_lines(words, self.key(words, entry), self.content(words, entry));
    }

    /// Begins to load all lines in which an entry of this key and content may be.
    pub(super) fn touch_lines<M: Words>(&self, words: &M, key: Key, content: Fingerprint) {
        self.keys.touch(words, self.key_site(key));
        self.contents.touch(words, self.content_site(content));
    }
}
