//! The demonstration itself, in its short form: a real guest, a slow disk, the real programs.

use std::{fs, path::Path, process::Command};

use serde_json::Value;

fn number(report: &Value, path: &str) -> f64 {
    report.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} in {report}"))
}

/// Builds `remoca`, which the demonstration expects next to itself, unless `cargo xtask test` has built it.
fn build_remoca(demo: &Path) {
    if std::env::var_os("REMOCA_PROGRAM").is_none() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", "remoca-cli"]);
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        assert!(cargo.status().is_ok_and(|status| status.success()), "remoca could not be built");
    }
    assert!(demo.with_file_name("remoca").exists());
}

#[test]
fn quick_run_ends_without_an_error_and_its_report_is_consistent() {
    let demo = Path::new(env!("CARGO_BIN_EXE_remoca-demo"));
    build_remoca(demo);
    let out = tempfile::tempdir().unwrap();
    let status = Command::new(demo).arg("--quick").arg("--out").arg(out.path()).status().unwrap();
    let report: Value = serde_json::from_slice(&fs::read(out.path().join("report.json")).unwrap()).unwrap();
    assert!(status.success(), "{}", report["problems"]);

    for path in ["/verify_errors", "/guest_io_errors", "/server_kill/io_errors", "/server_kill/verify_errors"] {
        assert_eq!(number(&report, path), 0.0, "{path}");
    }
    // All guests read the same records, and the same number of them.
    for phase in ["warmup", "measured"] {
        let reads = |run: &str| number(&report, &format!("/{run}/{phase}/app/reads"));
        assert_eq!([reads("cached"), reads("tiers")], [reads("baseline"); 2]);
    }
    assert_eq!(number(&report, "/baseline/measured/vm/reads_from_cache"), 0.0);
    assert!(number(&report, "/baseline/mean_read_ms") >= number(&report, "/conditions/disk_delay_ms"));
    assert!(number(&report, "/cached/measured/vm/reads_from_cache") > 0.0);
    let ratios = ["hit_ratio", "lru_hit_ratio", "block_hit_ratio", "lru_block_hit_ratio"];
    for ratio in ratios.map(|name| number(&report, &format!("/cached/{name}"))) {
        assert!((0.0..=1.0).contains(&ratio), "{ratio}");
    }
    // Both tiers answer, what falls out of the local one travels, and less is fetched than without it.
    let of_tiers = |name: &str| number(&report, &format!("/tiers/{name}"));
    assert_eq!(of_tiers("local_bytes") + of_tiers("remote_bytes"), number(&report, "/conditions/cache_bytes"));
    assert!(of_tiers("local/hits") > 0.0 && of_tiers("remote/hits") > 0.0);
    assert!(of_tiers("remote/pages_sent") > 0.0 && of_tiers("demotions") > 0.0);
    assert!(of_tiers("remote/pages_received") < of_tiers("remote_alone/pages_received"));
    assert!(of_tiers("local/used_bytes") <= of_tiers("local_bytes"));
    for evictions in ["/evictions", "/server_kill/evictions", "/tiers/evictions"] {
        let fate = |name: &str| number(&report, &format!("{evictions}/{name}"));
        let sum: f64 = ["admitted", "duplicate", "zero", "unmatched", "dropped", "passed_over"].map(fate).iter().sum();
        assert!(fate("reported") > 0.0);
        assert_eq!(sum, fate("reported"), "{evictions}");
    }
    // The guest continued without the server, and found pages in the new one.
    assert!(number(&report, "/server_kill/reads_after") > 0.0);
    assert_eq!(number(&report, "/server_kill/hit_ratio_away"), 0.0);
    assert!(number(&report, "/server_kill/cache_used_bytes_end") > 0.0);

    let page = fs::read_to_string(out.path().join("report.html")).unwrap();
    assert!(page.contains("</html>") && !page.contains("NaN"));
    // No large files are left behind.
    let left: Vec<_> = fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 3, "{left:?}");
}

#[test]
fn what_cannot_be_carried_out_is_refused_in_one_line() {
    for (arguments, said) in [
        ("--cache 3", "--cache 3"),
        ("--reads 0", "nothing to measure"),
        ("--cache 10000000", "not enough memory: "),
        ("--local 1024", "local tier of 1024 MiB"),
    ] {
        let out = tempfile::tempdir().unwrap();
        let mut demo = Command::new(env!("CARGO_BIN_EXE_remoca-demo"));
        build_remoca(Path::new(demo.get_program()));
        let output = demo.args(arguments.split(' ')).arg("--out").arg(out.path()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(said), "{text}");
    }
}
