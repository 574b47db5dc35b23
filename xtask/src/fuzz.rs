//! `cargo xtask fuzz`: libFuzzer on the targets of `remoca-fuzz`, guided by coverage, with the stable compiler.
//!
//! The instrumentation is LLVM's own pass (which `-Zsanitizer` would enable), requested by code-generation options.
//! The fuzzed build has its own target folder. Inputs that the fuzzer found interesting stay in `out/fuzz/corpus`.

use crate::run::{Step, cargo, output, project};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;

const USAGE: &str = "\
usage: cargo xtask fuzz [TARGET...] [--seconds N | --seeds] [-- OPTION...]

Fuzzes these targets, or all, one on each processor; ends after one that fails and says where its input is. A single target
shows what libFuzzer says.

  --seconds N  for each target [default: 60]
  --seeds      only what the project has: seeds and old findings, once each
  OPTION...    libFuzzer's own, for one target; a file is run once, to reproduce what was found";

/// Compiler options that make LLVM count edges and record the operands of comparisons.
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing";

/// Time limit for one input. Normally an input takes less than a thousandth of it.
const TIMEOUT_SECONDS: u32 = 20;
const MEMORY_MIB: u32 = 1024;

#[derive(Clone, Copy)]
enum Length {
    Seconds(u32),
    Seeds,
}

/// Fuzzes the targets named by the arguments.
///
/// # Errors
/// The name of the target that failed.
pub fn run(arguments: Vec<OsString>) -> Result<(), String> {
    let (mut length, mut wanted) = (Length::Seconds(60), Vec::new());
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        match argument.to_str().ok_or(USAGE)? {
            "--" => break,
            "--help" => {
                println!("{USAGE}");
                return Ok(());
            }
            "--seconds" => {
                let value = arguments.next().and_then(|value| value.to_str()?.parse().ok());
                length = Length::Seconds(value.ok_or(USAGE)?);
            }
            "--seeds" => length = Length::Seeds,
            option if option.starts_with('-') => return Err(USAGE.into()),
            target => wanted.push(target.to_owned()),
        }
    }
    let options: Vec<_> = arguments.collect();
    let program = build()?;
    let known = targets(&program)?;
    if let Some(unknown) = wanted.iter().find(|name| known.iter().all(|target| target.name != **name)) {
        let names: Vec<_> = known.iter().map(|target| &*target.name).collect();
        return Err(format!("there is no target {unknown}; there are {}", names.join(", ")));
    }
    if !options.is_empty() && wanted.len() != 1 {
        return Err(format!("options of libFuzzer want one target\n\n{USAGE}"));
    }
    let is_wanted = |target: &&Target| wanted.is_empty() || wanted.contains(&target.name);
    let targets = Mutex::new(known.iter().filter(is_wanted));
    // The lock is not held while a target is fuzzed.
    let next = || targets.lock().unwrap_or_else(PoisonError::into_inner).next();
    let fuzz_some = || -> Result<(), String> {
        while let Some(target) = next() {
            target.fuzz(&program, length, &options, wanted.len() == 1)?;
        }
        Ok(())
    };
    let count = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..count).map(|_| scope.spawn(fuzz_some)).collect();
        let outcomes: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        outcomes.into_iter().try_for_each(|outcome| outcome.unwrap_or_else(|_| Err("a fuzzing thread failed".into())))
    })
}

/// Builds the instrumented fuzzer, and returns its path. The platform is given so that build scripts and macros are
/// not instrumented.
///
/// # Errors
/// The compiler's error, which it has already printed.
fn build() -> Result<PathBuf, String> {
    let mut ask = Command::new("rustc");
    ask.args(["--print", "host-tuple"]);
    let platform = output(ask)?;
    let folder = project().join("target/fuzz");
    let mut build = cargo(["build", "--quiet", "--profile", "fuzz", "--target", &platform]);
    build.args(["--package", "remoca-fuzz", "--features", "libfuzzer", "--bin", "remoca-fuzz", "--target-dir"]);
    build.arg(&folder).current_dir(project()).env_remove("CARGO_ENCODED_RUSTFLAGS").env("RUSTFLAGS", COVERAGE);
    Step::new("building the fuzzer", build).run()?;
    Ok(folder.join(platform).join("fuzz/remoca-fuzz"))
}

struct Target {
    name: String,
    length_max: String,
}

/// Returns the fuzzer's targets.
fn targets(program: &Path) -> Result<Vec<Target>, String> {
    let list = Command::new(program).env("REMOCA_FUZZ_LIST", "1").output();
    let list = list.map_err(|error| format!("the fuzzer cannot be started: {error}"))?.stdout;
    let list = String::from_utf8_lossy(&list);
    let words = |line: &str| line.split_once(' ').map(|(name, length)| (name.to_owned(), length.to_owned()));
    Ok(list.lines().filter_map(words).map(|(name, length_max)| Target { name, length_max }).collect())
}

impl Target {
    fn fuzz(&self, program: &Path, length: Length, options: &[OsString], shown: bool) -> Result<(), String> {
        let name = &self.name;
        let out = project().join("out/fuzz");
        let (corpus, end) = match length {
            Length::Seconds(seconds) => (out.join("corpus").join(name), format!("-max_total_time={seconds}")),
            Length::Seeds => (out.join("seeds").join(name), "-runs=0".into()),
        };
        fs::create_dir_all(&corpus).map_err(|error| format!("{}: {error}", corpus.display()))?;
        let mut command = Command::new(program);
        command.current_dir(project()).env("REMOCA_FUZZ_TARGET", name);
        command.arg(format!("-artifact_prefix={}/{name}-", out.display()));
        command.arg(format!("-timeout={TIMEOUT_SECONDS}")).arg(format!("-rss_limit_mb={MEMORY_MIB}"));
        if options.is_empty() {
            command.env("REMOCA_FUZZ_SEEDS", &corpus).arg("-print_final_stats=1");
            command.arg(format!("-max_len={}", self.length_max)).arg(end).arg(&corpus);
            let regressions = project().join("crates/remoca-fuzz/regressions").join(name);
            command.args(regressions.is_dir().then_some(regressions));
        } else {
            command.args(options);
        }
        let outcome = if shown { Step::new(name, command).run() } else { fuzz_quietly(name, command) };
        outcome.map_err(|error| {
            let found = out.join(format!("{name}-*"));
            format!("{error}\nthe input is in {}; docs/fuzzing.md tells what to do with it", found.display())
        })
    }
}

/// Runs the fuzzer, and prints its output only if it found something.
fn fuzz_quietly(name: &str, mut command: Command) -> Result<(), String> {
    let done = command.output().map_err(|error| format!("fuzzing {name}: cannot start: {error}"))?;
    let said = String::from_utf8_lossy(&done.stderr);
    if !done.status.success() {
        eprintln!("{said}");
        return Err(format!("fuzzing {name}: failed ({})", done.status));
    }
    let runs = said.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    println!("== fuzzing {name}: {} inputs", runs.unwrap_or("?").trim());
    Ok(())
}
