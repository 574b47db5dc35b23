//! The memory server: its size, its silence, and what is lost with a connection.

use super::*;

/// Returns a bench whose server was asked for its 8 pages, and has not answered.
fn asking() -> Bench {
    let mut bench = Bench::new(config());
    bench.greet(1, 0, 0);
    assert_eq!(bench.actions(), [set_size(PageCount(8))]);
    bench
}

impl Bench {
    /// Reads block 3, which is cached, from the server, which is late. Returns when it is given up.
    fn hang(&mut self) -> Nanos {
        self.cache(3, 1);
        self.read(0, blocks(3, 1));
        self.wait(MS * 500);
        assert_eq!(self.timer(), [disk_too(0, blocks(3, 1))]);
        self.engine.next_deadline().expect("silence ends")
    }
}

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
    // Counting continues from the server's number.
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
    bench.engine.handle_size_refused(bench.now, SERVER, PageCount(u32::MAX));
    assert_eq!(bench.actions(), []);
}

#[test]
fn a_refusal_leads_to_what_there_is_and_is_tried_again() {
    let mut bench = Bench::new(config());
    bench.greet(1, 0, 0);
    let granted = |bench: &Bench| {
        let status = bench.engine.status();
        [status.granted, status.granted_at_most].map(|pages| pages.0)
    };
    assert_eq!(bench.actions(), [set_size(PageCount(8))]);
    assert_eq!(granted(&bench), [0, 8]);
    bench.engine.handle_size_refused(bench.now, SERVER, PageCount(5));
    assert_eq!(bench.actions(), [set_size(PageCount(5))]);
    assert_eq!(granted(&bench), [0, 5]);
    bench.engine.handle_sized(bench.now, SERVER, PageCount(5));
    assert_eq!(bench.actions(), []);
    assert_eq!(granted(&bench), [5, 5]);
    bench.engine.resize(bench.now, PageCount(2), PageCount(0));
    assert_eq!(bench.actions(), [set_size(PageCount(2))]);
    assert_eq!(granted(&bench), [5, 5]);
    bench.engine.handle_size_refused(bench.now, SERVER, PageCount(0));
    bench.engine.resize(bench.now, PageCount(8), PageCount(0));
    assert_eq!(bench.actions(), []);
    let retry = bench.engine.next_deadline().expect("the rest is asked for later");
    bench.wait(retry.since_ns(bench.now));
    assert_eq!(bench.timer(), [set_size(PageCount(8))]);
    bench.engine.handle_size_refused(bench.now, SERVER, PageCount(0));
    assert_eq!(bench.actions(), [], "the server has nothing to give");
    assert!(bench.engine.next_deadline().is_some());
}

#[test]
fn a_shrink_moves_the_newest_pages_down_before_it_is_asked_for() {
    let mut bench = Bench::connected();
    for bno in 0..8 {
        bench.cache(bno, u8::try_from(bno + 1).unwrap());
    }
    bench.engine.resize(bench.now, PageCount(2), PageCount(0));
    let actions = bench.actions();
    let (moves, [Action::SetSize { npages: PageCount(2), .. }]) = actions.split_at(actions.len() - 1) else {
        panic!("SETSIZE is the last: {actions:?}")
    };
    let mut pages: Vec<_> = (0..8).collect();
    for action in moves {
        let Action::MovePage { from, to, .. } = action else { panic!("nothing else happens: {action:?}") };
        pages[to.0 as usize] = pages[from.0 as usize];
    }
    pages[..2].sort_unstable();
    assert_eq!(pages[..2], [6, 7], "the server has the newest ones");
    bench.engine.handle_sized(bench.now, SERVER, PageCount(2));
    assert!(bench.cached(6) && bench.cached(7) && !bench.cached(0));
    assert_eq!(bench.engine.index().slot_counts(), SlotCounts { free: 0, used: 2, draining: 0 });
}

#[test]
fn moves_that_were_on_the_way_are_given_up() {
    let mut bench = Bench::connected();
    for bno in 0..8 {
        bench.cache(bno, u8::try_from(bno + 1).unwrap());
    }
    bench.engine.resize(bench.now, PageCount(2), PageCount(0));
    bench.actions();
    bench.disconnect();
    // All sends arrived; whether the moves did is unknown.
    bench.connect(1, 8, 8);
    assert!((0..8).all(|bno| !bench.cached(bno)));
}

/// The server may have granted the smaller size already.
#[test]
fn no_slot_is_used_that_the_server_was_told_to_drop() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.engine.resize(bench.now, PageCount(0), PageCount(0));
    assert_eq!(bench.actions(), [set_size(PageCount(0))]);
    bench.engine.resize(bench.now, PageCount(8), PageCount(0));
    bench.do_from_disk(GuestOp::Read(blocks(3, 1)), &page(1));
    assert_eq!(bench.engine.handle_evicted(&page(1)), Evicted::Dropped);
    bench.engine.handle_sized(bench.now, SERVER, PageCount(0));
    assert_eq!(bench.grant(), []);
    assert!(matches!(bench.engine.handle_evicted(&page(1)), Evicted::Admit(_)));
}

/// Returns a full cache of `pages` pages, whose older half is no longer needed. A turn processes `slots_per_turn` of them.
fn large(pages: u32, slots_per_turn: u32) -> Bench {
    let config = EngineConfig { cache: PageCount(pages), guest_memory: PageCount(pages), slots_per_turn, ..config() };
    let mut bench = Bench::new(config);
    bench.greet(1, pages, 0);
    bench.grant_all();
    for bno in 0..pages {
        bench.cache_content(u64::from(bno), &numbered(bno));
    }
    bench.do_from_disk(GuestOp::Discard(blocks(0, u64::from(pages / 2))), &[]);
    bench
}

/// A number of turns after which some of the pages that do not fit have gone, and some of the slots.
const TURNS: u32 = 28;

fn numbered(bno: u32) -> Vec<u8> {
    (bno + 1).to_le_bytes().repeat(PAGE_SIZE / 4)
}

impl Bench {
    fn cache_content(&mut self, bno: u64, data: &[u8]) {
        self.do_from_disk(GuestOp::Read(blocks(bno, 1)), data);
        assert!(matches!(self.engine.handle_evicted(data), Evicted::Admit(_)));
        self.engine.handle_sent(SERVER, 1);
    }

    /// Runs a change of size to its end. Returns all other actions.
    fn grant_all(&mut self) -> Vec<Action> {
        let mut others = self.grant();
        while self.engine.next_deadline() == Some(Nanos(0)) {
            self.engine.handle_timer(self.now);
            others.extend(self.grant());
        }
        others
    }

    fn capacity(&self) -> u32 {
        self.engine.index().capacity(POOL).0
    }
}

#[test]
fn a_shrink_takes_many_turns_of_which_none_is_long() {
    let mut bench = large(2000, 64);
    bench.engine.resize(bench.now, PageCount(500), PageCount(0));
    let (mut turns, mut moves) = (0, 0);
    loop {
        let actions = bench.actions();
        assert!(actions.len() <= 64 + 1, "{}", actions.len());
        moves += actions.iter().filter(|action| matches!(action, Action::MovePage { .. })).count();
        if let Some(Action::SetSize { npages: size, .. }) = actions.last() {
            assert_eq!((size.0, bench.capacity()), (500, 500), "all that is cut off is empty");
            break;
        }
        assert_eq!(bench.engine.next_deadline(), Some(Nanos(0)), "it goes on in the next turn");
        // The guest is served in between, from the cache and from the disk.
        if turns < TURNS {
            let bno = 1999 - turns;
            let fetch = only_fetch(&bench.read(0, blocks(u64::from(bno), 1)));
            bench.engine.handle_page(bench.now, SERVER, fetch, &numbered(bno));
            assert_eq!(bench.actions(), [complete(0)]);
            bench.do_from_disk(GuestOp::Read(blocks(0, 1)), &numbered(0));
        }
        turns += 1;
        bench.engine.handle_timer(bench.now);
    }
    assert!(turns >= 2000 / 64 && moves >= 250, "{turns} turns, {moves} moves");
    bench.engine.handle_sized(bench.now, SERVER, PageCount(500));
    assert!(bench.cached(1600) && !bench.cached(0));
    assert_eq!(bench.engine.next_deadline(), None);
}

#[test]
fn another_size_in_the_middle_of_a_shrink_counts_from_there() {
    for (size, asked) in [(2000, None), (1900, Some(1900)), (100, Some(100)), (0, Some(0))] {
        let mut bench = large(2000, 64);
        bench.engine.resize(bench.now, PageCount(500), PageCount(0));
        for _ in 0..TURNS {
            assert!(bench.actions().iter().all(|action| matches!(action, Action::MovePage { .. })));
            bench.engine.handle_timer(bench.now);
        }
        bench.actions();
        assert!((501..1900).contains(&bench.capacity()), "{}", bench.capacity());
        bench.engine.resize(bench.now, PageCount(size), PageCount(0));
        let mut actions = bench.actions();
        while bench.engine.next_deadline() == Some(Nanos(0)) && !matches!(actions.last(), Some(Action::SetSize { .. }))
        {
            actions.extend(bench.timer());
        }
        let last = actions.iter().find(|action| matches!(action, Action::SetSize { .. }));
        assert_eq!(last, asked.map(|size| set_size(PageCount(size))).as_ref());
        bench.engine.handle_sized(bench.now, SERVER, PageCount(size));
        bench.grant_all();
        assert_eq!((bench.capacity(), bench.engine.next_deadline()), (size, None));
        assert_eq!(bench.cached(1999), size > 0);
    }
}

#[test]
fn a_lost_connection_in_the_middle_of_a_shrink_leaves_a_pool_that_goes_on() {
    let mut bench = large(2000, 64);
    bench.engine.resize(bench.now, PageCount(500), PageCount(0));
    for _ in 0..TURNS {
        bench.timer();
    }
    let capacity = bench.capacity();
    bench.disconnect();
    assert_eq!(bench.capacity(), capacity);
    assert!(bench.engine.next_deadline() != Some(Nanos(0)), "there is no server to tell of moves");
    bench.greet(1, 2000, 2000);
    bench.grant_all();
    assert_eq!((bench.capacity(), bench.engine.status().granted), (500, PageCount(500)));
    assert!(bench.engine.index().slot_counts().used > 0, "what had not moved is still there");
}

#[test]
fn a_process_that_is_replaced_in_the_middle_of_a_shrink_leaves_a_pool_that_goes_on() {
    for closes in [true, false] {
        let mut bench = large(2000, 64);
        bench.engine.resize(bench.now, PageCount(500), PageCount(0));
        for _ in 0..TURNS {
            bench.timer();
        }
        if closes {
            bench.engine.close();
        }
        let words = bench.engine.index().words().clone();
        let config =
            EngineConfig { cache: PageCount(500), guest_memory: PageCount(2000), slots_per_turn: 64, ..config() };
        let engine = DiskEngine::resume(&config, words, Origin::Own).map_err(|unusable| unusable.reason).unwrap();
        assert_eq!(engine.index().was_closed(), closes);
        let mut bench = Bench { engine, now: Nanos(1) };
        bench.engine.set_servers(bench.now, &[SERVER], Leaving::AtOnce);
        bench.greet(1, 2000, 2000);
        bench.grant_all();
        assert_eq!((bench.capacity(), bench.engine.status().granted), (500, PageCount(500)));
        assert!(bench.engine.index().slot_counts().used > 0, "what had not moved is still there");
    }
}

/// Pages beyond what the server grants are lost at once, however long it takes to release them.
#[test]
fn a_server_that_grants_less_is_asked_for_nothing_that_it_does_not_have() {
    let mut bench = large(2000, 64);
    bench.disconnect();
    bench.greet(1, 300, 2000);
    bench.actions();
    assert!(bench.capacity() > 300, "the rest is released later");
    let slots: Vec<_> = bench.engine.index().queue(POOL).map(|(slot, _)| slot.0).collect();
    assert!(slots.iter().all(|slot| *slot < 300), "{slots:?}");
    for bno in 1000..2000 {
        for action in bench.read(0, blocks(bno, 1)) {
            match action {
                Action::Fetch { fetch, at: PoolSlot { slot, .. } } => {
                    assert!(slot.0 < 300);
                    bench.engine.handle_page(bench.now, SERVER, fetch, &numbered(u32::try_from(bno).unwrap()));
                }
                Action::Disk { .. } => drop(bench.disk_done(0, Ok(()), &numbered(u32::try_from(bno).unwrap()))),
                _ => {}
            }
        }
        bench.actions();
        if bno % 10 == 0 {
            bench.engine.handle_timer(bench.now);
            bench.actions();
        }
    }
    bench.grant_all();
}

/// The log of sends and the send window bound how many pages move at a time.
#[test]
fn a_server_answers_for_some_moves_before_there_are_more() {
    let mut bench = large(20_000, 1024);
    bench.engine.resize(bench.now, PageCount(12_000), PageCount(0));
    let (mut since, mut moves, mut sizes) = (0, 0, Vec::new());
    loop {
        for action in bench.actions() {
            match action {
                Action::MovePage { .. } => since += 1,
                Action::SetSize { npages: size, .. } => {
                    sizes.push(size.0);
                    moves += std::mem::take(&mut since);
                    bench.engine.handle_sized(bench.now, SERVER, size);
                }
                other => panic!("{other:?}"),
            }
            assert!(since <= 4096 + 1024, "{since}");
        }
        if bench.engine.next_deadline() != Some(Nanos(0)) {
            break;
        }
        bench.engine.handle_timer(bench.now);
    }
    assert!(moves > 7000 && sizes.len() > 1 && sizes.is_sorted_by(|a, b| a > b), "{moves} moves, {sizes:?}");
    assert_eq!((sizes.last(), bench.capacity()), (Some(&12_000), 12_000));
    // Nothing is in doubt, though more has been moved than the log remembers.
    let used = bench.engine.index().slot_counts().used;
    bench.disconnect();
    bench.greet(1, 12_000, 20_000);
    assert_eq!(bench.engine.index().slot_counts().used, used);
}

#[test]
fn off_forgets_and_on_is_cold() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.engine.resize(bench.now, PageCount(0), PageCount(0));
    assert_eq!(bench.grant(), []);
    assert!(!bench.engine.status().enabled);
    bench.do_from_disk(GuestOp::Read(blocks(3, 1)), &page(1));
    assert!(!bench.known(3));
    bench.engine.resize(bench.now, PageCount(8), PageCount(0));
    bench.grant();
    assert_eq!(bench.read(0, blocks(3, 1)), [disk_action(0, GuestOp::Read(blocks(3, 1)))]);
}

/// A large index takes many turns to forget everything. A cache that is turned on meanwhile learns after that.
#[test]
fn what_is_being_forgotten_is_not_believed() {
    let mut bench = Bench::new(EngineConfig { slots_per_turn: 1, ..config() });
    for bno in [3, 4] {
        bench.do_from_disk(GuestOp::Read(blocks(bno, 1)), &page(1));
    }
    assert!(bench.known(3) && bench.known(4));
    bench.engine.resize(bench.now, PageCount(0), PageCount(0));
    assert_eq!(bench.actions(), []);
    assert!(!bench.known(3) && !bench.known(4));
    assert!(bench.engine.index().is_cutting(), "it takes more than this turn");
    bench.engine.resize(bench.now, PageCount(8), PageCount(0));
    assert_eq!(bench.engine.handle_evicted(&page(1)), Evicted::Unmatched);
    bench.do_from_disk(GuestOp::Read(blocks(3, 1)), &page(2));
    assert_eq!(bench.engine.stats().foreign_writes, 0);
    let mut turns = 0;
    while bench.engine.index().is_cutting() {
        assert!(!bench.known(3) && !bench.known(4), "after {turns} turns");
        assert_eq!(bench.engine.next_deadline(), Some(Nanos(0)));
        bench.timer();
        turns += 1;
    }
    assert!(turns > 10, "{turns}");
    assert_eq!(bench.engine.index().known_blocks(), PageCount(0));
    bench.do_from_disk(GuestOp::Read(blocks(3, 1)), &page(2));
    assert!(bench.known(3) && !bench.known(4));
}

/// Of every disk, and zeroes too, which no server is asked for.
#[test]
fn what_is_being_forgotten_is_read_from_the_disk() {
    let mut bench = Bench::new(EngineConfig { slots_per_turn: 1, ..config() });
    let zeroes = GuestOp::WriteZeroes { range: blocks(3, 1), may_unmap: false, durable: false };
    for disk in [DISK, OTHER_DISK] {
        bench.request(0, disk, zeroes);
        bench.disk_done(0, Ok(()), &[]);
    }
    [0, 8].into_iter().for_each(|pages| bench.engine.resize(bench.now, PageCount(pages), PageCount(0)));
    bench.actions();
    assert!(bench.engine.index().is_cutting(), "it takes more than this turn");
    for disk in [DISK, OTHER_DISK] {
        let op = GuestOp::Read(blocks(3, 1));
        assert_eq!(bench.request(0, disk, op), [Action::Disk { request: RequestId(0), disk, op }]);
        bench.disk_done(0, Ok(()), &page(2));
    }
    let report = bench.engine.curve(bench.now, None, &[]).unwrap();
    assert_eq!(report.reads, 2., "each is a miss at every size");
}

#[test]
fn a_server_that_says_nothing_is_given_up() {
    let mut bench = Bench::connected();
    let deadline = bench.hang();
    bench.wait(deadline.since_ns(bench.now));
    assert_eq!(bench.timer(), [Action::GiveUp(SERVER)]);
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
    // The offer was for less, but some time has passed.
    bench.wait(10_000 * MS);
    bench.engine.resize(bench.now, PageCount(20), PageCount(0));
    bench.grant();
    assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0));
    assert!(bench.cached(3));
    assert_eq!(bench.engine.index().slot_counts(), SlotCounts { free: 19, used: 1, draining: 0 });
}

#[test]
fn an_index_that_grows_before_it_has_a_pool_is_as_one_that_begins_so_large() {
    let mut bench = Bench::new(EngineConfig { cache: PageCount(0), ..config() });
    let of_size = |slots| layout(&EngineConfig { cache: PageCount(slots), ..config() });
    let [small, large, larger] = [1 << 13, 1 << 14, 1 << 15].map(PageCount);
    for slots in [small, large] {
        let layout = bench.engine.needs_layout(slots, PageCount(64)).unwrap();
        assert_eq!(layout, of_size(slots.0));
        bench.engine.replace_index(layout, vec![0; layout.words()]);
        assert_eq!(bench.engine.needs_layout(slots, PageCount(64)), None);
    }
    bench.engine.resize(bench.now, PageCount(8), PageCount(0));
    bench.connect(1, 8, 0);
    bench.cache(3, 1);
    let layout = bench.engine.needs_layout(larger, PageCount(64)).unwrap();
    assert_eq!(layout, of_size(large.0).resized(larger, PageCount(64)), "the slots of the pool keep their chunks");
    bench.engine.replace_index(layout, vec![0; layout.words()]);
    assert!(bench.cached(3));
}

/// The size of the index follows those of the pools, and not their single steps.
#[test]
fn an_index_is_too_large_once_servers_have_answered() {
    let mut bench = Bench::connected();
    let layout = bench.engine.needs_layout(PageCount(1 << 14), PageCount(64)).unwrap();
    bench.engine.replace_index(layout, vec![0; layout.words()]);
    let spare = |bench: &Bench, cache| {
        bench.engine.spare_layout(PageCount(cache), PageCount(64)).map(|layout| layout.slot_limit().0)
    };
    assert_eq!((spare(&bench, 1 << 14), spare(&bench, 8)), (None, Some(16)));
    assert_eq!(spare(&bench, u32::MAX), None);
    bench.engine.resize(bench.now, PageCount(2), PageCount(0));
    assert_eq!(spare(&bench, 2), None, "a SETSIZE is on its way");
    bench.grant();
    assert_eq!(spare(&bench, 2), Some(4));
    bench.wait(10_000 * MS);
    bench.engine.resize(bench.now, PageCount(8000), PageCount(0));
    bench.grant();
    while bench.engine.are_sizes_changing() {
        assert_eq!(spare(&bench, 2), None, "the pool grows");
        bench.timer();
    }
    let least = spare(&bench, 2).unwrap();
    assert!((7000..8000).contains(&least), "the pool has {least} slots and some chunks more");
}

#[test]
fn a_larger_index_takes_over_requests_for_slots_that_were_cut_off() {
    let mut bench = Bench::connected();
    for bno in 0..8 {
        bench.cache(bno, u8::try_from(bno + 1).unwrap());
    }
    let fetch = only_fetch(&bench.read(0, blocks(7, 1)));
    bench.engine.resize(bench.now, PageCount(2), PageCount(0));
    bench.grant();
    let layout = bench.engine.needs_layout(PageCount(20), PageCount(64)).unwrap();
    bench.engine.replace_index(layout, vec![0; layout.words()]);
    bench.engine.resize(bench.now, PageCount(20), PageCount(0));
    bench.grant();
    assert_eq!(bench.engine.index().slot_counts().draining, 1, "slot 7 waits for its reply");
    bench.page_comes(fetch, 8);
    assert_eq!(bench.engine.index().slot_counts().draining, 0);
    assert_eq!(bench.engine.index().pinned_slots(), PageCount(0));
}

#[test]
fn a_server_that_never_answers_a_setsize_is_given_up() {
    let mut bench = asking();
    bench.wait(MS);
    assert!(bench.engine.next_deadline().is_some_and(|at| at <= bench.now), "the clock is looked at");
    assert_eq!(bench.timer(), []);
    let deadline = bench.engine.next_deadline().expect("silence ends");
    assert!(deadline > bench.now);
    bench.wait(deadline.since_ns(bench.now));
    assert_eq!(bench.timer(), [Action::GiveUp(SERVER)]);
    assert!(!bench.engine.status().connected);
    bench.connect(2, 0, 0);
    assert_eq!(bench.engine.status().granted, PageCount(8));
    assert_eq!(bench.engine.next_deadline(), None);
}

/// A grant below the request, at once or later, means that the server has no page beyond it, whatever was sent there.
#[test]
fn a_server_that_gives_less_than_it_was_asked_for_gets_no_page_beyond() {
    let mut bench = asking();
    let mut number = 0;
    let mut fill = |bench: &mut Bench, gives: u32| {
        assert_eq!(bench.engine.index().capacity(POOL), PageCount(gives));
        for _ in 0..8 {
            let slot = bench.cache(u64::from(number), number + 1);
            number += 1;
            assert!(slot.0 < gives, "{slot:?} is none of its pages");
            bench.engine.handle_sent(SERVER, 1);
        }
        let counts = bench.engine.index().slot_counts();
        assert_eq!(counts, SlotCounts { free: 0, used: gives, draining: 0 });
    };
    for answers in [vec![set_size(PageCount(8))], vec![]] {
        bench.engine.handle_sized(bench.now, SERVER, PageCount(5));
        assert_eq!(bench.actions(), answers);
    }
    fill(&mut bench, 5);
    let retry = bench.engine.next_deadline().expect("more is asked for later");
    bench.wait(retry.since_ns(bench.now));
    assert_eq!(bench.timer(), [set_size(PageCount(8))]);
    let held = |bench: &Bench| {
        let mut held: Vec<_> = bench.engine.index().queue(POOL).collect();
        held.retain(|(slot, _)| slot.0 < 2);
        held
    };
    let before = held(&bench);
    bench.engine.handle_sized(bench.now, SERVER, PageCount(2));
    assert_eq!((held(&bench), bench.actions()), (before, vec![]), "the content of its pages was not moved");
    fill(&mut bench, 2);
}

#[test]
fn a_server_that_gives_another_size_is_not_asked_without_end() {
    let mut bench = asking();
    bench.engine.handle_sized(bench.now, SERVER, PageCount(3));
    assert_eq!(bench.actions(), [set_size(PageCount(8))], "it may have more");
    bench.engine.handle_sized(bench.now, SERVER, PageCount(3));
    assert_eq!(bench.actions(), []);
    let retry = bench.engine.next_deadline().expect("it is asked again later");
    bench.wait(retry.since_ns(bench.now));
    assert_eq!(bench.timer(), [set_size(PageCount(8))]);
    // The same holds for a server that offers a page less with each refusal.
    bench.engine.handle_size_refused(bench.now, SERVER, PageCount(4));
    assert_eq!(bench.actions(), [set_size(PageCount(7))]);
    bench.engine.handle_size_refused(bench.now, SERVER, PageCount(3));
    assert_eq!(bench.actions(), []);
}

#[test]
fn a_size_that_changed_while_the_last_one_was_refused_is_asked_for_at_once() {
    let mut bench = Bench::connected();
    bench.engine.resize(bench.now, PageCount(2), PageCount(0));
    bench.grant();
    bench.engine.resize(bench.now, PageCount(8), PageCount(0));
    assert_eq!(bench.actions(), [set_size(PageCount(8))]);
    bench.engine.resize(bench.now, PageCount(1), PageCount(0));
    assert_eq!(bench.actions(), [], "one SETSIZE at a time");
    bench.engine.handle_size_refused(bench.now, SERVER, PageCount(3));
    assert_eq!(bench.actions(), [set_size(PageCount(1))]);
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

#[test]
fn pages_that_never_left_do_not_hide_that_a_server_hangs() {
    let mut bench = Bench::connected();
    bench.cache(4, 2);
    let deadline = bench.hang();
    bench.wait(MS * 5000);
    let fetch = only_fetch(&bench.read(1, blocks(4, 1)));
    assert_eq!(bench.engine.handle_unsent_page(bench.now, SERVER, fetch, &page(2)), deliver(1, 0));
    assert_eq!(bench.actions(), [complete(1)]);
    assert_eq!(bench.engine.next_deadline(), Some(deadline));
    bench.wait(deadline.since_ns(bench.now));
    assert_eq!(bench.timer(), [Action::GiveUp(SERVER)]);
}

#[test]
fn replies_that_nobody_asked_for_do_not_hide_that_a_server_hangs() {
    let mut bench = Bench::connected();
    let deadline = bench.hang();
    bench.wait(MS * 5000);
    bench.engine.handle_sized(bench.now, SERVER, PageCount(8));
    bench.engine.handle_size_refused(bench.now, SERVER, PageCount(1));
    assert_eq!(bench.page_comes(FetchId(7), 1), PageOutcome::Unexpected);
    bench.engine.handle_missing(bench.now, SERVER, FetchId(7));
    assert_eq!((bench.actions(), bench.engine.next_deadline()), (vec![], Some(deadline)));
    assert_eq!((bench.engine.stats().fetch_unexpected, bench.engine.status().granted), (2, PageCount(8)));
}

#[test]
fn a_server_that_gives_more_than_it_was_asked_for_is_asked_again_later() {
    let mut bench = asking();
    bench.engine.handle_sized(bench.now, SERVER, PageCount(9));
    assert_eq!(bench.actions(), [], "at once, it would be asked without end");
    assert_eq!(bench.capacity(), 8);
    let retry = bench.engine.next_deadline().expect("the rest is given back later");
    bench.wait(retry.since_ns(bench.now));
    assert_eq!(bench.timer(), [set_size(PageCount(8))]);
}

#[test]
fn after_a_grant_what_another_refusal_leaves_is_asked_for_at_once() {
    let mut bench = asking();
    bench.engine.handle_size_refused(bench.now, SERVER, PageCount(5));
    assert_eq!(bench.grant(), []);
    bench.engine.resize(bench.now, PageCount(2), PageCount(0));
    assert_eq!(bench.grant(), []);
    bench.engine.resize(bench.now, PageCount(5), PageCount(0));
    assert_eq!(bench.actions(), [set_size(PageCount(5))]);
    bench.engine.handle_size_refused(bench.now, SERVER, PageCount(1));
    assert_eq!(bench.actions(), [set_size(PageCount(3))]);
}
