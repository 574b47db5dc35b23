//! Steps of a developer command: a name, a program, and its duration.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Time for which the output of a program that has ended is still read: a process that it left behind may keep it open.
const OUTPUT_LASTS: Duration = Duration::from_secs(1);

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
    pub fn run(self) -> Result<(), String> {
        self.run_by(Command::status)
    }

    /// Runs the step, and shows its output. Returns what follows `mark` in the last line that has it; `None` if none has.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_and_find(self, mark: &str) -> Result<Option<String>, String> {
        let mut found = None;
        self.run_by(|command| {
            let (status, after) = status_and_after(command, mark.to_owned())?;
            found = after;
            Ok(status)
        })?;
        Ok(found)
    }

    fn run_by(mut self, run: impl FnOnce(&mut Command) -> io::Result<ExitStatus>) -> Result<(), String> {
        let name = self.name;
        println!("== {name}");
        let started = Instant::now();
        let status = run(&mut self.command).map_err(|error| format!("{name}: cannot start: {error}"))?;
        if !status.success() {
            return Err(format!("{name}: failed ({status})"));
        }
        println!("== {name}: {:.0} s", started.elapsed().as_secs_f64());
        Ok(())
    }
}

/// Runs a command, and shows its output. Returns its status, and what follows `mark` in the last line that has it.
fn status_and_after(command: &mut Command, mark: String) -> io::Result<(ExitStatus, Option<String>)> {
    let (reader, writer) = io::pipe()?;
    let mut child = command.stdout(writer.try_clone()?).stderr(writer).spawn()?;
    // The command's own ends would keep the output open.
    command.stdout(Stdio::inherit()).stderr(Stdio::inherit());
    let (sender, found) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            if let Some((_, after)) = line.split_once(&mark) {
                // Nobody listens any longer to a process that was left behind.
                let _ = sender.send(after.trim().to_owned());
            }
        }
    });
    let status = child.wait()?;
    let until = Instant::now() + OUTPUT_LASTS;
    let mut last = None;
    while let Ok(after) = found.recv_timeout(until.saturating_duration_since(Instant::now())) {
        last = Some(after);
    }
    Ok((status, last))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_a_mark_is_found_though_a_process_is_left_behind() {
        let find = |script: &str| {
            let mut shell = Command::new("sh");
            shell.args(["-c", script]);
            Step::new("a script", shell).run_and_find("SKIPPED: ")
        };
        assert_eq!(find("echo 'test a ... SKIPPED: too old' >&2; echo ok; sleep 5 &"), Ok(Some("too old".into())));
        assert_eq!(find("echo ok"), Ok(None));
        assert!(find("echo 'SKIPPED: too old'; exit 1").is_err());
    }
}
