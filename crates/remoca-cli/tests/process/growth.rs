//! Images that become larger or smaller while a guest uses them: what the guest is told and may do, and what stays warm.

use super::support::machine::{Machine, Setup};
use super::support::model::BLOCK;
use super::support::program::{Program, REMOCA, Serve, command, run, run_command, status};
use super::support::{expect_rescanned, folder, wait_until};
use remoca_frontend::testing::Command;
use remoca_protocol::control::DiskStatus;
use std::fs::File;
use std::os::unix::net::UnixStream;

const MIB: usize = 1 << 20;
/// Status byte of a request that failed.
const FAILED: u8 = 1;

fn machine(setup: Setup) -> (Serve, Machine) {
    let folder = folder();
    let server = Serve::start(folder.path(), "64M");
    let setup = Setup { server: Some(server.address.clone()), ..setup };
    let mut machine = Machine::start_in(folder, setup);
    machine.disks.iter_mut().for_each(|disk| disk.guest.listen().unwrap());
    machine.run_until_hits(50);
    (server, machine)
}

/// Gives the image of a disk, and its model, another size.
fn resize(machine: &mut Machine, disk: usize, bytes: usize) {
    let disk = &mut machine.disks[disk];
    File::options().write(true).open(&disk.image).unwrap().set_len(bytes as u64).unwrap();
    disk.model.resize(bytes);
}

/// Says `remoca disk rescan`, and returns what it found.
#[track_caller]
fn rescan(machine: &Machine) -> String {
    let said = run(&["disk", "rescan", machine.control().to_str().unwrap()]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    String::from_utf8(said.stdout).unwrap()
}

fn disk(machine: &Machine, disk: usize) -> DiskStatus {
    machine.status().disks.swap_remove(disk)
}

/// Lets disk 0 grow to `bytes`, and by a block more each time that the process has noticed it before `rescan` was said. Returns the size
/// that `rescan` found first.
#[track_caller]
fn grow_until_told(machine: &mut Machine, bytes: usize) -> usize {
    for bytes in (bytes..).step_by(BLOCK).take(20) {
        let before = machine.disks[0].model.bytes.len();
        resize(machine, 0, bytes);
        let said = rescan(machine);
        expect_rescanned(&said, "disk0", bytes, before, "");
        assert!(said.lines().nth(1).is_some_and(|line| line.ends_with("bytes, as before")), "{said}");
        if said.starts_with(&format!("disk0: {bytes} bytes now")) {
            return bytes;
        }
    }
    panic!("`rescan` never found anything new");
}

/// The first time it is noticed by itself, then after an upgrade, then when the operator says so.
#[test]
fn what_grows_under_load_is_larger_for_the_guest_at_once_and_stays_warm() {
    let (_server, mut machine) = machine(Setup { sectors: vec![512, 4096], seed: 171, ..Setup::default() });
    for (mut bytes, step) in [(12 * MIB, "by itself"), (14 * MIB + BLOCK, "after an upgrade"), (16 * MIB, "when told")]
    {
        let hits = machine.counter("hit_blocks");
        match step {
            "when told" => bytes = grow_until_told(&mut machine, bytes),
            _ => resize(&mut machine, 0, bytes),
        }
        machine.disks[0].guest.wait_for_change();
        assert_eq!(machine.disks[0].guest.capacity().unwrap(), bytes as u64, "{step}");
        assert_eq!(machine.disks[1].guest.capacity().unwrap(), 8 << 20);
        let status = disk(&machine, 0);
        assert_eq!((status.bytes, status.guest_sees_size, status.shrunk_from_bytes), (bytes as u64, true, None));
        // The last block of the new part, and random ones of all.
        let last = bytes - BLOCK..bytes;
        let data = machine.random.bytes(BLOCK);
        let written = machine.disks[0].guest.run(0, Command::Write { sector: (last.start / 512) as u64, data: &data });
        assert_eq!(written, 0);
        machine.disks[0].model.bytes[last].copy_from_slice(&data);
        machine.run_until_hits(50);
        assert!(machine.counter("hit_blocks") >= hits + 50, "the cache was not lost");
        if step == "by itself" {
            let said = run(&["upgrade", machine.control().to_str().unwrap()]);
            assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
            assert!(machine.disks[0].guest.is_connected());
            machine.pages_sent = machine.counter("evictions_reported");
        }
    }
    machine.settle();
    machine.program.kill();
    machine.restart();
    machine.pages_sent = 0;
    machine.disks[0].guest.wait_for_change();
    let status = machine.status();
    assert_eq!(status.started, "warm", "{}", machine.program.log());
    assert!(status.disks.iter().all(|disk| disk.cold_reason.is_none()), "{}", machine.program.log());
    assert_eq!(machine.disks[0].guest.capacity().unwrap(), machine.disks[0].model.bytes.len() as u64);
    machine.read_everything();
    machine.finish();
}

/// QEMU does not read the size when it connects again.
#[test]
fn what_grows_while_no_process_runs_is_told_when_the_guest_is_back() {
    let (_server, mut machine) = machine(Setup { seed: 175, ..Setup::default() });
    machine.program.kill();
    resize(&mut machine, 0, 10 * MIB);
    machine.restart();
    machine.pages_sent = 0;
    machine.disks[0].guest.wait_for_change();
    assert_eq!(machine.disks[0].guest.capacity().unwrap(), 10 << 20);
    machine.read_everything();
    machine.run_until_hits(20);
    machine.finish();
}

#[test]
fn a_smaller_image_is_reported_and_nothing_beyond_its_end_is_done() {
    let (_server, mut machine) = machine(Setup { seed: 172, ..Setup::default() });
    resize(&mut machine, 0, 6 * MIB);
    let said = rescan(&machine);
    let more = "; the image had 8M once: reads and writes beyond its end fail";
    expect_rescanned(&said, "disk0", 6 * MIB, 8 * MIB, more);
    assert!(machine.program.log().contains("has become smaller"), "{}", machine.program.log());
    let status = disk(&machine, 0);
    assert_eq!((status.bytes, status.shrunk_from_bytes), (6 << 20, Some(8 << 20)));
    let beyond = (7 * MIB / 512) as u64;
    let guest = &mut machine.disks[0].guest;
    guest.wait_for_change();
    assert_eq!(guest.capacity().unwrap(), 6 << 20);
    assert_eq!(guest.run(0, Command::Read { sector: beyond, length: 4096 }), FAILED);
    assert_eq!(guest.run(0, Command::Write { sector: beyond, data: &[1; 4096] }), FAILED);
    assert_eq!(guest.run(0, Command::Discard(&[(beyond, 8, 0)])), FAILED);
    machine.read_everything();
    let said = run(&["upgrade", machine.control().to_str().unwrap()]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    machine.pages_sent = machine.counter("evictions_reported");
    assert_eq!(disk(&machine, 0).shrunk_from_bytes, Some(8 << 20), "an upgrade does not make it whole");
    // What was cut off is empty when it comes back.
    resize(&mut machine, 0, 8 * MIB);
    rescan(&machine);
    machine.disks[0].guest.wait_for_change();
    assert_eq!(disk(&machine, 0).shrunk_from_bytes, None);
    machine.read_everything();
    machine.run_until_hits(20);
    machine.finish();
}

/// Whether a process ran when it became smaller or not, and however the process ended.
#[test]
fn a_killed_process_leaves_word_of_an_image_that_became_smaller() {
    let (_server, mut machine) = machine(Setup { seed: 176, ..Setup::default() });
    let again = |machine: &mut Machine| {
        machine.program.kill();
        machine.restart();
        machine.pages_sent = 0;
    };
    resize(&mut machine, 0, 6 * MIB);
    rescan(&machine);
    machine.disks[0].guest.wait_for_change();
    again(&mut machine);
    assert_eq!(disk(&machine, 0).shrunk_from_bytes, Some(8 << 20), "{}", machine.program.log());
    machine.program.kill();
    resize(&mut machine, 0, 4 * MIB);
    machine.restart();
    machine.pages_sent = 0;
    assert_eq!(disk(&machine, 0).shrunk_from_bytes, Some(8 << 20), "it became smaller twice");
    again(&mut machine);
    assert_eq!(disk(&machine, 0).shrunk_from_bytes, Some(8 << 20), "the size of now is no other");
    resize(&mut machine, 0, 8 * MIB);
    rescan(&machine);
    assert_eq!(disk(&machine, 0).shrunk_from_bytes, None);
    again(&mut machine);
    assert_eq!(disk(&machine, 0).shrunk_from_bytes, None, "it was made whole");
    machine.program.kill();
    resize(&mut machine, 0, 7 * MIB);
    machine.restart();
    machine.pages_sent = 0;
    assert_eq!(disk(&machine, 0).shrunk_from_bytes, Some(8 << 20), "no process saw it");
    machine.read_everything();
    machine.finish();
}

/// A hypervisor that passes no channel is told nothing; its next connection reads the new size.
#[test]
fn who_cannot_be_told_is_named() {
    let (_server, mut machine) = machine(Setup { seed: 173, ..Setup::default() });
    let socket = machine.disks[0].socket.clone();
    machine.disks[0].guest.stop_listening();
    machine.disks[0].guest.disconnect();
    machine.disks[0].guest.connect(&socket).unwrap();
    resize(&mut machine, 0, 9 * MIB + 512);
    let said = rescan(&machine);
    assert!(said.contains("its guest sees it when its hypervisor connects again"), "{said}");
    assert!(!disk(&machine, 0).guest_sees_size);
    let said = run(&["upgrade", machine.control().to_str().unwrap()]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    assert!(!disk(&machine, 0).guest_sees_size, "the guest is the same");
    machine.pages_sent = machine.counter("evictions_reported");
    machine.disks[0].guest.disconnect();
    machine.disks[0].guest.connect(&socket).unwrap();
    assert!(disk(&machine, 0).guest_sees_size);
    assert_eq!(machine.disks[0].guest.capacity().unwrap(), (9 << 20) + 512);
    machine.run_until_hits(20);
    machine.finish();
}

#[test]
fn an_nbd_image_that_has_grown_is_larger_when_its_server_comes_back() {
    let (_server, mut machine) = machine(Setup { nbd: true, seed: 174, ..Setup::default() });
    resize(&mut machine, 0, 10 * MIB);
    let nbd = machine.disks[0].nbd.as_mut().unwrap();
    nbd.program.kill();
    nbd.restart();
    machine.disks[0].guest.wait_for_change();
    assert_eq!(machine.disks[0].guest.capacity().unwrap(), 10 << 20);
    machine.read_everything();
    machine.run_until_hits(20);
    machine.finish();
}

#[test]
fn an_nbd_client_sees_another_size_when_it_connects_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("image"), vec![7; MIB]).unwrap();
    let mut disk = command(REMOCA);
    disk.args(["disk", "--name", "vm", "--disk", &format!("name=root,image={}", path("image"))]);
    disk.args(["--nbd", &format!("unix:{}", path("nbd")), "--control", &path("control")]);
    let mut program = Program::start(&mut disk, &folder.path().join("disk.log"));
    wait_until("the VM process answers", || UnixStream::connect(path("control")).is_ok());
    let script = format!(
        "
import subprocess
def rescan():
    return subprocess.run(['{REMOCA}', 'disk', 'rescan', '{control}'], check=True, capture_output=True, text=True).stdout
h.connect_uri('nbd+unix:///root?socket={socket}')
open('{image}', 'r+b').truncate(2 << 20)
said = rescan()
# The process also looks by itself, and may have been first.
assert said in ['root: 2097152 bytes' + change + '; its NBD clients see it when they connect again\\n'
    for change in [' now, 1048576 before', ', as before']], said
assert h.get_size() == 1 << 20
other = nbd.NBD()
other.connect_uri('nbd+unix:///root?socket={socket}')
assert other.get_size() == 2 << 20
assert other.pread(4096, (2 << 20) - 4096) == bytes(4096)
h.shutdown()
said = rescan()
assert said == 'root: 2097152 bytes, as before\\n', said
open('{image}', 'r+b').truncate(1 << 20)
rescan()
try:
    other.pread(4096, 1 << 20)
    raise SystemExit('it read beyond the end')
except nbd.Error as error:
    assert error.errno in ('EINVAL', 'EIO'), error.errno
assert other.pread(4096, 0) == bytes([7]) * 4096
other.shutdown()
",
        control = path("control"),
        socket = path("nbd"),
        image = path("image"),
    );
    let client = run_command(command("nbdsh").args(["-c", &script]).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"));
    assert!(client.status.success(), "{}", String::from_utf8_lossy(&client.stderr));
    assert_eq!(status(path("control").as_ref()).disks[0].shrunk_from_bytes, Some(2 << 20));
    program.terminate();
}
