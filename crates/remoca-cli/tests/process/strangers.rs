//! The address at which a process waits for its disks. A client without the key learns nothing there, changes
//! nothing, and keeps no other client out. A client with the key is found again after its link broke.

use super::migration::{address, expect_warm, has_disks, incoming, key, migrate, news, offer, wait_for_disks};
use super::support::machine::{Machine, Other, Setup};
use super::support::program::{Program, REMOCA, Serve, command, expect_refusal, run};
use super::support::{folder, wait_until};
use remoca_io::key;
use remoca_io::secure::Connector;
use remoca_protocol::peer::VERSION;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longer than anything that these tests wait for.
const LONG: Duration = Duration::from_secs(120);
/// Less than the time for which a peer may say nothing (5 s).
const SILENCE_MAX: Duration = Duration::from_secs(4);

/// Returns a machine with a cache, and a disk that is an NBD export.
pub fn machine(seed: u64) -> (Serve, Machine) {
    let setup = Setup { nbd: true, seed, ..Setup::default() };
    let (server, mut machine) = Machine::start_with_server(tempfile::tempdir().unwrap(), setup);
    machine.run_until("the cache holds what `expect_warm` asks for", |machine| {
        machine.status().cache.used_bytes > 5 << 18
    });
    (server, machine)
}

fn door(machine: &Machine, name: &str) -> PathBuf {
    machine.folder.path().join(name).join("in")
}

fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    [&[kind][..], &(payload.len() as u32).to_le_bytes(), payload].concat()
}

/// Returns an offer of the disks of the machine, as their owner would make it, with an index of so many words.
fn offer_of(version: u32, disk: &str, words: u64) -> Vec<u8> {
    let disk = format!(r#"{{"name":"{disk}","bytes":8388608,"read_only":false,"sector":512}}"#);
    let text = format!(
        r#"{{"version":{version},"name":"test","disks":[{disk}],"has_port":true,"lock_reaches":false,"words":{words}}}"#
    );
    frame(1, text.as_bytes())
}

/// Returns the header of an index of so many words.
fn state(words: u64) -> Vec<u8> {
    let text = format!(
        r#"{{"key":{:?},"seed":1,"words":{words},"cache_pages":1024,"enabled":true,"servers":[],"stamps":[null],
            "failed_flushes":[null],"write_caches":[true]}}"#,
        [7; 16]
    );
    frame(4, text.as_bytes())
}

/// Returns messages by which a stranger would pose as the source, as a process that needs no key would understand
/// them.
fn lies() -> Vec<Vec<u8>> {
    let offer = |version: u32, words: u64| offer_of(version, "disk0", words);
    let (words, yours) = (frame(5, &[1; 1 << 20]), |state: u8| frame(6, &[state]));
    let huge = 1 << 28;
    vec![
        // An offer that does not fit would be answered with the expected one.
        offer_of(VERSION, "diskX", 1),
        [offer(VERSION, 1), yours(0)].concat(),
        [offer(VERSION - 1, 1), yours(0)].concat(),
        [offer(VERSION, 1 << 18), state(1 << 18), words.clone(), yours(1)].concat(),
        [offer(VERSION, huge), state(huge), words.repeat(16)].concat(),
        b"GET / HTTP/1.0\r\n\r\n".to_vec(),
        vec![0x16, 3, 1, 0xff, 0xff],
        Vec::new(),
    ]
}

/// Sends `what`, and returns the answer up to the close of the connection.
fn say(door: &Path, what: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(door).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.set_write_timeout(Some(LONG)).unwrap();
    // The connection may be closed before everything is sent.
    let _ = stream.write_all(what);
    let mut answer = Vec::new();
    if let Err(error) = stream.read_to_end(&mut answer) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "the connection stays: {error}");
    }
    answer
}

#[track_caller]
fn expect_untouched(other: &Other) {
    let status = other.status();
    let migration = status.migration.expect("it waits");
    assert!(!migration.has_disks && migration.peer.is_none(), "{migration:?}");
    assert_eq!(migration.news, None, "a stranger is no news");
    assert!(!other.host.join("test.state").exists(), "nothing is kept of what a stranger sends");
}

#[test]
fn a_stranger_learns_nothing_takes_nothing_gives_nothing_and_keeps_nobody_out() {
    let (_server, mut machine) = machine(101);
    let other = incoming(&machine, "b");
    let door = door(&machine, "b");
    let before = other.program.resident_bytes();
    for lie in lies() {
        let answer = say(&door, &lie);
        assert!(answer.len() < 64, "no more than an alert: {}", String::from_utf8_lossy(&answer));
        for secret in ["disk", "test", "MiB"] {
            assert!(!String::from_utf8_lossy(&answer).contains(secret));
        }
        expect_untouched(&other);
    }
    // A client with a key of its own.
    let stranger = Connector::new(&key::generate().unwrap()).unwrap();
    let socket = UnixStream::connect(&door).unwrap();
    assert!(stranger.connect(socket.into(), Instant::now() + LONG).is_err());
    let wrong = machine.folder.path().join("wrong");
    key::write_new(&key::generate().unwrap(), &wrong).unwrap();
    let control = machine.control();
    let arguments = ["migrate", control.to_str().unwrap(), "--to", &address(&machine, "b"), "--key"];
    let said = run(&[&arguments[..], &[wrong.to_str().unwrap()]].concat());
    expect_refusal(&said, 1, &["it has another key", "with the same key"]);
    expect_untouched(&other);
    assert!(has_disks(&machine.status()));
    let grown = other.program.resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes more");
    // Many clients connect first, and send nothing or a part of a message.
    let silent: Vec<_> = (0..100).map(|_| UnixStream::connect(&door).unwrap()).collect();
    for (mut stranger, number) in silent.iter().zip(0..) {
        let _ = stranger.write_all(&[0x16, 3, 1, 1, 0, 1, 0, 0, 0xfc][..number % 9]);
    }
    offer(&machine, "b");
    machine.stop_queues();
    wait_for_disks(&other);
    drop(silent);
    assert!(!has_disks(&machine.status()), "one owner");
    drop(machine.move_to(other));
    expect_warm(&mut machine);
    machine.run_until_hits(50);
    machine.finish();
}

/// The key is right and the offer fits, so only the size that was announced tells that the rest is wrong.
#[test]
fn a_source_that_sends_more_of_an_index_than_it_announced_is_no_source() {
    let (_server, machine) = machine(105);
    let other = incoming(&machine, "b");
    let secret = key::read(&key(machine.folder.path()), true).unwrap();
    let socket = UnixStream::connect(door(&machine, "b")).unwrap();
    let channel = Connector::new(&secret).unwrap().connect(socket.into(), Instant::now() + LONG).unwrap();
    let (mut from, mut to) = channel.split().unwrap();
    to.write_all(&offer_of(VERSION, "disk0", 4)).unwrap();
    let mut accepted = [0; 5];
    from.read_exact(&mut accepted).unwrap();
    assert_eq!(accepted, *frame(3, &[]));
    to.write_all(&[state(4), frame(5, &[1; 16]), frame(5, &[2; 4])].concat()).unwrap();
    let _ = from.read_to_end(&mut Vec::new());
    let text = "it sends more of an index than it announced";
    wait_until("it says why", || news(&other.status()).contains(text));
    assert!(!has_disks(&other.status()) && has_disks(&machine.status()));
    machine.finish();
}

/// A relay between the two processes: it records everything, and can cut the link, or hold back what the source says.
struct Relay {
    path: PathBuf,
    links: Arc<Mutex<Vec<UnixStream>>>,
    /// Bytes received from the source, and from the target.
    heard: [Arc<Mutex<Vec<u8>>>; 2],
    /// Number of the source's bytes after which it is held back.
    limit: Arc<(Mutex<usize>, Condvar)>,
}

impl Relay {
    fn start(path: PathBuf, to: PathBuf) -> Self {
        let listener = UnixListener::bind(&path).unwrap();
        let limit = Arc::new((Mutex::new(usize::MAX), Condvar::new()));
        let relay = Self { path, links: Arc::default(), heard: Default::default(), limit: Arc::clone(&limit) };
        let (links, heard) = (Arc::clone(&relay.links), relay.heard.clone());
        std::thread::spawn(move || {
            for source in listener.incoming().map_while(Result::ok) {
                let Ok(target) = UnixStream::connect(&to) else { continue };
                let ends = [source, target];
                links.lock().unwrap().extend(ends.iter().map(|end| end.try_clone().unwrap()));
                for (side, heard) in [0, 1].into_iter().zip(&heard) {
                    let [mut from, mut to] = [side, 1 - side].map(|end: usize| ends[end].try_clone().unwrap());
                    let (heard, limit) = (Arc::clone(heard), Arc::clone(&limit));
                    std::thread::spawn(move || {
                        let mut bytes = [0; 65536];
                        while let Ok(count @ 1..) = from.read(&mut bytes) {
                            heard.lock().unwrap().extend_from_slice(&bytes[..count]);
                            if side == 0 {
                                let (limit, is_raised) = &*limit;
                                let all = heard.lock().unwrap().len();
                                drop(is_raised.wait_while(limit.lock().unwrap(), |limit| all > *limit).unwrap());
                            }
                            if to.write_all(&bytes[..count]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        relay
    }

    fn address(&self) -> String {
        format!("unix:{}", self.path.display())
    }

    fn cut(&self) {
        for link in self.links.lock().unwrap().drain(..) {
            let _ = link.shutdown(Shutdown::Both);
        }
    }

    fn heard(&self, side: usize) -> Vec<u8> {
        self.heard[side].lock().unwrap().clone()
    }

    /// Holds back what the source says after `more` bytes. Returns the number of bytes after which it does.
    fn hold_after(&self, more: usize) -> usize {
        let limit = self.heard(0).len() + more;
        *self.limit.0.lock().unwrap() = limit;
        limit
    }

    fn go_on(&self) {
        *self.limit.0.lock().unwrap() = usize::MAX;
        self.limit.1.notify_all();
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[track_caller]
fn offer_through(machine: &Machine, relay: &Relay) {
    let said = migrate(machine, &relay.address());
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
}

#[test]
fn who_listens_on_the_way_learns_nothing_and_cannot_say_it_again() {
    let (_server, mut machine) = machine(102);
    let other = incoming(&machine, "b");
    let relay = Relay::start(machine.folder.path().join("relay"), door(&machine, "b"));
    offer_through(&machine, &relay);
    machine.stop_queues();
    wait_for_disks(&other);
    let [source, target] = [0, 1].map(|side| relay.heard(side));
    assert!(source.len() > 10_000 && !target.is_empty(), "an index went");
    for said in [&source, &target] {
        for word in [&b"\"version\""[..], b"lock_reaches", b"cache_pages", b"failed_flushes"] {
            assert!(!contains(said, word), "{}", String::from_utf8_lossy(word));
        }
    }
    // Replays the same bytes to a process with the same key that waits for the same disks.
    let third = incoming(&machine, "c");
    say(&door(&machine, "c"), &source);
    expect_untouched(&third);
    drop(third);
    drop(machine.move_to(other));
    expect_warm(&mut machine);
    machine.finish();
}

/// No lock shows where these disks are, so only the link can bring them back.
#[test]
fn a_link_that_breaks_is_made_again_and_the_disks_come_back_over_it_warm() {
    let (_server, mut machine) = machine(103);
    let mut other = incoming(&machine, "b");
    let relay = Relay::start(machine.folder.path().join("relay"), door(&machine, "b"));
    offer_through(&machine, &relay);
    machine.stop_queues();
    wait_for_disks(&other);
    relay.cut();
    wait_until("they find each other", || news(&machine.status()).contains("connected again with"));
    assert!(!has_disks(&machine.status()) && has_disks(&other.status()));
    machine.start_queues();
    expect_warm(&mut machine);
    assert!(has_disks(&machine.status()) && !has_disks(&other.status()));
    machine.run_until_hits(50);
    // Repeats this with a target that has lost the disks: it says so, with its key, and the operator decides.
    let control = machine.control();
    let abort = run(&["migrate", control.to_str().unwrap(), "--abort"]);
    assert!(abort.status.success(), "{}", String::from_utf8_lossy(&abort.stderr));
    wait_until("the other process hears of it", || migrate(&machine, &relay.address()).status.success());
    machine.stop_queues();
    wait_for_disks(&other);
    other.program.kill();
    let again = incoming(&machine, "b");
    wait_until("it is asked", || news(&machine.status()).contains("the target does not have the disks"));
    machine.start_queues();
    assert!(!has_disks(&machine.status()) && !has_disks(&again.status()));
    // The target was told just before it died that it has them.
    wait_until("they are taken back", || run(&["migrate", control.to_str().unwrap(), "--take-back"]).status.success());
    machine.run_until_hits(50);
    assert!(!has_disks(&again.status()));
    machine.finish();
}

/// A hypervisor may cancel a migration at any time, and migrate again.
#[test]
fn a_migration_that_is_called_off_while_the_index_is_on_its_way_is_made_later() {
    // On a machine that is busy the target may hear nothing for so long that it closes the link.
    assert!((0..10).any(|_| a_hand_over_is_called_off()), "it takes longer each time");
}

/// Returns whether it took less than the time for which a peer may be silent.
fn a_hand_over_is_called_off() -> bool {
    // The index is larger than all that the connections on the way hold.
    let setup = Setup { cache: "128M", seed: 107, ..Setup::default() };
    let (_server, mut machine) = Machine::start_with_server(folder(), setup);
    machine.run_until("the cache holds what `expect_warm` asks for", |machine| {
        machine.status().cache.used_bytes > 5 << 18
    });
    let other = incoming(&machine, "b");
    let relay = Relay::start(machine.folder.path().join("relay"), door(&machine, "b"));
    offer_through(&machine, &relay);
    let held_at = Instant::now();
    let limit = relay.hold_after(32 << 10);
    machine.stop_queues();
    wait_until("a part of the index is on its way", || relay.heard(0).len() > limit);
    machine.start_queues();
    machine.run(1);
    if held_at.elapsed() >= SILENCE_MAX {
        return false;
    }
    relay.go_on();
    machine.run(20);
    assert!(has_disks(&machine.status()) && !has_disks(&other.status()));
    let is_linked = machine.status().migration.is_some_and(|migration| migration.peer.is_some());
    assert!(is_linked, "the disks are still offered");
    machine.stop_queues();
    wait_for_disks(&other);
    drop(machine.move_to(other));
    expect_warm(&mut machine);
    machine.run_until_hits(50);
    machine.finish();
    true
}

/// Opens a link from a source that comes at `path` to the process behind `to`. Keeps what the source says from when `keeps` is set. Returns
/// both ends and that.
fn keep_back(path: &Path, to: &Path, keeps: &Arc<AtomicBool>) -> JoinHandle<(UnixStream, UnixStream, Vec<u8>)> {
    let (listener, to, keeps) = (UnixListener::bind(path).unwrap(), to.to_owned(), Arc::clone(keeps));
    std::thread::spawn(move || {
        // Later connections are refused.
        let (mut source, mut target) = (listener.accept().unwrap().0, UnixStream::connect(to).unwrap());
        let (mut from, mut back) = (target.try_clone().unwrap(), source.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut from, &mut back));
        let (mut bytes, mut kept) = ([0; 65536], Vec::new());
        while let Ok(count @ 1..) = source.read(&mut bytes) {
            match keeps.load(Ordering::SeqCst) {
                true => kept.extend_from_slice(&bytes[..count]),
                false => target.write_all(&bytes[..count]).unwrap(),
            }
        }
        (source, target, kept)
    })
}

/// No lock shows where these disks are. What their former owner said may arrive after the operator has taken them back.
#[test]
fn disks_that_were_taken_back_are_not_taken_by_a_process_that_hears_too_late_that_they_are_its_own() {
    let (_server, mut machine) = machine(108);
    let other = incoming(&machine, "b");
    let (path, keeps) = (machine.folder.path().join("late"), Arc::default());
    let link = keep_back(&path, &door(&machine, "b"), &keeps);
    let said = migrate(&machine, &format!("unix:{}", path.display()));
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    keeps.store(true, Ordering::SeqCst);
    machine.stop_queues();
    wait_until("the disks go", || !has_disks(&machine.status()));
    let control = machine.control();
    // The other process would say that it lives. Its words no longer arrive.
    let abort = run(&["migrate", control.to_str().unwrap(), "--abort"]);
    expect_refusal(&abort, 1, &["it is too late to abort"]);
    let back = run(&["migrate", control.to_str().unwrap(), "--take-back"]);
    assert!(back.status.success(), "{}", String::from_utf8_lossy(&back.stderr));
    machine.start_queues();
    let (_source, mut target, kept) = link.join().unwrap();
    assert!(kept.len() > 10_000, "an index went");
    // A target that has heard nothing for five seconds has closed the link, on a machine that is so busy.
    let _ = target.write_all(&kept);
    let _ = target.shutdown(Shutdown::Write);
    wait_until("the end is heard", || news(&other.status()).contains("no connection to the source any more"));
    assert!(has_disks(&machine.status()) && !has_disks(&other.status()));
    machine.run(10);
    machine.finish();
}

#[test]
fn a_key_is_made_for_its_owner_alone_and_no_command_line_shows_it() {
    let (_server, machine) = machine(104);
    let path = key(machine.folder.path());
    let path = path.to_str().unwrap();
    assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    expect_refusal(&run(&["migrate", "--new-key", path]), 1, &["cannot make the key", "exists"]);
    let other = incoming(&machine, "b");
    offer(&machine, "b");
    let text = std::fs::read(path).unwrap();
    for pid in [machine.program.pid(), other.program.pid()] {
        let shown = ["cmdline", "environ"].map(|file| std::fs::read(format!("/proc/{pid}/{file}")).unwrap()).concat();
        assert!(contains(&shown, b"disk") && !contains(&shown, text.trim_ascii()));
    }
    for log in [machine.program.log(), other.program.log()] {
        assert!(!contains(log.as_bytes(), text.trim_ascii()));
    }
    let status = serde_json::to_vec(&other.status()).unwrap();
    assert!(!contains(&status, text.trim_ascii()));
    machine.finish();
}

#[test]
fn nobody_waits_for_disks_without_a_key() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("image"), [0; 8192]).unwrap();
    let disk = |more: &[&str]| {
        let mut disk = command(REMOCA);
        disk.args([
            "disk",
            "--name",
            "vm",
            "--image",
            &at("image"),
            "--socket",
            &at("socket"),
            "--control",
            &at("control"),
        ]);
        disk.args(more);
        disk
    };
    let refused = |more: &[&str], words: &[&str]| {
        expect_refusal(&super::support::program::run_command(&mut disk(more)), 78, words);
        assert!(!Path::new(&at("in")).exists(), "it does not listen");
    };
    std::fs::write(at("vm.state"), "what a former process left").unwrap();
    std::fs::set_permissions(at("vm.state"), std::fs::Permissions::from_mode(0o600)).unwrap();
    let to = format!("unix:{}", at("in"));
    refused(&["--incoming", &to], &["--incoming-key FILE", "remoca migrate --new-key"]);
    refused(&["--incoming", "tcp:127.0.0.1:7", "--incoming-key", &at("none")], &["cannot read the key"]);
    std::fs::write(at("password"), "swordfish\n").unwrap();
    refused(&["--incoming", &to, "--incoming-key", &at("password")], &["chmod 600"]);
    std::fs::set_permissions(at("password"), PermissionsExt::from_mode(0o600)).unwrap();
    refused(&["--incoming", &to, "--incoming-key", &at("password")], &["64 hexadecimal digits", "--new-key"]);
    refused(&["--incoming", &to, "--incoming-key", "credential:key"], &["LoadCredential=key:FILE"]);
    expect_refusal(&run(&["migrate", &at("control"), "--to", &to]), 1, &["--key FILE", "remoca migrate --new-key"]);
    assert_eq!(std::fs::read_to_string(at("vm.state")).unwrap(), "what a former process left");
    // Passes the key as systemd does.
    std::fs::remove_file(at("vm.state")).unwrap();
    std::fs::create_dir(at("credentials")).unwrap();
    std::fs::rename(key(folder.path()), at("credentials/key")).unwrap();
    let mut disk = disk(&["--incoming", &to, "--incoming-key", "credential:key"]);
    let mut program = Program::start(disk.env("CREDENTIALS_DIRECTORY", at("credentials")), Path::new(&at("log")));
    wait_until("it listens", || {
        assert!(program.is_running(), "{}", program.log());
        Path::new(&at("in")).exists()
    });
    program.terminate();
}
