//! Streams: cached reads that a disk answers sooner, because it reads on where it is, or that it must answer to stay there.
//!
//! On a disk that seeks, a read that continues the one before is cheap, and the read after a gap is not. Without remoca the disk reads a
//! file in one go. A cache that answers parts of it has the disk seek after each part, and a pool may take longer for many pages than a
//! disk that reads on. So a read whose blocks are all cached goes where the rest of its stream costs least:
//!
//! | The disk is | A read from the pools costs | The read goes to |
//! |---|---|---|
//! | there | more than one that continues | the disk |
//! | there | less | the pools if so much is cached from here on that they save a seek, otherwise the disk |
//! | elsewhere | less | the pools |
//! | elsewhere | more | the disk if the stream is expected to go on until the seek has paid, otherwise the pools |
//!
//! The disk is there if the read continues the newest one that it was sent because it needed the disk or was to read on. All costs are
//! measured: of disk reads that continue and of those that do not, by disk, and of reads from pools, by pool; each is the time since the
//! read before it was done, so that reads that overlap count once. How long streams go on is learnt from those that ended. While
//! anything of that is unknown, where a seek costs little, and while the disk makes no progress, the pools answer. Decision 0049.

mod costs;
mod runs;

use super::requests::{DiskIo, ReadReason};
use crate::units::{ByteRange, DiskIndex, Nanos, PAGE_SIZE_U64, PoolIndex};
use costs::Costs;
use runs::Runs;
use std::ops::Range;

/// Distance within which a read continues the one before: 256 KiB.
const NEAR: u64 = 256 << 10;
/// Least difference between a read that does not continue and one that does, each from its start to its end; and the divisor of the cost
/// of one that continues, which it must reach too. Where the difference is smaller, as with disks that have no moving parts, positions do
/// not matter.
const SEEK_MIN_NS: u64 = 1_000_000;
const SEEK_DIVISOR: u64 = 4;
/// Number of cached blocks that are looked for at most: 64 MiB.
const AHEAD_MAX: u64 = 1 << 14;
/// Reads that the disk answers for each one that also goes to the pools, whose cost is otherwise not measured.
const COMPARE_INTERVAL: u32 = 64;
/// Pages of cached reads that the disk answers in a row until what the guest evicts of them is known to be copied in vain: 16 MiB. And how
/// many of them one other request counts for: one in a while is answered as well as without.
const COVERED_MAX: u64 = 1 << 12;
const COVERED_FOR_ANOTHER: u64 = 1 << 10;
/// A disk that took this many times as long as one read and a seek, and has completed nothing, makes no progress.
const STALL_FACTOR: u64 = 4;

/// Destination of a read whose blocks are all cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamRoute {
    Pools,
    Disk,
    /// The disk, and the pools beside it to measure what they cost.
    Both,
    /// The pools if this many blocks after the read are cached, otherwise the disk.
    PoolsIfCached(u64),
}

/// What is known of one disk.
#[derive(Debug, Default)]
struct Disk {
    /// End of the newest read that it was sent; `None` if nothing is known to continue that.
    end: Option<u64>,
    /// Whether that was a read that needed the disk, or was to read on. A hedge or a probe is not followed: it may still seek, and may be
    /// the only one there.
    is_followed: bool,
    /// Reads in flight.
    in_flight: u32,
    /// When it last completed a read, or was sent one while idle.
    progress: Nanos,
    /// Costs of reads that continue, and of reads that do not.
    continued: Costs,
    apart: Costs,
    /// Time from start to end of reads that continue. Where many are in flight it is more than they cost, and a disk that is merely far
    /// away takes as long for any other read.
    whole: Costs,
    /// End of the guest's last read, and the pages of the run that it is part of.
    run_end: u64,
    run_pages: u64,
    runs: Runs,
    /// Blocks that were found cached, ahead of a stream.
    ahead: Range<u64>,
}

impl Disk {
    /// Returns what a read that does not continue costs more than one that does, or `None` if that is not known, or positions do not matter.
    fn seek_ns(&self, range: ByteRange) -> Option<u64> {
        let [continued, apart, whole] = [&self.continued, &self.apart, &self.whole].map(|costs| costs.of(pages(range)));
        let (continued, apart, whole) = (continued?, apart?, whole?);
        let seeks = apart.saturating_sub(whole) >= SEEK_MIN_NS.max(continued / SEEK_DIVISOR);
        seeks.then_some(apart.saturating_sub(continued))
    }
}

/// What is known of one pool.
#[derive(Debug, Default)]
struct Pool {
    costs: Costs,
    /// When it last answered a read.
    done: Nanos,
}

/// Streams of all disks.
#[derive(Debug)]
pub(super) struct Streams {
    /// Whether servers are compared with disks at all.
    enabled: bool,
    disks: Vec<Disk>,
    pools: Vec<Pool>,
    /// Reads that go to the disk alone before the next one that goes both ways.
    until_comparison: u32,
    /// The newest of those.
    comparison: Option<Comparison>,
    covered: Covered,
}

/// Whether the disk answers nearly all that is read although it is cached.
#[derive(Debug, Default)]
struct Covered {
    /// Pages of such reads; other requests take some away.
    pages: u64,
    are_all: bool,
}

impl Covered {
    fn add(&mut self, pages: u64) {
        self.pages = (self.pages + pages).min(COVERED_MAX);
        self.are_all |= self.pages == COVERED_MAX;
    }

    fn note_another(&mut self) {
        self.pages = self.pages.saturating_sub(COVERED_FOR_ANOTHER);
        self.are_all &= self.pages > COVERED_MAX / 2;
    }
}

/// Read that goes to the disk and to pools. The disk may well be first; what the pools cost is known when their last page is there.
#[derive(Debug)]
struct Comparison {
    serial: u64,
    pool: PoolIndex,
    count: u32,
    /// Pages that have not come. If one of them is missing, was not sent or is lost with its session, there is always one left.
    owed: u32,
    began: Nanos,
}

/// What a read costs at each place, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Compared {
    pools: u64,
    continued: u64,
    seek: u64,
}

impl Streams {
    pub(super) fn new(enabled: bool) -> Self {
        let (disks, pools, covered) = (Vec::new(), Vec::new(), Covered::default());
        Self { enabled, disks, pools, until_comparison: COMPARE_INTERVAL, comparison: None, covered }
    }

    /// Forgets what is known of a disk's number.
    pub(super) fn reset_disk(&mut self, disk: DiskIndex) {
        *self.disk(disk) = Disk::default();
    }

    /// Forgets what is known of a pool's number.
    pub(super) fn reset_pool(&mut self, pool: PoolIndex) {
        *self.pool(pool) = Pool::default();
    }

    fn disk(&mut self, disk: DiskIndex) -> &mut Disk {
        let number = usize::from(disk.0);
        if self.disks.len() <= number {
            self.disks.resize_with(number + 1, Disk::default);
        }
        &mut self.disks[number]
    }

    fn pool(&mut self, pool: PoolIndex) -> &mut Pool {
        let number = usize::from(pool.0);
        if self.pools.len() <= number {
            self.pools.resize_with(number + 1, Pool::default);
        }
        &mut self.pools[number]
    }

    /// Notes that the guest begins a read. It goes on with the run of reads before it, or ends that and begins another one.
    pub(super) fn begin_read(&mut self, disk: DiskIndex, range: ByteRange) {
        let disk = self.disk(disk);
        if disk.run_pages > 0 && !is_near(disk.run_end, range) {
            disk.runs.note_end(disk.run_pages);
            disk.run_pages = 0;
        }
        disk.run_pages = disk.run_pages.saturating_add(pages(range));
        disk.run_end = range.end();
    }

    /// Notes a read that goes to the disk. Returns the length of the gap in bytes if it continues what the disk was sent before.
    pub(super) fn begin_io(
        &mut self,
        now: Nanos,
        disk: DiskIndex,
        range: ByteRange,
        reason: ReadReason,
    ) -> Option<u64> {
        let disk = self.disk(disk);
        disk.is_followed = matches!(reason, ReadReason::Needed | ReadReason::Stream);
        if disk.in_flight == 0 {
            disk.progress = now;
        }
        disk.in_flight += 1;
        let continues_after = disk.end.replace(range.end()).filter(|end| is_near(*end, range));
        if continues_after.is_none() {
            // What was found ahead of an earlier stream may no longer be cached.
            disk.ahead = 0..0;
        }
        continues_after.map(|end| range.offset - end)
    }

    /// Notes a modification that goes to the disk: no read continues it.
    pub(super) fn begin_modification(&mut self, disk: DiskIndex) {
        self.covered.note_another();
        self.disk(disk).end = None;
    }

    /// Notes a completed disk read and what it cost. After one that failed the disk is preferred to no pool until its costs are known
    /// again.
    pub(super) fn end_io(&mut self, now: Nanos, disk: DiskIndex, range: ByteRange, io: &DiskIo, is_ok: bool) {
        let disk = self.disk(disk);
        disk.in_flight -= 1;
        let before = std::mem::replace(&mut disk.progress, now);
        if !is_ok {
            (disk.continued, disk.apart, disk.whole) = Default::default();
            // If it was this read that was compared, it may wait for its pools alone now. Its cost is then noted as that of any other.
            self.comparison = None;
            return;
        }
        if !io.is_undisturbed {
            return;
        }
        // The disk passes a gap as if it read it.
        let pages = pages(range) + io.continues_after.unwrap_or(0) / PAGE_SIZE_U64;
        let costs = if io.continues_after.is_some() { &mut disk.continued } else { &mut disk.apart };
        costs.note_end(now, io.since, before, pages);
        if io.continues_after.is_some() {
            disk.whole.note(now, pages, now.since_ns(io.since));
        }
    }

    /// Notes a disk read that the driver left out.
    pub(super) fn skip_io(&mut self, disk: DiskIndex) {
        let disk = self.disk(disk);
        disk.in_flight -= 1;
        disk.end = None;
    }

    /// Notes a read that `pool`, the slowest of those that were asked, answered with `count` pages.
    pub(super) fn note_answer(&mut self, now: Nanos, pool: PoolIndex, count: u32, began: Nanos) {
        let pool = self.pool(pool);
        let before = std::mem::replace(&mut pool.done, now);
        pool.costs.note_end(now, began, before, count.into());
    }

    /// Notes a read that goes to the disk and for `count` pages to pools, `pool` the slowest of them.
    pub(super) fn begin_comparison(&mut self, now: Nanos, serial: u64, pool: PoolIndex, count: u32) {
        self.comparison = Some(Comparison { serial, pool, count, owed: count, began: now });
    }

    /// Notes that a server answered with a page of the read of this serial, however late. A read of which one page is never noted says
    /// nothing about what pools cost.
    pub(super) fn note_page(&mut self, now: Nanos, serial: u64) {
        let Some(it) = self.comparison.as_mut().filter(|it| it.serial == serial) else { return };
        it.owed -= 1;
        if it.owed == 0
            && let Some(it) = self.comparison.take()
        {
            self.note_answer(now, it.pool, it.count, it.began);
        }
    }

    /// Notes whether the disk is to answer a read although it is cached.
    pub(super) fn note_route(&mut self, range: ByteRange, is_covered: bool) {
        if is_covered {
            self.covered.add(pages(range));
        } else {
            self.covered.note_another();
        }
    }

    /// Returns whether the disk answers nearly all that is read although it is cached. Copies of what the guest evicts are in vain then:
    /// they are in the cache already, and not asked for.
    pub(super) fn covers_all(&self) -> bool {
        self.covered.are_all
    }

    /// Returns where a read goes of which `count` pages are in pools, `pool` the slowest of them, and the rest is zero.
    /// [`Self::begin_read`] knows of the read.
    pub(super) fn route(
        &mut self,
        now: Nanos,
        disk: DiskIndex,
        range: ByteRange,
        count: u32,
        pool: PoolIndex,
    ) -> StreamRoute {
        let Some(costs) = self.compared(now, disk, range, count, pool) else { return StreamRoute::Pools };
        let pages = pages(range);
        let disk = self.disk(disk);
        let is_there = disk.is_followed && disk.end.is_some_and(|end| is_near(end, range));
        let (saved, lost) = (costs.continued.saturating_sub(costs.pools), costs.pools.saturating_sub(costs.continued));
        if let Some(saves_a_seek) = costs.seek.saturating_mul(pages).checked_div(saved) {
            let needed = saves_a_seek.saturating_sub(pages);
            return match (is_there, needed <= AHEAD_MAX) {
                (false, _) => StreamRoute::Pools,
                (true, true) => StreamRoute::PoolsIfCached(needed),
                (true, false) => self.disk_route(),
            };
        }
        let to_come = disk.runs.expected(disk.run_pages).saturating_add(pages);
        if is_there || to_come.saturating_mul(lost) > costs.seek.saturating_mul(pages) {
            self.disk_route()
        } else {
            StreamRoute::Pools
        }
    }

    /// Returns what a read of `pages` pages from a pool costs, in nanoseconds.
    #[cfg(test)]
    pub(super) fn pool_cost(&mut self, pool: PoolIndex, pages: u64) -> Option<u64> {
        self.pool(pool).costs.of(pages)
    }

    /// Returns what a read costs at each place, or `None` if that is not known, positions do not matter, or the disk makes no progress.
    fn compared(
        &mut self,
        now: Nanos,
        disk: DiskIndex,
        range: ByteRange,
        count: u32,
        pool: PoolIndex,
    ) -> Option<Compared> {
        if !self.enabled {
            return None;
        }
        let pools = self.pool(pool).costs.of(count.into())?;
        let disk = self.disk(disk);
        let continued = disk.continued.of(pages(range))?;
        let seek = disk.seek_ns(range)?;
        let is_stalled = disk.in_flight > 0 && now.since_ns(disk.progress) > (continued + seek) * STALL_FACTOR;
        (!is_stalled).then_some(Compared { pools, continued, seek })
    }

    /// Returns whether a completed disk read was cheap because it continued another one, on a disk that seeks. It says nothing of what the
    /// disk would take for a read that goes to the pools.
    pub(super) fn was_cheap(&self, disk: DiskIndex, range: ByteRange, io: &DiskIo) -> bool {
        let disk = self.disks.get(usize::from(disk.0));
        self.enabled && io.continues_after.is_some() && disk.is_some_and(|disk| disk.seek_ns(range).is_some())
    }

    /// Returns the route of a read that the disk is to answer.
    pub(super) fn disk_route(&mut self) -> StreamRoute {
        self.until_comparison -= 1;
        if self.until_comparison > 0 {
            return StreamRoute::Disk;
        }
        self.until_comparison = COMPARE_INTERVAL;
        StreamRoute::Both
    }

    /// Returns the blocks after block `after` to look for, of `needed`, so that their number is known: those that were not found before,
    /// at most `most` of them.
    pub(super) fn look_for(&mut self, disk: DiskIndex, after: u64, needed: u64, most: u64) -> Range<u64> {
        let ahead = &mut self.disk(disk).ahead;
        if !(ahead.start..=ahead.end).contains(&after) {
            *ahead = after..after;
        }
        ahead.end..(after + needed).min(ahead.end + most).max(ahead.end)
    }

    /// Notes that the blocks up to `end` are cached. Returns whether these are `needed` after block `after`.
    pub(super) fn note_found(&mut self, disk: DiskIndex, end: u64, after: u64, needed: u64) -> bool {
        self.disk(disk).ahead.end = end;
        end >= after + needed
    }
}

/// Returns whether a read begins within [`NEAR`] after `end`.
fn is_near(end: u64, range: ByteRange) -> bool {
    (end..=end.saturating_add(NEAR)).contains(&range.offset)
}

fn pages(range: ByteRange) -> u64 {
    range.length.div_ceil(PAGE_SIZE_U64).max(1)
}

#[cfg(test)]
mod tests;
