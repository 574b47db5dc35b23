//! Several memory servers for one VM process: the pool goes where memory is, and moves on when its server is lost, hangs,
//! refuses, or is taken out of the list. The guest reads, writes and evicts meanwhile; every answer is checked.

use super::restart::describe as damage;
use super::support::fake_server::{FakeServer, Lie};
use super::support::machine::{Evictions, Machine, Setup};
use super::support::program::{Program, REMOCA, Serve, Signal, command, expect_refusal, run};
use super::support::{folder, wait_until};
use remoca_protocol::{Frame, Hello, PageCount, RequestId, Token, VERSIONS};
use remoca_store::testing::hold_port;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

const USAGE: i32 = 2;
const FAILURE: i32 = 1;
const CONFIGURATION: i32 = 78;

/// Starts a memory server with a folder of its own.
fn serve(folder: &Path, name: &str, memory: &str) -> Serve {
    let folder = folder.join(name);
    std::fs::create_dir(&folder).unwrap();
    Serve::start(&folder, memory)
}

fn machine(folder: tempfile::TempDir, servers: &[&str], setup: Setup) -> Machine {
    let arguments = servers.iter().flat_map(|server| ["--server".to_owned(), (*server).to_owned()]).collect();
    let mut machine = Machine::start_in(folder, Setup { arguments, ..setup });
    machine.evictions = Evictions::LYING;
    machine
}

/// Returns the address of the server that has the pool, or `None` if no server has it.
fn pool_at(machine: &Machine) -> Option<String> {
    let status = machine.status();
    let server = status.server.unwrap();
    let used: Vec<_> =
        status.servers.into_iter().filter(|server| server.in_use).map(|server| server.endpoint).collect();
    assert_eq!(server.connected, !used.is_empty());
    used.into_iter().next().inspect(|used| assert_eq!(*used, server.endpoint))
}

#[track_caller]
fn run_until_pool_at(machine: &mut Machine, server: &str) {
    machine.run_until("the pool is there", |machine| pool_at(machine).as_deref() == Some(server));
}

/// Returns the reason that the status gives why a server cannot be used, or an empty text.
fn error_of(machine: &Machine, server: &str) -> String {
    let status = machine.status();
    let known = status.servers.into_iter().find(|known| known.endpoint == server).unwrap();
    known.error.unwrap_or_default()
}

fn token_at(server: &Serve) -> String {
    server.status()["pools"][0]["token"].as_str().unwrap().to_owned()
}

#[test]
fn one_server_takes_the_place_of_another_that_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = serve(folder.path(), "a", "16M");
    let mut second = serve(folder.path(), "b", "16M");
    second.program.kill();
    let addresses = [first.address.clone(), second.address.clone()];
    let mut machine = machine(folder, &[&addresses[0], &addresses[1]], Setup { seed: 71, ..Setup::default() });
    machine.run_until_hits(200);
    let token = token_at(&first);
    for _ in 0..2 {
        second.restart();
        machine.run(20);
        assert_eq!(pool_at(&machine), Some(addresses[0].clone()), "that another one is back is no reason to move");
        first.program.kill();
        run_until_pool_at(&mut machine, &addresses[1]);
        machine.run_until_hits(200);
        assert_ne!(token_at(&second), token, "what one server is told is no use at another");
        first.restart();
        second.program.kill();
        run_until_pool_at(&mut machine, &addresses[0]);
        machine.run_until_hits(200);
    }
    first.program.kill();
    machine.run_until("both are gone", |machine| pool_at(machine).is_none());
    machine.run(20);
    second.restart();
    machine.run_until_hits(200);
    assert_eq!(pool_at(&machine), Some(addresses[1].clone()));
    machine.finish();
}

#[test]
fn a_server_that_hangs_is_left_for_another() {
    let folder = tempfile::tempdir().unwrap();
    let servers = ["a", "b"].map(|name| serve(folder.path(), name, "16M"));
    let addresses = [0, 1].map(|at| servers[at].address.clone());
    let mut machine = machine(folder, &[&addresses[0], &addresses[1]], Setup { seed: 72, ..Setup::default() });
    machine.run_until_hits(200);
    let used = usize::from(pool_at(&machine) == Some(addresses[1].clone()));
    servers[used].program.signal(Signal::STOP);
    run_until_pool_at(&mut machine, &addresses[1 - used]);
    machine.run_until_hits(200);
    servers[used].program.signal(Signal::CONT);
    machine.run_until_hits(100);
    assert_eq!(pool_at(&machine).as_ref(), Some(&addresses[1 - used]));
    machine.finish();
}

#[test]
fn servers_of_no_use_are_passed_over_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let fake = |lie, name: &str| FakeServer::start(&folder.path().join(name), lie);
    let fakes = [
        (fake(Lie::OtherVersion, "f1"), "speaks protocol versions 7 to 9"),
        (fake(Lie::Mute, "f2"), "does not answer"),
        (fake(Lie::GarbageGreeting, "f3"), "is no memory server"),
        (fake(Lie::Busy, "f4"), "it has as many clients as it takes (--max-clients there)"),
    ];
    let mut real = serve(folder.path(), "real", "16M");
    let mut addresses: Vec<&str> = fakes.iter().map(|(fake, _)| fake.address.as_str()).collect();
    let address = real.address.clone();
    addresses.push(&address);
    let mut machine = machine(folder, &addresses, Setup { seed: 73, ..Setup::default() });
    machine.run_until_hits(200);
    assert_eq!(pool_at(&machine), Some(address.clone()), "one that never answers holds up nobody");
    real.program.kill();
    machine.run_until("all are tried again and again", |machine| {
        let named = |(fake, words): &(FakeServer, &str)| error_of(machine, &fake.address).contains(words);
        fakes.iter().all(named) && fakes.iter().all(|(fake, _)| fake.connections() >= 3)
    });
    let log = machine.program.log();
    for (fake, words) in &fakes {
        let lines: Vec<_> = log.lines().filter(|line| line.contains(&format!("{} ", fake.address))).collect();
        assert!(lines.len() == 1 && lines[0].contains(words), "one line for each server: {lines:#?}");
        let (reason, _) = lines[0].split_once(" It is passed over").unwrap();
        assert!(reason.ends_with(['.', '?']), "{reason}");
    }
    let full = run(&["status", machine.control().to_str().unwrap(), "-v"]);
    let full = String::from_utf8(full.stdout).unwrap();
    for (fake, words) in &fakes {
        let line = full.lines().find(|line| line.contains("of  ") && line.contains(&fake.address)).unwrap();
        assert!(line.contains(words), "{full}");
    }
    real.restart();
    machine.run_until_hits(200);
    let table = run(&["status", machine.control().to_str().unwrap()]);
    let table = String::from_utf8(table.stdout).unwrap();
    assert_eq!(table.lines().nth(1).unwrap().split_whitespace().last(), Some(address.as_str()), "{table}");
    machine.finish();
}

#[test]
fn what_a_server_promised_and_refuses_another_one_gives() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeServer::start(&folder.path().join("fake"), Lie::Refuse);
    let real = serve(folder.path(), "real", "16M");
    // With both servers from the start, it would matter which answers first.
    let mut machine = machine(folder, &[&fake.address], Setup { seed: 74, ..Setup::default() });
    machine.run_until("it refuses", |_| fake.told() > 0);
    machine.set(&format!("\"servers\":[\"{}\",\"{}\"]", fake.address, real.address));
    machine.run_until("the other one gives it", |machine| machine.status().cache.granted_bytes == 4 << 20);
    assert_eq!(real.pages_given(), 4 << 8);
    machine.run_until_hits(200);
    assert_eq!(machine.counter("pool_joins"), 1);
    machine.finish();
}

#[test]
fn a_cache_in_parts_where_all_are_nearly_full_and_the_whole_one_when_there_is_memory() {
    let folder = tempfile::tempdir().unwrap();
    let large = serve(folder.path(), "large", "16M");
    let small = serve(folder.path(), "small", "4M");
    // Another VM has most of the large server's memory.
    let server = Some(large.address.clone());
    // A process without a name gives its memory back when it ends, not a minute later.
    let setup = Setup { server, cache: "14M", named: false, seed: 75, ..Setup::default() };
    let mut other = Machine::start(setup);
    other.run_until("the other VM has its pool", |_| large.pages_given() == 14 << 8);
    let setup = Setup { cache: "8M", seed: 76, ..Setup::default() };
    let mut machine = machine(folder, &[&small.address], setup);
    machine.run_until_hits(200);
    machine.set(&format!("\"servers\":[\"{}\",\"{}\"]", large.address, small.address));
    machine.run_until("the large one says what is left", |machine| {
        machine.status().servers.iter().any(|server| server.possible_bytes == Some(2 << 20))
    });
    machine.run_until("a part is on each", |machine| machine.status().cache.granted_bytes == 6 << 20);
    assert_eq!((small.pages_given(), large.pages_given()), (4 << 8, 16 << 8));
    machine.run_until_hits(200);
    other.finish();
    wait_until("the memory is free", || large.pages_given() == 2 << 8);
    machine.set("\"cache_bytes\":12582912");
    machine.run_until("the whole size", |machine| machine.status().cache.granted_bytes == 12 << 20);
    assert_eq!((small.pages_given(), large.pages_given()), (4 << 8, 8 << 8));
    machine.run_until_hits(200);
    machine.finish();
}

#[test]
fn a_donor_is_emptied() {
    let folder = tempfile::tempdir().unwrap();
    // On TCP, closing a connection too early discards the BYE.
    let (_held, port) = hold_port();
    std::fs::create_dir(folder.path().join("tcp")).unwrap();
    let on_tcp = Serve::start_at(&folder.path().join("tcp"), "16M", &format!("tcp:127.0.0.1:{port}"));
    let servers = [serve(folder.path(), "unix", "16M"), on_tcp];
    let addresses = [0, 1].map(|at| servers[at].address.clone());
    let mut machine = machine(folder, &[&addresses[0]], Setup { seed: 77, ..Setup::default() });
    machine.run_until_hits(200);
    let control = machine.control();
    let set = |arguments: &[&str]| run(&[&["set", control.to_str().unwrap()], arguments].concat());
    for (arguments, code, words) in [
        (&["--server", &addresses[0], "--server", &addresses[0]][..], FAILURE, "is given twice"),
        (&["--server", "here"], USAGE, "tcp:HOST:PORT, unix:PATH or local:PATH"),
        (&["--server", &addresses[1], "--off"], USAGE, "cannot be used with"),
        (&["--server"; 2], USAGE, "--server"),
        (&["--now"], USAGE, "--server"),
        (&["--now", "--off"], USAGE, "--now"),
        (&["--server=tcp:a:1"; 1].repeat(17), FAILURE, "17 memory servers: a VM process has 1 to 16"),
    ] {
        expect_refusal(&set(arguments), code, &[words]);
    }
    machine.run(10);
    assert_eq!(pool_at(&machine), Some(addresses[0].clone()), "a refused list changes nothing");
    for used in [1, 0, 1] {
        let said = set(&["--server", &addresses[used], "--now"]);
        assert_eq!(String::from_utf8_lossy(&said.stdout), format!("test: servers {}\n", addresses[used]));
        run_until_pool_at(&mut machine, &addresses[used]);
        machine.run_until_hits(200);
        wait_until("the other one is empty", || servers[1 - used].pages_given() == 0);
        assert_eq!(servers[1 - used].status()["totals"]["expired"], 0);
    }
    let said = set(&["--server", &addresses[0], "--server", &addresses[1]]);
    assert!(said.status.success(), "{said:?}");
    machine.run(20);
    assert_eq!(pool_at(&machine), Some(addresses[1].clone()), "a longer list is no reason to move");
    machine.finish();
}

#[test]
fn a_full_server_has_a_place_for_the_process_whose_pool_it_keeps() {
    let folder = folder();
    let server = Serve::start_with(folder.path(), "16M", &["--max-clients", "1", "--grace", "3600s"]);
    let address = server.address.clone();
    let mut first = machine(folder, &[&address], Setup { seed: 79, ..Setup::default() });
    first.run_until_hits(200);
    first.settle();
    let token = token_at(&server);
    first.program.kill();
    wait_until("the server has noticed", || server.status()["pools"][0]["connected"] == false);
    let other = Machine::start(Setup { server: Some(address.clone()), seed: 80, ..Setup::default() });
    wait_until("another process is refused", || !error_of(&other, &address).is_empty());
    first.restart();
    first.pages_sent = 0;
    assert_eq!(first.status().started, "warm", "{}", first.program.log());
    first.run_until_hits(50);
    assert_eq!(token_at(&server), token);
    other.finish();
    first.finish();
}

/// A VM that wants more than it has asks again and again.
#[test]
fn who_only_asks_what_a_server_could_give_is_no_session_in_its_log() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let path = server.address.strip_prefix("unix:").unwrap();
    for (epoch, asks_alone) in [(1, true), (2, false)] {
        let mut bytes = Vec::new();
        Frame::Hello(Hello { versions: VERSIONS, token: Token([7; 16]), epoch }).encode(&mut bytes);
        if !asks_alone {
            Frame::SetSize { request: RequestId(1), npages: PageCount(1) }.encode(&mut bytes);
        }
        Frame::Bye.encode(&mut bytes);
        let mut socket = UnixStream::connect(path).unwrap();
        socket.write_all(&bytes).unwrap();
        let answered = socket.read_to_end(&mut Vec::new()).unwrap();
        assert!(answered > 0);
    }
    wait_until("its end is told", || server.program.log().contains("session ended"));
    let log = server.program.log();
    let told = ["session begins", "session ended"].map(|words| log.matches(words).count());
    assert!(told == [1, 1] && log.contains("epoch=2"), "{log}");
}

#[test]
fn lists_that_are_none() {
    let image = tempfile::NamedTempFile::new().unwrap();
    let (image, socket) = (image.path().to_str().unwrap(), "/no/such/folder/socket");
    let start = |servers: &[&str]| run(&[&["disk", "--image", image, "--socket", socket], servers].concat());
    expect_refusal(&start(&["--server=unix:/a", "--server=unix:/a"]), CONFIGURATION, &["unix:/a is given twice"]);
    expect_refusal(&start(&["--server=unix:/a", "--server=b"]), USAGE, &["`b` is not an address"]);
}

/// Kills, stops and starts two servers in random order, and changes the list.
#[test]
fn chaos_with_two_servers() {
    let folder = tempfile::tempdir().unwrap();
    let mut servers = ["a", "b"].map(|name| serve(folder.path(), name, "16M"));
    let addresses = [0, 1].map(|at| servers[at].address.clone());
    let both = [addresses[0].as_str(), &addresses[1]];
    let mut machine =
        machine(folder, &both, Setup { sectors: vec![512, 4096], blocks: 1024, seed: 78, ..Setup::default() });
    let mut alive = [true; 2];
    for step in 0..30 {
        let at = machine.random.below(2);
        match machine.random.below(6) {
            0 | 1 if alive[at] => {
                servers[at].program.kill();
                alive[at] = false;
            }
            0..=2 if !alive[at] => {
                servers[at].restart();
                alive[at] = true;
            }
            3 if alive[at] => {
                servers[at].program.signal(Signal::STOP);
                let rounds = machine.random.below(20);
                machine.run(rounds);
                servers[at].program.signal(Signal::CONT);
            }
            4 => drop(machine.set(&format!("\"servers\":[\"{}\"]", addresses[at]))),
            _ => drop(machine.set(&format!("\"servers\":[\"{}\",\"{}\"]", both[at], both[1 - at]))),
        }
        let rounds = machine.random.below(30);
        machine.run(rounds);
        assert!(machine.outcome.wrong == 0 && machine.outcome.errors == 0, "step {step}: {:#?}", machine.outcome);
    }
    for at in 0..2 {
        if !alive[at] {
            servers[at].restart();
        }
    }
    machine.set(&format!("\"servers\":[\"{}\",\"{}\"]", both[0], both[1]));
    machine.run_until_hits(200);
    machine.finish();
}

/// Starts the process `vm` with disks of these names.
fn plain(folder: &Path, server: &Serve, disks: &[&str]) -> Program {
    let mut disk = command(REMOCA);
    disk.args(["disk", "--name", "vm", "--cache", "8M", "--server", &server.address]);
    disk.arg("--control").arg(folder.join("control"));
    for name in disks {
        let image = folder.join(name);
        std::fs::write(&image, vec![0; 1 << 20]).unwrap();
        disk.arg("--disk").arg(format!("image={0},socket={0}.socket", image.display()));
    }
    Program::start(&mut disk, &folder.join("disk.log"))
}

#[test]
fn a_pool_that_the_successor_does_not_use_is_given_back_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let patient = |name| {
        let folder = folder.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        Serve::start_with(&folder, "16M", &["--grace", "3600s"])
    };
    let (first, second) = (patient("a"), patient("b"));
    let tokens = |server: &Serve| {
        let status = server.status();
        let pools = status["pools"].as_array().unwrap().iter();
        pools.map(|pool| pool["token"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let mut process = plain(folder.path(), &first, &["root"]);
    wait_until("it has a pool", || tokens(&first).len() == 1);
    process.kill();

    let mut process = plain(folder.path(), &second, &["root"]);
    wait_until("the pool is at the other server", || tokens(&second).len() == 1);
    wait_until("the first one has its memory back", || tokens(&first).is_empty());
    let former = tokens(&second);
    process.kill();

    // With another key the index is a new one, and so is the pool.
    damage(&folder.path().join("vm.state"), None, Some([7; 16]));
    let mut process = plain(folder.path(), &second, &["root"]);
    wait_until("there is a new pool, and only that", || {
        let tokens = tokens(&second);
        tokens.len() == 1 && tokens != former
    });
    process.terminate();
}
