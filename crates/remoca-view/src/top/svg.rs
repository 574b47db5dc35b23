//! A screen as a picture, for the documentation.

use ratatui::buffer::Buffer;
use ratatui::style::{Color, Modifier};
use std::fmt::Write;

/// Size of a character, in pixels.
const WIDTH: f64 = 7.8;
const HEIGHT: f64 = 17.0;
const GROUND: &str = "#11161b";
const INK: &str = "#e6ebf0";

/// Returns the screen as an SVG picture.
#[must_use]
pub fn picture(screen: &Buffer) -> String {
    let (columns, lines) = (screen.area.width, screen.area.height);
    let (width, height) = (f64::from(columns) * WIDTH + 16.0, f64::from(lines) * HEIGHT + 16.0);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"monospace\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"{GROUND}\"/>\n"
    );
    for y in 0..lines {
        let mut x = 0;
        while x < columns {
            let from = x;
            let style = screen[(x, y)].style();
            let mut run = String::new();
            while x < columns && screen[(x, y)].style() == style {
                run += screen[(x, y)].symbol();
                x += 1;
            }
            add_run(&mut text, [from, y], &run, style.fg, style.add_modifier);
        }
    }
    text + "</svg>\n"
}

/// Adds characters of one style.
fn add_run(text: &mut String, [x, y]: [u16; 2], run: &str, color: Option<Color>, modifier: Modifier) {
    let [left, top] = [f64::from(x) * WIDTH + 8.0, f64::from(y) * HEIGHT + 8.0];
    let (length, is_reversed) = (run.chars().count() as f64 * WIDTH, modifier.contains(Modifier::REVERSED));
    if is_reversed {
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{length:.1}\" height=\"{HEIGHT}\" fill=\"{INK}\"/>"
        );
    }
    if run.trim().is_empty() {
        return;
    }
    let color = if is_reversed { GROUND } else { hex(color) };
    let weight = if modifier.contains(Modifier::BOLD) { " font-weight=\"bold\"" } else { "" };
    let run = run.replace('&', "&amp;").replace('<', "&lt;");
    let baseline = top + 13.0;
    let _ = writeln!(
        text,
        "<text x=\"{left:.1}\" y=\"{baseline:.1}\" fill=\"{color}\"{weight} textLength=\"{length:.1}\" xml:space=\"preserve\">{run}</text>"
    );
}

fn hex(color: Option<Color>) -> &'static str {
    match color {
        Some(Color::Red) => "#ff8a80",
        Some(Color::Yellow) => "#f2b45c",
        Some(Color::Green) => "#7bd39b",
        Some(Color::Cyan) => "#7db6f2",
        Some(Color::DarkGray) => "#9aa7b4",
        _ => INK,
    }
}
