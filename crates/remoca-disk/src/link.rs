//! The connection to the memory server: bytes in and out, and the thread that makes connections.
//!
//! Owned by the I/O thread. Name look-up, connecting and the hello block, so a small thread does them and hands over an
//! established session; after that the socket does not block and only the I/O thread touches it. What waits to be sent
//! is bounded by the engine's send window and fetch limit. Frames go to the driver as they are; what they mean is the
//! engine's business.

use crate::endpoint::Endpoint;
use remoca_protocol::{
    DecodeError, ErrorCode, FRAME_BYTES_MAX, Frame, Hello, ReceiveBuffer, RequestId, Token, VERSIONS, VersionRange,
    Welcome, decode, send_page_header,
};
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// How long connecting and the hello may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// Bytes received in one system call at most.
const RECEIVE_BYTES: usize = 256 * 1024;
/// Frames taken before other events get their turn.
const FRAMES_PER_TURN: usize = 512;

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
    #[error("the memory server at {0} refused this session: {1:?}")]
    Refused(Endpoint, ErrorCode),
    #[error("what listens at {0} is no memory server: {1}")]
    Protocol(Endpoint, String),
}

/// What the connecting thread is asked for: one try after a pause.
struct Order {
    pause: Duration,
    epoch: u64,
}

type Answer = Result<(OwnedFd, Welcome), LinkError>;

/// What a look at the socket brought.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// All frames there were.
    Drained,
    /// There may be more: come back without waiting.
    More,
}

/// The link to one memory server.
pub struct ServerLink {
    endpoint: Endpoint,
    orders: Sender<Order>,
    answers: Receiver<Answer>,
    wake: Arc<OwnedFd>,
    session: Option<Session>,
    epoch: u64,
    backoff: Duration,
    waiting: bool,
    last_error: Option<String>,
}

struct Session {
    socket: File,
    since: Instant,
    receive: ReceiveBuffer,
    out: Vec<u8>,
    /// Bytes of `out` that are sent.
    sent: usize,
    /// Pages in `out` that the engine was not told about, and bytes sent towards the next one.
    pages_waiting: u32,
    bytes_towards_page: usize,
    writable: bool,
    /// Whether the driver was told to watch for the socket to become writable.
    watched: bool,
}

impl ServerLink {
    /// A link that begins to connect at once. `token` names the pool: random and secret.
    ///
    /// # Errors
    /// If the system has no eventfd or thread left.
    pub fn start(endpoint: Endpoint, token: Token) -> io::Result<Self> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (orders, order_queue) = channel();
        let (answer_queue, answers) = channel();
        let (thread_endpoint, thread_wake) = (endpoint.clone(), Arc::clone(&wake));
        std::thread::Builder::new().name("connect".into()).spawn(move || {
            connect_loop(&thread_endpoint, token, &order_queue, &answer_queue, &thread_wake);
        })?;
        let mut link = Self {
            endpoint,
            orders,
            answers,
            wake,
            session: None,
            epoch: 0,
            backoff: Duration::ZERO,
            waiting: false,
            last_error: None,
        };
        link.order();
        Ok(link)
    }

    /// Becomes readable when [`Self::take_session`] has something.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// The socket of the session, if there is one.
    pub fn socket_fd(&self) -> Option<BorrowedFd<'_>> {
        self.session.as_ref().map(|session| session.socket.as_fd())
    }

    /// The server's address.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Why the last try failed, while there is no session.
    pub fn last_error(&self) -> Option<&str> {
        self.last_error.as_deref()
    }

    /// A session that the connecting thread has established, with what the server said.
    pub fn take_session(&mut self) -> Option<Welcome> {
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        let answer = self.answers.try_recv().ok()?;
        self.waiting = false;
        match answer {
            Ok((socket, welcome)) => {
                self.last_error = None;
                tracing::info!("connected to the memory server at {}", self.endpoint);
                self.session = Some(Session {
                    socket: socket.into(),
                    since: Instant::now(),
                    receive: ReceiveBuffer::new(RECEIVE_BYTES),
                    out: Vec::new(),
                    sent: 0,
                    pages_waiting: 0,
                    bytes_towards_page: 0,
                    writable: true,
                    watched: false,
                });
                Some(welcome)
            }
            Err(error) => {
                let text = error.to_string();
                if self.last_error.as_ref() != Some(&text) {
                    tracing::warn!("{text} Reads go to the disk; trying again.");
                }
                self.last_error = Some(text);
                self.order();
                None
            }
        }
    }

    /// Ends the session (if there is one) and begins to connect again: at once if the session had lasted, after a pause
    /// that grows if it had not, so that a server that greets and then hangs up is not stormed.
    pub fn reconnect(&mut self, why: &str) {
        if let Some(session) = self.session.take() {
            if session.since.elapsed() >= BACKOFF_MAX {
                self.backoff = Duration::ZERO;
            }
            tracing::warn!("lost the memory server at {}: {why}. Reads go to the disk; reconnecting.", self.endpoint);
            self.last_error = Some(why.to_owned());
        }
        if !self.waiting {
            self.order();
        }
    }

    fn order(&mut self) {
        self.epoch += 1;
        self.waiting = true;
        // The thread lives as long as its channel; if it is gone, the cache stays off and the disk works on.
        let _ = self.orders.send(Order { pause: self.backoff, epoch: self.epoch });
        self.backoff = (self.backoff * 2).clamp(BACKOFF_MIN, BACKOFF_MAX);
    }

    /// Queues a frame; dropped without a session (the engine then hears of the disconnection first).
    pub fn send(&mut self, frame: &Frame<'_>) {
        if let Some(session) = &mut self.session {
            frame.encode(&mut session.out);
        }
    }

    /// Queues a SENDPAGE, the one copy of the page on this side.
    pub fn send_page(&mut self, slot: remoca_core::units::SlotIndex, page: &[u8]) {
        if let Some(session) = &mut self.session {
            session.out.extend_from_slice(&send_page_header(RequestId(0), slot));
            session.out.extend_from_slice(page);
            session.pages_waiting += 1;
        }
    }

    /// Whether to watch for the socket to become writable, if that changed since the last call.
    pub fn watch_change(&mut self) -> Option<bool> {
        let session = self.session.as_mut()?;
        let wanted = !session.writable;
        (std::mem::replace(&mut session.watched, wanted) != wanted).then_some(wanted)
    }

    /// The socket is writable again.
    pub fn note_writable(&mut self) {
        if let Some(session) = &mut self.session {
            session.writable = true;
        }
    }

    /// Sends what is queued, in one system call where the socket takes it. Number of pages that left.
    ///
    /// # Errors
    /// If the connection is lost.
    pub fn flush(&mut self) -> io::Result<u32> {
        match &mut self.session {
            Some(session) => session.flush(),
            None => Ok(0),
        }
    }

    /// Receives, and gives every frame to `take`.
    ///
    /// # Errors
    /// If the connection is lost, or the server does not keep to the protocol.
    pub fn receive(&mut self, mut take: impl FnMut(&Frame<'_>)) -> io::Result<Received> {
        let Some(session) = &mut self.session else { return Ok(Received::Drained) };
        let mut frames = 0;
        loop {
            while let Some(frame) = session.receive.take().map_err(protocol_error)? {
                take(&frame);
                frames += 1;
            }
            if frames >= FRAMES_PER_TURN {
                return Ok(Received::More);
            }
            let space = session.receive.space();
            let (asked, got) = (space.len(), rustix::io::read(&session.socket, space));
            match got {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection")),
                Ok(count) => {
                    session.receive.filled(count);
                    if count < asked && session.receive.peek().map_err(protocol_error)?.is_none() {
                        return Ok(Received::Drained);
                    }
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(Received::Drained),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Tells the server to free the pool, as far as it can be told without waiting.
    pub fn goodbye(&mut self) {
        if let Some(session) = &mut self.session {
            Frame::Bye.encode(&mut session.out);
            let _ = session.flush();
        }
    }
}

impl Session {
    fn flush(&mut self) -> io::Result<u32> {
        let mut left = 0;
        while self.writable && self.sent < self.out.len() {
            match rustix::io::write(&self.socket, &self.out[self.sent..]) {
                Ok(count) => {
                    self.sent += count;
                    self.bytes_towards_page += count;
                }
                Err(rustix::io::Errno::AGAIN) => self.writable = false,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if self.sent == self.out.len() {
            self.out.clear();
            (self.sent, self.bytes_towards_page) = (0, 0);
            left = std::mem::take(&mut self.pages_waiting);
        } else if self.sent > 1 << 20 {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        // Smaller frames in between make this an estimate; it is exact whenever the queue is empty.
        while self.bytes_towards_page >= FRAME_BYTES_MAX && self.pages_waiting > 1 {
            self.bytes_towards_page -= FRAME_BYTES_MAX;
            self.pages_waiting -= 1;
            left += 1;
        }
        Ok(left)
    }
}

fn protocol_error(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the server does not keep to the protocol: {error}"))
}

fn connect_loop(endpoint: &Endpoint, token: Token, orders: &Receiver<Order>, answers: &Sender<Answer>, wake: &OwnedFd) {
    while let Ok(order) = orders.recv() {
        std::thread::sleep(order.pause + jitter(order.pause));
        let answer = connect(endpoint, token, order.epoch);
        if answers.send(answer).is_err() {
            return;
        }
        let _ = rustix::io::write(wake, &1_u64.to_ne_bytes());
    }
}

/// Up to a quarter of `pause`, so that the VMs of a host do not come back in step. The clock's low digits are random
/// enough for that.
fn jitter(pause: Duration) -> Duration {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    pause * (now.subsec_micros() % 256) / 1024
}

/// Connects, says hello, and waits for the welcome.
///
/// # Errors
/// [`LinkError`], whose text says what to do.
pub fn connect(endpoint: &Endpoint, token: Token, epoch: u64) -> Result<(OwnedFd, Welcome), LinkError> {
    let unreachable = |error| LinkError::Unreachable(endpoint.clone(), error);
    let mut socket = File::from(endpoint.connect(CONNECT_TIMEOUT).map_err(unreachable)?);
    let mut hello = Vec::new();
    Frame::Hello(Hello { versions: VERSIONS, token, epoch }).encode(&mut hello);
    socket.write_all(&hello).map_err(unreachable)?;
    let welcome = read_welcome(&mut socket, endpoint)?;
    rustix::io::ioctl_fionbio(&socket, true).map_err(|error| unreachable(error.into()))?;
    Ok((socket.into(), welcome))
}

/// Reads exactly one frame: what follows belongs to the session.
fn read_welcome(socket: &mut File, endpoint: &Endpoint) -> Result<Welcome, LinkError> {
    let mut bytes = Vec::new();
    let deadline = Instant::now() + CONNECT_TIMEOUT;
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
            Some((other, _)) => return Err(LinkError::Protocol(endpoint.clone(), format!("it says {other:?}"))),
            None => {}
        }
        if Instant::now() >= deadline {
            return Err(LinkError::Silent(endpoint.clone()));
        }
        let mut byte = [0];
        match socket.read(&mut byte) {
            Ok(1) => bytes.push(byte[0]),
            Ok(_) => {
                return Err(LinkError::Protocol(endpoint.clone(), "it closed the connection without a word".into()));
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return Err(LinkError::Silent(endpoint.clone()));
            }
            Err(error) => return Err(LinkError::Unreachable(endpoint.clone(), error)),
        }
    }
}
