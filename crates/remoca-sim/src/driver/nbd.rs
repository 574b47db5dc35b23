//! The model NBD client: it connects without waiting, and repeats unanswered requests.

use crate::random::Random;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

const GREETING_BYTES: usize = 8 + 8 + 2;
/// Bytes of size and flags. The client asks for no padding zeroes after them.
const EXPORT_BYTES: usize = 8 + 2;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const REPLY_BYTES: usize = 16;

/// Commands of the protocol.
pub(super) const READ: u16 = 0;
pub(super) const WRITE: u16 = 1;
pub(super) const FLUSH: u16 = 3;
pub(super) const TRIM: u16 = 4;
pub(super) const WRITE_ZEROES: u16 = 6;
/// Flags of commands.
pub(super) const FUA: u16 = 1;
pub(super) const NO_HOLE: u16 = 2;

/// A request, as it is sent.
pub(super) struct Message<'a> {
    pub(super) command: u16,
    pub(super) flags: u16,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    pub(super) length: u32,
    pub(super) data: &'a [u8],
}

/// An answer: the cookie, and an error number or the data of a read.
pub(super) type Answer = (u64, Result<Vec<u8>, u32>);

/// A client of one export.
pub(super) struct NbdClient {
    socket: Option<UnixStream>,
    out: VecDeque<u8>,
    inbox: Vec<u8>,
    is_greeted: bool,
}

impl NbdClient {
    /// Connects to an export. Returns `None` if no process listens.
    pub(super) fn connect(path: &Path, export: &str) -> Option<Self> {
        let socket = UnixStream::connect(path).ok()?;
        socket.set_nonblocking(true).ok()?;
        let mut out = VecDeque::new();
        out.extend(3_u32.to_be_bytes());
        out.extend(b"IHAVEOPT");
        out.extend(1_u32.to_be_bytes());
        out.extend(u32::try_from(export.len()).ok()?.to_be_bytes());
        out.extend(export.bytes());
        Some(Self { socket: Some(socket), out, inbox: Vec::new(), is_greeted: false })
    }

    pub(super) fn is_connected(&self) -> bool {
        self.socket.is_some()
    }

    /// Queues a request.
    pub(super) fn send(&mut self, message: &Message<'_>) {
        let Message { command, flags, cookie, offset, length, data } = message;
        self.out.extend(REQUEST_MAGIC.to_be_bytes());
        self.out.extend(flags.to_be_bytes());
        self.out.extend(command.to_be_bytes());
        self.out.extend(cookie.to_be_bytes());
        self.out.extend(offset.to_be_bytes());
        self.out.extend(length.to_be_bytes());
        self.out.extend(*data);
    }

    /// Sends queued bytes, sometimes only a part. Returns whether anything was sent.
    pub(super) fn push(&mut self, random: &mut Random) -> bool {
        let Some(socket) = &mut self.socket else { return false };
        let mut some = false;
        while !self.out.is_empty() {
            let first = self.out.as_slices().0;
            let count = if random.one_in(4) { random.index(first.len()) + 1 } else { first.len() };
            match socket.write(&first[..count]) {
                Ok(count) => drop(self.out.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.socket = None;
                    break;
                }
            }
            some = true;
            if random.one_in(8) {
                break;
            }
        }
        some
    }

    /// Returns whether bytes wait to be sent.
    pub(super) fn has_more(&self) -> bool {
        self.is_connected() && !self.out.is_empty()
    }

    /// Returns the next answer, or `None` if none is complete. `length` returns how many bytes a request reads.
    pub(super) fn take(&mut self, length: impl Fn(u64) -> Option<usize>) -> Result<Option<Answer>, String> {
        if let Some(socket) = &mut self.socket {
            let ended = match socket.read_to_end(&mut self.inbox) {
                Ok(_) => true,
                Err(error) => error.kind() != ErrorKind::WouldBlock,
            };
            if ended {
                self.socket = None;
            }
        }
        if !self.is_greeted {
            if self.inbox.len() < GREETING_BYTES + EXPORT_BYTES {
                return Ok(None);
            }
            self.inbox.drain(..GREETING_BYTES + EXPORT_BYTES);
            self.is_greeted = true;
        }
        let Some(header) = self.inbox.first_chunk::<REPLY_BYTES>() else { return Ok(None) };
        let [m0, m1, m2, m3, e0, e1, e2, e3, cookie @ ..] = *header;
        let (magic, error) = (u32::from_be_bytes([m0, m1, m2, m3]), u32::from_be_bytes([e0, e1, e2, e3]));
        let cookie = u64::from_be_bytes(cookie);
        if magic != REPLY_MAGIC {
            return Err(format!("an answer begins with {magic:x}"));
        }
        let Some(length) = length(cookie) else { return Err(format!("an answer to request {cookie}, which is none")) };
        let length = if error == 0 { length } else { 0 };
        if self.inbox.len() < REPLY_BYTES + length {
            return Ok(None);
        }
        let data = self.inbox[REPLY_BYTES..REPLY_BYTES + length].to_vec();
        self.inbox.drain(..REPLY_BYTES + length);
        Ok(Some((cookie, if error == 0 { Ok(data) } else { Err(error) })))
    }
}
