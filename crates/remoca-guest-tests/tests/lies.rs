//! A memory server that lies and a guest that lies, at once, under a working guest: no wrong byte is served. Leave out the
//! check at admission or the check at fetch, each alone, and the same test sees wrong bytes.

use remoca_guest_tests::{Host, Image, LIMIT, Result, remoca, remoca_ablation, start_agent};
use remoca_lab::{Lab, store};
use remoca_protocol::{Frame, PAGE_SIZE, ReceiveBuffer};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Stands between the VM process and the memory server, and changes one page in forty on its way back: a flipped bit, an
/// earlier page in its place, zeroes.
fn lie_between(listen: &Path, server: PathBuf) -> Result<()> {
    let listener = UnixListener::bind(listen)?;
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = UnixStream::connect(&server) else { continue };
            let (Ok(mut from_client), Ok(mut to_server)) = (client.try_clone(), server.try_clone()) else { continue };
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from_client, &mut to_server);
                let _ = to_server.shutdown(std::net::Shutdown::Both);
            });
            std::thread::spawn(move || pass_back(server, client));
        }
    });
    Ok(())
}

fn pass_back(mut server: UnixStream, mut client: UnixStream) {
    let mut buffer = ReceiveBuffer::new(1 << 18);
    let (mut count, mut earlier) = (0_u64, [0x5a; PAGE_SIZE]);
    loop {
        let mut out = Vec::new();
        while let Ok(Some(frame)) = buffer.take() {
            let Frame::SendPage { request, slot, page } = frame else {
                frame.encode(&mut out);
                continue;
            };
            count += 1;
            let mut lie = *page;
            match count % 120 {
                0 => lie[usize::try_from(count).unwrap_or(0) % PAGE_SIZE] ^= 1,
                40 => lie = earlier,
                80 => lie = [0; PAGE_SIZE],
                _ => {}
            }
            earlier = *page;
            Frame::SendPage { request, slot, page: &lie }.encode(&mut out);
        }
        if client.write_all(&out).is_err() {
            return;
        }
        match server.read(buffer.space()) {
            Ok(count) if count > 0 => buffer.filled(count),
            _ => return,
        }
    }
}

/// In the guest: old versions of its own blocks, garbage, and pages of another file go to the port.
const GUEST_LIES: &str = "P=$(disk-by-serial remoca-port); cat /mnt/set/* > /tmp/old; \
    while ! [ -e /tmp/stop ]; do \
      dd if=/tmp/old of=$P bs=64k count=96 skip=$((RANDOM % 64)) seek=1 oflag=direct conv=notrunc; \
      dd if=/dev/urandom of=$P bs=64k count=32 seek=1 oflag=direct conv=notrunc; \
      dd if=/bin/busybox of=$P bs=64k count=8 seek=1 oflag=direct conv=notrunc; \
    done > /dev/null 2>&1";

/// Runs the guest with both liars. `Ok(Ok)`: every byte that it read was right; `Ok(Err)`: what it saw.
fn run(program: PathBuf, name: &str, more: &[&str]) -> Result<std::result::Result<(), String>> {
    let lab = Lab::open()?;
    let mut host = Host::new(program, "256M")?;
    let image = host.folder().join("data.img");
    // Large enough for blocks of 4 KiB: a small ext4 has smaller ones, whose pages are not blocks of the disk.
    store::sparse_image(&image, 768 << 20)?;
    store::format_ext4(&image)?;
    host.start_server()?;
    let liar = host.folder().join("liar.sock");
    lie_between(&liar, host.folder().join("memory.sock"))?;
    host.connect_to(&liar);
    host.start_process(&[Image { name: "data", path: image, options: "" }], "128M", more)?;
    let mut config = host.guest(&lab, name)?;
    // `/tmp/old` is in memory: the guest's cache gets what is left.
    config.memory_mib = 256;
    let mut guest = config.boot(&lab)?;
    guest.run("mount $(disk-by-serial data) /mnt", LIMIT)?;
    start_agent(&mut guest)?;
    guest.run("remoca-workload create --dir /mnt/set --files 1 --file-size 8M --seed 3", LIMIT)?;
    guest.run("remoca-workload create --dir /mnt/more --files 8 --file-size 24M --seed 4 && sync", LIMIT)?;
    guest.run(&format!("bash -c '{}' > /dev/null 2>&1 &", GUEST_LIES.replace('\'', "'\\''")), LIMIT)?;
    let work = "remoca-workload write-mix --dir /mnt/set --ratio 30 --record 16K --pattern rand --journal /tmp/j --count 1500 && \
        remoca-workload read-records --dir /mnt/more --record 96K --pattern rand --count 2500 && \
        remoca-workload verify --dir /mnt/set --journal /tmp/j && remoca-workload verify --dir /mnt/more";
    let output = guest.try_run(work, LIMIT)?;
    let _ = guest.try_run("touch /tmp/stop", LIMIT);
    let status = host.status()?;
    if !output.success() {
        return Ok(Err(output.text()));
    }
    assert!(status.counters["hit_blocks"] > 1000, "the cache was at work: {status:?}");
    assert!(status.counters["fetch_wrong"] > 100, "the server's lies were met: {status:?}");
    assert!(status.counters["evictions_unmatched"] > 100, "the guest's lies were met: {status:?}");
    Ok(Ok(()))
}

#[test]
fn no_lie_is_ever_served() -> Result<()> {
    run(remoca()?, "lies", &[])?.map_err(|seen| format!("wrong bytes were served: {seen}").into())
}

#[test]
fn without_the_check_at_fetch_the_servers_lies_reach_the_guest() -> Result<()> {
    let seen = run(remoca_ablation()?, "lies-fetch", &["--omit-rule", "fetch-check"])?;
    seen.err().map(drop).ok_or_else(|| "the test notices nothing without the check at fetch".into())
}

#[test]
fn without_the_check_at_admission_the_guests_lies_reach_it() -> Result<()> {
    let seen = run(remoca_ablation()?, "lies-admission", &["--omit-rule", "admission-check"])?;
    seen.err().map(drop).ok_or_else(|| "the test notices nothing without the check at admission".into())
}
