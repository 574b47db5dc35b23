//! One memory server as the disk's rival: what is known of its latency, its breaker, and the reads that wait for it.
//!
//! [`super::race`] has one for each pool. A read of several pools waits in the queues of one of them, the slowest.

use super::breaker::Breaker;
use super::estimate::{Estimate, Latency};
use super::requests::Requests;
use super::speculative::Waiting;
use crate::units::Nanos;
use std::collections::VecDeque;

/// Maximum number of waiting reads that add to the slack of the timer.
const SLACK_READS_MAX: usize = 4;
/// Maximum slack of the timer.
const SLACK_MAX_NS: u64 = 2_000_000;

/// Latency, breaker and waiting reads of one pool.
#[derive(Debug)]
pub(super) struct Rival {
    pub(super) breaker: Breaker,
    server: Estimate,
    /// Reads that are not late yet, oldest first.
    pub(super) waiting: VecDeque<Waiting>,
    /// Late reads that could not be hedged.
    pub(super) unhedged: VecDeque<Waiting>,
}

/// Limits on the time that a read waits for one pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitLimits {
    /// Wait before a hedge.
    pub(super) late_after_ns: u64,
    /// Wait before the disk is asked without credit.
    pub(super) timeout_ns: u64,
}

impl Rival {
    pub(super) fn new(judges_latency: bool) -> Self {
        Self {
            breaker: Breaker::new(judges_latency),
            server: Estimate::default(),
            waiting: VecDeque::new(),
            unhedged: VecDeque::new(),
        }
    }

    /// Returns the latency of reads that the server answers first, or `None` while there are too few samples.
    pub(super) fn latency(&self) -> Option<Latency> {
        self.server.quantiles()
    }

    /// Adds the latency of a read that the server answered first.
    pub(super) fn note_latency(&mut self, ns: u64) {
        self.server.note(ns, 1);
    }

    /// Forgets the latency of the server.
    pub(super) fn forget_latency(&mut self) {
        self.server = Estimate::default();
    }

    /// Returns the time at which the next read is late, or `None` if no read waits. Removes reads that no longer wait
    /// from the front of the queues.
    pub(super) fn late_deadline(&mut self, limits: &WaitLimits, requests: &Requests) -> Option<Nanos> {
        let waiting = first_waiting(&mut self.waiting, requests).map(|first| first.since.plus_ns(limits.late_after_ns));
        let unhedged = first_waiting(&mut self.unhedged, requests).map(|first| first.since.plus_ns(limits.timeout_ns));
        [waiting, unhedged].into_iter().flatten().min()
    }

    /// Returns how far past [`Self::late_deadline`] a thread may sleep. The answers to other waiting reads also wake it, so
    /// the slack only matters if all of them are late; a needless wake-up costs more than a read.
    pub(super) fn slack_ns(&self, limits: &WaitLimits, requests: &Requests) -> u64 {
        let waiting = self.waiting.iter().skip(1).filter(|read| is_waiting(requests, read));
        (limits.late_after_ns * waiting.take(SLACK_READS_MAX).count() as u64).min(SLACK_MAX_NS)
    }

    /// Removes and returns a read that has become late, or `None` if there is none.
    pub(super) fn pop_late(&mut self, now: Nanos, limits: &WaitLimits) -> Option<Waiting> {
        pop_due(&mut self.waiting, limits.late_after_ns, now)
    }

    /// Removes and returns a late read that was not hedged and has waited for the timeout, or `None` if there is none.
    pub(super) fn pop_timed_out(&mut self, now: Nanos, limits: &WaitLimits) -> Option<Waiting> {
        pop_due(&mut self.unhedged, limits.timeout_ns, now)
    }
}

/// Returns whether a read waits only for memory servers.
pub(super) fn is_waiting(requests: &Requests, read: &Waiting) -> bool {
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
