//! Steps of a developer command: a name, a program, and its duration.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// One step.
pub struct Step {
    name: String,
    command: Command,
}

impl Step {
    /// Makes a step, which succeeds if the command does.
    pub fn new(name: &str, command: Command) -> Self {
        Self { name: name.into(), command }
    }

    /// Runs the step, and shows its output.
    ///
    /// # Errors
    /// If it cannot be started or fails.
    pub fn run(mut self) -> Result<(), String> {
        let name = self.name;
        println!("== {name}");
        let started = Instant::now();
        let status = self.command.status().map_err(|error| format!("{name}: cannot start: {error}"))?;
        if !status.success() {
            return Err(format!("{name}: failed ({status})"));
        }
        println!("== {name}: {:.0} s", started.elapsed().as_secs_f64());
        Ok(())
    }
}

/// Returns a command for this cargo, with arguments.
pub fn cargo<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments);
    command
}

/// Returns the folder of the project.
pub fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(PathBuf::new, Path::to_owned)
}

/// Returns a command's standard output, without the last line end. Its standard error is shown as it is written.
///
/// # Errors
/// If it cannot be started or fails.
pub fn output(mut command: Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output =
        command.stderr(Stdio::inherit()).output().map_err(|error| format!("{name} cannot be started: {error}"))?;
    if !output.status.success() {
        return Err(format!("{name} failed ({})", output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}
