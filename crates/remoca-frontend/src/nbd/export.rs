//! One export with its clients: moves bytes between their sockets and the protocol, in the I/O thread.
//!
//! The driver's frontend for a device, driven as [`crate::device`] describes. Sockets are watched edge-triggered, and
//! read when the driver asks for requests: a client over its limits is simply not read. Requests carry the data's
//! buffers, and complete in any order. When a client vanishes, its requests that the driver still holds are dropped
//! when they come back. Until then no other client is served, so that an old write never lands on a newer one: Linux sends what
//! a connection left unanswered again, on a new connection or on another one that it has already.

use super::ExportGeometry;
use super::pieces::Piece;
use super::server::Attached;
use super::socket;
use super::transmission::{End, Passed, Transmission};
use crate::request::{CopyError, Operation, Outcome};
use remoca_io::buffer::IoBuffer;
use remoca_io::handover::Pass;
use remoca_io::sealed;
use remoca_io::sizes;
use remoca_io::wake;
use remoca_protocol::guests::NbdClient;
use remoca_protocol::nbd::{Command, REQUEST_HEADER_LEN, Request};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::time::Timespec;
use slab::Slab;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Event data of the eventfd. The event data of a client is its key.
const WAKE: u64 = u64::MAX;
const EVENTS_MAX: usize = 64;
/// The most reads from a client's socket for one request.
const RECEIVES_PER_TURN: usize = 64;
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A device of the VM as an NBD export.
pub struct NbdExport {
    geometry: ExportGeometry,
    clients: Slab<Client>,
    /// The client that `pop` looks at first.
    turn: usize,
    /// Grows with each client that attaches, and with each that leaves requests behind.
    generation: u64,
    /// Number of requests that the driver holds, by the generation in which they were handed out.
    held: BTreeMap<u64, usize>,
    epoll: OwnedFd,
    wake: OwnedFd,
    /// `pop` may have a request although no socket event is going to announce one.
    again: bool,
}

struct Client {
    /// Name of the export, for the log.
    name: String,
    socket: OwnedFd,
    transmission: Transmission,
    generation: u64,
    /// Requests that were handed out in earlier generations come before all that it still sends.
    served_from: u64,
    /// Number of its requests that the driver holds.
    held: usize,
    readable: bool,
    writable: bool,
    /// The client has shut down its sending side; only bytes that it sent before may still arrive.
    closing: bool,
    /// ... and a goodbye is all that was still to be read then.
    is_goodbye_next: bool,
    /// Everything that it sent was read. It is removed when all of its answers are sent.
    leaving: bool,
    /// One of the server's limited seats. The client's requests hold it too.
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
    /// Creates an export without clients.
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

    /// Changes the size of the device for clients that attach from now on. The others keep the one that they were told.
    pub fn resize(&mut self, bytes: u64) {
        self.geometry.size = bytes - bytes % u64::from(self.geometry.block);
    }

    /// Returns whether all clients were told the size that the device has now.
    pub fn sees_size(&self) -> bool {
        self.clients.iter().all(|(_, client)| client.transmission.told_bytes() == self.geometry.size)
    }

    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub fn client_count(&self) -> usize {
        self.clients.len()
    }

    /// Returns whether a client would be told more if it connected again.
    pub fn has_news(&self) -> bool {
        self.clients.iter().any(|(_, client)| client.transmission.has_news())
    }

    /// Returns whether all answers were sent, no request is half received, and the driver holds none.
    pub fn is_quiet(&self) -> bool {
        let is_quiet = |transmission: &Transmission| transmission.outbox.is_empty() && !transmission.has_begun();
        self.held.is_empty() && self.clients.iter().all(|(_, client)| is_quiet(&client.transmission))
    }

    /// Returns whether the driver holds no request, and [`Self::pop_begun`] has none until a client sends more or takes an
    /// answer.
    pub fn is_idle(&self) -> bool {
        self.held.is_empty() && self.clients.iter().all(|(_, client)| client.transmission.is_idle())
    }

    /// Returns the clients for a program that continues their connections, with what `pass` returns for each descriptor.
    /// The driver must hold no request. Clients that cannot be passed on are left out.
    ///
    /// # Errors
    /// The first error of `pass`, or if the system has no memory for their bytes.
    pub fn pass<G>(&self, pass: &mut Pass<'_, G>) -> io::Result<Vec<NbdClient<G>>> {
        assert!(self.held.is_empty(), "clients were passed on with requests in flight");
        let passed = self.clients.iter().filter_map(|(_, client)| client.pass(pass).transpose());
        passed.collect()
    }

    /// Attaches a client that chose this export.
    ///
    /// # Errors
    /// If the system refuses to report events, or to watch the client's socket. The client is disconnected then.
    pub fn attach(&mut self, attached: Attached) -> io::Result<()> {
        // A client that has shut down its connection must no longer be read. The new client may be the same one, which
        // has reconnected.
        self.handle_events()?;
        // The events of the other clients are acted on in the next turn.
        self.again = true;
        let Attached { name, socket, transmission, seat, is_kept, .. } = attached;
        if !is_kept {
            self.remove_closed(|client| client.closing || client.leaving);
        }
        self.generation += 1;
        let entry = self.clients.vacant_entry();
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&self.epoll, &socket, EventData::new_u64(entry.key() as u64), flags)?;
        let generation = self.generation;
        entry.insert(Client {
            name,
            socket,
            transmission,
            generation,
            served_from: generation,
            held: 0,
            readable: true,
            writable: true,
            closing: false,
            is_goodbye_next: false,
            leaving: false,
            seat,
        });
        self.remove_replaced();
        Ok(())
    }

    /// Handles the events of the clients' sockets.
    ///
    /// # Errors
    /// If the system refuses to report events.
    pub fn handle_events(&mut self) -> io::Result<()> {
        self.note_events().map(|_| ())
    }

    /// Handles the events of the clients' sockets, and returns their number.
    fn note_events(&mut self) -> io::Result<usize> {
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
            if flags.contains(EventFlags::RDHUP) && !client.closing {
                client.closing = true;
                client.is_goodbye_next = client.has_goodbye();
            }
            if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
                // The client no longer waits for answers, and requests that were not answered need not be executed.
                self.remove::<()>(key, "closed");
            }
        }
        self.remove_replaced();
        Ok(count)
    }

    /// Removes clients that have closed their connections while others stay: what they have sent and nobody has read may come again from
    /// another client, and must not be read after that.
    fn remove_replaced(&mut self) {
        if self.clients.len() > 1 {
            self.remove_closed(|client| client.closing);
        }
    }

    /// Removes the clients of which `is_closed` is true. One that says goodbye sends nothing more, and gets its answers.
    fn remove_closed(&mut self, is_closed: impl Fn(&Client) -> bool) {
        let is_gone = |client: &Client| is_closed(client) && !client.says_goodbye();
        let gone: Vec<_> = self.clients.iter().filter(|(_, client)| is_gone(client)).map(|(key, _)| key).collect();
        gone.into_iter().for_each(|key| {
            self.remove::<()>(key, "closed its connection, and there are others");
        });
    }

    /// Returns the next request from the clients in turn, or `None` if there is none now.
    pub fn pop(&mut self) -> Option<NbdRequest> {
        self.next(true)
    }

    /// Returns another piece of a request of which the header was received before, and never a new request. Returns
    /// `None` if there is none now.
    pub fn pop_begun(&mut self) -> Option<NbdRequest> {
        self.next(false)
    }

    fn next(&mut self, begins: bool) -> Option<NbdRequest> {
        let count = self.clients.capacity();
        for key in (self.turn.min(count)..count).chain(0..self.turn.min(count)) {
            if let Some(piece) = self.pop_from(key, begins) {
                self.turn = key + 1;
                return Some(self.hand_out(key, piece));
            }
        }
        None
    }

    fn pop_from(&mut self, key: usize, begins: bool) -> Option<Piece> {
        let is_alone = self.clients.len() < 2;
        for _ in 0..RECEIVES_PER_TURN {
            let oldest_held = self.held.keys().next().copied();
            let client = self.clients.get_mut(key)?;
            if oldest_held.is_some_and(|held| held < client.served_from) {
                return None;
            }
            if client.leaving && client.transmission.is_quiet() && client.has_sent_all() {
                return self.remove(key, "said goodbye");
            }
            let piece = if begins { client.transmission.pop() } else { client.transmission.pop_begun() };
            if piece.is_some() || !begins && !client.transmission.has_begun() {
                return piece;
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
                // What came may repeat what another client left, which is known by now.
                Ok(true) if is_alone => {}
                Ok(true) => self.again |= self.note_events().ok()? > 0,
                Ok(false) => return None,
                // The client may still wait for answers.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => client.leaving = true,
                Err(_) => return self.remove(key, "closed"),
            }
        }
        // The client sends bytes that do not complete a request as fast as they are read. The other clients get their
        // turn.
        self.again = true;
        None
    }

    fn hand_out(&mut self, key: usize, piece: Piece) -> NbdRequest {
        *self.held.entry(self.generation).or_default() += 1;
        let client = &mut self.clients[key];
        client.held += 1;
        NbdRequest {
            client: key,
            client_generation: client.generation,
            generation: self.generation,
            piece,
            _seat: Arc::clone(&client.seat),
        }
    }

    /// Completes a request with `outcome`. The client gets the answer after the next [`Self::notify`].
    pub fn complete(&mut self, request: NbdRequest, outcome: Outcome) {
        let NbdRequest { client, client_generation, generation, piece, .. } = request;
        if let Some(held) = self.held.get_mut(&generation) {
            *held -= 1;
            if *held == 0 {
                self.held.remove(&generation);
                // Other clients may have waited for this request.
                self.again |= generation < self.generation;
            }
        }
        // Otherwise the client has left, and another one may have its key.
        if let Some(client) = self.clients.get_mut(client).filter(|client| client.generation == client_generation) {
            client.held -= 1;
            self.again |= client.transmission.complete(piece, outcome);
        }
    }

    /// Marks each unanswered request for repetition of which the disk may have lost finished pieces. [`Self::pop`]
    /// returns such a request again when all of its pieces are back and none has failed.
    pub fn repeat_parts(&mut self) {
        self.clients.iter_mut().for_each(|(_, client)| client.transmission.repeat_parts());
    }

    /// Sends the answers that are queued, as far as the clients' sockets have room.
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

    /// Removes a client. The others wait for what it leaves with the driver. Always returns `None`, for the convenience of callers.
    fn remove<T>(&mut self, key: usize, why: &str) -> Option<T> {
        // Closing the socket ends the watch.
        if let Some(Client { name, held, .. }) = self.clients.try_remove(key) {
            if held > 0 {
                self.generation += 1;
                self.clients.iter_mut().for_each(|(_, client)| client.served_from = self.generation);
            }
            tracing::debug!("{name}: an NBD client left: {why}");
            if self.clients.is_empty() {
                tracing::info!("{name}: its last NBD client has left: {why}");
            }
        }
        None
    }
}

impl Client {
    fn pass<G>(&self, pass: &mut Pass<'_, G>) -> io::Result<Option<NbdClient<G>>> {
        let Some(Passed { structured_replies, offered, received, to_send, begun, filled }) = self.transmission.pass()
        else {
            return Ok(None);
        };
        let bytes = [&received[..], &to_send, &filled].concat();
        let file = (!bytes.is_empty()).then(|| sealed::write("remoca-nbd", &bytes)).transpose()?;
        Ok(Some(NbdClient {
            told_bytes: Some(self.transmission.told_bytes()),
            socket: pass(self.socket.as_fd())?,
            structured_replies,
            offered,
            bytes: file.map(|file| pass(file.as_fd())).transpose()?,
            received: received.len() as u64,
            to_send: to_send.len() as u64,
            begun,
        }))
    }

    /// Returns whether the client has said goodbye, or does so with all that is still to be read of it.
    fn says_goodbye(&self) -> bool {
        self.is_goodbye_next || matches!(self.transmission.end(), Some(End::Disconnect))
    }

    /// Returns whether nothing is left of what it has sent, once it has closed its side.
    fn has_sent_all(&self) -> bool {
        self.says_goodbye() || self.transmission.next_header().is_some_and(<[u8]>::is_empty)
    }

    /// Returns whether a goodbye is all that has come and was not read.
    fn has_goodbye(&self) -> bool {
        let mut bytes = [0; REQUEST_HEADER_LEN + 1];
        let Some(staged) = self.transmission.next_header().filter(|staged| staged.len() <= bytes.len()) else {
            return false;
        };
        bytes[..staged.len()].copy_from_slice(staged);
        let length = staged.len() + socket::peek(&self.socket, &mut bytes[staged.len()..]);
        let request = bytes.first_chunk().and_then(Request::decode);
        length == REQUEST_HEADER_LEN && request.is_some_and(|request| request.command == Command::Disconnect)
    }

    /// Receives bytes from the client. Returns false if nothing can be read now.
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

    /// Sends as many answers as the socket takes. Returns true if there may be more requests now, or the client can be
    /// removed.
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

    /// Puts back the buffer that was taken from the request.
    pub fn give_back(&mut self, buffer: IoBuffer) {
        self.piece.buffer = Some(buffer);
    }

    /// Delivers all data of a read. If the request still has its own buffer, `buffer` is one of the driver's. It is copied,
    /// because the client may leave its answer unread for ever, and the other disks need the driver's buffers.
    ///
    /// # Errors
    /// If the data do not fit the request.
    pub fn deliver(&mut self, buffer: IoBuffer) -> Result<(), CopyError> {
        match self.piece.buffer {
            None => self.give_back(buffer),
            Some(_) => self.copy_to_guest(0, &buffer)?,
        }
        Ok(())
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
