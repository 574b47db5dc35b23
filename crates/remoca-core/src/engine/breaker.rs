//! The circuit breaker: a server that is worse than the disk is left alone for a while.
//!
//! It opens when the disk was faster than the server for [`LOSSES_MAX`] reads in succession, or when the server's median is
//! clearly above the disk's. While it is open reads go to the disk; one at a time is sent to the server, too (a probe),
//! after a pause that doubles with each probe that loses. [`WINS_MIN`] probes in succession that beat the disk close it.
//! No read waits for a server on trial: its disk, unless that one hangs, works on every probe. Decision 0022.

use super::estimate::Latency;
use crate::units::Nanos;

/// Reads in succession for which the disk was faster.
const LOSSES_MAX: u32 = 16;
/// Probes in succession that beat the disk.
const WINS_MIN: u32 = 4;
const PAUSE_MIN_NS: u64 = 10_000_000;
const PAUSE_MAX_NS: u64 = 1_000_000_000;
/// The server's median may be twice the disk's and this much more: near the disk's, nothing is gained by leaving it.
const MARGIN_NS: u64 = 500_000;
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

#[derive(Debug)]
struct Open {
    probe_at: Nanos,
    /// The read that is on trial now.
    probe: Option<u64>,
    wins: u32,
}

#[derive(Debug)]
pub(super) struct Breaker {
    open: Option<Open>,
    losses: u32,
    pause_ns: u64,
    closed_at: Nanos,
    thinned: u32,
}

impl Default for Breaker {
    fn default() -> Self {
        Self { open: None, losses: 0, pause_ns: PAUSE_MIN_NS, closed_at: Nanos(0), thinned: 0 }
    }
}

impl Breaker {
    pub(super) fn state(&self) -> BreakerState {
        match &self.open {
            None => BreakerState::Closed,
            Some(open) if open.wins == 0 => BreakerState::Open,
            Some(_) => BreakerState::HalfOpen,
        }
    }

    pub(super) fn route(&self, now: Nanos) -> Route {
        match &self.open {
            None => Route::Server,
            Some(open) if open.probe.is_none() && open.probe_at <= now => Route::Both,
            Some(_) => Route::Disk,
        }
    }

    /// The read `serial` goes both ways.
    pub(super) fn begin_probe(&mut self, serial: u64) {
        if let Some(open) = &mut self.open {
            open.probe = Some(serial);
        }
    }

    /// The server answered a read before the disk did. True if that closes the breaker.
    pub(super) fn note_win(&mut self, now: Nanos, serial: u64) -> bool {
        self.losses = 0;
        let Some(open) = &mut self.open else { return false };
        if open.probe != Some(serial) {
            return false;
        }
        (open.probe, open.wins) = (None, open.wins + 1);
        if open.wins < WINS_MIN {
            return false;
        }
        self.open = None;
        self.closed_at = now;
        true
    }

    /// The disk answered a read before the server did. True if that opens the breaker.
    pub(super) fn note_loss(&mut self, now: Nanos, serial: u64) -> bool {
        match &mut self.open {
            None => {
                self.losses += 1;
                self.losses >= LOSSES_MAX && self.open(now)
            }
            Some(open) => {
                if open.probe == Some(serial) {
                    self.pause_ns = (self.pause_ns * 2).min(PAUSE_MAX_NS);
                    *open = Open { probe_at: now.plus_ns(self.pause_ns), probe: None, wins: 0 };
                }
                false
            }
        }
    }

    /// A read on trial ended with nothing that could be compared.
    pub(super) fn note_draw(&mut self, serial: u64) {
        if let Some(open) = &mut self.open
            && open.probe == Some(serial)
        {
            open.probe = None;
        }
    }

    /// A page came for a read that the disk had answered before the breaker opened: the server is at work again.
    pub(super) fn note_life(&mut self, now: Nanos) {
        if let Some(open) = &mut self.open {
            open.probe_at = open.probe_at.min(now);
        }
    }

    /// Compares what is normal. True if that opens the breaker.
    pub(super) fn compare(&mut self, now: Nanos, server: Latency, disk: Latency) -> bool {
        self.open.is_none() && server.p50_ns > disk.p50_ns * 2 + MARGIN_NS && self.open(now)
    }

    /// Always true. One that has closed for less than the longest pause goes on with the pause it had.
    fn open(&mut self, now: Nanos) -> bool {
        if now.since_ns(self.closed_at) > PAUSE_MAX_NS {
            self.pause_ns = PAUSE_MIN_NS;
        }
        self.losses = 0;
        self.open = Some(Open { probe_at: now.plus_ns(self.pause_ns), probe: None, wins: 0 });
        true
    }

    /// Whether this admission may go to the server.
    pub(super) fn admits(&mut self) -> bool {
        if self.open.is_none() {
            return true;
        }
        self.thinned = (self.thinned + 1) % THINNED;
        self.thinned == 0
    }
}
