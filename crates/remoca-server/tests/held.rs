//! Clients that hold the lock of their memory, so that nobody can change it: others are served, and the server ends.
#![allow(clippy::unwrap_used, reason = "tests fail by panics")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use common::held::{Held, is_root};
use common::mapped::{Mapped, set_size};
use common::{PATIENCE, config, start, token, wait_for};
use remoca_protocol::Frame;
use remoca_server::command::{Reply, TakenBack, command_path};
use remoca_server::{Config, Limits, ListenAddress, PageLocking, Server, Status};
use tempfile::TempDir;

/// More than there are helper threads for pools that do not hold them up.
const MANY: u8 = 5;

struct Setup {
    server: Server,
    path: PathBuf,
    control: PathBuf,
    _folder: TempDir,
}

fn setup(locking: PageLocking, limits: Limits) -> Setup {
    let folder = tempfile::tempdir().unwrap();
    let [path, control] = ["s", "control"].map(|name| folder.path().join(name));
    let listen = vec![ListenAddress::Unix(path.clone())];
    let control = Some(control);
    let server = start(Config { listen, control, memory_bytes: 32 << 20, locking, limits, ..config() });
    let control = folder.path().join("control");
    Setup { server, path, control, _folder: folder }
}

fn take_back(control: &Path, pool: &str) -> Reply {
    let mut stream = UnixStream::connect(command_path(control)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(format!("{{\"op\":\"take_back\",\"pool\":\"{pool}\",\"bytes\":0}}\n").as_bytes()).unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap()
}

fn locked_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Connects clients that hold their memory's lock while their pools are to change.
fn holders(path: &Path) -> Vec<(Held, Mapped)> {
    let holder = |number| {
        let mut client = Mapped::connect(path, token(number), 1);
        client.resize(600);
        let held = Held::hold(client.copy());
        client.send(&[set_size(100)]);
        (held, client)
    };
    (1..=MANY).map(holder).collect()
}

#[test]
fn pools_change_while_other_clients_hold_their_memory() {
    if !is_root() {
        return;
    }
    let setup = setup(PageLocking::Unlocked, Limits::default());
    let mut holders = holders(&setup.path);
    let mut other = Mapped::connect(&setup.path, token(0xab), 1);
    // Asked before the server knows that it is held.
    let Reply::Error(error) = take_back(&setup.control, "01010101") else { panic!("it gives nothing") };
    let own = format!("pid={}", std::process::id());
    assert!(error.contains(&own) && error.contains("a write that does not end"), "{error}");
    // Whoever looks sees which ones they are.
    let held = |status: &Status| status.pools.iter().filter(|pool| pool.mapped.unwrap().held).count();
    wait_for(&setup.server, "the operator is told", |status| held(status) == usize::from(MANY));
    for size in [600, 10, 1200, 0, 700] {
        other.resize(size);
        assert_eq!(other.allocated(), u64::from(size));
    }
    assert_eq!(take_back(&setup.control, "abababab"), Reply::Done(TakenBack { pages: 0, ended: true }));
    // Once it lets go, it has what it asked for.
    let (held, mut client) = holders.pop().unwrap();
    drop(held);
    client.receive(|frame| assert!(matches!(frame, Frame::Sized { .. }), "{frame:?}")).unwrap();
    assert_eq!(client.allocated(), 100);
}

#[test]
fn a_server_ends_while_clients_hold_their_memory() {
    if !is_root() {
        return;
    }
    let setup = setup(PageLocking::Locked, Limits::default());
    let holders = holders(&setup.path);
    let Setup { server, .. } = setup;
    let (ended, has_ended) = mpsc::channel();
    std::thread::spawn(move || {
        server.shutdown();
        ended.send(())
    });
    has_ended.recv_timeout(PATIENCE).expect("the server does not end");
    // It had 32 MiB locked. What the clients still have is unlocked, but for their 100 pages.
    assert!(locked_kib() < 8 << 10, "{} KiB", locked_kib());
    drop(holders);
}
