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
//!
//! What is passed over need not be sent. While nothing is inserted ([`Policy::is_quiet`]), or the disk answers what is cached
//! ([`super::streams`]), the agent is advised to send only the pages of one
//! class of [`CLASSES`], always the same ones. These are the sample of the shadow caches then. An entry that came so stands for more contents
//! than others, and takes as much more room; so the shadow caches go on when the sample changes. Decision 0049.

use crate::fingerprint::Fingerprint;
use crate::units::PageCount;
use std::collections::BTreeMap;

/// Number of evicted pages for each one that bimodal insertion inserts.
const BIMODAL: u32 = 32;
/// Maximum number of entries of a shadow cache.
const SHADOW_ENTRIES: u32 = 1024;
/// Number of reads, for each page of the cache, after which a renewal is decided: a loop is judged by whole passes.
const RENEWAL_READS: u32 = 16;
/// The same while the shadow caches were never full: what is read again fits the cache then, so its passes are short.
const FIRST_RENEWAL_READS: u32 = 4;
/// Number of sampled reads between two decisions.
const DECISION_READS: u32 = 32;
/// Number of classes into which the agent divides the guest's pages, to send one of them. A power of two.
pub const CLASSES: u32 = 128;
/// Minimum number of pages of a cache for which one class is enough: its shadow caches hold 64 entries of that class.
const QUIET_CAPACITY_MIN: u32 = 64 * CLASSES;

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

/// Entry of a shadow cache.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Number of sampled contents for which it stands.
    weight: u32,
    /// Whether it came as a page of a class: it may be none of the contents that are sampled when all pages are sent.
    is_of_class: bool,
}

/// Queue of fingerprints, moved as the pages of a cache are: a page that was read is the next to be discarded, because the guest
/// holds it, and a page that was evicted is the newest.
#[derive(Debug)]
struct Shadow {
    insertion: Insertion,
    capacity: u32,
    /// Position of each entry, and what it is.
    positions: BTreeMap<[u32; 3], (i64, Entry)>,
    queue: BTreeMap<i64, Fingerprint>,
    /// Sum of the weights, and the number of entries that came as pages of a class.
    weight: u32,
    of_class: u32,
    /// Positions that no entry ever had: before the first and after the last.
    before: i64,
    after: i64,
    turns: Turns,
}

impl Shadow {
    fn new(insertion: Insertion) -> Self {
        let (positions, queue) = (BTreeMap::new(), BTreeMap::new());
        let (capacity, weight, of_class) = (0, 0, 0);
        Self { insertion, capacity, positions, queue, weight, of_class, before: -1, after: 0, turns: Turns::default() }
    }

    fn clear(&mut self) {
        self.positions.clear();
        self.queue.clear();
        (self.weight, self.of_class) = (0, 0);
    }

    /// Returns whether an entry of this weight takes the place of another one.
    fn is_full(&self, weight: u32) -> bool {
        self.weight + weight > self.capacity
    }

    fn resize(&mut self, capacity: u32) {
        self.capacity = capacity;
        while self.weight > capacity {
            self.discard();
        }
    }

    fn retain(&mut self, stays: impl Fn(Fingerprint) -> bool) {
        let contents: Vec<_> = self.queue.values().copied().filter(|content| !stays(*content)).collect();
        contents.into_iter().for_each(|content| self.forget(content));
    }

    fn discard(&mut self) {
        if let Some((_, content)) = self.queue.first_key_value() {
            self.forget(*content);
        }
    }

    fn has(&self, content: Fingerprint) -> bool {
        self.positions.contains_key(&content.0)
    }

    fn forget(&mut self, content: Fingerprint) {
        if let Some((position, entry)) = self.positions.remove(&content.0) {
            self.queue.remove(&position);
            self.weight -= entry.weight;
            self.of_class -= u32::from(entry.is_of_class);
        }
    }

    fn put(&mut self, content: Fingerprint, position: i64, entry: Entry) {
        self.forget(content);
        self.positions.insert(content.0, (position, entry));
        self.queue.insert(position, content);
        self.weight += entry.weight;
        self.of_class += u32::from(entry.is_of_class);
    }

    /// Notes a read. Returns the weight of the entry that it hits; 0 if it hits none.
    fn read(&mut self, content: Fingerprint) -> u32 {
        let Some((_, entry)) = self.positions.get(&content.0).copied() else { return 0 };
        self.put(content, self.before, entry);
        self.before -= 1;
        entry.weight
    }

    fn evicted(&mut self, content: Fingerprint, entry: Entry) {
        let weight = entry.weight;
        let takes_a_place = !self.has(content) && self.is_full(weight);
        if takes_a_place && self.insertion == Insertion::Bimodal && !self.turns.is_next_inserted() {
            return;
        }
        self.forget(content);
        while self.is_full(weight) && !self.queue.is_empty() {
            self.discard();
        }
        if weight <= self.capacity {
            self.put(content, self.after, entry);
            self.after += 1;
        }
    }
}

/// What the shadow caches hit, of the sampled reads since the policy changed. Old reads count less and less.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    reads: u32,
    /// Of these, the reads since the shadow caches are full.
    in_full: u32,
    /// Reads that hit in both, with LRU alone, and with bimodal insertion alone.
    both: u32,
    lru: u32,
    bimodal: u32,
    /// Sum of the squares of the weights of the latter two.
    variance: u32,
}

impl Tally {
    /// Notes a read that hits entries of these weights.
    fn note(&mut self, is_counted: bool, is_full: bool, lru: u32, bimodal: u32) {
        self.reads += u32::from(is_counted);
        self.in_full += u32::from(is_counted && is_full);
        let both = lru.min(bimodal);
        self.both += both;
        self.lru += lru - both;
        self.bimodal += bimodal - both;
        self.variance += lru.abs_diff(bimodal).pow(2);
    }

    fn hits(&self) -> u32 {
        self.both + self.lru + self.bimodal
    }

    fn halve(&mut self) {
        let Self { reads, in_full, both, lru, bimodal, variance } = self;
        [reads, in_full, both, lru, bimodal, variance].into_iter().for_each(|count| *count /= 2);
    }

    /// Difference that chance makes now and then, if both policies are equally good.
    fn noise(&self) -> u32 {
        3 * self.variance.isqrt()
    }

    /// Returns the policy that should follow `now`. `window` is the number of reads of full caches after which no hit means that nothing is
    /// read again in time.
    fn verdict(&self, now: Insertion, window: u32) -> Insertion {
        let least = self.noise().max(self.reads / 50);
        let is_in_vain = self.in_full >= window && self.hits() * 100 < self.reads;
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
    /// Capacity at which tally and comparison began.
    compared_at: PageCount,
    /// One content in this many, a power of two, is sampled.
    one_of: u32,
    /// Number of classes of pages of which the evictions of one are seen; 1 if all are.
    classes: u32,
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
            compared_at: PageCount(0),
            one_of: 1,
            classes: 1,
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
        let Tally { reads, both, lru, bimodal, .. } = self.tally;
        // Of an entry that came as a page of a class more hits are counted than reads.
        let reads = reads.max(self.tally.hits());
        let share = |hits: u32| (reads > 0).then(|| f64::from(hits) / f64::from(reads));
        PolicyStatus { in_force: self.in_force, lru: share(both + lru), bimodal: share(both + bimodal) }
    }

    /// Scales the shadow caches to a cache of `capacity` pages.
    pub fn fit(&mut self, capacity: PageCount) {
        if capacity == self.capacity {
            return;
        }
        self.capacity = capacity;
        // A cache that changes a little and often, as one that memory is given to in steps, would never be judged.
        let is_another = capacity.0.abs_diff(self.compared_at.0) > self.compared_at.0 / 8;
        let least = capacity.0.div_ceil(SHADOW_ENTRIES).max(1).checked_next_power_of_two().unwrap_or(1 << 31);
        let one_of = if is_another { least } else { least.max(self.one_of) };
        let is_same_sample = one_of == self.one_of;
        // Of the contents that were not sampled before, nothing is known; nor is what an entry of a class stands for now.
        let goes_on = one_of > self.one_of && self.classes == 1 && !self.has_any_of_class();
        self.one_of = one_of;
        for shadow in [&mut self.lru, &mut self.bimodal] {
            // Pages of a class are entries whatever their content is.
            shadow.retain(|content| is_same_sample || goes_on && is_one(content, one_of));
            shadow.resize(capacity.0 / one_of);
        }
        if !is_same_sample || is_another {
            (self.tally, self.comparison) = (Tally::default(), Comparison::default());
            self.compared_at = capacity;
        }
    }

    /// Sets that the evictions of one class of pages of `classes` are seen, always the same ones; 1 if all are.
    pub(super) fn see_class_of(&mut self, classes: u32) {
        self.classes = classes;
    }

    /// Returns whether no page takes the place of another one for now.
    pub(super) fn is_quiet(&self) -> bool {
        self.in_force == Insertion::Bimodal && matches!(self.renewal, Renewal::Keep | Renewal::Whole(0))
    }

    /// Returns whether one class of pages is enough for the shadow caches.
    pub(super) fn can_follow_a_class(&self) -> bool {
        self.capacity.0 >= QUIET_CAPACITY_MIN
    }

    fn has_any_of_class(&self) -> bool {
        self.lru.of_class + self.bimodal.of_class > 0
    }

    /// Returns whether the reads and evictions of this content are to be noted.
    #[inline]
    pub fn samples(&self, content: Fingerprint) -> bool {
        // What came as a page of a class was of the sample of that time.
        let may_be_entry = || self.has_any_of_class() && self.is_of_sample(content, CLASSES);
        let is_entry = || may_be_entry() && (self.lru.has(content) || self.bimodal.has(content));
        self.adapts && (self.is_of_sample(content, self.classes) || is_entry())
    }

    /// Returns whether an evicted page of this content becomes an entry while those of one class of `classes` are seen: of all that are
    /// sent in part those of a class.
    #[inline]
    fn is_of_sample(&self, content: Fingerprint, classes: u32) -> bool {
        is_one(content, (self.one_of / classes).max(1))
    }

    /// Notes that the guest has read a block with a sampled content, which the cache held or not.
    pub fn note_read(&mut self, content: Fingerprint, is_cached: bool) {
        let (lru, bimodal) = (self.lru.read(content), self.bimodal.read(content));
        if self.lru.capacity == 0 {
            return;
        }
        // Of what class a page is that is read, nobody knows.
        let is_counted = is_one(content, self.one_of);
        let is_full = self.lru.is_full(self.weight());
        self.tally.note(is_counted, is_full, lru, bimodal);
        let entries = (self.capacity.0 / self.one_of).max(DECISION_READS);
        // Hits of a class come one by one, with many reads between them.
        let is_due = (is_counted && self.tally.reads.is_multiple_of(DECISION_READS)) || lru.max(bimodal) > 1;
        if is_full && is_due {
            let next = self.tally.verdict(self.in_force, entries / 2);
            if next != self.in_force {
                (self.in_force, self.tally) = (next, Tally::default());
                (self.renewal, self.comparison) = (Renewal::Keep, Comparison::default());
            }
        }
        // A guest may read nothing but an entry whose reads are not counted.
        if self.tally.reads.max(self.tally.hits()) >= 4 * entries {
            self.tally.halve();
        }
        if self.in_force == Insertion::Bimodal {
            self.comparison.reads += u32::from(is_counted);
            self.comparison.cache += u32::from(is_counted && is_cached);
            self.comparison.shadow += bimodal;
            let least = if self.tally.in_full == 0 { FIRST_RENEWAL_READS } else { RENEWAL_READS };
            if self.comparison.reads.max(self.comparison.shadow) >= least * entries {
                self.renew();
            }
        }
    }

    /// Returns how many sampled contents one stands for that is evicted now.
    fn weight(&self) -> u32 {
        (self.classes / self.one_of).max(1)
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
        let entry = Entry { weight: self.weight(), is_of_class: self.classes > 1 };
        let is_of_sample = self.is_of_sample(content, self.classes);
        for shadow in [&mut self.lru, &mut self.bimodal] {
            // The others of its class are not seen any more.
            if is_of_sample { shadow.evicted(content, entry) } else { shadow.forget(content) }
        }
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

#[inline]
fn is_one(content: Fingerprint, of: u32) -> bool {
    content.0[0] & (of - 1) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    fn content(number: u32) -> Fingerprint {
        Fingerprint([number, 7, number])
    }

    /// Returns the policy of a cache of so many pages, of which one class is seen, and these contents were evicted.
    fn with_a_class(pages: u32, evicted: Range<u32>) -> Policy {
        let mut policy = Policy::new();
        policy.fit(PageCount(pages));
        policy.see_class_of(CLASSES);
        evicted.for_each(|number| policy.note_eviction(content(number)));
        policy
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
    fn a_cache_whose_size_changes_a_little_is_judged_all_the_same() {
        let guest = |changes: bool| {
            let mut guest = Guest::new(false);
            guest.policy.restore(true);
            for first in (0..4).flat_map(|_| (0..7000).step_by(100)) {
                guest.policy.fit(PageCount(8192 - u32::from(changes) * (first / 100 % 2)));
                guest.read(first..first + 100);
            }
            guest
        };
        let [same, mut changed] = [false, true].map(guest);
        let compared = |guest: &Guest| (guest.policy.tally.reads, guest.policy.comparison.reads);
        assert!(compared(&same) == compared(&changed) && compared(&same).1 > 1000, "{:?}", compared(&changed));
        changed.policy.fit(PageCount(7100));
        assert_eq!((changed.policy.one_of, compared(&changed)), (8, (0, 0)), "that is another cache");
    }

    /// Of a cache of up to 8,192 pages 1 in 8 is followed, of a larger one 1 in 16.
    #[test]
    fn a_cache_whose_size_changes_a_little_keeps_its_sample() {
        let mut policy = Policy::new();
        policy.fit(PageCount(8192));
        policy.fit(PageCount(8193));
        (0..512).for_each(|number| policy.note_eviction(content(16 * number)));
        policy.note_read(content(0), false);
        for pages in [8192, 8193, 7200, 8193] {
            policy.fit(PageCount(pages));
            assert_eq!((policy.one_of, policy.tally.reads), (16, 1), "{pages}");
            assert!(entries(&policy).len() >= 450, "{pages}");
        }
        policy.fit(PageCount(7168));
        assert_eq!((policy.one_of, policy.tally.reads, entries(&policy).len()), (8, 0, 0), "that is another cache");
    }

    #[test]
    fn chance_does_not_decide() {
        let tally =
            |reads, both, lru, bimodal| Tally { reads, in_full: reads, both, lru, bimodal, variance: lru + bimodal };
        let verdict = |tally: Tally, now| tally.verdict(now, 2048);
        for (tally, from_lru, from_bimodal) in [
            (tally(64, 0, 0, 9), Insertion::Lru, Insertion::Bimodal),
            (tally(64, 0, 0, 10), Insertion::Bimodal, Insertion::Bimodal),
            (tally(64, 0, 10, 0), Insertion::Lru, Insertion::Lru),
            (tally(64, 0, 9, 0), Insertion::Lru, Insertion::Bimodal),
            (tally(1000, 500, 100, 120), Insertion::Lru, Insertion::Bimodal),
            (tally(4000, 500, 0, 80), Insertion::Lru, Insertion::Bimodal),
            (tally(4000, 500, 0, 81), Insertion::Bimodal, Insertion::Bimodal),
            (tally(2047, 0, 0, 0), Insertion::Lru, Insertion::Bimodal),
            (tally(2048, 0, 0, 0), Insertion::Bimodal, Insertion::Bimodal),
            (tally(2048, 21, 0, 0), Insertion::Lru, Insertion::Bimodal),
        ] {
            let verdicts = (verdict(tally, Insertion::Lru), verdict(tally, Insertion::Bimodal));
            assert_eq!(verdicts, (from_lru, from_bimodal), "{tally:?}");
        }
    }

    /// A guest without memory in front of a cache of 8,192 pages, of which the shadow caches follow 1 in 8.
    struct Guest {
        policy: Policy,
        /// Whether the agent follows the advice.
        follows: bool,
        sent: u32,
    }

    impl Guest {
        fn new(follows: bool) -> Self {
            let mut policy = Policy::new();
            policy.fit(PageCount(8192));
            Self { policy, follows, sent: 0 }
        }

        /// Reads pages and evicts each at once. Returns the number of pages that the agent sent.
        fn read(&mut self, numbers: std::ops::Range<u32>) -> u32 {
            let before = self.sent;
            for number in numbers {
                let mixed = number.wrapping_mul(0x9e37_79b9);
                let content = Fingerprint([mixed ^ mixed >> 15, number, number]);
                if self.policy.samples(content) {
                    self.policy.note_read(content, false);
                }
                if number.is_multiple_of(512) && self.follows {
                    self.policy.see_class_of(if self.policy.is_quiet() { CLASSES } else { 1 });
                }
                let class = number.wrapping_mul(0x85eb_ca6b) >> 25;
                if self.policy.classes == 1 || class == 0 {
                    self.sent += 1;
                    if self.policy.samples(content) {
                        self.policy.note_eviction(content);
                    }
                }
            }
            self.sent - before
        }
    }

    #[test]
    fn one_class_is_enough_to_see_that_pages_are_hit_again() {
        for follows in [true, false] {
            let mut guest = Guest::new(follows);
            assert_eq!(guest.read(0..10_000), 10_000);
            assert!(!guest.policy.is_quiet(), "the shadow caches were not full for long");
            guest.read(10_000..16_384);
            assert!(guest.policy.is_quiet(), "nothing was hit");
            let sent = guest.read(20_000..60_000);
            assert_eq!(sent < 500, follows, "{sent} sent");
            // A loop that fits the cache.
            guest.read(100_000..107_000);
            assert!(guest.policy.is_quiet());
            guest.read(100_000..104_000);
            assert_eq!((guest.policy.in_force, guest.policy.is_quiet()), (Insertion::Lru, false));
            // What came as a class goes on to stand for others, until it is evicted again.
            assert_eq!(guest.policy.has_any_of_class(), follows);
            (0..6).for_each(|_| _ = guest.read(100_000..107_000));
            assert_eq!(guest.policy.in_force, Insertion::Lru);
            assert!(guest.policy.status().lru.unwrap() > 0.9, "{:?}", guest.policy.status());
            assert!(guest.policy.lru.of_class < 10 && guest.policy.lru.weight <= 1024);
            // One that does not.
            (0..12).for_each(|_| _ = guest.read(200_000..212_288));
            assert!(guest.policy.is_quiet(), "{:?}", guest.policy.status());
            let sent = guest.read(200_000..212_288);
            assert_eq!(sent < 200, follows, "{sent} sent");
        }
    }

    #[test]
    fn a_small_cache_has_too_few_entries_of_a_class() {
        let mut policy = Policy::new();
        policy.fit(PageCount(8191));
        policy.restore(true);
        assert!(!policy.can_follow_a_class());
        policy.fit(PageCount(8192));
        assert!(policy.can_follow_a_class() && policy.is_quiet());
        for renewal in [Renewal::Slow, Renewal::Whole(1)] {
            policy.renewal = renewal;
            assert!(!policy.is_quiet(), "pages are inserted");
        }
    }

    #[test]
    fn an_entry_of_a_class_takes_the_room_of_those_that_it_stands_for() {
        let mut policy = with_a_class(8192, 0..100);
        assert_eq!((policy.lru.weight, policy.lru.of_class), (64 * 16, 64));
        assert_eq!(entries(&policy)[0], 36);
        policy.see_class_of(1);
        policy.note_eviction(content(99));
        assert!(!policy.lru.has(content(99)), "what is seen now is another sample");
        policy.note_eviction(content(96));
        assert_eq!((policy.lru.weight, policy.lru.of_class), (62 * 16 + 1, 62));
        policy.fit(PageCount(16384));
        assert_eq!((policy.lru.weight, policy.lru.of_class), (0, 0), "nobody knows what they stand for now");
    }

    #[test]
    fn entries_of_a_class_stay_while_the_size_changes_a_little() {
        let mut policy = with_a_class(10_000, 0..40);
        policy.fit(PageCount(10_001));
        assert_eq!((policy.lru.weight, policy.lru.of_class), (40 * 8, 40));
    }

    /// In a cache of 512 MiB each entry of a class stands for no more than itself. In one of 1 GiB half of the contents become entries.
    #[test]
    fn an_entry_of_a_class_of_a_large_cache_is_followed_until_it_is_evicted_again() {
        for (pages, number) in [(1 << 17, 1), (1 << 18, 2)] {
            let mut policy = with_a_class(pages, number..number + 1);
            policy.see_class_of(1);
            assert!(policy.samples(content(number)) && !policy.samples(content(number + 1)));
            policy.note_read(content(number), false);
            assert_eq!((policy.tally.reads, policy.tally.hits()), (0, 1));
            policy.note_eviction(content(number));
            assert!(!policy.lru.has(content(number)) && !policy.samples(content(number)));
        }
    }

    #[test]
    fn a_guest_that_reads_one_page_of_a_class_for_ever_makes_no_count_grow() {
        let mut policy = with_a_class(8192, 1..2);
        assert!(
            !is_one(content(1), policy.one_of) && policy.samples(content(1)),
            "an entry whose reads are not counted"
        );
        for is_bimodal in [false, true] {
            policy.restore(is_bimodal);
            for _ in 0..100_000 {
                policy.note_read(content(1), false);
                let PolicyStatus { lru, bimodal, .. } = policy.status();
                assert!(
                    [lru, bimodal].into_iter().flatten().all(|ratio| (0. ..=1.).contains(&ratio)),
                    "{lru:?} {bimodal:?}"
                );
                let Tally { variance, .. } = policy.tally;
                assert!(policy.tally.hits() <= 4 * 1024 + 16 && variance <= 16 * (4 * 1024 + 16));
                assert!(policy.comparison.shadow < RENEWAL_READS * 1024);
            }
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

    /// The shadow caches of a successor are empty, and what fits the cache does not fill them. Without a full one no policy is better.
    #[test]
    fn a_successor_renews_its_cache_soon_for_a_working_set_that_fits() {
        for follows in [true, false] {
            let mut guest = Guest::new(follows);
            guest.policy.restore(true);
            (0..4).for_each(|_| _ = guest.read(0..7000));
            assert_eq!(
                (guest.policy.renewal, guest.policy.comparison.cache),
                (Renewal::Keep, 0),
                "not before enough is read"
            );
            (0..2).for_each(|_| _ = guest.read(0..7000));
            assert_eq!((guest.policy.renewal, guest.policy.tally.in_full), (Renewal::Whole(8192), 0));
            // A loop that does not fit is judged by whole passes.
            let mut guest = Guest::new(follows);
            guest.policy.restore(true);
            (0..4).for_each(|_| _ = guest.read(0..12_288));
            assert_eq!(guest.policy.renewal, Renewal::Keep);
        }
    }

    #[test]
    fn a_shadow_that_hits_nothing_looks_for_another_loop() {
        for (hits, left) in [(6, 4), (5, 0)] {
            let mut policy = Policy::new();
            policy.fit(PageCount(4));
            policy.restore(true);
            (0..4).for_each(|number| policy.note_eviction(content(number)));
            (0..hits).for_each(|_| policy.note_read(content(0), true));
            let others = hits..RENEWAL_READS * DECISION_READS;
            others.for_each(|number| policy.note_read(content(1000 + number), false));
            assert_eq!(policy.comparison.reads, 0, "a renewal was decided");
            assert_eq!((policy.bimodal.queue.len(), policy.lru.queue.len()), (left, 4));
        }
    }

    #[test]
    fn each_renewal_inserts_its_number_of_pages() {
        let mut policy = Policy::new();
        let inserted = |policy: &mut Policy| (0..64).filter(|_| policy.inserts()).count();
        assert_eq!(inserted(&mut policy), 64);
        policy.restore(true);
        for (renewal, count) in [(Renewal::Keep, 0), (Renewal::Slow, 2), (Renewal::Whole(5), 5)] {
            policy.renewal = renewal;
            assert_eq!(inserted(&mut policy), count, "{renewal:?}");
        }
        assert_eq!(policy.renewal, Renewal::Whole(0));
    }

    #[test]
    fn another_policy_begins_without_the_renewal_of_a_former_time() {
        let mut policy = Policy::new();
        policy.fit(PageCount(4));
        policy.renewal = Renewal::Whole(9);
        (0..4).for_each(|number| policy.note_eviction(content(number)));
        (0..DECISION_READS).for_each(|number| policy.note_read(content(1000 + number), false));
        assert_eq!((policy.in_force, policy.renewal), (Insertion::Bimodal, Renewal::Keep));
        assert_eq!((policy.tally.reads, policy.comparison.reads), (0, 1));
    }
}
