//! Eventfds, with which threads, and a front end and its device, wake each other.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{FdFlags, fcntl_setfd};

/// Makes a non-blocking eventfd.
///
/// # Errors
/// If the system has no eventfd left.
pub fn new() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Wakes the other side. Errors are only logged: a full counter wakes it already, and a dead peer needs no waking.
pub fn raise(event: impl AsFd) {
    if let Err(error) = rustix::io::write(event, &1u64.to_ne_bytes()) {
        tracing::debug!(%error, "cannot signal an eventfd");
    }
}

/// Clears the signal, so that a level-triggered wait sees the next one.
pub fn clear(event: impl AsFd) {
    let mut counter = [0; 8];
    if let Err(error) = rustix::io::read(event, &mut counter) {
        tracing::debug!(%error, "cannot clear an eventfd");
    }
}

/// Makes an eventfd that a front end passed non-blocking and close-on-exec, and returns it. It must neither block this
/// process nor reach programs that this process starts.
///
/// # Errors
/// If the flags of the descriptor cannot be changed.
pub fn received(event: OwnedFd) -> io::Result<OwnedFd> {
    let flags = fcntl_getfl(&event)?;
    if !flags.contains(OFlags::NONBLOCK) {
        fcntl_setfl(&event, flags | OFlags::NONBLOCK)?;
    }
    keep(&event)?;
    Ok(event)
}

/// Sets close-on-exec on a descriptor that a front end passed, which arrives without it, so that it does not reach
/// programs that this process starts.
///
/// # Errors
/// If the system refuses to change its flags.
pub fn keep(fd: impl AsFd) -> io::Result<()> {
    Ok(fcntl_setfd(fd, FdFlags::CLOEXEC)?)
}

/// A descriptor that wakes a thread. Other threads hold it.
pub type Wake = Arc<OwnedFd>;

/// The eventfd that a thread waits for. It is readable when it has been raised.
pub struct WakeUp(Wake);

impl WakeUp {
    /// Makes an eventfd.
    ///
    /// # Errors
    /// If the system has no eventfd left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(new()?)))
    }

    /// Returns the descriptor to wait for.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Returns the descriptor that others raise.
    pub fn wake(&self) -> &Wake {
        &self.0
    }

    /// Raises the eventfd, so that the thread continues the rest of its work in another turn.
    pub fn raise(&self) {
        raise(&*self.0);
    }

    /// Clears the signal.
    pub fn clear(&self) {
        clear(&*self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::fcntl_getfd;

    /// QEMU's eventfds are non-blocking; another front end's need not be. A full one would block the I/O thread, and
    /// all disks.
    #[test]
    fn an_eventfd_of_a_front_end_holds_nobody_up() {
        for flags in [EventfdFlags::empty(), EventfdFlags::NONBLOCK, EventfdFlags::SEMAPHORE] {
            let event = received(eventfd(0, flags).unwrap()).unwrap();
            assert!(fcntl_getfl(&event).unwrap().contains(OFlags::NONBLOCK), "{flags:?}");
            assert!(fcntl_getfd(&event).unwrap().contains(FdFlags::CLOEXEC), "{flags:?}");
            rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            raise(&event);
            let mut counter = [0; 8];
            assert_eq!(rustix::io::read(&event, &mut counter), Ok(8), "what was there");
        }
    }
}
