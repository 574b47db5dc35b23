//! Placement of the pools: which servers are asked, and which offers are taken.
//!
//! Without a session, every server is asked as soon as its backoff allows. With sessions, that is so for the servers of
//! lost pools; the others are asked only while the cache is smaller than wanted, or on fewer servers than it should be, or
//! once a minute if they failed, so that the operator learns whether they are back. A server that still has a pool is chosen
//! at once. Otherwise the other answers are awaited for a short time, and as many servers are drawn as are needed
//! (`candidates.rs`). A pool never moves: others join it. A server that was taken out of the list is known as long as it has
//! a pool that is drained, and is asked for that one only.
//! 1. Every `Ask` gets one answer, and every connection that answered is either used or released.
//! 2. A session begins and ends in `handle_answer`, `handle_timer`, `handle_disconnected` and `set_servers` only, never
//!    while frames of a server are handled.
//!
//! Decision 0014.

use super::candidates::{Candidate, draw};
use super::need::{Choice, DRAIN_MAX_NS, LostPool, Need, SPREAD_MIN, SPREAD_POOLS, Standing};
use super::random::Random;
use super::types::{Action, PoolOffer, ServerNumber};
use crate::units::{Nanos, PageCount};
use std::collections::VecDeque;

/// Shortest and longest time, in nanoseconds, before a server that gave nothing is asked again.
pub(super) const BACKOFF_MIN_NS: u64 = 100_000_000;
pub(super) const BACKOFF_MAX_NS: u64 = 5_000_000_000;
/// Time, in nanoseconds, to wait for other answers after the first one.
const PATIENCE_NS: u64 = 500_000_000;
/// Minimum interval between searches for another pool, and between questions to a server that failed and is not needed.
const LOOK_PAUSE_NS: u64 = 60_000_000_000;
/// Minimum interval between searches while the servers grant nothing.
const EMPTY_PAUSE_NS: u64 = 10_000_000_000;
/// Time, in nanoseconds, for which a server that granted less than it offered is not trusted to have more.
const DISTRUST_NS: u64 = 600_000_000_000;
#[derive(Clone, Copy, Debug)]
enum State {
    /// It may be asked from this time on.
    Idle(Nanos),
    Asked,
    /// It made this offer at this time; its connection waits to be used or released.
    Answered(PoolOffer, Nanos),
    InUse,
}

#[derive(Debug)]
struct Server {
    number: ServerNumber,
    state: State,
    backoff_ns: u64,
    /// Whether it could not be reached when it was asked last, or has lost its session since.
    failed: bool,
    /// Size that the server granted although it had offered more, and when it did.
    gave: Option<(PageCount, Nanos)>,
    /// Median latency of its pages, when it last had a pool.
    latency_ns: Option<u64>,
    /// When it was taken out of the list; `None` if it is listed.
    leaves_since: Option<Nanos>,
}

impl Server {
    fn is_listed(&self) -> bool {
        self.leaves_since.is_none()
    }

    /// Delays the next `Ask` to this server by its backoff plus jitter, and doubles the backoff up to its maximum.
    fn fail(&mut self, now: Nanos, random: &mut Random) {
        self.state = State::Idle(now.plus_ns(random.stretch(self.backoff_ns)));
        self.backoff_ns = (self.backoff_ns * 2).clamp(BACKOFF_MIN_NS, BACKOFF_MAX_NS);
    }

    /// Returns when a server that failed is asked although it is not needed, or `None` for any other server.
    fn look_again_at(&self) -> Option<Nanos> {
        match self.state {
            State::Idle(at) if self.failed && self.is_listed() => Some(at.plus_ns(LOOK_PAUSE_NS)),
            State::Idle(_) | State::Asked | State::Answered(..) | State::InUse => None,
        }
    }

    /// Returns the size that the server can grant this VM, as far as its offer is trusted.
    fn can_give(&self, offer: &PoolOffer, now: Nanos) -> PageCount {
        match self.gave {
            Some((gave, at)) if now.since_ns(at) < DISTRUST_NS => offer.possible().min(gave),
            _ => offer.possible(),
        }
    }
}

/// Place of a pool during one session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    server: ServerNumber,
    since: Nanos,
    /// Size that the server offered.
    possible: PageCount,
}

impl Seat {
    /// Returns the place of a pool whose session begins now.
    pub(super) fn new(now: Nanos, choice: &Choice) -> Self {
        Self { server: choice.server, since: now, possible: choice.offer.possible() }
    }

    /// Returns the server that has the pool.
    pub(super) fn server(&self) -> ServerNumber {
        self.server
    }
}

/// State of all servers.
#[derive(Debug)]
pub(super) struct Placement {
    servers: Vec<Server>,
    /// Whether servers without a pool were asked for one, and the decision is pending.
    looking: bool,
    /// Time at which they were last asked; `None` if something has changed since.
    looked_at: Option<Nanos>,
    /// Random share of the jitter in the next pause, 0 to 255.
    jitter: u64,
    random: Random,
}

impl Placement {
    pub(super) fn new(seed: u64) -> Self {
        Self { servers: Vec::new(), looking: false, looked_at: None, jitter: 0, random: Random(seed) }
    }

    fn server(&mut self, number: ServerNumber) -> Option<&mut Server> {
        self.servers.iter_mut().find(|server| server.number == number)
    }

    /// Returns whether the server is in the list, or has a pool that is drained.
    pub(super) fn has(&self, number: ServerNumber) -> bool {
        self.servers.iter().any(|server| server.number == number)
    }

    /// Returns what a server is to the operator. One that was taken out of the list too long ago is gone.
    pub(super) fn standing(&self, now: Nanos, number: ServerNumber) -> Standing {
        let server = self.servers.iter().find(|server| server.number == number);
        match server.map(|server| server.leaves_since) {
            Some(None) => Standing::Listed,
            Some(Some(since)) if now < since.plus_ns(DRAIN_MAX_NS) => Standing::Leaving,
            Some(Some(_)) | None => Standing::Gone,
        }
    }

    /// Returns when a server was taken out of the list, or `None` if it is listed or not known.
    pub(super) fn leaves_since(&self, number: ServerNumber) -> Option<Nanos> {
        self.servers.iter().find(|server| server.number == number)?.leaves_since
    }

    /// Replaces the list of servers. Those of `leaving` are not in it, and have a pool that is drained; those of `seated`
    /// have a session.
    pub(super) fn replace(
        &mut self,
        now: Nanos,
        listed: &[ServerNumber],
        leaving: &[ServerNumber],
        seated: impl Fn(ServerNumber) -> bool,
        actions: &mut VecDeque<Action>,
    ) {
        self.keep_only(|number| listed.contains(&number) || leaving.contains(&number), actions);
        for &number in listed.iter().chain(leaving) {
            if !self.has(number) {
                let state = if seated(number) { State::InUse } else { State::Idle(now) };
                let (backoff_ns, failed) = (BACKOFF_MIN_NS, false);
                let (gave, latency_ns, leaves_since) = (None, None, None);
                self.servers.push(Server { number, state, backoff_ns, failed, gave, latency_ns, leaves_since });
            }
        }
        for server in &mut self.servers {
            let leaves = leaving.contains(&server.number);
            server.leaves_since = leaves.then(|| server.leaves_since.unwrap_or(now));
        }
        // One of the old servers may never answer; the new ones are still asked.
        self.looking = false;
        self.look_soon();
    }

    fn keep_only(&mut self, stays: impl Fn(ServerNumber) -> bool, actions: &mut VecDeque<Action>) {
        self.servers.retain(|server| {
            let stays = stays(server.number);
            if !stays && matches!(server.state, State::Answered(..)) {
                actions.push_back(Action::Release(server.number));
            }
            stays
        });
    }

    /// Forgets the servers that are not in the list and have no pool any more.
    pub(super) fn forget_left(&mut self, has_pool: impl Fn(ServerNumber) -> bool, actions: &mut VecDeque<Action>) {
        if self.servers.iter().any(|server| !server.is_listed() && !has_pool(server.number)) {
            let listed: Vec<_> = self.servers.iter().filter(|server| server.is_listed()).map(|it| it.number).collect();
            self.keep_only(|number| listed.contains(&number) || has_pool(number), actions);
        }
    }

    /// Stores the offer of a server, or delays the next `Ask` to it if `offer` is `None`: there is no connection.
    /// Returns whether the server is still in the list, and has no session. It has one if it was asked twice, because it was taken
    /// out of the list meanwhile.
    pub(super) fn answer(&mut self, now: Nanos, number: ServerNumber, offer: Option<PoolOffer>) -> bool {
        let Some(at) = self.servers.iter().position(|server| server.number == number) else { return false };
        if matches!(self.servers[at].state, State::InUse) {
            return false;
        }
        self.servers[at].failed = offer.is_none();
        match offer {
            Some(offer) => self.servers[at].state = State::Answered(offer, now),
            None => self.servers[at].fail(now, &mut self.random),
        }
        true
    }

    /// Gives up `seat`, because the session's connection was lost. A server whose session lasted may be asked again at
    /// once. Otherwise its backoff applies, and its offers are disregarded for a while.
    pub(super) fn lost(&mut self, now: Nanos, seat: Seat) {
        let lasted = now.since_ns(seat.since) >= BACKOFF_MAX_NS;
        if !lasted {
            self.distrust(now, seat.server);
        }
        self.end(now, seat, lasted.then_some(0));
    }

    /// Gives the server of `seat`, which was silent for too long, the longest backoff, so that others are asked first.
    /// Disregards its offers for a while.
    pub(super) fn silent(&mut self, now: Nanos, seat: Seat) {
        self.distrust(now, seat.server);
        self.end(now, seat, Some(BACKOFF_MAX_NS));
    }

    /// Gives up `seat`, because its pool was drained.
    pub(super) fn left(&mut self, now: Nanos, seat: Seat) {
        if let Some(server) = self.server(seat.server) {
            server.state = State::Idle(now);
        }
    }

    /// Disregards the offers of a server for a while, because it offered memory and then did not serve.
    fn distrust(&mut self, now: Nanos, number: ServerNumber) {
        if let Some(server) = self.server(number) {
            server.gave = Some((PageCount(0), now));
        }
    }

    fn end(&mut self, now: Nanos, seat: Seat, backoff_ns: Option<u64>) {
        if let Some(server) = self.servers.iter_mut().find(|server| server.number == seat.server) {
            server.backoff_ns = backoff_ns.unwrap_or(server.backoff_ns);
            server.failed = true;
            server.fail(now, &mut self.random);
        }
    }

    /// Makes the next search for another pool due at once.
    pub(super) fn look_soon(&mut self) {
        self.looked_at = None;
    }

    /// Returns the earliest time of the next search for another pool.
    fn look_at(&self, need: &Need) -> Nanos {
        let pause = if need.granted.0 == 0 { EMPTY_PAUSE_NS } else { LOOK_PAUSE_NS };
        self.looked_at.map_or(Nanos(0), |at| at.plus_ns(pause + pause / 1024 * self.jitter))
    }

    /// Records `granted` if the server of `seat` gave less than it had offered and was `asked` for. Otherwise clears the
    /// record.
    pub(super) fn note_size(&mut self, now: Nanos, seat: Seat, granted: PageCount, asked: PageCount) {
        let Seat { server, possible, .. } = seat;
        if let Some(server) = self.server(server) {
            server.gave = (granted < possible.min(asked)).then_some((granted, now));
        }
    }

    /// Stores the median latency of a server's pages.
    pub(super) fn note_latency(&mut self, number: ServerNumber, latency_ns: u64) {
        if let Some(server) = self.server(number) {
            server.latency_ns = Some(latency_ns);
        }
    }

    /// Returns whether to search for another pool now: while sizes change, it is not known what is missing.
    fn wants_pool(&self, need: &Need) -> bool {
        need.settled && self.lacks_pool(need)
    }

    /// Returns whether the cache needs another pool: for more memory, or so that the loss of one costs less.
    fn lacks_pool(&self, need: &Need) -> bool {
        let listed = || self.servers.iter().filter(|server| server.is_listed());
        let others = listed().filter(|server| !matches!(server.state, State::InUse));
        let lacks_spread = need.wanted >= SPREAD_MIN && need.members() < SPREAD_POOLS.min(listed().count());
        need.seats > 0
            && need.can_add
            && (need.missing() > 0 || lacks_spread)
            && others.filter(|server| need.lost_at(server.number).is_none()).count() > 0
    }

    /// Returns the time at which the timer must be handled, or `None` if there is nothing to do. `need` is asked for only if it matters:
    /// most of the time every server has a pool, and this is part of each turn.
    pub(super) fn deadline(&self, need: impl FnOnce() -> Need) -> Option<Nanos> {
        let may_have_work = |server: &Server| matches!(server.state, State::Idle(_) | State::Answered(..));
        let need = &self.servers.iter().any(may_have_work).then(need)?;
        let decide = self.first_answer().map(|at| at.plus_ns(PATIENCE_NS));
        let lost = self.first_idle(|server| may_ask(server, need, need.seats == 0));
        let look = (!self.looking && self.wants_pool(need))
            .then(|| self.first_idle(Server::is_listed).map(|at| at.max(self.look_at(need))))
            .flatten();
        let failed = (!self.lacks_pool(need)).then(|| self.servers.iter().filter_map(Server::look_again_at).min());
        [decide, lost, look, failed.flatten()].into_iter().flatten().min()
    }

    /// Returns the earliest time at which one of these servers may be asked, or `None` if none of them is idle.
    fn first_idle(&self, these: impl Fn(&Server) -> bool) -> Option<Nanos> {
        let at = |server: &Server| if let State::Idle(at) = server.state { Some(at) } else { None };
        self.servers.iter().filter(|server| these(server)).filter_map(at).min()
    }

    fn first_answer(&self) -> Option<Nanos> {
        let at = |server: &Server| if let State::Answered(_, at) = server.state { Some(at) } else { None };
        self.servers.iter().filter_map(at).min()
    }

    /// Asks servers that are due. During a session, these are those of lost pools and, if a search is due, all others. While no other
    /// pool is needed, they are also those that failed a minute ago.
    pub(super) fn ask(&mut self, now: Nanos, need: &Need, actions: &mut VecDeque<Action>) {
        let all = need.seats == 0 || self.begins_search(now, need);
        let looks_again = !self.lacks_pool(need);
        for server in &mut self.servers {
            let is_due = matches!(server.state, State::Idle(at) if at <= now);
            let is_due_again = looks_again && server.look_again_at().is_some_and(|at| at <= now);
            if is_due_again || is_due && may_ask(server, need, all) {
                server.state = State::Asked;
                actions.push_back(Action::Ask(server.number));
            }
        }
    }

    /// Lets a server that answered take part in the next choice, because its pool was lost and it has another one.
    pub(super) fn consider(&mut self) {
        self.looking = true;
    }

    fn begins_search(&mut self, now: Nanos, need: &Need) -> bool {
        let anybody = self.first_idle(Server::is_listed).is_some_and(|at| at <= now);
        let begins = !self.looking && anybody && self.wants_pool(need) && self.look_at(need) <= now;
        if begins {
            self.looking = true;
            self.looked_at = Some(now);
            self.jitter = self.random.below(256);
        }
        begins
    }

    /// Returns the servers whose answer shows that they do not have the pool that was lost there.
    pub(super) fn without_lost_pool(&self, need: &Need) -> impl Iterator<Item = ServerNumber> {
        self.servers.iter().filter_map(|server| match server.state {
            State::Answered(offer, _) => {
                need.lost_at(server.number).filter(|lost| !is_warm(&offer, lost)).map(|_| server.number)
            }
            State::Idle(_) | State::Asked | State::InUse => None,
        })
    }

    /// Returns the next server that gets a pool now. Returns `None` if none is chosen, or not yet.
    pub(super) fn choose(&mut self, now: Nanos, need: &Need) -> Option<Choice> {
        if let Some(warm) = self.warm(now, need) {
            return Some(warm);
        }
        let is_awaited = |server: &Server| server.is_listed() && matches!(server.state, State::Asked);
        let all_answered = !self.servers.iter().any(is_awaited);
        let waited = self.first_answer().is_some_and(|at| now >= at.plus_ns(PATIENCE_NS));
        if (need.seats > 0 && !self.looking) || !(all_answered || waited) {
            return None;
        }
        let candidates = self.candidates(now);
        let choice = draw(candidates, need, &mut self.random);
        self.looking = choice.is_some();
        choice
    }

    /// Returns a server that still has a pool that was lost, and its offer. Returns `None` if no server has offered
    /// one.
    fn warm(&self, now: Nanos, need: &Need) -> Option<Choice> {
        self.servers.iter().find_map(|server| match server.state {
            State::Answered(offer, _) if need.lost_at(server.number).is_some_and(|lost| is_warm(&offer, lost)) => {
                Some(Choice { server: server.number, offer, gives: server.can_give(&offer, now) })
            }
            _ => None,
        })
    }

    /// Returns the servers that answered. A server is slow if its latency is more than twice that of the fastest one.
    fn candidates(&self, now: Nanos) -> Vec<Candidate> {
        let fastest = self.servers.iter().filter_map(|server| server.latency_ns).min().unwrap_or(u64::MAX);
        let candidate = |server: &Server| match server.state {
            State::Answered(offer, _) if server.is_listed() => Some(Candidate {
                choice: Choice { server: server.number, offer, gives: server.can_give(&offer, now) },
                is_slow: server.latency_ns.is_some_and(|ns| ns / 2 > fastest),
            }),
            State::Answered(..) | State::Idle(_) | State::Asked | State::InUse => None,
        };
        self.servers.iter().filter_map(candidate).collect()
    }

    /// Gives a server a pool. Returns the seat of the pool.
    pub(super) fn begin(&mut self, now: Nanos, choice: &Choice) -> Seat {
        if let Some(server) = self.server(choice.server) {
            server.state = State::InUse;
        }
        Seat::new(now, choice)
    }

    /// Releases the connections of servers that answered and were not chosen. Does nothing while the choice is pending: without a
    /// session it is, unless there is no room for another pool. A server that is released then is asked again later.
    pub(super) fn release(&mut self, now: Nanos, need: &Need, actions: &mut VecDeque<Action>) {
        let is_first = need.seats == 0;
        if is_first && need.can_add || self.looking {
            return;
        }
        for server in &mut self.servers {
            if matches!(server.state, State::Answered(..)) {
                actions.push_back(Action::Release(server.number));
                server.state = State::Idle(now);
                if is_first {
                    server.fail(now, &mut self.random);
                }
            }
        }
    }
}

/// Returns whether a server may be asked: because its pool was lost or, if `all` may be, because it is in the list.
fn may_ask(server: &Server, need: &Need, all: bool) -> bool {
    all && server.is_listed() || need.lost_at(server.number).is_some()
}

fn is_warm(offer: &PoolOffer, lost: &LostPool) -> bool {
    offer.generation == lost.generation && offer.npages.0 > 0
}
