//! Swap areas: how they are recognised and forgotten, and which of their pages are admitted.

use super::*;

/// Returns the first page of an area whose last page is `last`, as mkswap writes it.
fn header(last: u32) -> Vec<u8> {
    let mut page = page(0);
    page[1024..1028].copy_from_slice(&1_u32.to_le_bytes());
    page[1028..1032].copy_from_slice(&last.to_le_bytes());
    page[4086..].copy_from_slice(b"SWAPSPACE2");
    page
}

/// Returns a disk of 1000 blocks with an area in blocks 10 .. 30, whose header the guest has read.
fn swapping() -> Bench {
    let mut bench = Bench::connected();
    bench.engine.describe_disk(DISK, 1000 * 4096, false);
    bench.do_from_disk(GuestOp::Read(blocks(10, 1)), &header(19));
    assert_eq!(bench.engine.swap_areas(DISK), 1);
    bench
}

/// Writes `value` to block `bno`. Returns whether it is admitted, which happens before the guest hears of the write.
fn swap_out(bench: &mut Bench, bno: u64, value: u8) -> bool {
    bench.request(0, DISK, write(blocks(bno, 1)));
    let actions = bench.disk_done(0, Ok(()), &page(value));
    match actions[..] {
        [Action::SendBlock { request: RequestId(0), offset: 0, .. }, done] => done == complete(0),
        [done] => {
            assert_eq!(done, complete(0));
            false
        }
        _ => panic!("{actions:?}"),
    }
}

#[test]
fn a_page_written_to_swap_is_admitted_as_the_newest() {
    let mut bench = swapping();
    bench.cache(500, 99);
    assert!(swap_out(&mut bench, 11, 1));
    assert!(swap_out(&mut bench, 29, 2));
    assert!(!swap_out(&mut bench, 30, 3), "beyond the last page");
    assert!(!swap_out(&mut bench, 9, 3), "before the header");
    assert!(!swap_out(&mut bench, 12, 0), "zeroes need no memory");
    let newest = bench.engine.index().queue(POOL).last().map(|(slot, _)| slot);
    let known = bench.engine.index().known(BlockId { disk: DISK, bno: BlockNumber(29) });
    assert_eq!(newest, known.and_then(|content| bench.engine.index().cached(content)));
    assert_eq!((bench.engine.stats().swap_admissions, bench.engine.stats().swap_dropped), (2, 0));
    // Swapped in, and dropped clean: it is cached again.
    for _ in 0..2 {
        let fetch = only_fetch(&bench.read(0, blocks(11, 1)));
        assert_eq!(bench.page_comes(fetch, 1), deliver(0, 0));
        assert_eq!(bench.actions(), [complete(0)]);
    }
    let oldest = bench.engine.index().queue(POOL).next().map(|(slot, _)| slot);
    let known = bench.engine.index().known(BlockId { disk: DISK, bno: BlockNumber(11) });
    assert_eq!(oldest, known.and_then(|content| bench.engine.index().cached(content)));
}

#[test]
fn a_page_that_is_cached_already_becomes_the_newest_without_a_send() {
    let mut bench = swapping();
    let window = u8::try_from(config().send_window).unwrap();
    for value in 1..=window {
        assert!(swap_out(&mut bench, 11 + u64::from(value % 8), value));
    }
    let oldest = window - 7;
    let block = 11 + u64::from(oldest % 8);
    assert!(bench.cached(block), "eight pages are cached");
    assert!(!swap_out(&mut bench, block, oldest) && !swap_out(&mut bench, 29, 99), "there is no room on the way");
    assert_eq!(bench.engine.stats().swap_dropped, 1, "only what is not cached already has to be sent");
    let known = bench.engine.index().known(BlockId { disk: DISK, bno: BlockNumber(block) });
    let newest = bench.engine.index().queue(POOL).last().map(|(slot, _)| slot);
    assert_eq!(newest, known.and_then(|content| bench.engine.index().cached(content)));
}

#[test]
fn every_block_that_a_write_covers_is_one_page() {
    let mut bench = swapping();
    let range = ByteRange { offset: 12 * 4096 - 512, length: 2 * 4096 + 1024 };
    bench.request(0, DISK, write(range));
    let data = [&page(7)[..512], &page(1), &page(2), &page(7)[..512]].concat();
    let actions = bench.disk_done(0, Ok(()), &data);
    let send = |slot, offset| Action::SendBlock { admitted: admitted(SlotIndex(slot)), request: RequestId(0), offset };
    assert_eq!(actions, [send(0, 512), send(1, 512 + 4096), complete(0)]);
    assert!(!bench.known(11) && !bench.known(14), "covered in part");
}

#[test]
fn failed_and_overlapped_writes_admit_nothing() {
    let mut bench = swapping();
    bench.request(0, DISK, write(blocks(11, 1)));
    assert_eq!(bench.disk_done(0, Err(EIO), &page(1)), [fail(0)]);
    bench.request(0, DISK, write(blocks(11, 1)));
    bench.request(1, DISK, write(blocks(11, 1)));
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [complete(0)]);
    assert_eq!(bench.disk_done(1, Ok(()), &page(2)), [complete(1)]);
    assert_eq!(bench.engine.stats().swap_admissions, 0);
}

#[test]
fn an_area_is_forgotten_when_its_first_page_is_something_else() {
    for modification in [
        write(blocks(10, 1)),
        write(ByteRange { offset: 10 * 4096, length: 512 }),
        GuestOp::Discard(blocks(0, 1000)),
        GuestOp::WriteZeroes { range: blocks(10, 1), may_unmap: false, durable: false },
    ] {
        let mut bench = swapping();
        bench.request(0, DISK, modification);
        assert_eq!(bench.engine.swap_areas(DISK), 0, "already while it is under way");
        let data = if let GuestOp::Write { range, .. } = modification {
            vec![1; usize::try_from(range.length).unwrap()]
        } else {
            vec![]
        };
        bench.disk_done(0, Ok(()), &data);
        assert_eq!(bench.engine.swap_areas(DISK), 0);
        assert!(!swap_out(&mut bench, 11, 1));
    }
    // The header is written again, with another size.
    let mut bench = swapping();
    bench.do_from_disk(write(blocks(10, 1)), &header(5));
    assert!(swap_out(&mut bench, 15, 1));
    assert!(!swap_out(&mut bench, 16, 2));
    // Other content, in the middle of a large write.
    bench.do_from_disk(write(ByteRange { offset: 8 * 4096, length: 100 * 512 }), &[1; 100 * 512]);
    assert_eq!(bench.engine.swap_areas(DISK), 0);
}

#[test]
fn only_a_sensible_header_is_one() {
    let mut version = header(19);
    version[1024] = 2;
    let mut signature = header(19);
    signature[4095] = b'1';
    for (bno, page) in [(10, version), (10, signature), (10, header(0)), (981, header(19)), (0, header(u32::MAX))] {
        let mut bench = Bench::connected();
        bench.engine.describe_disk(DISK, 1000 * 4096, false);
        bench.do_from_disk(GuestOp::Read(blocks(bno, 1)), &page);
        assert_eq!(bench.engine.swap_areas(DISK), 0);
    }
    let mut bench = Bench::connected();
    bench.engine.describe_disk(DISK, 1000 * 4096, false);
    bench.do_from_disk(GuestOp::Read(blocks(980, 1)), &header(19));
    assert_eq!(bench.engine.swap_areas(DISK), 1, "to the last block of the disk");
    assert_eq!(bench.engine.swap_areas(OTHER_DISK), 0);
}

#[test]
fn a_disk_full_of_headers_is_no_burden() {
    let mut bench = Bench::connected();
    for bno in 0..100 {
        bench.do_from_disk(write(blocks(bno, 1)), &header(1));
    }
    assert_eq!(bench.engine.swap_areas(DISK), 8);
}

#[test]
fn a_declared_area_needs_no_header_and_is_seen_while_the_cache_is_off() {
    let mut bench = Bench::connected();
    bench.engine.describe_disk(DISK, 1000 * 4096, true);
    assert!(swap_out(&mut bench, 0, 1));
    bench.engine.resize(bench.now, PageCount(0), PageCount(0));
    bench.grant();
    assert!(!swap_out(&mut bench, 1, 2));
    bench.engine.describe_disk(DISK, 1000 * 4096, false);
    bench.do_from_disk(GuestOp::Read(blocks(10, 1)), &header(19));
    bench.engine.resize(bench.now, PageCount(8), PageCount(0));
    bench.grant();
    assert!(swap_out(&mut bench, 11, 3));
}

#[test]
fn what_misses_is_kept_where_there_is_room() {
    let mut bench = swapping();
    bench.read(0, blocks(11, 1));
    let send = Action::SendBlock { admitted: admitted(SlotIndex(0)), request: RequestId(0), offset: 0 };
    assert_eq!(bench.disk_done(0, Ok(()), &page(1)), [send, complete(0)]);
    for value in 2..9 {
        assert!(swap_out(&mut bench, 10 + u64::from(value), value));
    }
    bench.read(0, blocks(25, 1));
    assert_eq!(bench.disk_done(0, Ok(()), &page(25)), [complete(0)], "for nothing that the guest gave up");
    assert!(bench.cached(11) && bench.known(25));
}
