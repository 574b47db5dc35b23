//! Pools whose clients read and write the pages by themselves.
#![allow(clippy::unwrap_used, reason = "tests fail by panics")]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::mapped::{Mapped, hello, set_size};
use common::{Client, config, encode, page, request, send_page, start, token, wait_for};
use remoca_protocol::{
    ErrorCode, ErrorReply, Frame, MAPPED_VERSIONS, PageCount, RequestId, TAKE_BACK_MS, VERSIONS, VersionRange,
};
use remoca_server::command::{Reply, TakenBack, command_path};
use remoca_server::{Config, Limits, ListenAddress, MappedStatus, PageLocking, Server};
use rustix::fs::{SealFlags, fcntl_get_seals};
use tempfile::TempDir;

/// A server with 8 MiB on a Unix socket, on a TCP port, and with a control socket.
struct Setup {
    server: Server,
    path: PathBuf,
    control: PathBuf,
    _folder: TempDir,
}

fn setup_with(change: impl FnOnce(Config) -> Config) -> Setup {
    let folder = tempfile::tempdir().unwrap();
    let [path, control] = ["s", "control"].map(|name| folder.path().join(name));
    let listen = vec![ListenAddress::Unix(path.clone()), "tcp:127.0.0.1:0".parse().unwrap()];
    let server = start(change(Config { listen, control: Some(control.clone()), ..config() }));
    Setup { server, path, control, _folder: folder }
}

fn setup() -> Setup {
    setup_with(|config| config)
}

fn mapped(server: &Server) -> MappedStatus {
    server.status().pools.iter().find_map(|pool| pool.mapped).expect("a mapped pool")
}

fn command(control: &Path, line: &str) -> String {
    let mut stream = UnixStream::connect(command_path(control)).unwrap();
    stream.write_all(line.as_bytes()).unwrap();
    let mut answer = String::new();
    // What is refused while a part of it is unread ends in a reset.
    let _reset = BufReader::new(stream).read_line(&mut answer);
    answer
}

fn take_back(control: &Path, pool: &str, pages: u64) -> Reply {
    let bytes = pages * 4096;
    let answer = command(control, &format!("{{\"op\":\"take_back\",\"pool\":\"{pool}\",\"bytes\":{bytes}}}\n"));
    serde_json::from_str(&answer).unwrap()
}

#[test]
fn a_client_has_memory_of_its_own_and_finds_it_again() {
    for locking in [PageLocking::Unlocked, PageLocking::Locked] {
        let setup = setup_with(|config| Config { locking, ..config });
        let mut client = Mapped::connect(&setup.path, token(1), 1);
        let first = client.welcome;
        assert_eq!((first.version, first.npages), (MAPPED_VERSIONS.highest, PageCount(0)));
        assert_eq!((first.available, first.quota), (PageCount(2048), PageCount(2048)));
        assert_eq!(client.memory.metadata().unwrap().size(), 2048 * 4096, "as large as it can ever be");
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        assert_eq!(fcntl_get_seals(&client.memory).unwrap(), seals);
        assert_eq!(client.allocated(), 0);
        assert_eq!(client.resize(600), 2048 - 600);
        assert!(client.has_memory_for(600), "granted pages have memory");
        (0..600).for_each(|slot| client.store(slot, slot));
        assert_eq!(setup.server.status().pages_free, 1024);
        drop(client);
        wait_for(&setup.server, "the server has noticed", |status| !status.pools[0].connected);
        let client = Mapped::connect(&setup.path, token(1), 2);
        let second = client.welcome;
        assert_eq!((second.server_id, second.pool_generation), (first.server_id, first.pool_generation));
        assert_eq!(second.npages, PageCount(600));
        assert!((0..600).all(|slot| client.holds(slot, slot)));
        let refusal = Mapped::try_connect(&setup.path, token(1), 2).err().unwrap();
        assert_eq!(refusal.code, ErrorCode::StaleEpoch);
    }
}

#[test]
fn a_smaller_pool_gives_memory_back_and_keeps_its_lower_slots() {
    let setup = setup();
    let mut client = Mapped::connect(&setup.path, token(1), 1);
    client.resize(1500);
    (0..1500).for_each(|slot| client.store(slot, slot));
    assert_eq!(client.resize(513), 2048 - 513);
    assert_eq!(client.allocated(), 513);
    assert!((0..513).all(|slot| client.holds(slot, slot)));
    assert!((513..1500).all(|slot| !client.holds(slot, slot)), "punched pages are zero");
    assert_eq!(client.resize(700), 2048 - 700);
    assert!((513..700).all(|slot| !client.holds(slot, slot)));
    assert_eq!((client.resize(0), client.allocated()), (2048, 0));
    assert_eq!(client.try_resize(2049), Err((ErrorCode::Quota, 2048)));
    assert_eq!(client.try_resize(u32::MAX), Err((ErrorCode::Quota, 2048)));
    assert_eq!((client.resize(2048), client.allocated()), (0, 2048));
}

/// Both kinds of pool together never have more than the server promised.
#[test]
fn mapped_and_paged_pools_share_one_account() {
    for locking in [PageLocking::Unlocked, PageLocking::Locked] {
        let setup = setup_with(|config| Config { locking, ..config });
        let mut paged = Client::connect(&setup.server);
        // The same token: the two kinds do not know each other.
        paged.hello(token(1), 1);
        paged.resize(700);
        (0..700).for_each(|slot| paged.store(slot, slot));
        let mut client = Mapped::connect(&setup.path, token(1), 1);
        assert_eq!(client.welcome.available, PageCount(1024));
        assert_eq!(client.try_resize(1025), Err((ErrorCode::NoMemory, 1024)));
        assert_eq!((client.resize(1024), client.allocated()), (0, 1024));
        assert_eq!(setup.server.status().pages_free, 0);
        assert_eq!(paged.try_resize(1025), Err((ErrorCode::NoMemory, 324)));
        (0..700).for_each(|slot| paged.expect_held(slot, slot));
        assert_eq!(client.resize(512), 512);
        assert_eq!(paged.resize(1536), 0);
        (1024..1536).for_each(|slot| paged.store(slot, slot));
        (1024..1536).for_each(|slot| paged.expect_held(slot, slot));
        assert_eq!(client.try_resize(513), Err((ErrorCode::NoMemory, 0)));
    }
}

#[test]
fn only_a_unix_socket_and_only_a_known_version_get_a_mapped_pool() {
    let setup = setup();
    let mut client = Client::connect_to(&setup.server.local_addresses()[1]);
    client.send(&[hello(token(1), 1)]);
    client.expect(Frame::Error(ErrorReply { request: RequestId(0), code: ErrorCode::NOT_MAPPABLE, detail: 1 }));
    client.expect_closed();
    for (lowest, own) in [(2, VERSIONS), (0x8002, MAPPED_VERSIONS)] {
        let mut client = Client::connect(&setup.server);
        let versions = VersionRange { lowest, highest: lowest + 1 };
        client.send(&[Frame::Hello(remoca_protocol::Hello { versions, token: token(1), epoch: 1 })]);
        let detail = own.to_detail();
        client.expect(Frame::Error(ErrorReply { request: RequestId(0), code: ErrorCode::VersionMismatch, detail }));
        client.expect_closed();
    }
    assert_eq!(setup.server.status().totals.sessions, 0);
}

#[test]
fn pages_do_not_travel_over_a_mapped_session() {
    let setup = setup();
    let page = page(1);
    let wrong = [
        encode(&[send_page(0, &page)]),
        encode(&[request(1, 0)]),
        encode(&[common::moved(0, 1)]),
        encode(&[hello(token(1), 9)]),
        encode(&[Frame::TakeBack { npages: PageCount(0) }]),
        vec![0xff; 40],
    ];
    for (epoch, bytes) in (1..).zip(wrong) {
        let mut client = Mapped::connect(&setup.path, token(1), epoch);
        client.resize(3);
        client.store(2, 8);
        (&client.socket).write_all(&bytes).unwrap();
        client.expect_error(ErrorCode::Malformed);
    }
    // The pool is as before, as that of any client whose connection broke.
    let client = Mapped::connect(&setup.path, token(1), 100);
    assert!(client.welcome.npages == PageCount(3) && client.holds(2, 8));
}

#[test]
fn an_older_connection_is_closed_before_a_newer_one_is_answered() {
    let setup = setup();
    let mut older = Mapped::connect(&setup.path, token(1), 1);
    older.resize(10);
    for epoch in 2..30 {
        // The size changes while the connection is replaced: the newer one sees one size or the other, completed.
        let size = if epoch % 2 == 0 { 2000 } else { 10 };
        older.send(&[set_size(size)]);
        let newer = Mapped::connect(&setup.path, token(1), epoch);
        assert!(newer.has_memory_for(newer.welcome.npages.0));
        assert!([10, 2000].contains(&newer.welcome.npages.0));
        older.socket.set_nonblocking(true).unwrap();
        while let Some(()) = older.receive(|frame| assert!(matches!(frame, Frame::Sized { .. }))) {}
        older = newer;
    }
}

#[test]
fn a_pool_that_has_ended_is_never_used_again() {
    let setup = setup();
    let mut first = Mapped::connect(&setup.path, token(1), 1);
    first.resize(100);
    first.store(7, 7);
    first.send(&[Frame::Bye]);
    assert!(first.receive(|_| ()).is_none());
    wait_for(&setup.server, "all is free", |status| status.pages_free == 2048 && status.pools.is_empty());
    assert_eq!(first.allocated(), 0, "who still has it reads zeroes");
    let mut second = Mapped::connect(&setup.path, token(1), 2);
    assert_ne!(second.welcome.pool_generation, first.welcome.pool_generation);
    second.resize(100);
    first.store(7, 7);
    assert!(!second.holds(7, 7), "another file");
}

#[test]
fn a_client_that_does_not_come_back_is_not_waited_for_without_end() {
    let setup = setup_with(|config| Config { grace: Duration::from_millis(50), ..config });
    let mut client = Mapped::connect(&setup.path, token(1), 1);
    client.resize(100);
    let memory = client.memory.try_clone().unwrap();
    drop(client);
    wait_for(&setup.server, "it is freed", |status| status.pages_free == 2048 && status.totals.expired == 1);
    assert_eq!(memory.metadata().unwrap().blocks(), 0);
}

#[test]
fn memory_is_taken_back_from_a_client_that_answers() {
    // It has a tenth of a second, and may get no processor in that time.
    assert!((0..20).any(|_| a_client_that_answers_keeps_the_rest()), "it is never in time");
}

/// Returns whether the client answered in time.
fn a_client_that_answers_keeps_the_rest() -> bool {
    let setup = setup();
    let mut client = Mapped::connect(&setup.path, token(0xab), 1);
    client.resize(1000);
    (0..1000).for_each(|slot| client.store(slot, slot));
    let control = setup.control.clone();
    let begun = Instant::now();
    let operator = std::thread::spawn(move || take_back(&control, "abababab", 100));
    client.expect(Frame::TakeBack { npages: PageCount(100) });
    // A larger size than asked for is no answer.
    // If it is late, the connection may have ended.
    let _late = (&client.socket).write_all(&encode(&[set_size(1100), set_size(100)]));
    match operator.join().unwrap() {
        Reply::Done(TakenBack { pages: 0, ended: true }) => {
            assert!(begun.elapsed() >= Duration::from_millis(TAKE_BACK_MS), "it had time left");
            return false;
        }
        reply => assert_eq!(reply, Reply::Done(TakenBack { pages: 100, ended: false })),
    }
    let request = RequestId(5);
    client.expect(Frame::Error(ErrorReply { request, code: ErrorCode::NoMemory, detail: 0 }));
    client.expect(Frame::Sized { request, npages: PageCount(100), available: PageCount(0) });
    assert_eq!(client.allocated(), 100);
    assert!((0..100).all(|slot| client.holds(slot, slot)));
    assert_eq!(mapped(&setup.server).limit_pages, 100);
    assert_eq!(client.try_resize(101), Err((ErrorCode::NoMemory, 0)));
    // What the operator allows again can be had again.
    assert_eq!(take_back(&setup.control, "abababab", 600), Reply::Done(TakenBack { pages: 100, ended: false }));
    assert_eq!(client.resize(600), 0);
    true
}

#[test]
fn memory_is_taken_from_a_client_that_does_not_answer() {
    let setup = setup();
    let mut client = Mapped::connect(&setup.path, token(0xab), 1);
    client.resize(1000);
    (0..1000).for_each(|slot| client.store(slot, slot));
    assert_eq!(take_back(&setup.control, "abababab", 999), Reply::Done(TakenBack { pages: 0, ended: true }));
    assert_eq!(client.allocated(), 0);
    client.expect(Frame::TakeBack { npages: PageCount(999) });
    client.expect_error(ErrorCode::TAKEN_BACK);
    wait_for(&setup.server, "all is free", |status| status.pages_free == 2048 && status.pools.is_empty());
    let again = Mapped::connect(&setup.path, token(0xab), 2);
    assert_ne!(again.welcome.pool_generation, client.welcome.pool_generation);
    // One that has gone cannot answer.
    let mut gone = Mapped::connect(&setup.path, token(0xcd), 1);
    gone.resize(10);
    let memory = gone.memory.try_clone().unwrap();
    drop(gone);
    wait_for(&setup.server, "the server has noticed", |status| status.pools.iter().any(|pool| !pool.connected));
    assert_eq!(take_back(&setup.control, "cdcdcdcd", 9), Reply::Done(TakenBack { pages: 0, ended: true }));
    assert_eq!(memory.metadata().unwrap().blocks(), 0);
}

/// An upgrade or a restart of a VM process says nothing to the server, and comes back with the same token.
#[test]
fn a_limit_outlasts_a_client_that_comes_back() {
    let setup = setup();
    let is_away = || wait_for(&setup.server, "it is away", |status| status.pools.iter().all(|pool| !pool.connected));
    let done = Reply::Done(TakenBack { pages: 0, ended: false });
    let mut client = Mapped::connect(&setup.path, token(0xab), 1);
    client.resize(100);
    client.resize(0);
    assert_eq!(take_back(&setup.control, "abababab", 0), done);
    let first = client.welcome;
    drop(client);
    is_away();
    let mut client = Mapped::connect(&setup.path, token(0xab), 2);
    assert_eq!((client.welcome.pool_generation, client.welcome.quota), (first.pool_generation, PageCount(0)));
    assert_eq!(client.try_resize(1), Err((ErrorCode::NoMemory, 0)));
    drop(client);
    is_away();
    assert_eq!(take_back(&setup.control, "abababab", 600), done);
    let mut client = Mapped::connect(&setup.path, token(0xab), 3);
    assert_eq!(client.resize(600), 0, "what the operator allows again can be had again");
    client.send(&[Frame::Bye]);
    wait_for(&setup.server, "it has left for good", |status| status.pools.is_empty());
}

#[test]
fn an_empty_pool_with_a_limit_is_not_kept_without_end() {
    let setup = setup_with(|config| Config { grace: Duration::from_millis(50), ..config });
    let client = Mapped::connect(&setup.path, token(0xab), 1);
    assert_eq!(take_back(&setup.control, "abababab", 0), Reply::Done(TakenBack { pages: 0, ended: false }));
    drop(client);
    wait_for(&setup.server, "it is freed", |status| status.pools.is_empty() && status.totals.expired == 1);
}

/// It hangs up when it is asked, or sends requests without end and reads nothing.
#[test]
fn a_client_that_does_anything_but_answer_keeps_no_memory() {
    let setup = setup();
    let ended = Reply::Done(TakenBack { pages: 0, ended: true });
    let mut client = Mapped::connect(&setup.path, token(0xab), 1);
    client.resize(1000);
    let memory = client.memory.try_clone().unwrap();
    let control = setup.control.clone();
    let operator = std::thread::spawn(move || take_back(&control, "abababab", 999));
    client.expect(Frame::TakeBack { npages: PageCount(999) });
    drop(client);
    assert_eq!(operator.join().unwrap(), ended);
    assert_eq!(memory.metadata().unwrap().blocks(), 0);

    let mut client = Mapped::connect(&setup.path, token(0xcd), 1);
    client.resize(1000);
    let socket = client.socket.try_clone().unwrap();
    let requests = encode(&[set_size(1000); 100]);
    // Ends with the session.
    let flood = std::thread::spawn(move || while (&socket).write_all(&requests).is_ok() {});
    assert_eq!(take_back(&setup.control, "cdcdcdcd", 999), ended);
    assert_eq!(client.allocated(), 0);
    flood.join().unwrap();
    wait_for(&setup.server, "all is free", |status| status.pages_free == 2048 && status.pools.is_empty());
}

/// If the growth is first, the client is asked; if the limit is, it is refused.
#[test]
fn a_pool_that_grows_meanwhile_does_not_grow_beyond_what_is_taken_back() {
    let setup = setup();
    for round in 0..40 {
        let mut client = Mapped::connect(&setup.path, token(0xab), round + 1);
        client.send(&[set_size(2000)]);
        let control = setup.control.clone();
        let operator = std::thread::spawn(move || {
            (0..round * 5000).for_each(|count| _ = std::hint::black_box(count));
            take_back(&control, "abababab", 100)
        });
        let reply = operator.join().unwrap();
        assert!(matches!(reply, Reply::Done(TakenBack { pages: 0, .. })), "{reply:?}");
        assert_eq!(client.allocated(), 0);
        let has_grown = client.receive(|frame| matches!(frame, Frame::Sized { .. })).expect("an answer");
        match has_grown {
            // It did not answer, and has lost the pool.
            true => client.expect(Frame::TakeBack { npages: PageCount(100) }),
            false => client.send(&[Frame::Bye]),
        }
        wait_for(&setup.server, "the pool is gone", |status| status.pages_free == 2048 && status.pools.is_empty());
    }
}

#[test]
fn memory_is_taken_from_all_pools_that_look_the_same() {
    let setup = setup();
    let mut other = token(0xab);
    other.0[15] = 1;
    let mut clients = [token(0xab), other].map(|token| Mapped::connect(&setup.path, token, 1));
    clients.iter_mut().for_each(|client| _ = client.resize(100));
    assert_eq!(take_back(&setup.control, "abababab", 200), Reply::Done(TakenBack { pages: 200, ended: false }));
    assert_eq!(take_back(&setup.control, "abababab", 50), Reply::Done(TakenBack { pages: 0, ended: true }));
    assert!(clients.iter().all(|client| client.allocated() == 0));
}

/// The memory of a pool that has ended is the client's own if it goes on writing. The operator hears of it, others lose nothing.
#[test]
fn a_client_that_goes_on_writing_keeps_nobody_from_the_servers_memory() {
    let setup = setup();
    let mut client = Mapped::connect(&setup.path, token(0xab), 1);
    client.resize(2048);
    let stop = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                client.store(900, 1);
            }
        });
        let reply = take_back(&setup.control, "abababab", 0);
        wait_for(&setup.server, "all is free", |status| status.pages_free == 2048 && status.pools.is_empty());
        stop.store(true, Ordering::SeqCst);
        // Which one depends on whether the writer got a processor between a hole and the look at it.
        match reply {
            Reply::Error(error) => assert!(error.contains("goes on using"), "{error}"),
            Reply::Done(done) => assert_eq!(done, TakenBack { pages: 0, ended: true }),
        }
    });
}

/// Some connect and say nothing, more than are served at a time.
#[test]
fn silent_operators_keep_nobody_waiting() {
    let setup = setup();
    let socket = command_path(&setup.control);
    let silent: Vec<_> = (0..100).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    let Reply::Error(error) = take_back(&setup.control, "abababab", 0) else { panic!("there is no pool") };
    assert!(error.contains("remoca status --server"), "{error}");
    drop(silent);
}

/// A status that is larger than what the kernel keeps for one that does not read.
#[test]
fn who_does_not_read_the_status_keeps_nobody_waiting() {
    let limits = Limits { sessions: 2000, ..Limits::default() };
    let setup = setup_with(|config| Config { limits, ..config });
    let clients = |number: u16| {
        let mut token = token(1);
        token.0[..2].copy_from_slice(&number.to_le_bytes());
        let mut client = Client::connect(&setup.server);
        client.hello(token, 1);
        client
    };
    let clients: Vec<_> = (0..2000).map(clients).collect();
    let silent: Vec<_> = (0..100).map(|_| UnixStream::connect(&setup.control).unwrap()).collect();
    let mut reader = UnixStream::connect(&setup.control).unwrap();
    reader.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    let status: remoca_server::Status = serde_json::from_str(&text).unwrap();
    assert_eq!(status.pools.len(), clients.len());
    drop(silent);
}

#[test]
fn commands_that_make_no_sense_are_answered() {
    let setup = setup();
    for line in ["{}\n", "\n", "take it back\n", "{\"op\":\"take_back\",\"pool\":\"ab\",\"bytes\":-1}\n"] {
        assert!(command(&setup.control, line).contains("not a command"), "{line}");
    }
    assert!(command(&setup.control, &"x".repeat(5000)).is_empty(), "too long to be one");
    let Reply::Error(error) = take_back(&setup.control, "abababab", 0) else { panic!("there is no pool") };
    assert!(error.contains("remoca status --server"), "{error}");
    let mode = std::fs::metadata(command_path(&setup.control)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let path = command_path(&setup.control);
    setup.server.shutdown();
    assert!(!path.exists());
}

/// A host may have huge pages for all shared memory. What it rounds up is in the account: chunks are lent as a whole.
#[test]
fn a_pool_keeps_what_the_host_rounds_up_in_its_last_chunk() {
    let setup = setup();
    let mut client = Mapped::connect(&setup.path, token(0xab), 1);
    let round_up = |client: &Mapped, to: u64| {
        rustix::fs::fallocate(&client.memory, rustix::fs::FallocateFlags::empty(), 0, to * 4096).unwrap();
    };
    client.resize(600);
    round_up(&client, 1024);
    assert_eq!((mapped(&setup.server).resident_pages, setup.server.status().pages_free), (1024, 1024));
    assert_eq!(client.resize(700), 2048 - 700);
    assert_eq!(client.resize(10), 2048 - 10);
    round_up(&client, 512);
    assert_eq!(mapped(&setup.server).resident_pages, 512);
    assert_eq!(take_back(&setup.control, "abababab", 10), Reply::Done(TakenBack { pages: 10, ended: false }));
    // Others have the next chunk.
    round_up(&client, 513);
    let _looked = setup.server.status();
    client.expect_error(ErrorCode::TAKEN_BACK);
    wait_for(&setup.server, "all is free", |status| status.pages_free == 2048);
    assert_eq!(client.allocated(), 0);
}

/// A client can write to all of its file. It pays with its pool.
#[test]
fn who_uses_more_than_was_granted_loses_the_pool() {
    let setup = setup();
    let mut client = Mapped::connect(&setup.path, token(1), 1);
    client.resize(10);
    (0..=512).for_each(|slot| client.store(slot, 1));
    // Whoever looks at the status, or the server's own watch, finds it.
    let _looked = setup.server.status();
    client.expect_error(ErrorCode::TAKEN_BACK);
    wait_for(&setup.server, "all is free", |status| status.pages_free == 2048 && status.pools.is_empty());
    assert_eq!(client.allocated(), 0);
    // So does its next request.
    let mut client = Mapped::connect(&setup.path, token(2), 1);
    client.store(2000, 1);
    // If the server's watch was first, the connection may have ended.
    let _late = (&client.socket).write_all(&encode(&[set_size(5)]));
    client.expect_error(ErrorCode::TAKEN_BACK);
    // And one that is gone.
    let mut client = Mapped::connect(&setup.path, token(3), 1);
    client.resize(5);
    let memory = client.memory.try_clone().unwrap();
    drop(client);
    wait_for(&setup.server, "the server has noticed", |status| {
        status.pools.iter().any(|pool| !pool.connected && pool.npages == 5)
    });
    std::os::unix::fs::FileExt::write_all_at(&memory, &[1; 512 * 4096], 4096 * 100).unwrap();
    wait_for(&setup.server, "all is free", |status| status.pages_free == 2048 && status.pools.is_empty());
    assert_eq!(memory.metadata().unwrap().blocks(), 0);
}

/// A client may punch holes itself: it has less than was granted then, and others have no more.
#[test]
fn less_than_was_granted_is_the_clients_own_loss() {
    let setup = setup();
    let mut client = Mapped::connect(&setup.path, token(1), 1);
    client.resize(600);
    let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&client.memory, hole, 0, 4096 * 50).unwrap();
    let now = mapped(&setup.server);
    assert_eq!(now, MappedStatus { resident_pages: client.allocated(), limit_pages: 2048, kept: false, held: false });
    assert!(client.has_memory_for(550) && now.resident_pages < 1024);
    assert_eq!(client.resize(700), 2048 - 700);
    assert!(rustix::fs::ftruncate(&client.memory, 0).is_err());
}

#[test]
fn descriptors_that_a_client_sends_are_closed() {
    let setup = setup();
    let mut client = Mapped::connect(&setup.path, token(1), 1);
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let frame = encode(&[set_size(3)]);
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut room);
    let both = [writer.as_fd(), client.memory.as_fd()];
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&both)));
    let slices = [std::io::IoSlice::new(&frame)];
    rustix::net::sendmsg(&client.socket, &slices, &mut control, rustix::net::SendFlags::empty()).unwrap();
    client.receive(|frame| assert!(matches!(frame, Frame::Sized { .. }))).unwrap();
    drop(writer);
    assert_eq!(std::fs::File::from(reader).read(&mut [0]).unwrap(), 0, "the server has no copy");
}

#[test]
fn all_clients_count_against_the_same_maximum() {
    let limits = Limits { sessions: 2, ..Limits::default() };
    let setup = setup_with(|config| Config { limits, ..config });
    let mut paged = Client::connect(&setup.server);
    paged.hello(token(1), 1);
    let mut first = Mapped::connect(&setup.path, token(2), 1);
    first.resize(1);
    let refused = |number| Mapped::try_connect(&setup.path, token(number), 1).err().map(|refusal| refusal.code);
    assert_eq!(refused(3), Some(ErrorCode::Busy));
    drop(first);
    wait_for(&setup.server, "the server has noticed", |status| status.pools.iter().any(|pool| !pool.connected));
    // Its pool is kept for it, and so is its place.
    assert_eq!(refused(4), Some(ErrorCode::Busy));
    assert_eq!(Mapped::connect(&setup.path, token(2), 2).welcome.npages, PageCount(1));
    paged.send(&[Frame::Bye]);
    paged.expect_closed();
    wait_for(&setup.server, "a place is free", |status| status.pools.len() == 1);
    assert_eq!(refused(5), None);
}

/// The server maps each pool as large as it may become, and has 128 TiB of addresses for all of them.
#[test]
fn where_there_may_be_many_pools_none_takes_too_many_addresses() {
    // Little more than a pool gets: no server starts with more than the host has available.
    const MEMORY: u64 = (1 << 30) + (2 << 20);
    let quota = |quota_bytes| {
        let limits = Limits { sessions: 1 << 16, ..Limits::default() };
        let locking = PageLocking::Unlocked;
        let setup = setup_with(|config| Config { memory_bytes: MEMORY, locking, quota_bytes, limits, ..config });
        u64::from(Mapped::connect(&setup.path, token(1), 1).welcome.quota.0) * 4096
    };
    assert_eq!(quota(None), 1 << 30, "64 TiB for 65,536 pools");
    assert_eq!(quota(Some(MEMORY)), MEMORY, "as the operator says");
}

/// A large change of one pool does not keep another client from its pages.
#[test]
fn others_are_served_while_a_pool_grows() {
    let setup = setup_with(|config| Config { memory_bytes: 256 << 20, ..config });
    let mut paged = Client::connect(&setup.server);
    paged.hello(token(1), 1);
    paged.resize(512);
    paged.store(0, 1);
    let mut client = Mapped::connect(&setup.path, token(1), 1);
    let most = 127 * 512;
    for size in [most, 0, most, 100] {
        client.send(&[set_size(size)]);
        paged.expect_held(0, 1);
        // A growth that takes long is granted in parts.
        let granted = client.receive(|frame| match frame {
            Frame::Sized { npages, .. } => npages.0,
            other => panic!("instead of SIZED: {other:?}"),
        });
        assert_eq!(client.allocated(), u64::from(granted.unwrap()));
        client.resize(size);
        assert_eq!(client.allocated(), u64::from(size));
    }
}
