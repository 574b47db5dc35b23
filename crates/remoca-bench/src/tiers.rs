//! Tiers and pools on traces of reads (rows 1.3, 1.6 and 1.7 of the design's anchors): the real engine with a guest of fixed memory, in
//! virtual time. A local tier and a remote pool are compared with one exact exclusive LRU queue over both; several remote pools, of
//! which one is lost, with the same pools without a loss.

use crate::curve::Stack;
use crate::guest::PageCache;
use crate::policy::{page, traces};
use crate::vm::save_figures;
use crate::wanted;
use anyhow::Result;
use clap::Args;
use remoca_core::engine::{
    Action, Admitted, DiskEngine, EngineConfig, Evicted, GuestOp, Leaving, PoolOffer, RequestId, ServerNumber,
    disk_numbers, layout,
};
use remoca_core::rules::Rules;
use remoca_core::units::{ByteRange, DiskIndex, Nanos, PAGE_SIZE_U64, PageCount};
use remoca_lab::figures::Figure;

const USUAL: TiersBenchArgs = TiersBenchArgs { local: 4096, remote: 12288, guest: 4096 };

#[derive(Args, Clone, Copy)]
pub struct TiersBenchArgs {
    /// Size of the local tier, in pages
    #[arg(long, default_value_t = USUAL.local)]
    local: u32,
    /// Size of the remote pool, in pages
    #[arg(long, default_value_t = USUAL.remote)]
    remote: u32,
    /// Memory of the guest, in pages
    #[arg(long, default_value_t = USUAL.guest)]
    guest: u32,
}

const DISK: DiskIndex = DiskIndex(0);
const LOCAL: ServerNumber = ServerNumber(0);
const REMOTE: ServerNumber = ServerNumber(1);
/// Number of remote pools of which one is lost.
const POOLS: u32 = 4;
const DISK_NS: u64 = 7_000_000;

/// What came of the reads of one trace.
#[derive(Clone, Copy, Debug, Default)]
struct Outcome {
    /// Reads that the guest's memory did not answer.
    reads: u64,
    local_hits: u64,
    remote_hits: u64,
    /// Pages that went to the remote pool.
    sent: u64,
}

impl Outcome {
    fn share(self, count: u64) -> f64 {
        count as f64 / self.reads.max(1) as f64
    }

    fn hits(self) -> f64 {
        self.share(self.local_hits + self.remote_hits)
    }
}

/// A guest, its engine, and both servers.
struct Machine {
    engine: DiskEngine<Vec<u32>>,
    now: Nanos,
    memory: PageCache,
    guest_pages: usize,
    done: Outcome,
}

impl Machine {
    fn new(args: TiersBenchArgs, pools: u32) -> Self {
        let (local, remote) = (PageCount(args.local), PageCount(args.remote));
        let servers: Vec<_> = (0..pools).map(|pool| ServerNumber(REMOTE.0 + pool)).collect();
        let config = EngineConfig {
            disks: disk_numbers(1),
            key: [7; 16],
            seed: 1,
            cache: remote,
            local,
            guest_memory: PageCount(args.guest),
            has_port: true,
            frame_sample: 0,
            send_window: 64,
            fetch_limit: 64,
            slots_per_turn: 1024,
            pools: 16,
            hedge: false,
            rules: Rules::default(),
        };
        let mut engine = DiskEngine::new(&config, vec![0; layout(&config).words()]);
        engine.describe_disk(DISK, 1 << 40, false);
        // Exact LRU is what it is compared with.
        engine.adapt(false);
        engine.set_local_server(Nanos(1), Some(LOCAL));
        engine.set_servers(Nanos(1), &servers, Leaving::AtOnce);
        let (memory, guest_pages) = (PageCache::default(), args.guest as usize);
        let mut this = Self { engine, now: Nanos(1), memory, guest_pages, done: Outcome::default() };
        let part = PageCount(args.remote.div_ceil(pools));
        let offers = servers
            .into_iter()
            .map(|server| (server, part))
            .chain([(LOCAL, local)].into_iter().filter(|_| local.0 > 0));
        for (server, available) in offers {
            let offer = PoolOffer { generation: 1, npages: PageCount(0), available, sends_received: 0 };
            this.engine.handle_answer(this.now, server, Some(offer));
            this.act(0);
        }
        this
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
                    let is_local = at.server == LOCAL;
                    self.now = self.now.plus_ns(if is_local { 2_000 } else { 200_000 });
                    *(if is_local { &mut self.done.local_hits } else { &mut self.done.remote_hits }) += 1;
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
        if let Some(old) = self.memory.evict(self.guest_pages)
            && let Evicted::Admit(Admitted { at, demoted_to }) = self.engine.handle_evicted(&page(old))
        {
            for place in [Some(at), demoted_to].into_iter().flatten() {
                self.done.sent += u64::from(place.server != LOCAL);
                self.engine.handle_sent(place.server, 1);
            }
        }
    }
}

/// Returns what one exact queue comes to: blocks that were evicted, newest first, of which a read takes its block out.
fn exact(args: TiersBenchArgs, reads: &[u64]) -> Outcome {
    let (mut memory, mut queue, mut done) = (PageCache::default(), Stack::new(reads.len()), Outcome::default());
    let (local, all) = (args.local, args.local + args.remote);
    for block in reads {
        if memory.touch(*block) {
            continue;
        }
        done.reads += 1;
        match queue.take(*block) {
            Some([above, _]) if above <= local => done.local_hits += 1,
            // What came from afar has travelled there before.
            Some([above, _]) if above <= all => done.remote_hits += 1,
            _ => {}
        }
        if let Some(old) = memory.evict(args.guest as usize) {
            queue.put(old, 0);
        }
    }
    done
}

/// Runs the benchmark and prints its table.
///
/// # Errors
/// If the figures cannot be written.
pub fn run(args: &TiersBenchArgs) -> Result<()> {
    let figures = figures_of(*args, true);
    print!("{}", wanted::table_of(&figures));
    save_figures("tiers", &figures, &())
}

/// Measures the figures that have a target, in the usual size. In virtual time they are the same in every run.
pub fn figures() -> Vec<Figure> {
    figures_of(USUAL, false)
}

fn figures_of(args: TiersBenchArgs, prints: bool) -> Vec<Figure> {
    if prints {
        println!(
            "{} pages of local tier, {} of remote pool, {} of guest memory; shares of the reads",
            args.local, args.remote, args.guest
        );
        println!("{:38}{:>10}{:>10}{:>10}{:>10}{:>8}", "trace", "hits", "exact", "local", "exact", "sent");
    }
    let (mut total, mut local, mut travel) = (0_f64, 0_f64, 0_f64);
    for (name, reads) in traces(u64::from(args.local + args.remote)) {
        let (ideal, mut machine) = (exact(args, &reads), Machine::new(args, 1));
        reads.iter().for_each(|block| machine.read(*block));
        let done = machine.done;
        let (near, ideal_near) = (done.share(done.local_hits), ideal.share(ideal.local_hits));
        total = total.max((done.hits() - ideal.hits()).abs() * 100.0);
        local = local.max((near - ideal_near).abs() * 100.0);
        // Each page that leaves the local tier unread travels once: each eviction, but those that are read again from there.
        let leaves = (done.reads - done.local_hits).max(1);
        travel = travel.max(done.sent as f64 / leaves as f64);
        if prints {
            let [hits, ideal_hits, sent] = [done.hits(), ideal.hits(), done.share(done.sent)];
            println!("{name:38}{hits:>10.4}{ideal_hits:>10.4}{near:>10.4}{ideal_near:>10.4}{sent:>8.3}");
        }
    }
    vec![
        Figure::single("A1.3-total", total),
        Figure::single("A1.3-local", local),
        Figure::single("A1.6", loss(args)),
        Figure::single("A1.7", travel),
    ]
}

/// Returns the share of the hits that is lost beyond that of the lost pool, when one of [`POOLS`] equal pools is lost for good and
/// nobody has more memory: the worst trace, over as many reads as the cache has pages.
fn loss(args: TiersBenchArgs) -> f64 {
    let args = TiersBenchArgs { local: 0, remote: args.local + args.remote, ..args };
    let cache = args.remote as usize;
    let mut worst = f64::NEG_INFINITY;
    for (_, reads) in traces(u64::from(args.remote)) {
        let window = reads.len() / 2..reads.len() / 2 + cache;
        let hits = [false, true].map(|is_lost| {
            let mut machine = Machine::new(args, POOLS);
            reads[..window.start].iter().for_each(|block| machine.read(*block));
            if is_lost {
                machine.engine.handle_disconnected(machine.now, REMOTE);
                machine.act(0);
            }
            let before = machine.done.remote_hits;
            reads[window.clone()].iter().for_each(|block| machine.read(*block));
            machine.done.remote_hits - before
        });
        // Where hardly anything hits, there is nothing to lose.
        if hits[0] * 20 > window.len() as u64 {
            let lost = 1.0 - hits[1] as f64 / hits[0] as f64;
            worst = worst.max(lost - 1.0 / f64::from(POOLS));
        }
    }
    worst
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tiers_are_one_lru_queue_on_every_trace() {
        let args = TiersBenchArgs { local: 300, remote: 900, guest: 200 };
        let figures = figures_of(args, false);
        for (figure, most) in figures.iter().zip([0.5, 1.0, 0.02, 1.0]) {
            assert!(figure.value <= most, "{}: {}", figure.id, figure.value);
        }
    }
}
