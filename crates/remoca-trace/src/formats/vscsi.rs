//! Traces of VMware's vscsiStats, as CloudPhysics recorded them: binary, little-endian.
//!
//! ```text
//! version 1: number u32 | bytes u32 | segments u32 | command u16 | version u16 | sector u64 | time u64 us
//! version 2: command u16 | version u16 | number u32 | bytes u32 | segments u32 | sector u64 | time u64 us | latency u64 us
//! ```
//! The upper byte of the version is 1 or 2. Commands are those of SCSI. Times count from the first request. Source: the layouts
//! in libCacheSim's `vscsi.h`.

use super::batch::{BATCH_RECORDS, Batch, Parser, number};
use crate::error::{ErrorKind, TraceError};
use crate::input::Input;
use crate::limits::{of_bytes, of_bytes_at};
use remoca_protocol::trace::{TraceRecord, TracedOp};

/// Version of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    One,
    Two,
}

impl Version {
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::One => 32,
            Self::Two => 40,
        }
    }

    /// Returns whether a record says that it has this version.
    fn is_of(self, record: &[u8]) -> bool {
        match self {
            Self::One => record[15] == 1,
            Self::Two => record[3] == 2,
        }
    }

    /// Returns the version of a trace that begins with these bytes: that of its first two records, or of its only one.
    pub(super) fn of(first: &[u8]) -> Option<Self> {
        [Self::Two, Self::One].into_iter().find(|version| {
            let mut records = first.chunks_exact(version.bytes()).take(2).peekable();
            records.peek().is_some() && records.all(|record| version.is_of(record))
        })
    }
}

#[derive(Default)]
pub(super) struct Vscsi {
    version: Option<Version>,
    first_us: Option<u64>,
}

/// Returns what a SCSI command does to blocks, or `None`.
fn op(command: u64) -> Option<TracedOp> {
    match command {
        0x08 | 0x28 | 0xa8 | 0x88 => Some(TracedOp::Read),
        // WRITE, and WRITE AND VERIFY.
        0x0a | 0x2a | 0xaa | 0x8a | 0x2e | 0xae | 0x8e => Some(TracedOp::Write),
        0x35 | 0x91 => Some(TracedOp::Flush),
        _ => None,
    }
}

impl Vscsi {
    fn request(&mut self, version: Version, bytes: &[u8]) -> Result<Option<TraceRecord>, String> {
        if !version.is_of(bytes) {
            return Err("a record says that it has another version than the first one".into());
        }
        let (command, size, at) = match version {
            Version::One => (number::<2>(bytes, 12), number::<4>(bytes, 4), 16),
            Version::Two => (number::<2>(bytes, 0), number::<4>(bytes, 8), 16),
        };
        let (sector, us) = (number::<8>(bytes, at), number::<8>(bytes, at + 8));
        let latency_us = if version == Version::Two { number::<8>(bytes, 32) } else { 0 };
        let first = *self.first_us.get_or_insert(us);
        let Some(op) = op(command) else { return Ok(None) };
        let record = match op {
            TracedOp::Flush => of_bytes(op, 0, 0)?,
            _ => of_bytes_at(op, sector, size)?,
        };
        Ok(Some(TraceRecord {
            issued_ns: us.saturating_sub(first).saturating_mul(1000).min(u64::MAX / 2),
            latency_ns: latency_us.min(1 << 40) * 1000,
            ..record
        }))
    }
}

impl Parser for Vscsi {
    fn parse(&mut self, input: &mut Input, batch: &mut Batch) -> Result<bool, TraceError> {
        let version = match self.version {
            Some(version) => version,
            None => {
                let first = input.peek(80)?;
                if first.is_empty() {
                    return Ok(false);
                }
                let found = Version::of(first);
                let what = || ErrorKind::Wrong("neither version 1 nor 2 of such a trace begins like this".into());
                *self.version.insert(found.ok_or_else(|| input.error(what()))?)
            }
        };
        while batch.records.len() < BATCH_RECORDS {
            let request = match input.peek(version.bytes())? {
                [] => return Ok(!batch.records.is_empty()),
                bytes if bytes.len() < version.bytes() => return Err(input.error(ErrorKind::CutShort)),
                bytes => self.request(version, bytes),
            };
            let request = request.map_err(|what| input.error(ErrorKind::Wrong(what)))?;
            input.take(version.bytes())?;
            match request {
                Some(request) => batch.records.push(request),
                None => batch.skipped += 1,
            }
        }
        Ok(true)
    }
}
