//! Insertion policy: whether an evicted page that is not cached takes the place of the oldest page.
//!
//! LRU inserts every page. A loop over more than the cache then never hits, because each page is discarded just before it is
//! read again, and every page travels in vain. *Bimodal insertion* (BIP; Qureshi et al., ISCA 2007) inserts one page in
//! [`BIMODAL`]: most of the cache stays as it is, and answers its share of the loop.
//!
//! A replaced page costs more than its own hits where reads are long: a read that lacks one block of a run goes to the disk as a
//! whole. So while bimodal insertion is in force and the cache still answers what its shadow does, nothing is inserted
//! ([`Renewal`]).
//!
//! Which of the two is better is always tried on a small scale (miniature simulation; Waldspurger et al., USENIX ATC 2017): two
//! *shadow caches*, which hold fingerprints but no pages, see the reads and evictions of one content in R and have one
//! R-th of the slots. Contents are sampled by their keyed fingerprint, so that no guest can choose what is seen. Decision 0037.

use crate::fingerprint::Fingerprint;
use crate::units::PageCount;
use std::collections::BTreeMap;

/// Number of evicted pages for each one that bimodal insertion inserts.
const BIMODAL: u32 = 32;
/// Maximum number of entries of a shadow cache.
const SHADOW_ENTRIES: u32 = 1024;
/// Number of reads, for each page of the cache, after which a renewal is decided: a loop is judged by whole passes.
const RENEWAL_READS: u32 = 16;
/// Number of sampled reads between two decisions.
const DECISION_READS: u32 = 32;

/// Policy by which evicted pages enter a full cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Insertion {
    /// Every page is inserted, in place of the least recently used one.
    #[default]
    Lru,
    /// At most one page in 32 is inserted, and none while the cache answers its share.
    Bimodal,
}

/// Counts pages, and tells which of them bimodal insertion inserts.
#[derive(Debug, Default)]
struct Turns(u32);

impl Turns {
    fn is_next_inserted(&mut self) -> bool {
        self.0 = (self.0 + 1) % BIMODAL;
        self.0 == 0
    }
}

/// Queue of fingerprints, moved as the pages of a cache are: a page that was read is the next to be discarded, because the guest
/// holds it, and a page that was evicted is the newest.
#[derive(Debug)]
struct Shadow {
    insertion: Insertion,
    capacity: usize,
    positions: BTreeMap<[u32; 3], i64>,
    queue: BTreeMap<i64, Fingerprint>,
    /// Positions that no entry ever had: before the first and after the last.
    before: i64,
    after: i64,
    turns: Turns,
}

impl Shadow {
    fn new(insertion: Insertion) -> Self {
        let (positions, queue) = (BTreeMap::new(), BTreeMap::new());
        Self { insertion, capacity: 0, positions, queue, before: -1, after: 0, turns: Turns::default() }
    }

    fn clear(&mut self) {
        self.positions.clear();
        self.queue.clear();
    }

    fn is_full(&self) -> bool {
        self.queue.len() >= self.capacity
    }

    fn resize(&mut self, capacity: usize) {
        self.capacity = capacity;
        while self.queue.len() > capacity {
            self.discard();
        }
    }

    fn retain(&mut self, stays: impl Fn(Fingerprint) -> bool) {
        self.positions.retain(|content, _| stays(Fingerprint(*content)));
        self.queue.retain(|_, content| stays(*content));
    }

    fn discard(&mut self) {
        if let Some((_, content)) = self.queue.pop_first() {
            self.positions.remove(&content.0);
        }
    }

    fn put(&mut self, content: Fingerprint, position: i64) {
        if let Some(old) = self.positions.insert(content.0, position) {
            self.queue.remove(&old);
        }
        self.queue.insert(position, content);
    }

    /// Notes a read, and returns whether it hits.
    fn read(&mut self, content: Fingerprint) -> bool {
        let hits = self.positions.contains_key(&content.0);
        if hits {
            self.put(content, self.before);
            self.before -= 1;
        }
        hits
    }

    fn evicted(&mut self, content: Fingerprint) {
        if !self.positions.contains_key(&content.0) && self.is_full() {
            if self.insertion == Insertion::Bimodal && !self.turns.is_next_inserted() {
                return;
            }
            self.discard();
        }
        if self.capacity > 0 {
            self.put(content, self.after);
            self.after += 1;
        }
    }
}

/// What the shadow caches hit, of the sampled reads since the policy changed. Old reads count less and less.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    reads: u32,
    /// Reads that hit in both, with LRU alone, and with bimodal insertion alone.
    both: u32,
    lru: u32,
    bimodal: u32,
}

impl Tally {
    fn note(&mut self, lru: bool, bimodal: bool) {
        self.reads += 1;
        match (lru, bimodal) {
            (true, true) => self.both += 1,
            (true, false) => self.lru += 1,
            (false, true) => self.bimodal += 1,
            (false, false) => {}
        }
    }

    fn halve(&mut self) {
        let Self { reads, both, lru, bimodal } = self;
        [reads, both, lru, bimodal].into_iter().for_each(|count| *count /= 2);
    }

    /// Difference that chance makes now and then, if both policies are equally good.
    fn noise(&self) -> u32 {
        3 * (self.lru + self.bimodal).isqrt()
    }

    /// Returns the policy that should follow `now`. `window` is the number of reads after which no hit means that nothing
    /// is read again in time.
    fn verdict(&self, now: Insertion, window: u32) -> Insertion {
        let least = self.noise().max(self.reads / 50);
        let hits = self.both + self.lru + self.bimodal;
        let is_in_vain = self.reads >= window && hits * 100 < self.reads;
        match now {
            Insertion::Lru if self.bimodal > self.lru + least || is_in_vain => Insertion::Bimodal,
            Insertion::Bimodal if self.lru > self.bimodal + self.noise() => Insertion::Lru,
            _ => now,
        }
    }
}

/// How the pages of a cache with bimodal insertion are replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Renewal {
    /// The cache answers what its shadow does, or nearly as much: nothing is inserted.
    #[default]
    Keep,
    /// It falls behind: one page in [`BIMODAL`] is inserted.
    Slow,
    /// It answers less than half as much: this many more pages are inserted.
    Whole(u32),
}

/// What the cache and the shadow with bimodal insertion hold of the sampled reads since the last renewal was decided.
#[derive(Clone, Copy, Debug, Default)]
struct Comparison {
    reads: u32,
    cache: u32,
    shadow: u32,
}

impl Comparison {
    fn note(&mut self, cache: bool, shadow: bool) {
        self.reads += 1;
        self.cache += u32::from(cache);
        self.shadow += u32::from(shadow);
    }

    /// Returns the renewal of a cache of `capacity` pages.
    fn verdict(&self, capacity: PageCount) -> Renewal {
        let behind = self.shadow.saturating_sub(self.cache).saturating_sub(3 * self.shadow.isqrt());
        match behind {
            _ if behind > self.shadow / 2 => Renewal::Whole(capacity.0),
            _ if behind > self.shadow / 10 => Renewal::Slow,
            _ => Renewal::Keep,
        }
    }
}

/// Hit ratios of the shadow caches: what each policy would answer of the reads now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyStatus {
    /// Policy by which evicted pages enter the cache now.
    pub in_force: Insertion,
    /// Share of the sampled reads that LRU would have hit, or `None` before there are any.
    pub lru: Option<f64>,
    /// Share of the sampled reads that bimodal insertion would have hit.
    pub bimodal: Option<f64>,
}

/// Policy in force, and the trial of both.
#[derive(Debug)]
pub struct Policy {
    adapts: bool,
    in_force: Insertion,
    capacity: PageCount,
    /// One content in this many, a power of two, is sampled.
    one_of: u32,
    lru: Shadow,
    bimodal: Shadow,
    tally: Tally,
    renewal: Renewal,
    comparison: Comparison,
    turns: Turns,
}

impl Default for Policy {
    fn default() -> Self {
        Self::new()
    }
}

impl Policy {
    /// Returns a policy that adapts, for a cache without pages.
    #[must_use]
    pub fn new() -> Self {
        Self {
            adapts: true,
            in_force: Insertion::Lru,
            capacity: PageCount(0),
            one_of: 1,
            lru: Shadow::new(Insertion::Lru),
            bimodal: Shadow::new(Insertion::Bimodal),
            tally: Tally::default(),
            renewal: Renewal::default(),
            comparison: Comparison::default(),
            turns: Turns::default(),
        }
    }

    /// Sets whether the policy adapts. Otherwise it is LRU.
    pub(super) fn adapt(&mut self, adapts: bool) {
        self.adapts = adapts;
        if !adapts {
            self.in_force = Insertion::Lru;
        }
    }

    /// Continues with the policy of the previous process.
    pub(super) fn restore(&mut self, is_bimodal: bool) {
        self.in_force = if is_bimodal { Insertion::Bimodal } else { Insertion::Lru };
    }

    /// Returns the policy by which evicted pages enter the cache now.
    pub fn in_force(&self) -> Insertion {
        self.in_force
    }

    /// Returns the policy in force, and what each would hit.
    pub(super) fn status(&self) -> PolicyStatus {
        let Tally { reads, both, lru, bimodal } = self.tally;
        let share = |hits: u32| (reads > 0).then(|| f64::from(hits) / f64::from(reads));
        PolicyStatus { in_force: self.in_force, lru: share(both + lru), bimodal: share(both + bimodal) }
    }

    /// Scales the shadow caches to a cache of `capacity` pages.
    pub fn fit(&mut self, capacity: PageCount) {
        if capacity == self.capacity {
            return;
        }
        self.capacity = capacity;
        let one_of = capacity.0.div_ceil(SHADOW_ENTRIES).max(1).checked_next_power_of_two().unwrap_or(1 << 31);
        let is_wider = one_of < self.one_of;
        self.one_of = one_of;
        let size = (capacity.0 / one_of) as usize;
        for shadow in [&mut self.lru, &mut self.bimodal] {
            // Of the contents that were not sampled before, nothing is known.
            shadow.retain(|content| !is_wider && is_one(content, one_of));
            shadow.resize(size);
        }
        (self.tally, self.comparison) = (Tally::default(), Comparison::default());
    }

    /// Returns whether the reads and evictions of this content are to be noted.
    #[inline]
    pub fn samples(&self, content: Fingerprint) -> bool {
        self.adapts && is_one(content, self.one_of)
    }

    /// Notes that the guest has read a block with a sampled content, which the cache held or not.
    pub fn note_read(&mut self, content: Fingerprint, is_cached: bool) {
        let (lru, bimodal) = (self.lru.read(content), self.bimodal.read(content));
        if !self.lru.is_full() || self.lru.capacity == 0 {
            return;
        }
        self.tally.note(lru, bimodal);
        let entries = (self.capacity.0 / self.one_of).max(DECISION_READS);
        if self.tally.reads.is_multiple_of(DECISION_READS) {
            let next = self.tally.verdict(self.in_force, 2 * entries);
            if next != self.in_force {
                (self.in_force, self.tally) = (next, Tally::default());
                (self.renewal, self.comparison) = (Renewal::Keep, Comparison::default());
            }
        }
        if self.tally.reads >= 4 * entries {
            self.tally.halve();
        }
        if self.in_force == Insertion::Bimodal {
            self.comparison.note(is_cached, bimodal);
            if self.comparison.reads >= RENEWAL_READS * entries {
                self.renew();
            }
        }
    }

    /// Decides how pages are replaced until the next decision.
    fn renew(&mut self) {
        self.renewal = self.comparison.verdict(self.capacity);
        if self.comparison.shadow * 100 < self.comparison.reads {
            // Nothing is read again, or it is another loop now: the shadow looks for it with what is read next.
            self.bimodal.clear();
        }
        self.comparison = Comparison::default();
    }

    /// Notes that the guest has evicted a page with a sampled content, which the disk is known to hold.
    pub fn note_eviction(&mut self, content: Fingerprint) {
        self.lru.evicted(content);
        self.bimodal.evicted(content);
    }

    /// Returns whether the next page that could take the place of another one is inserted.
    pub fn inserts(&mut self) -> bool {
        match (self.in_force, &mut self.renewal) {
            (Insertion::Lru, _) => true,
            (Insertion::Bimodal, Renewal::Slow) => self.turns.is_next_inserted(),
            (Insertion::Bimodal, Renewal::Whole(left)) if *left > 0 => {
                *left -= 1;
                true
            }
            (Insertion::Bimodal, _) => false,
        }
    }
}

fn is_one(content: Fingerprint, of: u32) -> bool {
    content.0[0] & (of - 1) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(number: u32) -> Fingerprint {
        Fingerprint([number, 7, number])
    }

    fn entries(policy: &Policy) -> Vec<u32> {
        policy.lru.queue.values().map(|content| content.0[0]).collect()
    }

    #[test]
    fn shadow_caches_follow_the_size_of_the_cache() {
        let mut policy = Policy::new();
        policy.fit(PageCount(4));
        (0..6).for_each(|number| policy.note_eviction(content(number)));
        assert_eq!(entries(&policy), [2, 3, 4, 5]);
        policy.fit(PageCount(3));
        assert_eq!(entries(&policy), [3, 4, 5], "the newest stay");
        policy.fit(PageCount(4096));
        assert_eq!((policy.one_of, policy.lru.capacity), (4, 1024));
        assert_eq!(entries(&policy), [4], "of the others nothing is noted any more");
        assert_eq!([0, 1, 2, 3, 4].map(|number| policy.samples(content(number))), [true, false, false, false, true]);
        policy.fit(PageCount(2048));
        assert_eq!((policy.one_of, policy.lru.capacity), (2, 1024));
        assert_eq!(entries(&policy), [], "of some contents nothing was noted until now");
        policy.fit(PageCount(u32::MAX));
        assert_eq!((policy.one_of, policy.lru.capacity), (1 << 22, 1023));
        policy.fit(PageCount(0));
        policy.note_eviction(content(0));
        policy.note_read(content(0), true);
        assert_eq!((entries(&policy), policy.status().lru), (vec![], None));
    }

    #[test]
    fn chance_does_not_decide() {
        let tally = |reads, both, lru, bimodal| Tally { reads, both, lru, bimodal };
        let verdict = |tally: Tally, now| tally.verdict(now, 2048);
        for (tally, from_lru, from_bimodal) in [
            (tally(64, 0, 0, 9), Insertion::Lru, Insertion::Bimodal),
            (tally(64, 0, 0, 10), Insertion::Bimodal, Insertion::Bimodal),
            (tally(64, 0, 10, 0), Insertion::Lru, Insertion::Lru),
            (tally(64, 0, 9, 0), Insertion::Lru, Insertion::Bimodal),
            (tally(1000, 500, 100, 120), Insertion::Lru, Insertion::Bimodal),
            (tally(2047, 0, 0, 0), Insertion::Lru, Insertion::Bimodal),
            (tally(2048, 0, 0, 0), Insertion::Bimodal, Insertion::Bimodal),
            (tally(2048, 21, 0, 0), Insertion::Lru, Insertion::Bimodal),
        ] {
            let verdicts = (verdict(tally, Insertion::Lru), verdict(tally, Insertion::Bimodal));
            assert_eq!(verdicts, (from_lru, from_bimodal), "{tally:?}");
        }
    }

    #[test]
    fn what_the_cache_lacks_is_renewed() {
        let renewal = |cache, shadow| Comparison { reads: 1000, cache, shadow }.verdict(PageCount(50));
        assert_eq!(renewal(500, 500), Renewal::Keep);
        assert_eq!(renewal(500, 610), Renewal::Keep);
        assert_eq!(renewal(460, 610), Renewal::Slow);
        assert_eq!(renewal(200, 610), Renewal::Whole(50));
        assert_eq!(renewal(0, 4), Renewal::Keep, "by chance");
        assert_eq!(renewal(0, 0), Renewal::Keep);
    }
}
