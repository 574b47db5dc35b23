//! Limits of the process, and room for its state file.

use crate::size::show_size;
use crate::vm::Vm;
use remoca_protocol::control::Status;
use remoca_view::finding::Finding;

/// Open files that a disk of a guest with many processors, and some clients, need.
const FILES: u64 = 4096;
const PAGE: u64 = 4096;
/// Bytes of the state file for each page of cache and of guest memory (docs/operate.md).
const STATE_BYTES: (u64, u64) = (38, 30);

pub(super) fn check(vm: &Vm) -> Vec<Finding> {
    let mut findings = vm.running.as_ref().map(of_process).unwrap_or_default();
    findings.extend(room(vm));
    findings
}

fn of_process(status: &Status) -> Vec<Finding> {
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", status.pid)).unwrap_or_default();
    let index = status.memory.index_bytes;
    let mut findings = Vec::new();
    if let Some(locked) = soft_limit(&limits, "Max locked memory") {
        let shown = if locked == u64::MAX { "unlimited".to_owned() } else { show_size(locked) };
        // With CAP_IPC_LOCK the limit does not count.
        let memory = std::fs::read_to_string(format!("/proc/{}/status", status.pid)).unwrap_or_default();
        let is_locked = kilobytes(&memory, "VmLck:").is_some_and(|locked| locked >= index);
        findings.push(if locked >= index {
            Finding::ok("locked memory", format!("{shown}, and the index has {}", show_size(index)))
        } else if is_locked {
            Finding::ok("locked memory", format!("the index is locked, {}", show_size(index)))
        } else {
            let found = format!("{shown}, less than the index with {}", show_size(index));
            Finding::warning(
                "locked memory",
                found,
                "It may be swapped out. Set LimitMEMLOCK=infinity, or `ulimit -l unlimited`",
            )
        });
    }
    if let Some(files) = soft_limit(&limits, "Max open files") {
        findings.push(if files >= FILES {
            Finding::ok("open files", format!("{files}"))
        } else {
            let advice =
                format!("A guest with many processors needs more. Set LimitNOFILE= or `ulimit -n` to {FILES} or more");
            Finding::warning("open files", format!("{files}"), advice)
        });
    }
    findings
}

/// Returns the first number behind a name in the kernel's table of limits.
fn soft_limit(limits: &str, name: &str) -> Option<u64> {
    let value = limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?;
    if value == "unlimited" { Some(u64::MAX) } else { value.parse().ok() }
}

/// Returns the bytes behind a name in the kernel's status of a process, which has them in kB.
fn kilobytes(status: &str, name: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Checks that the state file can grow as far as the largest guest and the cache may make it.
fn room(vm: &Vm) -> Option<Finding> {
    let path = vm.options.state.as_ref()?;
    let folder = path.ancestors().skip(1).find(|folder| folder.exists())?;
    let (cache, local) = vm.running.as_ref().map_or((vm.options.cache, vm.options.local), |status| {
        (status.cache.wanted_bytes, status.cache.local_wanted_bytes)
    });
    let (per_cached, per_resident) = STATE_BYTES;
    let cached = (cache.saturating_add(local) / PAGE).saturating_mul(per_cached);
    let needed = cached.saturating_add((vm.options.guest_memory_max / PAGE).saturating_mul(per_resident));
    let taken = path.metadata().map_or(0, |metadata| metadata.len());
    let system = rustix::fs::statvfs(folder).ok()?;
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    let found =
        format!("{}: {} free, the state file takes up to {}", folder.display(), show_size(free), show_size(needed));
    Some(if free.saturating_add(taken) >= needed {
        Finding::ok("room", found)
    } else {
        let advice = "Without room the cache starts cold after a restart. Lower --cache, --local or --guest-memory-max, or enlarge that file system";
        Finding::warning("room", found, advice)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_core::index::Layout;
    use remoca_core::units::PageCount;

    /// What is said of the room is what the index takes, or a few percent more.
    #[test]
    fn the_state_file_takes_as_much_as_its_index() {
        const MANY: u32 = 1 << 24;
        let (per_cached, per_resident) = STATE_BYTES;
        for (cached, resident) in [(MANY, 0), (0, MANY), (MANY, MANY)] {
            let words = Layout::new(PageCount(cached), PageCount(resident), 1).words();
            let taken = 4 * u64::try_from(words).unwrap();
            let said = u64::from(cached) * per_cached + u64::from(resident) * per_resident;
            assert!(taken <= said && said * 20 < taken * 21, "{cached} and {resident}: {taken}, said {said}");
        }
    }

    #[test]
    fn limits_are_read_from_the_kernels_table() {
        let table = "Limit                     Soft Limit           Hard Limit           Units     \n\
                     Max open files            1024                 524288               files     \n\
                     Max locked memory         unlimited            unlimited            bytes     \n";
        assert_eq!(soft_limit(table, "Max open files"), Some(1024));
        assert_eq!(soft_limit(table, "Max locked memory"), Some(u64::MAX));
        assert_eq!(soft_limit(table, "Max stack size"), None);
    }
}
