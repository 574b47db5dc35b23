//! A guest that swaps on a cached disk: an in-place sort of more data than its memory holds has the right result,
//! without the cache and with it, and pages that were swapped out come back from the memory server.

use remoca_guest_tests::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca, slow};
use remoca_lab::{Lab, store};

#[test]
fn what_is_swapped_out_comes_back_from_the_memory_server() -> Result<()> {
    let lab = Lab::open()?;
    let mut host = Host::new(remoca()?, "512M")?;
    let (area, data) = (host.folder().join("area.img"), host.folder().join("data.img"));
    store::sparse_image(&area, 512 << 20)?;
    // From 512 MiB on, blocks of the file system are as large as pages.
    store::sparse_image(&data, 512 << 20)?;
    store::format_ext4(&data)?;
    host.without_port();
    host.start_server()?;
    let disk = slow(&area, &host, 1)?;
    let images =
        [Image { name: "area", path: disk.uri().into(), options: "" }, Image { name: "data", path: data, options: "" }];
    // On a busy machine, a memory server may well be slower than this disk.
    host.start_process(&images, "384M", &["--no-hedge"])?;
    let mut config = host.guest(&lab, "swap")?;
    config.memory_mib = 160;
    let mut guest = config.boot(&lab)?;

    // The area is recognised whether the cache is on or not.
    host.set(None, Some(false))?;
    guest.run("mkswap $(disk-by-serial area) && swapon $(disk-by-serial area)", LIMIT)?;
    host.wait_until("the area is recognised", |s| s.disks[0].swap_areas == 1)?;
    let sort = |seed: u32| format!("remoca-workload sort --size 128M --seed {seed}");
    let without = guest.run(&sort(5), LIMIT)?;
    assert_eq!(host.counter("swap_admissions")?, 0, "off is off");
    host.set(None, Some(true))?;
    host.wait_until("the cache is there", |s| s.cache.granted_bytes == s.cache.wanted_bytes)?;
    let mut are_admitted = false;
    // A memory server that is late for a moment is rightly avoided for a while.
    for seed in 6..11 {
        let before = host.status()?;
        // Different content each time, because pages that are already cached are not admitted again.
        let with = guest.run(&sort(seed), LIMIT)?;
        let status = host.status()?;
        let count = |name: &str| status.counters[name] - before.counters[name];
        let blocks = count("hit_blocks") + count("zero_blocks") + count("covered_blocks") + count("missed_blocks");
        println!("without the cache: {}\nwith it:           {}", without.trim(), with.trim());
        println!(
            "with it: {} pages admitted of {} written, {} not, {} of {blocks} that were read came from the memory server",
            count("swap_admissions"),
            count("written_blocks"),
            count("swap_dropped"),
            count("hit_blocks"),
        );
        let nine_tenths = count("written_blocks") * 9 / 10;
        assert!(count("swap_admissions") + count("swap_dropped") > nine_tenths, "{status:?}");
        assert!(blocks > 10_000, "{status:?}");
        are_admitted = count("swap_admissions") > nine_tenths && count("hit_blocks") * 2 > blocks;
        if are_admitted {
            break;
        }
        assert!(count("swap_dropped") + count("breaker_openings") + count("hedges_won") > 0, "{status:?}");
    }
    assert!(are_admitted, "the server is left alone each time");

    // A file is an area as far as its header says. An area that holds something else now is no longer one.
    guest.run("mount $(disk-by-serial data) /mnt && dd if=/dev/zero of=/mnt/file bs=1M count=32 status=none", LIMIT)?;
    guest.run("chmod 600 /mnt/file && mkswap /mnt/file && sync && swapon /mnt/file", LIMIT)?;
    host.wait_until("the file is recognised", |s| s.disks[1].swap_areas == 1)?;
    guest.run("swapoff -a && rm /mnt/file && umount /mnt && mkfs.ext4 -q -F $(disk-by-serial area) && sync", LIMIT)?;
    guest.run("dd if=/dev/zero of=$(disk-by-serial area) bs=4k count=1 oflag=direct status=none", LIMIT)?;
    host.wait_until("the area is forgotten", |s| s.disks[0].swap_areas == 0)?;
    assert_kernel_is_content(&mut guest)?;
    guest.shut_down()?;
    host.stop_process()
}
