//! Data formats that leave a process. No I/O.
//!
//! The modules have the control protocol, the description of an upgrade, the messages of two VM processes when disks
//! migrate, the eviction port's pages, traces, the constants of NBD, and how JSON of others is read (`shown`). The top level
//! has the wire protocol between a VM process (client) and a memory server.
//!
//! The wire protocol is used by the server's sessions and by the client's link. Both read the available bytes into a
//! [`ReceiveBuffer`], take [`Frame`]s from it, and encode answers into a `Vec<u8>`. A [`Frame::SendPage`] borrows its
//! page from the buffer. [`send_page_header`] allows a vectored write that takes the page directly from its place in
//! memory.
//!
//! 1. Whatever the bytes are, decoding a frame neither panics nor allocates.
//! 2. A decoded frame encodes to the same bytes again: each frame has one form, and unused fields are zero.
//! 3. A frame with an invalid header is refused as soon as the 16 bytes of that header have arrived.
//!
//! Not here: sequence and state (who may send which frame when), authentication, encryption. See
//! `docs/decisions/0003-wire-protocol.md`.

#![cfg_attr(test, allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "a test may look at the clock"))]
#![forbid(unsafe_code)]
#![deny(clippy::wildcard_enum_match_arm)]

mod buffer;
mod codec;
pub mod control;
mod frame;
pub mod guests;
pub mod handover;
pub mod host;
pub mod kept_pool;
pub mod ledger;
pub mod nbd;
pub mod offer;
pub mod peer;
pub mod port;
pub mod shown;
pub mod trace;
mod wire;

pub use buffer::ReceiveBuffer;
pub use codec::{DecodeError, decode, send_page_header};
pub use frame::{
    ErrorCode, ErrorReply, Frame, Hello, PoolGeneration, RequestId, SendCount, ServerId, Token, VersionRange, Welcome,
};
pub use remoca_core::units::{PAGE_SIZE, PageCount, SlotIndex};

/// Version of the wire protocol that this crate implements.
pub const VERSION: u16 = 1;
/// Range of versions that this crate implements.
pub const VERSIONS: VersionRange = VersionRange { lowest: VERSION, highest: VERSION };
/// Lowest version that means a mapped session: its pages are in a file in memory that the client gets with the WELCOME, and
/// reads and writes by itself. Mapped sessions count their versions apart, from 32769 on, so that a server that knows none
/// refuses by [`ErrorCode::VersionMismatch`], and so that neither kind of session needs a new version for the other's sake.
pub const MAPPED_VERSION: u16 = 0x8001;
/// Range of versions of mapped sessions that this crate implements. A client that offers any version of [`VERSIONS`] gets a
/// paged session.
pub const MAPPED_VERSIONS: VersionRange = VersionRange { lowest: MAPPED_VERSION, highest: MAPPED_VERSION };
/// Time that a client has for its answer to a [`Frame::TakeBack`], in milliseconds.
pub const TAKE_BACK_MS: u64 = 100;

/// Time after which a server that makes a mapped pool larger answers with what the pool has so far, in milliseconds. A client waits more than
/// twice as long for the answer to a [`Frame::SetSize`].
pub const GROWTH_MS: u64 = 2000;
/// First bytes of each [`Frame::Hello`]'s payload.
pub const MAGIC: [u8; 8] = *b"REMOCA\0\0";
/// Bytes in the header of each frame.
pub const HEADER_BYTES: usize = 16;
/// Maximum number of bytes that may follow a header.
pub const PAYLOAD_BYTES_MAX: usize = PAGE_SIZE;
/// Bytes in the longest frame.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + PAYLOAD_BYTES_MAX;
