//! A connection over TCP or a Unix socket, and its few operations.

use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use remoca_io::passed;
use remoca_protocol::{ErrorReply, Frame};
use rustix::net::sockopt;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

/// A connection in the event loop of one thread.
#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Origin of a connection, as far as bounds are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    V4(Ipv4Addr),
    /// The 64-bit network of an IPv6 address, because a host has all 2^64 addresses of one.
    V6([u16; 4]),
    /// A user of this host.
    User(u32),
    Unknown,
}

impl From<IpAddr> for Peer {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address),
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                Self::V6([a, b, c, d])
            }
        }
    }
}

/// A connection on its way from one thread's event loop to another's.
#[derive(Debug)]
pub(crate) enum DetachedStream {
    Tcp(std::net::TcpStream),
    Unix(std::os::unix::net::UnixStream),
}

/// Idle time after which the kernel probes a peer's host, and again after each [`KEEPALIVE_INTERVAL`].
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Number of probes that may stay unanswered.
const KEEPALIVE_COUNT: u32 = 3;
/// Maximum time and amount of input for the last message to a peer.
const FAREWELL: Duration = Duration::from_secs(1);
const FAREWELL_BYTES: usize = 1 << 20;

impl Stream {
    /// Sets options so that small messages are sent at once, and dead hosts are noticed, also while data waits to be
    /// sent to them. The kernel cannot tell a dead host from a peer that does not read, so both get the same time.
    pub(crate) fn tune(&self, stall_timeout: Duration) -> io::Result<()> {
        let Self::Tcp(stream) = self else { return Ok(()) };
        stream.set_nodelay(true)?;
        let fd = stream.as_fd();
        sockopt::set_socket_keepalive(fd, true)?;
        sockopt::set_tcp_keepidle(fd, KEEPALIVE_IDLE)?;
        sockopt::set_tcp_keepintvl(fd, KEEPALIVE_INTERVAL)?;
        sockopt::set_tcp_keepcnt(fd, KEEPALIVE_COUNT)?;
        // Longer than the field can say is 49 days.
        sockopt::set_tcp_user_timeout(fd, u32::try_from(stall_timeout.as_millis()).unwrap_or(u32::MAX))?;
        Ok(())
    }

    /// Returns the peer's identity, for logs.
    pub(crate) fn peer(&self) -> String {
        match self {
            Self::Tcp(stream) => {
                stream.peer_addr().map_or_else(|_| "tcp:?".to_owned(), |address: SocketAddr| format!("tcp:{address}"))
            }
            Self::Unix(stream) => match stream.peer_cred() {
                Ok(cred) => format!("unix:uid={},pid={}", cred.uid(), cred.pid().unwrap_or(0)),
                Err(_) => "unix:?".to_owned(),
            },
        }
    }

    /// Returns the peer's identity, for bounds.
    pub(crate) fn origin(&self) -> Peer {
        match self {
            Self::Tcp(stream) => stream.peer_addr().map_or(Peer::Unknown, |address| address.ip().into()),
            Self::Unix(stream) => stream.peer_cred().map_or(Peer::Unknown, |cred| Peer::User(cred.uid())),
        }
    }

    pub(crate) fn detach(self) -> io::Result<DetachedStream> {
        Ok(match self {
            Self::Tcp(stream) => DetachedStream::Tcp(stream.into_std()?),
            Self::Unix(stream) => DetachedStream::Unix(stream.into_std()?),
        })
    }

    /// Reads the available bytes, and waits until there are some. Returns 0 at the end of the stream. A read that
    /// does not fill `space` needs no second one to learn that nothing is left.
    #[inline]
    pub(crate) async fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(space).await,
            Self::Unix(stream) => stream.read(space).await,
        }
    }

    /// Writes as much as the socket accepts now, and returns the number of bytes.
    #[inline]
    pub(crate) fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write_vectored(slices),
            Self::Unix(stream) => stream.try_write_vectored(slices),
        }
    }

    /// Returns whether the connection can pass descriptors.
    pub(crate) fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// Writes as much as the socket accepts now, and sends a copy of a descriptor with it. Returns the number of bytes.
    pub(crate) fn try_send_with(&self, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
        match self {
            Self::Tcp(_) => Err(io::ErrorKind::Unsupported.into()),
            Self::Unix(stream) => stream.try_io(Interest::WRITABLE, || passed::send(stream, bytes, descriptor)),
        }
    }

    pub(crate) async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.writable().await,
            Self::Unix(stream) => stream.writable().await,
        }
    }

    pub(crate) async fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.write_all(bytes).await,
            Self::Unix(stream) => stream.write_all(bytes).await,
        }
    }

    /// Tells the peer why the connection ends, in bounded time. Input from the peer is read and discarded: closing
    /// with unread input would discard the message before the peer reads it.
    pub(crate) async fn farewell(mut self, last_words: ErrorReply) {
        let mut bytes = Vec::new();
        Frame::Error(last_words).encode(&mut bytes);
        // The peer may be gone already, which does not matter.
        let _told = timeout(FAREWELL, async {
            self.write_all(&bytes).await?;
            self.end_writing().await?;
            let mut scratch = [0; 4096];
            let mut left = FAREWELL_BYTES;
            while left > 0 {
                match self.read(&mut scratch).await? {
                    0 => break,
                    count => left = left.saturating_sub(count),
                }
            }
            io::Result::Ok(())
        })
        .await;
    }

    /// Writes one answer, and ends the connection in good order.
    pub(crate) async fn answer(mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes).await?;
        self.end_writing().await
    }

    async fn end_writing(&mut self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.shutdown().await,
            Self::Unix(stream) => stream.shutdown().await,
        }
    }
}

impl DetachedStream {
    /// Attaches the connection to the event loop of this thread.
    pub(crate) fn attach(self) -> io::Result<Stream> {
        Ok(match self {
            Self::Tcp(stream) => Stream::Tcp(TcpStream::from_std(stream)?),
            Self::Unix(stream) => Stream::Unix(UnixStream::from_std(stream)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(address: &str) -> Peer {
        address.parse::<IpAddr>().expect("an address").into()
    }

    /// Tests that a host that takes one address after the other is one peer, and that its neighbours are not.
    #[test]
    fn an_ipv6_network_of_64_bits_is_one_peer() {
        assert_eq!(peer("2001:db8:1:2::1"), peer("2001:db8:1:2:ffff:ffff:ffff:ffff"));
        assert_eq!(peer("2001:db8:1:2::1"), Peer::V6([0x2001, 0xdb8, 1, 2]));
        for other in ["2001:db8:1:3::1", "2001:db8:2:2::1", "2001:db9:1:2::1", "2002:db8:1:2::1"] {
            assert_ne!(peer("2001:db8:1:2::1"), peer(other));
        }
        assert_ne!(peer("2001:db8:1:2::1"), peer("::1"));
    }

    /// Tests that a host is one peer whether it came over IPv4, or over IPv4 to a socket for both.
    #[test]
    fn an_ipv4_address_is_one_peer_in_either_form() {
        assert_eq!(peer("::ffff:192.0.2.1"), peer("192.0.2.1"));
        assert_ne!(peer("192.0.2.1"), peer("192.0.2.2"));
        assert_ne!(peer("::ffff:192.0.2.1"), peer("::ffff:192.0.2.2"));
    }
}
