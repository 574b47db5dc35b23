//! Sessions with memory servers: where pools are placed, and what begins and ends with a session.

use super::need::{Choice, Standing};
use super::pool::DrainReason;
use super::{Action, DiskEngine, Leaving, PoolOffer, ServerNumber};
use crate::index::{Pool, Words};
use crate::rules::Rule;
use crate::units::{Nanos, PageCount, PoolIndex};

impl<M: Words> DiskEngine<M> {
    /// Sets the memory servers that may have pools, in any order. The pools of all others are given back at once, or drained:
    /// they take no new pages, and are given back once the others have their share. A drained pool that was lost, or was
    /// found by [`Self::resume`], may return. [`Self::has_server`] says how long its server may be asked.
    pub fn set_servers(&mut self, now: Nanos, servers: &[ServerNumber], leaving: Leaving) {
        let pools = &self.pools;
        let with_pool = self.index.pools().map(|(_, pool)| ServerNumber(pool.server));
        let local = self.pools.local.server();
        let is_drained =
            |server: &ServerNumber| leaving == Leaving::Drained && !servers.contains(server) && local != Some(*server);
        let drained: Vec<_> = with_pool.filter(is_drained).collect();
        self.placement.replace(now, servers, &drained, |server| pools.at(server).is_some(), &mut self.actions);
        for number in self.numbers_up() {
            let pool = self.pools.pool(number);
            let Some(server) = pool.server().filter(|_| !pool.is_local()) else { continue };
            let is_unlisted = self.pools.pool(number).is_unlisted();
            if servers.contains(&server) {
                if is_unlisted {
                    self.pools.end_drain(number);
                }
            } else if leaving == Leaving::AtOnce {
                self.leave(now, number);
            } else {
                self.drain(now, number, DrainReason::Unlisted);
            }
        }
        self.place(now);
    }

    /// Sets the server that has the local tier, or `None` if there shall be none. A pool at another server is given back at
    /// once. The server must not be one of those of [`Self::set_servers`], which is called after this at the start.
    pub fn set_local_server(&mut self, now: Nanos, server: Option<ServerNumber>) {
        if self.pools.local.server() == server {
            return;
        }
        self.leave_local(now);
        if let Some(number) = server.and_then(|server| self.pools.at(server)) {
            self.leave(now, number);
        }
        // What it had as one of the list waits for it, but has no share.
        self.pools.give_up_at(server.as_slice(), &self.index);
        self.pools.local.set_server(now, server);
        // Nobody asks for what a former process had there.
        if self.pools.local.wanted().0 == 0 {
            self.leave_local(now);
        }
        // The others are not told of yet, perhaps.
        self.pools.local.ask(now, &mut self.actions);
    }

    /// Gives the pool of the local tier back, if there is one.
    pub(super) fn leave_local(&mut self, now: Nanos) {
        let up = self.pools.up().find(|pool| pool.is_local()).map(|pool| pool.number());
        if let Some(number) = up {
            self.leave(now, number);
        } else if let Some(lost) = self.pools.local.server() {
            self.pools.forget_at(lost, &mut self.index);
        }
    }

    /// Returns whether the server is in the list, or has the local tier, or a pool that is drained. No other server is asked
    /// or used.
    pub fn has_server(&self, server: ServerNumber) -> bool {
        self.placement.has(server) || self.pools.local.is_at(server)
    }

    /// Stops sending pages to a pool. A drain goes on that has begun in an earlier session, when its server was taken out of the list.
    fn drain(&mut self, now: Nanos, number: PoolIndex, reason: DrainReason) {
        let server = self.pools.pool(number).server();
        let begun_at = server.and_then(|server| self.placement.leaves_since(server)).unwrap_or(now);
        let pages = PageCount(self.index.pool_slot_counts(number).used);
        self.pools.drain(now, begun_at, number, reason, pages);
    }

    /// Stores the `offer` of a server that was asked (`None`: there is no connection), and starts a session if a server
    /// can be chosen. Releases a server that is no longer in the list, or has a session.
    pub fn handle_answer(&mut self, now: Nanos, server: ServerNumber, offer: Option<PoolOffer>) {
        if self.pools.local.is_at(server) {
            let has_room = self.index.pool_of(server.0).or(self.index.free_pool()).is_some();
            match self.pools.local.answer(now, offer.filter(|_| has_room)) {
                Some(choice) => self.begin_session(now, &choice),
                None => offer.iter().for_each(|_| self.actions.push_back(Action::Release(server))),
            }
        } else if !self.placement.answer(now, server, offer) && offer.is_some() {
            self.actions.push_back(Action::Release(server));
        }
        self.place(now);
    }

    /// Ends the session with `server`, whose connection was lost, and seeks another server. No replies may arrive after
    /// this call.
    pub fn handle_disconnected(&mut self, now: Nanos, server: ServerNumber) {
        if let Some(number) = self.pools.at(server) {
            self.stats.disconnections += 1;
            if let Some(seat) = self.pools.pool(number).seat() {
                self.placement.lost(now, seat);
            }
            self.end_session(now, number);
            self.place(now);
        }
    }

    fn numbers_up(&self) -> Vec<PoolIndex> {
        self.pools.up().map(|pool| pool.number()).collect()
    }

    /// Gives up the session of a pool whose server is silent.
    pub(super) fn give_up(&mut self, now: Nanos, number: PoolIndex) {
        self.stats.disconnections += 1;
        if let Some(seat) = self.pools.pool(number).seat() {
            self.actions.push_back(Action::GiveUp(seat.server()));
            self.placement.silent(now, seat);
        }
        self.end_session(now, number);
    }

    /// Gives a pool back to its server.
    fn leave(&mut self, now: Nanos, number: PoolIndex) {
        if let Some(seat) = self.pools.pool(number).seat() {
            self.actions.push_back(Action::Leave(seat.server()));
            self.placement.left(now, seat);
        }
        self.end_session(now, number);
        self.pools.forget(number, &mut self.index);
    }

    /// Ends the session of a pool, and leaves all reads that wait for it to the disk.
    fn end_session(&mut self, now: Nanos, number: PoolIndex) {
        if self.pools.pool(number).is_local() {
            self.pools.local.end(now);
        }
        self.pools.pool_mut(number).end_session(now, &mut self.index, &mut self.actions);
        self.race.forget_server(number);
        self.streams.reset_pool(number);
        self.pools.take_fetches(number, &mut self.index);
        for id in self.requests.reads_waiting_for(number) {
            self.stats.fetch_disconnected += 1;
            self.give_up_pages(now, id);
        }
    }

    /// Asks servers that are due, starts sessions with those that are chosen, gives all pools their shares, and leaves those
    /// that are drained.
    pub(super) fn place(&mut self, now: Nanos) {
        self.drain_slow(now);
        self.pools.local.ask(now, &mut self.actions);
        self.pools.look_at_drained(now, &self.index);
        let placement = &self.placement;
        self.pools.expect(now, |server| placement.standing(now, server), &mut self.index);
        let need = self.pools.need(&self.index);
        let without: Vec<_> = self.placement.without_lost_pool(&need).collect();
        self.pools.give_up_at(&without, &self.index);
        self.placement.ask(now, &self.pools.need(&self.index), &mut self.actions);
        if !without.is_empty() {
            self.placement.consider();
        }
        while let Some(choice) = self.placement.choose(now, &self.pools.need(&self.index)) {
            self.begin_session(now, &choice);
        }
        for server in without {
            self.pools.forget_at(server, &mut self.index);
        }
        self.placement.release(now, &self.pools.need(&self.index), &mut self.actions);
        for number in self.pools.end_drains(now) {
            self.leave(now, number);
        }
        self.pools.share(now, &mut self.index, &mut self.actions);
        let index = &self.index;
        self.placement.forget_left(|server| index.pool_of(server.0).is_some(), &mut self.actions);
    }

    /// Measures the servers with pools, and drains a pool that is much slower than the others.
    fn drain_slow(&mut self, now: Nanos) {
        let latency_ns = |number: PoolIndex| self.race.server_latency(number).map(|latency| latency.p50_ns);
        for pool in self.pools.up() {
            if let (Some(server), Some(ns)) = (pool.server(), latency_ns(pool.number())) {
                self.placement.note_latency(server, ns);
            }
        }
        if let Some(slow) = self.pools.find_slow(now, latency_ns) {
            self.stats.pool_drains += 1;
            self.drain(now, slow, DrainReason::Slow);
        }
    }

    /// Starts a session with a server. If the index describes its pool, the pages stay cached, except those that the
    /// server has not received. Otherwise the pool is empty.
    fn begin_session(&mut self, now: Nanos, choice: &Choice) {
        let Choice { server, offer, .. } = *choice;
        let pool = Pool { server: server.0, generation: offer.generation };
        let is_same = |known: &Pool| {
            known.generation == pool.generation && (*known == pool || !self.rules.hold(Rule::PoolOfOneServer))
        };
        let pools = &self.pools;
        let lost = |(number, known): (PoolIndex, Pool)| {
            let is_candidate = !pools.pool(number).is_up() && (known.server == server.0 || is_same(&known));
            is_candidate.then(|| (number, is_same(&known)))
        };
        let known = self.index.pools().find_map(lost);
        let is_first = !self.pools.has_members();
        let (number, is_warm) = match known {
            Some((number, true)) => (number, true),
            Some((number, false)) => {
                self.index.drop_slots_of(number);
                (number, false)
            }
            None => (self.index.free_pool().expect("a server is chosen only if a pool can be added"), false),
        };
        let had = is_warm.then(|| self.index.kept_capacity(number));
        let is_local = self.pools.local.is_at(server);
        let seat = if is_local { self.pools.local.begin(now, choice) } else { self.placement.begin(now, choice) };
        self.actions.push_back(Action::Use(server));
        self.stats.connections += 1;
        if is_warm && self.rules.hold(Rule::LostSends) {
            // Pages were in transit when the connection broke, so their slots hold older pages.
            self.stats.lost_sends += self.index.give_up_sends(number, offer.sends_received);
        }
        self.index.begin_pool(number, pool, offer.sends_received);
        // A server that has nothing to give takes no pool's place.
        if !is_warm && !is_local && offer.possible() > PageCount(0) {
            self.pools.replace_lost(server, &mut self.index);
        }
        self.pools.pool_mut(number).begin_session(seat, now, &offer, had, is_local);
        if !is_local && self.placement.standing(now, server) != Standing::Listed {
            self.drain(now, number, DrainReason::Unlisted);
        }
        if !is_warm && !is_local {
            self.stats.pool_joins += u64::from(!is_first);
            self.pools.join(number);
        }
    }
}
