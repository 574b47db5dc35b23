//! The agent's requests to the kernel for itself: permission to run, locked memory, and signals as a descriptor.
//!
//! The agent is needed most when the guest has no memory left. So it must not be paged out, must not be the victim of the
//! out-of-memory killer, and must not wait for reclaim that waits for disks.

use std::fs;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use rustix::mm::{Advice, MlockAllFlags};
use rustix::thread::CapabilitySet;

use crate::error::AgentError;

const BTF: &str = "/sys/kernel/btf/vmlinux";
const NICE: i32 = -10;
/// Holds `0` while no program that is attached to kernel functions is called.
const TRACING_SWITCH: &str = "/proc/sys/kernel/ftrace_enabled";
/// Why nothing is captured then, and what to do.
pub const TRACING_OFF: &str = "the tracing of kernel functions is switched off. `sysctl kernel.ftrace_enabled=1` switches it on; look in \
     /etc/sysctl.d for what sets it to 0";

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

/// Returns whether the tracing of kernel functions is switched off. The program may attach then, and is not called.
pub fn is_tracing_off() -> bool {
    let mut text = [0; 2];
    let read = fs::File::open(TRACING_SWITCH).and_then(|mut file| file.read(&mut text));
    read.is_ok_and(|length| text[..length].first() == Some(&b'0'))
}

fn missing_capabilities(held: CapabilitySet) -> Vec<&'static str> {
    // This capability included these two before they were split off.
    if held.contains(CapabilitySet::SYS_ADMIN) {
        return Vec::new();
    }
    let needed = [(CapabilitySet::BPF, "CAP_BPF"), (CapabilitySet::PERFMON, "CAP_PERFMON")];
    needed.iter().filter(|(capability, _)| !held.contains(*capability)).map(|(_, name)| *name).collect()
}

/// Returns the process ID of another agent that has `device` open, or `None` if none is seen.
pub fn agent_that_uses(device: &Path) -> Option<u32> {
    let device = device.canonicalize().ok()?;
    let own = std::process::id();
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut others = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(|pid| *pid != own);
    others.find(|pid: &u32| is_agent(*pid) && has_open(*pid, &device))
}

fn is_agent(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "remoca-agent")
}

fn has_open(pid: u32, path: &Path) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files.filter_map(|file| fs::read_link(file.path()).ok()).any(|open| open == path)
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

/// Locks the memory of the agent: what it has, and of its program each page from its first use on. First gives back what only
/// the start needed, most of the program among it.
pub fn lock_memory() -> Result<(), AgentError> {
    // SAFETY: malloc_trim takes no pointer and may be called at any time.
    unsafe { libc::malloc_trim(0) };
    for (address, length) in unmodified_mappings(&fs::read_to_string("/proc/self/smaps").unwrap_or_default()) {
        // SAFETY: no page of these mappings was modified or can be, so the kernel reads from the file what is used again.
        unsafe { rustix::mm::madvise(address as *mut _, length, Advice::LinuxDontNeed) }.ok();
    }
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    rustix::mm::mlockall(flags).map_err(|error| AgentError::MemoryNotLocked(error.into()))
}

/// Returns address and length of each mapping of a file in `smaps` that cannot be written and holds only what the file holds.
fn unmodified_mappings(smaps: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut file = None;
    for line in smaps.lines() {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        match words[..] {
            ["Anonymous:", "0", "kB"] => found.extend(file),
            [name, ..] if name.ends_with(':') => {}
            [range, permissions, _, _, _, path, ..] => file = file_mapping(range, permissions, path),
            _ => file = None,
        }
    }
    found
}

fn file_mapping(range: &str, permissions: &str, path: &str) -> Option<(usize, usize)> {
    let (begin, end) = range.split_once('-')?;
    let (begin, end) = (usize::from_str_radix(begin, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    let is_wanted = path.starts_with('/') && !permissions.contains('w');
    is_wanted.then_some((begin, end.checked_sub(begin)?))
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
    fn only_unmodified_parts_of_files_are_given_back() {
        let smaps = "55d0-55d8 r--p 00000000 fd:00 42 /usr/sbin/remoca-agent\nSize: 4 kB\nAnonymous:             0 kB\n\
                     55d8-55e0 r-xp 00001000 fd:00 42 /usr/sbin/remoca-agent\nRss: 4 kB\nAnonymous:             0 kB\n\
                     55e0-55f0 r--p 00002000 fd:00 42 /usr/sbin/remoca-agent\nAnonymous:             8 kB\n\
                     55f0-5600 rw-p 00000000 00:00 0\nAnonymous:             0 kB\nVmFlags: rd mr mw me\n\
                     5600-5610 rw-p 00003000 fd:00 42 /usr/sbin/remoca-agent\nAnonymous:             0 kB\n\
                     7000-7100 r--s 00000000 00:0c 12 anon_inode:bpf-map\nAnonymous:             0 kB\n\
                     7100-7200 rw-p 00000000 00:00 0\nAnonymous:             0 kB\nVmFlags: rd wr mr mw me\n\
                     7200-7300 r-xp 00000000 00:00 0 [vdso]\nAnonymous:             0 kB\n";
        assert_eq!(unmodified_mappings(smaps), [(0x55d0, 8), (0x55d8, 8)]);
    }

    #[test]
    fn hidden_addresses_are_told_from_small_ones() {
        assert!(addresses_are_hidden("0000000000000000 A fixed_percpu_data\n0000000000000000 A cpu_debug_store\n"));
        assert!(!addresses_are_hidden("0000000000000000 A fixed_percpu_data\n0000000000001000 A cpu_debug_store\n"));
        assert!(addresses_are_hidden(""));
    }
}
