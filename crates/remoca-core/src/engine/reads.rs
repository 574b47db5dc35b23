//! Guest reads: which of them the cache answers, and which the disk.

use super::breaker::Route;
use super::fetches::{Fetch, Source};
use super::guest::block_count;
use super::requests::{Pages, ReadReason, Request};
use super::streams::StreamRoute;
use super::{Action, DiskEngine, GuestOp, RequestId};
use crate::index::Words;
use crate::units::{
    BlockId, BlockNumber, ByteRange, DiskIndex, Nanos, PAGE_SIZE, POOLS_MAX, PoolIndex, PoolSet, whole_blocks,
};
use std::ops::Range;

/// Length of a page, in the type that actions use.
const PAGE_LENGTH: u32 = 4096;
/// Maximum number of blocks ahead of a stream that are looked up with one of its reads.
const LOOK_AHEAD: u64 = 256;
/// Number of blocks of these whose look-ups are prefetched together.
const LOOK_AHEAD_BATCH: u64 = 32;

/// Pages that a read needs from memory servers.
#[derive(Clone, Copy, Debug)]
struct ToFetch {
    count: u32,
    pools: PoolSet,
}

impl<M: Words> DiskEngine<M> {
    pub(super) fn begin_read(&mut self, now: Nanos, id: RequestId, disk: DiskIndex, range: ByteRange) {
        self.race.begin_read(disk);
        self.streams.begin_read(disk, range);
        self.stats.read_blocks += block_count(range);
        if range.covered_blocks() != range.touched_blocks() {
            self.streams.note_route(range, false);
            self.stats.misaligned_reads += 1;
            self.note_missed(disk, block_count(range));
            self.ask_disk(now, id, ReadReason::Needed);
            return;
        }
        if !self.disks.is_sound(disk, range) {
            self.streams.note_route(range, false);
            self.stats.missed_blocks += block_count(range);
            self.note_missed(disk, block_count(range));
            self.ask_disk(now, id, ReadReason::Needed);
            return;
        }
        let blocks = range.covered_blocks();
        let found = self.cacheable(now, disk, blocks.clone());
        match found {
            Ok(fetches) => {
                let (route, reason) = self.route(now, disk, range, fetches);
                if fetches.count > 0 {
                    self.streams.note_route(range, route != Route::Server);
                }
                if fetches.count > 0 && route == Route::Disk {
                    self.stats.covered_blocks += block_count(range);
                    self.ask_disk(now, id, reason);
                } else {
                    self.read_from_cache(now, id, disk, blocks, fetches, (route, reason));
                }
            }
            Err(cached) => {
                self.streams.note_route(range, false);
                self.stats.covered_blocks += cached;
                self.stats.missed_blocks += (blocks.end - blocks.start) - cached;
                self.ask_disk(now, id, ReadReason::Needed);
            }
        }
    }

    /// Returns where a read goes that the cache can answer, and why the disk is asked if it is.
    fn route(&mut self, now: Nanos, disk: DiskIndex, range: ByteRange, fetches: ToFetch) -> (Route, ReadReason) {
        let ToFetch { count, pools } = fetches;
        match self.race.route(now, disk, pools) {
            Route::Server if count > 0 && !self.race.is_saturated(disk) => {
                (self.stream_route(now, disk, range, fetches), ReadReason::Stream)
            }
            Route::Both => (Route::Both, ReadReason::Probe),
            route => (route, ReadReason::Needed),
        }
    }

    fn stream_route(&mut self, now: Nanos, disk: DiskIndex, range: ByteRange, fetches: ToFetch) -> Route {
        let slowest = self.race.slowest(fetches.pools);
        let route = match self.streams.route(now, disk, range, fetches.count, slowest) {
            StreamRoute::PoolsIfCached(needed) if !self.are_cached(disk, range, needed) => self.streams.disk_route(),
            route => route,
        };
        let route = match route {
            StreamRoute::Pools | StreamRoute::PoolsIfCached(_) => return Route::Server,
            StreamRoute::Disk => Route::Disk,
            StreamRoute::Both => Route::Both,
        };
        self.stats.stream_reads += 1;
        route
    }

    /// Returns whether the `needed` blocks after a read are known to be cached. It looks for a few more with each read.
    fn are_cached(&mut self, disk: DiskIndex, range: ByteRange, needed: u64) -> bool {
        let after = range.covered_blocks().end;
        let blocks = whole_blocks(self.disks.bytes(disk).unwrap_or(0));
        let needed = needed.min(blocks.saturating_sub(after));
        let looked_for = self.streams.look_for(disk, after, needed, LOOK_AHEAD);
        let id = |bno| BlockId { disk, bno: BlockNumber(bno) };
        let is_missing = |bno: &u64| matches!(self.source(id(*bno)), Source::Disk);
        let mut end = looked_for.start;
        let mut missing = None;
        while missing.is_none() && end < looked_for.end {
            let batch = end..(end + LOOK_AHEAD_BATCH).min(looked_for.end);
            self.index.prefetch(batch.clone().map(id));
            missing = batch.clone().find(is_missing);
            end = missing.unwrap_or(batch.end);
        }
        self.streams.note_found(disk, end, after, needed)
    }

    /// Returns the pages to fetch if the whole read can be answered without the disk. Otherwise returns an error with the
    /// number of blocks that are cached or zero. A block that must come from the disk brings its neighbours along for free
    /// (decision 0009). Stores the source of each block for [`Self::read_from_cache`], and tells the curves of it.
    fn cacheable(&mut self, now: Nanos, disk: DiskIndex, blocks: Range<u64>) -> Result<ToFetch, u64> {
        let (mut counts, mut zeroes, mut cached) = ([0_u32; POOLS_MAX as usize], 0, 0);
        let count = blocks.end - blocks.start;
        self.sources.clear();
        if count > 1 {
            self.index.prefetch(blocks.clone().map(|bno| BlockId { disk, bno: BlockNumber(bno) }));
        }
        let limit = self.begin_telling(disk);
        for bno in blocks {
            let block = BlockId { disk, bno: BlockNumber(bno) };
            let source = self.source(block);
            self.sources.push(source);
            match source {
                Source::Zero => {
                    zeroes += 1;
                    continue;
                }
                Source::Slot { pool, .. } => {
                    cached += 1;
                    counts[usize::from(pool.0)] += 1;
                }
                Source::Disk => {}
            }
            if let Some(limit) = limit {
                self.tell_read(block, limit);
            }
        }
        self.end_telling(now, count - zeroes);
        let there = zeroes + cached;
        let asked = || PoolIndex::all().zip(counts).filter(|(_, count)| *count > 0);
        let reachable = asked().all(|(pool, count)| self.pools.can_fetch(pool, count));
        if there == count && reachable {
            Ok(ToFetch { count: counts.iter().sum(), pools: asked().map(|(pool, _)| pool).collect() })
        } else {
            Err(there)
        }
    }

    fn source(&self, block: BlockId) -> Source {
        let Some((hint, content)) = self.index.look_up(block) else { return Source::Disk };
        if content == self.prints.zero() {
            return Source::Zero;
        }
        let Some(slot) = self.index.cached_near(hint, content) else { return Source::Disk };
        match self.index.place_of(slot) {
            Some((pool, _)) => Source::Slot { slot, pool, content, hint },
            None => Source::Disk,
        }
    }

    fn read_from_cache(
        &mut self,
        now: Nanos,
        id: RequestId,
        disk: DiskIndex,
        blocks: Range<u64>,
        fetches: ToFetch,
        (route, reason): (Route, ReadReason),
    ) {
        let (mut sent, serial, probe) = (0, self.requests.newest(), route == Route::Both);
        for (at, (bno, offset)) in blocks.zip((0..).step_by(PAGE_SIZE)).enumerate() {
            match self.sources[at] {
                Source::Zero => {
                    self.actions.push_back(Action::ZeroFill { request: id, offset, length: PAGE_LENGTH });
                }
                Source::Slot { slot, pool, content, hint } => {
                    let Some((_, at)) = self.pools.place_of(slot, &self.index) else { break };
                    if !self.index.pin(slot) {
                        break;
                    }
                    let block = BlockId { disk, bno: BlockNumber(bno) };
                    let fetch = Fetch { request: id, serial, block, hint, slot, pool, content, offset, probe };
                    let fetch = self.pools.begin_fetch(fetch);
                    self.actions.push_back(Action::Fetch { fetch, at });
                    sent += 1;
                }
                Source::Disk => break,
            }
        }
        if sent < fetches.count {
            // A slot has the maximum number of pins. The disk answers the read, and the pages already requested arrive
            // late.
            self.give_up_pages(now, id);
        } else if fetches.count == 0 {
            self.complete_from_cache(id, 0);
        } else {
            let pools = fetches.pools;
            self.requests.begin_wait(id, fetches.count, pools, self.race.slowest(pools));
            match route {
                Route::Both if reason == ReadReason::Stream => {
                    self.streams.begin_comparison(now, serial, self.race.slowest(pools), fetches.count);
                    self.ask_disk(now, id, reason);
                }
                Route::Both if self.race.begin_probe(now, id, disk, serial, pools, &mut self.stats) => {
                    self.ask_disk(now, id, ReadReason::Probe);
                }
                Route::Both => {}
                Route::Server | Route::Disk => self.race.begin_wait(now, id, serial, pools),
            }
        }
    }

    /// Completes a read without the disk, with `fetched` pages from the server and zeroes for the rest. Blocks are
    /// counted here and not as they arrive, because until now the disk might have had to answer for all of them.
    pub(super) fn complete_from_cache(&mut self, id: RequestId, fetched: u32) {
        if let Some(Request { op: GuestOp::Read(range), disk, .. }) = self.requests.get(id) {
            self.stats.reads_from_cache += 1;
            self.stats.hit_blocks += u64::from(fetched);
            self.stats.zero_blocks += block_count(range) - u64::from(fetched);
            self.note_brought_in(disk, range, u64::from(fetched));
        }
        self.complete(id, Ok(()));
    }

    /// Sends a whole read to the disk. The server may still answer the read first.
    pub(super) fn ask_disk(&mut self, now: Nanos, id: RequestId, reason: ReadReason) {
        let Some(Request { disk, op: op @ GuestOp::Read(range), pages, .. }) = self.requests.get(id) else { return };
        let continues_after = self.streams.begin_io(now, disk, range, reason);
        self.requests.begin_io(id, self.race.begin_io(now, disk, reason, continues_after));
        self.disks.begin_read(disk, id, range);
        self.actions.push_back(match pages {
            Pages::Waiting { .. } => Action::DiskToo { request: id, disk, op },
            Pages::None | Pages::GivenUp => Action::Disk { request: id, disk, op },
        });
    }

    /// Gives up the pages of a read, and sends the read to the disk unless the disk is already reading for it.
    pub(super) fn give_up_pages(&mut self, now: Nanos, id: RequestId) {
        let Some(request) = self.requests.give_up_pages(id) else { return };
        self.race.note_no_page(&request);
        if request.io.is_none() {
            self.ask_disk(now, id, ReadReason::Needed);
        }
    }
}
