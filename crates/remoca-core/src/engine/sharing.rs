//! The shares of the pools of a cache: who is asked for which size.
//!
//! The shares change when the operator, a grant or a lost pool changes what there is to share, and only by that
//! (`shares.rs`). A new pool of a large cache takes an equal share from the others, so that the loss of one costs less.
//! Decision 0014.

use super::need::{SPREAD_MIN, SPREAD_POOLS};
use super::pool::Pool;
use super::pools::Pools;
use super::shares::{Share, room, share_out, sum};
use super::types::Action;
use crate::index::{CacheIndex, Words};
use crate::units::{Nanos, PageCount, PoolIndex};
use std::collections::VecDeque;

impl Pools {
    /// Gives a new pool, which has just begun its session, an equal share of a large cache on few servers, and reduces the
    /// shares of the others by as much as is missing for it. Any other new pool gets what is missing.
    pub(super) fn join(&mut self, number: PoolIndex) {
        let members: Vec<_> = self.members().filter(|other| *other != number).collect();
        if self.wanted() < SPREAD_MIN || members.len() >= SPREAD_POOLS {
            return;
        }
        let mut shares: Vec<_> = members.iter().map(|other| self.share_of(*other)).collect();
        let others = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let equal = PageCount(self.wanted().0 / (others + 1)).min(self.pool(number).size.limit());
        let left = PageCount(self.wanted().0 - equal.0);
        if sum(&shares) <= u64::from(left.0) {
            return;
        }
        share_out(left, &mut shares);
        for (other, share) in members.iter().zip(&shares) {
            self.pool_mut(*other).size.set_share(share.size);
        }
        self.pool_mut(number).size.set_share(equal);
    }

    fn members(&self) -> impl Iterator<Item = PoolIndex> {
        self.begun().iter().filter(|pool| pool.is_member()).map(Pool::number)
    }

    /// Gives the pools their shares of what is wanted, and asks the servers for them.
    pub(super) fn share<M: Words>(&mut self, now: Nanos, index: &mut CacheIndex<M>, actions: &mut VecDeque<Action>) {
        let count = self.up_count();
        self.pools.iter_mut().for_each(|pool| pool.size.note_pools(count));
        self.limit_kept();
        self.share_local(now, index, actions);
        let members: Vec<_> = self.members().collect();
        if members.is_empty() {
            // What is drained becomes smaller with the cache all the same. It makes no room for lost pools, which may not return.
            self.share_drained(self.wanted(), self.slots_each(), index, actions);
            return;
        }
        let mut shares: Vec<_> = members.iter().map(|number| self.share_of(*number)).collect();
        if room(&shares) > 0 || self.have_taken_over(index) {
            self.given_up(index).into_iter().for_each(|(number, _)| self.forget(number, index));
        }
        let wanted = self.wanted_of_members(index);
        if sum(&shares) > u64::from(wanted.0) {
            // What was not granted goes before what has pages.
            for (number, share) in members.iter().zip(&mut shares) {
                share.size = share.size.min(self.pool(*number).size.granted());
            }
        }
        share_out(wanted, &mut shares);
        if sum(&shares) < u64::from(wanted.0) && self.is_settled() {
            self.lift_limits(now, wanted, &members, &mut shares);
        }
        let slots = self.slots_each();
        for (number, share) in members.iter().zip(&shares) {
            let pool = self.pool_mut(*number);
            let server = pool.server();
            pool.size.set_share(share.size);
            pool.size.keep_up(server, slots, index, actions);
        }
        self.share_drained(self.wanted_without_lost(index), slots, index, actions);
    }

    /// Gives the local tier what is wanted of it, as far as its server is believed to give it.
    fn share_local<M: Words>(&mut self, now: Nanos, index: &mut CacheIndex<M>, actions: &mut VecDeque<Action>) {
        let (wanted, slots) = (self.local.wanted(), self.slots_each());
        let Some(pool) = self.pools.iter_mut().find(|pool| pool.is_local()) else { return };
        let server = pool.server();
        if wanted > pool.size.limit() && pool.size.is_settled() && pool.size.lift_at() <= now {
            pool.size.lift_limit(wanted);
        }
        pool.size.set_share(wanted.min(pool.size.limit()));
        pool.size.keep_up(server, slots, index, actions);
    }

    /// Returns the time at which the server of the local tier is asked or, if it gave too little, asked for more. Returns `None`
    /// if neither is to be done.
    pub(super) fn local_deadline(&self) -> Option<Nanos> {
        let pool = self.begun().iter().find(|pool| pool.is_local());
        let is_short = |pool: &&Pool| pool.size.share() < self.local.wanted() && pool.size.is_settled();
        pool.filter(is_short).map(|pool| pool.size.lift_at()).or(self.local.deadline())
    }

    /// Returns whether servers have granted pages in the place of those of lost pools.
    fn have_taken_over<M: Words>(&self, index: &CacheIndex<M>) -> bool {
        let lost: u64 = self.given_up(index).iter().map(|(number, _)| u64::from(index.capacity(*number).0)).sum();
        lost > 0 && self.granted_to_members() + lost > u64::from(self.wanted().0)
    }

    fn share_of(&self, number: PoolIndex) -> Share {
        let size = &self.pool(number).size;
        Share { size: size.share(), limit: size.limit() }
    }

    /// Returns what is wanted of the pools with a session: lost ones that are expected keep their size, and drained ones
    /// what is not read yet.
    fn wanted_of_members<M: Words>(&self, index: &CacheIndex<M>) -> PageCount {
        let wanted = u64::from(self.wanted_without_lost(index).0).saturating_sub(self.kept_by_drained());
        PageCount(u32::try_from(wanted).unwrap_or(u32::MAX))
    }

    /// Returns what is wanted of all pools with a session.
    fn wanted_without_lost<M: Words>(&self, index: &CacheIndex<M>) -> PageCount {
        let wanted = u64::from(self.wanted().0).saturating_sub(self.expected_slots(index));
        PageCount(u32::try_from(wanted).unwrap_or(u32::MAX))
    }

    /// Asks servers for more than they are believed to give, because they may have more memory by now: those that have not
    /// refused lately, for all that is missing together.
    fn lift_limits(&mut self, now: Nanos, wanted: PageCount, members: &[PoolIndex], shares: &mut [Share]) {
        let may_lift = |pool: &Pool| pool.size.lift_at() <= now;
        for (number, share) in members.iter().zip(&mut *shares) {
            if may_lift(self.pool(*number)) {
                share.limit = PageCount(u32::MAX);
            }
        }
        share_out(wanted, shares);
        for (number, share) in members.iter().zip(shares) {
            let size = &mut self.pool_mut(*number).size;
            if share.size > size.limit() {
                size.lift_limit(share.size);
            }
        }
    }

    /// Returns the time at which [`Self::share`] asks a server for more than its limit, or `None` if the cache is as large
    /// as wanted.
    pub(super) fn lift_deadline<M: Words>(&self, index: &CacheIndex<M>) -> Option<Nanos> {
        let members = || self.begun().iter().filter(|pool| pool.is_member());
        let has: u64 = members().map(|pool| u64::from(pool.size.share().0)).sum();
        let is_short = has < u64::from(self.wanted_of_members(index).0) && self.is_settled();
        members().map(|pool| pool.size.lift_at()).min().filter(|_| is_short)
    }
}
