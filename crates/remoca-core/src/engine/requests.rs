//! Table of guest requests: what each expects of the memory server, and the disk read in flight for it.
//!
//! A request leaves the table when it is answered and the disk is done with it. Its ID may then be reused; the serial
//! number distinguishes the two requests. Callers get copies: only the methods of [`Requests`] change a request.

use super::types::{GuestOp, RequestId};
use crate::units::{ByteRange, DiskIndex, Nanos, PoolIndex, PoolSet};

/// Pages that a read expects from the memory server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pages {
    /// The server was not asked.
    None,
    /// `left` of the `asked` pages are outstanding.
    Waiting { left: u32, asked: u32 },
    /// The pages were given up: only the disk can answer.
    GivenUp,
}

/// Reason of a disk read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadReason {
    /// Only the disk can answer it.
    Needed,
    /// The server's answer is late.
    Hedge,
    /// The wait for the server reached the timeout.
    Timeout,
    /// The read compares server and disk.
    Probe,
    /// Pools could answer it, but the disk is to read on.
    Stream,
}

/// Disk read in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiskIo {
    pub(super) since: Nanos,
    pub(super) reason: ReadReason,
    /// Whether no abandoned read of this disk was in flight when it began.
    pub(super) is_undisturbed: bool,
    /// Number of other reads of this disk in flight when it began.
    pub(super) queue_depth: u32,
    /// Length in bytes of the gap after what the disk was sent before, if it continues that.
    pub(super) continues_after: Option<u64>,
}

/// Copy of a guest request at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) disk: DiskIndex,
    pub(super) op: GuestOp,
    pub(super) issued: Nanos,
    /// Serial number: the number of all requests up to this one. It distinguishes this request from later ones with the
    /// same ID.
    pub(super) serial: u64,
    pub(super) pages: Pages,
    /// Pools that were asked for pages.
    pub(super) pools: PoolSet,
    /// Pool among them that its wins, its losses and its latency count for: the slowest one when the wait began.
    pub(super) rival: PoolIndex,
    /// Disk read in flight for it.
    pub(super) io: Option<DiskIo>,
    /// Whether the disk has failed this read once.
    pub(super) failed: bool,
    /// Whether the guest has its answer, while the disk still reads.
    pub(super) answered: bool,
}

impl Request {
    /// Returns whether the server may still answer this read.
    #[inline]
    pub(super) fn waits(&self) -> bool {
        matches!(self.pages, Pages::Waiting { .. }) && !self.answered
    }
}

/// Requests that are not finished, by ID.
#[derive(Debug, Default)]
pub(super) struct Requests {
    slots: Vec<Option<Request>>,
    /// Serial number of the newest request.
    serial: u64,
}

impl Requests {
    /// Adds a guest request.
    #[inline]
    pub(super) fn begin(&mut self, now: Nanos, id: RequestId, disk: DiskIndex, op: GuestOp) {
        let at = id.0 as usize;
        if self.slots.len() <= at {
            self.slots.resize(at + 1, None);
        }
        assert!(self.slots[at].is_none(), "the number {} is given to two requests at once", id.0);
        self.serial += 1;
        self.slots[at] = Some(Request {
            disk,
            op,
            issued: now,
            serial: self.serial,
            pages: Pages::None,
            pools: PoolSet::default(),
            rival: PoolIndex(0),
            io: None,
            failed: false,
            answered: false,
        });
    }

    /// Returns the serial number of the newest request.
    #[inline]
    pub(super) fn newest(&self) -> u64 {
        self.serial
    }

    /// Returns the request with this ID, or `None` if the ID is not in use.
    #[inline]
    pub(super) fn get(&self, id: RequestId) -> Option<Request> {
        self.slots.get(id.0 as usize).copied().flatten()
    }

    /// Returns all IDs that a request may have, whether they are in use or not.
    fn ids(&self) -> impl Iterator<Item = RequestId> + use<> {
        (0..).take(self.slots.len()).map(RequestId)
    }

    /// Returns whether any request is of `disk`, answered or not.
    pub(super) fn has_any_of(&self, disk: DiskIndex) -> bool {
        self.slots.iter().flatten().any(|request| request.disk == disk)
    }

    /// Returns the number of unanswered requests.
    pub(super) fn in_flight(&self) -> usize {
        self.slots.iter().flatten().filter(|request| !request.answered).count()
    }

    /// Returns disk and range of the read `serial`, or `None` if it does not wait for the server only.
    pub(super) fn only_at_server(&self, id: RequestId, serial: u64) -> Option<(DiskIndex, ByteRange)> {
        let waits = |request: &Request| request.serial == serial && request.waits() && request.io.is_none();
        match self.get(id).filter(waits)? {
            Request { disk, op: GuestOp::Read(range), .. } => Some((disk, range)),
            _ => None,
        }
    }

    /// Returns how many pages the read `serial` still waits for, and how many it asked for. Returns `None` if it waits
    /// for no pages.
    #[inline]
    pub(super) fn pages_owed(&self, id: RequestId, serial: u64) -> Option<(u32, u32)> {
        let request = self.get(id)?;
        match request.pages {
            Pages::Waiting { left, asked } if request.serial == serial && request.waits() => Some((left, asked)),
            Pages::Waiting { .. } | Pages::None | Pages::GivenUp => None,
        }
    }

    /// Starts the wait of a read for `asked` pages of `pools`. It counts for the pool `rival` among them.
    #[inline]
    pub(super) fn begin_wait(&mut self, id: RequestId, asked: u32, pools: PoolSet, rival: PoolIndex) {
        if let Some(request) = &mut self.slots[id.0 as usize] {
            request.pages = Pages::Waiting { left: asked, asked };
            (request.pools, request.rival) = (pools, rival);
        }
    }

    /// Returns the IDs of the reads that wait for pages of `pool`, perhaps among those of others.
    pub(super) fn reads_waiting_for(&self, pool: PoolIndex) -> Vec<RequestId> {
        let waits = |id: &RequestId| self.get(*id).is_some_and(|it| it.waits() && it.pools.contains(pool));
        self.ids().filter(waits).collect()
    }

    /// Sets how many pages a read still waits for, and how many it asked for.
    #[inline]
    pub(super) fn set_pages_owed(&mut self, id: RequestId, left: u32, asked: u32) {
        if let Some(request) = &mut self.slots[id.0 as usize] {
            request.pages = Pages::Waiting { left, asked };
        }
    }

    /// Gives up the pages of a read, and returns a copy of the read. Returns `None` if no request has this ID.
    pub(super) fn give_up_pages(&mut self, id: RequestId) -> Option<Request> {
        let request = self.slots[id.0 as usize].as_mut()?;
        request.pages = Pages::GivenUp;
        Some(*request)
    }

    /// Stores the record of a request's disk read.
    #[inline]
    pub(super) fn begin_io(&mut self, id: RequestId, io: DiskIo) {
        if let Some(request) = &mut self.slots[id.0 as usize] {
            assert!(request.io.is_none(), "the disk is asked twice for request {}", id.0);
            request.io = Some(io);
        }
    }

    /// Removes the record of a disk read whose request was not answered before.
    #[inline]
    pub(super) fn end_io(&mut self, id: RequestId) {
        if let Some(request) = &mut self.slots[id.0 as usize] {
            request.io = None;
        }
    }

    /// Removes the record of a failed disk read whose request the server may still answer, and marks the request as
    /// failed.
    pub(super) fn fail_io(&mut self, id: RequestId) {
        if let Some(request) = &mut self.slots[id.0 as usize] {
            (request.io, request.failed) = (None, true);
        }
    }

    /// Marks a request as answered, and returns a copy of it. Returns `None` if no request has this ID. The request
    /// stays in the table while a disk read for it is in flight.
    #[inline]
    pub(super) fn answer(&mut self, id: RequestId) -> Option<Request> {
        let slot = &mut self.slots[id.0 as usize];
        let request = slot.as_mut()?;
        assert!(!request.answered, "request {} completes twice", id.0);
        request.answered = true;
        let answered = *request;
        if answered.io.is_none() {
            *slot = None;
        }
        Some(answered)
    }

    /// Removes an answered request that the disk is done with.
    #[inline]
    pub(super) fn remove(&mut self, id: RequestId) {
        self.slots[id.0 as usize] = None;
    }
}
