//! Blocking system calls on a few threads: the way to the image where io_uring is not allowed, and for the calls that
//! io_uring does not have.
//!
//! Owned by a `FileStore` on the I/O thread. Tasks move to a worker and come back with their result through one eventfd.
//! Workers end when the pool is dropped, after the calls they are in; a task that was not begun is dropped with its buffer.

use remoca_io::sizes;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use remoca_io::wake;
use rustix::fs::Advice;

use super::StoreError;
use super::file_image::Image;
use super::file_task::{Call, FileTask, Progress};

/// A task and how it ended.
pub(super) type Finished = (FileTask, Result<(), StoreError>);

pub(super) struct WorkerPool {
    shared: Arc<Shared>,
    /// Tasks of this round, handed over together by `kick`.
    queued: Vec<FileTask>,
}

struct Shared {
    image: Arc<Image>,
    state: Mutex<State>,
    work_added: Condvar,
    finished_added: OwnedFd,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<FileTask>,
    finished: Vec<Finished>,
    is_stopping: bool,
}

impl WorkerPool {
    pub(super) fn start(image: &Arc<Image>, worker_count: usize) -> io::Result<Self> {
        let finished_added = wake::new()?;
        let shared = Arc::new(Shared {
            image: Arc::clone(image),
            state: Mutex::default(),
            work_added: Condvar::new(),
            finished_added,
        });
        let pool = Self { shared: Arc::clone(&shared), queued: Vec::new() };
        for index in 0..worker_count {
            let shared = Arc::clone(&shared);
            thread::Builder::new().name(format!("disk-io-{index}")).spawn(move || shared.work())?;
        }
        Ok(pool)
    }

    /// Returns a descriptor that is readable when tasks have finished.
    pub(super) fn event_fd(&self) -> BorrowedFd<'_> {
        self.shared.finished_added.as_fd()
    }

    pub(super) fn submit(&mut self, task: FileTask) {
        self.queued.push(task);
    }

    pub(super) fn kick(&mut self) {
        let count = self.queued.len();
        if count == 0 {
            return;
        }
        self.shared.lock().waiting.extend(self.queued.drain(..));
        match count {
            1 => self.shared.work_added.notify_one(),
            _ => self.shared.work_added.notify_all(),
        }
    }

    pub(super) fn take_finished(&mut self) -> Vec<Finished> {
        // Cleared before the list is read: what finishes in between sets it again.
        wake::clear(&self.shared.finished_added);
        std::mem::take(&mut self.shared.lock().finished)
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_stopping = true;
        state.waiting.clear();
        self.shared.work_added.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        while let Some(mut task) = self.next_task() {
            let result = run(&self.image, &mut task);
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

    fn next_task(&self) -> Option<FileTask> {
        let mut state = self.lock();
        loop {
            if state.is_stopping {
                return None;
            }
            if let Some(task) = state.waiting.pop_front() {
                return Some(task);
            }
            state = self.work_added.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Makes all calls of a task, one after the other.
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
        Call::EmptyPageCache => Ok(rustix::fs::fadvise(file, 0, None, Advice::DontNeed).map(|()| 0)?),
        Call::Look(changed) => changed.read(file).map(|()| 0),
    }
}

fn write_durably(fd: i32, source: &[u8], offset: u64) -> io::Result<usize> {
    let vector = libc::iovec { iov_base: source.as_ptr().cast_mut().cast(), iov_len: source.len() };
    let offset = i64::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: the vector describes `source`, which outlives the call and is only read; the descriptor is open.
    let written = unsafe { libc::pwritev2(fd, &raw const vector, 1, offset, libc::RWF_DSYNC) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

/// Returns the length of a transfer. It is at most that of a buffer, so it fits.
fn transferred(len: usize) -> u32 {
    sizes::short(len)
}
