//! Compares the cache with an agent in the guest, without an agent, and filled by reads only: the same zipf reads in
//! the same guest, one row for each. `--quick` is a small run.
//!
//! Hit ratio: the share of the 4 KiB blocks requested from the VM process in the measured phase that the cache
//! answered. The bound is an exact LRU of the size of the guest's page cache and the cache together, fed with the
//! requests of the trace.

use remoca_demo::analysis::{self, Window};
use remoca_guest_tests::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca_release, start_agent};
use remoca_lab::{Guest, Lab, store, workload::dataset};
use remoca_protocol::control::Status;
use remoca_protocol::trace::parse_trace;
use std::path::Path;
use std::time::{Duration, Instant};

/// Sizes of an experiment.
struct Plan {
    guest_mib: u32,
    files: u64,
    cache: &'static str,
    warmup: u64,
    reads: u64,
}

const FULL: Plan = Plan { guest_mib: 256, files: 12, cache: "256M", warmup: 40_000, reads: 20_000 };
const QUICK: Plan = Plan { guest_mib: 192, files: 6, cache: "128M", warmup: 10_000, reads: 4_000 };
const FILE_BYTES: u64 = 64 << 20;
const JOB_LIMIT: Duration = Duration::from_secs(1800);

/// A way to fill the cache.
struct Way {
    name: &'static str,
    agent: bool,
    kernel_arg: &'static str,
    /// More options for `remoca disk`.
    option: &'static [&'static str],
}

const WAYS: [Way; 4] = [
    Way { name: "agent", agent: true, kernel_arg: "init_on_alloc=1", option: &[] },
    Way { name: "no agent, init_on_alloc=0", agent: false, kernel_arg: "init_on_alloc=0", option: &[] },
    Way { name: "no agent, init_on_alloc=1", agent: false, kernel_arg: "init_on_alloc=1", option: &[] },
    Way { name: "reads only", agent: false, kernel_arg: "init_on_alloc=0", option: &["--no-frames"] },
];

fn main() -> Result<()> {
    let plan = if std::env::args().any(|argument| argument == "--quick") { QUICK } else { FULL };
    let lab = Lab::open()?;
    let folder = tempfile::tempdir()?;
    let (image, files) = (folder.path().join("data.img"), folder.path().join("files"));
    dataset::create(&files.join("set"), plan.files, FILE_BYTES, 6)?;
    store::ext4_of_folder(&image, (plan.files * FILE_BYTES * 9 / 8).max(576 << 20), &files)?;
    std::fs::remove_dir_all(&files)?;
    let mut table = vec![
        "| Filled by | Admission at the end | Blocks read | Hit ratio | Bound (exact LRU) | Pages looked at | Known | Unmatched | Zero | Lost | Seconds |".into(),
        "|---|---|---|---|---|---|---|---|---|---|---|".into(),
    ];
    for way in &WAYS {
        let row = run(&plan, way, &lab, &image).map_err(|error| format!("{}: {error}", way.name))?;
        eprintln!("{row}");
        table.push(row);
    }
    println!(
        "Guest of {} MiB, {} MiB of files in records of 96 KiB read by a zipf distribution (alpha 1, seed 11), cache of {}; \
         {} reads measured after {}.\n",
        plan.guest_mib,
        (plan.files * FILE_BYTES) >> 20,
        plan.cache,
        plan.reads,
        plan.warmup
    );
    println!("{}", table.join("\n"));
    Ok(())
}

fn run(plan: &Plan, way: &Way, lab: &Lab, image: &Path) -> Result<String> {
    let mut host = Host::new(remoca_release()?, plan.cache)?;
    if !way.agent {
        host.without_port();
    }
    let trace = host.folder().join("trace");
    let trace_name = trace.display().to_string();
    let options = [&["--trace", &trace_name][..], way.option].concat();
    host.start_server()?;
    // The image is in the page cache here, and would be read faster than a memory server answers.
    let options = [&["--no-hedge"][..], &options[..]].concat();
    host.start_process(&[Image { name: "data", path: image.to_owned(), options: "" }], plan.cache, &options)?;
    let mut config = host.guest(lab, "capture-table")?;
    config.memory_mib = plan.guest_mib;
    config.kernel_args.push(way.kernel_arg.into());
    let mut guest = config.boot(lab)?;
    guest.run("mount -o noatime,noinit_itable $(disk-by-serial data) /mnt", LIMIT)?;
    if way.agent {
        start_agent(&mut guest)?;
    }
    read(&mut guest, plan.warmup, 10)?;
    let before = host.status()?;
    let from_ns =
        parse_trace(&std::fs::read(&trace)?)?.records.iter().map(|record| record.issued_ns).max().unwrap_or(0) + 1;
    let started = Instant::now();
    read(&mut guest, plan.reads, 11)?;
    let seconds = started.elapsed().as_secs_f64();
    let after = host.status()?;
    let resident = page_cache_pages(&mut guest)?;
    assert_kernel_is_content(&mut guest)?;
    guest.shut_down()?;
    host.stop_process()?;
    let pages = after.cache.granted_bytes / 4096 + resident;
    let bound =
        analysis::exact_lru(&parse_trace(&std::fs::read(&trace)?)?.records, Window { from_ns, to_ns: u64::MAX }, pages);
    Ok(row(way, &before, &after, bound.block_hit_ratio, seconds))
}

fn read(guest: &mut Guest, count: u64, seed: u64) -> Result<()> {
    guest.run(&format!("remoca-workload read-records --dir /mnt/set --count {count} --seed {seed}"), JOB_LIMIT)?;
    Ok(())
}

fn page_cache_pages(guest: &mut Guest) -> Result<u64> {
    let said =
        guest.run("awk '/^Cached:/ { c = $2 } /^Shmem:/ { s = $2 } END { print (c - s) / 4 }' /proc/meminfo", LIMIT)?;
    Ok(said.trim().split('.').next().unwrap_or_default().parse()?)
}

fn row(way: &Way, before: &Status, after: &Status, bound: f64, seconds: f64) -> String {
    let count = |name: &str| after.counters[name] - before.counters[name];
    let hits = count("hit_blocks") + count("zero_blocks");
    let blocks = hits + count("covered_blocks") + count("missed_blocks");
    let pages = count("evictions_reported") + count("frames_looked_at");
    let unmatched = count("evictions_unmatched") + count("frames_unmatched");
    let zero = count("evictions_zero") + count("frames_zero");
    let lost = after.port.as_ref().and_then(|port| port.agent).map_or(0, |agent| agent.lost);
    let percent = |part: u64, of: u64| 100.0 * part as f64 / of.max(1) as f64;
    format!(
        "| {} | {} | {blocks} | {:.1} % | {:.1} % | {pages} | {:.1} % | {unmatched} | {zero} | {lost} | {seconds:.0} |",
        way.name,
        after.cache.admission,
        percent(hits, blocks),
        bound * 100.0,
        percent(pages - unmatched - zero, pages),
    )
}
