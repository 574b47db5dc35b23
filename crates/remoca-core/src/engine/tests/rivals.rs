//! Several pools in one race with the disk: each is judged by itself.

use super::*;
use crate::engine::breaker::Route;
use crate::engine::race::Race;
use crate::engine::requests::{ReadReason, Requests};
use crate::units::{PoolIndex, PoolSet};

const DISK_NS: u64 = 8 * MS;
const FAST: PoolIndex = PoolIndex(0);
const FAST_NS: u64 = 200_000;
const SLOW: PoolIndex = PoolIndex(3);
const SLOW_NS: u64 = 3 * MS;
/// 5 % of the disk's median, plus what a histogram may be off by.
const SOON_NS: u64 = DISK_NS / 18;

/// Race with the requests that the engine would have.
struct Track {
    race: Race,
    requests: Requests,
    stats: EngineStats,
    now: Nanos,
    next: u32,
}

fn set(pools: &[PoolIndex]) -> PoolSet {
    pools.iter().copied().collect()
}

impl Track {
    /// Returns a race in which the disk and both pools are known.
    fn trained() -> Self {
        let (requests, stats, now) = (Requests::default(), EngineStats::default(), Nanos(1));
        let mut this = Self { race: Race::new(true), requests, stats, now, next: 0 };
        this.race.reset_disk(DISK);
        for _ in 0..64 {
            let id = this.begin();
            this.ask_disk(id, ReadReason::Needed);
            this.disk_answers(id, DISK_NS);
        }
        for _ in 0..64 {
            this.hit(&[FAST], FAST_NS);
            this.hit(&[SLOW], SLOW_NS);
        }
        this
    }

    fn begin(&mut self) -> RequestId {
        self.next += 1;
        let id = RequestId(self.next);
        self.requests.begin(self.now, id, DISK, GuestOp::Read(blocks(0, 1)));
        self.race.begin_read(DISK);
        id
    }

    fn route(&self, pools: &[PoolIndex]) -> Route {
        self.race.route(self.now, DISK, set(pools))
    }

    /// Begins a read that waits for pages of all `pools`.
    fn ask(&mut self, pools: &[PoolIndex]) -> RequestId {
        let (id, pools) = (self.begin(), set(pools));
        let asked = u32::try_from(pools.iter().count()).unwrap();
        self.requests.begin_wait(id, asked, pools, self.race.slowest(pools));
        self.race.begin_wait(self.now, id, self.requests.newest(), pools);
        id
    }

    fn ask_disk(&mut self, id: RequestId, reason: ReadReason) {
        self.requests.begin_io(id, self.race.begin_io(self.now, DISK, reason, None));
    }

    /// Lets the disk answer `id`, `ns` from now.
    fn disk_answers(&mut self, id: RequestId, ns: u64) {
        self.now = self.now.plus_ns(ns);
        let request = self.requests.get(id).unwrap();
        let io = request.io.unwrap();
        self.race.end_io(DISK, io.reason, request.op.range(), false);
        self.race.note_disk(self.now, &request, io, true);
        if request.waits() {
            self.race.note_disk_first(self.now, &request, io, &mut self.stats);
        }
        self.requests.end_io(id);
        self.requests.answer(id);
        self.race.end_read(DISK);
    }

    /// Lets the servers answer a new read of `pools` after `ns`.
    fn hit(&mut self, pools: &[PoolIndex], ns: u64) {
        let id = self.ask(pools);
        self.now = self.now.plus_ns(ns);
        let request = self.requests.answer(id).unwrap();
        self.race.end_read(DISK);
        self.race.note_server_first(self.now, &request, &mut self.stats);
    }

    /// Returns how long the read that is late next will have waited from now on.
    fn late_after(&mut self) -> u64 {
        self.race.late_deadline(&self.requests).unwrap().since_ns(self.now)
    }

    /// Sends all late reads to the disk, and returns them with the pools that they count for.
    fn hedges(&mut self) -> Vec<(RequestId, PoolIndex)> {
        let (credit, mut late) = (self.race.credit_before(), Vec::new());
        while let Some(read) = self.race.next_late(self.now, credit, &self.requests, &mut self.stats) {
            if let Some(reason) = read.reason {
                self.ask_disk(read.id, reason);
                late.push((read.id, self.requests.get(read.id).unwrap().rival));
            }
        }
        late
    }

    /// Lets the disk answer a read of `pools` for which the servers are late.
    fn lose(&mut self, pools: &[PoolIndex]) {
        let id = self.ask(pools);
        let ns = self.late_after();
        self.now = self.now.plus_ns(ns);
        assert_eq!(self.hedges().len(), 1);
        self.disk_answers(id, DISK_NS);
    }

    /// Loses reads of `pools` until a breaker opens.
    fn open(&mut self, pools: &[PoolIndex]) {
        let before = self.stats.breaker_openings;
        while self.stats.breaker_openings == before {
            self.lose(pools);
        }
    }

    fn p50_ns(&self, pool: PoolIndex) -> u64 {
        self.race.server_latency(pool).unwrap().p50_ns
    }

    fn breaker(&self, pool: PoolIndex) -> BreakerState {
        self.race.status(pool).breaker
    }
}

#[test]
fn reads_of_a_fast_pool_are_not_hedged_later_because_another_one_is_slow() {
    let mut it = Track::trained();
    let slow = it.ask(&[SLOW]);
    assert!(it.late_after() > SLOW_NS, "3 ms are normal for it");
    let fast = it.ask(&[FAST]);
    assert!(it.late_after() <= SOON_NS, "it began later, and is late sooner");
    it.now = it.now.plus_ns(SOON_NS);
    assert_eq!(it.hedges(), [(fast, FAST)]);
    it.now = it.now.plus_ns(DISK_NS);
    assert_eq!(it.hedges(), [(slow, SLOW)]);
}

#[test]
fn a_breaker_that_is_open_for_one_pool_leaves_the_reads_of_the_other_alone() {
    let mut it = Track::trained();
    it.open(&[SLOW]);
    assert_eq!((it.breaker(SLOW), it.breaker(FAST)), (BreakerState::Open, BreakerState::Closed));
    assert_eq!((it.route(&[SLOW]), it.route(&[FAST])), (Route::Disk, Route::Server));
    assert_eq!(it.route(&[FAST, SLOW]), Route::Disk, "it would wait for a pool that is left alone");
    assert!((0..64).all(|_| it.race.admits(FAST)));
    assert_eq!((0..64).filter(|_| it.race.admits(SLOW)).count(), 4);
    it.now = it.now.plus_ns(20 * MS);
    assert_eq!((it.route(&[SLOW]), it.route(&[FAST])), (Route::Both, Route::Server));
    let before = it.now;
    it.hit(&[FAST], FAST_NS);
    assert_eq!(it.now.since_ns(before), FAST_NS);
}

#[test]
fn a_probe_of_one_pool_does_not_keep_those_of_another_from_beginning() {
    let mut it = Track::trained();
    for pool in [SLOW, FAST] {
        it.open(&[pool]);
    }
    it.now = it.now.plus_ns(20 * MS);
    let (id, pools) = (it.begin(), set(&[SLOW]));
    it.requests.begin_wait(id, 1, pools, SLOW);
    assert!(it.race.begin_probe(it.now, id, DISK, it.requests.newest(), pools, &mut it.stats));
    assert_eq!((it.route(&[SLOW]), it.route(&[FAST])), (Route::Disk, Route::Both));
    assert_eq!(it.route(&[SLOW, FAST]), Route::Disk);
}

#[test]
fn a_read_of_several_pools_counts_for_the_slowest() {
    let mut it = Track::trained();
    let before = it.p50_ns(FAST);
    (0..600).for_each(|_| it.hit(&[FAST, SLOW], 2 * MS));
    assert_eq!(it.p50_ns(FAST), before);
    assert!(it.p50_ns(SLOW) < SLOW_NS * 3 / 4);
    let both = it.ask(&[FAST, SLOW]);
    assert!(it.late_after() > 2 * MS, "what is normal for the slower one is not late");
    assert_eq!(it.requests.reads_waiting_for(FAST), [both]);
    assert_eq!(it.requests.reads_waiting_for(SLOW), [both]);
    assert_eq!(it.requests.reads_waiting_for(PoolIndex(1)), []);
    it.now = it.now.plus_ns(DISK_NS);
    assert_eq!(it.hedges(), [(both, SLOW)]);
    it.disk_answers(both, DISK_NS);
    it.open(&[FAST, SLOW]);
    assert_eq!((it.breaker(SLOW), it.breaker(FAST)), (BreakerState::Open, BreakerState::Closed));
}

#[test]
fn nothing_known_makes_the_highest_number_the_slowest() {
    let race = Race::new(true);
    assert_eq!(race.slowest(set(&[PoolIndex(2), PoolIndex(9), PoolIndex(4)])), PoolIndex(9));
    assert_eq!(race.slowest(set(&[PoolIndex(2)])), PoolIndex(2));
    assert_eq!(Track::trained().race.slowest(set(&[FAST, PoolIndex(9)])), FAST, "its median is known");
}

#[test]
fn forgetting_one_pool_keeps_the_waits_of_the_others() {
    let mut it = Track::trained();
    let fast = it.ask(&[FAST]);
    let slow = it.ask(&[SLOW]);
    it.late_after();
    it.race.forget_server(SLOW);
    assert_eq!((it.race.server_latency(SLOW), it.race.queued()), (None, 1));
    it.now = it.now.plus_ns(DISK_NS);
    assert_eq!(it.hedges(), [(fast, FAST)]);
    assert_eq!(it.requests.reads_waiting_for(SLOW), [slow], "the engine gives up its pages");
    assert!(it.p50_ns(FAST) < FAST_NS * 2);
}

#[test]
fn forgetting_one_pool_keeps_the_deferred_reads_of_the_others() {
    let mut it = Track::trained();
    let range = blocks(0, 1);
    let mut abandoned = Vec::new();
    for _ in 0..128 {
        it.race.begin_io(it.now, DISK, ReadReason::Timeout, None);
        it.race.begin_abandoned(DISK, range);
        abandoned.push(ReadReason::Timeout);
    }
    let fast = it.ask(&[FAST]);
    it.ask(&[SLOW]);
    for _ in 0..2 {
        it.now = it.now.plus_ns(1000 * MS);
        assert_eq!(it.hedges(), [], "the disk has too many abandoned reads");
    }
    assert_eq!((it.race.queued(), it.race.late_deadline(&it.requests)), (2, None));
    it.race.forget_server(SLOW);
    for reason in abandoned {
        it.race.end_io(DISK, reason, range, true);
    }
    assert_eq!(it.hedges(), [(fast, FAST)]);
}

#[test]
fn the_overruns_of_all_pools_are_those_of_one_guest() {
    let mut it = Track::trained();
    (0..3).for_each(|_| it.hit(&[SLOW], 2 * DISK_NS));
    assert_eq!((it.breaker(SLOW), it.breaker(FAST)), (BreakerState::Closed, BreakerState::Closed));
    it.hit(&[FAST], 2 * DISK_NS);
    assert_eq!((it.breaker(SLOW), it.breaker(FAST)), (BreakerState::Closed, BreakerState::Open));
}

#[test]
fn a_pool_that_is_left_alone_is_the_slowest() {
    let mut it = Track::trained();
    assert_eq!(it.race.slowest(set(&[FAST, SLOW])), SLOW);
    it.open(&[FAST]);
    assert_eq!(it.race.slowest(set(&[FAST, SLOW])), FAST);
}

#[test]
fn a_probe_counts_eightfold_for_the_disk_while_its_pool_is_used() {
    for is_open in [false, true] {
        let mut it = Track::trained();
        if is_open {
            it.open(&[SLOW]);
        }
        for _ in 0..12 {
            let id = it.begin();
            it.requests.begin_wait(id, 1, set(&[SLOW]), SLOW);
            it.ask_disk(id, ReadReason::Probe);
            it.disk_answers(id, MS);
        }
        let disk = it.race.status(SLOW).disk.unwrap();
        assert_eq!(disk.p50_ns > 2 * MS, is_open, "{disk:?}");
    }
}

#[test]
fn what_the_disk_takes_beside_abandoned_reads_says_nothing_of_it() {
    let mut it = Track::trained();
    let before = it.race.status(FAST).disk;
    let slow_reads = |it: &mut Track| {
        for _ in 0..128 {
            let id = it.begin();
            it.ask_disk(id, ReadReason::Needed);
            it.disk_answers(id, 5 * DISK_NS);
        }
    };
    it.race.begin_io(it.now, DISK, ReadReason::Timeout, None);
    it.race.begin_abandoned(DISK, blocks(0, 1));
    slow_reads(&mut it);
    assert_eq!(it.race.status(FAST).disk, before);
    it.race.end_io(DISK, ReadReason::Timeout, blocks(0, 1), true);
    slow_reads(&mut it);
    assert!(it.race.status(FAST).disk.unwrap().p50_ns > 4 * DISK_NS);
}

#[test]
fn a_disk_that_is_slow_although_it_was_asked_in_time_is_no_overrun_of_the_server() {
    for (waited_ns, state) in [(SOON_NS, BreakerState::Closed), (2 * MS, BreakerState::Open)] {
        let mut it = Track::trained();
        for _ in 0..512 {
            let id = it.begin();
            it.ask_disk(id, ReadReason::Needed);
            it.disk_answers(id, DISK_NS);
        }
        for _ in 0..4 {
            let id = it.ask(&[FAST]);
            it.now = it.now.plus_ns(waited_ns);
            assert_eq!(it.hedges(), [(id, FAST)]);
            it.disk_answers(id, 3 * DISK_NS);
        }
        assert_eq!(it.breaker(FAST), state);
    }
}
