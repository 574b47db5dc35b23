//! Attaches a disk and the eviction port to a running guest, caches the disk, turns it off, detaches it, and attaches
//! it again as an ordinary disk.

use remoca_guest_tests::hotplug::{attach, detach, wait_for_disk};
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
    // The image is in the page cache. With hedging, the disk would rightly be preferred.
    host.start_process(&[Image { name: "data", path: image.clone(), options: "" }], "128M", &["--no-hedge"])?;
    let mut config = host.guest(&lab, "take-out")?;
    config.disks.clear();
    for slot in ["slot0,chassis=7", "slot1,chassis=8", "slot2,chassis=9"] {
        config.qemu_args.extend(["-device".to_owned(), format!("pcie-root-port,id={slot}")]);
    }
    let mut guest = config.boot(&lab)?;
    let mut qmp = guest.qmp()?;

    attach(&mut qmp, &host, &mut guest, "data", "data", "slot0")?;
    attach(&mut qmp, &host, &mut guest, "port", "remoca-port", "slot1")?;
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

    guest.run(
        "umount /mnt; kill $(cat /tmp/agent.pid); while [ -d /proc/$(cat /tmp/agent.pid) ]; do sleep 0.1; done",
        LIMIT,
    )?;
    detach(&mut qmp, &host, &mut guest, "data", "data")?;
    detach(&mut qmp, &host, &mut guest, "port", "remoca-port")?;
    host.wait_until("the guest is detached", |s| {
        !s.disks[0].attached && s.port.as_ref().is_some_and(|port| !port.attached)
    })?;
    host.stop_process()?;

    let file = json!({"driver": "file", "filename": image, "locking": "on"});
    qmp.execute("blockdev-add", json!({"driver": "raw", "node-name": "plain", "file": file}))?;
    qmp.execute(
        "device_add",
        json!({"driver": "virtio-blk-pci", "drive": "plain", "serial": "plain", "bus": "slot2"}),
    )?;
    wait_for_disk(&mut guest, "plain", true)?;
    guest.run("mount $(disk-by-serial plain) /mnt && remoca-workload verify --dir /mnt/set", LIMIT)?;
    assert_kernel_is_content(&mut guest)?;
    guest.shut_down()?;
    store::check_ext4(&image)?;
    Ok(())
}
