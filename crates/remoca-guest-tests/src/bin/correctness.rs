//! The correctness experiment with every combination: guests of three sizes, caches of three sizes, four access
//! patterns, three shares of writes, kills at random moments; then with each check left out. Prints a table in
//! Markdown, and writes `out/correctness/report.json`. Fails if a signature was wrong, or if the omission of a check
//! was not noticed.
//!
//! `cargo run --release -p remoca-guest-tests --bin correctness [SECONDS OF A CELL [GUEST MIB]]`; 12 seconds and all guests without
//! arguments.

use remoca_guest_tests::Result;
use remoca_guest_tests::correctness::{Ablation, Bench, Cell, Evictions, Found, PATTERNS, Setup, WRITE_PERCENTS};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// Number of files: 384 MiB, more than the memory of any of the guests holds.
const FILE_COUNT: u64 = 96;
const KILL_INTERVAL: Duration = Duration::from_secs(4);

/// Guest memory in MiB, cache sizes in MiB, and the source of evicted pages.
const SIZES: [(u32, &[u64], Evictions); 4] = [
    (192, &[64, 192, 448], Evictions::Agent),
    (256, &[64, 192, 448], Evictions::Agent),
    (384, &[64, 192, 448], Evictions::Agent),
    (192, &[192], Evictions::Frames),
];

/// Omitted check, whether the memory server lies, and whether the omission must be noticed.
const ABLATIONS: [(Ablation, bool, bool); 4] = [
    (Ablation::None, true, false),
    (Ablation::Fetch, true, true),
    (Ablation::Fetch, false, false),
    (Ablation::Admission, false, true),
];
const ABLATION_ROUNDS: u32 = 15;

fn main() -> Result<()> {
    let arguments: Vec<u64> =
        std::env::args().skip(1).map(|text| text.parse()).collect::<std::result::Result<_, _>>()?;
    let seconds = arguments.first().copied().unwrap_or(12);
    let started = Instant::now();
    let (mut cells, mut all) = (Vec::new(), Found::default());
    println!("| guest, cache, evictions | access | writes | reads verified | kills | failures | hits |");
    println!("|---|---|---|---|---|---|---|");
    for (guest_mib, caches_mib, evictions) in SIZES {
        if arguments.get(1).is_some_and(|wanted| *wanted != u64::from(guest_mib)) {
            continue;
        }
        let setup = Setup { guest_mib, file_count: FILE_COUNT, evictions, kill_interval: KILL_INTERVAL };
        let mut bench = Bench::start(&setup)?;
        for &cache_mib in caches_mib {
            for pattern in PATTERNS {
                for write_percent in WRITE_PERCENTS {
                    let cell = Cell { cache_mib, pattern, write_percent, seconds };
                    let found = bench.run(&cell)?;
                    println!("{}", row(&setup, &cell, &found));
                    cells.push(cell_json(&setup, &cell, &found));
                    all.add(found);
                }
            }
        }
        bench.verify()?;
        bench.end()?;
    }
    let (ablations, unexpected) = ablate()?;
    let report = json!({
        "seconds": started.elapsed().as_secs(),
        "cells": cells,
        "total": all.json(),
        "ablations": ablations,
    });
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../out/correctness");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("report.json"), serde_json::to_string_pretty(&report)?)?;
    println!(
        "\n{} cells, {} signatures verified, {} kills of the VM process ({} warm restarts), {} of the memory server, {} failures; \
         out/correctness/report.json",
        cells.len(),
        all.signatures_verified(),
        all.disk_kills,
        all.warm_restarts,
        all.server_kills,
        all.failures(),
    );
    match (all.failures(), unexpected) {
        (0, 0) => Ok(()),
        _ => Err(format!("{} failures, {unexpected} ablations not as expected", all.failures()).into()),
    }
}

fn row(setup: &Setup, cell: &Cell, found: &Found) -> String {
    format!(
        "| {} MiB, {} MiB, {} | {} | {} % | {} | {} | {} | {:.0} % |",
        setup.guest_mib,
        cell.cache_mib,
        evictions_name(setup.evictions),
        cell.pattern,
        cell.write_percent,
        found.records_read,
        found.disk_kills + found.server_kills,
        found.failures(),
        found.hit_ratio() * 100.0,
    )
}

fn cell_json(setup: &Setup, cell: &Cell, found: &Found) -> Value {
    let mut value = found.json();
    value["guest_mib"] = setup.guest_mib.into();
    value["cache_mib"] = cell.cache_mib.into();
    value["evictions"] = evictions_name(setup.evictions).into();
    value["pattern"] = cell.pattern.into();
    value["write_percent"] = cell.write_percent.into();
    value
}

fn evictions_name(evictions: Evictions) -> &'static str {
    match evictions {
        Evictions::Agent => "agent",
        Evictions::Frames => "frames",
    }
}

/// Performs the ablations, and prints and returns their results. Also returns the number of unexpected results.
fn ablate() -> Result<(Vec<Value>, u32)> {
    println!(
        "\n| left out | evictions | memory server | reads | wrong signatures | expected |\n|---|---|---|---|---|---|"
    );
    let (mut ablations, mut unexpected) = (Vec::new(), 0);
    for evictions in [Evictions::Agent, Evictions::Frames] {
        for (ablation, lies, must_fail) in ABLATIONS {
            let setup = Setup { guest_mib: 192, file_count: 64, evictions, kill_interval: KILL_INTERVAL };
            let mut bench = Bench::start(&setup)?;
            let found = bench.ablate(ablation, lies, ABLATION_ROUNDS)?;
            bench.end()?;
            unexpected += u32::from((found.failures() > 0) != must_fail);
            let (name, server) = (ablation.name(), if lies { "lies" } else { "honest" });
            let (evictions, expected) = (evictions_name(evictions), if must_fail { "some" } else { "none" });
            println!(
                "| {name} | {evictions} | {server} | {} | {} | {expected} |",
                found.records_read, found.wrong_signatures
            );
            let mut value = found.json();
            value["left_out"] = name.into();
            value["evictions"] = evictions.into();
            value["memory_server"] = server.into();
            value["wrong_signatures_expected"] = must_fail.into();
            ablations.push(value);
        }
    }
    Ok((ablations, unexpected))
}
