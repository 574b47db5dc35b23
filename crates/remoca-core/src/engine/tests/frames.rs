//! A guest without an agent: what its frames held before reads overwrite them.

use super::super::policy::CLASSES;
use super::*;

fn agentless() -> Bench {
    let mut bench = Bench::new(EngineConfig { has_port: false, ..config() });
    bench.connect(1, 8, 0);
    bench
}

/// Overwrites `count` frames that hold `value`. Returns how many of them were examined.
fn overwrite(bench: &mut Bench, count: usize, value: u8) -> usize {
    let mut looked_at = 0;
    for _ in 0..count {
        if bench.engine.wants_frame() {
            bench.engine.handle_frame(&page(value));
            looked_at += 1;
        }
    }
    looked_at
}

/// Shows the engine enough frames with known content that frames pay.
fn frames_pay() -> Bench {
    let mut bench = agentless();
    bench.do_from_disk(GuestOp::Read(blocks(3, 1)), &page(1));
    assert_eq!(overwrite(&mut bench, 64 * 32, 1), 32, "one of 64 is looked at");
    assert_eq!(bench.engine.status().admission, Admission::Frames);
    bench
}

#[test]
fn frames_that_hold_what_was_evicted_become_the_source() {
    let mut bench = frames_pay();
    assert_eq!(overwrite(&mut bench, 10, 1), 10, "all of them now");
    // Reads are no longer admitted: the cache would hold what the guest holds.
    bench.do_from_disk(GuestOp::Read(blocks(4, 1)), &page(2));
    assert!(!bench.cached(4));
    assert!(matches!(bench.engine.handle_frame(&page(2)), Evicted::Admit(_)));
    // A hit is the next to be discarded.
    let fetch = only_fetch(&bench.read(0, blocks(4, 1)));
    bench.page_comes(fetch, 2);
    let oldest = bench.engine.index().queue(POOL).next().map(|(slot, _)| slot);
    let known = bench.engine.index().known(BlockId { disk: DISK, bno: BlockNumber(4) });
    assert_eq!(oldest, known.and_then(|content| bench.engine.index().cached(content)));
}

#[test]
fn a_frame_is_judged_by_its_content() {
    let mut bench = frames_pay();
    bench.do_from_disk(GuestOp::Read(blocks(5, 1)), &page(5));
    assert!(matches!(bench.engine.handle_frame(&page(5)), Evicted::Admit(_)));
    assert_eq!(bench.engine.handle_frame(&page(5)), Evicted::Duplicate);
    assert_eq!(bench.engine.handle_frame(&page(9)), Evicted::Unmatched, "never seen");
    assert_eq!(bench.engine.handle_frame(&page(0)), Evicted::Zero);
    bench.do_from_disk(write(blocks(6, 1)), &page(6));
    bench.do_from_disk(write(blocks(6, 1)), &page(7));
    assert_eq!(bench.engine.handle_frame(&page(6)), Evicted::Unmatched, "the disk holds something else by now");
    let s = bench.engine.stats();
    let judged = s.frames_admitted + s.frames_duplicate + s.frames_zero + s.frames_unmatched + s.frames_dropped;
    assert_eq!(s.frames_looked_at, judged);
    assert_eq!(s.evictions_reported, 0);
}

#[test]
fn zeroed_frames_are_left_alone_but_for_a_sample() {
    let mut bench = agentless();
    assert_eq!(bench.engine.status().admission, Admission::Reads);
    assert_eq!(overwrite(&mut bench, 64 * 1000, 0), 1000);
    assert_eq!(bench.engine.status().admission, Admission::Reads);
    bench.do_from_disk(GuestOp::Read(blocks(3, 1)), &page(1));
    assert!(bench.cached(3));
    // The guest comes back with another kernel.
    overwrite(&mut bench, 64 * 64, 1);
    assert_eq!(bench.engine.status().admission, Admission::Frames);
    // The first kernel comes back.
    overwrite(&mut bench, 2048, 0);
    assert_eq!(bench.engine.status().admission, Admission::Reads);
}

#[test]
fn what_was_read_long_ago_is_known_when_its_frame_is_looked_at() {
    // While blocks are admitted as they are read, each pushes the one before out of a full cache. The guest holds it,
    // so it must stay known, or frames would never seem to pay.
    let mut bench = agentless();
    for bno in 0..40 {
        bench.do_from_disk(GuestOp::Read(blocks(bno, 1)), &page(u8::try_from(bno + 1).unwrap()));
    }
    assert!((0..40).all(|bno| bench.known(bno)));
}

/// A read of several blocks hits only if all are cached, so all of them enter at one end.
#[test]
fn a_full_cache_takes_up_what_is_read_in_runs() {
    for count in [1, 2, 8] {
        let cache = PageCount(64);
        let config = EngineConfig { has_port: false, frame_sample: 0, cache, hedge: false, ..config() };
        let mut bench = Bench::new(EngineConfig { send_window: 10_000, guest_memory: PageCount(256), ..config });
        bench.connect(1, 64, 0);
        let value = |bno: u64| u8::try_from(bno).unwrap();
        let hits = |bench: &mut Bench, first: u64| {
            let actions = bench.read(1, blocks(first, count));
            if actions == [disk_action(1, GuestOp::Read(blocks(first, count)))] {
                let data: Vec<u8> = (first..first + count).flat_map(|bno| page(value(bno))).collect();
                assert_eq!(bench.disk_done(1, Ok(()), &data).last(), Some(&complete(1)));
                return false;
            }
            for (action, bno) in actions.iter().zip(first..) {
                let Action::Fetch { fetch, .. } = action else { panic!("{action:?}") };
                bench.page_comes(*fetch, value(bno));
            }
            assert_eq!(bench.actions(), [complete(1)]);
            true
        };
        for first in (1..65).step_by(usize::try_from(count).unwrap()) {
            assert!(!hits(&mut bench, first) && hits(&mut bench, first), "there is room");
        }
        // 5 reads in turn, of which each has its turn among 32 that miss. Others, which cannot hit, have none.
        let runs = || (0..5).map(|run| 100 + run * count);
        for first in (0..200).flat_map(|_| runs()) {
            hits(&mut bench, first);
            bench.do_from_disk(GuestOp::Read(ByteRange { offset: 240 << 12, length: 512 }), &page(9)[..512]);
            bench.do_from_disk(GuestOp::Read(ByteRange { offset: 241 << 12, length: 6144 }), &[9; 6144]);
        }
        assert!(runs().all(|first| hits(&mut bench, first)), "{count}");
        // What never comes again takes at most one turn of 32.
        let admitted = bench.engine.stats().read_admissions;
        (0..31).for_each(|run| _ = hits(&mut bench, 150 + run % 10 * count));
        let more = bench.engine.stats().read_admissions - admitted;
        assert!(more <= if count == 1 { 31 } else { count }, "{more} of {count}");
    }
}

/// An agent that is killed does not say that it no longer sends one class.
#[test]
fn the_class_that_an_agent_sent_is_forgotten_with_the_agent() {
    let mut bench = Bench::large();
    bench.engine.handle_agent(CLASSES);
    assert_eq!(bench.engine.classes_seen(), CLASSES);
    bench.engine.handle_evicted(&page(9));
    let resident = u64::from(bench.engine.index().layout().resident_limit().0);
    for bno in 0..=resident {
        bench.do_from_disk(GuestOp::Read(blocks(100 + bno % 1000, 1)), &page(100));
    }
    assert_eq!((bench.engine.status().admission, bench.engine.classes_seen()), (Admission::Reads, 1));
    bench.engine.handle_evicted(&page(9));
    assert_eq!(bench.engine.classes_seen(), CLASSES, "it was only silent");
}

/// A database whose reads hit reads as much as one whose reads do not.
#[test]
fn what_the_cache_answers_counts_as_read() {
    let mut bench = Bench::large();
    bench.cache(5, 5);
    let resident = u64::from(bench.engine.index().layout().resident_limit().0);
    for count in 0..=resident {
        assert_eq!(bench.engine.status().admission, Admission::Evictions, "{count}");
        let fetch = only_fetch(&bench.read(0, blocks(5, 1)));
        bench.page_comes(fetch, 5);
        assert_eq!(bench.actions(), [complete(0)]);
    }
    assert_eq!(bench.engine.status().admission, Admission::Reads);
}

#[test]
fn with_an_agent_no_frame_is_looked_at() {
    let mut bench = frames_pay();
    let mut with_port = Bench::connected();
    assert_eq!(overwrite(&mut with_port, 1000, 1), 0);
    // The agent falls silent: the guest reads more than its memory holds, and reports nothing.
    for bno in 0..=64 {
        with_port.do_from_disk(GuestOp::Read(blocks(100 + bno, 1)), &page(100));
    }
    assert_eq!(with_port.engine.status().admission, Admission::Reads);
    overwrite(&mut with_port, 64 * 32, 100);
    assert_eq!(with_port.engine.status().admission, Admission::Frames);
    with_port.engine.handle_evicted(&page(9));
    assert_eq!(with_port.engine.status().admission, Admission::Evictions);
    assert_eq!(overwrite(&mut with_port, 1000, 1), 0);
    let mut never = Bench::new(EngineConfig { has_port: false, frame_sample: 0, ..config() });
    never.connect(1, 8, 0);
    assert_eq!(overwrite(&mut never, 1000, 0), 0);
    // The same holds while the cache is off, or there is no server.
    bench.engine.resize(bench.now, PageCount(0), PageCount(0));
    assert_eq!(overwrite(&mut bench, 1000, 1), 0);
    bench.engine.resize(bench.now, PageCount(8), PageCount(0));
    bench.disconnect();
    assert_eq!(overwrite(&mut bench, 1000, 1), 0);
}
