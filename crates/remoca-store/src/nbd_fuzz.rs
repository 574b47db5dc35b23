//! Fuzzing of the NBD client. The input is the byte stream of a server, from its greeting to its replies.
//!
//! Compiled only with the feature `testing`; never part of the program.

#![allow(clippy::unwrap_used, reason = "in a test a surprise is a failure")]

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use slab::Slab;

use super::StoreOp;
use super::nbd_connection::Connection;
use super::nbd_protocol::{Export, Handshake, REPLY_HEADER_LEN};
use super::nbd_task::{Abilities, NbdTask, WireState};
use remoca_io::buffer::BufferPool;

/// Most bytes that a handshake keeps: the longest answer to an option.
const KEPT_MAX: usize = 20 + (16 << 10);

/// Feeds a server's stream to the client. The first byte gives the length of the pieces of the handshake less one; the
/// rest is the stream.
pub fn run(data: &[u8]) {
    let Some((&cut, mut stream)) = data.split_first() else { return };
    let Some(export) = shake_hands(&mut stream, usize::from(cut) + 1) else { return };
    assert!(i64::try_from(export.size).is_ok());
    assert!(export.block_min.is_power_of_two() && export.payload_max <= 32 << 20);
    // The store refuses exports whose blocks are larger than pages, or whose payloads are smaller.
    if export.block_min <= 4096 && export.payload_max >= 4096 {
        transfer(&export, stream);
    }
}

/// Returns the export that was agreed on, or `None` if the handshake failed. Leaves the bytes after the handshake in
/// `stream`.
fn shake_hands(stream: &mut &[u8], piece: usize) -> Option<Export> {
    let mut handshake = Handshake::new("vm");
    let (mut input, mut output) = (Vec::new(), Vec::new());
    while !stream.is_empty() {
        let (part, rest) = stream.split_at(piece.min(stream.len()));
        *stream = rest;
        input.extend_from_slice(part);
        match handshake.advance(&mut input, &mut output) {
            Ok(Some(export)) => return input.is_empty().then_some(export),
            Ok(None) => assert!(input.len() <= KEPT_MAX, "what it keeps is bounded"),
            Err(_) => return None,
        }
        assert!(output.len() < 64, "it asks once");
    }
    None
}

/// Sends four requests, and passes the server's replies to the connection.
fn transfer(export: &Export, replies: &[u8]) {
    let pool = BufferPool::new(1 << 20);
    let (ours, mut servers) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let mut connection = Connection::new(ours.into(), Instant::now());
    let abilities = Abilities::of(export, 512, false);
    let mut tasks = Slab::new();
    let operations = [
        StoreOp::Read { offset: 0, len: 512 },
        StoreOp::Write { offset: 4096, len: 512, durable: true },
        StoreOp::Read { offset: 8192, len: 4096 },
        StoreOp::Flush,
    ];
    for operation in operations {
        let buffer = match operation {
            StoreOp::Read { len, .. } | StoreOp::Write { len, .. } => pool.take(len as usize),
            StoreOp::Flush | StoreOp::Discard { .. } | StoreOp::WriteZeroes { .. } => None,
        };
        let key = tasks.insert(NbdTask::new(0, operation, buffer, 0, 0));
        connection.queue(key, &mut tasks[key], &abilities);
    }
    connection.send(&mut tasks).unwrap();
    assert!(!connection.has_output());

    let mut finished = Vec::new();
    // Two reads, so that a reply may be cut in two.
    let (first, second) = replies.split_at(replies.len() / 2);
    for part in [first, second] {
        servers.write_all(part).unwrap();
        if connection.receive(&mut tasks, &mut finished).is_err() {
            break;
        }
    }
    let mut keys: Vec<_> = finished.iter().map(|(key, _)| *key).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), finished.len(), "a request has one reply");
    for (key, task) in &tasks {
        let waits = matches!(task.wire, WireState::AwaitsReply { .. });
        assert_eq!(waits, !keys.contains(&key), "who has a reply waits no longer");
    }
    let least: usize = finished.len() * REPLY_HEADER_LEN;
    assert!(replies.len() >= least, "every reply was sent by the server");
}

/// Returns the streams of a server that answers everything, and of one that refuses.
pub fn seeds() -> Vec<Vec<u8>> {
    let greeting = b"\x63NBDMAGICIHAVEOPT\0\x03".to_vec();
    let answer = |code: u32, data: &[u8]| {
        let length = u32::try_from(data.len()).unwrap();
        let magic = 0x0003_E889_0455_65A9_u64.to_be_bytes();
        [&magic[..], &7_u32.to_be_bytes(), &code.to_be_bytes(), &length.to_be_bytes(), data].concat()
    };
    let size = [&[0, 0][..], &(1_u64 << 20).to_be_bytes(), &[0, 0x0d]].concat();
    let blocks = [&[0, 3][..], &512_u32.to_be_bytes(), &4096_u32.to_be_bytes(), &(1_u32 << 20).to_be_bytes()].concat();
    let agreed = [answer(3, &size), answer(3, &blocks), answer(1, &[])].concat();
    let reply = |number: u32, error: u32, length: usize| {
        let cookie = u64::from(number + 1) << 32 | u64::from(number);
        [&0x6744_6698_u32.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes(), &vec![0x5a; length]].concat()
    };
    let replies = [reply(0, 0, 512), reply(3, 5, 0), reply(2, 0, 4096 - 3000), reply(1, 0, 0)].concat();
    // A piece ends at the end of the handshake, because replies may come only after it.
    let handshake = [&greeting[1..], &agreed].concat();
    let cut = u8::try_from(handshake.len() - 1).unwrap();
    let whole = [&[cut], &handshake[..], &replies].concat();
    let refused = [&greeting[..], &answer(1 << 31 | 6, b"no such export")].concat();
    vec![whole, refused]
}
