//! A raw image file or a block device as a backing store.
//!
//! Owned by the I/O thread. Operations become system calls (`file_task`) that are made by io_uring and threads
//! (`file_uring`), or only by a few threads (`file_threads`) if io_uring is refused. Both give the same results.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::file_image::{FileOptions, Image, UringUse};
use super::file_stamp;
use super::file_task::{FileTask, Purpose};
use super::file_threads::{Finished, WorkerPool};
use super::file_uring::{Ring, Submission};
use remoca_protocol::handover::StoreKind;

use super::flush_latch::{FailedAt, FlushLatch};
use super::overlaps::Overlaps;
use super::{
    DataPath, Geometry, HandOver, Identity, ImageStamp, OpenError, OpenErrorKind, StoreCompletion, StoreError,
    StoreEvent, StoreHealth, StoreOp,
};
use remoca_io::buffer::IoBuffer;

/// The most threads in place of io_uring: enough that flushes do not delay reads.
const WORKERS_MAX: usize = 8;
/// Delay before the next attempt when the kernel had no memory for a submission.
const SUBMIT_AGAIN_AFTER: Duration = Duration::from_millis(1);

/// An open image. It may be dropped with operations in flight, but the image stays locked until they have ended.
pub struct FileStore {
    image: Arc<Image>,
    calls: Calls,
    geometry: Geometry,
    stamp_at_opening: Option<ImageStamp>,
    events: VecDeque<StoreEvent>,
    finished: Vec<Finished>,
    latch: FlushLatch,
    durables: Overlaps<StoreCompletion>,
    in_flight: usize,
    submit_again_at: Option<Instant>,
    /// A query of the change time is in flight.
    looks: bool,
    /// The image is being dropped from the page cache.
    empties_page_cache: bool,
    /// A query of the size is in flight.
    measures: bool,
}

/// The mechanism that makes the system calls.
enum Calls {
    Ring(Box<Ring>),
    Workers(WorkerPool),
}

impl FileStore {
    /// Opens and locks the image. Blocks.
    ///
    /// # Errors
    /// If the path, the file or its size is not valid, another process uses the file, or the system refuses the I/O.
    /// The text says which, and what to do.
    pub fn open(path: &Path, options: FileOptions) -> Result<Self, OpenError> {
        Self::start(Image::open(path, options)?, path, options, None)
    }

    /// Takes over an image that a previous program of this process opened and locked; no other process had it in
    /// between. `flush_failed` is the error number of the first failed flush, or `None` if none has failed.
    ///
    /// # Errors
    /// If the descriptor is not that of an image, was opened for another use than `options` say, or cannot be locked
    /// again. If the system has no descriptors or threads left.
    pub fn adopt(
        file: OwnedFd,
        path: &Path,
        options: FileOptions,
        flush_failed: Option<i32>,
    ) -> Result<Self, OpenError> {
        Self::start(Image::adopt(file.into(), path, options.read_only, options.lock)?, path, options, flush_failed)
    }

    fn start(image: Image, path: &Path, options: FileOptions, flush_failed: Option<i32>) -> Result<Self, OpenError> {
        let image = Arc::new(image);
        let calls = Calls::start(&image, options.uring).map_err(|error| {
            let message = format!("cannot start the I/O on {}: {error}", path.display());
            OpenError::new(OpenErrorKind::System, message)
        })?;
        Ok(Self {
            geometry: image.geometry,
            stamp_at_opening: image.stamp_at_opening,
            image,
            calls,
            events: VecDeque::new(),
            finished: Vec::new(),
            latch: FlushLatch::with(flush_failed),
            durables: Overlaps::new(),
            in_flight: 0,
            submit_again_at: None,
            looks: false,
            empties_page_cache: false,
            measures: false,
        })
    }

    /// Returns whether the page cache of the host is bypassed.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.image.is_direct
    }

    /// Returns whether io_uring is used for system calls.
    #[must_use]
    pub fn uses_uring(&self) -> bool {
        match self.calls {
            Calls::Ring(_) => true,
            Calls::Workers(_) => false,
        }
    }

    fn complete(&mut self, task: FileTask, result: Result<(), StoreError>) {
        let failed_at = task.failed_at();
        match task.purpose {
            Purpose::Operation { token, operation } => {
                let result = self.latch.filter(operation.is_durable(), failed_at, result);
                let completion = StoreCompletion { token, result, buffer: task.buffer };
                match task.number {
                    Some(number) => self.end_durable(number, completion),
                    None => self.events.push_back(StoreEvent::Completed(completion)),
                }
            }
            Purpose::Look(changed) => {
                self.looks = false;
                let changed_ns = result.ok().and_then(|()| changed.nanoseconds());
                self.events.push_back(StoreEvent::Looked { changed_ns });
            }
            // The result does not matter: pages that stay in the page cache make the image cold.
            Purpose::EmptyPageCache => self.empties_page_cache = false,
            Purpose::Measure(bytes) => {
                self.measures = false;
                if result.is_ok() {
                    self.set_size(bytes);
                }
                self.events.push_back(StoreEvent::Measured(result));
            }
        }
    }

    /// Ends a durable operation, and completes those that nothing holds back any longer. Successes that were held back
    /// beside one that failed become failures.
    fn end_durable(&mut self, number: u64, completion: StoreCompletion) {
        let (success, failure) = match completion.result {
            Ok(()) => (Some(completion), None),
            Err(_) => (None, Some(completion)),
        };
        self.events.extend(failure.map(StoreEvent::Completed));
        self.durables.end(number, success);
        while let Some(mut completion) = self.durables.pop() {
            completion.result = self.latch.filter(true, FailedAt::Sync, completion.result);
            self.events.push_back(StoreEvent::Completed(completion));
        }
    }

    /// Sets the size of the image. The part of a sector at its end is not used.
    fn set_size(&mut self, bytes: u64) {
        self.geometry.size = bytes - bytes % u64::from(self.geometry.logical_sector);
        if let Some(stamp) = self.stamp_at_opening.as_mut().filter(|_| !self.image.facts.is_block_device) {
            stamp.identity[3] = bytes;
        }
    }
}

impl DataPath for FileStore {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        match &self.calls {
            Calls::Ring(ring) => ring.event_fd(),
            Calls::Workers(workers) => workers.event_fd(),
        }
    }

    fn submit(&mut self, token: u64, operation: StoreOp, buffer: Option<IoBuffer>) {
        self.in_flight += 1;
        let geometry = &self.geometry;
        let checked = operation.validate(geometry, buffer.as_ref());
        let is_idle_discard = matches!(operation, StoreOp::Discard { .. }) && !geometry.can_discard;
        if checked.is_err() || is_idle_discard {
            self.events.push_back(StoreEvent::Completed(StoreCompletion { token, result: checked, buffer }));
            return;
        }
        let mut task = FileTask::new(token, operation, buffer, self.image.facts);
        task.number = operation.is_durable().then(|| self.durables.begin());
        self.calls.submit(task);
    }

    fn kick(&mut self, now: Instant) {
        let outcome = match &mut self.calls {
            Calls::Ring(ring) => ring.kick(now),
            Calls::Workers(workers) => {
                workers.kick();
                return;
            }
        };
        self.submit_again_at = match outcome {
            Ok(Submission::Done) => None,
            Ok(Submission::Again) => Some(now + SUBMIT_AGAIN_AFTER),
            Err(error) => {
                if self.submit_again_at.is_none() {
                    tracing::error!(%error, "io_uring refuses submissions");
                }
                Some(now + SUBMIT_AGAIN_AFTER)
            }
        };
    }

    fn handle_ready(&mut self, now: Instant) {
        let mut finished = std::mem::take(&mut self.finished);
        match &mut self.calls {
            Calls::Ring(ring) => ring.collect(now, &mut finished),
            Calls::Workers(workers) => finished.append(&mut workers.take_finished()),
        }
        for (task, result) in finished.drain(..) {
            self.complete(task, result);
        }
        self.finished = finished;
        self.kick(now);
    }

    fn next_event(&mut self) -> Option<StoreEvent> {
        let event = self.events.pop_front()?;
        if matches!(event, StoreEvent::Completed(_)) {
            self.in_flight -= 1;
        }
        Some(event)
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.submit_again_at
    }

    fn handle_timer(&mut self, now: Instant) {
        if self.submit_again_at.is_some_and(|due| due <= now) {
            self.kick(now);
        }
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Returns that the store is up. An image that hangs shows in slow requests, not here.
    fn health(&self) -> StoreHealth {
        StoreHealth::Up
    }
}

impl Identity for FileStore {
    fn look(&mut self) -> bool {
        let can_look = self.image.tells_changes;
        if can_look && !self.looks {
            self.looks = true;
            self.calls.submit(FileTask::look(self.image.facts));
        }
        can_look
    }

    fn measure(&mut self) -> bool {
        if !self.measures {
            self.measures = true;
            self.calls.submit(FileTask::measure(self.image.facts));
        }
        true
    }

    fn stamp_at_opening(&self) -> Option<ImageStamp> {
        self.stamp_at_opening
    }

    fn shared_stamp(&self, at_opening: bool) -> Option<String> {
        if at_opening { self.image.shared_stamp_at_opening.clone() } else { file_stamp::shared(&self.image.file) }
    }

    fn empty_page_cache(&mut self) {
        if self.image.is_direct && self.image.tells_changes && !self.empties_page_cache {
            self.empties_page_cache = true;
            self.calls.submit(FileTask::empty_page_cache(self.image.facts));
        }
    }

    fn may_be_in_page_cache(&self) -> bool {
        !self.image.is_direct || file_stamp::may_be_in_page_cache(&self.image.file)
    }
}

impl HandOver for FileStore {
    fn failed_flush(&self) -> Option<i32> {
        self.latch.errno()
    }

    fn set_failed_flush(&mut self, errno: Option<i32>) {
        self.latch = FlushLatch::with(errno);
    }

    fn is_still(&self) -> bool {
        self.in_flight == 0 && !self.looks && !self.empties_page_cache && !self.measures
    }

    /// Does nothing: no flush is due at the end.
    fn begin_drain(&mut self) {}

    /// Returns true: the image stays locked until the kernel has finished all calls.
    fn drain(&mut self, _flush_by: Instant) -> bool {
        true
    }

    fn hand_over(&self) -> Result<(BorrowedFd<'_>, StoreKind), String> {
        Ok((self.image.file.as_fd(), StoreKind::File { flush_failed: self.latch.errno() }))
    }
}

impl Calls {
    fn start(image: &Arc<Image>, uring: UringUse) -> io::Result<Self> {
        let ring = match uring {
            UringUse::Off => None,
            UringUse::Auto => match Ring::new(image) {
                Ok(ring) => Some(ring),
                Err(error) => {
                    tracing::warn!(%error, "io_uring is not available: {WORKERS_MAX} threads do the disk I/O");
                    None
                }
            },
        };
        Ok(match ring {
            Some(ring) => Calls::Ring(Box::new(ring)),
            None => Calls::Workers(WorkerPool::start(image, WORKERS_MAX)?),
        })
    }

    fn submit(&mut self, task: FileTask) {
        match self {
            Calls::Ring(ring) => ring.submit(task),
            Calls::Workers(workers) => workers.submit(task),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLUSH: StoreOp = StoreOp::Flush;
    const DURABLE: StoreOp = StoreOp::WriteZeroes { offset: 0, len: 4096, may_unmap: false, durable: true };
    const PLAIN: StoreOp = StoreOp::WriteZeroes { offset: 4096, len: 4096, may_unmap: false, durable: false };

    /// Returns a store with these operations in flight, and their tasks. The token of each is its position. No thread
    /// makes their calls: the test decides in which order they end, and how.
    fn in_flight<const N: usize>(operations: [StoreOp; N]) -> (FileStore, [FileTask; N]) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let mut store = FileStore::open(&path, FileOptions { uring: UringUse::Off, ..FileOptions::default() }).unwrap();
        for (operation, token) in operations.into_iter().zip(0..) {
            store.submit(token, operation, None);
        }
        let Calls::Workers(workers) = &mut store.calls else { unreachable!("it was opened without io_uring") };
        let tasks = workers.take_queued();
        (store, tasks.try_into().unwrap())
    }

    fn completed(store: &mut FileStore) -> Vec<(u64, Result<(), StoreError>)> {
        let of = |event| match event {
            StoreEvent::Completed(StoreCompletion { token, result, .. }) => (token, result),
            event => panic!("{event:?}"),
        };
        std::iter::from_fn(|| store.next_event()).map(of).collect()
    }

    /// The kernel reports lost pages to one sync, and the success of another may be seen first.
    #[test]
    fn no_durable_operation_succeeds_beside_one_that_fails() {
        const LOST: Result<(), StoreError> = Err(StoreError::IO);
        for operations in [[FLUSH, FLUSH], [FLUSH, DURABLE], [DURABLE, FLUSH], [DURABLE, DURABLE]] {
            for fails_later in [0, 1] {
                let (mut store, mut tasks) = in_flight(operations);
                if fails_later == 0 {
                    tasks.reverse();
                }
                let [succeeds, fails] = tasks;
                store.complete(succeeds, Ok(()));
                assert_eq!(completed(&mut store), [], "the other one may have the error");
                store.complete(fails, LOST);
                assert_eq!(completed(&mut store), [(fails_later, LOST), (1 - fails_later, LOST)]);
                assert!(store.is_still());
            }
        }
    }

    #[test]
    fn operations_that_promise_nothing_hold_nothing_back_and_are_not_held_back() {
        let (mut store, [flush, durable, first, second]) = in_flight([FLUSH, DURABLE, PLAIN, PLAIN]);
        store.complete(first, Ok(()));
        assert_eq!(completed(&mut store), [(2, Ok(()))]);
        store.complete(durable, Ok(()));
        assert_eq!(completed(&mut store), []);
        store.complete(flush, Ok(()));
        assert_eq!(completed(&mut store), [(1, Ok(())), (0, Ok(()))]);
        store.complete(second, Ok(()));
        assert_eq!(completed(&mut store), [(3, Ok(()))]);
    }
}
