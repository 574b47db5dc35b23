//! What a driver is made from.

use super::disk::{Disk, Port};
use super::index_size::Aside;
use super::migration::Migration;
use super::upgrade::Start;
use crate::clock::Clock;
use crate::handover::Ask;
use crate::link::ServerLink;
use crate::state::{Former, StateFile};
use crate::trace::TraceWriter;
use remoca_core::engine::DiskEngine;
use remoca_core::units::PageCount;
use remoca_frontend::nbd::NbdServer;
use remoca_io::buffer::BufferPool;
use remoca_io::control::ControlServer;
use remoca_io::service::ServiceManager;
use remoca_io::words::IndexMemory;
use std::os::fd::OwnedFd;

/// All that a driver is made from.
pub struct Parts {
    pub name: String,
    pub clock: Box<dyn Clock>,
    pub engine: DiskEngine<IndexMemory>,
    /// What outlives this process, if something does.
    pub state: Option<StateFile>,
    /// Why the engine is a new one, if it is.
    pub cold_reason: Option<String>,
    /// What a former process left, whether its engine is this one or not.
    pub former: Former,
    /// The size that "on" brings back.
    pub cache: PageCount,
    pub cache_enabled: bool,
    /// Hash of the options that say the same: what was set lives as long as they do.
    pub options: u64,
    pub disks: Vec<Disk>,
    pub port: Option<Port>,
    /// Brings the clients of disks and of a port that are NBD exports.
    pub nbd: Option<NbdServer>,
    pub link: Option<ServerLink>,
    pub migration: Migration,
    pub control: Option<ControlServer>,
    pub buffers: BufferPool,
    /// A guest with more memory is indexed as if it had this much.
    pub guest_memory_max: PageCount,
    pub trace: Option<TraceWriter>,
    /// Becomes readable when the process is to end.
    pub stop: OwnedFd,
    /// Gives eight bytes for each time that the program's own file is to take over.
    pub hangup: OwnedFd,
    pub start: Start,
    /// How another program is asked whether it could take over.
    pub ask: Ask,
    /// How something is done beside the I/O thread.
    pub aside: Aside,
    /// Gets a sign of life from the I/O thread's turns.
    pub manager: ServiceManager,
}
