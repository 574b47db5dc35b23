//! The server's side of the transmission phase for one client, without I/O. It turns received bytes into pieces of
//! requests, and executed pieces into bytes to send.
//!
//! Owned by `export`. A request is checked when its header has been received, and handed out in pieces that fit the
//! store's buffers. The payload of a write is received into the buffers that its pieces carry; the data of a read are
//! sent from the buffers in which they came. Invariants, checked by [`Transmission::check`] after every step of the
//! property tests and the fuzzer:
//! 1. No memory is allocated before the requested length is checked; buffers come from pools with a limit.
//! 2. At most [`REQUESTS_MAX`] requests are open; above that, or without a buffer, no more input is parsed.
//! 3. Every request is answered exactly once, after all of its pieces came back.

mod passing;

pub(super) use passing::Passed;

use super::judge::{error_code, judge};
use super::offer::ExportGeometry;
use super::open::{Form, Open};
use super::outbox::Outbox;
use super::pieces::{Kind, Piece, Rest};
use super::staging::Staging;
use crate::request::{Operation, Outcome};
use remoca_core::engine::DiskError;
use remoca_io::buffer::{BufferPool, IoBuffer};
use remoca_protocol::guests::Offer;
use remoca_protocol::nbd::{
    COMMAND_DONT_FRAGMENT, COMMAND_FUA, COMMAND_NO_HOLE, Command, PAYLOAD_MAX, REQUEST_HEADER_LEN, Request,
};
use slab::Slab;
use std::collections::VecDeque;

/// The most requests of one client that are executed or wait for it at a time.
pub(super) const REQUESTS_MAX: usize = 128;
/// The most bytes of data of one client, except for long reads ...
pub(super) const MEMORY_MAX: usize = 8 << 20;
/// ... above this length that are answered in one run: their data are all held at the same time, ...
const WHOLE_MAX: u32 = 4 << 20;
/// ... and all clients share this many bytes for them: enough for four of the longest.
pub(super) const SHARED_MEMORY_MAX: usize = 4 * (34 << 20);
/// The most bytes of headers that are queued for a client that receives no answers.
const OVERHEAD_MAX: usize = 16 << 10;
/// The most bytes of memory that an idle client keeps.
const IDLE_MEMORY_MAX: usize = 1 << 20;

/// Why a client is no longer served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The client sent a disconnect request.
    Disconnect,
    Malformed(&'static str),
}

enum State {
    Header,
    HandOut(Rest),
    /// A write whose payload is being received; the buffer of the next piece, and how many bytes of it are filled.
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

/// The result of one step of the parser.
enum Step {
    Piece(Piece),
    Again,
    /// More bytes are needed.
    Input,
    /// A request has to be answered or bytes have to be sent first.
    Room,
}

/// Releases the free buffers of the shared pool on drop, also if the client left without receiving its answers.
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
    /// What the client was told when it chose the export.
    offered: Offer,
    state: State,
    open: Slab<Open>,
    pool: BufferPool,
    shared_pool: BufferPool,
    staging: Staging,
    pub(super) outbox: Outbox,
    /// Requests that are handed out again.
    repeats: VecDeque<Rest>,
    /// The last [`Self::pop`] had to stop for lack of room.
    stalled: bool,
    end: Option<End>,
    /// The last field, so that it is dropped after the buffers in the other fields have returned to the pool.
    _give_back: GiveBack,
}

impl Transmission {
    /// Continues after the negotiation, with the bytes that it left in both directions.
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
            offered: geometry.offer_to(structured),
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

    /// Returns whether the client would be told more if it connected again.
    pub(super) fn has_news(&self) -> bool {
        self.geometry.offer_to(self.structured).adds_to(&self.offered)
    }

    /// Returns the place for the next bytes, or `None` while none are wanted.
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

    /// Adds the `count` bytes at the start of the room to the payload, or to the staged bytes.
    pub(super) fn received(&mut self, count: usize) {
        match &mut self.state {
            State::Payload { piece: Some((_, filled)), .. } if self.staging.pending().is_empty() => *filled += count,
            _ => self.staging.received(count),
        }
    }

    /// Removes `count` sent bytes from the outbox, and may free buffers. Returns whether [`Self::pop`] may make
    /// progress.
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

    /// Returns why there are no more requests, or `None` if there may be more.
    pub(super) fn end(&self) -> Option<End> {
        self.end
    }

    /// Returns the next piece to execute. If it returns `None`, call it again after more bytes were received, or when
    /// [`Self::complete`] or [`Self::sent`] returns true.
    pub(super) fn pop(&mut self) -> Option<Piece> {
        self.next(true)
    }

    fn next(&mut self, begins: bool) -> Option<Piece> {
        if let Some(rest) = self.repeats.front_mut() {
            let buffer = rest.buffers.pop_front();
            let piece = rest.next(buffer);
            if rest.is_empty() {
                self.repeats.pop_front();
            }
            return Some(piece);
        }
        while self.end.is_none() && (begins || self.has_begun()) {
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
        if self.open.len() >= REQUESTS_MAX || self.outbox.is_full(OVERHEAD_MAX, MEMORY_MAX) {
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
                match request.command == Command::Read && self.structured {
                    true => self.outbox.push_error_chunk(request.cookie, error_code(error)),
                    false => self.outbox.push_simple_reply(request.cookie, error_code(error)),
                }
                Step::Again
            }
        }
    }

    fn end_with(&mut self, end: End) -> Step {
        self.end = Some(end);
        Step::Input
    }

    /// Opens a request that passed the checks.
    fn begin(&mut self, request: &Request) -> Step {
        let durable = request.flags & COMMAND_FUA != 0;
        let kind = match request.command {
            Command::Read => Kind::Read,
            Command::Write => Kind::Write,
            // There is no durable discard. Writing zeroes frees the space as well. A trim need not do anything.
            Command::Trim if durable && self.geometry.can_write_zeroes => Kind::Zero { unmap: true },
            Command::Trim if !durable => Kind::Trim,
            Command::WriteZeroes => Kind::Zero { unmap: request.flags & COMMAND_NO_HOLE == 0 },
            Command::Flush => return Step::Piece(Piece::flush(self.open.insert(Open::flush(request.cookie)))),
            Command::Trim | Command::Disconnect | Command::Other(_) => {
                self.outbox.push_simple_reply(request.cookie, 0);
                return Step::Again;
            }
        };
        let range = request.offset..request.offset + u64::from(request.len);
        // The data of a long write are not kept until all of them are written, so no finished piece may be lost.
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

    /// Returns the next piece of a request that has no payload to receive.
    fn hand_out(&mut self, mut rest: Rest) -> Step {
        if rest.kind == Kind::Read && !self.take_buffers(&mut rest) {
            if self.pool_of(rest.slot).1 && self.open.len() == 1 && self.outbox.is_empty() {
                // Other clients have the memory, and no event of this client would announce that they free it.
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

    /// Gets a buffer for the next piece of a read, or for all pieces at once if the answer needs all of them. Two such
    /// reads with half of their buffers each would wait for ever. Returns false if there are not enough buffers.
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

    /// Returns the pool for the buffers of a read, and whether that pool is shared.
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

    /// Completes a piece with `outcome`. The data of a read are in its buffer. Returns true if [`Self::pop`] may make
    /// progress now.
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

    /// Marks each open request for repetition of which the disk may have lost finished pieces.
    pub(super) fn repeat_parts(&mut self) {
        self.open.iter_mut().for_each(|(_, request)| request.repeat_parts());
    }

    #[cfg(test)]
    pub(super) fn cookie_of(&self, piece: &Piece) -> u64 {
        self.open[piece.slot].cookie()
    }

    /// Returns what was received and not taken yet, if that begins with a request.
    pub(super) fn next_header(&self) -> Option<&[u8]> {
        matches!(self.state, State::Header).then(|| self.staging.pending())
    }

    /// Returns whether all requests were answered and all answers sent. A write whose payload has not been received
    /// completely does not count.
    pub(super) fn is_quiet(&self) -> bool {
        let coming = usize::from(matches!(self.state, State::Payload { .. }));
        self.outbox.is_empty() && self.open.len() <= coming
    }

    /// Asserts the invariants that are visible from inside.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn check(&self) {
        assert!(self.open.len() <= REQUESTS_MAX && self.pool.allocated_bytes() <= MEMORY_MAX);
        // One request may add its answer to an outbox that has just not reached its limit.
        assert!(self.outbox.overhead() <= OVERHEAD_MAX + (REQUESTS_MAX + 1) * 64 + 34 * 28 * REQUESTS_MAX);
        assert!(self.open.iter().all(|(_, request)| request.waits()), "a request was not answered");
    }
}
