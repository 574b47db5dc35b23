//! Sizes of the pools of a cache: what each of them is asked for.
//!
//! [`share_out`] changes the sizes only by what the cache has too few or too many pages, so that applying it again changes
//! nothing.
//! 1. The sizes add up to what is wanted, or to all that the servers can give.
//! 2. A cache that grows raises the smallest pools, so that the loss of one costs as little as possible.
//! 3. A cache that shrinks takes the same fraction from each. Pages stay about as long in each pool, so this discards the
//!    oldest ones.
//!
//! Decision 0014.

use crate::units::{POOLS_MAX, PageCount};

/// Size of one pool, and its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) size: PageCount,
    /// Largest size that its server is believed to give.
    pub(super) limit: PageCount,
}

/// Returns the sum of the sizes.
pub(super) fn sum(shares: &[Share]) -> u64 {
    shares.iter().map(|share| u64::from(share.size.0)).sum()
}

/// Returns how many more pages the servers are believed to give.
pub(super) fn room(shares: &[Share]) -> u64 {
    shares.iter().map(|share| u64::from(share.limit.0.saturating_sub(share.size.0))).sum()
}

/// Changes the sizes of up to [`POOLS_MAX`] pools so that they add up to `wanted`, as far as their limits allow.
pub(super) fn share_out(wanted: PageCount, shares: &mut [Share]) {
    assert!(shares.len() <= usize::from(POOLS_MAX), "a cache of {} pools", shares.len());
    for share in &mut *shares {
        share.size = share.size.min(share.limit);
    }
    let has = sum(shares);
    if has > u64::from(wanted.0) {
        shrink(wanted, has, shares);
    } else {
        grow(u64::from(wanted.0) - has, shares);
    }
}

/// Adds `missing` pages to the smallest pools, as far as their limits allow.
fn grow(missing: u64, shares: &mut [Share]) {
    let missing = missing.min(room(shares));
    // The sizes after all pools below `level` were raised to it.
    let raised = |share: &Share, level: u32| PageCount(share.size.0.max(level.min(share.limit.0)));
    let added = |shares: &[Share], level: u32| -> u64 {
        shares.iter().map(|share| u64::from(raised(share, level).0 - share.size.0)).sum()
    };
    // The highest level for which there are enough pages.
    let (mut level, mut above) = (0, u64::from(u32::MAX) + 1);
    while u64::from(level) + 1 < above {
        let middle = u32::try_from(u64::midpoint(u64::from(level), above)).unwrap_or(u32::MAX);
        if added(shares, middle) <= missing {
            level = middle;
        } else {
            above = u64::from(middle);
        }
    }
    let mut left = missing - added(shares, level);
    for share in shares {
        let reached = raised(share, level);
        let one = u32::from(left > 0 && reached.0 == level && reached < share.limit);
        left -= u64::from(one);
        share.size = PageCount(reached.0 + one);
    }
}

/// Reduces the sizes from the sum `has` to `wanted`, each by the same fraction.
fn shrink(wanted: PageCount, has: u64, shares: &mut [Share]) {
    let mut left = u64::from(wanted.0);
    let mut kept = [0; POOLS_MAX as usize];
    for (kept, share) in kept.iter_mut().zip(&*shares) {
        let part = u128::from(share.size.0) * u128::from(wanted.0) / u128::from(has.max(1));
        *kept = u32::try_from(part).unwrap_or(share.size.0);
        left -= u64::from(*kept);
    }
    for (kept, share) in kept.into_iter().zip(shares) {
        let one = u32::from(left > 0 && kept < share.size.0);
        left -= u64::from(one);
        share.size = PageCount(kept + one);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shares(of: &[(u32, u32)]) -> Vec<Share> {
        of.iter().map(|(size, limit)| Share { size: PageCount(*size), limit: PageCount(*limit) }).collect()
    }

    fn sizes(wanted: u32, of: &[(u32, u32)]) -> Vec<u32> {
        let mut shares = shares(of);
        share_out(PageCount(wanted), &mut shares);
        shares.iter().map(|share| share.size.0).collect()
    }

    #[test]
    fn new_pools_are_as_equal_as_their_servers_allow() {
        assert_eq!(sizes(100, &[(0, 500), (0, 500), (0, 500), (0, 500)]), [25, 25, 25, 25]);
        assert_eq!(sizes(100, &[(0, 10), (0, 500), (0, 500)]), [10, 45, 45]);
        assert_eq!(sizes(101, &[(0, 10), (0, 20), (0, 30)]), [10, 20, 30]);
        assert_eq!(sizes(10, &[(0, 500), (0, 500), (0, 500)]), [4, 3, 3]);
    }

    #[test]
    fn the_share_of_a_lost_pool_goes_to_the_smallest() {
        assert_eq!(sizes(100, &[(40, 100), (20, 100), (15, 100)]), [40, 30, 30]);
    }

    #[test]
    fn all_give_the_same_fraction_back() {
        assert_eq!(sizes(60, &[(80, 80), (40, 100)]), [40, 20]);
        assert_eq!(sizes(0, &[(80, 80), (40, 100)]), [0, 0]);
    }

    #[test]
    fn what_one_server_does_not_give_another_one_does() {
        assert_eq!(sizes(100, &[(50, 30), (50, 500)]), [30, 70]);
    }

    proptest! {
        #[test]
        fn sizes_are_exact_and_do_not_oscillate(
            wanted in prop_oneof![0..100_u32, any::<u32>()],
            of in prop::collection::vec((prop_oneof![0..50_u32, any::<u32>()], prop_oneof![0..50_u32, any::<u32>()]), 0..=16),
        ) {
            let mut after = shares(&of);
            share_out(PageCount(wanted), &mut after);
            let possible: u64 = after.iter().map(|share| u64::from(share.limit.0)).sum();
            prop_assert_eq!(sum(&after), possible.min(u64::from(wanted)));
            let had: u64 = of.iter().map(|(size, limit)| u64::from(*size.min(limit))).sum();
            for (share, (size, limit)) in after.iter().zip(&of) {
                prop_assert!(share.size <= share.limit);
                let before = PageCount(*size.min(limit));
                let is_right = if had > u64::from(wanted) { share.size <= before } else { share.size >= before };
                prop_assert!(is_right, "a pool changes in the other direction");
            }
            let mut again = after.clone();
            share_out(PageCount(wanted), &mut again);
            prop_assert_eq!(&again, &after, "the second time nothing changes");
            // A pool that grew is not larger than another one that could have grown.
            for (one, (size, _)) in after.iter().zip(&of) {
                for other in after.iter().filter(|other| other.size < other.limit) {
                    let grew = one.size > PageCount(*size);
                    prop_assert!(!grew || one.size.0 <= other.size.0 + 1, "{:?} of {:?}", one, after);
                }
            }
        }
    }
}
