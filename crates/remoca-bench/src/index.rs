//! Memory of the index and time of its operations (P6 and P7), in the order in which the engine calls them.
//!
//! Contents and blocks are visited in random order, so that nearly every access misses the processor's caches. Operations come in
//! batches of 32, each step for the whole batch before the next one; single look-ups, of which each waits for the one before,
//! are reported beside them. Times are CPU times of the thread: another load on the machine must not count as a stall.

use crate::vm::save_figures;
use crate::wanted;
use anyhow::{Context, Result, ensure};
use clap::Args;
use remoca_core::engine::EVICTED_BATCH;
use remoca_core::fingerprint::Fingerprint;
use remoca_core::index::{CacheIndex, Layout, Offer, Place};
use remoca_core::units::{BlockId, BlockNumber, DiskIndex, PageCount, PoolIndex, PoolSet};
use remoca_io::words::IndexMemory;
use remoca_lab::figures::{Figure, Spread};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use rustix::time::{ClockId, clock_gettime};
use std::fs::File;
use std::time::Instant;

/// Pool that has all pages.
const POOL: PoolIndex = PoolIndex(0);
const BATCH: usize = 32;
/// Number of entries that a move copies in one turn of the I/O thread.
const ENTRIES_PER_TURN: u32 = 512;
/// Number of slots that a pool loses in one turn.
const LOST_PER_TURN: u32 = 1024;
/// Number of entries that are forgotten in one turn.
const CUT_PER_TURN: u32 = 2048;
const GIB_PAGES: u32 = 1 << 18;
/// Number of blocks that the guest has read since it read one that it evicts.
const AGE: u32 = GIB_PAGES / 2;
const ZERO: Fingerprint = Fingerprint([0; 3]);

#[derive(Args)]
pub struct IndexBenchArgs {
    /// Number of cached pages
    #[arg(long, default_value_t = 16 << 20)]
    entries: u32,
    /// Number of operations that are timed
    #[arg(long, default_value_t = 1 << 20)]
    operations: u32,
    /// Rounds that these operations are divided into
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Leave the index in small pages, as on a host that has no huge ones
    #[arg(long)]
    small_pages: bool,
}

/// Runs the benchmark and prints its table.
///
/// # Errors
/// If the index does not admit or find what it should, or the figures cannot be written.
pub fn run(args: &IndexBenchArgs) -> Result<()> {
    let mut figures = figures(args.entries, args.operations, args.rounds, !args.small_pages)?;
    figures.insert(0, memory_figure());
    print!("{}", wanted::table_of(&figures));
    save_figures("index", &figures, &())
}

/// Returns the figure of P6: the index by its layout.
pub fn memory_figure() -> Figure {
    let bytes = Layout::new(PageCount(GIB_PAGES), PageCount(GIB_PAGES), 128).words() * 4;
    Figure::single("P6", bytes as f64 / 1e6).beside("bytes_per_page_of_cache", bytes as f64 / f64::from(GIB_PAGES))
}

/// Measures the figures of P7. Each round has its share of the operations. The index is in huge pages if `huge`, as that of a VM process.
///
/// # Errors
/// If the index does not admit or find what it should.
pub fn figures(entries: u32, operations: u32, rounds: usize, huge: bool) -> Result<Vec<Figure>> {
    let mut bench = Bench::new(entries, huge)?;
    println!(
        "P7: {entries} pages cached, index of {:.0} MB; ns of CPU time per operation",
        mega(bench.index.region_bytes())
    );
    let share = operations / u32::try_from(rounds.max(1))?;
    let batches = share / u32::try_from(BATCH)?;
    let (mut hits, mut evictions, mut singles) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        hits.push(bench.hits(batches)?);
        singles.push(bench.single_look_ups(share)?);
        bench.unknown(batches);
    }
    // Afterwards not all pages that hits look for are cached.
    for _ in 0..rounds {
        evictions.push(bench.evictions(batches)?);
    }
    let (stall_us, lose_ns, drop_us) = (bench.moves()?, bench.losses(), bench.drop_everything());
    let single = Spread::of(singles).context("nothing was looked up")?.median;
    Ok(vec![
        of_rounds("P7-hit", hits)?.beside("single_look_up_ns", single),
        of_rounds("P7-evict", evictions)?,
        Figure::single("P7-stall", stall_us / 1e3).beside("drop_ms", drop_us / 1e3).beside("lost_slot_ns", lose_ns),
    ])
}

/// Returns the figure of values in the order of their rounds. The noise is each round divided by the one before.
fn of_rounds(id: &str, values: Vec<f64>) -> Result<Figure> {
    let noise = Spread::of(values.windows(2).map(|pair| pair[1] / pair[0]).collect());
    let count = values.len();
    Ok(Figure::of_rounds(id, count, Spread::of(values).context("nothing was measured")?, noise))
}

fn mega(bytes: usize) -> f64 {
    bytes as f64 / 1e6
}

struct Bench {
    index: CacheIndex<IndexMemory>,
    huge: bool,
    entries: u32,
    /// Number of the next block that was never seen.
    fresh: u32,
    random: u64,
}

impl Bench {
    /// Fills the cache, and then the known blocks that the guest holds.
    fn new(entries: u32, huge: bool) -> Result<Self> {
        let layout = Layout::new(PageCount(entries), PageCount(GIB_PAGES), 1);
        let mut index = CacheIndex::new(memory(layout.words(), huge)?, layout, 7, ZERO);
        index.take_up_disk(DiskIndex(0), 1 << 50);
        index.aim(POOL, PageCount(entries));
        index.resize(POOL, u32::MAX, |_| {});
        let mut this = Self { index, huge, entries, fresh: 0, random: 1 };
        for number in 0..entries {
            this.index.learn(block(number), content(number));
            ensure!(
                matches!(this.index.offer(content(number), Place::Tail, pools()), Offer::Admitted(_)),
                "page {number} was not admitted"
            );
        }
        (entries..entries + GIB_PAGES).for_each(|number| this.index.learn(block(number), content(number)));
        this.fresh = entries + GIB_PAGES;
        Ok(this)
    }

    /// Returns a random number below `limit`.
    fn draw(&mut self, limit: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        u32::try_from((u128::from(self.random) * u128::from(limit)) >> 64).unwrap_or(0)
    }

    // Not inlined, so that callgrind finds it.
    #[inline(never)]
    fn hits(&mut self, batches: u32) -> Result<f64> {
        let mut times = Times::new();
        for _ in 0..batches {
            let blocks: [_; BATCH] = std::array::from_fn(|_| block(self.draw(self.entries)));
            let index = &mut self.index;
            times.start();
            index.prefetch(blocks.into_iter());
            let found = blocks.map(|block| index.look_up(block));
            let slots = found.map(|found| found.and_then(|(hint, content)| index.cached_near(hint, content)));
            for ((block, found), slot) in blocks.into_iter().zip(found).zip(slots) {
                if let (Some((hint, _)), Some(slot)) = (found, slot) {
                    index.hit(hint, block, slot, true);
                }
            }
            times.stop();
            ensure!(slots.iter().all(Option::is_some), "a cached page was not found");
        }
        Ok(times.show("hit with its queue move, in batches", BATCH))
    }

    fn single_look_ups(&mut self, count: u32) -> Result<f64> {
        let mut number = 0;
        let started = cpu_ns();
        for _ in 0..count {
            let slot =
                self.index.look_up(block(number)).and_then(|(hint, content)| self.index.cached_near(hint, content));
            let Some(slot) = slot else { anyhow::bail!("a cached page was not found") };
            number = (self.draw(self.entries) ^ slot.0) % self.entries;
        }
        let each = (cpu_ns() - started) as f64 / f64::from(count);
        println!("{:44} {each:6.0}", "single look-up of block and slot");
        Ok(each)
    }

    // Not inlined, so that callgrind finds it.
    #[inline(never)]
    fn unknown(&mut self, batches: u32) {
        let mut times = Times::new();
        for _ in 0..batches {
            let contents: [_; BATCH] = std::array::from_fn(|_| content(self.draw(self.entries) | 1 << 31));
            times.start();
            let offers = contents.map(|content| self.index.offer(content, Place::Tail, pools()));
            times.stop();
            assert!(offers.iter().all(|offer| *offer == Offer::Unmatched));
        }
        times.show("evicted page that is not known, in batches", BATCH);
    }

    // Not inlined, so that callgrind finds it.
    #[inline(never)]
    fn evictions(&mut self, batches: u32) -> Result<f64> {
        // A page that was evicted before stays out.
        let batches = batches.min(self.entries / 2 / u32::try_from(BATCH)?);
        let (mut learns, mut offers) = (Times::new(), Times::new());
        for _ in 0..batches {
            let first = self.fresh;
            self.fresh += u32::try_from(BATCH)?;
            learns.start();
            (first..self.fresh).for_each(|number| self.index.learn(block(number), content(number)));
            learns.stop();
            let contents: Vec<_> = (first..self.fresh).map(|number| content(number - AGE)).collect();
            offers.start();
            let mut admitted = 0;
            for contents in contents.chunks(EVICTED_BATCH) {
                self.index.prefetch_contents(contents);
                let offers = contents.iter().map(|content| self.index.offer(*content, Place::Tail, pools()));
                admitted += offers.filter(|offer| matches!(offer, Offer::Admitted(_))).count();
            }
            offers.stop();
            ensure!(admitted == BATCH, "a known page was not admitted");
        }
        learns.show("new block learnt, an old one forgotten", BATCH);
        Ok(offers.show("page evicted, and another one admitted", BATCH))
    }

    /// Moves the index into a region for twice the cache. Returns the longest turn in microseconds.
    fn moves(&mut self) -> Result<f64> {
        let layout = self.index.layout().resized(PageCount(self.entries * 2), PageCount(GIB_PAGES));
        let target = CacheIndex::new(memory(layout.words(), self.huge)?, layout, 7, ZERO);
        self.index.begin_move(target);
        let mut times = Times::new();
        loop {
            times.start();
            let is_last = self.index.move_entries(ENTRIES_PER_TURN);
            times.stop();
            if is_last {
                break;
            }
        }
        times.show("entry moved to twice the size, in turns", ENTRIES_PER_TURN as usize);
        let started = cpu_ns();
        let old = self.index.finish_move();
        // A VM process has another thread free the old region.
        let last = cpu_ns() - started;
        ensure!(old.is_some(), "no move is in progress");
        println!("{:44} {:6.0} us", "the last turn", last as f64 / 1e3);
        Ok(last.max(times.longest) as f64 / 1e3)
    }

    /// Loses a quarter of the pool, at most 1 GiB, as when its server takes memory back. Returns the nanoseconds for each slot.
    fn losses(&mut self) -> f64 {
        let kept = PageCount(self.entries - GIB_PAGES.min(self.entries / 4));
        self.index.lose_from(POOL, kept);
        self.index.aim(POOL, kept);
        let mut times = Times::new();
        while self.index.is_pool_resizing(POOL) {
            times.start();
            self.index.resize(POOL, LOST_PER_TURN, |_| {});
            times.stop();
        }
        times.show("slot lost with its page, in turns", LOST_PER_TURN as usize)
    }

    /// Drops the whole index, as when the cache is turned off. Returns the longest turn in microseconds.
    fn drop_everything(&mut self) -> f64 {
        let mut times = Times::new();
        self.index.drop_everything();
        while self.index.is_cutting() {
            times.start();
            self.index.cut(CUT_PER_TURN);
            times.stop();
        }
        times.show("entry forgotten as all are, in turns", CUT_PER_TURN as usize);
        times.longest as f64 / 1e3
    }
}

/// Returns memory for an index, of a file in memory as that of a VM process, and prints what it took to allocate it.
fn memory(words: usize, huge: bool) -> Result<IndexMemory> {
    let file = File::from(memfd_create("index", MemfdFlags::CLOEXEC)?);
    // Before the index, a state file has a header.
    let (header, bytes) = (4096, words as u64 * 4);
    file.set_len(header + bytes)?;
    let (began, started) = (Instant::now(), cpu_ns());
    let memory = if huge {
        IndexMemory::allocate(&file, header, words)?
    } else {
        fallocate(&file, FallocateFlags::empty(), header, bytes)?;
        IndexMemory::of_file(&file, header, words)?
    };
    let (cpu, wall) = ((cpu_ns() - started) as f64 / 1e6, began.elapsed().as_millis());
    println!("{:44} {cpu:6.0} ms of CPU, {wall} ms in all", format!("{:.0} MB allocated", bytes as f64 / 1e6));
    Ok(memory)
}

/// Times of batches.
struct Times {
    started: u64,
    sum: u64,
    longest: u64,
    count: u32,
}

impl Times {
    fn new() -> Self {
        Self { started: 0, sum: 0, longest: 0, count: 0 }
    }

    fn start(&mut self) {
        self.started = cpu_ns();
    }

    fn stop(&mut self) {
        let took = cpu_ns() - self.started;
        self.sum += took;
        self.longest = self.longest.max(took);
        self.count += 1;
    }

    /// Prints the time of each operation in nanoseconds, and returns it.
    fn show(&self, what: &str, batch: usize) -> f64 {
        let each = self.sum as f64 / f64::from(self.count) / batch as f64;
        println!("{what:44} {each:6.0}; longest batch {:.0} us", self.longest as f64 / 1e3);
        each
    }
}

pub fn cpu_ns() -> u64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Returns the pools that pages are offered to: those with a session, as the engine has it.
fn pools() -> PoolSet {
    [POOL].into_iter().collect()
}

fn block(number: u32) -> BlockId {
    BlockId { disk: DiskIndex(0), bno: BlockNumber(u64::from(number)) }
}

/// Returns a number without any order, like a keyed hash.
fn content(number: u32) -> Fingerprint {
    let mixed = |k: u64| {
        let mut x = (u64::from(number) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(k << 60);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let word = |k| u32::try_from(mixed(k) >> 32).unwrap_or(0);
    Fingerprint([word(1), word(2), word(3)])
}
