//! Tests of the streams alone: what is measured of a disk and a pool, and where reads go then.

use super::*;
use proptest::prelude::*;

const DISK: DiskIndex = DiskIndex(0);
const POOL: PoolIndex = PoolIndex(0);
const PAGES: u64 = 32;
const US: u64 = 1_000;
/// A disk of 7 ms that reads on at 150 MB/s.
const SEEK: u64 = 7_000 * US;
const CONTINUED: u64 = 874 * US;

fn at(block: u64) -> ByteRange {
    ByteRange { offset: block * PAGE_SIZE_U64, length: PAGES * PAGE_SIZE_U64 }
}

struct Track {
    streams: Streams,
    now: Nanos,
}

impl Track {
    /// Returns a track on which the disk and a pool that takes `pool_ns` for a read are known.
    fn of(pool_ns: u64) -> Self {
        let mut this = Self { streams: Streams::new(true), now: Nanos(1) };
        for number in 0..8 {
            let far = (number + 1) * 1_000_000;
            this.disk_reads(far, SEEK + CONTINUED);
            this.disk_reads(far + PAGES, CONTINUED);
        }
        (0..8).for_each(|_| this.pool_reads(pool_ns));
        this
    }

    /// The disk reads a run, alone, for a read that needs it.
    fn disk_reads(&mut self, block: u64, ns: u64) {
        self.streams.begin_read(DISK, at(block));
        self.disk_does(block, ns, ReadReason::Needed);
    }

    fn disk_does(&mut self, block: u64, ns: u64, reason: ReadReason) {
        let io = self.begin(block, reason);
        self.now = self.now.plus_ns(ns);
        self.streams.end_io(self.now, DISK, at(block), &io, true);
    }

    fn begin(&mut self, block: u64, reason: ReadReason) -> DiskIo {
        let continues_after = self.streams.begin_io(self.now, DISK, at(block), reason);
        DiskIo { since: self.now, reason, is_undisturbed: true, queue_depth: 0, continues_after }
    }

    fn pool_reads(&mut self, ns: u64) {
        let began = self.now;
        self.now = self.now.plus_ns(ns);
        self.streams.note_answer(self.now, POOL, 32, began);
    }

    /// The guest reads a run that is cached. Returns where it goes.
    fn route(&mut self, block: u64) -> StreamRoute {
        self.streams.begin_read(DISK, at(block));
        self.streams.route(self.now, DISK, at(block), 32, POOL)
    }
}

/// Returns whether a read goes to the disk, beside a pool or not.
fn is_disk(route: StreamRoute) -> bool {
    matches!(route, StreamRoute::Disk | StreamRoute::Both)
}

#[test]
fn a_disk_reads_on_where_the_pool_takes_longer() {
    let mut track = Track::of(1_276 * US);
    track.disk_reads(500, SEEK + CONTINUED);
    assert_eq!(track.route(500 + PAGES), StreamRoute::Disk);
    // Within 256 KiB it reads on as well, and not from further away.
    let mut track = Track::of(1_276 * US);
    track.disk_reads(500, SEEK + CONTINUED);
    assert_eq!(track.route(500 + PAGES + 64), StreamRoute::Disk);
    let mut track = Track::of(1_276 * US);
    track.disk_reads(500, SEEK + CONTINUED);
    assert_eq!(track.route(500 + PAGES + 65), StreamRoute::Pools);
    assert_eq!(track.route(499), StreamRoute::Pools, "it does not read backwards");
}

#[test]
fn a_quicker_pool_takes_over_where_it_saves_a_seek() {
    let mut track = Track::of(420 * US);
    track.disk_reads(500, SEEK + CONTINUED);
    // 454 us are saved with each read: 15.4 reads save a seek, and this one is one of them.
    let StreamRoute::PoolsIfCached(needed) = track.route(500 + PAGES) else { panic!("it depends on what follows") };
    assert!((455..=470).contains(&needed), "{needed}");
    assert_eq!(track.route(900_000), StreamRoute::Pools, "the disk is elsewhere");
}

/// A disk at the other end of a network serves many reads at a time, each after the same time.
#[test]
fn a_disk_that_is_far_away_does_not_seek() {
    let latency = 3_000 * US;
    let mut track = Track { streams: Streams::new(true), now: Nanos(1) };
    for number in 0..8 {
        let far = (number + 1) * 1_000_000;
        track.disk_reads(far, latency);
        let begun: Vec<_> =
            (1..33).map(|read| (far + read * PAGES, track.begin(far + read * PAGES, ReadReason::Needed))).collect();
        track.now = track.now.plus_ns(latency);
        for (block, io) in begun {
            track.now = track.now.plus_ns(100 * US);
            track.streams.end_io(track.now, DISK, at(block), &io, true);
        }
    }
    for pool_ns in [20 * US, 1_276 * US] {
        (0..64).for_each(|_| track.pool_reads(pool_ns));
        track.disk_reads(500, latency);
        assert_eq!(track.route(500 + PAGES), StreamRoute::Pools, "{pool_ns}");
    }
}

#[test]
fn pools_are_not_left_to_follow_a_hedge() {
    let mut track = Track::of(420 * US);
    track.streams.begin_read(DISK, at(500));
    track.disk_does(500, SEEK + CONTINUED, ReadReason::Hedge);
    assert_eq!(track.route(500 + PAGES), StreamRoute::Pools);
    let mut track = Track::of(1_276 * US);
    track.streams.begin_read(DISK, at(500));
    track.disk_does(500, SEEK + CONTINUED, ReadReason::Hedge);
    assert_eq!(track.route(500 + PAGES), StreamRoute::Pools, "it may still seek");
    track.disk_does(500 + PAGES, CONTINUED, ReadReason::Needed);
    assert_eq!(track.route(500 + 2 * PAGES), StreamRoute::Disk);
}

#[test]
fn a_slow_pool_is_left_when_streams_are_known_to_be_long() {
    let long = |track: &mut Track, block: u64| {
        for read in 0..1000 {
            track.streams.begin_read(DISK, at(block + read * PAGES));
        }
    };
    let mut track = Track::of(1_276 * US);
    assert_eq!(track.route(900_000), StreamRoute::Pools);
    (1..8).for_each(|number| long(&mut track, number * 1_000_000));
    assert_eq!(track.route(900_000), StreamRoute::Disk);
}

#[test]
fn a_stream_without_end_leaves_a_slow_pool() {
    let mut track = Track::of(1_276 * US);
    let goes = |track: &mut Track, read: u64| is_disk(track.route(900_000 + read * PAGES));
    let first = (0..100).find(|read| goes(&mut track, *read)).expect("it goes to the disk in the end");
    // The seek has paid after 17 reads.
    assert!((4..=17).contains(&first), "{first}");
}

#[test]
fn nothing_is_decided_while_something_is_unknown() {
    let mut track = Track { streams: Streams::new(true), now: Nanos(1) };
    let slow = 9_000 * US;
    for number in 0..3 {
        track.disk_reads(number * 1_000_000, SEEK + CONTINUED);
        track.disk_reads(number * 1_000_000 + PAGES, CONTINUED);
        track.pool_reads(slow);
    }
    assert_eq!(track.route(2_000_000 + 2 * PAGES), StreamRoute::Pools, "three values are too few");
    track.disk_reads(3_000_000, SEEK + CONTINUED);
    track.disk_reads(3_000_000 + PAGES, CONTINUED);
    assert_eq!(track.route(3_000_000 + 2 * PAGES), StreamRoute::Pools, "of the pool");
    track.pool_reads(slow);
    assert_eq!(track.route(3_000_000 + 2 * PAGES), StreamRoute::Disk);
    track.streams.reset_pool(POOL);
    assert_eq!(track.route(3_000_000 + 2 * PAGES), StreamRoute::Pools, "another session");
    let mut track = Track::of(slow);
    track.streams.enabled = false;
    track.disk_reads(500, SEEK);
    assert_eq!(track.route(500 + PAGES), StreamRoute::Pools, "without hedging");
}

#[test]
fn where_seeks_cost_little_positions_do_not_matter() {
    for (apart, continued, is_followed) in [(1_000, 100, false), (1_200, 100, true), (9_900, 8_000, false)] {
        let mut track = Track { streams: Streams::new(true), now: Nanos(1) };
        for number in 0..8 {
            track.disk_reads(number * 1_000_000, apart * US);
            track.disk_reads(number * 1_000_000 + PAGES, continued * US);
            track.pool_reads(continued * 3 / 2 * US);
        }
        assert_eq!(is_disk(track.route(7_000_000 + 2 * PAGES)), is_followed, "{apart}, {continued}");
    }
}

#[test]
fn a_disk_that_fails_or_hangs_loses_no_hits() {
    let mut track = Track::of(1_276 * US);
    track.disk_reads(500, SEEK + CONTINUED);
    let io = track.begin(500 + PAGES, ReadReason::Stream);
    assert_eq!(track.route(500 + 2 * PAGES), StreamRoute::Disk);
    track.now = track.now.plus_ns(3 * (SEEK + CONTINUED));
    assert_eq!(track.route(500 + 2 * PAGES), StreamRoute::Disk, "it may yet come");
    track.now = track.now.plus_ns(2 * SEEK);
    assert_eq!(track.route(500 + 2 * PAGES), StreamRoute::Pools);
    track.streams.end_io(track.now, DISK, at(500 + PAGES), &io, true);
    assert_eq!(track.route(500 + 2 * PAGES), StreamRoute::Disk);
    let io = track.begin(500 + 2 * PAGES, ReadReason::Stream);
    track.streams.end_io(track.now, DISK, at(500 + 2 * PAGES), &io, false);
    assert_eq!(track.route(500 + 3 * PAGES), StreamRoute::Pools);
}

#[test]
fn after_a_write_or_a_read_that_was_left_out_the_disk_is_elsewhere() {
    let mut track = Track::of(1_276 * US);
    track.disk_reads(500, SEEK + CONTINUED);
    track.streams.begin_modification(DISK);
    assert_eq!(track.route(500 + PAGES), StreamRoute::Pools);
    let mut track = Track::of(1_276 * US);
    track.begin(500, ReadReason::Needed);
    track.streams.skip_io(DISK);
    assert_eq!(track.route(500 + PAGES), StreamRoute::Pools);
    assert_eq!(track.streams.disk(DISK).in_flight, 0);
    let mut track = Track::of(1_276 * US);
    track.disk_reads(500, SEEK + CONTINUED);
    track.streams.reset_disk(DISK);
    assert_eq!(track.route(500 + PAGES), StreamRoute::Pools, "another disk of this number");
}

#[test]
fn one_read_in_a_while_also_goes_to_the_pool() {
    let mut track = Track::of(1_276 * US);
    track.disk_reads(500, SEEK + CONTINUED);
    let routes: Vec<_> = (0..256).map(|_| track.streams.route(track.now, DISK, at(500 + PAGES), 32, POOL)).collect();
    assert_eq!(routes.iter().filter(|route| **route == StreamRoute::Both).count(), 4);
    assert!(routes.iter().copied().all(is_disk));
}

#[test]
fn reads_that_overlap_count_once() {
    let mut track = Track::of(420 * US);
    let disk = |track: &mut Track| track.streams.disk(DISK).continued.of(PAGES).unwrap();
    let before = disk(&mut track);
    for number in 1..200 {
        let ios =
            [0, 1].map(|read| (number * 2 + read) * PAGES).map(|block| (block, track.begin(block, ReadReason::Needed)));
        for (block, io) in ios {
            track.now = track.now.plus_ns(CONTINUED);
            track.streams.end_io(track.now, DISK, at(block), &io, true);
        }
    }
    assert!(disk(&mut track).abs_diff(before) < before / 50, "{} after {before}", disk(&mut track));
    let began = track.now;
    for _ in 0..200 {
        track.now = track.now.plus_ns(420 * US);
        track.streams.note_answer(track.now, POOL, 32, began);
    }
    assert!(track.streams.pool(POOL).costs.of(32).unwrap() < 430 * US);
}

#[test]
fn what_is_between_costs_as_if_it_was_read() {
    let mut track = Track::of(420 * US);
    let before = track.streams.disk(DISK).continued.of(64).map_or(0, |ns| ns / 64);
    assert_eq!(before, 0);
    for number in 1..9 {
        track.disk_reads(number * 2 * PAGES, 2 * CONTINUED);
    }
    assert_eq!(track.streams.disk(DISK).continued.of(64).map(|ns| ns / 64), Some(CONTINUED / PAGES));
}

#[test]
fn one_hiccup_does_not_decide() {
    let mut costs = Costs::default();
    costs.note(Nanos(0), PAGES, 1000 * SEEK);
    (0..3).for_each(|_| costs.note(Nanos(0), PAGES, CONTINUED));
    assert!(costs.of(PAGES).unwrap() <= CONTINUED, "nor if it is the first value");
    (0..20).for_each(|_| costs.note(Nanos(0), PAGES, CONTINUED));
    costs.note(Nanos(0), PAGES, 1000 * SEEK);
    assert!(costs.of(PAGES).unwrap() < CONTINUED * 5 / 4);
    (0..60).for_each(|_| costs.note(Nanos(0), PAGES, 10 * CONTINUED));
    assert!(costs.of(PAGES).unwrap() > CONTINUED * 9, "but what stays so does");
    assert_eq!((costs.of(16), costs.of(63)), (None, costs.of(PAGES).map(|ns| ns / 32 * 63)));
}

#[test]
fn blocks_ahead_are_looked_for_once() {
    let mut streams = Streams::new(true);
    assert_eq!(streams.look_for(DISK, 100, 500, 300), 100..400);
    assert!(!streams.note_found(DISK, 400, 100, 500));
    assert_eq!(streams.look_for(DISK, 132, 500, 300), 400..632);
    assert!(!streams.note_found(DISK, 450, 132, 500), "one is missing");
    assert_eq!(streams.look_for(DISK, 164, 500, 300), 450..664);
    assert!(streams.note_found(DISK, 664, 164, 500));
    assert_eq!(streams.look_for(DISK, 170, 400, 300), 664..664, "more is known than is needed");
    assert_eq!(streams.look_for(DISK, 90, 400, 300), 90..390, "another stream");
}

#[test]
fn runs_are_as_long_as_those_before() {
    let mut runs = Runs::default();
    assert!((100..=200).contains(&runs.expected(64)), "{}", runs.expected(64));
    (0..100).for_each(|_| runs.note_end(300));
    (0..10_000).for_each(|_| runs.note_end(1));
    assert!((200..=350).contains(&runs.expected(32)), "{}", runs.expected(32));
    assert!(runs.expected(1) < 12);
    (0..100).for_each(|_| runs.note_end(30_000));
    assert!(runs.expected(512) > 10_000);
}

proptest! {
    /// Whatever happens, positions and counts stay within bounds, and no read is routed without cost.
    #[test]
    fn any_order_of_events_is_borne(events in prop::collection::vec((0..6_u8, 0..400_u64, 0..10_000_000_u64), 1..300)) {
        let mut track = Track { streams: Streams::new(true), now: Nanos(1) };
        let mut in_flight = Vec::new();
        for (kind, block, ns) in events {
            match kind {
                0 => in_flight.push((block, track.begin(block, ReadReason::Needed))),
                1 => if let Some((block, io)) = in_flight.pop() {
                    track.streams.end_io(track.now, DISK, at(block), &io, ns % 8 > 0);
                },
                2 => if in_flight.pop().is_some() { track.streams.skip_io(DISK) },
                3 => track.streams.begin_modification(DISK),
                4 => track.pool_reads(ns),
                _ => if let StreamRoute::PoolsIfCached(needed) = track.route(block) {
                    prop_assert!(needed <= AHEAD_MAX);
                    let looked_for = track.streams.look_for(DISK, block, needed, 64);
                    prop_assert!(looked_for.start <= looked_for.end && looked_for.end - looked_for.start <= 64);
                    track.streams.note_found(DISK, looked_for.end, block, needed);
                },
            }
            track.now = track.now.plus_ns(ns);
            prop_assert_eq!(track.streams.disk(DISK).in_flight as usize, in_flight.len());
        }
    }
}

#[test]
fn a_comparison_counts_when_its_last_page_is_there() {
    let mut track = Track::of(1_276 * US);
    let cost = |track: &mut Track| track.streams.pool(POOL).costs.of(2);
    for serial in 0..60 {
        track.streams.begin_comparison(track.now, serial, POOL, 2);
        track.now = track.now.plus_ns(1_000 * US);
        track.streams.note_page(track.now, serial);
        track.streams.note_page(track.now, serial + 1);
        track.now = track.now.plus_ns(5_000 * US);
        track.streams.note_page(track.now, serial);
    }
    let of_both = cost(&mut track).expect("it was measured");
    assert!((5_900 * US..=6_000 * US).contains(&of_both), "{of_both}");
    // One of which a page does not come says nothing.
    for serial in 100..160 {
        track.streams.begin_comparison(track.now, serial, POOL, 2);
        track.streams.note_page(track.now, serial);
    }
    assert_eq!(cost(&mut track), Some(of_both));
}

/// Returns what reads cost that continue, and those that do not, and how long the former take.
fn disk_costs(track: &mut Track) -> [Option<u64>; 3] {
    let disk = track.streams.disk(DISK);
    [&disk.continued, &disk.apart, &disk.whole].map(|costs| costs.of(PAGES))
}

#[test]
fn after_an_error_all_costs_of_the_disk_are_unknown_and_it_is_no_value() {
    // A read that does not continue, and one that does.
    for failed in [500, 8_000_000 + 2 * PAGES] {
        let mut track = Track::of(1_276 * US);
        assert!(disk_costs(&mut track).iter().all(Option::is_some));
        let io = track.begin(failed, ReadReason::Needed);
        track.streams.end_io(track.now, DISK, at(failed), &io, false);
        assert_eq!(disk_costs(&mut track), [None; 3]);
        for number in 0..3 {
            track.disk_reads(number * 1_000_000, SEEK + CONTINUED);
            track.disk_reads(number * 1_000_000 + PAGES, CONTINUED);
        }
        assert_eq!(disk_costs(&mut track), [None; 3], "the read that failed is none of four");
    }
}

#[test]
fn a_read_that_abandoned_ones_slow_down_is_no_value() {
    let mut track = Track::of(1_276 * US);
    let before = disk_costs(&mut track);
    for number in 0..32 {
        for block in [number * 1_000_000, number * 1_000_000 + PAGES] {
            let io = DiskIo { is_undisturbed: false, ..track.begin(block, ReadReason::Needed) };
            track.now = track.now.plus_ns(3 * SEEK);
            track.streams.end_io(track.now, DISK, at(block), &io, true);
        }
    }
    assert_eq!(disk_costs(&mut track), before);
}

#[test]
fn a_disk_that_was_idle_does_not_hang_and_one_that_gets_more_reads_may() {
    let mut track = Track::of(1_276 * US);
    track.disk_reads(500, SEEK + CONTINUED);
    track.now = track.now.plus_ns(1_000 * SEEK);
    assert_eq!(track.route(500 + PAGES), StreamRoute::Disk, "it has nothing to do");
    track.begin(500 + PAGES, ReadReason::Needed);
    assert_eq!(track.route(500 + 2 * PAGES), StreamRoute::Disk, "it has only begun");
    for read in 2..8 {
        track.now = track.now.plus_ns(SEEK);
        track.begin(500 + read * PAGES, ReadReason::Needed);
    }
    assert_eq!(track.route(500 + 8 * PAGES), StreamRoute::Pools, "it completes nothing");
}

#[test]
fn a_disk_is_not_left_for_a_seek_that_is_saved_too_late() {
    // Saving 14 us with each read, 500 reads save a seek; saving 13 us, more than are looked for.
    for (saved, is_looked_for) in [(14, true), (13, false)] {
        let mut track = Track::of(CONTINUED - saved * US);
        track.disk_reads(500, SEEK + CONTINUED);
        let route = track.route(500 + PAGES);
        assert_eq!(matches!(route, StreamRoute::PoolsIfCached(_)), is_looked_for, "{route:?}");
        assert!(is_looked_for || is_disk(route), "{route:?}");
    }
}

#[test]
fn a_disk_that_was_idle_for_long_does_not_hang() {
    let mut track = Track::of(1_276 * US);
    track.disk_reads(500, SEEK + CONTINUED);
    track.now = track.now.plus_ns(1000 * SEEK);
    track.begin(500 + PAGES, ReadReason::Stream);
    assert_eq!(track.route(500 + 2 * PAGES), StreamRoute::Disk);
}

/// A pool that is a hundredth quicker would have to answer 88 MiB in a row.
#[test]
fn a_pool_that_is_hardly_quicker_does_not_take_over() {
    let mut track = Track::of(864 * US);
    track.disk_reads(500, SEEK + CONTINUED);
    assert_eq!(track.route(500 + PAGES), StreamRoute::Disk);
}

#[test]
fn all_is_covered_after_16_mib_of_covered_reads_and_until_other_requests_are_more_than_a_few() {
    let mut streams = Streams::new(true);
    let cover = |streams: &mut Streams, reads: u32| (0..reads).for_each(|_| streams.note_route(at(0), true));
    cover(&mut streams, 127);
    assert!(!streams.covers_all());
    cover(&mut streams, 1);
    assert!(streams.covers_all());
    streams.note_route(at(0), false);
    cover(&mut streams, 31);
    streams.begin_modification(DISK);
    assert!(streams.covers_all(), "one in a while");
    streams.note_route(at(0), false);
    assert!(!streams.covers_all());
    cover(&mut streams, 64);
    assert!(!streams.covers_all());
    cover(&mut streams, 1);
    assert!(streams.covers_all());
}
