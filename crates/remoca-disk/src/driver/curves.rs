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
        let Some(path) = &self.path else { return };
        if let Some(copying) = self.copying.take() {
            let _ = copying.recv_timeout(COPY_TIME_MAX);
        }
        if let Err(error) = keep_curves(path, &engine.curves_to_bytes()) {
            tracing::warn!("{}: the miss-ratio curves are not kept: {error}", path.display());
        }
    }

    /// Removes the file: this process has no successor.
    pub(super) fn abandon(&mut self) {
        if let Some(path) = self.path.take() {
            // There may be none.
            let _ = std::fs::remove_file(path);
        }
    }

    fn is_copying(&self) -> bool {
        self.copying.as_ref().is_some_and(|copying| matches!(copying.try_recv(), Err(TryRecvError::Empty)))
    }
}
