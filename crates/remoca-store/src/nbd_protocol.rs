//! The client's side of the NBD protocol: the handshake as a state machine, and replies. No sockets, no clocks.
//!
//! Called by `nbd_link`. From the NBD project's `doc/proto.md`: fixed newstyle, NBD_OPT_GO, simple replies. Everything
//! received from the server is bounded and checked; invalid bytes are an error, never a panic. Constants and headers
//! are in [`remoca_protocol::nbd`].

use remoca_protocol::handover::PassedExport;
pub(super) use remoca_protocol::nbd::{
    COMMAND_FUA, COMMAND_NO_HOLE, Command, ExportFlags, REPLY_HEADER_LEN, REQUEST_HEADER_LEN, Request,
};
use remoca_protocol::nbd::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, Fields, INFO_BLOCK_SIZE, INFO_EXPORT, OPTION_GO, OPTION_MAGIC,
    OPTION_REPLY_HEADER_LEN, OPTION_REPLY_MAGIC, PAYLOAD_MAX, REPLY_ACK, REPLY_ERROR_BIT, REPLY_INFO, REPLY_MAGIC,
    REPLY_TLS_REQUIRED, REPLY_UNKNOWN, REPLY_UNSUPPORTED, SERVER_MAGIC,
};

const GREETING_LEN: usize = 18;
/// Longest answer to an option that is accepted, in bytes. Real answers have a few dozen bytes.
const OPTION_REPLY_LEN_MAX: usize = 16 * 1024;
/// The most answers to one option; more break the protocol.
const OPTION_REPLIES_MAX: u32 = 64;
/// The properties of an export, as the server offers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Export {
    pub(super) size: u64,
    pub(super) flags: ExportFlags,
    /// Requests are multiples of this many bytes (a power of two).
    pub(super) block_min: u32,
    pub(super) block_preferred: u32,
    /// Longest payload of a read or write.
    pub(super) payload_max: u32,
}

impl From<&PassedExport> for Export {
    fn from(passed: &PassedExport) -> Self {
        let PassedExport { size, flags, block_min, block_preferred, payload_max, .. } = *passed;
        Self { size, flags: ExportFlags(flags), block_min, block_preferred, payload_max }
    }
}

impl From<&Export> for PassedExport {
    fn from(export: &Export) -> Self {
        let Export { size, flags, block_min, block_preferred, payload_max } = *export;
        let (addresses, flush_failed, unflushed) = (Vec::new(), None, 0);
        Self { addresses, flush_failed, unflushed, size, flags: flags.0, block_min, block_preferred, payload_max }
    }
}

/// Why a handshake failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error("what answers there is not an NBD server")]
    NotNbd,
    #[error("the NBD server is too old: it does not speak the fixed newstyle protocol with NBD_OPT_GO")]
    TooOld,
    #[error("the NBD server has no export {name:?}{server_says}")]
    ExportMissing { name: String, server_says: String },
    #[error("the NBD server wants TLS, which is not supported: offer the export without, through a tunnel if need be")]
    TlsRequired,
    #[error("the NBD server refuses the export {name:?} (error {code:#x}){server_says}")]
    Refused { name: String, code: u32, server_says: String },
    #[error("the NBD server breaks the protocol: {0}")]
    Malformed(&'static str),
}

const TOO_SHORT: HandshakeError = HandshakeError::Malformed("an answer is too short");

/// The client's side of the negotiation for one export.
#[derive(Debug)]
pub(super) struct Handshake {
    export_name: String,
    stage: HandshakeStage,
    replies: u32,
    size_and_flags: Option<(u64, ExportFlags)>,
    block_sizes: Option<[u32; 3]>,
}

#[derive(Debug)]
enum HandshakeStage {
    Greeting,
    OptionReply,
}

impl Handshake {
    pub(super) fn new(export_name: &str) -> Self {
        Self {
            export_name: export_name.to_owned(),
            stage: HandshakeStage::Greeting,
            replies: 0,
            size_and_flags: None,
            block_sizes: None,
        }
    }

    /// Consumes complete messages from the start of `input`, and appends bytes to send to `output`. Returns the export
    /// when the negotiation is over, or `None` as long as more input is needed.
    pub(super) fn advance(
        &mut self,
        input: &mut Vec<u8>,
        output: &mut Vec<u8>,
    ) -> Result<Option<Export>, HandshakeError> {
        loop {
            let (consumed, export) = match self.stage {
                HandshakeStage::Greeting if input.len() < GREETING_LEN => return Ok(None),
                HandshakeStage::Greeting => {
                    self.handle_greeting(input, output)?;
                    self.stage = HandshakeStage::OptionReply;
                    (GREETING_LEN, None)
                }
                HandshakeStage::OptionReply => {
                    let Some((code, data)) = split_option_reply(input)? else { return Ok(None) };
                    (OPTION_REPLY_HEADER_LEN + data.len(), self.handle_option_reply(code, data)?)
                }
            };
            input.drain(..consumed);
            if export.is_some() {
                return Ok(export);
            }
        }
    }

    fn handle_greeting(&self, input: &[u8], output: &mut Vec<u8>) -> Result<(), HandshakeError> {
        let mut fields = Fields(input);
        if fields.u64() != Some(SERVER_MAGIC) {
            return Err(HandshakeError::NotNbd);
        }
        let (option_magic, flags) = (fields.u64().ok_or(TOO_SHORT)?, fields.u16().ok_or(TOO_SHORT)?);
        if option_magic != OPTION_MAGIC || flags & FLAG_FIXED_NEWSTYLE == 0 {
            return Err(HandshakeError::TooOld);
        }
        let name = self.export_name.as_bytes();
        let name_len =
            u32::try_from(name.len()).map_err(|_| HandshakeError::Malformed("the export name is too long"))?;
        output.extend(u32::from(flags & (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES)).to_be_bytes());
        output.extend(OPTION_MAGIC.to_be_bytes());
        output.extend(OPTION_GO.to_be_bytes());
        // Name length, name, number of information requests, one request.
        output.extend((4 + name_len + 2 + 2).to_be_bytes());
        output.extend(name_len.to_be_bytes());
        output.extend(name);
        output.extend(1_u16.to_be_bytes());
        output.extend(INFO_BLOCK_SIZE.to_be_bytes());
        Ok(())
    }

    fn handle_option_reply(&mut self, code: u32, data: &[u8]) -> Result<Option<Export>, HandshakeError> {
        self.replies += 1;
        if self.replies > OPTION_REPLIES_MAX {
            return Err(HandshakeError::Malformed("it answers one option without end"));
        }
        match code {
            REPLY_ACK => self.agreed().map(Some),
            REPLY_INFO => self.handle_info(data).map(|()| None),
            _ if code & REPLY_ERROR_BIT != 0 => Err(self.explain_refusal(code, data)),
            _ => Err(HandshakeError::Malformed("an unknown answer to an option")),
        }
    }

    fn handle_info(&mut self, data: &[u8]) -> Result<(), HandshakeError> {
        let mut fields = Fields(data);
        match fields.u16().ok_or(TOO_SHORT)? {
            INFO_EXPORT => {
                let (size, flags) = fields.u64().zip(fields.u16()).ok_or(TOO_SHORT)?;
                self.size_and_flags = Some((size, ExportFlags(flags)));
            }
            INFO_BLOCK_SIZE => {
                let mut size = || fields.u32().ok_or(TOO_SHORT);
                self.block_sizes = Some([size()?, size()?, size()?]);
            }
            // A server may send information that was not requested.
            _ => {}
        }
        Ok(())
    }

    fn agreed(&self) -> Result<Export, HandshakeError> {
        let (size, flags) = self.size_and_flags.ok_or(HandshakeError::Malformed("it gives no size"))?;
        if i64::try_from(size).is_err() {
            return Err(HandshakeError::Malformed("the export's size is impossible"));
        }
        let [block_min, block_preferred, block_max] = self.block_sizes.unwrap_or([1, 4096, PAYLOAD_MAX]);
        let is_sound = block_min.is_power_of_two()
            && block_preferred.is_power_of_two()
            && block_preferred >= block_min
            && block_max >= block_preferred.max(block_min);
        if !is_sound {
            return Err(HandshakeError::Malformed("the export's block sizes are impossible"));
        }
        Ok(Export { size, flags, block_min, block_preferred, payload_max: block_max.min(PAYLOAD_MAX) })
    }

    fn explain_refusal(&self, code: u32, data: &[u8]) -> HandshakeError {
        let name = self.export_name.clone();
        let says = String::from_utf8_lossy(data.get(..200).unwrap_or(data)).escape_debug().to_string();
        let server_says = if says.is_empty() { says } else { format!(": {says}") };
        match code {
            REPLY_UNSUPPORTED => HandshakeError::TooOld,
            REPLY_TLS_REQUIRED => HandshakeError::TlsRequired,
            REPLY_UNKNOWN => HandshakeError::ExportMissing { name, server_says },
            _ => HandshakeError::Refused { name, code, server_says },
        }
    }
}

/// Returns the code and data of the option reply at the start of `input`, or `None` if it is not complete.
fn split_option_reply(input: &[u8]) -> Result<Option<(u32, &[u8])>, HandshakeError> {
    let Some((header, rest)) = input.split_at_checked(OPTION_REPLY_HEADER_LEN) else { return Ok(None) };
    let mut fields = Fields(header);
    let (magic, option) = (fields.u64(), fields.u32());
    let (code, len) = fields.u32().zip(fields.u32()).ok_or(TOO_SHORT)?;
    if magic != Some(OPTION_REPLY_MAGIC) || option != Some(OPTION_GO) {
        return Err(HandshakeError::Malformed("an answer to an option that was not sent"));
    }
    let len = len as usize;
    if len > OPTION_REPLY_LEN_MAX {
        return Err(HandshakeError::Malformed("an answer to an option is too long"));
    }
    Ok(rest.get(..len).map(|data| (code, data)))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) cookie: u64,
    /// The error number of this system, or `None` for success.
    pub(super) errno: Option<i32>,
}

impl Reply {
    /// Decodes a simple reply. Returns `None` if the bytes are not a valid simple reply.
    pub(super) fn decode(bytes: &[u8; REPLY_HEADER_LEN]) -> Option<Reply> {
        let mut fields = Fields(bytes);
        let (magic, error, cookie) = (fields.u32()?, fields.u32()?, fields.u64()?);
        (magic == REPLY_MAGIC).then(|| Reply { cookie, errno: errno_of(error) })
    }
}

/// Returns Linux's error number for an error number of the protocol, or `None` for success. The protocol's numbers are
/// the same as Linux's, but only these are defined.
fn errno_of(error: u32) -> Option<i32> {
    Some(match error {
        0 => return None,
        1 => libc::EPERM,
        12 => libc::ENOMEM,
        22 => libc::EINVAL,
        28 => libc::ENOSPC,
        75 => libc::EOVERFLOW,
        95 => libc::EOPNOTSUPP,
        108 => libc::ESHUTDOWN,
        _ => libc::EIO,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn greeting() -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(SERVER_MAGIC.to_be_bytes());
        bytes.extend(OPTION_MAGIC.to_be_bytes());
        bytes.extend(3_u16.to_be_bytes());
        bytes
    }

    fn option_reply(code: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(OPTION_REPLY_MAGIC.to_be_bytes());
        bytes.extend(OPTION_GO.to_be_bytes());
        bytes.extend(code.to_be_bytes());
        bytes.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
        bytes.extend(data);
        bytes
    }

    fn export_info(size: u64, flags: u16) -> Vec<u8> {
        let data = [&INFO_EXPORT.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat();
        option_reply(REPLY_INFO, &data)
    }

    fn block_info(sizes: [u32; 3]) -> Vec<u8> {
        let mut data = INFO_BLOCK_SIZE.to_be_bytes().to_vec();
        data.extend(sizes.iter().flat_map(|size| size.to_be_bytes()));
        option_reply(REPLY_INFO, &data)
    }

    /// Feeds `bytes` in pieces of `piece` bytes.
    fn negotiate(bytes: &[u8], piece: usize) -> (Result<Option<Export>, HandshakeError>, Vec<u8>) {
        let (mut handshake, mut input, mut output) = (Handshake::new("vm"), Vec::new(), Vec::new());
        for part in bytes.chunks(piece) {
            input.extend(part);
            match handshake.advance(&mut input, &mut output) {
                Ok(None) => {}
                outcome => return (outcome, output),
            }
        }
        (Ok(None), output)
    }

    #[test]
    fn a_handshake_agrees_however_its_bytes_arrive() {
        let server =
            [greeting(), export_info(1 << 30, 0x0D), block_info([512, 4096, 1 << 20]), option_reply(REPLY_ACK, &[])];
        let export = Export {
            size: 1 << 30,
            flags: ExportFlags(0x0D),
            block_min: 512,
            block_preferred: 4096,
            payload_max: 1 << 20,
        };
        for piece in [1, 7, 20, 1000] {
            let (outcome, output) = negotiate(&server.concat(), piece);
            assert_eq!(outcome, Ok(Some(export)));
            let expected = b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x0A\0\0\0\x02vm\0\x01\0\x03";
            assert_eq!(output, expected);
        }
    }

    #[test]
    fn a_server_without_block_sizes_gets_the_defaults_of_the_protocol() {
        let server = [greeting(), export_info(512, 1), option_reply(REPLY_ACK, &[])].concat();
        let export = negotiate(&server, 1000).0.unwrap().unwrap();
        assert_eq!((export.block_min, export.block_preferred, export.payload_max), (1, 4096, 32 << 20));
    }

    #[test]
    fn bad_servers_are_told_apart() {
        let after_greeting = |replies: &[Vec<u8>]| [greeting(), replies.concat()].concat();
        let ack = || option_reply(REPLY_ACK, &[]);
        let mut no_option_magic = greeting();
        no_option_magic[9] = 0;
        let mut too_long = option_reply(REPLY_INFO, &[]);
        too_long[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
        let endless: Vec<Vec<u8>> = (0..100).map(|_| option_reply(REPLY_INFO, &[0, 9])).collect();
        let missing = |says: &str| HandshakeError::ExportMissing { name: "vm".into(), server_says: says.into() };
        for (bytes, expected) in [
            (b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), HandshakeError::NotNbd),
            (no_option_magic, HandshakeError::TooOld),
            (after_greeting(&[option_reply(REPLY_ERROR_BIT | 1, b"")]), HandshakeError::TooOld),
            (after_greeting(&[option_reply(REPLY_ERROR_BIT | 5, b"")]), HandshakeError::TlsRequired),
            (after_greeting(&[option_reply(REPLY_ERROR_BIT | 6, b"no\x1b")]), missing(": no\\u{1b}")),
            (
                after_greeting(&[option_reply(REPLY_ERROR_BIT | 2, b"")]),
                HandshakeError::Refused { name: "vm".into(), code: REPLY_ERROR_BIT | 2, server_says: String::new() },
            ),
            (after_greeting(&[ack()]), HandshakeError::Malformed("it gives no size")),
            (after_greeting(&[option_reply(9, b"")]), HandshakeError::Malformed("an unknown answer to an option")),
            (after_greeting(&[option_reply(REPLY_INFO, &[0])]), HandshakeError::Malformed("an answer is too short")),
            (after_greeting(&[too_long]), HandshakeError::Malformed("an answer to an option is too long")),
            (after_greeting(&endless), HandshakeError::Malformed("it answers one option without end")),
            (
                after_greeting(&[export_info(u64::MAX, 1), ack()]),
                HandshakeError::Malformed("the export's size is impossible"),
            ),
            (
                after_greeting(&[export_info(512, 1), block_info([0, 4096, 4096]), ack()]),
                HandshakeError::Malformed("the export's block sizes are impossible"),
            ),
            (
                after_greeting(&[export_info(512, 1), block_info([4096, 512, 1 << 20]), ack()]),
                HandshakeError::Malformed("the export's block sizes are impossible"),
            ),
            (after_greeting(&[vec![0; 20]]), HandshakeError::Malformed("an answer to an option that was not sent")),
        ] {
            assert_eq!(negotiate(&bytes, 1000).0, Err(expected));
        }
    }

    #[test]
    fn replies_are_read_and_foreign_ones_refused() {
        let good = b"\x67\x44\x66\x98\0\0\0\x1C\0\0\0\0\0\0\0\x09";
        assert_eq!(Reply::decode(good), Some(Reply { cookie: 9, errno: Some(libc::ENOSPC) }));
        let structured = b"\x66\x8E\x33\xEF\0\0\0\x1C\0\0\0\0\0\0\0\x09";
        assert_eq!(Reply::decode(structured), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_handshake_panic_or_hoard(
            honest in any::<bool>(), bytes in prop::collection::vec(any::<u8>(), 0..400), flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4)
        ) {
            let mut server = if honest {
                [greeting(), export_info(1 << 20, 0x0D), block_info([1, 4096, 1 << 20]), option_reply(REPLY_ACK, &[])].concat()
            } else {
                [greeting(), bytes].concat()
            };
            for (at, value) in flips {
                let at = at.index(server.len());
                server[at] = value;
            }
            let (outcome, output) = negotiate(&server, 13);
            prop_assert!(output.len() < 100);
            if let Ok(Some(export)) = outcome {
                prop_assert!(export.payload_max >= export.block_min && export.block_min.is_power_of_two());
            }
        }
    }
}
