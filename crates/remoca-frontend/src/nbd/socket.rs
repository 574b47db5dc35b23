//! Bytes in and out of a socket that does not block.

use super::outbox::Outbox;
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;

/// Reads once. `None`: nothing is there now.
///
/// # Errors
/// If the client is gone.
pub(super) fn receive(socket: &OwnedFd, room: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        match rustix::io::read(socket, &mut *room) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => return Ok(Some(count)),
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sends once; how much. `None`: the client has to take something first.
///
/// # Errors
/// If the client is gone.
pub(super) fn send(socket: &OwnedFd, outbox: &Outbox) -> io::Result<Option<usize>> {
    loop {
        match rustix::io::writev(socket, &outbox.slices()) {
            Ok(count) => return Ok(Some(count)),
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
