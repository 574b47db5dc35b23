//! Frames that two VM processes exchange when one hands its disks to the other. Each has a kind, a length and a payload
//! of that length.
//!
//! ```text
//! kind u8 | length u32 | payload        1 offer (JSON)   2 refusal (text)   3 accept   4 state (JSON)   5 words
//!                                       6 yours (one byte: 1 if the state came before)   7 want   8 busy   9 alive
//!                                       10 confirm   11 confirmed
//! ```
//! Numbers are little-endian. The process that hands over sends an offer, and later its state as one frame 4 and as
//! many frames 5 as the words of its index take. All frames are inside a protected connection (`remoca_io::secure`).

use remoca_core::migration::Message;
use serde::{Deserialize, Serialize};
use std::io::{self, Read};

/// Version of these frames and of the words of the index.
pub const VERSION: u32 = 4;
/// Size of the header of a frame, in bytes.
pub const HEADER_BYTES: usize = 5;
/// Maximum length of an offer or a state, which have about 80 bytes for each of fewer than 4096 disks.
const TEXT_BYTES_MAX: usize = 1 << 20;
/// Maximum length of the name of a VM or a disk.
pub const NAME_BYTES_MAX: usize = 256;
/// Maximum number of bytes of the index in one frame.
pub const PIECE_BYTES: usize = 1 << 20;

/// Kinds of frames.
pub mod kind {
    pub const OFFER: u8 = 1;
    pub const REFUSE: u8 = 2;
    pub const ACCEPT: u8 = 3;
    pub const STATE: u8 = 4;
    pub const WORDS: u8 = 5;
    pub const YOURS: u8 = 6;
    pub const WANT: u8 = 7;
    pub const BUSY: u8 = 8;
    pub const ALIVE: u8 = 9;
    pub const CONFIRM: u8 = 10;
    pub const CONFIRMED: u8 = 11;
}

/// Properties of a process, which the peer compares with its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    pub version: u32,
    pub name: String,
    pub disks: Vec<OfferedDisk>,
    pub has_port: bool,
    /// Whether the lock of all images reaches other hosts.
    #[serde(default)]
    pub lock_reaches: bool,
    /// Number of words of the index.
    pub words: u64,
    /// Whether this is not an offer: the receiver got the disks over a link that is gone, and this link replaces it.
    #[serde(default)]
    pub returns: bool,
}

/// Disk as its guest sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedDisk {
    pub name: String,
    pub bytes: u64,
    pub read_only: bool,
    pub sector: u32,
}

/// State that is sent before the words of an index.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateHeader {
    /// Secret key of the fingerprints.
    pub key: [u8; 16],
    pub seed: u64,
    pub words: u64,
    /// Size of the cache in pages. The next field says whether the cache is on.
    pub cache_pages: u32,
    pub enabled: bool,
    pub servers: Vec<Server>,
    /// Numbers of the disks in the index, in the order in which they were offered, like everything about disks here. Empty
    /// if they are 0, 1, ...
    #[serde(default)]
    pub numbers: Vec<u16>,
    /// For each disk, a stamp that tells whether its image was written since, or `None` if there is no such stamp.
    pub stamps: Vec<Option<String>>,
    /// For each disk, the errno of a failed flush, after which no flush may succeed.
    pub failed_flushes: Vec<Option<i32>>,
    /// For each disk, whether its guest has the write cache on. Otherwise the guest sends no flushes.
    pub write_caches: Vec<bool>,
}

/// Memory server, with the token of the pool there and the epoch of the connection.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Server {
    pub number: u32,
    pub endpoint: String,
    pub token: [u8; 16],
    pub epoch: u64,
}

/// Frame from the peer.
pub enum PeerFrame {
    Offer(Box<Offer>),
    Refused(String),
    Message(Message),
    State(Box<StateHeader>),
    Words(Vec<u8>),
    /// Sign of life without any content.
    Alive,
}

/// Returns the bytes of a frame of this kind.
#[must_use]
pub fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("payloads are sent in pieces");
    let mut frame = Vec::with_capacity(HEADER_BYTES + payload.len());
    frame.push(kind);
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// Returns the bytes of a frame with these words of an index.
#[must_use]
pub fn words(words: &[u32]) -> Vec<u8> {
    let mut payload = vec![0_u8; words.len() * 4];
    for (bytes, word) in payload.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    frame(kind::WORDS, &payload)
}

/// Returns the bytes of the frame for a message about the ownership of the disks.
#[must_use]
pub fn message(message: Message) -> Vec<u8> {
    match message {
        Message::Accept => frame(kind::ACCEPT, &[]),
        Message::Yours { state } => frame(kind::YOURS, &[u8::from(state)]),
        Message::Want => frame(kind::WANT, &[]),
        Message::Busy => frame(kind::BUSY, &[]),
        Message::Confirm => frame(kind::CONFIRM, &[]),
        Message::Confirmed => frame(kind::CONFIRMED, &[]),
    }
}

/// Reads one frame. Allocates memory for the bytes that have arrived, not for the announced length.
///
/// # Errors
/// If the source fails or ends, or its bytes are not a valid frame.
pub fn read(source: &mut impl Read) -> io::Result<PeerFrame> {
    let mut header = [0; HEADER_BYTES];
    source.read_exact(&mut header)?;
    let [kind, length @ ..] = header;
    let length = u64::from(u32::from_le_bytes(length));
    let limit = match kind {
        kind::OFFER | kind::STATE => TEXT_BYTES_MAX,
        kind::REFUSE => 4096,
        kind::WORDS => PIECE_BYTES,
        kind::YOURS => 1,
        kind::ACCEPT | kind::WANT | kind::BUSY | kind::ALIVE | kind::CONFIRM | kind::CONFIRMED => 0,
        _ => return Err(invalid(format!("a frame of kind {kind}"))),
    };
    if length > limit as u64 {
        return Err(invalid(format!("a frame of kind {kind} with {length} bytes")));
    }
    let mut payload = Vec::new();
    if source.take(length).read_to_end(&mut payload)? as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(match kind {
        kind::OFFER => PeerFrame::Offer(read_offer(&payload)?),
        kind::STATE => PeerFrame::State(serde_json::from_slice(&payload).map_err(invalid)?),
        kind::REFUSE => PeerFrame::Refused(String::from_utf8_lossy(&payload).replace(char::is_control, " ")),
        kind::WORDS => PeerFrame::Words(payload),
        kind::YOURS => PeerFrame::Message(Message::Yours { state: payload == [1] }),
        kind::ACCEPT => PeerFrame::Message(Message::Accept),
        kind::WANT => PeerFrame::Message(Message::Want),
        kind::ALIVE => PeerFrame::Alive,
        kind::CONFIRM => PeerFrame::Message(Message::Confirm),
        kind::CONFIRMED => PeerFrame::Message(Message::Confirmed),
        _ => PeerFrame::Message(Message::Busy),
    })
}

/// Parses an offer. Checks its names, because they go to the log and to the operator's terminal.
fn read_offer(payload: &[u8]) -> io::Result<Box<Offer>> {
    let offer: Box<Offer> = serde_json::from_slice(payload).map_err(invalid)?;
    let mut names = offer.disks.iter().map(|disk| &disk.name).chain([&offer.name]);
    if names.any(|name| name.len() > NAME_BYTES_MAX || name.contains(char::is_control)) {
        return Err(invalid("a name that is too long or has control characters"));
    }
    drop(names);
    Ok(offer)
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(bytes: &[u8]) -> io::Result<PeerFrame> {
        read(&mut &bytes[..])
    }

    #[test]
    fn what_is_written_is_read() {
        let [yours, cold] = [true, false].map(|state| Message::Yours { state });
        let others = [Message::Accept, Message::Want, Message::Busy, Message::Confirm, Message::Confirmed];
        for sent in [yours, cold].into_iter().chain(others) {
            assert!(matches!(heard(&message(sent)), Ok(PeerFrame::Message(got)) if got == sent));
        }
        let offer = Offer {
            version: VERSION,
            name: "vm".into(),
            disks: Vec::new(),
            has_port: true,
            lock_reaches: true,
            words: 7,
            returns: false,
        };
        let bytes = frame(kind::OFFER, &serde_json::to_vec(&offer).unwrap());
        assert!(matches!(heard(&bytes), Ok(PeerFrame::Offer(got)) if *got == offer));
        assert!(matches!(heard(&frame(kind::WORDS, &[1, 2])), Ok(PeerFrame::Words(words)) if words == [1, 2]));
        assert_eq!(words(&[0x0403_0201, 5]), frame(kind::WORDS, &[1, 2, 3, 4, 5, 0, 0, 0]));
        assert!(matches!(heard(&frame(kind::REFUSE, b"a\nb")), Ok(PeerFrame::Refused(text)) if text == "a b"));
    }

    /// The offer comes before the guest stops. What comes after it must fit as well.
    #[test]
    fn what_is_said_of_the_most_disks_that_a_vm_has_is_read() {
        let disks = 4095;
        let stamp = Some(format!("{} {} 1700000000.999999999", u64::MAX, i64::MAX));
        let state = StateHeader {
            key: [255; 16],
            seed: u64::MAX,
            words: u64::MAX,
            cache_pages: u32::MAX,
            enabled: false,
            servers: Vec::new(),
            numbers: vec![4095; disks],
            stamps: vec![stamp; disks],
            failed_flushes: vec![None; disks],
            write_caches: vec![false; disks],
        };
        let disk = OfferedDisk { name: "disk4095".into(), bytes: 1 << 52, read_only: false, sector: 4096 };
        let offer = Offer {
            version: VERSION,
            name: "vm".into(),
            disks: vec![disk; disks],
            has_port: true,
            lock_reaches: true,
            words: u64::MAX,
            returns: false,
        };
        let bytes = frame(kind::STATE, &serde_json::to_vec(&state).unwrap());
        assert!(matches!(heard(&bytes), Ok(PeerFrame::State(got)) if *got == state));
        let bytes = frame(kind::OFFER, &serde_json::to_vec(&offer).unwrap());
        assert!(matches!(heard(&bytes), Ok(PeerFrame::Offer(got)) if *got == offer));
    }

    #[test]
    fn what_cannot_be_is_an_error_and_takes_no_memory() {
        let too_long = [kind::WORDS, 0xff, 0xff, 0xff, 0x7f];
        let bad = [&[12, 0, 0, 0, 0][..], &too_long, &[kind::WANT, 1, 0, 0, 0, 0], &[kind::WORDS, 9, 0, 0, 0, 1], &[1]];
        for bytes in bad {
            assert!(heard(bytes).is_err(), "{bytes:?}");
        }
        assert!(heard(&frame(kind::OFFER, b"{}")).is_err());
        for name in ["a\u{1b}[2J", &"x".repeat(257)] {
            let offer = Offer {
                version: VERSION,
                name: name.into(),
                disks: Vec::new(),
                has_port: true,
                lock_reaches: true,
                words: 7,
                returns: false,
            };
            assert!(heard(&frame(kind::OFFER, &serde_json::to_vec(&offer).unwrap())).is_err(), "{name:?}");
        }
        assert!(heard(&frame(kind::STATE, b"[")).is_err());
    }
}
