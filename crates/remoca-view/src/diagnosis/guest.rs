//! What is wrong with a guest: its disks, its memory, its agent.

use super::found::Found;
use crate::figures::Agent;
use crate::finding::Finding;
use crate::shown::Shown;
use crate::vm::Vm;
use remoca_io::show::show_size;
use remoca_protocol::control::{DiskStatus, Status};

/// Least number of evicted pages, or of reads, that a share is told of.
const ENOUGH: u64 = 1000;

/// Returns whether the guest has attached its disks.
#[must_use]
pub fn attached(status: &Status) -> Finding {
    let missing: Vec<_> = status.disks.iter().filter(|disk| !disk.attached).map(|disk| disk.name.as_str()).collect();
    match missing.len() {
        0 => Finding::ok("guest", "has attached all disks"),
        count if count == status.disks.len() => Finding::ok("guest", "none is attached"),
        _ => Finding::warning(
            "guest",
            format!("it has not attached {}", missing.join(", ")),
            format!("`remoca xml {}` prints what its domain needs", status.name),
        ),
    }
}

/// Returns whether the guest's memory is shared with the process, or `None` if no disk needs that.
#[must_use]
pub fn memory(status: &Status) -> Option<Finding> {
    status.disks.iter().any(|disk| needs_memory(status, disk)).then(|| match status.memory.guest_bytes {
        0 => Finding::failed(
            "guest memory",
            "none of it is shared with this process: its disks do not work, or it has not begun to use them (paused, in its firmware)",
            "If it runs: libvirt: <memoryBacking> as `remoca xml` prints it. QEMU: memory-backend-memfd,share=on",
        ),
        bytes => Finding::ok("guest memory", format!("{} shared", show_size(bytes))),
    })
}

/// Returns whether a disk works only if the guest's memory is shared with the process: a hypervisor has attached it, and no NBD client.
/// One to which a VM migrates attaches its disks at once, and shares the memory when the guest runs there.
#[must_use]
pub fn needs_memory(status: &Status, disk: &DiskStatus) -> bool {
    status.has_disks() && disk.attached && disk.nbd_clients.is_none()
}

/// Returns whether the agent in the guest reports, or `None` while no guest has attached the port.
#[must_use]
pub fn agent(status: &Status) -> Option<Finding> {
    let advice = "Install remoca-agent in the guest; `remoca-agent check` there says what is missing";
    let Some(port) = &status.port else {
        let found = format!("there is no eviction port; pages enter the cache by {}", status.cache.admission);
        return Some(Finding::ok("agent", found));
    };
    let heard_s = port.agent_heard_s_ago;
    port.attached.then(|| match (Agent::of(Some(port)), heard_s) {
        (Agent::Running, Some(seconds)) => Finding::ok("agent", format!("heard {seconds} s ago")),
        (_, Some(seconds)) => Finding::warning(
            "agent",
            format!("last heard {seconds} s ago: what the guest evicts does not reach the cache"),
            "Look at `systemctl status remoca-agent` in the guest; `remoca-agent check` there says what is missing",
        ),
        (_, None) => Finding::warning("agent", "not heard since the guest attached the port", advice),
    })
}

/// Names an agent that loses more than a quarter of what the guest evicts.
pub fn lost_pages(vm: &Vm, _: &Shown) -> Option<Found> {
    // The guest says both.
    let (lost, all) = (vm.lately.uncaptured, vm.lately.captured.saturating_add(vm.lately.uncaptured));
    let found = format!("it had no room for {lost} of {all} evicted pages {}", vm.lately.period());
    let advice = "Give it more in the guest: `remoca-agent --ring 64M`, by `systemctl edit remoca-agent`; or the guest more processors";
    (lost >= ENOUGH && lost > all / 4).then(|| Found::warning("agent", found, advice))
}

pub fn migrated(_: &Vm, shown: &Shown) -> Option<Found> {
    let migration = shown.status.migration.as_ref().filter(|migration| !migration.has_disks)?;
    let found = match (&migration.peer, &migration.news) {
        (Some(peer), _) => format!("the disks are not here, as the VM migrates: {peer} has them"),
        (None, Some(news)) => format!("the disks are not here, as the VM migrates: {news}"),
        (None, None) => "the disks are not here, as the VM migrates".into(),
    };
    let name = &shown.status.name;
    // Not `remoca migrate --abort`: from here it fails once the other process has the disks, and gives up the connection to it.
    let advice = format!(
        "`remoca status -v {name}` says what happened last. If the VM runs elsewhere for good: `systemctl disable --now remoca-disk@{name}`"
    );
    Some(Found::warning("migration", found, advice))
}

pub fn unknown_content(vm: &Vm, _: &Shown) -> Option<Found> {
    let (evicted, unknown) = (vm.lately.evicted, vm.lately.unknown_pages);
    let known = evicted.saturating_sub(unknown);
    let found = format!("of {evicted} evicted pages {known} were known to be on the disk {}", vm.lately.period());
    let advice =
        "Is it dm-crypt or a compressed file system in the guest? Such a guest gains little; see docs/file-systems.md";
    (evicted >= ENOUGH && known < evicted / 10).then(|| Found::warning("guest", found, advice))
}

pub fn misaligned(vm: &Vm, _: &Shown) -> Option<Found> {
    let (reads, odd) = (vm.lately.reads, vm.lately.misaligned_reads);
    let found =
        format!("{odd} of {reads} reads were of less than whole blocks {}, and hardly cached", vm.lately.period());
    let advice = "Does a partition begin at no multiple of 4 KiB, or has a file system smaller blocks?";
    (reads >= ENOUGH && odd > reads / 2).then(|| Found::warning("guest", found, advice))
}

pub fn too_large(_: &Vm, shown: &Shown) -> Option<Found> {
    let memory = &shown.status.memory;
    let (guest, indexed) = (show_size(memory.guest_bytes), show_size(memory.guest_bytes_indexed));
    let found =
        format!("the guest has {guest}, and the index is made for {indexed}: some of what it evicts is not known");
    let advice = format!("Raise `guest-memory-max`, then `remoca upgrade {}`", shown.status.name);
    (memory.guest_bytes_indexed > 0 && shown.status.exceeds_index())
        .then(|| Found::warning("guest memory", found, advice))
}
