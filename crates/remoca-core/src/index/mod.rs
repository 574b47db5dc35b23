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
//! 3. A node that is gone is reachable by neither chain. Nodes and slots end, and begin, with one store (`layout.rs: settle`).
//!
//! It does no I/O and never allocates after it was made; both tables are bounded. Each part of the words has a type that alone
//! reaches it; what concerns two of them is here. How the region is made, taken over
//! and left is in `region.rs`; what is kept of sizes, pool and disks in `kept.rs`.

mod disk_words;
mod kept;
mod layout;
mod log;
mod nodes;
mod queue;
mod region;
mod sizing;
mod slots;
mod table;

use crate::fingerprint::Fingerprint;
use crate::rules::Rules;
use crate::units::{BlockId, BlockNumber, DiskIndex, PageCount, SlotIndex};
use disk_words::DiskWords;
use log::SendLog;
use nodes::Nodes;
use slots::Slots;
use std::ops::Range;

pub use kept::Move;
pub use layout::{Layout, SWAP_AREAS_MAX, Words};
pub use log::{LogEnd, Pool};
pub use nodes::NodeHint;
pub use region::{Origin, Unusable};
pub use slots::{Place, SlotCounts};

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

/// The index over a region of words `M` (a mapped file, or a plain vector).
pub struct CacheIndex<M> {
    words: M,
    layout: Layout,
    nodes: Nodes,
    slots: Slots,
    log: SendLog,
    disks: DiskWords,
    taken_as_it_was: bool,
    zero: Fingerprint,
    rules: Rules,
    /// Where it is moving to, if it is.
    target: Option<Box<Target<M>>>,
}

/// Where an index is moving to.
struct Target<M> {
    index: CacheIndex<M>,
    /// First node that is still to be moved.
    moved: u32,
}

impl<M: Words> CacheIndex<M> {
    /// Keeps to these rules only (to show that tests notice when one is left out).
    pub fn keep_to(&mut self, rules: Rules) {
        self.rules = rules;
        self.nodes.keep_to(rules);
        self.slots.keep_to(rules);
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
        self.slots.counts()
    }

    /// Returns the number of blocks whose content is known.
    pub fn known_blocks(&self) -> PageCount {
        PageCount(self.nodes.used())
    }

    /// Returns the bytes of memory that the region takes.
    pub fn region_bytes(&self) -> usize {
        self.layout.words() * 4
    }

    // Blocks.

    /// Returns what the disk holds for `block`, if that is known.
    pub fn known(&self, block: BlockId) -> Option<Fingerprint> {
        self.nodes.find(&self.words, block).map(|node| self.nodes.content(&self.words, node))
    }

    /// Returns what the disk holds for `block`, if that is known, and a hint for [`Self::hit`].
    pub fn look_up(&self, block: BlockId) -> Option<(NodeHint, Fingerprint)> {
        self.nodes.look_up(&self.words, block)
    }

    /// Learns that the disk holds `content` for `block` (an I/O of the guest just showed it), so the guest holds it
    /// too.
    pub fn learn(&mut self, block: BlockId, content: Fingerprint) {
        match self.nodes.find(&self.words, block) {
            Some(node) if self.nodes.content(&self.words, node) == content => {
                self.nodes.reference(&mut self.words, node);
            }
            Some(node) => {
                self.remove_node(node);
                self.insert_node(block, content);
            }
            None => self.insert_node(block, content),
        }
        self.slots.note_in_guest(&mut self.words, content);
    }

    /// Forgets what the disk holds for `block`; its cached copy cannot be reached through it any more.
    pub fn forget(&mut self, block: BlockId) {
        if let Some(node) = self.nodes.find(&self.words, block) {
            self.forget_node(node);
        }
    }

    fn forget_node(&mut self, node: u32) {
        let content = self.nodes.content(&self.words, node);
        self.remove_node(node);
        if content != self.zero
            && let Some(slot) = self.slots.find(&self.words, content)
        {
            self.slots.move_to_head(&mut self.words, slot, false);
        }
    }

    /// Forgets every block of `disk` in `blocks`, in time bounded by the smaller of the range and the table.
    pub fn forget_range(&mut self, disk: DiskIndex, blocks: Range<u64>) {
        if self.nodes.used() == 0 {
            return;
        }
        // A look-up costs about as much as passing over eight nodes.
        if blocks.end.saturating_sub(blocks.start).saturating_mul(8) <= u64::from(self.nodes.limit()) {
            for bno in blocks {
                self.forget(BlockId { disk, bno: BlockNumber(bno) });
            }
            return;
        }
        for node in 0..self.nodes.limit() {
            if let Some(block) = self.nodes.block(&self.words, node)
                && block.disk == disk
                && blocks.contains(&block.bno.0)
            {
                self.forget_node(node);
            }
        }
    }

    /// Returns whether the disk is known to hold `content` for some block.
    pub fn is_known_content(&self, content: Fingerprint) -> bool {
        self.nodes.find_content(&self.words, content).is_some()
    }

    /// Returns a known block whose content is not cached (the oldest the clock finds): what an engine that trusts the
    /// guest's word would take an unknown page for. Only the ablation of the admission check asks.
    pub fn any_resident(&mut self) -> Option<BlockId> {
        self.nodes.any_resident(&self.words, &self.slots)
    }

    fn insert_node(&mut self, block: BlockId, content: Fingerprint) {
        if self.nodes.is_full() {
            let victim = self.nodes.clock_victim(&mut self.words, &self.slots);
            self.remove_node(victim);
        }
        let node = self.nodes.insert(&mut self.words, block, content);
        if let Some(target) = self.target.as_mut().filter(|target| node < target.moved) {
            target.index.insert_node(block, content);
        }
    }

    fn remove_node(&mut self, node: u32) {
        let block = self.nodes.remove(&mut self.words, node);
        if let Some(target) = self.target.as_mut().filter(|target| node < target.moved)
            && let Some(node) = target.index.nodes.find(&target.index.words, block)
        {
            target.index.remove_node(node);
        }
    }

    fn clear_nodes(&mut self) {
        self.nodes.clear(&mut self.words);
        if let Some(target) = &mut self.target {
            target.index.clear_nodes();
        }
    }

    // Cached pages.

    /// Returns the slot that holds `content`.
    pub fn cached(&self, content: Fingerprint) -> Option<SlotIndex> {
        self.slots.cached(&self.words, content).map(SlotIndex)
    }

    /// Returns whether `slot` is the one that holds `content`, without a search.
    pub fn holds(&self, slot: SlotIndex, content: Fingerprint) -> bool {
        let holds = self.slots.holds(&self.words, slot.0, content);
        debug_assert_eq!(holds, self.cached(content) == Some(slot), "a search and a look at the slot differ");
        holds
    }

    /// Decides about a page of `content` that the guest evicted. What is admitted is in the log of sends: the caller
    /// sends it.
    pub fn offer(&mut self, content: Fingerprint, place: Place) -> Offer {
        if let Some(slot) = self.slots.find(&self.words, content) {
            if self.slots.is_lost(slot) {
                return Offer::NoSlot;
            }
            self.slots.move_to_tail(&mut self.words, slot);
            return Offer::Duplicate;
        }
        let Some(node) = self.nodes.find_content(&self.words, content) else {
            return Offer::Unmatched;
        };
        let Some(slot) = self.take_slot() else {
            return Offer::NoSlot;
        };
        self.nodes.clear_reference(&mut self.words, node);
        self.log.note_send(&mut self.words, slot);
        self.slots.fill(&mut self.words, slot, content, Place::Tail);
        if place == Place::Head {
            // It is admitted as it is read, so the guest holds it.
            self.slots.move_to_head(&mut self.words, slot, true);
        }
        Offer::Admitted(SlotIndex(slot))
    }

    /// Takes a free slot, else that of the first victim that no request is outstanding for. A cache that shrinks takes no
    /// more pages than it will have room for.
    fn take_slot(&mut self) -> Option<u32> {
        if self.slots.are_losing() {
            return None;
        }
        let mut victim = None;
        if self.slots.needs_victim() {
            victim = Some(self.slots.find_victim(&self.words)?);
            victim.iter().for_each(|victim| self.discard(*victim));
        }
        Some(self.slots.take(&mut self.words, victim))
    }

    /// Discards the content of `slot`. Unless the guest got the page back, nobody holds it any more, and its node goes
    /// with it.
    fn discard(&mut self, slot: u32) {
        let (content, hit) = self.slots.page(&self.words, slot);
        if !hit && let Some(node) = self.nodes.find_content(&self.words, content) {
            self.remove_node(node);
        }
        self.slots.release(&mut self.words, slot);
    }

    /// Notes that a cached page was served to the guest: its slot becomes the next to be discarded, the copy stays
    /// valid. `hint` says where the block was found before; it is searched for if it is there no longer.
    pub fn hit(&mut self, hint: NodeHint, block: BlockId, slot: SlotIndex, promote: bool) {
        if let Some(node) = self.nodes.find_again(&self.words, hint, block) {
            self.nodes.reference(&mut self.words, node);
        }
        if self.slots.is_used(&self.words, slot.0) {
            if promote {
                self.slots.move_to_tail(&mut self.words, slot.0);
            } else {
                self.slots.move_to_head(&mut self.words, slot.0, true);
            }
        }
    }

    /// Marks a request for `slot` as outstanding. False if too many are (the caller goes to the disk).
    pub fn pin(&mut self, slot: SlotIndex) -> bool {
        self.slots.pin(&mut self.words, slot.0)
    }

    /// Takes one pin off `slot`.
    pub fn unpin(&mut self, slot: SlotIndex) {
        self.slots.unpin(&mut self.words, slot.0);
    }

    /// Returns the number of slots with an outstanding request, those beyond the capacity included. Looks at every
    /// slot.
    pub fn pinned_slots(&self) -> PageCount {
        self.slots.pinned(&self.words)
    }

    /// Returns the cached contents with their slots, from the next to be discarded to the newest.
    pub fn queue(&self) -> impl Iterator<Item = (SlotIndex, Fingerprint)> + '_ {
        self.slots.queue(&self.words)
    }

    /// Gives up the content of `slot` (the server lost it or lied about it).
    pub fn drop_slot(&mut self, slot: SlotIndex) {
        if self.slots.is_used(&self.words, slot.0) {
            self.slots.release(&mut self.words, slot.0);
        }
    }

    /// Gives up all cached content, and keeps what is known about blocks. The slots are usable again when [`Self::resize`] has
    /// looked at them.
    pub fn drop_all_slots(&mut self) {
        self.slots.clear(&mut self.words);
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
