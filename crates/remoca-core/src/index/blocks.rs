//! Blocks whose content is known: by the slot that has the page if it knows no other block, otherwise by a node.

use super::{CacheIndex, EntryHint, Words};
use crate::fingerprint::Fingerprint;
use crate::units::{BlockId, BlockNumber, DiskIndex, PoolIndex};
use std::ops::Range;

/// Place at which the index has a content. It is valid until the index is changed.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    pub(super) entry: u32,
    pub(super) content: Fingerprint,
    /// Position of the word that names the entry in the hash table of contents.
    pub(super) at: usize,
}

impl<M: Words> CacheIndex<M> {
    /// Returns the fingerprint of what the disk holds for `block`, or `None` if the block is not known.
    pub fn known(&self, block: BlockId) -> Option<Fingerprint> {
        self.look_up(block).map(|(_, content)| content)
    }

    /// Returns a hint for [`Self::hit`] and [`Self::cached_near`], and the fingerprint of what the disk holds for `block`, or
    /// `None` if the block is not known.
    pub fn look_up(&self, block: BlockId) -> Option<(EntryHint, Fingerprint)> {
        let entry = self.entries.find(&self.words, block)?;
        Some((EntryHint(entry), self.entries.content(&self.words, entry)))
    }

    /// Records that the disk holds `content` for `block`, as a guest I/O has shown. After that I/O, the guest holds the
    /// content as well.
    pub fn learn(&mut self, block: BlockId, content: Fingerprint) {
        debug_assert!(!self.is_void(block), "what is learnt of {block:?} would be void");
        match self.entries.find(&self.words, block) {
            Some(entry) if self.entries.content(&self.words, entry) == content => self.reference(entry),
            Some(entry) => {
                self.remove_block(entry);
                self.insert_block(block, content);
            }
            None => self.insert_block(block, content),
        }
        self.slots.note_in_guest(&mut self.words, content);
        self.follow_changes();
    }

    /// Forgets what the disk holds for `block`. A cached copy can then no longer be reached through this block.
    pub fn forget(&mut self, block: BlockId) {
        if let Some(entry) = self.entries.find(&self.words, block) {
            self.forget_entry(entry);
        }
    }

    /// Forgets the block of an entry, and makes its page the next to be discarded, if there is one.
    pub(super) fn forget_entry(&mut self, entry: u32) {
        let content = self.entries.content(&self.words, entry);
        self.remove_block(entry);
        if let Some(slot) = self.slots.cached(&self.words, content) {
            self.slots.move_to_head(&mut self.words, slot, false);
        }
        self.follow_changes();
    }

    /// Forgets all blocks of `disk` in `blocks`, in time bounded by the smaller of range and table.
    pub fn forget_range(&mut self, disk: DiskIndex, blocks: Range<u64>) {
        if self.known_blocks().0 == 0 {
            return;
        }
        // A look-up costs about as much as passing over eight entries.
        if blocks.end.saturating_sub(blocks.start).saturating_mul(8) <= u64::from(self.entries.limit()) {
            for bno in blocks {
                self.forget(BlockId { disk, bno: BlockNumber(bno) });
            }
            return;
        }
        for entry in 0..self.entries.limit() {
            if let Some(block) = self.entries.block(&self.words, entry)
                && block.disk == disk
                && blocks.contains(&block.bno.0)
            {
                self.forget_entry(entry);
            }
        }
    }

    /// Looks for `content`, and returns where the index has it, or `None` if neither a block nor a page has it.
    pub fn find(&self, content: Fingerprint) -> Option<Found> {
        self.entries.find_content_word(&self.words, content).map(|(entry, at)| Found { entry, content, at })
    }

    /// Returns a block that the disk is known to hold the content for, or `None` if there is none. What is being forgotten is not known.
    pub fn block_of(&self, found: Found) -> Option<BlockId> {
        self.check(found);
        self.entries.block(&self.words, found.entry).filter(|_| !self.is_doomed(found.entry))
    }

    /// Returns whether a slot holds the content.
    pub fn is_cached(&self, found: Found) -> bool {
        self.check(found);
        self.entries.has_page(&self.words, found.entry)
    }

    /// Marks the block of an entry as one that the guest no longer holds, so that it is among the next to be forgotten.
    pub fn pass_over(&mut self, found: Found) {
        self.check(found);
        if self.nodes.has(found.entry) {
            self.nodes.clear_reference(&mut self.words, found.entry);
        }
    }

    /// Checks that the index has not been changed since the content was found.
    pub(super) fn check(&self, Found { entry, content, at }: Found) {
        debug_assert_eq!(
            self.entries.find_content_word(&self.words, content),
            Some((entry, at)),
            "{content:?} was found before a change"
        );
    }

    /// Returns the next known block on the clock whose content is not cached, or `None` if there is no such block. Used
    /// only in tests that omit `Rule::AdmissionCheck`, which take an unknown page for the content of this block.
    pub fn any_resident(&mut self) -> Option<BlockId> {
        self.nodes.any_resident(&self.words).filter(|block| !self.is_void(*block))
    }

    /// Notes that the guest touched the block of an entry. If the block has a node, and the slot of its page knows no other
    /// block, the slot takes it over.
    pub(super) fn reference(&mut self, entry: u32) {
        if !self.nodes.has(entry) {
            // The slot's place in the queue says so.
            return;
        }
        if self.is_doomed(entry) {
            return;
        }
        if let Some(slot) = self.nodes.reference(&mut self.words, entry)
            && self.slots.needs_block(&self.words, slot)
        {
            let key = self.nodes.give_up(&mut self.words, entry);
            self.slots.take_over(&mut self.words, slot, entry, key);
            self.follow_removed(entry, key.block());
            self.follow_slot(slot);
        }
    }

    /// Inserts a block that is not known.
    fn insert_block(&mut self, block: BlockId, content: Fingerprint) {
        if let Some(slot) = self.entries.find_content(&self.words, content)
            && self.slots.needs_block(&self.words, slot)
            && self.slots.learn_block(&mut self.words, slot, block)
        {
            self.follow_slot(slot);
        } else {
            self.insert_node(block, content);
        }
    }

    /// Inserts a block that is not known, and that no slot can take.
    pub(super) fn insert_node(&mut self, block: BlockId, content: Fingerprint) {
        self.make_room();
        if let Some(node) = self.nodes.insert(&mut self.words, block, content) {
            self.follow_inserted(node, block, content);
        }
    }

    /// Removes a node if none is free.
    fn make_room(&mut self) {
        if self.nodes.is_full() {
            let victim = self.nodes.clock_victim(&mut self.words);
            self.remove_block(victim);
        }
    }

    /// Forgets the block of an entry, and returns it. A page stays where it is.
    pub(super) fn remove_block(&mut self, entry: u32) -> BlockId {
        if self.nodes.has(entry) {
            let block = self.nodes.remove(&mut self.words, entry);
            self.follow_removed(entry, block);
            block
        } else {
            let block = self.slots.forget_block(&mut self.words, entry);
            self.follow_slot(entry);
            block
        }
    }

    /// Empties a slot, whose block gets a node. Returns the pool of a slot with a page, to which it must be put back unless it is
    /// filled again.
    pub(super) fn move_block_to_node(&mut self, slot: u32) -> Option<PoolIndex> {
        self.make_room();
        let was_hit = self.slots.was_hit(&self.words, slot);
        let node = self.nodes.take_over(&mut self.words, slot, was_hit);
        let pool = self.slots.let_go(&mut self.words, slot);
        self.follow_slot(slot);
        if let Some((block, content, _)) = self.nodes.get(&self.words, node) {
            self.follow_inserted(node, block, content);
        }
        pool
    }
}
