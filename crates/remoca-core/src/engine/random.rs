//! Random choices that must differ between VMs.

/// SplitMix64 from the engine's seed, which is enough to keep the VMs of a host out of step.
#[derive(Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    /// Returns a random number below `end`, or 0 if that is 0.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end.max(1)
    }

    /// Returns `ns` plus a random share of it, up to a quarter.
    pub(super) fn stretch(&mut self, ns: u64) -> u64 {
        ns + self.below(ns / 4 + 1)
    }
}
