//! A port for a server that a test starts.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};

/// Returns a socket and its port on 127.0.0.1, which the system assigns to no other socket as long as this one lives.
/// The socket is bound and never listens, so a server that reuses addresses can still use the port.
pub fn hold_port() -> (OwnedFd, u16) {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    sockopt::set_socket_reuseaddr(&socket, true).unwrap();
    bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let port = SocketAddr::try_from(getsockname(&socket).unwrap()).unwrap().port();
    (socket, port)
}
