//! Completions of the backing store: what they teach about blocks, and what the guest hears.

use super::{Action, Admission, DiskEngine, DiskError, GuestOp, Request, RequestId, block_count, update_mean};
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
    /// The backing store finished the I/O of an [`Action::Disk`]. `data` is the request's buffer: the bytes read, or the
    /// bytes written (empty for other operations).
    pub fn handle_disk_done(&mut self, now: Nanos, id: RequestId, result: Result<(), DiskError>, data: &[u8]) {
        let Some(request) = self.request(id) else {
            debug_assert!(false, "the disk completed a request that does not exist");
            return;
        };
        if result.is_err() {
            self.stats.disk_errors += 1;
        }
        match request.op {
            GuestOp::Read(range) => {
                let clean = self.overlaps[usize::from(request.disk.0)].end(id) && result.is_ok();
                if result.is_ok() && !request.fell_back {
                    update_mean(&mut self.disk_read_ns, now.since_ns(request.issued));
                }
                if clean {
                    self.learn_read(id, request.disk, range, data);
                }
                self.complete(id, result);
            }
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

    /// A flush that failed lost writes that were acknowledged: no later flush may say that all is well.
    fn flush_result(&mut self, disk: DiskIndex, result: Result<(), DiskError>) -> Result<(), DiskError> {
        let failed = &mut self.flush_failed[usize::from(disk.0)];
        if let (None, Err(error)) = (*failed, result) {
            *failed = Some(error);
        }
        failed.map_or(Ok(()), Err)
    }

    /// The disk may hold something else than what was acknowledged (its server came back): what is known of it is void,
    /// and what is under way teaches nothing.
    pub fn handle_content_uncertain(&mut self, disk: DiskIndex) {
        self.index.forget_range(disk, 0..u64::MAX);
        self.overlaps[usize::from(disk.0)].taint_all();
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
            if self.index.known(block).is_some_and(|known| known != content) {
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
        if !self.link.can_send() || self.index.cached(content).is_some() {
            return;
        }
        self.read_admissions += 1;
        let place = if self.read_admissions.is_multiple_of(BIMODAL) { Place::Tail } else { Place::Head };
        if let Offer::Admitted(slot) = self.index.offer(content, place) {
            self.stats.read_admissions += 1;
            self.link.note_send(slot);
            let offset = u32::try_from(offset).unwrap_or(u32::MAX);
            self.actions.push_back(Action::SendBlock { slot, request: id, offset });
        }
    }

    fn learn_modification(&mut self, id: RequestId, request: &Request, range: ByteRange, data: &[u8]) {
        let disk = request.disk;
        if let GuestOp::Write { .. } = request.op {
            self.note_swap_headers(disk, range, data);
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
            self.swap[usize::from(disk.0)].note(bno, page);
        }
    }
}

/// The bytes of block `bno` in the buffer of a request on `range`, with their offset.
fn page_of(range: ByteRange, bno: u64, data: &[u8]) -> Option<(usize, &[u8])> {
    let offset = usize::try_from(bno * PAGE_SIZE_U64 - range.offset).ok()?;
    Some((offset, data.get(offset..offset + PAGE_SIZE)?))
}
