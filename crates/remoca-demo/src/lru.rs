//! An exact LRU over block numbers: the answers that a perfect cache of a given size would have given.
//!
//! Called by [`crate::analysis`]. Owns a doubly linked list in a vector, most recent first, and a map to its nodes.

use std::collections::HashMap;

const NONE: usize = usize::MAX;

#[derive(Clone, Copy)]
struct Node {
    block: u64,
    newer: usize,
    older: usize,
}

/// Set of the `capacity` blocks that were touched most recently.
pub struct ExactLru {
    capacity: usize,
    nodes: Vec<Node>,
    places: HashMap<u64, usize>,
    newest: usize,
    oldest: usize,
}

impl ExactLru {
    pub fn new(capacity: usize) -> ExactLru {
        ExactLru { capacity, nodes: Vec::new(), places: HashMap::new(), newest: NONE, oldest: NONE }
    }

    /// Returns whether the block is in the set, without touching it.
    pub fn holds(&self, block: u64) -> bool {
        self.places.contains_key(&block)
    }

    /// Makes the block the newest, and removes the oldest if there is no room. Returns whether it was held before.
    pub fn touch(&mut self, block: u64) -> bool {
        if let Some(&place) = self.places.get(&block) {
            self.unlink(place);
            self.link_newest(place);
            return true;
        }
        if self.capacity == 0 {
            return false;
        }
        let place = if self.nodes.len() < self.capacity {
            self.nodes.push(Node { block, newer: NONE, older: NONE });
            self.nodes.len() - 1
        } else {
            let oldest = self.oldest;
            self.unlink(oldest);
            self.places.remove(&self.nodes[oldest].block);
            self.nodes[oldest].block = block;
            oldest
        };
        self.places.insert(block, place);
        self.link_newest(place);
        false
    }

    fn unlink(&mut self, place: usize) {
        let Node { newer, older, .. } = self.nodes[place];
        if newer == NONE {
            self.newest = older
        } else {
            self.nodes[newer].older = older
        }
        if older == NONE { self.oldest = newer } else { self.nodes[older].newer = newer }
    }

    fn link_newest(&mut self, place: usize) {
        let before = self.newest;
        self.nodes[place].newer = NONE;
        self.nodes[place].older = before;
        if before == NONE {
            self.oldest = place
        } else {
            self.nodes[before].newer = place
        }
        self.newest = place;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Does the same with a plain vector, the newest block last.
    fn touch_naive(held: &mut Vec<u64>, capacity: usize, block: u64) -> bool {
        let place = held.iter().position(|&other| other == block);
        if let Some(place) = place {
            held.remove(place);
        }
        held.push(block);
        if held.len() > capacity {
            held.remove(0);
        }
        place.is_some()
    }

    proptest! {
        #[test]
        fn same_as_a_list(capacity in 0usize..9, blocks in prop::collection::vec(0u64..14, 0..400)) {
            let mut lru = ExactLru::new(capacity);
            let mut naive = Vec::new();
            for block in blocks {
                prop_assert_eq!(lru.touch(block), touch_naive(&mut naive, capacity, block));
                for other in 0..14 {
                    prop_assert_eq!(lru.holds(other), naive.contains(&other));
                }
            }
        }
    }
}
