//! The guest laboratory: real guests for tests and for the demonstration.
//!
//! [`Lab`] names the places (cache, logs), [`Image`] builds and caches a guest image from Debian packages,
//! [`GuestConfig`] boots it under QEMU, [`Guest`] runs jobs in it and fetches results, [`Service`] runs a daemon next
//! to it, [`Libvirt`] a libvirtd, [`store`] makes disks and slow disks, [`program`] builds programs that run in any guest. Used by tests, by
//! the demonstration and by the `remoca-lab` program; uses mmdebstrap, QEMU, nbdkit, e2fsprogs.
//!
//! 1. Every guest and daemon ends when this process ends, however it ends.
//! 2. Every wait for a guest or daemon has a limit; a guest that misses one is killed, and the error shows its last
//!    output.
//! 3. The image is shared and never written to: guests run on a throw-away layer above it.
//!
//! Not here: the subject of the tests. See docs/decisions/0005-guest-laboratory.md.

mod accel;
mod channel;
mod clock;
mod console;
mod error;
pub mod figures;
pub mod frame;
mod guest;
mod image;
mod lab;
mod libvirt;
mod machine;
mod migration;
mod mirror;
pub mod program;
mod qemu;
mod service;
pub mod store;
pub mod workload;

pub use accel::Accelerator;
pub use channel::{Job, Output};
pub use console::{Console, ConsoleLine};
pub use error::{Error, Result};
pub use guest::{Disk, DiskSource, Guest, GuestConfig};
pub use image::{Image, Recipe};
pub use lab::Lab;
pub use libvirt::{DomainXml, Libvirt};
pub use migration::Incoming;
pub use remoca_qmp::Qmp;
pub use service::Service;
