//! What a trace has in it, as `remoca trace info` shows it.

use crate::formats::Batch;
use remoca_protocol::trace::{TraceRecord, TracedOp, TracedSource};
use serde::Serialize;

/// Counts of a trace.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    pub reads: u64,
    pub read_blocks: u64,
    pub writes: u64,
    pub written_blocks: u64,
    pub flushes: u64,
    /// Discards and write-zeroes.
    pub discards: u64,
    pub evictions: u64,
    /// Reads and writes of parts of blocks.
    pub partial: u64,
    /// Entries that are no requests for blocks.
    pub skipped: u64,
    /// Records that were lost while it was recorded.
    pub lost: u64,
    /// Number of disks that records are of.
    pub disks: u64,
    /// Time from the first to the last request: in our own format that of each program that recorded it, added up.
    pub seconds: f64,
    /// Reads that the cache answered while it was recorded; `None` if that is not known.
    pub recorded_cache_reads: Option<u64>,
    /// Mean time of a read from the disk while it was recorded; `None` if that is not known.
    pub recorded_disk_ms: Option<f64>,
    /// Mean time of a read from the cache while it was recorded.
    pub recorded_cache_ms: Option<f64>,
    #[serde(skip)]
    times: Times,
    /// Whether there is a record of each disk, by its number. A disk that has come in place of another has another number.
    #[serde(skip)]
    seen: Vec<bool>,
}

/// A record of our own format that had ended so long before others had begun is the first of another program: its times begin at 0
/// again.
const RESTART_NS: u64 = 1_000_000_000;

#[derive(Clone, Debug, Default)]
struct Times {
    /// Time that former programs recorded.
    former_ns: u64,
    first_ns: Option<u64>,
    last_ns: u64,
    disk: Mean,
    cache: Mean,
}

#[derive(Clone, Debug, Default)]
struct Mean {
    count: u64,
    sum_ms: f64,
}

impl Times {
    fn note(&mut self, record: &TraceRecord, may_restart: bool) {
        let ended_ns = record.issued_ns.saturating_add(record.latency_ns);
        if may_restart && ended_ns.saturating_add(RESTART_NS) < self.last_ns {
            self.former_ns = self.recorded_ns();
            (self.first_ns, self.last_ns) = (None, 0);
        }
        self.first_ns = Some(self.first_ns.map_or(record.issued_ns, |first| first.min(record.issued_ns)));
        self.last_ns = self.last_ns.max(record.issued_ns);
    }

    fn recorded_ns(&self) -> u64 {
        let newest = self.first_ns.map_or(0, |first| self.last_ns - first);
        self.former_ns.saturating_add(newest)
    }
}

impl Mean {
    fn note(&mut self, ns: u64) {
        self.count += 1;
        self.sum_ms += ns as f64 / 1e6;
    }

    fn get(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum_ms / self.count as f64)
    }
}

impl Summary {
    /// Counts the records of a batch. `is_ours`: whether they are of our own format. It tells what a cache answered, and the next program
    /// that records into the same file begins at 0 again.
    pub fn note(&mut self, batch: &Batch, is_ours: bool) {
        self.lost += batch.lost;
        self.skipped += batch.skipped;
        batch.records.iter().for_each(|record| self.note_record(record, is_ours));
        let times = &self.times;
        self.seconds = times.recorded_ns() as f64 / 1e9;
        (self.recorded_disk_ms, self.recorded_cache_ms) = (times.disk.get(), times.cache.get());
        self.recorded_cache_reads = is_ours.then_some(times.cache.count);
    }

    /// Returns the number of requests.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.reads + self.writes + self.flushes + self.discards
    }

    fn note_disk(&mut self, disk: usize) {
        if self.seen.len() <= disk {
            self.seen.resize(disk + 1, false);
        }
        self.disks += u64::from(!std::mem::replace(&mut self.seen[disk], true));
    }

    fn note_record(&mut self, record: &TraceRecord, is_ours: bool) {
        self.note_disk(usize::from(record.disk));
        let times = &mut self.times;
        times.note(record, is_ours);
        self.partial += u64::from(record.is_partial);
        match record.op {
            TracedOp::Read => {
                self.reads += 1;
                self.read_blocks += record.blocks;
                match record.source {
                    TracedSource::Cache => times.cache.note(record.latency_ns),
                    TracedSource::Disk if record.latency_ns > 0 => times.disk.note(record.latency_ns),
                    TracedSource::Disk => {}
                }
            }
            TracedOp::Write => {
                self.writes += 1;
                self.written_blocks += record.blocks;
            }
            TracedOp::Flush => self.flushes += 1,
            TracedOp::Discard | TracedOp::WriteZeroes => self.discards += 1,
            TracedOp::Evicted => self.evictions += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `--trace` goes on in the file that is there, with the times of a process that has just begun.
    #[test]
    fn the_times_of_all_processes_that_wrote_a_trace_are_added_up() {
        const S: u64 = 1_000_000_000;
        let record = |issued_ns, latency_ns| TraceRecord {
            issued_ns,
            latency_ns,
            ..TraceRecord::of_bytes(TracedOp::Read, 0, 4096)
        };
        let mut summary = Summary::default();
        let mut seconds_after = |records: &[TraceRecord]| {
            summary.note(&Batch { records: records.to_vec(), ..Batch::default() }, true);
            summary.seconds
        };
        // Those of one process are in the order in which they ended.
        assert_eq!(seconds_after(&[record(5 * S, S), record(3600 * S, S), record(10 * S, 3595 * S)]), 3595.0);
        assert_eq!(seconds_after(&[record(S, 0), record(S / 2, 2 * S), record(61 * S, 0)]), 3655.5);
        assert_eq!(seconds_after(&[record(0, 0), record(30 * S, S)]), 3685.5);
    }

    /// Those of several disks may be one after the other.
    #[test]
    fn times_of_other_formats_may_go_back() {
        const S: u64 = 1_000_000_000;
        let record = |issued_ns| TraceRecord { issued_ns, ..TraceRecord::of_bytes(TracedOp::Read, 0, 4096) };
        let records = vec![record(10 * S), record(100 * S), record(0), record(60 * S)];
        let mut summary = Summary::default();
        summary.note(&Batch { records, ..Batch::default() }, false);
        assert_eq!(summary.seconds, 100.0);
    }

    #[test]
    fn disks_are_counted_and_not_their_numbers() {
        let record = |disk| TraceRecord { disk, ..TraceRecord::of_bytes(TracedOp::Read, 0, 4096) };
        let mut summary = Summary::default();
        summary.note(&Batch { records: vec![record(1), record(1)], ..Batch::default() }, true);
        assert_eq!(summary.disks, 1);
        summary.note(&Batch { records: vec![record(7), record(1)], ..Batch::default() }, true);
        assert_eq!(summary.disks, 2);
    }
}
