//! The units of the package under a real systemd, in a guest that is a host.

use remoca_guest_tests::installed::{
    FrontEnd, assert_active, boot, configure_host, configure_vm, former_package, kill, kill_quiet, packages,
    process_of, property, wait_for_status, wait_until_kept, wait_until_nothing_is_kept,
};
use remoca_guest_tests::{LIMIT, Result};
use remoca_lab::{Guest, Image, Lab, Output, Recipe};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const FRONT_END: (&str, &str) = ("front-end", env!("CARGO_BIN_EXE_front-end"));

/// Time limit for what a nested guest does, which is emulated twice.
const NESTED_LIMIT: Duration = Duration::from_secs(1200);

/// Boots a guest in which the package is installed, with a memory server.
fn host(name: &str) -> Result<Option<Guest>> {
    let folder = tempfile::tempdir()?;
    let [package, _] = packages(folder.path())?;
    let files = [("remoca.deb", package.as_path()), (FRONT_END.0, Path::new(FRONT_END.1))];
    let Some(mut guest) = boot(name, Recipe::bookworm_with_systemd(), &files)? else { return Ok(None) };
    guest.run("dpkg -i /payload/remoca.deb 2>&1", LIMIT)?;
    configure_host(&mut guest, "8M")?;
    Ok(Some(guest))
}

/// systemd keeps the connections of a front end that never connects again, and nothing of one that has gone.
#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_front_end_stays_connected_over_a_hundred_kills_under_systemd() -> Result<()> {
    const UNIT: &str = "remoca-disk@web1";
    let Some(mut guest) = host("kills")? else { return Ok(()) };
    configure_vm(&mut guest, "web1")?;
    guest.run(&format!("systemctl start {UNIT}"), LIMIT)?;
    let front_end = FrontEnd::start(&mut guest, "web1", "")?;
    wait_until_kept(&mut guest, "web1")?;
    let kept = property(&mut guest, UNIT, "NFileDescriptorStore")?;
    let (mut hits, mut cold) = (0, 0);
    for round in 0..100 {
        // Half of them with writes in flight.
        let status = if round % 2 == 0 { kill(&mut guest, "web1") } else { kill_quiet(&mut guest, "web1") }?;
        cold += u32::from(status["started"] != "warm");
        wait_until_kept(&mut guest, "web1")?;
        hits += status["counters"]["hit_blocks"].as_u64().unwrap_or(0);
        assert_eq!(property(&mut guest, UNIT, "NFileDescriptorStore")?, kept, "round {round}");
    }
    println!(
        "{}; {hits} blocks from the cache; {cold} of 50 cold with writes in flight",
        front_end.finish(&mut guest)?
    );
    assert!(hits > 100, "the cache is of use between the kills");
    wait_until_nothing_is_kept(&mut guest, "web1")?;

    // The front end goes while there is no process.
    let front_end = FrontEnd::start(&mut guest, "web1", "")?;
    wait_until_kept(&mut guest, "web1")?;
    let slow = "/run/systemd/system/remoca-disk@web1.service.d";
    guest.run(
        &format!(
            "mkdir -p {slow} && printf '[Service]\\nRestartSec=2s\\n' > {slow}/slow.conf && systemctl daemon-reload && \
             systemctl kill --signal=KILL {UNIT} && pkill -9 front-end"
        ),
        LIMIT,
    )?;
    front_end.wait_for_failure(&mut guest)?;
    wait_until_nothing_is_kept(&mut guest, "web1")?;
    Ok(guest.shut_down()?)
}

/// A hypervisor does nothing else while it waits for its disk. So what cannot start again closes its connections.
#[test]
#[ignore = "long: cargo xtask test-long"]
fn connections_are_closed_when_the_process_cannot_start_again() -> Result<()> {
    const UNIT: &str = "remoca-disk@web1";
    let Some(mut guest) = host("cannot-start")? else { return Ok(()) };
    configure_vm(&mut guest, "web1")?;
    let break_it = "echo nonsense >> /etc/remoca/vms/web1.toml";
    for (name, cause, repair) in [
        ("not executable", "chmod 644 /usr/bin/remoca", "chmod 755 /usr/bin/remoca"),
        ("no last good copy", "rm /run/remoca/web1.config", "sed -i /nonsense/d /etc/remoca/vms/web1.toml"),
    ] {
        guest.run(&format!("systemctl restart {UNIT}"), LIMIT)?;
        let front_end = FrontEnd::start(&mut guest, "web1", "")?;
        if name == "no last good copy" {
            wait_until_kept(&mut guest, "web1")?;
            guest.run(break_it, LIMIT)?;
            kill_quiet(&mut guest, "web1")?;
        }
        wait_until_kept(&mut guest, "web1")?;
        let process = process_of(&mut guest, UNIT)?;
        guest.run(&format!("{cause} && kill -9 {process}"), LIMIT)?;
        let said = front_end.wait_for_failure(&mut guest)?;
        assert!(said.contains("is lost"), "{name}: {said}");
        wait_until_nothing_is_kept(&mut guest, "web1")?;
        guest.run(repair, LIMIT)?;
    }
    guest.run(&format!("systemctl restart {UNIT}"), LIMIT)?;
    println!("{}", FrontEnd::start(&mut guest, "web1", "")?.finish(&mut guest)?);
    Ok(guest.shut_down()?)
}

/// A disk of a domain.
const DISK: &str = "<disk type='vhostuser' device='disk'><source type='unix' path='/run/remoca/web1.sock'/></disk>";

/// Runs the hook as libvirt does, for a domain with these devices.
fn hook(guest: &mut Guest, arguments: &str, devices: &str) -> Result<Output> {
    let domain = format!("<domain type=\"kvm\"><name>web1</name><devices>{devices}</devices></domain>");
    let script = format!("cat << 'END' | /etc/libvirt/hooks/qemu.d/remoca {arguments}\n{domain}\nEND");
    Ok(guest.try_run(&script, LIMIT)?)
}

fn the_hook_starts_the_disks(guest: &mut Guest) -> Result<()> {
    const UNIT: &str = "remoca-disk@web1";
    configure_vm(guest, "web1")?;
    for (arguments, devices) in [("web1 prepare begin -", "<disk type='file'/>"), ("web1 release end -", DISK)] {
        let output = hook(guest, arguments, devices)?;
        assert!(output.success(), "{arguments}: {output:?}");
        assert_eq!(process_of(guest, UNIT)?, 0, "{arguments} {devices}");
    }
    let output = hook(guest, "other prepare begin -", DISK)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.success() && said.contains("other names /run/remoca/web1.sock, which no process serves"), "{said}");
    assert_eq!(process_of(guest, UNIT)?, 0, "another name than that of its file");
    // What fails, and what the message must name: to libvirt's user it is all there is.
    for (fault, repair, words) in [
        ("mv /srv/web1.img /srv/away", "mv /srv/away /srv/web1.img", "/srv/web1.img"),
        ("echo sizes=1 >> /etc/remoca/vms/web1.toml", "sed -i /sizes/d /etc/remoca/vms/web1.toml", "web1.toml:"),
    ] {
        guest.run(fault, LIMIT)?;
        let output = hook(guest, "web1 prepare begin -", DISK)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        println!("{said}");
        assert!(
            !output.success() && said.contains("the disks of web1 did not start") && said.contains(words),
            "{said}"
        );
        guest.run(repair, LIMIT)?;
    }
    let output = hook(guest, "web1 prepare begin -", DISK)?;
    assert!(output.success(), "{output:?}");
    assert_active(guest, UNIT)?;
    let process = process_of(guest, UNIT)?;
    let front_end = FrontEnd::start(guest, "web1", "")?;
    assert!(hook(guest, "web1 prepare begin -", DISK)?.success());
    assert!(hook(guest, "web1 release end -", DISK)?.success());
    assert_eq!(process_of(guest, UNIT)?, process, "it has a guest");
    println!("{}", front_end.finish(guest)?);

    wait_until_detached(guest, "web1")?;
    assert!(hook(guest, "web1 prepare begin -", DISK)?.success());
    let status = wait_for_status(guest, "web1", "the process answers", |_| true)?;
    assert_ne!(process_of(guest, UNIT)?, process, "without a guest it is started again");
    assert_eq!(status["started"], "warm", "{}", status["cold_reason"]);
    guest.run("rm /srv/web1.img && truncate -s 24M /srv/web1.img", LIMIT)?;
    assert!(hook(guest, "web1 prepare begin -", DISK)?.success());
    wait_for_status(guest, "web1", "it serves the new image", |status| status["disks"][0]["bytes"] == 24u64 << 20)?;

    // Without its file it starts with the last good copy, and without both not at all.
    let (away, back) = ("mv /etc/remoca/vms/web1.toml /srv/", "mv /srv/web1.toml /etc/remoca/vms/");
    guest.run(&format!("{away} && systemctl restart {UNIT} && {back} && systemctl reload {UNIT}"), LIMIT)?;
    guest.run("! systemctl start remoca-disk@nobody", LIMIT)?;
    Ok(())
}

/// Waits until no front end is attached to the first disk and the port.
fn wait_until_detached(guest: &mut Guest, vm: &str) -> Result<()> {
    let has_gone = |status: &Value| status["disks"][0]["attached"] == false && status["port"]["attached"] == false;
    wait_for_status(guest, vm, "the guest has gone", has_gone).map(drop)
}

/// Upgrades three VMs, one after the other, and stops at the one that fails.
fn upgrade_all(guest: &mut Guest) -> Result<()> {
    const VMS: [&str; 3] = ["web1", "web2", "web3"];
    for vm in &VMS[1..] {
        configure_vm(guest, vm)?;
        guest.run(&format!("systemctl start remoca-disk@{vm}"), LIMIT)?;
    }
    let processes = |guest: &mut Guest| -> Result<Vec<u32>> {
        VMS.iter().map(|vm| process_of(guest, &format!("remoca-disk@{vm}"))).collect()
    };
    let front_end = FrontEnd::start(guest, "web3", "")?;
    let before = processes(guest)?;
    let said = guest.run("remoca upgrade --all", LIMIT)?;
    assert!(said.contains("3 of 3 upgraded: web1, web2, web3"), "{said}");
    guest.run("echo nonsense >> /etc/remoca/vms/web2.toml", LIMIT)?;
    let failed = guest.try_run("remoca upgrade --all 2>&1", LIMIT)?;
    let words = "the upgrade of web2 failed. Done before it: web1. Not begun: web3";
    assert!(!failed.success() && failed.text().contains(words), "{failed:?}");
    guest.run("sed -i /nonsense/d /etc/remoca/vms/web2.toml && remoca upgrade --all", LIMIT)?;
    assert_eq!(processes(guest)?, before);

    let server = guest.run("remoca status --server", LIMIT)?;
    println!("{server}");
    let clients = server.lines().filter(|line| line.contains(" yes ")).count();
    assert_eq!(clients, VMS.len(), "{server}");
    guest.run("remoca status --server --output json", LIMIT)?;
    println!("{}", front_end.finish(guest)?);
    Ok(())
}

/// A stop with a guest attached is logged, and can be forbidden.
fn stop_with_a_guest(guest: &mut Guest) -> Result<()> {
    const UNIT: &str = "remoca-disk@web2";
    let front_end = FrontEnd::start(guest, "web2", "")?;
    let drop_in = "/etc/systemd/system/remoca-disk@web2.service.d";
    let forbid = format!("mkdir -p {drop_in} && printf '[Unit]\\nRefuseManualStop=yes\\n' > {drop_in}/override.conf");
    guest.run(&format!("{forbid} && systemctl daemon-reload"), LIMIT)?;
    for command in ["stop", "restart"] {
        let refused = guest.try_run(&format!("systemctl {command} {UNIT} 2>&1"), LIMIT)?;
        assert!(!refused.success() && refused.text().contains("Operation refused"), "{refused:?}");
    }
    guest.run(&format!("systemctl reload {UNIT} && systemctl revert {UNIT} && systemctl stop {UNIT}"), LIMIT)?;
    let log = guest.run(&format!("journalctl --sync; journalctl --unit {UNIT} --lines 20"), LIMIT)?;
    assert!(log.contains("told to end with a guest attached to root: its disks hang"), "{log}");
    assert!(front_end.wait_for_failure(guest)?.contains("is lost"));
    wait_until_nothing_is_kept(guest, "web2")
}

/// Shuts the host down under a guest. libvirt-guests ends guests, and only then do their disks end.
fn shut_down_with_a_guest(mut guest: Guest) -> Result<()> {
    let order = property(&mut guest, "remoca-disk@web1", "Before")?;
    for unit in ["libvirtd.service", "virtqemud.service", "libvirt-guests.service"] {
        assert!(order.split(' ').any(|other| other == unit), "{order}");
    }
    let stop = "touch /run/front-end-web1-ends; while pidof front-end; do sleep 0.1; done; \
                echo \"guests are down, their disks are $(systemctl is-active remoca-disk@web1)\" > /dev/console";
    let units = [
        (
            "libvirt-guests.service",
            format!(
                "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\nExecStop=/bin/sh -c '{stop}'\n"
            ),
        ),
        (
            "remoca-disk@web1.service.d/tell.conf",
            "[Service]\nExecStopPost=/bin/sh -c 'journalctl --unit remoca-disk@web1 --lines 20 > /dev/console; \
             echo \"the disks are down\" > /dev/console'\n"
                .into(),
        ),
    ];
    guest.run("mkdir -p /etc/systemd/system/remoca-disk@web1.service.d", LIMIT)?;
    for (name, text) in units {
        guest.put(&format!("/etc/systemd/system/{name}"), text.as_bytes())?;
    }
    guest.run("systemctl daemon-reload && systemctl start libvirt-guests", LIMIT)?;
    // Debian 12 has it after their sockets alone, so that they end before it has asked them for anything.
    let order = property(&mut guest, "libvirt-guests", "After")?;
    for unit in ["libvirtd.service", "virtqemud.service"] {
        assert!(order.split(' ').any(|other| other == unit), "{order}");
    }
    let _front_end = FrontEnd::start(&mut guest, "web1", "")?;
    // The guest may be down before it answers.
    let _ = guest.run("systemctl --no-block poweroff", LIMIT);
    let line = guest.wait_for_console("guests are down", LIMIT)?;
    assert!(line.contains("their disks are active"), "{line}");
    guest.wait_for_console("the disks are down", LIMIT)?;
    let said = guest.console().tail(100);
    assert!(!said.contains("told to end with a guest attached"), "{said}");
    guest.wait_for_end(Duration::from_secs(120))?;
    Ok(())
}

/// What docs/operate.md says about a host with several VMs.
#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_host_starts_upgrades_and_stops_its_vms_as_documented() -> Result<()> {
    let Some(mut guest) = host("operate")? else { return Ok(()) };
    the_hook_starts_the_disks(&mut guest)?;
    upgrade_all(&mut guest)?;
    stop_with_a_guest(&mut guest)?;
    shut_down_with_a_guest(guest)
}

/// Returns how the process of a VM started, and whether its disk would keep the guest after a crash.
fn started(status: &serde_json::Value) -> (&str, bool) {
    (status["started"].as_str().unwrap_or_default(), status["disks"][0]["outlives_crash"] == true)
}

/// Installs the former package for a while: its program is refused, since it would not keep the guest connected.
fn the_former_package_comes_back(guest: &mut Guest, front_end: &FrontEnd) -> Result<()> {
    const UNIT: &str = "remoca-disk@web1";
    let (process, reconnects) = (process_of(guest, UNIT)?, front_end.reconnects(guest)?);
    guest.run(
        "apt-get install --yes --allow-downgrades /payload/former.deb 2>&1 && remoca --version | grep 0.1.0",
        LIMIT,
    )?;
    let output = guest.try_run(&format!("systemctl reload {UNIT}; journalctl --unit {UNIT} --lines 20"), LIMIT)?;
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(process_of(guest, UNIT)?, process);
    guest.run("apt-get install --yes /payload/remoca.deb 2>&1 && remoca upgrade web1", LIMIT)?;
    assert_eq!((process_of(guest, UNIT)?, front_end.reconnects(guest)?), (process, reconnects));
    Ok(())
}

/// The first package had files of arguments, and its programs keep no connections. Guests reconnect at the first upgrade or
/// crash, and never again once a process was started by the new unit.
#[test]
#[ignore = "long: cargo xtask test-long"]
fn the_first_package_is_upgraded_under_running_guests() -> Result<()> {
    const UNITS: [&str; 4] = ["remoca-serve", "remoca-disk@web1", "remoca-disk@web2", "remoca-disk@odd"];
    let Some(former) = former_package("310d9c7")? else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let [package, _] = packages(folder.path())?;
    let files = [("former.deb", former.as_path()), ("remoca.deb", &package), (FRONT_END.0, Path::new(FRONT_END.1))];
    let Some(mut guest) = boot("former-package", Recipe::bookworm_with_systemd(), &files)? else { return Ok(()) };
    guest.run("dpkg -i /payload/former.deb 2>&1 && mkdir -p /etc/remoca", LIMIT)?;
    let disk = |vm: &str| {
        format!(
            "REMOCA_DISK_ARGS=--server unix:/run/remoca-serve/s --cache 8M --no-hedge --port /run/remoca/{vm}-port.sock \
             --disk image=/srv/{vm}.img,socket=/run/remoca/{vm}.sock,name=root\n"
        )
    };
    for (name, text) in [
        ("serve", "REMOCA_SERVE_ARGS=--listen unix:/run/remoca-serve/s --memory 32M\n".to_owned()),
        ("web1", disk("web1")),
        ("web2", disk("web2")),
        ("odd", format!("REMOCA_LOG=info\n{}", disk("odd"))),
    ] {
        guest.put(&format!("/etc/remoca/{name}.env"), text.as_bytes())?;
    }
    guest.run(
        &format!("truncate -s 16M /srv/web1.img /srv/web2.img /srv/odd.img && systemctl start {}", UNITS.join(" ")),
        LIMIT,
    )?;
    let processes =
        |guest: &mut Guest| UNITS.into_iter().map(|unit| process_of(guest, unit)).collect::<Result<Vec<_>>>();
    let front_ends =
        [FrontEnd::start(&mut guest, "web1", "reconnect")?, FrontEnd::start(&mut guest, "web2", "reconnect")?];
    let before = processes(&mut guest)?;

    let said = guest.run("apt-get install --yes /payload/remoca.deb 2>&1", LIMIT)?;
    println!("{said}");
    for words in [
        "web1.env: converted",
        "web2.env: converted",
        "serve.env: converted",
        "odd.env cannot be converted",
        "REMOCA_LOG has no place",
        "remoca-disk@odd goes on with the arguments in /etc/remoca/odd.env",
        "still run the former version: remoca-disk@odd.service remoca-disk@web1.service remoca-disk@web2.service remoca-serve.service",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert_eq!(processes(&mut guest)?, before);
    guest.run("remoca config check && test -e /etc/remoca/odd.env && ! test -e /etc/remoca/web1.env", LIMIT)?;
    for front_end in &front_ends {
        assert_eq!(front_end.reconnects(&mut guest)?, 0);
    }

    // Upgraded in place, as the documentation says. It keeps the environment of the former unit, without a descriptor store.
    guest.run("systemctl reload remoca-disk@web1", LIMIT)?;
    assert_eq!(process_of(&mut guest, UNITS[1])?, before[1]);
    assert_eq!(front_ends[0].reconnects(&mut guest)?, 2, "the disk and the port");
    guest.run("remoca upgrade web1", LIMIT)?;
    assert_eq!(front_ends[0].reconnects(&mut guest)?, 2, "this program keeps them");
    let status = kill_quiet(&mut guest, "web1")?;
    println!("web1, killed after its upgrade: {:?}", started(&status));
    assert_eq!(front_ends[0].reconnects(&mut guest)?, 4);
    // Killed before any upgrade.
    let status = kill(&mut guest, "web2")?;
    println!("web2, killed as the former program: {:?}", started(&status));
    assert_eq!(front_ends[1].reconnects(&mut guest)?, 2);
    for (vm, front_end, reconnects) in [("web1", &front_ends[0], 4), ("web2", &front_ends[1], 2)] {
        wait_until_kept(&mut guest, vm)?;
        kill(&mut guest, vm)?;
        wait_until_kept(&mut guest, vm)?;
        kill_quiet(&mut guest, vm)?;
        assert_eq!(front_end.reconnects(&mut guest)?, reconnects, "{vm}");
    }
    the_former_package_comes_back(&mut guest, &front_ends[0])?;
    guest.run("systemctl kill --signal=KILL remoca-disk@odd", LIMIT)?;
    guest.run("until remoca status odd; do sleep 0.1; done", LIMIT)?;
    guest.run("systemctl restart remoca-serve && remoca status --server", LIMIT)?;
    for front_end in front_ends {
        println!("{}", front_end.finish(&mut guest)?);
    }
    Ok(guest.shut_down()?)
}

/// First program of a guest within the guest: writes a disk and reads it back, for ever.
const NESTED_INIT: &str = r#"#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t devtmpfs dev /dev
$b mkdir /tmp
for module in /modules/*virtio*; do $b insmod $module; done
until [ -b /dev/vda ]; do $b usleep 10000; done
round=0
while true; do
    round=$((round + 1))
    $b yes "round $round" | $b head -c 1048576 > /tmp/written
    $b dd if=/tmp/written of=/dev/vda bs=64k oflag=direct conv=fsync 2> /tmp/said &&
        $b dd if=/dev/vda bs=64k count=16 iflag=direct 2>> /tmp/said | $b cmp - /tmp/written &&
        echo "round $round is whole" || { $b cat /tmp/said; echo "round $round FAILED"; }
done
"#;

/// Returns an initramfs in `folder` whose first program is [`NESTED_INIT`]: the kernel unpacks one archive over the other.
fn nested_initramfs(image: &Image, folder: &Path) -> Result<PathBuf> {
    let (init, path) = (folder.join("init"), folder.join("nested-initramfs"));
    std::fs::write(&init, NESTED_INIT)?;
    let script = format!(
        "chmod 755 init && {{ cat {}; echo init | cpio --quiet -o -H newc; }} > {}",
        image.initramfs().display(),
        path.display()
    );
    let made = Command::new("sh").current_dir(folder).args(["-c", &script]).status()?;
    if made.success() { Ok(path) } else { Err("the nested initramfs cannot be made".into()) }
}

/// Waits until the nested guest has verified two more rounds, so that at least one began after this call.
fn wait_for_nested_rounds(guest: &mut Guest) -> Result<()> {
    let rounds = "$(grep -c whole /tmp/nested.log)";
    let wait = format!(
        "before={rounds}; until [ {rounds} -ge $((before + 2)) ]; do sleep 1; done; ! grep FAILED /tmp/nested.log"
    );
    guest.run(&wait, NESTED_LIMIT).map_err(|error| {
        format!(
            "{error}; nested console: {:?}",
            guest.fetch("/tmp/nested.log").map(|log| String::from_utf8_lossy(&log).into_owned())
        )
    })?;
    Ok(())
}

/// A real QEMU that does not reconnect, in the guest that is the host.
fn a_hypervisor_stays_connected(guest: &mut Guest) -> Result<()> {
    configure_vm(guest, "web1")?;
    guest.run("systemctl start remoca-disk@web1", LIMIT)?;
    let qemu = "qemu-system-x86_64 -accel tcg,tb-size=48 -cpu max -machine q35,memory-backend=mem -smp 2 -m 128 -nodefaults \
                -display none -no-reboot -serial file:/tmp/nested.log -kernel /payload/kernel -initrd /payload/nested-initramfs \
                -append 'console=ttyS0 quiet panic=-1 tsc=reliable' -object memory-backend-memfd,id=mem,size=128M,share=on \
                -chardev socket,id=d0,path=/run/remoca/web1.sock -device vhost-user-blk-pci,chardev=d0";
    guest.run(&format!("touch /tmp/nested.log; {qemu} > /tmp/qemu.log 2>&1 & echo $! > /run/qemu.pid"), LIMIT)?;
    wait_for_nested_rounds(guest)?;
    for _ in 0..3 {
        wait_for_status(guest, "web1", "the connection is kept", |status| {
            status["disks"][0]["outlives_crash"] == true
        })?;
        let status = kill(guest, "web1")?;
        println!("killed under a nested QEMU: {:?} {}", started(&status), status["cold_reason"]);
        wait_for_nested_rounds(guest)?;
    }
    println!("{}", guest.run("tail -n 1 /tmp/nested.log", LIMIT)?);
    guest.run("! grep -v -e 'is whole$' /tmp/nested.log | grep -i -e error", LIMIT)?;
    assert_ne!(property(guest, "remoca-disk@web1", "NFileDescriptorStore")?, "0");
    guest.run("kill -9 $(cat /run/qemu.pid)", LIMIT)?;
    wait_until_nothing_is_kept(guest, "web1")
}

/// A qcow2 image behind its unit, which is killed, and stopped with that of the VM.
fn a_qcow2_image_is_served(guest: &mut Guest) -> Result<()> {
    let text = "version = 1\nport = '/run/remoca/web2-port.sock'\n[[disk]]\nname = 'root'\nformat = 'qcow2'\n\
                image = '/srv/web2.qcow2'\nsocket = '/run/remoca/web2.sock'\n";
    guest.put("/etc/remoca/vms/web2.toml", text.as_bytes())?;
    guest.run("remoca config check && qemu-img create -q -f qcow2 /srv/web2.qcow2 16M", LIMIT)?;
    guest.run("systemctl enable --now remoca-qcow2@web2 && systemctl start remoca-disk@web2", LIMIT)?;
    let order = property(guest, "remoca-qcow2@web2", "Before")?;
    assert!(order.split(' ').any(|unit| unit == "remoca-disk@web2.service"), "{order}");
    let front_end = FrontEnd::start(guest, "web2", "")?;
    // Between two writes that are flushed: what is not would be lost, and the guest be told.
    guest.run("touch /run/front-end-web2-ends.quiet && sleep 1", LIMIT)?;
    let flushes = |status: &serde_json::Value| status["counters"]["flushes"].as_u64().unwrap_or(0);
    let before = wait_for_status(guest, "web2", "the process answers", |_| true)?;
    wait_for_status(guest, "web2", "all is flushed", |status| flushes(status) > flushes(&before) + 1)?;
    let process = process_of(guest, "remoca-qcow2@web2")?;
    guest.run(&format!("kill -9 {process}"), LIMIT)?;
    guest.run("until pidof qemu-nbd; do sleep 0.1; done", LIMIT)?;
    println!("{}", front_end.finish(guest)?);
    // Its image is replaced before the next guest: qemu-nbd is part of the unit that the hook restarts.
    wait_until_detached(guest, "web2")?;
    guest.run("rm /srv/web2.qcow2 && qemu-img create -q -f qcow2 /srv/web2.qcow2 24M", LIMIT)?;
    assert!(hook(guest, "web2 prepare begin -", &DISK.replace("web1", "web2"))?.success());
    let status = wait_for_status(guest, "web2", "the process answers", |_| true)?;
    assert_eq!((&status["disks"][0]["bytes"], &status["disks"][0]["failed_flush"]), (&json!(24 << 20), &Value::Null));
    guest.run("systemctl stop remoca-disk@web2 && ! systemctl is-active remoca-qcow2@web2 && qemu-img check -q /srv/web2.qcow2", LIMIT)?;
    // Wrong configuration: it says so, and is not tried for ever.
    guest.run("sed -i s/qcow2/raw/ /etc/remoca/vms/web2.toml && ! systemctl start remoca-qcow2@web2", LIMIT)?;
    guest.run("journalctl --unit remoca-qcow2@web2 | grep 'no disk of web2 has format = \"qcow2\"'", LIMIT)?;
    guest.run("until systemctl is-failed remoca-qcow2@web2; do sleep 0.1; done", LIMIT)?;
    Ok(())
}

/// With QEMU's packages in the guest.
#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_nested_qemu_and_a_qcow2_image_are_served_under_systemd() -> Result<()> {
    let lab = Lab::open()?;
    let recipe = Recipe::bookworm_with_systemd().with(&["qemu-system-x86", "qemu-utils"]);
    let image = Image::ensure(&lab, &recipe)?;
    let folder = tempfile::tempdir()?;
    let [package, _] = packages(folder.path())?;
    let initramfs = nested_initramfs(&image, folder.path())?;
    let kernel = image.kernel();
    let files = [
        ("remoca.deb", package.as_path()),
        (FRONT_END.0, Path::new(FRONT_END.1)),
        ("kernel", &kernel),
        ("nested-initramfs", &initramfs),
    ];
    let Some(mut guest) = boot("nested", recipe, &files)? else { return Ok(()) };
    guest.run("dpkg -i /payload/remoca.deb 2>&1", LIMIT)?;
    configure_host(&mut guest, "8M")?;
    a_qcow2_image_is_served(&mut guest)?;
    a_hypervisor_stays_connected(&mut guest)?;
    Ok(guest.shut_down()?)
}
