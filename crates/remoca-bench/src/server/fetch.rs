//! The raw server as a measure for others: how long a plain fetch of a page takes on the same way.

use std::net::SocketAddrV4;
use std::time::Duration;

use anyhow::Result;

use super::client::{self, Connection, Measure};
use super::dialect::Dialect;
use super::target::Target;

/// A raw server with pages, and a connection to it.
pub(crate) struct RawFetch {
    connection: Connection,
    target: Target,
}

impl RawFetch {
    /// Starts a raw server on this machine, and stores `pages` pages.
    pub(crate) fn start(pages: u32) -> Result<Self> {
        Self::with(Target::raw(pages)?, pages)
    }

    /// Starts a raw server at an address elsewhere. `prefix` is put before its command.
    pub(crate) fn start_at(address: SocketAddrV4, prefix: &[String], pages: u32) -> Result<Self> {
        Self::with(Target::raw_at(address, prefix, pages)?, pages)
    }

    fn with(target: Target, pages: u32) -> Result<Self> {
        let mut connection = Connection::open(target.address, Dialect::Raw, 0..pages, 0)?;
        connection.store_all()?;
        connection.verify_all()?;
        Ok(Self { connection, target })
    }

    /// Pins all threads of the server to one processor.
    pub(crate) fn pin(&self, cpu: usize) -> Result<()> {
        self.target.pin(cpu)
    }

    /// Gets random pages for `time`, `depth` at a time. The thread waits for them in `read`.
    pub(crate) fn get(&mut self, depth: usize, time: Duration, seed: u64) -> Result<Measure> {
        client::get(std::slice::from_mut(&mut self.connection), depth, time, seed)
    }
}
