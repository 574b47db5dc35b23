//! The connection's side of the world: messages on their way, the servers, and everything that breaks.

use super::{Event, Outcome, World};
use crate::content::{bytes, describe};
use crate::server::{BadSlot, Message, Reply};
use crate::violation::{Promise, Violation};
use crate::wire::{ConnectionId, Phase, Wire};
use remoca_core::engine::{FetchId, PageOutcome, PoolOffer, ServerNumber};
use remoca_core::units::Nanos;

/// A client that waits for a WELCOME gives up after this time.
const CONNECT_TIMEOUT_NS: u64 = 5_000_000_000;

impl World<'_> {
    /// The oldest message that waits leaves the client.
    pub(super) fn leave(&mut self, connection: ConnectionId) -> Outcome {
        if connection != self.wire.id {
            return Ok(());
        }
        self.wire.leaving = false;
        let Some(message) = self.wire.queue.pop_front() else { return Ok(()) };
        if matches!(message, Message::SendPage { .. }) {
            self.wire.unreported += 1;
        }
        let number = self.wire.left;
        self.wire.left += 1;
        let at = self.now.plus_ns(self.latency()).max(self.wire.to_server_at);
        self.wire.to_server_at = at;
        let server = self.wire.server;
        self.schedule_at(at, Event::ToServer { server, connection, number, message });
        self.pump();
        // Drivers may report late, but not never.
        if self.wire.unreported > 0 && (self.wire.queue.is_empty() || self.random.one_in(2)) {
            self.engine.handle_sent(std::mem::take(&mut self.wire.unreported));
            self.execute()?;
        }
        Ok(())
    }

    fn latency(&mut self) -> u64 {
        let base = self.plan.scenario.network_ns;
        let spike = if self.plan.scenario.faults.network && self.random.one_in(50) { 50 } else { 1 };
        self.random.between(base / 4..=base * 2) * spike
    }

    /// A message arrives at a server.
    pub(super) fn arrive_at_server(
        &mut self,
        server: usize,
        connection: ConnectionId,
        number: u64,
        message: Message,
    ) -> Outcome {
        let donor = &mut self.donors[server];
        if donor.stopped_until.is_some() {
            donor.backlog.push_back((connection, number, message));
            return Ok(());
        }
        self.take_message(server, connection, number, message)
    }

    fn take_message(&mut self, server: usize, connection: ConnectionId, number: u64, message: Message) -> Outcome {
        if connection == self.wire.id {
            self.wire.taken += 1;
            self.pump();
        }
        let donor = &mut self.donors[server];
        if connection != donor.id || number >= donor.lost_from {
            self.tally.messages_lost += 1;
            return Ok(());
        }
        let reply = match donor.server.handle(message) {
            Ok(reply) => reply,
            Err(BadSlot(slot)) if !self.plan.scenario.faults.lies => {
                let text = format!("{slot:?} of a pool of {} pages", donor.server.size().0);
                return self.fail(Violation::new(Promise::ProtocolKept, text));
            }
            Err(_) => None,
        };
        let replies = match reply {
            Some(reply) if self.plan.scenario.faults.lies => donor.server.lie(reply, &mut self.random),
            reply => reply.into_iter().collect(),
        };
        for reply in replies {
            let at = self.now.plus_ns(self.latency()).max(self.wire.to_client_at);
            self.wire.to_client_at = at;
            self.schedule_at(at, Event::ToClient { connection, reply });
        }
        Ok(())
    }

    /// A reply arrives at the client.
    pub(super) fn arrive_at_client(&mut self, connection: ConnectionId, reply: Reply) -> Outcome {
        if connection != self.wire.id || self.wire.phase != Phase::Up || self.wire.deaf {
            return Ok(());
        }
        match reply {
            Reply::Page { fetch, page } => {
                self.outstanding.remove(&fetch);
                let outcome = self.engine.handle_page(self.now, fetch, &bytes(&page));
                self.note(None, || format!("page {} for request {}: {outcome:?}", describe(&page), fetch.0));
                if let PageOutcome::Deliver { request, offset } = outcome {
                    self.deliver(request, offset, &page)?;
                }
            }
            Reply::Missing { fetch } => self.missing(fetch),
            Reply::Sized(size) => {
                self.note(None, || format!("the pool has {} pages", size.0));
                self.size_asked = false;
                self.engine.handle_sized(self.now, size);
            }
            Reply::Refused { available } => {
                self.note(None, || format!("the size is refused, {} more can be had", available.0));
                self.tally.refusals += 1;
                self.size_asked = false;
                self.engine.handle_size_refused(self.now, available);
            }
        }
        // A driver has more of this server's frames in its buffer.
        if !self.engine.status().connected {
            self.fail(Violation::new(Promise::ProtocolKept, "a session ends while a frame is handled"))?;
        }
        self.execute()
    }

    fn missing(&mut self, fetch: FetchId) {
        self.note(None, || format!("no page for request {}", fetch.0));
        self.outstanding.remove(&fetch);
        self.engine.handle_missing(fetch);
    }

    /// The newest of the messages on the way, any number of them, never arrive.
    fn lose_messages(&mut self) {
        let donor = &mut self.donors[self.wire.server];
        if donor.id == self.wire.id {
            let arriving = self.random.below(self.wire.on_the_way() + 1);
            donor.lost_from = donor.lost_from.min(self.wire.taken + arriving);
        }
    }

    /// A step of the plan: the connection breaks.
    pub(super) fn cut(&mut self, notice_ns: u64) {
        if self.wire.phase == Phase::Up {
            self.note(None, || "the connection breaks".into());
            self.lose_messages();
            self.wire.deaf = self.random.one_in(2);
            self.schedule(notice_ns, Event::Notice(self.wire.id));
        }
    }

    /// A step of the plan: nothing gets through any more, and nobody says so.
    pub(super) fn hang(&mut self) {
        if self.wire.phase == Phase::Up {
            self.note(None, || "the connection hangs".into());
            self.tally.hangs += 1;
            self.lose_messages();
            self.wire.deaf = true;
        }
    }

    /// A step of the plan: a server is stopped.
    pub(super) fn stop(&mut self, server: usize, ns: u64) {
        self.note(None, || format!("server {server} stops for {} ms", ns / 1_000_000));
        self.donors[server].stopped_until = Some(self.now.plus_ns(ns));
        self.schedule(ns, Event::Resume(server));
    }

    /// A stopped server goes on.
    pub(super) fn resume(&mut self, server: usize) -> Outcome {
        let donor = &mut self.donors[server];
        if donor.stopped_until.is_none_or(|until| until > self.now) {
            return Ok(());
        }
        donor.stopped_until = None;
        self.note(None, || format!("server {server} goes on"));
        while let Some((connection, number, message)) = self.donors[server].backlog.pop_front() {
            self.take_message(server, connection, number, message)?;
        }
        Ok(())
    }

    /// A step of the plan: a server starts anew.
    pub(super) fn restart(&mut self, server: usize) {
        self.note(None, || format!("server {server} starts anew"));
        let donor = &mut self.donors[server];
        donor.server.restart();
        donor.stopped_until = None;
        donor.backlog.clear();
        donor.id = 0;
        if self.wire.phase == Phase::Up && self.wire.server == server {
            self.wire.deaf = self.random.one_in(2);
            let ns = self.random.below(5_000_000);
            self.schedule(ns, Event::Notice(self.wire.id));
        }
    }

    /// A step of the plan: nothing gets through to a server for a while, and the client notices soon.
    pub(super) fn away(&mut self, server: usize, ns: u64) {
        self.note(None, || format!("server {server} cannot be reached for {} ms", ns / 1_000_000));
        self.donors[server].gone_until = self.now.plus_ns(ns);
        if self.wire.server == server {
            let notice_ns = self.random.below(5_000_000);
            self.cut(notice_ns);
        }
    }

    /// A step of the plan: a server ends, and is started again after a while.
    pub(super) fn gone(&mut self, server: usize, ns: u64) {
        self.note(None, || format!("server {server} is gone for {} ms", ns / 1_000_000));
        self.restart(server);
        self.donors[server].gone_until = self.now.plus_ns(ns);
    }

    /// The client notices that its connection is gone.
    pub(super) fn notice(&mut self, connection: ConnectionId) -> Outcome {
        if connection != self.wire.id || self.wire.phase != Phase::Up {
            return Ok(());
        }
        self.note(None, || "the client notices that the connection is gone".into());
        self.drop_connection();
        self.engine.handle_disconnected(self.now);
        self.execute()
    }

    /// The client closes its end.
    pub(super) fn drop_connection(&mut self) {
        self.lose_messages();
        self.abandon(self.wire.server, self.wire.id);
        self.outstanding.clear();
        self.size_asked = false;
        self.wire = Wire { server: self.wire.server, ..Wire::new() };
    }

    /// A server notices that a client is gone that did not say goodbye.
    fn abandon(&mut self, server: usize, connection: ConnectionId) {
        let donor = &mut self.donors[server];
        if donor.id == connection {
            donor.abandoned = Some(self.now);
        }
    }

    /// The engine wants to know what a server has.
    pub(super) fn ask(&mut self, server: ServerNumber) -> Outcome {
        self.connections += 1;
        let connection = self.connections;
        if self.asked.insert(server, connection).is_some() || self.answered.contains_key(&server) {
            let text = format!("{server:?} is asked twice");
            return self.fail(Violation::new(Promise::ProtocolKept, text));
        }
        let (ns, since) = (self.latency(), self.now);
        self.schedule(ns, Event::Connect { server, connection, since });
        Ok(())
    }

    /// A server gets a HELLO: whatever is still on the way on an older connection is void from here on.
    pub(super) fn connect(&mut self, server: ServerNumber, connection: ConnectionId, since: Nanos) -> Outcome {
        let grace = self.plan.scenario.grace_ns;
        let (now, patient) = (self.now, self.now.since_ns(since) < CONNECT_TIMEOUT_NS);
        let at = self.server(server);
        let donor = &mut self.donors[at];
        if donor.stopped_until.is_some() && donor.gone_until <= now && patient {
            self.schedule(100_000_000, Event::Connect { server, connection, since });
            return Ok(());
        }
        let refused = self.plan.scenario.faults.network && self.random.one_in(20);
        let mut offer = None;
        if donor.gone_until <= now && patient && !refused {
            if donor.abandoned.take().is_some_and(|since| now.since_ns(since) > grace) {
                donor.server.restart();
            }
            donor.id = connection;
            donor.lost_from = u64::MAX;
            let honest = donor.server.offer();
            let lies = self.plan.scenario.faults.lies;
            offer = Some(if lies { donor.server.lie_about_pool(honest, &mut self.random) } else { honest });
        }
        let ns = self.latency();
        self.schedule(ns, Event::Answer { server, connection, offer });
        Ok(())
    }

    /// The client gets a WELCOME, or hears that there is none.
    pub(super) fn answer(
        &mut self,
        server: ServerNumber,
        connection: ConnectionId,
        offer: Option<PoolOffer>,
    ) -> Outcome {
        self.note(None, || format!("{server:?} answers: {offer:?}"));
        self.asked.remove(&server);
        match offer {
            Some(_) => drop(self.answered.insert(server, connection)),
            None => self.tally.unanswered += 1,
        }
        self.engine.handle_answer(self.now, server, offer);
        self.execute()
    }

    /// The engine makes an answered connection its session.
    pub(super) fn use_connection(&mut self, server: ServerNumber) -> Outcome {
        self.note(None, || format!("the pool is on {server:?}"));
        let Some(connection) = self.answered.remove(&server) else {
            let text = format!("{server:?} is to be used, and there is no connection to it");
            return self.fail(Violation::new(Promise::ProtocolKept, text));
        };
        if self.wire.phase == Phase::Up {
            self.fail(Violation::new(Promise::ProtocolKept, "a session begins before the last one has ended"))?;
        }
        self.tally.connects += 1;
        self.wire = Wire::to(self.server(server), connection);
        if self.donors[self.wire.server].id != connection {
            self.schedule(1_000_000, Event::Notice(connection));
        }
        Ok(())
    }

    /// An answered connection is not needed.
    pub(super) fn release(&mut self, server: ServerNumber) -> Outcome {
        self.note(None, || format!("{server:?} is not needed"));
        self.tally.released += 1;
        let Some(connection) = self.answered.remove(&server) else {
            let text = format!("{server:?} is to be released, and there is no connection to it");
            return self.fail(Violation::new(Promise::ProtocolKept, text));
        };
        self.say_goodbye(self.server(server), connection, Nanos(0));
        Ok(())
    }

    /// The engine leaves the session's server, which may still have replies on the way.
    pub(super) fn leave_server(&mut self) -> Outcome {
        self.note(None, || "the engine leaves the server".into());
        self.tally.left += 1;
        if self.wire.phase != Phase::Up {
            return self.fail(Violation::new(Promise::ProtocolKept, "there is no server to leave"));
        }
        let (server, connection, after) = (self.wire.server, self.wire.id, self.wire.to_server_at);
        if self.donors[server].lost_from == u64::MAX {
            self.say_goodbye(server, connection, after);
        }
        self.drop_connection();
        Ok(())
    }

    /// A BYE that arrives behind everything else, or never.
    fn say_goodbye(&mut self, server: usize, connection: ConnectionId, after: Nanos) {
        if self.plan.scenario.faults.network && self.random.one_in(4) {
            return self.abandon(server, connection);
        }
        let at = self.now.plus_ns(self.latency()).max(after);
        self.schedule_at(at, Event::Bye { server, connection });
    }

    /// A server gets a BYE: the pool is free at once.
    pub(super) fn bye(&mut self, server: usize, connection: ConnectionId) -> Outcome {
        let donor = &mut self.donors[server];
        if donor.id == connection {
            if donor.stopped_until.is_some() {
                self.schedule(100_000_000, Event::Bye { server, connection });
                return Ok(());
            }
            donor.server.restart();
            donor.id = 0;
        }
        Ok(())
    }

    /// The plan is over: all servers work from here on. A connection that hangs is noticed, by the engine itself if the
    /// server owes it an answer, else by the system.
    pub(super) fn heal(&mut self) -> Outcome {
        self.note(None, || "the plan is over".into());
        let owes = self.size_asked || !self.outstanding.is_empty();
        let donor = &self.donors[self.wire.server];
        let whole = self.wire.can_hear() && donor.id == self.wire.id && donor.lost_from == u64::MAX;
        if !whole && !owes {
            self.schedule(100_000_000, Event::Notice(self.wire.id));
        }
        for server in 0..self.donors.len() {
            let donor = &mut self.donors[server];
            donor.gone_until = self.now;
            donor.stopped_until = donor.stopped_until.map(|_| self.now);
            self.resume(server)?;
        }
        Ok(())
    }
}
