//! Durable operations of an image that run at the same time: none succeeds beside one that fails.
//!
//! The kernel reports lost pages to one sync of a descriptor. Another one that waits for the same pages succeeds, and may
//! be the first whose result is known. So the success of a durable operation is held back until the results of all
//! durable operations are known that were in flight with it at its end. A later one cannot have taken its error. One
//! that runs alone is not held back. Called by `file`, which passes what comes out through the flush latch.
//!
//! Invariant: what is held back waits only for calls of the kernel, and for none that began after it had ended.

use std::collections::{BTreeSet, VecDeque};

/// Durable operations in flight, and successes of type `T` that are held back.
pub(super) struct Overlaps<T> {
    /// Number of durable operations that have begun.
    begun: u64,
    in_flight: BTreeSet<u64>,
    /// Successes in the order of their ends. Each waits for the operations in flight with a lower number.
    held: VecDeque<(u64, T)>,
}

impl<T> Overlaps<T> {
    pub(super) fn new() -> Self {
        Self { begun: 0, in_flight: BTreeSet::new(), held: VecDeque::new() }
    }

    /// Begins a durable operation. Returns its number.
    pub(super) fn begin(&mut self) -> u64 {
        let number = self.begun;
        self.begun += 1;
        self.in_flight.insert(number);
        number
    }

    /// Ends the operation `number`. Holds its `success` back, unless it has failed.
    pub(super) fn end(&mut self, number: u64, success: Option<T>) {
        self.in_flight.remove(&number);
        self.held.extend(success.map(|success| (self.begun, success)));
    }

    /// Removes and returns the next success that nothing holds back any longer, or `None` if there is none.
    pub(super) fn pop(&mut self) -> Option<T> {
        let (before, _) = self.held.front()?;
        if self.in_flight.first().is_some_and(|oldest| oldest < before) {
            return None;
        }
        self.held.pop_front().map(|(_, success)| success)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn released(overlaps: &mut Overlaps<u32>) -> Vec<u32> {
        std::iter::from_fn(|| overlaps.pop()).collect()
    }

    #[test]
    fn an_operation_that_runs_alone_is_not_held_back() {
        let mut overlaps = Overlaps::new();
        for success in 0..3 {
            let number = overlaps.begin();
            overlaps.end(number, Some(success));
            assert_eq!(released(&mut overlaps), [success]);
        }
    }

    #[test]
    fn a_success_waits_for_what_was_in_flight_at_its_end_and_for_nothing_that_began_later() {
        let mut overlaps = Overlaps::new();
        let [first, second, third] = [(); 3].map(|()| overlaps.begin());
        overlaps.end(second, Some(2));
        let fourth = overlaps.begin();
        assert!(released(&mut overlaps).is_empty());
        overlaps.end(first, None);
        assert!(released(&mut overlaps).is_empty(), "the third was in flight at its end");
        overlaps.end(third, Some(3));
        assert_eq!(released(&mut overlaps), [2], "the fourth began later");
        overlaps.end(fourth, Some(4));
        assert_eq!(released(&mut overlaps), [3, 4]);
    }
}
