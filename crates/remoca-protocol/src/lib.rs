//! Formats that leave a process, and no I/O.
//!
//! In modules: the control protocol, the description of an upgrade, what two VM processes say when disks migrate, the
//! eviction port's pages, traces, and the numbers of NBD. At the top: the wire protocol between a VM process (client) and a
//! memory server.
//!
//! The wire protocol is used by the server's sessions and by the client's link. Both read what there is into a
//! [`ReceiveBuffer`], take [`Frame`]s from it, and encode answers into a `Vec<u8>`. A [`Frame::SendPage`] borrows its page
//! from the buffer. [`send_page_header`] serves a vectored write straight from the page's own place.
//!
//! 1. Whatever the bytes are, decoding a frame neither panics nor allocates.
//! 2. A frame that decodes encodes to the same bytes again: each frame has one form, and unused fields are zero.
//! 3. A frame that can never become valid is refused as soon as its 16-byte header is there.
//!
//! Not here: sequence and state (who may send what when), authentication, encryption. See
//! `docs/decisions/0003-wire-protocol.md`.

#![cfg_attr(test, allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "a test may look at the clock"))]
#![forbid(unsafe_code)]
#![deny(clippy::wildcard_enum_match_arm)]

mod buffer;
mod codec;
pub mod control;
mod frame;
pub mod handover;
pub mod nbd;
pub mod peer;
pub mod port;
pub mod trace;
mod wire;

pub use buffer::ReceiveBuffer;
pub use codec::{DecodeError, decode, send_page_header};
pub use frame::{
    ErrorCode, ErrorReply, Frame, Hello, PoolGeneration, RequestId, SendCount, ServerId, Token, VersionRange, Welcome,
};
pub use remoca_core::units::{PAGE_SIZE, PageCount, SlotIndex};

/// The version of the protocol that this crate speaks.
pub const VERSION: u16 = 1;
/// The versions that this crate speaks.
pub const VERSIONS: VersionRange = VersionRange { lowest: VERSION, highest: VERSION };
/// First bytes of each [`Frame::Hello`]'s payload.
pub const MAGIC: [u8; 8] = *b"REMOCA\0\0";
/// Bytes in the header of each frame.
pub const HEADER_BYTES: usize = 16;
/// Most bytes that may follow a header.
pub const PAYLOAD_BYTES_MAX: usize = PAGE_SIZE;
/// Bytes in the longest frame.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + PAYLOAD_BYTES_MAX;
