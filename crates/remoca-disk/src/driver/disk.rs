//! The devices of a VM, as they are given to the driver.

use remoca_core::units::DiskIndex;
use remoca_frontend::device::Frontend;
use remoca_store::{OpenError, Store};
use std::time::Instant;

/// Opens the image of a disk again, and locks it.
pub type Opener = Box<dyn Fn() -> Result<Box<dyn Store>, OpenError> + Send>;

/// One disk of the VM.
pub struct Disk {
    pub name: String,
    /// The image as the operator named it.
    pub image: String,
    /// The socket as the operator named it.
    pub socket: String,
    pub store: Box<dyn Store>,
    /// Opens the image again.
    pub open: Opener,
    /// All of it is a swap area, whatever it holds.
    pub swap: bool,
    /// Until then, no request of an earlier process is repeated: what that one sent to an NBD server may still be on its way.
    pub settles_at: Option<Instant>,
    /// The image was open and locked without a gap since a former program of this process had it, and so was the state file:
    /// nobody else can have changed it.
    pub kept_open: bool,
    pub frontend: Frontend,
}

/// Returns the engine's name for the disk at this place.
pub(super) fn disk_index(disk: usize) -> DiskIndex {
    DiskIndex(u16::try_from(disk).expect("a VM has fewer than 4096 disks"))
}

/// The eviction port of the VM.
pub struct Port {
    pub socket: String,
    pub frontend: Frontend,
    /// Random for this process, so that the agent notices a restart.
    pub cookie: u64,
}
