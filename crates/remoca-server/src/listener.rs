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
    /// Binds an address, one of those in `listen`.
    pub(crate) fn bind(address: &ListenAddress, listen: &[ListenAddress]) -> Result<Self, StartError> {
        match address {
            ListenAddress::Tcp { .. } => {
                let (socket, _) = bind_tcp(address, listen)?;
                rustix::net::listen(&socket, BACKLOG)
                    .map_err(|errno| tcp_error(address, errno.into()))
                    .map(|()| BoundListener::Tcp(socket.into()))
            }
            ListenAddress::Unix(path) => bind_unix(path, SOCKET_MODE),
        }
    }

    /// Finds out whether the addresses can be had together, and gives them back. Listens at no moment, so no client connects.
    pub(crate) fn try_out(listen: &[ListenAddress]) -> Result<(), StartError> {
        let mut taken: Vec<(SocketAddr, &ListenAddress)> = Vec::new();
        for address in listen {
            if let ListenAddress::Unix(path) = address {
                take_path(path, SOCKET_MODE)?;
                continue;
            }
            // Sockets that do not listen may share a port, so the system does not say that two are one.
            let (_socket, at) = bind_tcp(address, listen)?;
            if let Some((_, earlier)) = taken.iter().find(|(earlier, _)| is_same(*earlier, at)) {
                return Err(StartError::ListenOverlap { address: address.clone(), earlier: (*earlier).clone() });
            }
            taken.push((at, address));
        }
        Ok(())
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

/// Returns whether one of two listed addresses keeps the server from listening at the other. `[::]` takes none of IPv4
/// ([`shares_port`]).
fn is_same(one: SocketAddr, other: SocketAddr) -> bool {
    let is_any = one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() != 0
        && one.port() == other.port()
        && one.is_ipv6() == other.is_ipv6()
        && (is_any || one.ip() == other.ip())
}

/// Returns whether several addresses with this port are listed. Then `[::]` leaves those of IPv4 to the others.
fn shares_port(listen: &[ListenAddress], port: u16) -> bool {
    let has_port = |address: &&ListenAddress| matches!(address, ListenAddress::Tcp { port: its, .. } if *its == port);
    port != 0 && listen.iter().filter(has_port).count() > 1
}

/// Binds a socket to the first address of a host that can be had, and does not listen. Returns it with what it was bound to.
fn bind_tcp(address: &ListenAddress, listen: &[ListenAddress]) -> Result<(OwnedFd, SocketAddr), StartError> {
    let ListenAddress::Tcp { host, port } = address else {
        return Err(tcp_error(address, ErrorKind::Unsupported.into()));
    };
    let (port, is_only_ipv6) = (*port, shares_port(listen, *port));
    let resolve_error = |source| StartError::Resolve { host: host.clone(), source };
    let candidates = (host.as_str(), port).to_socket_addrs().map_err(resolve_error)?;
    let mut last = resolve_error(ErrorKind::NotFound.into());
    for candidate in candidates {
        last = match take_port(candidate, is_only_ipv6) {
            Ok(socket) => return Ok((socket, candidate)),
            Err(error) => tcp_error(address, error),
        };
    }
    Err(last)
}

fn tcp_error(address: &ListenAddress, source: io::Error) -> StartError {
    let address = address.clone();
    match source.kind() {
        ErrorKind::AddrInUse => StartError::PortTaken { address },
        ErrorKind::AddrNotAvailable => StartError::NotOurAddress { address },
        _ => StartError::Listen { address, source },
    }
}

/// Makes a socket that has a port and does not listen.
fn take_port(address: SocketAddr, is_only_ipv6: bool) -> io::Result<OwnedFd> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // As the standard library does for one that listens: former connections that are about to end have no part in it.
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() && is_only_ipv6 {
        rustix::net::sockopt::set_ipv6_v6only(&socket, true)?;
    }
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
