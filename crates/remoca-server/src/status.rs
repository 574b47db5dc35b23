//! What a server tells about itself.

use remoca_protocol::Token;
use serde::Serialize;

/// What the pages lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Backing {
    /// Huge pages that the operator has set aside (`vm.nr_hugepages`).
    HugeTlb,
    /// Ordinary memory, in transparent huge pages where the host allows it.
    Ordinary,
}

/// A server at one moment. Counters of pools that are gone are in the totals still.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    pub server_id: String,
    pub uptime_s: u64,
    pub backing: Backing,
    pub locked: bool,
    /// All pages of the server.
    pub pages: u32,
    /// Pages in memory that no pool has.
    pub pages_free: u32,
    /// Free pages whose memory is still to be given back to the host.
    pub pages_to_give_back: u32,
    pub quota_pages: u32,
    pub totals: Totals,
    pub pools: Vec<PoolStatus>,
}

/// Events since the server started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Pages sent to clients.
    pub gets: u64,
    /// Pages asked for that were not there.
    pub not_found: u64,
    /// Pages received from clients.
    pub sends: u64,
    pub moves: u64,
    /// SETSIZEs refused.
    pub resizes_refused: u64,
    /// Sessions begun.
    pub sessions: u64,
    /// Connections closed because a newer one of the same client came.
    pub fenced: u64,
    /// Pools freed because their client did not come back in time.
    pub expired: u64,
}

/// One pool.
#[derive(Clone, Debug, Serialize)]
pub struct PoolStatus {
    /// First bytes of the token; the rest is the client's secret.
    pub token: String,
    /// The client, as the connection shows it.
    pub peer: String,
    pub connected: bool,
    pub npages: u32,
    /// Slots that hold a page.
    pub pages_written: u64,
    pub gets: u64,
    pub not_found: u64,
    pub sends: u64,
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

/// What one worker reports.
#[derive(Debug, Default)]
pub(crate) struct WorkerReport {
    pub(crate) totals: Totals,
    pub(crate) pools: Vec<PoolStatus>,
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the part of a token that may be shown.
pub(crate) fn shown(token: &Token) -> String {
    hex(&token.0[..4])
}
