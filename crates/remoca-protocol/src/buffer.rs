//! A receive buffer of fixed size that frames are decoded from in place.
//!
//! The owner of a socket reads into [`ReceiveBuffer::space`], reports the number of bytes with
//! [`ReceiveBuffer::filled`], and takes frames until no complete frame is left. Fewer bytes than the longest frame has
//! are moved at a time. The buffer never grows, so a peer cannot make it grow.

use crate::codec::{DecodeError, decode};
use crate::{FRAME_BYTES_MAX, Frame};

/// Receive buffer, in which `bytes[start..end]` were received and not yet taken.
#[derive(Debug)]
pub struct ReceiveBuffer {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl ReceiveBuffer {
    /// Returns a buffer of `capacity` bytes, or of the size of the longest frame if that is more.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { bytes: vec![0; capacity.max(FRAME_BYTES_MAX)].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Returns the space to read into. It is empty only while the buffer is full of frames that were not taken.
    pub fn space(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end - self.start < FRAME_BYTES_MAX && self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    /// Adds the first `count` bytes of [`Self::space`] to the received bytes.
    ///
    /// # Panics
    /// If the space was smaller.
    pub fn filled(&mut self, count: usize) {
        assert!(count <= self.bytes.len() - self.end, "more bytes were read than there was space for");
        self.end += count;
    }

    /// Removes and returns the next frame, or returns `None` if more bytes are needed.
    ///
    /// # Errors
    /// As [`decode`]. The connection is of no further use after an error.
    #[inline]
    pub fn take(&mut self) -> Result<Option<Frame<'_>>, DecodeError> {
        let Some((frame, length)) = decode(&self.bytes[self.start..self.end])? else { return Ok(None) };
        self.start += length; // `frame` borrows the bytes, not the position
        Ok(Some(frame))
    }

    /// Returns the next frame and its length, or `None` if more bytes are needed. The frame stays in the buffer until
    /// [`Self::consume`] removes it.
    ///
    /// # Errors
    /// As [`Self::take`].
    #[inline]
    pub fn peek(&self) -> Result<Option<(Frame<'_>, usize)>, DecodeError> {
        decode(&self.bytes[self.start..self.end])
    }

    /// Removes the frame of `length` bytes that [`Self::peek`] has returned.
    ///
    /// # Panics
    /// If the buffer has fewer bytes.
    #[inline]
    pub fn consume(&mut self, length: usize) {
        assert!(length <= self.end - self.start, "only a frame that was shown can be taken");
        self.start += length;
    }

    /// Returns whether the buffer is empty, without even a part of a frame.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }
}
