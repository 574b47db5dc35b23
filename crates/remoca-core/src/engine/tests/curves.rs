//! What the engine's events tell the miss-ratio curves.

use super::*;

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

    let mut bench = Bench::connected();
    read(&mut bench, DISK, 1, 1);
    bench.engine.resize(bench.now, PageCount(large), PageCount(0));
    assert_eq!(bench.engine.curve(bench.now, None, &[]).unwrap().reach, PageCount(2 * large));
}

#[test]
fn curves_can_be_turned_off() {
    let mut bench = Bench::connected();
    bench.engine.keep_curves(false);
    read(&mut bench, DISK, 1, 1);
    evict(&mut bench, 1);
    assert_eq!(hits(&mut bench, None), None);
}
