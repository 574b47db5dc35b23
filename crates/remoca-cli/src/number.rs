//! Whole numbers as operators write them.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Parses a whole number.
///
/// # Errors
/// If the text is none, or it is too large.
pub fn parse_whole<N: FromStr>(text: &str) -> Result<N, String> {
    text.parse().map_err(|_| format!("`{text}` is not a whole number from 0 on, or is too large"))
}

/// Returns the parser of whole numbers of a range. `what` says what they are, such as "number of seconds".
pub fn whole_in<N>(
    what: &'static str,
    range: RangeInclusive<N>,
) -> impl Fn(&str) -> Result<N, String> + Clone + Send + Sync + 'static
where
    N: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text: &str| {
        let error = || format!("`{text}` is not a whole {what} from {} to {}", range.start(), range.end());
        text.parse().ok().filter(|number: &N| range.contains(number)).ok_or_else(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arguments;
    use clap::Parser;

    #[test]
    fn numbers_of_a_range_are_accepted_with_its_ends() {
        let parse = whole_in("number", 1_u64..=4096);
        assert_eq!((parse("1"), parse("4096"), parse_whole("7")), (Ok(1), Ok(4096), Ok(7_u32)));
        assert_eq!(parse("4097").unwrap_err(), "`4097` is not a whole number from 1 to 4096");
        assert!(parse_whole::<u32>("4294967296").unwrap_err().ends_with("or is too large"));
    }

    #[test]
    fn a_refused_number_of_the_command_line_is_answered_with_what_is_accepted() {
        for (words, expected) in [
            ("status -i 1 -c x", "`x` is not a whole number"),
            ("status -i 86401", "`86401` is not a whole number of seconds from 1 to 86400"),
            ("top -i 0.1", "`0.1` is not a whole number of seconds from 1 to 3600"),
            ("web -i 0", "`0` is not a whole number of seconds from 1 to 3600"),
            ("sim --one-of 0", "`0` is not a whole number from 1 to 4096"),
            ("disk --nbd-settle 1h", "`1h` is not a whole number of seconds from 0 to 3600"),
            ("disk --poll-max-us 1001", "`1001` is not a whole number of microseconds from 0 to 1000"),
            ("serve --threads two", "`two` is not a whole number"),
            ("serve --max-clients 1.5", "`1.5` is not a whole number"),
        ] {
            let parsed = Arguments::try_parse_from(std::iter::once("remoca").chain(words.split(' ')));
            let error = parsed.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(expected), "{words}: {error}");
        }
    }
}
