//! How to request a page from each server, and how to store one.

use anyhow::{Result, bail, ensure};
use remoca_protocol::{Frame, HEADER_BYTES, PAGE_SIZE, RequestId, SlotIndex, decode};

/// The protocol of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// Eight bytes (operation, page number); the reply is the bare page. See `raw.rs`.
    Raw,
    /// The same, but each page of the reply follows a header as long as the memory server's.
    RawHeaders,
    /// The memory server's protocol.
    Remoca,
    /// memcached's meta protocol.
    Memcached,
    /// RESP.
    Redis,
}

/// First word of a raw message.
pub(crate) const RAW_GET: u32 = 1;
pub(crate) const RAW_SET: u32 = 2;
pub(crate) const RAW_GET_WITH_HEADER: u32 = 3;
/// Length of the header before a page, in bytes: that of a frame of the memory server.
pub(crate) const RAW_HEADER: usize = HEADER_BYTES;

/// Position of a reply and its page in the bytes received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reply {
    /// Length of the whole reply in bytes.
    pub(crate) length: usize,
    /// Offset of the page in the reply.
    pub(crate) page_at: usize,
}

impl Dialect {
    /// Appends a request for a page; `slot` is its number in the pool, or its key.
    pub(crate) fn put_get(self, slot: u32, out: &mut Vec<u8>) {
        match self {
            Self::Raw | Self::RawHeaders => {
                let operation = if self == Self::Raw { RAW_GET } else { RAW_GET_WITH_HEADER };
                out.extend(operation.to_le_bytes());
                out.extend(slot.to_le_bytes());
            }
            Self::Remoca => Frame::Request { request: RequestId(slot), slot: SlotIndex(slot) }.encode(out),
            Self::Memcached => {
                out.extend(b"mg ");
                out.extend(key(slot));
                out.extend(b" v\r\n");
            }
            Self::Redis => {
                out.extend(b"*2\r\n$3\r\nGET\r\n$8\r\n");
                out.extend(key(slot));
                out.extend(b"\r\n");
            }
        }
    }

    /// Returns the reply that `bytes` begin with, or `None` if it is not complete yet. Returns an error for an
    /// unexpected reply.
    pub(crate) fn take_page(self, slot: u32, bytes: &[u8]) -> Result<Option<Reply>> {
        match self {
            Self::Raw => Ok((bytes.len() >= PAGE_SIZE).then_some(Reply { length: PAGE_SIZE, page_at: 0 })),
            Self::RawHeaders => {
                let length = RAW_HEADER + PAGE_SIZE;
                let Some(reply) = bytes.get(..length) else { return Ok(None) };
                ensure!(reply[..RAW_HEADER] == raw_header(slot), "the header is not that of page {slot}");
                Ok(Some(Reply { length, page_at: RAW_HEADER }))
            }
            Self::Remoca => match decode(bytes)? {
                Some((Frame::SendPage { request, slot: of, .. }, length)) => {
                    ensure!((request.0, of.0) == (slot, slot), "the reply is for slot {}, not {slot}", of.0);
                    Ok(Some(Reply { length, page_at: length - PAGE_SIZE }))
                }
                Some((other, _)) => bail!("the server sent {other:?} instead of page {slot}"),
                None => Ok(None),
            },
            Self::Memcached => framed(b"VA 4096\r\n", bytes),
            Self::Redis => framed(b"$4096\r\n", bytes),
        }
    }

    /// Appends a request that stores a page.
    pub(crate) fn put_set(self, slot: u32, page: &[u8; PAGE_SIZE], out: &mut Vec<u8>) {
        match self {
            Self::Raw | Self::RawHeaders => {
                out.extend(RAW_SET.to_le_bytes());
                out.extend(slot.to_le_bytes());
                out.extend(page);
            }
            Self::Remoca => Frame::SendPage { request: RequestId(0), slot: SlotIndex(slot), page }.encode(out),
            Self::Memcached => {
                out.extend(b"ms ");
                out.extend(key(slot));
                out.extend(b" 4096\r\n");
                out.extend(page);
                out.extend(b"\r\n");
            }
            Self::Redis => {
                out.extend(b"*3\r\n$3\r\nSET\r\n$8\r\n");
                out.extend(key(slot));
                out.extend(b"\r\n$4096\r\n");
                out.extend(page);
                out.extend(b"\r\n");
            }
        }
    }

    /// Returns the server's answer to a stored page.
    pub(crate) fn stored(self) -> &'static [u8] {
        match self {
            Self::Raw | Self::RawHeaders | Self::Remoca => b"",
            Self::Memcached => b"HD\r\n",
            Self::Redis => b"+OK\r\n",
        }
    }
}

/// Returns the header that the raw server sends before a page: kind, length, and number of the page.
pub(crate) fn raw_header(slot: u32) -> [u8; RAW_HEADER] {
    let mut header = [0; RAW_HEADER];
    header[..4].copy_from_slice(&RAW_GET_WITH_HEADER.to_le_bytes());
    header[4..8].copy_from_slice(&4096_u32.to_le_bytes());
    header[8..12].copy_from_slice(&slot.to_le_bytes());
    header
}

/// Returns the key of a page: eight hexadecimal digits.
fn key(slot: u32) -> [u8; 8] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    std::array::from_fn(|place| DIGITS[(slot >> (28 - 4 * place) & 15) as usize])
}

/// Returns the position of a page between `before` and an end of line, or `None` if the reply is not complete yet.
fn framed(before: &[u8], bytes: &[u8]) -> Result<Option<Reply>> {
    let seen = before.len().min(bytes.len());
    ensure!(bytes[..seen] == before[..seen], "unexpected reply: {:?}", String::from_utf8_lossy(&bytes[..seen]));
    let length = before.len() + PAGE_SIZE + 2;
    Ok((bytes.len() >= length).then_some(Reply { length, page_at: before.len() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_the_number() {
        assert_eq!(&key(0x0123_abcd), b"0123abcd");
        assert_eq!(&key(0), b"00000000");
    }

    #[test]
    fn the_raw_header_is_as_long_as_ours() {
        let mut frame = Vec::new();
        Frame::SendPage { request: RequestId(5), slot: SlotIndex(5), page: &[7; PAGE_SIZE] }.encode(&mut frame);
        assert_eq!(frame.len(), RAW_HEADER + PAGE_SIZE);
    }

    #[test]
    fn replies_are_taken_whole_or_not_at_all() {
        let page = [7; PAGE_SIZE];
        let mut frame = Vec::new();
        Frame::SendPage { request: RequestId(5), slot: SlotIndex(5), page: &page }.encode(&mut frame);
        let with = |before: &[u8], after: &[u8]| [before, &page, after].concat();
        let replies = [
            (Dialect::Raw, with(b"", b"")),
            (Dialect::RawHeaders, with(&raw_header(5), b"")),
            (Dialect::Remoca, frame),
            (Dialect::Memcached, with(b"VA 4096\r\n", b"\r\n")),
            (Dialect::Redis, with(b"$4096\r\n", b"\r\n")),
        ];
        for (dialect, bytes) in replies {
            for cut in [0, 1, bytes.len() - 1] {
                assert!(dialect.take_page(5, &bytes[..cut]).is_ok_and(|reply| reply.is_none()), "{dialect:?}");
            }
            let reply = dialect.take_page(5, &bytes).ok().flatten().expect("whole");
            assert_eq!(reply.length, bytes.len());
            assert_eq!(bytes[reply.page_at..reply.page_at + PAGE_SIZE], page);
        }
        assert!(Dialect::RawHeaders.take_page(5, &with(&raw_header(6), b"")).is_err());
        assert!(Dialect::Memcached.take_page(5, b"EN\r\n").is_err());
        assert!(Dialect::Redis.take_page(5, b"$-1\r\n").is_err());
    }
}
