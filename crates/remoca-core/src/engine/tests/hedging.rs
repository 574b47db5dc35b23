//! Two answers to one read, and a server that is slower than the disk.

use super::*;
use crate::units::{BlockId, BlockNumber};

const US: u64 = 1000;
const DISK_NS: u64 = 7 * MS;
const HIT_NS: u64 = 200 * US;
/// 5 % of the disk's median, which is known to 6 %.
const LATE_NS: u64 = 400 * US;
const RANGE: ByteRange = ByteRange { offset: 3 * 4096, length: 4096 };

impl Bench {
    /// What the disk and the server normally take is known; block 3 is cached, and holds ones.
    fn trained() -> Self {
        let mut bench = Self::connected();
        bench.cache(3, 1);
        bench.disk_reads(20, DISK_NS);
        bench.hits(20, HIT_NS);
        bench
    }

    fn disk_reads(&mut self, count: u32, ns: u64) {
        for _ in 0..count {
            self.read(98, blocks(50, 1));
            self.wait(ns);
            self.disk_done(98, Ok(()), &page(50));
            // The agent lives: blocks are not admitted as they are read.
            self.engine.handle_evicted(&page(9));
        }
    }

    fn hits(&mut self, count: u32, ns: u64) {
        self.hits_beside(count, ns, DISK_NS);
    }

    /// Reads that the server answers; probes among them leave an abandoned disk read, which ends before the next begins.
    fn hits_beside(&mut self, count: u32, ns: u64, disk_ns: u64) {
        for _ in 0..count {
            let actions = self.read(97, RANGE);
            self.wait(ns);
            assert_eq!(self.page_comes(only_fetch(&actions[..1]), 1), deliver(97, 0));
            assert_eq!(self.actions(), [complete(97)]);
            if actions.len() > 1 {
                assert_eq!(actions[1..], [disk_too(97, RANGE)]);
                self.wait(disk_ns - ns);
                assert_eq!(self.disk_done(97, Ok(()), &page(1)), []);
            }
        }
    }

    /// A read of block 3 that the server is late with: the disk is asked, too.
    fn hedged(&mut self, id: u32) -> FetchId {
        let fetch = only_fetch(&self.read(id, RANGE));
        let deadline = self.engine.next_deadline().expect("a read that waits has a deadline");
        assert!(deadline.since_ns(self.now) < DISK_NS / 10, "it is asked soon");
        self.wait(deadline.since_ns(self.now));
        assert_eq!(self.timer(), [disk_too(id, RANGE)]);
        fetch
    }

    /// Reads that the disk answers while the server is silent, with the REQUESTs that it owes.
    fn losses(&mut self, count: u32) -> Vec<FetchId> {
        let lose = |bench: &mut Self| {
            let fetch = bench.hedged(0);
            bench.wait(DISK_NS);
            assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [complete(0)]);
            fetch
        };
        (0..count).map(|_| lose(self)).collect()
    }

    fn breaker(&self) -> BreakerState {
        self.engine.status().hedging.breaker
    }

    fn late_after(&self) -> u64 {
        self.engine.status().hedging.late_after_ns
    }

    fn pinned(&self) -> u32 {
        self.engine.index().pinned_slots().0
    }
}

fn near(value: u64, exact: u64) -> bool {
    value.abs_diff(exact) <= exact / 14
}

#[test]
fn a_sleeper_finds_a_read_that_is_alone_late_in_time_and_one_of_several_a_little_later() {
    let mut bench = Bench::trained();
    bench.read(0, RANGE);
    let late = bench.engine.next_deadline().unwrap();
    assert_eq!(bench.engine.next_wake(), Some(late));
    let others: Vec<_> = (1..8).map(|id| only_fetch(&bench.read(id, RANGE))).collect();
    assert_eq!(bench.engine.next_deadline(), Some(late));
    let slack = bench.engine.next_wake().unwrap().since_ns(late);
    assert!(slack > bench.late_after() && slack <= (4 * bench.late_after()).min(2 * MS), "{slack}");
    // Once they are answered, it is alone again.
    others.into_iter().for_each(|fetch| assert!(matches!(bench.page_comes(fetch, 1), PageOutcome::Deliver { .. })));
    bench.actions();
    assert_eq!(bench.engine.next_wake(), Some(late));
    // Whoever is awake acts in time.
    bench.wait(late.since_ns(bench.now));
    assert_eq!(bench.timer()[0], disk_too(0, RANGE));
}

#[test]
fn the_page_comes_first() {
    let mut bench = Bench::trained();
    let fetch = bench.hedged(0);
    assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0));
    assert_eq!(bench.actions(), [complete(0)]);
    assert_eq!(bench.engine.requests_in_flight(), 0);
    // The loser: whatever the disk says now, nobody hears of it, and nothing is learnt.
    bench.do_from_disk(write(RANGE), &page(2));
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), []);
    assert!(!bench.cached(3));
    let stats = bench.engine.stats();
    assert_eq!((stats.hedges, stats.hedges_won, stats.hit_blocks), (1, 0, 21));
    assert_eq!(stats.missed_blocks + stats.hit_blocks, stats.read_blocks);
    // The number is free again.
    assert_eq!(bench.read(0, blocks(9, 1)), [disk_action(0, GuestOp::Read(blocks(9, 1)))]);
}

#[test]
fn the_disk_answers_first() {
    let mut bench = Bench::trained();
    let fetch = bench.hedged(0);
    bench.wait(DISK_NS);
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [complete(0)]);
    assert_eq!(bench.pinned(), 1, "the slot is the REQUEST's until its page has come");
    // The same number for another read: the old page is not for it.
    assert_eq!(bench.read(0, blocks(5, 1)), [disk_action(0, GuestOp::Read(blocks(5, 1)))]);
    assert_eq!(bench.page_comes(fetch, 1), PageOutcome::Late);
    assert_eq!(bench.pinned(), 0);
    let stats = bench.engine.stats();
    assert_eq!((stats.hedges, stats.hedges_won, stats.fetch_late), (1, 1, 1));
}

#[test]
fn the_old_page_is_not_for_a_read_of_the_same_number_that_waits_for_the_same_slot() {
    let mut bench = Bench::trained();
    let old = bench.hedged(0);
    bench.disk_done(0, Ok(()), &page(1));
    let new = only_fetch(&bench.read(0, RANGE));
    assert_ne!(old, new);
    assert_eq!(bench.page_comes(old, 1), PageOutcome::Late);
    assert_eq!(bench.actions(), []);
    assert_eq!(bench.page_comes(new, 1), deliver(0, 0));
    assert_eq!(bench.actions(), [complete(0)]);
}

#[test]
fn the_disk_fails_and_the_page_comes() {
    let mut bench = Bench::trained();
    let fetch = bench.hedged(0);
    assert_eq!(bench.disk_done(0, Err(EIO), &page(77)), [], "the server may still know");
    assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0));
    assert_eq!(bench.actions(), [complete(0)]);
    assert_eq!(bench.engine.stats().disk_errors, 1);
}

#[test]
fn the_page_comes_and_the_disk_fails() {
    let mut bench = Bench::trained();
    let fetch = bench.hedged(0);
    bench.page_comes(fetch, 1);
    assert_eq!(bench.actions(), [complete(0)]);
    assert_eq!(bench.disk_done(0, Err(EIO), &[]), []);
    bench.hits(1, HIT_NS);
}

#[test]
fn the_disk_fails_and_the_server_is_silent() {
    let mut bench = Bench::trained();
    bench.hedged(0);
    assert_eq!(bench.disk_done(0, Err(EIO), &[]), []);
    let deadline = bench.engine.next_deadline().expect("it does not wait for ever");
    bench.wait(deadline.since_ns(bench.now));
    assert_eq!(bench.timer(), [disk_too(0, RANGE)]);
    assert_eq!(bench.disk_done(0, Err(EIO), &[]), [fail(0)], "an error of the disk reaches the guest");
}

#[test]
fn the_first_error_of_a_disk_that_is_asked_after_a_timeout_is_not_the_guests() {
    let mut bench = Bench::new(EngineConfig { hedge: false, ..config() });
    bench.connect(1, 8, 0);
    bench.cache(3, 1);
    for page_comes in [true, false] {
        let fetch = only_fetch(&bench.read(0, RANGE));
        bench.wait(5 * MS);
        assert_eq!(bench.timer(), [disk_too(0, RANGE)]);
        assert_eq!(bench.disk_done(0, Err(EIO), &[]), [], "the server may still know");
        if page_comes {
            assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0));
            assert_eq!(bench.actions(), [complete(0)]);
        } else {
            bench.wait(5 * MS);
            assert_eq!(bench.timer(), [disk_too(0, RANGE)]);
            assert_eq!(bench.disk_done(0, Err(EIO), &[]), [fail(0)], "it does not wait for ever");
        }
    }
}

#[test]
fn the_disk_fails_and_the_server_has_no_page() {
    let mut bench = Bench::trained();
    let fetch = bench.hedged(0);
    bench.disk_done(0, Err(EIO), &[]);
    bench.engine.handle_missing(bench.now, fetch);
    assert_eq!(bench.actions(), [disk_action(0, GuestOp::Read(RANGE))]);
    assert_eq!(bench.disk_done(0, Err(EIO), &[]), [fail(0)]);
}

#[test]
fn a_wrong_page_after_the_disk_was_asked() {
    let mut bench = Bench::trained();
    let fetch = bench.hedged(0);
    assert_eq!(bench.page_comes(fetch, 9), PageOutcome::Wrong);
    assert_eq!(bench.actions(), [], "the disk is at it already");
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [complete(0)]);
    let stats = bench.engine.stats();
    assert_eq!((stats.hedges, stats.hedges_won, stats.fetch_wrong), (1, 0, 1));
    assert_eq!(stats.missed_blocks + stats.hit_blocks, stats.read_blocks);
}

#[test]
fn the_disk_answers_when_some_of_the_pages_have_come() {
    let mut bench = Bench::trained();
    bench.cache(4, 2);
    let range = blocks(3, 2);
    let actions = bench.read(0, range);
    let [Action::Fetch { fetch: first, .. }, Action::Fetch { fetch: second, .. }] = actions[..] else {
        panic!("two REQUESTs: {actions:?}")
    };
    bench.wait(LATE_NS);
    assert_eq!(bench.timer(), [disk_too(0, range)]);
    assert_eq!(bench.page_comes(first, 1), deliver(0, 0));
    assert_eq!(bench.disk_done(0, Ok(()), &[page(1), page(2)].concat()), [complete(0)]);
    assert_eq!(bench.page_comes(second, 2), PageOutcome::Late);
    assert_eq!(bench.pinned(), 0);
}

#[test]
fn a_write_overlaps_both_answers() {
    // The disk answers the read with what the write left half done: nothing is learnt from it.
    let mut bench = Bench::trained();
    let fetch = bench.hedged(0);
    let op = write(RANGE);
    assert_eq!(bench.request(1, DISK, op), [disk_action(1, op)]);
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [complete(0)]);
    assert!(!bench.known(3));
    assert_eq!(bench.disk_done(1, Ok(()), &page(2)), [complete(1)]);
    assert_eq!(bench.page_comes(fetch, 1), PageOutcome::Late);
    assert!(bench.known(3) && !bench.cached(3), "the write's content is known, the old page is not it");

    // The page comes while the write is under way: it is what the block held when the read began.
    let mut bench = Bench::trained();
    let fetch = bench.hedged(0);
    bench.request(1, DISK, op);
    assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0));
    assert_eq!(bench.actions(), [complete(0)]);
    bench.disk_done(1, Ok(()), &page(2));
    // The loser still holds what the block was: a read after the write is answered from what the write left.
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), []);
    let known = bench.engine.index().known(BlockId { disk: DISK, bno: BlockNumber(3) });
    assert_eq!(known, Some(bench.engine.prints.page(&page(2))));
}

#[test]
fn flushes_and_discards_mind_no_loser() {
    let mut bench = Bench::trained();
    let fetch = bench.hedged(0);
    bench.page_comes(fetch, 1);
    bench.actions();
    bench.do_from_disk(GuestOp::Flush, &[]);
    bench.do_from_disk(GuestOp::Discard(RANGE), &[]);
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), []);
    assert!(!bench.known(3));
}

#[test]
fn the_connection_is_lost_with_hedges_out() {
    let mut bench = Bench::trained();
    let first = bench.hedged(0);
    bench.hedged(1);
    assert_eq!(bench.page_comes(first, 1), deliver(0, 0));
    assert_eq!(bench.actions(), [complete(0)]);
    bench.disconnect();
    assert_eq!(bench.actions(), [], "the disk is at it already");
    assert_eq!(bench.pinned(), 0);
    assert_eq!(bench.disk_done(1, Ok(()), &page(1)), [complete(1)]);
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), []);
    bench.connect(1, 8, 1);
    bench.hits(1, HIT_NS);
}

#[test]
fn an_uncertain_disk_makes_hedges_teach_nothing() {
    let mut bench = Bench::trained();
    bench.hedged(0);
    bench.engine.handle_content_uncertain(DISK);
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [complete(0)]);
    assert!(!bench.known(3));
}

#[test]
fn late_is_a_small_part_of_the_disks_time() {
    let bench = Bench::trained();
    assert!(near(bench.late_after(), DISK_NS / 20), "{}", bench.late_after());
}

#[test]
fn slow_answers_do_not_make_late_later() {
    let mut bench = Bench::trained();
    for _ in 0..50 {
        bench.hits(49, HIT_NS);
        let fetch = bench.hedged(0);
        bench.wait(5 * MS);
        bench.page_comes(fetch, 1);
        bench.actions();
        bench.wait(DISK_NS - 5 * MS);
        bench.disk_done(0, Ok(()), &page(1));
    }
    let server = bench.engine.status().hedging.server.expect("two thousand reads say something");
    assert!(server.p99_ns > 4 * MS, "the p99 is that of slow answers: {server:?}");
    assert!(near(bench.late_after(), 2 * HIT_NS), "{}", bench.late_after());
}

#[test]
fn a_server_that_always_takes_longer_is_late_after_its_own_p99() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.disk_reads(20, DISK_NS);
    bench.hits(300, MS);
    assert!(near(bench.late_after(), MS), "{}", bench.late_after());
    assert_eq!(bench.breaker(), BreakerState::Closed);
    let stats = bench.engine.stats();
    assert_eq!((stats.hedges, stats.fetch_timeouts), (0, 0));
}

#[test]
fn while_nothing_is_known_of_the_disk_it_is_not_asked_soon() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.read(0, RANGE);
    bench.wait(4 * MS);
    assert_eq!(bench.timer(), []);
    bench.wait(MS);
    assert_eq!(bench.timer(), [disk_too(0, RANGE)]);
}

#[test]
fn waiting_for_the_server_does_not_make_the_disk_look_slow() {
    let mut bench = Bench::trained();
    for _ in 0..3 {
        let fetch = only_fetch(&bench.read(0, RANGE));
        bench.wait(50 * MS);
        assert_eq!(bench.timer(), [disk_too(0, RANGE)]);
        bench.wait(DISK_NS);
        bench.disk_done(0, Ok(()), &page(1));
        bench.page_comes(fetch, 1);
    }
    let disk = bench.engine.status().hedging.disk.expect("reads of the disk were enough");
    assert!(near(disk.p50_ns, DISK_NS) && near(disk.p99_ns, DISK_NS), "{disk:?}");
}

#[test]
fn hedges_for_nothing_are_few() {
    let mut bench = Bench::trained();
    let mut asked = 0_u32;
    for id in 0..1000 {
        let actions = bench.read(id, RANGE);
        let is_probe = actions.len() > 1;
        bench.wait(LATE_NS);
        let hedges = bench.timer();
        bench.page_comes(only_fetch(&actions[..1]), 1);
        assert_eq!(bench.actions(), [complete(id)]);
        if !hedges.is_empty() {
            assert!(!is_probe);
            assert_eq!(hedges, [disk_too(id, RANGE)]);
            asked += 1;
        } else if !is_probe {
            continue;
        }
        bench.wait(DISK_NS);
        assert_eq!(bench.disk_done(id, Ok(()), &page(1)), []);
    }
    // 128 in the beginning, and one for 32 answers. What is normal is learnt meanwhile: then none is late.
    assert!((1..=128 + 1000 / 32).contains(&asked), "{asked}");
    assert_eq!(bench.engine.stats().hedges, u64::from(asked));
}

#[test]
fn without_credit_the_disk_is_asked_after_twice_its_median() {
    let mut bench = Bench::new(EngineConfig { fetch_limit: 1000, ..config() });
    bench.connect(1, 8, 0);
    bench.cache(3, 1);
    bench.disk_reads(20, DISK_NS);
    let fetches: Vec<_> = (0..200).map(|id| only_fetch(&bench.read(id, RANGE))).collect();
    bench.wait(LATE_NS);
    assert_eq!(bench.timer().len(), 128, "so many are asked too at once");
    // The server answers all of those after all; the credit is used up.
    for (id, fetch) in (0..128).zip(&fetches) {
        bench.page_comes(*fetch, 1);
        assert_eq!(bench.actions(), [complete(id)]);
        bench.disk_done(id, Ok(()), &page(1));
    }
    let deadline = bench.engine.next_deadline().expect("the others are not forgotten");
    bench.wait(deadline.since_ns(bench.now));
    assert_eq!(bench.timer().len(), 72);
    assert_eq!((bench.engine.stats().hedges, bench.engine.stats().fetch_timeouts), (128, 72));
}

#[test]
fn with_hedging_off_the_disk_is_asked_after_twice_its_median() {
    let mut bench = Bench::new(EngineConfig { hedge: false, ..config() });
    bench.connect(1, 8, 0);
    bench.cache(3, 1);
    bench.disk_reads(20, DISK_NS);
    let fetch = only_fetch(&bench.read(0, RANGE));
    bench.wait(12 * MS);
    assert_eq!(bench.timer(), []);
    bench.wait(3 * MS);
    assert_eq!(bench.timer(), [disk_too(0, RANGE)]);
    assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0), "the first answer is the guest's all the same");
    assert_eq!((bench.engine.stats().hedges, bench.engine.stats().fetch_timeouts), (0, 1));
}

#[test]
fn a_silent_server_is_left_alone_and_comes_back_with_its_first_answer() {
    let mut bench = Bench::trained();
    let owed = bench.losses(16);
    assert_eq!(bench.breaker(), BreakerState::Open);
    assert_eq!(bench.engine.stats().breaker_openings, 1);
    assert_eq!(bench.read(0, RANGE), [disk_action(0, GuestOp::Read(RANGE))], "no REQUEST goes out");
    bench.disk_done(0, Ok(()), &page(1));
    for fetch in owed {
        assert_eq!(bench.page_comes(fetch, 1), PageOutcome::Late);
    }
    bench.probe_wins(4);
    assert_eq!(bench.breaker(), BreakerState::Closed);
    bench.hits(3, HIT_NS);
}

impl Bench {
    /// Reads that go both ways, and that the server answers first.
    fn probe_wins(&mut self, count: u32) {
        for _ in 0..count {
            let fetch = self.probe(0);
            self.wait(HIT_NS);
            assert_eq!(self.page_comes(fetch, 1), deliver(0, 0));
            assert_eq!(self.actions(), [complete(0)]);
            self.wait(DISK_NS);
            assert_eq!(self.disk_done(0, Ok(()), &page(1)), []);
        }
    }

    fn probe(&mut self, id: u32) -> FetchId {
        let actions = self.read(id, RANGE);
        let [Action::Fetch { fetch, .. }, too] = actions[..] else { panic!("a probe goes both ways: {actions:?}") };
        assert_eq!(too, disk_too(id, RANGE));
        fetch
    }
}

#[test]
fn probes_that_lose_come_more_and_more_seldom() {
    let mut bench = Bench::trained();
    bench.losses(16);
    let mut probes = 0;
    let begin = bench.now;
    while bench.now.since_ns(begin) < 9_000 * MS {
        let actions = bench.read(0, RANGE);
        probes += u32::from(actions.len() == 2);
        bench.wait(DISK_NS);
        assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [complete(0)], "the guest waits for nobody but the disk");
    }
    // Pauses of 10, 20, 40 ... 1000 ms.
    assert!((10..=16).contains(&probes), "{probes}");
    assert_eq!(u64::from(probes), bench.engine.stats().probes);
}

#[test]
fn one_probe_is_out_at_a_time_and_others_decide_nothing() {
    let mut bench = Bench::trained();
    bench.losses(16);
    bench.wait(20 * MS);
    let fetch = bench.probe(0);
    assert_eq!(bench.read(1, RANGE), [disk_action(1, GuestOp::Read(RANGE))]);
    bench.page_comes(fetch, 1);
    assert_eq!(bench.breaker(), BreakerState::HalfOpen);
    bench.actions();
    bench.disk_done(0, Ok(()), &page(1));
    bench.disk_done(1, Ok(()), &page(1));
    bench.probe_wins(2);
    // A probe that loses begins it anew.
    let fetch = bench.probe(0);
    bench.wait(DISK_NS);
    bench.disk_done(0, Ok(()), &page(1));
    assert_eq!(bench.breaker(), BreakerState::Open);
    assert_eq!(bench.page_comes(fetch, 1), PageOutcome::Late);
    assert_eq!(bench.read(0, RANGE).len(), 1, "the page of a probe that lost is no reason for another one");
    bench.disk_done(0, Ok(()), &page(1));
    bench.wait(20 * MS);
    bench.probe_wins(4);
    assert_eq!(bench.breaker(), BreakerState::Closed);
}

#[test]
fn a_probe_without_a_page_is_no_probe() {
    let mut bench = Bench::trained();
    bench.cache(4, 2);
    bench.losses(16);
    bench.wait(20 * MS);
    let fetch = bench.probe(0);
    bench.engine.handle_missing(bench.now, fetch);
    assert_eq!(bench.actions(), []);
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [complete(0)]);
    let next = bench.read(0, blocks(4, 1));
    assert!(matches!(next[..], [Action::Fetch { .. }, Action::DiskToo { .. }]), "{next:?}");
    assert_eq!(bench.disk_done(0, Err(EIO), &[]), [], "the server may still know");
}

#[test]
fn a_disk_that_fails_every_probe_is_left_for_the_server() {
    let mut bench = Bench::trained();
    bench.losses(16);
    for _ in 0..4 {
        bench.wait(20 * MS);
        let fetch = bench.probe(0);
        assert_eq!(bench.disk_done(0, Err(EIO), &[]), []);
        assert_eq!(bench.read(1, RANGE), [disk_action(1, GuestOp::Read(RANGE))], "the probe is still out");
        assert_eq!(bench.disk_done(1, Err(EIO), &[]), [fail(1)]);
        assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0));
        assert_eq!(bench.actions(), [complete(0)]);
    }
    assert_eq!(bench.breaker(), BreakerState::Closed);
    bench.hits(1, HIT_NS);
}

#[test]
fn a_probe_that_nobody_answers_is_followed_by_another() {
    let mut bench = Bench::trained();
    bench.losses(16);
    bench.wait(20 * MS);
    bench.probe(0);
    assert_eq!(bench.disk_done(0, Err(EIO), &[]), []);
    bench.wait(2 * DISK_NS + MS);
    assert_eq!(bench.timer(), [disk_too(0, RANGE)]);
    assert_eq!(bench.disk_done(0, Err(EIO), &[]), [fail(0)]);
    let fetch = bench.probe(0);
    assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0));
    assert_eq!(bench.breaker(), BreakerState::HalfOpen);
}

#[test]
fn what_waits_when_the_breaker_opens_goes_to_the_disk_when_it_is_late() {
    let mut bench = Bench::trained();
    bench.losses(15);
    bench.hedged(0);
    let fetch = only_fetch(&bench.read(1, RANGE));
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [complete(0)]);
    assert_eq!(bench.breaker(), BreakerState::Open);
    bench.wait(LATE_NS);
    assert_eq!(bench.timer(), [disk_too(1, RANGE)]);
    assert_eq!(bench.page_comes(fetch, 1), deliver(1, 0));
    assert_eq!(bench.actions(), [complete(1)]);
    assert_eq!(bench.disk_done(1, Ok(()), &page(1)), []);
}

#[test]
fn slow_answers_now_and_then_open_nothing() {
    let mut bench = Bench::trained();
    for _ in 0..20 {
        let owed = bench.losses(15);
        bench.hits(1, HIT_NS);
        for fetch in owed {
            bench.page_comes(fetch, 1);
        }
    }
    assert_eq!(bench.breaker(), BreakerState::Closed);
    assert_eq!(bench.engine.stats().hedges_won, 300, "a hedge that the disk wins costs no credit");
}

#[test]
fn the_cache_steps_aside_where_the_disk_is_faster() {
    for server_ns in [120 * US, 500 * US, MS] {
        let mut bench = Bench::connected();
        bench.cache(3, 1);
        bench.disk_reads(300, 100 * US);
        let mut reads = 0;
        while bench.breaker() == BreakerState::Closed {
            let fetch = only_fetch(&bench.read(0, RANGE)[..1]);
            let late = bench.engine.next_deadline().expect("a read that waits has a deadline").since_ns(bench.now);
            bench.wait(late);
            let hedged = !bench.timer().is_empty();
            assert!(hedged && late < 10 * US, "it costs the guest 5 % of the disk's time");
            bench.wait((100 * US).min(server_ns - late));
            assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [complete(0)]);
            assert_eq!(bench.page_comes(fetch, 1), PageOutcome::Late);
            reads += 1;
        }
        assert_eq!(reads, 16, "it is noticed at once");
    }
}

/// A server that is nearly as slow as the disk is compared with it often, on reads that wait for neither.
#[test]
fn a_disk_that_becomes_faster_than_the_server_is_noticed_by_probes() {
    let mut bench = Bench::trained();
    bench.hits(300, 3 * MS);
    let mut alone = 0;
    for _ in 0..4 {
        loop {
            let actions = bench.read(0, RANGE);
            if let [Action::Fetch { fetch, .. }, too] = actions[..] {
                assert_eq!(too, disk_too(0, RANGE));
                bench.wait(2 * MS);
                assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [complete(0)]);
                bench.page_comes(fetch, 1);
                break;
            }
            bench.wait(3 * MS);
            assert_eq!(bench.page_comes(only_fetch(&actions), 1), deliver(0, 0));
            bench.actions();
            alone += 1;
        }
    }
    assert!(alone <= 32, "after a probe that the disk wins the next read is one: {alone}");
    assert_eq!(bench.breaker(), BreakerState::Open);
}

/// A tail that the disk does not have is no better than a median.
#[test]
fn a_server_with_more_than_a_few_slow_answers_is_left_alone() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.disk_reads(300, DISK_NS);
    bench.hits(600, 2 * MS);
    let mut slow = 0;
    while bench.breaker() == BreakerState::Closed {
        bench.hits(50, 2 * MS);
        let actions = bench.read(0, RANGE);
        if actions.len() > 1 {
            bench.wait(DISK_NS);
            bench.disk_done(0, Ok(()), &page(1));
            bench.page_comes(only_fetch(&actions[..1]), 1);
            continue;
        }
        bench.wait(DISK_NS + MS);
        assert_eq!(bench.page_comes(only_fetch(&actions), 1), deliver(0, 0));
        bench.actions();
        slow += 1;
    }
    assert_eq!(slow, 4);
    // Another session does not bring back what the guest has suffered.
    bench.disconnect();
    bench.connect(1, 8, 1);
    let fetch = only_fetch(&bench.read(0, RANGE));
    bench.wait(DISK_NS + MS);
    bench.page_comes(fetch, 1);
    assert_eq!(bench.breaker(), BreakerState::Open);
}

/// A disk that does one read at a time would have the guest's next reads wait behind what is read for nothing.
#[test]
fn a_disk_has_no_more_speculative_reads_than_the_guest_has_reads() {
    let mut bench = Bench::trained();
    let mut hedged = |id| {
        let fetch = only_fetch(&bench.read(id, RANGE));
        bench.wait(LATE_NS);
        let asked = bench.timer().len();
        bench.page_comes(fetch, 1);
        assert_eq!(bench.actions(), [complete(id)]);
        asked
    };
    assert_eq!((0..4).map(&mut hedged).collect::<Vec<_>>(), [1, 1, 0, 0]);
    bench.disk_done(0, Ok(()), &page(1));
    assert_eq!(bench.engine.stats().hedges, 2);
    bench.hedged(0);
}

#[test]
fn admissions_thin_out_while_the_server_is_left_alone() {
    let mut bench = Bench::trained();
    bench.losses(16);
    let mut content = page(0);
    let mut admitted = 0;
    for value in 100..132 {
        content.fill(value);
        bench.do_from_disk(GuestOp::Read(blocks(u64::from(value), 1)), &content);
        match bench.engine.handle_evicted(&content) {
            Evicted::Admit(_) => admitted += 1,
            other => assert_eq!(other, Evicted::Dropped),
        }
    }
    assert_eq!(admitted, 2, "one of 16, so that there is something to probe with");
}

#[test]
fn another_session_is_judged_anew() {
    let mut bench = Bench::trained();
    bench.losses(16);
    bench.disconnect();
    assert_eq!(bench.breaker(), BreakerState::Closed);
    bench.connect(1, 8, 1);
    bench.hits(1, HIT_NS);
}

#[test]
fn one_late_page_does_not_excuse_the_others() {
    let mut bench = Bench::trained();
    let [first, _second] = bench.losses(2)[..] else { panic!("two REQUESTs are owed") };
    assert_eq!(bench.page_comes(first, 1), PageOutcome::Late);
    let deadline = bench.engine.next_deadline().expect("the other page is owed still");
    bench.wait(deadline.since_ns(bench.now));
    assert_eq!(bench.timer(), [Action::GiveUp]);
    assert_eq!(bench.pinned(), 0);
}

impl Bench {
    /// Slow answers of the server while the disk hangs, with reads of `pages` blocks: how often the disk was asked.
    fn slow_answers(&mut self, pages: u64, reads: std::ops::Range<u32>) -> Vec<u32> {
        let mut asked = Vec::new();
        for id in reads {
            let actions = self.read(id, blocks(3, pages));
            assert!(matches!(actions[0], Action::Fetch { .. }), "{actions:?}");
            let mut too = actions.contains(&disk_too(id, blocks(3, pages)));
            for _ in 0..10 {
                self.wait(10 * MS);
                too |= self.timer().contains(&disk_too(id, blocks(3, pages)));
            }
            let deadline = self.engine.next_deadline();
            assert!(deadline.is_none_or(|at| at > self.now), "nothing is due that cannot be done");
            for action in actions {
                if let Action::Fetch { fetch, .. } = action {
                    self.page_comes(fetch, 1);
                }
            }
            assert_eq!(self.actions().last(), Some(&complete(id)), "the server answers");
            asked.extend(too.then_some(id));
        }
        asked
    }

    fn without_hedging(blocks_read: u64) -> Self {
        let mut bench =
            Self::new(EngineConfig { hedge: false, guest_memory: PageCount(1024), fetch_limit: 1024, ..config() });
        bench.connect(1, 8, 0);
        bench.do_from_disk(
            GuestOp::Read(blocks(3, blocks_read)),
            &page(1).repeat(usize::try_from(blocks_read).expect("few")),
        );
        assert!(matches!(bench.engine.handle_evicted(&page(1)), Evicted::Admit(_)));
        bench
    }
}

/// What is not issued overlaps nothing: a write to the same block teaches, and so does a read after it.
#[test]
fn a_hedge_that_is_left_out_is_forgotten() {
    let mut bench = Bench::trained();
    let fetch = bench.hedged(0);
    bench.page_comes(fetch, 1);
    assert_eq!(bench.actions(), [complete(0)]);
    bench.engine.handle_disk_skipped(RequestId(0));
    assert_eq!(bench.actions(), []);
    assert!(bench.engine.disks.are_idle());
    bench.do_from_disk(write(RANGE), &page(2));
    assert!(bench.known(3), "nothing overlapped the write");
    bench.engine.handle_content_uncertain(DISK);
    bench.do_from_disk(GuestOp::Read(RANGE), &page(2));
    assert!(bench.known(3), "nothing overlapped the read");
    assert_eq!(bench.read(0, blocks(9, 1)), [disk_action(0, GuestOp::Read(blocks(9, 1)))], "its number is free");
}

#[test]
fn losers_of_a_disk_that_hangs_are_bounded() {
    let mut bench = Bench::without_hedging(1);
    let mut losers = bench.slow_answers(1, 1..200);
    assert_eq!(losers.len(), 128, "then reads wait for the server");
    // A read that nobody answers: those behind it leave nothing behind, and it goes to the disk as soon as there is room.
    assert_eq!(bench.read(0, RANGE).len(), 1);
    assert_eq!(bench.slow_answers(1, 200..400), [0; 0]);
    assert!(bench.engine.race.queued() <= 2, "{}", bench.engine.race.queued());
    let loser = losers.pop().expect("many");
    assert_eq!(bench.disk_done(loser, Ok(()), &page(1)), []);
    assert!(bench.engine.next_deadline().is_some_and(|at| at <= bench.now));
    assert_eq!(bench.timer(), [disk_too(0, RANGE)]);
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [complete(0)], "no loser: the guest has waited for it");
    // An I/O that is left out is no loser either.
    bench.engine.handle_disk_skipped(RequestId(losers.pop().expect("many")));
    assert_eq!(bench.slow_answers(1, 400..410).len(), 2);
    assert_eq!(bench.engine.requests_in_flight(), 0);
}

/// Where it is the disk that must be spared, its being quicker is no reason to ask it.
#[test]
fn without_hedging_a_quicker_disk_is_not_asked() {
    let mut bench = Bench::without_hedging(1);
    for _ in 0..100 {
        assert_eq!(bench.read(500, blocks(9, 1)), [disk_action(500, GuestOp::Read(blocks(9, 1)))]);
        bench.wait(MS / 10);
        bench.disk_done(500, Ok(()), &page(2));
        bench.engine.handle_evicted(&page(3));
    }
    for id in 0..1000 {
        let fetch = only_fetch(&bench.read(id % 8, RANGE));
        bench.wait(4 * MS);
        bench.timer();
        assert_eq!(bench.page_comes(fetch, 1), deliver(id % 8, 0));
        assert_eq!(bench.actions(), [complete(id % 8)]);
    }
    assert_eq!(bench.breaker(), BreakerState::Closed);
    assert_eq!((bench.engine.stats().probes, bench.engine.stats().fetch_timeouts), (0, 0));
}

#[test]
fn a_disk_that_hangs_takes_no_other_disk_from_a_read() {
    let mut bench = Bench::without_hedging(1);
    let op = GuestOp::Read(RANGE);
    bench.request(500, OTHER_DISK, op);
    bench.disk_done(500, Ok(()), &page(1));
    assert_eq!(bench.slow_answers(1, 1..200).len(), 128);
    let too = |id| Action::DiskToo { request: RequestId(id), disk: OTHER_DISK, op };
    // The first to be overdue is one of the disk that hangs.
    only_fetch(&bench.read(0, RANGE));
    only_fetch(&bench.request(500, OTHER_DISK, op));
    let deadline = bench.engine.next_deadline().expect("it waits for its disk");
    bench.wait(deadline.since_ns(bench.now));
    assert_eq!(bench.timer(), [too(500)]);
    assert_eq!(bench.disk_done(500, Ok(()), &page(1)), [complete(500)]);
    assert!(bench.engine.next_deadline().is_none_or(|at| at > bench.now), "nothing is due that cannot be done");
    // Answers that come late open the breaker; a probe has a rival.
    for _ in 0..15 {
        only_fetch(&bench.request(500, OTHER_DISK, op));
        bench.wait(5 * MS);
        assert_eq!(bench.timer(), [too(500)]);
        assert_eq!(bench.disk_done(500, Ok(()), &page(1)), [complete(500)]);
    }
    assert_eq!(bench.breaker(), BreakerState::Open);
    bench.wait(20 * MS);
    assert!(matches!(bench.request(500, OTHER_DISK, op)[..], [Action::Fetch { .. }, action] if action == too(500)));
}

#[test]
fn a_disk_is_asked_for_hedges_though_another_hangs() {
    let mut bench = Bench::trained();
    let op = GuestOp::Read(RANGE);
    bench.request(500, OTHER_DISK, op);
    bench.disk_done(500, Ok(()), &page(1));
    for _ in 0..128 {
        bench.engine.race.begin_abandoned(DISK, RANGE);
    }
    only_fetch(&bench.read(0, RANGE));
    only_fetch(&bench.request(500, OTHER_DISK, op));
    bench.wait(LATE_NS);
    assert_eq!(bench.timer(), [Action::DiskToo { request: RequestId(500), disk: OTHER_DISK, op }]);
    assert_eq!(bench.engine.stats().hedges, 1);
}

#[test]
fn a_read_waits_for_the_server_until_its_page_is_given_up() {
    let mut bench = Bench::trained();
    assert!(!bench.engine.waits_for_server(RequestId(0)));
    let fetch = bench.hedged(0);
    assert!(bench.engine.waits_for_server(RequestId(0)));
    bench.engine.handle_missing(bench.now, fetch);
    assert!(!bench.engine.waits_for_server(RequestId(0)), "the disk alone can answer it");
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [complete(0)]);
}

#[test]
fn losers_of_long_reads_are_fewer() {
    let mut bench = Bench::without_hedging(128);
    assert_eq!(bench.slow_answers(128, 0..50).len(), 32, "of 512 KiB each");
}

#[test]
fn a_probe_has_no_rival_in_a_disk_that_hangs() {
    let mut bench = Bench::trained();
    bench.losses(16);
    bench.wait(20 * MS);
    for _ in 0..128 {
        bench.engine.race.begin_abandoned(DISK, RANGE);
    }
    for _ in 0..4 {
        let fetch = only_fetch(&bench.read(0, RANGE));
        assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0));
        assert_eq!(bench.actions(), [complete(0)]);
    }
    assert_eq!(bench.breaker(), BreakerState::Closed);
}
