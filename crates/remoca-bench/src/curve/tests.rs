use super::engine::{Driven, Setting, difference};
use super::exact::exact_windows;
use super::*;

/// A seed that was not used while the estimator was chosen.
const SEED: u64 = 2001;
const BLOCKS: u64 = 20_000;
const GUEST_PAGES: usize = 1250;

#[test]
fn curves_are_close_to_exact_ones() {
    // Greatest mean error over the sizes, by trace, for blocks in one run and in short extents. What a mistake would break, not what is
    // aimed at: see decision 0038.
    let limits = [
        ("uniform", 0.003),
        ("zipf 0.8", 0.010),
        ("zipf 1.1", 0.010),
        ("loop", 0.001),
        ("zipf 0.9 and a scan", 0.025),
        ("phase change", 0.005),
        ("mixture", 0.010),
        ("recency", 0.005),
    ];
    let traces = traces(BLOCKS, SEED);
    for layout in [Layout::Contiguous, Layout::Extents] {
        for ((name, reads), (limited, limit)) in traces.iter().zip(limits) {
            assert_eq!(*name, limited);
            let events = below_guest(reads, GUEST_PAGES, layout);
            let exact = exact(&events);
            let sizes = sizes(&exact);
            let curve = curve_of(&events, SEED);
            assert!(curve.rate() < 0.5);
            let difference = Difference::between(&miss_ratios(&curve, &sizes), &exact.miss_ratios(&sizes));
            assert!(difference.mean <= limit, "{name}, {layout:?}: {difference:?}");
        }
    }
}

#[test]
fn a_run_of_blocks_is_estimated_better_than_by_plain_shards() {
    for (name, reads) in traces(BLOCKS, SEED).iter().filter(|(name, _)| ["uniform", "loop"].contains(name)) {
        let [ours, _, shards, _] = differences(&below_guest(reads, GUEST_PAGES, Layout::Contiguous), SEED);
        assert!(ours.mean < 0.5 * shards.mean && ours.worst <= 0.02, "{name}: {ours:?}, plain SHARDS {shards:?}");
    }
}

#[test]
fn few_blocks_are_exact() {
    for (name, reads) in traces(400, SEED) {
        let events = below_guest(&reads, 30, Layout::Scattered);
        let sizes: Vec<u64> = (0..5000).collect();
        let curve = curve_of(&events, SEED);
        assert_eq!(curve.rate(), 1.);
        assert_eq!(miss_ratios(&curve, &sizes), exact(&events).miss_ratios(&sizes), "{name}");
    }
}

#[test]
fn a_guest_with_more_memory_misses_what_the_curve_says() {
    // Guest memory X and a cache of Y answer what guest memory X + Y does (the paper's section 3.4).
    let reads_of = |events: &[Event]| events.iter().filter(|event| matches!(event, Event::Read(_))).count();
    for (name, reads) in traces(2000, SEED) {
        let events = below_guest(&reads, 200, Layout::Contiguous);
        let exact = exact(&events);
        for more in [0, 1, 100, 1000, 1799, 5000] {
            let with_more = reads_of(&below_guest(&reads, 200 + more, Layout::Contiguous));
            let predicted = exact.miss_ratios(&[more as u64])[0] * reads_of(&events) as f64;
            assert!(
                (predicted - with_more as f64).abs() < 0.5,
                "{name} with {more} more pages: {predicted}, {with_more}"
            );
        }
    }
}

#[test]
fn exact_distances_are_those_of_a_list() {
    let events = below_guest(&traces(60, SEED)[6].1, 7, Layout::Contiguous);
    let mut newest_first: Vec<u64> = Vec::new();
    let mut expected = Distances::default();
    for event in &events {
        let (Event::Read(block) | Event::Evicted(block)) = *event else { unreachable!() };
        let at = newest_first.iter().position(|queued| *queued == block);
        at.map(|at| newest_first.remove(at));
        match event {
            Event::Read(_) => expected.note(at.map(|at| at as u64 + 1), 1.),
            _ => newest_first.insert(0, block),
        }
    }
    let windows = exact_windows(&events, 5);
    assert_eq!(windows.len(), 5);
    let sum = windows.iter().fold(Distances::default(), |mut sum, window| {
        window.by_distance.iter().for_each(|(distance, weight)| sum.note(Some(*distance), *weight));
        sum.note(None, window.beyond);
        sum
    });
    assert_eq!((&sum.by_distance, sum.beyond), (&expected.by_distance, expected.beyond));
    assert_eq!(exact(&events).by_distance, expected.by_distance);
    // With every block sampled, plain SHARDS is exact, with and without a head.
    for head in [vec![], most_read(&events, 9)] {
        let shards = Shards::estimate(&events, usize::MAX, SEED, &head);
        assert_eq!((&shards.by_distance, shards.beyond), (&expected.by_distance, expected.beyond));
    }
}

#[test]
fn the_engines_curve_is_that_of_its_events() {
    for (name, reads) in traces(400, SEED) {
        let events = below_guest(&reads, 30, Layout::Scattered);
        let sizes: Vec<u64> = (0..5000).step_by(7).collect();
        let mut driven = Driven::new(Setting::Cache, 60, 30, SEED);
        events.iter().for_each(|event| driven.note(*event));
        let (ours, exact) = (driven.miss_ratios(&sizes), exact(&events).miss_ratios(&sizes));
        let worst = Difference::between(&ours, &exact).worst;
        assert!(worst < 1e-9, "{name}: {worst}");
    }
}

#[test]
fn the_engine_estimates_curves_with_and_without_a_cache() {
    // What a mistake would break: see decision 0038 for what was measured.
    for (setting, limit) in [(Setting::Cache, 0.03), (Setting::Ghost, 0.06)] {
        for (name, reads) in traces(BLOCKS, SEED).iter().filter(|(name, _)| *name != "phase change") {
            let events = below_guest(reads, GUEST_PAGES, Layout::Extents);
            let difference = difference(&events, setting, GUEST_PAGES, SEED);
            assert!(difference.mean <= limit, "{name}, {setting:?}: {difference:?}");
        }
    }
}
