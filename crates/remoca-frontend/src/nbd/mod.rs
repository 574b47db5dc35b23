//! The NBD frontend: disks, and the eviction port, as exports for hypervisors and tools without vhost-user.
//!
//! [`NbdServer`] listens and leads the negotiation; a client that chose an export is handed to the [`NbdExport`] that the
//! driver holds as that device's frontend. `negotiation` and `transmission` are the protocol, without I/O: bytes in,
//! requests and bytes out; `export` and `server` are the thin layer that moves bytes, in the I/O thread, never blocking.
//! 1. No memory is allocated for an unchecked length; memory, requests and connections have limits.
//! 2. A client that breaks the protocol is disconnected. This has no other effect.
//! 3. A request is answered once, and only after the driver gave back all of its pieces.
//! 4. Requests that a client left in flight are finished before a client that attached later is served.
//!
//! See `docs/decisions/0013-nbd-frontend.md`.

mod export;
#[cfg(any(test, feature = "testing"))]
mod fuzz;
mod judge;
mod listener;
mod negotiation;
mod offer;
mod open;
mod outbox;
mod pieces;
mod server;
mod socket;
mod staging;
#[cfg(test)]
mod tests;
mod transmission;

pub use export::{NbdExport, NbdRequest};
#[cfg(feature = "testing")]
pub use fuzz::fuzz_nbd;
pub use listener::{ListenError, Listener};
pub use negotiation::EXPORT_NAME_LEN_MAX;
pub use offer::{Export, ExportGeometry, Target};
pub use server::{Attached, NbdServer};
