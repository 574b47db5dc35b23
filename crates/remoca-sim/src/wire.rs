//! A connection between the VM process and a server: what waits, what is in flight, and what a break loses.
//!
//! Messages arrive in order. When a connection breaks, a random number of those in flight (the newest) never arrive.
//! Until the client notices, it keeps sending.

use crate::server::Message;
use remoca_core::engine::ServerNumber;
use remoca_core::units::Nanos;
use std::collections::VecDeque;

/// Number of a connection, counted from 1.
pub type ConnectionId = usize;

/// The client's end of a session's connection, and the way to the server.
#[derive(Debug)]
pub struct Wire {
    pub id: ConnectionId,
    /// The server at the other end, and the number by which the engine knows it.
    pub server: usize,
    pub number: ServerNumber,
    /// Messages of the engine that have not left.
    pub queue: VecDeque<Message>,
    /// Whether a message of a non-empty [`Self::queue`] is about to leave.
    pub leaving: bool,
    /// Number of pages that left without the engine having been notified.
    pub unreported: u32,
    /// Number of messages that left on this connection.
    pub left: u64,
    /// Number of messages that the server has received.
    pub taken: u64,
    /// Whether messages of the server no longer arrive.
    pub deaf: bool,
    /// Whether a SETSIZE is not answered.
    pub size_asked: bool,
    /// Arrival time of the last message in each direction. The next one arrives no earlier.
    pub to_server_at: Nanos,
    pub to_client_at: Nanos,
}

impl Wire {
    /// Makes a connection on which a server has answered.
    #[must_use]
    pub fn to(server: usize, number: ServerNumber, id: ConnectionId) -> Self {
        Self {
            id,
            server,
            number,
            queue: VecDeque::new(),
            leaving: false,
            unreported: 0,
            left: 0,
            taken: 0,
            deaf: false,
            size_asked: false,
            to_server_at: Nanos(0),
            to_client_at: Nanos(0),
        }
    }

    /// Returns the number of messages in flight.
    #[must_use]
    pub fn on_the_way(&self) -> u64 {
        self.left - self.taken
    }

    /// Returns the number of pages that wait, or that left without a report. The engine's send window bounds it.
    #[must_use]
    pub fn pages_waiting(&self) -> u32 {
        let queued = self.queue.iter().filter(|m| matches!(m, Message::SendPage { .. })).count();
        u32::try_from(queued).unwrap_or(u32::MAX) + self.unreported
    }
}
