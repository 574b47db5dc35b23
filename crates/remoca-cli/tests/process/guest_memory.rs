//! Memory that a front end only claims to have. A program with access to a disk's socket makes neither the state file
//! nor the process grow beyond what the operator allows, and what was allocated is given back.

use super::support::machine::{Machine, Setup};
use super::support::program::{Serve, run};
use super::support::wait_until;
use remoca_frontend::testing::{Options, TestGuest};
use remoca_protocol::control::CurveStatus;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const GIB: u64 = 1 << 30;

fn machine(seed: u64, arguments: &[&str]) -> (Serve, Machine) {
    let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    let setup = Setup { sectors: vec![512, 512], arguments, seed, ..Setup::default() };
    Machine::start_with_server(tempfile::tempdir().unwrap(), setup)
}

/// Connects a front end that shares `bytes` of memory of which no page exists.
fn claim(socket: &Path, bytes: u64) -> TestGuest {
    let mut guest = TestGuest::new(Options::default());
    guest.negotiate(socket).unwrap();
    guest.claim_memory(bytes).unwrap();
    guest
}

/// Returns the bytes that the state file occupies on disk, and the resident bytes of the process.
fn taken(machine: &Machine) -> (u64, u64) {
    (std::fs::metadata(machine.state()).unwrap().blocks() * 512, machine.program.memory("VmRSS"))
}

/// Does rounds until the index is sized for `bytes` of guest memory.
fn run_until_indexed(machine: &mut Machine, bytes: u64) {
    machine.run_until("the index has another size", |machine| machine.status().memory.guest_bytes_indexed == bytes);
}

#[test]
fn a_guest_that_claims_much_memory_takes_no_more_than_allowed_and_gives_it_back() {
    let (_server, mut machine) = machine(121, &[]);
    machine.run_until_hits(100);
    let (file, resident) = taken(&machine);
    for _ in 0..2 {
        machine.disks[1].guest.disconnect();
        let mut claiming = claim(&machine.disks[1].socket, 96 * GIB);
        let disk = machine.disks.pop().unwrap();
        // The other disk and the port are served all the time.
        run_until_indexed(&mut machine, 16 * GIB);
        let memory = machine.status().memory;
        assert_eq!(memory.guest_bytes, 96 * GIB);
        assert!(memory.guest_resident_bytes.is_some_and(|bytes| bytes < GIB), "{:?}", memory.guest_resident_bytes);
        let (larger_file, larger) = taken(&machine);
        assert!(memory.index_bytes < 256 << 20 && larger_file < 256 << 20, "{} and {larger_file}", memory.index_bytes);
        assert!(larger < resident + (256 << 20), "{larger} bytes are resident");
        claiming.disconnect();
        run_until_indexed(&mut machine, GIB);
        machine.disks.push(disk);
        let socket = machine.disks[1].socket.clone();
        machine.disks[1].guest.connect(&socket).unwrap();
        wait_until("all of it is given back", || {
            let (file_now, now) = taken(&machine);
            file_now == file && now < resident + (32 << 20)
        });
        machine.run_until_hits(100);
    }
    let warnings = machine.program.log().matches("the index is made for 16G").count();
    assert_eq!(warnings, 1, "it is said once");
    // All known blocks moved along, twice, and a successor finds the index that moved last.
    machine.program.terminate();
    machine.restart();
    assert_eq!(machine.status().started, "warm");
    machine.pages_sent = 0;
    machine.run_until_hits(100);
    machine.finish();
}

#[test]
fn the_index_follows_the_guest_as_far_as_the_operator_allows() {
    let arguments = ["--guest-memory", "64M", "--guest-memory-max", "8G"];
    let (_server, mut machine) = machine(122, &arguments);
    machine.run_until_hits(100);
    for (claimed, indexed) in [(4 * GIB, 4 * GIB), (8 * GIB, 8 * GIB), (9 * GIB, 8 * GIB), (2 * GIB, 2 * GIB)] {
        machine.disks[1].guest.disconnect();
        let mut claiming = claim(&machine.disks[1].socket, claimed);
        let disk = machine.disks.pop().unwrap();
        run_until_indexed(&mut machine, indexed);
        claiming.disconnect();
        machine.disks.push(disk);
        let socket = machine.disks[1].socket.clone();
        machine.disks[1].guest.connect(&socket).unwrap();
    }
    // The remaining guest has less memory than was configured, and then the configured size applies.
    run_until_indexed(&mut machine, 64 << 20);
    machine.run_until_hits(100);
    machine.finish();
}

/// The index does not grow for it, as it is not in use.
#[test]
fn without_a_cache_the_curve_is_that_of_the_guest_as_large_as_it_is() {
    let arguments = ["--guest-memory=64M", "--guest-memory-max=8G"].map(Into::into).into();
    let setup = Setup { sectors: vec![512, 512], arguments, seed: 124, ..Setup::default() };
    let mut machine = Machine::start_in(tempfile::tempdir().unwrap(), setup);
    machine.run(50);
    let share = |machine: &Machine| {
        let output = run(&["curve", machine.control().to_str().unwrap(), "-o", "json"]);
        serde_json::from_slice::<CurveStatus>(&output.stdout).unwrap().followed_share
    };
    assert!((share(&machine) - 1.0 / 8.0).abs() < 1e-9, "all blocks, of which the agent sends one of eight");
    // 128 MiB of the guest's memory are followed.
    for (claimed, one_of) in [(4 * GIB, 32.0), (9 * GIB, 64.0)] {
        machine.disks[1].guest.disconnect();
        let mut claiming = claim(&machine.disks[1].socket, claimed);
        let disk = machine.disks.pop().unwrap();
        let expected = 1.0 / 8.0 / one_of;
        machine.run_until("the curve has another share", |machine| (share(machine) / expected - 1.0).abs() < 1e-9);
        let check = run(&["check", machine.control().to_str().unwrap()]);
        let said = String::from_utf8(check.stdout).unwrap();
        let is_too_large = claimed > 8 * GIB;
        assert!(said.contains("guest memory") && said.contains("guest-memory-max") == is_too_large, "{said}");
        claiming.disconnect();
        machine.disks.push(disk);
        let socket = machine.disks[1].socket.clone();
        machine.disks[1].guest.connect(&socket).unwrap();
    }
    machine.finish();
}

/// The process dies while its index moves, or while there are two files. The successor uses the valid one.
#[test]
fn killed_while_the_index_moves() {
    let (_server, mut machine) = machine(123, &[]);
    machine.run_until_hits(100);
    for _ in 0..4 {
        machine.disks[1].guest.disconnect();
        machine.settle();
        let _claiming = claim(&machine.disks[1].socket, 12 * GIB);
        machine.program.kill();
        machine.restart();
        machine.pages_sent = 0;
        assert_eq!(machine.status().started, "warm");
        let mut beside = machine.state().into_os_string();
        beside.push(".new");
        wait_until("what it left behind is gone", || !Path::new(&beside).exists());
        machine.run_until_hits(50);
    }
    machine.finish();
}
