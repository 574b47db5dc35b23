//! The client of a VM process's control socket.

use remoca_protocol::control::{Command, PATIENCE, Reply};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Sends a command to the VM process that listens at `path`, and returns its reply.
///
/// # Errors
/// If no process listens there, the command cannot be serialized, or no valid reply arrives in time.
pub fn call(path: &Path, command: Command) -> io::Result<Reply> {
    let mut stream = UnixStream::connect(path)?;
    let patience = command.patience();
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let line = command.line().map_err(io::Error::other)?;
    // A busy process may answer and close before it has received this line, so the answer counts, not the broken pipe.
    // Only one line is read, because a read error follows the answer if part of the command was left unread.
    let sent = stream.write_all(&line);
    let mut text = Vec::new();
    BufReader::new(stream).read_until(b'\n', &mut text).map_err(|error| explain_silence(error, patience))?;
    if text.is_empty() {
        return Err(sent.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into()));
    }
    Reply::parse(&text).map_err(io::Error::other)
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
