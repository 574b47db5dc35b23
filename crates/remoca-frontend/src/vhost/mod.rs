//! The vhost-user-blk frontend: a disk, or the eviction port, as a virtio-blk device of a VM.
//!
//! The driver's I/O thread owns a [`VhostDevice`] and all its queues; a small control thread talks to the front end
//! (QEMU). The loop of the driver, for each device:
//!
//! 1. wait until `event_fd()` is readable (or other work of the driver is finished), then call `handle_events()`;
//! 2. call `pop()` until it returns `None` or the driver has enough; no request is lost, `pop` can be called later;
//! 3. execute the requests, copy data with the functions of [`BlkRequest`], and call `complete()` in any order;
//! 4. call `notify()` once before waiting again, then `listen()`; if it finds requests, do not wait.
//!
//! A guest need not kick while the driver is at work: from the first request that `pop` takes from a queue until `listen()`, or
//! as long as the driver prefers to look by itself (`has_requests()`).
//!
//! Nothing that a guest writes into its rings panics, hangs or allocates without bound; requests come out validated. No
//! code outside this folder touches guest memory, and every write to it is logged for a front end that migrates its VM
//! (`log`). EVENT_IDX and packed rings are not offered. Requests in flight survive the death of this process: see
//! `docs/decisions/0007-vhost-user-frontend.md`.

mod audience;
mod back_channel;
mod chain;
pub(crate) mod command;
mod config;
mod control;
mod device;
mod flights;
mod footprint;
#[cfg(feature = "testing")]
pub(crate) mod fuzz;
mod handler;
pub(crate) mod inflight;
mod keeper;
mod kicks;
mod layout;
mod ledger;
mod log;
pub(crate) mod memory;
mod pause;
mod queue;
mod request;
mod ring;
mod throttle;

pub use chain::{Attachment, Frame};
pub use config::{ConfigError, DeviceConfig, QUEUE_COUNT_MAX, SERIAL_BYTES_MAX};
pub use device::{DeviceError, VhostDevice};
pub use keeper::{Keeper, KeptConnections};
pub use memory::MappedMemory;
pub use request::{BlkRequest, RequestId, Status};
