//! The node table: what the disk holds for each known block. Bounded by CLOCK (second chance), so it keeps the blocks
//! that the guest touched last; a block whose content is cached is passed over.

use super::resume::{BATCH, Chain, look_along};
use super::{CacheIndex, Fingerprint, NODE_WORDS, NONE, header, settle};
use crate::rules::Rule;
use crate::units::{BlockId, BlockNumber, DiskIndex, PAGE_SIZE_U64, PageCount};
use std::hint::black_box;
use std::ops::{DerefMut, Range};

const KEY_LOW: usize = 0;
const KEY_HIGH: usize = 1;
const CONTENT: usize = 2;
const KEY_CHAIN: usize = 5;
const CONTENT_CHAIN: usize = 6;

const USED: u32 = 1 << 31;
const REFERENCED: u32 = 1 << 30;
/// On its content chain: the node that stands for this content.
const STANDS: u32 = 1 << 29;
const KEY_BITS: u32 = (1 << 20) - 1;

/// Highest block number plus one: 40 bits.
pub(super) const BLOCK_LIMIT: u64 = 1 << 40;

/// How far the clock's hand moves before it takes whatever it points at.
const CLOCK_STEPS: u32 = 64;

fn pack(block: BlockId) -> (u32, u32) {
    assert!(block.bno.0 < BLOCK_LIMIT && block.disk.0 < 4096, "a block beyond what its key can hold");
    let key = (u64::from(block.disk.0) << 40) | block.bno.0;
    let bytes = key.to_le_bytes();
    let word = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
    (word(0), word(4) & KEY_BITS)
}

fn unpack(low: u32, high: u32) -> BlockId {
    let disk = u16::try_from((high & KEY_BITS) >> 8).unwrap_or(0);
    BlockId { disk: DiskIndex(disk), bno: BlockNumber((u64::from(high & 0xff) << 32) | u64::from(low)) }
}

impl<M: DerefMut<Target = [u32]>> CacheIndex<M> {
    fn node_word(&self, node: u32, field: usize) -> u32 {
        self.words[self.layout.nodes_at() + node as usize * NODE_WORDS + field]
    }

    fn set_node_word(&mut self, node: u32, field: usize, value: u32) {
        let at = self.layout.nodes_at() + node as usize * NODE_WORDS + field;
        self.words[at] = value;
    }

    pub(super) fn node_fingerprint(&self, node: u32) -> Fingerprint {
        Fingerprint([0, 1, 2].map(|i| self.node_word(node, CONTENT + i)))
    }

    fn key_head_at(&self, low: u32, high: u32) -> usize {
        let key = ((u64::from(high) << 32) | u64::from(low)) ^ self.seed;
        let mixed = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        self.layout.key_heads_at() + ((mixed >> 32) & u64::from(self.layout.node_heads - 1)) as usize
    }

    fn content_head_at(&self, content: Fingerprint) -> usize {
        self.layout.content_heads_at() + (content.0[1] & (self.layout.node_heads - 1)) as usize
    }

    pub(super) fn find_node(&self, block: BlockId) -> Option<u32> {
        let (low, high) = pack(block);
        let mut node = self.words[self.key_head_at(low, high)];
        while node != NONE {
            if self.node_word(node, KEY_LOW) == low && self.node_word(node, KEY_HIGH) & KEY_BITS == high {
                return Some(node);
            }
            node = self.node_word(node, KEY_CHAIN);
        }
        None
    }

    /// Returns the node that stands for `content`, if the disk is known to hold it anywhere.
    pub(super) fn find_content(&self, content: Fingerprint) -> Option<u32> {
        let mut node = self.words[self.content_head_at(content)];
        while node != NONE {
            if self.node_fingerprint(node) == content {
                return Some(node);
            }
            node = self.node_word(node, CONTENT_CHAIN);
        }
        None
    }

    pub(super) fn reference_node(&mut self, node: u32) {
        let high = self.node_word(node, KEY_HIGH);
        self.set_node_word(node, KEY_HIGH, high | REFERENCED);
        self.stand_for_content(node);
    }

    pub(super) fn clear_reference(&mut self, node: u32) {
        let high = self.node_word(node, KEY_HIGH);
        self.set_node_word(node, KEY_HIGH, high & !REFERENCED);
    }

    /// Puts `node` on its content chain unless another node stands there for the same content.
    fn stand_for_content(&mut self, node: u32) {
        let high = self.node_word(node, KEY_HIGH);
        let content = self.node_fingerprint(node);
        if high & STANDS != 0 || content == self.zero || self.find_content(content).is_some() {
            return;
        }
        let at = self.content_head_at(content);
        let first = self.words[at];
        self.set_node_word(node, CONTENT_CHAIN, first);
        self.words[at] = node;
        self.set_node_word(node, KEY_HIGH, high | STANDS);
    }

    pub(super) fn insert_node(&mut self, block: BlockId, content: Fingerprint) {
        let node = self.take_node();
        let (low, high) = pack(block);
        self.set_node_word(node, KEY_LOW, low);
        if !self.rules.hold(Rule::StoreOrder) {
            self.set_node_word(node, KEY_HIGH, high | USED | REFERENCED);
        }
        for (i, word) in content.0.into_iter().enumerate() {
            self.set_node_word(node, CONTENT + i, word);
        }
        settle();
        // This store makes it valid.
        self.set_node_word(node, KEY_HIGH, high | USED | REFERENCED);
        let at = self.key_head_at(low, high);
        let first = self.words[at];
        self.set_node_word(node, KEY_CHAIN, first);
        self.words[at] = node;
        self.nodes_used += 1;
        self.stand_for_content(node);
        self.follow_insert(node, block);
    }

    fn take_node(&mut self) -> u32 {
        if self.free_node == NONE {
            let victim = self.clock_victim();
            self.remove_node(victim);
        }
        let node = self.free_node;
        self.free_node = self.node_word(node, KEY_CHAIN);
        node
    }

    /// Returns the node to reuse when all are in use: the first that was not referenced since the hand passed and whose
    /// content is not cached.
    fn clock_victim(&mut self) -> u32 {
        for _ in 0..CLOCK_STEPS {
            let node = self.hand;
            self.hand = (self.hand + 1) % self.layout.nodes;
            let high = self.node_word(node, KEY_HIGH);
            if high & REFERENCED != 0 {
                self.set_node_word(node, KEY_HIGH, high & !REFERENCED);
            } else if self.cached(self.node_fingerprint(node)).is_none() {
                return node;
            }
        }
        self.hand
    }

    pub(super) fn remove_node(&mut self, node: u32) {
        let (low, high) = (self.node_word(node, KEY_LOW), self.node_word(node, KEY_HIGH));
        // This store makes it void, whatever becomes of the chains.
        self.set_node_word(node, KEY_HIGH, 0);
        settle();
        let at = self.key_head_at(low, high & KEY_BITS);
        self.unchain(at, node, KEY_CHAIN);
        if high & STANDS != 0 {
            let at = self.content_head_at(self.node_fingerprint(node));
            self.unchain(at, node, CONTENT_CHAIN);
        }
        self.set_node_word(node, KEY_CHAIN, self.free_node);
        self.free_node = node;
        self.nodes_used -= 1;
        self.follow_remove(node, unpack(low, high));
    }

    fn unchain(&mut self, head_at: usize, node: u32, field: usize) {
        let next = self.node_word(node, field);
        if self.words[head_at] == node {
            self.words[head_at] = next;
            return;
        }
        let mut before = self.words[head_at];
        while self.node_word(before, field) != node {
            before = self.node_word(before, field);
        }
        self.set_node_word(before, field, next);
    }

    pub(super) fn clear_nodes(&mut self) {
        self.words[header::NODES_VALID] = 0;
        settle();
        let (from, to) = (self.layout.key_heads_at(), self.layout.words());
        self.words[from..to].fill(NONE);
        self.free_node = NONE;
        for node in (0..self.layout.nodes).rev() {
            self.set_node_word(node, KEY_HIGH, 0);
            self.set_node_word(node, KEY_CHAIN, self.free_node);
            self.free_node = node;
        }
        self.nodes_used = 0;
        self.hand = 0;
        settle();
        self.words[header::NODES_VALID] = 1;
        self.follow_clear();
    }

    /// Chains the nodes that a former process left. A node is believed if its block is one of these disks' and no other
    /// node names the block.
    pub(super) fn rebuild_nodes(&mut self) {
        if self.words[header::NODES_VALID] != 1 {
            return self.clear_nodes();
        }
        let (from, to) = (self.layout.key_heads_at(), self.layout.words());
        self.words[from..to].fill(NONE);
        for node in (0..self.layout.nodes).rev() {
            if node % BATCH == BATCH - 1 {
                self.touch_node_chains(node);
            }
            let high = self.node_word(node, KEY_HIGH);
            let is_of_disk = unpack(0, high).disk.0 < self.layout.disks;
            self.set_node_word(node, KEY_HIGH, high & (USED | REFERENCED | KEY_BITS));
            if high & USED != 0 && is_of_disk && self.chain_node(node) {
                self.nodes_used += 1;
            } else {
                self.set_node_word(node, KEY_HIGH, 0);
                self.set_node_word(node, KEY_CHAIN, self.free_node);
                self.free_node = node;
            }
        }
    }

    /// Has the processor load what the nodes up to `to` are about to be compared with: all at a time, not one by one.
    fn touch_node_chains(&self, to: u32) {
        let mut firsts = [[NONE; 2]; BATCH as usize];
        for (first, node) in firsts.iter_mut().zip((0..=to).rev()) {
            let (low, high) = (self.node_word(node, KEY_LOW), self.node_word(node, KEY_HIGH) & KEY_BITS);
            let content_at = self.content_head_at(self.node_fingerprint(node));
            *first = [self.words[self.key_head_at(low, high)], self.words[content_at]];
        }
        let nodes = firsts.as_flattened().iter().filter(|first| **first < self.layout.nodes);
        black_box(nodes.fold(0, |sum, first| sum ^ self.node_word(*first, KEY_LOW)));
    }

    /// Puts a node that a former process left on its chains, unless another one has its block.
    fn chain_node(&mut self, node: u32) -> bool {
        let (low, high) = (self.node_word(node, KEY_LOW), self.node_word(node, KEY_HIGH) & KEY_BITS);
        let (content, key_at) = (self.node_fingerprint(node), self.key_head_at(low, high));
        let stand_at = self.content_head_at(content);
        let same_key =
            |other| self.node_word(other, KEY_LOW) == low && self.node_word(other, KEY_HIGH) & KEY_BITS == high;
        let key = look_along(self.words[key_at], |other| self.node_word(other, KEY_CHAIN), same_key);
        let same_content = |other| self.node_fingerprint(other) == content;
        let stand = look_along(self.words[stand_at], |other| self.node_word(other, CONTENT_CHAIN), same_content);
        if key != Chain::Room || stand == Chain::TooLong {
            return false;
        }
        self.set_node_word(node, KEY_CHAIN, self.words[key_at]);
        self.words[key_at] = node;
        if stand == Chain::Room && content != self.zero {
            self.set_node_word(node, CONTENT_CHAIN, self.words[stand_at]);
            self.words[stand_at] = node;
            let high = self.node_word(node, KEY_HIGH);
            self.set_node_word(node, KEY_HIGH, high | STANDS);
        }
        true
    }

    /// Returns the block that `node` is about, what the disk holds there, and whether it was referenced lately.
    pub(super) fn node(&self, node: u32) -> Option<(BlockId, Fingerprint, bool)> {
        let (low, high) = (self.node_word(node, KEY_LOW), self.node_word(node, KEY_HIGH));
        (high & USED != 0).then(|| (unpack(low, high), self.node_fingerprint(node), high & REFERENCED != 0))
    }

    /// Forgets every block of `disk` in `blocks`, in time bounded by the smaller of the range and the table.
    pub fn forget_range(&mut self, disk: DiskIndex, blocks: Range<u64>) {
        if self.nodes_used == 0 {
            return;
        }
        // A look-up costs about as much as passing over eight nodes.
        if blocks.end.saturating_sub(blocks.start).saturating_mul(8) <= u64::from(self.layout.nodes) {
            for bno in blocks {
                self.forget(BlockId { disk, bno: BlockNumber(bno) });
            }
            return;
        }
        for node in 0..self.layout.nodes {
            let (low, high) = (self.node_word(node, KEY_LOW), self.node_word(node, KEY_HIGH));
            let block = unpack(low, high);
            if high & USED != 0 && block.disk == disk && blocks.contains(&block.bno.0) {
                self.forget(block);
            }
        }
    }

    /// Returns a known block whose content is not cached (the oldest the clock finds): what an engine that trusts the
    /// guest's word would take an unknown page for. Only the ablation of the admission check asks.
    pub fn any_resident(&mut self) -> Option<BlockId> {
        for _ in 0..self.layout.nodes {
            let node = self.hand;
            self.hand = (self.hand + 1) % self.layout.nodes;
            let (low, high) = (self.node_word(node, KEY_LOW), self.node_word(node, KEY_HIGH));
            if high & USED != 0 && self.cached(self.node_fingerprint(node)).is_none() {
                return Some(unpack(low, high));
            }
        }
        None
    }

    /// Returns the bytes of disk that all known blocks together stand for.
    pub fn known_bytes(&self) -> u64 {
        u64::from(PageCount(self.nodes_used).0) * PAGE_SIZE_U64
    }
}
