//! The sessions of a link, in the order of their servers' numbers: at most one with each server.

use super::session::Session;
use remoca_core::engine::ServerNumber;
use remoca_core::units::POOLS_MAX;

/// Maximum number of sessions at a time: one for each pool.
const SESSIONS_MAX: usize = POOLS_MAX as usize;

/// The sessions.
#[derive(Default)]
pub(super) struct Sessions {
    /// Servers of the sessions. They are apart, so that a look-up reads one cache line.
    servers: Vec<ServerNumber>,
    sessions: Vec<Session>,
}

impl Sessions {
    /// Returns whether one more session may begin.
    pub(super) fn has_room(&self) -> bool {
        self.sessions.len() < SESSIONS_MAX
    }

    /// Returns whether there is no session.
    pub(super) fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    #[inline]
    fn position(&self, server: ServerNumber) -> Option<usize> {
        self.servers.iter().position(|other| *other == server)
    }

    /// Returns whether there is a session with this server.
    pub(super) fn contains(&self, server: ServerNumber) -> bool {
        self.position(server).is_some()
    }

    /// Adds a session.
    ///
    /// # Panics
    /// If there is a session with that server.
    pub(super) fn insert(&mut self, session: Session) {
        let server = session.server();
        assert!(!self.contains(server), "a server has one session at a time");
        let at = self.servers.partition_point(|other| *other < server);
        self.servers.insert(at, server);
        self.sessions.insert(at, session);
    }

    /// Removes the session with this server and returns it, or `None` if there is none.
    pub(super) fn remove(&mut self, server: ServerNumber) -> Option<Session> {
        let at = self.position(server)?;
        self.servers.remove(at);
        Some(self.sessions.remove(at))
    }

    /// Returns the session with this server, or `None` if there is none.
    #[inline]
    pub(super) fn with(&mut self, server: ServerNumber) -> Option<&mut Session> {
        let at = self.position(server)?;
        self.sessions.get_mut(at)
    }

    /// Returns the server of the first session after that with `previous`, or of the first of all, or `None` if there
    /// is none. Sessions may begin and end between two calls.
    pub(super) fn next(&self, previous: Option<ServerNumber>) -> Option<ServerNumber> {
        let at = previous.map_or(0, |previous| self.servers.partition_point(|other| *other <= previous));
        self.servers.get(at).copied()
    }

    /// Returns all sessions.
    pub(super) fn all(&self) -> &[Session] {
        &self.sessions
    }

    /// Returns all sessions, for sending.
    pub(super) fn all_mut(&mut self) -> &mut [Session] {
        &mut self.sessions
    }
}
