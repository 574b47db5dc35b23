//! Makes a guest sort more data than its memory holds, in place, on a slow swap disk: without the cache and with it,
//! in one run. `--quick` is a small run. The sort checks each record, and a wrong one fails the run.

use remoca_guest_tests::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca_release};
use remoca_lab::{
    Lab,
    store::{self, NbdkitConfig},
};
use remoca_protocol::control::Status;
use serde_json::Value;
use std::time::Duration;

/// Sizes of an experiment.
struct Plan {
    guest_mib: u32,
    sort_mib: u64,
    cache: &'static str,
    delay: Duration,
}

const FULL: Plan = Plan { guest_mib: 256, sort_mib: 320, cache: "512M", delay: Duration::from_millis(7) };
const QUICK: Plan = Plan { guest_mib: 160, sort_mib: 128, cache: "256M", delay: Duration::from_millis(1) };
const JOB_LIMIT: Duration = Duration::from_secs(3600);

fn main() -> Result<()> {
    let plan = if std::env::args().any(|argument| argument == "--quick") { QUICK } else { FULL };
    let lab = Lab::open()?;
    let mut host = Host::new(remoca_release()?, plan.cache)?;
    let area = host.folder().join("area.img");
    store::sparse_image(&area, (plan.sort_mib << 20) * 2)?;
    let disk = NbdkitConfig::slow_file(&area, plan.delay).start(host.folder())?;
    host.without_port();
    host.start_server()?;
    host.start_process(&[Image { name: "area", path: disk.uri().into(), options: "" }], plan.cache, &[])?;
    let mut config = host.guest(&lab, "swap-table")?;
    config.memory_mib = plan.guest_mib;
    let mut guest = config.boot(&lab)?;
    guest.run("mkswap $(disk-by-serial area) && swapon $(disk-by-serial area)", LIMIT)?;
    println!(
        "Guest of {} MiB, sort in place of {} MiB, swap disk of {} ms for each read; cache of {}.\n",
        plan.guest_mib,
        plan.sort_mib,
        plan.delay.as_millis(),
        plan.cache
    );
    println!(
        "| Cache | Fill s | Sort s | Verify s | Blocks swapped in | Hit ratio | Blocks swapped out | Admitted | Mean read ms |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for cached in [false, true] {
        host.set(None, Some(cached))?;
        let before = host.status()?;
        let sort = format!("remoca-workload sort --json --seed 5 --size {}M", plan.sort_mib);
        let sorted: Value = serde_json::from_str(guest.run(&sort, JOB_LIMIT)?.trim())?;
        println!("{}", row(cached, &sorted, &before, &host.status()?));
    }
    assert_kernel_is_content(&mut guest)?;
    guest.shut_down()?;
    host.stop_process()
}

fn row(cached: bool, sorted: &Value, before: &Status, after: &Status) -> String {
    let count = |name: &str| after.counters[name] - before.counters[name];
    let seconds = |phase: &str| sorted[phase].as_f64().unwrap_or(f64::NAN);
    let hits = count("hit_blocks") + count("zero_blocks");
    let blocks = hits + count("covered_blocks") + count("missed_blocks");
    let (reads, ns) =
        (after.latency.read.count - before.latency.read.count, after.latency.read.sum_ns - before.latency.read.sum_ns);
    format!(
        "| {} | {:.0} | {:.0} | {:.0} | {blocks} | {:.1} % | {} | {} | {:.2} |",
        if cached { "on" } else { "off" },
        seconds("fill_seconds"),
        seconds("sort_seconds"),
        seconds("verify_seconds"),
        100.0 * hits as f64 / blocks.max(1) as f64,
        count("written_blocks"),
        count("swap_admissions"),
        ns as f64 / 1e6 / reads.max(1) as f64,
    )
}
