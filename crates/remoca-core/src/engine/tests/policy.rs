//! Which evicted pages take the place of others.

use super::*;
use crate::engine::policy::Insertion;

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
