//! A memory server that can lie in every way that the protocol allows, and in some that it does not.
//!
//! Its pool survives connections, so that a client that reconnects trusts what it knows.

use super::machine::Machine;
use super::wait_until;
use remoca_protocol::{
    ErrorCode, ErrorReply, FRAME_BYTES_MAX, Frame, PAGE_SIZE, PageCount, PoolGeneration, ReceiveBuffer, RequestId,
    SendCount, ServerId, SlotIndex, VERSION, VersionRange, Welcome,
};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// What the server does wrong. Can be changed while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    None,
    /// One byte of every page is wrong.
    WrongByte,
    /// The page of some other slot.
    OtherSlot,
    /// What the slot held before.
    OldVersion,
    /// Every page is zeroes.
    Zeroes,
    /// No reply, ever.
    Silence,
    /// It reports every page as not found.
    NotFound,
    /// The right page, as the reply to another request.
    WrongRequest,
    /// Every reply twice.
    Twice,
    /// With each reply come pages, sizes, refusals and a new greeting that were not requested.
    Unasked,
    /// Random bytes in place of a reply.
    Garbage,
    /// A reply that claims to have 65,535 bytes.
    Oversize,
    /// Half a page, then the end of the connection.
    MidFrame,
    /// Unrequested frames, without end, along with the replies.
    Flood,
    /// Errors of every kind, without end, along with the replies.
    ErrorFlood,
    /// Grants one page less than asked for, or one more.
    OddSizes,
    /// Claims to have more memory than any other server, and refuses every size.
    Refuse,
    // At the greeting:
    /// Accepts connections and sends nothing.
    Mute,
    /// Speaks versions 7 to 9 only.
    OtherVersion,
    /// Greets in version 9, which the client did not offer.
    UnaskedVersion,
    /// Greets with impossible figures.
    Boast,
    /// Greets and hangs up.
    HangUp,
    /// Refuses because it has its maximum number of clients.
    Busy,
    /// Greets with random bytes.
    GarbageGreeting,
    /// Closes each connection without a word, as a tunnel does whose other end is down.
    NoGreeting,
}

/// The fake server; ends when dropped.
pub struct FakeServer {
    /// Address for `--server`.
    pub address: String,
    shared: Arc<Shared>,
    listener: UnixListener,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    lie: Mutex<Lie>,
    stop: AtomicBool,
    /// Number of connections accepted. It changes while `open` is locked.
    connections: AtomicUsize,
    /// Number of lies told.
    told: AtomicUsize,
    pool: Mutex<Pool>,
    open: Mutex<Vec<UnixStream>>,
}

#[derive(Default)]
struct Pool {
    npages: u32,
    sends: u64,
    /// For each slot, its page and its previous page.
    slots: HashMap<u32, [Box<[u8; PAGE_SIZE]>; 2]>,
}

impl FakeServer {
    /// Listens at `path`.
    pub fn start(path: &Path, lie: Lie) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let shared = Arc::new(Shared {
            lie: Mutex::new(lie),
            stop: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            told: AtomicUsize::new(0),
            pool: Mutex::default(),
            open: Mutex::default(),
        });
        let (theirs, accepting) = (Arc::clone(&shared), listener.try_clone().unwrap());
        let accepting = std::thread::spawn(move || {
            while let Ok((stream, _)) = accepting.accept() {
                let mut open = theirs.open.lock().unwrap();
                open.push(stream.try_clone().unwrap());
                theirs.connections.fetch_add(1, SeqCst);
                drop(open);
                let shared = Arc::clone(&theirs);
                std::thread::spawn(move || Connection::new(stream, shared).run());
            }
        });
        Self { address: format!("unix:{}", path.display()), shared, listener, accepting: Some(accepting) }
    }

    pub fn lie(&self, lie: Lie) {
        *self.shared.lie.lock().unwrap() = lie;
        self.shared.told.store(0, SeqCst);
    }

    /// Returns the number of lies since the last change.
    pub fn told(&self) -> usize {
        self.shared.told.load(SeqCst)
    }

    pub fn connections(&self) -> usize {
        self.shared.connections.load(SeqCst)
    }

    /// Makes the VM process begin a new session with the pool's content. Nothing is held against the server.
    pub fn begin_again(&self, machine: &Machine) {
        let before = self.hang_up();
        wait_until("the VM process is back", || {
            let cache = machine.status().cache;
            self.connections() > before && is_trusted(machine) && cache.granted_bytes == cache.wanted_bytes
        });
    }

    /// Closes all connections. Returns how many have been accepted so far.
    pub fn hang_up(&self) -> usize {
        let mut open = self.shared.open.lock().unwrap();
        for stream in open.drain(..) {
            // Fails only if the peer closed first.
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.connections()
    }
}

/// Returns whether reads go to the server: it is connected, and its breaker is closed.
pub fn is_trusted(machine: &Machine) -> bool {
    machine.status().server.is_some_and(|server| server.connected && server.breaker == "closed")
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        // Ends `accept`; the socket's path may be gone already.
        rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both).unwrap();
        if let Some(thread) = self.accepting.take() {
            let _ = thread.join();
        }
        self.hang_up();
    }
}

/// Why a connection ends.
struct Over;

struct Connection {
    stream: UnixStream,
    /// Locked while a frame is written, so that frames stay whole.
    out: Arc<Mutex<UnixStream>>,
    shared: Arc<Shared>,
    noise: u32,
    flooding: bool,
}

impl Connection {
    fn new(stream: UnixStream, shared: Arc<Shared>) -> Self {
        let out = Arc::new(Mutex::new(stream.try_clone().unwrap()));
        Self { stream, out, shared, noise: 1, flooding: false }
    }

    fn run(mut self) {
        let mut buffer = ReceiveBuffer::new(1 << 20);
        loop {
            let mut replies = Vec::new();
            let over = self.handle_all(&mut buffer, &mut replies).is_err();
            if self.out.lock().unwrap().write_all(&replies).is_err() || over {
                break;
            }
            self.flood();
            match self.stream.read(buffer.space()) {
                Ok(0) | Err(_) => break,
                Ok(count) => buffer.filled(count),
            }
        }
        // Fails only if the peer closed first.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn handle_all(&mut self, buffer: &mut ReceiveBuffer, replies: &mut Vec<u8>) -> Result<(), Over> {
        while let Some(frame) = buffer.take().map_err(|_| Over)? {
            let lie = *self.shared.lie.lock().unwrap();
            match frame {
                Frame::Hello(_) => self.greet(lie, replies)?,
                Frame::SetSize { request, npages } => self.resize(lie, request, npages, replies),
                Frame::Request { request, slot } => self.answer(lie, request, slot, replies)?,
                Frame::SendPage { slot, page, .. } => self.shared.pool.lock().unwrap().store(slot.0, page),
                Frame::Move { from, to } => self.shared.pool.lock().unwrap().relocate(from.0, to.0),
                Frame::Bye => {}
                other => panic!("the client sent {other:?}"),
            }
        }
        Ok(())
    }

    fn told(&self) {
        self.shared.told.fetch_add(1, SeqCst);
    }

    /// Returns a number that changes with each call.
    fn noise(&mut self) -> u32 {
        self.noise = self.noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.noise >> 4
    }

    fn greet(&mut self, lie: Lie, replies: &mut Vec<u8>) -> Result<(), Over> {
        let mut welcome = self.shared.pool.lock().unwrap().welcome();
        match lie {
            Lie::Mute => {
                self.told();
                return Ok(());
            }
            Lie::OtherVersion => {
                self.told();
                let detail = VersionRange { lowest: 7, highest: 9 }.to_detail();
                let code = ErrorCode::VersionMismatch;
                Frame::Error(ErrorReply { request: RequestId(0), code, detail }).encode(replies);
                return Err(Over);
            }
            Lie::Busy => {
                self.told();
                Frame::Error(ErrorReply { request: RequestId(0), code: ErrorCode::Busy, detail: 0 }).encode(replies);
                return Err(Over);
            }
            Lie::UnaskedVersion => {
                self.told();
                welcome.version = 9;
            }
            Lie::Refuse => welcome.available = PageCount(u32::MAX),
            Lie::Boast => {
                self.told();
                let most = PageCount(u32::MAX);
                (welcome.npages, welcome.available, welcome.quota) = (most, most, most);
                welcome.sends_received = SendCount(u64::MAX);
            }
            Lie::GarbageGreeting => {
                self.told();
                replies.extend((0..4096).map(|_| self.noise() as u8));
                return Err(Over);
            }
            Lie::NoGreeting => {
                self.told();
                return Err(Over);
            }
            _ => {}
        }
        Frame::Welcome(welcome).encode(replies);
        if lie == Lie::HangUp {
            self.told();
            return Err(Over);
        }
        Ok(())
    }

    fn resize(&mut self, lie: Lie, request: RequestId, asked: PageCount, replies: &mut Vec<u8>) {
        if lie == Lie::Refuse {
            self.told();
            let refusal = ErrorReply { request, code: ErrorCode::NoMemory, detail: 0 };
            return Frame::Error(refusal).encode(replies);
        }
        let mut npages = asked;
        if lie == Lie::OddSizes {
            self.told();
            npages.0 = if self.noise().is_multiple_of(2) { asked.0 - 1 } else { asked.0 + 1 };
        }
        self.shared.pool.lock().unwrap().npages = npages.0;
        Frame::Sized { request, npages, available: PageCount(1 << 20) }.encode(replies);
    }

    fn answer(&mut self, lie: Lie, request: RequestId, slot: SlotIndex, replies: &mut Vec<u8>) -> Result<(), Over> {
        let pool = Arc::clone(&self.shared);
        let pool = pool.pool.lock().unwrap();
        let not_found = |request| Frame::Error(ErrorReply { request, code: ErrorCode::NotFound, detail: 0 });
        let Some([page, before]) = pool.slots.get(&slot.0) else {
            not_found(request).encode(replies);
            return Ok(());
        };
        let right = Frame::SendPage { request, slot, page };
        if lie != Lie::None && lie != Lie::OldVersion {
            self.told();
        }
        match lie {
            Lie::WrongByte => {
                let mut page = page.clone();
                page[self.noise() as usize % PAGE_SIZE] ^= 1;
                Frame::SendPage { request, slot, page: &page }.encode(replies);
            }
            Lie::OtherSlot => {
                let others: Vec<_> = pool.slots.iter().filter(|(other, _)| **other != slot.0).collect();
                let (_, [page, _]) = others[self.noise() as usize % others.len()];
                Frame::SendPage { request, slot, page }.encode(replies);
            }
            Lie::OldVersion => {
                if page != before {
                    self.told();
                }
                Frame::SendPage { request, slot, page: before }.encode(replies);
            }
            Lie::Zeroes => Frame::SendPage { request, slot, page: &[0; PAGE_SIZE] }.encode(replies),
            Lie::Silence => {}
            Lie::NotFound => not_found(request).encode(replies),
            Lie::WrongRequest => Frame::SendPage { request: RequestId(request.0 ^ 1), slot, page }.encode(replies),
            Lie::Twice => (0..2).for_each(|_| right.encode(replies)),
            Lie::Unasked => {
                self.unasked(page, replies);
                right.encode(replies);
                self.unasked(page, replies);
            }
            Lie::Garbage => replies.extend((0..FRAME_BYTES_MAX).map(|_| self.noise() as u8)),
            Lie::Oversize => {
                right.encode(replies);
                let at = replies.len() - FRAME_BYTES_MAX;
                replies[at + 2..at + 4].copy_from_slice(&u16::MAX.to_le_bytes());
            }
            Lie::MidFrame => {
                right.encode(replies);
                replies.truncate(replies.len() - 2000);
                return Err(Over);
            }
            _ => right.encode(replies),
        }
        Ok(())
    }

    fn unasked(&mut self, page: &[u8; PAGE_SIZE], replies: &mut Vec<u8>) {
        let (request, slot) = (RequestId(self.noise() % 64), SlotIndex(self.noise()));
        Frame::SendPage { request, slot, page }.encode(replies);
        let [npages, available] = [PageCount(self.noise() % 64), PageCount(self.noise())];
        Frame::Sized { request, npages, available }.encode(replies);
        for code in [ErrorCode::NotFound, ErrorCode::NoMemory, ErrorCode::Quota, ErrorCode::Unknown(77)] {
            let request = RequestId(1000 + self.noise() % 64);
            Frame::Error(ErrorReply { request, code, detail: self.noise() }).encode(replies);
        }
        // Of a kind that only a client sends.
        Frame::Request { request: RequestId(self.noise()), slot: SlotIndex(self.noise()) }.encode(replies);
        Frame::Welcome(Pool::default().welcome()).encode(replies);
    }

    /// Starts the flood of this connection if the lie asks for it. It lasts as long as the lie.
    fn flood(&mut self) {
        let lie = *self.shared.lie.lock().unwrap();
        if self.flooding || !matches!(lie, Lie::Flood | Lie::ErrorFlood) {
            return;
        }
        self.flooding = true;
        let mut frames = Vec::new();
        while frames.len() < 64 << 10 {
            self.flood_frame(lie).encode(&mut frames);
        }
        let (out, shared) = (Arc::clone(&self.out), Arc::clone(&self.shared));
        std::thread::spawn(move || {
            while *shared.lie.lock().unwrap() == lie && !shared.stop.load(SeqCst) {
                if out.lock().unwrap().write_all(&frames).is_err() {
                    return;
                }
                shared.told.fetch_add(1, SeqCst);
                // Allows replies to get in between.
                std::thread::yield_now();
            }
        });
    }

    fn flood_frame(&mut self, lie: Lie) -> Frame<'static> {
        let [kind, request, detail] = [self.noise(), self.noise(), self.noise()];
        let request = RequestId(request | 1 << 20);
        if lie == Lie::Flood {
            return match kind % 2 {
                0 => Frame::Request { request, slot: SlotIndex(detail) },
                _ => Frame::Sized { request, npages: PageCount(detail), available: PageCount(kind) },
            };
        }
        let codes = [ErrorCode::NotFound, ErrorCode::NoMemory, ErrorCode::Quota, ErrorCode::Unknown(99)];
        Frame::Error(ErrorReply { request, code: codes[kind as usize % codes.len()], detail })
    }
}

impl Pool {
    fn welcome(&self) -> Welcome {
        Welcome {
            version: VERSION,
            server_id: ServerId([7; 16]),
            pool_generation: PoolGeneration(7),
            npages: PageCount(self.npages),
            available: PageCount(1 << 20),
            quota: PageCount(1 << 20),
            sends_received: SendCount(self.sends),
        }
    }

    fn store(&mut self, slot: u32, page: &[u8; PAGE_SIZE]) {
        self.sends += 1;
        let before = self.slots.remove(&slot).map_or_else(|| Box::new(*page), |[page, _]| page);
        self.slots.insert(slot, [Box::new(*page), before]);
    }

    fn relocate(&mut self, from: u32, to: u32) {
        match self.slots.remove(&from) {
            Some(pages) => self.slots.insert(to, pages),
            None => self.slots.remove(&to),
        };
    }
}
