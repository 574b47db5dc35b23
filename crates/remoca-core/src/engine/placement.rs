//! Placement of the pool: which servers are asked, which offer is taken, and when the pool moves.
//!
//! Without a session, every server is asked as soon as its backoff allows. A server that still has the pool is chosen
//! at once. Otherwise the other answers are awaited for a short time, and one server is drawn among those that can give
//! what is wanted. With a session, the others are asked only while the pool is smaller than wanted. The pool moves only
//! if another server offers at least a quarter more, because a move loses everything that is cached.
//! 1. Every `Ask` gets one answer, and every connection that answered is either used or released.
//! 2. A session begins and ends in `handle_answer`, `handle_timer`, `handle_disconnected` and `set_servers` only, never
//!    while frames of a server are handled.
//!
//! Decision 0014.

use super::types::{Action, PoolOffer, ServerNumber};
use crate::units::{Nanos, PageCount};
use std::collections::VecDeque;

const BACKOFF_MIN_NS: u64 = 100_000_000;
const BACKOFF_MAX_NS: u64 = 5_000_000_000;
/// Time, in nanoseconds, to wait for other answers after the first one.
const PATIENCE_NS: u64 = 500_000_000;
/// Minimum interval between searches for a larger pool, and between moves of the pool.
const LOOK_PAUSE_NS: u64 = 60_000_000_000;
/// Minimum interval between searches while the server grants nothing, so that there is nothing to lose.
const EMPTY_PAUSE_NS: u64 = 10_000_000_000;
/// Time, in nanoseconds, for which a server that granted less than it offered is not trusted to have more.
const DISTRUST_NS: u64 = 600_000_000_000;

/// State of the pool, as far as placement needs it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    pub(super) wanted: PageCount,
    pub(super) granted: PageCount,
    /// Whether no SETSIZE is outstanding or planned.
    pub(super) settled: bool,
    /// Server and generation of the pool that the index describes.
    pub(super) pool: Option<(ServerNumber, u64)>,
    /// Seat of the pool while there is a session.
    pub(super) seat: Option<Seat>,
}

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
    /// Size that the server granted although it had offered more, and when it did.
    gave: Option<(PageCount, Nanos)>,
}

impl Server {
    /// Delays the next `Ask` to this server by its backoff plus jitter, and doubles the backoff up to its maximum.
    fn fail(&mut self, now: Nanos, random: &mut Random) {
        self.state = State::Idle(now.plus_ns(random.stretch(self.backoff_ns)));
        self.backoff_ns = (self.backoff_ns * 2).clamp(BACKOFF_MIN_NS, BACKOFF_MAX_NS);
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
    /// Returns the server that has the pool.
    pub(super) fn server(&self) -> ServerNumber {
        self.server
    }
}

/// SplitMix64 from the engine's seed, which is enough to keep the VMs of a host out of step.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end.max(1)
    }

    /// Returns `ns` plus a random share of it, up to a quarter.
    fn stretch(&mut self, ns: u64) -> u64 {
        ns + self.below(ns / 4 + 1)
    }
}

/// State of all servers.
#[derive(Debug)]
pub(super) struct Placement {
    servers: Vec<Server>,
    /// Whether the other servers were asked for a larger pool, and the decision is pending.
    looking: bool,
    /// Time at which the other servers were last asked; `None` if the operator has changed something since.
    looked_at: Option<Nanos>,
    /// Random share of the jitter in the next pause, 0 to 255.
    jitter: u64,
    moved_at: Option<Nanos>,
    random: Random,
}

impl Placement {
    pub(super) fn new(seed: u64) -> Self {
        Self { servers: Vec::new(), looking: false, looked_at: None, jitter: 0, moved_at: None, random: Random(seed) }
    }

    fn server(&mut self, number: ServerNumber) -> Option<&mut Server> {
        self.servers.iter_mut().find(|server| server.number == number)
    }

    /// Replaces the list of servers. Returns whether the server of `seat` is no longer in it.
    pub(super) fn replace(
        &mut self,
        now: Nanos,
        numbers: &[ServerNumber],
        seat: Option<Seat>,
        actions: &mut VecDeque<Action>,
    ) -> bool {
        self.servers.retain(|server| {
            let stays = numbers.contains(&server.number);
            if !stays && matches!(server.state, State::Answered(..)) {
                actions.push_back(Action::Release(server.number));
            }
            stays
        });
        for &number in numbers {
            if self.server(number).is_none() {
                let state = State::Idle(now);
                self.servers.push(Server { number, state, backoff_ns: BACKOFF_MIN_NS, gave: None });
            }
        }
        // One of the old servers may never answer; the new ones are still asked.
        self.looking = false;
        self.look_soon();
        seat.is_some_and(|seat| !numbers.contains(&seat.server))
    }

    /// Stores the offer of a server, or delays the next `Ask` to it if `offer` is `None`: there is no connection.
    /// Returns whether the server is still in the list.
    pub(super) fn answer(&mut self, now: Nanos, number: ServerNumber, offer: Option<PoolOffer>) -> bool {
        let Some(at) = self.servers.iter().position(|server| server.number == number) else { return false };
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

    /// Disregards the offers of a server for a while, because it offered memory and then did not serve.
    fn distrust(&mut self, now: Nanos, number: ServerNumber) {
        if let Some(server) = self.server(number) {
            server.gave = Some((PageCount(0), now));
        }
    }

    fn end(&mut self, now: Nanos, seat: Seat, backoff_ns: Option<u64>) {
        self.looking = false;
        if let Some(server) = self.servers.iter_mut().find(|server| server.number == seat.server) {
            server.backoff_ns = backoff_ns.unwrap_or(server.backoff_ns);
            server.fail(now, &mut self.random);
        }
    }

    /// Makes the next search for a larger pool due at once, unless the pool has just moved.
    pub(super) fn look_soon(&mut self) {
        self.looked_at = None;
    }

    /// Returns the earliest time at which the other servers are asked, if the pool is smaller than wanted.
    fn look_at(&self, need: &Need) -> Nanos {
        let pause = if need.granted.0 == 0 { EMPTY_PAUSE_NS } else { LOOK_PAUSE_NS };
        let last = self.looked_at.max(self.moved_at);
        last.map_or(Nanos(0), |at| at.plus_ns(pause + pause / 1024 * self.jitter))
    }

    /// Records `granted` if the server of `seat` gave less than it had offered and than was `wanted`. Otherwise clears
    /// the record.
    pub(super) fn note_size(&mut self, now: Nanos, seat: Seat, granted: PageCount, wanted: PageCount) {
        let Seat { server, possible, .. } = seat;
        if let Some(server) = self.server(server) {
            server.gave = (granted < possible.min(wanted)).then_some((granted, now));
        }
    }

    fn is_short(&self, need: &Need) -> bool {
        need.seat.is_some() && need.settled && need.granted < need.wanted && self.servers.len() > 1
    }

    pub(super) fn deadline(&self, need: &Need) -> Option<Nanos> {
        let decide = self.first_answer().map(|at| at.plus_ns(PATIENCE_NS));
        let ask = match need.seat {
            None => self.first_idle(),
            Some(_) if !self.looking && self.is_short(need) => self.first_idle().map(|at| at.max(self.look_at(need))),
            Some(_) => None,
        };
        [ask, decide].into_iter().flatten().min()
    }

    /// Returns the earliest time at which a server may be asked, or `None` if no server is idle.
    fn first_idle(&self) -> Option<Nanos> {
        let at = |server: &Server| if let State::Idle(at) = server.state { Some(at) } else { None };
        self.servers.iter().filter_map(at).min()
    }

    fn first_answer(&self) -> Option<Nanos> {
        let at = |server: &Server| if let State::Answered(_, at) = server.state { Some(at) } else { None };
        self.servers.iter().filter_map(at).min()
    }

    /// Asks servers that are due. During a session, does so only if the pool is smaller than wanted and a search is
    /// due.
    pub(super) fn ask(&mut self, now: Nanos, need: &Need, actions: &mut VecDeque<Action>) {
        if need.seat.is_some() {
            let nobody = self.first_idle().is_none_or(|at| now < at);
            if self.looking || nobody || !self.is_short(need) || now < self.look_at(need) {
                return;
            }
            self.looking = true;
            self.looked_at = Some(now);
            self.jitter = self.random.below(256);
        }
        for server in &mut self.servers {
            if matches!(server.state, State::Idle(at) if at <= now) {
                server.state = State::Asked;
                actions.push_back(Action::Ask(server.number));
            }
        }
    }

    /// Returns the server to which the pool goes now, and its offer. Returns `None` if no server is chosen yet, or the
    /// pool is not to move.
    pub(super) fn choose(&mut self, now: Nanos, need: &Need) -> Option<(ServerNumber, PoolOffer)> {
        if need.seat.is_none()
            && let Some(warm) = self.warm(need)
        {
            return Some(warm);
        }
        let all_answered = !self.servers.iter().any(|server| matches!(server.state, State::Asked));
        let waited = self.first_answer().is_some_and(|at| now >= at.plus_ns(PATIENCE_NS));
        if !(all_answered || waited) || (need.seat.is_some() && !self.looking) {
            return None;
        }
        self.looking = false;
        let (server, offer, gives) = self.draw(now, need.wanted)?;
        // With a SETSIZE outstanding, the current server may be about to grant what is wanted.
        let worth_it = need.settled && gives > need.granted && gives.0 - need.granted.0 >= need.granted.0 / 4;
        (need.seat.is_none() || worth_it).then_some((server, offer))
    }

    /// Returns the server that still has the pool that the index describes, and its offer. Returns `None` if no server
    /// has offered that pool.
    fn warm(&self, need: &Need) -> Option<(ServerNumber, PoolOffer)> {
        let (number, generation) = need.pool?;
        self.servers.iter().find_map(|server| match server.state {
            State::Answered(offer, _) if server.number == number && offer.generation == generation => {
                (offer.npages.0 > 0).then_some((number, offer))
            }
            _ => None,
        })
    }

    /// Draws a random server among those that can grant the wanted size or, if none can, among those that can grant the
    /// most. A server with more memory is more likely to be drawn. VMs that ask at the same time see the same figures,
    /// and must not all choose the same server. Returns the server, its offer and the size that it can grant, or `None`
    /// if no server has answered.
    fn draw(&mut self, now: Nanos, wanted: PageCount) -> Option<(ServerNumber, PoolOffer, PageCount)> {
        let answered = self.servers.iter().filter_map(|server| match server.state {
            State::Answered(offer, _) => Some((server.number, offer, server.can_give(&offer, now))),
            State::Idle(_) | State::Asked | State::InUse => None,
        });
        let mut good: Vec<_> = answered.collect();
        let most = good.iter().map(|(_, _, gives)| *gives).max()?;
        good.retain(|(_, _, gives)| *gives >= most.min(wanted));
        let weight = |gives: PageCount| u64::from(gives.0) + 1;
        let mut dice = self.random.below(good.iter().map(|(_, _, gives)| weight(*gives)).sum());
        let (server, offer, gives) = good.into_iter().find(|(_, _, gives)| {
            let hit = dice < weight(*gives);
            dice = dice.saturating_sub(weight(*gives));
            hit
        })?;
        Some((server, offer, gives.min(wanted)))
    }

    /// Assigns the pool to a server, after the pool has left the seat `left`. Returns its new seat.
    pub(super) fn begin(&mut self, now: Nanos, number: ServerNumber, offer: &PoolOffer, left: Option<Seat>) -> Seat {
        if let Some(left) = left {
            self.moved_at = Some(now);
            if let Some(server) = self.server(left.server) {
                server.state = State::Idle(now);
            }
        }
        if let Some(server) = self.server(number) {
            server.state = State::InUse;
        }
        Seat { server: number, since: now, possible: offer.possible() }
    }

    /// Releases the connections of servers that answered and were not chosen. Does nothing while the choice is pending.
    pub(super) fn release(&mut self, now: Nanos, has_seat: bool, actions: &mut VecDeque<Action>) {
        if !has_seat || self.looking {
            return;
        }
        for server in &mut self.servers {
            if matches!(server.state, State::Answered(..)) {
                server.state = State::Idle(now);
                actions.push_back(Action::Release(server.number));
            }
        }
    }
}
