//! What is simulated, and what may be found.

use serde::Serialize;

/// Bytes that a block takes at most, whatever is simulated.
pub const BLOCK_COST_BYTES: u64 = 112;
/// How evicted pages enter the tiers, and which are displaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// Every page enters, in place of the least recently used one.
    Lru,
    /// The insertion policy of `remoca disk`.
    Adaptive,
    /// The best set of blocks that never changes, known beforehand.
    Fixed,
}

/// Which miss-ratio curve is made besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CurveKind {
    None,
    /// From a sample of bounded memory, as `remoca curve` has it.
    Sampled,
    /// From all blocks.
    Exact,
}

/// Pages of the tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    pub local: u64,
    pub remote: u64,
}

/// What is simulated.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Pages of guest memory.
    pub guest: u64,
    pub tiers: Pages,
    pub policy: PolicyKind,
    pub curve: CurveKind,
    /// Only one block of this many is simulated, with as much less memory.
    pub one_of: u64,
    /// Maximum number of blocks that are followed.
    pub blocks_max: u32,
}

/// Pages that the network carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Pages sent to the remote tier.
    pub sent: u64,
    /// Pages fetched from it.
    pub fetched: u64,
}

/// Where a block was found that the guest does not hold. Later ones take longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Found {
    Guest,
    Local,
    Remote,
    Nowhere,
}

/// Error of a trace with more blocks than may be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyBlocks {
    pub blocks_max: u32,
}
