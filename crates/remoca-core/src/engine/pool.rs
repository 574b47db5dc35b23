//! One pool of the cache: the session with its memory server, its send window, and the server's silence.
//!
//! Its size is in `pool_size.rs`; all pools together are in `pools.rs`. A pool without a session that the index still
//! describes is *lost*: its server may return with its pages.

use super::placement::Seat;
use super::pool_size::Size;
use super::types::{Action, PoolOffer, ServerNumber};
use crate::index::{CacheIndex, Words};
use crate::units::{Nanos, PageCount, PoolIndex};
use std::collections::VecDeque;

/// Time, in nanoseconds, for which a server may owe an answer before the session is given up.
const SILENCE_NS: u64 = 10_000_000_000;

/// Reason why a pool takes no new pages, until the others have its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DrainReason {
    /// The operator has taken its server out of the list.
    Unlisted,
    /// Its server is much slower than the others.
    Slow,
}

/// Drain of a pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drain {
    pub(super) reason: DrainReason,
    /// Time at which it began, or at which the session did if that was later.
    pub(super) since: Nanos,
    /// Time at which it ends at the latest, whatever happens to the session.
    pub(super) until: Nanos,
    /// Number of the pool's pages at `since`.
    pub(super) pages: PageCount,
    /// Part of the pool's share that the others do not get yet.
    pub(super) kept: PageCount,
    /// Time of the next look at what is left in it.
    pub(super) look_at: Nanos,
}

/// Pool, with or without a session.
#[derive(Debug)]
pub(super) struct Pool {
    number: PoolIndex,
    seat: Option<Seat>,
    pub(super) size: Size,
    /// Whether it is the local tier.
    is_local: bool,
    /// Start of the time for which the share of the lost pool is kept for its return.
    pub(super) expected_since: Option<Nanos>,
    pub(super) drain: Option<Drain>,
    /// Number of checks in a row that found the server much slower than others.
    pub(super) slow_checks: u32,
    /// Pages that the guest received from it in this session.
    pub(super) hits: u64,
    /// Time since which the server has owed answers and sent none.
    silent_since: Option<Nanos>,
    /// Number of outstanding REQUESTs.
    owed: u32,
    window: u32,
    /// Pages that may be sent before some have left for the network.
    room: u32,
}

impl Pool {
    pub(super) fn new(number: PoolIndex, window: u32) -> Self {
        Self {
            number,
            seat: None,
            size: Size::new(number),
            is_local: false,
            expected_since: None,
            drain: None,
            slow_checks: 0,
            hits: 0,
            silent_since: None,
            owed: 0,
            window,
            room: window,
        }
    }

    /// Returns the number of the pool.
    pub(super) fn number(&self) -> PoolIndex {
        self.number
    }

    /// Returns the seat of the pool, or `None` if there is no session.
    #[inline]
    pub(super) fn seat(&self) -> Option<Seat> {
        self.seat
    }

    /// Returns whether there is a session.
    #[inline]
    pub(super) fn is_up(&self) -> bool {
        self.seat.is_some()
    }

    /// Returns the server of the session, or `None` if there is no session.
    #[inline]
    pub(super) fn server(&self) -> Option<ServerNumber> {
        self.seat.map(|seat| seat.server())
    }

    /// Returns whether the pool has a session and a share of the cache.
    pub(super) fn is_member(&self) -> bool {
        self.is_up() && self.drain.is_none() && !self.is_local
    }

    /// Returns whether the pool has a session and is the local tier.
    #[inline]
    pub(super) fn is_local(&self) -> bool {
        self.is_local
    }

    /// Returns the part of the share of a pool that is drained which the others do not get yet.
    pub(super) fn kept(&self) -> PageCount {
        let kept = self.drain.filter(|_| self.is_up()).map_or(PageCount(0), |drain| drain.kept);
        kept.min(self.size.granted())
    }

    /// Returns whether the pool is drained for good, because the operator wants its server empty.
    pub(super) fn is_unlisted(&self) -> bool {
        self.drain.is_some_and(|drain| drain.reason == DrainReason::Unlisted)
    }

    /// Starts a session with the server of `seat`, which made this offer. A pool that is warm `had` this size.
    pub(super) fn begin_session(
        &mut self,
        seat: Seat,
        now: Nanos,
        offer: &PoolOffer,
        had: Option<PageCount>,
        is_local: bool,
    ) {
        assert!(self.seat.is_none(), "a pool has one session at a time");
        *self = Self { seat: Some(seat), is_local, ..Self::new(self.number, self.window) };
        self.size.begin(now, offer.npages, offer.possible(), had);
    }

    /// Ends the session. The caller must take its REQUESTs.
    pub(super) fn end_session<M: Words>(
        &mut self,
        now: Nanos,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) {
        self.seat = None;
        self.expected_since = Some(now).filter(|_| !self.is_local);
        self.is_local = false;
        (self.drain, self.silent_since) = (None, None);
        self.size.end(index, actions);
    }

    // Pages and REQUESTs.

    /// Returns whether the pool takes one more page now.
    #[inline]
    pub(super) fn takes_page(&self) -> bool {
        self.room > 0 && self.is_up() && self.drain.is_none()
    }

    /// Takes room in the send window for a page that is about to be sent.
    pub(super) fn note_send(&mut self) {
        assert!(self.room > 0, "a page is sent for which there is no room");
        self.room -= 1;
    }

    /// Frees the room in the send window of pages that have left for the network.
    pub(super) fn note_sent(&mut self, pages: u32) {
        self.room = self.room.saturating_add(pages).min(self.window);
    }

    /// Returns the number of outstanding REQUESTs.
    #[inline]
    pub(super) fn owed(&self) -> u32 {
        self.owed
    }

    /// Counts a REQUEST.
    #[inline]
    pub(super) fn note_fetch(&mut self) {
        self.owed += 1;
    }

    /// Counts REQUESTs that are no longer outstanding.
    #[inline]
    pub(super) fn end_fetches(&mut self, count: u32) {
        self.owed -= count;
    }

    // The silence of the server.

    /// Starts the clock on the server's silence, unless it is already running or the server owes no page.
    pub(super) fn note_silence(&mut self, now: Nanos) {
        if self.owed > 0 {
            self.silent_since.get_or_insert(now);
        }
    }

    /// Restarts the clock on the server's silence after an answer that it owed, or stops the clock if it owes no more
    /// pages. Unsolicited replies do not count, because a server could send them forever and never answer.
    pub(super) fn note_answer(&mut self, now: Nanos) {
        self.silent_since = (self.owed > 0).then_some(now);
    }

    /// Returns the time at which a server that owes an answer is given up, or `None` if no clock is running. For a
    /// SETSIZE whose clock is not running yet, returns 0, so that the next timer starts that clock.
    fn silence_deadline(&self) -> Option<Nanos> {
        let silent = self.silent_since.map(|since| since.plus_ns(SILENCE_NS));
        let owed = self.size.owed_since().map(|since| since.map_or(Nanos(0), |at| at.plus_ns(SILENCE_NS)));
        [silent, owed].into_iter().flatten().min()
    }

    /// Returns the time at which [`Self::handle_timer`] must be called, or `None` if it has nothing to do.
    pub(super) fn deadline<M: Words>(&self, index: &CacheIndex<M>) -> Option<Nanos> {
        let size = index.is_pool_resizing(self.number).then_some(Nanos(0));
        [self.size.retry_at(), self.silence_deadline(), size].into_iter().flatten().min()
    }

    /// Continues a change of size with up to `slots` slots, and requests the size again if that is due. Returns whether the
    /// server is overdue.
    pub(super) fn handle_timer<M: Words>(
        &mut self,
        now: Nanos,
        slots: u32,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) -> bool {
        let server = self.server();
        self.size.handle_timer(now, server, slots, index, actions);
        self.silence_deadline().is_some_and(|at| at <= now)
    }
}
