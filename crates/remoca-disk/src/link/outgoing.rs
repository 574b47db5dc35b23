//! What waits to be sent to a memory server: REQUESTs first, then pages.
//!
//! On a narrow link, a guest that evicts fills the way to the server. A REQUEST that waited behind all these pages would be
//! slower than the disk.
//! 1. Pages leave in the order in which they were queued: the server counts them, and a successor of this process trusts that
//!    count (decision 0020). Frames that depend on pages (MOVE, SETSIZE, BYE) follow those that were queued before.
//! 2. A REQUEST overtakes pages. None of them is for its slot: a page that is still here is taken from here
//!    ([`Outgoing::page`]). A slot with an outstanding REQUEST gets no page, so the REQUEST means what it meant.
//! 3. A frame that was begun is completed before another one begins.

use remoca_core::units::{PAGE_SIZE, SlotIndex};
use remoca_protocol::{HEADER_BYTES, RequestId, send_page_header};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::io;

/// Bytes of a SENDPAGE frame.
const FRAME_BYTES: usize = HEADER_BYTES + PAGE_SIZE;
/// Bytes of pages that are sent in one system call. A REQUEST waits for no more than these, and what the socket had before.
const PIECE_BYTES: usize = 8 * FRAME_BYTES;

/// Outcome of [`Outgoing::send`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sent {
    /// Pages that have left, the last of them perhaps in part.
    pub(super) pages: u32,
    /// Whether the socket takes no more now.
    pub(super) is_full: bool,
}

/// The frames for one server.
#[derive(Default)]
pub(super) struct Outgoing {
    /// Frames that leave first, and the rest of a page that was begun.
    first: Bytes,
    /// Number of pages in `first` that have not been reported as sent.
    held: u32,
    /// SENDPAGE frames.
    pages: Bytes,
    /// Slots of these frames.
    slots: VecDeque<SlotIndex>,
    /// For each of these slots, which of all pages is the last one that was queued for it.
    newest: HashMap<SlotIndex, u64>,
    /// Number of the first page in `pages`, of all that were ever queued.
    number: u64,
}

impl Outgoing {
    /// Queues a page.
    pub(super) fn push_page(&mut self, slot: SlotIndex, page: &[u8]) {
        assert!(page.len() == PAGE_SIZE, "a page has {PAGE_SIZE} bytes");
        self.newest.insert(slot, self.number + self.slots.len() as u64);
        self.slots.push_back(slot);
        self.pages.queued.extend_from_slice(&send_page_header(RequestId(0), slot));
        self.pages.queued.extend_from_slice(page);
    }

    /// Returns the page that was queued last for a slot, or `None` if it has left.
    pub(super) fn page(&self, slot: SlotIndex) -> Option<&[u8]> {
        if self.slots.is_empty() {
            return None;
        }
        let at = usize::try_from(self.newest.get(&slot)? - self.number).ok()?;
        let frame = self.pages.waiting().chunks_exact(FRAME_BYTES).nth(at)?;
        Some(&frame[FRAME_BYTES - PAGE_SIZE..])
    }

    /// Returns the bytes to which to add a frame that overtakes pages. It must be for no slot of which [`Self::page`] has a page.
    pub(super) fn overtaking(&mut self) -> &mut Vec<u8> {
        &mut self.first.queued
    }

    /// Returns the bytes to which to add a frame that follows everything.
    pub(super) fn following(&mut self) -> &mut Vec<u8> {
        if self.first.waiting().is_empty() {
            std::mem::swap(&mut self.first, &mut self.pages);
        } else {
            self.first.queued.extend_from_slice(self.pages.waiting());
        }
        self.held += u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        self.number += self.slots.len() as u64;
        self.pages.clear();
        self.slots.clear();
        self.newest.clear();
        &mut self.first.queued
    }

    /// Returns all bytes that have not left, in their order.
    pub(super) fn into_rest(mut self) -> Vec<u8> {
        self.following();
        self.first.cut();
        self.first.queued
    }

    /// Drops everything.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Sends what the socket takes by calling `write`.
    ///
    /// # Errors
    /// If `write` fails for another reason than a full socket.
    pub(super) fn send(&mut self, mut write: impl FnMut(&[u8]) -> Result<usize, Errno>) -> io::Result<Sent> {
        let mut pages = 0;
        loop {
            let waiting = self.pages.waiting();
            let is_first = !self.first.waiting().is_empty();
            let piece = if is_first { self.first.waiting() } else { &waiting[..waiting.len().min(PIECE_BYTES)] };
            if piece.is_empty() {
                return Ok(Sent { pages, is_full: false });
            }
            match write(piece) {
                Ok(count) if is_first => {
                    self.first.note_sent(count);
                    if self.first.waiting().is_empty() {
                        pages += std::mem::take(&mut self.held);
                    }
                }
                Ok(count) => pages += self.note_pages(count),
                Err(Errno::AGAIN) => return Ok(Sent { pages, is_full: true }),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Takes the pages off of which `count` bytes were sent. The rest of the last one leaves before anything else. Returns
    /// their number.
    fn note_pages(&mut self, count: usize) -> u32 {
        let begun = count.div_ceil(FRAME_BYTES);
        let rest = &self.pages.waiting()[count..begun * FRAME_BYTES];
        self.first.queued.extend_from_slice(rest);
        for slot in self.slots.drain(..begun) {
            if self.newest.get(&slot) == Some(&self.number) {
                self.newest.remove(&slot);
            }
            self.number += 1;
        }
        self.pages.note_sent(begun * FRAME_BYTES);
        u32::try_from(begun).unwrap_or(u32::MAX)
    }
}

/// Bytes in their order, of which the first have left.
#[derive(Default)]
struct Bytes {
    queued: Vec<u8>,
    sent: usize,
}

impl Bytes {
    fn waiting(&self) -> &[u8] {
        &self.queued[self.sent..]
    }

    fn note_sent(&mut self, count: usize) {
        self.sent += count;
        if self.sent == self.queued.len() {
            self.clear();
        } else if self.sent > self.queued.len() / 2 {
            // No byte is moved more often, on average, than it is sent.
            self.cut();
        }
    }

    fn cut(&mut self) {
        self.queued.drain(..self.sent);
        self.sent = 0;
    }

    fn clear(&mut self) {
        self.queued.clear();
        self.sent = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use remoca_protocol::{Frame, decode};
    use std::collections::HashMap;

    const SLOTS: u32 = 5;

    #[derive(Clone, Debug)]
    enum Step {
        Page(u32),
        Fetch(u32),
        Move(u32, u32),
        Send(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let slot = 0..SLOTS;
        prop_oneof![
            4 => slot.clone().prop_map(Step::Page),
            4 => slot.clone().prop_map(Step::Fetch),
            1 => (slot.clone(), slot).prop_map(|(from, to)| Step::Move(from, to)),
            4 => (1..40_000_usize).prop_map(Step::Send),
        ]
    }

    /// What a server makes of the frames: its slots, and what it answers.
    #[derive(Default)]
    struct Server {
        stream: Vec<u8>,
        slots: HashMap<u32, u32>,
        pages: Vec<u32>,
        answers: HashMap<u32, Option<u32>>,
    }

    impl Server {
        fn receive(&mut self, bytes: &[u8]) {
            self.stream.extend_from_slice(bytes);
            let mut at = 0;
            while let Some((frame, length)) = decode(&self.stream[at..]).unwrap() {
                match frame {
                    Frame::SendPage { slot, page, .. } => {
                        let number = number(page);
                        self.pages.push(number);
                        self.slots.insert(slot.0, number);
                    }
                    Frame::Request { request, slot } => {
                        self.answers.insert(request.0, self.slots.get(&slot.0).copied());
                    }
                    Frame::Move { from, to } => {
                        let page = self.slots.get(&from.0).copied().unwrap_or(0);
                        self.slots.insert(to.0, page);
                    }
                    other => panic!("{other:?} was not queued"),
                }
                at += length;
            }
            self.stream.drain(..at);
        }
    }

    fn number(page: &[u8]) -> u32 {
        u32::from_le_bytes(page[..4].try_into().unwrap())
    }

    fn page(number: u32) -> Vec<u8> {
        let mut page = vec![7; PAGE_SIZE];
        page[..4].copy_from_slice(&number.to_le_bytes());
        page
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn each_request_gets_the_page_that_was_queued_before_it(steps in prop::collection::vec(step(), 1..120)) {
            let (mut out, mut server) = (Outgoing::default(), Server::default());
            // What the slots hold once everything has arrived, and which of them have outstanding REQUESTs.
            let mut slots = HashMap::new();
            let mut expected: HashMap<u32, (u32, Option<u32>)> = HashMap::new();
            let (mut queued, mut told) = (Vec::new(), 0);
            for (step, serial) in steps.into_iter().zip(1_u32..) {
                // A slot is not reused while the server owes its page.
                let is_free = |slot: u32, server: &Server| {
                    expected.iter().all(|(id, (at, _))| *at != slot || server.answers.contains_key(id))
                };
                match step {
                    Step::Page(slot) if is_free(slot, &server) => {
                        out.push_page(SlotIndex(slot), &page(serial));
                        slots.insert(slot, serial);
                        queued.push(serial);
                    }
                    Step::Fetch(slot) => match out.page(SlotIndex(slot)) {
                        Some(page) => prop_assert_eq!(Some(&number(page)), slots.get(&slot)),
                        None => {
                            let request = RequestId(serial);
                            Frame::Request { request, slot: SlotIndex(slot) }.encode(out.overtaking());
                            expected.insert(serial, (slot, slots.get(&slot).copied()));
                        }
                    },
                    Step::Move(from, to) if is_free(to, &server) => {
                        Frame::Move { from: SlotIndex(from), to: SlotIndex(to) }.encode(out.following());
                        let page = slots.get(&from).copied().unwrap_or(0);
                        slots.insert(to, page);
                    }
                    Step::Page(_) | Step::Move(..) => {}
                    Step::Send(mut room) => {
                        let sent = out.send(|bytes| match room.min(bytes.len()) {
                            0 => Err(Errno::AGAIN),
                            count => {
                                room -= count;
                                server.receive(&bytes[..count]);
                                Ok(count)
                            }
                        });
                        told += sent.unwrap().pages as usize;
                        prop_assert!(told <= queued.len(), "the window is longer than it is");
                    }
                }
            }
            let rest = out.send(|bytes| {
                server.receive(bytes);
                Ok(bytes.len())
            });
            prop_assert_eq!(told + rest.unwrap().pages as usize, queued.len());
            prop_assert!(server.stream.is_empty());
            prop_assert_eq!(&server.pages, &queued);
            for (id, (_, page)) in expected {
                prop_assert_eq!(server.answers.get(&id), Some(&page));
            }
        }
    }

    #[test]
    fn a_request_waits_for_no_page_that_was_not_begun() {
        let mut out = Outgoing::default();
        (0..100).for_each(|slot| out.push_page(SlotIndex(slot), &page(slot)));
        let mut room = FRAME_BYTES + 1;
        let sent = out.send(|bytes| match std::mem::take(&mut room).min(bytes.len()) {
            0 => Err(Errno::AGAIN),
            count => Ok(count),
        });
        assert_eq!(sent.unwrap(), Sent { pages: 2, is_full: true });
        assert!(out.page(SlotIndex(1)).is_none() && out.page(SlotIndex(2)).is_some());
        Frame::Request { request: RequestId(9), slot: SlotIndex(1) }.encode(out.overtaking());
        let mut pieces = Vec::new();
        out.send(|bytes| {
            pieces.push(bytes.len());
            Ok(bytes.len())
        })
        .unwrap();
        assert_eq!(pieces[0], FRAME_BYTES - 1 + HEADER_BYTES);
        assert!(pieces[1..].iter().all(|piece| *piece <= PIECE_BYTES));
    }
}
