//! The race between memory server and disk: when a late answer of the server has the disk asked too, and what that says about
//! the server.
//!
//! A read that waits for the server longer than is normal ([`Race::late_after_ns`]) is *hedged*: the disk reads it too.
//! The first answer is the guest's, and the other one touches nothing. Only hedges that the server wins were for nothing. Each
//! costs a credit, which the reads that the server answers in time bring back. Without credit, and with hedging off, the
//! disk is asked after twice its median.
//! 1. A page that loses finds its read answered ([`super::requests`]). Disk I/O that loses is *abandoned*: it has a buffer of
//!    its own, and its request keeps its number until it is done.
//! 2. Every read that waits for the server is in one of the queues, has been given to the disk, or both.
//! 3. Abandoned reads of each disk are bounded ([`super::speculative`]): at the bound its reads wait for the server, and those of
//!    other disks do not.
//! 4. A disk that has more reads in flight than the guest has, and than it does at a time without being slower
//!    ([`super::estimate::Parallel`]), is given no speculative read: the guest's reads must not wait behind abandoned ones.
//!
//! Decision 0022.

use super::breaker::{Breaker, BreakerState, Route};
use super::estimate::Latency;
use super::latencies::Latencies;
use super::requests::{DiskIo, ReadReason, Request, Requests};
use super::speculative::{SpeculativeReads, Waiting};
use super::stats::EngineStats;
use super::types::RequestId;
use crate::units::{ByteRange, DiskIndex, Nanos};
use std::collections::VecDeque;

/// Answers of the server that bring back the credit of one hedge.
const HEDGE_COST: u32 = 32;
/// Maximum credit: that of 128 hedges in succession.
const CREDIT_MAX: u32 = 128 * HEDGE_COST;
/// Weight of a probe among the disk's latencies while the breaker is closed: where the server answers everything, probes are
/// all that is known of the disk.
const PROBE_WEIGHT: u16 = 8;
/// Maximum slack of a timer: in times after which an answer is late, and in nanoseconds.
const SLACK_READS_MAX: usize = 4;
const SLACK_MAX_NS: u64 = 2_000_000;

/// What is known of the race, and the reads that are in it.
#[derive(Debug)]
pub(super) struct Race {
    enabled: bool,
    latencies: Latencies,
    breaker: Breaker,
    credit: u32,
    /// For each disk.
    speculative: Vec<SpeculativeReads>,
    /// Reads that are not late yet.
    waiting: VecDeque<Waiting>,
    /// Late reads that could not be hedged.
    unhedged: VecDeque<Waiting>,
}

/// How long a read may wait for the server.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitLimits {
    /// Until the disk is also asked, with credit.
    late_after_ns: u64,
    /// Until it is asked without.
    timeout_ns: u64,
}

/// A read whose answer is late.
#[derive(Clone, Copy, Debug)]
pub(super) struct LateRead {
    pub(super) id: RequestId,
    /// Why the disk is asked now, if it is.
    pub(super) reason: Option<ReadReason>,
    /// It was not late before.
    pub(super) is_newly_late: bool,
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

impl Race {
    pub(super) fn new(enabled: bool, disks: u16) -> Self {
        Self {
            enabled,
            latencies: Latencies::default(),
            breaker: Breaker::new(enabled),
            credit: CREDIT_MAX,
            speculative: (0..disks).map(|_| SpeculativeReads::default()).collect(),
            waiting: VecDeque::new(),
            unhedged: VecDeque::new(),
        }
    }

    /// Forgets what is known of the server: there is another session, or none.
    pub(super) fn forget_server(&mut self) {
        self.latencies.forget_server();
        self.breaker.forget_server();
        self.credit = CREDIT_MAX;
        self.waiting.clear();
        self.unhedged.clear();
        self.speculative.iter_mut().for_each(|speculative| drop(speculative.take_deferred()));
    }

    fn speculative(&mut self, disk: DiskIndex) -> &mut SpeculativeReads {
        &mut self.speculative[usize::from(disk.0)]
    }

    #[cfg(test)]
    pub(super) fn queued(&self) -> usize {
        self.waiting.len()
            + self.unhedged.len()
            + self.speculative.iter().map(|speculative| speculative.deferred()).sum::<usize>()
    }

    pub(super) fn status(&self) -> HedgingStatus {
        HedgingStatus {
            breaker: self.breaker.state(),
            disk: self.latencies.disk(),
            server: self.latencies.server(),
            late_after_ns: self.late_after_ns(),
        }
    }

    pub(super) fn route(&self, now: Nanos, disk: DiskIndex) -> Route {
        match self.breaker.route(now) {
            Route::Disk if self.speculative[usize::from(disk.0)].is_saturated() => Route::Server,
            route => route,
        }
    }

    /// Returns whether this admission may go to the server.
    pub(super) fn admits(&mut self) -> bool {
        self.breaker.admits()
    }

    /// Notes a page that no read waits for any more, and that is not a probe's.
    pub(super) fn note_server_alive(&mut self, now: Nanos) {
        self.breaker.note_server_alive(now);
    }

    pub(super) fn begin_wait(&mut self, since: Nanos, id: RequestId, serial: u64) {
        self.breaker.note_server_read();
        self.waiting.push_back(Waiting { since, id, serial });
    }

    /// Takes the latency of a disk read. One that may have waited for abandoned reads says nothing of the disk alone.
    pub(super) fn note_disk(&mut self, now: Nanos, disk: DiskIndex, io: DiskIo) {
        let ns = now.since_ns(io.since);
        self.speculative(disk).note_latency(ns, io.queue_depth);
        if !io.is_undisturbed {
            return;
        }
        let is_sample = io.reason == ReadReason::Probe && !self.breaker.is_open();
        self.latencies.note_disk(ns, if is_sample { PROBE_WEIGHT } else { 1 });
        if let Some(server) = self.latencies.server() {
            self.breaker.adapt_probe_interval(server.p50_ns, ns);
        }
    }

    /// Counts the disk read of a request that is answered now.
    pub(super) fn begin_abandoned(&mut self, disk: DiskIndex, range: ByteRange) {
        self.speculative(disk).begin_abandoned(range);
    }

    /// Ends a disk read. `answered`: it was abandoned.
    pub(super) fn end_io(&mut self, disk: DiskIndex, reason: ReadReason, range: ByteRange, answered: bool) {
        let speculative = &mut self.speculative[usize::from(disk.0)];
        speculative.end_io(reason, range, answered);
        if answered && !speculative.is_abandoned_full() {
            speculative.take_deferred().rev().for_each(|read| self.unhedged.push_front(read));
        }
    }

    /// Counts a read of the guest.
    pub(super) fn begin_read(&mut self, disk: DiskIndex) {
        self.speculative(disk).begin_read();
    }

    /// Ends a read of the guest, whoever answered it.
    pub(super) fn end_read(&mut self, disk: DiskIndex) {
        self.speculative(disk).end_read();
        self.breaker.note_read();
    }

    /// Gives back the credit of a hedge that was not for nothing.
    fn refund(&mut self, reason: ReadReason) {
        if reason == ReadReason::Hedge {
            self.credit = (self.credit + HEDGE_COST).min(CREDIT_MAX);
        }
    }

    /// Takes the credit of a hedge. Returns whether the disk may be asked.
    fn try_begin_hedge(&mut self, disk: DiskIndex, range: ByteRange) -> bool {
        let speculative = &mut self.speculative[usize::from(disk.0)];
        let is_allowed = speculative.has_room_for_hedge() && self.credit >= HEDGE_COST;
        if is_allowed {
            self.credit -= HEDGE_COST;
            speculative.begin_hedge(range);
        }
        is_allowed
    }

    /// Returns after how long an answer is late. While less than half of the credit is left, that grows.
    fn late_after_ns(&self) -> u64 {
        if !self.enabled {
            return self.latencies.timeout_ns();
        }
        self.latencies.late_after_ns(CREDIT_MAX.saturating_sub(2 * self.credit), CREDIT_MAX)
    }

    /// Returns when the first read is late; reads that wait no longer are taken out of the queues.
    pub(super) fn late_deadline(&mut self, requests: &Requests) -> Option<Nanos> {
        let waiting = first_waiting(&mut self.waiting, requests);
        let unhedged = first_waiting(&mut self.unhedged, requests);
        let waiting = waiting.map(|first| first.since.plus_ns(self.late_after_ns()));
        let unhedged = unhedged.map(|first| first.since.plus_ns(self.latencies.timeout_ns()));
        [waiting, unhedged].into_iter().flatten().min()
    }

    /// Returns how much later than that a thread that sleeps may find the first answer late. The answers to other reads that
    /// wait also wake it, so this is about all of them being late at once; and to be woken for nothing costs more than a
    /// read.
    pub(super) fn slack_ns(&self, requests: &Requests) -> u64 {
        let others =
            self.waiting.iter().skip(1).filter(|read| is_waiting(requests, read)).take(SLACK_READS_MAX).count();
        (self.late_after_ns() * others as u64).min(SLACK_MAX_NS)
    }

    /// Returns how long reads may wait for the server from now on.
    pub(super) fn wait_limits(&self) -> WaitLimits {
        WaitLimits { late_after_ns: self.late_after_ns(), timeout_ns: self.latencies.timeout_ns() }
    }

    /// Returns a read that has waited for longer than that, if there is one. If it has a reason the caller asks
    /// the disk, which is counted here.
    pub(super) fn next_late(
        &mut self,
        now: Nanos,
        wait_limits: &WaitLimits,
        requests: &Requests,
        stats: &mut EngineStats,
    ) -> Option<LateRead> {
        while let Some(read) = pop_due(&mut self.waiting, wait_limits.late_after_ns, now) {
            let Some((disk, range)) = requests.only_at_server(read.id, read.serial) else { continue };
            let reason = if !self.enabled {
                self.begin_timeout_read(read, disk, stats)
            } else if self.try_begin_hedge(disk, range) {
                stats.hedges += 1;
                Some(ReadReason::Hedge)
            } else {
                self.unhedged.push_back(read);
                None
            };
            return Some(LateRead { id: read.id, reason, is_newly_late: true });
        }
        while let Some(read) = pop_due(&mut self.unhedged, wait_limits.timeout_ns, now) {
            let Some((disk, _)) = requests.only_at_server(read.id, read.serial) else { continue };
            let reason = self.begin_timeout_read(read, disk, stats);
            return Some(LateRead { id: read.id, reason, is_newly_late: false });
        }
        // A disk may hang for long, and the server goes on answering what is deferred.
        for speculative in &mut self.speculative {
            speculative.retain_deferred(|read| is_waiting(requests, read));
        }
        None
    }

    /// Returns why the disk is asked for a read that only the server is working on, unless the disk has too many abandoned reads.
    fn begin_timeout_read(&mut self, read: Waiting, disk: DiskIndex, stats: &mut EngineStats) -> Option<ReadReason> {
        let speculative = self.speculative(disk);
        if speculative.is_abandoned_full() {
            speculative.defer(read);
            return None;
        }
        stats.fetch_timeouts += 1;
        Some(ReadReason::Timeout)
    }

    /// Begins the probe of a read that just went to the server. Returns whether the disk is to be asked as well: one with too
    /// many abandoned reads is not.
    pub(super) fn begin_probe(
        &mut self,
        now: Nanos,
        id: RequestId,
        disk: DiskIndex,
        serial: u64,
        stats: &mut EngineStats,
    ) -> bool {
        let asks_disk = !self.speculative(disk).is_abandoned_full();
        if asks_disk || self.breaker.is_open() {
            stats.probes += 1;
            self.breaker.begin_probe(serial);
        }
        if !asks_disk {
            self.begin_wait(now, id, serial);
        }
        asks_disk
    }

    /// Keeps a read waiting for the server after the disk failed it. The server may still answer (for a probe that is a
    /// win); if not, the disk is asked again, and its second result is the answer.
    pub(super) fn wait_on(&mut self, now: Nanos, id: RequestId, serial: u64) {
        self.unhedged.push_back(Waiting { since: now, id, serial });
    }

    /// Notes that the server answered a read before the disk did.
    pub(super) fn note_server_first(&mut self, now: Nanos, request: &Request, stats: &mut EngineStats) {
        self.credit = (self.credit + 1).min(CREDIT_MAX);
        let took = now.since_ns(request.issued);
        if self.breaker.note_win(now, request.serial, self.latencies.is_timely(took)) {
            self.latencies.forget_server();
        }
        self.latencies.note_server(took);
        if self.latencies.is_overrun(took) && self.breaker.note_overrun(now) {
            stats.breaker_openings += 1;
        }
    }

    /// Notes that the disk answered a read before the server did.
    pub(super) fn note_disk_first(&mut self, now: Nanos, request: &Request, io: DiskIo, stats: &mut EngineStats) {
        stats.hedges_won += u64::from(io.reason == ReadReason::Hedge);
        self.refund(io.reason);
        let took = now.since_ns(request.issued);
        let was_timely = self.latencies.is_timely(io.since.since_ns(request.issued)) && io.is_undisturbed;
        let is_overrun = self.latencies.is_overrun(took) && !was_timely;
        let is_worse = self.breaker.note_loss(now, request.serial);
        if (is_overrun && self.breaker.note_overrun(now)) || is_worse {
            stats.breaker_openings += 1;
        }
    }

    /// Notes that no page can answer this read, so its disk I/O was needed: the server has none, sent wrong ones, or owes
    /// them while the disk failed twice.
    pub(super) fn note_no_page(&mut self, request: &Request) {
        self.breaker.note_draw(request.serial);
        if let Some(io) = request.io {
            self.refund(io.reason);
        }
    }

    /// Counts a disk read that is about to be issued, and returns what is to be kept of it with its request.
    pub(super) fn begin_io(&mut self, now: Nanos, disk: DiskIndex, reason: ReadReason) -> DiskIo {
        self.speculative(disk).begin_io(now, reason)
    }
}

/// Returns whether only the server is working on a read.
fn is_waiting(requests: &Requests, read: &Waiting) -> bool {
    requests.only_at_server(read.id, read.serial).is_some()
}

/// Returns the first read of a queue that still waits; those before it are removed.
fn first_waiting(queue: &mut VecDeque<Waiting>, requests: &Requests) -> Option<Waiting> {
    while let Some(first) = queue.front().copied() {
        if is_waiting(requests, &first) {
            return Some(first);
        }
        queue.pop_front();
    }
    None
}

/// Returns the first read of a queue, if it has waited for `ns`.
fn pop_due(queue: &mut VecDeque<Waiting>, ns: u64, now: Nanos) -> Option<Waiting> {
    let first = queue.front().copied().filter(|first| first.since.plus_ns(ns) <= now)?;
    queue.pop_front();
    Some(first)
}
