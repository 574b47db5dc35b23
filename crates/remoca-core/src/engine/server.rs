//! The link to the memory server: outstanding requests, and what is lost with a connection.

use super::placement::Need;
use super::{
    Action, Admission, DiskEngine, FetchId, GuestOp, PageOutcome, Phase, PoolOffer, RequestId, ServerNumber,
    block_count, update_mean,
};
use crate::fingerprint::Fingerprint;
use crate::rules::Rule;
use crate::units::{BlockId, Nanos, PageCount, SlotIndex};
use std::collections::VecDeque;
use std::ops::DerefMut;

/// A server that owes an answer for so long is given up, and connected to anew.
const SILENCE_NS: u64 = 10_000_000_000;
/// A fetch is late after twice the disk's mean, within these bounds.
const TIMEOUT_MIN_NS: u64 = 5_000_000;
const TIMEOUT_MAX_NS: u64 = 500_000_000;
/// Sends that are remembered in order to know which of them a lost connection took along.
const SEND_LOG: usize = 16 * 1024;

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
    /// The size asked for last is what a refusal left possible, not what is wanted.
    pub(super) reduced: bool,
    /// Since when the server owes an answer that is late.
    stalled_since: Option<Nanos>,
    /// Since when the server owes an answer to a SETSIZE; set by the first timer after it was sent.
    pub(super) size_owed_since: Option<Nanos>,
    /// The pool that the index is about: its server and its generation.
    pool: Option<(ServerNumber, u64)>,
    /// SENDPAGEs for this pool since it started, and the slots of the newest of them.
    pub(super) sends: u64,
    /// (number of the send, slot); a MOVE carries the number of the next send.
    log: VecDeque<(u64, SlotIndex)>,
    /// The log is complete for a server that has stored at least so many sends.
    log_from: u64,
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
            reduced: false,
            stalled_since: None,
            size_owed_since: None,
            pool: None,
            sends: 0,
            log: VecDeque::with_capacity(SEND_LOG),
            log_from: 0,
            window,
            room: window,
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.state != State::Down
    }

    pub(super) fn is_stalled(&self) -> bool {
        self.stalled_since.is_some()
    }

    pub(super) fn wanted(&self) -> PageCount {
        self.wanted
    }

    pub(super) fn granted(&self) -> PageCount {
        self.granted
    }

    pub(super) fn need(&self) -> Need {
        Need { wanted: self.wanted, granted: self.granted, settled: !self.is_size_owed(), pool: self.pool }
    }

    fn is_size_owed(&self) -> bool {
        matches!(self.state, State::Up { asked: Some(_) })
    }

    /// When a server that owes an answer is given up; at once where nobody has looked at the clock yet.
    fn silence_deadline(&self) -> Option<Nanos> {
        let stalled = self.stalled_since.map(|since| since.plus_ns(SILENCE_NS));
        let owed = self.is_size_owed().then(|| self.size_owed_since.map_or(Nanos(0), |at| at.plus_ns(SILENCE_NS)));
        [stalled, owed].into_iter().flatten().min()
    }

    pub(super) fn can_fetch(&self) -> bool {
        self.is_up() && !self.is_stalled()
    }

    pub(super) fn can_send(&self) -> bool {
        self.is_up() && self.room > 0
    }

    pub(super) fn note_send(&mut self, slot: SlotIndex) {
        self.room -= 1;
        self.log(self.sends, slot);
        // The count starts from what the server says, which may be anything.
        self.sends = self.sends.saturating_add(1);
    }

    pub(super) fn log(&mut self, number: u64, slot: SlotIndex) {
        if self.log.len() == SEND_LOG
            && let Some((forgotten, _)) = self.log.pop_front()
        {
            self.log_from = forgotten.saturating_add(1);
        }
        self.log.push_back((number, slot));
    }

    /// The pool has stored `sends` pages; nothing is on the way.
    fn restart_log(&mut self, sends: u64) {
        self.log.clear();
        self.sends = sends;
        self.log_from = sends;
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
    pub(super) issued: Nanos,
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

    fn end(&mut self, id: FetchId) -> Option<Fetch> {
        let fetch = self.table.get_mut(id.0 as usize)?.take()?;
        self.free.push(id.0);
        Some(fetch)
    }

    fn drain(&mut self) -> Vec<Fetch> {
        self.free.clear();
        self.table.drain(..).flatten().collect()
    }
}

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// The connection to `server` is the session, and it said what it has for this VM.
    pub(super) fn begin_session(&mut self, server: ServerNumber, offer: PoolOffer) {
        debug_assert!(!self.link.is_up(), "connected twice");
        self.stats.connections += 1;
        self.link.state = State::Up { asked: None };
        self.link.room = self.link.window;
        let is_same = |(known, generation): (ServerNumber, u64)| {
            generation == offer.generation && (known == server || !self.rules.hold(Rule::PoolOfOneServer))
        };
        if self.link.pool.is_some_and(is_same) {
            self.give_up_lost_sends(offer);
        } else {
            self.index.drop_all_slots();
            self.link.restart_log(offer.sends_received);
        }
        self.link.pool = Some((server, offer.generation));
        self.link.granted = offer.npages;
        self.fit_capacity();
        self.ask_size(None);
    }

    /// There is no session any more: what was asked of the server is asked of the disk.
    pub(super) fn end_session(&mut self) {
        self.link.state = State::Down;
        self.link.stalled_since = None;
        self.link.size_owed_since = None;
        self.link.retry_at = None;
        for fetch in self.fetches.drain() {
            self.index.unpin(fetch.slot);
        }
        for at in 0..self.requests.len() {
            if self.requests[at].is_some_and(|r| matches!(r.phase, Phase::Fetching { .. })) {
                self.stats.fetch_disconnected += 1;
                self.fall_back(RequestId(u32::try_from(at).unwrap_or(u32::MAX)));
            }
        }
    }

    /// Pages that were on the way when the connection broke: their slots hold something older.
    fn give_up_lost_sends(&mut self, offer: PoolOffer) {
        if offer.sends_received < self.link.log_from || offer.sends_received > self.link.sends {
            self.stats.lost_sends += u64::from(self.index.slot_counts().used);
            self.index.drop_all_slots();
        } else {
            while let Some((number, slot)) = self.link.log.pop_back() {
                if number < offer.sends_received {
                    break;
                }
                self.stats.lost_sends += 1;
                self.index.drop_slot(slot);
            }
        }
        self.link.restart_log(offer.sends_received);
    }

    /// So many pages left for the network: there is room for as many again.
    pub fn handle_sent(&mut self, pages: u32) {
        self.link.room = self.link.room.saturating_add(pages).min(self.link.window);
    }

    /// The server sent the page for `fetch`.
    pub fn handle_page(&mut self, now: Nanos, fetch: FetchId, page: &[u8]) -> PageOutcome {
        let Some(fetch) = self.fetches.end(fetch) else {
            self.stats.fetch_unexpected += 1;
            return PageOutcome::Unexpected;
        };
        self.note_answer();
        self.index.unpin(fetch.slot);
        update_mean(&mut self.fetch_ns, now.since_ns(fetch.issued));
        let Some((left, asked)) = self.pending(&fetch) else {
            self.stats.fetch_late += 1;
            return PageOutcome::Late;
        };
        if self.rules.hold(Rule::FetchCheck) && self.prints.page(page) != fetch.content {
            self.stats.fetch_wrong += 1;
            self.give_up_fetch(&fetch);
            return PageOutcome::Wrong;
        }
        // The block may have been written meanwhile; then the slot is only a copy of what it was.
        if self.index.cached(fetch.content) == Some(fetch.slot) {
            // Where pages are admitted as they are read, nobody sends it again.
            let promote = self.sources.admission() == Admission::Reads && !self.is_swap(fetch.block);
            self.index.hit(fetch.block, fetch.slot, promote);
        }
        if left == 1 {
            self.complete_from_cache(fetch.request, asked);
        } else if let Some(request) = &mut self.requests[fetch.request.0 as usize] {
            request.phase = Phase::Fetching { left: left - 1, asked };
        }
        PageOutcome::Deliver { request: fetch.request, offset: fetch.offset }
    }

    /// The server does not have the page for `fetch`.
    pub fn handle_missing(&mut self, fetch: FetchId) {
        let Some(fetch) = self.fetches.end(fetch) else {
            self.stats.fetch_unexpected += 1;
            return;
        };
        self.note_answer();
        self.index.unpin(fetch.slot);
        self.stats.fetch_missing += 1;
        self.give_up_fetch(&fetch);
    }

    /// The server answered something that it owed. What nobody asked for is no sign of life: a server could send it for
    /// ever and never answer.
    pub(super) fn note_answer(&mut self) {
        self.link.stalled_since = None;
    }

    /// How many pages the read of `fetch` still waits for, and of how many; `None` if it was answered some other way.
    fn pending(&self, fetch: &Fetch) -> Option<(u32, u32)> {
        let request = self.request(fetch.request)?;
        match request.phase {
            Phase::Fetching { left, asked } if request.serial == fetch.serial => Some((left, asked)),
            Phase::Fetching { .. } | Phase::Disk => None,
        }
    }

    fn give_up_fetch(&mut self, fetch: &Fetch) {
        if self.index.cached(fetch.content) == Some(fetch.slot) {
            self.index.drop_slot(fetch.slot);
        }
        if self.pending(fetch).is_some() {
            self.fall_back(fetch.request);
        }
    }

    /// The disk answers a read that waits for the server.
    pub(super) fn fall_back(&mut self, id: RequestId) {
        if let Some(request) = &mut self.requests[id.0 as usize]
            && let GuestOp::Read(range) = request.op
        {
            request.fell_back = true;
            let disk = request.disk;
            self.stats.missed_blocks += block_count(range);
            self.read_from_disk(id, disk, range);
        }
    }

    pub(super) fn fetch_timeout_ns(&self) -> u64 {
        (self.disk_read_ns * 2).clamp(TIMEOUT_MIN_NS, TIMEOUT_MAX_NS)
    }

    /// When `handle_timer` wants to be called at the latest.
    pub fn next_deadline(&mut self) -> Option<Nanos> {
        while let Some(&(_, id, serial)) = self.deadlines.front()
            && !self.is_waiting(id, serial)
        {
            self.deadlines.pop_front();
        }
        let fetch = self.deadlines.front().map(|(at, _, _)| *at);
        let place = self.placement.deadline(&self.link.need());
        [fetch, self.link.retry_at, self.link.silence_deadline(), place].into_iter().flatten().min()
    }

    fn is_waiting(&self, id: RequestId, serial: u64) -> bool {
        self.request(id).is_some_and(|r| r.serial == serial && matches!(r.phase, Phase::Fetching { .. }))
    }

    /// Time has passed: late fetches go to the disk, sizes are asked for again, a silent server is given up, others are
    /// asked.
    pub fn handle_timer(&mut self, now: Nanos) {
        while let Some(&(at, id, serial)) = self.deadlines.front()
            && at <= now
        {
            self.deadlines.pop_front();
            if self.is_waiting(id, serial) {
                self.stats.fetch_timeouts += 1;
                self.link.stalled_since.get_or_insert(now);
                self.fall_back(id);
            }
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
            self.end_session();
        }
        self.place(now);
    }
}
