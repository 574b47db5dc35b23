//! What `remoca status` shows: the state of one VM process, as it goes over the control socket.

use crate::port::AgentStats;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One VM process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    pub name: String,
    pub pid: u32,
    pub version: String,
    /// How often another program has taken over without a restart.
    #[serde(default)]
    pub upgrades: u32,
    pub uptime_s: f64,
    /// "warm": with what a former process knew of a disk at least; else "cold".
    #[serde(default)]
    pub started: String,
    /// Why nothing was found of a former process.
    #[serde(default)]
    pub cold_reason: Option<String>,
    /// The server that the pool is on, or was on last, or the first of the list.
    pub server: Option<ServerStatus>,
    /// All servers that this process may use.
    #[serde(default)]
    pub servers: Vec<KnownServerStatus>,
    pub cache: CacheStatus,
    pub disks: Vec<DiskStatus>,
    pub port: Option<PortStatus>,
    /// Counters since the start; they only grow.
    pub counters: BTreeMap<String, u64>,
    pub latency: Latencies,
    pub hedging: HedgingStatus,
    pub memory: MemoryStatus,
    /// If the disks are to go to another process, or came from one.
    #[serde(default)]
    pub migration: Option<MigrationStatus>,
    /// Records that the trace lost, if there is a trace.
    #[serde(default)]
    pub trace_lost: Option<u64>,
}

/// A VM that migrates.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MigrationStatus {
    /// The disks are here, and their images locked.
    pub has_disks: bool,
    /// Where this process waits for its disks, or waited.
    pub incoming: Option<String>,
    /// The process at the other end of the connection, if there is one.
    pub peer: Option<String>,
    /// What happened last.
    pub news: Option<String>,
}

/// The memory server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServerStatus {
    pub endpoint: String,
    pub connected: bool,
    /// "closed": reads of cached pages go to it. "open" or "half-open": it is slower than the disk and left alone, but for
    /// probes; the last of them were faster than the disk.
    pub breaker: String,
    pub error: Option<String>,
}

/// One server of the list.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KnownServerStatus {
    pub endpoint: String,
    /// The pool is here.
    pub in_use: bool,
    /// What this process could have here, its pool included, when the server answered last.
    pub possible_bytes: Option<u64>,
    pub answered_s_ago: Option<u64>,
    /// Why it could not be used when it was tried last.
    pub error: Option<String>,
}

/// The cache.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CacheStatus {
    pub enabled: bool,
    pub wanted_bytes: u64,
    pub granted_bytes: u64,
    pub used_bytes: u64,
    /// What enters the cache now: "evictions" that the agent reports, what "frames" of guest memory held before reads
    /// overwrote them, or what the guest "reads".
    pub admission: String,
    /// Of the blocks that the guest read, the share answered without the disk; `None` before the first read.
    pub hit_ratio: Option<f64>,
}

/// One disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DiskStatus {
    pub name: String,
    pub image: String,
    pub socket: String,
    pub bytes: u64,
    pub read_only: bool,
    /// "up", or "waiting" while the server of the image is away.
    pub store: String,
    /// The error of a flush or durable write that failed: all flushes fail until the operator clears it.
    #[serde(default)]
    pub failed_flush: Option<String>,
    /// Why nothing was known of it at the start, although the process started warm.
    #[serde(default)]
    pub cold_reason: Option<String>,
    /// Whether a guest is attached.
    pub attached: bool,
    /// Swap areas on it that are known; a disk declared as one counts.
    #[serde(default)]
    pub swap_areas: usize,
    /// NBD clients, if the disk is an NBD export.
    pub nbd_clients: Option<usize>,
}

/// The eviction port.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PortStatus {
    pub socket: String,
    pub attached: bool,
    pub nbd_clients: Option<usize>,
    /// What the agent last said of itself.
    pub agent: Option<AgentStats>,
    /// One page of so many is asked for; 0 is all.
    pub advice: u32,
}

/// From the arrival of a request to its completion.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Latencies {
    pub read: LatencySummary,
    pub read_from_cache: LatencySummary,
    pub read_from_disk: LatencySummary,
    pub write: LatencySummary,
}

/// Durations of many requests: how many, and quantiles.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LatencySummary {
    pub count: u64,
    pub sum_ns: u64,
    pub mean_us: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub p999_us: f64,
    pub max_us: f64,
}

/// What is normal for disk and memory server now, by their newest reads, and what follows from it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HedgingStatus {
    /// Time without an answer of the server after which the disk is also asked.
    pub late_after_us: f64,
    /// `None` while there are too few reads.
    pub disk: Option<NormalLatency>,
    pub server: Option<NormalLatency>,
}

/// Quantiles of the newest reads, forgetting older ones.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NormalLatency {
    pub p50_us: f64,
    pub p99_us: f64,
}

/// Memory of this process, in bytes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MemoryStatus {
    pub index_bytes: u64,
    pub buffer_bytes: u64,
    pub known_blocks: u64,
    /// Of the guest, as far as its hypervisor shares it.
    #[serde(default)]
    pub guest_bytes: u64,
    /// Of the guest, for which the index has room beside the cache.
    #[serde(default)]
    pub guest_bytes_indexed: u64,
}
