//! Sizes as operators write them: `4096`, `512M`, `2G`.

pub use remoca_io::show::{exact_size, show_size};

/// Parses a size, and returns the number of bytes. Its unit may be K, M, G, T or KiB, MiB, GiB, TiB (powers of 1024), or KB,
/// MB, GB, TB (powers of 1000), as in libvirt.
///
/// # Errors
/// If the text is not a valid size; the message shows the form.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let error = || format!("`{text}` is not a size: write bytes, or a whole number with K, M, G or T, such as 512M");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match &text[digits.len()..] {
        "" | "B" => 1,
        "K" | "k" | "KiB" => 1 << 10,
        "M" | "m" | "MiB" => 1 << 20,
        "G" | "g" | "GiB" => 1 << 30,
        "T" | "t" | "TiB" => 1 << 40,
        "KB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return Err(error()),
    };
    let number: u64 = digits.parse().map_err(|_| error())?;
    number.checked_mul(unit).ok_or_else(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("2G"), Ok(2 << 30));
        for (text, bytes) in [("3KiB", 3 << 10), ("512MiB", 512 << 20), ("1T", 1 << 40), ("7k", 7 << 10)] {
            assert_eq!(parse_size(text), Ok(bytes));
        }
        for (text, bytes) in
            [("3KB", 3_000), ("512MB", 512_000_000), ("2GB", 2_000_000_000), ("1TB", 1_000_000_000_000)]
        {
            assert_eq!(parse_size(text), Ok(bytes));
        }
        for bad in ["", "G", "-1", "1.5G", "1X", "99999999T", "1 G"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        for (bytes, text) in [(0, "0"), (1536 << 20, "1536M"), (3 << 30, "3G"), (4097, "4097")] {
            assert_eq!((exact_size(bytes).as_str(), parse_size(text)), (text, Ok(bytes)));
        }
        assert_eq!(show_size(0), "0B");
        assert_eq!(show_size(1536 << 20), "1.5G");
        assert_eq!(show_size(64 << 20), "64M");
    }
}
