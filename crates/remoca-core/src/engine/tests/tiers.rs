//! The local tier in front of the others: what enters it, what travels from it, and what its server may do.

use super::placement::{A, B, E, SECOND, room, size};
use super::pools::{Cluster, config_of};
use super::*;

/// The server of the local tier.
const LOCAL: ServerNumber = E;

/// Makes a cache with a local tier of `local` pages, and `remote` pages on A.
fn cluster(local: u32, remote: u32) -> Cluster {
    let mut cluster = Cluster::of(EngineConfig { local: PageCount(local), ..config_of(remote) }, &[(A, remote)]);
    cluster.bench.engine.set_local_server(cluster.bench.now, Some(LOCAL));
    assert_eq!(cluster.bench.all_actions(), [Action::Ask(LOCAL)]);
    assert_eq!(cluster.bench.answer(LOCAL, room(1, local)), [Action::Use(LOCAL), size(LOCAL, local)]);
    assert_eq!(cluster.bench.gives(LOCAL, local), []);
    cluster.settle();
    cluster
}

/// Returns the servers that have these blocks.
fn servers_of(cluster: &Cluster, blocks: std::ops::Range<u64>) -> Vec<ServerNumber> {
    blocks.map(|bno| cluster.server_of(bno)).collect()
}

fn sizes(cluster: &Cluster) -> [u32; 4] {
    let status = cluster.bench.engine.status();
    [status.wanted, status.granted, status.local_wanted, status.local_granted].map(|size| size.0)
}

#[test]
fn pages_enter_the_local_tier_and_the_unread_ones_travel() {
    let mut cluster = cluster(3, 4);
    assert_eq!(sizes(&cluster), [4, 4, 3, 3]);
    assert!((0..3).all(|bno| cluster.cache(bno)));
    assert_eq!(servers_of(&cluster, 0..3), [LOCAL; 3]);
    // A page that was hit makes room without travelling.
    assert!(cluster.hits(1) && cluster.cache(3));
    assert_eq!((cluster.sends.get(&A), cluster.bench.engine.stats().demotions), (None, 0));
    assert!(cluster.cache(4) && cluster.cache(5));
    assert_eq!((cluster.sends.get(&A), cluster.bench.engine.stats().demotions), (Some(&2), 2));
    assert_eq!([0, 2, 3, 4, 5].map(|bno| cluster.server_of(bno)), [A, A, LOCAL, LOCAL, LOCAL]);
    // All are where they are said to be.
    assert!([0, 2, 3, 4, 5].into_iter().all(|bno| cluster.hits(bno)));
}

#[test]
fn a_page_that_comes_back_from_afar_is_local_when_it_is_evicted_again() {
    let mut cluster = cluster(2, 4);
    assert!((0..3).all(|bno| cluster.cache(bno)));
    assert_eq!(cluster.server_of(0), A);
    assert!(cluster.hits(0) && cluster.evict(0));
    assert_eq!([0, 1, 2].map(|bno| cluster.server_of(bno)), [LOCAL, A, LOCAL]);
    // One that was not hit stays where it is: it would travel for nothing.
    assert!(!cluster.evict(1));
    assert_eq!([0, 1, 2].map(|bno| cluster.server_of(bno)), [LOCAL, A, LOCAL]);
}

#[test]
fn a_page_of_a_swap_area_travels_although_it_was_hit() {
    let mut cluster = cluster(2, 4);
    cluster.bench.engine.describe_disk(DISK, 1 << 40, true);
    for bno in 0..2 {
        cluster.bench.request(0, DISK, write(blocks(bno, 1)));
        let sent = cluster.bench.disk_done(0, Ok(()), &page(Cluster::content(bno)));
        let [Action::SendBlock { admitted: Admitted { at, demoted_to: None }, .. }, _] = sent[..] else {
            panic!("a page that is written to a swap area is admitted: {sent:?}")
        };
        cluster.pages.insert((at.server, at.slot.0), Cluster::content(bno));
        cluster.bench.engine.handle_sent(at.server, 1);
    }
    assert!(cluster.hits(0));
    cluster.bench.request(0, DISK, write(blocks(2, 1)));
    let sent = cluster.bench.disk_done(0, Ok(()), &page(Cluster::content(2)));
    let [Action::SendBlock { admitted: Admitted { at, demoted_to: Some(to) }, .. }, _] = sent[..] else {
        panic!("the page that was hit moves: {sent:?}")
    };
    assert_eq!((at.server, to.server, cluster.server_of(0), cluster.server_of(1)), (LOCAL, A, A, LOCAL));
}

#[test]
fn what_finds_no_way_out_is_dropped_and_nothing_waits() {
    let mut cluster = Cluster::of(EngineConfig { local: PageCount(2), send_window: 1, ..config_of(8) }, &[(A, 8)]);
    cluster.bench.engine.set_local_server(cluster.bench.now, Some(LOCAL));
    cluster.bench.answer(LOCAL, room(1, 2));
    cluster.bench.gives(LOCAL, 2);
    cluster.settle();
    assert!((0..2).all(|bno| cluster.cache(bno)));
    // Nothing leaves for the network any more.
    let evicted = |cluster: &mut Cluster, bno| {
        cluster.bench.do_from_disk(GuestOp::Read(blocks(bno, 1)), &page(Cluster::content(bno)));
        let evicted = cluster.bench.engine.handle_evicted(&page(Cluster::content(bno)));
        cluster.bench.engine.handle_sent(LOCAL, 1);
        match evicted {
            Evicted::Admit(Admitted { demoted_to, .. }) => demoted_to.map(|to| to.server),
            other => panic!("the local tier takes it: {other:?}"),
        }
    };
    assert_eq!([2, 3, 4].map(|bno| evicted(&mut cluster, bno)), [Some(A), None, None]);
    cluster.bench.engine.handle_sent(A, 1);
    assert_eq!([5, 6].map(|bno| evicted(&mut cluster, bno)), [Some(A), None]);
    assert_eq!((cluster.server_of(0), cluster.server_of(6)), (A, LOCAL));
}

#[test]
fn a_pinned_page_is_not_demoted() {
    let mut cluster = cluster(2, 4);
    assert!((0..2).all(|bno| cluster.cache(bno)));
    let fetch = only_fetch(&cluster.bench.read(1, blocks(0, 1)));
    assert!(cluster.cache(2));
    assert_eq!([0, 1, 2].map(|bno| cluster.server_of(bno)), [LOCAL, A, LOCAL]);
    let outcome = cluster.bench.engine.handle_page(cluster.bench.now, LOCAL, fetch, &page(Cluster::content(0)));
    assert_eq!((outcome, cluster.bench.actions()), (deliver(1, 0), vec![complete(1)]));
}

#[test]
fn a_page_of_zeroes_from_a_server_was_not_there_when_it_was_demoted() {
    let mut cluster = cluster(1, 4);
    assert!((0..2).all(|bno| cluster.cache(bno)));
    let fetch = only_fetch(&cluster.bench.read(1, blocks(0, 1)));
    let outcome = cluster.bench.engine.handle_page(cluster.bench.now, A, fetch, &page(0));
    assert_eq!(outcome, PageOutcome::Wrong);
    let stats = cluster.bench.engine.stats();
    assert_eq!((stats.fetch_missing, stats.fetch_wrong), (1, 0));
}

#[test]
fn the_server_of_the_local_tier_comes_back_warm_or_cold() {
    let mut cluster = cluster(3, 4);
    assert!((0..5).all(|bno| cluster.cache(bno)));
    assert_eq!(servers_of(&cluster, 0..5), [A, A, LOCAL, LOCAL, LOCAL]);
    assert_eq!(cluster.lose(LOCAL), []);
    assert_eq!((cluster.count_hits(0..2), cluster.count_hits(2..5)), (2, 0), "nothing is asked of it");
    assert!(cluster.cache(6));
    assert_eq!(cluster.server_of(6), A, "without a local tier, pages travel at once");
    // Its pages wait for it, however long that takes.
    cluster.bench.wait(3600 * SECOND);
    assert_eq!(cluster.bench.work(), [Action::Ask(LOCAL)]);
    assert_eq!(cluster.bench.answer(LOCAL, None), []);
    cluster.bench.wait(SECOND);
    assert_eq!(cluster.bench.work(), [Action::Ask(LOCAL)]);
    let warm = cluster.warm(LOCAL, 3);
    assert_eq!(cluster.bench.answer(LOCAL, warm), [Action::Use(LOCAL)]);
    cluster.settle();
    assert_eq!((cluster.count_hits(2..5), sizes(&cluster)), (3, [4, 4, 3, 3]));
    cluster.lose(LOCAL);
    cluster.bench.wait(SECOND);
    assert_eq!(cluster.bench.work(), [Action::Ask(LOCAL)]);
    assert_eq!(cluster.bench.answer(LOCAL, room(2, 3)), [Action::Use(LOCAL), size(LOCAL, 3)]);
    cluster.bench.gives(LOCAL, 3);
    cluster.settle();
    assert_eq!((cluster.count_hits(2..5), cluster.bench.engine.status().connected), (0, true));
}

#[test]
fn a_local_tier_of_size_zero_is_given_back_and_the_rest_stays() {
    let mut cluster = cluster(3, 4);
    assert!((0..5).all(|bno| cluster.cache(bno)));
    cluster.bench.engine.resize(cluster.bench.now, PageCount(4), PageCount(0));
    assert_eq!(cluster.settle(), [Action::Leave(LOCAL)]);
    assert_eq!((sizes(&cluster), cluster.count_hits(0..2), cluster.count_hits(2..5)), ([4, 4, 0, 0], 2, 0));
    assert_eq!(cluster.bench.engine.index().total_capacity(), PageCount(4));
    // It comes back with the other size, and a smaller one is asked for where it is.
    cluster.bench.engine.resize(cluster.bench.now, PageCount(4), PageCount(4));
    cluster.bench.wait(SECOND);
    assert_eq!(cluster.bench.work(), [Action::Ask(LOCAL)]);
    assert_eq!(cluster.bench.answer(LOCAL, room(2, 9)), [Action::Use(LOCAL), size(LOCAL, 4)]);
    cluster.bench.gives(LOCAL, 4);
    cluster.settle();
    assert!((10..14).all(|bno| cluster.cache(bno)));
    cluster.bench.engine.resize(cluster.bench.now, PageCount(4), PageCount(1));
    assert_eq!(cluster.settle(), []);
    assert_eq!((sizes(&cluster), cluster.server_of(13), cluster.hits(10)), ([4, 4, 1, 1], LOCAL, false));
}

#[test]
fn the_cache_is_off_only_without_both_tiers() {
    let mut cluster = cluster(3, 4);
    assert!((0..5).all(|bno| cluster.cache(bno)));
    cluster.bench.engine.resize(cluster.bench.now, PageCount(0), PageCount(3));
    cluster.settle();
    assert_eq!((sizes(&cluster), cluster.count_hits(2..5)), ([0, 0, 3, 3], 3));
    assert!(cluster.cache(7), "the local tier alone is a cache");
    assert!(cluster.bench.engine.status().enabled && cluster.known(7));
    // From one tier to the other, nothing is forgotten.
    cluster.bench.engine.resize(cluster.bench.now, PageCount(4), PageCount(0));
    cluster.settle();
    assert!(cluster.bench.engine.status().enabled && cluster.known(7));
    cluster.bench.engine.resize(cluster.bench.now, PageCount(0), PageCount(0));
    cluster.settle();
    assert!(!cluster.bench.engine.status().enabled && !cluster.known(7));
}

impl Cluster {
    fn known(&self, bno: u64) -> bool {
        self.bench.known(bno)
    }
}

/// The driver of a process that goes on says where the local tier is before it knows the list.
#[test]
fn both_tiers_outlive_their_process() {
    let mut cluster = cluster(3, 4);
    assert!((0..5).all(|bno| cluster.cache(bno)));
    let config = EngineConfig { local: PageCount(3), ..config_of(4) };
    let words = cluster.bench.engine.index().words().clone();
    let engine = DiskEngine::resume(&config, words, Origin::Own).map_err(|it| it.reason).unwrap();
    cluster.bench.engine = engine;
    cluster.bench.engine.describe_disk(DISK, 1 << 40, false);
    cluster.bench.engine.set_local_server(cluster.bench.now, Some(LOCAL));
    cluster.bench.engine.set_servers(cluster.bench.now, &[A], Leaving::AtOnce);
    assert_eq!(cluster.bench.all_actions(), [Action::Ask(LOCAL), Action::Ask(A)]);
    let (local, remote) = (cluster.warm(LOCAL, 3), cluster.warm(A, 4));
    assert_eq!(cluster.bench.answer(LOCAL, local), [Action::Use(LOCAL)]);
    assert_eq!(cluster.bench.answer(A, remote), [Action::Use(A)]);
    assert_eq!((cluster.settle(), cluster.count_hits(0..5)), (vec![], 5));
}

/// Memory for a large pool takes long, so it comes in steps.
#[test]
fn a_server_that_gives_more_than_before_is_asked_for_the_rest_at_once() {
    let mut cluster = Cluster::of(EngineConfig { local: PageCount(6), ..config_of(4) }, &[(A, 4)]);
    cluster.bench.engine.set_local_server(cluster.bench.now, Some(LOCAL));
    cluster.bench.all_actions();
    assert_eq!(cluster.bench.answer(LOCAL, room(1, 6)), [Action::Use(LOCAL), size(LOCAL, 6)]);
    assert_eq!(cluster.bench.gives(LOCAL, 2), [size(LOCAL, 6)]);
    assert_eq!(cluster.bench.gives(LOCAL, 4), [size(LOCAL, 6)]);
    assert_eq!(cluster.bench.gives(LOCAL, 4), [], "it has no more");
    cluster.bench.wait(9 * SECOND);
    assert_eq!((cluster.settle(), sizes(&cluster)), (vec![], [4, 4, 6, 4]));
    cluster.bench.wait(2 * SECOND);
    assert_eq!(cluster.bench.work(), [size(LOCAL, 6)]);
    assert_eq!(cluster.bench.gives(LOCAL, 6), []);
}

#[test]
fn a_server_that_gives_less_is_asked_again_later() {
    let mut cluster = Cluster::of(EngineConfig { local: PageCount(6), ..config_of(4) }, &[(A, 4)]);
    cluster.bench.engine.set_local_server(cluster.bench.now, Some(LOCAL));
    cluster.bench.all_actions();
    assert_eq!(cluster.bench.answer(LOCAL, room(1, 2)), [Action::Use(LOCAL), size(LOCAL, 2)]);
    cluster.bench.gives(LOCAL, 2);
    cluster.bench.wait(9 * SECOND);
    assert_eq!((cluster.settle(), sizes(&cluster)), (vec![], [4, 4, 6, 2]));
    cluster.bench.wait(2 * SECOND);
    assert_eq!(cluster.bench.work(), [size(LOCAL, 6)]);
    assert_eq!(cluster.bench.gives(LOCAL, 6), []);
    assert_eq!(cluster.bench.engine.next_deadline(), None);
    assert_eq!(sizes(&cluster), [4, 4, 6, 6]);
}

#[test]
fn the_local_tier_has_no_part_in_placement() {
    let mut cluster = cluster(3, 4);
    // Another server is needed for what the first one cannot give, whatever the local one has.
    cluster.bench.engine.set_servers(cluster.bench.now, &[A, B], Leaving::AtOnce);
    cluster.bench.engine.resize(cluster.bench.now, PageCount(8), PageCount(3));
    let actions = cluster.bench.work();
    assert!(actions.contains(&Action::Ask(B)) && !actions.contains(&Action::Ask(LOCAL)), "{actions:?}");
    assert_eq!(cluster.bench.engine.status().pools.iter().filter(|pool| pool.is_local).count(), 1);
    // With no remote server left, the local tier goes on alone, and the other way round.
    cluster.lose(A);
    assert!(cluster.cache(0) && cluster.cache(1));
    assert_eq!(servers_of(&cluster, 0..2), [LOCAL; 2]);
    cluster.bench.engine.set_local_server(cluster.bench.now, None);
    assert_eq!(cluster.bench.all_actions(), [Action::Leave(LOCAL)]);
    assert!(!cluster.bench.engine.status().connected);
}

/// A pool that was lost while its server was in the list is not expected, with a share, once that server has the local tier.
#[test]
fn a_lost_pool_whose_server_gets_the_local_tier_keeps_no_share_and_no_timer() {
    let mut cluster = Cluster::new(8, &[(A, 4), (B, 4)]);
    assert!((0..8).all(|bno| cluster.cache(bno)));
    cluster.lose(A);
    let now = cluster.bench.now;
    cluster.bench.engine.set_servers(now, &[B], Leaving::Drained);
    cluster.bench.engine.resize(now, PageCount(8), PageCount(4));
    cluster.bench.engine.set_local_server(now, Some(A));
    cluster.bench.engine.set_servers(now, &[B], Leaving::Drained);
    cluster.settle();
    cluster.bench.answer(A, None);
    for _ in 0..4 {
        cluster.bench.wait(10 * SECOND);
        cluster.settle();
        cluster.bench.answer(A, None);
    }
    let (now, deadline) = (cluster.bench.now, cluster.bench.engine.next_deadline());
    assert!(deadline.is_none_or(|at| at > now), "a timer that is always due: {deadline:?} at {now:?}");
    assert_eq!(cluster.bench.engine.pools.expected_slots(&cluster.bench.engine.index), 0);
}

#[test]
fn a_pool_of_the_list_is_given_back_before_its_server_has_the_local_tier() {
    let mut cluster = Cluster::new(8, &[(A, 4), (B, 4)]);
    let now = cluster.bench.now;
    cluster.bench.engine.resize(now, PageCount(8), PageCount(4));
    cluster.bench.engine.set_local_server(now, Some(A));
    assert_eq!(cluster.bench.all_actions(), [Action::Leave(A), Action::Ask(A)]);
    cluster.bench.engine.set_servers(now, &[B], Leaving::Drained);
    assert_eq!(cluster.settle(), []);
    assert_eq!(cluster.bench.answer(A, room(2, 4)), [Action::Use(A), size(A, 4)]);
    assert_eq!(cluster.bench.gives(A, 4), []);
    assert_eq!(sizes(&cluster), [8, 4, 4, 4]);
}

/// A process that finds a pool of the local tier, and is to have none, gives its slots up.
#[test]
fn a_pool_that_is_found_at_a_server_of_no_local_tier_is_dropped() {
    let mut cluster = cluster(3, 4);
    assert!((0..5).all(|bno| cluster.cache(bno)));
    let config = EngineConfig { local: PageCount(0), ..config_of(4) };
    let words = cluster.bench.engine.index().words().clone();
    let engine = DiskEngine::resume(&config, words, Origin::Own).map_err(|it| it.reason).unwrap();
    cluster.bench.engine = engine;
    cluster.bench.engine.describe_disk(DISK, 1 << 40, false);
    // In the order of the driver.
    cluster.bench.engine.resize(cluster.bench.now, PageCount(4), PageCount(0));
    cluster.bench.engine.set_local_server(cluster.bench.now, Some(LOCAL));
    cluster.bench.engine.set_servers(cluster.bench.now, &[A], Leaving::Drained);
    assert_eq!(cluster.bench.all_actions(), [Action::Ask(A)]);
    let remote = cluster.warm(A, 4);
    cluster.bench.answer(A, remote);
    cluster.settle();
    assert_eq!(cluster.bench.engine.index().pools().count(), 1, "pools that nobody asks for");
    assert_eq!(cluster.bench.engine.index().total_capacity(), PageCount(4));
    assert!(cluster.cache(4), "a page in a pool that is never reached is cached anew");
}

#[test]
fn the_local_tier_finds_room_beside_as_many_pools_as_there_may_be() {
    let config = EngineConfig { local: PageCount(2), pools: 2, ..config_of(8) };
    let mut bench = super::placement::of_size(config, &[A, B]);
    let now = bench.now;
    bench.engine.set_local_server(now, Some(LOCAL));
    bench.all_actions();
    for server in [A, B] {
        bench.answer(server, room(1, 4));
    }
    let first = bench.sessions()[0];
    bench.gives(first, 4);
    bench.work();
    assert_eq!(bench.sessions(), [first], "one of the two is for the local tier");
    assert!(bench.answer(LOCAL, room(1, 2)).contains(&Action::Use(LOCAL)));
}

#[test]
fn a_local_tier_for_which_no_pool_number_is_free_is_asked_again_later() {
    let mut bench = super::placement::of_size(EngineConfig { local: PageCount(2), ..config_of(8) }, &[A]);
    bench.engine.set_local_server(bench.now, Some(LOCAL));
    bench.all_actions();
    while let Some(number) = bench.engine.index.free_pool() {
        let pool = crate::index::Pool { server: 100 + u32::from(number.0), generation: 1 };
        bench.engine.index.begin_pool(number, pool, 0);
    }
    assert!(bench.answer(LOCAL, room(1, 2)).contains(&Action::Release(LOCAL)));
    bench.wait(SECOND);
    assert!(bench.work().contains(&Action::Ask(LOCAL)));
    assert!(bench.answer(LOCAL, room(1, 2)).contains(&Action::Use(LOCAL)));
}

#[test]
fn the_server_of_the_local_tier_is_asked_less_often_the_longer_it_is_away() {
    let mut cluster = cluster(3, 4);
    cluster.lose(LOCAL);
    let start = cluster.bench.now;
    let asked = [100, 300, 700, 1500, 3100, 6300, 11_300, 16_300, 21_300];
    for ms in asked {
        assert_eq!(cluster.bench.until_next(), [Action::Ask(LOCAL)]);
        assert_eq!(cluster.bench.now, start.plus_ns(ms * MS));
        assert_eq!(cluster.bench.answer(LOCAL, None), []);
    }
    assert_eq!(cluster.bench.until_next(), [Action::Ask(LOCAL)]);
    let warm = cluster.warm(LOCAL, 3);
    assert_eq!(cluster.bench.answer(LOCAL, warm), [Action::Use(LOCAL)]);
    // It was there, so it may be back soon.
    cluster.lose(LOCAL);
    let start = cluster.bench.now;
    assert_eq!((cluster.bench.until_next(), cluster.bench.now), (vec![Action::Ask(LOCAL)], start.plus_ns(100 * MS)));
}

/// It was one of the list while it was asked for the first time.
#[test]
fn a_second_answer_of_the_server_of_the_local_tier_is_released() {
    let mut cluster = cluster(3, 4);
    assert_eq!(cluster.bench.answer(LOCAL, room(1, 3)), [Action::Release(LOCAL)]);
    cluster.bench.wait(SECOND);
    assert_eq!((cluster.bench.work(), cluster.bench.sessions().len()), (vec![], 2));
}
