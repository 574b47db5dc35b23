//! The soak, on a raw file and then on an NBD server: `make soak MINUTES=30`, or
//! `cargo run --package remoca-guest-tests --bin soak [MINUTES [SEED]]`.
//!
//! Half of the time is spent on each store. The report goes to `out/soak/report.json`, the logs are next to it. Fails
//! if anything went wrong.

use remoca_guest_tests::Result;
use remoca_guest_tests::soak::{self, Options, Report, StoreKind};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize| arguments.get(index).map(|text| text.parse::<u64>());
    let minutes = number(0).transpose()?.unwrap_or(30);
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let seed = number(1).transpose()?.unwrap_or(now);
    let options = Options { seed, time: Duration::from_secs(minutes * 30), calm_restarts: 6 };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../out/soak");
    let started = Instant::now();
    let mut tell = |text: &str| println!("{:7.1} s  {text}", started.elapsed().as_secs_f64());
    let runs = [StoreKind::RawFile, StoreKind::Nbd].map(|kind| soak::run(kind, &options, &folder, &mut tell));
    let report = Report::new(seed, minutes, runs.into());
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("report.json");
    std::fs::write(&path, serde_json::to_string_pretty(&report)?)?;
    for run in &report.runs {
        println!("\n{run}");
    }
    println!("{} in {}; again with SEED={seed}", if report.passed { "passed" } else { "FAILED" }, path.display());
    if report.passed { Ok(()) } else { Err("the soak failed".into()) }
}
