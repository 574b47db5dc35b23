//! The client of a VM process's control socket.

use remoca_protocol::control::{Command, REPLY_BYTES_MAX, Reply};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes that are read at once.
const PIECE_BYTES: usize = 64 << 10;

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
    exchange(path, command, patience)
}

/// Sends a command, and returns the reply if all of it arrives within `patience`.
///
/// # Errors
/// As [`call`]. Nothing is known of what the process did then.
pub fn call_within(path: &Path, command: Command, patience: Duration) -> io::Result<Reply> {
    exchange(path, command, patience).map(|(reply, _)| reply)
}

fn exchange(path: &Path, command: Command, patience: Duration) -> io::Result<(Reply, BufReader<UnixStream>)> {
    let give_up_at = Instant::now() + patience;
    let mut stream = connect_within(path, patience)?;
    let line = command.line().map_err(io::Error::other)?;
    // A busy process may answer and close before it has received this line, so the answer counts, not the broken pipe.
    // Only one line is read, because a read error follows the answer if part of the command was left unread.
    let sent = stream.write_all(&line);
    let mut stream = BufReader::new(stream);
    let text = read_line(&mut stream, give_up_at).map_err(|error| explain_silence(error, patience))?;
    if text.is_empty() {
        return Err(sent.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into()));
    }
    Ok((Reply::parse(&text).map_err(senseless)?, stream))
}

/// Reads up to the end of a line, or of the stream, until `give_up_at`.
fn read_line(stream: &mut BufReader<UnixStream>, give_up_at: Instant) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    while text.len() <= REPLY_BYTES_MAX {
        let left = give_up_at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        stream.get_ref().set_read_timeout(Some(left))?;
        let piece = match stream.fill_buf() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read?,
        };
        let end = piece.iter().position(|byte| *byte == b'\n');
        let count = end.map_or(piece.len(), |end| end + 1);
        text.extend_from_slice(&piece[..end.unwrap_or(count)]);
        stream.consume(count);
        if count == 0 || end.is_some() {
            return Ok(text);
        }
    }
    Err(senseless(format!("its answer has more than {REPLY_BYTES_MAX} bytes")))
}

/// Returns the error of an answer that is none.
fn senseless(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Returns all that comes until the end of the stream. `set_patience` sets how long a read of it waits.
///
/// # Errors
/// `TimedOut` if the end does not come until `give_up_at`, or another one if a read fails, or more than `most` bytes come.
pub fn read_all<S>(
    mut stream: &S,
    most: usize,
    give_up_at: Instant,
    set_patience: impl Fn(&S, Option<Duration>) -> io::Result<()>,
) -> io::Result<Vec<u8>>
where
    for<'s> &'s S: Read,
{
    let (mut all, mut piece) = (Vec::new(), vec![0; PIECE_BYTES]);
    while all.len() <= most {
        let left = give_up_at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "its answer did not come in time"));
        }
        set_patience(stream, Some(left))?;
        match stream.read(&mut piece) {
            Ok(0) => return Ok(all),
            Ok(count) => all.extend_from_slice(&piece[..count]),
            // The time is over, or almost.
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other(format!("its answer has more than {most} bytes")))
}

/// Connects to the socket at `path`. A process that hangs accepts nobody, and its queue of clients may be full.
///
/// # Errors
/// If nobody listens there, or there is no place in the queue within `patience`.
pub fn connect_within(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // Linux waits no longer for a place in the queue either.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(patience))?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)
        .map_err(|error| explain_silence(io::Error::from(error), patience))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_comes_is_returned_unless_it_is_too_much_or_too_late() {
        let read = |said: &[u8], is_over: bool, patience: Duration| {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(said).unwrap();
            let theirs = (!is_over).then_some(theirs);
            let all = read_all(&ours, 4, Instant::now() + patience, UnixStream::set_read_timeout);
            drop(theirs);
            all.map_err(|error| (error.kind(), error.to_string()))
        };
        const LONG: Duration = Duration::from_secs(60);
        assert_eq!(read(b"1234", true, LONG).unwrap(), b"1234");
        assert_eq!(read(b"12345", false, LONG).unwrap_err().1, "its answer has more than 4 bytes");
        assert_eq!(read(b"1", false, Duration::from_millis(2)).unwrap_err().0, io::ErrorKind::TimedOut);
    }
}
