//! Curves as the engine keeps them: what they cost it, and how close they come to exact ones with and without evictions, and with and without
//! a cache.

use super::exact::exact;
use super::traces::{Event, Layout, below_guest, traces};
use super::{CurveBenchArgs, Difference, sizes};
use crate::index::cpu_ns;
use crate::machine::{DISK, Sizes, config};
use remoca_core::engine::{
    Action, DiskEngine, EngineConfig, Evicted, GuestOp, Leaving, PoolOffer, RequestId, ServerNumber, layout,
};
use remoca_core::units::{ByteRange, Nanos, PAGE_SIZE, PAGE_SIZE_U64, PageCount};

const SERVER: ServerNumber = ServerNumber(0);
/// Time from one read to the next: no window ends before the trace.
const STEP_NS: u64 = 1000;

/// What the engine has to learn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// An agent and a cache.
    Cache,
    /// An agent that follows the engine's advice, and no cache.
    Ghost,
    /// No agent and no cache.
    ReadsAlone,
}

/// An engine that is driven by the events of a trace, with a memory server that never fails.
pub struct Driven {
    pub engine: DiskEngine<Vec<u32>>,
    now: Nanos,
    page: Vec<u8>,
    turn: u64,
}

impl Driven {
    pub fn new(setting: Setting, cache: u32, guest_pages: u32, seed: u64) -> Self {
        let cached = PageCount(if setting == Setting::Cache { cache } else { 0 });
        let sizes = Sizes { local: PageCount(0), remote: cached, guest: PageCount(guest_pages + 64) };
        let (key, has_port) = (u128::from(seed).to_le_bytes(), setting != Setting::ReadsAlone);
        let config = EngineConfig { key, seed, has_port, ..config(sizes) };
        let mut engine = DiskEngine::new(&config, vec![0; layout(&config).words()]);
        engine.describe_disk(DISK, 1 << 52, false);
        engine.set_servers(Nanos(1), &[SERVER], Leaving::AtOnce);
        let mut this = Self { engine, now: Nanos(1), page: vec![1; PAGE_SIZE], turn: 0 };
        let offer = PoolOffer { generation: 1, npages: PageCount(0), available: PageCount(cache), sends_received: 0 };
        if setting == Setting::Cache {
            this.engine.handle_answer(this.now, SERVER, Some(offer));
        }
        this.act();
        this
    }

    /// Handles an event. An eviction that the agent leaves out on the engine's advice does not reach it.
    pub fn note(&mut self, event: Event) {
        // Made-up traces have no others.
        let (Event::Read(block) | Event::Evicted(block)) = event else { return };
        self.page[..8].copy_from_slice(&block.to_le_bytes());
        match event {
            Event::Read(_) => {
                self.now = self.now.plus_ns(STEP_NS);
                let range = ByteRange { offset: block * PAGE_SIZE_U64, length: PAGE_SIZE_U64 };
                self.engine.handle_request(self.now, RequestId(0), DISK, GuestOp::Read(range));
                self.act();
            }
            _ => {
                self.turn = self.turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let one_of = u64::from(self.engine.advice().max(1));
                if (self.turn >> 32).is_multiple_of(one_of)
                    && let Evicted::Admit(_) = self.engine.handle_evicted(&self.page)
                {
                    self.engine.handle_sent(SERVER, 1);
                }
            }
        }
    }

    fn act(&mut self) {
        while let Some(action) = self.engine.poll_action() {
            match action {
                Action::Disk { request, .. } => self.engine.handle_disk_done(self.now, request, Ok(()), &self.page),
                Action::Fetch { fetch, at } => _ = self.engine.handle_page(self.now, at.server, fetch, &self.page),
                Action::SetSize { server, npages } => self.engine.handle_sized(self.now, server, npages),
                _ => {}
            }
        }
        self.engine.handle_timer(self.now);
    }

    /// Returns the curve's miss ratios.
    pub fn miss_ratios(&mut self, sizes: &[u64]) -> Vec<f64> {
        let sizes: Vec<_> = sizes.iter().map(|size| PageCount(u32::try_from(*size).unwrap_or(u32::MAX))).collect();
        let report = self.engine.curve(self.now, None, &sizes);
        report.map(|report| report.miss_ratios.into_iter().map(|(ratio, _)| ratio).collect()).unwrap_or_default()
    }
}

/// Returns the difference of the engine's curve from the exact one.
pub fn difference(events: &[Event], setting: Setting, guest_pages: usize, seed: u64) -> Difference {
    let guest_pages = u32::try_from(guest_pages).unwrap_or(u32::MAX);
    let mut driven = Driven::new(setting, guest_pages * 4, guest_pages, seed);
    events.iter().for_each(|event| driven.note(*event));
    let exact = exact(events);
    let sizes = sizes(&exact);
    Difference::between(&driven.miss_ratios(&sizes), &exact.miss_ratios(&sizes))
}

/// Prints the error of the engine's curves, and what they cost.
pub fn run(args: &CurveBenchArgs) {
    println!("Error of the engine's curve (a trace of {} blocks, extents): mean and worst", args.blocks);
    println!("{:24}{:>18}{:>18}{:>18}", "trace", "with a cache", "without", "reads alone");
    for (name, reads) in traces(args.blocks, args.seed) {
        let events = below_guest(&reads, args.guest_pages(), Layout::Extents);
        print!("{name:24}");
        for setting in [Setting::Cache, Setting::Ghost, Setting::ReadsAlone] {
            let Difference { mean, worst } = difference(&events, setting, args.guest_pages(), args.seed);
            print!("{mean:>11.4}{worst:>7.4}");
        }
        println!();
    }
    cost(args);
}

/// Prints the engine's CPU time for an event with and without curves, in turn on the same events.
fn cost(args: &CurveBenchArgs) {
    println!(
        "CPU time of the engine for an event, ns: with curves, without, and the difference (medians of 7 rounds in turn)"
    );
    println!("{:24}{:>10}{:>10}{:>10}{:>10}", "", "with", "without", "more", "%");
    for setting in [Setting::Cache, Setting::Ghost, Setting::ReadsAlone] {
        let reads = &traces(args.blocks, args.seed)[1].1;
        let events = below_guest(reads, args.guest_pages(), Layout::Extents);
        let guest_pages = u32::try_from(args.guest_pages()).unwrap_or(u32::MAX);
        let [mut with, mut without] = [true, false].map(|is_on| {
            let mut driven = Driven::new(setting, guest_pages * 4, guest_pages, args.seed);
            driven.engine.keep_curves(is_on);
            driven
        });
        let mut rounds = [Vec::new(), Vec::new()];
        for part in events.chunks(events.len().div_ceil(7)) {
            for (driven, times) in [&mut with, &mut without].into_iter().zip(&mut rounds) {
                let start = cpu_ns();
                part.iter().for_each(|event| driven.note(*event));
                times.push((cpu_ns() - start) as f64 / part.len() as f64);
            }
        }
        let [with, without] = rounds.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        });
        let more = with - without;
        println!("{:24}{with:>10.1}{without:>10.1}{more:>10.1}{:>10.2}", format!("{setting:?}"), more / without * 100.);
    }
}
