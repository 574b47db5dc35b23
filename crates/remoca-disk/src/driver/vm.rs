//! The parts that serve the guest, and the traffic between them: events of the parts become events of the engine, and
//! the parts execute the engine's actions.
//!
//! Actions are drained after every call of the engine, in order.

use super::curves::KeptCurves;
use super::disk::Disk;
use super::guests::Guests;
use super::host::Host;
use super::in_flight::{InFlight, Placing};
use super::index_size::{IndexSize, Region};
use super::requests::store_op;
use super::servers::Servers;
use super::sizes::Sizes;
use super::starved::{DiskIo, Tried};
use super::tiers::TierSizes;
use super::warmth::Warmth;
use crate::link::Size;
use crate::state::{Former, StateFile};
use remoca_core::engine::{Action, DiskEngine, DiskError, EngineConfig, Evicted, GuestOp, RequestId};
use remoca_core::index::DISK_BYTES_MAX;
use remoca_core::units::PageCount;
use remoca_io::buffer::IoBuffer;
use remoca_io::narrow;
use remoca_io::words::IndexMemory;
use remoca_store::{Complaints, LAST_FLUSH_TIME_MAX, StoreEvent};
use std::time::Instant;

/// The parts that serve the guest. Each part keeps its state to itself.
pub(super) struct Vm {
    pub(super) name: String,
    /// Number of hand-overs to this program and those before it.
    pub(super) upgrades: u32,
    /// Why this program does not run with the configuration that its files say.
    pub(super) notice: Option<String>,
    pub(super) host: Host,
    pub(super) engine: DiskEngine<IndexMemory>,
    pub(super) guests: Guests,
    pub(super) in_flight: InFlight,
    pub(super) servers: Servers,
    pub(super) warmth: Warmth,
    pub(super) size: IndexSize,
    pub(super) complaints: Complaints,
    pub(super) sizes: Sizes,
    pub(super) curves: KeptCurves,
}

impl Vm {
    /// Executes all actions that the engine has queued.
    pub(super) fn execute(&mut self) {
        while let Some(action) = self.next_action() {
            match action {
                Action::Disk { request, op, .. } => self.begin_disk(request, op, false),
                Action::DiskToo { request, op, .. } => self.begin_disk(request, op, true),
                Action::ZeroFill { request, offset, length } => {
                    self.in_flight.fill_zero(&mut self.engine, request, offset, length);
                }
                Action::Complete { request, result } => {
                    let Self { in_flight, engine, guests, host, .. } = self;
                    // The disk may have lost some of the work for a request that is returned. That request starts again.
                    if let Some((disk, request)) = in_flight.complete(request, result, engine, guests, host) {
                        self.begin(disk, request);
                    }
                }
                Action::Fetch { fetch, at } => {
                    if self.servers.fetch(fetch, at) {
                        self.read_here(fetch, at);
                    }
                }
                Action::SendBlock { admitted, request, offset } => {
                    if let Some(page) = self.in_flight.page(request, offset) {
                        let sent = self.servers.admit(admitted, page);
                        self.engine.handle_sent(admitted.at.server, sent);
                    }
                }
                Action::MovePage { server, from, to } => self.servers.move_page(server, from, to),
                Action::SetSize { server, npages } => self.servers.set_size(server, npages),
                Action::Ask(server) => self.servers.ask(server),
                Action::Release(server) => self.servers.release(server),
                Action::Use(server) => {
                    if let Err(why) = self.servers.begin_session(&self.host, server) {
                        self.lose_session(server, &why);
                    }
                }
                Action::GiveUp(server) => {
                    self.servers.end_session(&self.host, server, |link| link.end(server, "it does not answer"));
                }
                Action::Leave(server) => self.servers.end_session(&self.host, server, |link| link.leave(server)),
                Action::ForeignWriter(disk) => {
                    let image = &self.guests.numbered(disk).image;
                    tracing::error!(
                        "{image} holds something else than this process wrote or read there: another program writes to it! \
                         The cache was dropped. Stop the other writer, or the disk will be damaged."
                    );
                }
            }
        }
        let Self { in_flight, engine, servers, host, .. } = self;
        in_flight.judge_frames(|page, measured| {
            if let Evicted::Admit(admitted) = engine.handle_frame(page) {
                let sent = servers.admit(admitted, page);
                engine.handle_sent(admitted.at.server, sent);
            }
            measured.record_eviction(host.now(), engine);
        });
    }

    /// Returns the engine's next action. When there is none, first passes sizes to the engine that were given without their
    /// servers.
    fn next_action(&mut self) -> Option<Action> {
        loop {
            if let Some(action) = self.engine.poll_action() {
                return Some(action);
            }
            let (server, size) = self.servers.next_size()?;
            match size {
                Size::Granted(npages) => self.engine.handle_sized(self.host.now(), server, npages),
                Size::Asked | Size::Refused => self.engine.handle_size_refused(self.host.now(), server, PageCount(0)),
            }
        }
    }

    /// Submits the disk I/O of a request, or queues it until there is a buffer. I/O is also queued if earlier I/O of
    /// its disk waits for a buffer.
    fn begin_disk(&mut self, id: RequestId, op: GuestOp, too: bool) {
        let io = self.in_flight.take_up(id, op, too, self.guests.disks());
        if self.in_flight.must_wait(&io) || self.place(io) != Tried::Placed {
            self.in_flight.starve(io);
        }
    }

    /// Submits the queued I/O for which there are buffers, taking the disks in turn.
    pub(super) fn feed_starved(&mut self) {
        if self.in_flight.is_fed() {
            return;
        }
        let mut walk = self.in_flight.begin_walk(&mut self.engine, self.guests.disks());
        while let Some(io) = self.in_flight.next_starved(&mut walk) {
            let tried = self.place(io);
            self.in_flight.note(&mut walk, tried);
        }
    }

    fn place(&mut self, io: DiskIo) -> Tried {
        match self.in_flight.place(io, self.guests.disk_mut(io.disk), &mut self.warmth) {
            Placing::Tried(tried) => tried,
            Placing::GuestGone => {
                self.disk_done(io.id, Err(DiskError(libc::EIO)), None);
                // Called from `execute` or from the end of a turn; either way the actions are drained next.
                self.execute();
                Tried::Placed
            }
        }
    }

    /// Forgets what is known of disks whose guest has left, unless their lock keeps other hosts from running the guest on the image,
    /// and bringing it back.
    pub(super) fn forget_after_departures(&mut self) {
        while let Some(disk) = self.guests.take_departure() {
            if !disk.keeps_others_out() {
                tracing::info!(
                    "{}: its guest has left, and no lock keeps other hosts from writing to {}: what was known of it is void",
                    disk.name,
                    disk.image
                );
                self.engine.handle_content_uncertain(disk.number);
            }
        }
    }

    /// Passes the result of a request's disk I/O to the engine, and ends the I/O.
    pub(super) fn disk_done(&mut self, id: RequestId, result: Result<(), DiskError>, buffer: Option<IoBuffer>) {
        self.in_flight.disk_done(&mut self.engine, self.host.now(), id, result, buffer);
    }

    /// Handles the pending events of a disk's store. Returns whether there were any.
    pub(super) fn take_store_events(&mut self, disk: usize) -> bool {
        let mut any = false;
        while let Some(event) = self.guests.disk_mut(disk).store.next_event() {
            any = true;
            match event {
                StoreEvent::ContentUncertain => {
                    let image = &self.guests.disks()[disk].image;
                    tracing::warn!("{image}: its server came back; what was known of it is void");
                    self.engine.handle_content_uncertain(self.guests.disks()[disk].number);
                    self.in_flight.repeat_parts(disk);
                    self.guests.disk_mut(disk).frontend.repeat_parts();
                }
                StoreEvent::Measured(result) => {
                    let Self { sizes, guests, warmth, engine, host, .. } = self;
                    sizes.follow(disk, result, guests, (warmth, engine), host);
                }
                StoreEvent::Looked { changed_ns } => {
                    self.warmth.end_look(disk, &self.guests.disks()[disk], changed_ns);
                }
                StoreEvent::Completed(completion) => {
                    narrow::passes("disk-done");
                    let Ok(id) = u32::try_from(completion.token) else { continue };
                    let id = RequestId(id);
                    let result = completion.result.map_err(|error| DiskError(error.errno));
                    if let Some(op) = self.in_flight.op(id) {
                        self.warmth.end(disk, &op);
                        if let Err(DiskError(errno)) = result {
                            self.complain(disk, &op, errno);
                        }
                    }
                    self.disk_done(id, result, completion.buffer);
                }
            }
            self.execute();
        }
        self.warmth.note_failure(disk, &self.guests.disks()[disk], &mut self.engine);
        any
    }

    fn complain(&mut self, disk: usize, op: &GuestOp, errno: i32) {
        let Disk { name, image, .. } = &self.guests.disks()[disk];
        if let Some(complaint) = self.complaints.note(disk, image, &store_op(*op), errno, self.host.instant()) {
            tracing::error!("{name}: {complaint}");
        }
    }

    /// Marks images with modifications in flight as written now, in the state file. Looks at them if that is due.
    pub(super) fn stamp_writes(&mut self) {
        self.warmth.stamp_writes(self.guests.disks_mut(), &self.engine, &self.host);
    }

    /// Makes a store handle the events of its descriptor, and handles the store's own events.
    pub(super) fn serve_store(&mut self, disk: usize) {
        // The store continues writes, and submits the operations that this turn has queued.
        self.stamp_writes();
        self.guests.disk_mut(disk).store.handle_ready(self.host.instant());
        self.take_store_events(disk);
    }

    /// Handles the timers of stores that are due.
    pub(super) fn run_store_timers(&mut self, now: Instant) {
        for disk in 0..self.guests.disks().len() {
            if self.guests.disks()[disk].store.next_deadline().is_some_and(|at| at <= now) {
                self.stamp_writes();
                self.guests.disk_mut(disk).store.handle_timer(now);
                self.take_store_events(disk);
            }
        }
    }

    /// Submits everything that was queued in this turn to the kernel. The servers' sockets come first: if a
    /// connection turns out to be lost, the reads that waited for it go to the disk. Operations that complete at once
    /// may free a buffer for which starved I/O waits, so this is repeated until none completes. Otherwise I/O could be
    /// left waiting, with no event to resume it.
    pub(super) fn end_turn(&mut self) {
        // Read now: what was submitted in this turn may have waited for the system, and a store that did is not to do so again.
        let now = self.host.instant();
        let mut completed = true;
        while completed {
            self.feed_starved();
            self.flush_links();
            completed = false;
            self.stamp_writes();
            for disk in 0..self.guests.disks().len() {
                let store = &mut self.guests.disk_mut(disk).store;
                store.kick(now);
                if cfg!(feature = "ablation") && store.in_flight() > 0 {
                    narrow::passes("disk-submitted");
                }
                completed |= self.take_store_events(disk);
            }
        }
        self.guests.notify();
    }

    /// Passes the size of each disk to the engine, and whether all of it is a swap area.
    pub(super) fn describe_disks(&mut self) {
        for Disk { number, store, swap, .. } in self.guests.disks() {
            self.engine.describe_disk(*number, store.geometry().size.min(DISK_BYTES_MAX), *swap);
        }
    }

    /// Replaces the engine. The new engine continues the counters of the old one.
    pub(super) fn change_engine(&mut self, mut engine: DiskEngine<IndexMemory>) {
        engine.count_on(self.engine.stats());
        self.size.forget();
        // A hand-over waits for this: unmapping a large index takes a while.
        self.size.give_back(std::mem::replace(&mut self.engine, engine));
    }

    /// Sets the sizes of the cache's tiers in the engine.
    pub(super) fn resize(&mut self, sizes: TierSizes) {
        let now = self.host.now();
        self.engine.resize(now, sizes.cache, sizes.local);
    }

    /// Makes the index large enough for a cache of `cache` pages. This blocks, but no guest is served yet.
    pub(super) fn fit_index_now(&mut self, cache: PageCount, config: &EngineConfig) {
        if let Some(Region { index, state }) = self.size.make_now(cache, &self.engine, &self.warmth) {
            self.engine.begin_move(index);
            self.end_move(state, config);
        }
    }

    /// Tells the engine how much memory the guest has. Starts to give the index the size that it should have, unless that is in progress
    /// or `is_idle` is false. `is_idle` says that no other process is concerned with the disks.
    pub(super) fn fit_index(&mut self, is_idle: bool) {
        if let Some(memory) = self.size.known_guest_memory(&self.guests) {
            self.engine.set_guest_memory(memory);
        }
        self.size.fit(is_idle, &self.engine, &self.guests, &self.warmth);
    }

    /// Moves the next piece of the index of an engine of this configuration. Returns whether that was the last one.
    pub(super) fn move_index(&mut self, config: &EngineConfig) -> bool {
        let Some(state) = self.size.move_piece(&mut self.engine) else { return false };
        self.end_move(state, config);
        true
    }

    fn end_move(&mut self, state: Result<Option<StateFile>, String>, config: &EngineConfig) {
        let old = self.engine.finish_move();
        match state {
            // The former one was lost.
            Ok(Some(state)) if !self.warmth.is_kept() => {
                self.keep_in(state, &Former::default(), config);
                if self.warmth.is_kept() {
                    tracing::info!("there is a state file again: a restart will find the cache warm");
                }
            }
            state => self.warmth.follow_index(state, self.servers.link_mut()),
        }
        self.size.give_back(old);
    }

    /// Has a state file again that was lost, if that is due and there is room.
    pub(super) fn look_for_room(&mut self, is_idle: bool, now: Instant) {
        self.size.look_for_room(is_idle, &self.engine, &self.warmth, now);
    }

    /// Records the settings made by `remoca set`, for a successor.
    pub(super) fn keep_settings(&self) {
        self.warmth.keep_settings(self.size.tiers(), self.engine.status().enabled, self.servers.link());
    }

    /// Restores the flush failures that the previous process recorded, for each disk that has the same image. The same
    /// guest may still be running, so its flushes must keep failing.
    pub(super) fn inherit_failed_flushes(&mut self, former: &Former) {
        self.warmth.inherit_failed_flushes(former, self.guests.disks_mut(), &mut self.engine, &self.name);
    }

    /// Makes `state` the state file. Its words hold the index of the engine, which has this configuration. Failed flushes of a
    /// `former` process stay with their images, which need not be those of the disks.
    pub(super) fn keep_in(&mut self, state: StateFile, former: &Former, config: &EngineConfig) {
        let Self { warmth, guests, engine, servers, host, .. } = self;
        warmth.keep_in(state, guests.disks(), engine, servers.link_mut(), host);
        warmth.keep_removed_failures(former, guests.disks(), engine);
        self.keep_settings();
        self.warmth.put_in_place(config);
    }

    /// Drains all stores at the end of the process, and records the flushes that failed then. Returns the images whose store
    /// has not received all answers.
    pub(super) fn drain_stores(&mut self) -> Vec<String> {
        // For all of them: the service manager does not wait much longer.
        let flush_by = self.host.instant() + LAST_FLUSH_TIME_MAX;
        self.guests.disks_mut().iter_mut().for_each(|disk| disk.store.begin_drain());
        let mut unanswered = Vec::new();
        for disk in 0..self.guests.disks().len() {
            let is_drained = self.guests.disk_mut(disk).store.drain(flush_by);
            let of = &self.guests.disks()[disk];
            self.warmth.note_failure(disk, of, &mut self.engine);
            if !is_drained {
                unanswered.push(of.image.clone());
            }
        }
        unanswered
    }

    /// Returns whether a write or a flush is in flight, or an image is settling.
    pub(super) fn is_writing(&self) -> bool {
        self.warmth.is_written_to() || self.warmth.is_settling() || self.in_flight.is_flushing()
    }
}
