//! The connection between two VM processes, of which one hands its disks to the other: a VM migrates.
//!
//! Owned by the driver's I/O thread (`driver/migration/`), which has no wait in it: connecting, sending and receiving are
//! on threads of their own, two for each connection. What may be said when, and who owns the disks, is decided by
//! `remoca_core::migration`; here are bytes. A stranger is heard by nobody: the connection is one of [`remoca_io::secure`], and
//! the driver learns of it when the other side has proved that it has the key. Even so everything that a peer sends has a
//! limit, and what does not fit ends the connection.

#[cfg(feature = "testing")]
pub(crate) mod fuzz;
mod incoming;
mod mark;
#[cfg(feature = "testing")]
pub(crate) mod model;
mod peer;
mod receipt;

pub use incoming::Incoming;
pub use mark::Mark;
pub use peer::Peer;
pub use receipt::{IndexRoom, Receipt};

use remoca_io::address::Endpoint;
use remoca_io::wake::Wake;
use remoca_protocol::control::Secret;
use remoca_protocol::peer::PeerFrame;
use std::io;

/// What the peer said, or what became of it.
pub enum Heard {
    Frame(PeerFrame),
    /// Everything that was queued is sent.
    Sent,
    /// The connection is gone, or was never made.
    Ended(String),
}

/// How a process reaches others, and is reached by them.
pub trait PeerNetwork: Send {
    /// Connects to the process at `endpoint`, which has to prove that it has the key; the driver that `wake` wakes hears what
    /// comes of it.
    ///
    /// # Errors
    /// If the system has no thread left.
    fn connect(&mut self, endpoint: Endpoint, secret: &Secret, wake: &Wake) -> io::Result<Peer>;

    /// Begins to listen at `endpoint`, and returns the listener. It admits only a process that has the secret.
    ///
    /// # Errors
    /// If the address cannot be listened at.
    fn listen(&mut self, endpoint: Endpoint, secret: &Secret, wake: &Wake) -> io::Result<Incoming>;
}

/// The network of this host, with threads for each connection.
pub struct HostPeers;

impl PeerNetwork for HostPeers {
    fn connect(&mut self, endpoint: Endpoint, secret: &Secret, wake: &Wake) -> io::Result<Peer> {
        Peer::connect(endpoint, secret, wake)
    }

    fn listen(&mut self, endpoint: Endpoint, secret: &Secret, wake: &Wake) -> io::Result<Incoming> {
        Incoming::listen(endpoint, secret, wake)
    }
}
