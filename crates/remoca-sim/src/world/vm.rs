//! One VM: its guest, its disks, and the process that serves them, with that process's end of the network.

use super::local::LocalTier;
use super::moving::Moving;
use super::region::{Fuse, Region};
use crate::content::{BLOCK_SECTORS, Block, Sector};
use crate::disk::ModelDisk;
use crate::guest::{Guest, Key};
use crate::plan::Kill;
use crate::scenario::Machine;
use crate::wire::{ConnectionId, Wire};
use remoca_core::engine::{DiskEngine, EngineConfig, FetchId, PoolSlot, RequestId, ServerNumber, layout};
use remoca_core::fingerprint::{Fingerprint, Fingerprinter};
use remoca_core::index::Origin;
use remoca_core::rules::Rules;
use remoca_core::units::{BlockId, BlockNumber, DiskIndex, Nanos, POOLS_MAX, PageCount, SlotIndex};
use std::collections::BTreeMap;
use std::rc::Rc;

/// A REQUEST whose reply the engine has not received.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outstanding {
    pub(super) at: PoolSlot,
    /// Event in which its read was taken.
    pub(super) event: u64,
}

/// Events in the life of one process.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Life {
    pub(super) evictions: u64,
    pub(super) frames: u64,
    pub(super) pages_sent: u64,
    pub(super) misaligned_blocks: u64,
}

/// Knowledge of an index: of each block, and of each slot in the order of the queue.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Knowledge {
    blocks: Vec<(Key, Fingerprint)>,
    slots: Vec<(SlotIndex, Fingerprint)>,
}

impl Knowledge {
    /// Returns whether any block is known, or any page cached.
    pub(super) fn is_any(&self) -> bool {
        !self.blocks.is_empty() || !self.slots.is_empty()
    }
}

/// What is known about failed flushes of a disk.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FlushFailure {
    /// Whether the process has seen one, so that it may report it for ever.
    pub(super) heard: bool,
    /// Whether the guest was told of one, so that the process must keep reporting it.
    pub(super) told: bool,
}

pub(super) struct Vm<'a> {
    pub(super) number: usize,
    pub(super) machine: &'a Machine,
    pub(super) host: usize,
    pub(super) disks: Vec<ModelDisk>,
    /// Number of the engine for each disk; `None` if it has none.
    pub(super) numbers: Vec<Option<DiskIndex>>,
    /// Size of each disk in sectors.
    pub(super) sizes: Vec<usize>,
    /// Serial number of each disk's image.
    pub(super) images: Vec<u16>,
    /// Whether the guest leaves each disk alone, because it is about to change.
    pub(super) detached: Vec<bool>,
    /// Disk and image that have each number, as the state file says.
    pub(super) records: BTreeMap<DiskIndex, (u16, u16)>,
    pub(super) guest: Guest,
    pub(super) prints: Fingerprinter,
    /// Configuration of the next process.
    pub(super) config: EngineConfig,
    pub(super) resident: u32,
    /// Whether the process runs, and owns the disks.
    pub(super) up: bool,
    /// Engine of the process; an empty engine if there is no process.
    pub(super) engine: DiskEngine<Region>,
    pub(super) fuse: Rc<Fuse>,
    /// Words that the last process left; `None` if they may not be used.
    pub(super) remains: Option<Vec<u32>>,
    /// Numbers of the disks there and here, if these words are from elsewhere.
    pub(super) moved: Option<Vec<(DiskIndex, DiskIndex)>>,
    /// Knowledge of the last process, if it died between two events or actions.
    pub(super) knew: Option<Knowledge>,
    /// Start of the drain for an upgrade, in which it accepts no requests; `None` if there is no upgrade.
    pub(super) upgrade_since: Option<Nanos>,
    pub(super) moving: Option<Moving>,
    /// Death that is due in one of the next events.
    pub(super) doom: Option<Kill>,
    /// Number of further actions before it dies; `None` if it does not.
    pub(super) actions_left: Option<u32>,
    pub(super) life: Life,
    /// Whether its agent ever said that it sends one class of pages: what the index knows of the guest's pages is then what it makes of that.
    pub(super) has_lied: bool,
    /// Number of nanoseconds that its clock is ahead.
    pub(super) ahead_ns: u64,
    pub(super) timer_at: Option<Nanos>,
    /// Connections of its sessions.
    pub(super) wires: Vec<Wire>,
    pub(super) local: LocalTier,
    /// Name of its pools at the servers.
    pub(super) token: u64,
    /// Servers in the operator's list, a bit for each.
    pub(super) listed: u32,
    /// Number of times that each server was removed from the list.
    pub(super) listings: Vec<usize>,
    /// Attempts to connect that the engine has not received an answer to.
    pub(super) asked: BTreeMap<ServerNumber, ConnectionId>,
    /// Connections that wait to be used or released.
    pub(super) answered: BTreeMap<ServerNumber, ConnectionId>,
    /// REQUESTs whose reply the engine has not received.
    pub(super) outstanding: BTreeMap<FetchId, Outstanding>,
    /// Content of frames that were overwritten since the actions were drained.
    pub(super) captured: Vec<Block>,
    /// Disk reads that wait for a buffer, each with a serial number that distinguishes it from others with the same ID.
    pub(super) starved: BTreeMap<RequestId, u64>,
    pub(super) ios: u64,
    pub(super) flush_failed: Vec<FlushFailure>,
}

impl<'a> Vm<'a> {
    pub(super) fn new(number: usize, machine: &'a Machine, servers: usize, agentless: bool, rules: Rules) -> Self {
        let config = EngineConfig {
            disks: machine.disks + 3,
            key: machine.key,
            seed: 1,
            cache: PageCount(machine.slots),
            local: PageCount(machine.local),
            guest_memory: PageCount(machine.resident),
            has_port: machine.has_port && !agentless,
            frame_sample: machine.frame_sample,
            send_window: machine.send_window,
            fetch_limit: machine.fetch_limit,
            slots_per_turn: 1 + machine.slots % 7,
            pools: POOLS_MAX,
            hedge: machine.hedge,
            rules,
        };
        let (engine, fuse) = cold_engine(&config);
        Self {
            number,
            machine,
            host: machine.host,
            disks: (0..machine.disks).map(|disk| new_disk(number, disk, machine.sectors)).collect(),
            numbers: vec![None; usize::from(machine.disks)],
            sizes: vec![machine.sectors; usize::from(machine.disks)],
            images: vec![0; usize::from(machine.disks)],
            detached: vec![false; usize::from(machine.disks)],
            records: BTreeMap::new(),
            guest: Guest::new(machine.depth, machine.guest_pages),
            prints: Fingerprinter::new(&machine.key),
            config,
            resident: machine.resident,
            up: false,
            engine,
            fuse,
            remains: None,
            moved: None,
            knew: None,
            upgrade_since: None,
            moving: None,
            doom: None,
            actions_left: None,
            life: Life::default(),
            has_lied: false,
            ahead_ns: 0,
            timer_at: None,
            wires: Vec::new(),
            local: LocalTier::new(machine.local * 3 / 2),
            token: 0,
            listed: (1 << servers) - 1,
            listings: vec![0; servers],
            asked: BTreeMap::new(),
            answered: BTreeMap::new(),
            outstanding: BTreeMap::new(),
            captured: Vec::new(),
            starved: BTreeMap::new(),
            ios: 0,
            flush_failed: vec![FlushFailure::default(); usize::from(machine.disks)],
        }
    }

    /// Returns a connection of a session, or `None` if it is no longer one.
    pub(super) fn wire(&mut self, connection: ConnectionId) -> Option<&mut Wire> {
        self.wires.iter_mut().find(|wire| wire.id == connection)
    }

    /// Returns the connection of the session with a server, or `None` if there is no session with it.
    pub(super) fn wire_to(&mut self, server: ServerNumber) -> Option<&mut Wire> {
        self.wires.iter_mut().find(|wire| wire.number == server)
    }

    /// Ends a REQUEST, if `server` owes its reply. A server that lies may reply to one that another server owes.
    pub(super) fn end_fetch(&mut self, server: ServerNumber, fetch: FetchId) {
        if self.outstanding.get(&fetch).is_some_and(|outstanding| outstanding.at.server == server) {
            self.outstanding.remove(&fetch);
        }
    }

    /// Returns whether any server owes the answer to a SETSIZE.
    pub(super) fn is_size_owed(&self) -> bool {
        self.local.is_size_owed || self.wires.iter().any(|wire| wire.size_asked)
    }

    /// Returns whether its process died during this event. If so, nothing further happens.
    pub(super) fn is_dead(&self) -> bool {
        self.fuse.has_burnt() || self.actions_left == Some(0)
    }

    /// Returns whether the process has already accepted this request.
    pub(super) fn engine_has(&mut self, id: RequestId) -> bool {
        self.guest.pending(id).is_some_and(|pending| pending.taken.is_some())
    }

    /// Starts a process with this engine.
    pub(super) fn begin(&mut self, engine: DiskEngine<Region>, fuse: Rc<Fuse>) {
        self.engine = engine;
        self.fuse = fuse;
        self.up = true;
        self.life = Life::default();
        self.number_disks();
    }

    /// Returns the ID by which the engine knows a block.
    pub(super) fn block_id(&self, (disk, block): Key) -> BlockId {
        BlockId { disk: self.index_of(disk), bno: BlockNumber(block as u64) }
    }

    /// Returns the knowledge of its engine's index.
    pub(super) fn knowledge(&self) -> Knowledge {
        let engine = &self.engine;
        let count = self.machine.sectors / BLOCK_SECTORS;
        let all = (0..self.machine.disks).flat_map(|disk| (0..count).map(move |block| (disk, block)));
        let known = |key: Key| Some((key, engine.known(self.block_id(key))?));
        let blocks = all.filter_map(known).collect();
        Knowledge { blocks, slots: engine.index().pages().collect() }
    }

    /// Returns the number by which the engine knows a server. It is a new one each time that the server is added to
    /// the list.
    pub(super) fn server_number(&self, server: usize) -> ServerNumber {
        let number = self.listings[server] * self.listings.len() + server;
        ServerNumber(u32::try_from(number).unwrap_or(u32::MAX))
    }

    pub(super) fn server(&self, number: ServerNumber) -> usize {
        number.0 as usize % self.listings.len()
    }
}

/// Makes an engine that continues from the words of a dead process. Returns `None` if they are not valid.
pub(super) fn warm_engine(
    config: &EngineConfig,
    words: Vec<u32>,
    origin: Origin<'_>,
) -> Option<(DiskEngine<Region>, Rc<Fuse>)> {
    let (region, fuse) = Region::new(words);
    DiskEngine::resume(config, region, origin).ok().map(|engine| (engine, fuse))
}

/// Makes an engine that knows nothing.
pub(super) fn cold_engine(config: &EngineConfig) -> (DiskEngine<Region>, Rc<Fuse>) {
    let (region, fuse) = Region::new(vec![0; layout(config).words()]);
    (DiskEngine::new(config, region), fuse)
}

/// Makes a disk. Most blocks have unique content, some have shared content or zeroes.
pub(super) fn new_disk(vm: usize, disk: u16, sectors: usize) -> ModelDisk {
    let name = disk.wrapping_add(16 * u16::try_from(vm).unwrap_or(0));
    ModelDisk::new((0..sectors).map(|sector| match sector / BLOCK_SECTORS % 8 {
        6 => Sector::template(0),
        7 => Sector::ZERO,
        _ => Sector::initial(name, sector),
    }))
}
