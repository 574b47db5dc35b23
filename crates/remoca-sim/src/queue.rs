//! The event queue, ordered by virtual time, then by the order of scheduling. It is the only clock.

use remoca_core::units::Nanos;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// An event with its time and the seed of all randomness that follows from it.
#[derive(Debug)]
pub struct Scheduled<E> {
    pub at: Nanos,
    order: u64,
    pub seed: u64,
    pub event: E,
}

impl<E> PartialEq for Scheduled<E> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl<E> Eq for Scheduled<E> {}

impl<E> PartialOrd for Scheduled<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Scheduled<E> {
    /// Compares in reverse: the heap returns its largest element first, so the earliest event must be the largest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

/// Events still to come.
#[derive(Debug)]
pub struct Queue<E> {
    heap: BinaryHeap<Scheduled<E>>,
    scheduled: u64,
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), scheduled: 0 }
    }
}

impl<E> Queue<E> {
    /// Adds an event. Of two events at the same time, the one added first is returned first.
    pub fn push(&mut self, at: Nanos, seed: u64, event: E) {
        self.scheduled += 1;
        self.heap.push(Scheduled { at, order: self.scheduled, seed, event });
    }

    /// Removes and returns the next event, or `None` if the queue is empty.
    pub fn pop(&mut self) -> Option<Scheduled<E>> {
        self.heap.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_decides_then_order() {
        let mut queue = Queue::default();
        for (at, name) in [(5, "c"), (1, "a"), (5, "d"), (3, "b")] {
            queue.push(Nanos(at), 0, name);
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|e| e.event).collect();
        assert_eq!(order, ["a", "b", "c", "d"]);
    }
}
