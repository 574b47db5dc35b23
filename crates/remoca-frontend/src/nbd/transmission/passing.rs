//! Passes a client on to another program of this process, which continues where this one stops.
//!
//! No piece of a request may be with the driver then. What was received and not parsed, what waits to be sent, and the
//! request whose payload is coming go along.

use super::{State, Transmission};
use crate::nbd::offer::ExportGeometry;
use crate::nbd::open::{Form, Open};
use crate::nbd::outbox::Outbox;
use crate::nbd::pieces::{Kind, Piece, Rest};
use crate::nbd::staging::Staging;
use remoca_core::engine::DiskError;
use remoca_io::buffer::BufferPool;
use remoca_protocol::guests::BegunRequest;
use remoca_protocol::guests::Offer;
use std::ops::Range;

/// State of a client between two programs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::nbd) struct Passed {
    pub structured_replies: bool,
    /// What the client was told when it chose the export.
    pub offered: Option<Offer>,
    /// Bytes that were received and not parsed.
    pub received: Vec<u8>,
    /// Bytes that wait to be sent.
    pub to_send: Vec<u8>,
    pub begun: Option<BegunRequest>,
    /// Bytes of a write's payload that were received and not handed out.
    pub filled: Vec<u8>,
}

impl Transmission {
    /// Returns another piece of a request whose header was taken before, and never a new request. Returns `None` as
    /// [`Self::pop`] does, or if there is no such request.
    pub(in crate::nbd) fn pop_begun(&mut self) -> Option<Piece> {
        self.next(false)
    }

    /// Returns whether the header of a request was taken, and more of it has to be received or handed out.
    pub(in crate::nbd) fn has_begun(&self) -> bool {
        !self.repeats.is_empty() || !matches!(self.state, State::Header)
    }

    /// Returns whether no piece of a request is with the driver, nor can be handed out now.
    pub(in crate::nbd) fn is_idle(&self) -> bool {
        let left_open = match &self.state {
            State::Header | State::Skip { .. } => 0,
            State::Payload { .. } => 1,
            // Only the answer to a read needs buffers, for which it may have to wait.
            State::HandOut(rest) if rest.kind == Kind::Read && rest.buffers.is_empty() => 1,
            State::HandOut(_) => return false,
        };
        self.repeats.is_empty() && self.open.len() == left_open
    }

    /// Returns the state for another program. Returns `None` if the client is not idle, or if it has ended its session, or if the other program
    /// might have to repeat a part of a write whose data are gone.
    pub(in crate::nbd) fn pass(&self) -> Option<Passed> {
        if !self.is_idle() {
            return None;
        }
        let mut filled = Vec::new();
        let begun = match &self.state {
            State::Header => None,
            State::Skip { left, cookie, error } => {
                Some(BegunRequest::Refused { cookie: *cookie, error: *error, bytes: *left })
            }
            State::Payload { rest, piece } => {
                if let Some((buffer, count)) = piece {
                    filled.extend_from_slice(&buffer[..*count]);
                }
                let (cookie, error) = self.open[rest.slot].to_continue()?;
                let Range { start, end } = rest.range;
                let filled = filled.len() as u64;
                Some(BegunRequest::Write { cookie, durable: rest.durable, start, end, filled, error })
            }
            State::HandOut(rest) => {
                let (cookie, error) = self.open[rest.slot].to_continue()?;
                let in_one = self.open[rest.slot].whole_length().is_some();
                let Range { start, end } = rest.range;
                Some(BegunRequest::Read { cookie, start, end, in_one, error })
            }
        };
        let Self { structured: structured_replies, staging, outbox, end, .. } = self;
        let (received, to_send) = (staging.pending().to_vec(), outbox.pending().collect::<Vec<_>>().concat());
        let offered = Some(self.offered);
        let structured_replies = *structured_replies;
        end.is_none().then_some(Passed { structured_replies, offered, received, to_send, begun, filled })
    }

    /// Returns the size of the export that the client was told, in bytes.
    pub(in crate::nbd) fn told_bytes(&self) -> u64 {
        self.geometry.size
    }

    /// Continues the transmission of a client as another program left it. Returns `None` if it cannot be understood.
    pub(in crate::nbd) fn resume(geometry: ExportGeometry, passed: Passed, shared_pool: BufferPool) -> Option<Self> {
        let Passed { structured_replies, offered, received, to_send, begun, filled } = passed;
        let staging = Staging::with(&received)?;
        let mut transmission = Self::new(geometry, structured_replies, staging, Outbox::with(to_send), shared_pool);
        transmission.offered = offered.unwrap_or(transmission.offered);
        if let Some(begun) = begun {
            transmission.state = transmission.state_of(begun, &filled)?;
        }
        Some(transmission)
    }

    fn state_of(&mut self, begun: BegunRequest, filled: &[u8]) -> Option<State> {
        Some(match begun {
            BegunRequest::Refused { cookie, error, bytes } => State::Skip { left: bytes, cookie, error },
            BegunRequest::Write { cookie, durable, start, end, error, .. } => {
                let rest = self.reopen((Kind::Write, durable, start..end), cookie, Form::Plain, error)?;
                let mut buffer = self.pool.take(rest.lengths().next()?)?;
                buffer.get_mut(..filled.len())?.copy_from_slice(filled);
                State::Payload { rest, piece: Some((buffer, filled.len())) }
            }
            BegunRequest::Read { cookie, start, end, in_one, error } => {
                let length = u32::try_from(end.checked_sub(start)?).ok()?;
                let whole = Form::Whole { chunk: self.structured, data: Vec::new(), length };
                let form = if in_one { whole } else { Form::Chunks };
                State::HandOut(self.reopen((Kind::Read, false, start..end), cookie, form, error)?)
            }
        })
    }

    /// Opens the rest of a request again. Returns `None` if the export does not have the range.
    fn reopen(
        &mut self,
        (kind, durable, range): (Kind, bool, Range<u64>),
        cookie: u64,
        form: Form,
        error: Option<i32>,
    ) -> Option<Rest> {
        let block = u64::from(self.geometry.block);
        let fits = range.start < range.end && range.end <= self.geometry.size;
        if !fits || !range.start.is_multiple_of(block) || !range.end.is_multiple_of(block) {
            return None;
        }
        let entry = self.open.vacant_entry();
        let offset = range.start;
        let rest = Rest::new(entry.key(), kind, durable, range);
        let mut open = Open::new(cookie, form, offset, &rest, self.geometry.may_forget);
        if let Some(error) = error {
            open.fail(DiskError(error));
        }
        entry.insert(open);
        Some(rest)
    }
}
