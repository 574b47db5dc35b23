//! Loading what the look-ups of several blocks will read. At millions of entries each access misses the processor's caches. The
//! accesses of one look-up depend on each other, so they are made step by step for many blocks, and the loads of a step overlap.

use super::layout::NONE;
use super::table::BATCH;
use super::{CacheIndex, Words};
use crate::fingerprint::Fingerprint;
use crate::units::{BlockId, PoolIndex};
use std::hint::black_box;

impl<M: Words> CacheIndex<M> {
    /// Loads what look-ups and hits of these blocks will read.
    pub fn prefetch(&self, mut blocks: impl Iterator<Item = BlockId>) {
        loop {
            let sites = [(); BATCH as usize].map(|()| blocks.next().map(|block| self.entries.site_of(block)));
            let Some(Some(_)) = sites.first() else { return };
            let load = |sum, word| sum ^ word;
            black_box(sites.iter().flatten().map(|site| self.entries.touch_site(&self.words, *site)).fold(0, load));
            let entries = sites.map(|site| site.map_or(NONE, |site| self.entries.candidate(&self.words, site)));
            let entries = || entries.iter().copied().filter(|entry| *entry < self.entries.limit());
            black_box(entries().map(|entry| self.entries.touch_entry(&self.words, entry)).fold(0, load));
            let slots = || entries().filter(|entry| !self.nodes.has(*entry));
            black_box(slots().map(|slot| self.slots.touch_links(&self.words, slot)).fold(0, load));
            black_box(slots().map(|slot| self.slots.touch_neighbours(&self.words, slot)).fold(0, load));
        }
    }

    /// Loads what offers of pages with these contents will read.
    pub fn prefetch_contents(&self, contents: &[Fingerprint]) {
        let load = |sum, word| sum ^ word;
        for batch in contents.chunks(BATCH as usize) {
            let sites = || batch.iter().map(|content| self.entries.content_site(*content));
            black_box(sites().map(|site| self.entries.touch_content_site(&self.words, site)).fold(0, load));
            let mut entries = [NONE; BATCH as usize];
            for (entry, site) in entries.iter_mut().zip(sites()) {
                *entry = self.entries.content_candidate(&self.words, site);
            }
            let entries = || entries.iter().copied().filter(|entry| *entry < self.entries.limit());
            black_box(entries().map(|entry| self.entries.touch_entry(&self.words, entry)).fold(0, load));
            // A page that is admitted takes the block along, so that the lines of the block change.
            black_box(entries().map(|entry| self.entries.touch_key(&self.words, entry)).fold(0, load));
        }
    }

    /// Loads what discarding the next pages of a pool will read: one step for each of three pages, so that no step waits for another.
    pub(super) fn prefetch_victims(&self, pool: PoolIndex) {
        let [first, second, third] = self.slots.next_victims(&self.words, pool);
        let touch = |slot: u32, what: &dyn Fn(u32) -> u32| if slot < self.slots.limit() { what(slot) } else { 0 };
        black_box(
            touch(first, &|slot| self.entries.touch(&self.words, slot))
                ^ touch(second, &|slot| self.entries.touch_entry(&self.words, slot))
                ^ touch(third, &|slot| self.slots.touch_links(&self.words, slot)),
        );
    }
}
