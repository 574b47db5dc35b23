//! The NBD frontend: disks, and the eviction port, as exports for hypervisors and tools without vhost-user.
//!
//! [`NbdServer`] listens and leads the negotiation; a client that chose an export is handed to the [`NbdExport`] that the
//! driver holds as that device's frontend. `negotiation` and `transmission` are the protocol, without I/O: bytes in,
//! requests and bytes out; `export` and `server` are the thin layer that moves bytes, in the I/O thread, never blocking.
//! 1. Nothing is allocated for a length that was not checked; memory, requests and connections have limits.
//! 2. A client that breaks the protocol is disconnected, and nothing else happens.
//! 3. A request is answered once, and only after the driver gave back all of its pieces.
//! 4. What a client left in flight is finished before a client that attached later is served.
//!
//! See `docs/decisions/0013-nbd-frontend.md`.

mod export;
#[cfg(any(test, feature = "testing"))]
mod fuzz;
mod judge;
mod listener;
mod negotiation;
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
pub use server::{Attached, Export, NbdServer, Target};

/// What an export is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportGeometry {
    /// Bytes; a multiple of `block`.
    pub size: u64,
    /// Requests are multiples of this: 512 or 4096.
    pub block: u32,
    /// Requests of this many bytes are cheap; at least `block`.
    pub preferred_block: u32,
    pub read_only: bool,
    pub can_trim: bool,
    pub can_write_zeroes: bool,
    /// What the disk has acknowledged and not flushed may be gone while its guest lives: it is an NBD server itself.
    pub may_forget: bool,
}

impl ExportGeometry {
    /// Returns a disk of `size` bytes that can be written to in sectors of 512 bytes, and can trim and write zeroes.
    #[must_use]
    pub const fn of_disk(size: u64) -> Self {
        Self {
            size,
            block: 512,
            preferred_block: 4096,
            read_only: false,
            can_trim: true,
            can_write_zeroes: true,
            may_forget: false,
        }
    }

    /// Returns an eviction port of `size` bytes, which can only be read and written.
    #[must_use]
    pub const fn of_port(size: u64) -> Self {
        Self { can_trim: false, can_write_zeroes: false, ..Self::of_disk(size) }
    }
}
