//! What one program tells the next one of an open store whose descriptor it passes on.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// What the descriptor of a store is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoreKind {
    /// An open and locked image. The number of the error, if a flush has failed: it stays failed.
    File { flush_failed: Option<i32> },
    /// A connection to an NBD server between two requests.
    Nbd(PassedExport),
}

/// What an NBD server offered, and what happened since.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedExport {
    /// Where to connect to should the connection be lost; empty for a Unix socket.
    pub addresses: Vec<SocketAddr>,
    pub flush_failed: Option<i32>,
    /// Writes that no flush has followed.
    pub unflushed: u64,
    pub size: u64,
    pub flags: u16,
    pub block_min: u32,
    pub block_preferred: u32,
    pub payload_max: u32,
}
