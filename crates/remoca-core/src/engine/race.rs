//! The race between memory server and disk: when a late read is hedged, and what its outcome says about the server.
//!
//! A read that waits longer than normal for the server ([`Race::late_after_ns`]) is *hedged*: the disk reads it as well.
//! The first answer goes to the guest; the other one has no effect. A hedge spends credit from a token bucket. The credit
//! comes back if the disk wins the hedge, and bit by bit with every read that the server answers. Without credit, or with
//! hedging off, the disk is asked after a timeout of twice its median latency.
//! 1. A page that arrives second finds its read answered ([`super::requests`]). A disk read that is second is
//!    *abandoned*: it has its own buffer, and its request keeps its ID until the disk is done.
//! 2. Every read that waits for the server is in one of the queues, in flight on the disk, or both.
//! 3. The abandoned reads of each disk are bounded ([`super::speculative`]). At the limit, its late reads keep waiting for
//!    the server; those of other disks are not affected.
//! 4. A saturated disk gets no hedge: it has more reads in flight than the guest has, and more than it can do at a time
//!    without slowing down ([`super::estimate::Concurrency`]). While the breaker is open, its reads go to the server. The
//!    guest's reads must not queue behind abandoned ones.
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

/// Credit that one hedge spends. Every read that the server answers first earns one.
const HEDGE_COST: u32 = 32;
/// Maximum credit: a burst of 128 hedges.
const CREDIT_MAX: u32 = 128 * HEDGE_COST;
/// Weight of a probe in the disk's latency estimate while the breaker is closed. If the server answers everything else,
/// probes are the only samples.
const PROBE_WEIGHT: u16 = 8;
/// Maximum slack of the timer, in multiples of [`Race::late_after_ns`] and in nanoseconds.
const SLACK_READS_MAX: usize = 4;
const SLACK_MAX_NS: u64 = 2_000_000;

/// Latencies, credit and breaker, and the reads that wait for the server.
#[derive(Debug)]
pub(super) struct Race {
    enabled: bool,
    latencies: Latencies,
    breaker: Breaker,
    credit: u32,
    /// Speculative reads, by disk.
    speculative: Vec<SpeculativeReads>,
    /// Reads that are not late yet, oldest first.
    waiting: VecDeque<Waiting>,
    /// Late reads that could not be hedged.
    unhedged: VecDeque<Waiting>,
}

/// Limits on the time that a read waits for the server.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitLimits {
    /// Wait before a hedge.
    late_after_ns: u64,
    /// Wait before the disk is asked without credit.
    timeout_ns: u64,
}

/// Read whose answer is late.
#[derive(Clone, Copy, Debug)]
pub(super) struct LateRead {
    pub(super) id: RequestId,
    /// Reason to send the read to the disk now, or `None` to leave it with the server.
    pub(super) reason: Option<ReadReason>,
    /// Whether the read was not reported as late before.
    pub(super) is_newly_late: bool,
}

/// State of hedging, for the status.
#[derive(Clone, Copy, Debug)]
pub struct HedgingStatus {
    pub breaker: BreakerState,
    /// Latency of disk reads; `None` while there are too few samples.
    pub disk: Option<Latency>,
    /// Latency of reads that the server answered first; `None` while there are too few samples.
    pub server: Option<Latency>,
    /// Time after which an answer of the server is late.
    pub late_after_ns: u64,
}

impl Race {
    pub(super) fn new(enabled: bool) -> Self {
        Self {
            enabled,
            latencies: Latencies::default(),
            breaker: Breaker::new(enabled),
            credit: CREDIT_MAX,
            speculative: Vec::new(),
            waiting: VecDeque::new(),
            unhedged: VecDeque::new(),
        }
    }

    /// Resets everything learnt about the server, for a new session.
    pub(super) fn forget_server(&mut self) {
        self.latencies.forget_server();
        self.breaker.forget_server();
        self.credit = CREDIT_MAX;
        self.waiting.clear();
        self.unhedged.clear();
        self.speculative.iter_mut().for_each(|speculative| drop(speculative.take_deferred()));
    }

    /// Makes room for the reads of a disk, and resets what is known of its number.
    ///
    /// # Panics
    /// If reads of this number are in flight.
    pub(super) fn reset_disk(&mut self, disk: DiskIndex) {
        let number = usize::from(disk.0);
        if self.speculative.len() <= number {
            self.speculative.resize_with(number + 1, SpeculativeReads::default);
        }
        let old = std::mem::take(&mut self.speculative[number]);
        assert!(old.are_idle(), "reads of the disk {number} are in flight");
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

    /// Makes the next probe due at once, because a late page shows that the server works.
    pub(super) fn note_server_alive(&mut self, now: Nanos) {
        self.breaker.note_server_alive(now);
    }

    pub(super) fn begin_wait(&mut self, since: Nanos, id: RequestId, serial: u64) {
        self.breaker.note_server_read();
        self.waiting.push_back(Waiting { since, id, serial });
    }

    /// Adds the latency of a disk read to the estimates. A read that may have queued behind abandoned reads counts only
    /// for the disk's concurrency.
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

    /// Adds a disk read to the abandoned reads, because its request has just been answered.
    pub(super) fn begin_abandoned(&mut self, disk: DiskIndex, range: ByteRange) {
        self.speculative(disk).begin_abandoned(range);
    }

    /// Removes a completed disk read from the counts of its disk, and requeues deferred reads if that makes room for
    /// them. `answered` says whether it was abandoned.
    pub(super) fn end_io(&mut self, disk: DiskIndex, reason: ReadReason, range: ByteRange, answered: bool) {
        let speculative = &mut self.speculative[usize::from(disk.0)];
        speculative.end_io(reason, range, answered);
        if answered && !speculative.is_abandoned_full() {
            speculative.take_deferred().rev().for_each(|read| self.unhedged.push_front(read));
        }
    }

    /// Adds a guest read to the count of reads in flight.
    pub(super) fn begin_read(&mut self, disk: DiskIndex) {
        self.speculative(disk).begin_read();
    }

    /// Removes an answered guest read from the count of reads in flight, and adds a token to the breaker's overrun
    /// budget.
    pub(super) fn end_read(&mut self, disk: DiskIndex) {
        self.speculative(disk).end_read();
        self.breaker.note_read();
    }

    /// Refunds the credit of a hedge whose disk read was needed.
    fn refund(&mut self, reason: ReadReason) {
        if reason == ReadReason::Hedge {
            self.credit = (self.credit + HEDGE_COST).min(CREDIT_MAX);
        }
    }

    /// Starts a hedge if the load of the disk and the credit permit it: counts the hedge and spends its credit. Returns
    /// whether a hedge was started.
    fn try_begin_hedge(&mut self, disk: DiskIndex, range: ByteRange) -> bool {
        let speculative = &mut self.speculative[usize::from(disk.0)];
        let is_allowed = speculative.has_room_for_hedge() && self.credit >= HEDGE_COST;
        if is_allowed {
            self.credit -= HEDGE_COST;
            speculative.begin_hedge(range);
        }
        is_allowed
    }

    /// Returns the time, in nanoseconds, after which an answer of the server is late. It grows as the credit falls
    /// below half.
    fn late_after_ns(&self) -> u64 {
        if !self.enabled {
            return self.latencies.timeout_ns();
        }
        self.latencies.late_after_ns(CREDIT_MAX.saturating_sub(2 * self.credit), CREDIT_MAX)
    }

    /// Returns the time at which the next read is late, or `None` if no read waits. Removes reads that no longer wait
    /// from the front of the queues.
    pub(super) fn late_deadline(&mut self, requests: &Requests) -> Option<Nanos> {
        let waiting = first_waiting(&mut self.waiting, requests);
        let unhedged = first_waiting(&mut self.unhedged, requests);
        let waiting = waiting.map(|first| first.since.plus_ns(self.late_after_ns()));
        let unhedged = unhedged.map(|first| first.since.plus_ns(self.latencies.timeout_ns()));
        [waiting, unhedged].into_iter().flatten().min()
    }

    /// Returns how far past [`Self::late_deadline`] a thread may sleep. The answers to other waiting reads also wake it, so
    /// the slack only matters if all of them are late; a needless wake-up costs more than a read.
    pub(super) fn slack_ns(&self, requests: &Requests) -> u64 {
        let others =
            self.waiting.iter().skip(1).filter(|read| is_waiting(requests, read)).take(SLACK_READS_MAX).count();
        (self.late_after_ns() * others as u64).min(SLACK_MAX_NS)
    }

    /// Returns the current limits on the wait for the server.
    pub(super) fn wait_limits(&self) -> WaitLimits {
        WaitLimits { late_after_ns: self.late_after_ns(), timeout_ns: self.latencies.timeout_ns() }
    }

    /// Returns the next read that has waited longer than `wait_limits`, or `None` if there is no such read. If the
    /// result has a reason, the caller must send the read to the disk. This function has already counted that disk
    /// read.
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
        // While a disk hangs, the server continues to answer deferred reads.
        for speculative in &mut self.speculative {
            speculative.retain_deferred(|read| is_waiting(requests, read));
        }
        None
    }

    /// Counts a timed-out read and returns the reason to send it to the disk. If the disk has too many abandoned reads,
    /// defers the read instead and returns `None`.
    fn begin_timeout_read(&mut self, read: Waiting, disk: DiskIndex, stats: &mut EngineStats) -> Option<ReadReason> {
        let speculative = self.speculative(disk);
        if speculative.is_abandoned_full() {
            speculative.defer(read);
            return None;
        }
        stats.fetch_timeouts += 1;
        Some(ReadReason::Timeout)
    }

    /// Makes a read that was just sent to the server a probe. Returns whether to send it to the disk as well. If the
    /// disk has too many abandoned reads, returns `false`, and the read waits for the server only.
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

    /// Keeps a read waiting for the server after its disk read failed. If the server does not answer in time, the disk
    /// is asked again, and its second result goes to the guest. An answer to a probe still counts as a win.
    pub(super) fn wait_on(&mut self, now: Nanos, id: RequestId, serial: u64) {
        self.unhedged.push_back(Waiting { since: now, id, serial });
    }

    /// Adds credit for hedges and a latency of the server, and reports the win to the breaker: the server answered a
    /// read before the disk. Reports an overrun as well if the answer came very late.
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

    /// Reports a loss to the breaker: the disk answered a read before the server. Refunds and counts the hedge if the
    /// disk read was one. Reports an overrun as well if the answer came very late, unless the disk was asked in time
    /// and not slowed by abandoned reads.
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

    /// Ends the probe of a read without a result, and refunds its hedge, if it has them. The server cannot answer the
    /// read: it has no page, sent a wrong one, or still owes it after the disk failed twice.
    pub(super) fn note_no_page(&mut self, request: &Request) {
        self.breaker.note_draw(request.serial);
        if let Some(io) = request.io {
            self.refund(io.reason);
        }
    }

    /// Adds a disk read to the count of reads in flight. Returns the record to keep with its request.
    pub(super) fn begin_io(&mut self, now: Nanos, disk: DiskIndex, reason: ReadReason) -> DiskIo {
        self.speculative(disk).begin_io(now, reason)
    }
}

/// Returns whether a read waits only for the server.
fn is_waiting(requests: &Requests, read: &Waiting) -> bool {
    requests.only_at_server(read.id, read.serial).is_some()
}

/// Returns the first read of a queue that still waits, or `None` if there is no such read. Removes the reads before it.
fn first_waiting(queue: &mut VecDeque<Waiting>, requests: &Requests) -> Option<Waiting> {
    while let Some(first) = queue.front().copied() {
        if is_waiting(requests, &first) {
            return Some(first);
        }
        queue.pop_front();
    }
    None
}

/// Removes and returns the first read of a queue if it has waited for at least `ns` nanoseconds. Otherwise returns
/// `None`.
fn pop_due(queue: &mut VecDeque<Waiting>, ns: u64, now: Nanos) -> Option<Waiting> {
    let first = queue.front().copied().filter(|first| first.since.plus_ns(ns) <= now)?;
    queue.pop_front();
    Some(first)
}
