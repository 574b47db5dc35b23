//! The sizes of the cache's tiers.

use remoca_core::units::PageCount;

/// Largest number of pages of all tiers together, which is 4 TiB: as many as an index can have.
pub(super) const CACHE_PAGES_MAX: PageCount = PageCount(1 << 30);

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

    /// Returns these sizes if an index can have them.
    ///
    /// # Errors
    /// If they are too large together.
    pub fn checked(self) -> Result<Self, String> {
        match self.sum() <= CACHE_PAGES_MAX {
            true => Ok(self),
            false => Err("4 TiB is the limit of cache and local tier together".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_tiers_together_have_a_limit() {
        let sizes = |cache, local| TierSizes { cache: PageCount(cache), local: PageCount(local) };
        assert_eq!(sizes(3 << 28, 1 << 28).checked(), Ok(sizes(3 << 28, 1 << 28)));
        assert!(sizes(3 << 28, (1 << 28) + 1).checked().is_err());
        assert!(sizes(u32::MAX, u32::MAX).checked().is_err());
    }
}
