//! The guest requests that the engine has not completed, with their buffers.

use super::starved::{DiskIo, Tried};
use remoca_core::engine::{GuestOp, RequestId};
use remoca_core::units::Nanos;
use remoca_frontend::device::GuestRequest;
use remoca_frontend::request::Outcome;
use remoca_io::buffer::IoBuffer;
use remoca_store::StoreOp;
use std::rc::Rc;

/// A guest request that the engine works on: a read, write or flush, or one range of a discard.
pub struct Pending {
    pub disk: u16,
    pub op: GuestOp,
    pub issued: Nanos,
    pub buffer: Option<IoBuffer>,
    /// Whether part of a read's data is in guest memory, so that its frames no longer show what they held.
    pub delivered: bool,
    pub origin: Origin,
}

/// The guest request that an engine request belongs to.
pub enum Origin {
    Whole(GuestRequest),
    /// One of several ranges; the last of them completes the guest's request.
    Part(Rc<Group>),
    /// None: a flush before the disks are handed over.
    HandOver,
}

/// A guest request of several ranges.
pub struct Group {
    pub request: std::cell::RefCell<Option<GuestRequest>>,
    pub left: std::cell::Cell<usize>,
    pub outcome: std::cell::Cell<Outcome>,
    /// Whether a range is done.
    pub done: std::cell::Cell<bool>,
    /// Whether a range that was done may be lost, so that all of them have to be executed again.
    pub again: std::cell::Cell<bool>,
}

impl Group {
    pub fn new(request: Option<GuestRequest>, ranges: usize) -> Self {
        let (request, left, outcome) = (request.into(), ranges.into(), Outcome::Done.into());
        Self { request, left, outcome, done: false.into(), again: false.into() }
    }

    /// Subtracts a completed range from the ranges left, and combines `outcome` with the outcomes of the others.
    pub fn end_part(&self, outcome: Outcome) {
        self.outcome.set(self.outcome.get().and(outcome));
        self.left.set(self.left.get() - 1);
        self.done.set(true);
    }

    /// Returns whether the request has to be executed again once all of its ranges are done: one of them may be lost,
    /// and none has failed.
    pub fn must_repeat(&self) -> bool {
        self.again.get() && self.outcome.get() == Outcome::Done
    }
}

/// The table entry of a request ID.
struct Entry {
    /// The request; `None` if the guest has its answer and only the store is still at work.
    pending: Option<Pending>,
    disk: u16,
    io: bool,
    held: Held,
}

/// Bytes of buffers that the driver has lent to I/O of stores.
#[derive(Clone, Copy, Default)]
struct Held {
    all: usize,
    /// Bytes of I/O that may turn out to be unnecessary.
    too: usize,
}

/// Requests by ID. IDs are reused, so that the engine's table stays small. An ID is free again when its request is completed
/// and no store is at work for it: otherwise a completion of the store could be taken for that of another request.
pub struct RequestTable {
    slab: slab::Slab<Entry>,
    /// Number of requests that are not completed.
    pending: usize,
    held: Vec<Held>,
}

impl RequestTable {
    pub fn new(disks: usize) -> Self {
        Self { slab: slab::Slab::new(), pending: 0, held: vec![Held::default(); disks] }
    }

    /// Adds a request. Returns the ID by which the engine knows it.
    pub fn insert(&mut self, pending: Pending) -> RequestId {
        self.pending += 1;
        // Far fewer than 2^32: a device hands out some thousand at a time.
        let entry = Entry { disk: pending.disk, pending: Some(pending), io: false, held: Held::default() };
        RequestId(u32::try_from(self.slab.insert(entry)).unwrap_or(u32::MAX))
    }

    /// Returns whether no request is in flight, and no store is at work.
    pub fn is_empty(&self) -> bool {
        self.slab.is_empty()
    }

    /// Returns whether all requests are completed. Stores may still be at work for some.
    pub fn are_completed(&self) -> bool {
        self.pending == 0
    }

    /// Returns whether a flush is in flight.
    pub fn are_being_flushed(&self) -> bool {
        let mut pending = self.slab.iter().filter_map(|(_, entry)| entry.pending.as_ref());
        pending.any(|pending| pending.op == GuestOp::Flush)
    }

    /// Returns the request `id`, or `None` if it is completed.
    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut Pending> {
        self.slab.get_mut(id.0 as usize)?.pending.as_mut()
    }

    /// Marks requests of several ranges for repetition if `disk` may have lost a range that it has completed.
    pub fn repeat_parts(&mut self, disk: usize) {
        for pending in self.slab.iter().filter_map(|(_, entry)| entry.pending.as_ref()) {
            if let (true, Origin::Part(group)) = (usize::from(pending.disk) == disk, &pending.origin) {
                group.again.set(group.again.get() || group.done.get());
            }
        }
    }

    /// Removes the request `id` and returns it, or `None` if it is completed. The ID is not free while a store is at
    /// work for it.
    pub fn remove(&mut self, id: RequestId) -> Option<Pending> {
        let entry = self.slab.get_mut(id.0 as usize)?;
        let removed = if entry.io { entry.pending.take() } else { self.slab.try_remove(id.0 as usize)?.pending };
        self.pending -= usize::from(removed.is_some());
        removed
    }

    /// Marks `id` as in use by a store, so that the ID is not free before [`Self::end_io`]. Returns the position of its
    /// disk.
    ///
    /// # Panics
    /// If the ID is free.
    pub fn begin_io(&mut self, id: RequestId) -> usize {
        let entry = self.slab.get_mut(id.0 as usize).expect("the engine names requests that it was given");
        entry.io = true;
        usize::from(entry.disk)
    }

    /// Returns whether an I/O may have its buffer, out of `limit` bytes for all disks. Half of the limit is reserved
    /// for the disks in equal parts, so that a disk that hangs does not stop the others. Beyond its part, a disk leaves
    /// room for what the others wait for (`wanted`). I/O that may turn out to be unnecessary (`too`) is limited to its
    /// disk's part. The first I/O of a disk is never refused, nor is the first of that kind for this limit.
    pub fn share(&self, io: &DiskIo, limit: usize, wanted: impl Fn(usize) -> usize) -> Tried {
        let part = limit / 2 / self.held.len();
        let fits = |held: usize, room: usize| held == 0 || held.saturating_add(io.bytes) <= room;
        let others = self.held.iter().enumerate().filter(|(other, _)| *other != io.disk);
        let theirs: usize = others.map(|(other, held)| held.all.max(part).max(wanted(other))).sum();
        let held = self.held[io.disk];
        if io.too && !fits(held.too, part) {
            Tried::NoHedgeShare
        } else if !fits(held.all, limit.saturating_sub(theirs).max(part)) {
            Tried::NoShare
        } else {
            Tried::Placed
        }
    }

    /// Adds the buffer of an I/O to the bytes lent to its disk, until [`Self::end_io`].
    pub fn take_share(&mut self, io: &DiskIo) {
        if let Some(entry) = self.slab.get_mut(io.id.0 as usize) {
            entry.held = Held::of(io.bytes, io.too);
            self.lend(io.disk, io.bytes, io.too);
        }
    }

    /// Adds `bytes` of an I/O to the bytes lent to `disk`.
    pub(super) fn lend(&mut self, disk: usize, bytes: usize, too: bool) {
        let lent = Held::of(bytes, too);
        let held = &mut self.held[disk];
        held.all += lent.all;
        held.too += lent.too;
    }

    /// Subtracts `bytes` of an I/O from the bytes lent to `disk`.
    pub(super) fn take_back(&mut self, disk: usize, bytes: usize, too: bool) {
        let lent = Held::of(bytes, too);
        let held = &mut self.held[disk];
        held.all -= lent.all;
        held.too -= lent.too;
    }

    /// Ends the store's use of `id`, and subtracts its buffer from the bytes lent. Frees the ID of a completed request.
    pub fn end_io(&mut self, id: RequestId) {
        if let Some(entry) = self.slab.get_mut(id.0 as usize) {
            entry.io = false;
            let (disk, done) = (usize::from(entry.disk), std::mem::take(&mut entry.held));
            if entry.pending.is_none() {
                self.slab.remove(id.0 as usize);
            }
            self.take_back(disk, done.all, done.too > 0);
        }
    }
}

impl Held {
    fn of(bytes: usize, too: bool) -> Self {
        Self { all: bytes, too: if too { bytes } else { 0 } }
    }
}

/// Returns the store's operation for a request of the engine.
pub fn store_op(op: GuestOp) -> StoreOp {
    // Requests are bounded far below 4 GiB by the frontend.
    let short = |length: u64| u32::try_from(length).unwrap_or(u32::MAX);
    match op {
        GuestOp::Read(range) => StoreOp::Read { offset: range.offset, len: short(range.length) },
        GuestOp::Write { range, durable } => StoreOp::Write { offset: range.offset, len: short(range.length), durable },
        GuestOp::Flush => StoreOp::Flush,
        GuestOp::Discard(range) => StoreOp::Discard { offset: range.offset, len: range.length },
        GuestOp::WriteZeroes { range, may_unmap, durable } => {
            StoreOp::WriteZeroes { offset: range.offset, len: range.length, may_unmap, durable }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn io(id: RequestId, disk: usize, bytes: usize, too: bool) -> DiskIo {
        DiskIo { id, disk, op: GuestOp::Flush, too, bytes }
    }

    /// Lends `bytes` to I/O of a disk.
    fn begin(table: &mut RequestTable, disk: u16, bytes: usize, too: bool) -> RequestId {
        let (op, issued, origin) = (GuestOp::Flush, Nanos(0), Origin::HandOver);
        let id = table.insert(Pending { disk, op, issued, buffer: None, delivered: false, origin });
        table.begin_io(id);
        table.take_share(&io(id, disk.into(), bytes, too));
        id
    }

    fn has_share(table: &RequestTable, disk: usize, bytes: usize, too: bool, limit: usize) -> bool {
        table.share(&io(RequestId(0), disk, bytes, too), limit, |_| 0) == Tried::Placed
    }

    #[test]
    fn a_share_is_taken_until_the_store_is_done_whether_or_not_the_guest_has_its_answer() {
        let mut table = RequestTable::new(2);
        let room = |table: &RequestTable, disk, bytes| has_share(table, disk, bytes, true, 400);
        assert!(room(&table, 1, usize::MAX), "one can always");
        let first = begin(&mut table, 1, 60, true);
        assert!(room(&table, 1, 40) && !room(&table, 1, 41));
        let second = begin(&mut table, 1, 40, true);
        assert!(table.remove(first).is_some() && table.remove(first).is_none() && !table.are_completed());
        assert!(!room(&table, 1, 1), "the store is still at it");
        assert!(room(&table, 0, 100), "another disk has a share of its own");
        assert!(has_share(&table, 1, 200, false, 400), "what a guest waits for has more");
        table.end_io(first);
        assert!(room(&table, 1, 60));
        table.end_io(second);
        assert!(room(&table, 1, usize::MAX));
        assert!(table.remove(second).is_some() && table.is_empty() && table.are_completed());
    }

    #[test]
    fn a_disk_that_hangs_leaves_the_others_their_parts() {
        let mut table = RequestTable::new(4);
        let room = |table: &RequestTable, disk, bytes| has_share(table, disk, bytes, false, 800);
        let first = begin(&mut table, 0, 400, false);
        assert!(room(&table, 0, 100) && !room(&table, 0, 101), "all but a part for each of three");
        let second = begin(&mut table, 0, 100, false);
        assert!(!room(&table, 0, 1));
        for disk in 1..4 {
            let id = begin(&mut table, disk, 1, false);
            assert!(room(&table, usize::from(disk), 99) && !room(&table, usize::from(disk), 100));
            table.end_io(id);
        }
        table.end_io(first);
        table.end_io(second);
        assert!(room(&table, 0, 500));
    }

    #[test]
    fn disks_leave_each_other_what_they_wait_for_but_not_their_own_parts() {
        let mut table = RequestTable::new(2);
        begin(&mut table, 0, 50, false);
        let room = |bytes, wanted| table.share(&io(RequestId(0), 0, bytes, false), 400, |_| wanted) == Tried::Placed;
        assert!(room(250, 0) && !room(251, 0));
        assert!(room(150, 200) && !room(151, 200));
        assert!(room(50, 400) && !room(51, 400), "its part");
    }

    #[test]
    fn a_disk_that_is_alone_can_have_everything() {
        let mut table = RequestTable::new(1);
        begin(&mut table, 0, 799, false);
        assert!(has_share(&table, 0, 1, false, 800) && !has_share(&table, 0, 2, false, 800));
    }
}
