//! The VM process under the simulator: the real driver with its frontends, its link and its state file, on one thread, in
//! virtual time, from a seed.
//!
//! Parts that are threads in the program answer at any later step here: stores ([`store`]), attempts to connect and
//! memory servers ([`servers`]), front ends, NBD clients ([`nbd`]), and the program that an upgrade asks. The world
//! (`world`) moves them and passes ready events to the driver in any order. It checks what the guests see (`checks`)
//! and which requests the stores receive (`disks`).

mod agent;
mod changes;
mod checks;
mod disks;
mod guests;
mod local;
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

/// A fault around the driver that the driver itself could have. Each must be noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Writes that must be durable are not.
    NotDurable,
    /// The error of a modification is not reported.
    ErrorHidden,
    /// A store that comes back from a crash does not report it.
    CrashHidden,
    /// A failed read is reported as successful.
    FailedReadBelieved,
    /// Data other than the guest's is written.
    OtherDataWritten,
    /// A page is sent to the memory server as another page.
    WrongPageSent,
    /// An abandoned disk read never ends.
    LoserKept,
    /// A discard is reported as complete as soon as it begins.
    DiscardAnsweredEarly,
    /// A successor does not wait for requests that a dead process may still have in flight to a remote disk.
    NotSettled,
    /// The memory server forgets every page.
    PagesForgotten,
    /// Another image behind the name of a disk is taken for the image that was there.
    ImageMistaken,
    /// An image is cut, and is as large as before, and nobody notices.
    CutUnnoticed,
    /// Memory of the local tier is used after the server took it back.
    TakeBackIgnored,
}

impl Flaw {
    /// All flaws, with their names.
    pub const ALL: [(&'static str, Self); 13] = [
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
        ("image-mistaken", Self::ImageMistaken),
        ("cut-unnoticed", Self::CutUnnoticed),
        ("take-back-ignored", Self::TakeBackIgnored),
    ];
}

/// How a seed is run.
#[derive(Clone, Debug, Default)]
pub struct DriverOptions {
    pub flaw: Option<Flaw>,
    /// Number of steps of the plan to run.
    pub steps: Option<usize>,
    /// Whether to print all events.
    pub tell: bool,
}

macro_rules! tally {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of a run.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct DriverTally { $($(#[$doc])* pub $name: u64,)* }

        impl DriverTally {
            /// Returns all counters with their names.
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
    /// Requests that the store executed in several parts.
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
    /// Blocks that were read to be written back with a part changed.
    rewritten,
    /// Requests of an NBD client longer than a buffer.
    long_requests,
    /// Requests on a queue other than the first.
    on_other_queues,
    /// Pages that the port accepted.
    evictions,
    identifications,
    server_lists,
    /// Guests that continued at another host, ...
    moves,
    /// ... or where they were.
    moves_back,
    moves_refused,
    /// Guests that found their cache at the other host.
    moved_warm,
    lines_cut,
    disks_removed,
    disks_added,
    /// Images that were put behind the name of a disk while no process ran.
    images_replaced,
    /// Images that became larger or smaller.
    resizes,
    /// Disks whose earlier requests were held back, since the dead process's may still be in flight.
    settlings,
    /// Blocks read, by the engines of all processes.
    read_blocks,
    hit_blocks,
    /// Those of the sessions with the local tier that had not ended.
    local_hit_blocks,
    local_changes,
    /// Sizes that the local tier's server told a client to keep to.
    taken_back,
    demotions,
    /// The same, in runs without faults whose working set fits the cache.
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

/// Runs the driver with the plan of `seed`.
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
            // A panic may repeat here.
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
