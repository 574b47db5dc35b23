//! `remoca trace info`.

use super::reading::{TraceFile, read_all};
use crate::form::Form;
use crate::output::output;
use crate::size::show_size;
use anyhow::Result;
use remoca_trace::{Format, Summary};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::Write as _;

/// What is shown of a trace.
#[derive(Serialize)]
struct Shown {
    format: String,
    bytes: Option<u64>,
    #[serde(flatten)]
    summary: Summary,
    cut: Option<String>,
}

/// Shows what is in a trace.
pub fn run(file: &TraceFile, form: Form) -> Result<()> {
    let mut opened = file.open()?;
    let mut summary = Summary::default();
    let format = opened.source.format();
    let cut = read_all(&mut opened, |batch| {
        summary.note(batch, format == Format::Remoca);
        Ok(())
    })?;
    let shown = Shown { format: format.to_string(), bytes: opened.bytes, summary, cut };
    let text = match form {
        Form::Json => serde_json::to_string_pretty(&shown)? + "\n",
        Form::Table => text(&shown),
    };
    Ok(output().write_all(text.as_bytes())?)
}

fn text(shown: &Shown) -> String {
    let Shown { format, bytes, summary, cut } = shown;
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name:<12}{value}");
    };
    let of_blocks = |count: u64, blocks: u64| format!("{count}, of {} ({blocks} blocks)", show_size(blocks * 4096));
    line("format", bytes.map_or(format.clone(), |bytes| format!("{format}, {}", show_size(bytes))));
    let disks = if summary.disks == 1 { "disk" } else { "disks" };
    line("requests", format!("{} in {:.1} s, to {} {disks}", summary.requests(), summary.seconds, summary.disks));
    line("reads", of_blocks(summary.reads, summary.read_blocks));
    line("writes", of_blocks(summary.writes, summary.written_blocks));
    line("flushes", summary.flushes.to_string());
    line("discards", summary.discards.to_string());
    if format == "remoca" {
        line("evictions", summary.evictions.to_string());
        line("lost", summary.lost.to_string());
    }
    if summary.partial > 0 {
        line("partial", format!("{} requests for parts of blocks", summary.partial));
    }
    if summary.skipped > 0 {
        line("skipped", format!("{} entries that are no requests for blocks", summary.skipped));
    }
    if let (Some(reads), Some(ms)) =
        (summary.recorded_cache_reads.filter(|_| summary.reads > 0), summary.recorded_cache_ms)
    {
        let share = reads as f64 / summary.reads as f64 * 100.0;
        line("cache", format!("answered {reads} reads ({share:.1} %), {ms:.3} ms each"));
    }
    if let Some(ms) = summary.recorded_disk_ms {
        line("disk", format!("{ms:.3} ms a read"));
    }
    cut.iter().for_each(|cut| line("end", cut.clone()));
    text
}
