//! A curve drawn with plain characters.

use super::figures::{Figures, Row};
use crate::chart;
use remoca_protocol::control::CurveStatus;

/// Returns the hit ratio over the size of the cache, on a logarithmic scale.
pub fn draw(curve: &CurveStatus, figures: &Figures) -> String {
    let of = curve.disk.as_ref().map_or(String::new(), |disk| format!(", disk {disk}"));
    let title = format!("Hits of {}{of} with a cache of each size, %", shorten(&curve.curve_of));
    let doubling = |row: &&Row| !row.is_present || row.bytes.is_power_of_two();
    let points: Vec<(u64, f64)> = figures.sizes.iter().filter(doubling).map(|row| (row.bytes, row.hit_ratio)).collect();
    chart::draw(&title, &points, figures.first())
}

fn shorten(name: &str) -> String {
    const CHARACTERS_MAX: usize = 24;
    name.chars().take(CHARACTERS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::curve;

    #[test]
    fn more_hits_are_higher_columns() {
        let curve = curve();
        let text = draw(&curve, &Figures::of(&curve, None, 1.0));
        let lines: Vec<&str> = text.lines().collect();
        let width = |line: usize| lines[line].len() - "  10 |".len();
        assert_eq!(lines.len(), 13);
        assert!(lines[1].starts_with(" 100 |") && lines[12].starts_with("      64M     256M"), "{text}");
        assert_eq!(width(11), 44, "64M to 64G");
        let filled = |line: usize| lines[line].matches('#').count();
        assert!((1..10).all(|line| filled(line) < filled(line + 1) || filled(line + 1) == 44), "{text}");
        assert_eq!((filled(10), filled(1)), (44, 7));
    }
}
