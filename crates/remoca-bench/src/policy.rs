//! The insertion policy on traces of reads (P17): the real engine with a guest of fixed memory, whose page cache is LRU, and a memory
//! server that never fails, in virtual time. The same reads go through LRU and through the policy that adapts.

use crate::guest::{PageCache, Random, Zipf, scattered};
use crate::vm::save_figures;
use crate::wanted;
use anyhow::Result;
use clap::Args;
use remoca_core::engine::{
    Action, DiskEngine, EngineConfig, Evicted, GuestOp, Leaving, PoolOffer, RequestId, ServerNumber, disk_numbers,
    layout,
};
use remoca_core::rules::Rules;
use remoca_core::units::{BlockNumber, ByteRange, DiskIndex, Nanos, PAGE_SIZE, PAGE_SIZE_U64, PageCount};
use remoca_lab::figures::Figure;

const CACHE: u32 = 16384;
const GUEST: u32 = 4096;

#[derive(Args)]
pub struct PolicyBenchArgs {
    /// Size of the cache, in pages
    #[arg(long, default_value_t = CACHE)]
    cache: u32,
    /// Memory of the guest, in pages
    #[arg(long, default_value_t = GUEST)]
    guest: u32,
}

const DISK: DiskIndex = DiskIndex(0);
const SERVER: ServerNumber = ServerNumber(0);
const DISK_NS: u64 = 7_000_000;
const HIT_NS: u64 = 200_000;

/// What came of the reads of one trace.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    /// Reads that the guest's memory did not answer.
    reads: u64,
    hits: u64,
    /// Pages sent to the memory server.
    sent: u64,
}

impl Outcome {
    fn hit_ratio(self) -> f64 {
        self.hits as f64 / self.reads.max(1) as f64
    }

    /// Returns what happened since `earlier`.
    fn since(self, earlier: Self) -> Self {
        Self { reads: self.reads - earlier.reads, hits: self.hits - earlier.hits, sent: self.sent - earlier.sent }
    }
}

/// A guest, its engine, and its server.
struct Machine {
    engine: DiskEngine<Vec<u32>>,
    now: Nanos,
    memory: PageCache,
    guest_pages: usize,
    sent: u64,
}

impl Machine {
    fn new(args: &PolicyBenchArgs, adapts: bool) -> Self {
        let cache = PageCount(args.cache);
        let config = EngineConfig {
            disks: disk_numbers(1),
            key: [7; 16],
            seed: 1,
            cache,
            local: PageCount(0),
            guest_memory: PageCount(args.guest),
            has_port: true,
            frame_sample: 0,
            send_window: 64,
            fetch_limit: 64,
            slots_per_turn: 1024,
            pools: 16,
            hedge: false,
            rules: Rules::default(),
        };
        let mut engine = DiskEngine::new(&config, vec![0; layout(&config).words()]);
        engine.describe_disk(DISK, 1 << 40, false);
        engine.adapt(adapts);
        engine.set_servers(Nanos(1), &[SERVER], Leaving::AtOnce);
        let mut this =
            Self { engine, now: Nanos(1), memory: PageCache::default(), guest_pages: args.guest as usize, sent: 0 };
        let offer = PoolOffer { generation: 1, npages: PageCount(0), available: cache, sends_received: 0 };
        this.engine.handle_answer(this.now, SERVER, Some(offer));
        this.act(0);
        this
    }

    /// Executes the engine's actions until there are none.
    fn act(&mut self, block: u64) {
        while let Some(action) = self.engine.poll_action() {
            match action {
                Action::Disk { request, .. } => {
                    self.now = self.now.plus_ns(DISK_NS);
                    self.engine.handle_disk_done(self.now, request, Ok(()), &page(block));
                }
                Action::Fetch { fetch, .. } => {
                    self.now = self.now.plus_ns(HIT_NS);
                    self.engine.handle_page(self.now, SERVER, fetch, &page(block));
                }
                Action::SetSize { server, npages } => self.engine.handle_sized(self.now, server, npages),
                _ => {}
            }
        }
        self.engine.handle_timer(self.now);
    }

    fn read(&mut self, block: u64) {
        if self.memory.touch(block) {
            return;
        }
        let range = ByteRange { offset: BlockNumber(block).0 * PAGE_SIZE_U64, length: PAGE_SIZE_U64 };
        self.engine.handle_request(self.now, RequestId(0), DISK, GuestOp::Read(range));
        self.act(block);
        if let Some(old) = self.memory.evict(self.guest_pages)
            && let Evicted::Admit(_) = self.engine.handle_evicted(&page(old))
        {
            self.sent += 1;
            self.engine.handle_sent(SERVER, 1);
        }
    }

    fn outcome(&self) -> Outcome {
        let stats = self.engine.stats();
        Outcome { reads: stats.read_blocks, hits: stats.hit_blocks, sent: self.sent }
    }

    /// Reads all blocks, and returns what came of them.
    fn run(&mut self, reads: impl IntoIterator<Item = u64>) -> Outcome {
        let before = self.outcome();
        reads.into_iter().for_each(|block| self.read(block));
        self.outcome().since(before)
    }
}

/// Returns the content of a block: no two are equal.
pub fn page(block: u64) -> Vec<u8> {
    let mut page = vec![1; PAGE_SIZE];
    page[..8].copy_from_slice(&block.to_le_bytes());
    page
}

/// Number of reads of a trace without passes, for each page of the cache.
const LENGTH: u64 = 40;

/// Returns named traces of reads: the block of each. `c` is the size of the cache, in pages.
pub fn traces(c: u64) -> Vec<(&'static str, Vec<u64>)> {
    let reads = 0..LENGTH * c;
    let zipf = |exponent, seed| {
        let (zipf, mut random) = (Zipf::new(8 * c, exponent), Random(seed));
        reads.clone().map(|_| scattered(zipf.rank(&mut random))).collect::<Vec<_>>()
    };
    let (ranks, mut random) = (Zipf::new(4 * c, 0.9), Random(3));
    // Each rank is another block after a while, as the interest of users moves on.
    let drift = reads.clone().map(|at| scattered(ranks.rank(&mut random) + at / 4)).collect();
    let mut random = Random(4);
    let recent = reads.clone().scan(0, |newest, _| {
        // A new block, or one that was new not long ago.
        let age = (random.next() % (c * 3 / 2)).min(random.next() % (c * 3 / 2));
        *newest += u64::from(random.share() < 0.2);
        Some(c * 4 + *newest - age.min(*newest))
    });
    let recent = recent.collect();
    let (ranks, mut random) = (Zipf::new(4 * c, 0.9), Random(5));
    let scanned = reads.clone().map(|at| if at % 2 == 0 { scattered(ranks.rank(&mut random)) } else { (1 << 27) + at });
    let scanned = scanned.collect();
    let small = |region: u64| std::iter::repeat_n(region * 2 * c..region * 2 * c + c * 9 / 10, 6).flatten();
    let moving = (0..5).flat_map(small).collect();
    let mixed = (0..2).flat_map(|turn| small(9 + turn).chain(std::iter::repeat_n(0..c * 3 / 2, 6).flatten())).collect();
    let loops = |size: u64| reads.clone().map(|at| at % size).collect();
    vec![
        ("loop over 1.5 x the cache", loops(c * 3 / 2)),
        ("loop over 4 x the cache", loops(c * 4)),
        ("loop over 0.9 x the cache", loops(c * 9 / 10)),
        ("zipf 0.8", zipf(0.8, 1)),
        ("zipf 1.1", zipf(1.1, 2)),
        ("zipf 0.9, drifting", drift),
        ("recency", recent),
        ("zipf 0.9 and a scan", scanned),
        ("small loops in turn", moving),
        ("small and large loops in turn", mixed),
        (
            "two large loops, one after the other",
            reads.clone().map(|at| at % (c * 3 / 2) + (at * 2 / (LENGTH * c)) * 8 * c).collect(),
        ),
        ("one scan", (0..LENGTH * c).collect()),
    ]
}

/// Runs the benchmark and prints its table.
///
/// # Errors
/// If the figures cannot be written.
pub fn run(args: &PolicyBenchArgs) -> Result<()> {
    println!(
        "{} pages of cache, {} of guest memory; hits and pages sent as shares of the reads",
        args.cache, args.guest
    );
    println!("{:38}{:>10}{:>8}{:>10}{:>8}{:>10}", "trace", "LRU hits", "sent", "adaptive", "sent", "of LRU's");
    for (name, reads) in traces(args.cache.into()) {
        let [lru, adaptive] = [false, true].map(|adapts| Machine::new(args, adapts).run(reads.iter().copied()));
        let sent = |outcome: Outcome| outcome.sent as f64 / outcome.reads.max(1) as f64;
        let ratio = match lru.hit_ratio() {
            0. => "-".into(),
            lru => format!("{:.3}", adaptive.hit_ratio() / lru),
        };
        let (hits, hits_then) = (lru.hit_ratio(), adaptive.hit_ratio());
        println!("{name:38}{hits:>10.4}{:>8.3}{hits_then:>10.4}{:>8.3}{ratio:>10}", sent(lru), sent(adaptive));
    }
    let figures = figures_of(args);
    print!("{}", wanted::table_of(&figures));
    save_figures("policy", &figures, &())
}

/// Measures the figures that have a target (P17), in the usual size. In virtual time they are the same in every run.
pub fn figures() -> Vec<Figure> {
    figures_of(&PolicyBenchArgs { cache: CACHE, guest: GUEST })
}

fn figures_of(args: &PolicyBenchArgs) -> Vec<Figure> {
    let (all, late) = long_loop(args);
    let best = f64::from(args.cache) / f64::from(args.cache * 3 / 2);
    vec![
        Figure::single("P17-hits", all.hit_ratio() / best).beside("after_the_second_pass", late.hit_ratio() / best),
        Figure::single("P17-sent", late.sent as f64 / late.reads as f64),
    ]
}

/// Returns what a loop of 16 passes over 1.5 x the cache comes to: after the first pass, which cannot hit, and after the second.
fn long_loop(args: &PolicyBenchArgs) -> (Outcome, Outcome) {
    let mut machine = Machine::new(args, true);
    let pass = || 0..u64::from(args.cache) * 3 / 2;
    machine.run(pass());
    let first = machine.outcome();
    machine.run(pass());
    let second = machine.outcome();
    machine.run(std::iter::repeat_n(pass(), 14).flatten());
    (machine.outcome().since(first), machine.outcome().since(second))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARGS: PolicyBenchArgs = PolicyBenchArgs { cache: 2048, guest: 256 };

    #[test]
    fn a_loop_over_more_than_the_cache_hits_as_a_fixed_subset_would() {
        let (_, late) = long_loop(&ARGS);
        assert!(late.hit_ratio() >= 0.9 * 2. / 3., "{late:?}");
        assert!(late.sent * 20 <= late.reads, "{late:?}");
    }

    #[test]
    fn no_trace_is_worse_than_with_lru() {
        for (name, reads) in traces(ARGS.cache.into()) {
            let [lru, adaptive] = [false, true].map(|adapts| Machine::new(&ARGS, adapts).run(reads.iter().copied()));
            assert!(adaptive.hits * 100 >= lru.hits * 97, "{name}: {adaptive:?}, with LRU {lru:?}");
        }
    }
}
