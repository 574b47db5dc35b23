//! Receiving from and sending to a non-blocking socket.

use super::outbox::Outbox;
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;

/// Reads once, and returns the number of bytes. Returns `None` if there is nothing to read now.
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

/// Sends once, and returns the number of bytes. Returns `None` if the client has to receive something first.
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
