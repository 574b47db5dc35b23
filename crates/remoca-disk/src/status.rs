//! What `remoca status` shows: the state of one VM process, as it goes over the control socket.

use crate::latency::LatencySummary;
use crate::port::AgentStats;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One VM process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    pub name: String,
    pub pid: u32,
    pub version: String,
    pub uptime_s: f64,
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
    pub memory: MemoryStatus,
}

/// The memory server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServerStatus {
    pub endpoint: String,
    pub connected: bool,
    /// Connected, but late: reads avoid it until it answers.
    pub stalled: bool,
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
    /// "up"; or "waiting" or "failing" while the server of the image is away.
    pub store: String,
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

/// Memory of this process, in bytes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MemoryStatus {
    pub index_bytes: u64,
    pub buffer_bytes: u64,
    pub known_blocks: u64,
}
