//! The memory of the server besides the pages. It is the only test in its process, so that it can be measured.
#![allow(clippy::unwrap_used, reason = "tests fail by panics")]

mod common;

use std::io::{ErrorKind, Write};
use std::time::Duration;

use common::{Client, config, encode, request, start, token, wait_for};
use remoca_protocol::Token;
use remoca_server::{Config, Limits};

fn resident_bytes() -> usize {
    // Exact, unlike RssAnon in `status`, to which each processor adds what it has counted only now and then.
    let sums = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = sums.lines().find(|line| line.starts_with("Anonymous:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// P5: at most 16 bytes besides each page. Connections cost what their limits say, however they behave.
#[test]
fn the_server_holds_little_beside_its_pages() {
    let pages = 64 << 10;
    let limits = Limits { sessions: 300, ..Limits::default() };
    let server = start(Config { memory_bytes: 256 << 20, limits, ..config() });
    let before = resident_bytes();
    let mut owner = Client::with_pages(&server, token(0), pages);
    (0..pages).for_each(|slot| owner.store(slot, slot));
    owner.barrier();
    let beside = resident_bytes().saturating_sub(before + pages as usize * 4096);
    // The owner's buffers on both sides are a fixed part.
    assert!(beside < 16 * pages as usize + (3 << 20), "{beside} bytes beside {pages} pages");
    owner.resize(512);
    wait_for(&server, "the memory is free", |status| {
        status.pages_free == 65_536 - 512 && status.pages_to_give_back == 0
    });

    let requests = encode(&vec![request(1, 0); 8192]);
    let count = 100;
    let mut greedy: Vec<Client> = (0..count)
        .map(|number: u8| {
            let mut name = [7; 16];
            name[0] = number;
            let mut client = Client::with_pages(&server, Token(name), 1);
            client.store(0, 1);
            client.barrier();
            client.socket.set_nonblocking(true).unwrap();
            client
        })
        .collect();
    let before = resident_bytes();
    for _ in 0..10 {
        for client in &mut greedy {
            let error = std::iter::repeat_with(|| client.socket.write(&requests)).find_map(Result::err).unwrap();
            assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    // The host may have swapped something out.
    let each = resident_bytes().saturating_sub(before) / usize::from(count);
    // The receive buffer (128 KiB) and the replies (24 bytes for each of 256). Anything that grows with a peer's
    // input would be megabytes here.
    assert!(each < 192 << 10, "{each} bytes for each connection");
}
