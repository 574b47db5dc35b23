//! The requests of guests that are in flight, with what they need: IDs, buffers, and a place in the queue for buffers.
//!
//! Data of a guest are copied once, here: read buffer -> guest, guest -> write buffer, receive buffer -> guest.

use super::capture::CapturedFrames;
use super::disk::Disk;
use super::guests::Guests;
use super::host::Host;
use super::measured::Measured;
use super::requests::{Origin, Pending, RequestTable, store_op};
use super::starved::{DiskIo, Starved, Tried, Walk};
use super::warmth::Warmth;
use crate::trace::TraceWriter;
use remoca_core::engine::{DiskEngine, DiskError, GuestOp, RequestId};
use remoca_core::units::{Nanos, PAGE_SIZE};
use remoca_frontend::device::GuestRequest;
use remoca_frontend::request::Outcome;
use remoca_io::buffer::{BufferPool, IoBuffer};
use remoca_io::narrow;
use remoca_io::words::IndexMemory;

type Engine = DiskEngine<IndexMemory>;

/// Requests that the engine has not completed, and I/O that the stores have not.
pub(super) struct InFlight {
    requests: RequestTable,
    buffers: BufferPool,
    /// Disk I/O that waits for a buffer.
    starved: Starved,
    captured: CapturedFrames,
    measured: Measured,
    /// Number of flushes in flight that belong to a hand-over.
    hand_over_flushes: u32,
}

/// Outcome of an attempt to place an I/O.
pub(super) enum Placing {
    Tried(Tried),
    /// The guest has disconnected, so there are no data to write.
    GuestGone,
}

impl InFlight {
    /// Returns an empty table for the requests of `disks` disks.
    pub(super) fn new(disks: usize, buffers: BufferPool, trace: Option<TraceWriter>) -> Self {
        Self {
            requests: RequestTable::new(disks),
            buffers,
            starved: Starved::new(disks),
            captured: CapturedFrames::default(),
            measured: Measured::new(trace),
            hand_over_flushes: 0,
        }
    }

    /// Adds a request. Returns the ID by which the engine knows it.
    pub(super) fn begin(&mut self, disk: u16, op: GuestOp, now: Nanos, origin: Origin) -> RequestId {
        self.hand_over_flushes += u32::from(matches!(origin, Origin::HandOver));
        self.requests.insert(Pending { disk, op, issued: now, buffer: None, delivered: false, origin })
    }

    /// Returns whether no request is in flight, and no store is at work.
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Returns whether no guest waits for an answer. Stores may still be at work.
    pub(super) fn are_completed(&self) -> bool {
        self.requests.are_completed()
    }

    /// Returns whether a flush is in flight.
    pub(super) fn is_flushing(&self) -> bool {
        self.requests.are_being_flushed()
    }

    /// Returns whether a flush is in flight that belongs to a hand-over.
    pub(super) fn is_flushing_for_hand_over(&self) -> bool {
        self.hand_over_flushes > 0
    }

    /// Returns whether no disk I/O waits for a buffer.
    pub(super) fn is_fed(&self) -> bool {
        self.starved.is_empty()
    }

    /// Marks requests of several ranges for repetition if `disk` may have lost a range that it has completed.
    pub(super) fn repeat_parts(&mut self, disk: usize) {
        self.requests.repeat_parts(disk);
    }

    /// Marks the request `id` as in use by a store. Returns its disk I/O, with the bytes that it takes from the
    /// driver's buffers.
    pub(super) fn take_up(&mut self, id: RequestId, op: GuestOp, too: bool, disks: &[Disk]) -> DiskIo {
        let disk = self.requests.begin_io(id);
        let mut io = DiskIo { id, disk, op, too, bytes: 0 };
        io.bytes = buffer_bytes(&io, &disks[disk]);
        io
    }

    /// Returns whether `io` has to wait because earlier I/O of its disk waits for a buffer. I/O that needs no buffer
    /// does not wait.
    pub(super) fn must_wait(&self, io: &DiskIo) -> bool {
        io.bytes > 0 && self.starved.has(io.disk)
    }

    /// Queues an I/O until there is a buffer for it.
    pub(super) fn starve(&mut self, io: DiskIo) {
        self.starved.push(io);
    }

    /// Starts a walk over the I/O that waits for buffers, taking the disks in turn. Drops hedges whose reads have been
    /// answered, and updates what the rest needs.
    pub(super) fn begin_walk(&mut self, engine: &mut Engine, disks: &[Disk]) -> Walk {
        let Self { starved, requests, .. } = self;
        starved.retain(|io| {
            if io.too && requests.get_mut(io.id).is_none() {
                // A memory server has answered the read.
                engine.handle_disk_skipped(io.id);
                requests.end_io(io.id);
                return false;
            }
            // When no memory server can answer the read any longer, the guest waits for this I/O.
            io.too &= engine.waits_for_server(io.id);
            io.bytes = buffer_bytes(io, &disks[io.disk]);
            true
        });
        self.starved.walk()
    }

    /// Returns the next I/O to place, or `None` at the end of the walk. The caller must report the outcome to
    /// [`Self::note`].
    pub(super) fn next_starved(&self, walk: &mut Walk) -> Option<DiskIo> {
        self.starved.next(walk)
    }

    /// Advances the walk by the outcome of placing the I/O that [`Self::next_starved`] returned last.
    pub(super) fn note(&mut self, walk: &mut Walk, tried: Tried) {
        self.starved.note(walk, tried);
    }

    /// Submits the I/O if its disk's share of the buffers has room for it, and a buffer is free.
    pub(super) fn place(&mut self, io: DiskIo, disk: &mut Disk, warmth: &mut Warmth) -> Placing {
        if io.bytes > 0 {
            let wanted = |disk| self.starved.wanted_bytes(disk);
            let tried = self.requests.share(&io, self.buffers.limit_bytes(), wanted);
            if tried != Tried::Placed {
                return Placing::Tried(tried);
            }
        }
        self.submit(io, disk, warmth)
    }

    /// Submits I/O to the store, if it needs no buffer or one is free.
    fn submit(&mut self, io: DiskIo, disk: &mut Disk, warmth: &mut Warmth) -> Placing {
        let DiskIo { id, op, too, .. } = io;
        let buffer = match op {
            GuestOp::Read(range) | GuestOp::Write { range, .. } => {
                let length = usize::try_from(range.length).unwrap_or(usize::MAX);
                let mut origin = self.requests.get_mut(id).map(|pending| &mut pending.origin).filter(|_| !too);
                let brought = match &mut origin {
                    Some(Origin::Whole(request)) => request.take_buffer(),
                    Some(Origin::Part(_) | Origin::HandOver) | None => None,
                };
                let must_copy = brought.is_none() && matches!(op, GuestOp::Write { .. });
                let Some(mut buffer) = brought.or_else(|| self.buffers.take(length)) else {
                    return Placing::Tried(Tried::NoBuffer);
                };
                let copied = match origin {
                    Some(Origin::Whole(request)) if must_copy => request.copy_from_guest(0, &mut buffer).is_ok(),
                    _ => !must_copy,
                };
                if !copied {
                    return Placing::GuestGone;
                }
                Some(buffer)
            }
            GuestOp::Flush | GuestOp::Discard(_) | GuestOp::WriteZeroes { .. } => None,
        };
        if matches!(op, GuestOp::Write { .. }) {
            narrow::passes("write-forgotten");
        }
        self.requests.take_share(&io);
        warmth.begin(io.disk, &op);
        disk.store.submit(u64::from(id.0), store_op(op), buffer);
        Placing::Tried(Tried::Placed)
    }

    /// Returns the operation of the request `id`, or `None` if the guest has its answer.
    pub(super) fn op(&mut self, id: RequestId) -> Option<GuestOp> {
        self.requests.get_mut(id).map(|pending| pending.op)
    }

    /// Passes the result of a request's disk I/O to the engine, and ends the I/O. The buffer becomes the request's data
    /// only if the I/O succeeded: after a failure, pages of a memory server may still answer the request.
    pub(super) fn disk_done(
        &mut self,
        engine: &mut Engine,
        now: Nanos,
        id: RequestId,
        result: Result<(), DiskError>,
        buffer: Option<IoBuffer>,
    ) {
        engine.handle_disk_done(now, id, result, buffer.as_deref().unwrap_or(&[]));
        if let Some(pending) = self.requests.get_mut(id)
            && result.is_ok()
        {
            pending.buffer = buffer;
        }
        self.requests.end_io(id);
    }

    /// Delivers a page of a memory server as part of a read.
    pub(super) fn deliver(&mut self, engine: &mut Engine, id: RequestId, offset: u32, page: &[u8]) {
        if let Some(Pending { origin: Origin::Whole(request), delivered, .. }) = self.requests.get_mut(id) {
            self.captured.capture(engine, request, offset as usize, page.len());
            *delivered = true;
            // The guest may be gone; its request still completes.
            let _ = request.copy_to_guest(offset as usize, page);
        }
    }

    /// Delivers zeroes as part of a read.
    pub(super) fn fill_zero(&mut self, engine: &mut Engine, id: RequestId, offset: u32, length: u32) {
        if let Some(Pending { origin: Origin::Whole(request), delivered, .. }) = self.requests.get_mut(id) {
            self.captured.capture(engine, request, offset as usize, length as usize);
            *delivered = true;
            // The guest may be gone; its request still completes.
            let _ = request.fill_zero(offset as usize, length as usize);
        }
    }

    /// Returns the page at `offset` of the data that a request read from the disk or wrote to it, or `None` if there is
    /// no such page.
    pub(super) fn page(&mut self, id: RequestId, offset: u32) -> Option<&[u8]> {
        let offset = offset as usize;
        self.requests.get_mut(id)?.buffer.as_deref()?.get(offset..offset + PAGE_SIZE)
    }

    /// Passes the frames that were copied out before data overwrote them to `judge`.
    pub(super) fn judge_frames(&mut self, mut judge: impl FnMut(&[u8], &mut Measured)) {
        let Self { captured, measured, .. } = self;
        captured.judge(|page| judge(page, measured));
    }

    /// Completes a request of the engine. Returns the guest's request and its disk if the disk may have lost some of
    /// its work: the request must then start again. Returns `None` otherwise.
    pub(super) fn complete(
        &mut self,
        id: RequestId,
        result: Result<(), DiskError>,
        engine: &mut Engine,
        guests: &mut Guests,
        host: &mut Host,
    ) -> Option<(u16, GuestRequest)> {
        let mut pending = self.requests.remove(id).expect("the engine completes what it was given, once");
        let from_disk = pending.buffer.is_some() || result.is_err();
        let mut outcome = Outcome::from(result);
        match (pending.op, result, pending.buffer.take(), &mut pending.origin) {
            (GuestOp::Read(_), Ok(()), Some(buffer), Origin::Whole(request)) => {
                if !pending.delivered {
                    self.captured.capture(engine, request, 0, buffer.len());
                }
                if request.deliver(buffer).is_err() {
                    outcome = Outcome::BROKEN;
                }
            }
            (GuestOp::Write { .. }, Ok(()), Some(buffer), Origin::Whole(request)) => request.give_back(buffer),
            _ => {}
        }
        host.update();
        let disk = guests.disk_mut(usize::from(pending.disk));
        self.measured.record(host.now(), &pending, from_disk, disk, engine);
        match pending.origin {
            Origin::Whole(request) => guests.frontend_mut(pending.disk).complete(request, outcome),
            Origin::HandOver => self.hand_over_flushes -= 1,
            Origin::Part(group) => {
                group.end_part(outcome);
                if group.left.get() == 0
                    && let Some(request) = group.request.take()
                {
                    match group.must_repeat() {
                        true => return Some((pending.disk, request)),
                        false => guests.frontend_mut(pending.disk).complete(request, group.outcome.get()),
                    }
                }
            }
        }
        None
    }

    /// Returns the measurements of requests.
    pub(super) fn measured(&mut self) -> &mut Measured {
        &mut self.measured
    }

    /// Returns the size of all buffers in bytes, lent and free.
    pub(super) fn buffer_bytes(&self) -> usize {
        self.buffers.allocated_bytes()
    }

    /// Returns whether disk I/O of this disk waits for a buffer.
    #[cfg(test)]
    pub(super) fn starves(&self, disk: usize) -> bool {
        self.starved.has(disk)
    }
}

/// Returns the bytes that an I/O takes from the driver's buffers.
fn buffer_bytes(io: &DiskIo, disk: &Disk) -> usize {
    match io.op {
        // Requests that bring their own buffers take none of the driver's.
        _ if !io.too && disk.frontend.brings_buffers() => 0,
        GuestOp::Read(range) | GuestOp::Write { range, .. } => {
            BufferPool::footprint(usize::try_from(range.length).unwrap_or(usize::MAX))
        }
        GuestOp::Flush | GuestOp::Discard(_) | GuestOp::WriteZeroes { .. } => 0,
    }
}
