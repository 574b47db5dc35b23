//! The conditions of one run, drawn from its seed: sizes, latencies, and possible faults.
//!
//! All sizes are small on purpose: with few blocks and fewer slots, the same ones are used repeatedly.

use crate::content::BLOCK_SECTORS;
use crate::random::Random;
use serde::{Deserialize, Serialize};

/// Faults that may happen in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Faults {
    /// Connections are lost, with any part of the messages in flight.
    pub network: bool,
    /// A server stops for a while, hangs for good, is gone, or restarts empty.
    pub server: bool,
    /// The server returns wrong, old, foreign, double or no answers, and reports wrong numbers.
    pub lies: bool,
    /// The server loses single pages, and the amount of its memory changes.
    pub memory: bool,
    /// The disk fails I/O, has latency spikes, and comes back after a crash.
    pub disk: bool,
    /// The operator resizes the cache, and turns it off and on.
    pub operator: bool,
    /// VM processes are killed, upgraded and moved; whole hosts fail, or are suspended.
    pub process: bool,
}

impl Faults {
    /// Returns whether there are no faults and no interference.
    #[must_use]
    pub fn none(self) -> bool {
        self == Self::default()
    }

    /// Draws faults: none in one run of four; in the other runs, each kind with a probability of one half.
    fn draw(random: &mut Random) -> Self {
        if random.one_in(4) {
            return Self::default();
        }
        let mut coin = || random.one_in(2);
        Self {
            network: coin(),
            server: coin(),
            lies: coin(),
            memory: coin(),
            disk: coin(),
            operator: coin(),
            process: coin(),
        }
    }
}

/// One virtual machine, with the process that serves its disks.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    pub key: [u8; 16],
    /// Host it runs on at the start.
    pub host: usize,
    pub disks: u16,
    /// Number of sectors of each disk; often not a whole number of blocks.
    pub sectors: usize,
    /// Whether its disks are served by another process, which may crash and come back.
    pub remote_store: bool,
    /// Size of the cache at the start.
    pub slots: u32,
    /// Size of the local tier at the start; 0 if there is none.
    pub local: u32,
    /// Number of blocks beyond the cached ones that the engine remembers.
    pub resident: u32,
    /// Number of pages in the guest's page cache.
    pub guest_pages: usize,
    pub has_port: bool,
    /// Whether the guest reports its evictions.
    pub agent: bool,
    /// Whether freed pages of the guest keep their content; otherwise they are zeroes when they are used again.
    pub leaves_pages: bool,
    pub frame_sample: u32,
    /// Whether the guest makes swap areas.
    pub swap: bool,
    /// Whether the whole first disk is a swap area.
    pub declared_swap: bool,
    /// Maximum number of the guest's requests in flight.
    pub depth: usize,
    pub send_window: u32,
    pub fetch_limit: u32,
    /// Whether the disk is asked too as soon as the server is late.
    pub hedge: bool,
    /// Percentage of reads among the requests.
    pub reads: u64,
    /// Number of blocks at the start of the disk that most reads are for, more than the guest keeps and fewer than the
    /// cache does; 0 if all blocks are alike.
    pub working_set: usize,
    /// Whether its disks read on quickly and are slow to go back.
    pub seeks: bool,
    /// Whether buffers run out, so that a hedge's disk read starts late.
    pub starves: bool,
}

impl Machine {
    fn draw(hosts: usize, random: &mut Random) -> Self {
        let most = *random.pick(&[12, 24, 57]);
        let blocks = random.index(most) + 8;
        let tail = if random.one_in(2) { random.index(BLOCK_SECTORS) } else { 0 };
        let has_port = !random.one_in(4);
        let mut key = [0; 16];
        key[..8].copy_from_slice(&random.bits().to_le_bytes());
        Self {
            key,
            host: random.index(hosts),
            disks: if random.one_in(2) { 2 } else { 1 },
            sectors: blocks * BLOCK_SECTORS + tail,
            remote_store: random.one_in(3),
            slots: random.count(4..=32),
            local: if key[4].is_multiple_of(2) { 0 } else { u32::from(key[5] % 12) + 1 },
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
            hedge: !key[0].is_multiple_of(4),
            reads: random.between(40..=90),
            working_set: 0,
            seeks: key[6].is_multiple_of(2),
            starves: key[2].is_multiple_of(3),
        }
    }

    /// Adjusts the sizes so that the cache is useful.
    fn settle(&mut self) {
        self.working_set = 8;
        (self.slots, self.guest_pages) = (self.slots.max(24), self.guest_pages.min(4));
    }

    /// Returns the number of blocks of all disks together, partial ones included.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        u64::from(self.disks) * self.sectors.div_ceil(BLOCK_SECTORS) as u64
    }
}

/// The conditions of one run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Scenario {
    pub faults: Faults,
    pub hosts: usize,
    pub machines: Vec<Machine>,
    /// Number of messages that the network accepts before the server has read them.
    pub wire_limit: u32,
    /// Number of pages that each memory server has for all VMs together.
    pub memory: Vec<u32>,
    pub disk_ns: u64,
    pub network_ns: u64,
    /// One page in this many is slow; 0 if none is.
    pub slow_replies: u64,
    /// Extra delay of a slow page.
    pub slow_ns: u64,
    /// Approximate time between two steps of the plan.
    pub pace_ns: u64,
    /// How long the server keeps the pool of a lost client.
    pub grace_ns: u64,
}

impl Scenario {
    /// Draws the conditions.
    pub fn draw(random: &mut Random) -> Self {
        let faults = Faults::draw(random);
        let hosts = random.index(3) + 1;
        let count = *random.pick(&[1, 1, 2, 3]);
        let mut machines: Vec<_> = (0..count).map(|_| Machine::draw(hosts, random)).collect();
        let disk_ns = random.between(50_000..=8_000_000);
        let dice = machines[0].key[1];
        if machines[0].key[3].is_multiple_of(3) {
            machines.iter_mut().for_each(Machine::settle);
        }
        let servers = *random.pick(&[1, 2, 3]);
        Self {
            faults,
            hosts,
            machines,
            wire_limit: random.count(1..=64),
            memory: (0..servers).map(|_| if faults.memory { random.count(0..=48) * count } else { 1 << 20 }).collect(),
            disk_ns,
            network_ns: random.between(20_000..=1_000_000),
            slow_replies: if faults.server { [0, 1, 2, 10, 50][usize::from(dice % 5)] } else { 0 },
            slow_ns: disk_ns * u64::from(dice % 32) / 4,
            pace_ns: random.between(disk_ns / 16..=disk_ns * 2),
            grace_ns: random.between(100_000_000..=60_000_000_000),
        }
    }

    /// Returns the host of a memory server.
    #[must_use]
    pub fn host_of_server(&self, server: usize) -> usize {
        server % self.hosts.max(1)
    }
}
