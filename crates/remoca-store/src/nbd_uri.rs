//! NBD URIs: the server's address and the name of the export.
//!
//! `nbd://host[:port]/export` and `nbd+unix:///export?socket=PATH`, as in the NBD project's `doc/uri.md`.

use remoca_io::socket::PATH_BYTES_MAX;
use std::path::PathBuf;
use std::str::FromStr;

/// IANA's port for NBD.
const DEFAULT_PORT: u16 = 10809;
/// Longest export name that the protocol allows, in bytes.
const EXPORT_LEN_MAX: usize = 4096;

/// A parsed URI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    pub server: NbdAddress,
    /// Empty for the server's default export.
    pub export: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddress {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

/// What is wrong with a URI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NbdUriError {
    #[error("not an NBD URI: it starts with nbd://host:port/export or nbd+unix:///export?socket=PATH")]
    Scheme,
    #[error("NBD over TLS or vsock is not supported: use nbd:// or nbd+unix://, through a tunnel if need be")]
    Unsupported,
    #[error("the NBD URI names no host: nbd://host:port/export")]
    NoHost,
    #[error("the NBD URI's port is not a number from 1 to 65535")]
    Port,
    #[error("the NBD URI needs its socket: nbd+unix:///export?socket=PATH")]
    NoSocket,
    #[error("the NBD URI's socket path has {0} bytes, at most {PATH_BYTES_MAX} are possible, and none of them zero")]
    SocketPath(usize),
    #[error("the NBD URI has a parameter that is not known: {0:?}")]
    Parameter(String),
    #[error("the NBD URI has a %-escape that is not one")]
    Escape,
    #[error("the NBD URI's export name is longer than {EXPORT_LEN_MAX} bytes")]
    ExportTooLong,
}

impl std::fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NbdAddress::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            NbdAddress::Tcp { host, port } => write!(f, "{host}:{port}"),
            NbdAddress::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

impl FromStr for NbdUri {
    type Err = NbdUriError;

    fn from_str(uri: &str) -> Result<Self, NbdUriError> {
        let (scheme, rest) = uri.split_once("://").ok_or(NbdUriError::Scheme)?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let export = unescape(path)?;
        if export.len() > EXPORT_LEN_MAX {
            return Err(NbdUriError::ExportTooLong);
        }
        let server = match scheme {
            "nbd" => tcp_server(authority, query)?,
            "nbd+unix" => unix_server(query)?,
            "nbds" | "nbds+unix" | "nbd+vsock" | "nbds+vsock" | "nbd+ssh" => return Err(NbdUriError::Unsupported),
            _ => return Err(NbdUriError::Scheme),
        };
        Ok(Self { server, export })
    }
}

fn tcp_server(authority: &str, query: &str) -> Result<NbdAddress, NbdUriError> {
    if !query.is_empty() {
        return Err(NbdUriError::Parameter(query.to_owned()));
    }
    // An IPv6 address is in brackets, so that its colons are not mistaken for the one before the port.
    let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, port)) => (host, Some(port.strip_prefix(':').ok_or(NbdUriError::Port)?)),
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    if host.is_empty() {
        return Err(NbdUriError::NoHost);
    }
    let port = port.map_or(Ok(DEFAULT_PORT), |port| port.parse().map_err(|_| NbdUriError::Port))?;
    if port == 0 {
        return Err(NbdUriError::Port);
    }
    Ok(NbdAddress::Tcp { host: unescape(host)?, port })
}

fn unix_server(query: &str) -> Result<NbdAddress, NbdUriError> {
    let mut socket = None;
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        match parameter.split_once('=') {
            Some(("socket", path)) if !path.is_empty() => socket = Some(socket_path(unescape(path)?)?),
            _ => return Err(NbdUriError::Parameter(parameter.to_owned())),
        }
    }
    socket.map(NbdAddress::Unix).ok_or(NbdUriError::NoSocket)
}

fn socket_path(path: String) -> Result<PathBuf, NbdUriError> {
    let is_possible = path.len() <= PATH_BYTES_MAX && !path.contains('\0');
    if is_possible { Ok(path.into()) } else { Err(NbdUriError::SocketPath(path.len())) }
}

fn unescape(text: &str) -> Result<String, NbdUriError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|digit| char::from(digit).to_digit(16));
        let (high, low) = digit().zip(digit()).ok_or(NbdUriError::Escape)?;
        bytes.push(u8::try_from(high << 4 | low).map_err(|_| NbdUriError::Escape)?);
    }
    String::from_utf8(bytes).map_err(|_| NbdUriError::Escape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tcp(host: &str, port: u16, export: &str) -> Result<NbdUri, NbdUriError> {
        Ok(NbdUri { server: NbdAddress::Tcp { host: host.into(), port }, export: export.into() })
    }

    fn unix(path: &str, export: &str) -> Result<NbdUri, NbdUriError> {
        Ok(NbdUri { server: NbdAddress::Unix(path.into()), export: export.into() })
    }

    #[test]
    fn uris_are_understood_or_refused_with_the_reason() {
        for (uri, expected) in [
            ("nbd://host", tcp("host", 10809, "")),
            ("nbd://host:99/", tcp("host", 99, "")),
            ("nbd://host:99/vm/root%20disk", tcp("host", 99, "vm/root disk")),
            ("nbd://[::1]:99/a", tcp("::1", 99, "a")),
            ("nbd://[::1]", tcp("::1", 10809, "")),
            ("nbd+unix:///?socket=/run/a.sock", unix("/run/a.sock", "")),
            ("nbd+unix:///disk?socket=/run/a%3f.sock", unix("/run/a?.sock", "disk")),
            ("nbd+unix://?socket=a.sock", unix("a.sock", "")),
            ("/dev/sda", Err(NbdUriError::Scheme)),
            ("http://host/", Err(NbdUriError::Scheme)),
            ("nbds://host/", Err(NbdUriError::Unsupported)),
            ("nbd:///export", Err(NbdUriError::NoHost)),
            ("nbd://host:0/", Err(NbdUriError::Port)),
            ("nbd://host:66000/", Err(NbdUriError::Port)),
            ("nbd://[::1]99/", Err(NbdUriError::Port)),
            ("nbd://host/?tls=1", Err(NbdUriError::Parameter("tls=1".into()))),
            ("nbd+unix:///disk", Err(NbdUriError::NoSocket)),
            ("nbd+unix:///disk?socket=", Err(NbdUriError::Parameter("socket=".into()))),
            ("nbd+unix:///disk?socket=a%00", Err(NbdUriError::SocketPath(2))),
            ("nbd://host/%zz", Err(NbdUriError::Escape)),
            ("nbd://host/%f", Err(NbdUriError::Escape)),
            ("nbd://host/%ff", Err(NbdUriError::Escape)),
        ] {
            assert_eq!(uri.parse::<NbdUri>(), expected, "{uri}");
        }
        let with_socket = |bytes| format!("nbd+unix:///?socket={}", "a".repeat(bytes)).parse::<NbdUri>();
        assert_eq!(with_socket(PATH_BYTES_MAX), unix(&"a".repeat(PATH_BYTES_MAX), ""));
        assert_eq!(with_socket(PATH_BYTES_MAX + 1), Err(NbdUriError::SocketPath(PATH_BYTES_MAX + 1)));
        let long = format!("nbd://host/{}", "a".repeat(EXPORT_LEN_MAX + 1));
        assert_eq!(long.parse::<NbdUri>(), Err(NbdUriError::ExportTooLong));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "\\PC{0,60}", scheme in "(nbd|nbd\\+unix)://") {
            let _ = text.parse::<NbdUri>();
            let _ = format!("{scheme}{text}").parse::<NbdUri>();
        }
    }
}
