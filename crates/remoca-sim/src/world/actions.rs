//! The engine's actions. Each action is checked for whether the engine may request it.

use super::{Event, Outcome, Outstanding, World};
use crate::content::{BLOCK_SECTORS, Block, SECTOR_SIZE, Sector, block_at, describe};
use crate::guest::{DiskState, Pending, touched};
use crate::plan::Kind;
use crate::server::Message;
use crate::violation::{Promise, Violation};
use crate::wire::Phase;
use remoca_core::engine::{Action, FetchId, GuestOp, RequestId};
use remoca_core::units::{DiskIndex, PageCount, SlotIndex};

impl World<'_> {
    /// Executes all actions that the engine requests now.
    pub(super) fn execute(&mut self) -> Outcome {
        while let Some(action) = self.next_action() {
            match action {
                Action::Disk { request, disk, op } => self.disk_action(request, disk, op, DiskState::Running)?,
                Action::DiskToo { request, disk, op } => {
                    let starves = self.vm.machine.starves && self.random.one_in(2);
                    let state = if starves { DiskState::Starved } else { DiskState::Hedged };
                    self.disk_action(request, disk, op, state)?;
                }
                Action::ZeroFill { request, offset, length } => {
                    let sectors = vec![Sector::ZERO; length as usize / SECTOR_SIZE];
                    self.deliver(request, offset, &sectors)?;
                }
                Action::Complete { request, result } => self.completed(request, result)?,
                Action::Fetch { fetch, at } => self.fetch(fetch, at.slot)?,
                Action::SendBlock { admitted, request, offset } => {
                    self.send_block(admitted.at.slot, request, offset)?
                }
                Action::MovePage { from, to, .. } => {
                    self.check_not_reused(to)?;
                    self.tally.moves += 1;
                    self.send(Message::Move { from, to })?;
                }
                Action::SetSize { npages, .. } => self.set_size(npages)?,
                Action::Ask(server) => self.ask(server)?,
                Action::Use(server) => self.use_connection(server)?,
                Action::Release(server) => self.release(server)?,
                Action::GiveUp(_) => {
                    self.note(None, || "the engine gives up the connection".into());
                    self.tally.given_up += 1;
                    self.drop_connection();
                }
                Action::Leave(_) => self.leave_server()?,
                Action::ForeignWriter(disk) => {
                    let text = format!("disk {}: somebody else is said to write to it", disk.0);
                    self.fail(Violation::new(Promise::NoFalseAlarm, text))?;
                }
            }
        }
        for page in std::mem::take(&mut self.vm.captured) {
            if !self.vm.is_dead() {
                self.judge_frame(page)?;
            }
        }
        Ok(())
    }

    /// Returns the next action, or `None` if there is none or the process dies here.
    fn next_action(&mut self) -> Option<Action> {
        if let Some(left) = &mut self.vm.actions_left {
            *left = left.saturating_sub(1);
        }
        if self.vm.is_dead() { None } else { self.vm.engine.poll_action() }
    }

    fn disk_action(&mut self, id: RequestId, disk: DiskIndex, op: GuestOp, state: DiskState) -> Outcome {
        let disk = self.vm.disk_of(disk);
        let is_free = |p: &mut Pending| matches!(p.state, DiskState::NotAsked | DiskState::Failed(_));
        let asked = self.vm.guest.pending(id).map(|p| (p.disk, p.op, is_free(p)));
        if asked != Some((disk, op, true)) {
            let text = format!("request {} is {asked:?}, and the disk is asked for {op:?}", id.0);
            return self.fail(Violation::new(Promise::DiskOnlyAsAsked, text));
        }
        self.tally.disk_ios += 1;
        if let Some(moving) = &mut self.vm.moving {
            moving.wrote |= !matches!(op, GuestOp::Read(_) | GuestOp::Flush);
        }
        match state {
            DiskState::Starved => self.starve(id),
            _ => self.issue(id, disk, state),
        }
        Ok(())
    }

    /// Postpones a disk read until a buffer is available.
    fn starve(&mut self, id: RequestId) {
        self.tally.hedges_starved += 1;
        self.vm.ios += 1;
        let serial = self.vm.ios;
        self.vm.starved.insert(id, serial);
        if let Some(pending) = self.vm.guest.pending(id) {
            pending.state = DiskState::Starved;
        }
        let ns = self.random.below(self.plan.scenario.disk_ns * 4);
        self.schedule(ns, Event::Feed(id, serial));
    }

    /// Provides a buffer for a read of the disk, unless the read is no longer needed.
    pub(super) fn feed(&mut self, id: RequestId, serial: u64) -> Outcome {
        if self.vm.starved.get(&id) != Some(&serial) {
            return Ok(());
        }
        self.vm.starved.remove(&id);
        if self.vm.guest.skip_loser(id) {
            self.note(None, || format!("request {}: the disk is not asked any more", id.0));
            self.tally.hedges_skipped += 1;
            self.vm.engine.handle_disk_skipped(id);
            return self.execute();
        }
        let disk = self.vm.guest.pending(id).map(|pending| pending.disk);
        if let Some(disk) = disk {
            self.issue(id, disk, DiskState::Hedged);
        }
        Ok(())
    }

    /// Writes sectors into the buffer of a read that the disk has not answered.
    pub(super) fn deliver(&mut self, id: RequestId, offset: u32, sectors: &[Sector]) -> Outcome {
        let start = offset as usize / SECTOR_SIZE;
        let Some(pending) = self.vm.guest.pending(id) else {
            let text = format!("a page for request {}, which is over", id.0);
            return self.fail(Violation::new(Promise::NoLateDelivery, text));
        };
        let fits = pending.kind == Kind::Read && start + sectors.len() <= pending.buffer.len();
        if !fits || matches!(pending.state, DiskState::Running | DiskState::Done(_)) {
            let text = format!("a page at {offset} of request {} in state {:?}", id.0, pending.state);
            return self.fail(Violation::new(Promise::NoLateDelivery, text));
        }
        pending.buffer[start..start + sectors.len()].copy_from_slice(sectors);
        self.capture(id, start..start + sectors.len());
        let Some(pending) = self.vm.guest.pending(id) else { return Ok(()) };
        let about =
            (pending.disk, touched(&(pending.sectors.start + start..pending.sectors.start + start + sectors.len())));
        self.note(Some(about), || format!("request {} gets {}", id.0, describe(sectors)));
        Ok(())
    }

    fn fetch(&mut self, fetch: FetchId, slot: SlotIndex) -> Outcome {
        if self.vm.outstanding.insert(fetch, Outstanding { slot, event: self.event }).is_some() {
            let text = format!("{fetch:?} is issued twice");
            return self.fail(Violation::new(Promise::ProtocolKept, text));
        }
        if self.vm.outstanding.len() > self.vm.machine.fetch_limit as usize {
            let text = format!("{} REQUESTs are outstanding", self.vm.outstanding.len());
            self.fail(Violation::new(Promise::Bounded, text))?;
        }
        self.send(Message::Request { fetch, slot })
    }

    fn send_block(&mut self, slot: SlotIndex, id: RequestId, offset: u32) -> Outcome {
        let start = offset as usize / SECTOR_SIZE;
        let page = match self.vm.guest.pending(id) {
            Some(pending) if start + BLOCK_SECTORS <= pending.buffer.len() => block_at(&pending.buffer, start),
            _ => {
                let text = format!("a page at {offset} of request {} is to be sent", id.0);
                return self.fail(Violation::new(Promise::ProtocolKept, text));
            }
        };
        self.send_page(slot, page)
    }

    /// Sends SENDPAGE to the server.
    pub(super) fn send_page(&mut self, slot: SlotIndex, page: Block) -> Outcome {
        self.check_not_reused(slot)?;
        self.tally.pages_sent += 1;
        self.vm.life.pages_sent += 1;
        self.send(Message::SendPage { slot, page })?;
        if self.vm.wire.pages_waiting() > self.vm.machine.send_window {
            let text = format!("{} pages wait for the connection", self.vm.wire.pages_waiting());
            self.fail(Violation::new(Promise::Bounded, text))?;
        }
        Ok(())
    }

    fn set_size(&mut self, size: PageCount) -> Outcome {
        if std::mem::replace(&mut self.vm.size_asked, true) {
            self.fail(Violation::new(Promise::ProtocolKept, "SETSIZE before the last one was answered"))?;
        }
        self.send(Message::SetSize(size))
    }

    fn check_not_reused(&mut self, slot: SlotIndex) -> Outcome {
        match self.vm.outstanding.iter().find(|(_, busy)| busy.slot == slot) {
            Some((fetch, _)) => {
                let text = format!("{slot:?} gets another page while {fetch:?} for it is outstanding");
                self.fail(Violation::new(Promise::SlotNotReused, text))
            }
            None => Ok(()),
        }
    }

    fn send(&mut self, message: Message) -> Outcome {
        self.note(None, || format!("to the server: {}", brief(&message)));
        if self.vm.wire.phase != Phase::Up {
            let text = format!("{} without a connection", brief(&message));
            return self.fail(Violation::new(Promise::ProtocolKept, text));
        }
        self.vm.wire.queue.push_back(message);
        self.pump();
        Ok(())
    }

    /// Schedules the next message to leave, if there is one and the network has room.
    pub(super) fn pump(&mut self) {
        let room = self.vm.wire.on_the_way() < u64::from(self.plan.scenario.wire_limit);
        if !self.vm.wire.leaving && room && !self.vm.wire.queue.is_empty() {
            self.vm.wire.leaving = true;
            let ns = self.random.between(1_000..=30_000);
            self.schedule(ns, Event::Leave(self.vm.wire.id));
        }
    }
}

fn brief(message: &Message) -> String {
    match message {
        Message::SendPage { slot, page } => format!("page {} into slot {}", describe(page), slot.0),
        Message::Request { fetch, slot } => format!("request {} for slot {}", fetch.0, slot.0),
        Message::SetSize(size) => format!("size {}", size.0),
        Message::Move { from, to } => format!("move slot {} to {}", from.0, to.0),
    }
}
