//! The chains of one queue that are in flight. A chain is handed out whole or in pieces, and answered when all of its
//! pieces are back.
//!
//! A long read or write goes out in pieces that fit the driver's buffers, and a long discard or write-zeroes in pieces
//! that each take the driver a short time. If the disk may have lost a part of a write or write-zeroes, it goes out
//! again when all of its pieces are back. The content of what is discarded means nothing.

use super::chain::Chain;
use super::config::DeviceConfig;
use super::request::Status;
use crate::request::{Operation, range_piece_end};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// A chain, or a piece of a long one, for the driver.
pub(super) struct Taken {
    pub chain: Arc<Chain>,
    pub operation: Operation,
    pub data_start: u64,
    pub data_length: usize,
}

/// The action to take after a piece came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Back {
    /// Nothing yet: other pieces are out or still to be handed out.
    Waits,
    /// The chain goes out again.
    Again,
    /// The chain is to be answered.
    Answer(Status),
}

/// A chain in flight.
#[derive(Debug, Clone)]
struct Flight {
    /// True from the moment the chain is taken until its completion is published.
    busy: bool,
    pieces: u32,
    status: Status,
    /// The whole write or write-zeroes, if it goes out in pieces.
    whole: Option<Whole>,
    /// Some of its pieces are done, ...
    done: bool,
    /// ... and may be gone: it goes out again when all of them are back.
    again: bool,
}

const IDLE: Flight = Flight { busy: false, pieces: 0, status: Status::Ok, whole: None, done: false, again: false };

/// A write or write-zeroes as the guest asked for it.
#[derive(Debug, Clone)]
struct Whole {
    operation: Operation,
    data_start: u64,
}

/// The part of a chain that is still to be handed out.
struct Rest {
    chain: Arc<Chain>,
    operation: Operation,
    data_start: u64,
}

/// The chains in flight, by their heads.
#[derive(Default)]
pub(super) struct Flights {
    flights: Vec<Flight>,
    rest: Option<Rest>,
    /// Requests that go out again.
    repeats: VecDeque<Rest>,
}

impl Flights {
    /// Replaces the flights by idle ones for heads below `size`.
    pub fn restart(&mut self, size: u16) {
        self.flights = vec![IDLE; usize::from(size)];
    }

    /// Returns whether this head is in flight, or `None` if there is no such head.
    pub fn is_busy(&self, head: u16) -> Option<bool> {
        self.flights.get(usize::from(head)).map(|flight| flight.busy)
    }

    /// Marks `head` as in flight, because its chain was taken.
    pub fn begin(&mut self, head: u16) {
        self.flights[usize::from(head)] = Flight { busy: true, ..IDLE };
    }

    /// Marks `head` as no longer in flight, because its completion was published. The guest may offer `head` again.
    pub fn end(&mut self, head: u16) {
        self.flights[usize::from(head)].busy = false;
    }

    /// Stores a chain that is to be handed out.
    pub fn load(&mut self, chain: Chain, operation: Operation, data_start: u64) {
        self.rest = Some(Rest { chain: Arc::new(chain), operation, data_start });
    }

    /// Returns the next piece to hand out, within the limits of `config`, or `None` if there is none.
    pub fn next_piece(&mut self, config: &DeviceConfig) -> Option<Taken> {
        let Rest { chain, operation, data_start } = self.rest.take().or_else(|| self.repeats.pop_front())?;
        let whole = match &operation {
            Operation::Write { .. } | Operation::WriteZeroes { .. } => {
                Some(Whole { operation: operation.clone(), data_start })
            }
            Operation::Read { .. } | Operation::Flush | Operation::Discard { .. } => None,
        };
        let (operation, remainder) = split(operation, config);
        let data_length = match &operation {
            Operation::Read { range } | Operation::Write { range } => range.end - range.start,
            Operation::Flush | Operation::Discard { .. } | Operation::WriteZeroes { .. } => 0,
        };
        let flight = &mut self.flights[usize::from(chain.head)];
        flight.pieces += 1;
        if let Some(operation) = remainder {
            // Only the first piece sees the whole request; later pieces see the remainder.
            flight.whole = flight.whole.take().or(whole);
            let data_start = data_start + data_length;
            self.rest = Some(Rest { chain: chain.clone(), operation, data_start });
        }
        let data_length = usize::try_from(data_length).expect("a piece fits the transfer limit");
        Some(Taken { chain, operation, data_start, data_length })
    }

    /// Marks each write and write-zeroes for repetition of which the disk may have lost finished pieces. It goes out
    /// again when all of its pieces are back and none has failed.
    pub fn repeat_parts(&mut self) {
        for flight in self.flights.iter_mut().filter(|flight| flight.whole.is_some()) {
            flight.again |= flight.done;
        }
    }

    /// Returns whether a request is waiting to go out again.
    pub fn has_repeats(&self) -> bool {
        !self.repeats.is_empty()
    }

    /// Returns whether [`Self::next_piece`] has a piece of a chain of which others were handed out before.
    pub fn has_begun(&self) -> bool {
        self.rest.is_some() || self.has_repeats()
    }

    /// Removes a piece of `chain` from those handed out, combines its `status` with that of the others, and returns the
    /// action to take.
    pub fn take_back(&mut self, chain: &Arc<Chain>, status: Status) -> Back {
        let flight = &mut self.flights[usize::from(chain.head)];
        assert!(flight.busy && flight.pieces > 0, "a piece of chain {} came back that was not out", chain.head);
        flight.pieces -= 1;
        flight.status = flight.status.worse(status);
        flight.done = true;
        let more = self.rest.as_ref().is_some_and(|rest| rest.chain.head == chain.head);
        if flight.pieces > 0 || more {
            return Back::Waits;
        }
        // Its first piece brings it again.
        match flight.whole.take().filter(|_| flight.again && flight.status == Status::Ok) {
            Some(Whole { operation, data_start }) => {
                (flight.done, flight.again) = (false, false);
                self.repeats.push_back(Rest { chain: chain.clone(), operation, data_start });
                Back::Again
            }
            None => Back::Answer(flight.status),
        }
    }
}

/// Splits an operation after as much as `config` allows. Returns its first piece and the remainder; the remainder is
/// `None` if the operation is no longer than that.
fn split(operation: Operation, config: &DeviceConfig) -> (Operation, Option<Operation>) {
    let cut = |range: &Range<u64>| {
        let middle = range.start + u64::from(config.transfer_bytes_max);
        (middle < range.end).then_some((range.start..middle, middle..range.end))
    };
    match operation {
        Operation::Read { range } => match cut(&range) {
            Some((first, rest)) => (Operation::Read { range: first }, Some(Operation::Read { range: rest })),
            None => (Operation::Read { range }, None),
        },
        Operation::Write { range } => match cut(&range) {
            Some((first, rest)) => (Operation::Write { range: first }, Some(Operation::Write { range: rest })),
            None => (Operation::Write { range }, None),
        },
        Operation::Flush => (Operation::Flush, None),
        Operation::Discard { ranges } => {
            let (first, rest) = split_ranges(ranges, |range| range, config.range_piece_bytes);
            let rest = (!rest.is_empty()).then_some(Operation::Discard { ranges: rest });
            (Operation::Discard { ranges: first }, rest)
        }
        Operation::WriteZeroes { ranges } => {
            let (first, rest) = split_ranges(ranges, |zero| &mut zero.range, config.range_piece_bytes);
            let rest = (!rest.is_empty()).then_some(Operation::WriteZeroes { ranges: rest });
            (Operation::WriteZeroes { ranges: first }, rest)
        }
    }
}

/// Splits ranges after those that have `piece_bytes` together, or within the first of them if it is longer.
fn split_ranges<R: Clone>(
    mut ranges: Vec<R>,
    range_of: fn(&mut R) -> &mut Range<u64>,
    piece_bytes: u64,
) -> (Vec<R>, Vec<R>) {
    let mut bytes = 0;
    let fits = |range: &&mut Range<u64>| {
        bytes += range.end - range.start;
        bytes <= piece_bytes
    };
    let count = ranges.iter_mut().map(range_of).take_while(fits).count();
    let mut rest = ranges.split_off(count);
    if count == 0
        && let Some(longer) = rest.first_mut()
    {
        let mut first = longer.clone();
        let middle = range_piece_end(range_of(longer), piece_bytes);
        range_of(&mut first).end = middle;
        range_of(longer).start = middle;
        ranges.push(first);
    }
    (ranges, rest)
}
