//! Open requests of a client: the pieces that came back, and the answer to send.

use super::judge::error_code;
use super::outbox::Outbox;
use super::pieces::{Kind, Piece, Rest};
use crate::request::{Operation, Outcome};
use remoca_core::engine::DiskError;
use remoca_io::buffer::IoBuffer;
use remoca_io::sizes;
use std::ops::Range;

/// A request that has not been answered.
pub(super) struct Open {
    cookie: u64,
    form: Form,
    offset: u64,
    /// Number of pieces that have not come back, including those not handed out yet.
    left: usize,
    /// The first error that a piece reported.
    error: Option<DiskError>,
    /// What is needed to do the request again.
    kept: Option<Kept>,
}

/// A modification in several pieces, on a disk that may forget finished pieces.
struct Kept {
    kind: Kind,
    durable: bool,
    range: Range<u64>,
    /// The data of a write, from the pieces that have come back.
    buffers: Vec<Option<IoBuffer>>,
    /// Some pieces are done, ...
    done: bool,
    /// ... and may be gone.
    again: bool,
}

/// The form of the answer.
pub(super) enum Form {
    /// A simple reply without data.
    Plain,
    /// All data in one run, sent once they are complete: in a chunk or in a simple reply.
    Whole { chunk: bool, data: Vec<Option<IoBuffer>>, length: u32 },
    /// A chunk for each piece, sent when the piece comes back.
    Chunks,
}

impl Open {
    /// Creates a request of which all of `rest` is to be handed out. If its disk `may_forget`, what is needed to repeat
    /// it is kept until all of it is done.
    pub(super) fn new(cookie: u64, form: Form, offset: u64, rest: &Rest, may_forget: bool) -> Self {
        let left = rest.lengths().count();
        let is_kept = may_forget && left > 1 && is_kept(rest.kind, rest.durable);
        let kept = is_kept.then(|| Kept {
            kind: rest.kind,
            durable: rest.durable,
            range: rest.range.clone(),
            buffers: Vec::new(),
            done: false,
            again: false,
        });
        Self { cookie, form, offset, left, error: None, kept }
    }

    /// Creates an open flush.
    pub(super) fn flush(cookie: u64) -> Self {
        Self { cookie, form: Form::Plain, offset: 0, left: 1, error: None, kept: None }
    }

    /// Returns whether pieces are missing.
    pub(super) fn waits(&self) -> bool {
        self.left > 0
    }

    /// Returns the length of the data if all of them are held at the same time, or `None` otherwise.
    pub(super) fn whole_length(&self) -> Option<u32> {
        match self.form {
            Form::Whole { length, .. } => Some(length),
            Form::Chunks | Form::Plain => None,
        }
    }

    /// Returns the cookie of a request that another program can continue, and the first error that a piece reported.
    /// Returns `None` if the request may have to be repeated with data that are gone.
    pub(super) fn to_continue(&self) -> Option<(u64, Option<i32>)> {
        let is_kept = self.kept.as_ref().is_some_and(|kept| kept.done);
        (!is_kept).then_some((self.cookie, self.error.map(|error| error.0)))
    }

    /// Marks the request as failed with `error`, regardless of its pieces.
    pub(super) fn fail(&mut self, error: DiskError) {
        self.error = Some(error);
    }

    /// Receives a piece that was executed, with its data. Data that can be sent at once go to `outbox`.
    pub(super) fn take_back(&mut self, piece: Piece, outcome: Outcome, outbox: &mut Outbox) {
        assert!(self.left > 0, "a piece came back that was not out");
        self.left -= 1;
        match outcome {
            Outcome::Done => {}
            Outcome::Failed(error) => self.error = self.error.or(Some(error)),
            Outcome::Unsupported => self.error = self.error.or(Some(DiskError(libc::EINVAL))),
        }
        match (&mut self.form, piece.operation, piece.buffer, outcome) {
            (Form::Whole { data, .. }, _, buffer, _) => {
                if data.len() <= piece.index {
                    data.resize_with(piece.index + 1, || None);
                }
                data[piece.index] = buffer;
            }
            (Form::Chunks, Operation::Read { range }, Some(buffer), Outcome::Done) => {
                let is_last = self.left == 0 && self.error.is_none();
                let length = sizes::short(buffer.len());
                outbox.push_data_chunk(self.cookie, range.start, length, is_last);
                outbox.push_data(buffer);
            }
            (Form::Plain, _, buffer, Outcome::Done) => {
                if let Some(kept) = &mut self.kept {
                    kept.take_back(piece.index, buffer);
                }
            }
            _ => {}
        }
    }

    /// Marks the request for repetition if the disk may have lost finished pieces of it.
    pub(super) fn repeat_parts(&mut self) {
        if let Some(kept) = &mut self.kept {
            kept.again |= kept.done;
        }
    }

    /// Returns the whole request, to be handed out again, if the disk may have lost a finished piece. Returns `None` if
    /// it need not or cannot be repeated.
    pub(super) fn repeat(&mut self, slot: usize) -> Option<Rest> {
        let kept = self.kept.as_mut().filter(|kept| kept.again && self.error.is_none())?;
        (kept.done, kept.again) = (false, false);
        let mut rest = Rest::new(slot, kept.kind, kept.durable, kept.range.clone());
        rest.buffers = kept.buffers.drain(..).flatten().collect();
        self.left = rest.lengths().count();
        if kept.kind == Kind::Write && rest.buffers.len() != self.left {
            (self.left, self.error) = (0, Some(DiskError(libc::EIO)));
            return None;
        }
        Some(rest)
    }

    /// Puts the answer into `outbox`. Data chunks that went out with their pieces are not repeated.
    pub(super) fn answer(self, outbox: &mut Outbox) {
        let Self { cookie, form, offset, error, .. } = self;
        let error = error.map_or(0, |error| error_code(error.0));
        match form {
            Form::Plain | Form::Whole { chunk: false, .. } if error != 0 => outbox.push_simple_reply(cookie, error),
            Form::Chunks | Form::Whole { chunk: true, .. } if error != 0 => outbox.push_error_chunk(cookie, error),
            Form::Plain => outbox.push_simple_reply(cookie, 0),
            Form::Chunks => {}
            Form::Whole { chunk, data, length } => {
                match chunk {
                    true => outbox.push_data_chunk(cookie, offset, length, true),
                    false => outbox.push_simple_reply(cookie, 0),
                }
                data.into_iter().flatten().for_each(|buffer| outbox.push_data(buffer));
            }
        }
    }

    #[cfg(test)]
    pub(super) fn cookie(&self) -> u64 {
        self.cookie
    }
}

impl Kept {
    fn take_back(&mut self, index: usize, buffer: Option<IoBuffer>) {
        self.done = true;
        if self.buffers.len() <= index {
            self.buffers.resize_with(index + 1, || None);
        }
        self.buffers[index] = buffer;
    }
}

/// Returns whether a modification of this kind is done again if a part of it may be lost. A durable modification is not
/// lost, and the content of trimmed blocks is undefined.
fn is_kept(kind: Kind, durable: bool) -> bool {
    !durable && matches!(kind, Kind::Write | Kind::Zero { .. })
}
