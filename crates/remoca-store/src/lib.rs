//! Backing stores: the permanent storage of a disk's blocks (raw file, block device, NBD export).
//!
//! The driver's I/O thread owns each store and polls its [`DataPath::event_fd`]. A store calls the kernel, and never
//! blocks that thread once it is open. Invariants:
//! 1. Every submitted operation completes exactly once, and returns its buffer.
//! 2. A read that completes without an error filled its whole buffer.
//! 3. A durable write, and a flush after any completed write, complete only when the data survive a power failure.
//! 4. A failed flush stays failed: no later flush or durable write of the same store succeeds until the operator clears
//!    the failure.
//! 5. An operation that completes after a `ContentUncertain` was done in full after it, even if parts of it had been
//!    done before.
//!
//! Stores neither cache nor order operations: overlapping operations in flight may take effect in any order.
//! See `docs/decisions/0008-backing-stores.md`.

mod aligned;
mod backoff;
mod complaints;
mod device_queue;
#[cfg(feature = "testing")]
mod faulty;
mod file;
mod file_image;
mod file_stamp;
mod file_task;
mod file_threads;
mod file_uring;
mod flush_latch;
pub mod format;
mod nbd;
mod nbd_connection;
mod nbd_export;
#[cfg(feature = "testing")]
mod nbd_fuzz;
mod nbd_link;
mod nbd_protocol;
mod nbd_task;
mod nbd_uri;
mod overlaps;
mod range_lock;
mod sector_machine;
#[cfg(feature = "testing")]
pub mod testing;
mod vacant;

use remoca_io::buffer::IoBuffer;
use remoca_protocol::handover::StoreKind;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

pub use aligned::AlignedStore;
pub use complaints::Complaints;
#[cfg(feature = "testing")]
pub use faulty::{Fault, FaultPlan, FaultyStore};
pub use file::FileStore;
pub use file_image::{FileOptions, UringUse};
pub use nbd::{NbdOptions, NbdStore, OnLostConnection};
pub use nbd_uri::{NbdAddress, NbdUri, NbdUriError};
pub use vacant::VacantStore;

/// How long the last flushes of a process may take: as long as an NBD server has that shuts down. The service manager waits longer.
pub const LAST_FLUSH_TIME_MAX: Duration = Duration::from_secs(30);

/// Bytes in the smallest unit of a frontend's request.
pub const SECTOR_SIZE: u32 = 512;

/// A backing store. No method of its parts has a default implementation: each store and each layer must define all of
/// them.
pub trait Store: DataPath + Identity + HandOver {}

impl<T: DataPath + Identity + HandOver> Store for T {}

/// The I/O operations of a store. Calls never block. After any of them, [`DataPath::next_event`] may have an event.
pub trait DataPath: Send {
    /// Returns the geometry. Only its size changes, as [`StoreEvent::Measured`] says.
    fn geometry(&self) -> Geometry;

    /// Returns a descriptor that is readable (`EPOLLIN`, level-triggered) when [`DataPath::handle_ready`] is due. It
    /// stays the same for the store's whole life.
    fn event_fd(&self) -> BorrowedFd<'_>;

    /// Queues `operation`. A read or write must come with a buffer of exactly its length, any other operation without a
    /// buffer. An operation that does not fit the geometry completes with `EINVAL`, and a modification of a read-only
    /// store with `EROFS`.
    fn submit(&mut self, token: u64, operation: StoreOp, buffer: Option<IoBuffer>);

    /// Submits everything queued to the kernel, in one system call where possible.
    fn kick(&mut self, now: Instant);

    /// Collects the operations that the kernel has finished, and continues those that it did in part.
    fn handle_ready(&mut self, now: Instant);

    /// Returns the next completion or notice in the order in which they happened, or `None` if there is none.
    fn next_event(&mut self) -> Option<StoreEvent>;

    /// Returns when [`DataPath::handle_timer`] is due, or `None` while no timer is running.
    fn next_deadline(&self) -> Option<Instant>;

    /// Does the work that is due at [`DataPath::next_deadline`]. Calling it early is harmless.
    fn handle_timer(&mut self, now: Instant);

    /// Returns the number of submitted operations whose completion has not been taken with [`DataPath::next_event`].
    fn in_flight(&self) -> usize;

    /// Returns whether operations reach the storage, for the status display.
    fn health(&self) -> StoreHealth;
}

/// The identity of a store's image, and whether others may have changed or read it.
pub trait Identity {
    /// Starts to query when the image was last changed. One [`StoreEvent::Looked`] follows later, or never if the file
    /// system hangs. Until then further calls do nothing. Returns false if the image's change time does not reveal
    /// writes of others; then no event follows.
    fn look(&mut self) -> bool;

    /// Starts to query the size of the image. One [`StoreEvent::Measured`] follows later, or never if the file system
    /// hangs. Until then further calls do nothing. Returns false if the image tells its size only when it is opened, or a
    /// server is connected to; then no event follows.
    fn measure(&mut self) -> bool;

    /// Returns the stamp that identifies the image and shows whether it was changed, or `None` if the system does not
    /// provide it. It was taken when the image was opened and locked, before anything was done to it; its size is the
    /// one that was measured last.
    fn stamp_at_opening(&self) -> Option<ImageStamp>;

    /// Returns a text that names the image on all hosts, and changes when an image file is written. Returns `None` if
    /// there is no such text. The text describes the image now, or with `at_opening` when it was locked.
    fn shared_stamp(&self, at_opening: bool) -> Option<String>;

    /// Starts to drop the image from the page cache, if the image is used with direct I/O.
    fn empty_page_cache(&mut self);

    /// Returns whether the page cache may hold parts of the image. If so, others may have read or written it.
    fn may_be_in_page_cache(&self) -> bool;
}

/// The state of a store that outlives its use: lost durability, operations that are still in flight, and the store
/// itself if another program continues to use it.
pub trait HandOver {
    /// Returns the error number of the first flush or durable write that failed, or `None` if none has. All later ones
    /// fail with it.
    fn failed_flush(&self) -> Option<i32>;

    /// Makes all later flushes and durable writes fail with this error. With `None`, forgets that one has failed.
    fn set_failed_flush(&mut self, errno: Option<i32>);

    /// Returns whether no operation of this store is in the kernel, including those that the driver does not wait for.
    /// A thread that hangs in the kernel cannot end, and then another program cannot take the place of this one.
    fn is_still(&self) -> bool;

    /// Sends, at the end of the process, the last flush that [`HandOver::drain`] waits for, if one is due: several stores then flush at the
    /// same time.
    fn begin_drain(&mut self);

    /// Waits briefly, at the end of the process, for operations that were sent to a server, and flushes acknowledged writes that
    /// would otherwise count as lost. [`HandOver::failed_flush`] tells if that fails, or takes until `flush_by` and longer than two
    /// seconds. Returns false if a modification may still take effect later.
    fn drain(&mut self, flush_by: Instant) -> bool;

    /// Returns what another program needs in order to continue with this store, with no operation in flight.
    ///
    /// # Errors
    /// If the store cannot be handed over now. The text says why.
    fn hand_over(&self) -> Result<(BorrowedFd<'_>, StoreKind), String>;
}

/// An image at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageStamp {
    /// Kind, device, inode and size.
    pub identity: [u64; 4],
    /// Time of the last change, in nanoseconds of real time by this host's clock, whoever made it. `None` if that is
    /// not known.
    pub changed_ns: Option<u64>,
}

impl ImageStamp {
    /// Kind of an image file.
    const FILE: u64 = 1;

    /// Returns whether the image is a file. Its lock then keeps all who honour it from writing, also at other hosts; that of a
    /// block device reaches this host alone.
    #[must_use]
    pub fn is_of_file(&self) -> bool {
        self.identity[0] == Self::FILE
    }
}

/// Size, alignment and abilities of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes, a multiple of `logical_sector`.
    pub size: u64,
    /// Offsets and lengths of operations are multiples of this: 512 or 4096 bytes.
    pub logical_sector: u32,
    /// Operations aligned to this many bytes avoid a read-modify-write in the storage. At least `logical_sector`.
    pub physical_block: u32,
    pub read_only: bool,
    /// Whether a discard frees space. If not, it succeeds and does nothing.
    pub can_discard: bool,
    /// Whether write-zeroes is cheaper than writing zeroes. It works in either case.
    pub can_write_zeroes: bool,
    /// Whether acknowledged writes that were not flushed may be lost while this process lives. If that happens,
    /// [`StoreEvent::ContentUncertain`] is reported.
    pub may_forget: bool,
    /// Whether modifications may take effect after the process that submitted them has died.
    pub outlives_process: bool,
}

/// Whether operations reach the storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreHealth {
    Up,
    /// Operations wait for the server to come back, or to offer what it did.
    Waiting {
        why: String,
    },
}

/// One operation on a store. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreOp {
    Read {
        offset: u64,
        len: u32,
    },
    /// If `durable`, the write survives a power failure once it is completed, as if a flush had followed.
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
    /// Returns offset and length in bytes, or `None` for a flush.
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

    /// Checks the whole operation against the geometry before any part of it is done.
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

/// An event that a store reports.
#[derive(Debug)]
pub enum StoreEvent {
    Completed(StoreCompletion),
    /// From here on the store may hold something else than what was acknowledged (an NBD server came back). All
    /// knowledge of its content is void.
    ContentUncertain,
    /// The time when the image was last changed, or `None` if the system did not provide it.
    Looked {
        changed_ns: Option<u64>,
    },
    /// The geometry has the size of the image as it was found now, in whole sectors. Operations beyond it fail. With an
    /// error, the size is not known, and the geometry is unchanged.
    Measured(Result<(), StoreError>),
}

/// The end of one operation.
#[derive(Debug)]
pub struct StoreCompletion {
    pub token: u64,
    pub result: Result<(), StoreError>,
    /// The buffer that came with the operation. After a failed read its content is undefined.
    pub buffer: Option<IoBuffer>,
}

/// Why a store could not be opened. The message says what is wrong and what to do.
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
    /// An image of another format than raw.
    NotRaw,
    /// The size is not a multiple of the sector.
    OddSize,
    /// Another process has the image open and locked.
    InUse,
    /// The file system cannot lock the image.
    CannotLock,
    PermissionDenied,
    /// The image was to be opened for writing, but can only be read.
    ReadOnly,
    /// The server does not answer.
    Unreachable,
    /// The server does not speak the protocol, or breaks it.
    Protocol,
    /// The server offers less than a disk needs, or the image is larger than a disk can be.
    Unsuitable,
    /// Any other refusal of the system.
    System,
}
