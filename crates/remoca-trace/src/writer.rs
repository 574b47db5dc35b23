//! Writer of our own format.

use crate::formats::Batch;
use remoca_protocol::trace::{FrameEncoder, TraceRecord, head};
use std::io::{self, Write};

/// A trace under construction. It is whole after [`Self::finish`].
pub struct Writer<W> {
    to: W,
    frame: FrameEncoder,
    sees_evictions: bool,
    lost: u64,
}

impl<W: Write> Writer<W> {
    /// Begins a trace.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn new(mut to: W) -> io::Result<Self> {
        to.write_all(&head())?;
        Ok(Self { to, frame: FrameEncoder::new(), sees_evictions: false, lost: 0 })
    }

    /// Appends the records of a batch.
    ///
    /// # Errors
    /// Those of the writer below.
    pub fn write(&mut self, batch: &Batch) -> io::Result<()> {
        if batch.lost > 0 || batch.sees_evictions != self.sees_evictions {
            self.end_frame()?;
            self.sees_evictions = batch.sees_evictions;
            self.lost += batch.lost;
        }
        batch.records.iter().try_for_each(|record| self.push(record))
    }

    fn push(&mut self, record: &TraceRecord) -> io::Result<()> {
        self.frame.push(record);
        if self.frame.is_full() { self.end_frame() } else { Ok(()) }
    }

    fn end_frame(&mut self) -> io::Result<()> {
        if self.frame.records() == 0 {
            return Ok(());
        }
        // A frame has 32 bits for it: that many or more.
        let lost = u32::try_from(std::mem::take(&mut self.lost)).unwrap_or(u32::MAX);
        let bytes = self.frame.finish(lost, self.sees_evictions);
        self.to.write_all(&bytes)
    }

    /// Completes the trace, and returns what it was written to.
    ///
    /// # Errors
    /// Those of the writer below.
    pub fn finish(mut self) -> io::Result<W> {
        self.end_frame()?;
        if self.lost > 0 {
            // Nothing came after what was lost.
            let lost = u32::try_from(self.lost).unwrap_or(u32::MAX);
            let bytes = self.frame.finish(lost, self.sees_evictions);
            self.to.write_all(&bytes)?;
        }
        self.to.flush()?;
        Ok(self.to)
    }
}
