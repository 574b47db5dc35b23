//! The two charts of the page: latencies, and the run over time.

use maud::{Markup, html};

use crate::{
    analysis::{Bin, ReadFigures, ratio},
    report::Report,
};
use remoca_page::chart::{Panel, Picture, Scale, decades, ticks};
use remoca_page::numbers::{GIB, ms, thousands, tick_ms};

const WIDTH: f64 = 990.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;

/// Returns three panels over one latency axis: shares of reads without and with the cache, and both cumulated.
pub fn latency_chart(report: &Report) -> Markup {
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
    html! { (picture.finish("Distribution of read latencies without and with the cache")) (key) }
}

/// Reads of similar latency, as one bar.
struct LatencyBar {
    lower_ms: f64,
    upper_ms: f64,
    from_cache: u64,
    from_disk: u64,
    cache_share: f64,
    disk_share: f64,
}

/// Returns ten bars per decade. Each bar covers two bins of the histogram.
fn latency_bars(vm: &ReadFigures) -> Vec<LatencyBar> {
    let mut bars: Vec<LatencyBar> = Vec::new();
    for &(upper, from_cache, from_disk) in &vm.histogram {
        // Slightly below the bin's upper end, so that rounding does not move it to the next bar.
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

/// Returns the share of reads that take at most a given latency, as a curve.
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

/// Returns three panels over one time axis: hit ratio, mean latency, memory in use.
pub fn time_chart(report: &Report) -> Markup {
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
    let points =
        |pick: fn(&Bin) -> Option<f64>| timeline.bins.iter().map(|bin| (bin.at_s, pick(bin))).collect::<Vec<_>>();
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

/// Returns a legend in one line, to be placed below a chart.
fn key_line(rows: &[(&str, &str)]) -> Markup {
    html! { ul.keyline { @for (class, name) in rows { li { i.(class) {} (name) } } } }
}
