//! In and out of a running guest: a disk is attached, cached, turned off, detached, and attached again as an ordinary disk,
//! while the guest runs.

use remoca_guest_tests::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca, start_agent};
use remoca_lab::{Lab, store};
use serde_json::json;

#[test]
fn a_data_disk_moves_out_of_remoca_under_a_running_guest() -> Result<()> {
    let lab = Lab::open()?;
    let mut host = Host::new(remoca()?, "256M")?;
    let image = host.folder().join("data.img");
    store::sparse_image(&image, 512 << 20)?;
    store::format_ext4(&image)?;
    host.start_server()?;
    host.start_process(&[Image { name: "data", path: image.clone(), options: "" }], "128M", &[])?;
    let mut config = host.guest(&lab, "take-out")?;
    // The disk comes by hot-plug below; only the port is there from the start.
    config.disks.retain(|disk| disk.serial == "port");
    let ports = ["-device", "pcie-root-port,id=slot0,chassis=7", "-device", "pcie-root-port,id=slot1,chassis=8"];
    config.qemu_args.extend(ports.map(str::to_owned));
    let mut guest = config.boot(&lab)?;
    let mut qmp = guest.qmp()?;

    let address = json!({"type": "unix", "data": {"path": host.socket("data")}});
    let backend = json!({"type": "socket", "data": {"addr": address, "server": false}});
    qmp.execute("chardev-add", json!({"id": "data", "backend": backend}))?;
    qmp.execute(
        "device_add",
        json!({"driver": "vhost-user-blk-pci", "id": "data", "chardev": "data", "bus": "slot0"}),
    )?;
    guest.run(
        "for i in $(seq 300); do disk-by-serial data > /dev/null 2>&1 && exit 0; sleep 0.1; done; exit 1",
        LIMIT,
    )?;
    guest.run("mount $(disk-by-serial data) /mnt", LIMIT)?;
    start_agent(&mut guest)?;
    guest.run("remoca-workload create --dir /mnt/set --files 2 --file-size 128M --seed 3 && sync", LIMIT)?;
    host.wait_until("the cache hits", |s| {
        let _ = guest.run("cat /mnt/set/* > /dev/null", LIMIT);
        s.counters["hit_blocks"] > 1000
    })?;

    host.set(None, Some(false))?;
    let off = host.wait_until("its memory is given back", |s| s.cache.granted_bytes == 0)?;
    guest.run("remoca-workload verify --dir /mnt/set", LIMIT)?;
    assert_eq!(host.counter("hit_blocks")?, off.counters["hit_blocks"], "off is off");

    guest.run("umount /mnt", LIMIT)?;
    qmp.execute("device_del", json!({"id": "data"}))?;
    guest.run(
        "for i in $(seq 600); do disk-by-serial data > /dev/null 2>&1 || exit 0; sleep 0.1; done; exit 1",
        LIMIT,
    )?;
    // QEMU lets go of the device some time after the guest, and keeps the connection until it is told.
    let mut removed = false;
    host.wait_until("the guest is detached", |s| {
        removed = removed || qmp.execute("chardev-remove", json!({"id": "data"})).is_ok();
        removed && !s.disks[0].attached
    })?;
    host.stop_process()?;

    let file = json!({"driver": "file", "filename": image, "locking": "on"});
    qmp.execute("blockdev-add", json!({"driver": "raw", "node-name": "plain", "file": file}))?;
    qmp.execute(
        "device_add",
        json!({"driver": "virtio-blk-pci", "drive": "plain", "serial": "plain", "bus": "slot1"}),
    )?;
    guest.run(
        "for i in $(seq 300); do disk-by-serial plain > /dev/null 2>&1 && exit 0; sleep 0.1; done; exit 1",
        LIMIT,
    )?;
    guest.run("mount $(disk-by-serial plain) /mnt && remoca-workload verify --dir /mnt/set", LIMIT)?;
    assert_kernel_is_content(&mut guest)?;
    guest.shut_down()?;
    store::check_ext4(&image)?;
    Ok(())
}
