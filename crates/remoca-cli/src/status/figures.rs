//! Derives the figures of a VM's line from the counters of its VM process, since its start or over an interval. Pure.

use remoca_protocol::control::{LatencySummary, ServerStatus, Status};

/// Figures of one VM.
#[derive(Debug, PartialEq)]
pub struct Figures<'a> {
    pub name: &'a str,
    /// Memory that the server grants, in bytes; `None` with the cache off.
    pub cache_bytes: Option<u64>,
    pub used_bytes: u64,
    pub server: ServerState,
    pub reads: u64,
    /// Share of the blocks read that needed no disk; `None` without reads.
    pub hit_ratio: Option<f64>,
    /// Mean latency of reads from the cache; `None` without such reads.
    pub cache_read_us: Option<f64>,
    /// Mean latency of reads that needed the disk; `None` without such reads.
    pub disk_read_us: Option<f64>,
    pub writes: u64,
    /// Pages that the guest evicted, as its agent reported or as frames of its memory showed.
    pub evicted: u64,
    /// Share of the evicted pages that the disk is known to hold; `None` without evictions.
    pub known_ratio: Option<f64>,
    /// Address of the memory server that has the pool.
    pub pool_at: Option<&'a str>,
    /// Names of the disks on which a flush failed.
    pub failed_flushes: Vec<&'a str>,
}

/// State of the memory server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerState {
    /// No memory server is configured.
    None,
    Unreachable,
    Connected,
    /// Connected, but slower than the disk, so it gets only probes.
    LeftAlone,
}

impl<'a> Figures<'a> {
    /// Returns the figures of `status`: since `earlier`, an older status of the same process, or since the process
    /// started.
    pub fn of(status: &'a Status, earlier: Option<&Status>) -> Self {
        let count = |name: &str| {
            let value = |status: &Status| status.counters.get(name).copied().unwrap_or(0);
            value(status).saturating_sub(earlier.map_or(0, value))
        };
        let hits = count("hit_blocks") + count("zero_blocks");
        let blocks = hits + count("missed_blocks") + count("covered_blocks");
        // Frames of zeroes were never used, so they do not count as evictions.
        let frames = count("frames_looked_at").saturating_sub(count("frames_zero"));
        let evicted = count("evictions_reported") + frames;
        let known = evicted.saturating_sub(count("evictions_unmatched") + count("frames_unmatched"));
        let pick = |summary: fn(&Status) -> &LatencySummary| mean_us(summary(status), earlier.map(summary));
        let pool = status.servers.iter().find(|server| server.in_use);
        let failed = status.disks.iter().filter(|disk| disk.failed_flush.is_some());
        Self {
            name: &status.name,
            cache_bytes: status.cache.enabled.then_some(status.cache.granted_bytes),
            used_bytes: status.cache.used_bytes,
            server: ServerState::of(status.server.as_ref()),
            reads: count("reads"),
            hit_ratio: ratio(hits, blocks),
            cache_read_us: pick(|status| &status.latency.read_from_cache),
            disk_read_us: pick(|status| &status.latency.read_from_disk),
            writes: count("writes"),
            evicted,
            known_ratio: ratio(known, evicted),
            pool_at: pool.map(|server| server.endpoint.as_str()),
            failed_flushes: failed.map(|disk| disk.name.as_str()).collect(),
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
}

/// Returns the mean latency of the requests since `earlier`, in microseconds, or `None` if there were no requests.
fn mean_us(now: &LatencySummary, earlier: Option<&LatencySummary>) -> Option<f64> {
    let (sum_ns, count) = earlier.map_or((0, 0), |earlier| (earlier.sum_ns, earlier.count));
    ratio(now.sum_ns.saturating_sub(sum_ns), now.count.saturating_sub(count)).map(|ns| ns / 1000.0)
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn ratio(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Returns the status of a process with these counters. The pairs are the count and the sum of its read
    /// latencies.
    pub fn status(counters: Value, cache_ns: [u64; 2], disk_ns: [u64; 2]) -> Status {
        let latency = |[count, sum_ns]: [u64; 2]| {
            json!({"count": count, "sum_ns": sum_ns, "mean_us": 0.0, "p50_us": 0.0, "p99_us": 0.0, "p999_us": 0.0,
                "max_us": 0.0})
        };
        let status = json!({
            "name": "vm", "pid": 1, "version": "0.1.0", "uptime_s": 1.0, "started": "cold", "port": null,
            "server": {"endpoint": "unix:/s", "connected": true, "breaker": "closed", "error": null},
            "servers": [
                {"endpoint": "unix:/r", "in_use": false, "possible_bytes": null, "answered_s_ago": null, "error": "no"},
                {"endpoint": "unix:/s", "in_use": true, "possible_bytes": 8192, "answered_s_ago": 1, "error": null},
            ],
            "cache": {"enabled": true, "wanted_bytes": 8192, "granted_bytes": 8192, "used_bytes": 4096,
                "admission": "evictions", "hit_ratio": null},
            "disks": [{"name": "a", "image": "i", "socket": "s", "bytes": 4096, "read_only": false, "store": "up",
                "attached": true, "nbd_clients": null}],
            "counters": counters,
            "latency": {"read": latency([0, 0]), "read_from_cache": latency(cache_ns), "read_from_disk": latency(disk_ns),
                "write": latency([0, 0])},
            "hedging": {"late_after_us": 0.0, "disk": null, "server": null},
            "memory": {"index_bytes": 0, "buffer_bytes": 0, "known_blocks": 0},
        });
        serde_json::from_value(status).unwrap()
    }

    #[test]
    fn figures_follow_from_the_counters() {
        let counters = json!({
            "reads": 7, "writes": 3, "hit_blocks": 5, "zero_blocks": 1, "missed_blocks": 1, "covered_blocks": 1,
            "evictions_reported": 10, "evictions_unmatched": 2, "frames_looked_at": 8, "frames_zero": 2, "frames_unmatched": 2,
        });
        let status = status(counters, [4, 8_000], [2, 30_000]);
        let figures = Figures::of(&status, None);
        assert_eq!((figures.reads, figures.writes), (7, 3));
        assert_eq!(figures.hit_ratio, Some(0.75), "blocks of zeroes need no disk, covered ones do");
        assert_eq!((figures.evicted, figures.known_ratio), (16, Some(0.75)), "frames of zeroes do not count");
        assert_eq!((figures.cache_read_us, figures.disk_read_us), (Some(2.0), Some(15.0)));
        assert_eq!((figures.cache_bytes, figures.used_bytes), (Some(8192), 4096));
        assert_eq!((figures.server, figures.pool_at), (ServerState::Connected, Some("unix:/s")));
    }

    #[test]
    fn an_interval_has_its_own_figures() {
        let before = status(json!({"reads": 5, "hit_blocks": 5}), [5, 5_000], [1, 9_000]);
        let now = status(json!({"reads": 8, "hit_blocks": 6, "missed_blocks": 3}), [6, 8_000], [1, 9_000]);
        let figures = Figures::of(&now, Some(&before));
        assert_eq!((figures.reads, figures.hit_ratio), (3, Some(0.25)));
        assert_eq!((figures.cache_read_us, figures.disk_read_us), (Some(3.0), None));
        let still = Figures::of(&now, Some(&now));
        assert_eq!((still.reads, still.hit_ratio, still.known_ratio), (0, None, None));
    }

    #[test]
    fn counters_that_went_back_or_contradict_one_another_are_no_huge_numbers() {
        let before = status(json!({"reads": 5}), [5, 5_000], [0, 0]);
        let counters = json!({"reads": 1, "frames_looked_at": 1, "frames_zero": 2, "evictions_unmatched": 3});
        let now = status(counters, [0, 0], [0, 0]);
        let figures = Figures::of(&now, Some(&before));
        assert_eq!((figures.reads, figures.evicted, figures.known_ratio, figures.cache_read_us), (0, 0, None, None));
    }

    #[test]
    fn servers_and_disks_have_states() {
        let mut status = status(json!({}), [0, 0], [0, 0]);
        status.disks[0].failed_flush = Some("input/output error".into());
        status.cache.enabled = false;
        let figures = Figures::of(&status, None);
        assert_eq!((figures.cache_bytes, figures.failed_flushes), (None, vec!["a"]));
        let mut server = status.server.unwrap();
        server.breaker = "half-open".into();
        assert_eq!(ServerState::of(Some(&server)), ServerState::LeftAlone);
        server.connected = false;
        assert_eq!(ServerState::of(Some(&server)), ServerState::Unreachable);
        assert_eq!(ServerState::of(None), ServerState::None);
    }
}
