//! The simulation of `remoca sim` beside libCacheSim's `cachesim` (target 2.10): requests a CPU second, on one trace of objects of one
//! block each, in the format oracleGeneral that both read.
//!
//! libCacheSim is not packaged. Without `--cachesim PATH` our figures stand alone beside its published 20 million a second.

use crate::guest::{Random, Zipf, scattered};
use crate::rounds::{Rounds, Side};
use crate::vm::save_figures;
use anyhow::{Context, Result, ensure};
use clap::Args;
use remoca_lab::figures::{Figure, Spread};
use remoca_trace::sim::{CurveKind, Outcome, Pages, PolicyKind, Setup, Simulation};
use remoca_trace::{Batch, Format, open};
use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[derive(Args)]
pub struct SimBenchArgs {
    /// Number of requests
    #[arg(long, default_value_t = 20_000_000)]
    requests: u64,
    /// Number of different blocks
    #[arg(long, default_value_t = 1_000_000)]
    blocks: u64,
    /// Rounds of all
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// libCacheSim's `cachesim`, to compare with
    #[arg(long, value_name = "PATH")]
    cachesim: Option<PathBuf>,
}

/// What is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Lru,
    Sampled,
    Exact,
    GuestAndTiers,
    Adaptive,
}

const WAYS: [(Way, &str); 5] = [
    (Way::Lru, "LRU"),
    (Way::Sampled, "sampled curve"),
    (Way::Exact, "LRU and exact curve"),
    (Way::GuestAndTiers, "guest and two tiers"),
    (Way::Adaptive, "guest, adaptive policy"),
];

#[derive(Serialize)]
struct Row {
    what: &'static str,
    requests_per_cpu_s: Vec<f64>,
    bytes_per_block: f64,
}

/// Runs the benchmark.
pub fn run(args: &SimBenchArgs) -> Result<()> {
    let folder = tempfile::tempdir().context("cannot make a folder for the trace")?;
    let trace = folder.path().join("trace.oracleGeneral");
    write_trace(args, &trace).context("cannot write the trace")?;
    let million = |seconds: f64| args.requests as f64 / seconds / 1e6;
    println!("{} requests of {} blocks, zipf 1.0; million requests a CPU second", args.requests, args.blocks);
    let mut rows = Vec::new();
    let mut figures = Vec::new();
    for (way, what) in WAYS {
        let mut rates = Vec::new();
        let mut bytes = 0;
        for _ in 0..args.rounds {
            let (seconds, outcome) = ours(args, way, &trace)?;
            rates.push(million(seconds));
            bytes = outcome.memory_bytes;
        }
        let spread = Spread::of(rates.clone()).context("no round")?;
        let bytes_per_block = bytes as f64 / args.blocks as f64;
        println!("{what:<24}{:>8.1}{:>10.1} bytes a block", spread.median, bytes_per_block);
        if let Some(id) = id(way) {
            figures.push(Figure::of_rounds(id, args.rounds, spread, None));
        }
        rows.push(Row { what, requests_per_cpu_s: rates, bytes_per_block });
    }
    if let Some(cachesim) = &args.cachesim {
        let rounds = Rounds::take(args.rounds, |side| match side {
            Side::Ours => Ok(ours(args, Way::Lru, &trace)?.0),
            Side::Theirs | Side::TheirsAgain => theirs(args, cachesim, &trace),
        })?;
        let figure = rounds.inverse().figure("2.10-lru-ratio")?;
        println!("LRU, ours over libCacheSim's: {figure:?}");
        figures.push(figure);
    }
    save_figures("sim", &figures, &rows)
}

fn id(way: Way) -> Option<&'static str> {
    match way {
        Way::Lru => Some("2.10-lru"),
        Way::Sampled => Some("2.10-sampled"),
        Way::Exact | Way::GuestAndTiers | Way::Adaptive => None,
    }
}

fn write_trace(args: &SimBenchArgs, path: &Path) -> Result<()> {
    let (law, mut random) = (Zipf::new(args.blocks, 1.0), Random(1));
    let mut file = BufWriter::new(File::create(path)?);
    for at in 0..args.requests {
        let time = u32::try_from(at / 10_000).unwrap_or(u32::MAX);
        let object = scattered(law.rank(&mut random));
        file.write_all(&time.to_le_bytes())?;
        file.write_all(&object.to_le_bytes())?;
        file.write_all(&4096_u32.to_le_bytes())?;
        file.write_all(&(-1_i64).to_le_bytes())?;
    }
    Ok(file.flush()?)
}

/// Returns the CPU time in seconds of reading and simulating the trace, and what came of it.
fn ours(args: &SimBenchArgs, way: Way, trace: &Path) -> Result<(f64, Outcome)> {
    let tenth = args.blocks / 10;
    let of = |guest: u64, local: u64, remote: u64, curve: CurveKind, policy: PolicyKind| Setup {
        guest,
        tiers: Pages { local, remote },
        policy,
        curve,
        one_of: 1,
        blocks_max: u32::MAX / 2,
    };
    let setup = match way {
        Way::Lru => of(0, tenth, 0, CurveKind::None, PolicyKind::Lru),
        Way::Sampled => of(0, 0, 0, CurveKind::Sampled, PolicyKind::Lru),
        Way::Exact => of(0, tenth, 0, CurveKind::Exact, PolicyKind::Lru),
        Way::GuestAndTiers => of(tenth / 4, tenth / 4, tenth / 2, CurveKind::None, PolicyKind::Lru),
        Way::Adaptive => of(tenth / 4, tenth / 4, tenth / 2, CurveKind::None, PolicyKind::Adaptive),
    };
    let before = cpu_seconds();
    let mut source = open(Box::new(File::open(trace)?), Some(Format::OracleGeneral))?;
    let (mut simulation, mut batch) = (Simulation::new(setup), Batch::default());
    while source.read(&mut batch)? {
        simulation.take(&batch).ok().context("the trace has too many blocks")?;
    }
    let outcome = simulation.finish();
    ensure!(outcome.blocks.all() == args.requests, "not all requests were simulated");
    Ok((cpu_seconds() - before, outcome))
}

fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns the CPU time in seconds of `cachesim` for the same, its start included.
fn theirs(args: &SimBenchArgs, cachesim: &Path, trace: &Path) -> Result<f64> {
    let before = children_cpu_seconds()?;
    let mut command = Command::new(cachesim);
    command.arg(trace).args(["oracleGeneral", "lru"]).arg((args.blocks / 10).to_string());
    command.args(["--ignore-obj-size", "1", "--num-thread", "1"]);
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).current_dir(std::env::temp_dir()).status();
    let status = status.with_context(|| format!("cannot run {}", cachesim.display()))?;
    ensure!(status.success(), "{} ended with {status}", cachesim.display());
    Ok(children_cpu_seconds()? - before)
}

/// Returns the CPU time of this process's children that have ended.
fn children_cpu_seconds() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").context("cannot read the times of this process")?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok()).context("no times");
    // The 16th and 17th of proc(5), in units of 10 ms.
    Ok((ticks(13)? + ticks(14)?) / 100.0)
}
