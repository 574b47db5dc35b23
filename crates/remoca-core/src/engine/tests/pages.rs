//! Evicted pages: which are admitted, and what is admitted without them.

use super::*;

/// Asserts that every reported page is in exactly one of the six counters.
fn assert_counted(bench: &Bench) {
    let s = bench.engine.stats();
    let judged = s.evictions_admitted + s.evictions_duplicate + s.evictions_zero + s.evictions_unmatched;
    let sum = judged + s.evictions_dropped + s.evictions_passed_over;
    assert_eq!(s.evictions_reported, sum);
}

#[test]
fn only_what_the_disk_holds_is_admitted() {
    let mut bench = Bench::connected();
    let slot = bench.cache(3, 1);
    assert_eq!(slot, SlotIndex(0));
    assert_eq!(bench.engine.handle_evicted(&page(1)), Evicted::Duplicate);
    assert_eq!(bench.engine.handle_evicted(&page(9)), Evicted::Unmatched, "never seen");
    assert_eq!(bench.engine.handle_evicted(&page(0)), Evicted::Zero);
    bench.do_from_disk(write(blocks(3, 1)), &page(2));
    let stale = bench.engine.handle_evicted(&page(1));
    assert_eq!(stale, Evicted::Duplicate, "the server has it still, but no block leads there");
    assert!(!bench.cached(3));
    assert_counted(&bench);
    assert_eq!(bench.engine.stats().evictions_reported, 5);
}

#[test]
fn blocks_of_equal_content_share_a_slot_and_all_hit() {
    let mut bench = Bench::connected();
    for bno in 3..6 {
        bench.do_from_disk(GuestOp::Read(blocks(bno, 1)), &page(1));
    }
    assert!(matches!(bench.engine.handle_evicted(&page(1)), Evicted::Admit(_)));
    assert_eq!(bench.engine.handle_evicted(&page(1)), Evicted::Duplicate);
    assert_eq!(bench.engine.index().slot_counts().used, 1);
    for bno in 3..6 {
        let fetch = only_fetch(&bench.read(0, blocks(bno, 1)));
        assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0));
        assert_eq!(bench.actions(), [complete(0)]);
    }
}

#[test]
fn pages_that_are_looked_at_together_are_judged_one_by_one() {
    let read = || {
        let mut bench = Bench::connected();
        bench.do_from_disk(GuestOp::Read(blocks(3, 3)), &[page(1), page(2), page(3)].concat());
        bench
    };
    let (mut one_by_one, mut together) = (read(), read());
    let values = [1, 2, 1, 9, 0, 3, 2, 3];
    let pages = values.map(|value| [value; PAGE_SIZE]);
    let expected: Vec<_> = pages.iter().map(|page| one_by_one.engine.handle_evicted(page)).collect();
    assert!(matches!(expected[..3], [Evicted::Admit(_), Evicted::Admit(_), Evicted::Duplicate]));
    for count in [3, 5] {
        let from = if count == 3 { 0 } else { 3 };
        let contents = together.engine.look_at_evicted(&pages[from..from + count]);
        assert_eq!(contents.iter().flatten().count(), count);
        for (content, expected) in contents.into_iter().flatten().zip(&expected[from..]) {
            assert_eq!(together.engine.handle_evicted_content(content), *expected);
        }
    }
    assert_counted(&together);
}

#[test]
fn a_full_way_to_the_server_drops_pages() {
    let mut bench = Bench::new(EngineConfig { send_window: 1, ..config() });
    bench.connect(1, 8, 0);
    bench.do_from_disk(GuestOp::Read(blocks(3, 2)), &[page(1), page(2)].concat());
    assert!(matches!(bench.engine.handle_evicted(&page(1)), Evicted::Admit(_)));
    assert_eq!(bench.engine.handle_evicted(&page(2)), Evicted::Dropped);
    assert_eq!(bench.engine.handle_evicted(&page(9)), Evicted::Unmatched);
    bench.engine.handle_sent(SERVER, 1);
    assert!(matches!(bench.engine.handle_evicted(&page(2)), Evicted::Admit(_)));
    assert_counted(&bench);
}

#[test]
fn a_page_that_is_evicted_again_while_there_is_no_room_becomes_the_newest() {
    let mut bench = Bench::new(EngineConfig { send_window: 1, cache: PageCount(3), ..config() });
    bench.connect(1, 3, 0);
    for bno in [1, 2] {
        bench.cache(bno, u8::try_from(bno).unwrap());
        bench.engine.handle_sent(SERVER, 1);
    }
    let fetch = only_fetch(&bench.read(0, blocks(1, 1)));
    assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0));
    bench.actions();
    // There is a slot for this one, and no room for another one on the way.
    bench.cache(3, 3);
    assert_eq!(bench.engine.handle_evicted(&page(1)), Evicted::Duplicate);
    bench.engine.handle_sent(SERVER, 1);
    bench.cache(4, 4);
    assert_eq!([1, 2, 3, 4].map(|bno| bench.cached(bno)), [true, false, true, true]);
}

#[test]
fn without_a_server_or_switched_off_pages_are_dropped() {
    let mut bench = Bench::new(config());
    bench.do_from_disk(GuestOp::Read(blocks(3, 1)), &page(1));
    assert_eq!(bench.engine.handle_evicted(&page(1)), Evicted::Dropped);
    bench.connect(1, 8, 0);
    bench.engine.resize(bench.now, PageCount(0), PageCount(0));
    assert_eq!(bench.engine.handle_evicted(&page(1)), Evicted::Dropped);
    assert!(!bench.known(3));
    assert_counted(&bench);
}

#[test]
fn a_slot_with_an_outstanding_request_is_no_victim() {
    let mut bench = Bench::new(EngineConfig { cache: PageCount(1), ..config() });
    bench.connect(1, 1, 0);
    let slot = bench.cache(3, 1);
    let fetch = only_fetch(&bench.read(0, blocks(3, 1)));
    bench.do_from_disk(GuestOp::Read(blocks(4, 1)), &page(2));
    assert_eq!(bench.engine.handle_evicted(&page(2)), Evicted::Dropped);
    bench.page_comes(fetch, 1);
    bench.actions();
    assert_eq!(bench.engine.handle_evicted(&page(2)), Evicted::Admit(admitted(slot)));
}

#[test]
fn an_agent_whose_pages_never_match_is_told_to_send_fewer() {
    let mut bench = Bench::connected();
    assert_eq!(bench.engine.advice(), 0);
    let send = |bench: &mut Bench, count: usize| {
        for _ in 0..count {
            bench.engine.handle_evicted(&page(9));
        }
    };
    send(&mut bench, 4096);
    assert_eq!(bench.engine.advice(), 4);
    send(&mut bench, 1024);
    assert_eq!(bench.engine.advice(), 16);
    send(&mut bench, 4096);
    assert_eq!(bench.engine.advice(), 1024, "and no fewer");
    bench.cache(3, 1);
    for _ in 0..64 {
        bench.engine.handle_evicted(&page(1));
    }
    assert_eq!(bench.engine.advice(), 0, "matches bring everything back");
}

#[test]
fn while_the_cache_is_off_the_agent_is_told_to_send_what_the_curves_need() {
    let mut bench = Bench::connected();
    let size = bench.engine.status().wanted;
    bench.engine.resize(bench.now, PageCount(0), PageCount(0));
    assert_eq!(bench.engine.advice(), 8);
    bench.engine.keep_curves(false);
    assert_eq!(bench.engine.advice(), 1024, "all but stop");
    bench.engine.resize(bench.now, size, PageCount(0));
    assert_eq!(bench.engine.advice(), 0);
}

#[test]
fn without_an_agent_blocks_are_admitted_as_they_are_read() {
    let mut bench = Bench::new(EngineConfig { has_port: false, ..config() });
    bench.connect(1, 8, 0);
    bench.read(0, blocks(3, 2));
    let actions = bench.disk_done(0, Ok(()), &[page(1), page(2)].concat());
    let send = |slot, offset| Action::SendBlock { admitted: admitted(SlotIndex(slot)), request: RequestId(0), offset };
    assert_eq!(actions, [send(0, 0), send(1, 4096), complete(0)]);
    // A read that hits keeps the page: it will not be sent again.
    let fetch = only_fetch(&bench.read(0, blocks(3, 1)));
    bench.page_comes(fetch, 1);
    bench.actions();
    let newest = bench.engine.index().queue(POOL).last().map(|(slot, _)| slot);
    assert_eq!(newest, Some(SlotIndex(0)));
}

#[test]
fn what_is_read_once_replaces_what_was_read_once() {
    let mut bench = Bench::new(EngineConfig { has_port: false, ..config() });
    bench.connect(1, 8, 0);
    for bno in 0..8 {
        bench.do_from_disk(GuestOp::Read(blocks(bno, 1)), &page(u8::try_from(bno + 1).unwrap()));
    }
    let fetch = only_fetch(&bench.read(0, blocks(0, 1)));
    bench.page_comes(fetch, 1);
    bench.actions();
    // A long stream: one block in 32 enters as the newest, the others only at the head.
    for bno in 8..40 {
        bench.do_from_disk(GuestOp::Read(blocks(bno, 1)), &page(u8::try_from(bno + 1).unwrap()));
    }
    let survivors = (0..8).filter(|bno| bench.cached(*bno)).count();
    assert!(survivors >= 6, "a stream pushes out little: {survivors} of 8 are left");
    assert!((8..40).any(|bno| bench.cached(bno)));
}

#[test]
fn an_agent_that_falls_silent_is_noticed_and_so_is_its_return() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    assert_eq!(bench.engine.status().admission, Admission::Evictions);
    for bno in 0..=64 {
        bench.do_from_disk(GuestOp::Read(blocks(100 + bno, 1)), &page(100));
    }
    assert_eq!(bench.engine.status().admission, Admission::Reads);
    bench.engine.handle_evicted(&page(9));
    assert_eq!(bench.engine.status().admission, Admission::Evictions);
}
