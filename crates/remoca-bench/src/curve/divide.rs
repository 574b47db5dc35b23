//! Division of memory among VMs by exact curves of the traces, compared with other divisions; and its time.

use super::exact::exact;
use super::traces::{Layout, below_guest, traces};
use crate::guest::Random;
use crate::index::cpu_ns;
use remoca_core::allocation::{Allocation, Vm};

/// Curves are in units of this many blocks.
const UNIT: u64 = 50;
const BLOCKS: u64 = 20_000;

/// Returns a VM with each of the traces, whose memory counts from 0 to `units`.
fn vms(units: usize, bound: f64) -> Vec<Vm> {
    let vm = |reads: &[u64]| {
        let events = below_guest(reads, (BLOCKS / 16) as usize, Layout::Contiguous);
        let sizes: Vec<u64> = (0..=units as u64).map(|at| at * UNIT).collect();
        Vm { miss_ratios: exact(&events).miss_ratios(&sizes), least: 0, most: units, weight: 1., bound }
    };
    traces(BLOCKS, 7).iter().map(|(_, reads)| vm(reads)).collect()
}

/// Prints the geometric means of the divisions, and the time that the best one takes.
pub fn run() {
    println!("Geometric mean of the miss ratios, as a share of that of the baseline (8 VMs with one trace each)");
    println!("{:>8}{:>8}{:>10}{:>10}{:>10}", "units", "bound", "best", "greedy", "ESX");
    for (units, bound) in [(800, f64::INFINITY), (800, 0.25), (800, 0.05), (1600, f64::INFINITY), (1600, 0.25)] {
        let vms = vms(units, bound);
        let sets: Vec<usize> = vms.iter().map(|vm| vm.working_set(0.01)).collect();
        let Ok(allocation) = Allocation::new(vms, units) else { continue };
        let mean = |units: Vec<usize>| allocation.geometric_mean(&units);
        let [best, greedy, esx] =
            [mean(allocation.optimal()), mean(allocation.greedy()), mean(allocation.esx(1., &sets))];
        println!("{units:>8}{bound:>8}{best:>10.4}{greedy:>10.4}{esx:>10.4}");
    }
    // Every unit lowers the miss ratio of every VM, which is the most work.
    let mut random = Random(9);
    let mut falling = || {
        let mut steps: Vec<f64> = (0..=2000).map(|_| random.share()).collect();
        steps.sort_unstable_by(|a, b| b.total_cmp(a));
        Vm { miss_ratios: steps, least: 0, most: 2000, weight: 1., bound: f64::INFINITY }
    };
    let vms: Vec<Vm> = (0..100).map(|_| falling()).collect();
    let mut least_ns = u64::MAX;
    for _ in 0..5 {
        let start = cpu_ns();
        let units = Allocation::new(vms.clone(), 2000).map(|allocation| allocation.optimal());
        least_ns = least_ns.min(cpu_ns() - start);
        std::hint::black_box(units).ok();
    }
    println!(
        "The best division of 2,000 units among 100 VMs takes {:.0} ms of CPU time, the least of 5 rounds",
        least_ns as f64 / 1e6
    );
}
