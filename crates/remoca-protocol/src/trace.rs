//! The trace of a VM's disk requests: one record of 40 bytes for each completed request.
//!
//! Little-endian: issued u64 ns | latency u64 ns | offset u64 | length u64 | disk u16 | operation u8 | source u8 | lost u32.
//! Times count from the start of the process.

/// Bytes of one record.
pub const RECORD_BYTES: usize = 40;

/// Error of bytes that are not a remoca trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is not a remoca trace")]
pub struct NotATrace;

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TracedOp {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

/// Source of the answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TracedSource {
    Disk,
    Cache,
}

/// Record of one completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    pub issued_ns: u64,
    pub latency_ns: u64,
    pub offset: u64,
    pub length: u64,
    pub disk: u16,
    pub op: TracedOp,
    pub source: TracedSource,
    /// Number of records that were lost between the previous record and this one.
    pub lost: u32,
}

impl TraceRecord {
    /// Returns the record in the format of the trace file.
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
        bytes[LOST..].copy_from_slice(&self.lost.to_le_bytes());
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
            lost: lost_before(bytes),
        })
    }
}

/// Offset of the number of lost records in a record.
const LOST: usize = 36;

/// Returns the number of records that were lost before the first of these encoded records.
#[must_use]
pub fn lost_before(record: &[u8]) -> u32 {
    record[LOST..RECORD_BYTES].iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte))
}

/// Returns the records in the bytes of a trace. An incomplete record at the end is left out.
///
/// # Errors
/// If the bytes are not a trace.
pub fn parse_trace(bytes: &[u8]) -> Result<Vec<TraceRecord>, NotATrace> {
    let (records, _) = bytes.as_chunks::<RECORD_BYTES>();
    records.iter().map(|bytes| TraceRecord::decode(bytes).ok_or(NotATrace)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_these_bytes() {
        let record = TraceRecord {
            issued_ns: 0x0102_0304,
            latency_ns: 5,
            offset: 4096,
            length: 512,
            disk: 3,
            op: TracedOp::WriteZeroes,
            source: TracedSource::Cache,
            lost: 0x0a0b,
        };
        let bytes = record.encode();
        let (words, rest) = bytes.split_at(32);
        let words: Vec<u64> = words.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        assert_eq!((words, rest), (vec![0x0102_0304, 5, 4096, 512], &[3, 0, 4, 1, 0x0b, 0x0a, 0, 0][..]));
        assert_eq!(parse_trace(&[&bytes[..], &bytes[..39]].concat()), Ok(vec![record]), "a torn record is left out");
        assert_eq!(lost_before(&bytes), 0x0a0b);
        assert_eq!(parse_trace(&[0xff; 80]), Err(NotATrace));
    }
}
