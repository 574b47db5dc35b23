//! Locks on ranges, which decide which of several overlapping modifications may be in flight.
//!
//! Owned by a store that must not let overlapping modifications race. Pure bookkeeping. Two claims conflict if they
//! overlap and at least one is exclusive; conflicting claims are granted in the order of their arrival. Invariants
//! (property-tested):
//! 1. No two granted claims conflict.
//! 2. Of two conflicting claims the earlier is granted, and released, first.
//! 3. If every granted claim is eventually released, no claim waits for ever.

use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// May be in flight together with other shared claims.
    Shared,
    Exclusive,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grant {
    Granted,
    /// `release` will report the claim later.
    Waits,
}

/// Claims by the caller's keys, in order of arrival. There are as many as the caller has operations at once.
#[derive(Debug, Default)]
pub(super) struct RangeLocks {
    claims: Vec<Claim>,
    exclusive_count: usize,
    waiting_count: usize,
}

#[derive(Debug)]
struct Claim {
    key: usize,
    range: Range<u64>,
    mode: Mode,
    is_granted: bool,
}

impl Claim {
    fn conflicts(&self, other: &Claim) -> bool {
        let is_overlapping = self.range.start < other.range.end && other.range.start < self.range.end;
        is_overlapping && (self.mode == Mode::Exclusive || other.mode == Mode::Exclusive)
    }
}

impl RangeLocks {
    /// Claims a range under `key`, which must not be in use. Returns whether the claim is granted at once.
    pub(super) fn acquire(&mut self, key: usize, range: Range<u64>, mode: Mode) -> Grant {
        let mut claim = Claim { key, range, mode, is_granted: true };
        self.exclusive_count += usize::from(mode == Mode::Exclusive);
        claim.is_granted = self.exclusive_count == 0 || !self.claims.iter().any(|other| other.conflicts(&claim));
        self.waiting_count += usize::from(!claim.is_granted);
        let grant = if claim.is_granted { Grant::Granted } else { Grant::Waits };
        self.claims.push(claim);
        grant
    }

    /// Ends a granted claim, and adds the keys of the claims that are granted as a result to `granted`.
    pub(super) fn release(&mut self, key: usize, granted: &mut Vec<usize>) {
        let index = self.claims.iter().position(|claim| claim.key == key);
        let released = self.claims.remove(index.expect("a claim that was made"));
        assert!(released.is_granted, "only a granted claim can end");
        self.exclusive_count -= usize::from(released.mode == Mode::Exclusive);
        if self.waiting_count == 0 {
            return;
        }
        for index in 0..self.claims.len() {
            let (earlier, rest) = self.claims.split_at_mut(index);
            let claim = &mut rest[0];
            if !claim.is_granted && claim.conflicts(&released) && !earlier.iter().any(|e| e.conflicts(claim)) {
                claim.is_granted = true;
                self.waiting_count -= 1;
                granted.push(claim.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn writers_wait_for_a_rewrite_and_a_rewrite_waits_for_writers() {
        let mut locks = RangeLocks::default();
        let mut granted = Vec::new();
        assert_eq!(locks.acquire(1, 0..8, Mode::Shared), Grant::Granted);
        assert_eq!(locks.acquire(2, 4..8, Mode::Shared), Grant::Granted);
        assert_eq!(locks.acquire(3, 0..8, Mode::Exclusive), Grant::Waits);
        assert_eq!(locks.acquire(4, 4..5, Mode::Shared), Grant::Waits, "or the rewrite might wait for ever");
        assert_eq!(locks.acquire(5, 8..9, Mode::Shared), Grant::Granted);
        locks.release(1, &mut granted);
        assert!(granted.is_empty());
        locks.release(2, &mut granted);
        assert_eq!(std::mem::take(&mut granted), [3]);
        locks.release(3, &mut granted);
        assert_eq!(granted, [4]);
    }

    proptest! {
        #[test]
        fn grants_never_conflict_keep_the_order_and_reach_everyone(
            steps in prop::collection::vec((0_u64..20, 1_u64..6, any::<bool>(), any::<prop::sample::Index>(), any::<bool>()), 1..80)
        ) {
            let mut locks = RangeLocks::default();
            // Requests not released yet, in order of arrival: (key, range, mode, granted).
            let mut model: Vec<(usize, Range<u64>, Mode, bool)> = Vec::new();
            let mut granted = Vec::new();
            let mut release = |locks: &mut RangeLocks, model: &mut Vec<(usize, Range<u64>, Mode, bool)>, pick: &prop::sample::Index| {
                let held: Vec<usize> = model.iter().filter(|m| m.3).map(|m| m.0).collect();
                if held.is_empty() { return }
                let key = held[pick.index(held.len())];
                locks.release(key, &mut granted);
                model.retain(|m| m.0 != key);
                for key in granted.drain(..) {
                    let entry = model.iter_mut().find(|m| m.0 == key).unwrap();
                    assert!(!std::mem::replace(&mut entry.3, true), "granted twice");
                }
            };
            let check = |model: &[(usize, Range<u64>, Mode, bool)]| {
                for (index, later) in model.iter().enumerate() {
                    let is_blocked = model[..index].iter().any(|earlier| {
                        earlier.1.start < later.1.end && later.1.start < earlier.1.end
                            && (earlier.2 == Mode::Exclusive || later.2 == Mode::Exclusive)
                    });
                    assert_eq!(later.3, !is_blocked, "granted exactly when no earlier claim conflicts");
                }
            };
            for (key, (start, len, is_exclusive, pick, do_release)) in steps.iter().enumerate() {
                let mode = if *is_exclusive { Mode::Exclusive } else { Mode::Shared };
                let grant = locks.acquire(key, *start..start + len, mode);
                model.push((key, *start..start + len, mode, grant == Grant::Granted));
                check(&model);
                if *do_release {
                    release(&mut locks, &mut model, pick);
                    check(&model);
                }
            }
            let pick = &steps[0].3;
            while !model.is_empty() {
                let before = model.len();
                release(&mut locks, &mut model, pick);
                check(&model);
                prop_assert!(model.len() < before, "something waits for ever");
            }
        }
    }
}
