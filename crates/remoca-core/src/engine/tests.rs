//! Tests of the engine, event by event, each with the actions that must follow.
//!
//! The simulator (`remoca-sim`) drives the same engine with millions of random events; these tests say what each rule means.

mod curves;
mod drains;
mod frames;
mod hedging;
mod link;
mod modifications;
mod pages;
mod placement;
mod policy;
mod pools;
mod ramps;
mod reads;
mod resume;
mod rivals;
mod scenario;
mod streams;
mod swap;
mod tiers;

use super::*;
use crate::index::SlotCounts;
use crate::units::{BlockId, BlockNumber, ByteRange, Nanos, PAGE_SIZE, SlotIndex};

/// Number of the first pool.
const POOL: PoolIndex = PoolIndex(0);

const MS: u64 = 1_000_000;
const DISK: DiskIndex = DiskIndex(0);
const OTHER_DISK: DiskIndex = DiskIndex(1);
const SERVER: ServerNumber = ServerNumber(0);
const EIO: DiskError = DiskError(5);

fn config() -> EngineConfig {
    EngineConfig {
        disks: 2,
        key: [7; 16],
        seed: 1,
        cache: PageCount(8),
        local: PageCount(0),
        guest_memory: PageCount(64),
        pools: 16,
        has_port: true,
        frame_sample: 64,
        send_window: 64,
        fetch_limit: 64,
        slots_per_turn: 1024,
        hedge: true,
        rules: Rules::default(),
    }
}

/// Returns a page that holds `value` everywhere.
fn page(value: u8) -> Vec<u8> {
    vec![value; PAGE_SIZE]
}

fn blocks(first: u64, count: u64) -> ByteRange {
    ByteRange { offset: first * 4096, length: count * 4096 }
}

fn write(range: ByteRange) -> GuestOp {
    GuestOp::Write { range, durable: false }
}

/// Engine with a clock, and the shortcuts of a driver that is never late.
struct Bench {
    engine: DiskEngine<Vec<u32>>,
    now: Nanos,
}

impl Bench {
    fn new(config: EngineConfig) -> Self {
        let mut bench = Self { engine: DiskEngine::new(&config, vec![0; layout(&config).words()]), now: Nanos(1) };
        [DISK, OTHER_DISK].into_iter().for_each(|disk| bench.engine.describe_disk(disk, 1 << 40, false));
        bench.engine.set_servers(bench.now, &[SERVER], Leaving::AtOnce);
        bench.actions();
        bench
    }

    /// Returns a bench connected to a new pool, with the size that the configuration asks for.
    fn connected() -> Self {
        let mut bench = Self::new(config());
        bench.connect(1, 8, 0);
        bench
    }

    /// Connects to a pool that has `npages` already. A SETSIZE that follows is granted.
    fn connect(&mut self, generation: u64, npages: u32, sends_received: u64) {
        self.greet(generation, npages, sends_received);
        self.grant();
    }

    /// Handles the answer of the only server, which becomes the session's at once.
    fn greet(&mut self, generation: u64, npages: u32, sends_received: u64) {
        let offer = PoolOffer { generation, npages: PageCount(npages), available: PageCount(8), sends_received };
        self.engine.handle_answer(self.now, SERVER, Some(offer));
    }

    fn disconnect(&mut self) {
        self.engine.handle_disconnected(self.now, SERVER);
    }

    /// Answers SETSIZEs as asked, and returns all other actions.
    fn grant(&mut self) -> Vec<Action> {
        let mut others = Vec::new();
        loop {
            let actions = self.actions();
            if actions.is_empty() {
                return others;
            }
            for action in actions {
                match action {
                    Action::SetSize { server, npages } => self.engine.handle_sized(self.now, server, npages),
                    other => others.push(other),
                }
            }
        }
    }

    fn wait(&mut self, ns: u64) {
        self.now = self.now.plus_ns(ns);
    }

    /// Returns all actions that are not about connecting.
    fn actions(&mut self) -> Vec<Action> {
        let connecting = |action: &Action| matches!(action, Action::Ask(_) | Action::Use(_));
        self.all_actions().into_iter().filter(|action| !connecting(action)).collect()
    }

    fn all_actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.engine.poll_action()).collect()
    }

    fn request(&mut self, id: u32, disk: DiskIndex, op: GuestOp) -> Vec<Action> {
        self.engine.handle_request(self.now, RequestId(id), disk, op);
        self.actions()
    }

    fn read(&mut self, id: u32, range: ByteRange) -> Vec<Action> {
        self.request(id, DISK, GuestOp::Read(range))
    }

    fn disk_done(&mut self, id: u32, result: Result<(), DiskError>, data: &[u8]) -> Vec<Action> {
        self.engine.handle_disk_done(self.now, RequestId(id), result, data);
        self.actions()
    }

    /// Executes a whole request, which the disk answers.
    fn do_from_disk(&mut self, op: GuestOp, data: &[u8]) {
        let id = 99;
        assert_eq!(self.request(id, DISK, op), [disk_action(id, op)]);
        assert_eq!(self.disk_done(id, Ok(()), data).last(), Some(&complete(id)));
    }

    /// Caches block `bno`, which holds `value`: the guest reads it from the disk and evicts it. Returns its slot.
    fn cache(&mut self, bno: u64, value: u8) -> SlotIndex {
        self.do_from_disk(GuestOp::Read(blocks(bno, 1)), &page(value));
        match self.engine.handle_evicted(&page(value)) {
            Evicted::Admit(Admitted { at, .. }) => at.slot,
            other => panic!("a page that the guest just read is admitted: {other:?}"),
        }
    }

    fn known(&self, bno: u64) -> bool {
        self.engine.known(BlockId { disk: DISK, bno: BlockNumber(bno) }).is_some()
    }

    fn cached(&self, bno: u64) -> bool {
        let known = self.engine.known(BlockId { disk: DISK, bno: BlockNumber(bno) });
        known.is_some_and(|content| self.engine.index().cached(content).is_some())
    }

    fn page_comes(&mut self, fetch: FetchId, value: u8) -> PageOutcome {
        self.engine.handle_page(self.now, SERVER, fetch, &page(value))
    }

    fn timer(&mut self) -> Vec<Action> {
        self.engine.handle_timer(self.now);
        self.actions()
    }
}

fn set_size(npages: PageCount) -> Action {
    Action::SetSize { server: SERVER, npages }
}

/// Returns the place of a page in the pool of the only server.
fn admitted(slot: SlotIndex) -> Admitted {
    Admitted { at: PoolSlot { server: SERVER, slot }, demoted_to: None }
}

fn disk_action(id: u32, op: GuestOp) -> Action {
    Action::Disk { request: RequestId(id), disk: DISK, op }
}

fn complete(id: u32) -> Action {
    Action::Complete { request: RequestId(id), result: Ok(()) }
}

fn fail(id: u32) -> Action {
    Action::Complete { request: RequestId(id), result: Err(EIO) }
}

fn deliver(id: u32, offset: u32) -> PageOutcome {
    PageOutcome::Deliver { request: RequestId(id), offset }
}

fn disk_too(id: u32, range: ByteRange) -> Action {
    Action::DiskToo { request: RequestId(id), disk: DISK, op: GuestOp::Read(range) }
}

/// Returns the number of the REQUEST that is the only action.
fn only_fetch(actions: &[Action]) -> FetchId {
    match actions {
        [Action::Fetch { fetch, .. }] => *fetch,
        other => panic!("one REQUEST is expected: {other:?}"),
    }
}
