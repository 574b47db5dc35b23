//! The reader in the guest (`remoca-workload read-records`): starts it, follows it, and parses its output.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use remoca_lab::Guest;
use serde::Deserialize;

use crate::plan::Plan;

/// Folder of the file set in the guest.
pub const FOLDER: &str = "/mnt/records";
const STOP_FILE: &str = "/run/stop-reading";
/// Time without output after which the reader counts as hung. It prints every second, unless the VM process loses a read.
const SILENCE_LIMIT: Duration = Duration::from_secs(240);

/// Choice of the records to read.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    pub seed: u64,
    pub until: Until,
}

#[derive(Clone, Copy, Debug)]
pub enum Until {
    Reads(u64),
    /// Until [`stop`] is called.
    Stopped,
}

/// A progress line of the reader, printed once a second.
#[derive(Clone, Debug, Deserialize)]
pub struct Pace {
    pub reads: u64,
    pub interval_mean_us: f64,
    pub io_errors: u64,
    pub wrong_signatures: u64,
}

/// The result that the reader prints at its end.
#[derive(Clone, Debug, Deserialize)]
pub struct Outcome {
    pub measured: Phase,
    pub io_errors: u64,
    pub wrong_signatures: u64,
    pub examples: Vec<String>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Phase {
    pub seconds: f64,
    pub reads: Latency,
}

/// Latencies of the read call only.
#[derive(Clone, Debug, Deserialize)]
pub struct Latency {
    pub count: u64,
    pub mean_us: f64,
    pub p50_us: f64,
    pub p90_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
}

#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Line {
    Progress(Pace),
    WarmupDone {},
    Result(Outcome),
}

impl Reading {
    fn command(&self, plan: &Plan) -> String {
        let (record, alpha, seed) = (plan.record_bytes, plan.alpha, self.seed);
        let until = match self.until {
            Until::Reads(count) => format!("--count {count}"),
            Until::Stopped => format!("--stop-file {STOP_FILE}"),
        };
        format!(
            "remoca-workload read-records --json --dir {FOLDER} --pattern zipf --alpha {alpha} --record {record} --seed {seed} {until}"
        )
    }

    /// Runs the reader to its end, and returns its outcome. Calls `each` with its progress once a second.
    pub fn run(
        &self,
        guest: &mut Guest,
        plan: &Plan,
        mut each: impl FnMut(&mut Guest, &Pace) -> Result<()>,
    ) -> Result<Outcome> {
        let mut job = guest.start(&self.command(plan))?;
        let mut outcome = None;
        while let Some(line) = guest.next_line(&mut job, SILENCE_LIMIT)? {
            match parse(&line)? {
                Line::Progress(pace) => each(guest, &pace)?,
                Line::WarmupDone {} => {}
                Line::Result(result) => outcome = Some(result),
            }
        }
        let ended = guest.wait(&job, SILENCE_LIMIT)?;
        match (outcome, ended.status) {
            // Status 1 means that the reader found an error, which is in the outcome.
            (Some(outcome), 0 | 1) => Ok(outcome),
            (_, status) => {
                let said = String::from_utf8_lossy(&ended.stderr).into_owned();
                bail!("the reader in the guest ended with status {status}: {}", said.trim());
            }
        }
    }
}

/// Stops a reader that reads until [`Until::Stopped`]. It ends within a second.
pub fn stop(guest: &mut Guest) -> Result<()> {
    guest.put(STOP_FILE, b"")?;
    Ok(())
}

fn parse(line: &str) -> Result<Line> {
    serde_json::from_str(line)
        .with_context(|| format!("cannot understand the line `{line}` of the reader in the guest"))
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use remoca_lab::workload::{dataset, pattern::Pattern, records};

    use super::*;

    /// Tests that the lines of the real reader are parsed.
    #[test]
    fn lines_of_the_reader_are_understood() {
        let folder = tempfile::tempdir().unwrap();
        dataset::create(folder.path(), 2, 64 << 10, 1).unwrap();
        let options = records::Options {
            folder: folder.path().to_owned(),
            record_size: 4096,
            pattern: Pattern::Zipf,
            alpha: 1.0,
            seed: 1,
            warmup_count: 3,
            count: 40,
            time_limit: None,
            stop_file: None,
            direct: false,
            pause: None,
            writes: None,
        };
        let mut said = Vec::new();
        let report = records::access(&options, |event| said.push(serde_json::to_string(event).unwrap())).unwrap();
        let flow = said.iter().try_for_each(|line| match parse(line) {
            Ok(Line::Progress(_) | Line::WarmupDone {}) => ControlFlow::Continue(()),
            _ => ControlFlow::Break(line.clone()),
        });
        assert_eq!(flow, ControlFlow::Continue(()));
        let mut result = serde_json::to_value(&report).unwrap();
        result["event"] = "result".into();
        let Line::Result(outcome) = parse(&result.to_string()).unwrap() else { panic!("{result}") };
        assert_eq!((outcome.measured.reads.count, outcome.io_errors, outcome.wrong_signatures), (40, 0, 0));
    }
}
