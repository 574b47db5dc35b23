//! Where the pages of the cache come from. Without an agent, if the guest's kernel leaves freed pages unchanged, a read overwrites
//! pages that the guest evicted, and these pages fill the cache. If the kernel zeroes pages, as Debian's does, blocks are
//! admitted as they are read. So are they beside an agent if nearly all reads pass the page cache by.

use remoca_guest_tests::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca, slow, start_agent, stop_agent};
use remoca_lab::{
    Guest, Lab,
    store::{self, Nbdkit},
    workload::dataset,
};
use remoca_protocol::control::Status;

/// Boots a guest of 192 MiB with 256 MiB of files in /mnt/set, on a slow disk.
fn guest_with_files(name: &str, kernel_arg: &str, has_port: bool) -> Result<(Host, Guest, Nbdkit)> {
    let lab = Lab::open()?;
    let mut host = Host::new(remoca()?, "512M")?;
    let (image, files) = (host.folder().join("data.img"), host.folder().join("files"));
    dataset::create(&files.join("set"), 4, 64 << 20, 6)?;
    // From 512 MiB on, blocks of the file system are as large as pages.
    store::ext4_of_folder(&image, 576 << 20, &files)?;
    if !has_port {
        host.without_port();
    }
    host.start_server()?;
    let disk = slow(&image, &host, 5)?;
    // Not a page of this is left to the disk because another program has the processor.
    host.start_process(
        &[Image { name: "data", path: disk.uri().into(), options: "" }],
        "384M",
        &["--no-hedge", "--guest-memory=192M"],
    )?;
    let mut config = host.guest(&lab, name)?;
    config.memory_mib = 192;
    config.kernel_args.push(kernel_arg.into());
    let mut guest = config.boot(&lab)?;
    guest.run("mount -o noatime,noinit_itable $(disk-by-serial data) /mnt", LIMIT)?;
    Ok((host, guest, disk))
}

/// Makes a guest read its files three times. `check` receives the status after the last time.
fn read_files(name: &str, kernel_arg: &str, check: impl FnOnce(&Status)) -> Result<()> {
    let (mut host, mut guest, _disk) = guest_with_files(name, kernel_arg, false)?;
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

/// A database with a cache of its own reads so, beside which a guest always evicts a little. The agent reports that, and no page
/// of the database.
#[test]
fn reads_past_the_page_cache_fill_the_cache_although_an_agent_reports_what_else_is_evicted() -> Result<()> {
    let (mut host, mut guest, _disk) = guest_with_files("direct", "init_on_alloc=1", true)?;
    // The page cache is full from here on.
    guest.run("cat /mnt/set/* > /dev/null", LIMIT)?;
    start_agent(&mut guest)?;
    for part in 0..4 {
        guest.run("remoca-workload verify --direct --dir /mnt/set", LIMIT)?;
        let skip = part * 2;
        let read = format!("for file in /mnt/set/*; do dd if=$file of=/dev/null bs=1M skip={skip} count=2 2>&1; done");
        guest.run(&read, LIMIT)?;
    }
    let status = host
        .wait_until("the agent has reported what was evicted", |status| status.counters["evictions_reported"] > 1000)?;
    let count = |name: &str| status.counters[name];
    println!(
        "admission by {}; {} evictions reported; {} blocks admitted by read, {} of frames; {} of {} blocks hit",
        status.cache.admission,
        count("evictions_reported"),
        count("read_admissions"),
        count("frames_admitted"),
        count("hit_blocks"),
        count("read_blocks"),
    );
    assert_ne!(status.cache.admission, "evictions", "{status:?}");
    // What is read past the page cache overwrites what was read there before, and frames may pay.
    let admitted = count("read_admissions") + count("frames_admitted");
    assert!(admitted > 30_000 && count("hit_blocks") > 100_000, "{status:?}");
    assert_kernel_is_content(&mut guest)?;
    stop_agent(&mut guest)?;
    guest.shut_down()?;
    host.stop_process()
}
