//! Events of memory servers (answers, sessions, pages and sizes) and of the timer.

use super::fetches::Fetch;
use super::{Action, Admission, DiskEngine, FetchId, POOL, PageOutcome, PoolOffer, RequestId, ServerNumber};
use crate::index::Pool;
use crate::rules::Rule;
use crate::units::{Nanos, PageCount};
use std::ops::DerefMut;

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// Sets the memory servers that may have the pool, in any order. If the current server is not among them, the pool
    /// is given back at once.
    pub fn set_servers(&mut self, now: Nanos, servers: &[ServerNumber]) {
        let seat = self.pool.seat();
        if self.placement.replace(now, servers, seat, &mut self.actions) {
            self.actions.extend(self.pool.server().map(Action::Leave));
            self.lose_session(now);
        }
        self.place(now);
    }

    /// Stores the `offer` of a server that was asked (`None`: there is no connection), and starts a session if a server
    /// can be chosen. Releases a server that is no longer in the list.
    pub fn handle_answer(&mut self, now: Nanos, server: ServerNumber, offer: Option<PoolOffer>) {
        if !self.placement.answer(now, server, offer) && offer.is_some() {
            self.actions.push_back(Action::Release(server));
        }
        self.place(now);
    }

    /// Ends the session with `server`, whose connection was lost, and seeks another server. No replies may arrive after
    /// this call.
    pub fn handle_disconnected(&mut self, now: Nanos, server: ServerNumber) {
        if self.pool.is_at(server) {
            self.stats.disconnections += 1;
            self.lose_session(now);
            self.place(now);
        }
    }

    fn lose_session(&mut self, now: Nanos) {
        if let Some(seat) = self.pool.seat() {
            self.placement.lost(now, seat);
        }
        self.end_session(now);
    }

    /// Asks servers that are due, and starts a session once a server is chosen.
    fn place(&mut self, now: Nanos) {
        let need = self.pool.need(&self.index);
        self.placement.ask(now, &need, &mut self.actions);
        if let Some((server, offer)) = self.placement.choose(now, &need) {
            if self.pool.is_up() {
                self.stats.pool_moves += 1;
                self.actions.extend(self.pool.server().map(Action::Leave));
                self.end_session(now);
            }
            let seat = self.placement.begin(now, server, &offer, need.seat);
            self.actions.push_back(Action::Use(server));
            self.stats.connections += 1;
            self.keep_pages_of(Pool { server: server.0, generation: offer.generation }, offer.sends_received);
            self.pool.begin_session(seat, &offer, &mut self.index, &mut self.actions);
        }
        self.placement.release(now, self.pool.is_up(), &mut self.actions);
    }

    /// Makes `pool` the one that the index describes. If the index already describes it, its pages stay cached, except
    /// those that the server has not received. Otherwise all slots are dropped.
    fn keep_pages_of(&mut self, pool: Pool, sends_received: u64) {
        let is_same = |known: Pool| {
            known.generation == pool.generation && (known == pool || !self.rules.hold(Rule::PoolOfOneServer))
        };
        if self.index.pool(POOL).is_some_and(is_same) {
            // Pages were in transit when the connection broke, so their slots hold older pages.
            if self.rules.hold(Rule::LostSends) {
                self.stats.lost_sends += self.index.give_up_sends(POOL, sends_received);
            }
        } else {
            self.index.drop_all_slots();
        }
        self.index.begin_pool(POOL, pool, sends_received);
    }

    /// Ends the session, and leaves all reads that wait for the server to the disk.
    fn end_session(&mut self, now: Nanos) {
        self.pool.end_session(&mut self.index, &mut self.actions);
        self.race.forget_server(POOL);
        self.pool.take_fetches(&mut self.index);
        for id in self.requests.reads_waiting_for(POOL) {
            self.stats.fetch_disconnected += 1;
            self.give_up_pages(now, id);
        }
    }

    /// Stores the size that `server` granted its pool, and decides when to ask for another one.
    pub fn handle_sized(&mut self, now: Nanos, server: ServerNumber, npages: PageCount) {
        if !self.pool.is_at(server) {
            return;
        }
        self.pool.take_size(now, npages, &mut self.placement, &mut self.index, &mut self.actions);
    }

    /// Asks for another size, at once or after a pause. `server`, which refused, could grant `available` more pages.
    pub fn handle_size_refused(&mut self, now: Nanos, server: ServerNumber, available: PageCount) {
        if !self.pool.is_at(server) {
            return;
        }
        self.pool.take_refusal(now, available, &mut self.placement, &mut self.index, &mut self.actions);
    }

    /// Sets the size of the cache. Size 0 turns the cache off and drops its whole index, so that it starts cold when it
    /// is turned on again. The index must be large enough (see [`Self::needs_layout`]).
    pub fn resize(&mut self, wanted: PageCount) {
        if wanted.0 == 0 {
            self.index.drop_everything();
            let left = (self.index.slot_counts().used, self.index.known_blocks());
            assert!(left == (0, PageCount(0)), "a cache that is off knows {left:?}");
        }
        self.placement.look_soon();
        self.pool.want(wanted, &mut self.index, &mut self.actions);
    }

    /// Frees the room in the send window of pages that have left for the network on the session with `server`.
    pub fn handle_sent(&mut self, server: ServerNumber, pages: u32) {
        if self.pool.is_at(server) {
            self.pool.note_sent(pages);
        }
    }

    /// Checks the page that `server` sent for `fetch`, and completes the read if no other page is missing. Returns
    /// whether the driver must deliver the page or drop it.
    pub fn handle_page(&mut self, now: Nanos, server: ServerNumber, fetch: FetchId, page: &[u8]) -> PageOutcome {
        let Some(fetch) = self.end_fetch(now, server, fetch) else {
            self.stats.fetch_unexpected += 1;
            return PageOutcome::Unexpected;
        };
        let Some((left, asked)) = self.requests.pages_owed(fetch.request, fetch.serial) else {
            self.stats.fetch_late += 1;
            if !fetch.probe {
                self.race.note_server_alive(now, POOL);
            }
            return PageOutcome::Late;
        };
        if self.rules.hold(Rule::FetchCheck) && self.prints.page(page) != fetch.content {
            self.stats.fetch_wrong += 1;
            self.give_up_fetch(now, &fetch);
            return PageOutcome::Wrong;
        }
        // The block may have been written in the meantime. The slot then holds only a copy of its old content.
        if self.index.holds(fetch.slot, fetch.content) {
            // If pages are admitted as they are read, this one will not be sent again.
            let promote = self.admit.admission() == Admission::Reads && !self.disks.is_swap(fetch.block);
            self.index.hit(fetch.hint, fetch.block, fetch.slot, promote);
        }
        self.note_read_content(fetch.block, fetch.content);
        if left > 1 {
            self.requests.set_pages_owed(fetch.request, left - 1, asked);
        } else if let Some(request) = self.requests.get(fetch.request) {
            self.complete_from_cache(fetch.request, asked);
            self.race.note_server_first(now, &request, &mut self.stats);
        }
        PageOutcome::Deliver { request: fetch.request, offset: fetch.offset }
    }

    /// Removes a REQUEST that `server` replied to. Returns `None` if that server owes no such reply.
    fn end_fetch(&mut self, now: Nanos, server: ServerNumber, fetch: FetchId) -> Option<Fetch> {
        if self.pool.is_at(server) { self.pool.end_fetch(now, fetch, &mut self.index) } else { None }
    }

    /// Drops the slot of `fetch`, because `server` does not have its page, and leaves the read to the disk.
    pub fn handle_missing(&mut self, now: Nanos, server: ServerNumber, fetch: FetchId) {
        let Some(fetch) = self.end_fetch(now, server, fetch) else {
            self.stats.fetch_unexpected += 1;
            return;
        };
        self.stats.fetch_missing += 1;
        self.give_up_fetch(now, &fetch);
    }

    fn give_up_fetch(&mut self, now: Nanos, fetch: &Fetch) {
        if self.index.holds(fetch.slot, fetch.content) {
            self.index.drop_slot(fetch.slot);
        }
        if self.requests.pages_owed(fetch.request, fetch.serial).is_some() {
            self.give_up_pages(now, fetch.request);
        }
    }

    /// Returns whether a memory server may still answer this read.
    pub fn waits_for_server(&self, id: RequestId) -> bool {
        self.requests.get(id).is_some_and(|request| request.waits())
    }

    /// Returns the latest time at which `handle_timer` must be called, or `None` if nothing is due at any time.
    pub fn next_deadline(&mut self) -> Option<Nanos> {
        [self.race.late_deadline(&self.requests), self.other_deadline()].into_iter().flatten().min()
    }

    /// Returns the time at which to wake up if no event arrives before, or `None` if nothing is due at any time. It may
    /// be slightly later than [`Self::next_deadline`] if several reads wait.
    pub fn next_wake(&mut self) -> Option<Nanos> {
        [self.race.late_wake(&self.requests), self.other_deadline()].into_iter().flatten().min()
    }

    fn other_deadline(&self) -> Option<Nanos> {
        let place = self.placement.deadline(&self.pool.need(&self.index));
        let cut = self.index.is_cutting().then_some(Nanos(0));
        [self.pool.deadline(&self.index), place, cut].into_iter().flatten().min()
    }

    /// Does all work that is due: sends late reads to the disk, continues to forget disks and a change of size, gives up
    /// a silent server, and asks other servers.
    pub fn handle_timer(&mut self, now: Nanos) {
        self.ask_for_late(now);
        self.forget_disks();
        if self.pool.handle_timer(now, &mut self.index, &mut self.actions) {
            self.stats.disconnections += 1;
            self.actions.extend(self.pool.server().map(Action::GiveUp));
            if let Some(seat) = self.pool.seat() {
                self.placement.silent(now, seat);
            }
            self.end_session(now);
        }
        self.place(now);
    }

    /// Sends late reads to the disk where the race permits it.
    fn ask_for_late(&mut self, now: Nanos) {
        let credit = self.race.credit_before();
        while let Some(late) = self.race.next_late(now, credit, &self.requests, &mut self.stats) {
            if late.is_newly_late {
                self.pool.note_silence(now);
            }
            if let Some(reason) = late.reason {
                self.ask_disk(now, late.id, reason);
            }
        }
    }
}
