//! The conditions of one run, drawn from its seed: sizes, latencies, and what may go wrong.
//!
//! Everything is small on purpose: few blocks and fewer slots make the same ones meet again and again.

use crate::content::BLOCK_SECTORS;
use crate::random::Random;

/// What may go wrong in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Connections are lost, with any part of what was on the way.
    pub network: bool,
    /// A server stops for a while, hangs for good, is gone, or starts anew with nothing.
    pub server: bool,
    /// The server gives wrong, old, foreign, double or no answers, and says wrong numbers.
    pub lies: bool,
    /// The server loses single pages, and has more or less memory to give.
    pub memory: bool,
    /// The disk fails I/O, has latency spikes, and comes back after a crash.
    pub disk: bool,
    /// The operator resizes the cache, turns it off and on.
    pub operator: bool,
}

impl Faults {
    /// Whether nothing goes wrong and nobody interferes.
    #[must_use]
    pub fn none(self) -> bool {
        self == Self::default()
    }

    /// One run in four without faults; each kind in every second of the others.
    fn draw(random: &mut Random) -> Self {
        if random.one_in(4) {
            return Self::default();
        }
        let mut coin = || random.one_in(2);
        Self { network: coin(), server: coin(), lies: coin(), memory: coin(), disk: coin(), operator: coin() }
    }
}

/// The conditions of one run.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub faults: Faults,
    pub key: [u8; 16],
    pub disks: u16,
    /// Sectors of each disk; often no whole number of blocks.
    pub sectors: usize,
    /// Size of the cache at the start.
    pub slots: u32,
    /// Blocks beyond the cached ones that the engine remembers.
    pub resident: u32,
    /// Pages in the guest's page cache.
    pub guest_pages: usize,
    pub has_port: bool,
    /// The guest reports what it evicts.
    pub agent: bool,
    /// Freed pages of the guest stay as they were; else they are zeroes when they are used again.
    pub leaves_pages: bool,
    pub frame_sample: u32,
    /// The guest makes swap areas.
    pub swap: bool,
    /// All of the first disk is one.
    pub declared_swap: bool,
    /// Requests the guest has under way at most.
    pub depth: usize,
    pub send_window: u32,
    pub fetch_limit: u32,
    /// Messages the network takes before the server has read them.
    pub wire_limit: u32,
    /// Pages each memory server has for this VM.
    pub memory: Vec<u32>,
    pub disk_ns: u64,
    pub network_ns: u64,
    /// Percentage of reads among the requests.
    pub reads: u64,
    /// Time between two steps of the plan, about.
    pub pace_ns: u64,
    /// The server keeps the pool of a lost client for so long.
    pub grace_ns: u64,
}

impl Scenario {
    /// The conditions that `random` gives.
    pub fn draw(random: &mut Random) -> Self {
        let faults = Faults::draw(random);
        let most = *random.pick(&[12, 24, 57]);
        let blocks = random.index(most) + 8;
        let tail = if random.one_in(2) { random.index(BLOCK_SECTORS) } else { 0 };
        let slots = random.count(4..=32);
        let disk_ns = random.between(50_000..=8_000_000);
        let network_ns = random.between(20_000..=1_000_000);
        let has_port = !random.one_in(4);
        let servers = *random.pick(&[1, 2, 3]);
        let mut key = [0; 16];
        key[..8].copy_from_slice(&random.bits().to_le_bytes());
        Self {
            faults,
            key,
            disks: if random.one_in(2) { 2 } else { 1 },
            sectors: blocks * BLOCK_SECTORS + tail,
            slots,
            resident: random.count(16..=160),
            guest_pages: random.index(60) + 4,
            has_port,
            agent: has_port && !random.one_in(6),
            leaves_pages: random.one_in(2),
            frame_sample: random.count(1..=2),
            swap: random.one_in(2),
            declared_swap: random.one_in(8),
            depth: random.index(12) + 1,
            send_window: random.count(1..=16),
            fetch_limit: random.count(1..=16),
            wire_limit: random.count(1..=64),
            memory: (0..servers).map(|_| if faults.memory { random.count(0..=48) } else { 1 << 20 }).collect(),
            disk_ns,
            network_ns,
            reads: random.between(40..=90),
            pace_ns: random.between(disk_ns / 16..=disk_ns * 2),
            grace_ns: random.between(100_000_000..=60_000_000_000),
        }
    }

    /// Blocks of all disks together, cut-off ones included.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        u64::from(self.disks) * self.sectors.div_ceil(BLOCK_SECTORS) as u64
    }
}
