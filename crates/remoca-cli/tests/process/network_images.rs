//! Images behind NBD: a store of 4 KiB blocks whose guest writes 512 bytes at a time, and a store that goes away.

use super::nbd;
use super::support::machine::{Evictions, Machine, Setup};
use super::support::program::{Nbdkit, Program, REMOCA, Serve, Signal, command, expect_refusal, run, status};
use super::support::wait_until;
use remoca_frontend::testing::{Command, Options, TestGuest};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

const FAILURE: i32 = 1;
const NO_IMAGE: i32 = 66;
/// EX_CONFIG.
const WRONG: i32 = 78;
/// Counters of which one rises when a disk answers what is in the cache.
const LATENESS: [&str; 5] = ["covered_blocks", "fetch_timeouts", "probes", "fetch_disconnected", "disconnections"];

fn machine(seed: u64) -> (Serve, Machine) {
    let setup = Setup { nbd: true, sectors: vec![512, 4096], seed, ..Setup::default() };
    let (server, mut machine) = Machine::start_with_server(tempfile::tempdir().unwrap(), setup);
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

/// The store is restarted between two requests of the guest, which sees no error.
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
    machine.finish();
}

/// Pages cached before are no longer trusted: the server may have lost writes, or another may have taken its place.
#[test]
fn what_a_store_holds_that_comes_back_is_read_anew() {
    for nbd_block in [512, 4096] {
        let folder = tempfile::tempdir().unwrap();
        let server = Serve::start(folder.path(), "16M");
        let setup = Setup {
            server: Some(server.address.clone()),
            nbd: true,
            nbd_block,
            cache: "8M",
            seed: 64,
            ..Setup::default()
        };
        let mut machine = Machine::start_in(folder, setup);
        machine.run_until_hits(500);
        machine.disks[0].nbd.as_mut().unwrap().program.kill();
        wait_until("the loss is noticed", || machine.status().disks[0].store == "waiting");
        // Every byte changes, so no block has its previous fingerprint.
        let disk = &mut machine.disks[0];
        disk.model.bytes.iter_mut().for_each(|byte| *byte ^= 0x5A);
        std::fs::write(&disk.image, &disk.model.bytes).unwrap();
        disk.nbd.as_mut().unwrap().restart();
        wait_until("the server is found again", || machine.status().disks[0].store == "up");
        machine.read_everything();
        assert_eq!(machine.counter("foreign_writes"), 0, "it is known that the content may be another");
        machine.run_until_hits(200);
        machine.finish();
    }
}

/// The VM ran on another host meanwhile. No lock of an NBD image or a block device reaches that far.
#[test]
fn what_a_disk_holds_whose_guest_was_away_is_read_anew() {
    let (_server, mut machine) = machine(65);
    machine.run_until_hits(500);
    let socket = machine.folder.path().join("socket0");
    machine.settle();
    let disk = &mut machine.disks[0];
    disk.guest.disconnect();
    wait_until("its guest has left", || machine.program.log().contains("disk0: its guest has left, and no lock"));
    let disk = &mut machine.disks[0];
    disk.model.bytes.iter_mut().for_each(|byte| *byte ^= 0x5A);
    std::fs::write(&disk.image, &disk.model.bytes).unwrap();
    disk.guest.connect(&socket).unwrap();
    machine.read_everything();
    assert_eq!(machine.counter("foreign_writes"), 0, "it is known that the content may be another");
    machine.run_until_hits(200);
    machine.finish();
}

/// The same with guests over NBD, of which one says goodbye, and one ends without a word while an answer is on its way to it.
#[test]
fn what_a_disk_holds_whose_nbd_client_was_away_is_read_anew() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let server = Serve::start(folder.path(), "16M");
    let content = |round: u8| vec![round + 1; 1 << 20];
    std::fs::write(path("image"), content(0)).unwrap();
    let image = Nbdkit::start(&path("image.sock"), &path("image"));
    let mut disk = command(REMOCA);
    disk.arg("disk").arg("--disk").arg(format!("image={},name=data", image.uri())).args([
        "--cache",
        "4M",
        "--no-hedge",
    ]);
    disk.args(["--server", &server.address]).arg("--nbd").arg(format!("unix:{}", path("nbd").display()));
    let mut program = Program::start(disk.arg("--control").arg(path("control")), &path("disk.log"));
    wait_until("it has its cache", || {
        UnixStream::connect(path("control")).is_ok() && status(&path("control")).cache.granted_bytes > 0
    });
    let counters = || status(&path("control")).counters;
    let left = || program.log().matches("data: its guest has left, and no lock").count();
    for round in 0..3 {
        let mut client = nbd::attach(&path("nbd"), "data");
        let mut read = || {
            client.write_all(&nbd::request(0, 1, 8192, 4096)).unwrap();
            let mut answer = [0; 16 + 4096];
            client.read_exact(&mut answer).unwrap();
            assert!(answer[16..] == content(round)[..4096], "round {round}: {}", answer[16]);
            counters()
        };
        let before = counters();
        let first = read();
        assert_eq!(first["hit_blocks"], before["hit_blocks"], "round {round}: it is read anew");
        let is_admitted = first["read_admissions"] > before["read_admissions"];
        wait_until("a read is answered from the cache", || {
            let now = read();
            let is_hit = now["hit_blocks"] > first["hit_blocks"];
            // On a busy machine the server may be late, and then the disk answers.
            let is_late = LATENESS.iter().any(|name| now[*name] > before[*name]);
            assert!(is_hit || is_late || !is_admitted, "round {round}: it was admitted, and is no hit: {now:?}");
            is_hit
        });
        if round == 0 {
            client.write_all(&nbd::request(2, 2, 0, 0)).unwrap();
            wait_until("the goodbye is heard", || left() == 1);
        } else {
            client.write_all(&nbd::request(0, 3, 0, 1 << 20)).unwrap();
        }
        drop(client);
        wait_until("its guest has left", || left() == usize::from(round) + 1);
        std::fs::write(path("image"), content(round + 1)).unwrap();
    }
    program.terminate();
}

/// Each disk has its own part of the buffers, whatever its guest requests.
#[test]
fn a_disk_that_hangs_does_not_stop_the_others() {
    let arguments = ["--buffers", "8M"].map(String::from).to_vec();
    let mut machine =
        Machine::start(Setup { nbd: true, sectors: vec![512; 2], arguments, seed: 63, ..Setup::default() });
    machine.disks[0].guest.disconnect();
    let mut guest = TestGuest::new(Options { queue_size: 16, ..Options::default() });
    guest.connect(&machine.disks[0].socket).unwrap();
    let nbd = &machine.disks[0].nbd.as_ref().unwrap().program;
    nbd.signal(Signal::STOP);
    for _ in 0..16 {
        guest.submit(0, Command::Read { sector: 0, length: 1 << 20 });
    }
    guest.queues[0].kick();
    wait_until("it has what it can have", || machine.status().memory.buffer_bytes >= 6 << 20);
    assert_eq!(machine.disks[1].guest.run(0, Command::Read { sector: 0, length: 64 << 10 }), 0);
    assert_eq!(guest.poll(0), 0, "the other one hangs");
    machine.disks[0].nbd.as_ref().unwrap().program.signal(Signal::CONT);
    guest.wait_for_all();
}

#[test]
fn exports_that_cannot_be_had() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let [socket, control, nbd] = ["socket", "control", "nbd"].map(path);
    for (image, code, words) in [
        ("nbd:///", WRONG, "names no host"),
        ("nbd+unix:///", WRONG, "needs its socket"),
        ("nbds://host/", WRONG, "is not supported"),
        (&format!("nbd+unix:///?socket=/{}", "x".repeat(107)), WRONG, "socket path has 108 bytes, at most 107"),
        (&format!("nbd+unix:///?socket={nbd}"), FAILURE, nbd.as_str()),
    ] {
        let arguments = ["disk", "--image", image, "--socket", &socket, "--control", &control];
        expect_refusal(&run(&arguments), code, &[words]);
    }
}

/// Block numbers have 40 bits. On a larger disk, a block would be taken for one of another disk.
#[test]
fn a_disk_above_4_pib_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let remoca = env!("CARGO_BIN_EXE_remoca");
    let (socket, control) = (path("socket"), path("control"));
    let image = "'nbd+unix:///?socket='\"$unixsocket\"";
    let job = format!("timeout 60 {remoca} disk --image {image} --socket {socket} --control {control}");
    let output =
        std::process::Command::new("nbdkit").args(["-U", "-", "memory", "5P", "--run", &job]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(NO_IMAGE), "systemd is not to try again: {said}");
    assert!(said.contains("a disk may have 4 PiB"), "{said}");
}

/// Starts an NBD server that holds back the first write that comes while a file `hold` exists, until `held` is
/// removed.
fn holding_server(folder: &Path) -> Program {
    let here = folder.display();
    let write = format!(
        "cat > {here}/in.$$; if mv {here}/hold {here}/held 2>/dev/null; then while [ -e {here}/held ]; do sleep 0.02; done; fi; \
         dd of={here}/image if={here}/in.$$ seek=$4 oflag=seek_bytes conv=notrunc status=none"
    );
    let mut nbdkit = command("nbdkit");
    nbdkit.args(["-f", "-U"]).arg(folder.join("nbd")).arg("eval").args(["thread_model=echo parallel", "flush=true"]);
    nbdkit.args(["can_write=true", "can_flush=true", "get_size=echo 1048576"]).arg(format!("pwrite={write}"));
    nbdkit.arg(format!("pread=dd if={here}/image skip=$4 count=$3 iflag=count_bytes,skip_bytes status=none"));
    std::fs::write(folder.join("image"), vec![0; 1 << 20]).unwrap();
    let program = Program::start(&mut nbdkit, &folder.join("nbd.log"));
    wait_until("nbdkit listens", || UnixStream::connect(folder.join("nbd")).is_ok());
    program
}

fn disk_at(folder: &Path, settle: &str) -> Program {
    let mut disk = command(REMOCA);
    disk.arg("disk").arg("--image").arg(format!("nbd+unix:///?socket={}", folder.join("nbd").display()));
    disk.arg("--socket").arg(folder.join("socket")).arg("--control").arg(folder.join("control"));
    let program = Program::start(disk.args(["--nbd-settle", settle]), &folder.join("disk.log"));
    wait_until("the VM process answers", || UnixStream::connect(folder.join("control")).is_ok());
    program
}

/// Kills a process, or tells it to end, while the NBD server holds back its write of 1. With several `ends`, its
/// successors end so while they wait. The last one repeats that write, and the guest writes 2. With `in_time`, the server
/// gets to the old write while the last one waits. Returns the first byte that the image holds at last.
fn a_late_write(settle: &str, ends: &[fn(&mut Program)], in_time: bool) -> u8 {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut server = holding_server(folder);
    let byte = || std::fs::read(folder.join("image")).unwrap()[0];
    let release = || std::fs::remove_file(folder.join("held")).unwrap();
    let mut program = disk_at(folder, settle);
    let mut guest = TestGuest::new(Options { queue_size: 16, data_bytes: 4096, ..Options::default() });
    guest.connect(&folder.join("socket")).unwrap();
    std::fs::write(folder.join("hold"), "").unwrap();
    let old = guest.submit(0, Command::Write { sector: 0, data: &[1; 4096] });
    guest.queues[0].kick();
    wait_until("the server has the write", || folder.join("held").exists());
    for (end, number) in ends.iter().zip(1..) {
        end(&mut program);
        guest.disconnect();
        program = disk_at(folder, settle);
        guest.connect(&folder.join("socket")).unwrap();
        if in_time {
            // All of them have one log.
            let waits = program.log().matches("requests of the killed predecessor wait for").count();
            assert_eq!(waits, number, "{}", program.log());
            assert_eq!((guest.result(old), byte()), (None, 0), "{}", program.log());
        }
    }
    if in_time {
        release();
        wait_until("the old write lands", || byte() == 1);
    }
    assert_eq!(guest.wait(old), 0);
    assert_eq!(guest.run(0, Command::Write { sector: 0, data: &[2; 4096] }), 0);
    if !in_time {
        release();
        wait_until("the old write lands", || byte() == 1);
    }
    program.terminate();
    server.terminate();
    byte()
}

/// Nothing tells the successor of the write that its predecessor had in flight: the guest that waited for it is gone.
#[test]
fn a_guest_that_begins_anew_waits_for_what_the_server_may_still_do() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut server = holding_server(folder);
    let byte = || std::fs::read(folder.join("image")).unwrap()[0];
    let mut program = disk_at(folder, "15");
    let mut guest = TestGuest::new(Options { queue_size: 16, data_bytes: 4096, ..Options::default() });
    guest.connect(&folder.join("socket")).unwrap();
    std::fs::write(folder.join("hold"), "").unwrap();
    guest.submit(0, Command::Write { sector: 0, data: &[1; 4096] });
    guest.queues[0].kick();
    wait_until("the server has the write", || folder.join("held").exists());
    program.kill();
    guest.disconnect();
    guest.reset();
    program = disk_at(folder, "15");
    guest.connect(&folder.join("socket")).unwrap();
    let new = guest.submit(0, Command::Write { sector: 0, data: &[2; 4096] });
    guest.queues[0].kick();
    // A process that does not wait would have written that by then.
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        assert_eq!((guest.result(new), byte()), (None, 0), "{}", program.log());
    }
    std::fs::remove_file(folder.join("held")).unwrap();
    wait_until("the old write lands", || byte() == 1);
    assert_eq!(guest.wait(new), 0);
    program.terminate();
    server.terminate();
    assert_eq!(byte(), 2);
}

/// Decision 0008: NBD cannot fence a connection, so a successor waits. A server that needs longer does damage.
#[test]
fn a_successor_waits_for_what_the_server_may_still_do() {
    assert_eq!(a_late_write("15", &[Program::kill], true), 2);
    assert_eq!(
        a_late_write("15", &[Program::terminate], true),
        2,
        "an end in good order, as far as it is up to the process"
    );
    assert_eq!(
        a_late_write("15", &[Program::kill, Program::terminate], true),
        2,
        "one that waits leaves that to the next"
    );
    assert_eq!(
        a_late_write("0", &[Program::kill], false),
        1,
        "without the wait, or with too short a one, the old write wins"
    );
}
