//! The traffic with memory servers: what they send becomes events of the engine, and what the engine wants of them is sent.
//!
//! The pages of a mapped pool do not travel: they are read and written here, in the same turn. A page that has not left for its
//! server is read here as well.

use super::servers::pool_offer;
use super::vm::Vm;
use crate::link::{News, PageHere};
use remoca_core::engine::{FetchId, Leaving, PageOutcome, PoolSlot, ServerNumber};
use std::time::Instant;

impl Vm {
    /// Passes the servers to the engine, which decides where the pools go, and what becomes of those at others. Connections
    /// are made from here on.
    pub(super) fn tell_servers(&mut self, leaving: Leaving) {
        if let Some((listed, local)) = self.servers.numbers() {
            self.engine.set_local_server(self.host.now(), local);
            self.engine.set_servers(self.host.now(), &listed, leaving);
            self.execute();
        }
    }

    /// Passes the answers of servers that were asked to the engine.
    pub(super) fn take_news(&mut self) {
        while let Some((server, news)) = self.servers.next_news(&self.host) {
            match news {
                News::Answer(welcome) => {
                    let offer = welcome.map(|welcome| pool_offer(&welcome));
                    self.engine.handle_answer(self.host.now(), server, offer);
                    self.execute();
                }
                News::Rejoined => {
                    if let Err(why) = self.servers.rejoin(&self.host, server) {
                        self.lose_connection(server, &why);
                    }
                }
                News::Over(why) => self.lose_session(server, &why),
            }
        }
    }

    /// Receives and handles frames of this server. Ends the session with it if it is lost.
    pub(super) fn receive(&mut self, server: ServerNumber) {
        let Self { servers, engine, in_flight, host, .. } = self;
        let Some((session, hearing)) = servers.listen(server) else { return };
        // The frames borrow the session's buffer while they are handled: nothing is sent meanwhile.
        let received = session.receive(|frame| hearing.hear(frame, engine, in_flight, host.now()));
        self.execute();
        if self.servers.take_sized(server) {
            self.servers.tell_shortage(&self.engine);
        }
        if let Some(why) = self.servers.lost(server, received) {
            self.lose_connection(server, &why);
        }
    }

    /// Handles the timers of the servers that are due.
    pub(super) fn run_link_timers(&mut self, now: Instant) {
        while let Some(server) = self.servers.run_timers(now) {
            self.lose_connection(server, "it does not answer");
        }
    }

    /// Goes on without the connection of a session, which is lost because of `why`, or ends the session.
    fn lose_connection(&mut self, server: ServerNumber, why: &str) {
        if self.servers.outlive(&self.host, server, why) {
            self.execute();
        } else {
            self.lose_session(server, why);
        }
    }

    /// Ends the session with this server, which is lost because of `why`, and notifies the engine.
    pub(super) fn lose_session(&mut self, server: ServerNumber, why: &str) {
        self.servers.end_session(&self.host, server, |link| link.end(server, why));
        self.engine.handle_disconnected(self.host.now(), server);
        self.execute();
    }

    /// Sends the frames that are queued for the servers. Forgets the servers that were left.
    pub(super) fn flush_links(&mut self) {
        if let Some(link) = self.servers.link_mut().filter(|link| link.has_leaving()) {
            link.forget_left(|server| self.engine.has_server(server));
        }
        let mut previous = None;
        while let Some(server) = self.servers.next_session(previous) {
            previous = Some(server);
            match self.servers.flush(&self.host, server) {
                Ok(0) => {}
                Ok(pages) => self.engine.handle_sent(server, pages),
                Err(error) => {
                    self.lose_connection(server, &error.to_string());
                    // Its loss may have queued frames for the servers that came first.
                    previous = None;
                }
            }
        }
    }

    /// Gets a page that this process has, of a mapped pool or one that has not left, and passes it on.
    pub(super) fn read_here(&mut self, fetch: FetchId, at: PoolSlot) {
        let Self { servers, engine, in_flight, host, .. } = self;
        let page = servers.read(at);
        // The time that it took belongs to the latency of the pool.
        host.update();
        let Some(page) = page else { return engine.handle_missing(host.now(), at.server, fetch) };
        let (page, outcome) = match page {
            PageHere::Mapped(page) => (page, engine.handle_page(host.now(), at.server, fetch, page)),
            PageHere::Unsent(page) => (page, engine.handle_unsent_page(host.now(), at.server, fetch, page)),
        };
        if let PageOutcome::Deliver { request, offset } = outcome {
            in_flight.deliver(engine, request, offset, page);
        }
    }
}
