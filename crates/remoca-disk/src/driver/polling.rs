//! When the I/O thread looks for the next request before it sleeps.
//!
//! To be woken can take longer than to serve a block from memory. A thread that looks for a while spares that where requests
//! follow each other closely, and wastes processor time where they do not. It looks for as long as QEMU's I/O threads do at most
//! (`poll-max-ns`), and always that long; what adapts is how often. Each time in vain, it goes to sleep at once for twice
//! as many waits as the last time. QEMU's rule, a time that grows while requests come soon, counts the time to be
//! woken as time that the guest took (decision 0052).

use std::time::Duration;

/// Most waits in a row that the thread goes to sleep at once.
const SKIPPED_MAX: u32 = 64;

/// The waits in which to look.
pub(super) struct Polling {
    time: Duration,
    /// Number of waits left in which the thread does not look.
    skips: u32,
    /// Value of `skips` after the last time in vain; 0 if the last time was not in vain.
    skipped: u32,
}

impl Polling {
    /// Returns the rule for a thread that looks for up to `time`.
    pub(super) fn new(time: Duration) -> Self {
        Self { time, skips: 0, skipped: 0 }
    }

    /// Begins a wait. Returns how long to look for events before sleeping, or `None` if not at all.
    pub(super) fn begin(&mut self) -> Option<Duration> {
        if self.skips > 0 {
            self.skips -= 1;
            return None;
        }
        Some(self.time).filter(|time| !time.is_zero())
    }

    /// Records whether something happened while the thread looked.
    pub(super) fn end(&mut self, has_found: bool) {
        self.skipped = if has_found { 0 } else { (2 * self.skipped).clamp(1, SKIPPED_MAX) };
        self.skips = self.skipped;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns in which of `waits` waits a thread looks that finds something if `finds` says so.
    fn looks(waits: usize, finds: impl Fn(usize) -> bool) -> Vec<usize> {
        let mut polling = Polling::new(Duration::from_micros(32));
        let mut look = |wait: &usize| {
            let time = polling.begin()?;
            assert_eq!(time, Duration::from_micros(32));
            polling.end(finds(*wait));
            Some(())
        };
        (0..waits).filter(|wait| look(wait).is_some()).collect()
    }

    #[test]
    fn a_thread_looks_each_time_while_it_finds_something() {
        assert_eq!(looks(100, |_| true), Vec::from_iter(0..100));
    }

    #[test]
    fn a_thread_looks_ever_more_rarely_in_vain_but_does_not_cease() {
        assert_eq!(looks(300, |_| false), [0, 2, 5, 10, 19, 36, 69, 134, 199, 264]);
    }

    #[test]
    fn what_was_found_once_is_looked_for_each_time_again() {
        assert_eq!(looks(24, |wait| wait >= 19), [0, 2, 5, 10, 19, 20, 21, 22, 23]);
        // Every other one comes soon.
        assert_eq!(looks(16, |wait| wait % 2 == 0), [0, 1, 3, 6, 7, 9, 12, 13, 15]);
    }

    #[test]
    fn a_thread_without_time_does_not_look() {
        assert_eq!(Polling::new(Duration::ZERO).begin(), None);
    }
}
