//! Hedged reads: when a late answer of the memory server has the disk asked too, and what that says about the server.
//!
//! A read that waits for the server longer than is normal ([`Hedging::late_after_ns`]) is *hedged*: the disk reads it too.
//! The first answer is the guest's, and the other one touches nothing. Only hedges that the server wins were for nothing. Each
//! costs a credit, which the reads that the server answers in time bring back. Without credit, and with hedging off, the
//! disk is asked after twice its median.
//! 1. A page that loses finds its read answered ([`super::Pages`]). Disk I/O that loses is *abandoned*: it has a buffer of
//!    its own, and its request keeps its number until it is done.
//! 2. Every read that waits for the server is in one of the queues, has been given to the disk, or both.
//! 3. Abandoned reads of each disk are bounded ([`LOAD_MAX`]): at the bound its reads wait for the server, and those of
//!    other disks do not.
//! 4. A disk that has more reads in flight than the guest has, and than it does at a time without being slower
//!    ([`Parallel`]), is given no speculative read: the guest's reads must not wait behind abandoned ones.
//!
//! Decision 0022.

use super::breaker::{Breaker, BreakerState, Route};
use super::estimate::{Estimate, Latency, Parallel, Recent};
use super::{Action, DiskEngine, DiskIo, GuestOp, Pages, ReadReason, Request, RequestId};
use crate::units::{ByteRange, DiskIndex, Nanos};
use std::collections::VecDeque;
use std::ops::DerefMut;

/// An answer is never late before the disk's median divided by this.
const LATE_MIN: u64 = 20;
/// A hedge that begins before the disk's median divided by this is in time: what its timer was late included.
const EARLY: u64 = 12;
/// Answers of the server that bring back the credit of one hedge.
const COST: u32 = 32;
/// Maximum credit: that of 128 hedges in succession.
const CREDIT_MAX: u32 = 128 * COST;
/// Per-disk limit on hedged reads in flight, and on abandoned disk reads. Each holds a buffer.
const LOAD_MAX: Load = Load { count: 128, bytes: 16 << 20 };
/// Weight of a probe among the disk's latencies while the breaker is closed: where the server answers everything, probes are
/// all that is known of the disk.
const PROBE_WEIGHT: u16 = 8;
/// Bounds of the time after which the disk is asked without credit.
const TIMEOUT_MIN_NS: u64 = 5_000_000;
const TIMEOUT_MAX_NS: u64 = 500_000_000;
/// Maximum slack of a timer: in times after which an answer is late, and in nanoseconds.
const SLACK_MAX: usize = 4;
const SLACK_MAX_NS: u64 = 2_000_000;

/// A read that waits for the server.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    since: Nanos,
    id: RequestId,
    serial: u64,
}

/// Disk reads whose answer may not be needed.
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

/// Reads of one disk, and those among them that a memory server could also have answered.
#[derive(Debug, Default)]
struct SpeculativeReads {
    /// Reads of the guest in flight.
    guest: u32,
    /// Disk reads in flight.
    disk: u32,
    /// Hedged reads whose disk I/O is in flight.
    hedged: Load,
    /// Disk reads in flight whose request the server has answered.
    abandoned: Load,
    /// Reads that are due for the disk, and wait until it has fewer abandoned ones.
    deferred: Vec<Waiting>,
    parallel: Parallel,
}

impl SpeculativeReads {
    /// Returns whether the disk has more reads in flight than it would have without a server, and may be slower for it.
    fn is_crowded(&self) -> bool {
        self.disk > self.guest.max(self.parallel.reads())
    }
}

#[derive(Debug)]
pub(super) struct Hedging {
    enabled: bool,
    disk: Estimate,
    recent_disk: Recent,
    server: Estimate,
    breaker: Breaker,
    credit: u32,
    /// For each disk.
    speculative: Vec<SpeculativeReads>,
    /// Reads that are not late yet.
    waiting: VecDeque<Waiting>,
    /// Late reads that could not be hedged.
    unhedged: VecDeque<Waiting>,
}

/// What is normal now, and what follows from it, for the status.
#[derive(Clone, Copy, Debug)]
pub struct HedgingStatus {
    pub breaker: BreakerState,
    /// Disk reads; `None` while there are too few.
    pub disk: Option<Latency>,
    /// Reads that the server answered, and answered first.
    pub server: Option<Latency>,
    /// Time after which the disk is also asked.
    pub late_after_ns: u64,
}

impl Hedging {
    pub(super) fn new(enabled: bool, disks: u16) -> Self {
        Self {
            enabled,
            disk: Estimate::default(),
            recent_disk: Recent::default(),
            server: Estimate::default(),
            breaker: Breaker::new(enabled),
            credit: CREDIT_MAX,
            speculative: (0..disks).map(|_| SpeculativeReads::default()).collect(),
            waiting: VecDeque::new(),
            unhedged: VecDeque::new(),
        }
    }

    /// Forgets what is known of the server: there is another session, or none.
    pub(super) fn forget_server(&mut self) {
        self.server = Estimate::default();
        self.breaker.forget_server();
        self.credit = CREDIT_MAX;
        self.waiting.clear();
        self.unhedged.clear();
        self.speculative.iter_mut().for_each(|speculative| speculative.deferred.clear());
    }

    fn speculative(&mut self, disk: DiskIndex) -> &mut SpeculativeReads {
        &mut self.speculative[usize::from(disk.0)]
    }

    #[cfg(test)]
    pub(super) fn queued(&self) -> usize {
        self.waiting.len()
            + self.unhedged.len()
            + self.speculative.iter().map(|speculative| speculative.deferred.len()).sum::<usize>()
    }

    pub(super) fn status(&self) -> HedgingStatus {
        HedgingStatus {
            breaker: self.breaker.state(),
            disk: self.disk.known(),
            server: self.server.known(),
            late_after_ns: self.late_after_ns(),
        }
    }

    pub(super) fn route(&self, now: Nanos, disk: DiskIndex) -> Route {
        match self.breaker.route(now) {
            Route::Disk if self.speculative[usize::from(disk.0)].is_crowded() => Route::Server,
            route => route,
        }
    }

    /// Returns whether this admission may go to the server.
    pub(super) fn admits(&mut self) -> bool {
        self.breaker.admits()
    }

    /// Notes a page that no read waits for any more, and that is not a probe's.
    pub(super) fn note_life(&mut self, now: Nanos) {
        self.breaker.note_life(now);
    }

    pub(super) fn begin_wait(&mut self, since: Nanos, id: RequestId, serial: u64) {
        self.breaker.note_server_read();
        self.waiting.push_back(Waiting { since, id, serial });
    }

    /// Takes the latency of a disk read. One that may have waited for abandoned reads says nothing of the disk alone.
    pub(super) fn note_disk(&mut self, now: Nanos, disk: DiskIndex, io: DiskIo) {
        let ns = now.since_ns(io.since);
        self.speculative(disk).parallel.note(ns, io.others);
        if !io.is_undisturbed {
            return;
        }
        let is_rare = io.reason == ReadReason::Probe && !self.breaker.is_open();
        self.disk.note(ns, if is_rare { PROBE_WEIGHT } else { 1 });
        self.recent_disk.note(ns);
        if let Some(server) = self.server.known() {
            self.breaker.note_distance(server.p50_ns, ns);
        }
    }

    /// Counts the disk read of a request that is answered now.
    pub(super) fn begin_abandoned(&mut self, disk: DiskIndex, range: ByteRange) {
        self.speculative(disk).abandoned.add(range);
    }

    /// Ends a disk read. `answered`: it was abandoned.
    pub(super) fn end_io(&mut self, disk: DiskIndex, reason: ReadReason, range: ByteRange, answered: bool) {
        let speculative = &mut self.speculative[usize::from(disk.0)];
        speculative.disk -= 1;
        if reason == ReadReason::Hedge {
            speculative.hedged.remove(range);
        }
        if answered {
            speculative.abandoned.remove(range);
            if !speculative.abandoned.is_full() {
                speculative.deferred.drain(..).rev().for_each(|read| self.unhedged.push_front(read));
            }
        }
    }

    /// Counts a read of the guest.
    pub(super) fn begin_read(&mut self, disk: DiskIndex) {
        self.speculative(disk).guest += 1;
    }

    /// Ends a read of the guest, whoever answered it.
    pub(super) fn end_read(&mut self, disk: DiskIndex) {
        self.speculative(disk).guest -= 1;
        self.breaker.note_read();
    }

    /// Gives back the credit of a hedge that was not for nothing.
    pub(super) fn refund(&mut self, reason: ReadReason) {
        if reason == ReadReason::Hedge {
            self.credit = (self.credit + COST).min(CREDIT_MAX);
        }
    }

    /// Takes the credit of a hedge. Returns whether the disk may be asked.
    fn pay(&mut self, disk: DiskIndex, range: ByteRange) -> bool {
        let speculative = &mut self.speculative[usize::from(disk.0)];
        let has_room = !speculative.is_crowded() && !speculative.hedged.is_full() && !speculative.abandoned.is_full();
        let can = has_room && self.credit >= COST;
        if can {
            self.credit -= COST;
            speculative.hedged.add(range);
        }
        can
    }

    /// Returns after how long an answer is late: 5 % of the disk's median, or what the server normally takes, but never more
    /// than the disk's median. Normal is the server's p99, or twice its median if slow answers have got into the p99. While
    /// less than half of the credit is left, the 5 % grow towards the longest that is still in time ([`EARLY`]).
    fn late_after_ns(&self) -> u64 {
        let timeout = self.timeout_ns();
        match self.disk.known() {
            Some(disk) if self.enabled => {
                let normal = self.server.known().map_or(0, |server| server.p99_ns.min(server.p50_ns * 2));
                let (soon, in_time) = (disk.p50_ns / LATE_MIN, disk.p50_ns / EARLY);
                let missing = u64::from(CREDIT_MAX.saturating_sub(2 * self.credit));
                let least = soon + (in_time - soon) * missing / u64::from(CREDIT_MAX);
                normal.clamp(least, disk.p50_ns).min(timeout)
            }
            _ => timeout,
        }
    }

    /// Returns whether a read took clearly longer than the disk's slow ones do. The p99 follows a disk that becomes faster
    /// slowly, the slowest of the last few at once.
    fn is_overrun(&self, ns: u64) -> bool {
        self.disk.known().is_some_and(|disk| {
            let slow = disk.p99_ns.min(self.recent_disk.slowest_ns());
            ns > slow + slow / 16
        })
    }

    /// Returns whether a hedge after this time does not lengthen a read much.
    fn is_early(&self, ns: u64) -> bool {
        self.disk.known().is_some_and(|disk| ns <= disk.p50_ns / EARLY)
    }

    fn timeout_ns(&self) -> u64 {
        self.disk.known().map_or(0, |disk| disk.p50_ns * 2).clamp(TIMEOUT_MIN_NS, TIMEOUT_MAX_NS)
    }
}

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// Returns when the first read is late; reads that wait no longer are taken out of the queues.
    pub(super) fn late_deadline(&mut self) -> Option<Nanos> {
        while let Some(first) = self.hedging.waiting.front().copied()
            && !self.is_waiting(first)
        {
            self.hedging.waiting.pop_front();
        }
        while let Some(first) = self.hedging.unhedged.front().copied()
            && !self.is_waiting(first)
        {
            self.hedging.unhedged.pop_front();
        }
        let waiting = self.hedging.waiting.front().map(|first| first.since.plus_ns(self.hedging.late_after_ns()));
        let unhedged = self.hedging.unhedged.front().map(|first| first.since.plus_ns(self.hedging.timeout_ns()));
        [waiting, unhedged].into_iter().flatten().min()
    }

    /// Returns how much later than that a thread that sleeps may find the first answer late. The answers to other reads that
    /// wait wake it, too, so this is about all of them being late at once; and to be woken for nothing costs more than a
    /// read.
    pub(super) fn slack_ns(&self) -> u64 {
        let others = self.hedging.waiting.iter().skip(1).filter(|read| self.is_waiting(**read)).take(SLACK_MAX).count();
        (self.hedging.late_after_ns() * others as u64).min(SLACK_MAX_NS)
    }

    /// Returns whether a read has nobody at work for it but the server.
    fn is_waiting(&self, read: Waiting) -> bool {
        self.waits_to_read(read).is_some()
    }

    /// Returns what it reads, if it has not.
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
        while let Some(read) = pop_due(&mut self.hedging.waiting, late_after, now) {
            let Some((disk, range)) = self.waits_to_read(read) else { continue };
            self.link.note_silence(now);
            if !self.hedging.enabled {
                self.ask_after_timeout(now, read);
            } else if self.hedging.pay(disk, range) {
                self.stats.hedges += 1;
                self.ask_disk(now, read.id, ReadReason::Hedge);
            } else {
                self.hedging.unhedged.push_back(read);
            }
        }
        let timeout = self.hedging.timeout_ns();
        while let Some(read) = pop_due(&mut self.hedging.unhedged, timeout, now) {
            self.ask_after_timeout(now, read);
        }
        // A disk may hang for long, and the server goes on answering what is held.
        for disk in 0..self.hedging.speculative.len() {
            let mut held = std::mem::take(&mut self.hedging.speculative[disk].deferred);
            held.retain(|read| self.is_waiting(*read));
            self.hedging.speculative[disk].deferred = held;
        }
    }

    /// Gives a read to the disk if it waits for the server, unless the disk has too many abandoned reads.
    fn ask_after_timeout(&mut self, now: Nanos, read: Waiting) {
        let Some((disk, _)) = self.waits_to_read(read) else { return };
        let speculative = self.hedging.speculative(disk);
        if speculative.abandoned.is_full() {
            return speculative.deferred.push(read);
        }
        self.stats.fetch_timeouts += 1;
        self.ask_disk(now, read.id, ReadReason::Timeout);
    }

    /// Sends a read that just went to the server to the disk as well. A disk with too many abandoned reads is not asked.
    pub(super) fn probe(&mut self, now: Nanos, id: RequestId, disk: DiskIndex, serial: u64) {
        let has_rival = !self.hedging.speculative(disk).abandoned.is_full();
        if has_rival || self.hedging.breaker.is_open() {
            self.stats.probes += 1;
            self.hedging.breaker.begin_probe(serial);
        }
        if !has_rival {
            self.hedging.begin_wait(now, id, serial);
        } else {
            self.ask_disk(now, id, ReadReason::Probe);
        }
    }

    /// Keeps a read waiting for the server after the disk failed it. The server may still answer (for a probe that is a
    /// win); if not, the disk is asked again, and its second result is the answer.
    pub(super) fn wait_on(&mut self, now: Nanos, id: RequestId, request: &Request) {
        if let Some(request) = &mut self.requests[id.0 as usize] {
            (request.io, request.failed) = (None, true);
        }
        self.hedging.unhedged.push_back(Waiting { since: now, id, serial: request.serial });
    }

    /// Notes that the server answered a read before the disk did.
    pub(super) fn note_server_first(&mut self, now: Nanos, request: &Request) {
        let hedging = &mut self.hedging;
        hedging.credit = (hedging.credit + 1).min(CREDIT_MAX);
        let took = now.since_ns(request.issued);
        if hedging.breaker.note_win(now, request.serial, hedging.is_early(took)) {
            hedging.server = Estimate::default();
        }
        hedging.server.note(took, 1);
        if hedging.is_overrun(took) && hedging.breaker.note_overrun(now) {
            self.stats.breaker_openings += 1;
        }
    }

    /// Notes that the disk answered a read before the server did.
    pub(super) fn note_disk_first(&mut self, now: Nanos, request: &Request, io: DiskIo) {
        self.stats.hedges_won += u64::from(io.reason == ReadReason::Hedge);
        self.hedging.refund(io.reason);
        self.link.note_silence(now);
        let took = now.since_ns(request.issued);
        let was_early = self.hedging.is_early(io.since.since_ns(request.issued)) && io.is_undisturbed;
        let is_overrun = self.hedging.is_overrun(took) && !was_early;
        let is_worse = self.hedging.breaker.note_loss(now, request.serial);
        if (is_overrun && self.hedging.breaker.note_overrun(now)) || is_worse {
            self.stats.breaker_openings += 1;
        }
    }

    /// Notes that no page can answer this read, so its disk I/O was needed: the server has none, sent wrong ones, or owes
    /// them while the disk failed twice.
    pub(super) fn note_no_page(&mut self, request: &Request) {
        self.hedging.breaker.note_draw(request.serial);
        if let Some(io) = request.io {
            self.hedging.refund(io.reason);
        }
    }

    /// Asks the disk for the whole of a read. If the server may still answer, both are working on it from now on.
    pub(super) fn ask_disk(&mut self, now: Nanos, id: RequestId, reason: ReadReason) {
        let Some(request) = &mut self.requests[id.0 as usize] else { return };
        let GuestOp::Read(range) = request.op else { return };
        debug_assert!(request.io.is_none(), "the disk is at it");
        let speculative = self.hedging.speculative(request.disk);
        let (is_undisturbed, others) = (speculative.abandoned.count == 0, speculative.disk);
        speculative.disk += 1;
        request.io = Some(DiskIo { since: now, reason, is_undisturbed, others });
        let (disk, op) = (request.disk, request.op);
        self.overlaps[usize::from(disk.0)].begin(self.rules, id, range.touched_blocks(), false);
        self.actions.push_back(match request.pages {
            Pages::Waiting { .. } => Action::DiskToo { request: id, disk, op },
            Pages::None | Pages::GivenUp => Action::Disk { request: id, disk, op },
        });
    }
}

/// Returns the first read of a queue, if it has waited for `ns`.
fn pop_due(queue: &mut VecDeque<Waiting>, ns: u64, now: Nanos) -> Option<Waiting> {
    let first = queue.front().copied().filter(|first| first.since.plus_ns(ns) <= now)?;
    queue.pop_front();
    Some(first)
}
