//! What is queued leaves once, in its order, however little the socket takes at a time.

use super::super::memory::Passed;
use super::super::memory::tests::memory;
use super::*;
use remoca_core::units::{PAGE_SIZE, SlotIndex};
use remoca_protocol::{FRAME_BYTES_MAX, PoolGeneration, SendCount, ServerId, VERSION, decode};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io::{Read, Write};
use std::time::Duration;

fn session() -> (Session, File) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let welcome = Welcome {
        version: VERSION,
        server_id: ServerId([1; 16]),
        pool_generation: PoolGeneration(1),
        npages: PageCount(0),
        available: PageCount(8),
        quota: PageCount(8),
        sends_received: SendCount(0),
    };
    (Session::new(ServerNumber(0), Some(ours), &welcome, None), theirs.into())
}

/// Queues pages `from..to`, each with its number in every byte and as its slot.
fn queue(session: &mut Session, pages: std::ops::Range<u32>) {
    for page in pages {
        session.send_page(SlotIndex(page), &[page.to_le_bytes()[0]; PAGE_SIZE]);
    }
}

/// Reads at most `most` bytes of what is there.
fn read(server: &mut File, most: usize, stream: &mut Vec<u8>) {
    let mut piece = vec![0; most];
    match server.read(&mut piece) {
        Ok(count) => stream.extend_from_slice(&piece[..count]),
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
    }
}

/// Returns the slots of the pages of a stream, and whether it ends with a BYE.
fn slots(mut stream: &[u8]) -> (Vec<u32>, bool) {
    let mut slots = Vec::new();
    while let Some((frame, length)) = decode(stream).unwrap() {
        match frame {
            Frame::SendPage { slot, page, .. } => {
                assert!(
                    page.iter().all(|byte| *byte == slot.0.to_le_bytes()[0]),
                    "the page of {slot:?} is another one"
                );
                slots.push(slot.0);
            }
            Frame::Bye => return (slots, stream.len() == length),
            other => panic!("{other:?} was not queued"),
        }
        stream = &stream[length..];
    }
    assert!(stream.is_empty(), "a part of a frame");
    (slots, false)
}

#[test]
fn a_server_that_takes_little_at_a_time_gets_everything_once() {
    const PAGES: u32 = 1200;
    let (mut session, mut server) = session();
    let (mut stream, mut told, mut queued) = (Vec::new(), 0, 0);
    while told < PAGES {
        if queued < PAGES && queued - told < 600 {
            queue(&mut session, queued..queued + 100);
            queued += 100;
        }
        told += session.flush().unwrap();
        let sent = u32::try_from(stream.len() / FRAME_BYTES_MAX).unwrap();
        assert!(told >= sent && told <= queued, "told {told} of {queued}, the server has {sent}");
        read(&mut server, 30_000, &mut stream);
        session.writable = true;
    }
    // However much a socket takes on this system.
    read(&mut server, PAGES as usize * FRAME_BYTES_MAX, &mut stream);
    assert_eq!(slots(&stream), ((0..PAGES).collect(), false));
}

#[test]
fn a_session_that_is_left_sends_the_rest_and_nothing_twice() {
    for reads in [0, 1, 40] {
        let (mut session, mut server) = session();
        queue(&mut session, 0..600);
        let mut stream = Vec::new();
        session.flush().unwrap();
        for _ in 0..reads {
            read(&mut server, 50_000, &mut stream);
            session.writable = true;
            session.flush().unwrap();
        }
        let (socket, rest) = session.leave();
        drop(socket);
        server.read_to_end(&mut stream).unwrap();
        stream.extend_from_slice(&rest);
        assert_eq!(slots(&stream), ((0..600).collect(), true), "after {reads} looks of the server");
    }
}

#[test]
fn a_page_that_has_not_left_is_not_requested() {
    let (mut session, _server) = session();
    queue(&mut session, 3..5);
    assert!(session.begin_fetch(SlotIndex(4)).is_none());
    assert_eq!(session.read(SlotIndex(4)), Some(PageHere::Unsent(&[4; PAGE_SIZE])));
    assert!(session.begin_fetch(SlotIndex(5)).is_some());
    assert_eq!(session.flush().unwrap(), 2);
    assert!(session.begin_fetch(SlotIndex(4)).is_some());
    assert_eq!(session.traffic(), Traffic { sent: 2, requested: 3, received: 1, taken_back: 0 });
}

#[test]
fn frames_are_taken_some_at_a_time_and_each_once() {
    let (mut session, mut server) = session();
    let count = FRAMES_PER_TURN + 10;
    let mut bytes = Vec::new();
    (0..count).for_each(|_| Frame::Bye.encode(&mut bytes));
    server.write_all(&bytes).unwrap();
    let mut taken = 0;
    assert_eq!(session.receive(|_| taken += 1).unwrap(), Received::More);
    assert!(taken >= FRAMES_PER_TURN);
    assert_eq!(session.receive(|_| taken += 1).unwrap(), Received::Drained);
    assert_eq!(taken, count);
    drop(server);
    assert_eq!(session.receive(|_| {}).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

/// A driver that did not watch would never send the rest, and one that always did would not sleep.
#[test]
fn room_is_watched_for_as_long_as_the_socket_is_full() {
    let (mut session, mut server) = session();
    let (mut queued, mut change) = (0, session.watch_change());
    assert_eq!(change, None);
    while change.is_none() {
        assert!(queued < 100_000, "it takes everything");
        queue(&mut session, queued..queued + 100);
        queued += 100;
        session.flush().unwrap();
        change = session.watch_change();
    }
    assert_eq!((change, session.watch_change()), (Some(true), None));
    let mut stream = Vec::new();
    read(&mut server, 1 << 20, &mut stream);
    assert_eq!(session.flush().unwrap(), 0, "nobody has said that there is room");
    let mut changes = Vec::new();
    while changes.is_empty() {
        read(&mut server, 1 << 20, &mut stream);
        session.note_writable();
        session.flush().unwrap();
        changes.extend(session.watch_change());
    }
    assert_eq!(changes, [false]);
    read(&mut server, queued as usize * FRAME_BYTES_MAX, &mut stream);
    assert_eq!(stream.len(), queued as usize * FRAME_BYTES_MAX);
}

#[test]
fn a_server_takes_nothing_back_of_a_pool_that_is_not_mapped() {
    let (mut session, mut server) = session();
    let (mut bytes, mut answer) = (Vec::new(), Vec::new());
    Frame::TakeBack { npages: PageCount(0) }.encode(&mut bytes);
    server.write_all(&bytes).unwrap();
    assert_eq!(session.receive(|_| panic!("it means nothing here")).unwrap(), Received::Drained);
    session.flush().unwrap();
    read(&mut server, 100, &mut answer);
    assert!(answer.is_empty());
}

/// The server was away, and its pool is larger than this process knows. It takes memory back while it is asked for a size between these
/// two.
#[test]
fn the_engine_hears_of_no_size_beyond_what_a_server_leaves() {
    let (paged, mut server) = session();
    let Passed::New(memory) = PoolMemory::take(memory(8), None, Duration::ZERO).unwrap() else {
        panic!("nobody owned it")
    };
    let mapped = Some(Box::new(Mapped::new(memory, PageCount(2), 0)));
    let mut session = Session { granted: PageCount(2), mapped, ..paged };
    assert_eq!(session.set_size(PageCount(6)), Size::Asked);
    let sized = |request, npages| Frame::Sized { request, npages: PageCount(npages), available: PageCount(0) };
    let mut bytes = Vec::new();
    for frame in [Frame::TakeBack { npages: PageCount(7) }, sized(RequestId(0), 6), sized(OWN_REQUEST, 2)] {
        frame.encode(&mut bytes);
    }
    server.write_all(&bytes).unwrap();
    let mut sizes = Vec::new();
    let mut hear = |frame: &Frame<'_>| {
        if let Frame::Sized { npages, .. } = frame {
            sizes.push(*npages);
        }
    };
    session.receive(&mut hear).unwrap();
    assert_eq!(sizes, [PageCount(2)], "as much as the link asked for, after what the engine asked for");
    assert_eq!(session.granted(), PageCount(2));
}
