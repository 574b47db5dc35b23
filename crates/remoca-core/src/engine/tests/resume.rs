//! An engine that continues where a former process was killed.

use super::*;
use crate::index::Origin;

impl Bench {
    /// Kills the process, whose successor finds the words.
    fn killed(self) -> Self {
        let words = self.engine.index().words().clone();
        let engine = DiskEngine::resume(&config(), words, Origin::Own).map_err(|unusable| unusable.reason).unwrap();
        let mut bench = Self { engine, now: Nanos(1) };
        [DISK, OTHER_DISK].into_iter().for_each(|disk| bench.engine.describe_disk(disk, 1 << 40, false));
        bench.engine.set_servers(bench.now, &[SERVER], Leaving::AtOnce);
        bench.actions();
        bench
    }
}

#[test]
fn what_was_cached_is_hit_once_the_pool_is_found_again() {
    let mut bench = Bench::connected();
    let slots: Vec<_> = (1..=3).map(|bno| bench.cache(bno, u8::try_from(bno).unwrap())).collect();
    let mut bench = bench.killed();
    assert_eq!(bench.read(1, blocks(2, 1)), [disk_action(1, GuestOp::Read(blocks(2, 1)))], "no server yet");
    bench.disk_done(1, Ok(()), &page(2));
    bench.connect(1, 8, 3);
    for (bno, slot) in (1..=3).zip(slots) {
        let id = u32::try_from(bno).unwrap();
        let [Action::Fetch { fetch, at: PoolSlot { slot: asked, .. } }] = bench.read(id, blocks(bno, 1))[..] else {
            panic!("no hit: {bno}")
        };
        assert_eq!(asked, slot);
        assert_eq!(bench.page_comes(fetch, u8::try_from(bno).unwrap()), deliver(id, 0));
        assert_eq!(bench.actions(), [complete(id)]);
    }
}

#[test]
fn pages_that_died_with_the_process_are_given_up() {
    let mut bench = Bench::connected();
    for bno in 1..=3 {
        bench.cache(bno, u8::try_from(bno).unwrap());
    }
    let mut bench = bench.killed();
    bench.connect(1, 8, 1);
    assert_eq!([1, 2, 3].map(|bno| bench.cached(bno)), [true, false, false]);
    assert!(bench.known(2), "what the disk holds is still known");
    assert_eq!(bench.engine.stats().lost_sends, 2);
}

#[test]
fn a_curve_without_that_of_the_former_process_does_not_know_the_cache() {
    let reach = |bench: &mut Bench| bench.engine.curve(bench.now, None, &[]).unwrap().reach;
    let mut bench = Bench::connected();
    bench.cache(1, 1);
    let former = bench.engine.curves_to_bytes();
    let mut bench = bench.killed();
    bench.connect(1, 8, 1);
    bench.cache(2, 2);
    assert_eq!(reach(&mut bench), PageCount(1), "one eviction was seen");
    former.iter().for_each(|(disk, bytes)| bench.engine.restore_curve(*disk, bytes).unwrap());
    assert_eq!(reach(&mut bench), PageCount(1 << 24));
    // Nothing was cached.
    let mut bench = Bench::connected().killed();
    bench.do_from_disk(GuestOp::Read(blocks(1, 1)), &page(1));
    assert_eq!(reach(&mut bench), PageCount(1 << 24));
}

#[test]
fn another_pool_has_none_of_the_pages() {
    let mut bench = Bench::connected();
    bench.cache(1, 1);
    let mut bench = bench.killed();
    bench.connect(2, 8, 1);
    assert!(bench.known(1) && !bench.cached(1));
}

#[test]
fn a_block_that_a_write_of_the_dead_process_touches_is_unknown() {
    let mut bench = Bench::connected();
    bench.cache(1, 1);
    bench.cache(2, 2);
    assert_eq!(bench.request(1, DISK, write(blocks(1, 1))), [disk_action(1, write(blocks(1, 1)))]);
    let mut bench = bench.killed();
    bench.connect(1, 8, 2);
    assert!(!bench.known(1) && bench.cached(2));
    assert_eq!(bench.engine.requests_in_flight(), 0);
}

#[test]
fn a_request_of_the_dead_process_pins_no_slot() {
    let mut bench = Bench::connected();
    bench.cache(1, 1);
    only_fetch(&bench.read(1, blocks(1, 1)));
    let mut bench = bench.killed();
    bench.connect(1, 8, 1);
    assert_eq!(bench.engine.index().pinned_slots(), PageCount(0));
    assert_eq!(bench.engine.status().slots, SlotCounts { free: 7, used: 1, draining: 0 });
    bench.engine.resize(bench.now, PageCount(0), PageCount(0));
    assert_eq!(bench.actions(), [set_size(PageCount(0))]);
}

#[test]
fn off_is_off_also_for_a_successor() {
    let mut bench = Bench::connected();
    bench.cache(1, 1);
    let words = bench.engine.index().words().clone();
    let off = EngineConfig { cache: PageCount(0), ..config() };
    let engine = DiskEngine::resume(&off, words, Origin::Own).map_err(|unusable| unusable.reason).unwrap();
    assert_eq!((engine.index().known_blocks(), engine.index().slot_counts().used), (PageCount(0), 0));
}

#[test]
fn a_failed_flush_stays_failed() {
    let mut bench = Bench::connected();
    bench.request(1, DISK, GuestOp::Flush);
    assert_eq!(bench.disk_done(1, Err(EIO), &[]), [fail(1)]);
    let mut bench = bench.killed();
    bench.request(1, DISK, GuestOp::Flush);
    assert_eq!(bench.disk_done(1, Ok(()), &[]), [fail(1)]);
    bench.request(2, OTHER_DISK, GuestOp::Flush);
    bench.engine.handle_disk_done(bench.now, RequestId(2), Ok(()), &[]);
    assert_eq!(bench.actions(), [complete(2)]);
}

#[test]
fn off_leaves_nothing_to_resume() {
    let mut bench = Bench::connected();
    bench.cache(1, 1);
    bench.engine.resize(bench.now, PageCount(0), PageCount(0));
    bench.grant();
    let mut bench = bench.killed();
    bench.connect(1, 0, 1);
    assert!(!bench.known(1) && !bench.cached(1));
}

#[test]
fn a_smaller_cache_than_before_keeps_the_newest_pages() {
    let mut bench = Bench::connected();
    for bno in 1..=8 {
        bench.cache(bno, u8::try_from(bno).unwrap());
    }
    let words = bench.engine.index().words().clone();
    let smaller = EngineConfig { cache: PageCount(2), ..config() };
    let engine = DiskEngine::resume(&smaller, words, Origin::Own).map_err(|unusable| unusable.reason).unwrap();
    let mut bench = Bench { engine, now: Nanos(1) };
    bench.engine.describe_disk(DISK, 1 << 40, false);
    bench.engine.set_servers(bench.now, &[SERVER], Leaving::AtOnce);
    bench.connect(1, 8, 8);
    assert_eq!((1..=8).filter(|bno| bench.cached(*bno)).collect::<Vec<_>>(), [7, 8]);
}

/// An upgrade that does not wait for a server that owes pages: the slot of such a page is pinned, so the successor must not
/// use the index as it is.
#[test]
fn an_engine_that_is_owed_pages_is_not_closed() {
    let mut bench = Bench::connected();
    bench.cache(1, 1);
    let fetch = only_fetch(&bench.read(1, blocks(1, 1)));
    let successor = |bench: &Bench| {
        let words = bench.engine.index().words().clone();
        DiskEngine::resume(&config(), words, Origin::Own).map_err(|unusable| unusable.reason).unwrap()
    };
    assert!(bench.engine.is_owed_pages());
    bench.engine.close();
    let engine = successor(&bench);
    assert!(!engine.index().was_closed());
    assert_eq!(engine.index().pinned_slots(), PageCount(0));
    assert_eq!(engine.status().slots, SlotCounts { free: 7, used: 1, draining: 0 });
    // No other program took over, and the page comes.
    bench.engine.reopen();
    assert_eq!(bench.page_comes(fetch, 1), deliver(1, 0));
    bench.engine.close();
    assert!(successor(&bench).index().was_closed());
}

/// It was killed between two words of the pool.
#[test]
fn slots_that_no_server_is_known_to_have_are_given_up() {
    let mut bench = Bench::connected();
    bench.cache(1, 1);
    let valid = 32;
    let mut words = bench.engine.index().words().clone();
    assert_eq!(words[valid], 1, "the first word of the first pool");
    words[valid] = 0;
    let engine = DiskEngine::resume(&config(), words, Origin::Own).map_err(|unusable| unusable.reason).unwrap();
    let mut bench = Bench { engine, now: Nanos(1) };
    bench.engine.describe_disk(DISK, 1 << 40, false);
    bench.engine.set_servers(bench.now, &[SERVER], Leaving::AtOnce);
    bench.connect(1, 8, 1);
    bench.work();
    assert!(bench.known(1) && !bench.cached(1));
    assert_eq!(bench.engine.index().slot_counts(), SlotCounts { free: 8, used: 0, draining: 0 });
}
