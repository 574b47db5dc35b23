//! Description that a program passes to its successor under the same process ID (upgrade in place): JSON that says what
//! each file descriptor is.
//!
//! The old program writes it to a sealed file without a name, and the new program reads it. Descriptors appear as
//! numbers.

use crate::guests::Guests;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::path::PathBuf;

/// Version of [`Description`]. A program that reads another version starts as it would after a crash, so a new one drops all
/// guests: new fields have defaults instead, and a former program ignores them.
pub const VERSION: u32 = 2;
/// Maximum size of a description in bytes: 4096 disks with long names fit, and hypervisors with 16 queues and 16 regions of
/// memory that are connected to all of them.
pub const BYTES_MAX: u64 = 64 << 20;

/// Meaning of the descriptors, and the settings that an operator changed since the start. Descriptors appear as
/// numbers.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    pub version: u32,
    /// Name of the VM.
    pub name: String,
    /// Number of hand-overs since the first start, including this one.
    pub upgrades: u32,
    pub cache_pages: u32,
    pub cache_enabled: bool,
    /// The operator's list of memory servers.
    pub servers: Vec<String>,
    /// Size of the local tier, and its server. Descriptions of older programs lack both.
    #[serde(default)]
    pub local_pages: u32,
    #[serde(default)]
    pub local_server: Option<String>,
    /// Hash of the options that these settings come from or differ from. Descriptions of older programs lack this field.
    #[serde(default)]
    pub options: Option<u64>,
    /// Hashes of the sizes in these options, each for itself. Descriptions of older programs lack this field.
    #[serde(default)]
    pub option_sizes: u64,
    /// Locked state file, or `None` if there is none. Any other file under its name does not have the latest state of
    /// this VM.
    pub state: Option<RawFd>,
    pub control: Option<Listening>,
    /// Connection of the client that requested the upgrade and waits for an answer.
    pub client: Option<RawFd>,
    pub disks: Vec<PassedDisk>,
    pub port: Option<Listening>,
    /// Connections to the port. Descriptions of older programs lack this field.
    #[serde(default)]
    pub port_guests: Guests<RawFd>,
    pub nbd: Vec<Listening>,
    /// Mapped pools. Descriptions of older programs lack this field.
    #[serde(default)]
    pub pools: Vec<PassedPool>,
    /// Number of records that the trace in a file lost and does not tell of. Descriptions of older programs lack this field.
    #[serde(default)]
    pub trace_untold: u64,
}

/// Mapped pool that is passed on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedPool {
    /// Endpoint of its server.
    pub server: String,
    /// Memory of the pool, which the process has locked.
    pub memory: RawFd,
    pub generation: u64,
    /// Number of slots that the server granted.
    pub granted_pages: u32,
}

/// Listening socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listening {
    pub fd: RawFd,
    /// Path and inode of the socket if this process created it. It is removed at the end.
    pub path: Option<(PathBuf, u64)>,
}

/// Disk that is passed on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedDisk {
    pub name: String,
    pub image: String,
    pub socket: Option<Listening>,
    pub store: PassedStore,
    /// Whether the guest has switched its write cache off, and so sends no flushes, or is assumed to have. Descriptions of
    /// older programs lack this field.
    #[serde(default)]
    pub write_cache_off: bool,
    /// Size in bytes that the image had before it became smaller. Descriptions of older programs lack this field.
    #[serde(default)]
    pub had_bytes: Option<u64>,
    /// Connections to the disk. Descriptions of older programs lack this field.
    #[serde(default)]
    pub guests: Guests<RawFd>,
}

/// Store of a disk's blocks, with no request in flight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedStore {
    pub fd: RawFd,
    pub kind: StoreKind,
}

/// Kind of a store's descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoreKind {
    /// Open and locked image. `flush_failed` is the errno of a failed flush, after which no flush succeeds.
    File { flush_failed: Option<i32> },
    /// Connection to an NBD server, between two requests.
    Nbd(PassedExport),
}

/// Properties that an NBD server offered, and the state since then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedExport {
    /// Addresses to reconnect to if the connection is lost; empty for a Unix socket.
    pub addresses: Vec<SocketAddr>,
    pub flush_failed: Option<i32>,
    /// Number of writes that no flush has followed yet.
    pub unflushed: u64,
    pub size: u64,
    pub flags: u16,
    pub block_min: u32,
    pub block_preferred: u32,
    pub payload_max: u32,
}

/// Reason why a description cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DescriptionError {
    #[error("it has version {0}, this program knows {VERSION}")]
    Version(u32),
    #[error("{0}")]
    Json(#[from] serde_json::Error),
}

/// Part that the descriptions of all versions have. It is read first.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl Description {
    /// Returns the description as JSON.
    ///
    /// # Errors
    /// If a path in the description is not valid UTF-8.
    pub fn encode(&self) -> Result<Vec<u8>, DescriptionError> {
        Ok(serde_json::to_vec(self)?)
    }

    /// Parses a description, which must have this version.
    ///
    /// # Errors
    /// If `text` has another version, or is not a valid description.
    pub fn parse(text: &[u8]) -> Result<Self, DescriptionError> {
        let Version { version } = serde_json::from_slice(text)?;
        match version {
            VERSION => Ok(serde_json::from_slice(text)?),
            _ => Err(DescriptionError::Version(version)),
        }
    }

    /// Returns whether any guest is passed on.
    #[must_use]
    pub fn has_guests(&self) -> bool {
        self.disks.iter().map(|disk| &disk.guests).chain([&self.port_guests]).any(|guests| !guests.is_empty())
    }

    /// Returns the numbers of all descriptors. If the description is wrong, a number may occur twice.
    pub fn numbers(&self) -> impl Iterator<Item = RawFd> {
        let guests = self.disks.iter().map(|disk| &disk.guests).chain([&self.port_guests]);
        let guests = guests.flat_map(Guests::descriptors);
        let pools = self.pools.iter().map(|pool| pool.memory);
        let stores = self.disks.iter().map(|disk| disk.store.fd);
        let sockets = self.disks.iter().filter_map(|disk| disk.socket.as_ref());
        let sockets = sockets.chain(&self.control).chain(&self.port).chain(&self.nbd);
        sockets
            .map(|&Listening { fd, .. }| fd)
            .chain(stores)
            .chain(self.client)
            .chain(self.state)
            .chain(guests)
            .chain(pools)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_before_the_write_cache_was_passed_gave_is_read() {
        let text = r#"{"version":2,"name":"vm","upgrades":1,"cache_pages":8,"cache_enabled":true,"servers":[],"state":null,
            "control":null,"client":null,"disks":[{"name":"a","image":"/a","socket":null,
            "store":{"fd":4,"kind":{"file":{"flush_failed":null}}}}],"port":null,"nbd":[]}"#;
        let description = Description::parse(text.as_bytes()).unwrap();
        assert!(!description.disks[0].write_cache_off);
        let mut off = description;
        off.disks[0].write_cache_off = true;
        assert_eq!(Description::parse(&off.encode().unwrap()).unwrap(), off);
    }

    #[test]
    fn another_version_is_refused_whatever_it_has() {
        let error = Description::parse(br#"{"version":1,"unknown":[]}"#).unwrap_err();
        assert_eq!(error.to_string(), "it has version 1, this program knows 2");
        assert!(matches!(Description::parse(b"{}"), Err(DescriptionError::Json(_))));
    }
}
