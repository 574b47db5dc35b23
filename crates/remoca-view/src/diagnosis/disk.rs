//! What is wrong with images and disks.

use super::found::Found;
use crate::shown::Shown;
use crate::text::{count_of, milliseconds};
use crate::vm::Vm;
use remoca_io::show::show_size;
use remoca_protocol::control::{DiskStatus, NormalLatency, Status};

/// Usual time of a read from which on a disk is called slow, in microseconds. A hard disk takes 5 to 15 ms.
const SLOW_US: f64 = 50_000.0;
/// ... or so many times what it usually took since the start, if that is at least this time.
const SLOWER_TIMES: f64 = 5.0;
const SLOWER_US: f64 = 5_000.0;

/// What the guest of an unreachable image does.
pub const WAITS: &str = "The guest waits until it is there as before";

pub fn failed_flush(vm: &Vm, shown: &Shown) -> Option<Found> {
    let (disk, error) = first(shown, |disk| disk.failed_flush.as_ref())?;
    let DiskStatus { name, image, .. } = disk;
    let advice =
        format!("Is the image sound? See docs/failures.md, then `remoca set {} --clear-failed-flush {name}`", vm.name);
    Some(Found::failed(image_of(disk), format!("{image}: a flush failed ({error}), and all later ones do"), advice))
}

pub fn unreachable(_: &Vm, shown: &Shown) -> Option<Found> {
    let (disk, ()) = first(shown, |disk| is_unreachable(&shown.status, disk).then_some(()))?;
    let advice = format!("{WAITS}: look at that server, and at the way to it");
    Some(Found::failed(image_of(disk), why_unreachable(disk), advice))
}

/// Returns in words why the image of a disk [cannot be reached](is_unreachable).
#[must_use]
pub fn why_unreachable(disk: &DiskStatus) -> String {
    // A process of an earlier version does not say.
    let why = disk.store_error.as_deref().unwrap_or("its server cannot be reached");
    format!("{}: {why}", disk.image)
}

/// Returns whether the image of a disk cannot be reached. No one tries to while the disks are elsewhere, as the VM migrates.
#[must_use]
pub fn is_unreachable(status: &Status, disk: &DiskStatus) -> bool {
    status.has_disks() && disk.store != "up"
}

pub fn shrunk(_: &Vm, shown: &Shown) -> Option<Found> {
    let (disk, before) = first(shown, |disk| disk.shrunk_from_bytes)?;
    let (before, now) = (show_size(before), show_size(disk.bytes));
    let found = format!("{} had {before} before, and has {now}: reads and writes beyond its end fail", disk.image);
    Some(Found::failed(image_of(disk), found, "Make it as large as before, and look at who changed it"))
}

pub fn foreign_writer(vm: &Vm, _: &Shown) -> Option<Found> {
    let (count, period) = (vm.lately.foreign_writes, vm.lately.period());
    let times = count_of(count, "time");
    let found = format!("another program wrote to an image of this VM, {times} {period}; the cache then starts cold");
    let advice = "Two writers destroy a file system: find the other one with `fuser -v IMAGE`";
    (count > 0).then(|| Found::failed("image", found, advice))
}

pub fn errors(vm: &Vm, _: &Shown) -> Option<Found> {
    let (count, period) = (vm.lately.disk_errors, vm.lately.period());
    let requests = count_of(count, "request");
    let found = format!(
        "the disk failed {requests} {period}; the guest got these errors, except for reads that a memory server answered"
    );
    let advice = format!(
        "`journalctl -u remoca-disk@{}` names cause, image and offset; docs/failures.md says what to do",
        vm.name
    );
    (count > 0).then(|| Found::failed("disk", found, advice))
}

pub fn slow(vm: &Vm, shown: &Shown) -> Option<Found> {
    if vm.lately.disk_reads == 0 {
        // What it usually takes is that of a moment long ago.
        return None;
    }
    let NormalLatency { p50_us, p99_us } = shown.status.hedging.disk.as_ref()?;
    let usual_us = shown.status.latency.read_from_disk.p50_us;
    let is_slower = *p50_us >= SLOWER_US && usual_us > 0.0 && *p50_us >= usual_us * SLOWER_TIMES;
    let images: Vec<_> = shown.status.disks.iter().map(|disk| disk.image.as_str()).collect();
    let [median, slowest] = [*p50_us, *p99_us].map(milliseconds);
    let before = if is_slower { format!(", and {} until now", milliseconds(usual_us)) } else { String::new() };
    let found = format!("slow: a read of {} takes {median} (one of a hundred {slowest}){before}", images.join(", "));
    let advice = "Look at the load of that storage (`iostat -x 2`). More cache spares it reads: see what twice the cache would do";
    (*p50_us >= SLOW_US || is_slower).then(|| Found::warning("disk", found, advice))
}

pub fn size_not_seen(_: &Vm, shown: &Shown) -> Option<Found> {
    let (disk, ()) = first(shown, |disk| (disk.attached && !disk.guest_sees_size).then_some(()))?;
    let found = "its size has changed, and its guest has not been told";
    Some(Found::warning(image_of(disk), found, "The guest sees it when it connects again"))
}

/// Returns the first disk of which `look` finds something, and what.
fn first<'a, T>(shown: &'a Shown, look: impl Fn(&'a DiskStatus) -> Option<T>) -> Option<(&'a DiskStatus, T)> {
    shown.status.disks.iter().find_map(|disk| Some((disk, look(disk)?)))
}

fn image_of(disk: &DiskStatus) -> String {
    format!("image {}", disk.name)
}
