//! The driver: the one I/O thread of a VM process. It owns every descriptor, turns what happens on them into events of
//! the engine, and executes the engine's actions.
//!
//! One turn of the loop: wait, take what is ready (kicks, disk completions, frames of the server, control commands),
//! give each to the engine and execute its actions, then hand everything queued to the kernel at once: one call for each
//! store, one for the server's socket, one signal for each queue. Nothing here decides what may be cached or served.
//! 1. Actions are drained after every call of the engine, in order.
//! 2. A guest's data are copied once: read buffer -> guest, guest -> write buffer, receive buffer -> guest. Before data
//!    of a read overwrite guest memory, the engine is asked whether to look at what is there ([`capture`]).
//! 3. Nothing in this thread waits for a guest, a disk, a server or a control client.

mod actions;
mod capture;
mod events;
mod image_state;
mod index_size;
mod migration;
mod poller;
mod requests;
mod snapshot;
mod starved;
#[cfg(test)]
mod tests;
mod upgrade;
mod warmth;

use crate::clock::Clock;
use crate::control::ControlServer;
use crate::handover::{Ask, Handover};
use crate::latency::Histogram;
use crate::link::ServerLink;
use crate::service::ServiceManager;
use crate::state::{Former, StateFile};
use crate::trace::TraceWriter;
use capture::CapturedFrames;
use index_size::IndexSize;
pub use index_size::{Aside, on_a_thread};
pub use migration::{Migration, Opener};
use poller::Poller;
pub use poller::Source;
use remoca_core::engine::DiskEngine;
use remoca_core::units::{DiskIndex, Nanos, PAGE_SIZE_U64, PageCount};
use remoca_frontend::device::Frontend;
use remoca_frontend::nbd::NbdServer;
use remoca_io::buffer::BufferPool;
use remoca_io::narrow;
use remoca_io::words::IndexMemory;
use remoca_protocol::ErrorCode;
use remoca_protocol::port::AgentStats;
use remoca_store::Store;
use requests::RequestTable;
pub use snapshot::cache_pages;
use starved::Starved;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
pub use upgrade::Start;
use upgrade::Upgrade;
use warmth::Warmth;

/// How long the end waits for writes and flushes under way.
const STOP_TIME_MAX: Duration = Duration::from_secs(1);
/// And with disks on their way to another process: cut off, nobody would have them.
const HAND_OVER_TIME_MAX: Duration = Duration::from_secs(5);

/// One disk of the VM.
pub struct Disk {
    pub name: String,
    /// The image as the operator named it.
    pub image: String,
    /// The socket as the operator named it.
    pub socket: String,
    pub store: Box<dyn Store>,
    /// Opens the image again.
    pub open: Opener,
    /// All of it is a swap area, whatever it holds.
    pub swap: bool,
    /// Until then, no request of an earlier process is repeated: what that one sent to an NBD server may still be on its way.
    pub settles_at: Option<Instant>,
    /// The image was open and locked without a gap since a former program of this process had it, and so was the state file:
    /// nobody else can have changed it.
    pub kept_open: bool,
    pub frontend: Frontend,
}

/// The eviction port of the VM.
pub struct Port {
    pub socket: String,
    pub frontend: Frontend,
    /// Random for this process, so that the agent notices a restart.
    pub cookie: u64,
}

/// All that a driver is made from.
pub struct Parts {
    pub name: String,
    pub clock: Box<dyn Clock>,
    pub engine: DiskEngine<IndexMemory>,
    /// What outlives this process, if something does.
    pub state: Option<StateFile>,
    /// Why the engine is a new one, if it is.
    pub cold_reason: Option<String>,
    /// What a former process left, whether its engine is this one or not.
    pub former: Former,
    /// The size that "on" brings back.
    pub cache: PageCount,
    pub cache_enabled: bool,
    /// Hash of the options that say the same: what was set lives as long as they do.
    pub options: u64,
    pub disks: Vec<Disk>,
    pub port: Option<Port>,
    /// Brings the clients of disks and of a port that are NBD exports.
    pub nbd: Option<NbdServer>,
    pub link: Option<ServerLink>,
    pub migration: Migration,
    pub control: Option<ControlServer>,
    pub buffers: BufferPool,
    /// A guest with more memory is indexed as if it had this much.
    pub guest_memory_max: PageCount,
    pub trace: Option<TraceWriter>,
    /// Becomes readable when the process is to end.
    pub stop: OwnedFd,
    /// Gives eight bytes for each time that the program's own file is to take over.
    pub hangup: OwnedFd,
    pub start: Start,
    /// How another program is asked whether it could take over.
    pub ask: Ask,
    /// How something is done beside the I/O thread.
    pub aside: Aside,
    /// Gets a sign of life from the I/O thread's turns.
    pub manager: ServiceManager,
}

/// Why the driver stopped.
pub enum Ended {
    /// It was asked to, or nobody can attach any more.
    Finished,
    /// The same, but a disk may still do what it was sent. Nothing must be cleared away: by the sockets that are left behind
    /// a successor knows that it has to wait.
    Unsettled,
    /// Another program is to take over. Should it not, tell [`Driver::refuse_upgrade`], and run on.
    HandOver(Box<Handover>),
}

/// The running VM process.
pub struct Driver {
    name: String,
    clock: Box<dyn Clock>,
    engine: DiskEngine<IndexMemory>,
    warmth: Warmth,
    cache: PageCount,
    options: u64,
    disks: Vec<Disk>,
    port: Option<Port>,
    captured: CapturedFrames,
    nbd: Option<NbdServer>,
    agent: Option<AgentStats>,
    link: Option<ServerLink>,
    migration: Migration,
    control: Option<ControlServer>,
    buffers: BufferPool,
    trace: Option<TraceWriter>,
    stop: OwnedFd,
    hangup: OwnedFd,
    start: Start,
    ask: Ask,
    manager: ServiceManager,
    upgrade: Option<Upgrade>,
    /// Asked to stop; at the latest then.
    stop_at: Option<Instant>,
    poller: Poller,
    requests: RequestTable,
    /// Disk I/O that waits for a buffer.
    starved: Starved,
    /// The server sent more than one turn takes.
    receive_again: bool,
    /// The server ended the session with this.
    dismissal: Option<ErrorCode>,
    /// The operator was told that the server has no room, in this session and for this size.
    refusal_told: bool,
    /// A guest queued more than one turn takes.
    pop_again: bool,
    index_size: IndexSize,
    latency: LatencySet,
    started: Instant,
    now: Nanos,
    page: Box<[u8; remoca_core::units::PAGE_SIZE]>,
}

#[derive(Default)]
struct LatencySet {
    read: Histogram,
    read_from_cache: Histogram,
    read_from_disk: Histogram,
    write: Histogram,
}

impl Driver {
    /// Returns a driver of these parts, with all of their descriptors registered.
    ///
    /// # Errors
    /// If the system refuses an epoll instance or a registration.
    pub fn new(parts: Parts) -> io::Result<Self> {
        let starved = Starved::new(parts.disks.len());
        let mut driver = Self {
            name: parts.name,
            started: parts.clock.now(),
            clock: parts.clock,
            engine: parts.engine,
            warmth: Warmth::new(parts.state, parts.cold_reason, parts.disks.len()),
            cache: parts.cache,
            options: parts.options,
            requests: RequestTable::new(parts.disks.len()),
            disks: parts.disks,
            port: parts.port,
            captured: CapturedFrames::default(),
            nbd: parts.nbd,
            agent: None,
            link: parts.link,
            migration: parts.migration,
            control: parts.control,
            buffers: parts.buffers,
            trace: parts.trace,
            stop: parts.stop,
            hangup: parts.hangup,
            start: parts.start,
            ask: parts.ask,
            manager: parts.manager,
            upgrade: None,
            stop_at: None,
            poller: Poller::new()?,
            starved,
            receive_again: false,
            dismissal: None,
            refusal_told: false,
            pop_again: false,
            index_size: IndexSize::new(parts.guest_memory_max, parts.aside)?,
            latency: LatencySet::default(),
            now: Nanos(0),
            page: Box::new([0; remoca_core::units::PAGE_SIZE]),
        };
        driver.begin_migration()?;
        driver.describe_disks();
        driver.inherit_failed_flushes(&parts.former);
        driver.judge_images();
        if !driver.migration.serves() {
            driver.migration.former = parts.former;
        } else {
            let wanted = if parts.cache_enabled { driver.cache } else { PageCount(0) };
            driver.fit_index_now(wanted);
            driver.engine.resize(wanted);
            driver.keep_settings();
        }
        driver.register()?;
        driver.tell_servers();
        Ok(driver)
    }

    /// Runs until asked to stop, or to give way to another program.
    ///
    /// # Errors
    /// If waiting for events fails, which only a programming error or a dying system brings about.
    pub fn run(&mut self) -> io::Result<Ended> {
        let mut ready = Vec::new();
        loop {
            ready.clear();
            let timeout = self.timeout();
            self.poller.wait(&mut ready, timeout)?;
            if let Some(ended) = self.turn(&ready) {
                return Ok(ended);
            }
        }
    }

    /// Adds to `ready` what is ready now, each with whether it is about writing.
    ///
    /// # Errors
    /// As for [`Self::run`].
    pub fn look(&mut self, ready: &mut Vec<(Source, bool)>) -> io::Result<()> {
        self.poller.wait(ready, Some(Duration::ZERO))
    }

    /// Does one turn of the loop with what is `ready`.
    pub fn turn(&mut self, ready: &[(Source, bool)]) -> Option<Ended> {
        self.update_clock();
        for &(source, writable) in ready {
            match source {
                Source::Stop => self.begin_stop(),
                other => self.handle(other, writable),
            }
        }
        self.take_leftovers();
        self.run_timers();
        self.end_turn();
        if let Some(give_up_at) = self.stop_at {
            self.follow_migration();
            self.settle_images();
            let waits = self.ends_hand_over() || self.warmth.is_kept() && self.is_writing();
            return (!waits || self.clock.now() >= give_up_at).then(|| self.finish());
        }
        self.follow_migration();
        self.settle_images();
        if self.is_abandoned() {
            if self.ends_hand_over() {
                self.stop_at = Some(self.clock.now() + HAND_OVER_TIME_MAX);
                return None;
            }
            self.warmth.abandon();
            return Some(self.finish());
        }
        self.advance_upgrade()
    }

    fn follow_migration(&mut self) {
        while self.advance_migration() {
            self.end_turn();
        }
    }

    /// Returns whether images are being written to, or made durable: a settled image is known again for sure, and a flush
    /// that fails for this process must also fail for the next one.
    fn is_writing(&self) -> bool {
        self.warmth.is_written_to() || self.warmth.is_settling() || self.requests.are_being_flushed()
    }

    /// Begins to stop: takes nothing new from guests, and waits for writes and flushes under way.
    fn begin_stop(&mut self) {
        self.poller.remove(self.stop.as_fd());
        let patience = if self.ends_hand_over() { HAND_OVER_TIME_MAX } else { STOP_TIME_MAX };
        self.stop_at = Some(self.clock.now() + patience);
    }

    /// Returns the service manager, to be told how the process is.
    pub fn manager(&mut self) -> &mut ServiceManager {
        &mut self.manager
    }

    fn describe_disks(&mut self) {
        for (disk, index) in self.disks.iter().zip(0..) {
            let blocks = disk.store.geometry().size / PAGE_SIZE_U64;
            self.engine.describe_disk(DiskIndex(index), blocks, disk.swap);
        }
    }

    /// Tells the engine the servers. It decides where the pool goes; from here on connections are made.
    fn tell_servers(&mut self) {
        if let Some(link) = &self.link {
            let numbers: Vec<_> = link.servers().iter().map(|server| server.number).collect();
            self.engine.set_servers(self.now, &numbers);
            self.execute();
        }
    }

    /// Returns whether no front end can come back: all came on descriptors that were passed to us, and are gone.
    fn is_abandoned(&self) -> bool {
        let disks = self.disks.iter().map(|disk| &disk.frontend);
        disks.chain(self.port.iter().map(|port| &port.frontend)).all(Frontend::is_finished)
    }

    fn update_clock(&mut self) {
        let elapsed = self.clock.now().saturating_duration_since(self.started);
        self.now = Nanos(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Returns how long the next turn can be waited for if nothing becomes ready; `None`: as long as it takes.
    pub fn timeout(&mut self) -> Option<Duration> {
        if self.receive_again || self.pop_again || self.is_moving_index() {
            return Some(Duration::ZERO);
        }
        self.update_clock();
        let engine = self.engine.next_wake().map(|at| Duration::from_nanos(at.since_ns(self.now)));
        let now = self.clock.now();
        let stores = self.disks.iter().filter_map(|disk| disk.store.next_deadline());
        let nbd = self.nbd.as_ref().and_then(NbdServer::next_deadline);
        let manager = self.manager.next_deadline();
        let settling = self.disks.iter().filter_map(|disk| disk.settles_at);
        let others = stores
            .chain(nbd)
            .chain(manager)
            .chain(settling)
            .chain(self.stop_at.or_else(|| self.upgrade_deadline()))
            .map(|at| at.saturating_duration_since(now))
            .min();
        [engine, others, self.settle_timeout(), self.migration_deadline()].into_iter().flatten().min()
    }

    fn run_timers(&mut self) {
        if self.engine.next_deadline().is_some_and(|at| at <= self.now) {
            self.engine.handle_timer(self.now);
            self.execute();
        }
        self.run_migration_timers();
        let now = self.clock.now();
        self.manager.handle_timer(now);
        if let Some(nbd) = &mut self.nbd
            && nbd.next_deadline().is_some_and(|at| at <= now)
        {
            nbd.handle_timer(now);
        }
        for disk in self.disks.iter_mut().filter(|disk| disk.settles_at.is_some_and(|at| at <= now)) {
            disk.settles_at = None;
            self.pop_again = true;
        }
        for disk in 0..self.disks.len() {
            if self.disks[disk].store.next_deadline().is_some_and(|at| at <= now) {
                self.stamp_writes();
                self.disks[disk].store.handle_timer(now);
                self.take_store_events(disk);
            }
        }
    }

    /// Hands everything that was queued in this turn to the kernel. The server's socket comes first: if the connection
    /// turns out to be lost, reads that waited for it go to the disk. What completes at once may free a buffer that
    /// starved I/O waits for, so nothing is left behind that no event would bring up again.
    fn end_turn(&mut self) {
        let now = self.clock.now();
        let mut completed = true;
        while completed {
            self.feed_starved();
            self.flush_link();
            completed = false;
            self.stamp_writes();
            for disk in 0..self.disks.len() {
                self.disks[disk].store.kick(now);
                if cfg!(feature = "ablation") && self.disks[disk].store.in_flight() > 0 {
                    narrow::passes("disk-submitted");
                }
                completed |= self.take_store_events(disk);
            }
        }
        for disk in &mut self.disks {
            disk.frontend.notify();
        }
        if let Some(port) = &mut self.port {
            port.frontend.notify();
        }
    }

    /// Ends the driver: what is completed is published, the trace is complete. Requests in flight are the next
    /// process's. So is the pool, if it can be found again; else it is given back.
    fn finish(&mut self) -> Ended {
        for disk in &mut self.disks {
            disk.frontend.notify();
        }
        self.migration.process_ends(self.disks.iter().any(|disk| disk.frontend.is_connected()));
        if let Some(link) = self.link.as_mut().filter(|_| !self.warmth.is_kept()) {
            link.goodbye();
        }
        self.engine.end();
        let unsettled = self.disks.iter_mut().filter_map(|disk| (!disk.store.drain()).then_some(&disk.image));
        if let Some(trace) = &mut self.trace {
            trace.end();
        }
        match unsettled.collect::<Vec<_>>()[..] {
            [] => Ended::Finished,
            ref images => {
                tracing::warn!(
                    "{images:?}: the server has not answered everything; the sockets stay, so that a successor waits"
                );
                Ended::Unsettled
            }
        }
    }
}
