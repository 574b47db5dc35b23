//! The link to the memory server: outstanding requests, and what is lost with a connection.

use super::placement::Need;
use super::{
    Action, Admission, DiskEngine, FetchId, PageOutcome, Pages, PoolOffer, ReadReason, RequestId, ServerNumber,
};
use crate::fingerprint::Fingerprint;
use crate::index::{LogEnd, Pool};
use crate::rules::Rule;
use crate::units::{BlockId, Nanos, PageCount, SlotIndex};
use std::ops::DerefMut;

/// How long a server may owe an answer before it is given up, and connected to again.
const SILENCE_NS: u64 = 10_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Down,
    /// A SETSIZE may be waiting for its answer.
    Up {
        asked: Option<PageCount>,
    },
}

/// The state of the connection and of the pool behind it.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) state: State,
    pub(super) wanted: PageCount,
    pub(super) granted: PageCount,
    pub(super) retry_at: Option<Nanos>,
    /// Size that the server is asked for as soon as no more slots are usable.
    pub(super) to_ask: Option<PageCount>,
    /// Moves since the last SETSIZE.
    pub(super) moves: u32,
    /// The size asked for last is what a refusal left possible, not what is wanted.
    pub(super) reduced: bool,
    /// Since when the server owes answers and has given none.
    silent_since: Option<Nanos>,
    /// Since when the server owes an answer to a SETSIZE; set by the first timer after it was sent.
    pub(super) size_owed_since: Option<Nanos>,
    /// Where the log of sends ended when the SETSIZE was sent.
    pub(super) log_end: Option<LogEnd>,
    window: u32,
    room: u32,
}

impl Link {
    pub(super) fn new(wanted: PageCount, window: u32) -> Self {
        Self {
            state: State::Down,
            wanted,
            granted: PageCount(0),
            retry_at: None,
            to_ask: None,
            moves: 0,
            reduced: false,
            silent_since: None,
            size_owed_since: None,
            log_end: None,
            window,
            room: window,
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.state != State::Down
    }

    pub(super) fn wanted(&self) -> PageCount {
        self.wanted
    }

    pub(super) fn granted(&self) -> PageCount {
        self.granted
    }

    fn is_size_owed(&self) -> bool {
        matches!(self.state, State::Up { asked: Some(_) })
    }

    /// Returns when a server that owes an answer is given up; at once where nobody has looked at the clock yet.
    fn silence_deadline(&self) -> Option<Nanos> {
        let silent = self.silent_since.map(|since| since.plus_ns(SILENCE_NS));
        let owed = self.is_size_owed().then(|| self.size_owed_since.map_or(Nanos(0), |at| at.plus_ns(SILENCE_NS)));
        [silent, owed].into_iter().flatten().min()
    }

    /// Notes that an answer is late.
    pub(super) fn note_silence(&mut self, now: Nanos) {
        self.silent_since.get_or_insert(now);
    }

    pub(super) fn can_send(&self) -> bool {
        self.is_up() && self.room > 0
    }

    pub(super) fn note_send(&mut self) {
        self.room -= 1;
    }
}

/// One outstanding REQUEST.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetch {
    pub(super) request: RequestId,
    /// Of the request, which tells it from later ones with the same number.
    pub(super) serial: u64,
    pub(super) block: BlockId,
    pub(super) slot: SlotIndex,
    pub(super) content: Fingerprint,
    /// Where the page belongs in the request.
    pub(super) offset: u32,
    /// The server was on trial.
    pub(super) probe: bool,
}

/// The outstanding REQUESTs, at most `limit`.
#[derive(Debug)]
pub(super) struct Fetches {
    table: Vec<Option<Fetch>>,
    free: Vec<u32>,
    limit: u32,
}

impl Fetches {
    pub(super) fn new(limit: u32) -> Self {
        Self { table: Vec::new(), free: Vec::new(), limit }
    }

    pub(super) fn has_room(&self, count: u32) -> bool {
        let used = self.table.len() - self.free.len();
        used + count as usize <= self.limit as usize
    }

    pub(super) fn begin(&mut self, fetch: Fetch) -> FetchId {
        if let Some(at) = self.free.pop() {
            self.table[at as usize] = Some(fetch);
            return FetchId(at);
        }
        self.table.push(Some(fetch));
        FetchId(u32::try_from(self.table.len() - 1).unwrap_or(u32::MAX))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.table.len() == self.free.len()
    }

    fn end(&mut self, id: FetchId) -> Option<Fetch> {
        let fetch = self.table.get_mut(id.0 as usize)?.take()?;
        self.free.push(id.0);
        Some(fetch)
    }

    pub(super) fn drain(&mut self) -> Vec<Fetch> {
        self.free.clear();
        self.table.drain(..).flatten().collect()
    }
}

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// Begins the session with `server`, which said what it has for this VM.
    pub(super) fn begin_session(&mut self, server: ServerNumber, offer: PoolOffer) {
        debug_assert!(!self.link.is_up(), "connected twice");
        self.stats.connections += 1;
        self.link.state = State::Up { asked: None };
        self.link.room = self.link.window;
        let pool = Pool { server: server.0, generation: offer.generation };
        let is_same = |known: Pool| {
            known.generation == pool.generation && (known == pool || !self.rules.hold(Rule::PoolOfOneServer))
        };
        if self.index.pool().is_some_and(is_same) {
            // Pages that were on the way when the connection broke: their slots hold something older.
            if self.rules.hold(Rule::LostSends) {
                self.stats.lost_sends += self.index.give_up_sends(offer.sends_received);
            }
        } else {
            self.index.drop_all_slots();
        }
        self.index.begin_pool(pool, offer.sends_received);
        self.link.granted = offer.npages;
        self.ask_size(None);
    }

    /// Ends the session: what was asked of the server is asked of the disk.
    pub(super) fn end_session(&mut self, now: Nanos) {
        self.link.state = State::Down;
        self.link.silent_since = None;
        self.link.size_owed_since = None;
        self.link.retry_at = None;
        self.link.to_ask = None;
        self.link.moves = 0;
        self.fit_capacity();
        self.hedging.forget_server();
        for fetch in self.fetches.drain() {
            self.index.unpin(fetch.slot);
        }
        for at in 0..self.requests.len() {
            if self.requests[at].is_some_and(|request| request.waits()) {
                self.stats.fetch_disconnected += 1;
                self.give_up_pages(now, RequestId(u32::try_from(at).unwrap_or(u32::MAX)));
            }
        }
    }

    pub(super) fn need(&self) -> Need {
        let pool = self.index.pool().map(|pool| (ServerNumber(pool.server), pool.generation));
        let settled = !self.link.is_size_owed() && self.link.to_ask.is_none();
        Need { wanted: self.link.wanted, granted: self.link.granted, settled, pool }
    }

    /// Notes that pages left for the network, which makes room for as many.
    pub fn handle_sent(&mut self, pages: u32) {
        self.link.room = self.link.room.saturating_add(pages).min(self.link.window);
    }

    /// Handles the page that the server sent for `fetch`.
    pub fn handle_page(&mut self, now: Nanos, fetch: FetchId, page: &[u8]) -> PageOutcome {
        let Some(fetch) = self.fetches.end(fetch) else {
            self.stats.fetch_unexpected += 1;
            return PageOutcome::Unexpected;
        };
        self.note_answer(now);
        self.index.unpin(fetch.slot);
        let Some((left, asked)) = self.pending(&fetch) else {
            self.stats.fetch_late += 1;
            if !fetch.probe {
                self.hedging.note_life(now);
            }
            return PageOutcome::Late;
        };
        if self.rules.hold(Rule::FetchCheck) && self.prints.page(page) != fetch.content {
            self.stats.fetch_wrong += 1;
            self.give_up_fetch(now, &fetch);
            return PageOutcome::Wrong;
        }
        // The block may have been written meanwhile; then the slot is only a copy of what it was.
        if self.index.cached(fetch.content) == Some(fetch.slot) {
            // Where pages are admitted as they are read, nobody sends it again.
            let promote = self.sources.admission() == Admission::Reads && !self.is_swap(fetch.block);
            self.index.hit(fetch.block, fetch.slot, promote);
        }
        if left > 1 {
            if let Some(request) = &mut self.requests[fetch.request.0 as usize] {
                request.pages = Pages::Waiting { left: left - 1, asked };
            }
        } else if let Some(request) = self.request(fetch.request) {
            self.complete_from_cache(fetch.request, asked);
            self.note_server_first(now, &request);
        }
        PageOutcome::Deliver { request: fetch.request, offset: fetch.offset }
    }

    /// Handles the answer that the server does not have the page for `fetch`.
    pub fn handle_missing(&mut self, now: Nanos, fetch: FetchId) {
        let Some(fetch) = self.fetches.end(fetch) else {
            self.stats.fetch_unexpected += 1;
            return;
        };
        self.note_answer(now);
        self.index.unpin(fetch.slot);
        self.stats.fetch_missing += 1;
        self.give_up_fetch(now, &fetch);
    }

    /// Notes an answer that the server owed. What was not asked for is no sign of life: a server could send it for ever
    /// and never answer.
    pub(super) fn note_answer(&mut self, now: Nanos) {
        self.link.silent_since = (!self.fetches.is_empty()).then_some(now);
    }

    /// Returns how many pages the read of `fetch` still waits for, and of how many; `None` if it was answered some
    /// other way.
    fn pending(&self, fetch: &Fetch) -> Option<(u32, u32)> {
        let request = self.request(fetch.request)?;
        match request.pages {
            Pages::Waiting { left, asked } if request.serial == fetch.serial && request.waits() => Some((left, asked)),
            Pages::Waiting { .. } | Pages::None | Pages::GivenUp => None,
        }
    }

    fn give_up_fetch(&mut self, now: Nanos, fetch: &Fetch) {
        if self.index.cached(fetch.content) == Some(fetch.slot) {
            self.index.drop_slot(fetch.slot);
        }
        if self.pending(fetch).is_some() {
            self.give_up_pages(now, fetch.request);
        }
    }

    /// Gives up the pages of a read, which only the disk can answer now. It may already be reading.
    pub(super) fn give_up_pages(&mut self, now: Nanos, id: RequestId) {
        let Some(request) = &mut self.requests[id.0 as usize] else { return };
        request.pages = Pages::GivenUp;
        let request = *request;
        self.note_no_page(&request);
        if request.io.is_none() {
            self.ask_disk(now, id, ReadReason::Needed);
        }
    }

    /// Returns whether one more page may go to the server.
    pub(super) fn may_send(&mut self) -> bool {
        self.link.can_send() && self.hedging.admits()
    }

    /// Returns when `handle_timer` wants to be called at the latest.
    pub fn next_deadline(&mut self) -> Option<Nanos> {
        [self.late_deadline(), self.other_deadline()].into_iter().flatten().min()
    }

    /// Returns when to wake up if nothing happens before: later than the deadline, where that is about one late read of
    /// several.
    pub fn next_wake(&mut self) -> Option<Nanos> {
        let late = self.late_deadline().map(|at| at.plus_ns(self.slack_ns()));
        [late, self.other_deadline()].into_iter().flatten().min()
    }

    fn other_deadline(&self) -> Option<Nanos> {
        let place = self.placement.deadline(&self.need());
        let size = self.index.is_resizing().then_some(Nanos(0));
        [self.link.retry_at, self.link.silence_deadline(), place, size].into_iter().flatten().min()
    }

    /// Does what is due: late reads also go to the disk, sizes are asked for again, a silent server is given up, others
    /// are asked.
    pub fn handle_timer(&mut self, now: Nanos) {
        self.ask_for_late(now);
        if self.index.is_resizing() {
            self.go_on_with_size();
        }
        if self.link.retry_at.is_some_and(|at| at <= now) {
            self.link.retry_at = None;
            self.ask_size(None);
        }
        if self.link.is_size_owed() {
            self.link.size_owed_since.get_or_insert(now);
        }
        if self.link.silence_deadline().is_some_and(|at| at <= now) {
            self.stats.disconnections += 1;
            self.actions.push_back(Action::GiveUp);
            self.placement.silent(now);
            self.end_session(now);
        }
        self.place(now);
    }
}
