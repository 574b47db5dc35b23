//! Asynchronous system calls: reads and writes that need not wait through one io_uring, all others on threads.
//!
//! Owned by a `FileStore` on the I/O thread. At most [`IN_RING_MAX`] calls are in the ring, and the rest wait here or go
//! to the threads, so the completion queue always has room for all of them. Invariants:
//! 1. The memory of a call in the ring stays where it is until its completion was taken, or for ever. Tasks that are in
//!    the ring when the ring is dropped are leaked, because the kernel may still read or write their buffers.
//! 2. A task is in exactly one place: in the ring, waiting for it, or with the threads.
//! 3. No call is left to the kernel's threads for a ring (io-wq): their count can go wrong (seen on Linux 6.18), and
//!    then calls wait for ever. Each call in the ring has `RWF_NOWAIT`, with which the kernel refuses a call that would
//!    wait.

use remoca_io::sizes;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use io_uring::{IoUring, Probe, opcode, squeue, types};
use slab::Slab;

use super::file_image::Image;
use super::file_task::{Call, FileTask, Progress, Purpose};
use super::file_threads::{Finished, WorkerPool};

/// The most calls in the ring at once.
const IN_RING_MAX: u32 = 256;
/// The most calls in the ring at once for a regular file, whatever requests they make. Its file system may wait for room in the
/// device's queue, which `RWF_NOWAIT` does not prevent.
const IN_RING_OF_FILE: u32 = 16;
/// Share of the requests of that queue, one in so many, that calls beyond these may bring it to: other files are on the device too.
const QUEUE_SHARE: u32 = 4;
/// An image that has not answered for this long may be about to hang.
const SILENCE_MAX: Duration = Duration::from_millis(25);
/// The most threads for calls that wait: as many as calls in the ring.
const THREADS_MAX: usize = 256;
/// User data of the ring's completion when a thread has finished; no task has this key.
const THREADS: u64 = u64::MAX;

pub(super) struct Ring {
    ring: IoUring,
    image: Arc<Image>,
    tasks: Slab<FileTask>,
    /// Keys of tasks whose next call is not in the ring yet.
    waiting: VecDeque<usize>,
    in_ring: u32,
    /// Most requests that the calls in the ring make of the device.
    requests: u32,
    /// Times of the last completion of any other call, and of a read. They are separate because a file system that is
    /// frozen still answers reads.
    answered_at: [Option<Instant>; 2],
    threads: WorkerPool,
    /// The ring is watching for a finished thread.
    is_watching: bool,
    /// Whether the file does not support `RWF_NOWAIT`, for other calls and for reads.
    only_waits: [bool; 2],
}

/// The outcome of submitting calls to the kernel.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Submission {
    Done,
    /// The kernel had no room for the calls: try again in a moment.
    Again,
}

impl Ring {
    /// Sets up a ring. Fails if the kernel does not allow io_uring or lacks a needed feature.
    pub(super) fn new(image: &Arc<Image>) -> io::Result<Self> {
        // One more than calls: the ring also watches the threads.
        let ring = IoUring::new(IN_RING_MAX + 1)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::PollAdd::CODE];
        if !needed.into_iter().all(|code| probe.is_supported(code)) || !ring.params().is_feature_nodrop() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        Ok(Self {
            ring,
            image: Arc::clone(image),
            tasks: Slab::new(),
            waiting: VecDeque::new(),
            in_ring: 0,
            requests: 0,
            answered_at: [None; 2],
            threads: WorkerPool::start(image, THREADS_MAX)?,
            is_watching: false,
            only_waits: [false; 2],
        })
    }

    /// Returns a descriptor that is readable when calls have completed.
    pub(super) fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the ring's own and stays open as long as the ring, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    pub(super) fn submit(&mut self, task: FileTask) {
        if task.may_be_refused() {
            let key = self.tasks.insert(task);
            self.waiting.push_back(key);
        } else {
            self.threads.submit(task);
        }
    }

    pub(super) fn kick(&mut self, now: Instant) -> io::Result<Submission> {
        let may_wait = [false, true].map(|reads| self.may_wait(now, reads));
        while let Some(key) = self.waiting.pop_front() {
            if self.is_crowded(&self.tasks[key]) || may_wait[usize::from(self.tasks[key].reads())] {
                self.threads.submit(self.tasks.remove(key));
            } else if self.in_ring == IN_RING_MAX || !self.push(key) {
                self.waiting.push_front(key);
                break;
            }
        }
        self.threads.kick();
        self.watch_threads();
        // Usually one call is enough. More are needed when the kernel stops after an entry that it refuses.
        while !self.ring.submission().is_empty() {
            match self.ring.submit() {
                Ok(0) => return Ok(Submission::Again),
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                    return Ok(Submission::Again);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Submission::Done)
    }

    /// Takes the completions. Finished tasks go to `finished`; the others wait for their next call or go to the
    /// threads.
    pub(super) fn collect(&mut self, now: Instant, finished: &mut Vec<Finished>) {
        loop {
            let mut taken = 0;
            for entry in self.ring.completion() {
                taken += 1;
                if entry.user_data() == THREADS {
                    self.is_watching = false;
                    continue;
                }
                let key = sizes::in_memory(entry.user_data());
                let task = &mut self.tasks[key];
                self.in_ring -= 1;
                self.requests -= task.requests;
                let result = u32::try_from(entry.result()).map_err(|_| entry.result().saturating_neg());
                if matches!(result, Ok(0) | Err(libc::EAGAIN | libc::EOPNOTSUPP)) {
                    // The call would wait, or the file does not support `RWF_NOWAIT`. Linux 5.10 reports a call that
                    // would wait as zero bytes read, as at the end of the file; the call on a thread shows which of the
                    // two it is.
                    self.only_waits[usize::from(task.reads())] |= result == Err(libc::EOPNOTSUPP);
                    self.threads.submit(self.tasks.remove(key));
                    continue;
                }
                note_answer(&mut self.answered_at, task, now);
                match task.handle_result(result) {
                    Progress::MoreCalls if task.may_be_refused() => self.waiting.push_back(key),
                    Progress::MoreCalls => self.threads.submit(self.tasks.remove(key)),
                    Progress::Finished(result) => finished.push((self.tasks.remove(key), result)),
                }
            }
            // The kernel keeps completions that found no room until it is entered again.
            let has_overflowed = self.ring.submission().cq_overflow();
            if has_overflowed && self.ring.submit().is_err() || !has_overflowed && taken == 0 {
                break;
            }
        }
        if self.threads.is_busy() && !self.is_watching {
            for (task, result) in self.threads.take_finished() {
                note_answer(&mut self.answered_at, &task, now);
                finished.push((task, result));
            }
        }
    }

    /// Makes the ring report when a thread finishes, if the threads have tasks.
    fn watch_threads(&mut self) {
        if self.is_watching || !self.threads.is_busy() {
            return;
        }
        let finished = types::Fd(self.threads.event_fd().as_raw_fd());
        let events = u32::from(libc::POLLIN.cast_unsigned());
        let entry = opcode::PollAdd::new(finished, events).build().user_data(THREADS);
        // SAFETY: the entry has no memory; the kernel holds the descriptor as long as it polls it.
        self.is_watching = unsafe { self.ring.submission().push(&entry) }.is_ok();
    }

    /// Returns whether a call may block this thread. The kernel tries each call of the ring on this thread, and relies
    /// on the file system not to wait. FUSE waits for its server. Ext4 waits for its journal, and the journal for the
    /// device, when a time of the file changes or a map of its blocks is read. Both were seen on Linux 6.18. So a
    /// regular file is trusted only while it has answered recently.
    fn may_wait(&self, now: Instant, reads: bool) -> bool {
        let answers =
            || self.answered_at[usize::from(reads)].is_some_and(|at| now.saturating_duration_since(at) < SILENCE_MAX);
        let facts = &self.image.facts;
        facts.may_wait || self.only_waits[usize::from(reads)] || !facts.is_block_device && !answers()
    }

    /// Puts the next call of a task into the ring. Returns false if the ring has no room.
    fn push(&mut self, key: usize) -> bool {
        let Some(entry) = entry(&self.image, self.tasks[key].next_call()) else {
            unreachable!("only reads and writes go to the ring");
        };
        // SAFETY: the entry points to the task's buffer or to static zeroes. The buffer is heap memory owned by the task,
        // which stays in `tasks` until its completion was taken, or is leaked; nothing touches it in the meantime.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(key as u64)) };
        if pushed.is_ok() {
            let task = &mut self.tasks[key];
            task.requests = task.next_requests();
            self.in_ring += 1;
            self.requests += task.requests;
        }
        pushed.is_ok()
    }

    /// Returns whether the next call of a task might find no room in the queue of the device, and wait for it on this thread.
    fn is_crowded(&self, task: &FileTask) -> bool {
        let requests = self.requests + task.next_requests();
        let room = (self.image.device_requests.load(Ordering::Relaxed) / QUEUE_SHARE).min(IN_RING_MAX);
        !self.image.facts.is_block_device && self.in_ring >= IN_RING_OF_FILE && requests > room
    }
}

/// Records the time at which the image completed a call of a guest operation, separately for reads. Ignores other
/// calls: they never wait for the journal, so they do not show that the image responds.
fn note_answer(answered_at: &mut [Option<Instant>; 2], task: &FileTask, now: Instant) {
    if matches!(task.purpose, Purpose::Operation { .. }) {
        answered_at[usize::from(task.reads())] = Some(now);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.in_ring > 0 {
            std::mem::forget(std::mem::take(&mut self.tasks));
        }
    }
}

/// Returns the ring entry for a read or a write, or `None` for any other call.
fn entry(image: &Image, call: Call<'_>) -> Option<squeue::Entry> {
    let fd = types::Fd(image.file.as_raw_fd());
    match call {
        Call::Read { offset, target } => {
            let read = opcode::Read::new(fd, target.as_mut_ptr(), len_of(target)).offset(offset);
            Some(read.rw_flags(libc::RWF_NOWAIT).build())
        }
        Call::Write { offset, source, durable } => {
            let flags = libc::RWF_NOWAIT | if durable { libc::RWF_DSYNC } else { 0 };
            Some(opcode::Write::new(fd, source.as_ptr(), len_of(source)).offset(offset).rw_flags(flags).build())
        }
        _ => None,
    }
}

fn len_of(bytes: &[u8]) -> u32 {
    sizes::short(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StoreOp;
    use crate::file_image::FileOptions;
    use crate::file_task::ImageFacts;
    use remoca_io::buffer::BufferPool;

    /// A file on a device whose queue holds so many requests, and a ring for it.
    fn ring(facts: ImageFacts, device_requests: u32) -> (tempfile::TempDir, Ring) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let image = Image::open(&path, FileOptions::default()).unwrap();
        image.device_requests.store(device_requests, Ordering::Relaxed);
        (folder, Ring::new(&Arc::new(Image { facts, ..image })).unwrap())
    }

    /// Returns how many of 300 reads of `pages` pages are in the ring. None of them is taken as complete meanwhile.
    fn in_ring(facts: ImageFacts, device_requests: u32, pages: u32) -> u32 {
        let (_folder, mut ring) = ring(facts, device_requests);
        let (now, buffers) = (Instant::now(), BufferPool::new(64 << 20));
        ring.answered_at = [Some(now); 2];
        for token in 0..300 {
            let read = StoreOp::Read { offset: 0, len: pages * 4096 };
            ring.submit(FileTask::new(token, read, buffers.take(pages as usize * 4096), facts));
        }
        ring.kick(now).unwrap();
        ring.in_ring
    }

    const FILE: ImageFacts = ImageFacts { is_block_device: false, honours_dsync: true, may_wait: false };

    #[test]
    fn calls_of_a_file_leave_room_in_the_queue_of_its_device() {
        let of_pages = |pages| [0, 1, 64, 256, u32::MAX].map(|requests| in_ring(FILE, requests, pages));
        assert_eq!(of_pages(1), [16, 16, 16, 64, 256]);
        assert_eq!(of_pages(3), [16, 16, 16, 21, 85], "each page may be a request");
        assert_eq!(of_pages(8), [16, 16, 16, 16, 32]);
        let device = ImageFacts { is_block_device: true, ..FILE };
        assert_eq!(in_ring(device, 0, 1), 256, "it refuses what it has no room for");
        assert_eq!(in_ring(ImageFacts { may_wait: true, ..FILE }, 256, 1), 0, "its file system may wait");
    }

    /// Requests are not counted for longer than their calls are in the ring.
    #[test]
    fn the_ring_has_room_again_when_calls_are_done() {
        let (_folder, mut ring) = ring(FILE, 256);
        let buffers = BufferPool::new(64 << 20);
        let (mut finished, mut begun) = (Vec::new(), 0);
        while finished.len() < 200 {
            let now = Instant::now();
            ring.answered_at = [Some(now); 2];
            if begun < 200 {
                let read = StoreOp::Read { offset: 0, len: 8 * 4096 };
                ring.submit(FileTask::new(begun, read, buffers.take(8 * 4096), FILE));
                begun += 1;
            }
            ring.kick(now).unwrap();
            ring.collect(now, &mut finished);
        }
        assert_eq!((ring.in_ring, ring.requests), (0, 0));
    }
}
