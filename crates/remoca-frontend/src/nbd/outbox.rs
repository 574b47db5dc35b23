//! Bytes that wait to be sent to one client. Data are sent from the buffers in which they came.

use remoca_io::buffer::IoBuffer;
use remoca_protocol::nbd::{CHUNK_DONE, CHUNK_ERROR, CHUNK_MAGIC, CHUNK_OFFSET_DATA, REPLY_MAGIC};
use std::collections::VecDeque;
use std::io::IoSlice;

/// The most slices that are passed to one system call.
const SLICES_MAX: usize = 64;

enum Segment {
    Bytes(Vec<u8>),
    Data(IoBuffer),
    /// Headers and data that another program had queued.
    Passed(Vec<u8>),
}

impl Segment {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) | Self::Passed(bytes) => bytes,
            Self::Data(buffer) => buffer,
        }
    }
}

#[derive(Default)]
pub(super) struct Outbox {
    segments: VecDeque<Segment>,
    /// Number of bytes of the first segment that have been sent.
    sent: usize,
    /// Total bytes of the segments that hold no data.
    overhead: usize,
}

impl Outbox {
    /// Creates an outbox with the bytes that another program had queued.
    pub(super) fn with(passed: Vec<u8>) -> Self {
        let segments = (!passed.is_empty()).then_some(Segment::Passed(passed)).into_iter().collect();
        Self { segments, ..Self::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Returns whether no more answers may be added: `overhead_max` bytes that are not data wait to be sent, or `passed_max`
    /// bytes that another program had queued.
    pub(super) fn is_full(&self, overhead_max: usize, passed_max: usize) -> bool {
        let passed = match self.segments.front() {
            Some(Segment::Passed(bytes)) => bytes.len() - self.sent,
            Some(Segment::Bytes(_) | Segment::Data(_)) | None => 0,
        };
        self.overhead >= overhead_max || passed >= passed_max
    }

    /// Returns the number of queued bytes that are not data. Data have a limit of their own.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn overhead(&self) -> usize {
        self.overhead
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.overhead += bytes.len();
        match self.segments.back_mut() {
            Some(Segment::Bytes(last)) => last.extend_from_slice(bytes),
            Some(Segment::Data(_) | Segment::Passed(_)) | None => {
                self.segments.push_back(Segment::Bytes(bytes.to_vec()))
            }
        }
    }

    pub(super) fn push_data(&mut self, buffer: IoBuffer) {
        self.segments.push_back(Segment::Data(buffer));
    }

    pub(super) fn push_simple_reply(&mut self, cookie: u64, error: u32) {
        self.push(&REPLY_MAGIC.to_be_bytes());
        self.push(&error.to_be_bytes());
        self.push(&cookie.to_be_bytes());
    }

    /// Queues the header of a chunk with `len` bytes of data, which must follow.
    pub(super) fn push_data_chunk(&mut self, cookie: u64, offset: u64, len: u32, is_last: bool) {
        self.push_chunk_header(cookie, CHUNK_OFFSET_DATA, 8 + len, is_last);
        self.push(&offset.to_be_bytes());
    }

    pub(super) fn push_error_chunk(&mut self, cookie: u64, error: u32) {
        self.push_chunk_header(cookie, CHUNK_ERROR, 6, true);
        self.push(&error.to_be_bytes());
        // The message is empty.
        self.push(&[0; 2]);
    }

    fn push_chunk_header(&mut self, cookie: u64, kind: u16, len: u32, is_last: bool) {
        self.push(&CHUNK_MAGIC.to_be_bytes());
        self.push(&if is_last { CHUNK_DONE } else { 0 }.to_be_bytes());
        self.push(&kind.to_be_bytes());
        self.push(&cookie.to_be_bytes());
        self.push(&len.to_be_bytes());
    }

    /// Returns the next slices to send.
    pub(super) fn slices(&self) -> Vec<IoSlice<'_>> {
        let mut skip = self.sent;
        let mut slices = Vec::with_capacity(self.segments.len().min(SLICES_MAX));
        for segment in self.segments.iter().take(SLICES_MAX) {
            slices.push(IoSlice::new(&segment.bytes()[std::mem::take(&mut skip)..]));
        }
        slices
    }

    /// Returns all bytes that are queued.
    pub(super) fn pending(&self) -> impl Iterator<Item = &[u8]> {
        let skips = std::iter::once(self.sent).chain(std::iter::repeat(0));
        self.segments.iter().zip(skips).map(|(segment, skip)| &segment.bytes()[skip..])
    }

    /// Removes and returns all queued bytes.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn take_all(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        while !self.is_empty() {
            let slices: Vec<u8> = self.slices().iter().flat_map(|slice| slice.iter().copied()).collect();
            self.consume(slices.len());
            bytes.extend(slices);
        }
        bytes
    }

    /// Removes `count` bytes of the slices, which were sent.
    pub(super) fn consume(&mut self, mut count: usize) {
        while let Some(first) = self.segments.front() {
            let left = first.bytes().len() - self.sent;
            if count < left {
                self.sent += count;
                return;
            }
            count -= left;
            self.sent = 0;
            if let Some(Segment::Bytes(bytes)) = self.segments.pop_front() {
                self.overhead -= bytes.len();
            }
        }
        assert!(count == 0, "more bytes sent than there were");
    }
}
