//! Deaths by a fault of this program: panics of the I/O thread, such as an assertion that does not hold. The cause may
//! still be there after each restart: a wrong index, or a guest's request. The next process therefore checks how many
//! deaths there were.

use super::{Clock, boot_id};
use remoca_io::{narrow, small_file};
use std::path::{Path, PathBuf};

/// How long a death counts, ...
const WINDOW_NS: u64 = 60_000_000_000;
/// ... and in the program that dies for tests, which may take its time on a busy machine.
const TEST_WINDOW_NS: u64 = 3_600_000_000_000;
/// Number of deaths after which nothing of the previous process is used.
const COLD_AFTER: usize = 3;
/// Number of deaths after which the disk is served without a cache.
const PLAIN_AFTER: usize = 6;
/// Maximum size of the file, in bytes.
const BYTES_MAX: u64 = 1024;

/// How a process starts after those that died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caution {
    /// With what the previous process left.
    None,
    /// With a cold cache. What the previous process left is set aside.
    Cold,
    /// As [`Self::Cold`], and without a cache.
    Plain,
}

impl Caution {
    fn after(deaths: usize) -> Self {
        match deaths {
            PLAIN_AFTER.. => Self::Plain,
            COLD_AFTER.. => Self::Cold,
            _ => Self::None,
        }
    }
}

/// The record of deaths, in a file beside the state file.
#[derive(Clone, Debug)]
pub struct Deaths {
    path: PathBuf,
}

impl Deaths {
    /// Returns the record that goes with the state file at `state`.
    #[must_use]
    pub fn beside(state: &Path) -> Self {
        Self { path: small_file::with_ending(state, ".deaths") }
    }

    /// Returns the path of the record, which is there only after deaths.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Records a death. A failure to write the record is ignored: the process dies in any case.
    pub fn note(&self) {
        self.note_at(Clock::now().boot_ns);
    }

    /// Forgets all deaths: a process has ended as it should.
    pub fn forget(&self) {
        // There may be none.
        let _ = std::fs::remove_file(&self.path);
    }

    /// Returns how the next process is to start.
    #[must_use]
    pub fn caution(&self) -> Caution {
        Caution::after(self.since(Clock::now().boot_ns).len())
    }

    fn note_at(&self, now_ns: u64) {
        let Some(boot) = boot_id() else { return };
        let mut deaths = self.since(now_ns);
        // More deaths would change nothing, and the file stays small.
        let first = deaths.len().saturating_sub(PLAIN_AFTER);
        deaths.drain(..first);
        deaths.push(now_ns);
        let times = deaths.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
        let _ = small_file::write(&self.path, format!("{:032x} {times}", u128::from_be_bytes(boot)));
    }

    /// Returns the times of the deaths that count, in nanoseconds since the host was booted.
    fn since(&self, now_ns: u64) -> Vec<u64> {
        let text = small_file::read(&self.path, BYTES_MAX).unwrap_or_default();
        let mut words = text.split_whitespace();
        let boot = words.next().and_then(|word| u128::from_str_radix(word, 16).ok());
        if boot.is_none() || boot != boot_id().map(u128::from_be_bytes) {
            return Vec::new();
        }
        let times = words.filter_map(|word| word.parse().ok());
        let window_ns = if narrow::is_test_program() { TEST_WINDOW_NS } else { WINDOW_NS };
        times.filter(|&at| at <= now_ns && now_ns - at < window_ns).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deaths_count_for_a_minute_of_this_boot() {
        let folder = tempfile::tempdir().unwrap();
        let deaths = Deaths::beside(&folder.path().join("vm.state"));
        let caution = |now| Caution::after(deaths.since(now).len());
        let (start, step) = (Clock::now().boot_ns, 10_000_000_000);
        let mut seen = Vec::new();
        for number in 0..10 {
            deaths.note_at(start + number * step / 2);
            seen.push(caution(start + number * step / 2));
        }
        use Caution::{Cold, None, Plain};
        assert_eq!(seen, [None, None, Cold, Cold, Cold, Plain, Plain, Plain, Plain, Plain]);
        // The last one was after 45 seconds; seven are kept, five seconds apart.
        let later = [75, 80, 89, 90, 95, 105, 106].map(|seconds| caution(start + seconds * 1_000_000_000));
        assert_eq!(later, [Plain, Cold, Cold, Cold, None, None, None]);
        assert_eq!(caution(start.saturating_sub(1)), None, "a clock that went back");
    }

    #[test]
    fn what_is_no_record_of_this_boot_counts_for_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let deaths = Deaths::beside(&folder.path().join("vm.state"));
        (0..7).for_each(|_| deaths.note());
        assert_eq!(deaths.caution(), Caution::Plain);
        let text = std::fs::read_to_string(&deaths.path).unwrap();
        deaths.forget();
        assert_eq!(deaths.caution(), Caution::None, "it ended as it should");
        let times = text.split_once(' ').unwrap().1.to_owned();
        for other in [format!("{:032x} {times}", 5), times, String::new(), "x ".repeat(4000), "\0".repeat(40)] {
            std::fs::write(&deaths.path, other).unwrap();
            assert_eq!(deaths.caution(), Caution::None);
        }
    }
}
