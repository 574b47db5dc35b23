//! Miss-ratio curves: their error against exact stack distances, their memory, and their time for an event; and the division of
//! memory by them.

mod divide;
mod engine;
mod exact;
mod forecast;
mod recorded;
mod shards;
#[cfg(test)]
mod tests;
mod traces;

use crate::index::cpu_ns;
use anyhow::Result;
use clap::Args;
pub use exact::Stack;
use exact::{Distances, exact};
use remoca_core::curve::MissRatioCurve;
use remoca_core::units::{BlockId, BlockNumber, DiskIndex, PageCount};
use shards::Shards;
use std::collections::HashMap;
use std::path::PathBuf;
use traces::{Event, Layout, below_guest, traces};

#[derive(Args)]
pub struct CurveBenchArgs {
    /// Number of blocks of a trace
    #[arg(long, default_value_t = 100_000)]
    blocks: u64,
    /// Memory of the guest, as one part in N of the blocks
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..))]
    guest: u64,
    /// Seeds: the first, and how many
    #[arg(long, default_value_t = 1001)]
    seed: u64,
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Only the curves of the engine: their error and their cost
    #[arg(long)]
    engine: bool,
    /// Only the curves of these recorded traces, in a format that `remoca sim` recognizes: their error
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "engine")]
    trace: Vec<PathBuf>,
}

impl CurveBenchArgs {
    fn guest_pages(&self) -> usize {
        usize::try_from(self.blocks / self.guest).unwrap_or(usize::MAX)
    }
}

/// Number of sizes at which curves are compared, evenly spaced.
const SIZES: u64 = 64;
/// Number of blocks of the exact head that plain SHARDS is tried with.
const HEAD: usize = 64;
const LAYOUTS: [Layout; 3] = [Layout::Contiguous, Layout::Extents, Layout::Scattered];

fn note(curve: &mut MissRatioCurve, event: Event) {
    let block = |bno| BlockId { disk: DiskIndex(0), bno: BlockNumber(bno) };
    match event {
        Event::Read(bno) => curve.read(block(bno)),
        Event::Evicted(bno) => curve.evicted(block(bno)),
        Event::Forgotten(bno) => curve.discarded(block(bno)),
        Event::Missed => curve.missed(1),
    }
}

fn empty_curve(seed: u64) -> MissRatioCurve {
    MissRatioCurve::new(&u128::from(seed).to_le_bytes(), PageCount(u32::MAX))
}

fn curve_of(events: &[Event], seed: u64) -> MissRatioCurve {
    let mut curve = empty_curve(seed);
    events.iter().for_each(|event| note(&mut curve, *event));
    curve
}

fn miss_ratios(curve: &MissRatioCurve, sizes: &[u64]) -> Vec<f64> {
    curve.miss_ratios(sizes.iter().map(|size| PageCount(u32::try_from(*size).unwrap_or(u32::MAX)))).unwrap_or_default()
}

/// Mean and greatest difference of two curves.
#[derive(Clone, Copy, Debug, Default)]
struct Difference {
    mean: f64,
    worst: f64,
}

impl Difference {
    fn between(a: &[f64], b: &[f64]) -> Self {
        let each = || a.iter().zip(b).map(|(a, b)| (a - b).abs());
        Self { mean: each().sum::<f64>() / a.len() as f64, worst: each().fold(0., f64::max) }
    }

    /// Returns the mean of the means, and the worst of all.
    fn of_all(all: &[Self]) -> Self {
        let mean = all.iter().map(|each| each.mean).sum::<f64>() / all.len() as f64;
        Self { mean, worst: all.iter().map(|each| each.worst).fold(0., f64::max) }
    }
}

/// Returns the sizes at which a curve is judged: to a tenth above the greatest distance.
fn sizes(exact: &Distances) -> Vec<u64> {
    (1..=SIZES).map(|at| (exact.greatest() * 11 / 10).max(SIZES) * at / SIZES).collect()
}

/// Returns the blocks that are read most often.
fn most_read(events: &[Event], count: usize) -> Vec<u64> {
    let mut reads: HashMap<u64, u32> = HashMap::new();
    for event in events {
        if let Event::Read(block) = event {
            *reads.entry(*block).or_default() += 1;
        }
    }
    let mut reads: Vec<_> = reads.into_iter().collect();
    reads.sort_unstable_by_key(|(block, count)| (std::cmp::Reverse(*count), *block));
    reads.into_iter().take(count).map(|(block, _)| block).collect()
}

/// Returns the differences of our curve, and of plain SHARDS with half the samples, as many, and as many with a head.
fn differences(events: &[Event], seed: u64) -> [Difference; 4] {
    let exact = exact(events);
    let sizes = sizes(&exact);
    let right = exact.miss_ratios(&sizes);
    let head = most_read(events, HEAD);
    let shards = |samples, head| Shards::estimate(events, samples, seed << 40, head).miss_ratios(&sizes);
    let ours = miss_ratios(&curve_of(events, seed), &sizes);
    [ours, shards(2048, &[]), shards(4096, &[]), shards(4096, &head)].map(|curve| Difference::between(&curve, &right))
}

/// Runs the benchmark and prints its tables.
///
/// # Errors
/// If a recorded trace cannot be read.
pub fn run(args: &CurveBenchArgs) -> Result<()> {
    if !args.trace.is_empty() {
        return recorded::run(args);
    }
    if args.engine {
        engine::run(args);
        return Ok(());
    }
    for layout in LAYOUTS {
        println!("Error of the miss ratio at {SIZES} sizes: mean and worst. Blocks: {layout:?}");
        println!("{:24}{:>18}{:>18}{:>18}{:>18}", "trace", "curve", "SHARDS 2048", "SHARDS 4096", "and a head");
        let seeds: Vec<_> = (args.seed..args.seed + args.seeds).map(|seed| (seed, traces(args.blocks, seed))).collect();
        for i in 0..seeds[0].1.len() {
            let each = seeds
                .iter()
                .map(|(seed, traces)| differences(&below_guest(&traces[i].1, args.guest_pages(), layout), *seed));
            let each: Vec<_> = each.collect();
            print!("{:24}", seeds[0].1[i].0);
            for estimator in 0..each[0].len() {
                let all: Vec<_> = each.iter().map(|each| each[estimator]).collect();
                let Difference { mean, worst } = Difference::of_all(&all);
                print!("{mean:>11.4}{worst:>7.4}");
            }
            println!();
        }
    }
    forecast::run(args);
    times();
    divide::run();
    engine::run(args);
    Ok(())
}

/// Prints the memory of a curve, and its time for an event.
fn times() {
    println!(
        "A curve takes {} bytes. Nanoseconds of CPU time for an event, the least of 7 rounds:",
        empty_curve(1).bytes()
    );
    println!("{:>12}{:>10}{:>12}{:>10}{:>10}", "blocks", "rate", "one by one", "anywhere", "guest");
    for blocks in [2_000, 100_000, 1_000_000, 10_000_000] {
        let mut curve = empty_curve(1);
        (0..blocks).for_each(|bno| note(&mut curve, Event::Evicted(bno)));
        let mut random = crate::guest::Random(5);
        let count = 1_000_000;
        let forward: Vec<_> = (0..count).map(|at| Event::Read(at % blocks)).collect();
        let anywhere: Vec<_> = (0..count).map(|_| Event::Read(random.next() % blocks)).collect();
        let reads: Vec<_> = (0..count / 2).map(|_| random.next() % blocks).collect();
        let guest = below_guest(&reads, usize::try_from(blocks / 16).unwrap_or(usize::MAX), Layout::Contiguous);
        print!("{blocks:>12}{:>10.5}", curve.rate());
        for (events, width) in [(forward, 12), (anywhere, 10), (guest, 10)] {
            let round = || {
                let mut curve = curve.clone();
                let start = cpu_ns();
                events.iter().for_each(|event| note(&mut curve, *event));
                (cpu_ns() - start) as f64 / events.len() as f64
            };
            print!("{:>width$.1}", (0..7).map(|_| round()).fold(f64::INFINITY, f64::min));
        }
        println!();
    }
}
