//! Size of one pool: its share of the cache, what its server grants, and which of its slots are usable meanwhile.
//!
//! Before a smaller size is requested, pages move out of the slots that will be cut off. At most one SETSIZE is
//! outstanding.

use super::types::{Action, ServerNumber};
use crate::index::{CacheIndex, LogEnd, Move, Words};
use crate::units::{Nanos, PageCount, PoolIndex};
use std::collections::VecDeque;

/// Pause, in nanoseconds, before a size that was refused, or of which no more was granted than before, is requested again.
const RESIZE_RETRY_NS: u64 = 10_000_000_000;

/// Least growth of a pool, in pages and as a share of what is missing, after which the server is asked for the rest at once.
const STEP_PAGES: u32 = 4096;
const STEPS: u32 = 64;

/// Maximum number of moves of all pools between two SETSIZEs of each, for which the log of sends has room. The answer to a
/// SETSIZE shows that the server has done all moves before it.
const MOVES_MAX: u32 = 4096;

/// Meaning of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The server may give a smaller size that is asked for next.
    Less,
    /// The server keeps its grant, although it was asked for this size.
    Final(PageCount),
}

/// SETSIZE that the server has not answered.
#[derive(Clone, Copy, Debug)]
struct Asked {
    npages: PageCount,
    /// Most that the answer is worth, because the server has taken back what is beyond since then.
    most: PageCount,
    /// End of the log of sends when it was sent.
    log_end: LogEnd,
    /// Start of the wait for the answer, set by the first timer after it was sent.
    since: Option<Nanos>,
}

/// Size of one pool.
#[derive(Debug)]
pub(super) struct Size {
    pool: PoolIndex,
    is_up: bool,
    /// Share of the cache that the pool is to have.
    share: PageCount,
    granted: PageCount,
    /// Largest size that the server is believed to give.
    limit: PageCount,
    /// Time from which the server may be asked for more than the limit.
    lift_at: Nanos,
    asked: Option<Asked>,
    /// Size to request once no slot beyond it is usable.
    to_ask: Option<PageCount>,
    /// End of the pause after an answer that was not the size requested.
    retry_at: Option<Nanos>,
    /// Whether the size requested last is what a refusal left possible.
    reduced: bool,
    /// Whether the share, the grant or the session has changed since the last plan.
    is_stale: bool,
    /// Moves since the last SETSIZE.
    moves: u32,
    moves_max: u32,
}

impl Size {
    pub(super) fn new(pool: PoolIndex) -> Self {
        Self {
            pool,
            is_up: false,
            share: PageCount(0),
            granted: PageCount(0),
            limit: PageCount(0),
            lift_at: Nanos(0),
            asked: None,
            to_ask: None,
            retry_at: None,
            reduced: false,
            is_stale: false,
            moves: 0,
            moves_max: MOVES_MAX,
        }
    }

    /// Starts a session with a server that has granted `granted` pages and is believed to give up to `limit`. A pool that
    /// is warm keeps the size that it `had` as its share, or what the server says that it has, if that is less.
    pub(super) fn begin(&mut self, now: Nanos, granted: PageCount, limit: PageCount, had: Option<PageCount>) {
        *self = Self { is_up: true, granted, limit, is_stale: true, ..Self::new(self.pool) };
        self.lift_at = now.plus_ns(RESIZE_RETRY_NS);
        self.share = had.map_or(PageCount(0), |had| had.min(granted));
    }

    /// Ends the session.
    pub(super) fn end<M: Words>(&mut self, index: &mut CacheIndex<M>, actions: &mut VecDeque<Action>) {
        *self = Self::new(self.pool);
        self.fit_capacity(None, 1, index, actions);
    }

    /// Returns the size that the server has granted.
    pub(super) fn granted(&self) -> PageCount {
        self.granted
    }

    /// Returns the largest size that the server may have granted: what it was asked for, as long as it has not answered.
    pub(super) fn granted_at_most(&self) -> PageCount {
        self.asked.map_or(self.granted, |asked| asked.npages.max(self.granted))
    }

    /// Returns the share of the cache that the pool is to have.
    pub(super) fn share(&self) -> PageCount {
        self.share
    }

    /// Returns the largest size that the server is believed to give.
    pub(super) fn limit(&self) -> PageCount {
        self.limit
    }

    /// Returns the time from which the server may be asked for more than the limit.
    pub(super) fn lift_at(&self) -> Nanos {
        self.lift_at
    }

    /// Raises the limit, to find out whether the server has more memory by now.
    pub(super) fn lift_limit(&mut self, limit: PageCount) {
        self.limit = limit;
        self.reduced = false;
    }

    /// Returns whether no SETSIZE is outstanding or planned.
    pub(super) fn is_settled(&self) -> bool {
        self.asked.is_none() && self.to_ask.is_none()
    }

    /// Returns since when the answer to a SETSIZE is awaited (`Some(None)`: the wait has not begun), or `None` if no SETSIZE is
    /// outstanding.
    pub(super) fn owed_since(&self) -> Option<Option<Nanos>> {
        self.asked.map(|asked| asked.since)
    }

    /// Returns when a size that was refused is requested again.
    pub(super) fn retry_at(&self) -> Option<Nanos> {
        self.retry_at
    }

    /// Sets the number of pools, among which the log of sends is divided.
    pub(super) fn note_pools(&mut self, pools: u32) {
        self.moves_max = MOVES_MAX / pools.max(1);
    }

    /// Continues a change of size with up to `slots` slots, and requests the size again if that is due.
    pub(super) fn handle_timer<M: Words>(
        &mut self,
        now: Nanos,
        server: Option<ServerNumber>,
        slots: u32,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) {
        if index.is_pool_resizing(self.pool) {
            self.go_on(server, slots, index, actions);
        }
        if self.retry_at.is_some_and(|at| at <= now) {
            self.retry_at = None;
            self.plan(server, slots, index, actions);
        }
        if let Some(asked) = &mut self.asked {
            asked.since.get_or_insert(now);
        }
    }

    /// Stores the size that the server granted. Returns the size that it was asked for, or `None` if no SETSIZE is
    /// outstanding.
    pub(super) fn take<M: Words>(
        &mut self,
        now: Nanos,
        npages: PageCount,
        index: &mut CacheIndex<M>,
    ) -> Option<PageCount> {
        let Asked { npages: asked, most, .. } = self.take_asked(index)?;
        let npages = npages.min(most);
        let (missing, grown) = (asked.0.saturating_sub(self.granted.0), npages.0.saturating_sub(self.granted.0));
        self.reduced = false;
        let is_step = npages < asked && grown >= STEP_PAGES.min(missing.div_ceil(STEPS)).max(1);
        self.granted = npages;
        // If the server granted another size than the requested one, retry only after a pause. Otherwise such a server
        // would be asked endlessly. One that granted much more than before is growing the pool step by step.
        if npages != asked && !is_step {
            self.retry_at = Some(now.plus_ns(RESIZE_RETRY_NS));
            if npages < asked {
                self.limit_to(now, npages);
            }
        }
        Some(asked)
    }

    /// Takes a refusal of the server, which could grant `available` more pages. It is asked for these at once, but for
    /// less a second time only after a pause. Returns `None` if no SETSIZE is outstanding.
    pub(super) fn take_refusal<M: Words>(
        &mut self,
        now: Nanos,
        available: PageCount,
        index: &mut CacheIndex<M>,
    ) -> Option<Refusal> {
        let Asked { npages: asked, .. } = self.take_asked(index)?;
        let possible = PageCount(self.granted.0.saturating_add(available.0));
        if possible > self.granted && possible < asked && !self.reduced {
            self.limit_to(now, possible);
            self.reduced = true;
            return Some(Refusal::Less);
        }
        if asked > self.granted {
            self.limit_to(now, self.granted);
        } else {
            self.retry_at = Some(now.plus_ns(RESIZE_RETRY_NS));
        }
        Some(Refusal::Final(asked))
    }

    fn limit_to(&mut self, now: Nanos, limit: PageCount) {
        (self.limit, self.reduced) = (limit, false);
        self.lift_at = now.plus_ns(RESIZE_RETRY_NS);
    }

    /// Ends the wait for the answer to a SETSIZE, and returns it. Returns `None` if no SETSIZE is outstanding.
    fn take_asked<M: Words>(&mut self, index: &mut CacheIndex<M>) -> Option<Asked> {
        let asked = self.asked.take()?;
        index.note_taken(self.pool, asked.log_end);
        self.is_stale = true;
        Some(asked)
    }

    /// Gives up the slots from `npages` on, whose memory the server takes back. Their pages are unreachable from now on; the
    /// slots are given up in this turn and later ones. Nothing is moved out of them.
    pub(super) fn take_back<M: Words>(
        &mut self,
        now: Nanos,
        npages: PageCount,
        (server, slots): (Option<ServerNumber>, u32),
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) {
        self.granted = self.granted.min(npages);
        self.share = self.share.min(npages);
        if let Some(asked) = &mut self.asked {
            asked.most = asked.most.min(npages);
        }
        self.limit_to(now, npages.min(self.limit));
        self.plan(server, slots, index, actions);
    }

    /// Sets the share of the pool. [`Self::keep_up`] asks the server for it.
    pub(super) fn set_share(&mut self, share: PageCount) {
        if share != self.share {
            (self.share, self.retry_at, self.is_stale) = (share, None, true);
        }
    }

    /// Asks the server for the share if anything has changed. Processes up to `slots` slots.
    pub(super) fn keep_up<M: Words>(
        &mut self,
        server: Option<ServerNumber>,
        slots: u32,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) {
        if self.is_stale {
            self.plan(server, slots, index, actions);
        }
    }

    /// Plans to request the share, unless the pool already has that size. A smaller size is requested only after pages have
    /// been moved out of the slots that will be cut off.
    fn plan<M: Words>(
        &mut self,
        server: Option<ServerNumber>,
        slots: u32,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) {
        self.is_stale = false;
        if self.is_up && self.asked.is_none() {
            self.to_ask = (self.share != self.granted && self.retry_at.is_none()).then_some(self.share);
        }
        self.fit_capacity(server, slots, index, actions);
    }

    /// Adapts the number of usable slots to the grant and the share. Takes only the first step of that change.
    fn fit_capacity<M: Words>(
        &mut self,
        server: Option<ServerNumber>,
        slots: u32,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) {
        self.aim(index);
        self.go_on(server, slots, index, actions);
    }

    /// Sets the capacity that the index works towards. It shrinks, which moves pages, only while no SETSIZE is outstanding
    /// and only a limited number of moves was made.
    fn aim<M: Words>(&self, index: &mut CacheIndex<M>) {
        let (granted, capacity) = (self.granted, index.capacity(self.pool));
        if self.is_up {
            index.lose_from(self.pool, granted);
        }
        let aim = match self.asked {
            // What was being cut off does not come back.
            _ if !self.is_up => index.kept_capacity(self.pool),
            None if self.moves < self.moves_max => granted.min(self.share),
            asked => granted.min(asked.map_or(granted, |asked| asked.npages)).min(self.share.max(capacity)),
        };
        index.aim(self.pool, aim);
    }

    /// Takes the next step of a change of size. Sends the SETSIZE once the capacity fits it, or after the maximum number of
    /// moves.
    fn go_on<M: Words>(
        &mut self,
        server: Option<ServerNumber>,
        slots: u32,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) {
        let Some(server) = server else {
            index.resize(self.pool, slots.min(MOVES_MAX), |_| panic!("pages move without a session"));
            return;
        };
        let moves = &mut self.moves;
        index.resize(self.pool, slots.min(self.moves_max), |Move { from, to }| {
            *moves += 1;
            actions.push_back(Action::MovePage { server, from, to });
        });
        let capacity = index.capacity(self.pool);
        match self.to_ask {
            Some(size) if capacity <= size => self.ask(server, size, index, actions),
            Some(_) if self.moves >= self.moves_max => self.ask(server, capacity, index, actions),
            _ if self.moves >= self.moves_max => self.aim(index),
            _ => {}
        }
    }

    fn ask<M: Words>(
        &mut self,
        server: ServerNumber,
        npages: PageCount,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) {
        self.to_ask = None;
        self.moves = 0;
        self.asked = Some(Asked { npages, most: PageCount(u32::MAX), log_end: index.log_end(self.pool), since: None });
        actions.push_back(Action::SetSize { server, npages });
        self.aim(index);
    }
}
