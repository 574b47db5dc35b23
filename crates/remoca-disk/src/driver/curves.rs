//! The file of the miss-ratio curves, which outlives this process. It is written when the process ends or gives way, and about once a minute while reads come, by another thread.

use super::index_size::Aside;
use crate::state::{curves_beside, keep_curves, resume_curves};
use remoca_core::engine::DiskEngine;
use remoca_io::words::IndexMemory;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

/// Time between two copies: what a killed process loses of its curves.
const KEEP_EVERY: Duration = Duration::from_secs(60);
/// How long a process that ends waits for a copy that another thread is writing.
const COPY_TIME_MAX: Duration = Duration::from_secs(1);

type Engine = DiskEngine<IndexMemory>;

/// The file of the curves.
pub(super) struct KeptCurves {
    /// `None`: nothing outlives this process.
    path: Option<PathBuf>,
    kept_at: Instant,
    /// Number of blocks read when the last copy was made.
    read_blocks: u64,
    copying: Option<Receiver<()>>,
}

impl KeptCurves {
    /// Returns a value without a file.
    pub(super) fn none(now: Instant) -> Self {
        Self { path: None, kept_at: now, read_blocks: 0, copying: None }
    }

    /// Continues the curves of the previous process, if `state` is the path of a state file.
    pub(super) fn resume(state: Option<&Path>, engine: &mut Engine, now: Instant) -> Self {
        let path = state.map(curves_beside);
        if let Some(path) = &path
            && let Err(error) = resume_curves(path, engine)
        {
            tracing::warn!("{}: the miss-ratio curves of the former process are not used: {error}", path.display());
        }
        Self { path, kept_at: now, read_blocks: engine.stats().read_blocks, copying: None }
    }

    /// Has the curves outlive this process from now on, beside the state file `state` if there is one.
    pub(super) fn keep_beside(&mut self, state: Option<&Path>) {
        self.path = state.map(curves_beside);
        if let Some(path) = &self.path {
            // What is there, if anything, is of another key.
            let _ = std::fs::remove_file(path);
        }
    }

    /// Has another thread write the curves, if that is due.
    pub(super) fn run_timer(&mut self, engine: &mut Engine, now: Instant, aside: &Aside) {
        let Some(path) = &self.path else { return };
        let read_blocks = engine.stats().read_blocks;
        if now.saturating_duration_since(self.kept_at) < KEEP_EVERY
            || read_blocks == self.read_blocks
            || self.is_copying()
        {
            return;
        }
        (self.kept_at, self.read_blocks) = (now, read_blocks);
        let (path, curves) = (path.clone(), engine.curves_to_bytes());
        let (done, copying) = sync_channel(1);
        let work = move || {
            // The next copy may succeed.
            let _ = keep_curves(&path, &curves);
            let _ = done.send(());
        };
        // A copy that cannot be made now is made later.
        self.copying = aside("curves", Box::new(work)).ok().map(|()| copying);
    }

    /// Writes the curves for a successor.
    pub(super) fn keep(&mut self, engine: &mut Engine) {
        self.end_copy();
        let Some(path) = &self.path else { return };
        if let Err(error) = keep_curves(path, &engine.curves_to_bytes()) {
            tracing::warn!("{}: the miss-ratio curves are not kept: {error}", path.display());
        }
    }

    /// Removes the file: this process has no successor.
    pub(super) fn abandon(&mut self) {
        self.end_copy();
        if let Some(path) = self.path.take() {
            // There may be none.
            let _ = std::fs::remove_file(path);
        }
    }

    /// Waits a limited time for a copy that another thread is writing.
    fn end_copy(&mut self) {
        if let Some(copying) = self.copying.take() {
            let _ = copying.recv_timeout(COPY_TIME_MAX);
        }
    }

    fn is_copying(&self) -> bool {
        self.copying.as_ref().is_some_and(|copying| matches!(copying.try_recv(), Err(TryRecvError::Empty)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Clock, SystemClock};
    use crate::driver::tests::config;
    use remoca_core::engine::{EngineStats, layout};
    use std::sync::{Arc, Mutex};

    type Work = Box<dyn FnOnce() + Send>;

    #[test]
    fn a_copy_is_made_once_a_minute_while_reads_come_and_one_at_a_time() {
        let (folder, config, now) = (tempfile::tempdir().unwrap(), config(1), SystemClock.now());
        let mut engine = DiskEngine::new(&config, IndexMemory::new(layout(&config).words()).unwrap());
        let mut curves = KeptCurves::resume(Some(&folder.path().join("state")), &mut engine, now);
        let works = Arc::new(Mutex::new(Vec::<Work>::new()));
        let queue = Arc::clone(&works);
        let aside: Aside = Box::new(move |_: &str, work: Work| {
            queue.lock().unwrap().push(work);
            Ok(())
        });
        let mut queued = |seconds: u64, read_blocks: u64| {
            engine.count_on(EngineStats { read_blocks, ..EngineStats::default() });
            curves.run_timer(&mut engine, now + Duration::from_secs(seconds), &aside);
            works.lock().unwrap().len()
        };
        assert_eq!(queued(59, 1), 0);
        assert_eq!(queued(60, 0), 0, "nothing was read");
        assert_eq!(queued(60, 1), 1);
        assert_eq!(queued(119, 2), 1);
        assert_eq!(queued(120, 2), 1, "the first one is not written");
        let work = works.lock().unwrap().pop().unwrap();
        work();
        assert!(curves_beside(&folder.path().join("state")).exists());
        assert_eq!(queued(121, 2), 1);
        works.lock().unwrap().clear();
        assert_eq!(queued(181, 3), 1, "a thread that has died writes nothing");
    }

    /// It would be there for the next process of this name.
    #[test]
    fn a_copy_that_is_being_written_at_the_end_is_removed_too() {
        // The thread that writes it is waited for a second only, and may get no processor for as long.
        assert!((0..5).any(|_| is_removed()));
    }

    fn is_removed() -> bool {
        let folder = tempfile::tempdir().unwrap();
        let (done, copying) = sync_channel(1);
        let path = folder.path().join("curves");
        let (kept_at, copying) = (SystemClock.now(), Some(copying));
        let mut curves = KeptCurves { path: Some(path.clone()), kept_at, read_blocks: 0, copying };
        let there = path.clone();
        let copy = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            std::fs::write(&there, b"curves").unwrap();
            let _ = done.send(());
        });
        curves.abandon();
        copy.join().unwrap();
        !path.exists()
    }
}
