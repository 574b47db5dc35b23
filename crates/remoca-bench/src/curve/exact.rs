//! Exact stack distances, with unlimited memory.

use super::traces::Event;
use std::collections::{BTreeMap, HashMap};

/// Blocks of one kind that are above a block in the queue, itself included, for each of two kinds.
pub type Above = [u32; 2];

/// Queue of evicted blocks of two kinds, which knows how many of each are above a block (two Fenwick trees over all evictions).
pub struct Stack {
    evicted_at: HashMap<u64, (usize, usize)>,
    counts: Vec<Above>,
    len: Above,
    next: usize,
}

impl Stack {
    /// Returns an empty queue for at most `evictions` evictions.
    pub fn new(evictions: usize) -> Self {
        Self { evicted_at: HashMap::new(), counts: vec![[0; 2]; evictions + 1], len: [0; 2], next: 0 }
    }

    /// Removes a block. Returns how many are above it.
    pub fn take(&mut self, block: u64) -> Option<Above> {
        let (at, kind) = self.evicted_at.remove(&block)?;
        let above = [0, 1].map(|kind| self.len[kind] - self.before(at, kind));
        self.len[kind] -= 1;
        self.add(at, kind, -1);
        Some(above)
    }

    /// Makes a block the newest, as one of kind 0 or 1.
    pub fn put(&mut self, block: u64, kind: usize) {
        self.take(block);
        self.evicted_at.insert(block, (self.next, kind));
        self.len[kind] += 1;
        self.add(self.next, kind, 1);
        self.next += 1;
    }

    fn add(&mut self, at: usize, kind: usize, change: i32) {
        let mut i = at + 1;
        while i < self.counts.len() {
            self.counts[i][kind] = self.counts[i][kind].wrapping_add_signed(change);
            i += i & i.wrapping_neg();
        }
    }

    fn before(&self, at: usize, kind: usize) -> u32 {
        let (mut i, mut sum) = (at, 0_u32);
        while i > 0 {
            sum = sum.wrapping_add(self.counts[i][kind]);
            i &= i - 1;
        }
        sum
    }
}

/// Weight of reads by stack distance.
#[derive(Clone, Default)]
pub struct Distances {
    pub by_distance: BTreeMap<u64, f64>,
    /// Weight of the reads of blocks that are not in the queue.
    pub beyond: f64,
}

impl Distances {
    /// Counts a read.
    pub fn note(&mut self, distance: Option<u64>, weight: f64) {
        let place = distance.map_or(&mut self.beyond, |distance| self.by_distance.entry(distance).or_default());
        *place += weight;
    }

    /// Returns the weight of all reads.
    pub fn total(&self) -> f64 {
        self.by_distance.values().sum::<f64>() + self.beyond
    }

    /// Returns the greatest distance of a read.
    pub fn greatest(&self) -> u64 {
        self.by_distance.last_key_value().map_or(0, |(distance, _)| *distance)
    }

    /// Returns the miss ratio at each size, which must not decrease.
    pub fn miss_ratios(&self, sizes: &[u64]) -> Vec<f64> {
        let mut distances = self.by_distance.iter().peekable();
        let (mut hits, total) = (0., self.total());
        let at = sizes.iter().map(|size| {
            while let Some((_, weight)) = distances.next_if(|(distance, _)| *distance <= size) {
                hits += weight;
            }
            1. - hits / total
        });
        at.collect()
    }
}

/// Returns the stack distances of the reads in each of `windows` parts of the events.
pub fn exact_windows(events: &[Event], windows: usize) -> Vec<Distances> {
    let mut stack = Stack::new(events.len());
    let mut window = |events: &[Event]| {
        let mut distances = Distances::default();
        for event in events {
            match event {
                Event::Read(block) => distances.note(stack.take(*block).map(|[above, _]| above.into()), 1.),
                Event::Evicted(block) => stack.put(*block, 0),
                Event::Forgotten(block) => _ = stack.take(*block),
                Event::Missed => distances.note(None, 1.),
            }
        }
        distances
    };
    events.chunks(events.len().div_ceil(windows).max(1)).map(&mut window).collect()
}

/// Returns the stack distances of all reads.
pub fn exact(events: &[Event]) -> Distances {
    exact_windows(events, 1).pop().unwrap_or_default()
}
