//! Several pools at once: what is lost with one of them, and how they share the cache.

use super::super::pool::DrainReason;
use super::placement::{A, B, C, D, E, SECOND, of_size, room, size};
use super::*;
use std::collections::BTreeMap;

/// Number of pages of each of the four servers.
pub(super) const PART: u32 = 25;

/// A cache whose servers are modelled: what each has in each slot.
pub(super) struct Cluster {
    pub(super) bench: Bench,
    pub(super) pages: BTreeMap<(ServerNumber, u32), u8>,
    pub(super) sends: BTreeMap<ServerNumber, u64>,
}

pub(super) fn config_of(pages: u32) -> EngineConfig {
    EngineConfig { cache: PageCount(pages), guest_memory: PageCount(400), send_window: 1000, ..config() }
}

impl Cluster {
    /// Makes a cache of `pages` pages on servers that have the memory given with them.
    pub(super) fn new(pages: u32, servers: &[(ServerNumber, u32)]) -> Self {
        Self::of(config_of(pages), servers)
    }

    /// Makes a cache of this configuration, as [`Self::new`].
    pub(super) fn of(config: EngineConfig, servers: &[(ServerNumber, u32)]) -> Self {
        let numbers: Vec<_> = servers.iter().map(|(server, _)| *server).collect();
        let bench = of_size(config, &numbers);
        let mut cluster = Self { bench, pages: BTreeMap::new(), sends: BTreeMap::new() };
        for (server, available) in servers {
            cluster.bench.engine.handle_answer(cluster.bench.now, *server, room(1, *available));
        }
        cluster.settle();
        cluster
    }

    /// Makes a full cache on four servers that could give up to `room` pages. Returns it with what each server caches: blocks by server.
    pub(super) fn four(room: u32) -> (Self, BTreeMap<ServerNumber, Vec<u64>>) {
        let mut cluster = Self::new(4 * PART, &[(A, PART), (B, PART), (C, PART), (D, PART)]);
        assert_eq!(cluster.granted(), [PART; 4]);
        for number in [0, 1, 2, 3].map(PoolIndex) {
            cluster.bench.engine.pools.pool_mut(number).size.lift_limit(PageCount(room));
        }
        for bno in 0..u64::from(4 * PART) {
            cluster.cache(bno);
        }
        let mut by_server: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for bno in 0..u64::from(4 * PART) {
            by_server.entry(cluster.server_of(bno)).or_default().push(bno);
        }
        assert!(by_server.values().all(|blocks| blocks.len() == PART as usize), "{by_server:?}");
        (cluster, by_server)
    }

    /// Returns the sizes that were granted, by the numbers of the pools.
    pub(super) fn granted(&self) -> Vec<u32> {
        self.bench.engine.status().pools.iter().map(|pool| pool.granted.0).collect()
    }

    /// Executes actions, and all that is due, with servers that give what is asked for. Returns all other actions.
    pub(super) fn settle(&mut self) -> Vec<Action> {
        let mut others = Vec::new();
        loop {
            let actions = self.bench.work();
            if actions.is_empty() {
                return others;
            }
            others.extend(self.execute(actions, true));
        }
    }

    /// Executes actions with servers that give what is asked for, unless they are not to answer. Returns all other actions.
    pub(super) fn execute(&mut self, actions: Vec<Action>, answers: bool) -> Vec<Action> {
        let mut others = Vec::new();
        for action in actions {
            match action {
                Action::SetSize { server, npages } if answers => {
                    self.pages.retain(|(at, slot), _| *at != server || *slot < npages.0);
                    self.bench.engine.handle_sized(self.bench.now, server, npages);
                }
                Action::MovePage { server, from, to } => {
                    let page = self.pages[&(server, from.0)];
                    self.pages.insert((server, to.0), page);
                }
                other => others.push(other),
            }
        }
        others
    }

    pub(super) fn content(bno: u64) -> u8 {
        u8::try_from(bno + 1).unwrap()
    }

    /// Has the guest read and evict a block. Returns whether it was admitted.
    pub(super) fn cache(&mut self, bno: u64) -> bool {
        let page = page(Self::content(bno));
        self.bench.do_from_disk(GuestOp::Read(blocks(bno, 1)), &page);
        self.evict(bno)
    }

    /// Has the guest evict a block that it has. Returns whether it was admitted.
    pub(super) fn evict(&mut self, bno: u64) -> bool {
        let page = page(Self::content(bno));
        let Evicted::Admit(Admitted { at, demoted_to }) = self.bench.engine.handle_evicted(&page) else { return false };
        if let Some(to) = demoted_to {
            let demoted = self.pages[&(at.server, at.slot.0)];
            self.store(to, u64::from(demoted) - 1);
        }
        self.store(at, bno);
        true
    }

    pub(super) fn store(&mut self, at: PoolSlot, bno: u64) {
        self.pages.insert((at.server, at.slot.0), Self::content(bno));
        *self.sends.entry(at.server).or_default() += 1;
        self.bench.engine.handle_sent(at.server, 1);
    }

    /// Returns the server that has a cached block.
    pub(super) fn server_of(&self, bno: u64) -> ServerNumber {
        let engine = &self.bench.engine;
        let known = engine.known(BlockId { disk: DISK, bno: BlockNumber(bno) }).expect("the block is known");
        let slot = engine.index().cached(known).expect("the block is cached");
        engine.pools.place_of(slot, engine.index()).expect("its pool has a session").1.server
    }

    /// Has the guest read a block. Returns whether a server answers it, with the right page.
    pub(super) fn hits(&mut self, bno: u64) -> bool {
        let actions = self.bench.read(1, blocks(bno, 1));
        let actions = self.execute(actions, false);
        let right = page(Self::content(bno));
        let mut is_hit = false;
        for action in &actions {
            if let Action::Fetch { fetch, at } = *action {
                let page = page(self.pages[&(at.server, at.slot.0)]);
                let outcome = self.bench.engine.handle_page(self.bench.now, at.server, fetch, &page);
                assert_eq!((outcome, self.bench.actions()), (deliver(1, 0), vec![complete(1)]));
                is_hit = true;
            }
        }
        let from_disk = |action: &Action| matches!(action, Action::Disk { .. } | Action::DiskToo { .. });
        if actions.iter().any(from_disk) {
            let completed = self.bench.disk_done(1, Ok(()), &right);
            assert_eq!(completed.contains(&complete(1)), !is_hit);
        }
        is_hit
    }

    pub(super) fn count_hits(&mut self, blocks: std::ops::Range<u64>) -> usize {
        blocks.filter(|bno| self.hits(*bno)).count()
    }

    /// Begins to drain the pool of a server. Returns its number.
    pub(super) fn drain(&mut self, server: ServerNumber, reason: DrainReason) -> PoolIndex {
        let pool = self.bench.engine.pools.at(server).expect("the server has a pool");
        let now = self.bench.now;
        self.bench.engine.pools.drain(now, now, pool, reason, PageCount(PART));
        pool
    }

    pub(super) fn lose(&mut self, server: ServerNumber) -> Vec<Action> {
        self.bench.engine.handle_disconnected(self.bench.now, server);
        self.bench.all_actions()
    }

    /// Returns what a server offers that still has its pool.
    pub(super) fn warm(&self, server: ServerNumber, npages: u32) -> Option<PoolOffer> {
        let sends_received = self.sends.get(&server).copied().unwrap_or_default();
        Some(PoolOffer { generation: 1, npages: PageCount(npages), available: PageCount(0), sends_received })
    }
}

#[test]
fn sixteen_pools_of_different_sizes() {
    let servers: Vec<_> = (1..=17).map(|number| (ServerNumber(number), number)).collect();
    let sum = (2..=17).sum();
    let mut cluster = Cluster::new(sum, &servers);
    let mut granted = cluster.granted();
    granted.sort_unstable();
    assert_eq!(granted, (2..=17).collect::<Vec<_>>(), "the largest sixteen of seventeen");
    assert!((0..u64::from(sum)).all(|bno| cluster.cache(bno)));
    for (server, slot) in cluster.pages.keys() {
        assert!(*slot < server.0, "slot {slot} of {server:?}");
    }
    assert_eq!((cluster.pages.len(), cluster.count_hits(0..u64::from(sum))), (sum as usize, sum as usize));
    assert_eq!(cluster.bench.engine.index().slot_counts(), SlotCounts { free: 0, used: sum, draining: 0 });
}

#[test]
fn losing_one_of_four_pools_costs_its_pages_only() {
    let (mut cluster, of) = Cluster::four(PART);
    cluster.bench.wait(60 * SECOND);
    // Reads are under way: one at A, one at B, one that needs both.
    let fetch_a = only_fetch(&cluster.bench.read(10, blocks(of[&A][0], 1)));
    let fetch_b = only_fetch(&cluster.bench.read(11, blocks(of[&B][0], 1)));
    let first = (0..u64::from(4 * PART) - 1)
        .find(|bno| {
            [cluster.server_of(*bno), cluster.server_of(bno + 1)] == [A, B]
                || [cluster.server_of(*bno), cluster.server_of(bno + 1)] == [B, A]
        })
        .expect("neighbours are on A and B");
    let both = cluster.bench.read(12, blocks(first, 2));
    assert_eq!(both.len(), 2, "{both:?}");
    let actions = cluster.lose(A);
    let to_disk: Vec<_> = actions.iter().filter(|action| matches!(action, Action::Disk { .. })).copied().collect();
    let expected =
        [disk_action(10, GuestOp::Read(blocks(of[&A][0], 1))), disk_action(12, GuestOp::Read(blocks(first, 2)))];
    assert_eq!(to_disk, expected);
    assert_eq!(cluster.bench.engine.stats().fetch_disconnected, 2);
    // Replies of A mean nothing any more, and nobody else may answer for it.
    for server in [A, B] {
        let outcome = cluster.bench.engine.handle_page(cluster.bench.now, server, fetch_a, &page(1));
        assert_eq!(outcome, PageOutcome::Unexpected);
    }
    let content = Cluster::content(of[&B][0]);
    let outcome = cluster.bench.engine.handle_page(cluster.bench.now, B, fetch_b, &page(content));
    assert_eq!((outcome, cluster.bench.actions()), (deliver(11, 0), vec![complete(11)]));
    cluster.bench.disk_done(10, Ok(()), &page(Cluster::content(of[&A][0])));
    let pair: Vec<u8> = [first, first + 1].iter().flat_map(|bno| page(Cluster::content(*bno))).collect();
    cluster.bench.disk_done(12, Ok(()), &pair);
    let before = cluster.bench.engine.index().slot_counts();
    for bno in &of[&A] {
        assert!(!cluster.hits(*bno));
    }
    for bno in [B, C, D].iter().flat_map(|server| &of[server]) {
        assert!(cluster.hits(*bno), "block {bno}");
    }
    assert_eq!(cluster.bench.engine.index().slot_counts(), before, "nothing of the others was given up");
}

#[test]
fn a_reply_ends_only_a_fetch_of_its_own_server() {
    let (mut cluster, of) = Cluster::four(PART);
    let bno = of[&C][3];
    let fetch = only_fetch(&cluster.bench.read(1, blocks(bno, 1)));
    for server in [A, B, D, E] {
        let right = page(Cluster::content(bno));
        let outcome = cluster.bench.engine.handle_page(cluster.bench.now, server, fetch, &right);
        assert_eq!(outcome, PageOutcome::Unexpected);
        cluster.bench.engine.handle_missing(cluster.bench.now, server, fetch);
        assert_eq!(cluster.bench.actions(), []);
    }
    assert_eq!(cluster.bench.engine.index().pinned_slots(), PageCount(1));
    let outcome = cluster.bench.engine.handle_page(cluster.bench.now, C, fetch, &page(Cluster::content(bno)));
    assert_eq!((outcome, cluster.bench.actions()), (deliver(1, 0), vec![complete(1)]));
}

#[test]
fn a_lost_pool_that_returns_in_time_is_warm_though_the_others_have_room() {
    let (mut cluster, of) = Cluster::four(10 * PART);
    cluster.bench.wait(60 * SECOND);
    assert!(cluster.lose(B).contains(&Action::Ask(B)));
    cluster.bench.wait(4 * SECOND);
    assert_eq!(cluster.settle(), []);
    let warm = cluster.warm(B, PART);
    assert_eq!(cluster.bench.answer(B, warm), [Action::Use(B)]);
    cluster.settle();
    assert_eq!(cluster.granted(), [PART; 4]);
    assert_eq!(cluster.count_hits(0..u64::from(4 * PART)), 4 * PART as usize);
    assert_eq!(of[&B].len(), PART as usize);
}

#[test]
fn a_large_pool_that_returns_is_as_large_as_before_though_a_small_one_could_grow() {
    let mut cluster = Cluster::new(50, &[(A, 40), (B, 10)]);
    let small = cluster.bench.engine.pools.at(B).expect("neither has memory for all");
    cluster.bench.engine.pools.pool_mut(small).size.lift_limit(PageCount(50));
    assert!((0..50).all(|bno| cluster.cache(bno)));
    cluster.bench.wait(60 * SECOND);
    assert!(cluster.lose(A).contains(&Action::Ask(A)));
    let warm = cluster.warm(A, 40);
    assert_eq!(cluster.bench.answer(A, warm), [Action::Use(A)]);
    assert_eq!(cluster.settle(), []);
    let mut granted = cluster.granted();
    granted.sort_unstable();
    assert_eq!((granted, cluster.count_hits(0..50)), (vec![10, 40], 50));
}

#[test]
fn a_server_that_returns_with_more_than_its_pool_had_takes_nothing_from_the_others() {
    let mut cluster = Cluster::new(2 * PART, &[(A, PART), (B, PART)]);
    assert!((0..u64::from(2 * PART)).all(|bno| cluster.cache(bno)));
    cluster.bench.wait(60 * SECOND);
    assert!(cluster.lose(A).contains(&Action::Ask(A)));
    let claim = cluster.warm(A, u32::MAX);
    let actions = cluster.bench.answer(A, claim);
    assert_eq!(actions, [Action::Use(A), size(A, PART)]);
    cluster.execute(actions, true);
    assert_eq!(cluster.settle(), []);
    assert_eq!((cluster.granted(), cluster.count_hits(0..50)), (vec![PART; 2], 50));
}

#[test]
fn the_share_of_a_lost_pool_goes_to_the_others() {
    let (mut cluster, of) = Cluster::four(10 * PART);
    cluster.bench.wait(60 * SECOND);
    cluster.lose(B);
    cluster.bench.engine.handle_answer(cluster.bench.now, B, None);
    assert_eq!(cluster.settle(), []);
    assert_eq!(cluster.granted(), [PART; 3]);
    cluster.bench.wait(6 * SECOND);
    cluster.settle();
    let mut granted = cluster.granted();
    granted.sort_unstable();
    assert_eq!(granted, [33, 33, 34], "all of what is wanted");
    assert_eq!(cluster.bench.engine.index().total_capacity(), PageCount(4 * PART));
    let others: Vec<_> = [A, C, D].iter().flat_map(|server| of[server].clone()).collect();
    assert!(others.iter().all(|bno| cluster.hits(*bno)));
    // B comes back too late. The others have what is wanted.
    let warm = cluster.warm(B, PART);
    cluster.bench.engine.handle_answer(cluster.bench.now, B, warm);
    assert_eq!(cluster.settle(), [Action::Release(B)]);
}

/// Nobody else has memory, so nothing is gained by giving it up.
#[test]
fn a_lost_pool_is_kept_while_no_other_can_take_its_share() {
    let (mut cluster, _) = Cluster::four(PART);
    cluster.bench.wait(60 * SECOND);
    cluster.lose(B);
    cluster.bench.engine.handle_answer(cluster.bench.now, B, None);
    for _ in 0..100 {
        let actions = cluster.bench.until_next();
        cluster.bench.answer_in_vain(actions);
    }
    let warm = cluster.warm(B, PART);
    let mut actions = Vec::new();
    while !actions.contains(&Action::Ask(B)) {
        actions = cluster.bench.until_next();
    }
    cluster.bench.engine.handle_answer(cluster.bench.now, B, warm);
    cluster.settle();
    for bno in 0..u64::from(4 * PART) {
        assert!(cluster.hits(bno), "{bno} {:?} {:?}", cluster.bench.engine.status(), cluster.bench.engine.stats());
    }
}

#[test]
fn a_server_that_lost_its_pool_gets_a_new_one_and_the_others_keep_theirs() {
    let (mut cluster, of) = Cluster::four(PART);
    cluster.bench.wait(60 * SECOND);
    cluster.lose(B);
    cluster.pages.retain(|(server, _), _| *server != B);
    cluster.bench.engine.handle_answer(cluster.bench.now, B, room(2, PART));
    assert_eq!(cluster.settle(), [Action::Use(B)]);
    let mut granted = cluster.granted();
    granted.sort_unstable();
    assert_eq!(granted, [PART; 4]);
    assert_eq!(cluster.count_hits(0..u64::from(4 * PART)), 3 * PART as usize);
    assert!(of[&B].iter().all(|bno| cluster.cache(*bno)), "there is room for what was lost");
    assert_eq!(cluster.count_hits(0..u64::from(4 * PART)), 4 * PART as usize);
}

/// It was asked for the sake of the pool that it had, and is not asked again for that.
#[test]
fn a_server_that_lost_its_pool_and_is_not_needed_is_left_alone() {
    let (mut cluster, _) = Cluster::four(10 * PART);
    cluster.bench.engine.resize(cluster.bench.now, PageCount(3 * PART), PageCount(0));
    cluster.settle();
    cluster.bench.wait(60 * SECOND);
    cluster.lose(B);
    cluster.bench.wait(6 * SECOND);
    cluster.settle();
    assert_eq!(cluster.granted(), [PART; 3]);
    cluster.bench.engine.handle_answer(cluster.bench.now, B, room(2, PART));
    assert_eq!(cluster.settle(), [Action::Release(B)]);
    let before = cluster.bench.now;
    for _ in 0..20 {
        let actions = cluster.bench.until_next();
        assert_eq!(actions, [], "only latencies are compared");
    }
    assert!(cluster.bench.now > before.plus_ns(100 * SECOND));
}

#[test]
fn all_pools_return_after_an_outage_of_the_network() {
    let (mut cluster, _) = Cluster::four(10 * PART);
    cluster.bench.wait(60 * SECOND);
    for server in [A, B, C, D] {
        cluster.lose(server);
    }
    for server in [A, B, C, D] {
        cluster.bench.engine.handle_answer(cluster.bench.now, server, None);
    }
    let end = cluster.bench.now.plus_ns(40 * SECOND);
    let mut asked = Vec::new();
    while cluster.bench.now < end {
        for action in cluster.bench.until_next() {
            if let Action::Ask(server) = action {
                asked.push(server);
                cluster.bench.engine.handle_answer(cluster.bench.now, server, None);
            }
        }
    }
    while cluster.bench.engine.status().pools.len() < 4 {
        for action in cluster.bench.until_next() {
            if let Action::Ask(server) = action {
                let warm = cluster.warm(server, PART);
                cluster.bench.engine.handle_answer(cluster.bench.now, server, warm);
            }
        }
    }
    cluster.settle();
    assert_eq!(cluster.count_hits(0..u64::from(4 * PART)), 4 * PART as usize);
}

/// Each of them would give up as many slots in a turn as all together may.
#[test]
fn lost_pools_that_are_given_up_together_share_a_turn() {
    let slots = 8;
    let servers = [(A, PART), (B, PART), (C, PART), (D, PART), (E, 0)];
    let mut cluster = Cluster::of(EngineConfig { slots_per_turn: slots, ..config_of(4 * PART) }, &servers);
    assert_eq!(cluster.granted(), [PART; 4]);
    assert!((0..u64::from(4 * PART)).all(|bno| cluster.cache(bno)));
    cluster.bench.wait(60 * SECOND);
    for server in [A, B, C, D] {
        cluster.lose(server);
    }
    for server in [A, B, C, D] {
        cluster.bench.answer(server, None);
    }
    let actions = cluster.bench.answer(E, room(1, 4 * PART));
    assert!(actions.contains(&Action::Use(E)), "{actions:?}");
    let lost = |cluster: &Cluster| -> u32 {
        [0, 1, 2, 3].map(|number| cluster.bench.engine.index().capacity(PoolIndex(number)).0).iter().sum()
    };
    assert_eq!(lost(&cluster), 4 * PART);
    for _ in 0..4 * PART {
        let before = lost(&cluster);
        cluster.bench.timer();
        let gone = before - lost(&cluster);
        assert!(gone <= slots, "{gone} slots in a turn");
    }
    assert_eq!(lost(&cluster), 0);
}

#[test]
fn a_resize_changes_all_pools_and_loses_no_page_that_fits() {
    let (mut cluster, _) = Cluster::four(10 * PART);
    cluster.bench.engine.resize(cluster.bench.now, PageCount(40), PageCount(0));
    let actions = cluster.bench.all_actions();
    let sizes = cluster.execute(actions, false);
    assert_eq!(sizes.len(), 4, "{sizes:?}");
    // The guest reads meanwhile.
    assert!(cluster.hits(99));
    for action in sizes {
        cluster.execute(vec![action], true);
    }
    assert_eq!(cluster.settle(), []);
    assert_eq!(cluster.granted(), [10; 4]);
    assert_eq!(cluster.pages.len(), 40);
    // Block 99 was hit, so it was next to be discarded.
    assert!((61..99).all(|bno| cluster.hits(bno)), "the newest pages are still there");
    assert_eq!(cluster.count_hits(0..60), 0);
    cluster.bench.engine.resize(cluster.bench.now, PageCount(90), PageCount(0));
    cluster.settle();
    let mut granted = cluster.granted();
    granted.sort_unstable();
    assert_eq!(granted, [22, 22, 23, 23]);
    let slots = cluster.bench.engine.status().slots;
    assert_eq!((slots.free + slots.used, slots.draining), (90, 0));
    assert!((61..99).all(|bno| cluster.hits(bno)));
}

/// Otherwise the one that has pages would discard some of them.
#[test]
fn a_cache_that_shrinks_takes_what_is_not_granted_yet_first() {
    let mut bench = of_size(config_of(2 * PART), &[A, B]);
    for server in [A, B] {
        bench.engine.handle_answer(bench.now, server, room(1, PART));
    }
    bench.all_actions();
    assert_eq!(bench.gives(A, PART), []);
    bench.engine.resize(bench.now, PageCount(PART + 5), PageCount(0));
    assert_eq!(bench.all_actions(), [], "A keeps all that it has, and B has not answered");
    assert_eq!(bench.gives(B, PART), [size(B, 5)]);
}

#[test]
fn one_setsize_is_outstanding_at_a_time_for_each_pool() {
    let (mut cluster, _) = Cluster::four(10 * PART);
    let mut asked: BTreeMap<ServerNumber, PageCount> = BTreeMap::new();
    for wanted in [80, 60, 97, 100, 4, 100] {
        cluster.bench.engine.resize(cluster.bench.now, PageCount(wanted), PageCount(0));
        for action in cluster.bench.work() {
            if let Action::SetSize { server, npages } = action {
                assert!(asked.insert(server, npages).is_none(), "{server:?} was asked twice");
            }
        }
        // One of them answers.
        if let Some((server, npages)) = asked.pop_first() {
            cluster.bench.engine.handle_sized(cluster.bench.now, server, npages);
            for action in cluster.bench.work() {
                if let Action::SetSize { server, npages } = action {
                    assert!(asked.insert(server, npages).is_none(), "{server:?} was asked twice");
                }
            }
        }
    }
    while let Some((server, npages)) = asked.pop_first() {
        cluster.bench.engine.handle_sized(cluster.bench.now, server, npages);
        for action in cluster.bench.work() {
            if let Action::SetSize { server, npages } = action {
                assert!(asked.insert(server, npages).is_none(), "{server:?} was asked twice");
            }
        }
    }
    assert_eq!(cluster.granted().iter().sum::<u32>(), 100, "exact in the end");
}

/// What is sent is admitted, and found again, whichever server has it.
#[test]
fn pages_go_only_where_there_is_room_on_the_way() {
    let numbers = [A, B];
    let mut bench = of_size(EngineConfig { send_window: 2, ..config_of(8) }, &numbers);
    for server in numbers {
        bench.engine.handle_answer(bench.now, server, room(1, 4));
    }
    bench.grant();
    let mut servers = Vec::new();
    for bno in 0..4 {
        bench.do_from_disk(GuestOp::Read(blocks(bno, 1)), &page(u8::try_from(bno + 1).unwrap()));
        let Evicted::Admit(Admitted { at, .. }) = bench.engine.handle_evicted(&page(u8::try_from(bno + 1).unwrap()))
        else {
            panic!("there is room for two pages to each")
        };
        servers.push(at.server);
    }
    servers.sort_unstable();
    assert_eq!(servers, [A, A, B, B]);
    bench.do_from_disk(GuestOp::Read(blocks(9, 1)), &page(10));
    assert_eq!(bench.engine.handle_evicted(&page(10)), Evicted::Dropped);
    bench.engine.handle_sent(B, 1);
    let Evicted::Admit(Admitted { at, .. }) = bench.engine.handle_evicted(&page(10)) else { panic!("B has room") };
    assert_eq!(at.server, B);
}

/// Compares the latencies of the pools for a number of seconds, in which A takes four times as long as the others and more.
/// Returns after how many seconds A is drained.
fn slow_for(cluster: &mut Cluster, seconds: u64, is_slow: impl Fn(u64) -> bool) -> Option<u64> {
    let slow = cluster.bench.engine.pools.at(A).expect("A has a pool");
    let start = cluster.bench.now;
    for second in 0..seconds {
        let latency = |pool: PoolIndex| Some(if pool == slow && is_slow(second) { 900_000 } else { 200_000 });
        let now = start.plus_ns(second * SECOND);
        if let Some(found) = cluster.bench.engine.pools.find_slow(now, latency) {
            assert_eq!(found, slow);
            return Some(second);
        }
    }
    None
}

#[test]
fn a_pool_that_is_slow_for_a_minute_is_found_if_the_others_have_room() {
    let (mut cluster, _) = Cluster::four(10 * PART);
    let found = slow_for(&mut cluster, 600, |_| true).expect("A is slow");
    assert!((50..=70).contains(&found), "{found}");
    let (mut cluster, _) = Cluster::four(10 * PART);
    assert_eq!(slow_for(&mut cluster, 600, |second| second % 50 < 40), None, "it is slow for less than a minute");
    let (mut cluster, _) = Cluster::four(PART);
    assert_eq!(slow_for(&mut cluster, 600, |_| true), None, "nobody else has room");
}

#[test]
fn a_list_that_is_given_again_ends_no_drain_of_a_slow_pool() {
    let (mut cluster, _) = Cluster::four(PART);
    cluster.drain(A, DrainReason::Slow);
    let lists: [(&[ServerNumber], _); 3] = [
        (&[A, B, C, D], [true, false, false, false]),
        (&[B, C, D], [true, false, false, false]),
        // It was drained for the sake of the list last.
        (&[A, B, C, D], [false; 4]),
    ];
    for (list, expected) in lists {
        cluster.bench.engine.set_servers(cluster.bench.now, list, Leaving::Drained);
        assert_eq!(cluster.settle(), []);
        let mut pools = cluster.bench.engine.status().pools;
        pools.sort_by_key(|pool| pool.server);
        assert_eq!(pools.iter().map(|pool| pool.is_draining).collect::<Vec<_>>(), expected, "{list:?}");
    }
}

#[test]
fn one_slow_pool_is_found_in_a_minute() {
    let (mut cluster, _) = Cluster::four(10 * PART);
    let slow = [A, B].map(|server| cluster.bench.engine.pools.at(server));
    let start = cluster.bench.now;
    let mut found = Vec::new();
    for second in 0..300 {
        let latency = |pool: PoolIndex| Some(if slow.contains(&Some(pool)) { 900_000 } else { 200_000 });
        if cluster.bench.engine.pools.find_slow(start.plus_ns(second * SECOND), latency).is_some() {
            found.push(second);
        }
    }
    assert!(found.len() > 2 && found.windows(2).all(|pair| pair[1] - pair[0] == 60), "{found:?}");
}

#[test]
fn a_slow_pool_is_drained_and_the_others_get_its_share() {
    let (mut cluster, of) = Cluster::four(10 * PART);
    cluster.drain(A, DrainReason::Slow);
    cluster.bench.engine.handle_timer(cluster.bench.now);
    let others = cluster.settle();
    assert_eq!(others, [Action::Leave(A)]);
    let mut granted = cluster.granted();
    granted.sort_unstable();
    assert_eq!(granted, [33, 33, 34]);
    for bno in [B, C, D].iter().flat_map(|server| &of[server]) {
        assert!(cluster.hits(*bno), "block {bno}");
    }
}

/// A slow server is better than none.
#[test]
fn a_slow_pool_that_is_left_alone_takes_pages_again() {
    let (mut cluster, _) = Cluster::four(PART);
    let slow = cluster.drain(A, DrainReason::Slow);
    let is_taking = |cluster: &Cluster| cluster.bench.engine.pools.taking().contains(slow);
    for server in [B, C, D] {
        assert!(!is_taking(&cluster));
        cluster.lose(server);
    }
    assert!(is_taking(&cluster));
}
