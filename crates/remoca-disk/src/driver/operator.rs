//! What the operator and the system have to say to the process: control commands, signals, upgrades and the service manager.

use super::host::Host;
use super::poller::Source;
use super::upgrade::Upgrades;
use super::vm::Vm;
use crate::control::{ControlServer, Request};
use crate::handover::Handover;
use crate::service::ServiceManager;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The ways to the operator.
pub(super) struct Operator {
    control: Option<ControlServer>,
    /// Becomes readable when the process is to end.
    stop: OwnedFd,
    /// Gives eight bytes for each time that the program's own file is to take over.
    hangup: OwnedFd,
    /// Asked to stop; at the latest then.
    stop_at: Option<Instant>,
    manager: ServiceManager,
    upgrades: Upgrades,
}

impl Operator {
    /// Returns the part for these descriptors.
    pub(super) fn new(
        control: Option<ControlServer>,
        stop: OwnedFd,
        hangup: OwnedFd,
        manager: ServiceManager,
        upgrades: Upgrades,
    ) -> Self {
        Self { control, stop, hangup, stop_at: None, manager, upgrades }
    }

    /// Has all descriptors reported.
    ///
    /// # Errors
    /// If the system refuses.
    pub(super) fn register(&self, host: &Host) -> io::Result<()> {
        host.watch(self.stop.as_fd(), Source::Stop)?;
        host.watch(self.hangup.as_fd(), Source::Hangup)?;
        self.control.as_ref().map_or(Ok(()), |control| host.watch(control.wake_fd(), Source::Control))
    }

    /// Begins to stop: takes nothing new from guests, and waits so long for what is under way.
    pub(super) fn begin_stop(&mut self, host: &Host, patience: Duration) {
        host.unwatch(self.stop.as_fd());
        self.stop_at = Some(host.instant() + patience);
    }

    /// Sets how long the process may still go on.
    pub(super) fn stop_within(&mut self, host: &Host, patience: Duration) {
        self.stop_at = Some(host.instant() + patience);
    }

    /// Returns when the process ends at the latest, if it is to end.
    pub(super) fn stop_at(&self) -> Option<Instant> {
        self.stop_at
    }

    /// Returns whether nothing new is taken from guests.
    pub(super) fn is_draining(&self) -> bool {
        self.stop_at.is_some() || self.upgrades.is_draining()
    }

    /// Returns the next command.
    pub(super) fn next_request(&self) -> Option<Request> {
        self.control.as_ref().and_then(ControlServer::next_request)
    }

    /// Returns the service manager.
    pub(super) fn manager(&mut self) -> &mut ServiceManager {
        &mut self.manager
    }

    /// Returns when something is to be done, whatever happens.
    pub(super) fn next_deadline(&self, host: &Host) -> Option<Instant> {
        let end = self.stop_at.or_else(|| self.upgrades.next_deadline(host));
        self.manager.next_deadline().into_iter().chain(end).min()
    }

    /// Takes the signal to hand over to the program's own file.
    pub(super) fn take_hangup(&mut self, vm: &Vm, is_idle: bool) {
        let _ = rustix::io::read(&self.hangup, &mut [0; 128]);
        self.begin_upgrade(None, None, vm, is_idle);
    }

    /// Asks `program`, or the file of this one as it is now, whether it can take over. `is_idle`: no other process is
    /// concerned with the disks.
    pub(super) fn begin_upgrade(&mut self, program: Option<PathBuf>, client: Option<Request>, vm: &Vm, is_idle: bool) {
        self.upgrades.begin(program, client, vm, is_idle);
    }

    /// Handles the answer of the new program.
    pub(super) fn hear_program(&mut self, vm: &mut Vm, is_idle: bool) {
        self.upgrades.hear_program(vm, self.control.as_ref(), is_idle);
    }

    /// Returns what another program needs to go on, if nothing is in flight that it would have to wait for. Gives up if that
    /// takes too long.
    pub(super) fn advance_upgrade(&mut self, vm: &mut Vm, is_idle: bool) -> Option<Handover> {
        self.upgrades.advance(vm, self.control.as_ref(), is_idle)
    }

    /// Refuses the upgrade: this program continues.
    pub(super) fn refuse_upgrade(&mut self, error: &str, vm: &mut Vm) {
        self.upgrades.refuse(error, vm, self.control.as_ref());
    }
}
