//! Errors that keep the agent from starting: each with its message and exit code. No wrong disk is ever written to.

#![allow(clippy::unwrap_used, reason = "the helpers are part of the tests")]

mod support;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use remoca_lab::{Disk, Guest, Lab};
use support::blocks::BlockSet;
use support::port::TestPort;
use support::{LIMIT, guest, start_agent, stop_agent};

/// Makes a file of 1 MiB that begins with the given magic text and version.
fn disk_image(folder: &Path, name: &str, magic: &[u8], version: u32) -> Disk {
    let path = folder.join(name);
    fs::write(&path, vec![0x5a; 1 << 20]).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(magic, 0).unwrap();
    file.write_all_at(&version.to_le_bytes(), 8).unwrap();
    Disk::file(name, &path)
}

/// Runs the agent, which must end by itself with this exit code and this text on standard error.
fn expect_refusal(guest: &mut Guest, command: &str, code: i32, text: &str) {
    let output = guest.try_run(command, LIMIT).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status, code, "`{command}` said {said}");
    assert!(said.contains(text), "`{command}` said {said}, not {text:?}");
}

#[test]
fn agent_refuses_to_start_with_a_reason_and_an_exit_code() {
    let lab = Lab::open().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let port = TestPort::start(BlockSet::default());
    let mut config = guest(&lab, "agent-refusals");
    let disks = [
        // A valid identification page on a disk with another name, and disks with the right name but no valid page.
        disk_image(folder.path(), "other-serial", b"REMOCAEP", 1),
        Disk { serial: "remoca-port".to_owned(), ..disk_image(folder.path(), "no-page", b"not that", 1) },
        Disk { serial: "remoca-port".to_owned(), ..disk_image(folder.path(), "version-2", b"REMOCAEP", 2) },
    ];
    let contents: Vec<_> = ["other-serial", "no-page", "version-2"]
        .map(|name| folder.path().join(name))
        .map(|path| (path.clone(), fs::read(&path).unwrap()))
        .to_vec();
    for disk in disks {
        config = config.disk(disk);
    }
    config.qemu_args = port.qemu_args();
    let mut guest = config.boot(&lab).unwrap();

    // The disks appear in the given order: root, payload, these, and the port.
    expect_refusal(&mut guest, "remoca-agent --port /dev/vdc", 6, "its serial number is \"other-serial\"");
    expect_refusal(&mut guest, "remoca-agent --port /dev/vdd", 6, "not the identification page");
    expect_refusal(&mut guest, "remoca-agent --port /dev/vde", 7, "the port speaks version 2, this agent version 1");
    expect_refusal(&mut guest, "remoca-agent --port /dev/vdz", 5, "/dev/vdz: No such file");
    expect_refusal(&mut guest, "remoca-agent --port /dev/null", 6, "no block device");
    // A disk that was unplugged while it is looked at has a node, and no facts. It may be plugged in again.
    guest.run("mknod /dev/gone b 252 4095", LIMIT).unwrap();
    expect_refusal(&mut guest, "remoca-agent --port /dev/gone", 5, "/dev/gone was unplugged");
    let waiting = "remoca-agent --wait --port /dev/gone > /run/log 2>&1 & agent=$!
                   until grep -q 'waiting for one' /run/log; do sleep 0.05; done; kill -TERM $agent; wait $agent";
    assert_eq!(guest.try_run(waiting, LIMIT).unwrap().status, 0);
    expect_refusal(&mut guest, "remoca-agent --ring 3M", 2, "not a power of two");

    // Of three disks with the right name, the agent uses the one that is a port; and a second agent is refused.
    start_agent(&mut guest, "remoca-agent");
    assert!(guest.run("cat /run/agent.log", LIMIT).unwrap().contains("/dev/vdf"));
    expect_refusal(&mut guest, "remoca-agent --port /dev/vdf", 8, "/dev/vdf is in use");
    assert_eq!(stop_agent(&mut guest).0, "0");
    guest.run("remoca-agent check --port /dev/vdf", LIMIT).unwrap();

    // With the capabilities that the systemd unit leaves it, the agent has all that it needs.
    let unit = include_str!("../../../packaging/remoca-agent.service");
    let held = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    let held = held.to_lowercase().replace("cap_", "+").replace(' ', ",");
    start_agent(&mut guest, &format!("setpriv --bounding-set -all,{held} remoca-agent"));
    let (code, said) = stop_agent(&mut guest);
    assert!(code == "0" && !said.contains("warning"), "{said}");

    let as_nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups remoca-agent";
    expect_refusal(&mut guest, as_nobody, 4, "lacks CAP_BPF and CAP_PERFMON");
    let without_btf =
        "mount -t tmpfs none /sys/kernel/btf && remoca-agent; code=$?; umount /sys/kernel/btf; exit $code";
    expect_refusal(&mut guest, without_btf, 3, "/sys/kernel/btf/vmlinux is missing");
    let unlocked = "ulimit -l 64; setpriv --bounding-set -ipc_lock remoca-agent --port /dev/vdf";
    expect_refusal(&mut guest, unlocked, 10, "memory cannot be locked");
    let hidden =
        "sysctl -q kernel.kptr_restrict=2; remoca-agent; code=$?; sysctl -q kernel.kptr_restrict=0; exit $code";
    expect_refusal(&mut guest, hidden, 4, "kernel.kptr_restrict");

    // Where tracing is switched off, the kernel lets the program attach and does not call it. The agent stays, and says so.
    guest.run("sysctl -q kernel.ftrace_enabled=0", LIMIT).unwrap();
    let check = "remoca-agent check --port /dev/vdf >&2";
    expect_refusal(&mut guest, check, 1, "`sysctl kernel.ftrace_enabled=1` switches it on");
    start_agent(&mut guest, "remoca-agent --port /dev/vdf");
    let until = |text: &str| format!("until grep -q '{text}' /run/agent.log; do sleep 0.05; done");
    guest.run(&until("warning: nothing is captured: the tracing of kernel functions is switched off"), LIMIT).unwrap();
    guest.run("sysctl -q kernel.ftrace_enabled=1", LIMIT).unwrap();
    guest.run(&until("is on again, and pages are captured"), LIMIT).unwrap();
    assert_eq!(stop_agent(&mut guest).0, "0");

    // Last, because it cannot be undone.
    guest.run("mount -t securityfs securityfs /sys/kernel/security", LIMIT).unwrap();
    guest.run("echo confidentiality > /sys/kernel/security/lockdown", LIMIT).unwrap();
    expect_refusal(&mut guest, "remoca-agent --port /dev/vdf", 9, "The kernel is locked down");
    guest.shut_down().unwrap();

    for (path, content) in contents {
        assert!(fs::read(&path).unwrap() == content, "{} was written to", path.display());
    }
}

/// Tests that in a guest without a port the agent says so, or waits for one if asked to.
#[test]
fn guest_without_a_port() {
    let lab = Lab::open().unwrap();
    let mut guest = guest(&lab, "agent-no-port").boot(&lab).unwrap();
    expect_refusal(&mut guest, "remoca-agent", 5, "no disk of this VM has the serial number remoca-port");
    expect_refusal(&mut guest, "remoca-agent check", 5, "no disk of this VM has the serial number remoca-port");
    let waiting = "remoca-agent --wait > /run/log 2>&1 & agent=$!
                   until grep -q 'waiting for one' /run/log; do sleep 0.05; done; kill -TERM $agent; wait $agent";
    assert_eq!(guest.try_run(waiting, LIMIT).unwrap().status, 0);
    guest.shut_down().unwrap();
}
