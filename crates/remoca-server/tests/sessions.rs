//! What a client can do with its pool, over real sockets.

mod common;

use common::{BEYOND, Client, config, encode, moved, page, request, send_page, start, token};
use remoca_protocol::{ErrorCode, Frame, Hello, PageCount, RequestId, SendCount, VERSION, VERSIONS};

#[test]
fn a_session_over_each_kind_of_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = format!("unix:{}", folder.path().join("serve.sock").display());
    let mut config = config();
    config.listen.push(path.parse().unwrap());
    let server = start(config);
    for (number, address) in (1..).zip(server.local_addresses()) {
        let mut client = Client::connect_to(address);
        let welcome = client.hello(token(number), 1);
        assert_eq!(welcome.version, VERSION);
        assert_eq!((welcome.npages, welcome.sends_received), (PageCount(0), SendCount(0)));
        assert_eq!(welcome.quota, PageCount(2048));
        assert_eq!(client.resize(10), 2038 - 512 * u32::from(number - 1), "the other client has a chunk");
        client.store(3, 33);
        client.expect_held(3, 33);
        client.expect_empty(4);
        client.expect_empty(10);
        client.expect_empty(u32::MAX);
    }
}

#[test]
fn frames_may_come_with_the_hello() {
    let server = start(config());
    let mut client = Client::connect(&server);
    let hello = Hello { versions: VERSIONS, token: token(1), epoch: 1 };
    let size = Frame::SetSize { request: RequestId(1), npages: PageCount(1) };
    client.send(&[Frame::Hello(hello), size, send_page(0, &page(9)), request(2, 0)]);
    client.receive(|frame| assert!(matches!(frame, Frame::Welcome(_))));
    client.receive(|frame| assert!(matches!(frame, Frame::Sized { .. })));
    client.expect_page(2, 0, 9);
}

#[test]
fn replies_come_in_the_order_of_their_requests() {
    let server = start(config());
    let mut client = Client::with_pages(&server, token(1), 64);
    (0..64).step_by(2).for_each(|slot| client.store(slot, slot));
    // More frames than the server answers at once, and more bytes than a socket buffer holds.
    let mut frames = Vec::new();
    for round in 0..100 {
        frames.extend((0..64).map(|slot| request(round * 64 + slot, slot)));
        frames.push(Frame::SetSize { request: RequestId(round), npages: PageCount(64) });
    }
    let bytes = encode(&frames);
    std::thread::scope(|threads| {
        let stream = &server.local_addresses()[0];
        // A second client is served meanwhile.
        threads.spawn(move || Client::connect_to(stream).hello(token(2), 1));
        client.send_bytes(&bytes);
        for round in 0..100 {
            for slot in 0..64 {
                match slot % 2 {
                    0 => client.expect_page(round * 64 + slot, slot, slot),
                    _ => client.expect_not_found(round * 64 + slot),
                }
            }
            let (request, npages) = (RequestId(round), PageCount(64));
            client.expect(Frame::Sized { request, npages, available: PageCount(1984) });
        }
    });
}

#[test]
fn a_reply_holds_the_page_of_its_time() {
    let server = start(config());
    let mut client = Client::with_pages(&server, token(1), 1024);
    let pages: Vec<_> = (0..8).map(page).collect();
    let resized = |request, npages| Frame::SetSize { request: RequestId(request), npages: PageCount(npages) };
    for round in 0..20 {
        // All frames in one write: each reply must show the slot as it was between the frames around it.
        client.send(&[
            send_page(600, &pages[1]),
            send_page(601, &pages[2]),
            request(1, 600),
            send_page(600, &pages[3]),
            request(2, 600),
            request(3, 601),
            moved(600, 601),
            request(4, 601),
            request(5, 600),
            moved(601, BEYOND),
            request(6, 601),
            send_page(601, &pages[4]),
            request(7, 601),
            resized(8, 10),
            request(9, 601),
            resized(10, 1024),
            request(11, 601),
            send_page(601, &pages[5]),
            request(12, 601),
            // No waiting reply has the page that moves, but one has the page that is overwritten.
            send_page(700, &pages[6]),
            moved(700, 601),
            request(13, 601),
        ]);
        client.expect_page(1, 600, 1);
        client.expect_page(2, 600, 3);
        client.expect_page(3, 601, 2);
        client.expect_page(4, 601, 3);
        client.expect_not_found(5);
        client.expect_not_found(6);
        client.expect_page(7, 601, 4);
        client.receive(|frame| assert!(matches!(frame, Frame::Sized { npages: PageCount(10), .. }), "{round}"));
        client.expect_not_found(9);
        client.receive(|frame| assert!(matches!(frame, Frame::Sized { npages: PageCount(1024), .. }), "{round}"));
        client.expect_not_found(11);
        client.expect_page(12, 601, 5);
        client.expect_page(13, 601, 6);
    }
}

#[test]
fn memory_given_away_is_not_in_a_late_reply() {
    // One chunk: as soon as the first client shrinks, the second takes it and writes all over it.
    let server = start(remoca_server::Config { memory_bytes: 2 << 20, threads: 2, ..config() });
    let mut first = Client::with_pages(&server, token(1), 512);
    (0..512).for_each(|slot| first.store(slot, slot));
    let mut frames: Vec<_> = (0..512).chain(0..512).map(|slot| request(slot, slot)).collect();
    frames.push(Frame::SetSize { request: RequestId(9999), npages: PageCount(0) });
    first.send(&frames);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut second = Client::connect(&server);
            second.hello(token(2), 1);
            while second.try_resize(512).is_err() {
                std::thread::yield_now();
            }
            (0..512).for_each(|slot| second.store(slot, 10_000 + slot));
            second.barrier();
        });
        // Read late and slowly, so that the replies are still on their way when the size changes.
        for slot in (0..512).chain(0..512) {
            first.expect_page(slot, slot, slot);
        }
        first.receive(|frame| assert!(matches!(frame, Frame::Sized { npages: PageCount(0), .. })));
    });
}

#[test]
fn growing_and_shrinking_keep_the_pages_that_fit() {
    let server = start(config());
    let mut client = Client::with_pages(&server, token(1), 600);
    (0..600).for_each(|slot| client.store(slot, slot));
    assert_eq!(client.resize(1500), 548);
    (0..600).for_each(|slot| client.expect_held(slot, slot));
    (600..1500).for_each(|slot| client.expect_empty(slot));
    assert_eq!(client.resize(513), 1535);
    (0..513).for_each(|slot| client.expect_held(slot, slot));
    (513..600).for_each(|slot| client.expect_empty(slot));
    assert_eq!(client.resize(600), 1448);
    (0..513).for_each(|slot| client.expect_held(slot, slot));
    (513..600).for_each(|slot| client.expect_empty(slot));
    assert_eq!(client.resize(0), 2048);
    client.expect_empty(0);
    assert_eq!(client.resize(2048), 0);
    client.expect_empty(0);
}

#[test]
fn a_refusal_says_what_can_be_had_and_changes_nothing() {
    let server = start(remoca_server::Config { quota_bytes: Some(6 << 20), ..config() });
    let mut first = Client::with_pages(&server, token(1), 1000);
    first.store(999, 5);
    assert_eq!(first.try_resize(1537), Err((ErrorCode::Quota, 536)));
    assert_eq!(first.try_resize(u32::MAX), Err((ErrorCode::Quota, 536)));
    let (mut second, welcome) = Client::greeted(&server, token(2), 1);
    assert_eq!((welcome.quota, welcome.available), (PageCount(1536), PageCount(1024)));
    assert_eq!(second.resize(600), 424);
    assert_eq!(second.try_resize(1025), Err((ErrorCode::NoMemory, 424)));
    assert_eq!(first.try_resize(1025), Err((ErrorCode::NoMemory, 24)));
    first.expect_held(999, 5);
    first.expect_empty(1000);
    // The second client gets the refused size when the first gives memory up.
    second.resize(512);
    assert_eq!(first.resize(1025), 511);
    first.expect_held(999, 5);
}

#[test]
fn pages_move() {
    let server = start(config());
    let mut client = Client::with_pages(&server, token(1), 1000);
    (0..10).for_each(|slot| client.store(slot, slot));
    // Moves empty slots onto full ones, which empties them.
    client.send(&[moved(2, BEYOND), moved(3, 1000), moved(500, 4), moved(1000, 9), moved(BEYOND, 2000)]);
    [2, 3, 4, 9].into_iter().for_each(|slot| client.expect_empty(slot));
    [0, 1, 5, 6, 7, 8].into_iter().for_each(|slot| client.expect_held(slot, slot));
    // Moves a page to another chunk; onto a page; out of an empty slot; onto itself; beyond the size.
    client.send(&[moved(0, 999), moved(1, 5), moved(2, 6), moved(7, 7), moved(8, 1000)]);
    client.expect_held(999, 0);
    client.expect_held(5, 1);
    client.expect_held(7, 7);
    [0, 1, 2, 6, 8].into_iter().for_each(|slot| client.expect_empty(slot));
    client.send(&[moved(u32::MAX, 5), moved(u32::MAX, u32::MAX)]);
    client.expect_empty(5);
}

#[test]
fn sends_beyond_the_size_are_dropped_and_counted() {
    let server = start(config());
    let mut client = Client::with_pages(&server, token(1), 10);
    client.store(9, 1);
    client.store(10, 2);
    client.store(u32::MAX, 3);
    client.barrier();
    assert_eq!(client.resize(20), 2028);
    client.expect_empty(10);
    drop(client);
    let (_, welcome) = Client::greeted(&server, token(1), 2);
    assert_eq!(welcome.sends_received, SendCount(3));
}

#[test]
fn status_counts() {
    let server = start(config());
    let mut client = Client::with_pages(&server, token(0xab), 700);
    (0..5).for_each(|slot| client.store(slot, slot));
    client.expect_held(1, 1);
    client.expect_empty(6);
    client.send(&[moved(0, BEYOND), moved(6, 1)]);
    client.barrier();
    let status = server.status();
    assert_eq!((status.pages, status.pages_free, status.quota_pages), (2048, 1024, 2048));
    let pool = &status.pools[0];
    assert_eq!((pool.token.as_str(), pool.connected, pool.npages, pool.pages_written), ("abababab", true, 700, 3));
    assert!(pool.peer.starts_with("tcp:127.0.0.1:"));
    assert_eq!((pool.gets, pool.not_found, pool.sends), (1, 2, 5));
    client.send(&[Frame::Bye]);
    client.expect_closed();
    common::wait_for(&server, "the pool is gone", |status| status.pools.is_empty());
    let totals = server.status().totals;
    assert_eq!((totals.gets, totals.not_found, totals.sends, totals.moves, totals.sessions), (1, 2, 5, 2, 1));
    assert_eq!(server.status().pages_free, 2048);
}
