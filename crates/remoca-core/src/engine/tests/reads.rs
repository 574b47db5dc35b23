//! Reads: what the server answers, and every reason for the disk to answer instead.

use super::*;

#[test]
fn an_evicted_page_comes_back_from_the_server() {
    let mut bench = Bench::connected();
    let slot = bench.cache(3, 1);
    let actions = bench.read(0, blocks(3, 1));
    assert!(matches!(actions[..], [Action::Fetch { at: PoolSlot { slot: asked, .. }, .. }] if asked == slot));
    let fetch = only_fetch(&actions);
    assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0));
    assert_eq!(bench.actions(), [complete(0)]);
    let stats = bench.engine.stats();
    assert_eq!((stats.hit_blocks, stats.missed_blocks, stats.reads_from_cache), (1, 1, 1));
}

#[test]
fn one_block_that_needs_the_disk_brings_the_others_along() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    let range = blocks(3, 2);
    assert_eq!(bench.read(0, range), [disk_action(0, GuestOp::Read(range))]);
    bench.disk_done(0, Ok(()), &[page(1), page(2)].concat());
    let stats = bench.engine.stats();
    assert_eq!((stats.covered_blocks, stats.missed_blocks, stats.hit_blocks), (1, 2, 0));
}

#[test]
fn several_pages_complete_a_read_in_any_order() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.cache(4, 2);
    let actions = bench.read(0, blocks(3, 2));
    let [Action::Fetch { fetch: first, .. }, Action::Fetch { fetch: second, .. }] = actions[..] else {
        panic!("two REQUESTs: {actions:?}")
    };
    assert_eq!(bench.page_comes(second, 2), deliver(0, 4096));
    assert_eq!(bench.actions(), []);
    assert_eq!(bench.page_comes(first, 1), deliver(0, 0));
    assert_eq!(bench.actions(), [complete(0)]);
    assert_eq!(bench.engine.stats().hit_blocks, 2);
}

#[test]
fn zeroes_come_from_nowhere() {
    let mut bench = Bench::connected();
    bench.do_from_disk(GuestOp::WriteZeroes { range: blocks(3, 2), may_unmap: true, durable: false }, &[]);
    let zero = |block: u32| Action::ZeroFill { request: RequestId(0), offset: block * 4096, length: 4096 };
    assert_eq!(bench.read(0, blocks(3, 2)), [zero(0), zero(1), complete(0)]);
    assert_eq!(bench.engine.stats().zero_blocks, 2);
}

#[test]
fn parts_of_blocks_come_from_the_disk() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    let range = ByteRange { offset: 3 * 4096 + 512, length: 512 };
    assert_eq!(bench.read(0, range), [disk_action(0, GuestOp::Read(range))]);
    assert_eq!(bench.engine.stats().misaligned_reads, 1);
}

#[test]
fn a_wrong_page_is_a_miss_for_the_whole_request() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.cache(4, 2);
    let range = blocks(3, 2);
    let actions = bench.read(0, range);
    let [Action::Fetch { fetch: first, .. }, Action::Fetch { fetch: second, .. }] = actions[..] else {
        panic!("two REQUESTs: {actions:?}")
    };
    assert_eq!(bench.page_comes(first, 1), deliver(0, 0));
    assert_eq!(bench.page_comes(second, 9), PageOutcome::Wrong);
    assert_eq!(bench.actions(), [disk_action(0, GuestOp::Read(range))]);
    assert!(!bench.cached(4), "the slot of a wrong page is given up");
    assert!(bench.cached(3));
    assert_eq!(bench.disk_done(0, Ok(()), &[page(1), page(2)].concat()), [complete(0)]);
    let stats = bench.engine.stats();
    assert_eq!((stats.fetch_wrong, stats.hit_blocks), (1, 0), "a block is counted once, by what answered it");
    bench.disconnect();
    assert_eq!([SERVER, ServerNumber(1)].map(|server| bench.engine.lies_of(server)), [1, 0]);
    assert_eq!(stats.missed_blocks + stats.covered_blocks, stats.read_blocks);
}

#[test]
fn a_missing_page_is_a_miss() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    let fetch = only_fetch(&bench.read(0, blocks(3, 1)));
    bench.engine.handle_missing(bench.now, SERVER, fetch);
    assert_eq!(bench.actions(), [disk_action(0, GuestOp::Read(blocks(3, 1)))]);
    assert!(!bench.cached(3) && bench.known(3));
    assert_eq!(bench.engine.stats().fetch_missing, 1);
}

#[test]
fn replies_that_nobody_asked_for_do_nothing() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    assert_eq!(bench.page_comes(FetchId(77), 1), PageOutcome::Unexpected);
    bench.engine.handle_missing(bench.now, SERVER, FetchId(0));
    let fetch = only_fetch(&bench.read(0, blocks(3, 1)));
    assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0));
    assert_eq!(bench.page_comes(fetch, 1), PageOutcome::Unexpected);
    assert_eq!(bench.actions(), [complete(0)]);
    assert_eq!((bench.engine.stats().fetch_unexpected, bench.engine.lies_of(SERVER)), (3, 3));
}

/// A page that waits in this process never was at the server.
#[test]
fn no_server_is_blamed_for_a_page_that_it_never_had() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    let fetch = only_fetch(&bench.read(0, blocks(3, 1)));
    let mut unsent = |fetch| bench.engine.handle_unsent_page(bench.now, SERVER, fetch, &page(9));
    assert_eq!([fetch, FetchId(77)].map(&mut unsent), [PageOutcome::Wrong, PageOutcome::Unexpected]);
    assert_eq!((bench.engine.stats().fetch_wrong, bench.engine.lies_of(SERVER)), (1, 0));
}

#[test]
fn with_all_requests_in_use_the_disk_answers() {
    let mut bench = Bench::new(EngineConfig { fetch_limit: 1, ..config() });
    bench.connect(1, 8, 0);
    bench.cache(3, 1);
    only_fetch(&bench.read(0, blocks(3, 1)));
    assert_eq!(bench.read(1, blocks(3, 1)), [disk_action(1, GuestOp::Read(blocks(3, 1)))]);
}
