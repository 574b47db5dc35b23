//! The slots: what a server holds in each page of its pool, and for one block of the same content that the disk holds it.
//! Each pool has a queue from the next to be discarded to the newest, and a list of free slots (`pools.rs`).
//!
//! A free or draining slot knows no block. A slot beyond the capacity may know one: its page was lost, and nobody has needed
//! the slot since. `capacity.rs` changes the number of usable slots; `restore.rs` restores slots from another process or
//! region.

mod capacity;
mod pool_slots;
mod pools;
mod restore;

pub(in crate::index) use capacity::Step;
pub use pool_slots::SlotCounts;

use super::chunks::{Chunks, FreeChunks};
use super::entries::{Entries, KNOWN, Key, PAGE, Vacancy};
use super::layout::{Layout, NONE, Words, settle};
use super::queue::Links;
use crate::fingerprint::Fingerprint;
use crate::rules::{Rule, Rules};
use crate::units::{BlockId, PageCount, PoolIndex, SlotIndex};
use pool_slots::PoolSlots;

/// One pin of a slot, and all that it may have.
const PIN: u32 = 1 << 20;
const PINS: u32 = 0x1ff * PIN;
/// Flag of a page that the guest has received again since its admission.
const HIT: u32 = 1 << 29;

/// Maximum number of slots examined at the head in the search for a victim.
const VICTIM_TRIES: u32 = 64;

/// End of the queue at which an admitted page enters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Newest: discarded last.
    Tail,
    /// Next to be discarded.
    Head,
}

/// The slots, with the part of their state that is kept outside the words.
#[derive(Debug)]
pub(in crate::index) struct Slots {
    entries: Entries,
    links: Links,
    chunks: Chunks,
    pools: Vec<PoolSlots>,
    free_chunks: FreeChunks,
    /// Number of slots whose block is known, including those beyond the capacity.
    known: u32,
    /// Sum of the pins of all slots.
    pins: u64,
    zero: Fingerprint,
    rules: Rules,
}

impl Slots {
    /// Returns the slots of a layout. None is usable.
    pub(in crate::index) fn new(layout: &Layout, entries: Entries, zero: Fingerprint) -> Self {
        Self {
            entries,
            links: Links::new(layout),
            chunks: Chunks::new(layout),
            pools: PoolIndex::all().map(PoolSlots::new).collect(),
            free_chunks: FreeChunks::new(0..layout.chunks()),
            known: 0,
            pins: 0,
            zero,
            rules: Rules::default(),
        }
    }

    /// Empties the queues and the chunks of a new region.
    pub(in crate::index) fn clear_new<M: Words>(&mut self, words: &mut M) {
        self.pools.iter_mut().for_each(|pool| pool.queue.clear(words));
        (0..self.chunks.count()).for_each(|chunk| self.chunks.take(words, chunk));
    }

    pub(in crate::index) fn keep_to(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Returns the numbers of free, used and draining slots.
    pub(in crate::index) fn counts(&self) -> SlotCounts {
        let add = |sum: SlotCounts, pool: &PoolSlots| SlotCounts {
            free: sum.free + pool.free.count(),
            used: sum.used + pool.used,
            draining: sum.draining + pool.draining,
        };
        self.pools.iter().fold(SlotCounts::default(), add)
    }

    /// Returns the number of blocks that are known by a slot.
    pub(in crate::index) fn known(&self) -> u32 {
        self.known
    }

    /// Returns the number of slots in the table.
    pub(in crate::index) fn limit(&self) -> u32 {
        self.chunks.table_slots()
    }

    /// Returns the number of slots of all pools that are free, used or draining.
    pub(in crate::index) fn capacity(&self) -> u32 {
        self.pools.iter().map(|pool| pool.capacity).sum()
    }

    /// Returns whether any slot is pinned.
    #[inline]
    pub(in crate::index) fn are_pinned(&self) -> bool {
        self.pins > 0
    }

    fn high<M: Words>(&self, words: &M, slot: u32) -> u32 {
        self.entries.high(words, slot)
    }

    fn set_high<M: Words>(&self, words: &mut M, slot: u32, high: u32) {
        self.entries.set_high(words, slot, high);
    }

    /// Returns whether a slot is below the capacity and has a page, even if the page is lost.
    pub(in crate::index) fn is_used<M: Words>(&self, words: &M, slot: u32) -> bool {
        self.pool_of(words, slot).is_some() && self.high(words, slot) & PAGE != 0
    }

    /// Begins to load both links of a slot.
    pub(in crate::index) fn touch_links<M: Words>(&self, words: &M, slot: u32) {
        self.links.touch(words, slot);
    }

    /// Begins to load the links of both neighbours of a slot.
    pub(in crate::index) fn touch_neighbours<M: Words>(&self, words: &M, slot: u32) {
        self.links.touch_neighbours(words, slot, self.limit());
    }

    /// Returns the slot that holds `content`, or `None` if no slot holds it. Zero pages are never cached.
    pub(in crate::index) fn cached<M: Words>(&self, words: &M, content: Fingerprint) -> Option<u32> {
        if content == self.zero {
            return None;
        }
        self.entries.find_page(words, content)
    }

    /// Returns whether `entry` is a slot with a page of this content that is not lost. That is the slot that
    /// [`Self::cached`] finds with a search, because no other slot has this content.
    pub(in crate::index) fn holds<M: Words>(&self, words: &M, entry: u32, content: Fingerprint) -> bool {
        self.entries.has_page(words, entry) && self.entries.content(words, entry) == content
    }

    /// Returns whether a slot with a page has no known block, so that it can [learn](Self::learn_block) one.
    pub(in crate::index) fn needs_block<M: Words>(&self, words: &M, entry: u32) -> bool {
        self.entries.has_page(words, entry) && self.high(words, entry) & KNOWN == 0
    }

    /// Makes a used slot the next to be discarded. `hit` says whether the guest has the page.
    pub(in crate::index) fn move_to_head<M: Words>(&mut self, words: &mut M, slot: u32, hit: bool) {
        let Some(pool) = self.pool_of(words, slot) else { return };
        let (it, links) = self.pool_and_links(pool);
        it.queue.remove(links, words, slot);
        it.queue.add_first(links, words, slot);
        if hit {
            let high = self.high(words, slot);
            self.set_high(words, slot, high | HIT);
        }
    }

    /// Makes a used slot the newest. The guest does not have its page.
    pub(in crate::index) fn move_to_tail<M: Words>(&mut self, words: &mut M, slot: u32) {
        let Some(pool) = self.pool_of(words, slot) else { return };
        let (it, links) = self.pool_and_links(pool);
        it.queue.remove(links, words, slot);
        it.queue.add_last(links, words, slot);
        let high = self.high(words, slot);
        self.set_high(words, slot, high & !HIT);
    }

    /// Clears the mark that the guest has received the page of a slot again.
    pub(in crate::index) fn clear_hit<M: Words>(&mut self, words: &mut M, slot: u32) {
        let high = self.high(words, slot);
        self.set_high(words, slot, high & !HIT);
        self.links.note(slot);
    }

    /// Makes the slot that holds `content` the next to be discarded, because the guest holds this content again. Does
    /// nothing if no slot holds it.
    pub(in crate::index) fn note_in_guest<M: Words>(&mut self, words: &mut M, content: Fingerprint) {
        if let Some(slot) = self.cached(words, content) {
            self.move_to_head(words, slot, true);
        }
    }

    // Known blocks.

    /// Records that the disk holds the page of a slot for `block`, which no entry knows. Does nothing if the hash table has no
    /// room. Returns whether the block is known now.
    pub(in crate::index) fn learn_block<M: Words>(&mut self, words: &mut M, slot: u32, block: BlockId) -> bool {
        let key = Key::of(block);
        let has_room = self.entries.enter_key(words, slot, key);
        if has_room {
            self.store_block(words, slot, key);
        }
        has_room
    }

    /// Takes over the block of a node that was [given up](super::nodes::Nodes::give_up).
    pub(in crate::index) fn take_over<M: Words>(&mut self, words: &mut M, slot: u32, node: u32, key: Key) {
        self.entries.hand_over_key(words, key, node, slot);
        self.store_block(words, slot, key);
    }

    fn store_block<M: Words>(&mut self, words: &mut M, slot: u32, key: Key) {
        self.entries.set_low(words, slot, key.low);
        settle();
        let high = self.high(words, slot);
        self.set_high(words, slot, high | KNOWN | key.high);
        self.known += 1;
    }

    /// Forgets the block of a slot, which keeps its page. Returns the block.
    pub(in crate::index) fn forget_block<M: Words>(&mut self, words: &mut M, slot: u32) -> BlockId {
        let (key, high) = (self.entries.key(words, slot), self.high(words, slot));
        self.set_high(words, slot, high & (PAGE | HIT | PINS));
        settle();
        self.entries.leave_key(words, slot, key);
        if high & PAGE == 0 {
            self.entries.leave_content(words, slot);
        }
        self.known -= 1;
        key.block()
    }

    /// Returns whether the guest has received the page of a slot again since it was admitted.
    pub(in crate::index) fn was_hit<M: Words>(&self, words: &M, slot: u32) -> bool {
        self.high(words, slot) & HIT != 0
    }

    /// Returns whether a slot knows a block.
    pub(in crate::index) fn knows_block<M: Words>(&self, words: &M, slot: u32) -> bool {
        self.high(words, slot) & KNOWN != 0
    }

    /// Returns whether the page of a slot may move to another slot: its block is known, and no request for it is outstanding.
    pub(in crate::index) fn may_move<M: Words>(&self, words: &M, slot: u32) -> bool {
        self.high(words, slot) & (KNOWN | PINS) == KNOWN
    }

    // Pages.

    /// Returns whether a slot of a pool must be emptied before one can be taken.
    #[inline]
    pub(in crate::index) fn needs_victim(&self, pool: PoolIndex) -> bool {
        self.pool(pool).needs_victim()
    }

    /// Takes a free slot of a pool.
    pub(in crate::index) fn take<M: Words>(&mut self, words: &mut M, pool: PoolIndex) -> u32 {
        let (it, links) = self.pool_and_links(pool);
        let slot = it.free.first();
        it.free.remove(links, words, slot);
        assert!(self.high(words, slot) == 0, "the free slot {slot} has a page or a block, or is waited for");
        slot
    }

    /// Returns the slot of a pool to discard next: the first unpinned one of the [`VICTIM_TRIES`] slots at the head of the queue.
    /// Returns `None` if there is none. The victim is pinned only in tests that omit [`Rule::PinnedSlot`].
    pub(in crate::index) fn find_victim<M: Words>(&self, words: &M, pool: PoolIndex) -> Option<u32> {
        let queue = &self.pool(pool).queue;
        let mut slot = queue.first(words);
        for _ in 0..VICTIM_TRIES {
            if slot == NONE {
                return None;
            }
            if !self.rules.hold(Rule::PinnedSlot) || self.high(words, slot) & PINS == 0 {
                return Some(slot);
            }
            slot = queue.after(&self.links, words, slot);
        }
        None
    }

    /// Returns the three pages to be discarded after the next one, as far as there are any; the others are [`NONE`].
    pub(in crate::index) fn later_victims<M: Words>(&self, words: &M, pool: PoolIndex) -> [u32; 3] {
        let queue = &self.pool(pool).queue;
        let after = |slot| if slot < self.limit() { queue.after(&self.links, words, slot) } else { NONE };
        let second = after(queue.first(words));
        let third = after(second);
        [second, third, after(third)]
    }

    /// Prepares a slot that was taken for a page of this content, and for its block. [`Self::fill`] makes both valid. Returns
    /// `None` if the hash table of contents has no room, and otherwise the words that make the block known: none if the other
    /// hash table has no room.
    pub(in crate::index) fn reserve<M: Words>(
        &mut self,
        words: &mut M,
        slot: u32,
        content: Fingerprint,
        block: BlockId,
    ) -> Option<Option<Key>> {
        self.entries.set_content(words, slot, content);
        if !self.entries.enter_content(words, slot) {
            return None;
        }
        let key = Key::of(block);
        Some(Some(key).filter(|key| self.entries.enter_key(words, slot, *key)))
    }

    /// Does what [`Self::reserve`] does, in the words that the node of the block has left. There is room in both.
    pub(in crate::index) fn reserve_vacant<M: Words>(
        &self,
        words: &mut M,
        slot: u32,
        content: Fingerprint,
        vacancy: Vacancy,
    ) -> Option<Key> {
        self.entries.set_content(words, slot, content);
        self.entries.occupy(words, slot, vacancy)
    }

    /// Makes a page, and its block if there is one, valid in a slot that was [prepared](Self::reserve) for them, and puts
    /// the slot on the queue of its pool as the newest.
    pub(in crate::index) fn fill<M: Words>(&mut self, words: &mut M, pool: PoolIndex, slot: u32, key: Option<Key>) {
        self.validate(words, pool, slot, key, 0);
        let (it, links) = self.pool_and_links(pool);
        it.queue.add_last(links, words, slot);
    }

    /// Makes a page, and its block if there is one, valid in a slot of a pool.
    fn validate<M: Words>(&mut self, words: &mut M, pool: PoolIndex, slot: u32, key: Option<Key>, hit: u32) {
        let pins = self.high(words, slot) & PINS;
        if let Some(key) = key {
            self.entries.set_low(words, slot, key.low);
        }
        settle();
        // This store makes page and block valid.
        self.set_high(words, slot, PAGE | pins | hit | key.map_or(0, |key| KNOWN | key.high));
        self.known += u32::from(key.is_some());
        let it = self.pool_mut(pool);
        it.used += 1;
        let (counts, capacity) = (it.counts(), it.capacity);
        assert!(counts.free + counts.used + counts.draining == capacity, "{counts:?} of {capacity} slots");
    }

    /// Removes the page and the block of a slot. Returns its pool if it had a page there: the slot must then be [put
    /// back](Self::put_back), or [filled](Self::fill) again.
    #[must_use = "the slot is on no list"]
    pub(in crate::index) fn release<M: Words>(&mut self, words: &mut M, slot: u32) -> Option<PoolIndex> {
        let (key, high) = (self.entries.key(words, slot), self.high(words, slot));
        let pool = self.let_go(words, slot);
        if high & (PAGE | KNOWN) != 0 {
            self.entries.leave_content(words, slot);
        }
        if high & KNOWN != 0 {
            self.entries.leave_key(words, slot, key);
        }
        pool
    }

    /// Does what [`Self::release`] does with a slot that no hash table names any more, because a node has taken over its
    /// block.
    #[must_use = "the slot is on no list"]
    pub(in crate::index) fn let_go<M: Words>(&mut self, words: &mut M, slot: u32) -> Option<PoolIndex> {
        let high = self.high(words, slot);
        // This store makes page and block invalid.
        self.set_high(words, slot, high & PINS);
        settle();
        self.known -= u32::from(high & KNOWN != 0);
        if high & PAGE == 0 {
            return None;
        }
        let pool = self.pool_of(words, slot)?;
        let (it, links) = self.pool_and_links(pool);
        it.queue.remove(links, words, slot);
        it.used -= 1;
        Some(pool)
    }

    /// Makes a slot of a pool that has no page free, or draining while it is pinned.
    pub(in crate::index) fn put_back<M: Words>(&mut self, words: &mut M, pool: PoolIndex, slot: u32) {
        let is_pinned = self.high(words, slot) & PINS != 0;
        let (it, links) = self.pool_and_links(pool);
        if is_pinned {
            it.draining += 1;
        } else {
            it.free.add_first(links, words, slot);
        }
    }

    /// Adds a pin to `slot`. Returns `false` if the slot already has the maximum number of pins.
    pub(in crate::index) fn pin<M: Words>(&mut self, words: &mut M, slot: u32) -> bool {
        let high = self.high(words, slot);
        if high & PINS == PINS {
            return false;
        }
        self.set_high(words, slot, high + PIN);
        self.links.note(slot);
        self.pins += 1;
        true
    }

    /// Removes a pin from `slot`. With its last pin, a draining slot becomes free, and one beyond the capacity no longer keeps its
    /// chunk.
    pub(in crate::index) fn unpin<M: Words>(&mut self, words: &mut M, slot: u32) {
        let high = self.high(words, slot);
        assert!(high & PINS != 0, "a slot is unpinned more often than pinned");
        self.set_high(words, slot, high - PIN);
        self.links.note(slot);
        self.pins -= 1;
        let Some((pool, local)) = self.place(words, slot).filter(|_| high & PINS == PIN) else { return };
        let (it, links) = self.pool_and_links(pool);
        if local >= it.capacity {
            it.may_give_back = true;
        } else if high & PAGE == 0 {
            it.draining -= 1;
            it.free.add_first(links, words, slot);
        }
    }

    /// Returns the number of pinned slots. Examines every slot.
    pub(in crate::index) fn pinned<M: Words>(&self, words: &M) -> PageCount {
        PageCount((0..self.limit()).map(|slot| u32::from(self.high(words, slot) & PINS != 0)).sum())
    }

    /// Returns the cached contents of a pool with their slots, from the next to be discarded to the newest.
    pub(in crate::index) fn queue<M: Words>(
        &self,
        words: &M,
        pool: PoolIndex,
    ) -> impl Iterator<Item = (SlotIndex, Fingerprint)> {
        let queue = &self.pool(pool).queue;
        let mut slot = queue.first(words);
        std::iter::from_fn(move || {
            if slot == NONE {
                return None;
            }
            let this = slot;
            slot = queue.after(&self.links, words, slot);
            Some((SlotIndex(this), self.entries.content(words, this)))
        })
        .filter(|(slot, _)| self.entries.has_page(words, slot.0))
    }
}
