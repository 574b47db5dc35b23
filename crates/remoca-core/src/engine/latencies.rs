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

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn of(count: u32, ns: u64) -> Latencies {
        let mut latencies = Latencies::default();
        (0..count).for_each(|_| latencies.note_disk(ns, 1));
        latencies
    }

    #[test]
    fn an_overrun_takes_clearly_longer_than_the_p99_or_the_last_32_reads() {
        assert!(!of(15, MS).is_overrun(u64::MAX), "nothing is known");
        let mut disk = of(100, 8 * MS);
        assert!(!disk.is_overrun(8 * MS + MS / 4) && disk.is_overrun(9 * MS));
        // The disk becomes faster.
        (0..31).for_each(|_| disk.note_disk(MS, 1));
        assert!(!disk.is_overrun(8 * MS));
        disk.note_disk(MS, 1);
        assert!(disk.is_overrun(2 * MS), "though the p99 is what it was");
        // A single slow read of the disk is not its p99.
        let mut disk = of(1000, MS);
        disk.note_disk(100 * MS, 1);
        assert!(disk.is_overrun(2 * MS));
    }

    #[test]
    fn late_is_never_after_the_disks_median_or_the_timeout() {
        let slow = Some(Latency { p50_ns: 900 * MS, p99_ns: 5000 * MS });
        let disk = of(16, 8 * MS);
        let median = disk.disk().expect("they are enough").p50_ns;
        assert_eq!(disk.late_after_ns(slow, 0, 1), median);
        assert_eq!(disk.timeout_ns(), 2 * median);
        let disk = of(16, 2000 * MS);
        assert_eq!((disk.timeout_ns(), disk.late_after_ns(slow, 0, 1)), (500 * MS, 500 * MS));
        assert_eq!((of(16, MS).timeout_ns(), of(15, 8 * MS).late_after_ns(slow, 0, 1)), (5 * MS, 5 * MS));
    }
}
