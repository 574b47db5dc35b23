//! One pool: the session with its memory server, its size, its send window, and its outstanding REQUESTs.
//!
//! The size has three parts: what the operator wants, what the server grants, and which slots are usable meanwhile. Before a
//! smaller size is requested, pages move out of the slots that will be cut off. Index and placement are arguments.

use super::fetches::{Fetch, Fetches};
use super::placement::{Need, Placement, Seat};
use super::types::{Action, FetchId, PoolOffer, PoolSlot, ServerNumber};
use crate::index::{CacheIndex, LogEnd, Move};
use crate::units::{Nanos, PageCount, PoolIndex, SlotIndex};
use std::collections::VecDeque;
use std::ops::DerefMut;

/// Time, in nanoseconds, for which a server may owe an answer before the session is given up.
const SILENCE_NS: u64 = 10_000_000_000;

/// Pause, in nanoseconds, before a size that was refused, or granted only in part, is requested again.
const RESIZE_RETRY_NS: u64 = 10_000_000_000;

/// Number of the only pool.
pub(super) const POOL: PoolIndex = PoolIndex(0);

/// Maximum number of moves between two SETSIZEs, for which the log of sends has room. The answer to a SETSIZE shows that the
/// server has done all moves before it.
const MOVES_MAX: u32 = 4096;

/// Session with the server that has the pool.
#[derive(Clone, Copy, Debug)]
struct Session {
    seat: Seat,
    /// Size in the outstanding SETSIZE.
    asked: Option<PageCount>,
}

/// Pool, with or without a session.
#[derive(Debug)]
pub(super) struct Pool {
    session: Option<Session>,
    /// Size that the operator wants.
    wanted: PageCount,
    /// Size that the server granted.
    granted: PageCount,
    retry_at: Option<Nanos>,
    /// Size to request once no slot beyond it is usable.
    to_ask: Option<PageCount>,
    /// Moves since the last SETSIZE.
    moves: u32,
    /// Whether the size requested last is the size that a refusal left possible, and not the wanted one.
    reduced: bool,
    /// Time since which the server has owed answers and sent none.
    silent_since: Option<Nanos>,
    /// Start of the wait for the answer to a SETSIZE, set by the first timer after it was sent.
    size_owed_since: Option<Nanos>,
    /// End of the log of sends when the SETSIZE was sent.
    log_end: Option<LogEnd>,
    slots_per_turn: u32,
    window: u32,
    /// Pages that may be sent before some have left for the network.
    room: u32,
    fetches: Fetches,
}

impl Pool {
    pub(super) fn new(wanted: PageCount, window: u32, fetch_limit: u32, slots_per_turn: u32) -> Self {
        Self {
            session: None,
            wanted,
            granted: PageCount(0),
            retry_at: None,
            to_ask: None,
            moves: 0,
            reduced: false,
            silent_since: None,
            size_owed_since: None,
            log_end: None,
            slots_per_turn,
            window,
            room: window,
            fetches: Fetches::new(fetch_limit),
        }
    }

    /// Restores the size that the pool had in the previous process, from the index of that process.
    pub(super) fn restore<M: DerefMut<Target = [u32]>>(&mut self, index: &CacheIndex<M>) {
        self.granted = index.capacity(POOL);
        self.wanted = self.wanted.min(index.layout().slot_limit());
    }

    /// Returns whether there is a session.
    #[inline]
    pub(super) fn is_up(&self) -> bool {
        self.session.is_some()
    }

    /// Returns whether the operator wants a cache.
    pub(super) fn is_enabled(&self) -> bool {
        self.wanted.0 > 0
    }

    /// Returns the size that the operator wants.
    pub(super) fn wanted(&self) -> PageCount {
        self.wanted
    }

    /// Returns the size that the server granted.
    pub(super) fn granted(&self) -> PageCount {
        self.granted
    }

    /// Returns the seat of the pool, or `None` if there is no session.
    pub(super) fn seat(&self) -> Option<Seat> {
        self.session.map(|session| session.seat)
    }

    /// Returns the state of the pool that placement needs.
    pub(super) fn need<M: DerefMut<Target = [u32]>>(&self, index: &CacheIndex<M>) -> Need {
        let pool = index.pool(POOL).map(|pool| (ServerNumber(pool.server), pool.generation));
        let settled = !self.is_size_owed() && self.to_ask.is_none();
        Need { wanted: self.wanted, granted: self.granted, settled, pool, seat: self.seat() }
    }

    /// Returns the server of the session, or `None` if there is no session.
    #[inline]
    pub(super) fn server(&self) -> Option<ServerNumber> {
        self.session.map(|session| session.seat.server())
    }

    /// Returns whether there is a session with `server`.
    pub(super) fn is_at(&self, server: ServerNumber) -> bool {
        self.server() == Some(server)
    }

    /// Returns the place of a slot at the server.
    ///
    /// # Panics
    /// If there is no session.
    pub(super) fn place_of(&self, slot: SlotIndex) -> PoolSlot {
        PoolSlot { server: self.server().expect("slots are used within a session"), slot }
    }

    /// Starts a session with the server of `seat`, which made this offer.
    pub(super) fn begin_session<M: DerefMut<Target = [u32]>>(
        &mut self,
        seat: Seat,
        offer: &PoolOffer,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) {
        assert!(self.session.is_none(), "a pool has one session at a time");
        self.session = Some(Session { seat, asked: None });
        self.room = self.window;
        self.granted = offer.npages;
        self.ask_size(None, index, actions);
    }

    /// Ends the session. Outstanding REQUESTs stay in the table until [`Self::take_fetches`].
    pub(super) fn end_session<M>(&mut self, index: &mut CacheIndex<M>, actions: &mut VecDeque<Action>)
    where
        M: DerefMut<Target = [u32]>,
    {
        self.session = None;
        self.silent_since = None;
        self.size_owed_since = None;
        self.retry_at = None;
        self.to_ask = None;
        self.moves = 0;
        self.fit_capacity(index, actions);
    }

    // Pages and REQUESTs.

    /// Returns whether one more page may be sent.
    #[inline]
    pub(super) fn can_send(&self) -> bool {
        self.is_up() && self.room > 0
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

    /// Returns whether the server may be asked for `count` more pages.
    #[inline]
    pub(super) fn can_fetch(&self, count: u32) -> bool {
        self.is_up() && self.fetches.has_room(count)
    }

    /// Adds a REQUEST and returns its ID.
    #[inline]
    pub(super) fn begin_fetch(&mut self, fetch: Fetch) -> FetchId {
        self.fetches.begin(fetch)
    }

    /// Removes a REQUEST that the server replied to, unpins its slot and returns the REQUEST. Returns `None` if no
    /// REQUEST with this ID is outstanding.
    pub(super) fn end_fetch<M>(&mut self, now: Nanos, id: FetchId, index: &mut CacheIndex<M>) -> Option<Fetch>
    where
        M: DerefMut<Target = [u32]>,
    {
        let fetch = self.fetches.end(id)?;
        self.note_answer(now);
        index.unpin(fetch.slot);
        Some(fetch)
    }

    /// Returns whether the server owes pages.
    pub(super) fn is_owed_pages(&self) -> bool {
        !self.fetches.is_empty()
    }

    /// Removes all outstanding REQUESTs and unpins their slots. No replies to them may follow.
    pub(super) fn take_fetches<M: DerefMut<Target = [u32]>>(&mut self, index: &mut CacheIndex<M>) {
        for fetch in self.fetches.drain() {
            index.unpin(fetch.slot);
        }
    }

    /// Starts the clock on the server's silence, unless it is already running, because an answer is late.
    pub(super) fn note_silence(&mut self, now: Nanos) {
        self.silent_since.get_or_insert(now);
    }

    /// Restarts the clock on the server's silence after an answer that it owed, or stops the clock if it owes no more
    /// pages. Unsolicited replies do not count, because a server could send them forever and never answer.
    fn note_answer(&mut self, now: Nanos) {
        self.silent_since = (!self.fetches.is_empty()).then_some(now);
    }

    fn is_size_owed(&self) -> bool {
        self.session.is_some_and(|session| session.asked.is_some())
    }

    /// Returns the time at which a server that owes an answer is given up, or `None` if no clock is running. For a
    /// SETSIZE whose clock is not running yet, returns 0, so that the next timer starts that clock.
    fn silence_deadline(&self) -> Option<Nanos> {
        let silent = self.silent_since.map(|since| since.plus_ns(SILENCE_NS));
        let owed = self.is_size_owed().then(|| self.size_owed_since.map_or(Nanos(0), |at| at.plus_ns(SILENCE_NS)));
        [silent, owed].into_iter().flatten().min()
    }

    /// Returns the maximum number of slots to process in one turn.
    pub(super) fn slots_per_turn(&self) -> u32 {
        self.slots_per_turn
    }

    /// Returns the time at which [`Self::handle_timer`] must be called, or `None` if it has nothing to do.
    pub(super) fn deadline<M: DerefMut<Target = [u32]>>(&self, index: &CacheIndex<M>) -> Option<Nanos> {
        let size = index.is_resizing().then_some(Nanos(0));
        [self.retry_at, self.silence_deadline(), size].into_iter().flatten().min()
    }

    /// Continues a change of size, and requests the size again if that is due. Returns whether the server is overdue.
    pub(super) fn handle_timer<M>(
        &mut self,
        now: Nanos,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) -> bool
    where
        M: DerefMut<Target = [u32]>,
    {
        if index.is_resizing() {
            self.go_on_with_size(index, actions);
        }
        if self.retry_at.is_some_and(|at| at <= now) {
            self.retry_at = None;
            self.ask_size(None, index, actions);
        }
        if self.is_size_owed() {
            self.size_owed_since.get_or_insert(now);
        }
        self.silence_deadline().is_some_and(|at| at <= now)
    }

    // The size.

    /// Stores the size that the server granted the pool, and decides when to ask for another one.
    pub(super) fn take_size<M: DerefMut<Target = [u32]>>(
        &mut self,
        now: Nanos,
        npages: PageCount,
        placement: &mut Placement,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) {
        let Some((seat, asked)) = self.take_asked(now, index) else { return };
        self.granted = npages;
        placement.note_size(now, seat, npages, self.wanted);
        // If the server granted another size than the requested one, retry only after a pause. Otherwise such a server
        // would be asked endlessly.
        if npages != asked || (self.reduced && npages < self.wanted) {
            self.retry_at = Some(now.plus_ns(RESIZE_RETRY_NS));
            self.fit_capacity(index, actions);
        } else {
            self.ask_size(None, index, actions);
        }
    }

    /// Asks for another size, at once or after a pause. The refusing server could grant `available` more pages.
    pub(super) fn take_refusal<M: DerefMut<Target = [u32]>>(
        &mut self,
        now: Nanos,
        available: PageCount,
        placement: &mut Placement,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) {
        let Some((seat, asked)) = self.take_asked(now, index) else { return };
        let possible = PageCount(self.granted.0.saturating_add(available.0));
        if self.wanted < asked {
            // In the meantime the operator wants less.
            self.ask_size(None, index, actions);
        } else if possible > self.granted && possible < asked && !self.reduced {
            self.ask_size(Some(possible), index, actions);
        } else {
            placement.note_size(now, seat, self.granted, self.wanted);
            self.retry_at = Some(now.plus_ns(RESIZE_RETRY_NS));
            self.fit_capacity(index, actions);
        }
    }

    /// Ends the wait for the answer to a SETSIZE. Returns the seat and the requested size, or `None` if no SETSIZE is
    /// outstanding.
    fn take_asked<M>(&mut self, now: Nanos, index: &mut CacheIndex<M>) -> Option<(Seat, PageCount)>
    where
        M: DerefMut<Target = [u32]>,
    {
        let session = self.session.as_mut()?;
        let asked = session.asked.take()?;
        let seat = session.seat;
        self.note_answer(now);
        self.size_owed_since = None;
        if let Some(end) = self.log_end.take() {
            index.note_taken(POOL, end);
        }
        Some((seat, asked))
    }

    /// Sets the size that the operator wants, and asks the server for it.
    pub(super) fn want<M>(&mut self, wanted: PageCount, index: &mut CacheIndex<M>, actions: &mut VecDeque<Action>)
    where
        M: DerefMut<Target = [u32]>,
    {
        self.wanted = wanted.min(index.layout().slot_limit());
        self.retry_at = None;
        self.ask_size(None, index, actions);
    }

    /// Plans to request the operator's size, or the `reduced` size that a refusal left possible, unless the pool already has
    /// that size. A smaller size is requested only after pages have been moved out of the slots that will be cut off.
    fn ask_size<M: DerefMut<Target = [u32]>>(
        &mut self,
        reduced: Option<PageCount>,
        index: &mut CacheIndex<M>,
        actions: &mut VecDeque<Action>,
    ) {
        if matches!(self.session, Some(Session { asked: None, .. })) {
            let size = reduced.unwrap_or(self.wanted);
            self.to_ask = (size != self.granted).then_some(size);
            if self.to_ask.is_some() {
                self.retry_at = None;
                self.reduced = reduced.is_some();
            }
        }
        self.fit_capacity(index, actions);
    }

    /// Adapts the number of usable slots to the granted and the wanted size. Takes only the first step of that change.
    fn fit_capacity<M: DerefMut<Target = [u32]>>(&mut self, index: &mut CacheIndex<M>, actions: &mut VecDeque<Action>) {
        self.aim(index);
        self.go_on_with_size(index, actions);
    }

    /// Sets the capacity that the index works towards. It shrinks, which moves pages, only while no SETSIZE is outstanding
    /// and fewer than [`MOVES_MAX`] moves were made.
    fn aim<M: DerefMut<Target = [u32]>>(&self, index: &mut CacheIndex<M>) {
        let (granted, wanted, capacity) = (self.granted, self.wanted, index.capacity(POOL));
        if self.is_up() {
            index.lose_from(POOL, granted);
        }
        index.aim(
            POOL,
            match self.session {
                None => capacity,
                Some(Session { asked: None, .. }) if self.moves < MOVES_MAX => granted.min(wanted),
                Some(Session { asked, .. }) => granted.min(asked.unwrap_or(granted)).min(wanted.max(capacity)),
            },
        );
    }

    /// Takes the next step of a change of size. Sends the SETSIZE once the capacity fits it, or after [`MOVES_MAX`] moves.
    fn go_on_with_size<M>(&mut self, index: &mut CacheIndex<M>, actions: &mut VecDeque<Action>)
    where
        M: DerefMut<Target = [u32]>,
    {
        let Some(server) = self.server() else {
            index.resize(POOL, self.slots_per_turn.min(MOVES_MAX), |_| panic!("pages move without a session"));
            return;
        };
        let moves = &mut self.moves;
        index.resize(POOL, self.slots_per_turn.min(MOVES_MAX), |Move { from, to }| {
            *moves += 1;
            actions.push_back(Action::MovePage { server, from, to });
        });
        let capacity = index.capacity(POOL);
        match self.to_ask {
            Some(size) if capacity <= size => self.set_size(size, index, actions),
            Some(_) if self.moves >= MOVES_MAX => self.set_size(capacity, index, actions),
            _ if self.moves >= MOVES_MAX => self.aim(index),
            _ => {}
        }
    }

    fn set_size<M>(&mut self, size: PageCount, index: &mut CacheIndex<M>, actions: &mut VecDeque<Action>)
    where
        M: DerefMut<Target = [u32]>,
    {
        self.to_ask = None;
        self.moves = 0;
        if let Some(session) = &mut self.session {
            session.asked = Some(size);
            actions.push_back(Action::SetSize { server: session.seat.server(), npages: size });
        }
        self.log_end = Some(index.log_end(POOL));
        self.aim(index);
    }
}
