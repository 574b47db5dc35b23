//! How a VM process reaches the kernel: addresses, sockets, wake-ups, locks, and memory that is mapped.
//!
//! Stores, frontends, links and the driver use these, and they know none of them.

pub mod address;
pub mod buffer;
pub mod lock;
pub mod narrow;
pub mod socket;
pub mod undumped;
pub mod wake;
pub mod words;
