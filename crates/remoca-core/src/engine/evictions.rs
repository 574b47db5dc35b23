//! Evicted pages: which of them go to the cache.

use super::policy::{CLASSES, Insertion};
use super::{Admission, Admitted, DiskEngine, Evicted};
use crate::fingerprint::Fingerprint;
use crate::index::{Offer, Place, SlotCounts, Tiers, Words};
use crate::rules::Rule;
use crate::units::{BlockId, BlockNumber, ByteRange, DiskIndex, PAGE_SIZE, PoolIndex, PoolSet};

/// Number of evicted pages that are copied out of guest memory before the first of them is judged.
pub const EVICTED_BATCH: usize = 16;

/// Content of an evicted page that the engine has seen.
#[derive(Clone, Copy, Debug)]
pub struct EvictedContent(Fingerprint);

impl<M: Words> DiskEngine<M> {
    /// Judges an evicted `page` (4 KiB, copied out of guest memory), and counts the outcome. If this returns
    /// [`Evicted::Admit`], the caller must send the page.
    pub fn handle_evicted(&mut self, page: &[u8]) -> Evicted {
        self.handle_evicted_content(EvictedContent(self.prints.page(page)))
    }

    /// Returns the contents of at most [`EVICTED_BATCH`] evicted pages that were copied out of guest memory, in their order. Loads
    /// what judging them will read, so that they wait for memory together.
    pub fn look_at_evicted(&self, pages: &[[u8; PAGE_SIZE]]) -> [Option<EvictedContent>; EVICTED_BATCH] {
        debug_assert!(pages.len() <= EVICTED_BATCH);
        let mut contents = [self.prints.zero(); EVICTED_BATCH];
        for (content, page) in contents.iter_mut().zip(pages) {
            *content = self.prints.page(page);
        }
        self.index.prefetch_contents(&contents[..pages.len().min(EVICTED_BATCH)]);
        std::array::from_fn(|at| (at < pages.len()).then_some(EvictedContent(contents[at])))
    }

    /// Judges an evicted page of this content, as [`Self::handle_evicted`] does. If this returns [`Evicted::Admit`], the caller must
    /// send the page that the content is of.
    pub fn handle_evicted_content(&mut self, content: EvictedContent) -> Evicted {
        self.admit.note_eviction(self.advice().max(self.agent_classes).max(1));
        self.follow_classes();
        let evicted = self.judge(content.0);
        self.admit.count_evicted(evicted, self.agent_classes, &mut self.stats);
        evicted
    }

    /// Returns the advice to the agent: 0 to send every page, or N to send one page in N. N is at most 1024. While the cache is off
    /// it is what the curves need.
    pub fn advice(&self) -> u32 {
        if self.pools.is_enabled() { self.admit.advice() } else { self.ghost_advice() }
    }

    /// Returns the advice by classes to the agent: N to send only the pages of one class of N, always the same ones, or 0 for no such advice. It
    /// is given while what is evicted would be passed over, or is cached already and not asked for: the insertion policy and the curves then
    /// need a sample alone.
    pub fn class_advice(&self) -> u32 {
        let SlotCounts { free, used, .. } = self.index.slot_counts();
        // Free slots take every page. A few of them come and go.
        let few = used / if self.agent_classes > 1 { 16 } else { 64 };
        let is_in_vain = self.policy.is_quiet() && free <= few || self.streams.covers_all();
        let is_enough = self.pools.is_enabled() && self.policy.can_follow_a_class() && self.admit.advice() <= 1;
        if is_in_vain && is_enough { CLASSES } else { 0 }
    }

    /// Notes which advice by classes the agent says that it follows: the pages that it sends from now on are those of one class of `classes`. Any
    /// other number than [`Self::class_advice`] gives is none.
    pub fn handle_agent(&mut self, classes: u32) {
        let classes = if classes == CLASSES { CLASSES } else { 1 };
        if std::mem::replace(&mut self.agent_classes, classes) != classes {
            self.follow_change();
        }
        self.follow_classes();
    }

    /// Returns of how many classes of evicted pages one is seen: the agent's, or 1 while pages come from frames and reads.
    pub(super) fn classes_seen(&self) -> u32 {
        if self.admit.admission() == Admission::Evictions { self.agent_classes } else { 1 }
    }

    /// Notes that `blocks` of a read came from the disk or the cache, and so may be evicted some day. Not those of a swap area: the
    /// guest evicts them by writing.
    pub(super) fn note_brought_in(&mut self, disk: DiskIndex, range: ByteRange, blocks: u64) {
        let first = BlockId { disk, bno: BlockNumber(range.covered_blocks().start) };
        if !self.disks.is_swap(first) {
            self.admit.note_read(blocks, u64::from(self.guest_memory.0));
            self.follow_classes();
        }
    }

    /// Follows a change of the classes that are seen.
    fn follow_classes(&mut self) {
        self.policy.see_class_of(self.classes_seen());
    }

    /// Returns whether [`Self::wants_frame`] may want any frame at present.
    #[inline]
    pub fn examines_frames(&self) -> bool {
        self.pools.is_enabled() && self.admit.examines_frames()
    }

    /// Returns whether to call [`Self::handle_frame`] with the page of guest memory that a read is about to overwrite.
    pub fn wants_frame(&mut self) -> bool {
        self.pools.is_enabled() && !self.pools.taking().is_empty() && self.admit.wants_frame()
    }

    /// Judges the `page` (4 KiB, copied out of guest memory) that a frame held before a read overwrote it, and counts
    /// the outcome. If this returns [`Evicted::Admit`], the caller must send the page.
    pub fn handle_frame(&mut self, page: &[u8]) -> Evicted {
        let evicted = self.judge(self.prints.page(page));
        self.admit.count_frame(evicted, &mut self.stats);
        evicted
    }

    /// Decides whether to admit an evicted page of this content. It is admitted only if the disk is known to hold its content for
    /// some block.
    fn judge(&mut self, content: Fingerprint) -> Evicted {
        self.last_evicted = None;
        if !self.pools.is_enabled() {
            self.stats.evictions_unjudged += 1;
            self.note_ghost_eviction(content);
            return Evicted::Dropped;
        }
        if content == self.prints.zero() {
            return Evicted::Zero;
        }
        if !self.rules.hold(Rule::AdmissionCheck)
            && self.index.find(content).is_none_or(|found| self.index.block_of(found).is_none())
            && let Some(block) = self.index.any_resident()
        {
            self.index.learn(block, content);
        }
        // One look-up for all that follows: nothing here changes the index before the end.
        let found = self.index.find(content);
        let block = found.and_then(|found| self.index.block_of(found));
        self.note_evicted_block(block);
        self.policy.fit(self.index.total_capacity());
        if self.policy.samples(content) && self.may_be_inserted(block) {
            self.policy.note_eviction(content);
        }
        let tiers = self.tiers_that_admit();
        let Some(found) = found else { return Evicted::Unmatched };
        // One that is cached becomes the newest all the same.
        if tiers.are_empty() && !self.index.is_cached(found) {
            return if block.is_some() { Evicted::Dropped } else { Evicted::Unmatched };
        }
        if self.policy.in_force() == Insertion::Bimodal
            && self.are_full(tiers)
            && self.may_be_inserted(block)
            && !self.index.is_cached(found)
            && !self.policy.inserts()
        {
            self.index.pass_over(found);
            return Evicted::PassedOver;
        }
        let offer = self.index.offer_found(found, Place::Tail, tiers);
        self.admitted(offer).map_or_else(|outcome| outcome, Evicted::Admit)
    }

    /// Takes room in the send windows for the pages that an offer moves, and returns the places of both. Returns the outcome for
    /// the page if it was not admitted.
    pub(super) fn admitted(&mut self, offer: Offer) -> Result<Admitted, Evicted> {
        let (slot, to) = match offer {
            Offer::Admitted(slot) => (slot, None),
            Offer::Demoting { slot, to } => (slot, Some(to)),
            Offer::Duplicate => return Err(Evicted::Duplicate),
            Offer::Unmatched => return Err(Evicted::Unmatched),
            Offer::NoSlot => return Err(Evicted::Dropped),
        };
        self.stats.demotions += u64::from(to.is_some());
        let demoted_to = to.map(|to| self.pools.note_send(to, &self.index));
        Ok(Admitted { at: self.pools.note_send(slot, &self.index), demoted_to })
    }

    /// Returns whether a page that one of these pools admits takes the place of another one.
    pub(super) fn are_full(&self, tiers: Tiers) -> bool {
        tiers.pools().all(|pool| self.index.pool_slot_counts(pool).free == 0)
    }

    /// Returns whether the insertion policy is for an evicted page: one of a known block outside swap areas.
    fn may_be_inserted(&self, block: Option<BlockId>) -> bool {
        block.is_some_and(|block| !self.disks.is_swap(block))
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
        let mut tiers = Tiers::default();
        for pool in self.pools.taking().iter().filter(|pool| self.race.admits(*pool)) {
            let tier = if self.pools.pool(pool).is_local() { &mut tiers.local } else { &mut tiers.remote };
            tier.insert(pool);
        }
        tiers
    }

    /// Returns the pools that may admit one more page now without discarding another one.
    pub(super) fn tiers_with_room(&mut self) -> Tiers {
        let has_room = |pool: &PoolIndex| self.index.pool_slot_counts(*pool).free > 0;
        let room: PoolSet = PoolIndex::all().filter(has_room).collect();
        if room.is_empty() {
            return Tiers::default();
        }
        let of = |pools: PoolSet| pools.iter().filter(|pool| room.contains(*pool)).collect();
        let Tiers { local, remote } = self.tiers_that_admit();
        Tiers { local: of(local), remote: of(remote) }
    }
}
