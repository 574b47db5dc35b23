//! The bytes of version 1. These never change; a new version gets its own file.

use remoca_protocol::{
    DecodeError, ErrorCode, ErrorReply, Frame, HEADER_BYTES, Hello, PAGE_SIZE, PageCount, PoolGeneration, RequestId,
    SendCount, ServerId, SlotIndex, Token, VersionRange, Welcome, decode, send_page_header,
};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unspaced(text: &str) -> String {
    text.split_whitespace().collect()
}

#[track_caller]
fn golden(frame: Frame<'_>, expected: &str) {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    assert_eq!(hex(&bytes), unspaced(expected));
    assert_eq!(decode(&bytes), Ok(Some((frame, bytes.len()))));
}

const TOKEN: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

#[test]
fn hello() {
    golden(
        Frame::Hello(Hello {
            versions: VersionRange { lowest: 1, highest: 0x0203 },
            token: Token(TOKEN),
            epoch: 0x1122_3344_5566_7788,
        }),
        "01 00 2800 00000000 00000000 00000000
         52454d4f43410000 0100 0302 00000000 000102030405060708090a0b0c0d0e0f 8877665544332211",
    );
}

#[test]
fn welcome() {
    golden(
        Frame::Welcome(Welcome {
            version: 1,
            server_id: ServerId(TOKEN),
            pool_generation: PoolGeneration(0xaabb_ccdd_eeff_0011),
            npages: PageCount(0x0102_0304),
            available: PageCount(5),
            quota: PageCount(6),
            sends_received: SendCount(7),
        }),
        "02 00 3000 00000000 00000000 00000000
         0100 0000 04030201 05000000 06000000 000102030405060708090a0b0c0d0e0f 1100ffeeddccbbaa 0700000000000000",
    );
}

#[test]
fn sizes() {
    golden(
        Frame::SetSize { request: RequestId(0x1234_5678), npages: PageCount(512) },
        "03 00 0000 78563412 00020000 00000000",
    );
    golden(
        Frame::Sized { request: RequestId(9), npages: PageCount(512), available: PageCount(u32::MAX) },
        "04 00 0000 09000000 00020000 ffffffff",
    );
}

#[test]
fn pages() {
    let page = [0x5a; PAGE_SIZE];
    let expected = format!("05 00 0010 07000000 2a000000 00000000 {}", "5a".repeat(PAGE_SIZE));
    golden(Frame::SendPage { request: RequestId(7), slot: SlotIndex(42), page: &page }, &expected);
    let header = send_page_header(RequestId(7), SlotIndex(42));
    assert_eq!(hex(&header), unspaced(&expected)[..2 * HEADER_BYTES]);
    golden(Frame::Request { request: RequestId(7), slot: SlotIndex(42) }, "06 00 0000 07000000 2a000000 00000000");
    golden(Frame::Move { from: SlotIndex(1), to: SlotIndex(2) }, "08 00 0000 00000000 01000000 02000000");
}

#[test]
fn the_rest() {
    golden(Frame::Bye, "0c 00 0000 00000000 00000000 00000000");
    let codes = [
        (ErrorCode::VersionMismatch, 1),
        (ErrorCode::StaleEpoch, 2),
        (ErrorCode::NoMemory, 3),
        (ErrorCode::Quota, 4),
        (ErrorCode::NotFound, 5),
        (ErrorCode::Malformed, 6),
        (ErrorCode::Busy, 7),
        (ErrorCode::Unknown(8), 8),
    ];
    for (code, wire) in codes {
        golden(
            Frame::Error(ErrorReply { request: RequestId(3), code, detail: 0x0001_0002 }),
            &format!("0b 00 0000 03000000 02000100 {wire:02x}000000"),
        );
    }
}

#[test]
fn kinds_that_are_not_used_are_not_known() {
    for kind in [0, 7, 9, 10, 13, 255] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = kind;
        assert_eq!(decode(&bytes), Err(DecodeError::UnknownKind(kind)));
    }
}

#[test]
fn versions() {
    let range = |lowest, highest| VersionRange { lowest, highest };
    assert_eq!(range(1, 3).common(range(2, 9)), Some(3));
    assert_eq!(range(1, 1).common(range(1, 1)), Some(1));
    assert_eq!(range(1, 1).common(range(2, 3)), None);
    assert_eq!(range(4, 5).common(range(2, 3)), None);
    assert_eq!(range(2, 3).to_detail(), 0x0002_0003);
    assert_eq!(VersionRange::from_detail(0x0002_0003), range(2, 3));
}

#[test]
fn a_token_is_not_logged_whole() {
    assert_eq!(format!("{:?}", Token(TOKEN)), "00010203..");
}
