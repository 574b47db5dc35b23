//! The trace of a VM's disk requests and of its guest's evictions, in the order in which they ended.
//!
//! ```text
//! file   "REMOTRCE" | version u32 | bytes of a block u32 | frames
//! frame  bytes of its records u32 | number of its records u32 | lost u32 | flags u32 | first issued u64
//!        | CRC-32 of all other bytes of the frame u32 | records
//! record tag u8 | [disk] | issued | [latency] | [block] | [blocks]
//! ```
//! Fixed numbers are little-endian, those of a record LEB128. A frame is read without those before it: it begins with disk 0
//! and block 0. `lost` is the number of records that were lost before the first one of the frame. Times count in units of
//! [`TICK_NS`] from the start of the process. A record has the difference to the time before it, and to the block after
//! those of the record before it, zigzag encoded.
//!
//! `frame.rs` encodes and decodes frames, `number.rs` their numbers. Decision 0043.

mod frame;
mod number;

pub use frame::{FRAME_BYTES_MAX, Frame, FrameEncoder, FrameHeader, HEADER_BYTES as FRAME_HEADER_BYTES};

/// First bytes of a trace.
pub const MAGIC: [u8; 8] = *b"REMOTRCE";
/// Bytes before the first frame.
pub const HEAD_BYTES: usize = 16;
/// Unit of all times of a trace, in nanoseconds.
pub const TICK_NS: u64 = 100;
const VERSION: u32 = 1;
const BLOCK_BYTES: u32 = 4096;

/// Reason why bytes are not a trace that this program reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotATrace {
    #[error("this is not a remoca trace")]
    OtherFile,
    #[error(
        "it is a trace of version {0}, and this program reads version {VERSION}: use the program that made it, or a newer one"
    )]
    Version(u32),
    #[error("it has blocks of {0} bytes, and this program reads blocks of {BLOCK_BYTES}")]
    BlockSize(u32),
    #[error("it ends within a frame")]
    CutShort,
    #[error("a frame is damaged: {0}")]
    Damaged(&'static str),
}

/// Operation of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TracedOp {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    /// The guest evicted the page of this block.
    Evicted,
}

/// Source of the answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TracedSource {
    Disk,
    Cache,
}

/// Record of one completed request, or of an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// When it was issued. Rounded down to a tick.
    pub issued_ns: u64,
    /// Time until it completed, in whole ticks.
    pub latency_ns: u64,
    /// First block that it touches.
    pub block: u64,
    /// Number of blocks that it touches.
    pub blocks: u64,
    pub disk: u16,
    pub op: TracedOp,
    pub source: TracedSource,
    /// Whether it touches only a part of its first or last block.
    pub is_partial: bool,
}

impl TraceRecord {
    /// Returns the record of a request for the bytes from `offset` on.
    #[must_use]
    pub fn of_bytes(op: TracedOp, offset: u64, length: u64) -> Self {
        let bytes = u64::from(BLOCK_BYTES);
        let end = offset.saturating_add(length);
        let block = offset / bytes;
        let blocks = if length == 0 { 0 } else { end.div_ceil(bytes) - block };
        let is_partial = length > 0 && !(offset.is_multiple_of(bytes) && length.is_multiple_of(bytes));
        Self { issued_ns: 0, latency_ns: 0, block, blocks, disk: 0, op, source: TracedSource::Disk, is_partial }
    }

    /// Returns the block after the last one that it touches.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.block.saturating_add(self.blocks)
    }
}

/// Returns the bytes that a trace begins with.
#[must_use]
pub fn head() -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(&MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[12..].copy_from_slice(&BLOCK_BYTES.to_le_bytes());
    head
}

/// Checks the first bytes of a trace.
///
/// # Errors
/// If they are not those of a trace that this program reads.
pub fn check_head(head: &[u8; HEAD_BYTES]) -> Result<(), NotATrace> {
    let rest = head.strip_prefix(&MAGIC).ok_or(NotATrace::OtherFile)?;
    let words = rest.as_chunks::<4>().0;
    match (u32::from_le_bytes(words[0]), u32::from_le_bytes(words[1])) {
        (VERSION, BLOCK_BYTES) => Ok(()),
        (VERSION, other) => Err(NotATrace::BlockSize(other)),
        (other, _) => Err(NotATrace::Version(other)),
    }
}

/// A whole trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    pub records: Vec<TraceRecord>,
    /// Number of records that were lost.
    pub lost: u64,
}

/// Returns the trace in these bytes. An incomplete frame at the end is left out.
///
/// # Errors
/// If the bytes are not a trace, or a frame is damaged.
pub fn parse_trace(bytes: &[u8]) -> Result<Trace, NotATrace> {
    let (head, mut rest) = bytes.split_first_chunk().ok_or(NotATrace::OtherFile)?;
    check_head(head)?;
    let mut trace = Trace::default();
    loop {
        match Frame::split(rest, &mut trace.records) {
            Ok((frame, after)) => {
                trace.lost += u64::from(frame.lost);
                rest = after;
            }
            Err(NotATrace::CutShort) => return Ok(trace),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> TraceRecord {
        TraceRecord {
            issued_ns: 1_000_000,
            latency_ns: 500,
            block: 3,
            blocks: 2,
            disk: 1,
            op: TracedOp::Read,
            source: TracedSource::Cache,
            is_partial: false,
        }
    }

    #[test]
    fn a_trace_is_these_bytes() {
        let mut encoder = FrameEncoder::new();
        encoder.push(&record());
        encoder.push(&TraceRecord { issued_ns: 999_900, block: 5, blocks: 1, source: TracedSource::Disk, ..record() });
        encoder.push(&TraceRecord { op: TracedOp::Evicted, latency_ns: 0, block: 200, blocks: 1, ..record() });
        let frame = encoder.finish(7, true);
        let head = [&b"REMOTRCE"[..], &[1, 0, 0, 0, 0, 16, 0, 0]].concat();
        let numbers = [13, 0, 0, 0, 3, 0, 0, 0, 7, 0, 0, 0, 1, 0, 0, 0, 0x10, 0x27, 0, 0, 0, 0, 0, 0];
        // Disk 1, at once, 5 ticks, block 3, 2 blocks. A tick before, the next block. A tick later, 194 blocks further.
        let records = [0x28, 1, 0, 5, 6, 2, 0xc0, 1, 5, 0x8d, 2, 0x84, 3];
        assert_eq!(super::head(), head[..]);
        assert_eq!((&frame[..24], &frame[28..]), (&numbers[..], &records[..]));
        let trace = parse_trace(&[&head, &frame[..]].concat()).unwrap();
        assert_eq!((trace.records[0], trace.records.len(), trace.lost), (record(), 3, 7));
    }

    #[test]
    fn what_is_no_trace_is_told() {
        let bytes = [&head()[..], &FrameEncoder::new().finish(0, false)].concat();
        assert_eq!(parse_trace(&bytes), Ok(Trace::default()));
        assert_eq!(parse_trace(&bytes[..20]), Ok(Trace::default()), "a torn frame is left out");
        assert_eq!(parse_trace(&bytes[..15]), Err(NotATrace::OtherFile));
        let with = |at: usize, byte: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = byte;
            parse_trace(&bytes)
        };
        assert_eq!(with(0, b'r'), Err(NotATrace::OtherFile));
        assert_eq!(with(8, 9), Err(NotATrace::Version(9)));
        assert_eq!(with(13, 2), Err(NotATrace::BlockSize(512)));
        assert!(matches!(with(20, 1), Err(NotATrace::Damaged(_))));
    }

    #[test]
    fn bytes_become_the_blocks_that_they_touch() {
        let of = |offset, length| {
            let record = TraceRecord::of_bytes(TracedOp::Read, offset, length);
            (record.block, record.blocks, record.is_partial)
        };
        assert_eq!([of(0, 4096), of(4096, 8192), of(512, 512)], [(0, 1, false), (1, 2, false), (0, 1, true)]);
        assert_eq!([of(4095, 2), of(0, 4097), of(8192, 0)], [(0, 2, true), (0, 2, true), (2, 0, false)]);
        assert_eq!(of(u64::MAX, u64::MAX).1, 1, "no overflow");
    }
}
