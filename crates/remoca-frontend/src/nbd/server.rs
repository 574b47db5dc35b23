//! The listening side: accepts clients, leads the negotiation with each, and passes on those that chose an export.
//!
//! Owned by the driver, in the I/O thread. Clients that negotiate and clients that are attached share a limited number
//! of seats. A client keeps its seat while any of its requests is still in flight. A client that does not choose in
//! time is disconnected. When all seats are taken, the client that has been negotiating for longest is disconnected to
//! make room.

use super::listener::Listener;
use super::negotiation::{Negotiation, Step};
use super::offer::{Export, ExportGeometry, Target};
use super::socket;
use super::transmission::{Passed, SHARED_MEMORY_MAX, Transmission};
use remoca_io::buffer::BufferPool;
use remoca_io::sealed;
use remoca_protocol::guests::NbdClient;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::time::Timespec;
use slab::Slab;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The most clients at a time, on all exports.
const CLIENTS_MAX: usize = 32;
/// The longest that a negotiation may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Number of clients accepted, or of exchanges with one client, before others get their turn.
const STEPS_PER_TURN: usize = 64;
/// How long no client is accepted after the system failed to accept one.
const PAUSE: Duration = Duration::from_secs(1);
/// Start of the event data of listeners. The event data of a client is its key.
const LISTENERS: u64 = 1 << 32;
/// The most bytes that a client of a former program has with it: requests that were not parsed, answers that it has not
/// received, and a piece of a write.
const PASSED_BYTES_MAX: u64 = 256 << 20;
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A client that chose an export.
pub struct Attached {
    pub target: Target,
    /// Name of the export.
    pub(super) name: String,
    pub(super) socket: OwnedFd,
    pub(super) transmission: Transmission,
    pub(super) seat: Arc<()>,
    /// Whether a former program of this process had this client, beside the others.
    pub(super) is_kept: bool,
}

/// All NBD clients that have not chosen an export yet.
pub struct NbdServer {
    exports: Vec<Export>,
    listeners: Vec<Listener>,
    clients: Slab<Client>,
    seats: Seats,
    /// For the long reads of all clients.
    shared_pool: BufferPool,
    epoll: OwnedFd,
    /// Clients of a former program that are not attached yet.
    adopted: Vec<Attached>,
    /// Until then no client is accepted.
    paused_until: Option<Instant>,
    /// Another program is about to take over: clients wait for it.
    closed: bool,
    refusal_told: bool,
}

struct Client {
    socket: OwnedFd,
    negotiation: Negotiation,
    give_up_at: Instant,
    watched_for: EventFlags,
    seat: Arc<()>,
}

#[derive(Default)]
struct Seats(Vec<Weak<()>>);

impl Seats {
    fn take(&mut self) -> Option<Arc<()>> {
        self.0.retain(|seat| seat.strong_count() > 0);
        let seat = (self.0.len() < CLIENTS_MAX).then(|| Arc::new(()))?;
        self.0.push(Arc::downgrade(&seat));
        Some(seat)
    }
}

impl NbdServer {
    /// Offers `exports` on `listeners`.
    ///
    /// # Errors
    /// If the system has no descriptor left, or refuses to watch the listeners.
    pub fn new(exports: Vec<Export>, listeners: Vec<Listener>) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let (clients, seats, shared_pool) = (Slab::new(), Seats::default(), BufferPool::new(SHARED_MEMORY_MAX));
        for (listener, number) in listeners.iter().zip(LISTENERS..) {
            epoll::add(&epoll, listener, EventData::new_u64(number), EventFlags::IN)?;
        }
        let (adopted, paused_until, closed, refusal_told) = (Vec::new(), None, false, false);
        Ok(Self { exports, listeners, clients, seats, shared_pool, epoll, adopted, paused_until, closed, refusal_told })
    }

    /// Returns the listening sockets, to be passed to a program that takes over.
    pub fn listeners(&self) -> &[Listener] {
        &self.listeners
    }

    /// Changes the size of the export of `target` for clients that choose it from now on.
    pub fn resize(&mut self, target: Target, bytes: u64) {
        for export in self.exports.iter_mut().filter(|export| export.target == target) {
            export.geometry.size = bytes - bytes % u64::from(export.geometry.block);
        }
    }

    /// Takes over the client of a former program of this process, which used the export of `target`. The next
    /// [`Self::handle_events`] returns it.
    ///
    /// # Errors
    /// If the export is not there, its state cannot be understood, or no seat is left. The client is disconnected then.
    pub fn adopt(&mut self, target: Target, client: NbdClient<OwnedFd>) -> io::Result<()> {
        let odd = || io::Error::other("its state cannot be understood");
        let export = self.exports.iter().find(|export| export.target == target);
        let Export { name, geometry, .. } = export.ok_or_else(|| io::Error::other("its export is gone"))?;
        let seat = self.seats.take().ok_or_else(|| io::Error::other("no seat is left"))?;
        let NbdClient { socket, structured_replies, offered, bytes, received, to_send, begun, told_bytes } = client;
        let geometry = ExportGeometry { size: told_bytes.unwrap_or(geometry.size), ..*geometry };
        let mut received_on = bytes.map(|file| sealed::read(file, PASSED_BYTES_MAX)).transpose()?.unwrap_or_default();
        let mut to_send_on = split_off(&mut received_on, received).ok_or_else(odd)?;
        let filled = split_off(&mut to_send_on, to_send).ok_or_else(odd)?;
        let passed = Passed { structured_replies, offered, received: received_on, to_send: to_send_on, begun, filled };
        let transmission = Transmission::resume(geometry, passed, self.shared_pool.clone()).ok_or_else(odd)?;
        let name = name.clone();
        self.adopted.push(Attached { target, name, socket, transmission, seat, is_kept: true });
        Ok(())
    }

    fn watch_listeners(&self, flags: EventFlags) -> io::Result<()> {
        for (listener, number) in self.listeners.iter().zip(LISTENERS..) {
            epoll::modify(&self.epoll, listener, EventData::new_u64(number), flags)?;
        }
        Ok(())
    }

    /// Returns a descriptor that is readable when [`Self::handle_events`] has something to do.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Returns when [`Self::handle_timer`] is due, or `None` if no timer is running.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.clients.iter().map(|(_, client)| client.give_up_at).chain(self.paused_until).min()
    }

    pub fn handle_timer(&mut self, now: Instant) {
        self.clients.retain(|_, client| client.give_up_at > now);
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = None;
            self.watch_or_not();
        }
    }

    /// Accepts no more clients, because another program is about to take over, or accepts them again.
    pub fn close(&mut self, closed: bool) {
        self.closed = closed;
        self.watch_or_not();
    }

    /// Returns whether no client is negotiating.
    pub fn is_quiet(&self) -> bool {
        self.clients.is_empty()
    }

    fn watch_or_not(&mut self) {
        let accepts = !self.closed && self.paused_until.is_none();
        if let Err(error) = self.watch_listeners(if accepts { EventFlags::IN } else { EventFlags::empty() }) {
            tracing::error!("no NBD clients can be accepted any more: {error}");
        }
    }

    /// Accepts clients and continues the negotiations of those that have sent something. Returns the clients that chose
    /// an export.
    ///
    /// # Errors
    /// If the system refuses to report events.
    pub fn handle_events(&mut self, now: Instant) -> io::Result<Vec<Attached>> {
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; CLIENTS_MAX + 4];
        let count = epoll::wait(&self.epoll, events.as_mut_slice(), Some(&NO_WAIT))?;
        let mut attached = std::mem::take(&mut self.adopted);
        for event in &events[..count] {
            match usize::try_from(event.data.u64() % LISTENERS) {
                Ok(listener) if event.data.u64() >= LISTENERS => self.accept(listener, now),
                Ok(client) => attached.extend(self.advance(client)),
                Err(_) => {}
            }
        }
        Ok(attached)
    }

    fn accept(&mut self, listener: usize, now: Instant) {
        for _ in 0..STEPS_PER_TURN {
            match self.listeners[listener].accept() {
                Ok(None) => return,
                Ok(Some(socket)) => self.welcome(socket, now),
                Err(error) => {
                    tracing::warn!("an NBD client cannot be accepted: {error}");
                    self.paused_until = Some(now + PAUSE);
                    // The listener stays readable. If it were still watched, the thread would spin.
                    self.watch_or_not();
                    return;
                }
            }
        }
    }

    fn welcome(&mut self, socket: OwnedFd, now: Instant) {
        let Some(seat) = self.seats.take().or_else(|| self.send_one_away()) else {
            if !std::mem::replace(&mut self.refusal_told, true) {
                tracing::warn!("{CLIENTS_MAX} NBD clients are attached: others are refused");
            }
            return;
        };
        self.refusal_told = false;
        let entry = self.clients.vacant_entry();
        let key = entry.key();
        let watched_for = EventFlags::OUT;
        if let Err(error) = epoll::add(&self.epoll, &socket, EventData::new_u64(key as u64), watched_for) {
            tracing::warn!("an NBD client cannot be watched: {error}");
            return;
        }
        entry.insert(Client { socket, negotiation: Negotiation::new(), give_up_at: now + PATIENCE, watched_for, seat });
    }

    /// Disconnects the client that has been negotiating for longest. Returns its seat, or `None` if no client is
    /// negotiating.
    fn send_one_away(&mut self) -> Option<Arc<()>> {
        let (oldest, _) = self.clients.iter().min_by_key(|(_, client)| client.give_up_at)?;
        self.clients.remove(oldest);
        self.seats.take()
    }

    fn advance(&mut self, key: usize) -> Option<Attached> {
        let client = self.clients.get_mut(key)?;
        match client.negotiate(&self.exports) {
            Ok(Step::Wait) if client.watch(&self.epoll, key).is_ok() => None,
            Ok(Step::Chosen(choice)) => {
                let Client { socket, negotiation, seat, .. } = self.clients.remove(key);
                epoll::delete(&self.epoll, &socket).ok()?;
                let Export { name, target, geometry } = &self.exports[choice.export];
                let Negotiation { staging, outbox, .. } = negotiation;
                let pool = self.shared_pool.clone();
                let transmission = Transmission::new(*geometry, choice.structured_replies, staging, outbox, pool);
                let (name, target) = (name.clone(), *target);
                Some(Attached { target, name, socket, transmission, seat, is_kept: false })
            }
            Ok(Step::Wait | Step::End) | Err(_) => {
                self.clients.remove(key);
                None
            }
        }
    }
}

impl Client {
    /// Exchanges bytes until one side has to wait.
    fn negotiate(&mut self, exports: &[Export]) -> io::Result<Step> {
        for _ in 0..STEPS_PER_TURN {
            let step = loop {
                let step = self.negotiation.advance(exports);
                let outbox = &mut self.negotiation.outbox;
                if matches!(step, Step::Chosen(_)) || outbox.is_empty() {
                    break step;
                }
                while !outbox.is_empty() {
                    let Some(count) = socket::send(&self.socket, outbox)? else { return Ok(step) };
                    outbox.consume(count);
                }
                if step == Step::End {
                    break step;
                }
            };
            let Some(room) = self.negotiation.staging.room().filter(|_| step == Step::Wait) else { return Ok(step) };
            let Some(count) = socket::receive(&self.socket, room)? else { return Ok(step) };
            self.negotiation.staging.received(count);
        }
        // Bytes that were received already cause no further event.
        Ok(self.negotiation.advance(exports))
    }

    /// Watches the socket for room if there is something to send, and for input otherwise.
    fn watch(&mut self, epoll: &OwnedFd, key: usize) -> io::Result<()> {
        let wanted = if self.negotiation.outbox.is_empty() { EventFlags::IN } else { EventFlags::OUT };
        if wanted != self.watched_for {
            epoll::modify(epoll, &self.socket, EventData::new_u64(key as u64), wanted)?;
            self.watched_for = wanted;
        }
        Ok(())
    }
}

/// Splits `bytes` at `at`, and returns the second part. Returns `None` if there are fewer bytes.
fn split_off(bytes: &mut Vec<u8>, at: u64) -> Option<Vec<u8>> {
    let at = usize::try_from(at).ok().filter(|at| *at <= bytes.len())?;
    Some(bytes.split_off(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last request of a client may end after the client has disconnected.
    #[test]
    fn a_seat_is_free_when_its_client_and_all_of_its_requests_are_gone() {
        let mut seats = Seats::default();
        let mut taken: Vec<_> = (0..CLIENTS_MAX).map(|_| seats.take().unwrap()).collect();
        assert!(seats.take().is_none());
        for _ in 0..3 * CLIENTS_MAX {
            let client = taken.remove(0);
            let request = Arc::clone(&client);
            drop(client);
            assert!(seats.take().is_none(), "a request holds a buffer");
            drop(request);
            taken.push(seats.take().expect("one has gone"));
            assert!(seats.take().is_none());
        }
    }
}
