//! Admission of evicted pages: which slot gets a page, and what becomes of the page that was there.
//!
//! Pools are in one tier or in two. A page enters the *local tier* if there is one. A page that falls out of it unread is
//! *demoted*: it moves to another pool, of which it becomes the newest page. So all pools together are one queue, and a page
//! travels at most once for each time that it leaves the local tier. A page that the guest has received again is discarded:
//! the guest has it, and its next eviction brings it back.
//!
//! A demoted page is logged as sent to its new pool before its new slot is valid, like any other page.

use super::entries::Vacancy;
use super::{CacheIndex, Found, Words};
use crate::fingerprint::Fingerprint;
use crate::index::Place;
use crate::units::{BlockId, PoolIndex, PoolSet, SlotIndex};

/// Pools that may take a page now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tiers {
    /// Pools of the local tier, which come first.
    pub local: PoolSet,
    /// All others.
    pub remote: PoolSet,
}

impl Tiers {
    /// Returns whether no pool may take a page.
    #[must_use]
    pub fn are_empty(&self) -> bool {
        self.local.is_empty() && self.remote.is_empty()
    }

    /// Returns the pools of both tiers.
    pub fn pools(&self) -> impl Iterator<Item = PoolIndex> {
        self.local.iter().chain(self.remote.iter())
    }
}

impl From<PoolSet> for Tiers {
    fn from(remote: PoolSet) -> Self {
        Self { local: PoolSet::default(), remote }
    }
}

/// Outcome for an evicted page that was offered to the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offer {
    /// The content is known and not cached yet: store it in this slot.
    Admitted(SlotIndex),
    /// The content is known and not cached yet. Copy the page that is in `slot` to the slot `to`, then store it in `slot`.
    Demoting { slot: SlotIndex, to: SlotIndex },
    /// The content is already cached. Its slot is now the newest of the queue.
    Duplicate,
    /// No known block has this content.
    Unmatched,
    /// The content is known, but there is no slot for it: every slot near the head is pinned, or the server has just taken
    /// slots away.
    NoSlot,
}

/// Slot that can be had in a pool.
#[derive(Clone, Copy, Debug)]
struct Room {
    pool: PoolIndex,
    /// Slot whose page must go first; `None` if a slot is free.
    victim: Option<u32>,
}

/// What an entry leaves to the slot that gets its block.
enum Left {
    /// The words of its node in both hash tables. Nothing may be inserted until the slot has taken them.
    Words(Vacancy),
    /// A block that is in no hash table any more.
    Block(BlockId),
}

impl<M: Words> CacheIndex<M> {
    /// Decides whether to cache an evicted page with this `content` in a pool of `tiers`. If the page is admitted, it is
    /// entered in the log of sends, and the caller must send it, and the demoted one before it.
    pub fn offer(&mut self, content: Fingerprint, place: Place, tiers: impl Into<Tiers>) -> Offer {
        self.find(content).map_or(Offer::Unmatched, |found| self.offer_found(found, place, tiers.into()))
    }

    /// Decides as [`Self::offer`] about a page whose content was looked for already.
    pub fn offer_found(&mut self, found: Found, place: Place, tiers: Tiers) -> Offer {
        self.check(found);
        let offer = self.find_offer(found, place, tiers);
        self.follow_changes();
        offer
    }

    fn find_offer(&mut self, found: Found, place: Place, tiers: Tiers) -> Offer {
        let entry = found.entry;
        if self.entries.has_page(&self.words, entry) {
            if self.may_rise(entry, tiers)
                && let Some(room) = self.find_room(tiers.local)
            {
                return self.admit(found, room, tiers).unwrap_or(Offer::NoSlot);
            }
            self.slots.move_to_tail(&mut self.words, entry);
            return Offer::Duplicate;
        }
        if self.is_doomed(entry) {
            self.forget_entry(entry);
            return Offer::Unmatched;
        }
        let room = match place {
            Place::Tail => self.find_room(tiers.local).or_else(|| self.find_room(tiers.remote)),
            // A page that the guest holds takes the place of one in the local tier only if there is no other tier.
            Place::Head => self
                .find_free(tiers.local)
                .or_else(|| self.find_room(tiers.remote))
                .or_else(|| self.find_room(tiers.local)),
        };
        let Some(offer) = room.and_then(|room| self.admit(found, room, tiers)) else {
            return Offer::NoSlot;
        };
        if let (Place::Head, Offer::Admitted(slot) | Offer::Demoting { slot, .. }) = (place, offer) {
            // The guest still holds a page that is admitted as it is read.
            self.slots.move_to_head(&mut self.words, slot.0, true);
        }
        offer
    }

    /// Returns whether the page of a slot, which is evicted again, belongs in the local tier: the guest has had it since it was
    /// admitted to another pool.
    fn may_rise(&self, slot: u32, tiers: Tiers) -> bool {
        let is_elsewhere = self.slots.place(&self.words, slot).is_some_and(|(pool, _)| !tiers.local.contains(pool));
        is_elsewhere
            && !tiers.local.is_empty()
            && self.slots.was_hit(&self.words, slot)
            && self.slots.may_move(&self.words, slot)
            && !self.is_doomed(slot)
    }

    /// Returns the slot to be taken next in one of `pools`, or `None` if no pool has one: the first pages to be discarded are
    /// pinned, or the pools are releasing lost pages.
    fn find_room(&mut self, pools: PoolSet) -> Option<Room> {
        let pool = self.slots.choose(pools)?;
        let victim =
            if self.slots.needs_victim(pool) { Some(self.slots.find_victim(&self.words, pool)?) } else { None };
        Some(Room { pool, victim })
    }

    /// Returns a free slot in one of `pools`, or `None` if there is none.
    fn find_free(&mut self, pools: PoolSet) -> Option<Room> {
        let free = pools.iter().filter(|pool| !self.slots.needs_victim(*pool)).collect();
        self.find_room(free)
    }

    /// Removes the block of an entry that was found, and the page that it may have.
    fn take_out(&mut self, Found { entry, at, .. }: Found) -> Left {
        if self.nodes.has(entry) {
            let vacancy = self.nodes.make_way(&mut self.words, entry, at);
            self.follow_removed(entry, vacancy.key.block());
            return Left::Words(vacancy);
        }
        let block = self.remove_block(entry);
        if self.entries.has_page(&self.words, entry) {
            self.discard(entry);
        }
        Left::Block(block)
    }

    /// Takes the slot of `room`, whose page is discarded if it has one. It must be filled, or put back.
    fn take(&mut self, Room { pool, victim }: Room) -> u32 {
        let Some(victim) = victim else { return self.slots.take(&mut self.words, pool) };
        let emptied = self.empty(victim, self.slots.was_hit(&self.words, victim));
        debug_assert_eq!(emptied, Some(pool), "the slot {victim} is on the queue of its pool");
        victim
    }

    /// Moves the found block into the slot of `room`. Its page is to be sent. A page that its entry has is dropped. Returns
    /// `None` if a hash table is full. A shrinking pool takes no more pages than it will have room for.
    fn admit(&mut self, found: Found, room: Room, tiers: Tiers) -> Option<Offer> {
        let (Room { pool, victim }, content) = (room, found.content);
        // Before the victim's block needs a node, which might be this one.
        let left = self.take_out(found);
        let is_local = tiers.local.contains(pool);
        // A page that is demoted counts as sent, so the one that takes its place must be admitted.
        let has_room =
            |victim: &u32| self.entries.has_room_for(&self.words, content) && self.target_has_room(*victim, content);
        let demotable = victim.filter(|_| is_local).filter(has_room);
        let demoted = demotable.and_then(|victim| self.demote(victim, tiers.remote));
        // A demoted page has left its slot, which is now the first free one.
        let slot = self.take(Room { pool, victim: victim.filter(|_| demoted.is_none()) });
        assert!(demoted.is_none() || victim == Some(slot), "the page of {victim:?} is demoted, and {slot} is taken");
        let key = match left {
            _ if !self.target_has_room(slot, content) => None,
            Left::Words(vacancy) => Some(self.slots.reserve_vacant(&mut self.words, slot, content, vacancy)),
            Left::Block(block) => self.slots.reserve(&mut self.words, slot, content, block),
        };
        let Some(key) = key else {
            self.slots.put_back(&mut self.words, pool, slot);
            return None;
        };
        self.log.note_send(&mut self.words, pool, slot);
        self.slots.fill(&mut self.words, pool, slot, key);
        self.follow_slot(slot);
        if victim.is_some() {
            self.prefetch_victims(pool);
        }
        let slot = SlotIndex(slot);
        Some(demoted.map_or(Offer::Admitted(slot), |to| Offer::Demoting { slot, to: SlotIndex(to) }))
    }

    /// Moves page and block of the slot `from` to a slot of one of `pools`, if the guest has not received the page again.
    /// Returns that slot, to which the caller must copy the page. Returns `None` if the page is to be discarded.
    fn demote(&mut self, from: u32, pools: PoolSet) -> Option<u32> {
        let is_wanted = self.slots.may_move(&self.words, from) && !self.slots.was_hit(&self.words, from);
        if !is_wanted || self.is_doomed(from) {
            return None;
        }
        let room = self.find_room(pools)?;
        let Room { pool, victim } = room;
        let to = self.take(room);
        self.log.note_send(&mut self.words, pool, to);
        self.slots.demote(&mut self.words, from, pool, to);
        self.follow_slot(from);
        self.follow_slot(to);
        if victim.is_some() {
            self.prefetch_victims(pool);
        }
        Some(to)
    }
}
