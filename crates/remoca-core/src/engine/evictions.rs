//! Evicted pages: which of them go to the cache.

use super::policy::Insertion;
use super::{Admitted, DiskEngine, Evicted};
use crate::fingerprint::Fingerprint;
use crate::index::{Offer, Place, Tiers};
use crate::rules::Rule;
use crate::units::{BlockId, PoolIndex, PoolSet};
use std::ops::DerefMut;

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// Judges an evicted `page` (4 KiB, copied out of guest memory), and counts the outcome. If this returns
    /// [`Evicted::Admit`], the caller must send the page.
    pub fn handle_evicted(&mut self, page: &[u8]) -> Evicted {
        self.admit.note_eviction();
        let evicted = self.judge(page);
        self.admit.count_evicted(evicted, &mut self.stats);
        evicted
    }

    /// Returns the advice to the agent: 0 to send every page, or N to send one page in N. N is at most 1024. While the cache is off
    /// it is what the curves need.
    pub fn advice(&self) -> u32 {
        if self.pools.is_enabled() { self.admit.advice() } else { self.ghost_advice() }
    }

    /// Returns whether to call [`Self::handle_frame`] with the page of guest memory that a read is about to overwrite.
    pub fn wants_frame(&mut self) -> bool {
        self.pools.is_enabled() && !self.pools.taking().is_empty() && self.admit.wants_frame()
    }

    /// Judges the `page` (4 KiB, copied out of guest memory) that a frame held before a read overwrote it, and counts
    /// the outcome. If this returns [`Evicted::Admit`], the caller must send the page.
    pub fn handle_frame(&mut self, page: &[u8]) -> Evicted {
        let evicted = self.judge(page);
        self.admit.count_frame(evicted, &mut self.stats);
        evicted
    }

    /// Decides whether to admit an evicted page. It is admitted only if the disk is known to hold its content for some
    /// block.
    fn judge(&mut self, page: &[u8]) -> Evicted {
        self.last_evicted = None;
        if !self.pools.is_enabled() {
            self.note_ghost_eviction(page);
            return Evicted::Dropped;
        }
        let content = self.prints.page(page);
        if content == self.prints.zero() {
            return Evicted::Zero;
        }
        if !self.rules.hold(Rule::AdmissionCheck)
            && !self.index.is_known_content(content)
            && let Some(block) = self.index.any_resident()
        {
            self.index.learn(block, content);
        }
        self.note_evicted_content(content);
        self.policy.fit(self.index.total_capacity());
        if self.policy.samples(content) && self.may_be_inserted(content) {
            self.policy.note_eviction(content);
        }
        let tiers = self.tiers_that_admit();
        if tiers.are_empty() {
            return if self.index.cached(content).is_some() {
                Evicted::Duplicate
            } else if self.index.is_known_content(content) {
                Evicted::Dropped
            } else {
                Evicted::Unmatched
            };
        }
        if self.policy.in_force() == Insertion::Bimodal
            && self.are_full(tiers)
            && self.may_be_inserted(content)
            && self.index.cached(content).is_none()
            && !self.policy.inserts()
        {
            self.index.pass_over(content);
            return Evicted::PassedOver;
        }
        let offer = self.index.offer(content, Place::Tail, tiers);
        if let Some(admitted) = self.admitted(offer) {
            return Evicted::Admit(admitted);
        }
        match offer {
            Offer::Duplicate => Evicted::Duplicate,
            Offer::Unmatched => Evicted::Unmatched,
            Offer::NoSlot | Offer::Admitted(_) | Offer::Demoting { .. } => Evicted::Dropped,
        }
    }

    /// Takes room in the send windows for the pages that an offer moves. Returns the places of both, or `None` if no page was
    /// admitted.
    pub(super) fn admitted(&mut self, offer: Offer) -> Option<Admitted> {
        match offer {
            Offer::Admitted(slot) => Some(Admitted { at: self.pools.note_send(slot, &self.index), demoted_to: None }),
            Offer::Demoting { slot, to } => {
                self.stats.demotions += 1;
                let demoted_to = Some(self.pools.note_send(to, &self.index));
                Some(Admitted { at: self.pools.note_send(slot, &self.index), demoted_to })
            }
            Offer::Duplicate | Offer::Unmatched | Offer::NoSlot => None,
        }
    }

    /// Returns whether a page that one of these pools admits takes the place of another one.
    fn are_full(&self, tiers: Tiers) -> bool {
        tiers.pools().all(|pool| self.index.pool_slot_counts(pool).free == 0)
    }

    /// Returns whether the insertion policy is for an evicted page: one of a known block outside swap areas.
    fn may_be_inserted(&self, content: Fingerprint) -> bool {
        self.index.block_of(content).is_some_and(|block| !self.disks.is_swap(block))
    }

    /// Sets whether the insertion policy adapts to the reads, as it does by default. Otherwise it is LRU.
    pub fn adapt(&mut self, adapts: bool) {
        self.policy.adapt(adapts);
    }

    /// Notes for the insertion policy that the guest has read a block, from whatever source.
    pub(super) fn note_read_content(&mut self, block: BlockId, content: Fingerprint) {
        if self.policy.samples(content) && content != self.prints.zero() && !self.disks.is_swap(block) {
            let before = self.policy.in_force();
            self.policy.note_read(content, self.index.cached(content).is_some());
            if self.policy.in_force() != before {
                self.index.set_bimodal(self.policy.in_force() == Insertion::Bimodal);
            }
        }
    }

    /// Returns the pools that may admit one more page now: those with a session, room on the way to the server, and a breaker
    /// that permits it.
    pub(super) fn tiers_that_admit(&mut self) -> Tiers {
        let race = &mut self.race;
        let admits: PoolSet = self.pools.taking().iter().filter(|pool| race.admits(*pool)).collect();
        self.in_tiers(|pool| admits.contains(pool))
    }

    /// Returns the pools that may admit one more page now without discarding another one.
    pub(super) fn tiers_with_room(&mut self) -> Tiers {
        let has_room = |pool: &PoolIndex| self.index.pool_slot_counts(*pool).free > 0;
        let room: PoolSet = PoolIndex::all().filter(has_room).collect();
        if room.is_empty() {
            return Tiers::default();
        }
        let race = &mut self.race;
        let admits: PoolSet = self.pools.taking().iter().filter(|pool| race.admits(*pool)).collect();
        self.in_tiers(|pool| admits.contains(pool) && room.contains(pool))
    }

    fn in_tiers(&self, may_admit: impl Fn(PoolIndex) -> bool) -> Tiers {
        let of_tier = |is_local| {
            let pools = self.pools.up().filter(|pool| pool.is_local() == is_local);
            pools.map(super::Pool::number).filter(|pool| may_admit(*pool)).collect()
        };
        Tiers { local: of_tier(true), remote: of_tier(false) }
    }
}
