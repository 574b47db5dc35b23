//! Resources of the host: free memory, control group limits, the limit on locked memory.
//!
//! Called once, before the arena is mapped. Locking more memory than is available would get other programs killed.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::Limits;

/// Maximum number of descriptors for one client: those of a mapped pool.
const DESCRIPTORS_OF_CLIENT: usize = 4;
/// Descriptors of the server itself: sockets, event loops, memory.
const OWN_DESCRIPTORS: usize = 64;

/// Returns the number of bytes that new programs could use without swapping (`MemAvailable`), or `None` if it is
/// unknown.
pub(crate) fn available_bytes() -> Option<u64> {
    meminfo_kib("MemAvailable:").map(|kib| kib * 1024)
}

/// Returns the size of the free 2 MiB huge pages that the operator has set aside, in bytes.
pub(crate) fn free_huge_page_bytes() -> u64 {
    let path = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0) << 21
}

fn meminfo_kib(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// Returns the lowest memory limit among this process's control groups in bytes, and the file that sets it. Returns
/// `None` if there is no limit.
pub(crate) fn group_limit() -> Option<(u64, PathBuf)> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    groups.lines().filter_map(limit_of_group).min()
}

/// Returns the lowest limit among the group in a line of `/proc/self/cgroup` and its ancestors, or `None` if there is
/// none.
fn limit_of_group(line: &str) -> Option<(u64, PathBuf)> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, group) = rest.split_once(':')?;
    let (mount, file) = match controllers {
        "" => (Path::new("/sys/fs/cgroup"), "memory.max"),
        v1 if v1.split(',').any(|name| name == "memory") => {
            (Path::new("/sys/fs/cgroup/memory"), "memory.limit_in_bytes")
        }
        _ => return None,
    };
    let folder = mount.join(group.trim_start_matches('/'));
    let on_the_way = folder.ancestors().take_while(|ancestor| ancestor.starts_with(mount));
    on_the_way
        .map(|ancestor| ancestor.join(file))
        .filter_map(|path| Some((fs::read_to_string(&path).ok()?.trim().parse().ok()?, path)))
        .min()
}

/// Raises the soft limit on locked memory to the hard one, and returns it. `None` means no limit.
pub(crate) fn raised_lock_limit() -> Option<u64> {
    let limit = getrlimit(Resource::Memlock);
    // Raising a soft limit takes nothing from other processes. If it cannot be raised, the old one is reported.
    match setrlimit(Resource::Memlock, Rlimit { current: limit.maximum, maximum: limit.maximum }) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    }
}

/// Raises the soft limit on descriptors to the hard one. Warns if that is too small for all clients: those beyond it would get no
/// answer.
pub(crate) fn raise_descriptor_limit(limits: &Limits) {
    let limit = getrlimit(Resource::Nofile);
    let is_raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).is_ok();
    let possible = if is_raised { limit.maximum } else { limit.current };
    if let Some(warning) = too_few_descriptors(possible, limits) {
        tracing::warn!("{warning}");
    }
}

/// Returns what to tell the operator of a limit on descriptors that is too small for all clients. Returns `None` if it is not.
fn too_few_descriptors(possible: Option<u64>, limits: &Limits) -> Option<String> {
    let needed = (limits.sessions * DESCRIPTORS_OF_CLIENT + limits.handshakes + OWN_DESCRIPTORS) as u64;
    let possible = possible.filter(|possible| *possible < needed)?;
    Some(format!(
        "this process may have {possible} open files, and {} clients (--max-clients) can need {needed}: some may get no answer. \
         Raise the limit (LimitNOFILE= in a systemd unit, `ulimit -Hn` in a shell), or choose a smaller --max-clients",
        limits.sessions
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_has_memory() {
        assert!(available_bytes().expect("Linux has MemAvailable") > 1 << 20);
        assert!(meminfo_kib("MemTotal:") >= meminfo_kib("MemAvailable:"));
        assert_eq!(meminfo_kib("NoSuchLine:"), None);
    }

    #[test]
    fn a_limit_on_open_files_that_is_too_small_is_told_of() {
        let limits = Limits { sessions: 10, handshakes: 16, ..Limits::default() };
        let told = |possible| too_few_descriptors(possible, &limits);
        assert!(told(Some(119)).is_some_and(|text| text.contains("may have 119 open files, and 10 clients")));
        assert_eq!((told(Some(120)), told(None)), (None, None));
    }

    #[test]
    fn lines_that_name_no_memory_group_have_no_limit() {
        assert_eq!(limit_of_group("3:cpu,cpuacct:/x"), None);
        assert_eq!(limit_of_group("garbage"), None);
        assert_eq!(limit_of_group(""), None);
    }
}
