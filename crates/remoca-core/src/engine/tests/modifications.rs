//! What is still known after writes, discards, failures and overlaps, and what flushes promise.

use super::*;

#[test]
fn a_write_is_unreachable_until_the_disk_has_it() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    let op = write(blocks(3, 1));
    assert_eq!(bench.request(0, DISK, op), [disk_action(0, op)]);
    assert!(!bench.known(3));
    assert_eq!(bench.read(1, blocks(3, 1)), [disk_action(1, GuestOp::Read(blocks(3, 1)))]);
    assert_eq!(bench.disk_done(0, Ok(()), &page(2)), [complete(0)]);
    assert!(bench.known(3) && !bench.cached(3));
    // The read began while the write was in flight: whatever it returns teaches nothing.
    assert_eq!(bench.disk_done(1, Ok(()), &page(1)), [complete(1)]);
    assert!(!bench.cached(3));
    assert!(matches!(bench.engine.handle_evicted(&page(2)), Evicted::Admit(_)));
}

#[test]
fn a_read_that_a_write_overlapped_teaches_nothing_however_late_it_is() {
    let mut bench = Bench::connected();
    let op = write(ByteRange { offset: 3 * 4096, length: 512 });
    bench.read(0, blocks(3, 1));
    bench.request(1, DISK, op);
    bench.disk_done(1, Ok(()), &[2; 512]);
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [complete(0)]);
    assert!(!bench.known(3));
}

#[test]
fn writes_that_overlap_teach_nothing() {
    let mut bench = Bench::connected();
    bench.request(0, DISK, write(blocks(3, 2)));
    bench.request(1, DISK, write(blocks(4, 1)));
    bench.disk_done(0, Ok(()), &[page(1), page(1)].concat());
    bench.disk_done(1, Ok(()), &page(2));
    assert!(!bench.known(3), "the whole write counts for nothing");
    assert!(!bench.known(4));
    bench.do_from_disk(GuestOp::Read(blocks(4, 1)), &page(1));
    assert!(bench.known(4));
}

#[test]
fn neighbours_that_are_in_flight_together_do_not_overlap() {
    let mut bench = Bench::connected();
    bench.request(0, DISK, write(blocks(3, 1)));
    bench.read(1, blocks(2, 1));
    bench.read(2, blocks(4, 1));
    for (id, value) in [(1, 2), (2, 4), (0, 3)] {
        assert_eq!(bench.disk_done(id, Ok(()), &page(value)), [complete(id)]);
    }
    assert!((2..5).all(|bno| bench.known(bno)));
    // In the other order.
    bench.read(1, blocks(12, 1));
    bench.read(2, blocks(14, 1));
    bench.request(0, DISK, write(blocks(13, 1)));
    for (id, value) in [(1, 12), (2, 14), (0, 13)] {
        assert_eq!(bench.disk_done(id, Ok(()), &page(value)), [complete(id)]);
    }
    assert!((12..15).all(|bno| bench.known(bno)));
}

#[test]
fn the_same_block_of_another_disk_is_another_block() {
    let mut bench = Bench::connected();
    bench.request(0, DISK, write(blocks(3, 1)));
    bench.request(1, OTHER_DISK, write(blocks(3, 1)));
    bench.disk_done(0, Ok(()), &page(1));
    bench.disk_done(1, Ok(()), &page(2));
    assert!(bench.known(3));
    assert!(matches!(bench.engine.handle_evicted(&page(1)), Evicted::Admit(_)));
    assert!(matches!(bench.engine.handle_evicted(&page(2)), Evicted::Admit(_)));
}

#[test]
fn a_write_of_part_of_a_block_leaves_it_unknown() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.cache(5, 3);
    let op = write(ByteRange { offset: 3 * 4096 + 512, length: 2 * 4096 });
    bench.request(0, DISK, op);
    bench.disk_done(0, Ok(()), &[9; 2 * 4096]);
    assert!(!bench.known(3) && !bench.known(5), "touched in part");
    assert!(bench.known(4), "covered whole");
    assert!(matches!(bench.engine.handle_evicted(&page(9)), Evicted::Admit(_)));
}

#[test]
fn a_failed_write_leaves_its_blocks_unknown() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.request(0, DISK, write(blocks(3, 1)));
    assert_eq!(bench.disk_done(0, Err(EIO), &page(2)), [fail(0)]);
    assert!(!bench.known(3));
    assert_eq!(bench.engine.stats().disk_errors, 1);
}

#[test]
fn a_failed_read_teaches_nothing_and_reaches_the_guest() {
    let mut bench = Bench::connected();
    bench.read(0, blocks(3, 1));
    assert_eq!(bench.disk_done(0, Err(EIO), &page(2)), [fail(0)]);
    assert!(!bench.known(3));
}

#[test]
fn a_discard_leaves_unknown_and_write_zeroes_leaves_zero() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.do_from_disk(GuestOp::Discard(blocks(3, 1)), &[]);
    assert!(!bench.known(3));
    let part = ByteRange { offset: 3 * 4096, length: 4096 + 512 };
    bench.do_from_disk(GuestOp::WriteZeroes { range: part, may_unmap: false, durable: false }, &[]);
    assert!(bench.known(3) && !bench.known(4));
}

/// A long one comes in many pieces, and each would push out as much.
#[test]
fn a_long_write_zeroes_makes_nothing_known() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    let zeroes = |range| GuestOp::WriteZeroes { range, may_unmap: true, durable: false };
    bench.do_from_disk(zeroes(blocks(8, 1025)), &[]);
    assert!(bench.known(3) && !bench.known(8) && !bench.known(1032));
    bench.do_from_disk(zeroes(blocks(8, 1024)), &[]);
    assert!(bench.known(1031));
}

#[test]
fn a_discard_of_everything_costs_no_more_than_what_is_known() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.do_from_disk(GuestOp::Discard(blocks(0, 1 << 28)), &[]);
    assert!(!bench.known(3));
}

#[test]
fn a_failed_flush_stays_failed_for_its_disk() {
    let mut bench = Bench::connected();
    assert_eq!(bench.request(0, DISK, GuestOp::Flush), [disk_action(0, GuestOp::Flush)]);
    assert_eq!(bench.disk_done(0, Err(EIO), &[]), [fail(0)]);
    bench.request(0, DISK, GuestOp::Flush);
    assert_eq!(bench.disk_done(0, Ok(()), &[]), [fail(0)], "what was lost does not come back");
    bench.request(0, OTHER_DISK, GuestOp::Flush);
    assert_eq!(bench.disk_done(0, Ok(()), &[]), [complete(0)]);
}

/// Whether the rest is forgotten by then or not.
#[test]
fn an_uncertain_disk_is_forgotten_with_all_that_is_under_way() {
    for is_forgotten in [false, true] {
        let mut bench = Bench::connected();
        bench.cache(3, 1);
        bench.read(0, blocks(4, 1));
        bench.request(1, DISK, write(blocks(5, 1)));
        bench.engine.handle_content_uncertain(DISK);
        if is_forgotten {
            bench.timer();
            bench.do_from_disk(GuestOp::Read(blocks(6, 1)), &page(4));
            assert!(bench.known(6), "what begins now is known");
        }
        bench.disk_done(0, Ok(()), &page(2));
        bench.disk_done(1, Ok(()), &page(3));
        assert!((3..6).all(|bno| !bench.known(bno)), "{is_forgotten}");
    }
}

/// An image that is made larger again holds zeroes there. Whether what was cut off is forgotten by then or not.
#[test]
fn what_was_beyond_a_cut_is_not_believed_when_the_disk_is_larger_again() {
    for is_forgotten in [false, true] {
        let mut bench = Bench::connected();
        bench.cache(3, 1);
        bench.do_from_disk(GuestOp::Read(blocks(602, 1)), &page(4));
        bench.read(0, blocks(600, 1));
        bench.request(1, DISK, write(blocks(601, 1)));
        bench.engine.resize_disk(DISK, 600 * 4096);
        if is_forgotten {
            bench.timer();
        }
        bench.engine.resize_disk(DISK, 1 << 40);
        bench.disk_done(0, Ok(()), &page(2));
        bench.disk_done(1, Ok(()), &page(3));
        assert!((600..603).all(|bno| !bench.known(bno)), "{is_forgotten}");
        assert!(bench.known(3), "{is_forgotten}");
    }
}

/// A device may return different data for a discarded block on each read.
#[test]
fn a_discarded_block_that_reads_differently_each_time_leaves_the_cache_alone() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    let part = ByteRange { offset: 5 * 4096 + 512, length: 512 };
    for range in [blocks(4, 1), part] {
        bench.do_from_disk(GuestOp::Discard(range), &[]);
        let block = range.offset / 4096;
        for value in [2, 5, 2, 6] {
            bench.do_from_disk(GuestOp::Read(blocks(block, 1)), &page(value));
        }
    }
    assert!(bench.cached(3));
    assert_eq!(bench.engine.stats().foreign_writes, 0);
    // A write afterwards determines what the disk holds.
    bench.do_from_disk(write(blocks(4, 1)), &page(7));
    bench.read(0, blocks(4, 1));
    assert_eq!(bench.disk_done(0, Ok(()), &page(8)), [Action::ForeignWriter(DISK), complete(0)]);
    assert!(!bench.cached(3));
}

/// Only a write of the whole block, which nothing overlapped, determines its content.
#[test]
fn a_discarded_block_stays_uncertain_until_it_is_known_what_it_holds() {
    let mut bench = Bench::connected();
    bench.do_from_disk(GuestOp::Discard(blocks(4, 1)), &[]);
    bench.do_from_disk(write(ByteRange { offset: 4 * 4096, length: 512 }), &[7; 512]);
    bench.request(1, DISK, write(blocks(4, 1)));
    bench.disk_done(1, Err(EIO), &page(1));
    for value in [2, 5] {
        bench.do_from_disk(GuestOp::Read(blocks(4, 1)), &page(value));
    }
    bench.request(1, DISK, write(blocks(4, 1)));
    bench.request(2, DISK, GuestOp::Discard(blocks(4, 1)));
    bench.disk_done(2, Ok(()), &[]);
    bench.disk_done(1, Ok(()), &page(1));
    for value in [2, 5] {
        bench.do_from_disk(GuestOp::Read(blocks(4, 1)), &page(value));
    }
    assert_eq!(bench.engine.stats().foreign_writes, 0);
}

#[test]
fn somebody_else_who_writes_to_the_image_empties_the_cache() {
    let mut bench = Bench::connected();
    bench.cache(3, 1);
    bench.do_from_disk(GuestOp::Read(blocks(4, 1)), &page(2));
    bench.read(0, blocks(4, 1));
    assert_eq!(bench.disk_done(0, Ok(()), &page(5)), [Action::ForeignWriter(DISK), complete(0)]);
    assert!(!bench.known(3) && !bench.cached(3) && !bench.known(4));
    assert_eq!(bench.engine.stats().foreign_writes, 1);
}

/// A read that takes long may bring what was there before somebody else wrote.
#[test]
fn what_is_on_its_way_when_somebody_else_is_found_is_not_learnt() {
    let mut bench = Bench::connected();
    bench.do_from_disk(GuestOp::Read(blocks(4, 1)), &page(2));
    for (id, disk) in [(1, DISK), (2, DISK), (3, OTHER_DISK)] {
        bench.request(id, disk, GuestOp::Read(blocks(4, 1)));
    }
    assert_eq!(bench.disk_done(1, Ok(()), &page(5)), [Action::ForeignWriter(DISK), complete(1)]);
    for id in [2, 3] {
        assert_eq!(bench.disk_done(id, Ok(()), &page(2)), [complete(id)]);
    }
    assert_eq!(bench.engine.index().known_blocks(), PageCount(0));
    bench.do_from_disk(GuestOp::Read(blocks(4, 1)), &page(5));
    assert!(bench.known(4));
    assert_eq!(bench.engine.stats().foreign_writes, 1);
}
