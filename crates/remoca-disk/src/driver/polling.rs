//! When the I/O thread looks for the next request before it sleeps.
//!
//! To be woken can take longer than to serve a block from memory. A thread that looks for a while spares that where requests
//! follow each other closely, and wastes processor time where they do not. It looks for as long as QEMU's I/O threads do at most
//! (`poll-max-ns`), and always that long; what adapts is how often. Each time in vain, it goes to sleep at once for twice
//! as many waits as the last time. QEMU's rule, a time that grows while requests come soon, counts the time to be
//! woken as time that the guest took (decision 0052).
//!
//! On a *crowded* processor, for which the thread often has to wait, others could use that time. There it looks only for half as long as
//! sleeping and being woken would take, and each time only while at least every other one is not in vain. Of those it lets others have their turn.

use remoca_io::thread_times::Times;
use std::time::Duration;

/// Most waits in a row that the thread goes to sleep at once.
const SKIPPED_MAX: u32 = 64;
/// Longest look on a crowded processor: about half of the processor time that sleeping and being woken take.
const CROWDED_TIME_MAX: Duration = Duration::from_micros(4);
/// Most looks in a row that are not in vain on a crowded processor. After them the thread sleeps once, so that others have their turn.
const CROWDED_FINDS_MAX: u32 = 8;
/// A processor is crowded if the thread waits for it for more than one part in so many of the time for which it has it.
const CROWDED_SHARE: u32 = 4;
/// Time after which the thread finds out anew whether its processor is crowded.
const TIMES_INTERVAL: Duration = Duration::from_millis(10);

/// The waits in which to look.
pub(super) struct Polling {
    time: Duration,
    /// Number of waits left in which the thread does not look.
    skips: u32,
    /// Value of `skips` after the last look; 0 if the thread looks each time.
    skipped: u32,
    is_crowded: bool,
    /// Number of looks in a row, up to the last one, that were not in vain on a crowded processor.
    finds: u32,
    /// When the thread's times were taken last, and what they were.
    times: Option<(Duration, Times)>,
}

impl Polling {
    /// Returns the rule for a thread that looks for up to `time`.
    pub(super) fn new(time: Duration) -> Self {
        Self { time, skips: 0, skipped: 0, is_crowded: false, finds: 0, times: None }
    }

    /// Begins a wait. Returns whether to look for events before sleeping.
    pub(super) fn begin(&mut self) -> bool {
        let looks = self.skips == 0;
        self.skips = self.skips.saturating_sub(1);
        looks && !self.time.is_zero()
    }

    /// Returns how long to look. `now` is the time since any moment. Calls `times` now and then to learn of the thread's times.
    pub(super) fn look(&mut self, now: Duration, times: impl FnOnce() -> Option<Times>) -> Duration {
        if self.times.is_none_or(|(at, _)| now.saturating_sub(at) >= TIMES_INTERVAL)
            && let Some(times) = times()
        {
            if let Some((_, before)) = self.times {
                let waited = times.waited.saturating_sub(before.waited);
                self.is_crowded = waited * CROWDED_SHARE > times.ran.saturating_sub(before.ran);
            }
            self.times = Some((now, times));
        }
        if self.is_crowded { self.time.min(CROWDED_TIME_MAX) } else { self.time }
    }

    /// Records whether something happened while the thread looked.
    pub(super) fn end(&mut self, has_found: bool) {
        self.skipped = match has_found {
            true if self.is_crowded => self.skipped / 2,
            true => 0,
            false => (2 * self.skipped).clamp(1, SKIPPED_MAX),
        };
        self.skips = self.skipped;
        self.finds = if has_found && self.is_crowded { self.finds + 1 } else { 0 };
        if self.finds == CROWDED_FINDS_MAX {
            (self.finds, self.skips) = (0, self.skips.max(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_micros(32);

    /// A thread that waits for its processor again and again: for a little more than a quarter of the time that it runs, or a little less.
    struct Thread {
        polling: Polling,
        now: Duration,
        times: Times,
        is_crowded: bool,
    }

    impl Thread {
        fn new(is_crowded: bool) -> Self {
            let (polling, times) = (Polling::new(TIME), Times::default());
            Self { polling, now: Duration::ZERO, times, is_crowded }
        }

        /// Returns how long the thread looks in the next wait, if it does, and finds something or not.
        fn wait(&mut self, finds: bool) -> Option<Duration> {
            let slice = 2 * TIMES_INTERVAL;
            self.now += slice;
            self.times.ran += slice;
            self.times.waited += slice * if self.is_crowded { 26 } else { 24 } / 100;
            let time = self.polling.begin().then(|| self.polling.look(self.now, || Some(self.times)))?;
            self.polling.end(finds);
            Some(time)
        }

        /// Returns in which of `waits` waits the thread looks, and finds something if `finds` says so.
        fn looks(&mut self, waits: usize, finds: impl Fn(usize) -> bool) -> Vec<usize> {
            (0..waits).filter(|wait| self.wait(finds(*wait)).is_some()).collect()
        }
    }

    #[test]
    fn a_thread_looks_each_time_while_it_finds_something() {
        assert_eq!(Thread::new(false).looks(100, |_| true), Vec::from_iter(0..100));
        // Where others wait for the processor, they have their turn. That is known from the second look on.
        let looks = Thread::new(true).looks(100, |_| true);
        assert_eq!(looks, Vec::from_iter((0..100).filter(|wait| *wait == 0 || wait % 9 != 0)));
    }

    #[test]
    fn a_thread_looks_ever_more_rarely_in_vain_but_does_not_cease() {
        for is_crowded in [false, true] {
            let looks = Thread::new(is_crowded).looks(300, |_| false);
            assert_eq!(looks, [0, 2, 5, 10, 19, 36, 69, 134, 199, 264]);
        }
    }

    #[test]
    fn what_was_found_once_is_looked_for_each_time_again() {
        assert_eq!(Thread::new(false).looks(24, |wait| wait >= 19), [0, 2, 5, 10, 19, 20, 21, 22, 23]);
        // Every other one comes soon.
        assert_eq!(Thread::new(false).looks(16, |wait| wait % 2 == 0), [0, 1, 3, 6, 7, 9, 12, 13, 15]);
    }

    #[test]
    fn on_a_crowded_processor_a_thread_looks_briefly_and_each_time_only_if_it_mostly_finds_something() {
        let mut thread = Thread::new(true);
        assert_eq!(thread.wait(false), Some(TIME), "its times are not known yet");
        assert_eq!(thread.wait(false), None);
        assert_eq!(thread.wait(false), Some(CROWDED_TIME_MAX));
        // Half as many waits are left out after each time that is not in vain. The eighth in a row leaves out one.
        let mut thread = Thread::new(true);
        assert_eq!(
            thread.looks(40, |wait| wait >= 19),
            Vec::from_iter([0, 2, 5, 10, 19, 24, 27, 29].into_iter().chain(30..34).chain(35..40))
        );
        // One request in three comes soon, without any order.
        let comes_soon = |wait: usize| wait.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 0xff < 85;
        let looks = [true, false].map(|is_crowded| Thread::new(is_crowded).looks(3000, comes_soon).len());
        assert!(looks[0] < 600 && looks[1] > 1200, "{looks:?}");
    }

    #[test]
    fn a_thread_looks_as_before_when_its_processor_is_no_longer_crowded() {
        let mut thread = Thread::new(true);
        thread.looks(10, |_| true);
        assert_eq!(thread.wait(true), Some(CROWDED_TIME_MAX));
        thread.is_crowded = false;
        assert_eq!(thread.wait(true), Some(TIME));
    }

    #[test]
    fn times_are_taken_now_and_then_and_need_not_be_there() {
        let mut polling = Polling::new(TIME);
        let mut taken = 0;
        for millisecond in 0..100 {
            assert!(polling.begin());
            let look = polling.look(Duration::from_millis(millisecond), || {
                taken += 1;
                Some(Times::default())
            });
            assert_eq!(look, TIME);
            polling.end(true);
        }
        assert_eq!(taken, 10);
        assert_eq!(Polling::new(TIME).look(Duration::ZERO, || None), TIME);
        let less = Duration::from_micros(3);
        let mut thread = Thread::new(true);
        thread.polling.time = less;
        assert_eq!([thread.wait(true), thread.wait(true)], [Some(less); 2], "never longer than the operator says");
    }

    #[test]
    fn a_thread_without_time_does_not_look() {
        assert!(!Polling::new(Duration::ZERO).begin());
    }
}
