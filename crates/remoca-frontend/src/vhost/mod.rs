//! The vhost-user-blk frontend: a disk, or the eviction port, as a virtio-blk device of a VM.
//!
//! The driver's I/O thread owns a [`VhostDevice`] and all its queues; a small control thread behind it talks to the front
//! end (QEMU). The loop of the driver, for each device:
//!
//! 1. wait until `event_fd()` is readable (or any other work of the driver's is done), then `handle_events()`;
//! 2. `pop()` until it has nothing, or the driver has enough; a queue is never forgotten, `pop` can be called later;
//! 3. execute; copy data with the functions of [`BlkRequest`]; `complete()` in any order;
//! 4. `notify()` once, before waiting again.
//!
//! Nothing that a guest writes into its rings panics, hangs or allocates without bound; requests come out validated. No
//! code outside this folder touches guest memory, and what it writes there is logged for a front end that migrates (`log`).
//! EVENT_IDX and packed rings are not offered. Requests in flight survive the death of this process: see `docs/decisions/0007-vhost-user-frontend.md`.

mod chain;
pub(crate) mod command;
mod config;
mod control;
mod device;
mod flights;
#[cfg(feature = "testing")]
pub(crate) mod fuzz;
mod handler;
pub(crate) mod inflight;
mod kicks;
mod layout;
mod log;
pub(crate) mod memory;
mod queue;
mod request;
mod ring;
mod throttle;

pub use chain::Frame;
pub use config::{ConfigError, DeviceConfig, QUEUE_COUNT_MAX, SERIAL_BYTES_MAX};
pub use device::{DeviceError, VhostDevice};
pub use request::{BlkRequest, RequestId, Status};
