//! Sockets on which NBD clients arrive.

use remoca_io::address::{Endpoint, not_to_listen};
use remoca_io::socket::{SocketError, SocketPath, SocketSource};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_COUNT: u32 = 3;
const USER_TIMEOUT_MS: u32 = 30_000;

/// Why a listening socket cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error(transparent)]
    Path(#[from] SocketError),
    #[error("cannot listen on tcp:{address}; choose another address, or stop who has it")]
    Tcp { address: String, source: io::Error },
    #[error("a descriptor that was passed is no listening stream socket of the Unix or the Internet families")]
    WrongDescriptor,
    #[error("cannot use a socket that was passed")]
    Descriptor(#[source] io::Error),
}

/// A listening socket. A socket that this program made in the file system is removed at the end.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: Option<SocketPath>,
}

impl Listener {
    /// Listens on `endpoint`. Replaces a Unix socket that no process listens on any longer. Its owner and members of `group`
    /// may connect to a Unix socket.
    ///
    /// # Errors
    /// If the address is in use or cannot be listened on, or the socket cannot be given to `group`.
    pub fn bind(endpoint: &Endpoint, group: Option<u32>) -> Result<Self, ListenError> {
        match endpoint {
            Endpoint::Unix(path) => match SocketSource::bind(path, group)? {
                SocketSource::Listener { listener, path } => Self::new(listener.into(), path),
                SocketSource::Stream(_) => Err(ListenError::WrongDescriptor),
            },
            Endpoint::Tcp(address) => {
                let tcp_error = |source| ListenError::Tcp { address: address.clone(), source };
                Self::new(TcpListener::bind(address).map_err(tcp_error)?.into(), None)
            }
            Endpoint::Local(path) => Err(SocketError::Bind { path: path.clone(), source: not_to_listen() }.into()),
        }
    }

    /// Takes over a listening socket that was made by the program that started this one.
    ///
    /// # Errors
    /// If the descriptor is not a valid listening socket.
    pub fn from_descriptor(descriptor: OwnedFd) -> Result<Self, ListenError> {
        let families = [AddressFamily::UNIX, AddressFamily::INET, AddressFamily::INET6];
        let is_fit = sockopt::socket_domain(&descriptor).is_ok_and(|family| families.contains(&family))
            && sockopt::socket_type(&descriptor) == Ok(SocketType::STREAM)
            && sockopt::socket_acceptconn(&descriptor) == Ok(true);
        if is_fit { Self::new(descriptor, None) } else { Err(ListenError::WrongDescriptor) }
    }

    /// Takes over a listening socket that a previous program of this process made.
    ///
    /// # Errors
    /// If the descriptor is not a valid listening socket.
    pub fn adopt(descriptor: OwnedFd, path: Option<(PathBuf, u64)>) -> Result<Self, ListenError> {
        match path {
            None => Self::from_descriptor(descriptor),
            path => match SocketSource::adopt(descriptor, path)? {
                SocketSource::Listener { listener, path } => Self::new(listener.into(), path),
                SocketSource::Stream(_) => Err(ListenError::WrongDescriptor),
            },
        }
    }

    /// Gives a socket that a previous program made to `group`, as [`Self::bind`] would.
    ///
    /// # Errors
    /// If that is not allowed. The socket is as before then.
    pub fn regroup(&self, group: Option<u32>) -> Result<(), SocketError> {
        self.path.as_ref().map_or(Ok(()), |path| path.regroup(group))
    }

    /// Returns path and inode of a socket that this program made in the file system, or `None` for any other socket.
    pub fn name(&self) -> Option<(PathBuf, u64)> {
        self.path.as_ref().map(SocketPath::name)
    }

    fn new(socket: OwnedFd, path: Option<SocketPath>) -> Result<Self, ListenError> {
        rustix::io::ioctl_fionbio(&socket, true).map_err(|error| ListenError::Descriptor(error.into()))?;
        Ok(Self { socket, path })
    }

    /// Accepts the next client. Returns `None` if no client is waiting.
    pub(super) fn accept(&self) -> io::Result<Option<OwnedFd>> {
        loop {
            match rustix::net::accept_with(&self.socket, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(client) => {
                    configure(&client);
                    return Ok(Some(client));
                }
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                // The client disconnected before it was accepted.
                Err(rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Configures a client's socket so that replies go out at once, and a client whose host died does not keep its seat for
/// ever. Best effort: clients on Unix sockets need neither.
fn configure(client: &OwnedFd) {
    if sockopt::set_tcp_nodelay(client, true).is_ok() {
        let _ = sockopt::set_socket_keepalive(client, true);
        let _ = sockopt::set_tcp_keepidle(client, KEEPALIVE_IDLE);
        let _ = sockopt::set_tcp_keepintvl(client, KEEPALIVE_INTERVAL);
        let _ = sockopt::set_tcp_keepcnt(client, KEEPALIVE_COUNT);
        // Keepalive sends no probes while sent data are not acknowledged.
        let _ = sockopt::set_tcp_user_timeout(client, USER_TIMEOUT_MS);
    }
}
