//! Errors of a trace, each with the position where it was met.

use crate::formats::Format;
use std::fmt;
use std::io;

/// Place in a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// Offset of a byte.
    Byte(u64),
    /// Number of a line, from 1 on.
    Line(u64),
}

/// What is wrong.
#[derive(Debug)]
pub enum ErrorKind {
    Io(io::Error),
    /// It ends within a record.
    CutShort,
    /// It is not in this format, or says something impossible.
    Wrong(String),
}

/// Error of reading a trace.
#[derive(Debug)]
pub struct TraceError {
    pub kind: ErrorKind,
    /// Format that was read; `None` if it was not recognized.
    pub format: Option<Format>,
    pub at: Position,
}

impl TraceError {
    /// Returns whether the trace is sound up to where it ends within a record.
    #[must_use]
    pub fn is_cut_short(&self) -> bool {
        matches!(self.kind, ErrorKind::CutShort)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Byte(at) => write!(to, "byte {at}"),
            Self::Line(number) => write!(to, "line {number}"),
        }
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = self.at;
        let of = self.format.map_or(String::new(), |format| format!(" of the trace ({format})"));
        match &self.kind {
            ErrorKind::Io(_) => write!(to, "cannot read on from {at}{of}"),
            ErrorKind::CutShort => write!(to, "the trace is cut short: it ends within the record at {at}{of}"),
            ErrorKind::Wrong(what) => write!(to, "{at}{of}: {what}"),
        }
    }
}

impl std::error::Error for TraceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.kind {
            ErrorKind::Io(error) => Some(error),
            ErrorKind::CutShort | ErrorKind::Wrong(_) => None,
        }
    }
}
