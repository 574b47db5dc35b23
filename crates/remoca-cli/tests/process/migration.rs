//! A VM moves between two VM processes with one image and one memory server: there and back, cancelled half-way, and
//! with either process killed. Every answer is compared with a model, and so are the images afterwards.

use super::nbd::attach;
use super::restart::wait_until_sent;
use super::strangers;
use super::support::machine::{Evictions, Machine, Other, Setup};
use super::support::program::{Nbdkit, Program, REMOCA, Serve, Signal, ask_raw, command, expect_refusal, run, status};
use super::support::{PATIENCE, folder, wait_until};
use remoca_frontend::testing::Command;
use remoca_io::control::left;
use remoca_io::small_file::with_ending;
use remoca_protocol::control::Status;
use rustix::fs::inotify;
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

/// How long a process that is told to end may spend on a hand-over.
const HAND_OVER_TIME_MAX: Duration = Duration::from_secs(5);

fn machine(seed: u64) -> (Serve, Machine) {
    let folder = folder();
    // The guest has more memory than the index of a process that begins is made for.
    let arguments = vec!["--guest-memory=1M".into()];
    let setup = Setup { sectors: vec![512, 4096], arguments, seed, ..Setup::default() };
    let (server, mut machine) = Machine::start_with_server(folder, setup);
    machine.evictions = Evictions::LYING;
    machine.run_until_hits(200);
    (server, machine)
}

pub fn incoming(machine: &Machine, name: &str) -> Other {
    machine.start_other(name, &wait_at(machine, &address(machine, name)))
}

/// Returns the options of a process that waits for its disks.
pub fn wait_at(machine: &Machine, address: &str) -> Vec<String> {
    let key = key(machine.folder.path()).display().to_string();
    ["--incoming", address, "--incoming-key", &key].map(str::to_owned).to_vec()
}

/// Returns the key of all migrations of a test. Makes it at the first call.
pub fn key(folder: &Path) -> PathBuf {
    let path = folder.join("key");
    if !path.exists() {
        let said = run(&["migrate", "--new-key", path.to_str().unwrap()]);
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    }
    path
}

/// Runs `remoca migrate`.
pub fn migrate(machine: &Machine, to: &str) -> Output {
    let (control, key) = (machine.control(), key(machine.folder.path()));
    run(&["migrate", control.to_str().unwrap(), "--to", to, "--key", key.to_str().unwrap()])
}

pub fn address(machine: &Machine, name: &str) -> String {
    format!("unix:{}", machine.folder.path().join(name).join("in").display())
}

/// Runs `remoca migrate` at the process that the guest is attached to, and expects success.
#[track_caller]
pub fn offer(machine: &Machine, name: &str) {
    let has_peer = |status: Status| status.migration.is_some_and(|migration| migration.peer.is_some());
    wait_until("a former peer is known to be gone", || !has_peer(machine.status()));
    let said = migrate(machine, &address(machine, name));
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
}

/// Starts another process in the folder `name`, to which the guest's disks go. Its queues are stopped then.
#[track_caller]
fn hand_over(machine: &mut Machine, name: &str) -> Other {
    let other = incoming(machine, name);
    offer(machine, name);
    machine.stop_queues();
    wait_for_disks(&other);
    other
}

/// Makes the image of the first disk longer, and has its process look.
#[track_caller]
fn grow(machine: &mut Machine, bytes: usize) {
    let disk = &mut machine.disks[0];
    std::fs::File::options().write(true).open(&disk.image).unwrap().set_len(bytes as u64).unwrap();
    disk.model.resize(bytes);
    let said = run(&["disk", "rescan", machine.control().to_str().unwrap()]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
}

pub fn has_disks(status: &Status) -> bool {
    status.has_disks()
}

#[track_caller]
pub fn wait_for_disks(other: &Other) {
    wait_until("the other process has the disks", || has_disks(&other.status()));
}

pub fn news(status: &Status) -> String {
    status.migration.as_ref().and_then(|migration| migration.news.clone()).unwrap_or_default()
}

/// Expects that the pages already in the cache bring hits before any page is admitted.
pub fn expect_warm(machine: &mut Machine) {
    wait_until("the disks are there", || has_disks(&machine.status()));
    let status = machine.status();
    assert!(news(&status).contains("has the disks, warm"), "{}", news(&status));
    wait_until("the pool is there", || machine.status().cache.used_bytes > 1 << 20);
    let admitted = |machine: &Machine| {
        let counters = machine.status().counters;
        ["evictions_admitted", "read_admissions", "frames_admitted"].map(|name| counters[name])
    };
    let admitted_before = admitted(machine);
    machine.evictions = Evictions { current: 0, stale: 0, garbage: 1, foreign: 0, zero: 0 };
    machine.read_until_hits(50);
    machine.evictions = Evictions::LYING;
    assert_eq!(admitted(machine), admitted_before);
    assert_eq!(machine.counter("fetch_wrong") + machine.counter("foreign_writes"), 0);
}

#[test]
fn a_vm_moves_there_and_back_and_its_cache_comes_along() {
    let (server, mut machine) = machine(71);
    // A guest that turns its write cache off once sends no flushes from then on, wherever it runs.
    machine.disks[0].guest.set_writeback(false).unwrap();
    let mut in_order = 0;
    for (round, name) in ["b", "c", "b"].into_iter().enumerate() {
        let other = incoming(&machine, name);
        offer(&machine, name);
        machine.run(20);
        assert!(has_disks(&machine.status()), "nothing moves while the guest runs");
        if round > 0 {
            wait_until_sent(&machine, &server);
        }
        machine.stop_queues();
        wait_for_disks(&other);
        let mut left = machine.move_to(other);
        expect_warm(&mut machine);
        let log = machine.program.log();
        let came =
            log.lines().find(|line| line.contains("what came of the cache: ")).unwrap_or_else(|| panic!("{log}"));
        in_order += usize::from(came.ends_with("all in order"));
        let write_cache = |machine: &mut Machine, disk: usize| machine.disks[disk].guest.read_config(32, 1).unwrap();
        assert_eq!((write_cache(&mut machine, 0), write_cache(&mut machine, 1)), (vec![0], vec![1]));
        machine.run_until_hits(200);
        assert!(!has_disks(&left.status()));
        if round == 1 {
            left.program.kill();
        } else {
            left.program.terminate();
        }
        machine.run(10);
    }
    // In the first round the memory server may owe a page when the guest stops: what comes then is looked at entry by entry.
    assert!(in_order > 0, "the index was never taken as it was");
    machine.finish();
}

/// The index that comes has room for one page. The process that the guest has left stays connected for as long as it runs.
#[test]
fn a_vm_from_a_host_without_memory_servers_has_the_whole_cache_of_the_other_host() {
    let folder = folder();
    let server = Serve::start(folder.path(), "16M");
    let mut machine = Machine::start_in(folder, Setup { seed: 92, ..Setup::default() });
    machine.run(20);
    let mut arguments = wait_at(&machine, &address(&machine, "b"));
    arguments.extend(["--server".into(), server.address.clone()]);
    let other = machine.start_other("b", &arguments);
    offer(&machine, "b");
    machine.stop_queues();
    wait_for_disks(&other);
    let _left = machine.move_to(other);
    assert!(news(&machine.status()).contains("has the disks, warm"), "{}", news(&machine.status()));
    let has_all = |machine: &Machine, bytes: u64| {
        let cache = machine.status().cache;
        cache.wanted_bytes == bytes && cache.granted_bytes == bytes
    };
    wait_until("all of the cache is granted", || has_all(&machine, 4 << 20));
    machine.run_until_hits(200);
    assert!(run(&["set", machine.control().to_str().unwrap(), "--cache", "8M"]).status.success());
    wait_until("more of it is granted", || has_all(&machine, 8 << 20));
    let on = migrate(&machine, &address(&machine, "c"));
    expect_refusal(&on, 1, &["the source is connected, so that the disks can go back to it: end that process first"]);
    expect_refusal(&run(&["upgrade", machine.control().to_str().unwrap()]), 1, &["try again when that has ended"]);
    machine.run(20);
    machine.finish();
}

#[test]
fn an_image_that_grows_while_its_vm_moves_is_larger_there() {
    let (_server, mut machine) = machine(79);
    let other = incoming(&machine, "b");
    offer(&machine, "b");
    machine.run(20);
    grow(&mut machine, 10 << 20);
    machine.run(20);
    machine.stop_queues();
    wait_for_disks(&other);
    let mut left = machine.move_to(other);
    expect_warm(&mut machine);
    assert_eq!(machine.disks[0].guest.capacity().unwrap(), 10 << 20);
    machine.run_until_hits(50);
    expect_refusal(&run(&["disk", "rescan", left.host.join("control").to_str().unwrap()]), 1, &["say it there"]);
    left.program.terminate();
    // Here it is noticed as before.
    let disk = &mut machine.disks[0];
    disk.guest.listen().unwrap();
    std::fs::File::options().write(true).open(&disk.image).unwrap().set_len(12 << 20).unwrap();
    disk.model.resize(12 << 20);
    disk.guest.wait_for_change();
    assert_eq!(disk.guest.capacity().unwrap(), 12 << 20);
    machine.run_until_hits(50);
    machine.finish();
}

/// The part is not used. The image was as it should be when both processes started.
#[test]
fn an_image_that_got_a_part_of_a_sector_at_its_end_moves_with_its_vm_and_comes_back() {
    let (_server, mut machine) = machine(87);
    let other = incoming(&machine, "b");
    offer(&machine, "b");
    let image = std::fs::File::options().write(true).open(&machine.disks[0].image).unwrap();
    let bytes = image.metadata().unwrap().len();
    image.set_len(bytes + 100).unwrap();
    machine.run(20);
    machine.stop_queues();
    wait_for_disks(&other);
    let left = machine.move_to(other);
    machine.run(20);
    machine.stop_queues();
    let mut there = machine.move_to(left);
    machine.run(20);
    assert!(has_disks(&machine.status()) && !has_disks(&there.status()));
    there.program.terminate();
    image.set_len(bytes).unwrap();
    machine.finish();
}

/// The process at the other host opens the image by its name.
#[test]
fn a_guest_does_not_get_another_file_at_the_other_host_without_a_word() {
    let (_server, mut machine) = machine(89);
    let other = incoming(&machine, "b");
    let image = machine.disks[0].image.clone();
    let aside = image.with_extension("aside");
    let replace = || {
        std::fs::rename(&image, &aside).unwrap();
        std::fs::copy(&aside, &image).unwrap();
    };
    replace();
    let said = migrate(&machine, &address(&machine, "b"));
    expect_refusal(&said, 1, &["disk0: ", "is not the file that this process serves", "Put it back in place"]);
    std::fs::rename(&aside, &image).unwrap();
    offer(&machine, "b");
    machine.run(10);
    replace();
    machine.stop_queues();
    wait_for_disks(&other);
    assert!(other.program.log().contains("is another file than the one that the other process had"));
    drop(machine.move_to(other));
    machine.run(10);
    machine.finish();
}

#[test]
fn a_guest_that_goes_on_where_it_was_gets_its_disks_back_warm() {
    let (_server, mut machine) = machine(72);
    let other = incoming(&machine, "b");
    offer(&machine, "b");
    for _ in 0..2 {
        machine.stop_queues();
        wait_for_disks(&other);
        assert!(!has_disks(&machine.status()));
        expect_shown(&machine, "the disks are not here, connected to unix:");
        // The other process has learned that the write caches are on. A process without disks does not make the guest
        // wait.
        machine.disks[0].guest.set_writeback(false).unwrap();
        machine.port.set_writeback(false).unwrap();
        machine.start_queues();
        expect_warm(&mut machine);
        assert_eq!(machine.disks[0].guest.read_config(32, 1).unwrap(), [0]);
        machine.disks[0].guest.set_writeback(true).unwrap();
        machine.port.set_writeback(true).unwrap();
        expect_shown(&machine, "the disks are here, connected to unix:");
        assert!(!has_disks(&other.status()));
        machine.run_until_hits(100);
        offer_again(&machine);
    }
    // Before the guest has stopped, the migration is only cancelled. Until then, no upgrade is accepted.
    let control = machine.control();
    let control = control.to_str().unwrap();
    expect_refusal(&run(&["upgrade", control]), 1, &["one is connected to which they may go"]);
    // An index that is about to be sent does not grow.
    let enlarge = || run(&["set", control, "--cache", "256M"]);
    expect_refusal(&enlarge(), 1, &["the disks are being handed over: try again when that is done"]);
    let said = run(&["migrate", control, "--abort"]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    wait_until("it is called off", || enlarge().status.success());
    assert_eq!(machine.status().cache.wanted_bytes, 256 << 20);
    machine.stop_queues();
    machine.start_queues();
    machine.run_until_hits(100);
    assert!(!has_disks(&other.status()));
    machine.finish();
}

/// State that came along with the disks is kept as if it had always been here: for an upgrade, and for the next
/// process.
#[test]
fn a_process_that_got_its_disks_leaves_a_warm_cache_to_its_successors() {
    let (server, mut machine) = machine(81);
    let other = hand_over(&mut machine, "b");
    let mut left = machine.move_to(other);
    expect_warm(&mut machine);
    assert!(!left.host.join("test.state").exists(), "what the other one left would be old");
    left.program.terminate();
    machine.outlives = true;
    let control = machine.control();
    let said = run(&["upgrade", control.to_str().unwrap()]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    assert_eq!(machine.status().started, "warm", "{}", machine.program.log());
    assert!(machine.program.log().contains("pages cached, all in order"), "{}", machine.program.log());
    machine.run(20);
    machine.program.terminate();
    assert!(machine.control().with_file_name("test.state.curves").exists(), "its curves are kept");
    // Restarts it as a service manager does: with all of its options.
    let address = address(&machine, "b");
    let options = wait_at(&machine, &address);
    machine.setup().arguments.extend(options);
    for ends in [Program::terminate, Program::kill] {
        machine.restart();
        assert_eq!(machine.status().started, "warm", "{}", machine.program.log());
        machine.pages_sent = 0;
        let admitted = machine.counter("evictions_admitted");
        machine.run_until_hits(50);
        assert!(admitted == 0 && machine.counter("fetch_wrong") == 0);
        ends(&mut machine.program);
    }
    machine.restart();
    machine.pages_sent = 0;
    machine.run_until_hits(50);
    assert_eq!(server.status()["pools"].as_array().unwrap().len(), 1);
    machine.finish();
}

/// A hypervisor may hold the guest for a while when it has moved it. Nothing but a mark says later that the disks came.
#[test]
fn a_process_that_was_upgraded_before_its_guest_ran_there_has_its_disks_after_a_kill() {
    let (_server, mut machine) = machine(86);
    let other = hand_over(&mut machine, "b");
    machine.program.terminate();
    assert!(!left::is_there(&machine.control()), "its guest goes on elsewhere");
    let has_peer = |status: Status| status.migration.is_some_and(|migration| migration.peer.is_some());
    wait_until("the source is known to be gone", || !has_peer(other.status()));
    let said = run(&["upgrade", other.host.join("control").to_str().unwrap()]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    drop(machine.move_to(other));
    machine.run(20);
    machine.program.kill();
    // Restarts it as a service manager does: with all of its options.
    let options = wait_at(&machine, &address(&machine, "b"));
    machine.setup().arguments.extend(options);
    machine.restart();
    assert!(machine.status().migration.is_none(), "it waits for disks that are here: {}", machine.program.log());
    machine.pages_sent = 0;
    machine.run(20);
    machine.finish();
}

/// Expects that `remoca status -v` shows `text`.
#[track_caller]
fn expect_shown(machine: &Machine, text: &str) {
    let said = run(&["status", "-v", machine.control().to_str().unwrap()]);
    let said = String::from_utf8_lossy(&said.stdout);
    assert!(said.contains(text), "{said}");
}

/// Offers the disks again. The connection is still there: one hand-over was cancelled, not the migration.
fn offer_again(machine: &Machine) {
    let control = machine.control();
    let said = run(&["migrate", control.to_str().unwrap(), "--abort"]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    wait_until("the other process hears of it", || migrate(machine, &address(machine, "b")).status.success());
}

#[test]
fn disks_that_were_written_elsewhere_come_back_cold() {
    let (_server, mut machine) = machine(73);
    machine.disks[0].guest.set_writeback(false).unwrap();
    let other = hand_over(&mut machine, "b");
    let left = machine.move_to(other);
    machine.run(20);
    machine.set("\"cache_bytes\":2097152");
    machine.disks[0].guest.set_writeback(true).unwrap();
    machine.stop_queues();
    let mut written = machine.move_to(left);
    machine.run(20);
    assert_eq!(machine.disks[0].guest.read_config(32, 1).unwrap(), [1], "as the guest said last, wherever");
    assert!(news(&machine.status()).contains("has the disks, cold"), "{}", news(&machine.status()));
    assert_eq!(machine.status().cache.wanted_bytes, 2 << 20, "as the operator set it at the other process");
    assert!(!has_disks(&written.status()));
    let is_index_fitted = |machine: &Machine| {
        let memory = machine.status().memory;
        memory.guest_bytes_indexed == memory.guest_bytes
    };
    machine.run_until("the index fits the guest", |machine| is_index_fitted(machine));
    assert!(
        machine.status().migration.is_some_and(|migration| migration.peer.is_some()),
        "the other process may ask again"
    );
    machine.run_until_hits(100);
    written.program.terminate();
    machine.run(20);
    machine.finish();
}

/// There is no room for two pools.
#[test]
fn disks_that_come_cold_have_the_memory_that_the_other_process_had_at_the_server() {
    let folder = folder();
    let server = Serve::start_with(folder.path(), "6M", &["--grace", "3600s"]);
    let setup = Setup { server: Some(server.address.clone()), seed: 108, ..Setup::default() };
    let mut machine = Machine::start_in(folder, setup);
    machine.run_until_hits(100);
    let other = hand_over(&mut machine, "b");
    assert!(news(&other.status()).contains("has the disks, warm"), "{}", news(&other.status()));
    let left = machine.move_to(other);
    machine.run(20);
    machine.stop_queues();
    let _written = machine.move_to(left);
    wait_until("the disks are back", || has_disks(&machine.status()));
    assert!(news(&machine.status()).contains("has the disks, cold"), "{}", news(&machine.status()));
    machine.run_until("all of the cache is granted", |machine| machine.status().cache.granted_bytes == 4 << 20);
    assert_eq!(server.status()["pools"].as_array().unwrap().len(), 1);
    machine.run_until_hits(100);
    machine.finish();
}

#[test]
fn whichever_process_dies_the_guest_has_its_disks() {
    let (_server, mut machine) = machine(74);
    // Kills the other process while it waits for the disks.
    let mut other = incoming(&machine, "b");
    offer(&machine, "b");
    other.program.kill();
    machine.stop_queues();
    machine.start_queues();
    machine.run_until_hits(100);
    assert!(has_disks(&machine.status()));
    // Kills the other process when it has the disks. No other process can say whether it wrote, so they come back
    // cold.
    let mut other = hand_over(&mut machine, "c");
    other.program.kill();
    // A service manager starts it again. No guest has run with the disks there, so it waits for them once more.
    let mut again = incoming(&machine, "c");
    machine.start_queues();
    machine.run(20);
    assert!(news(&machine.status()).contains("has the disks, cold"), "{}", news(&machine.status()));
    // It has been here all the time, so what it says of its write cache is known.
    assert!(!news(&machine.status()).contains("write cache"), "{}", news(&machine.status()));
    assert_eq!(machine.disks[0].guest.read_config(32, 1).unwrap(), [1]);
    assert!(!has_disks(&again.status()));
    again.program.terminate();
    machine.run_until_hits(100);
    // Kills this process when the other has the disks.
    let other = hand_over(&mut machine, "d");
    machine.program.kill();
    drop(machine.move_to(other));
    expect_warm(&mut machine);
    // Kills this process before it has said whether the guest still sends flushes.
    machine.disks[0].guest.set_writeback(false).unwrap();
    let other = incoming(&machine, "e");
    offer(&machine, "e");
    machine.program.kill();
    drop(machine.move_to(other));
    wait_until("the disks are there", || has_disks(&machine.status()));
    let news = news(&machine.status());
    assert!(news.contains("has the disks, cold") && news.contains("its write cache may be off"), "{news}");
    let write_cache = |machine: &mut Machine, disk: usize| machine.disks[disk].guest.read_config(32, 1).unwrap();
    assert_eq!((write_cache(&mut machine, 0), write_cache(&mut machine, 1)), (vec![0], vec![0]));
    machine.disks[1].guest.set_writeback(true).unwrap();
    machine.run_until_hits(100);
    machine.finish();
}

/// The guest may switch its write cache off between two visits, and does not say so again.
#[test]
fn what_a_process_knew_of_write_caches_ends_with_its_connection() {
    let (_server, mut machine) = machine(82);
    let other = hand_over(&mut machine, "b");
    machine.start_queues();
    wait_until("the other process gives them back", || has_disks(&machine.status()));
    machine.disks[0].guest.set_writeback(false).unwrap();
    machine.run(5);
    machine.program.kill();
    drop(machine.move_to(other));
    wait_until("the disks are there", || has_disks(&machine.status()));
    assert!(news(&machine.status()).contains("its write cache may be off"), "{}", news(&machine.status()));
    let write_cache = |machine: &mut Machine, disk: usize| machine.disks[disk].guest.read_config(32, 1).unwrap();
    assert_eq!((write_cache(&mut machine, 0), write_cache(&mut machine, 1)), (vec![0], vec![0]));
    machine.run_until_hits(50);
    machine.finish();
}

/// The other process has the disks, and an image that has grown since. The link is made again all the same, and the disks come back.
#[test]
fn a_take_back_that_fails_leaves_the_way_back() {
    let (_server, mut machine) = machine(83);
    let other = hand_over(&mut machine, "b");
    let left = machine.move_to(other);
    machine.run(20);
    grow(&mut machine, 10 << 20);
    let control = left.host.join("control");
    expect_refusal(&run(&["migrate", control.to_str().unwrap(), "--take-back"]), 1, &["the disks are in use"]);
    let is_linked = || left.status().migration.is_some_and(|migration| migration.peer.is_some());
    wait_until("it finds the other process again", || is_linked() && news(&left.status()).contains("connected again"));
    machine.stop_queues();
    machine.move_to(left);
    machine.run(20);
    assert_eq!(machine.disks[0].guest.capacity().unwrap(), 10 << 20);
    machine.run_until_hits(50);
    machine.finish();
}

#[test]
fn where_disks_came_a_later_migration_that_is_called_off_is_told_too() {
    let (_server, mut machine) = machine(84);
    let other = hand_over(&mut machine, "b");
    machine.move_to(other).program.terminate();
    let third = incoming(&machine, "c");
    offer(&machine, "c");
    assert!(news(&machine.status()).contains("go to"), "{}", news(&machine.status()));
    let said = run(&["migrate", machine.control().to_str().unwrap(), "--abort"]);
    let text = String::from_utf8_lossy(&said.stdout);
    assert!(said.status.success() && text.contains("no connection to") && !text.contains("go to"), "{text}");
    drop(third);
    machine.run_until_hits(50);
    machine.finish();
}

/// Counts how often a file is opened.
struct Openings(OwnedFd);

impl Openings {
    fn of(path: &Path) -> Self {
        let events = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).unwrap();
        inotify::add_watch(&events, path, inotify::WatchFlags::OPEN).unwrap();
        Self(events)
    }

    /// Returns how often it was opened since the last call, or less: the kernel counts those in quick succession as one.
    fn count(&self) -> usize {
        let mut room = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&self.0, &mut room);
        std::iter::from_fn(|| events.next().ok().map(drop)).count()
    }
}

/// The guest runs there, and the process that has its disks was not told to hand them over.
#[test]
fn a_process_whose_disks_are_in_use_elsewhere_looks_now_and_then_and_says_so_once() {
    let (_server, mut machine) = machine(106);
    let other = incoming(&machine, "b");
    machine.stop_queues();
    let openings = Openings::of(&machine.disks[0].image);
    let left = machine.move_to(other);
    let mut attempts = 0;
    wait_until("it has tried several times", || {
        attempts += openings.count();
        attempts >= 3
    });
    // An attempt opens the image once, and does not wait for the lock. It would open it hundreds of times in its first attempt.
    let log = machine.program.log();
    let told: Vec<_> = log.lines().filter(|line| line.contains("the disks are in use")).collect();
    assert!(told.len() == 1 && told[0].contains("say `remoca migrate` there"), "{log}");
    let (control, key) = (left.host.join("control"), key(machine.folder.path()));
    let to = address(&machine, "b");
    let said = run(&["migrate", control.to_str().unwrap(), "--to", &to, "--key", key.to_str().unwrap()]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    expect_warm(&mut machine);
    machine.run_until_hits(50);
    machine.finish();
}

#[test]
fn a_process_that_hangs_with_the_disks_keeps_them_until_it_is_gone() {
    let (_server, mut machine) = machine(75);
    let mut other = hand_over(&mut machine, "b");
    other.program.signal(Signal::STOP);
    machine.start_queues();
    // The hypervisor waits for the answer, and the VM could not be used meanwhile. So the answer comes although the
    // disks do not.
    machine.disks[0].guest.set_writeback(false).unwrap();
    wait_until("the silence is noticed", || news(&machine.status()).contains("are in use"));
    assert!(!has_disks(&machine.status()));
    other.program.kill();
    machine.disks[0].guest.set_writeback(true).unwrap();
    machine.run(20);
    assert!(news(&machine.status()).contains("has the disks, cold"));
    machine.finish();
}

#[test]
fn a_process_that_is_told_to_end_ends_the_hand_over_first() {
    // The process does not wait for ever, and a flush of a disk may happen to take seconds.
    assert!((0..10).any(|_| a_hand_over_is_ended_first(machine(79))), "it is never in time");
    // Over NBD the other process asks for one more word.
    assert!((0..10).any(|_| a_hand_over_is_ended_first(strangers::machine(79))), "it is never in time");
}

/// Returns whether the process ended within its time limit.
fn a_hand_over_is_ended_first((_server, mut machine): (Serve, Machine)) -> bool {
    let other = incoming(&machine, "b");
    offer(&machine, "b");
    // The index is larger than what the connection buffers.
    other.program.signal(Signal::STOP);
    machine.stop_queues();
    let told_at = Instant::now();
    machine.program.signal(Signal::TERM);
    other.program.signal(Signal::CONT);
    wait_until("it ends", || !machine.program.is_running());
    if told_at.elapsed() >= HAND_OVER_TIME_MAX {
        return false;
    }
    wait_for_disks(&other);
    drop(machine.move_to(other));
    expect_warm(&mut machine);
    machine.finish();
    true
}

#[test]
fn an_abort_that_comes_too_late_says_so() {
    let (_server, mut machine) = machine(105);
    let mut other = hand_over(&mut machine, "b");
    let control = machine.control();
    let abort = || run(&["migrate", control.to_str().unwrap(), "--abort"]);
    expect_refusal(&abort(), 1, &["it is too late to abort: ", "has the disks", "--take-back"]);
    assert!(has_disks(&other.status()) && !has_disks(&machine.status()));
    // A second one has nothing to give up, and does not succeed either.
    expect_refusal(&abort(), 1, &["the disks are not here", "--take-back"]);
    other.program.terminate();
    let back = run(&["migrate", control.to_str().unwrap(), "--take-back"]);
    assert!(back.status.success(), "{}", String::from_utf8_lossy(&back.stderr));
    // Its guest may have run at the other process, although its front end is here as before.
    assert!(news(&machine.status()).contains("its write cache may be off"), "{}", news(&machine.status()));
    assert_eq!(machine.disks[0].guest.read_config(32, 1).unwrap(), [0]);
    machine.start_queues();
    machine.run_until_hits(50);
    machine.finish();
}

/// No lock shows where the disks are.
#[test]
fn over_nbd_a_source_that_starts_again_is_no_owner_and_takes_nothing_from_a_peer_that_answers() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let server_address = Some(server.address.clone());
    let mut machine =
        Machine::start_in(folder, Setup { server: server_address, nbd: true, seed: 77, ..Setup::default() });
    machine.run_until_hits(50);
    // A process without the disks answers, too, what a guest said of its write cache.
    machine.disks[0].guest.set_writeback(false).unwrap();
    let mut other = hand_over(&mut machine, "b");
    assert!(news(&other.status()).contains("has the disks, warm"), "{}", news(&other.status()));
    let control = machine.control();
    let take_back = || run(&["migrate", control.to_str().unwrap(), "--take-back"]);
    expect_refusal(&take_back(), 1, &["is connected, and may have the disks"]);
    assert!(!has_disks(&machine.status()));
    machine.program.kill();
    machine.restart();
    assert!(!has_disks(&machine.status()), "the other process has them");
    wait_until("the guest is noticed", || news(&machine.status()).contains("the guest waits for its disks"));
    other.program.kill();
    let said = take_back();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    machine.run_until_hits(50);
    machine.program.kill();
    // nbdkit 1.32 may have ended at an assertion, because its client left with reads in flight.
    let nbd = machine.disks[0].nbd.as_mut().unwrap();
    nbd.program.kill();
    nbd.restart();
    machine.restart();
    assert!(has_disks(&machine.status()), "they came back");
    machine.pages_sent = 0;
    machine.run(10);
    machine.finish();
}

/// The lock of an NBD image does not reach other hosts. Started again without its mark, the source would be a second owner.
#[test]
fn over_nbd_no_disk_goes_that_a_source_would_take_again() {
    let mut machine = Machine::start(Setup { nbd: true, seed: 88, ..Setup::default() });
    machine.run(10);
    let other = incoming(&machine, "b");
    let [ready, gone] = [".gone.ready", ".gone"].map(|ending| with_ending(&machine.control(), ending));
    let ready_there = with_ending(&other.host.join("control"), ".gone.ready");
    // A folder is in the way, as if the file system were full. The operator is told before the guest stops.
    for (path, refusal) in [(&ready, "cannot write"), (&ready_there, "it refuses: cannot write")] {
        std::fs::create_dir(path).unwrap();
        expect_refusal(&migrate(&machine, &address(&machine, "b")), 1, &[refusal, ".gone.ready", "Make room for it"]);
        std::fs::remove_dir(path).unwrap();
    }
    // What fails later keeps the disks here, and both sides say so.
    offer(&machine, "b");
    std::fs::create_dir(&gone).unwrap();
    machine.stop_queues();
    wait_until("they stay", || news(&machine.status()).contains("the disks stay here: cannot write"));
    wait_until("the other process is told", || other.program.log().contains("it refuses: cannot write"));
    assert!(has_disks(&machine.status()) && !has_disks(&other.status()));
    machine.start_queues();
    machine.run(10);
    std::fs::remove_dir(&gone).unwrap();
    offer(&machine, "b");
    machine.stop_queues();
    wait_for_disks(&other);
    assert!(gone.is_file() && !ready.exists());
    drop(machine.move_to(other));
    machine.run(10);
    machine.finish();
}

/// The guest was shut down, and its VM ran on a third host. No lock of an NBD image or a block device reaches that far.
#[test]
fn an_index_that_came_without_a_guest_is_not_believed_later() {
    let folder = folder();
    let server = Serve::start(folder.path(), "16M");
    let setup = Setup { server: Some(server.address.clone()), nbd: true, seed: 78, ..Setup::default() };
    let mut machine = Machine::start_in(folder, setup);
    machine.run_until_hits(200);
    let other = hand_over(&mut machine, "b");
    let disk = &mut machine.disks[0];
    disk.model.bytes.iter_mut().for_each(|byte| *byte ^= 0x5A);
    std::fs::write(&disk.image, &disk.model.bytes).unwrap();
    let mut left = machine.move_to(other);
    left.program.terminate();
    machine.read_everything();
    assert_eq!(machine.counter("foreign_writes"), 0, "it is known that the content may be another");
    machine.run_until_hits(100);
    machine.finish();
}

/// A hypervisor does nothing else until it has its answer.
#[test]
fn queues_stop_while_the_disks_are_away_whatever_is_to_be_repeated() {
    let arguments = ["--nbd-settle", "0"].map(String::from).to_vec();
    let mut machine = Machine::start(Setup { nbd: true, arguments, seed: 84, ..Setup::default() });
    machine.disks[0].nbd.as_ref().unwrap().program.signal(Signal::STOP);
    let guest = &mut machine.disks[0].guest;
    let ticket = guest.submit(0, Command::Read { sector: 0, length: 4096 });
    guest.queues[0].kick();
    wait_until("the read is under way", || machine.status().memory.buffer_bytes > 0);
    machine.program.kill();
    let nbd = machine.disks[0].nbd.as_mut().unwrap();
    nbd.program.kill();
    nbd.restart();
    let mut mark = machine.control().into_os_string();
    mark.push(".gone");
    std::fs::copy("/proc/sys/kernel/random/boot_id", mark).unwrap();
    machine.restart();
    assert!(!has_disks(&machine.status()), "they went, as the mark says");
    let pid = rustix::process::Pid::from_raw(machine.program.pid().try_into().unwrap()).unwrap();
    let (answered, answer) = std::sync::mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        if answer.recv_timeout(PATIENCE).is_err() {
            // The process would wait for ever.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    });
    for _ in 0..2 {
        machine.stop_queues();
        machine.start_queues();
    }
    machine.stop_queues();
    answered.send(()).unwrap();
    watch.join().unwrap();
    let said = run(&["migrate", machine.control().to_str().unwrap(), "--take-back"]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    machine.start_queues();
    let disk = &mut machine.disks[0];
    assert_eq!(disk.guest.wait(ticket), 0);
    assert!(disk.guest.data(ticket, 4096) == disk.model.block(0), "it was repeated by who has the disks");
    machine.run(10);
    machine.finish();
}

/// Two VMs whose control sockets differ only after the last dot.
#[test]
fn a_vm_that_moves_away_says_nothing_of_another_one() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for host in ["here", "there"] {
        std::fs::create_dir(at(host)).unwrap();
    }
    let start = |name: &str, vm: &str, more: &[&str]| {
        let (image, nbd) = (at(&format!("{vm}.image")), at(&format!("{name}.nbd")));
        if !image.exists() {
            std::fs::write(&image, vec![1; 1 << 20]).unwrap();
        }
        let server = Nbdkit::start(&nbd, &image);
        let mut disk = command(REMOCA);
        disk.args(["disk", "--name", vm, "--image", &server.uri(), "--socket"]).arg(at(&format!("{name}.sock")));
        let mut program = Program::start(disk.arg("--control").arg(at(name)).args(more), &at(&format!("{name}.log")));
        wait_until("it answers", || {
            assert!(program.is_running(), "{}", program.log());
            UnixStream::connect(at(name)).is_ok()
        });
        (program, server)
    };
    let to = format!("unix:{}", at("in").display());
    let _source = start("here/prod.a", "a", &[]);
    let key = key(folder.path());
    let key = key.to_str().unwrap();
    let _target = start("there/prod.a", "a", &["--incoming", &to, "--incoming-key", key]);
    let said = run(&["migrate", at("here/prod.a").to_str().unwrap(), "--to", &to, "--key", key]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    // Its guest does not run, so its disks move at once.
    wait_until("the disks are elsewhere", || !has_disks(&status(&at("here/prod.a"))));
    let _other = start("here/prod.b", "b", &[]);
    assert!(has_disks(&status(&at("here/prod.b"))), "it never gave anything away");
}

/// The hypervisor stays connected to it when the guest has stopped.
#[test]
fn a_port_that_is_an_nbd_export_does_not_say_that_the_guest_runs() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("image"), vec![1; 1 << 20]).unwrap();
    let control = |host: &str| at(host).join("control");
    let start = |host: &str, more: &[&str]| {
        std::fs::create_dir(at(host)).unwrap();
        let mut disk = command(REMOCA);
        disk.args(["disk", "--name", "vm", "--image"]).arg(at("image")).arg("--socket").arg(at(host).join("socket"));
        disk.arg("--control").arg(control(host)).args(more);
        let mut program = Program::start(&mut disk, &at(host).join("log"));
        wait_until("it answers", || {
            assert!(program.is_running(), "{}", program.log());
            UnixStream::connect(control(host)).is_ok()
        });
        program
    };
    let nbd = at("nbd");
    let _source = start("here", &["--nbd-port", "--nbd", &format!("unix:{}", nbd.display())]);
    let _client = attach(&nbd, "remoca-port");
    wait_until("its port is used", || status(&control("here")).port.is_some_and(|port| port.attached));
    let (to, key) = (format!("unix:{}", at("in").display()), key(folder.path()));
    let key = key.to_str().unwrap();
    let port = at("port");
    let _target = start("there", &["--port", port.to_str().unwrap(), "--incoming", &to, "--incoming-key", key]);
    let said = run(&["migrate", control("here").to_str().unwrap(), "--to", &to, "--key", key]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    // No guest runs, so the disks move at once.
    wait_until("the disks are there", || has_disks(&status(&control("there"))));
}

#[test]
fn a_process_that_runs_keeps_its_state_file() {
    let (_server, mut machine) = machine(78);
    let control = machine.control();
    let (state, to) = (control.with_file_name("test.state"), address(&machine, "b"));
    let there = std::fs::metadata(&state).unwrap().len();
    let folder = machine.folder.path();
    std::fs::create_dir_all(folder.join("b")).unwrap();
    let disk = format!("image={},socket={}", machine.disks[0].image.display(), folder.join("b/socket").display());
    let (control, key) = (folder.join("b/control"), key(folder));
    let arguments = ["disk", "--name", "test", "--disk", &disk, "--incoming", &to, "--state", state.to_str().unwrap()];
    let more = ["--control", control.to_str().unwrap(), "--incoming-key", key.to_str().unwrap()];
    let said = run(&[&arguments[..], &more].concat());
    expect_refusal(&said, 1, &["test.state"]);
    assert_eq!(std::fs::metadata(&state).unwrap().len(), there);
    machine.run_until_hits(50);
    machine.finish();
}

#[test]
fn what_does_not_fit_is_refused_before_the_hypervisor_migrates() {
    let (_server, mut machine) = machine(76);
    let control = machine.control();
    let control = control.to_str().unwrap();
    let key = key(machine.folder.path());
    let key = key.to_str().unwrap();
    let migrate = |to: &str| run(&["migrate", control, "--to", to, "--key", key]);
    expect_refusal(
        &migrate(&address(&machine, "nowhere")),
        1,
        &["nowhere/in: it cannot be reached", "--incoming wait there"],
    );
    expect_refusal(&run(&["migrate", control, "--abort"]), 1, &["nothing to abort"]);
    expect_refusal(&run(&["migrate", control, "--take-back"]), 1, &["the disks are here"]);
    machine.setup().named = false;
    let namesake = incoming(&machine, "namesake");
    expect_refusal(
        &migrate(&address(&machine, "namesake")),
        1,
        &["it refuses: the source is the VM test, and the target is "],
    );
    drop(namesake);
    let folder = machine.folder.path();
    let socket = |name: &str| folder.join(name).display().to_string();
    let small = folder.join("small");
    std::fs::write(&small, [0; 8192]).unwrap();
    let to = format!("unix:{}", socket("in"));
    let disk = format!("image={},socket={}", small.display(), socket("x"));
    let mut arguments = vec!["disk", "--name", "x", "--disk", &disk, "--incoming", &to, "--control"];
    let control_there = socket("x.ctl");
    arguments.extend([control_there.as_str(), "--incoming-key", key]);
    let log = folder.join("x.log");
    let mut other = Program::start(command(REMOCA).args(arguments), &log);
    wait_until("it listens", || {
        assert!(other.is_running(), "{}", other.log());
        Path::new(&socket("x.ctl")).exists() && Path::new(&socket("in")).exists()
    });
    expect_refusal(
        &migrate(&to),
        1,
        &["it refuses: the source has the disks disk0 (8M", "and the target has disk0 (8K"],
    );
    expect_refusal(
        &run(&["upgrade", &control_there]),
        1,
        &["its disks are not here, and no guest is attached: restart it if its VM is still to come"],
    );
    // Strangers connect to the same address.
    for garbage in
        [&[1, 2, 0, 0, 0, b'{', b'}'][..], &[5, 0xff, 0xff, 0xff, 0xff], &[4, 0, 0, 0, 0], b"GET / HTTP/1.0\r\n\r\n"]
    {
        let mut stream = UnixStream::connect(socket("in")).unwrap();
        stream.write_all(garbage).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        // The connection is closed, with or without an answer.
        let _ = stream.read_to_end(&mut rest);
    }
    wait_until("the next one is heard", || {
        String::from_utf8_lossy(&migrate(&to).stderr).contains("it refuses: the source has the disks")
    });
    assert!(other.is_running());
    let key = std::fs::read_to_string(key).unwrap();
    let busy = format!("{{\"op\":\"migrate\",\"to\":\"unix:/x\",\"key\":\"{}\"}}\n", key.trim_end());
    let busy = ask_raw(Path::new(&control_there), busy.as_bytes());
    assert!(busy.contains("does not have the disks"), "{busy}");
    machine.finish();
}
