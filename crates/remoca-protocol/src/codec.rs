//! Encoding and decoding of frames.

use remoca_core::units::{PAGE_SIZE, PageCount, SlotIndex};
use zerocopy::{FromBytes, IntoBytes};

use crate::frame::{
    ErrorCode, ErrorReply, Frame, Hello, PoolGeneration, RequestId, SendCount, ServerId, Token, VersionRange, Welcome,
};
use crate::wire::{Header, HelloPayload, WelcomePayload, kind};
use crate::{HEADER_BYTES, MAGIC};

/// Reason why bytes are not a valid frame. No later bytes of the connection can be decoded either.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("frame kind {0} is not known")]
    UnknownKind(u8),
    #[error("a frame of kind {kind} cannot have a payload of {length} bytes")]
    WrongLength { kind: u8, length: u16 },
    #[error("the peer does not speak the remoca protocol (its HELLO begins with other bytes)")]
    BadMagic,
    #[error("a field of a frame of kind {kind} that must be zero is not")]
    NotZero { kind: u8 },
    #[error("the versions in a HELLO are in the wrong order")]
    BadVersions,
    #[error("error code {0} does not fit into 16 bits")]
    BadErrorCode(u32),
}

/// Returns the frame at the start of `bytes` and its length, or `None` if more bytes are needed.
///
/// # Errors
/// [`DecodeError`] if the header is invalid, or if the frame is complete and its payload is invalid.
pub fn decode(bytes: &[u8]) -> Result<Option<(Frame<'_>, usize)>, DecodeError> {
    let Ok((header, rest)) = Header::ref_from_prefix(bytes) else { return Ok(None) };
    let length = check_header(header)?;
    let Some(payload) = rest.get(..length) else { return Ok(None) };
    Ok(Some((frame(header, payload)?, HEADER_BYTES + length)))
}

/// Returns the header of a [`Frame::SendPage`]; the 4096 bytes of the page follow it on the wire.
#[must_use]
pub fn send_page_header(request: RequestId, slot: SlotIndex) -> [u8; HEADER_BYTES] {
    const PAGE: u16 = 4096;
    const _: () = assert!(PAGE as usize == PAGE_SIZE);
    zerocopy::transmute!(header(kind::SENDPAGE, [request.0, slot.0, 0], PAGE))
}

impl Frame<'_> {
    /// Appends the bytes of the frame to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Frame::Hello(hello) => put(out, kind::HELLO, [0; 3], hello_payload(&hello).as_bytes()),
            Frame::Welcome(welcome) => put(out, kind::WELCOME, [0; 3], welcome_payload(&welcome).as_bytes()),
            Frame::SetSize { request, npages } => put(out, kind::SETSIZE, [request.0, npages.0, 0], &[]),
            Frame::Sized { request, npages, available } => {
                put(out, kind::SIZED, [request.0, npages.0, available.0], &[]);
            }
            Frame::SendPage { request, slot, page } => put(out, kind::SENDPAGE, [request.0, slot.0, 0], page),
            Frame::Request { request, slot } => put(out, kind::REQUEST, [request.0, slot.0, 0], &[]),
            Frame::Move { from, to } => put(out, kind::MOVE, [0, from.0, to.0], &[]),
            Frame::Error(ErrorReply { request, code, detail }) => {
                put(out, kind::ERROR, [request.0, detail, u32::from(code.to_wire())], &[]);
            }
            Frame::Bye => put(out, kind::BYE, [0; 3], &[]),
            Frame::TakeBack { npages } => put(out, kind::TAKEBACK, [0, npages.0, 0], &[]),
        }
    }
}

/// Checks the kind, the length and the fields that must be zero of a header. Returns the length of the payload in
/// bytes.
fn check_header(header: &Header) -> Result<usize, DecodeError> {
    // For each kind: length of the payload, and which of a, b and c are used.
    let (length, used) = match header.kind {
        kind::HELLO => (size_of::<HelloPayload>(), [false; 3]),
        kind::WELCOME => (size_of::<WelcomePayload>(), [false; 3]),
        kind::SENDPAGE => (PAGE_SIZE, [true, true, false]),
        kind::SETSIZE | kind::REQUEST => (0, [true, true, false]),
        kind::SIZED | kind::ERROR => (0, [true; 3]),
        kind::MOVE => (0, [false, true, true]),
        kind::BYE => (0, [false; 3]),
        kind::TAKEBACK => (0, [false, true, false]),
        unknown => return Err(DecodeError::UnknownKind(unknown)),
    };
    if usize::from(header.length.get()) != length {
        return Err(DecodeError::WrongLength { kind: header.kind, length: header.length.get() });
    }
    let fields = [header.a.get(), header.b.get(), header.c.get()];
    if header.zero != 0 || fields.iter().zip(used).any(|(field, used)| !used && *field != 0) {
        return Err(DecodeError::NotZero { kind: header.kind });
    }
    Ok(length)
}

/// Decodes the frame with this payload and a header that [`check_header`] has accepted.
fn frame<'a>(header: &Header, payload: &'a [u8]) -> Result<Frame<'a>, DecodeError> {
    let [a, b, c] = [header.a.get(), header.b.get(), header.c.get()];
    let wrong_length = DecodeError::WrongLength { kind: header.kind, length: header.length.get() };
    Ok(match header.kind {
        kind::HELLO => hello(HelloPayload::ref_from_bytes(payload).map_err(|_| wrong_length)?)?,
        kind::WELCOME => welcome(WelcomePayload::ref_from_bytes(payload).map_err(|_| wrong_length)?)?,
        kind::SETSIZE => Frame::SetSize { request: RequestId(a), npages: PageCount(b) },
        kind::SIZED => Frame::Sized { request: RequestId(a), npages: PageCount(b), available: PageCount(c) },
        kind::SENDPAGE => Frame::SendPage {
            request: RequestId(a),
            slot: SlotIndex(b),
            page: payload.try_into().map_err(|_| wrong_length)?,
        },
        kind::REQUEST => Frame::Request { request: RequestId(a), slot: SlotIndex(b) },
        kind::MOVE => Frame::Move { from: SlotIndex(b), to: SlotIndex(c) },
        kind::ERROR => {
            let code = u16::try_from(c).map_err(|_| DecodeError::BadErrorCode(c))?;
            Frame::Error(ErrorReply { request: RequestId(a), code: ErrorCode::from_wire(code), detail: b })
        }
        kind::BYE => Frame::Bye,
        kind::TAKEBACK => Frame::TakeBack { npages: PageCount(b) },
        unknown => return Err(DecodeError::UnknownKind(unknown)),
    })
}

fn hello(payload: &HelloPayload) -> Result<Frame<'static>, DecodeError> {
    if payload.magic != MAGIC {
        return Err(DecodeError::BadMagic);
    }
    if payload.zero.get() != 0 {
        return Err(DecodeError::NotZero { kind: kind::HELLO });
    }
    let versions = VersionRange { lowest: payload.lowest.get(), highest: payload.highest.get() };
    if versions.lowest > versions.highest {
        return Err(DecodeError::BadVersions);
    }
    Ok(Frame::Hello(Hello { versions, token: Token(payload.token), epoch: payload.epoch.get() }))
}

fn welcome(payload: &WelcomePayload) -> Result<Frame<'static>, DecodeError> {
    if payload.zero.get() != 0 {
        return Err(DecodeError::NotZero { kind: kind::WELCOME });
    }
    Ok(Frame::Welcome(Welcome {
        version: payload.version.get(),
        server_id: ServerId(payload.server_id),
        pool_generation: PoolGeneration(payload.pool_generation.get()),
        npages: PageCount(payload.npages.get()),
        available: PageCount(payload.available.get()),
        quota: PageCount(payload.quota.get()),
        sends_received: SendCount(payload.sends_received.get()),
    }))
}

fn hello_payload(hello: &Hello) -> HelloPayload {
    HelloPayload {
        magic: MAGIC,
        lowest: hello.versions.lowest.into(),
        highest: hello.versions.highest.into(),
        zero: 0.into(),
        token: hello.token.0,
        epoch: hello.epoch.into(),
    }
}

fn welcome_payload(welcome: &Welcome) -> WelcomePayload {
    WelcomePayload {
        version: welcome.version.into(),
        zero: 0.into(),
        npages: welcome.npages.0.into(),
        available: welcome.available.0.into(),
        quota: welcome.quota.0.into(),
        server_id: welcome.server_id.0,
        pool_generation: welcome.pool_generation.0.into(),
        sends_received: welcome.sends_received.0.into(),
    }
}

/// Returns the header of a payload of `length` bytes.
fn header(kind: u8, [a, b, c]: [u32; 3], length: u16) -> Header {
    Header { kind, zero: 0, length: length.into(), a: a.into(), b: b.into(), c: c.into() }
}

fn put(out: &mut Vec<u8>, kind: u8, fields: [u32; 3], payload: &[u8]) {
    let length = u16::try_from(payload.len()).expect("a page is the longest payload");
    out.extend_from_slice(header(kind, fields, length).as_bytes());
    out.extend_from_slice(payload);
}
