//! Peers that are broken or malicious: they are refused, others do not notice, and what they can make the server hold
//! is bounded.
#![allow(clippy::unwrap_used, reason = "tests fail by panics")]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::{BEYOND, Client, config, encode, moved, page, request, send_page, start, token, wait_for};
use remoca_protocol::{ErrorCode, ErrorReply, Frame, Hello, MAGIC, PageCount, RequestId, VERSIONS, VersionRange};
use remoca_server::{Config, Limits};

fn hello(epoch: u64) -> Frame<'static> {
    Frame::Hello(Hello { versions: VERSIONS, token: token(9), epoch })
}

fn header(kind: u8, zero: u8, length: u16, fields: [u32; 3]) -> Vec<u8> {
    let mut bytes = vec![kind, zero];
    bytes.extend(length.to_le_bytes());
    fields.iter().for_each(|field| bytes.extend(field.to_le_bytes()));
    bytes
}

#[test]
fn what_is_no_hello_is_refused() {
    let server = start(config());
    let mut wrong_magic = encode(&[hello(1)]);
    wrong_magic[16..24].copy_from_slice(b"NBDMAGIC");
    let mut versions_swapped = encode(&[hello(1)]);
    versions_swapped[24..28].copy_from_slice(&[2, 0, 1, 0]);
    let first_bytes: [Vec<u8>; 9] = [
        b"GET / HTTP/1.1\r\nHost: donor\r\n\r\n".to_vec(),
        vec![0; 16],
        vec![0xff; 5000],
        MAGIC.repeat(2),
        header(1, 0, 41, [0; 3]),
        wrong_magic,
        versions_swapped,
        encode(&[request(1, 0)]),
        encode(&[Frame::Bye]),
    ];
    for bytes in first_bytes {
        let mut client = Client::connect(&server);
        client.send_bytes(&bytes);
        client.expect_error(ErrorCode::Malformed);
        client.expect_closed();
    }
    assert_eq!(server.status().totals.sessions, 0);
}

#[test]
fn other_versions_are_told_which_one_is_spoken() {
    let server = start(config());
    let mut client = Client::connect(&server);
    let versions = VersionRange { lowest: VERSIONS.highest + 1, highest: VERSIONS.highest + 5 };
    client.send(&[Frame::Hello(Hello { versions, token: token(1), epoch: 1 })]);
    client.receive(|frame| match frame {
        Frame::Error(ErrorReply { code: ErrorCode::VersionMismatch, detail, .. }) => {
            assert_eq!(VersionRange::from_detail(detail), VERSIONS);
        }
        other => panic!("instead of a version mismatch: {other:?}"),
    });
    client.expect_closed();
    // A client that speaks newer versions too is welcome.
    let mut client = Client::connect(&server);
    let versions = VersionRange { lowest: VERSIONS.lowest, highest: u16::MAX };
    client.send(&[Frame::Hello(Hello { versions, token: token(1), epoch: 1 })]);
    client.receive(|frame| match frame {
        Frame::Welcome(welcome) => assert_eq!(welcome.version, VERSIONS.highest),
        other => panic!("instead of WELCOME: {other:?}"),
    });
}

#[test]
fn malformed_input_ends_the_session_and_nothing_else() {
    let server = start(config());
    let mut bystander = Client::with_pages(&server, token(1), 10);
    bystander.store(0, 1);
    let welcome = remoca_protocol::Welcome {
        version: 1,
        server_id: remoca_protocol::ServerId([0; 16]),
        pool_generation: remoca_protocol::PoolGeneration(0),
        npages: PageCount(0),
        available: PageCount(0),
        quota: PageCount(0),
        sends_received: remoca_protocol::SendCount(0),
    };
    let error = ErrorReply { request: RequestId(0), code: ErrorCode::Busy, detail: 0 };
    let sized = Frame::Sized { request: RequestId(0), npages: PageCount(1), available: PageCount(1) };
    let inputs: [Vec<u8>; 16] = [
        header(0, 0, 0, [0; 3]),
        header(7, 0, 0, [0, 1, 1]),
        header(9, 0, 0, [0, 1, 0]),
        header(10, 0, 0, [0, 1, 0]),
        header(13, 0, 0, [0; 3]),
        header(255, 255, 65535, [u32::MAX; 3]),
        header(5, 0, 4097, [0, 1, 0]),
        header(5, 0, 4095, [0, 1, 0]),
        header(5, 0, 65535, [0, 1, 0]),
        header(6, 0, 1, [0, 1, 0]),
        header(6, 1, 0, [0, 1, 0]),
        header(6, 0, 0, [0, 1, 1]),
        encode(&[hello(1000)]),
        encode(&[Frame::Welcome(welcome)]),
        encode(&[sized]),
        encode(&[Frame::Error(error)]),
    ];
    for (number, input) in (1..).zip(&inputs) {
        let epoch = number.into();
        let mut client = Client::connect(&server);
        assert_eq!(client.hello(token(9), epoch).npages, PageCount(if epoch == 1 { 0 } else { 5 }));
        client.resize(5);
        // Frames before the bad one are answered first; input after it is ignored.
        let mut bytes = encode(&[request(number, BEYOND)]);
        bytes.extend(input);
        bytes.extend(encode(&[request(0, 0), send_page(0, &page(3)), Frame::Bye]));
        client.send_bytes(&bytes);
        // Sends more bytes, of which the server may not take all before it closes.
        let _reset = client.socket.write_all(&[0x55; 500_000]);
        client.expect_not_found(number);
        client.expect_error(ErrorCode::Malformed);
        client.expect_closed();
    }
    let (mut client, _) = Client::greeted(&server, token(9), 1000);
    client.expect_empty(0);
    bystander.expect_held(0, 1);
}

#[test]
fn garbage_of_any_kind_is_survived() {
    let server = start(config());
    let mut bystander = Client::with_pages(&server, token(1), 512);
    bystander.store(500, 1);
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut scratch = vec![0; 1 << 20];
    for epoch in 1..400 {
        let mut client = Client::connect(&server);
        if epoch % 4 != 0 {
            client.hello(token(9), epoch);
        }
        let mut bytes = Vec::new();
        for _ in 0..random()[0] {
            // Mostly frames that a session knows, with odd numbers in them; sometimes anything.
            let [dice, kind, a, b, c, shift, ..] = random();
            let kind = if dice > 20 { [3, 5, 6, 8][usize::from(kind % 4)] } else { kind % 14 };
            let length = if kind == 5 { 4096 } else { 0 };
            let shift = if shift < 220 { shift % 3 } else { shift % 25 };
            let [a, b, c] = [a, b, c].map(|field| u32::from(field % 16) << shift);
            let fields = match kind {
                3 => [a, b * 16, 0],
                5 | 6 => [a, b, 0],
                8 => [0, b, c],
                _ => [0; 3],
            };
            bytes.extend(header(kind, u8::from(dice == 0), length, fields));
            (0..length / 8).for_each(|_| bytes.extend(random()));
        }
        // The server may close before everything is sent.
        let _reset = client.socket.write_all(&bytes);
        if epoch % 3 == 0 {
            client.socket.set_nonblocking(true).unwrap();
            let _whatever = client.socket.read(&mut [0; 100_000]);
        } else {
            // All frames are handled before a newer session ends this one.
            let _reset = client.socket.shutdown(Shutdown::Write);
            while matches!(client.socket.read(&mut scratch), Ok(1..)) {}
        }
    }
    bystander.expect_held(500, 1);
    let totals = server.status().totals;
    let reached = [totals.gets, totals.not_found, totals.sends, totals.moves, totals.resizes_refused];
    assert!(reached.iter().all(|count| *count > 10), "all depths are reached: {totals:?}");
}

#[test]
fn who_says_nothing_is_sent_away() {
    let limits = Limits { hello_timeout: Duration::from_millis(50), handshakes: 2, ..Limits::default() };
    let server = start(Config { limits, ..config() });
    // More connections than may be in a handshake at once; some send a part of a greeting.
    let mut silent: Vec<Client> = (0..10).map(|_| Client::connect(&server)).collect();
    let greeting = encode(&[hello(1)]);
    for (cut, client) in silent.iter_mut().enumerate() {
        client.send_bytes(&greeting[..cut * 5]);
    }
    // Clients that come after them are served nevertheless. This test may itself be too slow to greet, and rightly be
    // refused.
    let mut attempts = (0..20).filter_map(|_| {
        let mut client = Client::connect(&server);
        client.try_hello(token(1), 1).ok()?.is_some().then_some(client)
    });
    let mut client = attempts.next().expect("nobody is served");
    silent.iter_mut().for_each(Client::expect_closed);
    client.barrier();
    assert_eq!(server.status().totals.sessions, 1);
}

/// Returns limits with a HELLO time so long that silent connections do not time out here.
fn patient() -> Limits {
    Limits { hello_timeout: Duration::from_secs(3600), handshakes: 32, handshakes_of_peer: 8, ..Limits::default() }
}

/// Tests that all VMs of a host connect when its memory server is back, and that their greetings may take any time.
#[test]
fn a_host_with_many_vms_comes_at_once() {
    let server =
        start(Config { limits: Limits { hello_timeout: Duration::from_secs(3600), ..Limits::default() }, ..config() });
    let mut clients: Vec<Client> = (0..200).map(|_| Client::connect(&server)).collect();
    for (number, client) in (1..).zip(&mut clients) {
        client.hello(token(number), 1);
    }
    clients.iter_mut().for_each(Client::barrier);
}

#[test]
fn silent_ones_make_room_for_who_comes_after_them() {
    let folder = tempfile::tempdir().unwrap();
    let unix = remoca_server::ListenAddress::Unix(folder.path().join("serve.sock"));
    let server = start(Config { limits: patient(), listen: vec![unix, config().listen.remove(0)], ..config() });
    for (number, address) in (1..).zip(server.local_addresses()) {
        let _silent: Vec<Client> = (0..200).map(|_| Client::connect_to(address)).collect();
        let mut client = Client::connect_to(address);
        client.hello(token(number), 1);
        client.barrier();
    }
}

#[test]
fn who_is_silent_makes_room_at_its_own_address() {
    let server = start(Config { limits: patient(), ..config() });
    let greeting = encode(&[hello(1)]);
    let mut slow = Client::connect_from(&server, [127, 0, 0, 2]);
    slow.send_bytes(&greeting[..20]);
    let mut silent: Vec<Client> = (0..200).map(|_| Client::connect(&server)).collect();
    let last = silent.split_off(200 - patient().handshakes_of_peer);
    silent.iter_mut().for_each(Client::expect_closed);
    slow.send_bytes(&greeting[20..]);
    slow.receive(|frame| assert!(matches!(frame, Frame::Welcome(_)), "{frame:?}"));
    drop(last);
}

/// Tests that memory freed by one client is available to another at once, whether or not it was given back to the
/// host. In the end all of it is given back.
#[test]
fn freed_memory_can_be_had_before_the_host_has_it() {
    let server = start(Config { memory_bytes: 64 << 20, threads: 2, ..config() });
    let pages = 16_384;
    let mut clients = [1, 2, 3].map(|number| Client::with_pages(&server, token(number), 0));
    for turn in 0..60 {
        let client = &mut clients[turn % 3];
        assert_eq!(client.try_resize(pages), Ok(0));
        (0..pages).step_by(512).for_each(|slot| client.store(slot, slot));
        client.expect_held(512, 512);
        client.expect_empty(1);
        client.resize(0);
    }
    wait_for(&server, "the host has the memory", |status| status.pages_to_give_back == 0);
    assert_eq!(server.status().pages_free, pages);
}

/// Measures the latencies of one client while another client of its thread frees and takes memory. Prints figures,
/// asserts nothing about them:
/// `cargo test --release -p remoca-server --test hostile -- --ignored --nocapture latency`.
#[test]
#[ignore = "a measurement"]
fn latency_beside_one_that_frees_memory() {
    let gigabytes: u64 = 2;
    let server = start(Config { memory_bytes: gigabytes << 30, threads: 1, ..config() });
    let pages = u32::try_from(gigabytes << 18).unwrap();
    let mut busy = Client::with_pages(&server, token(1), 0);
    let mut other = Client::with_pages(&server, token(2), 0);
    let enough = AtomicBool::new(false);
    let mut latencies: Vec<Duration> = std::thread::scope(|threads| {
        threads.spawn(|| {
            while !enough.load(Ordering::Relaxed) {
                busy.resize(pages);
                (0..pages).step_by(512).for_each(|slot| busy.store(slot, 1));
                busy.resize(0);
            }
        });
        let _at_the_end = Setting(&enough);
        let until = std::time::Instant::now() + Duration::from_secs(15);
        let mut latencies = Vec::new();
        while std::time::Instant::now() < until {
            let asked = std::time::Instant::now();
            other.barrier();
            latencies.push(asked.elapsed());
            std::thread::sleep(Duration::from_millis(1));
        }
        latencies
    });
    latencies.sort_unstable();
    let quantile = |share: usize| latencies[(latencies.len() - 1) * share / 1000];
    println!("{} PINGs: p50 {:?}, p99 {:?}, max {:?}", latencies.len(), quantile(500), quantile(990), quantile(1000));
}

#[test]
fn more_sessions_than_allowed_are_refused() {
    let limits = Limits { sessions: 3, ..Limits::default() };
    let server = start(Config { limits, ..config() });
    let mut clients: Vec<Client> = (1..=3).map(|number| Client::with_pages(&server, token(number), 1)).collect();
    for _ in 0..3 {
        let mut surplus = Client::connect(&server);
        surplus.send(&[hello(1)]);
        surplus.expect_error(ErrorCode::Busy);
        surplus.expect_closed();
    }
    // A client that reconnects takes its own place.
    let (mut again, welcome) = Client::greeted(&server, token(1), 2);
    assert_eq!(welcome.npages, PageCount(1));
    again.barrier();
    clients.pop().unwrap().send(&[Frame::Bye]);
    wait_for(&server, "a place is free", |status| status.pools.len() == 2);
    Client::with_pages(&server, token(7), 1).barrier();
}

/// Sends until the server accepts no more for a while, and returns how many bytes it accepted.
fn send_without_reading(client: &mut Client, bytes: &[u8], most: usize) -> usize {
    client.socket.set_nonblocking(true).unwrap();
    let mut taken = 0;
    let mut pauses = 0;
    while taken < most && pauses < 20 {
        match client.socket.write(&bytes[taken % bytes.len()..]) {
            Ok(count) => (taken, pauses) = (taken + count, 0),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                pauses += 1;
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(_) => break,
        }
    }
    taken
}

#[test]
fn nothing_more_is_read_from_a_peer_that_does_not_read() {
    let server = start(config());
    let mut bystander = Client::with_pages(&server, token(1), 10);
    let mut greedy = Client::with_pages(&server, token(2), 10);
    greedy.store(0, 1);
    let requests = encode(&vec![request(1, 0); 4096]);
    let most = 256 << 20;
    let taken = send_without_reading(&mut greedy, &requests, most);
    assert!(taken < most / 4, "the server took {taken} bytes of requests whose replies nobody read");
    bystander.store(0, 1);
    bystander.expect_held(0, 1);
    // Once the peer reads again, not one reply is missing.
    greedy.socket.set_nonblocking(false).unwrap();
    (0..taken / 16).for_each(|_| greedy.expect_page(1, 0, 1));
}

#[test]
fn a_peer_that_never_reads_is_closed_in_the_end() {
    let limits = Limits { stall_timeout: Duration::from_millis(100), ..Limits::default() };
    // Over a Unix socket, where the kernel does not help.
    let folder = tempfile::tempdir().unwrap();
    let listen = vec![remoca_server::ListenAddress::Unix(folder.path().join("serve.sock"))];
    let server = start(Config { limits, listen, ..config() });
    let mut greedy = Client::with_pages(&server, token(2), 10);
    greedy.store(0, 1);
    send_without_reading(&mut greedy, &encode(&vec![request(1, 0); 4096]), 64 << 20);
    wait_for(&server, "the connection is closed", |status| !status.pools[0].connected);
}

#[test]
fn one_that_does_much_lets_others_go_in_between() {
    // One thread, and a client that keeps it busy with the most expensive frames there are.
    let server = start(Config { memory_bytes: 256 << 20, threads: 1, ..config() });
    let mut busy = Client::with_pages(&server, token(1), 65_536);
    let mut other = Client::with_pages(&server, token(2), 0);
    // Header-only frames, each of which copies a page.
    busy.store(0, 1);
    let work = encode(&[moved(0, 1), moved(1, 0)].repeat(4096));
    let (enough, sent) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !enough.load(Ordering::Relaxed) {
                busy.send_bytes(&work);
                sent.fetch_add(1, Ordering::Relaxed);
            }
            busy.barrier();
        });
        let _at_the_end = Setting(&enough);
        let batches_before_an_answer = || {
            let before = sent.load(Ordering::Relaxed);
            other.barrier();
            sent.load(Ordering::Relaxed) - before
        };
        let mut batches: Vec<usize> = std::iter::repeat_with(batches_before_an_answer).take(21).collect();
        batches.sort_unstable();
        // Usually none. Otherwise it is as much as one task may read at a stretch: 128 times what fits into its
        // buffer.
        assert!(batches[10] < 32, "batches taken before another client has its answer: {batches:?}");
    });
}

/// Sets the flag when dropped, also by a panic.
struct Setting<'a>(&'a AtomicBool);

impl Drop for Setting<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
