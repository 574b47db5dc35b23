//! The index against a naive model, and the bounds of its tables.

use super::*;
use crate::units::PoolSet;
use crate::units::{BlockNumber, DiskIndex};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::DerefMut;

/// Pool of the tests that need only one.
pub(super) const POOL: PoolIndex = PoolIndex(0);
pub(super) const ZERO: Fingerprint = Fingerprint([9, 9, 9]);

impl<M: DerefMut<Target = [u32]>> CacheIndex<M> {
    /// Changes the capacity in one step.
    pub(super) fn set_capacity(&mut self, capacity: PageCount, moves: impl FnMut(Move)) {
        self.aim(POOL, capacity);
        self.resize(POOL, u32::MAX, moves);
        assert!(!self.is_resizing());
    }

    /// Returns what an engine believes that the disk holds for a block.
    pub(super) fn believed(&self, block: BlockId) -> Option<Fingerprint> {
        self.known(block).filter(|_| !self.is_void(block))
    }
}

pub(super) fn index(slots: u32, resident: u32) -> CacheIndex<Vec<u32>> {
    let layout = Layout::new(PageCount(slots), PageCount(resident), 2);
    let mut index = empty(vec![0; layout.words()], layout);
    index.set_capacity(PageCount(slots), |_| {});
    index
}

/// Returns an index without usable slots that has both disks.
pub(super) fn empty<M: DerefMut<Target = [u32]>>(words: M, layout: Layout) -> CacheIndex<M> {
    with_disks(CacheIndex::new(words, layout, 7, ZERO))
}

/// Gives the numbers of the index to disks, if they have none.
pub(super) fn with_disks<M: DerefMut<Target = [u32]>>(mut index: CacheIndex<M>) -> CacheIndex<M> {
    for disk in index.disks().filter(|disk| index.disk_state(*disk) == DiskState::Absent).collect::<Vec<_>>() {
        index.take_up_disk(disk, DISK_BYTES_MAX);
    }
    index
}

pub(super) fn block(bno: u64) -> BlockId {
    BlockId { disk: DiskIndex(1), bno: BlockNumber(bno) }
}

/// Low values have few distinct hashes, so that full lines and equal tags are common.
pub(super) fn content(value: u32) -> Fingerprint {
    match value {
        0..20 => Fingerprint([value % 3, value % 5, value]),
        _ => Fingerprint([value, value, value]),
    }
}

#[test]
fn a_page_goes_round() {
    let mut index = index(2, 16);
    assert_eq!(index.offer(content(1), Place::Tail, PoolSet::ALL), Offer::Unmatched);
    index.learn(block(1), content(1));
    let Offer::Admitted(slot) = index.offer(content(1), Place::Tail, PoolSet::ALL) else {
        panic!("known content is admitted")
    };
    assert_eq!(index.cached(index.known(block(1)).unwrap()), Some(slot));
    assert_eq!(index.offer(content(1), Place::Tail, PoolSet::ALL), Offer::Duplicate);
    index.forget(block(1));
    assert_eq!(index.known(block(1)), None);
}

#[test]
fn a_hit_is_next_to_be_discarded_and_stays_valid() {
    let mut index = index(2, 16);
    for i in 1..=3 {
        index.learn(block(u64::from(i)), content(i));
    }
    index.offer(content(1), Place::Tail, PoolSet::ALL);
    let Offer::Admitted(second) = index.offer(content(2), Place::Tail, PoolSet::ALL) else { panic!() };
    let (hint, _) = index.look_up(block(2)).unwrap();
    index.hit(hint, block(2), second, false);
    assert_eq!(index.cached(content(2)), Some(second));
    assert_eq!(index.offer(content(3), Place::Tail, PoolSet::ALL), Offer::Admitted(second));
    assert!(index.cached(content(1)).is_some(), "the page that was not hit stays");
    assert_eq!(index.known(block(2)), Some(content(2)), "the guest holds the page that was hit");
}

/// The page that is discarded was hit, so that its block needs a node, and there is none but that of the page that is admitted.
#[test]
fn a_page_takes_the_words_of_its_node_and_the_page_before_it_the_node() {
    let mut index = index(1, 16);
    let nodes = index.layout().resident_limit().0;
    let of = |number: u32| (block(number.into()), content(100 + number));
    let learn = |index: &mut CacheIndex<Vec<u32>>, number| index.learn(of(number).0, of(number).1);
    learn(&mut index, 0);
    let Offer::Admitted(slot) = index.offer(of(0).1, Place::Tail, PoolSet::ALL) else { panic!("it is known") };
    (1..=nodes).for_each(|number| learn(&mut index, number));
    assert_eq!(index.known_blocks().0, nodes + 1, "each node has a block");
    for number in 1..=nodes {
        let before = of(number - 1);
        let (hint, _) = index.look_up(before.0).unwrap();
        index.hit(hint, before.0, slot, false);
        assert_eq!(index.offer(of(number).1, Place::Tail, PoolSet::ALL), Offer::Admitted(slot));
        assert_eq!((index.cached(of(number).1), index.cached(before.1)), (Some(slot), None));
        assert!((0..=nodes).all(|number| index.known(of(number).0) == Some(of(number).1)), "after {number}");
        assert_eq!(index.slot_counts(), SlotCounts { free: 0, used: 1, draining: 0 });
        assert_eq!(index.entries.check_lines(&index.words), nodes as usize + 1);
    }
}

#[test]
fn the_page_of_a_block_that_is_forgotten_is_the_next_to_be_discarded() {
    let mut index = index(3, 16);
    for i in 1..=3 {
        index.learn(block(u64::from(i)), content(i));
        index.offer(content(i), Place::Tail, PoolSet::ALL);
    }
    index.forget(block(2));
    let order: Vec<_> = index.queue(POOL).map(|(_, content)| content).collect();
    assert_eq!(order, [2, 1, 3].map(content));
}

#[test]
fn a_hit_finds_its_block_wherever_it_is_by_now() {
    // A free node looks like one of the first disk.
    let block = |bno| BlockId { disk: DiskIndex(0), ..block(bno) };
    // Nothing happened; the block moved to another node; its node is another block's; it is gone.
    for fate in 0..4 {
        let mut index = index(4, 16);
        [1, 2, 5].into_iter().for_each(|i| index.learn(block(u64::from(i)), content(i)));
        let (hint, _) = index.look_up(block(1)).unwrap();
        if fate > 0 {
            index.forget(block(1));
        }
        if fate == 1 || fate == 2 {
            index.learn(block(3), content(3));
            assert_eq!(index.look_up(block(3)).unwrap().0, hint, "the node that was freed last");
        }
        if fate == 1 {
            index.learn(block(1), content(1));
        }
        // Another block with the same content, in the node of a third.
        index.forget(block(5));
        index.learn(block(4), content(1));
        let Offer::Admitted(slot) = index.offer(content(1), Place::Tail, PoolSet::ALL) else {
            panic!("known content is admitted")
        };
        index.offer(content(2), Place::Tail, PoolSet::ALL);
        index.hit(hint, block(1), slot, false);
        assert_eq!(index.known(block(1)).is_some(), fate < 2);
        assert_eq!(index.queue(POOL).next(), Some((slot, content(1))), "the next to be discarded");
    }
}

/// More pages move than the log of sends has room for.
#[test]
fn moves_that_the_server_has_answered_are_not_in_doubt() {
    let slots = 40_000;
    let mut index = index(slots, 16);
    let pool = Pool { server: 0, generation: 1 };
    index.begin_pool(POOL, pool, 0);
    for number in 0..slots {
        let content = content(number + 100);
        index.learn(BlockId { disk: DiskIndex(0), bno: BlockNumber(u64::from(number)) }, content);
        assert_eq!(index.offer(content, Place::Tail, PoolSet::ALL), Offer::Admitted(SlotIndex(number)));
    }
    (0..slots / 2).for_each(|slot| index.drop_slot(SlotIndex(slot)));
    index.set_capacity(PageCount(slots / 2), |_| {});
    index.note_taken(POOL, index.log_end(POOL));
    assert_eq!((index.give_up_sends(POOL, index.sends(POOL)), index.slot_counts().used), (0, slots / 2));
}

#[test]
fn pinned_slots_are_not_reused() {
    let mut index = index(2, 16);
    for i in 1..=4 {
        index.learn(block(u64::from(i)), content(i));
    }
    let Offer::Admitted(first) = index.offer(content(1), Place::Tail, PoolSet::ALL) else { panic!() };
    let Offer::Admitted(second) = index.offer(content(2), Place::Tail, PoolSet::ALL) else { panic!() };
    assert!(index.pin(first) && index.pin(second));
    assert_eq!(index.offer(content(3), Place::Tail, PoolSet::ALL), Offer::NoSlot);
    index.drop_slot(first);
    assert_eq!(index.slot_counts(), SlotCounts { free: 0, used: 1, draining: 1 });
    assert_eq!(index.offer(content(3), Place::Tail, PoolSet::ALL), Offer::NoSlot);
    index.unpin(first);
    assert_eq!(index.offer(content(3), Place::Tail, PoolSet::ALL), Offer::Admitted(first));
}

#[test]
fn equal_blocks_share_a_slot_and_all_hit() {
    let mut index = index(4, 64);
    for i in 0..50 {
        index.learn(block(i), content(8));
    }
    assert!(matches!(index.offer(content(8), Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
    assert!((0..50).all(|i| index.cached(index.known(block(i)).unwrap()).is_some()));
    assert_eq!(index.slot_counts().used, 1);
}

/// The guest has the page that the shrink discards first, and not the next one.
#[test]
fn a_shrink_keeps_the_block_of_a_page_that_was_hit() {
    let mut index = index(8, 64);
    for i in 0..8 {
        index.learn(block(u64::from(i)), content(i));
        index.offer(content(i), Place::Tail, PoolSet::ALL);
    }
    let (hint, _) = index.look_up(block(5)).unwrap();
    index.hit(hint, block(5), index.cached(content(5)).unwrap(), false);
    index.set_capacity(PageCount(3), |_| {});
    assert_eq!((index.cached(content(5)), index.known(block(5))), (None, Some(content(5))));
    assert_eq!(index.known(block(0)), None);
}

#[test]
fn shrinking_keeps_the_newest_pages() {
    let mut index = index(8, 64);
    for i in 0..8 {
        index.learn(block(u64::from(i)), content(i));
        index.offer(content(i), Place::Tail, PoolSet::ALL);
    }
    let mut pages: HashMap<u32, u32> = HashMap::new();
    for i in 0..8 {
        pages.insert(index.cached(content(i)).unwrap().0, i);
    }
    index.set_capacity(PageCount(3), |m| {
        let page = pages.remove(&m.from.0).unwrap();
        pages.insert(m.to.0, page);
    });
    for i in 5..8 {
        let slot = index.cached(content(i)).expect("one of the newest three");
        assert!(slot.0 < 3);
        assert_eq!(pages[&slot.0], i, "the server was told where the page went");
    }
    assert_eq!(index.slot_counts(), SlotCounts { free: 0, used: 3, draining: 0 });
    index.set_capacity(PageCount(8), |_| panic!("growing moves nothing"));
    assert_eq!(index.slot_counts(), SlotCounts { free: 5, used: 3, draining: 0 });
}

#[test]
fn shrinking_past_a_pinned_slot_keeps_the_others() {
    let mut index = index(8, 64);
    for i in 0..8 {
        index.learn(block(u64::from(i)), content(i));
        index.offer(content(i), Place::Tail, PoolSet::ALL);
    }
    let pinned = index.cached(content(5)).unwrap();
    assert!(index.pin(pinned));
    index.set_capacity(PageCount(3), |_| {});
    assert_eq!(index.cached(content(5)), None, "it cannot move, and does not fit");
    assert!(index.cached(content(6)).is_some() && index.cached(content(7)).is_some());
}

#[test]
fn known_blocks_are_bounded_and_cached_ones_stay() {
    let mut index = index(8, 16);
    for i in 0..8 {
        index.learn(block(u64::from(i)), content(i));
        index.offer(content(i), Place::Tail, PoolSet::ALL);
    }
    for i in 8..1000 {
        index.learn(block(u64::from(i)), content(i));
    }
    assert_eq!(index.known_blocks().0, 8 + index.layout().resident_limit().0);
    assert!((0..8).all(|i| index.known(block(i)).is_some()), "cached blocks are passed over");
}

#[test]
fn a_move_keeps_everything() {
    let mut old = index(4, 16);
    for i in 0..4 {
        old.learn(block(u64::from(i)), content(i));
        old.offer(content(i), Place::Tail, PoolSet::ALL);
    }
    let layout = Layout::new(PageCount(16), PageCount(64), 2);
    let queue: Vec<_> = old.queue(POOL).collect();
    old.begin_move(CacheIndex::new(vec![0; layout.words()], layout, 7, ZERO));
    assert!(old.finish_move().is_some());
    let mut new = old;
    assert_eq!(queue, new.queue(POOL).collect::<Vec<_>>());
    assert!((0..4).all(|i| new.known(block(i)) == Some(content(u32::try_from(i).unwrap()))));
    new.set_capacity(PageCount(16), |_| {});
    assert_eq!(new.slot_counts(), SlotCounts { free: 12, used: 4, draining: 0 });
}

/// Of two blocks with one content, another one is found by it in the new region until the page is admitted.
#[test]
fn a_page_that_is_admitted_during_a_move_is_found_after_it() {
    let mut index = index(4, 16);
    index.learn(block(0), content(30));
    index.learn(block(1), content(31));
    index.forget(block(0));
    index.learn(block(2), content(31));
    let layout = Layout::new(PageCount(8), PageCount(16), 2);
    index.begin_move(CacheIndex::new(vec![0; layout.words()], layout, 7, ZERO));
    assert!(index.move_entries(u32::MAX));
    let Offer::Admitted(slot) = index.offer(content(31), Place::Tail, PoolSet::ALL) else {
        panic!("known content is admitted")
    };
    assert!(index.finish_move().is_some());
    assert_eq!(index.cached(content(31)), Some(slot));
    assert!([1, 2].iter().all(|bno| index.known(block(*bno)).is_some()));
}

#[test]
fn a_smaller_table_keeps_what_is_cached() {
    let layout = Layout::new(PageCount(8), PageCount(1000), 2);
    let mut index = empty(vec![0; layout.words()], layout);
    index.set_capacity(PageCount(8), |_| {});
    for i in 0..1000 {
        index.learn(block(u64::from(i)), content(i));
        if i >= 992 {
            index.offer(content(i), Place::Tail, PoolSet::ALL);
        }
    }
    let smaller = Layout::new(PageCount(8), PageCount(16), 2);
    index.begin_move(CacheIndex::new(vec![0; smaller.words()], smaller, 7, ZERO));
    let old = index.finish_move().unwrap();
    assert_eq!((old.len(), index.words().len()), (layout.words(), smaller.words()));
    assert_eq!(index.known_blocks().0, 8 + smaller.resident_limit().0);
    assert!((992..1000).all(|i| index.known(block(i)).is_some_and(|content| index.cached(content).is_some())));
}

#[derive(Clone, Debug)]
pub(super) enum Step {
    Learn(u64, u32),
    Forget(u64),
    Offer(u32, bool),
    Hit(u64, bool),
    Pin(u64),
    Unpin,
    /// Wants another capacity.
    Aim(u32),
    /// Works towards it.
    Resize(u32),
    /// The server drops the slots from here on.
    Lose(u32),
    ForgetRange(u64, u64),
    DropSlots,
}

pub(super) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..24u64, 0..20u32).prop_map(|(b, c)| Step::Learn(b, c)),
        2 => (0..24u64).prop_map(Step::Forget),
        6 => (0..20u32, any::<bool>()).prop_map(|(c, p)| Step::Offer(c, p)),
        3 => (0..24u64, any::<bool>()).prop_map(|(b, p)| Step::Hit(b, p)),
        2 => (0..24u64).prop_map(Step::Pin),
        2 => Just(Step::Unpin),
        1 => (0..10u32).prop_map(Step::Aim),
        3 => prop_oneof![Just(1), Just(3), Just(u32::MAX)].prop_map(Step::Resize),
        1 => (0..10u32).prop_map(Step::Lose),
        1 => (0..24u64, 0..24u64).prop_map(|(a, n)| Step::ForgetRange(a, a + n)),
        1 => Just(Step::DropSlots),
    ];
    proptest::collection::vec(step, 1..200)
}

/// SENDPAGE, MOVE, or the server's word that it dropped the slots from one on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Told {
    Page(u32, Fingerprint),
    Move(u32, u32),
    Lost(u32),
}

/// Model of what the server holds in each slot, and of what was learnt of each block and not forgotten.
#[derive(Clone, Default)]
pub(super) struct Model {
    pub(super) server: HashMap<u32, Fingerprint>,
    pub(super) learned: HashMap<u64, Fingerprint>,
    pub(super) pinned: VecDeque<SlotIndex>,
    /// Everything that it was told to store and to move, in order.
    pub(super) told: Vec<Told>,
}

impl Model {
    pub(super) fn check<M: DerefMut<Target = [u32]>>(&self, index: &CacheIndex<M>) -> Result<(), TestCaseError> {
        let counts = index.slot_counts();
        prop_assert_eq!(counts.free + counts.used + counts.draining, index.capacity(POOL).0);
        let queue: Vec<_> = index.queue(POOL).collect();
        prop_assert!(queue.len() <= counts.used as usize);
        prop_assert!(queue.len() == counts.used as usize || index.is_resizing(), "what is lost is released");
        prop_assert_eq!(index.entries.check_lines(&index.words), index.known_blocks().0 as usize);
        let contents: HashSet<_> = queue.iter().map(|(_, c)| *c).collect();
        prop_assert_eq!(contents.len(), queue.len(), "one slot for each content");
        for (slot, content) in queue {
            prop_assert!(slot.0 < index.capacity(POOL).0);
            prop_assert_eq!(self.server.get(&slot.0), Some(&content), "the index and the server agree");
            prop_assert_eq!(index.cached(content), Some(slot));
        }
        for bno in 0..24 {
            if let Some(content) = index.believed(block(bno)) {
                prop_assert_eq!(Some(&content), self.learned.get(&bno), "what is known is what was learned last");
            }
        }
        Ok(())
    }

    pub(super) fn apply<M: DerefMut<Target = [u32]>>(
        &mut self,
        index: &mut CacheIndex<M>,
        step: &Step,
    ) -> Result<(), TestCaseError> {
        match *step {
            // While all is being forgotten, an engine neither looks up nor learns.
            Step::Learn(bno, _) | Step::Hit(bno, _) if index.is_void(block(bno)) => {}
            Step::Learn(bno, c) => {
                index.learn(block(bno), content(c));
                self.learned.insert(bno, content(c));
                prop_assert_eq!(index.known(block(bno)), Some(content(c)));
            }
            Step::Forget(bno) => {
                index.forget(block(bno));
                self.learned.remove(&bno);
            }
            Step::Offer(c, tail) => {
                let place = if tail { Place::Tail } else { Place::Head };
                match index.offer(content(c), place, PoolSet::ALL) {
                    Offer::Admitted(slot) => {
                        prop_assert_eq!(index.cached(content(c)), Some(slot));
                        prop_assert!(self.learned.values().any(|l| *l == content(c)), "only known content");
                        prop_assert!(!self.pinned.contains(&slot), "a pinned slot is not reused");
                        self.server.insert(slot.0, content(c));
                        self.told.push(Told::Page(slot.0, content(c)));
                    }
                    Offer::Duplicate => prop_assert!(index.cached(content(c)).is_some()),
                    Offer::Unmatched | Offer::NoSlot => prop_assert!(index.cached(content(c)).is_none()),
                    Offer::Demoting { .. } => prop_assert!(false, "there is one tier"),
                }
            }
            Step::Hit(bno, promote) => {
                if let Some((hint, content)) = index.look_up(block(bno))
                    && let Some(slot) = index.cached(content)
                {
                    index.hit(hint, block(bno), slot, promote);
                }
            }
            Step::Pin(bno) => {
                if let Some(slot) = index.believed(block(bno)).and_then(|c| index.cached(c))
                    && index.pin(slot)
                {
                    self.pinned.push_back(slot);
                }
            }
            Step::Unpin => {
                if let Some(slot) = self.pinned.pop_front() {
                    index.unpin(slot);
                }
            }
            Step::Aim(n) => index.aim(POOL, PageCount(n)),
            Step::Lose(n) => {
                index.lose_from(POOL, PageCount(n));
                self.server.retain(|slot, _| *slot < n);
                self.told.push(Told::Lost(n));
            }
            Step::Resize(slots) => {
                let (server, told) = (&mut self.server, &mut self.told);
                index.resize(POOL, slots, |m| {
                    let page = server.remove(&m.from.0).unwrap();
                    server.insert(m.to.0, page);
                    told.push(Told::Move(m.from.0, m.to.0));
                });
            }
            Step::ForgetRange(from, to) => {
                index.forget_range(DiskIndex(1), from..to);
                self.learned.retain(|b, _| !(from..to).contains(b));
            }
            Step::DropSlots => index.drop_all_slots(),
        }
        Ok(())
    }
}

/// The next pieces of a move: how many entries, whether it ends, and whether all is forgotten.
pub(super) fn pieces() -> impl Strategy<Value = Vec<(u32, bool, bool)>> {
    proptest::collection::vec((0..6_u32, prop::bool::weighted(0.1), prop::bool::weighted(0.05)), 200)
}

proptest! {
    #[test]
    fn the_index_agrees_with_a_naive_model(steps in steps()) {
        let mut index = index(8, 16);
        let mut model = Model::default();
        for step in &steps {
            model.apply(&mut index, step)?;
            model.check(&index)?;
        }
    }

    /// Into larger and smaller regions, begun, given up and ended between any two steps.
    #[test]
    fn an_index_that_moves_agrees_with_the_model(steps in steps(), pieces in pieces(), slots in 1..12_u32) {
        let mut index = index(8, 16);
        let mut model = Model::default();
        for ((step, (entries, ends, forgets)), number) in steps.iter().zip(pieces).zip(0_u32..) {
            model.apply(&mut index, step)?;
            if forgets {
                index.drop_everything();
                model.learned.clear();
            }
            index.cut(entries * 4);
            index.check_target();
            index.move_entries(entries);
            index.check_target();
            if ends && number % 2 == 0 {
                let known: Vec<_> = (0..24).map(|bno| index.believed(block(bno))).collect();
                let (before, queue) = (index.layout(), index.queue(POOL).collect::<Vec<_>>());
                index.finish_move();
                prop_assert_eq!(queue, index.queue(POOL).collect::<Vec<_>>(), "a move loses no page");
                let fits = index.layout().entry_limit() >= before.entry_limit();
                for (bno, known) in (0..24).zip(known) {
                    let now = index.believed(block(bno));
                    prop_assert!(now == known || now.is_none() && !fits, "a larger region knows as much");
                }
            } else if ends {
                let slots = index.least_slots().max(PageCount(slots));
                let layout = Layout::new(slots, PageCount(16 + number % 5 * 8), 2);
                index.begin_move(CacheIndex::new(vec![0; layout.words()], layout, 7, ZERO));
            }
            model.check(&index)?;
        }
    }
}
