//! The disks behind the driver's stores. The driver's requests take effect in portions, late, or not at all, and must
//! be what a guest asked for.

use super::guests::{Guest, Request};
use super::plan::{Ask, DiskPlan};
use super::store::{Image, StoreDesk, Submitted};
use super::world::{Event, Outcome, World};
use super::{Flaw, time::VirtualClock};
use crate::content::{BLOCK_SECTORS, SECTOR_SIZE, Sector, bytes, sectors_of};
use crate::disk::{Io, IoId, IoKind, LATE_PORTIONS, ModelDisk};
use crate::violation::{Promise, Violation};
use remoca_disk::driver::Source;
use remoca_io::buffer::IoBuffer;
use remoca_store::{StoreCompletion, StoreError, StoreEvent, StoreOp};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

const EIO: i32 = 5;
const MS: u64 = 1_000_000;
/// Longest time for which a request of a dead process may be on its way to a remote disk.
const LATE_NS: u64 = 300 * MS;

/// An operation in progress at the store.
pub(super) struct Running {
    token: u64,
    op: StoreOp,
    buffer: Option<IoBuffer>,
    /// Steps of the requests that it may belong to.
    requests: Vec<usize>,
    is_answered: bool,
}

/// One disk, with its guest.
pub(super) struct DiskSide {
    pub(super) number: usize,
    /// Number of images that it had before this one.
    pub(super) generation: u16,
    /// Whether the process has it, or has it when it starts next.
    pub(super) is_wanted: bool,
    /// Position among the disks of the process that was started last; `None` if that process did not have it.
    pub(super) position: Option<u16>,
    pub(super) plan: DiskPlan,
    pub(super) model: ModelDisk,
    pub(super) image: Arc<Image>,
    /// Store of the running process, or of the last one.
    pub(super) store: StoreDesk,
    running: BTreeMap<u64, Running>,
    ios: u64,
    /// Time at which all requests to the disk so far have taken effect.
    pub(super) busy_until_ns: u64,
    /// End of the time in which requests of a dead process may still take effect besides those of this one.
    pub(super) settles_until_ns: u64,
    pub(super) guest: Guest,
}

impl DiskSide {
    pub(super) fn new(number: usize, generation: u16, plan: &DiskPlan) -> Self {
        let content = (0..plan.sectors).map(|sector| match sector / BLOCK_SECTORS % 8 {
            6 => Sector::template(0),
            7 => Sector::ZERO,
            _ => Sector::initial(u16::try_from(number).unwrap_or(0) + 64 * generation, sector),
        });
        let image = Arc::new(Image::new(
            remoca_disk::clock::Clock::of_file_stamps(&VirtualClock::new()),
            plan.sectors as u64 * 512,
        ));
        Self {
            number,
            generation,
            is_wanted: true,
            position: None,
            plan: plan.clone(),
            model: ModelDisk::new(content),
            store: StoreDesk::new(&image),
            image,
            running: BTreeMap::new(),
            ios: 0,
            busy_until_ns: 0,
            settles_until_ns: 0,
            guest: Guest::new(plan),
        }
    }

    /// Orphans the I/O of a dead process: it takes effect in whole, in part, late, or not at all.
    pub(super) fn orphan(&mut self, event: u64, random: &mut crate::random::Random) -> Vec<IoId> {
        self.running.clear();
        self.model.orphan(event, random)
    }

    /// Takes the process away from the guest. Unless it `keeps` them, failed flushes that the process knew of are
    /// forgotten.
    pub(super) fn lose_process(&mut self, keeps: bool) {
        self.guest.lose_process();
        if !keeps {
            self.lose_knowledge();
        }
    }

    /// Allows flushes to succeed again, and drops the promises about unflushed writes, if a flush may have failed.
    /// Called when a process is lost with its knowledge of failed flushes.
    pub(super) fn lose_knowledge(&mut self) {
        if self.guest.flush_may_fail {
            self.guest.flush_must_fail = false;
            self.forget_unflushed();
        }
    }

    /// Forgets promises about writes acknowledged but not made durable.
    fn forget_unflushed(&mut self) {
        self.model.forget_promises();
        let promise = self.model.flush_promise();
        let flushes = self.guest.requests.iter_mut().filter(|request| request.ask == Ask::Flush);
        flushes.for_each(|request| request.promise.clone_from(&promise));
        if !self.guest.switch_promise.is_empty() {
            self.guest.switch_promise = promise;
        }
    }

    /// Returns whether a process may start although the disk may still execute requests of a dead one: a remote disk
    /// has no lock. A guest that has disconnected does not tell which requests it had submitted.
    pub(super) fn lets_start(&self) -> bool {
        self.model.is_idle() || self.plan.remote && !self.guest.is_gone && self.guest.departed.is_empty()
    }

    /// Returns whether the store has an operation in progress.
    pub(super) fn is_busy(&self) -> bool {
        !self.running.is_empty()
    }

    /// Returns whether a modification is in progress that only this request can have caused.
    pub(super) fn is_modifying_for(&self, step: usize) -> bool {
        self.running.values().any(|running| running.requests == [step] && running.op.is_modification())
    }

    /// Returns the requests that the operation may belong to, including those of departed guests.
    fn asked_by(&self, op: &StoreOp, data: Option<&[Sector]>) -> Vec<&Request> {
        let requests = self.guest.requests.iter().chain(&self.guest.departed);
        let content = |sector| self.model.content(sector..sector + 1).next();
        requests.filter(|request| request.asks_for(op, data, &self.plan, content)).collect()
    }
}

pub(super) fn sectors(op: &StoreOp) -> Range<usize> {
    let (offset, length) = op.range().unwrap_or((0, 0));
    let sector = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX) / SECTOR_SIZE;
    sector(offset)..sector(offset + length)
}

fn kind(op: &StoreOp) -> IoKind {
    match op {
        StoreOp::Read { .. } => IoKind::Read,
        StoreOp::Write { .. } => IoKind::Write,
        StoreOp::Flush => IoKind::Flush,
        StoreOp::Discard { .. } => IoKind::Discard,
        StoreOp::WriteZeroes { .. } => IoKind::WriteZeroes,
    }
}

impl World<'_> {
    /// Begins the I/O that the driver has issued.
    pub(super) fn begin_ios(&mut self, disk: usize) -> Outcome {
        if std::mem::take(&mut self.disks[disk].store.lock().is_asked_to_look) {
            let in_ns = self.random.below(10 * MS);
            self.schedule(in_ns, Event::Looked(self.lives, disk));
        }
        if std::mem::take(&mut self.disks[disk].store.lock().is_asked_to_measure) {
            let in_ns = self.random.below(10 * MS);
            self.schedule(in_ns, Event::Measured(self.lives, disk));
        }
        for submitted in self.disks[disk].store.take_issued() {
            self.begin_io(disk, submitted)?;
        }
        Ok(())
    }

    fn begin_io(&mut self, number: usize, submitted: Submitted) -> Outcome {
        let Submitted { token, op, buffer } = submitted;
        let faulty = self.plan.conditions.faults.disk && !self.healed;
        let mut data = match (&op, &buffer) {
            (StoreOp::Write { .. }, Some(buffer)) => sectors_of(buffer),
            _ => Vec::new(),
        };
        if self.has(Flaw::OtherDataWritten) && !data.is_empty() && self.random.one_in(16) {
            data[0] = Sector::template(77);
        }
        let disk = &self.disks[number];
        let written = matches!(op, StoreOp::Write { .. }).then_some(&data[..]);
        let asked = disk.asked_by(&op, written);
        if asked.is_empty() && op != StoreOp::Flush {
            let text = format!("{op:?} of {data:?}, which no guest asked for");
            let at = (u16::try_from(number).unwrap_or(0), sectors(&op).start / BLOCK_SECTORS);
            return Err(Violation::at(Promise::DiskOnlyAsAsked, at, text));
        }
        let requests: Vec<_> = asked.iter().map(|request| request.step).collect();
        let is_durable = op.is_durable() && !(self.has(Flaw::NotDurable) && op != StoreOp::Flush);
        let rewrites = asked.iter().all(|request| !matches!(request.ask, Ask::Read(_)));
        self.tally.rewritten += u64::from(matches!(op, StoreOp::Read { .. }) && rewrites);
        self.tally.store_reads += u64::from(matches!(op, StoreOp::Read { .. }));
        self.tally.store_writes += u64::from(op.is_modification());
        self.tally.durable_writes += u64::from(op.is_modification() && is_durable);
        let latched = self.disks[number].store.lock().failed.filter(|_| op.is_durable());
        let error = latched.or((faulty && self.random.one_in(20)).then_some(EIO));
        self.note(|| format!("disk {number}: store {token}: {op:?} for {requests:?}, error {error:?}"));
        let disk = &mut self.disks[number];
        for request in disk.guest.requests.iter_mut().filter(|request| requests.contains(&request.step)) {
            request.ios += 1;
            self.tally.in_pieces += u64::from(request.ios == 2 && !matches!(op, StoreOp::Read { .. }));
        }
        disk.ios += 1;
        let io = IoId(disk.ios);
        let issued =
            Io { kind: kind(&op), sectors: sectors(&op), durable: is_durable, data, error, issued: self.event };
        let portions = u8::try_from(self.random.between(1..=3)).unwrap_or(1);
        disk.model.issue(io, issued, portions, &mut self.random);
        if !requests.iter().any(|step| disk.guest.requests.iter().any(|request| request.step == *step)) {
            disk.model.leave_io(io, self.event);
        }
        let is_early = self.options.flaw == Some(Flaw::DiscardAnsweredEarly) && matches!(op, StoreOp::Discard { .. });
        if is_early {
            disk.store.tell(StoreEvent::Completed(StoreCompletion { token, result: Ok(()), buffer: None }));
        }
        disk.running.insert(io.0, Running { token, op, buffer, requests, is_answered: is_early });
        let base = self.disks[number].plan.ns;
        let spike = if faulty && self.random.one_in(40) { 30 } else { 1 };
        let total = self.random.between(base / 4..=base * 2) * spike;
        for portion in 0..portions {
            let at = self.random.below(total);
            self.schedule(at, Event::Portion { disk: number, io, portion });
        }
        self.schedule(total, Event::IoDone { disk: number, io });
        self.busy(number, total);
        Ok(())
    }

    fn busy(&mut self, disk: usize, for_ns: u64) {
        let busy_until_ns = &mut self.disks[disk].busy_until_ns;
        *busy_until_ns = (*busy_until_ns).max(self.now + for_ns);
    }

    /// Makes a portion of an I/O take effect.
    pub(super) fn advance(&mut self, number: usize, io: IoId, portion: u8) -> Outcome {
        let model = &mut self.disks[number].model;
        model.advance(io, portion, self.event, &mut self.random);
        let Some(sector) = model.take_overwritten() else { return Ok(()) };
        let text = format!(
            "sector {sector} was written, and now has what a dead process or a guest that has gone had asked for before"
        );
        Err(self.at(Promise::WriteThrough, number, sector, text))
    }

    /// Completes an operation of the store.
    pub(super) fn io_done(&mut self, number: usize, io: IoId) {
        let disk = &mut self.disks[number];
        let Some(done) = disk.model.finish(io, &mut self.random) else { return };
        let Some(Running { token, op, mut buffer, requests, is_answered }) = disk.running.remove(&io.0) else { return };
        let is_loser = matches!(op, StoreOp::Read { .. })
            && !disk.guest.requests.iter().any(|request| requests.contains(&request.step));
        if is_answered || self.options.flaw == Some(Flaw::LoserKept) && is_loser {
            return;
        }
        if let (StoreOp::Read { .. }, Some(buffer)) = (&op, &mut buffer) {
            buffer.copy_from_slice(&bytes(&done.data));
        }
        let mut result = done.result;
        match (self.options.flaw, &op) {
            (Some(Flaw::ErrorHidden), _) if op.is_modification() => result = Ok(()),
            (Some(Flaw::FailedReadBelieved), StoreOp::Read { .. }) => result = Ok(()),
            _ => {}
        }
        if op.is_modification() && done.result.is_ok() {
            let done = |request: &&mut Request| requests.contains(&request.step);
            disk.guest.requests.iter_mut().filter(done).for_each(|request| request.done.push(sectors(&op)));
        }
        if let Err(errno) = done.result {
            if op.is_durable() {
                disk.store.lock().failed.get_or_insert(errno);
            }
            disk.guest.note_error(&requests, op == StoreOp::Flush || op.is_durable());
        }
        self.note(|| format!("disk {number}: store {token} ends: {result:?}"));
        let result = result.map_err(|errno| StoreError { errno });
        self.disks[number].store.tell(StoreEvent::Completed(StoreCompletion { token, result, buffer }));
    }

    /// Brings a disk's store back from a crash. Either its flushes fail from now on, or later writes are durable with
    /// the next flush (`on-loss`). The driver learns of the crash before anything else.
    pub(super) fn store_crash(&mut self, number: usize) -> Option<Source> {
        self.process.as_ref()?;
        let position = self.disks[number].position?;
        self.note(|| format!("the store of disk {number} comes back from a crash"));
        self.tally.store_crashes += 1;
        let hidden = self.has(Flaw::CrashHidden);
        let latches = self.random.one_in(2);
        let disk = &mut self.disks[number];
        if latches {
            disk.store.lock().failed.get_or_insert(EIO);
            disk.guest.flush_may_fail = true;
        } else {
            disk.forget_unflushed();
            disk.guest.has_lost = true;
        }
        disk.model.crash(self.event, &mut self.random);
        if hidden {
            return None;
        }
        disk.store.tell(StoreEvent::ContentUncertain);
        Some(Source::Store(position))
    }

    /// Schedules the late I/Os of a dead process.
    pub(super) fn schedule_late(&mut self, disk: usize, late: Vec<IoId>) {
        for io in late {
            let total = self.random.between(1..=LATE_NS);
            for portion in LATE_PORTIONS {
                let at = self.random.below(total);
                self.schedule(at, Event::Portion { disk, io, portion });
            }
            self.schedule(total + 50 * MS, Event::IoDone { disk, io });
            self.busy(disk, total + 50 * MS);
        }
    }
}

/// Returns whether the store's operation is this request or a part of it.
pub(super) fn is_part(ask: &Ask, op: &StoreOp, is_coarse: bool) -> bool {
    let part = sectors(op);
    let unit = if is_coarse { BLOCK_SECTORS } else { 1 };
    let within =
        |range: &Range<usize>| range.start / unit * unit <= part.start && part.end <= range.end.next_multiple_of(unit);
    match (ask, op) {
        // Sectors next to the written ones are read first, and written back unchanged.
        (Ask::Write { range, .. }, StoreOp::Read { .. }) => is_coarse && within(range),
        (Ask::WriteZeroes { ranges, .. }, StoreOp::Read { .. } | StoreOp::Write { .. }) => {
            is_coarse && ranges.iter().any(within)
        }
        (Ask::Read(range), StoreOp::Read { .. }) | (Ask::Write { range, .. }, StoreOp::Write { .. }) => within(range),
        (Ask::Discard(ranges), StoreOp::Discard { .. }) => ranges.iter().any(within),
        (Ask::WriteZeroes { ranges, unmap, .. }, StoreOp::WriteZeroes { may_unmap, .. }) => {
            may_unmap == unmap && ranges.iter().any(within)
        }
        (Ask::Flush, StoreOp::Flush) => true,
        _ => false,
    }
}
