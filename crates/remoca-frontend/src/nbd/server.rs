//! The listening side: accepts clients, leads the negotiation with each, and gives those that chose an export away.
//!
//! Owned by the driver, in the I/O thread. Clients that negotiate and clients that are attached share a limited number of
//! seats, also while requests of theirs are still executed. A client that does not come to a choice in time is sent away, and
//! when all seats are taken, the one that has been negotiating for longest.

use super::listener::Listener;
use super::negotiation::{Negotiation, Step};
use super::offer::{Export, Target};
use super::socket;
use super::transmission::{SHARED_MEMORY_MAX, Transmission};
use remoca_io::buffer::BufferPool;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::time::Timespec;
use slab::Slab;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Clients at a time, on all exports.
const CLIENTS_MAX: usize = 32;
/// Time for the negotiation.
const PATIENCE: Duration = Duration::from_secs(30);
/// Clients accepted, and exchanges with one client, before others get their turn.
const STEPS_PER_TURN: usize = 64;
/// How long nobody is accepted after the system refused to.
const PAUSE: Duration = Duration::from_secs(1);
/// Event data of listeners begin here; clients have their key.
const LISTENERS: u64 = 1 << 32;
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A client that chose an export.
pub struct Attached {
    pub target: Target,
    pub(super) socket: OwnedFd,
    pub(super) transmission: Transmission,
    pub(super) seat: Arc<()>,
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
    /// Nobody is accepted until then.
    paused_until: Option<Instant>,
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
    /// If the system refuses to watch them.
    pub fn new(exports: Vec<Export>, listeners: Vec<Listener>) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let (clients, seats, shared_pool) = (Slab::new(), Seats::default(), BufferPool::new(SHARED_MEMORY_MAX));
        for (listener, number) in listeners.iter().zip(LISTENERS..) {
            epoll::add(&epoll, listener, EventData::new_u64(number), EventFlags::IN)?;
        }
        Ok(Self { exports, listeners, clients, seats, shared_pool, epoll, paused_until: None, refusal_told: false })
    }

    /// Returns where clients come from, for a program that takes over.
    pub fn listeners(&self) -> &[Listener] {
        &self.listeners
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

    /// Returns when [`Self::handle_timer`] is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.clients.iter().map(|(_, client)| client.give_up_at).chain(self.paused_until).min()
    }

    pub fn handle_timer(&mut self, now: Instant) {
        self.clients.retain(|_, client| client.give_up_at > now);
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = None;
            if let Err(error) = self.watch_listeners(EventFlags::IN) {
                tracing::error!("no NBD clients can be accepted any more: {error}");
            }
        }
    }

    /// Serves every client that has something to say. Returns those that chose an export.
    ///
    /// # Errors
    /// If the system says nothing.
    pub fn handle_events(&mut self, now: Instant) -> io::Result<Vec<Attached>> {
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; CLIENTS_MAX + 4];
        let count = epoll::wait(&self.epoll, events.as_mut_slice(), Some(&NO_WAIT))?;
        let mut attached = Vec::new();
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
                    // Still ready, and of no use: without this the thread would spin.
                    let _ = self.watch_listeners(EventFlags::empty());
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

    /// Makes room at the cost of who has been negotiating for longest.
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
                let Export { target, geometry, .. } = self.exports[choice.export];
                let Negotiation { staging, outbox, .. } = negotiation;
                let pool = self.shared_pool.clone();
                let transmission = Transmission::new(geometry, choice.structured_replies, staging, outbox, pool);
                Some(Attached { target, socket, transmission, seat })
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
        // What has been received brings no event any more.
        Ok(self.negotiation.advance(exports))
    }

    /// Watches the socket for what comes next.
    fn watch(&mut self, epoll: &OwnedFd, key: usize) -> io::Result<()> {
        let wanted = if self.negotiation.outbox.is_empty() { EventFlags::IN } else { EventFlags::OUT };
        if wanted != self.watched_for {
            epoll::modify(epoll, &self.socket, EventData::new_u64(key as u64), wanted)?;
            self.watched_for = wanted;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also when the last request of a client that has gone is done later than that.
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
