//! Moving an index into another region, in pieces, while the index is in use.
//!
//! Until the move ends, the old region is the index, and the new region follows its changes: entries below `moved` are in both,
//! so changes to them are made in both. Slots keep their number, and nodes get another one. The new region may lack slots that no pool has; pools
//! get none of these until the move ends, and none at all if its chunks have another size. Links, flags and pins of a slot are copied
//! with it, and again after each operation that has changed them ([`CacheIndex::follow_changes`]). So the work of the last piece
//! does not depend on the size of the index. After a kill before the end the old region is intact, because a move only reads it,
//! except that it drops a page for which the new region has no room.

use super::layout::header;
use super::slots::Slots;
use super::table::BATCH;
use super::{CacheIndex, Target, Words};
use crate::fingerprint::Fingerprint;
use crate::units::{BlockId, PageCount};

impl<M: Words> CacheIndex<M> {
    /// Starts a move into `target`, an empty index with the same disks, seed and key. Cancels a move in progress. Slots that the target
    /// does not have are forgotten, with the blocks that they know: no pool has them.
    ///
    /// # Panics
    /// If the target has less than [`Self::least_slots`], or other disk numbers, or if its chunks have another size and a pool has one.
    pub fn begin_move(&mut self, mut target: Self) {
        assert_eq!(self.layout.disks(), target.layout.disks(), "an index moves with its disks");
        assert!(self.least_slots() <= target.layout.slot_limit(), "an index moves with all slots that pools have");
        let is_alike = self.layout.chunk_bits() == target.layout.chunk_bits();
        assert!(is_alike || !self.slots.have_chunks(), "an index moves with its chunks");
        target.keep_to(self.rules);
        self.slots.begin_to_be_followed(&target.slots);
        self.target = Some(Box::new(Target { index: target, moved: 0 }));
    }

    /// Copies the next `entries` entries to the target. Returns `true` if none is left to copy. If the target has not
    /// enough nodes for all blocks, blocks whose content is cached are preferred. A page for which the target has no room is
    /// dropped.
    pub fn move_entries(&mut self, entries: u32) -> bool {
        let Some(target) = &mut self.target else { return true };
        Slots::follow_capacities(&mut target.index.words, &self.words);
        // No pool has the slots that the target lacks.
        let (limit, own_limit) = (target.index.slots.limit(), self.slots.limit());
        if (limit..own_limit).contains(&target.moved) {
            target.moved = own_limit;
        }
        let end = target.moved.saturating_add(entries).min(self.entries.limit());
        for entry in target.moved..end {
            if entry % BATCH == 0 {
                self.touch_lines(entry);
            }
            self.move_entry(entry);
        }
        end == self.entries.limit()
    }

    /// Begins to load the lines of the target for the entries from `from` on, so that the loads overlap.
    fn touch_lines(&self, from: u32) {
        let Some(Target { index: target, .. }) = self.target.as_deref() else { return };
        let batch = from..from.saturating_add(BATCH).min(self.entries.limit());
        for entry in batch {
            let (key, content) = (self.entries.key(&self.words, entry), self.entries.content(&self.words, entry));
            target.entries.touch_lines(&target.words, key, content);
        }
    }

    fn move_entry(&mut self, entry: u32) {
        let Some(mut target) = self.target.take() else { return };
        let mut has_room = true;
        if !self.nodes.has(entry) {
            target.index.slots.follow_chunk(&mut target.index.words, entry, &self.slots, &self.words);
            has_room = self.move_slot(&mut target.index, entry);
        } else {
            self.move_node(&mut target.index, entry);
        }
        target.moved = entry + 1;
        self.target = Some(target);
        if !has_room && self.slots.is_used(&self.words, entry) {
            self.lose(entry);
        }
    }

    /// Gives a slot of the target what the same slot has here. Returns `false` if the target has no room for its content.
    fn move_slot(&self, target: &mut Self, slot: u32) -> bool {
        if slot >= target.slots.limit() {
            // No pool has it.
            return true;
        }
        // Of several nodes with this content, another one may stand for it there than here.
        let content = self.entries.content(&self.words, slot);
        if self.entries.is_live(&self.words, slot)
            && let Some(node) = target.entries.find_content(&target.words, content)
            && target.nodes.has(node)
        {
            target.nodes.step_back(&mut target.words, node);
        }
        target.slots.follow(&mut target.words, slot, &self.slots, &self.words)
    }

    fn move_node(&self, target: &mut Self, node: u32) {
        let Some((block, content, referenced)) = self.nodes.get(&self.words, node) else { return };
        if self.is_void(block) || target.nodes.is_full() && self.cached(content).is_none() {
            return;
        }
        target.insert_node(block, content);
        if !referenced && let Some(entry) = target.entries.find(&target.words, block) {
            target.nodes.clear_reference(&mut target.words, entry);
        }
    }

    /// Returns the maximum number of slots that all pools may have together, during a move that of the smaller one of the two regions.
    pub fn slot_limit(&self) -> PageCount {
        let now = self.layout.slot_limit();
        self.target.as_ref().map_or(now, |target| target.index.layout.slot_limit().min(now))
    }

    /// Returns whether a move is in progress.
    #[cfg(test)]
    pub(super) fn is_moving(&self) -> bool {
        self.target.is_some()
    }

    /// Finishes the move, switches to the new region, and returns the old words. Returns `None` if no move is in
    /// progress. After [`Self::move_entries`] has returned `true`, the work does not depend on the size of the index.
    pub fn finish_move(&mut self) -> Option<M> {
        while !self.move_entries(u32::MAX) {}
        let Target { mut index, .. } = *self.target.take()?;
        let pools_and_log = header::POOLS..self.layout.chunks_at();
        index.words[pools_and_log.clone()].copy_from_slice(&self.words[pools_and_log]);
        for at in [header::LOGGED, header::BIMODAL] {
            index.words[at] = self.words[at];
        }
        index.slots.finish_from(&mut self.slots);
        index.look_for_voids();
        Some(std::mem::replace(self, index).words)
    }

    /// Makes the target follow links and flags of all slots that have changed. Each operation ends with it.
    #[inline]
    pub(super) fn follow_changes(&mut self) {
        if self.slots.have_changed() {
            self.follow_marks();
        }
    }

    #[cold]
    fn follow_marks(&mut self) {
        while let Some(slot) = self.slots.take_changed() {
            if let Some(target) = &mut self.target
                && slot < target.moved.min(target.index.slots.limit())
            {
                target.index.slots.follow_marks(&mut target.index.words, slot, &self.slots, &self.words);
            }
        }
    }

    /// Returns whether the target of the move in progress will have room for a page of this content in a slot.
    pub(super) fn target_has_room(&self, slot: u32, content: Fingerprint) -> bool {
        let target = self.target.as_ref().filter(|target| slot < target.moved);
        target.is_none_or(|target| target.index.entries.has_room_for(&target.index.words, content))
    }

    /// Returns the target of the move in progress, if the entry has been moved.
    fn target_of(&mut self, entry: u32) -> Option<&mut Self> {
        let target = self.target.as_mut().filter(|target| entry < target.moved)?;
        // It says which pages are valid.
        Slots::follow_capacities(&mut target.index.words, &self.words);
        Some(&mut target.index)
    }

    /// Makes the target follow a change of the pool that has the chunk of a slot.
    pub(super) fn follow_chunk(&mut self, slot: u32) {
        if let Some(target) = &mut self.target {
            target.index.slots.follow_chunk(&mut target.index.words, slot, &self.slots, &self.words);
        }
    }

    /// Makes the target follow a change of a slot. A page for which it has no room is dropped.
    pub(super) fn follow_slot(&mut self, slot: u32) {
        let Some(mut target) = self.target.take() else { return };
        let mut has_room = true;
        if slot < target.moved {
            Slots::follow_capacities(&mut target.index.words, &self.words);
            has_room = self.move_slot(&mut target.index, slot);
        }
        self.target = Some(target);
        if !has_room && self.slots.is_used(&self.words, slot) {
            self.lose(slot);
        }
    }

    /// Makes the target follow the insertion of a block into a node.
    pub(super) fn follow_inserted(&mut self, node: u32, block: BlockId, content: Fingerprint) {
        if let Some(target) = self.target_of(node) {
            target.insert_node(block, content);
        }
    }

    /// Makes the target follow the removal of a node that had this block.
    pub(super) fn follow_removed(&mut self, node: u32, block: BlockId) {
        if let Some(target) = self.target_of(node)
            && let Some(entry) = target.entries.find(&target.words, block)
        {
            target.remove_block(entry);
        }
    }

    /// Asserts that the target of the move in progress agrees with what has been moved.
    #[cfg(test)]
    pub(super) fn check_target(&mut self) {
        let Some(target) = &self.target else { return };
        let limit = self.slots.limit().min(target.index.slots.limit());
        let (moved, target) = (target.moved.min(limit), &target.index);
        assert!(!self.slots.have_changed(), "an operation ends without the target");
        let found_by_block = target.entries.check_lines(&target.words);
        assert_eq!(found_by_block, target.known_blocks().0 as usize, "words of the target");
        for slot in 0..moved {
            let known = self.entries.block(&self.words, slot);
            let content = self.entries.content(&self.words, slot);
            let page = self.entries.find_page(&self.words, content).filter(|found| *found == slot);
            assert_eq!(target.entries.block(&target.words, slot), known, "slot {slot}");
            assert!(page.is_none() || target.entries.find_page(&target.words, content) == page, "slot {slot}");
            assert!(known.is_none_or(|block| target.entries.find(&target.words, block) == Some(slot)), "slot {slot}");
            self.slots.check_marks(&self.words, slot, &target.slots, &target.words);
        }
    }
}
