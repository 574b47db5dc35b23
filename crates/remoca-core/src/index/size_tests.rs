//! Changes of size: how much one call does, and that the change ends.

use super::tests::{Model, POOL, Step, ZERO, block, content, empty, index, steps};
use super::*;
use crate::units::PoolSet;
use proptest::prelude::*;
use std::cell::Cell;
use std::ops::{Deref, DerefMut};

/// Words that count accesses.
struct Counted {
    words: Vec<u32>,
    looks: Cell<u64>,
}

impl Deref for Counted {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        self.looks.set(self.looks.get() + 1);
        &self.words
    }
}

impl DerefMut for Counted {
    fn deref_mut(&mut self) -> &mut [u32] {
        self.looks.set(self.looks.get() + 1);
        &mut self.words
    }
}

const SLOTS: u32 = 4096;
/// Maximum number of accesses for one slot: its lines, its neighbours on the queue, and those of the slot it moves to.
const LOOKS_MAX: u64 = 300;

fn full() -> CacheIndex<Counted> {
    let layout = Layout::new(PageCount(SLOTS), PageCount(SLOTS), 2);
    let words = Counted { words: vec![0; layout.words()], looks: Cell::new(0) };
    let mut index = empty(words, layout);
    index.set_capacity(PageCount(SLOTS), |_| {});
    for number in 0..SLOTS {
        let content = content(number + 100);
        index.learn(block(number.into()), content);
        assert!(matches!(index.offer(content, Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
    }
    index
}

fn looks<R>(index: &mut CacheIndex<Counted>, work: impl FnOnce(&mut CacheIndex<Counted>) -> R) -> u64 {
    let before = index.words.looks.get();
    work(index);
    index.words.looks.get() - before
}

/// Changes the size slot by slot, with bounded work for each. Returns the number of slots.
fn go_on(index: &mut CacheIndex<Counted>) -> u32 {
    let mut turns = 0;
    while index.is_resizing() {
        let looks = looks(index, |index| index.resize(POOL, 1, |_| {}));
        assert!(looks <= LOOKS_MAX, "{looks}");
        turns += 1;
    }
    turns
}

#[test]
fn no_call_looks_at_more_slots_than_it_was_told_to() {
    let mut index = full();
    // The older half leaves holes for the newer one.
    (0..SLOTS / 4).for_each(|slot| index.drop_slot(SlotIndex(slot)));
    assert!(looks(&mut index, |index| index.aim(POOL, PageCount(SLOTS / 2))) <= LOOKS_MAX);
    assert!(go_on(&mut index) >= SLOTS / 2);
    assert_eq!(index.slot_counts(), SlotCounts { free: 0, used: SLOTS / 2, draining: 0 });
    assert!(looks(&mut index, |index| index.aim(POOL, PageCount(SLOTS))) <= LOOKS_MAX);
    assert!(go_on(&mut index) >= SLOTS / 2);
    assert!(looks(&mut index, |index| index.lose_from(POOL, PageCount(SLOTS / 4))) <= LOOKS_MAX);
    assert!(go_on(&mut index) >= SLOTS / 4);
    assert!(looks(&mut index, CacheIndex::drop_all_slots) <= LOOKS_MAX);
    assert_eq!((index.slot_counts().used, index.queue(POOL).next()), (0, None));
    assert!(go_on(&mut index) >= SLOTS);
    assert_eq!(index.slot_counts(), SlotCounts { free: SLOTS, used: 0, draining: 0 });
}

/// Number of slots that one call may process.
const TURN: u32 = 64;

#[test]
fn everything_is_dropped_with_bounded_work_in_each_call() {
    let mut index = full();
    assert!(looks(&mut index, CacheIndex::drop_everything) <= LOOKS_MAX);
    assert_eq!((index.slot_counts().used, index.known_blocks()), (0, PageCount(SLOTS)));
    let mut turns = 0;
    while index.is_cutting() {
        let looks = looks(&mut index, |index| index.cut(TURN));
        assert!(looks <= u64::from(TURN) * LOOKS_MAX, "{looks}");
        turns += 1;
    }
    assert!(turns >= SLOTS / TURN);
    assert_eq!(index.known_blocks(), PageCount(0));
    // A block is learnt again, and its page cached.
    index.learn(block(1), content(101));
    assert!(go_on(&mut index) >= SLOTS);
    assert!(matches!(index.offer(content(101), Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
    assert!(looks(&mut index, CacheIndex::drop_everything) <= LOOKS_MAX);
    index.cut(u32::MAX);
    assert!(looks(&mut index, CacheIndex::drop_everything) <= LOOKS_MAX);
    assert!(!index.is_cutting(), "there was nothing to forget");
}

/// A cache that is off may be turned off again, and a disk come back again, more often than the pass takes.
#[test]
fn what_is_being_forgotten_may_be_dropped_again_in_each_turn() {
    let mut index = full();
    index.drop_everything();
    let (mut turns, turns_max) = (0, index.layout().entry_limit().0.div_ceil(TURN));
    while index.is_cutting() {
        index.drop_everything();
        assert_eq!(index.cut_disk(block(0).disk, 0), 0);
        index.cut(TURN);
        turns += 1;
        assert!(turns <= turns_max, "it begins again each time");
    }
    assert_eq!(index.known_blocks(), PageCount(0));
}

/// Lets a pool give back its chunks, with bounded work in each call. Returns the number of calls.
fn give_back(index: &mut CacheIndex<Counted>, pool: PoolIndex) -> u32 {
    let mut turns = 0;
    while index.is_pool_resizing(pool) {
        let looks = looks(index, |index| index.resize(pool, TURN, |_| {}));
        assert!(looks <= 2 * u64::from(TURN), "{looks}");
        turns += 1;
    }
    turns
}

/// While pages of another pool are fetched, each slot is looked at before its chunk is given back.
#[test]
fn a_pool_that_lost_its_pages_gives_its_chunks_back_in_slices() {
    const OTHER: PoolIndex = PoolIndex(1);
    let mut index = full();
    index.aim(OTHER, PageCount(4));
    index.resize(OTHER, u32::MAX, |_| {});
    index.learn(block(0), content(1));
    let Offer::Admitted(fetched) = index.offer(content(1), Place::Tail, PoolSet::from_iter([OTHER])) else {
        panic!("there is room")
    };
    assert!(index.pin(fetched));
    let chunks = index.layout().chunks() as usize;
    assert!(looks(&mut index, |index| index.drop_slots_of(POOL)) <= LOOKS_MAX);
    assert_eq!((index.capacity(POOL), index.queue(POOL).count()), (PageCount(0), 0));
    assert!((100..100 + SLOTS).all(|number| index.cached(content(number)).is_none()), "no page can be reached");
    index.aim(POOL, PageCount(0));
    assert!(index.is_settling() && index.free_chunks() < chunks - 1);
    assert_eq!(give_back(&mut index, POOL), SLOTS / TURN, "each slot is looked at once");
    assert_eq!((index.free_chunks(), index.is_settling()), (chunks - 1, false));
    assert_eq!(index.queue(OTHER).next(), Some((fetched, content(1))));
}

/// A page of the last slot is on its way until all others are given up. So it keeps the chunks before it.
#[test]
fn the_last_pin_gives_chunks_back_in_slices() {
    let mut index = full();
    let slots = [SLOTS - 1, 0].map(SlotIndex);
    assert!(slots.into_iter().all(|slot| index.pin(slot)));
    index.drop_pool(POOL);
    go_on(&mut index);
    let chunks = index.layout().chunks() as usize;
    assert!(index.is_settling() && index.free_chunks() < chunks - 1000);
    assert!(looks(&mut index, |index| index.unpin(slots[0])) <= LOOKS_MAX);
    assert_eq!(give_back(&mut index, POOL), SLOTS / TURN);
    assert_eq!((index.free_chunks(), index.free_pool()), (chunks - 1, Some(PoolIndex(1))), "slot 0 keeps one");
    assert!(looks(&mut index, |index| index.unpin(slots[1])) <= LOOKS_MAX);
    assert_eq!(give_back(&mut index, POOL), 1);
    assert_eq!((index.free_chunks(), index.free_pool(), index.is_settling()), (chunks, Some(POOL), false));
}

#[test]
fn lost_pages_are_not_found_and_their_slots_not_filled() {
    let mut index = index(8, 64);
    for i in 0..8 {
        index.learn(block(u64::from(i)), content(i));
        index.offer(content(i), Place::Tail, PoolSet::ALL);
    }
    let lost: Vec<_> = index.queue(POOL).filter(|(slot, _)| slot.0 >= 3).collect();
    index.lose_from(POOL, PageCount(3));
    for (_, content) in &lost {
        assert_eq!((index.cached(*content), index.offer(*content, Place::Tail, PoolSet::ALL)), (None, Offer::NoSlot));
    }
    assert_eq!(index.queue(POOL).count(), 3);
    index.aim(POOL, PageCount(3));
    index.resize(POOL, u32::MAX, |_| panic!("what is lost cannot be moved"));
    assert_eq!(index.slot_counts(), SlotCounts { free: 0, used: 3, draining: 0 });
    assert!(lost.iter().all(|(_, content)| index.cached(*content).is_none()));
}

/// A resume of words in which all contents have the same hash looks at so many words for each node.
#[test]
fn lines_that_somebody_made_full_cost_little() {
    let layout = Layout::new(PageCount(SLOTS), PageCount(SLOTS), 2);
    let mut index = empty(vec![0; layout.words()], layout);
    for number in 0..2 * SLOTS {
        index.learn(block(number.into()), Fingerprint([5, 5, number]));
    }
    let (known, words) = (index.known_blocks(), Counted { words: index.words, looks: Cell::new(0) });
    let index = CacheIndex::resume(words, Origin::Own, 2, 7, ZERO).map_err(|unusable| unusable.reason).unwrap();
    assert_eq!(index.known_blocks(), known, "what has no room is not found by its content");
    let found = (0..2 * SLOTS).filter(|number| index.find(Fingerprint([5, 5, *number])).is_some());
    assert_eq!(found.count(), 32, "two lines");
    let looks = index.words.looks.get() / u64::from(4 * SLOTS);
    assert!(looks <= 600, "{looks}");
}

/// As many pages are admitted as are given up.
#[test]
fn admissions_do_not_keep_a_shrink_from_its_end() {
    let mut index = index(64, 64);
    let mut numbers = 20_u32..;
    let mut admit = |index: &mut CacheIndex<Vec<u32>>| {
        let number = numbers.next().unwrap();
        let content = content(number);
        index.learn(block(number.into()), content);
        assert!(matches!(index.offer(content, Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
    };
    (0..32).for_each(|_| admit(&mut index));
    index.aim(POOL, PageCount(8));
    let mut turns = 0;
    while index.is_resizing() {
        index.resize(POOL, 1, |_| {});
        admit(&mut index);
        turns += 1;
        assert!(turns <= 3 * 64, "{:?}", index.slot_counts());
    }
    assert_eq!(index.slot_counts(), SlotCounts { free: 0, used: 8, draining: 0 });
}

proptest! {
    /// A shrink ends, whatever comes between its steps: admissions, hits, pins and losses.
    #[test]
    fn a_change_of_size_ends_whatever_comes_between(steps in steps(), from in 1..16_u32, to in 0..16_u32) {
        let mut index = index(16, 16);
        let mut model = Model::default();
        model.apply(&mut index, &Step::Aim(from))?;
        model.apply(&mut index, &Step::Resize(u32::MAX))?;
        for step in steps.iter().filter(|step| !matches!(step, Step::Aim(_))) {
            model.apply(&mut index, step)?;
        }
        model.apply(&mut index, &Step::Aim(to))?;
        // Each slot is cleared, discarded, looked at as a target, cut off or added, and unpinned (its chunk is looked at), once
        // each at most; after the steps nothing gives all up again.
        let others = |step: &&Step| !matches!(step, Step::Aim(_) | Step::Resize(_) | Step::DropSlots | Step::Lose(_));
        let mut others = steps.iter().filter(others).cycle();
        let mut slots = 0;
        while index.is_resizing() {
            model.apply(&mut index, &Step::Resize(1))?;
            model.check(&index)?;
            if let Some(step) = others.next() {
                model.apply(&mut index, step)?;
                model.check(&index)?;
            }
            slots += 1;
            prop_assert!(slots <= 6 * 16, "it does not end");
        }
        prop_assert_eq!(index.capacity(POOL), PageCount(to));
    }
}
