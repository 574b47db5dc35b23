//! A trace as bytes, of which only a piece is in memory.

use crate::error::{ErrorKind, Position, TraceError};
use std::io::{ErrorKind as IoErrorKind, Read};

/// Bytes of a trace in memory.
const BUFFER_BYTES: usize = 256 << 10;
/// Maximum number of bytes of a line, without its end.
pub const LINE_BYTES_MAX: usize = 4096;

/// The bytes of a trace from some position on.
pub struct Input {
    reader: Box<dyn Read>,
    buffer: Box<[u8]>,
    /// Bytes of the buffer that are not taken.
    unread: std::ops::Range<usize>,
    /// Bytes of the trace before those in the buffer.
    before: u64,
    /// Number of lines that were taken; `None` if none was asked for.
    lines: Option<u64>,
    /// Whether the line that was taken last had no end, so that the trace may go on elsewhere.
    is_open: bool,
}

impl Input {
    /// Returns the bytes that `reader` yields.
    pub fn new(reader: Box<dyn Read>) -> Self {
        Self { reader, buffer: vec![0; BUFFER_BYTES].into(), unread: 0..0, before: 0, lines: None, is_open: false }
    }

    /// Returns an error at the current position.
    pub fn error(&self, kind: ErrorKind) -> TraceError {
        let at = match self.lines {
            Some(lines) => Position::Line(lines),
            None => Position::Byte(self.before + self.unread.start as u64),
        };
        TraceError { kind, format: None, at }
    }

    /// Returns an error at the line that was taken last, which is `what`: the trace is cut short if the line has no end.
    pub fn error_in_line(&self, what: String) -> TraceError {
        self.error(if self.is_open { ErrorKind::CutShort } else { ErrorKind::Wrong(what) })
    }

    /// Returns whether the line that was taken last has no end, so that the trace may have gone on within it.
    pub fn is_line_open(&self) -> bool {
        self.is_open
    }

    /// Reads until `count` bytes are in memory, or the trace ends. Returns all bytes that are not taken.
    fn fill(&mut self, count: usize) -> Result<&[u8], TraceError> {
        if self.unread.len() < count && self.unread.start + count > self.buffer.len() {
            self.buffer.copy_within(self.unread.clone(), 0);
            self.before += self.unread.start as u64;
            self.unread = 0..self.unread.len();
        }
        while self.unread.len() < count {
            match self.reader.read(&mut self.buffer[self.unread.end..]) {
                Ok(0) => break,
                Ok(read) => self.unread.end += read,
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(error) => return Err(self.error(ErrorKind::Io(error))),
            }
        }
        Ok(&self.buffer[self.unread.clone()])
    }

    /// Returns up to `count` bytes, which stay.
    pub fn peek(&mut self, count: usize) -> Result<&[u8], TraceError> {
        let bytes = self.fill(count)?;
        Ok(&bytes[..bytes.len().min(count)])
    }

    /// Takes `count` bytes. Returns `None` at the end of the trace.
    pub fn take(&mut self, count: usize) -> Result<Option<&[u8]>, TraceError> {
        match self.fill(count)?.len() {
            0 => Ok(None),
            left if left < count => Err(self.error(ErrorKind::CutShort)),
            _ => {
                self.unread.start += count;
                Ok(Some(&self.buffer[self.unread.start - count..self.unread.start]))
            }
        }
    }

    /// Takes records of `size` bytes each, at least one and at most `count`. Returns `None` at the end of the trace.
    pub fn take_records(&mut self, size: usize, count: usize) -> Result<Option<&[u8]>, TraceError> {
        let whole = self.fill(size)?.len() / size;
        self.take(whole.clamp(1, count) * size)
    }

    /// Takes a line without its end. Returns `None` at the end of the trace.
    pub fn line(&mut self) -> Result<Option<&[u8]>, TraceError> {
        self.lines = Some(self.lines.unwrap_or(0) + 1);
        let mut looked = 0;
        let length = loop {
            let had = self.unread.len();
            let end = self.buffer[self.unread.clone()][looked..].iter().position(|byte| *byte == b'\n');
            let end = end.map(|at| looked + at);
            if end.unwrap_or(had) > LINE_BYTES_MAX {
                return Err(self.error(ErrorKind::Wrong(format!("it is longer than {LINE_BYTES_MAX} bytes"))));
            }
            if let Some(end) = end {
                break end + 1;
            }
            looked = had;
            if self.fill(had + 1)?.len() == had {
                break had;
            }
        };
        if length == 0 {
            return Ok(None);
        }
        let line = &self.buffer[self.unread.start..self.unread.start + length];
        self.unread.start += length;
        self.is_open = !line.ends_with(b"\n");
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        Ok(Some(line.strip_suffix(b"\r").unwrap_or(line)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader that yields one byte at a time.
    struct Slow(Vec<u8>);

    impl Read for Slow {
        fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
            if self.0.is_empty() || to.is_empty() {
                return Ok(0);
            }
            to[0] = self.0.remove(0);
            Ok(1)
        }
    }

    #[test]
    fn lines_and_bytes_do_not_depend_on_how_they_come() {
        let mut input = Input::new(Box::new(Slow(b"ab\r\n\nlast".to_vec())));
        let mut lines = Vec::new();
        while let Some(line) = input.line().unwrap() {
            lines.push(line.to_vec());
        }
        assert_eq!(lines, [&b"ab"[..], b"", b"last"]);
        let mut input = Input::new(Box::new(Slow(vec![7; 10])));
        assert_eq!(input.peek(20).unwrap().len(), 10);
        assert_eq!(input.take(4).unwrap(), Some(&[7; 4][..]));
        assert_eq!(input.take_records(3, 1).unwrap(), Some(&[7; 3][..]));
        let error = input.take(4).unwrap_err();
        assert_eq!((error.is_cut_short(), error.at), (true, Position::Byte(7)));
        assert_eq!(input.take(3).unwrap(), Some(&[7; 3][..]));
        assert_eq!(input.take(1).unwrap(), None);
    }

    #[test]
    fn more_than_the_buffer_goes_through_it() {
        let bytes: Vec<u8> = (0..u8::MAX).cycle().take(BUFFER_BYTES * 2 + 100).collect();
        let mut input = Input::new(Box::new(std::io::Cursor::new(bytes.clone())));
        let mut seen = Vec::new();
        while let Some(records) = input.take_records(7, 1000).unwrap_or(None) {
            seen.extend_from_slice(records);
        }
        assert_eq!(seen[..], bytes[..bytes.len() / 7 * 7]);
    }

    #[test]
    fn a_line_has_the_same_limit_wherever_the_buffer_ends() {
        for before in [0, BUFFER_BYTES - LINE_BYTES_MAX, BUFFER_BYTES - 100] {
            for (bytes, is_long) in [(LINE_BYTES_MAX, false), (LINE_BYTES_MAX + 1, true)] {
                for end in ["\n", "", "\nmore"] {
                    let text = [&vec![b'y'; before][..], &vec![b'x'; bytes][..], end.as_bytes()].concat();
                    let mut input = Input::new(Box::new(std::io::Cursor::new(text)));
                    input.peek(1).unwrap();
                    if before > 0 {
                        input.take(before).unwrap();
                    }
                    let length = input.line().map(|line| line.map(<[u8]>::len)).ok();
                    assert_eq!(length, (!is_long).then_some(Some(bytes)), "{before}, {end}");
                }
            }
        }
    }
}
