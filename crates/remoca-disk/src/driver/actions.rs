//! Execution of the engine's actions.

use super::poller::Source;
use super::requests::{DiskIo, Origin, Pending, store_op};
use super::starved::Tried;
use super::{Disk, Driver};
use crate::link::ServerLink;
use remoca_core::engine::{Action, DiskError, GuestOp, RequestId, ServerNumber};
use remoca_core::units::DiskIndex;
use remoca_frontend::request::Outcome;
use remoca_io::buffer::{BufferPool, IoBuffer};
use remoca_io::narrow;
use remoca_protocol::Frame;
use remoca_protocol::trace::{TraceRecord, TracedOp, TracedSource};

impl Driver {
    /// Executes all actions that the engine has.
    pub(super) fn execute(&mut self) {
        while let Some(action) = self.engine.poll_action() {
            match action {
                Action::Disk { request, disk, op } => self.begin_disk(request, disk, op, false),
                Action::DiskToo { request, disk, op } => self.begin_disk(request, disk, op, true),
                Action::ZeroFill { request, offset, length } => self.fill_zero(request, offset, length),
                Action::Complete { request, result } => self.complete(request, result),
                Action::Fetch { fetch, slot } => {
                    self.send(&Frame::Request { request: remoca_protocol::RequestId(fetch.0), slot });
                }
                Action::SendBlock { slot, request, offset } => self.send_block(slot, request, offset),
                Action::MovePage { from, to } => self.send(&Frame::Move { from, to }),
                Action::SetSize(npages) => {
                    self.send(&Frame::SetSize { request: remoca_protocol::RequestId(0), npages });
                }
                Action::Ask(_) | Action::Use(_) | Action::Release(_) | Action::GiveUp | Action::Leave => {
                    self.place(action);
                }
                Action::ForeignWriter(disk) => {
                    let image = &self.disks[usize::from(disk.0)].image;
                    tracing::error!(
                        "{image} holds something else than this process wrote or read there: another program writes to it! \
                         The cache was dropped. Stop the other writer, or the disk will be damaged."
                    );
                }
            }
        }
        self.judge_frames();
    }

    fn send(&mut self, frame: &Frame<'_>) {
        if let Some(link) = &mut self.link {
            link.send(frame);
        }
    }

    /// Submits the disk I/O of a request, or lets it wait for a buffer: also if there is one, but I/O of its disk waits that came
    /// before.
    fn begin_disk(&mut self, id: RequestId, disk: DiskIndex, op: GuestOp, too: bool) {
        self.requests.begin_io(id);
        let mut io = DiskIo { id, disk: usize::from(disk.0), op, too, bytes: 0 };
        io.bytes = buffer_bytes(&io, &self.disks);
        let must_wait = io.bytes > 0 && self.starved.has(io.disk);
        if must_wait || self.place_disk(io) != Tried::Placed {
            self.starved.push(io);
        }
    }

    /// Submits what there are buffers for, each disk's in turn.
    pub(super) fn feed_starved(&mut self) {
        if self.starved.is_empty() {
            return;
        }
        let Self { starved, engine, requests, disks, .. } = self;
        starved.retain(|io| {
            if io.too && requests.get_mut(io.id).is_none() {
                // A memory server has answered the read.
                engine.handle_disk_skipped(io.id);
                requests.end_io(io.id);
                return false;
            }
            // None of them has the page: now it is I/O that a guest waits for.
            io.too &= engine.waits_for_server(io.id);
            io.bytes = buffer_bytes(io, disks);
            true
        });
        let mut walk = self.starved.walk();
        while let Some(io) = self.starved.next(&mut walk) {
            let tried = self.place_disk(io);
            self.starved.note(&mut walk, tried);
        }
    }

    /// Submits the I/O if its disk has room for it, and there is a buffer.
    fn place_disk(&mut self, io: DiskIo) -> Tried {
        if io.bytes > 0 {
            let wanted = |disk| self.starved.wanted_bytes(disk);
            let tried = self.requests.share(&io, self.buffers.limit_bytes(), wanted);
            if tried != Tried::Placed {
                return tried;
            }
        }
        if self.try_disk(io) { Tried::Placed } else { Tried::NoBuffer }
    }

    /// Gives I/O to the store. Returns false if there is no buffer.
    fn try_disk(&mut self, io: DiskIo) -> bool {
        let DiskIo { id, disk, op, too, .. } = io;
        let buffer = match op {
            GuestOp::Read(range) | GuestOp::Write { range, .. } => {
                let length = usize::try_from(range.length).unwrap_or(usize::MAX);
                let mut origin = self.requests.get_mut(id).map(|pending| &mut pending.origin).filter(|_| !too);
                let brought = match &mut origin {
                    Some(Origin::Whole(request)) => request.take_buffer(),
                    Some(Origin::Part(_) | Origin::HandOver) | None => None,
                };
                let must_copy = brought.is_none() && matches!(op, GuestOp::Write { .. });
                let Some(mut buffer) = brought.or_else(|| self.buffers.take(length)) else { return false };
                let copied = match origin {
                    Some(Origin::Whole(request)) if must_copy => request.copy_from_guest(0, &mut buffer).is_ok(),
                    _ => !must_copy,
                };
                // The guest went away meanwhile.
                if !copied {
                    drop(buffer);
                    self.disk_done(id, Err(DiskError(libc::EIO)), None);
                    // Called from `execute` or from the end of a turn; either way the actions are drained next.
                    self.execute();
                    return true;
                }
                Some(buffer)
            }
            GuestOp::Flush | GuestOp::Discard(_) | GuestOp::WriteZeroes { .. } => None,
        };
        if matches!(op, GuestOp::Write { .. }) {
            narrow::passes("write-forgotten");
        }
        self.requests.take_share(&io);
        self.warmth.begin(disk, &op);
        self.disks[disk].store.submit(u64::from(id.0), store_op(op), buffer);
        true
    }

    /// Handles the end of the store's part of a request. Only what it read or wrote well is the request's data: pages
    /// of a memory server may still be.
    pub(super) fn disk_done(&mut self, id: RequestId, result: Result<(), DiskError>, buffer: Option<IoBuffer>) {
        self.engine.handle_disk_done(self.now, id, result, buffer.as_deref().unwrap_or(&[]));
        if let Some(pending) = self.requests.get_mut(id)
            && result.is_ok()
        {
            pending.buffer = buffer;
        }
        self.requests.end_io(id);
    }

    fn fill_zero(&mut self, id: RequestId, offset: u32, length: u32) {
        if let Some(Pending { origin: Origin::Whole(request), delivered, .. }) = self.requests.get_mut(id) {
            self.captured.capture(&mut self.engine, request, offset as usize, length as usize);
            *delivered = true;
            // The guest may be gone; its request still completes.
            let _ = request.fill_zero(offset as usize, length as usize);
        }
    }

    fn send_block(&mut self, slot: remoca_core::units::SlotIndex, id: RequestId, offset: u32) {
        let pending = self.requests.get_mut(id);
        let offset = offset as usize;
        let page = pending.and_then(|p| p.buffer.as_deref()?.get(offset..offset + remoca_core::units::PAGE_SIZE));
        if let (Some(link), Some(page)) = (&mut self.link, page) {
            link.send_page(slot, page);
        }
    }

    fn complete(&mut self, id: RequestId, result: Result<(), DiskError>) {
        let Some(mut pending) = self.requests.remove(id) else { return };
        let from_disk = pending.buffer.is_some() || result.is_err();
        let mut outcome = Outcome::from(result);
        match (pending.op, result, pending.buffer.take(), &mut pending.origin) {
            (GuestOp::Read(_), Ok(()), Some(buffer), Origin::Whole(request)) => {
                if !pending.delivered {
                    self.captured.capture(&mut self.engine, request, 0, buffer.len());
                }
                if request.deliver(buffer).is_err() {
                    outcome = Outcome::BROKEN;
                }
            }
            (GuestOp::Write { .. }, Ok(()), Some(buffer), Origin::Whole(request)) => request.give_back(buffer),
            _ => {}
        }
        self.record(&pending, from_disk);
        let disk = usize::from(pending.disk);
        match pending.origin {
            Origin::Whole(request) => self.disks[disk].frontend.complete(request, outcome),
            Origin::HandOver => self.migration.flushes -= 1,
            Origin::Part(group) => {
                group.end_part(outcome);
                if group.left.get() == 0
                    && let Some(request) = group.request.take()
                {
                    match group.must_repeat() {
                        true => self.begin(pending.disk, request),
                        false => self.disks[disk].frontend.complete(request, group.outcome.get()),
                    }
                }
            }
        }
    }

    fn record(&mut self, pending: &Pending, from_disk: bool) {
        self.update_clock();
        let latency_ns = self.now.since_ns(pending.issued);
        let (op, range) = match pending.op {
            GuestOp::Read(range) => {
                self.latency.read.record(latency_ns);
                let part = if from_disk { &mut self.latency.read_from_disk } else { &mut self.latency.read_from_cache };
                part.record(latency_ns);
                (TracedOp::Read, Some(range))
            }
            GuestOp::Write { range, .. } => {
                self.latency.write.record(latency_ns);
                (TracedOp::Write, Some(range))
            }
            GuestOp::Flush => (TracedOp::Flush, None),
            GuestOp::Discard(range) => (TracedOp::Discard, Some(range)),
            GuestOp::WriteZeroes { range, .. } => (TracedOp::WriteZeroes, Some(range)),
        };
        if let Some(trace) = &mut self.trace {
            let from_cache = op == TracedOp::Read && !from_disk;
            trace.record(&TraceRecord {
                issued_ns: pending.issued.0,
                latency_ns,
                offset: range.map_or(0, |range| range.offset),
                length: range.map_or(0, |range| range.length),
                disk: pending.disk,
                op,
                source: if from_cache { TracedSource::Cache } else { TracedSource::Disk },
                lost: 0,
            });
        }
    }

    /// Makes and ends connections to memory servers, and begins sessions.
    fn place(&mut self, action: Action) {
        if let Some(link) = &mut self.link {
            match action {
                Action::Ask(server) => link.ask(server),
                Action::Release(server) => link.release(server),
                Action::Use(server) => self.begin_session(server),
                Action::GiveUp => self.end_session(|link| link.end("it does not answer")),
                Action::Leave => self.end_session(ServerLink::leave),
                _ => {}
            }
        }
    }

    fn begin_session(&mut self, server: ServerNumber) {
        self.refusal_told = false;
        let Some(link) = &mut self.link else { return };
        let watched = match link.begin(server).then(|| link.socket_fd()).flatten() {
            Some(socket) => self.poller.add(socket, Source::LinkSocket, false),
            None => Err(std::io::ErrorKind::NotConnected.into()),
        };
        narrow::passes("session-begun");
        if let Err(error) = watched {
            self.lose_session(&format!("its socket cannot be watched: {error}"));
        }
    }

    fn end_session(&mut self, end: impl FnOnce(&mut ServerLink)) {
        if let Some(link) = &mut self.link {
            if let Some(socket) = link.socket_fd() {
                self.poller.remove(socket);
            }
            end(link);
        }
        self.receive_again = false;
    }

    /// Ends a connection that is of no use any more, and tells the engine.
    pub(super) fn lose_session(&mut self, why: &str) {
        self.end_session(|link| link.end(why));
        self.engine.handle_disconnected(self.now);
        self.execute();
    }

    /// Sends what is queued for the server.
    pub(super) fn flush_link(&mut self) {
        let Some(link) = &mut self.link else { return };
        match link.flush() {
            Ok(pages) => {
                if let Some(watch) = link.watch_change()
                    && let Some(socket) = link.socket_fd()
                    && let Err(error) = self.poller.change(socket, Source::LinkSocket, watch)
                {
                    tracing::warn!("cannot watch the server's socket: {error}");
                }
                if pages > 0 {
                    self.engine.handle_sent(pages);
                }
            }
            Err(error) => self.lose_session(&error.to_string()),
        }
    }
}

/// Returns what an I/O takes of the driver's buffers.
fn buffer_bytes(io: &DiskIo, disks: &[Disk]) -> usize {
    match io.op {
        // Buffers that requests bring are theirs.
        _ if !io.too && disks[io.disk].frontend.brings_buffers() => 0,
        GuestOp::Read(range) | GuestOp::Write { range, .. } => {
            BufferPool::footprint(usize::try_from(range.length).unwrap_or(usize::MAX))
        }
        GuestOp::Flush | GuestOp::Discard(_) | GuestOp::WriteZeroes { .. } => 0,
    }
}
