//! The agent's requests to the kernel for itself: permission to run, locked memory, and signals as a descriptor.
//!
//! The agent is needed most when the guest has no memory left. So it must not be paged out, must not be the victim of the
//! out-of-memory killer, and must not wait for reclaim that waits for disks.

use std::fs;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use rustix::mm::MlockAllFlags;
use rustix::thread::CapabilitySet;

use crate::error::AgentError;

const BTF: &str = "/sys/kernel/btf/vmlinux";
const NICE: i32 = -10;

pub fn check_btf() -> Result<(), AgentError> {
    if Path::new(BTF).exists() { Ok(()) } else { Err(AgentError::NoBtf(BTF.into())) }
}

pub fn check_capabilities() -> Result<(), AgentError> {
    let capabilities = rustix::thread::capabilities(None);
    let capabilities = capabilities.map_err(|error| AgentError::io("cannot read the capabilities")(error.into()))?;
    let missing = missing_capabilities(capabilities.effective);
    if missing.is_empty() {
        return Ok(());
    }
    Err(AgentError::NotPermitted(format!("the agent lacks {}", missing.join(" and "))))
}

fn missing_capabilities(held: CapabilitySet) -> Vec<&'static str> {
    // This capability included these two before they were split off.
    if held.contains(CapabilitySet::SYS_ADMIN) {
        return Vec::new();
    }
    let needed = [(CapabilitySet::BPF, "CAP_BPF"), (CapabilitySet::PERFMON, "CAP_PERFMON")];
    needed.iter().filter(|(capability, _)| !held.contains(*capability)).map(|(_, name)| *name).collect()
}

/// Checks that this process may read kernel addresses, because the eBPF program needs those of two kernel variables.
pub fn check_kernel_symbols() -> Result<(), AgentError> {
    let mut text = vec![0; 4096];
    let mut file = fs::File::open("/proc/kallsyms").map_err(AgentError::io("/proc/kallsyms"))?;
    let length = file.read(&mut text).map_err(AgentError::io("/proc/kallsyms"))?;
    if addresses_are_hidden(&String::from_utf8_lossy(&text[..length])) {
        let reason = "/proc/kallsyms hides all addresses (kernel.kptr_restrict is 2, or CAP_SYSLOG is missing)";
        return Err(AgentError::NotPermitted(reason.to_owned()));
    }
    Ok(())
}

fn addresses_are_hidden(kallsyms: &str) -> bool {
    kallsyms.lines().all(|line| line.split(' ').next().is_none_or(|address| address.bytes().all(|digit| digit == b'0')))
}

/// Locks all present and future memory of the agent. Frees memory left over from loading first.
pub fn lock_memory() -> Result<(), AgentError> {
    // SAFETY: malloc_trim takes no pointer and may be called at any time.
    unsafe { libc::malloc_trim(0) };
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE;
    rustix::mm::mlockall(flags).map_err(|error| AgentError::MemoryNotLocked(error.into()))
}

/// Applies the optional protections. Returns a message for each refused one that says what is at stake.
pub fn prepare_for_memory_pressure() -> Vec<String> {
    let steps: [(&str, io::Result<()>); 3] = [
        ("out-of-memory killer may choose the agent", fs::write("/proc/self/oom_score_adj", "-1000")),
        ("agent may wait for other disks", rustix::process::configure_io_flusher_behavior(true).map_err(Into::into)),
        (
            "agent may lose pages while CPUs are busy",
            rustix::process::setpriority_process(None, NICE).map_err(Into::into),
        ),
    ];
    let refused = steps.into_iter().filter_map(|(stake, result)| result.err().map(|error| (stake, error)));
    refused.map(|(stake, error)| format!("the {stake}: {error}")).collect()
}

/// SIGTERM and SIGINT, blocked and readable from a descriptor instead.
pub struct StopSignals(OwnedFd);

impl StopSignals {
    pub fn block() -> io::Result<StopSignals> {
        let mut signals = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the set before the other calls read it; all of them only touch the set.
        let fd = unsafe {
            libc::sigemptyset(signals.as_mut_ptr());
            libc::sigaddset(signals.as_mut_ptr(), libc::SIGTERM);
            libc::sigaddset(signals.as_mut_ptr(), libc::SIGINT);
            if libc::sigprocmask(libc::SIG_BLOCK, signals.as_ptr(), std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
            libc::signalfd(-1, signals.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: signalfd has just made this descriptor, and nobody else has it.
        Ok(StopSignals(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Returns whether a signal has arrived, and consumes it.
    pub fn arrived(&self) -> bool {
        let mut signal = [0; size_of::<libc::signalfd_siginfo>()];
        matches!(rustix::io::read(&self.0, &mut signal), Ok(length) if length > 0)
    }
}

/// Returns a number that distinguishes this start of the agent from any other.
pub fn start_cookie() -> u64 {
    let mut bytes = [0; 8];
    match fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)) {
        Ok(()) => u64::from_ne_bytes(bytes),
        Err(_) => u64::from(std::process::id()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_that_are_missing_are_named() {
        assert_eq!(missing_capabilities(CapabilitySet::empty()), ["CAP_BPF", "CAP_PERFMON"]);
        assert_eq!(missing_capabilities(CapabilitySet::BPF), ["CAP_PERFMON"]);
        assert!(missing_capabilities(CapabilitySet::BPF | CapabilitySet::PERFMON).is_empty());
        assert!(missing_capabilities(CapabilitySet::SYS_ADMIN).is_empty());
    }

    #[test]
    fn hidden_addresses_are_told_from_small_ones() {
        assert!(addresses_are_hidden("0000000000000000 A fixed_percpu_data\n0000000000000000 A cpu_debug_store\n"));
        assert!(!addresses_are_hidden("0000000000000000 A fixed_percpu_data\n0000000000001000 A cpu_debug_store\n"));
        assert!(addresses_are_hidden(""));
    }
}
