//! The guest's side of the world: requests, completions, the disks' I/O, and evicted pages.

use super::{Event, Outcome, World};
use crate::content::{BLOCK_SECTORS, Block, SECTOR_SIZE, Sector, block_at, bytes, describe};
use crate::disk::{Applied, Io, IoId, IoKind};
use crate::guest::{DiskState, Pending, covered, touched};
use crate::plan::{Eviction, Fill, Kind};
use crate::violation::{Promise, Violation};
use remoca_core::engine::{
    Admission, BreakerState, CLASSES, DiskError, Evicted, GuestOp, PoolSlot, PoolStatus, RequestId,
};
use remoca_core::units::ByteRange;
use std::collections::BTreeSet;
use std::ops::Range;

/// Error of a failing disk: EIO.
pub(super) const EIO: i32 = 5;

pub(super) fn byte_range(sectors: &Range<usize>) -> ByteRange {
    let size = SECTOR_SIZE as u64;
    ByteRange { offset: sectors.start as u64 * size, length: sectors.len() as u64 * size }
}

fn guest_op(kind: Kind, sectors: &Range<usize>) -> GuestOp {
    let range = byte_range(sectors);
    match kind {
        Kind::Read => GuestOp::Read(range),
        Kind::Write { durable, .. } => GuestOp::Write { range, durable },
        Kind::Flush => GuestOp::Flush,
        Kind::Discard => GuestOp::Discard(range),
        Kind::WriteZeroes { may_unmap, durable } => GuestOp::WriteZeroes { range, may_unmap, durable },
    }
}

impl World<'_> {
    /// Submits a request of the guest, if it may have one more in flight.
    pub(super) fn submit(&mut self, number: usize, disk: u16, sectors: Range<usize>, kind: Kind) -> Outcome {
        let runs = self.guest_runs() && !self.vm.detached[usize::from(disk)];
        let Some(id) = self.vm.guest.free_id().filter(|_| runs) else {
            self.tally.skipped += 1;
            return Ok(());
        };
        let buffer = match kind {
            Kind::Read => vec![Sector::UNFILLED; sectors.len()],
            Kind::Write { fill, .. } => self.fill(number, disk, &sectors, fill),
            Kind::Flush | Kind::Discard | Kind::WriteZeroes { .. } => Vec::new(),
        };
        let op = guest_op(kind, &sectors);
        let frames = if kind == Kind::Read { sectors.len() / BLOCK_SECTORS } else { 0 };
        let frames = self.vm.guest.take_frames(frames, self.vm.machine.leaves_pages, &mut self.random);
        let promise = if kind == Kind::Flush { self.vm.disks[usize::from(disk)].flush_promise() } else { Vec::new() };
        self.note(Some((disk, touched(&sectors))), || {
            format!("step {number}: request {} = {kind:?} of sectors {sectors:?} {}", id.0, describe(&buffer))
        });
        let pending = Pending {
            disk,
            sectors,
            kind,
            op,
            beyond: false,
            submitted: self.event,
            buffer,
            taken: None,
            state: DiskState::NotAsked,
            io: None,
            applied: None,
            frames,
            undisturbed: true,
            promise,
        };
        self.tally.requests += 1;
        self.vm.guest.begin(id, pending);
        if self.accepts() { self.hand_over(id) } else { Ok(()) }
    }

    /// Passes a request of the guest to the process.
    pub(super) fn hand_over(&mut self, id: RequestId) -> Outcome {
        let Some(pending) = self.vm.guest.pending(id) else { return Ok(()) };
        let (disk, op) = (pending.disk, pending.op);
        let end = pending.sectors.end;
        pending.taken = Some(self.event);
        let is_beyond = self.vm.numbers[usize::from(disk)].is_none() || end > self.vm.sizes[usize::from(disk)];
        let Some(pending) = self.vm.guest.pending(id) else { return Ok(()) };
        pending.beyond = is_beyond;
        if is_beyond {
            self.tally.requests_beyond += 1;
        } else if matches!(op, GuestOp::Read(range) if range.covered_blocks() != range.touched_blocks()) {
            let blocks = touched(&pending.sectors).len() as u64;
            self.vm.life.misaligned_blocks += blocks;
            self.tally.misaligned_blocks += blocks;
        }
        self.vm.engine.handle_request(self.clock(), id, self.vm.index_of(disk), op);
        self.execute()
    }

    fn fill(&self, number: usize, disk: u16, sectors: &Range<usize>, fill: Fill) -> Vec<Sector> {
        let unique = |(i, _)| Sector::written(number, i);
        match fill {
            Fill::Unique => sectors.clone().enumerate().map(unique).collect(),
            Fill::Template(class) => vec![Sector::template(class); sectors.len()],
            Fill::Zero => vec![Sector::ZERO; sectors.len()],
            Fill::SwapHeader(last) => {
                let mut buffer = self.fill(number, disk, sectors, Fill::Unique);
                if let Some(block) = covered(sectors).next() {
                    let at = block * BLOCK_SECTORS - sectors.start;
                    buffer[at..at + BLOCK_SECTORS].copy_from_slice(&Sector::swap_header(last));
                }
                buffer
            }
            Fill::Same => self.vm.disks[usize::from(disk)].content(sectors.clone()).collect(),
        }
    }

    /// Issues the I/O of a request to its disk.
    pub(super) fn issue(&mut self, id: RequestId, disk: u16, state: DiskState) {
        self.vm.ios += 1;
        let io = IoId(self.vm.ios << 8 | u64::from(id.0));
        let faulty = self.plan.scenario.faults.disk;
        let Some(pending) = self.vm.guest.pending(id) else { return };
        pending.state = state;
        pending.io = Some(io);
        let (kind, durable) = match pending.kind {
            Kind::Read => (IoKind::Read, false),
            Kind::Write { durable, .. } => (IoKind::Write, durable),
            Kind::Flush => (IoKind::Flush, false),
            Kind::Discard => (IoKind::Discard, false),
            Kind::WriteZeroes { durable, .. } => (IoKind::WriteZeroes, durable),
        };
        let data = if kind == IoKind::Write { pending.buffer.clone() } else { Vec::new() };
        let error = (faulty && self.random.one_in(20)).then_some(EIO);
        let io_state = Io { kind, sectors: pending.sectors.clone(), durable, data, error, issued: self.event };
        let portions = u8::try_from(self.random.between(1..=3)).unwrap_or(1);
        let goes_on = self.vm.disks[usize::from(disk)].is_before(&io_state.sectors);
        self.vm.disks[usize::from(disk)].issue(io, io_state, portions, &mut self.random);
        let base = self.plan.scenario.disk_ns;
        let spike = if faulty && self.random.one_in(40) { 30 } else { 1 };
        let total = self.random.between(base / 4..=base * 2) * spike;
        let total = if self.vm.machine.seeks && goes_on { total / 16 + 1 } else { total };
        for portion in 0..portions {
            let at = self.random.below(total);
            self.schedule(at, Event::Portion { disk, io, portion });
        }
        self.schedule(total, Event::IoDone { disk, io });
    }

    /// Completes an I/O of a disk.
    pub(super) fn io_done(&mut self, disk: u16, io: IoId) -> Outcome {
        let Some(done) = self.vm.disks[usize::from(disk)].finish(io, &mut self.random) else { return Ok(()) };
        let id = RequestId(u32::try_from(io.0 & 0xff).unwrap_or(0));
        let enabled = self.vm.engine.status().enabled;
        if self.vm.guest.end_loser(id, io) {
            self.note(None, || format!("request {}: the disk says {:?}, too late", id.0, done.result));
            self.vm.engine.handle_disk_done(self.clock(), id, done.result.map_err(DiskError), &bytes(&done.data));
            return self.execute();
        }
        let Some(pending) = self.vm.guest.pending(id).filter(|pending| pending.io == Some(io)) else { return Ok(()) };
        if let (DiskState::Hedged, Err(error)) = (pending.state, done.result) {
            pending.state = DiskState::Failed(error);
            self.note(None, || format!("request {}: the disk fails, the server may not", id.0));
            self.vm.engine.handle_disk_done(self.clock(), id, Err(DiskError(error)), &[]);
            return self.execute();
        }
        pending.state = DiskState::Done(done.result);
        pending.applied = done.write;
        if pending.kind == Kind::Read {
            pending.buffer = done.data;
        }
        let (sectors, buffer) = (pending.sectors.clone(), pending.buffer.clone());
        let teaches = matches!(pending.kind, Kind::Read | Kind::Write { .. }) && done.result.is_ok();
        if done.result.is_err() && pending.kind == Kind::Flush {
            self.vm.flush_failed[usize::from(disk)].heard = true;
        }
        // While something is being forgotten, nothing is learnt there.
        let alone = self.vm.guest.was_alone(id) && !self.vm.engine.index().is_cutting();
        self.note(Some((disk, touched(&sectors))), || {
            format!("request {}: the disk says {:?} {}", id.0, done.result, describe(&buffer))
        });
        self.vm.engine.handle_disk_done(self.clock(), id, done.result.map_err(DiskError), &bytes(&buffer));
        if teaches {
            // A swapped-out page need no longer be known once it is discarded.
            let by_eviction = self.vm.engine.status().admission == Admission::Evictions
                && self.vm.engine.swap_areas(self.vm.index_of(disk)) == 0;
            for block in covered(&sectors) {
                let content = block_at(&buffer, block * BLOCK_SECTORS - sectors.start);
                self.vm.guest.note_known((disk, block), content, alone && enabled && by_eviction);
            }
        }
        self.execute()
    }

    /// Completes a request, and checks every promise made to the guest about it.
    pub(super) fn completed(&mut self, id: RequestId, result: Result<(), DiskError>) -> Outcome {
        let from_disk =
            self.vm.guest.pending(id).filter(|p| p.state == DiskState::Done(Ok(())) && p.kind == Kind::Read);
        if let Some(length) = from_disk.map(|pending| pending.buffer.len()) {
            self.capture(id, 0..length);
        }
        let Some(pending) = self.vm.guest.end(id) else {
            let text = format!("request {} completes, and is not under way", id.0);
            return self.fail(Violation::new(Promise::ExactlyOnce, text));
        };
        self.note(Some((pending.disk, touched(&pending.sectors))), || {
            format!("request {} completes: {result:?} {}", id.0, describe(&pending.buffer))
        });
        self.check_result(id, &pending, result)?;
        if result.is_err() {
            return Ok(());
        }
        match pending.kind {
            Kind::Read => {
                self.check_read(id, &pending)?;
                self.keep_pages(&pending);
                Ok(())
            }
            Kind::Flush => self.check_flush(id, &pending),
            Kind::Write { .. } | Kind::Discard | Kind::WriteZeroes { .. } => {
                let is_discard = pending.kind == Kind::Discard;
                let nothing = Applied::none();
                let applied = pending.applied.as_ref().unwrap_or(&nothing);
                let outcome = self.vm.disks[usize::from(pending.disk)].acknowledge(applied, is_discard);
                outcome.map_or_else(|sector| self.fail(not_on_disk(id, pending.disk, sector)), Ok)
            }
        }
    }

    /// Keeps the pages that were read in the guest's page cache, and reports the pages dropped for them.
    fn keep_pages(&mut self, pending: &Pending) {
        for block in covered(&pending.sectors) {
            let content = block_at(&pending.buffer, block * BLOCK_SECTORS - pending.sectors.start);
            if let Some(dropped) = self.vm.guest.hold((pending.disk, block), content)
                && self.vm.machine.agent
                && !self.options.agentless
            {
                self.report(dropped);
            }
        }
    }

    /// Sends a page to the port, which sometimes takes a long time.
    fn report(&mut self, page: Block) {
        let lag = if self.random.one_in(16) { 200_000_000 } else { 1_000_000 };
        let at = self.random.below(lag);
        self.schedule(at, Event::Evicted(page));
    }

    /// Reports some page as evicted: a step of the plan.
    pub(super) fn evict(&mut self, eviction: Eviction) {
        let random = &mut self.random;
        let page = match eviction {
            Eviction::Current => self.vm.guest.any_page(false, random),
            Eviction::Kept => self.vm.guest.any_page(true, random),
            Eviction::Stale => self.vm.guest.past_page(random),
            Eviction::Foreign => Some(std::array::from_fn(|_| Sector::garbage(random))),
            Eviction::Torn => {
                let halves = (self.vm.guest.any_page(true, random), self.vm.guest.past_page(random));
                let (Some(a), Some(b)) = halves else { return };
                Some(std::array::from_fn(|i| if i < BLOCK_SECTORS / 2 { a[i] } else { b[i] }))
            }
            Eviction::Zero => Some([Sector::ZERO; BLOCK_SECTORS]),
        };
        if let Some(page) = page {
            self.report(page);
        }
    }

    /// Has the agent say that it sends one class of pages, or all.
    pub(super) fn say_classes(&mut self, is_one: bool) {
        if self.vm.up && !self.options.agentless {
            self.note(None, || format!("the agent says that it sends {}", if is_one { "one class" } else { "all" }));
            self.tally.class_reports += 1;
            self.vm.has_lied |= is_one;
            self.vm.engine.handle_agent(if is_one { CLASSES } else { 0 });
        }
    }

    /// Delivers an evicted page to the port.
    pub(super) fn evicted(&mut self, page: Block) -> Outcome {
        if !self.vm.up {
            return Ok(());
        }
        let status = self.vm.engine.status();
        let is_known = self.vm.guest.take_known(&page) && status.enabled && self.knows_all_blocks();
        let taking = || status.pools.iter().filter(|pool| !pool.is_draining);
        let has_room = taking().any(|pool| pool.granted.0 > 0)
            && taking().all(|pool| self.has_room(pool))
            // During a resize, some slots may not be filled.
            && !self.vm.engine.index().is_resizing();
        let evicted = self.vm.engine.handle_evicted(&bytes(&page));
        self.note(None, || format!("evicted {}: {evicted:?}", describe(&page)));
        self.tally.evictions += 1;
        self.vm.life.evictions += 1;
        if self.vm.is_dead() {
            return Ok(());
        }
        match evicted {
            Evicted::Admit(admitted) => self.send_admitted(admitted, page)?,
            Evicted::Unmatched if is_known && !self.vm.has_lied => {
                let text = format!("{} is what the disk holds, and was called unknown", describe(&page));
                self.fail(Violation::new(Promise::Useful, text))?;
            }
            Evicted::Dropped if is_known && has_room => {
                let text = format!("{} was dropped, and there was room", describe(&page));
                self.fail(Violation::new(Promise::Useful, text))?;
            }
            Evicted::Duplicate | Evicted::Zero | Evicted::Unmatched | Evicted::Dropped | Evicted::PassedOver => {}
        }
        self.execute()
    }

    /// Returns whether a pool takes one more page now, if it is chosen.
    fn has_room(&self, pool: &PoolStatus) -> bool {
        let ours = |at: &&PoolSlot| at.server == pool.server;
        let pinned: BTreeSet<_> =
            self.vm.outstanding.values().map(|outstanding| &outstanding.at).filter(ours).collect();
        let slots = pool.slots.free + pool.slots.used + pool.slots.draining;
        let wire = self.vm.wires.iter().find(|wire| wire.number == pool.server);
        let has_window = pool.is_local || wire.is_some_and(|wire| wire.pages_waiting() < self.vm.machine.send_window);
        pool.hedging.breaker == BreakerState::Closed && has_window && pinned.len() < slots as usize
    }

    /// Captures the pages under these sectors of a read's buffer before they are overwritten, if the engine wants them.
    pub(super) fn capture(&mut self, id: RequestId, sectors: Range<usize>) {
        let Some(pending) = self.vm.guest.pending(id) else { return };
        for frame in covered(&sectors) {
            if let Some(page) = pending.frames.get_mut(frame).and_then(Option::take)
                && self.vm.engine.wants_frame()
            {
                self.vm.captured.push(page);
            }
        }
    }

    /// Passes a frame that held `page` to the engine for judgement, after all actions are done.
    pub(super) fn judge_frame(&mut self, page: Block) -> Outcome {
        let is_known = self.vm.guest.take_known(&page) && self.vm.engine.status().enabled && self.knows_all_blocks();
        let must_know = is_known && !self.vm.has_lied;
        let judged = self.vm.engine.handle_frame(&bytes(&page));
        self.note(None, || format!("overwritten {}: {judged:?}", describe(&page)));
        self.tally.frames += 1;
        self.vm.life.frames += 1;
        if self.vm.is_dead() {
            return Ok(());
        }
        if let Evicted::Admit(admitted) = judged {
            self.send_admitted(admitted, page)?;
        }
        if must_know && judged == Evicted::Unmatched {
            let text = format!("{} is what the disk holds, and was called unknown", describe(&page));
            self.fail(Violation::new(Promise::Useful, text))?;
        }
        match self.vm.engine.poll_action() {
            None => Ok(()),
            Some(action) => {
                let text = format!("{action:?} because of a frame");
                self.fail(Violation::new(Promise::ProtocolKept, text))
            }
        }
    }

    /// Returns whether the engine has room to remember every block.
    pub(super) fn knows_all_blocks(&self) -> bool {
        u64::from(self.vm.engine.index().layout().resident_limit().0) >= self.vm.machine.blocks()
    }
}

fn not_on_disk(id: RequestId, disk: u16, sector: usize) -> Violation {
    let text = format!("request {} is acknowledged, and its sector {sector} is not there", id.0);
    Violation::at(Promise::WriteThrough, (disk, sector / BLOCK_SECTORS), text)
}
