//! Runs the protocol against arbitrary bytes, for the fuzzer and for property tests.

use super::ExportGeometry;
use super::negotiation::{Choice, Negotiation, Step};
use super::offer::{Export, Target};
use super::pieces::Piece;
use super::transmission::{SHARED_MEMORY_MAX, Transmission};
use crate::request::{Operation, Outcome};
use remoca_io::buffer::BufferPool;
use std::collections::VecDeque;

/// Runs client sessions against small in-memory exports. The first byte of `data` selects how the rest is split and
/// sent. Panics if an invariant is violated. For example, the replies must not depend on how the bytes are split, and
/// every request must be completed.
pub fn fuzz_nbd(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else { return };
    let at_once = converse(data, data.len(), None);
    let in_parts = converse(data, 1 + usize::from(mode % 61), None);
    assert!(at_once == in_parts, "the answers depend on how the bytes arrive");
    converse(data, 1 + usize::from(mode % 61), Some(*mode));
}

fn exports() -> Vec<Export> {
    let disk = ExportGeometry::of_disk(3 << 20);
    let export = |name: &str, target, geometry| Export { name: name.into(), target, geometry };
    vec![
        export("disk", Target::Disk(0), disk),
        export("", Target::Disk(1), ExportGeometry { block: 4096, can_write_zeroes: false, ..disk }),
        export("read-only", Target::Disk(2), ExportGeometry { size: 4096, read_only: true, ..disk }),
        export("remoca-port", Target::Port, ExportGeometry::of_port(disk.size)),
    ]
}

/// Sends `data` in parts of `part` bytes, and returns the answers. With `late`, requests are executed in batches and in
/// a different order than they came, and the client takes its answers slowly.
fn converse(data: &[u8], part: usize, late: Option<u8>) -> Vec<u8> {
    let exports = exports();
    let (mut negotiation, mut answers) = (Negotiation::new(), Vec::new());
    let mut parts = data.chunks(part.max(1)).collect::<VecDeque<_>>();
    let choice = loop {
        match negotiation.advance(&exports) {
            Step::Chosen(choice) => break choice,
            Step::End => return answers,
            Step::Wait => {}
        }
        let sent = negotiation.outbox.take_all();
        if !sent.is_empty() {
            answers.extend(sent);
            continue;
        }
        if parts.is_empty() {
            return answers;
        }
        let Some(room) = negotiation.staging.room() else { panic!("the negotiation takes nothing, and says nothing") };
        let count = feed(&mut parts, room);
        negotiation.staging.received(count);
    };
    let Choice { export, structured_replies } = choice;
    let Negotiation { staging, outbox, .. } = negotiation;
    let (geometry, pool) = (exports[export].geometry, BufferPool::new(SHARED_MEMORY_MAX));
    let mut transmission = Transmission::new(geometry, structured_replies, staging, outbox, pool);
    let mut disk = FakeDisk { geometry, bytes: vec![0; 3 << 20] };
    let mut held = Vec::new();
    loop {
        while let Some(mut piece) = transmission.pop() {
            transmission.check();
            let outcome = disk.execute(&mut piece);
            match late {
                None => {
                    transmission.complete(piece, outcome);
                    answers.extend(transmission.outbox.take_all());
                    transmission.sent(0);
                }
                Some(_) => held.push((piece, outcome)),
            }
        }
        let wants_more = !parts.is_empty() && transmission.room().is_some();
        if let Some(late) = late
            && (held.len() > usize::from(late) % 40 || !wants_more)
        {
            let from = held.len().min(usize::from(late) % 7);
            held.rotate_left(from);
            for (piece, outcome) in held.drain(..) {
                transmission.complete(piece, outcome);
            }
            let count = transmission.outbox.slices().first().map_or(0, |slice| slice.len().div_ceil(2));
            if count > 0 {
                transmission.sent(count);
                continue;
            }
        }
        answers.extend(transmission.outbox.take_all());
        transmission.sent(0);
        transmission.check();
        if parts.is_empty() || transmission.end().is_some() {
            break;
        }
        if let Some(room) = transmission.room() {
            let count = feed(&mut parts, room);
            transmission.received(count);
        }
    }
    assert!(held.is_empty() && transmission.is_quiet(), "a request was not answered");
    answers
}

/// Copies the next part to the start of `room`, or as much of it as fits. Returns the number of bytes.
fn feed(parts: &mut VecDeque<&[u8]>, room: &mut [u8]) -> usize {
    let Some(next) = parts.pop_front() else { return 0 };
    let (now, later) = next.split_at(room.len().min(next.len()));
    room[..now.len()].copy_from_slice(now);
    if !later.is_empty() {
        parts.push_front(later);
    }
    now.len()
}

/// An export in memory that panics on requests that it should never see.
struct FakeDisk {
    geometry: ExportGeometry,
    bytes: Vec<u8>,
}

impl FakeDisk {
    fn execute(&mut self, piece: &mut Piece) -> Outcome {
        let ExportGeometry { size, block, read_only, .. } = self.geometry;
        let ranges = match &piece.operation {
            Operation::Read { range } | Operation::Write { range } => vec![range.clone()],
            Operation::Discard { ranges } => ranges.clone(),
            Operation::WriteZeroes { ranges } => ranges.iter().map(|zero| zero.range.clone()).collect(),
            Operation::Flush => Vec::new(),
        };
        let modifies = !matches!(piece.operation, Operation::Read { .. } | Operation::Flush);
        assert!(!(modifies && read_only), "a read-only export would be modified");
        for range in ranges {
            assert!(range.start < range.end && range.end <= size, "{range:?} is not within the export");
            let block = u64::from(block);
            assert!(range.start.is_multiple_of(block) && range.end.is_multiple_of(block), "{range:?} is misaligned");
            let (Ok(start), Ok(end)) = (usize::try_from(range.start), usize::try_from(range.end)) else { continue };
            let place = &mut self.bytes[start..end];
            match (&piece.operation, &mut piece.buffer) {
                (Operation::Read { .. }, Some(buffer)) => buffer.copy_from_slice(place),
                (Operation::Write { .. }, Some(buffer)) => place.copy_from_slice(buffer),
                (Operation::WriteZeroes { .. } | Operation::Discard { .. }, None) => place.fill(0),
                (operation, buffer) => panic!("{operation:?} with the buffer {buffer:?}"),
            }
        }
        Outcome::Done
    }
}
