//! A disk that is added to a running VM is cached like the others, and these stay warm when it comes and when it goes.

use remoca_guest_tests::hotplug::{attach_for_good, change_disks, described, detach};
use remoca_guest_tests::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca, start_agent};
use remoca_lab::{Disk, DiskSource, Guest, Lab, store};
use remoca_protocol::control::DiskTraffic;

/// Returns what a disk has done in the running program.
fn traffic(host: &Host, name: &str) -> Result<DiskTraffic> {
    let disk = host.status()?.disks.into_iter().find(|disk| disk.name == name);
    Ok(disk.ok_or_else(|| format!("there is no disk {name}"))?.traffic)
}

/// Reads files of a disk that the guest no longer has in memory, and expects that most reads are answered from the cache.
fn expect_warm(host: &Host, guest: &mut Guest, disk: &str, files: &str) -> Result<()> {
    let before = traffic(host, disk)?;
    guest.run(&format!("cat {files} > /dev/null"), LIMIT)?;
    let after = traffic(host, disk)?;
    let (hits, reads) = (after.reads_from_cache - before.reads_from_cache, after.reads - before.reads);
    println!("{disk}: {hits} of {reads} reads from the cache");
    assert!(reads > 100 && hits * 2 > reads, "{disk}: {hits} of {reads} reads from the cache");
    Ok(())
}

/// Reads files of a disk until its reads are answered from the cache.
fn read_until_hits(host: &Host, guest: &mut Guest, disk: &str, files: &str) -> Result<()> {
    host.wait_until("the disk is in the cache", |_| {
        let _ = guest.run(&format!("cat {files} > /dev/null"), LIMIT);
        traffic(host, disk).is_ok_and(|traffic| traffic.reads_from_cache > 300)
    })?;
    Ok(())
}

#[test]
fn an_added_disk_is_cached_and_the_other_one_stays_warm() -> Result<()> {
    let lab = Lab::open()?;
    let mut host = Host::new(remoca()?, "512M")?;
    let [image, extra] = ["data.img", "extra.img"].map(|name| host.folder().join(name));
    for path in [&image, &extra] {
        store::sparse_image(path, 512 << 20)?;
        store::format_ext4(path)?;
    }
    host.start_server()?;
    host.configure(&[Image { name: "data", path: image.clone(), options: "" }])?;
    // The images are in the page cache. With hedging, the disk would rightly be preferred.
    host.start_configured("384M", &["--no-hedge"])?;
    let mut config = host.guest(&lab, "added")?;
    config.disks.push(Disk::vhost_user("data", &host.socket("data")));
    for disk in &mut config.disks {
        if let DiskSource::VhostUser { reconnect, .. } = &mut disk.source {
            *reconnect = true;
        }
    }
    config.memory_mib = 160;
    config.qemu_args.extend(["-device", "pcie-root-port,id=extra-slot,chassis=7"].map(Into::into));
    let mut guest = config.boot(&lab)?;
    let mut qmp = guest.qmp()?;
    guest.run("mount $(disk-by-serial data) /mnt", LIMIT)?;
    start_agent(&mut guest)?;
    guest.run("remoca-workload create --dir /mnt/set --files 2 --file-size 64M --seed 3 && sync", LIMIT)?;
    read_until_hits(&host, &mut guest, "data", "/mnt/set/*")?;

    change_disks(&host, "add", &[&described(&host, "extra", &extra)])?;
    attach_for_good(&mut qmp, &host, &mut guest, "extra", "extra", "extra-slot")?;
    guest.run("mkdir /extra && mount $(disk-by-serial extra) /extra", LIMIT)?;
    guest.run("remoca-workload create --dir /extra/set --files 2 --file-size 64M --seed 4 && sync", LIMIT)?;
    read_until_hits(&host, &mut guest, "extra", "/extra/set/*")?;
    expect_warm(&host, &mut guest, "data", "/mnt/set/*")?;
    expect_warm(&host, &mut guest, "extra", "/extra/set/*")?;
    guest.run("remoca-workload verify --dir /extra/set && remoca-workload verify --dir /mnt/set", LIMIT)?;

    // Whatever the guest has in memory of the other disk goes to the cache.
    guest.run("cat /extra/set/* > /dev/null && umount /extra", LIMIT)?;
    detach(&mut qmp, &host, &mut guest, "extra", "extra")?;
    host.wait_until("the disk is detached", |status| !status.disks[1].attached)?;
    change_disks(&host, "remove", &["extra"])?;
    assert_eq!(host.status()?.started, "warm");
    expect_warm(&host, &mut guest, "data", "/mnt/set/*")?;
    guest.run("remoca-workload verify --dir /mnt/set", LIMIT)?;
    assert_kernel_is_content(&mut guest)?;
    guest.shut_down()?;
    host.stop_process()?;
    store::check_ext4(&image)?;
    store::check_ext4(&extra)?;
    Ok(())
}
