//! What disk and memory server normally take, and what follows from it: when an answer is late, and which reads took too long.

use super::estimate::{Estimate, Latency, RecentMax};

/// An answer is never late before the disk's median divided by this.
const LATE_MIN_DIVISOR: u64 = 20;
/// A hedge that begins before the disk's median divided by this is in time: what its timer was late included.
const TIMELY_DIVISOR: u64 = 12;
/// Bounds of the time after which the disk is asked without credit.
const TIMEOUT_MIN_NS: u64 = 5_000_000;
const TIMEOUT_MAX_NS: u64 = 500_000_000;

/// Running estimates of both.
#[derive(Debug, Default)]
pub(super) struct Latencies {
    disk: Estimate,
    recent_disk: RecentMax,
    server: Estimate,
}

impl Latencies {
    /// Takes the latency of a disk read that stands for `weight` reads.
    pub(super) fn note_disk(&mut self, ns: u64, weight: u16) {
        self.disk.note(ns, weight);
        self.recent_disk.note(ns);
    }

    /// Takes the latency of a read that the server answered first.
    pub(super) fn note_server(&mut self, ns: u64) {
        self.server.note(ns, 1);
    }

    /// Forgets what the server normally takes.
    pub(super) fn forget_server(&mut self) {
        self.server = Estimate::default();
    }

    /// Returns what a disk read takes; `None` while there are too few.
    pub(super) fn disk(&self) -> Option<Latency> {
        self.disk.quantiles()
    }

    /// Returns what a read takes that the server answers first; `None` while there are too few.
    pub(super) fn server(&self) -> Option<Latency> {
        self.server.quantiles()
    }

    /// Returns after how long an answer is late: 5 % of the disk's median, or what the server normally takes, but never more
    /// than the disk's median. Normal is the server's p99, or twice its median if slow answers have got into the p99. While
    /// `shortfall` of `full` is not 0, the 5 % grow by as much towards the longest that is still in time ([`TIMELY_DIVISOR`]).
    pub(super) fn late_after_ns(&self, shortfall: u32, full: u32) -> u64 {
        let timeout = self.timeout_ns();
        let Some(disk) = self.disk.quantiles() else { return timeout };
        let normal = self.server.quantiles().map_or(0, |server| server.p99_ns.min(server.p50_ns * 2));
        let (soon, in_time) = (disk.p50_ns / LATE_MIN_DIVISOR, disk.p50_ns / TIMELY_DIVISOR);
        let least = soon + (in_time - soon) * u64::from(shortfall) / u64::from(full);
        normal.clamp(least, disk.p50_ns).min(timeout)
    }

    /// Returns the time after which a read goes to the disk even without credit: twice the disk's median, within bounds.
    pub(super) fn timeout_ns(&self) -> u64 {
        self.disk.quantiles().map_or(0, |disk| disk.p50_ns * 2).clamp(TIMEOUT_MIN_NS, TIMEOUT_MAX_NS)
    }

    /// Returns whether a read took clearly longer than the disk's slow ones do. The p99 follows a disk that becomes faster
    /// slowly, the slowest of the last few at once.
    pub(super) fn is_overrun(&self, ns: u64) -> bool {
        self.disk.quantiles().is_some_and(|disk| {
            let slow = disk.p99_ns.min(self.recent_disk.slowest_ns());
            ns > slow + slow / 16
        })
    }

    /// Returns whether a hedge after this time does not lengthen a read much.
    pub(super) fn is_timely(&self, ns: u64) -> bool {
        self.disk.quantiles().is_some_and(|disk| ns <= disk.p50_ns / TIMELY_DIVISOR)
    }
}
