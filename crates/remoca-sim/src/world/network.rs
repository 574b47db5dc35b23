//! The connection's side of the world: messages on their way, the server, and everything that breaks.

use super::{Event, Outcome, World};
use crate::content::{bytes, describe};
use crate::server::{BadSlot, Message, Reply};
use crate::violation::{Promise, Violation};
use crate::wire::{ConnectionId, Phase};
use remoca_core::engine::{FetchId, PageOutcome, PoolOffer};

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
        self.schedule_at(at, Event::ToServer { connection, number, message });
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

    /// A message arrives at the server.
    pub(super) fn arrive_at_server(&mut self, connection: ConnectionId, number: u64, message: Message) -> Outcome {
        if self.server_end.stopped_until.is_some() {
            self.server_end.backlog.push_back((connection, number, message));
            return Ok(());
        }
        self.take_message(connection, number, message)
    }

    fn take_message(&mut self, connection: ConnectionId, number: u64, message: Message) -> Outcome {
        if connection == self.wire.id {
            self.wire.taken += 1;
            self.pump();
        }
        if connection != self.server_end.id || number >= self.server_end.lost_from {
            self.tally.messages_lost += 1;
            return Ok(());
        }
        let reply = match self.server.handle(message) {
            Ok(reply) => reply,
            Err(BadSlot(slot)) if !self.plan.scenario.faults.lies => {
                let text = format!("{slot:?} of a pool of {} pages", self.server.size().0);
                return self.fail(Violation::new(Promise::ProtocolKept, text));
            }
            Err(_) => None,
        };
        let replies = match reply {
            Some(reply) if self.plan.scenario.faults.lies => self.server.lie(reply, &mut self.random),
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
        self.execute()
    }

    fn missing(&mut self, fetch: FetchId) {
        self.note(None, || format!("no page for request {}", fetch.0));
        self.outstanding.remove(&fetch);
        self.engine.handle_missing(fetch);
    }

    /// The newest of the messages on the way, any number of them, never arrive.
    fn lose_messages(&mut self) {
        if self.server_end.id == self.wire.id {
            let arriving = self.random.below(self.wire.on_the_way() + 1);
            let lost_from = self.wire.taken + arriving;
            self.server_end.lost_from = self.server_end.lost_from.min(lost_from);
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

    /// A step of the plan: the server is stopped.
    pub(super) fn stop(&mut self, ns: u64) {
        self.note(None, || format!("the server stops for {} ms", ns / 1_000_000));
        self.server_end.stopped_until = Some(self.now.plus_ns(ns));
        self.schedule(ns, Event::Resume);
    }

    /// A stopped server goes on.
    pub(super) fn resume(&mut self) -> Outcome {
        if self.server_end.stopped_until.is_none_or(|until| until > self.now) {
            return Ok(());
        }
        self.note(None, || "the server goes on".into());
        self.server_end.stopped_until = None;
        while let Some((connection, number, message)) = self.server_end.backlog.pop_front() {
            self.take_message(connection, number, message)?;
        }
        Ok(())
    }

    /// A step of the plan: the server starts anew.
    pub(super) fn restart(&mut self) {
        self.note(None, || "the server starts anew".into());
        self.server.restart();
        self.server_end.stopped_until = None;
        self.server_end.backlog.clear();
        self.server_end.id = ConnectionId::MAX;
        if self.wire.phase == Phase::Up {
            self.wire.deaf = self.random.one_in(2);
            let ns = self.random.below(5_000_000);
            self.schedule(ns, Event::Notice(self.wire.id));
        }
    }

    /// The client notices that its connection is gone.
    pub(super) fn notice(&mut self, connection: ConnectionId) -> Outcome {
        if connection != self.wire.id || self.wire.phase != Phase::Up {
            return Ok(());
        }
        self.note(None, || "the client notices that the connection is gone".into());
        self.drop_connection();
        self.engine.handle_disconnected();
        self.execute()
    }

    /// The client closes its end, and begins to connect anew.
    pub(super) fn drop_connection(&mut self) {
        self.lose_messages();
        self.server_end.abandoned = Some(self.now);
        self.outstanding.clear();
        self.size_asked = false;
        let connection = self.wire.renew();
        let pause = self.random.between(100_000..=3_000_000_000);
        self.schedule(pause, Event::Connect(connection));
    }

    /// The server gets a HELLO: whatever is still on the way on an older connection is void from here on.
    pub(super) fn connect(&mut self, connection: ConnectionId) -> Outcome {
        if self.server_end.stopped_until.is_some() {
            self.schedule(100_000_000, Event::Connect(connection));
            return Ok(());
        }
        let grace = self.plan.scenario.grace_ns;
        if self.server_end.abandoned.take().is_some_and(|since| self.now.since_ns(since) > grace) {
            self.note(None, || "the server gave up the pool".into());
            self.server.restart();
        }
        self.server_end.id = connection;
        self.server_end.lost_from = u64::MAX;
        let mut offer = self.server.offer();
        if self.plan.scenario.faults.lies {
            offer = self.server.lie_about_pool(offer, &mut self.random);
        }
        let ns = self.latency();
        self.schedule(ns, Event::Welcome { connection, offer });
        Ok(())
    }

    /// The client gets the WELCOME.
    pub(super) fn welcome(&mut self, connection: ConnectionId, offer: PoolOffer) -> Outcome {
        if self.server_end.id != connection {
            self.schedule(1_000_000, Event::Connect(connection));
            return Ok(());
        }
        self.note(None, || format!("connected: {offer:?}"));
        self.tally.connects += 1;
        self.wire.phase = Phase::Up;
        self.engine.handle_connected(offer);
        self.execute()
    }

    /// The plan is over: the server works from here on. A connection that hangs is noticed, by the engine itself if the
    /// server owes it an answer, else by the system.
    pub(super) fn heal(&mut self) -> Outcome {
        self.note(None, || "the plan is over".into());
        let owes = self.size_asked || !self.outstanding.is_empty();
        let whole = self.wire.can_hear() && self.server_end.id == self.wire.id && self.server_end.lost_from == u64::MAX;
        if !whole && !owes {
            self.schedule(100_000_000, Event::Notice(self.wire.id));
        }
        self.server_end.stopped_until = self.server_end.stopped_until.map(|_| self.now);
        self.resume()
    }
}
