//! How long a thread has had a processor, and how long it has waited for one, as the kernel's scheduler counts it.

use rustix::fs::{Mode, OFlags, open};
use rustix::io::pread;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Source of the times of one thread.
#[derive(Debug)]
pub struct ThreadTimes(OwnedFd);

/// Times of a thread since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Time for which it had a processor.
    pub ran: Duration,
    /// Time for which it was ready to run and had none.
    pub waited: Duration,
}

impl ThreadTimes {
    /// Returns the source for the calling thread, or `None` if the kernel does not count (`CONFIG_SCHED_INFO`) or `/proc` is not there.
    #[must_use]
    pub fn of_this_thread() -> Option<Self> {
        open("/proc/thread-self/schedstat", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok().map(Self)
    }

    /// Returns the times now, or `None` if the kernel does not tell them.
    #[must_use]
    pub fn read(&self) -> Option<Times> {
        let mut text = [0; 96];
        let length = pread(&self.0, &mut text, 0).ok()?;
        parse(std::str::from_utf8(&text[..length]).ok()?)
    }
}

/// Returns the times in a line of `schedstat`: both in nanoseconds, and the number of times that the thread got a processor.
fn parse(line: &str) -> Option<Times> {
    let mut words = line.split_ascii_whitespace();
    let mut time = || words.next()?.parse().ok().map(Duration::from_nanos);
    Some(Times { ran: time()?, waited: time()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernel_is_understood() {
        let times = |ran, waited| Some(Times { ran: Duration::from_nanos(ran), waited: Duration::from_nanos(waited) });
        assert_eq!(parse("137000123 6000001 7630\n"), times(137_000_123, 6_000_001));
        assert_eq!([parse(""), parse("7"), parse("7 x 1"), parse("-1 2 3")], [None; 4]);
    }

    /// Where the kernel counts at all. One that is not told to says that this thread has never had a processor.
    #[test]
    fn a_thread_that_works_runs() {
        let Some(source) = ThreadTimes::of_this_thread() else { return };
        if std::fs::read_to_string("/proc/thread-self/schedstat").unwrap() == "0 0 0\n" {
            return;
        }
        let before = source.read().unwrap();
        let mut sum = 0_u64;
        while source.read().unwrap().ran == before.ran {
            sum = sum.wrapping_add(std::hint::black_box(1));
        }
        assert!(sum > 0 || source.read().unwrap().ran > before.ran);
    }
}
