//! The node table: what the disk holds for each known block. The CLOCK algorithm (second chance) bounds its size, so
//! that it keeps the blocks that the guest touched last. CLOCK skips blocks whose content is cached.

use super::layout::{BLOCK_LIMIT, Layout, NODE_WORDS, NONE, Words, header, settle};
use super::slots::Slots;
use super::table::{BATCH, Lines, Site, Table};
use crate::fingerprint::Fingerprint;
use crate::rules::{Rule, Rules};
use crate::units::{BlockId, BlockNumber, DiskIndex};
use std::hint::black_box;

const KEY_LOW: usize = 0;
const KEY_HIGH: usize = 1;
/// Word of a free node that holds the next free one.
const NEXT_FREE: usize = KEY_LOW;

const USED: u32 = 1 << 31;
const REFERENCED: u32 = 1 << 30;
/// Flag of a node that is found by its content. At most one node of each content has it.
const STANDS: u32 = 1 << 29;
const KEY_BITS: u32 = (1 << 20) - 1;

/// Maximum number of steps of the clock's hand before it takes any node.
const CLOCK_STEPS: u32 = 64;

/// Disk and block number, as a node stores them.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    low: u32,
    high: u32,
}

impl Key {
    #[inline]
    fn of(block: BlockId) -> Self {
        debug_assert!(block.bno.0 < BLOCK_LIMIT && block.disk.0 < 4096, "a block beyond what its key can hold");
        let key = (u64::from(block.disk.0) << 40) | block.bno.0;
        let bytes = key.to_le_bytes();
        let word = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        Self { low: word(0), high: word(4) & KEY_BITS }
    }

    /// Returns the key that the words `low` and `high` of a node hold.
    #[inline]
    fn read(low: u32, high: u32) -> Self {
        Self { low, high: high & KEY_BITS }
    }

    #[inline]
    fn block(self) -> BlockId {
        let disk = u16::try_from(self.high >> 8).expect("a disk has 12 bits of the key");
        BlockId { disk: DiskIndex(disk), bno: BlockNumber((u64::from(self.high & 0xff) << 32) | u64::from(self.low)) }
    }
}

/// Position of a block's node at some moment. It is a hint: the node may belong to another block later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeHint(u32);

/// Table of nodes, with the part of its state that is kept outside the words.
#[derive(Debug)]
pub(super) struct Nodes {
    table: Table<NODE_WORDS>,
    /// All nodes by their block.
    keys: Lines,
    /// One node of each content.
    contents: Lines,
    limit: u32,
    seed: u64,
    /// First free node.
    free: u32,
    used: u32,
    /// Position of the clock's hand.
    hand: u32,
    zero: Fingerprint,
    rules: Rules,
}

impl Nodes {
    /// Returns the node table of a layout. It has neither used nor free nodes until it is cleared, loaded or rebuilt.
    pub(super) fn new(layout: &Layout, seed: u64, zero: Fingerprint) -> Self {
        let limit = layout.node_limit().0;
        Self {
            table: Table::new(layout.nodes_at()),
            keys: Lines::new(layout.key_lines_at(), limit),
            contents: Lines::new(layout.content_lines_at(), limit),
            limit,
            seed,
            free: NONE,
            used: 0,
            hand: 0,
            zero,
            rules: Rules::default(),
        }
    }

    /// Sets the rules in force.
    pub(super) fn keep_to(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Returns the number of known blocks.
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    /// Returns the maximum number of known blocks.
    pub(super) fn limit(&self) -> u32 {
        self.limit
    }

    fn high<M: Words>(&self, words: &M, node: u32) -> u32 {
        self.table.get(words, node, KEY_HIGH)
    }

    fn set_high<M: Words>(&self, words: &mut M, node: u32, high: u32) {
        self.table.set(words, node, KEY_HIGH, high);
    }

    fn key<M: Words>(&self, words: &M, node: u32) -> Key {
        Key::read(self.table.get(words, node, KEY_LOW), self.high(words, node))
    }

    /// Returns whether `node` is used, by the block of this key.
    #[inline]
    fn is_about<M: Words>(&self, words: &M, node: u32, key: Key) -> bool {
        let high = self.high(words, node) & (USED | KEY_BITS);
        self.table.get(words, node, KEY_LOW) == key.low && high == key.high | USED
    }

    #[inline]
    fn key_site(&self, key: Key) -> Site {
        let mixed = ((u64::from(key.high) << 32) | u64::from(key.low)) ^ self.seed;
        let mixed = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        let mixed = (mixed ^ (mixed >> 32)).to_be_bytes();
        let half = |i: usize| u32::from_be_bytes([mixed[i], mixed[i + 1], mixed[i + 2], mixed[i + 3]]);
        self.keys.site([half(0), half(4)])
    }

    #[inline]
    fn content_site(&self, content: Fingerprint) -> Site {
        self.contents.site_of_content(content)
    }

    /// Returns the fingerprint of what the disk holds for the block of `node`.
    pub(super) fn content<M: Words>(&self, words: &M, node: u32) -> Fingerprint {
        self.table.content(words, node)
    }

    /// Returns the node of a block, or `None` if the block is not known.
    pub(super) fn find<M: Words>(&self, words: &M, block: BlockId) -> Option<u32> {
        let key = Key::of(block);
        self.keys.find(words, self.key_site(key), |node| self.is_about(words, node, key))
    }

    /// Returns a hint of where the node of a block is, and the fingerprint of what the disk holds for the block.
    /// Returns `None` if the block is not known.
    pub(super) fn look_up<M: Words>(&self, words: &M, block: BlockId) -> Option<(NodeHint, Fingerprint)> {
        self.find(words, block).map(|node| (NodeHint(node), self.content(words, node)))
    }

    /// Returns the node of a block, or `None` if the block is not known. Needs no search if the node is still where
    /// `hint` says.
    pub(super) fn find_again<M: Words>(&self, words: &M, hint: NodeHint, block: BlockId) -> Option<u32> {
        let NodeHint(node) = hint;
        let is_there = node < self.limit && self.is_about(words, node, Key::of(block));
        debug_assert!(!is_there || self.find(words, block) == Some(node), "a block has two nodes");
        if is_there { Some(node) } else { self.find(words, block) }
    }

    /// Returns the node that is found by `content`, or `None` if there is no such node.
    pub(super) fn find_content<M: Words>(&self, words: &M, content: Fingerprint) -> Option<u32> {
        self.contents.find(words, self.content_site(content), |node| self.content(words, node) == content)
    }

    /// Marks a node as referenced: the guest touched its block.
    pub(super) fn reference<M: Words>(&self, words: &mut M, node: u32) {
        let high = self.high(words, node);
        self.set_high(words, node, high | REFERENCED);
        self.stand_for_content(words, node);
    }

    /// Clears the mark that a node was referenced.
    pub(super) fn clear_reference<M: Words>(&self, words: &mut M, node: u32) {
        let high = self.high(words, node);
        self.set_high(words, node, high & !REFERENCED);
    }

    /// Makes `node` the one that is found by its content, unless another one already is. Zero blocks are not found by
    /// content.
    fn stand_for_content<M: Words>(&self, words: &mut M, node: u32) {
        let high = self.high(words, node);
        let content = self.content(words, node);
        if high & STANDS != 0 || content == self.zero || self.find_content(words, content).is_some() {
            return;
        }
        let site_of = |words: &M, other| self.content_site(self.content(words, other));
        if self.contents.insert(words, self.content_site(content), node, site_of) {
            self.set_high(words, node, high | STANDS);
        }
    }

    /// Returns whether a node must be removed before another can be inserted.
    pub(super) fn is_full(&self) -> bool {
        self.free == NONE
    }

    /// Inserts a block and returns its node, or returns `None` if the hash table has no room for it. The block must not have
    /// a node yet, and the table must not be full.
    pub(super) fn insert<M: Words>(&mut self, words: &mut M, block: BlockId, content: Fingerprint) -> Option<u32> {
        let (node, key) = (self.free, Key::of(block));
        let next_free = self.table.get(words, node, NEXT_FREE);
        if !self.insert_key(words, node, key) {
            return None;
        }
        self.free = next_free;
        self.table.set(words, node, KEY_LOW, key.low);
        if !self.rules.hold(Rule::StoreOrder) {
            self.set_high(words, node, key.high | USED | REFERENCED);
        }
        self.table.set_content(words, node, content);
        settle();
        // This store makes the node valid.
        self.set_high(words, node, key.high | USED | REFERENCED);
        self.used += 1;
        self.stand_for_content(words, node);
        Some(node)
    }

    /// Makes `node` the one that is found by `key`. Returns `false` if the hash table has no room for it.
    fn insert_key<M: Words>(&self, words: &mut M, node: u32, key: Key) -> bool {
        self.keys.insert(words, self.key_site(key), node, |words: &M, other| self.key_site(self.key(words, other)))
    }

    /// Returns the node to reuse when all are in use: the first one whose content is not cached and that was not
    /// referenced since the hand passed it. After [`CLOCK_STEPS`] steps, returns the node at the hand.
    pub(super) fn clock_victim<M: Words>(&mut self, words: &mut M, slots: &Slots) -> u32 {
        for _ in 0..CLOCK_STEPS {
            let node = self.hand;
            self.hand = (self.hand + 1) % self.limit;
            let high = self.high(words, node);
            if high & REFERENCED != 0 {
                self.set_high(words, node, high & !REFERENCED);
            } else if slots.cached(words, self.content(words, node)).is_none() {
                return node;
            }
        }
        self.hand
    }

    /// Removes a node, and returns its block.
    pub(super) fn remove<M: Words>(&mut self, words: &mut M, node: u32) -> BlockId {
        let (key, high) = (self.key(words, node), self.high(words, node));
        // This store makes the node invalid, even if the process is killed while the hash tables still name it.
        self.set_high(words, node, 0);
        settle();
        self.keys.remove(words, self.key_site(key), node);
        if high & STANDS != 0 {
            self.contents.remove(words, self.content_site(self.content(words, node)), node);
        }
        self.put_on_free_list(words, node);
        self.used -= 1;
        key.block()
    }

    fn put_on_free_list<M: Words>(&mut self, words: &mut M, node: u32) {
        self.table.set(words, node, NEXT_FREE, self.free);
        self.free = node;
    }

    /// Removes all nodes.
    pub(super) fn clear<M: Words>(&mut self, words: &mut M) {
        words[header::NODES_VALID] = 0;
        settle();
        self.keys.clear(words);
        self.contents.clear(words);
        self.free = NONE;
        for node in (0..self.limit).rev() {
            self.set_high(words, node, 0);
            self.put_on_free_list(words, node);
        }
        self.used = 0;
        self.hand = 0;
        settle();
        words[header::NODES_VALID] = 1;
    }

    /// Returns the block of `node`, or `None` if the node is not used.
    pub(super) fn block<M: Words>(&self, words: &M, node: u32) -> Option<BlockId> {
        (self.high(words, node) & USED != 0).then(|| self.key(words, node).block())
    }

    /// Returns the block of `node`, the fingerprint of what the disk holds there, and whether the node was referenced
    /// lately. Returns `None` if the node is not used.
    pub(super) fn get<M: Words>(&self, words: &M, node: u32) -> Option<(BlockId, Fingerprint, bool)> {
        let high = self.high(words, node);
        (high & USED != 0).then(|| (self.key(words, node).block(), self.content(words, node), high & REFERENCED != 0))
    }

    /// Returns the next known block on the clock whose content is not cached, or `None` if there is no such block.
    pub(super) fn any_resident<M: Words>(&mut self, words: &M, slots: &Slots) -> Option<BlockId> {
        for _ in 0..self.limit {
            let node = self.hand;
            self.hand = (self.hand + 1) % self.limit;
            if let Some((block, content, _)) = self.get(words, node)
                && slots.cached(words, content).is_none()
            {
                return Some(block);
            }
        }
        None
    }

    /// Stores the state that is kept outside the words.
    pub(super) fn close<M: Words>(&self, words: &mut M) {
        words[header::FREE_NODE] = self.free;
        words[header::NODES_USED] = self.used;
    }

    /// Loads the state that is kept outside the words from the header.
    pub(super) fn take_as_closed<M: Words>(&mut self, words: &M) {
        self.free = words[header::FREE_NODE];
        self.used = words[header::NODES_USED];
    }

    /// Rebuilds the hash tables from the nodes of the previous process. A node is kept if `disk_of` returns the number that
    /// its disk has now, no other node has its block, and there is room for it. If the previous process was killed
    /// while it cleared the table, all nodes are removed.
    pub(super) fn rebuild<M: Words>(&mut self, words: &mut M, disk_of: impl Fn(BlockId) -> Option<DiskIndex>) {
        if words[header::NODES_VALID] != 1 {
            return self.clear(words);
        }
        self.keys.clear(words);
        self.contents.clear(words);
        for node in (0..self.limit).rev() {
            if node % BATCH == BATCH - 1 {
                self.touch_lines(words, node);
            }
            let (high, block) = (self.high(words, node), self.key(words, node).block());
            let disk = disk_of(block).filter(|_| high & USED != 0);
            let kept = |disk| high & (USED | REFERENCED) | Key::of(BlockId { disk, ..block }).high;
            // One store: a node that is dropped must never look like one of another disk, even to a successor.
            self.set_high(words, node, disk.map_or(0, kept));
            if disk.is_some() && self.take_up(words, node) {
                self.used += 1;
            } else {
                self.set_high(words, node, 0);
                settle();
                self.put_on_free_list(words, node);
            }
        }
    }

    /// Loads the lines of the last [`BATCH`] nodes up to `to`, so that the loads overlap.
    fn touch_lines<M: Words>(&self, words: &M, to: u32) {
        let lines = (0..=to).rev().take(BATCH as usize).map(|node| {
            let by_key = self.keys.touch(words, self.key_site(self.key(words, node)));
            by_key ^ self.contents.touch(words, self.content_site(self.content(words, node)))
        });
        black_box(lines.fold(0, |sum, line| sum ^ line));
    }

    /// Enters a node of the previous process in the hash tables. Returns `false` if another node has its block, or if there
    /// is no room.
    fn take_up<M: Words>(&self, words: &mut M, node: u32) -> bool {
        let key = self.key(words, node);
        if self.find(words, key.block()).is_some() || !self.insert_key(words, node, key) {
            return false;
        }
        self.stand_for_content(words, node);
        true
    }
}
