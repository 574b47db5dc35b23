//! Images behind NBD: a store of 4 KiB blocks whose guest writes 512 bytes at a time, and a store that goes away.

use super::support::machine::{Evictions, Machine, Setup};
use super::support::program::{Serve, Signal, expect_refusal, run};

const FAILURE: i32 = 1;

fn machine(seed: u64) -> (Serve, Machine) {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let setup =
        Setup { server: Some(server.address.clone()), nbd: true, sectors: vec![512, 4096], seed, ..Setup::default() };
    let mut machine = Machine::start_in(folder, setup);
    machine.evictions = Evictions::LYING;
    (server, machine)
}

#[test]
fn sectors_smaller_than_the_store_has() {
    let (mut server, mut machine) = machine(61);
    machine.run_until_hits(500);
    server.program.kill();
    machine.run(20);
    server.restart();
    machine.run_until_hits(500);
    machine.finish();
}

/// Between two requests of the guest, which sees no error. What was cached before is not believed any more: it might be the past.
#[test]
fn a_store_that_goes_away_and_comes_back() {
    let (_server, mut machine) = machine(62);
    for _ in 0..3 {
        machine.run_until_hits(200);
        let nbd = machine.disks[0].nbd.as_mut().unwrap();
        nbd.program.kill();
        nbd.restart();
        let nbd = machine.disks[1].nbd.as_mut().unwrap();
        nbd.program.signal(Signal::STOP);
        std::thread::sleep(std::time::Duration::from_millis(100));
        nbd.program.signal(Signal::CONT);
    }
    machine.run_until_hits(200);
    assert!(machine.program.log().contains("what was known of it is void"), "{}", machine.program.log());
    machine.finish();
}

#[test]
fn exports_that_cannot_be_had() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let [socket, control, nbd] = ["socket", "control", "nbd"].map(path);
    for (image, words) in [
        ("nbd:///", "names no host"),
        ("nbd+unix:///", "needs its socket"),
        ("nbds://host/", "is not supported"),
        (&format!("nbd+unix:///?socket={nbd}"), nbd.as_str()),
    ] {
        let arguments = ["disk", "--image", image, "--socket", &socket, "--control", &control];
        expect_refusal(&run(&arguments), FAILURE, &[words]);
    }
}

/// Block numbers have 40 bits: beyond, one disk's block would be taken for another's.
#[test]
fn a_disk_above_4_pib_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let remoca = env!("CARGO_BIN_EXE_remoca");
    let (socket, control) = (path("socket"), path("control"));
    let image = "'nbd+unix:///?socket='\"$unixsocket\"";
    let job = format!("timeout 30 {remoca} disk --image {image} --socket {socket} --control {control}");
    let output =
        std::process::Command::new("nbdkit").args(["-U", "-", "memory", "5P", "--run", &job]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(FAILURE), "{said}");
    assert!(said.contains("a disk may have 4 PiB"), "{said}");
}
