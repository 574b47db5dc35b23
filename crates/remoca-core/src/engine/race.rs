//! The race between memory servers and disk: when a late read is hedged, and what its outcome says about a server.
//!
//! A read that waits longer than normal for a server ([`Race::limits`]) is *hedged*: the disk reads it as well.
//! The first answer goes to the guest; the other one has no effect. A hedge spends credit from a token bucket. The credit
//! comes back if the disk wins the hedge, and bit by bit with every read that a server answers. Without credit, or with
//! hedging off, the disk is asked after a timeout of twice its median latency. Each pool is judged by itself
//! ([`super::rival`]); what the disk can bear, and what the guest has suffered, is one for all.
//! 1. A page that arrives second finds its read answered ([`super::requests`]). A disk read that is second is
//!    *abandoned*: it has its own buffer, and its request keeps its ID until the disk is done.
//! 2. Every read that waits for the server is in one of the queues, in flight on the disk, or both.
//! 3. The abandoned reads of each disk are bounded ([`super::speculative`]). At the limit, its late reads keep waiting for
//!    the server; those of other disks are not affected.
//! 4. A saturated disk gets no hedge: it has more reads in flight than the guest has, and more than it can do at a time
//!    without slowing down ([`super::estimate::Concurrency`]). While the breaker is open, its reads go to the server. The
//!    guest's reads must not queue behind abandoned ones.
//! 5. A read of several pools counts for one of them, its rival: the slowest one, fixed when the wait begins.
//!
//! Decision 0022.

mod late;

use super::breaker::{BreakerState, Route};
use super::estimate::Latency;
use super::latencies::Latencies;
use super::overruns::OverrunBudget;
use super::requests::{DiskIo, ReadReason, Request};
use super::rival::{Rival, WaitLimits};
use super::speculative::{SpeculativeReads, Waiting};
use super::stats::EngineStats;
use super::types::RequestId;
use crate::units::{ByteRange, DiskIndex, Nanos, PoolIndex, PoolSet};

/// Credit that one hedge spends. Every read that a server answers first earns one.
const HEDGE_COST: u32 = 32;
/// Maximum credit: a burst of 128 hedges.
const CREDIT_MAX: u32 = 128 * HEDGE_COST;
/// Weight of a probe in the disk's latency estimate while the breaker is closed. If the server answers everything else,
/// probes are the only samples.
const PROBE_WEIGHT: u16 = 8;

/// Latencies, credit and breakers, and the reads that wait for servers.
#[derive(Debug)]
pub(super) struct Race {
    enabled: bool,
    latencies: Latencies,
    credit: u32,
    budget: OverrunBudget,
    /// Speculative reads, by disk.
    speculative: Vec<SpeculativeReads>,
    /// Rivals of the disk, by pool: those up to the highest pool that was in use.
    rivals: Vec<Rival>,
}

/// State of hedging for one pool, for the status.
#[derive(Clone, Copy, Debug)]
pub struct HedgingStatus {
    /// Whether late reads are hedged, and servers judged by their latency.
    pub enabled: bool,
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
            credit: CREDIT_MAX,
            budget: OverrunBudget::default(),
            speculative: Vec::new(),
            rivals: Vec::new(),
        }
    }

    /// Resets everything learnt about the server of one pool, for a new session. Reads that count for other pools keep
    /// waiting; the caller gives up those among them that need a page of this one.
    pub(super) fn forget_server(&mut self, pool: PoolIndex) {
        let enabled = self.enabled;
        *self.rival(pool) = Rival::new(enabled);
        if self.rivals.len() == 1 {
            self.credit = CREDIT_MAX;
        }
        self.speculative.iter_mut().for_each(|speculative| speculative.retain_deferred(|read| read.pool != pool));
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

    /// Returns what is known of a pool, nothing at first.
    fn rival(&mut self, pool: PoolIndex) -> &mut Rival {
        let (number, enabled) = (usize::from(pool.0), self.enabled);
        if self.rivals.len() <= number {
            self.rivals.resize_with(number + 1, || Rival::new(enabled));
        }
        &mut self.rivals[number]
    }

    /// Returns what is known of a pool, or `None` if it was never in use.
    fn known(&self, pool: PoolIndex) -> Option<&Rival> {
        self.rivals.get(usize::from(pool.0))
    }

    #[cfg(test)]
    pub(super) fn queued(&self) -> usize {
        self.rivals.iter().map(|rival| rival.waiting.len() + rival.unhedged.len()).sum::<usize>()
            + self.speculative.iter().map(|speculative| speculative.deferred()).sum::<usize>()
    }

    pub(super) fn status(&self, pool: PoolIndex) -> HedgingStatus {
        HedgingStatus {
            enabled: self.enabled,
            breaker: self.known(pool).map_or(BreakerState::Closed, |rival| rival.breaker.state()),
            disk: self.latencies.disk(),
            server: self.server_latency(pool),
            late_after_ns: self.limits(self.server_latency(pool), self.credit).late_after_ns,
        }
    }

    /// Returns the latency of reads that the server of a pool answers first, or `None` while there are too few samples.
    pub(super) fn server_latency(&self, pool: PoolIndex) -> Option<Latency> {
        self.known(pool).and_then(Rival::latency)
    }

    /// Returns the pool that a read of `pools` counts for. It is the slowest: one whose breaker is open, then the one
    /// with the highest known median, then the one with the highest number.
    pub(super) fn slowest(&self, pools: PoolSet) -> PoolIndex {
        if self.rivals.len() <= 1 && pools.contains(PoolIndex(0)) {
            return PoolIndex(0);
        }
        let slowness = |pool: &PoolIndex| {
            let rival = self.known(*pool);
            let median = rival.and_then(Rival::latency).map_or(0, |latency| latency.p50_ns);
            (rival.is_some_and(|rival| rival.breaker.is_open()), median, *pool)
        };
        pools.iter().max_by_key(slowness).unwrap_or(PoolIndex(0))
    }

    /// Returns where a read of pages of `pools` goes: to the disk if one of them is left alone, unless the disk is
    /// saturated; both ways if the slowest of them is due for a probe. A probe compares the disk with the slowest, so
    /// those of the others wait for reads that need only them.
    pub(super) fn route(&self, now: Nanos, disk: DiskIndex, pools: PoolSet) -> Route {
        let slowest = self.slowest(pools);
        let of = |pool: PoolIndex| self.known(pool).map_or(Route::Server, |rival| rival.breaker.route(now));
        let is_left_alone = self.rivals.len() > 1 && pools.iter().any(|pool| of(pool) == Route::Disk);
        match if is_left_alone { Route::Disk } else { of(slowest) } {
            Route::Disk if self.is_saturated(disk) => Route::Server,
            route => route,
        }
    }

    /// Returns whether a disk has more reads in flight than the guest has, and may be slower because of it.
    pub(super) fn is_saturated(&self, disk: DiskIndex) -> bool {
        self.speculative[usize::from(disk.0)].is_saturated()
    }

    /// Returns whether this admission may go to the server of the pool.
    pub(super) fn admits(&mut self, pool: PoolIndex) -> bool {
        self.rival(pool).breaker.admits()
    }

    /// Makes the next probe of a pool due at once, because a late page shows that its server works.
    pub(super) fn note_server_alive(&mut self, now: Nanos, pool: PoolIndex) {
        self.rival(pool).breaker.note_server_alive(now);
    }

    /// Begins the wait of a read for pages of `pools`. It counts for [the slowest](Self::slowest) of them.
    pub(super) fn begin_wait(&mut self, since: Nanos, id: RequestId, serial: u64, pools: PoolSet) {
        let pool = self.slowest(pools);
        let rival = self.rival(pool);
        rival.breaker.note_server_read();
        rival.waiting.push_back(Waiting { pool, since, id, serial });
    }

    /// Adds the latency of a disk read to the estimates. A read that may have queued behind abandoned reads, or is not comparable with
    /// reads that servers answer ([`super::streams`]), counts only for the disk's concurrency.
    pub(super) fn note_disk(&mut self, now: Nanos, request: &Request, io: DiskIo, is_comparable: bool) {
        let ns = now.since_ns(io.since);
        self.speculative(request.disk).note_latency(ns, io.queue_depth);
        if !io.is_undisturbed || !is_comparable {
            return;
        }
        let is_sample = io.reason == ReadReason::Probe && !self.rival(request.rival).breaker.is_open();
        self.latencies.note_disk(ns, if is_sample { PROBE_WEIGHT } else { 1 });
        for rival in &mut self.rivals {
            if let Some(server) = rival.latency() {
                rival.breaker.adapt_probe_interval(server.p50_ns, ns);
            }
        }
    }

    /// Adds a disk read to the abandoned reads, because its request has just been answered.
    pub(super) fn begin_abandoned(&mut self, disk: DiskIndex, range: ByteRange) {
        self.speculative(disk).begin_abandoned(range);
    }

    /// Removes a completed disk read from the counts of its disk, and requeues deferred reads if that makes room for
    /// them. `answered` says whether it was abandoned.
    pub(super) fn end_io(&mut self, disk: DiskIndex, reason: ReadReason, range: ByteRange, answered: bool) {
        let Self { speculative, rivals, .. } = self;
        let speculative = &mut speculative[usize::from(disk.0)];
        speculative.end_io(reason, range, answered);
        if answered && !speculative.is_abandoned_full() {
            for read in speculative.take_deferred().rev() {
                rivals[usize::from(read.pool.0)].unhedged.push_front(read);
            }
        }
    }

    /// Adds a guest read to the count of reads in flight.
    pub(super) fn begin_read(&mut self, disk: DiskIndex) {
        self.speculative(disk).begin_read();
    }

    /// Removes an answered guest read from the count of reads in flight, and adds a token to the overrun budget.
    pub(super) fn end_read(&mut self, disk: DiskIndex) {
        self.speculative(disk).end_read();
        self.budget.note_read();
    }

    /// Refunds the credit of a hedge whose disk read was needed.
    fn refund(&mut self, reason: ReadReason) {
        if reason == ReadReason::Hedge {
            self.credit = (self.credit + HEDGE_COST).min(CREDIT_MAX);
        }
    }

    /// Returns the limits on the wait for a server of this latency. The time after which an answer is late grows as the
    /// credit falls below half.
    fn limits(&self, server: Option<Latency>, credit: u32) -> WaitLimits {
        let timeout_ns = self.latencies.timeout_ns();
        let late_after_ns = if self.enabled {
            self.latencies.late_after_ns(server, CREDIT_MAX.saturating_sub(2 * credit), CREDIT_MAX)
        } else {
            timeout_ns
        };
        WaitLimits { late_after_ns, timeout_ns }
    }

    /// Makes a read that was just sent to the servers of `pools` a probe of [the slowest](Self::slowest). Returns whether
    /// to send it to the disk as well. Returns `false`, and the read waits for the servers only, if latencies are not
    /// compared (a quicker disk would show nothing) or if the disk has too many abandoned reads.
    pub(super) fn begin_probe(
        &mut self,
        now: Nanos,
        id: RequestId,
        disk: DiskIndex,
        serial: u64,
        pools: PoolSet,
        stats: &mut EngineStats,
    ) -> bool {
        let asks_disk = self.enabled && !self.speculative(disk).is_abandoned_full();
        let slowest = self.slowest(pools);
        let breaker = &mut self.rival(slowest).breaker;
        if asks_disk || breaker.is_open() {
            stats.probes += 1;
            breaker.begin_probe(serial);
        }
        if !asks_disk {
            self.begin_wait(now, id, serial, pools);
        }
        asks_disk
    }

    /// Keeps a read waiting for its servers after its disk read failed. If they do not answer in time, the disk is asked
    /// again, and its second result goes to the guest. An answer to a probe still counts as a win.
    pub(super) fn wait_on(&mut self, now: Nanos, id: RequestId, request: &Request) {
        let (pool, serial) = (request.rival, request.serial);
        self.rival(pool).unhedged.push_back(Waiting { pool, since: now, id, serial });
    }

    /// Adds credit for hedges and a latency of the server, and reports the win to the breaker: the server answered a
    /// read before the disk. Reports an overrun as well if the answer came very late.
    pub(super) fn note_server_first(&mut self, now: Nanos, request: &Request, stats: &mut EngineStats) {
        self.credit = (self.credit + 1).min(CREDIT_MAX);
        let took = now.since_ns(request.issued);
        let may_close = self.latencies.is_timely(took) || self.budget.is_half_full();
        let rival = self.rival(request.rival);
        if rival.breaker.note_win(now, request.serial, may_close) {
            rival.forget_latency();
        }
        rival.note_latency(took);
        if self.latencies.is_overrun(took) && self.note_overrun(now, request.rival) {
            stats.breaker_openings += 1;
        }
    }

    /// Reports a loss to the breaker: the disk answered a read before the server. Refunds and counts the hedge if the
    /// disk read was one. Reports an overrun as well if the answer came very late, unless the disk was asked in time
    /// and not slowed by abandoned reads. A disk that was to read on does not count: it is expected to be first.
    pub(super) fn note_disk_first(&mut self, now: Nanos, request: &Request, io: DiskIo, stats: &mut EngineStats) {
        if io.reason == ReadReason::Stream {
            return;
        }
        stats.hedges_won += u64::from(io.reason == ReadReason::Hedge);
        self.refund(io.reason);
        let took = now.since_ns(request.issued);
        let was_timely = self.latencies.is_timely(io.since.since_ns(request.issued)) && io.is_undisturbed;
        let is_overrun = self.latencies.is_overrun(took) && !was_timely;
        let is_worse = self.rival(request.rival).breaker.note_loss(now, request.serial);
        if (is_overrun && self.note_overrun(now, request.rival)) || is_worse {
            stats.breaker_openings += 1;
        }
    }

    /// Spends the budget of one overrun: a read that waited for the server and took clearly longer than the disk's slow
    /// reads. Does nothing if servers are not judged by their latency. Returns whether that opens the breaker.
    fn note_overrun(&mut self, now: Nanos, pool: PoolIndex) -> bool {
        self.enabled && self.budget.note_overrun() && self.rival(pool).breaker.note_budget_spent(now)
    }

    /// Ends the probe of a read without a result, and refunds its hedge, if it has them. The server did not answer the
    /// read: it has no page, sent a wrong one, still owes it after the disk failed twice, or was never sent the page.
    pub(super) fn note_no_page(&mut self, request: &Request) {
        self.rival(request.rival).breaker.note_draw(request.serial);
        if let Some(io) = request.io {
            self.refund(io.reason);
        }
    }

    /// Adds a disk read to the count of reads in flight. Returns the record to keep with its request.
    pub(super) fn begin_io(
        &mut self,
        now: Nanos,
        disk: DiskIndex,
        reason: ReadReason,
        continues_after: Option<u64>,
    ) -> DiskIo {
        self.speculative(disk).begin_io(now, reason, continues_after)
    }
}
