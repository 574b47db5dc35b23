//! The protocol against a client that knows it, a client that breaks it, and any bytes at all.

use super::ExportGeometry;
use super::export::{NbdExport, NbdRequest};
use super::fuzz::fuzz_nbd;
use super::listener::Listener;
use super::negotiation::{Choice, Negotiation, Step};
use super::offer::{Export, Target};
use super::outbox::Outbox;
use super::pieces::Piece;
use super::server::{Attached, NbdServer};
use super::staging::Staging;
use super::transmission::{End, Passed, REQUESTS_MAX, SHARED_MEMORY_MAX, Transmission};
use crate::device::GuestRequest;
use crate::request::{Operation, Outcome};
use proptest::prelude::*;
use remoca_core::engine::DiskError;
use remoca_io::address::Endpoint;
use remoca_io::buffer::BufferPool;
use remoca_protocol::guests::{BegunRequest, NbdClient};
use remoca_protocol::nbd::{
    CHUNK_MAGIC, COMMAND_DONT_FRAGMENT, COMMAND_FUA, COMMAND_NO_HOLE, Command, Fields, OPTION_MAGIC,
    OPTION_REPLY_MAGIC, REPLY_MAGIC, Request,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

const DISK: ExportGeometry = ExportGeometry::of_disk(64 << 20);

fn exports() -> Vec<Export> {
    let export = |name: &str, target, geometry| Export { name: name.into(), target, geometry };
    let port = ExportGeometry::of_port(DISK.size);
    vec![export("root", Target::Disk(0), DISK), export("remoca-port", Target::Port, port)]
}

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).unwrap();
    [&OPTION_MAGIC.to_be_bytes()[..], &number.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

fn info(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend(u16::try_from(wanted.len()).unwrap().to_be_bytes());
    wanted.iter().for_each(|wanted| data.extend(wanted.to_be_bytes()));
    data
}

/// A negotiation in parts of so many bytes: how it ended, and what was said.
fn negotiate(exports: &[Export], bytes: &[u8], part: usize) -> (Step, Vec<u8>) {
    let (mut negotiation, mut said) = (Negotiation::new(), Vec::new());
    let mut parts = bytes.chunks(part);
    loop {
        let step = negotiation.advance(exports);
        let sent = negotiation.outbox.take_all();
        if step != Step::Wait {
            return (step, [said, sent].concat());
        }
        if sent.is_empty() {
            let Some(part) = parts.next() else { return (step, said) };
            negotiation.staging.room().unwrap()[..part.len()].copy_from_slice(part);
            negotiation.staging.received(part.len());
        }
        said.extend(sent);
    }
}

/// The option replies behind the greeting: option, reply, data.
fn replies(said: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
    let mut fields = Fields(&said[18..]);
    let mut found = Vec::new();
    while !fields.0.is_empty() {
        assert_eq!(fields.u64(), Some(OPTION_REPLY_MAGIC));
        let (option, reply, len) = (fields.u32().unwrap(), fields.u32().unwrap(), fields.u32().unwrap());
        found.push((option, reply, fields.bytes(len).unwrap().to_vec()));
    }
    found
}

const ERROR: u32 = 1 << 31;
const GO: u32 = 7;

#[test]
fn a_client_gets_what_it_asks_for_however_its_bytes_arrive() {
    let bytes = [3_u32.to_be_bytes().to_vec(), option(8, &[]), option(3, &[]), option(GO, &info("root", &[1, 3]))];
    for part in 1..100 {
        let (step, said) = negotiate(&exports(), &bytes.concat(), part);
        assert_eq!(step, Step::Chosen(Choice { export: 0, structured_replies: true }));
        assert_eq!(&said[..18], b"NBDMAGICIHAVEOPT\0\x03");
        let size = (64_u64 << 20).to_be_bytes();
        let expected = [
            (8, 1, vec![]),
            (3, 2, b"\0\0\0\x04root".to_vec()),
            (3, 2, b"\0\0\0\x0Bremoca-port".to_vec()),
            (3, 1, vec![]),
            (GO, 3, [&[0, 0][..], &size, &[0x01, 0xED]].concat()),
            (GO, 3, b"\0\x03\0\0\x02\0\0\0\x10\0\x02\0\0\0".to_vec()),
            (GO, 3, b"\0\x01root".to_vec()),
            (GO, 1, vec![]),
        ];
        assert_eq!(replies(&said), expected);
    }
}

#[test]
fn options_are_answered_as_the_protocol_says() {
    let cases = [
        (option(3, b"x"), 3, ERROR | 3),
        (option(8, b"x"), 8, ERROR | 3),
        (option(5, &[]), 5, ERROR | 1),
        (option(9, &info("root", &[])), 9, ERROR | 1),
        (option(10, &info("root", &[])), 10, ERROR | 1),
        (option(11, &[]), 11, ERROR | 1),
        (option(77, b"anything"), 77, ERROR | 1),
        (option(GO, &info("nothing", &[])), GO, ERROR | 6),
        (option(6, &info("nothing", &[])), 6, ERROR | 6),
        (option(GO, b"\0\0\0\x09root\0\0"), GO, ERROR | 3),
        (option(GO, b"\0\0\0\x04root\0\x01"), GO, ERROR | 3),
        (option(GO, b"\0\0\0\x04root\0\0more"), GO, ERROR | 3),
        (option(GO, &[]), GO, ERROR | 3),
        (option(GO, &vec![0; 100_000]), GO, ERROR | 9),
    ];
    for (bytes, number, reply) in cases {
        let bytes = [&3_u32.to_be_bytes()[..], &bytes, &option(6, &info("root", &[]))].concat();
        let (step, said) = negotiate(&exports(), &bytes, 4096);
        assert_eq!(step, Step::Wait);
        let replies = replies(&said);
        assert_eq!((replies[0].0, replies[0].1), (number, reply), "{replies:?}");
        // And the next one is understood.
        assert_eq!(replies.last().map(|(option, reply, _)| (*option, *reply)), Some((6, 1)));
    }
}

#[test]
fn the_old_way_in_works_and_wrong_names_end_the_connection() {
    let size = (64_u64 << 20).to_be_bytes();
    for (flags, padding) in [(1_u32, 124), (3, 0)] {
        let (step, said) = negotiate(&exports(), &[&flags.to_be_bytes()[..], &option(1, b"root")].concat(), 7);
        assert_eq!(step, Step::Chosen(Choice { export: 0, structured_replies: false }));
        assert_eq!(said[18..], [&size[..], &[0x01, 0x6D], &vec![0; padding]].concat());
    }
    // Without a name: the only disk.
    assert!(matches!(negotiate(&exports(), b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0", 9).0, Step::Chosen(_)));
    let mut two = exports();
    two.push(Export { name: "data".into(), ..two[0].clone() });
    assert_eq!(negotiate(&two, b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0", 9).0, Step::End);
    for bad in [&b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x01x"[..], b"\0\0\0\x07", b"\0\0\0\x03IHAVEOPS\0\0\0\x01\0\0\0\0"]
    {
        assert_eq!(negotiate(&exports(), bad, 9).0, Step::End);
    }
    let (step, said) = negotiate(&exports(), &[&3_u32.to_be_bytes()[..], &option(2, &[])].concat(), 9);
    assert_eq!((step, replies(&said)), (Step::End, vec![(2, 1, vec![])]));
}

fn transmission(geometry: ExportGeometry, structured: bool) -> Transmission {
    let pool = BufferPool::new(SHARED_MEMORY_MAX);
    Transmission::new(geometry, structured, Staging::new(), Outbox::default(), pool)
}

fn request(command: Command, flags: u16, cookie: u64, offset: u64, len: u32) -> Request {
    Request { command, flags, cookie, offset, len }
}

/// Gives it all bytes that it takes.
fn feed(transmission: &mut Transmission, bytes: &mut &[u8], part: usize) -> usize {
    let Some(room) = transmission.room() else { return 0 };
    let (now, later) = bytes.split_at(room.len().min(part).min(bytes.len()));
    room[..now.len()].copy_from_slice(now);
    transmission.received(now.len());
    *bytes = later;
    now.len()
}

/// The only answer to one request.
fn answer_to(geometry: ExportGeometry, structured: bool, bytes: &[u8]) -> Vec<u8> {
    let (mut transmission, mut bytes) = (transmission(geometry, structured), bytes);
    loop {
        while let Some(mut piece) = transmission.pop() {
            if let Operation::Read { range } = &piece.operation {
                fill(piece.buffer.as_mut().unwrap(), range.start);
            }
            transmission.complete(piece, Outcome::Done);
        }
        if feed(&mut transmission, &mut bytes, usize::MAX) == 0 {
            return transmission.outbox.take_all();
        }
    }
}

/// What the disk holds: each byte follows from its place.
fn content(at: u64) -> u8 {
    ((at >> 9).wrapping_mul(31) ^ at).to_le_bytes()[0]
}

fn fill(buffer: &mut [u8], offset: u64) {
    for (byte, at) in buffer.iter_mut().zip(offset..) {
        *byte = content(at);
    }
}

#[test]
fn requests_that_cannot_be_are_refused_with_the_right_error() {
    let read_only = ExportGeometry { read_only: true, ..DISK };
    let bare = ExportGeometry { can_trim: false, can_write_zeroes: false, ..DISK };
    let size = DISK.size;
    use Command::{Flush, Other, Read, Trim, Write, WriteZeroes};
    for (geometry, command, flags, offset, len, error) in [
        (DISK, Read, 0, size, 512, 22),
        (DISK, Read, 0, u64::MAX - 511, 512, 22),
        (DISK, Read, 0, 1, 512, 22),
        (DISK, Read, 0, 0, 511, 22),
        (DISK, Read, 0, 0, 0, 22),
        (DISK, Read, 0, 0, (32 << 20) + 512, 22),
        (DISK, Read, COMMAND_DONT_FRAGMENT, 0, 512, 22),
        (DISK, Read, 1 << 4, 0, 512, 22),
        (DISK, Write, 0, size - 512, 1024, 28),
        (DISK, Write, 0, 3, 512, 22),
        (DISK, Write, COMMAND_NO_HOLE, 0, 512, 22),
        (DISK, Trim, 0, size, 512, 22),
        (DISK, WriteZeroes, 0, size, 512, 28),
        (DISK, WriteZeroes, 1 << 4, 0, 512, 22),
        (DISK, Other(5), 0, 0, 512, 22),
        (DISK, Other(7), 0, 0, 512, 22),
        (read_only, Write, 0, 0, 512, 1),
        (read_only, Trim, 0, 0, 512, 1),
        (read_only, WriteZeroes, 0, 0, 512, 1),
        (bare, Trim, 0, 0, 512, 22),
        (bare, WriteZeroes, 0, 0, 512, 22),
        (read_only, Flush, 0, 0, 0, 0),
        (DISK, Flush, COMMAND_FUA, 0, 0, 0),
    ] {
        let payload = vec![0; if command == Write { len as usize } else { 0 }];
        let sent = [&request(command, flags, 9, offset, len).encode()[..], &payload].concat();
        let expected = [&REPLY_MAGIC.to_be_bytes()[..], &u32::to_be_bytes(error), &9_u64.to_be_bytes()].concat();
        assert_eq!(answer_to(geometry, false, &sent), expected, "{command:?} {flags} {offset} {len}");
    }
    // A read that fails is told in a chunk where chunks were agreed on.
    let answer = answer_to(DISK, true, &request(Read, 0, 9, 1, 512).encode());
    assert_eq!(answer, b"\x66\x8E\x33\xEF\0\x01\x80\x01\0\0\0\0\0\0\0\x09\0\0\0\x06\0\0\0\x16\0\0");
}

#[test]
fn a_read_that_comes_back_without_its_data_has_failed() {
    let failed = [&REPLY_MAGIC.to_be_bytes()[..], &5_u32.to_be_bytes(), &9_u64.to_be_bytes()].concat();
    let failed_in_a_chunk = b"\x66\x8E\x33\xEF\0\x01\x80\x01\0\0\0\0\0\0\0\x09\0\0\0\x06\0\0\0\x05\0\0".to_vec();
    for (structured, expected) in [(false, failed), (true, failed_in_a_chunk)] {
        let mut transmission = transmission(DISK, structured);
        feed(&mut transmission, &mut &request(Command::Read, 0, 9, 0, 512).encode()[..], usize::MAX);
        let mut piece = transmission.pop().unwrap();
        piece.buffer = None;
        transmission.complete(piece, Outcome::Done);
        assert_eq!(transmission.outbox.take_all(), expected);
    }
}

#[test]
fn a_write_of_which_a_part_has_failed_fails_in_another_program() {
    let write = [&request(Command::Write, 0, 9, 0, 2 << 20).encode()[..], &vec![1; 2 << 20]].concat();
    let (first, second) = write.split_at(3 << 19);
    let mut transmission = transmission(DISK, false);
    for (mut rest, outcome) in [(first, Outcome::Failed(DiskError(libc::EIO))), (second, Outcome::Done)] {
        while !rest.is_empty() {
            feed(&mut transmission, &mut rest, usize::MAX);
            while let Some(piece) = transmission.pop() {
                transmission.complete(piece, outcome);
            }
        }
        let passed = transmission.pass().unwrap();
        transmission = Transmission::resume(DISK, passed, BufferPool::new(SHARED_MEMORY_MAX)).unwrap();
    }
    let failed = [&REPLY_MAGIC.to_be_bytes()[..], &5_u32.to_be_bytes(), &9_u64.to_be_bytes()].concat();
    assert_eq!(transmission.outbox.take_all(), failed);
}

#[test]
fn what_another_program_cannot_continue_is_not_passed_or_not_taken() {
    // On a disk that may forget finished pieces, a part of the write may have to be done again.
    let write = [&request(Command::Write, 0, 9, 0, 2 << 20).encode()[..], &vec![1; 3 << 19]].concat();
    for may_forget in [false, true] {
        let mut transmission = transmission(ExportGeometry { may_forget, ..DISK }, false);
        let mut rest = &write[..];
        while !rest.is_empty() {
            feed(&mut transmission, &mut rest, usize::MAX);
            while let Some(piece) = transmission.pop() {
                transmission.complete(piece, Outcome::Done);
            }
        }
        let passed = transmission.pass();
        assert_eq!(passed.is_none(), may_forget);
        let begun = passed.and_then(|passed| passed.begun);
        let (start, end) = (1 << 20, 2 << 20);
        let written = BegunRequest::Write { cookie: 9, durable: false, start, end, filled: 1 << 19, error: None };
        assert_eq!(begun, (!may_forget).then_some(written));
    }
    let mut said_goodbye = transmission(DISK, false);
    feed(&mut said_goodbye, &mut &request(Command::Disconnect, 0, 9, 0, 0).encode()[..], usize::MAX);
    assert!(said_goodbye.pop().is_none() && said_goodbye.pass().is_none());
    let take = |begun: BegunRequest, filled: usize| {
        let passed = Passed { begun: Some(begun), filled: vec![0; filled], ..Passed::default() };
        Transmission::resume(DISK, passed, BufferPool::new(SHARED_MEMORY_MAX)).is_some()
    };
    let write = |start, end| BegunRequest::Write { cookie: 1, durable: false, start, end, filled: 0, error: None };
    assert!(take(write(0, 512), 512) && !take(write(0, 512), 513));
    for (start, end) in [(0, 0), (512, 0), (0, DISK.size + 512), (1, 512), (0, 511), (u64::MAX - 511, u64::MAX)] {
        assert!(!take(write(start, end), 0), "{start} to {end}");
        assert!(!take(BegunRequest::Read { cookie: 1, start, end, in_one: true, error: None }, 0), "{start} to {end}");
    }
    let too_long = Passed { received: vec![0; 8193], ..Passed::default() };
    assert!(Transmission::resume(DISK, too_long, BufferPool::new(SHARED_MEMORY_MAX)).is_none());
}

#[test]
fn what_is_no_request_ends_the_connection() {
    let too_long = request(Command::Write, 0, 1, 0, (32 << 20) + 1).encode();
    for (bytes, end) in [
        (vec![0; 28], End::Malformed("what it sends is no request")),
        (too_long.to_vec(), End::Malformed("a write of more than 32 MiB")),
        (request(Command::Disconnect, 0, 1, 0, 0).encode().to_vec(), End::Disconnect),
    ] {
        let mut transmission = transmission(DISK, true);
        feed(&mut transmission, &mut &bytes[..], usize::MAX);
        assert!(transmission.pop().is_none());
        assert_eq!(transmission.end(), Some(end));
        assert!(transmission.room().is_none(), "nothing more is read");
    }
}

#[test]
fn modifications_carry_what_the_client_asked_for() {
    let piece_of = |geometry, command, flags| {
        let mut transmission = transmission(geometry, false);
        feed(&mut transmission, &mut &request(command, flags, 1, 4096, 8192).encode()[..], usize::MAX);
        transmission.pop().map(|piece| (format!("{:?}", piece.operation), piece.durable))
    };
    let zeroes = |unmap| format!("WriteZeroes {{ ranges: [ZeroRange {{ range: 4096..12288, unmap: {unmap} }}] }}");
    assert_eq!(piece_of(DISK, Command::WriteZeroes, 0), Some((zeroes(true), false)));
    assert_eq!(piece_of(DISK, Command::WriteZeroes, COMMAND_NO_HOLE | COMMAND_FUA), Some((zeroes(false), true)));
    assert_eq!(piece_of(DISK, Command::Trim, 0), Some(("Discard { ranges: [4096..12288] }".into(), false)));
    // A discard is never durable; this is, and gives the space back as well.
    assert_eq!(piece_of(DISK, Command::Trim, COMMAND_FUA), Some((zeroes(true), true)));
    assert_eq!(piece_of(ExportGeometry { can_write_zeroes: false, ..DISK }, Command::Trim, COMMAND_FUA), None);
}

/// What a disk that may forget was asked to do with a request, and how often it forgot the pieces that were done.
fn forgetful(command: Command, flags: u16, len: u32, losses: &[usize]) -> Vec<Vec<(Operation, bool)>> {
    let geometry = ExportGeometry { size: 1 << 40, may_forget: true, ..DISK };
    let mut transmission = transmission(geometry, false);
    let payload: Vec<u8> = match command {
        Command::Write => (0..u64::from(len)).map(content).collect(),
        _ => Vec::new(),
    };
    let bytes = [&request(command, flags, 9, 0, len).encode()[..], &payload].concat();
    let mut bytes = &bytes[..];
    let mut rounds = Vec::new();
    for done_before in losses.iter().copied().chain([usize::MAX]) {
        let mut pieces = Vec::new();
        loop {
            while let Some(mut piece) = transmission.pop() {
                execute(&mut piece);
                pieces.push(piece);
            }
            if feed(&mut transmission, &mut bytes, usize::MAX) == 0 {
                break;
            }
        }
        if pieces.is_empty() {
            break;
        }
        rounds.push(pieces.iter().map(|piece| (piece.operation.clone(), piece.durable)).collect());
        for (index, piece) in pieces.into_iter().enumerate() {
            if index == done_before {
                transmission.repeat_parts();
            }
            assert!(transmission.outbox.is_empty(), "answered too early");
            transmission.complete(piece, Outcome::Done);
            transmission.check();
        }
    }
    let answer = [&REPLY_MAGIC.to_be_bytes()[..], &0_u32.to_be_bytes(), &9_u64.to_be_bytes()].concat();
    assert_eq!(transmission.outbox.take_all(), answer, "answered once");
    assert!(transmission.is_quiet() && transmission.pop().is_none());
    rounds
}

#[test]
fn a_request_is_done_again_when_the_disk_may_have_lost_a_part_of_it() {
    for (command, len) in
        [(Command::Write, 3 << 20), (Command::Write, (4 << 20) - 512), (Command::WriteZeroes, 600 << 20)]
    {
        let once = forgetful(command, 0, len, &[]);
        assert!(once.len() == 1 && once[0].len() > 2);
        assert_eq!(forgetful(command, 0, len, &[0]), once, "nothing was done yet: the disk does it after the loss");
        for done in 1..once[0].len() {
            assert_eq!(forgetful(command, 0, len, &[done]), [&once[..], &once].concat(), "{command:?} after {done}");
        }
        assert_eq!(forgetful(command, 0, len, &[1, 2]).len(), 3, "as often as it is lost");
        // What is durable is not lost.
        assert_eq!(forgetful(command, COMMAND_FUA, len, &[1]).len(), 1);
    }
    assert_eq!(forgetful(Command::Trim, 0, 600 << 20, &[1]).len(), 1, "its content means nothing");
    let longer = forgetful(Command::Write, 0, (4 << 20) + 512, &[1]);
    assert!(longer.len() == 1 && longer[0].iter().all(|(_, durable)| *durable), "its data are not held");
}

#[test]
fn a_client_that_takes_no_answers_is_not_read_without_end() {
    let header = request(Command::Read, 0, 1, 0, 1 << 20).encode();
    let flush = request(Command::Flush, 0, 1, 0, 0).encode();
    let refused = request(Command::Trim, 0, 1, 1, 512).encode();
    for (bytes, complete) in [(header, true), (header, false), (flush, true), (flush, false), (refused, true)] {
        let mut transmission = transmission(DISK, true);
        // Far more than the limits of memory, requests and answers allow.
        let endless = bytes.repeat(if bytes == header { 400 } else { 3000 });
        let (mut rest, mut held) = (&endless[..], Vec::new());
        loop {
            let popped: Vec<Piece> = std::iter::from_fn(|| transmission.pop()).collect();
            if complete {
                popped.into_iter().for_each(|piece| {
                    transmission.complete(piece, Outcome::Done);
                });
            } else {
                held.extend(popped);
            }
            transmission.check();
            if feed(&mut transmission, &mut rest, usize::MAX) == 0 {
                break;
            }
        }
        assert!(!rest.is_empty() && held.len() <= REQUESTS_MAX);
        // Once it listens, everything is answered.
        while !rest.is_empty() || !held.is_empty() {
            held.drain(..).for_each(|piece| {
                transmission.complete(piece, Outcome::Done);
            });
            transmission.outbox.take_all();
            transmission.sent(0);
            held.extend(std::iter::from_fn(|| transmission.pop()));
            feed(&mut transmission, &mut rest, usize::MAX);
        }
        transmission.outbox.take_all();
        assert!(transmission.is_quiet());
    }
}

/// Their data are all held at once. A client waits for its own; one that would have to wait for others is told.
#[test]
fn the_longest_reads_share_memory_and_nobody_waits_for_ever() {
    let pool = BufferPool::new(SHARED_MEMORY_MAX);
    let client = || Transmission::new(DISK, false, Staging::new(), Outbox::default(), pool.clone());
    let ask = |client: &mut Transmission, count: u64| {
        let requests: Vec<u8> =
            (0..count).flat_map(|cookie| request(Command::Read, 0, cookie, 512, 32 << 20).encode()).collect();
        feed(client, &mut &requests[..], usize::MAX);
    };
    let (mut first, mut second) = (client(), client());
    ask(&mut first, 6);
    ask(&mut second, 1);
    let mut answered = 0;
    for round in 0..2 {
        let pieces: Vec<_> = std::iter::from_fn(|| first.pop()).collect();
        assert_eq!(pieces.iter().map(|piece| piece.data_length).sum::<usize>(), [4, 2][round] * (32 << 20));
        if round == 0 {
            assert!(second.pop().is_none());
            assert_eq!(second.outbox.take_all()[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 12], "not enough memory");
            assert!(second.is_quiet());
        }
        pieces.into_iter().rev().for_each(|piece| {
            first.complete(piece, Outcome::Done);
        });
        answered += first.outbox.take_all().len();
        first.sent(0);
    }
    assert_eq!(answered, 6 * (16 + (32 << 20)));
    assert!(first.is_quiet());
    assert_eq!(pool.allocated_bytes(), 0, "the memory is given back");
    ask(&mut second, 1);
    assert!(second.pop().is_some());
}

/// A client of `export` on a socket of its own.
fn attach(export: &mut NbdExport, seat: &Arc<()>) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let (socket, transmission, seat) = (theirs.into(), transmission(DISK, false), Arc::clone(seat));
    export
        .attach(Attached { target: Target::Disk(0), name: "a".into(), socket, transmission, seat, is_kept: false })
        .unwrap();
    ours
}

fn pop(export: &mut NbdExport) -> Option<NbdRequest> {
    export.handle_events().unwrap();
    export.pop()
}

fn is_ready(export: &NbdExport) -> bool {
    let mut watched = [PollFd::from_borrowed_fd(export.event_fd(), PollFlags::IN)];
    poll(&mut watched, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

/// It may be the same client that comes back, and writes to the same place: the old write must not land on the new one.
#[test]
fn what_a_client_left_in_flight_is_finished_before_the_next_is_served() {
    let (mut export, seat) = (NbdExport::new(DISK).unwrap(), Arc::new(()));
    let write = |cookie| [&request(Command::Write, 0, cookie, 0, 4096).encode()[..], &[1; 4096]].concat();
    let mut first = attach(&mut export, &seat);
    first.write_all(&[write(1), write(2)].concat()).unwrap();
    // A part of a third, and more that nobody will read.
    first.write_all(&write(3)[..100]).unwrap();
    let held = [pop(&mut export).unwrap(), pop(&mut export).unwrap()];
    assert!(pop(&mut export).is_none());
    drop(first);
    let mut second = attach(&mut export, &seat);
    assert_eq!(export.client_count(), 1, "who is gone is not read any more");
    second.write_all(&write(4)).unwrap();
    for request in held {
        assert!(pop(&mut export).is_none(), "the next client is served too early");
        export.complete(request, Outcome::Done);
        export.notify();
    }
    assert!(is_ready(&export), "nobody would ask again");
    let request = pop(&mut export).unwrap();
    // A third client waits for nobody but those before it.
    let mut third = attach(&mut export, &seat);
    third.write_all(&write(5)).unwrap();
    second.write_all(&write(6)).unwrap();
    let more = pop(&mut export).unwrap();
    assert!(pop(&mut export).is_none());
    export.complete(request, Outcome::Done);
    let last = pop(&mut export).expect("the third client's");
    export.complete(last, Outcome::Done);
    export.complete(more, Outcome::Done);
    export.notify();
    let mut answers = [0; 32];
    second.read_exact(&mut answers).unwrap();
    third.read_exact(&mut answers[..16]).unwrap();
    assert_eq!(Arc::strong_count(&seat), 3, "requests that came back hold no seat");
}

/// Linux shuts down a connection that does not answer in time, and sends what it had sent there again on another one that it has.
#[test]
fn what_a_connection_left_in_flight_is_finished_before_its_siblings_go_on() {
    let (mut export, seat) = (NbdExport::new(DISK).unwrap(), Arc::new(()));
    let write = |cookie| [&request(Command::Write, 0, cookie, 0, 4096).encode()[..], &[1; 4096]].concat();
    let (mut first, mut second) = (attach(&mut export, &seat), attach(&mut export, &seat));
    first.write_all(&write(1)).unwrap();
    let late = pop(&mut export).unwrap();
    // Both go on side by side as long as they stay.
    second.write_all(&write(2)).unwrap();
    let beside = pop(&mut export).unwrap();
    // The second one has more to read, so no event of its socket comes before that of the first one is looked at.
    first.write_all(&write(3)).unwrap();
    first.shutdown(Shutdown::Write).unwrap();
    second.write_all(&write(4)).unwrap();
    assert!(export.pop().is_none(), "what the first one left may land on it");
    assert_eq!(export.client_count(), 1, "what else the first one sent is not read any more");
    export.complete(beside, Outcome::Done);
    assert!(pop(&mut export).is_none());
    export.complete(late, Outcome::Done);
    export.notify();
    assert!(is_ready(&export), "nobody would ask again");
    let again = pop(&mut export).unwrap();
    assert!(pop(&mut export).is_none(), "nobody else is there");
    export.complete(again, Outcome::Done);
    export.notify();
    second.read_exact(&mut [0; 32]).unwrap();
    // One that leaves nothing behind holds up nobody.
    let mut third = attach(&mut export, &seat);
    third.write_all(&write(1)).unwrap();
    let done = pop(&mut export).unwrap();
    export.complete(done, Outcome::Done);
    second.write_all(&write(5)).unwrap();
    let held = pop(&mut export).unwrap();
    drop(third);
    second.write_all(&write(6)).unwrap();
    let next = pop(&mut export).expect("nobody waits for requests of its own");
    for request in [held, next] {
        export.complete(request, Outcome::Done);
    }
}

/// Others may come meanwhile.
#[test]
fn a_client_that_said_goodbye_gets_its_answers() {
    let (mut export, seat) = (NbdExport::new(DISK).unwrap(), Arc::new(()));
    let mut first = attach(&mut export, &seat);
    first.write_all(&request(Command::Flush, 0, 1, 0, 0).encode()).unwrap();
    first.write_all(&request(Command::Disconnect, 0, 2, 0, 0).encode()).unwrap();
    first.shutdown(Shutdown::Write).unwrap();
    let flush = pop(&mut export).unwrap();
    assert!(pop(&mut export).is_none());
    let mut second = attach(&mut export, &seat);
    export.complete(flush, Outcome::Done);
    export.notify();
    first.read_exact(&mut [0; 16]).unwrap();
    // Its socket is closed even while nothing new is begun.
    assert!(export.pop_begun().is_none());
    assert_eq!((export.client_count(), first.read(&mut [0; 1]).unwrap()), (1, 0));
    // Nobody has read the goodbye when the end of the connection is seen beside it.
    let _third = attach(&mut export, &seat);
    second.write_all(&request(Command::Flush, 0, 1, 0, 0).encode()).unwrap();
    let flush = pop(&mut export).unwrap();
    // A part of it has been received.
    let goodbye = request(Command::Disconnect, 0, 2, 0, 0).encode();
    second.write_all(&goodbye[..9]).unwrap();
    assert!(pop(&mut export).is_none());
    second.write_all(&goodbye[9..]).unwrap();
    second.shutdown(Shutdown::Write).unwrap();
    assert!(pop(&mut export).is_none());
    export.complete(flush, Outcome::Done);
    export.notify();
    second.read_exact(&mut [0; 16]).unwrap();
    assert!(pop(&mut export).is_none());
    assert_eq!((export.client_count(), second.read(&mut [0; 1]).unwrap()), (1, 0), "closed in good order");
}

/// More than it may have in flight was received when it closed its side.
#[test]
fn a_client_alone_that_closes_its_side_gets_all_answers() {
    let (mut export, seat) = (NbdExport::new(DISK).unwrap(), Arc::new(()));
    let mut client = attach(&mut export, &seat);
    let count = REQUESTS_MAX + 70;
    let requests: Vec<u8> = (0..count as u64).flat_map(|n| request(Command::Flush, 0, n, 0, 0).encode()).collect();
    client.write_all(&requests).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut answered = 0;
    while export.client_count() > 0 {
        let held: Vec<_> = std::iter::from_fn(|| pop(&mut export)).collect();
        answered += held.len();
        held.into_iter().for_each(|request| export.complete(request, Outcome::Done));
        export.notify();
    }
    assert_eq!(answered, count);
    client.read_exact(&mut vec![0; 16 * count]).unwrap();
}

/// A look at the events of all, before what one of them sent is taken, must not swallow those of the others.
#[test]
fn events_that_are_seen_in_passing_are_acted_on() {
    let (mut export, seat) = (NbdExport::new(DISK).unwrap(), Arc::new(()));
    let flush = request(Command::Flush, 0, 1, 0, 0).encode();
    let mut clients: Vec<_> = (0..2).map(|_| attach(&mut export, &seat)).collect();
    clients[0].write_all(&flush).unwrap();
    let first = pop(&mut export).unwrap();
    assert!(pop(&mut export).is_none(), "both were read to the end");
    export.complete(first, Outcome::Done);
    clients.push(attach(&mut export, &seat));
    export.notify();
    export.handle_events().unwrap();
    assert!(export.pop().is_none() && !is_ready(&export));
    clients[0].write_all(&flush).unwrap();
    let again = pop(&mut export).unwrap();
    // The second one is looked at first, the third one has half a request.
    clients[2].write_all(&flush[..5]).unwrap();
    export.handle_events().unwrap();
    clients[1].write_all(&flush).unwrap();
    assert!(export.pop().is_none());
    export.notify();
    assert!(is_ready(&export), "nobody would ask again");
    let second = pop(&mut export).unwrap();
    [again, second].into_iter().for_each(|request| export.complete(request, Outcome::Done));
}

/// Over its limits it is not read; when it listens it goes on, without another event of its socket.
#[test]
fn a_client_at_its_limits_goes_on_when_it_listens() {
    let (mut export, seat) = (NbdExport::new(DISK).unwrap(), Arc::new(()));
    let mut client = attach(&mut export, &seat);
    let count = 3 * REQUESTS_MAX as u64;
    let requests: Vec<u8> = (0..count).flat_map(|n| request(Command::Read, 0, n, 0, 1 << 17).encode()).collect();
    client.write_all(&requests).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let reader = std::thread::spawn(move || {
        let mut answer = vec![0; 16 + (1 << 17)];
        (0..count).for_each(|_| client.read_exact(&mut answer).unwrap());
        client
    });
    while !reader.is_finished() {
        let mut watched = [PollFd::from_borrowed_fd(export.event_fd(), PollFlags::IN)];
        poll(&mut watched, Some(&Timespec { tv_sec: 0, tv_nsec: 10_000_000 })).unwrap();
        export.handle_events().unwrap();
        let held: Vec<_> = std::iter::from_fn(|| export.pop()).collect();
        assert!(held.len() <= REQUESTS_MAX);
        held.into_iter().for_each(|request| export.complete(request, Outcome::Done));
        export.notify();
    }
    drop(reader.join().unwrap());
    export.handle_events().unwrap();
    assert_eq!(export.client_count(), 0);
}

/// The disk may fill a buffer of the driver, while the request still has its own.
#[test]
fn a_client_that_does_not_read_its_answers_keeps_no_buffer_of_the_driver() {
    const LENGTH: usize = 1 << 20;
    let (mut export, seat) = (NbdExport::new(DISK).unwrap(), Arc::new(()));
    let mut client = attach(&mut export, &seat);
    let driver = BufferPool::new(LENGTH);
    let requests: Vec<u8> =
        (1..4).flat_map(|n| request(Command::Read, 0, n, 0, u32::try_from(LENGTH).unwrap()).encode()).collect();
    client.write_all(&requests).unwrap();
    for cookie in 1..4 {
        let mut request = GuestRequest::Nbd(pop(&mut export).unwrap());
        // The second one's own buffer is at the disk.
        let taken = if cookie == 2 { request.take_buffer() } else { None };
        let mut buffer =
            taken.or_else(|| driver.take(LENGTH)).expect("the answer before it has the driver's only buffer");
        buffer.fill(cookie);
        request.deliver(buffer).unwrap();
        let GuestRequest::Nbd(request) = request else { unreachable!("it was an NBD client's") };
        export.complete(request, Outcome::Done);
        export.notify();
    }
    assert!(driver.take(LENGTH).is_some());
    let reader = std::thread::spawn(move || {
        let mut answer = vec![0; 16 + LENGTH];
        for cookie in 1..4 {
            client.read_exact(&mut answer).unwrap();
            assert!(answer[15] == cookie && answer[16..].iter().all(|byte| *byte == cookie), "answer {cookie}");
        }
    });
    while !reader.is_finished() {
        let mut watched = [PollFd::from_borrowed_fd(export.event_fd(), PollFlags::IN)];
        poll(&mut watched, Some(&Timespec { tv_sec: 0, tv_nsec: 10_000_000 })).unwrap();
        export.handle_events().unwrap();
        export.notify();
    }
    reader.join().unwrap();
}

/// However little it says, and however often.
#[test]
fn a_client_that_does_not_come_to_a_choice_is_sent_away() {
    let folder = tempfile::tempdir().unwrap();
    let address = Endpoint::Unix(folder.path().join("nbd"));
    let mut server = NbdServer::new(exports(), vec![Listener::bind(&address, None).unwrap()]).unwrap();
    let start = Instant::now();
    let connect = || UnixStream::connect(folder.path().join("nbd")).unwrap();
    let (mut silent, mut slow, mut quick) = (connect(), connect(), connect());
    assert!(server.handle_events(start).unwrap().is_empty());
    quick.write_all(&[&3_u32.to_be_bytes()[..], &option(GO, &info("root", &[]))].concat()).unwrap();
    for second in 1..30 {
        slow.write_all(if second == 1 { &[0, 0, 0, 3] } else { b"IHAVEOPT\0\0\0\x03\0\0\0\0" }).unwrap();
        let now = start + Duration::from_secs(second);
        let attached = (0..3).flat_map(|_| server.handle_events(now).unwrap()).count();
        assert_eq!(attached, usize::from(second == 1));
        server.handle_timer(now);
    }
    assert_eq!(server.next_deadline(), Some(start + Duration::from_secs(30)));
    server.handle_timer(start + Duration::from_secs(30));
    assert_eq!(server.next_deadline(), None);
    for client in [&mut silent, &mut slow, &mut quick] {
        // To its end: the greeting, the answers of the one that asked, and nothing that waits.
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut said = Vec::new();
        if let Err(error) = client.read_to_end(&mut said) {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "it is still connected: {error}");
        }
        assert_eq!(said[..8], *b"NBDMAGIC");
    }
}

/// Clients of a former program count as those that connect.
#[test]
fn clients_of_a_former_program_have_seats() {
    let folder = tempfile::tempdir().unwrap();
    let address = Endpoint::Unix(folder.path().join("nbd"));
    let mut server = NbdServer::new(exports(), vec![Listener::bind(&address, None).unwrap()]).unwrap();
    let adopt = |server: &mut NbdServer| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (socket, structured_replies, offered, bytes, begun) = (theirs.into(), false, None, None, None);
        let client =
            NbdClient { socket, structured_replies, offered, bytes, received: 0, to_send: 0, begun, told_bytes: None };
        server.adopt(Target::Disk(0), client).map(|()| ours)
    };
    let clients: Vec<_> = std::iter::from_fn(|| adopt(&mut server).ok()).collect();
    assert_eq!(clients.len(), 32);
    let mut attached = server.handle_events(Instant::now()).unwrap();
    assert_eq!(attached.len(), 32);
    assert!(adopt(&mut server).unwrap_err().to_string().contains("no seat"), "attached, they keep their seats");
    let greeting = |server: &mut NbdServer| {
        let mut client = UnixStream::connect(folder.path().join("nbd")).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        // Accepts it, and greets it.
        (0..2).for_each(|_| assert!(server.handle_events(Instant::now()).unwrap().is_empty()));
        client.read(&mut [0; 18]).unwrap()
    };
    assert_eq!(greeting(&mut server), 0, "all seats are taken");
    attached.pop();
    assert_eq!(greeting(&mut server), 18, "one has left");
}

/// A request of the model, and what is done to its first piece.
#[derive(Clone, Debug)]
struct Wanted {
    command: Command,
    flags: u16,
    sector: u64,
    sectors: u32,
    fails: bool,
}

fn wanted() -> impl Strategy<Value = Wanted> {
    use Command::{Flush, Read, Trim, Write, WriteZeroes};
    let command = prop::sample::select(vec![Read, Read, Read, Write, Write, Flush, Trim, WriteZeroes]);
    let flags = prop::sample::select(vec![0, 0, COMMAND_FUA, COMMAND_DONT_FRAGMENT]);
    // Mostly short; some have several pieces.
    let sectors = prop_oneof![4 => 1_u32..40, 1 => 2000_u32..9000];
    (command, flags, 0_u64..8000, sectors, prop::bool::weighted(0.1)).prop_map(
        |(command, flags, sector, sectors, fails)| {
            let flags = if command == Read { flags & COMMAND_DONT_FRAGMENT } else { flags & COMMAND_FUA };
            Wanted { command, flags, sector, sectors, fails }
        },
    )
}

/// Checks the stream of answers, and counts them.
struct Client {
    structured: bool,
    wanted: Vec<Wanted>,
    read: HashMap<u64, u64>,
    answered: HashMap<u64, u32>,
}

impl Client {
    /// Takes the next whole answer or chunk off the stream; how long it was. `None` if it is not there in full.
    fn take(&mut self, stream: &[u8]) -> Option<usize> {
        let mut fields = Fields(stream);
        let magic = fields.u32()?;
        if magic == CHUNK_MAGIC {
            let (flags, kind, cookie, len) = (fields.u16()?, fields.u16()?, fields.u64()?, fields.u32()?);
            let mut payload = Fields(fields.bytes(len)?);
            let wanted = &self.wanted[usize::try_from(cookie).unwrap()];
            assert!(self.structured && wanted.command == Command::Read);
            match kind {
                1 => {
                    let offset = payload.u64().unwrap();
                    self.expect_content(offset, payload.0);
                    let read = self.read.entry(cookie).or_default();
                    *read += payload.0.len() as u64;
                    let whole = *read == u64::from(wanted.sectors) * 512;
                    assert!(flags == 0 || (whole && !wanted.fails));
                    assert!(flags == 1 || wanted.flags & COMMAND_DONT_FRAGMENT == 0, "a chunk of many");
                }
                0x8001 => assert!(wanted.fails && flags == 1 && payload.u32() == Some(5)),
                other => panic!("a chunk of type {other}"),
            }
            if flags == 1 {
                *self.answered.entry(cookie).or_default() += 1;
            }
        } else {
            assert_eq!(magic, REPLY_MAGIC);
            let (error, cookie) = (fields.u32()?, fields.u64()?);
            let wanted = &self.wanted[usize::try_from(cookie).unwrap()];
            assert_eq!(error, if wanted.fails { 5 } else { 0 });
            if wanted.command == Command::Read {
                assert!(!self.structured);
                let data = fields.bytes(if wanted.fails { 0 } else { wanted.sectors * 512 })?;
                self.expect_content(wanted.sector * 512, data);
            }
            *self.answered.entry(cookie).or_default() += 1;
        }
        Some(stream.len() - fields.0.len())
    }

    fn expect_content(&self, offset: u64, data: &[u8]) {
        assert!(data.iter().zip(offset..).all(|(byte, at)| *byte == content(at)), "wrong bytes at {offset}");
    }
}

/// Executes a piece of the model: writes must bring the disk's content, reads get it.
fn execute(piece: &mut Piece) {
    match (&piece.operation, &mut piece.buffer) {
        (Operation::Read { range }, Some(buffer)) => {
            assert_eq!(buffer.len() as u64, range.end - range.start);
            fill(buffer, range.start);
        }
        (Operation::Write { range }, Some(buffer)) => {
            assert_eq!(buffer.len() as u64, range.end - range.start);
            assert!(buffer.iter().zip(range.start..).all(|(byte, at)| *byte == content(at)));
        }
        (Operation::Flush | Operation::Discard { .. } | Operation::WriteZeroes { .. }, None) => {}
        (operation, buffer) => panic!("{operation:?} with {buffer:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the order of completion, the cuts of the stream and the speed of the client, and whenever another program
    /// takes over: each request is answered once, with the right bytes.
    #[test]
    fn every_request_is_answered_once_and_right(
        structured in any::<bool>(),
        mut wanted in prop::collection::vec(wanted(), 1..40),
        part in prop::sample::select(vec![1_usize, 27, 28, 29, 100, 4096, 8192, 1 << 20]),
        choices in prop::collection::vec(any::<u8>(), 1..200),
    ) {
        let mut stream = Vec::new();
        for (wanted, cookie) in wanted.iter_mut().zip(0..) {
            if !structured {
                wanted.flags &= !COMMAND_DONT_FRAGMENT;
            }
            let (offset, len) = (wanted.sector * 512, wanted.sectors * 512);
            stream.extend(request(wanted.command, wanted.flags, cookie, offset, len).encode());
            if wanted.command == Command::Write {
                stream.extend((offset..offset + u64::from(len)).map(content));
            }
        }
        let mut transmission = transmission(DISK, structured);
        let mut client = Client { structured, wanted, read: HashMap::new(), answered: HashMap::new() };
        let (mut rest, mut held, mut failed, mut answers) = (&stream[..], Vec::new(), Vec::new(), Vec::new());
        let mut choices = choices.iter().cycle().copied();
        let (mut idle, mut programs) = (0, 1);
        while client.answered.len() < client.wanted.len() {
            let mut moved = feed(&mut transmission, &mut rest, part) > 0;
            while let Some(mut piece) = transmission.pop() {
                execute(&mut piece);
                held.push(piece);
                moved = true;
            }
            transmission.check();
            if held.is_empty() && programs < 20 && choices.next().unwrap() % 4 == 0 {
                programs += 1;
                assert!(transmission.pop_begun().is_none());
                let passed = transmission.pass().expect("it has not said goodbye");
                let text = serde_json::to_string(&passed.begun).unwrap();
                let passed = Passed { begun: serde_json::from_str(&text).unwrap(), ..passed };
                transmission = Transmission::resume(DISK, passed, BufferPool::new(SHARED_MEMORY_MAX)).unwrap();
            }
            if !held.is_empty() && (choices.next().unwrap() % 3 == 0 || !moved) {
                let piece = held.swap_remove(usize::from(choices.next().unwrap()) % held.len());
                let request = transmission.cookie_of(&piece);
                let fails = client.wanted[usize::try_from(request).unwrap()].fails && !failed.contains(&request);
                failed.extend(fails.then_some(request));
                transmission.complete(piece, if fails { Outcome::Failed(DiskError(libc::EIO)) } else { Outcome::Done });
                moved = true;
            }
            let slices = transmission.outbox.slices();
            if let Some(first) = slices.first().filter(|_| choices.next().unwrap() % 2 == 0 || !moved) {
                let count = first.len().div_ceil(1 + usize::from(choices.next().unwrap() % 3));
                answers.extend_from_slice(&first[..count]);
                transmission.sent(count);
                moved = true;
            }
            while let Some(count) = client.take(&answers) {
                answers.drain(..count);
            }
            idle = if moved { 0 } else { idle + 1 };
            assert!(idle < 10, "nothing moves any more");
        }
        prop_assert!(client.answered.values().all(|count| *count == 1));
        prop_assert!(answers.is_empty() && rest.is_empty() && transmission.is_quiet());
    }

    #[test]
    fn no_bytes_break_the_protocol(
        start in prop::sample::select(vec![0, 4, 20, 100]),
        random in prop::collection::vec(any::<u8>(), 0..400),
        requests in prop::collection::vec((0_u16..8, 0_u16..8, 0_u64..8000, 0_u32..5000), 0..30),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        mode in any::<u8>(),
    ) {
        let mut bytes = [&[mode][..], &3_u32.to_be_bytes(), &option(8, &[]), &option(GO, &info("disk", &[]))].concat();
        for (command, flags, sector, sectors) in requests {
            let mut header = request(Command::Read, flags, 1, sector * 512, sectors * 512).encode();
            header[6..8].copy_from_slice(&command.to_be_bytes());
            bytes.extend(header);
            if command == 1 {
                bytes.extend(vec![7; sectors as usize * 512]);
            }
        }
        if start < 100 {
            bytes.truncate(1 + start);
        }
        bytes.extend(random);
        for (at, value) in flips {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        fuzz_nbd(&bytes);
    }
}
