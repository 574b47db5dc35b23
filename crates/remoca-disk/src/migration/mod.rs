//! The connection between two VM processes, one of which hands its disks to the other because its VM migrates.
//!
//! Owned by the driver's I/O thread (`driver/migration/`), which never blocks on it: connecting, sending and receiving
//! run on threads of their own, two for each connection. `remoca_core::migration` decides which message is allowed
//! when, and who owns the disks; this module only transports bytes. Strangers are not listened to: the connection is
//! one of [`remoca_io::secure`], and the driver learns of it when the other side has proved that it has the key. Even
//! so, everything that a peer sends has a limit, and a frame that exceeds it ends the connection.

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

/// An event of the connection to a peer.
pub enum Heard {
    Frame(PeerFrame),
    /// Everything that was queued is sent.
    Sent,
    /// The connection is gone, or was never made.
    Ended(String),
}

/// How a process reaches others, and is reached by them.
pub trait PeerNetwork: Send {
    /// Starts to connect to the process at `endpoint`, which has to prove that it has the key. The driver that `wake`
    /// wakes receives the outcome.
    ///
    /// # Errors
    /// If the system has no thread left.
    fn connect(&mut self, endpoint: Endpoint, secret: &Secret, wake: &Wake) -> io::Result<Peer>;

    /// Starts to listen at `endpoint`, and returns the listener. It admits only a process that has the secret.
    ///
    /// # Errors
    /// If listening at the address fails, or the system has no threads left.
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
