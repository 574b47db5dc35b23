//! The move into another region, a piece at a time, while the index is in use.
//!
//! Until the end the old region is the index; the new one follows it. Nodes below `moved` are in both, so what becomes of
//! them there becomes of them here. Slots follow at the end, in one piece: as they are if there are as many as before.
//! A kill before the end finds the old region, which a move only reads.

use super::{CacheIndex, header};
use crate::units::{BlockId, PageCount};
use std::ops::DerefMut;

/// Where an index is moving to.
pub(super) struct Target<M> {
    index: CacheIndex<M>,
    /// First node that is still to be moved.
    moved: u32,
}

impl<M: DerefMut<Target = [u32]>> CacheIndex<M> {
    /// Begins the move into `target`, an empty index with the same disks, seed and key. Ends one that was under way.
    pub fn begin_move(&mut self, mut target: Self) {
        debug_assert_eq!(self.layout.disks, target.layout.disks, "another set of disks");
        target.rules = self.rules;
        self.target = Some(Box::new(Target { index: target, moved: 0 }));
    }

    /// Moves what is known in the next `nodes` nodes; whether that were the last ones. A smaller table keeps what is cached
    /// rather than what is not.
    pub fn move_nodes(&mut self, nodes: u32) -> bool {
        let Some(mut target) = self.target.take() else { return true };
        let end = target.moved.saturating_add(nodes).min(self.layout.nodes);
        for node in target.moved..end {
            let Some((block, content, referenced)) = self.node(node) else { continue };
            let PageCount(room) = target.index.layout.node_limit();
            let is_full = target.index.nodes_used.saturating_add(self.counts.used) >= room;
            if is_full && self.cached(content).is_none() {
                continue;
            }
            target.index.insert_node(block, content);
            if !referenced && let Some(node) = target.index.find_node(block) {
                target.index.clear_reference(node);
            }
        }
        target.moved = end;
        self.target = Some(target);
        end == self.layout.nodes
    }

    /// Ends the move: from now on this is the index in the new region. Returns the old words. Slots above the new layout's
    /// are given up; pins stay.
    pub fn finish_move(&mut self) -> Option<M> {
        while !self.move_nodes(u32::MAX) {}
        let Target { mut index, .. } = *self.target.take()?;
        index.keep_from(self);
        index.pins = self.pins;
        if index.layout.slots == self.layout.slots {
            index.copy_slots(self);
        } else {
            index.fill_slots(self);
        }
        Some(std::mem::replace(self, index).words)
    }

    /// Copies all that is about slots, place by place.
    fn copy_slots(&mut self, old: &Self) {
        let slots = self.layout.slots_at()..self.layout.nodes_at();
        self.words[slots.clone()].copy_from_slice(&old.words[slots]);
        self.words[header::QUEUE] = old.words[header::QUEUE];
        (self.tail, self.free_slot, self.counts) = (old.tail, old.free_slot, old.counts);
        self.sizing = old.sizing;
        self.store_capacity(old.capacity);
    }

    /// Follows the insertion of a block in `node`.
    pub(super) fn follow_insert(&mut self, node: u32, block: BlockId) {
        let content = self.node_fingerprint(node);
        if let Some(target) = self.target.as_mut().filter(|target| node < target.moved) {
            target.index.insert_node(block, content);
        }
    }

    /// Follows the removal of the block in `node`.
    pub(super) fn follow_remove(&mut self, node: u32, block: BlockId) {
        if let Some(target) = self.target.as_mut().filter(|target| node < target.moved)
            && let Some(node) = target.index.find_node(block)
        {
            target.index.remove_node(node);
        }
    }

    /// Follows the removal of all blocks.
    pub(super) fn follow_clear(&mut self) {
        if let Some(target) = &mut self.target {
            target.index.clear_nodes();
        }
    }
}
