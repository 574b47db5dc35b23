//! Simulation: guest memory in LRU order, and below it an exclusive cache of a local and a remote tier.
//!
//! | Record | With guest memory | Without |
//! |---|---|---|
//! | read | a block that the guest does not hold is looked for in the tiers; the guest holds it then | it is looked for in the tiers |
//! | eviction | none of these: the simulated guest evicts | it enters the local tier |
//! | write | the guest holds the blocks; the tiers forget them | the tiers forget them |
//! | discard, write-zeroes | guest and tiers forget the blocks | the tiers do |
//!
//! Where a trace has no evictions and the guest no memory, a block is evicted as it is read: a cache into which reads are
//! admitted. A read of parts of blocks misses there, as in the engine. Blocks have dense numbers (`ids.rs`); all else is arrays
//! by these numbers. Numbers are looked up before the lists are changed, for some records together: the processor then waits for
//! several memory accesses at once.
//! 1. No more than [`Setup::blocks_max`] blocks are followed; a trace with more is an error.

mod adaptive;
mod counts;
mod curve;
mod fixed;
mod ids;
mod lists;
mod lru;
mod outcome;
mod policy;
mod run;
mod stack;
#[cfg(test)]
mod tests;
mod types;

pub use counts::{BlockCounts, RequestCounts};
pub use outcome::{CurvePoint, Outcome, TierShares};
pub use run::Simulation;
pub use types::{BLOCK_COST_BYTES, CurveKind, Pages, PolicyKind, Setup, TooManyBlocks, Traffic};
