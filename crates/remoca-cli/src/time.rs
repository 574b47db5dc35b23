//! Times as operators write them: `500ms`, `60s`, `5m`, `1h`; intervals of a screen are whole seconds.

use crate::number::whole_in;
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

/// Parses an interval in whole seconds, of at most an hour.
///
/// # Errors
/// If the text is not such a number; the message shows the range.
pub fn parse_seconds_of_hour(text: &str) -> Result<u32, String> {
    parse_seconds(text, 3600)
}

/// Parses an interval in whole seconds, of at most a day.
///
/// # Errors
/// If the text is not such a number; the message shows the range.
pub fn parse_seconds_of_day(text: &str) -> Result<u32, String> {
    parse_seconds(text, 86_400)
}

fn parse_seconds(text: &str, most: u32) -> Result<u32, String> {
    whole_in("number of seconds", 1..=most)(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_a_whole_number_of_seconds() {
        assert_eq!((parse_seconds_of_hour("3600"), parse_seconds_of_day("86400")), (Ok(3600), Ok(86_400)));
        for wrong in ["0.1", "0", "3601", "-1", "5s", ""] {
            let error = parse_seconds_of_hour(wrong).unwrap_err();
            assert_eq!(error, format!("`{wrong}` is not a whole number of seconds from 1 to 3600"));
        }
        assert!(parse_seconds_of_day("86401").unwrap_err().ends_with("from 1 to 86400"));
    }
}
