//! Requests in pieces that fit the store's buffers, cut at block boundaries so that no block is in two of them.

use crate::request::{Operation, RANGE_PIECE, ZeroRange, range_piece_end};
use remoca_core::units::PAGE_SIZE_U64;
use remoca_io::buffer::IoBuffer;
use remoca_io::sizes;
use std::collections::VecDeque;
use std::ops::Range;

/// Longest piece of a read or write, in bytes.
const DATA_PIECE: u64 = 1 << 20;

/// A request or a part of one, for the driver.
#[derive(Debug)]
pub(super) struct Piece {
    /// Slot of the open request that this is a piece of, ...
    pub(super) slot: usize,
    /// ... and the index of the piece in it.
    pub(super) index: usize,
    pub(super) operation: Operation,
    pub(super) durable: bool,
    pub(super) data_length: usize,
    /// The data of a write, or the room for the data of a read.
    pub(super) buffer: Option<IoBuffer>,
}

impl Piece {
    /// Creates the only piece of a flush.
    pub(super) fn flush(slot: usize) -> Self {
        Self { slot, index: 0, operation: Operation::Flush, durable: true, data_length: 0, buffer: None }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    Trim,
    Zero { unmap: bool },
}

/// The part of an open request that has not been handed out yet.
pub(super) struct Rest {
    pub(super) slot: usize,
    index: usize,
    pub(super) kind: Kind,
    pub(super) durable: bool,
    pub(super) range: Range<u64>,
    /// Buffers for all of the pieces, if they are needed at the same time.
    pub(super) buffers: VecDeque<IoBuffer>,
}

impl Rest {
    pub(super) fn new(slot: usize, kind: Kind, durable: bool, range: Range<u64>) -> Self {
        Self { slot, index: 0, kind, durable, range, buffers: VecDeque::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Returns the length of each remaining piece in bytes.
    pub(super) fn lengths(&self) -> impl Iterator<Item = usize> {
        let (mut rest, kind) = (self.range.clone(), self.kind);
        std::iter::from_fn(move || {
            let piece = rest.start..piece_end(&rest, kind);
            rest.start = piece.end;
            (!piece.is_empty()).then(|| length_of(&piece))
        })
    }

    /// Cuts off and returns the next piece, with `buffer`.
    pub(super) fn next(&mut self, buffer: Option<IoBuffer>) -> Piece {
        let range = self.range.start..piece_end(&self.range, self.kind);
        let data_length = if buffer.is_some() { length_of(&range) } else { 0 };
        let index = self.index;
        (self.range.start, self.index) = (range.end, index + 1);
        let operation = match self.kind {
            Kind::Read => Operation::Read { range },
            Kind::Write => Operation::Write { range },
            Kind::Trim => Operation::Discard { ranges: vec![range] },
            Kind::Zero { unmap } => Operation::WriteZeroes { ranges: vec![ZeroRange { range, unmap }] },
        };
        Piece { slot: self.slot, index, operation, durable: self.durable, data_length, buffer }
    }
}

fn piece_end(range: &Range<u64>, kind: Kind) -> u64 {
    match kind {
        Kind::Read | Kind::Write => {
            let end = range.start.saturating_add(DATA_PIECE);
            range.end.min(end - end % PAGE_SIZE_U64)
        }
        Kind::Trim | Kind::Zero { .. } => range_piece_end(range, RANGE_PIECE),
    }
}

fn length_of(range: &Range<u64>) -> usize {
    sizes::in_memory(range.end - range.start)
}
