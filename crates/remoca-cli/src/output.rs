//! What commands say to readers that may have read enough, as in `remoca check | head -1`.

use remoca_protocol::shown;
use std::fmt::Display;
use std::io::{self, ErrorKind, Stdout, Write};

/// Output that is dropped once nobody reads it: the command completes what it has begun, and its exit code says what came of it.
pub struct Output<W>(W);

/// Returns the standard output.
pub fn output() -> Output<Stdout> {
    Output(io::stdout())
}

/// Says something on standard error. Names of files and what others have said may be part of it: a terminal obeys none of it.
pub fn say(text: impl Display) {
    // Nobody is left to be told of a failure.
    let _ = writeln!(io::stderr(), "remoca: {}", shown::clean(&text.to_string()));
}

impl<W: Write> Write for Output<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.write(bytes) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(bytes.len()),
            written => written,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.0.flush() {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            flushed => flushed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_nobody_reads_is_dropped() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        assert!(Output(writer).write_all(b"a line\n").is_ok());
        let mut full = [0; 4];
        assert_eq!(Output(&mut full[..]).write_all(b"a line\n").unwrap_err().kind(), ErrorKind::WriteZero);
    }
}
