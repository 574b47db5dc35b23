//! What the log says of operations that a disk failed: the first of them, and then one in a minute.

use super::StoreOp;
use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

/// Interval at which a disk that goes on failing is reported again.
const EVERY: Duration = Duration::from_secs(60);

/// The disks that have failed operations, by their numbers.
#[derive(Debug, Default)]
pub struct Complaints(BTreeMap<usize, Failing>);

#[derive(Debug)]
struct Failing {
    reported: Instant,
    /// Number of failures since then.
    silent: u64,
}

impl Complaints {
    /// Records that the operation `op` of a disk failed with the error number `errno`. Returns what to log about it, or
    /// `None` if the disk was reported less than a minute ago.
    pub fn note(&mut self, disk: usize, image: &str, op: &StoreOp, errno: i32, now: Instant) -> Option<String> {
        let before = self.0.get_mut(&disk);
        if let Some(failing) = before
            && now.saturating_duration_since(failing.reported) < EVERY
        {
            failing.silent += 1;
            return None;
        }
        let former = self.0.insert(disk, Failing { reported: now, silent: 0 });
        let more = match former.map_or(0, |failing| failing.silent) {
            0 => String::new(),
            silent => format!(" ({silent} more failed since the last message)"),
        };
        let error = io::Error::from_raw_os_error(errno);
        Some(format!("{image}: {} failed: {error}{more}. {}", described(op), advice(errno)))
    }
}

fn described(op: &StoreOp) -> String {
    let what = match op {
        StoreOp::Read { .. } => "reading",
        StoreOp::Write { .. } => "writing",
        StoreOp::Discard { .. } => "discarding",
        StoreOp::WriteZeroes { .. } => "zeroing",
        StoreOp::Flush => "a flush",
    };
    op.range().map_or_else(|| what.into(), |(offset, length)| format!("{what} {length} bytes at offset {offset}"))
}

fn advice(errno: i32) -> &'static str {
    match errno {
        libc::ENOSPC | libc::EDQUOT => {
            "The guest gets an error. Make room where the image is (its file system, quota or thin pool): the guest's next \
             write works then; its file system may need a check"
        }
        _ => "The guest gets the error. Look at the kernel's log, or at that of the NBD server, and at the disk",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_goes_on_failing_is_reported_once_a_minute() {
        let (mut complaints, start) = (Complaints::default(), Instant::now());
        let op = StoreOp::Write { offset: 8192, len: 512, durable: false };
        let mut note = |disk, seconds, errno| {
            let now = start + Duration::from_secs(seconds);
            complaints.note(disk, "/a", &op, errno, now)
        };
        let first = note(0, 0, libc::ENOSPC).unwrap();
        assert!(first.starts_with("/a: writing 512 bytes at offset 8192 failed: No space left on device"), "{first}");
        assert!(first.contains("Make room") && !first.contains("more failed"), "{first}");
        assert!(note(0, 1, libc::ENOSPC).is_none() && note(0, 59, libc::ENOSPC).is_none());
        assert!(note(1, 59, libc::EIO).unwrap().contains("kernel's log"), "another disk");
        assert!(note(0, 60, libc::ENOSPC).unwrap().contains("(2 more failed since the last message)"));
        assert!(note(0, 61, libc::ENOSPC).is_none());
    }
}
