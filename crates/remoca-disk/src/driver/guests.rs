//! The devices that guests attach to: the disks of the VM, its eviction port, and the server of those that are NBD exports.

use super::disk::{Disk, Port};
use super::eviction_port::EvictionPort;
use super::host::Host;
use super::intake::Intake;
use super::poller::Source;
use remoca_core::units::DiskIndex;
use remoca_frontend::device::{Frontend, GuestRequest};
use remoca_frontend::nbd::{NbdServer, Target};
use remoca_frontend::request::Operation;
use remoca_frontend::vhost::MappedMemory;
use std::io;
use std::time::{Duration, Instant};

/// Time from when guests are told to announce requests until their queues are examined once more. A guest whose writes to memory are
/// not ordered as VIRTIO demands may not announce one at that moment: QEMU leaves barriers out where it emulates a single
/// processor.
pub(super) const SECOND_LOOK: Duration = Duration::from_millis(10);

/// The devices of a VM.
pub(super) struct Guests {
    disks: Vec<Disk>,
    port: EvictionPort,
    nbd: Option<NbdServer>,
    /// Whether a guest queued more requests than one turn handles.
    pop_again: bool,
    /// When guests were last told to announce requests.
    listened_at: Option<Instant>,
    /// When all queues are examined once more, whether their requests are announced or not.
    looks_again_at: Option<Instant>,
    /// Time from the one to the other.
    second_look: Duration,
    /// Whether a disk was modified since this process became the owner of the disks.
    wrote: bool,
}

impl Guests {
    /// Returns the devices of a VM. `nbd` accepts the clients of those that are NBD exports.
    pub(super) fn new(disks: Vec<Disk>, port: Option<Port>, nbd: Option<NbdServer>) -> Self {
        Self {
            disks,
            port: EvictionPort::new(port),
            nbd,
            pop_again: false,
            listened_at: None,
            looks_again_at: None,
            second_look: SECOND_LOOK,
            wrote: false,
        }
    }

    /// Registers all descriptors with the poller, and attaches the NBD clients of a former program.
    pub(super) fn register(&mut self, host: &Host) -> io::Result<()> {
        self.attach_clients(host.instant());
        for (disk, index) in self.disks.iter().zip(0..) {
            host.watch(disk.store.event_fd(), Source::Store(index))?;
            host.watch(disk.frontend.event_fd(), Source::Disk(index))?;
        }
        if let Some(port) = self.port.frontend() {
            host.watch(port.event_fd(), Source::Port)?;
        }
        if let Some(nbd) = &self.nbd {
            host.watch(nbd.event_fd(), Source::Nbd)?;
        }
        Ok(())
    }

    /// Returns all disks.
    pub(super) fn disks(&self) -> &[Disk] {
        &self.disks
    }

    /// Returns mutable references to all disks.
    pub(super) fn disks_mut(&mut self) -> &mut [Disk] {
        &mut self.disks
    }

    /// Returns a mutable reference to one disk.
    pub(super) fn disk_mut(&mut self, disk: usize) -> &mut Disk {
        &mut self.disks[disk]
    }

    /// Returns the eviction port.
    pub(super) fn port(&self) -> &EvictionPort {
        &self.port
    }

    /// Returns a mutable reference to the eviction port.
    pub(super) fn port_mut(&mut self) -> &mut EvictionPort {
        &mut self.port
    }

    /// Returns the server that accepts NBD clients, or `None` if there is none.
    pub(super) fn nbd(&self) -> Option<&NbdServer> {
        self.nbd.as_ref()
    }

    fn frontends(&self) -> impl Iterator<Item = &Frontend> {
        self.disks.iter().map(|disk| &disk.frontend).chain(self.port.frontend())
    }

    fn frontends_mut(&mut self) -> impl Iterator<Item = &mut Frontend> {
        self.disks.iter_mut().map(|disk| &mut disk.frontend).chain(self.port.frontend_mut())
    }

    /// Returns the size of the guest's memory in bytes, as its hypervisor reports it, or 0 if none is reported.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.disks.iter().map(|disk| disk.frontend.guest_memory_bytes()).max().unwrap_or(0)
    }

    /// Returns the memory of this host that the guest's memory takes now, or `None` if it is not known.
    pub(super) fn resident_bytes(&self) -> Option<u64> {
        let largest = self.disks.iter().max_by_key(|disk| disk.frontend.guest_memory_bytes())?;
        largest.frontend.guest_resident_bytes()
    }

    /// Returns the guest's memory as it is mapped for each disk and the port.
    pub(super) fn mapped_memory(&self) -> Vec<MappedMemory> {
        self.frontends().filter_map(Frontend::mapped_memory).collect()
    }

    /// Returns the names of disks to which a guest is attached.
    pub(super) fn attached(&self) -> Vec<&str> {
        let disks = self.disks.iter().filter(|disk| disk.frontend.is_connected());
        disks.map(|disk| disk.name.as_str()).collect()
    }

    /// Returns whether a guest is attached to any disk.
    pub(super) fn is_connected(&self) -> bool {
        self.disks.iter().any(|disk| disk.frontend.is_connected())
    }

    /// Returns whether a guest uses any device. The clients of a port that is an NBD export do not count: a hypervisor connects
    /// to it before its guest runs, and stays connected when that has stopped.
    pub(super) fn is_running(&self) -> bool {
        let port = self.port.frontend().filter(|port| port.nbd_clients().is_none());
        self.disks.iter().map(|disk| &disk.frontend).chain(port).any(Frontend::is_running)
    }

    /// Returns whether no front end can attach again: all came on descriptors that were passed to this process, and
    /// have disconnected.
    pub(super) fn is_abandoned(&self) -> bool {
        self.frontends().all(Frontend::is_finished)
    }

    /// Returns whether every request that was started has been handed out completely, and every answer is on its way.
    pub(super) fn is_quiet(&self) -> bool {
        self.frontends().all(Frontend::is_quiet) && self.nbd.as_ref().is_none_or(NbdServer::is_quiet)
    }

    /// Stops listening to the messages of guests, for a program that takes over. Returns whether none is half done.
    pub(super) fn pause(&self) -> bool {
        // Each of them stops, whatever the others do.
        self.frontends().filter(|frontend| !frontend.pause()).count() == 0
    }

    /// Returns whether no request that was begun can be handed out now.
    pub(super) fn is_idle(&self) -> bool {
        self.frontends().all(Frontend::is_idle)
    }

    /// Accepts NBD clients, or leaves them waiting for the program that takes over.
    pub(super) fn admit_nbd_clients(&mut self, admits: bool) {
        if let Some(nbd) = &mut self.nbd {
            nbd.close(!admits);
        }
    }

    /// Listens to the messages of guests again.
    pub(super) fn end_pause(&self) {
        self.frontends().for_each(Frontend::end_pause);
    }

    /// Returns whether a disk waits until the requests of an earlier process are certain to be over.
    pub(super) fn is_settling(&self) -> bool {
        self.disks.iter().any(|disk| disk.settles_at.is_some())
    }

    /// Attaches NBD clients to the exports that they chose. What they send next is an event of that frontend.
    pub(super) fn attach_clients(&mut self, now: Instant) {
        let Some(nbd) = &mut self.nbd else { return };
        let attached = nbd.handle_events(now).unwrap_or_else(|error| {
            tracing::warn!("NBD clients: {error}");
            Vec::new()
        });
        for client in attached {
            let device = match client.target {
                Target::Disk(disk) => {
                    self.disks.get_mut(usize::from(disk)).map(|disk| (&*disk.name, &mut disk.frontend))
                }
                Target::Port => self.port.frontend_mut().map(|port| ("port", port)),
            };
            let Some((name, frontend)) = device else { continue };
            if frontend.nbd_clients() == Some(0) {
                tracing::info!(
                    "{name}: an NBD client is attached. An upgrade keeps it. When this process is restarted or dies, a client that \
                     does not connect again by itself (QEMU: reconnect-delay) gives its guest I/O errors"
                );
            }
            if let Err(error) = frontend.attach(client) {
                tracing::warn!("an NBD client cannot be attached: {error}");
            }
        }
    }

    /// Handles the events of a disk's frontend. Returns whether its guest connected, disconnected, or changed its
    /// memory. Returns `None` on an error.
    pub(super) fn handle_events(&mut self, disk: u16) -> Option<bool> {
        let Disk { name, frontend, .. } = &mut self.disks[usize::from(disk)];
        let guest = |frontend: &Frontend| (frontend.guest_memory_bytes(), frontend.is_connected());
        let before = guest(frontend);
        if let Err(error) = frontend.handle_events() {
            tracing::warn!("{name}: {error}");
            return None;
        }
        Some(guest(frontend) != before)
    }

    /// Notes which disks have lost their guest. This is looked at once a turn: an NBD client may be found to be gone when its
    /// last words are read, or when it does not take an answer.
    pub(super) fn note_departures(&mut self) {
        for disk in &mut self.disks {
            let is_there = disk.frontend.is_connected();
            disk.has_lost_guest |= disk.had_guest && !is_there;
            disk.had_guest = is_there;
        }
    }

    /// Returns a disk that has lost its guest since this was asked last, or `None` if there is none.
    pub(super) fn take_departure(&mut self) -> Option<&Disk> {
        let disk = self.disks.iter_mut().find(|disk| disk.has_lost_guest)?;
        disk.has_lost_guest = false;
        Some(disk)
    }

    /// Returns whether requests of a disk are accepted. While another process has the disks, answers those commands of
    /// the front end that can be answered without them.
    pub(super) fn admits(&mut self, disk: u16, intake: Intake) -> bool {
        let disk = &mut self.disks[usize::from(disk)];
        match intake {
            Intake::Away { comes } => {
                disk.frontend.stand_aside(comes);
                false
            }
            Intake::Nothing => false,
            Intake::Begun | Intake::All => !disk.is_settling(),
        }
    }

    /// Returns the next request of a disk, or `None` if there is none that `intake` accepts.
    pub(super) fn pop(&mut self, disk: u16, intake: Intake) -> Option<GuestRequest> {
        intake.pop(&mut self.disks[usize::from(disk)].frontend)
    }

    /// Records a modification, if `request` is one. Returns whether `request` may complete only when it is durable.
    pub(super) fn begin(&mut self, disk: u16, request: &GuestRequest) -> bool {
        self.wrote |= !matches!(request.operation(), Operation::Read { .. } | Operation::Flush);
        request.is_durable() || !self.disks[usize::from(disk)].frontend.write_cache_enabled()
    }

    /// Returns a mutable reference to the frontend of a disk.
    pub(super) fn frontend_mut(&mut self, disk: u16) -> &mut Frontend {
        &mut self.disks[usize::from(disk)].frontend
    }

    /// Publishes to guests the requests completed since the last call.
    pub(super) fn notify(&mut self) {
        self.notify_disks();
        if let Some(port) = self.port.frontend_mut() {
            port.notify();
        }
    }

    /// Publishes to guests the requests completed on disks since the last call.
    pub(super) fn notify_disks(&mut self) {
        for disk in &mut self.disks {
            disk.frontend.notify();
        }
    }

    /// Schedules all queues to be examined if they have requests that the guest need not announce. Returns whether they are
    /// scheduled.
    pub(super) fn look(&mut self) -> bool {
        let disks = self.disks.iter().filter(|disk| !disk.is_settling()).map(|disk| &disk.frontend);
        self.pop_again |= disks.chain(self.port.frontend()).any(Frontend::has_requests);
        self.pop_again
    }

    /// Tells guests to announce requests again, before a wait that begins at `now`. Returns whether there are some that were
    /// not announced.
    pub(super) fn listen(&mut self, now: Instant) -> bool {
        let found = self.frontends_mut().filter_map(Frontend::listen).reduce(|one, other| one | other);
        if found.is_some() {
            self.listened_at = Some(now);
            // One that is due already is not put off: it may be due for another guest.
            self.looks_again_at = self.looks_again_at.or_else(|| now.checked_add(self.second_look));
        }
        found == Some(true)
    }

    /// Sets the time until the second look.
    #[cfg(test)]
    pub(super) fn look_again_after(&mut self, time: Duration) {
        self.second_look = time;
    }

    /// Schedules all queues to be examined in the next turn.
    pub(super) fn pop_again(&mut self) {
        self.pop_again = true;
    }

    /// Returns whether all queues are to be examined.
    pub(super) fn pops_again(&self) -> bool {
        self.pop_again
    }

    /// Returns whether all queues are to be examined, and clears that flag.
    pub(super) fn take_pop_again(&mut self) -> bool {
        std::mem::take(&mut self.pop_again)
    }

    /// Returns whether a disk was modified since this process became the owner of the disks.
    pub(super) fn wrote(&self) -> bool {
        self.wrote
    }

    /// Clears the record of whether a disk was modified. Called when this process becomes the owner of the disks.
    pub(super) fn forget_writes(&mut self) {
        self.wrote = false;
    }

    /// Returns when [`Self::run_timers`] or a store's timer has something to do, or `None` if no timer is set.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let stores = self.disks.iter().filter_map(|disk| disk.store.next_deadline());
        let settling = self.disks.iter().filter_map(|disk| disk.settles_at);
        stores
            .chain(settling)
            .chain(self.looks_again_at)
            .chain(self.nbd.as_ref().and_then(NbdServer::next_deadline))
            .min()
    }

    /// Handles the timers of NBD clients that negotiate, starts to accept requests of disks whose wait for an earlier process is
    /// over, and schedules the second look at queues.
    pub(super) fn run_timers(&mut self, now: Instant) {
        if let Some(nbd) = &mut self.nbd
            && nbd.next_deadline().is_some_and(|at| at <= now)
        {
            nbd.handle_timer(now);
        }
        if self.looks_again_at.is_some_and(|at| at <= now) {
            self.pop_again = true;
            let next = self.listened_at.and_then(|at| at.checked_add(self.second_look));
            self.looks_again_at = next.filter(|at| *at > now);
        }
        for disk in self.disks.iter_mut().filter(|disk| disk.settles_at.is_some_and(|at| at <= now)) {
            disk.settles_at = None;
            self.pop_again = true;
        }
    }

    /// Offers a disk with `bytes` bytes to NBD clients that connect from now on.
    pub(super) fn resize_export(&mut self, disk: usize, bytes: u64) {
        if let (Some(nbd), Ok(disk)) = (&mut self.nbd, u16::try_from(disk)) {
            nbd.resize(Target::Disk(disk), bytes);
        }
    }

    /// Returns the number by which the engine knows the disk at a position.
    pub(super) fn number(&self, disk: u16) -> DiskIndex {
        self.disks[usize::from(disk)].number
    }

    /// Returns the disk that the engine knows by `number`.
    ///
    /// # Panics
    /// If no disk has the number.
    pub(super) fn numbered(&self, number: DiskIndex) -> &Disk {
        self.disks.iter().find(|disk| disk.number == number).expect("the engine knows the disks by their numbers")
    }
}
