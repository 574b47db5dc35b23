//! What the engine keeps beside the index for a successor of its process: the pool that the slots are about, the log of
//! sends, and for each disk its failed flush and its swap areas.
//!
//! ```text
//! disk: errno of the failed flush, number of areas, (first block x2, last page) x8      log entry: number, slot
//! ```
//! A page that is admitted is in the log before its slot is valid: whether the process dies or the connection breaks, what
//! the server has not stored by its own count is given up. Numbers count from `BASE`. Swap areas are hints (decision 0016).

use super::{CacheIndex, header, settle};
use crate::units::{DiskIndex, SlotIndex};
use std::ops::{DerefMut, Range};

/// Swap areas of one disk at most.
pub const SWAP_AREAS_MAX: usize = 8;
const AREA_WORDS: usize = 3;
const AREAS: usize = 2;
pub(super) const DISK_WORDS: usize = AREAS + SWAP_AREAS_MAX * AREA_WORDS;

pub(super) const LOG_WORDS: usize = 2;
/// Sends that are remembered, a power of two.
pub(super) const LOG_ENTRIES: u32 = 16 * 1024;

/// The pool that the slots are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// The driver's number of its server.
    pub server: u32,
    pub generation: u64,
}

/// How far the log of sends went at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEnd {
    base: u64,
    entries: u32,
    sends: u32,
}

impl<M: DerefMut<Target = [u32]>> CacheIndex<M> {
    fn long(&self, at: usize) -> u64 {
        u64::from(self.words[at]) | (u64::from(self.words[at + 1]) << 32)
    }

    fn set_long(&mut self, at: usize, value: u64) {
        let bytes = value.to_le_bytes();
        for (i, half) in bytes.chunks_exact(4).enumerate() {
            self.words[at + i] = u32::from_le_bytes([half[0], half[1], half[2], half[3]]);
        }
    }

    /// Returns the pool that the slots are about, if there is one.
    pub fn pool(&self) -> Option<Pool> {
        let pool = Pool { server: self.words[header::SERVER], generation: self.long(header::GENERATION) };
        (self.words[header::POOL_VALID] == 1).then_some(pool)
    }

    /// Begins a pool that has stored `sends` pages: the slots are its slots, and nothing is on the way.
    pub fn begin_pool(&mut self, pool: Pool, sends: u64) {
        self.words[header::POOL_VALID] = 0;
        settle();
        self.words[header::SERVER] = pool.server;
        self.set_long(header::GENERATION, pool.generation);
        self.begin_log(sends);
        settle();
        self.words[header::POOL_VALID] = 1;
    }

    /// Empties the log. Its next number is `sends`.
    fn begin_log(&mut self, sends: u64) {
        self.set_long(header::BASE, sends);
        self.words[header::SENDS] = 0;
        self.words[header::LOGGED] = 0;
        self.words[header::TAKEN] = 0;
        self.words[header::TAKEN_SENDS] = 0;
    }

    /// SENDPAGEs for this pool since it started.
    pub fn sends(&self) -> u64 {
        self.long(header::BASE).saturating_add(u64::from(self.words[header::SENDS]))
    }

    /// Logs that the page of `slot` is about to be sent.
    pub(super) fn log_send(&mut self, slot: u32) {
        self.log_move(slot);
        self.words[header::SENDS] += 1;
        settle();
    }

    /// Logs that the page of `slot` is about to be moved there, like a send.
    pub(super) fn log_move(&mut self, slot: u32) {
        // Sends are entries as well, but not in an index that a stranger made up.
        if self.words[header::LOGGED].max(self.words[header::SENDS]) == u32::MAX {
            // Every four thousand million sends what is on the way would be lost with a connection.
            match self.pool() {
                Some(pool) => self.begin_pool(pool, self.sends()),
                None => self.begin_log(self.sends()),
            }
        }
        let at = self.log_entry_at(self.words[header::LOGGED]);
        self.words[at] = self.words[header::SENDS];
        self.words[at + 1] = slot;
        settle();
        self.words[header::LOGGED] += 1;
        settle();
    }

    /// Returns how far the log goes now, for [`Self::note_taken`].
    pub fn log_end(&self) -> LogEnd {
        LogEnd { base: self.long(header::BASE), entries: self.words[header::LOGGED], sends: self.words[header::SENDS] }
    }

    /// Notes that the server has taken all that was logged before `end`: it answered what was sent after that.
    pub fn note_taken(&mut self, end: LogEnd) {
        // Another pool or another log meanwhile: it says nothing about them.
        if end.base == self.long(header::BASE) && end.entries <= self.words[header::LOGGED] {
            self.words[header::TAKEN] = end.entries;
            self.words[header::TAKEN_SENDS] = end.sends;
        }
    }

    fn log_entry_at(&self, entry: u32) -> usize {
        self.layout.log_at() + (entry & (LOG_ENTRIES - 1)) as usize * LOG_WORDS
    }

    /// Returns the connection is another one, on which the pool says that it has stored `received` pages: slots whose
    /// page it does not have are given up. How many.
    pub fn give_up_sends(&mut self, received: u64) -> u64 {
        let (base, logged) = (self.long(header::BASE), self.words[header::LOGGED]);
        let outstanding = logged.saturating_sub(self.words[header::TAKEN]);
        // The oldest entry may be in the middle of being written over.
        let entries = outstanding.min(LOG_ENTRIES - 1);
        let number =
            |this: &Self, back: u32| base.saturating_add(u64::from(this.words[this.log_entry_at(logged - back)]));
        let complete_from = match entries < outstanding {
            true => number(self, entries).saturating_add(1),
            false => base.saturating_add(u64::from(self.words[header::TAKEN_SENDS])),
        };
        if received < complete_from || received > self.sends() {
            let lost = self.counts.used;
            self.drop_all_slots();
            return u64::from(lost);
        }
        let mut lost = 0;
        for back in (1..=entries).take_while(|back| number(self, *back) >= received).collect::<Vec<_>>() {
            let slot = self.words[self.log_entry_at(logged - back) + 1];
            self.drop_slot(SlotIndex(slot));
            lost += 1;
        }
        lost
    }

    fn disk_at(&self, disk: DiskIndex) -> usize {
        assert!(disk.0 < self.layout.disks, "a disk that the index was not made for");
        super::HEADER_WORDS + usize::from(disk.0) * DISK_WORDS
    }

    /// Returns the errno of the flush of `disk` that failed, if one did.
    pub fn flush_failed(&self, disk: DiskIndex) -> Option<i32> {
        let errno = self.words[self.disk_at(disk)].cast_signed();
        (errno != 0).then_some(errno)
    }

    /// Sets the error of the flush of `disk` that failed; `None`: the disk is another one now.
    pub fn set_flush_failed(&mut self, disk: DiskIndex, errno: Option<i32>) {
        let at = self.disk_at(disk);
        self.words[at] = errno.unwrap_or(0).cast_unsigned();
    }

    /// Returns the swap areas of `disk`, as they were set.
    pub fn swap_areas(&self, disk: DiskIndex) -> Vec<Range<u64>> {
        let at = self.disk_at(disk);
        let count = (self.words[at + 1] as usize).min(SWAP_AREAS_MAX);
        let area = |i: usize| {
            let at = at + AREAS + i * AREA_WORDS;
            let start = self.long(at);
            start..start.saturating_add(u64::from(self.words[at + 2])).saturating_add(1)
        };
        (0..count).map(area).filter(|area| area.start < super::nodes::BLOCK_LIMIT).collect()
    }

    /// Sets the swap areas of `disk`, each with at least one block.
    pub fn set_swap_areas<'a>(&mut self, disk: DiskIndex, areas: impl Iterator<Item = &'a Range<u64>>) {
        let at = self.disk_at(disk);
        let mut count = 0;
        for (i, area) in areas.take(SWAP_AREAS_MAX).enumerate() {
            let at = at + AREAS + i * AREA_WORDS;
            self.set_long(at, area.start);
            self.words[at + 2] = u32::try_from(area.end - area.start - 1).unwrap_or(u32::MAX);
            count += 1;
        }
        self.words[at + 1] = count;
    }

    /// Takes all of this from `old`.
    pub(super) fn keep_from(&mut self, old: &Self) {
        debug_assert_eq!(self.layout.disks, old.layout.disks, "another set of disks");
        let kept = header::POOL_VALID..self.layout.slots_at();
        self.words[kept.clone()].copy_from_slice(&old.words[kept]);
    }
}
