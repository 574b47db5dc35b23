//! Curves of recorded traces against exact stack distances.
//!
//! A trace that has its guest's evictions is taken as it is. Of any other, blocks are evicted as they are read (a guest without an
//! agent); and once more below a guest whose memory is a part of the trace's blocks.

use super::exact::exact;
use super::shards::Shards;
use super::traces::Event;
use super::{CurveBenchArgs, Difference, curve_of, miss_ratios, sizes};
use crate::guest::PageCache;
use anyhow::{Context, Result};
use remoca_core::curve::SAMPLES_MAX;
use remoca_trace::{Batch, TraceRecord, TracedOp, open};
use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::path::Path;

/// Bits of a block's number, above which is that of its disk: as the estimator has it.
const BNO_BITS: u32 = 40;
/// Share of its size by which a point of a curve may be elsewhere (decision 0042).
const MARGIN: f64 = 0.02;

/// What a trace has recorded.
#[derive(Default)]
struct Recorded {
    records: Vec<TraceRecord>,
    sees_evictions: bool,
    lost: u64,
}

impl Recorded {
    /// Reads a trace.
    ///
    /// # Errors
    /// If the file cannot be read, or is no trace in a format that is recognized.
    fn read(path: &Path) -> Result<Self> {
        let what = || format!("cannot read the trace {}", path.display());
        let mut source = open(Box::new(File::open(path).with_context(what)?), None).with_context(what)?;
        let (mut recorded, mut batch) = (Self::default(), Batch::default());
        while source.read(&mut batch).with_context(what)? {
            recorded.records.append(&mut batch.records);
            recorded.sees_evictions |= batch.sees_evictions;
            recorded.lost += batch.lost;
        }
        Ok(recorded)
    }

    /// Returns what a cache sees: the evictions of the trace if it has them. If not, a block is evicted as it is read.
    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        self.for_each_block(|record, block| match record.op {
            TracedOp::Read if record.is_partial => events.push(Event::Missed),
            TracedOp::Read => {
                events.push(Event::Read(block));
                events.extend((!self.sees_evictions).then_some(Event::Evicted(block)));
            }
            TracedOp::Evicted => events.push(Event::Evicted(block)),
            TracedOp::Write | TracedOp::Discard | TracedOp::WriteZeroes => events.push(Event::Forgotten(block)),
            TracedOp::Flush => {}
        });
        events
    }

    /// Returns what a cache would see below a guest of `pages` pages in LRU order that reads and writes what the trace has.
    fn events_below(&self, pages: usize) -> Vec<Event> {
        let (mut memory, mut events) = (PageCache::default(), Vec::new());
        self.for_each_block(|record, block| {
            match record.op {
                TracedOp::Read if memory.touch(block) => {}
                TracedOp::Read => events.push(Event::Read(block)),
                TracedOp::Write => {
                    memory.touch(block);
                    events.push(Event::Forgotten(block));
                }
                TracedOp::Discard | TracedOp::WriteZeroes => {
                    memory.forget(block);
                    events.push(Event::Forgotten(block));
                }
                TracedOp::Evicted | TracedOp::Flush => {}
            }
            events.extend(memory.evict(pages).map(Event::Evicted));
        });
        events
    }

    /// Passes each block of each record to `note`; of discards only the blocks that are also read, written or evicted.
    fn for_each_block(&self, mut note: impl FnMut(&TraceRecord, u64)) {
        let range = |record: &TraceRecord| {
            let disk = u64::from(record.disk) << BNO_BITS;
            disk + record.block..disk + record.end()
        };
        let is_discard = |record: &TraceRecord| matches!(record.op, TracedOp::Discard | TracedOp::WriteZeroes);
        let known: BTreeSet<u64> = self.records.iter().filter(|record| !is_discard(record)).flat_map(range).collect();
        for record in &self.records {
            if is_discard(record) {
                known.range(range(record)).for_each(|block| note(record, *block));
            } else {
                range(record).for_each(|block| note(record, block));
            }
        }
    }
}

/// How far curves with some keys are from the exact one.
#[derive(Debug)]
struct Errors {
    /// Number of different blocks that were evicted.
    evicted: usize,
    /// Share of the blocks that is sampled at the end, with the first key.
    rate: f64,
    /// Mean over the keys of the mean error over the sizes, and the worst error of all.
    all: Difference,
    /// Greatest mean error of a key.
    worst_mean: f64,
    /// Worst error where each point may be elsewhere by [`MARGIN`] of its size.
    worst_beside: f64,
    /// Errors of plain SHARDS with as many samples.
    shards: Difference,
}

impl Errors {
    /// Compares curves with the keys of these seeds with the exact one.
    fn of(events: &[Event], seeds: std::ops::Range<u64>) -> Self {
        let exact = exact(events);
        let sizes = sizes(&exact);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a number of blocks")]
        let scaled = |by: f64| sizes.iter().map(|size| (*size as f64 * by).round() as u64).collect::<Vec<_>>();
        let right = exact.miss_ratios(&sizes);
        let [above, below] = [1. - MARGIN, 1. + MARGIN].map(|by| exact.miss_ratios(&scaled(by)));
        let (mut each, mut plain, mut worst_beside, mut rate) = (Vec::new(), Vec::new(), 0_f64, 1.);
        for seed in seeds.clone() {
            let curve = curve_of(events, seed);
            let ratios = miss_ratios(&curve, &sizes);
            each.push(Difference::between(&ratios, &right));
            let beside = ratios
                .iter()
                .zip(above.iter().zip(&below))
                .map(|(ratio, (above, below))| (ratio - above).max(below - ratio).max(0.));
            worst_beside = beside.fold(worst_beside, f64::max);
            let shards = Shards::estimate(events, SAMPLES_MAX, seed << BNO_BITS, &[]).miss_ratios(&sizes);
            plain.push(Difference::between(&shards, &right));
            if seed == seeds.start {
                rate = curve.rate();
            }
        }
        let evicted = |event: &Event| if let Event::Evicted(block) = event { Some(*block) } else { None };
        Self {
            evicted: events.iter().filter_map(evicted).collect::<HashSet<_>>().len(),
            rate,
            all: Difference::of_all(&each),
            worst_mean: each.iter().map(|each| each.mean).fold(0., f64::max),
            worst_beside,
            shards: Difference::of_all(&plain),
        }
    }
}

/// Prints the errors of the curves of recorded traces.
///
/// # Errors
/// If one cannot be read.
pub fn run(args: &CurveBenchArgs) -> Result<()> {
    println!("Error of the miss ratio with {} keys; \"beside\" lets a size be off by {} %", args.seeds, MARGIN * 100.);
    println!(
        "{:40}{:>9}{:>9}{:>8}{:>9}{:>10}{:>8}{:>8}{:>16}",
        "trace", "reads", "evicted", "rate", "mean", "mean, max", "worst", "beside", "SHARDS"
    );
    for path in &args.trace {
        let recorded = Recorded::read(path)?;
        let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy();
        let print = |what: &str, events: &[Event]| {
            let errors = Errors::of(events, args.seed..args.seed + args.seeds);
            let reads = events.iter().filter(|event| matches!(event, Event::Read(_) | Event::Missed)).count();
            let Errors { evicted, rate, all, worst_mean, worst_beside, shards } = errors;
            println!(
                "{:40}{reads:>9}{evicted:>9}{rate:>8.4}{:>9.4}{worst_mean:>10.4}{:>8.3}{worst_beside:>8.3}{:>9.4}{:>7.3}",
                format!("{name}, {what}"),
                all.mean,
                all.worst,
                shards.mean,
                shards.worst
            );
            evicted
        };
        if recorded.lost > 0 {
            println!("{name}: {} records were lost", recorded.lost);
        }
        let blocks = print(if recorded.sees_evictions { "as recorded" } else { "as read" }, &recorded.events());
        if !recorded.sees_evictions {
            let pages = (blocks / usize::try_from(args.guest)?).max(1);
            print(&format!("below {pages} pages"), &recorded.events_below(pages));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
