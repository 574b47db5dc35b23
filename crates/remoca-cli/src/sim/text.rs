//! The figures as text.

use super::figures::Report;
use crate::size::show_size;
use remoca_trace::sim::Traffic;
use remoca_view::chart;
use std::fmt::Write;

/// Maximum number of characters of a line.
const WIDTH: usize = 80;
/// Share of the greatest hit ratio from which on a smaller size is of interest.
const ALMOST_ALL: f64 = 0.95;
/// Smallest size of the chart, unless almost all that can hit already does there.
const LEAST: u64 = 64 << 20;

/// Returns table, chart and notes.
pub fn text(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write(report, &mut text);
    text
}

fn write(report: &Report, text: &mut String) -> std::fmt::Result {
    let (trace, outcome) = (&report.trace, &report.outcome);
    let footprint = report.footprint();
    let requests = trace.summary.requests();
    writeln!(text, "{requests} requests ({}) in {:.0} s, for {footprint}", trace.format, trace.summary.seconds)?;
    writeln!(text, "\n{:<14}{:>8}{:>14}{:>8}{:>12}", "", "SIZE", "BLOCKS READ", "%", "READ, MS")?;
    let latencies = &report.latencies;
    let times = [0.0, latencies.local_ms, latencies.remote_ms, latencies.disk_ms];
    for ((place, bytes, blocks, share), ms) in report.places().into_iter().zip(times) {
        let size = bytes.map_or(String::new(), show_size);
        writeln!(text, "{place:<14}{size:>8}{blocks:>14}{:>8.1} {ms:>11.3}", share * 100.0)?;
    }
    let ms = |ms: Option<f64>| ms.map_or("-".into(), |ms| format!("{ms:.3} ms"));
    let gain = report.gain().map_or(String::new(), |gain| format!(", {gain:.1} times faster"));
    let (with, without) = (ms(report.mean_read_ms), ms(report.mean_read_without_ms));
    if report.has_tiers() {
        writeln!(text, "\nMean read: {with} with the tiers, {without} without{gain}")?;
    } else {
        writeln!(text, "\nMean read: {without}")?;
    }
    if report.bytes.remote > 0 {
        let Traffic { sent, fetched } = outcome.traffic;
        let bytes = |pages: u64| show_size(pages * 4096);
        writeln!(text, "Network: {} sent to the remote tier, {} fetched from it", bytes(sent), bytes(fetched))?;
    }
    if let Some(passed_over) = outcome.passed_over {
        let in_force = if outcome.ends_bimodal == Some(true) { "bimodal insertion" } else { "LRU" };
        writeln!(text, "Policy: {passed_over} evicted pages passed over; at the end it is {in_force}")?;
    }
    if !outcome.curve.is_empty() {
        let points: Vec<(u64, f64)> = outcome.curve.iter().map(|point| (point.bytes, point.hit_ratio)).collect();
        let title = "Hits of an LRU cache of each size below the guest's memory, % of blocks";
        write!(text, "\n{}", chart::draw(title, &points, first(&points)))?;
    }
    writeln!(text)?;
    report.notes().iter().try_for_each(|note| wrap(text, note))?;
    let rate = requests as f64 / report.cpu_seconds.max(1e-9) / 1e6;
    let memory = show_size(outcome.memory_bytes);
    writeln!(
        text,
        "Simulated in {:.2} s of CPU time ({rate:.1} M requests/s) and {memory} of memory.",
        report.cpu_seconds
    )
}

/// Returns the size from which on it is worth looking at.
fn first(points: &[(u64, f64)]) -> u64 {
    let most = points.last().map_or(0.0, |(_, hits)| *hits);
    let at_least = points.iter().find(|(size, _)| *size >= LEAST).map(|(_, hits)| *hits);
    if at_least.is_some_and(|hits| hits < most * ALMOST_ALL) { LEAST } else { 1 << 20 }
}

/// Adds a sentence in lines.
fn wrap(text: &mut String, sentence: &str) -> std::fmt::Result {
    let mut line = String::new();
    for word in sentence.split(' ') {
        if !line.is_empty() && line.len() + 1 + word.len() > WIDTH {
            writeln!(text, "{line}")?;
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    writeln!(text, "{line}")
}
