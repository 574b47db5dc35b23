//! The reader's side of the ring of slots that `bpf/capture.bpf.c` fills.
//!
//! ```text
//! tickets:  ... done with | freed .. the run that is ready .. | being copied | taken .. not given out yet
//! slot of a ticket: ticket mod slot count;   state of a slot: ticket + 1, top bit set where the copy failed
//! ```
//! Slots are used in the order of their tickets, so adjacent ready pages are written in one piece. Pure: it reads the
//! states and counts slots; the bytes in the slots are the caller's business. Invariants:
//! 1. A run covers only slots whose copy is complete, and never extends beyond the end of the ring.
//! 2. A slot is freed once, in order.

use std::sync::atomic::{AtomicU64, Ordering};

const COPY_FAILED: u64 = 1 << 63;

/// A run of adjacent slots whose pages are complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub first_slot: usize,
    pub page_count: usize,
}

pub struct RingReader<'a> {
    /// State of each slot; their number is a power of two.
    states: &'a [AtomicU64],
    /// First ticket that is not freed.
    freed: u64,
}

impl<'a> RingReader<'a> {
    pub fn new(states: &'a [AtomicU64]) -> RingReader<'a> {
        assert!(states.len().is_power_of_two(), "tickets are mapped to slots with a mask");
        RingReader { states, freed: 0 }
    }

    /// Returns the run of ready pages, at most `page_count_max`. Frees the slots before it whose copy failed.
    pub fn ready(&mut self, page_count_max: usize) -> Run {
        while self.state(self.freed) == (self.freed + 1) | COPY_FAILED {
            self.freed += 1;
        }
        let first_slot = self.slot(self.freed);
        let limit = page_count_max.min(self.states.len() - first_slot);
        let page_count = (self.freed..).take(limit).take_while(|ticket| self.state(*ticket) == ticket + 1).count();
        Run { first_slot, page_count }
    }

    /// Frees the first `page_count` slots of the run. Returns the first ticket that is not freed, for the eBPF program.
    pub fn free(&mut self, page_count: usize) -> u64 {
        self.freed += page_count as u64;
        self.freed
    }

    fn state(&self, ticket: u64) -> u64 {
        self.states[self.slot(ticket)].load(Ordering::Acquire)
    }

    fn slot(&self, ticket: u64) -> usize {
        // The masked value fits a usize.
        usize::try_from(ticket & (self.states.len() as u64 - 1)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn states(slot_count: usize) -> Vec<AtomicU64> {
        (0..slot_count).map(|_| AtomicU64::new(0)).collect()
    }

    fn put(states: &[AtomicU64], ticket: u64, failed: bool) {
        let slot = usize::try_from(ticket).unwrap() % states.len();
        states[slot].store((ticket + 1) | if failed { COPY_FAILED } else { 0 }, Ordering::Release);
    }

    #[test]
    fn nothing_is_ready_in_a_fresh_ring() {
        let states = states(8);
        assert_eq!(RingReader::new(&states).ready(8), Run { first_slot: 0, page_count: 0 });
    }

    #[test]
    fn run_ends_where_a_copy_is_not_complete() {
        let states = states(8);
        let mut reader = RingReader::new(&states);
        for ticket in [0, 1, 3] {
            put(&states, ticket, false);
        }
        assert_eq!(reader.ready(8), Run { first_slot: 0, page_count: 2 });
        assert_eq!(reader.ready(1), Run { first_slot: 0, page_count: 1 });
        assert_eq!(reader.free(2), 2);
        assert_eq!(reader.ready(8), Run { first_slot: 2, page_count: 0 });
        put(&states, 2, false);
        assert_eq!(reader.ready(8), Run { first_slot: 2, page_count: 2 });
    }

    #[test]
    fn failed_copies_are_passed_over() {
        let states = states(8);
        let mut reader = RingReader::new(&states);
        put(&states, 0, true);
        put(&states, 1, true);
        put(&states, 2, false);
        put(&states, 3, true);
        assert_eq!(reader.ready(8), Run { first_slot: 2, page_count: 1 });
        assert_eq!(reader.free(1), 3);
        assert_eq!(reader.ready(8), Run { first_slot: 4, page_count: 0 });
    }

    proptest! {
        /// Tests any mixture of producing, out-of-order completion and reading: every good page is read once, in order.
        #[test]
        fn each_page_is_read_once_and_in_order(steps in prop::collection::vec((0u8..3, 1usize..7, any::<bool>()), 1..300)) {
            const SLOT_COUNT: u64 = 8;
            let states = states(8);
            let mut reader = RingReader::new(&states);
            let (mut taken, mut freed) = (0u64, 0u64);
            let mut copying: Vec<(u64, bool)> = Vec::new();
            let (mut expected, mut read) = (Vec::new(), Vec::new());
            for (step, count, failed) in steps {
                match step {
                    0 if taken - freed < SLOT_COUNT => {
                        copying.push((taken, failed));
                        if !failed {
                            expected.push(taken);
                        }
                        taken += 1;
                    }
                    1 if !copying.is_empty() => {
                        let (ticket, failed) = copying.remove(count % copying.len());
                        put(&states, ticket, failed);
                    }
                    _ => {
                        let run = reader.ready(count);
                        prop_assert!(run.page_count <= count && run.first_slot + run.page_count <= 8);
                        let first = reader.free(0);
                        read.extend(first..first + run.page_count as u64);
                        freed = reader.free(run.page_count);
                        prop_assert!(freed <= taken);
                    }
                }
            }
            for (ticket, failed) in copying {
                put(&states, ticket, failed);
            }
            // Two turns suffice: to the end of the ring, and from its beginning.
            for _ in 0..3 * SLOT_COUNT {
                let run = reader.ready(8);
                let first = reader.free(0);
                read.extend(first..first + run.page_count as u64);
                reader.free(run.page_count);
            }
            prop_assert_eq!(reader.free(0), taken);
            prop_assert_eq!(read, expected);
        }
    }
}
