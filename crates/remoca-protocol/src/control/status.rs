//! Content of `remoca status`: the state of one VM process, as sent over the control socket.

use crate::port::AgentStats;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Status of one VM process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    pub name: String,
    pub pid: u32,
    pub version: String,
    /// Whether the file of the program that runs has been replaced or removed since.
    #[serde(default)]
    pub is_replaced: bool,
    /// Number of times that another program has taken over without a restart.
    #[serde(default)]
    pub upgrades: u32,
    pub uptime_s: f64,
    /// "warm" if the process started with what the previous process knew of at least one disk, otherwise "cold".
    #[serde(default)]
    pub started: String,
    /// Reason why no state of a previous process was found.
    #[serde(default)]
    pub cold_reason: Option<String>,
    /// Why there is no state file any more, so that a restart will find the cache cold.
    #[serde(default)]
    pub state_lost: Option<String>,
    /// Why the process does not run with the configuration that its files say.
    #[serde(default)]
    pub notice: Option<String>,
    /// Server that has the pool, or had it last, or otherwise the first of the list.
    pub server: Option<ServerStatus>,
    /// All servers that this process may use.
    #[serde(default)]
    pub servers: Vec<KnownServerStatus>,
    /// Pools that the cache is made of now, one for each session.
    #[serde(default)]
    pub pools: Vec<PoolStatus>,
    pub cache: CacheStatus,
    pub disks: Vec<DiskStatus>,
    pub port: Option<PortStatus>,
    /// Counters since the start; they only grow.
    pub counters: BTreeMap<String, u64>,
    pub latency: Latencies,
    pub hedging: HedgingStatus,
    pub memory: MemoryStatus,
    /// Status of the migration, if the disks are to go to another process or came from one.
    #[serde(default)]
    pub migration: Option<MigrationStatus>,
    /// Number of records that the trace lost, or `None` if there is no trace.
    #[serde(default)]
    pub trace_lost: Option<u64>,
}

impl Status {
    /// Returns whether the process has the disks, and not another one to which or from which the VM migrates.
    #[must_use]
    pub fn has_disks(&self) -> bool {
        self.migration.as_ref().is_none_or(|migration| migration.has_disks)
    }

    /// Returns whether the guest has more memory than is covered ([`MemoryStatus::guest_bytes_indexed`]). A process whose disks are elsewhere
    /// has an index that knows no guest, so it is never said of that.
    #[must_use]
    pub fn exceeds_index(&self) -> bool {
        self.has_disks() && self.memory.guest_bytes > self.memory.guest_bytes_indexed
    }
}

/// Status of a VM that migrates.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MigrationStatus {
    /// Whether this process has the disks, and their images are locked.
    pub has_disks: bool,
    /// Address at which this process waits, or waited, for its disks.
    pub incoming: Option<String>,
    /// Process at the other end of the connection, or `None` if there is no connection.
    pub peer: Option<String>,
    /// Latest event of the migration.
    pub news: Option<String>,
}

/// Status of the memory server: that of the local tier only if there is no other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServerStatus {
    pub endpoint: String,
    pub connected: bool,
    /// "closed": reads of cached pages go to the server. "open": the server is slower than the disk, and gets only
    /// probes. "half-open": it still gets only probes, but the last of them were faster than the disk.
    pub breaker: String,
    pub error: Option<String>,
}

/// Status of one server of the list.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KnownServerStatus {
    pub endpoint: String,
    /// Whether it is the server of the local tier, which is none of the operator's list.
    #[serde(default)]
    pub is_local_tier: bool,
    /// Whether this server has the pool.
    pub in_use: bool,
    /// Memory that this process could have on the server, including its current pool, when the server answered last.
    pub possible_bytes: Option<u64>,
    pub answered_s_ago: Option<u64>,
    /// Reason why the last attempt to use the server failed.
    pub error: Option<String>,
    /// Pages and replies of the server that were not what it was asked for. Older processes do not tell it.
    #[serde(default)]
    pub lies: Option<u64>,
}

/// Status of one pool of the cache. Its counters are those since its session began.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PoolStatus {
    /// Endpoint of the server that has the pool.
    pub server: String,
    /// "connected"; "draining" if no page enters the pool any more, because its server was taken out of the list or is much
    /// slower than the others; or "away" while the server of a mapped pool cannot be reached: the pool is in use all that
    /// time.
    pub state: String,
    /// Whether the pool is in memory of this host that the process reads and writes by itself.
    pub is_mapped: bool,
    /// Whether the pool is the local tier, in front of all others.
    #[serde(default)]
    pub is_local_tier: bool,
    /// Number that is new whenever the pool starts empty, as 16 hexadecimal digits.
    pub generation: String,
    /// Size that the server granted last.
    pub granted_bytes: u64,
    /// Part of it that holds pages. A pool that is drained is given back when nothing is.
    #[serde(default)]
    pub used_bytes: u64,
    /// Blocks that the guest received from the pool.
    #[serde(default)]
    pub hits: u64,
    /// Median time of its answers; `None` before there were enough.
    #[serde(default)]
    pub latency_us: Option<f64>,
    /// Pages that were sent to the pool.
    pub pages_sent: u64,
    /// Pages that the pool was asked for, and those that it sent.
    pub pages_requested: u64,
    pub pages_received: u64,
    /// Pages that were not there, because the server had taken their memory back. Only mapped pools have any.
    pub pages_taken_back: u64,
}

/// Status of the cache.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CacheStatus {
    pub enabled: bool,
    /// Sizes without the local tier.
    pub wanted_bytes: u64,
    pub granted_bytes: u64,
    /// Largest size that servers may have granted: what they were asked for and have not answered. Older processes do not tell it.
    #[serde(default)]
    pub granted_at_most_bytes: u64,
    /// Memory of all tiers that holds pages. That of lost pools counts until their servers return or others take their place, so it can
    /// be more than is granted.
    pub used_bytes: u64,
    /// Sizes of the local tier.
    #[serde(default)]
    pub local_wanted_bytes: u64,
    #[serde(default)]
    pub local_granted_bytes: u64,
    #[serde(default)]
    pub local_granted_at_most_bytes: u64,
    /// Endpoint of the server that has the local tier, or would be asked for one; `None` of a process without memory servers.
    #[serde(default)]
    pub local_server: Option<String>,
    /// Source of the pages that enter the cache now: "evictions" that the agent reports, "frames" of guest memory
    /// before reads overwrite them, or blocks that the guest "reads".
    pub admission: String,
    /// Policy by which evicted pages enter a full cache: "lru" if all do; "bimodal" if none does while the cache answers as much as it can,
    /// at most one in 32 otherwise, and all while the cache is renewed.
    #[serde(default)]
    pub insertion: String,
    /// Share of the last reads that LRU would have answered, as tried on a sample; `None` before the cache is full.
    #[serde(default)]
    pub lru_hit_ratio: Option<f64>,
    /// The same with bimodal insertion.
    #[serde(default)]
    pub bimodal_hit_ratio: Option<f64>,
    /// Share of the blocks read by the guest that were answered without the disk; `None` before the first read. Reads of parts of blocks
    /// do not count.
    pub hit_ratio: Option<f64>,
}

/// Status of one disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DiskStatus {
    pub name: String,
    pub image: String,
    pub socket: String,
    pub bytes: u64,
    /// Size of the image before it became smaller; `None` if it has not, or is as large again.
    #[serde(default)]
    pub shrunk_from_bytes: Option<u64>,
    /// Whether all attached guests have been told the size. Those that have not see it when they connect again.
    #[serde(default = "yes")]
    pub guest_sees_size: bool,
    pub read_only: bool,
    /// "up", or "waiting" while the server of the image cannot be reached or used.
    pub store: String,
    /// Why the store waits; `None` if it does not.
    #[serde(default)]
    pub store_error: Option<String>,
    /// Error of a failed flush or durable write. All flushes fail until the operator clears it.
    #[serde(default)]
    pub failed_flush: Option<String>,
    /// Reason why nothing was known of the disk at the start, although the process started warm.
    #[serde(default)]
    pub cold_reason: Option<String>,
    /// Whether a guest is attached.
    pub attached: bool,
    /// Whether its connection outlives a crash of the process, so that it need not connect again.
    #[serde(default)]
    pub outlives_crash: bool,
    /// Number of known swap areas on the disk. A disk that is declared a swap area adds one.
    #[serde(default)]
    pub swap_areas: usize,
    /// Number of NBD clients, or `None` if the disk is not an NBD export.
    pub nbd_clients: Option<usize>,
    /// Whether an attached guest would be offered more features if it connected again, after an upgrade.
    #[serde(default)]
    pub offers_more: bool,
    /// Requests completed since this program started.
    #[serde(default)]
    pub traffic: DiskTraffic,
}

/// Requests of one disk; the numbers only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskTraffic {
    pub reads: u64,
    pub read_bytes: u64,
    /// Reads answered without the disk.
    pub reads_from_cache: u64,
    pub writes: u64,
    pub written_bytes: u64,
}

fn yes() -> bool {
    true
}

/// Status of the eviction port.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PortStatus {
    pub socket: String,
    pub attached: bool,
    /// As for a disk.
    #[serde(default)]
    pub outlives_crash: bool,
    pub nbd_clients: Option<usize>,
    /// As for a disk.
    #[serde(default)]
    pub offers_more: bool,
    /// Latest statistics of the agent.
    pub agent: Option<AgentStats>,
    /// Time since the agent's latest report; `None` if none came since the guest attached the port. A running agent
    /// reports at least every ten seconds.
    #[serde(default)]
    pub agent_heard_s_ago: Option<u64>,
    /// Advice to the agent: N to send one page in N, or 0 to send every page.
    pub advice: u32,
    /// Advice to the agent: N to send only the pages of one class of N, or 0 to send those of all.
    #[serde(default)]
    pub class_advice: u32,
}

/// Latencies from the arrival of a request to its completion.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Latencies {
    pub read: LatencySummary,
    pub read_from_cache: LatencySummary,
    pub read_from_disk: LatencySummary,
    pub write: LatencySummary,
}

/// Summary of the durations of many requests: count, sum, mean, quantiles and maximum.
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

/// Normal latencies of disk and memory server, according to their newest reads, and the hedging delay that follows from
/// them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HedgingStatus {
    /// Whether hedging is off: only a server that stays silent is left alone.
    #[serde(default)]
    pub is_off: bool,
    /// Time without an answer from the server after which the disk is also asked.
    pub late_after_us: f64,
    /// `None` while there are too few reads.
    pub disk: Option<NormalLatency>,
    pub server: Option<NormalLatency>,
}

/// Quantiles of the newest reads. Older reads fade out.
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
    /// Guest memory, as far as the hypervisor shares it.
    #[serde(default)]
    pub guest_bytes: u64,
    /// Guest memory that the index has room for beside the cache; while there is no cache, that the curve covers.
    #[serde(default)]
    pub guest_bytes_indexed: u64,
    /// Memory of the host that the guest's memory takes now; `None` if the hypervisor shares none, or the host cannot tell.
    #[serde(default)]
    pub guest_resident_bytes: Option<u64>,
}
