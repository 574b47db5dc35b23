//! Disks that go or are cut, in an index whose process is killed between any two stores.

use super::layout::ENTRY_WORDS;
use super::resume_tests::{Mortal, layout, resume};
use super::tests::{ZERO, content, empty};
use super::*;
use crate::units::PoolSet;
use crate::units::{BlockNumber, DiskIndex};

const OLD: DiskIndex = DiskIndex(1);
const OTHER: DiskIndex = DiskIndex(0);
/// First block of the second granule: what a cut to 1 MiB makes void.
const BEYOND: u64 = 256;

fn block(disk: DiskIndex, bno: u64) -> BlockId {
    BlockId { disk, bno: BlockNumber(bno) }
}

/// Returns an index that knows block 1 of both disks, and other blocks of one only. Pages of some are cached.
fn index<M: Words>(words: M) -> CacheIndex<M> {
    let mut index = empty(words, layout());
    index.set_capacity(PageCount(4), |_| {});
    index.learn(block(OTHER, 1), content(1));
    for (bno, number) in [(1, 2), (2, 3), (BEYOND, 4), (BEYOND + 3, 5)] {
        index.learn(block(OLD, bno), content(number));
    }
    for number in [1, 2, 4] {
        assert!(matches!(index.offer(content(number), Place::Tail, PoolSet::ALL), Offer::Admitted(_)));
    }
    index
}

/// Checks that nothing is known of a disk but what was learnt of it. `kept` are the blocks of the old disk that must be
/// known, and `may` those that may be.
fn check<M: Words>(index: &CacheIndex<M>, kept: &[u64], may: &[u64], when: &str) {
    for bno in [0, 1, 2, 3, BEYOND, BEYOND + 3] {
        let known = index.known(block(OTHER, bno));
        assert_eq!(known, (bno == 1).then(|| content(1)), "{when}: block {bno} of the other disk");
        let known = index.known(block(OLD, bno)).is_some();
        assert!(known || !kept.contains(&bno), "{when}: block {bno} of the disk was forgotten");
        assert!(!known || kept.contains(&bno) || may.contains(&bno), "{when}: block {bno} is known again");
    }
}

/// Changes an index and kills the process before each of its stores, and before each store of the successor's rebuild.
fn kill_everywhere(change: impl Fn(&mut CacheIndex<Mortal>), kept: &[u64], before: &[u64]) {
    for stores in 0.. {
        let mut index = index(Mortal::new(vec![0; layout().words()], u32::MAX));
        index.words.stop_after(stores);
        change(&mut index);
        let (is_done, words) = index.words.end();
        let may = if is_done { &[] } else { before };
        for stores_of_successor in 0.. {
            let when = format!("killed before store {stores} and {stores_of_successor}");
            let successor = Mortal::new(words.clone(), stores_of_successor);
            let successor = CacheIndex::resume(successor, Origin::Own, 2, 7, ZERO).map_err(|u| u.reason).unwrap();
            let (is_up, words) = successor.words.end();
            check(&resume(words), kept, may, &when);
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
fn a_removed_disk_leaves_nothing_whenever_a_process_is_killed() {
    let remove = |index: &mut CacheIndex<Mortal>| {
        index.remove_disk(OLD);
        while index.is_cutting() {
            index.cut(3);
        }
        index.release_disk(OLD);
        index.take_up_disk(OLD, 1 << 30);
    };
    kill_everywhere(remove, &[], &[1, 2, BEYOND, BEYOND + 3]);
}

#[test]
fn a_cut_disk_keeps_its_first_part_alone_whenever_a_process_is_killed() {
    let cut = |index: &mut CacheIndex<Mortal>| {
        index.resize_disk(OLD, 1 << 20);
        while index.is_cutting() {
            index.cut(3);
        }
        index.resize_disk(OLD, 1 << 30);
    };
    kill_everywhere(cut, &[1, 2], &[BEYOND, BEYOND + 3]);
}

/// Tests a rebuild while the nodes of a removed disk are still there: they must not become nodes of another disk.
#[test]
fn a_rebuild_that_is_killed_gives_no_void_node_to_another_disk() {
    kill_everywhere(|index| index.remove_disk(OLD), &[], &[1, 2, BEYOND, BEYOND + 3]);
    kill_everywhere(|index| assert_eq!(index.cut_disk(OLD, BEYOND), BEYOND), &[1, 2], &[BEYOND, BEYOND + 3]);
}

/// The VM may migrate in the middle of the pass. Its index is taken as it is.
#[test]
fn what_is_not_forgotten_yet_when_an_index_moves_to_another_process_is_forgotten_there() {
    let pairs = [OTHER, OLD].map(|disk| (disk, disk));
    for examined in 0..layout().entry_limit().0 {
        let mut index = index(vec![0; layout().words()]);
        index.cut_disk(OLD, BEYOND);
        index.cut(examined);
        let mut words = index.closed_head();
        words.extend_from_slice(&index.words[words.len()..]);
        let moved = CacheIndex::resume(words, Origin::Peer(&pairs), 2, 7, ZERO);
        let mut moved = moved.map_err(|unusable| unusable.reason).unwrap();
        assert!(moved.was_closed() && moved.is_cutting() && moved.first_void(OLD) == Some(BEYOND));
        moved.cut(u32::MAX);
        check(&moved, &[1, 2], &[], &format!("after {examined} entries"));
    }
}

/// The pass has passed over what a disk that comes meanwhile has learnt.
#[test]
fn what_was_learnt_while_everything_is_forgotten_is_dropped_with_the_rest() {
    let mut index = index(vec![0; layout().words()]);
    index.remove_disk(OTHER);
    index.cut(u32::MAX);
    index.release_disk(OTHER);
    index.drop_everything();
    index.cut(index.layout().entry_limit().0 - 1);
    assert!(index.is_cutting(), "one entry is left");
    index.take_up_disk(OTHER, 1 << 30);
    for (bno, number) in [(1, 11), (2, 12)] {
        index.learn(block(OTHER, bno), content(number));
    }
    index.drop_everything();
    index.cut(u32::MAX);
    assert!(!index.is_cutting());
    assert_eq!(index.known_blocks(), PageCount(0));
}

/// A disk that is cut further while it is being cut.
#[test]
fn what_was_learnt_before_a_second_cut_is_forgotten() {
    let mut index = index(vec![0; layout().words()]);
    assert_eq!(index.cut_disk(OLD, BEYOND), BEYOND);
    index.cut(index.layout().entry_limit().0 - 1);
    for (bno, number) in [(3, 13), (5, 15)] {
        index.learn(block(OLD, bno), content(number));
    }
    assert_eq!(index.cut_disk(OLD, 0), 0);
    index.cut(u32::MAX);
    assert_eq!(index.known_blocks(), PageCount(1), "of the other disk");
    assert_eq!(index.known(block(OTHER, 1)), Some(content(1)));
}

/// The pass has passed over nearly all of it by then.
#[test]
fn what_is_known_of_a_disk_that_goes_or_is_cut_after_another_one_is_forgotten() {
    for goes in [false, true] {
        let mut index = index(vec![0; layout().words()]);
        index.cut_disk(OLD, 0);
        index.cut(index.layout().entry_limit().0 - 1);
        assert!(index.is_cutting(), "one entry is left");
        if goes {
            index.remove_disk(OTHER);
        } else {
            index.cut_disk(OTHER, 0);
        }
        index.cut(u32::MAX);
        assert_eq!(index.known_blocks(), PageCount(0), "{goes}");
    }
}

/// What is behind the last entry is none, whatever it holds.
#[test]
fn a_pass_ends_with_the_last_entry() {
    let behind = layout().entries_at() + layout().entry_limit().0 as usize * ENTRY_WORDS;
    let behind = behind..layout().key_lines_at();
    assert!(behind.len() >= ENTRY_WORDS);
    for turn in [1, 7, u32::MAX] {
        let mut index = index(vec![0; layout().words()]);
        index.words[behind.clone()].fill(u32::MAX);
        index.drop_everything();
        while index.is_cutting() {
            index.cut(turn);
        }
        assert_eq!(index.known_blocks(), PageCount(0));
        assert!(index.words[behind.clone()].iter().all(|word| *word == u32::MAX));
    }
}

/// The page of such a block comes. Its slot, which knows no block, was examined already.
#[test]
fn a_slot_takes_over_no_block_that_is_being_forgotten() {
    let mut index = index(vec![0; layout().words()]);
    index.learn(block(OLD, 5), content(1));
    index.forget(block(OTHER, 1));
    let (hint, _) = index.look_up(block(OLD, 5)).unwrap();
    let slot = index.cached(content(1)).unwrap();
    index.cut_disk(OLD, 0);
    index.cut(slot.0 + 1);
    index.hit(hint, block(OLD, 5), slot, true);
    index.cut(u32::MAX);
    assert_eq!((index.known_blocks(), index.cached(content(1))), (PageCount(0), Some(slot)));
}
