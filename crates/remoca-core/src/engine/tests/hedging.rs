//! Two answers to one read, and a server that is slower than the disk.

use super::scenario::{A, B, DISK_NS, HIT_NS, RANGE, Scenario, US};
use super::*;

/// 5 % of the disk's median, which is known to 6 %.
const LATE_NS: u64 = 400 * US;

fn near(value: u64, exact: u64) -> bool {
    value.abs_diff(exact) <= exact / 14
}

#[test]
fn a_sleeper_finds_a_read_that_is_alone_late_in_time_and_one_of_several_a_little_later() {
    let mut it = Scenario::trained();
    it.waiting(A);
    let late = it.engine.next_deadline().unwrap();
    assert_eq!(it.engine.next_wake(), Some(late));
    for other in 1..8 {
        it.waiting(other);
    }
    assert_eq!(it.engine.next_deadline(), Some(late));
    let slack = it.engine.next_wake().unwrap().since_ns(late);
    assert!(slack > it.late_after() && slack <= (4 * it.late_after()).min(2 * MS), "{slack}");
    // Once they are answered, it is alone again.
    for other in 1..8 {
        it.server_answers(other);
    }
    assert_eq!(it.engine.next_wake(), Some(late));
    // A thread that is awake acts in time.
    let ns = late.since_ns(it.now);
    assert_eq!(it.after(ns).timer()[0], it.too(A));
}

#[test]
fn the_page_comes_first() {
    let mut it = Scenario::trained();
    it.hedged(A).server_answers(A);
    assert_eq!(it.engine.requests_in_flight(), 0);
    // Whatever the disk says now, nothing is learnt.
    it.do_from_disk(write(RANGE), &page(2));
    it.abandoned_ends(A);
    assert!(!it.cached(3));
    assert_eq!((it.stats().hedges, it.stats().hedges_won, it.stats().hit_blocks), (1, 0, 21));
    it.blocks_add_up().reuse_number_of(A);
}

#[test]
fn the_disk_answers_first() {
    let mut it = Scenario::trained();
    it.hedged(A).after(DISK_NS).disk_answers(A);
    assert_eq!(it.pinned(), 1, "the slot is the REQUEST's until its page has come");
    // The old page is not for the other read with the same ID.
    it.reuse_number_of(A).page_is_late(A);
    assert_eq!(it.pinned(), 0);
    assert_eq!((it.stats().hedges, it.stats().hedges_won, it.stats().fetch_late), (1, 1, 1));
}

#[test]
fn the_old_page_is_not_for_a_read_of_the_same_number_that_waits_for_the_same_slot() {
    let mut it = Scenario::trained();
    it.hedged(A).disk_answers(A).waiting(B);
    assert_eq!(it.id(A), it.id(B));
    assert_ne!(it.fetches(A), it.fetches(B));
    it.page_is_late(A).server_answers(B);
}

#[test]
fn the_disk_fails_and_the_page_comes() {
    let mut it = Scenario::trained();
    it.hedged(A).disk_fails(A).server_answers(A);
    assert_eq!(it.stats().disk_errors, 1);
}

#[test]
fn the_page_comes_and_the_disk_fails() {
    Scenario::trained().hedged(A).server_answers(A).disk_fails(A).hits(1, HIT_NS);
}

#[test]
fn the_disk_fails_and_the_server_is_silent() {
    let mut it = Scenario::trained();
    it.hedged(A).disk_fails(A).until_due();
    it.asks_disk(A).disk_fails_guest(A);
}

#[test]
fn the_first_error_of_a_disk_that_is_asked_after_a_timeout_is_not_the_guests() {
    let mut it = Scenario::new(EngineConfig { hedge: false, ..config() }, 0, 0);
    it.waiting(A).after(5 * MS).asks_disk(A).disk_fails(A).server_answers(A);
    it.waiting(A).after(5 * MS).asks_disk(A).disk_fails(A).after(5 * MS).asks_disk(A).disk_fails_guest(A);
}

#[test]
fn the_disk_fails_and_the_server_has_no_page() {
    let mut it = Scenario::trained();
    it.hedged(A).disk_fails(A).server_has_no_page(A);
    assert_eq!(it.actions(), [disk_action(it.id(A), GuestOp::Read(RANGE))]);
    it.disk_fails_guest(A);
}

#[test]
fn a_wrong_page_after_the_disk_was_asked() {
    let mut it = Scenario::trained();
    let fetch = it.hedged(A).fetches(A)[0];
    assert_eq!(it.page_comes(fetch, 9), PageOutcome::Wrong);
    assert_eq!(it.actions(), [], "the disk already reads");
    it.disk_answers(A).blocks_add_up();
    assert_eq!((it.stats().hedges, it.stats().hedges_won, it.stats().fetch_wrong), (1, 0, 1));
}

#[test]
fn the_disk_answers_when_some_of_the_pages_have_come() {
    let mut it = Scenario::trained();
    it.cache(4, 2);
    it.begin(A, DISK, blocks(3, 2)).after(LATE_NS).asks_disk(A);
    let (id, fetches) = (it.id(A), it.fetches(A));
    assert_eq!(fetches.len(), 2);
    assert_eq!(it.page_comes(fetches[0], 1), deliver(id, 0));
    assert_eq!(it.disk_done(id, Ok(()), &[page(1), page(2)].concat()), [complete(id)]);
    assert_eq!(it.page_comes(fetches[1], 2), PageOutcome::Late);
    assert_eq!(it.pinned(), 0);
}

#[test]
fn a_write_overlaps_both_answers() {
    // The disk answers the read with what the write left half done: nothing is learnt from it.
    let (op, id) = (write(RANGE), 97);
    let mut it = Scenario::trained();
    it.hedged(A);
    assert_eq!(it.request(id, DISK, op), [disk_action(id, op)]);
    it.disk_answers(A);
    assert!(!it.known(3));
    assert_eq!(it.disk_done(id, Ok(()), &page(2)), [complete(id)]);
    it.page_is_late(A);
    assert!(it.known(3) && !it.cached(3), "the write's content is known, the old page is not it");

    // The page arrives while the write is in flight. It is the content that the block had when the read began.
    let mut it = Scenario::trained();
    it.hedged(A).request(id, DISK, op);
    it.server_answers(A).disk_done(id, Ok(()), &page(2));
    // The disk read what the block was: a read after the write is answered from what the write left.
    it.abandoned_ends(A);
    let known = it.engine.index().known(BlockId { disk: DISK, bno: BlockNumber(3) });
    assert_eq!(known, Some(it.engine.prints.page(&page(2))));
}

#[test]
fn flushes_and_discards_mind_no_abandoned_read() {
    let mut it = Scenario::trained();
    it.hedged(A).server_answers(A);
    it.do_from_disk(GuestOp::Flush, &[]);
    it.do_from_disk(GuestOp::Discard(RANGE), &[]);
    it.abandoned_ends(A);
    assert!(!it.known(3));
}

#[test]
fn the_connection_is_lost_with_hedges_in_flight() {
    let mut it = Scenario::trained();
    it.hedged(A).hedged(B).server_answers(A).disconnect();
    assert_eq!(it.actions(), [], "the disk already reads");
    assert_eq!(it.pinned(), 0);
    it.disk_answers(B).abandoned_ends(A).connect(1, 8, 1);
    it.hits(1, HIT_NS);
}

#[test]
fn an_uncertain_disk_makes_hedges_teach_nothing() {
    let mut it = Scenario::trained();
    it.hedged(A).engine.handle_content_uncertain(DISK);
    it.disk_answers(A);
    assert!(!it.known(3));
}

#[test]
fn late_is_a_small_part_of_the_disks_time() {
    let it = Scenario::trained();
    assert!(near(it.late_after(), DISK_NS / 20), "{}", it.late_after());
}

#[test]
fn slow_answers_do_not_make_late_later() {
    let mut it = Scenario::trained();
    for _ in 0..50 {
        it.hits(49, HIT_NS).hedged(A).after(5 * MS).server_answers(A).after(DISK_NS - 5 * MS).abandoned_ends(A);
    }
    let server = it.engine.status().hedging.server.expect("two thousand reads say something");
    assert!(server.p99_ns > 4 * MS, "the p99 is that of slow answers: {server:?}");
    assert!(near(it.late_after(), 2 * HIT_NS + HIT_NS / 8), "{}", it.late_after());
}

#[test]
fn a_server_that_always_takes_longer_is_late_after_its_own_p99() {
    // All parts of a bucket of the estimate.
    for ns in (0..8).map(|part| MS + part * MS / 64) {
        let mut it = Scenario::new(config(), 20, DISK_NS);
        it.hits(300, ns).breaker_is(BreakerState::Closed);
        assert!((ns..=ns + ns / 5).contains(&it.late_after()), "{} for {ns}", it.late_after());
        assert_eq!((it.stats().hedges, it.stats().fetch_timeouts), (0, 0));
    }
}

#[test]
fn while_nothing_is_known_of_the_disk_it_is_not_asked_soon() {
    let mut it = Scenario::new(config(), 0, 0);
    assert_eq!(it.waiting(A).after(4 * MS).timer(), []);
    it.after(MS).asks_disk(A);
}

#[test]
fn waiting_for_the_server_does_not_make_the_disk_look_slow() {
    let mut it = Scenario::trained();
    for _ in 0..3 {
        it.waiting(A).after(50 * MS).asks_disk(A).after(DISK_NS).disk_answers(A).page_is_late(A);
    }
    let disk = it.engine.status().hedging.disk.expect("reads of the disk were enough");
    assert!(near(disk.p50_ns, DISK_NS) && near(disk.p99_ns, DISK_NS), "{disk:?}");
}

#[test]
fn hedges_for_nothing_are_few() {
    let mut it = Scenario::trained();
    let mut hedges = 0_u32;
    for _ in 0..1000 {
        let actions = it.begin(A, DISK, RANGE).after(LATE_NS).timer();
        it.server_answers(A);
        if !actions.is_empty() {
            assert!(!it.is_probe(A));
            assert_eq!(actions, [it.too(A)]);
            hedges += 1;
        } else if !it.is_probe(A) {
            continue;
        }
        it.after(DISK_NS).abandoned_ends(A);
    }
    // 128 at the start, and one for every 32 answers. Meanwhile the engine learns the normal latency, and no read is
    // late any longer.
    assert!((1..=128 + 1000 / 32).contains(&hedges), "{hedges}");
    assert_eq!(it.stats().hedges, u64::from(hedges));
}

#[test]
fn without_credit_the_disk_is_asked_after_twice_its_median() {
    let mut it = Scenario::new(EngineConfig { fetch_limit: 1000, ..config() }, 20, DISK_NS);
    for name in 0..200 {
        it.waiting(name);
    }
    assert_eq!(it.after(LATE_NS).timer().len(), 128, "the credit is for that many at once");
    // The server answers all of those after all; the credit is used up.
    for name in 0..128 {
        it.server_answers(name).abandoned_ends(name);
    }
    it.until_due();
    assert_eq!(it.timer().len(), 72);
    assert_eq!((it.stats().hedges, it.stats().fetch_timeouts), (128, 72));
}

impl Scenario {
    /// Begins where the disk is known, and the server may be asked for many pages at a time.
    fn wide() -> Self {
        Self::new(EngineConfig { fetch_limit: 1000, ..config() }, 20, DISK_NS)
    }

    /// Spends all credit: the server answers each of 128 hedges first.
    fn waste_credit(&mut self) -> &mut Self {
        (0..128).for_each(|name| _ = self.waiting(name));
        assert_eq!(self.after(MS).timer().len(), 128);
        (0..128).for_each(|name| _ = self.server_answers(name));
        self.after(DISK_NS);
        (0..128).for_each(|name| _ = self.abandoned_ends(name));
        self
    }
}

#[test]
fn as_the_second_half_of_the_credit_is_spent_late_is_later() {
    let mut it = Scenario::wide();
    let mut first = 0;
    let (soon, in_time) = (DISK_NS / 20, DISK_NS / 12);
    for (count, late_ns) in [(64_u32, soon), (32, u64::midpoint(soon, in_time)), (32, in_time)] {
        (first..first + count).for_each(|name| _ = it.waiting(name));
        first += count;
        assert_eq!(it.after(MS).timer().len(), count as usize);
        assert!(near(it.late_after(), late_ns), "{} after {first} hedges", it.late_after());
    }
}

#[test]
fn every_32_answers_of_the_server_earn_a_hedge() {
    let mut it = Scenario::wide();
    it.waste_credit();
    (0..5).for_each(|name| _ = it.waiting(name));
    assert_eq!(it.after(2 * MS).timer().len(), 4, "of 128 answers");
}

#[test]
fn another_session_of_the_only_pool_has_all_credit() {
    let mut it = Scenario::wide();
    it.waste_credit().disconnect();
    it.connect(1, 8, 1);
    it.waste_credit();
}

#[test]
fn a_hedge_of_a_page_that_the_server_has_not_costs_no_credit() {
    let mut it = Scenario::trained();
    for _ in 0..200 {
        it.hedged(A).server_has_no_page(A).after(DISK_NS).disk_answers(A);
        assert!(matches!(it.engine.handle_evicted(&page(1)), Evicted::Admit(_)));
        it.engine.handle_sent(SERVER, 1);
    }
}

#[test]
fn with_hedging_off_the_disk_is_asked_after_twice_its_median() {
    let mut it = Scenario::new(EngineConfig { hedge: false, ..config() }, 20, DISK_NS);
    assert_eq!(it.waiting(A).after(12 * MS).timer(), []);
    // The first answer is still the guest's.
    it.after(3 * MS).asks_disk(A).server_answers(A);
    assert_eq!((it.stats().hedges, it.stats().fetch_timeouts), (0, 1));
}

#[test]
fn a_silent_server_is_left_alone_and_comes_back_with_its_first_answer() {
    let mut it = Scenario::trained();
    let owed = it.losses(16);
    it.breaker_is(BreakerState::Open);
    assert_eq!(it.stats().breaker_openings, 1);
    it.disk_only(16).disk_answers(16);
    for name in owed {
        it.page_is_late(name);
    }
    it.probe_wins(4).breaker_is(BreakerState::Closed).hits(3, HIT_NS);
}

#[test]
fn probes_that_lose_come_more_and_more_seldom() {
    let mut it = Scenario::trained();
    it.losses(16);
    let (mut probes, begin) = (0, it.now);
    while it.now.since_ns(begin) < 9_000 * MS {
        // The guest waits only for the disk.
        it.begin(A, DISK, RANGE).after(DISK_NS).disk_answers(A);
        probes += u64::from(it.is_probe(A));
    }
    // Pauses of 10, 20, 40 ... 1000 ms.
    assert!((10..=16).contains(&probes), "{probes}");
    assert_eq!(probes, it.stats().probes);
}

#[test]
fn one_probe_is_in_flight_at_a_time_and_other_reads_decide_nothing() {
    let mut it = Scenario::trained();
    it.open_breaker().probe(A).disk_only(B).server_answers(A).breaker_is(BreakerState::HalfOpen);
    it.abandoned_ends(A).disk_answers(B).probe_wins(2);
    // A probe that loses starts the count again.
    it.probe(A).after(DISK_NS).disk_answers(A).breaker_is(BreakerState::Open);
    // The page of a probe that lost is no reason for another one.
    it.page_is_late(A).disk_only(B).disk_answers(B);
    it.after(20 * MS).probe_wins(4).breaker_is(BreakerState::Closed);
}

#[test]
fn a_probe_without_a_page_is_no_probe() {
    let mut it = Scenario::trained();
    it.cache(4, 2);
    it.open_breaker().probe(A).server_has_no_page(A);
    assert_eq!(it.actions(), []);
    it.disk_answers(A).begin(B, DISK, blocks(4, 1));
    assert!(it.is_probe(B));
    it.disk_fails(B);
}

#[test]
fn a_probe_with_a_page_that_has_not_left_is_no_probe() {
    let mut it = Scenario::trained();
    it.open_breaker();
    for _ in 0..8 {
        it.probe(A).page_has_not_left(A).breaker_is(BreakerState::Open).after(DISK_NS).abandoned_ends(A);
    }
    it.probe_wins(4).breaker_is(BreakerState::Closed);
}

#[test]
fn a_page_that_has_not_left_does_not_show_that_its_server_works() {
    let mut it = Scenario::trained();
    let owed = it.losses(16);
    it.breaker_is(BreakerState::Open);
    for name in owed {
        let (now, fetch) = (it.now, it.fetches(name)[0]);
        assert_eq!(it.engine.handle_unsent_page(now, SERVER, fetch, &page(1)), PageOutcome::Late);
    }
    it.disk_only(16).disk_answers(16);
    it.after(20 * MS).probe_wins(4).breaker_is(BreakerState::Closed);
}

#[test]
fn a_disk_that_fails_every_probe_is_left_for_the_server() {
    let mut it = Scenario::trained();
    it.losses(16);
    for _ in 0..4 {
        it.after(20 * MS).probe(A).disk_fails(A);
        // The probe is still in flight.
        it.disk_only(B).disk_fails_guest(B).server_answers(A);
    }
    it.breaker_is(BreakerState::Closed).hits(1, HIT_NS);
}

#[test]
fn a_probe_that_nobody_answers_is_followed_by_another() {
    let mut it = Scenario::trained();
    it.open_breaker().probe(A).disk_fails(A).after(2 * DISK_NS + MS).asks_disk(A).disk_fails_guest(A);
    it.probe(A).server_answers(A).breaker_is(BreakerState::HalfOpen);
}

#[test]
fn what_waits_when_the_breaker_opens_goes_to_the_disk_when_it_is_late() {
    let mut it = Scenario::trained();
    it.losses(15);
    it.hedged(A).waiting(B).disk_answers(A).breaker_is(BreakerState::Open);
    it.after(LATE_NS).asks_disk(B).server_answers(B).abandoned_ends(B);
}

#[test]
fn slow_answers_now_and_then_open_nothing() {
    let mut it = Scenario::trained();
    for _ in 0..20 {
        let owed = it.losses(15);
        it.hits(1, HIT_NS);
        for name in owed {
            it.page_is_late(name);
        }
    }
    it.breaker_is(BreakerState::Closed);
    assert_eq!(it.stats().hedges_won, 300, "a hedge that the disk wins costs no credit");
}

#[test]
fn the_cache_steps_aside_where_the_disk_is_faster() {
    for server_ns in [120 * US, 500 * US, MS] {
        let mut it = Scenario::new(config(), 300, 100 * US);
        let mut reads = 0;
        while it.engine.status().hedging.breaker == BreakerState::Closed {
            let late = it.begin(A, DISK, RANGE).until_due();
            let hedged = !it.timer().is_empty();
            assert!(hedged && late < 10 * US, "it costs the guest 5 % of the disk's time");
            it.after((100 * US).min(server_ns - late)).disk_answers(A).page_is_late(A);
            reads += 1;
        }
        assert_eq!(reads, 16, "it is noticed at once");
    }
}

/// A server that is nearly as slow as the disk is compared with it often, on reads that wait for neither.
#[test]
fn a_disk_that_becomes_faster_than_the_server_is_noticed_by_probes() {
    let mut it = Scenario::trained();
    it.hits(300, 3 * MS);
    let (mut alone, mut probes) = (0, 0);
    while probes < 4 {
        if it.begin(A, DISK, RANGE).is_probe(A) {
            it.after(2 * MS).disk_answers(A).page_is_late(A);
            probes += 1;
        } else {
            it.after(3 * MS).server_answers(A);
            alone += 1;
        }
    }
    assert!(alone <= 32, "after a probe that the disk wins the next read is one: {alone}");
    it.breaker_is(BreakerState::Open);
}

/// Also where the server was far quicker than the disk until now.
#[test]
fn after_a_probe_that_the_disk_wins_the_next_read_is_a_probe() {
    let mut it = Scenario::trained();
    while !it.begin(A, DISK, RANGE).is_probe(A) {
        it.after(HIT_NS).server_answers(A);
    }
    it.after(DISK_NS).disk_answers(A).page_is_late(A).probe(A);
}

/// A tail that the disk does not have is no better than a median.
#[test]
fn a_server_with_more_than_a_few_slow_answers_is_left_alone() {
    let mut it = Scenario::new(config(), 300, DISK_NS);
    it.hits(600, 2 * MS);
    let mut slow = 0;
    while it.engine.status().hedging.breaker == BreakerState::Closed {
        if it.hits(50, 2 * MS).begin(A, DISK, RANGE).is_probe(A) {
            it.after(DISK_NS).disk_answers(A).page_is_late(A);
        } else {
            it.after(DISK_NS + MS).server_answers(A);
            slow += 1;
        }
    }
    assert_eq!(slow, 4);
    // Another session does not bring back what the guest has suffered.
    it.disconnect();
    it.connect(1, 8, 1);
    it.waiting(A).after(DISK_NS + MS).server_answers(A).breaker_is(BreakerState::Open);
}

/// Where the guest has suffered, a server that is only a little quicker than the disk is not taken back.
#[test]
fn without_overruns_left_the_breaker_closes_only_after_answers_that_leave_time_for_a_hedge() {
    let mut it = Scenario::new(config(), 300, DISK_NS);
    it.hits(600, 2 * MS);
    while it.engine.status().hedging.breaker == BreakerState::Closed {
        if it.begin(A, DISK, RANGE).is_probe(A) {
            it.after(2 * MS).server_answers(A).after(DISK_NS).abandoned_ends(A);
        } else {
            it.after(DISK_NS + MS).server_answers(A);
        }
    }
    it.after(20 * MS);
    for _ in 0..4 {
        it.probe(A).after(2 * MS).server_answers(A).after(DISK_NS).abandoned_ends(A);
    }
    // The next one comes after a pause of twice the length.
    it.breaker_is(BreakerState::HalfOpen);
    for _ in 0..2 {
        it.disk_only(B).after(DISK_NS).disk_answers(B);
    }
    it.after(20 * MS).probe_wins(1).breaker_is(BreakerState::Closed);
}

/// A disk that does one read at a time would have the guest's next reads wait behind what is read for nothing.
#[test]
fn a_disk_has_no_more_speculative_reads_than_the_guest_has_reads() {
    let mut it = Scenario::trained();
    for (name, hedges) in (0..4).zip([1, 1, 0, 0]) {
        assert_eq!(it.waiting(name).after(LATE_NS).timer().len(), hedges);
        it.server_answers(name);
    }
    it.abandoned_ends(A);
    assert_eq!(it.stats().hedges, 2);
    it.hedged(A);
}

#[test]
fn admissions_thin_out_while_the_server_is_left_alone() {
    let mut it = Scenario::trained();
    it.losses(16);
    let mut admitted = 0;
    for value in 100..132 {
        it.do_from_disk(GuestOp::Read(blocks(u64::from(value), 1)), &page(value));
        match it.engine.handle_evicted(&page(value)) {
            Evicted::Admit(_) => admitted += 1,
            other => assert_eq!(other, Evicted::Dropped),
        }
    }
    assert_eq!(admitted, 2, "one of 16, so that there is something to probe with");
}

#[test]
fn another_session_is_judged_afresh() {
    let mut it = Scenario::trained();
    it.losses(16);
    it.disconnect();
    it.breaker_is(BreakerState::Closed).connect(1, 8, 1);
    it.hits(1, HIT_NS);
}

#[test]
fn one_late_page_does_not_excuse_the_others() {
    let mut it = Scenario::trained();
    it.losses(2);
    it.page_is_late(A).until_due();
    assert_eq!(it.timer(), [Action::GiveUp(SERVER)]);
    assert_eq!(it.pinned(), 0);
}

/// What is not issued overlaps nothing: a write to the same block teaches, and so does a read after it.
#[test]
fn a_hedge_that_is_left_out_is_forgotten() {
    let mut it = Scenario::trained();
    let id = it.hedged(A).server_answers(A).id(A);
    it.engine.handle_disk_skipped(RequestId(id));
    assert_eq!(it.actions(), []);
    assert!(it.engine.disks.are_idle());
    it.do_from_disk(write(RANGE), &page(2));
    assert!(it.known(3), "nothing overlapped the write");
    it.engine.handle_content_uncertain(DISK);
    it.timer();
    it.do_from_disk(GuestOp::Read(RANGE), &page(2));
    assert!(it.known(3), "nothing overlapped the read");
    it.reuse_number_of(A);
}

#[test]
fn abandoned_reads_of_a_disk_that_hangs_are_bounded() {
    let mut it = Scenario::without_hedging(1);
    let abandoned = it.slow_answers(1, 1..200);
    assert_eq!(abandoned.len(), 128, "then reads wait for the server");
    // Neither server nor disk answers this read. The reads after it leave nothing queued, and it goes to the disk as
    // soon as there is room.
    assert_eq!(it.waiting(A).slow_answers(1, 200..400), [0; 0]);
    assert!(it.engine.race.queued() <= 2, "{}", it.engine.race.queued());
    it.abandoned_ends(abandoned[127]);
    assert!(it.engine.next_deadline().is_some_and(|at| at <= it.now));
    // The guest has waited for this one, so it is not abandoned; and neither is an I/O that is left out.
    it.asks_disk(A).disk_answers(A);
    let id = it.id(abandoned[126]);
    it.engine.handle_disk_skipped(RequestId(id));
    assert_eq!(it.slow_answers(1, 400..410).len(), 2);
    assert_eq!(it.engine.requests_in_flight(), 0);
}

/// If the disk must be spared, it is not asked even if it is faster.
#[test]
fn without_hedging_a_quicker_disk_is_not_asked() {
    let mut it = Scenario::without_hedging(1);
    for _ in 0..100 {
        assert_eq!(it.read(500, blocks(9, 1)), [disk_action(500, GuestOp::Read(blocks(9, 1)))]);
        it.after(MS / 10).disk_done(500, Ok(()), &page(2));
        it.engine.handle_evicted(&page(3));
    }
    for _ in 0..1000 {
        it.waiting(A).after(4 * MS).timer();
        it.server_answers(A);
    }
    it.breaker_is(BreakerState::Closed);
    assert_eq!((it.stats().probes, it.stats().fetch_timeouts), (0, 0));
}

/// A server is silent for a second, and then as it was before. Its disk has always been quicker.
#[test]
fn without_hedging_a_server_that_was_silent_comes_back_though_the_disk_is_quicker() {
    let (server_ns, disk_ns) = (2 * MS, 100 * US);
    let mut it = Scenario::new(EngineConfig { hedge: false, ..config() }, 20, disk_ns);
    it.hits(20, server_ns);
    let end = it.now.plus_ns(1000 * MS);
    let (mut owed, mut probes) = (Vec::new(), 0);
    for name in 0.. {
        if it.now >= end {
            break;
        }
        let asks_server = !it.begin(name, DISK, RANGE).fetches(name).is_empty();
        if asks_server {
            assert!(!it.is_probe(name) && it.until_due() == 5 * MS, "the disk is spared");
            it.asks_disk(name);
            owed.push(name);
            probes += u64::from(owed.len() > 16);
        }
        it.after(disk_ns).disk_answers(name);
    }
    it.breaker_is(BreakerState::Open);
    assert!((1..10).contains(&probes) && probes == it.stats().probes, "they come more and more seldom: {probes}");
    // The next one may be most of a second away.
    it.after(1000 * MS);
    for _ in 0..4 {
        it.waiting(A).after(server_ns).server_answers(A);
    }
    it.breaker_is(BreakerState::Closed).hits(1000, server_ns);
    assert_eq!(it.stats().breaker_openings, 1);
}

#[test]
fn a_disk_that_hangs_takes_no_other_disk_from_a_read() {
    let mut it = Scenario::without_hedging(1);
    assert_eq!(it.copy_on_other_disk().slow_answers(1, 1..200).len(), 128);
    // The first to be late is one of the disk that hangs.
    it.waiting(A).waiting_on(B, OTHER_DISK).until_due();
    it.asks_disk(B).disk_answers(B).nothing_is_due();
    // Answers that come late open the breaker; a probe is one more read that waits.
    for _ in 0..15 {
        it.waiting_on(B, OTHER_DISK).after(5 * MS).asks_disk(B).disk_answers(B);
    }
    it.breaker_is(BreakerState::Open).after(20 * MS).waiting_on(B, OTHER_DISK).after(5 * MS).asks_disk(B);
}

#[test]
fn a_disk_is_asked_for_hedges_though_another_hangs() {
    let mut it = Scenario::trained();
    it.copy_on_other_disk().fill_with_abandoned().waiting(A).waiting_on(B, OTHER_DISK).after(LATE_NS).asks_disk(B);
    assert_eq!(it.stats().hedges, 1);
}

#[test]
fn a_read_waits_for_the_server_until_its_page_is_given_up() {
    let mut it = Scenario::trained();
    assert!(!it.engine.waits_for_server(RequestId(0)));
    let id = RequestId(it.hedged(A).id(A));
    assert!(it.engine.waits_for_server(id));
    it.server_has_no_page(A);
    assert!(!it.engine.waits_for_server(id), "the disk alone can answer it");
    it.disk_answers(A);
}

#[test]
fn abandoned_reads_that_are_long_are_fewer() {
    assert_eq!(Scenario::without_hedging(128).slow_answers(128, 0..50).len(), 32, "of 512 KiB each");
}

#[test]
fn a_probe_does_not_go_to_a_disk_that_hangs() {
    let mut it = Scenario::trained();
    it.open_breaker().fill_with_abandoned();
    for _ in 0..4 {
        it.waiting(A).server_answers(A);
    }
    it.breaker_is(BreakerState::Closed);
}
