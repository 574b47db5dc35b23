//! The bytes of mapped sessions, version 32769. These never change. Frames that are not here are those of version 1.

use remoca_protocol::{
    ErrorCode, ErrorReply, Frame, Hello, MAPPED_VERSIONS, PageCount, RequestId, Token, VERSIONS, decode,
};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[track_caller]
fn golden(frame: Frame<'_>, expected: &str) {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    assert_eq!(hex(&bytes), expected.split_whitespace().collect::<String>());
    assert_eq!(decode(&bytes), Ok(Some((frame, bytes.len()))));
}

#[test]
fn a_mapped_pool_is_asked_for_by_its_versions() {
    golden(
        Frame::Hello(Hello { versions: MAPPED_VERSIONS, token: Token([7; 16]), epoch: 1 }),
        "01 00 2800 00000000 00000000 00000000
         52454d4f43410000 0180 0180 00000000 07070707070707070707070707070707 0100000000000000",
    );
}

#[test]
fn a_server_of_paged_sessions_alone_refuses_by_its_versions() {
    assert_eq!(MAPPED_VERSIONS.common(VERSIONS), None);
    golden(
        Frame::Error(ErrorReply {
            request: RequestId(0),
            code: ErrorCode::VersionMismatch,
            detail: VERSIONS.to_detail(),
        }),
        "0b 00 0000 00000000 01000100 01000000",
    );
}

#[test]
fn taking_back() {
    golden(Frame::TakeBack { npages: PageCount(0x0102_0304) }, "0e 00 0000 00000000 04030201 00000000");
}

#[test]
fn codes() {
    for (code, wire) in [(ErrorCode::NOT_MAPPABLE, "0001"), (ErrorCode::TAKEN_BACK, "0101")] {
        golden(
            Frame::Error(ErrorReply { request: RequestId(0), code, detail: 2 }),
            &format!("0b 00 0000 00000000 02000000 {wire}0000"),
        );
    }
}
