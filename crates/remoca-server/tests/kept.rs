//! Mapped pools that outlive a server that is killed: a service manager keeps them. The server is a process of its own,
//! this program again, because only a process can be killed.
#![allow(clippy::unwrap_used, reason = "tests fail by panics")]

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use common::held::{Held, is_root};
use common::mapped::{Mapped, set_size};
use common::{Client, PATIENCE, config, start, token};
use remoca_io::descriptor_store::{DescriptorStore, ROOM};
use remoca_io::fake_manager::FakeManager;
use remoca_protocol::{ErrorCode, Frame, PageCount};
use remoca_server::{Config, ListenAddress, PageLocking, Server, Status};
use tempfile::TempDir;

const FOLDER: &str = "REMOCA_TEST_FOLDER";
const MEMORY: &str = "REMOCA_TEST_MEMORY";
const LOCKED: &str = "REMOCA_TEST_LOCKED";

/// Serves until it is killed, or told to stop by the end of its input.
#[test]
#[ignore = "only a child of the tests below"]
fn as_a_child() {
    let store = DescriptorStore::receive();
    let variable = |name| std::env::var(name).expect("set by the parent");
    let folder = PathBuf::from(variable(FOLDER));
    let locked = variable(LOCKED) == "true";
    let config = Config {
        listen: vec![ListenAddress::Unix(folder.join("s"))],
        control: Some(folder.join("control")),
        memory_bytes: variable(MEMORY).parse().expect("a number"),
        locking: if locked { PageLocking::Locked } else { PageLocking::Unlocked },
        ..config()
    };
    let server = Server::start_telling(config, Some(store), &mut |_| ()).expect("it starts");
    println!("\nlistening");
    std::io::stdin().read_to_end(&mut Vec::new()).expect("the end of the input");
    server.shutdown();
}

/// A unit: a server that is started again and again by the same manager.
struct Unit {
    manager: FakeManager,
    folder: TempDir,
    room: u32,
    memory_bytes: u64,
    locked: bool,
    child: Option<Child>,
}

impl Unit {
    fn new(locked: bool) -> Self {
        let (manager, folder) = (FakeManager::start(), tempfile::tempdir().unwrap());
        Self { manager, folder, room: 64, memory_bytes: 8 << 20, locked, child: None }
    }

    #[track_caller]
    fn start(&mut self) {
        let mut command: Command = self.manager.service(&std::env::current_exe().unwrap());
        command.args(["--exact", "as_a_child", "--ignored", "--nocapture"]);
        command.env(FOLDER, self.folder.path()).env(MEMORY, self.memory_bytes.to_string());
        command.env(LOCKED, self.locked.to_string()).env(ROOM, self.room.to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        assert!(output.by_ref().lines().map_while(Result::ok).any(|line| line == "listening"), "it does not start");
        child.stdout = Some(output.into_inner());
        self.child = Some(child);
    }

    fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn stop(&mut self) {
        let mut child = self.child.take().unwrap();
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    fn status(&self) -> Status {
        let mut text = String::new();
        UnixStream::connect(self.folder.path().join("control")).unwrap().read_to_string(&mut text).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    #[track_caller]
    fn wait_for(&self, what: &str, wanted: impl Fn(&Status) -> bool) {
        for _ in 0..6000 {
            if wanted(&self.status()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("never came: {what}: {:#?}", self.status());
    }

    #[track_caller]
    fn wait_until_kept(&self) {
        self.wait_for("it is kept", |status| status.pools.iter().all(|pool| pool.mapped.unwrap().kept));
    }

    fn keeps(&self, memory: &File) -> bool {
        self.manager.keeps(Path::new(&format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(memory))))
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn a_pool_outlives_its_server() {
    for locked in [false, true] {
        let mut unit = Unit::new(locked);
        unit.start();
        let mut client = Mapped::connect(&unit.path(), token(1), 1);
        client.resize(700);
        (0..700).for_each(|slot| client.store(slot, slot));
        let first = client.welcome;
        unit.wait_until_kept();
        for epoch in 2..6 {
            // In good order or not: the pool is there, while there is no server as well.
            if epoch % 2 == 0 {
                unit.kill()
            } else {
                unit.stop()
            }
            assert!(client.receive(|_| ()).is_none());
            assert!(client.holds(699, 699));
            client.store(5, 1000 + epoch);
            unit.start();
            let status = unit.status();
            assert_eq!((status.pages, status.pages_free), (2048, 1024), "it counts as used");
            assert_eq!((status.pools[0].npages, status.pools[0].connected), (700, false));
            let stale = Mapped::try_connect(&unit.path(), token(1), u64::from(epoch) - 1).err().unwrap();
            assert_eq!(stale.code, ErrorCode::StaleEpoch);
            client = Mapped::connect(&unit.path(), token(1), epoch.into());
            assert_eq!(client.welcome.pool_generation, first.pool_generation);
            assert_eq!((client.welcome.server_id, client.welcome.npages), (first.server_id, PageCount(700)));
            assert!(client.holds(5, 1000 + epoch) && client.holds(699, 699));
            assert_eq!(client.resize(1024), 1024);
            assert_eq!(client.resize(700), 2048 - 700);
        }
        // The arena has the other chunks whole.
        let mut paged = Client::connect_to(&ListenAddress::Unix(unit.path()));
        paged.hello(token(2), 1);
        assert_eq!(paged.resize(1024), 0);
        (0..1024).for_each(|slot| paged.store(slot, slot));
        (0..1024).for_each(|slot| paged.expect_held(slot, slot));
        // All of it comes back when the client leaves.
        client.send(&[Frame::Bye]);
        unit.wait_for("it is freed", |status| status.pages_free == 1024);
        paged.resize(2048);
        (1024..2048).for_each(|slot| paged.store(slot, slot));
        // The memory may be free before the manager hears of it.
        unit.wait_for("nothing is kept of a pool that has ended", |_| unit.manager.names().is_empty());
    }
}

/// The record may be older than the memory, but never believed where it could hurt.
#[test]
fn a_server_that_is_killed_while_a_pool_changes_leaves_a_whole_one() {
    let mut unit = Unit::new(true);
    unit.memory_bytes = 64 << 20;
    unit.start();
    let mut client = Mapped::connect(&unit.path(), token(1), 1);
    client.resize(1000);
    (0..1000).for_each(|slot| client.store(slot, slot));
    unit.wait_until_kept();
    for (epoch, size) in (2..).zip([16_000, 1000, 14_000, 1200, 16_384, 1001]) {
        client.resize(if size > 8000 { 1000 } else { 16_000 });
        let before = client.allocated();
        client.send(&[set_size(size)]);
        // The change has begun, and may be complete when the kill comes.
        while client.allocated() == before {
            std::thread::yield_now();
        }
        unit.kill();
        unit.start();
        client = Mapped::connect(&unit.path(), token(1), epoch);
        let granted = client.welcome.npages.0;
        assert_eq!(client.allocated(), u64::from(granted), "all that is granted, and nothing else, has memory");
        assert!((0..1000).all(|slot| client.holds(slot, slot)));
        let used = granted.next_multiple_of(512);
        assert_eq!(unit.status().pages_free, 16_384 - used);
        assert_eq!(client.resize(1000), 16_384 - 1000);
    }
}

#[test]
fn a_pool_that_is_not_kept_is_told_by_another_generation() {
    // No manager; one without room; one with room for half a pool.
    for room in [0, 1] {
        let mut unit = Unit::new(false);
        unit.room = room;
        unit.start();
        let mut client = Mapped::connect(&unit.path(), token(1), 1);
        client.resize(10);
        client.store(1, 1);
        assert!(!unit.status().pools[0].mapped.unwrap().kept);
        let first = client.welcome;
        unit.kill();
        unit.start();
        let client = Mapped::connect(&unit.path(), token(1), 2);
        assert_ne!(client.welcome.pool_generation, first.pool_generation);
        assert_eq!((client.welcome.npages, unit.manager.names().len()), (PageCount(0), 0));
        assert!(!client.holds(1, 1));
    }
    let server =
        start(Config { listen: vec![ListenAddress::Unix(tempfile::tempdir().unwrap().keep().join("s"))], ..config() });
    let ListenAddress::Unix(path) = &server.local_addresses()[0] else { panic!("a path") };
    let mut client = Mapped::connect(path, token(1), 1);
    client.resize(10);
    assert!(!server.status().pools[0].mapped.unwrap().kept);
}

#[test]
fn what_does_not_fit_or_was_tampered_with_is_ended() {
    let mut unit = Unit::new(true);
    unit.start();
    let mut clients: Vec<_> = (1..4).map(|number| Mapped::connect(&unit.path(), token(number), 1)).collect();
    for client in &mut clients {
        client.resize(512);
    }
    unit.wait_until_kept();
    assert!(clients.iter().all(|client| unit.keeps(&client.memory)));
    unit.kill();
    // More than was granted: it is punched before anybody counts.
    clients[0].memory.write_all(&[1; 4096]).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&clients[1].memory, &[1; 4096], 600 * 4096).unwrap();
    unit.start();
    assert_eq!((unit.status().pools.len(), unit.status().pages_free), (3, 512));
    assert!(clients.iter().all(|client| client.allocated() == 512));
    unit.kill();
    // Room for two of the three.
    unit.memory_bytes = 4 << 20;
    unit.start();
    let status = unit.status();
    assert_eq!((status.pages, status.pages_free, status.pools.len()), (1024, 0, 2));
    assert_eq!(unit.manager.names().len(), 4, "the third is not kept any longer");
    let allocated: Vec<_> = clients.iter().map(Mapped::allocated).collect();
    assert_eq!(allocated.iter().filter(|pages| **pages == 512).count(), 2, "{allocated:?}");
    assert_eq!(allocated.iter().sum::<u64>(), 1024, "{allocated:?}");
    assert_eq!(clients[0].memory.metadata().unwrap().size(), 2048 * 4096);
}

/// The memory of one cannot be looked after until its client lets go. The others come back, and the server starts.
#[test]
fn a_server_starts_while_a_client_holds_its_memory() {
    if !is_root() {
        return;
    }
    let mut unit = Unit::new(true);
    unit.start();
    let mut clients = [1, 2].map(|number| Mapped::connect(&unit.path(), token(number), 1));
    clients.iter_mut().for_each(|client| _ = client.resize(512));
    unit.wait_until_kept();
    unit.kill();
    let held = Held::hold(clients[0].copy());
    let (started, has_started) = mpsc::channel();
    std::thread::scope(|threads| {
        let unit = &mut unit;
        threads.spawn(move || {
            unit.start();
            started.send(())
        });
        let outcome = has_started.recv_timeout(PATIENCE);
        if outcome.is_err() {
            // Otherwise the scope waits for ever.
            drop(held);
            panic!("the server does not start");
        }
        // As soon as the client lets go, it has nothing.
        drop(held);
    });
    let status = unit.status();
    assert_eq!((status.pages, status.pages_free, status.pools.len()), (2048, 1536, 1));
    assert_eq!(Mapped::connect(&unit.path(), token(2), 2).welcome.npages, PageCount(512));
    while clients[0].allocated() > 0 || unit.manager.names().len() > 2 {
        std::thread::yield_now();
    }
    assert_eq!(Mapped::connect(&unit.path(), token(1), 2).welcome.npages, PageCount(0));
}

/// The VM process has its memory for as long as no server answers, and no server starts while the host does not have as much.
#[test]
fn a_pool_that_is_larger_than_all_memory_now_gives_its_own_back() {
    let mut unit = Unit::new(true);
    unit.start();
    let mut client = Mapped::connect(&unit.path(), token(1), 1);
    client.resize(1024);
    unit.wait_until_kept();
    unit.kill();
    assert_eq!(client.allocated(), 1024);
    unit.memory_bytes = 2 << 20;
    unit.start();
    let status = unit.status();
    assert_eq!((status.pages, status.pages_free, status.pools.len()), (512, 512, 0));
    assert_eq!((client.allocated(), unit.manager.names().len()), (0, 0));
}
