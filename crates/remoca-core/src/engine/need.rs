//! What the pools need of placement, and what placement chooses for them.

use super::types::{PoolOffer, ServerNumber};
use crate::units::{POOLS_MAX, PageCount};

/// Maximum time, in nanoseconds, for which a pool is drained.
pub(super) const DRAIN_MAX_NS: u64 = 600_000_000_000;
/// Minimum size of a cache that is spread over several servers: 2 GiB.
pub(super) const SPREAD_MIN: PageCount = PageCount(1 << 19);
/// Number of pools over which a large cache is spread, so that the loss of one costs at most a quarter of it.
pub(super) const SPREAD_POOLS: usize = 4;

/// Pool that the index describes and that has no session: its server may still have it.
#[derive(Clone, Copy, Debug)]
pub(super) struct LostPool {
    pub(super) server: ServerNumber,
    pub(super) generation: u64,
}

/// What a server is to the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    Listed,
    /// It was taken out of the list, and its pool is drained.
    Leaving,
    /// It is not in the list, and nothing is expected of it.
    Gone,
}

/// State of the pools, as far as placement needs it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    /// Size that the operator wants.
    pub(super) wanted: PageCount,
    /// Pages that the servers of the sessions are believed to give, and those of lost pools that are expected back.
    pub(super) covered: u64,
    /// Pages that the servers of the sessions have granted.
    pub(super) granted: PageCount,
    /// Number of pools with a session, without those that are drained.
    pub(super) seats: usize,
    /// Number of lost pools that are expected back.
    pub(super) expected: usize,
    /// Whether no SETSIZE is outstanding or planned.
    pub(super) settled: bool,
    /// Whether the cache may have one more pool.
    pub(super) can_add: bool,
    pub(super) lost: [Option<LostPool>; POOLS_MAX as usize],
}

impl Need {
    /// Returns how many pages no server is believed to give yet.
    pub(super) fn missing(&self) -> u64 {
        u64::from(self.wanted.0).saturating_sub(self.covered)
    }

    /// Returns the number of pools that have a share of the cache.
    pub(super) fn members(&self) -> usize {
        self.seats + self.expected
    }

    /// Returns the pool that was lost at a server, or `None` if there is none.
    pub(super) fn lost_at(&self, server: ServerNumber) -> Option<&LostPool> {
        self.lost.iter().flatten().find(|pool| pool.server == server)
    }
}

/// Server that gets a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) server: ServerNumber,
    pub(super) offer: PoolOffer,
    /// Size that the server can give, as far as its offer is trusted.
    pub(super) gives: PageCount,
}
