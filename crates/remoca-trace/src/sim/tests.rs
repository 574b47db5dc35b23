//! The simulation against naive models, for any sequence of records.

use super::*;
use crate::formats::Batch;
use proptest::collection::vec;
use proptest::prelude::*;
use remoca_protocol::trace::{TraceRecord, TracedOp};

const BLOCKS: u64 = 24;

fn record(op: TracedOp, block: u64, blocks: u64) -> TraceRecord {
    TraceRecord { block, blocks, ..TraceRecord::of_bytes(op, 0, 0) }
}

fn any_record() -> impl Strategy<Value = TraceRecord> {
    use TracedOp::{Discard, Evicted, Read, Write, WriteZeroes};
    let op = prop_oneof![
        12 => Just(Read), 2 => Just(Write), 6 => Just(Evicted), 1 => Just(Discard), 1 => Just(WriteZeroes), 1 => Just(TracedOp::Flush)
    ];
    (op, 0..BLOCKS, 1..4_u64, 0..8_u8).prop_map(|(op, block, blocks, rare)| match op {
        TracedOp::Flush => record(op, 0, 0),
        Evicted => record(op, block, 1),
        Discard | WriteZeroes if rare == 0 => record(op, 0, 1 << 30),
        Read => TraceRecord { is_partial: rare == 1, ..record(op, block, blocks) },
        _ => record(op, block, blocks),
    })
}

fn simulate(setup: Setup, batches: &[Batch]) -> Outcome {
    let mut simulation = Simulation::new(setup);
    batches.iter().for_each(|batch| simulation.take(batch).unwrap());
    simulation.finish()
}

fn setup(guest: u64, local: u64, remote: u64) -> Setup {
    let tiers = Pages { local, remote };
    Setup { guest, tiers, policy: PolicyKind::Lru, curve: CurveKind::Exact, one_of: 1, blocks_max: 1000 }
}

/// Guest and tiers as lists, the newest first.
#[derive(Default)]
struct Naive {
    guest: Vec<u64>,
    local: Vec<u64>,
    remote: Vec<u64>,
    blocks: BlockCounts,
    traffic: Traffic,
    /// Evicted blocks without a limit, and the distances of the reads that found theirs.
    queue: Vec<u64>,
    distances: Vec<usize>,
}

fn take(list: &mut Vec<u64>, block: u64) -> bool {
    let found = list.iter().position(|other| *other == block);
    found.map(|at| list.remove(at)).is_some()
}

impl Naive {
    fn evict(&mut self, setup: &Setup, block: u64) {
        self.forget(block);
        self.queue.insert(0, block);
        self.local.insert(0, block);
        if self.local.len() as u64 > setup.tiers.local {
            let victim = self.local.pop().unwrap();
            if setup.tiers.remote > 0 {
                self.traffic.sent += 1;
                self.remote.insert(0, victim);
                self.remote.truncate(usize::try_from(setup.tiers.remote).unwrap());
            }
        }
    }

    fn forget(&mut self, block: u64) {
        for list in [&mut self.local, &mut self.remote, &mut self.queue] {
            take(list, block);
        }
    }

    fn look(&mut self, block: u64) {
        if let Some(at) = self.queue.iter().position(|other| *other == block) {
            self.distances.push(at + 1);
        }
        if take(&mut self.local, block) {
            self.blocks.local += 1;
        } else if take(&mut self.remote, block) {
            self.blocks.remote += 1;
        } else {
            self.blocks.disk += 1;
        }
        self.forget(block);
    }

    fn hold(&mut self, setup: &Setup, block: u64) {
        self.guest.insert(0, block);
        if self.guest.len() as u64 > setup.guest {
            let victim = self.guest.pop().unwrap();
            self.evict(setup, victim);
        }
    }

    /// The disk answers all of a read that it answers a part of.
    fn handle(&mut self, setup: &Setup, record: &TraceRecord, sees_evictions: bool) {
        let before = self.blocks;
        self.handle_blocks(setup, record, sees_evictions);
        if self.blocks.disk > before.disk {
            let found = self.blocks.local + self.blocks.remote - before.local - before.remote;
            self.blocks.covered += found;
            self.blocks.disk += found;
            (self.blocks.local, self.blocks.remote) = (before.local, before.remote);
        }
        self.traffic.fetched = self.blocks.remote;
    }

    fn handle_blocks(&mut self, setup: &Setup, record: &TraceRecord, sees_evictions: bool) {
        let has_guest = setup.guest > 0;
        for block in record.block..record.end().min(2 * BLOCKS) {
            match record.op {
                TracedOp::Read if has_guest && take(&mut self.guest, block) => {
                    self.blocks.guest += 1;
                    self.guest.insert(0, block);
                }
                TracedOp::Read if has_guest => {
                    self.look(block);
                    self.hold(setup, block);
                }
                TracedOp::Read if record.is_partial => self.blocks.disk += 1,
                TracedOp::Read => {
                    self.look(block);
                    if !sees_evictions {
                        self.evict(setup, block);
                    }
                }
                TracedOp::Write => {
                    self.blocks.written += 1;
                    take(&mut self.guest, block);
                    self.forget(block);
                    if has_guest {
                        self.hold(setup, block);
                    }
                }
                TracedOp::Discard | TracedOp::WriteZeroes => {
                    take(&mut self.guest, block);
                    self.forget(block);
                }
                TracedOp::Evicted if !has_guest => self.evict(setup, block),
                TracedOp::Evicted | TracedOp::Flush => {}
            }
        }
    }
}

/// Returns batches, of which those with evictions see them.
fn batches(records: &[TraceRecord], has_evictions: bool) -> Vec<Batch> {
    let keep = |record: &&TraceRecord| has_evictions || record.op != TracedOp::Evicted;
    let records: Vec<TraceRecord> = records.iter().filter(keep).copied().collect();
    let batch = |records: &[TraceRecord]| Batch {
        records: records.to_vec(),
        sees_evictions: has_evictions,
        ..Batch::default()
    };
    records.chunks(37).map(batch).collect()
}

proptest! {
    #[test]
    fn reads_alone_are_one_lru(blocks in vec(0..BLOCKS, 0..300), guest in 0..6_u64, local in 0..6_u64, remote in 0..9_u64) {
        let reads: Vec<TraceRecord> = blocks.iter().map(|block| record(TracedOp::Read, *block, 1)).collect();
        let outcome = simulate(setup(guest, local, remote), &batches(&reads, false));
        let one = simulate(setup(0, guest + local + remote, 0), &batches(&reads, false));
        prop_assert_eq!(outcome.blocks.disk, one.blocks.disk);
        let first = simulate(setup(0, guest + local, 0), &batches(&reads, false));
        prop_assert_eq!(outcome.blocks.guest + outcome.blocks.local, first.blocks.local);
    }

    #[test]
    fn guest_and_tiers_are_as_naive_lists(
        records in vec(any_record(), 0..300), guest in 0..6_u64, local in 0..6_u64, remote in 0..9_u64, has_evictions: bool
    ) {
        let setup = setup(guest, local, remote);
        let batches = batches(&records, has_evictions);
        let outcome = simulate(setup, &batches);
        let mut naive = Naive::default();
        for batch in &batches {
            batch.records.iter().for_each(|record| naive.handle(&setup, record, batch.sees_evictions));
        }
        prop_assert_eq!(outcome.blocks, naive.blocks);
        prop_assert_eq!(outcome.traffic, naive.traffic);
        prop_assert!(outcome.requests.unwrap().all() <= records.len() as u64);
        // One LRU over both tiers: the exact curve at their sum is what they hit together. What left them does not come back where
        // something else was forgotten.
        let both = usize::try_from(local + remote).unwrap();
        let within = naive.distances.iter().filter(|distance| **distance <= both).count() as u64;
        let found = outcome.blocks.local + outcome.blocks.remote + outcome.blocks.covered;
        prop_assert!(found <= within);
        let reads = |batch: &Batch| batch.records.iter().all(|record| matches!(record.op, TracedOp::Read | TracedOp::Flush));
        if !has_evictions && batches.iter().all(reads) {
            prop_assert_eq!(found, within);
        }
    }

    #[test]
    fn the_exact_curve_has_all_distances(records in vec(any_record(), 1..300), guest in 0..6_u64) {
        let setup = setup(guest, 0, 0);
        let batches = batches(&records, false);
        let mut simulation = Simulation::new(setup);
        let mut naive = Naive::default();
        for batch in &batches {
            simulation.take(batch).unwrap();
            batch.records.iter().for_each(|record| naive.handle(&setup, record, false));
        }
        let sizes: Vec<u64> = (0..2 * BLOCKS).collect();
        let ratios = simulation.curve.hit_ratios(&sizes);
        let all = naive.blocks.below_guest();
        prop_assert_eq!(ratios.is_some(), all > 0);
        for (size, ratio) in sizes.iter().zip(ratios.unwrap_or_default()) {
            let hits = naive.distances.iter().filter(|distance| **distance as u64 <= *size).count();
            prop_assert!((ratio - hits as f64 / all as f64).abs() < 1e-9, "{} of {}", size, all);
        }
        // Without a guest nothing but the curve is followed then. So few blocks are all in the sample.
        let sampled = simulate(Setup { curve: CurveKind::Sampled, ..setup }, &batches).curve;
        let exact = simulation.finish().curve;
        prop_assert_eq!(sampled.len(), exact.len());
        prop_assert!(sampled.iter().zip(&exact).all(|(a, b)| (a.hit_ratio - b.hit_ratio).abs() < 1e-9));
    }

    /// No fixed set of as many blocks hits more, whichever it is.
    #[test]
    fn the_best_fixed_set_is_the_best(records in vec(any_record(), 1..200), set in vec(0..2 * BLOCKS, 5), guest in 0..4_u64) {
        let fixed = Setup { policy: PolicyKind::Fixed, ..setup(guest, 2, 3) };
        let batches = batches(&records, false);
        let outcome = simulate(fixed, &batches);
        let unlimited = simulate(setup(guest, 1000, 0), &batches);
        prop_assert_eq!(outcome.blocks.all(), unlimited.blocks.all());
        prop_assert!(outcome.blocks.local + outcome.blocks.remote <= unlimited.blocks.local + unlimited.blocks.covered);
        // The hits of the set in a cache that discards nothing.
        let mut naive = Naive::default();
        let (mut hits, endless) = (0, setup(guest, 1000, 0));
        for record in batches.iter().flat_map(|batch| &batch.records) {
            let below = |block: &u64| guest == 0 && !record.is_partial || guest > 0 && !naive.guest.contains(block);
            if record.op == TracedOp::Read && record.blocks == 1 {
                let found = Some(record.block).filter(below).filter(|block| naive.local.contains(block) && set.contains(block));
                hits += u64::from(found.is_some());
            }
            naive.handle(&endless, record, false);
        }
        prop_assert!(outcome.blocks.local + outcome.blocks.remote >= hits);
    }
}

/// A loop over 1.5 times the cache: LRU hits nothing, the policy of the engine most of what the best fixed set does.
#[test]
fn the_engines_policy_keeps_a_part_of_a_loop() {
    let loops = |policy, one_of| {
        let setup = Setup { policy, one_of, blocks_max: 100_000, ..setup(256, 0, 2048) };
        let reads: Vec<TraceRecord> = (0..3072 * 40).map(|at| record(TracedOp::Read, at % 3072, 1)).collect();
        let batches: Vec<Batch> =
            reads.chunks(512).map(|reads| Batch { records: reads.to_vec(), ..Batch::default() }).collect();
        simulate(setup, &batches)
    };
    let hits = |outcome: &Outcome| outcome.blocks.local + outcome.blocks.remote;
    let (lru, adaptive, fixed) =
        (loops(PolicyKind::Lru, 1), loops(PolicyKind::Adaptive, 1), loops(PolicyKind::Fixed, 1));
    assert_eq!(hits(&lru), 0);
    assert!(lru.traffic.sent > 100_000, "{lru:?}");
    assert_eq!(hits(&fixed), 2048 * 39);
    assert!(hits(&adaptive) * 10 > hits(&fixed) * 8, "{adaptive:?}");
    assert_eq!(adaptive.ends_bimodal, Some(true));
    assert!(adaptive.traffic.sent < lru.traffic.sent / 10, "{adaptive:?}, {lru:?}");
    let sampled = loops(PolicyKind::Fixed, 4);
    assert!((sampled.shares.disk - fixed.shares.disk).abs() < 0.05, "{sampled:?}");
}

#[test]
fn a_cache_beats_the_best_fixed_set_where_the_blocks_in_use_change() {
    let records: Vec<_> = (0..800).map(|at| record(TracedOp::Read, at / 200 * 4 + at % 4, 1)).collect();
    let batch = Batch { records, ..Batch::default() };
    let [lru, fixed] = [PolicyKind::Lru, PolicyKind::Fixed]
        .map(|policy| simulate(Setup { policy, ..setup(0, 4, 0) }, std::slice::from_ref(&batch)).blocks.local);
    assert_eq!((lru, fixed), (4 * 196, 196));
}

/// Which page is where, and what travels, as in the engine (`remoca_core::index::admit`).
#[test]
fn the_engines_policy_moves_pages_between_the_tiers() {
    use TracedOp::{Evicted, Read};
    let of = |setup: Setup, policy, records: Vec<TraceRecord>, sees_evictions| {
        let batch = Batch { records, sees_evictions, ..Batch::default() };
        let outcome = simulate(Setup { policy, ..setup }, &[batch]);
        (outcome.blocks.local, outcome.blocks.remote, outcome.traffic.sent)
    };
    // A page that hit in the remote tier and is evicted again rises to the local one.
    for policy in [PolicyKind::Adaptive, PolicyKind::Lru] {
        let events = [(Evicted, 1), (Evicted, 2), (Read, 1), (Evicted, 1), (Read, 1)];
        let records = events.map(|(op, block)| record(op, block, 1)).to_vec();
        assert_eq!(of(setup(0, 1, 1), policy, records, true), (1, 1, 2), "{policy:?}");
    }
    // One that did not hit stays where it is.
    let events = [(Evicted, 1), (Evicted, 2), (Evicted, 1), (Read, 1), (Read, 2)];
    let records = events.map(|(op, block)| record(op, block, 1)).to_vec();
    assert_eq!(of(setup(0, 1, 1), PolicyKind::Adaptive, records, true), (1, 1, 1));
    // Blocks that are admitted as they are read, and not read again: all but the first and the one of 32 that enters as the newest
    // travel as they come. The first need not travel when that one displaces it.
    let records = (0..32).map(|block| record(Read, block, 1)).collect();
    assert_eq!(of(setup(0, 1, 1), PolicyKind::Adaptive, records, false), (0, 0, 30));
    // The disk answers a read of which one block is lacking.
    let records = vec![record(Read, 2, 1), record(Read, 1, 2), record(Read, 1, 2)];
    let batch = Batch { records, ..Batch::default() };
    for (policy, from_tier, covered) in
        [(PolicyKind::Lru, 2, 1), (PolicyKind::Adaptive, 2, 1), (PolicyKind::Fixed, 3, 0)]
    {
        let outcome = simulate(Setup { policy, ..setup(0, 0, 4) }, std::slice::from_ref(&batch));
        let BlockCounts { remote, disk, .. } = outcome.blocks;
        assert_eq!((remote, disk, outcome.blocks.covered), (from_tier, 5 - from_tier, covered), "{policy:?}");
        assert_eq!(outcome.traffic.fetched, remote, "{policy:?}");
    }
    // Of reads of two blocks, which hit if both are there, one in 32 is admitted once the cache is full.
    let records = (0..33).map(|at| record(Read, if at == 32 { 62 } else { at * 2 }, 2)).collect();
    assert_eq!(of(setup(0, 0, 4), PolicyKind::Adaptive, records, false), (0, 2, 6));
}

/// As of a VM with an eviction port whose agent never reported.
#[test]
fn evictions_that_were_to_come_and_did_not_are_missed() {
    let of = |guest, ops: &[TracedOp], sees_evictions| {
        let records = ops.iter().map(|op| record(*op, 1, 1)).collect();
        simulate(setup(guest, 4, 4), &[Batch { records, sees_evictions, ..Batch::default() }]).lacks_evictions
    };
    let reads = [TracedOp::Read, TracedOp::Read];
    assert!(of(0, &reads, true) && !of(0, &reads, false) && !of(4, &reads, true));
    assert!(!of(0, &[TracedOp::Read, TracedOp::Evicted], true) && !of(0, &[TracedOp::Write], true));
}

/// A block that has half of the reads is in the sample or is not.
#[test]
fn a_sample_has_as_many_reads_as_it_should() {
    let simulate_one_of = |one_of, hot, setup: Setup| {
        let mut random = 1_u64;
        let reads = (0..60_000).map(|at| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            record(TracedOp::Read, if at % 2 == 0 { hot } else { random >> 52 }, 1)
        });
        let batch = Batch { records: reads.collect(), ..Batch::default() };
        simulate(Setup { one_of, blocks_max: 10_000, ..setup }, &[batch])
    };
    let shares = |outcome: &Outcome| {
        let TierShares { guest, local, remote, disk } = outcome.shares;
        [guest, local, remote, disk]
    };
    let is_close = |a: f64, b: f64| (a - b).abs() < 0.02;
    for (policy, curve) in [(PolicyKind::Lru, CurveKind::Exact), (PolicyKind::Fixed, CurveKind::Sampled)] {
        for setup in [setup(64, 512, 1024), setup(0, 512, 1024), setup(0, 0, 1536)] {
            // The first of them is in the sample.
            for hot in 0..2 {
                let setup = Setup { policy, curve, ..setup };
                let [all, some] = [1, 4].map(|one_of| simulate_one_of(one_of, hot, setup));
                assert!(some.blocks.all().abs_diff(all.blocks.all()) < 4);
                assert!(shares(&all).iter().zip(shares(&some)).all(|(a, b)| is_close(*a, b)), "{all:?}, {some:?}");
                let mut points = all.curve.iter().zip(&some.curve);
                assert!(points.all(|(a, b)| is_close(a.hit_ratio, b.hit_ratio)), "{all:?}, {some:?}");
                let pages = |traffic: Traffic| [traffic.sent, traffic.fetched];
                let mut traffic = pages(all.traffic).into_iter().zip(pages(some.traffic));
                assert!(traffic.all(|(a, b)| b.abs_diff(a) <= a / 20), "{all:?}, {some:?}");
            }
        }
    }
}

/// A read of many blocks takes as long as its slowest, which a sample may not have.
#[test]
fn a_sample_tells_nothing_of_requests() {
    let requests = |one_of| {
        let records = (0..100).map(|at| record(TracedOp::Read, at % 3, 20)).collect();
        simulate(Setup { one_of, ..setup(0, 8, 8) }, &[Batch { records, ..Batch::default() }]).requests
    };
    assert_eq!((requests(1).map(|requests| requests.all()), requests(2)), (Some(100), None));
}

#[test]
fn a_trace_of_too_many_blocks_is_refused() {
    let mut simulation = Simulation::new(Setup { blocks_max: 10, ..setup(0, 4, 0) });
    let batch = Batch { records: vec![record(TracedOp::Read, 5, 11)], ..Batch::default() };
    assert_eq!(simulation.take(&batch), Err(TooManyBlocks { blocks_max: 10 }));
}

#[test]
fn a_block_takes_no_more_than_is_said() {
    for policy in [PolicyKind::Lru, PolicyKind::Adaptive, PolicyKind::Fixed] {
        let blocks = 700_000;
        let setup = Setup { policy, blocks_max: 1 << 20, ..setup(1000, 100_000, 1 << 20) };
        let mut simulation = Simulation::new(setup);
        let reads: Vec<_> = (0..blocks).map(|at| record(TracedOp::Read, at * 3, 1)).collect();
        for chunk in reads.chunks(4096) {
            simulation.take(&Batch { records: chunk.to_vec(), ..Batch::default() }).unwrap();
            let blocks = simulation.ids.len() as u64 + 10_000;
            assert!((simulation.bytes() as u64) < blocks * BLOCK_COST_BYTES, "{policy:?}: {blocks}");
        }
    }
}
