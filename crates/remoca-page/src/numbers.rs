//! Formats numbers for the page.

/// Bytes of a GiB.
pub const GIB: f64 = 1_073_741_824.0;

/// Formats a power of ten, in milliseconds, for an axis.
pub fn tick_ms(value: f64) -> String {
    if value >= 999.0 {
        format!("{:.0} s", value / 1000.0)
    } else if value >= 0.99 {
        format!("{value:.0} ms")
    } else {
        format!("{:.0} \u{b5}s", value * 1000.0)
    }
}

/// Formats milliseconds with three digits in the unit that fits. 0 becomes a dash, which stands for no value.
pub fn ms(value: f64) -> String {
    if value == 0.0 {
        return "\u{2013}".into();
    }
    let (value, unit) = match value {
        value if value >= 1000.0 => (value / 1000.0, "s"),
        value if value < 0.1 => (value * 1000.0, "\u{b5}s"),
        value => (value, "ms"),
    };
    let digits = match value {
        value if value >= 99.95 || value.fract().abs() < 1e-6 => 0,
        value if value >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {unit}")
}

/// Formats a number of bytes in MiB or GiB.
pub fn bytes(value: u64) -> String {
    let mib = value as f64 / 1_048_576.0;
    if mib >= 1024.0 { format!("{:.1} GiB", mib / 1024.0).replace(".0 ", " ") } else { format!("{mib:.0} MiB") }
}

/// Formats a share as a percentage.
pub fn percent(value: f64) -> String {
    format!("{:.1} %", value * 100.0)
}

/// Formats a count with its digits in groups of three.
pub fn thousands(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        let shown = [0.0, 0.025, 0.31, 1.0, 7.126, 12.345, 100.0, 1500.0].map(ms);
        assert_eq!(shown, ["\u{2013}", "25 \u{b5}s", "0.31 ms", "1 ms", "7.13 ms", "12.3 ms", "100 ms", "1.50 s"]);
        assert_eq!(
            [0.01, 0.1, 1.0, 100.0, 1000.0].map(tick_ms),
            ["10 \u{b5}s", "100 \u{b5}s", "1 ms", "100 ms", "1 s"]
        );
        assert_eq!([1, 1234, 1_234_567].map(thousands), ["1", "1\u{202f}234", "1\u{202f}234\u{202f}567"]);
        assert_eq!([768 << 20, 1 << 30, 3 << 29].map(bytes), ["768 MiB", "1 GiB", "1.5 GiB"]);
    }
}
