//! What happens on the descriptors, as events of the engine.

use super::poller::Source;
use super::requests::{Group, Origin, Pending};
use super::{Disk, Driver};
use crate::link::Received;
use crate::trace::TraceWriter;
use remoca_core::engine::{DiskError, Evicted, FetchId, GuestOp, PageOutcome, PoolOffer, ServerNumber};
use remoca_core::units::{ByteRange, DiskIndex, PAGE_SIZE, PAGE_SIZE_U64, PageCount};
use remoca_frontend::device::{Frontend, GuestRequest};
use remoca_frontend::nbd::Target;
use remoca_frontend::request::{CopyError, Operation, Outcome, ZeroRange};
use remoca_io::narrow;
use remoca_protocol::port;
use remoca_protocol::{ErrorCode, Frame, Welcome};
use remoca_store::StoreEvent;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::rc::Rc;

/// Requests taken from one device before others get their turn.
const REQUESTS_PER_TURN: usize = 256;
/// Bytes discarded or zeroed on one disk before others get their turn: the index is asked for each block of them.
const UNKNOWN_BYTES_PER_TURN: u64 = 512 << 20;
/// Evicted pages taken before the disks get their turn: all of them are copied and hashed here.
const PORT_BYTES_PER_TURN: usize = 4 << 20;

impl Driver {
    pub(super) fn register(&mut self) -> io::Result<()> {
        self.poller.add(self.stop.as_fd(), Source::Stop, false)?;
        self.poller.add(self.hangup.as_fd(), Source::Hangup, false)?;
        if let Some(control) = &self.control {
            self.poller.add(control.wake_fd(), Source::Control, false)?;
        }
        if let Some(link) = &self.link {
            self.poller.add(link.wake_fd(), Source::LinkWake, false)?;
        }
        for (disk, index) in self.disks.iter().zip(0..) {
            self.poller.add(disk.store.event_fd(), Source::Store(index), false)?;
            self.poller.add(disk.frontend.event_fd(), Source::Disk(index), false)?;
        }
        if let Some(port) = &self.port {
            self.poller.add(port.frontend.event_fd(), Source::Port, false)?;
        }
        if let Some(nbd) = &self.nbd {
            self.poller.add(nbd.event_fd(), Source::Nbd, false)?;
        }
        self.poller.add(self.migration.wake_up().fd(), Source::Migration, false)?;
        self.poller.add(self.index_size.wake_fd(), Source::Index, false)?;
        if let Some(trace) = &self.trace {
            self.poller.add(trace.wake_fd(), Source::Trace, false)?;
        }
        Ok(())
    }

    pub(super) fn handle(&mut self, source: Source, writable: bool) {
        match source {
            Source::Stop => {}
            Source::Control => self.answer_control(),
            Source::LinkWake => self.take_answers(),
            Source::LinkSocket => {
                if writable && let Some(link) = &mut self.link {
                    link.note_writable();
                }
                self.receive();
            }
            Source::Store(disk) => {
                let disk = usize::from(disk);
                // The store goes on with writes, and hands over what this turn has queued.
                self.stamp_writes();
                self.disks[disk].store.handle_ready(self.clock.now());
                self.take_store_events(disk);
            }
            Source::Disk(disk) => self.serve_disk(disk),
            Source::Port => self.serve_port(),
            Source::Nbd => self.attach_clients(),
            Source::Hangup => {
                let _ = rustix::io::read(&self.hangup, &mut [0; 128]);
                self.begin_upgrade(None, None);
            }
            Source::Upgrade => self.hear_program(),
            Source::Migration => self.hear_migration(),
            Source::Index => self.take_region(),
            Source::Trace => self.trace.iter().for_each(TraceWriter::clear_wake),
        }
    }

    /// Takes what an earlier turn left, so that no device and no server starves the others.
    pub(super) fn take_leftovers(&mut self) {
        if std::mem::take(&mut self.receive_again) {
            self.receive();
        }
        if std::mem::take(&mut self.pop_again) {
            for disk in 0..self.disks.len() {
                self.pop_requests(u16::try_from(disk).unwrap_or(u16::MAX));
            }
            self.pop_port();
        }
        self.move_index();
    }

    /// Attaches clients to the exports that they chose; what they say next is that frontend's event.
    fn attach_clients(&mut self) {
        let Some(nbd) = &mut self.nbd else { return };
        let attached = nbd.handle_events(self.clock.now()).unwrap_or_else(|error| {
            tracing::warn!("NBD clients: {error}");
            Vec::new()
        });
        for client in attached {
            let frontend = match client.target {
                Target::Disk(disk) => self.disks.get_mut(usize::from(disk)).map(|disk| &mut disk.frontend),
                Target::Port => self.port.as_mut().map(|port| &mut port.frontend),
            };
            if let Some(Err(error)) = frontend.map(|frontend| frontend.attach(client)) {
                tracing::warn!("an NBD client cannot be attached: {error}");
            }
        }
    }

    fn serve_disk(&mut self, disk: u16) {
        let frontend = &mut self.disks[usize::from(disk)].frontend;
        let guest = |frontend: &Frontend| (frontend.guest_memory_bytes(), frontend.is_connected());
        let before = guest(frontend);
        if let Err(error) = frontend.handle_events() {
            tracing::warn!("{}: {error}", self.disks[usize::from(disk)].name);
            return;
        }
        if guest(frontend) != before {
            self.fit_index();
        }
        self.pop_requests(disk);
    }

    fn pop_requests(&mut self, disk: u16) {
        let Disk { settles_at, frontend, .. } = &self.disks[usize::from(disk)];
        let settles = settles_at.is_some() && frontend.may_repeat();
        if !self.migration.serves() {
            let come = self.disks_come();
            return self.disks[usize::from(disk)].frontend.stand_aside(come);
        }
        if settles || self.stop_at.is_some() {
            return;
        }
        let drains = self.is_draining();
        let mut bytes = 0_u64;
        for _ in 0..REQUESTS_PER_TURN {
            if bytes >= UNKNOWN_BYTES_PER_TURN {
                break;
            }
            let frontend = &mut self.disks[usize::from(disk)].frontend;
            let Some(request) = (if drains { frontend.pop_begun() } else { frontend.pop() }) else { return };
            bytes += unknown_bytes(request.operation());
            self.begin(disk, request);
        }
        self.pop_again = true;
    }

    pub(super) fn begin(&mut self, disk: u16, request: GuestRequest) {
        let durable = request.is_durable() || !self.disks[usize::from(disk)].frontend.write_cache_enabled();
        self.migration.wrote |= !matches!(request.operation(), Operation::Read { .. } | Operation::Flush);
        match request.operation().clone() {
            Operation::Read { range } => self.begin_whole(disk, GuestOp::Read(byte_range(&range)), request),
            Operation::Write { range } => {
                self.begin_whole(disk, GuestOp::Write { range: byte_range(&range), durable }, request);
            }
            Operation::Flush => self.begin_whole(disk, GuestOp::Flush, request),
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

    fn begin_whole(&mut self, disk: u16, op: GuestOp, request: GuestRequest) {
        let origin = Origin::Whole(request);
        let id = self.requests.insert(Pending { disk, op, issued: self.now, buffer: None, delivered: false, origin });
        self.engine.handle_request(self.now, id, DiskIndex(disk), op);
        self.execute();
    }

    /// Begins a request of several ranges: each is a request of the engine, the last one completes the guest's. Empty
    /// ranges need nothing.
    fn begin_group(&mut self, disk: u16, request: GuestRequest, ops: Vec<GuestOp>) {
        let is_empty = |op: &GuestOp| match op {
            GuestOp::Discard(range) | GuestOp::WriteZeroes { range, .. } => range.length == 0,
            GuestOp::Read(_) | GuestOp::Write { .. } | GuestOp::Flush => false,
        };
        let ops: Vec<_> = ops.into_iter().filter(|op| !is_empty(op)).collect();
        if ops.is_empty() {
            self.disks[usize::from(disk)].frontend.complete(request, Outcome::Done);
            return;
        }
        let group = Rc::new(Group::new(Some(request), ops.len()));
        for op in ops {
            let origin = Origin::Part(Rc::clone(&group));
            let id =
                self.requests.insert(Pending { disk, op, issued: self.now, buffer: None, delivered: false, origin });
            self.engine.handle_request(self.now, id, DiskIndex(disk), op);
            self.execute();
        }
    }

    /// Takes what the store has to say, and tells the engine. False if that was nothing.
    pub(super) fn take_store_events(&mut self, disk: usize) -> bool {
        let mut any = false;
        while let Some(event) = self.disks[disk].store.next_event() {
            any = true;
            match event {
                StoreEvent::ContentUncertain => {
                    let image = &self.disks[disk].image;
                    tracing::warn!("{image}: its server came back; what was known of it is void");
                    let index = DiskIndex(u16::try_from(disk).unwrap_or(u16::MAX));
                    self.engine.handle_content_uncertain(index);
                    self.requests.repeat_parts(index.0);
                    self.disks[disk].frontend.repeat_parts();
                }
                StoreEvent::Looked { changed_ns } => self.warmth.end_look(disk, changed_ns),
                StoreEvent::Completed(completion) => {
                    narrow::passes("disk-done");
                    let Ok(id) = u32::try_from(completion.token) else { continue };
                    let id = remoca_core::engine::RequestId(id);
                    let result = completion.result.map_err(|error| DiskError(error.errno));
                    if let Some(pending) = self.requests.get_mut(id) {
                        self.warmth.end(disk, &pending.op);
                    }
                    self.disk_done(id, result, completion.buffer);
                }
            }
            self.execute();
        }
        self.note_failure(disk);
        any
    }

    fn serve_port(&mut self) {
        let Some(port) = &mut self.port else { return };
        if let Err(error) = port.frontend.handle_events() {
            tracing::warn!("eviction port: {error}");
            return;
        }
        self.pop_port();
    }

    fn pop_port(&mut self) {
        if !self.migration.serves() {
            // What was evicted needs no flush.
            if let Some(port) = &mut self.port {
                port.frontend.stand_aside(false);
            }
            return;
        }
        if self.stop_at.is_some() {
            return;
        }
        let drains = self.is_draining();
        let mut bytes = 0;
        while bytes < PORT_BYTES_PER_TURN {
            let Some(port) = &mut self.port else { return };
            let request = if drains { port.frontend.pop_begun() } else { port.frontend.pop() };
            let Some(mut request) = request else { return };
            bytes += request.data_length().max(PAGE_SIZE);
            let outcome = self.execute_port(&mut request);
            if let Some(port) = &mut self.port {
                port.frontend.complete(request, outcome);
            }
        }
        self.pop_again = true;
    }

    fn execute_port(&mut self, request: &mut GuestRequest) -> Outcome {
        let done = match request.operation().clone() {
            Operation::Read { range } => self.read_port(request, range.start).is_ok(),
            Operation::Write { range } => self.take_evictions(request, range.start),
            Operation::Flush => true,
            Operation::Discard { .. } | Operation::WriteZeroes { .. } => return Outcome::Unsupported,
        };
        if done { Outcome::Done } else { Outcome::BROKEN }
    }

    fn read_port(&self, request: &mut GuestRequest, start: u64) -> Result<(), CopyError> {
        request.fill_zero(0, request.data_length())?;
        if start == 0 {
            let cookie = self.port.as_ref().map_or(0, |port| port.cookie);
            let page = port::identification(&self.engine.stats(), cookie, self.engine.advice());
            let length = request.data_length().min(PAGE_SIZE);
            request.copy_to_guest(0, &page[..length])?;
        }
        Ok(())
    }

    /// Takes evicted pages. Each is copied out of guest memory before it is looked at: the guest may change it
    /// meanwhile.
    fn take_evictions(&mut self, request: &GuestRequest, start: u64) -> bool {
        for offset in (0..request.data_length()).step_by(PAGE_SIZE) {
            if request.copy_from_guest(offset, &mut self.page[..]).is_err() {
                return false;
            }
            if start == 0 && offset == 0 {
                self.agent = port::agent_stats(&self.page[..]).or(self.agent);
                continue;
            }
            let evicted = self.engine.handle_evicted(&self.page[..]);
            if let (Evicted::Admit(slot), Some(link)) = (evicted, &mut self.link) {
                link.send_page(slot, &self.page[..]);
            }
            self.execute();
        }
        true
    }

    fn next_answer(&mut self) -> Option<(ServerNumber, Option<Welcome>)> {
        let now = self.clock.now();
        self.link.as_mut().and_then(|link| link.take_answer(now))
    }

    fn take_answers(&mut self) {
        while let Some((server, welcome)) = self.next_answer() {
            self.engine.handle_answer(self.now, server, welcome.map(|welcome| pool_offer(&welcome)));
            self.execute();
        }
    }

    pub(super) fn receive(&mut self) {
        let Some(mut link) = self.link.take() else { return };
        // The frames borrow the link's buffer while they are handled; what is sent meanwhile waits in `replies`.
        let received = link.receive(|frame| self.handle_frame(frame));
        self.link = Some(link);
        self.execute();
        if let Some(code) = self.dismissal.take() {
            return self.lose_session(&format!("it ended the session: {code:?}"));
        }
        match received {
            Ok(Received::Drained) => {}
            Ok(Received::More) => self.receive_again = true,
            Err(error) => self.lose_session(&error.to_string()),
        }
    }

    pub(super) fn handle_frame(&mut self, frame: &Frame<'_>) {
        match *frame {
            Frame::SendPage { request, page, .. } => {
                let outcome = self.engine.handle_page(self.now, FetchId(request.0), page);
                if let PageOutcome::Deliver { request, offset } = outcome
                    && let Some(Pending { origin: Origin::Whole(request), delivered, .. }) =
                        self.requests.get_mut(request)
                {
                    self.captured.capture(&mut self.engine, request, offset as usize, page.len());
                    *delivered = true;
                    // The guest may be gone; its request still completes.
                    let _ = request.copy_to_guest(offset as usize, page);
                }
            }
            Frame::Sized { npages, .. } => self.engine.handle_sized(self.now, npages),
            Frame::Error(error) => match error.code {
                ErrorCode::NotFound => self.engine.handle_missing(self.now, FetchId(error.request.0)),
                ErrorCode::NoMemory | ErrorCode::Quota => {
                    let available = PageCount(error.detail);
                    if !std::mem::replace(&mut self.refusal_told, true) {
                        tracing::warn!(
                            "the memory server has no room for the cache's size; it could give {} MiB more. Taking what there is.",
                            (u64::from(available.0) * PAGE_SIZE_U64) >> 20
                        );
                    }
                    self.engine.handle_size_refused(self.now, available);
                }
                // After these the server closes the connection. Should it not, we do.
                ErrorCode::VersionMismatch | ErrorCode::StaleEpoch | ErrorCode::Malformed | ErrorCode::Busy => {
                    self.dismissal = Some(error.code);
                }
                ErrorCode::Unknown(code) => {
                    tracing::debug!("the memory server says error {code}, which means nothing here")
                }
            },
            // A PONG too: nobody asked, and a server that owes an answer must not pass for alive by it.
            _ => tracing::debug!("the memory server sent a frame that means nothing here"),
        }
    }
}

fn pool_offer(welcome: &Welcome) -> PoolOffer {
    PoolOffer {
        generation: welcome.pool_generation.0,
        npages: welcome.npages,
        available: welcome.available,
        // The engine counts on from the server's figure, so it must leave room for that.
        sends_received: welcome.sends_received.0.min(u64::MAX / 2),
    }
}

fn byte_range(range: &Range<u64>) -> ByteRange {
    ByteRange { offset: range.start, length: range.end - range.start }
}

/// Returns the bytes that a request makes unknown without bringing data.
fn unknown_bytes(operation: &Operation) -> u64 {
    let length = |range: &Range<u64>| range.end - range.start;
    match operation {
        Operation::Discard { ranges } => ranges.iter().map(length).sum(),
        Operation::WriteZeroes { ranges } => ranges.iter().map(|zero| length(&zero.range)).sum(),
        Operation::Read { .. } | Operation::Write { .. } | Operation::Flush => 0,
    }
}
