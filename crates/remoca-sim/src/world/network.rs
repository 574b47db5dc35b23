//! The connection's side of the world: messages in flight, the servers, and all their faults.

use super::{Event, Outcome, Owner, World};
use crate::HostRule;
use crate::content::{bytes, describe};
use crate::server::{BadSlot, Message, Pool, Reply};
use crate::violation::{Promise, Violation};
use crate::wire::{ConnectionId, Wire};
use remoca_core::engine::{Admission, FetchId, PageOutcome, PoolOffer, ServerNumber};
use remoca_core::units::Nanos;

/// Time after which a client that waits for a WELCOME gives up.
const CONNECT_TIMEOUT_NS: u64 = 5_000_000_000;

impl World<'_> {
    /// Sends the oldest waiting message of the client.
    pub(super) fn leave(&mut self, connection: ConnectionId) -> Outcome {
        let arrives_at = self.now.plus_ns(self.latency());
        let Some(wire) = self.vm.wire(connection) else { return Ok(()) };
        wire.leaving = false;
        let Some(message) = wire.queue.pop_front() else { return Ok(()) };
        if matches!(message, Message::SendPage { .. }) {
            wire.unreported += 1;
        }
        let number = wire.left;
        wire.left += 1;
        wire.to_server_at = wire.to_server_at.max(arrives_at);
        let (server, at) = (wire.server, wire.to_server_at);
        self.schedule_at(at, Event::ToServer { server, connection, number, message });
        self.pump(connection);
        // Drivers may report late, but must not omit a report.
        let reports = self.random.one_in(2);
        let Some(wire) = self.vm.wire(connection) else { return Ok(()) };
        if wire.unreported > 0 && (wire.queue.is_empty() || reports) {
            let (server, pages) = (wire.number, std::mem::take(&mut wire.unreported));
            self.vm.engine.handle_sent(server, pages);
            self.execute()?;
        }
        Ok(())
    }

    fn latency(&mut self) -> u64 {
        let base = self.plan.scenario.network_ns;
        let spike = if self.plan.scenario.faults.network && self.random.one_in(50) { 50 } else { 1 };
        self.random.between(base / 4..=base * 2) * spike
    }

    /// Delivers a message to a server.
    pub(super) fn arrive_at_server(
        &mut self,
        server: usize,
        connection: ConnectionId,
        number: u64,
        message: Message,
    ) -> Outcome {
        if let Some(until) = self.pool_of(server, connection).map(|pool| pool.slow_until)
            && until > self.now
        {
            self.schedule_at(until, Event::ToServer { server, connection, number, message });
            return Ok(());
        }
        let donor = &mut self.donors[server];
        if donor.stopped_until.is_some() {
            donor.backlog.push_back((self.vm.number, connection, number, message));
            return Ok(());
        }
        self.take_message(server, connection, number, message)
    }

    fn take_message(&mut self, server: usize, connection: ConnectionId, number: u64, message: Message) -> Outcome {
        if let Some(wire) = self.vm.wire(connection) {
            wire.taken += 1;
            self.pump(connection);
        }
        let fenced = self.holds(HostRule::Fence);
        let owner = self.connection_owner(connection);
        let donor = &mut self.donors[server];
        let free = donor.free();
        let Some(pool) = donor.pools.get_mut(&owner) else { return Ok(()) };
        let is_newest = pool.connection == connection && number < pool.lost_from;
        let slips_through = !fenced && connection >= pool.void_below && connection < pool.connection;
        if !is_newest && !slips_through {
            self.tally.messages_lost += 1;
            return Ok(());
        }
        let reply = match pool.handle(message, free) {
            Ok(reply) => reply,
            Err(BadSlot(slot)) if !self.plan.scenario.faults.lies && fenced => {
                let text = format!("{slot:?} of a pool of {} pages", pool.size().0);
                return self.fail(Violation::new(Promise::ProtocolKept, text));
            }
            Err(_) => None,
        };
        let replies = match reply {
            Some(reply) if self.plan.scenario.faults.lies => pool.lie(reply, &mut self.random),
            reply => reply.into_iter().collect(),
        };
        for reply in replies {
            let at = self.arrival_of(connection, &reply);
            self.schedule_at(at, Event::ToClient { connection, reply });
        }
        Ok(())
    }

    /// Returns the arrival time of a reply. Replies arrive in order, except slow ones, which others overtake.
    fn arrival_of(&mut self, connection: ConnectionId, reply: &Reply) -> Nanos {
        let at = self.now.plus_ns(self.latency());
        let at = self.vm.wire(connection).map_or(at, |wire| at.max(wire.to_client_at));
        let slow = self.plan.scenario.slow_replies;
        if matches!(reply, Reply::Page { .. }) && slow > 0 && self.random.one_in(slow) {
            return at.plus_ns(self.plan.scenario.slow_ns);
        }
        if let Some(wire) = self.vm.wire(connection) {
            wire.to_client_at = at;
        }
        at
    }

    /// Delivers a reply to the client.
    pub(super) fn arrive_at_client(&mut self, connection: ConnectionId, reply: Reply) -> Outcome {
        let Some(wire) = self.vm.wire(connection).filter(|wire| !wire.deaf) else { return Ok(()) };
        let server = wire.number;
        if matches!(reply, Reply::Sized(_) | Reply::Refused { .. }) {
            wire.size_asked = false;
        }
        match reply {
            Reply::Page { fetch, page } => {
                self.vm.end_fetch(server, fetch);
                let outcome = self.vm.engine.handle_page(self.clock(), server, fetch, &bytes(&page));
                self.note(None, || format!("page {} for request {}: {outcome:?}", describe(&page), fetch.0));
                if let PageOutcome::Deliver { request, offset } = outcome {
                    // Without evictions, a discarded block is forgotten although the guest holds it.
                    if self.vm.engine.status().admission == Admission::Reads {
                        self.vm.guest.forget_known();
                    }
                    self.deliver(request, offset, &page)?;
                }
            }
            Reply::Missing { fetch } => self.missing(server, fetch),
            Reply::Sized(size) => {
                self.note(None, || format!("the pool has {} pages", size.0));
                self.vm.engine.handle_sized(self.clock(), server, size);
            }
            Reply::Refused { available } => {
                self.note(None, || format!("the size is refused, {} more can be had", available.0));
                self.tally.refusals += 1;
                self.vm.engine.handle_size_refused(self.clock(), server, available);
            }
        }
        // A driver has further frames of this server in its buffer.
        let goes_on = self.vm.engine.status().pools.iter().any(|pool| pool.server == server);
        if !goes_on && !self.vm.is_dead() {
            self.fail(Violation::new(Promise::ProtocolKept, "a session ends while a frame is handled"))?;
        }
        self.execute()
    }

    fn missing(&mut self, server: ServerNumber, fetch: FetchId) {
        self.note(None, || format!("no page for request {}", fetch.0));
        self.vm.end_fetch(server, fetch);
        self.vm.engine.handle_missing(self.clock(), server, fetch);
    }

    /// Drops a random number of the messages in flight on a connection, the newest ones.
    fn lose_messages(&mut self, connection: ConnectionId) {
        let Some(wire) = self.vm.wire(connection) else { return };
        let (on_the_way, taken, server) = (wire.on_the_way(), wire.taken, wire.server);
        let arriving = self.random.below(on_the_way + 1);
        if let Some(pool) = self.pool_of(server, connection) {
            pool.lost_from = pool.lost_from.min(taken + arriving);
        }
    }

    /// Returns one of the connections of the VM's sessions, or `None` if it has none.
    fn any_connection(&mut self) -> Option<ConnectionId> {
        let count = self.vm.wires.len();
        (count > 0).then(|| self.vm.wires[self.random.index(count)].id)
    }

    /// Returns the current name of the VM's pools.
    pub(super) fn owner(&self) -> Owner {
        (self.vm.number, self.vm.token)
    }

    fn connection_owner(&self, connection: ConnectionId) -> Owner {
        self.connections[connection]
    }

    /// Returns the pool of a connection, or `None` if its owner has a newer connection.
    fn pool_of(&mut self, server: usize, connection: ConnectionId) -> Option<&mut Pool> {
        let owner = self.connections[connection];
        self.donors[server].pools.get_mut(&owner).filter(|pool| pool.connection == connection)
    }

    /// Breaks a connection: a step of the plan.
    pub(super) fn cut(&mut self, notice_ns: u64) {
        if let Some(connection) = self.any_connection() {
            self.cut_connection(connection, notice_ns);
        }
    }

    fn cut_connection(&mut self, connection: ConnectionId, notice_ns: u64) {
        self.note(None, || format!("the connection {connection} breaks"));
        self.lose_messages(connection);
        let is_deaf = self.random.one_in(2);
        if let Some(wire) = self.vm.wire(connection) {
            wire.deaf = is_deaf;
        }
        self.schedule(notice_ns, Event::Notice(connection));
    }

    /// Silently stops delivering messages on a connection: a step of the plan.
    pub(super) fn hang(&mut self) {
        let Some(connection) = self.any_connection() else { return };
        self.note(None, || format!("the connection {connection} hangs"));
        self.tally.hangs += 1;
        self.lose_messages(connection);
        if let Some(wire) = self.vm.wire(connection) {
            wire.deaf = true;
        }
    }

    /// Stops a server: a step of the plan.
    pub(super) fn stop(&mut self, server: usize, ns: u64) {
        self.note(None, || format!("server {server} stops for {} ms", ns / 1_000_000));
        self.donors[server].stopped_until = Some(self.now.plus_ns(ns));
        self.schedule(ns, Event::Resume(server));
    }

    /// Continues a stopped server.
    pub(super) fn resume(&mut self, server: usize) -> Outcome {
        let donor = &mut self.donors[server];
        if donor.stopped_until.is_none_or(|until| until > self.now) {
            return Ok(());
        }
        donor.stopped_until = None;
        self.note(None, || format!("server {server} goes on"));
        let before = self.vm.number;
        while let Some((vm, connection, number, message)) = self.donors[server].backlog.pop_front() {
            self.enter(vm);
            self.take_message(server, connection, number, message)?;
        }
        self.enter(before);
        Ok(())
    }

    /// Removes pages from the pools of a server: a step of the plan.
    pub(super) fn take_pages(&mut self, server: usize, count: u32) {
        self.note(None, || format!("server {server} loses up to {count} pages of each pool"));
        for pool in self.donors[server].pools.values_mut() {
            pool.take(count, &mut self.random);
        }
    }

    /// Restarts a server, which loses everything: a step of the plan.
    pub(super) fn restart(&mut self, server: usize) {
        self.note(None, || format!("server {server} starts anew"));
        let donor = &mut self.donors[server];
        donor.stopped_until = None;
        donor.backlog.clear();
        for pool in donor.pools.values_mut() {
            pool.close(self.connections.len());
        }
        self.each_client(server, |world, connection| {
            let is_deaf = world.random.one_in(2);
            if let Some(wire) = world.vm.wire(connection) {
                wire.deaf = is_deaf;
            }
            let ns = world.random.below(5_000_000);
            world.schedule(ns, Event::Notice(connection));
        });
    }

    /// Runs `body` for the connection of each VM with a session at `server`.
    fn each_client(&mut self, server: usize, body: impl Fn(&mut Self, ConnectionId)) {
        let before = self.vm.number;
        for number in 0..=self.others.len() {
            self.enter(number);
            let at = |wire: &&Wire| wire.server == server;
            if let Some(connection) = self.vm.wires.iter().find(at).map(|wire| wire.id) {
                body(self, connection);
            }
        }
        self.enter(before);
    }

    /// Makes a server unreachable for a while, which its clients notice soon: a step of the plan.
    pub(super) fn away(&mut self, server: usize, ns: u64) {
        self.note(None, || format!("server {server} cannot be reached for {} ms", ns / 1_000_000));
        self.donors[server].gone_until = self.now.plus_ns(ns);
        self.each_client(server, |world, connection| {
            let notice_ns = world.random.below(5_000_000);
            world.cut_connection(connection, notice_ns);
        });
    }

    /// Ends a server, and starts it again after a while: a step of the plan.
    pub(super) fn gone(&mut self, server: usize, ns: u64) {
        self.note(None, || format!("server {server} is gone for {} ms", ns / 1_000_000));
        self.restart(server);
        self.donors[server].gone_until = self.now.plus_ns(ns);
    }

    /// Notifies the client that its connection is gone.
    pub(super) fn notice(&mut self, connection: ConnectionId) -> Outcome {
        let Some(server) = self.vm.wire(connection).map(|wire| wire.number) else { return Ok(()) };
        self.note(None, || format!("the client notices that the connection to {server:?} is gone"));
        self.drop_connection(connection);
        self.vm.engine.handle_disconnected(self.clock(), server);
        self.execute()
    }

    /// Closes the client's end of a connection.
    pub(super) fn drop_connection(&mut self, connection: ConnectionId) {
        self.lose_messages(connection);
        let Some(at) = self.vm.wires.iter().position(|wire| wire.id == connection) else { return };
        let wire = self.vm.wires.remove(at);
        self.abandon(wire.server, connection);
        self.vm.outstanding.retain(|_, outstanding| outstanding.at.server != wire.number);
    }

    /// Closes the connection of a server that does not answer, on the engine's behalf.
    pub(super) fn give_up(&mut self, server: ServerNumber) -> Outcome {
        self.note(None, || format!("the engine gives up the connection to {server:?}"));
        self.tally.given_up += 1;
        let Some(connection) = self.vm.wire_to(server).map(|wire| wire.id) else {
            return self.fail(Violation::new(Promise::ProtocolKept, "there is no server to give up"));
        };
        self.drop_connection(connection);
        Ok(())
    }

    /// Marks a client as gone without a goodbye, at its server.
    pub(super) fn abandon(&mut self, server: usize, connection: ConnectionId) {
        let now = self.now;
        let slow_ns = if self.random.one_in(3) { self.random.below(3_000_000_000) } else { 0 };
        if let Some(pool) = self.pool_of(server, connection) {
            pool.abandoned = Some(now);
            pool.slow_until = now.plus_ns(slow_ns);
        }
    }

    /// Connects to a server on the engine's behalf, to learn how much memory it has.
    pub(super) fn ask(&mut self, server: ServerNumber) -> Outcome {
        let connection = self.connections.len();
        self.connections.push(self.owner());
        if self.vm.asked.insert(server, connection).is_some() || self.vm.answered.contains_key(&server) {
            let text = format!("{server:?} is asked twice");
            return self.fail(Violation::new(Promise::ProtocolKept, text));
        }
        let (ns, since) = (self.latency(), self.now);
        self.schedule(ns, Event::Connect { server, connection, since });
        Ok(())
    }

    /// Delivers a HELLO to a server. From then on, messages in flight on an older connection are void.
    pub(super) fn connect(&mut self, server: ServerNumber, connection: ConnectionId, since: Nanos) -> Outcome {
        let (now, patient) = (self.now, self.now.since_ns(since) < CONNECT_TIMEOUT_NS);
        let at = self.vm.server(server);
        self.expire_pools(at);
        let donor = &self.donors[at];
        if donor.stopped_until.is_some() && donor.gone_until <= now && patient {
            self.schedule(100_000_000, Event::Connect { server, connection, since });
            return Ok(());
        }
        let refused = self.plan.scenario.faults.network && self.random.one_in(20);
        let listens = donor.gone_until <= now && patient && !refused;
        let offer = if listens { self.welcome(at, connection) } else { None };
        if self.vm.asked.get(&server) != Some(&connection) {
            // The process that said HELLO is dead.
            self.abandon(at, connection);
            return Ok(());
        }
        let ns = self.latency();
        self.schedule(ns, Event::Answer { server, connection, offer });
        Ok(())
    }

    /// Accepts a HELLO at the server, and returns the server's offer. Returns `None` if the connection is older than
    /// the newest.
    fn welcome(&mut self, at: usize, connection: ConnectionId) -> Option<PoolOffer> {
        let owner = self.connections[connection];
        let lies = self.plan.scenario.faults.lies;
        let donor = &mut self.donors[at];
        let free = donor.free();
        let pool = donor.pools.entry(owner).or_default();
        if connection < pool.connection {
            return None;
        }
        pool.abandoned = None;
        pool.slow_until = Nanos(0);
        pool.connection = connection;
        pool.lost_from = u64::MAX;
        let honest = pool.offer(free);
        Some(if lies { pool.lie_about_pool(honest, &mut self.random) } else { honest })
    }

    /// Frees the pools of clients that have been away for too long.
    pub(super) fn expire_pools(&mut self, server: usize) {
        let (now, grace) = (self.now, self.plan.scenario.grace_ns);
        let donor = &mut self.donors[server];
        for pool in donor.pools.values_mut().filter(|_| donor.stopped_until.is_none()) {
            if pool.abandoned.is_some_and(|since| now.since_ns(since) > grace) {
                pool.close(self.connections.len());
            }
        }
    }

    /// Delivers the answer to a HELLO to the client. Without an `offer`, the attempt has failed.
    pub(super) fn answer(
        &mut self,
        server: ServerNumber,
        connection: ConnectionId,
        offer: Option<PoolOffer>,
    ) -> Outcome {
        if self.vm.asked.get(&server) != Some(&connection) {
            return Ok(());
        }
        self.note(None, || format!("{server:?} answers: {offer:?}"));
        self.vm.asked.remove(&server);
        match offer {
            Some(_) => drop(self.vm.answered.insert(server, connection)),
            None => self.tally.unanswered += 1,
        }
        self.vm.engine.handle_answer(self.clock(), server, offer);
        self.execute()
    }

    /// Makes an answered connection the engine's session.
    pub(super) fn use_connection(&mut self, server: ServerNumber) -> Outcome {
        self.note(None, || format!("a pool is on {server:?}"));
        let Some(connection) = self.vm.answered.remove(&server) else {
            let text = format!("{server:?} is to be used, and there is no connection to it");
            return self.fail(Violation::new(Promise::ProtocolKept, text));
        };
        if self.vm.wire_to(server).is_some() {
            self.fail(Violation::new(Promise::ProtocolKept, "a session begins before the last one has ended"))?;
        }
        self.tally.connects += 1;
        let at = self.vm.server(server);
        self.vm.wires.push(Wire::to(at, server, connection));
        if self.pool_of(at, connection).is_none() {
            self.schedule(1_000_000, Event::Notice(connection));
        }
        Ok(())
    }

    /// Releases an answered connection that is not needed.
    pub(super) fn release(&mut self, server: ServerNumber) -> Outcome {
        self.note(None, || format!("{server:?} is not needed"));
        self.tally.released += 1;
        let Some(connection) = self.vm.answered.remove(&server) else {
            let text = format!("{server:?} is to be released, and there is no connection to it");
            return self.fail(Violation::new(Promise::ProtocolKept, text));
        };
        self.say_goodbye(self.vm.server(server), connection, Nanos(0));
        Ok(())
    }

    /// Leaves the server of a session, which may still have replies in flight.
    pub(super) fn leave_server(&mut self, server: ServerNumber) -> Outcome {
        self.note(None, || format!("the engine leaves {server:?}"));
        self.tally.left += 1;
        let Some(wire) = self.vm.wire_to(server) else {
            return self.fail(Violation::new(Promise::ProtocolKept, "there is no server to leave"));
        };
        let (server, connection, after) = (wire.server, wire.id, wire.to_server_at);
        if self.pool_of(server, connection).is_none_or(|pool| pool.lost_from == u64::MAX) {
            self.say_goodbye(server, connection, after);
        }
        self.drop_connection(connection);
        Ok(())
    }

    /// Sends a BYE that arrives after everything else, or never.
    fn say_goodbye(&mut self, server: usize, connection: ConnectionId, after: Nanos) {
        if self.plan.scenario.faults.network && self.random.one_in(4) {
            return self.abandon(server, connection);
        }
        let at = self.now.plus_ns(self.latency()).max(after);
        self.schedule_at(at, Event::Bye { server, connection });
    }

    /// Delivers a BYE to a server, which frees the pool at once.
    pub(super) fn bye(&mut self, server: usize, connection: ConnectionId) -> Outcome {
        let is_stopped = self.donors[server].stopped_until.is_some();
        let Some(pool) = self.pool_of(server, connection) else { return Ok(()) };
        if is_stopped {
            self.schedule(100_000_000, Event::Bye { server, connection });
            return Ok(());
        }
        pool.close(connection + 1);
        Ok(())
    }

    /// Ends all faults: all servers and hosts work from here on. A connection that hangs is noticed, by the engine
    /// itself if the server owes it an answer, else by the system.
    pub(super) fn heal(&mut self) -> Outcome {
        self.note(None, || "the plan is over".into());
        self.hosts.fill(self.now);
        self.for_each_vm(|world| {
            world.notice_hanging();
            world.spare();
            Ok(())
        })?;
        for server in 0..self.donors.len() {
            let donor = &mut self.donors[server];
            donor.gone_until = self.now;
            donor.stopped_until = donor.stopped_until.map(|_| self.now);
            self.resume(server)?;
        }
        Ok(())
    }

    fn notice_hanging(&mut self) {
        let wires: Vec<_> = self.vm.wires.iter().map(|wire| (wire.server, wire.number, wire.id)).collect();
        for (server, number, connection) in wires {
            let owes_page = self.vm.outstanding.values().any(|outstanding| outstanding.at.server == number);
            let Some(wire) = self.vm.wire(connection) else { continue };
            let (owes, hears) = (owes_page || wire.size_asked, !wire.deaf);
            let whole = hears && self.pool_of(server, connection).is_some_and(|pool| pool.lost_from == u64::MAX);
            if !whole && !owes {
                self.schedule(100_000_000, Event::Notice(connection));
            }
        }
    }
}
