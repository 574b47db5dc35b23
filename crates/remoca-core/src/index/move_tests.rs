//! The work of each piece of a move, and moves into regions without room for all.

use super::tests::{POOL, ZERO, block, content, empty};
use super::*;
use crate::units::PoolSet;
use std::cell::Cell;
use std::ops::{Deref, DerefMut};

/// Words that count how often they are accessed.
struct Counted {
    words: Vec<u32>,
    accesses: Cell<u64>,
}

impl Counted {
    fn new(layout: Layout) -> Self {
        Self { words: vec![0; layout.words()], accesses: Cell::new(0) }
    }

    fn count(&self) {
        self.accesses.set(self.accesses.get() + 1);
    }
}

impl Deref for Counted {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        self.count();
        &self.words
    }
}

impl DerefMut for Counted {
    fn deref_mut(&mut self) -> &mut [u32] {
        self.count();
        &mut self.words
    }
}

/// Accesses to both regions in each piece of a move.
#[derive(Debug, PartialEq, Eq)]
struct Work {
    first: u64,
    longest: u64,
    last: u64,
}

const ENTRIES: u32 = 64;

/// Fills an index of `slots` slots, and moves it into one of twice the slots, while pages are hit, admitted and discarded.
fn work_of_a_move(slots: u32) -> Work {
    let layout = Layout::new(PageCount(slots), PageCount(slots / 2), 2);
    let mut index = empty(Counted::new(layout), layout);
    index.set_capacity(PageCount(slots), |_| {});
    let cycle = |index: &mut CacheIndex<Counted>, number: u32| {
        index.learn(block(number.into()), content(number));
        index.offer(content(number), Place::Tail, PoolSet::ALL);
    };
    (100..100 + slots).for_each(|number| cycle(&mut index, number));
    let larger = layout.resized(PageCount(slots * 2), PageCount(slots));
    let target = CacheIndex::new(Counted::new(larger), larger, 7, ZERO);
    let accesses = |index: &CacheIndex<Counted>| {
        let target = index.target.as_ref().map_or(0, |target| target.index.words.accesses.get());
        index.words.accesses.get() + target
    };
    let before = accesses(&index) + target.words.accesses.get();
    index.begin_move(target);
    let mut work = Work { first: accesses(&index) - before, longest: 0, last: 0 };
    for turn in 0.. {
        let before = accesses(&index);
        let is_last = index.move_entries(ENTRIES);
        work.longest = work.longest.max(accesses(&index) - before);
        if is_last {
            break;
        }
        cycle(&mut index, 100 + slots + turn);
        let hit = block(u64::from(200 + turn));
        if let Some((hint, content)) = index.look_up(hit)
            && let Some(slot) = index.cached(content)
        {
            index.hit(hint, hit, slot, turn % 2 == 0);
        }
    }
    // Whatever has moved is not looked at in the last piece: nonsense in its place stays.
    let rest = larger.links_at()..larger.words();
    let target = &mut index.target.as_mut().unwrap().index.words;
    let moved: Vec<_> = target.words[rest.clone()].iter().map(|word| !word).collect();
    target.words[rest.clone()].copy_from_slice(&moved);
    let before = accesses(&index);
    let former = index.finish_move().unwrap();
    work.last = index.words.accesses.get() + former.accesses.get() - before;
    assert!(index.words.words[rest] == moved, "the last piece changes what has moved");
    work
}

/// No piece does more in a larger index.
#[test]
fn the_work_of_each_piece_does_not_depend_on_the_size() {
    let [small, large] = [500, 16_000].map(work_of_a_move);
    assert_eq!((small.first, small.last), (large.first, large.last));
    assert!(small.last < 200, "{small:?}");
    let bound = 100 * u64::from(ENTRIES);
    assert!(small.longest < bound && large.longest < bound, "{small:?}, {large:?}");
}

/// Returns contents that share two lines of an index of this layout.
fn crowd(layout: Layout) -> impl Iterator<Item = Fingerprint> {
    let index = CacheIndex::new(vec![0; layout.words()], layout, 7, ZERO);
    let contents = (1_u32..).map(|i| Fingerprint([i.wrapping_mul(0x9e37_79b1), i.wrapping_mul(0x85eb_ca6b), i]));
    contents.filter(move |content| index.entries.lines_of(*content) == index.entries.lines_of(ZERO))
}

/// The larger table has room for all of them, and the smaller one for 32.
#[test]
fn a_page_without_room_in_the_new_region_is_dropped_in_both() {
    let layout = Layout::new(PageCount(48), PageCount(400), 2);
    let smaller = layout.resized(PageCount(48), PageCount(64));
    let mut index = empty(vec![0; layout.words()], layout);
    index.set_capacity(PageCount(48), |_| {});
    let contents: Vec<_> = crowd(smaller).take(41).collect();
    let offer = |index: &mut CacheIndex<Vec<u32>>, number: usize| {
        index.learn(block(number as u64), contents[number]);
        index.offer(contents[number], Place::Tail, PoolSet::ALL)
    };
    for number in 0..40 {
        assert!(matches!(offer(&mut index, number), Offer::Admitted(_)), "{number}");
    }
    index.begin_move(CacheIndex::new(vec![0; smaller.words()], smaller, 7, ZERO));
    while !index.move_entries(3) {
        index.check_target();
    }
    let full = SlotCounts { free: 16, used: 32, draining: 0 };
    assert_eq!(index.slot_counts(), full);
    let sends = index.sends(POOL);
    assert_eq!(offer(&mut index, 40), Offer::NoSlot);
    assert_eq!((index.slot_counts(), index.sends(POOL)), (full, sends), "a page that is not admitted is not sent");
    index.check_target();
    let queue: Vec<_> = index.queue(POOL).collect();
    assert!(index.finish_move().is_some());
    assert_eq!((index.queue(POOL).collect::<Vec<_>>(), index.slot_counts()), (queue, full));
    // One leaves, so there is room for another.
    let (slot, _) = index.pages().next().unwrap();
    index.drop_slot(slot);
    index.forget(block(0));
    assert!(matches!(offer(&mut index, 40), Offer::Admitted(_)));
}
