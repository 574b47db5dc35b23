//! One connection to an NBD server in its transmission phase: sends requests and receives replies.
//!
//! Owned by `nbd_link`; works on the tasks of the store. Many requests go out with one system call, and many replies come
//! in with one; the payload of a long read goes straight to its buffer. Invariants:
//! 1. A reply is accepted only for a task whose request was sent in full and has had no reply yet.
//! 2. What the server sends is stored only in a fixed buffer and in the buffer of the read it answers.

use remoca_io::sizes;
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::net::{SendAncillaryBuffer, SendFlags};
use slab::Slab;

use super::file_task::zeroes;
use super::nbd_protocol::{Command, REPLY_HEADER_LEN, REQUEST_HEADER_LEN, Reply, Request};
use super::nbd_task::{Abilities, NbdTask, Payload, WireState};

/// The most bytes received from the socket at once, in addition to the payload of a read.
const RECEIVED_LEN_MAX: usize = 64 * 1024;
/// The most receive calls before other descriptors get their turn.
const RECEIVES_MAX: usize = 16;
/// The most slices in one send call: header and payload of half as many requests.
const SLICES_MAX: usize = 64;

/// Why a connection can no longer be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum Lost {
    #[error("the server closed the connection")]
    Closed,
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the server is shutting down")]
    ShutDown,
    #[error("the server breaks the protocol: {0}")]
    Protocol(&'static str),
}

impl From<rustix::io::Errno> for Lost {
    fn from(errno: rustix::io::Errno) -> Self {
        Lost::Io(errno.into())
    }
}

/// The reply to the current piece of the task with this key.
pub(super) type TaskReply = (usize, Option<i32>);

pub(super) struct Connection {
    socket: OwnedFd,
    pub(super) since: Instant,
    outgoing: VecDeque<Outgoing>,
    received: Box<[u8]>,
    /// The part of `received` from here to `received_end` is not parsed yet.
    parsed_end: usize,
    received_end: usize,
    incoming: Incoming,
    next_serial: u32,
}

/// A request in the output; `sent` counts bytes of header and payload.
struct Outgoing {
    key: usize,
    header: [u8; REQUEST_HEADER_LEN],
    payload: Payload,
    sent: usize,
}

enum Incoming {
    Header,
    /// The payload of this task's read, of which `filled` bytes have been received.
    Payload {
        key: usize,
        filled: usize,
    },
}

impl Connection {
    pub(super) fn new(socket: OwnedFd, since: Instant) -> Self {
        Self {
            socket,
            since,
            outgoing: VecDeque::new(),
            received: vec![0; RECEIVED_LEN_MAX].into_boxed_slice(),
            parsed_end: 0,
            received_end: 0,
            incoming: Incoming::Header,
            next_serial: 0,
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns whether nothing is to be sent, and everything received is parsed and ends with a whole reply.
    pub(super) fn is_idle(&self) -> bool {
        let received_all = matches!(self.incoming, Incoming::Header) && self.parsed_end == self.received_end;
        received_all && self.outgoing.is_empty()
    }

    pub(super) fn has_output(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Puts the next piece of a task into the output.
    pub(super) fn queue(&mut self, key: usize, task: &mut NbdTask, abilities: &Abilities) {
        let piece = task.next_piece(abilities);
        // The key finds the task, and the serial number distinguishes its requests.
        self.next_serial = self.next_serial.wrapping_add(1);
        let cookie = u64::from(self.next_serial) << 32 | key as u64;
        let request =
            Request { command: piece.command, flags: piece.flags, cookie, offset: piece.offset, len: piece.len };
        self.outgoing.push_back(Outgoing { key, header: request.encode(), payload: piece.payload, sent: 0 });
        task.wire = WireState::Sending { cookie };
    }

    /// Sends as much of the output as the socket takes.
    pub(super) fn send(&mut self, tasks: &mut Slab<NbdTask>) -> Result<(), Lost> {
        while !self.outgoing.is_empty() {
            match self.send_once(tasks) {
                Ok(sent) => self.mark_sent(sent, tasks),
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn send_once(&self, tasks: &Slab<NbdTask>) -> rustix::io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        let mut count = 0;
        for outgoing in self.outgoing.iter().take(SLICES_MAX / 2) {
            let payload = match &outgoing.payload {
                Payload::None => &[][..],
                Payload::Zeroes(len) => zeroes(*len),
                Payload::Buffer(range) => {
                    let buffer = tasks[outgoing.key].buffer.as_deref().unwrap_or_default();
                    &buffer[range.clone()]
                }
            };
            let header = &outgoing.header[outgoing.sent.min(REQUEST_HEADER_LEN)..];
            let payload = &payload[outgoing.sent.saturating_sub(REQUEST_HEADER_LEN)..];
            for part in [header, payload] {
                if !part.is_empty() {
                    slices[count] = IoSlice::new(part);
                    count += 1;
                }
            }
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::sendmsg(&self.socket, &slices[..count], &mut SendAncillaryBuffer::default(), flags)
    }

    fn mark_sent(&mut self, mut sent: usize, tasks: &mut Slab<NbdTask>) {
        while let Some(first) = self.outgoing.front_mut() {
            let payload_len = match &first.payload {
                Payload::None => 0,
                Payload::Zeroes(len) => *len,
                Payload::Buffer(range) => range.len(),
            };
            let remaining = REQUEST_HEADER_LEN + payload_len - first.sent;
            if sent < remaining {
                first.sent += sent;
                return;
            }
            sent -= remaining;
            let task = &mut tasks[first.key];
            if let WireState::Sending { cookie } = task.wire {
                task.wire = WireState::AwaitsReply { cookie };
            }
            self.outgoing.pop_front();
        }
    }

    /// Receives what has arrived, and adds complete replies to `replies`, even if it fails later.
    pub(super) fn receive(&mut self, tasks: &mut Slab<NbdTask>, replies: &mut Vec<TaskReply>) -> Result<(), Lost> {
        for _ in 0..RECEIVES_MAX {
            match self.receive_once(tasks) {
                Ok(0) => return Err(Lost::Closed),
                Ok(_) => self.parse(tasks, replies)?,
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn receive_once(&mut self, tasks: &mut Slab<NbdTask>) -> rustix::io::Result<usize> {
        // Everything else is parsed, so only the beginning of a header is left.
        self.received.copy_within(self.parsed_end..self.received_end, 0);
        self.received_end -= self.parsed_end;
        self.parsed_end = 0;
        let free = &mut self.received[self.received_end..];
        let (payload_len, received) = match &mut self.incoming {
            Incoming::Header => (0, rustix::io::read(&self.socket, &mut *free)?),
            Incoming::Payload { key, filled } => {
                let target = &mut tasks[*key].reply_payload()[*filled..];
                let target_len = target.len();
                let received = rustix::io::readv(&self.socket, &mut [IoSliceMut::new(target), IoSliceMut::new(free)])?;
                let payload_len = received.min(target_len);
                *filled += payload_len;
                (payload_len, received)
            }
        };
        self.received_end += received - payload_len;
        Ok(received)
    }

    fn parse(&mut self, tasks: &mut Slab<NbdTask>, replies: &mut Vec<TaskReply>) -> Result<(), Lost> {
        loop {
            let unparsed = &self.received[self.parsed_end..self.received_end];
            match &mut self.incoming {
                Incoming::Header => {
                    let Some(header) = unparsed.first_chunk::<REPLY_HEADER_LEN>() else { return Ok(()) };
                    self.parsed_end += REPLY_HEADER_LEN;
                    let reply = Reply::decode(header).ok_or(Lost::Protocol("what it sends is no reply"))?;
                    let key = expected_by(tasks, reply.cookie)?;
                    if reply.errno.is_none() && !tasks[key].reply_payload().is_empty() {
                        self.incoming = Incoming::Payload { key, filled: 0 };
                    } else {
                        finish_reply(tasks, key, reply.errno, replies);
                    }
                }
                Incoming::Payload { key, filled } => {
                    let target = &mut tasks[*key].reply_payload()[*filled..];
                    let len = target.len().min(unparsed.len());
                    target[..len].copy_from_slice(&unparsed[..len]);
                    *filled += len;
                    self.parsed_end += len;
                    if len < target.len() {
                        return Ok(());
                    }
                    finish_reply(tasks, *key, None, replies);
                    self.incoming = Incoming::Header;
                }
            }
        }
    }

    /// Sends a disconnect request. To be called when no request is in flight.
    pub(super) fn disconnect(&self) {
        let request = Request { command: Command::Disconnect, flags: 0, cookie: 0, offset: 0, len: 0 };
        // The server notices the closed socket anyway.
        let _ = rustix::net::send(&self.socket, &request.encode(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
}

/// Returns the key of the task that waits for a reply with `cookie`. Fails if there is none.
fn expected_by(tasks: &Slab<NbdTask>, cookie: u64) -> Result<usize, Lost> {
    let key = sizes::in_memory(cookie & u64::from(u32::MAX));
    match tasks.get(key).map(|task| task.wire) {
        Some(WireState::AwaitsReply { cookie: expected }) if expected == cookie => Ok(key),
        _ => Err(Lost::Protocol("it answers a request that it was not sent")),
    }
}

fn finish_reply(tasks: &mut Slab<NbdTask>, key: usize, errno: Option<i32>, replies: &mut Vec<TaskReply>) {
    // A second reply would not be accepted.
    tasks[key].wire = WireState::Queued;
    replies.push((key, errno));
}
