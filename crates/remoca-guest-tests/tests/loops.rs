//! A guest that reads more in a loop than the cache holds: with LRU each page would be discarded just before it is read again.

use remoca_guest_tests::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca, slow, start_agent};
use remoca_lab::{Lab, store, workload::dataset};
use remoca_protocol::control::Status;
use std::collections::BTreeMap;

const FILES_MIB: u64 = 288;
const CACHE_MIB: u64 = 192;

#[test]
fn a_loop_over_more_than_the_cache_hits_in_most_of_it() -> Result<()> {
    let lab = Lab::open()?;
    let mut host = Host::new(remoca()?, "256M")?;
    let (image, files) = (host.folder().join("data.img"), host.folder().join("files"));
    dataset::create(&files.join("set"), 4, FILES_MIB << 18, 6)?;
    // From 512 MiB on, blocks of the file system are as large as pages.
    store::ext4_of_folder(&image, 576 << 20, &files)?;
    host.start_server()?;
    let disk = slow(&image, &host, 5)?;
    let cache = format!("{CACHE_MIB}M");
    // Not a page of this is left to the disk because another program has the processor.
    host.start_process(&[Image { name: "data", path: disk.uri().into(), options: "" }], &cache, &["--no-hedge"])?;
    let mut config = host.guest(&lab, "loops")?;
    config.memory_mib = 160;
    let mut guest = config.boot(&lab)?;
    guest.run("mount -o noatime,noinit_itable $(disk-by-serial data) /mnt", LIMIT)?;
    start_agent(&mut guest)?;
    let mut pass = || -> Result<(Status, BTreeMap<String, u64>)> {
        let before = host.status()?.counters;
        guest.run("remoca-workload verify --dir /mnt/set", LIMIT)?;
        let status = host.status()?;
        let counts: BTreeMap<_, _> =
            status.counters.iter().map(|(name, now)| (name.clone(), now - before[name])).collect();
        println!(
            "{}: {} blocks read, {} hit, {} covered; {} pages evicted, {} sent, {} passed over; tried: LRU {:?}, bimodal {:?}",
            status.cache.insertion,
            counts["read_blocks"],
            counts["hit_blocks"],
            counts["covered_blocks"],
            counts["evictions_reported"],
            counts["evictions_admitted"],
            counts["evictions_passed_over"],
            status.cache.lru_hit_ratio,
            status.cache.bimodal_hit_ratio,
        );
        Ok((status, counts))
    };
    let mut adapted = false;
    for _ in 0..3 {
        adapted |= pass()?.0.cache.insertion == "bimodal";
    }
    assert!(adapted, "LRU hits nothing");
    for _ in 0..2 {
        let (_, counts) = pass()?;
        let (reads, hits, sent) = (counts["read_blocks"], counts["hit_blocks"], counts["evictions_admitted"]);
        let best = reads * CACHE_MIB / FILES_MIB;
        assert!(hits * 10 >= best * 9, "{hits} of {best} that a fixed subset would hit: {counts:?}");
        assert!(sent * 20 <= reads, "{sent} pages sent of {reads} read: {counts:?}");
    }
    assert_kernel_is_content(&mut guest)?;
    guest.shut_down()?;
    host.stop_process()
}
