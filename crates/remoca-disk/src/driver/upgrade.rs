//! Upgrade in place, seen from the I/O thread. Another program is asked whether it can take over. Then no new requests
//! are accepted from guests until nothing is in flight. Then everything is handed over.
//!
//! Until the new program runs, nothing has changed: if it cannot take over, if a disk does not finish its requests in
//! time, or if `execve` is refused, this program continues.

use super::disk::Disk;
use super::host::Host;
use super::poller::Source;
use super::vm::Vm;
use crate::handover::{Ask, Checking, Successor};
use crate::link::ServerLink;
use remoca_io::control::{ControlRequest, ControlServer};
use remoca_io::handover::Handover;
use remoca_io::narrow;
use remoca_protocol::control::{Command, Reply, UPGRADE_UNDER_WAY};
use remoca_protocol::guests::Guests;
use remoca_protocol::handover::{Description, PassedDisk, PassedPool, PassedStore, StoreKind};
use remoca_protocol::offer::Offers;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit for the whole check. The new program has less time for its answer, but on a file system that hangs it
/// cannot even be started.
const ASK_TIME_MAX: Duration = Duration::from_secs(12);
/// Time in which the guests' requests in flight must finish. Reads that wait for a memory server go to the disk sooner.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(5);
/// Time after which an upgrade no longer waits for control clients that are silent, nor for NBD clients that do not
/// read their answers, nor for memory servers that owe pages for which no read waits.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(1);
/// How long a client of the trace that takes nothing keeps the guests waiting.
const TRACE_TIME_MAX: Duration = Duration::from_millis(50);
const OPENING: &str = "an image that a disk was to be added with is still being opened: is its file system or its server stuck? Try again \
                       when it answers";

/// How this program was started, for another that takes its place.
#[derive(Clone, Debug)]
pub struct Start {
    /// The file of this program, by the name that an upgrade replaces.
    pub program: PathBuf,
    /// Its arguments, its name included.
    pub arguments: Vec<OsString>,
    /// Number of hand-overs so far.
    pub upgrades: u32,
    /// Why this program does not run with the configuration that its files say.
    pub notice: Option<String>,
    /// Shared with threads that open images. One that is in the kernel, where a file system hangs, would keep `execve` waiting, and
    /// with it all guests.
    pub openers: Arc<()>,
}

/// How this program was started, and the upgrade to another one that is in progress.
pub(super) struct Upgrades {
    start: Start,
    /// Function that asks another program whether it could take over.
    ask: Ask,
    under_way: Option<Upgrade>,
}

/// An upgrade in progress.
struct Upgrade {
    program: PathBuf,
    client: Option<ControlRequest>,
    /// What the new program would offer to guests, as far as it has said it.
    offers: Option<Offers>,
    stage: UpgradeStage,
}

enum UpgradeStage {
    Asking {
        checking: Checking,
        since: Instant,
    },
    /// Guests are served. Control clients get their answers, and no new client is admitted.
    Answering {
        since: Instant,
    },
    Draining {
        since: Instant,
        /// Time at which nothing was in flight, and guests were asked to send no more messages.
        pausing_since: Option<Instant>,
    },
}

impl Upgrades {
    /// Returns a value without an upgrade in progress.
    pub(super) fn new(start: Start, ask: Ask) -> Self {
        Self { start, ask, under_way: None }
    }

    /// Returns whether no new requests are accepted from guests, because the process drains for an upgrade.
    pub(super) fn is_draining(&self) -> bool {
        matches!(self.under_way, Some(Upgrade { stage: UpgradeStage::Draining { .. }, .. }))
    }

    /// Starts an upgrade by asking `program`, or else the current file of this program, whether it can take over.
    /// Refuses `client` if an upgrade is not possible now, such as for a `hindrance`.
    pub(super) fn begin(
        &mut self,
        program: Option<PathBuf>,
        client: Option<ControlRequest>,
        vm: &Vm,
        hindrance: Option<&str>,
    ) {
        let program = program.unwrap_or_else(|| self.start.program.clone());
        let asked = match (&self.under_way, hindrance) {
            (Some(_), _) => Err(UPGRADE_UNDER_WAY.into()),
            // The next program would not know that it has to wait.
            (None, _) if vm.guests.is_settling() => {
                Err("an NBD server is being given time after a crash: try again in some seconds".into())
            }
            (None, Some(hindrance)) => Err(hindrance.into()),
            (None, None) if Arc::strong_count(&self.start.openers) > 1 => Err(OPENING.into()),
            (None, None) => self.ask_program(&program, vm),
        };
        match asked {
            Ok(checking) => {
                let stage = UpgradeStage::Asking { checking, since: vm.host.instant() };
                self.under_way = Some(Upgrade { program, client, offers: None, stage });
            }
            Err(error) => refuse(client, &error),
        }
    }

    fn ask_program(&self, program: &std::path::Path, vm: &Vm) -> Result<Checking, String> {
        if !program.is_absolute() {
            return Err(format!("{} is no absolute path of a program", program.display()));
        }
        let checking = (self.ask)(program.into(), self.start.arguments.clone(), vm.guests.mapped_memory());
        let checking = checking.map_err(|error| format!("cannot ask the new program: {error}"))?;
        vm.host.watch(checking.wake_fd(), Source::Upgrade).map_err(|error| error.to_string())?;
        Ok(checking)
    }

    /// Continues or refuses the upgrade, according to the answer of the new program if there is one.
    pub(super) fn hear_program(&mut self, vm: &mut Vm, control: Option<&ControlServer>, hindrance: Option<&str>) {
        let Some(Upgrade { program, offers, stage: stage @ UpgradeStage::Asking { .. }, .. }) = &mut self.under_way
        else {
            return;
        };
        let UpgradeStage::Asking { checking, .. } = &*stage else { return };
        match (checking.verdict(), hindrance) {
            (None, _) => {}
            (Some(Ok(_)), Some(hindrance)) => self.refuse(hindrance, vm, control),
            (Some(Ok(Successor { version, offers: said })), None) => {
                *offers = said;
                tracing::info!("{} (version {version}) takes over when nothing is in flight", program.display());
                vm.host.unwatch(checking.wake_fd());
                *stage = UpgradeStage::Answering { since: vm.host.instant() };
                if let Some(control) = control {
                    control.close();
                }
            }
            (Some(Err(error)), _) => self.refuse(&error, vm, control),
        }
    }

    /// Returns when the upgrade has to be examined again at the latest, or `None` if there is none in progress.
    pub(super) fn next_deadline(&self, host: &Host) -> Option<Instant> {
        match &self.under_way {
            Some(Upgrade { stage: UpgradeStage::Asking { since, .. }, .. }) => Some(*since + ASK_TIME_MAX),
            Some(Upgrade { stage: UpgradeStage::Answering { since }, .. }) => Some(*since + ANSWER_TIME_MAX),
            Some(Upgrade { stage: UpgradeStage::Draining { since, pausing_since }, .. }) => {
                let ends = [Some(*since), *pausing_since].into_iter().flatten().map(|since| since + ANSWER_TIME_MAX);
                Some(ends.filter(|end| *end > host.instant()).min().unwrap_or(*since + DRAIN_TIME_MAX))
            }
            _ => None,
        }
    }

    /// Advances the upgrade at the end of a turn. Returns the hand-over if nothing is in flight, and refuses the
    /// upgrade if that takes too long. Returns `None` otherwise.
    pub(super) fn advance(
        &mut self,
        vm: &mut Vm,
        control: Option<&ControlServer>,
        hindrance: Option<&str>,
    ) -> Option<Handover> {
        if let Some(Upgrade { stage: UpgradeStage::Asking { since, .. }, program, .. }) = &self.under_way
            && vm.host.time_since(*since) >= ASK_TIME_MAX
        {
            let seconds = ASK_TIME_MAX.as_secs();
            let error = format!("{} cannot be started, nor refused, within {seconds} seconds", program.display());
            self.refuse(&error, vm, control);
        }
        self.begin_drain(vm, control, hindrance);
        let Some(Upgrade { stage: UpgradeStage::Draining { since, pausing_since }, .. }) = &mut self.under_way else {
            return None;
        };
        let waited = vm.host.time_since(*since);
        let is_drained = is_drained(vm, waited >= ANSWER_TIME_MAX);
        if !is_drained || !is_trace_written(vm) {
            if waited >= DRAIN_TIME_MAX {
                let seconds = DRAIN_TIME_MAX.as_secs();
                let error = match is_drained {
                    false => format!(
                        "requests of the guest were still in flight after {seconds} seconds: is a disk or an NBD server stuck? \
                         Try again when it answers"
                    ),
                    true => format!(
                        "the trace could not be written within {seconds} seconds: is its file system stuck? Try again when it \
                         answers"
                    ),
                };
                self.refuse(&error, vm, control);
            }
            return None;
        }
        let pausing_since = *pausing_since.get_or_insert(vm.host.instant());
        if !vm.guests.pause() && vm.host.time_since(pausing_since) < ANSWER_TIME_MAX {
            return None;
        }
        let handover = self.hand_over(vm, control).inspect_err(|error| self.refuse(error, vm, control)).ok()?;
        // Not before: a program that goes on as before records on.
        vm.in_flight.measured().end_client_within(TRACE_TIME_MAX);
        Some(handover)
    }

    /// Starts to drain when the only control client left is the one that waits for the upgrade, or when the others'
    /// time is over. Refuses the upgrade if something hinders it by now.
    fn begin_drain(&mut self, vm: &mut Vm, control: Option<&ControlServer>, hindrance: Option<&str>) {
        let Some(Upgrade { client, stage: stage @ UpgradeStage::Answering { .. }, .. }) = &mut self.under_way else {
            return;
        };
        let UpgradeStage::Answering { since } = *stage else { return };
        let is_asked = control.is_some_and(|control| control.clients() > usize::from(client.is_some()));
        let now = vm.host.instant();
        if is_asked && now.saturating_duration_since(since) < ANSWER_TIME_MAX {
            return;
        }
        *stage = UpgradeStage::Draining { since: now, pausing_since: None };
        vm.guests.admit_nbd_clients(false);
        if let Some(hindrance) = hindrance {
            self.refuse(hindrance, vm, control);
        }
    }

    /// Refuses the upgrade because of `error`. This program continues.
    pub(super) fn refuse(&mut self, error: &str, vm: &mut Vm, control: Option<&ControlServer>) {
        let Some(Upgrade { client, stage, .. }) = self.under_way.take() else { return };
        if let UpgradeStage::Asking { checking, .. } = &stage {
            vm.host.unwatch(checking.wake_fd());
        }
        vm.engine.reopen();
        vm.guests.end_pause();
        vm.guests.admit_nbd_clients(true);
        refuse(client, error);
        if let Some(control) = control {
            control.open();
        }
        // Requests that arrived in the meantime have consumed their event, so the queues are examined again.
        vm.guests.pop_again();
    }

    /// Collects everything that another program needs to continue, and closes the engine.
    fn hand_over(&self, vm: &mut Vm, control: Option<&ControlServer>) -> Result<Handover, String> {
        narrow::passes("handover-drained");
        let Some(Upgrade { program, client, offers, .. }) = &self.under_way else {
            return Err("there is no upgrade".into());
        };
        let removed = client.as_ref().and_then(|request| match &request.command {
            Command::RemoveDisk { disk } => Some(disk),
            _ => None,
        });
        if let Some(disk) = removed
            && offers.as_ref().is_none_or(|offers| offers.disks.contains_key(disk))
        {
            return Err(format!("{} would still have the disk {disk}", program.display()));
        }
        let name = program.clone().into_os_string();
        let arguments = [name].into_iter().chain(self.start.arguments.iter().skip(1).cloned()).collect();
        let mut handover = Handover::new(program.clone(), arguments);
        let system = |error: io::Error| format!("no descriptors for the new program: {error}");
        let client = client.as_ref().map(|request| handover.pass(request.connection()));
        handover.description.client = client.transpose().map_err(system)?;
        handover.description.name.clone_from(&vm.name);
        handover.description.upgrades = self.start.upgrades + 1;
        handover.description.cache_pages = vm.size.tiers().cache.0;
        handover.description.local_pages = vm.size.tiers().local.0;
        handover.description.cache_enabled = vm.engine.status().enabled;
        let endpoints = vm.servers.link().map(ServerLink::endpoints).unwrap_or_default();
        handover.description.servers = endpoints.listed.iter().map(ToString::to_string).collect();
        handover.description.local_server = endpoints.local.as_ref().map(ToString::to_string);
        for (server, memory, generation, granted) in vm.servers.link().iter().flat_map(|link| link.mapped_pools()) {
            let memory = handover.pass(memory).map_err(system)?;
            let (server, granted_pages) = (server.to_string(), granted.0);
            handover.description.pools.push(PassedPool { server, memory, generation, granted_pages });
        }
        let options = vm.warmth.options();
        handover.description.options = Some(options.all);
        handover.description.option_sizes = options.sizes;
        let state = vm.warmth.file().map(|file| handover.pass(file));
        handover.description.state = state.transpose().map_err(system)?;
        if let Some(control) = control {
            let (fd, path) = control.listener();
            handover.description.control = Some(handover.pass_socket(fd, path).map_err(system)?);
        }
        if let Some(port) = vm.guests.port().frontend() {
            let (socket, guests) =
                port.pass(&mut |fd| handover.pass(fd)).map_err(|error| format!("the port: {error}"))?;
            (handover.description.port, handover.description.port_guests) = (socket, guests);
        }
        for listener in vm.guests.nbd().iter().flat_map(|nbd| nbd.listeners()) {
            let passed = handover.pass_socket(listener, listener.name()).map_err(system)?;
            handover.description.nbd.push(passed);
        }
        for (at, disk) in vm.guests.disks().iter().enumerate() {
            let goes = offers.as_ref().is_some_and(|offers| !offers.disks.contains_key(&disk.name));
            let mut passed = pass_disk(&mut handover, disk, vm.sizes.shrunk_from(at), goes)?;
            if removed == Some(&disk.name) && !passed.guests.is_empty() {
                tracing::warn!("{}: it is removed from under its guest, which is disconnected", disk.name);
                passed.guests = Guests::default();
            }
            handover.description.disks.push(passed);
        }
        handover.description.trace_untold = vm.in_flight.measured().trace().map_or(0, |trace| trace.untold());
        check_offers(program, offers.as_ref(), &handover.description)?;
        vm.curves.keep(&mut vm.engine);
        vm.engine.close();
        Ok(handover)
    }
}

/// Checks that a program with these `offers` could serve the guests that are attached.
fn check_offers(program: &Path, offers: Option<&Offers>, description: &Description) -> Result<(), String> {
    let program = program.display();
    let checked = match offers {
        Some(offers) => offers.check(description),
        None if !description.has_guests() => Ok(()),
        None => Err("it does not say what it offers to guests, as older versions do not".into()),
    };
    checked.map_err(|error| {
        format!(
            "{program} would disconnect guests: {error}. To go to it nevertheless, restart this process with it: guests \
             connect again then if their hypervisors do"
        )
    })
}

/// Returns whether nothing is in flight, nor on its way to guests or from memory servers. `leave_the_deaf`: does not
/// wait for guests that do not read their answers or complete their requests, nor for servers that owe pages.
fn is_drained(vm: &Vm, leave_the_deaf: bool) -> bool {
    vm.in_flight.is_empty()
        && vm.in_flight.is_fed()
        && vm.guests.disks().iter().all(|disk| disk.store.is_still())
        && vm.guests.is_idle()
        && (leave_the_deaf || !vm.engine.is_owed_pages() && vm.guests.is_quiet())
}

/// Flushes the trace. Returns whether all of it is written. While its thread is in a call that hangs, no other program
/// can take over.
fn is_trace_written(vm: &mut Vm) -> bool {
    vm.in_flight.measured().trace().is_none_or(|trace| {
        trace.flush();
        trace.is_still()
    })
}

/// Passes a disk on. If it `goes`, the new program does not have it, and only closes what it gets of it.
fn pass_disk(handover: &mut Handover, disk: &Disk, had_bytes: Option<u64>, goes: bool) -> Result<PassedDisk, String> {
    let of_disk = |error: &dyn std::fmt::Display| format!("disk {}: {error}", disk.name);
    let (fd, kind) = match disk.store.hand_over() {
        // Its server may be gone. Any descriptor will do in place of the connection.
        Err(_) if goes => (disk.store.event_fd(), StoreKind::File { flush_failed: None }),
        passed => passed.map_err(|error| of_disk(&error))?,
    };
    let store = PassedStore { fd: handover.pass(fd).map_err(|error| of_disk(&error))?, kind };
    let (socket, guests) = disk.frontend.pass(&mut |fd| handover.pass(fd)).map_err(|error| of_disk(&error))?;
    let write_cache_off = !disk.frontend.write_cache();
    let (name, image) = (disk.name.clone(), disk.image.clone());
    Ok(PassedDisk { name, image, socket, store, write_cache_off, had_bytes, guests })
}

fn refuse(client: Option<ControlRequest>, error: &str) {
    tracing::error!("no upgrade: {error}. This program goes on as before.");
    if let Some(client) = client {
        client.answer(Reply::Error { error: format!("no upgrade: {error}; the process goes on as before") });
    }
}
