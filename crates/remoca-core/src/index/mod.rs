//! The cache index: which content each known block has, and in which slot of the pool that content is cached.
//!
//! It owns one region of 32-bit words with a fixed layout, which may outlive the process:
//! ```text
//! header 32 | disks: 30 each | log of sends | slots: 6 each | slots by content | nodes: 5 each | nodes by block | nodes by content
//! slot: previous, next, fingerprint x3, used:1 hit:1 pins:16
//! node: block 52 bits + flags, fingerprint x3
//! ```
//! A *node* says what the disk holds for one block; a *slot* says what the server holds in one page. Block -> fingerprint
//! -> slot (papers/remoca.txt II.B names blocks only; decision 0001 says why content is the address here).
//! 1. Every slot below the capacity is free, used, or draining (given up while a request for it is outstanding).
//! 2. At most one used slot has a given fingerprint, and at most one node is found by that fingerprint.
//! 3. A removed node is in neither hash table. Nodes and slots become valid and invalid with one store
//!    (`layout.rs: settle`).
//!
//! The index does no I/O and allocates only when it is created; both tables are bounded. Each part of the words belongs
//! to one type; operations on several of them are here. `region.rs` creates, resumes and moves the region; `kept.rs`
//! handles size and pool, `voids.rs` disks that come, go and change their size.

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
mod voids;

use crate::fingerprint::Fingerprint;
use crate::rules::Rules;
use crate::units::{BlockId, BlockNumber, DiskIndex, PageCount, SlotIndex};
use disk_words::DiskWords;
use log::SendLog;
use nodes::Nodes;
use slots::Slots;
use std::ops::Range;

pub use disk_words::DiskState;
pub use kept::Move;
pub use layout::{DISK_BYTES_MAX, Layout, SWAP_AREAS_MAX, Words};
pub use log::{LogEnd, Pool};
pub use nodes::NodeHint;
pub use region::{Origin, Unusable};
pub use slots::{Place, SlotCounts};

/// Outcome for an evicted page that was offered to the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offer {
    /// The content is known and not cached yet: store it in this slot.
    Admitted(SlotIndex),
    /// The content is already cached. Its slot is now the newest of the queue.
    Duplicate,
    /// No known block has this content.
    Unmatched,
    /// The content is known, but there is no slot for it: every slot near the head is pinned, or the server has just taken
    /// slots away.
    NoSlot,
}

/// Index in a region of words `M`, such as a mapped file or a vector.
pub struct CacheIndex<M> {
    words: M,
    layout: Layout,
    nodes: Nodes,
    slots: Slots,
    log: SendLog,
    disks: DiskWords,
    /// Number of nodes, at the end of the table, that have yet to be examined because some may be void.
    uncut: u32,
    taken_as_it_was: bool,
    zero: Fingerprint,
    rules: Rules,
    /// Target of the move in progress.
    target: Option<Box<Target<M>>>,
}

/// Target of a move.
struct Target<M> {
    index: CacheIndex<M>,
    /// First node that has not been moved.
    moved: u32,
}

impl<M: Words> CacheIndex<M> {
    /// Sets the rules in force. Tests omit one to prove that they notice its absence.
    pub fn keep_to(&mut self, rules: Rules) {
        self.rules = rules;
        self.nodes.keep_to(rules);
        self.slots.keep_to(rules);
    }

    /// Returns the words of the region.
    pub fn words(&self) -> &M {
        &self.words
    }

    /// Returns the layout of the region.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns whether the index was resumed without a rebuild, because the previous process had closed it.
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

    /// Returns the size of the region in bytes.
    pub fn region_bytes(&self) -> usize {
        self.layout.words() * 4
    }

    // Blocks.

    /// Returns the fingerprint of what the disk holds for `block`, or `None` if the block is not known.
    pub fn known(&self, block: BlockId) -> Option<Fingerprint> {
        self.nodes.find(&self.words, block).map(|node| self.nodes.content(&self.words, node))
    }

    /// Returns a hint for [`Self::hit`] and the fingerprint of what the disk holds for `block`, or `None` if the block
    /// is not known.
    pub fn look_up(&self, block: BlockId) -> Option<(NodeHint, Fingerprint)> {
        self.nodes.look_up(&self.words, block)
    }

    /// Records that the disk holds `content` for `block`, as a guest I/O has shown. After that I/O, the guest holds the
    /// content as well.
    pub fn learn(&mut self, block: BlockId, content: Fingerprint) {
        debug_assert!(!self.is_void(block), "what is learnt of {block:?} would be void");
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

    /// Forgets what the disk holds for `block`. A cached copy can then no longer be reached through this block.
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

    /// Forgets all blocks of `disk` in `blocks`, in time bounded by the smaller of range and table.
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

    /// Returns a block that the disk is known to hold `content` for, or `None` if there is none.
    pub fn block_of(&self, content: Fingerprint) -> Option<BlockId> {
        self.nodes.find_content(&self.words, content).and_then(|node| self.nodes.block(&self.words, node))
    }

    /// Marks a block with this content as one that the guest no longer holds, so that it is among the next to be forgotten.
    pub fn pass_over(&mut self, content: Fingerprint) {
        if let Some(node) = self.nodes.find_content(&self.words, content) {
            self.nodes.clear_reference(&mut self.words, node);
        }
    }

    /// Returns the next known block on the clock whose content is not cached, or `None` if there is no such block. Used
    /// only in tests that omit `Rule::AdmissionCheck`, which take an unknown page for the content of this block.
    pub fn any_resident(&mut self) -> Option<BlockId> {
        self.nodes.any_resident(&self.words, &self.slots)
    }

    fn insert_node(&mut self, block: BlockId, content: Fingerprint) {
        if self.nodes.is_full() {
            let victim = self.nodes.clock_victim(&mut self.words, &self.slots);
            self.remove_node(victim);
        }
        let Some(node) = self.nodes.insert(&mut self.words, block, content) else { return };
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

    /// Returns the slot that holds `content`, or `None` if no slot holds it.
    pub fn cached(&self, content: Fingerprint) -> Option<SlotIndex> {
        self.slots.cached(&self.words, content).map(SlotIndex)
    }

    /// Returns whether `slot` holds `content`. Needs no search.
    pub fn holds(&self, slot: SlotIndex, content: Fingerprint) -> bool {
        let holds = self.slots.holds(&self.words, slot.0, content);
        debug_assert_eq!(holds, self.cached(content) == Some(slot), "a search and a look at the slot differ");
        holds
    }

    /// Decides whether to cache an evicted page with this `content`. If the page is admitted, it is entered in the log
    /// of sends, and the caller must send it.
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
        if !self.slots.reserve(&mut self.words, slot, content) {
            return Offer::NoSlot;
        }
        self.nodes.clear_reference(&mut self.words, node);
        self.log.note_send(&mut self.words, slot);
        self.slots.fill(&mut self.words, slot, Place::Tail);
        if place == Place::Head {
            // The guest still holds a page that is admitted as it is read.
            self.slots.move_to_head(&mut self.words, slot, true);
        }
        Offer::Admitted(SlotIndex(slot))
    }

    /// Takes a free slot or, if there is none, the slot of the first victim that is not pinned. Returns `None` if no
    /// victim is found, or while lost pages are being released. A shrinking cache takes no more pages than it will have
    /// room for.
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

    /// Discards the content of `slot`. If the guest has not received the page again, no copy is left in memory, so the
    /// node of this content is removed as well.
    fn discard(&mut self, slot: u32) {
        let (content, hit) = self.slots.page(&self.words, slot);
        if !hit && let Some(node) = self.nodes.find_content(&self.words, content) {
            self.remove_node(node);
        }
        self.slots.release(&mut self.words, slot);
    }

    /// Marks `block` as referenced, because the guest received its cached page. With `promote`, its slot becomes the
    /// newest; otherwise it becomes the next to be discarded. The cached copy stays valid. `hint` says where the block
    /// was found before, to save a search.
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

    /// Pins `slot` for a request. Returns `false` if the slot already has the maximum number of pins. The caller must
    /// then read from the disk.
    pub fn pin(&mut self, slot: SlotIndex) -> bool {
        self.slots.pin(&mut self.words, slot.0)
    }

    /// Removes one pin from `slot`.
    pub fn unpin(&mut self, slot: SlotIndex) {
        self.slots.unpin(&mut self.words, slot.0);
    }

    /// Returns the number of pinned slots, including those beyond the capacity. Examines every slot.
    pub fn pinned_slots(&self) -> PageCount {
        self.slots.pinned(&self.words)
    }

    /// Returns the cached contents with their slots, from the next to be discarded to the newest.
    pub fn queue(&self) -> impl Iterator<Item = (SlotIndex, Fingerprint)> + '_ {
        self.slots.queue(&self.words)
    }

    /// Drops the content of `slot`, because the server lost it or returned something else.
    pub fn drop_slot(&mut self, slot: SlotIndex) {
        if self.slots.is_used(&self.words, slot.0) {
            self.slots.release(&mut self.words, slot.0);
        }
    }

    /// Drops all cached content, but keeps the known blocks. Slots become usable again as [`Self::resize`] processes
    /// them.
    pub fn drop_all_slots(&mut self) {
        self.slots.clear(&mut self.words);
    }

    /// Drops all cached content and forgets all known blocks.
    pub fn drop_everything(&mut self) {
        self.drop_all_slots();
        self.clear_nodes();
    }
}

#[cfg(test)]
mod disk_tests;
#[cfg(test)]
mod resume_tests;
#[cfg(test)]
mod size_tests;
#[cfg(test)]
mod tests;
