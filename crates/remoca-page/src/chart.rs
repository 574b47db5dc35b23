//! Draws charts as SVG. Colours are classes of the page's style sheet, so they follow its light and dark themes.
//!
//! The chart knows nothing of what its figures mean.

use maud::{Markup, PreEscaped, html};

/// Maps values to positions on an axis: 0 is its start, 1 its end.
#[derive(Clone, Copy, Debug)]
pub enum Scale {
    Linear { from: f64, to: f64 },
    Log { from: f64, to: f64 },
}

impl Scale {
    /// Returns the position of a value. A value outside the scale is placed at the nearer end.
    pub fn place(&self, value: f64) -> f64 {
        let place = match *self {
            Scale::Linear { from, to } => (value - from) / (to - from),
            Scale::Log { from, to } => (value.max(f64::MIN_POSITIVE).ln() - from.ln()) / (to.ln() - from.ln()),
        };
        if place.is_finite() { place.clamp(0.0, 1.0) } else { 0.0 }
    }
}

/// Returns a scale of whole decades that holds all values above 0.
pub fn decades(values: impl Iterator<Item = f64>) -> Scale {
    let (mut low, mut high) = (f64::INFINITY, 0.0f64);
    for value in values.filter(|&value| value > 0.0 && value.is_finite()) {
        low = low.min(value);
        high = high.max(value);
    }
    if high == 0.0 {
        (low, high) = (1.0, 1.0);
    }
    let from = 10f64.powf(low.log10().floor());
    Scale::Log { from, to: (10f64.powf(high.log10().ceil())).max(from * 10.0) }
}

/// Returns a step for about `count` ticks: 1, 2 or 5 times a power of ten.
pub fn tick_step(span: f64, count: f64) -> f64 {
    let raw = (span / count).max(f64::MIN_POSITIVE);
    let unit = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0].into_iter().find(|step| step * unit >= raw);
    step.unwrap_or(10.0) * unit
}

/// Returns ticks from 0 up to and including `to`.
pub fn ticks(to: f64, count: f64) -> Vec<f64> {
    let step = tick_step(to, count);
    (0u32..).map(|index| f64::from(index) * step).take_while(|&tick| tick <= to * (1.0 + 1e-9)).collect()
}

/// An SVG picture under construction.
pub struct Picture {
    width: f64,
    height: f64,
    text: String,
}

/// A rectangle with axes in a picture.
#[derive(Clone, Copy, Debug)]
pub struct Panel {
    pub left: f64,
    pub top: f64,
    pub width: f64,
    pub height: f64,
    pub x: Scale,
    pub y: Scale,
}

impl Panel {
    pub fn x_at(&self, value: f64) -> f64 {
        self.left + self.width * self.x.place(value)
    }

    pub fn y_at(&self, value: f64) -> f64 {
        self.top + self.height * (1.0 - self.y.place(value))
    }

    fn bottom(&self) -> f64 {
        self.top + self.height
    }
}

impl Picture {
    pub fn new(width: f64, height: f64) -> Picture {
        Picture { width, height, text: String::new() }
    }

    /// Returns the finished SVG. `label` is for screen readers.
    pub fn finish(self, label: &str) -> Markup {
        let Picture { width, height, text } = self;
        html! { svg viewBox=(format_args!("0 0 {width} {height}")) role="img" aria-label=(label) { (PreEscaped(text)) } }
    }

    fn add(&mut self, element: Markup) {
        self.text += &element.0;
        self.text.push('\n');
    }

    /// Adds a text. `anchor` is "start", "middle" or "end".
    pub fn text(&mut self, x: f64, y: f64, anchor: &str, class: &str, text: &str) {
        self.add(html! { text x=(tenths(x)) y=(tenths(y)) text-anchor=(anchor) class=(class) { (text) } });
    }

    /// Adds a line.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), class: &str) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.add(html! { line x1=(tenths(x1)) y1=(tenths(y1)) x2=(tenths(x2)) y2=(tenths(y2)) class=(class) {} });
    }

    /// Adds a rectangle between two values of the x axis, over the panel's whole height.
    pub fn span(&mut self, panel: &Panel, from: f64, to: f64, class: &str) {
        let (left, right) = (panel.x_at(from), panel.x_at(to));
        self.rect(left, panel.top, right - left, panel.height, class, "");
    }

    /// Adds a rectangle. `tip` is shown when the pointer rests on it; an empty one is not shown.
    pub fn rect(&mut self, x: f64, y: f64, width: f64, height: f64, class: &str, tip: &str) {
        let [x, y, width, height] = [x, y, width.max(0.0), height.max(0.0)].map(|value| format!("{value:.2}"));
        self.add(html! {
            rect x=(x) y=(y) width=(width) height=(height) class=(class) { @if !tip.is_empty() { title { (tip) } } }
        });
    }

    /// Adds grid lines and numbers of the y axis.
    pub fn y_axis(&mut self, panel: &Panel, ticks: &[f64], label: impl Fn(f64) -> String) {
        for &tick in ticks {
            let y = panel.y_at(tick);
            self.line((panel.left, y), (panel.left + panel.width, y), "grid");
            self.text(panel.left - 8.0, y + 4.0, "end", "tick", &label(tick));
        }
    }

    /// Adds the base line and the numbers of the x axis.
    pub fn x_axis(&mut self, panel: &Panel, ticks: &[f64], label: impl Fn(f64) -> String) {
        let bottom = panel.bottom();
        self.line((panel.left, bottom), (panel.left + panel.width, bottom), "axis");
        for &tick in ticks {
            let x = panel.x_at(tick);
            self.line((x, bottom), (x, bottom + 4.0), "axis");
            self.text(x, bottom + 18.0, "middle", "tick", &label(tick));
        }
    }

    /// Adds a curve through the points. It is interrupted where a value is missing.
    pub fn curve(&mut self, panel: &Panel, points: &[(f64, Option<f64>)], class: &str) {
        for run in runs(points) {
            let path = path(panel, &run);
            self.add(html! { path d={ "M" (path) } class=(class) {} });
        }
    }

    /// Adds the area below the points.
    pub fn area(&mut self, panel: &Panel, points: &[(f64, Option<f64>)], class: &str) {
        for run in runs(points) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
            let (from, to, bottom) = (panel.x_at(first.0), panel.x_at(last.0), panel.bottom());
            let path = format!("M{from:.1} {bottom:.1}L{}L{to:.1} {bottom:.1}Z", path(panel, &run));
            self.add(html! { path d=(path) class=(class) {} });
        }
    }
}

fn path(panel: &Panel, points: &[(f64, f64)]) -> String {
    let points: Vec<_> = points.iter().map(|&(x, y)| format!("{:.1} {:.1}", panel.x_at(x), panel.y_at(y))).collect();
    points.join("L")
}

/// Splits points into stretches without missing values.
fn runs(points: &[(f64, Option<f64>)]) -> Vec<Vec<(f64, f64)>> {
    let stretches = points.split(|(_, value)| value.is_none());
    let known = stretches.map(|run| run.iter().filter_map(|&(x, y)| Some((x, y?))).collect::<Vec<_>>());
    known.filter(|run| !run.is_empty()).collect()
}

/// Returns a coordinate, rounded to the digits that are visible.
fn tenths(value: f64) -> String {
    format!("{value:.1}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_place_values_and_keep_them_inside() {
        let log = Scale::Log { from: 0.1, to: 10.0 };
        assert!((log.place(1.0) - 0.5).abs() < 1e-9);
        assert_eq!([log.place(0.0), log.place(1e9), log.place(f64::NAN)], [0.0, 1.0, 0.0]);
        assert_eq!(Scale::Linear { from: 0.0, to: 0.0 }.place(0.0), 0.0, "an empty axis is no reason to fail");
    }

    #[test]
    fn axes_fit_their_values() {
        let Scale::Log { from, to } = decades([0.3, 42.0].into_iter()) else { panic!() };
        assert!((from - 0.1).abs() < 1e-9 && (to - 100.0).abs() < 1e-9);
        assert!(matches!(decades([0.0].into_iter()), Scale::Log { from, to } if from < to));
        assert_eq!(ticks(100.0, 5.0), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
    }

    #[test]
    fn curves_break_where_values_are_missing() {
        let panel = Panel {
            left: 0.0,
            top: 0.0,
            width: 10.0,
            height: 10.0,
            x: Scale::Linear { from: 0.0, to: 3.0 },
            y: Scale::Linear { from: 0.0, to: 1.0 },
        };
        let mut picture = Picture::new(10.0, 10.0);
        picture.curve(&panel, &[(0.0, Some(0.0)), (1.0, None), (2.0, Some(1.0)), (3.0, Some(1.0))], "c");
        assert_eq!(picture.text.lines().count(), 2);
        assert!(picture.text.contains("M6.7 0.0L10.0 0.0"), "{}", picture.text);
        let svg = picture.finish(r#"a "b" <c>"#).into_string();
        assert!(svg.contains("a &quot;b&quot; &lt;c&gt;") && svg.ends_with("</svg>"));
    }
}
