//! Pools that are drained: they take no new pages, and are left once the others have their share.
//!
//! A pool is drained because the operator has taken its server out of the list, or because its pages take much longer
//! than those of the others for a minute, although the others could take its share. Pages do not move: those that the guest
//! reads again go to another pool when they are evicted the next time. Of a pool whose server was taken out of the list, the
//! others get what was read, and at least as much of it as of the ten minutes has passed. Decision 0014.

use super::need::DRAIN_MAX_NS;
use super::pool::{Drain, DrainReason, Pool};
use super::pools::Pools;
use super::types::Action;
use crate::index::{CacheIndex, Words};
use crate::units::{Nanos, PageCount, PoolIndex};
use std::collections::VecDeque;

/// Interval, in nanoseconds, of the looks at what is left in the drained pools.
const LOOK_NS: u64 = 1_000_000_000;
/// Number of parts, at most, in which the others get the share of a drained pool.
const PARTS: u32 = 64;
/// Interval, in nanoseconds, of the comparisons of the pools' latencies.
const CHECK_NS: u64 = 10_000_000_000;
/// Number of comparisons in a row after which a slow pool is drained.
const SLOW_CHECKS: u32 = 6;
/// Minimum time, in nanoseconds, between the beginnings of two drains of slow pools.
const SLOW_PAUSE_NS: u64 = 60_000_000_000;
/// Factor over the fastest pool's median latency from which a pool is slow.
const SLOW_FACTOR: u64 = 4;

impl Pools {
    /// Stops sending pages to a pool of `pages` pages, whose drain began at `begun_at`, now or in an earlier session. It keeps what it has
    /// until the others have its share, or nothing if nothing is wanted.
    pub(super) fn drain(
        &mut self,
        now: Nanos,
        begun_at: Nanos,
        number: PoolIndex,
        reason: DrainReason,
        pages: PageCount,
    ) {
        let is_wanted = self.wanted() > PageCount(0);
        let pool = self.pool_mut(number);
        if pool.drain.is_none_or(|drain| drain.reason != reason) {
            let kept = if reason == DrainReason::Unlisted && is_wanted { pages } else { PageCount(0) };
            let (until, look_at) = (begun_at.plus_ns(DRAIN_MAX_NS), now.plus_ns(LOOK_NS));
            pool.drain = Some(Drain { reason, since: now, until, pages, kept, look_at });
        }
    }

    /// Leaves to the others what has been read from the drained pools, and what was in them for too long. Does nothing
    /// before the next look is due.
    pub(super) fn look_at_drained<M: Words>(&mut self, now: Nanos, index: &CacheIndex<M>) {
        for pool in &mut self.pools {
            let used = index.pool_slot_counts(pool.number()).used;
            let Some(drain) = pool.drain.as_mut().filter(|drain| drain.kept.0 > 0 && drain.look_at <= now) else {
                continue;
            };
            drain.look_at = now.plus_ns(LOOK_NS);
            let (left_ns, all_ns) = (drain.until.since_ns(now), drain.until.since_ns(drain.since).max(1));
            let due = u128::from(drain.pages.0) * u128::from(left_ns) / u128::from(all_ns);
            let left = used.min(u32::try_from(due).unwrap_or(u32::MAX));
            if left == 0 || drain.kept.0.saturating_sub(left) > drain.pages.0 / PARTS {
                drain.kept = PageCount(left);
            }
        }
    }

    /// Returns the part of the shares of drained pools that the others do not get yet.
    pub(super) fn kept_by_drained(&self) -> u64 {
        self.begun().iter().map(|pool| u64::from(pool.kept().0)).sum()
    }

    /// Makes the drained pools keep less, because the size of the cache becomes `wanted`: they shrink as the others do.
    pub(super) fn shrink_drained(&mut self, wanted: PageCount) {
        let had = self.wanted().max(PageCount(1));
        for drain in self.pools.iter_mut().filter_map(|pool| pool.drain.as_mut()).filter(|_| wanted < had) {
            let kept = u64::from(drain.kept.0) * u64::from(wanted.0) / u64::from(had.0);
            drain.kept = PageCount(u32::try_from(kept).unwrap_or(drain.kept.0));
        }
    }

    /// Makes the drained pools keep no more than is wanted of all pools: one that was lost while the cache became smaller returns
    /// with all that it had.
    pub(super) fn limit_kept(&mut self) {
        let (kept, wanted) = (self.kept_by_drained(), u64::from(self.wanted().0));
        if kept <= wanted {
            return;
        }
        for pool in &mut self.pools {
            let part = u64::from(pool.kept().0) * wanted / kept;
            if let Some(drain) = &mut pool.drain {
                drain.kept = PageCount(u32::try_from(part).unwrap_or(drain.kept.0));
            }
        }
    }

    /// Gives a pool that is drained a share again.
    pub(super) fn end_drain(&mut self, number: PoolIndex) {
        let pool = self.pool_mut(number);
        (pool.drain, pool.slow_checks) = (None, 0);
    }

    /// Reduces the drained pools to what the others have not been granted yet.
    pub(super) fn share_drained<M: Words>(
        &mut self,
        wanted: PageCount,
        slots: u32,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) {
        // A pool that is becoming smaller will keep no more than its share.
        let members = self.begun().iter().filter(|pool| pool.is_member());
        let has: u64 = members.map(|pool| u64::from(pool.size.granted().min(pool.size.share()).0)).sum();
        let left = u64::from(wanted.0).saturating_sub(has);
        // Beyond what they keep.
        let mut spare = left.saturating_sub(self.kept_by_drained());
        for pool in self.pools.iter_mut().filter(|pool| pool.is_up() && pool.drain.is_some()) {
            let kept = u64::from(pool.kept().0).min(left);
            let share = u32::try_from(kept + spare).unwrap_or(u32::MAX).min(pool.size.granted().0);
            spare -= u64::from(share).saturating_sub(kept).min(spare);
            // One that is to have nothing is left by the timer.
            if share > 0 {
                let server = pool.server();
                pool.size.set_share(PageCount(share));
                pool.size.keep_up(server, slots, index, actions);
            }
        }
    }

    /// Returns the pages granted to the pools that have a share.
    pub(super) fn granted_to_members(&self) -> u64 {
        self.begun().iter().filter(|pool| pool.is_member()).map(|pool| u64::from(pool.size.granted().0)).sum()
    }

    /// Returns whether the pools that have a share were granted all that is wanted, or nothing is wanted.
    fn members_have_all(&self) -> bool {
        let (is_any, wanted) = (self.has_members(), u64::from(self.wanted().0));
        (is_any || wanted == 0) && self.granted_to_members() >= wanted
    }

    /// Returns the pools to leave, because the others have their share or the drain took too long. A slow pool for which the
    /// others have no room after all, or beside which no other has a share, gets its share back instead.
    pub(super) fn end_drains(&mut self, now: Nanos) -> Vec<PoolIndex> {
        let (have_all, is_alone) = (self.members_have_all(), !self.has_members());
        let overdue = |drain: Drain| now >= drain.until;
        let (mut drained, mut kept) = (Vec::new(), Vec::new());
        for pool in self.up() {
            match pool.drain {
                Some(drain)
                    if (have_all && drain.kept.0 == 0) || (overdue(drain) && drain.reason == DrainReason::Unlisted) =>
                {
                    drained.push(pool.number());
                }
                Some(drain) if overdue(drain) || is_alone && drain.reason == DrainReason::Slow => {
                    kept.push(pool.number());
                }
                Some(_) | None => {}
            }
        }
        kept.into_iter().for_each(|number| self.end_drain(number));
        drained
    }

    /// Returns when a drain ends, or `None` if no pool is drained.
    pub(super) fn drain_deadline(&self) -> Option<Nanos> {
        let drains = || self.up().filter_map(|pool| pool.drain);
        let until = drains().map(|drain| drain.until).min()?;
        let look_at = drains().filter(|drain| drain.kept.0 > 0).map(|drain| drain.look_at).min();
        let is_done = self.members_have_all() && drains().any(|drain| drain.kept.0 == 0);
        let end = if is_done { Nanos(0) } else { until };
        Some(look_at.map_or(end, |look_at| look_at.min(end)))
    }

    /// Compares the latencies of the pools if that is due. Returns the slowest pool if it is to be drained.
    pub(super) fn find_slow(&mut self, now: Nanos, latency_ns: impl Fn(PoolIndex) -> Option<u64>) -> Option<PoolIndex> {
        if self.slowness_deadline().is_none_or(|at| now < at) {
            return None;
        }
        self.slowness.checked_at = Some(now);
        let known = |pool: &Pool| latency_ns(pool.number()).filter(|_| pool.is_member());
        let fastest = self.begun().iter().filter_map(known).min().unwrap_or(u64::MAX);
        for pool in &mut self.pools {
            let is_slow = known(pool).is_some_and(|ns| ns / SLOW_FACTOR > fastest);
            pool.slow_checks = if is_slow { pool.slow_checks.saturating_add(1) } else { 0 };
        }
        let may_drain = self.slowness.drained_at.is_none_or(|at| now >= at.plus_ns(SLOW_PAUSE_NS));
        let slow = self.begun().iter().filter(|pool| pool.slow_checks >= SLOW_CHECKS);
        let slowest = slow.max_by_key(|pool| known(pool)).map(Pool::number);
        let found = slowest.filter(|slowest| may_drain && self.can_others_take(*slowest));
        if found.is_some() {
            self.slowness.drained_at = Some(now);
        }
        found
    }

    /// Returns whether the pools that are not slow have room for the share of another one.
    fn can_others_take(&self, number: PoolIndex) -> bool {
        let others = self.begun().iter().filter(|pool| pool.is_member() && pool.slow_checks == 0);
        let room = |pool: &Pool| u64::from(pool.size.limit().0.saturating_sub(pool.size.share().0));
        others.map(room).sum::<u64>() >= u64::from(self.pool(number).size.share().0)
    }

    /// Returns the time of the next comparison of the pools, or `None` if there are not two.
    pub(super) fn slowness_deadline(&self) -> Option<Nanos> {
        let are_several = self.begun().iter().filter(|pool| pool.is_member()).count() > 1;
        are_several.then(|| self.slowness.checked_at.map_or(Nanos(0), |at| at.plus_ns(CHECK_NS)))
    }
}
