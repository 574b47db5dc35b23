//! Text output of blkparse, in its default form: one event a line, and a summary at the end, which is skipped.
//!
//! ```text
//! major,minor cpu sequence seconds pid action RWBS sector + sectors [process]
//! ```
//! Requests are taken as they are queued (Q). Source: the manual page blkparse(1).

use super::batch::{BATCH_RECORDS, Batch, Parser};
use super::disks::Disks;
use super::text::{number, shown};
use crate::error::{ErrorKind, TraceError};
use crate::input::Input;
use crate::limits::{of_bytes, of_sectors, of_traced_write};
use remoca_protocol::trace::{TraceRecord, TracedOp};

#[derive(Default)]
pub(super) struct Blkparse {
    disks: Disks,
    events: u64,
    requests: u64,
    is_summary: bool,
}

/// What blkparse says of each file that it reads, before all events where there are many processors.
pub(super) const NOTE: &[u8] = b"Input file ";

/// The words that each event begins with.
pub(super) struct Event<'a> {
    device: &'a [u8],
    time_ns: u64,
    action: &'a [u8],
    kind: &'a [u8],
}

/// Returns the event of a line with the words that follow, or `None` if it is none.
pub(super) fn split(line: &[u8]) -> Option<(Event<'_>, impl Iterator<Item = &[u8]>)> {
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let device = words.next()?;
    let comma = device.iter().position(|byte| *byte == b',')?;
    let (_major, _minor) = (number(&device[..comma])?, number(&device[comma + 1..])?);
    let (_cpu, _sequence) = (number(words.next()?)?, number(words.next()?)?);
    let time_ns = nanoseconds(words.next()?)?;
    let _pid = number(words.next()?)?;
    let (action, kind) = (words.next()?, words.next()?);
    Some((Event { device, time_ns, action, kind }, words))
}

/// Returns a time such as `0.000001234` in nanoseconds.
fn nanoseconds(text: &[u8]) -> Option<u64> {
    let point = text.iter().position(|byte| *byte == b'.')?;
    let (seconds, fraction) = (number(&text[..point])?, &text[point + 1..]);
    let digits = u32::try_from(fraction.len()).ok().filter(|digits| (1..=9).contains(digits))?;
    let nanoseconds = number(fraction)? * 10_u64.pow(9 - digits);
    Some(seconds.checked_mul(1_000_000_000)?.checked_add(nanoseconds)?.min(u64::MAX / 2))
}

impl Blkparse {
    fn request(&mut self, line: &[u8]) -> Result<Option<TraceRecord>, String> {
        let Some((event, mut words)) = split(line) else {
            return Err(format!("`{}` is no event of blkparse's default output", shown(line)));
        };
        self.events += 1;
        let has = |letter: u8| event.kind.contains(&letter);
        let place = match (words.next().map(number), words.next(), words.next().map(number)) {
            (Some(Some(sector)), Some(b"+"), Some(Some(sectors))) => Some((sector, sectors)),
            _ => None,
        };
        let op = match () {
            () if event.action != b"Q" => return Ok(None),
            () if has(b'D') => TracedOp::Discard,
            () if has(b'R') => TracedOp::Read,
            () if has(b'W') && place.is_some() => {
                of_traced_write(place.map_or(0, |(_, count)| count.saturating_mul(512)))
            }
            () if has(b'F') => TracedOp::Flush,
            () => return Ok(None),
        };
        self.requests += 1;
        let record = match (op, place) {
            (TracedOp::Flush, _) => of_bytes(op, 0, 0)?,
            (_, Some((sector, sectors))) => of_sectors(op, sector, sectors)?,
            (_, None) => return Err(format!("`{}`: sector + sectors are missing", shown(line))),
        };
        Ok(Some(TraceRecord { issued_ns: event.time_ns, disk: self.disks.number(event.device)?, ..record }))
    }
}

impl Parser for Blkparse {
    fn parse(&mut self, input: &mut Input, batch: &mut Batch) -> Result<bool, TraceError> {
        while batch.records.len() < BATCH_RECORDS {
            let request = match input.line()? {
                None if self.requests == 0 && self.events > 0 => {
                    let what = "it has no request that was queued (Q): record it with `blktrace -a queue`";
                    return Err(input.error(ErrorKind::Wrong(what.into())));
                }
                None => return Ok(!batch.records.is_empty()),
                Some(line) if self.is_summary || line.is_empty() || line.starts_with(NOTE) => continue,
                Some(line) if line.starts_with(b"CPU") || line.starts_with(b"Total") => {
                    self.is_summary = true;
                    continue;
                }
                Some(line) => {
                    let is_whole = line.ends_with(b"]");
                    let request = self.request(line);
                    // What is left of a number is a number, too.
                    if input.is_line_open() && !is_whole {
                        return Err(input.error(ErrorKind::CutShort));
                    }
                    request
                }
            };
            match request.map_err(|what| input.error_in_line(what))? {
                Some(request) => batch.records.push(request),
                None => batch.skipped += 1,
            }
        }
        Ok(true)
    }
}
