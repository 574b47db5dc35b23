//! `cargo xtask properties`: the property tests of all crates, with cases that nobody has tried before.

use crate::test::{build_tests, threads};
use std::ffi::OsString;
use std::time::{SystemTime, UNIX_EPOCH};

const USAGE: &str = "\
usage: cargo xtask properties [ROUNDS]

Runs the tests of each crate that has property tests, but none that boots a guest. Ends at the first program in which a test fails,
and says how to repeat it.

  ROUNDS  how often, each time with other cases [default: 10]";

/// Runs rounds of the property tests.
///
/// # Errors
/// The seed and the program of the first failure.
pub fn run(arguments: Vec<OsString>) -> Result<(), String> {
    let arguments: Vec<_> = arguments.iter().map(|argument| argument.to_string_lossy()).collect();
    let rounds: u64 = match &*arguments {
        [] => 10,
        [argument] if argument == "--help" => {
            println!("{USAGE}");
            return Ok(());
        }
        [count] => count.parse().map_err(|_| USAGE)?,
        _ => return Err(USAGE.into()),
    };
    let (programs, _) = build_tests()?;
    let programs: Vec<_> =
        programs.iter().filter(|program| program.has_properties() && !program.boots_guests()).collect();
    let first = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    for seed in first..first.saturating_add(rounds) {
        println!("== properties, seed {seed}");
        for program in &programs {
            program.run_with_seed(threads(), &[], seed).map_err(|error| {
                let package = program.package();
                format!("{error}\nagain: PROPTEST_RNG_SEED={seed} cargo test --package {package}")
            })?;
        }
    }
    Ok(())
}
