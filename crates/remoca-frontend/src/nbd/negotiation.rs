//! The server's side of the negotiation, without I/O: from the greeting to the choice of an export.
//!
//! Owned by `server`, which moves the bytes and gives up on clients that take too long. The protocol is fixed newstyle.
//! Known options are EXPORT_NAME, ABORT, LIST, INFO, GO and STRUCTURED_REPLY; all others are declined as unsupported.
//! No option is parsed while answers wait to be sent, so the answers to a client that does not read them are bounded.

use super::offer::Export;
use super::outbox::Outbox;
use super::staging::Staging;
use remoca_io::sizes;
use remoca_protocol::nbd::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, Fields, INFO_BLOCK_SIZE, INFO_EXPORT, INFO_NAME, OPTION_ABORT,
    OPTION_EXPORT_NAME, OPTION_GO, OPTION_HEADER_LEN, OPTION_INFO, OPTION_LIST, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    OPTION_STRUCTURED_REPLY, PAYLOAD_MAX, REPLY_ACK, REPLY_INFO, REPLY_INVALID, REPLY_SERVER, REPLY_TOO_BIG,
    REPLY_UNKNOWN, REPLY_UNSUPPORTED, SERVER_MAGIC,
};

/// Longest name of an export, in bytes.
pub const EXPORT_NAME_LEN_MAX: usize = 255;
/// Longest data of an option: a name of the protocol's 4096 bytes, and some information requests.
const OPTION_LEN_MAX: u32 = 4096 + 256;
const RESERVED_LEN: usize = 124;

/// The outcome of the negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// Index of the export.
    pub(super) export: usize,
    pub(super) structured_replies: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// More bytes are needed, or queued answers have to be sent first.
    Wait,
    Chosen(Choice),
    /// The client left or broke the protocol: send what is queued, and close.
    End,
}

enum Stage {
    Flags,
    Option,
    Data { option: u32, len: u32 },
    Skip { option: u32, left: u32 },
}

/// The negotiation with one client.
pub(super) struct Negotiation {
    stage: Stage,
    no_zeroes: bool,
    structured_replies: bool,
    pub(super) staging: Staging,
    pub(super) outbox: Outbox,
}

impl Negotiation {
    pub(super) fn new() -> Self {
        let mut outbox = Outbox::default();
        outbox.push(&SERVER_MAGIC.to_be_bytes());
        outbox.push(&OPTION_MAGIC.to_be_bytes());
        outbox.push(&(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
        Self { stage: Stage::Flags, no_zeroes: false, structured_replies: false, staging: Staging::new(), outbox }
    }

    /// Advances as far as the received bytes allow.
    pub(super) fn advance(&mut self, exports: &[Export]) -> Step {
        loop {
            if let Some(step) = self.step(exports) {
                return step;
            }
        }
    }

    /// Takes one step of the negotiation. Returns `None` if the next step can follow at once.
    fn step(&mut self, exports: &[Export]) -> Option<Step> {
        match self.stage {
            Stage::Flags => {
                let Some(flags) = self.staging.take().map(u32::from_be_bytes) else { return Some(Step::Wait) };
                if flags & !u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) != 0 {
                    return Some(Step::End);
                }
                self.no_zeroes = flags & u32::from(FLAG_NO_ZEROES) != 0;
                self.stage = Stage::Option;
            }
            Stage::Option if !self.outbox.is_empty() => return Some(Step::Wait),
            Stage::Option => {
                let Some(header) = self.staging.take::<OPTION_HEADER_LEN>() else { return Some(Step::Wait) };
                let mut fields = Fields(&header);
                let is_option = fields.u64() == Some(OPTION_MAGIC);
                let Some((option, len)) = fields.u32().zip(fields.u32()).filter(|_| is_option) else {
                    return Some(Step::End);
                };
                self.stage = match len {
                    0..=OPTION_LEN_MAX => Stage::Data { option, len },
                    _ => Stage::Skip { option, left: len },
                };
            }
            Stage::Skip { option, left: 0 } => {
                self.reply(option, REPLY_TOO_BIG, &[]);
                self.stage = Stage::Option;
            }
            Stage::Skip { option, left } => {
                if self.staging.pending().is_empty() {
                    return Some(Step::Wait);
                }
                self.stage = Stage::Skip { option, left: self.staging.skip(left) };
            }
            Stage::Data { option, len } => {
                let data = self.staging.pending().get(..len as usize).map(<[u8]>::to_vec);
                let Some(data) = data else { return Some(Step::Wait) };
                self.staging.consume(data.len());
                self.stage = Stage::Option;
                return self.obey(option, &data, exports);
            }
        }
        None
    }

    fn obey(&mut self, option: u32, data: &[u8], exports: &[Export]) -> Option<Step> {
        match option {
            OPTION_EXPORT_NAME => return Some(self.enter(data, exports)),
            OPTION_ABORT => {
                self.reply(option, REPLY_ACK, &[]);
                return Some(Step::End);
            }
            OPTION_GO | OPTION_INFO => return self.inform(option, data, exports),
            OPTION_LIST | OPTION_STRUCTURED_REPLY if !data.is_empty() => self.reply(option, REPLY_INVALID, &[]),
            OPTION_LIST => {
                for export in exports {
                    let name = export.name.as_bytes();
                    let len = sizes::short(name.len());
                    self.reply(option, REPLY_SERVER, &[&len.to_be_bytes(), name].concat());
                }
                self.reply(option, REPLY_ACK, &[]);
            }
            OPTION_STRUCTURED_REPLY => {
                self.structured_replies = true;
                self.reply(option, REPLY_ACK, &[]);
            }
            _ => self.reply(option, REPLY_UNSUPPORTED, &[]),
        }
        None
    }

    /// Enters an export by EXPORT_NAME. This old option has no error reply: an unknown name ends the connection.
    fn enter(&mut self, name: &[u8], exports: &[Export]) -> Step {
        let Some(export) = find(name, exports) else { return Step::End };
        let geometry = &exports[export].geometry;
        self.outbox.push(&geometry.size.to_be_bytes());
        self.outbox.push(&geometry.flags(self.structured_replies).0.to_be_bytes());
        if !self.no_zeroes {
            self.outbox.push(&[0; RESERVED_LEN]);
        }
        self.chosen(export)
    }

    fn inform(&mut self, option: u32, data: &[u8], exports: &[Export]) -> Option<Step> {
        let Some((name, wants_name)) = parse_info(data) else {
            self.reply(option, REPLY_INVALID, &[]);
            return None;
        };
        let Some(index) = find(name, exports) else {
            self.reply(option, REPLY_UNKNOWN, &[]);
            return None;
        };
        let Export { name, geometry, .. } = &exports[index];
        let info = |kind: u16, fields: &[&[u8]]| [&kind.to_be_bytes()[..], &fields.concat()].concat();
        let flags = geometry.flags(self.structured_replies).0;
        self.reply(option, REPLY_INFO, &info(INFO_EXPORT, &[&geometry.size.to_be_bytes(), &flags.to_be_bytes()]));
        let sizes = [geometry.block, geometry.preferred_block, PAYLOAD_MAX].map(u32::to_be_bytes);
        self.reply(option, REPLY_INFO, &info(INFO_BLOCK_SIZE, &[&sizes.concat()]));
        if wants_name {
            self.reply(option, REPLY_INFO, &info(INFO_NAME, &[name.as_bytes()]));
        }
        self.reply(option, REPLY_ACK, &[]);
        (option == OPTION_GO).then(|| self.chosen(index))
    }

    fn chosen(&self, export: usize) -> Step {
        Step::Chosen(Choice { export, structured_replies: self.structured_replies })
    }

    fn reply(&mut self, option: u32, reply: u32, data: &[u8]) {
        self.outbox.push(&OPTION_REPLY_MAGIC.to_be_bytes());
        self.outbox.push(&option.to_be_bytes());
        self.outbox.push(&reply.to_be_bytes());
        self.outbox.push(&sizes::short(data.len()).to_be_bytes());
        self.outbox.push(data);
    }
}

/// Returns the index of the export with that name, or `None` if there is none. An empty name selects the only disk, if
/// there is exactly one.
fn find(name: &[u8], exports: &[Export]) -> Option<usize> {
    if !name.is_empty() {
        return exports.iter().position(|export| export.name.as_bytes() == name);
    }
    let mut disks = exports.iter().enumerate().filter(|(_, export)| export.is_disk());
    let (first, second) = (disks.next(), disks.next());
    first.filter(|_| second.is_none()).map(|(index, _)| index)
}

/// Returns the name of the export in an INFO or GO option, and whether the client asks for the name. Returns `None` if
/// the data are malformed.
fn parse_info(data: &[u8]) -> Option<(&[u8], bool)> {
    let mut fields = Fields(data);
    let len = fields.u32()?;
    let name = fields.bytes(len)?;
    let count = fields.u16()?;
    let wanted = (0..count).map(|_| fields.u16()).collect::<Option<Vec<_>>>()?;
    fields.0.is_empty().then_some((name, wanted.contains(&INFO_NAME)))
}
