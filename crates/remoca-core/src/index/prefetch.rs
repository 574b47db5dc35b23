//! Loading what the look-ups of several blocks will read. At millions of entries each access misses the processor's caches. The
//! accesses of one look-up depend on each other, so they are made step by step for many blocks, and the loads of a step overlap.

use super::layout::NONE;
use super::table::BATCH;
use super::{CacheIndex, Words};
use crate::fingerprint::Fingerprint;
use crate::units::{BlockId, PoolIndex};

/// Number of entries that the look-ups of a batch may examine first: two each. In a large table the tags are short, so that of ten
/// look-ups one examines another entry before its own.
const CANDIDATES: usize = 2 * BATCH as usize;

/// Entries that the look-ups of a batch may examine first.
struct Candidates {
    entries: [u32; CANDIDATES],
    count: usize,
}

impl Candidates {
    /// Returns those of at most [`CANDIDATES`] `entries` that are below `limit`.
    fn below(limit: u32, entries: impl Iterator<Item = u32>) -> Self {
        let mut this = Self { entries: [NONE; CANDIDATES], count: 0 };
        // No branch, because most of the second ones are missing, but nobody can tell which.
        entries.for_each(|entry| {
            this.entries[this.count] = entry;
            this.count += usize::from(entry < limit);
        });
        this
    }

    fn iter(&self) -> impl Iterator<Item = u32> {
        self.entries[..self.count].iter().copied()
    }
}

impl<M: Words> CacheIndex<M> {
    /// Loads what look-ups and hits of these blocks will read.
    pub fn prefetch(&self, mut blocks: impl Iterator<Item = BlockId>) {
        loop {
            let sites = [(); BATCH as usize].map(|()| blocks.next().map(|block| self.entries.site_of(block)));
            let Some(Some(_)) = sites.first() else { return };
            sites.iter().flatten().for_each(|site| self.entries.touch_site(&self.words, *site));
            let candidates = sites.iter().flatten().flat_map(|site| self.entries.candidates(&self.words, *site));
            let entries = Candidates::below(self.entries.limit(), candidates);
            let slots = || entries.iter().filter(|entry| !self.nodes.has(*entry));
            // The links come first, and are read while the entries come.
            slots().for_each(|slot| self.slots.touch_links(&self.words, slot));
            entries.iter().for_each(|entry| self.entries.touch_entry(&self.words, entry));
            slots().for_each(|slot| self.slots.touch_neighbours(&self.words, slot));
        }
    }

    /// Loads what offers of pages with these contents will read.
    pub fn prefetch_contents(&self, contents: &[Fingerprint]) {
        for batch in contents.chunks(BATCH as usize) {
            let sites = || batch.iter().map(|content| self.entries.content_site(*content));
            sites().for_each(|site| self.entries.touch_content_site(&self.words, site));
            let candidates = sites().flat_map(|site| self.entries.content_candidates(&self.words, site));
            let entries = Candidates::below(self.entries.limit(), candidates);
            entries.iter().for_each(|entry| self.entries.touch_entry(&self.words, entry));
            // A page that is admitted takes the block along, so that the lines of the block change.
            entries.iter().for_each(|entry| self.entries.touch_key(&self.words, entry));
        }
    }

    /// Begins to load what giving up `last` and the slots before it will read, `count` slots in all.
    pub(super) fn prefetch_losses(&self, last: u32, count: u32) {
        let batch = || ((last + 1).saturating_sub(count)..=last).rev();
        batch().for_each(|slot| self.slots.touch_links(&self.words, slot));
        batch().for_each(|slot| self.entries.touch(&self.words, slot));
        batch().for_each(|slot| self.slots.touch_neighbours(&self.words, slot));
    }

    /// Begins to load what discarding the next pages of a pool will read: the lines of the second page, the entry of the third, and the
    /// links of the fourth. Each is found by what an admission before has begun to load, so that nothing waits.
    pub(super) fn prefetch_victims(&self, pool: PoolIndex) {
        let [second, third, fourth] = self.slots.later_victims(&self.words, pool);
        let is_slot = |slot: u32| slot < self.slots.limit();
        if is_slot(second) {
            self.entries.touch(&self.words, second);
        }
        if is_slot(third) {
            self.entries.touch_entry(&self.words, third);
        }
        if is_slot(fourth) {
            self.slots.touch_links(&self.words, fourth);
        }
    }
}
