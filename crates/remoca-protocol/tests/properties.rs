//! Any frame survives encoding and decoding, in pieces of any size, and no bytes make the decoder fail other than with
//! an error.

use proptest::prelude::*;
use remoca_protocol::{
    DecodeError, ErrorCode, ErrorReply, FRAME_BYTES_MAX, Frame, HEADER_BYTES, Hello, PAGE_SIZE, PageCount,
    PoolGeneration, ReceiveBuffer, RequestId, SendCount, ServerId, SlotIndex, Token, VersionRange, Welcome, decode,
};

const PAGE_A: &[u8; PAGE_SIZE] = &[0xa5; PAGE_SIZE];
const PAGE_B: &[u8; PAGE_SIZE] = &[0; PAGE_SIZE];

fn hello() -> impl Strategy<Value = Frame<'static>> {
    any::<(u16, u16, [u8; 16], u64)>().prop_map(|(x, y, token, epoch)| {
        let versions = VersionRange { lowest: x.min(y), highest: x.max(y) };
        Frame::Hello(Hello { versions, token: Token(token), epoch })
    })
}

fn welcome() -> impl Strategy<Value = Frame<'static>> {
    any::<(u16, [u8; 16], u64, u32, u32, u32, u64)>().prop_map(
        |(version, server_id, generation, npages, available, quota, sends)| {
            Frame::Welcome(Welcome {
                version,
                server_id: ServerId(server_id),
                pool_generation: PoolGeneration(generation),
                npages: PageCount(npages),
                available: PageCount(available),
                quota: PageCount(quota),
                sends_received: SendCount(sends),
            })
        },
    )
}

fn error() -> impl Strategy<Value = Frame<'static>> {
    let code = prop_oneof![
        Just(ErrorCode::VersionMismatch),
        Just(ErrorCode::StaleEpoch),
        Just(ErrorCode::NoMemory),
        Just(ErrorCode::Quota),
        Just(ErrorCode::NotFound),
        Just(ErrorCode::Malformed),
        Just(ErrorCode::Busy),
        (8..=u16::MAX).prop_map(ErrorCode::Unknown),
    ];
    (any::<u32>(), code, any::<u32>())
        .prop_map(|(request, code, detail)| Frame::Error(ErrorReply { request: RequestId(request), code, detail }))
}

fn any_frame() -> impl Strategy<Value = Frame<'static>> {
    let small = any::<(u32, u32, u32)>().prop_flat_map(|(x, y, z)| {
        let request = RequestId(x);
        prop_oneof![
            Just(Frame::SetSize { request, npages: PageCount(y) }),
            Just(Frame::Sized { request, npages: PageCount(y), available: PageCount(z) }),
            Just(Frame::Request { request, slot: SlotIndex(y) }),
            Just(Frame::SendPage { request, slot: SlotIndex(y), page: PAGE_A }),
            Just(Frame::SendPage { request, slot: SlotIndex(y), page: PAGE_B }),
            Just(Frame::Move { from: SlotIndex(x), to: SlotIndex(y) }),
            Just(Frame::Bye),
            Just(Frame::TakeBack { npages: PageCount(y) }),
        ]
    });
    prop_oneof![1 => hello(), 1 => welcome(), 2 => error(), 8 => small]
}

proptest! {
    #[test]
    fn frames_survive_any_fragmentation(
        frames in prop::collection::vec(any_frame(), 1..20),
        pieces in prop::collection::vec(1usize..5000, 1..50),
        capacity in 1usize..20_000,
    ) {
        let mut stream = Vec::new();
        for frame in &frames {
            frame.encode(&mut stream);
        }
        let mut buffer = ReceiveBuffer::new(capacity);
        let mut expected = frames.iter();
        let mut rest = &stream[..];
        let mut pieces = pieces.into_iter().cycle();
        while !rest.is_empty() {
            let space = buffer.space();
            prop_assert!(!space.is_empty());
            let count = pieces.next().expect("endless").min(space.len()).min(rest.len());
            space[..count].copy_from_slice(&rest[..count]);
            buffer.filled(count);
            rest = &rest[count..];
            while let Some(frame) = buffer.take().expect("valid frames") {
                prop_assert_eq!(Some(&frame), expected.next());
            }
        }
        prop_assert!(buffer.is_empty());
        prop_assert_eq!(expected.next(), None);
    }

    #[test]
    fn a_prefix_is_never_an_error(frame in any_frame(), cut in 0usize..FRAME_BYTES_MAX) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        let cut = cut % bytes.len();
        prop_assert_eq!(decode(&bytes[..cut]), Ok(None));
    }

    #[test]
    fn random_bytes_give_a_frame_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..6000)) {
        check_canonical(&bytes)?;
    }

    /// Random bytes after a plausible beginning, so that the payloads and fields are reached.
    #[test]
    fn plausible_bytes_give_a_frame_or_an_error(
        kind in 0u8..16,
        length in prop_oneof![Just(0u16), Just(40), Just(48), Just(4096), any::<u16>()],
        magic in any::<bool>(),
        mut rest in prop::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], 12..5000),
    ) {
        let mut bytes = vec![kind, 0];
        bytes.extend(length.to_le_bytes());
        if magic && rest.len() > 20 {
            rest[12..20].copy_from_slice(b"REMOCA\0\0");
        }
        bytes.extend(rest);
        check_canonical(&bytes)?;
    }

    #[test]
    fn one_flipped_bit_in_a_header_is_an_error_or_another_frame(frame in any_frame(), bit in 0usize..8 * HEADER_BYTES) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        bytes[bit / 8] ^= 1 << (bit % 8);
        if let Ok(Some((other, _))) = decode(&bytes) {
            prop_assert_ne!(other, frame);
        }
    }
}

/// Decodes without a panic, and what decodes is the one form of its frame.
fn check_canonical(bytes: &[u8]) -> Result<(), TestCaseError> {
    if let Ok(Some((frame, length))) = decode(bytes) {
        prop_assert!(length <= FRAME_BYTES_MAX);
        let mut again = Vec::new();
        frame.encode(&mut again);
        prop_assert_eq!(&again[..], &bytes[..length]);
    }
    Ok(())
}

#[test]
fn what_is_no_frame_is_refused_from_its_header_on() {
    let header = |kind: u8, zero: u8, length: u16, a: u8| {
        let [low, high] = length.to_le_bytes();
        [kind, zero, low, high, a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    };
    assert_eq!(decode(b"GET / HTTP/1.1\r\n"), Err(DecodeError::UnknownKind(b'G')));
    assert_eq!(decode(&header(0, 0, 0, 0)), Err(DecodeError::UnknownKind(0)));
    assert_eq!(decode(&header(13, 0, 0, 0)), Err(DecodeError::UnknownKind(13)));
    assert_eq!(decode(&header(5, 0, 4097, 0)), Err(DecodeError::WrongLength { kind: 5, length: 4097 }));
    assert_eq!(decode(&header(5, 0, 4095, 0)), Err(DecodeError::WrongLength { kind: 5, length: 4095 }));
    assert_eq!(decode(&header(6, 0, 1, 0)), Err(DecodeError::WrongLength { kind: 6, length: 1 }));
    assert_eq!(decode(&header(12, 1, 0, 0)), Err(DecodeError::NotZero { kind: 12 }));
    assert_eq!(decode(&header(12, 0, 0, 1)), Err(DecodeError::NotZero { kind: 12 }));
}

#[test]
fn a_hello_of_something_else_is_refused() {
    let hello = Hello { versions: VersionRange { lowest: 1, highest: 2 }, token: Token([7; 16]), epoch: 1 };
    let mut bytes = Vec::new();
    Frame::Hello(hello).encode(&mut bytes);
    let with = |offset: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[HEADER_BYTES + offset] = value;
        decode(&bytes).map(|_| ())
    };
    assert_eq!(with(0, b'r'), Err(DecodeError::BadMagic));
    assert_eq!(with(10, 0), Err(DecodeError::BadVersions));
    assert_eq!(with(12, 1), Err(DecodeError::NotZero { kind: 1 }));
}
