//! Disks that are attached to a running guest and detached from it, by QEMU's monitor, as an operator would, and that the
//! VM process gets and loses by `remoca disk`.

use crate::{Host, Result, wait_in_guest};
use remoca_lab::{Guest, Qmp};
use serde_json::{Value, json};
use std::process::Command;
use std::time::Duration;

/// Attaches a device of the VM process to the guest with `device_add`. QEMU does not connect again if the connection is lost.
pub fn attach(qmp: &mut Qmp, host: &Host, guest: &mut Guest, disk: &str, serial: &str, slot: &str) -> Result<()> {
    qmp.execute("chardev-add", chardev(host, disk, &json!({})))?;
    add_device(qmp, guest, disk, serial, slot)
}

/// Attaches a device as [`attach`] does. QEMU connects again when the VM process is back.
pub fn attach_for_good(
    qmp: &mut Qmp,
    host: &Host,
    guest: &mut Guest,
    disk: &str,
    serial: &str,
    slot: &str,
) -> Result<()> {
    // Since QEMU 9.2, and before.
    qmp.execute("chardev-add", chardev(host, disk, &json!({"reconnect-ms": 100})))
        .or_else(|_| qmp.execute("chardev-add", chardev(host, disk, &json!({"reconnect": 1}))))?;
    add_device(qmp, guest, disk, serial, slot)
}

fn chardev(host: &Host, disk: &str, options: &Value) -> Value {
    let mut data = options.clone();
    data["addr"] = json!({"type": "unix", "data": {"path": host.socket(disk)}});
    data["server"] = false.into();
    json!({"id": format!("{disk}-socket"), "backend": {"type": "socket", "data": data}})
}

fn add_device(qmp: &mut Qmp, guest: &mut Guest, disk: &str, serial: &str, slot: &str) -> Result<()> {
    let chardev = format!("{disk}-socket");
    qmp.execute("device_add", json!({"driver": "vhost-user-blk-pci", "id": disk, "chardev": chardev, "bus": slot}))?;
    wait_for_disk(guest, serial, true)
}

/// Detaches the disk. QEMU releases the device some time after the guest does, and keeps the connection until told to
/// close it.
pub fn detach(qmp: &mut Qmp, host: &Host, guest: &mut Guest, disk: &str, serial: &str) -> Result<()> {
    qmp.execute("device_del", json!({"id": disk}))?;
    wait_for_disk(guest, serial, false)?;
    let mut removed = false;
    host.wait_until("the connection is closed", |_| {
        removed = removed || qmp.execute("chardev-remove", json!({"id": format!("{disk}-socket")})).is_ok();
        removed
    })?;
    Ok(())
}

/// Waits until the guest has the disk, or no longer has it if not `there`.
pub fn wait_for_disk(guest: &mut Guest, serial: &str, there: bool) -> Result<()> {
    let wanted = if there { "" } else { "! " };
    wait_in_guest(guest, &format!("{wanted}disk-by-serial {serial}"))
}

/// Waits until the guest sees a disk with this many bytes.
pub fn wait_for_size(guest: &mut Guest, serial: &str, bytes: u64) -> Result<()> {
    wait_in_guest(guest, &format!("[ $(blockdev --getsize64 $(disk-by-serial {serial})) = {bytes} ]"))
}

/// Runs `remoca disk` with these arguments, for the VM whose file is in the host's folder. Says it again if the VM process had no
/// processor for so long on a busy machine that it left out the disk that comes, or asks for another try.
pub fn change_disks(host: &Host, change: &str, more: &[&str]) -> Result<String> {
    const TRIES_MAX: usize = 10;
    let late_openings = || host.log().matches("it could not be opened within").count();
    let (mut late, mut tries) = (late_openings(), 0);
    loop {
        let mut command = Command::new(host.program());
        command.args(["disk", change]).arg(host.control()).args(more).env("REMOCA_CONFIG", host.folder());
        let output = command.output()?;
        let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned();
        if output.status.success() {
            return Ok(said);
        }
        let before = std::mem::replace(&mut late, late_openings());
        let is_late = late > before || said.to_lowercase().contains("try again");
        tries += 1;
        if !is_late || tries == TRIES_MAX {
            return Err(said.into());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Returns what `remoca disk add` and a VM's file say of a disk on a raw image, whose socket is in the host's folder.
pub fn described(host: &Host, disk: &str, image: &std::path::Path) -> String {
    format!("name={disk},format=raw,image={},socket={}", image.display(), host.socket(disk).display())
}
