//! The region of an index: creating one, resuming from what the previous process left, and moving into another region.
//!
//! A region that the previous process closed ([`CacheIndex::close`]) is used as it is if the checksum of its header
//! matches. Otherwise that process may have been killed between any two stores. In that case only the entries of the
//! tables are trusted, and hash tables, queue, free lists and counts are rebuilt. Words from another process (a migration)
//! may be forged, so they are rebuilt as well. The index may then hold nonsense, but it is consistent. Pages from the
//! server are still compared with their fingerprints. The mapping from blocks to fingerprints is only as trustworthy as
//! the origin of the words.
//!
//! A move proceeds in pieces, while the index is in use. Until the move ends, the old region is the index, and the new
//! region follows its changes. Nodes below `moved` are in both, so changes to them are made in both. The slots follow
//! at the end in one piece, as a plain copy if their number is unchanged. After a kill before the end the old region is
//! intact, because a move only reads it.

use super::layout::{HEADER_WORDS, LAYOUT_VERSION, MAGIC, header, settle};
use super::{CacheIndex, DiskWords, Layout, Nodes, SendLog, Slots, Target, Words};
use crate::fingerprint::Fingerprint;
use crate::rules::Rules;
use crate::units::{BlockId, DiskIndex};

/// Origin of the words that an index is resumed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin<'a> {
    /// A process of this user, in a file that only this user may write to.
    Own,
    /// Another process, which may have forged them. For each disk that both have: its number there, and here. What the
    /// words hold about other disks is dropped.
    Stranger(&'a [(DiskIndex, DiskIndex)]),
}

/// Error of a resume. It returns the words to the caller.
#[derive(Debug)]
pub struct Unusable<M> {
    pub words: M,
    pub reason: &'static str,
}

impl<M: Words> CacheIndex<M> {
    /// Returns an empty index in `words`, which must hold at least [`Layout::words`]. `seed` is the seed of the hash
    /// tables; `zero` is the fingerprint of a page of zeroes, which never takes a slot. No slot is usable until
    /// [`Self::aim`] and [`Self::resize`] are called.
    ///
    /// # Panics
    /// If `words` is too short.
    pub fn new(words: M, layout: Layout, seed: u64, zero: Fingerprint) -> Self {
        let mut this = Self::over(words, layout, seed, zero);
        this.words[header::MAGIC] = 0;
        settle();
        this.words[1..layout.nodes_at()].fill(0);
        this.slots.clear_words(&mut this.words);
        this.clear_nodes();
        this.words[header::VERSION] = LAYOUT_VERSION;
        this.words[header::SLOTS] = layout.slot_limit().0;
        this.words[header::NODES] = layout.node_limit().0;
        this.words[header::DISKS] = u32::from(layout.disks());
        this.words[header::ZERO..header::ZERO + 3].copy_from_slice(&zero.0);
        settle();
        this.words[header::MAGIC] = MAGIC;
        this
    }

    /// Returns an index over `words`, which stay unchanged.
    fn over(words: M, layout: Layout, seed: u64, zero: Fingerprint) -> Self {
        assert!(words.len() >= layout.words(), "the region is smaller than its layout");
        Self {
            words,
            layout,
            nodes: Nodes::new(&layout, seed, zero),
            slots: Slots::new(&layout, zero),
            log: SendLog::new(&layout),
            disks: DiskWords::new(&layout),
            uncut: 0,
            taken_as_it_was: false,
            zero,
            rules: Rules::default(),
            target: None,
        }
    }

    /// Marks the index as complete, so that a successor need not rebuild it (which takes seconds for 64 GiB of cache).
    /// Does nothing while a slot is pinned, or while lost pages or stale lines are left in the hash table. The index
    /// must not change until it is reopened.
    pub fn close(&mut self) {
        if self.slots.are_pinned() || !self.slots.are_whole() {
            return;
        }
        self.slots.close(&mut self.words);
        self.nodes.close(&mut self.words);
        settle();
        self.words[header::CLOSED] = checksum(&self.words);
    }

    /// Reopens the index for changes.
    pub fn reopen(&mut self) {
        self.words[header::CLOSED] = 0;
        settle();
    }

    /// Returns the index that the previous process left in `words`. None of that process's requests may be outstanding.
    /// `zero` shows whether that process used the same key.
    ///
    /// # Errors
    /// If the words hold no index of this version and key with `disks` disk numbers, or more if they are
    /// [`Origin::Own`].
    pub fn resume(words: M, origin: Origin<'_>, disks: u16, seed: u64, zero: Fingerprint) -> Result<Self, Unusable<M>> {
        let unusable = |words, reason| Err(Unusable { words, reason });
        let Some(layout) = Layout::read(&words) else {
            return unusable(words, "it is not an index of this version, or is damaged");
        };
        if layout.disks() < disks || layout.disks() > disks && origin != Origin::Own {
            return unusable(words, "it was made for another number of disks");
        }
        if words[header::ZERO..header::ZERO + 3] != zero.0 {
            return unusable(words, "its fingerprints were made with another key");
        }
        let mut this = Self::over(words, layout, seed, zero);
        let closed = this.words[header::CLOSED] == checksum(&this.words);
        this.reopen();
        this.taken_as_it_was = closed && origin == Origin::Own;
        if this.taken_as_it_was {
            this.slots.take_as_closed(&this.words);
            this.nodes.take_as_closed(&this.words);
        } else {
            this.slots.rebuild(&mut this.words);
            this.rebuild_nodes(origin);
        }
        this.look_for_voids();
        Ok(this)
    }

    /// Rebuilds the hash tables of nodes. Drops void nodes and, if the words are another process's, gives the disks the
    /// numbers that they have here.
    fn rebuild_nodes(&mut self, origin: Origin<'_>) {
        let old = self.words[..self.layout.log_at()].to_vec();
        let Self { words, nodes, disks, layout, .. } = self;
        match origin {
            Origin::Own => {
                nodes.rebuild(words, |block| (!disks.is_void(&old, block)).then_some(block.disk));
                // Only now, so that a kill before this leaves the voids as they were.
                disks.end_voids(words);
            }
            Origin::Stranger(pairs) => {
                let mut here = vec![None; usize::from(layout.disks())];
                for (there, to) in pairs {
                    here.get_mut(usize::from(there.0)).into_iter().for_each(|here| *here = Some(*to));
                }
                let known = |block: &BlockId| !disks.is_void(&old, *block);
                nodes.rebuild(words, |block| {
                    Some(block).filter(known).and_then(|block| here[usize::from(block.disk.0)])
                });
                disks.renumber(words, &old, pairs);
                disks.end_voids(words);
            }
        }
    }

    /// Starts a move into `target`, an empty index with the same disks, seed and key. Cancels a move in progress.
    pub fn begin_move(&mut self, mut target: Self) {
        assert_eq!(self.layout.disks(), target.layout.disks(), "an index moves with its disks");
        target.keep_to(self.rules);
        self.target = Some(Box::new(Target { index: target, moved: 0 }));
    }

    /// Copies the next `nodes` nodes to the target. Returns `true` if no nodes are left to copy. If the table of the
    /// target is too small for all nodes, blocks whose content is cached are preferred.
    pub fn move_nodes(&mut self, nodes: u32) -> bool {
        let Some(mut target) = self.target.take() else { return true };
        let end = target.moved.saturating_add(nodes).min(self.nodes.limit());
        for node in target.moved..end {
            let Some((block, content, referenced)) = self.nodes.get(&self.words, node) else { continue };
            if self.is_void(block) {
                continue;
            }
            let used = target.index.nodes.used().saturating_add(self.slot_counts().used);
            let is_full = used >= target.index.nodes.limit();
            if is_full && self.cached(content).is_none() {
                continue;
            }
            target.index.insert_node(block, content);
            if !referenced && let Some(node) = target.index.nodes.find(&target.index.words, block) {
                target.index.nodes.clear_reference(&mut target.index.words, node);
            }
        }
        target.moved = end;
        self.target = Some(target);
        end == self.nodes.limit()
    }

    /// Finishes the move, switches to the new region, and returns the old words. Returns `None` if no move is in
    /// progress. Slots beyond the new layout are dropped; pins are kept.
    pub fn finish_move(&mut self) -> Option<M> {
        while !self.move_nodes(u32::MAX) {}
        let Target { mut index, .. } = *self.target.take()?;
        let kept = header::POOL_VALID..self.layout.slots_at();
        index.words[kept.clone()].copy_from_slice(&self.words[kept]);
        index.words[header::BIMODAL] = self.words[header::BIMODAL];
        index.slots.take_from(&mut index.words, &self.slots, &self.words);
        index.look_for_voids();
        Some(std::mem::replace(self, index).words)
    }
}

/// Start value of the checksum. Older programs, whose free slots were singly linked, used another value. A region that
/// they closed is therefore rebuilt like that of a killed process.
const CHECKSUM_BASIS: u32 = 0x811c_9dc6;

/// Returns a checksum of all header words except [`header::CLOSED`] (FNV-1a of whole words, rotated). It is never 0.
fn checksum(words: &[u32]) -> u32 {
    let others = words[..header::CLOSED].iter().chain(&words[header::CLOSED + 1..HEADER_WORDS]);
    let sum = others.fold(CHECKSUM_BASIS, |sum, word| (sum ^ word).wrapping_mul(0x0100_0193).rotate_left(15));
    sum.max(1)
}
