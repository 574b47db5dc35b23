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
    /// Time from the first to the last request.
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

#[derive(Clone, Debug, Default)]
struct Times {
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
    /// Counts the records of a batch. `knows_cache`: whether the format tells what a cache answered.
    pub fn note(&mut self, batch: &Batch, knows_cache: bool) {
        self.lost += batch.lost;
        self.skipped += batch.skipped;
        batch.records.iter().for_each(|record| self.note_record(record));
        let times = &self.times;
        self.seconds = times.last_ns.saturating_sub(times.first_ns.unwrap_or(0)) as f64 / 1e9;
        (self.recorded_disk_ms, self.recorded_cache_ms) = (times.disk.get(), times.cache.get());
        self.recorded_cache_reads = knows_cache.then_some(times.cache.count);
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

    fn note_record(&mut self, record: &TraceRecord) {
        self.note_disk(usize::from(record.disk));
        let times = &mut self.times;
        times.first_ns = Some(times.first_ns.map_or(record.issued_ns, |first| first.min(record.issued_ns)));
        times.last_ns = times.last_ns.max(record.issued_ns);
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
