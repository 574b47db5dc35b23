//! The insertion policy on traces of reads (P17): the real engine with a guest of fixed memory, whose page cache is LRU, and a memory
//! server that never fails, in virtual time. The same reads go through LRU and through the policy that adapts.

use crate::guest::{Random, Zipf, scattered};
use crate::machine::{Machine, Outcome, Sizes};
use crate::vm::save_figures;
use crate::wanted;
use anyhow::Result;
use clap::Args;
use remoca_core::units::PageCount;
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

fn machine(args: &PolicyBenchArgs, adapts: bool) -> Machine {
    let sizes = Sizes { local: PageCount(0), remote: PageCount(args.cache), guest: PageCount(args.guest) };
    Machine::new(sizes, 1, adapts)
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
        let [lru, adaptive] = [false, true].map(|adapts| machine(args, adapts).run(reads.iter().copied()));
        let sent = |outcome: Outcome| outcome.share(outcome.sent);
        let ratio = match lru.hits() {
            0. => "-".into(),
            lru => format!("{:.3}", adaptive.hits() / lru),
        };
        let (hits, hits_then) = (lru.hits(), adaptive.hits());
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
        Figure::single("P17-hits", all.hits() / best).beside("after_the_second_pass", late.hits() / best),
        Figure::single("P17-sent", late.share(late.sent)),
    ]
}

/// Returns what a loop of 16 passes over 1.5 x the cache comes to: after the first pass, which cannot hit, and after the second.
fn long_loop(args: &PolicyBenchArgs) -> (Outcome, Outcome) {
    let mut machine = machine(args, true);
    let mut passes = |count| machine.run(std::iter::repeat_n(0..u64::from(args.cache) * 3 / 2, count).flatten());
    passes(1);
    let (second, late) = (passes(1), passes(14));
    let reads = second.reads + late.reads;
    let [remote_hits, sent, taken] =
        [second.remote_hits + late.remote_hits, second.sent + late.sent, second.taken + late.taken];
    (Outcome { reads, local_hits: 0, remote_hits, sent, taken }, late)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARGS: PolicyBenchArgs = PolicyBenchArgs { cache: 2048, guest: 256 };

    #[test]
    fn a_loop_over_more_than_the_cache_hits_as_a_fixed_subset_would() {
        let (_, late) = long_loop(&ARGS);
        assert!(late.hits() >= 0.9 * 2. / 3., "{late:?}");
        assert!(late.sent * 20 <= late.reads, "{late:?}");
    }

    #[test]
    fn a_loop_that_is_cached_as_far_as_it_goes_is_sent_in_part() {
        let (_, late) = long_loop(&PolicyBenchArgs { cache: 8192, guest: 2048 });
        assert!(late.hits() >= 0.95 * 2. / 3. && late.taken * 100 <= late.reads, "{late:?}");
    }

    #[test]
    fn no_trace_is_worse_than_with_lru() {
        for (name, reads) in traces(ARGS.cache.into()) {
            let [lru, adaptive] = [false, true].map(|adapts| machine(&ARGS, adapts).run(reads.iter().copied()));
            assert!(adaptive.remote_hits * 100 >= lru.remote_hits * 97, "{name}: {adaptive:?}, with LRU {lru:?}");
        }
    }
}
