//! Exact stack distances in a queue of evicted blocks, with memory for its blocks alone (a Fenwick tree over their places,
//! which is made anew when the places run out).

use super::ids::Id;

/// Least number of places.
const PLACES_MIN: usize = 1 << 12;
/// No block at a place.
const NOBODY: u32 = u32::MAX;

#[derive(Default)]
pub(super) struct Stack {
    /// Place of each block, counted from 1; 0 if it is not in the queue.
    place_of: Vec<u32>,
    block_at: Vec<u32>,
    /// Number of blocks in runs of places.
    tree: Vec<u32>,
    next: usize,
    len: u32,
    /// Number of reads by distance, from 1 on.
    distances: Vec<u64>,
    pub(super) beyond: u64,
}

impl Stack {
    pub(super) fn reach(&mut self, count: usize) {
        self.place_of.resize(count.max(self.place_of.len()), 0);
    }

    pub(super) fn bytes(&self) -> usize {
        (self.place_of.capacity() + self.block_at.capacity() + self.tree.capacity()) * 4 + self.distances.capacity() * 8
    }

    fn add(&mut self, place: u32, change: i32) {
        let mut at = place as usize;
        while at < self.tree.len() {
            self.tree[at] = self.tree[at].wrapping_add_signed(change);
            at += at & at.wrapping_neg();
        }
    }

    /// Returns the number of blocks at this place and before it.
    fn up_to(&self, place: u32) -> u32 {
        let (mut at, mut sum) = (place as usize, 0_u32);
        while at > 0 {
            sum = sum.wrapping_add(self.tree[at]);
            at &= at - 1;
        }
        sum
    }

    /// Counts a read, and takes its block out of the queue.
    pub(super) fn read(&mut self, id: Id) {
        let place = self.place_of[id as usize];
        if place == 0 {
            self.beyond += 1;
            return;
        }
        let distance = (self.len - self.up_to(place)) as usize + 1;
        if self.distances.len() <= distance {
            self.distances.resize(distance + 1, 0);
        }
        self.distances[distance] += 1;
        self.forget(id);
    }

    /// Makes a block the newest.
    pub(super) fn evicted(&mut self, id: Id) {
        self.forget(id);
        if self.next + 1 >= self.tree.len() {
            self.renew();
        }
        self.next += 1;
        let [a, b, c, d, ..] = (self.next as u64).to_le_bytes();
        let place = u32::from_le_bytes([a, b, c, d]);
        self.block_at[self.next] = id;
        self.place_of[id as usize] = place;
        self.add(place, 1);
        self.len += 1;
    }

    /// Takes a block out of the queue.
    pub(super) fn forget(&mut self, id: Id) {
        let place = std::mem::take(&mut self.place_of[id as usize]);
        if place > 0 {
            self.block_at[place as usize] = NOBODY;
            self.add(place, -1);
            self.len -= 1;
        }
    }

    /// Moves the blocks to the first places, of which there are then at least as many unused ones.
    fn renew(&mut self) {
        let kept: Vec<u32> = self.block_at.iter().skip(1).copied().filter(|id| *id != NOBODY).collect();
        let places = (kept.len() * 2).max(PLACES_MIN).next_power_of_two();
        self.block_at.clear();
        self.block_at.resize(places, NOBODY);
        for (place, id) in (1_u32..).zip(&kept) {
            self.block_at[place as usize] = *id;
            self.place_of[*id as usize] = place;
        }
        self.next = kept.len();
        self.tree.clear();
        self.tree.resize(places, 0);
        for at in 1..places {
            self.tree[at] += u32::from(at <= self.next);
            let above = at + (at & at.wrapping_neg());
            if above < places {
                self.tree[above] += self.tree[at];
            }
        }
    }

    /// Returns the hits of a cache of each size, in ascending order of the sizes.
    pub(super) fn hits(&self, sizes: &[u64]) -> Vec<u64> {
        let mut distances = self.distances.iter().enumerate().peekable();
        let mut hits = 0;
        let within = sizes.iter().map(|size| {
            while let Some((_, count)) = distances.next_if(|(distance, _)| *distance as u64 <= *size) {
                hits += count;
            }
            hits
        });
        within.collect()
    }
}
