//! A guest whose disks come over NBD: through QEMU's client, together with the eviction port, and through the client
//! of the guest's own kernel. The memory server is killed, and so is the VM process: QEMU reconnects to the next one.

use remoca_guest_tests::{Host, LIMIT, Result, assert_kernel_is_content, remoca, start_agent, stop_agent};
use remoca_lab::{Guest, GuestConfig, Lab, store};
use remoca_store::testing::hold_port;
use serde_json::json;
use std::path::Path;

/// Attaches an export at a Unix socket as a virtio disk. QEMU waits for a server that disconnects.
fn over_qemu(config: &mut GuestConfig, socket: &Path, export: &str, serial: &str) {
    let server = json!({"type": "unix", "path": socket});
    let node = json!({"driver": "nbd", "node-name": export, "server": server, "export": export, "reconnect-delay": 60});
    let device = format!("virtio-blk-pci,drive={export},serial={serial}");
    config.qemu_args.extend(["-blockdev".into(), node.to_string(), "-device".into(), device]);
}

/// Adds a network with only the host's loopback, which the guest reaches at 10.0.2.2.
fn with_network(config: &mut GuestConfig) {
    let device = "virtio-net-pci,netdev=net,romfile=";
    config.qemu_args.extend(["-netdev", "user,id=net", "-device", device].map(str::to_owned));
}

/// Makes the guest's kernel attach the export, over two connections.
///
/// Linux receives from each connection in a work item that does not end, on a queue with a rescuer. If it cannot start a thread within
/// 10 ms, because the machine is busy, the rescuer takes all items of the queue, one after the other, and what comes on the second
/// connection stays in its socket for ever (seen with 6.1). Then the guest connects again.
fn over_kernel(guest: &mut Guest, port: u16, export: &str) -> Result<()> {
    let network = "modprobe virtio_net && modprobe nbd && link=$(ls /sys/class/net | grep -v lo | head -n 1) && \
                   busybox ip link set $link up && busybox ip addr add 10.0.2.15/24 dev $link";
    guest.run(network, LIMIT)?;
    for _ in 0..20 {
        // A kernel with two connections drops one whose answer is late: after 30 seconds, unless it is told otherwise.
        guest.run(&format!("nbd-client 10.0.2.2 {port} /dev/nbd0 -N {export} -C 2 -t 600"), LIMIT)?;
        let count = "receivers() { cat /proc/[0-9]*/comm | grep -c +nbd0-recv; }; \
                     for i in $(seq 50); do [ $(receivers) = 2 ] && break; sleep 0.1; done; receivers || true";
        if guest.run(count, LIMIT)?.trim() == "2" {
            return Ok(());
        }
        println!("the guest's kernel receives from one of two connections");
        guest.run("nbd-client -d /dev/nbd0", LIMIT)?;
    }
    Err("the guest's kernel never receives from both connections".into())
}

#[test]
fn a_guest_works_on_disks_that_come_over_nbd() -> Result<()> {
    let lab = Lab::open()?;
    let mut host = Host::new(remoca()?, "256M")?;
    host.without_port();
    let [data, extra] = ["data", "extra"].map(|name| host.folder().join(format!("{name}.img")));
    store::sparse_image(&data, 512 << 20)?;
    store::format_ext4(&data)?;
    store::sparse_image(&extra, 128 << 20)?;
    // Held, so that no other program takes it before the VM process, or between its two runs.
    let (_held, port) = hold_port();
    let socket = host.folder().join("nbd.sock");
    let arguments = [
        format!("--disk=image={},name=data", data.display()),
        format!("--disk=image={},name=extra", extra.display()),
        format!("--nbd=unix:{}", socket.display()),
        format!("--nbd=tcp:127.0.0.1:{port}"),
        "--nbd-port".into(),
        "--guest-memory=256M".into(),
        // The image is in the page cache. With hedging, the disk would rightly be preferred.
        "--no-hedge".into(),
    ];
    let arguments = arguments.each_ref().map(String::as_str);
    host.start_server()?;
    host.start_process(&[], "128M", &arguments)?;
    let mut config = host.guest(&lab, "nbd")?;
    over_qemu(&mut config, &socket, "data", "data");
    over_qemu(&mut config, &socket, "remoca-port", "remoca-port");
    with_network(&mut config);
    let mut guest = config.boot(&lab)?;

    // The files are larger than the guest's memory: the guest evicts, the agent reports, and the cache answers.
    guest.run("mount $(disk-by-serial data) /mnt", LIMIT)?;
    start_agent(&mut guest)?;
    guest.run("remoca-workload create --dir /mnt/set --files 2 --file-size 128M --seed 3 && sync", LIMIT)?;
    let status = host.wait_until("evicted pages bring hits", |status| {
        let _ = guest.run("cat /mnt/set/* > /dev/null", LIMIT);
        status.counters["evictions_admitted"] > 1000 && status.counters["hit_blocks"] > 1000
    })?;
    assert_eq!(status.cache.admission, "evictions");
    assert!(status.port.is_some_and(|port| port.nbd_clients == Some(1) && port.agent.is_some()));

    over_kernel(&mut guest, port, "extra")?;
    host.wait_until("the guest's kernel has two connections", |status| {
        status.disks.iter().map(|disk| disk.nbd_clients).eq([Some(1), Some(2)])
    })?;
    guest.run("mkfs.ext4 -q /dev/nbd0 && mkdir -p /tmp/extra && mount /dev/nbd0 /tmp/extra", LIMIT)?;
    host.kill_server()?;
    guest.run("remoca-workload create --dir /tmp/extra/set --files 8 --file-size 4M --seed 4 && sync", LIMIT)?;
    host.start_server()?;
    guest.run("umount /tmp/extra && fsck.ext4 -fn /dev/nbd0 && mount /dev/nbd0 /tmp/extra", LIMIT)?;
    guest.run("remoca-workload verify --dir /tmp/extra/set && umount /tmp/extra && nbd-client -d /dev/nbd0", LIMIT)?;

    // For QEMU, the next process is a new server. QEMU repeats unanswered requests.
    guest.run(
        "remoca-workload create --dir /mnt/more --files 16 --file-size 2M --seed 5 > /tmp/more.log 2>&1 & echo $! > /tmp/more.pid",
        LIMIT,
    )?;
    host.kill_process()?;
    host.start_process(&[], "128M", &arguments)?;
    guest.run("while kill -0 $(cat /tmp/more.pid) 2> /dev/null; do sleep 0.1; done; sync", LIMIT)?;
    guest.run("remoca-workload verify --dir /mnt/set && remoca-workload verify --dir /mnt/more", LIMIT)?;
    assert_kernel_is_content(&mut guest)?;
    stop_agent(&mut guest)?;
    guest.run("umount /mnt", LIMIT)?;
    guest.shut_down()?;
    host.stop_process()?;
    store::check_ext4(&data)?;
    store::check_ext4(&extra)?;
    Ok(())
}
