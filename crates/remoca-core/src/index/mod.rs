//! The cache index: which content each known block has, and in which slot of the pool that content is cached.
//!
//! It owns one region of 32-bit words with a fixed layout, which may outlive the process:
//! ```text
//! header 288 | disks: 30 each | log of sends | chunks | slots: links 2 each | entries: 5 each | entries by block, by content
//! entry: block 52 bits + flags, fingerprint x3
//! ```
//! An *entry* is a slot or a node. A *slot* says what a server holds in one page of a pool, and for which block the disk holds it. A
//! *node* says what the disk holds for another block. Block -> fingerprint -> slot (papers/remoca.txt II.B names blocks only;
//! decision 0001 says why content is the address here, decision 0036 why there is one table).
//! 1. Every slot below the capacity of its pool is free, used, or draining (given up while a request for it is outstanding).
//! 2. At most one entry has a given block, and at most one is found by a given content (`entries.rs`).
//! 3. Page and block become valid and invalid with one store (`layout.rs: settle`). A page that is admitted takes the block of
//!    its content along into the slot. If the guest has received the page again when it is discarded, the block gets a node.
//!
//! The index does no I/O and allocates only when it is created; the table is bounded. Each part of the words belongs
//! to one type; operations on several of them are here, admission in `admit.rs`, and the blocks in `blocks.rs`. `region.rs` creates, resumes
//! and moves the region; `kept.rs` handles size and pool, `voids.rs` disks that come, go and change their size.

mod admit;
mod blocks;
mod chunks;
mod disk_words;
mod entries;
mod kept;
mod layout;
mod log;
mod moves;
mod nodes;
mod prefetch;
mod queue;
mod region;
mod sizing;
mod slots;
mod table;
mod voids;

use crate::fingerprint::Fingerprint;
use crate::rules::Rules;
use crate::units::{BlockId, PageCount, PoolIndex, SlotIndex};
use disk_words::DiskWords;
use entries::Entries;
use log::SendLog;
use nodes::Nodes;
use slots::Slots;

pub use admit::{Offer, Tiers};
pub use blocks::Found;
pub use disk_words::DiskState;
pub use entries::EntryHint;
pub use kept::Move;
pub use layout::{DISK_BYTES_MAX, Layout, SWAP_AREAS_MAX, Words};
pub use log::{LogEnd, Pool};
pub use region::{Origin, Unusable};
pub use slots::{Place, SlotCounts};

/// Index in a region of words `M`, such as a mapped file or a vector.
pub struct CacheIndex<M> {
    words: M,
    layout: Layout,
    entries: Entries,
    nodes: Nodes,
    slots: Slots,
    log: SendLog,
    disks: DiskWords,
    /// Number of entries, at the end of the table, that have yet to be examined because some may be void.
    uncut: u32,
    taken_as_it_was: bool,
    rules: Rules,
    /// Target of the move in progress.
    target: Option<Box<Target<M>>>,
}

/// Target of a move.
struct Target<M> {
    index: CacheIndex<M>,
    /// First entry that has not been moved.
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

    /// Returns the number of blocks whose content is known, including void ones that [`Self::cut`] has not forgotten yet.
    pub fn known_blocks(&self) -> PageCount {
        PageCount(self.nodes.used() + self.slots.known())
    }

    /// Returns the size of the region in bytes.
    pub fn region_bytes(&self) -> usize {
        self.layout.words() * 4
    }

    /// Returns the slot that holds `content`, or `None` if no slot holds it.
    pub fn cached(&self, content: Fingerprint) -> Option<SlotIndex> {
        self.slots.cached(&self.words, content).map(SlotIndex)
    }

    /// Returns the slot that holds `content`, or `None` if no slot holds it. Needs no search if `hint`, where a block of
    /// this content was found, is the slot.
    pub fn cached_near(&self, hint: EntryHint, content: Fingerprint) -> Option<SlotIndex> {
        let slot = SlotIndex(hint.0);
        if self.holds(slot, content) { Some(slot) } else { self.cached(content) }
    }

    /// Returns whether `slot` holds `content`. Needs no search.
    pub fn holds(&self, slot: SlotIndex, content: Fingerprint) -> bool {
        let holds = self.slots.holds(&self.words, slot.0, content);
        debug_assert_eq!(holds, self.cached(content) == Some(slot), "a search and a look at the slot differ");
        holds
    }

    /// Discards page and block of `slot`. If the guest has received the page again, the block stays known; otherwise no copy
    /// of its content is left in memory.
    fn discard(&mut self, slot: u32) {
        let pool = self.empty(slot, self.slots.was_hit(&self.words, slot));
        self.put_back(slot, pool);
    }

    /// Drops the page of `slot`, or what is left of one beyond the capacity. A block that the guest has not received again
    /// stays known if a node is free.
    fn lose(&mut self, slot: u32) {
        let pool = self.empty(slot, self.slots.was_hit(&self.words, slot) || !self.nodes.is_full());
        self.put_back(slot, pool);
    }

    /// Removes page and block of `slot`. Returns the pool of a slot with a page, to which the slot must be put back, unless it is
    /// filled again.
    #[must_use = "the slot is on no list"]
    fn empty(&mut self, slot: u32, keeps_block: bool) -> Option<PoolIndex> {
        if keeps_block && self.slots.knows_block(&self.words, slot) && !self.is_doomed(slot) {
            self.move_block_to_node(slot)
        } else {
            let pool = self.slots.release(&mut self.words, slot);
            self.follow_slot(slot);
            pool
        }
    }

    /// Puts a slot that was [emptied](Self::empty) back to its pool, if it had a page there.
    fn put_back(&mut self, slot: u32, pool: Option<PoolIndex>) {
        if let Some(pool) = pool {
            self.slots.put_back(&mut self.words, pool, slot);
        }
        self.follow_changes();
    }

    /// Marks `block` as referenced, because the guest received its cached page. With `promote`, its slot becomes the
    /// newest; otherwise it becomes the next to be discarded. The cached copy stays valid. `hint` says where the block
    /// was found before, to save a search.
    pub fn hit(&mut self, hint: EntryHint, block: BlockId, slot: SlotIndex, promote: bool) {
        if let Some(entry) = self.entries.find_again(&self.words, hint, block) {
            self.reference(entry);
        }
        if self.slots.is_used(&self.words, slot.0) {
            if promote {
                self.slots.move_to_tail(&mut self.words, slot.0);
            } else {
                self.slots.move_to_head(&mut self.words, slot.0, true);
            }
        }
        self.follow_changes();
    }

    /// Marks the page of `slot`, which the guest has received, as one that it may give up without a word, as a clean page of a
    /// swap area. It is demoted, not discarded, when its turn comes.
    pub fn note_silent(&mut self, slot: SlotIndex) {
        self.slots.clear_hit(&mut self.words, slot.0);
        self.follow_changes();
    }

    /// Pins `slot` for a request. Returns `false` if the slot already has the maximum number of pins. The caller must
    /// then read from the disk.
    pub fn pin(&mut self, slot: SlotIndex) -> bool {
        let is_pinned = self.slots.pin(&mut self.words, slot.0);
        self.follow_changes();
        is_pinned
    }

    /// Removes one pin from `slot`.
    pub fn unpin(&mut self, slot: SlotIndex) {
        self.slots.unpin(&mut self.words, slot.0);
        self.follow_changes();
    }

    /// Returns the number of pinned slots, including those beyond the capacity. Examines every slot.
    pub fn pinned_slots(&self) -> PageCount {
        self.slots.pinned(&self.words)
    }

    /// Returns the cached contents of a pool with their slots, from the next to be discarded to the newest.
    pub fn queue(&self, pool: PoolIndex) -> impl Iterator<Item = (SlotIndex, Fingerprint)> + '_ {
        self.slots.queue(&self.words, pool)
    }

    /// Returns the cached contents of all pools with their slots.
    pub fn pages(&self) -> impl Iterator<Item = (SlotIndex, Fingerprint)> + '_ {
        PoolIndex::all().flat_map(|pool| self.queue(pool))
    }

    /// Drops the page of `slot`, because the server lost it or returned something else.
    pub fn drop_slot(&mut self, slot: SlotIndex) {
        if self.slots.is_used(&self.words, slot.0) {
            self.lose(slot.0);
        }
    }

    /// Drops all cached content, but keeps the known blocks. Slots become usable again as [`Self::resize`] processes
    /// them, and their blocks get nodes: those that the guest had not received again only as long as nodes are free.
    pub fn drop_all_slots(&mut self) {
        self.slots.clear(&mut self.words);
    }

    /// Drops all cached content, and makes what is known of all disks void. [`Self::cut`] forgets it.
    pub fn drop_everything(&mut self) {
        self.drop_all_slots();
        if self.known_blocks().0 > 0 {
            self.cut_all_disks();
        }
    }
}

#[cfg(test)]
mod block_tests;
#[cfg(test)]
mod disk_tests;
#[cfg(test)]
mod move_tests;
#[cfg(test)]
mod pool_tests;
#[cfg(test)]
mod resume_tests;
#[cfg(test)]
mod size_tests;
#[cfg(test)]
mod tests;
