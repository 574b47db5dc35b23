//! Several pools in one index, against what their servers hold.

use super::layout::{LOG_ENTRIES, header};
use super::resume_tests::{Mortal, resume};
use super::tests::{ZERO, block, content, empty};
use super::*;
use crate::units::{DiskIndex, PoolSet};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

const POOLS: u8 = 3;
const SLOTS: u32 = 40;

#[derive(Clone, Debug)]
enum Step {
    /// The guest reads a block that has this content, and evicts it: one of the pools may take it. Those of the second set
    /// among them are the local tier.
    Cycle(u32, u32, u8, u8),
    Forget(u32),
    Pin(u32),
    Unpin,
    /// A pool's server grants this many slots.
    Aim(u8, u32),
    Resize(u8, u32),
    LoseFrom(u8, u32),
    Drop(u8),
    DropSlotsOf(u8),
    /// Everything is to be forgotten, and is for so many entries.
    DropAll,
    Cut(u32),
    /// The newest pages did not arrive at the server.
    LoseSends(u8, u64),
    /// A move begins, to a region for about this many slots, goes on by some entries, or ends.
    Move(u32),
    Piece(u32),
    EndMove,
    /// The process ends, in good order or not, and another one continues.
    Restart(bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pool = 0..POOLS;
    proptest::collection::vec(
        prop_oneof![
            12 => (0..60_u32, 1..60_u32, 1..8_u8, 0..4_u8)
                .prop_map(|(bno, number, set, local)| Step::Cycle(bno, number, set, local)),
            1 => (0..60_u32).prop_map(Step::Forget),
            2 => (0..60_u32).prop_map(Step::Pin),
            2 => Just(Step::Unpin),
            2 => (pool.clone(), 0..20_u32).prop_map(|(pool, slots)| Step::Aim(pool, slots)),
            3 => (pool.clone(), 1..12_u32).prop_map(|(pool, slots)| Step::Resize(pool, slots)),
            1 => (pool.clone(), 0..20_u32).prop_map(|(pool, slots)| Step::LoseFrom(pool, slots)),
            1 => pool.clone().prop_map(Step::Drop),
            1 => pool.clone().prop_map(Step::DropSlotsOf),
            1 => Just(Step::DropAll),
            4 => (1..60_u32).prop_map(Step::Cut),
            1 => (pool, 0..4_u64).prop_map(|(pool, sends)| Step::LoseSends(pool, sends)),
            1 => (0..SLOTS + 8).prop_map(Step::Move),
            4 => (1..40_u32).prop_map(Step::Piece),
            1 => Just(Step::EndMove),
            1 => any::<bool>().prop_map(Step::Restart),
        ],
        1..80,
    )
}

/// Frame that a server was sent.
#[derive(Clone, Copy)]
enum Frame {
    Page(SlotIndex, Fingerprint),
    Move(SlotIndex, SlotIndex),
}

/// An index, and the page in each slot of each server.
struct World {
    index: CacheIndex<Vec<u32>>,
    servers: HashMap<(PoolIndex, SlotIndex), Fingerprint>,
    /// What each server was sent since its pool began, with the number of pages by then.
    frames: HashMap<PoolIndex, Vec<(u64, Frame)>>,
    generation: u64,
    pinned: Vec<SlotIndex>,
    /// Blocks that were learnt since everything was dropped.
    learned: HashSet<u32>,
}

fn pools_of(set: u8) -> PoolSet {
    (0..POOLS).filter(|pool| set >> pool & 1 != 0).map(PoolIndex).collect()
}

fn layout() -> Layout {
    Layout::new(PageCount(SLOTS), PageCount(30), 2)
}

impl World {
    fn new() -> Self {
        let index = empty(vec![0; layout().words()], layout());
        let mut this = Self {
            index,
            servers: HashMap::new(),
            frames: HashMap::new(),
            generation: 0,
            pinned: Vec::new(),
            learned: HashSet::new(),
        };
        for pool in (0..POOLS).map(PoolIndex) {
            this.begin(pool);
            this.index.aim(pool, PageCount(10));
            this.resize(pool, u32::MAX);
        }
        this
    }

    fn begin(&mut self, pool: PoolIndex) {
        self.generation += 1;
        let identity = Pool { server: u32::from(pool.0), generation: self.generation };
        self.index.begin_pool(pool, identity, 0);
        self.servers.retain(|(of, _), _| *of != pool);
        self.frames.remove(&pool);
    }

    fn resize(&mut self, pool: PoolIndex, slots: u32) {
        let pages = self.index.sends(pool);
        let mut moves = Vec::new();
        self.index.resize(pool, slots, |Move { from, to }| moves.push(Frame::Move(from, to)));
        moves.into_iter().for_each(|frame| self.send(pool, pages, frame));
    }

    /// Sends a server a frame, after so many pages with it.
    fn send(&mut self, pool: PoolIndex, pages: u64, frame: Frame) {
        let page = match frame {
            Frame::Page(_, page) => page,
            Frame::Move(from, _) => self.servers.remove(&(pool, from)).expect("what moves was sent"),
        };
        let (Frame::Page(to, _) | Frame::Move(_, to)) = frame;
        self.servers.insert((pool, to), page);
        self.frames.entry(pool).or_default().push((pages, frame));
    }

    /// Takes from a server the pages after so many, and what was sent after the last one that it has.
    fn lose(&mut self, pool: PoolIndex, received: u64) {
        self.servers.retain(|(of, _), _| *of != pool);
        for (pages, frame) in self.frames.remove(&pool).unwrap_or_default() {
            let is_lost = match frame {
                Frame::Page(..) => pages > received,
                Frame::Move(..) => pages >= received,
            };
            if is_lost {
                break;
            }
            self.send(pool, pages, frame);
        }
    }

    fn cycle(&mut self, bno: u32, number: u32, set: u8, local: u8) {
        if !self.index.is_void(block(bno.into())) {
            self.index.learn(block(bno.into()), content(number));
            self.learned.insert(bno);
        }
        let tiers = Tiers { local: pools_of(set & local), remote: pools_of(set & !local) };
        match self.index.offer(content(number), Place::Tail, tiers) {
            Offer::Admitted(slot) => {
                assert_eq!(self.index.cached(content(number)), Some(slot));
                self.store(slot, content(number), tiers.pools().collect());
            }
            Offer::Demoting { slot, to } => {
                let from = self.index.place_of(slot).expect("an admitted page has a place");
                assert!(tiers.local.contains(from.0), "only the local tier demotes");
                let demoted = self.servers[&from];
                self.store(to, demoted, tiers.remote);
                assert_eq!(self.index.cached(demoted), Some(to));
                assert_eq!(self.index.queue(self.index.place_of(to).unwrap().0).last(), Some((to, demoted)));
                self.store(slot, content(number), tiers.local);
            }
            Offer::Duplicate | Offer::Unmatched | Offer::NoSlot => {}
        }
    }

    fn store(&mut self, slot: SlotIndex, page: Fingerprint, pools: PoolSet) {
        let place = self.index.place_of(slot).expect("an admitted page has a place");
        assert!(pools.contains(place.0), "one of those that may take it does");
        assert!(place.1.0 < self.index.capacity(place.0).0, "it is a slot that the server gave");
        assert!(!self.pinned.contains(&slot), "nobody waits for what is there");
        self.send(place.0, self.index.sends(place.0), Frame::Page(place.1, page));
    }

    fn restart(&mut self, in_good_order: bool) {
        while let Some(slot) = self.pinned.pop() {
            self.index.unpin(slot);
        }
        if in_good_order {
            self.index.close();
        }
        self.index = resume(self.index.words().clone());
        // An engine drops what it has no pool for.
        for pool in PoolIndex::all().filter(|pool| self.index.pool(*pool).is_none()).collect::<Vec<_>>() {
            self.index.drop_pool(pool);
        }
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Cycle(bno, number, set, local) => self.cycle(bno, number, set, local),
            Step::Forget(bno) => self.index.forget(block(bno.into())),
            Step::Pin(number) => {
                if let Some(slot) = self.index.cached(content(number))
                    && self.index.pin(slot)
                {
                    self.pinned.push(slot);
                }
            }
            Step::Unpin => self.pinned.pop().into_iter().for_each(|slot| self.index.unpin(slot)),
            Step::Aim(pool, slots) => {
                let of_others: u32 =
                    (0..POOLS).filter(|it| *it != pool).map(|it| self.index.capacity(PoolIndex(it)).0).sum();
                self.index.aim(PoolIndex(pool), PageCount(slots.min(SLOTS - of_others.min(SLOTS))));
            }
            Step::Resize(pool, slots) => self.resize(PoolIndex(pool), slots),
            Step::LoseFrom(pool, slots) => self.index.lose_from(PoolIndex(pool), PageCount(slots)),
            Step::Drop(pool) => {
                let pool = PoolIndex(pool);
                self.index.drop_pool(pool);
                let others = (0..POOLS).map(PoolIndex).filter(|it| *it != pool);
                let unchanged: Vec<_> = others.map(|it| (it, self.index.queue(it).collect::<Vec<_>>())).collect();
                assert_eq!(self.index.queue(pool).count(), 0, "what was there is not found any more");
                assert_ne!(self.index.free_pool(), Some(pool).filter(|it| self.index.capacity(*it).0 > 0));
                self.resize(pool, u32::MAX);
                assert_eq!(self.index.capacity(pool), PageCount(0));
                for (it, queue) in unchanged {
                    assert!(self.index.queue(it).eq(queue), "another pool keeps all");
                }
                self.begin(pool);
            }
            Step::DropSlotsOf(pool) => self.index.drop_slots_of(PoolIndex(pool)),
            Step::DropAll => {
                self.index.drop_everything();
                self.learned.clear();
                assert_eq!(self.index.slot_counts().used, 0);
            }
            Step::Cut(entries) => self.index.cut(entries),
            Step::LoseSends(pool, sends) => {
                let pool = PoolIndex(pool);
                let received = self.index.sends(pool).saturating_sub(sends);
                let identity = self.index.pool(pool).expect("it is there");
                self.index.give_up_sends(pool, received);
                self.index.begin_pool(pool, identity, received);
                self.lose(pool, received);
            }
            Step::Move(slots) => {
                let slots = self.index.least_slots().max(PageCount(slots));
                let layout = self.index.layout().resized(slots, PageCount(40));
                self.index.begin_move(CacheIndex::new(vec![0; layout.words()], layout, 7, ZERO));
            }
            Step::Piece(entries) => drop(self.index.move_entries(entries)),
            Step::EndMove => drop(self.index.finish_move()),
            Step::Restart(in_good_order) => self.restart(in_good_order),
        }
    }

    fn check(&self) {
        let mut used = 0;
        for pool in PoolIndex::all() {
            let (counts, capacity) = (self.index.pool_slot_counts(pool), self.index.capacity(pool));
            assert_eq!(counts.free + counts.used + counts.draining, capacity.0, "{pool:?}");
            used += counts.used;
            for (slot, content) in self.index.queue(pool) {
                assert_eq!(self.index.cached(content), Some(slot));
                let place = self.index.place_of(slot).expect("a page has a place");
                assert_eq!((place.0, self.servers.get(&place)), (pool, Some(&content)), "the server has it there");
            }
        }
        assert_eq!(used, self.index.slot_counts().used);
        assert_eq!(self.index.entries.check_lines(&self.index.words), self.index.known_blocks().0 as usize);
        let is_believed = |bno: &u32| self.index.believed(block((*bno).into())).is_some();
        assert!((0..60).filter(is_believed).all(|bno| self.learned.contains(&bno)), "what was dropped is believed");
        let layout = self.index.layout();
        assert!(self.index.total_capacity().0 <= layout.table_slots());
        assert!(self.index.least_slots() <= layout.slot_limit(), "it can move to a region with as many slots");
        let first_slots = (0..layout.chunks()).map(|chunk| SlotIndex(chunk << layout.chunk_bits()));
        let owned = first_slots.filter(|slot| self.index.place_of(*slot).is_some()).count();
        assert_eq!(owned + self.index.free_chunks(), layout.chunks() as usize, "no chunk is lost");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn pages_are_where_their_pools_have_them(steps in steps()) {
        let mut world = World::new();
        for step in &steps {
            world.apply(step);
            world.index.check_target();
            world.check();
        }
    }
}

/// Returns an index with a full pool of eight slots and an empty one, and where each content is.
fn two_pools() -> CacheIndex<Vec<u32>> {
    let mut world = World::new();
    for number in 1..9 {
        world.cycle(number, number, 1, 0);
    }
    world.index
}

#[test]
fn a_lost_pool_is_not_found_again_whenever_its_process_is_killed() {
    let healthy = two_pools();
    for last in 0.. {
        let words = Mortal::new(healthy.words().clone(), u32::MAX);
        let mut index = CacheIndex::resume(words, Origin::Own, 2, 7, ZERO).map_err(|it| it.reason).unwrap();
        index.words.stop_after(last);
        index.drop_pool(PoolIndex(0));
        index.resize(PoolIndex(0), u32::MAX, |_| {});
        index.aim(PoolIndex(1), PageCount(20));
        index.resize(PoolIndex(1), u32::MAX, |_| {});
        let (lived, words) = index.words.end();
        let successor = resume(words);
        let is_lost = successor.pool(PoolIndex(0)).is_none();
        for (slot, _) in successor.pages() {
            let (pool, _) = successor.place_of(slot).expect("a page has a place");
            assert!(pool == PoolIndex(0) && !is_lost, "killed before store {last}: {slot:?} has a page of {pool:?}");
        }
        if lived {
            assert_eq!(successor.capacity(PoolIndex(1)), PageCount(20));
            return;
        }
    }
}

#[test]
fn pools_take_pages_in_proportion_to_their_sizes() {
    let layout = Layout::new(PageCount(4000), PageCount(4000), 2);
    let mut index = empty(vec![0; layout.words()], layout);
    let sizes = [(PoolIndex(0), 3000), (PoolIndex(1), 500), (PoolIndex(2), 500)];
    for (pool, slots) in sizes {
        index.begin_pool(pool, Pool { server: u32::from(pool.0), generation: 1 }, 0);
        index.aim(pool, PageCount(slots));
        index.resize(pool, u32::MAX, |_| {});
    }
    let mut taken = [0; 3];
    for number in 0..12_000 {
        index.learn(block(u64::from(number) % 4000), content(number));
        if let Offer::Admitted(slot) = index.offer(content(number), Place::Tail, PoolSet::ALL)
            && let Some((pool, _)) = index.place_of(slot)
            && number >= 4000
        {
            taken[usize::from(pool.0)] += 1;
        }
    }
    assert_eq!(taken, [6000, 1000, 1000]);
    let only: PoolSet = [PoolIndex(2)].into_iter().collect();
    index.learn(block(1), content(20_000));
    let Offer::Admitted(slot) = index.offer(content(20_000), Place::Tail, only) else { panic!("it takes the page") };
    assert_eq!(index.place_of(slot).map(|(pool, _)| pool), Some(PoolIndex(2)));
    assert_eq!(index.offer(content(20_000), Place::Tail, only), Offer::Duplicate);
    index.learn(block(2), content(20_001));
    assert_eq!(index.offer(content(20_001), Place::Tail, PoolSet::default()), Offer::NoSlot);
}

#[test]
fn sixteen_pools_of_different_sizes_have_room() {
    let sizes: Vec<u32> = (1..17).collect();
    let layout = Layout::new(PageCount(sizes.iter().sum()), PageCount(16), 2);
    let mut index = empty(vec![0; layout.words()], layout);
    for (pool, slots) in PoolIndex::all().zip(&sizes) {
        index.aim(pool, PageCount(*slots));
        index.resize(pool, u32::MAX, |_| {});
        assert_eq!(index.capacity(pool), PageCount(*slots));
    }
    assert_eq!(index.total_capacity().0, sizes.iter().sum::<u32>());
}

#[test]
fn what_is_known_of_a_cut_disk_is_forgotten_wherever_it_would_move() {
    let disk = block(0).disk;
    for examined in 0..80 {
        let mut world = World::new();
        for number in 1..20 {
            world.cycle(number, number, 1 << (number % 3), 0);
        }
        (40..46).for_each(|number| world.index.learn(block(number.into()), content(number)));
        world.index.cut_disk(disk, 0);
        world.index.cut(examined);
        // Nodes become slots, slots become nodes, and slots move to lower ones, some of which were examined already.
        for number in 40..46 {
            world.index.offer(content(number), Place::Tail, PoolSet::ALL);
        }
        for pool in (0..POOLS).map(PoolIndex) {
            world.index.aim(pool, PageCount(3));
            world.resize(pool, u32::MAX);
            world.index.lose_from(pool, PageCount(1));
            world.resize(pool, u32::MAX);
        }
        world.index.cut(u32::MAX);
        assert!((0..50).all(|bno| world.index.known(block(bno)).is_none()), "after {examined} entries");
    }
}

/// A request for a slot is outstanding, so its pool must not use the slot's number for another slot.
#[test]
fn a_chunk_with_a_pinned_slot_is_not_given_to_another_pool() {
    let [one, other] = [0, 1].map(PoolIndex);
    let layout = Layout::new(PageCount(SLOTS), PageCount(64), 2);
    let mut index = empty(vec![0; layout.words()], layout);
    let size = |index: &mut CacheIndex<Vec<u32>>, pool, slots| {
        index.aim(pool, PageCount(slots));
        index.resize(pool, u32::MAX, |_| {});
    };
    index.begin_pool(one, Pool { server: 0, generation: 1 }, 0);
    index.begin_pool(other, Pool { server: 1, generation: 1 }, 0);
    size(&mut index, one, 4);
    index.learn(block(1), content(1));
    let Offer::Admitted(slot) = index.offer(content(1), Place::Tail, PoolSet::from_iter([one])) else {
        panic!("there is room")
    };
    let place = index.place_of(slot);
    assert!(index.pin(slot));
    size(&mut index, one, 0);
    size(&mut index, other, SLOTS);
    assert_eq!(index.place_of(slot), place, "the pool keeps the chunk");
    size(&mut index, one, 4);
    assert_eq!(index.pool_slot_counts(one), SlotCounts { free: 3, used: 0, draining: 1 });
    index.unpin(slot);
    assert_eq!(index.pool_slot_counts(one), SlotCounts { free: 4, used: 0, draining: 0 });
    // With its last pin, a pool that was dropped gives its number back.
    index.learn(block(2), content(2));
    let Offer::Admitted(slot) = index.offer(content(2), Place::Tail, PoolSet::from_iter([one])) else {
        panic!("there is room")
    };
    assert!(index.pin(slot));
    index.drop_pool(one);
    size(&mut index, one, 0);
    assert_ne!(index.free_pool(), Some(one));
    index.unpin(slot);
    assert!(index.is_pool_resizing(one));
    index.resize(one, 1, |_| {});
    assert_eq!((index.free_pool(), index.place_of(slot)), (Some(one), None));
    assert!(!index.is_pool_resizing(one));
}

/// A server returned without its pages, or had not received them, and grants as many slots as before.
#[test]
fn a_pool_that_lost_its_pages_fills_the_chunks_that_it_has() {
    let mut world = World::new();
    (1..9).for_each(|number| world.cycle(number, number, 1, 0));
    let pool = PoolIndex(0);
    let pinned = world.index.cached(content(2)).unwrap();
    assert!(world.index.pin(pinned));
    let (place, free) = (world.index.place_of(pinned), world.index.free_chunks());
    world.index.drop_slots_of(pool);
    assert_eq!((world.index.capacity(pool), world.index.queue(pool).count()), (PageCount(0), 0));
    world.resize(pool, u32::MAX);
    assert_eq!(world.index.pool_slot_counts(pool), SlotCounts { free: 9, used: 0, draining: 1 });
    assert_eq!((world.index.place_of(pinned), world.index.free_chunks()), (place, free));
    // It is lost again, and shall be smaller now.
    world.cycle(20, 20, 1, 0);
    world.index.drop_slots_of(pool);
    world.index.aim(pool, PageCount(3));
    world.resize(pool, u32::MAX);
    world.check();
    assert!(!world.index.is_settling());
    assert_eq!(world.index.free_chunks(), free + 2, "of three chunks, one is needed");
    world.index.unpin(pinned);
    assert_eq!(world.index.pool_slot_counts(pool), SlotCounts { free: 3, used: 0, draining: 0 });
}

/// So much is sent to another server meanwhile that the log does not show the moves any more, or the log begins anew.
#[test]
fn moves_that_may_not_have_arrived_are_in_doubt_whatever_was_sent_elsewhere() {
    for (is_answered, logged, sent) in
        [false, true].into_iter().flat_map(|it| [(it, 0, LOG_ENTRIES), (it, u32::MAX - 6, 1)])
    {
        let [one, other] = [0, 1].map(PoolIndex);
        let layout = Layout::new(PageCount(8), PageCount(64), 2);
        let mut index = empty(vec![0; layout.words()], layout);
        index.words[header::LOGGED] = logged;
        for pool in [one, other] {
            index.begin_pool(pool, Pool { server: u32::from(pool.0), generation: 1 }, 0);
            index.aim(pool, PageCount(4));
            index.resize(pool, u32::MAX, |_| {});
        }
        let admit = |index: &mut CacheIndex<Vec<u32>>, pool, number: u32| {
            index.learn(block(number.into()), content(number));
            let offer = index.offer(content(number), Place::Tail, PoolSet::from_iter([pool]));
            assert!(matches!(offer, Offer::Admitted(_)), "{number}: {offer:?}");
        };
        (100..104).for_each(|number| admit(&mut index, one, number));
        let mut moves = 0;
        index.aim(one, PageCount(2));
        index.resize(one, u32::MAX, |_| moves += 1);
        assert_eq!(moves, 2);
        if is_answered {
            index.note_taken(one, index.log_end(one));
        }
        (200..200 + sent).for_each(|number| admit(&mut index, other, number));
        let lost = index.give_up_sends(one, index.sends(one));
        assert_eq!((lost, index.pool_slot_counts(one).used), if is_answered { (0, 2) } else { (2, 0) });
    }
}

/// A slot that one pool gave back and another one got is still in the log of sends to the first.
#[test]
fn what_did_not_arrive_at_one_server_is_not_given_up_at_another() {
    let [one, other] = [0, 1].map(PoolIndex);
    let layout = Layout::new(PageCount(8), PageCount(64), 2);
    let mut index = empty(vec![0; layout.words()], layout);
    let size = |index: &mut CacheIndex<Vec<u32>>, pool, slots| {
        index.aim(pool, PageCount(slots));
        index.resize(pool, u32::MAX, |_| {});
    };
    let fill = |index: &mut CacheIndex<Vec<u32>>, pool, numbers: std::ops::Range<u32>| {
        for number in numbers {
            index.learn(block(number.into()), content(number));
            let offer = index.offer(content(number), Place::Tail, PoolSet::from_iter([pool]));
            assert!(matches!(offer, Offer::Admitted(_)), "{number}: {offer:?}");
        }
    };
    for pool in [one, other] {
        index.begin_pool(pool, Pool { server: u32::from(pool.0), generation: 1 }, 0);
    }
    let slots = layout.table_slots();
    size(&mut index, one, slots);
    fill(&mut index, one, 100..100 + slots);
    size(&mut index, one, 0);
    size(&mut index, other, slots);
    fill(&mut index, other, 200..200 + slots);
    assert_eq!((index.give_up_sends(one, 0), index.queue(other).count()), (0, slots as usize));
}

/// Whenever the process dies, every page that its successor believes in is where it is believed to be: neither page of a
/// demotion was sent.
#[test]
fn a_demoted_page_counts_only_when_it_was_sent() {
    let mut world = World::new();
    // A full local tier of ten, and a remote pool with one page of its own.
    world.cycle(30, 30, 2, 0);
    (1..11).for_each(|number| world.cycle(number, number, 1, 1));
    world.index.learn(block(40), content(40));
    let sends = [0, 1].map(|pool| world.index.sends(PoolIndex(pool)));
    for last in 0.. {
        let words = Mortal::new(world.index.words().clone(), u32::MAX);
        let mut index = CacheIndex::resume(words, Origin::Own, 2, 7, ZERO).map_err(|it| it.reason).unwrap();
        index.words.stop_after(last);
        let tiers = Tiers { local: pools_of(1), remote: pools_of(2) };
        let offer = index.offer(content(40), Place::Tail, tiers);
        let (lived, words) = index.words.end();
        let mut successor = resume(words);
        for (pool, received) in [0, 1].map(PoolIndex).into_iter().zip(sends) {
            successor.give_up_sends(pool, received);
        }
        for (slot, content) in successor.pages() {
            let place = successor.place_of(slot).expect("a page has a place");
            assert_eq!(world.servers.get(&place), Some(&content), "killed before store {last}: {place:?}");
        }
        assert!(successor.slot_counts().used >= 10, "killed before store {last}: only what moved is lost");
        if lived {
            assert!(matches!(offer, Offer::Demoting { .. }), "{offer:?}");
            return;
        }
    }
}

/// All tiers together are one exclusive LRU queue: a page stays until as many others were evicted after it as all tiers have
/// slots, and were not read again. The local tier has the newest of them.
#[test]
fn the_tiers_are_one_queue() {
    let layout = Layout::new(PageCount(64), PageCount(400), 2);
    for seed in 0..20_u64 {
        let mut index = empty(vec![0; layout.words()], layout);
        let [local, remote] = [(0, 7_u32), (1, 17)].map(|(pool, slots)| {
            index.begin_pool(PoolIndex(pool), Pool { server: pool.into(), generation: 1 }, 0);
            index.aim(PoolIndex(pool), PageCount(slots));
            index.resize(PoolIndex(pool), u32::MAX, |_| {});
            PoolIndex(pool)
        });
        let tiers = Tiers { local: [local].into_iter().collect(), remote: [remote].into_iter().collect() };
        let (mut state, mut queue, mut sent) = (seed, Vec::<u32>::new(), 0);
        for turn in 0..3000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let number = u32::try_from(state >> 33).unwrap() % 40 + 1;
            let position = queue.iter().position(|it| *it == number);
            let pool = index.cached(content(number)).and_then(|slot| index.place_of(slot)).map(|(pool, _)| pool);
            let expected = position.map(|at| if queue.len() - at <= 7 { local } else { remote });
            assert_eq!(pool, expected, "seed {seed}, turn {turn}: {number} of {queue:?}");
            queue.retain(|it| *it != number);
            // The guest reads the block, from wherever it is, and evicts it.
            index.learn(block(number.into()), content(number));
            match index.offer(content(number), Place::Tail, tiers) {
                Offer::Demoting { .. } => sent += 1,
                Offer::Admitted(slot) => assert_eq!(index.place_of(slot).map(|(pool, _)| pool), Some(local)),
                Offer::Duplicate => {}
                other => panic!("{number} is known: {other:?}"),
            }
            queue.push(number);
            if queue.len() > 24 {
                queue.remove(0);
            }
        }
        assert!(sent > 1000, "{sent} pages travelled");
    }
}

/// A page that the guest still holds makes none travel: it takes a free slot, or that of a remote page, or as the last one that
/// of a local page.
#[test]
fn a_page_that_the_guest_holds_takes_a_local_page_s_place_last() {
    let mut world = World::new();
    (1..11).for_each(|number| world.cycle(number, number, 1, 1));
    let both = Tiers { local: pools_of(1), remote: pools_of(2) };
    let offer = |world: &mut World, number: u32, tiers| {
        world.index.learn(block(number.into()), content(number));
        match world.index.offer(content(number), Place::Head, tiers) {
            Offer::Admitted(slot) => world.index.place_of(slot).unwrap().0.0,
            other => panic!("{other:?}"),
        }
    };
    // The local tier is full, and then the other one is too.
    assert!((20..32).all(|number| offer(&mut world, number, both) == 1));
    assert_eq!(world.index.slot_counts().used, 20);
    assert_eq!(offer(&mut world, 40, Tiers { local: pools_of(1), remote: PoolSet::default() }), 0);
    world.index.drop_slot(world.index.cached(content(2)).unwrap());
    assert_eq!(offer(&mut world, 41, both), 0);
}

/// A page whose block was written since, and a pinned one, stay where they are when the guest evicts them again.
#[test]
fn what_may_not_move_does_not_rise() {
    let mut world = World::new();
    (1..3).for_each(|number| world.cycle(number, number, 2, 0));
    let both = Tiers { local: pools_of(1), remote: pools_of(2) };
    for number in 1..3 {
        let (slot, block) = (world.index.cached(content(number)).unwrap(), block(number.into()));
        let hint = world.index.look_up(block).unwrap().0;
        world.index.hit(hint, block, slot, false);
    }
    world.index.forget(block(1));
    assert!(world.index.pin(world.index.cached(content(2)).unwrap()));
    for number in 1..3 {
        assert_eq!(world.index.offer(content(number), Place::Tail, both), Offer::Duplicate);
        let slot = world.index.cached(content(number)).unwrap();
        assert_eq!(world.index.place_of(slot).unwrap().0, PoolIndex(1));
    }
}

/// The slot to which its page would move may have been examined already.
#[test]
fn a_page_whose_block_is_being_forgotten_neither_rises_nor_travels() {
    let mut world = World::new();
    // The guest has received a page of the remote tier again, and the local tier is full.
    world.cycle(20, 20, 2, 0);
    let (slot, (hint, _)) = (world.index.cached(content(20)).unwrap(), world.index.look_up(block(20)).unwrap());
    world.index.hit(hint, block(20), slot, false);
    (1..11).for_each(|number| world.cycle(number, number, 1, 1));
    world.index.learn(BlockId { disk: DiskIndex(0), ..block(1) }, content(40));
    world.index.cut_disk(block(0).disk, 0);
    let both = Tiers { local: pools_of(1), remote: pools_of(2) };
    assert_eq!(world.index.offer(content(20), Place::Tail, both), Offer::Duplicate);
    let offer = world.index.offer(content(40), Place::Tail, both);
    assert!(matches!(offer, Offer::Admitted(_)), "{offer:?}");
}
