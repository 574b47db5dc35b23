//! Fuzzing of the migration connection: the input is what another VM process sends, from its offer to the index.
//!
//! Behind the feature `testing`; never part of the program.

#![allow(clippy::unwrap_used, reason = "in a test a surprise is a failure")]

use super::{IndexRoom, Receipt};
use crate::link::{HostNetwork, ServerLink};
use remoca_core::migration::Message;
use remoca_io::address::Endpoint;
use remoca_io::words::IndexMemory;
use remoca_protocol::peer::{
    self, HEADER_BYTES, Offer, OfferedDisk, PIECE_BYTES, PeerFrame, Server, StateHeader, VERSION, kind,
};
use std::collections::HashSet;
use std::io::{self, Read};
use std::sync::Arc;

/// Words of an index that the receiver takes.
const WORDS_MAX: u64 = 1 << 10;

/// What was understood, as it is written, and why nothing came after it.
#[derive(Debug, PartialEq, Eq)]
struct Understood {
    frames: Vec<Vec<u8>>,
    end: io::ErrorKind,
}

/// Two bytes cut the stream, the rest is the stream.
pub fn run(data: &[u8]) {
    let Some(([piece, cut], stream)) = data.split_first_chunk() else { return };
    let whole = understand(&mut &*stream);
    assert_eq!(
        understand(&mut Pieces { rest: stream, piece: *piece }),
        whole,
        "cutting it into pieces changes nothing"
    );
    let end = stream.len() * usize::from(*cut) / 256;
    let start = understand(&mut &stream[..end]);
    assert!(whole.frames.starts_with(&start.frames), "what comes later changes nothing of what came before");
    assert!(start.end == io::ErrorKind::UnexpectedEof || start == whole, "a part of a frame is no error");
    if cut & 1 == 1 {
        read_without_end(stream);
    }
    receive(stream);
}

/// Reads everything, and keeps nothing of it.
pub fn read_all(data: &[u8]) {
    let mut stream = data.get(2..).unwrap_or_default();
    while peer::read(&mut stream).is_ok() {}
}

fn understand(source: &mut impl Read) -> Understood {
    let mut frames = Vec::new();
    loop {
        match peer::read(source) {
            Ok(heard) => frames.push(written_again(&heard)),
            Err(error) => return Understood { frames, end: error.kind() },
        }
    }
}

/// The frame that says the same, which must be read as the same.
fn written_again(heard: &PeerFrame) -> Vec<u8> {
    let bytes = match heard {
        PeerFrame::Offer(offer) => peer::frame(kind::OFFER, &serde_json::to_vec(offer).unwrap()),
        PeerFrame::State(header) => peer::frame(kind::STATE, &serde_json::to_vec(header).unwrap()),
        PeerFrame::Refused(why) => {
            assert!(!why.contains(char::is_control), "it goes to a terminal");
            peer::frame(kind::REFUSE, why.as_bytes())
        }
        PeerFrame::Words(words) => peer::frame(kind::WORDS, words),
        PeerFrame::Message(message) => peer::message(*message),
        PeerFrame::Alive => peer::frame(kind::ALIVE, &[]),
    };
    match (heard, peer::read(&mut &*bytes)) {
        (PeerFrame::Offer(first), Ok(PeerFrame::Offer(again))) => assert_eq!(*first, again),
        (PeerFrame::State(first), Ok(PeerFrame::State(again))) => assert!(*first == again, "another state"),
        (PeerFrame::Refused(first), Ok(PeerFrame::Refused(again))) => assert_eq!(*first, again),
        (PeerFrame::Words(first), Ok(PeerFrame::Words(again))) => assert_eq!(*first, again),
        (PeerFrame::Message(first), Ok(PeerFrame::Message(again))) => assert_eq!(*first, again),
        (PeerFrame::Alive, Ok(PeerFrame::Alive)) => {}
        // What is no text is replaced by something longer.
        (PeerFrame::Refused(why), Err(_)) => assert!(why.contains(char::REPLACEMENT_CHARACTER)),
        (_, again) => panic!("it is read as something else: {:?}", again.err()),
    }
    bytes
}

/// A peer that never ends its last frame: no more is taken than a frame may have.
fn read_without_end(mut stream: &[u8]) {
    let mut last = stream;
    while peer::read(&mut stream).is_ok() {
        last = stream;
    }
    let most = (last.len() + PIECE_BYTES + HEADER_BYTES) as u64;
    let mut endless = last.chain(io::repeat(b' ')).take(most + 1);
    let _ = peer::read(&mut endless);
    assert!(endless.limit() > 0, "one frame without end");
}

/// A state and its words, as the driver takes them.
fn receive(mut stream: &[u8]) {
    let (mut receipt, mut sent) = (None::<Receipt>, Vec::new());
    while let Ok(heard) = peer::read(&mut stream) {
        match (heard, &mut receipt) {
            (PeerFrame::State(header), None) => {
                name_servers(&header);
                receipt = Some(Receipt::begin(*header, WORDS_MAX, room_for));
            }
            (PeerFrame::Words(bytes), Some(receipt)) => match receipt.take(&bytes) {
                Ok(()) => sent.extend_from_slice(bytes.as_chunks::<4>().0),
                Err(_) => break,
            },
            _ => {}
        }
    }
    let Some(receipt) = receipt else { return };
    assert_eq!(receipt.is_whole(), sent.len() as u64 == receipt.header.words);
    let Some(IndexRoom { words, .. }) = receipt.room else { return };
    assert!((1..=WORDS_MAX).contains(&(words.len() as u64)) && words.len() as u64 == receipt.header.words);
    let sent = sent.into_iter().map(u32::from_le_bytes);
    assert!(sent.chain(std::iter::repeat(0)).zip(&*words).all(|(sent, kept)| sent == *kept), "each word at its place");
}

fn room_for(words: usize) -> Option<IndexRoom> {
    Some(IndexRoom { words: IndexMemory::new(words).unwrap(), state: None })
}

/// Whatever names another process had at the servers, here no two have the same, then and later.
fn name_servers(header: &StateHeader) {
    let endpoints: Vec<Endpoint> = ["unix:/a", "unix:/b", "unix:/c"].map(|text| text.parse().unwrap()).into();
    let mut link = ServerLink::resume(Arc::new(HostNetwork), &endpoints[..2].to_vec().into(), &header.servers).unwrap();
    link.replace(&endpoints.to_vec().into()).unwrap();
    let numbers: HashSet<_> = link.servers().iter().map(|server| server.number).collect();
    assert_eq!(numbers.len(), endpoints.len(), "two servers with one number");
}

/// A stream that comes in pieces of up to so many bytes, and is interrupted.
struct Pieces<'a> {
    rest: &'a [u8],
    piece: u8,
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.piece = self.piece.wrapping_mul(5).wrapping_add(7);
        if self.piece.is_multiple_of(16) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let room = buffer.len().min(usize::from(self.piece >> 2) + 1);
        self.rest.read(&mut buffer[..room])
    }
}

/// Both sides of a hand-over, and what a peer must not say.
pub fn seeds() -> Vec<Vec<u8>> {
    let disk = OfferedDisk { name: "system".into(), bytes: 1 << 30, read_only: false, sector: 512 };
    let offer = Offer {
        version: VERSION,
        name: "vm".into(),
        disks: vec![disk],
        has_port: true,
        lock_reaches: true,
        words: 7,
        returns: false,
    };
    let server = |number, endpoint: &str| Server { number, endpoint: endpoint.into(), token: [9; 16], epoch: 3 };
    let header = StateHeader {
        numbers: vec![0],
        key: [7; 16],
        seed: 1,
        words: 5,
        cache_pages: 8,
        enabled: true,
        servers: vec![server(3, "unix:/a"), server(1 << 16, "unix:/x")],
        stamps: vec![Some("wwid naa.5".into()), None],
        failed_flushes: vec![None, Some(5)],
        write_caches: vec![true, false],
    };
    let offer = peer::frame(kind::OFFER, &serde_json::to_vec(&offer).unwrap());
    let state = peer::frame(kind::STATE, &serde_json::to_vec(&header).unwrap());
    let words = peer::frame(kind::WORDS, &[1, 0, 0, 0, 2, 0, 0, 0]);
    let more_words = peer::frame(kind::WORDS, &[3; 12]);
    let yours = peer::message(Message::Yours { state: true });
    let refusal = peer::frame(kind::REFUSE, b"no room\nhere \xff");
    let answers = [Message::Accept, Message::Want, Message::Busy, Message::Yours { state: false }].map(peer::message);
    let alive = peer::frame(kind::ALIVE, &[]);
    let endless = [kind::WORDS, 0xff, 0xff, 0x0f, 0];
    let seed = |frames: &[&[u8]]| [&[200, 201], &frames.concat()[..]].concat();
    vec![
        seed(&[&offer]),
        seed(&[&offer, &alive, &state, &words, &more_words, &yours]),
        seed(&[&answers.concat()]),
        seed(&[&refusal]),
        seed(&[&state, &words, &endless]),
        seed(&[&[kind::OFFER, 0xff, 0xff, 0xff, 0xff]]),
    ]
}
