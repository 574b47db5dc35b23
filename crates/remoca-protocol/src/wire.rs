//! Layout of the bytes of a frame, little-endian.
//!
//! ```text
//!  0      1      2        4         8         12        16
//! +------+------+--------+---------+---------+---------+--- ... ---+
//! | kind | zero | length |    a    |    b    |    c    |  payload  |   length = bytes of the payload
//! +------+------+--------+---------+---------+---------+--- ... ---+
//!  kind         a        b           c          payload
//!   1 HELLO     -        -           -          HelloPayload
//!   2 WELCOME   -        -           -          WelcomePayload
//!   3 SETSIZE   request  npages      -          -
//!   4 SIZED     request  npages      available  -
//!   5 SENDPAGE  request  slot        -          the page
//!   6 REQUEST   request  slot        -          -
//!   8 MOVE      -        from        to         -
//!  11 ERROR     request  detail      code       -
//!  12 BYE       -        -           -          -
//!  14 TAKEBACK  -        npages      -          -           only on mapped sessions
//! ```
//! 7, 9, 10 and 13 are not used.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::HEADER_BYTES;

/// Numbers of the frame kinds.
pub(crate) mod kind {
    pub(crate) const HELLO: u8 = 1;
    pub(crate) const WELCOME: u8 = 2;
    pub(crate) const SETSIZE: u8 = 3;
    pub(crate) const SIZED: u8 = 4;
    pub(crate) const SENDPAGE: u8 = 5;
    pub(crate) const REQUEST: u8 = 6;
    pub(crate) const MOVE: u8 = 8;
    pub(crate) const ERROR: u8 = 11;
    pub(crate) const BYE: u8 = 12;
    pub(crate) const TAKEBACK: u8 = 14;
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) kind: u8,
    pub(crate) zero: u8,
    pub(crate) length: U16,
    pub(crate) a: U32,
    pub(crate) b: U32,
    pub(crate) c: U32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct HelloPayload {
    pub(crate) magic: [u8; 8],
    pub(crate) lowest: U16,
    pub(crate) highest: U16,
    pub(crate) zero: U32,
    pub(crate) token: [u8; 16],
    pub(crate) epoch: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct WelcomePayload {
    pub(crate) version: U16,
    pub(crate) zero: U16,
    pub(crate) npages: U32,
    pub(crate) available: U32,
    pub(crate) quota: U32,
    pub(crate) server_id: [u8; 16],
    pub(crate) pool_generation: U64,
    pub(crate) sends_received: U64,
}

const _: () = assert!(size_of::<Header>() == HEADER_BYTES);
const _: () = assert!(size_of::<HelloPayload>() == 40);
const _: () = assert!(size_of::<WelcomePayload>() == 48);
