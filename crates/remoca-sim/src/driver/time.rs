//! Virtual time, for every clock that the driver reads.

use remoca_disk::clock::Clock;
use remoca_disk::state;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Real time at which a run begins, in nanoseconds since 1970: any day, not a whole second.
const BEGINNING_NS: u64 = 1_700_000_000_123_456_789;
/// Tick of the simulated kernel's file timestamps.
const TICK_NS: u64 = 4_000_000;

/// A clock that stands still until the world sets it.
#[derive(Clone)]
pub(super) struct VirtualClock {
    beginning: Instant,
    ns: Arc<AtomicU64>,
}

impl VirtualClock {
    pub(super) fn new() -> Self {
        // Only differences of these times are used.
        Self { beginning: Instant::now(), ns: Arc::default() }
    }

    pub(super) fn set(&self, ns: u64) {
        self.ns.store(ns, Ordering::Relaxed);
    }

    fn ns(&self) -> u64 {
        self.ns.load(Ordering::Relaxed)
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Instant {
        self.beginning + Duration::from_nanos(self.ns())
    }

    fn of_files(&self) -> state::Clock {
        state::Clock { real_ns: BEGINNING_NS + self.ns(), boot_ns: self.ns() }
    }

    fn of_file_stamps(&self) -> u64 {
        BEGINNING_NS + self.ns() / TICK_NS * TICK_NS
    }
}
