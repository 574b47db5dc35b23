//! Loading what the look-ups of several blocks will read. At millions of entries each access misses the processor's caches. The
//! accesses of one look-up depend on each other, so they are made step by step for many blocks, and the loads of a step overlap.

use super::layout::NONE;
use super::table::BATCH;
use super::{CacheIndex, Words};
use crate::fingerprint::Fingerprint;
use crate::units::{BlockId, PoolIndex};

impl<M: Words> CacheIndex<M> {
    /// Loads what look-ups and hits of these blocks will read.
    pub fn prefetch(&self, mut blocks: impl Iterator<Item = BlockId>) {
        loop {
            let sites = [(); BATCH as usize].map(|()| blocks.next().map(|block| self.entries.site_of(block)));
            let Some(Some(_)) = sites.first() else { return };
            sites.iter().flatten().for_each(|site| self.entries.touch_site(&self.words, *site));
            let entries = sites.map(|site| site.map_or(NONE, |site| self.entries.candidate(&self.words, site)));
            let entries = || entries.iter().copied().filter(|entry| *entry < self.entries.limit());
            entries().for_each(|entry| self.entries.touch_entry(&self.words, entry));
            let slots = || entries().filter(|entry| !self.nodes.has(*entry));
            slots().for_each(|slot| self.slots.touch_links(&self.words, slot));
            slots().for_each(|slot| self.slots.touch_neighbours(&self.words, slot));
        }
    }

    /// Loads what offers of pages with these contents will read.
    pub fn prefetch_contents(&self, contents: &[Fingerprint]) {
        for batch in contents.chunks(BATCH as usize) {
            let sites = || batch.iter().map(|content| self.entries.content_site(*content));
            sites().for_each(|site| self.entries.touch_content_site(&self.words, site));
            let mut entries = [NONE; BATCH as usize];
            for (entry, site) in entries.iter_mut().zip(sites()) {
                *entry = self.entries.content_candidate(&self.words, site);
            }
            let entries = || entries[..batch.len()].iter().copied().filter(|entry| *entry < self.entries.limit());
            entries().for_each(|entry| self.entries.touch_entry(&self.words, entry));
            // A page that is admitted takes the block along, so that the lines of the block change.
            entries().for_each(|entry| self.entries.touch_key(&self.words, entry));
        }
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
