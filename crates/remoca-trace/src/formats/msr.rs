//! CSV of Microsoft Research Cambridge (SNIA IOTTA): one request a line, times in units of 100 ns, offset and size in bytes.
//!
//! ```text
//! time,host,disk number,Read or Write,offset,size,response time
//! ```
//! Source: the README of the traces (Narayanan et al., *Write off-loading*, FAST 2008). Times count from the first request.

use super::batch::{BATCH_RECORDS, Batch, Parser};
use super::disks::Disks;
use super::text::{number, shown};
use crate::error::TraceError;
use crate::input::Input;
use crate::limits::of_bytes;
use remoca_protocol::trace::{TraceRecord, TracedOp};

#[derive(Default)]
pub(super) struct Msr {
    disks: Disks,
    first: Option<u64>,
}

/// Fields of a line.
pub(super) struct Line<'a> {
    time: u64,
    disk: &'a [u8],
    op: TracedOp,
    offset: u64,
    size: u64,
    response: u64,
}

/// Returns the fields of a line, or `None` if it has others.
pub(super) fn split(line: &[u8]) -> Option<Line<'_>> {
    let mut ends = line.iter().enumerate().filter(|(_, byte)| **byte == b',').map(|(at, _)| at);
    let (first, _, third) = (ends.next()?, ends.next()?, ends.next()?);
    let fields: Vec<&[u8]> = line[third + 1..].splitn(5, |byte| *byte == b',').collect();
    let &[op, offset, size, response] = &fields[..] else { return None };
    let op = match op {
        _ if op.eq_ignore_ascii_case(b"Read") => TracedOp::Read,
        _ if op.eq_ignore_ascii_case(b"Write") => TracedOp::Write,
        _ => return None,
    };
    let [time, offset, size, response] = [number(&line[..first])?, number(offset)?, number(size)?, number(response)?];
    Some(Line { time, disk: &line[first + 1..third], op, offset, size, response })
}

impl Msr {
    fn record(&mut self, line: &[u8]) -> Result<TraceRecord, String> {
        let Some(line) = split(line) else {
            let wanted = "time,host,disk,Read or Write,offset,size,response time";
            return Err(format!("`{}` is no request of such a trace: {wanted}", shown(line)));
        };
        let disk = self.disks.number(line.disk)?;
        let first = *self.first.get_or_insert(line.time);
        Ok(TraceRecord {
            issued_ns: line.time.saturating_sub(first).saturating_mul(100).min(u64::MAX / 2),
            latency_ns: line.response.min(1 << 40) * 100,
            disk,
            ..of_bytes(line.op, line.offset, line.size)?
        })
    }
}

impl Parser for Msr {
    fn parse(&mut self, input: &mut Input, batch: &mut Batch) -> Result<bool, TraceError> {
        while batch.records.len() < BATCH_RECORDS {
            let record = match input.line()? {
                None => return Ok(!batch.records.is_empty()),
                Some(b"") => continue,
                Some(line) => self.record(line),
            };
            batch.records.push(record.map_err(|what| input.error_in_line(what))?);
        }
        Ok(true)
    }
}
