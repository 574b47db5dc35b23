//! The frames of the protocol, as types.
//!
//! Slots are numbered by the client, from 0 to the size of its pool. The comments say who sends a frame and what answers
//! it; replies come in the order of their requests.

use std::fmt;

use remoca_core::units::{PAGE_SIZE, PageCount, SlotIndex};

/// ID of a request, chosen by the client and returned in the reply. It is 0 in an [`ErrorReply`] that is about the
/// whole connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u32);

/// Token that names and guards a pool: 16 random bytes, chosen by the client. To know them is the only right to the
/// pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub [u8; 16]);

impl fmt::Debug for Token {
    /// Writes enough of the token to tell tokens apart in a log, but not enough to take a pool.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "{a:02x}{b:02x}{c:02x}{d:02x}..")
    }
}

/// Random ID of a memory server, new for each start of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServerId(pub [u8; 16]);

/// Random number of a pool, new whenever the pool is created empty. Another generation means that no page is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolGeneration(pub u64);

/// Number of [`Frame::SendPage`] frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SendCount(pub u64);

/// Range of protocol versions, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionRange {
    pub lowest: u16,
    pub highest: u16,
}

impl VersionRange {
    /// Returns the highest version in both ranges, or `None` if they have no version in common.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u16> {
        let highest = self.highest.min(other.highest);
        (highest >= self.lowest.max(other.lowest)).then_some(highest)
    }

    /// Encodes the versions as the detail of [`ErrorCode::VersionMismatch`].
    #[must_use]
    pub fn to_detail(self) -> u32 {
        u32::from(self.lowest) << 16 | u32::from(self.highest)
    }

    /// Decodes the versions from the detail of [`ErrorCode::VersionMismatch`].
    #[must_use]
    pub fn from_detail(detail: u32) -> Self {
        let [a, b, c, d] = detail.to_be_bytes();
        Self { lowest: u16::from_be_bytes([a, b]), highest: u16::from_be_bytes([c, d]) }
    }
}

/// First frame of a connection. Its layout is the same in all versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    pub versions: VersionRange,
    pub token: Token,
    /// Number that the client increases at each connect. The server closes the token's older connection before it
    /// answers, and refuses an epoch that is not above the last one it saw.
    pub epoch: u64,
}

/// Answer to a [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Version of the protocol on this connection from now on.
    pub version: u16,
    pub server_id: ServerId,
    pub pool_generation: PoolGeneration,
    /// Size of the pool that was found, or 0 if the pool is new.
    pub npages: PageCount,
    /// Pages that are available beyond `npages`.
    pub available: PageCount,
    /// Maximum number of pages that this client may have.
    pub quota: PageCount,
    /// Number of SENDPAGEs received for this pool since it was created, over all its connections. From it, the client
    /// learns which of its sends were lost with a connection.
    pub sends_received: SendCount,
}

/// Reason for a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCode {
    /// No version in common; detail: the server's versions, see [`VersionRange::from_detail`]. The connection is
    /// closed.
    VersionMismatch,
    /// The server has already seen a later connection of this token. The connection is closed.
    StaleEpoch,
    /// The server has too little memory for a SETSIZE; detail: pages available beyond the current size.
    NoMemory,
    /// A SETSIZE above the quota; detail: pages available beyond the current size.
    Quota,
    /// The slot of a REQUEST holds no page: never sent, moved away, or beyond the size of the pool.
    NotFound,
    /// The input is not a valid frame, or is a frame that is not allowed at this point. The connection is closed.
    Malformed,
    /// The server has reached its maximum number of connections. The connection is closed.
    Busy,
    /// A code that this version does not know.
    Unknown(u16),
}

/// Codes that only mapped sessions have. To a client of a paged session they are numbers without a meaning.
impl ErrorCode {
    /// No mapped pool is possible here; detail: 1 if the connection passes no descriptors (it is no Unix socket), 2 if the
    /// server's memory is of a kind that cannot be mapped. The connection is closed.
    pub const NOT_MAPPABLE: Self = Self::Unknown(256);
    /// The pool is ended, because the client did not give memory back in time or used memory that it was not granted.
    /// Its pages read as zeroes from now on. The connection is closed.
    pub const TAKEN_BACK: Self = Self::Unknown(257);
}

impl ErrorCode {
    pub(crate) fn to_wire(self) -> u16 {
        match self {
            Self::VersionMismatch => 1,
            Self::StaleEpoch => 2,
            Self::NoMemory => 3,
            Self::Quota => 4,
            Self::NotFound => 5,
            Self::Malformed => 6,
            Self::Busy => 7,
            Self::Unknown(code) => code,
        }
    }

    pub(crate) fn from_wire(wire: u16) -> Self {
        match wire {
            1 => Self::VersionMismatch,
            2 => Self::StaleEpoch,
            3 => Self::NoMemory,
            4 => Self::Quota,
            5 => Self::NotFound,
            6 => Self::Malformed,
            7 => Self::Busy,
            unknown => Self::Unknown(unknown),
        }
    }
}

/// Refusal of a request or, with request 0, of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorReply {
    pub request: RequestId,
    pub code: ErrorCode,
    /// Number whose meaning depends on `code`; 0 if that code has no detail.
    pub detail: u32,
}

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// Client, first: answered by [`Frame::Welcome`] or an error.
    Hello(Hello),
    /// Server: the session begins.
    Welcome(Welcome),
    /// Client: give the pool `npages` slots. Answered by [`Frame::Sized`], which may give a part of a larger size, or by an error, in
    /// which case the old size stays. The slots below the smaller of both sizes keep their pages.
    SetSize { request: RequestId, npages: PageCount },
    /// Server: the pool now has `npages` slots, and `available` more pages are available.
    Sized { request: RequestId, npages: PageCount, available: PageCount },
    /// Client: store the page in the slot (`request` is 0; no reply; dropped if beyond the size). Server: answers a
    /// [`Frame::Request`].
    SendPage { request: RequestId, slot: SlotIndex, page: &'a [u8; PAGE_SIZE] },
    /// Client: answered by [`Frame::SendPage`] or [`ErrorCode::NotFound`]. The slot keeps its page.
    Request { request: RequestId, slot: SlotIndex },
    /// Client: move the page of the slot `from` to the slot `to`. `from` becomes empty. If `from` was empty, `to`
    /// becomes empty as well. No reply.
    Move { from: SlotIndex, to: SlotIndex },
    /// Server: a refusal.
    Error(ErrorReply),
    /// Client: free the pool at once. No reply; the connection is closed.
    Bye,
    /// Server, on a mapped session only: the pool is to have at most `npages` slots from now on. The client stops using the
    /// slots from `npages` on, and answers by [`Frame::SetSize`] within [`TAKE_BACK_MS`](crate::TAKE_BACK_MS). If it does
    /// not, the pool is ended.
    TakeBack { npages: PageCount },
}
