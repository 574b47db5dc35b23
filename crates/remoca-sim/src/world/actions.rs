//! The engine's actions. Each action is checked for whether the engine may request it.

use super::local::LOCAL;
use super::{Event, Outcome, Outstanding, World};
use crate::content::{BLOCK_SECTORS, Block, SECTOR_SIZE, Sector, block_at, describe};
use crate::guest::{DiskState, Pending, touched};
use crate::plan::Kind;
use crate::server::Message;
use crate::violation::{Promise, Violation};
use crate::wire::ConnectionId;
use remoca_core::engine::{Action, Admitted, FetchId, GuestOp, PoolSlot, RequestId, ServerNumber};
use remoca_core::units::{DiskIndex, PageCount};

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
                Action::Fetch { fetch, at } if at.server == LOCAL => self.local_fetch(fetch, at)?,
                Action::Fetch { fetch, at } => self.fetch(fetch, at)?,
                Action::SendBlock { admitted, request, offset } => self.send_block(admitted, request, offset)?,
                Action::MovePage { server, from, to } => {
                    self.check_not_reused(PoolSlot { server, slot: to })?;
                    self.tally.moves += 1;
                    match server {
                        LOCAL => self.local_message(Message::Move { from, to })?,
                        server => self.send(server, Message::Move { from, to })?,
                    }
                }
                Action::SetSize { server: LOCAL, npages } => self.local_set_size(npages)?,
                Action::Ask(LOCAL) => self.local_ask()?,
                Action::Use(LOCAL) => self.local_use()?,
                Action::Release(LOCAL) => self.local_release()?,
                Action::GiveUp(LOCAL) => self.local_give_up(),
                Action::Leave(LOCAL) => self.local_leave()?,
                Action::SetSize { server, npages } => self.set_size(server, npages)?,
                Action::Ask(server) => self.ask(server)?,
                Action::Use(server) => self.use_connection(server)?,
                Action::Release(server) => self.release(server)?,
                Action::GiveUp(server) => self.give_up(server)?,
                Action::Leave(server) => self.leave_server(server)?,
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

    fn fetch(&mut self, fetch: FetchId, at: PoolSlot) -> Outcome {
        if self.vm.outstanding.insert(fetch, Outstanding { at, event: self.event }).is_some() {
            let text = format!("{fetch:?} is issued twice");
            return self.fail(Violation::new(Promise::ProtocolKept, text));
        }
        let owed = self.vm.outstanding.values().filter(|other| other.at.server == at.server).count();
        if owed > self.vm.machine.fetch_limit as usize {
            let text = format!("{owed} REQUESTs are outstanding");
            self.fail(Violation::new(Promise::Bounded, text))?;
        }
        self.send(at.server, Message::Request { fetch, slot: at.slot })
    }

    fn send_block(&mut self, admitted: Admitted, id: RequestId, offset: u32) -> Outcome {
        let start = offset as usize / SECTOR_SIZE;
        let page = match self.vm.guest.pending(id) {
            Some(pending) if start + BLOCK_SECTORS <= pending.buffer.len() => block_at(&pending.buffer, start),
            _ => {
                let text = format!("a page at {offset} of request {} is to be sent", id.0);
                return self.fail(Violation::new(Promise::ProtocolKept, text));
            }
        };
        self.send_admitted(admitted, page)
    }

    /// Sends SENDPAGE to a server.
    pub(super) fn send_page(&mut self, at: PoolSlot, page: Block) -> Outcome {
        self.check_not_reused(at)?;
        self.tally.pages_sent += 1;
        self.send(at.server, Message::SendPage { slot: at.slot, page })?;
        let waiting = self.vm.wire_to(at.server).map_or(0, |wire| wire.pages_waiting());
        if waiting > self.vm.machine.send_window {
            let text = format!("{waiting} pages wait for the connection");
            self.fail(Violation::new(Promise::Bounded, text))?;
        }
        Ok(())
    }

    fn set_size(&mut self, server: ServerNumber, size: PageCount) -> Outcome {
        if self.vm.wire_to(server).is_some_and(|wire| std::mem::replace(&mut wire.size_asked, true)) {
            self.fail(Violation::new(Promise::ProtocolKept, "SETSIZE before the last one was answered"))?;
        }
        self.send(server, Message::SetSize(size))
    }

    fn check_not_reused(&mut self, at: PoolSlot) -> Outcome {
        match self.vm.outstanding.iter().find(|(_, busy)| busy.at == at) {
            Some((fetch, _)) => {
                let text = format!("{at:?} gets another page while {fetch:?} for it is outstanding");
                self.fail(Violation::new(Promise::SlotNotReused, text))
            }
            None => Ok(()),
        }
    }

    fn send(&mut self, server: ServerNumber, message: Message) -> Outcome {
        self.note(None, || format!("to {server:?}: {}", brief(&message)));
        let Some(wire) = self.vm.wire_to(server) else {
            let text = format!("{} without a connection to {server:?}", brief(&message));
            return self.fail(Violation::new(Promise::ProtocolKept, text));
        };
        wire.queue.push_back(message);
        let connection = wire.id;
        self.pump(connection);
        Ok(())
    }

    /// Schedules the next message to leave, if there is one and the network has room.
    pub(super) fn pump(&mut self, connection: ConnectionId) {
        let limit = u64::from(self.plan.scenario.wire_limit);
        let Some(wire) = self.vm.wire(connection) else { return };
        if !wire.leaving && wire.on_the_way() < limit && !wire.queue.is_empty() {
            wire.leaving = true;
            let ns = self.random.between(1_000..=30_000);
            self.schedule(ns, Event::Leave(connection));
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
