//! The correctness experiment with one guest and a short cell of each kind. The program `correctness` runs all cells.

use remoca_guest_tests::Result;
use remoca_guest_tests::correctness::{Ablation, Bench, Cell, Evictions, Found, PATTERNS, Setup, WRITE_PERCENTS};
use std::time::Duration;

#[test]
fn no_signature_is_wrong_while_everything_is_killed_and_each_check_is_needed() -> Result<()> {
    let setup =
        Setup { guest_mib: 192, file_count: 64, evictions: Evictions::Agent, kill_interval: Duration::from_secs(4) };
    let mut bench = Bench::start(&setup)?;
    let mut all = Found::default();
    let patterns = (0..).zip(PATTERNS);
    let cells = patterns.flat_map(|(number, pattern)| WRITE_PERCENTS.map(|percent| (number, pattern, percent)));
    // The times of kills are random, and a busy machine reads little in a cell, so the cells are repeated if that was not enough.
    for (turn, (number, pattern, write_percent)) in (0..).zip(cells.clone().cycle().take(3 * cells.count())) {
        if turn >= PATTERNS.len() * WRITE_PERCENTS.len() && is_enough(&all) {
            break;
        }
        let cell = Cell { cache_mib: [64, 256][number % 2], pattern, write_percent, seconds: 2 };
        let found = bench.run(&cell)?;
        println!("{cell:?}: {found:?}");
        assert_eq!(found.failures(), 0, "{cell:?}: {found:?}");
        all.add(found);
    }
    assert!(is_enough(&all), "{all:?}");
    bench.verify()?;
    for (ablation, lies) in [(Ablation::Fetch, true), (Ablation::Admission, false)] {
        let found = bench.ablate(ablation, lies, 20)?;
        println!("without {}: {found:?}", ablation.name());
        assert!(found.failures() > 0, "nothing is noticed without {}: {found:?}", ablation.name());
    }
    bench.end()
}

fn is_enough(all: &Found) -> bool {
    let has_worked = all.records_read > 500 && all.records_written > 100 && all.hit_blocks > 1000;
    let is_warm = all.warm_restarts >= 2 && all.warm_restarts * 4 >= all.disk_kills;
    has_worked && all.disk_kills >= 3 && all.server_kills >= 1 && is_warm
}
