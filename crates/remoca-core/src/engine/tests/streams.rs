//! Cached reads that the disk answers because it reads on. What is measured and decided is tested in `engine/streams`.

use super::super::policy::CLASSES;
use super::super::requests::ReadReason;
use super::*;

/// A disk that seeks for 7 ms and reads on in 1 ms, and a server that takes 2 ms. Block 3 is cached.
fn trained() -> Bench {
    let mut bench = Bench::connected();
    for far in 1..5 {
        bench.timed_read(1000 * far, 8 * MS);
        bench.timed_read(1000 * far + 1, MS);
    }
    bench.timed_read(3, 8 * MS);
    assert!(matches!(bench.engine.handle_evicted(&page(3)), Evicted::Admit(_)));
    for _ in 0..4 {
        bench.timed_hit(2 * MS);
    }
    bench
}

impl Bench {
    /// Reads a block from the disk, which takes `ns`. It holds its number.
    fn timed_read(&mut self, bno: u64, ns: u64) {
        assert_eq!(self.read(7, blocks(bno, 1)), [disk_action(7, GuestOp::Read(blocks(bno, 1)))]);
        self.wait(ns);
        assert_eq!(self.disk_done(7, Ok(()), &page(u8::try_from(bno % 256).unwrap())), [complete(7)]);
    }

    /// Reads block 3 from the server, which takes `ns`.
    fn timed_hit(&mut self, ns: u64) {
        let fetch = only_fetch(&self.read(7, blocks(3, 1)));
        self.wait(ns);
        assert_eq!(self.page_comes(fetch, 3), deliver(7, 0));
        assert_eq!(self.actions(), [complete(7)]);
    }

    /// Reads block 3, where the disk is, until both are asked. Returns the number of that REQUEST, and the counters before that read.
    fn read_until_compared(&mut self) -> (FetchId, EngineStats) {
        loop {
            // The agent is there.
            self.engine.handle_evicted(&page(3));
            self.timed_read(2, 8 * MS);
            let before = self.engine.stats();
            let actions = self.read(0, blocks(3, 1));
            if let [Action::Fetch { fetch, .. }, Action::DiskToo { .. }] = actions[..] {
                return (fetch, before);
            }
            self.wait(MS);
            assert_eq!(self.disk_done(0, Ok(()), &page(3)), [complete(0)]);
        }
    }
}

#[test]
fn a_disk_that_is_there_answers_and_the_page_stays_cached() {
    let mut bench = trained();
    bench.timed_read(2, 8 * MS);
    let before = bench.engine.stats();
    bench.timed_read(3, MS);
    let stats = bench.engine.stats();
    assert_eq!((stats.stream_reads, before.stream_reads), (1, 0));
    assert_eq!((stats.covered_blocks, stats.hit_blocks), (before.covered_blocks + 1, before.hit_blocks));
    assert!(bench.cached(3));
    assert_eq!(bench.engine.handle_evicted(&page(3)), Evicted::Duplicate, "and is not sent again");
    bench.timed_hit(2 * MS);
}

#[test]
fn what_the_disk_takes_to_read_on_does_not_make_servers_late() {
    let median = |far_ns: u64| {
        let mut bench = Bench::connected();
        for far in 1..20 {
            bench.timed_read(1000 * far, far_ns);
            bench.timed_read(1000 * far + 1, MS);
        }
        for next in 0..100 {
            // The agent is there.
            bench.engine.handle_evicted(&page(3));
            bench.timed_read(19_002 + next, MS);
        }
        bench.engine.status().hedging.disk.expect("reads of the disk were enough").p50_ns
    };
    assert!((7 * MS..9 * MS).contains(&median(8 * MS)), "a read that needs a seek is what a hedge would be");
    assert!(median(MS + MS / 8) < 2 * MS, "where the disk does not seek, all reads count");
}

/// A guest that reads runs of 32 blocks and evicts them at once. The disk seeks for 7 ms and reads on in 1 ms, and the server takes 2 ms.
struct Runs {
    bench: Bench,
    /// Where the disk is.
    at: u64,
}

impl Runs {
    const LENGTH: u64 = 32;

    /// Reads the run that begins with a block. Returns whether the disk was asked.
    fn read(&mut self, bno: u64) -> bool {
        let page_of = |bno: u64| {
            let mut page = page(1);
            page[..8].copy_from_slice(&bno.to_le_bytes());
            page
        };
        let pages: Vec<_> = (bno..bno + Self::LENGTH).map(page_of).collect();
        let bench = &mut self.bench;
        let actions = bench.read(0, blocks(bno, Self::LENGTH));
        let asks_disk = actions.iter().any(|action| !matches!(action, Action::Fetch { .. }));
        if asks_disk {
            bench.wait(if self.at == bno { MS } else { 8 * MS });
            self.at = bno + Self::LENGTH;
            assert_eq!(bench.disk_done(0, Ok(()), &pages.concat()), [complete(0)]);
        } else {
            bench.wait(2 * MS);
        }
        let fetches = actions.iter().filter_map(|action| match action {
            Action::Fetch { fetch, .. } => Some(*fetch),
            _ => None,
        });
        for (fetch, page) in fetches.zip(&pages) {
            bench.engine.handle_page(bench.now, SERVER, fetch, page);
        }
        for page in &pages {
            if let Evicted::Admit(_) = bench.engine.handle_evicted(page) {
                bench.engine.handle_sent(SERVER, 1);
            }
        }
        bench.actions();
        asks_disk
    }
}

#[test]
fn what_the_disk_answers_although_it_is_cached_is_not_copied_again() {
    let mut guest = Runs { bench: Bench::large(), at: 1 << 40 };
    let advice = |guest: &Runs| guest.bench.engine.class_advice();
    let cached = || (1_000_000..).step_by(32).take(200);
    assert!(cached().all(|bno| guest.read(bno)), "nothing is cached yet");
    for far in 1..9 {
        assert!(guest.read(far * 10_000) && guest.read(far * 10_000 + Runs::LENGTH));
    }
    for _ in 0..8 {
        assert!(!guest.read(1_000_000), "the disk is elsewhere");
    }
    assert_eq!(advice(&guest), 0);
    let asked = cached().filter(|bno| guest.read(*bno)).count();
    assert!(asked > 190, "the disk reads on: {asked}");
    assert_eq!(advice(&guest), CLASSES, "though there are free slots");
    guest.read(2_000_000);
    assert_eq!(advice(&guest), CLASSES, "one read in a while changes nothing");
    guest.bench.do_from_disk(write(blocks(5, 1)), &page(5));
    assert_eq!(advice(&guest), 0);
}

#[test]
fn a_read_in_part_of_zeroes_goes_to_the_disk_as_a_whole() {
    let mut bench = trained();
    let zero = GuestOp::WriteZeroes { range: blocks(4, 1), may_unmap: true, durable: false };
    bench.do_from_disk(zero, &[]);
    for far in 1..5 {
        for (bno, ns) in [(1000 * far, 8 * MS), (1000 * far + 2, MS)] {
            bench.read(7, blocks(bno, 2));
            bench.wait(ns);
            bench.disk_done(7, Ok(()), &[page(9), page(8)].concat());
        }
    }
    bench.timed_read(2, 8 * MS);
    let range = blocks(3, 2);
    assert_eq!(bench.read(0, range), [disk_action(0, GuestOp::Read(range))]);
    assert_eq!(bench.disk_done(0, Ok(()), &[page(3), page(0)].concat()), [complete(0)]);
    let stats = bench.engine.stats();
    assert_eq!(stats.hit_blocks + stats.zero_blocks + stats.covered_blocks + stats.missed_blocks, stats.read_blocks);
}

#[test]
fn the_error_of_a_disk_is_the_guests_and_the_server_answers_what_follows() {
    let mut bench = trained();
    bench.timed_read(2, 8 * MS);
    bench.read(0, blocks(3, 1));
    assert_eq!(bench.disk_done(0, Err(EIO), &[]), [fail(0)]);
    bench.timed_read(2, 8 * MS);
    bench.timed_hit(2 * MS);
}

#[test]
fn a_read_that_compares_is_answered_by_the_first_and_opens_no_breaker() {
    let mut bench = trained();
    let mut compared = 0;
    for _ in 0..2048 {
        // The agent is there.
        bench.engine.handle_evicted(&page(3));
        bench.timed_read(2, 8 * MS);
        match bench.read(0, blocks(3, 1))[..] {
            [Action::Disk { .. }] => {}
            [Action::Fetch { fetch, .. }, Action::DiskToo { .. }] => {
                compared += 1;
                bench.wait(MS);
                assert_eq!(bench.disk_done(0, Ok(()), &page(3)), [complete(0)]);
                assert_eq!(bench.page_comes(fetch, 3), PageOutcome::Late);
                continue;
            }
            ref other => panic!("{other:?}"),
        }
        bench.wait(MS);
        assert_eq!(bench.disk_done(0, Ok(()), &page(3)), [complete(0)]);
    }
    assert_eq!(compared, 32);
    assert_eq!((bench.engine.stats().breaker_openings, bench.engine.stats().probes), (0, 0));
}

/// Who answers a compared read first, and when the page of the server comes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum First {
    /// The disk after 1 ms, and the page after so many more.
    Disk(u64),
    /// The server after so many ms; the disk follows.
    Server(u64),
    /// The page has not left for the server, and is read where it is.
    Unsent,
}

/// Reads block 3 until it was compared 40 times. Returns the bench, and the counters of one compared read.
fn compared(first: First) -> (Bench, EngineStats, EngineStats) {
    let mut bench = trained();
    let (mut before, mut after) = (EngineStats::default(), EngineStats::default());
    for _ in 0..40 {
        let (fetch, stats) = bench.read_until_compared();
        before = stats;
        match first {
            First::Disk(late_ms) => {
                bench.wait(MS);
                assert_eq!(bench.disk_done(0, Ok(()), &page(3)), [complete(0)]);
                bench.wait(late_ms * MS);
                assert_eq!(bench.page_comes(fetch, 3), PageOutcome::Late);
            }
            First::Server(ms) => {
                bench.wait(ms * MS);
                assert_eq!(bench.page_comes(fetch, 3), deliver(0, 0));
                assert_eq!(bench.actions(), [complete(0)]);
                bench.wait(MS);
                assert_eq!(bench.disk_done(0, Ok(()), &page(3)), []);
            }
            First::Unsent => {
                assert_eq!(bench.engine.handle_unsent_page(bench.now, SERVER, fetch, &page(3)), deliver(0, 0));
                assert_eq!(bench.actions(), [complete(0)]);
                bench.wait(MS);
                assert_eq!(bench.disk_done(0, Ok(()), &page(3)), []);
            }
        }
        after = bench.engine.stats();
        assert_eq!(
            after.hit_blocks + after.zero_blocks + after.covered_blocks + after.missed_blocks,
            after.read_blocks
        );
    }
    (bench, before, after)
}

/// Returns what the pool is known to cost after compared reads, in ms.
fn pool_cost_after(first: First) -> u64 {
    compared(first).0.engine.streams.pool_cost(PoolIndex(0), 1).unwrap().div_ceil(MS)
}

#[test]
fn what_a_pool_costs_is_learnt_though_the_disk_is_first() {
    assert_eq!([1, 4].map(|late_ms| pool_cost_after(First::Disk(late_ms))), [2, 5]);
}

/// A comparison is a value of its pool once, whoever is first, and none if the server was not asked.
#[test]
fn what_a_pool_costs_is_learnt_once_and_from_its_server_alone() {
    assert_eq!([4, 6].map(|ms| pool_cost_after(First::Server(ms))), [4, 6]);
    assert_eq!(pool_cost_after(First::Unsent), pool_cost_after(First::Disk(1)), "as after hits of 2 ms");
}

#[test]
fn a_server_that_is_first_in_a_comparison_wins_no_race() {
    let latency = |first| compared(first).0.engine.status().hedging.server.map(|latency| latency.p99_ns);
    assert_eq!(latency(First::Server(6)), latency(First::Disk(1)), "its latency is that of reads that wait for it");
}

#[test]
fn a_block_that_was_compared_counts_by_who_was_first() {
    let counts = |first| {
        let (_, before, after) = compared(first);
        let covered = after.covered_blocks - before.covered_blocks;
        (covered, after.missed_blocks - before.missed_blocks, after.hit_blocks - before.hit_blocks)
    };
    assert_eq!(counts(First::Disk(1)), (1, 0, 0));
    assert_eq!(counts(First::Server(1)), (0, 0, 1));
}

#[test]
fn each_disk_has_a_position_and_costs_of_its_own() {
    let mut bench = trained();
    bench.timed_read(2, 8 * MS);
    let other = GuestOp::Read(blocks(2, 1));
    bench.request(0, OTHER_DISK, other);
    bench.disk_done(0, Ok(()), &page(2));
    bench.request(0, OTHER_DISK, GuestOp::Read(blocks(3, 1)));
    bench.disk_done(0, Ok(()), &page(3));
    only_fetch(&bench.request(0, OTHER_DISK, GuestOp::Read(blocks(3, 1))));
    assert_eq!(bench.read(1, blocks(3, 1)), [disk_action(1, GuestOp::Read(blocks(3, 1)))]);
}

#[test]
fn a_block_that_is_written_while_the_disk_reads_on_teaches_nothing() {
    let mut bench = trained();
    bench.timed_read(2, 8 * MS);
    bench.read(0, blocks(3, 1));
    bench.request(1, DISK, write(blocks(3, 1)));
    bench.disk_done(1, Ok(()), &page(5));
    assert_eq!(bench.disk_done(0, Ok(()), &page(3)), [complete(0)]);
    assert!(!bench.cached(3));
}

#[test]
fn after_a_write_the_disk_is_elsewhere() {
    let mut bench = trained();
    bench.timed_read(2, 8 * MS);
    bench.do_from_disk(write(blocks(500, 1)), &page(5));
    bench.timed_hit(2 * MS);
}

/// A disk read that the driver left out is none that the disk hangs on.
#[test]
fn a_comparison_whose_disk_read_is_left_out_is_forgotten() {
    let mut bench = trained();
    let (fetch, _) = bench.read_until_compared();
    assert_eq!(bench.page_comes(fetch, 3), deliver(0, 0));
    assert_eq!(bench.actions(), [complete(0)]);
    bench.engine.handle_disk_skipped(RequestId(0));
    bench.timed_hit(2 * MS);
    bench.timed_read(2, 8 * MS);
    bench.wait(1000 * MS);
    bench.timed_read(3, MS);
}

#[test]
fn what_a_pool_costs_is_unknown_in_another_session() {
    let mut bench = trained();
    bench.disconnect();
    bench.connect(1, 8, 1);
    bench.timed_read(2, 8 * MS);
    bench.timed_hit(2 * MS);
}

/// Returns a bench where a server takes 0.5 ms and the disk reads on in 1 ms, with `count` blocks cached from the third on: after 14 of
/// them the server has saved a seek. The disk has just read what is before.
fn cached_ahead(count: u8) -> Bench {
    let mut bench = Bench::new(EngineConfig { cache: PageCount(64), ..config() });
    bench.connect(1, 64, 0);
    for far in 1..9 {
        bench.timed_read(1000 * far, 8 * MS);
        bench.timed_read(1000 * far + 1, MS);
    }
    for bno in 3..3 + count {
        bench.timed_read(bno.into(), if bno == 3 { 8 * MS } else { MS });
        assert!(matches!(bench.engine.handle_evicted(&page(bno)), Evicted::Admit(_)));
    }
    (0..8).for_each(|_| bench.timed_hit(MS / 2));
    bench.timed_read(2, 8 * MS);
    bench
}

#[test]
fn a_disk_is_left_for_a_quicker_pool_if_all_that_saves_a_seek_is_cached() {
    for (count, missing, is_left) in [(30, 100, true), (30, 20, true), (30, 10, false), (30, 4, false), (5, 100, false)]
    {
        let mut bench = cached_ahead(count);
        bench.engine.index.forget(BlockId { disk: DISK, bno: BlockNumber(missing) });
        let actions = bench.read(0, blocks(3, 1));
        let is_fetched = matches!(actions[..], [Action::Fetch { .. }]);
        assert!(is_fetched || actions == [disk_action(0, GuestOp::Read(blocks(3, 1)))], "{actions:?}");
        assert_eq!(is_fetched, is_left, "{count} blocks without block {missing}");
    }
}

#[test]
fn what_was_found_ahead_of_an_earlier_stream_is_looked_up_again() {
    let mut bench = cached_ahead(30);
    bench.timed_hit(MS / 2);
    bench.engine.index.forget(BlockId { disk: DISK, bno: BlockNumber(10) });
    bench.timed_read(2, 8 * MS);
    assert_eq!(bench.read(0, blocks(3, 1)), [disk_action(0, GuestOp::Read(blocks(3, 1)))]);
}

/// The read waits for the server then, as others do.
#[test]
fn a_comparison_whose_disk_read_fails_is_one_value_of_its_pool() {
    let mut bench = trained();
    let (fetch, _) = bench.read_until_compared();
    bench.wait(MS);
    assert_eq!(bench.disk_done(0, Err(EIO), &[]), []);
    bench.wait(3 * MS);
    assert_eq!(bench.page_comes(fetch, 3), deliver(0, 0));
    assert_eq!(bench.actions(), [complete(0)]);
    // An eighth of the way from 2 ms to 4 ms.
    assert_eq!(bench.engine.streams.pool_cost(PoolIndex(0), 1), Some(2 * MS + MS / 4));
}

#[test]
fn a_disk_that_works_at_more_than_the_guest_reads_reads_nothing_on() {
    let mut bench = trained();
    bench.timed_read(2, 8 * MS);
    for _ in 0..64 {
        bench.engine.race.begin_io(bench.now, DISK, ReadReason::Hedge, None);
    }
    bench.timed_hit(2 * MS);
}
