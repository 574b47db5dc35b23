//! What a checker can find.

use crate::guest::Key;
use std::fmt;

/// Which promise was broken.
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
    /// What completed before a flush that succeeded is durable.
    FlushIsDurable,
    /// The disk is asked for what the guest asked for, once.
    DiskOnlyAsAsked,
    /// A page never goes into a slot with an outstanding REQUEST.
    SlotNotReused,
    /// A read that was not given to the disk waits for a REQUEST that is outstanding.
    NoWaitInVain,
    /// A late page touches no buffer.
    NoLateDelivery,
    /// Free, used and draining slots add up to the capacity.
    SlotsAddUp,
    /// Every message fits the connection and the size of the pool.
    ProtocolKept,
    /// What is known about a block is what the disk holds.
    KnownIsTrue,
    /// What the index has in a slot is what an honest server has there.
    CachedIsThere,
    /// A cache that is off knows nothing, so that it is cold when it is on again.
    OffIsCold,
    /// Nobody else writes to the disks, so nobody may be accused of it.
    NoFalseAlarm,
    /// No two processes have a disk.
    OneOwner,
    /// Queues keep to their limits.
    Bounded,
    /// After the last request nothing is left over.
    NothingLeft,
    /// Counters add up.
    CountersAddUp,
    /// Known pages are admitted while there is room, and the size that was asked for is reached where it can be.
    Useful,
    /// The engine does not panic.
    NoPanic,
}

impl Promise {
    /// Whether the guest itself could notice, without looking into the engine.
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
    /// The VM that was looked at.
    pub vm: usize,
    /// The block it was noticed at.
    pub at: Option<Key>,
    pub detail: String,
}

impl Violation {
    /// A violation that is about no single block.
    pub fn new(promise: Promise, detail: impl Into<String>) -> Self {
        Self { promise, vm: 0, at: None, detail: detail.into() }
    }

    /// A violation at a block.
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
