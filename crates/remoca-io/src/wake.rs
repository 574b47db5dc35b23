//! Eventfds: how threads, and a front end and its device, wake each other.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{FdFlags, fcntl_setfd};

/// Makes an eventfd that blocks nobody.
///
/// # Errors
/// If the system has no eventfd left.
pub fn new() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Wakes the other side. A counter that is full already does that, and a dead peer needs no waking.
pub fn raise(event: impl AsFd) {
    if let Err(error) = rustix::io::write(event, &1u64.to_ne_bytes()) {
        tracing::debug!(%error, "cannot signal an eventfd");
    }
}

/// Takes the signal back, so that a level-triggered wait sees the next one.
pub fn clear(event: impl AsFd) {
    let mut counter = [0; 8];
    if let Err(error) = rustix::io::read(event, &mut counter) {
        tracing::debug!(%error, "cannot clear an eventfd");
    }
}

/// Takes an eventfd that a front end passed: it must not be able to block us, nor go to a program that is started.
///
/// # Errors
/// If it is no descriptor of which flags can be changed.
pub fn received(event: OwnedFd) -> io::Result<OwnedFd> {
    let flags = fcntl_getfl(&event)?;
    if !flags.contains(OFlags::NONBLOCK) {
        fcntl_setfl(&event, flags | OFlags::NONBLOCK)?;
    }
    keep(&event)?;
    Ok(event)
}

/// Keeps a descriptor that a front end passed from programs that are started: it comes without close-on-exec.
///
/// # Errors
/// If the system refuses to change its flags.
pub fn keep(fd: impl AsFd) -> io::Result<()> {
    Ok(fcntl_setfd(fd, FdFlags::CLOEXEC)?)
}

/// A descriptor that wakes a thread; others keep it.
pub type Wake = Arc<OwnedFd>;

/// What a thread waits for: readable when somebody has raised it.
pub struct WakeUp(Wake);

impl WakeUp {
    /// Makes an eventfd.
    ///
    /// # Errors
    /// If the system has no eventfd left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(new()?)))
    }

    /// Returns the descriptor that is readable.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Returns what others raise.
    pub fn wake(&self) -> &Wake {
        &self.0
    }

    /// Wakes the thread itself, for what is left of a turn.
    pub fn raise(&self) {
        raise(&*self.0);
    }

    /// Takes the signal back.
    pub fn clear(&self) {
        clear(&*self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::fcntl_getfd;

    /// QEMU's are nonblocking; another front end's need not be. One that is full would hold up the I/O thread, and all disks.
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
