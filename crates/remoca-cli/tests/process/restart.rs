//! The VM process is killed or stopped, and its successor starts warm, or cold where the disk or the state file may
//! have changed meanwhile. Every byte that the guest reads is compared with the model.

use super::support::machine::{Machine, Setup, VirtualDisk};
use super::support::model::BLOCK;
use super::support::program::{REMOCA, Serve, command, run, run_command, until_answered};
use super::support::{PATIENCE, folder, wait_until};
use remoca_disk::state::Header;
use remoca_frontend::testing::Command;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Starts a machine, and fills its cache well.
fn machine(setup: Setup) -> (Serve, Machine) {
    let folder = folder();
    let server = Serve::start(folder.path(), "64M");
    let setup = Setup { server: Some(server.address.clone()), ..setup };
    let mut machine = Machine::start_in(folder, setup);
    machine.run_until_hits(200);
    (server, machine)
}

/// Waits until the server has received all pages in flight.
#[track_caller]
pub fn wait_until_sent(machine: &Machine, server: &Serve) {
    const LOOKS: usize = 20;
    let (mut sends, mut looks) = (None, 0);
    wait_until("no more pages come to the server", || {
        machine.status();
        let now = server.status()["totals"]["sends"].as_u64();
        // A server that gets no processor for a moment receives nothing either.
        looks = if sends == now && !machine.program.waits_to_write() { looks + 1 } else { 0 };
        sends = now;
        looks >= LOOKS
    });
}

#[track_caller]
fn expect_warm(machine: &Machine, used_before: u64) {
    wait_until("the pool is found again", || machine.status().server.is_some_and(|server| server.connected));
    let status = machine.status();
    assert_eq!((status.started.as_str(), status.cold_reason), ("warm", None), "{}", machine.program.log());
    assert!(status.cache.used_bytes * 10 >= used_before * 9, "{} of {used_before} bytes", status.cache.used_bytes);
}

/// Kills the process once the server has all pages, starts it again, and expects a warm cache.
#[track_caller]
fn expect_warm_after_a_kill(machine: &mut Machine, server: &Serve) {
    wait_until_sent(machine, server);
    machine.settle();
    let used = machine.status().cache.used_bytes;
    machine.program.kill();
    machine.restart();
    machine.pages_sent = 0;
    expect_warm(machine, used);
}

#[track_caller]
fn expect_cold(machine: &Machine, reason: &str) {
    let status = machine.status();
    let told = status.cold_reason.unwrap_or_else(|| panic!("it started warm: {}", machine.program.log()));
    assert_eq!(status.started, "cold");
    assert!(told.contains(reason), "`{told}` in place of `{reason}`");
    assert!(machine.program.log().contains(&told), "it is in the log");
}

/// Expects that the guest reads exactly what the disks hold, twice, and that no page of the server was wrong.
#[track_caller]
fn expect_right(machine: &mut Machine) {
    (0..2).for_each(|_| machine.read_everything());
    assert_eq!(machine.counter("fetch_wrong"), 0);
}

#[test]
fn a_killed_process_is_warm_again() {
    let (server, mut machine) = machine(Setup { sectors: vec![512, 4096], hedges: true, seed: 81, ..Setup::default() });
    for _ in 0..3 {
        expect_warm_after_a_kill(&mut machine, &server);
        machine.run_until_hits(1);
    }
    assert_eq!(server.status()["pools"].as_array().unwrap().len(), 1);
    expect_right(&mut machine);
    machine.finish();
}

/// As by `kill -9 PID; remoca disk ...`: sockets are open until the last thread has ended.
#[test]
fn a_process_that_starts_at_once_waits_for_one_that_was_killed_and_still_listens() {
    let (_server, mut machine) = machine(Setup { seed: 91, ..Setup::default() });
    machine.run(10);
    machine.program.kill();
    let socket = machine.disks[0].socket.clone();
    std::fs::remove_file(&socket).unwrap();
    let dying = UnixListener::bind(&socket).unwrap();
    let end = std::thread::spawn(move || drop(dying.accept().unwrap()));
    machine.restart();
    end.join().unwrap();
    machine.pages_sent = 0;
    machine.run(10);
    machine.finish();
}

/// Whether the successor is warm depends on the kernel's timing. That it is right must not.
#[test]
fn a_process_that_is_killed_with_requests_under_way_is_right_again() {
    for uring in [true, false] {
        let arguments = if uring { vec![] } else { vec!["--no-io-uring".into()] };
        let (_server, mut machine) = machine(Setup { seed: 82, arguments, ..Setup::default() });
        let mut warm = 0;
        for round in 0..6_u8 {
            machine.run(5);
            let disk = &mut machine.disks[0];
            let mut tickets = Vec::new();
            for number in 0..12_usize {
                let at = (usize::from(round) * 12 + number) * BLOCK;
                disk.model.bytes[at..at + BLOCK].fill(round + 1);
                let (sector, data) = ((at / 512) as u64, &disk.model.bytes[at..at + BLOCK]);
                tickets.push(disk.guest.submit(0, Command::Write { sector, data }));
                disk.guest.queues[0].kick();
            }
            machine.program.kill();
            machine.restart();
            machine.pages_sent = 0;
            for ticket in tickets {
                assert_eq!(machine.disks[0].guest.wait(ticket), 0);
            }
            warm += u32::from(machine.status().started == "warm");
            expect_right(&mut machine);
        }
        println!("{warm} of 6 starts were warm");
        machine.finish();
    }
}

#[test]
fn a_process_that_was_told_to_stop_is_warm_again_at_once() {
    let (server, mut machine) = machine(Setup { seed: 83, ..Setup::default() });
    for _ in 0..3 {
        machine.run(10);
        wait_until_sent(&machine, &server);
        // The image is not settled.
        machine.requests(0);
        let used = machine.status().cache.used_bytes;
        machine.disks[0].guest.disconnect();
        machine.port.disconnect();
        machine.program.terminate();
        machine.restart();
        machine.pages_sent = 0;
        expect_warm(&machine, used);
        let log = machine.program.log();
        let start = log.lines().rfind(|line| line.contains("the cache starts warm: "));
        assert!(start.is_some_and(|line| line.ends_with("pages cached, all in order")), "{log}");
        assert_eq!(server.status()["pools"].as_array().unwrap().len(), 1);
    }
    expect_right(&mut machine);
    machine.finish();
}

#[test]
fn what_was_turned_off_starts_cold_and_gives_its_memory_back() {
    let (server, mut machine) = machine(Setup { seed: 84, ..Setup::default() });
    machine.set("\"enabled\":false");
    machine.run_until("the server takes its memory back", |_| server.pages_given() == 0);
    machine.program.kill();
    machine.restart();
    machine.pages_sent = 0;
    assert_eq!(machine.status().cache.used_bytes, 0);
    assert_eq!(machine.status().memory.known_blocks, 0);
    assert!(!machine.status().cache.enabled, "it stays off");
    machine.set("\"enabled\":true");
    machine.run_until_hits(50);
    machine.finish();
}

/// A change that another program makes to the image of a machine whose process is dead. Also updates the model.
type Change = fn(&mut VirtualDisk);

fn write_a_block(disk: &mut VirtualDisk) {
    let (image, bytes) = (&disk.image, &mut disk.model.bytes);
    bytes[5 * BLOCK..6 * BLOCK].fill(0xaa);
    let image = OpenOptions::new().write(true).open(image).unwrap();
    image.write_all_at(&bytes[5 * BLOCK..6 * BLOCK], 5 * BLOCK as u64).unwrap();
}

fn write_and_set_times_back(disk: &mut VirtualDisk) {
    let before = disk.image.metadata().unwrap().modified().unwrap();
    write_a_block(disk);
    let image = &disk.image;
    File::options().write(true).open(image).unwrap().set_modified(before).unwrap();
    assert_eq!(image.metadata().unwrap().modified().unwrap(), before);
}

fn set_times_into_the_future(disk: &mut VirtualDisk) {
    write_a_block(disk);
    let later = SystemTime::now() + Duration::from_secs(3600);
    File::options().write(true).open(&disk.image).unwrap().set_modified(later).unwrap();
}

fn replace_by_another(disk: &mut VirtualDisk) {
    let (image, bytes) = (&disk.image, &mut disk.model.bytes);
    bytes.fill(0xbb);
    let other = image.with_extension("other");
    std::fs::write(&other, &*bytes).unwrap();
    std::fs::rename(other, image).unwrap();
}

fn restore_a_copy(disk: &mut VirtualDisk) {
    let (image, bytes) = (&disk.image, &mut disk.model.bytes);
    bytes[..BLOCK].fill(0xcc);
    std::fs::remove_file(image).unwrap();
    std::fs::write(image, &*bytes).unwrap();
}

#[test]
fn an_image_that_changed_meanwhile_is_cold() {
    let changes: [(&str, Change, &str); 5] = [
        ("written", write_a_block, "changed while no process had it"),
        ("written, times set back", write_and_set_times_back, "changed while no process had it"),
        ("written, times set forward", set_times_into_the_future, "changed while no process had it"),
        ("replaced", replace_by_another, "another one"),
        ("restored", restore_a_copy, ""),
    ];
    let (_server, mut machine) = machine(Setup { seed: 85, ..Setup::default() });
    for (what, change, reason) in changes {
        println!("{what}");
        machine.run_until_hits(50);
        machine.settle();
        machine.program.kill();
        change(&mut machine.disks[0]);
        machine.restart();
        machine.pages_sent = 0;
        expect_cold(&machine, reason);
        expect_right(&mut machine);
    }
    machine.finish();
}

/// docs/backup.md: the guest's file systems are frozen, which flushes, while a copy is made beneath the running process.
#[test]
fn a_backup_of_a_frozen_guest_is_whole_and_restoring_it_is_noticed() {
    let (_server, mut machine) = machine(Setup { seed: 95, ..Setup::default() });
    let image = machine.disks[0].image.clone();
    let [copy, converted, raw] = ["copy", "converted", "raw"].map(|name| machine.folder.path().join(name));
    machine.read_everything();
    assert_eq!(machine.disks[0].guest.run(0, Command::Flush), 0);
    let frozen = machine.disks[0].model.bytes.clone();
    let copied = run_command(command("cp").args(["--reflink=auto", "--sparse=always"]).args([&image, &copy]));
    assert!(copied.status.success());
    // qemu-img respects the image's lock unless it is told that the image does not change.
    let convert = |options: &[&str], from: &Path, to: &Path| {
        run_command(command("qemu-img").arg("convert").args(options).args([from, to])).status.success()
    };
    assert!(!convert(&["-f", "raw", "-O", "qcow2"], &image, &converted));
    assert!(convert(&["-U", "-f", "raw", "-O", "qcow2"], &image, &converted));
    machine.run(200);
    assert_eq!(machine.status().counters["foreign_writes"], 0);
    assert!(machine.disks[0].model.bytes != frozen, "the guest has gone on");
    assert!(convert(&["-f", "qcow2", "-O", "raw"], &converted, &raw));
    assert!(std::fs::read(&copy).unwrap() == frozen && std::fs::read(&raw).unwrap() == frozen);

    machine.settle();
    machine.program.terminate();
    assert!(run_command(command("cp").args([&copy, &image])).status.success());
    machine.disks[0].model.bytes = frozen;
    machine.restart();
    machine.pages_sent = 0;
    expect_cold(&machine, "changed while no process had it");
    expect_right(&mut machine);
    machine.finish();
}

/// The last write of the dead process and that of the other program may have the same time.
#[test]
fn an_image_that_is_written_in_the_moment_of_death_is_cold() {
    let (_server, mut machine) = machine(Setup { seed: 86, ..Setup::default() });
    for value in 0..10_u8 {
        machine.run(5);
        let disk = &mut machine.disks[0];
        let data = vec![value; BLOCK];
        let ticket = disk.guest.submit(0, Command::Write { sector: 0, data: &data });
        disk.guest.queues[0].kick();
        assert_eq!(disk.guest.wait(ticket), 0);
        disk.model.bytes[..BLOCK].fill(value);
        machine.program.kill();
        write_a_block(&mut machine.disks[0]);
        machine.restart();
        machine.pages_sent = 0;
        expect_cold(&machine, "");
        expect_right(&mut machine);
    }
    machine.finish();
}

#[test]
fn an_image_of_another_size_is_cold() {
    let (_server, mut machine) = machine(Setup { seed: 87, ..Setup::default() });
    machine.program.kill();
    let image = OpenOptions::new().write(true).open(&machine.disks[0].image).unwrap();
    image.set_len(machine.disks[0].model.bytes.len() as u64 + (1 << 20)).unwrap();
    machine.restart();
    machine.pages_sent = 0;
    expect_cold(&machine, "another size");
    expect_right(&mut machine);
}

/// A path that names another file: a copy that was restored, or a mistake.
#[test]
fn a_disk_that_has_another_image_is_cold_and_named_in_the_log() {
    let (_server, mut machine) = machine(Setup { sectors: vec![512, 512], seed: 104, ..Setup::default() });
    let image = machine.disks[1].image.display().to_string();
    let said = format!("disk1: {image} is another image than the one that this disk had");
    machine.settle();
    machine.program.kill();
    machine.restart();
    machine.pages_sent = 0;
    assert!(!machine.program.log().contains("is another image"), "{}", machine.program.log());
    machine.settle();
    machine.program.kill();
    std::fs::copy(&image, format!("{image}.copy")).unwrap();
    std::fs::rename(format!("{image}.copy"), &image).unwrap();
    machine.restart();
    machine.pages_sent = 0;
    assert!(machine.program.log().contains(&said), "{}", machine.program.log());
    assert!(machine.status().disks[1].cold_reason.is_some(), "{}", machine.program.log());
    expect_right(&mut machine);
    machine.finish();
}

#[test]
fn of_two_disks_only_the_one_that_changed_is_cold() {
    let (_server, mut machine) = machine(Setup { sectors: vec![512, 512], seed: 88, ..Setup::default() });
    machine.settle();
    machine.program.kill();
    write_a_block(&mut machine.disks[1]);
    machine.restart();
    machine.pages_sent = 0;
    let status = machine.status();
    assert_eq!((status.started.as_str(), &status.cold_reason), ("warm", &None));
    assert_eq!(status.disks[0].cold_reason, None);
    assert!(status.disks[1].cold_reason.as_ref().unwrap().contains("changed"));
    expect_right(&mut machine);

    // The disks are in another order.
    machine.settle();
    machine.program.kill();
    machine.disks.swap(0, 1);
    machine.restart();
    machine.pages_sent = 0;
    let status = machine.status();
    assert_eq!((status.started.as_str(), &status.cold_reason), ("warm", &None));
    assert!(status.disks.iter().all(|disk| disk.cold_reason.is_none()));
    expect_right(&mut machine);
    machine.finish();
}

/// Damage to the state file of a dead process.
type Damage = fn(&Path);

/// Offset of the version, after the magic number.
const VERSION_AT: u64 = 8;

fn overwrite(state: &Path, offset: u64, bytes: &[u8]) {
    OpenOptions::new().write(true).open(state).unwrap().write_all_at(bytes, offset).unwrap();
}

/// Writes another boot ID or another key to the state file of a machine with one disk.
pub fn describe(state: &Path, boot_id: Option<[u8; 16]>, key: Option<[u8; 16]>) {
    let file = OpenOptions::new().read(true).write(true).open(state).unwrap();
    let header = Header::map(&file, 1).unwrap();
    let (boot_id, key) = (boot_id.unwrap_or(header.boot_id()), key.unwrap_or(header.key()));
    let disks = header.disks().try_into().unwrap();
    header.describe(boot_id, key, header.seed(), disks, header.index_words());
}

#[test]
fn a_state_file_that_is_not_as_it_was_left_is_not_believed() {
    let damages: [(&str, Damage, &str); 7] = [
        ("boot id", |state| describe(state, Some([1; 16]), None), "booted"),
        ("version", |state| overwrite(state, VERSION_AT, &[99]), "version"),
        ("key", |state| describe(state, None, Some([7; 16])), "another key"),
        ("cut off", |state| File::options().write(true).open(state).unwrap().set_len(1 << 20).unwrap(), "size"),
        (
            "cut off in the header",
            |state| File::options().write(true).open(state).unwrap().set_len(100).unwrap(),
            "cut off",
        ),
        ("empty", |state| File::options().write(true).open(state).unwrap().set_len(0).unwrap(), "no state"),
        ("gone", |state| std::fs::remove_file(state).unwrap(), "no state"),
    ];
    let (_server, mut machine) = machine(Setup { seed: 89, ..Setup::default() });
    for (what, damage, reason) in damages {
        println!("{what}");
        machine.settle();
        machine.program.kill();
        damage(&machine.state());
        machine.restart();
        machine.pages_sent = 0;
        expect_cold(&machine, reason);
        machine.run_until_hits(50);
    }
    let mode = machine.state().metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "keys and tokens are for its owner");
    machine.finish();
}

#[test]
fn a_state_file_belongs_to_one_process() {
    let (_server, mut machine) = machine(Setup { seed: 90, ..Setup::default() });
    let image = machine.folder.path().join("other");
    std::fs::write(&image, vec![1; BLOCK]).unwrap();
    let start = |state: &Path| {
        let output = command(REMOCA)
            .args(["disk", "--name", "other", "--control"])
            .arg(machine.folder.path().join("other.ctl"))
            .arg("--state")
            .arg(state)
            .arg("--image")
            .arg(&image)
            .arg("--socket")
            .arg(machine.folder.path().join("other.socket"))
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, error) = start(&machine.state());
    assert_eq!(code, Some(1));
    assert!(error.contains("another process uses the state file"), "{error}");
    let link = machine.folder.path().join("link");
    std::os::unix::fs::symlink(&image, &link).unwrap();
    let (code, error) = start(&link);
    assert_eq!(code, Some(78));
    assert!(error.contains("cannot be the state file"), "{error}");
    let (code, error) = start(&image);
    assert_eq!(code, Some(78), "others may read it");
    assert!(error.contains("cannot be the state file"), "{error}");
    assert_eq!(std::fs::read(&image).unwrap(), vec![1; BLOCK]);
    expect_right(&mut machine);
    machine.finish();
}

#[test]
fn without_a_state_file_the_process_runs_and_says_so() {
    let arguments = vec!["--state".into(), "/proc/remoca.state".into()];
    let (_server, mut machine) = machine(Setup { seed: 91, arguments, ..Setup::default() });
    expect_cold(&machine, "/proc/remoca.state");
    machine.program.kill();
    machine.restart();
    machine.pages_sent = 0;
    machine.run_until_hits(50);
    machine.finish();
}

#[test]
fn a_larger_cache_and_a_smaller_one_are_warm() {
    let (server, mut machine) = machine(Setup { seed: 92, cache: "2M", ..Setup::default() });
    for (cache, part) in [("8M", 10), ("2M", 1), ("4M", 10)] {
        wait_until_sent(&machine, &server);
        machine.settle();
        let used = machine.status().cache.used_bytes;
        machine.program.kill();
        machine.setup().cache = cache;
        machine.restart();
        machine.pages_sent = 0;
        expect_warm(&machine, if part == 1 { 0 } else { used });
        machine.run_until_hits(100);
    }
    expect_right(&mut machine);
    machine.finish();
}

#[test]
fn the_index_grows_while_it_runs_and_is_warm_after_that() {
    let (server, mut machine) = machine(Setup { seed: 93, cache: "1M", ..Setup::default() });
    let before = machine.state().metadata().unwrap().len();
    machine.set("\"cache_bytes\":8388608");
    machine.run_until_hits(200);
    assert!(machine.state().metadata().unwrap().len() > before);
    wait_until_sent(&machine, &server);
    machine.settle();
    let used = machine.status().cache.used_bytes;
    machine.program.kill();
    machine.setup().cache = "8M";
    machine.restart();
    machine.pages_sent = 0;
    expect_warm(&machine, used);
    expect_right(&mut machine);
    machine.finish();
}

#[test]
fn the_index_becomes_smaller_with_the_cache_and_is_warm_after_that() {
    let (server, mut machine) = machine(Setup { seed: 94, cache: "2M", ..Setup::default() });
    let bytes = |machine: &Machine| machine.state().metadata().unwrap().len();
    let before = bytes(&machine);
    machine.set("\"cache_bytes\":268435456");
    machine.run_until_hits(200);
    let large = bytes(&machine);
    assert!(large > before + (2 << 20), "{before} bytes, then {large}");
    machine.set("\"cache_bytes\":2097152");
    // Pages are given up, and then it moves, beside requests.
    wait_until("the index is as small as before", || {
        machine.run(1);
        bytes(&machine) < before + (64 << 10)
    });
    machine.run_until_hits(200);
    expect_warm_after_a_kill(&mut machine, &server);
    machine.set("\"cache_bytes\":8388608");
    machine.run_until_hits(200);
    expect_right(&mut machine);
    machine.finish();
}

#[test]
fn what_was_set_holds_until_the_options_change() {
    let (_server, mut machine) = machine(Setup { seed: 91, ..Setup::default() });
    let second = folder();
    let second = Serve::start(second.path(), "64M");
    let control = machine.control();
    let control = control.to_str().unwrap();
    for set in [["--cache", "2M"], ["--server", &second.address]] {
        let said = run(&[&["set", control], &set[..]].concat());
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    }
    let known = |machine: &Machine| {
        let status = machine.status();
        let servers = status.servers.into_iter().map(|server| server.endpoint).collect::<Vec<_>>();
        (status.cache.wanted_bytes, servers)
    };
    machine.program.kill();
    machine.restart();
    machine.pages_sent = 0;
    assert_eq!(known(&machine), (2 << 20, vec![second.address.clone()]));
    machine.run(5);

    machine.program.kill();
    machine.setup.cache = "3M";
    machine.restart();
    machine.pages_sent = 0;
    // Each option on its own.
    assert_eq!(known(&machine), (3 << 20, vec![second.address.clone()]));
    let third = folder();
    let third = Serve::start(third.path(), "64M");
    machine.program.kill();
    machine.setup.server = Some(third.address.clone());
    machine.restart();
    machine.pages_sent = 0;
    assert_eq!(known(&machine), (3 << 20, vec![third.address.clone()]));
    machine.finish();
}

/// Without room for a larger state file, the cache grows nevertheless; only a restart finds nothing.
#[test]
fn an_index_that_outgrows_the_room_for_state_files_is_kept_in_memory() {
    let (_server, mut machine) = machine(Setup { seed: 94, cache: "1M", ..Setup::default() });
    let mut blocked = machine.state().into_os_string();
    blocked.push(".new");
    std::fs::create_dir(&blocked).unwrap();
    machine.set("\"cache_bytes\":8388608");
    machine.run_until_hits(200);
    assert!(!machine.state().exists(), "nobody may find what is not told of writes any more");
    machine.program.kill();
    std::fs::remove_dir(&blocked).unwrap();
    machine.setup().cache = "8M";
    machine.restart();
    machine.pages_sent = 0;
    expect_cold(&machine, "no state");
    expect_right(&mut machine);
    machine.finish();
}

#[test]
fn a_lost_state_file_is_told_of_and_made_again_when_that_is_possible() {
    let (server, mut machine) = machine(Setup { seed: 96, cache: "1M", ..Setup::default() });
    let mut blocked = machine.state().into_os_string();
    blocked.push(".new");
    std::fs::create_dir(&blocked).unwrap();
    let control = machine.control().display().to_string();
    for arguments in [&["set", &control, "--cache", "8M"][..], &["status", &control, "-v"], &["check", &control]] {
        let said = String::from_utf8(until_answered(|| run(arguments)).stdout).unwrap();
        assert!(said.contains("A restart will find the cache cold"), "{arguments:?}: {said}");
    }
    assert!(!machine.state().exists());
    let (maps, path) = (format!("/proc/{}/maps", machine.program.pid()), machine.state().display().to_string());
    wait_until("the memory of the file is given back", || !std::fs::read_to_string(&maps).unwrap().contains(&path));
    std::fs::remove_dir(&blocked).unwrap();
    machine.run_until("there is a state file again", |machine| machine.state().exists());
    assert_eq!(machine.status().state_lost, None);
    machine.run_until_hits(200);
    expect_warm_after_a_kill(&mut machine, &server);
    assert_eq!(machine.status().cache.wanted_bytes, 8 << 20, "what was set is in the new file");
    expect_right(&mut machine);
    machine.finish();
}

/// The change time on record for an image under load is at most some milliseconds old. So an image that was rolled
/// back to a snapshot of half a second ago has an older time.
#[test]
fn a_busy_image_is_looked_at_again_and_again() {
    let (_server, mut machine) = machine(Setup { seed: 95, ..Setup::default() });
    let data = vec![1; BLOCK];
    let disk = &mut machine.disks[0];
    disk.model.bytes[..BLOCK].fill(1);
    let mut tickets = std::collections::VecDeque::new();
    let begin = std::time::Instant::now();
    let mut times = std::collections::BTreeSet::new();
    while times.len() <= 3 {
        assert!(begin.elapsed() < PATIENCE, "{times:?}");
        // Keeps writes in flight at all times.
        while tickets.len() < 16 {
            tickets.push_back(machine.disks[0].guest.submit(0, Command::Write { sector: 0, data: &data }));
            machine.disks[0].guest.queues[0].kick();
        }
        if let Some(ticket) = tickets.pop_front() {
            assert_eq!(machine.disks[0].guest.wait(ticket), 0);
        }
        times.insert(machine.record_of_disk(0).seen_ns);
    }
    for ticket in tickets {
        assert_eq!(machine.disks[0].guest.wait(ticket), 0);
    }
    machine.finish();
}
