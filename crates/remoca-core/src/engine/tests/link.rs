//! The memory server: its size, its silence, and what is lost with a connection.

use super::*;

#[test]
fn a_lost_connection_sends_waiting_reads_to_the_disk() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.cache(4, 2);
    let range = blocks(3, 2);
    bench.read(0, range);
    bench.disconnect();
    assert_eq!(bench.actions(), [disk_action(0, GuestOp::Read(range))]);
    assert_eq!(bench.engine.index().pinned_slots(), PageCount(0));
    assert_eq!(bench.engine.stats().fetch_disconnected, 1);
    assert_eq!(bench.read(1, blocks(3, 1)), [disk_action(1, GuestOp::Read(blocks(3, 1)))]);
    bench.disconnect();
    assert_eq!(bench.actions(), [], "told twice");
    bench.connect(1, 8, 2);
    assert!(bench.cached(3) && bench.cached(4), "the same pool has them still");
}

#[test]
fn another_generation_is_an_empty_pool() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.disconnect();
    bench.connect(2, 0, 0);
    assert!(!bench.cached(3) && bench.known(3));
    assert_eq!(bench.engine.status().granted, PageCount(8));
    assert!(matches!(bench.engine.handle_evicted(&page(1)), Evicted::Admit(_)));
}

#[test]
fn pages_that_were_on_the_way_are_given_up() {
    let mut bench = Bench::connected();
    for bno in 0..4 {
        bench.cache(bno, u8::try_from(bno + 1).unwrap());
    }
    bench.disconnect();
    bench.connect(1, 8, 2);
    assert!(bench.cached(0) && bench.cached(1));
    assert!(!bench.cached(2) && !bench.cached(3));
    assert_eq!(bench.engine.stats().lost_sends, 2);
    // And counting goes on from what the server has.
    bench.cache(5, 6);
    bench.disconnect();
    bench.connect(1, 8, 3);
    assert!(bench.cached(5));
}

#[test]
fn a_server_that_counts_more_than_was_sent_has_another_pool() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.disconnect();
    bench.connect(1, 8, 2);
    assert!(!bench.cached(3));
}

#[test]
fn a_server_may_claim_any_numbers() {
    let mut bench = Bench::new(config());
    for sends_received in [u64::MAX, 3, u64::MAX - 1, 0] {
        bench.connect(1, u32::MAX, sends_received);
        bench.cache(3, 1);
        bench.cache(4, 2);
        bench.disconnect();
    }
    bench.greet(1, 4, 2);
    bench.actions();
    bench.engine.handle_size_refused(bench.now, PageCount(u32::MAX));
    assert_eq!(bench.actions(), []);
}

#[test]
fn a_refusal_leads_to_what_there_is_and_is_tried_again() {
    let mut bench = Bench::new(config());
    bench.greet(1, 0, 0);
    assert_eq!(bench.actions(), [Action::SetSize(PageCount(8))]);
    bench.engine.handle_size_refused(bench.now, PageCount(5));
    assert_eq!(bench.actions(), [Action::SetSize(PageCount(5))]);
    bench.engine.handle_sized(bench.now, PageCount(5));
    assert_eq!(bench.actions(), []);
    assert_eq!(bench.engine.status().granted, PageCount(5));
    let retry = bench.engine.next_deadline().expect("the rest is asked for later");
    bench.wait(retry.since_ns(bench.now));
    assert_eq!(bench.timer(), [Action::SetSize(PageCount(8))]);
    bench.engine.handle_size_refused(bench.now, PageCount(0));
    assert_eq!(bench.actions(), [], "nothing can be had");
    assert!(bench.engine.next_deadline().is_some());
}

#[test]
fn a_shrink_moves_the_newest_pages_down_before_it_is_asked_for() {
    let mut bench = Bench::connected();
    for bno in 0..8 {
        bench.cache(bno, u8::try_from(bno + 1).unwrap());
    }
    bench.engine.resize(PageCount(2));
    let actions = bench.actions();
    let moved = |from, to| Action::MovePage { from: SlotIndex(from), to: SlotIndex(to) };
    assert_eq!(actions, [moved(6, 0), moved(7, 1), Action::SetSize(PageCount(2))]);
    bench.engine.handle_sized(bench.now, PageCount(2));
    assert!(bench.cached(6) && bench.cached(7) && !bench.cached(0));
    assert_eq!(bench.engine.index().slot_counts(), SlotCounts { free: 0, used: 2, draining: 0 });
}

#[test]
fn moves_that_were_on_the_way_are_given_up() {
    let mut bench = Bench::connected();
    for bno in 0..8 {
        bench.cache(bno, u8::try_from(bno + 1).unwrap());
    }
    bench.engine.resize(PageCount(2));
    bench.actions();
    bench.disconnect();
    // All sends arrived; whether the moves did, nobody can tell.
    bench.connect(1, 8, 8);
    assert!((0..8).all(|bno| !bench.cached(bno)));
}

#[test]
fn off_forgets_and_on_is_cold() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.engine.resize(PageCount(0));
    assert_eq!(bench.grant(), []);
    assert!(!bench.engine.status().enabled);
    bench.do_from_disk(GuestOp::Read(blocks(3, 1)), &page(1));
    assert!(!bench.known(3));
    bench.engine.resize(PageCount(8));
    bench.grant();
    assert_eq!(bench.read(0, blocks(3, 1)), [disk_action(0, GuestOp::Read(blocks(3, 1)))]);
}

#[test]
fn a_server_that_says_nothing_is_given_up() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.read(0, blocks(3, 1));
    bench.wait(MS * 500);
    assert_eq!(bench.timer(), [disk_too(0, blocks(3, 1))]);
    let deadline = bench.engine.next_deadline().expect("silence ends");
    bench.wait(deadline.since_ns(bench.now));
    assert_eq!(bench.timer(), [Action::GiveUp]);
    assert!(!bench.engine.status().connected);
    assert_eq!(bench.engine.index().pinned_slots(), PageCount(0));
    assert!(bench.engine.next_deadline().is_some_and(|at| at > bench.now), "it is asked again, but not at once");
}

#[test]
fn a_larger_index_takes_everything_along() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    let fetch = only_fetch(&bench.read(0, blocks(3, 1)));
    let layout = bench.engine.needs_layout(PageCount(20), PageCount(64)).expect("20 slots do not fit into 8");
    assert!(layout.slot_limit() >= PageCount(20));
    bench.engine.replace_index(layout, vec![0; layout.words()]);
    assert_eq!(bench.engine.needs_layout(PageCount(20), PageCount(64)), None);
    bench.engine.resize(PageCount(20));
    bench.grant();
    assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0));
    assert!(bench.cached(3));
    assert_eq!(bench.engine.index().slot_counts(), SlotCounts { free: 19, used: 1, draining: 0 });
}

#[test]
fn a_larger_index_takes_over_requests_for_slots_that_were_cut_off() {
    let mut bench = Bench::connected();
    for bno in 0..8 {
        bench.cache(bno, u8::try_from(bno + 1).unwrap());
    }
    let fetch = only_fetch(&bench.read(0, blocks(7, 1)));
    bench.engine.resize(PageCount(2));
    bench.grant();
    let layout = bench.engine.needs_layout(PageCount(20), PageCount(64)).unwrap();
    bench.engine.replace_index(layout, vec![0; layout.words()]);
    bench.engine.resize(PageCount(20));
    bench.grant();
    assert_eq!(bench.engine.index().slot_counts().draining, 1, "slot 7 waits for its reply");
    bench.page_comes(fetch, 8);
    assert_eq!(bench.engine.index().slot_counts().draining, 0);
    assert_eq!(bench.engine.index().pinned_slots(), PageCount(0));
}

#[test]
fn moves_are_given_up_even_when_there_were_too_many_to_remember() {
    let count = 20_000;
    let mut bench = Bench::new(EngineConfig {
        cache: PageCount(2 * count),
        guest_memory: PageCount(2 * count),
        send_window: 2 * count,
        ..config()
    });
    bench.connect(1, 2 * count, 0);
    // Pages only in the upper half of the pool: all of them have to move.
    let mut content = page(1);
    for i in 0..2 * count {
        content[..4].copy_from_slice(&i.to_le_bytes());
        bench.do_from_disk(GuestOp::Read(blocks(u64::from(i), 1)), &content);
        assert!(matches!(bench.engine.handle_evicted(&content), Evicted::Admit(_)));
    }
    bench.engine.resize(PageCount(count));
    assert!(bench.actions().contains(&Action::MovePage { from: SlotIndex(count), to: SlotIndex(0) }));
    bench.disconnect();
    bench.connect(1, 2 * count, u64::from(2 * count));
    assert_eq!(bench.engine.index().slot_counts().used, 0, "no move is known to have arrived");
}

#[test]
fn a_server_that_never_answers_a_setsize_is_given_up() {
    let mut bench = Bench::new(config());
    bench.greet(1, 0, 0);
    assert_eq!(bench.actions(), [Action::SetSize(PageCount(8))]);
    bench.wait(MS);
    assert!(bench.engine.next_deadline().is_some_and(|at| at <= bench.now), "the clock is looked at");
    assert_eq!(bench.timer(), []);
    let deadline = bench.engine.next_deadline().expect("silence ends");
    assert!(deadline > bench.now);
    bench.wait(deadline.since_ns(bench.now));
    assert_eq!(bench.timer(), [Action::GiveUp]);
    assert!(!bench.engine.status().connected);
    bench.connect(2, 0, 0);
    assert_eq!(bench.engine.status().granted, PageCount(8));
    assert_eq!(bench.engine.next_deadline(), None);
}

#[test]
fn a_server_that_gives_another_size_is_not_asked_without_end() {
    let mut bench = Bench::new(config());
    bench.greet(1, 0, 0);
    assert_eq!(bench.actions(), [Action::SetSize(PageCount(8))]);
    bench.engine.handle_sized(bench.now, PageCount(3));
    assert_eq!(bench.actions(), []);
    let retry = bench.engine.next_deadline().expect("it is asked again later");
    bench.wait(retry.since_ns(bench.now));
    assert_eq!(bench.timer(), [Action::SetSize(PageCount(8))]);
    // Nor one that offers a page less with each refusal.
    bench.engine.handle_size_refused(bench.now, PageCount(4));
    assert_eq!(bench.actions(), [Action::SetSize(PageCount(7))]);
    bench.engine.handle_size_refused(bench.now, PageCount(3));
    assert_eq!(bench.actions(), []);
}

#[test]
fn a_size_that_changed_while_the_last_one_was_refused_is_asked_for_at_once() {
    let mut bench = Bench::connected();
    bench.engine.resize(PageCount(2));
    bench.grant();
    bench.engine.resize(PageCount(8));
    assert_eq!(bench.actions(), [Action::SetSize(PageCount(8))]);
    bench.engine.resize(PageCount(1));
    assert_eq!(bench.actions(), [], "one SETSIZE at a time");
    bench.engine.handle_size_refused(bench.now, PageCount(3));
    assert_eq!(bench.actions(), [Action::SetSize(PageCount(1))]);
}

#[test]
fn a_server_that_serves_for_a_second_and_dies_is_not_stormed() {
    let mut bench = Bench::new(config());
    let mut sessions = 0;
    while bench.now < Nanos(60_000 * MS) {
        bench.connect(sessions, 8, 0);
        sessions += 1;
        bench.wait(1000 * MS);
        bench.disconnect();
        while !bench.all_actions().contains(&Action::Ask(SERVER)) {
            let deadline = bench.engine.next_deadline().expect("it is asked again");
            bench.wait(deadline.since_ns(bench.now));
            bench.engine.handle_timer(bench.now);
        }
    }
    assert!((10..=18).contains(&sessions), "{sessions} sessions in a minute");
}
