//! What goes into the engine and what comes out of it.

use crate::units::{ByteRange, DiskIndex, PageCount, SlotIndex};

/// A guest request, numbered by the driver; unique among the requests that are not completed, and those that are but for
/// which the disk is still at work. Small numbers: the engine keeps a table indexed by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u32);

/// A REQUEST to the memory server, numbered by the engine; it comes back with the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FetchId(pub u32);

/// A memory server, numbered by the driver. No number is used for two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerNumber(pub u32);

/// An error of the backing store, as the errno it reported. It reaches the guest as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskError(pub i32);

/// What a guest asks of a disk. Ranges lie inside the disk and are multiples of 512 bytes: frontends validate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestOp {
    Read(ByteRange),
    Write { range: ByteRange, durable: bool },
    Flush,
    Discard(ByteRange),
    WriteZeroes { range: ByteRange, may_unmap: bool, durable: bool },
}

/// What the driver is to do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Do `op` on the backing store, with the request's buffer; then call `handle_disk_done`.
    Disk { request: RequestId, disk: DiskIndex, op: GuestOp },
    /// The same for a read that may still get pages of the server: with a buffer of its own, which lives until the disk is
    /// done, even if the request completes before.
    DiskToo { request: RequestId, disk: DiskIndex, op: GuestOp },
    /// Put zeroes into the guest's buffer, `length` bytes at `offset` of the request.
    ZeroFill { request: RequestId, offset: u32, length: u32 },
    /// Tell the guest. If the disk is done with a read, and this is `Ok`, its buffer is copied to the guest first.
    Complete { request: RequestId, result: Result<(), DiskError> },
    /// REQUEST to the server.
    Fetch { fetch: FetchId, slot: SlotIndex },
    /// SENDPAGE to the server: the page at `offset` of the request's buffer, to be copied now.
    SendBlock { slot: SlotIndex, request: RequestId, offset: u32 },
    /// MOVE to the server.
    MovePage { from: SlotIndex, to: SlotIndex },
    /// SETSIZE to the server.
    SetSize(PageCount),
    /// Connect to this server and ask for its offer; then call `handle_answer`, once.
    Ask(ServerNumber),
    /// The connection on which this server answered last is the session from now on.
    Use(ServerNumber),
    /// The connection on which this server answered is not needed: BYE, and close it.
    Release(ServerNumber),
    /// The session's server does not answer: close the connection. What is on its way to us must not arrive any more.
    GiveUp,
    /// The pool is given back: BYE, and close the connection. What is on its way to us must not arrive any more.
    Leave,
    /// Someone else writes to the image of this disk: say so loudly. The index was dropped.
    ForeignWriter(DiskIndex),
}

/// What became of an evicted page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evicted {
    /// SENDPAGE this page into the slot, now.
    Admit(SlotIndex),
    /// Its content is cached already.
    Duplicate,
    /// It is all zeroes, which need no memory.
    Zero,
    /// The disk is not known to hold this content: garbage, stale, or never written.
    Unmatched,
    /// Known content, but there is no room on the way to the server, or no server.
    Dropped,
}

/// What to do with a page that the server sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageOutcome {
    /// Copy it to the guest, at `offset` of the request, before the next `poll_action`.
    Deliver { request: RequestId, offset: u32 },
    /// Its request was answered some other way.
    Late,
    /// Not the content that was asked for.
    Wrong,
    /// Nobody asked.
    Unexpected,
}

/// What a memory server says when a connection is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOffer {
    /// Changes whenever the pool starts empty.
    pub generation: u64,
    /// Size of the pool now.
    pub npages: PageCount,
    /// Pages that are available beyond that.
    pub available: PageCount,
    /// SENDPAGEs the pool has stored since it started.
    pub sends_received: u64,
}

impl PoolOffer {
    /// Returns the pages that the pool could have.
    #[must_use]
    pub fn possible(&self) -> PageCount {
        PageCount(self.npages.0.saturating_add(self.available.0))
    }
}
