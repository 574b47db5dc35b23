//! Events of memory servers (pages and sizes) and of the timer. Answers and sessions are in `sessions.rs`.

use super::fetches::Fetch;
use super::pool_size::Refusal;
use super::requests::ReadReason;
use super::{DiskEngine, FetchId, PageOutcome, RequestId, ServerNumber};
use crate::index::Words;
use crate::rules::Rule;
use crate::units::{Nanos, PageCount, PoolIndex};

impl<M: Words> DiskEngine<M> {
    /// Stores the size that `server` granted its pool, and decides when to ask for another one.
    pub fn handle_sized(&mut self, now: Nanos, server: ServerNumber, npages: PageCount) {
        let Some(number) = self.pools.at(server) else { return };
        let pool = self.pools.pool_mut(number);
        if let Some(asked) = pool.size.take(now, npages, &mut self.index) {
            pool.note_answer(now);
            self.note_size(now, number, asked);
        }
    }

    /// Judges the size that a server granted, and gives the pools their shares.
    fn note_size(&mut self, now: Nanos, number: PoolIndex, asked: PageCount) {
        let pool = self.pools.pool(number);
        if let Some(seat) = pool.seat() {
            self.placement.note_size(now, seat, pool.size.granted(), asked);
        }
        self.pools.share(now, &mut self.index, &mut self.actions);
    }

    /// Gives up the slots from `npages` on of the pool at `server`, which takes their memory back. The session goes on, and
    /// others are asked for what is missing. The driver has stopped using these slots, and answers the server.
    pub fn handle_taken_back(&mut self, now: Nanos, server: ServerNumber, npages: PageCount) {
        let Some(number) = self.pools.at(server) else { return };
        self.stats.pools_cut += 1;
        let turn = (Some(server), self.pools.slots_each());
        let pool = self.pools.pool_mut(number);
        let had = pool.size.granted();
        pool.size.take_back(now, npages, turn, &mut self.index, &mut self.actions);
        self.note_size(now, number, had);
        self.placement.look_soon();
    }

    /// Asks for another size, at once or after a pause. `server`, which refused, could grant `available` more pages.
    pub fn handle_size_refused(&mut self, now: Nanos, server: ServerNumber, available: PageCount) {
        let Some(number) = self.pools.at(server) else { return };
        let pool = self.pools.pool_mut(number);
        match pool.size.take_refusal(now, available, &mut self.index) {
            None => {}
            Some(Refusal::Less) => {
                pool.note_answer(now);
                self.pools.share(now, &mut self.index, &mut self.actions);
            }
            Some(Refusal::Final(asked)) => {
                pool.note_answer(now);
                self.note_size(now, number, asked);
            }
        }
    }

    /// Sets the sizes of the cache without its local tier, and of the local tier, whose pool is given back at once if it is to
    /// have none. If both are 0, the cache is off: all that its index holds is dropped, so that it starts cold when it is turned on
    /// again. The index must be large enough for both (see [`Self::needs_layout`]).
    pub fn resize(&mut self, now: Nanos, wanted: PageCount, local: PageCount) {
        let limit = self.index.layout().slot_limit();
        self.pools.want(wanted.min(limit));
        self.pools.local.want(local.min(limit));
        self.curves.resize(PageCount(wanted.0.saturating_add(local.0)));
        if local.0 == 0 {
            self.leave_local(now);
        }
        if !self.pools.is_enabled() {
            self.forget_everything();
        }
        self.placement.look_soon();
        self.pools.local.ask(now, &mut self.actions);
        self.pools.share(now, &mut self.index, &mut self.actions);
        self.follow_change();
    }

    /// Frees the room in the send window of pages that have left for the network on the session with `server`.
    pub fn handle_sent(&mut self, server: ServerNumber, pages: u32) {
        if let Some(number) = self.pools.at(server) {
            self.pools.pool_mut(number).note_sent(pages);
        }
    }

    /// Checks the page that `server` sent for `fetch`, and completes the read if no other page is missing. Returns
    /// whether the driver must deliver the page or drop it.
    pub fn handle_page(&mut self, now: Nanos, server: ServerNumber, fetch: FetchId, page: &[u8]) -> PageOutcome {
        self.take_page(now, server, fetch, page, true)
    }

    /// Checks a page that has not left for `server` yet, as [`Self::handle_page`] does, and takes it for no answer of the server,
    /// which may hang.
    pub fn handle_unsent_page(&mut self, now: Nanos, server: ServerNumber, fetch: FetchId, page: &[u8]) -> PageOutcome {
        self.take_page(now, server, fetch, page, false)
    }

    fn take_page(
        &mut self,
        now: Nanos,
        server: ServerNumber,
        fetch: FetchId,
        page: &[u8],
        by_server: bool,
    ) -> PageOutcome {
        let Some(fetch) = self.pools.end_fetch(now, server, fetch, by_server, &mut self.index) else {
            self.stats.fetch_unexpected += 1;
            if by_server {
                self.note_lie(server);
            }
            return PageOutcome::Unexpected;
        };
        if by_server {
            self.streams.note_page(now, fetch.serial);
        }
        let Some((left, asked)) = self.requests.pages_owed(fetch.request, fetch.serial) else {
            self.stats.fetch_late += 1;
            if by_server && !fetch.probe {
                self.race.note_server_alive(now, fetch.pool);
            }
            return PageOutcome::Late;
        };
        let content = self.prints.page(page);
        if self.rules.hold(Rule::FetchCheck) && content != fetch.content {
            // Zeroes are a page that was not there when it was demoted: the memory of its pool was taken back.
            let is_missing = content == self.prints.zero();
            if is_missing {
                self.stats.fetch_missing += 1;
            } else {
                self.stats.fetch_wrong += 1;
                if by_server {
                    self.note_lie(server);
                }
            }
            self.give_up_fetch(now, &fetch);
            return PageOutcome::Wrong;
        }
        // If pages are admitted as they are read, or most evictions are not seen, a page that was hit will not be sent again.
        let stays = self.admit.takes_reads() || self.classes_seen() > 1;
        let pool = self.pools.pool_mut(fetch.pool);
        pool.hits += 1;
        // The block may have been written in the meantime. The slot then holds only a copy of its old content.
        if self.index.holds(fetch.slot, fetch.content) {
            let promote = stays && !self.disks.is_swap(fetch.block);
            self.index.hit(fetch.hint, fetch.block, fetch.slot, promote);
            if pool.is_local() && self.disks.is_swap(fetch.block) {
                self.index.note_silent(fetch.slot);
            } else if pool.drain.is_some() {
                // The guest has the page. When it evicts the page, another pool takes it.
                self.index.drop_slot(fetch.slot);
            }
        }
        self.note_read_content(fetch.block, fetch.content);
        if left > 1 {
            self.requests.set_pages_owed(fetch.request, left - 1, asked);
        } else if let Some(request) = self.requests.get(fetch.request) {
            self.complete_from_cache(fetch.request, asked);
            if !by_server {
                self.race.note_no_page(&request);
            } else if request.io.is_none_or(|io| io.reason != ReadReason::Stream) {
                self.streams.note_answer(now, request.rival, asked, request.issued);
                self.race.note_server_first(now, &request, &mut self.stats);
            }
        }
        PageOutcome::Deliver { request: fetch.request, offset: fetch.offset }
    }

    /// Drops the slot of `fetch`, because `server` does not have its page, and leaves the read to the disk.
    pub fn handle_missing(&mut self, now: Nanos, server: ServerNumber, fetch: FetchId) {
        let Some(fetch) = self.pools.end_fetch(now, server, fetch, true, &mut self.index) else {
            self.stats.fetch_unexpected += 1;
            return self.note_lie(server);
        };
        self.stats.fetch_missing += 1;
        self.give_up_fetch(now, &fetch);
    }

    fn note_lie(&mut self, server: ServerNumber) {
        match self.lies.iter_mut().find(|(liar, _)| *liar == server) {
            Some((_, count)) => *count += 1,
            None => self.lies.push((server, 1)),
        }
    }

    /// Returns how many pages and replies of `server` were not what it was asked for, in all its sessions.
    pub fn lies_of(&self, server: ServerNumber) -> u64 {
        self.lies.iter().find(|(liar, _)| *liar == server).map_or(0, |(_, count)| *count)
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
        let place = self.placement.deadline(|| self.pools.need(&self.index));
        let cut = self.index.is_cutting().then_some(Nanos(0));
        [self.pools.deadline(&self.index), place, cut].into_iter().flatten().min()
    }

    /// Does all work that is due: sends late reads to the disk, continues to forget disks and a change of size, gives up
    /// a silent server, and asks other servers.
    pub fn handle_timer(&mut self, now: Nanos) {
        self.ask_for_late(now);
        self.forget_disks();
        for number in self.pools.handle_timer(now, &mut self.index, &mut self.actions).iter() {
            self.give_up(now, number);
        }
        self.place(now);
    }

    /// Sends late reads to the disk where the race permits it.
    fn ask_for_late(&mut self, now: Nanos) {
        let credit = self.race.credit_before();
        while let Some(late) = self.race.next_late(now, credit, &self.requests, &mut self.stats) {
            if late.is_newly_late {
                self.pools.note_silence(now);
            }
            if let Some(reason) = late.reason {
                self.ask_disk(now, late.id, reason);
            }
        }
    }
}
