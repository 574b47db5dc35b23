//! Guest requests: which blocks of a read the cache answers, and what a write makes unreachable.

use super::breaker::Route;
use super::server::Fetch;
use super::{Action, DiskEngine, GuestOp, Pages, ReadReason, Request, RequestId, block_count};
use crate::fingerprint::Fingerprint;
use crate::rules::Rule;
use crate::units::{BlockId, BlockNumber, ByteRange, DiskIndex, Nanos, PAGE_SIZE_U64, SlotIndex};
use std::ops::{DerefMut, Range};

/// Where one block of a read comes from.
enum Source {
    Zero,
    Slot(SlotIndex, Fingerprint),
    Disk,
}

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// Begins a guest request. Its data stays with the driver: a write's bytes were copied out of guest memory into the
    /// request's buffer, which must not change until the request completes.
    pub fn handle_request(&mut self, now: Nanos, id: RequestId, disk: DiskIndex, op: GuestOp) {
        debug_assert!(self.request(id).is_none(), "a request id is used twice");
        let at = id.0 as usize;
        if self.requests.len() <= at {
            self.requests.resize(at + 1, None);
        }
        self.serial += 1;
        let (serial, pages) = (self.serial, Pages::None);
        let request = Request { disk, op, issued: now, serial, pages, io: None, failed: false, answered: false };
        self.requests[at] = Some(request);
        match op {
            GuestOp::Read(range) => self.begin_read(now, id, disk, range),
            GuestOp::Write { range, .. } => {
                self.stats.writes += 1;
                self.stats.written_blocks += block_count(range);
                self.begin_modification(id, disk, range, op);
            }
            GuestOp::Discard(range) | GuestOp::WriteZeroes { range, .. } => {
                self.stats.discards += 1;
                self.begin_modification(id, disk, range, op);
            }
            GuestOp::Flush => {
                self.stats.flushes += 1;
                self.actions.push_back(Action::Disk { request: id, disk, op });
            }
        }
    }

    fn begin_read(&mut self, now: Nanos, id: RequestId, disk: DiskIndex, range: ByteRange) {
        self.hedging.begin_read(disk);
        self.stats.read_blocks += block_count(range);
        if range.covered_blocks() != range.touched_blocks() {
            self.stats.misaligned_reads += 1;
            self.ask_disk(now, id, ReadReason::Needed);
            return;
        }
        let blocks = range.covered_blocks();
        let route = self.hedging.route(now, disk);
        match self.cacheable(disk, blocks.clone(), route) {
            Ok(fetches) => self.read_from_cache(now, id, disk, blocks, fetches, route),
            Err(cached) => {
                self.stats.covered_blocks += cached;
                self.stats.missed_blocks += (blocks.end - blocks.start) - cached;
                self.ask_disk(now, id, ReadReason::Needed);
            }
        }
    }

    /// `Ok(pages to fetch)` if no block needs the disk; else how many of the blocks were there. One block that must
    /// come from the disk brings its neighbours with it for free (decision 0009).
    fn cacheable(&self, disk: DiskIndex, blocks: Range<u64>, route: Route) -> Result<u32, u64> {
        let (mut fetches, mut there) = (0, 0);
        let count = blocks.end - blocks.start;
        for bno in blocks {
            match self.source(BlockId { disk, bno: BlockNumber(bno) }) {
                Source::Zero => there += 1,
                Source::Slot(..) => {
                    there += 1;
                    fetches += 1;
                }
                Source::Disk => {}
            }
        }
        let reachable = fetches == 0 || (self.link.is_up() && route != Route::Disk && self.fetches.has_room(fetches));
        if there == count && reachable { Ok(fetches) } else { Err(there) }
    }

    fn source(&self, block: BlockId) -> Source {
        match self.index.known(block) {
            Some(content) if content == self.prints.zero() => Source::Zero,
            Some(content) => match self.index.cached(content) {
                Some(slot) => Source::Slot(slot, content),
                None => Source::Disk,
            },
            None => Source::Disk,
        }
    }

    fn read_from_cache(
        &mut self,
        now: Nanos,
        id: RequestId,
        disk: DiskIndex,
        blocks: Range<u64>,
        fetches: u32,
        route: Route,
    ) {
        let first = blocks.start;
        let mut sent = 0;
        for bno in blocks.clone() {
            let block = BlockId { disk, bno: BlockNumber(bno) };
            let offset = u32::try_from((bno - first) * PAGE_SIZE_U64).unwrap_or(u32::MAX);
            match self.source(block) {
                Source::Zero => {
                    let length = u32::try_from(PAGE_SIZE_U64).unwrap_or(u32::MAX);
                    self.actions.push_back(Action::ZeroFill { request: id, offset, length });
                }
                Source::Slot(slot, content) if self.index.pin(slot) => {
                    let (serial, probe) = (self.serial, route == Route::Both);
                    let fetch = Fetch { request: id, serial, block, slot, content, offset, probe };
                    let fetch = self.fetches.begin(fetch);
                    self.actions.push_back(Action::Fetch { fetch, slot });
                    sent += 1;
                }
                Source::Slot(..) | Source::Disk => break,
            }
        }
        if sent < fetches {
            // A slot took no more requests: what was sent comes back late, the disk answers.
            self.give_up_pages(now, id);
        } else if fetches == 0 {
            self.complete_from_cache(id, fetches);
        } else {
            if let Some(request) = &mut self.requests[id.0 as usize] {
                request.pages = Pages::Waiting { left: fetches, asked: fetches };
            }
            match route {
                Route::Both => self.probe(now, id, disk, self.serial),
                Route::Server | Route::Disk => self.hedging.begin_wait(now, id, self.serial),
            }
        }
    }

    /// Completes a read without the disk: with `fetched` pages of the server, and zeroes for the rest. Blocks are
    /// counted here, and not as they come, because the disk may still have to answer for all of them.
    pub(super) fn complete_from_cache(&mut self, id: RequestId, fetched: u32) {
        if let Some(Request { op: GuestOp::Read(range), .. }) = self.request(id) {
            self.stats.reads_from_cache += 1;
            self.stats.hit_blocks += u64::from(fetched);
            self.stats.zero_blocks += block_count(range) - u64::from(fetched);
        }
        self.complete(id, Ok(()));
    }

    fn begin_modification(&mut self, id: RequestId, disk: DiskIndex, range: ByteRange, op: GuestOp) {
        self.forget_swap_areas(disk, &range.touched_blocks());
        if self.rules.hold(Rule::Invalidation) {
            let partial_too = self.rules.hold(Rule::PartialWrite);
            let blocks = if partial_too { range.touched_blocks() } else { range.covered_blocks() };
            self.index.forget_range(disk, blocks);
        }
        if let GuestOp::Discard(_) = op {
            self.discarded[usize::from(disk.0)].add(range.touched_blocks());
        }
        self.overlaps[usize::from(disk.0)].begin(self.rules, id, range.touched_blocks(), true);
        self.actions.push_back(Action::Disk { request: id, disk, op });
    }
}
