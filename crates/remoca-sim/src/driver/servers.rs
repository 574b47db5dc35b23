//! The model memory servers and the network to them: real frames over socket pairs. The world holds the other ends.

use super::local::Memory;
use crate::random::Random;
use remoca_core::units::{PAGE_SIZE, PageCount};
use remoca_disk::link::{AnswerTo, Network};
use remoca_io::address::Endpoint;
use remoca_protocol::{ErrorCode, ErrorReply, Frame, Token, decode};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of a connection, counted from 0.
pub(super) type ConnectionId = usize;

/// An attempt of the driver to connect.
pub(super) struct Attempt {
    pub(super) endpoint: Endpoint,
    pub(super) token: Token,
    pub(super) epoch: u64,
    pub(super) answer: AnswerTo,
}

/// The driver's requests to the network.
#[derive(Default)]
pub(super) struct Asked {
    pub(super) attempts: Vec<Attempt>,
    tokens: u64,
}

/// The network, as the driver sees it.
#[derive(Clone, Default)]
pub(super) struct ModelNetwork(Arc<Mutex<Asked>>);

impl ModelNetwork {
    pub(super) fn lock(&self) -> MutexGuard<'_, Asked> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the endpoint of a model server.
pub(super) fn endpoint(server: usize) -> Endpoint {
    Endpoint::Tcp(format!("server{server}:1"))
}

impl Network for ModelNetwork {
    fn token(&self) -> io::Result<Token> {
        let mut asked = self.lock();
        asked.tokens += 1;
        Ok(Token(u128::from(asked.tokens).to_le_bytes()))
    }

    fn connect(&self, to: Endpoint, token: Token, epoch: u64, answer: AnswerTo) {
        self.lock().attempts.push(Attempt { endpoint: to, token, epoch, answer });
    }

    fn say_goodbye(&self, socket: OwnedFd, left: Vec<u8>) {
        // The world empties the socket after every turn, so there is room.
        let _ = UnixStream::from(socket).write_all(&left);
    }
}

type Page = Box<[u8; PAGE_SIZE]>;

/// The pool of one process.
#[derive(Default)]
struct Pool {
    slots: Vec<Option<Page>>,
    /// Memory of a pool of the local tier, which has no slots then.
    memory: Option<Memory>,
    generation: u64,
    received: u64,
    epoch: u64,
}

/// A memory server.
#[derive(Default)]
pub(super) struct Donor {
    pools: BTreeMap<[u8; 16], Pool>,
    generations: u64,
    /// Whether clients read and write its memory by themselves.
    is_local: bool,
}

/// Offer of a pool in a WELCOME.
pub(super) struct Offer {
    pub(super) generation: u64,
    pub(super) npages: PageCount,
    pub(super) received: u64,
    /// Memory of the local tier.
    pub(super) memory: Option<OwnedFd>,
}

impl Donor {
    /// Returns the server of the local tier.
    pub(super) fn local() -> Self {
        Self { is_local: true, ..Self::default() }
    }

    /// Returns the memory of all pools of the local tier.
    pub(super) fn memories(&self) -> impl Iterator<Item = &Memory> {
        self.pools.values().filter_map(|pool| pool.memory.as_ref())
    }

    /// Limits the pool of a client. Returns what is to be told to it, if it has more.
    pub(super) fn limit(&mut self, client: &Connection, npages: PageCount) -> Option<Vec<u8>> {
        let pool = self.pools.get_mut(&client.token.0).filter(|pool| pool.epoch == client.epoch)?;
        pool.memory.as_mut()?.limit(npages)
    }

    /// Returns the size of a client's pool in the local tier, or `None` if it has none.
    pub(super) fn granted(&self, client: &Connection) -> Option<PageCount> {
        Some(self.pools.get(&client.token.0)?.memory.as_ref()?.granted())
    }

    /// Takes back all memory above the limits without a word.
    pub(super) fn shrink(&mut self) {
        self.pools.values_mut().filter_map(|pool| pool.memory.as_mut()).for_each(Memory::shrink);
    }

    /// Returns what is to be told to a client that has more memory than it may have, or `None` if it does not.
    pub(super) fn take_back(&self, client: &Connection) -> Option<Vec<u8>> {
        self.pools.get(&client.token.0)?.memory.as_ref()?.take_back()
    }

    /// Restarts the server, which loses every pool.
    pub(super) fn restart(&mut self) {
        self.pools.clear();
    }

    /// Drops every page, but no pool.
    pub(super) fn forget(&mut self) {
        self.memories().for_each(Memory::forget);
        self.pools.values_mut().for_each(|pool| pool.slots.fill_with(|| None));
    }

    /// Drops up to `count` pages of each pool.
    pub(super) fn lose(&mut self, count: u32, random: &mut Random) {
        self.memories().for_each(|memory| memory.lose(count, random));
        for pool in self.pools.values_mut().filter(|pool| !pool.slots.is_empty()) {
            for _ in 0..count {
                let at = random.index(pool.slots.len());
                pool.slots[at] = None;
            }
        }
    }

    /// Greets a client. Returns `None` if its epoch is not newer than the latest.
    pub(super) fn greet(&mut self, token: Token, epoch: u64) -> Option<Offer> {
        let pool = self.pools.entry(token.0).or_insert_with(|| {
            self.generations += 1;
            Pool { generation: self.generations, memory: self.is_local.then(Memory::new), ..Pool::default() }
        });
        if epoch <= pool.epoch {
            return None;
        }
        pool.epoch = epoch;
        let slots = PageCount(u32::try_from(pool.slots.len()).unwrap_or(u32::MAX));
        let (npages, memory) = match &pool.memory {
            Some(memory) => (memory.granted(), Some(memory.passed())),
            None => (slots, None),
        };
        Some(Offer { generation: pool.generation, npages, received: pool.received, memory })
    }

    /// Returns whether messages on this connection are still accepted: its epoch is the pool's latest.
    fn hears(&self, connection: &Connection) -> bool {
        self.pools.get(&connection.token.0).is_some_and(|pool| pool.epoch == connection.epoch)
    }

    /// Executes a frame. Answers go to `out`. Returns an error if the client broke the protocol.
    fn handle(&mut self, token: Token, frame: &Frame<'_>, out: &mut Vec<u8>, corrupts: bool) -> Result<(), String> {
        let Some(pool) = self.pools.get_mut(&token.0) else { return Ok(()) };
        if let (Some(memory), false) = (&mut pool.memory, *frame == Frame::Bye) {
            return memory.handle(frame, out);
        }
        let size = pool.slots.len();
        let slot = |slot: remoca_core::units::SlotIndex| {
            let at = slot.0 as usize;
            if at < size { Ok(at) } else { Err(format!("slot {at} of a pool of {size}: {frame:?}")) }
        };
        match *frame {
            Frame::SetSize { request, npages } => {
                pool.slots.resize_with(npages.0 as usize, || None);
                Frame::Sized { request, npages, available: PageCount(1 << 20) }.encode(out);
            }
            Frame::SendPage { slot: at, page, .. } => {
                pool.received += 1;
                let mut page = Box::new(*page);
                page[0] ^= u8::from(corrupts && pool.received.is_multiple_of(7));
                pool.slots[slot(at)?] = Some(page);
            }
            Frame::Move { from, to } => {
                let page = pool.slots[slot(from)?].take();
                pool.slots[slot(to)?] = page;
            }
            Frame::Request { request, slot: at } => match &pool.slots[slot(at)?] {
                Some(page) => Frame::SendPage { request, slot: at, page }.encode(out),
                None => Frame::Error(ErrorReply { request, code: ErrorCode::NotFound, detail: 0 }).encode(out),
            },
            Frame::Bye => {
                self.pools.remove(&token.0);
            }
            _ => return Err(format!("a client sends {frame:?}")),
        }
        Ok(())
    }
}

/// A connection, from the server's side.
pub(super) struct Connection {
    pub(super) server: usize,
    token: Token,
    epoch: u64,
    /// Socket; `None` if it is broken.
    socket: Option<UnixStream>,
    /// Received bytes that do not make a whole frame yet.
    inbox: Vec<u8>,
    /// Bytes that do not fit into the client's socket yet.
    outbox: VecDeque<u8>,
    /// Arrival time of the last bytes in each direction: later ones do not overtake them.
    pub(super) to_server_ns: u64,
    pub(super) to_client_ns: u64,
}

impl Connection {
    /// Makes a connection, and returns it with the client's end.
    pub(super) fn new(server: usize, token: Token, epoch: u64) -> io::Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        let (inbox, outbox) = (Vec::new(), VecDeque::new());
        let socket = Some(ours);
        Ok((Self { server, token, epoch, socket, inbox, outbox, to_server_ns: 0, to_client_ns: 0 }, theirs))
    }

    /// Breaks the connection, and loses everything in flight.
    pub(super) fn cut(&mut self) {
        self.socket = None;
    }

    pub(super) fn is_open(&self) -> bool {
        self.socket.is_some()
    }

    /// Returns the bytes that the client has sent since the last call.
    pub(super) fn take_sent(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let Some(socket) = &mut self.socket else { return bytes };
        let ended = match socket.read_to_end(&mut bytes) {
            Ok(_) => true,
            Err(error) => error.kind() != ErrorKind::WouldBlock,
        };
        if ended && bytes.is_empty() {
            self.socket = None;
        }
        bytes
    }

    /// Receives bytes from the client. Returns the server's answers, or an error if the client broke the protocol.
    pub(super) fn arrive(&mut self, bytes: &[u8], donor: &mut Donor, corrupts: bool) -> Result<Vec<Vec<u8>>, String> {
        let mut answers = Vec::new();
        if !donor.hears(self) {
            return Ok(answers);
        }
        self.inbox.extend_from_slice(bytes);
        let mut taken = 0;
        while let Some((frame, length)) = decode(&self.inbox[taken..]).map_err(|error| error.to_string())? {
            let mut answer = Vec::new();
            donor.handle(self.token, &frame, &mut answer, corrupts)?;
            taken += length;
            if !answer.is_empty() {
                answers.push(answer);
            }
        }
        self.inbox.drain(..taken);
        Ok(answers)
    }

    /// Delivers bytes to the client.
    pub(super) fn deliver(&mut self, bytes: &[u8]) {
        self.outbox.extend(bytes);
        self.push();
    }

    /// Writes as much as fits into the client's socket.
    pub(super) fn push(&mut self) {
        let Some(socket) = &mut self.socket else { return };
        while !self.outbox.is_empty() {
            match socket.write(self.outbox.as_slices().0) {
                Ok(count) => drop(self.outbox.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => return self.socket = None,
            }
        }
    }
}
