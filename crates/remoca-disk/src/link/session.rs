//! Sending and receiving on a session with a memory server. The socket does not block, and only the I/O thread uses it.
//!
//! The pages of a mapped session do not go through its socket, which only negotiates the size. It goes on without a socket
//! while the server is away.

use super::mapped::{Mapped, OWN_REQUEST};
use super::memory::PoolMemory;
use super::outgoing::Outgoing;
use remoca_core::engine::ServerNumber;
use remoca_core::units::{PAGE_SIZE, PageCount, SlotIndex};
use remoca_protocol::{DecodeError, Frame, ReceiveBuffer, RequestId, Welcome};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

/// Maximum number of bytes received in one system call.
const RECEIVE_BYTES: usize = 256 * 1024;
/// Number of frames handled before other events get their turn.
const FRAMES_PER_TURN: usize = 512;
/// Maximum number of bytes that wait for the server of a mapped pool. One that takes memory back again and again, and reads no answer,
/// would make the queue grow without a limit.
const UNREAD_BYTES_MAX: usize = 64 * 1024;

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
    /// Pages that the server sent, or that were there.
    pub received: u64,
    /// Pages that were not there, because the server of a mapped pool had taken their memory back.
    pub taken_back: u64,
}

/// Page that this process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageHere<'a> {
    /// The page of a mapped pool's slot.
    Mapped(&'a [u8]),
    /// The page that was queued last for a slot, and has not left.
    Unsent(&'a [u8]),
}

/// Outcome of a request for a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// The server was asked.
    Asked,
    /// It is granted without the server, which is away.
    Granted(PageCount),
    /// It cannot be had while the server is away.
    Refused,
}

/// The connection that a pool is reached by.
pub struct Session {
    server: ServerNumber,
    generation: u64,
    granted: PageCount,
    /// Whether the size became smaller while the server was away.
    gave_up: bool,
    traffic: Traffic,
    /// `None` while the server of a mapped pool is away.
    socket: Option<File>,
    mapped: Option<Box<Mapped>>,
    /// Bytes that were received and not handled yet.
    receive: ReceiveBuffer,
    out: Outgoing,
    writable: bool,
    /// Whether the driver was told to watch for the socket to become writable.
    watched: bool,
}

impl Session {
    /// Returns the session that begins with this welcome of the server.
    pub(super) fn new(
        server: ServerNumber,
        socket: Option<OwnedFd>,
        welcome: &Welcome,
        memory: Option<PoolMemory>,
    ) -> Self {
        let mapped = |memory| Box::new(Mapped::new(memory, welcome.npages, welcome.sends_received.0));
        Self {
            server,
            generation: welcome.pool_generation.0,
            granted: welcome.npages,
            gave_up: false,
            traffic: Traffic::default(),
            socket: socket.map(File::from),
            mapped: memory.map(mapped),
            receive: ReceiveBuffer::new(RECEIVE_BYTES),
            out: Outgoing::default(),
            writable: true,
            watched: false,
        }
    }

    /// Returns the server at the other end.
    pub fn server(&self) -> ServerNumber {
        self.server
    }

    /// Returns the socket, or `None` while the server of a mapped pool is away.
    pub fn socket_fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Returns whether this process reads and writes the pool's pages by itself.
    pub fn is_mapped(&self) -> bool {
        self.mapped.is_some()
    }

    /// Returns the memory of a mapped pool, or `None` if the pool is not mapped.
    pub fn memory(&self) -> Option<&PoolMemory> {
        self.mapped.as_ref().map(|mapped| mapped.memory())
    }

    /// Returns how many pages were ever written to mapped pools of this server, or `None` if the pool is not mapped.
    pub(super) fn sends(&self) -> Option<u64> {
        self.mapped.as_ref().map(|mapped| mapped.sends())
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

    /// Returns the bytes that wait to be sent, to which frames can be added that have no method here.
    pub(super) fn out(&mut self) -> &mut Vec<u8> {
        self.out.following()
    }

    /// Begins to fetch the page of a slot. Returns the bytes that wait to be sent, to which a REQUEST frame is to be added, or
    /// `None` if [`Self::read`] has the page: the pool is mapped, or the page has not left yet.
    #[inline]
    pub fn begin_fetch(&mut self, slot: SlotIndex) -> Option<&mut Vec<u8>> {
        self.traffic.requested += 1;
        let is_here = self.mapped.is_some() || self.out.page(slot).is_some();
        (!is_here).then(|| self.out.overtaking())
    }

    /// Returns the page of a mapped pool's slot, or one that has not left yet. Returns `None` if it is not there.
    pub fn read(&mut self, slot: SlotIndex) -> Option<PageHere<'_>> {
        let page = match &mut self.mapped {
            Some(mapped) => mapped.read(slot).map(|page| PageHere::Mapped(page)),
            None => self.out.page(slot).map(PageHere::Unsent),
        };
        let count = if page.is_some() { &mut self.traffic.received } else { &mut self.traffic.taken_back };
        *count += 1;
        page
    }

    /// Returns a copy of the page of a mapped pool's slot, or `None` if the pool is not mapped. It is zero if it is not
    /// there.
    pub fn copy(&mut self, slot: SlotIndex) -> Option<[u8; PAGE_SIZE]> {
        let mapped = self.mapped.as_mut()?;
        Some(mapped.read(slot).copied().unwrap_or([0; PAGE_SIZE]))
    }

    /// Copies a page into its slot, or queues a SENDPAGE frame, which is the only copy of the page on this side. Returns
    /// the number of pages that need not be waited for.
    pub fn send_page(&mut self, slot: SlotIndex, page: &[u8]) -> u32 {
        self.traffic.sent += 1;
        if let Some(mapped) = &mut self.mapped {
            mapped.write(slot, page);
            return 1;
        }
        self.out.push_page(slot, page);
        0
    }

    /// Copies the page of a slot to another one, or queues a MOVE frame.
    pub fn move_page(&mut self, from: SlotIndex, to: SlotIndex) {
        match &mut self.mapped {
            Some(mapped) => mapped.relocate(from, to),
            None => Frame::Move { from, to }.encode(self.out.following()),
        }
    }

    /// Queues a SETSIZE frame. While the server is away, a smaller size is granted at once and no larger one.
    pub fn set_size(&mut self, npages: PageCount) -> Size {
        if self.socket.is_none() {
            return self.set_size_alone(npages);
        }
        if let Some(mapped) = &mut self.mapped {
            mapped.ask_size(npages);
        }
        Frame::SetSize { request: RequestId(0), npages }.encode(self.out.following());
        Size::Asked
    }

    fn set_size_alone(&mut self, npages: PageCount) -> Size {
        if npages > self.granted {
            return Size::Refused;
        }
        self.gave_up |= npages < self.granted;
        self.granted = npages;
        if let Some(mapped) = &mut self.mapped {
            mapped.set_size(npages);
        }
        Size::Granted(npages)
    }

    /// Returns whether the session goes on although its connection is lost.
    pub fn outlives_connection(&self) -> bool {
        self.mapped.as_ref().is_some_and(|mapped| mapped.over().is_none())
    }

    /// Ends the session at the end of the turn, because of `why`, if the pool is mapped.
    pub fn end(&mut self, why: &str) {
        if let Some(mapped) = &mut self.mapped {
            mapped.end(why);
        }
    }

    /// Returns the time at which the server's answer about the size of a mapped pool is overdue, or `None` if it owes none.
    pub(super) fn answer_deadline(&self, now: Instant) -> Option<Instant> {
        self.mapped.as_ref()?.answer_deadline(now)
    }

    /// Starts the wait for the server's answer about the size of a mapped pool, unless it has started.
    pub(super) fn start_wait(&mut self, now: Instant) {
        if let Some(mapped) = &mut self.mapped {
            mapped.start_wait(now);
        }
    }

    /// Closes the connection, which is lost. Returns the answer to a SETSIZE that was outstanding, as it is without the
    /// server.
    pub(super) fn detach(&mut self) -> Option<Size> {
        self.forget_connection(None);
        let mapped = self.mapped.as_mut()?;
        self.gave_up |= mapped.interrupt_take_back().is_some();
        let asked = mapped.take_asked()?;
        let answer = self.set_size_alone(asked);
        if let (Some(mapped), Size::Refused) = (&mut self.mapped, answer) {
            mapped.set_size(self.granted);
        }
        Some(answer)
    }

    /// Goes on over another connection, on which the server says that it still has the pool.
    ///
    /// # Errors
    /// If the server has less memory for the pool than before. The text says so.
    pub(super) fn attach(&mut self, socket: OwnedFd, welcome: &Welcome) -> Result<(), String> {
        if welcome.npages < self.granted {
            return Err("it took memory back".into());
        }
        self.forget_connection(Some(socket));
        // It may have granted what was asked for before its connection was lost.
        if std::mem::take(&mut self.gave_up) || welcome.npages > self.granted {
            Frame::SetSize { request: OWN_REQUEST, npages: self.granted }.encode(self.out.following());
        }
        Ok(())
    }

    fn forget_connection(&mut self, socket: Option<OwnedFd>) {
        self.socket = socket.map(File::from);
        self.receive = ReceiveBuffer::new(RECEIVE_BYTES);
        self.out.clear();
        (self.writable, self.watched) = (true, false);
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

    /// Ends the session. Returns its socket, unless the server is away, and the bytes that have to be sent to leave it in good order, a BYE being
    /// the last frame.
    pub(super) fn leave(self) -> (Option<OwnedFd>, Vec<u8>) {
        let mut left = self.out.into_rest();
        Frame::Bye.encode(&mut left);
        (self.socket.map(OwnedFd::from), left)
    }

    /// Sends what is queued, as far as the socket accepts it. Returns the number of pages sent, the last of them perhaps in
    /// part.
    ///
    /// # Errors
    /// If the connection is lost, or the pool of a mapped session cannot be used any more.
    pub fn flush(&mut self) -> io::Result<u32> {
        if let Some(why) = self.mapped.as_ref().and_then(|mapped| mapped.over()) {
            return Err(io::Error::other(why.clone()));
        }
        let Some(socket) = self.socket.as_ref().filter(|_| self.writable) else { return Ok(0) };
        let sent = self.out.send(|bytes| rustix::io::write(socket, bytes))?;
        self.writable = !sent.is_full;
        Ok(sent.pages)
    }

    /// Receives frames and passes each one to `take`. Returns whether there may be more.
    ///
    /// # Errors
    /// If the connection is lost, or the server violates the protocol.
    pub fn receive(&mut self, mut take: impl FnMut(&Frame<'_>)) -> io::Result<Received> {
        let mut frames = 0;
        let Some(socket) = &self.socket else { return Ok(Received::Drained) };
        let mut is_drained = false;
        loop {
            while let Some(frame) = self.receive.take().map_err(protocol_error)? {
                let taking_back = self.mapped.as_ref().and_then(|mapped| mapped.taking_back());
                // What the engine hears of: the size that is left once the server has its memory back.
                let mut heard = frame;
                match &mut heard {
                    Frame::SendPage { .. } => self.traffic.received += 1,
                    Frame::Sized { npages, .. } => {
                        *npages = taking_back.map_or(*npages, |left| left.min(*npages));
                        self.granted = *npages;
                    }
                    _ => {}
                }
                let is_for_link = match &mut self.mapped {
                    Some(mapped) => {
                        let out = self.out.following();
                        if out.len() > UNREAD_BYTES_MAX {
                            return Err(io::Error::other("it takes memory back, and reads no answers"));
                        }
                        mapped.hear(&frame, self.granted, out)
                    }
                    // A server has no memory of such a pool to take back.
                    None => matches!(frame, Frame::TakeBack { .. }),
                };
                if let (Frame::TakeBack { npages }, Some(_)) = (frame, &self.mapped) {
                    self.granted = self.granted.min(npages);
                }
                if !is_for_link {
                    take(&heard);
                }
                frames += 1;
            }
            if frames >= FRAMES_PER_TURN {
                return Ok(Received::More);
            }
            if is_drained {
                return Ok(Received::Drained);
            }
            let space = self.receive.space();
            let (asked, got) = (space.len(), rustix::io::read(socket, space));
            match got {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection")),
                Ok(count) => {
                    self.receive.filled(count);
                    is_drained = count < asked;
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
