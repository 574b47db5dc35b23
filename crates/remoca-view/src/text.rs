//! Figures as text for people: shares, times, rates.

use remoca_io::show::show_size;

/// Returns a share as a percentage, or `-` if there is none.
pub fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.1}", share * 100.0))
}

/// Returns a number of microseconds, or `-` if there is none.
pub fn micros(us: Option<f64>) -> String {
    us.map_or("-".into(), |us| format!("{us:.0}"))
}

/// Returns a number of microseconds as milliseconds, such as `0.21 ms`.
pub fn milliseconds(us: f64) -> String {
    let ms = us / 1000.0;
    if ms < 9.95 { format!("{ms:.2} ms") } else { format!("{ms:.0} ms") }
}

/// Returns a number of events for each second, with a decimal if there are few.
pub fn rate(each_second: f64) -> String {
    if each_second > 0.0 && each_second < 9.95 { format!("{each_second:.1}") } else { format!("{each_second:.0}") }
}

/// Returns the beginning of a text that somebody else has said, in one line and fit for a terminal.
#[must_use]
pub fn one_line(text: &str, most_chars: usize) -> String {
    let line: String = text.chars().take(most_chars).map(|c| if c.is_control() { ' ' } else { c }).collect();
    line.trim().to_owned()
}

/// Returns a number of which one decimal is shown: 0 if it is next to nothing, which would be shown as -0.0.
#[must_use]
pub fn tenths(number: f64) -> f64 {
    if number.abs() < 0.05 { 0.0 } else { number }
}

/// Returns a number of things, such as `1 page` or `3 pages`.
#[must_use]
pub fn count_of(count: u64, thing: &str) -> String {
    let end = if count == 1 { "" } else { "s" };
    format!("{count} {thing}{end}")
}

/// Returns a number of bytes for each second, such as `1.5M`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rates are positive, and show_size rounds anyway"
)]
pub fn size_of_rate(each_second: f64) -> String {
    show_size(each_second as u64)
}

/// Returns a time in seconds with two digits or more and a unit, such as `120ms`, `4.2s` or `-3.5h`.
pub fn show_seconds(seconds: f64) -> String {
    let (magnitude, sign) = (seconds.abs(), if seconds < 0.0 { "-" } else { "" });
    let (value, unit) = match magnitude {
        ..0.0005 => return "0s".into(),
        ..0.9995 => return format!("{sign}{:.0}ms", magnitude * 1e3),
        ..120.0 => (magnitude, "s"),
        ..7200.0 => (magnitude / 60.0, "m"),
        ..172_800.0 => (magnitude / 3600.0, "h"),
        _ => (magnitude / 86_400.0, "d"),
    };
    let digits = usize::from(value < 9.95);
    format!("{sign}{value:.digits$}{unit}")
}

/// Returns the time of day, in UTC, of a time in seconds since 1970.
pub fn show_time(s: u64) -> String {
    format!("{:02}:{:02}:{:02}Z", s / 3600 % 24, s / 60 % 60, s % 60)
}

/// Returns the day and the time of day, in UTC, of a time in seconds since 1970.
pub fn show_date(s: u64) -> String {
    // Years here begin in March: the day that may be missing is the last one. 719,468 days are those from March of the year 0 to 1970.
    let days = s / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (year, month) = (era * 400 + year_of_era + month / 10, (month + 2) % 12 + 1);
    format!("{year:04}-{month:02}-{day:02}T{}", show_time(s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_rates_have_a_few_digits() {
        let times = [0.0, 0.0421, 0.9999, 4.21, 60.0, 400.0, -12_600.0, 1e6].map(show_seconds);
        assert_eq!(times, ["0s", "42ms", "1.0s", "4.2s", "60s", "6.7m", "-3.5h", "12d"]);
        assert_eq!([0.0, 0.26, 9.96, 1234.5].map(rate), ["0", "0.3", "10", "1234"]);
        assert_eq!(show_time(1_700_000_000), "22:13:20Z");
    }

    #[test]
    fn what_others_say_is_one_line_without_commands() {
        assert_eq!(one_line(" a\r\n\u{1b}[2J\u{9b}b ", 8), "a   [2J");
    }

    #[test]
    fn next_to_nothing_is_shown_without_a_sign() {
        assert_eq!([-0.049, 0.049, -0.051].map(|number| format!("{:.1}", tenths(number))), ["0.0", "0.0", "-0.1"]);
    }

    #[test]
    fn one_thing_is_said_as_one() {
        assert_eq!([0, 1, 2].map(|count| count_of(count, "page")), ["0 pages", "1 page", "2 pages"]);
    }

    #[test]
    fn days_are_those_of_the_calendar() {
        for (s, shown) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_700_000_000, "2023-11-14T22:13:20Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(show_date(s), shown);
        }
    }
}
