//! The report for people: one HTML file with nothing outside it. The words and the style are in `page.html`.

mod charts;
mod numbers;

use std::{fmt::Write, fs, path::Path};

use anyhow::{Context, Result};
use charts::{latency_chart, time_chart};
use numbers::{bytes, ms, percent, thousands};

use crate::{
    analysis::ratio,
    chart::escape,
    conditions::Conditions,
    report::{Evictions, PhaseFigures, REPORT_NAMES, Report, Sources},
};

const TEMPLATE: &str = include_str!("page.html");

/// Writes `report.json` and `report.html` into the folder.
pub fn write(report: &Report, out: &Path) -> Result<()> {
    let json = serde_json::to_string_pretty(report).context("the report cannot be written as JSON")?;
    for (name, text) in REPORT_NAMES.into_iter().zip([json, render(report)]) {
        let path = out.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Reads the report of an earlier run.
pub fn read(out: &Path) -> Result<Report> {
    let path = out.join(REPORT_NAMES[0]);
    let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is no report", path.display()))
}

fn render(report: &Report) -> String {
    let (conditions, cached) = (&report.conditions, &report.cached);
    let parts = [
        ("title", title(report)),
        ("lead", lead(conditions)),
        ("problems", problems(report)),
        ("speedup", format!("{:.1}", report.speedup)),
        ("base_mean", ms(report.baseline.mean_read_ms)),
        ("cached_mean", ms(cached.run.mean_read_ms)),
        ("tiles", tiles(report)),
        ("latency", latency_chart(report)),
        ("over_time", time_chart(report)),
        ("kill_note", kill_note(report)),
        ("measured_reads", thousands(conditions.measured_reads)),
        ("sources", sources(report)),
        ("evictions", evictions(&report.evictions)),
        ("expectations", expectations(report)),
        ("figures", figures(report)),
        ("conditions", facts(conditions)),
        ("lru_pages", thousands(cached.lru_pages)),
        ("t_remote", ms(report.t_remote_ms)),
        ("t_disk", ms(report.t_disk_ms)),
        ("footer", footer(conditions)),
    ];
    parts.iter().fold(TEMPLATE.to_owned(), |page, (name, text)| page.replace(&format!("{{{{{name}}}}}"), text))
}

fn title(report: &Report) -> String {
    let cache = bytes(report.conditions.cache_bytes);
    if report.speedup > 1.05 {
        format!(
            "With {cache} of another process&rsquo;s memory, a disk read takes {} instead of {}",
            ms(report.cached.run.mean_read_ms),
            ms(report.baseline.mean_read_ms)
        )
    } else {
        format!("{cache} of another process&rsquo;s memory did not make reads faster here")
    }
}

fn lead(conditions: &Conditions) -> String {
    let quick = if conditions.quick { " This was a quick run: its figures say little." } else { "" };
    format!(
        "A guest with {} MiB of memory reads {}-KiB records of a {} file set on ext4 by a zipf distribution, from a disk on \
         which each read request takes {} ms (<code>{}</code>). The pages its kernel evicts go to a memory server, and are \
         read back from there.{quick}",
        conditions.guest_memory_mib,
        conditions.record_bytes >> 10,
        bytes(conditions.set_bytes),
        conditions.disk_delay_ms,
        escape(&conditions.disk),
    )
}

fn problems(report: &Report) -> String {
    if report.problems.is_empty() {
        return String::new();
    }
    let lines: String = report.problems.iter().map(|problem| format!("<li>{}</li>", escape(problem))).collect();
    format!(r#"<section class="card alarm"><h2 class="bad">Something went wrong</h2><ul>{lines}</ul></section>"#)
}

fn tiles(report: &Report) -> String {
    let errors = report.verify_errors + report.guest_io_errors;
    let class = if errors == 0 { "good" } else { "bad" };
    let tiles = [
        (
            percent(report.cached.hit_ratio),
            "",
            format!("of the reads hit; an exact LRU: {}", percent(report.cached.lru_hit_ratio)),
        ),
        (
            format!("{:.2}", report.p15_ratio),
            "",
            format!("of an ideal cache&rsquo;s speed-up ({:.1} &times;)", report.ideal_speedup),
        ),
        (
            ms(report.t_remote_ms),
            "",
            format!("for a read from the memory server; {} from the disk", ms(report.t_disk_ms)),
        ),
        (
            percent(report.evictions.known_ratio),
            "",
            format!("of {} evicted pages known by content", thousands(report.evictions.reported)),
        ),
        (
            thousands(report.server_kill.reads_after),
            "",
            "reads after the memory server was killed, and after its return".into(),
        ),
        (thousands(errors), class, "errors: wrong bytes, failed reads, complaints of the kernel".into()),
    ];
    let tile = |(value, class, name): &(String, &str, String)| {
        format!(r#"<div class="tile"><div class="value {class}">{value}</div><div class="name">{name}</div></div>"#)
    };
    tiles.iter().map(tile).collect()
}

fn kill_note(report: &Report) -> String {
    let kill = &report.server_kill;
    format!(
        "Then the memory server is killed (SIGKILL) while the guest reads on, and started again empty after {:.0} s: {} \
         reads of the guest&rsquo;s disk and {} errors later the hit ratio is at {} again.",
        kill.seconds_away,
        thousands(kill.reads_after),
        kill.io_errors + kill.verify_errors,
        percent(kill.hit_ratio_end)
    )
}

fn sources(report: &Report) -> String {
    let bar_of = |name: &str, phase: &PhaseFigures| {
        let Sources { guest_page_cache, remote_memory, disk } = phase.sources;
        let parts = [("c-guest", guest_page_cache), ("c-remote", remote_memory), ("c-disk", disk)];
        format!(r#"<div class="barname">{name}<span>{} from the disk</span></div>{}"#, bytes(disk * 4096), bar(&parts))
    };
    let (base, cached) = (&report.baseline.measured, &report.cached.run.measured);
    let both = |pick: fn(&Sources) -> u64| {
        let share = |sources: &Sources| {
            percent(ratio(pick(sources), sources.guest_page_cache + sources.remote_memory + sources.disk))
        };
        format!("{} &rarr; {}", share(&base.sources), share(&cached.sources))
    };
    let key = key(&[
        ("c-guest", "the guest&rsquo;s page cache", &both(|sources| sources.guest_page_cache)),
        ("c-remote", "the memory server", &both(|sources| sources.remote_memory)),
        ("c-disk", "the disk", &both(|sources| sources.disk)),
    ]);
    bar_of("without the cache", base) + &bar_of("with the cache", cached) + &key
}

fn evictions(evictions: &Evictions) -> String {
    let fates = [
        ("c-remote", "admitted to the cache", evictions.admitted),
        ("c-guest", "duplicate: content cached already", evictions.duplicate),
        ("c-faint", "zero: needs no memory", evictions.zero),
        ("c-extra", "dropped: no room on the way, or no server", evictions.dropped),
        ("c-bad", "unmatched: content unknown", evictions.unmatched),
    ];
    let parts = fates.map(|(class, _, count)| (class, count));
    let rows: Vec<_> = fates.map(|(class, name, count)| (class, name, thousands(count))).into();
    let rows: Vec<_> = rows.iter().map(|(class, name, count)| (*class, *name, count.as_str())).collect();
    format!(
        r#"<div class="barname">{} pages reported<span>{} lost in the guest</span></div>{}{}"#,
        thousands(evictions.reported),
        thousands(evictions.lost),
        bar(&parts),
        key(&rows)
    )
}

fn bar(parts: &[(&str, u64)]) -> String {
    let all: u64 = parts.iter().map(|(_, count)| count).sum();
    let shown = parts.iter().filter(|(_, count)| *count > 0);
    let pieces: String = shown
        .map(|(class, count)| format!(r#"<i class="{class}" style="width:{:.3}%"></i>"#, ratio(*count, all) * 100.0))
        .collect();
    format!(r#"<div class="bar">{pieces}</div>"#)
}

fn key(rows: &[(&str, &str, &str)]) -> String {
    let rows: String = rows
        .iter()
        .map(|(class, name, value)| format!(r#"<li><i class="{class}"></i><span>{name}</span><b>{value}</b></li>"#))
        .collect();
    format!(r#"<ul class="key">{rows}</ul>"#)
}

fn expectations(report: &Report) -> String {
    let row = |expected: &crate::report::Expectation| {
        let (class, verdict) = if expected.met { ("good", "met") } else { ("bad", "not met") };
        format!(
            r#"<tr><td class="{class}">{verdict}</td><td>{}</td><td>{}</td><td>{}</td></tr>"#,
            escape(&expected.what),
            escape(&expected.found),
            escape(&expected.wanted)
        )
    };
    let rows: String = report.expectations.iter().map(row).collect();
    format!("<tr><td></td><td></td><td><b>found</b></td><td><b>expected</b></td></tr>{rows}")
}

/// One figure of a phase.
type Pick<T> = fn(&PhaseFigures) -> T;

fn figures(report: &Report) -> String {
    let (base, cached) = (&report.baseline, &report.cached.run);
    let mut text = String::new();
    for (name, base, cached) in
        [("Warm-up", &base.warmup, &cached.warmup), ("Measured", &base.measured, &cached.measured)]
    {
        let _ = write!(text, r#"<tr><th colspan="4">{name}</th></tr>"#);
        let latencies: [(&str, Pick<f64>); 9] = [
            ("mean read at the disk", |phase| phase.vm.mean_read_ms),
            ("&emsp;median", |phase| phase.vm.p50_ms),
            ("&emsp;99 of 100 within", |phase| phase.vm.p99_ms),
            ("&emsp;longest", |phase| phase.vm.max_ms),
            ("&emsp;mean of those from the memory server", |phase| phase.vm.mean_cache_read_ms),
            ("&emsp;mean of those from the disk", |phase| phase.vm.mean_disk_read_ms),
            ("mean record read in the guest", |phase| phase.app.mean_ms),
            ("&emsp;median", |phase| phase.app.p50_ms),
            ("&emsp;99 of 100 within", |phase| phase.app.p99_ms),
        ];
        for (what, pick) in latencies {
            let (base, cached) = (pick(base), pick(cached));
            let times =
                if base > 0.0 && cached > 0.0 { format!("{:.2} &times;", base / cached) } else { "&ndash;".into() };
            let _ =
                write!(text, "<tr><td>{what}</td><td>{}</td><td>{}</td><td>{times}</td></tr>", ms(base), ms(cached));
        }
        let counts: [(&str, Pick<u64>); 4] = [
            ("record reads in the guest", |phase| phase.app.reads),
            ("reads at the disk", |phase| phase.vm.reads),
            ("&emsp;from the memory server", |phase| phase.vm.reads_from_cache),
            ("&emsp;from the disk", |phase| phase.vm.reads_from_disk),
        ];
        for (what, pick) in counts {
            let (base, cached) = (thousands(pick(base)), thousands(pick(cached)));
            let _ = write!(text, "<tr><td>{what}</td><td>{base}</td><td>{cached}</td><td></td></tr>");
        }
        let _ = write!(
            text,
            "<tr><td>seconds</td><td>{:.1}</td><td>{:.1}</td><td>{:.2} &times;</td></tr>",
            base.seconds,
            cached.seconds,
            base.seconds / cached.seconds.max(0.001)
        );
    }
    text
}

fn facts(conditions: &Conditions) -> String {
    let locked = if conditions.memory_locked { "locked" } else { "not locked" };
    let facts = [
        (
            "Disk",
            format!(
                "<code>{}</code>, one request at a time: every read takes {} ms",
                escape(&conditions.disk),
                conditions.disk_delay_ms
            ),
        ),
        (
            "File set",
            format!(
                "{} in {} files on {}",
                bytes(conditions.set_bytes),
                conditions.file_count,
                escape(&conditions.file_system)
            ),
        ),
        (
            "Reads",
            format!(
                "{} records of {} KiB; {}; seed {}; {} to warm up, {} measured",
                thousands(conditions.record_count),
                conditions.record_bytes >> 10,
                escape(&conditions.pattern),
                conditions.seed,
                thousands(conditions.warmup_reads),
                thousands(conditions.measured_reads)
            ),
        ),
        (
            "Cache",
            format!("{} of {}, memory {locked}", bytes(conditions.cache_bytes), escape(&conditions.memory_server)),
        ),
        ("Load average", format!("{:.2} before, {:.2} after", conditions.load_before, conditions.load_after)),
        ("Time taken", format!("{:.0} s, and {:.0} s to prepare", conditions.run_seconds, conditions.prepare_seconds)),
    ];
    let (reading, run) = facts.split_at(4);
    let machines = machines(conditions);
    reading.iter().chain(&machines).chain(run).map(fact).collect()
}

fn fact((name, value): &(&str, String)) -> String {
    format!("<tr><td>{name}</td><td>{value}</td></tr>")
}

/// Returns what everything ran on.
fn machines(conditions: &Conditions) -> [(&'static str, String); 3] {
    [
        (
            "Guest",
            format!(
                "{}, Linux {}, {} MiB, {} processors, under {}",
                escape(&conditions.guest_system),
                escape(&conditions.guest_kernel),
                conditions.guest_memory_mib,
                conditions.guest_cpu_count,
                escape(&conditions.accelerator)
            ),
        ),
        (
            "Machine",
            format!(
                "{}, {} processors, {}, {}, {}",
                escape(&conditions.cpu),
                conditions.cpu_count,
                bytes(conditions.memory_mib << 20),
                escape(&conditions.system),
                escape(&conditions.kernel)
            ),
        ),
        (
            "Programs",
            format!(
                "{}; {}; remoca {} ({})",
                escape(&conditions.qemu),
                escape(&conditions.nbdkit),
                escape(&conditions.remoca_version),
                escape(&conditions.commit)
            ),
        ),
    ]
}

fn footer(conditions: &Conditions) -> String {
    format!(
        "Made by <code>make demo</code> on {}. All figures are in report.json beside this page.",
        escape(&conditions.started_at)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A report of nothing still makes a page; no place of the template is left open, nothing is loaded from elsewhere.
    #[test]
    fn page_is_whole_and_alone() {
        let mut report = Report::default();
        report.problems.push("<script>".into());
        let page = render(&report);
        assert!(!page.contains("{{") && !page.contains("}}"));
        assert!(page.contains("&lt;script&gt;") && !page.contains("<script"));
        for word in ["http:", "https:", "src=", "href=", "url(", "@import"] {
            assert!(!page.contains(word), "{word}");
        }
        assert!(!page.contains("NaN") && !page.contains("inf "));
    }
}
