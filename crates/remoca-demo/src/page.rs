//! The report for people: one HTML file with nothing outside it. The words and the style are in `page.html`.

use std::{fmt::Write, fs, path::Path};

use anyhow::{Context, Result};

use crate::{
    analysis::{ReadFigures, ratio},
    chart::{Panel, Picture, Scale, decades, escape, ticks},
    conditions::Conditions,
    report::{Evictions, PhaseFigures, Report, Sources},
};

const TEMPLATE: &str = include_str!("page.html");
const WIDTH: f64 = 990.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;

/// Writes `report.json` and `report.html` into the folder.
pub fn write(report: &Report, out: &Path) -> Result<()> {
    let json = serde_json::to_string_pretty(report).context("the report cannot be written as JSON")?;
    for (name, text) in [("report.json", json), ("report.html", render(report))] {
        let path = out.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The report of an earlier run.
pub fn read(out: &Path) -> Result<Report> {
    let path = out.join("report.json");
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

/// Three panels with the same axis of latency: the shares of reads without and with the cache, and both summed up.
fn latency_chart(report: &Report) -> String {
    let runs = [
        ("without the cache", "disk-line", &report.baseline.measured.vm),
        ("with the cache", "remote-line", &report.cached.run.measured.vm),
    ];
    let x = decades(runs.iter().flat_map(|(_, _, vm)| vm.histogram.iter().map(|bin| bin.0)));
    let bars = runs.map(|(_, _, vm)| latency_bars(vm));
    let tallest = bars.iter().flatten().map(|bar| bar.cache_share + bar.disk_share).fold(0.05, f64::max);
    let (height, gap) = (120.0, 34.0);
    let mut picture = Picture::new(WIDTH, 3.0 * (height + gap) + 24.0);
    let panel = |index: u32, top: f64| Panel {
        left: LEFT,
        top: gap + f64::from(index) * (height + gap),
        width: WIDTH - LEFT - RIGHT,
        height,
        x,
        y: Scale::Linear { from: 0.0, to: top },
    };
    for ((index, (name, _, vm)), bars) in (0..).zip(runs).zip(&bars) {
        let panel = panel(index, tallest * 1.08);
        picture.y_axis(&panel, &ticks(tallest * 1.08, 3.0), |tick| format!("{:.0} %", tick * 100.0));
        bars.iter().for_each(|bar| bar.draw(&mut picture, &panel));
        let mean = panel.x_at(vm.mean_read_ms);
        picture.line((mean, panel.top - 5.0), (mean, panel.top + height), "mean");
        picture.text(mean, panel.top - 10.0, "middle", "mark", &format!("mean {}", ms(vm.mean_read_ms)));
        picture.text(LEFT, panel.top - 10.0, "start", "label", name);
        picture.x_axis(&panel, &[], ms);
    }
    let panel = panel(2, 1.0);
    picture.y_axis(&panel, &[0.0, 0.5, 1.0], |tick| format!("{:.0} %", tick * 100.0));
    for (_, class, vm) in runs {
        picture.curve(&panel, &cumulated(vm), class);
    }
    picture.text(LEFT, panel.top - 10.0, "start", "label", "reads done within that time, of both");
    picture.x_axis(&panel, &decade_ticks(x), tick_ms);
    let key = key_line(&[
        ("c-remote", "from the memory server (curve: with the cache)"),
        ("c-disk", "from the disk (curve: without)"),
    ]);
    picture.finish("Distribution of read latencies without and with the cache") + &key
}

/// The reads of some latency.
struct LatencyBar {
    lower_ms: f64,
    upper_ms: f64,
    from_cache: u64,
    from_disk: u64,
    cache_share: f64,
    disk_share: f64,
}

/// Ten bars to the decade, each two bins of the histogram.
fn latency_bars(vm: &ReadFigures) -> Vec<LatencyBar> {
    let mut bars: Vec<LatencyBar> = Vec::new();
    for &(upper, from_cache, from_disk) in &vm.histogram {
        // A little less than the bin's upper end, so that rounding does not put it into the next bar.
        let exponent = (upper.log10() * 10.0 - 0.1).floor();
        let (lower_ms, upper_ms) = (10f64.powf(exponent / 10.0), 10f64.powf((exponent + 1.0) / 10.0));
        if bars.last().is_none_or(|bar| bar.lower_ms < lower_ms) {
            bars.push(LatencyBar {
                lower_ms,
                upper_ms,
                from_cache: 0,
                from_disk: 0,
                cache_share: 0.0,
                disk_share: 0.0,
            });
        }
        if let Some(bar) = bars.last_mut() {
            bar.from_cache += from_cache;
            bar.from_disk += from_disk;
            bar.cache_share = ratio(bar.from_cache, vm.reads);
            bar.disk_share = ratio(bar.from_disk, vm.reads);
        }
    }
    bars
}

impl LatencyBar {
    fn draw(&self, picture: &mut Picture, panel: &Panel) {
        let (left, right) = (panel.x_at(self.lower_ms), panel.x_at(self.upper_ms));
        let (cache, all) = (panel.y_at(self.cache_share), panel.y_at(self.cache_share + self.disk_share));
        let (width, bottom) = ((right - left - 1.0).max(1.0), panel.y_at(0.0));
        let span = format!("{} to {}", ms(self.lower_ms), ms(self.upper_ms));
        if self.from_cache > 0 {
            let tip = format!("{span}: {} reads from the memory server", thousands(self.from_cache));
            picture.rect(left, cache, width, bottom - cache, "remote", &tip);
        }
        if self.from_disk > 0 {
            let tip = format!("{span}: {} reads from the disk", thousands(self.from_disk));
            picture.rect(left, all, width, cache - all, "disk", &tip);
        }
    }
}

/// The share of reads that take no longer, by latency.
fn cumulated(vm: &ReadFigures) -> Vec<(f64, Option<f64>)> {
    let mut seen = 0;
    let mut points = vec![(0.0, Some(0.0))];
    for &(upper, from_cache, from_disk) in &vm.histogram {
        let lower = upper / 10f64.powf(0.05);
        points.push((lower, Some(ratio(seen, vm.reads))));
        seen += from_cache + from_disk;
        points.push((upper, Some(ratio(seen, vm.reads))));
    }
    points.push((f64::MAX, Some(if vm.reads > 0 { 1.0 } else { 0.0 })));
    points
}

fn decade_ticks(scale: Scale) -> Vec<f64> {
    let (Scale::Log { from, to } | Scale::Linear { from, to }) = scale;
    let mut ticks = vec![from];
    while let Some(&last) = ticks.last()
        && last * 10.0 <= to * 1.001
    {
        ticks.push(last * 10.0);
    }
    ticks
}

/// Three panels over one time axis: hit ratio, mean latency, memory in use.
fn time_chart(report: &Report) -> String {
    let timeline = &report.timeline;
    let x = Scale::Linear { from: 0.0, to: timeline.end_s };
    let heights = [150.0, 92.0, 92.0];
    let (first, gap) = (46.0, 34.0);
    let mut top = first;
    let mut picture = Picture::new(WIDTH, first + heights.iter().sum::<f64>() + gap * 2.0 + 30.0);
    let mut panel = |height: f64, y: Scale| {
        let panel = Panel { left: LEFT, top, width: WIDTH - LEFT - RIGHT, height, x, y };
        top += height + gap;
        panel
    };
    let latencies = timeline.bins.iter().filter_map(|bin| bin.mean_read_ms);
    let latency_top = latencies.fold(report.t_disk_ms, f64::max).min(report.t_disk_ms * 2.5) * 1.1;
    let used_top = (report.conditions.cache_bytes as f64 / GIB).max(0.01);
    let panels = [
        panel(heights[0], Scale::Linear { from: 0.0, to: 1.0 }),
        panel(heights[1], Scale::Linear { from: 0.0, to: latency_top }),
        panel(heights[2], Scale::Linear { from: 0.0, to: used_top }),
    ];
    for panel in &panels {
        picture.span(panel, timeline.measured_from_s, timeline.measured_to_s, "shade");
        picture.span(panel, timeline.killed_s, timeline.restarted_s, "away");
    }
    let [hits, latency, used] = &panels;
    picture.y_axis(hits, &[0.0, 0.25, 0.5, 0.75, 1.0], |tick| format!("{:.0} %", tick * 100.0));
    picture.y_axis(latency, &ticks(latency_top, 3.0), |tick| format!("{tick} ms"));
    picture.y_axis(used, &ticks(used_top, 2.0), |tick| format!("{tick} GiB"));
    let points = |pick: fn(&crate::analysis::Bin) -> Option<f64>| {
        timeline.bins.iter().map(|bin| (bin.at_s, pick(bin))).collect::<Vec<_>>()
    };
    picture.area(hits, &points(|bin| bin.hit_ratio), "remote-area");
    picture.curve(hits, &points(|bin| bin.hit_ratio), "remote-line");
    picture.curve(latency, &points(|bin| bin.mean_read_ms), "disk-line");
    let without = latency.y_at(report.t_disk_ms);
    picture.line((LEFT, without), (WIDTH - RIGHT, without), "reference");
    let used_points: Vec<_> = timeline.cache_used.iter().map(|&(at, bytes)| (at, Some(bytes as f64 / GIB))).collect();
    picture.area(used, &used_points, "remote-area");
    picture.curve(used, &used_points, "remote-line");
    for panel in &panels {
        mark_moments(&mut picture, panel, report);
    }
    let names = [
        "reads answered without the disk",
        "mean read (dashed: without the cache)",
        "cache in use, as the VM process knows",
    ];
    for (panel, name) in panels.iter().zip(names) {
        picture.text(LEFT, panel.top - 9.0, "start", "label", name);
    }
    let middle = |from: f64, to: f64| hits.x_at((from + to) / 2.0);
    picture.text(middle(0.0, timeline.measured_from_s), 14.0, "middle", "hint", "warm-up");
    picture.text(middle(timeline.measured_from_s, timeline.measured_to_s), 14.0, "middle", "hint", "measured");
    picture.text(hits.x_at(timeline.killed_s) - 5.0, 14.0, "end", "badmark", "server killed");
    picture.text(hits.x_at(timeline.restarted_s) + 5.0, 14.0, "start", "mark", "started again");
    picture.x_axis(used, &ticks(timeline.end_s, 8.0), |tick| format!("{tick:.0} s"));
    picture.finish(
        "Hit ratio, mean read latency and cache in use over time, with the death and return of the memory server",
    )
}

fn mark_moments(picture: &mut Picture, panel: &Panel, report: &Report) {
    let timeline = &report.timeline;
    let moments = [
        (timeline.measured_from_s, "edge"),
        (timeline.measured_to_s, "edge"),
        (timeline.killed_s, "kill"),
        (timeline.restarted_s, "edge"),
    ];
    for (at_s, class) in moments {
        let x = panel.x_at(at_s);
        picture.line((x, panel.top), (x, panel.top + panel.height), class);
    }
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

/// The same in one line, for below a chart.
fn key_line(rows: &[(&str, &str)]) -> String {
    let rows: String = rows.iter().map(|(class, name)| format!(r#"<li><i class="{class}"></i>{name}</li>"#)).collect();
    format!(r#"<ul class="keyline">{rows}</ul>"#)
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
        ("Load average", format!("{:.2} before, {:.2} after", conditions.load_before, conditions.load_after)),
        ("Time taken", format!("{:.0} s, and {:.0} s to prepare", conditions.run_seconds, conditions.prepare_seconds)),
    ];
    facts.iter().map(|(name, value)| format!("<tr><td>{name}</td><td>{value}</td></tr>")).collect()
}

fn footer(conditions: &Conditions) -> String {
    format!(
        "Made by <code>make demo</code> on {}. All figures are in report.json beside this page.",
        escape(&conditions.started_at)
    )
}

const GIB: f64 = 1_073_741_824.0;

/// A power of ten.
fn tick_ms(value: f64) -> String {
    if value >= 999.0 {
        format!("{:.0} s", value / 1000.0)
    } else if value >= 0.99 {
        format!("{value:.0} ms")
    } else {
        format!("{:.0} \u{b5}s", value * 1000.0)
    }
}

/// Three digits, in the unit that fits; a dash for what there is none of.
fn ms(value: f64) -> String {
    if value == 0.0 {
        return "\u{2013}".into();
    }
    let (value, unit) = match value {
        value if value >= 1000.0 => (value / 1000.0, "s"),
        value if value < 0.1 => (value * 1000.0, "\u{b5}s"),
        value => (value, "ms"),
    };
    let digits = match value {
        value if value >= 99.95 || value.fract().abs() < 1e-6 => 0,
        value if value >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {unit}")
}

fn bytes(value: u64) -> String {
    let mib = value as f64 / 1_048_576.0;
    if mib >= 1024.0 { format!("{:.1} GiB", mib / 1024.0).replace(".0 ", " ") } else { format!("{mib:.0} MiB") }
}

fn percent(value: f64) -> String {
    format!("{:.1} %", value * 100.0)
}

/// Digits in groups of three.
fn thousands(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        let shown = [0.0, 0.025, 0.31, 1.0, 7.126, 12.345, 100.0, 1500.0].map(ms);
        assert_eq!(shown, ["\u{2013}", "25 \u{b5}s", "0.31 ms", "1 ms", "7.13 ms", "12.3 ms", "100 ms", "1.50 s"]);
        assert_eq!([1, 1234, 1_234_567].map(thousands), ["1", "1\u{202f}234", "1\u{202f}234\u{202f}567"]);
        assert_eq!([768 << 20, 1 << 30, 3 << 29].map(bytes), ["768 MiB", "1 GiB", "1.5 GiB"]);
    }

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
