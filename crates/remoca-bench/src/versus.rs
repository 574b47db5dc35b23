//! Measures what a change costs while there are no faults: CPU time of the VM process per hit, miss and evicted page.
//! This build and another one are pinned to one processor, in alternating rounds of new processes. A second process of
//! this build shows the noise: a difference within the interval of A/A is not significant.
//!
//! Where the noise exceeds the difference, callgrind counts the program's instructions instead, without the kernel's.
//! Start and end of a process cancel out in the difference of two runs of different length. In that mode, an evicted
//! page is also read once.

use crate::vm::{Folder, IMAGE_BYTES, Vm, VmOptions, memory_server, save};
use anyhow::{Context, Result, ensure};
use clap::Args;
use rustix::thread::{sched_getaffinity, sched_setaffinity};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Args)]
pub struct VersusArgs {
    /// The program `remoca` of the other build
    #[arg(long, value_name = "PATH")]
    other: PathBuf,
    /// Rounds of each kind
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Reads in each round of hits and misses
    #[arg(long, default_value_t = 50_000)]
    reads: usize,
    /// Reads in flight
    #[arg(long, default_value_t = 8)]
    depth: usize,
    /// Processor for the VM processes; client and memory server have the others
    #[arg(long, default_value_t = 1)]
    processor: usize,
    /// Count instructions under callgrind instead of CPU time; needs valgrind 3.21 or newer
    #[arg(long)]
    instructions: bool,
}

/// Cost of one operation, in microseconds of CPU time or in instructions, with ratios to the other build.
#[derive(Serialize)]
struct Row {
    operation: &'static str,
    cost: f64,
    other_cost: f64,
    /// Median of the rounds' ratios.
    ratio: f64,
    /// Lower and upper quartile of the rounds' ratios.
    ratio_quartiles: [f64; 2],
    /// The same ratios for two processes of this build.
    same_ratio: f64,
    same_quartiles: [f64; 2],
}

#[derive(Serialize)]
struct Report {
    /// Unit of the costs.
    unit: &'static str,
    rounds: usize,
    reads: usize,
    depth: usize,
    rows: Vec<Row>,
}

/// Kind of operation that is measured.
#[derive(Clone, Copy)]
enum Operation {
    Hit,
    Miss,
    Evicted,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Miss => "miss",
            Self::Evicted => "evicted page",
        }
    }
}

/// Number of processes compared: this build, the other one, and this build again.
const BUILDS: usize = 3;

pub fn run(args: &VersusArgs) -> Result<()> {
    leave_processor(args.processor)?;
    let mut rows = Vec::new();
    for operation in [Operation::Hit, Operation::Miss, Operation::Evicted] {
        rows.push(compare(args, operation)?);
    }
    let (what, unit) =
        if args.instructions { ("Instructions", "instructions") } else { ("CPU time in us", "us of CPU time") };
    println!(
        "{what} of the VM process on one processor; {} rounds; {} reads a round, {} at a time",
        args.rounds, args.reads, args.depth
    );
    println!(
        "{:<14} {:>9} {:>9} {:>8}  {:<15} {:>8}  {:<15}",
        "", "this", "other", "ratio", "quartiles", "A/A", "quartiles"
    );
    for row in &rows {
        let range = |[low, high]: [f64; 2]| format!("{low:.3} to {high:.3}");
        println!(
            "{:<14} {:>9.2} {:>9.2} {:>8.3}  {:<15} {:>8.3}  {:<15}",
            row.operation,
            row.cost,
            row.other_cost,
            row.ratio,
            range(row.ratio_quartiles),
            row.same_ratio,
            range(row.same_quartiles)
        );
    }
    save("versus", &Report { unit, rounds: args.rounds, reads: args.reads, depth: args.depth, rows })
}

/// Moves this process and its other children to the other processors.
fn leave_processor(processor: usize) -> Result<()> {
    let mut processors = sched_getaffinity(None)?;
    processors.unset(processor);
    ensure!(processors.count() > 0, "there is no second processor for the client: run on a machine with at least two");
    Ok(sched_setaffinity(None, &processors)?)
}

fn compare(args: &VersusArgs, operation: Operation) -> Result<Row> {
    let folder = Folder::new()?;
    let server = memory_server(&folder.0, &[])?;
    let mut costs = vec![Vec::new(); BUILDS];
    for round in 0..args.rounds {
        for step in 0..BUILDS {
            let build = (round + step) % BUILDS;
            let counts = folder.0.join(format!("callgrind{round}-{step}"));
            let options = VmOptions {
                disk_ms: if matches!(operation, Operation::Miss) { 0 } else { 7 },
                server: (!matches!(operation, Operation::Miss)).then_some(&*server.endpoint),
                inflight: true,
                program: (build == 1).then_some(&args.other),
                processor: Some(args.processor),
                port: matches!(operation, Operation::Evicted),
                // Smaller than the image, so that most evicted pages are admitted again.
                cache: matches!(operation, Operation::Evicted).then_some("8M"),
                callgrind: args.instructions.then_some(&counts),
                ..VmOptions::default()
            };
            // The memory layout that a process happens to get makes it some percent faster or slower for its whole life.
            let name = |run| format!("vm{round}-{step}-{run}");
            let mut vm = Vm::start(&folder.0, &name(1), &options)?;
            let once = work(&mut vm, args, operation)?;
            if !args.instructions {
                costs[build].push(once.spent.as_secs_f64() * 1e6 / once.operations);
                // One that is killed would keep its pool for a while, and the next ones find no memory.
                vm.end()?;
                continue;
            }
            vm.end()?;
            let first = total(&counts)?;
            let mut vm = Vm::start(&folder.0, &name(2), &options)?;
            work(&mut vm, args, operation)?;
            let again = work(&mut vm, args, operation)?;
            vm.end()?;
            costs[build].push((total(&counts)? - first) / again.operations);
        }
    }
    let ratios = |other: usize| -> Vec<f64> { costs[0].iter().zip(&costs[other]).map(|(a, b)| a / b).collect() };
    let (versus, same) = (ratios(1), ratios(2));
    let quartiles = |values: &[f64]| [quantile(values, 1), quantile(values, 3)];
    Ok(Row {
        operation: operation.name(),
        cost: quantile(&costs[0], 2),
        other_cost: quantile(&costs[1], 2),
        ratio: quantile(&versus, 2),
        ratio_quartiles: quartiles(&versus),
        same_ratio: quantile(&same, 2),
        same_quartiles: quartiles(&same),
    })
}

/// Result of one measurement.
struct Work {
    /// CPU time.
    spent: Duration,
    operations: f64,
}

/// Reads the pages that are evicted next, because the process knows only content that it has seen since it last cached it.
fn prepare(vm: &mut Vm, operation: Operation) -> Result<()> {
    if matches!(operation, Operation::Evicted) { vm.pass(32) } else { Ok(()) }
}

fn work(vm: &mut Vm, args: &VersusArgs, operation: Operation) -> Result<Work> {
    if !args.instructions {
        prepare(vm, operation)?;
    }
    let before = vm.process.cpu_time()?;
    let pages = usize::try_from(IMAGE_BYTES / 4096)?;
    let count = match operation {
        Operation::Hit | Operation::Miss => vm.measure(args.depth, args.reads, |_| {})?.len(),
        Operation::Evicted if !args.instructions => {
            vm.evict_all()?;
            pages
        }
        Operation::Evicted => {
            let times = args.reads.div_ceil(pages);
            for _ in 0..times {
                vm.evict_all()?;
                prepare(vm, operation)?;
            }
            times * pages
        }
    };
    Ok(Work { spent: vm.process.cpu_time()? - before, operations: f64::from(u32::try_from(count)?) })
}

/// Returns the total number of instructions in one of callgrind's files.
fn total(counts: &Path) -> Result<f64> {
    let text =
        std::fs::read_to_string(counts).with_context(|| format!("callgrind did not write {}", counts.display()))?;
    let total = text.lines().find_map(|line| line.strip_prefix("totals: ")).context("callgrind counted nothing")?;
    Ok(total.trim().parse()?)
}

/// Returns the value below which the given number of quarters of the values lie, or 0 if there are no values.
fn quantile(values: &[f64], quarters: usize) -> f64 {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    values.get((values.len() * quarters / 4).min(values.len().saturating_sub(1))).copied().unwrap_or(0.0)
}
