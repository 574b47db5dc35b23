//! The wire protocol's decoder: a stream of bytes, cut into arbitrary pieces, from a peer in either role.

use remoca_protocol::{
    DecodeError, ErrorCode, ErrorReply, FRAME_BYTES_MAX, Frame, Hello, PAGE_SIZE, PageCount, PoolGeneration,
    ReceiveBuffer, RequestId, SendCount, ServerId, SlotIndex, Token, VERSIONS, Welcome, decode,
};

/// Frames as bytes, and the result at which decoding ended.
type Taken = (Vec<Vec<u8>>, Result<(), DecodeError>);

/// Decodes a stream: the first two bytes say where to cut it, the rest is the stream.
pub fn run(data: &[u8]) {
    let Some(([room, cut], stream)) = data.split_first_chunk() else { return };
    let whole = take_at_once(stream);
    assert_eq!(take_in_pieces(stream, usize::from(*room) * 64, *cut), whole);
}

fn take_at_once(mut rest: &[u8]) -> Taken {
    let mut frames = Vec::new();
    loop {
        match decode(rest) {
            Ok(None) => return (frames, Ok(())),
            Err(error) => return (frames, Err(error)),
            Ok(Some((frame, length))) => {
                let mut bytes = Vec::new();
                frame.encode(&mut bytes);
                assert_eq!(bytes, rest[..length], "there is one way to write a frame");
                assert_eq!(decode(&rest[..length - 1]), Ok(None), "a part of a frame is no error");
                frames.push(bytes);
                rest = &rest[length..];
            }
        }
    }
}

fn take_in_pieces(mut rest: &[u8], room: usize, cut: u8) -> Taken {
    let mut buffer = ReceiveBuffer::new(room);
    let mut frames = Vec::new();
    let mut piece = usize::from(cut);
    while !rest.is_empty() {
        // From single bytes to more than a page.
        piece = (piece * 5 + 7) % 5003;
        let space = buffer.space();
        assert!(!space.is_empty(), "a buffer whose frames were taken has room");
        assert!(space.len() <= room.max(FRAME_BYTES_MAX), "it never grows");
        let count = piece.max(1).min(space.len()).min(rest.len());
        space[..count].copy_from_slice(&rest[..count]);
        buffer.filled(count);
        rest = &rest[count..];
        loop {
            match buffer.take() {
                Ok(None) => break,
                Err(error) => return (frames, Err(error)),
                Ok(Some(frame)) => {
                    let mut bytes = Vec::new();
                    frame.encode(&mut bytes);
                    frames.push(bytes);
                }
            }
        }
    }
    (frames, Ok(()))
}

pub fn seeds() -> Vec<Vec<u8>> {
    let (request, slot) = (RequestId(7), SlotIndex(3));
    let frames = [
        Frame::Hello(Hello { versions: VERSIONS, token: Token([9; 16]), epoch: 1 }),
        Frame::Welcome(Welcome {
            version: VERSIONS.highest,
            server_id: ServerId([8; 16]),
            pool_generation: PoolGeneration(2),
            npages: PageCount(0),
            available: PageCount(512),
            quota: PageCount(512),
            sends_received: SendCount(0),
        }),
        Frame::SetSize { request, npages: PageCount(512) },
        Frame::Sized { request, npages: PageCount(512), available: PageCount(0) },
        Frame::Request { request, slot },
        Frame::Move { from: slot, to: SlotIndex(4) },
        Frame::Error(ErrorReply { request, code: ErrorCode::NotFound, detail: 0 }),
        Frame::Bye,
        Frame::TakeBack { npages: PageCount(7) },
        Frame::SendPage { request, slot, page: &[0xa5; PAGE_SIZE] },
    ];
    let mut all = vec![1, 200];
    let mut seeds = Vec::new();
    for frame in frames {
        let mut seed = vec![0, 3];
        frame.encode(&mut seed);
        all.extend_from_slice(&seed[2..]);
        seeds.push(seed);
    }
    seeds.push(all);
    seeds
}
