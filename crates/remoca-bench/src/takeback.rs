//! A local tier that is given back under load (row 1.9 of the design's anchors): how much of its memory the host has again, how
//! long that takes, and how long reads take meanwhile.
//!
//! The image is as large as the tier. It is read once without delay, which fills the tier, and is a slow disk from then on. Memory
//! is given back in two ways: the operator of the VM sets the tier's size to 0, or the memory server takes it back.

use crate::vm::{DelayedImage, Folder, MemoryServer, ServerOptions, Vm, VmOptions, save_figures, status_at};
use crate::wanted;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use remoca_io::control;
use remoca_lab::figures::{Figure, Spread, load_average};
use remoca_protocol::control::{Command as Ask, Reply};
use remoca_server::command::{Command, Reply as ServerReply, command_path};
use serde::Serialize;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const GIB: f64 = (1_u64 << 30) as f64;
const PATIENCE: Duration = Duration::from_secs(30);
/// How long reads are measured beyond the end, so that those that began before it count.
const AFTER: Duration = Duration::from_millis(100);
/// Number of windows of reads of the disk alone, as long as that in which memory is given back.
const WINDOWS: usize = 5;

#[derive(Args, Clone, Copy)]
pub struct TakebackArgs {
    /// Size of the local tier, in MiB
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(16..))]
    mib: u32,
    /// How long the disk takes
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    disk_ms: u32,
    /// Reads in flight
    #[arg(long, default_value_t = 8)]
    depth: usize,
    /// Times that each way is measured, in turn
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
}

/// Who gives the memory back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    /// `remoca set --local 0`
    Set,
    /// `remoca take-back POOL 0`
    TakeBack,
}

/// What came of one way.
#[derive(Debug, Serialize)]
struct Outcome {
    way: Way,
    bytes_before: u64,
    bytes_after: u64,
    /// Time from the command until the host has 99 % of the memory.
    back_ms: f64,
    /// CPU time that the memory server spent meanwhile.
    server_cpu_ms: f64,
    reads: usize,
    longest_read_us: f64,
    /// Longest read of the disk alone in each of some windows of the same length, in the order of these times.
    disk_longest_us: [f64; WINDOWS],
    disk_median_us: f64,
}

impl Outcome {
    fn share(&self) -> f64 {
        1.0 - self.bytes_after as f64 / self.bytes_before as f64
    }

    fn ms_per_gib(&self) -> f64 {
        self.back_ms * GIB / self.bytes_before as f64
    }

    /// Returns the middle one of the longest reads of the disk alone.
    fn disk_us(&self) -> f64 {
        self.disk_longest_us[WINDOWS / 2]
    }

    fn read_ratio(&self) -> f64 {
        self.longest_read_us / self.disk_us()
    }
}

/// Runs the benchmark and prints its table.
pub fn run(args: &TakebackArgs) -> Result<()> {
    let (figures, outcomes) = measure(*args)?;
    for outcome in &outcomes {
        println!(
            "{:?}: {:.4} of {} MiB back, {:.1} ms a GiB, of the server's CPU {:.1}; longest of {} reads {:.0} us, of the disk alone {:.0} us (longest of {WINDOWS} windows {:.0}, median read {:.0})",
            outcome.way,
            outcome.share(),
            outcome.bytes_before / MIB,
            outcome.ms_per_gib(),
            outcome.server_cpu_ms * GIB / outcome.bytes_before as f64,
            outcome.reads,
            outcome.longest_read_us,
            outcome.disk_us(),
            outcome.disk_longest_us[WINDOWS - 1],
            outcome.disk_median_us
        );
    }
    print!("{}", wanted::table_of(&figures));
    if let Some(load) = load_average() {
        println!("Load of the machine at the end: {load}.");
    }
    save_figures("takeback", &figures, &outcomes)
}

/// Measures the figures that have a target, with a tier of `mib` MiB.
pub fn figures(mib: u32, rounds: usize) -> Result<Vec<Figure>> {
    Ok(measure(TakebackArgs { mib, disk_ms: 7, depth: 8, rounds: u16::try_from(rounds)? })?.0)
}

fn measure(args: TakebackArgs) -> Result<(Vec<Figure>, Vec<Outcome>)> {
    let bytes = u64::from(args.mib) * MIB;
    let (folder, image) = (Folder::new()?, DelayedImage::start(bytes)?);
    let control = folder.0.join("server.ctl");
    let memory = (bytes + 64 * MIB).to_string();
    let options = ServerOptions { memory: Some(&memory), control: Some(&control), ..ServerOptions::default() };
    let server = MemoryServer::start(&folder.0, &options)?;
    let (tier, size) = (server.local_endpoint(), bytes.to_string());
    let of_image = VmOptions { image_bytes: bytes, image: Some(&image.address), ..VmOptions::default() };
    let mut plain = Vm::start_cold(&folder.0, "plain", &of_image)?;
    let mut outcomes = Vec::new();
    for number in 0..args.rounds * 2 {
        // Each round begins with the way that the one before has ended with.
        let way = if number.div_ceil(2).is_multiple_of(2) { Way::Set } else { Way::TakeBack };
        let name = format!("vm{number}");
        let options = VmOptions { local: Some((&tier, &size)), ..of_image };
        let mut vm = Vm::start_cold(&folder.0, &name, &options)?;
        image.set_delay(Duration::ZERO);
        vm.pass(32)?;
        let used = vm.status()?.cache.used_bytes;
        ensure!(used >= bytes / 100 * 99, "one pass over the image filled only {used} of {bytes} bytes");
        image.set_delay(Duration::from_millis(args.disk_ms.into()));
        outcomes.push(one(args, way, [&mut vm, &mut plain], &server, &control)?);
        vm.end()?;
    }
    Ok((figures_of(&outcomes)?, outcomes))
}

/// Returns the worse of the two ways by the median of its rounds, with that of each beside it.
fn figures_of(outcomes: &[Outcome]) -> Result<Vec<Figure>> {
    let spread = |way, of: fn(&Outcome) -> f64| {
        let values = outcomes.iter().filter(|outcome| outcome.way == way).map(of).collect();
        Spread::of(values).context("a way was not measured")
    };
    let figure = |id, of: fn(&Outcome) -> f64, is_worse: fn(&f64, &f64) -> bool, noise| {
        let (set, taken) = (spread(Way::Set, of)?, spread(Way::TakeBack, of)?);
        let (of_set, of_taken) = (set.median, taken.median);
        let worse = if is_worse(&of_set, &of_taken) { set } else { taken };
        let figure = Figure::of_rounds(id, outcomes.len() / 2, worse, noise);
        anyhow::Ok(figure.beside("set", of_set).beside("take_back", of_taken))
    };
    let all = |of: fn(&Outcome) -> f64| Spread::of(outcomes.iter().map(of).collect()).context("nothing was measured");
    let of_disk = |outcome: &Outcome| outcome.disk_longest_us.map(|us| us / outcome.disk_us());
    let noise = Spread::of(outcomes.iter().flat_map(of_disk).collect());
    let server = all(|outcome| outcome.server_cpu_ms * GIB / outcome.bytes_before as f64)?.median;
    Ok(vec![
        figure("A1.9-back", Outcome::share, f64::lt, None)?,
        figure("A1.9-time", Outcome::ms_per_gib, f64::gt, None)?
            .beside("gib", all(|outcome| outcome.bytes_before as f64 / GIB)?.median)
            .beside("server_cpu_ms_a_gib", server),
        figure("A1.9-read", Outcome::read_ratio, f64::gt, noise)?
            .beside("longest_us", all(|outcome| outcome.longest_read_us)?.median)
            .beside("disk_us", all(Outcome::disk_us)?.median)
            .beside("disk_median_us", all(|outcome| outcome.disk_median_us)?.median),
    ])
}

/// Gives the memory of `vm` back while it reads.
fn one(
    args: TakebackArgs,
    way: Way,
    [vm, plain]: [&mut Vm; 2],
    server: &MemoryServer,
    server_control: &Path,
) -> Result<Outcome> {
    let [pool] = &server.pool_memory()?[..] else { bail!("there is not exactly one mapped pool") };
    let bytes = |pool: &File| pool.metadata().map(|file| file.blocks() * 512);
    let (before, cpu_before) = (bytes(pool)?, server.process.cpu_time()?);
    let is_over = AtomicBool::new(false);
    let control = vm.control().to_owned();
    let (back, latencies) = std::thread::scope(|scope| {
        let giver = scope.spawn(|| {
            let began = Instant::now();
            let given = give_back(way, &control, server_control).and_then(|()| {
                while bytes(pool)? * 100 > before {
                    ensure!(began.elapsed() < PATIENCE, "{} of {before} bytes are still there", bytes(pool)?);
                    std::thread::sleep(Duration::from_micros(200));
                }
                Ok(began.elapsed())
            });
            std::thread::sleep(AFTER);
            is_over.store(true, Ordering::Relaxed);
            given
        });
        let latencies = read_until(vm, args.depth, || is_over.load(Ordering::Relaxed));
        (giver.join(), latencies)
    });
    let back = back.ok().context("the thread that gives memory back panicked")??;
    let latencies = latencies?;
    let spent = server.process.cpu_time()? - cpu_before;
    let window = back + AFTER;
    let mut longest = [0.0; WINDOWS];
    let mut all = Vec::new();
    for longest in &mut longest {
        let began = Instant::now();
        let latencies = read_until(plain, args.depth, || began.elapsed() > window)?;
        *longest = us(latencies.iter().copied().max());
        all.extend(latencies);
    }
    longest.sort_by(f64::total_cmp);
    all.sort_unstable();
    Ok(Outcome {
        way,
        bytes_before: before,
        bytes_after: bytes(pool)?,
        back_ms: back.as_secs_f64() * 1e3,
        server_cpu_ms: spent.as_secs_f64() * 1e3,
        reads: latencies.len(),
        longest_read_us: us(latencies.iter().copied().max()),
        disk_longest_us: longest,
        disk_median_us: us(all.get(all.len() / 2).copied()),
    })
}

fn us(ns: Option<u64>) -> f64 {
    ns.unwrap_or(0) as f64 / 1e3
}

/// Reads random blocks until `is_over`, and returns the latency of each read in nanoseconds.
fn read_until(vm: &mut Vm, depth: usize, is_over: impl Fn() -> bool) -> Result<Vec<u64>> {
    let blocks = vm.blocks();
    let mut random = crate::guest::Random(blocks);
    vm.client().reads(depth, || (!is_over()).then(|| random.next() % blocks))
}

fn give_back(way: Way, vm: &Path, server: &Path) -> Result<()> {
    match way {
        Way::Set => {
            let nothing =
                Ask::Set { cache_bytes: None, local_bytes: Some(0), enabled: None, servers: None, at_once: false };
            match control::call(vm, nothing)? {
                Reply::Error { error } => bail!(error),
                _ => Ok(()),
            }
        }
        Way::TakeBack => {
            let status = status_at(server)?;
            let [pool] = &status.pools[..] else { bail!("there is not exactly one pool") };
            let mut line = serde_json::to_vec(&Command::TakeBack { pool: pool.token.clone(), bytes: 0 })?;
            line.push(b'\n');
            let mut stream = UnixStream::connect(command_path(server))?;
            stream.write_all(&line)?;
            let mut answer = String::new();
            BufReader::new(stream).read_line(&mut answer)?;
            match serde_json::from_str(&answer)? {
                ServerReply::Error(error) => bail!(error),
                ServerReply::Done(_) => Ok(()),
            }
        }
    }
}
