//! The disk engine. It decides for every guest request what comes from the memory server and what from the disk, and for
//! every evicted page whether to cache it. It is pure: events go in by `handle_*`, actions come out of `poll_action`.
//!
//! A driver (`remoca-disk`, or the simulator) calls it and executes the actions in order. After every `handle_*` call it
//! drains `poll_action` before the next one, except that several messages of a server may be handled in a row.
//! [`DiskEngine`] routes events to its parts: `requests`, `disks`, `pools` (one for each session with a memory server),
//! `placement` (all servers), `race` (between servers and disk), `streams` (that the disk reads on), `admit`, and the index; `watch` feeds
//! the `curves`.
//! 1. A completed read returns, for each sector, the last write that completed before the read began, or a concurrent one.
//! 2. A block that a write touches is unreachable before the write is issued ([`overlap`] guards reads in flight).
//! 3. Every request completes exactly once. No fault of a server reaches the guest.
//! 4. A write completes only after the disk has completed it. A failed flush stays failed.
//! 5. A page is admitted only if it is known content, and delivered only if it is the content asked for.
//!
//! Papers: remoca.txt II; hypervisor-exclusive-cache.txt 3. Decision 0001 (content decides), 0009 (reads).

mod admit;
mod breaker;
mod candidates;
mod contents;
mod curves;
mod discarded;
mod disks;
mod drains;
mod estimate;
mod evictions;
mod fetches;
mod guest;
mod latencies;
mod local;
mod need;
mod numbers;
pub mod overlap;
mod overruns;
mod placement;
mod policy;
mod pool;
mod pool_size;
mod pools;
mod race;
mod random;
mod reads;
mod requests;
mod rival;
mod server;
mod sessions;
mod shares;
mod sharing;
mod speculative;
mod stats;
mod streams;
mod swap;
mod types;
mod watch;

pub use admit::Admission;
pub use breaker::BreakerState;
pub use curves::{CurveReport, DISK_CURVES_MAX};
pub use estimate::Latency;
pub use evictions::{EVICTED_BATCH, EvictedContent};
pub use policy::{CLASSES, Insertion, Policy, PolicyStatus};
pub use race::HedgingStatus;
pub use stats::EngineStats;
pub use types::{
    Action, Admitted, DiskError, Evicted, FetchId, GuestOp, Leaving, PageOutcome, PoolOffer, PoolSlot, RequestId,
    ServerNumber,
};

use crate::fingerprint::{Fingerprint, Fingerprinter};
use crate::index::{CacheIndex, Layout, Origin, SlotCounts, Unusable, Words};
use crate::rules::Rules;
use crate::units::{BlockId, DiskIndex, PageCount, PoolIndex};
use admit::Admit;
use curves::Curves;
use disks::Disks;
use fetches::Source;
use placement::Placement;
use pool::Pool;
use pools::{Limits, Pools};
use race::Race;
use requests::Requests;
use std::collections::VecDeque;
use streams::Streams;

/// Configuration of an engine.
#[derive(Clone, Copy, Debug)]
pub struct EngineConfig {
    /// Number of disk numbers (1 .. 4096): at most this many disks at a time. See [`disk_numbers`].
    pub disks: u16,
    /// Secret key of the fingerprints, random for each VM.
    pub key: [u8; 16],
    /// Seed of the index's hash tables, and of choices that must differ between VMs.
    pub seed: u64,
    /// Size of the cache to ask the servers for, without its local tier.
    pub cache: PageCount,
    /// Size of the local tier. If both are 0, the cache is off.
    pub local: PageCount,
    /// Guest memory, in pages, until [`DiskEngine::set_guest_memory`] says another number. The index is made for it.
    pub guest_memory: PageCount,
    /// Whether the VM has an eviction port, to which an agent may write.
    pub has_port: bool,
    /// Number of frames for each one that is examined, while frames do not show what the guest evicted; 0 to examine
    /// none.
    pub frame_sample: u32,
    /// Maximum number of pools, and of sessions at a time (1 to 16).
    pub pools: u8,
    /// Maximum number of pages that wait for the connection to each server.
    pub send_window: u32,
    /// Maximum number of outstanding REQUESTs to each server.
    pub fetch_limit: u32,
    /// Maximum number of slots processed in one turn while the cache changes its size.
    pub slots_per_turn: u32,
    /// Whether late reads are hedged. Otherwise the disk is asked only after a timeout.
    pub hedge: bool,
    /// Safety rules in force: all of them, except in a test build.
    pub rules: Rules,
}

impl EngineConfig {
    fn all_tiers(&self) -> PageCount {
        PageCount(self.cache.0.saturating_add(self.local.0))
    }
}

/// Snapshot of an engine's sizes and states.
#[derive(Clone, Debug)]
pub struct EngineStatus {
    pub enabled: bool,
    pub connected: bool,
    /// Size that the operator wants, without the local tier.
    pub wanted: PageCount,
    /// Size that all servers granted, without the local tier.
    pub granted: PageCount,
    /// Largest size that they may have granted: what they were asked for counts until they answer.
    pub granted_at_most: PageCount,
    /// Size of the local tier that the operator wants.
    pub local_wanted: PageCount,
    /// Size of the local tier that its server granted.
    pub local_granted: PageCount,
    /// The same of the local tier.
    pub local_granted_at_most: PageCount,
    /// Pools with a session.
    pub pools: Vec<PoolStatus>,
    pub slots: SlotCounts,
    pub known_blocks: PageCount,
    pub index_bytes: usize,
    pub admission: Admission,
    pub policy: PolicyStatus,
    /// State of hedging for the slowest pool.
    pub hedging: HedgingStatus,
}

/// Snapshot of one pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolStatus {
    pub server: ServerNumber,
    /// Whether it is the local tier.
    pub is_local: bool,
    /// Share of the cache that the pool is to have.
    pub wanted: PageCount,
    pub granted: PageCount,
    pub slots: SlotCounts,
    /// Whether it takes no new pages, and is given back once the others have its share.
    pub is_draining: bool,
    /// Pages that the guest received from it in this session.
    pub hits: u64,
    pub hedging: HedgingStatus,
}

/// Disk engine, with its index in the words `M`.
pub struct DiskEngine<M> {
    rules: Rules,
    prints: Fingerprinter,
    seed: u64,
    /// Pages of the guest's memory. The index may have been made for a guest of another size.
    guest_memory: PageCount,
    index: CacheIndex<M>,
    requests: Requests,
    /// Sources of the blocks of the current read, in order; kept to reuse the memory.
    sources: Vec<Source>,
    disks: Disks,
    /// State of all servers, among which the pools are placed.
    placement: Placement,
    pools: Pools,
    race: Race,
    streams: Streams,
    admit: Admit,
    policy: Policy,
    curves: Curves,
    /// Block of the page that the guest evicted last, if one was known to have its content.
    last_evicted: Option<BlockId>,
    /// Number of classes of pages of which the agent sends one, as it says; 1 if it sends all.
    agent_classes: u32,
    actions: VecDeque<Action>,
    stats: EngineStats,
    /// Number of lies of each server that has told any.
    lies: Vec<(ServerNumber, u64)>,
}

/// Maker of indexes for one engine. It can be used on any thread, because making an index touches all of its memory.
#[derive(Clone, Copy, Debug)]
pub struct IndexMaker {
    seed: u64,
    zero: Fingerprint,
}

impl IndexMaker {
    /// Returns an empty index in `words`, which must hold at least [`Layout::words`].
    pub fn make<M: Words>(&self, layout: Layout, words: M) -> CacheIndex<M> {
        CacheIndex::new(words, layout, self.seed, self.zero)
    }
}

/// Returns how many disk numbers to reserve for a VM that starts with `disks` disks.
#[must_use]
pub fn disk_numbers(disks: u16) -> u16 {
    disks.max(128).next_power_of_two()
}

/// Returns the index layout that an engine of this configuration needs.
#[must_use]
pub fn layout(config: &EngineConfig) -> Layout {
    Layout::new(config.all_tiers(), config.guest_memory, config.disks)
}

impl<M: Words> DiskEngine<M> {
    /// Returns an engine whose index lives in `words`, which must hold at least [`layout`]`(config).words()`.
    pub fn new(config: &EngineConfig, words: M) -> Self {
        let prints = Fingerprinter::new(&config.key);
        let index = CacheIndex::new(words, layout(config), config.seed, prints.zero());
        Self::over(config, prints, index)
    }

    /// Returns an engine that continues where the previous process stopped or was killed. `config` must have the key of
    /// that process. The engine keeps the known blocks, the cached pages, the pool, the failed flushes and the swap
    /// areas of that process, but none of its requests.
    ///
    /// Blocks that the process was about to write were forgotten before the write was issued. If anything else may have
    /// written to a disk since, the caller must call [`Self::handle_content_uncertain`]. If the cache is off, only
    /// failed flushes and swap areas are kept.
    ///
    /// # Errors
    /// If the words are not a valid index of this version, key and number of disks. [`Self::new`] can use the words
    /// again.
    pub fn resume(config: &EngineConfig, words: M, origin: Origin<'_>) -> Result<Self, Unusable<M>> {
        let prints = Fingerprinter::new(&config.key);
        let index = CacheIndex::resume(words, origin, config.disks, config.seed, prints.zero())?;
        let mut this = Self::over(config, prints, index);
        let limit = this.index.layout().slot_limit();
        this.pools.want(config.cache.min(limit));
        this.pools.local.want(config.local.min(limit));
        // A process that is killed while it begins a pool leaves slots that no server is known to have.
        for number in PoolIndex::all() {
            if this.index.pool(number).is_none() {
                this.index.drop_pool(number);
            }
        }
        if !this.pools.is_enabled() {
            this.forget_everything();
            PoolIndex::all().for_each(|pool| this.index.aim(pool, PageCount(0)));
        }
        if this.index.slot_counts().used > 0 {
            // A curve of the former process may follow (`restore_curve`).
            this.curves.vm.curve.begin_late();
        }
        this.disks.restore(&this.index);
        this.policy.restore(this.index.is_bimodal());
        Ok(this)
    }

    fn over(config: &EngineConfig, prints: Fingerprinter, mut index: CacheIndex<M>) -> Self {
        index.keep_to(config.rules);
        let is_begun = |number: &PoolIndex| index.pool(*number).is_some() || index.capacity(*number).0 > 0;
        let begun = PoolIndex::all().filter(is_begun).map(|number| usize::from(number.0) + 1).max().unwrap_or(0);
        let limits = Limits {
            pools: config.pools,
            send_window: config.send_window,
            fetches: config.fetch_limit,
            slots_per_turn: config.slots_per_turn.max(1),
        };
        let mut engine = Self {
            rules: config.rules,
            curves: Curves::new(&prints, config.all_tiers()),
            last_evicted: None,
            agent_classes: 1,
            prints,
            seed: config.seed,
            guest_memory: config.guest_memory,
            index,
            requests: Requests::default(),
            sources: Vec::new(),
            disks: Disks::new(config.rules),
            placement: Placement::new(config.seed),
            pools: Pools::new(config.cache, config.local, limits, begun),
            race: Race::new(config.hedge),
            streams: Streams::new(config.hedge),
            admit: Admit::new(config.has_port, config.frame_sample),
            policy: Policy::new(),
            actions: VecDeque::new(),
            stats: EngineStats::default(),
            lies: Vec::new(),
        };
        engine.follow_change();
        engine
    }

    /// Returns whether REQUESTs are outstanding, including those of reads that the disk answered first.
    pub fn is_owed_pages(&self) -> bool {
        self.pools.is_owed_pages()
    }

    /// Closes the engine so that another program can take over. Only [`Self::reopen`] may follow. Does nothing while
    /// [pages are owed](Self::is_owed_pages); in that case the successor rebuilds the index.
    pub fn close(&mut self) {
        self.index.close();
    }

    /// Reopens the engine if no other program took over.
    pub fn reopen(&mut self) {
        self.index.reopen();
    }

    /// Returns the first words of the index for another process, closed unless [pages are owed](Self::is_owed_pages). All words
    /// after them are the same in a closed index. This engine goes on.
    pub fn closed_head(&mut self) -> Vec<u32> {
        self.index.closed_head()
    }

    /// Drops outstanding REQUESTs and closes the index for a successor, at the end of the process. No call may follow.
    pub fn end(&mut self) {
        for pool in PoolIndex::all() {
            self.pools.take_fetches(pool, &mut self.index);
        }
        self.index.close();
    }

    /// Returns how many pages of guest memory are covered: by the index, beyond the cached ones, or by the curve while there is no cache.
    pub fn covered_guest_memory(&self) -> PageCount {
        if self.is_ghost() { self.guest_memory } else { self.index.layout().resident_limit() }
    }

    /// Follows a change of the guest's memory, in pages.
    pub fn set_guest_memory(&mut self, guest_memory: PageCount) {
        if std::mem::replace(&mut self.guest_memory, guest_memory) != guest_memory {
            self.follow_change();
        }
    }

    /// Returns the next action to execute, or `None` if there is none.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Sets the counters to those of the previous engine of the same process.
    pub fn count_on(&mut self, stats: EngineStats) {
        self.stats = stats;
    }

    /// Returns the counters since the start.
    pub fn stats(&self) -> EngineStats {
        self.stats
    }

    /// Returns the current sizes and states.
    pub fn status(&self) -> EngineStatus {
        EngineStatus {
            enabled: self.pools.is_enabled(),
            connected: self.pools.is_up(),
            wanted: self.pools.wanted(),
            granted: self.pools.granted(false),
            granted_at_most: self.pools.granted_at_most(false),
            local_wanted: self.pools.local.wanted(),
            local_granted: self.pools.granted(true),
            local_granted_at_most: self.pools.granted_at_most(true),
            pools: self.pool_statuses(),
            slots: self.index.slot_counts(),
            known_blocks: self.index.known_blocks(),
            index_bytes: self.index.region_bytes(),
            admission: self.admit.admission(),
            policy: self.policy.status(),
            hedging: self.race.status(self.race.slowest(self.pools.up().map(Pool::number).collect())),
        }
    }

    fn pool_statuses(&self) -> Vec<PoolStatus> {
        let status = |pool: &Pool| {
            Some(PoolStatus {
                server: pool.server()?,
                is_local: pool.is_local(),
                wanted: pool.size.share(),
                granted: pool.size.granted(),
                slots: self.index.pool_slot_counts(pool.number()),
                is_draining: pool.drain.is_some(),
                hits: pool.hits,
                hedging: self.race.status(pool.number()),
            })
        };
        self.pools.up().filter_map(status).collect()
    }

    /// Returns the index for inspection.
    pub fn index(&self) -> &CacheIndex<M> {
        &self.index
    }

    /// Returns the layout to move to if a cache of `cache` pages, in all tiers, or a guest of `guest_memory` pages needs a larger
    /// index. Returns `None` if the index is large enough, or as large as can be. The number of slots for a larger cache is
    /// rounded up to a power of two, so that moves are rare.
    pub fn needs_layout(&self, cache: PageCount, guest_memory: PageCount) -> Option<Layout> {
        let now = self.index.layout();
        let resident = now.resident_limit().0;
        if cache <= now.slot_limit() && guest_memory.0 <= resident {
            return None;
        }
        let slots = if cache <= now.slot_limit() { now.slot_limit().0 } else { cache.0.next_power_of_two() };
        let layout = self.index.layout_for(PageCount(slots), PageCount(guest_memory.0.max(resident)));
        (layout != now).then_some(layout)
    }

    /// Returns the layout to move to if the index for a cache of `cache` pages, in all tiers, and a guest of `guest_memory` pages needs
    /// less than seven eighths of the current memory. Otherwise returns `None`. There are slots for half as much again as
    /// the cache, so that it can become somewhat larger without a move, and as many as before while pools change their
    /// sizes.
    pub fn spare_layout(&self, cache: PageCount, guest_memory: PageCount) -> Option<Layout> {
        let now = self.index.layout();
        let slots = if self.are_sizes_changing() {
            now.slot_limit()
        } else {
            let roomy = PageCount(cache.0.saturating_add(cache.0 / 2).min(1 << 30).next_power_of_two());
            roomy.max(self.index.least_slots()).min(now.slot_limit())
        };
        let layout = self.index.layout_for(slots, guest_memory);
        (layout.words() < now.words() - now.words() / 8).then_some(layout)
    }

    /// Returns whether any pool is changing its size, or still has to give back chunks of slots.
    pub fn are_sizes_changing(&self) -> bool {
        self.pools.are_changing(&self.index)
    }

    /// Returns a maker of indexes that this engine can move to.
    pub fn index_maker(&self) -> IndexMaker {
        IndexMaker { seed: self.seed, zero: self.prints.zero() }
    }

    /// Starts to move the index into `target`, which [`Self::index_maker`] made.
    pub fn begin_move(&mut self, target: CacheIndex<M>) {
        self.index.begin_move(target);
    }

    /// Moves `entries` more entries, which takes about 100 ns each. Returns whether all entries were moved, so that only
    /// [`Self::finish_move`] is left.
    pub fn move_index(&mut self, entries: u32) -> bool {
        self.index.move_entries(entries)
    }

    /// Switches to the index in its new region, and returns the old words. Returns `None` if no move is in progress.
    pub fn finish_move(&mut self) -> Option<M> {
        self.index.finish_move()
    }

    /// Moves the index to another region in one step, and returns the old words.
    pub fn replace_index(&mut self, layout: Layout, words: M) -> Option<M> {
        self.begin_move(self.index_maker().make(layout, words));
        self.finish_move()
    }

    /// Returns the number of guest requests that are not completed yet.
    pub fn requests_in_flight(&self) -> usize {
        self.requests.in_flight()
    }

    /// Records the errno of a failed flush or durable write of the disk, from this process or the previous one. `None`
    /// clears the record.
    pub fn set_failed_flush(&mut self, disk: DiskIndex, errno: Option<i32>) {
        self.index.set_flush_failed(disk, errno);
    }
}

#[cfg(test)]
mod tests;
