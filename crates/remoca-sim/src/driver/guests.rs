//! The guests: each has a disk, over a ring in its memory or as an NBD client, with requests in flight.

use super::agent::PageCache;
use super::disks::{is_part, sectors};
use super::nbd::{self, Message, NbdClient};
use super::plan::{Ask, DiskPlan};
use crate::content::{Sector, bytes};
use remoca_frontend::testing::{Command, DirectFrontEnd, Options, Record, TestGuest, Ticket};
use remoca_store::StoreOp;
use std::ops::Range;
use vm_memory::{Bytes, GuestAddress};

pub(super) const QUEUE_SIZE: u16 = 16;
/// Offset of a slot's data in the test guest.
const DATA_OFFSET: u64 = 4096;
const SECTOR: u64 = 512;

/// A request that has not completed.
pub(super) struct Request {
    pub(super) step: usize,
    pub(super) ask: Ask,
    /// Data to write.
    pub(super) data: Vec<Sector>,
    /// Event in which it was submitted.
    pub(super) submitted: u64,
    pub(super) ticket: Option<Ticket>,
    /// Whether it must be durable when it completes, ...
    pub(super) is_durable: bool,
    /// ... unless the write cache was switched since; this is the number of switches at its submission.
    pub(super) switches: u32,
    /// Whether a part of it certainly failed, or may have failed.
    pub(super) failed: bool,
    pub(super) may_have_failed: bool,
    /// Number of I/Os that the store has begun for it, ...
    pub(super) ios: u32,
    /// ... and the sectors that it has modified.
    pub(super) done: Vec<Range<usize>>,
    /// For a flush: the versions it must make durable.
    pub(super) promise: Vec<usize>,
}

impl Request {
    /// Returns whether `op` with this data is this request or a part of it.
    pub(super) fn asks_for(
        &self,
        op: &StoreOp,
        data: Option<&[Sector]>,
        plan: &DiskPlan,
        content: impl Fn(usize) -> Option<Sector>,
    ) -> bool {
        if !is_part(&self.ask, op, plan.is_coarse) {
            return false;
        }
        let mut written = sectors(op).zip(data.unwrap_or_default());
        written.all(|(at, value)| self.writes(at, *value) || plan.is_coarse && content(at) == Some(*value))
    }

    fn writes(&self, sector: usize, value: Sector) -> bool {
        match &self.ask {
            Ask::Write { range, .. } => range.contains(&sector) && self.data[sector - range.start] == value,
            Ask::WriteZeroes { ranges, .. } => {
                value == Sector::ZERO && ranges.iter().any(|range| range.contains(&sector))
            }
            Ask::Read(_) | Ask::Flush | Ask::Discard(_) => false,
        }
    }

    /// Returns the written sectors with their content. Empty if the request is not a write.
    pub(super) fn written(&self) -> Vec<(usize, Sector)> {
        match &self.ask {
            Ask::Write { range, .. } => range.clone().zip(self.data.iter().copied()).collect(),
            Ask::WriteZeroes { ranges, .. } => ranges.iter().cloned().flatten().map(|at| (at, Sector::ZERO)).collect(),
            Ask::Read(_) | Ask::Flush | Ask::Discard(_) => Vec::new(),
        }
    }

    pub(super) fn read_bytes(&self) -> usize {
        match &self.ask {
            Ask::Read(range) => range.len() * 512,
            _ => 0,
        }
    }
}

/// Index of a completed request, and its result: the data of a read, or an error.
pub(super) type Completion = (usize, Result<Vec<Sector>, ()>);

/// Attachment of a guest.
pub(super) enum Attachment {
    Vhost { guest: Box<TestGuest>, record: Option<Record>, front: Option<DirectFrontEnd> },
    Nbd(Option<NbdClient>),
}

/// The guest of a disk.
pub(super) struct Guest {
    pub(super) attachment: Attachment,
    pub(super) requests: Vec<Request>,
    /// Requests of guests that have disconnected.
    pub(super) departed: Vec<Request>,
    /// Whether the guest is disconnected.
    pub(super) is_gone: bool,
    /// Whether its processors are stopped because it moves to another host.
    pub(super) is_paused: bool,
    /// Number of queues still to be stopped for the move.
    pub(super) queues_to_stop: u16,
    /// Pages of its disk that it has in memory.
    pub(super) memory: PageCache,
    zeroes_pages: bool,
    has_record: bool,
    /// State of the write cache as last switched; `None` if the switch was not answered.
    pub(super) cache_is_on: Option<bool>,
    pub(super) switches: u32,
    /// Versions acknowledged when the guest was asked to switch the cache off.
    pub(super) switch_promise: Vec<usize>,
    /// Whether the store has failed to make data durable.
    pub(super) flush_may_fail: bool,
    /// Whether the guest was told of that failure.
    pub(super) flush_must_fail: bool,
    /// Whether the store has crashed, and its flushes do not fail because of that.
    pub(super) has_lost: bool,
}

impl Guest {
    pub(super) fn new(plan: &DiskPlan) -> Self {
        let attachment = if plan.nbd {
            Attachment::Nbd(None)
        } else {
            let options = Options {
                queue_count: plan.queues,
                queue_size: QUEUE_SIZE,
                data_bytes: plan.longest as u64 * SECTOR,
                segment_count: plan.segments,
                ..Options::default()
            };
            let guest = Box::new(TestGuest::new(options));
            let record = plan.has_record.then(|| Record::new(&guest, true));
            Attachment::Vhost { guest, record, front: None }
        };
        Self {
            attachment,
            requests: Vec::new(),
            departed: Vec::new(),
            is_gone: false,
            is_paused: false,
            queues_to_stop: 0,
            memory: PageCache::new(plan.pages),
            zeroes_pages: plan.zeroes_pages,
            has_record: plan.has_record,
            cache_is_on: Some(true),
            switches: 0,
            switch_promise: Vec::new(),
            flush_may_fail: false,
            flush_must_fail: false,
            has_lost: false,
        }
    }

    /// Marks the requests with these steps as possibly failed, and a single one as failed. If `is_durable`, flushes may
    /// fail from now on.
    pub(super) fn note_error(&mut self, steps: &[usize], is_durable: bool) {
        self.flush_may_fail |= is_durable;
        for request in self.requests.iter_mut().filter(|request| steps.contains(&request.step)) {
            request.failed |= steps.len() == 1;
            request.may_have_failed = true;
        }
    }

    /// Resets the guest for the next process, which repeats all requests.
    pub(super) fn lose_process(&mut self) {
        for request in &mut self.requests {
            (request.failed, request.ios) = (false, 0);
            request.done.clear();
        }
        // A guest that switched the cache and got no answer does not know its state.
        self.cache_is_on = self.cache_is_on.filter(|_| !self.is_switching());
        match &mut self.attachment {
            Attachment::Vhost { front, .. } => *front = None,
            Attachment::Nbd(client) => *client = None,
        }
    }

    pub(super) fn is_switching(&self) -> bool {
        matches!(&self.attachment, Attachment::Vhost { front: Some(front), .. } if !front.is_idle())
    }

    /// Removes the guest, with its memory.
    pub(super) fn depart(&mut self) {
        self.departed.append(&mut self.requests);
        self.memory.clear();
        self.cache_is_on = None;
        match &mut self.attachment {
            Attachment::Vhost { guest, record, .. } => {
                guest.reset();
                *record = self.has_record.then(|| Record::new(guest, true));
            }
            Attachment::Nbd(client) => *client = None,
        }
    }

    pub(super) fn forget_failures(&mut self) {
        (self.flush_may_fail, self.flush_must_fail) = (false, false);
    }

    /// Submits the request at index `at` to a virtqueue, or sends it to the NBD server. Does nothing if the NBD client
    /// is disconnected.
    pub(super) fn send(&mut self, at: usize) {
        let request = &mut self.requests[at];
        match &mut self.attachment {
            Attachment::Vhost { guest, .. } => {
                let data = bytes(&request.data);
                let queue = u16::try_from(request.step).unwrap_or(0) % guest.options.queue_count;
                let sector = |at: usize| at as u64;
                let entries = |ranges: &[Range<usize>], flags: u32| -> Vec<(u64, u32, u32)> {
                    let entry = |range: &Range<usize>| {
                        (range.start as u64, u32::try_from(range.len()).unwrap_or(u32::MAX), flags)
                    };
                    ranges.iter().map(entry).collect()
                };
                let ticket = match &request.ask {
                    Ask::Read(range) => {
                        let length = range.len() as u64 * SECTOR;
                        guest.submit(queue, Command::Read { sector: sector(range.start), length })
                    }
                    Ask::Write { range, .. } => {
                        guest.submit(queue, Command::Write { sector: sector(range.start), data: &data })
                    }
                    Ask::Flush => guest.submit(queue, Command::Flush),
                    Ask::Discard(ranges) => guest.submit(queue, Command::Discard(&entries(ranges, 0))),
                    Ask::WriteZeroes { ranges, unmap, .. } => {
                        guest.submit(queue, Command::WriteZeroes(&entries(ranges, u32::from(*unmap))))
                    }
                };
                if self.zeroes_pages && request.read_bytes() > 0 {
                    let page = GuestAddress(guest.slot_address(ticket) + DATA_OFFSET);
                    let _ = guest.memory.write_slice(&vec![0; request.read_bytes()], page);
                }
                guest.queues[usize::from(queue)].kick();
                request.ticket = Some(ticket);
            }
            Attachment::Nbd(Some(client)) => send_nbd(client, request),
            Attachment::Nbd(None) => {}
        }
    }
}

pub(super) fn send_nbd(client: &mut NbdClient, request: &Request) {
    let data = bytes(&request.data);
    let fua = |durable: bool| if durable { nbd::FUA } else { 0 };
    let (command, flags, range) = match &request.ask {
        Ask::Read(range) => (nbd::READ, 0, range.clone()),
        Ask::Write { range, durable, .. } => (nbd::WRITE, fua(*durable), range.clone()),
        Ask::Flush => (nbd::FLUSH, 0, 0..0),
        Ask::Discard(ranges) => (nbd::TRIM, 0, ranges[0].clone()),
        Ask::WriteZeroes { ranges, unmap, durable } => {
            let keep = if *unmap { 0 } else { nbd::NO_HOLE };
            (nbd::WRITE_ZEROES, fua(*durable) | keep, ranges[0].clone())
        }
    };
    client.send(&Message {
        command,
        flags,
        cookie: request.step as u64,
        offset: range.start as u64 * SECTOR,
        length: u32::try_from(range.len() as u64 * SECTOR).unwrap_or(u32::MAX),
        data: &data,
    });
}
