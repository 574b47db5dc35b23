//! Compares the memory server with memcached, Redis and a plain batched TCP server: 4 KiB gets over 1 GiB of random pages.
//!
//! One client program serves all servers. They run at the same time with one serving thread each. They are measured
//! one after the other, in another order in each round, and compared within a round.

mod client;
mod dialect;
mod fetch;
mod pattern;
mod plan;
mod raw;
mod report;
mod tags;
mod target;

use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use remoca_lab::figures::Figure;
use serde_json::{Value, json};

use crate::cpus::{Cpus, pin_this_thread};

use self::client::Connection;
pub(crate) use self::fetch::RawFetch;
use self::plan::{Cell, Contender, Placement};
use self::report::{Report, Sample};
pub(crate) use self::tags::figure as tag_figure;
use self::target::Target;
pub(crate) use self::target::{TargetArgs, free_port, run_target};

#[derive(Args)]
pub(crate) struct ServerBenchArgs {
    /// A short run that only shows that everything works; its figures mean little
    #[arg(long)]
    quick: bool,

    /// Rounds; each measures every server in every situation
    #[arg(long, value_name = "N", default_value_t = 7)]
    rounds: usize,

    /// Milliseconds for each measurement
    #[arg(long, value_name = "MS", default_value_t = 600)]
    slice_ms: u64,

    /// Pages of 4 KiB on each server, a multiple of 4
    #[arg(long, value_name = "N", default_value_t = 1 << 18)]
    pages: u32,

    /// Only these situations, such as d32x4; may be repeated
    #[arg(long, value_name = "CELL")]
    cell: Vec<String>,

    /// File for the figures
    #[arg(long, value_name = "PATH", default_value = "out/bench/server.json")]
    out: PathBuf,
}

/// A contender and the connections to it.
struct Lane {
    contender: Contender,
    target: usize,
    single: Vec<Connection>,
    four: Vec<Connection>,
}

/// A whole run.
struct Run {
    report: Report,
    conditions: Value,
    /// Bytes of server memory per page besides the page.
    beside_payload: f64,
}

impl Run {
    fn figures(&self) -> Vec<Figure> {
        let mut figures = self.report.figures();
        figures.push(Figure::single("P5", self.beside_payload));
        figures
    }
}

/// Runs the benchmark and writes its report.
pub(crate) fn run(args: &ServerBenchArgs) -> Result<()> {
    let run = measure_all(args)?;
    let mut report = run.report.json(run.conditions.clone());
    report["figures"] = json!(run.figures());
    write(&args.out, &report)?;
    print!("{}", run.report.table());
    println!("server memory beside the pages: {:.2} bytes a page (at most 16)", run.beside_payload);
    println!("all figures: {}", args.out.display());
    Ok(())
}

/// Measures the figures that have a target: P1 to P5.
pub(crate) fn figures(rounds: usize, quick: bool) -> Result<Vec<Figure>> {
    let cell = [Cell::D1, Cell::D32, Cell::D32x4, Cell::SetD32].map(|cell| cell.name().to_owned()).to_vec();
    let args = ServerBenchArgs { quick, rounds, slice_ms: 600, pages: 1 << 18, cell, out: PathBuf::new() };
    Ok(measure_all(&args)?.figures())
}

fn measure_all(args: &ServerBenchArgs) -> Result<Run> {
    let (rounds, slice, pages) = match args.quick {
        true => (args.rounds.min(2), Duration::from_millis(100), args.pages.min(1 << 14)),
        false => (args.rounds, Duration::from_millis(args.slice_ms), args.pages),
    };
    ensure!(
        rounds > 0 && pages > 0 && pages.is_multiple_of(4),
        "--rounds and --pages must be above 0, and --pages a multiple of 4"
    );
    let cells = cells(&args.cell)?;
    let cpus = Cpus::choose()?;
    eprintln!("starting the servers and storing {} MiB of pages on each", pages >> 8);
    let targets = [Target::raw(pages)?, Target::remoca(pages)?, Target::memcached(pages)?, Target::redis()?];
    let mut lanes = connect(&targets, pages)?;
    load(&mut lanes, &targets)?;
    let beside_payload = beside_payload(&targets, pages)?;

    let mut samples = Vec::new();
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        for &cell in &cells {
            place(&targets, cpus, cell.placement())?;
            for contender in Contender::order(round) {
                let lane = lanes.iter_mut().find(|lane| lane.contender == contender).context("a lane for each")?;
                samples.push(measure(lane, &targets, cell, slice, round)?);
            }
        }
    }
    let report = Report::new(samples, rounds);
    let conditions = conditions(&targets, cpus, rounds, slice, pages, beside_payload, args.quick);
    Ok(Run { report, conditions, beside_payload })
}

fn cells(names: &[String]) -> Result<Vec<Cell>> {
    if names.is_empty() {
        return Ok(Cell::ALL.to_vec());
    }
    let find = |name: &String| Cell::ALL.into_iter().find(|cell| cell.name() == name);
    names.iter().map(|name| find(name).with_context(|| format!("there is no situation `{name}`"))).collect()
}

fn place(targets: &[Target], cpus: Cpus, placement: Placement) -> Result<()> {
    let server = match placement {
        Placement::Apart => cpus.server,
        Placement::OneCpu => cpus.client,
    };
    pin_this_thread(cpus.client)?;
    targets.iter().try_for_each(|target| target.pin(server))
}

/// Opens one connection to all pages, and four to a quarter of them each, for every contender.
fn connect(targets: &[Target], pages: u32) -> Result<Vec<Lane>> {
    let lane = |contender: Contender| {
        let found = targets.iter().position(|target| target.name == contender.server());
        let target = found.context("a server for each contender")?;
        let open = |pages: Range<u32>, pool| {
            Connection::open(targets[target].address, contender.dialect(), pages, pool)
                .with_context(|| format!("cannot connect to {}", targets[target].name))
        };
        let quarter = pages / 4;
        let four = (0..4).map(|number: u8| {
            let first = u32::from(number) * quarter;
            open(first..first + quarter, number + 2)
        });
        Ok(Lane { contender, target, single: vec![open(0..pages, 1)?], four: four.collect::<Result<_>>()? })
    };
    Contender::ALL.into_iter().map(lane).collect()
}

/// Stores all pages and reads them all back. On the memory server, the four connections have pools of their own.
fn load(lanes: &mut [Lane], targets: &[Target]) -> Result<()> {
    for lane in lanes {
        let own_pools = if lane.contender == Contender::Remoca { lane.four.as_mut_slice() } else { &mut [] };
        if !lane.contender.stores() {
            continue;
        }
        for connection in lane.single.iter_mut().chain(own_pools) {
            let name = targets[lane.target].name;
            connection.store_all().with_context(|| format!("cannot store pages on {name}"))?;
            connection.verify_all().with_context(|| format!("pages on {name}"))?;
        }
    }
    Ok(())
}

/// Returns the number of bytes per page that the memory server holds besides the page itself (each page is there twice).
fn beside_payload(targets: &[Target], pages: u32) -> Result<f64> {
    let remoca = targets.iter().find(|target| target.name == "remoca").context("it was started")?;
    let payload = 2.0 * 4096.0 * f64::from(pages);
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let resident = remoca.resident_bytes()? as f64;
    Ok((resident - payload) / (2.0 * f64::from(pages)))
}

fn measure(lane: &mut Lane, targets: &[Target], cell: Cell, slice: Duration, round: usize) -> Result<Sample> {
    let target = &targets[lane.target];
    let before = target.cpu()?;
    let connections = if cell.four_connections() { &mut lane.four } else { &mut lane.single };
    let measured = match (cell.sets(), connections.as_mut_slice()) {
        (true, [single]) => client::set(single, slice),
        (_, connections) => client::get(connections, cell.depth(), slice, round as u64 + 1),
    };
    let measure = measured.with_context(|| format!("{} in {}", target.name, cell.name()))?;
    // The server sleeps as soon as it is idle. Its CPU time is exact only then.
    std::thread::sleep(Duration::from_millis(2));
    let server_cpu_us = (target.cpu()? - before).as_secs_f64() * 1e6;
    Ok(Sample { cell, contender: lane.contender, round, measure, server_cpu_us })
}

fn conditions(
    targets: &[Target],
    cpus: Cpus,
    rounds: usize,
    slice: Duration,
    pages: u32,
    beside_payload: f64,
    quick: bool,
) -> Value {
    let file = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cpuinfo = file("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    json!({
        "cpu": model.trim_start_matches([' ', '\t', ':']),
        "processors": cpuinfo.lines().filter(|line| line.starts_with("processor")).count(),
        "kernel": file("/proc/sys/kernel/osrelease"),
        "load_average_at_the_end": file("/proc/loadavg"),
        "transparent_huge_pages": file("/sys/kernel/mm/transparent_hugepage/enabled"),
        "pinning": {
            "client": cpus.client,
            "server": cpus.server,
            "server_in_one_cpu_cells": cpus.client,
            "how": "sched_setaffinity of all threads; one client thread, one serving thread in each server",
        },
        "transport": "TCP over loopback, TCP_NODELAY",
        "rounds": rounds,
        "slice_ms": slice.as_millis(),
        "pages": pages,
        "payload_check": "8 words of each page, all 512 words of each 64th, and of all pages before the first round",
        "server_memory_beside_payload_bytes_per_page": beside_payload,
        "quick": quick,
        "servers": targets.iter().map(|target| json!({
            "name": target.name, "version": target.version, "command": target.command,
            "resident_bytes": target.resident_bytes().ok(), "in_huge_pages_bytes": target.huge_bytes().ok(),
        })).collect::<Vec<_>>(),
    })
}

fn write(path: &PathBuf, report: &Value) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    fs::write(path, format!("{report:#}\n")).with_context(|| format!("cannot write {}", path.display()))
}
