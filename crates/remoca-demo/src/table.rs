//! Prints the report as a table of text.

use std::fmt::Write;

use crate::report::{Evictions, PhaseFigures, Report, TierFigures, TierRun};

/// Returns the whole table.
pub fn render(report: &Report) -> String {
    let mut text = String::from("\n");
    let (base, cached) = (&report.baseline, &report.cached.run);
    row(&mut text, "", ["without cache", "with cache", ""]);
    rule(&mut text);
    phase(&mut text, "warm-up", &base.warmup, &cached.warmup);
    rule(&mut text);
    phase(&mut text, "measured", &base.measured, &cached.measured);
    rule(&mut text);
    summary(&mut text, report);
    rule(&mut text);
    if let Some(in_tiers) = &report.tiers {
        tiers(&mut text, report, in_tiers);
        rule(&mut text);
    }
    for expected in &report.expectations {
        let verdict = if expected.met { "yes" } else { "NO " };
        let _ = writeln!(text, "  {verdict}  {}: {} (expected: {})", expected.what, expected.found, expected.wanted);
    }
    text
}

fn phase(text: &mut String, name: &str, base: &PhaseFigures, cached: &PhaseFigures) {
    let pair = |text: &mut String, what: &str, pick: fn(&PhaseFigures) -> f64| {
        let (base, cached) = (pick(base), pick(cached));
        let times = if cached > 0.0 { format!("{:.2} x", base / cached) } else { String::new() };
        row(text, &format!("{name}: {what}"), [&format!("{base:.3} ms"), &format!("{cached:.3} ms"), &times]);
    };
    let counts = |text: &mut String, what: &str, pick: fn(&PhaseFigures) -> u64| {
        row(text, &format!("{name}: {what}"), [&pick(base).to_string(), &pick(cached).to_string(), ""]);
    };
    pair(text, "mean read at the VM process", |phase| phase.vm.mean_read_ms);
    pair(text, "  median", |phase| phase.vm.p50_ms);
    pair(text, "  99 of 100 within", |phase| phase.vm.p99_ms);
    pair(text, "mean record read in the guest", |phase| phase.app.mean_ms);
    counts(text, "record reads in the guest", |phase| phase.app.reads);
    counts(text, "reads at the VM process", |phase| phase.vm.reads);
    counts(text, "  of them from the cache", |phase| phase.vm.reads_from_cache);
}

fn summary(text: &mut String, report: &Report) {
    let one = |text: &mut String, what: &str, value: String| row(text, what, ["", &value, ""]);
    let (cached, evictions, kill) = (&report.cached, &report.evictions, &report.server_kill);
    one(text, "hit ratio of the measured reads", format!("{:.4}", cached.hit_ratio));
    one(text, "  of an exact LRU", format!("{:.4}", cached.lru_hit_ratio));
    one(text, "speed-up of the mean read", format!("{:.2} x", report.speedup));
    one(text, "  of an ideal cache", format!("{:.2} x", report.ideal_speedup));
    one(text, "evicted pages reported", evictions.reported.to_string());
    one(text, "  known by content", format!("{:.2} %", evictions.known_ratio * 100.0));
    let Evictions { admitted, duplicate, zero, unmatched, dropped, passed_over, .. } = *evictions;
    let fates = [admitted, duplicate, zero, unmatched, dropped, passed_over];
    one(text, "  admitted/duplicate/zero/unknown/dropped/passed", fates.map(|fate| fate.to_string()).join("/"));
    one(text, "  lost in the guest", evictions.lost.to_string());
    one(text, "reads after the server was killed", kill.reads_after.to_string());
    one(text, "wrong bytes, I/O errors in the guest", format!("{}, {}", report.verify_errors, report.guest_io_errors));
}

/// Adds the lines of the act with a local tier, beside the one whose cache is all at the memory server.
fn tiers(text: &mut String, report: &Report, tiers: &TierRun) {
    let header = format!("{} MiB of it local", tiers.local_bytes >> 20);
    row(text, "", ["all at the server", &header, ""]);
    let (alone, run) = (&report.cached, &tiers.run);
    let mut pair = |what: &str, alone: f64, found: f64| {
        let times = if found > 0.0 { format!("{:.2} x", alone / found) } else { String::new() };
        row(text, what, [&format!("{alone:.3} ms"), &format!("{found:.3} ms"), &times]);
    };
    pair("mean read at the VM process", alone.run.mean_read_ms, run.mean_read_ms);
    pair("  of the reads from the cache", report.t_remote_ms, run.measured.vm.mean_cache_read_ms);
    pair("mean record read in the guest", alone.run.app_mean_read_ms, run.app_mean_read_ms);
    let mut plain = |what: &str, alone: String, found: String| row(text, what, [&alone, &found, ""]);
    let share = |ratio: f64| format!("{ratio:.4}");
    let us = |tier: &TierFigures| tier.median_us.map_or_else(|| "-".to_owned(), |us| format!("{us:.1} us"));
    plain("hit ratio of the measured reads", share(alone.hit_ratio), share(tiers.hit_ratio));
    plain("hit ratio of the local tier, by blocks", String::new(), share(tiers.local.hit_ratio));
    plain("  median time of its answers", String::new(), us(&tiers.local));
    plain(
        "hit ratio of the memory server, by blocks",
        share(tiers.remote_alone.hit_ratio),
        share(tiers.remote.hit_ratio),
    );
    plain("  median time of its answers", us(&tiers.remote_alone), us(&tiers.remote));
    plain("pages on the network", tiers.network_pages_without.to_string(), tiers.network_pages.to_string());
    plain("  of them sent", tiers.remote_alone.pages_sent.to_string(), tiers.remote.pages_sent.to_string());
}

fn row(text: &mut String, name: &str, cells: [&str; 3]) {
    let [base, cached, times] = cells;
    let _ = writeln!(text, "  {}", format!("{name:<46} {base:>14} {cached:>22} {times:>9}").trim_end());
}

fn rule(text: &mut String) {
    let _ = writeln!(text, "  {}", "-".repeat(94));
}
