//! How a process reaches the kernel: addresses, sockets, wake-ups, locks, memory that is mapped, key files, and the client
//! of a control socket.
//!
//! Stores, frontends, links and the driver use these, and they know none of them.

pub mod address;
pub mod buffer;
pub mod control;
pub mod key;
pub mod lock;
pub mod narrow;
pub mod socket;
pub mod undumped;
pub mod wake;
pub mod words;
