//! Whether an image still holds what a previous process knew of it. In any doubt it does not.
//!
//! The kernel sets a file's change time (ctime) at every write, and no program can set it. Our own writes change it
//! too, so there are two cases:
//! - *Settled*: no write of ours was in flight for [`SETTLE_NS`]. Then the change time was read, and the kernel's clock
//!   was past it, so no later write can have the same time. If the time is another one now, another program has written
//!   since.
//! - *Written*: the process died with writes in flight, or just after. The change time must lie between the one that
//!   was last seen, at most [`LOOK_NS`] earlier, and the last moment at which a write of ours can have started. The
//!   page cache must hold nothing of the file: our I/O bypasses it, and a program that does not know of the image's
//!   lock hardly ever does.
//!
//! Decision 0020 lists what could go wrong.

use super::header::{Clock, DiskRecord};
use remoca_store::ImageStamp;

/// How long after the last write the change time is looked at: longer than any kernel's tick (10 ms at most).
pub const SETTLE_NS: u64 = 12_000_000;
/// How long after its submission the kernel may stamp a write: one of the kernel's threads may have to start it.
const LATE_NS: u64 = 3_000_000;
/// Interval at which the change time is looked at while writes are in flight.
pub const LOOK_NS: u64 = 20_000_000;
/// Difference between the two clocks that is tolerated, because they are read one after the other. They are slewed
/// together, so only setting a clock makes the difference larger.
const CLOCK_NOISE_NS: u64 = 1_000_000;

const SECOND_NS: u64 = 1_000_000_000;

/// The kernel's clock has not passed the change time of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("another write could have the same change time")]
pub struct NotYet;

/// Why a disk starts cold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Doubt {
    #[error("the image is another one than before")]
    OtherImage,
    #[error("the image has another size than before")]
    OtherSize,
    #[error(
        "changes by others cannot be seen on a block device, an NBD server, or a file system that is not local (ext4, XFS, Btrfs, F2FS)"
    )]
    CannotTell,
    #[error("the file system keeps times too coarsely")]
    CoarseTimes,
    #[error("the image was changed while no process had it")]
    Changed,
    #[error("a write was under way when the former process died, and others may have written since")]
    Late,
    #[error("the host's clock was set")]
    ClockSet,
    #[error(
        "another program has read or written the image through the page cache, or the kernel does not say (before Linux 6.5, of an image above 256 GiB)"
    )]
    InPageCache,
}

/// Judges the image of a disk by its record (`kept`), and by its stamp (`now`) as it was found under its lock, before
/// anything was written to it.
///
/// # Errors
/// If what was known of the image is void. The error is the reason.
pub fn judge(
    kept: &DiskRecord,
    now: &ImageStamp,
    clock: Clock,
    is_in_page_cache: impl FnOnce() -> bool,
) -> Result<(), Doubt> {
    if kept.identity[..3] != now.identity[..3] {
        return Err(Doubt::OtherImage);
    }
    if kept.identity != now.identity {
        return Err(Doubt::OtherSize);
    }
    let changed_ns = now.changed_ns.filter(|_| kept.seen_ns != 0).ok_or(Doubt::CannotTell)?;
    if changed_ns.is_multiple_of(SECOND_NS) {
        return Err(Doubt::CoarseTimes);
    }
    if kept.written_ns == 0 {
        return if changed_ns == kept.seen_ns { Ok(()) } else { Err(Doubt::Changed) };
    }
    if changed_ns < kept.seen_ns {
        return Err(Doubt::Changed);
    }
    if changed_ns > kept.written_ns.saturating_add(LATE_NS) {
        return Err(Doubt::Late);
    }
    if clock.offset().abs_diff(kept.clock_offset) > CLOCK_NOISE_NS {
        return Err(Doubt::ClockSet);
    }
    if is_in_page_cache() { Err(Doubt::InPageCache) } else { Ok(()) }
}

/// Returns the change time of an image to which no write is in flight, if every later write will have a later one.
/// Returns `Ok(None)` if that will never be known. `coarse_ns` is the kernel's clock, read before the change time.
///
/// # Errors
/// If the kernel's clock has not passed the change time, but will soon.
pub fn settled_ns(changed_ns: Option<u64>, coarse_ns: u64) -> Result<Option<u64>, NotYet> {
    match changed_ns {
        Some(changed_ns) if changed_ns >= coarse_ns.saturating_add(SECOND_NS) => Ok(None),
        Some(changed_ns) if changed_ns >= coarse_ns => Err(NotYet),
        changed_ns => Ok(changed_ns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const HOUR: u64 = 3_600_000 * MS;
    const SEEN: u64 = 1_700_000_000_123_456_789;
    const IDENTITY: [u64; 4] = [1, 2050, 77, 1 << 30];

    fn settled() -> DiskRecord {
        DiskRecord { identity: IDENTITY, seen_ns: SEEN, written_ns: 0, clock_offset: CLOCK.offset() }
    }

    fn written() -> DiskRecord {
        DiskRecord { written_ns: SEEN + 50 * MS, ..settled() }
    }

    fn stamp(changed_ns: u64) -> ImageStamp {
        ImageStamp { identity: IDENTITY, changed_ns: Some(changed_ns) }
    }

    const CLOCK: Clock = Clock { real_ns: SEEN + 250 * MS, boot_ns: 5_000 * MS };

    fn verdict(kept: DiskRecord, now: ImageStamp) -> Result<(), Doubt> {
        judge(&kept, &now, CLOCK, || false)
    }

    #[test]
    fn a_settled_image_is_the_same_only_with_the_same_change_time() {
        assert_eq!(verdict(settled(), stamp(SEEN)), Ok(()));
        // Later: somebody wrote, or set the modification time back, which changes this one. Earlier: an old snapshot.
        for other in [SEEN + 1, SEEN + 1000 * MS, SEEN - 1, SEEN - 1000 * MS] {
            assert_eq!(verdict(settled(), stamp(other)), Err(Doubt::Changed));
        }
    }

    #[test]
    fn with_writes_under_way_the_change_is_ours_only_in_our_time() {
        for ours in [SEEN, SEEN + 1, SEEN + 50 * MS, SEEN + 53 * MS] {
            assert_eq!(verdict(written(), stamp(ours)), Ok(()));
        }
        assert_eq!(verdict(written(), stamp(SEEN - 1)), Err(Doubt::Changed), "rolled back");
        for late in [SEEN + 53 * MS + 1, SEEN + 10_000 * MS] {
            assert_eq!(verdict(written(), stamp(late)), Err(Doubt::Late));
        }
        let cached = judge(&written(), &stamp(SEEN + MS), CLOCK, || true);
        assert_eq!(cached, Err(Doubt::InPageCache));
    }

    #[test]
    fn a_clock_that_was_set_back_makes_later_writes_look_like_ours() {
        let with_offset = |ns: i64| DiskRecord { clock_offset: CLOCK.offset() + ns, ..written() };
        // However long ago: an hour later it is not the more tolerable.
        for clock in [CLOCK, Clock { real_ns: CLOCK.real_ns + HOUR, boot_ns: CLOCK.boot_ns + HOUR }] {
            for step in [-100, -2, 2, 3_000, 3_600_000] {
                let verdict = judge(&with_offset(step * 1_000_000), &stamp(SEEN + MS), clock, || false);
                assert_eq!(verdict, Err(Doubt::ClockSet), "{step} ms");
            }
            assert_eq!(judge(&with_offset(900_000), &stamp(SEEN + MS), clock, || false), Ok(()), "noise");
        }
    }

    #[test]
    fn an_image_is_settled_when_no_later_write_can_have_its_time() {
        assert_eq!(settled_ns(Some(SEEN), SEEN + 1), Ok(Some(SEEN)));
        assert_eq!(settled_ns(Some(SEEN), SEEN), Err(NotYet));
        assert_eq!(settled_ns(Some(SEEN + MS), SEEN), Err(NotYet));
        assert_eq!(settled_ns(Some(SEEN + HOUR), SEEN), Ok(None), "the clock was set back");
        assert_eq!(settled_ns(None, SEEN), Ok(None));
    }

    #[test]
    fn another_image_is_another_image() {
        for (at, doubt) in
            [(0, Doubt::OtherImage), (1, Doubt::OtherImage), (2, Doubt::OtherImage), (3, Doubt::OtherSize)]
        {
            let mut other = stamp(SEEN);
            other.identity[at] += 1;
            assert_eq!(verdict(settled(), other), Err(doubt));
            assert_eq!(verdict(written(), other), Err(doubt));
        }
        assert_eq!(verdict(DiskRecord::default(), stamp(SEEN)), Err(Doubt::OtherImage), "nothing is kept");
    }

    #[test]
    fn what_cannot_be_seen_is_doubted() {
        let device = ImageStamp { changed_ns: None, ..stamp(SEEN) };
        assert_eq!(verdict(settled(), device), Err(Doubt::CannotTell));
        assert_eq!(verdict(DiskRecord { seen_ns: 0, ..settled() }, stamp(SEEN)), Err(Doubt::CannotTell));
        let coarse = 1_700_000_000_000_000_000;
        let kept = DiskRecord { seen_ns: coarse, ..settled() };
        assert_eq!(verdict(kept, stamp(coarse)), Err(Doubt::CoarseTimes));
    }
}
