//! 512-byte sectors on a store with larger ones, as a state machine without I/O.
//!
//! Owned by [`super::aligned`]; A block here is the larger sector of the store below. Operations that fit the blocks
//! pass unchanged. An unaligned read reads whole blocks and copies from them. An unaligned write reads the blocks it
//! touches in part, changes them and writes them back. Long operations are split into chunks. Invariants
//! (property-tested):
//! 1. Every request to the store below is aligned to its blocks.
//! 2. While a block is being rewritten, no other modification of it is in flight: neither may undo the other.
//! 3. Memory for copies is bounded. Before a task starts a chunk, it takes all memory that the chunk needs, or waits.

use remoca_io::sizes;
use std::collections::VecDeque;
use std::ops::Range;

use slab::Slab;

use super::range_lock::{Grant, Mode, RangeLocks};
use super::{StoreCompletion, StoreError, StoreOp};
use remoca_io::buffer::{BufferPool, IoBuffer};

/// Block and chunk sizes, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// The block of the store below: a power of two.
    pub(super) block: u64,
    /// Longest copy: a multiple of the block.
    pub(super) chunk_max: u64,
}

pub(super) struct SectorMachine {
    limits: Limits,
    /// Memory for copies. Its limit is at least one chunk and one block.
    copies: BufferPool,
    tasks: Slab<Task>,
    /// Modifications by task key, each with the blocks that it touches.
    ranges: RangeLocks,
    runnable: VecDeque<usize>,
    /// Tasks that wait for memory for their next chunk.
    starving: VecDeque<usize>,
    completed: VecDeque<StoreCompletion>,
    granted: Vec<usize>,
}

/// A request to the store below; its token comes back in the completion.
pub(super) struct AlignedRequest {
    pub(super) token: u64,
    pub(super) operation: StoreOp,
    pub(super) buffer: Option<IoBuffer>,
}

struct Task {
    token: u64,
    operation: StoreOp,
    /// The caller's buffer, unless the store below has it.
    buffer: Option<IoBuffer>,
    /// Where the next chunk begins; everything before it is done.
    cursor: u64,
    step: Step,
    chunk: Option<Chunk>,
    /// The finished part of the operation may be lost: the task restarts before it continues.
    again: bool,
}

/// The next or current request of a task to the store below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The caller's operation unchanged, or a discard reduced to whole blocks.
    Pass,
    NextChunk,
    ReadBlocks,
    ReadHead,
    ReadTail,
    WriteBlocks,
    ZeroBlocks {
        end: u64,
    },
}

/// A part of an unaligned operation that is copied at once.
struct Chunk {
    /// The range that the caller requested.
    inner: Range<u64>,
    /// The same, widened to blocks.
    outer: Range<u64>,
    copy: Option<IoBuffer>,
    /// For reading the first and the last block of a copy that is longer than one.
    edge: Option<IoBuffer>,
    is_one_block: bool,
}

impl SectorMachine {
    pub(super) fn new(limits: Limits, copies: BufferPool) -> Self {
        Self {
            limits,
            copies,
            tasks: Slab::new(),
            ranges: RangeLocks::default(),
            runnable: VecDeque::new(),
            starving: VecDeque::new(),
            completed: VecDeque::new(),
            granted: Vec::new(),
        }
    }

    /// Starts a valid operation with 512-byte alignment.
    pub(super) fn submit(&mut self, token: u64, operation: StoreOp, buffer: Option<IoBuffer>) {
        let Some((offset, len)) = operation.range() else { return self.start(token, operation, buffer, Step::Pass) };
        let range = offset..offset + len;
        let is_aligned = self.widen(&range) == range;
        match operation {
            StoreOp::Discard { .. } => {
                let whole = self.narrow(&range);
                if whole.is_empty() {
                    self.completed.push_back(StoreCompletion { token, result: Ok(()), buffer });
                    return;
                }
                let operation = StoreOp::Discard { offset: whole.start, len: whole.end - whole.start };
                self.start(token, operation, buffer, Step::Pass);
            }
            _ if is_aligned => self.start(token, operation, buffer, Step::Pass),
            _ => self.start(token, operation, buffer, Step::NextChunk),
        }
    }

    pub(super) fn next_request(&mut self) -> Option<AlignedRequest> {
        loop {
            let key = self.runnable.pop_front()?;
            if let Some(request) = self.request_for(key) {
                return Some(request);
            }
        }
    }

    /// Advances the task whose request the store has completed, and finishes it after an error or its last step.
    pub(super) fn handle_completion(&mut self, completion: StoreCompletion) {
        let key = sizes::in_memory(completion.token);
        let task = &mut self.tasks[key];
        match task.step {
            Step::Pass => task.buffer = completion.buffer,
            Step::ReadHead | Step::ReadTail => {
                if let Some(chunk) = &mut task.chunk {
                    chunk.take_back_read(completion.buffer, task.step);
                }
            }
            Step::ReadBlocks | Step::WriteBlocks => {
                if let Some(chunk) = &mut task.chunk {
                    chunk.copy = completion.buffer;
                }
            }
            Step::NextChunk | Step::ZeroBlocks { .. } => {}
        }
        match completion.result {
            Err(error) => self.finish(key, Err(error)),
            Ok(()) if task.again => self.runnable.push_back(key),
            Ok(()) if task.advance() => self.finish(key, Ok(())),
            Ok(()) => self.runnable.push_back(key),
        }
    }

    /// Restarts all modifications that go in steps, because the store below may have lost their finished parts. Each
    /// restarts once its request to the store below is completed.
    pub(super) fn repeat_modifications(&mut self) {
        for (_, task) in &mut self.tasks {
            task.again |= task.operation.is_modification() && task.step != Step::Pass;
        }
    }

    pub(super) fn next_completion(&mut self) -> Option<StoreCompletion> {
        self.completed.pop_front()
    }

    fn start(&mut self, token: u64, operation: StoreOp, buffer: Option<IoBuffer>, step: Step) {
        let (offset, len) = operation.range().unwrap_or_default();
        let key = self.tasks.insert(Task { token, operation, buffer, cursor: offset, step, chunk: None, again: false });
        if operation.is_modification() {
            let mode = if step == Step::Pass { Mode::Shared } else { Mode::Exclusive };
            if self.ranges.acquire(key, self.widen(&(offset..offset + len)), mode) == Grant::Waits {
                return;
            }
        }
        self.runnable.push_back(key);
    }

    /// Returns the next request of a runnable task, or `None` if the task has to wait for memory.
    fn request_for(&mut self, key: usize) -> Option<AlignedRequest> {
        self.tasks[key].restart_if_due();
        if self.tasks[key].step == Step::NextChunk && !self.begin_chunk(key) {
            self.starving.push_back(key);
            return None;
        }
        let task = &mut self.tasks[key];
        let (operation, buffer) = match &mut task.chunk {
            Some(chunk) => chunk.request(task.step, self.limits.block, task.operation.is_durable()),
            None => (task.whole_blocks(), task.buffer.take()),
        };
        Some(AlignedRequest { token: key as u64, operation, buffer })
    }

    /// Chooses the next step of a task and takes the memory for it. Returns `false` if there is not enough memory.
    fn begin_chunk(&mut self, key: usize) -> bool {
        let Limits { block, chunk_max } = self.limits;
        let (cursor, operation) = (self.tasks[key].cursor, self.tasks[key].operation);
        let end = operation.range().map_or(cursor, |(offset, len)| offset + len);
        let is_zeroing = matches!(operation, StoreOp::WriteZeroes { .. });
        let whole = self.narrow(&(cursor..end));
        if is_zeroing && whole.start == cursor && !whole.is_empty() {
            self.tasks[key].step = Step::ZeroBlocks { end: whole.end };
            return true;
        }
        // Zeroes are copied only into partial blocks.
        let len_max = if is_zeroing { block } else { chunk_max };
        let inner = cursor..end.min(cursor - cursor % block + len_max);
        let outer = self.widen(&inner);
        let Ok(copy_len) = usize::try_from(outer.end - outer.start) else { return false };
        let is_read = matches!(operation, StoreOp::Read { .. });
        let is_one_block = outer.end - outer.start == block;
        let needs_edge = !is_read && inner != outer && !is_one_block;

        let Some(copy) = self.copies.take(copy_len) else { return false };
        let edge = if needs_edge { usize::try_from(block).ok().and_then(|len| self.copies.take(len)) } else { None };
        if needs_edge && edge.is_none() {
            return false;
        }
        let task = &mut self.tasks[key];
        task.step = match is_read {
            true => Step::ReadBlocks,
            false if inner.start != outer.start => Step::ReadHead,
            false if inner.end != outer.end => Step::ReadTail,
            false => Step::WriteBlocks,
        };
        task.chunk = Some(Chunk { inner, outer, copy: Some(copy), edge, is_one_block });
        if task.step == Step::WriteBlocks {
            task.fill_copy();
        }
        true
    }

    fn finish(&mut self, key: usize, result: Result<(), StoreError>) {
        let task = self.tasks.remove(key);
        if task.operation.is_modification() {
            self.ranges.release(key, &mut self.granted);
            self.runnable.extend(self.granted.drain(..));
        }
        drop(task.chunk);
        self.completed.push_back(StoreCompletion { token: task.token, result, buffer: task.buffer });
        // Its copies are free now. Tasks that wait for memory try again, the longest waiting first.
        self.runnable.extend(self.starving.drain(..));
    }

    fn widen(&self, range: &Range<u64>) -> Range<u64> {
        let block = self.limits.block;
        range.start - range.start % block..range.end.next_multiple_of(block)
    }

    fn narrow(&self, range: &Range<u64>) -> Range<u64> {
        let block = self.limits.block;
        range.start.next_multiple_of(block)..range.end - range.end % block
    }
}

impl Task {
    fn restart_if_due(&mut self) {
        if std::mem::take(&mut self.again) {
            self.cursor = self.operation.range().map_or(self.cursor, |(offset, _)| offset);
            (self.step, self.chunk) = (Step::NextChunk, None);
        }
    }

    /// Advances to the next step after one that succeeded. Returns `true` when the whole operation is done.
    fn advance(&mut self) -> bool {
        let end = self.operation.range().map_or(0, |(offset, len)| offset + len);
        let chunk_ends = self.chunk.as_ref().map(|chunk| (chunk.inner.end, chunk.has_partial_tail()));
        match (self.step, chunk_ends) {
            (Step::ReadHead, Some((_, true))) => {
                self.step = Step::ReadTail;
                return false;
            }
            (Step::ReadHead | Step::ReadTail, _) => {
                self.fill_copy();
                self.step = Step::WriteBlocks;
                return false;
            }
            (Step::ReadBlocks, Some((chunk_end, _))) => {
                self.empty_copy();
                self.cursor = chunk_end;
            }
            (Step::WriteBlocks, Some((chunk_end, _))) => self.cursor = chunk_end,
            (Step::ZeroBlocks { end }, _) => self.cursor = end,
            (Step::Pass | Step::NextChunk | Step::ReadBlocks | Step::WriteBlocks, _) => return true,
        }
        self.chunk = None;
        self.step = Step::NextChunk;
        self.cursor == end
    }

    /// Returns the request of a step that needs no copy.
    fn whole_blocks(&self) -> StoreOp {
        match (self.step, self.operation) {
            (Step::ZeroBlocks { end }, StoreOp::WriteZeroes { may_unmap, durable, .. }) => {
                StoreOp::WriteZeroes { offset: self.cursor, len: end - self.cursor, may_unmap, durable }
            }
            _ => self.operation,
        }
    }

    /// Copies the caller's data, or zeroes, into the copy of the blocks.
    fn fill_copy(&mut self) {
        let Some((mine, copied)) = self.overlap() else { return };
        let Some(copy) = self.chunk.as_mut().and_then(|chunk| chunk.copy.as_mut()) else { return };
        match &self.buffer {
            Some(buffer) => copy[copied].copy_from_slice(&buffer[mine]),
            None => copy[copied].fill(0),
        }
    }

    /// Copies the data that were read from the copy of the blocks to the caller's buffer.
    fn empty_copy(&mut self) {
        let Some((mine, copied)) = self.overlap() else { return };
        let Some(copy) = self.chunk.as_ref().and_then(|chunk| chunk.copy.as_ref()) else { return };
        if let Some(buffer) = &mut self.buffer {
            buffer[mine].copy_from_slice(&copy[copied]);
        }
    }

    /// Returns the chunk's byte range in the caller's buffer and in the copy.
    fn overlap(&self) -> Option<(Range<usize>, Range<usize>)> {
        let (offset, _) = self.operation.range()?;
        let chunk = self.chunk.as_ref()?;
        let from = |origin: u64| {
            let at = |position: u64| usize::try_from(position - origin).ok();
            Some(at(chunk.inner.start)?..at(chunk.inner.end)?)
        };
        Some((from(offset)?, from(chunk.outer.start)?))
    }
}

impl Chunk {
    /// Returns whether the last block has to be read separately.
    fn has_partial_tail(&self) -> bool {
        self.inner.end != self.outer.end && !self.is_one_block
    }

    fn request(&mut self, step: Step, block: u64, durable: bool) -> (StoreOp, Option<IoBuffer>) {
        let Range { start, end } = self.outer;
        match step {
            Step::ReadHead | Step::ReadTail => {
                let offset = if step == Step::ReadHead { start } else { end - block };
                let buffer = if self.is_one_block { self.copy.take() } else { self.edge.take() };
                (StoreOp::Read { offset, len: sizes::short(block) }, buffer)
            }
            Step::WriteBlocks => {
                (StoreOp::Write { offset: start, len: sizes::short(end - start), durable }, self.copy.take())
            }
            Step::Pass | Step::NextChunk | Step::ReadBlocks | Step::ZeroBlocks { .. } => {
                (StoreOp::Read { offset: start, len: sizes::short(end - start) }, self.copy.take())
            }
        }
    }

    /// Puts back the buffer of an edge's read, and copies the edge.
    fn take_back_read(&mut self, buffer: Option<IoBuffer>, step: Step) {
        let Some(copy) = &mut self.copy else {
            self.copy = buffer;
            return;
        };
        if let Some(edge) = &buffer {
            let start = if step == Step::ReadHead { 0 } else { copy.len() - edge.len() };
            copy[start..start + edge.len()].copy_from_slice(edge);
        }
        self.edge = buffer;
    }
}

#[cfg(test)]
#[path = "sector_machine_tests.rs"]
mod tests;
