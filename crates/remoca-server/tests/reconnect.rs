//! Clients that come back, come twice, or do not come back.
#![allow(clippy::unwrap_used, reason = "tests fail by panics")]

mod common;

use std::net::Shutdown;
use std::time::Duration;

use common::{Client, config, encode, moved, page, request, send_page, start, token, wait_for};
use remoca_protocol::{ErrorCode, Frame, PageCount, SendCount};
use remoca_server::{Config, Limits, ListenAddress, PageLocking};

#[test]
fn a_client_that_vanished_finds_its_pages() {
    let server = start(config());
    let (mut client, first) = Client::greeted(&server, token(1), 1);
    client.resize(100);
    (0..100).for_each(|slot| client.store(slot, slot));
    client.barrier();
    drop(client);
    wait_for(&server, "the server has noticed", |status| !status.pools[0].connected);
    let (mut client, second) = Client::greeted(&server, token(1), 2);
    assert_eq!((second.npages, second.available), (PageCount(100), PageCount(1948)));
    assert_eq!(second.sends_received, SendCount(100));
    assert_eq!((second.server_id, second.pool_generation), (first.server_id, first.pool_generation));
    (0..100).for_each(|slot| client.expect_held(slot, slot));
}

#[test]
fn a_client_whose_pool_is_kept_is_not_refused_for_others() {
    let limits = Limits { sessions: 1, ..Limits::default() };
    let server = start(Config { limits, ..config() });
    let mut client = Client::with_pages(&server, token(1), 10);
    client.store(0, 5);
    client.barrier();
    drop(client);
    wait_for(&server, "the server has noticed", |status| !status.pools[0].connected);
    let mut other = Client::connect(&server);
    let versions = remoca_protocol::VERSIONS;
    other.send(&[Frame::Hello(remoca_protocol::Hello { versions, token: token(2), epoch: 1 })]);
    other.expect_error(ErrorCode::Busy);
    let (mut client, welcome) = Client::greeted(&server, token(1), 2);
    assert_eq!(welcome.npages, PageCount(10));
    client.expect_held(0, 5);
}

#[test]
fn an_older_connection_is_closed_before_a_newer_one_is_answered() {
    // A Unix socket: what is closed is closed at once at both ends.
    let folder = tempfile::tempdir().unwrap();
    let listen = vec![ListenAddress::Unix(folder.path().join("serve.sock"))];
    let server = start(Config { listen, ..config() });
    let mut older = Client::with_pages(&server, token(1), 10);
    older.store(0, 5);
    older.barrier();
    for epoch in 2..50 {
        let (mut newer, welcome) = Client::greeted(&server, token(1), epoch);
        assert_eq!(welcome.npages, PageCount(10));
        // The connection is closed now, not some time later.
        older.socket.set_nonblocking(true).unwrap();
        older.expect_closed();
        newer.expect_held(0, 5);
        older = newer;
    }
}

#[test]
fn what_a_replaced_connection_sent_late_does_nothing() {
    let server = start(config());
    let mut older = Client::with_pages(&server, token(1), 10);
    older.store(0, 1);
    older.barrier();
    let (mut newer, _) = Client::greeted(&server, token(1), 2);
    // The connection is reset at the latest when the server's host receives more.
    let late = encode(&[send_page(0, &page(2)), moved(0, 5), Frame::Bye]);
    let _reset = older.socket.write_all(&late);
    newer.barrier();
    newer.expect_held(0, 1);
}

#[test]
fn a_connection_that_is_stuck_is_replaced_too() {
    let server = start(config());
    let mut stuck = Client::with_pages(&server, token(1), 10);
    stuck.store(0, 1);
    stuck.barrier();
    // Far more replies than the sockets hold, and none of them is read.
    stuck.send(&vec![request(0, 0); 16_000]);
    let (mut newer, _) = Client::greeted(&server, token(1), 2);
    newer.expect_held(0, 1);
}

#[test]
fn many_at_once_leave_one() {
    let server = start(config());
    std::thread::scope(|threads| {
        for epoch in 1..=16 {
            let server = &server;
            threads.spawn(move || {
                let mut client = Client::connect(server);
                let versions = remoca_protocol::VERSIONS;
                let hello = remoca_protocol::Hello { versions, token: token(1), epoch };
                client.send(&[Frame::Hello(hello)]);
                let mut reply = [0; 1];
                // WELCOME, a stale epoch, or closed in favour of a newer one: any order is possible.
                let _any = std::io::Read::read(&mut client.socket, &mut reply);
                std::mem::forget(client);
            });
        }
    });
    wait_for(&server, "one pool, one connection", |status| {
        status.pools.len() == 1 && status.totals.sessions == status.totals.fenced + 1
    });
    let (_, welcome) = Client::greeted(&server, token(1), 17);
    assert_eq!(welcome.npages, PageCount(0));
}

#[test]
fn an_epoch_that_is_not_new_is_refused() {
    let server = start(config());
    let (mut client, _) = Client::greeted(&server, token(1), 5);
    client.resize(1);
    for epoch in [5, 4, 0] {
        let mut stale = Client::connect(&server);
        let versions = remoca_protocol::VERSIONS;
        stale.send(&[Frame::Hello(remoca_protocol::Hello { versions, token: token(1), epoch })]);
        stale.expect_error(ErrorCode::StaleEpoch);
        stale.expect_closed();
    }
    client.barrier();
}

#[test]
fn bye_frees_the_pool_at_once() {
    let server = start(config());
    let (mut client, first) = Client::greeted(&server, token(1), 1);
    client.resize(2048);
    client.store(7, 7);
    client.send(&[request(1, 7), Frame::Bye]);
    client.expect_page(1, 7, 7);
    client.expect_closed();
    wait_for(&server, "all memory is free", |status| status.pages_free == 2048 && status.pools.is_empty());
    let (_, second) = Client::greeted(&server, token(1), 1);
    assert_eq!((second.npages, second.available, second.sends_received), (PageCount(0), PageCount(2048), SendCount(0)));
    assert_ne!(second.pool_generation, first.pool_generation);
    assert_eq!(second.server_id, first.server_id);
}

#[test]
fn bye_counts_though_nobody_takes_the_replies_before_it() {
    // A Unix socket, on which a client can say that it reads no more.
    let folder = tempfile::tempdir().unwrap();
    let listen = vec![ListenAddress::Unix(folder.path().join("serve.sock"))];
    let server = start(Config { listen, ..config() });
    let mut client = Client::with_pages(&server, token(1), 2048);
    client.store(7, 7);
    client.barrier();
    client.socket.shutdown(Shutdown::Read).unwrap();
    client.send(&vec![request(1, 7); 1000]);
    client.send(&[Frame::Bye]);
    wait_for(&server, "all memory is free", |status| status.pages_free == 2048 && status.pools.is_empty());
    // Without BYE the pool stays.
    let mut client = Client::with_pages(&server, token(1), 2048);
    client.store(7, 7);
    client.barrier();
    client.socket.shutdown(Shutdown::Read).unwrap();
    client.send(&[request(1, 7)]);
    drop(client);
    wait_for(&server, "the server has noticed", |status| !status.pools[0].connected);
    let (mut client, _) = Client::greeted(&server, token(1), 2);
    client.expect_held(7, 7);
}

#[test]
fn a_pool_is_freed_when_the_grace_time_is_over() {
    let server = start(Config { grace: Duration::from_millis(50), ..config() });
    let (mut client, first) = Client::greeted(&server, token(1), 1);
    client.resize(2048);
    client.store(0, 1);
    client.barrier();
    let mut other = Client::connect(&server);
    other.hello(token(2), 1);
    assert_eq!(other.try_resize(1), Err((ErrorCode::NoMemory, 0)));
    drop(client);
    wait_for(&server, "the pool is freed", |status| status.totals.expired == 1 && status.pages_free == 2048);
    assert_eq!(other.resize(2048), 0, "the other client has it now");
    other.expect_empty(0);
    let (mut client, second) = Client::greeted(&server, token(1), 2);
    assert_eq!((second.npages, second.sends_received), (PageCount(0), SendCount(0)));
    assert_ne!(second.pool_generation, first.pool_generation);
    client.expect_empty(0);
}

#[test]
fn a_client_killed_in_the_middle_of_a_page_loses_that_page_only() {
    let server = start(config());
    let mut client = Client::with_pages(&server, token(1), 10);
    client.store(1, 1);
    client.store(2, 2);
    client.barrier();
    let half = encode(&[send_page(1, &page(9))]);
    for cut in [1, 15, 16, 17, 2000, half.len() - 1] {
        client.send_bytes(&half[..cut]);
        drop(client);
        client = Client::connect(&server);
        let welcome = client.hello(token(1), 100 + cut as u64);
        assert_eq!(welcome.sends_received, SendCount(2), "cut at {cut}");
        client.expect_held(1, 1);
        client.expect_held(2, 2);
    }
}

#[test]
fn what_was_lost_with_a_connection_can_be_told() {
    let server = start(config());
    let mut client = Client::with_pages(&server, token(1), 1000);
    let (mut epoch, mut known) = (1, 0);
    for round in 0..20 {
        // The pool without pages.
        client.resize(0);
        client.resize(1000);
        (0..1000).for_each(|slot| client.store(slot, round * 1000 + slot));
        // Does not wait for anything; the server may have handled all of it, or nothing.
        drop(client);
        epoch += 1;
        let (newer, welcome) = Client::greeted(&server, token(1), epoch);
        client = newer;
        let taken = u32::try_from(welcome.sends_received.0 - known).unwrap();
        known = welcome.sends_received.0;
        (0..taken).for_each(|slot| client.expect_held(slot, round * 1000 + slot));
        (taken..1000).for_each(|slot| client.expect_empty(slot));
    }
}

#[test]
fn clients_never_see_each_others_pages() {
    // Locked memory is not zeroed when it changes hands: only the record of what was written protects it.
    for locking in [PageLocking::Locked, PageLocking::Unlocked] {
        let server = start(Config { memory_bytes: 4 << 20, locking, ..config() });
        let mut first = Client::with_pages(&server, token(1), 1024);
        (0..1024).for_each(|slot| first.store(slot, slot));
        first.barrier();
        first.resize(512);
        let mut second = Client::with_pages(&server, token(2), 512);
        (0..512).for_each(|slot| second.expect_empty(slot));
        (0..512).step_by(3).for_each(|slot| second.store(slot, 5000 + slot));
        first.send(&[Frame::Bye]);
        first.expect_closed();
        wait_for(&server, "the first pool is freed", |status| status.pools.len() == 1);
        second.resize(1024);
        for slot in 0..1024 {
            if slot < 512 && slot % 3 == 0 {
                second.expect_held(slot, 5000 + slot);
            } else {
                second.expect_empty(slot);
            }
        }
        // Same slot numbers, other pool.
        second.resize(512);
        let mut third = Client::with_pages(&server, token(3), 512);
        (0..512).for_each(|slot| third.expect_empty(slot));
        third.store(0, 1);
        second.expect_held(0, 5000);
    }
}

#[test]
fn another_start_is_another_server() {
    let ids = [(); 2].map(|()| {
        let server = start(config());
        Client::greeted(&server, token(1), 1).1.server_id
    });
    assert_ne!(ids[0], ids[1]);
}
