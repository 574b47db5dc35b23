//! The connection between two VM processes, of which one hands its disks to the other: a VM migrates.
//!
//! Owned by the driver's I/O thread (`driver/migration/`), which has no wait in it: connecting, sending and receiving are
//! on threads of their own, two for each connection. What may be said when, and who owns the disks, is decided by
//! `remoca_core::migration`; here are bytes. A stranger is heard by nobody: the connection is one of [`crate::secure`], and
//! the driver learns of it when the other side has proved that it has the key. Even so everything that a peer sends has a
//! limit, and what does not fit ends the connection.

#[cfg(feature = "testing")]
pub(crate) mod fuzz;
mod incoming;
mod mark;
mod peer;
mod receipt;
mod wire;

pub use incoming::Incoming;
pub use mark::Mark;
pub use peer::{Peer, WakeUp};
pub use receipt::{IndexRoom, Receipt};
pub use wire::{Heard, Offer, OfferedDisk, Server, StateHeader, VERSION};
