//! Hits over one link while the pages that the guest evicts travel the other way, beside hits while nothing does.
//!
//! Two VMs read in the same way: random blocks that are not in the guest's memory. Both report each page that leaves that memory.
//! The cache of one holds the whole image, so what is evicted is cached already, and is not sent. That of the other holds what the
//! guest's memory does not hold, so each evicted page is sent. Requests, evicted pages and what TCP acknowledges share one
//! direction.

use super::links::{Part, reads_done, records};
use super::scale::{Found, Scale};
use crate::cpus::{Cpus, pin_this_thread};
use crate::guest::{PageCache, Random};
use crate::link::{Link, MBIT, PAGES_PER_S};
use crate::vm::{Folder, MemoryServer, ServerOptions, Vm, VmOptions, pinned};
use anyhow::{Context, Result, anyhow, ensure};
use remoca_lab::figures::{Figure, Spread};
use std::net::SocketAddrV4;
use std::ops::Range;
use std::time::{Duration, Instant};

const PORT: u16 = 7070;
/// Guests in the order of a round: the quiet one before and after the other one.
const ORDER: [usize; 3] = [0, 1, 0];
/// Delay of the disk, so that a read that is no hit shows.
const SLOW_MS: u32 = 20;
/// Reads in flight: hits alone fill most of the link.
const DEPTH: usize = 8;
/// Share of the image that the guest's memory holds.
const GUEST_OF: u64 = 4;
/// Slots of the smaller cache beyond what the guest's memory does not hold.
const SLACK: u64 = 256;
/// Time before each measurement, in which the link gets as full as it will be.
const SETTLE: Duration = Duration::from_millis(300);
/// Share of the reads that must be hits before anything is measured.
const WARM: f64 = 0.98;
const WARM_ROUNDS: usize = 40;
/// Share of the reads of a measurement that must be hits.
const HITS_MIN: f64 = 0.97;
/// Share of the link that evicted pages must take: otherwise nothing is shown of a full one.
const FILLED_MIN: f64 = 0.5;

/// Measures a link of 1 Gbit.
pub fn gbit(scale: &Scale) -> Result<Found> {
    Ok(vec![("A1.10-gbit".into(), hits("A1.10-gbit", scale, MBIT))])
}

/// Measures a link of 100 Mbit.
pub fn slower(scale: &Scale) -> Result<Found> {
    Ok(vec![("A1.10-100mbit".into(), hits("A1.10-100mbit", scale, MBIT / 10))])
}

/// Measures a link in a network of its own, which the thread of its group cannot leave.
fn hits(id: &str, scale: &Scale, mbit: u32) -> Result<Figure> {
    let (cpus, folder, link) = (Cpus::choose()?, Folder::new()?, Link::new(1, MBIT)?);
    link.enter_near()?;
    let address = SocketAddrV4::new(Link::address(0), PORT);
    let prefix = [link.far(0), pinned(Some(cpus.behind))].concat();
    let options = ServerOptions { prefix: &prefix, memory: Some("256M"), ..ServerOptions::default() };
    let server = MemoryServer::start_at(address.into(), &options)?;
    let blocks = scale.image_bytes() / 4096;
    let exclusive = (blocks - blocks / GUEST_OF + SLACK) * 4096;
    let mut guests = Vec::new();
    for (name, cache) in [("quiet", 2 * scale.image_bytes()), ("evicting", exclusive)] {
        let (cache, trace) = (cache.to_string(), folder.0.join(name));
        let options = VmOptions {
            disk_ms: SLOW_MS,
            image_bytes: scale.image_bytes(),
            inflight: true,
            processor: Some(cpus.server),
            server: Some(&server.endpoint),
            cache: Some(&cache),
            port: true,
            // Without hedges the disk answers no read that is late.
            arguments: &["--no-hedge".to_owned(), "--trace".to_owned(), trace.display().to_string()],
            ..VmOptions::default()
        };
        let vm = Vm::start_cold(&folder.0, &format!("{name}.vm"), &options)?;
        guests.push(Guest::new(vm, name == "quiet")?);
    }
    pin_this_thread(cpus.client)?;
    for guest in &mut guests {
        guest.warm()?;
    }
    link.set_rate(0, mbit)?;
    let window = Duration::from_millis(if scale.quick { 500 } else { 2_000 });
    let mut windows = [const { Vec::new() }; 2];
    for _ in 0..scale.rounds {
        for at in ORDER {
            guests[at].read_for(SETTLE)?;
            windows[at].push(guests[at].measure(window)?);
        }
    }
    let mut parts = Vec::new();
    for (guest, (name, windows)) in guests.into_iter().zip(["quiet", "evicting"].into_iter().zip(windows)) {
        ensure!(guest.vm.status()?.trace_lost == Some(0), "the trace lost records");
        ensure!(guest.vm.counter("fetch_wrong")? == 0, "pages were wrong");
        guest.vm.end()?;
        let records = records(&folder.0.join(name))?;
        let of_window = |window: Window| (Part::of(&records[window.reads.clone()]), window);
        let of_guest: Vec<_> = windows.into_iter().map(of_window).collect();
        for (part, window) in &of_guest {
            let reads = window.reads.len();
            ensure!(part.share >= HITS_MIN, "only {:.2} of {reads} reads of the {name} guest were hits", part.share);
        }
        parts.push(of_guest);
    }
    figure_of(id, mbit, &parts)
}

/// Reads of one measurement, and what became of what was evicted meanwhile.
struct Window {
    reads: Range<usize>,
    seconds: f64,
    sent: u64,
    dropped: u64,
}

fn figure_of(id: &str, mbit: u32, parts: &[Vec<(Part, Window)>]) -> Result<Figure> {
    let [quiet, evicting] = parts else { anyhow::bail!("there are two guests") };
    let (mut ratios, mut noise) = (Vec::new(), Vec::new());
    let mut beside: Vec<(&str, Vec<f64>)> = Vec::new();
    let mut put = |name, value| match beside.iter_mut().find(|(known, _)| *known == name) {
        Some((_, values)) => values.push(value),
        None => beside.push((name, vec![value])),
    };
    for (pair, (with, busy)) in quiet.chunks_exact(2).zip(evicting) {
        let [(without, alone), (again, _)] = pair else { anyhow::bail!("a round has two windows of the quiet guest") };
        ratios.push(with.hit_p50_us / f64::midpoint(without.hit_p50_us, again.hit_p50_us));
        noise.push(again.hit_p50_us / without.hit_p50_us);
        let [rate_without, rate_with] = [(without, alone), (with, busy)]
            .map(|(part, window)| part.share * window.reads.len() as f64 / window.seconds);
        put("p50_us", without.hit_p50_us);
        put("p50_evicting_us", with.hit_p50_us);
        put("p99_us", without.hit_p99_us);
        put("p99_evicting_us", with.hit_p99_us);
        put("p99_ratio", with.hit_p99_us / without.hit_p99_us);
        put("hits_per_s", rate_without);
        put("hits_per_s_evicting", rate_with);
        put("hits_ratio", rate_with / rate_without);
        put("hit_share", without.share);
        put("hit_share_evicting", with.share);
        put("sent_per_s", busy.sent as f64 / busy.seconds);
        put("sent_per_s_quiet", alone.sent as f64 / alone.seconds);
        put("dropped_per_s", busy.dropped as f64 / busy.seconds);
    }
    let spread = Spread::of(ratios).context("nothing was measured")?;
    let mut figure =
        Figure::of_rounds(id, evicting.len(), spread, Spread::of(noise)).beside("link_mbit", f64::from(mbit));
    for (name, values) in beside {
        let median = Spread::of(values).context("nothing was measured")?.median;
        let full = f64::from(PAGES_PER_S) * f64::from(mbit) / f64::from(MBIT);
        ensure!(
            name != "sent_per_s" || median >= FILLED_MIN * full,
            "only {median:.0} evicted pages were sent in a second, of {full:.0} that the link carries: it was not filled"
        );
        figure = figure.beside(name, median);
    }
    Ok(figure)
}

/// A guest that reads random blocks which it does not have in memory.
struct Guest {
    vm: Vm,
    /// Whether its cache has room for the whole image.
    caches_all: bool,
    memory: PageCache,
    random: Random,
}

impl Guest {
    fn new(mut vm: Vm, caches_all: bool) -> Result<Self> {
        vm.evict_unknown(1)?;
        let random = Random(u64::from(vm.process.pid()));
        Ok(Self { vm, caches_all, memory: PageCache::default(), random })
    }

    /// Reads until nearly all reads are hits.
    fn warm(&mut self) -> Result<()> {
        let all: Vec<u64> = (0..self.vm.blocks()).collect();
        self.read(4 * DEPTH, all.into_iter())?;
        if self.caches_all {
            self.vm.evict_all()?;
        }
        for _ in 0..WARM_ROUNDS {
            let (reads, hits) = (reads_done(&self.vm)?, self.vm.counter("hit_blocks")?);
            self.read_for(SETTLE)?;
            let (reads, hits) = (reads_done(&self.vm)? - reads, self.vm.counter("hit_blocks")? - hits);
            if hits as f64 >= reads as f64 * WARM {
                return Ok(());
            }
        }
        Err(anyhow!("the cache does not hold what the guest's memory does not"))
    }

    fn measure(&mut self, time: Duration) -> Result<Window> {
        let counts =
            |vm: &Vm| Ok::<_, anyhow::Error>([vm.counter("evictions_admitted")?, vm.counter("evictions_dropped")?]);
        let (from, before) = (reads_done(&self.vm)?, counts(&self.vm)?);
        let began = Instant::now();
        self.read_for(time)?;
        let seconds = began.elapsed().as_secs_f64();
        let after = counts(&self.vm)?;
        let [sent, dropped] = [after[0] - before[0], after[1] - before[1]];
        Ok(Window { reads: from..reads_done(&self.vm)?, seconds, sent, dropped })
    }

    fn read_for(&mut self, time: Duration) -> Result<()> {
        let (blocks, began) = (self.vm.blocks(), Instant::now());
        let mut random = Random(self.random.next());
        let next = std::iter::from_fn(|| (began.elapsed() < time).then(|| random.next() % blocks));
        self.read(DEPTH, next)
    }

    /// Reads those of these blocks that are not in memory, and reports what leaves it.
    fn read(&mut self, depth: usize, mut blocks: impl Iterator<Item = u64>) -> Result<()> {
        let most = usize::try_from(self.vm.blocks() / GUEST_OF)?;
        let Self { vm, memory, .. } = self;
        let (client, port) = vm.client_and_port()?;
        let mut reported = Ok(());
        client.reads(depth, || {
            let block = blocks.find(|block| !memory.touch(*block))?;
            if let (Some(old), Ok(())) = (memory.evict(most), &reported) {
                reported = port.report(old);
            }
            Some(block)
        })?;
        reported
    }
}
