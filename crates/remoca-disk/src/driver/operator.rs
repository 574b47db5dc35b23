//! The process's channels to the operator and the system: control commands, signals, and the service manager.

use super::host::Host;
use super::poller::Source;
use remoca_io::control::ControlServer;
use remoca_io::service::ServiceManager;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// The channels to the operator and the system.
pub(super) struct Operator {
    control: Option<ControlServer>,
    /// Descriptor that becomes readable when the process is to end.
    stop: OwnedFd,
    /// Descriptor that becomes readable when the program's own file is to take over (SIGHUP).
    hangup: OwnedFd,
    /// When the process ends at the latest; `None` if it was not asked to stop.
    stop_at: Option<Instant>,
    manager: ServiceManager,
}

impl Operator {
    /// Returns the channels, none of which is registered with the poller yet.
    pub(super) fn new(control: Option<ControlServer>, stop: OwnedFd, hangup: OwnedFd, manager: ServiceManager) -> Self {
        Self { control, stop, hangup, stop_at: None, manager }
    }

    /// Registers all descriptors with the poller.
    pub(super) fn register(&self, host: &Host) -> io::Result<()> {
        host.watch(self.stop.as_fd(), Source::Stop)?;
        host.watch(self.hangup.as_fd(), Source::Hangup)?;
        self.control.as_ref().map_or(Ok(()), |control| host.watch(control.wake_fd(), Source::Control))
    }

    /// Starts to stop. No new requests are accepted from guests, and those in flight have `patience` to finish.
    pub(super) fn begin_stop(&mut self, host: &Host, patience: Duration) {
        host.unwatch(self.stop.as_fd());
        self.stop_at = Some(host.instant() + patience);
    }

    /// Sets how long the process may still continue.
    pub(super) fn stop_within(&mut self, host: &Host, patience: Duration) {
        self.stop_at = Some(host.instant() + patience);
    }

    /// Returns when the process ends at the latest, or `None` if it was not asked to stop.
    pub(super) fn stop_at(&self) -> Option<Instant> {
        self.stop_at
    }

    /// Returns the control socket, or `None` if there is none.
    pub(super) fn control(&self) -> Option<&ControlServer> {
        self.control.as_ref()
    }

    /// Returns the service manager.
    pub(super) fn manager(&self) -> &ServiceManager {
        &self.manager
    }

    /// Returns the service manager, to which the state of the process is reported.
    pub(super) fn manager_mut(&mut self) -> &mut ServiceManager {
        &mut self.manager
    }

    /// Consumes the signals that ask for a hand-over to the program's own file.
    pub(super) fn take_hangup(&self) {
        let _ = rustix::io::read(&self.hangup, &mut [0; 128]);
    }
}
