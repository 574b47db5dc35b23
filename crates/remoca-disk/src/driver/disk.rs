//! The devices of a VM, as the driver receives them.

use crate::state::{DiskIdentity, stable_hash};
use remoca_core::units::DiskIndex;
use remoca_frontend::device::Frontend;
use remoca_io::lock::ImageLock;
use remoca_protocol::control::DiskTraffic;
use remoca_store::{ImageStamp, OpenError, Store};
use std::time::Instant;

/// Function that opens the image of a disk again, and locks it.
pub type Opener = Box<dyn Fn(ImageLock) -> Result<Box<dyn Store>, OpenError> + Send>;

/// One disk of the VM.
pub struct Disk {
    /// Number by which engine and state file know the disk. The driver knows it by its position among the disks.
    pub number: DiskIndex,
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
    /// Until this time no request of an earlier process is repeated, and none accepted of a guest that tells nothing of them,
    /// because requests that it sent to an NBD server may still be on their way.
    pub settles_at: Option<Instant>,
    /// Whether the image and the state file have stayed open and locked since a previous program of this process had
    /// them. If so, no other process can have changed the image.
    pub kept_open: bool,
    /// Largest size in bytes that the image had while this or a previous program or process of this name had it, if it was larger.
    pub had_bytes: Option<u64>,
    pub frontend: Frontend,
    /// Whether a guest was attached at the end of the last turn.
    pub had_guest: bool,
    /// Whether the guest has left, and nothing was done about it yet.
    pub has_lost_guest: bool,
    /// Requests completed so far.
    pub traffic: DiskTraffic,
}

impl Disk {
    /// Returns the stamp of the image as it was when it was opened. An image that is not a file is distinguished from others
    /// only by its name.
    pub(super) fn stamp(&self) -> ImageStamp {
        let named = || ImageStamp { identity: [3, stable_hash(&[&self.image]), 0, 0], changed_ns: None };
        self.store.stamp_at_opening().unwrap_or_else(named)
    }

    /// Returns whether nobody who honours locks can write to the image while this process has it.
    pub(super) fn keeps_others_out(&self) -> bool {
        self.store.stamp_at_opening().is_some_and(|stamp| stamp.is_of_file())
    }

    /// Returns whether no request is accepted, because requests of an earlier process may still be on their way.
    pub(super) fn is_settling(&self) -> bool {
        self.settles_at.is_some() && self.frontend.may_repeat()
    }

    /// Returns the size that the image had before it became smaller, or `None` if it was as large as ever when it was opened.
    pub(super) fn shrunk_from(&self) -> Option<u64> {
        self.had_bytes.filter(|had| *had > self.store.geometry().size)
    }

    /// Returns who the disk is, by which the state file knows it.
    #[must_use]
    pub fn identity(&self) -> DiskIdentity {
        let [kind, device, inode, _] = self.stamp().identity;
        DiskIdentity { name: stable_hash(&[&self.name]), image: [kind, device, inode] }
    }
}

/// The eviction port of the VM.
pub struct Port {
    pub socket: String,
    pub frontend: Frontend,
    /// Random number of this process, by which the agent notices a restart.
    pub cookie: u64,
}
