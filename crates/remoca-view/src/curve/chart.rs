//! A curve drawn with plain characters.

use super::figures::{Figures, Row};
use remoca_io::show::show_size;
use remoca_protocol::control::CurveStatus;
use std::fmt::Write;

/// Lines of the chart, one for each tenth.
const LINES: u32 = 10;
/// Columns for each doubling of the size; 17 of them fit beside the scale.
const COLUMNS: usize = 4;

/// Returns the hit ratio over the size of the cache, on a logarithmic scale.
pub fn draw(curve: &CurveStatus, figures: &Figures) -> String {
    let of = curve.disk.as_ref().map_or(String::new(), |disk| format!(", disk {disk}"));
    let mut text = format!("Hits of {}{of} with a cache of each size, %\n", shorten(&curve.curve_of));
    let doublings: Vec<&Row> =
        figures.sizes.iter().filter(|row| row.bytes >= figures.first() && row.bytes.is_power_of_two()).collect();
    let columns = columns(figures, &doublings);
    for line in (1..=LINES).rev() {
        let least = (f64::from(line) - 0.5) / f64::from(LINES);
        let cells: String = columns.iter().map(|hits| if *hits >= least { '#' } else { ' ' }).collect();
        // Writing to a string does not fail.
        let _ = writeln!(text, "{:>4} |{}", line * 100 / LINES, cells.trim_end());
    }
    let _ = writeln!(text, "   0 +{}", "-".repeat(columns.len()));
    let labels: String = doublings.iter().map(|row| format!("{:<COLUMNS$}", show_size(row.bytes))).collect();
    let _ = writeln!(text, "      {}", labels.trim_end());
    text
}

/// Returns the hit ratio of each column: from each doubling to the next one, where they are known in between.
fn columns(figures: &Figures, doublings: &[&Row]) -> Vec<f64> {
    let mut columns = Vec::new();
    for row in doublings {
        let mut hits: Vec<f64> = figures
            .sizes
            .iter()
            .filter(|other| !other.is_present && (row.bytes..2 * row.bytes).contains(&other.bytes))
            .map(|other| other.hit_ratio)
            .take(COLUMNS)
            .collect();
        hits.resize(COLUMNS, hits.last().copied().unwrap_or(row.hit_ratio));
        columns.extend(hits);
    }
    columns
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
        assert!(lines[1].starts_with(" 100 |") && lines[12].starts_with("      64M 128M"), "{text}");
        assert_eq!(width(11), 44, "64M to 64G");
        let filled = |line: usize| lines[line].matches('#').count();
        assert!((1..10).all(|line| filled(line) < filled(line + 1) || filled(line + 1) == 44), "{text}");
        assert_eq!((filled(10), filled(1)), (44, 7));
    }
}
