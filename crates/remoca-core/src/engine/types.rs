//! Types of the engine's events and actions.

use crate::units::{ByteRange, DiskIndex, PageCount, SlotIndex};

/// ID of a guest request, assigned by the driver. It can be reused once the request is completed and its disk I/O is
/// done. IDs should be small, because the engine keeps a table indexed by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u32);

/// ID of a REQUEST to the memory server, assigned by the engine. The reply contains it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FetchId(pub u32);

/// Number of a memory server, assigned by the driver and never reused for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerNumber(pub u32);

/// Slot of the pool that a memory server has for this VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolSlot {
    pub server: ServerNumber,
    pub slot: SlotIndex,
}

/// Place of an admitted page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    pub at: PoolSlot,
    /// Slot to which the page that is at `at` must be copied first, because it moves to another pool.
    pub demoted_to: Option<PoolSlot>,
}

/// Errno of a failed I/O on the backing store. It reaches the guest unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskError(pub i32);

/// Operation of a guest on a disk. Frontends ensure that ranges lie inside the disk and are multiples of 512 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestOp {
    Read(ByteRange),
    Write { range: ByteRange, durable: bool },
    Flush,
    Discard(ByteRange),
    WriteZeroes { range: ByteRange, may_unmap: bool, durable: bool },
}

impl GuestOp {
    /// Returns the bytes of the disk that the operation reads or changes. A flush has none.
    #[must_use]
    pub fn range(self) -> ByteRange {
        match self {
            Self::Read(range) | Self::Discard(range) => range,
            Self::Write { range, .. } | Self::WriteZeroes { range, .. } => range,
            Self::Flush => ByteRange { offset: 0, length: 0 },
        }
    }
}

/// Action for the driver. Actions are executed in the order in which they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Execute `op` on the backing store with the request's buffer, then call `handle_disk_done`.
    Disk { request: RequestId, disk: DiskIndex, op: GuestOp },
    /// Execute a read that the server may still answer. It needs a buffer of its own, which lives until the disk is done
    /// even if the request completes earlier.
    DiskToo { request: RequestId, disk: DiskIndex, op: GuestOp },
    /// Fill `length` bytes at `offset` of the guest's buffer with zeroes.
    ZeroFill { request: RequestId, offset: u32, length: u32 },
    /// Complete the request. If the disk answered a read and `result` is `Ok`, copy the buffer of the disk read to the
    /// guest first.
    Complete { request: RequestId, result: Result<(), DiskError> },
    /// Send REQUEST to the server of a pool.
    Fetch { fetch: FetchId, at: PoolSlot },
    /// Send SENDPAGE to the server of a pool, with the page at `offset` of the request's buffer. Copy the page now.
    SendBlock { admitted: Admitted, request: RequestId, offset: u32 },
    /// Send MOVE to a server.
    MovePage { server: ServerNumber, from: SlotIndex, to: SlotIndex },
    /// Send SETSIZE to a server.
    SetSize { server: ServerNumber, npages: PageCount },
    /// Connect to this server and ask for its offer, then call `handle_answer` once.
    Ask(ServerNumber),
    /// Use the connection on which this server answered last as its session.
    Use(ServerNumber),
    /// Say BYE on the connection on which this server answered, and close it.
    Release(ServerNumber),
    /// Close the connection of this server's session, because the server does not answer. Nothing in transit on it may
    /// arrive after this.
    GiveUp(ServerNumber),
    /// Give the pool of this server back: say BYE and close the connection of its session. Nothing in transit on it may
    /// arrive after this.
    Leave(ServerNumber),
    /// Warn the operator that another program writes to the image of this disk. The index was dropped.
    ForeignWriter(DiskIndex),
}

/// Outcome for an evicted page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evicted {
    /// Send this page into the slot (SENDPAGE) now.
    Admit(Admitted),
    /// The content of the page is already cached.
    Duplicate,
    /// The page is all zeroes, which take no memory.
    Zero,
    /// The disk is not known to hold the content of the page, which is garbage, stale, or was never written.
    Unmatched,
    /// The content is known, but there is no session, or no room in the send window.
    Dropped,
    /// The content is known, but the insertion policy keeps the pages that are cached already.
    PassedOver,
}

/// Outcome for a page that the server sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageOutcome {
    /// Copy the page to `offset` of the guest's buffer before the next `poll_action`.
    Deliver { request: RequestId, offset: u32 },
    /// Drop the page: its request was already answered.
    Late,
    /// Drop the page: it is not the requested content.
    Wrong,
    /// Drop the page: no REQUEST with this ID is outstanding.
    Unexpected,
}

/// What becomes of the pools at servers that are taken out of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// They take no new pages, and are given back once what they have was read and the other servers have granted their share,
    /// or after ten minutes.
    Drained,
    /// They are given back at once.
    AtOnce,
}

/// Offer of a memory server on a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOffer {
    /// Number that changes whenever the pool starts empty.
    pub generation: u64,
    /// Current size of the pool.
    pub npages: PageCount,
    /// Pages available beyond the current size.
    pub available: PageCount,
    /// SENDPAGEs that the pool has received since it started.
    pub sends_received: u64,
}

impl PoolOffer {
    /// Returns the largest size that the pool could have.
    #[must_use]
    pub fn possible(&self) -> PageCount {
        PageCount(self.npages.0.saturating_add(self.available.0))
    }
}
