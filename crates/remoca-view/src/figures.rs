//! Derives the figures of a VM's line from the counters of its VM process, since its start or over an interval. Pure.

use remoca_protocol::control::{DiskStatus, DiskTraffic, LatencySummary, PortStatus, ServerStatus, Status};
use serde::{Deserialize, Serialize};

const BLOCK_BYTES: u64 = 4096;
/// Age of a report from which an agent no longer counts as running. Agents report every ten seconds.
const AGENT_SILENT_S: u64 = 30;

/// Figures of one VM, or of several together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    #[serde(skip)]
    pub name: String,
    /// Whether the figures are those since the start of the process, and not of an interval.
    pub since_start: bool,
    /// Time in which the requests were counted.
    pub seconds: f64,
    /// Number of disks that a guest has attached.
    pub disks_attached: usize,
    pub disks: usize,
    pub agent: Agent,
    /// Memory that the server grants, in bytes; `None` with the cache off.
    #[serde(skip)]
    pub cache_bytes: Option<u64>,
    #[serde(skip)]
    pub used_bytes: u64,
    #[serde(skip)]
    pub server: ServerState,
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub written_bytes: u64,
    /// Blocks read that needed no disk.
    pub hit_blocks: u64,
    /// Blocks read that the cache could have answered: those of reads of whole blocks.
    pub read_blocks: u64,
    /// Reads that needed no disk, and the time that they took.
    pub hits: Taken,
    /// Reads that needed the disk, and the time that they took.
    pub disk_reads: Taken,
    /// Time by which the cache shortened the reads, negative if it lengthened them; `None` while the disk's time is not
    /// known.
    pub saved_s: Option<f64>,
    /// Pages that the guest evicted, as its agent reported or as frames of its memory showed.
    pub evicted: u64,
    /// Those of which it is not known whether the disk holds them, because the cache was off.
    #[serde(default)]
    pub unjudged: u64,
    /// Evicted pages that the disk is known to hold.
    pub known: u64,
    /// Address of the memory server that has the pool, the local tier, and the number of pools that drain.
    #[serde(skip)]
    pub pool_at: Option<String>,
    /// Names of the disks on which a flush failed.
    #[serde(skip)]
    pub failed_flushes: Vec<String>,
}

/// Number of requests, and the sum of their latencies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    pub count: u64,
    pub sum_ns: u64,
}

/// State of the agent in the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Agent {
    /// The VM has no eviction port.
    #[default]
    NoPort,
    /// No agent has reported since the guest attached the port.
    NotHeard,
    Running,
    /// Seconds since the last report of an agent that should have reported by now.
    SilentFor(u64),
}

/// State of the memory server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServerState {
    /// No memory server is configured.
    #[default]
    None,
    Unreachable,
    Connected,
    /// Connected, but slower than the disk, so it gets only probes.
    LeftAlone,
}

impl Figures {
    /// Returns the figures of `status`: since `earlier`, an older status of the same program, or since it started.
    pub fn of(status: &Status, earlier: Option<&Status>) -> Self {
        let count = |name: &str| counter_since(status, earlier, name);
        let hit_blocks = count("hit_blocks").saturating_add(count("zero_blocks"));
        // Frames of zeroes were never used, so they do not count as evictions.
        let frames = count("frames_looked_at").saturating_sub(count("frames_zero"));
        let evicted = count("evictions_reported").saturating_add(frames);
        let unjudged = count("evictions_unjudged");
        let unmatched = count("evictions_unmatched").saturating_add(count("frames_unmatched"));
        let taken = |summary: fn(&Status) -> &LatencySummary| Taken::since(summary(status), earlier.map(summary));
        let hits = taken(|status| &status.latency.read_from_cache);
        let granted = status.cache.granted_bytes.saturating_add(status.cache.local_granted_bytes);
        let failed = status.disks.iter().filter(|disk| disk.failed_flush.is_some());
        Self {
            name: status.name.clone(),
            since_start: earlier.is_none(),
            seconds: status.uptime_s - earlier.map_or(0.0, |earlier| earlier.uptime_s),
            disks_attached: status.disks.iter().filter(|disk| disk.attached).count(),
            disks: status.disks.len(),
            agent: Agent::of(status.port.as_ref()),
            cache_bytes: status.cache.enabled.then_some(granted),
            used_bytes: status.cache.used_bytes,
            server: ServerState::of(status.server.as_ref()),
            reads: count("reads"),
            read_bytes: count("read_blocks").saturating_mul(BLOCK_BYTES),
            writes: count("writes"),
            written_bytes: count("written_blocks").saturating_mul(BLOCK_BYTES),
            hit_blocks,
            read_blocks: hit_blocks.saturating_add(count("missed_blocks")).saturating_add(count("covered_blocks")),
            hits,
            disk_reads: taken(|status| &status.latency.read_from_disk),
            saved_s: disk_us(status, earlier.is_some()).map(|us| hits.saved_s(us)),
            evicted,
            unjudged,
            known: evicted.saturating_sub(unjudged).saturating_sub(unmatched),
            pool_at: pool_at(status),
            failed_flushes: failed.map(|disk| disk.name.clone()).collect(),
        }
    }

    /// Returns the figures with what JSON leaves out, because `status`, from which they follow, has it.
    #[must_use]
    pub fn completed(self, status: &Status) -> Self {
        let Self { name, cache_bytes, used_bytes, server, pool_at, failed_flushes, .. } = Self::of(status, None);
        Self { name, cache_bytes, used_bytes, server, pool_at, failed_flushes, ..self }
    }

    /// Returns the figures of all VMs together, for the last line: those of intervals as if each were as long as the longest. What a VM
    /// without an interval did since its start has a part only if all are such.
    pub fn total(all: &[Self]) -> Option<Self> {
        let since_start = all.iter().all(|vm| vm.since_start);
        let counted = all.iter().filter(|vm| vm.since_start == since_start);
        let seconds = counted.map(|vm| vm.seconds).fold(0.0, f64::max);
        let part = |vm: &Self| match vm.since_start {
            _ if since_start => vm.clone(),
            false if vm.seconds > 0.0 => vm.times(seconds / vm.seconds),
            _ => vm.times(0.0),
        };
        let mut parts = all.iter().map(part);
        let first = parts.next()?;
        let mut total = Self {
            name: "TOTAL".into(),
            since_start,
            seconds,
            agent: Agent::NoPort,
            server: ServerState::None,
            pool_at: None,
            failed_flushes: Vec::new(),
            ..first
        };
        for vm in parts {
            total.disks_attached += vm.disks_attached;
            total.disks += vm.disks;
            total.cache_bytes = sum(total.cache_bytes, vm.cache_bytes, u64::saturating_add);
            total.used_bytes = total.used_bytes.saturating_add(vm.used_bytes);
            total.reads = total.reads.saturating_add(vm.reads);
            total.read_bytes = total.read_bytes.saturating_add(vm.read_bytes);
            total.writes = total.writes.saturating_add(vm.writes);
            total.written_bytes = total.written_bytes.saturating_add(vm.written_bytes);
            total.hit_blocks = total.hit_blocks.saturating_add(vm.hit_blocks);
            total.read_blocks = total.read_blocks.saturating_add(vm.read_blocks);
            total.hits = total.hits.and(vm.hits);
            total.disk_reads = total.disk_reads.and(vm.disk_reads);
            total.saved_s = sum(total.saved_s, vm.saved_s, |one, other| one + other);
            total.evicted = total.evicted.saturating_add(vm.evicted);
            total.unjudged = total.unjudged.saturating_add(vm.unjudged);
            total.known = total.known.saturating_add(vm.known);
        }
        Some(total)
    }

    /// Returns the figures with counts and times that are `factor` times as large.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "for people to read"
    )]
    fn times(&self, factor: f64) -> Self {
        let times = |count: u64| (count as f64 * factor).round() as u64;
        let taken = |taken: Taken| Taken { count: times(taken.count), sum_ns: times(taken.sum_ns) };
        Self {
            reads: times(self.reads),
            read_bytes: times(self.read_bytes),
            writes: times(self.writes),
            written_bytes: times(self.written_bytes),
            hit_blocks: times(self.hit_blocks),
            read_blocks: times(self.read_blocks),
            hits: taken(self.hits),
            disk_reads: taken(self.disk_reads),
            saved_s: self.saved_s.filter(|_| factor > 0.0).map(|saved_s| saved_s * factor),
            evicted: times(self.evicted),
            unjudged: times(self.unjudged),
            known: times(self.known),
            ..self.clone()
        }
    }

    /// Returns the share of the blocks read that needed no disk, or `None` without reads. Reads of parts of blocks do not count.
    pub fn hit_ratio(&self) -> Option<f64> {
        ratio(self.hit_blocks, self.read_blocks)
    }

    /// Returns the share of the evicted pages that the disk is known to hold, or `None` if there were none. Pages that were evicted while
    /// the cache was off do not count.
    pub fn known_ratio(&self) -> Option<f64> {
        ratio(self.known, self.evicted.saturating_sub(self.unjudged))
    }

    /// Returns `count` for each second of the period.
    pub fn each_second(&self, count: u64) -> f64 {
        each_second(count, self.seconds)
    }
}

/// Returns whether `earlier` is an older status of the program that reports `status`.
#[must_use]
pub fn is_same_program(earlier: &Status, status: &Status) -> bool {
    let id = |status: &Status| (status.pid, status.upgrades);
    id(earlier) == id(status) && earlier.name == status.name && earlier.uptime_s <= status.uptime_s
}

/// Returns the value of a counter of `status`, or 0 for one that its version does not have.
#[must_use]
pub fn counter(status: &Status, name: &str) -> u64 {
    status.counters.get(name).copied().unwrap_or(0)
}

/// Returns by how much a counter has grown since `earlier`, an older status of the same program, or since it started.
#[must_use]
pub fn counter_since(status: &Status, earlier: Option<&Status>, name: &str) -> u64 {
    counter(status, name).saturating_sub(earlier.map_or(0, |earlier| counter(earlier, name)))
}

/// Returns in short where the pools are, or `None` if there is none.
fn pool_at(status: &Status) -> Option<String> {
    let server = status.servers.iter().find(|server| server.in_use && !server.is_local_tier);
    let tier = status.pools.iter().any(|pool| pool.is_local_tier).then(|| "local tier".to_owned());
    let draining = match status.pools.iter().filter(|pool| pool.state == "draining").count() {
        0 => None,
        count => Some(format!("{count} draining")),
    };
    let parts: Vec<_> = server.map(|server| server.endpoint.clone()).into_iter().chain(tier).chain(draining).collect();
    (!parts.is_empty()).then(|| parts.join(" + "))
}

/// Returns `count` for each of `seconds`, or 0 for a period of no length.
#[expect(clippy::cast_precision_loss, reason = "for people to read")]
pub fn each_second(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

fn sum<T>(one: Option<T>, other: Option<T>, add: fn(T, T) -> T) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(add(one, other)),
        (one, other) => one.or(other),
    }
}

/// Returns the usual time of a disk read, in microseconds: of the newest reads for an interval, and of all reads since
/// the start otherwise. Returns `None` if there were none.
pub fn disk_us(status: &Status, is_interval: bool) -> Option<f64> {
    let newest = status.hedging.disk.as_ref().map(|disk| disk.p50_us);
    let all = &status.latency.read_from_disk;
    let of_all = (all.count > 0).then_some(all.p50_us);
    if is_interval { newest.or(of_all) } else { of_all.or(newest) }
}

/// Returns the requests of a disk: since `earlier`, an older status of the same program, or since it started.
pub fn traffic(disk: &DiskStatus, earlier: Option<&Status>) -> DiskTraffic {
    let earlier = earlier.and_then(|earlier| earlier.disks.iter().find(|before| before.name == disk.name));
    let before = earlier.map(|disk| disk.traffic).unwrap_or_default();
    let DiskTraffic { reads, read_bytes, reads_from_cache, writes, written_bytes } = disk.traffic;
    DiskTraffic {
        reads: reads.saturating_sub(before.reads),
        read_bytes: read_bytes.saturating_sub(before.read_bytes),
        reads_from_cache: reads_from_cache.saturating_sub(before.reads_from_cache),
        writes: writes.saturating_sub(before.writes),
        written_bytes: written_bytes.saturating_sub(before.written_bytes),
    }
}

impl Taken {
    /// Returns the requests since `earlier`, or all of them.
    pub(crate) fn since(now: &LatencySummary, earlier: Option<&LatencySummary>) -> Self {
        let (sum_ns, count) = earlier.map_or((0, 0), |earlier| (earlier.sum_ns, earlier.count));
        Self { count: now.count.saturating_sub(count), sum_ns: now.sum_ns.saturating_sub(sum_ns) }
    }

    /// Returns both together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { count: self.count + other.count, sum_ns: self.sum_ns.saturating_add(other.sum_ns) }
    }

    /// Returns the mean latency in microseconds, or `None` without requests.
    pub fn mean_us(self) -> Option<f64> {
        ratio(self.sum_ns, self.count).map(|ns| ns / 1000.0)
    }

    /// Returns the time that the requests would have taken at `us` microseconds each, less what they took.
    #[expect(clippy::cast_precision_loss, reason = "for people to read")]
    fn saved_s(self, us: f64) -> f64 {
        (self.count as f64 * us - self.sum_ns as f64 / 1e3) / 1e6
    }
}

impl Agent {
    /// Returns the state of the agent that uses `port`.
    pub fn of(port: Option<&PortStatus>) -> Self {
        match port.map(|port| port.agent_heard_s_ago) {
            None => Self::NoPort,
            Some(None) => Self::NotHeard,
            Some(Some(ago)) if ago < AGENT_SILENT_S => Self::Running,
            Some(Some(ago)) => Self::SilentFor(ago),
        }
    }
}

impl ServerState {
    /// Returns the state of the memory server, or [`Self::None`] if none is configured.
    pub fn of(server: Option<&ServerStatus>) -> Self {
        match server {
            None => Self::None,
            Some(server) if !server.connected => Self::Unreachable,
            Some(server) if server.breaker == "closed" => Self::Connected,
            Some(_) => Self::LeftAlone,
        }
    }

    /// Returns the state in words, or `-` without a server.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::None => "-",
            Self::Unreachable => "unreachable",
            Self::Connected => "connected",
            Self::LeftAlone => "left alone",
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn ratio(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::status;
    use remoca_protocol::control::{KnownServerStatus, PoolStatus};
    use serde_json::{Value, json};

    #[test]
    fn figures_follow_from_the_counters() {
        let counters = json!({
            "reads": 7, "writes": 3, "hit_blocks": 5, "zero_blocks": 1, "missed_blocks": 1, "covered_blocks": 1,
            "evictions_reported": 10, "evictions_unmatched": 2, "frames_looked_at": 8, "frames_zero": 2, "frames_unmatched": 2,
        });
        let status = status(counters, [4, 8_000], [2, 30_000]);
        let figures = Figures::of(&status, None);
        assert_eq!((figures.reads, figures.writes), (7, 3));
        assert_eq!(figures.hit_ratio(), Some(0.75), "blocks of zeroes need no disk, covered ones do");
        assert_eq!((figures.evicted, figures.known_ratio()), (16, Some(0.75)), "frames of zeroes do not count");
        assert_eq!((figures.hits.mean_us(), figures.disk_reads.mean_us()), (Some(2.0), Some(15.0)));
        assert_eq!((figures.cache_bytes, figures.used_bytes), (Some(8192), 4096));
        assert_eq!((figures.server, figures.pool_at.as_deref()), (ServerState::Connected, Some("unix:/s")));
    }

    #[test]
    fn pages_that_are_evicted_while_the_cache_is_off_are_neither_known_nor_unknown() {
        let off = json!({"evictions_reported": 10, "evictions_unjudged": 10});
        let again = json!({"evictions_reported": 30, "evictions_unmatched": 4, "evictions_unjudged": 20});
        let [off, again] = [off, again].map(|counters| Figures::of(&status(counters, [0, 0], [0, 0]), None));
        assert_eq!((off.evicted, off.known, off.known_ratio()), (10, 0, None));
        assert_eq!((again.known, again.known_ratio()), (6, Some(0.6)));
        let total = Figures::total(&[off, again]).unwrap();
        assert_eq!((total.evicted, total.known_ratio()), (40, Some(0.6)));
    }

    #[test]
    fn an_interval_has_its_own_figures() {
        let before = status(json!({"reads": 5, "hit_blocks": 5}), [5, 5_000], [1, 9_000]);
        let now = status(json!({"reads": 8, "hit_blocks": 6, "missed_blocks": 3}), [6, 8_000], [1, 9_000]);
        let figures = Figures::of(&now, Some(&before));
        assert_eq!((figures.reads, figures.hit_ratio()), (3, Some(0.25)));
        assert_eq!((figures.hits.mean_us(), figures.disk_reads.mean_us()), (Some(3.0), None));
        let still = Figures::of(&now, Some(&now));
        assert_eq!((still.reads, still.hit_ratio(), still.known_ratio()), (0, None, None));
    }

    #[test]
    fn counters_that_went_back_or_contradict_one_another_are_no_huge_numbers() {
        let before = status(json!({"reads": 5}), [5, 5_000], [0, 0]);
        let counters = json!({"reads": 1, "frames_looked_at": 1, "frames_zero": 2, "evictions_unmatched": 3});
        let now = status(counters, [0, 0], [0, 0]);
        let figures = Figures::of(&now, Some(&before));
        assert_eq!((figures.reads, figures.evicted, figures.known_ratio(), figures.hits.mean_us()), (0, 0, None, None));
    }

    #[test]
    fn servers_and_disks_have_states() {
        let mut status = status(json!({}), [0, 0], [0, 0]);
        status.disks[0].failed_flush = Some("input/output error".into());
        status.cache.enabled = false;
        let figures = Figures::of(&status, None);
        assert_eq!((figures.cache_bytes, figures.failed_flushes), (None, vec!["a".to_owned()]));
        let mut server = status.server.unwrap();
        server.breaker = "half-open".into();
        assert_eq!(ServerState::of(Some(&server)), ServerState::LeftAlone);
        server.connected = false;
        assert_eq!(ServerState::of(Some(&server)), ServerState::Unreachable);
        assert_eq!(ServerState::of(None), ServerState::None);
    }

    #[test]
    fn pools_are_said_in_short() {
        let mut status = status(json!({}), [0, 0], [0, 0]);
        let pool = |state: &str, is_local_tier: bool| {
            serde_json::from_value::<PoolStatus>(json!({"server": "s", "state": state, "is_mapped": is_local_tier,
                "is_local_tier": is_local_tier, "generation": "1", "granted_bytes": 0, "pages_sent": 0, "pages_requested": 0,
                "pages_received": 0, "pages_taken_back": 0}))
            .unwrap()
        };
        let local = KnownServerStatus { is_local_tier: true, ..status.servers[1].clone() };
        status.servers.insert(0, local);
        status.pools = vec![pool("draining", false), pool("connected", true), pool("connected", false)];
        let at = |status: &Status| Figures::of(status, None).pool_at;
        assert_eq!(at(&status).as_deref(), Some("unix:/s + local tier + 1 draining"));
        status.servers.clear();
        status.pools.truncate(1);
        assert_eq!(at(&status).as_deref(), Some("1 draining"));
        status.pools.clear();
        assert_eq!(at(&status), None);
    }

    #[test]
    fn the_time_saved_is_what_the_hits_would_have_taken_on_the_disk() {
        let mut before = status(json!({}), [0, 0], [1, 9_000]);
        before.latency.read_from_disk.p50_us = 1000.0;
        let mut now = status(json!({}), [2000, 400_000_000], [1, 9_000]);
        assert_eq!(Figures::of(&now, None).saved_s.map(f64::round), Some(0.0), "a disk that takes no time");
        now.latency.read_from_disk.p50_us = 1000.0;
        assert_eq!(Figures::of(&now, None).saved_s, Some(1.6));
        // The newest reads say more about an interval.
        now.hedging.disk = Some(remoca_protocol::control::NormalLatency { p50_us: 100.0, p99_us: 100.0 });
        assert_eq!(Figures::of(&now, Some(&before)).saved_s.map(|saved| (saved * 10.0).round()), Some(-2.0));
        now.hedging.disk = None;
        now.latency.read_from_disk.count = 0;
        assert_eq!(Figures::of(&now, None).saved_s, None);
    }

    #[test]
    fn an_agent_is_running_while_it_reports() {
        let of = |port: Value| Agent::of(serde_json::from_value::<Option<PortStatus>>(port).unwrap().as_ref());
        let port = |heard: Value| json!({"socket": "p", "attached": true, "agent": null, "advice": 1, "agent_heard_s_ago": heard});
        assert_eq!(of(json!(null)), Agent::NoPort);
        assert_eq!(of(port(json!(null))), Agent::NotHeard);
        assert_eq!(of(port(json!(11))), Agent::Running);
        assert_eq!(of(port(json!(61))), Agent::SilentFor(61));
    }

    #[test]
    fn a_total_adds_up() {
        let counters = json!({"reads": 7, "read_blocks": 8, "hit_blocks": 5, "missed_blocks": 5});
        let mut one = status(counters, [4, 8_000], [2, 30_000]);
        one.latency.read_from_disk.p50_us = 1002.0;
        let other = status(json!({"reads": 1, "missed_blocks": 10}), [0, 0], [0, 0]);
        let total = Figures::total(&[Figures::of(&one, None), Figures::of(&other, None)]).unwrap();
        assert_eq!((total.name.as_str(), total.reads, total.read_bytes), ("TOTAL", 8, 8 * 4096));
        assert_eq!((total.hit_ratio(), total.saved_s), (Some(0.25), Some(0.004)));
        assert_eq!((total.cache_bytes, total.disks, total.pool_at), (Some(16384), 2, None));
        assert_eq!(Figures::total(&[]), None);
    }

    #[test]
    fn a_total_of_intervals_has_their_rates_and_nothing_from_before_them() {
        let vm = |since_start, seconds, reads, cache| Figures {
            since_start,
            seconds,
            reads,
            hit_blocks: reads,
            read_blocks: 2 * reads,
            hits: Taken { count: reads, sum_ns: 1000 * reads },
            saved_s: Some(1.0),
            cache_bytes: Some(cache),
            disks: 1,
            ..Figures::default()
        };
        // One that missed a look, and one that has just come, or was upgraded after days.
        let all = [vm(true, 1e6, 1_000_000, 1), vm(false, 5.0, 500, 2), vm(false, 10.0, 200, 4)];
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
            let total = Figures::total(&order.map(|at| all[at].clone())).unwrap();
            assert_eq!((total.since_start, total.seconds, total.each_second(total.reads)), (false, 10.0, 120.0));
            assert_eq!((total.hit_blocks, total.read_blocks, total.hits.count), (1200, 2400, 1200));
            assert_eq!((total.hits.mean_us(), total.saved_s), (Some(1.0), Some(3.0)));
            assert_eq!((total.cache_bytes, total.disks), (Some(7), 3), "what they have");
        }
        let since_start = Figures::total(&[all[0].clone(), vm(true, 10.0, 5, 1)]).unwrap();
        assert_eq!((since_start.since_start, since_start.reads), (true, 1_000_005));
    }
}
