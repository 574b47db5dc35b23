//! The link to an NBD server: connecting, the handshake, and reconnecting, without ever blocking.
//!
//! Owned by `nbd`. It has one descriptor for its whole life, an epoll instance that contains the current socket, if
//! there is one. Names are resolved once, at the start.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use slab::Slab;

use super::nbd_connection::{Connection, Lost, TaskReply};
use super::nbd_protocol::{Export, Handshake, HandshakeError};
use super::nbd_task::NbdTask;
use super::nbd_uri::NbdAddress;

/// The longest that a connection attempt with its handshake may take.
const ATTEMPT_TIME_MAX: Duration = Duration::from_secs(10);
/// A TCP peer that has not acknowledged anything for this long counts as gone.
const TCP_SILENCE_MS_MAX: u32 = 30_000;
const TCP_KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const TCP_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// Where to connect to.
#[derive(Clone, Debug)]
pub(super) enum Address {
    Tcp(SocketAddr),
    Unix(SocketAddrUnix),
}

impl Address {
    /// Resolves all addresses of a server. Blocks.
    pub(super) fn resolve(server: &NbdAddress) -> io::Result<Vec<Address>> {
        match server {
            NbdAddress::Unix(path) => Ok(vec![Address::Unix(SocketAddrUnix::new(path)?)]),
            NbdAddress::Tcp { host, port } => {
                let addresses: Vec<_> = (host.as_str(), *port).to_socket_addrs()?.map(Address::Tcp).collect();
                if addresses.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(addresses) }
            }
        }
    }

    /// Starts to connect, and returns the socket.
    fn connect(&self) -> rustix::io::Result<OwnedFd> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (socket, outcome) = match self {
            Address::Unix(address) => {
                let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
                let outcome = rustix::net::connect(&socket, address);
                (socket, outcome)
            }
            Address::Tcp(address) => {
                let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
                let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
                sockopt::set_tcp_nodelay(&socket, true)?;
                sockopt::set_socket_keepalive(&socket, true)?;
                sockopt::set_tcp_keepidle(&socket, TCP_KEEPALIVE_IDLE)?;
                sockopt::set_tcp_keepintvl(&socket, TCP_KEEPALIVE_INTERVAL)?;
                sockopt::set_tcp_user_timeout(&socket, TCP_SILENCE_MS_MAX)?;
                let outcome = rustix::net::connect(&socket, address);
                (socket, outcome)
            }
        };
        match outcome {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket),
            Err(errno) => Err(errno),
        }
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    #[error(transparent)]
    Lost(#[from] Lost),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("no answer within {} seconds", ATTEMPT_TIME_MAX.as_secs())]
    TimedOut,
}

impl From<rustix::io::Errno> for LinkError {
    fn from(errno: rustix::io::Errno) -> Self {
        LinkError::Lost(errno.into())
    }
}

pub(super) struct Link {
    addresses: Vec<Address>,
    next_address: usize,
    export_name: String,
    ready: OwnedFd,
    state: LinkState,
    /// Whether the socket is watched for room to send.
    watches_output: bool,
}

enum LinkState {
    Down,
    Attempting(Attempt),
    Up(Connection),
}

struct Attempt {
    socket: OwnedFd,
    handshake: Handshake,
    input: Vec<u8>,
    output: Vec<u8>,
    deadline: Instant,
}

impl Link {
    pub(super) fn new(addresses: Vec<Address>, export_name: &str) -> io::Result<Self> {
        let ready = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self {
            addresses,
            next_address: 0,
            export_name: export_name.to_owned(),
            ready,
            state: LinkState::Down,
            watches_output: false,
        })
    }

    pub(super) fn export_name(&self) -> &str {
        &self.export_name
    }

    pub(super) fn event_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }

    pub(super) fn connection(&mut self) -> Option<&mut Connection> {
        match &mut self.state {
            LinkState::Up(connection) => Some(connection),
            LinkState::Down | LinkState::Attempting(_) => None,
        }
    }

    /// Takes over a connection that another program made. It must be idle, between two requests.
    pub(super) fn adopt(&mut self, socket: OwnedFd, now: Instant) -> io::Result<()> {
        sockopt::socket_type(&socket)?;
        epoll::add(&self.ready, &socket, EventData::new_u64(0), EventFlags::IN)?;
        self.state = LinkState::Up(Connection::new(socket, now));
        Ok(())
    }

    /// Returns the socket if no bytes are outstanding in either direction. Returns `None` otherwise, or if the link is
    /// not up.
    pub(super) fn idle_connection(&self) -> Option<BorrowedFd<'_>> {
        match &self.state {
            LinkState::Up(connection) if connection.is_idle() => Some(connection.socket()),
            LinkState::Up(_) | LinkState::Down | LinkState::Attempting(_) => None,
        }
    }

    /// Returns the addresses of a TCP server; there are none for a Unix socket.
    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        let tcp = |address: &Address| match address {
            Address::Tcp(address) => Some(*address),
            Address::Unix(_) => None,
        };
        self.addresses.iter().filter_map(tcp).collect()
    }

    /// Returns the deadline of the current attempt, or `None` if there is no attempt.
    pub(super) fn attempt_deadline(&self) -> Option<Instant> {
        match &self.state {
            LinkState::Attempting(attempt) => Some(attempt.deadline),
            LinkState::Down | LinkState::Up(_) => None,
        }
    }

    /// Closes the connection or ends the attempt, if there is one. Closing also removes the socket from the epoll set.
    pub(super) fn close(&mut self) {
        self.state = LinkState::Down;
    }

    /// Starts to connect to the next address. [`Self::advance_attempt`] continues the attempt.
    pub(super) fn start_attempt(&mut self, now: Instant) -> Result<(), LinkError> {
        self.close();
        let address = &self.addresses[self.next_address % self.addresses.len()];
        self.next_address = self.next_address.wrapping_add(1);
        let socket = address.connect()?;
        epoll::add(&self.ready, &socket, EventData::new_u64(0), EventFlags::IN)?;
        self.watches_output = false;
        self.state = LinkState::Attempting(Attempt {
            socket,
            handshake: Handshake::new(&self.export_name),
            input: Vec::new(),
            output: Vec::new(),
            deadline: now + ATTEMPT_TIME_MAX,
        });
        Ok(())
    }

    /// Continues an attempt to connect, if there is one. Returns the export when the link has come up, or `None`
    /// before.
    pub(super) fn advance_attempt(&mut self, now: Instant) -> Result<Option<Export>, LinkError> {
        let LinkState::Attempting(attempt) = &mut self.state else { return Ok(None) };
        let Some(export) = attempt.advance()? else {
            if attempt.deadline <= now {
                return Err(LinkError::TimedOut);
            }
            let has_output = !attempt.output.is_empty();
            self.watch_output(has_output)?;
            return Ok(None);
        };
        if let LinkState::Attempting(attempt) = std::mem::replace(&mut self.state, LinkState::Down) {
            self.state = LinkState::Up(Connection::new(attempt.socket, now));
        }
        Ok(Some(export))
    }

    /// Sends and receives on a link that is up.
    pub(super) fn transfer(
        &mut self,
        tasks: &mut Slab<NbdTask>,
        replies: &mut Vec<TaskReply>,
        direction: Direction,
    ) -> Result<(), LinkError> {
        let LinkState::Up(connection) = &mut self.state else { return Ok(()) };
        if direction == Direction::Both {
            connection.receive(tasks, replies)?;
        }
        connection.send(tasks)?;
        let has_output = connection.has_output();
        self.watch_output(has_output)?;
        Ok(())
    }

    fn watch_output(&mut self, wanted: bool) -> Result<(), LinkError> {
        if wanted == self.watches_output {
            return Ok(());
        }
        let socket = match &self.state {
            LinkState::Down => return Ok(()),
            LinkState::Attempting(attempt) => attempt.socket.as_fd(),
            LinkState::Up(connection) => connection.socket(),
        };
        let flags = if wanted { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
        epoll::modify(&self.ready, socket, EventData::new_u64(0), flags)?;
        self.watches_output = wanted;
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Out,
    Both,
}

impl Attempt {
    fn advance(&mut self) -> Result<Option<Export>, LinkError> {
        let mut chunk = [0; 4096];
        loop {
            match rustix::io::read(&self.socket, &mut chunk) {
                Ok(0) => return Err(Lost::Closed.into()),
                Ok(len) => self.input.extend_from_slice(&chunk[..len]),
                // Not connected yet, or nothing received yet.
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
            if let Some(export) = self.handshake.advance(&mut self.input, &mut self.output)? {
                // Nothing may follow before the first request.
                return if self.input.is_empty() {
                    Ok(Some(export))
                } else {
                    Err(Lost::Protocol("it talks before it is asked").into())
                };
            }
        }
        self.send()?;
        Ok(None)
    }

    fn send(&mut self) -> Result<(), LinkError> {
        while !self.output.is_empty() {
            match rustix::net::send(&self.socket, &self.output, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(sent) => drop(self.output.drain(..sent)),
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}
