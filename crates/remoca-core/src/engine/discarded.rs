//! Blocks of one disk that were discarded and not written since. A device may return different data for them on every read,
//! so a difference there does not reveal a foreign writer.
//!
//! The number of ranges is bounded: a range too many makes the two nearest ones join. A foreign writer to a block
//! between those two then goes unnoticed. There is no other consequence.

use std::ops::Range;

/// Maximum number of ranges of one disk, which take 16 KiB.
const RANGES_MAX: usize = 1024;

/// Sorted ranges that neither overlap nor touch.
#[derive(Debug, Default)]
pub(super) struct Discarded {
    ranges: Vec<Range<u64>>,
}

impl Discarded {
    /// Adds `blocks`, which are about to be discarded completely or in part.
    pub(super) fn add(&mut self, mut blocks: Range<u64>) {
        if blocks.is_empty() {
            return;
        }
        let from = self.ranges.partition_point(|range| range.end < blocks.start);
        let to = self.ranges.partition_point(|range| range.start <= blocks.end);
        if let [first, ..] = &self.ranges[from..to] {
            blocks.start = blocks.start.min(first.start);
            blocks.end = blocks.end.max(self.ranges[to - 1].end);
        }
        self.ranges.splice(from..to, [blocks]);
        if self.ranges.len() > RANGES_MAX {
            self.join_nearest();
        }
    }

    /// Removes `blocks`, which were completely written. Does nothing if the removal would leave more than
    /// [`RANGES_MAX`] ranges.
    pub(super) fn remove(&mut self, blocks: &Range<u64>) {
        let from = self.ranges.partition_point(|range| range.end <= blocks.start);
        let to = self.ranges.partition_point(|range| range.start < blocks.end);
        if from >= to || blocks.is_empty() {
            return;
        }
        let (first, last) = (self.ranges[from].start, self.ranges[to - 1].end);
        let left: Vec<_> =
            [first..blocks.start, blocks.end..last].into_iter().filter(|range| range.start < range.end).collect();
        if self.ranges.len() - (to - from) + left.len() <= RANGES_MAX {
            self.ranges.splice(from..to, left);
        }
    }

    /// Returns whether block `bno` may have been discarded.
    pub(super) fn contains(&self, bno: u64) -> bool {
        let at = self.ranges.partition_point(|range| range.end <= bno);
        self.ranges.get(at).is_some_and(|range| range.start <= bno)
    }

    fn join_nearest(&mut self) {
        let gap = |at: &usize| self.ranges[at + 1].start - self.ranges[*at].end;
        if let Some(at) = (0..self.ranges.len() - 1).min_by_key(gap) {
            self.ranges[at].end = self.ranges[at + 1].end;
            self.ranges.remove(at + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn a_set_of_blocks(steps in proptest::collection::vec((any::<bool>(), 0..64_u64, 0..12_u64), 1..100)) {
            let (mut discarded, mut model) = (Discarded::default(), BTreeSet::new());
            for (adds, start, count) in steps {
                let blocks = start..start + count;
                if adds {
                    discarded.add(blocks.clone());
                    model.extend(blocks);
                } else {
                    discarded.remove(&blocks);
                    model.retain(|bno| !blocks.contains(bno));
                }
                prop_assert!((0..80).all(|bno| discarded.contains(bno) == model.contains(&bno)));
                prop_assert!(discarded.ranges.is_sorted_by(|a, b| a.end < b.start), "{discarded:?}");
            }
        }
    }

    #[test]
    fn too_many_ranges_become_larger_ones() {
        let mut discarded = Discarded::default();
        let starts: Vec<_> = (0..4 * RANGES_MAX as u64).map(|number| number * 10 + number % 3).collect();
        for start in &starts {
            discarded.add(*start..*start + 1);
            assert!(discarded.ranges.len() <= RANGES_MAX);
        }
        assert!(starts.iter().all(|start| discarded.contains(*start)));
        let full = discarded.ranges.iter().find(|range| range.end - range.start > 2).unwrap().clone();
        discarded.remove(&(full.start + 1..full.start + 2));
        assert!(discarded.ranges.len() <= RANGES_MAX);
        discarded.remove(&(0..u64::MAX));
        assert!(discarded.ranges.is_empty());
    }
}
