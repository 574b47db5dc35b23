//! Hits over time, and counters of faults, over all VM processes of a run. A thread reads the status four times a second.

use remoca_io::control;
use remoca_protocol::control::{Command, Reply, Status};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_millis(250);

/// Counters that stay at zero unless something is wrong.
pub const WRONG: [&str; 3] = ["disk_errors", "fetch_wrong", "foreign_writes"];

/// The watching thread. It ends when this value is dropped.
pub struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    seen: Mutex<Seen>,
    stop: AtomicBool,
}

#[derive(Default)]
struct Seen {
    samples: Vec<Sample>,
    last: Option<Status>,
    wrong: BTreeMap<&'static str, u64>,
}

/// Blocks read since the beginning, over all VM processes.
#[derive(Clone, Copy)]
struct Sample {
    at: Instant,
    hits: u64,
    reads: u64,
}

impl Watch {
    pub fn start(control: PathBuf) -> Watch {
        let shared = Arc::<Shared>::default();
        let of_thread = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            while !of_thread.stop.load(Ordering::Relaxed) {
                // At times there is no VM process.
                if let Ok(Reply::Status(status)) = control::call(&control, Command::Status) {
                    of_thread.seen().take(*status);
                }
                thread::sleep(INTERVAL);
            }
        });
        Watch { shared, thread: Some(thread) }
    }

    /// Returns the share of the blocks read between two moments that were answered without the disk, or `None` if none
    /// were read.
    pub fn ratio(&self, from: Instant, to: Instant) -> Option<f64> {
        let seen = self.shared.seen();
        let first = seen.samples.iter().rev().find(|sample| sample.at <= from).or(seen.samples.first())?;
        let last = seen.samples.iter().rev().find(|sample| sample.at <= to)?;
        let reads = last.reads.saturating_sub(first.reads);
        (reads > 0).then(|| crate::file_systems::share(last.hits.saturating_sub(first.hits), reads))
    }

    /// Returns the sums of the counters in [`WRONG`].
    pub fn wrong(&self) -> BTreeMap<&'static str, u64> {
        self.shared.seen().wrong.clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seen {
    fn take(&mut self, status: Status) {
        // A status with another process ID, or a shorter uptime, is of another process, which counts from zero.
        let before = self.last.take().filter(|last| last.pid == status.pid && last.uptime_s <= status.uptime_s);
        let grown = |name: &str| {
            let earlier = before.as_ref().and_then(|before| before.counters.get(name)).copied().unwrap_or_default();
            status.counters.get(name).copied().unwrap_or_default().saturating_sub(earlier)
        };
        let hits = grown("hit_blocks") + grown("zero_blocks");
        let reads = hits + grown("covered_blocks") + grown("missed_blocks");
        let total = self.samples.last().map_or((0, 0), |sample| (sample.hits, sample.reads));
        self.samples.push(Sample { at: Instant::now(), hits: total.0 + hits, reads: total.1 + reads });
        for name in WRONG {
            *self.wrong.entry(name).or_default() += grown(name);
        }
        self.last = Some(status);
    }
}
