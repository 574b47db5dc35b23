//! What the link knows of servers beside their sessions: connections that wait, servers that are away, pools that were passed on.

use super::memory::PoolMemory;
use remoca_core::engine::ServerNumber;
use remoca_core::units::PageCount;
use remoca_protocol::{PoolGeneration, SendCount, ServerId, Welcome};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

const BACKOFF_MIN: Duration = Duration::from_millis(100);
pub(super) const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// Time after which a server that came back counts as one that stays: when it is away again, the pauses begin anew.
const LASTING: Duration = Duration::from_secs(10);

/// Sessions whose server is away, or was.
#[derive(Default)]
pub(super) struct Rejoins(Vec<Rejoin>);

struct Rejoin {
    server: ServerNumber,
    /// Time of the next attempt to connect: `None` while one is under way, or the server is back.
    next: Option<Next>,
    backoff: Duration,
    /// Time at which the server came back; `None` once it is asked again.
    back_at: Option<Instant>,
}

#[derive(Clone, Copy)]
enum Next {
    Now,
    At(Instant),
}

impl Rejoins {
    /// Adds a session whose server is away. One that was back just before is not asked at once: it may greet and hang
    /// up for ever.
    pub(super) fn begin(&mut self, server: ServerNumber) {
        let known = self.0.iter().find(|rejoin| rejoin.server == server);
        let back = known.and_then(|rejoin| Some((rejoin.back_at?, rejoin.backoff)));
        let (next, backoff) = match back {
            Some((at, backoff)) => (Next::At(at + backoff), (backoff * 2).min(BACKOFF_MAX)),
            None => (Next::Now, BACKOFF_MIN),
        };
        self.end(server);
        self.0.push(Rejoin { server, next: Some(next), backoff, back_at: back.map(|(at, _)| at) });
    }

    /// Notes that the server of a session is back.
    pub(super) fn note_back(&mut self, server: ServerNumber, now: Instant) {
        if let Some(rejoin) = self.0.iter_mut().find(|rejoin| rejoin.server == server) {
            (rejoin.next, rejoin.back_at) = (None, Some(now));
        }
    }

    /// Removes a session, because it has ended.
    pub(super) fn end(&mut self, server: ServerNumber) {
        self.0.retain(|rejoin| rejoin.server != server);
    }

    /// Delays the next attempt, because one has failed.
    pub(super) fn fail(&mut self, server: ServerNumber, now: Instant) {
        if let Some(rejoin) = self.0.iter_mut().find(|rejoin| rejoin.server == server) {
            rejoin.next = now.checked_add(rejoin.backoff).map(Next::At);
            rejoin.backoff = (rejoin.backoff * 2).min(BACKOFF_MAX);
        }
    }

    /// Returns a server that is to be asked now, or `None` if there is none, and marks it as asked.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<ServerNumber> {
        let is_due = |next: Next| match next {
            Next::Now => true,
            Next::At(at) => at <= now,
        };
        let due = self.0.iter_mut().find(|rejoin| rejoin.next.is_some_and(is_due))?;
        due.next = None;
        if due.back_at.take().is_some_and(|at| now.saturating_duration_since(at) > LASTING) {
            due.backoff = BACKOFF_MIN;
        }
        Some(due.server)
    }

    pub(super) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let at = |next| match next {
            Next::Now => now,
            Next::At(at) => at,
        };
        self.0.iter().filter_map(|rejoin| rejoin.next.map(at)).min()
    }
}

/// Mapped pool that a former program of this process had, and passed on with its lock.
pub struct KeptPool {
    pub(super) memory: PoolMemory,
    pub(super) generation: u64,
    pub(super) granted: PageCount,
}

impl KeptPool {
    /// Returns the pool with this `memory`, which has the size `granted`.
    #[must_use]
    pub fn new(memory: PoolMemory, generation: u64, granted: PageCount) -> Self {
        Self { granted: granted.min(memory.pages()), memory, generation }
    }

    /// Returns what the pool offers while its server is away, and its memory.
    pub(super) fn into_offer(self) -> (Welcome, PoolMemory) {
        let welcome = Welcome {
            version: remoca_protocol::MAPPED_VERSION,
            server_id: ServerId([0; 16]),
            pool_generation: PoolGeneration(self.generation),
            npages: self.granted,
            available: PageCount(0),
            quota: self.granted,
            sends_received: SendCount(0),
        };
        (welcome, self.memory)
    }
}

/// Connection to a server that answered.
pub(super) struct Waiting {
    pub(super) server: ServerNumber,
    /// `None` if the server is away, and its pool is here.
    pub(super) socket: Option<OwnedFd>,
    pub(super) welcome: Welcome,
    /// Memory of a mapped pool.
    pub(super) memory: Option<PoolMemory>,
}

/// News of a server.
pub enum News {
    /// The server that the engine asked has answered, or there is no connection (`None`).
    Answer(Option<Welcome>),
    /// The server of a mapped pool is back: its session has a new connection.
    Rejoined,
    /// The server of a mapped pool is back without that pool, which is of no use any more.
    Over(String),
}
