//! Requests of guests and their outcomes, independent of the protocol that carries them.

use remoca_core::engine::DiskError;
use std::ops::Range;

/// Bytes of a discard or write-zeroes that are handed out at a time. The driver looks up each of their blocks.
pub const RANGE_PIECE: u64 = 64 << 20;

/// Returns the end of the first piece of a range that is discarded or zeroed. Pieces are cut at multiples of their
/// length, so that no unit of the store up to that size is in two of them and keeps its space.
pub(crate) fn range_piece_end(range: &Range<u64>, piece_bytes: u64) -> u64 {
    range.end.min((range.start / piece_bytes + 1).saturating_mul(piece_bytes))
}

/// An operation that the guest requests. Ranges are bytes of the device, on block boundaries and within its capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    Read { range: Range<u64> },
    Write { range: Range<u64> },
    Flush,
    Discard { ranges: Vec<Range<u64>> },
    WriteZeroes { ranges: Vec<ZeroRange> },
}

impl Operation {
    /// Returns the number of disk I/Os that it is made of at most.
    pub fn parts(&self) -> usize {
        match self {
            Self::Read { .. } | Self::Write { .. } | Self::Flush => 1,
            Self::Discard { ranges } => ranges.len(),
            Self::WriteZeroes { ranges } => ranges.len(),
        }
    }
}

/// One range of a write-zeroes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZeroRange {
    pub range: Range<u64>,
    /// The guest would rather have the range deallocated, as long as it reads as zeroes.
    pub unmap: bool,
}

/// Why bytes could not be copied between a request and its guest. A retry would not help in any of these cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    #[error("the front end of the request is gone")]
    Disconnected,
    #[error("the bytes are not within the data of the request, or it has none of this direction")]
    OutOfRange,
    #[error("the guest's memory is not accessible")]
    GuestMemory,
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Failed(DiskError),
    Unsupported,
}

impl Outcome {
    /// Something went wrong on this side of the disk.
    pub const BROKEN: Self = Self::Failed(DiskError(libc::EIO));

    /// Combines the outcomes of two pieces. Returns the first one that is not `Done`, or `Done` if both are.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        if self == Self::Done { other } else { self }
    }
}

impl From<Result<(), DiskError>> for Outcome {
    fn from(result: Result<(), DiskError>) -> Self {
        result.map_or_else(Self::Failed, |()| Self::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_range_end_at_multiples() {
        for (range, end) in [
            (0..1, 1),
            (0..RANGE_PIECE, RANGE_PIECE),
            (0..RANGE_PIECE + 1, RANGE_PIECE),
            (512..2 * RANGE_PIECE, RANGE_PIECE),
            (RANGE_PIECE - 512..RANGE_PIECE + 512, RANGE_PIECE),
            (RANGE_PIECE..3 * RANGE_PIECE, 2 * RANGE_PIECE),
            (u64::MAX - 1..u64::MAX, u64::MAX),
        ] {
            assert_eq!(range_piece_end(&range, RANGE_PIECE), end, "{range:?}");
        }
    }
}
