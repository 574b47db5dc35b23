//! How a process reaches the kernel and other processes: addresses, sockets, protected connections, wake-ups, signals, locks,
//! memory that is mapped, key files, the service manager, and the client of a control socket.
//!
//! Stores, frontends, links and the driver use these, and they know none of them.

pub mod address;
pub mod buffer;
pub mod control;
pub mod key;
pub mod lock;
pub mod narrow;
pub mod secure;
pub mod service;
pub mod signals;
pub mod sizes;
pub mod small_file;
pub mod socket;
pub mod undumped;
pub mod wake;
pub mod words;
