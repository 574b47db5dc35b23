//! The index of a process that was killed between any two stores, and forged words.

use super::layout::{HEADER_WORDS, header, of_pool, pool_word};
use super::tests::{Model, POOL, Step, Told, ZERO, block, content, empty, pieces, steps, with_disks};
use super::*;
use crate::units::PoolSet;
use crate::units::{BlockNumber, DiskIndex};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};
use std::ops::{Deref, DerefMut};

const AT: Pool = Pool { server: 3, generation: 9 };
const DISKS: u16 = 2;
/// Disks that have the same numbers in two processes.
const SAME: [(DiskIndex, DiskIndex); 2] = [(DiskIndex(0), DiskIndex(0)), (DiskIndex(1), DiskIndex(1))];

/// Words that keep what they held when their process was killed: before the n-th of its stores.
pub(super) struct Mortal {
    words: Vec<u32>,
    stores_left: u32,
    left_behind: Option<Vec<u32>>,
}

impl Mortal {
    pub(super) fn new(words: Vec<u32>, stores_left: u32) -> Self {
        Self { words, stores_left, left_behind: None }
    }

    /// Kills the process after `stores` more stores.
    pub(super) fn stop_after(&mut self, stores: u32) {
        self.stores_left = stores;
    }

    /// Returns whether the process was never killed, and the words that it left.
    pub(super) fn end(self) -> (bool, Vec<u32>) {
        (self.left_behind.is_none(), self.left_behind.unwrap_or(self.words))
    }
}

impl Deref for Mortal {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.words
    }
}

impl DerefMut for Mortal {
    fn deref_mut(&mut self) -> &mut [u32] {
        match self.stores_left.checked_sub(1) {
            Some(left) => self.stores_left = left,
            None if self.left_behind.is_none() => self.left_behind = Some(self.words.clone()),
            None => {}
        }
        &mut self.words
    }
}

pub(super) fn layout() -> Layout {
    Layout::new(PageCount(8), PageCount(16), DISKS)
}

fn index<M: DerefMut<Target = [u32]>>(words: M) -> CacheIndex<M> {
    let mut index = empty(words, layout());
    index.begin_pool(POOL, AT, 0);
    index.set_capacity(PageCount(8), |_| {});
    index
}

pub(super) fn resume(words: Vec<u32>) -> CacheIndex<Vec<u32>> {
    resume_of(words, Origin::Own)
}

fn resume_of(words: Vec<u32>, origin: Origin<'_>) -> CacheIndex<Vec<u32>> {
    CacheIndex::resume(words, origin, DISKS, 7, ZERO).map_err(|unusable| unusable.reason).unwrap()
}

/// Returns what the server holds after the first frames, and how many SENDPAGEs were among them.
fn server_after(told: &[Told]) -> (HashMap<u32, Fingerprint>, u64) {
    let (mut server, mut sends) = (HashMap::new(), 0);
    for frame in told {
        match *frame {
            Told::Page(slot, content) => {
                server.insert(slot, content);
                sends += 1;
            }
            Told::Move(from, to) => {
                let page = server.remove(&from).unwrap();
                server.insert(to, page);
            }
            Told::Lost(end) => server.retain(|slot, _| *slot < end),
        }
    }
    (server, sends)
}

/// Returns the contents whose place in the queue may differ, because the process was killed during `step`.
fn touched(step: &Step, before: &Model, queues: [&[(SlotIndex, Fingerprint)]; 2]) -> HashSet<Fingerprint> {
    let known = |bno: u64| before.learned.get(&bno).copied();
    let mut touched: HashSet<_> = match *step {
        Step::Learn(bno, c) => known(bno).into_iter().chain([content(c)]).collect(),
        Step::Forget(bno) | Step::Hit(bno, _) => known(bno).into_iter().collect(),
        Step::Offer(c, _) => HashSet::from([content(c)]),
        Step::ForgetRange(from, to) => (from..to).filter_map(known).collect(),
        Step::Pin(_) | Step::Unpin | Step::DropSlots => HashSet::new(),
        Step::Aim(_) | Step::Resize(_) | Step::Lose(_) => HashSet::new(),
    };
    let [a, b] = queues.map(|queue| queue.iter().copied().collect::<HashSet<_>>());
    touched.extend(a.symmetric_difference(&b).map(|(_, content)| *content));
    touched
}

/// Goes on with a move by some entries, or ends it or begins one. The stores that are left to the process go on with the new region.
/// It is found only after the end, so that a kill during the move leaves the old one.
fn move_on(index: &mut CacheIndex<Mortal>, (entries, ends, larger): (u32, bool, bool)) {
    if !index.is_moving() {
        let slots = PageCount(if larger { 12 } else { 1 }).max(index.least_slots());
        let to = index.layout().resized(slots, PageCount(24));
        index.begin_move(CacheIndex::new(Mortal::new(vec![0; to.words()], u32::MAX), to, 7, ZERO));
    }
    index.move_entries(entries * 8);
    if ends && let Some(former) = index.finish_move() {
        index.words.stores_left = former.stores_left;
        index.words.left_behind = former.left_behind;
    }
}

fn queue<M: DerefMut<Target = [u32]>>(index: &CacheIndex<M>) -> Vec<(SlotIndex, Fingerprint)> {
    index.queue(POOL).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// Also while it moves into another region, and after that.
    #[test]
    fn an_index_whose_process_was_killed_between_two_stores_is_right(
        steps in steps(), pieces in pieces(), stores in 0..2000_u32, stores_of_successor in 0..400_u32, got in 0..1000_usize
    ) {
        let mut index = index(Mortal::new(vec![0; layout().words()], u32::MAX));
        index.words.stores_left = stores;
        let mut model = Model::default();
        for (done, step) in steps.iter().enumerate() {
            let (before, queue_before) = (model.clone(), queue(&index));
            // Now and then, an upgrade that fails.
            if done % 4 == 3 {
                index.close();
                index.reopen();
            }
            move_on(&mut index, pieces[done]);
            model.apply(&mut index, step)?;
            let Some(left_behind) = index.words.left_behind.take() else { continue };

            // The successor is also killed, while it rebuilds the index.
            let successor = Mortal::new(left_behind.clone(), stores_of_successor);
            let successor = CacheIndex::resume(successor, Origin::Own, DISKS, 7, ZERO).map_err(|u| u.reason).unwrap();
            let left_behind = successor.words.left_behind.unwrap_or(left_behind);

            let mut resumed = resume(left_behind);
            for bno in 0..24 {
                let known = resumed.known(block(bno));
                let allowed = [before.learned.get(&bno), model.learned.get(&bno)];
                prop_assert!(known.is_none() || allowed.contains(&known.as_ref()), "{step:?} {bno}: {known:?}");
            }
            let touched = touched(step, &before, [&queue_before, &queue(&index)]);
            let rest = |queue: Vec<(_, _)>| queue.into_iter().filter(|(_, c)| !touched.contains(c)).collect::<Vec<_>>();
            prop_assert_eq!(rest(queue(&resumed)), rest(queue_before), "the order of the queue after {:?}", step);

            // The server received some of what was sent before, and says so.
            let (server, received) = server_after(&before.told[..got.min(before.told.len())]);
            prop_assert_eq!(resumed.pool(POOL), Some(AT));
            resumed.give_up_sends(POOL, received);
            resumed.begin_pool(POOL, AT, received);
            let learned = (0..24).filter_map(|b| Some((b, resumed.known(block(b))?))).collect();
            let mut model = Model { server, learned, ..Model::default() };
            model.check(&resumed)?;
            for step in &steps[done..] {
                model.apply(&mut resumed, step)?;
                model.check(&resumed)?;
            }
            return Ok(());
        }
    }

    /// An index that is used as it is equals the one that a rebuild makes.
    #[test]
    fn an_index_that_was_closed_is_the_same_again(steps in steps(), split in 0..60_usize) {
        let mut index = index(vec![0; layout().words()]);
        let mut model = Model::default();
        let (before, after) = steps.split_at(split.min(steps.len()));
        for step in before {
            model.apply(&mut index, step)?;
        }
        while !model.pinned.is_empty() {
            model.apply(&mut index, &Step::Unpin)?;
        }
        index.close();
        if index.slots.are_losing() {
            prop_assert_eq!(index.words[header::CLOSED], 0, "what is lost must not be taken as it is");
            model.apply(&mut index, &Step::Resize(u32::MAX))?;
            index.close();
        }
        prop_assert_ne!(index.words[header::CLOSED], 0);
        let (counts, blocks, words) = (index.slot_counts(), index.known_blocks(), index.words);
        let mut open = words.clone();
        open[header::CLOSED] = 0;
        let rebuilt = resume_of(open, Origin::Peer(&SAME));
        let mut resumed = resume_of(words, Origin::Own);
        prop_assert_eq!(resumed.words[header::CLOSED], 0);
        for index in [&rebuilt, &resumed] {
            prop_assert_eq!((index.slot_counts(), index.known_blocks()), (counts, blocks));
        }
        prop_assert_eq!(queue(&resumed), queue(&rebuilt));
        prop_assert!(resumed.was_closed() && !rebuilt.was_closed());
        for step in after {
            model.apply(&mut resumed, step)?;
            model.check(&resumed)?;
        }
    }

    #[test]
    fn words_that_somebody_made_up_are_harmless(
        made_up in proptest::collection::vec(prop_oneof![0..40_u32, any::<u32>()], layout().words() - layout().links_at()),
        log in any::<u32>(), logged in any::<u32>(),
        capacity in 0..20_u32, closed in any::<u32>(), own in any::<bool>(), steps in steps()
    ) {
        let mut words = index(vec![0; layout().words()]).words;
        let (log_at, links_at) = (layout().log_at(), layout().links_at());
        words[log_at..links_at].fill(log);
        words[links_at..].copy_from_slice(&made_up);
        for (at, ordinal) in (layout().chunks_at()..links_at).zip(&made_up) {
            words[at] = ordinal % 6;
        }
        words[header::LOGGED] = logged;
        words[pool_word(POOL, of_pool::CAPACITY)] = capacity;
        words[pool_word(POOL, of_pool::QUEUE)] = made_up[0];
        words[pool_word(POOL, of_pool::MOVED)] = made_up[6];
        words[pool_word(POOL, of_pool::TAKEN)] = made_up[7];
        words[HEADER_WORDS..log_at].copy_from_slice(&made_up[..log_at - HEADER_WORDS]);
        // As if it had been closed, but with a wrong checksum.
        words[header::CLOSED] = closed;
        words[header::FREE_NODE..=header::NODES_USED].copy_from_slice(&made_up[1..3]);
        let tail = pool_word(POOL, of_pool::TAIL);
        words[tail..tail + 3].copy_from_slice(&made_up[3..6]);
        let mut index = with_disks(resume_of(words, if own { Origin::Own } else { Origin::Peer(&SAME) }));
        prop_assert!(!index.was_closed());
        index.give_up_sends(POOL, 5);
        for disk in 0..DISKS {
            let areas = index.swap_areas(DiskIndex(disk));
            index.set_swap_areas(DiskIndex(disk), areas.iter());
        }
        // The model starts from what the index says about server and guest.
        let server = index.queue(POOL).map(|(slot, content)| (slot.0, content)).collect();
        let learned = (0..24).filter_map(|b| Some((b, index.known(block(b))?))).collect();
        let mut model = Model { server, learned, ..Model::default() };
        model.check(&index)?;
        for step in steps.iter().filter(|step| !matches!(step, Step::Offer(..))) {
            model.apply(&mut index, step)?;
            model.check(&index)?;
        }
    }
}

/// A disk that the other process does not have may be known to the words: what they hold about it must go.
#[test]
fn a_closed_index_that_comes_is_made_anew_if_its_disks_are_others() {
    let [one, both] = [&SAME[..1], &SAME];
    let crossed = [(DiskIndex(0), DiskIndex(1)), (DiskIndex(1), DiskIndex(0))];
    let mut index = index(vec![0; layout().words()]);
    index.learn(block(1), content(1));
    let is_taken = |index: &mut CacheIndex<Vec<u32>>, pairs| {
        index.close();
        let words = index.words.clone();
        index.reopen();
        let resumed = resume_of(words, Origin::Peer(pairs));
        assert_eq!(resumed.known(BlockId { disk: DiskIndex(0), ..block(1) }).is_some(), pairs == crossed);
        assert_eq!(resumed.known(block(1)).is_some(), pairs == both);
        resumed.was_closed()
    };
    assert_eq!([both, one, &crossed].map(|pairs| is_taken(&mut index, pairs)), [true, false, false]);
    // A number that is not free yet, one that is, and one that is kept for the image of a failed flush.
    index.set_flush_failed(DiskIndex(1), Some(5));
    index.remove_disk(DiskIndex(1));
    assert!(!is_taken(&mut index, one));
    index.cut(u32::MAX);
    index.release_disk(DiskIndex(1));
    assert!(!is_taken(&mut index, one));
    index.set_flush_failed(DiskIndex(1), None);
    assert!(is_taken(&mut index, one));
}

#[test]
fn an_open_index_with_the_head_of_a_closed_one_is_closed() {
    let mut index = index(vec![0; layout().words()]);
    for number in 1..6 {
        index.learn(block(number.into()), content(number));
        index.offer(content(number), Place::Tail, PoolSet::ALL);
    }
    let mut words = index.closed_head();
    assert!(!resume(index.words.clone()).was_closed(), "it is open again");
    words.extend_from_slice(&index.words[words.len()..]);
    let moved = resume_of(words, Origin::Peer(&SAME));
    assert!(moved.was_closed());
    assert_eq!((moved.slot_counts(), moved.known_blocks()), (index.slot_counts(), index.known_blocks()));
    assert_eq!(queue(&moved), queue(&index));
}

#[test]
fn a_closed_index_is_made_anew_if_a_word_of_its_header_is_damaged() {
    let mut index = index(vec![0; layout().words()]);
    for number in 1..6 {
        index.learn(block(number.into()), content(number));
        index.offer(content(number), Place::Tail, PoolSet::ALL);
    }
    index.close();
    assert!(resume(index.words.clone()).was_closed());
    let layout_word = |at: &usize| *at == header::CHUNK_BITS;
    for (at, bit) in (header::BLOCKS_VALID..HEADER_WORDS)
        .filter(|at| !layout_word(at))
        .flat_map(|at| (0..32).map(move |bit| (at, bit)))
    {
        let mut words = index.words.clone();
        words[at] ^= 1 << bit;
        let resumed = resume(words);
        assert!(!resumed.was_closed(), "bit {bit} of word {at}");
        if (header::CLOSED..header::POOLS).contains(&at) {
            assert_eq!(resumed.slot_counts(), index.slot_counts());
            assert_eq!(resumed.known_blocks(), index.known_blocks());
            assert_eq!(queue(&resumed), queue(&index));
        }
    }
}

#[test]
fn what_is_no_index_of_this_kind_is_given_back() {
    let words = index(vec![0; layout().words()]).words;
    assert_eq!(Layout::read(&words), Some(layout()));
    let unusable = |words: Vec<u32>, disks, zero| match CacheIndex::resume(words, Origin::Own, disks, 7, zero) {
        Ok(_) => panic!("resumed from it"),
        Err(unusable) => (unusable.words.len(), unusable.reason),
    };
    let mut reasons = HashSet::new();
    for (at, value) in [(header::MAGIC, 0), (header::VERSION, 1), (header::SLOTS, 9), (header::ENTRIES, u32::MAX)] {
        let mut other = words.clone();
        other[at] = value;
        assert_eq!(Layout::read(&other), None, "word {at}");
        reasons.insert(unusable(other, DISKS, ZERO));
    }
    assert_eq!(reasons.len(), 1);
    reasons.insert(unusable(words.clone(), 3, ZERO));
    reasons.insert(unusable(words.clone(), DISKS, content(1)));
    assert_eq!(reasons.len(), 3, "{reasons:?}");
    assert!(reasons.iter().all(|(length, _)| *length == words.len()));
    assert_eq!(Layout::read(&words[..words.len() - 1]), None);
    assert_eq!(Layout::read(&[]), None);
}

#[test]
fn a_kill_while_everything_is_forgotten_leaves_nothing() {
    let mut index = index(vec![0; layout().words()]);
    index.learn(block(1), content(1));
    // As `cut_all_disks` leaves it before the last disk is void.
    index.words[header::BLOCKS_VALID] = 0;
    let index = resume(index.words);
    assert_eq!(index.known_blocks(), PageCount(0));
}

/// Also if the process before was killed while everything was being forgotten.
#[test]
fn what_is_learnt_after_everything_was_forgotten_outlives_a_kill() {
    for is_killed in [false, true] {
        let mut index = index(vec![0; layout().words()]);
        index.learn(block(1), content(1));
        if is_killed {
            index.words[header::BLOCKS_VALID] = 0;
            index = resume(index.words);
        } else {
            index.drop_everything();
            index.cut(u32::MAX);
        }
        index.learn(block(2), content(2));
        let index = resume(index.words);
        assert_eq!([1, 2].map(|bno| index.known(block(bno))), [None, Some(content(2))], "{is_killed}");
    }
}

/// Whenever the process and its successor are killed, all that was known of all disks is known, or nothing.
#[test]
fn a_kill_while_everything_is_forgotten_leaves_all_or_nothing() {
    let of_other = (1..4_u32).map(|number| (BlockId { disk: DiskIndex(0), ..block(number.into()) }, 40 + number));
    let blocks: Vec<_> = (1..7_u32).map(|number| (block(number.into()), 20 + number)).chain(of_other).collect();
    let mut was_forgotten = false;
    for stores in 0.. {
        let mut index = index(Mortal::new(vec![0; layout().words()], u32::MAX));
        blocks.iter().for_each(|(block, number)| index.learn(*block, content(*number)));
        for number in 21..25 {
            assert!(matches!(index.offer(content(number), Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
        }
        index.words.stop_after(stores);
        index.drop_everything();
        while index.is_cutting() {
            // It is turned on again meanwhile.
            index.cut(7);
            index.resize(POOL, 1, |_| {});
        }
        let (is_done, words) = index.words.end();
        let mut is_forgotten = false;
        for stores_of_successor in (0..).step_by(9) {
            let successor = Mortal::new(words.clone(), stores_of_successor);
            let successor = CacheIndex::resume(successor, Origin::Own, DISKS, 7, ZERO).map_err(|u| u.reason).unwrap();
            let (is_up, words) = successor.words.end();
            let index = resume(words);
            let is_known = |(block, number): &&(BlockId, u32)| index.known(*block) == Some(content(*number));
            let known = blocks.iter().filter(is_known).count();
            let when = format!("killed before store {stores} and {stores_of_successor}");
            assert!(known == 0 || known == blocks.len() && !was_forgotten, "{when}: {known} blocks are known");
            assert_eq!(index.known_blocks().0 as usize, known, "{when}");
            let pages = queue(&index).len();
            assert!(pages == 0 || pages == 4 && known > 0, "{when}: {pages} pages are cached");
            is_forgotten |= known == 0;
            if is_up {
                break;
            }
        }
        was_forgotten |= is_forgotten;
        if is_done {
            assert!(was_forgotten, "nothing was forgotten");
            return;
        }
    }
}

#[test]
fn failed_flushes_and_swap_areas_are_kept() {
    let mut index = index(vec![0; layout().words()]);
    let areas = [5..9, (1 << 39)..(1 << 39) + (1 << 32)];
    index.set_swap_areas(DiskIndex(1), areas.iter());
    index.set_flush_failed(DiskIndex(0), Some(5));
    let larger = Layout::new(PageCount(100), PageCount(100), DISKS);
    index.begin_move(CacheIndex::new(vec![0; larger.words()], larger, 7, ZERO));
    let former = index.finish_move().unwrap();
    for index in [resume(former), resume(index.words)] {
        assert_eq!(index.swap_areas(DiskIndex(1)), areas);
        assert_eq!(index.swap_areas(DiskIndex(0)), []);
        assert_eq!([0, 1].map(|disk| index.flush_failed(DiskIndex(disk))), [Some(5), None]);
        assert_eq!(index.pool(POOL), Some(AT));
    }
}

/// Prints what a restart costs; `REMOCA_RESUME_GIB` is the size of the cache, in GiB.
#[test]
fn resume_cost() {
    let gib: u32 = std::env::var("REMOCA_RESUME_GIB").map_or(1, |gib| gib.parse().unwrap());
    let pages = gib << 18;
    let layout = Layout::new(PageCount(pages), PageCount(1 << 18), 1);
    let mut index = empty(vec![0; layout.words()], layout);
    index.begin_pool(POOL, AT, 0);
    index.set_capacity(PageCount(pages), |_| {});
    // Numbers without any order, like keyed hashes.
    let content = |i: u32| Fingerprint([1, 2, 3].map(|k: u32| i.wrapping_mul(0x9e37_79b1).rotate_left(k * 7) ^ i));
    for i in 0..pages + (1 << 17) {
        index.learn(BlockId { disk: DiskIndex(0), bno: BlockNumber(u64::from(i)) }, content(i));
        if i < pages {
            assert!(matches!(index.offer(content(i), Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
        }
    }
    let (known, used) = (index.known_blocks(), index.slot_counts().used);
    let words = index.words;
    let started = std::time::Instant::now();
    let index = CacheIndex::resume(words, Origin::Own, 1, 7, ZERO).map_err(|unusable| unusable.reason).unwrap();
    println!("{gib} GiB of cache: {known:?} blocks, {used} slots in {} ms", started.elapsed().as_millis());
    assert_eq!((index.known_blocks(), index.slot_counts().used), (known, used));
    let mut index = index;
    index.close();
    let words = index.words;
    let started = std::time::Instant::now();
    let index = CacheIndex::resume(words, Origin::Own, 1, 7, ZERO).map_err(|unusable| unusable.reason).unwrap();
    println!("the same after a close: {} us", started.elapsed().as_micros());
    assert_eq!((index.known_blocks(), index.slot_counts().used), (known, used));
    let mut index = index;
    index.close();
    let words = index.words;
    let pairs = [(DiskIndex(0), DiskIndex(0))];
    let started = std::time::Instant::now();
    let index =
        CacheIndex::resume(words, Origin::Peer(&pairs), 1, 7, ZERO).map_err(|unusable| unusable.reason).unwrap();
    println!("the same in a migration: {} us", started.elapsed().as_micros());
    assert_eq!((index.known_blocks(), index.slot_counts().used), (known, used));
}

/// Whatever a move does, the old region gets the stores that it would have got without it, and no other: a kill between two of them
/// finds what it would have found.
#[test]
fn a_move_stores_nothing_in_the_old_region() {
    let stores = |moves: bool| {
        let mut index = index(Mortal::new(vec![0; layout().words()], u32::MAX));
        let cycle = |index: &mut CacheIndex<Mortal>, number: u32| {
            index.learn(block(number.into()), content(number));
            index.offer(content(number), Place::Tail, PoolSet::ALL);
        };
        (20..26).for_each(|number| cycle(&mut index, number));
        if moves {
            let larger = layout().resized(PageCount(12), PageCount(24));
            index.begin_move(CacheIndex::new(Mortal::new(vec![0; larger.words()], u32::MAX), larger, 7, ZERO));
            index.move_entries(u32::MAX);
        }
        (26..40).for_each(|number| cycle(&mut index, number));
        let slot = index.cached(content(39)).unwrap();
        let (hint, _) = index.look_up(block(39)).unwrap();
        index.hit(hint, block(39), slot, true);
        assert!(index.pin(slot));
        index.unpin(slot);
        index.note_silent(slot);
        index.forget(block(38));
        index.aim(POOL, PageCount(3));
        index.resize(POOL, u32::MAX, |_| {});
        let words = if moves { index.finish_move().unwrap() } else { index.words };
        u32::MAX - words.stores_left
    };
    assert_eq!(stores(true), stores(false));
}
