//! Interfaces to the kernel and to other processes: addresses, sockets, protected connections, wake-ups, signals,
//! locks, mapped memory, key files, the service manager, the control socket, other programs, and the program that
//! follows in this process.
//!
//! Stores, frontends, links and the driver use these modules, which depend on none of them.

pub mod address;
pub mod buffer;
pub mod control;
pub mod descriptor_store;
#[cfg(any(test, feature = "testing"))]
pub mod fake_manager;
pub mod file_systems;
pub mod handover;
pub mod key;
#[cfg(any(test, feature = "testing"))]
pub mod left_out;
pub mod lock;
pub mod narrow;
pub mod passed;
pub mod program;
pub mod sealed;
pub mod secure;
pub mod service;
pub mod show;
pub mod signals;
pub mod sizes;
pub mod small_file;
pub mod socket;
pub mod thread_times;
pub mod undumped;
pub mod wake;
pub mod words;
