//! Replies that wait to be sent, as one vectored write that points into the pool.
//!
//! Called by a session. Holds slots, not pages: the pages are looked up when they are written, so they must not
//! change in between. The session ensures that with [`Replies::points_to`].

use std::io::IoSlice;

use remoca_protocol::{Frame, HEADER_BYTES, PAGE_SIZE, RequestId, SlotIndex, send_page_header};

use crate::pool::Pool;

/// Maximum number of waiting replies. With their pages they are 1 MiB.
const REPLIES_MAX: usize = 256;
/// Maximum number of pieces in one vectored write (`IOV_MAX`).
const SLICES_MAX: usize = 1024;

const _: () = assert!(2 * REPLIES_MAX <= SLICES_MAX);

#[derive(Debug, Default)]
pub(crate) struct Replies {
    queue: Vec<Reply>,
    /// Number of replies sent as a whole.
    sent: usize,
    /// Number of bytes sent of the next reply.
    sent_bytes: usize,
}

#[derive(Debug)]
struct Reply {
    header: [u8; HEADER_BYTES],
    /// Slot whose page follows the header.
    slot: Option<SlotIndex>,
}

impl Replies {
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.queue.len() >= REPLIES_MAX
    }

    /// Drops all replies, because no client waits for them.
    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        (self.sent, self.sent_bytes) = (0, 0);
    }

    /// Returns whether a waiting reply carries the page of this slot.
    pub(crate) fn points_to(&self, slot: SlotIndex) -> bool {
        self.queue.iter().any(|reply| reply.slot == Some(slot))
    }

    #[inline]
    pub(crate) fn push_page(&mut self, request: RequestId, slot: SlotIndex) {
        self.queue.push(Reply { header: send_page_header(request, slot), slot: Some(slot) });
    }

    /// Queues a reply without a payload.
    pub(crate) fn push(&mut self, frame: Frame<'_>) {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        frame.encode(&mut bytes);
        let header = bytes.try_into();
        debug_assert!(header.is_ok(), "only WELCOME and SENDPAGE have a payload");
        if let Ok(header) = header {
            self.queue.push(Reply { header, slot: None });
        }
    }

    /// Returns all bytes that are still to be written.
    pub(crate) fn slices<'a>(&'a self, pool: &'a Pool) -> Vec<IoSlice<'a>> {
        let mut slices = Vec::with_capacity(2 * (self.queue.len() - self.sent));
        let mut skip = self.sent_bytes;
        for reply in &self.queue[self.sent..] {
            let page = reply.slot.and_then(|slot| pool.requested_page(slot));
            if let Some(header) = reply.header.get(skip..) {
                slices.push(IoSlice::new(header));
            }
            if let Some(page) = page {
                slices.push(IoSlice::new(&page[skip.saturating_sub(HEADER_BYTES)..]));
            }
            skip = 0;
        }
        slices
    }

    /// Removes the first `count` bytes of [`Self::slices`], which have been written.
    pub(crate) fn advance(&mut self, count: usize) {
        self.sent_bytes += count;
        while let Some(reply) = self.queue.get(self.sent) {
            let length = HEADER_BYTES + reply.slot.map_or(0, |_| PAGE_SIZE);
            if self.sent_bytes < length {
                return;
            }
            self.sent_bytes -= length;
            self.sent += 1;
        }
        debug_assert_eq!(self.sent_bytes, 0, "no more is written than there was");
        self.queue.clear();
        self.sent = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use remoca_protocol::{PageCount, ReceiveBuffer};

    use super::*;
    use crate::arena::Arena;
    use crate::config::PageLocking;

    fn sized(request: u32) -> Frame<'static> {
        Frame::Sized { request: RequestId(request), npages: PageCount(16), available: PageCount(0) }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Tests that the stream consists of the replies in order, however few bytes the socket accepts at a time.
        #[test]
        fn partial_writes_lose_and_repeat_nothing(
            replies in prop::collection::vec(prop::option::of(0u8..16), 1..40),
            takes in prop::collection::vec(1usize..9_000, 1..50),
        ) {
            let arena = Arena::new(1 << 21, PageLocking::Unlocked, &mut |_| ()).expect("2 MiB");
            let mut pool = Pool::new(Arc::clone(&arena), PageCount(16));
            pool.resize(PageCount(16)).expect("room");
            for slot in 0u8..16 {
                pool.store(SlotIndex(slot.into()), &[slot; PAGE_SIZE]);
            }
            let mut queue = Replies::default();
            for (request, slot) in (0..).zip(&replies) {
                match slot {
                    Some(slot) => queue.push_page(RequestId(request), SlotIndex((*slot).into())),
                    None => queue.push(sized(request)),
                }
            }
            let mut stream = Vec::new();
            let mut takes = takes.into_iter().cycle();
            while !queue.is_empty() {
                let all: Vec<u8> = queue.slices(&pool).iter().flat_map(|slice| slice.to_vec()).collect();
                let count = takes.next().expect("endless").min(all.len());
                prop_assert!(count > 0);
                stream.extend(&all[..count]);
                queue.advance(count);
            }
            let mut buffer = ReceiveBuffer::new(stream.len());
            buffer.space()[..stream.len()].copy_from_slice(&stream);
            buffer.filled(stream.len());
            for (request, slot) in (0u32..).zip(&replies) {
                let expected_page = [slot.unwrap_or(0); PAGE_SIZE];
                let expected = match slot {
                    Some(slot) => {
                        Frame::SendPage { request: RequestId(request), slot: SlotIndex((*slot).into()), page: &expected_page }
                    }
                    None => sized(request),
                };
                prop_assert_eq!(buffer.take(), Ok(Some(expected)));
            }
            prop_assert!(buffer.is_empty());
        }
    }
}
