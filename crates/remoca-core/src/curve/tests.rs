use super::*;
use crate::units::{BlockNumber, DiskIndex};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::hash::Hasher;

const KEY: [u8; 16] = *b"a key of a test.";
const FAR: PageCount = PageCount(u32::MAX);

fn block(number: u64) -> BlockId {
    BlockId { disk: DiskIndex(u16::try_from(number % 3).unwrap()), bno: BlockNumber(number / 3) }
}

fn priority_of(block: BlockId) -> u64 {
    Priorities::new(&KEY).find(priority::name(block), priority::ALL).unwrap()
}

/// Pseudorandom numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// The same as a curve in which every block is sampled, in the most obvious way.
#[derive(Default)]
struct Naive {
    /// Newest first.
    queue: Vec<BlockId>,
    distances: Vec<(Option<usize>, f64)>,
}

impl Naive {
    fn remove(&mut self, block: BlockId) -> Option<usize> {
        let at = self.queue.iter().position(|queued| *queued == block);
        at.map(|at| {
            self.queue.remove(at);
            at + 1
        })
    }

    fn evicted(&mut self, block: BlockId, reach: usize) {
        self.remove(block);
        self.queue.insert(0, block);
        self.queue.truncate(reach);
    }

    fn miss_ratio(&self, size: usize) -> Option<f64> {
        let reads: f64 = self.distances.iter().map(|(_, weight)| weight).sum();
        let is_hit = |distance: Option<usize>| distance.is_some_and(|distance| distance <= size);
        let hits: f64 = self.distances.iter().filter(|(distance, _)| is_hit(*distance)).map(|(_, weight)| weight).sum();
        (reads > 0.).then(|| 1. - hits / reads)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Read(u64),
    Evicted(u64),
    Discarded(u64),
    Age(bool),
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        20 => (0..60_u64).prop_map(Step::Read),
        20 => (0..60_u64).prop_map(Step::Evicted),
        2 => (0..60_u64).prop_map(Step::Discarded),
        1 => any::<bool>().prop_map(Step::Age),
        1 => Just(Step::Restart),
    ];
    prop::collection::vec(step, 1..400)
}

proptest! {
    #[test]
    fn with_few_blocks_the_curve_is_exact(steps in steps(), reach in 0..80_u32) {
        let (mut curve, mut naive) = (MissRatioCurve::new(&KEY, PageCount(reach)), Naive::default());
        for step in steps {
            match step {
                Step::Read(number) => {
                    curve.read(block(number));
                    let distance = naive.remove(block(number));
                    naive.distances.push((distance, 1.));
                }
                Step::Evicted(number) => {
                    curve.evicted(block(number));
                    naive.evicted(block(number), reach as usize);
                }
                Step::Discarded(number) => {
                    curve.discarded(block(number));
                    naive.remove(block(number));
                }
                Step::Age(half) => {
                    let kept = if half { 0.5 } else { 0. };
                    curve.age(kept);
                    naive.distances.iter_mut().for_each(|(_, weight)| *weight *= kept);
                }
                Step::Restart => curve = MissRatioCurve::from_bytes(&KEY, &curve.to_bytes()).unwrap(),
            }
        }
        for size in 0..80 {
            prop_assert_eq!(curve.miss_ratio(PageCount(size)), naive.miss_ratio(size as usize));
        }
        let all = curve.miss_ratios((0..80).map(PageCount));
        let each: Option<Vec<f64>> = (0..80).map(|size| curve.miss_ratio(PageCount(size))).collect();
        prop_assert_eq!(all, each);
    }

    #[test]
    fn damaged_bytes_never_panic(at in any::<prop::sample::Index>(), byte: u8, cut in any::<prop::sample::Index>(), is_cut: bool) {
        let mut bytes = after(20_000, 9000).to_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        bytes.truncate(if is_cut { cut.index(bytes.len()) } else { bytes.len() });
        if let Ok(mut curve) = MissRatioCurve::from_bytes(&KEY, &bytes) {
            mixed(20_000, 9000, |step, block| apply(&mut curve, step, block));
            let ratios = curve.miss_ratios((0..99).map(|size| PageCount(size * 1000))).unwrap();
            prop_assert!(ratios.iter().all(|ratio| (0. ..=1.).contains(ratio)));
            prop_assert!(ratios.is_sorted_by(|a, b| a >= b));
        }
    }
}

/// Makes `events` events of `blocks` blocks.
fn mixed(events: u64, blocks: u64, mut event: impl FnMut(u64, BlockId)) {
    let mut random = Random(0x5eed);
    for _ in 0..events {
        let step = random.below(20);
        event(step, block(random.below(blocks)));
    }
}

fn apply(curve: &mut MissRatioCurve, step: u64, block: BlockId) {
    match step {
        0 => curve.discarded(block),
        1..7 => curve.read(block),
        _ => curve.evicted(block),
    }
}

fn after(events: u64, blocks: u64) -> MissRatioCurve {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    mixed(events, blocks, |step, block| apply(&mut curve, step, block));
    curve
}

#[test]
fn the_sample_is_what_is_below_the_threshold_in_the_order_of_evictions() {
    // Newest last. The time of each block's eviction orders it.
    let (mut curve, mut evicted_at, mut time) = (MissRatioCurve::new(&KEY, FAR), vec![0_u64; 30_000], 0_u64);
    mixed(200_000, 30_000, |step, block| {
        apply(&mut curve, step, block);
        time += 1;
        let number = block.bno.0 * 3 + u64::from(block.disk.0);
        evicted_at[usize::try_from(number).unwrap()] = if step >= 7 { time } else { 0 };
        if time.is_multiple_of(20_000) {
            let mut queued: Vec<(u64, u64)> = (0..).zip(&evicted_at).map(|(number, at)| (*at, number)).collect();
            queued.retain(|(at, _)| *at > 0);
            queued.sort_unstable();
            let priorities = queued.iter().map(|(_, number)| priority_of(self::block(*number)));
            let sampled: Vec<u64> = priorities.filter(|priority| *priority < curve.threshold).collect();
            assert!(sampled.len() <= SAMPLES_MAX);
            assert_eq!(curve.queue.iter().collect::<Vec<_>>(), sampled);
            assert_eq!(curve.queue.len(), sampled.len());
        }
    });
    assert!(curve.rate() < 0.25, "{}", curve.rate());
}

#[test]
fn ranks_count_from_the_newest() {
    let mut queue = Queue::new();
    (0..100).for_each(|priority| queue.put(priority));
    queue.forget(50);
    assert_eq!(queue.take(99).map(|place| place.rank), Some(1));
    assert_eq!(queue.take(0).map(|place| place.rank), Some(98));
    assert_eq!(queue.take(49).map(|place| place.rank), Some(49));
    assert_eq!(queue.take(49), None);
    queue.forget_oldest();
    assert_eq!(queue.iter().next(), Some(2));
}

#[test]
fn a_block_of_the_older_sample_is_not_renewed() {
    let mut queue = Queue::new();
    (0..10).for_each(|priority| queue.put(priority));
    queue.begin_sample();
    queue.put(10);
    assert_eq!(queue.renew(3), None);
    assert_eq!(queue.renew(10), Some(1));
    let place = queue.take(3).unwrap();
    assert_eq!((place.rank, place.newer), (7, Some(1)));
    assert_eq!((queue.len(), queue.older()), (10, 9));
}

/// The present sample has lower priorities than the older one, and higher ones.
#[test]
fn the_older_sample_is_thinned_out_alone() {
    let (older, present) = ((0..300).map(|at| at * 7 % 300 * 2), (0..300).map(|at| at * 7 % 300 * 2 + 1));
    let mut queue = Queue::new();
    older.clone().for_each(|priority| queue.put(priority));
    queue.begin_sample();
    present.clone().for_each(|priority| queue.put(priority));
    queue.forget(10);
    assert_eq!(queue.thin_older(), 472, "the lowest of 64");
    let left: Vec<u64> = older.filter(|priority| *priority < 472 && *priority != 10).collect();
    assert_eq!((queue.older(), queue.len(), left.len()), (235, 535, 235));
    assert_eq!(queue.take(472), None);
    for (at, priority) in left.iter().enumerate() {
        let place = Place { rank: left.len() - at, newer: Some(300) };
        assert_eq!(queue.take(*priority), Some(place), "{priority}");
    }
    assert_eq!((queue.older(), queue.len()), (0, 300));
    assert!(queue.iter().eq(present));
}

#[test]
fn two_samples_become_one() {
    let mut queue = Queue::new();
    [4, 90, 8].into_iter().for_each(|priority| queue.put(priority));
    queue.begin_sample();
    [9, 3, 7, 8].into_iter().for_each(|priority| queue.put(priority));
    queue.join(8);
    assert_eq!(queue.iter().collect::<Vec<_>>(), [4, 90, 3, 7]);
    assert_eq!((queue.older(), queue.len(), queue.renew(90)), (0, 4, Some(3)));
}

/// Through all groups of slots, and over the ends of the slots.
#[test]
fn a_queue_agrees_with_a_list() {
    let (mut queue, mut list, mut random) = (Queue::new(), Vec::new(), Random(11));
    let mut known: Vec<u64> = Vec::new();
    for step in 0..30_000 {
        let is_old = !known.is_empty() && random.below(3) > 0;
        let priority = if is_old {
            known[usize::try_from(random.below(known.len() as u64)).unwrap()]
        } else {
            random.below(1 << 56)
        };
        let at = list.iter().position(|queued| *queued == priority);
        let rank = at.map(|at| list.len() - at);
        let what = random.below(4);
        if is_old && what == 0 {
            assert_eq!(queue.renew(priority), rank, "step {step}");
            list.retain(|queued| *queued != priority);
            list.extend(rank.map(|_| priority));
        } else if is_old && what < 3 {
            assert_eq!(queue.take(priority).map(|place| place.rank), rank, "step {step}");
            list.retain(|queued| *queued != priority);
        } else if at.is_some() || list.len() < 3000 {
            list.retain(|queued| *queued != priority);
            queue.put(priority);
            list.push(priority);
            known.push(priority);
        }
        assert_eq!(queue.len(), list.len());
    }
    assert!(list.len() > 1000, "{}", list.len());
    assert!(queue.iter().eq(list));
}

#[test]
fn a_loop_is_a_cliff_at_its_length_also_when_it_is_sampled() {
    let (length, passes) = (100_000, 5);
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    for at in 0..length * passes {
        let block = BlockId { disk: DiskIndex(0), bno: BlockNumber(at % length) };
        curve.read(block);
        curve.evicted(block);
    }
    assert!(curve.rate() < 0.05);
    let ratios = curve.miss_ratios([0, 50_000, 99_000, 101_000, 4_000_000_000].map(PageCount)).unwrap();
    assert_eq!(ratios[..2], [1., 1.]);
    assert!(ratios[2] > 0.98, "{ratios:?}");
    // Only the first pass misses.
    assert!((0.19..0.21).contains(&ratios[3]) && (0.19..0.21).contains(&ratios[4]), "{ratios:?}");
}

#[test]
fn a_shorter_reach_keeps_the_rate() {
    let rate_with = |reach| {
        let mut curve = MissRatioCurve::new(&KEY, reach);
        (0..1_000_000).for_each(|bno| curve.evicted(block(bno)));
        assert!(curve.queue.len() as f64 <= f64::from(reach.0) * curve.rate() + 1.);
        curve.rate()
    };
    assert!(rate_with(PageCount(50_000)) > 0.07);
    assert!(rate_with(FAR) < 0.005);
}

#[test]
fn a_reach_that_grows_is_known_as_far_as_the_queue_is_deep() {
    let mut curve = MissRatioCurve::new(&KEY, PageCount(1000));
    (0..1000).for_each(|number| curve.evicted(block(number)));
    let mut early = curve.clone();
    early.grow_reach(PageCount(3000));
    assert_eq!(early.reach(), PageCount(3000), "nothing is missing");
    // The oldest block is forgotten.
    curve.evicted(block(1000));
    curve.grow_reach(PageCount(3000));
    assert_eq!(curve.reach(), PageCount(1000));
    curve.read(block(0));
    assert_eq!(curve.miss_ratio(PageCount(3000)), Some(1.));
    curve.evicted(block(0));
    assert_eq!(curve.reach(), PageCount(1001));
    (1001..2500).for_each(|number| curve.evicted(block(number)));
    assert_eq!(curve.reach(), PageCount(2500));
    curve.grow_reach(PageCount(5));
    (2500..3500).for_each(|number| curve.evicted(block(number)));
    assert_eq!((curve.reach(), curve.followed()), (PageCount(3000), 3000));
    curve.read(block(501));
    assert_eq!(curve.miss_ratios([2999, 3000].map(PageCount)), Some(vec![1., 0.5]));
}

#[test]
fn what_was_evicted_before_a_curve_is_unknown_after_a_restart_too() {
    let mut curve = MissRatioCurve::new(&KEY, REACH_MAX);
    let bytes = curve.to_bytes();
    assert_eq!(MissRatioCurve::from_bytes(&KEY, &bytes).unwrap().reach(), REACH_MAX);
    curve.begin_late();
    assert_eq!(curve.reach(), PageCount(0));
    (0..5).for_each(|number| curve.evicted(block(number)));
    assert_eq!(curve.reach(), PageCount(5));
    let bytes = curve.to_bytes();
    assert_eq!(bytes[28..32], REACH_MIN.0.to_le_bytes(), "an older program forgets what is deeper");
    let mut again = MissRatioCurve::from_bytes(&KEY, &bytes).unwrap();
    again.grow_reach(REACH_MAX);
    assert_eq!((again.reach(), again.to_bytes()), (PageCount(5), bytes.clone()));
    again.read(block(2));
    assert_eq!(again.reach(), PageCount(4), "as deep as the queue");
    let beyond = (REACH_MIN.0 + 1).to_le_bytes();
    let damaged =
        [&bytes[..bytes.len() - 1], &[&bytes[..], &[0; 4]].concat(), &[&bytes[..bytes.len() - 4], &beyond].concat()];
    for bytes in damaged {
        assert_eq!(MissRatioCurve::from_bytes(&KEY, bytes).err(), Some(Unreadable::Damaged));
    }
}

#[test]
fn beyond_64_gib_a_curve_whose_queue_lost_blocks_says_nothing() {
    let curve = || {
        let mut curve = MissRatioCurve::new(&KEY, REACH_MAX);
        (0..5).for_each(|number| curve.evicted(block(number)));
        curve
    };
    let mut at_random = curve();
    [8, 1].into_iter().for_each(|one_of| at_random.see_one_of(one_of));
    assert_eq!((at_random.reach(), at_random.followed()), (REACH_MIN, 0));
    let mut by_class = curve();
    by_class.see_class_of(8);
    assert_eq!(by_class.reach(), REACH_MAX, "the queue goes on");
    assert_eq!(MissRatioCurve::from_bytes(&KEY, &by_class.to_bytes()).unwrap().reach(), REACH_MIN);
    by_class.see_class_of(4);
    assert_eq!(by_class.reach(), REACH_MIN, "a third sample");
}

#[test]
fn memory_is_bounded() {
    let curve = after(200_000, 100_000);
    assert!(curve.bytes() <= 96 << 10, "{}", curve.bytes());
    assert!(curve.to_bytes().len() <= 96 << 10);
    assert_eq!(curve.bytes(), MissRatioCurve::new(&KEY, FAR).bytes());
}

#[test]
fn without_reads_there_is_no_curve() {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    curve.evicted(block(1));
    assert_eq!(curve.miss_ratio(PageCount(1)), None);
    curve.read(block(2));
    assert_eq!(curve.miss_ratio(PageCount(9)), Some(1.));
    curve.read(block(1));
    assert_eq!(curve.miss_ratio(PageCount(0)), Some(1.));
    assert_eq!(curve.miss_ratio(PageCount(1)), Some(0.5));
    assert_eq!(curve.reads(), 2.);
}

#[test]
fn one_of_aligned_neighbours_is_sampled_at_each_power_of_256() {
    let mut priorities = Priorities::new(&KEY);
    for first in [0, 1 << 16, 77 << 16, ((1 << 24) - 1) << 16] {
        let mut sampled = |threshold| {
            let blocks = (first..first + (1 << 16)).map(|bno| BlockId { disk: DiskIndex(4095), bno: BlockNumber(bno) });
            let sampled = blocks.filter(|block| priorities.find(priority::name(*block), threshold).is_some());
            sampled.map(|block| block.bno.0).collect::<Vec<u64>>()
        };
        assert_eq!(sampled(priority::ALL >> 16).len(), 1);
        let groups: Vec<u64> = sampled(priority::ALL >> 8).iter().map(|bno| bno / 256).collect();
        assert_eq!(groups, (first / 256..first / 256 + 256).collect::<Vec<u64>>());
        // Which one differs from group to group.
        let places: BTreeSet<u64> = sampled(priority::ALL >> 8).iter().map(|bno| bno % 256).collect();
        assert!(places.len() > 128, "{}", places.len());
        // Half of the rate at which one of 16 is sampled: one of 32.
        let groups: BTreeSet<u64> = sampled(priority::ALL >> 5).iter().map(|bno| bno / 32).collect();
        assert_eq!(groups.len(), 1 << 11);
    }
}

#[test]
fn no_stride_is_avoided_and_keys_choose_differently() {
    // The mean over the keys is the rate, whatever the stride; and two keys agree only by chance.
    let threshold = priority::ALL / 100;
    for stride in [1_u64, 2, 8, 256, 4096, 32_768, 1 << 20] {
        let blocks = || (0..4000).map(|at| BlockId { disk: DiskIndex(1), bno: BlockNumber(at * stride) });
        let sample = |key: u8| -> BTreeSet<u64> {
            let mut priorities = Priorities::new(&[key; 16]);
            let sampled = blocks().filter(|block| priorities.find(priority::name(*block), threshold).is_some());
            sampled.map(|block| block.bno.0).collect()
        };
        let samples: Vec<_> = (0..50).map(sample).collect();
        let mean = samples.iter().map(|sample| sample.len() as f64).sum::<f64>() / 50.;
        assert!((37. ..43.).contains(&mean), "{mean} of 40 with stride {stride}");
        assert!(samples[0].intersection(&samples[1]).count() <= 5);
        assert!(samples.iter().all(|sample| !sample.is_empty()));
    }
}

#[test]
fn priorities_are_drawn_with_siphash() {
    // The standard library's hasher is SipHash-1-3 with a key of zeroes.
    let priorities = Priorities::new(&[0; 16]);
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(&[0xff; 7]);
    assert_eq!(priorities.key_check(), hasher.finish());
}

#[test]
fn a_curve_survives_as_bytes() {
    let mut curve = after(100_000, 30_000);
    curve.age(WINDOW_KEPT);
    let bytes = curve.to_bytes();
    let mut again = MissRatioCurve::from_bytes(&KEY, &bytes).unwrap();
    assert_eq!(again.to_bytes(), bytes);
    for curve in [&mut curve, &mut again] {
        mixed(50_000, 40_000, |step, block| apply(curve, step, block));
    }
    assert_eq!(again.to_bytes(), curve.to_bytes());
}

#[test]
fn other_bytes_are_refused() {
    let bytes = after(5000, 9000).to_bytes();
    let read = |bytes: &[u8]| MissRatioCurve::from_bytes(&KEY, bytes).err();
    let changed = |at: usize, to: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + to.len()].copy_from_slice(to);
        read(&bytes)
    };
    assert_eq!(read(&bytes), None);
    assert_eq!(read(b""), Some(Unreadable::NotACurve));
    assert_eq!(changed(8, &[2]), Some(Unreadable::Version(2)));
    assert_eq!(MissRatioCurve::from_bytes(&[1; 16], &bytes).err(), Some(Unreadable::Key));
    let damaged = Some(Unreadable::Damaged);
    assert!((8..bytes.len()).all(|length| read(&bytes[..length]) == damaged));
    assert_eq!(read(&[&bytes[..], &[0]].concat()), damaged);
    // Threshold, evictions seen, width, reads, beyond, and the numbers of blocks and of buckets.
    assert_eq!(changed(20, &[0; 8]), damaged);
    assert_eq!(changed(20, &[0xff; 8]), damaged);
    assert_eq!(changed(32, &[0; 4]), damaged);
    assert_eq!(changed(32, &1025_u32.to_le_bytes()), damaged);
    assert_eq!(changed(36, &3_u64.to_le_bytes()), damaged);
    assert_eq!(changed(44, &f64::NAN.to_le_bytes()), damaged);
    assert_eq!(changed(52, &(-1_f64).to_le_bytes()), damaged);
    assert_eq!(changed(60, &u32::MAX.to_le_bytes()), damaged);
    assert_eq!(changed(64, &u32::MAX.to_le_bytes()), damaged);
    // A block above the threshold, and one that is there twice.
    assert_eq!(changed(68, &u64::MAX.to_le_bytes()), damaged);
    let first: [u8; 8] = bytes[68..76].try_into().unwrap();
    assert_eq!(changed(76, &first), damaged);
    // A bucket that is there twice.
    let last = bytes.len() - 12;
    let before: [u8; 4] = bytes[last - 12..last - 8].try_into().unwrap();
    assert_eq!(changed(last, &before), damaged);
}

proptest! {
    #[test]
    fn a_priority_tells_its_block(disk in 0_u16..4096, bno in 0_u64..1 << 40) {
        let block = BlockId { disk: DiskIndex(disk), bno: BlockNumber(bno) };
        prop_assert_eq!(Priorities::new(&KEY).block(priority_of(block)), block);
    }

    // Runs, groups that meet at one place of what is kept, and blocks of other disks.
    #[test]
    fn what_is_kept_changes_no_priority(
        blocks in prop::collection::vec((0_u16..3, prop_oneof![0_u64..600, 0_u64..1 << 22, 0_u64..1 << 40]), 1..400),
        bits in 40_u32..=56,
    ) {
        let mut kept = Priorities::new(&KEY);
        for (disk, first) in blocks {
            for bno in [first, first ^ 1, first ^ 0x100] {
                let block = BlockId { disk: DiskIndex(disk), bno: BlockNumber(bno) };
                let (name, threshold) = (priority::name(block), 1 << bits);
                let found = Priorities::new(&KEY).find(name, threshold);
                prop_assert!(found.is_none() || !kept.leaves_out(name, threshold), "nothing is left out that is followed");
                prop_assert_eq!(kept.find(name, threshold), found);
                // From then on the group is known.
                let is_above = priority_of(block) >> 48 > threshold >> 48;
                prop_assert_eq!(kept.leaves_out(name, threshold), is_above);
            }
        }
    }
}

/// Otherwise two disks that are read side by side would draw anew for each block.
#[test]
fn the_same_blocks_of_other_disks_have_other_places() {
    for (shift, bits) in [(8, priority::NEAR_BITS), (16, priority::FAR_BITS)] {
        let place = |disk| {
            let first = BlockId { disk: DiskIndex(disk), bno: BlockNumber(0) };
            priority::place(priority::name(first) >> shift, bits)
        };
        assert!((1..8).all(|disk| place(disk) != place(disk - 1)), "{bits}");
    }
}

/// Another curve of the same key, here one that follows fewer blocks, may find the priorities.
#[test]
fn a_curve_takes_what_another_one_has_found_as_what_it_finds_itself() {
    let mut random = Random(17);
    for blocks in [3, 60, 9000, 40_000] {
        let mut finder = after(20_000, 30_000);
        let mut told = MissRatioCurve::new(&KEY, FAR);
        let mut alone = told.clone();
        for round in 0..400_usize {
            if round % 150 == 149 {
                let classes = if round < 200 { 8 } else { 1 };
                [&mut told, &mut alone].into_iter().for_each(|curve| curve.see_class_of(classes));
            }
            let kinds: &[EventKind] = match round % 4 {
                0 => &[EventKind::Read],
                1 => &[EventKind::Evicted, EventKind::Read],
                2 => &[EventKind::ReadAndEvicted],
                _ => &[EventKind::Read, EventKind::ReadAndEvicted, EventKind::Evicted, EventKind::Discarded],
            };
            // An older limit will do: no event raises one.
            let limit = told.limit().max(finder.limit());
            let mut reads = 0;
            for _ in 0..64 {
                let kind = kinds[usize::try_from(random.below(kinds.len() as u64)).unwrap()];
                let block = block(random.below(blocks));
                match kind {
                    EventKind::Read => alone.read(block),
                    EventKind::ReadAndEvicted if round % 8 == 2 => alone.read_and_evicted(block),
                    EventKind::ReadAndEvicted => {
                        alone.read(block);
                        alone.evicted(block);
                    }
                    EventKind::Evicted => alone.evicted(block),
                    EventKind::Discarded => alone.discarded(block),
                }
                reads += u64::from(matches!(kind, EventKind::Read | EventKind::ReadAndEvicted));
                if let Some(priority) = finder.find(block, limit) {
                    told.take(kind, priority);
                }
            }
            told.count_reads(reads);
            assert_eq!((told.rate(), told.followed()), (alone.rate(), alone.followed()), "round {round}");
        }
        assert_eq!(told.to_bytes(), alone.to_bytes());
    }
}

#[test]
fn a_wide_range_is_discarded_as_its_blocks_are() {
    let mut curve = after(20_000, 30_000);
    assert!(curve.rate() < 1.);
    let mut by_block = curve.clone();
    let (disk, range) = (DiskIndex(1), 1000..1000 + 2 * WIDE_RANGE);
    curve.discarded_range(disk, range.clone());
    range.for_each(|bno| by_block.discarded(BlockId { disk, bno: BlockNumber(bno) }));
    assert!(curve.followed() < after(20_000, 30_000).followed());
    assert_eq!(curve.to_bytes(), by_block.to_bytes());
    curve.discarded_range(DiskIndex(0), 0..u64::MAX);
    curve.discarded_range(DiskIndex(2), 0..u64::MAX);
    curve.discarded_range(disk, 0..u64::MAX);
    assert_eq!(curve.followed(), 0);
}

#[test]
fn reads_that_no_cache_answers_are_misses_at_every_size() {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    (0..3).for_each(|number| curve.evicted(block(number)));
    (0..3).for_each(|number| curve.read(block(number)));
    curve.missed(1);
    assert_eq!(curve.miss_ratios([0, 3, 9].map(PageCount)), Some(vec![1., 0.25, 0.25]));
}

/// A loop over 30,000 blocks below a guest of 1,000: each read has the distance 29,000.
#[test]
fn of_the_evictions_a_random_part_is_enough() {
    for one_of in [1, 8] {
        let (mut curve, mut random) = (MissRatioCurve::new(&KEY, FAR), Random(7));
        curve.see_one_of(one_of);
        for at in 0..240_000_u64 {
            curve.read(block(at % 30_000));
            if at >= 1000 && random.below(one_of.into()) == 0 {
                curve.evicted(block((at - 1000) % 30_000));
            }
        }
        let ratios = curve.miss_ratios([1000, 26_000, 32_000].map(PageCount)).unwrap();
        let hits = [0., 0., 7. / 8.];
        for (ratio, hits) in ratios.iter().zip(hits) {
            assert!((1. - ratio - hits).abs() < 0.03, "one of {one_of}: {ratios:?}");
        }
    }
}

#[test]
fn when_less_is_seen_the_queue_is_thinned_out_and_when_more_is_seen_it_is_emptied() {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    (0..4000).for_each(|number| curve.evicted(block(number)));
    curve.see_one_of(4);
    assert!((900..1100).contains(&curve.followed()), "{}", curve.followed());
    curve.see_one_of(8);
    assert!((400..600).contains(&curve.followed()), "{}", curve.followed());
    curve.see_one_of(8);
    assert!(curve.followed() > 0);
    curve.see_one_of(1);
    assert_eq!(curve.followed(), 0);
}

/// Reads a loop of 29,000 stack distance `passes` times, with the pages of one class of `classes` alone seen if `is_seen` in part.
fn loop_by_class(curve: &mut MissRatioCurve, passes: u64, classes: u64) {
    for at in 0..passes * 30_000 {
        curve.read(block(at % 30_000));
        let evicted = (at + 29_000) % 30_000;
        if evicted.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & (classes - 1) == 0 {
            curve.evicted(block(evicted));
        }
    }
}

#[test]
fn of_the_pages_one_class_is_enough() {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    curve.see_class_of(64);
    loop_by_class(&mut curve, 8, 64);
    assert!((400..520).contains(&curve.followed()), "{}", curve.followed());
    let ratios = curve.miss_ratios([1000, 26_000, 32_000].map(PageCount)).unwrap();
    for (ratio, hits) in ratios.iter().zip([0., 0., 7. / 8.]) {
        assert!((1. - ratio - hits).abs() < 0.05, "{ratios:?}");
    }
}

/// The queue goes on when what is seen changes: all reads of the loop but those of its first pass hit, at the same distance.
#[test]
fn the_queue_goes_on_when_one_class_alone_is_seen_and_when_all_are_seen_again() {
    for turns in [[1, 64, 1], [1, 1024, 1], [64, 1, 64]] {
        let mut curve = MissRatioCurve::new(&KEY, FAR);
        for classes in turns {
            curve.see_class_of(classes);
            loop_by_class(&mut curve, 4, classes.into());
        }
        let ratios = curve.miss_ratios([1000, 25_000, 33_000].map(PageCount)).unwrap();
        for (ratio, hits) in ratios.iter().zip([0., 0., 11. / 12.]) {
            assert!((1. - ratio - hits).abs() < 0.05, "{turns:?}: {ratios:?}");
        }
    }
}

#[test]
fn the_rate_of_sampling_rises_while_one_class_is_seen_and_returns() {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    for number in 0.. {
        curve.evicted(block(number));
        curve.missed(1);
        if curve.rate() < 0.02 {
            break;
        }
    }
    let (all, followed) = (curve.rate(), curve.followed());
    curve.see_class_of(4);
    assert!((curve.rate() - 4. * all).abs() < 1e-9 && curve.one_of() == 4);
    assert_eq!(curve.followed(), followed);
    curve.see_class_of(1024);
    assert!((curve.rate() - 1.).abs() < 1e-9, "no block is left out any more");
    assert_eq!(
        MissRatioCurve::from_bytes(&KEY, &curve.to_bytes()).unwrap().followed(),
        0,
        "what is of another sample is not kept"
    );
    curve.see_class_of(1);
    assert!((curve.rate() - all).abs() < 1e-9);
    curve.see_class_of(8);
    (0..1000).for_each(|number| curve.evicted(block(number)));
    assert!(curve.followed() > 0);
    curve.see_one_of(2);
    assert_eq!((curve.one_of(), curve.followed()), (2, 0));
    assert!((curve.rate() - all).abs() < 1e-9);
    curve.see_class_of(4);
    assert_eq!(curve.one_of(), 4, "in place of a part at random");
}

/// The queue is full of the older sample. It makes room for that of the class, which takes more than half of the queue only if it lowers its own rate.
#[test]
fn a_scan_of_which_one_class_is_seen_costs_no_rate() {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    (0..30_000).for_each(|number| curve.evicted(block(number)));
    let (all, depth) = (curve.rate(), curve.depth());
    curve.see_class_of(128);
    let is_seen = |number: &u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 127 == 0;
    let mut scan = (30_000..).filter(is_seen).map(|number| curve.evicted(block(number)));
    assert_eq!(scan.by_ref().take(1500).count(), 1500);
    drop(scan);
    assert!((curve.rate() - 1.).abs() < 1e-9, "each page that is seen is followed: {}", curve.rate());
    assert!(curve.followed() > SAMPLES_MAX - SAMPLES_MAX / 64 - 1);
    let class = 1500. * 128.;
    assert!((curve.depth() / (depth + class) - 1.).abs() < 0.02, "{} of {depth} and {class}", curve.depth());
    curve.see_class_of(1);
    assert!((curve.rate() - all).abs() < 1e-9, "{} after {all}", curve.rate());

    curve.see_class_of(128);
    (900_000..2_000_000).filter(is_seen).for_each(|number| curve.evicted(block(number)));
    assert!(curve.rate() < 1.);
    curve.see_class_of(1);
    assert!(curve.rate() > 0.9 * all, "{} after {all}", curve.rate());
}

/// Those of the lowest priorities stay of the older sample.
#[test]
fn the_older_sample_gives_room_until_half_of_the_queue_is_of_the_class() {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    let (all, half) = (SAMPLES_MAX as u64, SAMPLES_MAX / 2);
    (0..all).for_each(|number| curve.evicted(block(number)));
    curve.see_class_of(128);
    (all..all + all / 2).for_each(|number| curve.evicted(block(number)));
    let mut priorities: Vec<u64> = (0..all).map(|number| priority_of(block(number))).collect();
    let oldest = priorities.clone();
    priorities.sort_unstable();
    let middle = priorities[half];
    assert_eq!((curve.queue.older(), curve.followed(), curve.rate()), (half, SAMPLES_MAX, 1.));
    assert_eq!(curve.older.threshold, middle);
    let oldest = oldest.into_iter().find(|priority| *priority < middle).unwrap();
    assert_eq!(curve.clone().queue.take(oldest), Some(Place { rank: half, newer: Some(half) }));
    // Half of the queue is for the class: it lowers its own rate from now on.
    curve.evicted(block(2 * all));
    assert!((0.9..1.).contains(&curve.rate()), "{}", curve.rate());
    assert_eq!((curve.queue.older(), curve.older.threshold), (half, middle));
    assert!(curve.followed() <= SAMPLES_MAX - SAMPLES_MAX / 64 + 1);
}

/// The other way round: of all pages fewer blocks are followed than of the class.
#[test]
fn a_queue_that_is_full_of_a_class_makes_room_for_all_pages() {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    curve.limit_rate(1. / 64.);
    curve.see_class_of(64);
    let all = SAMPLES_MAX as u64;
    (0..all).for_each(|number| curve.evicted(block(number)));
    curve.see_class_of(1);
    let sampled = (all..).map(block).find(|block| curve.samples(*block)).unwrap();
    curve.evicted(sampled);
    let fewer = SAMPLES_MAX / 64;
    assert_eq!((curve.queue.older(), curve.followed()), (SAMPLES_MAX - fewer, SAMPLES_MAX - fewer + 1));
    assert!((curve.rate() - 1. / 64.).abs() < 1e-9);
    // One that is of the older sample alone is found there.
    let is_older = |number: &u64| (curve.threshold..curve.older.threshold).contains(&priority_of(block(*number)));
    let newest = (0..all).rev().find(is_older).unwrap();
    curve.read(block(newest));
    let ratios = curve.miss_ratios([0, 2048].map(PageCount)).unwrap();
    assert!(ratios[0] > 1. - 1e-9 && ratios[1] < 1e-9, "{ratios:?}");
}

/// A loop of 29,000 stack distance. In each third of a pass all pages are seen for a while, as where writes free slots and every page may fill them.
#[test]
fn a_class_that_all_pages_interrupt_now_and_then_goes_on() {
    let (mut curve, passes) = (MissRatioCurve::new(&KEY, FAR), 12);
    for at in 0..passes * 30_000_u64 {
        let classes = if at % 10_000 < 9000 { 64 } else { 1 };
        curve.see_class_of(classes);
        curve.read(block(at % 30_000));
        let evicted = (at + 29_000) % 30_000;
        if evicted.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & u64::from(classes - 1) == 0 {
            curve.evicted(block(evicted));
        }
    }
    let ratios = curve.miss_ratios([1000, 25_000, 33_000].map(PageCount)).unwrap();
    for (ratio, hits) in ratios.iter().zip([0., 0., 11. / 12.]) {
        assert!((1. - ratio - hits).abs() < 0.06, "{ratios:?}");
    }
    assert_eq!(curve.reach(), FAR, "nothing is lost");
    assert!((curve.rate() - 1.).abs() < 1e-9);
}

/// What came meanwhile stands for as many blocks as what is of the class.
#[test]
fn a_class_that_goes_on_has_one_block_of_many_of_what_came_meanwhile() {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    curve.see_class_of(64);
    (0..100).for_each(|number| curve.evicted(block(number)));
    curve.see_class_of(1);
    (1000..3000).for_each(|number| curve.evicted(block(number)));
    curve.see_class_of(64);
    let is_left = |number: &u64| priority_of(block(*number)) < priority::ALL / 64;
    let left = (1000..3000).filter(is_left).count();
    assert_eq!((curve.followed(), curve.queue.older(), curve.one_of()), (100 + left, 0, 64));
    assert!((20..45).contains(&left), "{left}");
    curve.see_class_of(1);
    assert!((curve.rate() - 1.).abs() < 1e-9);

    // One that was thinned out to less than half begins anew.
    curve.see_class_of(64);
    curve.limit_rate(0.25);
    curve.see_class_of(1);
    let sampled = (0..).map(block).find(|block| curve.samples(*block)).unwrap();
    curve.evicted(sampled);
    curve.see_class_of(64);
    assert_eq!((curve.rate(), curve.queue.older(), curve.followed()), (1., 1, 1));
}

#[test]
fn classes_that_change_often_leave_the_rate_and_the_order_as_they_are() {
    let mut curve = MissRatioCurve::new(&KEY, REACH_MAX);
    (0..30_000).for_each(|number| curve.evicted(block(number)));
    let all = curve.rate();
    for number in 1..=9 {
        curve.see_class_of(if number % 2 == 0 { 1 } else { 128 });
    }
    assert_eq!((curve.followed(), curve.reach()), (0, REACH_MIN), "of a third sample nothing is known");
    curve.see_class_of(1);
    assert!((curve.rate() - all).abs() < 1e-12, "{} after {all}", curve.rate());
    let sampled: Vec<_> = (0..30_000).map(block).filter(|block| curve.samples(*block)).take(9).collect();
    sampled.iter().for_each(|block| curve.evicted(*block));
    sampled.iter().for_each(|block| curve.read(*block));
    assert_eq!((curve.followed(), curve.histogram.beyond), (0, 0.));
}

/// Also before any block of the present sample is in the queue.
#[test]
fn blocks_of_the_older_sample_stand_for_more_when_fewer_of_them_are_followed() {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    (0..4000).for_each(|number| curve.evicted(block(number)));
    curve.see_class_of(8);
    curve.limit_rate(0.25);
    let oldest = (0..4000).map(block).find(|block| curve.samples(*block)).unwrap();
    curve.read(oldest);
    assert_eq!(curve.miss_ratios([3000, 5000].map(PageCount)), Some(vec![1., 0.]), "its distance is about 4,000");
}

/// The sample of one class was larger.
#[test]
fn a_block_that_is_sampled_no_more_takes_no_room() {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    curve.limit_rate(1. / 64.);
    curve.see_class_of(64);
    (0..SAMPLES_MAX as u64).for_each(|number| curve.evicted(block(number)));
    curve.see_class_of(1);
    let others: Vec<_> = (10_000..20_000).map(block).filter(|block| !curve.samples(*block)).collect();
    others.into_iter().for_each(|block| curve.evicted(block));
    assert_eq!(curve.followed(), SAMPLES_MAX);
}

#[test]
fn a_full_queue_takes_its_blocks_again() {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    for _ in 0..2 {
        (0..SAMPLES_MAX as u64).for_each(|number| curve.evicted(block(number)));
    }
    assert_eq!((curve.rate(), curve.followed()), (1., SAMPLES_MAX));
}

/// Where few blocks are sampled and few are in the queue, the sample of it is empty most of the time, and yet nearly every read is a hit.
#[test]
fn an_empty_sample_is_no_empty_queue() {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    curve.limit_rate(1. / 16.);
    for number in 0..65_536 {
        curve.evicted(block(number));
        curve.read(block(number));
    }
    let missed = curve.miss_ratio(PageCount(64)).unwrap();
    assert!(missed < 1e-9, "{missed} of the reads would miss");
}

#[test]
fn a_limited_rate_stays() {
    let mut curve = MissRatioCurve::new(&KEY, FAR);
    (0..4000).for_each(|number| curve.evicted(block(number)));
    curve.limit_rate(0.25);
    assert!((900..1100).contains(&curve.followed()), "{}", curve.followed());
    curve.limit_rate(0.5);
    assert!((curve.rate() - 0.25).abs() < 1e-9);
    assert!((0..4000).filter(|number| curve.samples(block(*number))).count().abs_diff(1000) < 100);
}

mod windows {
    use super::*;
    use crate::units::Nanos;

    const MINUTE: u64 = 60_000_000_000;

    /// Reads 2,000 blocks of which the share `hits` is in the queue, at small distances.
    fn window(curve: &mut MissRatioCurve, hits: u64) {
        for at in 0..2000 {
            if at % 10 < hits {
                curve.evicted(block(at));
            } else {
                curve.discarded(block(at));
            }
            curve.read(block(at));
        }
    }

    #[test]
    fn a_window_takes_a_minute_and_enough_reads() {
        let (mut curve, mut windows) = (MissRatioCurve::new(&KEY, FAR), Windows::default());
        assert!(!windows.advance(Nanos(5), &mut curve));
        assert!(!windows.advance(Nanos(5 + 9 * MINUTE), &mut curve), "nothing was read");
        window(&mut curve, 5);
        assert!(!windows.advance(Nanos(4 + MINUTE), &mut curve));
        assert_eq!(windows.reads_per_s(Nanos(10), &curve), None);
        assert_eq!(windows.reads_per_s(Nanos(5 + MINUTE / 2), &curve), Some(2000. / 30.));
        assert!(windows.advance(Nanos(5 + MINUTE), &mut curve));
        assert_eq!(curve.reads(), 2000. * WINDOW_KEPT);
        assert_eq!(windows.forecasts(), Forecasts::default());
        assert_eq!(windows.reads_per_s(Nanos(6 + MINUTE), &curve), Some(2000. / 60.));
        assert_eq!(windows.last().map(|ratios| ratios.to_vec()), Some(vec![0.5; 23]));
    }

    #[test]
    fn reads_count_for_a_window_as_far_as_they_are_sampled() {
        let quarters: [fn(&mut MissRatioCurve); 2] = [|curve| curve.limit_rate(0.25), |curve| curve.see_one_of(4)];
        for quarter in quarters {
            let (mut curve, mut windows) = (MissRatioCurve::new(&KEY, FAR), Windows::default());
            quarter(&mut curve);
            windows.advance(Nanos(0), &mut curve);
            (0..2).for_each(|_| window(&mut curve, 5));
            assert!(!windows.advance(Nanos(MINUTE), &mut curve), "1,000 reads");
            window(&mut curve, 5);
            assert!(windows.advance(Nanos(MINUTE), &mut curve));
        }
    }

    #[test]
    fn forecasts_are_compared_with_what_came() {
        let (mut curve, mut windows) = (MissRatioCurve::new(&KEY, FAR), Windows::default());
        let mut now = 0;
        windows.advance(Nanos(now), &mut curve);
        let mut run = |hits: &[u64]| {
            for hits in hits {
                window(&mut curve, *hits);
                now += MINUTE;
                assert!(windows.advance(Nanos(now), &mut curve));
            }
            windows.forecasts()
        };
        let steady = run(&[4, 4, 4]);
        assert_eq!(steady.windows, 2);
        assert!(steady.curve_error < 1e-9 && steady.as_before_error < 1e-9, "{steady:?}");
        // The curve follows a change more slowly than the last window, which is wrong by all of it once.
        let changed = run(&[8]);
        assert!((changed.curve_error - 0.4 / 3.).abs() < 1e-9 && (changed.as_before_error - 0.4 / 3.).abs() < 1e-9);
        let later = run(&[8, 8]);
        assert!(later.as_before_error < later.curve_error, "{later:?}");
        // Where windows differ by chance, the mean of some is better.
        let noisy = run(&[3, 9, 3, 9, 3, 9, 3, 9, 3, 9, 3, 9, 3, 9, 3, 9]);
        assert!(noisy.as_before_error >= noisy.curve_error, "{noisy:?}");
    }
}
