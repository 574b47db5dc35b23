//! The deterministic simulator: guest, disks, engine, network and memory server on one thread, from one seed.
//!
//! [`run`] draws a plan from a seed (`plan`, `scenario`), lets the world act it out in virtual time (`world`, with the
//! models in `guest`, `disk`, `wire` and `server`), and stops at the first broken promise (`violation`). [`shrink`] cuts a
//! plan that fails down to the steps that matter, [`trace`] tells what happened. The engine is the real one, driven as
//! `remoca-disk` drives it; nothing else of a host is here: no rings, no sockets, no frames.
//!
//! The same seed and options give the same run, on every machine. Decision 0010 says why it is built this way,
//! `docs/simulator.md` how to use it.
#![forbid(unsafe_code)]

mod content;
mod disk;
mod guest;
mod panics;
mod plan;
mod queue;
mod random;
mod scenario;
mod server;
mod shrink;
mod trace;
mod violation;
mod wire;
mod world;

use plan::Plan;
use remoca_core::engine::EngineStats;
use remoca_core::rules::Rule;
use std::collections::BTreeSet;
use std::fmt;
use world::World;

pub use guest::Key;
pub use shrink::{Shrunk, shrink};
pub use trace::Line;
pub use violation::{Promise, Violation};

/// How a seed is run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A rule that the engine leaves out.
    pub omit: Option<Rule>,
    /// Only so many steps of the plan.
    pub steps: Option<usize>,
    /// Steps of the plan that are left out.
    pub without: BTreeSet<usize>,
    /// There is no agent in the guest, and no port.
    pub agentless: bool,
    /// Only what the guest itself can notice ends a run, not what a look into the engine shows.
    pub guest_visible_only: bool,
}

impl Options {
    fn includes(&self, step: usize) -> bool {
        self.steps.is_none_or(|steps| step < steps) && !self.without.contains(&step)
    }
}

macro_rules! tally {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What happened in a run: whether it was worth anything.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Tally { $($(#[$doc])* pub $name: u64,)* pub stats: EngineStats }

        impl Tally {
            /// All counters, the engine's included, with their names.
            #[must_use]
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                let mut all = vec![$((stringify!($name), self.$name)),*];
                all.extend(self.stats.named());
                all
            }
        }
    };
}

tally! {
    events,
    requests,
    /// Steps for which the guest had too many requests under way.
    skipped,
    disk_ios,
    sectors_checked,
    misaligned_blocks,
    evictions,
    /// Frames looked at before they were overwritten.
    frames,
    pages_sent,
    moves,
    connects,
    /// Sessions that the engine gave up.
    given_up,
    /// Sessions that the engine left, with a BYE.
    left,
    /// Answers of servers that were not needed.
    released,
    /// Attempts to connect that failed.
    unanswered,
    hangs,
    refusals,
    messages_lost,
    index_growths,
    store_crashes,
    flushes_failed,
}

/// A run in which no promise was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    pub tally: Tally,
    /// Nothing went wrong in it, and nobody interfered.
    pub fault_free: bool,
}

/// A run in which a promise was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub seed: u64,
    /// Number of the event in which it was noticed.
    pub event: u64,
    pub violation: Violation,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, event {}: {}", self.seed, self.event, self.violation)
    }
}

/// Runs one seed.
///
/// # Errors
/// The first broken promise.
pub fn run(seed: u64, options: &Options) -> Result<Report, Box<Failure>> {
    let plan = Plan::draw(seed);
    let fault_free = plan.scenario.faults.none();
    let mut world = World::new(&plan, options, false);
    finish(seed, &mut world).map(|tally| Report { tally, fault_free })
}

/// Runs one seed once more and tells everything that happened.
pub fn trace(seed: u64, options: &Options) -> (Vec<Line>, Result<Tally, Box<Failure>>) {
    let plan = Plan::draw(seed);
    let mut world = World::new(&plan, options, true);
    let result = finish(seed, &mut world);
    (world.into_lines(), result)
}

/// The conditions of a seed, for people.
#[must_use]
pub fn describe(seed: u64) -> String {
    let plan = Plan::draw(seed);
    format!("{} steps; {:?}", plan.steps.len(), plan.scenario)
}

fn finish(seed: u64, world: &mut World<'_>) -> Result<Tally, Box<Failure>> {
    let outcome = panics::catch(|| world.run())
        .unwrap_or_else(|text| Err(Violation::new(Promise::NoPanic, format!("the engine panics: {text}"))));
    match outcome {
        Ok(()) => Ok(world.tally()),
        Err(violation) => Err(Box::new(Failure { seed, event: world.event(), violation })),
    }
}
