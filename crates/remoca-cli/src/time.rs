//! Times as operators write them: `500ms`, `60s`, `5m`, `1h`.

use std::time::Duration;

/// Parses a time of at most a month.
///
/// # Errors
/// If the text is not such a time; the message shows the form.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    const MONTH_MS: u64 = 31 * 24 * 3_600_000;
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let ms_per_unit = match &text[number.len()..] {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(format!("`{text}` is not a time: write a whole number with ms, s, m or h, such as 60s")),
    };
    let number: u64 = number.parse().map_err(|_| format!("`{text}` is not a time: it begins with a whole number"))?;
    let ms = number.checked_mul(ms_per_unit).filter(|ms| *ms <= MONTH_MS);
    ms.map(Duration::from_millis).ok_or_else(|| format!("`{text}` is longer than a month"))
}
