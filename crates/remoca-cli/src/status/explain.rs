//! The meanings of all columns and counters: for `remoca status --explain` and for the manual page.

use super::table::COLUMNS;
use remoca_core::engine::EngineStats;

/// Returns the names and meanings of the columns. A column that shows rates with an interval has both names.
fn columns() -> impl Iterator<Item = (String, &'static str)> {
    COLUMNS.iter().map(|column| match column.heading_of_rate {
        Some(rate) => (format!("{}, {rate}", column.heading), column.meaning),
        None => (column.heading.into(), column.meaning),
    })
}

/// Returns the names and meanings of the counters.
fn counters() -> impl Iterator<Item = (String, &'static str)> {
    EngineStats::EXPLAINED.iter().map(|(name, meaning)| ((*name).into(), meaning.trim()))
}

/// Returns the text of `remoca status --explain`.
pub fn text() -> String {
    let lines = |all: &mut dyn Iterator<Item = (String, &'static str)>| {
        all.map(|(name, meaning)| format!("  {name:<20} {meaning}\n")).collect::<String>()
    };
    format!(
        "Columns:\n{}\nCounters (-v and -o json; since the start of the program, they only grow):\n{}",
        lines(&mut columns()),
        lines(&mut counters())
    )
}

/// Returns the sections of the manual page, as roff.
pub fn manual() -> String {
    let section = |title: &str, all: &mut dyn Iterator<Item = (String, &'static str)>| {
        let lines = all.map(|(name, meaning)| format!(".TP\n\\fB{}\\fR\n{}\n", escaped(&name), escaped(meaning)));
        format!(".SH {title}\n{}", lines.collect::<String>())
    };
    section("COLUMNS", &mut columns()) + &section("COUNTERS", &mut counters())
}

/// Returns a line of roff that reads `text`.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_column_and_counter_is_explained() {
        let (text, manual) = (text(), manual());
        for (name, meaning) in columns().chain(counters()) {
            assert!(!meaning.is_empty(), "{name}");
            assert!(text.contains(&format!("  {name} ")), "{name}");
            assert!(manual.contains(&format!("\\fB{}\\fR", escaped(&name))), "{name}");
        }
        for (name, _) in EngineStats::default().named() {
            assert!(text.contains(&format!("  {name} ")), "{name}");
        }
    }
}
