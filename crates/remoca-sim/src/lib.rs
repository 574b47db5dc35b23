//! The deterministic simulator: guest, disks, engine, network and memory server on one thread, from one seed.
//!
//! [`Plan::draw`] makes a plan from a seed (`plan`, `scenario`). [`run`] executes it in virtual time (`world`, with the
//! models in `guest`, `disk`, `wire` and `server`), and stops at the first broken promise (`violation`). [`shrink`] reduces
//! a failing plan to the steps that matter, and [`trace`] returns all events of a run. The engine is the real one, driven
//! as `remoca-disk` drives it. Nothing else of a host is here: no rings, no sockets, no frames.
//!
//! The same seed and options give the same run, on every machine. Decision 0010 says why it is built this way,
//! `docs/simulator.md` how to use it.
#![forbid(unsafe_code)]

mod content;
mod disk;
mod driver;
mod file;
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

use remoca_core::engine::EngineStats;
use remoca_core::rules::Rule;
use std::collections::BTreeSet;
use std::fmt;
use world::World;

pub use driver::{DriverFailure, DriverOptions, DriverTally, Flaw, run_driver};
pub use file::{Saved, load, save};
pub use guest::Key;
pub use plan::{Origin, Plan};
pub use shrink::{Shrunk, shrink};
pub use trace::Line;
pub use violation::{Promise, Violation};

/// A rule that the processes around the engine and their hosts keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostRule {
    /// A process sends its disks nothing until each request of its predecessor has taken effect, or never will.
    ImageLock,
    /// Messages on a connection are void once a newer one has been greeted.
    Fence,
    /// A process's state is void if another program wrote to an image meanwhile.
    ImageUnchanged,
    /// A process's state is void after its host was down.
    SameBoot,
    /// A killed process's state is void if its store is remote, and could have come back from a crash.
    LocalStore,
    /// A process's knowledge from before another one had the disks is void.
    MovedIsCold,
    /// A page of the local tier that moves is copied before another one takes its place.
    DemoteFirst,
}

impl HostRule {
    /// All rules, with their names.
    pub const ALL: [(&'static str, Self); 7] = [
        ("image-lock", Self::ImageLock),
        ("fence", Self::Fence),
        ("image-unchanged", Self::ImageUnchanged),
        ("same-boot", Self::SameBoot),
        ("local-store", Self::LocalStore),
        ("moved-is-cold", Self::MovedIsCold),
        ("demote-first", Self::DemoteFirst),
    ];
}

/// Options of a run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Rule that the engine leaves out.
    pub omit: Option<Rule>,
    /// Rule that processes and hosts leave out.
    pub omit_host: Option<HostRule>,
    /// Number of steps of the plan to run.
    pub steps: Option<usize>,
    /// Steps of the plan that are left out.
    pub without: BTreeSet<usize>,
    /// Whether there is no agent in the guest, and no port.
    pub agentless: bool,
    /// Whether only faults that the guest itself can notice end a run, not those seen by inspecting the engine.
    pub guest_visible_only: bool,
}

impl Options {
    fn includes(&self, step: usize) -> bool {
        self.steps.is_none_or(|steps| step < steps) && !self.without.contains(&step)
    }
}

macro_rules! tally {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of a run, which show whether the run was useful.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Tally { $($(#[$doc])* pub $name: u64,)* pub stats: EngineStats }

        impl Tally {
            /// Returns all counters with their names, including the engine's.
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
    /// Steps skipped because the guest had too many requests in flight.
    skipped,
    disk_ios,
    sectors_checked,
    misaligned_blocks,
    evictions,
    /// Frames looked at before they were overwritten.
    frames,
    pages_sent,
    /// Pages that moved from the local tier to another one.
    demoted,
    /// Pages read from the local tier.
    local_reads,
    moves,
    connects,
    /// Sessions that the engine abandoned.
    given_up,
    /// Sessions that the engine left, with a BYE.
    left,
    /// Answers of servers that were not needed.
    released,
    /// Attempts to connect that failed.
    unanswered,
    hangs,
    /// Disk reads besides a server's that waited for a buffer, and those of them no longer needed then.
    hedges_starved,
    hedges_skipped,
    refusals,
    messages_lost,
    index_growths,
    index_shrinks,
    /// Number of times that there was no memory for a larger index.
    index_refusals,
    store_crashes,
    flushes_failed,
    /// VM processes that died.
    kills,
    /// VM processes that died between two stores.
    torn_indexes,
    /// Disks that came in the place of others, shrank or grew.
    disk_changes,
    /// Agents that said which classes of pages they send.
    class_reports,
    /// Requests beyond the end of their disk, or to a disk that was not there.
    requests_beyond,
    cold_starts,
    warm_starts,
    upgrades,
    /// Upgrades of processes to which servers owed pages.
    upgrades_owed,
    migrations,
    /// Processes that got the disks from another process, with the index and without.
    moved_warm,
    moved_cold,
    images_changed,
    host_faults,
}

/// A run in which no promise was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    pub tally: Tally,
    /// Whether it had no faults and no interference.
    pub fault_free: bool,
    /// Whether most of what is read fits the caches.
    pub is_cosy: bool,
}

/// A run in which a promise was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub origin: Origin,
    /// Number of the event in which it was noticed.
    pub event: u64,
    pub violation: Violation,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, event {}: {}", self.origin, self.event, self.violation)
    }
}

/// Runs one plan.
///
/// # Errors
/// The first broken promise.
pub fn run(plan: &Plan, options: &Options) -> Result<Report, Box<Failure>> {
    let fault_free = plan.scenario.faults.none();
    let is_cosy = plan.scenario.machines.iter().all(|machine| machine.working_set > 0);
    let mut world = World::new(plan, options, false);
    finish(plan, world.as_mut()).map(|tally| Report { tally, fault_free, is_cosy })
}

/// Runs one plan again, and returns a trace of all events with the result.
pub fn trace(plan: &Plan, options: &Options) -> (Vec<Line>, Result<Tally, Box<Failure>>) {
    let mut world = World::new(plan, options, true);
    let result = finish(plan, world.as_mut());
    (world.map(World::into_lines).unwrap_or_default(), result)
}

fn finish(plan: &Plan, world: Option<&mut World<'_>>) -> Result<Tally, Box<Failure>> {
    let Some(world) = world else { return Ok(Tally::default()) };
    let outcome = panics::catch(|| world.run())
        .unwrap_or_else(|text| Err(Violation::new(Promise::NoPanic, format!("the engine panics: {text}"))));
    match outcome {
        Ok(()) => Ok(world.tally()),
        Err(violation) => Err(Box::new(Failure { origin: plan.origin.clone(), event: world.event(), violation })),
    }
}
