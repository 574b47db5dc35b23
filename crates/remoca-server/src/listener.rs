//! Listening sockets: bound before the server says it is ready. The files of Unix sockets are removed at the end.

use std::fs;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use remoca_io::socket::{self, PATH_BYTES_MAX, SocketError, bind_with_mode};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::config::ListenAddress;
use crate::error::StartError;
use crate::stream::Stream;

/// Maximum number of connections that wait in the kernel to be accepted.
const BACKLOG: i32 = 128;
/// Owner and group may connect.
const SOCKET_MODE: u32 = 0o660;
/// Only the owner may connect.
const PRIVATE_MODE: u32 = 0o600;

/// A bound socket, not yet in an event loop.
#[derive(Debug)]
pub(crate) enum BoundListener {
    Tcp(std::net::TcpListener),
    Unix(std::os::unix::net::UnixListener, SocketFile),
}

/// A listening socket in an event loop.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(tokio::net::TcpListener, ListenAddress),
    Unix(tokio::net::UnixListener, SocketFile),
}

impl BoundListener {
    pub(crate) fn bind(address: &ListenAddress) -> Result<Self, StartError> {
        match address {
            ListenAddress::Tcp { host, port } => {
                bind_tcp(host, *port, address, std::net::TcpListener::bind).map(BoundListener::Tcp)
            }
            ListenAddress::Unix(path) => bind_unix(path, SOCKET_MODE),
        }
    }

    /// Finds out whether an address can be had, and gives it back. Listens at no moment, so no client connects.
    pub(crate) fn try_out(address: &ListenAddress) -> Result<(), StartError> {
        match address {
            ListenAddress::Tcp { host, port } => bind_tcp(host, *port, address, take_port).map(drop),
            ListenAddress::Unix(path) => take_path(path, SOCKET_MODE).map(drop),
        }
    }

    /// Binds a Unix socket to which only this user, and root, may connect.
    pub(crate) fn bind_private(path: &Path) -> Result<Self, StartError> {
        bind_unix(path, PRIVATE_MODE)
    }

    /// Returns the address. If port 0 was asked for, returns the port that was assigned.
    pub(crate) fn address(&self) -> io::Result<ListenAddress> {
        Ok(match self {
            Self::Tcp(listener) => {
                let address = listener.local_addr()?;
                ListenAddress::Tcp { host: address.ip().to_string(), port: address.port() }
            }
            Self::Unix(_, file) => ListenAddress::Unix(file.path.clone()),
        })
    }

    /// Attaches the listener to the event loop of this thread.
    pub(crate) fn attach(self) -> io::Result<Listener> {
        let address = self.address()?;
        Ok(match self {
            Self::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                Listener::Tcp(tokio::net::TcpListener::from_std(listener)?, address)
            }
            Self::Unix(listener, file) => {
                listener.set_nonblocking(true)?;
                Listener::Unix(tokio::net::UnixListener::from_std(listener)?, file)
            }
        })
    }
}

impl Listener {
    pub(crate) async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener, _) => Ok(Stream::Tcp(listener.accept().await?.0)),
            Self::Unix(listener, _) => Ok(Stream::Unix(listener.accept().await?.0)),
        }
    }

    pub(crate) fn address(&self) -> ListenAddress {
        match self {
            Self::Tcp(_, address) => address.clone(),
            Self::Unix(_, file) => ListenAddress::Unix(file.path.clone()),
        }
    }
}

/// The file of a Unix socket. Removed when dropped, unless another file has taken its place.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours =
            fs::symlink_metadata(&self.path).is_ok_and(|file| file.dev() == self.device && file.ino() == self.inode);
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

/// Binds the first address of `host` that can be had.
fn bind_tcp<T>(
    host: &str,
    port: u16,
    address: &ListenAddress,
    bind: impl Fn(SocketAddr) -> io::Result<T>,
) -> Result<T, StartError> {
    let resolve_error = |source| StartError::Resolve { host: host.to_owned(), source };
    let candidates = (host, port).to_socket_addrs().map_err(resolve_error)?;
    let mut last = resolve_error(ErrorKind::NotFound.into());
    for candidate in candidates {
        let address = address.clone();
        last = match bind(candidate) {
            Ok(bound) => return Ok(bound),
            Err(error) if error.kind() == ErrorKind::AddrInUse => StartError::PortTaken { address },
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => StartError::NotOurAddress { address },
            Err(source) => StartError::Listen { address, source },
        };
    }
    Err(last)
}

/// Makes a socket that has a port and does not listen.
fn take_port(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // As the standard library does for one that listens: former connections that are about to end have no part in it.
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    Ok(socket)
}

fn bind_unix(path: &Path, mode: u32) -> Result<BoundListener, StartError> {
    let (socket, file) = take_path(path, mode)?;
    rustix::net::listen(&socket, BACKLOG).map_err(|errno| listen_error(path, errno.into()))?;
    Ok(BoundListener::Unix(socket.into(), file))
}

/// Makes a socket that has a path and does not listen.
fn take_path(path: &Path, mode: u32) -> Result<(OwnedFd, SocketFile), StartError> {
    let length = path.as_os_str().len();
    if length > PATH_BYTES_MAX {
        return Err(StartError::PathTooLong { path: path.to_owned(), length, most: PATH_BYTES_MAX });
    }
    remove_stale(path)?;
    let listen_error = |source| listen_error(path, source);
    let socket = unix_socket(path, mode).map_err(listen_error)?;
    let file = fs::symlink_metadata(path).map_err(listen_error)?;
    let file = SocketFile { path: path.to_owned(), device: file.dev(), inode: file.ino() };
    Ok((socket, file))
}

fn listen_error(path: &Path, source: io::Error) -> StartError {
    match source.kind() {
        ErrorKind::NotFound => StartError::NoFolder { path: path.to_owned() },
        ErrorKind::AddrInUse => StartError::SocketTaken { path: path.to_owned() },
        _ => StartError::Listen { address: ListenAddress::Unix(path.to_owned()), source },
    }
}

/// Makes a socket that has a path and this mode, also what the umask took away from it.
fn unix_socket(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    let socket = bind_with_mode(path, mode)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    Ok(socket)
}

/// Removes a socket that no process listens on, because its server was killed.
fn remove_stale(path: &Path) -> Result<(), StartError> {
    socket::remove_stale(path).map_err(|error| match error {
        SocketError::InUse(path) => StartError::SocketTaken { path },
        SocketError::NotASocket(path) => StartError::NotASocket { path },
        // A lack of permission also means that the path is somebody else's.
        SocketError::Bind { path, source } if source.kind() == ErrorKind::PermissionDenied => {
            StartError::SocketTaken { path }
        }
        SocketError::Bind { path, source } => StartError::Listen { address: ListenAddress::Unix(path), source },
        other => StartError::Listen { address: ListenAddress::Unix(path.to_owned()), source: io::Error::other(other) },
    })
}
