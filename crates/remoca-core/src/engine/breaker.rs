//! The circuit breaker: a server that is slower than the disk is left alone for a while.
//!
//! Reads that go to both at the same time are *probes*: they compare server and disk at one moment, and no read waits for
//! either of them alone. One probe is in flight at a time.
//! - Closed, one read in [`PROBE_INTERVAL`] is a probe. The breaker opens when the disk answers [`PROBES_LOST_MAX`]
//!   of them in succession first, or [`LOSSES_MAX`] other reads in succession, or when the [`Allowance`] is used up.
//! - Open, reads go to the disk. Probes begin after a pause that doubles with each one that the disk wins.
//!   [`WINS_MIN`] in succession that the server wins close the breaker, if the allowance or their latency permits it.
//!
//! Without hedging nothing is compared: the breaker opens only where a server is silent.
//!
//! Decision 0022.

use crate::units::Nanos;

/// Reads in succession for which the disk was faster.
const LOSSES_MAX: u32 = 16;
/// Probes in succession for which the disk was faster, while the breaker is closed. The next read after a lost probe is a probe.
const PROBES_LOST_MAX: u32 = 4;
/// Probes in succession that beat the disk.
const WINS_MIN: u32 = 4;
const PAUSE_MIN_NS: u64 = 10_000_000;
const PAUSE_MAX_NS: u64 = 1_000_000_000;
/// Reads from one probe to the next while the breaker is closed: far from the disk's latency, and near it.
const PROBE_INTERVAL: u32 = 256;
const PROBE_INTERVAL_NEAR: u32 = 32;
/// Near is a server that takes at least the disk's time divided by this.
const NEAR: u64 = 4;
/// While the breaker is open, one admission of so many goes to the server, so that it has something to be probed with.
const THINNED: u32 = 16;

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
/// [`Self::COST`] reads. A guest that sees 10 of 10,000 reads take longer sees its p99.9 grow; this allows 8.
#[derive(Debug)]
struct Allowance {
    /// In reads.
    credit: u32,
}

impl Default for Allowance {
    fn default() -> Self {
        Self { credit: Self::FULL }
    }
}

impl Allowance {
    const COST: u32 = 2500;
    const BURST: u32 = 4;
    const FULL: u32 = Self::COST * Self::BURST;

    fn note_read(&mut self) {
        self.credit = (self.credit + 1).min(Self::FULL);
    }

    /// Counts a read that took too long. Returns whether no further one may.
    fn note_overrun(&mut self) -> bool {
        self.credit = self.credit.saturating_sub(Self::COST);
        self.credit < Self::COST
    }

    fn has_recovered(&self) -> bool {
        self.credit >= Self::FULL / 2
    }
}

#[derive(Debug)]
struct Open {
    probe_at: Nanos,
    wins: u32,
}

#[derive(Debug)]
pub(super) struct Breaker {
    /// Whether a server is judged by its latency, or only by its silence.
    compares: bool,
    open: Option<Open>,
    /// The read that goes to both now.
    probe: Option<u64>,
    /// Closed: reads that go to the server before the next probe.
    until_probe: u32,
    probes_lost: u32,
    losses: u32,
    allowance: Allowance,
    pause_ns: u64,
    closed_at: Nanos,
    thinned: u32,
}

impl Breaker {
    pub(super) fn new(compares: bool) -> Self {
        Self {
            compares,
            open: None,
            probe: None,
            until_probe: PROBE_INTERVAL,
            probes_lost: 0,
            losses: 0,
            allowance: Allowance::default(),
            pause_ns: PAUSE_MIN_NS,
            closed_at: Nanos(0),
            thinned: 0,
        }
    }

    /// Closes: there is another session, or none. What the guest has suffered is not forgotten.
    pub(super) fn forget_server(&mut self) {
        let allowance = std::mem::take(&mut self.allowance);
        *self = Self { allowance, ..Self::new(self.compares) };
    }

    pub(super) fn state(&self) -> BreakerState {
        match &self.open {
            None => BreakerState::Closed,
            Some(open) if open.wins == 0 => BreakerState::Open,
            Some(_) => BreakerState::HalfOpen,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    pub(super) fn route(&self, now: Nanos) -> Route {
        let probes = self.probe.is_none();
        match &self.open {
            None if self.compares && probes && self.until_probe == 0 => Route::Both,
            None => Route::Server,
            Some(open) if probes && open.probe_at <= now => Route::Both,
            Some(_) => Route::Disk,
        }
    }

    /// Notes that the read `serial` goes both ways.
    pub(super) fn begin_probe(&mut self, serial: u64) {
        self.probe = Some(serial);
    }

    /// Notes that a read goes to the server alone.
    pub(super) fn note_server_read(&mut self) {
        self.until_probe = self.until_probe.saturating_sub(1);
    }

    /// Notes that a read of the guest is done, whoever answered it.
    pub(super) fn note_read(&mut self) {
        self.allowance.note_read();
    }

    /// Notes that the disk took `disk_ns` where the server takes `server_ns`. The closer they are, the more often probes
    /// compare them.
    pub(super) fn note_distance(&mut self, server_ns: u64, disk_ns: u64) {
        if server_ns * NEAR < disk_ns {
            self.until_probe = PROBE_INTERVAL;
        } else {
            self.until_probe = self.until_probe.min(PROBE_INTERVAL_NEAR);
        }
    }

    /// Notes that the server answered a read before the disk did. Returns whether that closes the breaker. `is_early`: so
    /// much earlier than the disk that a hedge is in time.
    pub(super) fn note_win(&mut self, now: Nanos, serial: u64, is_early: bool) -> bool {
        self.losses = 0;
        if self.probe != Some(serial) {
            return false;
        }
        self.probe = None;
        let Some(open) = &mut self.open else {
            (self.probes_lost, self.until_probe) = (0, PROBE_INTERVAL);
            return false;
        };
        open.wins += 1;
        if open.wins < WINS_MIN {
            return false;
        }
        if !is_early && !self.allowance.has_recovered() {
            self.pause_ns = (self.pause_ns * 2).min(PAUSE_MAX_NS);
            open.probe_at = now.plus_ns(self.pause_ns);
            return false;
        }
        self.open = None;
        (self.probes_lost, self.until_probe) = (0, PROBE_INTERVAL_NEAR);
        self.closed_at = now;
        true
    }

    /// Notes that the disk answered a read before the server did. Returns whether that opens the breaker.
    pub(super) fn note_loss(&mut self, now: Nanos, serial: u64) -> bool {
        let was_probe = self.probe == Some(serial);
        if was_probe {
            self.probe = None;
        }
        match &mut self.open {
            None if was_probe => {
                self.probes_lost += 1;
                self.probes_lost >= PROBES_LOST_MAX && self.open(now)
            }
            None => {
                self.losses += 1;
                self.losses >= LOSSES_MAX && self.open(now)
            }
            Some(open) if was_probe => {
                self.pause_ns = (self.pause_ns * 2).min(PAUSE_MAX_NS);
                *open = Open { probe_at: now.plus_ns(self.pause_ns), wins: 0 };
                false
            }
            Some(_) => false,
        }
    }

    /// Notes a read that took clearly longer than the disk's slowest because it waited for the server. Returns whether
    /// that opens the breaker.
    pub(super) fn note_overrun(&mut self, now: Nanos) -> bool {
        self.compares && self.allowance.note_overrun() && self.open.is_none() && self.open(now)
    }

    /// Ends a probe without a result that can be compared.
    pub(super) fn note_draw(&mut self, serial: u64) {
        if self.probe == Some(serial) {
            self.probe = None;
        }
    }

    /// Notes a page for a read that the disk answered before the breaker opened: the server works again.
    pub(super) fn note_life(&mut self, now: Nanos) {
        if let Some(open) = &mut self.open {
            open.probe_at = open.probe_at.min(now);
        }
    }

    /// Opens the breaker; always true. One that was closed for less than the longest pause keeps the pause it had.
    fn open(&mut self, now: Nanos) -> bool {
        if now.since_ns(self.closed_at) > PAUSE_MAX_NS {
            self.pause_ns = PAUSE_MIN_NS;
        }
        self.losses = 0;
        self.probes_lost = 0;
        self.open = Some(Open { probe_at: now.plus_ns(self.pause_ns), wins: 0 });
        true
    }

    /// Returns whether this admission may go to the server.
    pub(super) fn admits(&mut self) -> bool {
        if self.open.is_none() {
            return true;
        }
        self.thinned = (self.thinned + 1) % THINNED;
        self.thinned == 0
    }
}
