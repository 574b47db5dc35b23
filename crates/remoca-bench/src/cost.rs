//! Measures what resilience costs while there are no faults: reads that hit, with only in-flight tracking, only the
//! kept index or only hedging switched on, compared with none of them. Each round runs all of them and begins with
//! another one. The figures are medians of the rounds' ratios.

use crate::vm::{Folder, Vm, VmOptions, memory_server, save};
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::time::Instant;

#[derive(Args)]
pub struct CostArgs {
    /// Rounds of each kind
    #[arg(long, default_value_t = 40)]
    rounds: usize,
    /// Reads in each round
    #[arg(long, default_value_t = 50_000)]
    reads: usize,
    #[arg(long, default_value_t = 8)]
    depth: usize,
    /// How long the disk takes; 0: a raw file in the page cache, as fast as the memory server
    #[arg(long, default_value_t = 7)]
    disk_ms: u32,
}

#[derive(Serialize)]
struct Row {
    with: &'static str,
    reads_per_s: f64,
    cpu_us_per_read: f64,
    /// Loss of throughput compared with none of them: 0.01 is 1 % fewer reads per second.
    reads_lost: f64,
    cpu_added: f64,
    hedges: u64,
}

#[derive(Serialize)]
struct Report {
    rounds: usize,
    reads: usize,
    depth: usize,
    disk_ms: u32,
    rows: Vec<Row>,
    sum_reads_lost: f64,
    sum_cpu_added: f64,
}

const KINDS: [&str; 4] = ["none", "in-flight tracking", "kept index", "hedging"];

/// Samples of one kind, by round.
#[derive(Clone, Default)]
struct Figures {
    seconds: Vec<f64>,
    cpu_seconds: Vec<f64>,
}

pub fn run(args: &CostArgs) -> Result<()> {
    let folder = Folder::new()?;
    let server = memory_server(&folder.0, &[])?;
    let mut vms = Vec::new();
    for (number, kind) in KINDS.into_iter().enumerate() {
        let mut arguments = Vec::new();
        if kind != "hedging" {
            arguments.push("--no-hedge".to_owned());
        }
        if kind == "kept index" {
            arguments.extend(["--state".to_owned(), folder.0.join("kept.state").display().to_string()]);
        }
        let inflight = kind == "in-flight tracking";
        let options = VmOptions {
            disk_ms: args.disk_ms,
            server: Some(&server.endpoint),
            inflight,
            arguments: &arguments,
            ..Default::default()
        };
        vms.push(Vm::start(&folder.0, &format!("vm{number}"), &options)?);
    }
    let mut figures = vec![Figures::default(); KINDS.len()];
    let hedges_before = vms.iter().map(|vm| vm.counter("hedges")).collect::<Result<Vec<_>>>()?;
    for round in 0..args.rounds {
        for step in 0..KINDS.len() {
            let kind = (round + step) % KINDS.len();
            let (cpu, began) = (vms[kind].process.cpu_time()?, Instant::now());
            vms[kind].measure(args.depth, args.reads, |_| {})?;
            figures[kind].seconds.push(began.elapsed().as_secs_f64());
            figures[kind].cpu_seconds.push((vms[kind].process.cpu_time()? - cpu).as_secs_f64());
        }
    }
    let reads = f64::from(u32::try_from(args.reads)?);
    let mut rows = Vec::new();
    for (kind, with) in KINDS.into_iter().enumerate() {
        let (of, none) = (&figures[kind], &figures[0]);
        rows.push(Row {
            with,
            reads_per_s: reads / median(of.seconds.iter().copied()),
            cpu_us_per_read: median(of.cpu_seconds.iter().copied()) * 1e6 / reads,
            reads_lost: 1.0 - median(none.seconds.iter().zip(&of.seconds).map(|(none, of)| none / of)),
            cpu_added: median(of.cpu_seconds.iter().zip(&none.cpu_seconds).map(|(of, none)| of / none)) - 1.0,
            hedges: vms[kind].counter("hedges")? - hedges_before[kind],
        });
    }
    let sum = |value: fn(&Row) -> f64| rows.iter().map(value).sum::<f64>();
    let (sum_reads_lost, sum_cpu_added) = (sum(|row| row.reads_lost), sum(|row| row.cpu_added));
    println!(
        "4 KiB reads that hit, {} at a time, {} a round, {} rounds, a disk of {} ms",
        args.depth, args.reads, args.rounds, args.disk_ms
    );
    println!(
        "{:<20} {:>10} {:>12} {:>12} {:>11} {:>8}",
        "with", "reads/s", "CPU us/read", "reads lost", "CPU added", "hedges"
    );
    for r in &rows {
        let (lost, added) = (r.reads_lost * 100.0, r.cpu_added * 100.0);
        println!(
            "{:<20} {:>10.0} {:>12.2} {lost:>10.1} % {added:>9.1} % {:>8}",
            r.with, r.reads_per_s, r.cpu_us_per_read, r.hedges
        );
    }
    println!("{:<20} {:>36.1} % {:>9.1} %", "sum", sum_reads_lost * 100.0, sum_cpu_added * 100.0);
    let CostArgs { rounds, reads, depth, disk_ms } = *args;
    save("cost", &Report { rounds, reads, depth, disk_ms, rows, sum_reads_lost, sum_cpu_added })
}

pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
