//! Formats of traces, each a parser that yields records batch by batch.
//!
//! A parser never takes more memory for an input than a batch. It refuses what no request can be (`limits.rs`), with the position.

mod batch;
mod blkparse;
mod blktrace;
mod disks;
mod format;
mod msr;
mod oracle;
mod own;
mod sniff;
mod text;
mod vscsi;

use crate::error::{ErrorKind, TraceError};
use crate::input::Input;
pub use batch::Batch;
use batch::Parser;
pub use format::Format;
use std::io::Read;

/// Bytes of a trace that are looked at to find its format.
const SNIFFED_BYTES: usize = 16384;

/// A trace that is being read.
pub struct Source {
    input: Input,
    parser: Box<dyn Parser>,
    format: Format,
}

/// Opens the trace that `reader` yields. Without a format, finds out which it is.
///
/// # Errors
/// If reading fails, or its format is not recognized.
pub fn open(reader: Box<dyn Read>, format: Option<Format>) -> Result<Source, TraceError> {
    let mut input = Input::new(reader);
    let first = input.peek(SNIFFED_BYTES)?.to_vec();
    let found = match format {
        Some(format @ (Format::Blkparse | Format::Msr)) => sniff::check_text(&first).map(|()| format),
        Some(format) => Ok(format),
        None => sniff::format(&first),
    };
    let format = found.map_err(|what| input.error(ErrorKind::Wrong(what)))?;
    let parser: Box<dyn Parser> = match format {
        Format::Remoca => Box::new(own::Own::default()),
        Format::Blktrace => Box::new(blktrace::Blktrace::default()),
        Format::Blkparse => Box::new(blkparse::Blkparse::default()),
        Format::Vscsi => Box::new(vscsi::Vscsi::default()),
        Format::Msr => Box::new(msr::Msr::default()),
        Format::OracleGeneral => Box::new(oracle::OracleGeneral),
    };
    Ok(Source { input, parser, format })
}

impl Source {
    /// Returns the format of the trace.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Replaces the batch by the next one. Returns `false` at the end of the trace.
    ///
    /// # Errors
    /// What is wrong with the trace, and where. The batch then has the records before that place.
    pub fn read(&mut self, batch: &mut Batch) -> Result<bool, TraceError> {
        batch.clear();
        let read = self.parser.parse(&mut self.input, batch);
        read.map_err(|error| TraceError { format: Some(self.format), ..error })
    }
}

#[cfg(test)]
mod tests;
