//! What the engine's events tell the miss-ratio curves.

use super::*;
use crate::curve::WINDOW_KEPT;

/// Returns how many hits a cache of 1, 2, 3 ... pages would have had, and the number of reads.
fn hits(bench: &mut Bench, disk: Option<DiskIndex>) -> Option<(Vec<u32>, u32)> {
    let sizes: Vec<_> = (1..=4).map(PageCount).collect();
    let report = bench.engine.curve(bench.now, disk, &sizes)?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole numbers below 100")]
    let whole = |number: f64| {
        assert!((number - number.round()).abs() < 1e-6, "{number}");
        number.round() as u32
    };
    let hits = report.miss_ratios.iter().map(|(ratio, error)| {
        assert!(*error < 1e-9, "every block is followed");
        whole((1. - ratio) * report.reads)
    });
    Some((hits.collect(), whole(report.reads)))
}

/// Reads a block wherever it is, and returns the number of pages that the server sent.
fn read(bench: &mut Bench, disk: DiskIndex, bno: u64, value: u8) -> u32 {
    let (mut actions, mut fetched) = (bench.request(0, disk, GuestOp::Read(blocks(bno, 1))), 0);
    while let Some(action) = actions.pop() {
        match action {
            Action::Disk { .. } => {
                actions.extend(bench.disk_done(0, Ok(()), &page(value)));
            }
            Action::Fetch { fetch, .. } => {
                bench.page_comes(fetch, value);
                fetched += 1;
                actions.extend(bench.actions());
            }
            _ => {}
        }
    }
    fetched
}

fn evict(bench: &mut Bench, value: u8) -> Evicted {
    let evicted = bench.engine.handle_evicted(&page(value));
    if let Evicted::Admit(_) = evicted {
        bench.engine.handle_sent(SERVER, 1);
    }
    evicted
}

#[test]
fn reads_from_disk_and_server_and_evictions_of_any_fate_make_the_curve() {
    let mut bench = Bench::connected();
    assert_eq!(hits(&mut bench, None), None);
    (1..=4).for_each(|bno| assert_eq!(read(&mut bench, DISK, bno.into(), bno), 0));
    let fates = [1, 2, 3, 1, 9].map(|value| std::mem::discriminant(&evict(&mut bench, value)));
    let taken = std::mem::discriminant(&Evicted::Admit(admitted(SlotIndex(0))));
    let [duplicate, unmatched] = [Evicted::Duplicate, Evicted::Unmatched].map(|fate| std::mem::discriminant(&fate));
    assert_eq!(fates, [taken, taken, taken, duplicate, unmatched]);
    // The queue is 1, 3, 2 now. Block 4 is still in the guest.
    assert_eq!(read(&mut bench, DISK, 3, 3), 1);
    assert_eq!(hits(&mut bench, None), Some((vec![0, 1, 1, 1], 5)));
    // What cannot be sent is evicted all the same.
    bench.disconnect();
    assert_eq!(evict(&mut bench, 4), Evicted::Dropped);
    assert_eq!(read(&mut bench, DISK, 4, 4), 0);
    assert_eq!(read(&mut bench, DISK, 2, 2), 0);
    assert_eq!(hits(&mut bench, None), Some((vec![1, 3, 3, 3], 7)));
    assert_eq!(hits(&mut bench, Some(DISK)), hits(&mut bench, None), "no other disk was read");
}

#[test]
fn zeroes_take_no_memory_and_parts_of_blocks_are_never_answered() {
    let mut bench = Bench::connected();
    read(&mut bench, DISK, 1, 0);
    assert_eq!(hits(&mut bench, None), Some((vec![0; 4], 1)), "it was not known to be zero");
    assert_eq!(evict(&mut bench, 0), Evicted::Zero);
    read(&mut bench, DISK, 1, 0);
    assert_eq!(hits(&mut bench, None), Some((vec![0; 4], 1)));
    let range = ByteRange { offset: 4096 * 5 + 512, length: 4096 };
    bench.do_from_disk(GuestOp::Read(range), &page(7));
    assert_eq!(hits(&mut bench, None), Some((vec![0; 4], 3)), "it touches two blocks");
}

/// Zeroes beside other blocks are told no more than alone.
#[test]
fn of_a_long_read_the_blocks_that_are_zero_are_not_told() {
    let mut bench = Bench::new(EngineConfig { has_port: false, ..config() });
    bench.connect(1, 8, 0);
    [(1, 1), (2, 0), (3, 3)].into_iter().for_each(|(bno, value)| _ = read(&mut bench, DISK, bno, value));
    bench.request(0, DISK, GuestOp::Read(blocks(1, 3)));
    // Block 1 is third in the queue, then block 3 second. With block 2 told it would be third as well.
    assert_eq!(hits(&mut bench, None), Some((vec![0, 1, 2, 2], 5)));
}

#[test]
fn an_overwritten_block_is_no_hit_until_it_is_evicted_again() {
    let mut bench = Bench::connected();
    for op in [write(blocks(1, 1)), GuestOp::Discard(blocks(2, 1)), write(ByteRange { offset: 3 * 4096, length: 512 })]
    {
        let bno = op.range().touched_blocks().start;
        let value = u8::try_from(bno).unwrap();
        read(&mut bench, DISK, bno, value);
        evict(&mut bench, value);
        let length = usize::try_from(op.range().length).unwrap();
        bench.do_from_disk(op, &page(50 + value)[..length]);
        read(&mut bench, DISK, bno, 50 + value);
    }
    assert_eq!(hits(&mut bench, None), Some((vec![0; 4], 6)));
    evict(&mut bench, 51);
    read(&mut bench, DISK, 1, 51);
    assert_eq!(hits(&mut bench, None), Some((vec![1; 4], 7)));
}

#[test]
fn a_page_written_to_swap_is_evicted_and_one_that_is_read_from_there_is_not() {
    for has_port in [true, false] {
        let mut bench = Bench::new(EngineConfig { has_port, ..config() });
        bench.connect(1, 8, 0);
        bench.engine.describe_disk(OTHER_DISK, 1 << 40, true);
        for bno in [1, 2] {
            bench.request(0, OTHER_DISK, write(blocks(bno, 1)));
            bench.disk_done(0, Ok(()), &page(u8::try_from(bno).unwrap()));
        }
        [1, 1].into_iter().for_each(|bno| _ = read(&mut bench, OTHER_DISK, bno, 1));
        assert_eq!(hits(&mut bench, None), Some((vec![0, 1, 1, 1], 2)), "{has_port}");
    }
}

#[test]
fn without_evictions_a_block_counts_as_evicted_when_it_is_read() {
    let mut bench = Bench::new(EngineConfig { has_port: false, ..config() });
    bench.connect(1, 8, 0);
    [1, 2, 3, 3, 1].into_iter().for_each(|bno| _ = read(&mut bench, DISK, bno.into(), bno));
    assert_eq!(hits(&mut bench, None), Some((vec![1, 1, 2, 2], 5)));
}

#[test]
fn a_second_disk_gives_both_a_curve_of_their_own() {
    let mut bench = Bench::connected();
    let [a, b] = [DISK, OTHER_DISK];
    read(&mut bench, a, 1, 1);
    evict(&mut bench, 1);
    assert_eq!(hits(&mut bench, Some(a)), hits(&mut bench, None), "they are one and the same");
    assert_eq!(hits(&mut bench, Some(b)), None);
    read(&mut bench, b, 1, 2);
    evict(&mut bench, 2);
    read(&mut bench, a, 1, 1);
    assert_eq!(hits(&mut bench, Some(a)), Some((vec![1; 4], 2)));
    assert_eq!(hits(&mut bench, Some(b)), Some((vec![0; 4], 1)));
    assert_eq!(hits(&mut bench, None), Some((vec![0, 1, 1, 1], 3)), "one cache for both");
    bench.engine.remove_disk(b);
    assert_eq!(hits(&mut bench, Some(b)), None);
    // Nothing of it is left in the way of others.
    evict(&mut bench, 1);
    read(&mut bench, a, 1, 1);
    assert_eq!(hits(&mut bench, None), Some((vec![1, 2, 2, 2], 4)));
}

#[test]
fn reads_of_parts_of_blocks_count_for_no_other_disk() {
    for part_first in [false, true] {
        let mut bench = of_disk_alone();
        for is_part in [part_first, !part_first] {
            if is_part {
                bench.request(0, OTHER_DISK, GuestOp::Read(ByteRange { offset: 512, length: 512 }));
                bench.disk_done(0, Ok(()), &[1; 512]);
            } else {
                read(&mut bench, DISK, 1, 1);
            }
            assert!(hits(&mut bench, None).is_some());
        }
        for disk in [DISK, OTHER_DISK] {
            assert_eq!(hits(&mut bench, Some(disk)), Some((vec![0; 4], 1)), "{part_first} {disk:?}");
        }
    }
}

/// The next one has nothing of its curve, whatever its number.
#[test]
fn the_curve_of_the_only_disk_goes_with_it() {
    for is_described in [false, true] {
        let mut bench = of_disk_alone();
        [1, 1].into_iter().for_each(|bno| _ = read(&mut bench, DISK, bno, 1));
        assert_eq!(hits(&mut bench, Some(DISK)), Some((vec![1; 4], 2)));
        bench.engine.remove_disk(DISK);
        assert_eq!(hits(&mut bench, Some(DISK)), None);
        bench.timer();
        let next = if is_described { DISK } else { OTHER_DISK };
        if is_described {
            bench.engine.describe_disk(DISK, 1 << 30, false);
        }
        read(&mut bench, next, 1, 1);
        assert_eq!(hits(&mut bench, Some(next)), Some((vec![0; 4], 1)));
        assert_eq!(hits(&mut bench, None), Some((vec![1; 4], 3)));
    }
}

/// What was looked at for reads of the former disk says nothing of it. Nobody asks for a curve in between.
#[test]
fn the_next_disk_of_a_number_has_a_curve_from_its_first_read() {
    let mut bench = of_disk_alone();
    read(&mut bench, DISK, 1, 1);
    bench.engine.remove_disk(DISK);
    bench.timer();
    bench.engine.describe_disk(DISK, 1 << 30, false);
    read(&mut bench, DISK, 1, 1);
    assert_eq!(hits(&mut bench, Some(DISK)), Some((vec![0; 4], 1)));
}

#[test]
fn of_many_disks_the_first_ones_have_curves() {
    let disks = 18;
    let mut bench = Bench::new(EngineConfig { disks, ..config() });
    (0..disks).for_each(|disk| bench.engine.describe_disk(DiskIndex(disk), 1 << 30, false));
    (0..disks).for_each(|disk| _ = read(&mut bench, DiskIndex(disk), 1, 1));
    let with_curve = (0..disks).filter(|disk| hits(&mut bench, Some(DiskIndex(*disk))).is_some());
    assert_eq!(with_curve.collect::<Vec<_>>(), (0..15).collect::<Vec<_>>());
    assert_eq!(hits(&mut bench, None).map(|(_, reads)| reads), Some(18));
}

#[test]
fn without_a_cache_contents_of_blocks_that_were_read_or_written_show_evictions() {
    let mut bench = Bench::new(EngineConfig { cache: PageCount(0), ..config() });
    assert!(bench.engine.is_ghost());
    for bno in 1..=60 {
        read(&mut bench, DISK, bno, u8::try_from(bno).unwrap());
    }
    bench.do_from_disk(write(blocks(61, 1)), &page(61));
    (1..=61).for_each(|value| assert_eq!(evict(&mut bench, value), Evicted::Dropped));
    let stats = bench.engine.stats();
    assert_eq!((stats.evictions_dropped, stats.evictions_unjudged), (61, 61), "nobody looked them up");
    [2, 61].into_iter().for_each(|bno| _ = read(&mut bench, DISK, bno, u8::try_from(bno).unwrap()));
    // One of eight evictions is seen if the agent follows the advice, so each stands for eight.
    assert_eq!(bench.engine.advice(), 8);
    let report = bench.engine.curve(bench.now, None, &[PageCount(0), PageCount(1 << 20)]).unwrap();
    assert_eq!((report.one_of, report.reads), (8, 62.));
    let [(first, _), (last, _)] = report.miss_ratios[..] else { panic!("{report:?}") };
    assert!(first == 1. && (last - (1. - 16. / 62.)).abs() < 1e-9, "{report:?}");
    assert_eq!(bench.engine.index().known_blocks(), PageCount(0), "no index is needed");
}

#[test]
fn without_a_cache_and_without_an_agent_reads_make_the_curve() {
    let mut bench = Bench::new(EngineConfig { cache: PageCount(0), has_port: false, ..config() });
    [1, 2, 3, 3, 1].into_iter().for_each(|bno| _ = read(&mut bench, DISK, bno.into(), bno));
    assert_eq!(hits(&mut bench, None), Some((vec![1, 1, 2, 2], 5)));
}

#[test]
fn curves_outlive_their_process() {
    let mut bench = Bench::connected();
    assert_eq!(bench.engine.curves_to_bytes(), []);
    let restart = |bench: &mut Bench, key| {
        let mut next = Bench::new(EngineConfig { key, ..config() });
        let restored = bench.engine.curves_to_bytes();
        let restored = restored.iter().try_for_each(|(disk, bytes)| next.engine.restore_curve(*disk, bytes));
        (next, restored.is_ok())
    };
    read(&mut bench, DISK, 1, 1);
    for disks in [1, 2] {
        evict(&mut bench, 1);
        read(&mut bench, DISK, 1, 1);
        let (mut next, is_restored) = restart(&mut bench, config().key);
        assert!(is_restored);
        for disk in [None, Some(DISK), Some(OTHER_DISK)] {
            assert_eq!(hits(&mut next, disk), hits(&mut bench, disk), "{disks} disks, {disk:?}");
        }
        read(&mut next, OTHER_DISK, 5, 5);
        assert_eq!(hits(&mut next, Some(DISK)), hits(&mut bench, Some(DISK)));
        read(&mut bench, OTHER_DISK, 5, 5);
    }
    let (mut next, is_restored) = restart(&mut bench, [8; 16]);
    assert!(!is_restored && hits(&mut next, None).is_none(), "the blocks of another key are others");
}

#[test]
fn curves_reach_as_far_as_twice_the_largest_cache() {
    let prints = Fingerprinter::new(&config().key);
    let new = |cache| Curves::new(&prints, PageCount(cache));
    let large = 1 << 24;
    let reaches = [(large - 1, large), (large, 2 * large), (3 * large, 6 * large), (64 * large, 64 * large)];
    for (cache, reach) in reaches {
        assert_eq!(new(cache).vm.curve.reach(), PageCount(reach), "{cache}");
    }
    let (mut curves, former) = (new(8), new(8).vm.curve.to_bytes());
    [4 * large, 8].into_iter().for_each(|cache| curves.resize(PageCount(cache)));
    [DISK, OTHER_DISK].into_iter().for_each(|disk| curves.begin_disk(disk));
    let mut all = std::iter::once(&curves.vm).chain(curves.disks.values());
    assert!(curves.disks.len() == 2 && all.all(|watched| watched.curve.reach() == PageCount(8 * large)));
    let former = curves.read(&former).unwrap();
    assert_eq!(former.reach(), PageCount(large), "it may have forgotten what is deeper");
    // A block that is followed stands for 65,536.
    let mut former = new(8).vm.curve;
    former.limit_rate(1. / 64.);
    former.see_one_of(1024);
    let mut former = curves.read(&former.to_bytes()).unwrap();
    (0..40_000).for_each(|bno| former.evicted(BlockId { disk: DISK, bno: BlockNumber(bno) }));
    assert!(former.reach() > PageCount(large), "{:?} is as far as it followed before", former.reach());

    let mut bench = Bench::connected();
    read(&mut bench, DISK, 1, 1);
    bench.engine.resize(bench.now, PageCount(large), PageCount(0));
    assert_eq!(bench.engine.curve(bench.now, None, &[]).unwrap().reach, PageCount(2 * large));
}

/// Returns a bench without cache and agent: the disk answers each read.
fn of_disk_alone() -> Bench {
    Bench::new(EngineConfig { cache: PageCount(0), has_port: false, ..config() })
}

/// Of the disk that was read last fewer blocks are followed than of the other one.
#[test]
fn what_is_done_to_another_disk_than_was_read_last_is_told_to_its_curve() {
    let mut bench = of_disk_alone();
    (0..40_000).for_each(|bno| _ = read(&mut bench, DISK, bno, 1));
    (1..=50).for_each(|bno| _ = read(&mut bench, OTHER_DISK, bno, 1));
    read(&mut bench, DISK, 0, 1);
    for bno in 1..=50 {
        bench.request(0, OTHER_DISK, write(blocks(bno, 1)));
        bench.disk_done(0, Ok(()), &page(2));
    }
    (1..=50).for_each(|bno| _ = read(&mut bench, OTHER_DISK, bno, 2));
    let mut report = |disk| bench.engine.curve(bench.now, Some(disk), &[PageCount(1 << 20)]).unwrap();
    let (of_disk, of_other) = (report(DISK), report(OTHER_DISK));
    assert!(of_disk.rate < 0.2 && (of_other.rate - 1.).abs() < 1e-9, "{of_disk:?} {of_other:?}");
    assert!(of_other.miss_ratios[0].0 > 1. - 1e-9, "what was overwritten is no hit: {of_other:?}");
}

#[test]
fn windows_end_also_where_a_long_write_comes_before_64_events() {
    let mut bench = of_disk_alone();
    for round in 0..40 {
        for bno in 0..30 {
            bench.wait(100 * MS);
            read(&mut bench, DISK, round * 30 + bno, 1);
        }
        bench.do_from_disk(write(blocks(5000, 17)), &page(9).repeat(17));
    }
    let report = bench.engine.curve(bench.now, None, &[]).unwrap();
    assert_eq!(report.last_window.len(), 23);
    assert!(report.reads < 1200., "the reads of the window fade: {}", report.reads);
}

/// Each read is of another disk than the one before it. A window that ended only when somebody asks would take all reads with it.
#[test]
fn windows_end_also_where_two_disks_are_read_in_turn() {
    let mut bench = of_disk_alone();
    for bno in 0..800 {
        for disk in [DISK, OTHER_DISK] {
            bench.wait(100 * MS);
            read(&mut bench, disk, bno, 1);
        }
    }
    let report = bench.engine.curve(bench.now, None, &[]).unwrap();
    assert_eq!(report.last_window.len(), 23);
    assert!(report.reads > 1600. * WINDOW_KEPT + 100., "reads after the window count whole: {}", report.reads);
}

#[test]
fn the_first_window_begins_with_a_read() {
    let mut bench = of_disk_alone();
    (0..100).for_each(|bno| bench.do_from_disk(write(blocks(bno, 1)), &page(1)));
    assert!(bench.engine.curve(bench.now, None, &[]).is_none());
    bench.wait(3_600_000 * MS);
    (0..100).for_each(|bno| _ = read(&mut bench, DISK, bno, 1));
    bench.wait(2000 * MS);
    let rate = bench.engine.curve(bench.now, None, &[]).unwrap().reads_per_s.unwrap();
    assert!((1. ..=50.).contains(&rate), "{rate} reads each second");
}

#[test]
fn a_disk_that_was_only_written_has_no_curve() {
    let mut bench = Bench::connected();
    bench.request(0, OTHER_DISK, write(blocks(1, 1)));
    bench.disk_done(0, Ok(()), &page(1));
    read(&mut bench, DISK, 1, 1);
    assert_eq!(hits(&mut bench, Some(DISK)), Some((vec![0; 4], 1)));
    assert_eq!(hits(&mut bench, Some(OTHER_DISK)), None);
}

/// The engine finds out by itself that hardly anything of what the guest evicts is known.
#[test]
fn a_change_of_the_advice_is_followed_with_the_next_events() {
    let mut bench = Bench::connected();
    (0..4096).for_each(|_| assert_eq!(evict(&mut bench, 9), Evicted::Unmatched));
    assert_eq!(bench.engine.advice(), 4);
    read(&mut bench, DISK, 1, 1);
    assert_eq!(bench.engine.curve(bench.now, None, &[]).unwrap().one_of, 4);
}

/// Without an event in between, so that evictions that follow are taken for what they are.
#[test]
fn what_an_agent_says_and_a_cache_that_is_turned_off_are_followed_at_once() {
    let mut bench = Bench::connected();
    read(&mut bench, DISK, 1, 1);
    let mut one_of = |change: &dyn Fn(&mut Bench)| {
        change(&mut bench);
        bench.engine.curve(bench.now, None, &[]).unwrap().one_of
    };
    assert_eq!(one_of(&|_| ()), 1);
    assert_eq!(one_of(&|bench| bench.engine.handle_agent(CLASSES)), CLASSES);
    assert_eq!(one_of(&|bench| bench.engine.handle_agent(1)), 1);
    assert_eq!(one_of(&|bench| bench.engine.resize(bench.now, PageCount(0), PageCount(0))), 8);
}

/// A long discard, a disk that goes, and parts of blocks are no events of single blocks.
#[test]
fn what_is_done_to_many_blocks_comes_after_the_events_before_it() {
    let mut bench = Bench::connected();
    read(&mut bench, DISK, 1, 1);
    evict(&mut bench, 1);
    bench.do_from_disk(GuestOp::Discard(blocks(0, 17)), &[]);
    read(&mut bench, DISK, 1, 1);
    assert_eq!(hits(&mut bench, None), Some((vec![0; 4], 2)), "a long discard");

    let mut bench = Bench::connected();
    for (disk, value) in [(DISK, 1), (OTHER_DISK, 2)] {
        read(&mut bench, disk, 1, value);
        evict(&mut bench, value);
    }
    bench.engine.remove_disk(OTHER_DISK);
    read(&mut bench, DISK, 1, 1);
    assert_eq!(hits(&mut bench, None), Some((vec![1; 4], 3)), "a disk goes");
    assert_eq!(hits(&mut bench, Some(OTHER_DISK)), None);

    let mut bench = of_disk_alone();
    [DISK, OTHER_DISK].into_iter().for_each(|disk| _ = read(&mut bench, disk, 1, 1));
    bench.request(0, OTHER_DISK, GuestOp::Read(ByteRange { offset: 4096 * 5 + 512, length: 4096 }));
    bench.disk_done(0, Ok(()), &page(7));
    assert_eq!(hits(&mut bench, Some(DISK)), Some((vec![0; 4], 1)), "parts of blocks of the other disk");
    assert_eq!(hits(&mut bench, Some(OTHER_DISK)), Some((vec![0; 4], 3)));
}

/// The former process had a cache, and this one has none, so it sees one of eight evictions and can follow few blocks.
#[test]
fn curves_of_a_former_process_follow_what_this_one_sees_at_once() {
    let mut former = Bench::connected();
    for (disk, value) in [(DISK, 1), (OTHER_DISK, 2)] {
        read(&mut former, disk, 1, value);
        evict(&mut former, value);
    }
    let ghost = EngineConfig { cache: PageCount(0), guest_memory: PageCount(1 << 17), ..config() };
    let (mut fresh, mut next) = (Bench::new(ghost), Bench::new(ghost));
    let kept = former.engine.curves_to_bytes();
    assert_eq!(kept.len(), 3);
    kept.iter().for_each(|(disk, bytes)| next.engine.restore_curve(*disk, bytes).unwrap());
    read(&mut fresh, DISK, 1, 1);
    let wanted = fresh.engine.curve(fresh.now, None, &[]).unwrap();
    assert!(wanted.rate <= 0.25 && wanted.one_of == 8, "{wanted:?}");
    for disk in [None, Some(DISK), Some(OTHER_DISK)] {
        let report = next.engine.curve(next.now, disk, &[]).unwrap();
        assert_eq!((report.rate, report.one_of), (wanted.rate, 8), "{disk:?}");
    }
}

/// Returns the share of the blocks that the curve of a disk follows, and for how many evictions one stands.
fn seen(bench: &mut Bench, disk: Option<DiskIndex>) -> (f64, u32) {
    let report = bench.engine.curve(bench.now, disk, &[]).unwrap();
    (report.rate, report.one_of)
}

#[test]
fn the_curve_of_a_disk_that_is_read_later_follows_what_the_others_do() {
    let (both, third) = ([None, Some(DISK), Some(OTHER_DISK)], DiskIndex(2));
    let ghost = EngineConfig { disks: 3, cache: PageCount(0), guest_memory: PageCount(1 << 17), ..config() };
    let mut bench = Bench::new(ghost);
    bench.engine.describe_disk(third, 1 << 30, false);
    [DISK, OTHER_DISK].into_iter().for_each(|disk| _ = read(&mut bench, disk, 1, 1));
    assert_eq!(both.map(|disk| seen(&mut bench, disk)), [(0.25, 8); 3], "one of eight evictions, and few blocks");
    bench.engine.resize(bench.now, PageCount(1), PageCount(0));
    read(&mut bench, third, 1, 1);
    assert_eq!(seen(&mut bench, Some(third)), (1., 1), "nothing bounds it any more");
    assert_eq!(both.map(|disk| seen(&mut bench, disk).1), [1; 3]);

    let mut bench = Bench::connected();
    read(&mut bench, DISK, 1, 1);
    bench.engine.handle_agent(CLASSES);
    read(&mut bench, OTHER_DISK, 1, 1);
    for classes in [CLASSES, 1] {
        bench.engine.handle_agent(classes);
        assert_eq!(both.map(|disk| seen(&mut bench, disk).1), [classes; 3]);
    }
}

#[test]
fn where_no_contents_are_noted_every_block_may_be_followed() {
    for (cache, has_port, rate) in [(0, true, 0.25), (0, false, 1.), (8, true, 1.), (8, false, 1.)] {
        let config = EngineConfig { cache: PageCount(cache), has_port, guest_memory: PageCount(1 << 17), ..config() };
        let mut bench = Bench::new(config);
        read(&mut bench, DISK, 1, 1);
        assert_eq!(seen(&mut bench, None).0, rate, "{cache} {has_port}");
    }
}

/// The index, which is not in use, is made for a smaller one.
#[test]
fn without_a_cache_the_guest_is_as_large_as_is_said() {
    let mut bench = Bench::new(EngineConfig { cache: PageCount(0), ..config() });
    read(&mut bench, DISK, 1, 1);
    assert_eq!(seen(&mut bench, None), (1., 8));
    bench.engine.set_guest_memory(PageCount(1 << 17));
    assert_eq!(seen(&mut bench, None), (0.25, 8));
    (100..200).for_each(|bno| _ = read(&mut bench, DISK, bno, 1));
    assert_eq!(bench.engine.status().admission, Admission::Evictions, "it may hold all that it read");
    bench.engine.set_guest_memory(PageCount(64));
    read(&mut bench, DISK, 1, 1);
    assert_eq!(bench.engine.status().admission, Admission::Reads, "a page of it was evicted, and not sent");
    read(&mut bench, OTHER_DISK, 1, 1);
    assert_eq!(seen(&mut bench, Some(OTHER_DISK)).0, 1., "no contents are noted");
}

/// Those of all blocks that its own curve follows, which may be more than the VM's does. Zeroes take no memory.
#[test]
fn without_a_cache_the_curve_of_a_disk_gets_its_evictions() {
    let mut bench = Bench::new(EngineConfig { cache: PageCount(0), guest_memory: PageCount(1024), ..config() });
    [DISK, OTHER_DISK].into_iter().for_each(|disk| _ = read(&mut bench, disk, 99, 99));
    assert_eq!(seen(&mut bench, Some(OTHER_DISK)), (1., 8));
    bench.engine.curves.vm.curve.limit_rate(1. / 256.);
    for bno in 0..=60 {
        read(&mut bench, OTHER_DISK, bno.into(), bno);
    }
    (0..=60).for_each(|value| assert_eq!(evict(&mut bench, value), Evicted::Dropped));
    assert_eq!(seen(&mut bench, Some(OTHER_DISK)), (1., 8));
    assert_eq!(bench.engine.curves.disks[&OTHER_DISK].curve.followed(), 60);
    (1..=60).for_each(|bno| _ = read(&mut bench, OTHER_DISK, bno.into(), bno));
    assert_eq!(bench.engine.curves.disks[&OTHER_DISK].curve.followed(), 0, "and its reads");
}

/// The VM's curve may follow more blocks of a disk than the disk's own does.
#[test]
fn the_curve_of_the_vm_gets_what_that_of_a_disk_leaves_out() {
    let mut bench = of_disk_alone();
    [DISK, OTHER_DISK].into_iter().for_each(|disk| _ = read(&mut bench, disk, 99, 99));
    bench.engine.curves.disks.get_mut(&OTHER_DISK).unwrap().curve.limit_rate(1. / 256.);
    bench.engine.curves.look_again();
    (0..60).for_each(|bno| _ = read(&mut bench, OTHER_DISK, bno, 1));
    assert_eq!(bench.engine.curves.vm.curve.followed(), 62);
}

#[test]
fn curves_can_be_turned_off() {
    let mut bench = Bench::connected();
    bench.engine.keep_curves(false);
    read(&mut bench, DISK, 1, 1);
    evict(&mut bench, 1);
    bench.do_from_disk(GuestOp::Read(ByteRange { offset: 512, length: 512 }), &[1; 512]);
    assert_eq!(hits(&mut bench, None), None);
    bench.engine.resize(bench.now, PageCount(0), PageCount(0));
    assert_eq!(bench.engine.advice(), 1024, "nobody needs what the guest evicts");
}
