//! The slots: what the server holds in each page of the pool. They have a hash table by fingerprint, one queue from the next to
//! be discarded to the newest, and a list of free slots.
//!
//! `capacity.rs` changes the number of usable slots; `rebuild.rs` restores slots from another process or region.

mod capacity;
mod rebuild;

pub(in crate::index) use capacity::Step;

use super::layout::{Layout, NONE, SLOT_WORDS, Words, header, settle};
use super::queue::{FreeSlots, Queue};
use super::sizing::Sizing;
use super::table::{Lines, Site, Table};
use crate::fingerprint::Fingerprint;
use crate::rules::{Rule, Rules};
use crate::units::{PageCount, SlotIndex};

const META: usize = 5;

const PINS: u32 = 0xffff;
const USED: u32 = 1 << 16;
/// Flag of a page that the guest has received again since its admission.
const HIT: u32 = 1 << 17;

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

/// Numbers of slots by state, whose sum is the capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotCounts {
    pub free: u32,
    pub used: u32,
    pub draining: u32,
}

/// Table of slots, with the part of its state that is kept outside the words.
#[derive(Debug)]
pub(in crate::index) struct Slots {
    table: Table<SLOT_WORDS>,
    lines: Lines,
    limit: u32,
    capacity: u32,
    queue: Queue,
    free: FreeSlots,
    used: u32,
    draining: u32,
    /// Sum of the pins of all slots.
    pins: u64,
    sizing: Sizing,
    zero: Fingerprint,
    rules: Rules,
}

impl Slots {
    /// Returns the empty table of a layout.
    pub(in crate::index) fn new(layout: &Layout, zero: Fingerprint) -> Self {
        let table = Table::new(layout.slots_at());
        Self {
            table,
            lines: Lines::new(layout.slot_lines_at(), layout.slot_limit().0),
            limit: layout.slot_limit().0,
            capacity: 0,
            queue: Queue::new(table),
            free: FreeSlots::new(table),
            used: 0,
            draining: 0,
            pins: 0,
            sizing: Sizing::new(),
            zero,
            rules: Rules::default(),
        }
    }

    /// Clears the words of the table, so that no slot is used or found.
    pub(in crate::index) fn clear_words<M: Words>(&mut self, words: &mut M) {
        self.lines.clear(words);
        self.queue.clear(words);
    }

    pub(in crate::index) fn keep_to(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Returns the numbers of free, used and draining slots.
    pub(in crate::index) fn counts(&self) -> SlotCounts {
        SlotCounts { free: self.free.count(), used: self.used, draining: self.draining }
    }

    /// Returns the number of slots that are free, used or draining.
    pub(in crate::index) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Returns whether any slot is pinned.
    #[inline]
    pub(in crate::index) fn are_pinned(&self) -> bool {
        self.pins > 0
    }

    fn meta<M: Words>(&self, words: &M, slot: u32) -> u32 {
        self.table.get(words, slot, META)
    }

    fn set_meta<M: Words>(&self, words: &mut M, slot: u32, meta: u32) {
        self.table.set(words, slot, META, meta);
    }

    #[inline]
    fn site(&self, content: Fingerprint) -> Site {
        self.lines.site_of_content(content)
    }

    /// Returns whether a slot is below the capacity and has a page.
    pub(in crate::index) fn is_used<M: Words>(&self, words: &M, slot: u32) -> bool {
        slot < self.capacity && self.meta(words, slot) & USED != 0
    }

    /// Returns the slot with a page of this content, even if the page is lost. Returns `None` if there is no such slot.
    pub(in crate::index) fn find<M: Words>(&self, words: &M, content: Fingerprint) -> Option<u32> {
        if self.used == 0 {
            // After a clear, the hash table may still name slots.
            return None;
        }
        self.lines.find(words, self.site(content), |slot| self.table.content(words, slot) == content)
    }

    /// Returns the slot that holds `content`, or `None` if no slot holds it. Zero pages are never cached.
    pub(in crate::index) fn cached<M: Words>(&self, words: &M, content: Fingerprint) -> Option<u32> {
        if content == self.zero {
            return None;
        }
        self.find(words, content).filter(|slot| !self.sizing.is_lost(*slot))
    }

    /// Returns whether `slot` has a page of this content that is not lost. That is the slot that [`Self::cached`] finds with a
    /// search, because no other slot has this content.
    pub(in crate::index) fn holds<M: Words>(&self, words: &M, slot: u32, content: Fingerprint) -> bool {
        self.is_used(words, slot) && !self.is_lost(slot) && self.table.content(words, slot) == content
    }

    /// Returns whether the page of a slot is lost.
    pub(in crate::index) fn is_lost(&self, slot: u32) -> bool {
        self.sizing.is_lost(slot)
    }

    /// Makes a used slot the next to be discarded. `hit` says whether the guest has the page.
    pub(in crate::index) fn move_to_head<M: Words>(&mut self, words: &mut M, slot: u32, hit: bool) {
        self.queue.remove(words, slot);
        self.queue.add_first(words, slot);
        if hit {
            let meta = self.meta(words, slot);
            self.set_meta(words, slot, meta | HIT);
        }
    }

    /// Makes a used slot the newest. The guest does not have its page.
    pub(in crate::index) fn move_to_tail<M: Words>(&mut self, words: &mut M, slot: u32) {
        self.queue.remove(words, slot);
        self.queue.add_last(words, slot);
        let meta = self.meta(words, slot);
        self.set_meta(words, slot, meta & !HIT);
    }

    /// Makes the slot that holds `content` the next to be discarded, because the guest holds this content again. Does
    /// nothing if no slot holds it.
    pub(in crate::index) fn note_in_guest<M: Words>(&mut self, words: &mut M, content: Fingerprint) {
        if content != self.zero
            && let Some(slot) = self.find(words, content)
        {
            self.move_to_head(words, slot, true);
        }
    }

    /// Returns whether a slot must be emptied before one can be taken.
    pub(in crate::index) fn needs_victim(&self) -> bool {
        self.free.first() == NONE || self.used >= self.sizing.wanted()
    }

    /// Takes a free slot. After the page of `victim` was discarded, there may still be no free slot, because `victim`
    /// is pinned. That happens only in tests that omit [`Rule::PinnedSlot`], and then `victim` is taken despite its
    /// pins.
    pub(in crate::index) fn take<M: Words>(&mut self, words: &mut M, victim: Option<u32>) -> u32 {
        let counts = self.counts();
        assert!(counts.free + counts.used + counts.draining == self.capacity, "{counts:?} of {} slots", self.capacity);
        match victim {
            Some(victim) if self.free.first() == NONE => {
                self.draining -= 1;
                victim
            }
            _ => {
                let slot = self.free.first();
                self.free.remove(words, slot);
                assert!(
                    self.meta(words, slot) & (USED | PINS) == 0,
                    "the free slot {slot} has a page or is waited for"
                );
                slot
            }
        }
    }

    /// Returns the slot to discard next: the first unpinned one of the [`VICTIM_TRIES`] slots at the head of the queue.
    /// Returns `None` if there is none.
    pub(in crate::index) fn find_victim<M: Words>(&self, words: &M) -> Option<u32> {
        let mut slot = self.queue.first(words);
        for _ in 0..VICTIM_TRIES {
            if slot == NONE {
                return None;
            }
            if !self.rules.hold(Rule::PinnedSlot) || self.meta(words, slot) & PINS == 0 {
                return Some(slot);
            }
            slot = self.queue.after(words, slot);
        }
        None
    }

    /// Returns the fingerprint of the page in a used slot, and whether the guest has received the page again since its
    /// admission.
    pub(in crate::index) fn page<M: Words>(&self, words: &M, slot: u32) -> (Fingerprint, bool) {
        (self.table.content(words, slot), self.meta(words, slot) & HIT != 0)
    }

    /// Stores the content of a slot that is not used, and makes the slot the one that is found by it. Returns `false` if the
    /// hash table has no room.
    fn enter<M: Words>(&self, words: &mut M, slot: u32, content: Fingerprint) -> bool {
        self.table.set_content(words, slot, content);
        let site_of = |words: &M, other| self.site(self.table.content(words, other));
        self.lines.insert(words, self.site(content), slot, site_of)
    }

    /// Prepares a slot that was taken for a page of this content, which [`Self::fill`] makes valid. Returns `false`, and gives
    /// the slot back, if the hash table has no room.
    pub(in crate::index) fn reserve<M: Words>(&mut self, words: &mut M, slot: u32, content: Fingerprint) -> bool {
        let has_room = self.enter(words, slot, content);
        if !has_room {
            self.put_back(words, slot);
        }
        has_room
    }

    /// Makes a page valid in a slot that was [prepared](Self::reserve) for it, and puts the slot on the queue at
    /// `place`.
    pub(in crate::index) fn fill<M: Words>(&mut self, words: &mut M, slot: u32, place: Place) {
        let pins = self.meta(words, slot) & PINS;
        settle();
        // This store makes the slot valid.
        self.set_meta(words, slot, USED | pins);
        self.used += 1;
        match place {
            Place::Tail => self.queue.add_last(words, slot),
            Place::Head => self.queue.add_first(words, slot),
        }
    }

    /// Removes the page of a used slot. The slot becomes free, or draining while it is pinned.
    pub(in crate::index) fn release<M: Words>(&mut self, words: &mut M, slot: u32) {
        let pins = self.meta(words, slot) & PINS;
        self.set_meta(words, slot, pins);
        settle();
        self.lines.remove(words, self.site(self.table.content(words, slot)), slot);
        self.queue.remove(words, slot);
        self.used -= 1;
        self.put_back(words, slot);
    }

    /// Makes a slot without a page free, or draining while it is pinned.
    fn put_back<M: Words>(&mut self, words: &mut M, slot: u32) {
        if self.meta(words, slot) & PINS != 0 {
            self.draining += 1;
        } else {
            self.free.add_first(words, slot);
        }
    }

    /// Adds a pin to `slot`. Returns `false` if the slot already has the maximum number of pins.
    pub(in crate::index) fn pin<M: Words>(&mut self, words: &mut M, slot: u32) -> bool {
        let meta = self.meta(words, slot);
        if meta & PINS == PINS {
            return false;
        }
        self.set_meta(words, slot, meta + 1);
        self.pins += 1;
        true
    }

    /// Removes a pin from `slot`. A draining slot becomes free with its last pin.
    pub(in crate::index) fn unpin<M: Words>(&mut self, words: &mut M, slot: u32) {
        let meta = self.meta(words, slot);
        assert!(meta & PINS != 0, "a slot is unpinned more often than pinned");
        self.set_meta(words, slot, meta - 1);
        self.pins -= 1;
        if meta & USED == 0 && meta & PINS == 1 && slot < self.capacity {
            self.draining -= 1;
            self.free.add_first(words, slot);
        }
    }

    /// Returns the number of pinned slots. Examines every slot.
    pub(in crate::index) fn pinned<M: Words>(&self, words: &M) -> PageCount {
        PageCount((0..self.limit).map(|slot| u32::from(self.meta(words, slot) & PINS != 0)).sum())
    }

    /// Returns the cached contents with their slots, from the next to be discarded to the newest.
    pub(in crate::index) fn queue<M: Words>(&self, words: &M) -> impl Iterator<Item = (SlotIndex, Fingerprint)> {
        let mut slot = self.queue.first(words);
        std::iter::from_fn(move || {
            if slot == NONE {
                return None;
            }
            let this = slot;
            slot = self.queue.after(words, slot);
            Some((SlotIndex(this), self.table.content(words, this)))
        })
        .filter(|(slot, _)| !self.sizing.is_lost(slot.0))
    }

    fn store_capacity<M: Words>(&mut self, words: &mut M, capacity: u32) {
        settle();
        self.capacity = capacity;
        words[header::CAPACITY] = self.sizing.kept_of(capacity);
    }
}
