//! The figures of a simulation, as its outputs show them.

use crate::size::show_size;
use remoca_trace::Summary;
use remoca_trace::sim::{CurveKind, Outcome, PolicyKind, Setup};
use serde::Serialize;

/// Times of a read where neither the command line nor the trace says one, in milliseconds: of the local tier, the remote one, and the
/// disk of the demonstration in the README.
const LOCAL_MS: f64 = 0.01;
const REMOTE_MS: f64 = 0.2;
const DISK_MS: f64 = 7.0;

/// The trace.
#[derive(Debug, Serialize)]
pub struct TraceFigures {
    pub file: String,
    pub format: String,
    #[serde(flatten)]
    pub summary: Summary,
    pub cut: Option<String>,
}

/// Sizes in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Sizes {
    pub guest: u64,
    pub local: u64,
    pub remote: u64,
}

/// Times of a read in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Latencies {
    pub local_ms: f64,
    pub remote_ms: f64,
    pub disk_ms: f64,
    /// Sources of these times.
    pub local_is: TimeSource,
    pub remote_is: TimeSource,
    pub disk_is: TimeSource,
}

/// Source of a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimeSource {
    Said,
    OfTheTrace,
    Assumed,
}

impl Latencies {
    /// Returns the times. What the operator says (`said`: of the local tier, the remote one, and the disk) comes before what the trace
    /// says. A trace does not tell in which tier a read hit, so its time of the cache is that of a tier only if there is no other.
    pub fn of(said: [Option<f64>; 3], sizes: Sizes, summary: &Summary) -> Self {
        let choose = |said: Option<f64>, recorded: Option<f64>, assumed: f64| match (said, recorded) {
            (Some(ms), _) => (ms, TimeSource::Said),
            (None, Some(ms)) => (ms, TimeSource::OfTheTrace),
            (None, None) => (assumed, TimeSource::Assumed),
        };
        let [local, remote, disk] = said;
        let of_only = |own: u64, other: u64| summary.recorded_cache_ms.filter(|_| own > 0 && other == 0);
        let (local_ms, local_is) = choose(local, of_only(sizes.local, sizes.remote), LOCAL_MS);
        let (remote_ms, remote_is) = choose(remote, of_only(sizes.remote, sizes.local), REMOTE_MS);
        let (disk_ms, disk_is) = choose(disk, summary.recorded_disk_ms, DISK_MS);
        Self { local_ms, remote_ms, disk_ms, local_is, remote_is, disk_is }
    }

    /// Returns where the times come from that the operator did not say, a sentence each.
    fn notes(&self, sizes: Sizes, summary: &Summary) -> Vec<String> {
        let mut notes = Vec::new();
        let tiers = [
            (sizes.local, "local", self.local_ms, self.local_is),
            (sizes.remote, "remote", self.remote_ms, self.remote_is),
        ];
        for (_, tier, ms, source) in tiers.into_iter().filter(|(bytes, ..)| *bytes > 0) {
            match (source, summary.recorded_cache_ms) {
                (TimeSource::OfTheTrace, _) => notes.push(format!(
                    "A read from the {tier} tier takes {ms:.3} ms, as one from the cache in the trace, whichever tier that was \
                     (--{tier}-latency)."
                )),
                (TimeSource::Assumed, Some(cache_ms)) => notes.push(format!(
                    "A read from the {tier} tier is assumed to take {ms} ms (--{tier}-latency): one from the cache took {cache_ms:.3} ms in the \
                     trace, which does not tell of which tier."
                )),
                (TimeSource::Assumed, None) => {
                    notes.push(format!("A read from the {tier} tier is assumed to take {ms} ms (--{tier}-latency)."));
                }
                (TimeSource::Said, _) => {}
            }
        }
        match self.disk_is {
            TimeSource::Assumed => notes.push(format!(
                "The trace has no times of the disk: a read from it is assumed to take {} ms (--disk-latency).",
                self.disk_ms
            )),
            TimeSource::OfTheTrace => {
                notes.push(format!(
                    "A read from the disk takes {:.3} ms, as in the trace (--disk-latency).",
                    self.disk_ms
                ));
            }
            TimeSource::Said => {}
        }
        notes
    }
}

/// All figures.
#[derive(Debug, Serialize)]
pub struct Report {
    pub trace: TraceFigures,
    pub bytes: Sizes,
    pub policy: PolicyKind,
    pub curve_kind: CurveKind,
    pub one_of: u64,
    pub latencies: Latencies,
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Expected mean time of a read with the tiers, and with the guest's memory alone. `None` without reads.
    pub mean_read_ms: Option<f64>,
    pub mean_read_without_ms: Option<f64>,
    pub cpu_seconds: f64,
}

impl Report {
    /// Returns the figures of an outcome.
    pub fn of(
        trace: TraceFigures,
        bytes: Sizes,
        setup: &Setup,
        latencies: Latencies,
        outcome: Outcome,
        cpu_seconds: f64,
    ) -> Self {
        let Latencies { local_ms, remote_ms, disk_ms, .. } = latencies;
        let shares = outcome.shares;
        // Without counts of requests, as if each block were read alone.
        let by_blocks = shares.local * local_ms + shares.remote * remote_ms + shares.disk * disk_ms;
        let has_reads = outcome.blocks.all() > 0;
        let with = match &outcome.requests {
            Some(requests) => requests.mean_ms(local_ms, remote_ms, disk_ms),
            None => has_reads.then_some(by_blocks),
        };
        let without = match &outcome.requests {
            Some(requests) => requests.mean_ms(disk_ms, disk_ms, disk_ms),
            None => has_reads.then_some((1.0 - shares.guest) * disk_ms),
        };
        Self {
            trace,
            bytes,
            policy: setup.policy,
            curve_kind: setup.curve,
            one_of: setup.one_of,
            latencies,
            outcome,
            mean_read_ms: with,
            mean_read_without_ms: without,
            cpu_seconds,
        }
    }

    /// Returns how many times shorter the tiers make the mean read, if that is known.
    pub fn gain(&self) -> Option<f64> {
        let (with, without) = (self.mean_read_ms?, self.mean_read_without_ms?);
        (with > 0.0).then(|| without / with)
    }

    /// Returns how much the requests are for, as text.
    pub fn footprint(&self) -> String {
        let size = show_size(self.outcome.footprint * 4096);
        if self.outcome.is_footprint_estimated {
            format!("about {size} that a cache could hold")
        } else {
            format!("{size} of different blocks")
        }
    }

    /// Returns whether there is a tier.
    pub fn has_tiers(&self) -> bool {
        self.bytes.local > 0 || self.bytes.remote > 0
    }

    /// Returns the places where reads are answered: name, size in bytes, blocks, share of the blocks.
    pub fn places(&self) -> [(&'static str, Option<u64>, u64, f64); 4] {
        let (blocks, shares) = (&self.outcome.blocks, &self.outcome.shares);
        [
            ("guest memory", Some(self.bytes.guest), blocks.guest, shares.guest),
            ("local tier", Some(self.bytes.local), blocks.local, shares.local),
            ("remote tier", Some(self.bytes.remote), blocks.remote, shares.remote),
            ("disk", None, blocks.disk, shares.disk),
        ]
    }

    /// Returns in what the curve may be wrong that its standard error does not say.
    fn curve_note(&self) -> Option<String> {
        let is_sampled = self.outcome.curve.iter().any(|point| point.standard_error > 0.0);
        let sees_all_reads = self.bytes.guest == 0 && !self.outcome.uses_evictions;
        (is_sampled && sees_all_reads).then(|| {
            "Without guest memory or evictions, few blocks may have most of the reads. The curve from a sample may be off by several \
             points then, which its standard error does not say (--curve exact)."
                .into()
        })
    }

    /// Returns what the reader has to know to judge the figures, a sentence or two each.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let Self { trace, outcome, latencies, .. } = self;
        if self.one_of > 1 {
            notes.push(format!(
                "One block of {} was simulated, with as much less memory: all figures are estimates. Reads of popular blocks that are not \
                 among them count as hits of the first memory. Times are as if blocks were read alone.",
                self.one_of
            ));
        }
        if self.bytes.guest == 0 && outcome.uses_evictions {
            notes.push("Evictions are those of the guest while the trace was recorded.".into());
        } else if outcome.lacks_evictions {
            notes.push(
                "The trace has no evictions, although the VM expected some, at least for a part of it: what was read then is in \
                 no tier; what was read later is admitted. Record it with an agent in the guest, or while `remoca status -v` \
                 says that the admission is by reads; or use --guest."
                    .into(),
            );
        } else if self.bytes.guest == 0 {
            notes.push(
                "The trace has no evictions, so this is a cache into which reads are admitted. Guest memory in front of it \
                 (--guest) evicts by itself."
                    .into(),
            );
        }
        notes.extend(self.curve_note());
        if !self.has_tiers() {
            notes.push("No tier was simulated: --local and --remote say their sizes.".into());
        } else if self.policy == PolicyKind::Lru {
            notes.push(
                "The tiers are one LRU queue. --policy adaptive simulates how `remoca disk` inserts pages, which also hits in loops over more \
                 than the tiers."
                    .into(),
            );
        }
        let covered = outcome.blocks.covered;
        if covered > 0 {
            let share = covered as f64 / outcome.blocks.all() as f64 * 100.0;
            notes.push(format!(
                "{covered} of the blocks from the disk ({share:.1} % of all) were cached, but others of the same read were not: the disk answers \
                 whole reads. The curve counts them as hits."
            ));
        }
        if outcome.has_partial {
            notes.push("Reads of parts of blocks count as misses.".into());
        }
        if self.policy == PolicyKind::Fixed {
            notes.push(
                "The cache has the best set of blocks that never changes; a cache can do better where the blocks in use change. Its times are as \
                 if blocks were read alone."
                    .into(),
            );
        }
        notes.extend(latencies.notes(self.bytes, &trace.summary));
        if let Some(hits) = trace.summary.recorded_cache_reads.filter(|_| trace.summary.reads > 0) {
            let share = hits as f64 / trace.summary.reads as f64 * 100.0;
            notes.push(format!("While it was recorded, the cache answered {share:.1} % of the reads."));
        }
        if trace.summary.lost > 0 {
            notes.push(format!("{} records were lost while it was recorded.", trace.summary.lost));
        }
        notes.extend(trace.cut.iter().map(|cut| format!("The rest is missing: {cut}.")));
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the times for tiers of these sizes, with the number of notes that name the option of one.
    fn times(said: Option<f64>, local: u64, remote: u64, recorded: Option<f64>) -> (f64, f64, usize) {
        let mut summary = Summary::default();
        summary.recorded_cache_ms = recorded;
        let sizes = Sizes { guest: 0, local, remote };
        let latencies = Latencies::of([None, said, None], sizes, &summary);
        let notes = latencies.notes(sizes, &summary).join(" ");
        (latencies.local_ms, latencies.remote_ms, notes.matches("-latency)").count() - 1)
    }

    #[test]
    fn the_cache_of_a_trace_is_the_only_tier_or_none() {
        assert_eq!(times(None, 0, 1, Some(0.35)), (LOCAL_MS, 0.35, 1));
        assert_eq!(times(None, 1, 0, Some(0.35)), (0.35, REMOTE_MS, 1));
        assert_eq!(times(None, 1, 1, Some(0.35)), (LOCAL_MS, REMOTE_MS, 2));
        assert_eq!(times(None, 1, 1, None), (LOCAL_MS, REMOTE_MS, 2));
        assert_eq!(times(Some(3.0), 0, 1, Some(0.35)), (LOCAL_MS, 3.0, 0));
    }
}
