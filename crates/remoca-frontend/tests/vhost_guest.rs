//! A real guest on a vhost-user disk whose back end is killed under it.
//!
//! The test runs itself as the back end: a file as the disk, completions out of order.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use std::fs::File;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use remoca_frontend::testing::serve_until_death;
use remoca_frontend::vhost::DeviceConfig;
use remoca_lab::{Disk, DiskSource, GuestConfig, Lab, store};

const DISK_BYTES: u64 = 384 << 20;
const LIMIT: Duration = Duration::from_secs(300);
const FOLDER: &str = "REMOCA_VHOST_GUEST_FOLDER";
/// As long as there is no file `/tmp/over`.
const FIO: &str = "until test -e /tmp/over; do fio --name=v --directory=/mnt --size=24m --rw=randrw --rwmixread=30 --bsrange=512-256k --blockalign=512 \
    --ioengine=libaio --iodepth=16 --numjobs=3 --direct=1 --verify=crc32c --verify_backlog=128 --verify_fatal=1 \
    --time_based --runtime=5 --output-format=terse || exit; done";

/// The back end, when this program is started as one; a test that passes at once otherwise.
#[test]
fn back_end_process() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let folder = Path::new(&folder);
    let disk = File::options().read(true).write(true).open(folder.join("disk")).unwrap();
    let mut config = DeviceConfig::disk("guest", "vhost-guest-test", DISK_BYTES);
    config.logical_block_bytes = 512;
    serve_until_death(config, &folder.join("s"), disk, None);
}

fn spawn(folder: &Path) -> Child {
    std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "back_end_process", "--nocapture"])
        .env(FOLDER, folder)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn wait_for_socket(folder: &Path, back_end: &mut Child) {
    while !folder.join("s").exists() {
        assert!(back_end.try_wait().unwrap().is_none(), "the back end has ended");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_guest_works_on_while_its_back_end_is_killed() {
    let lab = Lab::open().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let image = folder.join("disk");
    store::sparse_image(&image, DISK_BYTES).unwrap();
    let mut back_end = spawn(folder);
    wait_for_socket(folder, &mut back_end);
    let source = DiskSource::VhostUser { socket: folder.join("s"), queue_count: 3, queue_size: 128, reconnect: true };
    let disk = Disk { serial: "vhost-guest-test".into(), source };
    let mut config = GuestConfig::new("vhost-guest", 256).disk(disk);
    config.may_reboot = true;
    let mut guest = config.boot(&lab).unwrap();

    guest.run("ln -s $(disk-by-serial vhost-guest-test) /tmp/disk", LIMIT).unwrap();
    let attribute = |name: &str| format!("cat /sys/block/$(basename $(readlink /tmp/disk))/{name}");
    for (name, value) in [
        ("size", (DISK_BYTES / 512).to_string()),
        ("queue/logical_block_size", "512".into()),
        ("queue/physical_block_size", "4096".into()),
        ("queue/max_segments", "126".into()),
        ("queue/discard_max_bytes", (1u64 << 30).to_string()),
        ("queue/write_zeroes_max_bytes", (1u64 << 30).to_string()),
        ("ro", "0".into()),
        ("cache_type", "write back".into()),
    ] {
        assert_eq!(guest.run(&attribute(name), LIMIT).unwrap(), value, "{name}");
    }
    let queues = "ls -d /sys/block/$(basename $(readlink /tmp/disk))/mq/* | wc -l";
    assert_eq!(guest.run(queues, LIMIT).unwrap(), "2", "a queue for each of the guest's two processors");

    guest.run("mkfs.ext4 -q /tmp/disk && mount -o discard /tmp/disk /mnt", LIMIT).unwrap();
    let fio = guest.start(FIO).unwrap();
    for _ in 0..6 {
        std::thread::sleep(Duration::from_millis(1500));
        back_end.kill().unwrap();
        back_end.wait().unwrap();
        back_end = spawn(folder);
    }
    // QEMU stops all queues and starts them again.
    let mut monitor = guest.qmp().unwrap();
    monitor.pause().unwrap();
    monitor.resume().unwrap();
    guest.run("touch /tmp/over", LIMIT).unwrap();
    let output = guest.wait(&fio, LIMIT).unwrap();
    assert!(output.success(), "{}", output.text());
    guest.run("rm /mnt/v.0.0 && fstrim /mnt && sync && sha256sum /mnt/v.* > /tmp/sums", LIMIT).unwrap();
    let sums = guest.fetch("/tmp/sums").unwrap();

    // Another kind of restart: the guest resets the device, its queues start afresh.
    let mut guest = guest.reboot(LIMIT).unwrap();
    guest.put("/tmp/sums", &sums).unwrap();
    guest.run("mount $(disk-by-serial vhost-guest-test) /mnt && sha256sum -c /tmp/sums", LIMIT).unwrap();
    guest.shut_down().unwrap();
    back_end.kill().unwrap();
    back_end.wait().unwrap();
    store::check_ext4(&image).unwrap();
}
