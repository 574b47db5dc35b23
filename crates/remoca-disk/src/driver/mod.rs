//! The driver: the one I/O thread of a VM process. It owns every descriptor, turns what happens on them into events of
//! the engine, and executes the engine's actions.
//!
//! One turn of the loop waits for events, passes each one (kicks, disk completions, frames of the server, control
//! commands) to the engine, and executes the engine's actions. It then submits everything that was queued to the kernel
//! at once: one call for each store, one for each server's socket, one signal for each queue. Nothing here decides what
//! may be cached or served.
//! 1. Actions are drained after every call of the engine, in order.
//! 2. A guest's data are copied once: read buffer -> guest, guest -> write buffer, receive buffer -> guest. Before a
//!    read's data overwrite guest memory, the engine is asked whether to examine the old content ([`capture`]).
//! 3. Nothing in this thread waits for a guest, a disk, a server or a control client.

mod capture;
mod commands;
mod curve_status;
mod curves;
mod disk;
mod eviction_port;
mod guests;
mod host;
mod image_state;
mod in_flight;
mod index_size;
mod intake;
mod measured;
mod migration;
mod operator;
mod parts;
mod poller;
mod polling;
mod requests;
mod servers;
mod sizes;
mod snapshot;
mod starved;
mod taking;
#[cfg(test)]
mod tests;
mod tiers;
mod traffic;
mod upgrade;
mod vm;
mod warmth;

use crate::state::Former;
use curves::KeptCurves;
pub use disk::{Disk, Opener, Port};
use guests::Guests;
use host::Host;
use in_flight::InFlight;
use index_size::IndexSize;
pub use index_size::{Aside, on_a_thread};
use intake::Intake;
pub use migration::Migration;
use operator::Operator;
pub use parts::Parts;
pub use poller::Source;
use polling::Polling;
use remoca_core::engine::Leaving;
use remoca_core::units::Nanos;
use remoca_io::handover::Handover;
use remoca_io::service::ServiceManager;
use remoca_io::thread_times::ThreadTimes;
use remoca_protocol::control::Status;
use remoca_store::Complaints;
use servers::Servers;
use sizes::Sizes;
pub use snapshot::{cache_pages, local_pages};
use std::io;
use std::time::Duration;
pub use tiers::TierSizes;
pub use upgrade::Start;
use upgrade::Upgrades;
use vm::Vm;
use warmth::Warmth;

/// Pause before a turn that only goes on with what nobody waits for. Other threads that want this processor run meanwhile; a thread that never
/// pauses keeps them waiting until its time slice ends, for milliseconds.
const REST: Duration = Duration::from_micros(50);
/// How long a stopping process waits for writes and flushes in flight.
const STOP_TIME_MAX: Duration = Duration::from_secs(1);
/// The same while disks are handed over to another process: if the hand-over were cut off, no process would have them.
const HAND_OVER_TIME_MAX: Duration = Duration::from_secs(5);

/// Why the driver stopped.
pub enum Ended {
    /// It was asked to stop, or no front end can attach again.
    Finished,
    /// As [`Self::Finished`], but a disk may still execute operations that it was sent, by this process or by one before
    /// it. Nothing must be cleaned up: the sockets that remain tell a successor that it has to wait.
    Unsettled,
    /// Another program is to take over. If it cannot be started, call [`Driver::refuse_upgrade`] and run the driver again.
    HandOver(Box<Handover>),
}

/// The running VM process.
pub struct Driver {
    vm: Vm,
    migration: Migration,
    operator: Operator,
    upgrades: Upgrades,
    polling: Polling,
    /// Times of the thread that runs the driver.
    times: Option<ThreadTimes>,
}

impl Driver {
    /// Returns a driver of these parts, with all of their descriptors registered.
    ///
    /// # Errors
    /// If the system has no descriptors or memory left, or refuses a registration.
    pub fn new(parts: Parts) -> io::Result<Self> {
        let disks = parts.disks.len();
        let guest_memory_min = parts.migration.config().guest_memory;
        let host = Host::new(parts.clock)?;
        let now = host.instant();
        let vm = Vm {
            name: parts.name,
            upgrades: parts.start.upgrades,
            notice: parts.start.notice.clone(),
            sizes: Sizes::new(&parts.disks, now),
            host,
            engine: parts.engine,
            guests: Guests::new(parts.disks, parts.port, parts.nbd),
            in_flight: InFlight::new(disks, parts.buffers, parts.trace),
            servers: Servers::new(parts.link, parts.local_server),
            warmth: Warmth::new(parts.state, parts.cold_reason, parts.options, disks),
            size: IndexSize::new(parts.sizes, guest_memory_min, parts.guest_memory_max, parts.aside)?,
            complaints: Complaints::default(),
            curves: KeptCurves::none(now),
        };
        let upgrades = Upgrades::new(parts.start, parts.ask);
        let operator = Operator::new(parts.control, parts.stop, parts.hangup, parts.manager);
        let polling = Polling::new(parts.poll_time_max);
        let mut driver = Self { vm, migration: parts.migration, operator, upgrades, polling, times: None };
        driver.begin(parts.former, parts.cache_enabled)?;
        Ok(driver)
    }

    fn begin(&mut self, former: Former, cache_enabled: bool) -> io::Result<()> {
        let Self { vm, migration, .. } = self;
        migration.begin(vm)?;
        vm.describe_disks();
        vm.curves = KeptCurves::resume(vm.warmth.path(), &mut vm.engine, vm.host.instant());
        vm.inherit_failed_flushes(&former);
        vm.warmth.judge_images(vm.guests.disks(), &mut vm.engine, &vm.host);
        if !migration.serves() {
            migration.keep_former(former);
        } else {
            let wanted = if cache_enabled { vm.size.tiers() } else { TierSizes::default() };
            vm.fit_index_now(wanted.sum(), migration.config());
            vm.resize(wanted);
            vm.keep_settings();
        }
        self.register()?;
        self.vm.guests.note_departures();
        if self.vm.guests.is_connected() {
            // Since the disks were opened.
            self.vm.fit_index(self.migration.is_idle());
        }
        // What a former process has drained, or has elsewhere than the options say now.
        self.vm.tell_servers(Leaving::Drained);
        Ok(())
    }

    fn register(&mut self) -> io::Result<()> {
        let Self { vm, migration, operator, .. } = self;
        operator.register(&vm.host)?;
        vm.servers.register(&vm.host)?;
        vm.guests.register(&vm.host)?;
        migration.register(&vm.host)?;
        vm.size.register(&vm.host)?;
        vm.in_flight.measured().register(&vm.host)
    }

    /// Runs the loop until the process is to stop, or to hand over to another program. Returns which of these it is.
    ///
    /// # Errors
    /// If waiting for events fails, which only a programming error or a dying system can cause.
    pub fn run(&mut self) -> io::Result<Ended> {
        let mut ready = Vec::new();
        self.times = ThreadTimes::of_this_thread();
        loop {
            ready.clear();
            self.wait(&mut ready)?;
            if let Some(ended) = self.turn(&ready) {
                return Ok(ended);
            }
        }
    }

    /// Waits until there is something to do, and adds the sources that have events to `ready`. While no guest waits for an
    /// answer, looks for the next request before it sleeps, if [`Polling`] says so.
    fn wait(&mut self, ready: &mut Vec<(Source, bool)>) -> io::Result<()> {
        if self.has_work() {
            return self.vm.host.wait(ready, Some(Duration::ZERO));
        }
        if self.takes_requests() && self.vm.in_flight.are_completed() && self.polling.begin() {
            let Vm { host, guests, .. } = &mut self.vm;
            let began = host.uptime();
            let time = self.polling.look(began, || self.times.as_ref()?.read());
            while ready.is_empty() && !guests.look() && host.uptime() - began < time {
                host.wait(ready, Some(Duration::ZERO))?;
            }
            let has_found = !ready.is_empty() || guests.pops_again();
            self.polling.end(has_found);
            if has_found {
                return Ok(());
            }
        }
        let timeout = self.timeout();
        self.vm.host.wait(ready, timeout)
    }

    /// Returns whether the next turn has something to do, whatever happens until then.
    fn has_work(&mut self) -> bool {
        let has_requests = self.takes_requests() && self.vm.guests.look();
        has_requests || self.vm.servers.receives_again() || self.vm.guests.pops_again() || self.is_moving_index()
    }

    /// Returns whether new requests are accepted from guests.
    fn takes_requests(&self) -> bool {
        matches!(self.intake(), Intake::All)
    }

    /// Adds the sources that have events now to `ready`, each with whether its descriptor is writable. Does not wait.
    ///
    /// # Errors
    /// As for [`Self::run`].
    pub fn look(&mut self, ready: &mut Vec<(Source, bool)>) -> io::Result<()> {
        self.vm.host.wait(ready, Some(Duration::ZERO))
    }

    /// Executes one turn of the loop for the sources in `ready`. Returns why the driver ends, or `None` if it continues.
    pub fn turn(&mut self, ready: &[(Source, bool)]) -> Option<Ended> {
        let ended = self.execute_turn(ready);
        if ended.is_some() {
            // The next program that serves the guests may be one that does not look by itself.
            self.vm.guests.listen(self.vm.host.latest());
        }
        ended
    }

    fn execute_turn(&mut self, ready: &[(Source, bool)]) -> Option<Ended> {
        self.vm.host.update();
        for &(source, writable) in ready {
            self.handle(source, writable);
        }
        self.take_leftovers();
        self.run_timers();
        self.vm.end_turn();
        self.follow_migration();
        self.vm.guests.note_departures();
        if self.migration.serves() {
            self.vm.forget_after_departures();
        }
        self.answer_size_clients();
        self.vm.warmth.settle_images(self.vm.guests.disks_mut(), &self.vm.host);
        if let Some(give_up_at) = self.operator.stop_at() {
            let waits = self.migration.ends_hand_over() || self.vm.warmth.is_kept() && self.vm.is_writing();
            return (!waits || self.vm.host.instant() >= give_up_at).then(|| self.finish());
        }
        if self.vm.guests.is_abandoned() {
            if self.migration.ends_hand_over() {
                self.operator.stop_within(&self.vm.host, HAND_OVER_TIME_MAX);
                return None;
            }
            self.vm.warmth.abandon();
            return Some(self.finish());
        }
        let hindrance = self.migration.hinders_upgrade(&self.vm.guests);
        let handover = self.upgrades.advance(&mut self.vm, self.operator.control(), hindrance)?;
        Some(Ended::HandOver(Box::new(handover)))
    }

    /// Returns how long to wait for events before the next turn, or `None` if there is no limit. If there is nothing to do at
    /// once, guests are told to announce their requests.
    pub fn timeout(&mut self) -> Option<Duration> {
        if self.has_work() {
            return Some(Duration::ZERO);
        }
        self.vm.host.update();
        if self.vm.guests.listen(self.vm.host.latest()) && self.takes_requests() {
            self.vm.guests.pop_again();
            return Some(Duration::ZERO);
        }
        let wake = self.vm.engine.next_wake();
        let Vm { host, guests, warmth, size, sizes, servers, .. } = &self.vm;
        let time_until = |at: Nanos| Duration::from_nanos(at.since_ns(host.now()));
        // At time 0 is due what is to be done bit by bit.
        let wake = wake.map(|at| if at == Nanos(0) { REST } else { time_until(at) });
        let end = self.operator.stop_at().or_else(|| self.upgrades.next_deadline(host));
        let deadlines = guests
            .next_deadline()
            .into_iter()
            .chain(sizes.next_deadline())
            .chain(size.next_deadline(warmth))
            .chain(servers.next_deadline(host.latest()))
            .chain(self.operator.manager().next_deadline())
            .chain(end);
        let now = host.latest();
        let others = deadlines.map(|at| at.saturating_duration_since(now)).min();
        [wake, others, warmth.settle_timeout(), self.migration.time_left(&self.vm)].into_iter().flatten().min()
    }

    /// Handles an event of a descriptor.
    fn handle(&mut self, source: Source, writable: bool) {
        let (is_idle, hindrance) = (self.migration.is_idle(), self.migration.hinders_upgrade(&self.vm.guests));
        let vm = &mut self.vm;
        match source {
            Source::Stop => self.begin_stop(),
            Source::Control => self.answer_control(),
            Source::LinkWake => vm.take_news(),
            Source::LinkSocket(server) => {
                if writable {
                    vm.servers.note_writable(server);
                }
                vm.receive(server);
            }
            Source::Store(disk) => vm.serve_store(usize::from(disk)),
            Source::Disk(disk) => self.serve_disk(disk),
            Source::Port => self.serve_port(),
            Source::Nbd => vm.guests.attach_clients(vm.host.instant()),
            Source::Hangup => {
                self.operator.take_hangup();
                self.upgrades.begin(None, None, vm, hindrance);
            }
            Source::Upgrade => self.upgrades.hear_program(vm, self.operator.control(), hindrance),
            Source::Migration => self.migration.handle_events(vm),
            Source::Index => {
                if vm.size.take_region(is_idle, &mut vm.engine, &vm.guests) {
                    self.go_on_with_size();
                }
            }
            Source::Trace => vm.in_flight.measured().clear_wake(),
        }
    }

    fn serve_disk(&mut self, disk: u16) {
        let Some(is_another_guest) = self.vm.guests.handle_events(disk) else { return };
        if is_another_guest {
            self.vm.fit_index(self.migration.is_idle());
        }
        self.vm.pop_requests(disk, self.intake());
    }

    fn serve_port(&mut self) {
        if self.vm.guests.port_mut().handle_events() {
            self.vm.pop_port(self.intake());
        }
    }

    /// Returns which requests are accepted from guests at present.
    fn intake(&self) -> Intake {
        if !self.migration.serves() {
            Intake::Away { comes: self.migration.disks_come(&self.vm.guests) }
        } else if self.operator.stop_at().is_some() {
            Intake::Nothing
        } else if self.upgrades.is_draining() {
            Intake::Begun
        } else {
            Intake::All
        }
    }

    /// Handles the frames, requests and index nodes that an earlier turn left. Each turn is limited, so that no device
    /// and no server starves the others.
    fn take_leftovers(&mut self) {
        for server in self.vm.servers.take_receive_again() {
            self.vm.receive(server);
        }
        if self.vm.guests.take_pop_again() {
            for disk in (0..).take(self.vm.guests.disks().len()) {
                self.vm.pop_requests(disk, self.intake());
            }
            self.vm.pop_port(self.intake());
        }
        if self.is_moving_index() && self.vm.move_index(self.migration.config()) {
            self.go_on_with_size();
        }
        // Without a guest nobody knows how much memory the next one has.
        if self.vm.size.has_settled(&self.vm.engine) && self.vm.guests.is_connected() && !self.is_draining() {
            self.vm.fit_index(self.migration.is_idle());
        }
    }

    /// Returns whether a piece of the index is to be moved in this turn.
    fn is_moving_index(&self) -> bool {
        self.vm.size.has_region() && self.migration.is_idle() && !self.is_draining()
    }

    /// Returns whether no new requests are accepted from guests, because the process is stopping or drains for an upgrade.
    fn is_draining(&self) -> bool {
        self.operator.stop_at().is_some() || self.upgrades.is_draining()
    }

    fn run_timers(&mut self) {
        let is_draining = self.is_draining();
        let Self { vm, migration, operator, .. } = self;
        if vm.engine.next_deadline().is_some_and(|at| at <= vm.host.now()) {
            vm.engine.handle_timer(vm.host.now());
            vm.execute();
        }
        migration.run_timers(vm);
        let now = vm.host.latest();
        operator.manager_mut().handle_timer(now);
        vm.guests.run_timers(now);
        vm.run_link_timers(now);
        vm.run_store_timers(now);
        vm.curves.run_timer(&mut vm.engine, now, vm.size.aside());
        vm.look_for_room(!is_draining && migration.is_idle(), now);
        vm.sizes.run_timers(!is_draining && migration.serves(), vm.guests.disks_mut(), now);
    }

    fn follow_migration(&mut self) {
        while self.migration.advance(&mut self.vm) {
            self.vm.end_turn();
        }
    }

    /// Starts to stop. From now on, no new requests are accepted from guests, and the writes and flushes in flight have
    /// a limited time to finish.
    fn begin_stop(&mut self) {
        let attached = self.vm.guests.attached().join(", ");
        if !attached.is_empty() && self.migration.serves() {
            tracing::warn!(
                "told to end with a guest attached to {attached}: its disks hang until this process runs again"
            );
        }
        let patience = if self.migration.ends_hand_over() { HAND_OVER_TIME_MAX } else { STOP_TIME_MAX };
        self.operator.begin_stop(&self.vm.host, patience);
    }

    /// Ends the driver. Publishes completed requests to the guests and completes the trace. Requests in flight are left
    /// to the next process. So is the pool if that process can find it; otherwise the pool is given back.
    fn finish(&mut self) -> Ended {
        let Vm { guests, warmth, servers, engine, curves, .. } = &mut self.vm;
        guests.notify_disks();
        if warmth.is_kept() {
            curves.keep(engine)
        } else {
            curves.abandon()
        }
        self.migration.process_ends(guests.is_connected());
        if let Some(link) = servers.link_mut().filter(|_| !warmth.is_kept()) {
            link.goodbye();
        }
        // A flush that fails here is recorded in the index.
        let unanswered = self.vm.drain_stores();
        let Vm { guests, engine, in_flight, .. } = &mut self.vm;
        engine.end();
        in_flight.measured().end();
        let settles = guests.is_settling();
        if settles {
            tracing::warn!(
                "an NBD server may still have requests of a killed predecessor; the sockets stay, so that a successor \
                 waits for them as well"
            );
        }
        if !unanswered.is_empty() {
            tracing::warn!(
                "{unanswered:?}: the server has not answered everything; the sockets stay, so that a successor waits"
            );
        }
        if settles || !unanswered.is_empty() { Ended::Unsettled } else { Ended::Finished }
    }

    /// Returns the service manager, to which the state of the process is reported.
    pub fn manager(&mut self) -> &mut ServiceManager {
        self.operator.manager_mut()
    }

    /// Returns whether a guest is attached whose disks hang without this process.
    pub fn has_guest(&self) -> bool {
        self.migration.serves() && self.vm.guests.is_connected()
    }

    /// Returns the status of the process.
    pub fn snapshot(&mut self) -> Status {
        snapshot::snapshot(&mut self.vm, self.migration.status())
    }

    /// Returns whether a previous program of this process handed over to this one.
    pub fn has_taken_over(&self) -> bool {
        self.vm.upgrades > 0
    }

    /// Refuses the upgrade because of `error`. This program continues.
    pub fn refuse_upgrade(&mut self, error: &str) {
        self.upgrades.refuse(error, &mut self.vm, self.operator.control());
    }
}
