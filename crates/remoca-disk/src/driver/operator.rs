//! What the operator and the system have to say to the process: control commands, signals, and the service manager.

use super::host::Host;
use super::poller::Source;
use remoca_io::control::ControlServer;
use remoca_io::service::ServiceManager;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
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
}

impl Operator {
    /// Returns the ways to the operator, of which none is watched yet.
    pub(super) fn new(control: Option<ControlServer>, stop: OwnedFd, hangup: OwnedFd, manager: ServiceManager) -> Self {
        Self { control, stop, hangup, stop_at: None, manager }
    }

    /// Has all descriptors reported.
    pub(super) fn register(&self, host: &Host) -> io::Result<()> {
        host.watch(self.stop.as_fd(), Source::Stop)?;
        host.watch(self.hangup.as_fd(), Source::Hangup)?;
        self.control.as_ref().map_or(Ok(()), |control| host.watch(control.wake_fd(), Source::Control))
    }

    /// Begins to stop: nothing new is taken from guests, and `patience` is how long to wait for what is under way.
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

    /// Returns the control socket, if there is one.
    pub(super) fn control(&self) -> Option<&ControlServer> {
        self.control.as_ref()
    }

    /// Returns the service manager.
    pub(super) fn manager(&self) -> &ServiceManager {
        &self.manager
    }

    /// Returns the service manager, to be told how the process is.
    pub(super) fn manager_mut(&mut self) -> &mut ServiceManager {
        &mut self.manager
    }

    /// Takes the signal to hand over to the program's own file.
    pub(super) fn take_hangup(&self) {
        let _ = rustix::io::read(&self.hangup, &mut [0; 128]);
    }
}
