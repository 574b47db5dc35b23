//! The pages of a mapped session: those of a pool whose memory this process reads and writes by itself.
//!
//! 1. Only slots below the limit are touched: the smallest of the size that was granted, that which was asked for since, and
//!    that to which the server takes memory back.
//! 2. A page that is not there (beyond the limit, or zero because its memory was taken back) is missing, and no lie of the
//!    server: pages of zeroes are never cached.
//! 3. Memory that cannot be read or written ends the session at the end of the turn.
//! 4. A TAKEBACK is answered here, in the turn in which it comes. The engine hears of it at once, and nothing of the answer.

use super::memory::PoolMemory;
use remoca_core::units::{PAGE_SIZE, PageCount, SlotIndex};
use remoca_protocol::{ErrorCode, Frame, GROWTH_MS, RequestId};
use std::io;
use std::time::{Duration, Instant};

/// Time limit for the answer to a SETSIZE. It is shorter than that of the engine, which would give up the pool.
const SIZE_PATIENCE: Duration = Duration::from_secs(5);
const _: () = assert!(SIZE_PATIENCE.as_millis() > 2 * GROWTH_MS as u128);

/// Request of the SETSIZEs by which the link itself follows the server, or tells it what changed while it was away. Those of
/// the engine are 0.
pub(super) const OWN_REQUEST: RequestId = RequestId(1);

/// Pages of a mapped session.
pub(super) struct Mapped {
    memory: PoolMemory,
    limit: PageCount,
    /// Size in the outstanding SETSIZE.
    asked: Option<PageCount>,
    /// Start of the wait for the answer to the SETSIZE, set by the first timer after it was sent.
    asked_since: Option<Instant>,
    /// Size to which the server takes memory back.
    taking_back: Option<PageCount>,
    /// Pages that were ever written to pools of this server, those of former processes included.
    sends: u64,
    /// Why the pool cannot be used any more.
    over: Option<String>,
    /// Copy of the page that was read last.
    page: Box<[u8; PAGE_SIZE]>,
}

impl Mapped {
    /// Returns the pages of a session that begins with `granted` slots, after `sends` pages were written.
    pub(super) fn new(memory: PoolMemory, granted: PageCount, sends: u64) -> Self {
        let (page, limit) = (Box::new([0; PAGE_SIZE]), granted.min(memory.pages()));
        Self { memory, limit, asked: None, asked_since: None, taking_back: None, sends, over: None, page }
    }

    /// Returns the memory.
    pub(super) fn memory(&self) -> &PoolMemory {
        &self.memory
    }

    /// Returns how many pages were ever written to pools of this server.
    pub(super) fn sends(&self) -> u64 {
        self.sends
    }

    /// Returns why the pool cannot be used any more, or `None` if it can.
    pub(super) fn over(&self) -> Option<&String> {
        self.over.as_ref()
    }

    /// Makes the session end at the end of the turn, because of `why`.
    pub(super) fn end(&mut self, why: &str) {
        self.over.get_or_insert(why.to_owned());
    }

    fn fail(&mut self, error: &io::Error) {
        self.end(&format!("the pool's memory cannot be used: {error}"));
    }

    /// Returns a copy of the page of a slot, or `None` if it is not there.
    pub(super) fn read(&mut self, slot: SlotIndex) -> Option<&[u8; PAGE_SIZE]> {
        self.load(slot).then_some(&*self.page)
    }

    /// Copies the page of a slot to the buffer, or zeroes if it is not there. Returns whether it is there.
    fn load(&mut self, slot: SlotIndex) -> bool {
        let is_read = slot.0 < self.limit.0
            && match self.memory.read(slot, &mut self.page) {
                Ok(()) => true,
                Err(error) => {
                    self.fail(&error);
                    false
                }
            };
        if !is_read {
            self.page.fill(0);
        }
        is_read && self.page.iter().any(|byte| *byte != 0)
    }

    /// Copies a page into a slot. A slot beyond the limit stays as it is, and its page is missing afterwards.
    pub(super) fn write(&mut self, slot: SlotIndex, page: &[u8]) {
        self.sends += 1;
        if slot.0 < self.limit.0
            && let Err(error) = self.memory.write(slot, page)
        {
            self.fail(&error);
        }
    }

    /// Copies the page of a slot to another one. If it is not there, it is missing there as well.
    pub(super) fn relocate(&mut self, from: SlotIndex, to: SlotIndex) {
        self.load(from);
        if to.0 < self.limit.0
            && let Err(error) = self.memory.write(to, &*self.page)
        {
            self.fail(&error);
        }
    }

    // The size.

    /// Executes what a frame of the server says about the size of the pool, which has `granted` pages. The answer goes to
    /// `out`. Returns whether the frame answers a request of the link itself, so that it means nothing to the engine.
    pub(super) fn hear(&mut self, frame: &Frame<'_>, granted: PageCount, out: &mut Vec<u8>) -> bool {
        match *frame {
            Frame::Sized { request, npages, .. } if request == OWN_REQUEST => {
                self.end_take_back(npages);
                return true;
            }
            Frame::Sized { npages, .. } => {
                self.asked = None;
                self.set_size(npages);
            }
            Frame::TakeBack { npages } => {
                let npages = self.take_back(npages.min(granted));
                Frame::SetSize { request: OWN_REQUEST, npages }.encode(out);
            }
            Frame::Error(error) => match error.code {
                ErrorCode::NoMemory | ErrorCode::Quota if error.request == OWN_REQUEST => return true,
                ErrorCode::NoMemory | ErrorCode::Quota => {
                    self.asked = None;
                    self.set_size(granted);
                }
                ErrorCode::TAKEN_BACK => self.end("it took all memory back"),
                _ => {}
            },
            _ => {}
        }
        false
    }

    /// Notes that the server was asked for a size: slots beyond it are not used from now on.
    pub(super) fn ask_size(&mut self, npages: PageCount) {
        self.asked = Some(npages);
        self.asked_since = None;
        self.limit = self.limit.min(npages);
    }

    /// Removes the size that the server was asked for and has not answered, or `None` if there is none.
    pub(super) fn take_asked(&mut self) -> Option<PageCount> {
        self.asked.take()
    }

    /// Returns the time at which the answer to a SETSIZE is overdue, or `None` if none is outstanding. It is `now` before
    /// the first call of [`Self::start_wait`] after the SETSIZE.
    pub(super) fn answer_deadline(&self, now: Instant) -> Option<Instant> {
        self.asked.map(|_| self.asked_since.map_or(now, |since| since + SIZE_PATIENCE))
    }

    /// Starts the wait for the answer to a SETSIZE, unless it has started.
    pub(super) fn start_wait(&mut self, now: Instant) {
        if self.asked.is_some() {
            self.asked_since.get_or_insert(now);
        }
    }

    /// Lets all slots below `granted` be used, but those that the server takes back, and those beyond a size that was asked
    /// for.
    pub(super) fn set_size(&mut self, granted: PageCount) {
        let least = [self.taking_back, self.asked].into_iter().flatten().min().unwrap_or(granted);
        self.limit = granted.min(self.memory.pages()).min(least);
    }

    /// Stops using the slots from `npages` on, because the server takes their memory back. Returns the size to ask for, which is no
    /// larger than one that was asked for before: the server may have granted that already, and would grow the pool again.
    fn take_back(&mut self, npages: PageCount) -> PageCount {
        let least = [self.taking_back, self.asked].into_iter().flatten().min();
        let npages = least.map_or(npages, |least| least.min(npages));
        self.taking_back = Some(npages);
        self.limit = self.limit.min(npages);
        npages
    }

    /// Takes the server's answer to a SETSIZE of the link itself: the pool has `granted` slots, and the server has taken back
    /// what it wanted if that is not more than it left.
    fn end_take_back(&mut self, granted: PageCount) {
        if self.taking_back.is_some_and(|npages| granted <= npages) {
            self.taking_back = None;
        }
        self.set_size(granted);
    }

    /// Returns what the server was about to leave of the pool, or `None` if it takes nothing back. It is away, so that it has
    /// to be told again.
    pub(super) fn interrupt_take_back(&mut self) -> Option<PageCount> {
        self.taking_back.take()
    }

    /// Returns the most pages that the server may grant while it takes memory back, or `None` if it takes nothing back.
    pub(super) fn taking_back(&self) -> Option<PageCount> {
        self.taking_back
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::tests::memory;
    use super::super::memory::{Passed, PoolMemory};
    use super::*;
    use std::time::Duration;

    fn mapped(granted: u32) -> Mapped {
        match PoolMemory::take(memory(8), None, Duration::ZERO).unwrap() {
            Passed::New(memory) => Mapped::new(memory, PageCount(granted), 5),
            Passed::Owned => panic!("nobody owned it"),
        }
    }

    #[track_caller]
    fn expect(mapped: &mut Mapped, slot: u32, content: Option<u8>) {
        assert_eq!(mapped.read(SlotIndex(slot)).copied(), content.map(|byte| [byte; PAGE_SIZE]), "slot {slot}");
    }

    #[test]
    fn pages_are_where_they_were_written_and_moved() {
        let mut mapped = mapped(4);
        (0..4_u8).for_each(|slot| mapped.write(SlotIndex(slot.into()), &[slot + 1; PAGE_SIZE]));
        assert_eq!(mapped.sends(), 9);
        mapped.relocate(SlotIndex(3), SlotIndex(0));
        for (slot, content) in [(0, 4), (1, 2), (2, 3), (3, 4)] {
            expect(&mut mapped, slot, Some(content));
        }
        assert_eq!((mapped.sends(), mapped.over()), (9, None));
    }

    #[test]
    fn no_slot_beyond_the_limit_is_touched() {
        let mut mapped = mapped(6);
        mapped.write(SlotIndex(6), &[1; PAGE_SIZE]);
        (0..6_u8).for_each(|slot| mapped.write(SlotIndex(slot.into()), &[slot + 1; PAGE_SIZE]));
        expect(&mut mapped, 6, None);
        mapped.ask_size(PageCount(4));
        expect(&mut mapped, 4, None);
        // What is not there is missing wherever it goes.
        mapped.relocate(SlotIndex(5), SlotIndex(0));
        expect(&mut mapped, 0, None);
        assert_eq!(mapped.take_asked(), Some(PageCount(4)));
        mapped.set_size(PageCount(6));
        expect(&mut mapped, 5, Some(6));
        mapped.set_size(PageCount(u32::MAX));
        expect(&mut mapped, 6, None);
        assert!(mapped.memory.read(SlotIndex(8), &mut [0; PAGE_SIZE]).is_err());
        expect(&mut mapped, 8, None);
        assert_eq!(mapped.over(), None);
    }

    #[test]
    fn a_pool_whose_memory_is_taken_back_goes_on_with_what_is_left() {
        let mut mapped = mapped(6);
        let mut out = Vec::new();
        let mut hear = |mapped: &mut Mapped, frame: Frame<'_>| mapped.hear(&frame, PageCount(6), &mut out);
        let sized = |request, npages| Frame::Sized { request, npages: PageCount(npages), available: PageCount(0) };
        mapped.write(SlotIndex(3), &[1; PAGE_SIZE]);
        mapped.ask_size(PageCount(8));
        for npages in [4, 5] {
            assert!(!hear(&mut mapped, Frame::TakeBack { npages: PageCount(npages) }), "the engine hears of it");
        }
        // The answer to what was asked before.
        assert!(!hear(&mut mapped, sized(RequestId(0), 8)));
        expect(&mut mapped, 3, Some(1));
        mapped.write(SlotIndex(4), &[2; PAGE_SIZE]);
        expect(&mut mapped, 4, None);
        // The engine asks for less meanwhile.
        mapped.ask_size(PageCount(2));
        assert!(hear(&mut mapped, sized(OWN_REQUEST, 4)), "an answer to the link");
        expect(&mut mapped, 3, None);
        assert!(!hear(&mut mapped, sized(RequestId(0), 2)));
        mapped.ask_size(PageCount(6));
        assert!(!hear(&mut mapped, sized(RequestId(0), 6)));
        expect(&mut mapped, 3, Some(1));
        mapped.write(SlotIndex(5), &[2; PAGE_SIZE]);
        expect(&mut mapped, 5, Some(2));
        assert_eq!(mapped.over(), None);
        let asked = |npages| Frame::SetSize { request: OWN_REQUEST, npages: PageCount(npages) };
        let mut expected = Vec::new();
        [4, 4].into_iter().for_each(|npages| asked(npages).encode(&mut expected));
        assert_eq!(out, expected, "it never asks for more than was taken back to");
    }

    /// The server grants the smaller size while its TAKEBACK is on the way. A larger one now would grow the pool again, and the engine would
    /// not know.
    #[test]
    fn memory_that_is_taken_back_while_less_was_asked_for_grows_no_pool_again() {
        let (mut mapped, mut out, mut expected) = (mapped(6), Vec::new(), Vec::new());
        mapped.ask_size(PageCount(2));
        assert!(!mapped.hear(&Frame::TakeBack { npages: PageCount(4) }, PageCount(6), &mut out));
        Frame::SetSize { request: OWN_REQUEST, npages: PageCount(2) }.encode(&mut expected);
        assert_eq!(out, expected);
    }

    #[test]
    fn a_refusal_of_what_the_link_asked_for_says_nothing_of_what_the_engine_did() {
        let (mut mapped, mut out) = (mapped(6), Vec::new());
        let refused = |request, code| Frame::Error(remoca_protocol::ErrorReply { request, code, detail: 0 });
        mapped.write(SlotIndex(5), &[1; PAGE_SIZE]);
        for code in [ErrorCode::NoMemory, ErrorCode::Quota] {
            mapped.ask_size(PageCount(4));
            assert!(mapped.hear(&refused(OWN_REQUEST, code), PageCount(6), &mut out));
            expect(&mut mapped, 5, None);
            assert!(!mapped.hear(&refused(RequestId(0), code), PageCount(6), &mut out), "the engine hears of it");
            assert_eq!(mapped.take_asked(), None);
            expect(&mut mapped, 5, Some(1));
        }
        assert_eq!(mapped.over(), None);
        assert!(!mapped.hear(&refused(RequestId(0), ErrorCode::TAKEN_BACK), PageCount(6), &mut out));
        assert!(mapped.over().is_some() && out.is_empty());
    }

    /// The link may have told the server of a size just before, as it does when a server is back.
    #[test]
    fn memory_is_taken_back_until_the_server_grants_no_more_than_it_leaves() {
        let (mut mapped, mut out) = (mapped(6), Vec::new());
        let sized = |npages| Frame::Sized { request: OWN_REQUEST, npages: PageCount(npages), available: PageCount(0) };
        mapped.write(SlotIndex(5), &[1; PAGE_SIZE]);
        mapped.hear(&Frame::TakeBack { npages: PageCount(4) }, PageCount(6), &mut out);
        for (granted, left) in [(6, Some(PageCount(4))), (4, None)] {
            assert!(mapped.hear(&sized(granted), PageCount(4), &mut out));
            assert_eq!(mapped.taking_back(), left);
            expect(&mut mapped, 5, None);
        }
    }

    #[test]
    fn the_wait_for_a_size_begins_when_that_size_was_asked_for() {
        let mut mapped = mapped(6);
        let start = Instant::now();
        let (due, later) = (start + SIZE_PATIENCE, start + 2 * SIZE_PATIENCE);
        mapped.start_wait(start);
        assert_eq!(mapped.answer_deadline(start), None);
        mapped.ask_size(PageCount(4));
        [start, later].into_iter().for_each(|now| mapped.start_wait(now));
        assert_eq!(mapped.answer_deadline(later), Some(due));
        mapped.ask_size(PageCount(2));
        assert_eq!(mapped.answer_deadline(later), Some(later));
        mapped.start_wait(later);
        assert_eq!(mapped.answer_deadline(later), Some(later + SIZE_PATIENCE));
    }
}
