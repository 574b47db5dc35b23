//! The start and the end of a connection to a memory server, on threads of their own: both may block.

use super::memory::{FileId, MemoryError, Passed, PoolMemory};
use crate::state::RosterEntry;
use remoca_core::engine::ServerNumber;
use remoca_core::units::PAGE_SIZE_U64;
use remoca_io::address::{Endpoint, limit_unsent};
use remoca_io::passed::{AnswerError, MappedAnswer, receive_mapped_answer};
use remoca_protocol::control::TOO_MANY_CLIENTS;
use remoca_protocol::{ErrorCode, Frame, Hello, MAPPED_VERSIONS, Token, VERSIONS, VersionRange, Welcome, decode};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// Time limit for connecting, for the hello, and for saying goodbye.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes that a socket takes before it has sent them. A REQUEST waits for these, so they are few.
const UNSENT_BYTES: u32 = 16 << 10;
/// Time limit for a former process to end that has the memory of a mapped pool.
const OWNER_TIMEOUT: Duration = Duration::from_secs(2);

/// Access to memory servers. No method blocks its caller.
pub trait Network: Send + Sync {
    /// Returns a random token for a pool.
    ///
    /// # Errors
    /// If the system provides no random numbers.
    fn token(&self) -> io::Result<Token>;

    /// Starts to connect and to say hello. The outcome goes to `answer`.
    fn connect(&self, endpoint: Endpoint, token: Token, epoch: u64, answer: AnswerTo);

    /// Sends the bytes that are `left` of a session in good order, and closes it.
    fn say_goodbye(&self, socket: OwnedFd, left: Vec<u8>);
}

/// Connection to a server that has said welcome.
pub struct Connected {
    /// Non-blocking socket from which the welcome has been read.
    pub socket: OwnedFd,
    pub welcome: Welcome,
    /// Memory of a mapped pool; `None` if the pool is not mapped.
    pub memory: Option<Passed>,
}

/// Outcome of an attempt to connect.
pub type Answer = Result<Connected, LinkError>;

/// Who wants the answer to an attempt to connect.
#[derive(Clone, Copy, Debug)]
pub(super) enum Asker {
    Engine,
    /// The link itself, for a session whose server is away.
    Link,
    /// The link itself, to give a pool back.
    GivingBack,
}

/// Destination of the answer to an attempt to connect.
pub struct AnswerTo {
    pub(super) server: ServerNumber,
    pub(super) asker: Asker,
    /// Memory of a mapped pool that this process owns.
    pub(super) owned: Option<FileId>,
    pub(super) queue: Sender<(ServerNumber, Asker, Answer)>,
    pub(super) wake: Arc<OwnedFd>,
}

impl AnswerTo {
    /// Makes this process the owner of the memory that came with a welcome, unless it is that which it has owned before. Waits up to
    /// `patience` for a former process to end.
    ///
    /// # Errors
    /// As for [`PoolMemory::take`].
    pub fn own(&self, memory: OwnedFd, patience: Duration) -> Result<Passed, MemoryError> {
        PoolMemory::take(memory, self.owned, patience)
    }

    /// Passes the answer to the I/O thread.
    pub fn give(self, answer: Answer) {
        let _ = self.queue.send((self.server, self.asker, answer));
        remoca_io::wake::raise(&*self.wake);
    }
}

/// The network of this host, with a thread for each attempt and each goodbye.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostNetwork;

impl Network for HostNetwork {
    fn token(&self) -> io::Result<Token> {
        let mut token = [0; 16];
        let count = rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty())?;
        if count == token.len() {
            Ok(Token(token))
        } else {
            Err(io::Error::other("the system gives too few random numbers"))
        }
    }

    fn connect(&self, endpoint: Endpoint, token: Token, epoch: u64, answer: AnswerTo) {
        let AnswerTo { server, asker, owned, queue, wake } = &answer;
        let (server, asker, owned, queue) = (*server, *asker, *owned, queue.clone());
        let without_thread = AnswerTo { server, asker, owned, queue, wake: Arc::clone(wake) };
        let failed = endpoint.clone();
        let thread = std::thread::Builder::new().name("connect".into());
        if let Err(error) = thread.spawn(move || {
            let connected = connect_and_own(&endpoint, token, epoch, &answer);
            answer.give(connected);
        }) {
            without_thread.give(Err(LinkError::Unreachable(failed, error)));
        }
    }

    fn say_goodbye(&self, socket: OwnedFd, left: Vec<u8>) {
        say_goodbye(socket.into(), left);
    }
}

/// Gives back the pools that a previous process has at these servers, as far as the servers answer now. Does not wait.
pub fn give_back(pools: impl IntoIterator<Item = RosterEntry>) {
    for RosterEntry { endpoint, token, epoch, .. } in pools {
        let give_back = move || match connect(&endpoint, token, epoch.saturating_add(1)) {
            Ok((socket, ..)) => say_goodbye(socket.into(), bye()),
            Err(error) => tracing::debug!("a pool that is not used any more is left to its grace time: {error}"),
        };
        // Without a thread, the server frees the pool after its grace time.
        let _ = std::thread::Builder::new().name("give back".into()).spawn(give_back);
    }
}

/// Gives back the pool that a process that is gone has at a server. Returns the size that the pool had, in bytes; it is 0 if
/// there was none.
///
/// # Errors
/// [`LinkError`], whose text says what to do. The server then frees the pool after its grace time.
pub fn return_pool(pool: &RosterEntry) -> Result<u64, LinkError> {
    let RosterEntry { endpoint, token, epoch, .. } = pool;
    // Its own attempts to connect may not all be recorded.
    let (socket, welcome, _) = connect(endpoint, *token, epoch.saturating_add(1))?;
    farewell(socket.into(), &bye()).map_err(|error| LinkError::Lost(endpoint.clone(), error.to_string()))?;
    Ok(u64::from(welcome.npages.0) * PAGE_SIZE_U64)
}

/// Asks a memory server what memory it could give a new pool, in bytes, and measures how long its answer takes.
///
/// # Errors
/// [`LinkError`], whose text says what to do.
pub fn probe(endpoint: &Endpoint) -> Result<(u64, Duration), LinkError> {
    let token = HostNetwork.token().map_err(|error| LinkError::Unreachable(endpoint.clone(), error))?;
    let started = Instant::now();
    let (socket, welcome, _) = connect(endpoint, token, 0)?;
    let taken = started.elapsed();
    say_goodbye(socket.into(), bye());
    Ok((u64::from(welcome.available.0.min(welcome.quota.0)) * PAGE_SIZE_U64, taken))
}

/// Returns the encoded BYE frame, which gives a pool back.
pub(super) fn bye() -> Vec<u8> {
    let mut bytes = Vec::new();
    Frame::Bye.encode(&mut bytes);
    bytes
}

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("the memory server at {0} cannot be reached: {1}. Is `remoca serve` running there?")]
    Unreachable(Endpoint, #[source] io::Error),
    #[error(
        "the memory server at {endpoint} speaks protocol versions {server_low} to {server_high}, this program {own_low} to {own_high}: upgrade the older one"
    )]
    Version { endpoint: Endpoint, server_low: u16, server_high: u16, own_low: u16, own_high: u16 },
    #[error("the memory server at {0} accepts connections, but does not answer: is it stopped, or overloaded?")]
    Silent(Endpoint),
    #[error(
        "the memory server at {0} closed the connection at once. Is `remoca serve` running there, or is it behind a tunnel whose other end is down?"
    )]
    Closed(Endpoint),
    #[error("the memory server at {} refused this session: {}", .0, refusal(.1))]
    Refused(Endpoint, ErrorCode),
    #[error("what listens at {0} is no memory server: {1}")]
    Protocol(Endpoint, String),
    #[error(
        "the memory server at {0} has no pools whose memory it shares: upgrade it, start it without huge pages, or reach it by unix: in place of local:"
    )]
    NotMapped(Endpoint),
    #[error("the memory that the server at {0} shares cannot be used: {1}")]
    Memory(Endpoint, #[source] MemoryError),
    #[error("lost the memory server at {0}: {1}")]
    Lost(Endpoint, String),
}

/// Returns why a server refuses a session.
fn refusal(code: &ErrorCode) -> String {
    match code {
        ErrorCode::Busy => TOO_MANY_CLIENTS.into(),
        other => format!("{other:?}"),
    }
}

/// Connects, and makes this process the owner of the memory if the pool is mapped.
fn connect_and_own(endpoint: &Endpoint, token: Token, epoch: u64, answer: &AnswerTo) -> Answer {
    let (socket, welcome, memory) = connect(endpoint, token, epoch)?;
    let memory = memory
        .map(|memory| answer.own(memory, OWNER_TIMEOUT))
        .transpose()
        .map_err(|error| LinkError::Memory(endpoint.clone(), error))?;
    Ok(Connected { socket, welcome, memory })
}

/// Connects, says hello, and waits for the welcome, with which the memory of a mapped pool comes.
///
/// # Errors
/// [`LinkError`], whose text says what to do.
fn connect(endpoint: &Endpoint, token: Token, epoch: u64) -> Result<(OwnedFd, Welcome, Option<OwnedFd>), LinkError> {
    let unreachable = |error| LinkError::Unreachable(endpoint.clone(), error);
    let mut socket = File::from(endpoint.connect(TIMEOUT).map_err(unreachable)?);
    let is_mapped = matches!(endpoint, Endpoint::Local(_));
    let versions = if is_mapped { MAPPED_VERSIONS } else { VERSIONS };
    let mut hello = Vec::new();
    Frame::Hello(Hello { versions, token, epoch }).encode(&mut hello);
    socket.write_all(&hello).map_err(unreachable)?;
    let (welcome, memory) = match is_mapped {
        true => receive_memory(&socket, endpoint)?,
        false => (read_welcome(&mut socket, endpoint)?, None),
    };
    rustix::io::ioctl_fionbio(&socket, true).map_err(|error| unreachable(error.into()))?;
    if let Endpoint::Tcp(_) = endpoint
        && let Err(error) = limit_unsent(socket.as_fd(), UNSENT_BYTES)
    {
        tracing::debug!(%error, "requests will wait behind pages that the kernel has taken");
    }
    Ok((socket.into(), welcome, memory))
}

/// Receives the welcome of a mapped session, and the memory that comes with it.
fn receive_memory(socket: &File, endpoint: &Endpoint) -> Result<(Welcome, Option<OwnedFd>), LinkError> {
    match receive_mapped_answer(socket, TIMEOUT) {
        Ok(MappedAnswer::Welcome { welcome, memory }) => Ok((welcome, Some(memory))),
        Ok(MappedAnswer::Refused(refusal)) => Err(match refusal.code {
            ErrorCode::VersionMismatch | ErrorCode::NOT_MAPPABLE => LinkError::NotMapped(endpoint.clone()),
            code => LinkError::Refused(endpoint.clone(), code),
        }),
        Err(AnswerError::Io(error)) if error.kind() == io::ErrorKind::TimedOut => {
            Err(LinkError::Silent(endpoint.clone()))
        }
        Err(AnswerError::Io(error)) => Err(LinkError::Unreachable(endpoint.clone(), error)),
        Err(error) => Err(LinkError::Protocol(endpoint.clone(), error.to_string())),
    }
}

/// Reads exactly one frame, the welcome. The bytes after it belong to the session.
fn read_welcome(socket: &mut File, endpoint: &Endpoint) -> Result<Welcome, LinkError> {
    let mut bytes = Vec::new();
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let frame = decode(&bytes).map_err(|error| LinkError::Protocol(endpoint.clone(), error.to_string()))?;
        match frame {
            Some((Frame::Welcome(welcome), _)) if (VERSIONS.lowest..=VERSIONS.highest).contains(&welcome.version) => {
                return Ok(welcome);
            }
            Some((Frame::Error(error), _)) if error.code == ErrorCode::VersionMismatch => {
                let server = VersionRange::from_detail(error.detail);
                return Err(LinkError::Version {
                    endpoint: endpoint.clone(),
                    server_low: server.lowest,
                    server_high: server.highest,
                    own_low: VERSIONS.lowest,
                    own_high: VERSIONS.highest,
                });
            }
            Some((Frame::Error(error), _)) => return Err(LinkError::Refused(endpoint.clone(), error.code)),
            Some(_) => {
                return Err(LinkError::Protocol(endpoint.clone(), "it answers a hello with something else".into()));
            }
            None => {}
        }
        if Instant::now() >= deadline {
            return Err(LinkError::Silent(endpoint.clone()));
        }
        let mut byte = [0];
        match socket.read(&mut byte) {
            Ok(1) => bytes.push(byte[0]),
            Ok(_) if bytes.is_empty() => return Err(LinkError::Closed(endpoint.clone())),
            Ok(_) => {
                return Err(LinkError::Protocol(endpoint.clone(), "it closed the connection within its answer".into()));
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return Err(LinkError::Silent(endpoint.clone()));
            }
            Err(error) => return Err(LinkError::Unreachable(endpoint.clone(), error)),
        }
    }
}

/// Sends the rest of a session, which ends with a BYE, so that the pool is given back at once. Then waits for the
/// server to close: if this side closed before everything was read, the BYE could be lost. Runs on a thread of its own.
fn say_goodbye(socket: File, rest: Vec<u8>) {
    // Failures do not matter: the server frees the pool of a client that does not come back.
    let _ = std::thread::Builder::new().name("goodbye".into()).spawn(move || farewell(socket, &rest));
}

fn farewell(mut socket: File, mut rest: &[u8]) -> io::Result<()> {
    rustix::io::ioctl_fionbio(&socket, false)?;
    for timeout in [rustix::net::sockopt::Timeout::Recv, rustix::net::sockopt::Timeout::Send] {
        rustix::net::sockopt::set_socket_timeout(&socket, timeout, Some(TIMEOUT))?;
    }
    // A server that reads or sends a byte now and then must not keep the thread.
    let deadline = Instant::now() + TIMEOUT;
    while !rest.is_empty() && Instant::now() < deadline {
        let count = socket.write(rest)?;
        rest = &rest[count..];
    }
    let mut piece = vec![0; 64 << 10];
    while Instant::now() < deadline && socket.read(&mut piece)? > 0 {}
    Ok(())
}
