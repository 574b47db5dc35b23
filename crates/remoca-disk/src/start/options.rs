//! The operator's options, as values.

use super::exports::Address;
use super::key::KeySource;
use remoca_core::rules::Rules;
use remoca_io::address::Endpoint;
use remoca_store::OnLostConnection;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Default for the maximum number of queues: QEMU asks for one for each virtual processor unless told otherwise.
pub const QUEUES_DEFAULT: u16 = 64;

/// Options of a VM process.
#[derive(Debug)]
pub struct Options {
    /// Name of the VM.
    pub name: String,
    /// Whether a later process will have the same control socket.
    pub is_named: bool,
    /// Path of the control socket.
    pub control: PathBuf,
    /// Path of the state file; `None`: nothing outlives the process.
    pub state: Option<PathBuf>,
    pub disks: Vec<DiskOptions>,
    /// Descriptor for the socket of the first disk.
    pub fd: Option<RawFd>,
    pub port: PortOptions,
    /// Addresses at which NBD clients connect.
    pub nbd: Vec<Address>,
    /// How long requests of a killed predecessor wait before they are sent to an NBD image again.
    pub nbd_settle: Duration,
    /// Group whose members may connect to the sockets of disks, port and NBD.
    pub socket_group: Option<u32>,
    /// Memory of the guest, in bytes.
    pub guest_memory: u64,
    /// Maximum memory of a guest that is indexed, in bytes.
    pub guest_memory_max: u64,
    /// Memory servers.
    pub servers: Vec<Endpoint>,
    /// Size of the cache, in bytes.
    pub cache: u64,
    /// Size of the local tier, in bytes; 0: there is none.
    pub local: u64,
    /// Memory server of this host, which has the local tier.
    pub local_server: Endpoint,
    /// Where this process may wait for its disks; `None` if it never does.
    pub incoming: Option<Incoming>,
    /// Memory for the data of requests in flight, in bytes.
    pub buffers: u64,
    /// File that every request is recorded in.
    pub trace: Option<PathBuf>,
    /// Whether a process of this name ran since the host booted, so that a guest may wait for its disks.
    pub has_predecessor: bool,
    pub uses_io_uring: bool,
    /// Longest time to look for the next request before the process sleeps.
    pub poll_time_max: Duration,
    /// Whether a slow answer of the server is hedged by a disk read.
    pub hedges: bool,
    /// Whether evicted pages are looked for in guest memory that a read is about to overwrite.
    pub looks_at_frames: bool,
    /// What `remoca status` reports of the configuration, if it cannot be used.
    pub notice: Option<String>,
    /// Whether miss-ratio curves are kept: always, except in a build that measures what they cost.
    pub keeps_curves: bool,
    /// Rules of the engine: all of them, except in a build that shows their purpose.
    pub rules: Rules,
}

/// Where a process waits for its disks.
#[derive(Clone, Debug)]
pub struct Incoming {
    pub endpoint: Endpoint,
    /// Source of the key that the process which brings the disks has. Read, and needed, only by a process that waits.
    pub key: Option<KeySource>,
}

/// Where evicted pages come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortOptions {
    None,
    /// Socket of a vhost-user device.
    Socket(PathBuf),
    NbdExport,
}

/// One disk as the operator described it.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    pub name: Option<String>,
    pub image: String,
    /// Whether the image is known to be raw, so that its content is not looked at.
    pub is_raw: bool,
    /// Whether a process of this name had the image, which may have changed its size since.
    pub is_known: bool,
    /// Whether the image is a qcow2 image that another program serves as a raw one.
    pub is_qcow2: bool,
    /// Path of the qcow2 image, once `image` is the server of it.
    pub qcow2_image: Option<String>,
    /// Socket of a vhost-user device; `None`: an NBD export.
    pub socket: Option<PathBuf>,
    pub read_only: bool,
    /// Whether the whole disk is treated as a swap area.
    pub swap: bool,
    /// Unit of the guest's requests, in bytes: 512 or 4096.
    pub sector: u32,
    /// Maximum number of queues.
    pub queues: u16,
    /// What a lost connection to an NBD server means for writes that were not flushed.
    pub on_loss: OnLostConnection,
    /// Whether each write to an NBD image is durable before it is acknowledged.
    pub write_through: bool,
}

impl DiskOptions {
    /// Returns the name of a disk without one, which is the `number`-th of its VM.
    #[must_use]
    pub fn default_name(number: u16) -> String {
        format!("disk{number}")
    }

    /// Returns the name of the disk at this position.
    #[must_use]
    pub fn name_at(&self, position: u16) -> String {
        self.name.clone().unwrap_or_else(|| Self::default_name(position))
    }

    /// Makes paths absolute which were given as relative ones in `folder`.
    pub fn make_absolute(&mut self, folder: &Path) {
        self.socket.iter_mut().for_each(|path| *path = folder.join(&*path));
        if !is_nbd_uri(&self.image) {
            self.image = folder.join(&self.image).display().to_string();
        }
    }

    /// Returns the options of a disk of which only the image is given.
    #[must_use]
    pub fn new(image: String) -> Self {
        Self {
            name: None,
            image,
            is_raw: false,
            is_known: false,
            is_qcow2: false,
            qcow2_image: None,
            socket: None,
            read_only: false,
            swap: false,
            sector: 512,
            queues: QUEUES_DEFAULT,
            on_loss: OnLostConnection::Continue,
            write_through: false,
        }
    }
}

/// Returns whether `image` is an NBD URI, and no path. One of a kind that is not supported counts too: it must not be taken for a file.
pub fn is_nbd_uri(image: &str) -> bool {
    image.starts_with("nbd:") || image.split_once("://").is_some_and(|(scheme, _)| scheme.starts_with("nbd"))
}
