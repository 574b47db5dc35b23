//! The table of guest requests: which there are, what each expects of the memory server, and whether the disk reads for it.
//!
//! A request leaves the table when the guest has its answer and the disk is done with it. Its number may then come again; the
//! serial tells the two apart. What is handed out is a copy: only the methods of [`Requests`] change a request.

use super::types::{GuestOp, RequestId};
use crate::units::{ByteRange, DiskIndex, Nanos};

/// What a read expects of the memory server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pages {
    /// It was not asked.
    None,
    /// `left` of the `asked` pages.
    Waiting { left: u32, asked: u32 },
    /// Nothing any more.
    GivenUp,
}

/// Reason of a disk read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadReason {
    /// Nobody else can answer it.
    Needed,
    /// The server's answer is late.
    Hedge,
    /// It is very late.
    Timeout,
    /// The server is on trial.
    Probe,
}

/// A disk read in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiskIo {
    pub(super) since: Nanos,
    pub(super) reason: ReadReason,
    /// No abandoned read of this disk was in flight when it began.
    pub(super) is_undisturbed: bool,
    /// Reads of this disk that were in flight when it began.
    pub(super) queue_depth: u32,
}

/// A guest request at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) disk: DiskIndex,
    pub(super) op: GuestOp,
    pub(super) issued: Nanos,
    /// Tells this request from later ones with the same id.
    pub(super) serial: u64,
    pub(super) pages: Pages,
    /// The disk read in flight for it.
    pub(super) io: Option<DiskIo>,
    /// A read that the disk failed once.
    pub(super) failed: bool,
    /// The guest has its answer; only the disk's is to come.
    pub(super) answered: bool,
}

impl Request {
    /// Returns whether the server's answer would be the guest's.
    #[inline]
    pub(super) fn waits(&self) -> bool {
        matches!(self.pages, Pages::Waiting { .. }) && !self.answered
    }
}

/// The requests that are not over, by number.
#[derive(Debug, Default)]
pub(super) struct Requests {
    slots: Vec<Option<Request>>,
    /// Serial of the newest request.
    serial: u64,
}

impl Requests {
    /// Enters a request of the guest.
    #[inline]
    pub(super) fn begin(&mut self, now: Nanos, id: RequestId, disk: DiskIndex, op: GuestOp) {
        let at = id.0 as usize;
        if self.slots.len() <= at {
            self.slots.resize(at + 1, None);
        }
        debug_assert!(self.slots[at].is_none(), "a request id is used twice");
        self.serial += 1;
        let (serial, pages) = (self.serial, Pages::None);
        self.slots[at] =
            Some(Request { disk, op, issued: now, serial, pages, io: None, failed: false, answered: false });
    }

    /// Returns the serial of the newest request.
    #[inline]
    pub(super) fn newest(&self) -> u64 {
        self.serial
    }

    /// Returns the request with this number.
    #[inline]
    pub(super) fn get(&self, id: RequestId) -> Option<Request> {
        self.slots.get(id.0 as usize).copied().flatten()
    }

    /// Returns all numbers that the table has a place for.
    pub(super) fn ids(&self) -> impl Iterator<Item = RequestId> + use<> {
        (0..).take(self.slots.len()).map(RequestId)
    }

    /// Returns the number of requests whose answer the guest does not have.
    pub(super) fn in_flight(&self) -> usize {
        self.slots.iter().flatten().filter(|request| !request.answered).count()
    }

    /// Returns the disk and the range of the read `serial`, if only the server is working on it.
    pub(super) fn only_at_server(&self, id: RequestId, serial: u64) -> Option<(DiskIndex, ByteRange)> {
        let waits = |request: &Request| request.serial == serial && request.waits() && request.io.is_none();
        match self.get(id).filter(waits)? {
            Request { disk, op: GuestOp::Read(range), .. } => Some((disk, range)),
            _ => None,
        }
    }

    /// Returns how many pages the read `serial` still waits for, and of how many; `None` if it was answered some other way.
    #[inline]
    pub(super) fn pages_owed(&self, id: RequestId, serial: u64) -> Option<(u32, u32)> {
        let request = self.get(id)?;
        match request.pages {
            Pages::Waiting { left, asked } if request.serial == serial && request.waits() => Some((left, asked)),
            Pages::Waiting { .. } | Pages::None | Pages::GivenUp => None,
        }
    }

    /// Sets how many pages a read still waits for, and of how many.
    #[inline]
    pub(super) fn set_pages_owed(&mut self, id: RequestId, left: u32, asked: u32) {
        if let Some(request) = &mut self.slots[id.0 as usize] {
            request.pages = Pages::Waiting { left, asked };
        }
    }

    /// Keeps a read from expecting pages, and returns it.
    pub(super) fn give_up_pages(&mut self, id: RequestId) -> Option<Request> {
        let request = self.slots[id.0 as usize].as_mut()?;
        request.pages = Pages::GivenUp;
        Some(*request)
    }

    /// Notes that the disk reads for a request.
    #[inline]
    pub(super) fn begin_io(&mut self, id: RequestId, io: DiskIo) {
        if let Some(request) = &mut self.slots[id.0 as usize] {
            debug_assert!(request.io.is_none(), "the disk reads for it already");
            request.io = Some(io);
        }
    }

    /// Notes that the disk is done with a read that was not answered before.
    #[inline]
    pub(super) fn end_io(&mut self, id: RequestId) {
        if let Some(request) = &mut self.slots[id.0 as usize] {
            request.io = None;
        }
    }

    /// Notes that the disk failed a read that the server may still answer.
    pub(super) fn fail_io(&mut self, id: RequestId) {
        if let Some(request) = &mut self.slots[id.0 as usize] {
            (request.io, request.failed) = (None, true);
        }
    }

    /// Notes that the guest has its answer, and returns the request. It stays in the table while the disk reads for it.
    #[inline]
    pub(super) fn answer(&mut self, id: RequestId) -> Option<Request> {
        let slot = &mut self.slots[id.0 as usize];
        let request = slot.as_mut()?;
        request.answered = true;
        let answered = *request;
        if answered.io.is_none() {
            *slot = None;
        }
        Some(answered)
    }

    /// Removes an answered request, which the disk is done with.
    #[inline]
    pub(super) fn remove(&mut self, id: RequestId) {
        self.slots[id.0 as usize] = None;
    }
}
