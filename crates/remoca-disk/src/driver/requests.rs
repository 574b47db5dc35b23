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
    /// Part of a read's data is in guest memory: its frames do not show what they held.
    pub delivered: bool,
    pub origin: Origin,
}

/// What the guest gets when the request completes.
pub enum Origin {
    Whole(GuestRequest),
    /// One of several ranges; the last of them completes the guest's request.
    Part(Rc<Group>),
    /// Nobody: a flush before the disks are handed over.
    HandOver,
}

/// A guest request of several ranges.
pub struct Group {
    pub request: std::cell::RefCell<Option<GuestRequest>>,
    pub left: std::cell::Cell<usize>,
    pub outcome: std::cell::Cell<Outcome>,
    /// A range is done, ...
    pub done: std::cell::Cell<bool>,
    /// ... and may be lost: all of them are done again.
    pub again: std::cell::Cell<bool>,
}

impl Group {
    pub fn new(request: Option<GuestRequest>, ranges: usize) -> Self {
        let (request, left, outcome) = (request.into(), ranges.into(), Outcome::Done.into());
        Self { request, left, outcome, done: false.into(), again: false.into() }
    }

    /// Counts a range as completed.
    pub fn end_part(&self, outcome: Outcome) {
        self.outcome.set(self.outcome.get().and(outcome));
        self.left.set(self.left.get() - 1);
        self.done.set(true);
    }

    /// Returns whether some of its ranges are to be done again, with none of them left.
    pub fn must_repeat(&self) -> bool {
        self.again.get() && self.outcome.get() == Outcome::Done
    }
}

/// What a number stands for.
struct Entry {
    /// `None`: the guest has its answer, and the store is still at work.
    pending: Option<Pending>,
    disk: u16,
    io: bool,
    held: Held,
}

/// Bytes of buffers that the driver has lent to I/O of stores.
#[derive(Clone, Copy, Default)]
struct Held {
    all: usize,
    /// Of I/O that may be for nothing.
    too: usize,
}

/// Requests by number; numbers are reused, so that the engine's table stays small. A number is free again when its request
/// is completed and no store is at work for it: a completion of the store could be taken for another request's.
pub struct RequestTable {
    slab: slab::Slab<Entry>,
    held: Vec<Held>,
}

impl RequestTable {
    pub fn new(disks: usize) -> Self {
        Self { slab: slab::Slab::new(), held: vec![Held::default(); disks] }
    }

    /// Takes a request in; its number is the engine's name for it.
    pub fn insert(&mut self, pending: Pending) -> RequestId {
        // Far fewer than 2^32: a device hands out some thousand at a time.
        let entry = Entry { disk: pending.disk, pending: Some(pending), io: false, held: Held::default() };
        RequestId(u32::try_from(self.slab.insert(entry)).unwrap_or(u32::MAX))
    }

    /// Returns whether no request is under way, and no store is working.
    pub fn is_empty(&self) -> bool {
        self.slab.is_empty()
    }

    /// Returns whether a flush is under way.
    pub fn are_being_flushed(&self) -> bool {
        let mut pending = self.slab.iter().filter_map(|(_, entry)| entry.pending.as_ref());
        pending.any(|pending| pending.op == GuestOp::Flush)
    }

    /// Returns the request `id`, if it is not completed.
    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut Pending> {
        self.slab.get_mut(id.0 as usize)?.pending.as_mut()
    }

    /// Notes that `disk` may have lost what it has done of requests with several ranges.
    pub fn repeat_parts(&mut self, disk: u16) {
        for pending in self.slab.iter().filter_map(|(_, entry)| entry.pending.as_ref()) {
            if let (true, Origin::Part(group)) = (pending.disk == disk, &pending.origin) {
                group.again.set(group.again.get() || group.done.get());
            }
        }
    }

    /// Takes the request `id` out.
    pub fn remove(&mut self, id: RequestId) -> Option<Pending> {
        let entry = self.slab.get_mut(id.0 as usize)?;
        if entry.io { entry.pending.take() } else { self.slab.try_remove(id.0 as usize)?.pending }
    }

    /// Notes that a store begins work for `id`.
    pub fn begin_io(&mut self, id: RequestId) {
        if let Some(entry) = self.slab.get_mut(id.0 as usize) {
            entry.io = true;
        }
    }

    /// Returns whether an I/O can have its buffer out of `limit` bytes for all. Half of the limit is kept for the disks, each its
    /// part, whatever the others want: one that hangs must not stop them. Beyond their parts, disks leave each other what
    /// they wait for (`wanted`). I/O that may be for nothing (`too`) has no more than its disk's part. One I/O of each disk,
    /// and one of that kind, is never refused.
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

    /// Counts the buffer of an I/O, until the store is done with it.
    pub fn take_share(&mut self, io: &DiskIo) {
        if let Some(entry) = self.slab.get_mut(io.id.0 as usize) {
            entry.held = Held::of(io.bytes, io.too);
            self.lend(io.disk, io.bytes, io.too);
        }
    }

    /// Counts bytes of a disk's I/O as lent.
    pub(super) fn lend(&mut self, disk: usize, bytes: usize, too: bool) {
        let lent = Held::of(bytes, too);
        let held = &mut self.held[disk];
        held.all += lent.all;
        held.too += lent.too;
    }

    /// Counts them as given back.
    pub(super) fn take_back(&mut self, disk: usize, bytes: usize, too: bool) {
        let lent = Held::of(bytes, too);
        let held = &mut self.held[disk];
        held.all -= lent.all;
        held.too -= lent.too;
    }

    /// Notes that the store is done with `id`.
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

/// Returns the store's operation for the engine's.
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
        assert!(table.remove(first).is_some());
        assert!(!room(&table, 1, 1), "the store is still at it");
        assert!(room(&table, 0, 100), "another disk has a share of its own");
        assert!(has_share(&table, 1, 200, false, 400), "what a guest waits for has more");
        table.end_io(first);
        assert!(room(&table, 1, 60));
        table.end_io(second);
        assert!(room(&table, 1, usize::MAX));
        assert!(table.remove(second).is_some() && table.is_empty());
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
