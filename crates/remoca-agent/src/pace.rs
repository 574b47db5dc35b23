//! Decides when to write: as soon as enough pages wait, or when the first waiting page has waited long enough.
//!
//! Pure: the time is an argument.

use std::time::{Duration, Instant};

/// How long a page waits for others. This is long enough that many pages share a wakeup and a write, even when a slow disk
/// sets the rate. It is short compared with the time until a guest reads a page again. Decision 0006 has the figures.
pub const PAGE_AGE_MAX: Duration = Duration::from_millis(50);

#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Write the waiting pages.
    Write,
    /// Check again at this time, or when woken.
    WaitUntil(Instant),
    /// No pages wait.
    Idle,
}

#[derive(Debug, Default)]
pub struct Pace {
    /// Time when the first of the waiting pages was seen; `None` if no pages wait.
    since: Option<Instant>,
}

impl Pace {
    /// Decides what to do with `waiting` ready pages. Writes at once if there are at least `worthwhile`, which are
    /// worth a write or reach the end of the ring.
    pub fn next(&mut self, waiting: usize, worthwhile: usize, now: Instant) -> Next {
        if waiting == 0 {
            self.since = None;
            return Next::Idle;
        }
        let due_at = *self.since.get_or_insert(now) + PAGE_AGE_MAX;
        if waiting >= worthwhile || now >= due_at { Next::Write } else { Next::WaitUntil(due_at) }
    }

    /// Clears the time of the first waiting page, because the waiting pages were written.
    pub fn written(&mut self) {
        self.since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enough_goes_at_once() {
        let now = Instant::now();
        let mut pace = Pace::default();
        assert_eq!(pace.next(0, 4, now), Next::Idle);
        assert_eq!(pace.next(3, 4, now), Next::WaitUntil(now + PAGE_AGE_MAX));
        assert_eq!(pace.next(4, 4, now), Next::Write);
    }

    #[test]
    fn age_counts_from_the_first_page_seen() {
        let now = Instant::now();
        let mut pace = Pace::default();
        assert_eq!(pace.next(1, 4, now), Next::WaitUntil(now + PAGE_AGE_MAX));
        assert_eq!(pace.next(2, 4, now + PAGE_AGE_MAX / 2), Next::WaitUntil(now + PAGE_AGE_MAX));
        assert_eq!(pace.next(2, 4, now + PAGE_AGE_MAX), Next::Write);
        pace.written();
        let later = now + 2 * PAGE_AGE_MAX;
        assert_eq!(pace.next(1, 4, later), Next::WaitUntil(later + PAGE_AGE_MAX));
    }
}
