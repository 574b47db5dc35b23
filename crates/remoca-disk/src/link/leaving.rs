//! Servers that were taken out of the list while their pools are drained.
//!
//! The link keeps number, address and token of each until the engine has no pool there. What the server was not told then,
//! it is told on a connection of its own, so that it need not wait for its grace time.

use super::connect::{Answer, Asker, bye};
use super::{KnownServer, ServerLink};
use remoca_core::engine::ServerNumber;

impl ServerLink {
    /// Returns a server, in the list or leaving, or `None` if it has been forgotten.
    pub fn known(&self, number: ServerNumber) -> Option<&KnownServer> {
        self.servers.iter().find(|server| server.number == number)
    }

    /// Returns whether a server is leaving.
    pub fn has_leaving(&self) -> bool {
        self.servers.last().is_some_and(|server| server.leaves)
    }

    /// Forgets the servers that are not in the list and for which `has_pool` is false: their pools are given back.
    pub fn forget_left(&mut self, has_pool: impl Fn(ServerNumber) -> bool) {
        let listed = self.servers().len();
        let is_over = |server: &KnownServer| !has_pool(server.number) && !self.sessions.contains(server.number);
        let over: Vec<_> = self.servers[listed..].iter().filter(|server| is_over(server)).map(|it| it.number).collect();
        if over.is_empty() {
            return;
        }
        for number in &over {
            if self.known(*number).is_some_and(|server| server.epoch > 0 && !server.is_told) {
                self.connect(*number, Asker::GivingBack);
            }
        }
        self.servers.retain(|server| !over.contains(&server.number));
        self.keep();
    }

    /// Says goodbye to a server that was connected to for that.
    pub(super) fn give_back(&self, answer: Answer) {
        match answer {
            Ok(connected) => self.network.say_goodbye(connected.socket, bye()),
            Err(error) => tracing::debug!("a pool that was drained is left to its grace time: {error}"),
        }
    }

    /// Notes that a server knows that this process has no pool there.
    pub(super) fn note_told(&mut self, number: ServerNumber) {
        if let Some(server) = self.server(number) {
            server.is_told = true;
        }
    }
}
