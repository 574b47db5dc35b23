//! Blocking system calls on threads: for calls that may wait, and for all calls if io_uring is not allowed.
//!
//! Owned by a `FileStore` on the I/O thread. Tasks move to a worker and come back with their result through one
//! eventfd. When the pool is dropped, each worker ends after its current call; a task that was not begun is dropped
//! with its buffer.
//!
//! Invariant: below the bound, one worker waits for a task or is being started, so a call that hangs does not delay
//! others. Workers are started by workers, which costs the I/O thread nothing.

use remoca_io::sizes;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use remoca_io::wake;
use rustix::fs::Advice;

use super::StoreError;
use super::file_image::Image;
use super::file_task::{Call, FileTask, Progress};

/// How long a worker waits for a task if another worker waits too.
const IDLE_MAX: Duration = Duration::from_secs(10);
/// Stack size of a worker: enough for a system call and for a panic's message.
const STACK_BYTES: usize = 256 << 10;

/// A task and its result.
pub(super) type Finished = (FileTask, Result<(), StoreError>);

pub(super) struct WorkerPool {
    shared: Arc<Shared>,
    /// Tasks submitted since the last `kick`, which hands them over together.
    queued: Vec<FileTask>,
    /// Number of tasks that were submitted and not taken back yet.
    outstanding: usize,
}

struct Shared {
    workers_max: usize,
    state: Mutex<State>,
    work_added: Condvar,
    finished_added: OwnedFd,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<FileTask>,
    finished: Vec<Finished>,
    /// `None` once the pool was dropped. A worker holds the image only while it makes calls, so that the image is
    /// closed with the pool.
    image: Option<Arc<Image>>,
    /// Workers that run or are being started, and those of them that wait for a task.
    workers: usize,
    idle: usize,
    /// A worker could not be started; the next `kick` with tasks tries again.
    start_failed: bool,
}

impl WorkerPool {
    /// Starts a pool with one worker. More workers are started when they are needed, up to `workers_max`.
    pub(super) fn start(image: &Arc<Image>, workers_max: usize) -> io::Result<Self> {
        let finished_added = wake::new()?;
        let shared = Arc::new(Shared {
            workers_max,
            state: Mutex::new(State { image: Some(Arc::clone(image)), workers: 1, ..State::default() }),
            work_added: Condvar::new(),
            finished_added,
        });
        shared.spawn()?;
        Ok(Self { shared, queued: Vec::new(), outstanding: 0 })
    }

    /// Returns a descriptor that is readable when tasks have finished.
    pub(super) fn event_fd(&self) -> BorrowedFd<'_> {
        self.shared.finished_added.as_fd()
    }

    pub(super) fn submit(&mut self, task: FileTask) {
        self.outstanding += 1;
        self.queued.push(task);
    }

    /// Returns whether there are tasks that were not taken back yet.
    pub(super) fn is_busy(&self) -> bool {
        self.outstanding > 0
    }

    pub(super) fn kick(&mut self) {
        if self.queued.is_empty() {
            return;
        }
        let mut state = self.shared.lock();
        state.waiting.extend(self.queued.drain(..));
        match std::mem::take(&mut state.start_failed) {
            true => self.shared.start_another(state),
            false => drop(state),
        }
        // One worker wakes the next if needed.
        self.shared.work_added.notify_one();
    }

    pub(super) fn take_finished(&mut self) -> Vec<Finished> {
        // Cleared before the list is read: a task that finishes in between raises it again.
        wake::clear(&self.shared.finished_added);
        let finished = std::mem::take(&mut self.shared.lock().finished);
        self.outstanding -= finished.len();
        finished
    }
}

#[cfg(test)]
impl WorkerPool {
    /// Removes and returns the tasks that no worker has been given.
    pub(super) fn take_queued(&mut self) -> Vec<FileTask> {
        self.outstanding -= self.queued.len();
        std::mem::take(&mut self.queued)
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.image = None;
        state.waiting.clear();
        self.shared.work_added.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a worker that is already counted.
    fn spawn(self: &Arc<Self>) -> io::Result<()> {
        let shared = Arc::clone(self);
        let worker = thread::Builder::new().name("disk-io".into()).stack_size(STACK_BYTES);
        worker.spawn(move || shared.work()).map(drop)
    }

    /// Starts one more worker, if the bound and the system allow it.
    fn start_another(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if state.workers == self.workers_max {
            return;
        }
        state.workers += 1;
        drop(state);
        if self.spawn().is_err() {
            let mut state = self.lock();
            state.workers -= 1;
            state.start_failed = true;
        }
    }

    fn work(self: &Arc<Self>) {
        while let Some((mut task, image)) = self.next_task() {
            let result = run(&image, &mut task);
            drop(image);
            let mut state = self.lock();
            state.finished.push((task, result));
            let is_first = state.finished.len() == 1;
            drop(state);
            if is_first {
                // Can only fail when the counter is full, and then the descriptor is readable anyway.
                wake::raise(&self.finished_added);
            }
        }
    }

    /// Returns the next task, and makes sure that another worker waits for the one after it. Returns `None` if this
    /// worker is to end.
    fn next_task(self: &Arc<Self>) -> Option<(FileTask, Arc<Image>)> {
        let mut state = self.lock();
        loop {
            let image = Arc::clone(state.image.as_ref()?);
            if let Some(task) = state.waiting.pop_front() {
                if state.idle == 0 {
                    self.start_another(state);
                } else if !state.waiting.is_empty() {
                    self.work_added.notify_one();
                }
                return Some((task, image));
            }
            drop(image);
            state.idle += 1;
            let (woken, timeout) =
                self.work_added.wait_timeout(state, IDLE_MAX).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if timeout.timed_out() && state.waiting.is_empty() && state.idle > 0 {
                state.workers -= 1;
                return None;
            }
        }
    }
}

/// Makes all calls of a task, one after the other, and returns the task's result.
fn run(image: &Image, task: &mut FileTask) -> Result<(), StoreError> {
    loop {
        let result = call(image, task.next_call());
        let errno = |error: io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        if let Progress::Finished(result) = task.handle_result(result.map_err(errno)) {
            return result;
        }
    }
}

fn call(image: &Image, call: Call<'_>) -> io::Result<u32> {
    let file = &image.file;
    match call {
        Call::Read { offset, target } => file.read_at(target, offset).map(transferred),
        Call::Write { offset, source, durable: false } => file.write_at(source, offset).map(transferred),
        Call::Write { offset, source, durable: true } => {
            write_durably(file.as_raw_fd(), source, offset).map(transferred)
        }
        Call::Fallocate { mode, offset, len } => {
            let mode = rustix::fs::FallocateFlags::from_bits_retain(mode.unsigned_abs());
            Ok(rustix::fs::fallocate(file, mode, offset, len).map(|()| 0)?)
        }
        Call::DiscardBlocks { offset, len } => image.discard_blocks(offset, len).map(|()| 0),
        Call::SyncData => file.sync_data().map(|()| 0),
        Call::Nothing => Ok(0),
        Call::EmptyPageCache => Ok(rustix::fs::fadvise(file, 0, None, Advice::DontNeed).map(|()| 0)?),
        Call::Look(changed) => changed.read(file).map(|()| 0),
        Call::Measure(bytes) => {
            *bytes = image.measure()?;
            Ok(0)
        }
    }
}

fn write_durably(fd: i32, source: &[u8], offset: u64) -> io::Result<usize> {
    let vector = libc::iovec { iov_base: source.as_ptr().cast_mut().cast(), iov_len: source.len() };
    let offset = i64::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: the vector describes `source`, which outlives the call and is only read; the descriptor is open.
    let written = unsafe { libc::pwritev2(fd, &raw const vector, 1, offset, libc::RWF_DSYNC) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

/// Converts the length of a transfer to 32 bits. It is at most the length of a buffer, so it fits.
fn transferred(len: usize) -> u32 {
    sizes::short(len)
}
