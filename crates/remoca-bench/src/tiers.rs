//! Tiers and pools on traces of reads (rows 1.3, 1.6 and 1.7 of the design's anchors): the real engine with a guest of fixed memory, in
//! virtual time. A local tier and a remote pool are compared with one exact exclusive LRU queue over both; several remote pools, of
//! which one is lost, with the same pools without a loss.

use crate::curve::Stack;
use crate::guest::PageCache;
use crate::machine::{Machine, Outcome, REMOTE, Sizes};
use crate::policy::traces;
use crate::vm::save_figures;
use crate::wanted;
use anyhow::Result;
use clap::Args;
use remoca_core::units::PageCount;
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

/// Number of remote pools of which one is lost.
const POOLS: u32 = 4;

/// Creates a machine whose policy is LRU, which is what it is compared with.
fn machine(args: TiersBenchArgs, pools: u32) -> Machine {
    let [local, remote, guest] = [args.local, args.remote, args.guest].map(PageCount);
    Machine::new(Sizes { local, remote, guest }, pools, false)
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
            "{} pages of local tier, {} of remote pool, {} of guest memory; shares of the reads. Pages sent and on the \
             network, and on the network with all of it remote",
            args.local, args.remote, args.guest
        );
        let columns = ["hits", "exact", "local", "exact", "sent", "network", "alone"];
        println!("{:38}{}", "trace", columns.map(|column| format!("{column:>9}")).concat());
    }
    let (mut total, mut local, mut travel) = (0_f64, 0_f64, 0_f64);
    for (name, reads) in traces(u64::from(args.local + args.remote)) {
        let ideal = exact(args, &reads);
        let done = machine(args, 1).run(reads.iter().copied());
        let (near, ideal_near) = (done.share(done.local_hits), ideal.share(ideal.local_hits));
        total = total.max((done.hits() - ideal.hits()).abs() * 100.0);
        local = local.max((near - ideal_near).abs() * 100.0);
        // Each page that leaves the local tier unread travels once: each eviction, but those that are read again from there.
        let leaves = (done.reads - done.local_hits).max(1);
        travel = travel.max(done.sent as f64 / leaves as f64);
        if prints {
            // What would be on the network if the remote pool were all of the cache.
            let all = TiersBenchArgs { local: 0, remote: args.local + args.remote, ..args };
            let [network, alone] =
                [done, machine(all, 1).run(reads)].map(|done| done.share(done.sent + done.remote_hits));
            let shares = [done.hits(), ideal.hits(), near, ideal_near, done.share(done.sent), network, alone];
            println!("{name:38}{}", shares.map(|share| format!("{share:>9.4}")).concat());
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
            let mut machine = machine(args, POOLS);
            machine.run(reads[..window.start].iter().copied());
            if is_lost {
                machine.lose(REMOTE);
            }
            machine.run(reads[window.clone()].iter().copied()).remote_hits
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
