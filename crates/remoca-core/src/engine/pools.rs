//! All pools of the cache: which of them has which share, and the REQUESTs to all of them.
//!
//! 1. The shares of the pools add up to what is wanted, or to all that the servers give (`sharing.rs`).
//! 2. An event of one server changes only its pool, except for the shares.
//! 3. A lost pool is *expected* and keeps its share until its server is known not to have it, or for [`EXPECT_NS`]. After
//!    that it is kept as long as no other pool can take the share.

use super::fetches::{Fetch, Fetches};
use super::local::LocalTier;
use super::need::{LostPool, Need, Standing};
use super::pool::Pool;
use super::types::{Action, FetchId, PoolSlot, ServerNumber};
use crate::index::{CacheIndex, Words};
use crate::units::{Nanos, POOLS_MAX, PageCount, PoolIndex, PoolSet, SlotIndex};
use std::collections::VecDeque;

/// Time, in nanoseconds, for which the share of a lost pool is kept for its return.
const EXPECT_NS: u64 = 5_000_000_000;

/// Limits on what is in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Maximum number of pools.
    pub(super) pools: u8,
    /// Maximum number of pages that wait for each connection.
    pub(super) send_window: u32,
    /// Maximum number of outstanding REQUESTs to each pool.
    pub(super) fetches: u32,
    /// Maximum number of slots processed in one turn.
    pub(super) slots_per_turn: u32,
}

/// Progress of the search for slow pools.
#[derive(Debug, Default)]
pub(super) struct Slowness {
    pub(super) checked_at: Option<Nanos>,
    pub(super) drained_at: Option<Nanos>,
}

/// Pools of the cache.
#[derive(Debug)]
pub(super) struct Pools {
    /// Pools by number.
    pub(super) pools: Vec<Pool>,
    /// Number of pools that have ever begun. Those from here on have nothing to do, and most caches have one or two pools: what is
    /// done in every turn looks at these alone.
    begun: usize,
    /// The local tier, which is none of the pools that have a share.
    pub(super) local: LocalTier,
    /// Size that the operator wants of all other pools.
    wanted: PageCount,
    limits: Limits,
    fetches: Fetches,
    pub(super) slowness: Slowness,
}

impl Pools {
    /// Returns pools without sessions. The first `begun` of them are in the index.
    pub(super) fn new(wanted: PageCount, local: PageCount, limits: Limits, begun: usize) -> Self {
        let limits = Limits { pools: limits.pools.clamp(1, POOLS_MAX), ..limits };
        let pools = PoolIndex::all().map(|number| Pool::new(number, limits.send_window)).collect();
        let local = LocalTier::new(local);
        Self { pools, begun, local, wanted, limits, fetches: Fetches::default(), slowness: Slowness::default() }
    }

    /// Returns a pool, with or without a session.
    pub(super) fn pool(&self, number: PoolIndex) -> &Pool {
        &self.pools[usize::from(number.0 % POOLS_MAX)]
    }

    pub(super) fn pool_mut(&mut self, number: PoolIndex) -> &mut Pool {
        let number = usize::from(number.0 % POOLS_MAX);
        self.begun = self.begun.max(number + 1);
        &mut self.pools[number]
    }

    /// Returns the pools that have ever begun.
    #[inline]
    pub(super) fn begun(&self) -> &[Pool] {
        &self.pools[..self.begun]
    }

    /// Returns the pools with a session.
    pub(super) fn up(&self) -> impl Iterator<Item = &Pool> {
        self.begun().iter().filter(|pool| pool.is_up())
    }

    /// Returns the pool of the session with `server`, or `None` if there is no session with it.
    #[inline]
    pub(super) fn at(&self, server: ServerNumber) -> Option<PoolIndex> {
        self.begun().iter().find(|pool| pool.server() == Some(server)).map(Pool::number)
    }

    /// Returns whether there is a session with any server.
    pub(super) fn is_up(&self) -> bool {
        self.up().next().is_some()
    }

    /// Returns whether the operator wants a cache.
    pub(super) fn is_enabled(&self) -> bool {
        self.wanted.0 > 0 || self.local.wanted().0 > 0
    }

    /// Returns the size that the operator wants of the pools that have a share.
    pub(super) fn wanted(&self) -> PageCount {
        self.wanted
    }

    /// Sets the size that the operator wants of the pools that have a share. They get it from [`Self::share`].
    pub(super) fn want(&mut self, wanted: PageCount) {
        self.shrink_drained(wanted);
        self.wanted = wanted;
    }

    /// Returns the size that the servers of these pools have granted.
    pub(super) fn granted(&self, is_local: bool) -> PageCount {
        self.sum(is_local, |pool| pool.size.granted())
    }

    /// Returns the largest size that these servers may have granted.
    pub(super) fn granted_at_most(&self, is_local: bool) -> PageCount {
        self.sum(is_local, |pool| pool.size.granted_at_most())
    }

    fn sum(&self, is_local: bool, size: impl Fn(&Pool) -> PageCount) -> PageCount {
        let of_tier = self.up().filter(|pool| pool.is_local() == is_local);
        let sum: u64 = of_tier.map(|pool| u64::from(size(pool).0)).sum();
        PageCount(u32::try_from(sum).unwrap_or(u32::MAX))
    }

    /// Returns the maximum number of slots to process in one turn.
    pub(super) fn slots_per_turn(&self) -> u32 {
        self.limits.slots_per_turn
    }

    // Pages and REQUESTs.

    /// Returns the pools that take one more page now.
    pub(super) fn taking(&self) -> PoolSet {
        self.begun().iter().filter(|pool| pool.takes_page()).map(Pool::number).collect()
    }

    /// Takes room in the send window of the pool of `slot` for a page that is about to be sent. Returns its place.
    ///
    /// # Panics
    /// If the pool of the slot has no session.
    pub(super) fn note_send<M: Words>(&mut self, slot: SlotIndex, index: &CacheIndex<M>) -> PoolSlot {
        let place = self.place_of(slot, index).expect("pages are admitted to pools with a session");
        self.pool_mut(place.0).note_send();
        place.1
    }

    /// Returns the pool of a slot and its place at the server, or `None` if its pool has no session.
    #[inline]
    pub(super) fn place_of<M: Words>(&self, slot: SlotIndex, index: &CacheIndex<M>) -> Option<(PoolIndex, PoolSlot)> {
        let (number, slot) = index.place_of(slot)?;
        Some((number, PoolSlot { server: self.pool(number).server()?, slot }))
    }

    /// Returns whether a pool may be asked for `count` more pages.
    #[inline]
    pub(super) fn can_fetch(&self, number: PoolIndex, count: u32) -> bool {
        let pool = self.pool(number);
        pool.is_up() && pool.owed().saturating_add(count) <= self.limits.fetches
    }

    /// Adds a REQUEST and returns its ID.
    #[inline]
    pub(super) fn begin_fetch(&mut self, fetch: Fetch) -> FetchId {
        self.pool_mut(fetch.pool).note_fetch();
        self.fetches.begin(fetch)
    }

    /// Removes a REQUEST whose page is there, unpins its slot and returns the REQUEST. Returns `None` if `server` owes no
    /// such page. With `by_server` it replied, and so is not silent.
    pub(super) fn end_fetch<M: Words>(
        &mut self,
        now: Nanos,
        server: ServerNumber,
        id: FetchId,
        by_server: bool,
        index: &mut CacheIndex<M>,
    ) -> Option<Fetch> {
        let number = self.at(server)?;
        let fetch = self.fetches.end(number, id)?;
        let pool = self.pool_mut(number);
        pool.end_fetches(1);
        if by_server {
            pool.note_answer(now);
        }
        index.unpin(fetch.slot);
        Some(fetch)
    }

    /// Returns whether servers owe pages.
    pub(super) fn is_owed_pages(&self) -> bool {
        !self.fetches.is_empty()
    }

    /// Removes all outstanding REQUESTs to a pool and unpins their slots. No replies to them may follow.
    pub(super) fn take_fetches<M: Words>(&mut self, number: PoolIndex, index: &mut CacheIndex<M>) {
        let fetches = self.fetches.drain(number);
        fetches.iter().for_each(|fetch| index.unpin(fetch.slot));
        self.pool_mut(number).end_fetches(u32::try_from(fetches.len()).unwrap_or(u32::MAX));
    }

    /// Starts the clocks on the silence of all servers that owe pages, because one of these is late. The answers of the
    /// others restart theirs.
    pub(super) fn note_silence(&mut self, now: Nanos) {
        self.pools.iter_mut().for_each(|pool| pool.note_silence(now));
    }

    // Lost pools, and what placement needs to know.

    /// Returns the pools that the index describes and that have no session, with their servers. The local tier is none of
    /// them.
    fn lost<'a, M: Words>(&'a self, index: &'a CacheIndex<M>) -> impl Iterator<Item = (&'a Pool, LostPool)> {
        index.pools().filter_map(|(number, known)| {
            let pool = self.pool(number);
            let lost = LostPool { server: ServerNumber(known.server), generation: known.generation };
            (!pool.is_up() && !self.local.is_at(lost.server)).then_some((pool, lost))
        })
    }

    /// Expects the lost pools, while there is no session or for some time, if their servers are of use. Drops the others,
    /// and those of servers that are leaving and have not returned by then.
    pub(super) fn expect<M: Words>(
        &mut self,
        now: Nanos,
        standing: impl Fn(ServerNumber) -> Standing,
        index: &mut CacheIndex<M>,
    ) {
        let is_alone = !self.has_members();
        let lost: Vec<_> = self.lost(index).map(|(pool, lost)| (pool.number(), standing(lost.server))).collect();
        for (number, standing) in lost {
            let since = &mut self.pool_mut(number).expected_since;
            *since = if is_alone { Some(now) } else { since.filter(|since| now < since.plus_ns(EXPECT_NS)) };
            let is_expected = since.is_some();
            if standing == Standing::Gone || standing == Standing::Leaving && !is_expected {
                self.forget(number, index);
            }
        }
    }

    /// Returns when the next lost pool is no longer expected.
    fn expect_deadline(&self) -> Option<Nanos> {
        let since = self.begun().iter().filter_map(|pool| pool.expected_since).min();
        since.filter(|_| self.has_members()).map(|since| since.plus_ns(EXPECT_NS))
    }

    /// Returns whether any pool with a session has a share of the cache.
    pub(super) fn has_members(&self) -> bool {
        self.begun().iter().any(Pool::is_member)
    }

    /// Returns the numbers of the lost pools that are no longer expected, with their servers.
    pub(super) fn given_up<M: Words>(&self, index: &CacheIndex<M>) -> Vec<(PoolIndex, ServerNumber)> {
        let lost = self.lost(index).filter(|(pool, _)| pool.expected_since.is_none());
        lost.map(|(pool, lost)| (pool.number(), lost.server)).collect()
    }

    /// Expects the lost pools at `servers` no longer.
    pub(super) fn give_up_at<M: Words>(&mut self, servers: &[ServerNumber], index: &CacheIndex<M>) {
        let lost = self.lost(index).filter(|(_, lost)| servers.contains(&lost.server));
        let lost: Vec<_> = lost.map(|(pool, _)| pool.number()).collect();
        lost.into_iter().for_each(|number| self.pool_mut(number).expected_since = None);
    }

    /// Drops a lost pool. Its slots are given up in later turns.
    pub(super) fn forget<M: Words>(&mut self, number: PoolIndex, index: &mut CacheIndex<M>) {
        self.pool_mut(number).expected_since = None;
        index.drop_pool(number);
    }

    /// Drops the lost pool at `server`, if there is one.
    pub(super) fn forget_at<M: Words>(&mut self, server: ServerNumber, index: &mut CacheIndex<M>) {
        if let Some(number) = index.pool_of(server.0).filter(|number| !self.pool(*number).is_up()) {
            self.forget(number, index);
        }
    }

    /// Drops the lost pools whose place another pool takes: all of them if there is no other session, otherwise those that
    /// are no longer expected. Keeps the one at `server`.
    pub(super) fn replace_lost<M: Words>(&mut self, server: ServerNumber, index: &mut CacheIndex<M>) {
        if !self.has_members() {
            self.pools.iter_mut().for_each(|pool| pool.expected_since = None);
        }
        for (number, at) in self.given_up(index) {
            if at != server {
                self.forget(number, index);
            }
        }
    }

    /// Returns the number of slots of the lost pools that are expected back.
    pub(super) fn expected_slots<M: Words>(&self, index: &CacheIndex<M>) -> u64 {
        let expected = self.begun().iter().filter(|pool| pool.expected_since.is_some());
        expected.map(|pool| u64::from(index.kept_capacity(pool.number()).0)).sum()
    }

    /// Returns the state of the pools that placement needs.
    pub(super) fn need<M: Words>(&self, index: &CacheIndex<M>) -> Need {
        let members = || self.begun().iter().filter(|pool| pool.is_member());
        let mut lost = [None; POOLS_MAX as usize];
        lost.iter_mut().zip(self.lost(index)).for_each(|(entry, (_, it))| *entry = Some(it));
        let seats = members().count();
        // Without any other session, a lost pool keeps no server from being chosen.
        let counts = |pool: &&Pool| seats > 0 && pool.expected_since.is_some();
        let expected = self.begun().iter().filter(counts).count();
        let reserved = if seats > 0 { self.expected_slots(index) } else { 0 };
        let limits: u64 = members().map(|pool| u64::from(pool.size.limit().0)).sum();
        // The local tier always finds room.
        let is_reserved = self.local.server().is_some() && !self.begun().iter().any(Pool::is_local);
        let taken = self.up().count() + expected + usize::from(is_reserved);
        Need {
            wanted: self.wanted,
            covered: limits.saturating_add(reserved),
            granted: self.granted(false),
            seats,
            expected,
            settled: self.is_settled(),
            can_add: taken < usize::from(self.limits.pools) && index.free_pool().is_some(),
            lost,
        }
    }

    /// Returns whether any pool, of the local tier as well, is changing its size, or still has to give back chunks of slots.
    pub(super) fn are_changing<M: Words>(&self, index: &CacheIndex<M>) -> bool {
        index.is_settling() || self.begun().iter().any(|pool| !pool.size.is_settled())
    }

    /// Returns whether no SETSIZE is outstanding or planned to a server that has no local tier.
    pub(super) fn is_settled(&self) -> bool {
        self.begun().iter().all(|pool| pool.is_local() || pool.size.is_settled())
    }

    /// Returns the number of slots that each pool may process, if several change their sizes in the same turn.
    pub(super) fn slots_each(&self) -> u32 {
        self.slots_among(self.up_count())
    }

    /// Returns the number of slots that each of so many pools may process in a turn.
    fn slots_among(&self, pools: u32) -> u32 {
        (self.limits.slots_per_turn / pools.max(1)).max(1)
    }

    /// Returns the number of pools with a session.
    pub(super) fn up_count(&self) -> u32 {
        u32::try_from(self.up().count()).unwrap_or(u32::MAX)
    }

    // The timer.

    /// Returns the time at which the timer must be handled, or `None` if there is nothing to do.
    pub(super) fn deadline<M: Words>(&self, index: &CacheIndex<M>) -> Option<Nanos> {
        debug_assert!(self.pools[self.begun..].iter().all(|pool| pool.deadline(index).is_none()), "it has not begun");
        let pools = self.begun().iter().filter_map(|pool| pool.deadline(index)).min();
        let shares = [self.lift_deadline(index), self.expect_deadline()];
        let drains = [self.drain_deadline(), self.slowness_deadline(), self.local_deadline()];
        shares.into_iter().chain(drains).chain([pools]).flatten().min()
    }

    /// Continues changes of size, and requests sizes again if that is due. Returns the pools whose server is overdue.
    pub(super) fn handle_timer<M: Words>(
        &mut self,
        now: Nanos,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) -> PoolSet {
        // Lost pools that are given up change their sizes as well.
        let resizing = self.begun().iter().filter(|pool| index.is_pool_resizing(pool.number())).count();
        let slots = self.slots_among(self.up_count().max(u32::try_from(resizing).unwrap_or(u32::MAX)));
        let overdue = |pool: &mut Pool| pool.handle_timer(now, slots, index, actions).then(|| pool.number());
        self.pools.iter_mut().filter_map(overdue).collect()
    }
}
