//! Many VM processes on one processor, all of them busy: what it costs the others that each looks for the next request before it
//! sleeps (decision 0052).
//!
//! Each guest reads one random block at a time, all of them hits of its local tier, and waits between two reads for a random time. All
//! guests are one thread on the first processor, and all VM processes share the last. Those of one side look as by default, those of
//! the other do not; only one side is at work at any time.

use crate::cpus::{Cpus, pin_this_thread};
use crate::guest::Random;
use crate::rounds::{Rounds, Side};
use crate::vm::{Folder, Vm, VmOptions, memory_server, pinned, save};
use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use std::time::{Duration, Instant};

const IMAGE_BYTES: u64 = 4 << 20;
const CACHE: &str = "8M";

#[derive(Args)]
pub struct CrowdArgs {
    /// Number of VM processes of each side
    #[arg(long, default_value_t = 16)]
    vms: usize,
    /// Mean times between an answer and the next read of the same guest, in microseconds; drawn evenly from 0 to twice as much
    #[arg(long, value_delimiter = ',', default_values_t = [0, 10, 30, 100, 300, 1000])]
    think_us: Vec<u64>,
    /// Rounds for each of these times
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Length of a measurement in milliseconds
    #[arg(long, default_value_t = 500)]
    millis: u64,
}

/// Results for one mean time between reads. Ratios are of the processes that look to those that do not.
#[derive(Serialize)]
struct Row {
    think_us: u64,
    reads_per_s: f64,
    reads_per_s_without: f64,
    reads_ratio: f64,
    /// The same ratio of processes that do not look to themselves.
    reads_noise: Option<f64>,
    /// CPU time of the VM processes for a read.
    cpu_us: f64,
    cpu_us_without: f64,
    /// 99th percentile of the times of the reads of all guests.
    p99_us: f64,
    p99_us_without: f64,
}

#[derive(Serialize)]
struct Report {
    vms: usize,
    rounds: usize,
    rows: Vec<Row>,
}

/// Runs the benchmark and prints its table.
///
/// # Errors
/// If a program cannot be started, a read fails, or the figures cannot be written.
pub fn run(args: &CrowdArgs) -> Result<()> {
    ensure!(args.vms > 0 && args.rounds > 0 && args.millis > 0, "nothing would be measured");
    let (folder, cpus) = (Folder::new()?, Cpus::choose()?);
    let server = memory_server(&folder.0, &pinned(Some(cpus.behind)))?;
    let tier = server.local_endpoint();
    let start = |name: &str, arguments: &[String]| -> Result<Vec<Vm>> {
        let options = VmOptions {
            local: Some((&tier, CACHE)),
            cache: Some(CACHE),
            image_bytes: IMAGE_BYTES,
            inflight: true,
            processor: Some(cpus.server),
            arguments,
            ..VmOptions::default()
        };
        let vm = |number| {
            let mut vm = Vm::start(&folder.0, &format!("{name}{number}"), &options)?;
            vm.fill()?;
            Ok(vm)
        };
        (0..args.vms).map(vm).collect()
    };
    let mut looking = start("looks", &[])?;
    let mut sleeping = start("sleeps", &["--poll-max-us=0".to_owned()])?;
    pin_this_thread(cpus.client)?;
    println!("{} VM processes on one processor; {} rounds; medians", args.vms, args.rounds);
    println!(
        "{:>12} {:>12} {:>12} {:>8} {:>8} {:>12} {:>12} {:>12} {:>12}",
        "between, us", "reads/s", "no looking", "ratio", "A/A", "CPU us", "no looking", "p99 us", "no looking"
    );
    let mut rows = Vec::new();
    for think_us in args.think_us.iter().copied() {
        let row = measure(&mut looking, &mut sleeping, think_us, args)?;
        println!(
            "{think_us:>12} {:>12.0} {:>12.0} {:>8.3} {:>8.3} {:>12.2} {:>12.2} {:>12.0} {:>12.0}",
            row.reads_per_s,
            row.reads_per_s_without,
            row.reads_ratio,
            row.reads_noise.unwrap_or(f64::NAN),
            row.cpu_us,
            row.cpu_us_without,
            row.p99_us,
            row.p99_us_without
        );
        rows.push(row);
    }
    save("crowd", &Report { vms: args.vms, rounds: args.rounds, rows })
}

fn measure(looking: &mut [Vm], sleeping: &mut [Vm], think_us: u64, args: &CrowdArgs) -> Result<Row> {
    let mut random = Random(think_us + 1);
    // CPU time of a read, and the 99th percentile of the times of reads.
    let mut each = [const { (Vec::new(), Vec::new()) }; 2];
    let rates = Rounds::take(args.rounds, |side| {
        let (vms, (cpu, p99)) = match side {
            Side::Ours => (&mut *looking, &mut each[0]),
            Side::Theirs | Side::TheirsAgain => (&mut *sleeping, &mut each[1]),
        };
        let before = cpu_time(vms)?;
        let (mut times, seconds) = read_for(vms, Duration::from_millis(args.millis), think_us, &mut random)?;
        let reads = times.len();
        cpu.push((cpu_time(vms)? - before).as_secs_f64() * 1e6 / reads as f64);
        let (_, at_99, _) = times.select_nth_unstable(reads * 99 / 100);
        p99.push(*at_99 as f64 / 1e3);
        Ok(reads as f64 / seconds)
    })?;
    let figure = rates.figure_with("crowd", "with", "without")?;
    let [(cpu_us, p99_us), (cpu_us_without, p99_us_without)] = each.map(|(cpu, p99)| (median(cpu), median(p99)));
    Ok(Row {
        think_us,
        reads_per_s: figure.beside["with"],
        reads_per_s_without: figure.beside["without"],
        reads_ratio: figure.value,
        reads_noise: figure.noise.map(|noise| noise.median),
        cpu_us,
        cpu_us_without,
        p99_us,
        p99_us_without,
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn cpu_time(vms: &[Vm]) -> Result<Duration> {
    vms.iter().map(|vm| vm.process.cpu_time()).sum()
}

/// Reads with all guests for `time`. Returns the time of each read in nanoseconds, and the seconds until the last one was answered.
fn read_for(vms: &mut [Vm], time: Duration, think_us: u64, random: &mut Random) -> Result<(Vec<u64>, f64)> {
    let began = Instant::now();
    // When each guest begins its next read; `None` while it waits for an answer.
    let mut next = vec![Some(began); vms.len()];
    let mut times = Vec::new();
    while next.iter().any(Option::is_none) || began.elapsed() < time {
        let now = Instant::now();
        let is_over = now - began >= time;
        for (vm, next) in vms.iter_mut().zip(&mut next) {
            let blocks = vm.blocks();
            match next {
                None => {
                    if let Some(time) = vm.client().take_answer()? {
                        times.push(time);
                        *next = Some(now + Duration::from_micros(random.next() % (2 * think_us + 1)));
                    }
                }
                Some(at) if !is_over && *at <= now => {
                    vm.client().begin_read(random.next() % blocks)?;
                    *next = None;
                }
                Some(_) => {}
            }
        }
    }
    ensure!(!times.is_empty(), "no read was answered");
    Ok((times, began.elapsed().as_secs_f64()))
}
