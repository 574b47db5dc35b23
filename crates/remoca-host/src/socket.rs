//! The daemon's own socket: each connection gets the newest report and is closed. A thread answers, one client after the other, each with a
//! deadline. Nothing is read from a client. Whoever may open the socket (mode 0600) sees the report.

use remoca_io::control::{connect_within, read_all};
use remoca_io::socket::{SocketPath, SocketSource};
use remoca_protocol::host::{HostReport, REPORT_BYTES_MAX};
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time that a client has to take the report, and the daemon to send it.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The listening side.
#[derive(Debug)]
pub struct ReportSocket {
    newest: Arc<Mutex<Arc<Vec<u8>>>>,
    /// Removes the socket at the end.
    _path: Option<SocketPath>,
}

impl ReportSocket {
    /// Listens at `path`.
    ///
    /// # Errors
    /// If the path cannot be used; the text says what to do.
    pub fn start(path: &Path) -> io::Result<Self> {
        let source = SocketSource::bind(path, None).map_err(io::Error::other)?;
        let SocketSource::Listener { listener, path } = source else {
            return Err(io::Error::other("this is no listening socket"));
        };
        let newest: Arc<Mutex<Arc<Vec<u8>>>> = Arc::default();
        let shown = Arc::clone(&newest);
        std::thread::Builder::new().name("report".into()).spawn(move || {
            loop {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let text = Arc::clone(&shown.lock().unwrap_or_else(PoisonError::into_inner));
                        // A client that does not take it in time does not get it.
                        let _ = send(stream, &text);
                    }
                    Err(_) => std::thread::sleep(ACCEPT_PAUSE),
                }
            }
        })?;
        Ok(Self { newest, _path: path })
    }

    /// Shows `report` from now on.
    pub fn show(&self, report: &HostReport) {
        if let Ok(line) = report.line() {
            *self.newest.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(line);
        }
    }
}

fn send(mut stream: UnixStream, text: &[u8]) -> io::Result<()> {
    let give_up_at = Instant::now() + PATIENCE;
    let mut left = text;
    while !left.is_empty() {
        let time = give_up_at.saturating_duration_since(Instant::now());
        if time.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(time))?;
        let count = stream.write(left)?;
        left = &left[count..];
    }
    Ok(())
}

/// Reads the report of the daemon at `path`.
///
/// # Errors
/// If no daemon listens there, or no report comes in time.
pub fn read(path: &Path) -> io::Result<HostReport> {
    read_within(path, 2 * PATIENCE)
}

fn read_within(path: &Path, patience: Duration) -> io::Result<HostReport> {
    let give_up_at = Instant::now() + patience;
    let stream = connect_within(path, patience)?;
    let text = read_all(&stream, REPORT_BYTES_MAX, give_up_at, UnixStream::set_read_timeout)?;
    match text.is_empty() {
        true => Err(io::Error::other("it has no report yet: ask again in a moment")),
        false => HostReport::parse(&text).map_err(io::Error::other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_io::socket::listen_as_hung;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_client_gets_the_newest_report_even_if_another_takes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let socket = ReportSocket::start(&path).unwrap();
        let read = || read_within(&path, Duration::from_secs(60));
        assert!(read().unwrap_err().to_string().contains("no report yet"));
        let report = HostReport { state: "x".repeat(1 << 20), ..HostReport::default() };
        socket.show(&report);
        let _stuck = UnixStream::connect(&path).unwrap();
        // One that is late on a busy machine does not get it either.
        assert_eq!((0..5).find_map(|_| read().ok()), Some(report));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_daemon_that_hangs_is_waited_for_no_longer_than_one_that_is_slow() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _hung = listen_as_hung(&path).unwrap();
        let silent = read_within(&path, Duration::from_millis(20)).unwrap_err();
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
    }
}
