//! Our own format ([`remoca_protocol::trace`]).

use super::batch::{Batch, Parser};
use crate::error::{ErrorKind, TraceError};
use crate::input::Input;
use crate::limits::check;
use remoca_protocol::trace::{FRAME_HEADER_BYTES, FrameHeader, HEAD_BYTES, NotATrace, check_head};

#[derive(Default)]
pub(super) struct Own {
    has_begun: bool,
}

fn wrong(error: NotATrace) -> ErrorKind {
    match error {
        NotATrace::CutShort => ErrorKind::CutShort,
        other => ErrorKind::Wrong(other.to_string()),
    }
}

impl Parser for Own {
    fn parse(&mut self, input: &mut Input, batch: &mut Batch) -> Result<bool, TraceError> {
        if !self.has_begun {
            let Some(head) = input.peek(HEAD_BYTES)?.first_chunk() else {
                return Err(input.error(ErrorKind::CutShort));
            };
            check_head(head).map_err(|error| input.error(wrong(error)))?;
            input.take(HEAD_BYTES)?;
            self.has_begun = true;
        }
        let header = match input.peek(FRAME_HEADER_BYTES)? {
            [] => return Ok(false),
            bytes => bytes.first_chunk().ok_or(NotATrace::CutShort).and_then(FrameHeader::parse),
        };
        let header = header.map_err(|error| input.error(wrong(error)))?;
        let length = FRAME_HEADER_BYTES + header.length;
        let frame = input.peek(length)?;
        if frame.len() < length {
            return Err(input.error(ErrorKind::CutShort));
        }
        let decoded = header.decode(&frame[FRAME_HEADER_BYTES..], &mut batch.records);
        decoded.map_err(|error| input.error(wrong(error)))?;
        if let Some((at, what)) =
            batch.records.iter().enumerate().find_map(|(at, record)| Some((at, check(*record).err()?)))
        {
            batch.records.truncate(at);
            return Err(input.error(ErrorKind::Wrong(format!("record {} of the frame there: {what}", at + 1))));
        }
        input.take(length)?;
        (batch.lost, batch.sees_evictions) = (header.lost.into(), header.sees_evictions);
        Ok(true)
    }
}
