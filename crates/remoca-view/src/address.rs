//! Where the page is: an address and port of this host, or a Unix socket.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

/// Port that `remoca web` listens on unless it is told another one.
pub const PORT: u16 = 9170;

/// Address of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl Default for Address {
    fn default() -> Self {
        Self::Tcp((Ipv4Addr::LOCALHOST, PORT).into())
    }
}

impl Address {
    /// Returns whether only programs of this host reach it.
    #[must_use]
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp(address) => address.ip().is_loopback(),
            Self::Unix(_) => true,
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let error = || format!("`{text}` is no address: write 127.0.0.1:{PORT}, [::1]:{PORT}, or unix:/PATH");
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.starts_with('/') { Ok(Self::Unix(path.into())) } else { Err(error()) };
        }
        let text = text.strip_prefix("http://").map_or(text, |text| text.trim_end_matches('/'));
        let text = text.strip_prefix("tcp:").unwrap_or(text);
        let numeric = match text.strip_prefix("localhost:") {
            Some(port) => format!("127.0.0.1:{port}"),
            None => text.to_owned(),
        };
        numeric.parse().map(Self::Tcp).map_err(|_| error())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_shown() {
        for (text, shown, is_local) in [
            ("127.0.0.1:9170", "127.0.0.1:9170", true),
            ("http://localhost:80/", "127.0.0.1:80", true),
            ("[::1]:9170", "[::1]:9170", true),
            ("tcp:0.0.0.0:1", "0.0.0.0:1", false),
            ("unix:/run/a b", "unix:/run/a b", true),
        ] {
            let address: Address = text.parse().unwrap_or_else(|error| panic!("{error}"));
            assert_eq!((address.to_string().as_str(), address.is_local()), (shown, is_local));
        }
        for wrong in ["", "9170", "host:9170", "unix:relative", "127.0.0.1", "127.0.0.1:99999"] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
        assert_eq!(Address::default().to_string(), "127.0.0.1:9170");
    }
}
