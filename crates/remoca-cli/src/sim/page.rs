//! The figures as a page: one HTML file that loads nothing from elsewhere.

use super::figures::Report;
use crate::size::show_size;
use maud::{Markup, html};
use remoca_page::chart::{Panel, Picture, Scale};
use remoca_page::numbers::{ms, percent, thousands};

const WIDTH: f64 = 990.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 24.0;
const HEIGHT: f64 = 260.0;
/// Maximum number of sizes that the axis of the chart names.
const TICKS_MAX: usize = 14;

/// Returns the whole page.
pub fn render(report: &Report) -> Markup {
    let trace = &report.trace;
    let content = html! {
        header {
            div.eyebrow { "remoca sim" }
            h1 { (title(report)) }
            p {
                (thousands(trace.summary.requests())) " requests of " code { (trace.file) } " (" (trace.format) "), for "
                (report.footprint()) "."
            }
        }
        section.card.hero {
            div {
                div.big { (report.gain().map_or("\u{2013}".into(), |gain| format!("{gain:.1}"))) small { "\u{2009}×" } }
                div.under {
                    "faster mean read:" br;
                    b { (time(report.mean_read_without_ms)) } " without the tiers, "
                    b { (time(report.mean_read_ms)) } " with them"
                }
            }
            div.tiles { (tiles(report)) }
        }
        (sources(report))
        (curve(report))
        section.card {
            h2 { "How to read this" }
            ul { @for note in report.notes() { li { (note) } } }
        }
    };
    remoca_page::page(&format!("remoca sim: {}", trace.file), &content)
}

fn time(value: Option<f64>) -> String {
    value.map_or("\u{2013}".into(), ms)
}

fn title(report: &Report) -> String {
    let [guest, local, remote] = [report.bytes.guest, report.bytes.local, report.bytes.remote].map(show_size);
    format!("{guest} of guest memory, a local tier of {local}, a remote one of {remote}")
}

fn tiles(report: &Report) -> Markup {
    let shares = &report.outcome.shares;
    let traffic = &report.outcome.traffic;
    let pages = |pages: u64| show_size(pages * 4096);
    let tiles = [
        (percent(shares.guest), "of the blocks read were in the guest’s memory"),
        (percent(shares.local), "came from the local tier"),
        (percent(shares.remote), "came from the remote tier"),
        (percent(shares.disk), "came from the disk"),
        (pages(traffic.sent), "sent to the remote tier"),
        (pages(traffic.fetched), "fetched from it"),
    ];
    html! {
        @for (value, name) in &tiles { div.tile { div.value { (value) } div.name { (name) } } }
    }
}

fn sources(report: &Report) -> Markup {
    let classes = ["c-guest", "c-remote", "c-extra", "c-disk"];
    html! {
        section.card {
            h2 { "Where blocks were read from" }
            div.bar {
                @for ((_, _, _, share), class) in report.places().iter().zip(classes) {
                    @if *share > 0.0 { i class=(class) style=(format!("flex:{share:.5}")) {} }
                }
            }
            ul.key {
                @for ((name, bytes, blocks, share), class) in report.places().iter().zip(classes) {
                    li {
                        i class=(class) {}
                        span { (name) @if let Some(bytes) = bytes { ", " (show_size(*bytes)) } ": " (thousands(*blocks)) " blocks" }
                        b { (percent(*share)) }
                    }
                }
            }
        }
    }
}

fn curve(report: &Report) -> Markup {
    let points = &report.outcome.curve;
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return html! {} };
    let x = Scale::Log { from: first.bytes as f64, to: (last.bytes as f64).max(first.bytes as f64 * 2.0) };
    let panel = Panel {
        left: LEFT,
        top: 14.0,
        width: WIDTH - LEFT - RIGHT,
        height: HEIGHT,
        x,
        y: Scale::Linear { from: 0.0, to: 1.0 },
    };
    let mut picture = Picture::new(WIDTH, HEIGHT + 44.0);
    picture.y_axis(&panel, &[0.0, 0.25, 0.5, 0.75, 1.0], |tick| format!("{:.0} %", tick * 100.0));
    let values: Vec<_> = points.iter().map(|point| (point.bytes as f64, Some(point.hit_ratio))).collect();
    picture.area(&panel, &values, "remote-area");
    picture.curve(&panel, &values, "remote-line");
    let sum = report.bytes.local.saturating_add(report.bytes.remote);
    for (bytes, name) in [(report.bytes.local, "local"), (sum, "both tiers")] {
        if bytes > 0 && (first.bytes..=last.bytes).contains(&bytes) {
            let at = panel.x_at(bytes as f64);
            picture.line((at, panel.top), (at, panel.top + HEIGHT), "mean");
            picture.text(at + 4.0, panel.top + 12.0, "start", "mark", name);
        }
    }
    let doublings: Vec<u64> = points.iter().map(|point| point.bytes).filter(|bytes| bytes.is_power_of_two()).collect();
    let every = doublings.len().div_ceil(TICKS_MAX).max(1);
    for bytes in doublings.iter().step_by(every) {
        let at = panel.x_at(*bytes as f64);
        picture.text(at, panel.top + HEIGHT + 18.0, "middle", "tick", &show_size(*bytes));
    }
    picture.x_axis(&panel, &[], |_| String::new());
    html! {
        section.card {
            h2 { "Hits of an LRU cache of each size" }
            p.note { "Share of the blocks that are read below the guest’s memory; the size is that of both tiers together." }
            (picture.finish("Hit ratio over the size of the cache"))
        }
    }
}
