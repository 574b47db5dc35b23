//! Messages over a socket, within a time and a size.

use crate::error::{Error, Result};
use serde_json::Value;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const PIECE_BYTES: usize = 16 << 10;

#[derive(Debug)]
pub(crate) struct Wire {
    stream: UnixStream,
    /// Received bytes after the last message.
    rest: Vec<u8>,
    received_bytes: usize,
}

impl Wire {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self { stream, rest: Vec::new(), received_bytes: 0 }
    }

    /// Returns the size of all messages so far.
    pub(crate) fn received_bytes(&self) -> usize {
        self.received_bytes
    }

    pub(crate) fn send(&mut self, mut text: &[u8], deadline: Instant) -> Result<()> {
        while !text.is_empty() {
            self.stream.set_write_timeout(Some(time_left(deadline)?))?;
            match self.stream.write(text) {
                Ok(0) => return Err(Error::Closed),
                Ok(count) => text = &text[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Returns the next message, of at most `bytes_max`.
    pub(crate) fn receive(&mut self, deadline: Instant, bytes_max: usize) -> Result<Value> {
        let mut searched = 0;
        let end = loop {
            if let Some(at) = self.rest[searched..].iter().position(|byte| *byte == b'\n') {
                break searched + at;
            }
            searched = self.rest.len();
            self.read_piece(deadline, bytes_max)?;
        };
        if end > bytes_max {
            return Err(too_long(bytes_max));
        }
        self.received_bytes += end + 1;
        let line: Vec<u8> = self.rest.drain(..=end).collect();
        serde_json::from_slice(&line)
            .map_err(|error| Error::Nonsense(format!("{error} in {}", String::from_utf8_lossy(&line))).shown())
    }

    fn read_piece(&mut self, deadline: Instant, bytes_max: usize) -> Result<()> {
        if self.rest.len() > bytes_max {
            return Err(too_long(bytes_max));
        }
        let mut piece = [0; PIECE_BYTES];
        self.stream.set_read_timeout(Some(time_left(deadline)?))?;
        match self.stream.read(&mut piece) {
            Ok(0) => Err(Error::Closed),
            Ok(count) => {
                self.rest.extend_from_slice(&piece[..count]);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn too_long(bytes_max: usize) -> Error {
    Error::Nonsense(format!("its messages before an answer have more than {bytes_max} bytes"))
}

fn time_left(deadline: Instant) -> Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(Error::Silent) } else { Ok(left) }
}
