//! Eventfds: how the front end, the control thread and the I/O thread wake each other.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{FdFlags, fcntl_setfd};

pub(crate) fn new() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Wakes the other side. A counter that is full already does that, and a dead peer needs no waking.
pub(crate) fn raise(event: impl AsFd) {
    if let Err(error) = rustix::io::write(event, &1u64.to_ne_bytes()) {
        tracing::debug!(%error, "cannot signal an eventfd");
    }
}

/// Takes the signal back, so that a level-triggered wait sees the next one.
pub(crate) fn clear(event: impl AsFd) {
    let mut counter = [0; 8];
    if let Err(error) = rustix::io::read(event, &mut counter) {
        tracing::debug!(%error, "cannot clear an eventfd");
    }
}

/// Takes an eventfd that a front end passed: it must not be able to block us, nor go to a program that is started.
pub(crate) fn received(event: OwnedFd) -> io::Result<OwnedFd> {
    let flags = fcntl_getfl(&event)?;
    if !flags.contains(OFlags::NONBLOCK) {
        fcntl_setfl(&event, flags | OFlags::NONBLOCK)?;
    }
    keep(&event)?;
    Ok(event)
}

/// Keeps a descriptor that a front end passed from programs that are started: it comes without close-on-exec.
pub(crate) fn keep(fd: impl AsFd) -> io::Result<()> {
    Ok(fcntl_setfd(fd, FdFlags::CLOEXEC)?)
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
