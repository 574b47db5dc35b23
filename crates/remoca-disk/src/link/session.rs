//! Sending and receiving on a session with a memory server. The socket does not block, and only the I/O thread uses it.

use remoca_core::engine::ServerNumber;
use remoca_core::units::{PageCount, SlotIndex};
use remoca_protocol::{DecodeError, FRAME_BYTES_MAX, Frame, ReceiveBuffer, RequestId, Welcome, send_page_header};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Maximum number of bytes received in one system call.
const RECEIVE_BYTES: usize = 256 * 1024;
/// Number of frames handled before other events get their turn.
const FRAMES_PER_TURN: usize = 512;

/// The outcome of receiving from the socket.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// All frames that had arrived were received.
    Drained,
    /// There may be more frames: receive again without waiting for an event.
    More,
}

/// Counts of a session's pages since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Pages that were queued for the server.
    pub sent: u64,
    /// Pages that the server was asked for.
    pub requested: u64,
    /// Pages that the server sent.
    pub received: u64,
}

/// The connection that a pool is reached by.
pub struct Session {
    server: ServerNumber,
    generation: u64,
    granted: PageCount,
    traffic: Traffic,
    socket: File,
    /// Bytes that were received and not handled yet.
    receive: ReceiveBuffer,
    out: Vec<u8>,
    /// Number of bytes of `out` that are sent.
    sent: usize,
    /// Number of pages in `out` that were not reported to the engine, and of bytes sent towards the next one.
    pages_waiting: u32,
    bytes_towards_page: usize,
    writable: bool,
    /// Whether the driver was told to watch for the socket to become writable.
    watched: bool,
}

impl Session {
    /// Returns the session that begins with this welcome of the server.
    pub(super) fn new(server: ServerNumber, socket: OwnedFd, welcome: &Welcome) -> Self {
        Self {
            server,
            generation: welcome.pool_generation.0,
            granted: welcome.npages,
            traffic: Traffic::default(),
            socket: socket.into(),
            receive: ReceiveBuffer::new(RECEIVE_BYTES),
            out: Vec::new(),
            sent: 0,
            pages_waiting: 0,
            bytes_towards_page: 0,
            writable: true,
            watched: false,
        }
    }

    /// Returns the server at the other end.
    pub fn server(&self) -> ServerNumber {
        self.server
    }

    /// Returns the socket.
    pub fn socket_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns the generation of the pool.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the size of the pool that the server granted last.
    pub fn granted(&self) -> PageCount {
        self.granted
    }

    /// Returns how many pages went each way.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Returns the bytes that wait to be sent, to which frames other than pages and requests can be added.
    pub fn out(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }

    /// Queues a REQUEST frame.
    pub fn request(&mut self, request: RequestId, slot: SlotIndex) {
        Frame::Request { request, slot }.encode(&mut self.out);
        self.traffic.requested += 1;
    }

    /// Queues a SENDPAGE frame. This is the only copy of the page on this side.
    pub fn send_page(&mut self, slot: SlotIndex, page: &[u8]) {
        self.out.extend_from_slice(&send_page_header(RequestId(0), slot));
        self.out.extend_from_slice(page);
        self.pages_waiting += 1;
        self.traffic.sent += 1;
    }

    /// Returns whether to watch for room in the socket, or `None` if that has not changed since the last call.
    pub fn watch_change(&mut self) -> Option<bool> {
        let wanted = !self.writable;
        (std::mem::replace(&mut self.watched, wanted) != wanted).then_some(wanted)
    }

    /// Marks the socket as writable, because it has room again.
    pub fn note_writable(&mut self) {
        self.writable = true;
    }

    /// Ends the session. Returns its socket and the bytes that have to be sent to leave it in good order, a BYE being
    /// the last frame.
    pub(super) fn leave(mut self) -> (OwnedFd, Vec<u8>) {
        self.out.drain(..self.sent);
        Frame::Bye.encode(&mut self.out);
        (self.socket.into(), self.out)
    }

    /// Sends the queued bytes, in one system call if the socket accepts them. Returns the number of pages sent, an
    /// estimate until the queue is empty.
    ///
    /// # Errors
    /// If the connection is lost.
    pub fn flush(&mut self) -> io::Result<u32> {
        let mut left = 0;
        while self.writable && self.sent < self.out.len() {
            match rustix::io::write(&self.socket, &self.out[self.sent..]) {
                Ok(count) => {
                    self.sent += count;
                    self.bytes_towards_page += count;
                }
                Err(rustix::io::Errno::AGAIN) => self.writable = false,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if self.sent == self.out.len() {
            self.out.clear();
            (self.sent, self.bytes_towards_page) = (0, 0);
            left = std::mem::take(&mut self.pages_waiting);
        } else if self.sent > 1 << 20 {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        // Smaller frames in between make this an estimate; it is exact whenever the queue is empty.
        while self.bytes_towards_page >= FRAME_BYTES_MAX && self.pages_waiting > 1 {
            self.bytes_towards_page -= FRAME_BYTES_MAX;
            self.pages_waiting -= 1;
            left += 1;
        }
        Ok(left)
    }

    /// Receives frames and passes each one to `take`. Returns whether there may be more.
    ///
    /// # Errors
    /// If the connection is lost, or the server violates the protocol.
    pub fn receive(&mut self, mut take: impl FnMut(&Frame<'_>)) -> io::Result<Received> {
        let mut frames = 0;
        loop {
            while let Some(frame) = self.receive.take().map_err(protocol_error)? {
                match frame {
                    Frame::SendPage { .. } => self.traffic.received += 1,
                    Frame::Sized { npages, .. } => self.granted = npages,
                    _ => {}
                }
                take(&frame);
                frames += 1;
            }
            if frames >= FRAMES_PER_TURN {
                return Ok(Received::More);
            }
            let space = self.receive.space();
            let (asked, got) = (space.len(), rustix::io::read(&self.socket, space));
            match got {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection")),
                Ok(count) => {
                    self.receive.filled(count);
                    if count < asked && self.receive.peek().map_err(protocol_error)?.is_none() {
                        return Ok(Received::Drained);
                    }
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(Received::Drained),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn protocol_error(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the server does not keep to the protocol: {error}"))
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
