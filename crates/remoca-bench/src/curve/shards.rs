//! Plain SHARDS of fixed size (Waldspurger et al., FAST 2015), with and without an exact head (Carra and Neglia, ATC 2020), to compare
//! with. Its memory is not limited; only its sample is.

use super::exact::{Above, Distances, Stack};
use super::traces::Event;
use crate::guest::Random;
use std::collections::{BTreeMap, HashSet};

/// Number of hashes.
const HASHES: u64 = 1 << 63;
/// Kinds of blocks in the queue.
const SAMPLED: usize = 0;
const HEAD: usize = 1;

/// A run of SHARDS.
pub struct Shards {
    samples_max: usize,
    seed: u64,
    /// Blocks that are all followed. The most often read ones of the trace: better than what could be known while it runs.
    head: HashSet<u64>,
    threshold: u64,
    sample: BTreeMap<u64, u64>,
    queue: Stack,
    /// Reads of sampled blocks, and of the head.
    reads: [Distances; 2],
    all_reads: f64,
}

impl Shards {
    /// Returns the distances of all reads that SHARDS estimates.
    pub fn estimate(events: &[Event], samples_max: usize, seed: u64, head: &[u64]) -> Distances {
        let mut run = Self {
            samples_max,
            seed,
            head: head.iter().copied().collect(),
            threshold: HASHES,
            sample: BTreeMap::new(),
            queue: Stack::new(events.len()),
            reads: Default::default(),
            all_reads: 0.,
        };
        events.iter().for_each(|event| run.note(*event));
        run.estimated()
    }

    fn note(&mut self, event: Event) {
        let (block, is_read) = match event {
            Event::Read(block) => (block, true),
            Event::Evicted(block) | Event::Forgotten(block) => (block, false),
            Event::Missed => {
                self.all_reads += 1.;
                self.reads[HEAD].note(None, 1.);
                return;
            }
        };
        self.all_reads += f64::from(u8::from(is_read));
        let hash = Random(block ^ self.seed).next() >> 1;
        let kind = if self.head.contains(&block) { HEAD } else { SAMPLED };
        if kind == SAMPLED && hash >= self.threshold {
            return;
        }
        let weight = HASHES as f64 / self.threshold as f64;
        if is_read {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most the number of blocks")]
            let distance = |above: Above| (f64::from(above[SAMPLED]) * weight + f64::from(above[HEAD])).round() as u64;
            let distance = self.queue.take(block).map(distance);
            self.reads[kind].note(distance, if kind == SAMPLED { weight } else { 1. });
            self.sample.remove(&hash);
            return;
        }
        if matches!(event, Event::Forgotten(_)) {
            self.queue.take(block);
            self.sample.remove(&hash);
            return;
        }
        self.queue.put(block, kind);
        if kind == SAMPLED {
            self.sample.insert(hash, block);
        }
        if self.sample.len() > self.samples_max
            && let Some((highest, block)) = self.sample.pop_last()
        {
            self.threshold = highest;
            self.queue.take(block);
        }
    }

    /// Returns the reads of the head, and those of the sample. With a head, the number of the other reads is known, and the sample only
    /// tells how they are distributed.
    fn estimated(self) -> Distances {
        let [sampled, mut all] = self.reads;
        let scale = if self.head.is_empty() { 1. } else { (self.all_reads - all.total()) / sampled.total() };
        for (distance, weight) in sampled.by_distance {
            all.note(Some(distance), weight * scale);
        }
        all.note(None, sampled.beyond * scale);
        all
    }
}
