//! Cached reads that the disk answers because it reads on. What is measured and decided is tested in `engine/streams`.

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

/// Compared reads of a page that comes after so many ms more than the disk takes. Returns what the pool is known to cost, in ms.
fn pool_cost_after(late_ms: u64) -> u64 {
    let mut bench = trained();
    let mut compared = 0;
    while compared < 40 {
        bench.engine.handle_evicted(&page(3));
        bench.timed_read(2, 8 * MS);
        let actions = bench.read(0, blocks(3, 1));
        bench.wait(MS);
        assert_eq!(bench.disk_done(0, Ok(()), &page(3)), [complete(0)]);
        if let [Action::Fetch { fetch, .. }, Action::DiskToo { .. }] = actions[..] {
            compared += 1;
            bench.wait(late_ms * MS);
            assert_eq!(bench.page_comes(fetch, 3), PageOutcome::Late);
        }
    }
    let stats = bench.engine.stats();
    assert_eq!(stats.hit_blocks + stats.zero_blocks + stats.covered_blocks + stats.missed_blocks, stats.read_blocks);
    bench.engine.streams.pool_cost(PoolIndex(0), 1).unwrap().div_ceil(MS)
}

#[test]
fn what_a_pool_costs_is_learnt_though_the_disk_is_first() {
    assert_eq!([1, 4].map(pool_cost_after), [2, 5]);
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
