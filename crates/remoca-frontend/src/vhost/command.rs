//! The commands that the control thread of a device sends to the I/O thread, one at a time.

use super::footprint::Footprint;
use super::inflight::InflightRegion;
use super::layout::RingLayout;
use super::log::{DirtyLog, LogSwitch};
use super::memory::GuestMemory;
use remoca_io::wake;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, SyncSender, sync_channel};
use vhost::vhost_user::Error as VhostError;

/// A command of the control thread to the I/O thread. Its queue numbers have been checked.
pub(crate) enum Command {
    /// A front end has connected, or is taken over from a former program.
    Attach,
    /// Everything that was agreed on with the front end is in place: from now on it counts as connected.
    Attached,
    /// The front end has disconnected. Answered when none of its requests is in flight.
    Detach,
    SetFeatures(u64),
    SetMemory {
        memory: Arc<GuestMemory>,
        footprint: Footprint,
        layouts: Vec<Option<RingLayout>>,
    },
    StartQueue {
        queue: u16,
        layout: RingLayout,
        base: u16,
        kick: Arc<OwnedFd>,
        region: Option<Arc<InflightRegion>>,
    },
    /// Answered with the queue's base once it is drained.
    StopQueue {
        queue: u16,
    },
    EnableQueue {
        queue: u16,
        enable: bool,
    },
    SetKick {
        queue: u16,
        kick: Arc<OwnedFd>,
    },
    SetCall {
        queue: u16,
        call: Option<Arc<OwnedFd>>,
    },
    SetError {
        queue: u16,
        error: Option<Arc<OwnedFd>>,
    },
    /// Sets where the front end is told of changes, and the size of the disk that a former program has told it.
    SetChannel {
        channel: Option<OwnedFd>,
        told_bytes: Option<u64>,
    },
    /// Answered when everything that was completed while the write cache was on is durable.
    SetWriteback(bool),
    SetLog(DirtyLog),
    /// Sets where the used ring of a running queue is logged.
    LogRing {
        queue: u16,
        used_log: Option<u64>,
    },
}

/// The answer to a command: the base for `StopQueue`, zero for the others.
pub(crate) type Reply = Result<u16, String>;

pub(crate) struct Envelope {
    pub command: Command,
    pub reply: SyncSender<Reply>,
}

/// A command whose answer has to wait for the driver.
pub(super) struct Waiting {
    pub until: Until,
    pub reply: SyncSender<Reply>,
}

pub(super) enum Until {
    QueueDrained(u16),
    NothingHeld,
    /// The write cache is off once everything that was completed while it was on is durable. Nothing is handed out
    /// until the driver holds no request; then a flush is.
    CacheFlushed {
        handed_out: bool,
    },
}

/// The control thread's end of the channel to the I/O thread.
#[derive(Clone)]
pub(crate) struct IoThread {
    pub commands: Sender<Envelope>,
    pub wake: Arc<OwnedFd>,
    /// The device's log switch; only the I/O thread changes it.
    pub log: Arc<LogSwitch>,
    pub write_cache: Arc<WriteCache>,
    pub capacity: Arc<Capacity>,
}

/// Whether the guest has its write cache on. Only the I/O thread changes it. It outlives connections, because a guest
/// that switched it off no longer sends flushes.
#[derive(Debug)]
pub(crate) struct WriteCache(AtomicBool);

impl Default for WriteCache {
    fn default() -> Self {
        Self(AtomicBool::new(true))
    }
}

impl WriteCache {
    pub fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub fn set(&self, is_on: bool) {
        self.0.store(is_on, Ordering::Relaxed);
    }
}

/// The size of the disk, in bytes. Only the I/O thread changes it.
#[derive(Debug)]
pub(crate) struct Capacity(AtomicU64);

impl Capacity {
    pub fn new(bytes: u64) -> Self {
        Self(AtomicU64::new(bytes))
    }

    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub fn set(&self, bytes: u64) {
        self.0.store(bytes, Ordering::Relaxed);
    }
}

impl IoThread {
    /// Sends a command and waits for its answer.
    pub fn call(&self, command: Command) -> Result<u16, VhostError> {
        let gone = || failure("the device is shut down");
        let (reply, answer) = sync_channel(1);
        self.commands.send(Envelope { command, reply }).map_err(|_| gone())?;
        wake::raise(&self.wake);
        answer.recv().map_err(|_| gone())?.map_err(failure)
    }
}

/// Converts `error` to an error for the front end and the log whose text includes all causes.
pub(crate) fn failure(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> VhostError {
    let error = error.into();
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    VhostError::ReqHandlerError(io::Error::other(text))
}
