//! The cache index: which content each known block has, and in which slot of the pool that content is cached.
//!
//! Called by the engine only. It owns one region of 32-bit words with a fixed layout, which may outlive the process:
//! ```text
//! header 32 | disks: 26 each | log of sends | slots: 7 each | slot heads | nodes: 7 each | key heads | content heads
//! slot: previous, next, fingerprint x3, chain, used:1 hit:1 pins:16      node: block 52 bits + flags, fingerprint x3, key chain, content chain
//! ```
//! A *node* says what the disk holds for one block; a *slot* says what the server holds in one page. Block -> fingerprint
//! -> slot (papers/remoca.txt II.B names blocks only; decision 0001 says why content is the address here).
//! 1. Every slot below the capacity is free, used, or draining (given up while a request for it is outstanding).
//! 2. At most one used slot has a given fingerprint, and at most one node of that fingerprint is on its content chain.
//! 3. A node that is gone is reachable by neither chain. Nodes and slots end, and begin, with one store ([`settle`]).
//!
//! It does no I/O and never allocates after it was made; both tables are bounded. A move into another region goes on beside it
//! (`moving.rs`).

mod kept;
mod moving;
mod nodes;
mod resume;
mod size;
mod slots;

use crate::fingerprint::Fingerprint;
use crate::rules::Rules;
use crate::units::{BlockId, PageCount, SlotIndex};
use std::ops::DerefMut;
use std::sync::atomic::{Ordering, compiler_fence};

pub use kept::{LogEnd, Pool, SWAP_AREAS_MAX};
pub use resume::{Origin, Unusable};
pub use size::Move;

const NONE: u32 = u32::MAX;
const MAGIC: u32 = 0x5845_4449;
const LAYOUT_VERSION: u32 = 4;
const HEADER_WORDS: usize = 32;
const SLOT_WORDS: usize = 7;
const NODE_WORDS: usize = 7;

/// Words of the header; those that are not named are 0.
mod header {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 1;
    pub(super) const SLOTS: usize = 2;
    pub(super) const NODES: usize = 3;
    pub(super) const DISKS: usize = 4;
    /// Fingerprint of a page of zeroes: tells whether the key is the same.
    pub(super) const ZERO: usize = 5;
    /// 0 while the node table is cleared: then it holds nothing.
    pub(super) const NODES_VALID: usize = 8;
    pub(super) const CAPACITY: usize = 9;
    /// First of the queue; the rest of it is in the slots.
    pub(super) const QUEUE: usize = 10;
    /// 1: the words from here on name the pool that the slots are about.
    pub(super) const POOL_VALID: usize = 16;
    pub(super) const SERVER: usize = 17;
    pub(super) const GENERATION: usize = 18;
    /// SENDPAGEs the pool had stored when the log began.
    pub(super) const BASE: usize = 20;
    /// SENDPAGEs since then.
    pub(super) const SENDS: usize = 22;
    /// Entries of the log since then.
    pub(super) const LOGGED: usize = 23;
    /// Number of these entries, and of sends, that the server is known to have taken.
    pub(super) const TAKEN: usize = 24;
    pub(super) const TAKEN_SENDS: usize = 25;
    /// Not 0: the checksum of all other words of the header. Everything is in order, and the words from here on are those
    /// of [`super::CacheIndex`] that it keeps outside.
    pub(super) const CLOSED: usize = 26;
    pub(super) const TAIL: usize = 27;
    pub(super) const FREE_SLOT: usize = 28;
    pub(super) const FREE_NODE: usize = 29;
    pub(super) const NODES_USED: usize = 30;
    pub(super) const SLOTS_USED: usize = 31;
}

/// Keeps the compiler from moving a store across this point. That is all the order that a killed process needs: its
/// stores go to memory that outlives it, the processor makes those of one thread visible in program order, and a kill
/// falls between two instructions. (After a power cut nothing of the region is left to be read.)
fn settle() {
    compiler_fence(Ordering::SeqCst);
}

/// Sizes and places of the tables inside the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    slots: u32,
    nodes: u32,
    slot_heads: u32,
    node_heads: u32,
    disks: u16,
}

impl Layout {
    /// Returns a layout for the blocks of `disks` disks: at most `slots` cached pages and, beyond those, `resident`
    /// blocks that the guest holds.
    #[must_use]
    pub fn new(slots: PageCount, resident: PageCount, disks: u16) -> Self {
        // NONE and the sums below need head room; 2^30 pages are 4 TiB.
        let limit = 1 << 30;
        let slots = slots.0.clamp(1, limit);
        let nodes = slots.saturating_add(resident.0.clamp(16, limit));
        let (slot_heads, node_heads) = (slots.next_power_of_two(), nodes.next_power_of_two());
        Self { slots, nodes, slot_heads, node_heads, disks }
    }

    /// Returns the number of 32-bit words that the region must have.
    #[must_use]
    pub fn words(&self) -> usize {
        self.content_heads_at() + self.node_heads as usize
    }

    /// Returns the maximum number of slots.
    #[must_use]
    pub fn slot_limit(&self) -> PageCount {
        PageCount(self.slots)
    }

    /// Returns the maximum number of known blocks.
    #[must_use]
    pub fn node_limit(&self) -> PageCount {
        PageCount(self.nodes)
    }

    /// Returns the number of blocks that it can know beside those that are cached.
    #[must_use]
    pub fn resident_limit(&self) -> PageCount {
        PageCount(self.nodes - self.slots)
    }

    /// Returns the number of disks whose blocks it knows.
    #[must_use]
    pub fn disks(&self) -> u16 {
        self.disks
    }

    fn log_at(&self) -> usize {
        HEADER_WORDS + usize::from(self.disks) * kept::DISK_WORDS
    }

    fn slots_at(&self) -> usize {
        self.log_at() + kept::LOG_ENTRIES as usize * kept::LOG_WORDS
    }

    fn slot_heads_at(&self) -> usize {
        self.slots_at() + self.slots as usize * SLOT_WORDS
    }

    fn nodes_at(&self) -> usize {
        self.slot_heads_at() + self.slot_heads as usize
    }

    fn key_heads_at(&self) -> usize {
        self.nodes_at() + self.nodes as usize * NODE_WORDS
    }

    fn content_heads_at(&self) -> usize {
        self.key_heads_at() + self.node_heads as usize
    }
}

/// What became of an evicted page that was offered to the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offer {
    /// Known content, not cached yet: store it in this slot.
    Admitted(SlotIndex),
    /// The content is cached already; it is the newest of the queue now.
    Duplicate,
    /// The disk holds this content for no block that is known.
    Unmatched,
    /// Known content, but every slot near the head is waiting for a reply, or the server has just taken slots away.
    NoSlot,
}

/// Where an admitted page enters the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Newest: discarded last.
    Tail,
    /// Next to be discarded.
    Head,
}

/// Slot counts; `free + used + draining` is the capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotCounts {
    pub free: u32,
    pub used: u32,
    pub draining: u32,
}

/// The index over a region of words `M` (a mapped file, or a plain vector).
pub struct CacheIndex<M> {
    words: M,
    layout: Layout,
    seed: u64,
    capacity: u32,
    counts: SlotCounts,
    tail: u32,
    free_slot: u32,
    free_node: u32,
    nodes_used: u32,
    hand: u32,
    /// Of all slots.
    pins: u64,
    sizing: size::Sizing,
    taken_as_it_was: bool,
    zero: Fingerprint,
    rules: Rules,
    /// Where it is moving to, if it is.
    target: Option<Box<moving::Target<M>>>,
}

impl<M: DerefMut<Target = [u32]>> CacheIndex<M> {
    /// Returns an empty index in `words`, which holds at least [`Layout::words`]. `seed` spreads the keys; `zero` is
    /// the fingerprint of a page of zeroes, which never takes a slot. No slot is usable until [`Self::aim`] and
    /// [`Self::resize`].
    ///
    /// # Panics
    /// If `words` is too short, a mistake of the caller.
    pub fn new(words: M, layout: Layout, seed: u64, zero: Fingerprint) -> Self {
        let mut this = Self::over(words, layout, seed, zero);
        this.words[header::MAGIC] = 0;
        settle();
        let nodes_at = layout.nodes_at();
        this.words[1..nodes_at].fill(0);
        this.words[layout.slot_heads_at()..nodes_at].fill(NONE);
        this.words[header::QUEUE] = NONE;
        this.clear_nodes();
        this.words[header::VERSION] = LAYOUT_VERSION;
        this.words[header::SLOTS] = layout.slots;
        this.words[header::NODES] = layout.nodes;
        this.words[header::DISKS] = u32::from(layout.disks);
        this.words[header::ZERO..header::ZERO + 3].copy_from_slice(&zero.0);
        settle();
        this.words[header::MAGIC] = MAGIC;
        this
    }

    /// Returns an index over words as they are.
    fn over(words: M, layout: Layout, seed: u64, zero: Fingerprint) -> Self {
        assert!(words.len() >= layout.words(), "the region is smaller than its layout");
        Self {
            words,
            layout,
            seed,
            capacity: 0,
            counts: SlotCounts::default(),
            tail: NONE,
            free_slot: NONE,
            free_node: NONE,
            nodes_used: 0,
            hand: 0,
            pins: 0,
            sizing: size::Sizing::new(),
            taken_as_it_was: false,
            zero,
            rules: Rules::default(),
            target: None,
        }
    }

    /// Keeps to these rules only (to show that tests notice when one is left out).
    pub fn keep_to(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Returns the words, to be saved or to be made into something else.
    pub fn words(&self) -> &M {
        &self.words
    }

    /// Returns the layout this index was made with.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns whether it was resumed, and its former process had closed it.
    pub fn was_closed(&self) -> bool {
        self.taken_as_it_was
    }

    /// Returns the numbers of free, used and draining slots.
    pub fn slot_counts(&self) -> SlotCounts {
        self.counts
    }

    /// Returns the number of blocks whose content is known.
    pub fn known_blocks(&self) -> PageCount {
        PageCount(self.nodes_used)
    }

    /// Returns the bytes of memory that the region takes.
    pub fn region_bytes(&self) -> usize {
        self.layout.words() * 4
    }

    /// Returns what the disk holds for `block`, if that is known.
    pub fn known(&self, block: BlockId) -> Option<Fingerprint> {
        self.find_node(block).map(|node| self.node_fingerprint(node))
    }

    /// Learns that the disk holds `content` for `block` (an I/O of the guest just showed it), so the guest holds it
    /// too.
    pub fn learn(&mut self, block: BlockId, content: Fingerprint) {
        if let Some(node) = self.find_node(block) {
            if self.node_fingerprint(node) == content {
                self.reference_node(node);
                self.note_in_guest(content);
                return;
            }
            self.remove_node(node);
        }
        self.insert_node(block, content);
        self.note_in_guest(content);
    }

    /// Forgets what the disk holds for `block`; its cached copy cannot be reached through it any more.
    pub fn forget(&mut self, block: BlockId) {
        if let Some(node) = self.find_node(block) {
            let content = self.node_fingerprint(node);
            self.remove_node(node);
            if content != self.zero
                && let Some(slot) = self.find_slot(content)
            {
                self.move_to_head(slot, false);
            }
        }
    }

    /// Returns the slot that holds `content`.
    pub fn cached(&self, content: Fingerprint) -> Option<SlotIndex> {
        if content == self.zero {
            return None;
        }
        self.find_slot(content).filter(|slot| *slot < self.sizing.kept).map(SlotIndex)
    }

    /// Returns whether the disk is known to hold `content` for some block.
    pub fn is_known_content(&self, content: Fingerprint) -> bool {
        self.find_content(content).is_some()
    }

    /// Decides about a page of `content` that the guest evicted. What is admitted is in the log of sends: the caller
    /// sends it.
    pub fn offer(&mut self, content: Fingerprint, place: Place) -> Offer {
        if let Some(slot) = self.find_slot(content) {
            if slot >= self.sizing.kept {
                return Offer::NoSlot;
            }
            self.move_to_tail(slot);
            return Offer::Duplicate;
        }
        let Some(node) = self.find_content(content) else {
            return Offer::Unmatched;
        };
        let Some(slot) = self.take_slot() else {
            return Offer::NoSlot;
        };
        self.clear_reference(node);
        self.log_send(slot);
        self.fill_slot(slot, content, Place::Tail);
        if place == Place::Head {
            // It is admitted as it is read, so the guest holds it.
            self.move_to_head(slot, true);
        }
        Offer::Admitted(SlotIndex(slot))
    }

    /// Notes that a cached page was served to the guest: its slot becomes the next to be discarded, the copy stays
    /// valid.
    pub fn hit(&mut self, block: BlockId, slot: SlotIndex, promote: bool) {
        if let Some(node) = self.find_node(block) {
            self.reference_node(node);
        }
        if self.is_used(slot.0) {
            if promote { self.move_to_tail(slot.0) } else { self.move_to_head(slot.0, true) }
        }
    }

    /// Gives up the content of `slot` (the server lost it or lied about it).
    pub fn drop_slot(&mut self, slot: SlotIndex) {
        if self.is_used(slot.0) {
            self.release_slot(slot.0);
        }
    }

    /// Gives up all cached content, and keeps what is known about blocks. The slots are usable again when [`Self::resize`] has
    /// looked at them.
    pub fn drop_all_slots(&mut self) {
        self.clear_slots();
    }

    /// Forgets everything: what is cached and what is known.
    pub fn drop_everything(&mut self) {
        self.drop_all_slots();
        self.clear_nodes();
    }
}

#[cfg(test)]
mod resume_tests;
#[cfg(test)]
mod size_tests;
#[cfg(test)]
mod tests;
