//! The mean time of a read with a local tier, a remote pool and a disk (row 1.4 of the design's anchors), beside what follows from
//! the share and the time of each: h_l t_l + h_r t_r + (1 - h) t_disk.
//!
//! The times are those of three other VM processes: one whose local tier has the whole image, one whose remote pool has it, and
//! one without a cache. All of them read the same kind of image, one block at a time. The guest with both tiers has memory of
//! its own, whose oldest block it reports as evicted, so pages move between the tiers while it reads.

use super::scale::{Found, Scale};
use crate::cpus::{Cpus, pin_this_thread};
use crate::guest::{PageCache, Random, Zipf, scattered};
use crate::server::free_port;
use crate::vm::{Folder, Vm, VmOptions, memory_server, memory_server_at, pinned};
use anyhow::{Context, Result, ensure};
use remoca_lab::figures::{Figure, Spread};
use std::net::{Ipv4Addr, SocketAddrV4};

/// Delay of the disk. The shorter it is, the more the times of the cache count.
const DISK_MS: u32 = 1;
/// Size of a cache that holds the whole image.
const WHOLE: &str = "128M";
/// Reads between two batches of evicted pages.
const BATCH: usize = 64;
const EXPONENT: f64 = 0.9;
/// Shares of the image that the guest's memory, the local tier, and the remote pool hold.
const GUEST_OF: u64 = 16;
const LOCAL_OF: u64 = 4;
const REMOTE_OF: u64 = 4;

/// Measures the mean time, and what it should be.
pub fn time(scale: &Scale) -> Result<Found> {
    let (folder, cpus) = (Folder::new()?, Cpus::choose()?);
    let behind = pinned(Some(cpus.behind));
    let near = memory_server(&folder.0, &behind)?;
    let far = memory_server_at(SocketAddrV4::new(Ipv4Addr::LOCALHOST, free_port()?).into(), &behind)?;
    let tier = near.local_endpoint();
    let image_bytes = scale.image_bytes();
    let of_image = VmOptions {
        disk_ms: DISK_MS,
        image_bytes,
        inflight: true,
        processor: Some(cpus.server),
        ..VmOptions::default()
    };
    let mut disk = Vm::start(&folder.0, "disk", &of_image)?;
    let mut local = Vm::start(&folder.0, "local", &VmOptions { local: Some((&tier, WHOLE)), ..of_image })?;
    local.fill()?;
    let with_far = VmOptions { server: Some(&far.endpoint), cache: Some(WHOLE), ..of_image };
    let mut remote = Vm::start(&folder.0, "remote", &with_far)?;
    remote.fill()?;
    let [local_bytes, remote_bytes] = [LOCAL_OF, REMOTE_OF].map(|part| (image_bytes / part).to_string());
    let with_both =
        VmOptions { local: Some((&tier, &local_bytes)), cache: Some(&remote_bytes), port: true, ..with_far };
    let mut guest = Guest::new(Vm::start(&folder.0, "both", &with_both)?);
    pin_this_thread(cpus.client)?;
    // The guest's memory and both tiers are full before anything is measured.
    guest.read(usize::try_from(guest.vm.blocks())? * if scale.quick { 1 } else { 2 })?;
    let mut figures = [const { Vec::new() }; 6];
    for _ in 0..scale.rounds {
        let count = scale.count(4_000);
        let times = [
            mean_us(&local.measure(1, count * 4, |_| {})?)?,
            mean_us(&remote.measure(1, count * 4, |_| {})?)?,
            mean_us(&disk.measure(1, count, |_| {})?)?,
        ];
        let seen = guest.read(count)?;
        let shares = [seen.local, seen.remote, 1.0 - seen.local - seen.remote];
        let expected: f64 = shares.iter().zip(times).map(|(share, time)| share * time).sum();
        let values = [seen.mean_us / expected, times[0], times[1], times[2], shares[0], shares[1]];
        figures.iter_mut().zip(values).for_each(|(figure, value)| figure.push(value));
    }
    ensure!(guest.vm.counter("fetch_wrong")? == 0, "pages were wrong");
    let [ratio, others @ ..] = figures.map(Spread::of);
    let mut figure = Figure::of_rounds("A1.4", scale.rounds, ratio.context("nothing was measured")?, None);
    for (name, spread) in ["local_us", "remote_us", "disk_us", "local_share", "remote_share"].into_iter().zip(others) {
        figure = figure.beside(name, spread.context("nothing was measured")?.median);
    }
    figure = figure.beside("demotions", guest.vm.counter("demotions")? as f64);
    Ok(vec![("A1.4".into(), Ok(figure))])
}

/// What a guest has seen: the mean time of a read, and the shares of the reads that hit each tier.
struct Seen {
    mean_us: f64,
    local: f64,
    remote: f64,
}

/// A guest that reads by Zipf's law, and evicts what it has not used for the longest time.
struct Guest {
    vm: Vm,
    memory: PageCache,
    ranks: Zipf,
    random: Random,
}

impl Guest {
    fn new(vm: Vm) -> Self {
        let ranks = Zipf::new(vm.blocks(), EXPONENT);
        Self { vm, memory: PageCache::default(), ranks, random: Random(7) }
    }

    /// Reads `count` blocks that are not in the guest's memory, one after the other.
    fn read(&mut self, count: usize) -> Result<Seen> {
        let blocks = self.vm.blocks();
        let before = [self.vm.hits(true)?, self.vm.hits(false)?];
        let mut latencies = Vec::new();
        while latencies.len() < count {
            let (mut wanted, mut evicted) = (Vec::new(), Vec::new());
            while wanted.len() < BATCH {
                let block = scattered(self.ranks.rank(&mut self.random)) % blocks;
                if !self.memory.touch(block) {
                    wanted.push(block);
                    evicted.extend(self.memory.evict(usize::try_from(blocks / GUEST_OF)?));
                }
            }
            let mut next = wanted.into_iter();
            latencies.extend(self.vm.client().reads(1, || next.next())?);
            self.vm.evict_blocks(&evicted)?;
        }
        let reads = latencies.len() as f64;
        let [local, remote] = [self.vm.hits(true)? - before[0], self.vm.hits(false)? - before[1]];
        Ok(Seen { mean_us: mean_us(&latencies)?, local: local as f64 / reads, remote: remote as f64 / reads })
    }
}

fn mean_us(latencies: &[u64]) -> Result<f64> {
    ensure!(!latencies.is_empty(), "nothing was read");
    Ok(latencies.iter().sum::<u64>() as f64 / latencies.len() as f64 / 1e3)
}
