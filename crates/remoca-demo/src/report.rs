//! The report: what `report.json` holds, and what is judged by it.
//!
//! Pure: it gets what the acts observed. Definitions: docs/decisions/0011-demo-measures.md.

use std::collections::BTreeMap;

use remoca_protocol::control::Status;
use serde::{Deserialize, Serialize};

use crate::{
    analysis::{Bin, LruFigures, ReadFigures},
    conditions::Conditions,
    reading::Outcome,
};

/// The files that are written.
pub const REPORT_NAMES: [&str; 2] = ["report.json", "report.html"];

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Mean read latency at the VM process, without the cache over with it.
    pub speedup: f64,
    /// The same in the guest, hits in its page cache included.
    pub app_speedup: f64,
    /// 1 / ((1 - h) + h * t_remote / t_disk), with h the hit ratio of an exact LRU.
    pub ideal_speedup: f64,
    /// `speedup` over `ideal_speedup`.
    pub p15_ratio: f64,
    /// Mean latency of a read that the cache answered, in the measured reads.
    pub t_remote_ms: f64,
    /// Mean latency of a read without the cache, in the same reads.
    pub t_disk_ms: f64,
    pub baseline: Run,
    pub cached: CachedRun,
    /// From the start of the agent to the end of the measured reads.
    pub evictions: Evictions,
    /// Sectors that did not hold what they must, in all runs.
    pub verify_errors: u64,
    /// Failed reads in the guest, and complaints of its kernel, in all runs.
    pub guest_io_errors: u64,
    pub server_kill: KillFigures,
    pub timeline: Timeline,
    pub expectations: Vec<Expectation>,
    /// Errors of any kind; empty if all went well.
    pub problems: Vec<String>,
    pub conditions: Conditions,
}

/// One guest's reads.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Run {
    /// At the VM process, of the measured reads.
    pub mean_read_ms: f64,
    /// In the guest, of the measured reads.
    pub app_mean_read_ms: f64,
    pub measured: PhaseFigures,
    pub warmup: PhaseFigures,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CachedRun {
    #[serde(flatten)]
    pub run: Run,
    /// Of the measured reads at the VM process, those that needed no disk.
    pub hit_ratio: f64,
    pub block_hit_ratio: f64,
    /// The same of an exact LRU as large as the guest's page cache and the cache together.
    pub lru_hit_ratio: f64,
    pub lru_block_hit_ratio: f64,
    pub lru_pages: u64,
    /// And of one as large as the cache alone.
    pub lru_of_cache_alone: LruFigures,
    pub guest_page_cache_pages: u64,
    /// What the VM process counted from the start of the warm-up to the end of the measured reads.
    pub counters: BTreeMap<String, u64>,
}

/// Some reads, as the reader in the guest and as the VM process saw them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PhaseFigures {
    pub seconds: f64,
    pub app: AppFigures,
    pub vm: ReadFigures,
    pub sources: Sources,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct AppFigures {
    pub reads: u64,
    pub mean_ms: f64,
    pub p50_ms: f64,
    pub p90_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
}

/// Where the 4 KiB blocks of the records came from. What the guest's kernel read ahead counts where it came from, so the
/// first figure is a little too small.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sources {
    pub guest_page_cache: u64,
    pub remote_memory: u64,
    pub disk: u64,
}

/// reported = admitted + duplicate + zero + unmatched + dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evictions {
    pub reported: u64,
    pub admitted: u64,
    /// Its content was cached already.
    pub duplicate: u64,
    pub zero: u64,
    /// The disk is not known to hold this content.
    pub unmatched: u64,
    /// Known, but there was no room on the way to the server, or no server.
    pub dropped: u64,
    /// In the guest: the agent's ring was full.
    pub lost: u64,
    /// Of those reported, all but the unmatched.
    pub known_ratio: f64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct KillFigures {
    /// Reads at the VM process from the kill to the end.
    pub reads_after: u64,
    /// Record reads in the guest from the kill to the end.
    pub app_reads_after: u64,
    /// Failed reads in the guest in this act.
    pub io_errors: u64,
    pub verify_errors: u64,
    pub seconds_before: f64,
    pub seconds_away: f64,
    pub seconds_after: f64,
    pub hit_ratio_before: f64,
    pub hit_ratio_away: f64,
    /// In the last five seconds.
    pub hit_ratio_end: f64,
    pub longest_read_ms: f64,
    pub cache_used_bytes_before: u64,
    pub cache_used_bytes_end: u64,
    /// From the end of the measured reads to the end of the agent.
    pub evictions: Evictions,
}

/// The run with the cache over time, from the start of its warm-up on.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Timeline {
    pub measured_from_s: f64,
    pub measured_to_s: f64,
    pub killed_s: f64,
    pub restarted_s: f64,
    pub end_s: f64,
    pub bins: Vec<Bin>,
    /// Seconds, bytes of the cache in use.
    pub cache_used: Vec<(f64, u64)>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Expectation {
    pub what: String,
    pub wanted: String,
    pub found: String,
    pub met: bool,
}

impl Evictions {
    pub fn adds_up(&self) -> bool {
        self.reported == self.admitted + self.duplicate + self.zero + self.unmatched + self.dropped
    }
}

impl Report {
    /// Returns what went wrong, for people.
    pub(crate) fn find_problems(
        &self,
        end: &Status,
        outcomes: &[&Outcome],
        kernel_faults: &[String],
        file_system: Option<String>,
    ) -> Vec<String> {
        let mut problems = Vec::new();
        if self.verify_errors > 0 {
            problems.push(format!("{} sectors held wrong bytes", self.verify_errors));
        }
        if self.guest_io_errors > 0 {
            problems.push(format!("the guest saw {} I/O errors", self.guest_io_errors));
        }
        problems.extend(outcomes.iter().flat_map(|outcome| &outcome.examples).cloned());
        problems.extend(kernel_faults.iter().map(|line| format!("the guest's kernel: {line}")));
        problems.extend(file_system.map(|said| format!("the file system is damaged: {said}")));
        if !self.evictions.adds_up() || !self.server_kill.evictions.adds_up() {
            problems.push("the fates of the evictions do not add up to those reported".into());
        }
        for (counter, what) in [
            ("disk_errors", "errors of the disk"),
            ("fetch_wrong", "pages that were not what was asked for"),
            ("fetch_unexpected", "replies nobody asked for"),
            ("foreign_writes", "times the image seemed to be written by someone else"),
        ] {
            let count = end.counters.get(counter).copied().unwrap_or_default();
            if count > 0 {
                problems.push(format!("remoca disk counted {count} {what}"));
            }
        }
        problems
    }

    /// Returns what the demonstration is expected to show. A short run is too cold to show it.
    pub(crate) fn judge(&self) -> Vec<Expectation> {
        let at_least = |what: &str, least: f64, found: f64, digits: usize| Expectation {
            what: what.to_owned(),
            wanted: format!("at least {least:.digits$}"),
            found: format!("{found:.digits$}"),
            met: found >= least,
        };
        let none = |what: &str, found: u64| Expectation {
            what: what.to_owned(),
            wanted: "none".into(),
            found: found.to_string(),
            met: found == 0,
        };
        let kill = &self.server_kill;
        let refilled = kill.cache_used_bytes_end > 0 && kill.hit_ratio_end > kill.hit_ratio_away;
        let errors = self.verify_errors + self.guest_io_errors;
        let mut expectations = vec![
            none("Wrong bytes and I/O errors in the guest", errors),
            none("Errors in the guest while the memory server was killed", kill.io_errors + kill.verify_errors),
            Expectation {
                what: "The cache refills after the memory server's return".into(),
                wanted: "hits again".into(),
                found: format!(
                    "hit ratio {:.2} at the end, {:.2} without the server",
                    kill.hit_ratio_end, kill.hit_ratio_away
                ),
                met: refilled,
            },
        ];
        if !self.conditions.quick {
            expectations.push(at_least("Evicted pages known by content", 0.98, self.evictions.known_ratio, 4));
            expectations.push(at_least("Speed-up of the mean read", 3.0, self.speedup, 2));
            expectations.push(at_least("Speed-up over that of an ideal cache (P15)", 0.9, self.p15_ratio, 3));
        }
        expectations
    }
}
