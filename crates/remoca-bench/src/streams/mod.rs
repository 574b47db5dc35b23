//! Passes over files on a disk whose sequential reads are cheap, with remoca and without (P16): the real engine in virtual time, on
//! disks, pools, agents and patterns drawn from a seed (`world.rs`).
//!
//! A pass *can hit* if at least a tenth of its blocks are cached when they are read. Of the patterns that never hit, what is read
//! after the first 256 MiB counts. Passes that fill the cache, whose content is hit later, stand beside: P14 bounds them.

mod patterns;
mod world;

use crate::guest::Random;
use crate::vm::save_figures;
use crate::wanted;
use anyhow::Result;
use clap::Args;
use patterns::{Pattern, patterns};
use remoca_lab::figures::{Figure, Spread};
use serde::Serialize;
use world::{Pass, World};

/// Share of the blocks of a pass, one in so many, from which on it can hit.
const CAN_HIT: u64 = 10;
/// Reads that may cost what they cost, before it is known that they do not hit: 256 MiB.
const FREE_PAGES: u64 = 1 << 16;

#[derive(Args)]
pub struct StreamsArgs {
    /// Number of disks and pools, the two of the target included
    #[arg(long, default_value_t = 8)]
    cases: u64,
    /// Seed from which the others are drawn
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Size of the cache, in MiB; files and guest have sizes that follow from it
    #[arg(long, default_value_t = 128)]
    cache: u32,
    /// Processor time of the guest for a page that the agent takes, in nanoseconds [default: 6000, as under emulation, in the cases
    /// of the target, and drawn in the others]
    #[arg(long)]
    agent_ns: Option<u64>,
}

/// What things cost, in virtual time.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Costs {
    /// Disk read that does not continue within 256 KiB of the one before, beside its bytes.
    pub seek_ns: u64,
    /// A page of a disk read.
    pub disk_page_ns: u64,
    /// A request to the pool, and each of its pages.
    pub pool_request_ns: u64,
    pub pool_page_ns: u64,
    /// Processor time of the guest for a page that the agent takes. One that it leaves out costs [`Self::AGENT_SKIPS`] times less.
    pub agent_page_ns: u64,
    /// Processor time of the guest for a page that it reads.
    pub guest_page_ns: u64,
    /// Reads that the guest has in flight.
    pub depth: usize,
}

impl Costs {
    /// Decision 0006: 245 of 4,500 instructions.
    pub const AGENT_SKIPS: u64 = 18;
    /// The disk of the target, and a pool that is quicker by the page.
    const QUICK_POOL: Self = Self {
        seek_ns: 7_000_000,
        disk_page_ns: 27_307,
        pool_request_ns: 100_000,
        pool_page_ns: 10_000,
        agent_page_ns: 6_000,
        guest_page_ns: 1_000,
        depth: 1,
    };
    /// The same disk, and a pool that takes half as long again for the pages of a stream.
    const SLOW_POOL: Self = Self { pool_request_ns: 60_000, pool_page_ns: 38_000, ..Self::QUICK_POOL };

    /// Draws what things cost.
    fn drawn(random: &mut Random) -> Self {
        let mut from = |least: u64, most: u64| least + random.next() % (most - least + 1);
        Self {
            seek_ns: from(3_000_000, 12_000_000),
            // 100 to 170 MB/s.
            disk_page_ns: 4_096_000 / from(100, 170),
            pool_request_ns: from(50_000, 300_000),
            pool_page_ns: from(4_000, 60_000),
            agent_page_ns: from(500, 6_000),
            guest_page_ns: from(500, 2_000),
            depth: usize::from(from(0, 1) == 1) + 1,
        }
    }
}

/// A pass beside the same pass without remoca.
#[derive(Clone, Copy, Debug, Serialize)]
struct Compared {
    ratio: f64,
    /// Share of the blocks that were cached when they were read.
    cached: f64,
    /// Share of the blocks read that the agent took.
    taken: f64,
    can_hit: bool,
    /// Whether it counts among the passes that cannot hit.
    cannot_hit: bool,
}

#[derive(Serialize)]
struct Row {
    case: usize,
    pattern: &'static str,
    passes: Vec<Compared>,
    without_agent: Vec<Compared>,
}

fn measure(costs: Costs, pattern: &Pattern, cache: u32) -> Vec<Compared> {
    let guest = cache / 4;
    let [mut with, mut without] = [Some(cache), None].map(|cache| World::new(costs, guest, cache));
    let mut read = 0;
    let compare = |pass: &Vec<world::Run>| {
        let (ours, theirs) = (with.pass(pass), without.pass(pass));
        let share = |count: u64, of: Pass| count as f64 / of.pages.max(1) as f64;
        let is_free = read < FREE_PAGES;
        read += ours.pages;
        Compared {
            ratio: ours.ns as f64 / theirs.ns as f64,
            cached: share(ours.cached, ours),
            taken: share(ours.taken, ours),
            can_hit: ours.cached * CAN_HIT >= ours.pages,
            cannot_hit: pattern.never_hits && !is_free,
        }
    };
    pattern.passes.iter().map(compare).collect()
}

fn cases(args: &StreamsArgs) -> Vec<Costs> {
    let mut random = Random(args.seed);
    let drawn = std::iter::repeat_with(|| Costs::drawn(&mut random));
    let count = usize::try_from(args.cases).unwrap_or(usize::MAX);
    let cases = [Costs::QUICK_POOL, Costs::SLOW_POOL].into_iter().chain(drawn).take(count);
    cases.map(|costs| Costs { agent_page_ns: args.agent_ns.unwrap_or(costs.agent_page_ns), ..costs }).collect()
}

/// Runs the benchmark and prints its table.
///
/// # Errors
/// If the figures cannot be written.
pub fn run(args: &StreamsArgs) -> Result<()> {
    let cases = cases(args);
    println!(
        "Time with remoca over time without, pass by pass. c: a tenth or more of it is cached; -: it never hits, and counts"
    );
    let mut rows = Vec::new();
    for (number, costs) in cases.iter().enumerate() {
        println!("\n{number}: {}", described(*costs));
        for pattern in patterns(args.cache * 256) {
            let passes = measure(*costs, &pattern, args.cache * 256);
            let cells = passes.iter().map(|pass| {
                let mark = if pass.can_hit {
                    'c'
                } else if pass.cannot_hit {
                    '-'
                } else {
                    ' '
                };
                format!("{:>7.3}{mark}", pass.ratio)
            });
            println!("  {:44}{}", pattern.name, cells.collect::<String>());
            // What the way of the reads costs, whatever the agent costs.
            let without_agent = measure(Costs { agent_page_ns: 0, ..*costs }, &pattern, args.cache * 256);
            rows.push(Row { case: number, pattern: pattern.name, passes, without_agent });
        }
    }
    let figures = figures_of(&rows);
    print!("\n{}", wanted::table_of(&figures));
    for figure in &figures {
        println!("{}: {:?}", figure.id, figure.beside);
    }
    // P16 is the run whose agents cost what they cost.
    save_figures(if args.agent_ns.is_none() { "streams" } else { "streams-agent" }, &figures, &(cases, rows))
}

fn described(costs: Costs) -> String {
    let us = |ns: u64| ns as f64 / 1000.0;
    format!(
        "seek {:.1} ms, page {:.1} us; pool {:.0} us and {:.1} us a page; agent {:.1} us, guest {:.1} us a page; {} in flight",
        us(costs.seek_ns) / 1000.0,
        us(costs.disk_page_ns),
        us(costs.pool_request_ns),
        us(costs.pool_page_ns),
        us(costs.agent_page_ns),
        us(costs.guest_page_ns),
        costs.depth
    )
}

/// Returns the worst pass of each kind; the median stands beside.
fn figures_of(rows: &[Row]) -> Vec<Figure> {
    let spread = |of: fn(&Row) -> &Vec<Compared>, is_meant: fn(&Compared) -> bool| {
        Spread::of(rows.iter().flat_map(of).filter(|pass| is_meant(pass)).map(|pass| pass.ratio).collect())
    };
    let passes = |is_meant| spread(|row| &row.passes, is_meant);
    let passes_without_agent = |is_meant| spread(|row| &row.without_agent, is_meant);
    let filling = passes(|pass| !pass.can_hit && !pass.cannot_hit).map_or(0.0, |spread| spread.max);
    let figure = |id, is_meant: fn(&Compared) -> bool| {
        let spread = passes(is_meant)?;
        let free = passes_without_agent(is_meant)?.max;
        let figure = Figure::single(id, spread.max).beside("median", spread.median).beside("least", spread.min);
        Some(figure.beside("worst_with_an_agent_that_costs_nothing", free))
    };
    let cannot = figure("P16-cannot", |pass| pass.cannot_hit && !pass.can_hit);
    let can = figure("P16-can", |pass| pass.can_hit).map(|figure| figure.beside("worst_that_fills", filling));
    [cannot, can].into_iter().flatten().collect()
}
