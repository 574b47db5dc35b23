//! When one image was last written and last looked at: this decides which of its change times may be recorded, and as what.
//!
//! Pure: the driver (`warmth.rs`) reads the clocks, asks the store to look, and writes the record. The answer to a look
//! may come late, or never.

use crate::state::{LOOK_NS, NotYet, SETTLE_NS, settled_ns};

/// Minimum time between two removals of an image from the page cache.
const DROP_NS: u64 = 1_000_000_000;
/// Time after which a look without an answer leaves the image in doubt: what was seen before is too old.
const ANSWER_NS: u64 = 1_000_000_000;

/// What the driver knows of one image.
#[derive(Default)]
pub(super) struct ImageState {
    /// Modifications that the store has not completed.
    in_flight: u32,
    /// When a modification was last in flight, in real time. 0: the image is settled.
    written_ns: u64,
    /// When the last look began.
    looked_ns: u64,
    look: Option<Look>,
    /// When the image was last removed from the page cache.
    dropped_ns: u64,
    pub(super) cold_reason: Option<String>,
    /// Error of the failed flush that was recorded.
    pub(super) failed_flush: Option<i32>,
}

/// A look whose answer has not arrived.
struct Look {
    /// The kernel's clock for change times, read before the look: any write from then on has this time, or a later one.
    coarse_ns: u64,
    /// Whether no write was in flight at the look, and none has started since.
    settles: bool,
    /// Whether it has taken so long that what was seen before is void.
    doubted: bool,
}

/// The result of a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    /// The image was last changed at this time or later. 0: the time is not known.
    Seen(u64),
    /// The image was last changed at this time, and not later. 0: the time is not known.
    Settled(u64),
}

impl ImageState {
    /// Marks the image as written at `now_ns`: opening it may have changed its times. Drops a look without an answer.
    pub(super) fn begin_record(&mut self, now_ns: u64) {
        self.written_ns = now_ns;
        self.look = None;
    }

    /// Adds a modification to the count in flight. A look that has no answer yet can then no longer settle the image.
    pub(super) fn begin_write(&mut self) {
        self.in_flight += 1;
        if let Some(look) = &mut self.look {
            look.settles = false;
        }
    }

    /// Removes a completed modification from the count in flight.
    pub(super) fn end_write(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Returns whether modifications are in flight.
    pub(super) fn is_written_to(&self) -> bool {
        self.in_flight > 0
    }

    /// Returns whether the last write is over, but its change time is not recorded yet.
    pub(super) fn is_settling(&self) -> bool {
        self.in_flight == 0 && self.written_ns != 0
    }

    /// Sets the time at which a modification was last in flight to `now_ns`.
    pub(super) fn note_writes(&mut self, now_ns: u64) {
        self.written_ns = now_ns;
    }

    /// Returns whether a look is due: repeatedly while writes are in flight, and once when the last one is long enough ago.
    pub(super) fn look_is_due(&self, now_ns: u64) -> bool {
        let since_ns = |then_ns: u64| now_ns.abs_diff(then_ns);
        match self.in_flight {
            _ if self.look.is_some() => false,
            0 => self.written_ns != 0 && since_ns(self.written_ns) > SETTLE_NS,
            _ => since_ns(self.looked_ns) > LOOK_NS,
        }
    }

    /// Stores a look that starts at `now_ns`. `coarse_ns` is the kernel's clock for change times, read before the look.
    pub(super) fn begin_look(&mut self, now_ns: u64, coarse_ns: u64) {
        self.looked_ns = now_ns;
        self.look = Some(Look { coarse_ns, settles: self.in_flight == 0, doubted: false });
    }

    /// Returns whether a look has had no answer for so long that what was seen before is void. Returns true only once
    /// for each look.
    pub(super) fn begin_doubt(&mut self, now_ns: u64) -> bool {
        let is_late = now_ns.abs_diff(self.looked_ns) > ANSWER_NS;
        self.look.as_mut().is_some_and(|look| is_late && !std::mem::replace(&mut look.doubted, true))
    }

    /// Returns the time until the image has to be examined again, or `None` if only another event can make that necessary.
    pub(super) fn wait_ns(&self) -> Option<u64> {
        const PAST: u64 = 1_000_000;
        match &self.look {
            Some(look) => (!look.doubted).then_some(ANSWER_NS + PAST),
            None => self.is_settling().then_some(SETTLE_NS + PAST),
        }
    }

    /// Ends the look, and returns the change time to record, as settled if that is certain. Returns `None` if no look
    /// waits for an answer: this one then belongs to an earlier record, and means nothing.
    pub(super) fn end_look(&mut self, changed_ns: Option<u64>) -> Option<Sight> {
        let look = self.look.take()?;
        match settled_ns(changed_ns, look.coarse_ns) {
            Ok(settled_ns) if look.settles => {
                self.written_ns = 0;
                Some(Sight::Settled(settled_ns.unwrap_or(0)))
            }
            Ok(_) | Err(NotYet) => Some(Sight::Seen(changed_ns.unwrap_or(0))),
        }
    }

    /// Settles an image whose change time does not reveal what other programs do: its last write needs no look.
    pub(super) fn settle_blind(&mut self) {
        self.written_ns = 0;
    }

    /// Returns whether the image is to be removed from the page cache now, and records the time if it is. Any of its
    /// pages that are there after a kill were then brought in by other programs, after that time.
    pub(super) fn begin_drop(&mut self, now_ns: u64) -> bool {
        let is_due = now_ns.abs_diff(self.dropped_ns) > DROP_NS;
        if is_due {
            self.dropped_ns = now_ns;
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    /// Real time when the first write begins.
    const START: u64 = 1_700_000_000_123 * MS;

    /// An image whose last write was 13 ms ago, just before the look that settles it.
    fn settling() -> ImageState {
        let mut image = ImageState::default();
        image.begin_write();
        image.note_writes(START);
        image.end_write();
        assert!(image.is_settling() && !image.look_is_due(START + SETTLE_NS));
        assert!(image.look_is_due(START + SETTLE_NS + MS));
        image
    }

    #[test]
    fn a_look_after_the_last_write_settles_the_image() {
        let mut image = settling();
        image.begin_look(START + 13 * MS, START + 12 * MS);
        assert!(!image.look_is_due(START + 1000 * MS), "one at a time");
        assert_eq!(image.end_look(Some(START + MS)), Some(Sight::Settled(START + MS)));
        assert!(!image.is_settling() && image.wait_ns().is_none());
        assert_eq!(image.end_look(Some(START)), None, "nobody asked");
    }

    #[test]
    fn a_write_that_begins_before_the_answer_keeps_the_image_from_being_settled() {
        for ends in [false, true] {
            let mut image = settling();
            image.begin_look(START + 13 * MS, START + 12 * MS);
            image.begin_write();
            image.note_writes(START + 14 * MS);
            if ends {
                image.end_write();
            }
            assert_eq!(image.end_look(Some(START + MS)), Some(Sight::Seen(START + MS)));
            assert_eq!((image.is_settling(), image.is_written_to()), (ends, !ends));
        }
    }

    #[test]
    fn a_later_write_with_the_same_time_keeps_the_image_from_being_settled() {
        let mut image = settling();
        image.begin_look(START + 13 * MS, START + 12 * MS);
        assert_eq!(image.end_look(Some(START + 12 * MS)), Some(Sight::Seen(START + 12 * MS)));
        assert!(image.look_is_due(START + 13 * MS), "it is tried again");
    }

    #[test]
    fn an_answer_that_does_not_come_leaves_the_image_in_doubt() {
        let mut image = settling();
        image.begin_look(START + 13 * MS, START + 12 * MS);
        assert!(!image.begin_doubt(START + 1000 * MS) && image.wait_ns().is_some());
        assert!(image.begin_doubt(START + 1014 * MS));
        assert!(!image.begin_doubt(START + 1015 * MS) && image.wait_ns().is_none(), "once");
        // It is as good as ever when it comes: no write has begun.
        assert_eq!(image.end_look(Some(START + MS)), Some(Sight::Settled(START + MS)));
        assert!(!image.begin_doubt(START + 9000 * MS));
    }

    #[test]
    fn while_writes_are_under_way_it_is_looked_at_again_and_again() {
        let mut image = ImageState::default();
        image.begin_write();
        for look in 1..4 {
            let now_ns = START + look * (LOOK_NS + MS);
            image.note_writes(now_ns);
            assert!(image.look_is_due(now_ns));
            image.begin_look(now_ns, now_ns - MS);
            assert_eq!(image.end_look(Some(now_ns - 2 * MS)), Some(Sight::Seen(now_ns - 2 * MS)));
            assert!(!image.look_is_due(now_ns + LOOK_NS));
        }
        assert_eq!(image.end_look(None), None);
    }

    #[test]
    fn a_new_record_forgets_the_look_at_the_former_image() {
        let mut image = settling();
        image.begin_look(START + 13 * MS, START + 12 * MS);
        image.begin_record(START + 14 * MS);
        assert_eq!(image.end_look(Some(START + MS)), None);
        assert!(image.is_settling());
    }

    /// A timer that came too early would come again and again.
    #[test]
    fn a_wait_is_long_enough() {
        let mut image = ImageState::default();
        image.begin_write();
        image.note_writes(START);
        assert_eq!(image.wait_ns(), None, "first the write has to end");
        image.end_write();
        let now_ns = START + image.wait_ns().unwrap();
        assert!(image.look_is_due(now_ns));
        image.begin_look(now_ns, now_ns);
        assert!(image.begin_doubt(now_ns + image.wait_ns().unwrap()));
    }

    #[test]
    fn a_clock_that_is_set_back_puts_nothing_off() {
        const PAST: u64 = START - 3_600_000 * MS;
        assert!(settling().look_is_due(PAST));
        let mut image = ImageState::default();
        image.begin_write();
        image.begin_look(START, START);
        assert!(image.begin_doubt(PAST));
        image.end_look(Some(START));
        assert!(image.look_is_due(PAST));
        for (now_ns, is_due) in [(START, true), (START + 1000 * MS, false), (START + 1001 * MS, true), (PAST, true)] {
            assert_eq!(image.begin_drop(now_ns), is_due);
        }
    }

    #[test]
    fn an_image_that_does_not_tell_its_change_time_is_settled_without_one() {
        let mut image = settling();
        image.begin_look(START + 13 * MS, START + 12 * MS);
        assert_eq!(image.end_look(None), Some(Sight::Settled(0)));
        let mut image = settling();
        image.settle_blind();
        assert!(!image.is_settling() && image.wait_ns().is_none());
    }
}
