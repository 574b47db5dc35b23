//! An NBD server in the test's own process that can lose its cache, and treats each request as the test says.
//!
//! One thread for each connection; requests are executed one after the other. Written data stay in the cache until a
//! flush, or until the write itself has `FUA`. [`Verdict::LosePower`] discards the cache and cuts all connections.

use remoca_io::sizes;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const OPTION_REPLY_MAGIC: u64 = 0x3_e889_0455_65a9;
const OPTION_GO: u32 = 7;
const REPLY_UNSUPPORTED: u32 = 1 << 31 | 1;
const REPLY_MAGIC: u32 = 0x6744_6698;
const FLAG_FUA: u16 = 1;

/// The abilities that a server offers.
#[derive(Clone, Copy, Debug)]
pub struct NbdOffer {
    pub size: u64,
    pub fua: bool,
    pub flush: bool,
    pub trim: bool,
    pub write_zeroes: bool,
    /// Smallest and largest request, in bytes.
    pub block: u32,
    pub payload_max: u32,
}

impl Default for NbdOffer {
    /// Returns an offer of all abilities, with 1 MiB in sectors of 512 bytes.
    fn default() -> Self {
        let (fua, flush, trim, write_zeroes) = (true, true, true, true);
        Self { size: 1 << 20, fua, flush, trim, write_zeroes, block: 512, payload_max: 32 << 20 }
    }
}

impl NbdOffer {
    fn flags(&self) -> u16 {
        let bit = |has: bool, bit: u16| u16::from(has) << bit;
        1 | bit(self.flush, 2) | bit(self.fua, 3) | bit(self.trim, 5) | bit(self.write_zeroes, 6)
    }

    /// Returns whether a client of this server may send `request`.
    fn allows(&self, request: &NbdRequested) -> bool {
        let is_within = request.offset + u64::from(request.len) <= self.size;
        let is_aligned = request.offset.is_multiple_of(self.block.into()) && request.len.is_multiple_of(self.block);
        let is_known = match request.command {
            NbdCommand::Read | NbdCommand::Write => request.len <= self.payload_max,
            NbdCommand::Flush => self.flush,
            NbdCommand::Trim => self.trim,
            NbdCommand::WriteZeroes => self.write_zeroes,
        };
        is_within && is_aligned && is_known && (self.fua || !request.fua)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NbdCommand {
    Read,
    Write,
    Flush,
    Trim,
    WriteZeroes,
}

/// A request as it was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdRequested {
    /// Counts connections from 1.
    pub connection: u32,
    pub command: NbdCommand,
    pub fua: bool,
    pub offset: u64,
    pub len: u32,
}

/// How a request is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Do,
    /// It fails with this error number, and is not executed.
    Fail(u32),
    /// It is neither executed nor answered, the cache is lost, and all connections break.
    LosePower,
}

type Rule = Box<dyn FnMut(&NbdRequested) -> Verdict + Send>;

struct State {
    offer: NbdOffer,
    rule: Rule,
    cache: Vec<u8>,
    disk: Vec<u8>,
    log: Vec<NbdRequested>,
    connections: Vec<UnixStream>,
}

/// The server; it listens as long as the process lives.
#[derive(Clone)]
pub struct VolatileNbd(Arc<Mutex<State>>);

impl VolatileNbd {
    /// Listens at `socket`, with a disk of zeroes.
    ///
    /// # Panics
    /// If the socket cannot be made.
    pub fn start(socket: &Path, offer: NbdOffer) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let disk = vec![0; usize::try_from(offer.size).unwrap()];
        let state = State {
            offer,
            rule: Box::new(|_| Verdict::Do),
            cache: disk.clone(),
            disk,
            log: Vec::new(),
            connections: Vec::new(),
        };
        let server = Self(Arc::new(Mutex::new(state)));
        let accepting = server.clone();
        std::thread::spawn(move || {
            for (stream, number) in listener.incoming().zip(1..) {
                let (stream, server) = (stream.unwrap(), accepting.clone());
                server.state().connections.push(stream.try_clone().unwrap());
                // A client may leave at any moment.
                std::thread::spawn(move || server.serve(stream, number));
            }
        });
        server
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the offer for clients that connect from now on.
    pub fn set_offer(&self, offer: NbdOffer) {
        self.state().offer = offer;
    }

    /// Asks `rule` about each request from now on.
    pub fn set_rule(&self, rule: impl FnMut(&NbdRequested) -> Verdict + Send + 'static) {
        self.state().rule = Box::new(rule);
    }

    /// Discards the cache, and breaks all connections.
    pub fn lose_power(&self) {
        self.state().lose_power();
    }

    /// Writes `data` to the disk as another program would.
    pub fn overwrite(&self, offset: usize, data: &[u8]) {
        let mut state = self.state();
        state.cache[offset..offset + data.len()].copy_from_slice(data);
        state.disk[offset..offset + data.len()].copy_from_slice(data);
    }

    /// Returns the content that would remain after a power failure.
    pub fn disk(&self) -> Vec<u8> {
        self.state().disk.clone()
    }

    /// Returns the requests that were received since the last call.
    pub fn take_log(&self) -> Vec<NbdRequested> {
        std::mem::take(&mut self.state().log)
    }

    fn serve(&self, mut stream: UnixStream, connection: u32) -> io::Result<()> {
        let offer = self.state().offer;
        shake_hands(&mut stream, &offer)?;
        loop {
            let mut header = [0; 28];
            stream.read_exact(&mut header)?;
            let word = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
            let short = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
            let command = match short(6) {
                0 => NbdCommand::Read,
                1 => NbdCommand::Write,
                3 => NbdCommand::Flush,
                4 => NbdCommand::Trim,
                6 => NbdCommand::WriteZeroes,
                _ => return Ok(()),
            };
            let (cookie, len) = (&header[8..16], word(24));
            let offset = u64::from(word(16)) << 32 | u64::from(word(20));
            let mut payload = vec![0; if command == NbdCommand::Write { len as usize } else { 0 }];
            stream.read_exact(&mut payload)?;
            let request = NbdRequested { connection, command, fua: short(4) & FLAG_FUA != 0, offset, len };
            let Some((error, data)) = self.state().handle(&request, &offer, &payload) else { return Ok(()) };
            let head = [&REPLY_MAGIC.to_be_bytes()[..], &error.to_be_bytes(), cookie].concat();
            stream.write_all(&[head, data].concat())?;
        }
    }
}

impl State {
    fn lose_power(&mut self) {
        self.cache = self.disk.clone();
        for connection in self.connections.drain(..) {
            // The connection may be closed already.
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Executes or refuses a request. Returns error number and payload of the reply, or `None` if there is no reply.
    fn handle(&mut self, request: &NbdRequested, offer: &NbdOffer, payload: &[u8]) -> Option<(u32, Vec<u8>)> {
        self.log.push(*request);
        match (self.rule)(request) {
            _ if !offer.allows(request) => Some((22, Vec::new())),
            Verdict::Do => Some((0, self.execute(request, payload))),
            Verdict::Fail(error) => Some((error, Vec::new())),
            Verdict::LosePower => {
                self.lose_power();
                None
            }
        }
    }

    fn execute(&mut self, request: &NbdRequested, payload: &[u8]) -> Vec<u8> {
        let start = usize::try_from(request.offset).unwrap();
        let range: Range<usize> = start..start + request.len as usize;
        match request.command {
            NbdCommand::Read => return self.cache[range].to_vec(),
            NbdCommand::Write => self.cache[range.clone()].copy_from_slice(payload),
            NbdCommand::WriteZeroes => self.cache[range.clone()].fill(0),
            NbdCommand::Trim => {}
            NbdCommand::Flush => self.disk.clone_from(&self.cache),
        }
        if request.fua {
            self.disk[range.clone()].copy_from_slice(&self.cache[range]);
        }
        Vec::new()
    }
}

fn shake_hands(stream: &mut UnixStream, offer: &NbdOffer) -> io::Result<()> {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    stream.read_exact(&mut [0; 4])?;
    let reply = |option: u32, code: u32, data: &[u8]| {
        let len = sizes::short(data.len());
        let magic = OPTION_REPLY_MAGIC.to_be_bytes();
        [&magic[..], &option.to_be_bytes(), &code.to_be_bytes(), &len.to_be_bytes(), data].concat()
    };
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header)?;
        let word = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        stream.read_exact(&mut vec![0; word(12) as usize])?;
        match word(8) {
            OPTION_GO => break,
            other => stream.write_all(&reply(other, REPLY_UNSUPPORTED, &[]))?,
        }
    }
    let reply = |code, data: &[u8]| reply(OPTION_GO, code, data);
    let export = [&[0, 0][..], &offer.size.to_be_bytes(), &offer.flags().to_be_bytes()].concat();
    let sizes = [offer.block, offer.block.max(4096), offer.payload_max].map(u32::to_be_bytes).concat();
    let blocks = [&[0, 3][..], &sizes].concat();
    stream.write_all(&[reply(3, &export), reply(3, &blocks), reply(1, &[])].concat())
}
