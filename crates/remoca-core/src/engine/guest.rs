//! Events of guests and their disks: which blocks a write makes unreachable, and what a completed disk I/O teaches about its blocks.

use super::disks::page_of;
use super::requests::{Pages, ReadReason, Request};
use super::{Action, DiskEngine, DiskError, GuestOp, RequestId};
use crate::fingerprint::Fingerprint;
use crate::index::{Place, Tiers, Words};
use crate::rules::Rule;
use crate::units::{BlockId, BlockNumber, ByteRange, DiskIndex, Nanos};

/// Maximum number of blocks of a write-zeroes that makes them known. More would push out blocks that the guest reads.
const ZEROED_BLOCKS_MAX: u64 = 1024;
/// Error of a request that no disk can serve, on Linux.
const EIO: i32 = 5;

/// Returns the number of blocks that a range touches.
pub(super) fn block_count(range: ByteRange) -> u64 {
    let touched = range.touched_blocks();
    touched.end - touched.start
}

impl<M: Words> DiskEngine<M> {
    /// Starts a guest request. Its data stays with the driver, which has copied the bytes of a write out of guest
    /// memory. That buffer must not change until the request completes.
    ///
    /// A request beyond the end of the disk, or to a number that no disk has, completes with `EIO`.
    pub fn handle_request(&mut self, now: Nanos, id: RequestId, disk: DiskIndex, op: GuestOp) {
        if !self.disks.has(disk, op.range()) {
            self.actions.push_back(Action::Complete { request: id, result: Err(DiskError(EIO)) });
            return;
        }
        self.requests.begin(now, id, disk, op);
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

    pub(super) fn complete(&mut self, id: RequestId, result: Result<(), DiskError>) {
        if let Some(Request { disk, op: GuestOp::Read(range), io, .. }) = self.requests.answer(id) {
            self.stats.reads += 1;
            self.race.end_read(disk);
            if io.is_some() {
                self.race.begin_abandoned(disk, range);
            }
        }
        self.actions.push_back(Action::Complete { request: id, result });
    }

    fn begin_modification(&mut self, id: RequestId, disk: DiskIndex, range: ByteRange, op: GuestOp) {
        self.disks.begin_modification(disk, id, range, op, &mut self.index);
        self.streams.begin_modification(disk);
        self.note_overwritten(disk, range.touched_blocks());
        if self.rules.hold(Rule::Invalidation) {
            let partial_too = self.rules.hold(Rule::PartialWrite);
            let blocks = if partial_too { range.touched_blocks() } else { range.covered_blocks() };
            self.index.forget_range(disk, blocks);
        }
        self.actions.push_back(Action::Disk { request: id, disk, op });
    }

    /// Takes the result of an [`Action::Disk`] or [`Action::DiskToo`], and completes the request unless it waits for
    /// the server or is answered already. `data` is the buffer of the I/O, with the bytes read or written. It is empty
    /// for other operations.
    pub fn handle_disk_done(&mut self, now: Nanos, id: RequestId, result: Result<(), DiskError>, data: &[u8]) {
        let request = self.requests.get(id).expect("the disk completes requests that there are");
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
                let clean = self.disks.end_io(request.disk, id) && result.is_ok();
                if clean {
                    self.learn_modification(id, &request, range, data);
                }
                self.complete(id, result);
            }
        }
    }

    /// Removes the request of an [`Action::DiskToo`] that the driver dropped because the read had been answered.
    pub fn handle_disk_skipped(&mut self, id: RequestId) {
        let Some(Request { disk, op: GuestOp::Read(range), io: Some(io), answered: true, .. }) = self.requests.get(id)
        else {
            panic!("the guest waits for the I/O of request {}, which is left out", id.0);
        };
        self.disks.end_io(disk, id);
        self.race.end_io(disk, io.reason, range, true);
        self.streams.skip_io(disk);
        self.requests.remove(id);
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
        let clean = self.disks.end_io(request.disk, id) && result.is_ok();
        let io = request.io.expect("the disk completes reads that it was asked for");
        self.race.end_io(request.disk, io.reason, range, request.answered);
        self.streams.end_io(now, request.disk, range, &io, result.is_ok());
        if result.is_ok() {
            let is_comparable = !self.streams.was_cheap(request.disk, range, &io);
            self.race.note_disk(now, request, io, is_comparable);
        }
        if request.answered {
            self.requests.remove(id);
            return;
        }
        if request.waits() {
            match result {
                Ok(()) => {
                    self.pools.note_silence(now);
                    self.race.note_disk_first(now, request, io, &mut self.stats);
                }
                Err(_) if !request.failed => {
                    self.requests.fail_io(id);
                    return self.race.wait_on(now, id, request);
                }
                Err(_) => self.race.note_no_page(request),
            }
        }
        if request.pages != Pages::None {
            match io.reason {
                ReadReason::Stream => self.stats.covered_blocks += block_count(range),
                _ => self.stats.missed_blocks += block_count(range),
            }
        }
        if clean {
            self.learn_read(id, request.disk, range, data);
        }
        self.requests.end_io(id);
        self.complete(id, result);
    }

    /// Returns the result of a flush for the guest. A failed flush lost acknowledged writes, so no flush succeeds after
    /// it.
    fn flush_result(&mut self, disk: DiskIndex, result: Result<(), DiskError>) -> Result<(), DiskError> {
        if let Some(errno) = self.index.flush_failed(disk).filter(|_| self.rules.hold(Rule::StickyFlush)) {
            return Err(DiskError(errno));
        }
        if let Err(error) = result {
            self.index.set_flush_failed(disk, Some(error.0));
        }
        result
    }

    /// Believes nothing that is known of a disk, which may have lost acknowledged writes, for example because its NBD
    /// server was away and came back. I/O in flight sets no fingerprints.
    pub fn handle_content_uncertain(&mut self, disk: DiskIndex) {
        self.disks.distrust(disk, &mut self.index);
    }

    fn learn_read(&mut self, id: RequestId, disk: DiskIndex, range: ByteRange, data: &[u8]) {
        self.note_brought_in(disk, range, block_count(range));
        self.disks.note_swap_headers(disk, range, data, &mut self.index);
        self.note_contents(disk, range, data, false);
        if !self.pools.is_enabled() || !self.disks.is_sound(disk, range) {
            return;
        }
        // A read of parts of blocks never hits.
        let is_whole = range.covered_blocks() == range.touched_blocks();
        let by_read = is_whole && self.admit.takes_reads();
        // One place for all blocks of a read: it hits only if all are cached.
        let mut place = None;
        for bno in range.covered_blocks() {
            let Some((offset, page)) = page_of(range, bno, data) else { return };
            let block = BlockId { disk, bno: BlockNumber(bno) };
            let content = self.prints.page(page);
            let is_another = self.index.known(block).is_some_and(|known| known != content);
            if is_another && !self.disks.may_be_discarded(block) {
                self.stats.foreign_writes += 1;
                // What they transfer may be older than what somebody else has written.
                self.disks.taint_all();
                self.forget_everything();
                self.actions.push_back(Action::ForeignWriter(disk));
                return;
            }
            self.index.learn(block, content);
            self.note_read_content(block, content);
            if self.disks.is_swap(block) {
                self.admit_swapped_in(id, content, offset);
            } else if by_read && content != self.prints.zero() {
                let place = *place.get_or_insert_with(|| self.admit.place_of_read());
                self.admit_read(id, content, offset, place, block_count(range) == 1);
            } else if self.classes_seen() > 1 && self.index.cached(content).is_some() {
                // Its eviction will probably not be seen, so the page stays as the newest.
                self.index.offer(content, Place::Tail, Tiers::default());
            }
        }
    }

    /// Admits a block as it is read, or keeps it if it is cached. Of several blocks that enter a full cache as the next to be
    /// discarded, each would take the place of the one before: none is admitted.
    fn admit_read(&mut self, id: RequestId, content: Fingerprint, offset: u32, place: Place, is_one: bool) {
        if self.index.cached(content).is_some() {
            if place == Place::Tail {
                // Or the others of the read would take its place.
                self.index.offer(content, Place::Tail, Tiers::default());
            }
            return;
        }
        let tiers = self.tiers_that_admit();
        if !tiers.are_empty() && (place == Place::Tail || is_one || !self.are_full(tiers)) {
            self.stats.read_admissions += u64::from(self.admit_block(id, content, offset, place, tiers));
        }
    }

    /// Admits a page that the guest evicted by writing it to a swap area.
    fn admit_swapped_out(&mut self, id: RequestId, content: Fingerprint, offset: u32) {
        if content == self.prints.zero() {
            return;
        }
        // A page that is already cached becomes the newest without being sent.
        let is_cached = self.index.cached(content).is_some();
        let tiers = if is_cached { Tiers::default() } else { self.tiers_that_admit() };
        if is_cached || !tiers.are_empty() {
            self.stats.swap_admissions += u64::from(self.admit_block(id, content, offset, Place::Tail, tiers));
        } else {
            self.stats.swap_dropped += 1;
        }
    }

    /// Admits a page that was read from a swap area, if a slot is free. The guest may later drop its clean copy without
    /// writing it.
    fn admit_swapped_in(&mut self, id: RequestId, content: Fingerprint, offset: u32) {
        let wanted = content != self.prints.zero() && self.index.cached(content).is_none();
        if !wanted {
            return;
        }
        let tiers = self.tiers_with_room();
        if !tiers.are_empty() {
            self.stats.swap_admissions += u64::from(self.admit_block(id, content, offset, Place::Head, tiers));
        }
    }

    /// Offers a block to the index, and sends it if it is admitted. Returns whether the block was admitted.
    fn admit_block(&mut self, id: RequestId, content: Fingerprint, offset: u32, place: Place, tiers: Tiers) -> bool {
        let offer = self.index.offer(content, place, tiers);
        let Ok(admitted) = self.admitted(offer) else { return false };
        self.actions.push_back(Action::SendBlock { admitted, request: id, offset });
        true
    }

    fn learn_modification(&mut self, id: RequestId, request: &Request, range: ByteRange, data: &[u8]) {
        let disk = request.disk;
        if let GuestOp::Write { .. } = request.op {
            self.disks.note_swap_headers(disk, range, data, &mut self.index);
            self.note_contents(disk, range, data, true);
        }
        if !matches!(request.op, GuestOp::Discard(_)) {
            self.disks.note_written(disk, &range.covered_blocks());
        }
        if !self.pools.is_enabled() || !self.disks.is_sound(disk, range) {
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
                    if self.disks.is_swap(block) {
                        self.admit_swapped_out(id, content, offset);
                    }
                }
            }
            GuestOp::Discard(_) if self.rules.hold(Rule::DiscardUnknown) => {}
            GuestOp::Discard(_) | GuestOp::WriteZeroes { .. } if covered.end - covered.start <= ZEROED_BLOCKS_MAX => {
                for bno in covered {
                    self.index.learn(BlockId { disk, bno: BlockNumber(bno) }, self.prints.zero());
                }
            }
            GuestOp::Discard(_) | GuestOp::WriteZeroes { .. } | GuestOp::Read(_) | GuestOp::Flush => {}
        }
    }
}
