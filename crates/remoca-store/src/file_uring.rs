//! Asynchronous system calls through one io_uring.
//!
//! Owned by a `FileStore` on the I/O thread. At most [`IN_RING_MAX`] calls are in the ring, the rest wait here, so the
//! completion queue (twice as long) cannot overflow by our own doing. Invariants:
//! 1. The memory of a call in the ring stays where it is until its completion was taken, or for ever: tasks that are in
//!    the ring when the ring is dropped are leaked, because the kernel may still read or write their buffers.
//! 2. A task is in exactly one place: in the ring, or waiting for it.

use remoca_io::sizes;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, Probe, opcode, squeue, types};
use slab::Slab;

use super::file_image::Image;
use super::file_stamp::ChangeTime;
use super::file_task::{Call, FileTask, Progress, Purpose};
use super::file_threads::Finished;

/// Calls in the ring at once.
const IN_RING_MAX: u32 = 256;
/// An image that has not answered for this long may be about to hang.
const SILENCE_MAX: Duration = Duration::from_millis(25);
/// Threads of the kernel for calls that block: no bound but the number of calls in all rings.
const WORKERS_MAX: u32 = i32::MAX.cast_unsigned();

pub(super) struct Ring {
    ring: IoUring,
    image: Arc<Image>,
    tasks: Slab<FileTask>,
    /// Keys of tasks whose next call is not in the ring yet.
    waiting: VecDeque<usize>,
    in_ring: u32,
    /// When a read, and when any other call, completed last: a file system that is frozen still answers reads.
    answered_at: [Option<Instant>; 2],
}

/// What became of handing calls to the kernel.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Submission {
    Done,
    /// The kernel had no room for it: once more in a moment.
    Again,
}

impl Ring {
    /// Sets up a ring. Fails where the kernel does not allow io_uring, or not all that is needed.
    pub(super) fn new(image: &Arc<Image>) -> io::Result<Self> {
        let ring = IoUring::new(IN_RING_MAX)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [
            opcode::Read::CODE,
            opcode::Write::CODE,
            opcode::Fsync::CODE,
            opcode::Fallocate::CODE,
            opcode::Statx::CODE,
            opcode::Fadvise::CODE,
        ];
        if !needed.into_iter().all(|code| probe.is_supported(code)) || !ring.params().is_feature_nodrop() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        // The kernel's threads for calls that block belong to the I/O thread, whatever the ring: a few in all, unless it is
        // told otherwise. Calls of an image whose file system hangs would take all of them, and other images wait for ever.
        ring.submitter().register_iowq_max_workers(&mut [WORKERS_MAX, WORKERS_MAX])?;
        Ok(Self {
            ring,
            image: Arc::clone(image),
            tasks: Slab::new(),
            waiting: VecDeque::new(),
            in_ring: 0,
            answered_at: [None; 2],
        })
    }

    /// Returns a descriptor that is readable when calls have completed.
    pub(super) fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the ring's own and stays open as long as the ring, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    pub(super) fn submit(&mut self, task: FileTask) {
        let key = self.tasks.insert(task);
        self.waiting.push_back(key);
    }

    pub(super) fn kick(&mut self, now: Instant) -> io::Result<Submission> {
        let may_wait = [false, true].map(|reads| self.may_wait(now, reads));
        while self.in_ring < IN_RING_MAX {
            let Some(key) = self.waiting.pop_front() else { break };
            self.push(key, may_wait[usize::from(self.tasks[key].reads())]);
        }
        // One call is the rule; more are needed when the kernel stops behind an entry that it refuses.
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

    /// Takes what has completed: finished tasks go to `finished`, the others wait for their next call.
    pub(super) fn collect(&mut self, now: Instant, finished: &mut Vec<Finished>) {
        loop {
            let mut taken = 0;
            for entry in self.ring.completion() {
                taken += 1;
                let key = sizes::in_memory(entry.user_data());
                let task = &self.tasks[key];
                // What is asked beside the guest's operations needs no journal: its answers say nothing of them.
                if matches!(task.purpose, Purpose::Operation { .. }) {
                    self.answered_at[usize::from(task.reads())] = Some(now);
                }
                let result = u32::try_from(entry.result()).map_err(|_| entry.result().saturating_neg());
                self.in_ring -= 1;
                match self.tasks[key].handle_result(result) {
                    Progress::MoreCalls => self.waiting.push_back(key),
                    Progress::Finished(result) => finished.push((self.tasks.remove(key), result)),
                }
            }
            // The kernel keeps completions that found no room until it is entered again.
            let has_overflowed = self.ring.submission().cq_overflow();
            if has_overflowed && self.ring.submit().is_err() || !has_overflowed && taken == 0 {
                return;
            }
        }
    }

    /// Returns whether a call may wait on this thread. By default the kernel tries each call on it first, and takes the file
    /// system's word that it does not wait. FUSE waits for its server. Ext4 waits for its journal, and the journal for the
    /// device, when a time of the file changes or a map of its blocks is read. Both were seen on Linux 6.18. So a regular file is
    /// trusted only while it answers. To have the kernel's threads make all calls costs too much: below Linux 6.5 they
    /// write to a file one after the other.
    fn may_wait(&self, now: Instant, reads: bool) -> bool {
        let answers =
            || self.answered_at[usize::from(reads)].is_some_and(|at| now.saturating_duration_since(at) < SILENCE_MAX);
        self.image.facts.may_wait || !self.image.facts.is_block_device && !answers()
    }

    fn push(&mut self, key: usize, may_wait: bool) {
        let mut entry = entry(&self.image, self.tasks[key].next_call()).user_data(key as u64);
        if may_wait {
            entry = entry.flags(squeue::Flags::ASYNC);
        }
        // SAFETY: the entry points to the task's buffer or to static zeroes. The buffer is heap memory owned by the task,
        // which stays in `tasks` until its completion was taken, or is leaked; nothing touches it in the meantime.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // The queue is as long as IN_RING_MAX and emptied by each kick, but a kick that could not submit leaves entries.
        match pushed {
            Ok(()) => self.in_ring += 1,
            Err(_) => self.waiting.push_front(key),
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.in_ring > 0 {
            std::mem::forget(std::mem::take(&mut self.tasks));
        }
    }
}

fn entry(image: &Image, call: Call<'_>) -> squeue::Entry {
    let fd = types::Fd(image.file.as_raw_fd());
    match call {
        Call::Read { offset, target } => {
            opcode::Read::new(fd, target.as_mut_ptr(), len_of(target)).offset(offset).build()
        }
        Call::Write { offset, source, durable } => {
            let flags = if durable { libc::RWF_DSYNC } else { 0 };
            opcode::Write::new(fd, source.as_ptr(), len_of(source)).offset(offset).rw_flags(flags).build()
        }
        Call::Fallocate { mode, offset, len } => opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build(),
        // A length of 0 is up to the end.
        Call::EmptyPageCache => opcode::Fadvise::new(fd, 0, libc::POSIX_FADV_DONTNEED).build(),
        Call::Look(changed) => opcode::Statx::new(fd, c"".as_ptr(), changed.as_mut_ptr().cast())
            .flags(ChangeTime::FLAGS)
            .mask(ChangeTime::MASK)
            .build(),
        Call::SyncData => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        // `FileStore` gives these to its helper thread.
        Call::DiscardBlocks { .. } => unreachable!("a blocking call in the ring"),
    }
}

fn len_of(bytes: &[u8]) -> u32 {
    sizes::short(bytes.len())
}
