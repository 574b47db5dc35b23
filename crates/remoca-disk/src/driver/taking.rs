//! The intake of requests: they are popped from the queues of disks and port, and passed to the engine.

use super::intake::Intake;
use super::requests::{Group, Origin};
use super::vm::Vm;
use remoca_core::engine::{EVICTED_BATCH, Evicted, GuestOp};
use remoca_core::units::{ByteRange, PAGE_SIZE};
use remoca_frontend::device::GuestRequest;
use remoca_frontend::request::{Operation, Outcome, ZeroRange};
use std::ops::Range;
use std::rc::Rc;

/// Number of requests popped from one device before others get their turn. Each range of a discard or write-zeroes counts: it becomes
/// a request of the engine, which compares it with all I/O in flight. The last request may exceed the number.
const REQUESTS_PER_TURN: usize = 256;
/// Bytes discarded or zeroed on one disk before others get their turn: each of their blocks is looked up in the index.
/// The last request may exceed it, by less than a piece of the frontend (`RANGE_PIECE`).
const UNKNOWN_BYTES_PER_TURN: u64 = 16 << 20;
/// Bytes of evicted pages handled before the disks get their turn: each page is copied and hashed on this thread.
const PORT_BYTES_PER_TURN: usize = 4 << 20;

impl Vm {
    /// Pops requests of a disk and passes them to the engine, up to the limits of a turn.
    pub(super) fn pop_requests(&mut self, disk: u16, intake: Intake) {
        if !self.guests.admits(disk, intake) {
            return;
        }
        let (mut requests, mut bytes) = (0, 0_u64);
        while requests < REQUESTS_PER_TURN && bytes < UNKNOWN_BYTES_PER_TURN {
            let Some(request) = self.guests.pop(disk, intake) else { return };
            requests += request.operation().parts().max(1);
            bytes += unknown_bytes(request.operation());
            self.begin(disk, request);
        }
        self.guests.pop_again();
    }

    /// Passes a request to the engine.
    pub(super) fn begin(&mut self, disk: u16, request: GuestRequest) {
        let durable = self.guests.begin(disk, &request);
        match request.operation().clone() {
            Operation::Read { range } => {
                self.begin_part(disk, GuestOp::Read(byte_range(&range)), Origin::Whole(request))
            }
            Operation::Write { range } => {
                self.begin_part(disk, GuestOp::Write { range: byte_range(&range), durable }, Origin::Whole(request));
            }
            Operation::Flush => self.begin_part(disk, GuestOp::Flush, Origin::Whole(request)),
            Operation::Discard { ranges } => {
                let ops = ranges.iter().map(|range| GuestOp::Discard(byte_range(range))).collect();
                self.begin_group(disk, request, ops);
            }
            Operation::WriteZeroes { ranges } => {
                let op = |zero: &ZeroRange| GuestOp::WriteZeroes {
                    range: byte_range(&zero.range),
                    may_unmap: zero.unmap,
                    durable,
                };
                let ops = ranges.iter().map(op).collect();
                self.begin_group(disk, request, ops);
            }
        }
    }

    /// Starts a request of several ranges. Each range becomes a request of the engine, and the last one to complete
    /// also completes the guest's request. Empty ranges are skipped.
    fn begin_group(&mut self, disk: u16, request: GuestRequest, ops: Vec<GuestOp>) {
        let is_empty = |op: &GuestOp| match op {
            GuestOp::Discard(range) | GuestOp::WriteZeroes { range, .. } => range.length == 0,
            GuestOp::Read(_) | GuestOp::Write { .. } | GuestOp::Flush => false,
        };
        let ops: Vec<_> = ops.into_iter().filter(|op| !is_empty(op)).collect();
        if ops.is_empty() {
            self.guests.frontend_mut(disk).complete(request, Outcome::Done);
            return;
        }
        let group = Rc::new(Group::new(Some(request), ops.len()));
        for op in ops {
            self.begin_part(disk, op, Origin::Part(Rc::clone(&group)));
        }
    }

    fn begin_part(&mut self, disk: u16, op: GuestOp, origin: Origin) {
        let id = self.in_flight.begin(disk, op, self.host.now(), origin);
        self.engine.handle_request(self.host.now(), id, self.guests.number(disk), op);
        self.execute();
    }

    /// Flushes every writable disk, for a hand-over.
    pub(super) fn flush_for_hand_over(&mut self) {
        for disk in (0..).take(self.guests.disks().len()) {
            if !self.guests.disks()[usize::from(disk)].frontend.is_read_only() {
                self.begin_part(disk, GuestOp::Flush, Origin::HandOver);
            }
        }
    }

    /// Pops requests of the eviction port and executes them, up to the limit of a turn.
    pub(super) fn pop_port(&mut self, intake: Intake) {
        if !self.guests.port_mut().admits(intake) {
            return;
        }
        let mut bytes = 0;
        while bytes < PORT_BYTES_PER_TURN {
            let Some(mut request) = self.guests.port_mut().pop(intake) else { return };
            bytes += request.data_length().max(PAGE_SIZE);
            let outcome = self.execute_port(&mut request);
            self.guests.port_mut().complete(request, outcome);
        }
        self.guests.pop_again();
    }

    fn execute_port(&mut self, request: &mut GuestRequest) -> Outcome {
        let done = match request.operation().clone() {
            Operation::Read { range } => self.guests.port().read(&self.engine, request, range.start).is_ok(),
            Operation::Write { range } => self.take_evictions(request, range.start),
            Operation::Flush => true,
            Operation::Discard { .. } | Operation::WriteZeroes { .. } => return Outcome::Unsupported,
        };
        if done { Outcome::Done } else { Outcome::BROKEN }
    }

    fn take_evictions(&mut self, request: &GuestRequest, start: u64) -> bool {
        for offset in (0..request.data_length()).step_by(EVICTED_BATCH * PAGE_SIZE) {
            let taken = self.guests.port_mut().take_pages(request, start, offset, &self.host);
            let Ok(evicted) = taken else { return false };
            if evicted.start > 0 {
                let classes = self.guests.port().agent().map_or(0, |agent| agent.classes);
                self.engine.handle_agent(classes);
            }
            let contents = self.engine.look_at_evicted(&self.guests.port().pages()[evicted.clone()]);
            for (at, content) in evicted.zip(contents.into_iter().flatten()) {
                if let Evicted::Admit(admitted) = self.engine.handle_evicted_content(content) {
                    let sent = self.servers.admit(admitted, &self.guests.port().pages()[at]);
                    self.engine.handle_sent(admitted.at.server, sent);
                }
                self.in_flight.measured().record_eviction(self.host.now(), &self.engine);
                self.execute();
            }
        }
        true
    }
}

fn byte_range(range: &Range<u64>) -> ByteRange {
    ByteRange { offset: range.start, length: range.end - range.start }
}

/// Returns the number of bytes that a request discards or zeroes.
fn unknown_bytes(operation: &Operation) -> u64 {
    let length = |range: &Range<u64>| range.end - range.start;
    match operation {
        Operation::Discard { ranges } => ranges.iter().map(length).sum(),
        Operation::WriteZeroes { ranges } => ranges.iter().map(|zero| length(&zero.range)).sum(),
        Operation::Read { .. } | Operation::Write { .. } | Operation::Flush => 0,
    }
}
