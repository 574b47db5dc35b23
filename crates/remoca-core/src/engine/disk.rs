//! Completions of the backing store: what they teach about blocks, and what the guest hears.

use super::{Action, Admission, DiskEngine, DiskError, GuestOp, Pages, Request, RequestId, block_count};
use crate::index::{Offer, Place};
use crate::rules::Rule;
use crate::units::{BlockId, BlockNumber, ByteRange, DiskIndex, Nanos, PAGE_SIZE, PAGE_SIZE_U64};
use std::ops::DerefMut;

/// Most blocks that one write-zeroes makes known: more would push out what the guest really reads.
const ZEROED_BLOCKS_MAX: u64 = 1024;
/// One in so many blocks that are admitted on read enters as the newest, so that the cache follows a changing
/// workload (bimodal insertion, Qureshi et al., ISCA 2007).
const BIMODAL: u64 = 32;

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// Handles the end of the I/O of an [`Action::Disk`] or [`Action::DiskToo`]. `data` is the buffer of that: the bytes
    /// read, or the bytes written (empty for other operations).
    pub fn handle_disk_done(&mut self, now: Nanos, id: RequestId, result: Result<(), DiskError>, data: &[u8]) {
        let Some(request) = self.request(id) else {
            debug_assert!(false, "the disk completed a request that does not exist");
            return;
        };
        if result.is_err() {
            self.stats.disk_errors += 1;
        }
        match request.op {
            GuestOp::Read(range) => self.read_done(now, id, &request, range, result, data),
            GuestOp::Flush => {
                let result = self.flush_result(request.disk, result);
                self.complete(id, result);
            }
            GuestOp::Write { range, .. } | GuestOp::Discard(range) | GuestOp::WriteZeroes { range, .. } => {
                let clean = self.overlaps[usize::from(request.disk.0)].end(id) && result.is_ok();
                if clean {
                    self.learn_modification(id, &request, range, data);
                }
                self.complete(id, result);
            }
        }
    }

    /// Handles an [`Action::DiskToo`] that the driver dropped because its read was answered meanwhile.
    pub fn handle_disk_skipped(&mut self, id: RequestId) {
        let Some(Request { disk, op: GuestOp::Read(range), io: Some(io), answered: true, .. }) = self.request(id)
        else {
            debug_assert!(false, "the guest waits for an I/O that is left out");
            return;
        };
        self.overlaps[usize::from(disk.0)].end(id);
        self.hedging.end_io(disk, io.reason, range, true);
        self.requests[id.0 as usize] = None;
    }

    fn read_done(
        &mut self,
        now: Nanos,
        id: RequestId,
        request: &Request,
        range: ByteRange,
        result: Result<(), DiskError>,
        data: &[u8],
    ) {
        let clean = self.overlaps[usize::from(request.disk.0)].end(id) && result.is_ok();
        let Some(io) = request.io else {
            debug_assert!(false, "the disk completed a read that it was not asked for");
            return;
        };
        self.hedging.end_io(request.disk, io.reason, range, request.answered);
        if result.is_ok() {
            self.hedging.note_disk(now, request.disk, io);
        }
        if request.answered {
            self.requests[id.0 as usize] = None;
            return;
        }
        if request.waits() {
            match result {
                Ok(()) => self.note_disk_first(now, request, io),
                Err(_) if !request.failed => return self.wait_on(now, id, request),
                Err(_) => self.note_no_page(request),
            }
        }
        if request.pages != Pages::None {
            self.stats.missed_blocks += block_count(range);
        }
        if clean {
            self.learn_read(id, request.disk, range, data);
        }
        if let Some(request) = &mut self.requests[id.0 as usize] {
            request.io = None;
        }
        self.complete(id, result);
    }

    /// Returns what the guest hears of a flush. After one that failed, and lost acknowledged writes, none succeeds.
    fn flush_result(&mut self, disk: DiskIndex, result: Result<(), DiskError>) -> Result<(), DiskError> {
        if let Some(errno) = self.index.flush_failed(disk).filter(|_| self.rules.hold(Rule::StickyFlush)) {
            return Err(DiskError(errno));
        }
        if let Err(error) = result {
            self.index.set_flush_failed(disk, Some(error.0));
        }
        result
    }

    /// Forgets what is known of a disk that may not hold what was acknowledged (its server came back). I/O under way
    /// teaches nothing.
    pub fn handle_content_uncertain(&mut self, disk: DiskIndex) {
        self.index.forget_range(disk, 0..u64::MAX);
        self.overlaps[usize::from(disk.0)].taint_all();
    }

    /// Sets whether a flush or a durable write of the disk failed, now or for a former process; `None`: none did.
    pub fn set_failed_flush(&mut self, disk: DiskIndex, errno: Option<i32>) {
        self.index.set_flush_failed(disk, errno);
    }

    fn learn_read(&mut self, id: RequestId, disk: DiskIndex, range: ByteRange, data: &[u8]) {
        let layout = self.index.layout();
        let resident = u64::from(layout.node_limit().0 - layout.slot_limit().0);
        self.sources.note_read(block_count(range), resident);
        self.note_swap_headers(disk, range, data);
        if !self.is_enabled() {
            return;
        }
        let by_read = self.sources.admission() == Admission::Reads;
        for bno in range.covered_blocks() {
            let Some((offset, page)) = page_of(range, bno, data) else { return };
            let block = BlockId { disk, bno: BlockNumber(bno) };
            let content = self.prints.page(page);
            let is_another = self.index.known(block).is_some_and(|known| known != content);
            if is_another && !self.discarded[usize::from(disk.0)].contains(bno) {
                self.stats.foreign_writes += 1;
                self.index.drop_everything();
                self.actions.push_back(Action::ForeignWriter(disk));
                return;
            }
            self.index.learn(block, content);
            if self.is_swap(block) {
                self.admit_swapped_in(id, content, offset);
            } else if by_read && content != self.prints.zero() {
                self.admit_read(id, content, offset);
            }
        }
    }

    fn admit_read(&mut self, id: RequestId, content: crate::fingerprint::Fingerprint, offset: usize) {
        if self.index.cached(content).is_some() || !self.may_send() {
            return;
        }
        self.read_admissions += 1;
        let place = if self.read_admissions.is_multiple_of(BIMODAL) { Place::Tail } else { Place::Head };
        if let Offer::Admitted(slot) = self.index.offer(content, place) {
            self.stats.read_admissions += 1;
            self.link.note_send();
            let offset = u32::try_from(offset).unwrap_or(u32::MAX);
            self.actions.push_back(Action::SendBlock { slot, request: id, offset });
        }
    }

    fn learn_modification(&mut self, id: RequestId, request: &Request, range: ByteRange, data: &[u8]) {
        let disk = request.disk;
        if let GuestOp::Write { .. } = request.op {
            self.note_swap_headers(disk, range, data);
        }
        if !matches!(request.op, GuestOp::Discard(_)) {
            self.discarded[usize::from(disk.0)].remove(&range.covered_blocks());
        }
        if !self.is_enabled() {
            return;
        }
        let covered = range.covered_blocks();
        match request.op {
            GuestOp::Write { .. } => {
                for bno in covered {
                    let Some((offset, page)) = page_of(range, bno, data) else { return };
                    let content = self.prints.page(page);
                    let block = BlockId { disk, bno: BlockNumber(bno) };
                    self.index.learn(block, content);
                    if self.is_swap(block) {
                        self.admit_swapped_out(id, content, offset);
                    }
                }
            }
            GuestOp::Discard(_) if self.rules.hold(Rule::DiscardUnknown) => {}
            GuestOp::Discard(_) | GuestOp::WriteZeroes { .. } => {
                for bno in covered.take(usize::try_from(ZEROED_BLOCKS_MAX).unwrap_or(usize::MAX)) {
                    self.index.learn(BlockId { disk, bno: BlockNumber(bno) }, self.prints.zero());
                }
            }
            GuestOp::Read(_) | GuestOp::Flush => {}
        }
    }

    fn note_swap_headers(&mut self, disk: DiskIndex, range: ByteRange, data: &[u8]) {
        for bno in range.covered_blocks() {
            let Some((_, page)) = page_of(range, bno, data) else { return };
            self.note_swap_header(disk, bno, page);
        }
    }
}

/// Returns the bytes of block `bno` in the buffer of a request on `range`, with their offset.
fn page_of(range: ByteRange, bno: u64, data: &[u8]) -> Option<(usize, &[u8])> {
    let offset = usize::try_from(bno * PAGE_SIZE_U64 - range.offset).ok()?;
    Some((offset, data.get(offset..offset + PAGE_SIZE)?))
}
