//! A guest of fixed memory whose page cache is LRU, the real engine, and servers that never fail, in virtual time.

use crate::agent::Agent;
use crate::guest::PageCache;
use remoca_core::engine::{
    Action, Admitted, DiskEngine, EngineConfig, Evicted, GuestOp, Leaving, PoolOffer, RequestId, ServerNumber,
    disk_numbers, layout,
};
use remoca_core::rules::Rules;
use remoca_core::units::{ByteRange, DiskIndex, Nanos, PAGE_SIZE, PAGE_SIZE_U64, PageCount};

pub const DISK: DiskIndex = DiskIndex(0);
const LOCAL: ServerNumber = ServerNumber(0);
/// The first of the remote servers.
pub const REMOTE: ServerNumber = ServerNumber(1);
const DISK_NS: u64 = 7_000_000;
const LOCAL_NS: u64 = 2_000;
const REMOTE_NS: u64 = 200_000;
/// Time that a page of a quick disk takes.
const SEEN_PAGE_NS: u64 = 25_000;

/// Sizes of a guest and its cache.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub local: PageCount,
    pub remote: PageCount,
    pub guest: PageCount,
}

/// Returns the configuration of an engine with one disk and a port. A guest's memory is a little more than the files in it.
pub fn config(Sizes { local, remote, guest }: Sizes) -> EngineConfig {
    EngineConfig {
        disks: disk_numbers(1),
        key: [7; 16],
        seed: 1,
        cache: remote,
        local,
        guest_memory: PageCount(guest.0 + guest.0 / 8),
        has_port: true,
        frame_sample: 0,
        send_window: 64,
        fetch_limit: 64,
        slots_per_turn: 1024,
        pools: 16,
        hedge: false,
        rules: Rules::default(),
    }
}

/// Returns the content of a block: no two are equal.
pub fn page(block: u64) -> Vec<u8> {
    let mut page = vec![1; PAGE_SIZE];
    page[..8].copy_from_slice(&block.to_le_bytes());
    page
}

/// What came of some reads.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Reads that the guest's memory did not answer.
    pub reads: u64,
    pub local_hits: u64,
    pub remote_hits: u64,
    /// Pages that went to the remote pools.
    pub sent: u64,
    /// Pages that the agent took.
    pub taken: u64,
}

impl Outcome {
    /// Returns `count` as a share of the reads.
    pub fn share(self, count: u64) -> f64 {
        count as f64 / self.reads.max(1) as f64
    }

    /// Returns the share of the reads that hit.
    pub fn hits(self) -> f64 {
        self.share(self.local_hits + self.remote_hits)
    }
}

/// The guest, its engine, and the servers.
pub struct Machine {
    engine: DiskEngine<Vec<u32>>,
    now: Nanos,
    memory: PageCache,
    guest: PageCount,
    agent: Agent,
    /// What the agent takes for the time: it looks at its advice as often as where a page takes [`SEEN_PAGE_NS`].
    seen_ns: u64,
    done: Outcome,
}

impl Machine {
    /// Creates a machine whose remote memory lies in `pools` equal pools. The insertion policy adapts if `adapts`, and is LRU otherwise.
    pub fn new(sizes: Sizes, pools: u32, adapts: bool) -> Self {
        let config = config(sizes);
        let mut engine = DiskEngine::new(&config, vec![0; layout(&config).words()]);
        engine.describe_disk(DISK, 1 << 40, false);
        engine.adapt(adapts);
        let servers: Vec<_> = (0..pools).map(|pool| ServerNumber(REMOTE.0 + pool)).collect();
        engine.set_servers(Nanos(1), &servers, Leaving::AtOnce);
        let Sizes { local, remote, guest } = sizes;
        let mut this = Self {
            engine,
            now: Nanos(1),
            memory: PageCache::default(),
            guest,
            agent: Agent::new(),
            seen_ns: 0,
            done: Outcome::default(),
        };
        for server in servers {
            this.offer(server, PageCount(remote.0.div_ceil(pools)));
        }
        if local.0 > 0 {
            this.engine.set_local_server(this.now, Some(LOCAL));
            this.offer(LOCAL, local);
        }
        this
    }

    fn offer(&mut self, server: ServerNumber, available: PageCount) {
        let offer = PoolOffer { generation: 1, npages: PageCount(0), available, sends_received: 0 };
        self.engine.handle_answer(self.now, server, Some(offer));
        self.act(0);
    }

    /// Loses a server for good.
    pub fn lose(&mut self, server: ServerNumber) {
        self.engine.handle_disconnected(self.now, server);
        self.act(0);
    }

    /// Executes the engine's actions until there are none.
    fn act(&mut self, block: u64) {
        while let Some(action) = self.engine.poll_action() {
            match action {
                Action::Disk { request, .. } => {
                    self.now = self.now.plus_ns(DISK_NS);
                    self.engine.handle_disk_done(self.now, request, Ok(()), &page(block));
                }
                Action::Fetch { fetch, at } => {
                    let (hits, ns) = match at.server {
                        LOCAL => (&mut self.done.local_hits, LOCAL_NS),
                        _ => (&mut self.done.remote_hits, REMOTE_NS),
                    };
                    *hits += 1;
                    self.now = self.now.plus_ns(ns);
                    self.engine.handle_page(self.now, at.server, fetch, &page(block));
                }
                Action::SetSize { server, npages } => self.engine.handle_sized(self.now, server, npages),
                _ => {}
            }
        }
        self.engine.handle_timer(self.now);
    }

    fn read(&mut self, block: u64) {
        if self.memory.touch(block) {
            return;
        }
        self.done.reads += 1;
        let range = ByteRange { offset: block * PAGE_SIZE_U64, length: PAGE_SIZE_U64 };
        self.engine.handle_request(self.now, RequestId(0), DISK, GuestOp::Read(range));
        self.act(block);
        self.seen_ns += SEEN_PAGE_NS;
        let Some(old) = self.memory.evict(self.guest.0 as usize) else { return };
        if !self.agent.takes(self.seen_ns, &mut self.engine, old) {
            return;
        }
        self.done.taken += 1;
        if let Evicted::Admit(Admitted { at, demoted_to }) = self.engine.handle_evicted(&page(old)) {
            for place in [Some(at), demoted_to].into_iter().flatten() {
                self.done.sent += u64::from(place.server != LOCAL);
                self.engine.handle_sent(place.server, 1);
            }
        }
    }

    /// Reads all blocks, and returns what came of them.
    pub fn run(&mut self, reads: impl IntoIterator<Item = u64>) -> Outcome {
        self.done = Outcome::default();
        reads.into_iter().for_each(|block| self.read(block));
        self.done
    }
}
