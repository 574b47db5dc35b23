//! Binary output of blktrace: 48 bytes an event, in the byte order of the machine, each followed by data that is skipped.
//!
//! ```text
//! magic and version u32 | sequence u32 | time u64 ns | sector u64 | bytes u32 | action u32 | pid u32 | device u32 | cpu u32
//! | error u16 | bytes of data u16
//! ```
//! Requests are taken as they are queued (Q). A file of one processor has only that one's events: `blkparse -i sda -d FILE`
//! merges them. Source: the kernel's `include/uapi/linux/blktrace_api.h`.

use super::batch::{BATCH_RECORDS, Batch, Parser};
use super::disks::Disks;
use crate::error::{ErrorKind, TraceError};
use crate::input::Input;
use crate::limits::{of_bytes_at, of_traced_write};
use remoca_protocol::trace::{TraceRecord, TracedOp};

const EVENT_BYTES: usize = 48;
/// The upper three bytes of the magic number; the lowest is the version.
pub(super) const MAGIC: u32 = 0x6561_7400;
const VERSION: u32 = 7;

/// What an event is about.
const QUEUED: u32 = 1;
const CATEGORY_SHIFT: u32 = 16;
const READ: u32 = 1 << 0;
const WRITE: u32 = 1 << 1;
const FLUSH: u32 = 1 << 2;
const DEVICE_COMMAND: u32 = 1 << 9;
const NOTICE: u32 = 1 << 10;
const DISCARD: u32 = 1 << 13;

#[derive(Default)]
pub(super) struct Blktrace {
    disks: Disks,
    events: u64,
    requests: u64,
}

/// Fields of an event that matter.
struct Event {
    time_ns: u64,
    sector: u64,
    bytes: u32,
    action: u32,
    device: u32,
    data: usize,
}

/// Returns the event. The byte order is that of its magic number.
fn event(bytes: &[u8; EVENT_BYTES]) -> Result<Event, String> {
    let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
    let magic = word(0);
    let is_little = magic & !0xff == MAGIC;
    if !is_little && magic.swap_bytes() & !0xff != MAGIC {
        return Err("no event begins there: it has not blktrace's magic number".into());
    }
    let order = |word: u32| if is_little { word } else { word.swap_bytes() };
    let version = order(magic) & 0xff;
    if version != VERSION {
        return Err(format!("an event of version {version}; version {VERSION} is read"));
    }
    let long = |at: usize| {
        let [low, high] = if is_little { [at, at + 4] } else { [at + 4, at] };
        u64::from(order(word(low))) | u64::from(order(word(high))) << 32
    };
    let data = if is_little { word(44) >> 16 } else { order(word(44)) & 0xffff };
    let [size, action, device] = [24, 28, 36].map(|at| order(word(at)));
    Ok(Event { time_ns: long(8), sector: long(16), bytes: size, action, device, data: data as usize })
}

impl Blktrace {
    /// Returns the request, or `None` if the event is something else.
    fn request(&mut self, event: &Event) -> Result<Option<TraceRecord>, String> {
        let is = |category: u32| event.action >> CATEGORY_SHIFT & category != 0;
        if is(NOTICE) {
            return Ok(None);
        }
        self.events += 1;
        if event.action & 0xff != QUEUED || is(DEVICE_COMMAND) {
            return Ok(None);
        }
        let op = match () {
            () if is(DISCARD) => TracedOp::Discard,
            () if is(FLUSH) && event.bytes == 0 => TracedOp::Flush,
            () if is(WRITE) => of_traced_write(event.bytes.into()),
            () if is(READ) => TracedOp::Read,
            () => return Ok(None),
        };
        self.requests += 1;
        let sector = if op == TracedOp::Flush { 0 } else { event.sector };
        let disk = self.disks.number(&event.device.to_le_bytes())?;
        let issued_ns = event.time_ns.min(u64::MAX / 2);
        Ok(Some(TraceRecord { issued_ns, disk, ..of_bytes_at(op, sector, event.bytes.into())? }))
    }
}

impl Parser for Blktrace {
    fn parse(&mut self, input: &mut Input, batch: &mut Batch) -> Result<bool, TraceError> {
        while batch.records.len() < BATCH_RECORDS {
            let parsed = match input.peek(EVENT_BYTES)? {
                [] if self.requests == 0 && self.events > 0 => {
                    let what = "it has no request that was queued (Q): record it with `blktrace -a queue`";
                    return Err(input.error(ErrorKind::Wrong(what.into())));
                }
                [] => return Ok(!batch.records.is_empty()),
                bytes => match bytes.first_chunk() {
                    None => return Err(input.error(ErrorKind::CutShort)),
                    Some(bytes) => event(bytes).and_then(|event| Ok((self.request(&event)?, event.data))),
                },
            };
            let (request, data) = parsed.map_err(|what| input.error(ErrorKind::Wrong(what)))?;
            if input.peek(EVENT_BYTES + data)?.len() < EVENT_BYTES + data {
                return Err(input.error(ErrorKind::CutShort));
            }
            input.take(EVENT_BYTES + data)?;
            match request {
                Some(request) => batch.records.push(request),
                None => batch.skipped += 1,
            }
        }
        Ok(true)
    }
}
