//! Pools that end or shrink while the others go on: they are drained, or their server takes memory back.

use super::super::pool::DrainReason;
use super::placement::{A, B, C, SECOND, of_size, room, size};
use super::pools::{Cluster, PART, config_of};
use super::*;
use crate::index::Origin;
use crate::units::PoolSet;
use std::collections::BTreeMap;

impl Cluster {
    /// Kills the process. Its successor has this list of servers.
    fn succeed(&mut self, servers: &[ServerNumber], leaving: Leaving) {
        let words = self.bench.engine.index().words().clone();
        let config = config_of(2 * PART);
        let engine = DiskEngine::resume(&config, words, Origin::Own).map_err(|unusable| unusable.reason).unwrap();
        self.bench = Bench { engine, now: Nanos(1) };
        [DISK, OTHER_DISK].into_iter().for_each(|disk| self.bench.engine.describe_disk(disk, 1 << 40, false));
        self.bench.engine.set_servers(self.bench.now, servers, leaving);
    }
}

/// Two pools of half the cache each. A is taken out of the list.
fn draining() -> (Cluster, Vec<u64>) {
    let mut cluster = Cluster::new(2 * PART, &[(A, PART), (B, PART)]);
    for bno in 0..u64::from(2 * PART) {
        cluster.cache(bno);
    }
    let of_a = (0..u64::from(2 * PART)).filter(|bno| cluster.server_of(*bno) == A).collect();
    cluster.bench.wait(SECOND);
    cluster.bench.engine.set_servers(cluster.bench.now, &[B, C], Leaving::Drained);
    assert_eq!(cluster.bench.all_actions(), [Action::Ask(C)]);
    (cluster, of_a)
}

#[test]
fn a_drained_pool_is_left_when_all_was_read_and_the_others_have_its_share() {
    let (mut cluster, of_a) = draining();
    let of_pool = |cluster: &Cluster| cluster.bench.engine.status().pools.into_iter().find(|pool| pool.server == A);
    assert!(of_pool(&cluster).unwrap().is_draining);
    assert!(cluster.hits(of_a[0]));
    assert!(cluster.cache(120), "B takes it");
    assert_eq!(cluster.server_of(120), B);
    assert_eq!(cluster.bench.answer(C, room(1, 100)), [Action::Use(C)], "C gets what is read");
    let mut read = 1;
    while let Some(pool) = of_pool(&cluster) {
        assert_eq!(pool.slots.used, PART - read, "nothing is lost that is not read");
        assert!(cluster.granted().iter().sum::<u32>() <= 2 * PART);
        if let Some(bno) = of_a.get(read as usize) {
            assert!(cluster.hits(*bno), "block {bno}");
            read += 1;
        }
        cluster.bench.wait(SECOND);
        let others = cluster.settle();
        assert!(others.is_empty() || others == [Action::Leave(A)], "{others:?}");
    }
    assert_eq!((read, cluster.granted()), (PART, vec![PART; 2]));
    assert!(cluster.bench.now.0 < 60 * SECOND);
    assert_eq!(cluster.bench.engine.index().total_capacity(), PageCount(2 * PART));
}

/// What nobody reads is given up little by little, so that the others do not wait for it.
#[test]
fn a_drained_pool_that_is_not_read_shrinks_for_ten_minutes() {
    let (mut cluster, of_a) = draining();
    cluster.bench.engine.handle_answer(cluster.bench.now, C, room(1, 100));
    cluster.settle();
    let start = cluster.bench.now;
    let mut sizes = Vec::new();
    let left = loop {
        cluster.bench.wait(SECOND);
        let others = cluster.settle();
        let pools = cluster.bench.engine.status().pools;
        assert!(pools.iter().map(|pool| pool.granted.0).sum::<u32>() <= 2 * PART, "{pools:?}");
        match pools.iter().find(|pool| pool.server == A) {
            Some(pool) => sizes.push(pool.slots.used),
            None => break others,
        }
        assert_eq!(others, []);
    };
    assert_eq!(left, [Action::Leave(A)]);
    let seconds = cluster.bench.now.since_ns(start) / SECOND;
    assert!((570..=600).contains(&seconds), "{seconds}");
    assert!(sizes[290] >= PART / 2 && sizes[310] <= PART / 2 + 1, "{sizes:?}");
    assert!(sizes.windows(2).all(|pair| pair[1] <= pair[0] && pair[0] - pair[1] <= 1), "{sizes:?}");
    assert!(!cluster.hits(of_a[0]));
    assert_eq!(cluster.granted(), [PART; 2]);
}

#[test]
fn a_cache_that_shrinks_takes_from_a_drained_pool_what_it_takes_from_others() {
    let (mut cluster, _) = draining();
    cluster.bench.engine.handle_answer(cluster.bench.now, C, None);
    cluster.bench.engine.resize(cluster.bench.now, PageCount(20), PageCount(0));
    cluster.settle();
    let mut granted = cluster.granted();
    granted.sort_unstable();
    assert_eq!(granted, [10, 10]);
}

/// While the other pool has not given back its part, that is not to be had from the drained one.
#[test]
fn a_cache_that_shrinks_a_little_takes_no_more_from_a_drained_pool_than_from_others() {
    for (pages, part) in [(40, 20), (26, 13)] {
        let (mut cluster, _) = draining();
        cluster.bench.engine.handle_answer(cluster.bench.now, C, None);
        cluster.bench.engine.resize(cluster.bench.now, PageCount(pages), PageCount(0));
        cluster.settle();
        assert_eq!(cluster.granted(), [part; 2]);
        assert_eq!(cluster.bench.engine.index().slot_counts().used, pages);
    }
}

/// Returns a cluster whose two pools are full and drained: none of the new list answers.
fn drained_alone() -> Cluster {
    let mut cluster = Cluster::new(2 * PART, &[(A, PART), (B, PART)]);
    assert!((0..u64::from(2 * PART)).all(|bno| cluster.cache(bno)));
    cluster.bench.wait(SECOND);
    cluster.bench.engine.set_servers(cluster.bench.now, &[C], Leaving::Drained);
    assert_eq!(cluster.bench.all_actions(), [Action::Ask(C)]);
    cluster.bench.engine.handle_answer(cluster.bench.now, C, None);
    cluster
}

#[test]
fn drained_pools_alone_become_smaller_with_the_cache_and_are_left_when_it_is_off() {
    let mut cluster = drained_alone();
    assert_eq!(cluster.settle(), []);
    assert_eq!(cluster.granted(), [PART; 2]);
    cluster.bench.engine.resize(cluster.bench.now, PageCount(20), PageCount(0));
    assert_eq!(cluster.settle(), []);
    assert_eq!(cluster.granted(), [10; 2]);
    cluster.bench.engine.resize(cluster.bench.now, PageCount(0), PageCount(0));
    let left = cluster.settle();
    assert!(left.len() == 2 && [A, B].iter().all(|server| left.contains(&Action::Leave(*server))), "{left:?}");
    assert_eq!(cluster.bench.engine.status().granted, PageCount(0));
}

/// Those that are lost while it becomes smaller return with all that they had.
#[test]
fn drained_pools_alone_are_no_larger_than_the_cache_together() {
    let cases: [&[ServerNumber]; 2] = [&[B], &[A, B]];
    for lost in cases {
        let mut cluster = drained_alone();
        for server in lost {
            cluster.lose(*server);
        }
        cluster.bench.engine.resize(cluster.bench.now, PageCount(20), PageCount(0));
        cluster.settle();
        for server in lost {
            let warm = cluster.warm(*server, PART);
            cluster.bench.engine.handle_answer(cluster.bench.now, *server, warm);
            assert_eq!(cluster.settle(), [Action::Use(*server)]);
        }
        let granted = cluster.granted();
        assert!(granted.iter().sum::<u32>() == 20 && granted.iter().all(|pages| *pages > 0), "{lost:?}: {granted:?}");
        assert_eq!(cluster.bench.engine.index().slot_counts().used, 20);
    }
}

/// The log of sends has room for a number of moves of all pools. The session of a pool that returns begins while it is drained.
#[test]
fn a_drained_pool_that_returns_moves_no_more_pages_at_a_time_than_its_part() {
    const PAGES: u32 = 6000;
    let mut cluster = Cluster::new(2 * PAGES, &[(A, PAGES), (B, PAGES)]);
    for number in 1..=2 * PAGES {
        let page = number.to_le_bytes().repeat(PAGE_SIZE / 4);
        cluster.bench.do_from_disk(GuestOp::Read(blocks(u64::from(number), 1)), &page);
        let Evicted::Admit(Admitted { at, .. }) = cluster.bench.engine.handle_evicted(&page) else {
            panic!("there is room")
        };
        cluster.store(at, 0);
    }
    cluster.bench.wait(SECOND);
    cluster.bench.engine.set_servers(cluster.bench.now, &[B], Leaving::Drained);
    cluster.lose(A);
    let warm = cluster.warm(A, PAGES);
    cluster.bench.engine.handle_answer(cluster.bench.now, A, warm);
    assert_eq!(cluster.settle(), [Action::Use(A)]);
    cluster.bench.engine.resize(cluster.bench.now, PageCount(PAGES), PageCount(0));
    let (mut since, mut most, mut moves) = (0, 0, 0);
    loop {
        let actions = cluster.bench.work();
        if actions.is_empty() {
            break;
        }
        for action in &actions {
            match action {
                Action::MovePage { server: A, .. } => since += 1,
                Action::SetSize { server: A, .. } => {
                    most = most.max(since);
                    moves += std::mem::take(&mut since);
                }
                _ => {}
            }
        }
        cluster.execute(actions, true);
    }
    // The last turn before the SETSIZE makes up to 512 more.
    assert!(most < 4096 / 2 + 512 && moves > most, "{most} of {moves} moves at a time");
    assert_eq!(cluster.granted(), [PAGES / 2; 2]);
}

/// The other pool may never return. If it does, each has its part.
#[test]
fn a_drained_pool_alone_discards_nothing_for_a_lost_one_and_is_no_larger_than_the_cache() {
    for (pages, alone) in [(40, PART), (20, 20)] {
        let (mut cluster, _) = draining();
        cluster.bench.engine.handle_answer(cluster.bench.now, C, None);
        cluster.lose(B);
        cluster.bench.engine.resize(cluster.bench.now, PageCount(pages), PageCount(0));
        assert_eq!(cluster.settle(), []);
        assert_eq!(cluster.granted(), [alone]);
        let warm = cluster.warm(B, PART);
        cluster.bench.engine.handle_answer(cluster.bench.now, B, warm);
        assert_eq!(cluster.settle(), [Action::Use(B)]);
        assert_eq!(cluster.granted(), [pages / 2; 2]);
    }
}

/// A process that has only a local tier finds a pool of its predecessor at a server that has left the list.
#[test]
fn a_pool_that_is_drained_while_nothing_is_wanted_is_left_at_once() {
    let mut cluster = Cluster::new(2 * PART, &[(A, PART), (B, PART)]);
    cluster.bench.engine.resize(cluster.bench.now, PageCount(0), PageCount(0));
    assert_eq!(cluster.settle(), []);
    cluster.drain(A, DrainReason::Unlisted);
    assert_eq!(cluster.settle(), [Action::Leave(A)]);
}

/// A page that is hit leaves the pool: the guest has it, and when it is evicted, another pool takes it.
#[test]
fn what_is_read_from_a_drained_pool_goes_to_another_one() {
    let (mut cluster, of_a) = draining();
    cluster.bench.engine.handle_answer(cluster.bench.now, C, room(1, 100));
    cluster.settle();
    assert!(cluster.hits(of_a[0]));
    assert!(!cluster.bench.cached(of_a[0]) && cluster.bench.known(of_a[0]));
    let Evicted::Admit(Admitted { at, .. }) = cluster.bench.engine.handle_evicted(&page(Cluster::content(of_a[0])))
    else {
        panic!("the page is known and not cached")
    };
    assert_eq!(at.server, B);
}

#[test]
fn a_drain_that_nobody_can_help_ends_after_some_time() {
    let (mut cluster, of_a) = draining();
    cluster.bench.engine.handle_answer(cluster.bench.now, C, None);
    let start = cluster.bench.now;
    loop {
        let mut actions = cluster.bench.until_next();
        if actions.contains(&Action::Leave(A)) {
            break;
        }
        for action in actions.drain(..) {
            match action {
                Action::Ask(server) => cluster.bench.engine.handle_answer(cluster.bench.now, server, None),
                Action::SetSize { server, .. } => {
                    assert_eq!(server, B);
                    cluster.bench.engine.handle_size_refused(cluster.bench.now, server, PageCount(0));
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(cluster.bench.now.since_ns(start) / SECOND, 600);
    assert!(!cluster.hits(of_a[0]));
}

/// Lets nobody answer and nobody give more until something holds, and gives the same list again after five minutes. Returns how many
/// seconds that takes.
fn seconds_until(cluster: &mut Cluster, holds: impl Fn(&Cluster, &[Action]) -> bool) -> u64 {
    let start = cluster.bench.now;
    let mut is_given_again = false;
    loop {
        let actions = cluster.bench.until_next();
        let seconds = cluster.bench.now.since_ns(start) / SECOND;
        if holds(cluster, &actions) {
            return seconds;
        }
        cluster.bench.answer_in_vain(actions);
        if seconds >= 300 && !std::mem::replace(&mut is_given_again, true) {
            cluster.bench.engine.set_servers(cluster.bench.now, &[B, C], Leaving::Drained);
        }
    }
}

#[test]
fn a_list_that_is_given_again_begins_no_drain_anew() {
    let (mut cluster, _) = draining();
    cluster.bench.engine.handle_answer(cluster.bench.now, C, None);
    assert_eq!(seconds_until(&mut cluster, |_, actions| actions.contains(&Action::Leave(A))), 600);
}

/// Otherwise a server whose connection breaks in the end would be emptied for nearly twice as long.
#[test]
fn a_connection_that_is_made_anew_begins_no_drain_anew() {
    let (mut cluster, _) = draining();
    cluster.bench.engine.handle_answer(cluster.bench.now, C, None);
    let start = cluster.bench.now;
    let half = start.plus_ns(300 * SECOND);
    seconds_until(&mut cluster, |cluster, actions| cluster.bench.now >= half && actions.is_empty());
    cluster.lose(A);
    let warm = cluster.warm(A, PART);
    assert_eq!(cluster.bench.answer(A, warm), [Action::Use(A)]);
    // What is left goes in what is left of the ten minutes.
    let kept = |cluster: &Cluster| cluster.bench.engine.pools.kept_by_drained();
    assert_eq!(kept(&cluster), u64::from(PART));
    let later = start.plus_ns(450 * SECOND);
    seconds_until(&mut cluster, |cluster, actions| cluster.bench.now >= later && actions.is_empty());
    assert!(kept(&cluster).abs_diff(u64::from(PART / 2)) <= 1, "{}", kept(&cluster));
    seconds_until(&mut cluster, |_, actions| actions.contains(&Action::Leave(A)));
    assert_eq!(cluster.bench.now.since_ns(start) / SECOND, 600);
}

/// Nobody has taken over anything, so its pages are worth waiting for, but not longer than a drain takes.
#[test]
fn a_drained_pool_that_is_lost_with_all_others_is_expected_for_ten_minutes() {
    let (mut cluster, _) = draining();
    cluster.bench.engine.handle_answer(cluster.bench.now, C, None);
    for server in [A, B] {
        for action in cluster.lose(server) {
            assert!(matches!(action, Action::Ask(_)), "{action:?}");
            if let Action::Ask(server) = action {
                cluster.bench.engine.handle_answer(cluster.bench.now, server, None);
            }
        }
    }
    let seconds = seconds_until(&mut cluster, |cluster, _| !cluster.bench.engine.has_server(A));
    assert!((600..=606).contains(&seconds), "{seconds}");
    assert!(cluster.bench.engine.has_server(B));
}

#[test]
fn a_drained_pool_does_not_grow_with_the_cache() {
    let (mut cluster, _) = draining();
    cluster.bench.engine.handle_answer(cluster.bench.now, C, None);
    for pages in [20, 2 * PART] {
        cluster.bench.engine.resize(cluster.bench.now, PageCount(pages), PageCount(0));
        cluster.settle();
    }
    let mut granted = cluster.granted();
    granted.sort_unstable();
    assert_eq!(granted, [10, PART], "B has no more to give, and A gets none");
}

#[test]
fn a_server_that_is_listed_again_is_no_longer_drained() {
    let (mut cluster, of_a) = draining();
    cluster.bench.engine.handle_answer(cluster.bench.now, C, None);
    cluster.bench.engine.set_servers(cluster.bench.now, &[A, B], Leaving::Drained);
    cluster.settle();
    assert_eq!(cluster.granted(), [PART; 2]);
    assert!(cluster.bench.engine.status().pools.iter().all(|pool| !pool.is_draining));
    assert!(of_a.iter().all(|bno| cluster.hits(*bno)));
    assert_eq!(cluster.bench.engine.pools.taking(), PoolSet::from_iter([PoolIndex(0), PoolIndex(1)]));
}

/// Answers all that are asked but A, and returns when A is asked.
fn until_asked(cluster: &mut Cluster) {
    for _ in 0..100 {
        for action in cluster.bench.until_next() {
            match action {
                Action::Ask(A) => return,
                Action::Ask(server) => cluster.bench.engine.handle_answer(cluster.bench.now, server, None),
                other => drop(cluster.execute(vec![other], true)),
            }
        }
    }
    panic!("A is not asked");
}

#[test]
fn a_drained_pool_that_is_lost_and_returns_is_drained_further() {
    let (mut cluster, of_a) = draining();
    cluster.bench.engine.handle_answer(cluster.bench.now, C, None);
    cluster.lose(A);
    until_asked(&mut cluster);
    let offer = cluster.warm(A, PART);
    let actions = cluster.bench.answer(A, offer);
    assert!(actions.contains(&Action::Use(A)), "{actions:?}");
    assert!(cluster.bench.engine.status().pools.iter().any(|pool| pool.is_draining && pool.server == A));
    assert!(of_a.iter().all(|bno| cluster.hits(*bno)));
    cluster.bench.wait(SECOND);
    assert!(!cluster.settle().contains(&Action::Use(A)));
    assert!(cluster.bench.engine.has_server(A), "B has no room for its share");
}

#[test]
fn a_drained_pool_that_is_lost_and_stays_away_is_given_up_alone() {
    let (mut cluster, of_a) = draining();
    cluster.bench.engine.handle_answer(cluster.bench.now, C, None);
    cluster.lose(A);
    let start = cluster.bench.now;
    while cluster.bench.engine.has_server(A) {
        let actions = cluster.bench.until_next();
        cluster.bench.answer_in_vain(actions);
    }
    assert_eq!(cluster.bench.now.since_ns(start) / SECOND, 5);
    cluster.settle();
    assert_eq!(cluster.bench.engine.index().slot_counts().used, PART);
    let kept = (0..u64::from(2 * PART)).filter(|bno| !of_a.contains(bno));
    assert!(kept.into_iter().all(|bno| cluster.hits(bno)));
}

/// The process that drained it was killed, or replaced: its successor has the list without the server.
#[test]
fn a_successor_drains_what_its_predecessor_did() {
    let (mut cluster, of_a) = draining();
    cluster.bench.engine.handle_answer(cluster.bench.now, C, None);
    cluster.succeed(&[B], Leaving::Drained);
    let asked: Vec<_> = [A, B].into_iter().map(Action::Ask).collect();
    let mut actions = cluster.bench.all_actions();
    actions.sort_by_key(|action| matches!(action, Action::Ask(B)));
    assert_eq!(actions, asked);
    for server in [A, B] {
        let warm = cluster.warm(server, PART);
        cluster.bench.engine.handle_answer(cluster.bench.now, server, warm);
    }
    cluster.settle();
    let pools = cluster.bench.engine.status().pools;
    assert!(pools.iter().all(|pool| pool.is_draining == (pool.server == A)) && pools.len() == 2, "{pools:?}");
    assert!(cluster.hits(of_a[0]));
}

#[test]
fn a_successor_that_is_to_leave_at_once_asks_the_listed_alone() {
    let (mut cluster, of_a) = draining();
    cluster.succeed(&[B], Leaving::AtOnce);
    assert_eq!(cluster.bench.all_actions(), [Action::Ask(B)]);
    assert!(!cluster.bench.engine.has_server(A));
    let warm = cluster.warm(B, PART);
    cluster.bench.engine.handle_answer(cluster.bench.now, B, warm);
    assert!(!cluster.hits(of_a[0]));
}

#[test]
fn what_a_server_takes_back_is_unreachable_at_once_and_nothing_is_moved_out_of_it() {
    let mut cluster = Cluster::new(2 * PART, &[(A, PART), (B, PART)]);
    let of_b = cluster.bench.engine.pools.at(B).unwrap();
    cluster.bench.engine.pools.pool_mut(of_b).size.lift_limit(PageCount(10 * PART));
    for bno in 0..u64::from(2 * PART) {
        cluster.cache(bno);
    }
    let slot_of = |cluster: &Cluster, bno| {
        let known = cluster.bench.engine.known(BlockId { disk: DISK, bno: BlockNumber(bno) })?;
        let index = cluster.bench.engine.index();
        let at = cluster.bench.engine.pools.place_of(index.cached(known)?, index)?;
        Some((at.1.server, at.1.slot.0))
    };
    let places: Vec<_> = (0..u64::from(2 * PART)).map(|bno| (bno, slot_of(&cluster, bno).unwrap())).collect();
    cluster.bench.engine.handle_taken_back(cluster.bench.now, A, PageCount(5));
    for (bno, place) in &places {
        let is_gone = place.0 == A && place.1 >= 5;
        assert_eq!(slot_of(&cluster, *bno), (!is_gone).then_some(*place), "block {bno}");
    }
    let actions = cluster.bench.work();
    assert_eq!(actions, [size(B, 2 * PART - 5)], "no move, no size of A, and no other session");
    cluster.execute(actions, true);
    cluster.settle();
    let mut granted = cluster.granted();
    granted.sort_unstable();
    assert_eq!(granted, [5, 2 * PART - 5]);
    for (bno, place) in places {
        assert_eq!(cluster.hits(bno), place.0 == B || place.1 < 5, "block {bno}");
    }
    assert_eq!(cluster.bench.engine.stats().disconnections, 0);
    let slots = cluster.bench.engine.status().slots;
    assert_eq!((slots.free + slots.used, slots.draining), (2 * PART, 0));
}

#[test]
fn a_size_that_was_granted_before_the_server_took_it_back_is_worth_no_more() {
    let mut cluster = Cluster::new(2 * PART, &[(A, 10 * PART)]);
    cluster.bench.engine.resize(cluster.bench.now, PageCount(PART), PageCount(0));
    cluster.settle();
    cluster.bench.engine.resize(cluster.bench.now, PageCount(2 * PART), PageCount(0));
    assert_eq!(cluster.bench.all_actions(), [size(A, 2 * PART)]);
    cluster.bench.engine.handle_taken_back(cluster.bench.now, A, PageCount(10));
    cluster.bench.engine.handle_taken_back(cluster.bench.now, A, PageCount(12));
    assert_eq!(cluster.bench.work(), []);
    cluster.bench.engine.handle_sized(cluster.bench.now, A, PageCount(2 * PART));
    assert_eq!(cluster.granted(), [10]);
    assert!((0..10).all(|bno| cluster.cache(bno)));
    assert_eq!(cluster.bench.engine.index().total_capacity(), PageCount(10));
    // It is asked again after the pause of a server that has refused.
    assert_eq!(cluster.bench.work(), []);
    cluster.bench.wait(10 * SECOND);
    assert_eq!(cluster.bench.work(), [size(A, 2 * PART)]);
}

/// Otherwise it would count as if it had what the other one was given for that, and become as large again.
#[test]
fn a_pool_that_is_lost_while_it_is_cut_counts_as_what_it_keeps() {
    let bench = of_size(EngineConfig { slots_per_turn: 16, ..config_of(4 * PART) }, &[A, B]);
    let mut cluster = Cluster { bench, pages: BTreeMap::new(), sends: BTreeMap::new() };
    for server in [A, B] {
        cluster.bench.engine.handle_answer(cluster.bench.now, server, room(1, 2 * PART));
    }
    cluster.settle();
    let [of_a, of_b] = [A, B].map(|server| cluster.bench.engine.pools.at(server).unwrap());
    cluster.bench.engine.pools.pool_mut(of_b).size.lift_limit(PageCount(4 * PART));
    assert!((0..u64::from(4 * PART)).all(|bno| cluster.cache(bno)));
    cluster.bench.engine.handle_taken_back(cluster.bench.now, A, PageCount(5));
    let actions = cluster.bench.all_actions();
    assert_eq!(actions, [size(B, 4 * PART - 5)]);
    cluster.execute(actions, true);
    assert!(cluster.bench.engine.index().capacity(of_a) > PageCount(5), "it takes more than this turn");
    assert_eq!(cluster.lose(A), []);
    assert_eq!(cluster.settle(), []);
    assert_eq!(cluster.granted(), [4 * PART - 5]);
    assert_eq!(cluster.bench.engine.index().capacity(of_a), PageCount(5));
}

#[test]
fn a_large_pool_is_cut_in_slices() {
    let slots = 16;
    let bench = of_size(EngineConfig { slots_per_turn: slots, ..config_of(4 * PART) }, &[A]);
    let mut cluster = Cluster { bench, pages: BTreeMap::new(), sends: BTreeMap::new() };
    cluster.bench.engine.handle_answer(cluster.bench.now, A, room(1, 4 * PART));
    cluster.settle();
    for bno in 0..u64::from(4 * PART) {
        cluster.cache(bno);
    }
    cluster.bench.engine.handle_taken_back(cluster.bench.now, A, PageCount(PART));
    assert!(cluster.bench.engine.index().total_capacity().0 >= 4 * PART - slots);
    assert_eq!((0..u64::from(4 * PART)).filter(|bno| cluster.bench.cached(*bno)).count(), PART as usize);
    cluster.settle();
    assert_eq!(cluster.bench.engine.index().total_capacity(), PageCount(PART));
}
