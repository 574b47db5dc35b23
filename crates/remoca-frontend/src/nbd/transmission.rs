//! The server's side of the transmission phase for one client, without I/O: bytes in, pieces of requests out; pieces that were
//! executed in, bytes out.
//!
//! Owned by `export`. A request is judged when its header is there, and handed out in pieces that fit the store's buffers.
//! The payload of a write is received into the buffers that its pieces carry; the data of a read leave in the buffers in
//! which they came. Invariants, checked by [`Transmission::check`] after every step of the property tests and the fuzzer:
//! 1. Nothing is allocated before the length that asks for it was checked; buffers come from pools with a limit.
//! 2. At most [`REQUESTS_MAX`] requests are open; above that, or without a buffer, no more input is parsed.
//! 3. Every request is answered exactly once, after all of its pieces came back.

use super::judge::{error_code, judge};
use super::offer::ExportGeometry;
use super::open::{Form, Open};
use super::outbox::Outbox;
use super::pieces::{Kind, Piece, Rest};
use super::staging::Staging;
use crate::request::{Operation, Outcome};
use remoca_core::engine::DiskError;
use remoca_io::buffer::{BufferPool, IoBuffer};
use remoca_protocol::nbd::{
    COMMAND_DONT_FRAGMENT, COMMAND_FUA, COMMAND_NO_HOLE, Command, PAYLOAD_MAX, REQUEST_HEADER_LEN, Request,
};
use slab::Slab;
use std::collections::VecDeque;

/// Requests of one client that are executed at a time, or are waiting to be.
pub(super) const REQUESTS_MAX: usize = 128;
/// Data of one client, but for long reads ...
pub(super) const MEMORY_MAX: usize = 8 << 20;
/// ... above this whose answer is in one run: their data are all held at the same time, ...
const WHOLE_MAX: u32 = 4 << 20;
/// ... and all clients share this much for them: four of the longest.
pub(super) const SHARED_MEMORY_MAX: usize = 4 * (34 << 20);
/// Maximum bytes of headers that are queued for a client that takes no answers.
const OVERHEAD_MAX: usize = 16 << 10;
/// An idle client keeps this much memory at most.
const IDLE_MEMORY_MAX: usize = 1 << 20;
/// Why a client is not served any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It said goodbye.
    Disconnect,
    Malformed(&'static str),
}

enum State {
    Header,
    HandOut(Rest),
    /// A write whose payload comes; the buffer of the next piece, and how much of it is filled.
    Payload {
        rest: Rest,
        piece: Option<(IoBuffer, usize)>,
    },
    /// The payload of a refused write.
    Skip {
        left: u32,
        cookie: u64,
        error: i32,
    },
}

/// What one step of the parser came to.
enum Step {
    Piece(Piece),
    Again,
    /// More bytes are needed.
    Input,
    /// Something has to be answered or sent first.
    Room,
}

/// A client that left without taking its answers leaves no memory of the shared pool behind.
struct GiveBack(BufferPool);

impl Drop for GiveBack {
    fn drop(&mut self) {
        self.0.release_free();
    }
}

/// The transmission phase of one client.
pub(super) struct Transmission {
    geometry: ExportGeometry,
    structured: bool,
    state: State,
    open: Slab<Open>,
    pool: BufferPool,
    shared_pool: BufferPool,
    staging: Staging,
    pub(super) outbox: Outbox,
    /// Requests that are handed out again.
    repeats: VecDeque<Rest>,
    /// The last [`Self::pop`] had to stop for want of room.
    stalled: bool,
    end: Option<End>,
    /// Last, so that it is dropped when the buffers of the others have come back.
    _give_back: GiveBack,
}

impl Transmission {
    /// Continues where the negotiation ended, with what it left in both directions.
    pub(super) fn new(
        geometry: ExportGeometry,
        structured: bool,
        staging: Staging,
        outbox: Outbox,
        shared_pool: BufferPool,
    ) -> Self {
        let pool = BufferPool::new(MEMORY_MAX);
        let (state, open) = (State::Header, Slab::new());
        let give_back = GiveBack(shared_pool.clone());
        Self {
            geometry,
            structured,
            state,
            open,
            pool,
            shared_pool,
            staging,
            outbox,
            repeats: VecDeque::new(),
            stalled: false,
            end: None,
            _give_back: give_back,
        }
    }

    /// Returns where the next bytes go; `None` while none are wanted.
    pub(super) fn room(&mut self) -> Option<&mut [u8]> {
        if self.end.is_some() {
            return None;
        }
        match &mut self.state {
            State::Payload { piece: Some((buffer, filled)), .. } if self.staging.pending().is_empty() => {
                Some(&mut buffer[*filled..])
            }
            _ => self.staging.room(),
        }
    }

    /// Notes that bytes were put at the start of the room.
    pub(super) fn received(&mut self, count: usize) {
        match &mut self.state {
            State::Payload { piece: Some((_, filled)), .. } if self.staging.pending().is_empty() => *filled += count,
            _ => self.staging.received(count),
        }
    }

    /// Notes that bytes of the outbox were sent. Returns whether [`Self::pop`] may get further now.
    pub(super) fn sent(&mut self, count: usize) -> bool {
        self.outbox.consume(count);
        if self.open.is_empty() && self.outbox.is_empty() {
            self.shared_pool.release_free();
            if self.pool.allocated_bytes() > IDLE_MEMORY_MAX {
                self.pool.release_free();
            }
        }
        std::mem::take(&mut self.stalled)
    }

    /// Returns why no more requests come, if so.
    pub(super) fn end(&self) -> Option<End> {
        self.end
    }

    /// Returns the next piece to execute. `None`: call again after more was received, or [`Self::complete`] or
    /// [`Self::sent`] say so.
    pub(super) fn pop(&mut self) -> Option<Piece> {
        if let Some(rest) = self.repeats.front_mut() {
            let buffer = rest.buffers.pop_front();
            let piece = rest.next(buffer);
            if rest.is_empty() {
                self.repeats.pop_front();
            }
            return Some(piece);
        }
        while self.end.is_none() {
            let step = match std::mem::replace(&mut self.state, State::Header) {
                State::Header => self.take_header(),
                State::HandOut(rest) => self.hand_out(rest),
                State::Payload { rest, piece } => self.take_payload(rest, piece),
                State::Skip { left, cookie, error } => self.skip(left, cookie, error),
            };
            match step {
                Step::Piece(piece) => return Some(piece),
                Step::Again => {}
                Step::Input => return None,
                Step::Room => {
                    self.stalled = true;
                    return None;
                }
            }
        }
        None
    }

    fn take_header(&mut self) -> Step {
        if self.open.len() >= REQUESTS_MAX || self.outbox.overhead() >= OVERHEAD_MAX {
            return Step::Room;
        }
        let Some(header) = self.staging.take::<REQUEST_HEADER_LEN>() else { return Step::Input };
        let Some(request) = Request::decode(&header) else {
            return self.end_with(End::Malformed("what it sends is no request"));
        };
        if request.command == Command::Disconnect {
            return self.end_with(End::Disconnect);
        }
        if request.command == Command::Write && request.len > PAYLOAD_MAX {
            return self.end_with(End::Malformed("a write of more than 32 MiB"));
        }
        match judge(&request, &self.geometry, self.structured) {
            Ok(()) => self.begin(&request),
            Err(error) if request.command == Command::Write => {
                self.state = State::Skip { left: request.len, cookie: request.cookie, error };
                Step::Again
            }
            Err(error) => {
                self.refuse(&request, error);
                Step::Again
            }
        }
    }

    fn end_with(&mut self, end: End) -> Step {
        self.end = Some(end);
        Step::Input
    }

    fn refuse(&mut self, request: &Request, error: i32) {
        match request.command {
            Command::Read if self.structured => self.outbox.push_error_chunk(request.cookie, error_code(error)),
            _ => self.outbox.push_simple_reply(request.cookie, error_code(error)),
        }
    }

    /// Opens a request that was found good.
    fn begin(&mut self, request: &Request) -> Step {
        let durable = request.flags & COMMAND_FUA != 0;
        let kind = match request.command {
            Command::Read => Kind::Read,
            Command::Write => Kind::Write,
            // There is no durable discard; zeroes give the space back as well. A trim need not do anything.
            Command::Trim if durable && self.geometry.can_write_zeroes => Kind::Zero { unmap: true },
            Command::Trim if !durable => Kind::Trim,
            Command::WriteZeroes => Kind::Zero { unmap: request.flags & COMMAND_NO_HOLE == 0 },
            Command::Flush => return self.begin_flush(request.cookie),
            Command::Trim | Command::Disconnect | Command::Other(_) => {
                self.outbox.push_simple_reply(request.cookie, 0);
                return Step::Again;
            }
        };
        let range = request.offset..request.offset + u64::from(request.len);
        // Its data are not held until all of them are written, so no piece may be lost once it is done.
        let durable = durable || self.geometry.may_forget && kind == Kind::Write && request.len > WHOLE_MAX;
        let wants_one = request.flags & COMMAND_DONT_FRAGMENT != 0;
        let form = match kind {
            Kind::Read if self.structured && !wants_one => Form::Chunks,
            Kind::Read => Form::Whole { chunk: self.structured, data: Vec::new(), length: request.len },
            Kind::Write | Kind::Trim | Kind::Zero { .. } => Form::Plain,
        };
        let entry = self.open.vacant_entry();
        let rest = Rest::new(entry.key(), kind, durable, range);
        entry.insert(Open::new(request.cookie, form, request.offset, &rest, self.geometry.may_forget));
        self.state = match kind {
            Kind::Write => State::Payload { rest, piece: None },
            Kind::Read | Kind::Trim | Kind::Zero { .. } => State::HandOut(rest),
        };
        Step::Again
    }

    fn begin_flush(&mut self, cookie: u64) -> Step {
        let slot = self.open.insert(Open::flush(cookie));
        Step::Piece(Piece::flush(slot))
    }

    /// Returns the next piece of a request whose payload, if it has one, is not needed for it.
    fn hand_out(&mut self, mut rest: Rest) -> Step {
        if rest.kind == Kind::Read && !self.take_buffers(&mut rest) {
            if self.pool_of(rest.slot).1 && self.open.len() == 1 && self.outbox.is_empty() {
                // Others have the memory, and nothing of ours would tell when they give it back.
                return self.give_up(rest.slot);
            }
            self.state = State::HandOut(rest);
            return Step::Room;
        }
        let buffer = rest.buffers.pop_front();
        let piece = rest.next(buffer);
        if !rest.is_empty() {
            self.state = State::HandOut(rest);
        }
        Step::Piece(piece)
    }

    /// Gets a buffer for the next piece of a read; for all pieces at once if the answer needs all of them: two such
    /// reads with half of their buffers each would wait for ever. False if there are not enough.
    fn take_buffers(&mut self, rest: &mut Rest) -> bool {
        if !rest.buffers.is_empty() {
            return true;
        }
        let is_whole = self.open[rest.slot].whole_length().is_some();
        let count = if is_whole { usize::MAX } else { 1 };
        let (pool, _) = self.pool_of(rest.slot);
        match rest.lengths().take(count).map(|length| pool.take(length)).collect::<Option<_>>() {
            Some(buffers) => rest.buffers = buffers,
            None => return false,
        }
        true
    }

    /// Returns where the buffers of a read come from, and whether that is shared.
    fn pool_of(&self, slot: usize) -> (&BufferPool, bool) {
        let is_long = self.open[slot].whole_length().is_some_and(|length| length > WHOLE_MAX);
        (if is_long { &self.shared_pool } else { &self.pool }, is_long)
    }

    fn give_up(&mut self, slot: usize) -> Step {
        let mut request = self.open.remove(slot);
        request.fail(DiskError(libc::ENOMEM));
        request.answer(&mut self.outbox);
        Step::Again
    }

    fn take_payload(&mut self, mut rest: Rest, piece: Option<(IoBuffer, usize)>) -> Step {
        let length = rest.lengths().next().unwrap_or(0);
        let Some((mut buffer, filled)) = piece.or_else(|| Some((self.pool.take(length)?, 0))) else {
            self.state = State::Payload { rest, piece: None };
            return Step::Room;
        };
        let filled = filled + self.staging.move_to(&mut buffer[filled..]);
        if filled < length {
            self.state = State::Payload { rest, piece: Some((buffer, filled)) };
            return Step::Input;
        }
        let piece = rest.next(Some(buffer));
        if !rest.is_empty() {
            self.state = State::Payload { rest, piece: None };
        }
        Step::Piece(piece)
    }

    fn skip(&mut self, left: u32, cookie: u64, error: i32) -> Step {
        let left = self.staging.skip(left);
        if left > 0 {
            self.state = State::Skip { left, cookie, error };
            return Step::Input;
        }
        self.outbox.push_simple_reply(cookie, error_code(error));
        Step::Again
    }

    /// Takes a piece back that was executed. The data of a read are in its buffer. True if [`Self::pop`] may get further now.
    pub(super) fn complete(&mut self, piece: Piece, outcome: Outcome) -> bool {
        let outcome = match (&piece.operation, &piece.buffer, outcome) {
            (Operation::Read { .. }, None, Outcome::Done) => Outcome::BROKEN,
            (_, _, outcome) => outcome,
        };
        let slot = piece.slot;
        let request = &mut self.open[slot];
        request.take_back(piece, outcome, &mut self.outbox);
        if request.waits() {
            return std::mem::take(&mut self.stalled);
        }
        if let Some(rest) = request.repeat(slot) {
            self.repeats.push_back(rest);
            return true;
        }
        self.open.remove(slot).answer(&mut self.outbox);
        std::mem::take(&mut self.stalled)
    }

    /// Notes that the disk may have lost what it has done of requests that are open.
    pub(super) fn repeat_parts(&mut self) {
        self.open.iter_mut().for_each(|(_, request)| request.repeat_parts());
    }

    #[cfg(test)]
    pub(super) fn cookie_of(&self, piece: &Piece) -> u64 {
        self.open[piece.slot].cookie()
    }

    /// Returns whether everything was answered, but for a request whose bytes have not all come.
    pub(super) fn is_quiet(&self) -> bool {
        let coming = usize::from(matches!(self.state, State::Payload { .. }));
        self.outbox.is_empty() && self.open.len() <= coming
    }

    /// Asserts the invariants that can be seen from inside.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn check(&self) {
        assert!(self.open.len() <= REQUESTS_MAX && self.pool.allocated_bytes() <= MEMORY_MAX);
        // One request may add its answer to an outbox that has just not reached its limit.
        assert!(self.outbox.overhead() <= OVERHEAD_MAX + (REQUESTS_MAX + 1) * 64 + 34 * 28 * REQUESTS_MAX);
        assert!(self.open.iter().all(|(_, request)| request.waits()), "a request was not answered");
    }
}
