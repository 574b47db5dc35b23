//! The circuit breaker: keeps reads away from a server that is slower than the disk.
//!
//! A *probe* is a read that goes to server and disk at the same time. It compares the two at one moment, and its guest
//! waits only for the faster one. At most one probe is in flight.
//! - Closed: one read in [`PROBE_INTERVAL`] is a probe. The breaker opens when the disk wins [`PROBE_LOSSES_MAX`] probes
//!   in a row, or [`LOSSES_MAX`] other reads in a row, or when the [overrun budget](super::overruns) is spent.
//! - Open: reads go to the disk. Probes begin after a backoff that doubles with each one that the disk wins. The breaker
//!   closes when the server wins [`WINS_MIN`] in a row, if the overrun budget or the latency of the last one permits it.
//!
//! Without hedging, latencies are not compared: the breaker opens only for a server that stays silent, and a probe goes to
//! the disk only after the timeout, as every read does then.
//!
//! Decision 0022.

use crate::units::Nanos;

/// Reads in a row that the disk wins before the breaker opens.
const LOSSES_MAX: u32 = 16;
/// Probes in a row that the disk wins before the breaker opens. The read after a lost probe is a probe again.
const PROBE_LOSSES_MAX: u32 = 4;
/// Probes in a row that the server wins before the breaker closes.
const WINS_MIN: u32 = 4;
const BACKOFF_MIN_NS: u64 = 10_000_000;
const BACKOFF_MAX_NS: u64 = 1_000_000_000;
/// Reads between two probes while the breaker is closed: normally, and if the server is nearly as slow as the disk.
const PROBE_INTERVAL: u32 = 256;
const PROBE_INTERVAL_SHORT: u32 = 32;
/// Divisor of the disk's latency. A server whose latency is at least that quotient counts as nearly as slow as the
/// disk.
const NEAR_DIVISOR: u64 = 4;
/// Number of admissions for each one that goes to the server while the breaker is open. Without these, there would be
/// no pages to probe the server with.
const ADMISSION_INTERVAL: u32 = 16;

/// State of the breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// Reads of cached pages go to the server.
    Closed,
    /// Only probes go to the server.
    Open,
    /// Only probes go to the server, which has won the last of them.
    HalfOpen,
}

/// Destination of a read of cached pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Server,
    Both,
    Disk,
}

#[derive(Debug)]
struct Open {
    probe_at: Nanos,
    consecutive_wins: u32,
}

#[derive(Debug)]
pub(super) struct Breaker {
    /// Whether a server is judged by its latency, or only by whether it answers.
    judges_latency: bool,
    open: Option<Open>,
    /// Serial number of the probe in flight.
    probe_in_flight: Option<u64>,
    /// Number of reads that go only to the server before the next probe, while the breaker is closed.
    reads_until_probe: u32,
    consecutive_probe_losses: u32,
    consecutive_losses: u32,
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
            backoff_ns: BACKOFF_MIN_NS,
            closed_at: Nanos(0),
            admissions: 0,
        }
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

    /// Stores `serial` as the probe in flight: the read that goes to both server and disk.
    pub(super) fn begin_probe(&mut self, serial: u64) {
        self.probe_in_flight = Some(serial);
    }

    /// Subtracts a read that goes only to the server from the reads left until the next probe.
    pub(super) fn note_server_read(&mut self) {
        self.reads_until_probe = self.reads_until_probe.saturating_sub(1);
    }

    /// Adapts the probe interval to the latencies of server and disk: the closer they are, the more often they are compared.
    pub(super) fn adapt_probe_interval(&mut self, server_ns: u64, disk_ns: u64) {
        if server_ns * NEAR_DIVISOR < disk_ns {
            self.reads_until_probe = PROBE_INTERVAL;
        } else {
            self.reads_until_probe = self.reads_until_probe.min(PROBE_INTERVAL_SHORT);
        }
    }

    /// Resets the count of consecutive losses, because the server answered the read `serial` before the disk. If the
    /// read was the probe, ends the probe and, while the breaker is open, counts the win. Returns whether that closes
    /// the breaker, which it does only if `may_close`.
    pub(super) fn note_win(&mut self, now: Nanos, serial: u64, may_close: bool) -> bool {
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
        if !may_close {
            self.backoff_ns = (self.backoff_ns * 2).min(BACKOFF_MAX_NS);
            open.probe_at = now.plus_ns(self.backoff_ns);
            return false;
        }
        self.open = None;
        (self.consecutive_probe_losses, self.reads_until_probe) = (0, PROBE_INTERVAL_SHORT);
        self.closed_at = now;
        true
    }

    /// Counts the loss of the read `serial`, which the disk answered before the server, while the breaker is closed. A
    /// lost probe of an open breaker doubles the backoff instead. Returns whether the loss opens the breaker.
    pub(super) fn note_loss(&mut self, now: Nanos, serial: u64) -> bool {
        let was_probe = self.probe_in_flight == Some(serial);
        if was_probe {
            self.probe_in_flight = None;
        }
        match &mut self.open {
            None if was_probe => {
                // The time that the disk took for the probe may just have put the next one off.
                self.reads_until_probe = 0;
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

    /// Opens the breaker because an overrun found the budget spent. Returns whether it was closed before.
    pub(super) fn note_budget_spent(&mut self, now: Nanos) -> bool {
        self.open.is_none() && self.open(now)
    }

    /// Ends the probe `serial` without a result that can be compared. Does nothing if that read is not the probe in
    /// flight.
    pub(super) fn note_draw(&mut self, serial: u64) {
        if self.probe_in_flight == Some(serial) {
            self.probe_in_flight = None;
        }
    }

    /// Makes the next probe due at once, because a late page shows that the server works again.
    pub(super) fn note_server_alive(&mut self, now: Nanos) {
        if let Some(open) = &mut self.open {
            open.probe_at = open.probe_at.min(now);
        }
    }

    /// Opens the breaker and returns `true`. The backoff is reset only if the breaker was closed for longer than
    /// [`BACKOFF_MAX_NS`].
    fn open(&mut self, now: Nanos) -> bool {
        if now.since_ns(self.closed_at) > BACKOFF_MAX_NS {
            self.backoff_ns = BACKOFF_MIN_NS;
        }
        self.consecutive_losses = 0;
        self.consecutive_probe_losses = 0;
        self.open = Some(Open { probe_at: now.plus_ns(self.backoff_ns), consecutive_wins: 0 });
        true
    }

    /// Returns whether this admission may go to the server. While the breaker is open, only one in
    /// [`ADMISSION_INTERVAL`] may.
    pub(super) fn admits(&mut self) -> bool {
        if self.open.is_none() {
            return true;
        }
        self.admissions = (self.admissions + 1) % ADMISSION_INTERVAL;
        self.admissions == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// The disk is first with as many reads as open it.
    fn open(breaker: &mut Breaker, now: Nanos) {
        let opened: Vec<_> = (0..LOSSES_MAX).map(|_| breaker.note_loss(now, 0)).collect();
        assert!(opened.iter().filter(|opens| **opens).count() == 1 && breaker.is_open());
    }

    fn wins(breaker: &mut Breaker, now: Nanos, serial: u64) -> bool {
        breaker.begin_probe(serial);
        breaker.note_win(now, serial, true)
    }

    fn loses(breaker: &mut Breaker, now: Nanos, serial: u64) -> bool {
        breaker.begin_probe(serial);
        breaker.note_loss(now, serial)
    }

    /// Returns the number of reads until the next one that is a probe.
    fn reads_until_probe(breaker: &mut Breaker) -> u32 {
        let is_probe = |_: &u32| {
            let is_due = breaker.route(Nanos(0)) == Route::Both;
            breaker.note_server_read();
            is_due
        };
        (0..1000).find(is_probe).expect("a read is a probe in the end")
    }

    #[test]
    fn only_probes_that_are_lost_in_succession_open_it() {
        let (mut breaker, now) = (Breaker::new(true), Nanos(1));
        assert!((1..4).all(|serial| !loses(&mut breaker, now, serial)));
        assert!(!wins(&mut breaker, now, 4));
        assert!((5..8).all(|serial| !loses(&mut breaker, now, serial)));
        // What other reads show ends no succession of probes.
        assert!(!breaker.note_win(now, 100, true));
        assert!(loses(&mut breaker, now, 8));
    }

    #[test]
    fn a_probe_is_due_after_fewer_reads_where_the_server_is_near_the_disk() {
        let mut breaker = Breaker::new(true);
        assert_eq!(reads_until_probe(&mut breaker), 256);
        breaker.adapt_probe_interval(1000, 4001);
        assert_eq!(reads_until_probe(&mut breaker), 256);
        breaker.adapt_probe_interval(1000, 4001);
        breaker.adapt_probe_interval(1000, 4000);
        assert_eq!(reads_until_probe(&mut breaker), 32);
        breaker.adapt_probe_interval(1000, 4000);
        assert_eq!(breaker.route(Nanos(0)), Route::Both, "it is not put off");
        assert!(!wins(&mut breaker, Nanos(1), 1));
        assert_eq!(reads_until_probe(&mut breaker), 256);
        // A server that was just taken back is near it.
        open(&mut breaker, Nanos(1));
        assert!((2..5).all(|serial| !wins(&mut breaker, Nanos(1), serial)) && wins(&mut breaker, Nanos(1), 5));
        assert_eq!(reads_until_probe(&mut breaker), 32);
    }

    #[test]
    fn a_breaker_that_opens_again_within_a_second_goes_on_with_its_pause() {
        for (closed_ns, pause_ns) in [(1000 * MS, 80 * MS), (1001 * MS, 10 * MS)] {
            let (mut breaker, mut now) = (Breaker::new(true), Nanos(10_000 * MS));
            open(&mut breaker, now);
            for serial in 1..4 {
                now = now.plus_ns(1000 * MS);
                assert!(!loses(&mut breaker, now, serial));
            }
            assert!((4..7).all(|serial| !wins(&mut breaker, now, serial)) && wins(&mut breaker, now, 7));
            now = now.plus_ns(closed_ns);
            open(&mut breaker, now);
            assert_eq!(breaker.route(now.plus_ns(pause_ns - 1)), Route::Disk, "{closed_ns}");
            assert_eq!(breaker.route(now.plus_ns(pause_ns)), Route::Both, "{closed_ns}");
        }
    }
}
