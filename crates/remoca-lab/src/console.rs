//! The guest's serial console: every line with its time, in a file and for callers that wait for one.

use std::{
    collections::VecDeque,
    fs::File,
    io::{BufRead, BufReader, Read, Write},
    path::Path,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use crate::error::{Context, Result};

/// Number of lines kept. A guest may print for ever and without line ends.
const LINE_COUNT_MAX: usize = 4096;
const LINE_SIZE_MAX: u64 = 4096;
const FILE_SIZE_MAX: usize = 64 << 20;

#[derive(Clone, Debug)]
pub struct ConsoleLine {
    /// Time since the guest's start.
    pub at: Duration,
    pub text: String,
}

/// Console output of a guest. Clones show the same console.
#[derive(Clone, Debug)]
pub struct Console {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lines: VecDeque<ConsoleLine>,
    /// Number of lines dropped from the front of `lines`.
    dropped_count: usize,
    closed: bool,
    subscribers: Vec<mpsc::SyncSender<ConsoleLine>>,
}

/// Reason why a wait for a line ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    Found(String),
    Closed,
    TimedOut,
}

impl Console {
    /// Reads the source to its end on a thread of its own.
    pub(crate) fn capture(source: impl Read + Send + 'static, log_path: &Path) -> Result<Console> {
        let log = File::create(log_path).context_path("creating", log_path)?;
        let console = Console { shared: Arc::default() };
        let shared = Arc::clone(&console.shared);
        thread::spawn(move || shared.read_all(source, log));
        Ok(console)
    }

    /// Returns the last lines, for error messages.
    pub fn tail(&self, line_count: usize) -> String {
        let state = self.shared.lock();
        let skipped = state.lines.len().saturating_sub(line_count);
        let lines: Vec<String> = state.lines.iter().skip(skipped).map(ConsoleLine::to_string).collect();
        lines.join("\n")
    }

    /// Waits for the end of the guest's output.
    pub(crate) fn wait_for_end(&self, limit: Duration) {
        let state = self.shared.lock();
        let wait = self.shared.changed.wait_timeout_while(state, limit, |state| !state.closed);
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }

    /// Returns a receiver of every line from now on. A receiver that falls 1024 lines behind misses some.
    pub fn subscribe(&self) -> mpsc::Receiver<ConsoleLine> {
        let (sender, receiver) = mpsc::sync_channel(1024);
        self.shared.lock().subscribers.push(sender);
        receiver
    }

    /// Waits for a line, old or new, that contains the text.
    pub(crate) fn wait_for(&self, text: &str, limit: Duration) -> Waited {
        let deadline = Instant::now() + limit;
        let mut next = 0;
        let mut state = self.shared.lock();
        loop {
            let seen = next.max(state.dropped_count) - state.dropped_count;
            if let Some(line) = state.lines.iter().skip(seen).find(|line| line.text.contains(text)) {
                return Waited::Found(line.text.clone());
            }
            next = state.dropped_count + state.lines.len();
            let left = deadline.saturating_duration_since(Instant::now());
            if state.closed || left.is_zero() {
                return if state.closed { Waited::Closed } else { Waited::TimedOut };
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl std::fmt::Display for ConsoleLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{:8.3}] {}", self.at.as_secs_f64(), self.text)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_all(&self, source: impl Read, mut log: File) {
        let started = Instant::now();
        let mut reader = BufReader::new(source);
        let mut log_size = 0;
        loop {
            let mut bytes = Vec::new();
            match reader.by_ref().take(LINE_SIZE_MAX).read_until(b'\n', &mut bytes) {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
            let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            let line = ConsoleLine { at: started.elapsed(), text };
            let text = format!("{line}\n");
            log_size += text.len();
            if log_size < FILE_SIZE_MAX {
                // A full disk must not end the guest. The line is still in memory.
                let _ = log.write_all(text.as_bytes());
            }
            self.lock().push(line);
            self.changed.notify_all();
        }
        let mut state = self.lock();
        state.closed = true;
        state.subscribers.clear();
        self.changed.notify_all();
    }
}

impl State {
    fn push(&mut self, line: ConsoleLine) {
        self.subscribers.retain(|subscriber| {
            !matches!(subscriber.try_send(line.clone()), Err(mpsc::TrySendError::Disconnected(_)))
        });
        self.lines.push_back(line);
        if self.lines.len() > LINE_COUNT_MAX {
            self.lines.pop_front();
            self.dropped_count += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::unix::net::UnixStream};

    use super::*;

    #[test]
    fn a_line_is_found_whether_it_came_before_or_after() {
        let folder = tempfile::tempdir().unwrap();
        let (source, mut guest) = UnixStream::pair().unwrap();
        let console = Console::capture(source, &folder.path().join("log")).unwrap();
        let lines = console.subscribe();
        guest.write_all(b"first\r\nsecond\xff\n").unwrap();
        assert_eq!(console.wait_for("sec", Duration::from_secs(60)), Waited::Found("second\u{fffd}".into()));
        assert_eq!(console.wait_for("first", Duration::from_secs(60)), Waited::Found("first".into()));
        assert_eq!(console.wait_for("third", Duration::from_millis(1)), Waited::TimedOut);
        drop(guest);
        assert_eq!(console.wait_for("third", Duration::from_secs(60)), Waited::Closed);
        assert_eq!(lines.iter().map(|line| line.text).collect::<Vec<_>>(), ["first", "second\u{fffd}"]);
        assert!(std::fs::read_to_string(folder.path().join("log")).unwrap().contains("] first\n"));
    }

    #[test]
    fn memory_is_bounded_without_line_ends() {
        let folder = tempfile::tempdir().unwrap();
        let endless = std::io::repeat(b'x').take(LINE_SIZE_MAX * (LINE_COUNT_MAX as u64 + 100));
        let console = Console::capture(endless, &folder.path().join("log")).unwrap();
        assert_eq!(console.wait_for("y", Duration::from_secs(60)), Waited::Closed);
        assert_eq!(console.shared.lock().lines.len(), LINE_COUNT_MAX);
    }
}
