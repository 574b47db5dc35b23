//! What a guest sees of a memory server that is late with one page in a hundred, and of one that stops: the disk alone,
//! the cache with hedging off, and with hedging on, in alternating rounds. Decision 0022.

use crate::vm::proxy::Proxy;
use crate::vm::{Folder, Vm, VmOptions, memory_server, save};
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[derive(Args)]
pub struct HedgingArgs {
    /// Rounds of each kind
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Reads of the cache in each round, at one read at a time; four times as many at depth 8
    #[arg(long, default_value_t = 20_000)]
    reads: usize,
    /// How long the disk takes
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    disk_ms: u32,
    /// How long a late page takes: 100 times what the others do
    #[arg(long, default_value_t = 20_000)]
    late_us: u64,
    /// How long the server stops
    #[arg(long, default_value_t = 3)]
    stop_s: u64,
}

#[derive(Serialize)]
struct Row {
    trouble: &'static str,
    depth: usize,
    way: &'static str,
    reads: usize,
    p50_us: u64,
    p99_us: u64,
    p999_us: u64,
    max_us: u64,
    p999_to_disk_alone: f64,
}

#[derive(Serialize)]
struct Report {
    disk_ms: u32,
    late_us: u64,
    stop_s: u64,
    rounds: usize,
    rows: Vec<Row>,
}

const WAYS: [&str; 3] = ["disk alone", "hedging off", "hedging on"];
const LATE: &str = "1 % late";
const STOP: &str = "stops";

struct Setup {
    vm: Vm,
    proxy: Option<Proxy>,
}

pub fn run(args: &HedgingArgs) -> Result<()> {
    let folder = Folder::new()?;
    let (_server, socket) = memory_server(&folder.0)?;
    let mut setups = Vec::new();
    for (number, way) in WAYS.into_iter().enumerate() {
        let name = format!("vm{number}");
        let proxy = (number > 0).then(|| Proxy::start(&folder.0, &name, &socket)).transpose()?;
        let arguments = if way == "hedging off" { vec!["--no-hedge".to_owned()] } else { Vec::new() };
        let server = proxy.as_ref().map(|proxy| proxy.socket.as_path());
        let options =
            VmOptions { disk_ms: args.disk_ms, server, inflight: true, arguments: &arguments, ..Default::default() };
        setups.push(Setup { vm: Vm::start(&folder.0, &name, &options)?, proxy });
    }
    let mut rows: Vec<Row> = Vec::new();
    for trouble in [LATE, STOP] {
        for depth in [1, 8] {
            let mut latencies = [const { Vec::new() }; 3];
            for _ in 0..args.rounds {
                for (setup, latencies) in setups.iter_mut().zip(&mut latencies) {
                    latencies.extend(round(args, setup, trouble, depth)?);
                }
            }
            let alone = quantile(&mut latencies[0], 999, 1000);
            for (way, latencies) in WAYS.into_iter().zip(&mut latencies) {
                rows.push(row(trouble, depth, way, latencies, alone));
            }
        }
    }
    println!(
        "a disk of {} ms; late pages take {} us; the server stops for {} s",
        args.disk_ms, args.late_us, args.stop_s
    );
    println!(
        "{:<9} {:>5}  {:<12} {:>7} {:>8} {:>8} {:>8} {:>9}  p99.9 to disk alone",
        "server", "depth", "", "reads", "p50 us", "p99", "p99.9", "longest"
    );
    for r in &rows {
        println!(
            "{:<9} {:>5}  {:<12} {:>7} {:>8} {:>8} {:>8} {:>9}  {:.3}",
            r.trouble, r.depth, r.way, r.reads, r.p50_us, r.p99_us, r.p999_us, r.max_us, r.p999_to_disk_alone
        );
    }
    let Report { disk_ms, late_us, stop_s, rounds, .. } = Report {
        disk_ms: args.disk_ms,
        late_us: args.late_us,
        stop_s: args.stop_s,
        rounds: args.rounds,
        rows: Vec::new(),
    };
    save("hedging", &Report { disk_ms, late_us, stop_s, rounds, rows })
}

fn round(args: &HedgingArgs, setup: &mut Setup, trouble: &str, depth: usize) -> Result<Vec<u64>> {
    // The disk alone takes its time: fewer reads say as much of it.
    let share = if setup.proxy.is_some() { 1 } else { 10 };
    let count = args.reads * if depth == 1 { 1 } else { 4 } / share;
    let Some(proxy) = &setup.proxy else { return setup.vm.measure(depth, count, |_| {}) };
    proxy.trouble.late_us.store(args.late_us, Ordering::Relaxed);
    proxy.trouble.late_one_of.store(if trouble == LATE { 100 } else { 0 }, Ordering::Relaxed);
    let stop_at = if trouble == STOP { count / 10 } else { usize::MAX };
    let stop = |begun| {
        if begun == stop_at {
            proxy.stop_for(Duration::from_secs(args.stop_s));
        }
    };
    let latencies = setup.vm.measure(depth, count, stop);
    proxy.trouble.late_one_of.store(0, Ordering::Relaxed);
    latencies
}

fn row(trouble: &'static str, depth: usize, way: &'static str, latencies: &mut [u64], alone: u64) -> Row {
    let p999 = quantile(latencies, 999, 1000);
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people to read")]
    let ratio = p999 as f64 / alone as f64;
    Row {
        trouble,
        depth,
        way,
        reads: latencies.len(),
        p50_us: quantile(latencies, 1, 2) / 1000,
        p99_us: quantile(latencies, 99, 100) / 1000,
        p999_us: p999 / 1000,
        max_us: quantile(latencies, 1, 1) / 1000,
        p999_to_disk_alone: ratio,
    }
}

fn quantile(values: &mut [u64], part: usize, of: usize) -> u64 {
    values.sort_unstable();
    let rank = (values.len() * part).div_ceil(of);
    values.get(rank.max(1) - 1).copied().unwrap_or(0)
}
