//! The seeds that every change must pass. Other seeds: `cargo xtask sim --seeds N`.

use remoca_sim::{Options, Plan, run};
use std::collections::BTreeMap;

const SEEDS: u64 = 3_000;

/// Counters that a healthy simulation moves; each must reach the given number. An event that never happens is never tested.
const HAPPENS: [(&str, u64); 58] = [
    ("hit_blocks", 10_000),
    ("zero_blocks", 10_000),
    ("covered_blocks", 10_000),
    ("missed_blocks", 100_000),
    ("misaligned_reads", 10_000),
    ("evictions_admitted", 50_000),
    ("evictions_duplicate", 10_000),
    ("evictions_zero", 10_000),
    ("evictions_unmatched", 10_000),
    ("evictions_dropped", 10_000),
    ("class_reports", 500),
    ("frames_admitted", 10_000),
    ("frames_duplicate", 10_000),
    ("frames_zero", 10_000),
    ("frames_unmatched", 10_000),
    ("frames_dropped", 1_000),
    ("swap_admissions", 10_000),
    ("read_admissions", 10_000),
    ("fetch_timeouts", 500),
    ("fetch_missing", 100),
    ("fetch_wrong", 100),
    ("fetch_late", 100),
    ("fetch_unexpected", 100),
    ("fetch_disconnected", 20),
    ("hedges", 10_000),
    ("hedges_starved", 2_000),
    ("hedges_skipped", 1_000),
    ("hedges_won", 3_000),
    ("breaker_openings", 10),
    ("probes", 30),
    ("stream_reads", 200),
    ("disk_errors", 5_000),
    ("flushes_failed", 1_000),
    ("lost_sends", 1_000),
    ("messages_lost", 1_000),
    ("given_up", 100),
    ("left", 40),
    ("pool_joins", 100),
    ("released", 100),
    ("unanswered", 100),
    ("hangs", 100),
    ("refusals", 500),
    ("moves", 200),
    ("index_growths", 500),
    ("index_shrinks", 500),
    ("index_refusals", 100),
    ("store_crashes", 200),
    ("kills", 1_000),
    ("host_faults", 100),
    ("images_changed", 100),
    ("cold_starts", 1_000),
    ("warm_starts", 500),
    ("torn_indexes", 300),
    ("upgrades", 100),
    ("upgrades_owed", 5),
    ("migrations", 200),
    ("moved_warm", 200),
    ("moved_cold", 100),
];

#[test]
fn seeds_keep_every_promise() {
    let mut totals: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut hits, mut reads) = ([0, 0], [0, 0]);
    for seed in 0..SEEDS {
        let report = run(&Plan::draw(seed), &Options::default())
            .unwrap_or_else(|failure| panic!("{failure}\nexplain it: cargo xtask sim --seed {seed}"));
        for (name, count) in report.tally.named() {
            *totals.entry(name).or_default() += count;
        }
        if report.fault_free {
            hits[usize::from(report.is_cosy)] += report.tally.stats.hit_blocks;
            reads[usize::from(report.is_cosy)] += report.tally.stats.read_blocks;
        }
    }
    for (name, least) in HAPPENS {
        let count = totals[name];
        assert!(count >= least, "{name} happened {count} times in {SEEDS} seeds, and is expected {least} times");
    }
    // Where most of the blocks read fit the cache, and where they do not.
    let least = [[4, 100], [25, 100]];
    for (at, [percent, all]) in least.into_iter().enumerate() {
        let (hits, reads) = (hits[at], reads[at]);
        println!("{hits} of {reads}");
        assert!(hits * all > reads * percent, "a cache that works: {hits} of {reads} blocks came from the server");
    }
}

#[test]
fn a_seed_gives_the_same_run_again() {
    for seed in 0..20 {
        assert_eq!(run(&Plan::draw(seed), &Options::default()), run(&Plan::draw(seed), &Options::default()));
    }
}
