//! Runs third-party file-system test suites on a plain and on a cached disk, with ext4 and XFS. Prints a table in
//! Markdown, and writes `out/suites/report.json`. Fails if a test had different results on the two disks.
//!
//! `cargo run --release -p remoca-guest-tests --bin suites [--kills] [PART OF A TEST'S NAME]`; with `--kills` the VM process of the cached
//! disk is killed and started again during each test.

use remoca_guest_tests::Result;
use remoca_guest_tests::file_systems::{EXT4, FileSystem, XFS, share};
use remoca_guest_tests::suites::{DiskKind, Outcome, SUITES, run, tests};
use serde_json::{Value, json};
use std::path::Path;

fn main() -> Result<()> {
    let (mut wanted, mut cached) = (String::new(), DiskKind::Cached);
    for argument in std::env::args().skip(1) {
        if argument == "--kills" {
            cached = DiskKind::Killed;
        } else {
            wanted = argument;
        }
    }
    let tests = tests(&wanted);
    if tests.is_empty() {
        return Err(format!("no test has '{wanted}' in its name").into());
    }
    let (mut runs, mut different) = (Vec::new(), Vec::new());
    println!("| file system, disk | suite | passed | failed | skipped | hits |\n|---|---|---|---|---|---|");
    for file_system in [EXT4, XFS] {
        let plain = run(DiskKind::Plain, &file_system, &tests)?;
        print_rows(&file_system, DiskKind::Plain, &plain);
        let found = run(cached, &file_system, &tests)?;
        print_rows(&file_system, cached, &found);
        let differences = found.differences(&plain);
        different.extend(differences.iter().map(|difference| format!("{}: {difference}", file_system.name)));
        runs.push(run_json(&file_system, DiskKind::Plain, &plain));
        runs.push(run_json(&file_system, cached, &found));
    }
    let report = json!({"runs": runs, "differences": different});
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../out/suites");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("report.json"), serde_json::to_string_pretty(&report)?)?;
    println!("\n{} differences between the plain and the cached disk; out/suites/report.json", different.len());
    if different.is_empty() { Ok(()) } else { Err(different.join("\n").into()) }
}

fn print_rows(file_system: &FileSystem, kind: DiskKind, outcome: &Outcome) {
    for suite in SUITES {
        let [passed, failed, skipped] = ["passed", "failed", "skipped"].map(|result| outcome.count(suite, result));
        if passed + failed + skipped == 0 {
            continue;
        }
        let hits = match kind {
            DiskKind::Plain => "-".to_owned(),
            DiskKind::Cached | DiskKind::Killed => {
                format!("{:.0} %", share(outcome.hit_blocks, outcome.read_blocks) * 100.0)
            }
        };
        println!("| {}, {} | {suite} | {passed} | {failed} | {skipped} | {hits} |", file_system.name, kind.name());
    }
}

fn run_json(file_system: &FileSystem, kind: DiskKind, outcome: &Outcome) -> Value {
    json!({
        "file_system": file_system.name,
        "disk": kind.name(),
        "seconds": outcome.seconds,
        "kills": outcome.kills,
        "read_blocks": outcome.read_blocks,
        "hit_ratio": share(outcome.hit_blocks, outcome.read_blocks),
        "results": outcome.results,
    })
}
