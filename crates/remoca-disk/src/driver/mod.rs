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
mod poller;
mod requests;
mod snapshot;

use crate::control::ControlServer;
use crate::frontend::Frontend;
use crate::index_memory::IndexMemory;
use crate::latency::Histogram;
use crate::link::ServerLink;
use crate::nbd::NbdServer;
use crate::port::AgentStats;
use crate::store::{BufferPool, Store};
use crate::trace::TraceWriter;
use capture::CapturedFrames;
use poller::{Poller, Source};
use remoca_core::engine::DiskEngine;
use remoca_core::index::Layout;
use remoca_core::units::{DiskIndex, Nanos, PAGE_SIZE_U64, PageCount};
use remoca_protocol::ErrorCode;
use requests::RequestTable;
pub use snapshot::cache_pages;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// One disk of the VM.
pub struct Disk {
    pub name: String,
    /// The image as the operator named it.
    pub image: String,
    /// The socket as the operator named it.
    pub socket: String,
    pub store: Box<dyn Store>,
    /// All of it is a swap area, whatever it holds.
    pub swap: bool,
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
    pub engine: DiskEngine<IndexMemory>,
    /// The size that "on" brings back.
    pub cache: PageCount,
    pub disks: Vec<Disk>,
    pub port: Option<Port>,
    /// Brings the clients of disks and of a port that are NBD exports.
    pub nbd: Option<NbdServer>,
    pub link: Option<ServerLink>,
    pub control: Option<ControlServer>,
    pub buffers: BufferPool,
    pub trace: Option<TraceWriter>,
    /// Becomes readable when the process is to end.
    pub stop: OwnedFd,
}

/// The running VM process.
pub struct Driver {
    name: String,
    engine: DiskEngine<IndexMemory>,
    cache: PageCount,
    disks: Vec<Disk>,
    port: Option<Port>,
    captured: CapturedFrames,
    nbd: Option<NbdServer>,
    agent: Option<AgentStats>,
    link: Option<ServerLink>,
    control: Option<ControlServer>,
    buffers: BufferPool,
    trace: Option<TraceWriter>,
    stop: OwnedFd,
    poller: Poller,
    requests: RequestTable,
    /// Disk I/O that waits for a buffer.
    starved: VecDeque<requests::Starved>,
    /// The server sent more than one turn takes.
    receive_again: bool,
    /// The server ended the session with this.
    dismissal: Option<ErrorCode>,
    /// The operator was told that the server has no room, in this session and for this size.
    refusal_told: bool,
    /// A guest queued more than one turn takes.
    pop_again: bool,
    /// What the guest's memory was at most.
    guest_memory: PageCount,
    /// The index for which there was no memory.
    index_refused: Option<Layout>,
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
    /// A driver of these parts, with all of their descriptors registered.
    ///
    /// # Errors
    /// If the system refuses an epoll instance or a registration.
    pub fn new(parts: Parts) -> io::Result<Self> {
        let mut driver = Self {
            name: parts.name,
            engine: parts.engine,
            cache: parts.cache,
            disks: parts.disks,
            port: parts.port,
            captured: CapturedFrames::default(),
            nbd: parts.nbd,
            agent: None,
            link: parts.link,
            control: parts.control,
            buffers: parts.buffers,
            trace: parts.trace,
            stop: parts.stop,
            poller: Poller::new()?,
            requests: RequestTable::default(),
            starved: VecDeque::new(),
            receive_again: false,
            dismissal: None,
            refusal_told: false,
            pop_again: false,
            guest_memory: PageCount(0),
            index_refused: None,
            latency: LatencySet::default(),
            started: Instant::now(),
            now: Nanos(0),
            page: Box::new([0; remoca_core::units::PAGE_SIZE]),
        };
        for (disk, index) in driver.disks.iter().zip(0..) {
            let blocks = disk.store.geometry().size / PAGE_SIZE_U64;
            driver.engine.describe_disk(DiskIndex(index), blocks, disk.swap);
        }
        driver.register()?;
        driver.tell_servers();
        Ok(driver)
    }

    /// Runs until asked to stop.
    ///
    /// # Errors
    /// If waiting for events fails, which only a programming error or a dying system brings about.
    pub fn run(&mut self) -> io::Result<()> {
        let mut ready = Vec::new();
        loop {
            let timeout = self.timeout();
            self.poller.wait(&mut ready, timeout)?;
            self.update_clock();
            for (source, writable) in ready.drain(..) {
                if source == Source::Stop {
                    self.finish();
                    return Ok(());
                }
                self.handle(source, writable);
            }
            self.take_leftovers();
            self.run_timers();
            self.end_turn();
            if self.is_abandoned() {
                self.finish();
                return Ok(());
            }
        }
    }

    /// The engine decides where the pool goes; from here on connections are made.
    fn tell_servers(&mut self) {
        if let Some(link) = &self.link {
            let numbers: Vec<_> = link.servers().iter().map(|server| server.number).collect();
            self.engine.set_servers(self.now, &numbers);
            self.execute();
        }
    }

    /// All front ends came on descriptors that were passed to us, and are gone: nobody can come back.
    fn is_abandoned(&self) -> bool {
        let disks = self.disks.iter().map(|disk| &disk.frontend);
        disks.chain(self.port.iter().map(|port| &port.frontend)).all(Frontend::is_finished)
    }

    fn update_clock(&mut self) {
        self.now = Nanos(u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }

    fn timeout(&mut self) -> Option<Duration> {
        if self.receive_again || self.pop_again {
            return Some(Duration::ZERO);
        }
        self.update_clock();
        let engine = self.engine.next_deadline().map(|at| Duration::from_nanos(at.since_ns(self.now)));
        let now = Instant::now();
        let stores = self.disks.iter().filter_map(|disk| disk.store.next_deadline());
        let nbd = self.nbd.as_ref().and_then(NbdServer::next_deadline);
        let others = stores.chain(nbd).map(|at| at.saturating_duration_since(now)).min();
        [engine, others].into_iter().flatten().min()
    }

    fn run_timers(&mut self) {
        if self.engine.next_deadline().is_some_and(|at| at <= self.now) {
            self.engine.handle_timer(self.now);
            self.execute();
        }
        let now = Instant::now();
        if let Some(nbd) = &mut self.nbd
            && nbd.next_deadline().is_some_and(|at| at <= now)
        {
            nbd.handle_timer(now);
        }
        for disk in 0..self.disks.len() {
            if self.disks[disk].store.next_deadline().is_some_and(|at| at <= now) {
                self.disks[disk].store.handle_timer(now);
                self.take_store_events(disk);
            }
        }
    }

    /// Hands everything that was queued in this turn to the kernel. The server's socket comes first: if the connection
    /// turns out to be lost, reads that waited for it go to the disk. What completes at once may free a buffer that
    /// starved I/O waits for, so nothing is left behind that no event would bring up again.
    fn end_turn(&mut self) {
        let now = Instant::now();
        let mut completed = true;
        while completed {
            self.feed_starved();
            self.flush_link();
            completed = false;
            for disk in 0..self.disks.len() {
                self.disks[disk].store.kick(now);
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

    /// The end: what is completed is published, the pool is given back, the trace is complete. Requests in flight are the
    /// next process's.
    fn finish(&mut self) {
        for disk in &mut self.disks {
            disk.frontend.notify();
        }
        if let Some(link) = &mut self.link {
            link.goodbye();
        }
        if let Some(trace) = &mut self.trace {
            trace.flush();
        }
    }
}
