//! The circuit breaker: a server that is slower than the disk is left alone for a while.
//!
//! Reads that go to both at the same time are *probes*: they compare server and disk at one moment, and no read waits for
//! either of them alone. One probe is in flight at a time.
//! - Closed, one read in [`PROBE_INTERVAL`] is a probe. The breaker opens when the disk answers [`PROBE_LOSSES_MAX`]
//!   of them in succession first, or [`LOSSES_MAX`] other reads in succession, or when the [`OverrunBudget`] is used up.
//! - Open, reads go to the disk. Probes begin after a backoff that doubles with each one that the disk wins.
//!   [`WINS_MIN`] in succession that the server wins close the breaker, if the budget or their latency permits it.
//!
//! Without hedging nothing is compared: the breaker opens only where a server is silent.
//!
//! Decision 0022.

use crate::units::Nanos;

/// Reads in succession for which the disk was faster.
const LOSSES_MAX: u32 = 16;
/// Probes in succession for which the disk was faster, while the breaker is closed. The next read after a lost probe is a probe.
const PROBE_LOSSES_MAX: u32 = 4;
/// Probes in succession that beat the disk.
const WINS_MIN: u32 = 4;
const BACKOFF_MIN_NS: u64 = 10_000_000;
const BACKOFF_MAX_NS: u64 = 1_000_000_000;
/// Reads from one probe to the next while the breaker is closed: far from the disk's latency, and near it.
const PROBE_INTERVAL: u32 = 256;
const PROBE_INTERVAL_SHORT: u32 = 32;
/// Near is a server that takes at least the disk's time divided by this.
const NEAR_DIVISOR: u64 = 4;
/// While the breaker is open, one admission of so many goes to the server, so that it has something to be probed with.
const ADMISSION_INTERVAL: u32 = 16;

/// What the breaker does, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// Reads of cached pages go to the server.
    Closed,
    /// The server is left alone but for probes.
    Open,
    /// The same, and the last probes were faster than the disk.
    HalfOpen,
}

/// Where a read of cached pages goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Server,
    Both,
    Disk,
}

/// Number of reads that may take clearly longer than the disk's slowest: [`Self::BURST`] at once, and one for every
/// [`Self::OVERRUN_COST`] reads. A guest that sees 10 of 10,000 reads take longer sees its p99.9 grow; this allows 8.
#[derive(Debug)]
struct OverrunBudget {
    tokens: u32,
}

impl Default for OverrunBudget {
    fn default() -> Self {
        Self { tokens: Self::CAPACITY }
    }
}

impl OverrunBudget {
    const OVERRUN_COST: u32 = 2500;
    const BURST: u32 = 4;
    const CAPACITY: u32 = Self::OVERRUN_COST * Self::BURST;

    fn note_read(&mut self) {
        self.tokens = (self.tokens + 1).min(Self::CAPACITY);
    }

    /// Counts a read that took too long. Returns whether no further one may.
    fn note_overrun(&mut self) -> bool {
        self.tokens = self.tokens.saturating_sub(Self::OVERRUN_COST);
        self.tokens < Self::OVERRUN_COST
    }

    fn is_half_full(&self) -> bool {
        self.tokens >= Self::CAPACITY / 2
    }
}

#[derive(Debug)]
struct Open {
    probe_at: Nanos,
    consecutive_wins: u32,
}

#[derive(Debug)]
pub(super) struct Breaker {
    /// Whether a server is judged by its latency, or only by its silence.
    judges_latency: bool,
    open: Option<Open>,
    /// The read that goes to both now.
    probe_in_flight: Option<u64>,
    /// Closed: reads that go to the server before the next probe.
    reads_until_probe: u32,
    consecutive_probe_losses: u32,
    consecutive_losses: u32,
    budget: OverrunBudget,
    backoff_ns: u64,
    closed_at: Nanos,
    admissions: u32,
}

impl Breaker {
    pub(super) fn new(judges_latency: bool) -> Self {
        Self {
            judges_latency,
            open: None,
            probe_in_flight: None,
            reads_until_probe: PROBE_INTERVAL,
            consecutive_probe_losses: 0,
            consecutive_losses: 0,
            budget: OverrunBudget::default(),
            backoff_ns: BACKOFF_MIN_NS,
            closed_at: Nanos(0),
            admissions: 0,
        }
    }

    /// Closes: there is another session, or none. What the guest has suffered is not forgotten.
    pub(super) fn forget_server(&mut self) {
        let budget = std::mem::take(&mut self.budget);
        *self = Self { budget, ..Self::new(self.judges_latency) };
    }

    pub(super) fn state(&self) -> BreakerState {
        match &self.open {
            None => BreakerState::Closed,
            Some(open) if open.consecutive_wins == 0 => BreakerState::Open,
            Some(_) => BreakerState::HalfOpen,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    pub(super) fn route(&self, now: Nanos) -> Route {
        let may_probe = self.probe_in_flight.is_none();
        match &self.open {
            None if self.judges_latency && may_probe && self.reads_until_probe == 0 => Route::Both,
            None => Route::Server,
            Some(open) if may_probe && open.probe_at <= now => Route::Both,
            Some(_) => Route::Disk,
        }
    }

    /// Notes that the read `serial` goes both ways.
    pub(super) fn begin_probe(&mut self, serial: u64) {
        self.probe_in_flight = Some(serial);
    }

    /// Notes that a read goes to the server alone.
    pub(super) fn note_server_read(&mut self) {
        self.reads_until_probe = self.reads_until_probe.saturating_sub(1);
    }

    /// Notes that a read of the guest is done, whoever answered it.
    pub(super) fn note_read(&mut self) {
        self.budget.note_read();
    }

    /// Notes that the disk took `disk_ns` where the server takes `server_ns`. The closer they are, the more often probes
    /// compare them.
    pub(super) fn adapt_probe_interval(&mut self, server_ns: u64, disk_ns: u64) {
        if server_ns * NEAR_DIVISOR < disk_ns {
            self.reads_until_probe = PROBE_INTERVAL;
        } else {
            self.reads_until_probe = self.reads_until_probe.min(PROBE_INTERVAL_SHORT);
        }
    }

    /// Notes that the server answered a read before the disk did. Returns whether that closes the breaker. `is_timely`: so
    /// much earlier than the disk that a hedge is in time.
    pub(super) fn note_win(&mut self, now: Nanos, serial: u64, is_timely: bool) -> bool {
        self.consecutive_losses = 0;
        if self.probe_in_flight != Some(serial) {
            return false;
        }
        self.probe_in_flight = None;
        let Some(open) = &mut self.open else {
            (self.consecutive_probe_losses, self.reads_until_probe) = (0, PROBE_INTERVAL);
            return false;
        };
        open.consecutive_wins += 1;
        if open.consecutive_wins < WINS_MIN {
            return false;
        }
        if !is_timely && !self.budget.is_half_full() {
            self.backoff_ns = (self.backoff_ns * 2).min(BACKOFF_MAX_NS);
            open.probe_at = now.plus_ns(self.backoff_ns);
            return false;
        }
        self.open = None;
        (self.consecutive_probe_losses, self.reads_until_probe) = (0, PROBE_INTERVAL_SHORT);
        self.closed_at = now;
        true
    }

    /// Notes that the disk answered a read before the server did. Returns whether that opens the breaker.
    pub(super) fn note_loss(&mut self, now: Nanos, serial: u64) -> bool {
        let was_probe = self.probe_in_flight == Some(serial);
        if was_probe {
            self.probe_in_flight = None;
        }
        match &mut self.open {
            None if was_probe => {
                self.consecutive_probe_losses += 1;
                self.consecutive_probe_losses >= PROBE_LOSSES_MAX && self.open(now)
            }
            None => {
                self.consecutive_losses += 1;
                self.consecutive_losses >= LOSSES_MAX && self.open(now)
            }
            Some(open) if was_probe => {
                self.backoff_ns = (self.backoff_ns * 2).min(BACKOFF_MAX_NS);
                *open = Open { probe_at: now.plus_ns(self.backoff_ns), consecutive_wins: 0 };
                false
            }
            Some(_) => false,
        }
    }

    /// Notes a read that took clearly longer than the disk's slowest because it waited for the server. Returns whether
    /// that opens the breaker.
    pub(super) fn note_overrun(&mut self, now: Nanos) -> bool {
        self.judges_latency && self.budget.note_overrun() && self.open.is_none() && self.open(now)
    }

    /// Ends a probe without a result that can be compared.
    pub(super) fn note_draw(&mut self, serial: u64) {
        if self.probe_in_flight == Some(serial) {
            self.probe_in_flight = None;
        }
    }

    /// Notes a page for a read that the disk answered before the breaker opened: the server works again.
    pub(super) fn note_server_alive(&mut self, now: Nanos) {
        if let Some(open) = &mut self.open {
            open.probe_at = open.probe_at.min(now);
        }
    }

    /// Opens the breaker; always true. One that was closed for less than the longest backoff keeps the backoff it had.
    fn open(&mut self, now: Nanos) -> bool {
        if now.since_ns(self.closed_at) > BACKOFF_MAX_NS {
            self.backoff_ns = BACKOFF_MIN_NS;
        }
        self.consecutive_losses = 0;
        self.consecutive_probe_losses = 0;
        self.open = Some(Open { probe_at: now.plus_ns(self.backoff_ns), consecutive_wins: 0 });
        true
    }

    /// Returns whether this admission may go to the server.
    pub(super) fn admits(&mut self) -> bool {
        if self.open.is_none() {
            return true;
        }
        self.admissions = (self.admissions + 1) % ADMISSION_INTERVAL;
        self.admissions == 0
    }
}
