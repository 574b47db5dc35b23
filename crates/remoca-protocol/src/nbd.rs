//! Constants and headers of the NBD protocol, for both of its sides: the frontend, and the store's client.
//!
//! From the NBD project's `doc/proto.md`. All numbers big-endian:
//! ```text
//!   option       "IHAVEOPT" | option u32 | length u32 | data
//!   option reply magic u64 | option u32 | reply u32 | length u32 | data
//!   request      magic u32 | flags u16 | command u16 | cookie u64 | offset u64 | length u32 | payload of a write
//!   simple reply magic u32 | error u32 | cookie u64 | payload of a read without error
//!   chunk        magic u32 | flags u16 | type u16 | cookie u64 | length u32 | payload
//! ```

pub const REQUEST_HEADER_LEN: usize = 28;
pub const REPLY_HEADER_LEN: usize = 16;
pub const OPTION_HEADER_LEN: usize = 16;
pub const OPTION_REPLY_HEADER_LEN: usize = 20;

pub const SERVER_MAGIC: u64 = 0x4E42_444D_4147_4943;
pub const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054;
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_E889_0455_65A9;
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
pub const REPLY_MAGIC: u32 = 0x6744_6698;
pub const CHUNK_MAGIC: u32 = 0x668E_33EF;

/// Maximum size, in bytes, of a payload that each side may assume the other to accept.
pub const PAYLOAD_MAX: u32 = 32 << 20;

pub const FLAG_FIXED_NEWSTYLE: u16 = 1;
pub const FLAG_NO_ZEROES: u16 = 2;

pub const OPTION_EXPORT_NAME: u32 = 1;
pub const OPTION_ABORT: u32 = 2;
pub const OPTION_LIST: u32 = 3;
pub const OPTION_INFO: u32 = 6;
pub const OPTION_GO: u32 = 7;
pub const OPTION_STRUCTURED_REPLY: u32 = 8;

pub const INFO_EXPORT: u16 = 0;
pub const INFO_NAME: u16 = 1;
pub const INFO_BLOCK_SIZE: u16 = 3;

pub const REPLY_ACK: u32 = 1;
pub const REPLY_SERVER: u32 = 2;
pub const REPLY_INFO: u32 = 3;
pub const REPLY_ERROR_BIT: u32 = 1 << 31;
pub const REPLY_UNSUPPORTED: u32 = REPLY_ERROR_BIT | 1;
pub const REPLY_INVALID: u32 = REPLY_ERROR_BIT | 3;
pub const REPLY_TLS_REQUIRED: u32 = REPLY_ERROR_BIT | 5;
pub const REPLY_UNKNOWN: u32 = REPLY_ERROR_BIT | 6;
pub const REPLY_TOO_BIG: u32 = REPLY_ERROR_BIT | 9;

/// Flag of the last chunk of a reply.
pub const CHUNK_DONE: u16 = 1;
pub const CHUNK_OFFSET_DATA: u16 = 1;
pub const CHUNK_ERROR: u16 = 1 << 15 | 1;

/// Capabilities of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportFlags(pub u16);

impl ExportFlags {
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const FLUSH: u16 = 1 << 2;
    pub const FUA: u16 = 1 << 3;
    pub const TRIM: u16 = 1 << 5;
    pub const WRITE_ZEROES: u16 = 1 << 6;
    pub const DONT_FRAGMENT: u16 = 1 << 7;
    pub const MULTI_CONNECTION: u16 = 1 << 8;

    pub fn has(self, flag: u16) -> bool {
        self.0 & flag != 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    WriteZeroes,
    /// Command that this crate does not know.
    Other(u16),
}

impl Command {
    fn code(self) -> u16 {
        match self {
            Command::Read => 0,
            Command::Write => 1,
            Command::Disconnect => 2,
            Command::Flush => 3,
            Command::Trim => 4,
            Command::WriteZeroes => 6,
            Command::Other(code) => code,
        }
    }

    fn from_code(code: u16) -> Self {
        let known = [Self::Read, Self::Write, Self::Disconnect, Self::Flush, Self::Trim, Self::WriteZeroes];
        known.into_iter().find(|command| command.code() == code).unwrap_or(Self::Other(code))
    }
}

/// Command flag: make the data durable before the reply.
pub const COMMAND_FUA: u16 = 1;
/// Command flag of write-zeroes: keep the space allocated.
pub const COMMAND_NO_HOLE: u16 = 2;
/// Command flag of a read: send all data in one chunk.
pub const COMMAND_DONT_FRAGMENT: u16 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub command: Command,
    pub flags: u16,
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
}

impl Request {
    pub fn encode(&self) -> [u8; REQUEST_HEADER_LEN] {
        let mut bytes = [0; REQUEST_HEADER_LEN];
        bytes[0..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.code().to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }

    /// Decodes a request header. Returns `None` if `bytes` are not a request header.
    pub fn decode(bytes: &[u8; REQUEST_HEADER_LEN]) -> Option<Self> {
        let mut fields = Fields(bytes);
        if fields.u32()? != REQUEST_MAGIC {
            return None;
        }
        let (flags, command) = (fields.u16()?, Command::from_code(fields.u16()?));
        Some(Self { command, flags, cookie: fields.u64()?, offset: fields.u64()?, len: fields.u32()? })
    }
}

/// Reader of big-endian numbers from the front of a byte slice.
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_be_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_be_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_be_bytes)
    }

    /// Returns the next `len` bytes, or `None` if fewer bytes are left.
    pub fn bytes(&mut self, len: u32) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(usize::try_from(len).ok()?)?;
        self.0 = rest;
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_layout_of_the_protocol() {
        let request = Request { command: Command::WriteZeroes, flags: 3, cookie: 0x0102, offset: 4096, len: 512 };
        let bytes = *b"\x25\x60\x95\x13\0\x03\0\x06\0\0\0\0\0\0\x01\x02\0\0\0\0\0\0\x10\0\0\0\x02\0";
        assert_eq!(request.encode(), bytes);
        assert_eq!(Request::decode(&bytes), Some(request));
        assert_eq!(Request::decode(&[0; REQUEST_HEADER_LEN]), None);
        for code in 0..20 {
            assert_eq!(Command::from_code(code).code(), code);
        }
    }
}
