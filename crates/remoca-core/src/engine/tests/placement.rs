//! Several memory servers: which one gets the pool, and when it moves.

use super::*;

const A: ServerNumber = ServerNumber(10);
const B: ServerNumber = ServerNumber(11);
const C: ServerNumber = ServerNumber(12);
const SECOND: u64 = 1000 * MS;

/// Returns the offer of a server that has no pool for us, and `available` pages.
fn room(generation: u64, available: u32) -> Option<PoolOffer> {
    Some(PoolOffer { generation, npages: PageCount(0), available: PageCount(available), sends_received: 0 })
}

fn servers(numbers: &[ServerNumber]) -> Bench {
    seeded(1, numbers)
}

/// Returns an engine that knows these servers, and has asked all of them.
fn seeded(seed: u64, numbers: &[ServerNumber]) -> Bench {
    let config = EngineConfig { seed, ..config() };
    let mut bench = Bench::new(config);
    bench.engine.set_servers(bench.now, numbers);
    let asked: Vec<_> = numbers.iter().map(|number| Action::Ask(*number)).collect();
    assert_eq!(bench.all_actions(), asked);
    bench
}

impl Bench {
    /// Returns the server of the session.
    fn session(&self) -> ServerNumber {
        self.engine.pool.server().expect("there is a session")
    }

    fn answer(&mut self, server: ServerNumber, offer: Option<PoolOffer>) -> Vec<Action> {
        self.engine.handle_answer(self.now, server, offer);
        self.all_actions()
    }

    /// Lets time pass until the engine wants to do something. Returns its actions.
    fn until_next(&mut self) -> Vec<Action> {
        let deadline = self.engine.next_deadline().expect("there is something to do");
        self.now = self.now.max(deadline);
        self.engine.handle_timer(self.now);
        self.all_actions()
    }

    fn grants(&mut self, npages: u32) -> Vec<Action> {
        self.engine.handle_sized(self.now, self.session(), PageCount(npages));
        self.all_actions()
    }

    /// Refuses the size that was asked for, and gives the `npages` that the server has.
    fn gives_only(&mut self, npages: u32) {
        let (server, more) = (self.session(), npages - self.engine.status().granted.0);
        self.engine.handle_size_refused(self.now, self.session(), PageCount(more));
        if more > 0 {
            assert_eq!(self.all_actions(), [Action::SetSize { server, npages: PageCount(npages) }]);
            assert_eq!(self.grants(npages), []);
        }
    }

    /// Returns the engine's actions in a number of seconds, in which its server refuses to give more and answers nothing else.
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

fn begins(server: ServerNumber) -> Vec<Action> {
    vec![Action::Use(server), Action::SetSize { server, npages: PageCount(8) }]
}

fn begins_and_releases(server: ServerNumber, released: &[ServerNumber]) -> Vec<Action> {
    [begins(server), released.iter().map(|server| Action::Release(*server)).collect()].concat()
}

#[test]
fn the_pool_goes_where_it_fits() {
    let mut bench = servers(&[A, B, C]);
    assert_eq!(bench.answer(A, room(1, 5)), [], "the others may have more");
    assert_eq!(bench.answer(B, room(1, 8)), []);
    assert_eq!(bench.answer(C, room(1, 7)), begins_and_releases(B, &[A, C]));
    assert_eq!(bench.grants(8), []);
    assert_eq!(bench.engine.next_deadline(), None, "nothing more is wanted of anybody");
}

#[test]
fn where_it_fits_nowhere_it_goes_where_most_of_it_does() {
    let mut bench = servers(&[A, B, C]);
    bench.answer(A, room(1, 0));
    bench.answer(B, room(1, 3));
    assert_eq!(bench.answer(C, room(1, 5)), begins_and_releases(C, &[A, B]));
}

#[test]
fn a_server_with_nothing_is_better_than_none() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, None);
    assert_eq!(bench.answer(B, room(1, 0)), begins(B));
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

#[test]
fn one_that_hangs_is_not_waited_for() {
    let mut bench = servers(&[A, B]);
    assert_eq!(bench.answer(B, room(1, 8)), []);
    let start = bench.now;
    assert_eq!(bench.until_next(), begins(B));
    assert!(bench.now.since_ns(start) <= SECOND);
    bench.grants(8);
    bench.wait(4 * SECOND);
    assert_eq!(bench.answer(A, room(1, 1000)), [Action::Release(A)], "too late");
    assert_eq!(bench.engine.status().granted, PageCount(8));
}

#[test]
fn the_server_that_still_has_the_pool_comes_first() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(5, 8));
    assert_eq!(bench.answer(B, None), begins(A));
    bench.grants(8);
    bench.cache(3, 1);
    bench.wait(60 * SECOND);
    bench.engine.handle_disconnected(bench.now, bench.session());
    assert_eq!(bench.all_actions(), [Action::Ask(A), Action::Ask(B)]);
    assert_eq!(bench.answer(B, room(1, 1000)), []);
    let warm = PoolOffer { generation: 5, npages: PageCount(8), available: PageCount(0), sends_received: 1 };
    assert_eq!(bench.answer(A, Some(warm)), [Action::Use(A), Action::Release(B)]);
    assert!(bench.cached(3));
}

#[test]
fn the_same_generation_at_another_server_is_another_pool() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(5, 8));
    bench.answer(B, None);
    bench.grants(8);
    bench.cache(3, 1);
    bench.wait(60 * SECOND);
    bench.engine.handle_disconnected(bench.now, bench.session());
    bench.all_actions();
    bench.answer(A, None);
    let other = PoolOffer { generation: 5, npages: PageCount(8), available: PageCount(0), sends_received: 1 };
    assert_eq!(bench.answer(B, Some(other)), [Action::Use(B)]);
    assert!(!bench.cached(3) && bench.known(3));
}

#[test]
fn with_the_server_lost_the_next_one_has_the_pool_at_once() {
    let mut bench = servers(&[A, B]);
    bench.answer(B, None);
    assert_eq!(bench.answer(A, room(1, 8)), begins(A));
    bench.grants(8);
    bench.cache(3, 1);
    bench.wait(SECOND);
    bench.read(0, blocks(3, 1));
    bench.engine.handle_disconnected(bench.now, bench.session());
    // The session was short: A has to wait, B does not.
    assert_eq!(bench.all_actions(), [disk_action(0, GuestOp::Read(blocks(3, 1))), Action::Ask(B)]);
    assert_eq!(bench.answer(B, room(1, 8)), begins(B));
    assert_eq!(bench.grants(8), []);
    assert!(!bench.cached(3));
    assert_eq!(bench.engine.next_deadline(), None, "A being back is no reason to move");
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
            true => drop(bench.grants(8)),
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
    assert_eq!(bench.answer(B, room(1, 4)), begins(B));
}

#[test]
fn a_refusal_leads_to_another_server() {
    let mut bench = servers(&[A, B, C]);
    bench.answer(A, room(1, 8));
    bench.answer(B, None);
    assert_eq!(bench.answer(C, None), begins(A));
    bench.wait(SECOND);
    // Another VM was faster.
    bench.gives_only(4);
    assert_eq!(bench.until_next(), [Action::Ask(B), Action::Ask(C)]);
    bench.answer(B, room(1, 4));
    let moved = [vec![Action::Leave(A)], begins_and_releases(C, &[B])].concat();
    assert_eq!(bench.answer(C, room(1, 5)), moved);
    assert_eq!(bench.engine.stats().pool_moves, 1);
}

#[test]
fn the_pool_stays_where_it_is_unless_it_gains_clearly() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(1, 4));
    bench.answer(B, None);
    bench.gives_only(4);
    bench.cache(3, 1);
    bench.wait(SECOND);
    assert_eq!(bench.until_next(), [Action::Ask(B)]);
    assert_eq!(bench.answer(B, room(1, 4)), [Action::Release(B)]);
    assert!(bench.cached(3));
    // The size is asked for again every ten seconds, the other server about once a minute.
    let asked: Vec<_> = bench.refused_for(200);
    assert_eq!(asked.iter().map(|(_, action)| *action).collect::<Vec<_>>(), [Action::Ask(B)], "{asked:?}");
    assert!((60..=75).contains(&asked[0].0), "{asked:?}");
    assert_eq!(bench.answer(B, None), []);
    assert!(bench.cached(3));
}

#[test]
fn a_pool_moves_once_a_minute_at_most() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(1, 2));
    bench.answer(B, None);
    bench.gives_only(2);
    bench.wait(SECOND);
    bench.until_next();
    assert_eq!(bench.answer(B, room(1, 8)), [vec![Action::Leave(A)], begins(B)].concat());
    bench.gives_only(3);
    // A has what B had offered, and the operator wants it.
    bench.engine.resize(PageCount(7));
    assert_eq!(bench.all_actions(), [Action::SetSize { server: bench.session(), npages: PageCount(7) }]);
    bench.engine.handle_size_refused(bench.now, bench.session(), PageCount(0));
    let asked = bench.refused_for(100);
    assert!(asked.len() == 1 && asked[0].1 == Action::Ask(A) && asked[0].0 >= 60, "{asked:?}");
    assert!(bench.answer(A, room(2, 7)).starts_with(&[Action::Leave(B), Action::Use(A)]));
}

/// A pool that was granted nothing has nothing to lose.
#[test]
fn without_any_page_the_others_are_asked_more_often() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(1, 0));
    bench.answer(B, None);
    bench.gives_only(0);
    bench.wait(SECOND);
    assert_eq!(bench.until_next(), [Action::Ask(B)]);
    assert_eq!(bench.answer(B, None), []);
    let asked = bench.refused_for(15);
    assert_eq!(asked.iter().map(|(_, action)| *action).collect::<Vec<_>>(), [Action::Ask(B)], "{asked:?}");
    assert_eq!(bench.answer(B, room(1, 1)), [vec![Action::Leave(A)], begins(B)].concat());
}

#[test]
fn a_server_that_does_not_give_what_it_says_is_not_believed_again() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(1, 4));
    assert_eq!(bench.answer(B, room(1, 8)), begins_and_releases(B, &[A]));
    bench.gives_only(1);
    bench.until_next();
    assert_eq!(bench.answer(A, room(1, 4)), [vec![Action::Leave(B)], begins(A)].concat());
    bench.gives_only(4);
    for _ in 0..5 {
        let asked = bench.refused_for(100);
        assert!(asked.iter().any(|(_, action)| *action == Action::Ask(B)), "{asked:?}");
        assert_eq!(bench.answer(B, room(1, 8)), [Action::Release(B)]);
    }
    bench.refused_for(300);
    assert!(bench.answer(B, room(1, 8)).starts_with(&[Action::Leave(A)]), "some time it may be true");
}

#[test]
fn a_larger_cache_may_need_another_server() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(1, 8));
    bench.answer(B, None);
    bench.grants(8);
    bench.engine.resize(PageCount(4));
    bench.all_actions();
    bench.grants(4);
    bench.wait(SECOND);
    bench.engine.resize(PageCount(8));
    assert_eq!(bench.all_actions(), [Action::SetSize { server: bench.session(), npages: PageCount(8) }]);
    bench.engine.handle_size_refused(bench.now, bench.session(), PageCount(0));
    assert_eq!(bench.until_next(), [Action::Ask(B)]);
    assert_eq!(bench.answer(B, room(1, 100)), [vec![Action::Leave(A)], begins(B)].concat());
}

#[test]
fn a_server_taken_out_of_the_list_is_left_at_once() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(1, 8));
    bench.answer(B, None);
    bench.grants(8);
    bench.cache(3, 1);
    bench.read(0, blocks(3, 1));
    bench.wait(SECOND);
    bench.engine.set_servers(bench.now, &[B, C]);
    let read = disk_action(0, GuestOp::Read(blocks(3, 1)));
    assert_eq!(bench.all_actions(), [Action::Leave(A), read, Action::Ask(B), Action::Ask(C)]);
    bench.answer(B, None);
    assert_eq!(bench.answer(C, room(1, 8)), begins(C));
    bench.grants(8);
    bench.engine.set_servers(bench.now, &[A, C]);
    assert_eq!(bench.all_actions(), [], "C has what is wanted");
}

#[test]
fn answers_of_servers_that_nobody_knows_any_more_are_released() {
    let mut bench = servers(&[A, B]);
    bench.answer(A, room(1, 8));
    bench.engine.set_servers(bench.now, &[C]);
    assert_eq!(bench.all_actions(), [Action::Release(A), Action::Ask(C)]);
    assert_eq!(bench.answer(B, room(1, 8)), [Action::Release(B)]);
    assert_eq!(bench.answer(B, None), []);
    assert_eq!(bench.answer(C, room(1, 8)), begins(C));
}

/// A pool of 4 pages on A, which has no more. B offers 8, and the pool moves there.
fn moved_from_a_to_b() -> Bench {
    let mut bench = servers(&[A, B]);
    bench.answer(B, None);
    bench.answer(A, room(1, 4));
    bench.gives_only(4);
    bench.wait(SECOND);
    assert_eq!(bench.until_next(), [Action::Ask(B)]);
    assert_eq!(bench.answer(B, room(1, 8)), [vec![Action::Leave(A)], begins(B)].concat());
    bench
}

/// After the loss of B, which makes the engine do `actions`, A has the pool again. B is asked, but not believed.
fn stays_on_a(mut bench: Bench, mut actions: Vec<Action>) {
    while !bench.engine.status().connected {
        for action in actions {
            if let Action::Ask(server) = action {
                bench.answer(server, room(2, if server == A { 4 } else { 8 }));
            }
        }
        actions = if bench.engine.status().connected { vec![] } else { bench.until_next() };
    }
    bench.gives_only(4);
    let asked = bench.refused_for(150);
    assert!(asked.iter().any(|(_, action)| *action == Action::Ask(B)), "{asked:?}");
    assert_eq!(bench.answer(B, room(2, 8)), [Action::Release(B)]);
}

#[test]
fn a_server_that_never_answers_a_size_does_not_get_the_pool_again_soon() {
    let mut bench = moved_from_a_to_b();
    let mut actions = vec![];
    while bench.engine.status().connected {
        actions = bench.until_next();
    }
    stays_on_a(bench, actions);
}

#[test]
fn a_server_that_hangs_up_at_once_does_not_get_the_pool_again_soon() {
    let mut bench = moved_from_a_to_b();
    bench.engine.handle_disconnected(bench.now, bench.session());
    let actions = bench.all_actions();
    stays_on_a(bench, actions);
}

#[test]
fn new_servers_are_asked_though_an_old_one_never_answers() {
    let mut bench = servers(&[A, B]);
    bench.answer(B, None);
    bench.answer(A, room(1, 4));
    bench.gives_only(4);
    bench.wait(SECOND);
    assert_eq!(bench.until_next(), [Action::Ask(B)]);
    bench.engine.set_servers(bench.now, &[A, B, C]);
    assert_eq!(bench.all_actions(), [Action::Ask(C)]);
    assert_eq!(bench.answer(C, room(1, 8)), []);
    assert_eq!(bench.until_next(), [vec![Action::Leave(A)], begins(C)].concat());
}

#[test]
fn nothing_moves_while_a_size_is_owed() {
    let mut bench = servers(&[A, B]);
    bench.answer(B, None);
    bench.answer(A, room(1, 4));
    bench.gives_only(4);
    bench.wait(SECOND);
    assert_eq!(bench.until_next(), [Action::Ask(B)]);
    bench.engine.resize(PageCount(7));
    assert_eq!(bench.all_actions(), [Action::SetSize { server: bench.session(), npages: PageCount(7) }]);
    assert_eq!(bench.answer(B, room(1, 8)), [Action::Release(B)], "A may give it");
    assert_eq!(bench.grants(7), []);
    assert_eq!(bench.engine.next_deadline(), None);
}
