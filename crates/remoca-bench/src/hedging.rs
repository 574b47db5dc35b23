//! Measures how a slow memory server affects a guest: a server that is late with one page in a hundred, one that
//! stops, and one that becomes slower and then faster again with every read. Rounds alternate between the disk only,
//! the cache with hedging off, and the cache with hedging on. Decision 0022.

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
    /// Cache reads in each round at depth 1; four times as many at depth 8
    #[arg(long, default_value_t = 20_000)]
    reads: usize,
    /// How long the disk takes
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    disk_ms: u32,
    /// How long a late page takes: 100 times as long as the others
    #[arg(long, default_value_t = 20_000)]
    late_us: u64,
    /// How long the server stops
    #[arg(long, default_value_t = 3)]
    stop_s: u64,
}

/// Medians of the rounds.
#[derive(Serialize)]
struct Row {
    server: &'static str,
    depth: usize,
    way: &'static str,
    /// Number of reads in each round.
    reads: usize,
    mean_us: u64,
    p50_us: u64,
    p99_us: u64,
    p999_us: u64,
    max_us: u64,
    mean_to_disk_alone: f64,
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

/// Fault of the memory server.
#[derive(Clone, Copy)]
enum Trouble {
    Late,
    Stops,
    /// Its latency grows with each read, from its normal value to three times the disk's at the end of the round.
    Slower,
    /// Its latency grows in this way up to the middle of the round, and shrinks again.
    SlowerAndBack,
}

impl Trouble {
    const ALL: [Self; 4] = [Self::Late, Self::Stops, Self::Slower, Self::SlowerAndBack];

    fn name(self) -> &'static str {
        match self {
            Self::Late => "1 % late",
            Self::Stops => "stops",
            Self::Slower => "slower",
            Self::SlowerAndBack => "and back",
        }
    }

    fn is_ramp(self) -> bool {
        matches!(self, Self::Slower | Self::SlowerAndBack)
    }
}

struct Setup {
    vm: Vm,
    proxy: Option<Proxy>,
}

pub fn run(args: &HedgingArgs) -> Result<()> {
    let folder = Folder::new()?;
    let server = memory_server(&folder.0, &[])?;
    let mut setups = Vec::new();
    for (number, way) in WAYS.into_iter().enumerate() {
        let name = format!("vm{number}");
        let proxy = (number > 0).then(|| Proxy::start(&folder.0, &name, &server.socket)).transpose()?;
        let arguments = if way == "hedging off" { vec!["--no-hedge".to_owned()] } else { Vec::new() };
        let endpoint = proxy.as_ref().map(|proxy| format!("unix:{}", proxy.socket.display()));
        let server = endpoint.as_deref();
        let options =
            VmOptions { disk_ms: args.disk_ms, server, inflight: true, arguments: &arguments, ..Default::default() };
        setups.push(Setup { vm: Vm::start(&folder.0, &name, &options)?, proxy });
    }
    let mut rows: Vec<Row> = Vec::new();
    for trouble in Trouble::ALL {
        for depth in [1, 8] {
            let mut rounds = [const { Vec::new() }; 3];
            for _ in 0..args.rounds {
                for (setup, rounds) in setups.iter_mut().zip(&mut rounds) {
                    rounds.push(round(args, setup, trouble, depth)?);
                }
            }
            let alone = row(trouble, depth, WAYS[0], &mut rounds[0]);
            let (mean, p999) = (alone.mean_us, alone.p999_us);
            rows.push(alone);
            for (way, rounds) in WAYS.into_iter().zip(&mut rounds).skip(1) {
                let row = row(trouble, depth, way, rounds);
                rows.push(Row {
                    mean_to_disk_alone: ratio(row.mean_us, mean),
                    p999_to_disk_alone: ratio(row.p999_us, p999),
                    ..row
                });
            }
        }
    }
    show(args, &rows);
    let HedgingArgs { disk_ms, late_us, stop_s, rounds, .. } = *args;
    save("hedging", &Report { disk_ms, late_us, stop_s, rounds, rows })
}

fn show(args: &HedgingArgs, rows: &[Row]) {
    println!(
        "a disk of {} ms; late pages take {} us; the server stops for {} s; slower: up to three times the disk; medians of {} rounds",
        args.disk_ms, args.late_us, args.stop_s, args.rounds
    );
    println!(
        "{:<9} {:>5}  {:<12} {:>7} {:>8} {:>8} {:>8} {:>8} {:>9}  mean, p99.9 to disk alone",
        "server", "depth", "", "reads", "mean us", "p50", "p99", "p99.9", "longest"
    );
    for r in rows {
        println!(
            "{:<9} {:>5}  {:<12} {:>7} {:>8} {:>8} {:>8} {:>8} {:>9}  {:.3} {:.3}",
            r.server,
            r.depth,
            r.way,
            r.reads,
            r.mean_us,
            r.p50_us,
            r.p99_us,
            r.p999_us,
            r.max_us,
            r.mean_to_disk_alone,
            r.p999_to_disk_alone
        );
    }
}

fn round(args: &HedgingArgs, setup: &mut Setup, trouble: Trouble, depth: usize) -> Result<Vec<u64>> {
    // Where the disk answers most reads, fewer reads are enough.
    let share = match (setup.proxy.is_some(), trouble.is_ramp()) {
        (false, _) => 10,
        (true, true) => 4,
        (true, false) => 1,
    };
    let count = args.reads * if depth == 1 { 1 } else { 4 } / share;
    let Some(proxy) = &setup.proxy else { return setup.vm.measure(depth, count, |_| {}) };
    let steepest_us = 3000 * u64::from(args.disk_ms);
    let late_us = |begun: u64| match trouble {
        Trouble::Late | Trouble::Stops => args.late_us,
        Trouble::Slower => steepest_us * begun / count as u64,
        Trouble::SlowerAndBack => 2 * steepest_us * begun.min((count as u64).saturating_sub(begun)) / count as u64,
    };
    let one_of = match trouble {
        Trouble::Late => 100,
        Trouble::Stops => 0,
        Trouble::Slower | Trouble::SlowerAndBack => 1,
    };
    proxy.trouble.late_us.store(late_us(0), Ordering::Relaxed);
    proxy.trouble.late_one_of.store(one_of, Ordering::Relaxed);
    let latencies = setup.vm.measure(depth, count, |begun| {
        proxy.trouble.late_us.store(late_us(begun as u64), Ordering::Relaxed);
        if matches!(trouble, Trouble::Stops) && begun == count / 10 {
            proxy.stop_for(Duration::from_secs(args.stop_s));
        }
    });
    proxy.trouble.late_one_of.store(0, Ordering::Relaxed);
    latencies
}

/// Returns the medians over the rounds. The ratios to the disk only are filled in later.
fn row(trouble: Trouble, depth: usize, way: &'static str, rounds: &mut [Vec<u64>]) -> Row {
    let reads = rounds[0].len();
    let mut median_us = |of: &dyn Fn(&mut [u64]) -> u64| {
        let mut values: Vec<u64> = rounds.iter_mut().map(|latencies| of(latencies)).collect();
        quantile(&mut values, 1, 2) / 1000
    };
    Row {
        server: trouble.name(),
        depth,
        way,
        reads,
        mean_us: median_us(&|latencies| latencies.iter().sum::<u64>() / latencies.len().max(1) as u64),
        p50_us: median_us(&|latencies| quantile(latencies, 1, 2)),
        p99_us: median_us(&|latencies| quantile(latencies, 99, 100)),
        p999_us: median_us(&|latencies| quantile(latencies, 999, 1000)),
        max_us: median_us(&|latencies| quantile(latencies, 1, 1)),
        mean_to_disk_alone: 1.0,
        p999_to_disk_alone: 1.0,
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio for people to read")]
fn ratio(value: u64, to: u64) -> f64 {
    value as f64 / to as f64
}

fn quantile(values: &mut [u64], part: usize, of: usize) -> u64 {
    values.sort_unstable();
    let rank = (values.len() * part).div_ceil(of);
    values.get(rank.max(1) - 1).copied().unwrap_or(0)
}
