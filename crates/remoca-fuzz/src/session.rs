//! A session of the memory server: a client's frames, or anything else, against a model of a pool.
//!
//! The input is a list of operations, so that whole pages cost little input. The last operation sends the rest of the
//! input unchanged.

use crate::source::Source;
use remoca_protocol::{
    ErrorCode, ErrorReply, Frame, PAGE_SIZE, PageCount, PoolGeneration, RequestId, SendCount, ServerId, SlotIndex,
    Welcome, decode,
};
use remoca_server::testing::{PoolSetup, serve_bytes};
use std::collections::HashMap;

const SETUP: PoolSetup = PoolSetup { memory_bytes: 4 << 20, quota: PageCount(700) };
/// Size of the memory, in pages.
const MEMORY: u32 = 1024;

pub fn run(data: &[u8]) {
    let input = frames_of(data);
    let mut expected = Vec::new();
    Frame::Welcome(Welcome {
        version: 1,
        server_id: ServerId([0; 16]),
        pool_generation: PoolGeneration(0),
        npages: PageCount(0),
        available: SETUP.quota,
        quota: SETUP.quota,
        sends_received: SendCount(0),
    })
    .encode(&mut expected);
    Model::default().answer(&input, &mut expected);
    let replies = serve_bytes(SETUP, &input);
    assert_eq!(replies.len(), expected.len(), "bytes of all replies");
    assert!(
        replies == expected,
        "replies differ from {:?} on",
        replies.iter().zip(&expected).position(|(a, b)| a != b)
    );
}

/// Returns the frames that a client sends.
fn frames_of(data: &[u8]) -> Vec<u8> {
    let mut source = Source(data);
    let mut bytes = Vec::new();
    let mut page = [0; PAGE_SIZE];
    let mut number = 0;
    while !source.is_empty() {
        number += 1;
        let request = RequestId(number);
        // Slots on both sides of every boundary: of words, chunks, the quota, the pool.
        let slot = |source: &mut Source| {
            let base = [0, 56, 504, 692][usize::from(source.below(4))];
            SlotIndex(base + u32::from(source.below(16)))
        };
        match source.below(8) {
            0 => Frame::SetSize { request, npages: PageCount(slot(&mut source).0) }.encode(&mut bytes),
            1 => Frame::SetSize { request, npages: PageCount(source.word()) }.encode(&mut bytes),
            2 | 3 => {
                page.fill(source.byte());
                Frame::SendPage { request, slot: slot(&mut source), page: &page }.encode(&mut bytes);
            }
            4 | 5 => Frame::Request { request, slot: slot(&mut source) }.encode(&mut bytes),
            6 => Frame::Move { from: slot(&mut source), to: slot(&mut source) }.encode(&mut bytes),
            _ => {
                bytes.extend_from_slice(source.0);
                break;
            }
        }
    }
    bytes
}

/// A model of a pool, as simple as possible.
#[derive(Default)]
struct Model {
    pages: HashMap<u32, [u8; PAGE_SIZE]>,
    npages: u32,
}

impl Model {
    /// Writes the replies to a stream of bytes, up to its end or to the frame that ends the session.
    fn answer(&mut self, mut input: &[u8], replies: &mut Vec<u8>) {
        loop {
            let (frame, length) = match decode(input) {
                Ok(Some(found)) => found,
                Ok(None) => return,
                Err(_) => return malformed(replies),
            };
            input = &input[length..];
            match frame {
                Frame::Request { request, slot } => match self.pages.get(&slot.0) {
                    Some(page) => Frame::SendPage { request, slot, page }.encode(replies),
                    None => error(replies, request, ErrorCode::NotFound, 0),
                },
                Frame::SendPage { slot, page, .. } if slot.0 < self.npages => drop(self.pages.insert(slot.0, *page)),
                Frame::SendPage { .. } => {}
                Frame::Move { from, to } => self.relocate(from.0, to.0),
                Frame::SetSize { request, npages } => self.resize(request, npages.0, replies),
                Frame::Bye => return,
                Frame::Hello(_)
                | Frame::Welcome(_)
                | Frame::Sized { .. }
                | Frame::Error(_)
                | Frame::TakeBack { .. } => {
                    return malformed(replies);
                }
            }
        }
    }

    fn relocate(&mut self, from: u32, to: u32) {
        if from == to {
            return;
        }
        match self.pages.remove(&from) {
            Some(page) if to < self.npages => drop(self.pages.insert(to, page)),
            Some(_) => {}
            None => drop(self.pages.remove(&to)),
        }
    }

    fn resize(&mut self, request: RequestId, npages: u32, replies: &mut Vec<u8>) {
        let refused = npages > SETUP.quota.0;
        if !refused {
            self.npages = npages;
            self.pages.retain(|slot, _| *slot < npages);
        }
        let available = SETUP.quota.0.min(MEMORY) - self.npages;
        match refused {
            true => error(replies, request, ErrorCode::Quota, available),
            false => {
                let (npages, available) = (PageCount(npages), PageCount(available));
                Frame::Sized { request, npages, available }.encode(replies);
            }
        }
    }
}

fn malformed(replies: &mut Vec<u8>) {
    error(replies, RequestId(0), ErrorCode::Malformed, 0);
}

fn error(replies: &mut Vec<u8>, request: RequestId, code: ErrorCode, detail: u32) {
    Frame::Error(ErrorReply { request, code, detail }).encode(replies);
}

pub fn seeds() -> Vec<Vec<u8>> {
    let mut raw = vec![7];
    Frame::SetSize { request: RequestId(1), npages: PageCount(16) }.encode(&mut raw);
    Frame::Request { request: RequestId(2), slot: SlotIndex(3) }.encode(&mut raw);
    Frame::Bye.encode(&mut raw);
    vec![
        raw,
        // A size, pages, requests for them, a move, a smaller size, requests again.
        vec![
            0, 3, 8, 2, 7, 0, 1, 3, 8, 1, 9, 4, 0, 1, 5, 1, 9, 6, 0, 1, 2, 3, 4, 2, 3, 4, 0, 1, 4, 1, 9, 0, 0, 4, 4, 0,
            1,
        ],
        vec![1, 0xff, 0xff, 0, 0, 0, 3, 8, 2, 5, 3, 7, 4, 3, 7, 0, 3, 6, 4, 3, 7, 0, 3, 8, 4, 3, 7],
    ]
}
