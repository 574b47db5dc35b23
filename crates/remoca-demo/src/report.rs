//! The report: the content of `report.json`, and the verdicts on it.
//!
//! Pure. Decision 0011 defines the figures.

use std::collections::BTreeMap;

use remoca_protocol::control::Status;
use serde::{Deserialize, Serialize};

use crate::{
    analysis::{Bin, LruFigures, ReadFigures},
    conditions::Conditions,
    reading::Outcome,
};

/// Names of the files of a report.
pub const REPORT_NAMES: [&str; 2] = ["report.json", "report.html"];

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Mean read latency at the VM process without the cache, divided by the latency with it.
    pub speedup: f64,
    /// The same ratio in the guest, including hits in its page cache.
    pub app_speedup: f64,
    /// 1 / ((1 - h) + h * t_remote / t_disk), with h the hit ratio of an exact LRU.
    pub ideal_speedup: f64,
    /// `speedup` divided by `ideal_speedup`.
    pub p15_ratio: f64,
    /// Mean latency of the measured reads that the cache answered.
    pub t_remote_ms: f64,
    /// Mean latency of the same reads without the cache.
    pub t_disk_ms: f64,
    pub baseline: Run,
    pub cached: CachedRun,
    /// Reads with a part of the cache as a local tier; `None` if that act was left out.
    #[serde(default)]
    pub tiers: Option<TierRun>,
    /// Evictions from the start of the agent to the end of the measured reads.
    pub evictions: Evictions,
    /// Number of sectors with wrong content, in all runs.
    pub verify_errors: u64,
    /// Number of failed reads in the guest and of failures in its kernel log, in all runs.
    pub guest_io_errors: u64,
    pub server_kill: KillFigures,
    pub timeline: Timeline,
    pub expectations: Vec<Expectation>,
    /// Errors of any kind; empty if all went well.
    pub problems: Vec<String>,
    pub conditions: Conditions,
}

/// Reads of one guest.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Run {
    /// Mean latency of the measured reads at the VM process.
    pub mean_read_ms: f64,
    /// Mean latency of the measured reads in the guest.
    pub app_mean_read_ms: f64,
    pub measured: PhaseFigures,
    pub warmup: PhaseFigures,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CachedRun {
    #[serde(flatten)]
    pub run: Run,
    /// Share of the measured reads at the VM process that needed no disk.
    pub hit_ratio: f64,
    pub block_hit_ratio: f64,
    /// The same share for an exact LRU as large as the guest's page cache and the cache together.
    pub lru_hit_ratio: f64,
    pub lru_block_hit_ratio: f64,
    pub lru_pages: u64,
    /// Figures of an exact LRU as large as the cache alone.
    pub lru_of_cache_alone: LruFigures,
    pub guest_page_cache_pages: u64,
    /// Counters of the VM process from the start of the warm-up to the end of the measured reads.
    pub counters: BTreeMap<String, u64>,
}

/// Reads of the guest whose cache is a local tier and a memory server behind it, of the same size together.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TierRun {
    #[serde(flatten)]
    pub run: Run,
    pub local_bytes: u64,
    pub remote_bytes: u64,
    /// Mean read latency without a cache, divided by the latency with these tiers.
    pub speedup: f64,
    /// As in [`CachedRun`].
    pub hit_ratio: f64,
    pub block_hit_ratio: f64,
    pub lru_hit_ratio: f64,
    pub local: TierFigures,
    pub remote: TierFigures,
    /// Figures of the memory server when it has all of the cache.
    pub remote_alone: TierFigures,
    /// Pages that fell out of the local tier unread and went to the memory server, in the measured part.
    pub demotions: u64,
    /// Pages to and from the memory server in the measured part, and the same when it has all of the cache.
    pub network_pages: u64,
    pub network_pages_without: u64,
    /// Evictions from the start of the agent to the end of the measured reads.
    pub evictions: Evictions,
    /// Number of sessions that the VM process lost.
    pub disconnections: u64,
}

/// One tier in the measured part, by 4 KiB blocks.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TierFigures {
    pub hits: u64,
    /// Share of the blocks that the guest read.
    pub hit_ratio: f64,
    /// Median time of the tier's answers; `None` if there were too few.
    pub median_us: Option<f64>,
    /// Memory that holds pages at the end.
    pub used_bytes: u64,
    pub pages_sent: u64,
    pub pages_received: u64,
}

/// Reads of a phase, as seen by the reader in the guest and by the VM process.
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

/// Sources of the 4 KiB blocks of the records. Blocks that the guest's kernel read ahead count at their source, so the
/// first figure is slightly too small.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sources {
    pub guest_page_cache: u64,
    pub remote_memory: u64,
    pub disk: u64,
}

/// reported = admitted + duplicate + zero + unmatched + dropped + passed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evictions {
    pub reported: u64,
    pub admitted: u64,
    /// Pages whose content was already cached.
    pub duplicate: u64,
    pub zero: u64,
    /// Pages whose content the disk is not known to hold.
    pub unmatched: u64,
    /// Known pages for which there was no room on the way to the server, or no server.
    pub dropped: u64,
    /// Known pages that the insertion policy did not put in the place of older ones.
    #[serde(default)]
    pub passed_over: u64,
    /// Pages lost in the guest because the agent's ring was full.
    pub lost: u64,
    /// Share of the reported pages that are not unmatched.
    pub known_ratio: f64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct KillFigures {
    /// Number of reads at the VM process from the kill to the end.
    pub reads_after: u64,
    /// Number of record reads in the guest from the kill to the end.
    pub app_reads_after: u64,
    /// Number of failed reads in the guest in this act.
    pub io_errors: u64,
    pub verify_errors: u64,
    pub seconds_before: f64,
    pub seconds_away: f64,
    pub seconds_after: f64,
    pub hit_ratio_before: f64,
    pub hit_ratio_away: f64,
    /// Hit ratio of the last five seconds.
    pub hit_ratio_end: f64,
    pub longest_read_ms: f64,
    pub cache_used_bytes_before: u64,
    pub cache_used_bytes_end: u64,
    /// Evictions from the end of the measured reads to the end of the agent.
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
    /// Time in seconds, and bytes of the cache in use then.
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
    /// Returns whether every reported page has exactly one fate.
    pub fn adds_up(&self) -> bool {
        let known = self.admitted + self.duplicate + self.zero + self.dropped + self.passed_over;
        self.reported == known + self.unmatched
    }
}

impl Report {
    /// Returns what went wrong, as sentences.
    pub(crate) fn find_problems(
        &self,
        ends: &[&Status],
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
        let in_tiers = self.tiers.as_ref().map(|tiers| &tiers.evictions);
        let evictions = [Some(&self.evictions), Some(&self.server_kill.evictions), in_tiers];
        if !evictions.into_iter().flatten().all(Evictions::adds_up) {
            problems.push("the fates of the evictions do not add up to those reported".into());
        }
        for (counter, what) in [
            ("disk_errors", "errors of the disk"),
            ("fetch_wrong", "pages with wrong content"),
            ("fetch_unexpected", "unexpected replies"),
            ("foreign_writes", "signs that another program wrote to the image"),
        ] {
            let count: u64 = ends.iter().filter_map(|end| end.counters.get(counter)).sum();
            if count > 0 {
                problems.push(format!("remoca disk counted {count} {what}"));
            }
        }
        if let Some(lost) = self.tiers.as_ref().map(|tiers| tiers.disconnections).filter(|lost| *lost > 0) {
            problems.push(format!("the cache in two tiers lost {lost} connections to its memory servers"));
        }
        problems
    }

    /// Returns what the demonstration is expected to show, with verdicts. A quick run is too cold for all of it.
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
        if let Some(tiers) = &self.tiers {
            let (found, without) = (tiers.remote.pages_received, tiers.remote_alone.pages_received);
            expectations.push(Expectation {
                what: "Pages fetched over the network with a local tier".into(),
                wanted: format!("fewer than the {without} without one"),
                found: found.to_string(),
                met: found < without && tiers.local.hits > 0,
            });
        }
        if !self.conditions.quick {
            if let Some(tiers) = &self.tiers {
                let least = self.cached.hit_ratio - 0.01;
                expectations.push(at_least(
                    "Hit ratio with a local tier, of the same size together",
                    least,
                    tiers.hit_ratio,
                    4,
                ));
            }
            expectations.push(at_least("Evicted pages known by content", 0.98, self.evictions.known_ratio, 4));
            expectations.push(at_least("Speed-up of the mean read", 3.0, self.speedup, 2));
            expectations.push(at_least("Speed-up over that of an ideal cache (P15)", 0.9, self.p15_ratio, 3));
        }
        expectations
    }
}
