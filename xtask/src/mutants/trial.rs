//! Runs tests: which mutants each test reaches, and whether it notices a mutant.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Sources of test programs that boot guests.
const GUESTS: [&str; 1] = ["tests/vhost_guest.rs"];
/// Maximum private memory of a test with a mutant, in KiB. A mutant may allocate without end.
const MEMORY_KIB: u32 = 4 << 20;
/// Time limit for a test without a mutant.
const TIME_MAX: Duration = Duration::from_secs(600);
/// Time that a killed test may take to die.
const DEATH_TIME_MAX: Duration = Duration::from_secs(10);

/// A test that passes without a mutant.
pub struct Test {
    /// Name such as `disk/store_nbd::name::of::the::test`; `unit` for tests in the source files.
    pub name: String,
    program: PathBuf,
    folder: PathBuf,
    filter: String,
    pub time: Duration,
    /// Numbers of the mutants that it reaches.
    pub reaches: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Passed,
    Failed,
    TimedOut,
}

/// A folder for each worker, for files that tests leave behind.
pub struct Bench {
    pub folder: PathBuf,
    pub workers: usize,
}

impl Bench {
    /// Lists the tests in the programs that cargo has built.
    ///
    /// # Errors
    /// If a test program cannot be run.
    pub fn list(&self, messages: &[Value]) -> Result<Vec<Test>, String> {
        let mut tests = Vec::new();
        for message in messages.iter().filter(|message| message["profile"]["test"] == true) {
            let (Some(program), Some(manifest)) = (message["executable"].as_str(), message["manifest_path"].as_str())
            else {
                continue;
            };
            let source = message["target"]["src_path"].as_str().unwrap_or_default();
            if GUESTS.iter().any(|guests| source.ends_with(guests)) {
                continue;
            }
            let folder = Path::new(manifest).parent().unwrap_or(Path::new(".")).to_owned();
            let package = folder.file_name().unwrap_or_default().to_string_lossy().replace("remoca-", "");
            let is_test = message["target"]["kind"][0] == "test";
            let target = if is_test { message["target"]["name"].as_str().unwrap_or_default() } else { "unit" };
            let list = |options: &[&str]| {
                let output = Command::new(program).args(["--list", "--format", "terse"]).args(options).output();
                let output = output.map_err(|error| format!("{program}: {error}"))?;
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                Ok::<_, String>(
                    text.lines().filter_map(|l| l.strip_suffix(": test")).map(str::to_owned).collect::<Vec<_>>(),
                )
            };
            let ignored = list(&["--ignored"])?;
            for filter in list(&[])?.into_iter().filter(|name| !ignored.contains(name)) {
                tests.push(Test {
                    name: format!("{package}/{target}::{filter}"),
                    program: program.into(),
                    folder: folder.clone(),
                    filter,
                    time: TIME_MAX,
                    reaches: Vec::new(),
                });
            }
        }
        Ok(tests)
    }

    /// Runs each test without a mutant. Returns those that pass, with their times and the mutants that they reach.
    ///
    /// # Errors
    /// If a test cannot be run.
    pub fn record(&self, tests: Vec<Test>, mutants: usize) -> Result<Vec<Test>, String> {
        let tests: Vec<_> = tests.into_iter().map(Mutex::new).collect();
        self.share(tests.len(), |index, folder| {
            let mut test = tests[index].lock().unwrap_or_else(PoisonError::into_inner);
            let notes = folder.join("reached");
            fs::write(&notes, vec![0; mutants]).map_err(|error| error.to_string())?;
            let started = Instant::now();
            let end = test.run(("REMOCA_REACHED", &notes.display().to_string()), folder, TIME_MAX)?;
            test.time = if end == End::Passed { started.elapsed() } else { TIME_MAX };
            if end != End::Passed {
                eprintln!("   left out, as it fails without a mutant: {}", test.name);
            }
            let noted = fs::read(&notes).map_err(|error| error.to_string())?;
            test.reaches = noted.iter().enumerate().filter(|(_, byte)| **byte != 0).map(|(number, _)| number).collect();
            Ok(())
        })?;
        let tests = tests.into_iter().map(|test| test.into_inner().unwrap_or_else(PoisonError::into_inner));
        Ok(tests.filter(|test| test.time < TIME_MAX).collect())
    }

    /// Shares `count` pieces of work among all workers, each with an empty folder.
    ///
    /// # Errors
    /// The first error of `work`.
    pub fn share(&self, count: usize, work: impl Fn(usize, &Path) -> Result<(), String> + Sync) -> Result<(), String> {
        let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
        thread::scope(|scope| {
            for worker in 0..self.workers {
                let (next, failure, work) = (&next, &failure, &work);
                scope.spawn(move || {
                    let folder = self.folder.join(worker.to_string());
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= count || failure.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
                            break;
                        }
                        let _ = fs::remove_dir_all(&folder);
                        let made = fs::create_dir_all(&folder).map_err(|error| error.to_string());
                        if let Err(error) = made.and_then(|()| work(index, &folder)) {
                            *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                        }
                    }
                    let _ = fs::remove_dir_all(&folder);
                });
            }
        });
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

impl Test {
    /// Returns whether the test notices a mutant: it fails with it, passes without it, and fails with it again. A
    /// single failure may be chance, or due to a busy machine.
    ///
    /// # Errors
    /// If the test cannot be run.
    pub fn notices(&self, mutant: usize, folder: &Path) -> Result<bool, String> {
        let patience = Duration::from_secs(20) + self.time * 4;
        let (none, mutant) = (usize::MAX.to_string(), mutant.to_string());
        let passes =
            |chosen: &str| Ok::<_, String>(self.run(("REMOCA_MUTANT", chosen), folder, patience)? == End::Passed);
        Ok(!passes(&mutant)? && passes(&none)? && !passes(&mutant)?)
    }

    fn run(&self, variable: (&str, &str), folder: &Path, patience: Duration) -> Result<End, String> {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -d {MEMORY_KIB}; exec \"$@\""), "sh"]);
        command.arg(&self.program).args(["--exact", &self.filter, "--test-threads", "1"]);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder).env("TMPDIR", folder);
        command.env(variable.0, variable.1).env("PROPTEST_FAILURE_PERSISTENCE", "off").process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(|error| format!("{} cannot be started: {error}", self.name))?;
        wait(child, patience)
    }
}

fn wait(mut child: Child, patience: Duration) -> Result<End, String> {
    let until = Instant::now() + patience;
    let mut pause = Duration::from_millis(2);
    let end = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break if status.success() { End::Passed } else { End::Failed },
            None if Instant::now() >= until => break End::TimedOut,
            None => thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(50));
    };
    if end != End::Passed {
        // Kills the test's process group, which includes the processes that it started.
        let group = format!("-{}", child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
        // A process that waits for a frozen file system does not die. It is left behind.
        let until = Instant::now() + DEATH_TIME_MAX;
        while end == End::TimedOut && Instant::now() < until && matches!(child.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(50));
        }
    }
    Ok(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(script: &str, patience: Duration) -> End {
        use std::os::unix::process::CommandExt;
        wait(Command::new("sh").args(["-c", script]).process_group(0).spawn().unwrap(), patience).unwrap()
    }

    #[test]
    fn a_test_passes_fails_or_hangs() {
        assert_eq!(end("true", TIME_MAX), End::Passed);
        assert_eq!(end("exit 1", TIME_MAX), End::Failed);
        assert_eq!(end("sleep 1000 & wait", Duration::ZERO), End::TimedOut);
    }

    #[test]
    fn work_is_shared_and_the_first_failure_ends_it() {
        let folder = tempfile::tempdir().unwrap();
        let bench = Bench { folder: folder.path().join("new"), workers: 3 };
        let done = Mutex::new(Vec::new());
        let work = |index, folder: &Path| {
            assert_eq!(fs::read_dir(folder).unwrap().count(), 0);
            fs::write(folder.join("left behind"), "").unwrap();
            done.lock().unwrap().push(index);
            if index == 50 { Err("fails".into()) } else { Ok(()) }
        };
        assert_eq!(bench.share(50, work), Ok(()));
        let mut found = std::mem::take(&mut *done.lock().unwrap());
        found.sort_unstable();
        assert_eq!(found, (0..50).collect::<Vec<_>>());
        assert_eq!(bench.share(1_000_000, work), Err("fails".into()));
        assert!(done.lock().unwrap().len() < 1_000_000);
    }
}
