//! The I/O thread's access to its host: the descriptors that it waits for, and the time.

use super::poller::{Poller, Source};
use crate::clock::Clock;
use remoca_core::units::Nanos;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// The poller and the clock.
pub(super) struct Host {
    poller: Poller,
    clock: Box<dyn Clock>,
    started: Instant,
    /// Monotonic time of the last update.
    latest: Instant,
    /// Time from the start until then, as it is passed to the engine.
    now: Nanos,
}

impl Host {
    /// Returns a host whose time starts now.
    pub(super) fn new(clock: Box<dyn Clock>) -> io::Result<Self> {
        let started = clock.now();
        Ok(Self { poller: Poller::new()?, started, latest: started, clock, now: Nanos(0) })
    }

    /// Waits for events, and adds them to `ready` as [`Poller::wait`] does.
    pub(super) fn wait(&mut self, ready: &mut Vec<(Source, bool)>, timeout: Option<Duration>) -> io::Result<()> {
        self.poller.wait(ready, timeout)
    }

    /// Reports `source` whenever `fd` is readable.
    pub(super) fn watch(&self, fd: BorrowedFd<'_>, source: Source) -> io::Result<()> {
        self.poller.add(fd, source, false)
    }

    /// Sets whether `fd` is also reported when it is writable.
    pub(super) fn watch_room(&self, fd: BorrowedFd<'_>, source: Source, writable: bool) -> io::Result<()> {
        self.poller.change(fd, source, writable)
    }

    /// Stops reporting `fd`.
    pub(super) fn unwatch(&self, fd: BorrowedFd<'_>) {
        self.poller.remove(fd);
    }

    /// Updates [`Self::now`] and [`Self::latest`] from the clock.
    pub(super) fn update(&mut self) {
        self.latest = self.clock.now();
        let elapsed = self.latest.saturating_duration_since(self.started);
        self.now = nanos(elapsed);
    }

    /// Returns the time since the start, as of the last [`Self::update`].
    pub(super) fn now(&self) -> Nanos {
        self.now
    }

    /// Returns the time since the start, read now: the turn may have been held up since the last [`Self::update`].
    pub(super) fn now_exactly(&self) -> Nanos {
        self.now.max(nanos(self.uptime()))
    }

    /// Returns the monotonic time of the last [`Self::update`]: enough for a timer, which is looked at again in the next turn.
    pub(super) fn latest(&self) -> Instant {
        self.latest
    }

    /// Returns the monotonic time, read now.
    pub(super) fn instant(&self) -> Instant {
        self.clock.now()
    }

    /// Returns the time since `then`, read now.
    pub(super) fn time_since(&self, then: Instant) -> Duration {
        self.clock.now().saturating_duration_since(then)
    }

    /// Returns the time since the start, read now.
    pub(super) fn uptime(&self) -> Duration {
        self.time_since(self.started)
    }

    /// Returns the clocks.
    pub(super) fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    /// Sets [`Self::now`] to a time that the clock does not show.
    #[cfg(test)]
    pub(super) fn advance_to(&mut self, now: Nanos) {
        self.now = now;
    }
}

fn nanos(time: Duration) -> Nanos {
    Nanos(u64::try_from(time.as_nanos()).expect("a process runs for less than 584 years"))
}
