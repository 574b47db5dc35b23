//! A port for a server that a test starts.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};

/// A port of 127.0.0.1 that nobody is given by chance as long as the socket lives. That is bound and never listens, so a
/// server that reuses addresses can still have the port.
pub fn hold_port() -> (OwnedFd, u16) {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    sockopt::set_socket_reuseaddr(&socket, true).unwrap();
    bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let port = SocketAddr::try_from(getsockname(&socket).unwrap()).unwrap().port();
    (socket, port)
}
