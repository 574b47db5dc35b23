//! Late answers of the memory server: when the disk is asked, too, and what that says about the server.
//!
//! A read that waits for the server longer than is normal ([`DiskEngine::late_after_ns`]) is given to the disk as well; the
//! first answer is the guest's, and the other one touches nothing. The budget is about what is done for nothing: a hedge
//! that the server wins costs one of [`CREDIT_MAX`], which the reads that it answers in time bring back; one that the disk
//! wins costs nothing. Without credit, and with hedging off, the disk is asked after twice its median.
//! 1. The loser's page finds its read answered ([`super::Pages`]); the loser's disk I/O has a buffer of its own, and its
//!    request keeps its number until it is done.
//! 2. Every read that waits for the server is in one of the queues, has been given to the disk, or both.
//! 3. Losers of each disk are bounded, whyever it was asked: while it is at too many ([`Load`]), its reads wait for the
//!    server, and those of other disks do not.
//!
//! Decision 0022.

use super::breaker::{Breaker, BreakerState, Route};
use super::estimate::{Estimate, Latency};
use super::{Action, DiskEngine, DiskIo, GuestOp, Pages, Request, RequestId, Why};
use crate::units::{ByteRange, DiskIndex, Nanos};
use std::collections::VecDeque;
use std::ops::DerefMut;

/// A hedge costs what so many answers of the server bring.
const COST: u32 = 16;
/// So many hedges in succession may be for nothing.
const CREDIT_MAX: u32 = 128 * COST;
/// So much a disk is asked for as hedges, and so many losers it is at, before no more is asked for: each has a buffer.
const LOAD_MAX: Load = Load { count: 128, bytes: 16 << 20 };
/// Without credit a read is late after twice the disk's median, within these bounds.
const TIMEOUT_MIN_NS: u64 = 5_000_000;
const TIMEOUT_MAX_NS: u64 = 500_000_000;
/// In times after which an answer is late, and at most.
const SLACK_MAX: usize = 4;
const SLACK_MAX_NS: u64 = 2_000_000;

/// A read that waits for the server, since when.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    since: Nanos,
    id: RequestId,
    serial: u64,
}

/// Disk I/O that may be for nothing, or is.
#[derive(Debug, Default)]
struct Load {
    count: u32,
    bytes: u64,
}

impl Load {
    fn add(&mut self, range: ByteRange) {
        self.count += 1;
        self.bytes += range.length;
    }

    fn remove(&mut self, range: ByteRange) {
        self.count -= 1;
        self.bytes -= range.length;
    }

    fn is_full(&self) -> bool {
        self.count >= LOAD_MAX.count || self.bytes >= LOAD_MAX.bytes
    }
}

/// What one disk is at besides what only it can do.
#[derive(Debug, Default)]
struct Extra {
    /// Hedges.
    out: Load,
    /// Reads that the server answered while the disk was at them, and it still is.
    losers: Load,
    /// Overdue, but there are too many losers.
    held: Vec<Waiting>,
}

#[derive(Debug)]
pub(super) struct Hedging {
    enabled: bool,
    pub(super) disk: Estimate,
    server: Estimate,
    breaker: Breaker,
    credit: u32,
    /// For each disk.
    extra: Vec<Extra>,
    young: VecDeque<Waiting>,
    /// Late, but there was no credit.
    overdue: VecDeque<Waiting>,
}

/// What is normal now, and what follows from it, for the status.
#[derive(Clone, Copy, Debug)]
pub struct HedgingStatus {
    pub breaker: BreakerState,
    /// Disk reads; `None` while there are too few.
    pub disk: Option<Latency>,
    /// Reads that the server answered, and answered first.
    pub server: Option<Latency>,
    /// The disk is asked, too, after this time.
    pub late_after_ns: u64,
}

impl Hedging {
    pub(super) fn new(enabled: bool, disks: u16) -> Self {
        Self {
            enabled,
            disk: Estimate::default(),
            server: Estimate::default(),
            breaker: Breaker::default(),
            credit: CREDIT_MAX,
            extra: (0..disks).map(|_| Extra::default()).collect(),
            young: VecDeque::new(),
            overdue: VecDeque::new(),
        }
    }

    /// Nothing is known of the server any more: there is another session, or none.
    pub(super) fn forget_server(&mut self) {
        self.server = Estimate::default();
        self.breaker = Breaker::default();
        self.credit = CREDIT_MAX;
        self.young.clear();
        self.overdue.clear();
        self.extra.iter_mut().for_each(|extra| extra.held.clear());
    }

    fn extra(&mut self, disk: DiskIndex) -> &mut Extra {
        &mut self.extra[usize::from(disk.0)]
    }

    #[cfg(test)]
    pub(super) fn queued(&self) -> usize {
        self.young.len() + self.overdue.len() + self.extra.iter().map(|extra| extra.held.len()).sum::<usize>()
    }

    pub(super) fn status(&self) -> HedgingStatus {
        HedgingStatus {
            breaker: self.breaker.state(),
            disk: self.disk.known(),
            server: self.server.known(),
            late_after_ns: self.late_after_ns(),
        }
    }

    pub(super) fn route(&self, now: Nanos) -> Route {
        self.breaker.route(now)
    }

    /// Whether this admission may go to the server.
    pub(super) fn admits(&mut self) -> bool {
        self.breaker.admits()
    }

    /// A page came that nobody waits for any more, but not that of a probe.
    pub(super) fn note_life(&mut self, now: Nanos) {
        self.breaker.note_life(now);
    }

    pub(super) fn begin_wait(&mut self, since: Nanos, id: RequestId, serial: u64) {
        self.young.push_back(Waiting { since, id, serial });
    }

    /// A read was answered that the disk is at.
    pub(super) fn begin_loser(&mut self, disk: DiskIndex, range: ByteRange) {
        self.extra(disk).losers.add(range);
    }

    /// The disk is done with a read, which may have been answered before.
    pub(super) fn end_io(&mut self, disk: DiskIndex, why: Why, range: ByteRange, answered: bool) {
        let extra = &mut self.extra[usize::from(disk.0)];
        if why == Why::Late {
            extra.out.remove(range);
        }
        if answered {
            extra.losers.remove(range);
            if !extra.losers.is_full() {
                extra.held.drain(..).rev().for_each(|read| self.overdue.push_front(read));
            }
        }
    }

    /// The credit of a hedge that was not for nothing.
    pub(super) fn refund(&mut self, why: Why) {
        if why == Why::Late {
            self.credit = (self.credit + COST).min(CREDIT_MAX);
        }
    }

    fn pay(&mut self, disk: DiskIndex, range: ByteRange) -> bool {
        let extra = &mut self.extra[usize::from(disk.0)];
        let can = self.credit >= COST && !extra.out.is_full() && !extra.losers.is_full();
        if can {
            self.credit -= COST;
            extra.out.add(range);
        }
        can
    }

    /// When an answer is late: after 5 % of the disk's median, unless the server normally takes longer: its p99, or twice
    /// its median if slow answers have got into the p99.
    fn late_after_ns(&self) -> u64 {
        let timeout = self.timeout_ns();
        match self.disk.known() {
            Some(disk) if self.enabled => {
                let normal = self.server.known().map_or(0, |server| server.p99_ns.min(server.p50_ns * 2));
                normal.max(disk.p50_ns / 20).min(timeout)
            }
            _ => timeout,
        }
    }

    fn timeout_ns(&self) -> u64 {
        self.disk.known().map_or(0, |disk| disk.p50_ns * 2).clamp(TIMEOUT_MIN_NS, TIMEOUT_MAX_NS)
    }
}

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// When the first read is late; reads that wait no longer are taken out of the queues.
    pub(super) fn late_deadline(&mut self) -> Option<Nanos> {
        while let Some(first) = self.hedging.young.front().copied()
            && !self.is_waiting(first)
        {
            self.hedging.young.pop_front();
        }
        while let Some(first) = self.hedging.overdue.front().copied()
            && !self.is_waiting(first)
        {
            self.hedging.overdue.pop_front();
        }
        let young = self.hedging.young.front().map(|first| first.since.plus_ns(self.hedging.late_after_ns()));
        let overdue = self.hedging.overdue.front().map(|first| first.since.plus_ns(self.hedging.timeout_ns()));
        [young, overdue].into_iter().flatten().min()
    }

    /// How much later than that a thread that sleeps may find the first answer late. The answers to other reads that wait wake it,
    /// too, so this is about all of them being late at once; and to be woken for nothing costs more than a read.
    pub(super) fn slack_ns(&self) -> u64 {
        let others = self.hedging.young.iter().skip(1).filter(|read| self.is_waiting(**read)).take(SLACK_MAX).count();
        (self.hedging.late_after_ns() * others as u64).min(SLACK_MAX_NS)
    }

    /// Whether a read has nobody at work for it but the server.
    fn is_waiting(&self, read: Waiting) -> bool {
        self.waits_to_read(read).is_some()
    }

    /// What it reads, if it has not.
    fn waits_to_read(&self, read: Waiting) -> Option<(DiskIndex, ByteRange)> {
        let waits = |request: &Request| request.serial == read.serial && request.waits() && request.io.is_none();
        match self.request(read.id).filter(waits)? {
            Request { disk, op: GuestOp::Read(range), .. } => Some((disk, range)),
            _ => None,
        }
    }

    /// Gives late reads to the disk.
    pub(super) fn ask_for_late(&mut self, now: Nanos) {
        let late_after = self.hedging.late_after_ns();
        while let Some(read) = pop_due(&mut self.hedging.young, late_after, now) {
            let Some((disk, range)) = self.waits_to_read(read) else { continue };
            self.link.note_silence(now);
            if !self.hedging.enabled {
                self.ask_after_timeout(now, read);
            } else if self.hedging.pay(disk, range) {
                self.stats.hedges += 1;
                self.ask_disk(now, read.id, Why::Late);
            } else {
                self.hedging.overdue.push_back(read);
            }
        }
        let timeout = self.hedging.timeout_ns();
        while let Some(read) = pop_due(&mut self.hedging.overdue, timeout, now) {
            self.ask_after_timeout(now, read);
        }
        // A disk may hang for long, and the server goes on answering what is held.
        for disk in 0..self.hedging.extra.len() {
            let mut held = std::mem::take(&mut self.hedging.extra[disk].held);
            held.retain(|read| self.is_waiting(*read));
            self.hedging.extra[disk].held = held;
        }
    }

    /// Gives a read to the disk if it waits for the server, unless the disk is at too many losers.
    fn ask_after_timeout(&mut self, now: Nanos, read: Waiting) {
        let Some((disk, _)) = self.waits_to_read(read) else { return };
        let extra = self.hedging.extra(disk);
        if extra.losers.is_full() {
            return extra.held.push(read);
        }
        self.stats.fetch_timeouts += 1;
        self.ask_disk(now, read.id, Why::Timeout);
    }

    /// A read that just went to the server goes to the disk at once: it is on trial. A disk that is at too many losers is
    /// no rival.
    pub(super) fn probe(&mut self, now: Nanos, id: RequestId, disk: DiskIndex, serial: u64) {
        self.stats.probes += 1;
        self.hedging.breaker.begin_probe(serial);
        if self.hedging.extra(disk).losers.is_full() {
            self.hedging.begin_wait(now, id, serial);
        } else {
            self.ask_disk(now, id, Why::Probe);
        }
    }

    /// The disk failed a read that waits for the server, too. That may still answer, and if the read is a probe, that is
    /// a win; if it does not, the disk has another try, and what it says then is the answer.
    pub(super) fn wait_on(&mut self, now: Nanos, id: RequestId, request: &Request) {
        if let Some(request) = &mut self.requests[id.0 as usize] {
            (request.io, request.failed) = (None, true);
        }
        self.hedging.overdue.push_back(Waiting { since: now, id, serial: request.serial });
    }

    /// The server answered this read before the disk did.
    pub(super) fn note_server_first(&mut self, now: Nanos, request: &Request) {
        let hedging = &mut self.hedging;
        hedging.credit = (hedging.credit + 1).min(CREDIT_MAX);
        if hedging.breaker.note_win(now, request.serial) {
            hedging.server = Estimate::default();
        }
        hedging.server.note(request.issued, now);
        if let (Some(server), Some(disk)) = (hedging.server.settled(), hedging.disk.settled())
            && hedging.breaker.compare(now, server, disk)
        {
            self.leave_alone(now);
        }
    }

    /// The disk answered this read before the server did.
    pub(super) fn note_disk_first(&mut self, now: Nanos, request: &Request, io: DiskIo) {
        self.stats.hedges_won += u64::from(io.why == Why::Late);
        self.hedging.refund(io.why);
        self.link.note_silence(now);
        if self.hedging.breaker.note_loss(now, request.serial) {
            self.leave_alone(now);
        }
    }

    /// The pages of this read cannot be had, are not what was asked for, or are out while the disk failed twice: its disk
    /// I/O was not for nothing.
    pub(super) fn note_no_page(&mut self, request: &Request) {
        self.hedging.breaker.note_draw(request.serial);
        if let Some(io) = request.io {
            self.hedging.refund(io.why);
        }
    }

    /// The breaker has opened: what waits for the server waits no longer.
    fn leave_alone(&mut self, now: Nanos) {
        self.stats.breaker_openings += 1;
        let mut waiting = std::mem::take(&mut self.hedging.young);
        waiting.append(&mut self.hedging.overdue);
        for read in waiting {
            self.ask_after_timeout(now, read);
        }
    }

    /// Asks the disk for the whole of a read; if the server may still answer it, too, both are at work from now on.
    pub(super) fn ask_disk(&mut self, now: Nanos, id: RequestId, why: Why) {
        let Some(request) = &mut self.requests[id.0 as usize] else { return };
        let GuestOp::Read(range) = request.op else { return };
        debug_assert!(request.io.is_none(), "the disk is at it");
        request.io = Some(DiskIo { since: now, why });
        let (disk, op) = (request.disk, request.op);
        self.overlaps[usize::from(disk.0)].begin(self.rules, id, range.touched_blocks(), false);
        self.actions.push_back(match request.pages {
            Pages::Waiting { .. } => Action::DiskToo { request: id, disk, op },
            Pages::None | Pages::GivenUp => Action::Disk { request: id, disk, op },
        });
    }
}

/// The first read of a queue, if it has waited for `ns`.
fn pop_due(queue: &mut VecDeque<Waiting>, ns: u64, now: Nanos) -> Option<Waiting> {
    let first = queue.front().copied().filter(|first| first.since.plus_ns(ns) <= now)?;
    queue.pop_front();
    Some(first)
}
