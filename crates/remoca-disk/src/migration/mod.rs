//! The connection between two VM processes, of which one hands its disks to the other: a VM migrates.
//!
//! Owned by the driver's I/O thread (`driver/migration/`), which has no wait in it: connecting, sending and receiving are
//! on threads of their own, two for each connection. What may be said when, and who owns the disks, is decided by
//! `remoca_core::migration`; here are bytes. The peer is believed as little as any other stranger: everything that it sends
//! has a limit, and what does not fit ends the connection.

#[cfg(feature = "testing")]
pub(crate) mod fuzz;
mod mark;
mod peer;
mod receipt;
mod wire;

pub use mark::Mark;
pub use peer::{Incoming, Peer, WakeUp};
pub use receipt::{IndexRoom, Receipt};
pub use wire::{Heard, Offer, OfferedDisk, Server, StateHeader, VERSION};
