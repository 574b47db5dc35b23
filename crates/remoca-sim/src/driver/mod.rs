//! The VM process under the simulator: the real driver with its frontends, its link and its state file, on one thread, in
//! virtual time, from a seed.
//!
//! What has a thread in the program answers at any later step here: stores ([`store`]), attempts to connect and memory
//! servers ([`servers`]), front ends, NBD clients ([`nbd`]), and the program that an upgrade asks. The world (`world`) moves
//! them, hands the driver what is ready in any order, and judges what the guests see (`checks`) and what the stores are
//! asked (`disks`).

mod agent;
mod checks;
mod disks;
mod guests;
mod moving;
mod nbd;
mod network;
mod plan;
mod process;
mod requests;
mod servers;
mod store;
mod time;
mod world;

use crate::panics;
use crate::violation::{Promise, Violation};
use plan::DriverPlan;
use rustix::event::{EventfdFlags, eventfd as new_eventfd};
use std::fmt;
use std::os::fd::OwnedFd;
use world::World;

/// What somebody around the driver does wrong, as the driver could: each has to be noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Writes that have to be durable are not.
    NotDurable,
    /// The error of a modification is not told.
    ErrorHidden,
    /// A store that comes back says nothing.
    CrashHidden,
    /// A read that fails is said to be good.
    FailedReadBelieved,
    /// Something else is written than what the guest gave.
    OtherDataWritten,
    /// A page goes to the memory server as another one.
    WrongPageSent,
    /// A disk read whose answer nobody needs any more never ends.
    LoserKept,
    /// A discard is said to be done as soon as it is begun.
    DiscardAnsweredEarly,
    /// A successor does not wait for what a dead process may still have on its way to a remote disk.
    NotSettled,
    /// The memory server forgets every page.
    PagesForgotten,
}

impl Flaw {
    /// All of them, with their names.
    pub const ALL: [(&'static str, Self); 10] = [
        ("not-durable", Self::NotDurable),
        ("error-hidden", Self::ErrorHidden),
        ("crash-hidden", Self::CrashHidden),
        ("failed-read-believed", Self::FailedReadBelieved),
        ("other-data-written", Self::OtherDataWritten),
        ("wrong-page-sent", Self::WrongPageSent),
        ("loser-kept", Self::LoserKept),
        ("discard-answered-early", Self::DiscardAnsweredEarly),
        ("not-settled", Self::NotSettled),
        ("pages-forgotten", Self::PagesForgotten),
    ];
}

/// How a seed is run.
#[derive(Clone, Debug, Default)]
pub struct DriverOptions {
    pub flaw: Option<Flaw>,
    /// Only so many steps of the plan.
    pub steps: Option<usize>,
    /// Prints everything that happens.
    pub tell: bool,
}

macro_rules! tally {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What happened in a run.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct DriverTally { $($(#[$doc])* pub $name: u64,)* }

        impl DriverTally {
            /// All counters with their names.
            #[must_use]
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }
        }
    };
}

tally! {
    events,
    turns,
    requests,
    skipped,
    completed,
    failed,
    sectors_checked,
    store_reads,
    store_writes,
    /// Requests that the store did in several parts.
    in_pieces,
    durable_writes,
    cache_switches,
    departures,
    kills,
    power_failures,
    upgrades,
    upgrades_refused,
    warm_starts,
    sessions,
    cuts,
    store_crashes,
    flushes_after_loss,
    /// Blocks that were read to be written back with a part of them changed.
    rewritten,
    /// Requests of an NBD client that are longer than a buffer.
    long_requests,
    /// Requests on another queue than the first.
    on_other_queues,
    /// Pages that the port took.
    evictions,
    identifications,
    server_lists,
    /// Guests that went on at another host, ...
    moves,
    /// ... or where they were.
    moves_back,
    moves_refused,
    /// Guests that found their cache at the other host.
    moved_warm,
    lines_cut,
    /// Disks whose requests of before were held back, as the dead process's may still be on their way.
    settlings,
    /// Of the engine, over all processes.
    read_blocks,
    hit_blocks,
    /// The same of runs whose working set fits the cache, and in which nothing goes wrong.
    cosy_read_blocks,
    cosy_hit_blocks,
    evictions_admitted,
    evictions_duplicate,
    evictions_unmatched,
    hedges,
    fetch_missing,
    fetch_wrong,
}

/// A run in which a promise was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFailure {
    pub seed: u64,
    pub event: u64,
    pub violation: Violation,
}

impl fmt::Display for DriverFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "driver seed {}, event {}: {}", self.seed, self.event, self.violation)
    }
}

/// Runs the driver with what `seed` gives.
///
/// # Errors
/// The first broken promise.
pub fn run_driver(seed: u64, options: &DriverOptions) -> Result<DriverTally, Box<DriverFailure>> {
    let plan = DriverPlan::draw(seed);
    let mut world = World::new(&plan, options);
    let outcome = panics::catch(|| world.run())
        .unwrap_or_else(|text| Err(Violation::new(Promise::NoPanic, format!("the driver panics: {text}"))));
    let event = world.event();
    match outcome {
        Ok(()) => Ok(world.tally()),
        Err(violation) => {
            // What panicked may panic again.
            let _ = panics::catch(|| drop(world));
            Err(Box::new(DriverFailure { seed, event, violation }))
        }
    }
}

fn eventfd() -> OwnedFd {
    new_eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("the system has an eventfd left")
}

fn raise(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}

fn clear(event: &OwnedFd) {
    let _ = rustix::io::read(event, &mut [0; 8]);
}
