//! `cargo xtask sim`: the simulator, with its own options.

use std::ffi::OsString;
use std::process::Command;

/// Builds and runs `remoca-sim` in the profile of the tests: fast enough, and with all assertions.
///
/// # Errors
/// If it cannot be built, or a seed failed.
pub fn run(arguments: Vec<OsString>) -> Result<(), String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["run", "--quiet", "--package", "remoca-sim", "--"])
        .args(arguments)
        .status()
        .map_err(|error| format!("cargo cannot be started: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("sim: {status}")) }
}
