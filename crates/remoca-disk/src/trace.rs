//! The trace of a VM's disk requests (`--trace FILE`): one record of 40 bytes for each completed request.
//!
//! Little-endian: issued u64 ns | latency u64 ns | offset u64 | length u64 | disk u16 | operation u8 | source u8 | 0 u32.
//! Times count from the start of the process. Written by the I/O thread through a buffer; a write error ends the trace
//! with a warning, and nothing else.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::Path;

/// Bytes of one record.
pub const RECORD_BYTES: usize = 40;

/// What a request was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TracedOp {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

/// What answered it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TracedSource {
    Disk,
    Cache,
}

/// One completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    pub issued_ns: u64,
    pub latency_ns: u64,
    pub offset: u64,
    pub length: u64,
    pub disk: u16,
    pub op: TracedOp,
    pub source: TracedSource,
}

impl TraceRecord {
    /// The record as it is in the file.
    #[must_use]
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        for (at, value) in [self.issued_ns, self.latency_ns, self.offset, self.length].into_iter().enumerate() {
            bytes[at * 8..at * 8 + 8].copy_from_slice(&value.to_le_bytes());
        }
        bytes[32..34].copy_from_slice(&self.disk.to_le_bytes());
        bytes[34] = match self.op {
            TracedOp::Read => 0,
            TracedOp::Write => 1,
            TracedOp::Flush => 2,
            TracedOp::Discard => 3,
            TracedOp::WriteZeroes => 4,
        };
        bytes[35] = u8::from(self.source == TracedSource::Cache);
        bytes
    }

    fn decode(bytes: &[u8; RECORD_BYTES]) -> Option<Self> {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at * 8..at * 8 + 8]);
            u64::from_le_bytes(word)
        };
        let op = match bytes[34] {
            0 => TracedOp::Read,
            1 => TracedOp::Write,
            2 => TracedOp::Flush,
            3 => TracedOp::Discard,
            4 => TracedOp::WriteZeroes,
            _ => return None,
        };
        let source = if bytes[35] == 0 { TracedSource::Disk } else { TracedSource::Cache };
        Some(Self {
            issued_ns: word(0),
            latency_ns: word(1),
            offset: word(2),
            length: word(3),
            disk: u16::from_le_bytes([bytes[32], bytes[33]]),
            op,
            source,
        })
    }
}

/// Writes a trace.
pub struct TraceWriter {
    out: Option<BufWriter<File>>,
}

impl TraceWriter {
    /// A trace in a new file at `path`.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub fn create(path: &Path) -> std::io::Result<Self> {
        Ok(Self { out: Some(BufWriter::with_capacity(1 << 16, File::create(path)?)) })
    }

    /// Goes on with a trace of a former program of this process; times begin anew.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn append(path: &Path) -> std::io::Result<Self> {
        let file = File::options().create(true).append(true).open(path)?;
        Ok(Self { out: Some(BufWriter::with_capacity(1 << 16, file)) })
    }

    /// Appends one record.
    pub fn record(&mut self, record: &TraceRecord) {
        let failed = match &mut self.out {
            Some(out) => out.write_all(&record.encode()).err(),
            None => None,
        };
        if let Some(error) = failed {
            tracing::warn!("the trace ends here: {error}");
            self.out = None;
        }
    }

    /// Brings what was recorded to the file.
    pub fn flush(&mut self) {
        if let Some(out) = &mut self.out
            && let Err(error) = out.flush()
        {
            tracing::warn!("the trace ends here: {error}");
            self.out = None;
        }
    }
}

/// Reads a whole trace; a torn record at the end is left out.
///
/// # Errors
/// If the file cannot be read, or is not a trace.
pub fn read_trace(path: &Path) -> std::io::Result<Vec<TraceRecord>> {
    let mut bytes = Vec::new();
    File::open(path)?.read_to_end(&mut bytes)?;
    parse_trace(&bytes)
}

/// The records of a trace's bytes.
///
/// # Errors
/// As [`read_trace`].
pub fn parse_trace(bytes: &[u8]) -> std::io::Result<Vec<TraceRecord>> {
    let (records, _) = bytes.as_chunks::<RECORD_BYTES>();
    records
        .iter()
        .map(|bytes| TraceRecord::decode(bytes).ok_or_else(|| std::io::Error::other("this is not a remoca trace")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_reads_back() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let ops = [TracedOp::Read, TracedOp::Write, TracedOp::Flush, TracedOp::Discard, TracedOp::WriteZeroes];
        let records: Vec<_> = ops
            .into_iter()
            .zip(1_u64..)
            .map(|(op, n)| TraceRecord {
                issued_ns: n << 40,
                latency_ns: n,
                offset: n * 4096,
                length: 512,
                disk: 3,
                op,
                source: if n % 2 == 0 { TracedSource::Cache } else { TracedSource::Disk },
            })
            .collect();
        let mut writer = TraceWriter::create(file.path()).unwrap();
        for record in &records {
            writer.record(record);
        }
        writer.flush();
        assert_eq!(read_trace(file.path()).unwrap(), records);
        std::fs::write(file.path(), [0xff; 80]).unwrap();
        assert!(read_trace(file.path()).is_err());
    }
}
