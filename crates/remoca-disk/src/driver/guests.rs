//! What guests attach to: the disks of the VM, its eviction port, and the server of those that are NBD exports.

use super::disk::{Disk, Port};
use super::eviction_port::EvictionPort;
use super::host::Host;
use super::intake::Intake;
use super::poller::Source;
use remoca_core::units::PAGE_SIZE_U64;
use remoca_frontend::device::{Frontend, GuestRequest};
use remoca_frontend::nbd::{NbdServer, Target};
use remoca_frontend::request::Operation;
use std::io;
use std::time::Instant;

/// The devices of a VM.
pub(super) struct Guests {
    disks: Vec<Disk>,
    port: EvictionPort,
    nbd: Option<NbdServer>,
    /// A guest queued more than one turn takes.
    pop_again: bool,
    /// A disk was modified since the disks became ours.
    wrote: bool,
}

impl Guests {
    /// Returns these devices. `nbd` brings the clients of those that are NBD exports.
    pub(super) fn new(disks: Vec<Disk>, port: Option<Port>, nbd: Option<NbdServer>) -> Self {
        Self { disks, port: EvictionPort::new(port), nbd, pop_again: false, wrote: false }
    }

    /// Has all descriptors reported.
    pub(super) fn register(&self, host: &Host) -> io::Result<()> {
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

    /// Returns all disks, to be changed.
    pub(super) fn disks_mut(&mut self) -> &mut [Disk] {
        &mut self.disks
    }

    /// Returns one disk.
    pub(super) fn disk_mut(&mut self, disk: usize) -> &mut Disk {
        &mut self.disks[disk]
    }

    /// Returns the eviction port.
    pub(super) fn port(&self) -> &EvictionPort {
        &self.port
    }

    /// Returns the eviction port, to be changed.
    pub(super) fn port_mut(&mut self) -> &mut EvictionPort {
        &mut self.port
    }

    /// Returns the server that brings NBD clients.
    pub(super) fn nbd(&self) -> Option<&NbdServer> {
        self.nbd.as_ref()
    }

    fn frontends(&self) -> impl Iterator<Item = &Frontend> {
        self.disks.iter().map(|disk| &disk.frontend).chain(self.port.frontend())
    }

    /// Returns the guest's memory as its hypervisor says it.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.disks.iter().map(|disk| disk.frontend.guest_memory_bytes()).max().unwrap_or(0)
    }

    /// Returns whether a guest is attached to a disk.
    pub(super) fn is_connected(&self) -> bool {
        self.disks.iter().any(|disk| disk.frontend.is_connected())
    }

    /// Returns whether a guest works with any device.
    pub(super) fn is_running(&self) -> bool {
        self.frontends().any(Frontend::is_running)
    }

    /// Returns whether no front end can come back: all came on descriptors that were passed to us, and are gone.
    pub(super) fn is_abandoned(&self) -> bool {
        self.frontends().all(Frontend::is_finished)
    }

    /// Returns whether every request that was begun is handed out, and every answer is on its way.
    pub(super) fn is_quiet(&self) -> bool {
        self.frontends().all(Frontend::is_quiet)
    }

    /// Returns whether a disk waits for requests of an earlier process to be over.
    pub(super) fn is_settling(&self) -> bool {
        self.disks.iter().any(|disk| disk.settles_at.is_some())
    }

    /// Attaches clients to the exports that they chose; what they say next is that frontend's event.
    pub(super) fn attach_clients(&mut self, now: Instant) {
        let Some(nbd) = &mut self.nbd else { return };
        let attached = nbd.handle_events(now).unwrap_or_else(|error| {
            tracing::warn!("NBD clients: {error}");
            Vec::new()
        });
        for client in attached {
            let frontend = match client.target {
                Target::Disk(disk) => self.disks.get_mut(usize::from(disk)).map(|disk| &mut disk.frontend),
                Target::Port => self.port.frontend_mut(),
            };
            if let Some(Err(error)) = frontend.map(|frontend| frontend.attach(client)) {
                tracing::warn!("an NBD client cannot be attached: {error}");
            }
        }
    }

    /// Takes a disk's events. Returns whether its guest came, went or changed its memory; `None` on an error.
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

    /// Returns whether requests of a disk are taken; if the disks are elsewhere, answers what can be answered.
    pub(super) fn admits(&mut self, disk: u16, intake: Intake) -> bool {
        let Disk { settles_at, frontend, .. } = &mut self.disks[usize::from(disk)];
        match intake {
            Intake::Away { comes } => {
                frontend.stand_aside(comes);
                false
            }
            Intake::Nothing => false,
            Intake::Begun | Intake::All => {
                let settles = settles_at.is_some() && frontend.may_repeat();
                !settles
            }
        }
    }

    /// Returns the next request of a disk.
    pub(super) fn pop(&mut self, disk: u16, intake: Intake) -> Option<GuestRequest> {
        intake.pop(&mut self.disks[usize::from(disk)].frontend)
    }

    /// Notes that a request begins. Returns whether it is only complete when it is durable.
    pub(super) fn begin(&mut self, disk: u16, request: &GuestRequest) -> bool {
        self.wrote |= !matches!(request.operation(), Operation::Read { .. } | Operation::Flush);
        request.is_durable() || !self.disks[usize::from(disk)].frontend.write_cache_enabled()
    }

    /// Returns what the guest of a disk attaches to.
    pub(super) fn frontend_mut(&mut self, disk: u16) -> &mut Frontend {
        &mut self.disks[usize::from(disk)].frontend
    }

    /// Tells guests what was completed.
    pub(super) fn notify(&mut self) {
        self.notify_disks();
        if let Some(port) = self.port.frontend_mut() {
            port.notify();
        }
    }

    /// Tells guests what was completed on disks.
    pub(super) fn notify_disks(&mut self) {
        for disk in &mut self.disks {
            disk.frontend.notify();
        }
    }

    /// Has all queues looked at in the next turn.
    pub(super) fn pop_again(&mut self) {
        self.pop_again = true;
    }

    /// Returns whether all queues are to be looked at.
    pub(super) fn pops_again(&self) -> bool {
        self.pop_again
    }

    /// Returns whether all queues are to be looked at, once.
    pub(super) fn take_pop_again(&mut self) -> bool {
        std::mem::take(&mut self.pop_again)
    }

    /// Returns whether a disk was modified since the disks became ours.
    pub(super) fn wrote(&self) -> bool {
        self.wrote
    }

    /// Notes that the disks became ours.
    pub(super) fn forget_writes(&mut self) {
        self.wrote = false;
    }

    /// Returns when [`Self::run_timers`], or a store's timer, has something to do.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let stores = self.disks.iter().filter_map(|disk| disk.store.next_deadline());
        let settling = self.disks.iter().filter_map(|disk| disk.settles_at);
        stores.chain(settling).chain(self.nbd.as_ref().and_then(NbdServer::next_deadline)).min()
    }

    /// Does what is due for clients that negotiate, and takes requests of disks that had to wait for it.
    pub(super) fn run_timers(&mut self, now: Instant) {
        if let Some(nbd) = &mut self.nbd
            && nbd.next_deadline().is_some_and(|at| at <= now)
        {
            nbd.handle_timer(now);
        }
        for disk in self.disks.iter_mut().filter(|disk| disk.settles_at.is_some_and(|at| at <= now)) {
            disk.settles_at = None;
            self.pop_again = true;
        }
    }

    /// Returns the sizes of the disks in blocks, each with whether all of it is a swap area.
    pub(super) fn sizes(&self) -> impl Iterator<Item = (u64, bool)> {
        self.disks.iter().map(|disk| (disk.store.geometry().size / PAGE_SIZE_U64, disk.swap))
    }

    /// Ends all stores. Returns the images whose store has not got all answers.
    pub(super) fn drain(&mut self) -> Vec<&str> {
        let unsettled = self.disks.iter_mut().filter_map(|disk| (!disk.store.drain()).then_some(&*disk.image));
        unsettled.collect()
    }
}
