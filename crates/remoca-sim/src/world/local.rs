//! The local tier of a VM: a pool in memory of its host, which the process reads and writes by itself, at once.
//!
//! Each host has a pool for the VM. It outlives the process. The server cannot count the pages that are written, so the
//! process does, at the end of each event; what it does not count its successor gives up.

use super::{Event, Outcome, World};
use crate::HostRule;
use crate::content::{Block, Sector, bytes, describe};
use crate::server::{Message, Pool, Reply};
use crate::violation::{Promise, Violation};
use remoca_core::engine::{Admission, Admitted, FetchId, PageOutcome, PoolOffer, PoolSlot, ServerNumber};
use remoca_core::units::{Nanos, PageCount};
use std::collections::BTreeMap;

/// Number by which the engine knows the server of the local tier, on each host.
pub(super) const LOCAL: ServerNumber = ServerNumber(u32::MAX);

/// Event of the local tier.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LocalEvent {
    /// The server answers the question of this number.
    Answer(u64),
    /// The server answers a SETSIZE of the session of this number.
    Size(u64, PageCount),
    /// The server is back without the pool.
    Over,
}

/// The local tier of one VM.
#[derive(Debug, Default)]
pub(super) struct LocalTier {
    /// Pool on each host.
    pools: BTreeMap<usize, Pool>,
    /// Number of pages that each server has for it.
    memory: u32,
    /// Serial number of the newest question and session.
    serial: u64,
    is_asked: bool,
    is_answered: bool,
    is_up: bool,
    pub(super) is_size_owed: bool,
    /// Time until which the server does not listen.
    gone_until: Nanos,
}

impl LocalTier {
    pub(super) fn new(memory: u32) -> Self {
        Self { memory, ..Self::default() }
    }

    /// Returns the pool on a host, whose generation is that of no other host.
    fn pool(&mut self, host: usize) -> &mut Pool {
        self.pools.entry(host).or_insert_with(|| Pool::of_generation(host as u64 * 1_000_000 + 1))
    }

    /// Ends the session with its process, which has counted the pages that were written in events before this one, or all of
    /// them if it `ends_well`.
    pub(super) fn lose_process(&mut self, ends_well: bool) {
        (self.is_asked, self.is_answered, self.is_up, self.is_size_owed) = (false, false, false, false);
        self.pools.values_mut().for_each(|pool| pool.end_count(ends_well));
    }

    /// Counts the pages that were written in an event that has ended.
    pub(super) fn count(&mut self) {
        self.pools.values_mut().for_each(Pool::count);
    }

    /// Forgets how many pages were counted: another process does not learn that number.
    pub(super) fn forget_counts(&mut self) {
        self.pools.values_mut().for_each(Pool::forget_count);
    }

    /// Ends the pools of a process that starts cold, or on a host that has failed.
    pub(super) fn end_pools(&mut self) {
        self.pools.values_mut().for_each(|pool| pool.close(0));
    }

    /// Returns the pool that the process has now, or `None` if it has none.
    pub(super) fn current(&self, host: usize) -> Option<&Pool> {
        self.pools.get(&host)
    }
}

impl World<'_> {
    fn local_pool(&mut self) -> &mut Pool {
        let host = self.vm.host;
        self.vm.local.pool(host)
    }

    /// Sends an admitted page to its slot, and the page that is there to another one before, if that moves.
    pub(super) fn send_admitted(&mut self, admitted: Admitted, page: Block) -> Outcome {
        let Admitted { at, demoted_to } = admitted;
        self.vm.life.pages_sent += 1;
        if self.holds(HostRule::DemoteFirst) {
            demoted_to.map_or(Ok(()), |to| self.demote(at, to))?;
            self.store(at, page)
        } else {
            self.store(at, page)?;
            demoted_to.map_or(Ok(()), |to| self.demote(at, to))
        }
    }

    fn demote(&mut self, at: PoolSlot, to: PoolSlot) -> Outcome {
        if at.server != LOCAL || to.server == LOCAL {
            let text = format!("a page is demoted from {at:?} to {to:?}");
            return self.fail(Violation::new(Promise::ProtocolKept, text));
        }
        self.tally.demoted += 1;
        // Zeroes if it is not there.
        let page = self.local_pool().page(at.slot).unwrap_or([Sector::ZERO; _]);
        self.send_page(to, page)
    }

    fn store(&mut self, at: PoolSlot, page: Block) -> Outcome {
        if at.server != LOCAL {
            return self.send_page(at, page);
        }
        self.tally.pages_sent += 1;
        self.local_message(Message::SendPage { slot: at.slot, page })?;
        self.vm.engine.handle_sent(LOCAL, 1);
        Ok(())
    }

    /// Executes what the process does to its memory.
    pub(super) fn local_message(&mut self, message: Message) -> Outcome {
        if !self.vm.local.is_up {
            return self.fail(Violation::new(Promise::ProtocolKept, format!("{message:?} without a local tier")));
        }
        match self.local_pool().handle(message, 0) {
            Ok(_) => Ok(()),
            Err(slot) => {
                let text = format!("{slot:?} of a local tier of {} pages", self.local_pool().size().0);
                self.fail(Violation::new(Promise::ProtocolKept, text))
            }
        }
    }

    /// Reads a page, which is there at once.
    pub(super) fn local_fetch(&mut self, fetch: FetchId, at: PoolSlot) -> Outcome {
        if !self.vm.local.is_up {
            return self.fail(Violation::new(Promise::ProtocolKept, format!("{fetch:?} without a local tier")));
        }
        let mut page = self.local_pool().page(at.slot);
        if self.plan.scenario.faults.lies && self.random.one_in(6) {
            page = page.map(|_| std::array::from_fn(|_| Sector::garbage(&mut self.random)));
        }
        let Some(page) = page else {
            self.note(None, || format!("the page for {fetch:?} was taken back"));
            self.vm.engine.handle_missing(self.clock(), LOCAL, fetch);
            return Ok(());
        };
        let outcome = self.vm.engine.handle_page(self.clock(), LOCAL, fetch, &bytes(&page));
        self.note(None, || format!("page {} of the local tier for {fetch:?}: {outcome:?}", describe(&page)));
        self.tally.local_reads += 1;
        let PageOutcome::Deliver { request, offset } = outcome else { return Ok(()) };
        if self.vm.engine.status().admission == Admission::Reads {
            self.vm.guest.forget_known();
        }
        self.deliver(request, offset, &page)
    }

    pub(super) fn local_set_size(&mut self, size: PageCount) -> Outcome {
        if std::mem::replace(&mut self.vm.local.is_size_owed, true) {
            self.fail(Violation::new(Promise::ProtocolKept, "SETSIZE before the last one was answered"))?;
        }
        let (ns, serial) = (self.random.between(1_000..=5_000_000), self.vm.local.serial);
        self.schedule(ns, Event::Local(LocalEvent::Size(serial, size)));
        Ok(())
    }

    pub(super) fn local_ask(&mut self) -> Outcome {
        let tier = &mut self.vm.local;
        if std::mem::replace(&mut tier.is_asked, true) || tier.is_answered || tier.is_up {
            return self.fail(Violation::new(Promise::ProtocolKept, "the local server is asked twice"));
        }
        tier.serial += 1;
        let (ns, serial) = (self.random.between(1_000..=5_000_000), self.vm.local.serial);
        self.schedule(ns, Event::Local(LocalEvent::Answer(serial)));
        Ok(())
    }

    pub(super) fn local_use(&mut self) -> Outcome {
        if !std::mem::take(&mut self.vm.local.is_answered) || std::mem::replace(&mut self.vm.local.is_up, true) {
            self.fail(Violation::new(Promise::ProtocolKept, "a session of the local tier begins from nothing"))?;
        }
        self.tally.connects += 1;
        Ok(())
    }

    pub(super) fn local_release(&mut self) -> Outcome {
        self.tally.released += 1;
        if !std::mem::take(&mut self.vm.local.is_answered) {
            self.fail(Violation::new(Promise::ProtocolKept, "the local server is released, and did not answer"))?;
        }
        self.local_pool().close(0);
        Ok(())
    }

    /// Ends the session, and gives the pool back.
    pub(super) fn local_leave(&mut self) -> Outcome {
        self.tally.left += 1;
        (self.vm.local.is_up, self.vm.local.is_size_owed) = (false, false);
        self.local_pool().close(0);
        Ok(())
    }

    /// Ends the session of a server that does not answer.
    pub(super) fn local_give_up(&mut self) {
        (self.vm.local.is_up, self.vm.local.is_size_owed) = (false, false);
    }

    pub(super) fn local_event(&mut self, event: LocalEvent) -> Outcome {
        if !self.vm.up {
            return Ok(());
        }
        match event {
            LocalEvent::Answer(serial) if self.vm.local.is_asked && serial == self.vm.local.serial => {
                self.vm.local.is_asked = false;
                let listens = self.vm.local.gone_until <= self.now;
                let offer = listens.then(|| self.local_offer());
                self.vm.local.is_answered = listens;
                self.note(None, || format!("the local server answers: {offer:?}"));
                self.vm.engine.handle_answer(self.clock(), LOCAL, offer);
            }
            LocalEvent::Size(serial, size) if self.vm.local.is_up && serial == self.vm.local.serial => {
                self.vm.local.is_size_owed = false;
                let free = self.vm.local.memory.saturating_sub(self.local_pool().size().0);
                let reply = self.local_pool().handle(Message::SetSize(size), free);
                self.note(None, || format!("the local server answers SETSIZE {}: {reply:?}", size.0));
                match reply {
                    Ok(Some(Reply::Sized(size))) => self.vm.engine.handle_sized(self.clock(), LOCAL, size),
                    Ok(Some(Reply::Refused { available })) => {
                        self.vm.engine.handle_size_refused(self.clock(), LOCAL, available);
                    }
                    _ => {}
                }
            }
            LocalEvent::Over if self.vm.local.is_up => {
                self.note(None, || "the local server is back without the pool".into());
                self.local_give_up();
                self.local_pool().close(0);
                self.vm.engine.handle_disconnected(self.clock(), LOCAL);
            }
            LocalEvent::Answer(_) | LocalEvent::Size(..) | LocalEvent::Over => return Ok(()),
        }
        self.execute()
    }

    fn local_offer(&mut self) -> PoolOffer {
        let memory = self.vm.local.memory;
        let pool = self.local_pool();
        pool.offer(memory.saturating_sub(pool.size().0))
    }

    /// Restarts the server of this host without a service manager, or takes pages back: a step of the plan that means another
    /// server may mean this one too.
    pub(super) fn local_fault(&mut self, taken: Option<u32>, gone_ns: u64) {
        if self.vm.machine.local == 0 || !self.random.one_in(2) {
            return;
        }
        if let Some(count) = taken {
            self.note(None, || format!("the local server takes up to {count} pages back"));
            let (host, vm) = (self.vm.host, &mut self.vm);
            vm.local.pool(host).take(count, &mut self.random);
            return;
        }
        self.vm.local.gone_until = self.now.plus_ns(gone_ns);
        let ns = gone_ns + self.random.below(5_000_000);
        self.schedule(ns, Event::Local(LocalEvent::Over));
    }

    /// Resizes the local tier, beside the rest of the cache.
    pub(super) fn resize_local(&mut self) {
        if self.vm.machine.local == 0 || !self.random.one_in(2) {
            return;
        }
        let size = *self.random.pick(&[0, 1, 4, 9, 16]);
        self.note(None, || format!("the operator sets the local tier to {size} pages"));
        self.vm.config.local = PageCount(size);
    }

    /// Checks, with a server that works, that the local tier is as large as requested, or as its server can provide.
    pub(super) fn check_local_size(&mut self) -> Outcome {
        let status = self.vm.engine.status();
        let granted = status.local_granted;
        let wanted = status.local_wanted.min(PageCount(self.vm.local.memory));
        let has = if self.vm.local.is_up { self.local_pool().size() } else { PageCount(0) };
        if granted == wanted && (has == granted || granted.0 == 0) {
            return Ok(());
        }
        let text = format!("{status:?}, and the local server gave {has:?} of {}", self.vm.local.memory);
        self.fail(Violation::new(Promise::Useful, text))
    }
}
