//! Reads from a running `remoca web`: so that other screens show the very snapshot that its page shows.

use crate::address::Address;
use crate::snapshot::Snapshot;
use anyhow::{Context, Result, bail};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(10);
/// Largest answer that is read, in bytes: that of some thousand VMs.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// Returns the newest snapshot of the `remoca web` at `address`.
///
/// # Errors
/// If none answers there.
pub fn snapshot(address: &Address) -> Result<Snapshot> {
    Snapshot::parse(&get(address, "/api/snapshot")?)
        .with_context(|| format!("{address} answers, but is no `remoca web`"))
}

/// Returns the content of `path` at `address`.
///
/// # Errors
/// If nobody answers there, or with something else than this content.
pub fn get(address: &Address, path: &str) -> Result<Vec<u8>> {
    let answer = match address {
        Address::Tcp(socket) => TcpStream::connect_timeout(socket, PATIENCE)
            .and_then(|stream| stream.set_read_timeout(Some(PATIENCE)).map(|()| stream))
            .and_then(|stream| exchange(stream, path)),
        Address::Unix(socket) => UnixStream::connect(socket)
            .and_then(|stream| stream.set_read_timeout(Some(PATIENCE)).map(|()| stream))
            .and_then(|stream| exchange(stream, path)),
    };
    let answer = answer.with_context(|| format!("no page answers at {address}: does `remoca web` listen there?"))?;
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n");
    let Some(end) = end else { bail!("{address} answers with something else than HTTP") };
    let head = String::from_utf8_lossy(&answer[..end]);
    let status = head.lines().next().unwrap_or_default();
    let content = &answer[end + 4..];
    if status.split(' ').nth(1) != Some("200") {
        bail!("{address} answers `{status}`: {}", String::from_utf8_lossy(content).trim());
    }
    Ok(content.to_vec())
}

/// Sends a request of HTTP 1.0, whose answer ends with the connection, and returns all that comes.
fn exchange(mut stream: impl Read + Write, path: &str) -> io::Result<Vec<u8>> {
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer)?;
    Ok(answer)
}
