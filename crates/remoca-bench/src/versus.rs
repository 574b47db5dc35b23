//! What a change costs while nothing goes wrong: CPU time of the VM process for each hit, miss and evicted page, of this
//! build and of another one, pinned to one processor, in alternating rounds of new processes. A second process of this
//! build shows the noise: a difference inside the interval of A/A says nothing.

use crate::vm::{Folder, IMAGE_BYTES, Vm, VmOptions, memory_server, save};
use anyhow::{Result, ensure};
use clap::Args;
use rustix::thread::{sched_getaffinity, sched_setaffinity};
use serde::Serialize;
use std::path::PathBuf;

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
}

/// CPU time for one operation, with ratios to the other build.
#[derive(Serialize)]
struct Row {
    operation: &'static str,
    cpu_us: f64,
    other_cpu_us: f64,
    /// Median of the rounds' ratios.
    ratio: f64,
    /// Lower and upper quartile of the rounds' ratios.
    ratio_quartiles: [f64; 2],
    /// The same for two processes of this build.
    same_ratio: f64,
    same_quartiles: [f64; 2],
}

#[derive(Serialize)]
struct Report {
    rounds: usize,
    reads: usize,
    depth: usize,
    rows: Vec<Row>,
}

/// What is measured.
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

/// This build, the other one, and this build again.
const BUILDS: usize = 3;

pub fn run(args: &VersusArgs) -> Result<()> {
    leave_processor(args.processor)?;
    let mut rows = Vec::new();
    for operation in [Operation::Hit, Operation::Miss, Operation::Evicted] {
        rows.push(compare(args, operation)?);
    }
    println!(
        "CPU time of the VM process on one processor; {} rounds; {} reads a round, {} at a time",
        args.rounds, args.reads, args.depth
    );
    println!(
        "{:<14} {:>9} {:>9} {:>8}  {:<15} {:>8}  {:<15}",
        "", "this us", "other us", "ratio", "quartiles", "A/A", "quartiles"
    );
    for row in &rows {
        let range = |[low, high]: [f64; 2]| format!("{low:.3} to {high:.3}");
        println!(
            "{:<14} {:>9.2} {:>9.2} {:>8.3}  {:<15} {:>8.3}  {:<15}",
            row.operation,
            row.cpu_us,
            row.other_cpu_us,
            row.ratio,
            range(row.ratio_quartiles),
            row.same_ratio,
            range(row.same_quartiles)
        );
    }
    save("versus", &Report { rounds: args.rounds, reads: args.reads, depth: args.depth, rows })
}

/// Leaves the processor to the VM processes: this process and its other children run elsewhere.
fn leave_processor(processor: usize) -> Result<()> {
    let mut processors = sched_getaffinity(None)?;
    processors.unset(processor);
    ensure!(processors.count() > 0, "the machine has no second processor for the client");
    Ok(sched_setaffinity(None, &processors)?)
}

fn compare(args: &VersusArgs, operation: Operation) -> Result<Row> {
    let folder = Folder::new()?;
    let (_server, socket) = memory_server(&folder.0)?;
    let mut cpu_us = vec![Vec::new(); BUILDS];
    for round in 0..args.rounds {
        for step in 0..BUILDS {
            let build = (round + step) % BUILDS;
            let options = VmOptions {
                disk_ms: if matches!(operation, Operation::Miss) { 0 } else { 7 },
                server: (!matches!(operation, Operation::Miss)).then_some(&socket),
                inflight: true,
                program: (build == 1).then_some(&args.other),
                processor: Some(args.processor),
                port: matches!(operation, Operation::Evicted),
                // Smaller than the image: most evicted pages are admitted anew.
                cache: matches!(operation, Operation::Evicted).then_some("8M"),
                ..VmOptions::default()
            };
            // A process keeps the memory that it happened to get: that alone makes one some percent quicker than its like.
            let mut vm = Vm::start(&folder.0, &format!("vm{round}-{step}"), &options)?;
            cpu_us[build].push(measure(&mut vm, args, operation)?);
        }
    }
    let ratios = |other: usize| -> Vec<f64> { cpu_us[0].iter().zip(&cpu_us[other]).map(|(a, b)| a / b).collect() };
    let (versus, same) = (ratios(1), ratios(2));
    let quartiles = |values: &[f64]| [quantile(values, 1), quantile(values, 3)];
    Ok(Row {
        operation: operation.name(),
        cpu_us: quantile(&cpu_us[0], 2),
        other_cpu_us: quantile(&cpu_us[1], 2),
        ratio: quantile(&versus, 2),
        ratio_quartiles: quartiles(&versus),
        same_ratio: quantile(&same, 2),
        same_quartiles: quartiles(&same),
    })
}

/// Returns the CPU time that one operation took in this round, in microseconds.
fn measure(vm: &mut Vm, args: &VersusArgs, operation: Operation) -> Result<f64> {
    if matches!(operation, Operation::Evicted) {
        // What the process has not seen since it was cached last is unknown to it.
        vm.pass(32)?;
    }
    let before = vm.process.cpu_time()?;
    let count = match operation {
        Operation::Hit | Operation::Miss => vm.measure(args.depth, args.reads, |_| {})?.len(),
        Operation::Evicted => {
            vm.evict_all()?;
            usize::try_from(IMAGE_BYTES / 4096)?
        }
    };
    let spent = vm.process.cpu_time()? - before;
    Ok(spent.as_secs_f64() * 1e6 / f64::from(u32::try_from(count)?))
}

/// Returns the value below which so many quarters of the values lie.
fn quantile(values: &[f64], quarters: usize) -> f64 {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    values.get((values.len() * quarters / 4).min(values.len().saturating_sub(1))).copied().unwrap_or(0.0)
}
