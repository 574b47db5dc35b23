//! Frames of a trace: records that are encoded together.

use super::number::{put, put_difference, take, take_difference};
use super::{NotATrace, TICK_NS, TraceRecord, TracedOp, TracedSource};

/// Bytes before the records of a frame.
pub const HEADER_BYTES: usize = 28;
/// Maximum number of bytes of a frame's records.
pub const FRAME_BYTES_MAX: usize = 1 << 16;
/// Bytes of records from which on a frame is full: one more record of at most 45 bytes fits.
const FULL_BYTES: usize = 20 << 10;
/// Bytes of a header before its checksum.
const CHECKED_BYTES: usize = 24;

/// Flag of a frame: the guest's evictions are seen, and recorded.
const SEES_EVICTIONS: u32 = 1;

/// Bits of a tag. The lowest three are the operation.
const FROM_CACHE: u8 = 1 << 3;
const PARTIAL: u8 = 1 << 4;
const OTHER_DISK: u8 = 1 << 5;
const NEXT_BLOCK: u8 = 1 << 6;
const ONE_BLOCK: u8 = 1 << 7;

const OPS: [TracedOp; 6] =
    [TracedOp::Read, TracedOp::Write, TracedOp::Flush, TracedOp::Discard, TracedOp::WriteZeroes, TracedOp::Evicted];

/// What the next record is relative to.
#[derive(Clone, Copy, Debug, Default)]
struct Before {
    ticks: u64,
    disk: u16,
    end: u64,
}

/// Encoder of one frame after the other.
#[derive(Debug, Default)]
pub struct FrameEncoder {
    records: Vec<u8>,
    count: u32,
    first_ticks: u64,
    before: Before,
}

impl FrameEncoder {
    /// Returns an encoder of an empty frame.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a record.
    pub fn push(&mut self, record: &TraceRecord) {
        let TraceRecord { issued_ns, latency_ns, block, blocks, disk, op, source, is_partial } = *record;
        let ticks = issued_ns / TICK_NS;
        // So that what ends later in truth does not end earlier in the trace.
        let latency = issued_ns.saturating_add(latency_ns) / TICK_NS - ticks;
        if self.count == 0 {
            (self.first_ticks, self.before.ticks) = (ticks, ticks);
        }
        let bytes = &mut self.records;
        let number = (0..).zip(OPS).find_map(|(number, other)| (other == op).then_some(number));
        let flags = [
            (source == TracedSource::Cache, FROM_CACHE),
            (is_partial, PARTIAL),
            (disk != self.before.disk, OTHER_DISK),
            (block == self.before.end, NEXT_BLOCK),
            (blocks == 1, ONE_BLOCK),
        ];
        bytes.push(flags.iter().fold(number.unwrap_or(0), |tag, (is_set, flag)| tag | if *is_set { *flag } else { 0 }));
        if disk != self.before.disk {
            put(bytes, disk.into());
        }
        put_difference(bytes, ticks, self.before.ticks);
        if op != TracedOp::Evicted {
            put(bytes, latency);
        }
        if block != self.before.end {
            put_difference(bytes, block, self.before.end);
        }
        if blocks != 1 {
            put(bytes, blocks);
        }
        self.count += 1;
        self.before = Before { ticks, disk, end: record.end() };
    }

    /// Returns the number of records in the frame.
    #[must_use]
    pub fn records(&self) -> u32 {
        self.count
    }

    /// Returns whether the frame should be finished before the next record.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.records.len() >= FULL_BYTES
    }

    /// Returns the bytes of the frame, and begins the next one. `lost`: number of records that were lost before its first
    /// one. `sees_evictions`: whether its records include the guest's evictions.
    pub fn finish(&mut self, lost: u32, sees_evictions: bool) -> Vec<u8> {
        let Self { records, count, first_ticks, .. } = std::mem::take(self);
        let mut frame = Vec::with_capacity(HEADER_BYTES + records.len());
        let length = u32::try_from(records.len()).unwrap_or(u32::MAX);
        let flags = if sees_evictions { SEES_EVICTIONS } else { 0 };
        [length, count, lost, flags].iter().for_each(|word| frame.extend(word.to_le_bytes()));
        frame.extend(first_ticks.to_le_bytes());
        let check = checksum(&frame, &records);
        frame.extend(check.to_le_bytes());
        frame.extend(records);
        frame
    }
}

fn checksum(header: &[u8], records: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(header);
    hasher.update(records);
    hasher.finalize()
}

/// What the header of a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Number of bytes after the header, at most [`FRAME_BYTES_MAX`].
    pub length: usize,
    pub records: u32,
    pub lost: u32,
    pub sees_evictions: bool,
    first_ticks: u64,
    check: u32,
    checked: [u8; CHECKED_BYTES],
}

impl FrameHeader {
    /// Reads the header of a frame.
    ///
    /// # Errors
    /// If no frame has this header.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, NotATrace> {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let (length, records, flags) = (word(0) as usize, word(4), word(12));
        // A record has three bytes at least.
        if length > FRAME_BYTES_MAX || records as usize > length {
            return Err(NotATrace::Damaged("its length cannot be true"));
        }
        if flags & !SEES_EVICTIONS != 0 {
            return Err(NotATrace::Damaged("it has unknown flags"));
        }
        Ok(Self {
            length,
            records,
            lost: word(8),
            sees_evictions: flags & SEES_EVICTIONS != 0,
            first_ticks: u64::from(word(16)) | u64::from(word(20)) << 32,
            check: word(24),
            checked: std::array::from_fn(|i| bytes[i]),
        })
    }

    /// Appends the records to `records`. `bytes` are those after the header, [`Self::length`] of them.
    ///
    /// # Errors
    /// If the frame is damaged. `records` is then as before.
    pub fn decode(&self, mut bytes: &[u8], records: &mut Vec<TraceRecord>) -> Result<(), NotATrace> {
        if checksum(&self.checked, bytes) != self.check {
            return Err(NotATrace::Damaged("its checksum is wrong"));
        }
        let before = records.len();
        let mut last = Before { ticks: self.first_ticks, ..Before::default() };
        for _ in 0..self.records {
            let Some(record) = take_record(&mut bytes, &mut last) else {
                records.truncate(before);
                return Err(NotATrace::Damaged("a record makes no sense"));
            };
            records.push(record);
        }
        if !bytes.is_empty() {
            records.truncate(before);
            return Err(NotATrace::Damaged("it has more than its records"));
        }
        Ok(())
    }
}

/// Takes the next record from the front of a frame.
fn take_record(bytes: &mut &[u8], before: &mut Before) -> Option<TraceRecord> {
    let (&tag, rest) = bytes.split_first()?;
    *bytes = rest;
    let has = |flag: u8| tag & flag != 0;
    let op = *OPS.get(usize::from(tag & 7))?;
    let disk = if has(OTHER_DISK) { u16::try_from(take(bytes)?).ok()? } else { before.disk };
    let ticks = take_difference(bytes, before.ticks)?;
    let latency = if op == TracedOp::Evicted { 0 } else { take(bytes)? };
    let block = if has(NEXT_BLOCK) { before.end } else { take_difference(bytes, before.end)? };
    let blocks = if has(ONE_BLOCK) { 1 } else { take(bytes)? };
    let end = block.checked_add(blocks)?;
    ticks.checked_add(latency)?.checked_mul(TICK_NS)?;
    *before = Before { ticks, disk, end };
    Some(TraceRecord {
        issued_ns: ticks * TICK_NS,
        latency_ns: latency * TICK_NS,
        block,
        blocks,
        disk,
        op,
        source: if has(FROM_CACHE) { TracedSource::Cache } else { TracedSource::Disk },
        is_partial: has(PARTIAL),
    })
}

/// What is known of a frame besides its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    pub lost: u32,
    pub sees_evictions: bool,
}

impl Frame {
    /// Takes a frame from the front of `bytes`, and appends its records. Returns it with the rest of the bytes.
    ///
    /// # Errors
    /// [`NotATrace::CutShort`] if there is no whole frame, otherwise if it is damaged.
    pub fn split<'a>(bytes: &'a [u8], records: &mut Vec<TraceRecord>) -> Result<(Self, &'a [u8]), NotATrace> {
        let (header, rest) = bytes.split_first_chunk().ok_or(NotATrace::CutShort)?;
        let header = FrameHeader::parse(header)?;
        let (body, rest) = rest.split_at_checked(header.length).ok_or(NotATrace::CutShort)?;
        header.decode(body, records)?;
        Ok((Self { lost: header.lost, sees_evictions: header.sees_evictions }, rest))
    }
}
