//! Backing stores: what holds a disk's blocks for good (raw file, block device, NBD export).
//!
//! Called by the driver's I/O thread, which owns each store and polls its [`DataPath::event_fd`]; calls the kernel. A store
//! never blocks that thread once it is open. Invariants:
//! 1. Every submitted operation completes exactly once, and gives its buffer back.
//! 2. A read that completes without an error filled its whole buffer.
//! 3. A durable write, and a flush after any completed write, complete only when the data survive a power failure.
//! 4. A failed flush stays failed: no later flush or durable write of the same store succeeds, until the operator says so.
//! 5. What completes after a `ContentUncertain` was done in full after it, whatever had been done of it before.
//!
//! Stores neither cache nor order operations: overlapping operations in flight may take effect in any order.
//! See `docs/decisions/0008-backing-stores.md`.

mod aligned;
mod backoff;
#[cfg(feature = "testing")]
mod faulty;
mod file;
mod file_image;
mod file_stamp;
mod file_task;
mod file_threads;
mod file_uring;
mod flush_latch;
mod nbd;
mod nbd_connection;
mod nbd_export;
#[cfg(feature = "testing")]
mod nbd_fuzz;
mod nbd_link;
mod nbd_protocol;
mod nbd_task;
mod nbd_uri;
mod range_lock;
mod sector_machine;
#[cfg(feature = "testing")]
pub mod testing;
mod vacant;

use remoca_io::buffer::IoBuffer;
use remoca_protocol::handover::StoreKind;
use std::os::fd::BorrowedFd;
use std::time::Instant;

pub use aligned::AlignedStore;
#[cfg(feature = "testing")]
pub use faulty::{Fault, FaultPlan, FaultyStore};
pub use file::{FileOptions, FileStore, UringUse};
pub use nbd::{NbdOptions, NbdStore, OnLostConnection};
pub use nbd_uri::{NbdAddress, NbdUri, NbdUriError};
pub use vacant::VacantStore;

/// Bytes in the smallest unit that a frontend may ask for.
pub const SECTOR_SIZE: u32 = 512;

/// A backing store: each part must be said for each store and each layer, so no method has a default.
pub trait Store: DataPath + Identity + HandOver {}

impl<T: DataPath + Identity + HandOver> Store for T {}

/// The way of a store's data. Calls never block; after any of them, [`DataPath::next_event`] may have something to say.
pub trait DataPath: Send {
    /// Returns the geometry, which does not change after the opening.
    fn geometry(&self) -> Geometry;

    /// Returns a descriptor that is readable (`EPOLLIN`, level-triggered) when [`DataPath::handle_ready`] is due; the same
    /// for the store's life.
    fn event_fd(&self) -> BorrowedFd<'_>;

    /// Queues `operation`. Reads and writes come with a buffer of exactly their length, the others with none. An
    /// operation that does not fit the geometry completes with `EINVAL`, a modification of a read-only store with `EROFS`.
    fn submit(&mut self, token: u64, operation: StoreOp, buffer: Option<IoBuffer>);

    /// Hands everything queued to the kernel, in one system call where possible.
    fn kick(&mut self, now: Instant);

    /// Collects what the kernel has finished, and continues what it did in part.
    fn handle_ready(&mut self, now: Instant);

    /// Returns the next completion or notice, in the order in which they happened.
    fn next_event(&mut self) -> Option<StoreEvent>;

    /// Returns when [`DataPath::handle_timer`] is due; `None` while nothing waits for a time.
    fn next_deadline(&self) -> Option<Instant>;

    /// Does what was due at [`DataPath::next_deadline`]; harmless when called early.
    fn handle_timer(&mut self, now: Instant);

    /// Returns how many operations were submitted whose completion has not been taken with [`DataPath::next_event`].
    fn in_flight(&self) -> usize;

    /// Returns whether operations get through, for the status display.
    fn health(&self) -> StoreHealth;
}

/// Which image a store has, and what others may have done to it or seen of it.
pub trait Identity {
    /// Begins to learn when the image was changed last. One [`StoreEvent::Looked`] follows, late, or never where the file
    /// system hangs; before that, further calls do nothing. Returns false where the image's change time says nothing of what
    /// others do.
    fn look(&mut self) -> bool;

    /// Returns what tells the image from others and whether it was changed. It is as it was when the image was opened and
    /// locked, before anything was done to it. `None`: the system says nothing.
    fn stamp_at_opening(&self) -> Option<ImageStamp>;

    /// Returns what names the image on all hosts, and changes when an image file is written: now, or when the image
    /// was locked (`at_opening`). `None`: nothing does.
    fn shared_stamp(&self, at_opening: bool) -> Option<String>;

    /// Begins to drop what the page cache has of an image that is used around it.
    fn empty_page_cache(&mut self);

    /// Returns whether the page cache may hold something of the image: then others may have read or written it.
    fn may_be_in_page_cache(&self) -> bool;
}

/// What of a store outlives its use: durability that was lost, operations that are still under way, and the store itself
/// where another program goes on with it.
pub trait HandOver {
    /// Returns the error number of the first flush or durable write that failed: it decides all later ones.
    fn failed_flush(&self) -> Option<i32>;

    /// Makes all later flushes and durable writes fail with this error; with `None`, forgets that one has failed.
    fn set_failed_flush(&mut self, errno: Option<i32>);

    /// Returns whether nothing of this store is in the kernel, not even what the driver does not wait for: a thread that
    /// hangs there cannot end, and another program cannot take the place of this one.
    fn is_still(&self) -> bool;

    /// Waits a moment, at the end of the process, for what was sent elsewhere. False: some modification may still take
    /// effect later.
    fn drain(&mut self) -> bool;

    /// Returns what another program needs in order to go on where this store is, with nothing in flight.
    ///
    /// # Errors
    /// If that is impossible now; the text says why.
    fn hand_over(&self) -> Result<(BorrowedFd<'_>, StoreKind), String>;
}

/// An image at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageStamp {
    /// Kind, device, inode and size.
    pub identity: [u64; 4],
    /// When it was changed last, in nanoseconds of real time, by a clock that is this host's and by all who can change it.
    pub changed_ns: Option<u64>,
}

/// What a store is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes; a multiple of `logical_sector`.
    pub size: u64,
    /// Offsets and lengths of operations are multiples of this: 512 or 4096 bytes.
    pub logical_sector: u32,
    /// Operations aligned to this many bytes avoid a read-modify-write below; at least `logical_sector`.
    pub physical_block: u32,
    pub read_only: bool,
    /// A discard gives space back; otherwise it succeeds and does nothing.
    pub can_discard: bool,
    /// Write-zeroes is cheaper than writing zeroes; it works in either case.
    pub can_write_zeroes: bool,
    /// What was acknowledged and not flushed may be gone while this process lives: then [`StoreEvent::ContentUncertain`] comes.
    pub may_forget: bool,
    /// Modifications may take effect after the process that submitted them has died.
    pub outlives_process: bool,
}

/// Whether operations get through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreHealth {
    Up,
    /// Operations wait for the store to come back.
    Waiting,
}

/// One operation on a store. Offsets and lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreOp {
    Read {
        offset: u64,
        len: u32,
    },
    /// `durable`: survives a power failure once completed, as if a flush had followed.
    Write {
        offset: u64,
        len: u32,
        durable: bool,
    },
    /// Makes every write that completed before this was submitted durable.
    Flush,
    /// The content may be anything afterwards.
    Discard {
        offset: u64,
        len: u64,
    },
    WriteZeroes {
        offset: u64,
        len: u64,
        may_unmap: bool,
        durable: bool,
    },
}

impl StoreOp {
    /// Returns offset and length in bytes; `None` for a flush.
    #[must_use]
    pub fn range(&self) -> Option<(u64, u64)> {
        match *self {
            StoreOp::Read { offset, len } | StoreOp::Write { offset, len, .. } => Some((offset, u64::from(len))),
            StoreOp::Discard { offset, len } | StoreOp::WriteZeroes { offset, len, .. } => Some((offset, len)),
            StoreOp::Flush => None,
        }
    }

    /// Returns whether the operation changes content (a discard may).
    #[must_use]
    pub fn is_modification(&self) -> bool {
        match self {
            StoreOp::Write { .. } | StoreOp::Discard { .. } | StoreOp::WriteZeroes { .. } => true,
            StoreOp::Read { .. } | StoreOp::Flush => false,
        }
    }

    /// Returns whether completion promises durability.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        match *self {
            StoreOp::Flush => true,
            StoreOp::Write { durable, .. } | StoreOp::WriteZeroes { durable, .. } => durable,
            StoreOp::Read { .. } | StoreOp::Discard { .. } => false,
        }
    }

    fn buffer_len(&self) -> Option<usize> {
        match *self {
            StoreOp::Read { len, .. } | StoreOp::Write { len, .. } => usize::try_from(len).ok(),
            StoreOp::Flush | StoreOp::Discard { .. } | StoreOp::WriteZeroes { .. } => None,
        }
    }

    /// Checks the whole operation before any of it is done.
    fn validate(&self, geometry: &Geometry, buffer: Option<&IoBuffer>) -> Result<(), StoreError> {
        if self.buffer_len() != buffer.map(|buffer| buffer.len()) {
            return Err(StoreError::INVALID);
        }
        if geometry.read_only && self.is_modification() {
            return Err(StoreError { errno: libc::EROFS });
        }
        let Some((offset, len)) = self.range() else { return Ok(()) };
        let sector = u64::from(geometry.logical_sector);
        let aligned = offset.is_multiple_of(sector) && len.is_multiple_of(sector);
        let inside = offset.checked_add(len).is_some_and(|end| end <= geometry.size);
        if len == 0 || !aligned || !inside {
            return Err(StoreError::INVALID);
        }
        Ok(())
    }
}

/// Why an operation failed, as the kernel's error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", std::io::Error::from_raw_os_error(*errno))]
pub struct StoreError {
    pub errno: i32,
}

impl StoreError {
    pub const IO: StoreError = StoreError { errno: libc::EIO };
    pub const INVALID: StoreError = StoreError { errno: libc::EINVAL };
}

/// What a store reports.
#[derive(Debug)]
pub enum StoreEvent {
    Completed(StoreCompletion),
    /// From here on the store may hold something else than what was acknowledged (an NBD server came back): whatever was
    /// remembered of its content is void.
    ContentUncertain,
    /// When the image was changed last; `None`: the system did not say.
    Looked {
        changed_ns: Option<u64>,
    },
}

/// The end of one operation.
#[derive(Debug)]
pub struct StoreCompletion {
    pub token: u64,
    pub result: Result<(), StoreError>,
    /// The buffer that came with the operation. After a failed read its content means nothing.
    pub buffer: Option<IoBuffer>,
}

/// Why a store could not be opened; the message says what is wrong and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct OpenError {
    pub kind: OpenErrorKind,
    message: String,
}

impl OpenError {
    pub fn new(kind: OpenErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenErrorKind {
    Missing,
    /// A directory, socket, character device or the like.
    NotAnImage,
    Empty,
    /// The size is not a multiple of the sector.
    OddSize,
    /// Another process has it open and locked.
    InUse,
    /// The file system cannot lock it.
    CannotLock,
    PermissionDenied,
    /// Opened for writing, but can only be read.
    ReadOnly,
    /// The server does not answer.
    Unreachable,
    /// The server does not speak the protocol, or breaks it.
    Protocol,
    /// The server offers less than a disk needs.
    Unsuitable,
    /// Anything else the system refused.
    System,
}
