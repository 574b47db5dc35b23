//! Results of a soak: counts, hit ratios around restarts, and the longest time the guest waited, for each event.

use super::events::Event;
use super::hits::Watch;
use super::work::{Account, Pause};
use crate::Result;
use remoca_protocol::control::Status;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// Both runs, and their sums.
#[derive(Debug, Serialize)]
pub struct Report {
    pub version: &'static str,
    pub seed: u64,
    pub minutes: u64,
    pub passed: bool,
    pub events: BTreeMap<&'static str, u64>,
    pub verified_bytes: u64,
    pub guest_io_errors: u64,
    pub verify_errors: u64,
    pub warm_restarts: u64,
    pub cold_restarts: u64,
    /// Mean hit ratios of the ten seconds before and after the calm restarts.
    pub hit_ratio_before: Option<f64>,
    pub hit_ratio_after: Option<f64>,
    pub runs: Vec<RunReport>,
}

/// One run on one store.
#[derive(Debug, Serialize)]
pub struct RunReport {
    pub store: &'static str,
    /// Seconds of the fault phase.
    pub seconds: u64,
    pub events: BTreeMap<&'static str, u64>,
    /// Longest time from the beginning of one event to the beginning of the next, in milliseconds.
    pub longest_gap_ms: u64,
    /// Number of times that the store's server ended by itself and was restarted.
    pub store_crashes: u64,
    pub verified_bytes: u64,
    pub guest_io_errors: u64,
    pub verify_errors: u64,
    pub warm_restarts: u64,
    pub cold_restarts: u64,
    pub cold_reasons: BTreeMap<String, u64>,
    pub hit_ratio_before: Option<f64>,
    pub hit_ratio_after: Option<f64>,
    pub restarts: Vec<Restart>,
    /// For each kind of event, the longest read or write calls of the guest that began with an event, or before the
    /// next one.
    pub pauses: BTreeMap<&'static str, Pauses>,
    /// Counters of the VM process that must stay at zero.
    pub wrong: BTreeMap<&'static str, u64>,
    /// Descriptions of the faults.
    pub failures: Vec<String>,
}

/// The end of a VM process and the start of another.
#[derive(Clone, Debug, Serialize)]
pub struct Restart {
    pub event: &'static str,
    pub warm: bool,
    pub cold_reason: Option<String>,
    /// Whether no other event happened in the ten seconds before and after.
    pub calm: bool,
    pub hit_ratio_before: Option<f64>,
    pub hit_ratio_after: Option<f64>,
    #[serde(skip)]
    begun: Instant,
    #[serde(skip)]
    ended: Instant,
}

/// The longest call of the guest around each event of a kind; 0 if none took more than 50 ms.
#[derive(Debug, Serialize)]
pub struct Pauses {
    pub events: usize,
    pub median_ms: u64,
    pub longest_ms: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct Happened {
    pub event: Event,
    pub begun: Instant,
}

impl Restart {
    pub fn of(event: Event, begun: Instant, ended: Instant, status: &Status) -> Result<Restart> {
        let status = serde_json::to_value(status)?;
        // The process may know the other disks, but not this one.
        let reason = status["cold_reason"].as_str().or(status["disks"][0]["cold_reason"].as_str());
        let warm = status["started"] == "warm" && reason.is_none();
        let cold_reason = (!warm).then(|| reason.unwrap_or("nothing survives").to_owned());
        let (hit_ratio_before, hit_ratio_after) = (None, None);
        Ok(Restart {
            event: event.name(),
            warm,
            cold_reason,
            calm: false,
            hit_ratio_before,
            hit_ratio_after,
            begun,
            ended,
        })
    }
}

impl fmt::Display for Restart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cold_reason {
            None => f.write_str("(warm)"),
            Some(reason) => write!(f, "(cold: {reason})"),
        }
    }
}

impl RunReport {
    pub fn new(store: &'static str) -> RunReport {
        RunReport {
            store,
            seconds: 0,
            events: BTreeMap::new(),
            longest_gap_ms: 0,
            store_crashes: 0,
            verified_bytes: 0,
            guest_io_errors: 0,
            verify_errors: 0,
            warm_restarts: 0,
            cold_restarts: 0,
            cold_reasons: BTreeMap::new(),
            hit_ratio_before: None,
            hit_ratio_after: None,
            restarts: Vec::new(),
            pauses: BTreeMap::new(),
            wrong: BTreeMap::new(),
            failures: Vec::new(),
        }
    }

    /// Returns whether nothing was wrong in this run.
    pub fn passed(&self) -> bool {
        self.failures.is_empty()
            && self.guest_io_errors + self.verify_errors == 0
            && self.verified_bytes > 0
            && self.wrong.values().all(|count| *count == 0)
    }

    pub(super) fn restarted(&mut self, restart: Restart) {
        match &restart.cold_reason {
            None => self.warm_restarts += 1,
            Some(reason) => {
                self.cold_restarts += 1;
                *self.cold_reasons.entry(reason.clone()).or_default() += 1;
            }
        }
        self.restarts.push(restart);
    }

    /// Marks the last restart as calm.
    pub(super) fn calm(&mut self) {
        if let Some(restart) = self.restarts.last_mut() {
            restart.calm = true;
        }
    }

    pub(super) fn hits(&mut self, watch: &Watch) {
        for restart in &mut self.restarts {
            restart.hit_ratio_before = watch.ratio(restart.begun - super::CALM, restart.begun);
            restart.hit_ratio_after = watch.ratio(restart.ended, restart.ended + super::CALM);
        }
        let calm = self.restarts.iter().filter(|restart| restart.calm);
        self.hit_ratio_before = mean(calm.clone().filter_map(|restart| restart.hit_ratio_before));
        self.hit_ratio_after = mean(calm.filter_map(|restart| restart.hit_ratio_after));
        self.wrong = watch.wrong();
        if self.wrong.is_empty() {
            self.failures.push("no counter was ever read".into());
        }
    }

    pub(super) fn take(&mut self, account: Account, happened: &[Happened]) {
        self.verified_bytes = account.verified_bytes;
        self.guest_io_errors = account.io_errors;
        self.verify_errors = account.verify_errors;
        self.failures.extend(account.said);
        self.pauses = pauses(happened, &account.pauses);
    }

    pub(super) fn gaps(&mut self, torment: &[Happened]) {
        let gaps = torment.windows(2).map(|pair| pair[1].begun - pair[0].begun);
        self.longest_gap_ms = gaps.max().map_or(0, millis);
    }
}

impl Report {
    pub fn new(seed: u64, minutes: u64, runs: Vec<RunReport>) -> Report {
        let mut events = BTreeMap::new();
        for (name, count) in runs.iter().flat_map(|run| &run.events) {
            *events.entry(*name).or_default() += count;
        }
        let sum = |of: fn(&RunReport) -> u64| runs.iter().map(of).sum();
        Report {
            version: env!("CARGO_PKG_VERSION"),
            seed,
            minutes,
            passed: runs.iter().all(RunReport::passed),
            events,
            verified_bytes: sum(|run| run.verified_bytes),
            guest_io_errors: sum(|run| run.guest_io_errors),
            verify_errors: sum(|run| run.verify_errors),
            warm_restarts: sum(|run| run.warm_restarts),
            cold_restarts: sum(|run| run.cold_restarts),
            hit_ratio_before: mean(runs.iter().filter_map(|run| run.hit_ratio_before)),
            hit_ratio_after: mean(runs.iter().filter_map(|run| run.hit_ratio_after)),
            runs,
        }
    }
}

impl fmt::Display for RunReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "store: {}, {} s of torment", self.store, self.seconds)?;
        writeln!(f, "  {:26} {:>6} {:>16} {:>11}", "event", "count", "pause median ms", "longest ms")?;
        for (name, count) in &self.events {
            let (median, longest) = self.pauses.get(name).map_or((0, 0), |pause| (pause.median_ms, pause.longest_ms));
            writeln!(f, "  {name:26} {count:>6} {median:>16} {longest:>11}")?;
        }
        writeln!(f, "  longest time between two events: {} ms", self.longest_gap_ms)?;
        if self.store_crashes > 0 {
            writeln!(f, "  the store's server ended by itself, and was started again: {} times", self.store_crashes)?;
        }
        writeln!(
            f,
            "  {} MiB verified, {} I/O errors, {} verify errors",
            self.verified_bytes >> 20,
            self.guest_io_errors,
            self.verify_errors
        )?;
        writeln!(f, "  restarts: {} warm, {} cold {:?}", self.warm_restarts, self.cold_restarts, self.cold_reasons)?;
        let percent = |ratio: Option<f64>| ratio.map_or("-".into(), |ratio| format!("{:.1} %", ratio * 100.0));
        let (before, after) = (percent(self.hit_ratio_before), percent(self.hit_ratio_after));
        writeln!(f, "  hits in ten seconds, means over the calm restarts: before {before}, after {after}")?;
        for failure in &self.failures {
            writeln!(f, "  FAILED: {failure}")?;
        }
        for (name, count) in self.wrong.iter().filter(|(_, count)| **count > 0) {
            writeln!(f, "  FAILED: {name} is {count}")?;
        }
        Ok(())
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (count, sum) = values.fold((0.0, 0.0), |(count, sum), value| (count + 1.0, sum + value));
    (count > 0.0).then(|| sum / count)
}

/// Time before an event at which a call may have begun that is attributed to the event.
const LEAD: Duration = Duration::from_millis(100);

/// Attributes each pause to the last event that had begun when the pause began.
fn pauses(happened: &[Happened], pauses: &[Pause]) -> BTreeMap<&'static str, Pauses> {
    let mut longest: Vec<Duration> = vec![Duration::ZERO; happened.len()];
    for pause in pauses {
        if let Some(index) =
            happened.partition_point(|event| event.begun + pause.length <= pause.end + LEAD).checked_sub(1)
        {
            longest[index] = longest[index].max(pause.length);
        }
    }
    let mut by_event: BTreeMap<&'static str, Vec<u64>> = BTreeMap::new();
    for (event, longest) in happened.iter().zip(longest) {
        by_event.entry(event.event.name()).or_default().push(millis(longest));
    }
    let summary = |mut lengths: Vec<u64>| {
        lengths.sort_unstable();
        let longest_ms = lengths.last().copied().unwrap_or_default();
        Pauses { events: lengths.len(), median_ms: lengths[lengths.len() / 2], longest_ms }
    };
    by_event.into_iter().map(|(name, lengths)| (name, summary(lengths))).collect()
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_belongs_to_the_event_that_it_began_with() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let happened = |event, ms| Happened { event, begun: at(ms) };
        let happened =
            [happened(Event::KillDisk, 1000), happened(Event::CutConnections, 1700), happened(Event::KillDisk, 4000)];
        let pause = |from: u64, to: u64| Pause { end: at(to), length: Duration::from_millis(to - from) };
        // Before all events; in flight at the kill, and ended after the next event; a short one; the second kill.
        let seen = [pause(0, 800), pause(990, 2000), pause(2500, 2560), pause(4050, 4350)];
        let by_event = pauses(&happened, &seen);
        assert_eq!((by_event["kill_disk"].median_ms, by_event["kill_disk"].longest_ms), (1010, 1010));
        assert_eq!((by_event["cut_connections"].events, by_event["cut_connections"].longest_ms), (1, 60));
    }

    #[test]
    fn a_run_that_verified_nothing_or_counted_a_wrong_page_has_not_passed() {
        let good = || RunReport { verified_bytes: 1, ..RunReport::new("raw file") };
        assert!(good().passed());
        assert!(!RunReport::new("raw file").passed());
        assert!(!RunReport { wrong: [("fetch_wrong", 1)].into(), ..good() }.passed());
        assert!(!RunReport { verify_errors: 1, ..good() }.passed());
        assert!(!RunReport { failures: vec!["it did not boot".into()], ..good() }.passed());
        assert!(!Report::new(1, 2, vec![good(), RunReport { guest_io_errors: 1, ..good() }]).passed);
    }
}
