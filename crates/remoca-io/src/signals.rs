//! Signals as descriptors. The signals are blocked in every thread. A signal that arrives while another program takes
//! the place of this one stays pending for that program.

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::io;
use std::os::fd::OwnedFd;

/// Descriptors that report signals to the process.
pub struct Signals {
    /// Readable after SIGTERM or SIGINT.
    pub stop: OwnedFd,
    /// Readable after SIGHUP.
    pub hangup: OwnedFd,
}

impl Signals {
    /// Blocks the signals that this process handles, and returns descriptors for them. Call it before any thread
    /// starts: a thread inherits the mask.
    ///
    /// # Errors
    /// If the system has no descriptors left.
    pub fn take() -> io::Result<Self> {
        Ok(Self { stop: descriptor(&[Signal::SIGTERM, Signal::SIGINT])?, hangup: descriptor(&[Signal::SIGHUP])? })
    }
}

fn descriptor(signals: &[Signal]) -> io::Result<OwnedFd> {
    let mask: SigSet = signals.iter().copied().collect();
    mask.thread_block()?;
    let fd = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    Ok(fd.into())
}
