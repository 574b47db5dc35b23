//! A guest without an agent. If its kernel leaves freed pages unchanged, a read overwrites pages that the guest evicted,
//! and these pages fill the cache. If the kernel zeroes pages, as Debian's does, blocks are admitted as they are read.

use remoca_guest_tests::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca, slow};
use remoca_lab::{Lab, store, workload::dataset};
use remoca_protocol::control::Status;

/// Makes a guest of 192 MiB read 256 MiB of files three times. `check` receives the status after the last time.
fn read_files(name: &str, kernel_arg: &str, check: impl FnOnce(&Status)) -> Result<()> {
    let lab = Lab::open()?;
    let mut host = Host::new(remoca()?, "512M")?;
    let (image, files) = (host.folder().join("data.img"), host.folder().join("files"));
    dataset::create(&files.join("set"), 4, 64 << 20, 6)?;
    // From 512 MiB on, blocks of the file system are as large as pages.
    store::ext4_of_folder(&image, 576 << 20, &files)?;
    host.without_port();
    host.start_server()?;
    let disk = slow(&image, &host, 5)?;
    host.start_process(&[Image { name: "data", path: disk.uri().into(), options: "" }], "384M", &[])?;
    let mut config = host.guest(&lab, name)?;
    config.memory_mib = 192;
    config.kernel_args.push(kernel_arg.into());
    let mut guest = config.boot(&lab)?;
    guest.run("mount -o noatime,noinit_itable $(disk-by-serial data) /mnt", LIMIT)?;
    for _ in 0..3 {
        guest.run("remoca-workload verify --dir /mnt/set", LIMIT)?;
    }
    let status = host.status()?;
    let count = |name: &str| status.counters[name];
    println!(
        "{kernel_arg}: admission by {}; frames: {} looked at, {} admitted, {} duplicate, {} zero, {} unmatched, {} dropped; \
         {} blocks admitted by read; {} of {} blocks hit",
        status.cache.admission,
        count("frames_looked_at"),
        count("frames_admitted"),
        count("frames_duplicate"),
        count("frames_zero"),
        count("frames_unmatched"),
        count("frames_dropped"),
        count("read_admissions"),
        count("hit_blocks"),
        count("read_blocks"),
    );
    check(&status);
    assert_kernel_is_content(&mut guest)?;
    guest.shut_down()?;
    host.stop_process()
}

#[test]
fn what_reads_overwrite_fills_the_cache() -> Result<()> {
    read_files("frames", "init_on_alloc=0", |status| {
        let count = |name: &str| status.counters[name];
        assert_eq!(status.cache.admission, "frames", "{status:?}");
        assert!(count("frames_admitted") > 10_000 && count("hit_blocks") > 30_000, "{status:?}");
        assert!(count("frames_unmatched") * 10 < count("frames_looked_at"), "most are known: {status:?}");
        assert!(count("frames_looked_at") * 2 > count("read_blocks"), "nearly all are looked at: {status:?}");
    })
}

#[test]
fn where_pages_are_zeroed_reads_fill_the_cache_and_frames_are_left_alone() -> Result<()> {
    read_files("zeroed-frames", "init_on_alloc=1", |status| {
        let count = |name: &str| status.counters[name];
        assert_eq!(status.cache.admission, "reads", "{status:?}");
        assert!(count("read_admissions") > 30_000 && count("hit_blocks") > 30_000, "{status:?}");
        assert!(count("frames_looked_at") * 32 < count("read_blocks"), "only a sample is looked at: {status:?}");
    })
}
