//! The slot table: one queue from the next to be discarded (head) to the newest (tail), and a chain for each fingerprint.

use super::resume::{BATCH, Chain, look_along};
use super::{CacheIndex, Fingerprint, NONE, Place, SLOT_WORDS, header, settle};
use crate::rules::Rule;
use crate::units::{PageCount, SlotIndex};
use std::hint::black_box;
use std::ops::DerefMut;

pub(super) const PREVIOUS: usize = 0;
pub(super) const NEXT: usize = 1;
const CONTENT: usize = 2;
const CHAIN: usize = 5;
pub(super) const META: usize = 6;

pub(super) const PINS: u32 = 0xffff;
pub(super) const USED: u32 = 1 << 16;
/// The guest got this page back since it was admitted.
const HIT: u32 = 1 << 17;

/// Found on the queue while it is rebuilt.
const SEEN: u32 = 1 << 18;

/// How many pinned slots at the head are passed over in search of a victim.
const VICTIM_TRIES: u32 = 64;

impl<M: DerefMut<Target = [u32]>> CacheIndex<M> {
    pub(super) fn slot_word(&self, slot: u32, field: usize) -> u32 {
        self.words[self.layout.slots_at() + slot as usize * SLOT_WORDS + field]
    }

    pub(super) fn set_slot_word(&mut self, slot: u32, field: usize, value: u32) {
        let at = self.layout.slots_at() + slot as usize * SLOT_WORDS + field;
        self.words[at] = value;
    }

    fn slot_content(&self, slot: u32) -> Fingerprint {
        Fingerprint([0, 1, 2].map(|i| self.slot_word(slot, CONTENT + i)))
    }

    fn slot_head_at(&self, content: Fingerprint) -> usize {
        self.layout.slot_heads_at() + (content.0[0] & (self.layout.slot_heads - 1)) as usize
    }

    pub(super) fn is_used(&self, slot: u32) -> bool {
        slot < self.capacity && self.slot_word(slot, META) & USED != 0
    }

    pub(super) fn find_slot(&self, content: Fingerprint) -> Option<u32> {
        if self.counts.used == 0 {
            // The heads of an index that was cleared may name slots.
            return None;
        }
        let mut slot = self.words[self.slot_head_at(content)];
        while slot != NONE {
            if self.slot_content(slot) == content {
                return Some(slot);
            }
            slot = self.slot_word(slot, CHAIN);
        }
        None
    }

    pub(super) fn first(&self) -> u32 {
        self.words[header::QUEUE]
    }

    /// Sets the slot that follows `slot` on the queue, or comes first.
    fn set_next(&mut self, slot: u32, next: u32) {
        if slot == NONE {
            self.words[header::QUEUE] = next;
        } else {
            self.set_slot_word(slot, NEXT, next);
        }
    }

    // From its first slot along the next ones the queue is whole after each of the stores below.

    fn unlink(&mut self, slot: u32) {
        let (previous, next) = (self.slot_word(slot, PREVIOUS), self.slot_word(slot, NEXT));
        self.set_next(previous, next);
        if next == NONE {
            self.tail = previous
        } else {
            self.set_slot_word(next, PREVIOUS, previous)
        }
        settle();
    }

    fn link_head(&mut self, slot: u32) {
        let first = self.first();
        self.set_slot_word(slot, PREVIOUS, NONE);
        self.set_slot_word(slot, NEXT, first);
        if first == NONE {
            self.tail = slot
        } else {
            self.set_slot_word(first, PREVIOUS, slot)
        }
        settle();
        self.words[header::QUEUE] = slot;
    }

    fn link_tail(&mut self, slot: u32) {
        self.set_slot_word(slot, NEXT, NONE);
        self.set_slot_word(slot, PREVIOUS, self.tail);
        settle();
        self.set_next(self.tail, slot);
        self.tail = slot;
    }

    pub(super) fn move_to_head(&mut self, slot: u32, hit: bool) {
        self.unlink(slot);
        self.link_head(slot);
        if hit {
            let meta = self.slot_word(slot, META);
            self.set_slot_word(slot, META, meta | HIT);
        }
    }

    pub(super) fn move_to_tail(&mut self, slot: u32) {
        self.unlink(slot);
        self.link_tail(slot);
        let meta = self.slot_word(slot, META);
        self.set_slot_word(slot, META, meta & !HIT);
    }

    /// Notes that the guest holds `content` again: a cached copy of it is the next to be discarded.
    pub(super) fn note_in_guest(&mut self, content: Fingerprint) {
        if content != self.zero
            && let Some(slot) = self.find_slot(content)
        {
            self.move_to_head(slot, true);
        }
    }

    /// Takes a free slot, else that of the first victim that no request is outstanding for. A cache that shrinks takes no
    /// more pages than it will have room for.
    pub(super) fn take_slot(&mut self) -> Option<u32> {
        if self.is_losing() {
            return None;
        }
        if self.free_slot == NONE || self.counts.used >= self.sizing.end {
            let victim = self.find_victim()?;
            self.discard_victim(victim);
            if self.free_slot == NONE {
                // Pins are ignored (ablation): the draining slot is taken as it is.
                self.counts.draining -= 1;
                return Some(victim);
            }
        }
        let slot = self.free_slot;
        self.take_free(slot);
        Some(slot)
    }

    fn find_victim(&self) -> Option<u32> {
        let mut slot = self.first();
        for _ in 0..VICTIM_TRIES {
            if slot == NONE {
                return None;
            }
            if !self.rules.hold(Rule::PinnedSlot) || self.slot_word(slot, META) & PINS == 0 {
                return Some(slot);
            }
            slot = self.slot_word(slot, NEXT);
        }
        None
    }

    /// Discards the content of `slot`. Unless the guest got the page back, nobody holds it any more, and its node goes
    /// with it.
    pub(super) fn discard_victim(&mut self, slot: u32) {
        let content = self.slot_content(slot);
        if self.slot_word(slot, META) & HIT == 0
            && let Some(node) = self.find_content(content)
        {
            self.remove_node(node);
        }
        self.release_slot(slot);
    }

    pub(super) fn fill_slot(&mut self, slot: u32, content: Fingerprint, place: Place) {
        for (i, word) in content.0.into_iter().enumerate() {
            self.set_slot_word(slot, CONTENT + i, word);
        }
        let pins = self.slot_word(slot, META) & PINS;
        settle();
        // This store makes it valid.
        self.set_slot_word(slot, META, USED | pins);
        self.counts.used += 1;
        let at = self.slot_head_at(content);
        let first = self.words[at];
        self.set_slot_word(slot, CHAIN, first);
        self.words[at] = slot;
        match place {
            Place::Tail => self.link_tail(slot),
            Place::Head => self.link_head(slot),
        }
    }

    /// Takes a used slot out of queue and chain; it is free, or draining while it is pinned.
    pub(super) fn release_slot(&mut self, slot: u32) {
        let pins = self.slot_word(slot, META) & PINS;
        self.set_slot_word(slot, META, pins);
        settle();
        let at = self.slot_head_at(self.slot_content(slot));
        let next = self.slot_word(slot, CHAIN);
        if self.words[at] == slot {
            self.words[at] = next;
        } else {
            let mut before = self.words[at];
            while self.slot_word(before, CHAIN) != slot {
                before = self.slot_word(before, CHAIN);
            }
            self.set_slot_word(before, CHAIN, next);
        }
        self.unlink(slot);
        self.counts.used -= 1;
        if pins != 0 {
            self.counts.draining += 1;
        } else {
            self.free(slot);
        }
    }

    /// Marks a request for `slot` as outstanding. False if too many are (the caller goes to the disk).
    pub fn pin(&mut self, slot: SlotIndex) -> bool {
        let meta = self.slot_word(slot.0, META);
        if meta & PINS == PINS {
            return false;
        }
        self.set_slot_word(slot.0, META, meta + 1);
        self.pins += 1;
        true
    }

    /// Unpins `slot`: a request for it is no longer outstanding.
    pub fn unpin(&mut self, slot: SlotIndex) {
        let meta = self.slot_word(slot.0, META);
        debug_assert!(meta & PINS != 0, "a slot is unpinned more often than pinned");
        self.set_slot_word(slot.0, META, meta - 1);
        self.pins -= 1;
        if meta & USED == 0 && meta & PINS == 1 && slot.0 < self.capacity {
            self.counts.draining -= 1;
            self.free(slot.0);
        }
    }

    /// Returns the number of slots with an outstanding request, those beyond the capacity included. Looks at every
    /// slot.
    pub fn pinned_slots(&self) -> PageCount {
        let pinned = |slot: &u32| self.slot_word(*slot, META) & PINS != 0;
        PageCount(u32::try_from((0..self.layout.slots).filter(pinned).count()).unwrap_or(u32::MAX))
    }

    /// Re-labels the page of `from` as the page of the free slot `to`, at the same place of the queue.
    pub(super) fn move_page(&mut self, from: u32, to: u32) {
        let content = self.slot_content(from);
        let (previous, hit) = (self.slot_word(from, PREVIOUS), self.slot_word(from, META) & HIT);
        self.release_slot(from);
        self.fill_slot(to, content, Place::Head);
        let meta = self.slot_word(to, META);
        self.set_slot_word(to, META, meta | hit);
        if previous != NONE {
            self.unlink(to);
            let next = self.slot_word(previous, NEXT);
            self.set_slot_word(to, PREVIOUS, previous);
            self.set_slot_word(to, NEXT, next);
            settle();
            self.set_slot_word(previous, NEXT, to);
            if next == NONE { self.tail = to } else { self.set_slot_word(next, PREVIOUS, to) }
        }
    }

    /// Makes queue, chains and free list of what a former process left. No request of its is outstanding here.
    pub(super) fn rebuild_slots(&mut self) {
        let (heads, end) = (self.layout.slot_heads_at(), self.layout.nodes_at());
        self.words[heads..end].fill(NONE);
        let capacity = self.words[header::CAPACITY].min(self.layout.slots);
        for slot in 0..self.layout.slots {
            if slot % BATCH == 0 {
                self.touch_slot_chains(slot);
            }
            let meta = self.slot_word(slot, META);
            let stays = meta & USED != 0 && slot < capacity && self.chain_slot(slot);
            self.set_slot_word(slot, META, if stays { meta & (USED | HIT) } else { 0 });
            self.counts.used += u32::from(stays);
        }
        self.rebuild_queue();
        self.store_capacity(capacity);
        self.sizing.end = capacity;
        self.rebuild_free_list();
    }

    /// Has the processor load what the slots from `from` on are about to be compared with: all at a time, not one by one.
    fn touch_slot_chains(&self, from: u32) {
        let batch = from..from.saturating_add(BATCH).min(self.layout.slots);
        let mut firsts = [NONE; BATCH as usize];
        for (first, slot) in firsts.iter_mut().zip(batch) {
            *first = self.words[self.slot_head_at(self.slot_content(slot))];
        }
        let contents = firsts.iter().filter(|first| **first < self.layout.slots);
        black_box(contents.fold(0, |sum, first| sum ^ self.slot_word(*first, CONTENT)));
    }

    fn chain_slot(&mut self, slot: u32) -> bool {
        let content = self.slot_content(slot);
        let at = self.slot_head_at(content);
        let same = |other| self.slot_content(other) == content;
        let chain = look_along(self.words[at], |other| self.slot_word(other, CHAIN), same);
        if content == self.zero || chain != Chain::Room {
            return false;
        }
        self.set_slot_word(slot, CHAIN, self.words[at]);
        self.words[at] = slot;
        true
    }

    /// Rebuilds the queue of used slots in the order that their words give, as far as they do; the others come before
    /// them.
    fn rebuild_queue(&mut self) {
        let (mut slot, mut last) = (self.first(), NONE);
        while slot < self.layout.slots {
            let meta = self.slot_word(slot, META);
            if meta & SEEN != 0 {
                break;
            }
            self.set_slot_word(slot, META, meta | SEEN);
            if meta & USED != 0 {
                self.set_slot_word(slot, PREVIOUS, last);
                self.set_next(last, slot);
                last = slot;
            }
            slot = self.slot_word(slot, NEXT);
        }
        self.set_next(last, NONE);
        self.tail = last;
        for slot in 0..self.layout.slots {
            let meta = self.slot_word(slot, META);
            if meta & (USED | SEEN) == USED {
                self.link_head(slot);
            }
            self.set_slot_word(slot, META, meta & !SEEN);
        }
    }

    /// Returns the cached contents with their slots, from the next to be discarded to the newest.
    pub fn queue(&self) -> impl Iterator<Item = (SlotIndex, Fingerprint)> + '_ {
        let mut slot = self.first();
        std::iter::from_fn(move || {
            if slot == NONE {
                return None;
            }
            let this = slot;
            slot = self.slot_word(slot, NEXT);
            Some((SlotIndex(this), self.slot_content(this)))
        })
        .filter(|(slot, _)| slot.0 < self.sizing.kept)
    }

    /// Fills the slots with what `old` has in them; those above this index's layout are given up.
    pub(super) fn fill_slots(&mut self, old: &Self) {
        self.sizing = old.sizing.within(self.layout.slots);
        self.store_capacity(old.capacity.min(self.layout.slots));
        // Slots that a shrink cut off may also be pinned.
        for slot in 0..self.layout.slots.min(old.layout.slots) {
            self.set_slot_word(slot, META, old.slot_word(slot, META) & PINS);
        }
        for (slot, content) in old.queue() {
            if slot.0 < self.capacity {
                self.fill_slot(slot.0, content, Place::Tail);
                let meta = self.slot_word(slot.0, META) | (old.slot_word(slot.0, META) & HIT);
                self.set_slot_word(slot.0, META, meta);
            }
        }
        self.rebuild_free_list();
    }
}
