//! Addresses of memory servers and of other VM processes: `tcp:HOST:PORT` or `unix:PATH`, and `local:PATH` for a memory server
//! of this host.

use crate::socket::{SocketPath, SocketSource};
use rustix::io::retry_on_intr;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt};
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// An address at which a memory server or another VM process listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `HOST:PORT`. The name is resolved at each connect.
    Tcp(String),
    Unix(PathBuf),
    /// Unix socket of a memory server on this host, whose pool the VM process reads and writes by itself. Nobody listens there
    /// for anything else.
    Local(PathBuf),
}

impl FromStr for Endpoint {
    type Err = String;

    /// Parses the address of a memory server.
    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text, "tcp:HOST:PORT, unix:PATH or local:PATH")
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Local(path) => write!(f, "local:{}", path.display()),
        }
    }
}

impl Endpoint {
    /// Parses the address of a process that is no memory server. One that begins with `local:` is refused when it is listened at.
    ///
    /// # Errors
    /// If it is no address. The text says which forms there are.
    pub fn of_process(text: &str) -> Result<Self, String> {
        Self::parse(text, "tcp:HOST:PORT or unix:PATH")
    }

    /// Parses the address of the memory server of the local tier. Another one than `local:PATH` is refused where it is used.
    ///
    /// # Errors
    /// If it is no address. The text says which form it has.
    pub fn of_local_tier(text: &str) -> Result<Self, String> {
        Self::parse(text, "local:PATH")
    }

    /// Parses an address. Errors name `forms` as those that it can have.
    fn parse(text: &str, forms: &str) -> Result<Self, String> {
        let path = |path: &str| match path.len() {
            1..=107 => Ok(PathBuf::from(path)),
            _ => Err(format!("`{text}`: a socket path has 1 to 107 bytes; write {forms}")),
        };
        if let Some(unix) = text.strip_prefix("unix:") {
            return path(unix).map(Self::Unix);
        }
        if let Some(local) = text.strip_prefix("local:") {
            return path(local).map(Self::Local);
        }
        let Some(address) = text.strip_prefix("tcp:") else {
            return Err(format!("`{text}` is not an address: write {forms}"));
        };
        let port = address.rsplit_once(':').map(|(host, port)| (host.is_empty(), port.parse::<u16>()));
        match port {
            Some((false, Ok(1..))) => Ok(Self::Tcp(address.to_owned())),
            _ => Err(format!("`{text}` has no valid host and port: write {forms}")),
        }
    }

    /// Listens at the address. Replaces a socket file that no process listens on. Only the owner may connect to one.
    ///
    /// # Errors
    /// If the address is not one of this host, is in use, or cannot be listened on.
    pub fn listen(&self) -> io::Result<Listener> {
        match self {
            Self::Unix(path) => match SocketSource::bind(path, None).map_err(io::Error::other)? {
                SocketSource::Listener { listener, path } => Ok(Listener::Unix(listener, path)),
                SocketSource::Stream(_) => Err(io::Error::other("a path gives a listening socket")),
            },
            Self::Tcp(address) => Ok(Listener::Tcp(TcpListener::bind(address.as_str())?)),
            Self::Local(_) => Err(not_to_listen()),
        }
    }

    /// Connects within `timeout`, which applies to each address of a name. The socket is blocking, and has the same
    /// timeout for reads and writes until the caller changes it.
    ///
    /// # Errors
    /// If the name cannot be resolved, or no address answers; the error is then that of the last one.
    pub fn connect(&self, timeout: Duration) -> io::Result<OwnedFd> {
        match self {
            Self::Unix(path) | Self::Local(path) => connect_unix(path, timeout),
            Self::Tcp(address) => {
                let mut error = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
                for address in address.to_socket_addrs()? {
                    match connect_tcp(address, timeout) {
                        Ok(stream) => return Ok(stream.into()),
                        Err(failed) => error = failed,
                    }
                }
                Err(error)
            }
        }
    }
}

/// Limits the bytes of a TCP connection that the kernel has taken and not sent. More of them are not taken: they wait with the
/// caller, who can put others before them.
///
/// # Errors
/// If it is no TCP connection.
pub fn limit_unsent(socket: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    const LENGTH: libc::socklen_t = 4;
    // SAFETY: the kernel reads the four bytes of `bytes`, which outlives the call, and the descriptor is open.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            (&raw const bytes).cast(),
            LENGTH,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns why nobody listens at a `local:` address.
#[must_use]
pub fn not_to_listen() -> io::Error {
    io::Error::other("`local:` is how a VM process reaches its host's memory server; listen at unix:PATH")
}

/// A listening socket, with its path if it has one.
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, Option<SocketPath>),
}

impl Listener {
    /// Accepts the next connection, without a time limit. Reads and writes on it have no timeout either.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn accept(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Unix(listener, _) => Ok(listener.accept()?.0.into()),
            Self::Tcp(listener) => {
                let stream = listener.accept()?.0;
                notice_death(&stream)?;
                Ok(stream.into())
            }
        }
    }
}

/// Connects to a Unix socket within `timeout`. Without a limit the connect would wait if the server does not accept and
/// its queue is full.
fn connect_unix(path: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for direction in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
        sockopt::set_socket_timeout(&socket, direction, Some(timeout))?;
    }
    let address = SocketAddrUnix::new(path)?;
    // With a time limit, any signal ends the wait for a place in the queue.
    retry_on_intr(|| connect(&socket, &address))?;
    Ok(socket)
}

fn connect_tcp(address: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    notice_death(&stream)?;
    Ok(stream)
}

fn notice_death(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    // Keepalive sends no probes while sent data are not acknowledged. A connection to a dead host must end in that case
    // too.
    sockopt::set_tcp_user_timeout(stream, 25_000)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::{SigHandler, Signal, signal};
    use std::os::fd::AsFd;
    use std::os::unix::thread::JoinHandleExt;

    #[test]
    fn a_full_queue_of_a_unix_socket_is_not_waited_for_without_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let endpoint = Endpoint::Unix(path);
        let tries: Vec<_> = (0..3).map(|_| endpoint.connect(Duration::from_millis(50))).collect();
        assert!(tries[0].is_ok());
        assert_eq!(tries[2].as_ref().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    extern "C" fn ignore(_: libc::c_int) {}

    #[test]
    fn a_signal_does_not_end_the_wait_for_a_place_in_a_full_queue() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let endpoint = Endpoint::Unix(path);
        let _first = endpoint.connect(Duration::from_secs(600)).unwrap();
        // SAFETY: the handler does nothing.
        unsafe { signal(Signal::SIGUSR2, SigHandler::Handler(ignore)) }.unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            tell.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
            endpoint.connect(Duration::from_secs(600))
        });
        let state = Path::new("/proc").join(told.recv().unwrap()).join("status");
        while !std::fs::read_to_string(&state).unwrap().contains("State:\tS") {
            std::thread::yield_now();
        }
        // SAFETY: the thread has not been joined.
        unsafe { libc::pthread_kill(waiting.as_pthread_t(), libc::SIGUSR2) };
        let listener = UnixListener::from(socket);
        let _accepted = [listener.accept().unwrap(), listener.accept().unwrap()];
        waiting.join().unwrap().unwrap();
    }

    #[test]
    fn the_unsent_bytes_of_a_tcp_connection_are_limited() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        limit_unsent(socket.as_fd(), 12_345).unwrap();
        let (mut bytes, mut length) = (0_u32, 4);
        // SAFETY: the kernel writes at most the four bytes of `bytes`, and their number to `length`; both outlive the call.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_NOTSENT_LOWAT,
                (&raw mut bytes).cast(),
                &raw mut length,
            )
        };
        assert_eq!((result, bytes), (0, 12_345));
        let (local, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(limit_unsent(local.as_fd(), 1).is_err());
    }

    #[test]
    fn addresses_are_read_and_written() {
        for good in ["tcp:127.0.0.1:7", "tcp:[::1]:7", "tcp:host:65535", "unix:/run/x", "unix:x", "local:/run/x"] {
            assert_eq!(good.parse::<Endpoint>().unwrap().to_string(), good);
        }
        let long = format!("unix:{}", "x".repeat(108));
        for bad in
            ["", "host:7", "tcp:", "tcp:host", "tcp::7", "tcp:host:0", "tcp:host:65536", "unix:", "local:", &long]
        {
            for (parsed, forms) in [
                (bad.parse::<Endpoint>(), "write tcp:HOST:PORT, unix:PATH or local:PATH"),
                (Endpoint::of_process(bad), "write tcp:HOST:PORT or unix:PATH"),
                (Endpoint::of_local_tier(bad), "write local:PATH"),
            ] {
                let message = parsed.unwrap_err();
                assert!(message.ends_with(forms), "{message}");
            }
        }
    }
}
