//! The devices of a VM, as the driver receives them.

use remoca_core::units::DiskIndex;
use remoca_frontend::device::Frontend;
use remoca_store::{OpenError, Store};
use std::time::Instant;

/// Function that opens the image of a disk again, and locks it.
pub type Opener = Box<dyn Fn() -> Result<Box<dyn Store>, OpenError> + Send>;

/// One disk of the VM.
pub struct Disk {
    pub name: String,
    /// The image as the operator named it.
    pub image: String,
    /// The socket as the operator named it.
    pub socket: String,
    pub store: Box<dyn Store>,
    /// Function that opens the image again.
    pub open: Opener,
    /// Whether the whole disk is treated as a swap area, whatever it holds.
    pub swap: bool,
    /// Until this time no request of an earlier process is repeated, because requests that it sent to an NBD server may
    /// still be on their way.
    pub settles_at: Option<Instant>,
    /// Whether the image and the state file have stayed open and locked since a previous program of this process had
    /// them. If so, no other process can have changed the image.
    pub kept_open: bool,
    pub frontend: Frontend,
}

/// Returns the engine's index for the disk at this position.
pub(super) fn disk_index(disk: usize) -> DiskIndex {
    DiskIndex(u16::try_from(disk).expect("a VM has fewer than 4096 disks"))
}

/// The eviction port of the VM.
pub struct Port {
    pub socket: String,
    pub frontend: Frontend,
    /// Random number of this process, by which the agent notices a restart.
    pub cookie: u64,
}
