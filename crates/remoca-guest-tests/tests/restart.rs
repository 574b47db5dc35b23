//! The VM process is killed under a working guest and started again: the guest waits, loses no request and sees no error.
//! The cache starts cold, and fills again.

use remoca_guest_tests::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca, start_agent};
use remoca_lab::workload::journal::{After, Versions};
use remoca_lab::{DiskSource, Lab, store};
use std::thread::sleep;
use std::time::Duration;

const KILLS: u32 = 4;

#[test]
fn a_killed_vm_process_comes_back_and_nothing_is_lost() -> Result<()> {
    let lab = Lab::open()?;
    let mut host = Host::new(remoca()?, "512M")?;
    let image = host.folder().join("data.img");
    store::sparse_image(&image, 1 << 30)?;
    store::format_ext4(&image)?;
    host.start_server()?;
    let images = [Image { name: "data", path: image.clone(), options: "" }];
    host.start_process(&images, "256M", &[])?;
    let mut config = host.guest(&lab, "restart")?;
    for disk in &mut config.disks {
        if let DiskSource::VhostUser { reconnect, .. } = &mut disk.source {
            *reconnect = true;
        }
    }
    let mut guest = config.boot(&lab)?;
    guest.run("mount $(disk-by-serial data) /mnt", LIMIT)?;
    start_agent(&mut guest)?;
    guest.run("remoca-workload create --dir /mnt/set --files 12 --file-size 16M --seed 6 && mkdir /mnt/fio", LIMIT)?;
    let work = guest.start(
        "remoca-workload write-mix --dir /mnt/set --ratio 20 --record 96K --pattern zipf --journal /tmp/journal \
         --sync-every 20 --stop-file /tmp/stop --json",
    )?;
    let fio = guest.start(
        "fio --name=v --rw=randrw --bs=4k --ioengine=libaio --direct=1 --iodepth=16 --verify=crc32c --verify_backlog=32 \
         --verify_fatal=1 --size=64m --loops=1000 --time_based --runtime=45 --directory=/mnt/fio --output-format=terse",
    )?;
    for _ in 0..KILLS {
        sleep(Duration::from_secs(6));
        host.kill_process()?;
        sleep(Duration::from_millis(500));
        host.start_process(&images, "256M", &[])?;
        host.wait_until("the guest is back", |s| s.disks[0].attached && s.counters["writes"] > 0)?;
    }
    let fio = guest.wait(&fio, LIMIT)?;
    assert!(fio.success(), "{}", fio.text());
    host.wait_until("the cache fills again", |s| s.cache.used_bytes > 16 << 20 && s.counters["hit_blocks"] > 0)?;
    guest.run("touch /tmp/stop", LIMIT)?;
    let work = guest.wait(&work, LIMIT)?;
    assert!(work.success(), "{}", work.text());
    guest.run("sync; umount /mnt && mount $(disk-by-serial data) /mnt", LIMIT)?;
    guest.run("remoca-workload verify --dir /mnt/set --journal /tmp/journal", LIMIT)?;
    assert_kernel_is_content(&mut guest)?;
    let journal = guest.fetch("/tmp/journal")?;
    guest.shut_down()?;
    assert_eq!(host.counter("disk_errors")? + host.counter("foreign_writes")?, 0);
    host.stop_process()?;
    store::check_ext4(&image)?;
    let path = host.folder().join("journal");
    std::fs::write(&path, journal)?;
    let verified = store::verify_ext4(&image, "/set", &Versions::read(&path, After::Order)?)?;
    assert!(verified.faults.is_empty(), "{:?}", verified.faults);
    Ok(())
}
