//! Sizes as people read them, in status, messages and logs, and as commands take them; and reasons as sentences.

/// Returns a size as text with at most four digits and a unit, such as `1.5G`.
#[must_use]
pub fn show_size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "K", "M", "G", "T"];
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 10.0 && value.fract() > 0.05);
    format!("{value:.digits$}{}", UNITS[unit])
}

/// Returns a text with a mark at its end. A reason may be a question already.
#[must_use]
pub fn sentence(text: &str) -> String {
    if text.ends_with(['.', '?']) { text.into() } else { format!("{text}.") }
}

/// Returns a size as text that commands and files take, and read back exactly: with the largest unit that divides it.
#[must_use]
pub fn exact_size(bytes: u64) -> String {
    let units = [("T", 40), ("G", 30), ("M", 20), ("K", 10)];
    let unit = units.into_iter().find(|(_, shift)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    unit.map_or_else(|| bytes.to_string(), |(unit, shift)| format!("{}{unit}", bytes >> shift))
}
