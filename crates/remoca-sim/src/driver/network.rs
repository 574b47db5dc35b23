//! The network between the driver and the memory servers: latencies, losses, and answers that arrive in parts.

use super::Flaw;
use super::servers::{Attempt, Connection, ConnectionId, Donor};
use super::world::{Event, Outcome, World};
use crate::violation::{Promise, Violation};
use remoca_core::units::PageCount;
use remoca_disk::link::{Connected, LinkError};
use remoca_protocol::{MAPPED_VERSION, PoolGeneration, SendCount, ServerId, VERSIONS, Welcome};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// What a server answers to a HELLO.
pub(super) struct Greeting {
    welcome: Welcome,
    connection: ConnectionId,
    /// The client's end of the connection.
    socket: UnixStream,
    /// Memory of the local tier.
    memory: Option<OwnedFd>,
}

impl World<'_> {
    pub(super) fn latency(&mut self) -> u64 {
        let base = self.plan.conditions.network_ns;
        self.random.between(base / 4..=base)
    }

    pub(super) fn hello(&mut self, attempt: Attempt) {
        let away = !self.healed && self.plan.conditions.faults.server && self.random.one_in(6);
        let server = self.server_at(&attempt.endpoint);
        let offer = if away { None } else { self.donors[server].greet(attempt.token, attempt.epoch) };
        let greeting = offer.map(|offer| {
            let (connection, socket) =
                Connection::new(server, attempt.token, attempt.epoch).expect("the system has sockets left");
            self.connections.push(connection);
            let welcome = Welcome {
                version: if offer.memory.is_some() { MAPPED_VERSION } else { VERSIONS.highest },
                server_id: ServerId(u128::from(server as u64).to_le_bytes()),
                pool_generation: PoolGeneration(offer.generation),
                npages: offer.npages,
                available: PageCount(1 << 20),
                quota: PageCount(1 << 20),
                sends_received: SendCount(offer.received),
            };
            Greeting { welcome, connection: self.connections.len() - 1, socket, memory: offer.memory }
        });
        let in_ns = self.latency();
        self.schedule(in_ns, Event::Welcomed(attempt, greeting));
    }

    pub(super) fn welcomed(&mut self, attempt: Attempt, greeting: Option<Greeting>) {
        let Attempt { endpoint, answer, .. } = attempt;
        self.tally.sessions += u64::from(greeting.is_some());
        let Some(Greeting { welcome, connection, socket, memory }) = greeting else {
            return answer.give(Err(LinkError::Unreachable(endpoint, io::ErrorKind::ConnectionRefused.into())));
        };
        let memory = memory.map(|memory| answer.own(memory, Duration::ZERO)).transpose();
        let told = self.donors[self.connections[connection].server].take_back(&self.connections[connection]);
        told.into_iter().for_each(|frame| self.send_take_back(connection, frame));
        answer.give(match memory {
            Ok(memory) => Ok(Connected { socket: socket.into(), welcome, memory }),
            Err(error) => Err(LinkError::Memory(endpoint, error)),
        });
    }

    pub(super) fn take_sent(&mut self, number: ConnectionId) {
        let bytes = self.connections[number].take_sent();
        self.connections[number].push();
        if bytes.is_empty() {
            return;
        }
        let at = (self.now + self.latency()).max(self.connections[number].to_server_ns);
        self.connections[number].to_server_ns = at;
        self.schedule(at - self.now, Event::ToServer(number, bytes));
    }

    pub(super) fn arrive(&mut self, number: ConnectionId, bytes: &[u8]) -> Outcome {
        let (corrupts, lies) = (self.has(Flaw::WrongPageSent), self.plan.conditions.faults.lies && !self.healed);
        if self.has(Flaw::PagesForgotten) {
            self.donors.iter_mut().for_each(Donor::forget);
        }
        let connection = &mut self.connections[number];
        if !connection.is_open() && self.random.one_in(2) {
            // Lost with the connection, or still in flight.
            return Ok(());
        }
        let donor = &mut self.donors[connection.server];
        let answers =
            connection.arrive(bytes, donor, corrupts).map_err(|text| Violation::new(Promise::ProtocolKept, text))?;
        for mut answer in answers {
            if lies && answer.len() > 4096 && self.random.one_in(6) {
                let at = self.random.index(4096);
                let last = answer.len() - 1;
                answer[last - at] ^= 1;
            }
            let slow = match self.plan.conditions.slow_replies {
                0 => 0,
                n if self.healed || !self.random.one_in(n) => 0,
                _ => self.random.below(self.plan.conditions.disk_ns * 8),
            };
            self.reply(number, answer, slow);
        }
        Ok(())
    }

    fn reply(&mut self, number: ConnectionId, mut answer: Vec<u8>, slow: u64) {
        let in_ns = self.latency() + slow;
        let at = (self.now + in_ns).max(self.connections[number].to_client_ns);
        self.connections[number].to_client_ns = at;
        if self.random.one_in(4) {
            let rest = answer.split_off(self.random.index(answer.len()));
            self.schedule(at - self.now, Event::ToClient(number, answer));
            answer = rest;
        }
        self.schedule(at - self.now, Event::ToClient(number, answer));
    }

    pub(super) fn cut(&mut self) {
        let open = self.connections.iter_mut().filter(|connection| connection.is_open());
        if let Some(connection) = open.last() {
            self.tally.cuts += 1;
            connection.cut();
        }
    }
}
