//! Speculative reads of one disk and their limits: hedged reads, and abandoned reads, whose answer is no longer needed.

use super::estimate::Concurrency;
use super::requests::{DiskIo, ReadReason};
use super::types::RequestId;
use crate::units::{ByteRange, Nanos, PoolIndex};

/// Per-disk limit on hedged reads in flight, and on abandoned disk reads. Each holds a buffer.
const LOAD_LIMIT: Load = Load { count: 128, bytes: 16 << 20 };

/// Read that waits for memory servers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    /// Pool that the read counts for.
    pub(super) pool: PoolIndex,
    pub(super) since: Nanos,
    pub(super) id: RequestId,
    pub(super) serial: u64,
}

/// Number, and size in bytes, of disk reads whose answer may not be needed.
#[derive(Debug, Default)]
struct Load {
    count: u32,
    bytes: u64,
}

impl Load {
    fn add(&mut self, range: ByteRange) {
        self.count += 1;
        self.bytes += range.length;
    }

    fn remove(&mut self, range: ByteRange) {
        self.count -= 1;
        self.bytes -= range.length;
    }

    fn is_full(&self) -> bool {
        self.count >= LOAD_LIMIT.count || self.bytes >= LOAD_LIMIT.bytes
    }
}

/// Counts of the reads of one disk, and of those among them that are speculative.
#[derive(Debug, Default)]
pub(super) struct SpeculativeReads {
    /// Guest reads in flight, whether the server or the disk answers them.
    guest: u32,
    /// Disk reads in flight.
    disk: u32,
    /// Hedged reads whose disk I/O is in flight.
    hedged: Load,
    /// Disk reads in flight whose request the server has answered.
    abandoned: Load,
    /// Late reads that wait until the disk has fewer abandoned reads.
    deferred: Vec<Waiting>,
    concurrency: Concurrency,
}

impl SpeculativeReads {
    /// Returns whether the disk has more reads in flight than it would have without a server, and may be slower because of it.
    pub(super) fn is_saturated(&self) -> bool {
        self.disk > self.guest.max(self.concurrency.reads())
    }

    /// Returns whether no read is in flight.
    pub(super) fn are_idle(&self) -> bool {
        self.guest == 0 && self.disk == 0 && self.hedged.count == 0 && self.abandoned.count == 0
    }

    /// Adds a guest read to the count of reads in flight.
    pub(super) fn begin_read(&mut self) {
        self.guest += 1;
    }

    /// Removes an answered guest read from the count of reads in flight.
    pub(super) fn end_read(&mut self) {
        self.guest -= 1;
    }

    /// Adds a disk read to the count of reads in flight. Returns a record of when and why it started, after
    /// which gap, and of the load that it found on the disk.
    pub(super) fn begin_io(&mut self, now: Nanos, reason: ReadReason, continues_after: Option<u64>) -> DiskIo {
        let (is_undisturbed, queue_depth) = (self.abandoned.count == 0, self.disk);
        self.disk += 1;
        DiskIo { since: now, reason, is_undisturbed, queue_depth, continues_after }
    }

    /// Removes a completed disk read from the count of reads in flight, and from the hedged and abandoned reads if it
    /// is one of them. `answered` says whether it was abandoned.
    pub(super) fn end_io(&mut self, reason: ReadReason, range: ByteRange, answered: bool) {
        self.disk -= 1;
        if reason == ReadReason::Hedge {
            self.hedged.remove(range);
        }
        if answered {
            self.abandoned.remove(range);
        }
    }

    /// Adds a disk read to the abandoned reads, because its request has just been answered.
    pub(super) fn begin_abandoned(&mut self, range: ByteRange) {
        self.abandoned.add(range);
    }

    /// Returns whether the abandoned reads have reached their limit.
    pub(super) fn is_abandoned_full(&self) -> bool {
        self.abandoned.is_full()
    }

    /// Returns whether one more hedge may go to the disk.
    pub(super) fn has_room_for_hedge(&self) -> bool {
        !self.is_saturated() && !self.hedged.is_full() && !self.abandoned.is_full()
    }

    /// Adds a read to the hedged reads in flight.
    pub(super) fn begin_hedge(&mut self, range: ByteRange) {
        self.hedged.add(range);
    }

    /// Adds the latency of a completed disk read, and the queue depth that it found.
    pub(super) fn note_latency(&mut self, ns: u64, queue_depth: u32) {
        self.concurrency.note(ns, queue_depth);
    }

    /// Defers a late read until the disk has fewer abandoned reads.
    pub(super) fn defer(&mut self, read: Waiting) {
        self.deferred.push(read);
    }

    /// Removes and returns the deferred reads.
    pub(super) fn take_deferred(&mut self) -> impl DoubleEndedIterator<Item = Waiting> + '_ {
        self.deferred.drain(..)
    }

    /// Removes deferred reads for which `is_waiting` is false.
    pub(super) fn retain_deferred(&mut self, is_waiting: impl Fn(&Waiting) -> bool) {
        self.deferred.retain(is_waiting);
    }

    /// Returns the number of deferred reads.
    #[cfg(test)]
    pub(super) fn deferred(&self) -> usize {
        self.deferred.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_hedges_are_fewer() {
        let (mut reads, long) = (SpeculativeReads::default(), ByteRange { offset: 0, length: 1 << 20 });
        for _ in 0..16 {
            reads.begin_read();
            assert!(reads.has_room_for_hedge());
            reads.begin_hedge(long);
            reads.begin_io(Nanos(1), ReadReason::Hedge, None);
        }
        reads.begin_read();
        assert!(!reads.is_saturated() && !reads.has_room_for_hedge(), "16 MiB are in flight");
        reads.end_io(ReadReason::Hedge, long, false);
        assert!(reads.has_room_for_hedge());
    }

    #[test]
    fn a_disk_is_not_saturated_by_what_it_does_at_a_time() {
        let mut reads = SpeculativeReads::default();
        reads.note_latency(1000, 0);
        (0..100).for_each(|_| reads.note_latency(1000, 7));
        (0..8).for_each(|_| _ = reads.begin_io(Nanos(1), ReadReason::Needed, None));
        assert!(!reads.is_saturated());
        reads.begin_io(Nanos(1), ReadReason::Needed, None);
        assert!(reads.is_saturated());
        (0..9).for_each(|_| reads.begin_read());
        assert!(!reads.is_saturated(), "the guest has as many");
    }
}
