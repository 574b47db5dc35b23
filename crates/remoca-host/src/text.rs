//! Texts in reports. Those of VM processes and monitors get into the record, which has 4 MiB at most.

use std::time::Duration;

/// Maximum length of such a text, in characters.
pub const CHARACTERS_MAX: usize = 400;

/// Returns the beginning of a text, or all of a short one.
#[must_use]
pub fn shortened(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(CHARACTERS_MAX) {
        text.truncate(end);
    }
    text
}

/// Returns a time that is left as text, rounded up: in seconds within the last minute, else in minutes.
#[must_use]
pub fn time_left(left: Duration) -> String {
    match left.as_millis().div_ceil(1000) {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds => format!("{} min", seconds.div_ceil(60)),
    }
}

/// Returns for how long somebody is not asked again.
#[must_use]
pub fn not_asked_for(left: Duration) -> String {
    format!("the daemon does not ask it again for {}", time_left(left))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_is_left_is_never_too_short() {
        let texts = [0, 1, 59_000, 59_001, 60_000, 60_001, 600_000].map(|ms| time_left(Duration::from_millis(ms)));
        assert_eq!(texts, ["0 s", "1 s", "59 s", "1 min", "1 min", "2 min", "10 min"]);
        assert_eq!(not_asked_for(Duration::from_secs(540)), "the daemon does not ask it again for 9 min");
    }
}
