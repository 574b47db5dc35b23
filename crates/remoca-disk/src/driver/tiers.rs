//! The sizes of the cache's tiers.

use remoca_core::units::PageCount;

/// Sizes of the cache and of its local tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierSizes {
    /// What the listed servers have.
    pub cache: PageCount,
    /// What the server of this host has in front of them.
    pub local: PageCount,
}

impl TierSizes {
    /// Returns the size of both tiers together.
    #[must_use]
    pub fn sum(self) -> PageCount {
        PageCount(self.cache.0.saturating_add(self.local.0))
    }
}
