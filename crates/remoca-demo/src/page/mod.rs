//! The report as a page: one HTML file that loads nothing from elsewhere.

mod charts;
mod figures;
mod tiers;

use std::{fs, path::Path};

use anyhow::{Context, Result};
use charts::{latency_chart, time_chart};
use maud::{Markup, html};
use remoca_page::numbers::{bytes, ms, percent, thousands};

use crate::{
    analysis::ratio,
    conditions::Conditions,
    report::{Evictions, Expectation, PhaseFigures, REPORT_NAMES, Report, Sources},
};

/// Writes `report.json` and `report.html` into the folder.
pub fn write(report: &Report, out: &Path) -> Result<()> {
    let json = serde_json::to_string_pretty(report).context("cannot write the report as JSON")?;
    for (name, text) in REPORT_NAMES.into_iter().zip([json, render(report).into_string()]) {
        let path = out.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Reads the report of an earlier run.
pub fn read(out: &Path) -> Result<Report> {
    let path = out.join(REPORT_NAMES[0]);
    let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is not a report of this program", path.display()))
}

/// Returns the whole page.
fn render(report: &Report) -> Markup {
    let conditions = &report.conditions;
    let content = html! {
        header {
            div.eyebrow { "remoca demonstration" }
            h1 { (title(report)) }
            p { (lead(conditions)) }
        }
        (problems(report))
        (hero(report))
        (latencies(report))
        (over_time(report))
        div.pair {
            (sources(report))
            (evictions(&report.evictions))
        }
        (expectations(report))
        @if let Some(in_tiers) = &report.tiers { (tiers::section(report, in_tiers)) }
        (figures::figures(report))
        (figures::facts(conditions))
        (method(report))
        footer {
            "Made by " code { "make demo" } " on " (conditions.started_at)
            ". All figures are in report.json beside this page."
        }
    };
    remoca_page::page(&format!("remoca demonstration: {} times faster reads", speedup(report)), &content)
}

fn speedup(report: &Report) -> String {
    format!("{:.1}", report.speedup)
}

fn title(report: &Report) -> Markup {
    let cache = bytes(report.conditions.cache_bytes);
    html! {
        @if report.speedup > 1.05 {
            "With " (cache) " of another process’s memory, a disk read takes " (ms(report.cached.run.mean_read_ms))
            " instead of " (ms(report.baseline.mean_read_ms))
        } @else {
            (cache) " of another process’s memory did not make reads faster here"
        }
    }
}

fn lead(conditions: &Conditions) -> Markup {
    html! {
        "A guest with " (conditions.guest_memory_mib) " MiB of memory reads " (conditions.record_bytes >> 10)
        "-KiB records of a " (bytes(conditions.set_bytes)) " file set on ext4 by a zipf distribution, from a disk on which \
         each read request takes " (conditions.disk_delay_ms) " ms (" code { (conditions.disk) } "). The pages its kernel \
         evicts go to a memory server, and are read back from there."
        @if conditions.quick { " This was a quick run: its figures say little." }
    }
}

fn problems(report: &Report) -> Markup {
    html! {
        @if !report.problems.is_empty() {
            section.card.alarm {
                h2.bad { "Something went wrong" }
                ul { @for problem in &report.problems { li { (problem) } } }
            }
        }
    }
}

fn hero(report: &Report) -> Markup {
    html! {
        section.card.hero {
            div {
                div.big { (speedup(report)) small { "\u{2009}×" } }
                div.under {
                    "faster mean read at the disk:" br;
                    b { (ms(report.baseline.mean_read_ms)) } " without the cache, "
                    b { (ms(report.cached.run.mean_read_ms)) } " with it"
                }
            }
            div.tiles { (tiles(report)) }
        }
    }
}

fn tiles(report: &Report) -> Markup {
    let errors = report.verify_errors + report.guest_io_errors;
    let class = if errors == 0 { "good" } else { "bad" };
    let tiles = [
        (
            percent(report.cached.hit_ratio),
            None,
            format!("of the reads hit; an exact LRU: {}", percent(report.cached.lru_hit_ratio)),
        ),
        (
            format!("{:.2}", report.p15_ratio),
            None,
            format!("of an ideal cache’s speed-up ({:.1} ×)", report.ideal_speedup),
        ),
        (
            ms(report.t_remote_ms),
            None,
            format!("for a read from the memory server; {} from the disk", ms(report.t_disk_ms)),
        ),
        (
            percent(report.evictions.known_ratio),
            None,
            format!("of {} evicted pages known by content", thousands(report.evictions.reported)),
        ),
        (
            thousands(report.server_kill.reads_after),
            None,
            "reads after the memory server was killed, and after its return".into(),
        ),
        (thousands(errors), Some(class), "errors: wrong bytes, failed reads, complaints of the kernel".into()),
    ];
    html! {
        @for (value, class, name) in &tiles {
            div.tile {
                div.value.(class.unwrap_or_default()) { (value) }
                div.name { (name) }
            }
        }
    }
}

fn latencies(report: &Report) -> Markup {
    html! {
        section.card {
            h2 { "Latency of a read" }
            p.note {
                "Read requests as the VM process got them, from arrival to completion, in the measured part: the same record \
                 reads in both runs. The scale of latency is logarithmic."
            }
            (latency_chart(report))
        }
    }
}

fn over_time(report: &Report) -> Markup {
    let kill = &report.server_kill;
    html! {
        section.card {
            h2 { "Hit ratio over time" }
            p.note {
                "The run with the cache, second by second. It starts with an empty cache, so the warm-up reads each record \
                 from the disk once. Then the memory server is killed (SIGKILL) while the guest reads on, and started again \
                 empty after " (format!("{:.0}", kill.seconds_away)) " s: " (thousands(kill.reads_after))
                " reads of the guest’s disk and " (kill.io_errors + kill.verify_errors)
                " errors later the hit ratio is at " (percent(kill.hit_ratio_end)) " again."
            }
            (time_chart(report))
        }
    }
}

fn sources(report: &Report) -> Markup {
    let (base, cached) = (&report.baseline.measured, &report.cached.run.measured);
    let both = |pick: fn(&Sources) -> u64| {
        let share = |sources: &Sources| {
            percent(ratio(pick(sources), sources.guest_page_cache + sources.remote_memory + sources.disk))
        };
        format!("{} → {}", share(&base.sources), share(&cached.sources))
    };
    html! {
        section.card {
            h2 { "Where the reads came from" }
            p.note {
                "Of the " (thousands(report.conditions.measured_reads)) " measured record reads, by 4 KiB blocks. Lower in \
                 memory means faster: the guest’s own page cache, then the memory server, then the disk."
            }
            (source_bar("without the cache", base))
            (source_bar("with the cache", cached))
            (key(&[
                ("c-guest", "the guest’s page cache", both(|sources| sources.guest_page_cache)),
                ("c-remote", "the memory server", both(|sources| sources.remote_memory)),
                ("c-disk", "the disk", both(|sources| sources.disk)),
            ]))
        }
    }
}

fn source_bar(name: &str, phase: &PhaseFigures) -> Markup {
    let Sources { guest_page_cache, remote_memory, disk } = phase.sources;
    html! {
        div.barname { (name) span { (bytes(disk * 4096)) " from the disk" } }
        (bar(&[("c-guest", guest_page_cache), ("c-remote", remote_memory), ("c-disk", disk)]))
    }
}

fn evictions(evictions: &Evictions) -> Markup {
    let fates = [
        ("c-remote", "admitted to the cache", evictions.admitted),
        ("c-guest", "duplicate: content cached already", evictions.duplicate),
        ("c-faint", "zero: needs no memory", evictions.zero),
        ("c-extra", "dropped: no room on the way, or no server", evictions.dropped),
        ("c-disk", "passed over: older pages are worth more", evictions.passed_over),
        ("c-bad", "unmatched: content unknown", evictions.unmatched),
    ];
    html! {
        section.card {
            h2 { "Evicted pages, by fate" }
            p.note {
                "What the guest’s kernel evicted and the agent reported, until the end of the measured reads. A page is \
                 admitted only if its content is what the disk is known to hold."
            }
            div.barname {
                (thousands(evictions.reported)) " pages reported"
                span { (thousands(evictions.lost)) " lost in the guest" }
            }
            (bar(&fates.map(|(class, _, count)| (class, count))))
            (key(&fates.map(|(class, name, count)| (class, name, thousands(count)))))
        }
    }
}

fn bar(parts: &[(&str, u64)]) -> Markup {
    let all: u64 = parts.iter().map(|(_, count)| count).sum();
    html! {
        div.bar {
            @for (class, count) in parts.iter().filter(|(_, count)| *count > 0) {
                i.(class) style={ "width:" (format!("{:.3}", ratio(*count, all) * 100.0)) "%" } {}
            }
        }
    }
}

fn key(rows: &[(&str, &str, String)]) -> Markup {
    html! {
        ul.key {
            @for (class, name, value) in rows {
                li { i.(class) {} span { (name) } b { (value) } }
            }
        }
    }
}

fn expectations(report: &Report) -> Markup {
    let verdict = |expected: &Expectation| if expected.met { ("good", "met") } else { ("bad", "not met") };
    html! {
        section.card {
            h2 { "What was expected" }
            table.verdict {
                tbody {
                    tr { td {} td {} td { b { "found" } } td { b { "expected" } } }
                    @for expected in &report.expectations {
                        @let (class, verdict) = verdict(expected);
                        tr {
                            td.(class) { (verdict) }
                            td { (expected.what) }
                            td { (expected.found) }
                            td { (expected.wanted) }
                        }
                    }
                }
            }
        }
    }
}

fn method(report: &Report) -> Markup {
    html! {
        section.card {
            h2 { "How it was measured" }
            p.note {
                b { "Read latency at the disk" } " is taken in the VM process (" code { "remoca disk" } ") for every read \
                 request of the guest’s data disk, from its arrival in the queue to its completion; metadata reads of ext4 are \
                 among them. " b { "In the guest" } " it is the time a program spends in " code { "pread" } " for one record, \
                 hits in the guest’s page cache included."
            }
            p.note {
                b { "A read is a hit" } " if no part of it needed the disk. The " b { "exact LRU" } " gets every block that was \
                 read or written from the start of that run on, and holds as many as the guest’s page cache and the remoca \
                 cache together (" (thousands(report.cached.lru_pages)) " pages): what the best cache that keeps the most \
                 recent blocks, each in one place only, would have answered. " b { "The ideal speed-up" }
                " is 1 / ((1 − h) + h · t" sub { "remote" } " / t" sub { "disk" } ") with that hit ratio h, t"
                sub { "remote" } " = " (ms(report.t_remote_ms)) " (the mean hit) and t" sub { "disk" } " = "
                (ms(report.t_disk_ms)) " (the mean read without the cache)."
            }
            p.note {
                b { "Every record read is checked" } " in the guest: each 512 bytes carry a signature of their place and \
                 version. After the guests had ended, the file system was checked from outside."
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests that an empty report still makes a page, and that the page loads nothing from elsewhere.
    #[test]
    fn page_is_whole_and_alone() {
        let mut report = Report::default();
        report.problems.push("<script>".into());
        report.tiers = Some(crate::report::TierRun::default());
        let page = render(&report).into_string();
        assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>"));
        assert!(page.contains("&lt;script&gt;") && !page.contains("<script"));
        for word in ["http:", "https:", "src=", "href=", "url(", "@import"] {
            assert!(!page.contains(word), "{word}");
        }
        assert!(!page.contains("NaN") && !page.contains("inf "));
        assert!(page.contains("With a local tier"));
        report.tiers = None;
        assert!(!render(&report).into_string().contains("With a local tier"));
    }
}
