//! Latency estimate of the disk, and the thresholds derived from it: late answers, timeouts, overruns.

use super::estimate::{Estimate, Latency, RecentMax};

/// Divisor of the disk's median that gives the earliest time at which an answer is late.
const LATE_MIN_DIVISOR: u64 = 20;
/// Divisor of the disk's median that gives the latest timely start of a hedge, delays of the timer included.
const TIMELY_DIVISOR: u64 = 12;
/// Bounds of the timeout after which the disk is asked without credit.
const TIMEOUT_MIN_NS: u64 = 5_000_000;
const TIMEOUT_MAX_NS: u64 = 500_000_000;

/// Running estimates for the disk.
#[derive(Debug, Default)]
pub(super) struct Latencies {
    disk: Estimate,
    recent_disk: RecentMax,
}

impl Latencies {
    /// Adds the latency of a disk read, counted `weight` times.
    pub(super) fn note_disk(&mut self, ns: u64, weight: u16) {
        self.disk.note(ns, weight);
        self.recent_disk.note(ns);
    }

    /// Returns the latency of disk reads, or `None` while there are too few samples.
    pub(super) fn disk(&self) -> Option<Latency> {
        self.disk.quantiles()
    }

    /// Returns the time, in nanoseconds, after which an answer of a server is late: the server's normal latency, but
    /// at least 5 % of the disk's median and at most that median. The normal latency is the p99 of `server`, or twice its
    /// median if slow answers have reached the p99. The 5 % grow with `shortfall / full`, up to the latest timely start
    /// ([`TIMELY_DIVISOR`]).
    pub(super) fn late_after_ns(&self, server: Option<Latency>, shortfall: u32, full: u32) -> u64 {
        let timeout = self.timeout_ns();
        let Some(disk) = self.disk.quantiles() else { return timeout };
        let normal = server.map_or(0, |server| server.p99_ns.min(server.p50_ns * 2));
        // Up to the end of its bucket: all answers of a server that always takes the same are normal.
        let normal = normal + normal / 16;
        let (soon, in_time) = (disk.p50_ns / LATE_MIN_DIVISOR, disk.p50_ns / TIMELY_DIVISOR);
        let least = soon + (in_time - soon) * u64::from(shortfall) / u64::from(full);
        normal.clamp(least, disk.p50_ns).min(timeout)
    }

    /// Returns the time, in nanoseconds, after which a waiting read goes to the disk even without credit. It is twice
    /// the disk's median, within bounds.
    pub(super) fn timeout_ns(&self) -> u64 {
        self.disk.quantiles().map_or(0, |disk| disk.p50_ns * 2).clamp(TIMEOUT_MIN_NS, TIMEOUT_MAX_NS)
    }

    /// Returns whether a read took clearly longer than the disk's slow reads. "Slow" is the lower of the disk's p99 and
    /// its recent maximum, because the p99 falls slowly when a disk becomes faster.
    pub(super) fn is_overrun(&self, ns: u64) -> bool {
        self.disk.quantiles().is_some_and(|disk| {
            let slow = disk.p99_ns.min(self.recent_disk.slowest_ns());
            ns > slow + slow / 16
        })
    }

    /// Returns whether a hedge after `ns` is early enough to add little to the read.
    pub(super) fn is_timely(&self, ns: u64) -> bool {
        self.disk.quantiles().is_some_and(|disk| ns <= disk.p50_ns / TIMELY_DIVISOR)
    }
}
