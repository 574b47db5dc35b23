//! Reads from a running `remoca web`: so that other screens show the very snapshot that its page shows.

use crate::address::Address;
use crate::snapshot::Snapshot;
use crate::text::one_line;
use anyhow::{Context, Result, bail};
use remoca_io::control::{connect_within, read_all};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Time for all of an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Largest answer that is read, in bytes: that of some thousand VMs.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Number of characters of a refusal that are shown.
const SHOWN_CHARS_MAX: usize = 400;

/// Returns the newest snapshot of the `remoca web` at `address`.
///
/// # Errors
/// If none answers there.
pub fn snapshot(address: &Address) -> Result<Snapshot> {
    Snapshot::parse(&get(address, "/api/snapshot")?)
        .with_context(|| format!("{address} answers, but is no `remoca web`, or one of another version"))
}

/// Returns the content of `path` at `address`.
///
/// # Errors
/// If nobody answers there in time, or with something else than this content.
pub fn get(address: &Address, path: &str) -> Result<Vec<u8>> {
    get_within(address, path, PATIENCE)
}

fn get_within(address: &Address, path: &str, patience: Duration) -> Result<Vec<u8>> {
    let deadline = Instant::now() + patience;
    let answer = match address {
        Address::Tcp(socket) => TcpStream::connect_timeout(socket, patience)
            .and_then(|stream| exchange(&stream, path, deadline, TcpStream::set_read_timeout)),
        Address::Unix(socket) => connect_within(socket, patience)
            .and_then(|stream| exchange(&stream, path, deadline, UnixStream::set_read_timeout)),
    };
    let answer = answer.with_context(|| format!("no page answers at {address}: does `remoca web` listen there?"))?;
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n");
    let Some(end) = end else { bail!("{address} answers with something else than HTTP") };
    let line = |said: &[u8]| one_line(&String::from_utf8_lossy(said), SHOWN_CHARS_MAX);
    let status = answer[..end].split(|byte| *byte == b'\r').next().unwrap_or_default();
    let content = &answer[end + 4..];
    if status.split(|byte| *byte == b' ').nth(1) != Some(&b"200"[..]) {
        bail!("{address} answers `{}`: {}", line(status), line(content));
    }
    Ok(content.to_vec())
}

/// Sends a request of HTTP 1.0, whose answer ends with the connection, and returns all that comes.
fn exchange<S>(
    mut stream: &S,
    path: &str,
    deadline: Instant,
    set_patience: impl Fn(&S, Option<Duration>) -> io::Result<()>,
) -> io::Result<Vec<u8>>
where
    for<'s> &'s S: Read + Write,
{
    // Nothing is on its way, so there is room for this in the socket.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    read_all(stream, ANSWER_BYTES_MAX, deadline, set_patience)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;
    use std::thread;

    /// Sends byte after byte, for ever.
    fn drip(mut stream: impl Write) {
        while stream.write_all(b"x").is_ok() {}
    }

    fn why(address: &Address, patience: Duration) -> String {
        format!("{:#}", get_within(address, "/", patience).unwrap_err())
    }

    #[test]
    fn a_page_that_drips_holds_nobody_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page");
        let unix = UnixListener::bind(&path).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let addresses = [Address::Tcp(tcp.local_addr().unwrap()), Address::Unix(path)];
        thread::spawn(move || tcp.incoming().flatten().for_each(drip));
        thread::spawn(move || unix.incoming().flatten().for_each(drip));
        for address in &addresses {
            // On a busy machine it can take as long to connect alone, which is another error.
            let mut patience = [50, 1000, 10_000].into_iter().map(Duration::from_millis);
            assert!(patience.any(|patience| why(address, patience).contains("did not come in time")), "{address}");
        }
    }

    #[test]
    fn a_page_whose_queue_is_full_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page");
        let listener = UnixListener::bind(&path).unwrap();
        // Nobody accepts: clients wait in the queue until it is full, and then for a place in it.
        rustix::net::listen(&listener, 1).unwrap();
        let address = Address::Unix(path);
        assert!((0..5).all(|_| why(&address, Duration::from_millis(2)).contains("no page answers at")));
    }

    /// Returns what a client has of a page that answers with these bytes.
    fn got(answer: &'static [u8]) -> Result<Vec<u8>> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp(listener.local_addr().unwrap());
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 64][.."GET /a HTTP/1.0\r\n".len()]).unwrap();
            stream.write_all(answer).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            stream
        });
        let got = get_within(&address, "/a", Duration::from_secs(60));
        drop(server.join().unwrap());
        got
    }

    #[test]
    fn the_content_of_a_page_is_returned() {
        assert_eq!(got(b"HTTP/1.0 200 OK\r\n\r\ncontent").unwrap(), b"content");
    }

    #[test]
    fn what_a_stranger_answers_does_not_command_the_terminal() {
        let error = got(b"HTTP/1.0 404 \x1b[2J\r\nA: b\r\n\r\n\x1b]0;x\x07\n").unwrap_err().to_string();
        assert!(error.ends_with(" answers `HTTP/1.0 404  [2J`: ]0;x"), "{error}");
    }
}
