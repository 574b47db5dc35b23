//! How well the curve so far foretells the next window, by how much earlier reads count.

use super::exact::exact_windows;
use super::traces::{Layout, below_guest, traces};
use super::{CurveBenchArgs, Difference, SIZES, empty_curve, miss_ratios, note};

const WINDOWS: usize = 12;
/// Windows in which most blocks are read for the first time.
const COLD: usize = 3;
/// Shares of the weight that reads keep from window to window.
const KEPT: [f64; 5] = [1., 0.75, 0.5, 0.25, 0.];

/// Prints the mean error of the curve at the end of a window against the exact one of the next window,
/// without the first windows.
pub fn run(args: &CurveBenchArgs) {
    println!("Mean error of the forecast of the next of {WINDOWS} windows, by what earlier reads keep of their weight");
    print!("{:24}", "trace");
    KEPT.iter().for_each(|kept| print!("{kept:>10}"));
    println!("{:>10}", "exact, 0");
    for (name, reads) in traces(args.blocks, args.seed) {
        let events = below_guest(&reads, args.guest_pages(), Layout::Extents);
        let sizes: Vec<u64> = (1..=SIZES).map(|at| args.blocks * (2 * at - 1) / (2 * SIZES)).collect();
        let exact: Vec<_> = exact_windows(&events, WINDOWS).iter().map(|window| window.miss_ratios(&sizes)).collect();
        print!("{name:24}");
        for kept in KEPT {
            let mut curve = empty_curve(args.seed);
            let windows = events.chunks(events.len().div_ceil(WINDOWS));
            let errors = windows.zip(&exact[1..]).map(|(window, next)| {
                curve.age(kept);
                window.iter().for_each(|event| note(&mut curve, *event));
                Difference::between(&miss_ratios(&curve, &sizes), next)
            });
            print!("{:>10.4}", Difference::of_all(&errors.skip(COLD).collect::<Vec<_>>()).mean);
        }
        let same: Vec<_> = exact.windows(2).skip(COLD).map(|pair| Difference::between(&pair[0], &pair[1])).collect();
        println!("{:>10.4}", Difference::of_all(&same).mean);
    }
}
