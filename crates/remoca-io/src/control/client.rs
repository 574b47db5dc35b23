//! The client of a VM process's control socket.

use remoca_protocol::control::{Command, PATIENCE, Reply};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Sends a command to the VM process that listens at `path`, and returns its reply.
///
/// # Errors
/// If no process listens there, the command cannot be serialized, or no valid reply arrives in time.
pub fn call(path: &Path, command: Command) -> io::Result<Reply> {
    call_for_stream(path, command).map(|(reply, _)| reply)
}

/// Sends a command to the VM process that listens at `path`. Returns its reply, and what it sends after the reply.
///
/// # Errors
/// As for [`call`].
pub fn call_for_stream(path: &Path, command: Command) -> io::Result<(Reply, BufReader<UnixStream>)> {
    let patience = command.patience();
    let mut stream = connect(path)?;
    stream.set_read_timeout(Some(patience))?;
    let line = command.line().map_err(io::Error::other)?;
    // A busy process may answer and close before it has received this line, so the answer counts, not the broken pipe.
    // Only one line is read, because a read error follows the answer if part of the command was left unread.
    let sent = stream.write_all(&line);
    let mut text = Vec::new();
    let mut stream = BufReader::new(stream);
    stream.read_until(b'\n', &mut text).map_err(|error| explain_silence(error, patience))?;
    if text.is_empty() {
        return Err(sent.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into()));
    }
    Ok((Reply::parse(&text).map_err(io::Error::other)?, stream))
}

/// Connects to the socket at `path`. A process that hangs accepts nobody, and its queue of clients may be full.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // Linux waits no longer for a place in the queue either.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE))?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)
        .map_err(|error| explain_silence(io::Error::from(error), PATIENCE))?;
    Ok(UnixStream::from(socket))
}

fn explain_silence(error: io::Error, patience: Duration) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => {
            let text = format!("it did not answer within {} seconds", patience.as_secs());
            io::Error::new(io::ErrorKind::TimedOut, text)
        }
        _ => error,
    }
}
