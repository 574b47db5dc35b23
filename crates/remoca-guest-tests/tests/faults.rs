//! Guests keep working through every fault of their memory server, and their files are right afterwards: as seen from
//! inside, after another boot, and from outside with the cache gone.

use remoca_guest_tests::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca, start_agent};
use remoca_lab::store::{self, LoopDevice};
use remoca_lab::workload::journal::{After, Versions};
use remoca_lab::{Guest, Lab, Service};
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

const CREATE: &str = "remoca-workload create --files 12 --file-size 16M --seed 5 --dir";
const FIO: &str = "fio --name=v --rw=randrw --bsrange=512-128k --bs_unaligned=0 --blockalign=512 --ioengine=libaio \
    --iodepth=8 --verify=crc32c --verify_backlog=64 --verify_fatal=1 --randrepeat=0 --size=48m --loops=1000 \
    --time_based --output=/tmp/fio.log --output-format=terse";

/// Causes every fault of the memory server `times` times while the guest works.
fn torment(host: &mut Host, times: u32) -> Result<()> {
    for _ in 0..times {
        sleep(Duration::from_secs(2));
        host.server()?.freeze()?;
        sleep(Duration::from_secs(4));
        host.server()?.thaw()?;
        sleep(Duration::from_secs(2));
        host.set(Some(8 << 20), None)?;
        host.wait_until("the cache shrinks", |s| s.cache.granted_bytes == 8 << 20)?;
        sleep(Duration::from_secs(2));
        host.set(None, Some(false))?;
        host.wait_until("the cache is off", |s| s.cache.granted_bytes == 0)?;
        sleep(Duration::from_secs(1));
        host.set(Some(256 << 20), Some(true))?;
        host.wait_until("the cache is back", |s| s.cache.granted_bytes == 256 << 20)?;
        sleep(Duration::from_secs(2));
        host.kill_server()?;
        host.wait_until("the loss is noticed", |s| !s.server.as_ref().is_some_and(|server| server.connected))?;
        sleep(Duration::from_secs(2));
        host.start_server()?;
        host.wait_until("a restarted server is found", |s| s.server.as_ref().is_some_and(|server| server.connected))?;
        host.wait_until("the cache is back", |s| s.cache.granted_bytes == 256 << 20)?;
    }
    // The cache refills, because nothing is held against the server by then.
    let before = host.status()?.counters["hit_blocks"];
    host.wait_until("the cache refills", |s| {
        s.cache.used_bytes > 16 << 20 && s.counters["hit_blocks"] > before + 1000
    })?;
    Ok(())
}

/// Starts jobs in the folder `dir` of the guest, which run until `/tmp/stop` appears. Their files are named by `tag`.
fn start_work(guest: &mut Guest, dir: &str, tag: &str, fio_more: &str) -> Result<()> {
    guest.run(&format!("{CREATE} {dir}/set && mkdir {dir}/churn {dir}/fio"), LIMIT)?;
    let jobs = [
        format!(
            "remoca-workload write-mix --dir {dir}/set --ratio 10 --record 96K --pattern zipf --journal /tmp/{tag}.journal \
             --sync-every 50 --stop-file /tmp/stop --json > /tmp/{tag}.mix 2>&1; echo $? > /tmp/{tag}.mix.status"
        ),
        format!(
            "n=0; until [ -e /tmp/stop ]; do n=$((n+1)); remoca-workload churn --dir {dir}/churn --files 24 --file-size 1M \
             --steps 200 --seed $n > /tmp/{tag}.churn 2>&1 || break; done; [ -e /tmp/stop ]; echo $? > /tmp/{tag}.churn.status"
        ),
        format!(
            "until [ -e /tmp/stop ]; do {FIO} --directory={dir}/fio --runtime=8 {fio_more} > /tmp/{tag}.fio.out 2>&1 || break; \
             done; [ -e /tmp/stop ]; echo $? > /tmp/{tag}.fio.status"
        ),
    ];
    for job in jobs {
        guest.run(&format!("( {job} ) > /dev/null 2>&1 &"), LIMIT)?;
    }
    Ok(())
}

fn stop_work(guest: &mut Guest, tags: &[&str]) -> Result<()> {
    guest.run("touch /tmp/stop", LIMIT)?;
    for tag in tags {
        for job in ["mix", "churn", "fio"] {
            let wait = format!(
                "for i in $(seq 2000); do [ -s /tmp/{tag}.{job}.status ] && break; sleep 0.1; done; \
                 s=$(cat /tmp/{tag}.{job}.status); [ \"$s\" = 0 ] || {{ tail -n 30 /tmp/{tag}.{job}* /tmp/fio.log; exit 1; }}"
            );
            guest.run(&wait, LIMIT)?;
        }
        guest.run(&format!("cat /tmp/{tag}.mix"), LIMIT)?;
    }
    Ok(())
}

fn verify(guest: &mut Guest, dir: &str, tag: &str) -> Result<()> {
    guest.run(&format!("remoca-workload verify --dir {dir}/set --journal /tmp/{tag}.journal"), LIMIT)?;
    Ok(())
}

/// Checks the file system and every byte of the data set, directly on the image, with the cache gone.
fn check_from_outside(image: &Path, journal: &[u8], folder: &Path) -> Result<()> {
    store::check_ext4(image)?;
    let path = folder.join("journal");
    std::fs::write(&path, journal)?;
    let versions = Versions::read(&path, After::Order)?;
    let verified = store::verify_ext4(image, "/set", &versions)?;
    assert!(verified.faults.is_empty(), "{:?}", verified.faults);
    assert_eq!(verified.sectors, 12 * (16 << 20) / 512);
    Ok(())
}

#[test]
fn a_guest_survives_whatever_happens_to_its_memory_server() -> Result<()> {
    let lab = Lab::open()?;
    let mut host = Host::new(remoca()?, "512M")?;
    let image = host.folder().join("root.img");
    store::sparse_image(&image, 1 << 30)?;
    store::format_ext4(&image)?;
    host.start_server()?;
    host.start_process(&[Image { name: "data", path: image.clone(), options: "" }], "256M", &[])?;
    let mut guest = host.guest(&lab, "faults")?.boot(&lab)?;
    guest.run("mount $(disk-by-serial data) /mnt", LIMIT)?;
    start_agent(&mut guest)?;
    start_work(&mut guest, "/mnt", "a", "")?;

    torment(&mut host, 2)?;
    guest.run("remoca-workload pressure --mib 120 --seconds 3", LIMIT)?;
    guest.run("sync", LIMIT)?;

    stop_work(&mut guest, &["a"])?;
    verify(&mut guest, "/mnt", "a")?;
    guest.run("umount /mnt && mount $(disk-by-serial data) /mnt", LIMIT)?;
    verify(&mut guest, "/mnt", "a")?;
    assert_kernel_is_content(&mut guest)?;
    let journal = guest.fetch("/tmp/a.journal")?;

    guest.shut_down()?;
    let mut guest = host.guest(&lab, "faults-again")?.boot(&lab)?;
    guest.put("/tmp/a.journal", &journal)?;
    guest.run("mount $(disk-by-serial data) /mnt", LIMIT)?;
    verify(&mut guest, "/mnt", "a")?;
    assert_kernel_is_content(&mut guest)?;
    guest.shut_down()?;

    let status = host.status()?;
    let counter = |name: &str| status.counters[name];
    assert!(counter("connections") >= 3 && counter("disconnections") >= 2, "{status:?}");
    let met = ["hedges_won", "fetch_timeouts", "fetch_disconnected"].map(counter);
    assert!(met.iter().sum::<u64>() > 0, "a fault met a read: {status:?}");
    assert_eq!((counter("disk_errors"), counter("foreign_writes"), counter("fetch_wrong")), (0, 0, 0), "{status:?}");
    // Turning the cache off forgets the guest's pages, so not all of them are known later.
    let known = counter("evictions_reported") - counter("evictions_unmatched");
    assert!(known * 2 > counter("evictions_reported"), "most evictions are known content: {status:?}");
    host.stop_process()?;
    check_from_outside(&image, &journal, host.folder())
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn two_disks_of_one_guest_one_of_them_with_small_writes_on_large_sectors() -> Result<()> {
    let lab = Lab::open()?;
    let mut host = Host::new(remoca()?, "512M")?;
    let (first, second) = (host.folder().join("first.img"), host.folder().join("second.img"));
    for image in [&first, &second] {
        store::sparse_image(image, 768 << 20)?;
    }
    store::format_ext4(&first)?;
    // A file system with 1 KiB blocks, and 512-byte direct writes of fio, on a store with 4 KiB sectors.
    let made = Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-b", "1024"]).arg(&second).status()?;
    assert!(made.success());
    let large_sectors = LoopDevice::attach(&second, 4096)?;
    host.start_server()?;
    let images = [
        Image { name: "first", path: first.clone(), options: "" },
        Image { name: "second", path: large_sectors.path().to_owned(), options: "sector=512" },
    ];
    host.start_process(&images, "256M", &["--no-io-uring"])?;
    let mut guest = host.guest(&lab, "two-disks")?.boot(&lab)?;
    let mount = "mkdir -p /a /b; mount $(disk-by-serial first) /a && mount $(disk-by-serial second) /b";
    guest.run(mount, LIMIT)?;
    assert_eq!(
        guest.run("cat /sys/block/$(basename $(disk-by-serial second))/queue/logical_block_size", LIMIT)?,
        "512"
    );
    start_agent(&mut guest)?;
    start_work(&mut guest, "/a", "a", "")?;
    start_work(&mut guest, "/b", "b", "--direct=1")?;
    torment(&mut host, 1)?;
    stop_work(&mut guest, &["a", "b"])?;
    guest.run("sync; umount /a /b", LIMIT)?;
    guest.run(mount, LIMIT)?;
    verify(&mut guest, "/a", "a")?;
    verify(&mut guest, "/b", "b")?;
    assert_kernel_is_content(&mut guest)?;
    let journals = [guest.fetch("/tmp/a.journal")?, guest.fetch("/tmp/b.journal")?];
    guest.shut_down()?;
    assert_eq!(host.counter("disk_errors")? + host.counter("foreign_writes")?, 0);
    host.stop_process()?;
    drop(large_sectors);
    check_from_outside(&first, &journals[0], host.folder())?;
    check_from_outside(&second, &journals[1], host.folder())
}

/// The firmware alone starts the disk: it looks for something to boot.
#[test]
fn a_hypervisor_that_does_not_share_the_guests_memory_is_told_how_to() -> Result<()> {
    let mut host = Host::new(remoca()?, "64M")?;
    host.without_port();
    let path = host.folder().join("data.img");
    store::sparse_image(&path, 16 << 20)?;
    host.start_server()?;
    host.start_process(&[Image { name: "data", path, options: "" }], "16M", &[])?;
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-machine", "q35,accel=tcg", "-m", "64", "-nodefaults", "-display", "none"]);
    qemu.args(["-chardev", &format!("socket,id=data,path={}", host.socket("data").display())]);
    qemu.args(["-device", "vhost-user-blk-pci,chardev=data,bootindex=1"]);
    let _qemu = Service::start("qemu", qemu, &host.folder().join("qemu.log"))?;
    host.wait_until("the hypervisor is disconnected", |_| host.log().contains("its hypervisor is disconnected"))?;
    let log = host.log();
    assert!(log.contains("(2048 bytes) is in none of the 0 memory regions that the hypervisor shares"), "{log}");
    assert!(log.contains("memory-backend-memfd with share=on for QEMU"), "{log}");
    assert!(host.process()?.exit_status()?.is_none(), "{log}");
    Ok(())
}
