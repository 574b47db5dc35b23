//! Receiving from and sending to a non-blocking socket.

use super::outbox::Outbox;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
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

/// Reads the bytes that have come, up to those of `room`, which stay to be read. Returns their number, 0 if there are none.
pub(super) fn peek(socket: &OwnedFd, room: &mut [u8]) -> usize {
    recv(socket, room, RecvFlags::PEEK | RecvFlags::DONTWAIT).map_or(0, |(count, _)| count)
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
