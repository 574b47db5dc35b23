//! A guest that reads in runs, the real engine, a disk whose sequential reads are cheap, and a pool, in virtual time.
//!
//! The guest is one reader. It begins up to [`Costs::depth`] reads, takes them in order, and spends processor time on each page. Its
//! memory is LRU; a page that it evicts costs what the agent takes for it. Nothing of that overlaps with the guest's own time.
//! Without an engine the same reads go to the same disk.

use super::Costs;
use crate::agent::Agent;
use crate::guest::PageCache;
use crate::machine::{DISK, REMOTE, Sizes, config};
use remoca_core::engine::{
    Action, DiskEngine, EngineConfig, EngineStats, Evicted, FetchId, GuestOp, Leaving, PageOutcome, PoolOffer,
    RequestId, layout,
};
use remoca_core::units::{ByteRange, Nanos, PAGE_SIZE, PAGE_SIZE_U64, PageCount};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

/// Distance, in pages, within which a read continues the one before.
const NEAR: u64 = 64;
/// Processor time of the VM process for a page that comes from the disk: its fingerprint.
const FINGERPRINT_NS: u64 = 350;
/// Reads that are larger than this are begun in pieces, as readahead does.
pub const READAHEAD: u64 = 32;

/// Pages that the guest wants: the first, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub start: u64,
    pub pages: u64,
}

/// A disk that does one read at a time, in the order in which they come.
struct Disk {
    costs: Costs,
    free_at: u64,
    end: u64,
}

impl Disk {
    fn read(&mut self, now: u64, run: Run) -> u64 {
        let continues = (self.end..=self.end + NEAR).contains(&run.start);
        // What lies between is read as well.
        let pages = if continues { run.start + run.pages - self.end } else { run.pages };
        let seek = if continues { 0 } else { self.costs.seek_ns };
        self.end = run.start + run.pages;
        self.free_at = self.free_at.max(now) + seek + pages * self.costs.disk_page_ns;
        self.free_at
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    DiskDone(RequestId),
    /// The block that the slot held when it was asked for.
    Page(FetchId, u64),
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    run: Run,
    is_answered: bool,
    is_at_disk: bool,
}

/// What one pass came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pass {
    pub ns: u64,
    /// Blocks read.
    pub pages: u64,
    /// Of these, how many were cached when they were read, wherever they were read from.
    pub cached: u64,
    /// Pages that the agent took.
    pub taken: u64,
}

/// Guest, engine, pool and disk.
pub struct World {
    costs: Costs,
    engine: Option<DiskEngine<Vec<u32>>>,
    guest_pages: usize,
    memory: PageCache,
    disk: Disk,
    pool_free_at: u64,
    /// Blocks that the pool holds, by slot.
    slots: HashMap<u32, u64>,
    vm_free_at: u64,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    order: u64,
    entries: Vec<Option<Entry>>,
    in_order: VecDeque<usize>,
    /// Processor time of the guest for what it evicted, not yet spent.
    debt_ns: u64,
    agent: Agent,
    buffer: Vec<u8>,
    taken: u64,
    answered: u64,
}

impl World {
    /// Creates a guest of `guest` pages with a cache of `cache` pages, or without remoca.
    pub fn new(costs: Costs, guest: u32, cache: Option<u32>) -> Self {
        let engine = cache.map(|cache| {
            let sizes = Sizes { local: PageCount(0), remote: PageCount(cache), guest: PageCount(guest) };
            let config = EngineConfig { hedge: true, fetch_limit: 1024, send_window: 1024, ..config(sizes) };
            let mut engine = DiskEngine::new(&config, vec![0; layout(&config).words()]);
            engine.describe_disk(DISK, 1 << 50, false);
            engine.set_servers(Nanos(1), &[REMOTE], Leaving::AtOnce);
            let available = PageCount(cache);
            let offer = PoolOffer { generation: 1, npages: PageCount(0), available, sends_received: 0 };
            engine.handle_answer(Nanos(1), REMOTE, Some(offer));
            engine
        });
        let mut this = Self {
            costs,
            engine,
            guest_pages: guest as usize,
            memory: PageCache::default(),
            disk: Disk { costs, free_at: 0, end: u64::MAX / 2 },
            pool_free_at: 0,
            slots: HashMap::new(),
            vm_free_at: 0,
            now: 1,
            events: BinaryHeap::new(),
            order: 0,
            entries: Vec::new(),
            in_order: VecDeque::new(),
            debt_ns: 0,
            agent: Agent::new(),
            buffer: vec![1; usize::try_from(READAHEAD).unwrap_or(0) * PAGE_SIZE],
            taken: 0,
            answered: 0,
        };
        this.act();
        this
    }

    fn at(&mut self, ns: u64, event: Event) {
        self.order += 1;
        self.events.push(Reverse((ns, self.order, event)));
    }

    fn act(&mut self) {
        while let Some(action) = self.engine.as_mut().and_then(DiskEngine::poll_action) {
            match action {
                Action::Disk { request, .. } | Action::DiskToo { request, .. } => self.begin_disk(request),
                Action::Fetch { fetch, at } => {
                    self.pool_free_at =
                        self.pool_free_at.max(self.now + self.costs.pool_request_ns) + self.costs.pool_page_ns;
                    let block = self.slots[&at.slot.0];
                    self.at(self.pool_free_at, Event::Page(fetch, block));
                }
                Action::SetSize { server, npages } => {
                    let engine = self.engine.as_mut().expect("its action");
                    engine.handle_sized(Nanos(self.now), server, npages);
                }
                Action::SendBlock { admitted, request, offset } => {
                    let run = self.entries[request.0 as usize].as_ref().expect("a read that there is").run;
                    self.slots.insert(admitted.at.slot.0, run.start + u64::from(offset) / PAGE_SIZE_U64);
                    self.engine.as_mut().expect("its action").handle_sent(admitted.at.server, 1);
                }
                Action::Complete { request, .. } => self.answer(request),
                _ => {}
            }
        }
    }

    fn begin_disk(&mut self, request: RequestId) {
        let entry = self.entries[request.0 as usize].as_mut().expect("a read that there is");
        entry.is_at_disk = true;
        let done = self.disk.read(self.now, entry.run);
        let pages = entry.run.pages;
        let done = match self.engine {
            None => done,
            Some(_) => {
                self.vm_free_at = self.vm_free_at.max(done) + pages * FINGERPRINT_NS;
                self.vm_free_at
            }
        };
        self.at(done, Event::DiskDone(request));
    }

    fn answer(&mut self, request: RequestId) {
        let entry = self.entries[request.0 as usize].as_mut().expect("a read that there is");
        entry.is_answered = true;
        self.answered += 1;
    }

    /// Handles everything that happens until `until`, or only the next event if there is no such time.
    fn run(&mut self, until: Option<u64>) {
        loop {
            let event = self.events.peek().map(|Reverse((at, ..))| *at);
            let deadline = self.engine.as_mut().and_then(DiskEngine::next_deadline).map(|at| at.0.max(self.now));
            let Some(next) = [event, deadline].into_iter().flatten().min() else { break };
            if until.is_some_and(|until| next > until) {
                break;
            }
            self.now = self.now.max(next);
            if event.is_some_and(|event| event <= next)
                && let Some(Reverse((_, _, event))) = self.events.pop()
            {
                self.handle(event);
            }
            if let Some(engine) = &mut self.engine {
                engine.handle_timer(Nanos(self.now));
            }
            self.act();
            if until.is_none() {
                break;
            }
        }
        self.now = self.now.max(until.unwrap_or(0));
    }

    fn fill(&mut self, run: Run) -> usize {
        for (block, page) in (run.start..run.start + run.pages).zip(self.buffer.chunks_exact_mut(PAGE_SIZE)) {
            page[..8].copy_from_slice(&block.to_le_bytes());
        }
        usize::try_from(run.pages).unwrap_or(usize::MAX) * PAGE_SIZE
    }

    fn handle(&mut self, event: Event) {
        let now = Nanos(self.now);
        match event {
            Event::DiskDone(request) => {
                let at = request.0 as usize;
                let entry = self.entries[at].as_mut().expect("a read that there is");
                entry.is_at_disk = false;
                let run = entry.run;
                let length = self.fill(run);
                match &mut self.engine {
                    Some(engine) => engine.handle_disk_done(now, request, Ok(()), &self.buffer[..length]),
                    None => self.answer(request),
                }
                self.act();
                self.release(at);
            }
            Event::Page(fetch, block) => {
                self.buffer[..8].copy_from_slice(&block.to_le_bytes());
                let engine = self.engine.as_mut().expect("only an engine fetches");
                let outcome = engine.handle_page(now, REMOTE, fetch, &self.buffer[..PAGE_SIZE]);
                assert!(matches!(outcome, PageOutcome::Deliver { .. } | PageOutcome::Late), "{outcome:?}");
            }
        }
    }

    /// Forgets a read that the guest has taken and the disk is done with.
    fn release(&mut self, at: usize) {
        let is_over = |entry: &Entry| entry.is_answered && !entry.is_at_disk;
        if !self.in_order.contains(&at) && self.entries[at].as_ref().is_some_and(is_over) {
            self.entries[at] = None;
        }
    }

    fn begin(&mut self, run: Run) {
        let at = self.entries.iter().position(Option::is_none).unwrap_or(self.entries.len());
        let entry = Some(Entry { run, is_answered: false, is_at_disk: false });
        if at == self.entries.len() {
            self.entries.push(entry);
        } else {
            self.entries[at] = entry;
        }
        self.in_order.push_back(at);
        let request = RequestId(u32::try_from(at).expect("a few reads"));
        let range = ByteRange { offset: run.start * PAGE_SIZE_U64, length: run.pages * PAGE_SIZE_U64 };
        match &mut self.engine {
            Some(engine) => {
                engine.handle_request(Nanos(self.now), request, DISK, GuestOp::Read(range));
                self.act();
            }
            None => self.begin_disk(request),
        }
    }

    /// Makes room in the guest's memory, and hands over what the agent takes of that.
    fn evict(&mut self) {
        while let Some(old) = self.memory.evict(self.guest_pages) {
            let Some(engine) = &mut self.engine else { continue };
            if !self.agent.takes(self.now, engine, old) {
                self.debt_ns += self.costs.agent_page_ns / Costs::AGENT_SKIPS;
                continue;
            }
            self.debt_ns += self.costs.agent_page_ns;
            self.taken += 1;
            self.buffer[..8].copy_from_slice(&old.to_le_bytes());
            if let Evicted::Admit(admitted) = engine.handle_evicted(&self.buffer[..PAGE_SIZE]) {
                engine.handle_sent(admitted.at.server, 1);
                self.slots.insert(admitted.at.slot.0, old);
            }
        }
    }

    /// Returns the parts of a run that are not in the guest's memory, in pieces of readahead.
    fn missing(&mut self, run: Run) -> Vec<Run> {
        let mut pieces: Vec<Run> = Vec::new();
        for block in run.start..run.start + run.pages {
            if self.memory.touch(block) {
                continue;
            }
            match pieces.last_mut() {
                Some(piece) if piece.start + piece.pages == block && piece.pages < READAHEAD => piece.pages += 1,
                _ => pieces.push(Run { start: block, pages: 1 }),
            }
        }
        self.evict();
        pieces
    }

    fn take_first(&mut self) {
        let Some(at) = self.in_order.front().copied() else { return };
        while !self.entries[at].as_ref().is_some_and(|entry| entry.is_answered) {
            self.run(None);
        }
        let pages = self.entries[at].as_ref().map_or(0, |entry| entry.run.pages);
        let spent = pages * self.costs.guest_page_ns + std::mem::take(&mut self.debt_ns);
        self.in_order.pop_front();
        self.release(at);
        self.run(Some(self.now + spent));
    }

    fn stats(&self) -> EngineStats {
        self.engine.as_ref().map(DiskEngine::stats).unwrap_or_default()
    }

    /// Reads all of it, and returns what that came to.
    pub fn pass(&mut self, runs: &[Run]) -> Pass {
        let (began, before) = (self.now, self.stats());
        self.taken = 0;
        for run in runs {
            for piece in self.missing(*run) {
                while self.in_order.len() >= self.costs.depth {
                    self.take_first();
                }
                self.begin(piece);
            }
        }
        while !self.in_order.is_empty() {
            self.take_first();
        }
        let after = self.stats();
        let cached = |stats: EngineStats| stats.hit_blocks + stats.covered_blocks;
        Pass {
            ns: self.now - began,
            pages: after.read_blocks - before.read_blocks,
            cached: cached(after) - cached(before),
            taken: self.taken,
        }
    }
}
