//! Reads that wait for memory servers: which are late, when that must be noticed, and what then becomes of them.

use super::super::requests::{ReadReason, Requests};
use super::super::rival::{Rival, WaitLimits, is_waiting};
use super::super::speculative::Waiting;
use super::super::stats::EngineStats;
use super::super::types::RequestId;
use super::{HEDGE_COST, Race};
use crate::units::{ByteRange, DiskIndex, Nanos};

/// Read whose answer is late.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct LateRead {
    pub(in super::super) id: RequestId,
    /// Reason to send the read to the disk now, or `None` to leave it with the server.
    pub(in super::super) reason: Option<ReadReason>,
    /// Whether the read was not reported as late before.
    pub(in super::super) is_newly_late: bool,
}

/// Credit when late reads are looked for. It decides what is late, whatever the hedges among them spend.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct CreditBefore(u32);

impl Race {
    /// Returns the time at which the next read is late, or `None` if no read waits. Removes reads that no longer wait
    /// from the front of the queues.
    pub(in super::super) fn late_deadline(&mut self, requests: &Requests) -> Option<Nanos> {
        self.earliest(|rival, limits| rival.late_deadline(limits, requests))
    }

    /// Returns the time at which a sleeping thread must look for late reads, or `None` if no read waits.
    pub(in super::super) fn late_wake(&mut self, requests: &Requests) -> Option<Nanos> {
        self.earliest(|rival, limits| {
            let late = rival.late_deadline(limits, requests)?;
            Some(late.plus_ns(rival.slack_ns(limits, requests)))
        })
    }

    /// Returns the earliest of the times that `of` returns for each pool.
    fn earliest(&mut self, of: impl Fn(&mut Rival, &WaitLimits) -> Option<Nanos>) -> Option<Nanos> {
        let mut earliest = None;
        for number in 0..self.rivals.len() {
            let limits = self.limits(self.rivals[number].latency(), self.credit);
            let at = of(&mut self.rivals[number], &limits);
            earliest = [earliest, at].into_iter().flatten().min();
        }
        earliest
    }

    /// Returns the current credit, for [`Self::next_late`].
    pub(in super::super) fn credit_before(&self) -> CreditBefore {
        CreditBefore(self.credit)
    }

    /// Returns the next read that has waited too long with the credit `before`, or `None` if there is no such read. If
    /// the result has a reason, the caller must send the read to the disk. This function has already counted that disk
    /// read.
    pub(in super::super) fn next_late(
        &mut self,
        now: Nanos,
        before: CreditBefore,
        requests: &Requests,
        stats: &mut EngineStats,
    ) -> Option<LateRead> {
        for number in 0..self.rivals.len() {
            let limits = self.limits(self.rivals[number].latency(), before.0);
            let late = self.next_late_of(number, now, &limits, requests, stats);
            if late.is_some() {
                return late;
            }
        }
        // While a disk hangs, the servers continue to answer deferred reads.
        for speculative in &mut self.speculative {
            speculative.retain_deferred(|read| is_waiting(requests, read));
        }
        None
    }

    fn next_late_of(
        &mut self,
        number: usize,
        now: Nanos,
        limits: &WaitLimits,
        requests: &Requests,
        stats: &mut EngineStats,
    ) -> Option<LateRead> {
        while let Some(read) = self.rivals[number].pop_late(now, limits) {
            let Some((disk, range)) = requests.only_at_server(read.id, read.serial) else { continue };
            let reason = if !self.enabled {
                self.begin_timeout_read(read, disk, stats)
            } else if self.try_begin_hedge(disk, range) {
                stats.hedges += 1;
                Some(ReadReason::Hedge)
            } else {
                self.rivals[number].unhedged.push_back(read);
                None
            };
            return Some(LateRead { id: read.id, reason, is_newly_late: true });
        }
        while let Some(read) = self.rivals[number].pop_timed_out(now, limits) {
            let Some((disk, _)) = requests.only_at_server(read.id, read.serial) else { continue };
            let reason = self.begin_timeout_read(read, disk, stats);
            return Some(LateRead { id: read.id, reason, is_newly_late: false });
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
}
