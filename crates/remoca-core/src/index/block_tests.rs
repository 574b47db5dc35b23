//! Blocks that move between nodes and slots, in an index whose process is killed between any two stores.

use super::resume_tests::{Mortal, layout, resume};
use super::tests::{POOL, ZERO, block, content, empty};
use super::*;
use crate::units::PoolSet;

/// Number of the block with this content.
const BLOCKS: [(u64, u32); 4] = [(1, 21), (2, 22), (3, 23), (4, 21)];

/// Returns an index with one usable slot that knows [`BLOCKS`], prepared by `prepare`.
fn index(prepare: impl Fn(&mut CacheIndex<Mortal>)) -> CacheIndex<Mortal> {
    let mut index = empty(Mortal::new(vec![0; layout().words()], u32::MAX), layout());
    index.begin_pool(POOL, Pool { server: 3, generation: 9 }, 0);
    index.set_capacity(PageCount(1), |_| {});
    for (bno, number) in BLOCKS {
        index.learn(block(bno), content(number));
    }
    prepare(&mut index);
    index
}

fn admit<M: Words>(index: &mut CacheIndex<M>, number: u32) -> SlotIndex {
    let Offer::Admitted(slot) = index.offer(content(number), Place::Tail, PoolSet::ALL) else {
        panic!("{number} is not admitted")
    };
    slot
}

/// Checks that nothing wrong is known or cached, and that each block is known once. `kept` are the blocks that must be known.
fn check<M: Words>(index: &CacheIndex<M>, kept: &[u64], when: &str) {
    let mut known = 0;
    for (bno, number) in BLOCKS {
        let found = index.known(block(bno));
        assert!(found.is_none_or(|found| found == content(number)), "{when}: block {bno} has another content");
        assert!(found.is_some() || !kept.contains(&bno), "{when}: block {bno} was forgotten");
        known += u32::from(found.is_some());
    }
    assert_eq!(index.known_blocks(), PageCount(known), "{when}: each block is known once");
    let counts = index.slot_counts();
    assert_eq!((counts.free + counts.used, index.queue(POOL).count()), (1, counts.used as usize), "{when}");
}

/// Changes an index and kills the process before each of its stores, and before each store of the successor's rebuild.
/// `kept` are the blocks that must be known whenever it is killed, and `all` those that must be known in the end.
fn kill_everywhere(
    prepare: impl Fn(&mut CacheIndex<Mortal>),
    change: impl Fn(&mut CacheIndex<Mortal>),
    kept: &[u64],
    all: &[u64],
) {
    for stores in 0.. {
        let mut index = index(&prepare);
        index.words.stop_after(stores);
        change(&mut index);
        check(&index, all, "while it lives");
        let (is_done, words) = index.words.end();
        for stores_of_successor in 0.. {
            let when = format!("killed before store {stores} and {stores_of_successor}");
            let successor = Mortal::new(words.clone(), stores_of_successor);
            let successor = CacheIndex::resume(successor, Origin::Own, 2, 7, ZERO).map_err(|u| u.reason).unwrap();
            let (is_up, words) = successor.words.end();
            let mut index = resume(words);
            check(&index, if is_done { all } else { kept }, &when);
            // It works on.
            for (bno, number) in BLOCKS {
                index.learn(block(bno), content(number));
                assert!(
                    !matches!(
                        index.offer(content(number), Place::Tail, PoolSet::ALL),
                        Offer::Unmatched | Offer::NoSlot
                    ),
                    "{when}"
                );
            }
            check(&index, &[], &when);
            if is_up {
                break;
            }
        }
        if is_done {
            return;
        }
    }
}

#[test]
fn admitting_moves_a_block_from_its_node_into_the_slot() {
    kill_everywhere(|_| {}, |index| assert_eq!(admit(index, 22), SlotIndex(0)), &[1, 3, 4], &[1, 2, 3, 4]);
}

#[test]
fn discarding_moves_a_block_that_the_guest_has_back_into_a_node() {
    let prepare = |index: &mut CacheIndex<Mortal>| {
        let slot = admit(index, 22);
        let (hint, _) = index.look_up(block(2)).unwrap();
        index.hit(hint, block(2), slot, false);
    };
    // Block 3 may be forgotten, on its way into the slot.
    kill_everywhere(prepare, |index| assert_eq!(admit(index, 23), SlotIndex(0)), &[1, 2, 4], &[1, 2, 3, 4]);
}

#[test]
fn discarding_forgets_a_block_that_the_guest_does_not_have() {
    let prepare = |index: &mut CacheIndex<Mortal>| assert_eq!(admit(index, 22), SlotIndex(0));
    let change = |index: &mut CacheIndex<Mortal>| {
        admit(index, 23);
        assert_eq!(index.known(block(2)), None);
    };
    kill_everywhere(prepare, change, &[1, 4], &[1, 3, 4]);
}

#[test]
fn a_lost_page_leaves_its_block_to_a_node() {
    let prepare = |index: &mut CacheIndex<Mortal>| assert_eq!(admit(index, 22), SlotIndex(0));
    kill_everywhere(prepare, |index| index.drop_slot(SlotIndex(0)), &[1, 2, 3, 4], &[1, 2, 3, 4]);
    let drop_all = |index: &mut CacheIndex<Mortal>| {
        index.drop_all_slots();
        index.set_capacity(PageCount(1), |_| {});
    };
    // Killed in between, no slot is usable yet.
    let mut index = index(prepare);
    drop_all(&mut index);
    check(&index, &[1, 2, 3, 4], "all were dropped");
    assert_eq!(admit(&mut index, 22), SlotIndex(0));
}

#[test]
fn a_page_whose_block_was_forgotten_takes_another_one() {
    let prepare = |index: &mut CacheIndex<Mortal>| {
        admit(index, 21);
        let known = [1, 4].map(|bno| index.look_up(block(bno)).unwrap().0);
        assert!(known.contains(&EntryHint(0)), "one of them is known by the slot");
        index.forget(block(if known[0] == EntryHint(0) { 1 } else { 4 }));
    };
    let change = |index: &mut CacheIndex<Mortal>| {
        let left = if index.known(block(1)).is_some() { 1 } else { 4 };
        index.learn(block(left), content(21));
        assert_eq!(index.look_up(block(left)), Some((EntryHint(0), content(21))), "the slot knows it");
    };
    kill_everywhere(prepare, change, &[2, 3], &[2, 3]);
}

/// P6.
#[test]
fn a_gib_of_guest_and_a_gib_of_cache_take_at_most_18_mb() {
    let gib = PageCount(1 << 18);
    assert!(Layout::new(gib, gib, 128).words() * 4 <= 18_000_000);
}
