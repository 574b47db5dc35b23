//! `cargo xtask test`: all checks and tests, from cheap ones to those with real guests. `make test` and CI run it.

use crate::run::{Step, cargo, output, project};
use serde_json::Value;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Crates whose tests in `tests` boot guests, and so run one at a time; and a test of another crate that does.
const GUESTS: [&str; 4] = ["remoca-lab", "remoca-agent", "remoca-demo", "remoca-guest-tests"];
const GUEST_TEST: &str = "tests/vhost_guest.rs";
/// Systems of these guests.
const SYSTEMS: [&str; 3] = ["debian12", "debian13", "debian12-systemd"];
/// Compiler whose lints the sources pass. A later one may have more lints, which must not fail a user who only wants
/// to know whether remoca works.
const LINTED_WITH: &str = "rustc 1.95.";
/// Reason with which tests are ignored that only `cargo xtask test-long` runs.
const LONG: &str = "long: cargo xtask test-long";
/// What a test that ends early because something is missing here says before the reason.
const SKIPPED: &str = "SKIPPED: ";
/// Seed of the property tests in `cargo xtask test`: a chance finding is not a fault of the tested change. `cargo xtask properties`
/// draws others.
const SEED: u64 = 1;
/// Program that some tests need, built beforehand: a build during the tests would slow them down.
const ABLATION: [&str; 4] = ["--bin", "remoca-ablation", "--features", "ablation,testing"];
/// Environment variable with the path of the `remoca` that was built with the tests. Alone it would be built again, without the features
/// that only tests use: `testing`, and the engine's `ablation`, which nothing in this program switches on. `make demo` and the tests of
/// packages run the shipped one.
const PROGRAM: &str = "REMOCA_PROGRAM";

/// Checks formatting, the structure of the sources, and lints.
///
/// # Errors
/// The name of the step that failed.
pub fn lint(_: Vec<OsString>) -> Result<(), String> {
    Step::new("format", cargo(["fmt", "--all", "--check"])).run()?;
    println!("== structure");
    crate::shape::check()?;
    let mut version = Command::new("rustc");
    version.arg("--version");
    let version = output(version)?;
    let limit = if version.starts_with(LINTED_WITH) { ["--deny", "warnings"] } else { ["--cap-lints", "warn"] };
    let mut clippy = cargo(["clippy", "--workspace", "--all-targets", "--quiet", "--"]);
    clippy.args(limit);
    Step::new("lints", clippy).run()
}

/// Runs lints and all tests. Stops at the first step that fails.
///
/// # Errors
/// The name of that step.
pub fn run(arguments: Vec<OsString>) -> Result<(), String> {
    let started = Instant::now();
    lint(arguments)?;
    let (programs, lab) = build_tests()?;
    // These are mostly downloads, so they run in parallel with the next steps.
    let images = std::thread::spawn(move || build_for_guests(&lab));
    build_ablation()?;
    let (guests, others): (Vec<_>, Vec<_>) = programs.iter().partition(|program| program.boots_guests());
    for program in others {
        program.run(threads(), &[])?;
    }
    // To look for examples, rustdoc compiles every crate once more.
    if has_examples(&documentation()?) {
        Step::new("examples in the documentation", cargo(["test", "--quiet", "--workspace", "--doc"])).run()?;
    }
    let _ = images.join();
    for program in guests {
        // One at a time, so that each guest has the machine to itself. A step for each test, so that its time is seen.
        let ignored = program.tests(&["--ignored"])?;
        for test in program.tests(&[])?.into_iter().filter(|test| !ignored.contains(test)) {
            program.run(1, &["--exact", &test])?;
        }
    }
    println!("all tests passed in {:.1} minutes", started.elapsed().as_secs_f64() / 60.0);
    Ok(())
}

/// Returns the number of tests that run at a time: more than processors, for processes, servers and timers.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from) * 2
}

/// Runs the tests that are ignored as [`LONG`], one at a time. Arguments are parts of the names of the tests to run; without
/// arguments all run, and the seeds of the fuzzer. Prints a table of them at the end.
///
/// # Errors
/// The names of the steps that failed.
pub fn run_long(arguments: Vec<OsString>) -> Result<(), String> {
    let started = Instant::now();
    let (programs, lab) = build_tests()?;
    build_ablation()?;
    build_for_guests(&lab);
    let long = long_functions()?;
    let wanted: Vec<String> = arguments.iter().map(|argument| argument.to_string_lossy().into_owned()).collect();
    let mut failed = Vec::new();
    let mut table = "| Crate | Test | Seconds | Result |\n|---|---|---|---|\n".to_owned();
    for program in &programs {
        for test in program.long_tests(&long)? {
            if wanted.is_empty() || wanted.iter().any(|part| test.contains(part)) {
                let began = Instant::now();
                let step = program.step(1, &["--ignored", "--nocapture", "--exact", &test], SEED);
                let result = step.run_and_find(SKIPPED);
                let (seconds, word) = (began.elapsed().as_secs(), result_text(&result));
                table += &format!("| {} | `{test}` | {seconds} | {word} |\n", program.package());
                failed.extend(result.err());
            }
        }
    }
    if wanted.is_empty() {
        // A build of its own for seeds that `make test` tries without it. Only these, not a search: a chance finding is not a fault of
        // the tested change.
        failed.extend(crate::fuzz::run(vec!["--seeds".into()]).err());
    }
    let minutes = started.elapsed().as_secs_f64() / 60.0;
    println!("{table}the long tests took {minutes:.1} minutes, {} failed", failed.len());
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n")) }
}

/// Returns what the table says of a test.
fn result_text(result: &Result<Option<String>, String>) -> String {
    match result {
        Ok(None) => "passed".into(),
        Ok(Some(why)) => format!("skipped: {why}"),
        Err(_) => "failed".into(),
    }
}

/// Builds the program that can leave out safety rules.
fn build_ablation() -> Result<(), String> {
    let mut build = cargo(["build", "--quiet", "--locked", "--package", "remoca-cli"]);
    build.args(ABLATION).current_dir(project());
    Step::new("building remoca-ablation", build).run()
}

/// Returns the names of the functions in the sources that are ignored as [`LONG`].
fn long_functions() -> Result<Vec<String>, String> {
    let mut grep = Command::new("grep");
    grep.args(["--recursive", "--no-filename", "--include=*.rs", "--after-context=4", LONG, "crates"]);
    grep.current_dir(project());
    let found = output(grep)?;
    let after_marks = found.split(LONG).skip(1);
    let name = |text: &str| Some(text.split_once("fn ")?.1.split('(').next()?.to_owned());
    Ok(after_marks.filter_map(name).collect())
}

/// Returns the lines of the sources that are documentation, or include some.
fn documentation() -> Result<String, String> {
    let mut grep = Command::new("grep");
    grep.args(["--recursive", "--no-filename", "--include=*.rs", "--extended-regexp"]);
    grep.args([r"^\s*//[/!]|doc = include_str!", "crates"]).current_dir(project());
    output(grep)
}

/// Returns whether rustdoc may take something in these lines for an example: code that is not marked as text.
fn has_examples(documentation: &str) -> bool {
    let mut is_text = false;
    documentation.lines().any(|line| {
        let line = line.trim_start();
        let Some(said) = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) else { return true };
        match said.trim() {
            "```text" if !is_text => is_text = true,
            "```" if is_text => is_text = false,
            fence if fence.starts_with("```") || fence.starts_with("~~~") => return true,
            _ => return !is_text && said.starts_with("     "),
        }
        false
    })
}

/// Builds the tests of all crates at once. Crate by crate, shared parts would be built once for each set of features.
/// Returns the tests and the path of the laboratory's program.
pub fn build_tests() -> Result<(Vec<TestProgram>, PathBuf), String> {
    println!("== building the tests");
    let started = Instant::now();
    let format = "--message-format=json-render-diagnostics";
    let mut build = cargo(["test", "--workspace", "--no-run", format]);
    build.current_dir(project());
    let said = output(build)?;
    let messages: Vec<Value> = said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    println!("== building the tests: {:.0} s", started.elapsed().as_secs_f64());
    let program = |name: &str| {
        let is_it = |message: &&Value| message["target"]["name"] == name && message["profile"]["test"] == false;
        let path = messages.iter().filter(is_it).find_map(|message| message["executable"].as_str());
        path.map(PathBuf::from).ok_or_else(|| format!("cargo has not built {name}"))
    };
    let (lab, remoca) = (program("remoca-lab")?, program("remoca")?);
    Ok((messages.iter().filter_map(|message| TestProgram::of_message(message, &remoca)).collect(), lab))
}

/// Builds the images and programs for the guests of the tests, if they are missing.
fn build_for_guests(lab: &Path) {
    let systems = SYSTEMS.map(|system| vec!["image", "--system", system]);
    for arguments in systems.into_iter().chain([vec!["programs"]]) {
        // The progress is shown; the paths at the end are not needed. A test that needs a missing part reports it.
        let _ = Command::new(lab).args(arguments).current_dir(project()).stdout(Stdio::null()).status();
    }
}

/// A test program that cargo has built.
pub struct TestProgram {
    /// Folder of its crate, in which it runs.
    folder: PathBuf,
    /// Path of its source, within that folder.
    source: String,
    path: PathBuf,
    /// Path of the `remoca` that was built with it.
    remoca: PathBuf,
}

impl TestProgram {
    /// Returns the test program that a message of cargo reports as built, or `None` if the message is about something else.
    fn of_message(message: &Value, remoca: &Path) -> Option<Self> {
        if message["profile"]["test"] != true {
            return None;
        }
        let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
        let source = Path::new(message["target"]["src_path"].as_str()?).strip_prefix(folder).ok()?;
        Some(Self {
            folder: folder.into(),
            source: source.display().to_string(),
            path: message["executable"].as_str()?.into(),
            remoca: remoca.into(),
        })
    }

    /// Returns the name of its crate.
    pub fn package(&self) -> String {
        self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Returns whether its tests boot guests.
    pub fn boots_guests(&self) -> bool {
        self.source.starts_with("tests/") && (GUESTS.contains(&&*self.package()) || self.source == GUEST_TEST)
    }

    /// Returns the names of its tests that are in `long`, names of functions.
    fn long_tests(&self, long: &[String]) -> Result<Vec<String>, String> {
        let mut ignored = self.tests(&["--ignored"])?;
        ignored.retain(|test| long.iter().any(|name| test.rsplit("::").next() == Some(name)));
        Ok(ignored)
    }

    /// Returns the names of all its tests, or those that `arguments` of the test program select.
    fn tests(&self, arguments: &[&str]) -> Result<Vec<String>, String> {
        let mut list = Command::new(&self.path);
        list.args(["--list", "--format=terse"]).args(arguments).current_dir(&self.folder);
        Ok(output(list)?.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }

    /// Returns whether the sources of its crate have property tests.
    pub fn has_properties(&self) -> bool {
        let mut grep = Command::new("grep");
        grep.args(["--recursive", "--quiet", "--fixed-strings", "proptest! {", "src", "tests"]);
        grep.current_dir(&self.folder).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    }

    /// Runs its tests on `threads` threads, with more arguments for the test program.
    ///
    /// # Errors
    /// Its name, if a test failed.
    pub fn run(&self, threads: usize, arguments: &[&str]) -> Result<(), String> {
        self.run_with_seed(threads, arguments, SEED)
    }

    /// Runs its tests as [`Self::run`] does; property tests draw their cases from `seed`.
    ///
    /// # Errors
    /// Its name, if a test failed.
    pub fn run_with_seed(&self, threads: usize, arguments: &[&str], seed: u64) -> Result<(), String> {
        self.step(threads, arguments, seed).run()
    }

    fn step(&self, threads: usize, arguments: &[&str], seed: u64) -> Step {
        let mut command = Command::new(&self.path);
        command.args(arguments).current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command.env("RUST_TEST_THREADS", threads.to_string()).env("PROPTEST_RNG_SEED", seed.to_string());
        command.env(PROGRAM, &self.remoca);
        if std::env::var_os("TMPDIR").is_none() && Path::new("/var/tmp").is_dir() {
            // Images are placed there, and /tmp may be in memory.
            command.env("TMPDIR", "/var/tmp");
        }
        let test = arguments.last().map(|test| format!(" {test}")).unwrap_or_default();
        Step::new(&format!("{} {}{test}", self.package(), self.source), command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_that_is_no_text_is_an_example() {
        assert!(!has_examples(
            "//! A ring:\n//! ```text\n//!      x = 1\n//! ```\n    /// - a list\n    ///   goes on"
        ));
        for example in ["/// ```", "/// ```rust", "//! ~~~", "///     x = 1", "#![doc = include_str!(\"a.md\")]"] {
            assert!(has_examples(example), "{example}");
            assert!(has_examples(&format!("/// ```text\n/// ```\n{example}")), "{example}");
        }
    }

    /// Otherwise the script installs the packages of another system.
    #[test]
    fn packages_are_found_whatever_language_apt_speaks() {
        let script = std::fs::read_to_string(project().join("scripts/install-deps.sh")).unwrap();
        let function = script.lines().find(|line| line.starts_with("has_candidate()")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        // A shell that has the name of apt's program takes its first argument, `policy`, for a script.
        std::os::unix::fs::symlink("/bin/sh", folder.path().join("apt-cache")).unwrap();
        let policy = "[ \"$LC_ALL\" = C ] && echo '  Candidate: 1' || echo '  Installationskandidat: 1'\n";
        std::fs::write(folder.path().join("policy"), policy).unwrap();
        let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{function}\nhas_candidate bpftool")]).current_dir(folder.path());
        assert!(shell.env("PATH", path).env("LC_ALL", "de_DE.UTF-8").status().unwrap().success());
    }

    /// Otherwise no daemon of this machine is started again when its package is upgraded.
    #[test]
    fn a_machine_may_start_its_daemons_when_the_terminal_of_its_installation_is_closed() {
        let script = std::fs::read_to_string(project().join("scripts/install-deps.sh")).unwrap();
        let (_, script) = script.split_once("\nPOLICY=/usr/sbin/policy-rc.d\n").unwrap();
        let (script, _) = script.split_once("\ndisable_daemon() {").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let policy = folder.path().join("policy-rc.d");
        let before = format!("set -eu\nPOLICY='{}'\nas_root() {{ \"$@\"; }}\n", policy.display());
        for (signal, code) in [("HUP", 130), ("TERM", 130), ("0", 0)] {
            let after = format!("\nforbid_daemons\ntest -x $POLICY\nkill -{signal} $$\n:\n");
            // The tests may run under nohup: a shell cannot trap what is ignored when it starts.
            let mut shell = Command::new("env");
            shell.args(["--default-signal=HUP,TERM", "sh", "-c", &format!("{before}{script}{after}")]);
            let status = shell.status().unwrap();
            assert_eq!((status.code(), policy.exists()), (Some(code), false), "SIG{signal}");
        }
    }

    #[test]
    fn a_test_that_was_skipped_has_not_passed() {
        let texts =
            [Ok(None), Ok(Some("no such commit".into())), Err("a test: failed".into())].map(|it| result_text(&it));
        assert_eq!(texts, ["passed", "skipped: no such commit", "failed"]);
    }

    #[test]
    fn long_tests_are_found_in_the_sources() {
        let long = long_functions().unwrap();
        assert!(
            long.iter().any(|name| name == "a_qemu_that_never_connects_again_goes_on_after_a_hundred_kills"),
            "{long:?}"
        );
        assert!(
            long.iter().all(|name| name.chars().all(|char| char.is_ascii_lowercase() || "_0123456789".contains(char)))
        );
    }
}
