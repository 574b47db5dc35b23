//! One operation on an NBD export as a sequence of requests, which are sent elsewhere.
//!
//! Called by `nbd`. At most one request of an operation is in flight at a time. An operation longer than the server's
//! maximum goes piece by piece. After a lost connection the operation starts again, because the parts that the server
//! had done may be lost with its cache. Invariants:
//! 1. No request is longer than the server allows, and all are aligned to its blocks.
//! 2. A durable operation succeeds only after FUA on each of its pieces, or a flush after them.
//!
//! FUA does two things, and its error does not say which of them failed: servers make the whole file durable for it. A
//! refusal for lack of space is settled by sending the same piece without FUA. If it is refused again, the piece had
//! failed.

use remoca_io::sizes;
use std::ops::Range;

use super::file_task::{Progress, ZERO_CHUNK_LEN};
use super::flush_latch::{FailedAt, is_clean_refusal};
use super::nbd_protocol::{COMMAND_FUA, COMMAND_NO_HOLE, Command, Export, ExportFlags};
use super::{StoreError, StoreOp};
use remoca_io::buffer::IoBuffer;

/// Longest trim or write-zeroes in bytes. It is well below 32 bits, so that no server has to work for minutes on one
/// request.
const RANGE_LEN_MAX: u64 = 1 << 30;

/// What requests the server can execute.
#[derive(Clone, Copy, Debug)]
pub(super) struct Abilities {
    pub(super) payload_max: u64,
    pub(super) flush: bool,
    pub(super) fua: bool,
    pub(super) trim: bool,
    pub(super) write_zeroes: bool,
    /// Every modification is made durable before it completes.
    pub(super) write_through: bool,
}

impl Abilities {
    /// Returns the abilities of an export. Pieces of a request are multiples of `sector` bytes.
    pub(super) fn of(export: &Export, sector: u32, write_through: bool) -> Self {
        let flush = export.flags.has(ExportFlags::FLUSH);
        Self {
            payload_max: u64::from(export.payload_max - export.payload_max % sector),
            flush,
            fua: export.flags.has(ExportFlags::FUA),
            trim: export.flags.has(ExportFlags::TRIM),
            write_zeroes: export.flags.has(ExportFlags::WRITE_ZEROES),
            // Without flush, no request can make earlier writes durable.
            write_through: write_through || !flush,
        }
    }
}

/// An operation in progress, with its buffer.
#[derive(Debug)]
pub(super) struct NbdTask {
    pub(super) token: u64,
    pub(super) operation: StoreOp,
    pub(super) buffer: Option<IoBuffer>,
    /// Sequence number of the operation, in the order of submission.
    pub(super) sequence: u64,
    /// The number of writes needing a flush that had completed when this operation was submitted. If it is a flush, or
    /// ends with one, it covers them.
    pub(super) writes_before: u64,
    pub(super) wire: WireState,
    stage: NbdStage,
    /// Bytes done in this stage.
    done: u64,
    /// Bytes of the current piece.
    piece_len: u64,
    /// Error of a piece with FUA, while it is not known whether the piece or the sync failed.
    doubtful: Option<StoreError>,
}

/// The state of the current piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WireState {
    /// Waits for an overlapping modification.
    WaitsForRange,
    Queued,
    /// In the connection's output, perhaps sent in part.
    Sending {
        cookie: u64,
    },
    AwaitsReply {
        cookie: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NbdStage {
    Body,
    /// Zeroes are written as data, because the server cannot write zeroes itself.
    WriteZeroes,
    Sync,
}

/// The next request of a task.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) command: Command,
    pub(super) flags: u16,
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) payload: Payload,
}

/// The payload that follows a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Payload {
    None,
    /// This part of the task's buffer.
    Buffer(Range<usize>),
    /// This many zeroes.
    Zeroes(usize),
}

impl NbdTask {
    pub(super) fn new(
        token: u64,
        operation: StoreOp,
        buffer: Option<IoBuffer>,
        sequence: u64,
        writes_before: u64,
    ) -> Self {
        let (wire, stage) = (WireState::Queued, NbdStage::Body);
        Self { token, operation, buffer, sequence, writes_before, wire, stage, done: 0, piece_len: 0, doubtful: None }
    }

    /// Returns to the start of the operation, to be sent over another connection.
    pub(super) fn restart(&mut self) {
        (self.wire, self.stage) = (WireState::Queued, NbdStage::Body);
        (self.done, self.piece_len, self.doubtful) = (0, 0, None);
    }

    /// Returns the part of a finished operation to which its error belongs.
    pub(super) fn failed_at(&self) -> FailedAt {
        let is_sync = self.stage == NbdStage::Sync || self.operation == StoreOp::Flush;
        if is_sync { FailedAt::Sync } else { FailedAt::Body }
    }

    /// Returns whether the operation, once completed, needs a flush to survive loss of the server's cache.
    pub(super) fn needs_flush(&self, abilities: &Abilities) -> bool {
        match self.operation {
            StoreOp::Write { .. } | StoreOp::WriteZeroes { .. } => !self.must_be_durable(abilities),
            // The content of discarded blocks is undefined in any case.
            StoreOp::Read { .. } | StoreOp::Flush | StoreOp::Discard { .. } => false,
        }
    }

    /// Returns whether the operation's result covers everything that was acknowledged before. That is so if it was to
    /// be durable, or if every piece of it made the server sync its file.
    pub(super) fn is_synced(&self, abilities: &Abilities) -> bool {
        self.operation.is_durable() || abilities.fua && self.must_be_durable(abilities)
    }

    /// Returns whether the server need not be asked. Checked when the operation is sent, because after a reconnect the
    /// server may have other abilities.
    pub(super) fn is_void(&self, abilities: &Abilities) -> bool {
        match self.operation {
            StoreOp::Flush => !abilities.flush,
            StoreOp::Discard { .. } => !abilities.trim,
            StoreOp::Read { .. } | StoreOp::Write { .. } | StoreOp::WriteZeroes { .. } => false,
        }
    }

    pub(super) fn next_piece(&mut self, abilities: &Abilities) -> Piece {
        let (start, len) = self.operation.range().unwrap_or_default();
        let offset = start + self.done;
        let remaining = len - self.done;
        let fua = if self.asks_for_fua(abilities) { COMMAND_FUA } else { 0 };
        if matches!(self.operation, StoreOp::WriteZeroes { .. })
            && !abilities.write_zeroes
            && self.stage == NbdStage::Body
        {
            self.stage = NbdStage::WriteZeroes;
        }
        let (command, flags, len_max) = match (self.stage, self.operation) {
            (NbdStage::Sync, _) | (_, StoreOp::Flush) => {
                self.piece_len = 0;
                return Piece { command: Command::Flush, flags: 0, offset: 0, len: 0, payload: Payload::None };
            }
            (NbdStage::WriteZeroes, _) => (Command::Write, fua, abilities.payload_max.min(ZERO_CHUNK_LEN as u64)),
            (_, StoreOp::Read { .. }) => (Command::Read, 0, abilities.payload_max),
            (_, StoreOp::Write { .. }) => (Command::Write, fua, abilities.payload_max),
            (_, StoreOp::Discard { .. }) => (Command::Trim, fua, RANGE_LEN_MAX),
            (_, StoreOp::WriteZeroes { may_unmap, .. }) => {
                let no_hole = if may_unmap { 0 } else { COMMAND_NO_HOLE };
                (Command::WriteZeroes, fua | no_hole, RANGE_LEN_MAX)
            }
        };
        self.piece_len = remaining.min(len_max);
        let payload = match (command, self.stage) {
            (Command::Write, NbdStage::WriteZeroes) => Payload::Zeroes(self.piece_range().len()),
            (Command::Write, _) => Payload::Buffer(self.piece_range()),
            _ => Payload::None,
        };
        Piece { command, flags, offset, len: sizes::short(self.piece_len), payload }
    }

    /// Returns the place for the payload of the reply to the current piece. It is empty unless the operation is a read.
    pub(super) fn reply_payload(&mut self) -> &mut [u8] {
        let range = self.piece_range();
        match (&self.operation, &mut self.buffer) {
            (StoreOp::Read { .. }, Some(buffer)) => buffer.get_mut(range).unwrap_or_default(),
            _ => &mut [],
        }
    }

    /// Advances the task by the server's reply to the current piece.
    pub(super) fn handle_reply(&mut self, errno: Option<i32>, abilities: &Abilities) -> Progress {
        if let Some(errno) = errno {
            return self.handle_error(errno, abilities);
        }
        if let Some(error) = self.doubtful {
            // There is room, so it was the sync that failed.
            self.stage = NbdStage::Sync;
            return Progress::Finished(Err(error));
        }
        self.done += self.piece_len;
        let len = self.operation.range().map_or(0, |(_, len)| len);
        if self.stage == NbdStage::Sync || matches!(self.operation, StoreOp::Flush) {
            return Progress::Finished(Ok(()));
        }
        if self.done == len {
            if abilities.fua || !self.must_be_durable(abilities) {
                return Progress::Finished(Ok(()));
            }
            self.stage = NbdStage::Sync;
        }
        Progress::MoreCalls
    }

    fn handle_error(&mut self, errno: i32, abilities: &Abilities) -> Progress {
        if errno == libc::EOPNOTSUPP && self.stage == NbdStage::Body {
            match self.operation {
                StoreOp::Discard { .. } => return Progress::Finished(Ok(())),
                StoreOp::WriteZeroes { .. } => {
                    self.stage = NbdStage::WriteZeroes;
                    return Progress::MoreCalls;
                }
                StoreOp::Read { .. } | StoreOp::Write { .. } | StoreOp::Flush => {}
            }
        }
        let error = StoreError { errno };
        if is_clean_refusal(error) && self.stage != NbdStage::Sync && self.asks_for_fua(abilities) {
            self.doubtful = Some(error);
            return Progress::MoreCalls;
        }
        Progress::Finished(Err(error))
    }

    fn asks_for_fua(&self, abilities: &Abilities) -> bool {
        abilities.fua && self.doubtful.is_none() && self.must_be_durable(abilities)
    }

    fn must_be_durable(&self, abilities: &Abilities) -> bool {
        self.operation.is_durable() || (self.operation.is_modification() && abilities.write_through)
    }

    /// Returns the current piece's byte range in the buffer.
    fn piece_range(&self) -> Range<usize> {
        sizes::in_memory(self.done)..sizes::in_memory(self.done + self.piece_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_io::buffer::BufferPool;

    const ALL: Abilities = Abilities {
        payload_max: 64 * 1024,
        flush: true,
        fua: true,
        trim: true,
        write_zeroes: true,
        write_through: false,
    };

    fn task(operation: StoreOp) -> NbdTask {
        let buffer = operation.buffer_len().map(|len| BufferPool::new(1 << 20).take(len).unwrap());
        NbdTask::new(1, operation, buffer, 1, 0)
    }

    /// Returns the requests of a task whose pieces all succeed: command, flags, offset, length.
    fn requests(operation: StoreOp, abilities: &Abilities) -> Vec<(Command, u16, u64, u32)> {
        rest_of(task(operation), abilities)
    }

    fn rest_of(mut task: NbdTask, abilities: &Abilities) -> Vec<(Command, u16, u64, u32)> {
        let mut requests = Vec::new();
        loop {
            let piece = task.next_piece(abilities);
            requests.push((piece.command, piece.flags, piece.offset, piece.len));
            match task.handle_reply(None, abilities) {
                Progress::MoreCalls => {}
                Progress::Finished(result) => {
                    result.unwrap();
                    return requests;
                }
            }
        }
    }

    #[test]
    fn long_operations_go_in_pieces_that_the_server_takes() {
        let read = StoreOp::Read { offset: 4096, len: 100 * 1024 };
        assert_eq!(requests(read, &ALL), [(Command::Read, 0, 4096, 65536), (Command::Read, 0, 69632, 36864)]);
        let discard = StoreOp::Discard { offset: 0, len: 3 << 30 };
        assert_eq!(requests(discard, &ALL).len(), 3);
    }

    #[test]
    fn durability_comes_from_fua_or_else_from_a_flush_behind() {
        let write = StoreOp::Write { offset: 0, len: 4096, durable: true };
        assert_eq!(requests(write, &ALL), [(Command::Write, COMMAND_FUA, 0, 4096)]);
        let no_fua = Abilities { fua: false, ..ALL };
        assert_eq!(requests(write, &no_fua), [(Command::Write, 0, 0, 4096), (Command::Flush, 0, 0, 0)]);
        let plain = StoreOp::Write { offset: 0, len: 4096, durable: false };
        assert_eq!(requests(plain, &no_fua), [(Command::Write, 0, 0, 4096)]);
        let write_through = Abilities { write_through: true, ..ALL };
        assert_eq!(requests(plain, &write_through), [(Command::Write, COMMAND_FUA, 0, 4096)]);
    }

    #[test]
    fn zeroes_are_written_where_the_server_cannot_make_them() {
        let zeroes = StoreOp::WriteZeroes { offset: 0, len: 96 * 1024, may_unmap: false, durable: false };
        assert_eq!(requests(zeroes, &ALL), [(Command::WriteZeroes, COMMAND_NO_HOLE, 0, 98304)]);
        let written = [(Command::Write, 0, 0, 65536), (Command::Write, 0, 65536, 32768)];
        assert_eq!(requests(zeroes, &Abilities { write_zeroes: false, ..ALL }), written);
        let mut refused = task(zeroes);
        refused.next_piece(&ALL);
        assert_eq!(refused.handle_reply(Some(libc::EOPNOTSUPP), &ALL), Progress::MoreCalls);
        assert_eq!(refused.next_piece(&ALL).payload, Payload::Zeroes(65536));
    }

    #[test]
    fn an_error_ends_the_operation() {
        let mut task = task(StoreOp::Read { offset: 0, len: 100 * 1024 });
        task.next_piece(&ALL);
        assert_eq!(task.handle_reply(None, &ALL), Progress::MoreCalls);
        task.next_piece(&ALL);
        assert_eq!(task.handle_reply(Some(libc::EIO), &ALL), Progress::Finished(Err(StoreError::IO)));
    }

    #[test]
    fn a_piece_and_its_fua_are_told_apart_by_a_second_piece() {
        let full = StoreError { errno: libc::ENOSPC };
        for (second, at) in [(Some(libc::ENOSPC), FailedAt::Body), (None, FailedAt::Sync)] {
            let mut task = task(StoreOp::Write { offset: 0, len: 100 * 1024, durable: true });
            task.next_piece(&ALL);
            assert_eq!(task.handle_reply(None, &ALL), Progress::MoreCalls);
            assert_eq!(task.next_piece(&ALL).flags, COMMAND_FUA);
            assert_eq!(task.handle_reply(Some(libc::ENOSPC), &ALL), Progress::MoreCalls);
            let again = task.next_piece(&ALL);
            assert_eq!((again.flags, again.offset), (0, 64 * 1024), "the same piece");
            assert_eq!(task.handle_reply(second, &ALL), Progress::Finished(Err(full)), "it never succeeds");
            assert_eq!(task.failed_at(), at);
        }
        let mut lost = task(StoreOp::Write { offset: 0, len: 4096, durable: true });
        lost.next_piece(&ALL);
        assert_eq!(lost.handle_reply(Some(libc::EIO), &ALL), Progress::Finished(Err(StoreError::IO)));
        let mut plain = task(StoreOp::Write { offset: 0, len: 4096, durable: false });
        plain.next_piece(&ALL);
        assert_eq!(plain.handle_reply(Some(libc::ENOSPC), &ALL), Progress::Finished(Err(full)));
        assert_eq!(plain.failed_at(), FailedAt::Body);
    }

    #[test]
    fn the_error_of_a_flush_behind_a_write_belongs_to_the_sync() {
        let no_fua = Abilities { fua: false, ..ALL };
        let full = Progress::Finished(Err(StoreError { errno: libc::ENOSPC }));
        let mut task = task(StoreOp::Write { offset: 0, len: 4096, durable: true });
        task.next_piece(&no_fua);
        assert_eq!(task.failed_at(), FailedAt::Body);
        assert_eq!(task.handle_reply(None, &no_fua), Progress::MoreCalls);
        task.next_piece(&no_fua);
        assert_eq!(task.handle_reply(Some(libc::ENOSPC), &no_fua), full);
        assert_eq!(task.failed_at(), FailedAt::Sync);
        assert_eq!(self::task(StoreOp::Flush).failed_at(), FailedAt::Sync);
    }

    /// However many pieces were done before, and whatever abilities the next server has.
    #[test]
    fn an_operation_that_begins_again_is_done_in_full() {
        let servers = [
            ALL,
            Abilities { fua: false, ..ALL },
            Abilities { write_zeroes: false, ..ALL },
            Abilities { payload_max: 4096, fua: false, write_zeroes: false, ..ALL },
        ];
        let len = 200 * 1024;
        for operation in [
            StoreOp::Read { offset: 0, len },
            StoreOp::Write { offset: 0, len, durable: false },
            StoreOp::Write { offset: 0, len, durable: true },
            StoreOp::WriteZeroes { offset: 0, len: len.into(), may_unmap: true, durable: true },
            StoreOp::Discard { offset: 0, len: 3 << 30 },
            StoreOp::Flush,
        ] {
            for (first, then) in servers.iter().flat_map(|first| servers.iter().map(move |then| (first, then))) {
                for done in 0..requests(operation, first).len() {
                    let mut task = task(operation);
                    for _ in 0..done {
                        task.next_piece(first);
                        assert_eq!(task.handle_reply(None, first), Progress::MoreCalls);
                    }
                    task.next_piece(first);
                    task.restart();
                    assert_eq!(rest_of(task, then), requests(operation, then), "{operation:?} after {done} pieces");
                }
            }
        }
    }
}
