//! NBD stores on real servers (nbdkit, qemu-nbd) and on one that lies.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod store_support;

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use remoca_store::testing::hold_port;
use remoca_store::{
    DataPath, NbdAddress, NbdOptions, NbdStore, NbdUri, OnLostConnection, OpenErrorKind, StoreError, StoreHealth,
    StoreOp,
};
use store_support::servers::{Server, next_request, reply, scripted, unix_uri};
use store_support::{Driver, Random, pattern};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const EIO: StoreError = StoreError { errno: libc::EIO };

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn open(uri: &NbdUri) -> Driver {
    Driver::new(NbdStore::open(uri, NbdOptions::default()).unwrap())
}

/// Every kind of operation, and what it left.
fn exercise(driver: &mut Driver) {
    for (index, (offset, len)) in [(0, 512), (512, 4096), (MIB, 4 << 20), (16 * MIB - 512, 512)].into_iter().enumerate()
    {
        let data = pattern(offset, len, 1);
        driver.write(offset, &data, index % 2 == 0).unwrap();
        assert_eq!(driver.read(offset, len).unwrap(), data);
    }
    driver.flush().unwrap();
    let zeroes = |offset, may_unmap| StoreOp::WriteZeroes { offset, len: MIB, may_unmap, durable: true };
    driver.run(zeroes(MIB, false), None).unwrap();
    driver.run(zeroes(2 * MIB, true), None).unwrap();
    driver.run(StoreOp::Discard { offset: 8 * MIB, len: MIB }, None).unwrap();
    assert_eq!(driver.read(MIB, 2 << 20).unwrap(), vec![0; 2 << 20]);
    assert_eq!(driver.read(3 * MIB, 1 << 20).unwrap(), pattern(3 * MIB, 1 << 20, 1));
    many_in_flight(driver);
    assert_eq!(driver.store.in_flight(), 0);
    assert_eq!(driver.uncertain_count, 0);
}

fn many_in_flight(driver: &mut Driver) {
    let writes: Vec<u64> = (0..1000)
        .map(|block| {
            let offset = 4 * MIB + block * 4096;
            driver.queue(StoreOp::Write { offset, len: 4096, durable: false }, Some(&pattern(offset, 4096, 7)))
        })
        .collect();
    driver.store.kick(Instant::now());
    for token in writes {
        driver.wait(token).result.unwrap();
    }
    let reads: Vec<(u64, u64)> = (0..1000)
        .rev()
        .map(|block| 4 * MIB + block * 4096)
        .map(|offset| (offset, driver.queue(StoreOp::Read { offset, len: 4096 }, None)))
        .collect();
    driver.store.kick(Instant::now());
    for (offset, token) in reads {
        assert_eq!(driver.wait(token).buffer.unwrap()[..], pattern(offset, 4096, 7));
    }
}

#[test]
fn nbdkit_and_qemu_nbd_serve_every_operation() {
    let folder = folder();
    let socket = folder.path().join("nbd.sock");
    let image = folder.path().join("disk.img");
    let image_argument = image.to_str().unwrap();
    type Start = fn(&std::path::Path, &[&str]) -> Server;
    let servers: [(Start, Vec<&str>); 5] = [
        (Server::nbdkit, vec!["memory", "16M"]),
        (Server::nbdkit, vec!["file", image_argument]),
        (
            Server::nbdkit,
            vec!["--filter=blocksize-policy", "memory", "16M", "blocksize-maximum=64K", "blocksize-error-policy=error"],
        ),
        // No FUA, no write-zeroes: both have to be made up for.
        (Server::nbdkit, vec!["--filter=fua", "--filter=nozero", "memory", "16M"]),
        (Server::qemu_nbd, vec!["--discard=unmap", image_argument]),
    ];
    for (start, arguments) in servers {
        File::create(&image).unwrap().set_len(16 * MIB).unwrap();
        let server = start(&socket, &arguments);
        let mut driver = open(&server.uri());
        assert_eq!(driver.store.geometry().size, 16 * MIB, "{arguments:?}");
        exercise(&mut driver);
        drop(driver);
        // A client that leaves in good order does not bring the server down.
        assert_eq!(open(&server.uri()).read(0, 512).unwrap(), pattern(0, 512, 1), "{arguments:?}");
        assert!(server.terminate(), "{arguments:?}");
    }
}

#[test]
fn a_server_on_tcp_is_found_by_its_uri() {
    let (_held, port) = hold_port();
    let mut server = std::process::Command::new("nbdkit")
        .args(["-f", "--exit-with-parent", "-p", &port.to_string(), "-i", "127.0.0.1", "memory", "16M"])
        .spawn()
        .unwrap();
    let uri: NbdUri = format!("nbd://localhost:{port}/").parse().unwrap();
    let give_up_at = Instant::now() + store_support::HANG_AFTER;
    let store = loop {
        match NbdStore::open(&uri, NbdOptions::default()) {
            Ok(store) => break store,
            Err(error) => assert!(Instant::now() < give_up_at, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    exercise(&mut Driver::new(store));
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn errors_of_the_server_are_reported_as_they_are() {
    let folder = folder();
    let socket = folder.path().join("nbd.sock");
    let server =
        Server::nbdkit(&socket, &["--filter=error", "memory", "16M", "error-pwrite=ENOSPC", "error-pwrite-rate=100%"]);
    let mut driver = open(&server.uri());
    assert_eq!(driver.write(0, &[1; 512], false), Err(StoreError { errno: libc::ENOSPC }));
    assert_eq!(driver.read(0, 512).unwrap(), [0; 512]);
    driver.flush().unwrap();
}

#[test]
fn a_failed_flush_stays_failed() {
    let folder = folder();
    let socket = folder.path().join("nbd.sock");
    let trigger = folder.path().join("fail");
    let flush = format!("flush=if test -e {}; then echo EIO >&2; exit 1; fi", trigger.display());
    let arguments = ["eval", "get_size=echo 1M", "pread=head -c $3 /dev/zero", "pwrite=cat >/dev/null", flush.as_str()];
    let server = Server::nbdkit(&socket, &arguments);
    let mut driver = open(&server.uri());
    driver.flush().unwrap();
    File::create(&trigger).unwrap();
    assert_eq!(driver.flush(), Err(EIO));
    std::fs::remove_file(&trigger).unwrap();
    driver.write(0, &[1; 512], false).unwrap();
    assert_eq!(driver.flush(), Err(EIO));
    assert_eq!(driver.write(0, &[1; 512], true), Err(EIO));
}

#[test]
fn a_server_killed_under_load_and_started_again_loses_nothing_acknowledged() {
    let folder = folder();
    let socket = folder.path().join("nbd.sock");
    let image = folder.path().join("disk.img");
    File::create(&image).unwrap().set_len(16 * MIB).unwrap();
    let arguments = ["--filter=delay", "file", image.to_str().unwrap(), "wdelay=1ms", "rdelay=1ms"];
    let mut server = Some(Server::nbdkit(&socket, &arguments));
    let mut driver = open(&unix_uri(&socket));
    let mut random = Random(0x5EED);
    let mut load = Load::new(16 * MIB / 4096);
    for round in 1..=5 {
        for _ in 0..400 {
            load.step(&mut driver, &mut random);
        }
        server.take().unwrap().kill();
        // More operations come in while it is away.
        for _ in 0..20 {
            load.start(&mut driver, &mut random);
        }
        let give_up_at = Instant::now() + store_support::HANG_AFTER;
        while driver.store.health() == StoreHealth::Up {
            assert!(Instant::now() < give_up_at, "the store does not notice");
            driver.turn(Duration::from_millis(10));
        }
        assert_eq!(driver.uncertain_count, round - 1);
        server = Some(Server::nbdkit(&socket, &arguments));
        load.finish(&mut driver);
        assert_eq!(driver.uncertain_count, round, "the cache has to be told");
        load.verify(&mut driver, &image);
    }
}

/// Random reads and writes of blocks, at most one write for each block at a time, each read compared.
struct Load {
    /// Version last acknowledged, by block; 0 for never written.
    acknowledged: Vec<u64>,
    /// Version being written, by block.
    writing: Vec<Option<u64>>,
    /// All versions that were ever written, by block.
    written: Vec<Vec<u64>>,
    in_flight: Vec<(u64, u64, LoadKind)>,
    next_version: u64,
}

enum LoadKind {
    Write,
    /// With the version acknowledged when the read began.
    Read(u64),
}

impl Load {
    fn new(block_count: u64) -> Self {
        let blocks = usize::try_from(block_count).unwrap();
        Self {
            acknowledged: vec![0; blocks],
            writing: vec![None; blocks],
            written: vec![vec![0]; blocks],
            in_flight: Vec::new(),
            next_version: 1,
        }
    }

    fn start(&mut self, driver: &mut Driver, random: &mut Random) {
        // Few blocks, so that they are overwritten again and again.
        let block = random.below(64);
        let (index, offset) = (usize::try_from(block).unwrap(), block * 4096);
        if random.below(3) == 0 {
            let token = driver.start(StoreOp::Read { offset, len: 4096 }, None);
            self.in_flight.push((token, block, LoadKind::Read(self.acknowledged[index])));
        } else if self.writing[index].is_none() {
            let version = self.next_version;
            self.next_version += 1;
            self.writing[index] = Some(version);
            self.written[index].push(version);
            let operation = StoreOp::Write { offset, len: 4096, durable: random.below(4) == 0 };
            let token = driver.start(operation, Some(&pattern(offset, 4096, version)));
            self.in_flight.push((token, block, LoadKind::Write));
        }
    }

    fn step(&mut self, driver: &mut Driver, random: &mut Random) {
        self.start(driver, random);
        if self.in_flight.len() >= 32 {
            self.finish_one(driver);
        }
    }

    fn finish_one(&mut self, driver: &mut Driver) {
        let (token, block, kind) = self.in_flight.remove(0);
        let index = usize::try_from(block).unwrap();
        let completion = driver.wait(token);
        completion.result.unwrap();
        match kind {
            LoadKind::Write => self.acknowledged[index] = self.writing[index].take().unwrap(),
            LoadKind::Read(at_least) => {
                // A write under way may be seen in part, and its start need not be at a sector's: the page cache of the
                // server's file system copies for both at the same time. But no byte is older than what was acknowledged.
                let data = completion.buffer.unwrap();
                let possible: Vec<_> = self.written[index]
                    .iter()
                    .filter(|version| **version >= at_least)
                    .map(|version| if *version == 0 { vec![0; 4096] } else { pattern(block * 4096, 4096, *version) })
                    .collect();
                let is_possible = |(at, byte): (usize, &u8)| possible.iter().any(|version| version[at] == *byte);
                assert!(data.iter().enumerate().all(is_possible), "block {block} is older than what was acknowledged");
            }
        }
    }

    fn finish(&mut self, driver: &mut Driver) {
        while !self.in_flight.is_empty() {
            self.finish_one(driver);
        }
    }

    fn verify(&self, driver: &mut Driver, image: &std::path::Path) {
        driver.flush().unwrap();
        let image = File::open(image).unwrap();
        for (block, version) in (0_u64..).zip(&self.acknowledged).filter(|(_, version)| **version > 0) {
            let expected = pattern(block * 4096, 4096, *version);
            assert_eq!(driver.read(block * 4096, 4096).unwrap(), expected, "block {block}");
            let mut on_disk = vec![0; 4096];
            image.read_exact_at(&mut on_disk, block * 4096).unwrap();
            assert_eq!(on_disk, expected, "block {block} in the image");
        }
    }
}

#[test]
fn overlapping_writes_are_sent_again_in_order_and_one_at_a_time() {
    let folder = folder();
    let socket = folder.path().join("nbd.sock");
    let (seen, saw) = mpsc::channel();
    let mut connections = 0;
    let server = scripted(&socket, move |stream| {
        connections += 1;
        loop {
            let Some((command, cookie, offset, payload)) = next_request(stream) else { return connections < 2 };
            seen.send((connections, command, offset, payload.first().copied())).unwrap();
            if connections == 1 {
                // Three requests can be on the wire; then the connection breaks without an answer.
                if offset == 8192 {
                    return true;
                }
            } else if command == 1 {
                stream.write_all(&reply(0, cookie, &[])).unwrap();
            }
        }
    });
    let mut driver = open(&unix_uri(&socket));
    let write = |driver: &mut Driver, offset, value: u8| {
        driver.start(StoreOp::Write { offset, len: 4096, durable: false }, Some(&[value; 4096]))
    };
    // The second overlaps the first and has to wait for it, also across the break.
    let tokens =
        [write(&mut driver, 0, 1), write(&mut driver, 0, 2), write(&mut driver, 4096, 3), write(&mut driver, 8192, 4)];
    for token in tokens {
        driver.wait(token).result.unwrap();
    }
    drop(driver);
    server.join().unwrap();
    let seen: Vec<_> = saw
        .iter()
        .filter(|(_, command, ..)| *command == 1)
        .map(|(c, _, offset, value)| (c, offset, value.unwrap()))
        .collect();
    assert_eq!(seen[..6], [(1, 0, 1), (1, 4096, 3), (1, 8192, 4), (2, 0, 1), (2, 4096, 3), (2, 8192, 4)]);
    assert_eq!(seen[6..], [(2, 0, 2)]);
}

#[test]
fn a_server_that_breaks_the_protocol_is_left_and_asked_again() {
    // Each lie to a read of sector 0, on the first connection only.
    type Lie = fn(u64) -> Vec<u8>;
    let lies: [(&str, Lie); 5] = [
        ("wrong cookie", |cookie| reply(0, cookie ^ (1 << 40), &[7; 512])),
        ("cookie of no task", |cookie| reply(0, cookie + 1, &[7; 512])),
        ("no reply at all", |_| b"HTTP/1.1 200 OK\r\n\r\n".to_vec()),
        ("two replies", |cookie| [reply(0, cookie, &[1; 512]), reply(0, cookie, &[7; 512])].concat()),
        ("half a payload, then the end", |cookie| reply(0, cookie, &[7; 100])),
    ];
    for (name, lie) in lies {
        let folder = folder();
        let socket = folder.path().join("nbd.sock");
        let mut connections = 0;
        let server = scripted(&socket, move |stream| {
            connections += 1;
            while let Some((command, cookie, ..)) = next_request(stream) {
                if connections == 1 {
                    stream.write_all(&lie(cookie)).unwrap();
                    return true;
                }
                if command == 0 {
                    stream.write_all(&reply(0, cookie, &[1; 512])).unwrap();
                }
            }
            false
        });
        let mut driver = open(&unix_uri(&socket));
        assert_eq!(driver.read(0, 512).unwrap(), [1; 512], "{name}");
        let give_up_at = Instant::now() + store_support::HANG_AFTER;
        while driver.uncertain_count == 0 {
            assert!(Instant::now() < give_up_at, "{name}: no reconnect");
            driver.turn(Duration::from_millis(100));
        }
        drop(driver);
        server.join().unwrap();
    }
}

#[test]
fn what_a_server_refuses_because_it_shuts_down_is_done_in_its_next_life() {
    const ESHUTDOWN: u32 = 108;
    let folder = folder();
    let socket = folder.path().join("nbd.sock");
    let mut is_first = true;
    let server = scripted(&socket, move |stream| {
        while let Some((command, cookie, ..)) = next_request(stream) {
            if std::mem::take(&mut is_first) {
                stream.write_all(&reply(ESHUTDOWN, cookie, &[])).unwrap();
            } else if command == 0 {
                stream.write_all(&reply(0, cookie, &[1; 512])).unwrap();
            } else {
                return false;
            }
        }
        true
    });
    let mut driver = open(&unix_uri(&socket));
    assert_eq!(driver.read(0, 512).unwrap(), [1; 512]);
    drop(driver);
    server.join().unwrap();
}

/// Otherwise the old copy of a write that it has not answered could land after a newer one.
#[test]
fn a_server_that_shuts_down_is_left_when_it_has_answered_everything_or_its_time_is_over() {
    const ESHUTDOWN: u32 = 108;
    for answers in [true, false] {
        let folder = folder();
        let socket = folder.path().join("nbd.sock");
        let (seen, saw) = mpsc::channel();
        let (release, released) = mpsc::channel();
        let mut connections = 0;
        let server = scripted(&socket, move |stream| {
            connections += 1;
            let mut first = None;
            while let Some((command, cookie, offset, _)) = next_request(stream) {
                if command != 1 {
                    return false;
                }
                seen.send((connections, offset)).unwrap();
                match first {
                    _ if connections > 1 => stream.write_all(&reply(0, cookie, &[])).unwrap(),
                    None => first = Some(cookie),
                    // The second write is refused before the first one is answered.
                    Some(first) => {
                        stream.write_all(&reply(ESHUTDOWN, cookie, &[])).unwrap();
                        if released.recv().unwrap() {
                            stream.write_all(&reply(0, first, &[])).unwrap();
                        }
                    }
                }
            }
            true
        });
        let mut driver = open(&unix_uri(&socket));
        let write = |driver: &mut Driver, offset| {
            driver.start(StoreOp::Write { offset, len: 4096, durable: false }, Some(&[1; 4096]))
        };
        let [first, second] = [0, 4096].map(|offset| write(&mut driver, offset));
        let give_up_at = Instant::now() + store_support::HANG_AFTER;
        while driver.store.next_deadline().is_none() {
            assert!(Instant::now() < give_up_at, "the store has not heard of it");
            driver.turn(Duration::from_millis(5));
        }
        assert_eq!(driver.store.health(), StoreHealth::Up, "the first write may still be executed");
        let third = write(&mut driver, 8192);
        release.send(answers).unwrap();
        if !answers {
            // Its time is over, and then it is time for another attempt.
            for _ in 0..2 {
                driver.store.handle_timer(driver.store.next_deadline().unwrap());
            }
        }
        driver.wait(first).result.unwrap();
        assert_eq!(driver.uncertain_count, usize::from(!answers), "where the first write was answered");
        for token in [second, third] {
            driver.wait(token).result.unwrap();
        }
        drop((driver, release));
        server.join().unwrap();
        let mut expected = vec![(1, 0), (1, 4096)];
        expected.extend((!answers).then_some((2, 0)));
        expected.extend([(2, 4096), (2, 8192)]);
        assert_eq!(saw.iter().collect::<Vec<_>>(), expected);
    }
}

#[test]
fn a_flush_speaks_for_the_writes_before_it_alone() {
    let folder = folder();
    let socket = folder.path().join("nbd.sock");
    let mut connections = 0;
    let server = scripted(&socket, move |stream| {
        connections += 1;
        let (mut writes, mut flush) = (0, None);
        while let Some((command, cookie, ..)) = next_request(stream) {
            match command {
                1 => {
                    stream.write_all(&reply(0, cookie, &[])).unwrap();
                    writes += 1;
                }
                // The first flush is answered after the write that follows it.
                3 if connections == 1 => flush = Some(cookie),
                3 => stream.write_all(&reply(0, cookie, &[])).unwrap(),
                _ => return false,
            }
            if let Some(cookie) = flush.filter(|_| writes == 2) {
                stream.write_all(&reply(0, cookie, &[])).unwrap();
                return true;
            }
        }
        false
    });
    let options = NbdOptions { on_lost_connection: OnLostConnection::FailFlush, ..NbdOptions::default() };
    let mut driver = Driver::new(NbdStore::open(&unix_uri(&socket), options).unwrap());
    driver.write(0, &[1; 4096], false).unwrap();
    let flush = driver.start(StoreOp::Flush, None);
    driver.write(4096, &[2; 4096], false).unwrap();
    driver.wait(flush).result.unwrap();
    assert_eq!(driver.flush(), Err(EIO), "the second write may be lost");
    drop(driver);
    server.join().unwrap();
}

#[test]
fn what_was_sent_is_waited_for_at_the_end_and_what_was_not_is_never_sent() {
    // The server has two seconds, and may get no processor in that time.
    assert!((0..5).any(|_| is_drained_at_the_end()), "nothing is left at the server");
}

/// Returns whether the answer to what was sent came in the time that there is for it.
fn is_drained_at_the_end() -> bool {
    let folder = folder();
    let socket = folder.path().join("nbd.sock");
    let (seen, saw) = mpsc::channel();
    let (release, released) = mpsc::channel();
    let server = scripted(&socket, move |stream| {
        while let Some((command, cookie, offset, _)) = next_request(stream) {
            seen.send((command, offset)).unwrap();
            if command == 1 {
                released.recv().unwrap();
                // The client may have left.
                let _late = stream.write_all(&reply(0, cookie, &[]));
            }
        }
        false
    });
    let mut driver = open(&unix_uri(&socket));
    let write = |offset| StoreOp::Write { offset, len: 4096, durable: false };
    driver.start(write(0), Some(&[1; 4096]));
    driver.queue(write(8192), Some(&[2; 4096]));
    assert_eq!(saw.recv().unwrap(), (1, 0));
    release.send(()).unwrap();
    // Should the second one be sent all the same, it is answered.
    release.send(()).unwrap();
    let began = Instant::now();
    let is_drained = driver.store.drain(began);
    assert!(is_drained || began.elapsed() >= Duration::from_secs(2), "it is not waited for");
    drop(driver);
    server.join().unwrap();
    let farewell: &[u16] = if is_drained { &[2] } else { &[] };
    let commands: Vec<_> = saw.iter().map(|(command, _)| command).collect();
    assert_eq!(commands, farewell, "a farewell, and nothing before it");
    is_drained
}

#[test]
fn a_server_that_says_nothing_is_given_up_when_its_time_is_over() {
    let folder = folder();
    let socket = folder.path().join("nbd.sock");
    let server = scripted(&socket, |stream| next_request(stream).is_none());
    let mut driver = open(&unix_uri(&socket));
    driver.start(StoreOp::Read { offset: 0, len: 512 }, None);
    server.join().unwrap();
    let _ = std::fs::remove_file(&socket);
    let silent = UnixListener::bind(&socket).unwrap();
    silent.set_nonblocking(true).unwrap();
    let mut client = loop {
        driver.turn(Duration::from_millis(10));
        if let Ok((client, _)) = silent.accept() {
            break client;
        }
    };
    client.set_nonblocking(false).unwrap();
    client.set_read_timeout(Some(store_support::HANG_AFTER)).unwrap();
    // To the moment.
    driver.store.handle_timer(driver.store.next_deadline().unwrap());
    assert_eq!(client.read(&mut [0; 64]).unwrap(), 0, "the client has left");
}

#[test]
fn a_server_that_was_there_for_long_is_asked_again_soon() {
    let folder = folder();
    let socket = folder.path().join("nbd.sock");
    let (asked, is_asked) = mpsc::channel();
    let (answer, answers) = mpsc::channel();
    // Leaves without an answer as long as it is told to.
    let server = scripted(&socket, move |stream| {
        let Some((_, cookie, ..)) = next_request(stream) else { return false };
        asked.send(()).unwrap();
        let answers = answers.recv().unwrap();
        if answers {
            stream.write_all(&reply(0, cookie, &[1; 512])).unwrap();
        }
        !answers
    });
    let start = Instant::now();
    let mut driver = open(&unix_uri(&socket));
    let read = driver.start(StoreOp::Read { offset: 0, len: 512 }, None);
    let wait_for_request = |driver: &mut Driver| {
        while is_asked.try_recv().is_err() {
            driver.turn(Duration::from_millis(5));
        }
    };
    // The time until the next attempt, for a connection that breaks at this time.
    let lose = |driver: &mut Driver, now: Instant| {
        answer.send(false).unwrap();
        loop {
            driver.store.handle_ready(now);
            if driver.store.health() != StoreHealth::Up {
                break driver.store.next_deadline().unwrap().saturating_duration_since(now);
            }
        }
    };
    // At a time before all of them, a connection is new however long this takes.
    let lose_a_new_one = |driver: &mut Driver| {
        wait_for_request(driver);
        lose(driver, start)
    };
    let delays: Vec<_> = (0..5).map(|_| lose_a_new_one(&mut driver)).collect();
    assert!(delays[4] >= Duration::from_millis(160), "{delays:?}");
    wait_for_request(&mut driver);
    let delay = lose(&mut driver, Instant::now() + Duration::from_secs(5));
    assert!(delay <= Duration::from_millis(20), "{delay:?} after {delays:?}");
    wait_for_request(&mut driver);
    answer.send(true).unwrap();
    driver.wait(read).result.unwrap();
    drop(driver);
    server.join().unwrap();
}

#[test]
fn a_server_that_comes_back_with_another_disk_is_not_used() {
    let folder = folder();
    let socket = folder.path().join("nbd.sock");
    let server = Server::nbdkit(&socket, &["memory", "16M"]);
    let mut driver = open(&server.uri());
    server.kill();
    let other = Server::nbdkit(&socket, &["memory", "8M"]);
    let read = driver.start(StoreOp::Read { offset: 0, len: 512 }, None);
    // Long enough for several attempts.
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        driver.turn(Duration::from_millis(20));
    }
    assert_ne!(driver.store.health(), StoreHealth::Up);
    other.kill();
    let _right = Server::nbdkit(&socket, &["memory", "16M"]);
    driver.wait(read).result.unwrap();
}

#[test]
fn what_cannot_be_a_disk_is_refused_with_a_message() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    let nbdkit = |name: &str, arguments: &[&str]| Server::nbdkit(&path(name), arguments);
    let read_only = nbdkit("ro", &["-r", "memory", "16M"]);
    let odd = nbdkit("odd", &["memory", "1000"]);
    let empty = nbdkit("empty", &["memory", "0"]);
    let no_flush =
        nbdkit("noflush", &["eval", "get_size=echo 1M", "pread=exit 1", "pwrite=exit 1", "can_write=exit 0"]);
    let coarse = nbdkit(
        "coarse",
        &["--filter=blocksize-policy", "memory", "16M", "blocksize-minimum=8K", "blocksize-preferred=8K"],
    );
    let qemu = {
        File::create(path("image")).unwrap().set_len(MIB).unwrap();
        Server::qemu_nbd(&path("qemu"), &["-x", "disk", path("image").to_str().unwrap()])
    };
    // An HTTP server speaks first only when asked, so this one stands for any that talks.
    let talker = std::os::unix::net::UnixListener::bind(path("talker")).unwrap();
    std::thread::spawn(move || talker.accept().unwrap().0.write_all(b"220 mail.example.org ESMTP\r\n").unwrap());
    let dead = std::os::unix::net::UnixListener::bind(path("dead")).unwrap();
    // A child that another test forks may have a copy for a moment: shut down, not only closed.
    rustix::net::shutdown(dead, rustix::net::Shutdown::Both).unwrap();
    let nobody = NbdAddress::Tcp { host: "127.0.0.1".into(), port: 1 };
    let nobody = NbdUri { server: nobody, export: String::new() };

    let refused = |uri: &NbdUri| NbdStore::open(uri, NbdOptions::default()).err().expect("a refusal");
    for (uri, kind, words) in [
        (unix_uri(&path("nothing")), OpenErrorKind::Unreachable, "Is it running"),
        (unix_uri(&path("dead")), OpenErrorKind::Unreachable, "refused"),
        (unix_uri(&path(&"long".repeat(60))), OpenErrorKind::Unreachable, "too long"),
        (nobody, OpenErrorKind::Unreachable, "refused"),
        (unix_uri(&path("talker")), OpenErrorKind::Protocol, "not an NBD server"),
        (NbdUri { export: "other".into(), ..qemu.uri() }, OpenErrorKind::Missing, "no export \"other\""),
        (read_only.uri(), OpenErrorKind::ReadOnly, "use it read-only"),
        (odd.uri(), OpenErrorKind::OddSize, "round-up=512"),
        (empty.uri(), OpenErrorKind::Empty, "give it a size"),
        (no_flush.uri(), OpenErrorKind::Unsuitable, "neither flush nor FUA"),
        (coarse.uri(), OpenErrorKind::Unsuitable, "blocksize filter"),
    ] {
        let error = refused(&uri);
        assert_eq!(error.kind, kind, "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
    let options = NbdOptions { read_only: true, ..NbdOptions::default() };
    assert!(NbdStore::open(&read_only.uri(), options).unwrap().geometry().read_only);
    let named = NbdUri { export: "disk".into(), ..qemu.uri() };
    assert_eq!(NbdStore::open(&named, NbdOptions::default()).unwrap().geometry().size, MIB);
}
