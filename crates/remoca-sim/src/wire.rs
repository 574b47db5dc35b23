//! The connection between the VM process and the server: what waits, what is on the way, and what is lost with it.
//!
//! Messages arrive in order. When a connection breaks, any number of those on the way (the newest) never arrive; until
//! the client notices, it goes on sending into nothing.

use crate::server::Message;
use remoca_core::units::Nanos;
use std::collections::VecDeque;

/// Names a connection; counted up at each connect, from 1.
pub type ConnectionId = usize;

/// What the client thinks of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Down,
    Up,
}

/// The client's end of the current connection, and the way to the server.
#[derive(Debug)]
pub struct Wire {
    pub id: ConnectionId,
    /// The server at the other end.
    pub server: usize,
    pub phase: Phase,
    /// What the engine asked to be sent and that has not left.
    pub queue: VecDeque<Message>,
    /// A [`Self::queue`] that is not empty is being worked on.
    pub leaving: bool,
    /// Pages that left without the engine having been told.
    pub unreported: u32,
    /// Messages that left on this connection.
    pub left: u64,
    /// Messages the server has taken off the wire.
    pub taken: u64,
    /// Nothing that the server sends arrives any more.
    pub deaf: bool,
    /// Arrival of the last message, in each direction: the next comes no earlier.
    pub to_server_at: Nanos,
    pub to_client_at: Nanos,
}

impl Wire {
    /// No connection yet.
    #[must_use]
    pub fn new() -> Self {
        Self {
            id: 0,
            server: 0,
            phase: Phase::Down,
            queue: VecDeque::new(),
            leaving: false,
            unreported: 0,
            left: 0,
            taken: 0,
            deaf: false,
            to_server_at: Nanos(0),
            to_client_at: Nanos(0),
        }
    }

    /// A connection that a server has answered on.
    #[must_use]
    pub fn to(server: usize, id: ConnectionId) -> Self {
        Self { id, server, phase: Phase::Up, ..Self::new() }
    }

    /// Whether the client hears what the server says.
    #[must_use]
    pub fn can_hear(&self) -> bool {
        self.phase == Phase::Up && !self.deaf
    }

    /// Messages on the way.
    #[must_use]
    pub fn on_the_way(&self) -> u64 {
        self.left - self.taken
    }

    /// Pages that wait, or whose leaving was not reported: what the engine's send window bounds.
    #[must_use]
    pub fn pages_waiting(&self) -> u32 {
        let queued = self.queue.iter().filter(|m| matches!(m, Message::SendPage { .. })).count();
        u32::try_from(queued).unwrap_or(u32::MAX) + self.unreported
    }
}

impl Default for Wire {
    fn default() -> Self {
        Self::new()
    }
}
