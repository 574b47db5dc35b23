//! The operator's options.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Options of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// Addresses to listen on, at least one.
    pub listen: Vec<ListenAddress>,
    /// Memory for pools in bytes, a multiple of 2 MiB.
    pub memory_bytes: u64,
    /// Maximum size of one pool in bytes, a multiple of 4 KiB; `None` for all of the memory.
    pub quota_bytes: Option<u64>,
    /// How long the pool of a client that vanished is kept.
    pub grace: Duration,
    pub locking: PageLocking,
    /// Number of worker threads, at least one.
    pub threads: usize,
    /// A Unix socket that answers each connection with the status as JSON.
    pub control: Option<PathBuf>,
    pub limits: Limits,
}

/// Whether pages are locked into memory. The server never changes it by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageLocking {
    /// All of the memory is allocated and locked at the start, or the start fails.
    Locked,
    /// The host may swap pages out. Memory is allocated at its first use, and given back when it is freed.
    Unlocked,
}

/// Bounds on what peers can make the server hold.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of clients that have a connection, or whose pools are kept for them.
    pub sessions: usize,
    /// Maximum number of connections between accept and session. One more ends the oldest of those that have not said
    /// HELLO.
    pub handshakes: usize,
    /// Maximum number of these from one address (IPv6: network of 64 bits; Unix sockets: user) that have not said
    /// HELLO.
    pub handshakes_of_peer: usize,
    /// Time within which a HELLO must arrive.
    pub hello_timeout: Duration,
    /// Time after which a connection is closed if its peer has not read any of its replies.
    pub stall_timeout: Duration,
    /// Size of a connection's receive buffer.
    pub receive_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sessions: 256,
            handshakes: 384,
            handshakes_of_peer: 256,
            hello_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(60),
            receive_bytes: 128 << 10,
        }
    }
}

/// Where to listen: `tcp:HOST:PORT` or `unix:PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

/// Why a text is not a [`ListenAddress`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("an address begins with `tcp:` or `unix:`, as in tcp:192.0.2.1:7070 or unix:/run/remoca/serve.sock")]
    NoScheme,
    #[error("tcp: wants HOST:PORT, as in tcp:192.0.2.1:7070 or tcp:[::1]:7070")]
    NoPort,
    #[error("`{0}` is not a port: 0 to 65535 (0: any free one)")]
    BadPort(String),
    #[error("tcp: wants a host; 0.0.0.0 or [::] listens on all addresses")]
    NoHost,
    #[error("an IPv6 address is written in brackets, as in tcp:[::1]:7070")]
    NoBrackets,
    #[error("unix: wants a path, as in unix:/run/remoca/serve.sock")]
    NoPath,
}

impl FromStr for ListenAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err(AddressError::NoPath) } else { Ok(Self::Unix(path.into())) };
        }
        let rest = text.strip_prefix("tcp:").ok_or(AddressError::NoScheme)?;
        let (host, port) = rest.rsplit_once(':').ok_or(AddressError::NoPort)?;
        let host = match host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')) {
            Some(inner) => inner,
            None if host.contains(':') => return Err(AddressError::NoBrackets),
            None => host,
        };
        if host.is_empty() {
            return Err(AddressError::NoHost);
        }
        let port = port.parse().map_err(|_| AddressError::BadPort(port.to_owned()))?;
        Ok(Self::Tcp { host: host.to_owned(), port })
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Bytes as an operator would write them: `2 GiB`, `1.5 MiB`.
pub(crate) struct Size(pub(crate) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
        let unit = usize::try_from(self.0.max(1).ilog2() / 10).unwrap_or(0).min(UNITS.len() - 1);
        let one = 1_u64 << (10 * unit);
        match self.0 % one * 10 / one {
            0 => write!(f, "{} {}", self.0 / one, UNITS[unit]),
            tenths => write!(f, "{}.{tenths} {}", self.0 / one, UNITS[unit]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_there_and_back() {
        for text in ["tcp:127.0.0.1:7070", "tcp:[::1]:0", "tcp:donor.example:65535", "unix:/run/remoca/serve.sock"] {
            assert_eq!(text.parse::<ListenAddress>().map(|address| address.to_string()), Ok(text.to_owned()));
        }
    }

    #[test]
    fn bad_addresses_say_what_is_wrong() {
        let cases = [
            ("127.0.0.1:7070", AddressError::NoScheme),
            ("", AddressError::NoScheme),
            ("udp:1.2.3.4:1", AddressError::NoScheme),
            ("tcp:7070", AddressError::NoPort),
            ("tcp::7070", AddressError::NoHost),
            ("tcp:[]:7070", AddressError::NoHost),
            ("tcp:::1:7070", AddressError::NoBrackets),
            ("tcp:host:", AddressError::BadPort(String::new())),
            ("tcp:host:65536", AddressError::BadPort("65536".into())),
            ("unix:", AddressError::NoPath),
        ];
        for (text, error) in cases {
            assert_eq!(text.parse::<ListenAddress>(), Err(error), "{text}");
        }
    }

    #[test]
    fn sizes_are_readable() {
        let text = [0, 1023, 8 << 20, 2 << 30, 3 << 29, 5 << 40].map(|bytes| Size(bytes).to_string());
        assert_eq!(text, ["0 bytes", "1023 bytes", "8 MiB", "2 GiB", "1.5 GiB", "5 TiB"]);
    }
}
