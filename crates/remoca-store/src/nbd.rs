//! An NBD export as a backing store: nbdkit, qemu-nbd and all storage that they can reach.
//!
//! Owned by the I/O thread, which it never blocks once it is open. Operations become requests (`nbd_task`) on one
//! connection (`nbd_link`). When the connection is lost, outstanding operations wait for the next one. Over that, each
//! is sent again from its start, in the order in which they were submitted. Invariants:
//! 1. Of overlapping modifications only one is in flight at a time, so that sending it again cannot undo a newer one
//!    that was acknowledged.
//! 2. After a reconnect `ContentUncertain` is reported before anything that came over the new connection.
//!
//! NBD cannot promise everything: see "NBD and lost connections" in `docs/decisions/0008-backing-stores.md`.

mod hand_over;
mod outage;

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use slab::Slab;

use super::backoff::{Backoff, DELAY_MAX};
use super::file_task::Progress;
use super::flush_latch::{FailedAt, FlushLatch};
use super::nbd_connection::{Lost, TaskReply};
use super::nbd_export::{self, Terms};
use super::nbd_link::{Address, Direction, Link, LinkError};
use super::nbd_protocol::Export;
use super::nbd_task::{NbdTask, WireState};
use super::nbd_uri::NbdUri;
use super::range_lock::{Grant, Mode, RangeLocks};
use super::{
    DataPath, Geometry, Identity, ImageStamp, OpenError, StoreCompletion, StoreError, StoreEvent, StoreHealth, StoreOp,
};
use outage::Outage;
use remoca_io::buffer::IoBuffer;

/// The most requests in flight to the server at once.
const ON_WIRE_MAX: usize = 128;
/// How long a server that shuts down has to answer what it was sent, or to close the connection: as long as a silent
/// TCP peer.
const SHUTDOWN_TIME_MAX: Duration = Duration::from_secs(30);

/// How to use an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NbdOptions {
    pub read_only: bool,
    /// Every write is durable before it completes, so that a server which loses its cache loses nothing acknowledged.
    pub write_through: bool,
    pub on_lost_connection: OnLostConnection,
}

/// How a lost connection affects writes that were acknowledged and not flushed. Operations wait for the server in
/// either case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLostConnection {
    /// They count as safe: the server's cache is assumed to survive.
    #[default]
    Continue,
    /// They count as lost: the next flush or durable write fails, and so do all later ones.
    FailFlush,
}

/// An export in use.
pub struct NbdStore {
    server: String,
    options: NbdOptions,
    /// The export as the server last offered it.
    export: Export,
    terms: Terms,
    link: Link,
    /// `None` while the link is up.
    outage: Option<Outage>,
    backoff: Backoff,

    tasks: Slab<NbdTask>,
    /// Keys of tasks whose next piece can be sent.
    queue: VecDeque<usize>,
    /// Modifications by task key.
    ranges: RangeLocks,
    on_wire: usize,
    next_sequence: u64,
    replies: Vec<TaskReply>,
    granted: Vec<usize>,

    events: VecDeque<StoreEvent>,
    in_flight: usize,
    latch: FlushLatch,
    /// Number of writes completed so far that need a flush, and how many of them were flushed.
    writes: u64,
    writes_flushed: u64,
    /// Once set, no new request is sent except a last flush, and outstanding replies are waited for until this time.
    drain_deadline: Option<Instant>,
    /// Number of acknowledged writes that the flush at the end covers, and its place in `tasks`, while it is waited for.
    last_flush: Option<(u64, VecDeque<usize>)>,
    /// Set while the server shuts down: no new request is sent over the connection, which is left when all are answered,
    /// or at this time.
    leave_at: Option<Instant>,
}

impl NbdStore {
    /// Connects and negotiates. Blocks, for at most ten seconds for each address of the server.
    ///
    /// # Errors
    /// If the server cannot be reached, refuses the export, or offers less than a disk needs. The text says which.
    pub fn open(uri: &NbdUri, options: NbdOptions) -> Result<Self, OpenError> {
        let server = uri.server.to_string();
        let unreachable = |error: &dyn std::fmt::Display| nbd_export::explain_unreachable(&server, error);
        let addresses = Address::resolve(&uri.server).map_err(|error| unreachable(&error))?;
        let address_count = addresses.len();
        let mut link = Link::new(addresses, &uri.export).map_err(|error| unreachable(&error))?;

        let mut outcome = connect_blocking(&mut link);
        for _ in 1..address_count {
            outcome = outcome.or_else(|_| connect_blocking(&mut link));
        }
        let export = outcome.map_err(|error| nbd_export::explain_link_error(&server, &error))?;
        Self::start(server, link, export, options)
    }

    fn start(server: String, link: Link, export: Export, options: NbdOptions) -> Result<Self, OpenError> {
        let terms = Terms::agree(&server, export, options.read_only, options.write_through)?;
        if !options.read_only && !terms.abilities.flush {
            tracing::warn!(%server, "the NBD server has no flush: every write waits until it is durable");
        }
        Ok(Self {
            server,
            export,
            options,
            terms,
            link,
            outage: None,
            backoff: Backoff::new(RandomState::new().hash_one(0)),
            tasks: Slab::new(),
            queue: VecDeque::new(),
            ranges: RangeLocks::default(),
            on_wire: 0,
            next_sequence: 0,
            replies: Vec::new(),
            granted: Vec::new(),
            events: VecDeque::new(),
            in_flight: 0,
            latch: FlushLatch::default(),
            writes: 0,
            writes_flushed: 0,
            drain_deadline: None,
            last_flush: None,
            leave_at: None,
        })
    }

    fn push_completion(&mut self, token: u64, result: Result<(), StoreError>, buffer: Option<IoBuffer>) {
        self.events.push_back(StoreEvent::Completed(StoreCompletion { token, result, buffer }));
    }

    /// Sends queued requests as far as the limit and the socket allow.
    fn pump(&mut self, now: Instant) {
        while self.on_wire < ON_WIRE_MAX && self.leave_at.is_none() {
            let Some(connection) = self.link.connection() else { return };
            let Some(key) = self.queue.pop_front() else { break };
            let task = &mut self.tasks[key];
            if task.is_void(&self.terms.abilities) {
                self.finish(key, Ok(()));
                continue;
            }
            connection.queue(key, task, &self.terms.abilities);
            self.on_wire += 1;
        }
        if self.link.connection().is_some_and(|connection| connection.has_output()) {
            self.transfer(Direction::Out, now);
        }
    }

    fn transfer(&mut self, direction: Direction, now: Instant) {
        let outcome = self.link.transfer(&mut self.tasks, &mut self.replies, direction);
        let mut replies = std::mem::take(&mut self.replies);
        for (key, errno) in replies.drain(..) {
            self.on_wire -= 1;
            if errno == Some(libc::ESHUTDOWN) {
                // The request was not executed. The server can execute it after its restart.
                self.leave_at = self.leave_at.or(Some(now + SHUTDOWN_TIME_MAX));
                self.queue.push_back(key);
                continue;
            }
            match self.tasks[key].handle_reply(errno, &self.terms.abilities) {
                Progress::MoreCalls => self.queue.push_back(key),
                Progress::Finished(result) => self.finish(key, result),
            }
        }
        self.replies = replies;
        match outcome {
            Err(error) => self.lose(now, &error),
            // Before, it may still execute a write, which must not land after a newer one that goes elsewhere.
            Ok(()) if self.leave_at.is_some() && self.on_wire == 0 => self.lose(now, &Lost::ShutDown.into()),
            Ok(()) => {}
        }
    }

    fn finish(&mut self, key: usize, result: Result<(), StoreError>) {
        let task = self.tasks.remove(key);
        if task.operation.is_modification() {
            self.ranges.release(key, &mut self.granted);
            for key in self.granted.drain(..) {
                self.tasks[key].wire = WireState::Queued;
                self.queue.push_back(key);
            }
        }
        if result.is_ok() {
            self.writes += u64::from(task.needs_flush(&self.terms.abilities));
            if task.failed_at() == FailedAt::Sync {
                self.writes_flushed = self.writes_flushed.max(task.writes_before);
            }
        }
        let result = self.latch.filter(task.is_synced(&self.terms.abilities), task.failed_at(), result);
        self.push_completion(task.token, result, task.buffer);
    }

    fn unflushed(&self) -> u64 {
        self.writes - self.writes_flushed
    }

    /// Closes the lost connection, queues all outstanding operations again, and schedules a reconnect. Latches an error
    /// if writes are not flushed and [`OnLostConnection::FailFlush`] is set.
    fn lose(&mut self, now: Instant, error: &LinkError) {
        let is_stable =
            self.link.connection().is_some_and(|connection| now.duration_since(connection.since) > DELAY_MAX);
        if is_stable {
            self.backoff.reset();
        }
        self.link.close();
        self.leave_at = None;
        tracing::warn!(server = %self.server, %error, outstanding = self.tasks.len(), unflushed = self.unflushed(),
            "lost the connection to the NBD server; writes that were not flushed are safe only if its cache survives");
        if self.options.on_lost_connection == OnLostConnection::FailFlush && self.unflushed() > 0 {
            self.latch.fail(StoreError::IO);
        }
        self.queue_again();
        self.outage = Some(Outage::new(outage::explain(error), now + self.backoff.next_delay()));
    }

    fn queue_again(&mut self) {
        self.on_wire = 0;
        self.queue.clear();
        for (key, task) in &mut self.tasks {
            if task.wire != WireState::WaitsForRange {
                task.restart();
                self.queue.push_back(key);
            }
        }
        let tasks = &self.tasks;
        self.queue.make_contiguous().sort_unstable_by_key(|key| tasks[*key].sequence);
    }

    fn handle_failed_attempt(&mut self, now: Instant, why: String) {
        self.link.close();
        let retry_at = now + self.backoff.next_delay();
        let Some(outage) = &mut self.outage else { return };
        if let Some(attempts) = outage.end_attempt(why, retry_at) {
            tracing::warn!(server = %self.server, attempts, "{}", outage.why());
        }
    }

    fn advance_attempt(&mut self, now: Instant) {
        let export = match self.link.advance_attempt(now) {
            Ok(None) => return,
            Ok(Some(export)) => export,
            Err(error) => return self.handle_failed_attempt(now, outage::explain(&error)),
        };
        match self.terms.agree_again(&self.server, export, self.options.write_through) {
            Err(error) => self.handle_failed_attempt(now, outage::explain_refusal(&error)),
            Ok(terms) => {
                let has_grown = terms.geometry.size != self.terms.geometry.size;
                self.export = export;
                self.terms = terms;
                self.outage = None;
                self.events.push_back(StoreEvent::ContentUncertain);
                if has_grown {
                    self.events.push_back(StoreEvent::Measured(Ok(())));
                }
                tracing::info!(server = %self.server, sent_again = self.queue.len(), "connected to the NBD server again");
            }
        }
    }
}

impl DataPath for NbdStore {
    fn geometry(&self) -> Geometry {
        self.terms.geometry
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.link.event_fd()
    }

    fn submit(&mut self, token: u64, operation: StoreOp, buffer: Option<IoBuffer>) {
        self.in_flight += 1;
        if let Err(error) = operation.validate(&self.terms.geometry, buffer.as_ref()) {
            return self.push_completion(token, Err(error), buffer);
        }
        let key = self.tasks.insert(NbdTask::new(token, operation, buffer, self.next_sequence, self.writes));
        self.next_sequence += 1;
        if let Some((offset, len)) = operation.range().filter(|_| operation.is_modification())
            && self.ranges.acquire(key, offset..offset + len, Mode::Exclusive) == Grant::Waits
        {
            self.tasks[key].wire = WireState::WaitsForRange;
            return;
        }
        self.queue.push_back(key);
    }

    fn kick(&mut self, now: Instant) {
        self.pump(now);
    }

    fn handle_ready(&mut self, now: Instant) {
        if self.outage.is_some() {
            self.advance_attempt(now);
        }
        if self.outage.is_none() {
            self.transfer(Direction::Both, now);
        }
        self.pump(now);
    }

    fn next_event(&mut self) -> Option<StoreEvent> {
        let event = self.events.pop_front()?;
        if matches!(event, StoreEvent::Completed(_)) {
            self.in_flight -= 1;
        }
        Some(event)
    }

    fn next_deadline(&self) -> Option<Instant> {
        let retry_at = self.outage.as_ref().and_then(|outage| outage.retry_at);
        [retry_at, self.link.attempt_deadline(), self.leave_at].into_iter().flatten().min()
    }

    fn handle_timer(&mut self, now: Instant) {
        if self.leave_at.is_some_and(|due| due <= now) {
            self.lose(now, &Lost::ShutDown.into());
        }
        if self.link.attempt_deadline().is_some_and(|due| due <= now) {
            self.advance_attempt(now);
            self.pump(now);
        }
        if let Some(outage) = self.outage.as_mut().filter(|outage| outage.retry_at.is_some_and(|due| due <= now)) {
            outage.retry_at = None;
            if let Err(error) = self.link.start_attempt(now) {
                self.handle_failed_attempt(now, outage::explain(&error));
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn health(&self) -> StoreHealth {
        match &self.outage {
            None => StoreHealth::Up,
            Some(outage) => StoreHealth::Waiting { why: outage.why().into() },
        }
    }
}

impl Identity for NbdStore {
    /// Returns false: a server does not report when its image was changed.
    fn look(&mut self) -> bool {
        false
    }

    /// Returns false: a server tells the size of an export only when it is connected to.
    fn measure(&mut self) -> bool {
        false
    }

    /// Returns `None`: a server does not identify its image or report its changes.
    fn stamp_at_opening(&self) -> Option<ImageStamp> {
        None
    }

    /// Returns the server and the name of the export. The text does not change when the image is written.
    fn shared_stamp(&self, _at_opening: bool) -> Option<String> {
        Some(format!("nbd {} {}", self.server, self.link.export_name()))
    }

    /// Does nothing: no page cache of this host has the image.
    fn empty_page_cache(&mut self) {}

    /// Returns true: the page cache of the server's host is not known.
    fn may_be_in_page_cache(&self) -> bool {
        true
    }
}

fn connect_blocking(link: &mut Link) -> Result<Export, LinkError> {
    link.start_attempt(Instant::now())?;
    loop {
        if let Some(deadline) = link.attempt_deadline() {
            wait_until_ready(link, deadline);
        }
        if let Some(export) = link.advance_attempt(Instant::now())? {
            return Ok(export);
        }
    }
}

fn wait_until_ready(link: &Link, deadline: Instant) {
    let wait = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok();
    // The outcome does not matter: the caller checks the link itself.
    let _ = rustix::event::poll(&mut [PollFd::from_borrowed_fd(link.event_fd(), PollFlags::IN)], wait.as_ref());
}
