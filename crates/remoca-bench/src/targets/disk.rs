//! Targets of the disk as a guest sees it: a polling client without a VM, beside qemu-storage-daemon or a raw fetch (P9 to P13,
//! P18).
//!
//! Everything but nbdkit is pinned. The guest has a processor of its own. With two processors, the VM process and the memory
//! server share the other one; then the client and the server of a raw fetch share it as well. This thread moves to the guest's
//! processor when all programs run, because they would inherit that.

use super::scale::{Found, Scale};
use crate::cpus::{Cpus, pin_this_thread};
use crate::link::{Link, MBIT, PAGES_PER_S};
use crate::rounds::{Rounds, Side};
use crate::server::{RawFetch, free_port};
use crate::vm::peer::{Peer, PeerOptions};
use crate::vm::{Client, Folder, MemoryServer, Vm, VmOptions, memory_server, memory_server_at, pinned};
use anyhow::{Context, Result, ensure};
use remoca_lab::figures::{Figure, Spread};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Instant;

/// Delay of the slow disk.
const SLOW_MS: u32 = 7;
/// Size of a cache that holds the whole image.
const CACHE: &str = "128M";
const FAR_PORT: u16 = 7070;
const FAR_RAW_PORT: u16 = 7071;

/// Measures local hits beside qemu-storage-daemon on a disk in memory.
pub fn local(scale: &Scale) -> Result<Found> {
    let (folder, memory, cpus) = (Folder::new()?, Folder::in_memory()?, Cpus::choose()?);
    let server = memory_server(&folder.0, &pinned(Some(cpus.behind)))?;
    let tier = server.local_endpoint();
    let mut vm = start(&folder, "vm", cpus, scale, &VmOptions { local: Some((&tier, CACHE)), ..slow() })?;
    vm.fill()?;
    let options = PeerOptions {
        image_bytes: scale.image_bytes(),
        processor: Some(cpus.server),
        polls: true,
        ..PeerOptions::default()
    };
    let mut peer = Peer::start(&memory.0, "peer", &options)?;
    pin_this_thread(cpus.client)?;
    let mut times = |depth, count| {
        Rounds::take(scale.rounds, |side| match side {
            Side::Ours => hits_us(&mut vm, depth, scale.count(count)),
            Side::Theirs | Side::TheirsAgain => reads_us(&mut peer.client, depth, scale.count(count)),
        })
    };
    let alone = times(1, 40_000)?.figure_with("P9-d1", "hit_us", "peer_us");
    let many = times(32, 200_000)?.inverse().figure_with("P9-d32", "hits_per_us", "peer_per_us");
    Ok(vec![("P9-d1".into(), alone), ("P9-d32".into(), many)])
}

/// Measures remote hits over loopback TCP beside raw fetches, and beside a slow disk.
pub fn remote(scale: &Scale) -> Result<Found> {
    let (folder, cpus) = (Folder::new()?, Cpus::choose()?);
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, free_port()?);
    let server = memory_server_at(address.into(), &pinned(Some(cpus.behind)))?;
    let options = VmOptions { server: Some(&server.endpoint), ..slow() };
    let mut vm = start(&folder, "vm", cpus, scale, &options)?;
    vm.fill()?;
    let mut raw = RawFetch::start(u32::try_from(scale.image_bytes() / 4096)?)?;
    raw.pin(cpus.behind)?;
    let mut plain = start(&folder, "plain", cpus, scale, &slow())?;
    pin_this_thread(cpus.client)?;
    let mut seed = 0;
    let mut times = |depth, count| {
        Rounds::take(scale.rounds, |side| match side {
            Side::Ours => hits_us(&mut vm, depth, scale.count(count)),
            Side::Theirs | Side::TheirsAgain => {
                seed += 1;
                // It takes the place of the VM process.
                pin_this_thread(cpus.server)?;
                let fetched = raw.get(depth, scale.slice(), seed);
                pin_this_thread(cpus.client)?;
                Ok(fetched?.us_each())
            }
        })
    };
    let alone = times(1, 20_000)?.figure_with("P10-d1", "hit_us", "raw_us");
    let many = times(32, 100_000)?.inverse().figure_with("P10-d32", "hits_per_us", "raw_per_us");
    let slow = slow_disk(scale, &mut plain, &mut vm);
    Ok(vec![("P10-d1".into(), alone), ("P10-d32".into(), many), ("P13".into(), slow)])
}

/// Measures reads of the slow disk beside hits.
fn slow_disk(scale: &Scale, plain: &mut Vm, vm: &mut Vm) -> Result<Figure> {
    let times = Rounds::take(scale.rounds, |side| match side {
        Side::Ours => reads_us(plain.client(), 1, scale.count(100)),
        Side::Theirs | Side::TheirsAgain => hits_us(vm, 1, scale.count(5_000)),
    })?;
    times.figure_with("P13", "disk_us", "hit_us")
}

/// Measures the way of a miss beside qemu-storage-daemon: CPU on a file with direct I/O, time on the slow disk.
pub fn miss(scale: &Scale) -> Result<Found> {
    Ok(vec![("P11-cpu".into(), miss_cpu(scale)), ("P11-latency".into(), miss_latency(scale))])
}

fn miss_cpu(scale: &Scale) -> Result<Figure> {
    let (folder, cpus) = (Folder::new()?, Cpus::choose()?);
    // Without memory for its cache the VM process would not hash what it reads.
    let server = memory_server(&folder.0, &pinned(Some(cpus.behind)))?;
    let options = VmOptions { server: Some(&server.endpoint), port: true, ..VmOptions::default() };
    let mut vm = start(&folder, "vm", cpus, scale, &options)?;
    let image_bytes = scale.image_bytes();
    // The time that its thread polls without any request would count as well.
    let options = PeerOptions {
        image_bytes,
        processor: Some(cpus.server),
        polls: false,
        is_direct: true,
        ..PeerOptions::default()
    };
    let mut peer = Peer::start(&folder.0, "peer", &options)?;
    pin_this_thread(cpus.client)?;
    let mut times = |depth| {
        let count = scale.count(200_000);
        Rounds::take(scale.rounds, |side| {
            vm.evict_unknown(count / 4)?;
            let (process, client) = match side {
                Side::Ours => vm.parts(),
                Side::Theirs | Side::TheirsAgain => (&peer.process, &mut peer.client),
            };
            let before = process.cpu_time()?;
            client.measure(depth, count, |_| {})?;
            Ok((process.cpu_time()? - before).as_secs_f64() * 1e6 / f64::from(u32::try_from(count)?))
        })
    };
    let (few, many) = (times(8)?, times(32)?);
    let status = vm.status()?;
    ensure!(vm.counter("hit_blocks")? == 0, "blocks were cached, so not all reads were misses");
    ensure!(status.memory.known_blocks > 0, "the VM process learnt no block, so it hashed none");
    let figure = many.figure_with("P11-cpu", "miss_cpu_us", "peer_cpu_us")?;
    Ok(figure.beside("ratio_at_depth_8", few.figure("P11-cpu")?.value))
}

fn miss_latency(scale: &Scale) -> Result<Figure> {
    let (folder, cpus) = (Folder::new()?, Cpus::choose()?);
    let mut vm = start(&folder, "vm", cpus, scale, &slow())?;
    let image_bytes = scale.image_bytes();
    let options = PeerOptions {
        disk_ms: SLOW_MS,
        image_bytes,
        processor: Some(cpus.server),
        polls: true,
        ..PeerOptions::default()
    };
    let mut peer = Peer::start(&folder.0, "peer", &options)?;
    pin_this_thread(cpus.client)?;
    let times = Rounds::take(scale.rounds, |side| match side {
        Side::Ours => reads_us(vm.client(), 1, scale.count(100)),
        Side::Theirs | Side::TheirsAgain => reads_us(&mut peer.client, 1, scale.count(100)),
    })?;
    times.figure_with("P11-latency", "miss_us", "peer_us")
}

/// Measures hits over a link of 1 Gbit, with raw fetches over the same link beside them.
pub fn link(scale: &Scale) -> Result<Found> {
    let (folder, cpus, link) = (Folder::new()?, Cpus::choose()?, Link::new(1, MBIT)?);
    link.enter_near()?;
    let far = [link.far(0), pinned(Some(cpus.behind))].concat();
    let server = memory_server_at(SocketAddrV4::new(Link::address(0), FAR_PORT).into(), &far)?;
    let options = VmOptions { server: Some(&server.endpoint), ..slow() };
    let mut vm = start(&folder, "vm", cpus, scale, &options)?;
    vm.fill()?;
    let pages = u32::try_from(scale.image_bytes() / 4096)?;
    let mut raw = RawFetch::start_at(SocketAddrV4::new(Link::address(0), FAR_RAW_PORT), &link.far(0), pages)?;
    raw.pin(cpus.behind)?;
    pin_this_thread(cpus.client)?;
    let mut seed = 0;
    let times = Rounds::take(scale.rounds, |side| match side {
        Side::Ours => hits_us(&mut vm, 32, scale.count(20_000)),
        Side::Theirs | Side::TheirsAgain => {
            seed += 1;
            Ok(raw.get(32, scale.slice(), seed)?.us_each())
        }
    })?;
    let (hits, of_raw) = times.each();
    let share = |us: &f64| 1e6 / us / f64::from(PAGES_PER_S);
    let spread = |values: &[f64]| Spread::of(values.iter().map(share).collect()).context("nothing was measured");
    let figure = Figure::of_rounds("P12", scale.rounds, spread(&hits)?, times.inverse().noise())
        .beside("raw_over_29000", spread(&of_raw)?.median)
        .beside("hits_over_raw", times.inverse().figure("P12")?.value);
    Ok(vec![("P12".into(), Ok(figure))])
}

/// Measures what a fetch from a mapped pool takes beside one over its Unix socket: the time of a hit, less that of a block that
/// is known to be zero, for which nothing is fetched.
pub fn mapped(scale: &Scale) -> Result<Found> {
    let cpus = Cpus::choose()?;
    let mut ours = OneHost::start(scale, cpus, true)?;
    let mut theirs = OneHost::start(scale, cpus, false)?;
    pin_this_thread(cpus.client)?;
    let count = scale.count(40_000);
    let (mut mapped_us, mut socket_us) = (Vec::new(), Vec::new());
    let times = Rounds::take(scale.rounds, |side| {
        let host = match side {
            Side::Ours => &mut ours,
            Side::Theirs | Side::TheirsAgain => &mut theirs,
        };
        let before = host.server.process.cpu_time()?;
        let hit_us = hits_us(&mut host.vm, 1, count)?;
        let between = host.server.process.cpu_time()?;
        let zero_us = host.zeroes_us(count)?;
        let spent = [between - before, host.server.process.cpu_time()? - between];
        let [in_hits, in_zeroes] = spent.map(|spent| spent.as_secs_f64() * 1e6 / count as f64);
        let of_side = if side == Side::Ours { &mut mapped_us } else { &mut socket_us };
        // What the server does once a second is in both, and is no CPU of a fetch.
        of_side.push((in_hits - in_zeroes * hit_us / zero_us).max(0.0));
        Ok(hit_us - zero_us)
    })?;
    let cpu = |us: Vec<f64>| {
        let spread = Spread::of(us.iter().map(|us| (us * 100.0).round() / 100.0).collect());
        spread.context("nothing was measured")
    };
    let figure = Figure::of_rounds("P18-cpu", scale.rounds, cpu(mapped_us)?, None);
    let figure = figure.beside("socket_us", cpu(socket_us)?.median);
    Ok(vec![("P18-time".into(), fetch_times(&times)), ("P18-cpu".into(), Ok(figure))])
}

/// Returns the figure of fetches by their times, each of which is a difference.
///
/// # Errors
/// If one side took no time: on a busy machine the difference is lost in the noise, and a ratio below 0 would reach any target.
fn fetch_times(times: &Rounds) -> Result<Figure> {
    let (ours, theirs) = times.each();
    let is_positive = |us: Vec<f64>| Spread::of(us).is_some_and(|spread| spread.median > 0.0);
    ensure!(
        is_positive(ours) && is_positive(theirs),
        "a hit took no longer than a read of a zero block: the machine is too busy to tell what a fetch takes"
    );
    times.figure_with("P18-time", "mapped_fetch_us", "socket_fetch_us")
}

/// A VM process and a memory server on its host.
struct OneHost {
    vm: Vm,
    server: MemoryServer,
    // The others have their files in it.
    _folder: Folder,
}

/// Bytes of zeroes behind the content of its disk.
const ZERO_BYTES: u64 = 1 << 20;

impl OneHost {
    /// Starts both. The VM process has its pool as a local tier, or else reaches it by the Unix socket.
    fn start(scale: &Scale, cpus: Cpus, is_mapped: bool) -> Result<Self> {
        let folder = Folder::new()?;
        let server = memory_server(&folder.0, &pinned(Some(cpus.behind)))?;
        let tier = server.local_endpoint();
        let options = VmOptions {
            server: (!is_mapped).then_some(&server.endpoint),
            local: is_mapped.then_some((&tier, CACHE)),
            zero_bytes: ZERO_BYTES,
            ..slow()
        };
        let mut vm = start(&folder, "vm", cpus, scale, &options)?;
        vm.fill()?;
        let mut this = Self { vm, server, _folder: folder };
        // The first read of each learns that it is zero.
        this.zeroes_us(usize::try_from(ZERO_BYTES / 4096)?)?;
        Ok(this)
    }

    /// Returns the mean time of a read of a zero block, in microseconds.
    fn zeroes_us(&mut self, count: usize) -> Result<f64> {
        let (blocks, mut number) = (self.vm.blocks(), 0);
        let began = Instant::now();
        let read = self.vm.client().reads(1, || {
            let block = blocks + number % (ZERO_BYTES / 4096);
            number += 1;
            (number <= count as u64).then_some(block)
        })?;
        us_each(began, read.len())
    }
}

/// Returns the options of a VM process with a slow disk.
fn slow<'a>() -> VmOptions<'a> {
    VmOptions { disk_ms: SLOW_MS, ..VmOptions::default() }
}

/// Starts a VM process on the server's processor.
fn start(folder: &Folder, name: &str, cpus: Cpus, scale: &Scale, options: &VmOptions<'_>) -> Result<Vm> {
    let polling = scale.poll_max_us.map(|us| format!("--poll-max-us={us}"));
    let arguments: Vec<String> = options.arguments.iter().cloned().chain(polling).collect();
    let options = VmOptions {
        inflight: true,
        cache: Some(CACHE),
        processor: Some(cpus.server),
        image_bytes: scale.image_bytes(),
        arguments: &arguments,
        ..*options
    };
    Vm::start(&folder.0, name, &options)
}

/// Returns the mean time of a read, in microseconds. All reads must be hits, but one in a hundred.
fn hits_us(vm: &mut Vm, depth: usize, count: usize) -> Result<f64> {
    let before = vm.counter("hit_blocks")?;
    let us = reads_us(vm.client(), depth, count)?;
    let hits = vm.counter("hit_blocks")? - before;
    ensure!(hits * 100 >= count as u64 * 99, "only {hits} of {count} reads were hits: the figure is not that of a hit");
    Ok(us)
}

/// Returns the mean time from one read to the next, in microseconds.
fn reads_us(client: &mut Client, depth: usize, count: usize) -> Result<f64> {
    let began = Instant::now();
    let read = client.measure(depth, count, |_| {})?;
    us_each(began, read.len())
}

fn us_each(began: Instant, count: usize) -> Result<f64> {
    ensure!(count > 0, "nothing was read");
    Ok(began.elapsed().as_secs_f64() * 1e6 / f64::from(u32::try_from(count)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fetch_that_took_no_time_has_no_figure() {
        let of = |ours, theirs| {
            fetch_times(&Rounds::take(3, |side| Ok(if side == Side::Ours { ours } else { theirs })).unwrap())
        };
        assert_eq!(of(1.0, 40.0).unwrap().value, 0.025);
        assert!(of(-1.0, 40.0).is_err() && of(1.0, -40.0).is_err() && of(0.0, 40.0).is_err());
    }
}
