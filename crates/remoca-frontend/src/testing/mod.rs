//! A front end without a VM, and a back end without a disk: for tests and benchmarks of the vhost-user frontend.
//!
//! [`TestGuest`] plays QEMU and the guest's driver: it shares its memory, starts queues, keeps the record of requests
//! in flight over a reconnect, and puts any descriptor table it likes into its rings. [`RamDisk`] executes requests in
//! memory, and [`Backend`] runs a device on it in a thread. [`DirectFrontEnd`] plays the hypervisor on the device's own
//! thread. [`serve_until_death`] is a back end in a process of its own. Compiled only with the feature `testing`; never
//! part of the program.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "in a test a surprise is a failure, and sizes are small"
)]

mod backend;
mod direct;
mod guest;
mod mortal;
mod virtqueue;

pub use crate::nbd::fuzz_nbd;
pub use crate::vhost::fuzz::{run as fuzz_vhost_queue, seeds as fuzz_vhost_queue_seeds};
pub use backend::{Backend, Plan, RamDisk};
pub use direct::{Answered, DirectFrontEnd, Record};
pub use guest::{Command, Options, TestGuest, Ticket};
pub use mortal::{FileDisk, serve_until_death};
pub use virtqueue::{Buffer, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Virtqueue};
