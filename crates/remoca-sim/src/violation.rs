//! Violations that a checker can find.

use crate::guest::Key;
use std::fmt;

/// A promise that can be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Promise {
    /// A read returns for each sector the last write completed before it began, or a concurrent one.
    NoStaleRead,
    /// Every request completes exactly once, and not before the disk is done with it.
    ExactlyOnce,
    /// A request fails if, and only if, the disk failed it.
    DiskErrorsOnly,
    /// A write that completed is on the disk.
    WriteThrough,
    /// Writes that completed before a successful flush are durable.
    FlushIsDurable,
    /// The disk receives exactly the guest's requests, each once.
    DiskOnlyAsAsked,
    /// A page never goes into a slot with an outstanding REQUEST.
    SlotNotReused,
    /// A read that was not sent to the disk waits for a REQUEST that is outstanding.
    NoWaitInVain,
    /// A late page touches no buffer.
    NoLateDelivery,
    /// Free, used and draining slots add up to the capacity.
    SlotsAddUp,
    /// Every message fits the connection and the size of the pool.
    ProtocolKept,
    /// The fingerprint known for a block is that of what the disk holds.
    KnownIsTrue,
    /// The content that the index has for a slot is the content of that slot on an honest server.
    CachedIsThere,
    /// A cache that is off knows nothing, so that it is cold when switched on again.
    OffIsCold,
    /// No other program writes to the disks, so the engine may not report a foreign writer.
    NoFalseAlarm,
    /// No two processes own a disk.
    OneOwner,
    /// Queues keep to their limits.
    Bounded,
    /// After the last request nothing is left over.
    NothingLeft,
    /// Counters are consistent.
    CountersAddUp,
    /// Known pages are admitted while there is room, and the requested size is reached if possible.
    Useful,
    /// The engine does not panic.
    NoPanic,
}

impl Promise {
    /// Returns whether the guest itself could notice, without inspecting the engine.
    #[must_use]
    pub fn is_visible_to_guest(self) -> bool {
        matches!(
            self,
            Self::NoStaleRead | Self::ExactlyOnce | Self::DiskErrorsOnly | Self::WriteThrough | Self::FlushIsDurable
        )
    }
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub promise: Promise,
    /// Number of the VM in question.
    pub vm: usize,
    /// Block at which it was noticed.
    pub at: Option<Key>,
    pub detail: String,
}

impl Violation {
    /// Makes a violation that concerns no single block.
    pub fn new(promise: Promise, detail: impl Into<String>) -> Self {
        Self { promise, vm: 0, at: None, detail: detail.into() }
    }

    /// Makes a violation at a block.
    pub fn at(promise: Promise, key: Key, detail: impl Into<String>) -> Self {
        Self { promise, vm: 0, at: Some(key), detail: detail.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} in vm {}", self.promise, self.vm)?;
        if let Some((disk, block)) = self.at {
            write!(f, " at disk {disk} block {block}")?;
        }
        write!(f, ": {}", self.detail)
    }
}
