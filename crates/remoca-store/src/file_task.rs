//! One operation on an image as a sequence of system calls, which are made elsewhere.
//!
//! Called by both ways of making the calls: the ring (`file_uring`) and the worker threads (`file_threads`). They get
//! the [`FileTask::next_call`], make it, and pass its result to [`FileTask::handle_result`] until that returns
//! `Finished`. This module has the rules for short transfers, interruptions, and file systems that lack an operation.
//! Invariants:
//! 1. A read succeeds only when every byte was read. The end of the file inside its range is an error.
//! 2. A durable operation succeeds only after a call that makes it durable.
//!
//! A write with `RWF_DSYNC` does two things, and its error does not say which of them failed. The kernel syncs only the
//! bytes that it wrote, so a refusal for lack of space is settled by a second call without the flag. If that call is
//! refused too, the write had failed.

use super::file_stamp::ChangeTime;
use super::flush_latch::{FailedAt, is_clean_refusal};
use super::{StoreError, StoreOp};
use remoca_io::buffer::IoBuffer;
use remoca_io::sizes;

/// The most interruptions of one call in a row before it counts as failed.
const RETRIES_MAX: u32 = 100;
/// The most bytes of zeroes written by one call if the file system cannot zero a range.
pub(super) const ZERO_CHUNK_LEN: usize = 256 * 1024;
/// Block of a file system. A file system that deallocates or zeroes a part of one writes it through the page cache, where it would
/// look like the work of another program.
const BLOCK_LEN: u64 = 4096;

/// A stage, with offset and length of what it is about.
type Part = (Stage, (u64, u64));

/// Returns the first part of a discard or of zeroes in a range of a file, and those that follow, the last one first. Zeroes of a part of a
/// block are written; a discard leaves it as it is.
fn parts(stage: Stage, (offset, len): (u64, u64)) -> (Part, Vec<Part>) {
    let end = offset + len;
    let (start_of_whole, end_of_whole) = (offset.next_multiple_of(BLOCK_LEN), end / BLOCK_LEN * BLOCK_LEN);
    let whole = (start_of_whole, end_of_whole.saturating_sub(start_of_whole));
    if stage == Stage::DiscardByHole {
        return ((if whole.1 == 0 { Stage::Nothing } else { stage }, whole), Vec::new());
    }
    if whole.1 == 0 {
        return ((Stage::WriteZeroes, (offset, len)), Vec::new());
    }
    let (head, tail) = ((offset, start_of_whole - offset), (end_of_whole, end - end_of_whole));
    let mut left = vec![(stage, whole)];
    left.extend([tail, head].into_iter().filter(|(_, len)| *len > 0).map(|part| (Stage::WriteZeroes, part)));
    (left.pop().unwrap_or((stage, whole)), left)
}

/// Returns `len` page-aligned zeroes. `len` is at most [`ZERO_CHUNK_LEN`].
pub(super) fn zeroes(len: usize) -> &'static [u8] {
    #[repr(align(4096))]
    struct Zeroes([u8; ZERO_CHUNK_LEN]);
    static ZEROES: Zeroes = Zeroes([0; ZERO_CHUNK_LEN]);
    &ZEROES.0[..len]
}

/// An operation in progress, with its buffer.
#[derive(Debug)]
pub(super) struct FileTask {
    pub(super) purpose: Purpose,
    pub(super) buffer: Option<IoBuffer>,
    /// Most requests that its call in the ring makes of the device.
    pub(super) requests: u32,
    /// Number of a durable operation among those of its image (`overlaps`).
    pub(super) number: Option<u64>,
    image: ImageFacts,
    stage: Stage,
    /// Offset and length of what this stage is about.
    part: (u64, u64),
    /// What follows when that is done, the last one first.
    parts_left: Vec<Part>,
    /// Bytes of the part done in this stage.
    done: u64,
    retries: u32,
    /// Error of a write with `RWF_DSYNC`, while it is not known whether the write or the sync failed.
    doubtful: Option<StoreError>,
}

/// The purpose of a task's calls.
#[derive(Debug)]
pub(super) enum Purpose {
    Operation {
        token: u64,
        operation: StoreOp,
    },
    /// Queries when the image was last changed.
    Look(Box<ChangeTime>),
    /// Drops the image, which is used with direct I/O, from the page cache.
    EmptyPageCache,
    /// Queries the size of the image, in bytes.
    Measure(u64),
}

/// The facts about an image that determine the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ImageFacts {
    pub(super) is_block_device: bool,
    /// `RWF_DSYNC` makes a write durable, whether it is made by io_uring or by a thread.
    pub(super) honours_dsync: bool,
    /// The file system may wait even in a call with `RWF_NOWAIT`, so no call is tried on the I/O thread.
    pub(super) may_wait: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Read,
    Write,
    PunchHole,
    ZeroRange,
    WriteZeroes,
    /// Discard on a file: a hole, if the file system can make one.
    DiscardByHole,
    /// Discard on a block device.
    DiscardByIoctl,
    /// Discard of less than a block of a file.
    Nothing,
    Sync,
    Look,
    EmptyPageCache,
    Measure,
}

/// A system call to make on the image.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Call<'a> {
    Read {
        offset: u64,
        target: &'a mut [u8],
    },
    Write {
        offset: u64,
        source: &'a [u8],
        durable: bool,
    },
    Fallocate {
        mode: i32,
        offset: u64,
        len: u64,
    },
    /// Blocks its thread regardless of flags: never made on the I/O thread.
    DiscardBlocks {
        offset: u64,
        len: u64,
    },
    SyncData,
    /// No system call.
    Nothing,
    /// Blocks if the file system has to ask its server: never made on the I/O thread.
    Look(&'a mut ChangeTime),
    /// Takes long if much is cached.
    EmptyPageCache,
    /// Blocks as [`Self::Look`] does.
    Measure(&'a mut u64),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    MoreCalls,
    Finished(Result<(), StoreError>),
}

impl FileTask {
    pub(super) fn new(token: u64, operation: StoreOp, buffer: Option<IoBuffer>, image: ImageFacts) -> Self {
        let stage = match operation {
            StoreOp::Read { .. } => Stage::Read,
            StoreOp::Write { .. } => Stage::Write,
            StoreOp::Flush => Stage::Sync,
            StoreOp::Discard { .. } if image.is_block_device => Stage::DiscardByIoctl,
            StoreOp::Discard { .. } => Stage::DiscardByHole,
            StoreOp::WriteZeroes { may_unmap: true, .. } => Stage::PunchHole,
            StoreOp::WriteZeroes { may_unmap: false, .. } => Stage::ZeroRange,
        };
        let range = operation.range().unwrap_or_default();
        let ((stage, part), parts_left) = match stage {
            Stage::DiscardByHole | Stage::PunchHole | Stage::ZeroRange if !image.is_block_device => parts(stage, range),
            _ => ((stage, range), Vec::new()),
        };
        let purpose = Purpose::Operation { token, operation };
        Self { buffer, part, parts_left, ..Self::aside(purpose, stage, image) }
    }

    /// Returns a task that queries when the image was last changed.
    pub(super) fn look(image: ImageFacts) -> Self {
        Self::aside(Purpose::Look(Box::default()), Stage::Look, image)
    }

    /// Returns a task that drops the image from the page cache.
    pub(super) fn empty_page_cache(image: ImageFacts) -> Self {
        Self::aside(Purpose::EmptyPageCache, Stage::EmptyPageCache, image)
    }

    /// Returns a task that queries the size of the image.
    pub(super) fn measure(image: ImageFacts) -> Self {
        Self::aside(Purpose::Measure(0), Stage::Measure, image)
    }

    fn aside(purpose: Purpose, stage: Stage, image: ImageFacts) -> Self {
        let (part, parts_left) = ((0, 0), Vec::new());
        Self {
            purpose,
            buffer: None,
            requests: 0,
            number: None,
            image,
            stage,
            part,
            parts_left,
            done: 0,
            retries: 0,
            doubtful: None,
        }
    }

    /// Returns whether the task reads data of the image.
    pub(super) fn reads(&self) -> bool {
        self.stage == Stage::Read
    }

    fn is_durable(&self) -> bool {
        matches!(&self.purpose, Purpose::Operation { operation, .. } if operation.is_durable())
    }

    /// Returns the part of a finished operation to which its error belongs.
    pub(super) fn failed_at(&self) -> FailedAt {
        if self.stage == Stage::Sync { FailedAt::Sync } else { FailedAt::Body }
    }

    /// Returns whether the next call goes to the ring: a read or a write, which the kernel refuses if it would wait. A
    /// durable write to a file does not: some file systems wait for its sync all the same.
    pub(super) fn may_be_refused(&self) -> bool {
        match self.stage {
            Stage::Read | Stage::WriteZeroes => true,
            Stage::Write => self.image.is_block_device || !self.writes_durably(),
            _ => false,
        }
    }

    /// Returns the most requests that the next call makes of the device: one for each block of 4 KiB, as in a file in which no two are
    /// neighbours.
    pub(super) fn next_requests(&self) -> u32 {
        let remaining = self.part.1 - self.done;
        let len = if self.stage == Stage::WriteZeroes { remaining.min(ZERO_CHUNK_LEN as u64) } else { remaining };
        u32::try_from(len.div_ceil(4096)).unwrap_or(u32::MAX).max(1)
    }

    pub(super) fn next_call(&mut self) -> Call<'_> {
        let (start, len) = self.part;
        let offset = start + self.done;
        let remaining = len - self.done;
        let keep_size = libc::FALLOC_FL_KEEP_SIZE;
        match self.stage {
            Stage::Read => Call::Read { offset, target: self.remaining_buffer() },
            Stage::Write => {
                let durable = self.writes_durably() && self.doubtful.is_none();
                Call::Write { offset, source: self.remaining_buffer(), durable }
            }
            Stage::PunchHole | Stage::DiscardByHole => {
                Call::Fallocate { mode: libc::FALLOC_FL_PUNCH_HOLE | keep_size, offset, len: remaining }
            }
            Stage::ZeroRange => {
                Call::Fallocate { mode: libc::FALLOC_FL_ZERO_RANGE | keep_size, offset, len: remaining }
            }
            Stage::WriteZeroes => {
                let chunk = usize::try_from(remaining).map_or(ZERO_CHUNK_LEN, |rest| rest.min(ZERO_CHUNK_LEN));
                Call::Write { offset, source: zeroes(chunk), durable: false }
            }
            Stage::DiscardByIoctl => Call::DiscardBlocks { offset, len: remaining },
            Stage::EmptyPageCache => Call::EmptyPageCache,
            Stage::Sync => Call::SyncData,
            Stage::Nothing => Call::Nothing,
            Stage::Look | Stage::Measure => match &mut self.purpose {
                Purpose::Look(changed) => Call::Look(changed),
                Purpose::Measure(bytes) => Call::Measure(bytes),
                Purpose::Operation { .. } | Purpose::EmptyPageCache => Call::SyncData,
            },
        }
    }

    /// Advances the task by the result of a call, or retries the call. `result` is the bytes transferred (0 for a call
    /// that transfers none), or the error number.
    pub(super) fn handle_result(&mut self, result: Result<u32, i32>) -> Progress {
        match result {
            Err(libc::EINTR | libc::EAGAIN) if self.retries < RETRIES_MAX => {
                self.retries += 1;
                Progress::MoreCalls
            }
            Err(errno) => self.handle_error(errno),
            Ok(transferred) => {
                self.retries = 0;
                self.advance(u64::from(transferred))
            }
        }
    }

    fn advance(&mut self, transferred: u64) -> Progress {
        match self.stage {
            Stage::Read | Stage::Write | Stage::WriteZeroes => {
                self.done += transferred;
                if self.done < self.part.1 {
                    // Zero bytes mean that the image has become shorter since it was opened.
                    return if transferred == 0 {
                        Progress::Finished(Err(StoreError::IO))
                    } else {
                        Progress::MoreCalls
                    };
                }
                match (self.stage, self.doubtful) {
                    (Stage::Write, Some(error)) => {
                        // There is room, so it was the sync that failed.
                        self.stage = Stage::Sync;
                        Progress::Finished(Err(error))
                    }
                    (Stage::Write, None) if self.image.honours_dsync => Progress::Finished(Ok(())),
                    _ => self.next_part(),
                }
            }
            Stage::PunchHole | Stage::ZeroRange => self.next_part(),
            Stage::Nothing | Stage::DiscardByHole | Stage::DiscardByIoctl | Stage::Sync => Progress::Finished(Ok(())),
            Stage::Look | Stage::EmptyPageCache | Stage::Measure => Progress::Finished(Ok(())),
        }
    }

    /// Begins the next part of the operation, or ends it after the last one.
    fn next_part(&mut self) -> Progress {
        let Some(next) = self.parts_left.pop() else { return self.sync_if_durable() };
        (self.stage, self.part) = next;
        self.done = 0;
        Progress::MoreCalls
    }

    fn sync_if_durable(&mut self) -> Progress {
        if !self.is_durable() {
            return Progress::Finished(Ok(()));
        }
        self.stage = Stage::Sync;
        Progress::MoreCalls
    }

    fn handle_error(&mut self, errno: i32) -> Progress {
        let unsupported = matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY);
        match self.stage {
            Stage::PunchHole if unsupported => self.stage = Stage::ZeroRange,
            Stage::ZeroRange if unsupported => self.stage = Stage::WriteZeroes,
            // A discard is a hint; ignoring it is not an error.
            Stage::DiscardByHole | Stage::DiscardByIoctl if unsupported => return Progress::Finished(Ok(())),
            // The rest of a transfer that the end of the image cut inside a sector.
            Stage::Read if errno == libc::EINVAL && self.done > 0 => return Progress::Finished(Err(StoreError::IO)),
            Stage::Write
                if self.writes_durably() && self.doubtful.is_none() && is_clean_refusal(StoreError { errno }) =>
            {
                self.doubtful = Some(StoreError { errno });
            }
            _ => return Progress::Finished(Err(StoreError { errno })),
        }
        Progress::MoreCalls
    }

    fn writes_durably(&self) -> bool {
        self.is_durable() && self.image.honours_dsync
    }

    /// Returns the part of the buffer that is still to be transferred.
    fn remaining_buffer(&mut self) -> &mut [u8] {
        let done = sizes::in_memory(self.done);
        self.buffer.as_deref_mut().and_then(|buffer| buffer.get_mut(done..)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_io::buffer::BufferPool;

    fn task(operation: StoreOp, is_block_device: bool) -> FileTask {
        let buffer = operation.buffer_len().map(|len| BufferPool::new(1 << 20).take(len).unwrap());
        FileTask::new(1, operation, buffer, ImageFacts { is_block_device, honours_dsync: true, may_wait: false })
    }

    fn unsupported(task: &mut FileTask) -> Progress {
        task.handle_result(Err(libc::EOPNOTSUPP))
    }

    #[test]
    fn a_short_read_goes_on_where_it_stopped() {
        let mut task = task(StoreOp::Read { offset: 8192, len: 4096 }, false);
        assert_eq!(task.handle_result(Ok(512)), Progress::MoreCalls);
        match task.next_call() {
            Call::Read { offset, target } => assert_eq!((offset, target.len()), (8704, 3584)),
            other => panic!("{other:?}"),
        }
        assert_eq!(task.handle_result(Ok(3584)), Progress::Finished(Ok(())));
    }

    #[test]
    fn the_end_of_the_image_inside_a_transfer_is_an_error() {
        for operation in
            [StoreOp::Read { offset: 0, len: 4096 }, StoreOp::Write { offset: 0, len: 4096, durable: true }]
        {
            let mut task = task(operation, false);
            assert_eq!(task.handle_result(Ok(1024)), Progress::MoreCalls);
            assert_eq!(task.handle_result(Ok(0)), Progress::Finished(Err(StoreError::IO)));
        }
    }

    #[test]
    fn interruptions_are_retried_but_not_for_ever() {
        let mut task = task(StoreOp::Flush, false);
        for _ in 0..RETRIES_MAX {
            assert_eq!(task.handle_result(Err(libc::EINTR)), Progress::MoreCalls);
        }
        assert_eq!(task.handle_result(Err(libc::EAGAIN)), Progress::Finished(Err(StoreError { errno: libc::EAGAIN })));
    }

    #[test]
    fn zeroes_fall_back_from_hole_to_range_to_writing_and_end_with_a_sync() {
        let len = ZERO_CHUNK_LEN as u64 + 4096;
        let mut task = task(StoreOp::WriteZeroes { offset: 4096, len, may_unmap: true, durable: true }, false);
        assert!(
            matches!(task.next_call(), Call::Fallocate { mode, offset: 4096, .. } if mode & libc::FALLOC_FL_PUNCH_HOLE != 0)
        );
        assert_eq!(unsupported(&mut task), Progress::MoreCalls);
        assert!(matches!(task.next_call(), Call::Fallocate { mode, .. } if mode & libc::FALLOC_FL_ZERO_RANGE != 0));
        assert_eq!(unsupported(&mut task), Progress::MoreCalls);
        assert!(matches!(task.next_call(), Call::Write { offset: 4096, source, .. } if source.len() == ZERO_CHUNK_LEN));
        assert_eq!(task.handle_result(Ok(u32::try_from(ZERO_CHUNK_LEN).unwrap())), Progress::MoreCalls);
        assert!(matches!(task.next_call(), Call::Write { source, .. } if source.len() == 4096));
        assert_eq!(task.handle_result(Ok(4096)), Progress::MoreCalls);
        assert_eq!(task.next_call(), Call::SyncData);
        assert_eq!(task.handle_result(Ok(0)), Progress::Finished(Ok(())));
    }

    #[test]
    fn parts_of_blocks_of_a_file_are_written_and_not_discarded() {
        let zeroes = |offset, len| StoreOp::WriteZeroes { offset, len, may_unmap: true, durable: false };
        let mut both = task(zeroes(4608, 8192), false);
        assert!(matches!(both.next_call(), Call::Write { offset: 4608, source, .. } if source.len() == 3584));
        assert_eq!(both.handle_result(Ok(3584)), Progress::MoreCalls);
        assert!(matches!(both.next_call(), Call::Write { offset: 12288, source, .. } if source.len() == 512));
        assert_eq!(both.handle_result(Ok(512)), Progress::MoreCalls);
        assert!(matches!(both.next_call(), Call::Fallocate { offset: 8192, len: 4096, .. }));
        assert_eq!(unsupported(&mut both), Progress::MoreCalls);
        assert!(matches!(both.next_call(), Call::Fallocate { offset: 8192, len: 4096, .. }));
        assert_eq!(both.handle_result(Ok(0)), Progress::Finished(Ok(())));

        let durable = StoreOp::WriteZeroes { offset: 4608, len: 7680, may_unmap: false, durable: true };
        let mut head = task(durable, false);
        assert!(matches!(head.next_call(), Call::Write { offset: 4608, source, .. } if source.len() == 3584));
        assert_eq!(head.handle_result(Err(libc::EINTR)), Progress::MoreCalls);
        assert!(matches!(head.next_call(), Call::Write { offset: 4608, .. }));
        assert_eq!(head.handle_result(Ok(3584)), Progress::MoreCalls);
        assert!(
            matches!(head.next_call(), Call::Fallocate { mode, offset: 8192, len: 4096 } if mode & libc::FALLOC_FL_ZERO_RANGE != 0)
        );
        assert_eq!(head.handle_result(Ok(0)), Progress::MoreCalls);
        assert_eq!(head.next_call(), Call::SyncData);
        assert!(matches!(task(durable, true).next_call(), Call::Fallocate { offset: 4608, len: 7680, .. }), "a device");

        let mut less = task(zeroes(512, 1024), false);
        assert!(matches!(less.next_call(), Call::Write { offset: 512, source, .. } if source.len() == 1024));
        assert_eq!(less.handle_result(Ok(1024)), Progress::Finished(Ok(())));

        let mut discard = task(StoreOp::Discard { offset: 4608, len: 8192 }, false);
        assert!(matches!(discard.next_call(), Call::Fallocate { offset: 8192, len: 4096, .. }));
        let mut nothing = task(StoreOp::Discard { offset: 512, len: 4096 }, false);
        assert_eq!(nothing.next_call(), Call::Nothing);
        assert_eq!(nothing.handle_result(Ok(0)), Progress::Finished(Ok(())));
    }

    #[test]
    fn where_dsync_is_not_honoured_a_sync_follows_a_durable_write() {
        let durable = StoreOp::Write { offset: 0, len: 4096, durable: true };
        let mut honoured = task(durable, false);
        assert!(matches!(honoured.next_call(), Call::Write { durable: true, .. }));
        assert_eq!(honoured.handle_result(Ok(4096)), Progress::Finished(Ok(())));

        let buffer = BufferPool::new(4096).take(4096);
        let mut ignored = FileTask::new(
            1,
            durable,
            buffer,
            ImageFacts { is_block_device: false, honours_dsync: false, may_wait: true },
        );
        assert!(matches!(ignored.next_call(), Call::Write { durable: false, .. }));
        assert_eq!(ignored.handle_result(Ok(4096)), Progress::MoreCalls);
        assert_eq!(ignored.next_call(), Call::SyncData);
        assert_eq!(ignored.handle_result(Ok(0)), Progress::Finished(Ok(())));
    }

    #[test]
    fn a_write_and_its_sync_are_told_apart_by_a_second_write() {
        let durable = StoreOp::Write { offset: 0, len: 4096, durable: true };
        for errno in [libc::ENOSPC, libc::EDQUOT] {
            let error = StoreError { errno };
            for (second, at) in [(Err(errno), FailedAt::Body), (Ok(4096), FailedAt::Sync)] {
                let mut task = task(durable, true);
                assert!(matches!(task.next_call(), Call::Write { durable: true, .. }));
                assert_eq!(task.handle_result(Err(errno)), Progress::MoreCalls);
                assert!(matches!(task.next_call(), Call::Write { offset: 0, durable: false, .. }));
                assert_eq!(task.handle_result(second), Progress::Finished(Err(error)), "it never succeeds");
                assert_eq!(task.failed_at(), at, "{second:?}");
            }
        }
        let mut lost = task(durable, true);
        assert_eq!(
            lost.handle_result(Err(libc::EIO)),
            Progress::Finished(Err(StoreError::IO)),
            "no doubt about this one"
        );
        let mut plain = task(StoreOp::Write { offset: 0, len: 4096, durable: false }, true);
        let full = StoreError { errno: libc::ENOSPC };
        assert_eq!(plain.handle_result(Err(libc::ENOSPC)), Progress::Finished(Err(full)));
        assert_eq!(plain.failed_at(), FailedAt::Body);
    }

    #[test]
    fn the_error_of_a_sync_belongs_to_the_sync() {
        let zeroes = StoreOp::WriteZeroes { offset: 0, len: 4096, may_unmap: true, durable: true };
        for (operation, calls_before) in [(StoreOp::Flush, 0), (zeroes, 1)] {
            let mut task = task(operation, false);
            for _ in 0..calls_before {
                assert_eq!(task.failed_at(), FailedAt::Body);
                assert_eq!(task.handle_result(Ok(0)), Progress::MoreCalls);
            }
            let full = StoreError { errno: libc::ENOSPC };
            assert_eq!(task.handle_result(Err(libc::ENOSPC)), Progress::Finished(Err(full)));
            assert_eq!(task.failed_at(), FailedAt::Sync, "{operation:?}");
        }
    }

    #[test]
    fn a_discard_that_is_not_supported_succeeds_and_other_errors_are_reported() {
        for is_block_device in [false, true] {
            let operation = StoreOp::Discard { offset: 0, len: 4096 };
            assert!(!task(operation, is_block_device).may_be_refused(), "it is made by a thread");
            assert_eq!(unsupported(&mut task(operation, is_block_device)), Progress::Finished(Ok(())));
            assert_eq!(
                task(operation, is_block_device).handle_result(Err(libc::EIO)),
                Progress::Finished(Err(StoreError::IO))
            );
        }
    }
}
