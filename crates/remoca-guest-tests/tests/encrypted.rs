//! A guest that encrypts its disk: no evicted page is content that the disk holds. The agent is told so and almost
//! stops. When the guest reads a plain file system again, evictions are known again and the agent sends everything.

use remoca_guest_tests::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca, start_agent};
use remoca_lab::{Lab, store};

const CREATE: &str = "remoca-workload create --files 4 --file-size 64M";

#[test]
#[ignore = "long: cargo xtask test-long"]
fn where_nothing_matches_the_agent_all_but_stops() -> Result<()> {
    let lab = Lab::open()?;
    let mut host = Host::new(remoca()?, "512M")?;
    let (secret, plain) = (host.folder().join("secret.img"), host.folder().join("plain.img"));
    for image in [&secret, &plain] {
        store::sparse_image(image, 512 << 20)?;
    }
    store::format_ext4(&plain)?;
    host.start_server()?;
    let images =
        [Image { name: "secret", path: secret, options: "" }, Image { name: "plain", path: plain, options: "" }];
    host.start_process(&images, "384M", &[])?;
    let mut guest = host.guest(&lab, "encrypted")?.boot(&lab)?;
    guest.run("head -c 32 /dev/urandom > /tmp/key && modprobe dm_crypt", LIMIT)?;
    guest.run("cryptsetup open --type plain --key-file /tmp/key --cipher aes-xts-plain64 --key-size 256 $(disk-by-serial secret) s", LIMIT)?;
    guest.run(
        "mkdir -p /s /p; mkfs.ext4 -q /dev/mapper/s && mount /dev/mapper/s /s && mount $(disk-by-serial plain) /p",
        LIMIT,
    )?;
    // Different seeds: if a plain disk held the same bytes, evictions would rightly match those.
    guest.run(&format!("{CREATE} --seed 8 --dir /s/set && {CREATE} --seed 9 --dir /p/set && sync"), LIMIT)?;

    // Pages of the plain file system leave memory before the agent starts to capture.
    guest.run("cat /s/set/* > /dev/null", LIMIT)?;
    start_agent(&mut guest)?;
    host.wait_until("the port advises the agent", |s| {
        let _ = guest.run("cat /s/set/* > /dev/null", LIMIT);
        s.port.as_ref().is_some_and(|port| port.advice >= 64)
    })?;
    guest.run("cat /s/set/* > /dev/null", LIMIT)?;
    let status = host.status()?;
    let (reported, unmatched) = (status.counters["evictions_reported"], status.counters["evictions_unmatched"]);
    assert!(unmatched * 10 > reported * 8, "under dm-crypt hardly anything matches: {status:?}");

    guest.run("remoca-workload verify --dir /s/set && umount /s && cryptsetup close s", LIMIT)?;
    host.wait_until("matches bring the agent back", |s| {
        let _ = guest.run("cat /p/set/* > /dev/null", LIMIT);
        s.port.as_ref().is_some_and(|port| port.advice == 0) && s.cache.used_bytes > 64 << 20
    })?;
    let hits = host.counter("hit_blocks")?;
    host.wait_until("the plain file system is cached", |s| {
        let _ = guest.run("cat /p/set/* > /dev/null", LIMIT);
        s.counters["hit_blocks"] > hits + 10_000
    })?;
    guest.run("remoca-workload verify --dir /p/set", LIMIT)?;
    assert_kernel_is_content(&mut guest)?;
    guest.shut_down()?;
    host.stop_process()
}
