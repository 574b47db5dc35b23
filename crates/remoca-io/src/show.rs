//! Sizes as people read them: in status, messages and logs.

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
