//! The beginning and the end of a connection to a memory server, on threads of their own: both may have to wait.

use crate::endpoint::Endpoint;
use remoca_protocol::{ErrorCode, Frame, Hello, Token, VERSIONS, VersionRange, Welcome, decode};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// How long connecting and the hello may take, and saying goodbye.
const TIMEOUT: Duration = Duration::from_secs(5);

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
    #[error("lost the memory server at {0}: {1}")]
    Lost(Endpoint, String),
}

/// Connects, says hello, and waits for the welcome.
///
/// # Errors
/// [`LinkError`], whose text says what to do.
pub(super) fn connect(endpoint: &Endpoint, token: Token, epoch: u64) -> Result<(OwnedFd, Welcome), LinkError> {
    let unreachable = |error| LinkError::Unreachable(endpoint.clone(), error);
    let mut socket = File::from(endpoint.connect(TIMEOUT).map_err(unreachable)?);
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

/// Sends what is left of a session and BYE, so that the pool is given back at once, and waits for the server to close: a
/// connection that is closed before everything was read may take the BYE along.
pub(super) fn say_goodbye(mut socket: File, mut rest: Vec<u8>) {
    Frame::Bye.encode(&mut rest);
    let farewell = move || -> io::Result<()> {
        rustix::io::ioctl_fionbio(&socket, false)?;
        for timeout in [rustix::net::sockopt::Timeout::Recv, rustix::net::sockopt::Timeout::Send] {
            rustix::net::sockopt::set_socket_timeout(&socket, timeout, Some(TIMEOUT))?;
        }
        // A server that takes or sends a byte now and then must not keep the thread.
        let deadline = Instant::now() + TIMEOUT;
        let mut rest = &rest[..];
        while !rest.is_empty() && Instant::now() < deadline {
            let count = socket.write(rest)?;
            rest = &rest[count..];
        }
        let mut piece = vec![0; 64 << 10];
        while Instant::now() < deadline && socket.read(&mut piece)? > 0 {}
        Ok(())
    };
    // Whatever fails: the server frees the pool of a client that does not come back.
    let _ = std::thread::Builder::new().name("goodbye".into()).spawn(farewell);
}
