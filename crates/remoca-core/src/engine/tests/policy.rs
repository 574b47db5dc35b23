//! Which evicted pages take the place of others.

use super::*;
use crate::engine::policy::{CLASSES, Insertion};
use std::ops::Range;

/// Number of blocks of a loop that is larger than the cache.
const LOOP: u8 = 12;

impl Bench {
    /// Lets a guest without memory read a block, which is not zero, and evict it. Returns whether the read hit.
    fn read_and_evict(&mut self, bno: u8) -> (bool, Evicted) {
        let actions = self.read(1, blocks(bno.into(), 1));
        let hits = match actions[..] {
            [Action::Fetch { fetch, .. }] => {
                self.wait(MS / 5);
                assert_eq!(self.page_comes(fetch, bno), deliver(1, 0));
                true
            }
            _ => {
                self.wait(7 * MS);
                self.engine.handle_disk_done(self.now, RequestId(1), Ok(()), &page(bno));
                false
            }
        };
        self.actions();
        let evicted = self.engine.handle_evicted(&page(bno));
        self.engine.handle_sent(SERVER, 1);
        (hits, evicted)
    }

    /// Reads the loop, and returns the number of hits and of pages sent.
    fn pass(&mut self) -> (u32, u32) {
        let results: Vec<_> = (1..=LOOP).map(|bno| self.read_and_evict(bno)).collect();
        let hits = results.iter().filter(|(hits, _)| *hits).count();
        let sent = results.iter().filter(|(_, evicted)| matches!(evicted, Evicted::Admit(_))).count();
        (u32::try_from(hits).unwrap(), u32::try_from(sent).unwrap())
    }

    /// Reads the loop again and again, and returns the number of hits and of pages sent.
    fn passes(&mut self, count: u32) -> (u32, u32) {
        (0..count).map(|_| self.pass()).fold((0, 0), |all, pass| (all.0 + pass.0, all.1 + pass.1))
    }

    fn looped() -> Self {
        let mut bench = Self::connected();
        bench.passes(20);
        assert_eq!(bench.engine.status().policy.in_force, Insertion::Bimodal);
        bench
    }
}

#[test]
fn a_loop_larger_than_the_cache_hits_in_most_of_it() {
    let mut bench = Bench::connected();
    assert_eq!(bench.pass(), (0, 12));
    assert_eq!(bench.pass(), (0, 12), "every page takes the place of the one that is needed next");
    bench.passes(20);
    let (hits, sent) = bench.passes(32);
    assert!(hits >= 32 * 7 && sent <= 32, "{hits} hits of 384, {sent} pages sent");
    let stats = bench.engine.stats();
    assert!(stats.evictions_passed_over > 100);
    let PolicyStatus { lru, bimodal, .. } = bench.engine.status().policy;
    assert!(lru.unwrap() < 0.1 && bimodal.unwrap() > 0.5);
}

#[test]
fn a_loop_that_fits_again_is_cached_as_a_whole() {
    let mut bench = Bench::looped();
    let small = |bench: &mut Bench| (30..36).filter(|bno| bench.read_and_evict(*bno).0).count();
    let hits: Vec<_> = (0..40).map(|_| small(&mut bench)).collect();
    assert_eq!(hits.last(), Some(&6), "{hits:?}");
}

#[test]
fn without_adaptation_it_is_lru() {
    let mut bench = Bench::connected();
    bench.engine.adapt(false);
    (0..30).for_each(|_| assert_eq!(bench.pass(), (0, 12)));
}

#[test]
fn a_successor_goes_on_with_the_policy() {
    let mut bench = Bench::looped();
    let words = bench.engine.replace_index(layout(&EngineConfig { cache: PageCount(16), ..config() }), vec![0; 90_000]);
    assert!(words.is_some());
    bench.engine.end();
    let words = bench.engine.index.words().to_vec();
    let engine = DiskEngine::resume(&config(), words, Origin::Own).map_err(|unusable| unusable.reason).unwrap();
    assert_eq!(engine.status().policy.in_force, Insertion::Bimodal);
}

#[test]
fn free_slots_and_swap_areas_take_every_page() {
    let mut bench = Bench::looped();
    let cached = (1..=LOOP).find(|bno| bench.cached((*bno).into())).unwrap();
    bench.do_from_disk(GuestOp::Discard(blocks(cached.into(), 1)), &[]);
    let used = bench.engine.index().slot_counts().used;
    assert_eq!(used, 8, "its content is the next to be discarded");
    bench.engine.describe_disk(OTHER_DISK, 1 << 40, true);
    for bno in 50..60 {
        let written = bench.request(7, OTHER_DISK, write(blocks(bno.into(), 1)));
        assert_eq!(written.len(), 1);
        let actions = bench.disk_done(7, Ok(()), &page(bno));
        assert!(actions.iter().any(|action| matches!(action, Action::SendBlock { .. })), "{actions:?}");
        bench.engine.handle_sent(SERVER, 1);
    }
    // Nor does the policy say anything of clean pages there, which the agent sends.
    assert_eq!(bench.engine.status().policy.in_force, Insertion::Bimodal);
    for bno in 70..80 {
        bench.request(7, OTHER_DISK, GuestOp::Read(blocks(bno.into(), 1)));
        bench.disk_done(7, Ok(()), &page(bno));
        assert!(matches!(bench.engine.handle_evicted(&page(bno)), Evicted::Admit(_)), "{bno}");
        bench.engine.handle_sent(SERVER, 1);
    }
}

/// Size of a cache whose shadow caches can follow one class.
pub(super) const LARGE: PageCount = PageCount(8192);

impl Bench {
    /// Returns a bench with a cache of [`LARGE`], all of it free.
    pub(super) fn large() -> Self {
        let mut bench = Self::new(EngineConfig { cache: LARGE, slots_per_turn: LARGE.0, ..config() });
        let offer = PoolOffer { generation: 1, npages: PageCount(0), available: LARGE, sends_received: 0 };
        bench.engine.handle_answer(bench.now, SERVER, Some(offer));
        while bench.engine.index().slot_counts().free < LARGE.0 {
            bench.wait(MS);
            bench.engine.handle_timer(bench.now);
            bench.grant();
        }
        bench
    }
}

#[test]
fn while_nothing_is_inserted_one_class_of_pages_is_asked_for() {
    let (large, mut bench) = (LARGE, Bench::large());
    assert_eq!(bench.engine.class_advice(), 0);
    bench.engine.policy.restore(true);
    bench.engine.policy.fit(large);
    assert_eq!(bench.engine.class_advice(), 0, "free slots take every page");
    let content = |number: u32| {
        let mut page = page(1);
        page[..4].copy_from_slice(&number.to_le_bytes());
        page
    };
    let take = |bench: &mut Bench, number: u32| {
        bench.do_from_disk(GuestOp::Read(blocks(number.into(), 1)), &content(number));
        let evicted = bench.engine.handle_evicted(&content(number));
        bench.engine.handle_sent(SERVER, 1);
        evicted
    };
    let fill = |bench: &mut Bench, numbers: Range<u32>| {
        for number in numbers {
            let evicted = take(bench, number);
            assert!(matches!(evicted, Evicted::Admit(_)), "{number}: {evicted:?}");
        }
    };
    // As many slots as are free now do not begin the advice, and do not end it: it does not come and go.
    let few = large.0 / 32;
    fill(&mut bench, 0..large.0 - few);
    assert_eq!(bench.engine.class_advice(), 0);
    bench.engine.handle_agent(CLASSES);
    assert_eq!(bench.engine.class_advice(), CLASSES);
    bench.engine.handle_agent(0);
    fill(&mut bench, large.0 - few..large.0);
    assert_eq!(bench.engine.class_advice(), CLASSES);
    assert_eq!(take(&mut bench, 9000), Evicted::PassedOver, "as long as an agent sends all");
    let one_of = |bench: &mut Bench| {
        take(bench, 9001);
        bench.engine.curve(bench.now, None, &[]).unwrap().one_of
    };
    assert_eq!(one_of(&mut bench), 1);
    bench.engine.handle_agent(CLASSES);
    assert_eq!(one_of(&mut bench), CLASSES);
    // The guest's next eviction of a page that hits is probably not seen: the page stays.
    let [Action::Fetch { fetch, at }] = bench.read(0, blocks(1, 1))[..] else { panic!("it is cached") };
    bench.engine.handle_page(bench.now, SERVER, fetch, &content(1));
    bench.actions();
    assert_eq!(bench.engine.index().queue(POOL).last().map(|(slot, _)| slot), Some(at.slot));
    bench.engine.handle_agent(CLASSES / 2);
    assert_eq!(one_of(&mut bench), 1, "it was not asked for this");
    bench.engine.handle_agent(CLASSES);
    bench.engine.resize(bench.now, PageCount(0), PageCount(0));
    assert_eq!(bench.engine.class_advice(), 0);
}
