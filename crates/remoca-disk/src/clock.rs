//! The time, as the I/O thread reads it: from the system, or from whoever drives the thread in virtual time.

use crate::state;
use std::time::Instant;

/// The clocks of the host.
pub trait Clock: Send {
    /// Returns the time that nobody sets, for timeouts and latencies.
    fn now(&self) -> Instant;

    /// Returns the time that files are stamped with, and that since the boot.
    fn of_files(&self) -> state::Clock;

    /// Returns the time that the kernel stamps a file with that is changed now, or an earlier one.
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
