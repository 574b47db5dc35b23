//! The parts that a driver is made from.

use super::disk::{Disk, Port};
use super::index_size::Aside;
use super::migration::Migration;
use super::tiers::TierSizes;
use super::upgrade::Start;
use crate::clock::Clock;
use crate::handover::Ask;
use crate::link::ServerLink;
use crate::state::{Former, OptionHashes, StateFile};
use crate::trace::TraceWriter;
use remoca_core::engine::DiskEngine;
use remoca_core::units::PageCount;
use remoca_frontend::nbd::NbdServer;
use remoca_io::address::Endpoint;
use remoca_io::buffer::BufferPool;
use remoca_io::control::ControlServer;
use remoca_io::service::ServiceManager;
use remoca_io::words::IndexMemory;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// The parts of a driver.
pub struct Parts {
    pub name: String,
    pub clock: Box<dyn Clock>,
    pub engine: DiskEngine<IndexMemory>,
    /// The state file, which outlives this process; `None` if nothing does.
    pub state: Option<StateFile>,
    /// Why the engine is a new one; `None` if it continues an earlier index.
    pub cold_reason: Option<String>,
    /// What a previous process left, whether its index is used or not.
    pub former: Former,
    /// Sizes that "on" restores.
    pub sizes: TierSizes,
    pub cache_enabled: bool,
    /// Hashes of the options that `remoca set` can overrule. What it sets holds until they tell that its option has changed.
    pub options: OptionHashes,
    pub disks: Vec<Disk>,
    pub port: Option<Port>,
    /// Server that accepts the clients of disks and of a port that are NBD exports.
    pub nbd: Option<NbdServer>,
    pub link: Option<ServerLink>,
    /// Server of this host, which has the local tier as soon as one is wanted.
    pub local_server: Endpoint,
    pub migration: Migration,
    pub control: Option<ControlServer>,
    pub buffers: BufferPool,
    /// Longest time to look for the next request before the process sleeps.
    pub poll_time_max: Duration,
    /// Limit on the guest memory that is indexed: a guest with more is indexed as if it had this much.
    pub guest_memory_max: PageCount,
    pub trace: Option<TraceWriter>,
    /// Descriptor that becomes readable when the process is to end.
    pub stop: OwnedFd,
    /// Descriptor that becomes readable when the program's own file is to take over (SIGHUP).
    pub hangup: OwnedFd,
    pub start: Start,
    /// Function that asks another program whether it could take over.
    pub ask: Ask,
    /// Function that runs work outside the I/O thread.
    pub aside: Aside,
    /// Service manager, which receives signs of life from the turns of the I/O thread.
    pub manager: ServiceManager,
}
