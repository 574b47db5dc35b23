//! The nodes: what the disk holds for each known block that no slot names. The CLOCK algorithm (second chance) bounds their
//! number, so that they are the blocks that the guest touched last. CLOCK skips blocks whose content is cached.

use super::entries::{Entries, KNOWN, Key, Vacancy};
use super::layout::{Layout, NONE, Words, header, settle};
use super::table::BATCH;
use crate::fingerprint::Fingerprint;
use crate::rules::{Rule, Rules};
use crate::units::{BlockId, DiskIndex};

const REFERENCED: u32 = 1 << 30;
/// Flag of a node that is found by its content.
const STANDS: u32 = 1 << 29;

/// Maximum number of steps of the clock's hand before it takes any node.
const CLOCK_STEPS: u32 = 64;

/// The nodes, with the part of their state that is kept outside the words. A free node holds the next free one in place of
/// the lower half of its key.
#[derive(Debug)]
pub(super) struct Nodes {
    entries: Entries,
    /// The first entry that is a node.
    start: u32,
    /// First free node.
    free: u32,
    used: u32,
    /// Position of the clock's hand.
    hand: u32,
    zero: Fingerprint,
    rules: Rules,
}

impl Nodes {
    /// Returns the nodes of a layout. None is used or free until they are cleared, loaded or rebuilt.
    pub(super) fn new(layout: &Layout, entries: Entries, zero: Fingerprint) -> Self {
        let start = layout.table_slots();
        Self { entries, start, free: NONE, used: 0, hand: start, zero, rules: Rules::default() }
    }

    /// Sets the rules in force.
    pub(super) fn keep_to(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Returns the number of blocks that are known by a node.
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    /// Returns whether `entry` is a node.
    #[inline]
    pub(super) fn has(&self, entry: u32) -> bool {
        entry >= self.start
    }

    /// Marks a node as referenced: the guest touched its block. Makes it the entry that is found by its content, or returns
    /// the one that already is. Zero blocks are not found by content.
    pub(super) fn reference<M: Words>(&self, words: &mut M, node: u32) -> Option<u32> {
        let high = self.entries.high(words, node);
        self.entries.set_high(words, node, high | REFERENCED);
        self.stand_for_content(words, node)
    }

    /// Makes room for a slot that is to be found by the content of `node`.
    pub(super) fn step_back<M: Words>(&self, words: &mut M, node: u32) {
        let high = self.entries.high(words, node);
        self.entries.set_high(words, node, high & !STANDS);
        self.entries.leave_content(words, node);
    }

    /// Clears the mark that a node was referenced.
    pub(super) fn clear_reference<M: Words>(&self, words: &mut M, node: u32) {
        let high = self.entries.high(words, node);
        self.entries.set_high(words, node, high & !REFERENCED);
    }

    fn stand_for_content<M: Words>(&self, words: &mut M, node: u32) -> Option<u32> {
        let high = self.entries.high(words, node);
        let content = self.entries.content(words, node);
        if high & STANDS != 0 || content == self.zero {
            return None;
        }
        let other = self.entries.find_content(words, content);
        if other.is_none() && self.entries.enter_content(words, node) {
            self.entries.set_high(words, node, high | STANDS);
        }
        other
    }

    /// Returns whether a node must be removed before another can be inserted.
    pub(super) fn is_full(&self) -> bool {
        self.free == NONE
    }

    /// Inserts a block and returns its node, or returns `None` if the hash table has no room for it. The block must not be
    /// known yet, and there must be a free node.
    pub(super) fn insert<M: Words>(&mut self, words: &mut M, block: BlockId, content: Fingerprint) -> Option<u32> {
        let (node, key) = (self.free, Key::of(block));
        let next_free = self.entries.low(words, node);
        if !self.entries.enter_key(words, node, key) {
            return None;
        }
        self.free = next_free;
        self.fill(words, node, key, content, REFERENCED);
        self.stand_for_content(words, node);
        Some(node)
    }

    /// Takes over the block of a slot, which keeps its page until it is let go. Returns the node. There must be a free one.
    /// `is_in_guest` says whether the guest has touched the block lately.
    pub(super) fn take_over<M: Words>(&mut self, words: &mut M, slot: u32, is_in_guest: bool) -> u32 {
        let node = self.free;
        self.free = self.entries.low(words, node);
        let (key, content) = (self.entries.key(words, slot), self.entries.content(words, slot));
        self.fill(words, node, key, content, if is_in_guest { STANDS | REFERENCED } else { STANDS });
        self.entries.hand_over_key(words, key, slot, node);
        self.entries.hand_over_content(words, slot, node);
        node
    }

    fn fill<M: Words>(&mut self, words: &mut M, node: u32, key: Key, content: Fingerprint, flags: u32) {
        let high = key.high | KNOWN | flags;
        self.entries.set_low(words, node, key.low);
        if !self.rules.hold(Rule::StoreOrder) {
            self.entries.set_high(words, node, high);
        }
        self.entries.set_content(words, node, content);
        settle();
        // This store makes the node valid.
        self.entries.set_high(words, node, high);
        self.used += 1;
    }

    /// Returns the node to reuse when all are in use: the first one whose content is not cached and that was not
    /// referenced since the hand passed it. After [`CLOCK_STEPS`] steps, returns the node at the hand.
    pub(super) fn clock_victim<M: Words>(&mut self, words: &mut M) -> u32 {
        for _ in 0..CLOCK_STEPS {
            let node = self.turn();
            let high = self.entries.high(words, node);
            if high & REFERENCED != 0 {
                self.entries.set_high(words, node, high & !REFERENCED);
            } else if !self.is_cached(words, node, high) {
                return node;
            }
        }
        self.hand
    }

    /// Moves the hand on, and returns the node that it was at.
    fn turn(&mut self) -> u32 {
        let node = self.hand;
        self.hand = if node + 1 < self.entries.limit() { node + 1 } else { self.start };
        node
    }

    fn is_cached<M: Words>(&self, words: &M, node: u32, high: u32) -> bool {
        // The slot would be found by the content instead of the node.
        high & STANDS == 0 && self.entries.find_page(words, self.entries.content(words, node)).is_some()
    }

    /// Removes a node, and returns its block.
    pub(super) fn remove<M: Words>(&mut self, words: &mut M, node: u32) -> BlockId {
        let key = self.give_up(words, node);
        self.entries.leave_key(words, node, key);
        key.block()
    }

    /// Removes a node, which stays in the hash table of blocks until another entry [takes its
    /// place](Entries::hand_over_key). Returns the key.
    pub(super) fn give_up<M: Words>(&mut self, words: &mut M, node: u32) -> Key {
        let high = self.entries.high(words, node);
        let key = self.invalidate(words, node);
        if high & STANDS != 0 {
            self.entries.leave_content(words, node);
        }
        self.put_on_free_list(words, node);
        self.used -= 1;
        key
    }

    /// Removes a node that is found by its content, in the word at `at`, and by its block. Returns what it leaves to the slot that
    /// gets the block.
    pub(super) fn make_way<M: Words>(&mut self, words: &mut M, node: u32, at: usize) -> Vacancy {
        let key = self.invalidate(words, node);
        let vacancy = self.entries.vacate(words, node, key, at);
        self.put_on_free_list(words, node);
        self.used -= 1;
        vacancy
    }

    /// Makes a node invalid, even if the process is killed while the hash tables still name it. Returns the key.
    fn invalidate<M: Words>(&self, words: &mut M, node: u32) -> Key {
        let key = self.entries.key(words, node);
        self.entries.set_high(words, node, 0);
        settle();
        key
    }

    fn put_on_free_list<M: Words>(&mut self, words: &mut M, node: u32) {
        self.entries.set_low(words, node, self.free);
        self.free = node;
    }

    /// Frees all nodes, after the hash tables were cleared.
    pub(super) fn clear<M: Words>(&mut self, words: &mut M) {
        (self.free, self.used, self.hand) = (NONE, 0, self.start);
        for node in (self.start..self.entries.limit()).rev() {
            self.entries.set_high(words, node, 0);
            self.put_on_free_list(words, node);
        }
    }

    /// Returns the block of `node`, the fingerprint of what the disk holds there, and whether the node was referenced
    /// lately. Returns `None` if the node is not used.
    pub(super) fn get<M: Words>(&self, words: &M, node: u32) -> Option<(BlockId, Fingerprint, bool)> {
        let block = self.entries.block(words, node)?;
        Some((block, self.entries.content(words, node), self.entries.high(words, node) & REFERENCED != 0))
    }

    /// Returns the next block on the clock whose content is not cached, or `None` if there is no such block.
    pub(super) fn any_resident<M: Words>(&mut self, words: &M) -> Option<BlockId> {
        for _ in self.start..self.entries.limit() {
            let node = self.turn();
            if let Some(block) = self.entries.block(words, node)
                && !self.is_cached(words, node, self.entries.high(words, node))
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

    /// Enters the nodes of the previous process in the hash tables. A node is kept if `disk_of` returns the number that its
    /// disk has now, no other entry has its block, and there is room for it.
    pub(super) fn rebuild<M: Words>(&mut self, words: &mut M, disk_of: impl Fn(BlockId) -> Option<DiskIndex>) {
        for node in (self.start..self.entries.limit()).rev() {
            if node % BATCH == BATCH - 1 {
                self.touch_lines(words, node);
            }
            let (high, block) = (self.entries.high(words, node), self.entries.key(words, node).block());
            let disk = disk_of(block).filter(|_| high & KNOWN != 0);
            let key = disk.map(|disk| Key::of(BlockId { disk, ..block }));
            let key = key.filter(|key| self.entries.find(words, key.block()).is_none());
            // One store: a node that is dropped must never look like one of another disk, even to a successor.
            self.entries.set_high(words, node, key.map_or(0, |key| high & (KNOWN | REFERENCED) | key.high));
            if key.is_some_and(|key| self.entries.enter_key(words, node, key)) {
                self.stand_for_content(words, node);
                self.used += 1;
            } else {
                self.entries.set_high(words, node, 0);
                settle();
                self.put_on_free_list(words, node);
            }
        }
    }

    /// Begins to load the lines of the last [`BATCH`] nodes up to `to`, so that the loads overlap.
    fn touch_lines<M: Words>(&self, words: &M, to: u32) {
        let batch = (self.start..=to).rev().take(BATCH as usize);
        batch.for_each(|node| self.entries.touch(words, node));
    }
}
