//! Hits from two and three memory servers, each behind a link of its own (row 1.5 of the design's anchors): pages per second beside
//! the sum of the links, and the time of hits when one of the servers is late.
//!
//! Where the processor of the VM process and the servers is full, the links are not what is measured: then the row has no value,
//! and says so. Slower links, which two processors can fill, stand beside.

use super::scale::{Found, Scale};
use crate::cpus::{Cpus, pin_this_thread};
use crate::delay::DelayProxy;
use crate::link::{Link, MBIT, PAGES_PER_S};
use crate::vm::{Folder, MemoryServer, ServerOptions, Vm, VmOptions, pinned};
use anyhow::{Context, Result, anyhow, ensure};
use remoca_lab::figures::{Figure, Spread};
use remoca_trace::{Batch, TraceRecord, TracedOp, TracedSource};
use std::fs::File;
use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

const PORT: u16 = 7070;
const SLOW_MS: u32 = 7;
/// Depth that fills the links.
const DEPTH: usize = 64;
/// Depth that fills slower links. With more, pages wait for so long that hedges of the disk answer first, and what is measured is not the links.
const SLOWER_DEPTH: usize = 16;
/// Depth at which a late server is looked at: the links and the processor are not full.
const LATE_DEPTH: usize = 4;
const LATE: Duration = Duration::from_millis(20);
/// Time in which the VM process has to find out that a server is late.
const NOTICED_WITHIN: Duration = Duration::from_secs(1);
/// Rate of slower links, in Mbit/s, whose sum the processors of a small machine can fill.
const SLOWER_MBIT: u32 = 200;
/// Share of idle time below which the processor counts as full.
const IDLE_MIN: f64 = 0.05;

/// Measures all of it.
pub fn figures(scale: &Scale) -> Result<Found> {
    let mut found = Vec::new();
    for (id, servers, mbit) in [("A1.5-two", 2, MBIT), ("A1.5-three", 3, MBIT), ("A1.5-slower", 3, SLOWER_MBIT)] {
        // Each is a network of its own, which a thread cannot leave.
        let scale = *scale;
        let ended = std::thread::spawn(move || share_of_links(id, &scale, servers, mbit)).join();
        found.push((id.to_owned(), ended.unwrap_or_else(|_| Err(anyhow!("the benchmark panicked")))));
    }
    let scale = *scale;
    let ended = std::thread::spawn(move || late(&scale)).join();
    found.push(("A1.5-late".to_owned(), ended.unwrap_or_else(|_| Err(anyhow!("the benchmark panicked")))));
    Ok(found)
}

/// A VM process with several memory servers, each on a host of its own.
struct Hosts {
    vm: Vm,
    proxies: Vec<DelayProxy>,
    folder: Folder,
    // They must outlive the process.
    _servers: Vec<MemoryServer>,
    _link: Link,
}

impl Hosts {
    /// Starts all of them, and fills the cache. With `proxied`, a proxy of ours is in front of the first server.
    fn start(scale: &Scale, count: u8, mbit: u32, proxied: bool, cpus: Cpus) -> Result<Self> {
        let (folder, link) = (Folder::new()?, Link::new(count, mbit)?);
        link.enter_near()?;
        // One server alone must not have room for the whole image: a small cache has one pool if one server gives it all.
        let mib_of_each = ((scale.image_bytes() >> 20) / u64::from(count) + 8).next_multiple_of(2);
        let memory = format!("{mib_of_each}M");
        let (mut servers, mut proxies, mut arguments) = (Vec::new(), Vec::new(), Vec::new());
        for host in 0..count {
            let address = SocketAddrV4::new(Link::address(host), PORT);
            let prefix = [link.far(host), pinned(Some(cpus.behind))].concat();
            let options = ServerOptions { prefix: &prefix, memory: Some(&memory), ..ServerOptions::default() };
            servers.push(MemoryServer::start_at(address.into(), &options)?);
            let endpoint = if proxied && host == 0 {
                proxies.push(DelayProxy::start("127.0.0.1:0".parse()?, address.into(), Duration::ZERO)?);
                format!("tcp:{}", proxies[0].address)
            } else {
                format!("tcp:{address}")
            };
            arguments.extend(["--server".to_owned(), endpoint]);
        }
        arguments.extend(["--trace".to_owned(), folder.0.join("trace").display().to_string()]);
        let options = VmOptions {
            disk_ms: SLOW_MS,
            image_bytes: scale.image_bytes(),
            inflight: true,
            processor: Some(cpus.server),
            cache: Some("128M"),
            arguments: &arguments,
            ..VmOptions::default()
        };
        let mut vm = Vm::start_cold(&folder.0, "vm", &options)?;
        let began = Instant::now();
        while vm.status()?.pools.iter().filter(|pool| pool.granted_bytes > 0).count() < usize::from(count) {
            ensure!(
                began.elapsed() < Duration::from_secs(20),
                "the VM process has not a pool on each of {count} servers"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        vm.fill()?;
        Ok(Self { vm, proxies, folder, _servers: servers, _link: link })
    }
}

/// Returns the number of pages that the links carry in half a second.
fn half_a_second(servers: u8, mbit: u32) -> usize {
    (PAGES_PER_S * u32::from(servers) * mbit / MBIT / 2) as usize
}

/// Measures hits over several links.
fn share_of_links(id: &str, scale: &Scale, servers: u8, mbit: u32) -> Result<Figure> {
    let cpus = Cpus::choose()?;
    let mut hosts = Hosts::start(scale, servers, mbit, false, cpus)?;
    pin_this_thread(cpus.client)?;
    let sum = f64::from(PAGES_PER_S) * f64::from(servers) * f64::from(mbit) / f64::from(MBIT);
    let count = scale.count(half_a_second(servers, mbit));
    let (mut shares, mut idles) = (Vec::new(), Vec::new());
    for _ in 0..scale.rounds {
        let (before, ticks, began) = (hosts.vm.counter("hit_blocks")?, Ticks::now(cpus.server)?, Instant::now());
        hosts.vm.measure(if mbit < MBIT { SLOWER_DEPTH } else { DEPTH }, count, |_| {})?;
        let seconds = began.elapsed().as_secs_f64();
        idles.push(Ticks::now(cpus.server)?.idle_since(&ticks));
        let hits = hosts.vm.counter("hit_blocks")? - before;
        ensure!(hits * 100 >= count as u64 * 99, "only {hits} of {count} reads were hits");
        shares.push(count as f64 / seconds / sum);
    }
    let spread = |values| Spread::of(values).context("nothing was measured");
    let (shares, idle) = (spread(shares)?, spread(idles)?.median);
    ensure!(
        shares.median >= 0.9 || idle >= IDLE_MIN,
        "the processor of the VM process and the servers is full ({:.0} % idle): {:.2} of the sum of {servers} links, {:.0} pages/s",
        idle * 100.0,
        shares.median,
        shares.median * sum
    );
    Ok(Figure::of_rounds(id, scale.rounds, shares, None)
        .beside("pages_per_s", shares.median * sum)
        .beside("idle_share", idle)
        .beside("link_mbit", f64::from(mbit)))
}

/// Measures hits while one of three servers is late, and while the same proxy delays nothing.
fn late(scale: &Scale) -> Result<Figure> {
    let cpus = Cpus::choose()?;
    let mut hosts = Hosts::start(scale, 3, MBIT, true, cpus)?;
    pin_this_thread(cpus.client)?;
    let window = Duration::from_millis(if scale.quick { 500 } else { 2_000 });
    let mut parts = Vec::new();
    for _ in 0..scale.rounds {
        for delay in [Duration::ZERO, LATE] {
            hosts.proxies[0].set_delay(delay);
            // From the delay back to none, the VM process may take its time.
            let settle = if delay.is_zero() { NOTICED_WITHIN * 3 } else { NOTICED_WITHIN };
            read_for(&mut hosts.vm, settle)?;
            let from = reads_done(&hosts.vm)?;
            read_for(&mut hosts.vm, window)?;
            parts.push((delay, from..reads_done(&hosts.vm)?));
        }
    }
    ensure!(hosts.vm.status()?.trace_lost == Some(0), "the trace lost records");
    let folder = hosts.folder;
    hosts.vm.end()?;
    let records = records(&folder.0.join("trace"))?;
    let (mut ratios, mut noise) = (Vec::new(), Vec::new());
    let mut beside = [const { Vec::new() }; 4];
    let mut former = None;
    for pair in parts.chunks_exact(2) {
        let [without, with] = [&pair[0].1, &pair[1].1].map(|part| Part::of(&records[part.clone()]));
        ratios.push(with.hit_p99_us / without.hit_p99_us);
        noise.extend(former.map(|former: f64| without.hit_p99_us / former));
        former = Some(without.hit_p99_us);
        let values = [without.hit_p99_us, with.hit_p99_us, without.share, with.share];
        beside.iter_mut().zip(values).for_each(|(all, value)| all.push(value));
    }
    let ratio = Spread::of(ratios).context("nothing was measured")?;
    let mut figure = Figure::of_rounds("A1.5-late", scale.rounds, ratio, Spread::of(noise));
    for (name, values) in ["p99_us", "p99_late_us", "hits", "hits_late"].into_iter().zip(beside) {
        figure = figure.beside(name, Spread::of(values).context("nothing was measured")?.median);
    }
    Ok(figure)
}

/// What a part of the trace shows.
pub(super) struct Part {
    pub(super) hit_p50_us: f64,
    pub(super) hit_p99_us: f64,
    /// Share of the reads that were hits.
    pub(super) share: f64,
}

impl Part {
    pub(super) fn of(records: &[TraceRecord]) -> Self {
        let mut hits: Vec<u64> = records
            .iter()
            .filter(|record| record.source == TracedSource::Cache)
            .map(|record| record.latency_ns)
            .collect();
        hits.sort_unstable();
        let us = |percent: usize| hits.get(hits.len() * percent / 100).copied().unwrap_or(u64::MAX) as f64 / 1e3;
        Self { hit_p50_us: us(50), hit_p99_us: us(99), share: hits.len() as f64 / records.len().max(1) as f64 }
    }
}

fn read_for(vm: &mut Vm, time: Duration) -> Result<()> {
    let (blocks, began) = (vm.blocks(), Instant::now());
    let mut random = crate::guest::Random(u64::from(vm.process.pid()));
    vm.client().reads(LATE_DEPTH, || (began.elapsed() < time).then(|| random.next() % blocks))?;
    Ok(())
}

/// Returns the number of reads that have completed, which is that of the records in the trace.
pub(super) fn reads_done(vm: &Vm) -> Result<usize> {
    Ok(usize::try_from(vm.status()?.disks[0].traffic.reads)?)
}

/// Returns the reads in a trace, in the order in which they completed.
pub(super) fn records(path: &std::path::Path) -> Result<Vec<TraceRecord>> {
    let mut source = remoca_trace::open(Box::new(File::open(path)?), None)?;
    let (mut batch, mut records) = (Batch::default(), Vec::new());
    while source.read(&mut batch)? {
        records.extend(batch.records.iter().filter(|record| record.op == TracedOp::Read));
    }
    Ok(records)
}

/// What one processor has done since the start of the machine, in ticks.
struct Ticks {
    idle: u64,
    all: u64,
}

impl Ticks {
    fn now(processor: usize) -> Result<Self> {
        let text = std::fs::read_to_string("/proc/stat")?;
        Self::of(&text, processor).context("/proc/stat has another form")
    }

    fn of(text: &str, processor: usize) -> Option<Self> {
        let name = format!("cpu{processor} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&name))?;
        // user, nice, system, idle, iowait, irq, softirq, steal; those of guests are in user.
        let ticks: Vec<u64> = line.split_whitespace().take(8).map_while(|word| word.parse().ok()).collect();
        Some(Self { idle: ticks.get(3)? + ticks.get(4)?, all: ticks.iter().sum() })
    }

    /// Returns the share of idle time since then.
    fn idle_since(&self, before: &Self) -> f64 {
        (self.idle - before.idle) as f64 / (self.all - before.all).max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_idle_time_is_that_of_one_processor() {
        let of = |idle: u64| {
            format!("cpu  9 9 9 9\ncpu1 1 2 3 900 5 6 7 8 0 0\ncpu11 10 20 30 {idle} 5 6 7 8 0 0\nintr 1\n")
        };
        let [before, after] = [of(400), of(430)].map(|text| Ticks::of(&text, 11).unwrap());
        assert_eq!((before.idle, after.all - before.all), (405, 30));
        assert!((after.idle_since(&before) - 1.0).abs() < 1e-9);
        assert_eq!(before.idle_since(&before), 0.0);
        assert!(Ticks::of(&of(1), 2).is_none());
    }
}
