//! The work of each piece of a move, and moves into regions without room for all.

use super::layout::LOG_ENTRIES;
use super::tests::{POOL, ZERO, block, content, empty};
use super::*;
use crate::units::{POOLS_MAX, PoolSet};
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

/// The page in the slot was discarded by then, and is of other lines.
#[test]
fn a_slot_emptied_for_a_page_without_room_is_free() {
    let layout = Layout::new(PageCount(48), PageCount(400), 2);
    let smaller = layout.resized(PageCount(48), PageCount(64));
    let mut index = empty(vec![0; layout.words()], layout);
    index.set_capacity(PageCount(33), |_| {});
    let contents: Vec<_> = [content(1000)].into_iter().chain(crowd(smaller)).take(34).collect();
    for (content, bno) in contents[..33].iter().zip(0..) {
        index.learn(block(bno), *content);
        assert!(matches!(index.offer(*content, Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
    }
    index.learn(block(33), contents[33]);
    index.begin_move(CacheIndex::new(vec![0; smaller.words()], smaller, 7, ZERO));
    assert!(index.move_entries(u32::MAX));
    let sends = index.sends(POOL);
    assert_eq!(index.offer(contents[33], Place::Tail, PoolSet::ALL), Offer::NoSlot);
    let counts = SlotCounts { free: 1, used: 32, draining: 0 };
    assert_eq!((index.slot_counts(), index.sends(POOL)), (counts, sends));
    index.check_target();
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

/// In a shrink, a page of a slot that has not moved may come to one that has, for which the new region has no room.
#[test]
fn a_page_that_moves_to_a_slot_without_room_is_dropped_in_both() {
    let layout = Layout::new(PageCount(48), PageCount(400), 2);
    let smaller = layout.resized(PageCount(48), PageCount(64));
    let mut index = empty(vec![0; layout.words()], layout);
    index.set_capacity(PageCount(48), |_| {});
    let mut crowded = crowd(smaller);
    let mut of = |at: u32| if matches!(at, 0..32 | 47) { crowded.next().unwrap() } else { content(1000 + at) };
    let contents: Vec<_> = (0..48).map(&mut of).collect();
    for (at, content) in (0..).zip(&contents) {
        index.learn(block(at.into()), *content);
        assert!(matches!(index.offer(*content, Place::Tail, PoolSet::ALL), Offer::Admitted(slot) if slot.0 == at));
    }
    index.begin_move(CacheIndex::new(vec![0; smaller.words()], smaller, 7, ZERO));
    assert!(!index.move_entries(47));
    index.check_target();
    index.drop_slot(SlotIndex(40));
    index.aim(POOL, PageCount(47));
    index.resize(POOL, u32::MAX, |_| {});
    index.check_target();
    assert_eq!((index.cached(contents[47]), index.slot_counts().used), (None, 46));
    assert!(index.finish_move().is_some());
    for number in 2000..2100 {
        index.learn(block(u64::from(number)), content(number));
        assert!(matches!(index.offer(content(number), Place::Tail, PoolSet::ALL), Offer::Admitted(_)), "{number}");
    }
}

/// A page that is demoted counts as sent, so nothing is demoted for a page that the new region has no room for.
#[test]
fn nothing_is_demoted_for_a_page_without_room() {
    const REMOTE: PoolIndex = PoolIndex(1);
    let layout = Layout::new(PageCount(48), PageCount(400), 2);
    let smaller = layout.resized(PageCount(48), PageCount(64));
    let mut index = empty(vec![0; layout.words()], layout);
    for (pool, slots) in [(POOL, 32), (REMOTE, 8)] {
        index.begin_pool(pool, Pool { server: u32::from(pool.0), generation: 1 }, 0);
        index.aim(pool, PageCount(slots));
        index.resize(pool, u32::MAX, |_| {});
    }
    let tiers = Tiers { local: [POOL].into_iter().collect(), remote: [REMOTE].into_iter().collect() };
    let contents: Vec<_> = crowd(smaller).take(33).collect();
    let mut offers = contents.iter().zip(0..).map(|(content, bno)| {
        index.learn(block(bno), *content);
        if bno == 32 {
            index.begin_move(CacheIndex::new(vec![0; smaller.words()], smaller, 7, ZERO));
            assert!(index.move_entries(u32::MAX));
        }
        index.offer(*content, Place::Tail, tiers)
    });
    assert!(offers.by_ref().take(32).all(|offer| matches!(offer, Offer::Admitted(_))));
    let last = offers.next().unwrap();
    drop(offers);
    assert!(!matches!(last, Offer::Demoting { .. }), "{last:?}");
    assert_eq!((index.sends(REMOTE), index.queue(REMOTE).count()), (0, 0), "{last:?}");
    index.check_target();
    assert!(index.finish_move().is_some());
    assert_eq!(index.queue(POOL).count(), index.slot_counts().used as usize);
}

#[test]
fn a_page_given_up_silently_during_a_move_is_so_after_it() {
    let layout = Layout::new(PageCount(8), PageCount(16), 2);
    let mut index = empty(vec![0; layout.words()], layout);
    index.set_capacity(PageCount(8), |_| {});
    index.learn(block(1), content(1));
    let Offer::Admitted(slot) = index.offer(content(1), Place::Tail, PoolSet::ALL) else { panic!("it is known") };
    let (hint, _) = index.look_up(block(1)).unwrap();
    index.hit(hint, block(1), slot, false);
    index.begin_move(CacheIndex::new(vec![0; layout.words()], layout, 7, ZERO));
    assert!(index.move_entries(u32::MAX));
    index.note_silent(slot);
    index.check_target();
    assert!(index.finish_move().is_some());
    assert!(!index.slots.was_hit(&index.words, slot.0), "it is demoted, not discarded");
}

#[test]
fn all_slots_of_a_larger_region_can_be_used() {
    for restarts in [false, true] {
        let layout = Layout::new(PageCount(8), PageCount(16), 2);
        let mut index = empty(vec![0; layout.words()], layout);
        if restarts {
            index = super::resume_tests::resume(index.words().clone());
        }
        // More than the chunks that the former region had to spare.
        let slots = PageCount(layout.table_slots() + 8);
        let larger = layout.resized(slots, PageCount(16));
        index.begin_move(CacheIndex::new(vec![0; larger.words()], larger, 7, ZERO));
        assert!(index.finish_move().is_some());
        index.set_capacity(slots, |_| {});
        assert_eq!(index.capacity(POOL), slots);
    }
}

/// A cache was large for a while. Another pool came when its slots were all in use.
#[test]
fn an_index_becomes_smaller_after_its_pools() {
    const OTHER: PoolIndex = PoolIndex(1);
    let layout = Layout::new(PageCount(400), PageCount(400), 2);
    let mut index = empty(vec![0; layout.words()], layout);
    let resize = |index: &mut CacheIndex<Vec<u32>>, pool, slots| {
        index.aim(pool, PageCount(slots));
        assert!(slots == 0 || index.is_settling());
        index.resize(pool, u32::MAX, |_| {});
    };
    for (pool, slots) in [(POOL, 300), (OTHER, 20)] {
        index.begin_pool(pool, Pool { server: u32::from(pool.0), generation: 1 }, 0);
        resize(&mut index, pool, slots);
    }
    for number in 1..=320 {
        index.learn(block(number.into()), content(number));
        assert!(matches!(index.offer(content(number), Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
    }
    let pinned = index.queue(POOL).map(|(slot, _)| slot).find(|slot| slot.0 == 299).unwrap();
    assert!(index.pin(pinned));
    resize(&mut index, POOL, 10);
    assert!(index.is_settling(), "a page on the way keeps its chunk");
    index.unpin(pinned);
    index.resize(POOL, u32::MAX, |_| {});
    assert!(!index.is_settling());
    // The chunks of the other pool come after those of the first one.
    assert_eq!(
        index.least_slots(),
        PageCount(320 - 4 * u32::from(POOLS_MAX) - 3),
        "one slot of the last chunk is enough"
    );
    resize(&mut index, OTHER, 0);
    resize(&mut index, OTHER, 20);
    assert_eq!(index.least_slots(), PageCount(1), "the first free chunks are given first");
    for number in 400..420 {
        index.learn(block(number.into()), content(number));
        assert!(matches!(index.offer(content(number), Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
    }
    let smaller = layout.resized(PageCount(40), PageCount(400));
    let pages: Vec<_> = index.pages().collect();
    assert_eq!(pages.len(), 29, "the page on the way could not move");
    index.begin_move(CacheIndex::new(vec![0; smaller.words()], smaller, 7, ZERO));
    assert_eq!((index.slot_limit(), index.layout().slot_limit()), (PageCount(40), PageCount(400)));
    assert!(!index.move_entries(100));
    // Meanwhile no pool gets a slot that the smaller region does not have.
    resize(&mut index, OTHER, 400);
    index.check_target();
    let most = smaller.table_slots() - 12;
    assert_eq!((index.capacity(OTHER), index.is_settling()), (PageCount(most), false));
    assert!(index.finish_move().is_some());
    assert_eq!(index.pages().collect::<Vec<_>>(), pages);
    assert!(pages.iter().all(|(slot, content)| index.cached(*content) == Some(*slot)));
    assert!(!index.is_settling(), "there are no more chunks");
    index.aim(OTHER, PageCount(20));
    index.aim(OTHER, PageCount(400));
    let larger = layout.resized(PageCount(800), PageCount(400));
    index.begin_move(CacheIndex::new(vec![0; larger.words()], larger, 7, ZERO));
    assert!(index.finish_move().is_some());
    index.resize(OTHER, u32::MAX, |_| {});
    assert_eq!(index.capacity(OTHER), PageCount(400));
}

/// The number of slots need not fill the last chunk.
#[test]
fn an_index_of_which_all_chunks_are_used_can_move() {
    for slots in [1, 9, 10, 12, 13] {
        let layout = Layout::new(PageCount(slots), PageCount(40), 2);
        let mut index = empty(vec![0; layout.words()], layout);
        index.aim(POOL, PageCount(layout.table_slots()));
        index.resize(POOL, u32::MAX, |_| {});
        assert_eq!(index.free_chunks(), 0);
        for resident in [64, 16] {
            let other = layout.resized(PageCount(slots), PageCount(resident));
            index.begin_move(CacheIndex::new(vec![0; other.words()], other, 7, ZERO));
            assert!(index.finish_move().is_some());
            assert_eq!(index.capacity(POOL), PageCount(layout.table_slots()));
        }
    }
}

#[test]
fn pages_that_did_not_arrive_are_given_up_after_a_move() {
    let layout = Layout::new(PageCount(8), PageCount(16), 2);
    let mut index = empty(vec![0; layout.words()], layout);
    index.begin_pool(POOL, Pool { server: 0, generation: 1 }, 0);
    index.set_capacity(PageCount(8), |_| {});
    let admit = |index: &mut CacheIndex<Vec<u32>>, number: u32| {
        index.learn(block(number.into()), content(number));
        assert!(matches!(index.offer(content(number), Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
    };
    (1..4).for_each(|number| admit(&mut index, number));
    index.begin_move(CacheIndex::new(vec![0; layout.words()], layout, 7, ZERO));
    assert!(index.move_entries(u32::MAX));
    admit(&mut index, 4);
    assert!(index.finish_move().is_some());
    admit(&mut index, 5);
    assert_eq!(index.give_up_sends(POOL, 2), 3);
    assert!((1..6).all(|number| index.cached(content(number)).is_some() == (number < 3)));
}

/// The log is a ring. Its newest entries are at its end and at its beginning here.
#[test]
fn pages_that_did_not_arrive_are_given_up_wherever_the_log_is() {
    let layout = Layout::new(PageCount(8), PageCount(16), 2);
    let mut index = empty(vec![0; layout.words()], layout);
    index.begin_pool(POOL, Pool { server: 0, generation: 1 }, 0);
    index.set_capacity(PageCount(8), |_| {});
    let sends = LOG_ENTRIES + 4;
    for number in 100..100 + sends {
        index.learn(block(number.into()), content(number));
        assert!(matches!(index.offer(content(number), Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
    }
    index.begin_move(CacheIndex::new(vec![0; layout.words()], layout, 7, ZERO));
    assert!(index.finish_move().is_some());
    assert_eq!(index.give_up_sends(POOL, u64::from(sends - 8)), 8);
    assert_eq!(index.slot_counts().used, 0);
}

/// Otherwise the number of the disk would be free while blocks of it are known.
#[test]
fn what_is_known_of_a_disk_that_leaves_is_forgotten_after_a_move() {
    let mut index = super::tests::index(8, 16);
    let layout = index.layout();
    index.learn(block(1), content(1));
    assert!(matches!(index.offer(content(1), Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
    let disk = block(1).disk;
    index.remove_disk(disk);
    index.begin_move(CacheIndex::new(vec![0; layout.words()], layout, 7, ZERO));
    assert!(index.finish_move().is_some());
    assert!(index.is_cutting());
    while index.is_cutting() {
        index.cut(7);
    }
    index.release_disk(disk);
    index.take_up_disk(disk, 1 << 40);
    assert_eq!(index.known(block(1)), None);
}

/// A pool that was dropped gives a chunk back with the last pin of a slot in it.
#[test]
fn a_chunk_that_is_given_back_during_a_move_belongs_to_nobody_after_it() {
    let layout = Layout::new(PageCount(8), PageCount(16), 2);
    let mut index = empty(vec![0; layout.words()], layout);
    index.begin_pool(POOL, Pool { server: 0, generation: 1 }, 0);
    index.set_capacity(PageCount(8), |_| {});
    index.learn(block(1), content(1));
    let Offer::Admitted(slot) = index.offer(content(1), Place::Tail, PoolSet::ALL) else { panic!("it is known") };
    assert!(index.pin(slot));
    index.begin_move(CacheIndex::new(vec![0; layout.words()], layout, 7, ZERO));
    assert!(index.move_entries(u32::MAX));
    index.drop_pool(POOL);
    index.resize(POOL, u32::MAX, |_| {});
    assert!(index.place_of(slot).is_some(), "a page of it is on the way");
    index.unpin(slot);
    index.resize(POOL, u32::MAX, |_| {});
    assert!(index.finish_move().is_some());
    assert_eq!((index.place_of(slot), index.pinned_slots()), (None, PageCount(0)));
}

/// Returns an index with this layout. A pool that is gone has left blocks in slots that no pool has.
fn without_pools(layout: Layout) -> CacheIndex<Vec<u32>> {
    let mut index = empty(vec![0; layout.words()], layout);
    index.begin_pool(POOL, Pool { server: 0, generation: 1 }, 0);
    index.set_capacity(PageCount(8), |_| {});
    for number in 20..28 {
        index.learn(block(number.into()), content(number));
        assert!(matches!(index.offer(content(number), Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
    }
    index.drop_slots_of(POOL);
    index.drop_pool(POOL);
    index.resize(POOL, u32::MAX, |_| {});
    assert_eq!((index.free_pool(), index.slots.known()), (Some(POOL), 8));
    index
}

/// An index that began without a cache has small chunks. Whenever its process is killed, the successor has one of the regions.
#[test]
fn chunks_fit_the_new_region_if_no_pool_has_one() {
    let [small, large] = [0, 1 << 14].map(|slots| Layout::new(PageCount(slots), PageCount(64), 2));
    assert_eq!([small, large].map(|layout| layout.chunk_bits()), [2, 4]);
    for (from, to) in [(small, large), (large, small)] {
        let mut index = without_pools(from);
        assert_eq!(index.layout_for(to.slot_limit(), to.resident_limit()), to);
        index.begin_move(CacheIndex::new(vec![0; to.words()], to, 7, ZERO));
        // A server grants slots in the meantime.
        index.begin_pool(POOL, Pool { server: 1, generation: 1 }, 0);
        let slots = to.table_slots() - 1;
        index.aim(POOL, PageCount(slots));
        let mut numbers = 30_u32..;
        while !index.move_entries(from.entry_limit().0 / 7) {
            index.resize(POOL, u32::MAX, |_| {});
            assert_eq!((index.capacity(POOL), index.is_settling()), (PageCount(0), false), "the chunks are to come");
            let number = numbers.next().unwrap();
            index.learn(block(number.into()), content(number));
            index.check_target();
            let successor = super::resume_tests::resume(index.words().clone());
            assert_eq!((successor.layout(), successor.known_blocks()), (from, index.known_blocks()));
        }
        let known = index.known_blocks();
        assert!(index.finish_move().is_some());
        assert_eq!((index.layout(), index.known_blocks(), index.free_chunks()), (to, known, to.chunks() as usize));
        index.resize(POOL, u32::MAX, |_| {});
        assert_eq!((index.capacity(POOL), index.is_settling()), (PageCount(slots), false));
        for number in 20..28 {
            assert_eq!(index.known(block(number.into())), Some(content(number)));
            assert!(matches!(index.offer(content(number), Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
        }
        let (larger, pages) = ((PageCount(1 << 20), PageCount(64)), index.pages().collect::<Vec<_>>());
        let kept = index.layout().resized(larger.0, larger.1);
        assert_eq!(index.layout_for(larger.0, larger.1), kept, "slots in use keep their chunks");
        for closes in [false, true] {
            if closes {
                index.close();
            }
            index = super::resume_tests::resume(index.words().clone());
            assert_eq!((index.capacity(POOL), index.free_chunks()), (PageCount(slots), 0));
            assert_eq!((index.was_closed(), index.pages().collect::<Vec<_>>()), (closes, pages.clone()));
        }
    }
}

/// A page of a pool that is gone is still on its way: its slot must not become another one at the server.
#[test]
fn a_chunk_that_waits_for_a_page_keeps_its_size() {
    let mut index = without_pools(Layout::new(PageCount(8), PageCount(64), 2));
    index.begin_pool(POOL, Pool { server: 1, generation: 1 }, 0);
    index.set_capacity(PageCount(8), |_| {});
    assert!(matches!(index.offer(content(20), Place::Tail, PoolSet::ALL), Offer::Admitted(slot) if index.pin(slot)));
    let slot = index.cached(content(20)).unwrap();
    index.drop_pool(POOL);
    index.resize(POOL, u32::MAX, |_| {});
    let wanted = (PageCount(1 << 14), PageCount(64));
    assert_eq!(index.layout_for(wanted.0, wanted.1), index.layout().resized(wanted.0, wanted.1));
    index.unpin(slot);
    index.resize(POOL, u32::MAX, |_| {});
    assert_eq!(index.layout_for(wanted.0, wanted.1), Layout::new(wanted.0, wanted.1, 2));
}
