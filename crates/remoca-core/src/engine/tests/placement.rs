//! Several memory servers: which of them get pools, and when one joins.

use super::*;

pub(super) const A: ServerNumber = ServerNumber(10);
pub(super) const B: ServerNumber = ServerNumber(11);
pub(super) const C: ServerNumber = ServerNumber(12);
pub(super) const D: ServerNumber = ServerNumber(13);
pub(super) const E: ServerNumber = ServerNumber(14);
pub(super) const SECOND: u64 = 1000 * MS;

/// Returns the offer of a server that has no pool for us, and `available` pages.
pub(super) fn room(generation: u64, available: u32) -> Option<PoolOffer> {
    Some(PoolOffer { generation, npages: PageCount(0), available: PageCount(available), sends_received: 0 })
}

fn servers(numbers: &[ServerNumber]) -> Bench {
    seeded(1, numbers)
}

/// Returns an engine that knows these servers, and has asked all of them.
fn seeded(seed: u64, numbers: &[ServerNumber]) -> Bench {
    of_size(EngineConfig { seed, ..config() }, numbers)
}

/// Returns an engine of this configuration that knows these servers, and has asked all of them.
pub(super) fn of_size(config: EngineConfig, numbers: &[ServerNumber]) -> Bench {
    let mut bench = Bench::new(config);
    bench.engine.set_servers(bench.now, numbers, Leaving::AtOnce);
    let asked: Vec<_> = numbers.iter().map(|number| Action::Ask(*number)).collect();
    assert_eq!(bench.all_actions(), asked);
    bench
}

impl Bench {
    /// Returns the servers of the sessions, by the numbers of their pools.
    pub(super) fn sessions(&self) -> Vec<ServerNumber> {
        self.engine.status().pools.iter().map(|pool| pool.server).collect()
    }

    pub(super) fn answer(&mut self, server: ServerNumber, offer: Option<PoolOffer>) -> Vec<Action> {
        self.engine.handle_answer(self.now, server, offer);
        self.all_actions()
    }

    /// Lets time pass until the engine wants to do something. Returns its actions.
    pub(super) fn until_next(&mut self) -> Vec<Action> {
        let deadline = self.engine.next_deadline().expect("there is something to do");
        self.now = self.now.max(deadline);
        self.engine.handle_timer(self.now);
        self.all_actions()
    }

    /// Answers that no server can be reached and none gives more memory. The engine may want nothing else.
    pub(super) fn answer_in_vain(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Ask(server) => self.engine.handle_answer(self.now, server, None),
                Action::SetSize { server, .. } => self.engine.handle_size_refused(self.now, server, PageCount(0)),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Lets the engine do everything that is due at once. Returns its actions.
    pub(super) fn work(&mut self) -> Vec<Action> {
        let mut actions = self.all_actions();
        while self.engine.next_deadline().is_some_and(|at| at <= self.now) {
            self.engine.handle_timer(self.now);
            actions.extend(self.all_actions());
        }
        actions
    }

    pub(super) fn gives(&mut self, server: ServerNumber, npages: u32) -> Vec<Action> {
        self.engine.handle_sized(self.now, server, PageCount(npages));
        self.all_actions()
    }

    /// Refuses the size that a server was asked for, which has `available` more pages.
    fn refuses(&mut self, server: ServerNumber, available: u32) -> Vec<Action> {
        self.engine.handle_size_refused(self.now, server, PageCount(available));
        self.all_actions()
    }

    /// Returns the engine's actions in a number of seconds, in which all servers refuse to give more and answer nothing
    /// else.
    fn refused_for(&mut self, seconds: u64) -> Vec<(u64, Action)> {
        let (start, mut done) = (self.now, Vec::new());
        let end = start.plus_ns(seconds * SECOND);
        while self.engine.next_deadline().is_some_and(|at| at <= end) {
            for action in self.until_next() {
                match action {
                    Action::SetSize { server, .. } => self.engine.handle_size_refused(self.now, server, PageCount(0)),
                    other => done.push((self.now.since_ns(start) / SECOND, other)),
                }
            }
        }
        self.now = end;
        done
    }
}

pub(super) fn size(server: ServerNumber, npages: u32) -> Action {
    Action::SetSize { server, npages: PageCount(npages) }
}

/// Returns the actions that begin a session and release others.
fn begins(server: ServerNumber, released: &[ServerNumber], npages: u32) -> Vec<Action> {
    let released = released.iter().map(|server| Action::Release(*server));
    [Action::Use(server)].into_iter().chain(released).chain([size(server, npages)]).collect()
}

#[test]
fn the_pool_goes_where_it_fits() {
    let mut bench = servers(&[A, B, C]);
    assert_eq!(bench.answer(A, room(1, 5)), [], "the others may have more");
    assert_eq!(bench.answer(B, room(1, 8)), []);
    assert_eq!(bench.answer(C, room(1, 7)), begins(B, &[A, C], 8));
    assert_eq!(bench.gives(B, 8), []);
    assert_eq!(bench.engine.next_deadline(), None, "nothing more is wanted of anybody");
}

#[test]
fn where_it_fits_nowhere_it_is_made_of_several() {
    let mut bench = servers(&[A, B, C]);
    bench.answer(A, room(1, 0));
    bench.answer(B, room(1, 3));
    let both = [Action::Use(C), Action::Use(B), Action::Release(A), size(C, 5), size(B, 3)];
    assert_eq!(bench.answer(C, room(1, 5)), both);
}

#[test]
fn its_parts_are_as_equal_as_the_servers_memory_allows() {
    let mut bench = servers(&[A, B, C]);
    bench.answer(A, room(1, 1));
    bench.answer(B, room(1, 5));
    let actions = bench.answer(C, room(1, 6));
    assert_eq!(actions, [Action::Use(C), Action::Use(B), Action::Release(A), size(C, 4), size(B, 4)]);
}

#[test]
fn a_server_with_nothing_is_better_than_none() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, None);
    assert_eq!(bench.answer(B, room(1, 0)), [Action::Use(B)]);
    assert!(bench.engine.status().connected);
}

#[test]
fn many_vms_spread_over_the_servers_by_the_memory_that_these_have() {
    let mut on = [0; 3];
    for seed in 0..1000 {
        let mut bench = seeded(seed * 7919, &[A, B, C]);
        bench.answer(A, room(1, 3000));
        bench.answer(B, room(1, 1000));
        let actions = bench.answer(C, room(1, 0));
        for (at, server) in [A, B, C].into_iter().enumerate() {
            on[at] += u32::from(actions.contains(&Action::Use(server)));
        }
    }
    let [a, b, c] = on;
    assert!((650..850).contains(&a) && a + b == 1000 && c == 0, "{on:?}");
}

/// A cache of 2 GiB, which is the least that is spread.
const LARGE: u32 = 1 << 19;

fn large(numbers: &[ServerNumber]) -> Bench {
    of_size(EngineConfig { cache: PageCount(LARGE), ..config() }, numbers)
}

/// Returns the sizes in the SETSIZEs among `actions`.
fn sizes(actions: &[Action]) -> Vec<u32> {
    let size = |action: &Action| if let Action::SetSize { npages, .. } = action { Some(npages.0) } else { None };
    actions.iter().filter_map(size).collect()
}

#[test]
fn a_large_cache_is_spread_over_four_servers() {
    let mut bench = large(&[A, B, C, D, E]);
    for server in [A, B, C, D] {
        assert_eq!(bench.answer(server, room(1, LARGE * 9)), []);
    }
    assert_eq!(sizes(&bench.answer(E, room(1, LARGE * 9))), [LARGE / 4; 4]);
    let mut bench = large(&[A, B, C]);
    bench.answer(A, room(1, LARGE));
    bench.answer(B, room(1, LARGE / 2));
    let mut actions = bench.answer(C, room(1, LARGE / 8));
    actions.retain(|action| matches!(action, Action::SetSize { .. } | Action::Release(_)));
    assert_eq!(sizes(&actions), [LARGE / 2; 2], "C has not an equal share: {actions:?}");
}

#[test]
fn a_large_cache_takes_more_servers_if_four_do_not_have_enough() {
    let mut bench = large(&[A, B, C, D, E]);
    for server in [A, B, C, D] {
        assert_eq!(bench.answer(server, room(1, LARGE / 5)), []);
    }
    let sizes = sizes(&bench.answer(E, room(1, LARGE / 5 + 3)));
    assert_eq!((sizes.len(), sizes.iter().sum::<u32>()), (5, LARGE));
}

/// The loss of any server then costs less.
#[test]
fn a_server_that_comes_later_takes_an_equal_share_of_a_large_cache() {
    let mut bench = large(&[A, B]);
    bench.answer(B, None);
    assert_eq!(sizes(&bench.answer(A, room(1, LARGE * 2))), [LARGE]);
    bench.gives(A, LARGE);
    let mut actions = bench.work();
    bench.wait(SECOND);
    actions.extend(bench.work());
    assert!(actions.contains(&Action::Ask(B)), "{actions:?}");
    let actions = bench.answer(B, room(1, LARGE));
    assert_eq!(actions.first(), Some(&Action::Use(B)));
    let shares: Vec<_> = bench.engine.status().pools.iter().map(|pool| pool.wanted.0).collect();
    assert_eq!(shares, [LARGE / 2; 2]);
    assert_eq!(bench.engine.stats().pool_joins, 1);
    // One that has less than an equal share does not.
    bench.engine.set_servers(bench.now, &[A, B, C], Leaving::AtOnce);
    while !bench.engine.pools.is_settled() {
        for action in bench.work() {
            if let Action::SetSize { server, npages } = action {
                bench.engine.handle_sized(bench.now, server, npages);
            }
        }
        bench.engine.handle_sized(bench.now, B, PageCount(LARGE / 2));
    }
    bench.work();
    assert_eq!(bench.answer(C, room(1, LARGE / 8)), [Action::Release(C)]);
}

#[test]
fn one_that_hangs_is_not_waited_for() {
    let mut bench = servers(&[A, B]);
    assert_eq!(bench.answer(B, room(1, 8)), []);
    let start = bench.now;
    assert_eq!(bench.until_next(), begins(B, &[], 8));
    assert!(bench.now.since_ns(start) <= SECOND);
    bench.gives(B, 8);
    bench.wait(4 * SECOND);
    assert_eq!(bench.answer(A, room(1, 1000)), [Action::Release(A)], "too late");
    assert_eq!(bench.engine.status().granted, PageCount(8));
}

/// Returns the offer of a server that has a pool of 8 pages, of which it has received one.
fn warm(generation: u64) -> Option<PoolOffer> {
    Some(PoolOffer { generation, npages: PageCount(8), available: PageCount(0), sends_received: 1 })
}

/// Returns a bench that has lost A, which had the pool, with block 3 in it. Both servers were asked again.
fn without_a() -> Bench {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(5, 8));
    assert_eq!(bench.answer(B, None), begins(A, &[], 8));
    bench.gives(A, 8);
    bench.cache(3, 1);
    bench.wait(60 * SECOND);
    bench.engine.handle_disconnected(bench.now, A);
    assert_eq!(bench.all_actions(), [Action::Ask(A), Action::Ask(B)]);
    bench
}

#[test]
fn the_server_that_still_has_the_pool_comes_first() {
    let mut bench = without_a();
    assert_eq!(bench.answer(B, room(1, 1000)), []);
    assert_eq!(bench.answer(A, warm(5)), [Action::Use(A), Action::Release(B)]);
    assert!(bench.cached(3));
}

#[test]
fn the_same_generation_at_another_server_is_another_pool() {
    let mut bench = without_a();
    bench.answer(A, None);
    assert_eq!(bench.answer(B, warm(5)).first(), Some(&Action::Use(B)));
    assert!(!bench.cached(3) && bench.known(3));
}

/// It would be taken at once, and the others, which have memory, would be released.
#[test]
fn a_pool_without_any_page_is_no_reason_to_choose_its_server() {
    let mut bench = without_a();
    assert_eq!(bench.answer(A, room(5, 0)), []);
    assert_eq!(bench.answer(B, room(1, 8)), begins(B, &[A], 8));
    assert!(!bench.cached(3));
}

#[test]
fn with_the_only_server_lost_the_next_one_has_the_pool_at_once() {
    let mut bench = servers(&[A, B]);
    bench.answer(B, None);
    assert_eq!(bench.answer(A, room(1, 8)), begins(A, &[], 8));
    bench.gives(A, 8);
    bench.cache(3, 1);
    bench.wait(SECOND);
    bench.read(0, blocks(3, 1));
    bench.engine.handle_disconnected(bench.now, A);
    // The session was short: A has to wait, B does not.
    assert_eq!(bench.all_actions(), [disk_action(0, GuestOp::Read(blocks(3, 1))), Action::Ask(B)]);
    assert_eq!(bench.answer(B, room(1, 8)), begins(B, &[], 8));
    assert_eq!(bench.gives(B, 8), []);
    assert!(!bench.cached(3));
    assert_eq!(bench.work(), []);
    // The operator is to know whether A is back.
    for (seconds, offer, expected) in [(60, None, vec![]), (120, room(2, 8), vec![Action::Release(A)])] {
        assert_eq!(bench.until_next(), [Action::Ask(A)]);
        assert!((seconds..=seconds + 4).contains(&(bench.now.0 / SECOND)), "{:?}", bench.now);
        assert_eq!(bench.answer(A, offer), expected);
    }
    assert_eq!(bench.engine.next_deadline(), None, "A being back is no reason to change anything");
}

#[test]
fn a_server_that_has_nothing_to_give_takes_no_pools_place() {
    let mut bench = without_a();
    bench.answer(A, None);
    bench.answer(B, room(1, 0));
    let mut asks = (0..20).flat_map(|_| bench.until_next());
    assert!(asks.any(|action| action == Action::Ask(A)));
    drop(asks);
    assert!(bench.answer(A, warm(5)).contains(&Action::Use(A)));
    assert!(bench.cached(3));
}

#[test]
fn nobody_is_stormed_when_all_are_gone() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, None);
    bench.answer(B, None);
    let mut asked = [0; 2];
    while bench.now < Nanos(60 * SECOND) {
        for action in bench.until_next() {
            match action {
                Action::Ask(server) => {
                    asked[usize::from(server == B)] += 1;
                    bench.engine.handle_answer(bench.now, server, None);
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert!(asked.iter().all(|times| (10..=18).contains(times)), "{asked:?} times in a minute");
    // The first that is back gets the pool.
    while bench.until_next() != [Action::Ask(B)] {
        bench.engine.handle_answer(bench.now, A, None);
    }
    let start = bench.now;
    bench.answer(B, room(1, 8));
    while bench.engine.status().granted == PageCount(0) {
        match bench.engine.status().connected {
            true => drop(bench.gives(B, 8)),
            false => drop(bench.until_next()),
        }
    }
    assert!(bench.now.since_ns(start) <= SECOND);
}

#[test]
fn a_silent_server_comes_last() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(1, 8));
    bench.answer(B, None);
    // A never answers the SETSIZE.
    bench.until_next();
    assert_eq!(bench.until_next(), [Action::GiveUp(A), Action::Ask(B)]);
    assert_eq!(bench.answer(B, room(1, 4)), begins(B, &[], 4));
}

/// A pool of 4 pages on A, which has no more, in a cache of 8. B has been asked.
fn short_on_a() -> Bench {
    let mut bench = servers(&[A, B]);
    bench.answer(B, None);
    assert_eq!(bench.answer(A, room(1, 8)), begins(A, &[], 8));
    // Another VM was faster.
    assert_eq!(bench.refuses(A, 4), [size(A, 4)]);
    assert_eq!(bench.gives(A, 4), []);
    bench.cache(3, 1);
    bench.wait(SECOND);
    assert_eq!(bench.until_next(), [Action::Ask(B)]);
    bench
}

#[test]
fn what_one_server_refuses_another_one_gives() {
    let mut bench = short_on_a();
    assert_eq!(bench.answer(B, room(1, 5)), begins(B, &[], 4));
    bench.gives(B, 4);
    assert!(bench.cached(3), "the pool does not move");
    assert_eq!((bench.engine.status().granted, bench.engine.stats().pool_joins), (PageCount(8), 1));
    assert_eq!(bench.sessions(), [A, B]);
}

#[test]
fn a_small_cache_asks_others_about_once_a_minute() {
    let mut bench = short_on_a();
    assert_eq!(bench.answer(B, None), []);
    let asked: Vec<_> = bench.refused_for(200);
    assert!(asked.iter().all(|(_, action)| *action == Action::Ask(B)) && asked.len() == 1, "{asked:?}");
    assert!((60..=75).contains(&asked[0].0), "{asked:?}");
    assert_eq!(bench.answer(B, room(1, 1)), begins(B, &[], 1), "a little more is more");
    assert!(bench.cached(3));
}

/// Its own server is asked for the rest every ten seconds.
#[test]
fn a_small_cache_grows_when_its_server_has_memory_again() {
    let mut bench = short_on_a();
    bench.answer(B, None);
    assert_eq!(bench.until_next(), [size(A, 8)]);
    assert!((8..=11).contains(&(bench.now.0 / SECOND)), "{:?}", bench.now);
    assert_eq!(bench.gives(A, 8), []);
    assert_eq!(bench.until_next(), [Action::Ask(B)], "whether it is back");
    assert!((60..=65).contains(&(bench.now.0 / SECOND)), "{:?}", bench.now);
}

#[test]
fn without_any_page_the_others_are_asked_more_often() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(1, 0));
    bench.answer(B, None);
    bench.wait(SECOND);
    assert_eq!(bench.until_next(), [Action::Ask(B)]);
    assert_eq!(bench.answer(B, None), []);
    let asked = bench.refused_for(15);
    assert_eq!(asked.iter().map(|(_, action)| *action).collect::<Vec<_>>(), [Action::Ask(B)], "{asked:?}");
    assert_eq!(bench.answer(B, room(1, 1)), begins(B, &[], 1));
}

#[test]
fn a_server_that_does_not_give_what_it_says_is_not_believed_again() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(1, 4));
    assert_eq!(bench.answer(B, room(1, 8)), begins(B, &[A], 8));
    bench.refuses(B, 0);
    bench.engine.handle_disconnected(bench.now.plus_ns(60 * SECOND), B);
    bench.wait(60 * SECOND);
    let actions = bench.work();
    assert!(actions.ends_with(&[Action::Ask(A), Action::Ask(B)]), "{actions:?}");
    bench.answer(B, room(1, 8));
    assert_eq!(bench.answer(A, room(1, 3)), begins(A, &[B], 3), "B has broken its word");
    bench.gives(A, 3);
    let mut begun = None;
    for minute in 0..15 {
        for (_, action) in bench.refused_for(60) {
            if action == Action::Ask(B) && bench.answer(B, room(1, 8)).contains(&Action::Use(B)) {
                begun = Some(minute);
            }
        }
    }
    assert!((8..=12).contains(&begun.expect("some time it may be true")), "{begun:?}");
}

#[test]
fn a_larger_cache_may_need_another_server() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(1, 8));
    bench.answer(B, None);
    bench.gives(A, 8);
    bench.engine.resize(bench.now, PageCount(4), PageCount(0));
    bench.all_actions();
    bench.gives(A, 4);
    bench.wait(SECOND);
    bench.engine.resize(bench.now, PageCount(8), PageCount(0));
    assert_eq!(bench.all_actions(), [size(A, 8)]);
    assert_eq!(bench.refuses(A, 0), []);
    assert_eq!(bench.until_next(), [Action::Ask(B)]);
    assert_eq!(bench.answer(B, room(1, 100)), begins(B, &[], 4));
}

#[test]
fn a_server_taken_out_of_the_list_can_be_left_at_once() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(1, 8));
    bench.answer(B, None);
    bench.gives(A, 8);
    bench.cache(3, 1);
    bench.read(0, blocks(3, 1));
    bench.wait(SECOND);
    bench.engine.set_servers(bench.now, &[B, C], Leaving::AtOnce);
    let read = disk_action(0, GuestOp::Read(blocks(3, 1)));
    assert_eq!(bench.all_actions(), [Action::Leave(A), read, Action::Ask(B), Action::Ask(C)]);
    bench.answer(B, None);
    assert_eq!(bench.answer(C, room(1, 8)), begins(C, &[], 8));
    bench.gives(C, 8);
    bench.engine.set_servers(bench.now, &[A, C], Leaving::AtOnce);
    assert_eq!(bench.all_actions(), [], "C has what is wanted");
}

#[test]
fn answers_of_servers_that_nobody_knows_any_more_are_released() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(1, 8));
    bench.engine.set_servers(bench.now, &[C], Leaving::AtOnce);
    assert_eq!(bench.all_actions(), [Action::Release(A), Action::Ask(C)]);
    assert_eq!(bench.answer(B, room(1, 8)), [Action::Release(B)]);
    assert_eq!(bench.answer(B, None), []);
    assert_eq!(bench.answer(C, room(1, 8)), begins(C, &[], 8));
}

/// After the loss of B, A is short again. B is asked, but not believed.
fn does_without_b(mut bench: Bench) {
    assert_eq!(bench.sessions(), [A]);
    let asked = bench.refused_for(150);
    assert!(asked.iter().any(|(_, action)| *action == Action::Ask(B)), "{asked:?}");
    assert_eq!(bench.answer(B, room(2, 8)), [Action::Release(B)]);
}

#[test]
fn a_server_that_never_answers_a_size_does_not_get_a_pool_again_soon() {
    let mut bench = short_on_a();
    bench.answer(B, room(1, 8));
    while bench.sessions().len() > 1 {
        for action in bench.until_next() {
            match action {
                Action::SetSize { server: A, .. } => drop(bench.refuses(A, 0)),
                Action::GiveUp(B) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    does_without_b(bench);
}

#[test]
fn a_server_that_hangs_up_at_once_does_not_get_a_pool_again_soon() {
    let mut bench = short_on_a();
    bench.answer(B, room(1, 8));
    bench.engine.handle_disconnected(bench.now, B);
    bench.all_actions();
    does_without_b(bench);
}

#[test]
fn new_servers_are_asked_though_an_old_one_never_answers() {
    let mut bench = short_on_a();
    bench.engine.set_servers(bench.now, &[A, B, C], Leaving::AtOnce);
    assert_eq!(bench.all_actions(), [Action::Ask(C)]);
    assert_eq!(bench.answer(C, room(1, 8)), []);
    assert_eq!(bench.until_next(), begins(C, &[], 4));
}

#[test]
fn only_as_many_pools_as_configured() {
    let mut bench = of_size(EngineConfig { pools: 2, ..config() }, &[A, B, C]);
    bench.answer(A, room(1, 2));
    bench.answer(B, room(1, 3));
    let actions = bench.answer(C, room(1, 3));
    assert_eq!((bench.sessions().len(), sizes(&actions)), (2, vec![3, 3]));
    assert!(actions.contains(&Action::Release(A)), "{actions:?}");
    [B, C].into_iter().for_each(|server| drop(bench.gives(server, 3)));
    let asked = bench.refused_for(200);
    assert_eq!(asked, [], "another one could not join");
}

/// What makes a server slow is measured; no label says so.
#[test]
fn a_slow_server_gets_a_pool_only_if_memory_needs_it() {
    for (needed, expected) in [(6, vec![A]), (8, vec![A, B])] {
        let mut bench = short_on_a();
        bench.answer(B, room(1, 8));
        bench.gives(B, 4);
        bench.wait(60 * SECOND);
        // Both are lost. What was measured remains known.
        bench.engine.placement.note_latency(A, 100_000);
        bench.engine.placement.note_latency(B, 250_000);
        bench.engine.handle_disconnected(bench.now, A);
        bench.engine.handle_disconnected(bench.now, B);
        bench.engine.resize(bench.now, PageCount(needed), PageCount(0));
        bench.work();
        bench.answer(B, room(9, 100));
        bench.answer(A, room(9, 6));
        assert_eq!(bench.sessions(), expected, "{needed} pages");
    }
}

/// Otherwise it would be a minute until others are asked again.
#[test]
fn others_are_asked_at_once_when_memory_is_taken_back_or_another_size_is_wanted() {
    let taken_back = |bench: &mut Bench| bench.engine.handle_taken_back(bench.now, A, PageCount(2));
    let resized = |bench: &mut Bench| bench.engine.resize(bench.now, PageCount(7), PageCount(0));
    let events: [&dyn Fn(&mut Bench); 3] = [&|_| {}, &taken_back, &resized];
    for (event, expected) in events.into_iter().zip([vec![], vec![Action::Ask(B)], vec![Action::Ask(B)]]) {
        let mut bench = short_on_a();
        bench.answer(B, None);
        event(&mut bench);
        bench.wait(SECOND);
        assert_eq!(bench.work(), expected);
    }
}

/// Memory for a large pool takes long. What counts as a step is a part of what is missing, and at most 16 MiB.
#[test]
fn a_server_that_gives_a_part_is_asked_for_the_rest_at_once_if_it_is_enough() {
    for (wanted, least) in [(640, 10), (641, 11), (LARGE, 4096)] {
        for (gives, expected) in [(least - 1, vec![]), (least, vec![size(A, wanted)])] {
            let mut bench = of_size(EngineConfig { cache: PageCount(wanted), ..config() }, &[A]);
            assert_eq!(bench.answer(A, room(1, wanted)), begins(A, &[], wanted));
            assert_eq!(bench.gives(A, gives), expected, "{gives} of {wanted}");
        }
    }
}

/// The pools that are drained are as many as there may be.
#[test]
fn a_server_that_answers_before_there_may_be_another_pool_is_asked_again_later() {
    let mut bench = of_size(EngineConfig { pools: 1, ..config() }, &[A]);
    bench.answer(A, room(1, 8));
    bench.gives(A, 8);
    bench.wait(SECOND);
    bench.engine.set_servers(bench.now, &[B], Leaving::Drained);
    assert_eq!(bench.all_actions(), [Action::Ask(B)]);
    assert_eq!(bench.answer(B, room(1, 8)), [Action::Release(B)]);
    let deadline = bench.engine.next_deadline().expect("it is asked again");
    assert!(deadline > bench.now, "a timer that is always due");
    let (start, mut asked) = (bench.now, 0);
    while bench.sessions() != [B] {
        if bench.until_next().contains(&Action::Ask(B)) {
            asked += 1;
            bench.answer(B, room(1, 8));
        }
    }
    assert!((600..=607).contains(&(bench.now.since_ns(start) / SECOND)) && asked < 150, "{:?}, {asked}", bench.now);
}

/// It was taken out of the list while it was asked, and is in it again.
#[test]
fn a_second_answer_of_a_server_that_has_a_pool_is_released() {
    let mut bench = short_on_a();
    assert_eq!(bench.answer(A, room(1, 8)), [Action::Release(A)]);
    assert_eq!(bench.answer(B, None), []);
    assert_eq!(bench.sessions(), [A]);
}
