//! The time, as the I/O thread reads it: from the system, or from a caller that runs the thread in virtual time.

use crate::state;
use std::time::Instant;

/// The clocks of the host.
pub trait Clock: Send {
    /// Returns the monotonic time, for timeouts and latencies.
    fn now(&self) -> Instant;

    /// Returns the real time, which files are stamped with, and the time since the boot.
    fn of_files(&self) -> state::Clock;

    /// Returns the kernel's coarse real time, in nanoseconds. A file that is changed now is stamped with this time, or
    /// a later one.
    fn of_file_stamps(&self) -> u64;
}

/// The clocks of this host.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn of_files(&self) -> state::Clock {
        state::Clock::now()
    }

    fn of_file_stamps(&self) -> u64 {
        state::Clock::coarse_ns()
    }
}
