//! Figures from the trace of the VM process.
//!
//! Pure: records and windows go in, figures come out. A *read* is a read request of the guest as the VM process
//! received it. It is *from the cache* if no part of it needed the disk. Its latency is the time from its arrival to
//! its completion there.

use remoca_protocol::trace::{TraceRecord, TracedOp, TracedSource};
use serde::{Deserialize, Serialize};

use crate::lru::ExactLru;

pub const BLOCK_BYTES: u64 = 4096;
/// Resolution of the histograms: latencies of one bin differ by at most 12 %.
const BINS_PER_DECADE: f64 = 20.0;
const NS_PER_MS: f64 = 1e6;

/// Span of time, in nanoseconds since the start of the VM process. It includes the requests that arrived in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub from_ns: u64,
    pub to_ns: u64,
}

impl Window {
    pub fn holds(&self, time_ns: u64) -> bool {
        (self.from_ns..self.to_ns).contains(&time_ns)
    }

    pub fn seconds(&self) -> f64 {
        self.to_ns.saturating_sub(self.from_ns) as f64 / 1e9
    }
}

/// Figures of the reads of one window.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ReadFigures {
    pub reads: u64,
    pub mean_read_ms: f64,
    pub p50_ms: f64,
    pub p90_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
    pub reads_from_cache: u64,
    pub reads_from_disk: u64,
    /// Mean latency of the reads; 0 without reads.
    pub mean_cache_read_ms: f64,
    pub mean_disk_read_ms: f64,
    /// Number of 4 KiB blocks that were read, and how many of them were in reads from the cache.
    pub blocks: u64,
    pub blocks_from_cache: u64,
    /// Share of the reads that the cache answered.
    pub hit_ratio: f64,
    /// The same share, by blocks.
    pub block_hit_ratio: f64,
    /// For each bin that is not empty: upper end in ms, reads from the cache, reads from the disk.
    pub histogram: Vec<(f64, u64, u64)>,
}

/// What an exact LRU would have achieved with the reads of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LruFigures {
    /// Number of pages that it holds.
    pub pages: u64,
    /// Share of the reads of which it held all blocks.
    pub hit_ratio: f64,
    /// Share of the blocks read that it held.
    pub block_hit_ratio: f64,
}

/// Figures of the reads of a short span, for curves over time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bin {
    /// Middle of the bin, in seconds since the start of the curve.
    pub at_s: f64,
    pub reads: u64,
    /// `None` if there were no reads.
    pub hit_ratio: Option<f64>,
    pub mean_read_ms: Option<f64>,
}

fn is_read_in(record: &TraceRecord, window: Window) -> bool {
    record.op == TracedOp::Read && window.holds(record.issued_ns)
}

fn blocks(record: &TraceRecord) -> std::ops::Range<u64> {
    record.block..record.end()
}

/// Returns `part` divided by `all`, or 0 if `all` is 0.
pub fn ratio(part: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 }
}

fn mean_ms(sum_ns: u64, count: u64) -> f64 {
    ratio(sum_ns, count) / NS_PER_MS
}

/// Returns the figures of the reads of a window.
pub fn reads_in(records: &[TraceRecord], window: Window) -> ReadFigures {
    let mut latencies = Vec::new();
    let (mut cache_ns, mut disk_ns, mut figures) = (0, 0, ReadFigures::default());
    for record in records.iter().filter(|record| is_read_in(record, window)) {
        let block_count = blocks(record).count() as u64;
        figures.blocks += block_count;
        latencies.push((record.latency_ns, record.source));
        match record.source {
            TracedSource::Cache => {
                figures.reads_from_cache += 1;
                figures.blocks_from_cache += block_count;
                cache_ns += record.latency_ns;
            }
            TracedSource::Disk => {
                figures.reads_from_disk += 1;
                disk_ns += record.latency_ns;
            }
        }
    }
    latencies.sort_unstable_by_key(|&(latency_ns, _)| latency_ns);
    let quantile = |of_1000: usize| {
        let rank = (latencies.len() * of_1000).div_ceil(1000).saturating_sub(1);
        latencies.get(rank).map_or(0.0, |&(ns, _)| ns as f64 / NS_PER_MS)
    };
    figures.reads = latencies.len() as u64;
    figures.mean_read_ms = mean_ms(cache_ns + disk_ns, figures.reads);
    figures.mean_cache_read_ms = mean_ms(cache_ns, figures.reads_from_cache);
    figures.mean_disk_read_ms = mean_ms(disk_ns, figures.reads_from_disk);
    (figures.p50_ms, figures.p90_ms, figures.p99_ms) = (quantile(500), quantile(900), quantile(990));
    figures.max_ms = quantile(1000);
    figures.hit_ratio = ratio(figures.reads_from_cache, figures.reads);
    figures.block_hit_ratio = ratio(figures.blocks_from_cache, figures.blocks);
    figures.histogram = histogram(&latencies);
    figures
}

/// Returns a histogram of `latencies`, which are in ascending order.
fn histogram(latencies: &[(u64, TracedSource)]) -> Vec<(f64, u64, u64)> {
    let mut bins: Vec<(f64, u64, u64)> = Vec::new();
    for &(latency_ns, source) in latencies {
        let exponent = (latency_ns.max(1) as f64 / NS_PER_MS).log10() * BINS_PER_DECADE;
        let upper_ms = 10f64.powf((exponent.floor() + 1.0) / BINS_PER_DECADE);
        if bins.last().is_none_or(|bin| bin.0 < upper_ms) {
            bins.push((upper_ms, 0, 0));
        }
        if let Some(bin) = bins.last_mut() {
            match source {
                TracedSource::Cache => bin.1 += 1,
                TracedSource::Disk => bin.2 += 1,
            }
        }
    }
    bins
}

/// Returns what an exact LRU of `pages` pages would have answered in the window. It sees every block that was read or
/// written since the first request.
pub fn exact_lru(records: &[TraceRecord], window: Window, pages: u64) -> LruFigures {
    let mut order: Vec<&TraceRecord> = records.iter().collect();
    // The trace is in order of completion, but a cache sees requests in order of arrival.
    order.sort_by_key(|record| record.issued_ns);
    let mut lru = ExactLru::new(usize::try_from(pages).unwrap_or(usize::MAX));
    let (mut reads, mut hits, mut block_count, mut block_hits) = (0, 0, 0, 0);
    for record in order {
        if !matches!(record.op, TracedOp::Read | TracedOp::Write) || record.issued_ns >= window.to_ns {
            continue;
        }
        if is_read_in(record, window) {
            let (all, held) = blocks(record)
                .fold((0, 0), |(all, held), block| (all + 1, held + u64::from(lru.holds(key(record, block)))));
            reads += 1;
            hits += u64::from(held == all);
            block_count += all;
            block_hits += held;
        }
        for block in blocks(record) {
            lru.touch(key(record, block));
        }
    }
    LruFigures { pages, hit_ratio: ratio(hits, reads), block_hit_ratio: ratio(block_hits, block_count) }
}

fn key(record: &TraceRecord, block: u64) -> u64 {
    u64::from(record.disk) << 48 | block
}

/// Returns the reads of a window in bins of `bin_ns`.
pub fn timeline(records: &[TraceRecord], window: Window, bin_ns: u64) -> Vec<Bin> {
    let bin_count = (window.to_ns - window.from_ns).div_ceil(bin_ns);
    let mut sums = vec![(0, 0, 0); usize::try_from(bin_count).unwrap_or_default()];
    for record in records.iter().filter(|record| is_read_in(record, window)) {
        let index = usize::try_from((record.issued_ns - window.from_ns) / bin_ns).unwrap_or(usize::MAX);
        if let Some((reads, hits, latency_ns)) = sums.get_mut(index) {
            *reads += 1;
            *hits += u64::from(record.source == TracedSource::Cache);
            *latency_ns += record.latency_ns;
        }
    }
    let bin = |(index, (reads, hits, latency_ns))| Bin {
        at_s: (f64::from(index) + 0.5) * bin_ns as f64 / 1e9,
        reads,
        hit_ratio: (reads > 0).then(|| ratio(hits, reads)),
        mean_read_ms: (reads > 0).then(|| mean_ms(latency_ns, reads)),
    };
    (0u32..).zip(sums).map(bin).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Window = Window { from_ns: 0, to_ns: u64::MAX };

    fn read(issued_ns: u64, block: u64, count: u64, latency_ns: u64, source: TracedSource) -> TraceRecord {
        let (offset, length) = (block * BLOCK_BYTES, count * BLOCK_BYTES);
        TraceRecord { issued_ns, latency_ns, source, ..TraceRecord::of_bytes(TracedOp::Read, offset, length) }
    }

    #[test]
    fn reads_of_a_window() {
        let mut records = vec![
            read(5, 0, 1, 9_000_000, TracedSource::Disk),
            read(10, 0, 3, 1_000_000, TracedSource::Cache),
            read(11, 8, 1, 7_000_000, TracedSource::Disk),
            read(20, 0, 1, 9_000_000, TracedSource::Disk),
        ];
        records.push(TraceRecord { op: TracedOp::Write, ..records[1] });
        let figures = reads_in(&records, Window { from_ns: 10, to_ns: 20 });
        assert_eq!((figures.reads, figures.reads_from_cache, figures.reads_from_disk), (2, 1, 1));
        assert_eq!((figures.blocks, figures.blocks_from_cache), (4, 3));
        assert_eq!((figures.hit_ratio, figures.block_hit_ratio), (0.5, 0.75));
        assert_eq!((figures.mean_read_ms, figures.mean_cache_read_ms, figures.mean_disk_read_ms), (4.0, 1.0, 7.0));
        assert_eq!((figures.p50_ms, figures.p99_ms, figures.max_ms), (1.0, 7.0, 7.0));
        let counts: Vec<_> = figures.histogram.iter().map(|&(_, cache, disk)| (cache, disk)).collect();
        assert_eq!(counts, [(1, 0), (0, 1)]);
        assert!(figures.histogram[0].0 >= 1.0 && figures.histogram[0].0 < 1.2, "{:?}", figures.histogram);
        assert_eq!(reads_in(&records, Window { from_ns: 30, to_ns: 40 }).mean_read_ms, 0.0);
    }

    #[test]
    fn lru_counts_reads_whose_blocks_are_all_held_and_is_warmed_by_what_came_before() {
        let disk = TracedSource::Disk;
        let records = [
            // In the order of completion, not of arrival.
            read(2, 1, 1, 9, disk),
            read(1, 0, 1, 9, disk),
            read(10, 0, 2, 9, disk), // both held
            read(11, 1, 2, 9, disk), // block 2 is new, block 0 goes
            read(12, 0, 1, 9, disk), // gone
        ];
        let window = Window { from_ns: 10, to_ns: 100 };
        let figures = exact_lru(&records, window, 2);
        assert_eq!(figures, LruFigures { pages: 2, hit_ratio: 1.0 / 3.0, block_hit_ratio: 3.0 / 5.0 });
        // With room for everything, only blocks that were never read before miss.
        assert_eq!(exact_lru(&records, window, 100).hit_ratio, 2.0 / 3.0);
        assert_eq!(exact_lru(&records, ALL, 100).block_hit_ratio, 4.0 / 7.0);
    }

    #[test]
    fn timeline_has_a_bin_for_each_span_even_an_empty_one() {
        let records = [read(0, 0, 1, 2_000_000, TracedSource::Disk), read(25, 0, 1, 4_000_000, TracedSource::Cache)];
        let bins = timeline(&records, Window { from_ns: 0, to_ns: 30 }, 10);
        let ratios: Vec<_> = bins.iter().map(|bin| bin.hit_ratio).collect();
        assert_eq!(ratios, [Some(0.0), None, Some(1.0)]);
        assert_eq!(bins[2].mean_read_ms, Some(4.0));
    }
}
