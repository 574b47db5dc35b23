//! Mapped pools whose server is away: their sessions go on, and the link connects anew in the background.
//!
//! The engine hears nothing of it: only the size of such a pool cannot grow. If the server comes back with the same pool, the new
//! connection takes the place of the old one. If it has another one, the session is over.

use super::away::{KeptPool, News};
use super::connect::{Answer, Asker, Connected};
use super::memory::{Passed, PoolMemory};
use super::session::{Session, Size};
use super::{KnownServer, ServerLink};
use crate::state::Header;
use remoca_core::engine::ServerNumber;
use remoca_core::units::PageCount;
use remoca_io::address::Endpoint;
use std::sync::Arc;
use std::time::Instant;

impl ServerLink {
    /// Closes the connection of a session that outlives it, because of `why`, and starts to connect again. Returns the answer
    /// to a SETSIZE that was outstanding, as it is without the server.
    pub fn detach(&mut self, number: ServerNumber, why: &str) -> Option<Size> {
        if let Some(server) = self.server(number) {
            tracing::warn!(
                "the memory server at {} is away: {why}. Its pool is in use as before; connecting anew.",
                server.endpoint
            );
        }
        self.rejoins.begin(number);
        self.sessions.with(number)?.detach()
    }

    /// Returns the time at which [`Self::run_timers`] must be called, or `None` if no server of a mapped pool is away or owes an
    /// answer.
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let answers = self.sessions.all().iter().filter_map(|session| session.answer_deadline(now));
        self.rejoins.next_deadline(now).into_iter().chain(answers).min()
    }

    /// Starts the attempts to connect that are due. Returns a server whose answer about the size of a mapped pool is overdue,
    /// or `None` if there is none.
    pub fn run_timers(&mut self, now: Instant) -> Option<ServerNumber> {
        while let Some(server) = self.rejoins.take_due(now) {
            self.connect(server, Asker::Link);
        }
        self.sessions.all_mut().iter_mut().for_each(|session| session.start_wait(now));
        let is_overdue = |session: &&Session| session.answer_deadline(now).is_some_and(|at| at <= now);
        self.sessions.all().iter().find(is_overdue).map(Session::server)
    }

    /// Handles the outcome of an attempt to connect anew. Returns what the driver has to know of it.
    pub(super) fn end_rejoin(&mut self, number: ServerNumber, answer: Answer, now: Instant) -> Option<News> {
        // The session may have ended meanwhile, or another one begun.
        let session = self.sessions.with(number).filter(|session| session.socket_fd().is_none())?;
        let Connected { socket, welcome, memory } = match answer {
            Ok(connected) => connected,
            Err(error) => {
                self.note_error(number, error);
                self.rejoins.fail(number, now);
                return None;
            }
        };
        self.rejoins.note_back(number, now);
        let is_same = matches!(memory, Some(Passed::Owned)) && welcome.pool_generation.0 == session.generation();
        let attached =
            if is_same { session.attach(socket, &welcome) } else { Err("it came back without the pool".into()) };
        if let Err(why) = attached {
            return Some(News::Over(why));
        }
        if let Some(server) = self.server(number) {
            tracing::info!("connected to the memory server at {} again: it still has the pool", server.endpoint);
            server.error = None;
        }
        Some(News::Rejoined)
    }

    /// Records how many pages were written to a mapped pool.
    pub(super) fn keep_sends(&mut self, session: &Session) {
        if let Some(sends) = session.sends() {
            note_sends(&mut self.servers, self.kept.as_ref(), session.server(), sends);
        }
    }

    /// Records how many pages were written to the mapped pool of a server, for a successor of this process. A page that it
    /// does not count is given up there.
    pub fn keep_sends_of(&mut self, number: ServerNumber) {
        if let Some(sends) = self.sessions.with(number).and_then(|session| session.sends()) {
            note_sends(&mut self.servers, self.kept.as_ref(), number, sends);
        }
    }

    /// Takes over mapped pools that a former program of this process had.
    pub fn keep_pools(&mut self, pools: Vec<(String, KeptPool)>) {
        for (endpoint, pool) in pools {
            if let Some(server) = self.servers.iter_mut().find(|server| server.endpoint.to_string() == endpoint) {
                server.kept = Some(pool);
            }
        }
    }

    /// Returns the mapped pools of this process: endpoint, memory, generation and size of each.
    pub fn mapped_pools(&self) -> impl Iterator<Item = (&Endpoint, &PoolMemory, u64, PageCount)> {
        self.servers.iter().filter_map(|server| {
            let session = self.sessions.all().iter().find(|session| session.server() == server.number);
            let (memory, generation, granted) = match (session, &server.kept) {
                (Some(session), _) => (session.memory()?, session.generation(), session.granted()),
                (None, Some(KeptPool { memory, generation, granted })) => (memory, *generation, *granted),
                (None, None) => return None,
            };
            Some((&server.endpoint, memory, generation, granted))
        })
    }
}

fn note_sends(servers: &mut [KnownServer], header: Option<&Arc<Header>>, number: ServerNumber, sends: u64) {
    let Some(slot) = servers.iter().position(|server| server.number == number) else { return };
    if std::mem::replace(&mut servers[slot].sends, sends) != sends
        && let Some(header) = header
    {
        header.set_sends(slot, sends);
    }
}

#[cfg(test)]
#[path = "rejoin_tests.rs"]
mod tests;
