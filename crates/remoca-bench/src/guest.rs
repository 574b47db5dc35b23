//! A guest on paper: its page cache, and the random numbers by which it reads.

use std::collections::{BTreeMap, HashMap};

/// Blocks in the guest's memory, in the order of their last use.
#[derive(Default)]
pub struct PageCache {
    used_at: HashMap<u64, u64>,
    order: BTreeMap<u64, u64>,
    clock: u64,
}

impl PageCache {
    /// Uses a block. Returns whether it was there.
    pub fn touch(&mut self, block: u64) -> bool {
        self.clock += 1;
        let before = self.used_at.insert(block, self.clock);
        let _ = before.map(|at| self.order.remove(&at));
        self.order.insert(self.clock, block);
        before.is_some()
    }

    /// Removes a block. Returns whether it was there.
    pub fn forget(&mut self, block: u64) -> bool {
        self.used_at.remove(&block).is_some_and(|at| self.order.remove(&at).is_some())
    }

    /// Evicts the block that was not used for the longest time, if there are more than `most`.
    pub fn evict(&mut self, most: usize) -> Option<u64> {
        let (_, block) = if self.order.len() > most { self.order.pop_first()? } else { return None };
        self.used_at.remove(&block);
        Some(block)
    }
}

/// Pseudorandom numbers (SplitMix64).
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// Returns the next 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number in `0.0 .. 1.0`.
    pub fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Ranks by Zipf's law, the lowest most often.
pub struct Zipf(Vec<f64>);

impl Zipf {
    /// Returns the law for ranks from 0 to `ranks` - 1.
    pub fn new(ranks: u64, exponent: f64) -> Self {
        let mut sum = 0.;
        let sums = (1..=ranks).map(|rank| {
            sum += (rank as f64).powf(-exponent);
            sum
        });
        Self(sums.collect())
    }

    /// Draws a rank.
    pub fn rank(&self, random: &mut Random) -> u64 {
        let at = random.share() * self.0.last().copied().unwrap_or(1.);
        self.0.partition_point(|sum| *sum < at) as u64
    }
}

/// Spreads ranks over the disk.
pub fn scattered(rank: u64) -> u64 {
    rank.wrapping_mul(0x9e37_79b1) & ((1 << 28) - 1)
}
