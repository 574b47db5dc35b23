//! `cargo xtask test`: everything that must hold, from cheap to real. What `make test` and CI run.

use crate::run::{Step, cargo};
use std::ffi::OsString;
use std::time::Instant;

/// Crates whose tests boot guests, and so take turns.
const GUESTS: [&str; 4] = ["remoca-lab", "remoca-agent", "remoca-demo", "remoca-guest-tests"];

/// Formatting and lints.
///
/// # Errors
/// Names the step that failed.
pub fn lint(_: Vec<OsString>) -> Result<(), String> {
    Step::new("format", cargo(["fmt", "--all", "--check"])).run()?;
    let clippy = ["clippy", "--workspace", "--all-targets", "--quiet", "--", "--deny", "warnings"];
    Step::new("lints", cargo(clippy)).run()
}

/// Lints and all tests; stops at the first step that fails.
///
/// # Errors
/// Names the step.
pub fn run(arguments: Vec<OsString>) -> Result<(), String> {
    let started = Instant::now();
    lint(arguments)?;
    let mut quick = cargo(["test", "--workspace"]);
    for package in GUESTS {
        quick.args(["--exclude", package]);
    }
    Step::new("tests without guests", quick).run()?;
    crate::fuzz::run(vec!["--seconds".into(), "3".into()])?;
    for package in GUESTS {
        // One at a time: each guest has the machine to itself.
        let name = format!("tests of {package}");
        Step::new(&name, cargo(["test", "--package", package, "--", "--test-threads=1"])).run()?;
    }
    println!("all tests passed in {:.1} minutes", started.elapsed().as_secs_f64() / 60.0);
    Ok(())
}
