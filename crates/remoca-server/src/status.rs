//! What a server reports about itself.

use remoca_protocol::Token;
use serde::{Deserialize, Serialize};

/// Memory that the pages lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backing {
    /// Huge pages that the operator has set aside (`vm.nr_hugepages`).
    HugeTlb,
    /// Ordinary memory, in transparent huge pages where the host allows it.
    Ordinary,
}

/// State of a server at one moment. The totals include the counters of freed pools.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    pub server_id: String,
    pub version: String,
    pub uptime_s: u64,
    pub backing: Backing,
    pub locked: bool,
    /// Number of all pages of the server.
    pub pages: u32,
    /// Number of pages in free chunks, which no pool has.
    pub pages_free: u32,
    /// Number of free pages whose memory is still to be given back to the host.
    pub pages_to_give_back: u32,
    pub quota_pages: u32,
    pub totals: Totals,
    pub pools: Vec<PoolStatus>,
}

/// Events since the server started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Pages sent to clients.
    pub gets: u64,
    /// Pages that were requested and not found.
    pub not_found: u64,
    /// Pages received from clients.
    pub sends: u64,
    pub moves: u64,
    /// Refused SETSIZE frames.
    pub resizes_refused: u64,
    /// Sessions begun.
    pub sessions: u64,
    /// Connections closed because a newer connection of the same client came.
    pub fenced: u64,
    /// Pools freed because their client did not come back in time.
    pub expired: u64,
}

/// One pool.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PoolStatus {
    /// First bytes of the token in hexadecimal; the rest is the client's secret.
    pub token: String,
    /// Origin of the client's connection.
    pub peer: String,
    pub connected: bool,
    pub npages: u32,
    /// Slots that hold a page.
    pub pages_written: u64,
    pub gets: u64,
    pub not_found: u64,
    pub sends: u64,
    /// Set if the client reads and writes its pages by itself, in memory of its own. Its traffic is not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mapped: Option<MappedStatus>,
}

/// What is particular to a mapped pool. Its `npages` are the granted pages; its `pages_written` are not known, and 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedStatus {
    /// Pages that have memory, those included that the host has swapped out.
    pub resident_pages: u64,
    /// Maximum size: the quota, or what was left when memory was taken back.
    pub limit_pages: u32,
    /// Whether the pool outlives this server: the service manager keeps it.
    pub kept: bool,
    /// Whether the client keeps the server from changing the memory: its process has to be ended.
    #[serde(default)]
    pub held: bool,
}

impl Totals {
    pub(crate) fn add(&mut self, other: &Self) {
        let Self { gets, not_found, sends, moves, resizes_refused, sessions, fenced, expired } = other;
        for (sum, term) in [
            (&mut self.gets, gets),
            (&mut self.not_found, not_found),
            (&mut self.sends, sends),
            (&mut self.moves, moves),
            (&mut self.resizes_refused, resizes_refused),
            (&mut self.sessions, sessions),
            (&mut self.fenced, fenced),
            (&mut self.expired, expired),
        ] {
            *sum += term;
        }
    }
}

/// The report of one worker.
#[derive(Debug, Default)]
pub(crate) struct WorkerReport {
    pub(crate) totals: Totals,
    pub(crate) pools: Vec<PoolStatus>,
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the part of a token that may be shown, in hexadecimal.
pub(crate) fn shown(token: &Token) -> String {
    hex(&token.0[..4])
}
