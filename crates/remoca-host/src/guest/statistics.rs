//! What the guest's balloon driver tells of its memory. The numbers are the guest's own: they are hints.

use super::monitor::Pressure;
use std::time::{Duration, Instant, SystemTime};

/// How often a guest is to tell that does not tell often enough, in seconds.
pub(super) const PERIOD_S: u32 = 2;
/// Longest period that somebody else has set and that stays: three messages come before one is too old.
const PERIOD_MAX_S: u64 = 10;

/// Returns whether a guest that tells each `period_s` seconds need not tell more often. It tells nothing with 0.
pub(super) fn is_often_enough(period_s: u64) -> bool {
    (1..=PERIOD_MAX_S).contains(&period_s)
}

/// Age at which statistics say nothing about now. A guest under pressure may be late, but not as late.
const STALE_AFTER: Duration = Duration::from_secs(30);

/// One message of the guest. `None` for what it does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Told {
    /// When the host received it, in seconds by the host's clock; 0 if there is none yet.
    pub at_s: u64,
    pub major_faults: Option<u64>,
    pub swapped_in_pages: Option<u64>,
    pub available_bytes: Option<u64>,
}

/// What follows from the messages of one guest.
#[derive(Debug, Default)]
pub(super) struct Statistics {
    /// When this program began to listen, in seconds since 1970.
    begun_s: u64,
    /// Whether the latest message is the first one, and was too old then to say anything about now.
    is_old: bool,
    /// The latest message, and when this program first saw it.
    latest: Option<(Told, Instant)>,
    pressure: Pressure,
    /// Most that the balloon can have left to the guest when it sent that.
    had_bytes: u64,
    /// Memory that the balloon left to the guest at the latest look.
    actual_bytes: u64,
}

impl Statistics {
    /// Returns what is known of a guest that is heard from now on.
    pub(super) fn new() -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Self { begun_s: now.map_or(0, |time| time.as_secs()), ..Self::default() }
    }

    /// Takes the latest message, and the memory that the balloon leaves to the guest now. Returns the available memory, less what the balloon took
    /// since then, and the rates between the message and the one before; nothing if it is too old.
    pub(super) fn hear(&mut self, now: Instant, told: Told, actual_bytes: u64) -> (Option<u64>, Pressure) {
        let before = self.actual_bytes;
        match self.latest {
            _ if told.at_s == 0 => *self = Self { begun_s: self.begun_s, ..Self::default() },
            Some((latest, _)) if latest.at_s == told.at_s => {}
            latest => {
                // Its driver may have told nothing for hours.
                self.is_old = latest.is_none() && told.at_s.saturating_add(STALE_AFTER.as_secs()) <= self.begun_s;
                self.pressure = latest.map(|(earlier, _)| between(&earlier, &told)).unwrap_or_default();
                self.latest = Some((told, now));
                self.had_bytes = before.max(actual_bytes);
            }
        }
        self.actual_bytes = actual_bytes;
        let taken = self.had_bytes.saturating_sub(actual_bytes);
        match self.latest {
            Some((latest, seen)) if !self.is_old && now.saturating_duration_since(seen) < STALE_AFTER => {
                (latest.available_bytes.map(|bytes| bytes.saturating_sub(taken)), self.pressure)
            }
            _ => (None, Pressure::default()),
        }
    }
}

fn between(earlier: &Told, later: &Told) -> Pressure {
    // A clock that was set back, or counters of a guest that booted again, tell nothing.
    let seconds = later.at_s.checked_sub(earlier.at_s).filter(|seconds| *seconds > 0);
    let rate = |of: fn(&Told) -> Option<u64>| {
        let count = of(later)?.checked_sub(of(earlier)?)?;
        #[expect(clippy::cast_precision_loss, reason = "it is a rate")]
        Some(count as f64 / seconds? as f64)
    };
    Pressure {
        major_faults_per_s: rate(|told| told.major_faults),
        swapped_in_per_s: rate(|told| told.swapped_in_pages),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(at_s: u64, major_faults: u64, swapped_in_pages: u64) -> Told {
        Told {
            at_s,
            major_faults: Some(major_faults),
            swapped_in_pages: Some(swapped_in_pages),
            available_bytes: Some(at_s << 20),
        }
    }

    fn rates(faults: f64, swapped: f64) -> Pressure {
        Pressure { major_faults_per_s: Some(faults), swapped_in_per_s: Some(swapped) }
    }

    #[test]
    fn rates_are_those_between_two_messages() {
        let (mut statistics, now) = (Statistics::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(statistics.hear(now, Told::default(), 1 << 30), (None, Pressure::default()));
        assert_eq!(statistics.hear(now, told(100, 10, 4), 1 << 30), (Some(100 << 20), Pressure::default()));
        assert_eq!(statistics.hear(at(4), told(104, 30, 4), 1 << 30), (Some(104 << 20), rates(5., 0.)));
        assert_eq!(
            statistics.hear(at(5), told(104, 30, 4), 1 << 30),
            (Some(104 << 20), rates(5., 0.)),
            "the same message"
        );
        assert_eq!(statistics.hear(at(6), told(106, 30, 8), 1 << 30), (Some(106 << 20), rates(0., 2.)));
    }

    #[test]
    fn a_guest_that_says_nothing_any_more_is_not_believed() {
        let (mut statistics, now) = (Statistics::default(), Instant::now());
        statistics.hear(now, told(100, 10, 0), 1 << 30);
        statistics.hear(now, told(101, 20, 0), 1 << 30);
        let later = now + STALE_AFTER;
        assert_eq!(statistics.hear(later, told(101, 20, 0), 1 << 30), (None, Pressure::default()));
        let booted = told(140, 1, 0);
        let Pressure { major_faults_per_s, swapped_in_per_s, .. } = statistics.hear(later, booted, 1 << 30).1;
        assert_eq!((major_faults_per_s, swapped_in_per_s), (None, Some(0.)), "its counters began again");
        assert_eq!(statistics.hear(later, told(139, 2, 0), 1 << 30).1, Pressure::default(), "the clock was set back");
        assert_eq!(statistics.hear(later, told(141, u64::MAX, 0), 1 << 30).1.swapped_in_per_s, Some(0.));
        assert_eq!(
            statistics.hear(later, Told::default(), 1 << 30),
            (None, Pressure::default()),
            "its driver was unloaded"
        );
    }

    #[test]
    fn a_message_from_long_before_this_program_began_says_nothing() {
        let now = Instant::now();
        for (begun_s, is_new) in [(129, true), (130, false), (9999, false)] {
            let mut statistics = Statistics { begun_s, ..Statistics::default() };
            let mut available = |at_s: u64| statistics.hear(now, told(at_s, 0, 0), 1 << 30).0;
            assert_eq!([100, 100].map(&mut available), [is_new.then_some(100 << 20); 2], "{begun_s}");
            assert_eq!(available(102), Some(102 << 20), "it tells again: {begun_s}");
        }
    }

    #[test]
    fn what_the_balloon_took_since_the_message_is_not_available() {
        let (mut statistics, now) = (Statistics::default(), Instant::now());
        let mut available = |at_s: u64, actual_mib: u64| {
            let told = Told { available_bytes: Some(400 << 20), ..told(at_s, 0, 0) };
            statistics.hear(now, told, actual_mib << 20).0.map(|bytes| bytes >> 20)
        };
        assert_eq!([available(100, 900), available(100, 800), available(100, 300)], [400, 300, 0].map(Some));
        // The next message may be from before the balloon took what is seen with it.
        assert_eq!([available(110, 250), available(110, 200)], [350, 300].map(Some));
        assert_eq!([available(120, 200), available(120, 260)], [400, 400].map(Some), "it got something");
    }
}
