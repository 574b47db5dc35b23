//! One export with its clients: moves bytes between their sockets and the protocol, in the I/O thread.
//!
//! The driver's frontend for a device, driven as [`crate::device::Frontend`] says. Sockets are watched edge-triggered,
//! and read when the driver asks for requests: a client over its limits is simply not read. Requests carry the data's
//! buffers, and complete in any order. What a client that vanished left with the driver is dropped when it comes back; until
//! then no client that attached later is served, so that an old write never lands on a newer one.

use super::ExportGeometry;
use super::pieces::Piece;
use super::server::Attached;
use super::socket;
use super::transmission::{End, Transmission};
use crate::request::{CopyError, Operation, Outcome};
use remoca_io::buffer::IoBuffer;
use remoca_io::sizes;
use remoca_io::wake;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::time::Timespec;
use slab::Slab;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Event data of the eventfd; clients have their key.
const WAKE: u64 = u64::MAX;
const EVENTS_MAX: usize = 64;
/// Looks at a client's socket for one request.
const RECEIVES_PER_TURN: usize = 64;
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A device of the VM as an NBD export.
pub struct NbdExport {
    geometry: ExportGeometry,
    clients: Slab<Client>,
    /// The client that `pop` looks at first.
    turn: usize,
    /// Grows with each client that attaches.
    generation: u64,
    /// Requests that the driver holds, by the generation in which it got them.
    held: BTreeMap<u64, usize>,
    epoll: OwnedFd,
    wake: OwnedFd,
    /// `pop` may have something, though nothing is going to come from a socket.
    again: bool,
}

struct Client {
    socket: OwnedFd,
    transmission: Transmission,
    generation: u64,
    readable: bool,
    writable: bool,
    /// It sends no more than what is on its way.
    closing: bool,
    /// All that it sent was read: it goes when it has its answers.
    leaving: bool,
    /// One of the server's limited places; its requests hold it too.
    seat: Arc<()>,
}

/// A request of a client, or a piece of one.
#[derive(Debug)]
#[must_use = "a request that is not completed stays in flight for ever"]
pub struct NbdRequest {
    client: usize,
    client_generation: u64,
    generation: u64,
    piece: Piece,
    _seat: Arc<()>,
}

impl NbdExport {
    /// Returns an export without clients.
    ///
    /// # Errors
    /// If the system has no descriptors left.
    pub fn new(geometry: ExportGeometry) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let wake = wake::new()?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        let (clients, held) = (Slab::new(), BTreeMap::new());
        Ok(Self { geometry, clients, turn: 0, generation: 0, held, epoll, wake, again: false })
    }

    pub fn geometry(&self) -> &ExportGeometry {
        &self.geometry
    }

    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub fn client_count(&self) -> usize {
        self.clients.len()
    }

    /// Returns whether all answers were sent.
    pub fn is_quiet(&self) -> bool {
        self.held.is_empty() && self.clients.iter().all(|(_, client)| client.transmission.outbox.is_empty())
    }

    /// Takes a client that chose this export.
    ///
    /// # Errors
    /// If the system refuses to watch its socket; the client is gone then.
    pub fn attach(&mut self, attached: Attached) -> io::Result<()> {
        // Who will not say anything new must not be read any more: it may be the same client that comes back.
        self.handle_events()?;
        // What these events said of the others is for the next turn.
        self.again = true;
        self.clients.retain(|_, client| !client.closing && !client.leaving);
        self.generation += 1;
        let Attached { socket, transmission, seat, .. } = attached;
        let entry = self.clients.vacant_entry();
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&self.epoll, &socket, EventData::new_u64(entry.key() as u64), flags)?;
        let generation = self.generation;
        entry.insert(Client {
            socket,
            transmission,
            generation,
            readable: true,
            writable: true,
            closing: false,
            leaving: false,
            seat,
        });
        Ok(())
    }

    /// Takes what the system says of the sockets.
    ///
    /// # Errors
    /// If it says nothing.
    pub fn handle_events(&mut self) -> io::Result<()> {
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; EVENTS_MAX];
        let count = epoll::wait(&self.epoll, events.as_mut_slice(), Some(&NO_WAIT))?;
        for event in &events[..count] {
            let (flags, data) = (event.flags, event.data.u64());
            if data == WAKE {
                wake::clear(&self.wake);
                continue;
            }
            let key = sizes::in_memory(data);
            let Some(client) = self.clients.get_mut(key) else { continue };
            client.readable |= flags.contains(EventFlags::IN);
            client.writable |= flags.contains(EventFlags::OUT);
            client.closing |= flags.contains(EventFlags::RDHUP);
            if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
                // Nobody waits for answers any more, and what was not answered need not be done.
                self.remove::<()>(key, "closed");
            }
        }
        Ok(())
    }

    /// Returns the next request, from all clients in turn.
    pub fn pop(&mut self) -> Option<NbdRequest> {
        let count = self.clients.capacity();
        for key in (self.turn.min(count)..count).chain(0..self.turn.min(count)) {
            if let Some(piece) = self.pop_from(key) {
                self.turn = key + 1;
                return Some(self.hand_out(key, piece));
            }
        }
        None
    }

    fn pop_from(&mut self, key: usize) -> Option<Piece> {
        let oldest_held = self.held.keys().next().copied();
        let client = self.clients.get_mut(key)?;
        if oldest_held.is_some_and(|held| held < client.generation) {
            return None;
        }
        for _ in 0..RECEIVES_PER_TURN {
            if let Some(piece) = client.transmission.pop() {
                return Some(piece);
            }
            match client.transmission.end() {
                None => {}
                Some(End::Disconnect) => client.leaving = true,
                Some(End::Malformed(what)) => return self.remove(key, what),
            }
            if client.leaving {
                return if client.transmission.is_quiet() { self.remove(key, "said goodbye") } else { None };
            }
            match client.receive() {
                Ok(true) => {}
                Ok(false) => return None,
                // It may still wait for answers.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => client.leaving = true,
                Err(_) => return self.remove(key, "closed"),
            }
        }
        // It sends what makes no request, as fast as it is read: the others get their turn.
        self.again = true;
        None
    }

    fn hand_out(&mut self, key: usize, piece: Piece) -> NbdRequest {
        *self.held.entry(self.generation).or_default() += 1;
        let client = &self.clients[key];
        NbdRequest {
            client: key,
            client_generation: client.generation,
            generation: self.generation,
            piece,
            _seat: Arc::clone(&client.seat),
        }
    }

    /// Gives a request back. The client hears of it after the next [`Self::notify`].
    pub fn complete(&mut self, request: NbdRequest, outcome: Outcome) {
        let NbdRequest { client, client_generation, generation, piece, .. } = request;
        if let Some(held) = self.held.get_mut(&generation) {
            *held -= 1;
            if *held == 0 {
                self.held.remove(&generation);
                // Who attached later may have waited for this.
                self.again |= generation < self.generation;
            }
        }
        // Else it has left, and perhaps another has its place.
        if let Some(client) = self.clients.get_mut(client).filter(|client| client.generation == client_generation) {
            self.again |= client.transmission.complete(piece, outcome);
        }
    }

    /// Notes that the disk may have lost what it has done of requests that are not answered: they come again when all of their
    /// pieces are back.
    pub fn repeat_parts(&mut self) {
        self.clients.iter_mut().for_each(|(_, client)| client.transmission.repeat_parts());
    }

    /// Sends the answers.
    pub fn notify(&mut self) {
        for key in 0..self.clients.capacity() {
            let Some(client) = self.clients.get_mut(key) else { continue };
            match client.send() {
                Ok(again) => self.again |= again,
                Err(_) => {
                    self.remove::<()>(key, "closed");
                }
            }
        }
        if std::mem::take(&mut self.again) {
            wake::raise(&self.wake);
        }
    }

    /// Removes a client; always `None`, for callers that return it.
    fn remove<T>(&mut self, key: usize, why: &str) -> Option<T> {
        // Closing the socket ends the watch.
        if self.clients.try_remove(key).is_some() {
            tracing::debug!("an NBD client left: {why}");
        }
        None
    }
}

impl Client {
    /// Receives what a client sent. Returns false if nothing can be read now.
    fn receive(&mut self) -> io::Result<bool> {
        if !self.readable {
            return Ok(false);
        }
        let Some(room) = self.transmission.room() else { return Ok(false) };
        let received = socket::receive(&self.socket, room)?;
        self.readable = received.is_some();
        self.transmission.received(received.unwrap_or(0));
        Ok(received.is_some())
    }

    /// Sends what can be sent. True if there may be more requests now.
    fn send(&mut self) -> io::Result<bool> {
        let mut again = false;
        while self.writable && !self.transmission.outbox.is_empty() {
            match socket::send(&self.socket, &self.transmission.outbox)? {
                Some(count) => again |= self.transmission.sent(count),
                None => self.writable = false,
            }
        }
        Ok(again || self.leaving && self.transmission.is_quiet())
    }
}

impl NbdRequest {
    pub fn operation(&self) -> &Operation {
        &self.piece.operation
    }

    pub fn is_durable(&self) -> bool {
        self.piece.durable
    }

    pub fn data_length(&self) -> usize {
        self.piece.data_length
    }

    pub fn take_buffer(&mut self) -> Option<IoBuffer> {
        self.piece.buffer.take()
    }

    pub fn deliver(&mut self, buffer: IoBuffer) {
        self.piece.buffer = Some(buffer);
    }

    pub fn copy_to_guest(&mut self, offset: usize, source: &[u8]) -> Result<(), CopyError> {
        self.part(offset, source.len())?.copy_from_slice(source);
        Ok(())
    }

    pub fn fill_zero(&mut self, offset: usize, length: usize) -> Result<(), CopyError> {
        self.part(offset, length)?.fill(0);
        Ok(())
    }

    pub fn copy_from_guest(&self, offset: usize, target: &mut [u8]) -> Result<(), CopyError> {
        let end = offset.checked_add(target.len()).ok_or(CopyError::OutOfRange)?;
        let source = self.piece.buffer.as_ref().and_then(|buffer| buffer.get(offset..end));
        target.copy_from_slice(source.ok_or(CopyError::OutOfRange)?);
        Ok(())
    }

    fn part(&mut self, offset: usize, length: usize) -> Result<&mut [u8], CopyError> {
        let end = offset.checked_add(length).ok_or(CopyError::OutOfRange)?;
        self.piece.buffer.as_mut().and_then(|buffer| buffer.get_mut(offset..end)).ok_or(CopyError::OutOfRange)
    }
}
