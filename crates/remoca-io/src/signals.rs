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

/// SIGTERM, SIGINT and SIGHUP, held back until it is known what they have to clean up. Those that the process was started to ignore
/// (`nohup`) stay ignored.
pub struct HeldBack(SigSet);

impl HeldBack {
    /// Blocks the signals. Call it before any thread starts.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn take() -> io::Result<Self> {
        let signals = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];
        let signals: SigSet = signals.into_iter().filter(|signal| !is_ignored(*signal)).collect();
        signals.thread_block()?;
        Ok(Self(signals))
    }

    /// Lets the signals end the process, once `cleanup` is done.
    ///
    /// # Errors
    /// If the system has no threads left.
    pub fn clean_up_with(self, cleanup: impl FnOnce() + Send + 'static) -> io::Result<()> {
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            if let Ok(signal) = self.0.wait() {
                cleanup();
                // As a shell shows a process that a signal ended.
                std::process::exit(128 + signal as i32);
            }
        })?;
        Ok(())
    }
}

/// Returns whether the process ignores a signal. One that is blocked could be waited for nevertheless.
fn is_ignored(signal: Signal) -> bool {
    // SAFETY: sigaction is a plain C structure, for which all zero is a valid value.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: without a new action, the call only stores the present one.
    let asked = unsafe { libc::sigaction(signal as libc::c_int, std::ptr::null(), &raw mut now) };
    asked == 0 && now.sa_sigaction == libc::SIG_IGN
}

/// Returns whether the process was started to ignore SIGHUP (`nohup`). [`Signals::hangup`] reports it nevertheless.
#[must_use]
pub fn ignores_hangup() -> bool {
    is_ignored(Signal::SIGHUP)
}

fn descriptor(signals: &[Signal]) -> io::Result<OwnedFd> {
    let mask: SigSet = signals.iter().copied().collect();
    mask.thread_block()?;
    let fd = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    Ok(fd.into())
}
