//! The disk engine: decides for every guest request what comes from the memory server and what from the disk, and for
//! every evicted page whether it may be cached. Pure: events go in by `handle_*`, actions come out of `poll_action`.
//!
//! A driver (`remoca-disk`, or the simulator) calls it and executes the actions in order. It drains `poll_action` after
//! every `handle_*` call before the next; only messages of a server may be handled several at a time. [`DiskEngine`] owns
//! the parts and says which of them hears of what: `requests`, `disks`, `pool` (one memory server), `placement` (all
//! of them), `race` (between server and disk), `admit`, and the index.
//! 1. A completed read returns for each sector the last write completed before it began, or a concurrent one.
//! 2. A block that a write touches is unreachable before the write is issued ([`overlap`] guards reads under way).
//! 3. Every request completes exactly once; nothing a server does reaches the guest.
//! 4. A write completes after the disk completed it. A failed flush stays failed.
//! 5. A page is admitted only if it is known content, and delivered only if it is the content asked for.
//!
//! Papers: remoca.txt II; hypervisor-exclusive-cache.txt 3. Decision 0001 (content decides), 0009 (reads).

mod admit;
mod breaker;
mod discarded;
mod disks;
mod estimate;
mod fetches;
mod guest;
mod latencies;
pub mod overlap;
mod placement;
mod pool;
mod race;
mod requests;
mod server;
mod speculative;
mod stats;
mod swap;
mod types;

pub use admit::Admission;
pub use breaker::BreakerState;
pub use estimate::Latency;
pub use race::HedgingStatus;
pub use stats::EngineStats;
pub use types::{Action, DiskError, Evicted, FetchId, GuestOp, PageOutcome, PoolOffer, RequestId, ServerNumber};

use crate::fingerprint::{Fingerprint, Fingerprinter};
use crate::index::{CacheIndex, Layout, Offer, Origin, Place, SlotCounts, Unusable};
use crate::rules::{Rule, Rules};
use crate::units::{DiskIndex, PageCount};
use admit::{ADVICE_MAX, Admit};
use disks::Disks;
use fetches::Source;
use placement::Placement;
use pool::Pool;
use race::Race;
use requests::Requests;
use std::collections::VecDeque;
use std::ops::DerefMut;

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
    /// Slots that are looked at in one turn while the cache changes its size.
    pub slots_per_turn: u32,
    /// Whether the disk is also asked as soon as the server's answer is late; else only when it is very late.
    pub hedge: bool,
    /// All rules, except in a build that shows what they are for.
    pub rules: Rules,
}

/// Sizes and states of an engine at one moment.
#[derive(Clone, Copy, Debug)]
pub struct EngineStatus {
    pub enabled: bool,
    pub connected: bool,
    /// What the operator asked for.
    pub wanted: PageCount,
    /// What the server granted.
    pub granted: PageCount,
    pub slots: SlotCounts,
    pub known_blocks: PageCount,
    pub index_bytes: usize,
    pub admission: Admission,
    pub hedging: HedgingStatus,
}

/// The engine, with its index in the words `M`.
pub struct DiskEngine<M> {
    rules: Rules,
    prints: Fingerprinter,
    seed: u64,
    index: CacheIndex<M>,
    requests: Requests,
    /// Of the blocks of the read that begins, in their order.
    sources: Vec<Source>,
    disks: Disks,
    /// The servers among which the pool is placed.
    placement: Placement,
    pool: Pool,
    race: Race,
    admit: Admit,
    actions: VecDeque<Action>,
    stats: EngineStats,
}

/// Makes indexes for one engine, on any thread: all of the memory is touched.
#[derive(Clone, Copy, Debug)]
pub struct IndexMaker {
    seed: u64,
    zero: Fingerprint,
}

impl IndexMaker {
    /// Returns an empty index in `words`, which hold at least [`Layout::words`].
    pub fn make<M: DerefMut<Target = [u32]>>(&self, layout: Layout, words: M) -> CacheIndex<M> {
        CacheIndex::new(words, layout, self.seed, self.zero)
    }
}

/// Returns the index layout an engine of this configuration needs.
#[must_use]
pub fn layout(config: &EngineConfig) -> Layout {
    Layout::new(config.cache, config.guest_memory, config.disks)
}

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// Returns an engine whose index lives in `words`, which hold at least [`layout`]`(config).words()`.
    pub fn new(config: &EngineConfig, words: M) -> Self {
        let prints = Fingerprinter::new(&config.key);
        let index = CacheIndex::new(words, layout(config), config.seed, prints.zero());
        Self::over(config, prints, index)
    }

    /// Returns an engine that goes on where a former process stopped, or was killed: with what that process knew and
    /// cached, its pool, its failed flushes and its swap areas. The key is that process's. No request is outstanding. What
    /// a write of that process was going to touch was forgotten before the write was issued; whether anybody else has
    /// written since then is for the caller to know ([`Self::handle_content_uncertain`]). With a cache of no pages nothing
    /// is kept but failed flushes and swap areas: off is off.
    ///
    /// # Errors
    /// If the words are no index of this version, key and number of disks. They can be given to [`Self::new`].
    pub fn resume(config: &EngineConfig, words: M, origin: Origin) -> Result<Self, Unusable<M>> {
        let prints = Fingerprinter::new(&config.key);
        let index = CacheIndex::resume(words, origin, config.disks, config.seed, prints.zero())?;
        let mut this = Self::over(config, prints, index);
        this.pool.restore(&this.index);
        if !this.pool.is_enabled() {
            this.index.drop_everything();
            this.index.aim(PageCount(0));
        }
        this.disks.restore(&this.index);
        Ok(this)
    }

    fn over(config: &EngineConfig, prints: Fingerprinter, mut index: CacheIndex<M>) -> Self {
        index.keep_to(config.rules);
        Self {
            rules: config.rules,
            prints,
            seed: config.seed,
            index,
            requests: Requests::default(),
            sources: Vec::new(),
            disks: Disks::new(config.disks, config.rules),
            placement: Placement::new(config.seed),
            pool: Pool::new(config.cache, config.send_window, config.fetch_limit, config.slots_per_turn.max(1)),
            race: Race::new(config.hedge, config.disks),
            admit: Admit::new(config.has_port, config.frame_sample),
            actions: VecDeque::new(),
            stats: EngineStats::default(),
        }
    }

    /// Returns whether memory servers owe pages, also for reads that the disk answered first.
    pub fn is_owed_pages(&self) -> bool {
        self.pool.is_owed_pages()
    }

    /// Closes the engine for another program to take over. Only [`Self::reopen`] may follow, if it does not. While
    /// [pages are owed](Self::is_owed_pages) this changes nothing, and the successor makes a new index.
    pub fn close(&mut self) {
        self.index.close();
    }

    /// Reopens the engine: no other program took over.
    pub fn reopen(&mut self) {
        self.index.reopen();
    }

    /// Ends the engine with the process: nothing may follow. Does not wait for what memory servers owe.
    pub fn end(&mut self) {
        self.pool.take_fetches(&mut self.index);
        self.index.close();
    }

    /// Returns the next thing to do, if any.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Continues the counters of a former engine of the same process.
    pub fn count_on(&mut self, stats: EngineStats) {
        self.stats = stats;
    }

    /// Counters since the start.
    pub fn stats(&self) -> EngineStats {
        self.stats
    }

    /// Sizes and states now.
    pub fn status(&self) -> EngineStatus {
        EngineStatus {
            enabled: self.pool.is_enabled(),
            connected: self.pool.is_up(),
            wanted: self.pool.wanted(),
            granted: self.pool.granted(),
            slots: self.index.slot_counts(),
            known_blocks: self.index.known_blocks(),
            index_bytes: self.index.region_bytes(),
            admission: self.admit.admission(),
            hedging: self.race.status(),
        }
    }

    /// Returns the index, to look at.
    pub fn index(&self) -> &CacheIndex<M> {
        &self.index
    }

    /// Returns the layout to move to, if a cache of `cache` pages or a guest of `guest_memory` pages needs a larger index
    /// than there is. A larger cache gets the next power of two, so it is rare.
    pub fn needs_layout(&self, cache: PageCount, guest_memory: PageCount) -> Option<Layout> {
        let now = self.index.layout();
        let resident = now.resident_limit().0;
        if cache <= now.slot_limit() && guest_memory.0 <= resident {
            return None;
        }
        let slots = if cache <= now.slot_limit() { now.slot_limit().0 } else { cache.0.next_power_of_two() };
        Some(Layout::new(PageCount(slots), PageCount(guest_memory.0.max(resident)), now.disks()))
    }

    /// Returns the layout to move to, if the index was made for a guest that is clearly larger than one of
    /// `guest_memory` pages.
    pub fn spare_layout(&self, guest_memory: PageCount) -> Option<Layout> {
        let now = self.index.layout();
        let layout = Layout::new(now.slot_limit(), guest_memory, now.disks());
        (layout.words() < now.words() - now.words() / 8).then_some(layout)
    }

    /// Returns what makes an index that this engine can move to.
    pub fn index_maker(&self) -> IndexMaker {
        IndexMaker { seed: self.seed, zero: self.prints.zero() }
    }

    /// Begins to move the index into `target`, which [`Self::index_maker`] made.
    pub fn begin_move(&mut self, target: CacheIndex<M>) {
        self.index.begin_move(target);
    }

    /// Moves `nodes` more nodes, about 100 ns each. Returns whether only [`Self::finish_move`] is left.
    pub fn move_index(&mut self, nodes: u32) -> bool {
        self.index.move_nodes(nodes)
    }

    /// Switches to the index in its new region, with nothing lost, and returns the old words.
    pub fn finish_move(&mut self) -> Option<M> {
        self.index.finish_move()
    }

    /// Moves the index to another region at once; nothing is lost. Returns the old words.
    pub fn replace_index(&mut self, layout: Layout, words: M) -> Option<M> {
        self.begin_move(self.index_maker().make(layout, words));
        self.finish_move()
    }

    /// Returns the number of guest requests that are not completed.
    pub fn requests_in_flight(&self) -> usize {
        self.requests.in_flight()
    }

    /// Describes a disk: its blocks, and with `swap` that all of them are a swap area. Call it once for each disk, at
    /// the start.
    pub fn describe_disk(&mut self, disk: DiskIndex, blocks: u64, swap: bool) {
        self.disks.describe(disk, blocks, swap, &mut self.index);
    }

    /// Sets whether a flush or a durable write of the disk failed, now or for a former process; `None`: none did.
    pub fn set_failed_flush(&mut self, disk: DiskIndex, errno: Option<i32>) {
        self.index.set_flush_failed(disk, errno);
    }

    /// Returns the swap areas of `disk` that are known.
    pub fn swap_areas(&self, disk: DiskIndex) -> usize {
        self.disks.swap_areas(disk)
    }

    /// Handles `page`, which the guest evicted (4 KiB, copied out of guest memory). With [`Evicted::Admit`] the caller
    /// sends it.
    pub fn handle_evicted(&mut self, page: &[u8]) -> Evicted {
        self.admit.note_eviction();
        let evicted = self.judge(page);
        self.admit.count_evicted(evicted, &mut self.stats);
        evicted
    }

    /// Returns what the agent should send: 0 everything, else one page of so many (at most 1024). Nothing is wanted
    /// while the cache is off.
    pub fn advice(&self) -> u32 {
        if self.pool.is_enabled() { self.admit.advice() } else { ADVICE_MAX }
    }

    /// Returns whether to call [`Self::handle_frame`] with the page of guest memory that a read is about to
    /// overwrite, and what it still holds.
    pub fn wants_frame(&mut self) -> bool {
        self.pool.is_enabled() && self.pool.can_send() && self.admit.wants_frame()
    }

    /// Handles what a frame held before a read overwrote it: `page`, 4 KiB, copied out of guest memory. With
    /// [`Evicted::Admit`] the caller sends it.
    pub fn handle_frame(&mut self, page: &[u8]) -> Evicted {
        let evicted = self.judge(page);
        self.admit.count_frame(evicted, &mut self.stats);
        evicted
    }

    /// Decides about a page that the guest evicted. It is admitted if its content is what the disk holds for some block.
    fn judge(&mut self, page: &[u8]) -> Evicted {
        if !self.pool.is_enabled() {
            return Evicted::Dropped;
        }
        let content = self.prints.page(page);
        if content == self.prints.zero() {
            return Evicted::Zero;
        }
        if !self.rules.hold(Rule::AdmissionCheck)
            && !self.index.is_known_content(content)
            && let Some(block) = self.index.any_resident()
        {
            self.index.learn(block, content);
        }
        if !self.may_send() {
            return if self.index.cached(content).is_some() {
                Evicted::Duplicate
            } else if self.index.is_known_content(content) {
                Evicted::Dropped
            } else {
                Evicted::Unmatched
            };
        }
        match self.index.offer(content, Place::Tail) {
            Offer::Admitted(slot) => {
                self.pool.note_send();
                Evicted::Admit(slot)
            }
            Offer::Duplicate => Evicted::Duplicate,
            Offer::Unmatched => Evicted::Unmatched,
            Offer::NoSlot => Evicted::Dropped,
        }
    }

    /// Returns whether one more page may go to the server.
    fn may_send(&mut self) -> bool {
        self.pool.can_send() && self.race.admits()
    }
}

#[cfg(test)]
mod tests;
