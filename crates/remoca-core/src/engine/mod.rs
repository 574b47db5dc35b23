//! The disk engine: decides for every guest request what comes from the memory server and what from the disk, and for
//! every evicted page whether it may be cached. Pure: events go in by `handle_*`, actions come out of `poll_action`.
//!
//! A driver (`remoca-disk`, or the simulator) calls it and executes the actions in order. It drains `poll_action` after
//! every `handle_*` call before the next; only messages of a server may be handled several at a time. It owns the index
//! and the state of each request and of the server link.
//! 1. A completed read returns for each sector the last write completed before it began, or a concurrent one.
//! 2. A block that a write touches is unreachable before the write is issued ([`overlap`] guards reads under way).
//! 3. Every request completes exactly once; nothing a server does reaches the guest.
//! 4. A write completes after the disk completed it. A failed flush stays failed.
//! 5. A page is admitted only if it is known content, and delivered only if it is the content asked for.
//!
//! Papers: remoca.txt II; hypervisor-exclusive-cache.txt 3. Decision 0001 (content decides), 0009 (reads).

mod admission;
mod disk;
mod evict;
mod guest;
pub mod overlap;
mod placement;
mod server;
mod size;
mod stats;
mod swap;
mod types;

pub use admission::Admission;
pub use stats::EngineStats;
pub use types::{Action, DiskError, Evicted, FetchId, GuestOp, PageOutcome, PoolOffer, RequestId, ServerNumber};

use crate::fingerprint::Fingerprinter;
use crate::index::{CacheIndex, Layout, SlotCounts};
use crate::rules::{Rule, Rules};
use crate::units::{ByteRange, DiskIndex, Nanos, PageCount};
use admission::Sources;
use evict::Feedback;
use overlap::Overlaps;
use placement::Placement;
use server::{Fetches, Link};
use std::collections::VecDeque;
use std::ops::DerefMut;
use swap::SwapAreas;

/// What an engine is made from.
#[derive(Clone, Copy, Debug)]
pub struct EngineConfig {
    /// Number of disks of the VM (1 .. 4096).
    pub disks: u16,
    /// Secret key of the fingerprints, random for each VM.
    pub key: [u8; 16],
    /// Seed of the index's hash chains, and of what must not be the same in all VMs.
    pub seed: u64,
    /// Size of the cache that is asked of the server; 0 is off.
    pub cache: PageCount,
    /// Pages of memory the guest has: so many blocks beyond the cached ones are known at most.
    pub guest_memory: PageCount,
    /// Whether the VM has an eviction port, which an agent may write to.
    pub has_port: bool,
    /// While the guest's frames do not show what it evicted, one of so many is looked at. 0: none ever is.
    pub frame_sample: u32,
    /// Most pages that may wait for the connection to the server.
    pub send_window: u32,
    /// Most REQUESTs without reply.
    pub fetch_limit: u32,
    /// All rules, except in a build that shows what they are for.
    pub rules: Rules,
}

/// Sizes and states of an engine at one moment.
#[derive(Clone, Copy, Debug)]
pub struct EngineStatus {
    pub enabled: bool,
    pub connected: bool,
    /// The server is connected but late; reads avoid it.
    pub stalled: bool,
    /// What the operator asked for.
    pub wanted: PageCount,
    /// What the server granted.
    pub granted: PageCount,
    pub slots: SlotCounts,
    pub known_blocks: PageCount,
    pub index_bytes: usize,
    pub admission: Admission,
    /// Running mean of disk reads.
    pub disk_read_ns: u64,
    /// Running mean of fetched pages.
    pub fetch_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Waiting for `left` of the `asked` pages of the server.
    Fetching { left: u32, asked: u32 },
    /// Waiting for the disk.
    Disk,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    disk: DiskIndex,
    op: GuestOp,
    phase: Phase,
    issued: Nanos,
    /// A read that waited for the server before the disk was asked.
    fell_back: bool,
    /// Tells this request from later ones with the same id.
    serial: u64,
}

/// The engine, with its index in the words `M`.
pub struct DiskEngine<M> {
    rules: Rules,
    prints: Fingerprinter,
    index: CacheIndex<M>,
    seed: u64,
    requests: Vec<Option<Request>>,
    serial: u64,
    overlaps: Vec<Overlaps>,
    swap: Vec<SwapAreas>,
    /// Sticky: durability was lost, no later flush may claim otherwise.
    flush_failed: Vec<Option<DiskError>>,
    placement: Placement,
    link: Link,
    fetches: Fetches,
    deadlines: VecDeque<(Nanos, RequestId, u64)>,
    sources: Sources,
    read_admissions: u64,
    feedback: Feedback,
    disk_read_ns: u64,
    fetch_ns: u64,
    actions: VecDeque<Action>,
    stats: EngineStats,
}

/// The index layout an engine of this configuration needs.
#[must_use]
pub fn layout(config: &EngineConfig) -> Layout {
    Layout::new(config.cache, config.guest_memory)
}

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// An engine whose index lives in `words`, which hold at least [`layout`]`(config).words()`.
    pub fn new(config: &EngineConfig, words: M) -> Self {
        let prints = Fingerprinter::new(&config.key);
        let mut index = CacheIndex::new(words, layout(config), config.seed, prints.zero());
        if !config.rules.hold(Rule::PinnedSlot) {
            index.ignore_pins();
        }
        Self {
            rules: config.rules,
            prints,
            index,
            seed: config.seed,
            requests: Vec::new(),
            serial: 0,
            overlaps: (0..config.disks).map(|_| Overlaps::default()).collect(),
            swap: (0..config.disks).map(|_| SwapAreas::default()).collect(),
            flush_failed: vec![None; usize::from(config.disks)],
            placement: Placement::new(config.seed),
            link: Link::new(config.cache, config.send_window),
            fetches: Fetches::new(config.fetch_limit),
            deadlines: VecDeque::new(),
            sources: Sources::new(config.has_port, config.frame_sample),
            read_admissions: 0,
            feedback: Feedback::default(),
            disk_read_ns: 0,
            fetch_ns: 0,
            actions: VecDeque::new(),
            stats: EngineStats::default(),
        }
    }

    /// The next thing to do, if any.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Counters since the start.
    pub fn stats(&self) -> EngineStats {
        self.stats
    }

    /// Sizes and states now.
    pub fn status(&self) -> EngineStatus {
        EngineStatus {
            enabled: self.is_enabled(),
            connected: self.link.is_up(),
            stalled: self.link.is_stalled(),
            wanted: self.link.wanted(),
            granted: self.link.granted(),
            slots: self.index.slot_counts(),
            known_blocks: self.index.known_blocks(),
            index_bytes: self.index.region_bytes(),
            admission: self.sources.admission(),
            disk_read_ns: self.disk_read_ns,
            fetch_ns: self.fetch_ns,
        }
    }

    /// The index, to look at.
    pub fn index(&self) -> &CacheIndex<M> {
        &self.index
    }

    /// The layout to allocate before [`Self::replace_index`], if a cache of `cache` pages or a guest of `guest_memory`
    /// pages needs a larger index than there is. Growth is to the next power of two, so it is rare.
    pub fn needs_layout(&self, cache: PageCount, guest_memory: PageCount) -> Option<Layout> {
        let now = self.index.layout();
        let resident = now.node_limit().0 - now.slot_limit().0;
        if cache <= now.slot_limit() && guest_memory.0 <= resident {
            return None;
        }
        let slots = if cache <= now.slot_limit() { now.slot_limit().0 } else { cache.0.next_power_of_two() };
        Some(Layout::new(PageCount(slots), PageCount(guest_memory.0.max(resident))))
    }

    /// Moves the index to a larger region; nothing is lost. Takes about 100 ns for each known block.
    pub fn replace_index(&mut self, layout: Layout, words: M) {
        let mut index = CacheIndex::new(words, layout, self.seed, self.prints.zero());
        if !self.rules.hold(Rule::PinnedSlot) {
            index.ignore_pins();
        }
        index.take_over(&self.index);
        self.index = index;
    }

    /// Number of guest requests that are not completed.
    pub fn requests_in_flight(&self) -> usize {
        self.requests.iter().flatten().count()
    }

    fn is_enabled(&self) -> bool {
        self.link.wanted().0 > 0
    }

    fn complete(&mut self, id: RequestId, result: Result<(), DiskError>) {
        if let Some(request) = self.requests[id.0 as usize].take()
            && let GuestOp::Read(_) = request.op
        {
            self.stats.reads += 1;
        }
        self.actions.push_back(Action::Complete { request: id, result });
    }

    fn request(&self, id: RequestId) -> Option<Request> {
        self.requests.get(id.0 as usize).copied().flatten()
    }
}

/// Running mean with a weight of 1/16 for the newest value; the first value counts in full.
fn update_mean(mean: &mut u64, value: u64) {
    *mean = if *mean == 0 { value } else { *mean - *mean / 16 + value / 16 };
}

fn block_count(range: ByteRange) -> u64 {
    let touched = range.touched_blocks();
    touched.end - touched.start
}

#[cfg(test)]
mod tests;
