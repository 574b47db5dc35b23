//! Hit ratios over sizes, drawn with plain characters.

use remoca_io::show::show_size;
use std::fmt::Write;

/// Lines of the chart, one for each tenth.
const LINES: u32 = 10;
/// Columns for each doubling of the size; 17 of them fit beside the scale.
const COLUMNS: usize = 4;
/// Maximum number of doublings.
const DOUBLINGS_MAX: usize = 17;

/// Returns a chart of `points`, which are sizes in ascending order with their hit ratios, from the size `first` on, on a logarithmic scale.
pub fn draw(title: &str, points: &[(u64, f64)], first: u64) -> String {
    let mut text = format!("{title}\n");
    let is_shown = |size: &u64| *size >= first && size.is_power_of_two();
    let doublings: Vec<u64> = points.iter().map(|(size, _)| *size).filter(is_shown).take(DOUBLINGS_MAX).collect();
    let columns: Vec<f64> = doublings.iter().flat_map(|size| columns(points, *size)).collect();
    for line in (1..=LINES).rev() {
        let least = (f64::from(line) - 0.5) / f64::from(LINES);
        let cells: String = columns.iter().map(|hits| if *hits >= least { '#' } else { ' ' }).collect();
        // Writing to a string does not fail.
        let _ = writeln!(text, "{:>4} |{}", line * 100 / LINES, cells.trim_end());
    }
    let _ = writeln!(text, "   0 +{}", "-".repeat(columns.len()));
    // Every second size: those of three digits would touch.
    let labels: String =
        doublings.iter().step_by(2).map(|size| format!("{:<1$}", show_size(*size), 2 * COLUMNS)).collect();
    let _ = writeln!(text, "      {}", labels.trim_end());
    text
}

/// Returns the hit ratio of each column from one doubling to the next one, where they are known in between.
fn columns(points: &[(u64, f64)], from: u64) -> Vec<f64> {
    let within = points.iter().filter(|(size, _)| (from..2 * from).contains(size));
    let mut hits: Vec<f64> = within.map(|(_, hits)| *hits).take(COLUMNS).collect();
    hits.resize(COLUMNS, hits.last().copied().unwrap_or(0.0));
    hits
}
