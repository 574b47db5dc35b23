//! What the engine's events tell the miss-ratio curves. They only watch: nothing here changes what is cached.
//!
//! | Event | What the curve is told |
//! |---|---|
//! | a read of whole blocks, from whatever source | a read of each block that is not known to be zero |
//! | a read of parts of blocks, or of a part that is being forgotten | a miss at every size |
//! | an evicted page of a known block, whatever became of it: admitted, duplicate, dropped, passed over | its eviction |
//! | a page that no block is known to hold, or of zeroes | nothing |
//! | a write, discard or write-zeroes | the blocks leave the queue |
//! | ... to a swap area | an eviction of the blocks that were written whole |
//! | no evictions are seen ([`Admission::Reads`]) | each block read is evicted at once, except those of swap areas |
//!
//! What changes only now and then, such as what is seen of evictions, is looked at once in 64 blocks, or when somebody asks: it would cost more than
//! an event itself.
//!
//! Without a cache (ghost mode) nothing is known of blocks. Then the contents of sampled blocks are noted (`contents.rs`), and the agent is
//! advised to send one page of [`GHOST_ONE_OF`]. Decision 0038.

use super::admit::ADVICE_MAX;
use super::curves::{CurveReport, Curves, DISK_CURVES_MAX, Watched};
use super::disks::page_of;
use super::{Admission, DiskEngine};
use crate::curve::{EventKind, Priority, Unreadable, Windows};
use crate::fingerprint::Fingerprint;
use crate::index::Words;
use crate::units::{BlockId, BlockNumber, ByteRange, DiskIndex, Nanos, PageCount};
use std::ops::Range;

/// Number of pages for each one that the agent is advised to send while there is no cache.
const GHOST_ONE_OF: u32 = 8;
/// Maximum number of overwritten blocks that are noted one by one.
const OVERWRITTEN_MAX: u64 = 16;

impl<M: Words> DiskEngine<M> {
    /// Sets whether curves are kept, as they are by default.
    pub fn keep_curves(&mut self, is_on: bool) {
        self.curves.is_on = is_on;
        self.curves.look_again();
    }

    /// Returns what the curve of a disk says at `sizes`, which must not decrease, or that of the VM. Returns `None` if nothing was read,
    /// or the disk has no curve of its own.
    pub fn curve(&mut self, now: Nanos, disk: Option<DiskIndex>, sizes: &[PageCount]) -> Option<CurveReport> {
        self.settle_curves();
        self.curves.report(now, disk, sizes)
    }

    /// Returns whether there is no cache, so that curves are all that the VM's reads and evictions are for.
    pub fn is_ghost(&self) -> bool {
        !self.pools.is_enabled()
    }

    /// Returns the curves as bytes, each with its disk; `None` is that of the VM.
    pub fn curves_to_bytes(&mut self) -> Vec<(Option<DiskIndex>, Vec<u8>)> {
        self.settle_curves();
        let Curves { vm, only, disks, .. } = &self.curves;
        if vm.curve.reads() <= 0. {
            return Vec::new();
        }
        let vm = (None, vm.curve.to_bytes());
        let only = only.map(|disk| (Some(disk), Vec::new()));
        let disks = disks.iter().map(|(disk, watched)| (Some(*disk), watched.curve.to_bytes()));
        std::iter::once(vm).chain(only).chain(disks).collect()
    }

    /// Continues a curve of the previous process. No bytes for a disk say that it was the only one that was read.
    ///
    /// # Errors
    /// If the bytes are no curve of a process with the same key. The present curve stays then.
    pub fn restore_curve(&mut self, disk: Option<DiskIndex>, bytes: &[u8]) -> Result<(), Unreadable> {
        self.curves.look_again();
        let Some(disk) = disk else {
            self.curves.vm.curve = self.curves.read(bytes)?;
            // The former process may have seen another share of the evictions.
            self.follow_change();
            return Ok(());
        };
        let curves = &mut self.curves;
        if bytes.is_empty() {
            curves.only = Some(disk);
        } else if curves.disks.len() < DISK_CURVES_MAX {
            let mut curve = curves.read(bytes)?;
            curves.see_as_vm(&mut curve);
            curves.disks.insert(disk, Watched { curve, windows: Windows::default() });
        }
        Ok(())
    }

    /// Returns the priority below which blocks of a disk that are read may be followed ([`Self::tell_read`]), or `None` if none is.
    #[inline]
    pub(super) fn begin_telling(&mut self, disk: DiskIndex) -> Option<Priority> {
        match self.curves.ready(disk) {
            Some(limit) => limit,
            None => self.look_at_curves(disk),
        }
    }

    #[inline(never)]
    fn look_at_curves(&mut self, disk: DiskIndex) -> Option<Priority> {
        if !self.curves.is_on {
            return None;
        }
        self.curves.look_again();
        if self.curves.is_due() {
            self.settle_curves();
        }
        self.curves.look(disk, self.admit.takes_reads())
    }

    /// Tells the curves that the guest reads a block, if it may be followed. It is not known to be zero.
    #[inline]
    pub(super) fn tell_read(&mut self, block: BlockId, limit: Priority) {
        if !self.curves.leave_out(block, limit) {
            self.tell_followed_read(block, limit);
        }
    }

    /// Tells the curves that the guest reads a block that they may follow. Few blocks are, so it stays out of line.
    #[inline(never)]
    fn tell_followed_read(&mut self, block: BlockId, limit: Priority) {
        let Some(priority) = self.curves.find(block, limit) else { return };
        let is_evicted = self.admit.takes_reads() && !self.disks.is_swap(block);
        let kind = if is_evicted { EventKind::ReadAndEvicted } else { EventKind::Read };
        self.curves.take(kind, block.disk, priority);
    }

    /// Counts the `told` blocks of a read that are not known to be zero, and of which the curves were told if they may follow them
    /// ([`Self::tell_read`]).
    #[inline]
    pub(super) fn end_telling(&mut self, now: Nanos, told: u64) {
        if told > 0 && self.curves.note_reads(now, told) {
            self.settle_curves();
        }
    }

    /// Notes a read of so many blocks that no cache answers, whatever its size.
    pub(super) fn note_missed(&mut self, disk: DiskIndex, blocks: u64) {
        if !self.curves.is_on {
            return;
        }
        // Without a curve of its own, these reads would count for another disk too.
        self.curves.begin_disk(disk);
        self.curves.each_of(disk, |watched| watched.curve.missed(blocks));
    }

    /// Notes that these blocks are overwritten or discarded.
    #[inline]
    pub(super) fn note_overwritten(&mut self, disk: DiskIndex, blocks: Range<u64>) {
        if !self.curves.is_on {
            return;
        }
        if blocks.end - blocks.start > OVERWRITTEN_MAX {
            return self.curves.overwritten(disk, blocks);
        }
        for bno in blocks {
            self.tell_curves(EventKind::Discarded, BlockId { disk, bno: BlockNumber(bno) });
        }
    }

    #[inline]
    fn tell_curves(&mut self, kind: EventKind, block: BlockId) {
        self.curves.note_told();
        if !self.curves.leave_out_now(block) {
            self.tell_followed(kind, block);
        }
    }

    /// Has the curves follow what changes now and then if that is due, and tells them what happened to a block that they may follow. Few
    /// blocks come here, so it stays out of line.
    #[inline(never)]
    fn tell_followed(&mut self, kind: EventKind, block: BlockId) {
        if self.curves.is_due() {
            self.settle_curves();
        }
        if let Some(priority) = self.curves.find(block, self.curves.limit(block.disk)) {
            self.curves.take(kind, block.disk, priority);
        }
    }

    /// Has the curves follow what changes only now and then, if they were told of a block since they did.
    #[inline(never)]
    fn settle_curves(&mut self) {
        if self.curves.begin_to_follow() {
            self.follow_evictions();
            self.curves.advance();
        }
    }

    /// Notes that the guest evicted a page of this block; `None` if no block is known to have its content.
    #[inline]
    pub(super) fn note_evicted_block(&mut self, block: Option<BlockId>) {
        self.last_evicted = block.filter(|_| self.curves.is_on);
        if let Some(block) = self.last_evicted {
            self.tell_curves(EventKind::Evicted, block);
        }
    }

    /// Returns whether the guest's evictions are seen, and the blocks of them looked up.
    pub fn sees_evictions(&self) -> bool {
        self.curves.is_on && self.pools.is_enabled() && self.admit.admission() != Admission::Reads
    }

    /// Returns the block of the page that [`Self::handle_evicted`] or [`Self::handle_frame`] was given last. Returns `None` if no
    /// block was known to have its content.
    pub fn last_evicted(&self) -> Option<BlockId> {
        self.last_evicted
    }

    /// Notes that the guest evicted a page of this content, where there is no cache.
    pub(super) fn note_ghost_eviction(&mut self, content: Fingerprint) {
        if self.curves.is_on
            && let Some(contents) = &mut self.curves.contents
            && let Some(block) = contents.take(content)
        {
            self.tell_curves(EventKind::Evicted, block);
        }
    }

    /// Notes what whole blocks of a disk hold that were read, or written by the guest.
    #[inline]
    pub(super) fn note_contents(&mut self, disk: DiskIndex, range: ByteRange, data: &[u8], is_written: bool) {
        if self.curves.is_on && (is_written || self.curves.contents.is_some()) {
            self.note_content_of_blocks(disk, range, data, is_written);
        }
    }

    fn note_content_of_blocks(&mut self, disk: DiskIndex, range: ByteRange, data: &[u8], is_written: bool) {
        for bno in range.covered_blocks() {
            let block = BlockId { disk, bno: BlockNumber(bno) };
            if is_written && self.disks.is_swap(block) {
                self.tell_curves(EventKind::Evicted, block);
            } else if self.curves.contents.is_some() && self.curves.is_sampled(block) {
                let Some((_, page)) = page_of(range, bno, data) else { return };
                let content = self.prints.page(page);
                if let Some(contents) = &mut self.curves.contents
                    && content != self.prints.zero()
                {
                    contents.put(content, block);
                }
            }
        }
    }

    /// Returns the advice to the agent while there is no cache.
    pub(super) fn ghost_advice(&self) -> u32 {
        if self.curves.is_on { GHOST_ONE_OF } else { ADVICE_MAX }
    }

    /// Has the curves follow a change of what is seen of evictions at once.
    pub(super) fn follow_change(&mut self) {
        if self.curves.is_on {
            self.follow_evictions();
        }
    }

    /// Follows a change of what is seen of evictions.
    fn follow_evictions(&mut self) {
        self.curves.look_again();
        let has_agent = self.admit.admission() == Admission::Evictions;
        let classes = self.classes_seen();
        self.curves.see_class_of(classes);
        if classes == 1 {
            self.curves.see_one_of(if has_agent { self.advice().max(1) } else { 1 });
        }
        let notes_contents = has_agent && self.is_ghost();
        self.curves.note_contents(notes_contents.then_some(self.guest_memory));
    }
}
