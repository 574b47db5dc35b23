//! What one program tells the next one under the same process id (upgrade in place): JSON that says which descriptor is what.
//!
//! Written by the program that goes, in a sealed file without a name; read by the one that comes. Descriptors are numbers here.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::path::PathBuf;

/// Version of [`Description`]. A program that reads another one starts as after a crash.
pub const VERSION: u32 = 2;
/// The largest description that is read: 4096 disks with long names fit.
pub const BYTES_MAX: u64 = 8 << 20;

/// What the descriptors are, and what an operator changed since the start. Descriptors are numbers here.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    pub version: u32,
    /// Name of the VM.
    pub name: String,
    /// Hand-overs since the first start, with this one.
    pub upgrades: u32,
    pub cache_pages: u32,
    pub cache_enabled: bool,
    pub servers: Vec<String>,
    /// The locked state file, if there is one: whatever else is found under its name is not of this VM's last moment.
    pub state: Option<RawFd>,
    pub control: Option<Listening>,
    /// Who asked for the upgrade, and waits for an answer.
    pub client: Option<RawFd>,
    pub disks: Vec<PassedDisk>,
    pub port: Option<Listening>,
    pub nbd: Vec<Listening>,
}

/// A listening socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listening {
    pub fd: RawFd,
    /// Where it is in the file system, with its inode, if this process made it: it is removed at the end.
    pub path: Option<(PathBuf, u64)>,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedDisk {
    pub name: String,
    pub image: String,
    pub socket: Option<Listening>,
    pub store: PassedStore,
    /// The guest has switched its write cache off, and sends no flushes. Programs before this field did not say so.
    #[serde(default)]
    pub write_cache_off: bool,
}

/// What holds the blocks of a disk, with nothing in flight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedStore {
    pub fd: RawFd,
    pub kind: StoreKind,
}

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

/// Why a description cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DescriptionError {
    #[error("it has version {0}, this program knows {VERSION}")]
    Version(u32),
    #[error("{0}")]
    Json(#[from] serde_json::Error),
}

/// Read first: all that every version has.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl Description {
    /// Returns the description as JSON.
    ///
    /// # Errors
    /// If a path in it is no text.
    pub fn encode(&self) -> Result<Vec<u8>, DescriptionError> {
        Ok(serde_json::to_vec(self)?)
    }

    /// Reads a description, of this version alone.
    ///
    /// # Errors
    /// If it has another version, or is none.
    pub fn parse(text: &[u8]) -> Result<Self, DescriptionError> {
        let Version { version } = serde_json::from_slice(text)?;
        match version {
            VERSION => Ok(serde_json::from_slice(text)?),
            _ => Err(DescriptionError::Version(version)),
        }
    }

    /// Returns the numbers of all descriptors, some of them twice where the description is wrong.
    pub fn numbers(&self) -> impl Iterator<Item = RawFd> {
        let stores = self.disks.iter().map(|disk| disk.store.fd);
        let sockets = self.disks.iter().filter_map(|disk| disk.socket.as_ref());
        let sockets = sockets.chain(&self.control).chain(&self.port).chain(&self.nbd);
        sockets.map(|&Listening { fd, .. }| fd).chain(stores).chain(self.client).chain(self.state)
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
