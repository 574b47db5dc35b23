//! `cargo xtask mutants --sim SEEDS`: finds the first seed of the simulator that notices each mutant.

use super::list::Listed;
use super::schemata::Mutant;
use super::trial::Bench;
use serde_json::Value;
use std::process::{Command, Stdio};
use std::sync::Mutex;

/// Package and program of the simulator.
pub const SIMULATOR: &str = "remoca-sim";
/// Time limit for one mutant's seeds, in seconds. With a mutant, a seed may never end.
const PATIENCE_SECONDS: u32 = 1800;

/// Returns whether the list says that a seed of the simulator notices this mutant.
pub fn is_of_simulator(mutant: &Mutant, listed: &[Listed]) -> bool {
    mutant.listed.is_some_and(|index| listed[index].seen_by.iter().any(|test| test.starts_with("sim/")))
}

/// Runs seeds 0 to `seeds` with each mutant, in the driver's and in the engine's simulator. Prints the first seed that
/// fails.
///
/// # Errors
/// If the simulator cannot be run, or no seed notices one of the mutants.
pub fn find(bench: &Bench, mutants: &[Mutant], messages: &[Value], seeds: u64) -> Result<(), String> {
    let is_simulator =
        |message: &&Value| message["target"]["name"] == SIMULATOR && message["executable"].as_str().is_some();
    let message = messages.iter().find(is_simulator).ok_or("cargo did not say where the simulator is")?;
    let program = message["executable"].as_str().unwrap_or_default();
    let unseen = Mutex::new(Vec::new());
    bench.share(mutants.len(), |number, folder| {
        let driver = first_seed(program, number, seeds, &["--driver"], folder)?;
        let engine = first_seed(program, number, seeds, &["--no-shrink"], folder)?;
        let text = |seed: &Option<String>| seed.clone().unwrap_or("none".into());
        println!("{}\n          driver {}, engine {}", mutants[number].name, text(&driver), text(&engine));
        if driver.is_none() && engine.is_none() {
            unseen.lock().map_err(|error| error.to_string())?.push(mutants[number].name.clone());
        }
        Ok(())
    })?;
    let unseen = unseen.into_inner().map_err(|error| error.to_string())?;
    match unseen.is_empty() {
        true => Ok(()),
        false => Err(format!("no seed below {seeds} sees these:\n{}", unseen.join("\n"))),
    }
}

/// Returns the first seed that fails with this mutant, or `None` if none does.
fn first_seed(
    program: &str,
    mutant: usize,
    seeds: u64,
    options: &[&str],
    folder: &std::path::Path,
) -> Result<Option<String>, String> {
    let mut command = Command::new("timeout");
    command.args([&PATIENCE_SECONDS.to_string(), program, "--seed", "0", "--seeds", &seeds.to_string()]);
    command.args(options).env("REMOCA_MUTANT", mutant.to_string()).env("TMPDIR", folder).stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("{program} cannot be started: {error}"))?;
    if output.status.success() {
        return Ok(None);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let seed = said.lines().find_map(|line| line.split_once("seed ")?.1.split_once(" failed"));
    Ok(Some(seed.map_or_else(|| format!("{} without a seed", output.status), |(seed, _)| seed.to_owned())))
}
