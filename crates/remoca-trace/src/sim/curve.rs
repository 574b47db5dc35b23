//! The miss-ratio curve of a simulation: of its reads below the guest's memory, and what is evicted to where they look.

use super::ids::{Id, Key};
use super::stack::Stack;
use super::types::CurveKind;
use crate::limits::BLOCKS_MAX;
use remoca_core::curve::MissRatioCurve;
use remoca_core::units::{BlockId, BlockNumber, DiskIndex, PageCount};

pub(super) enum Curve {
    None,
    Sampled(Box<MissRatioCurve>),
    Exact(Box<Stack>),
}

/// Returns the block that a key stands for.
pub(super) fn block(key: Key) -> BlockId {
    let [.., high, low] = (key / BLOCKS_MAX).to_be_bytes();
    BlockId { disk: DiskIndex(u16::from_be_bytes([high, low])), bno: BlockNumber(key % BLOCKS_MAX) }
}

impl Curve {
    pub(super) fn new(kind: CurveKind) -> Self {
        match kind {
            CurveKind::None => Self::None,
            // The same for each run: nobody gains from a trace that bends its own curve.
            CurveKind::Sampled => Self::Sampled(Box::new(MissRatioCurve::new(&[0x5a; 16], PageCount(u32::MAX)))),
            CurveKind::Exact => Self::Exact(Box::default()),
        }
    }

    pub(super) fn reach(&mut self, count: usize) {
        if let Self::Exact(stack) = self {
            stack.reach(count);
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Sampled(curve) => curve.bytes(),
            Self::Exact(stack) => stack.bytes(),
        }
    }

    #[inline]
    pub(super) fn read(&mut self, id: Id, key: Key) {
        match self {
            Self::None => {}
            Self::Sampled(curve) => curve.read(block(key)),
            Self::Exact(stack) => stack.read(id),
        }
    }

    /// Returns about how many different blocks were evicted, from the sample.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 2^52 blocks")]
    pub(super) fn followed_blocks(&self) -> u64 {
        match self {
            Self::Sampled(curve) => (curve.followed() as f64 / curve.rate()).round() as u64,
            Self::None | Self::Exact(_) => 0,
        }
    }

    #[inline]
    pub(super) fn evicted(&mut self, id: Id, key: Key) {
        match self {
            Self::None => {}
            Self::Sampled(curve) => curve.evicted(block(key)),
            Self::Exact(stack) => stack.evicted(id),
        }
    }

    pub(super) fn forget(&mut self, id: Id, key: Key) {
        match self {
            Self::None => {}
            Self::Sampled(curve) => curve.discarded(block(key)),
            Self::Exact(stack) => stack.forget(id),
        }
    }

    /// Counts reads of blocks that no cache answers.
    pub(super) fn missed(&mut self, blocks: u64) {
        match self {
            Self::None => {}
            Self::Sampled(curve) => curve.missed(blocks),
            Self::Exact(stack) => stack.beyond += blocks,
        }
    }

    /// Returns the share of the reads that a cache of each size hits, in ascending order of the sizes in pages. Returns `None` if there
    /// is no curve, or nothing was read.
    pub(super) fn hit_ratios(&self, sizes: &[u64]) -> Option<Vec<f64>> {
        match self {
            Self::None => None,
            Self::Sampled(curve) => {
                let sizes = sizes.iter().map(|size| PageCount(u32::try_from(*size).unwrap_or(u32::MAX)));
                Some(curve.miss_ratios(sizes)?.into_iter().map(|ratio| 1.0 - ratio).collect())
            }
            Self::Exact(stack) => {
                let all = stack.beyond + stack.hits(&[u64::MAX])[0];
                (all > 0).then(|| stack.hits(sizes).into_iter().map(|hits| hits as f64 / all as f64).collect())
            }
        }
    }

    /// Returns the standard error of a hit ratio of the curve by sampling.
    pub(super) fn standard_error(&self, hit_ratio: f64) -> f64 {
        match self {
            Self::Sampled(curve) => curve.standard_error(1.0 - hit_ratio),
            Self::None | Self::Exact(_) => 0.0,
        }
    }
}
