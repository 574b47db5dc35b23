//! A page pool: the slots of one client and the memory behind them.
//!
//! Called by the session that holds the pool, and by the registry. Owns chunks of the arena, a bit for each slot, and
//! the pool's counters. Besides its pages it needs 1 bit and 24/512 bytes per page.
//!
//! 1. A slot's page is readable only while its bit is set. It is set by [`Pool::store`] or [`Pool::relocate`], which
//!    write the whole page. It is cleared when the page is moved away or the slot is cut off. So memory that had another
//!    owner, or was cut off before, is unreachable until it is written again, and need not be zeroed.
//! 2. Bits at and above `npages` are clear.
//! 3. The chunks cover `npages` slots, and each chunk has at least one of them.

use std::sync::Arc;

use remoca_core::units::{PAGE_SIZE, PageCount, SlotIndex};

use crate::arena::{Arena, CHUNK_PAGES, Chunk};

/// Work of a first write to a chunk without memory, in pages moved: the host clears up to 2 MiB for it.
const FIRST_WRITE_WORK: u32 = 32;

/// Counters of a pool since its creation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    /// Pages that were requested and sent.
    pub(crate) gets: u64,
    /// Pages that were requested and not found.
    pub(crate) not_found: u64,
    /// SENDPAGE frames, including those beyond the pool's size: the client compares this number with its own.
    pub(crate) sends: u64,
    pub(crate) moves: u64,
    pub(crate) resizes_refused: u64,
}

/// Why a pool was not resized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResizeRefusal {
    Quota,
    NoMemory,
}

#[derive(Debug)]
pub(crate) struct Pool {
    arena: Arc<Arena>,
    chunks: Vec<Chunk>,
    written: Vec<u64>,
    npages: usize,
    quota: PageCount,
    pub(crate) counters: Counters,
}

impl Pool {
    /// Returns a pool without slots.
    pub(crate) fn new(arena: Arc<Arena>, quota: PageCount) -> Self {
        Self { arena, chunks: Vec::new(), written: Vec::new(), npages: 0, quota, counters: Counters::default() }
    }

    pub(crate) fn npages(&self) -> PageCount {
        PageCount(u32::try_from(self.npages).expect("resizing takes a `u32`"))
    }

    pub(crate) fn quota(&self) -> PageCount {
        self.quota
    }

    /// Returns the number of pages available beyond the present size. Other pools may take them first.
    pub(crate) fn available(&self) -> PageCount {
        let slack = self.chunks.len() * CHUNK_PAGES - self.npages;
        let memory = self.arena.free_pages().0.saturating_add(u32::try_from(slack).unwrap_or(0));
        PageCount(memory.min(self.quota.0.saturating_sub(self.npages().0)))
    }

    /// Returns the number of slots that hold a page.
    pub(crate) fn written_pages(&self) -> u64 {
        self.written.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Changes the number of slots. Slots below the smaller of both sizes keep their pages. On an error, nothing
    /// changes.
    pub(crate) fn resize(&mut self, npages: PageCount) -> Result<(), ResizeRefusal> {
        if npages > self.quota {
            self.counters.resizes_refused += 1;
            return Err(ResizeRefusal::Quota);
        }
        let target = npages.0 as usize;
        let chunks = target.div_ceil(CHUNK_PAGES);
        if let Some(more) = chunks.checked_sub(self.chunks.len()) {
            let Some(taken) = self.arena.take(more) else {
                self.counters.resizes_refused += 1;
                return Err(ResizeRefusal::NoMemory);
            };
            self.chunks.reserve_exact(more);
            self.chunks.extend(taken);
        }
        if target < self.npages {
            self.clear(target, self.npages);
        }
        self.written.reserve_exact(target.div_ceil(64).saturating_sub(self.written.len()));
        self.written.resize(target.div_ceil(64), 0);
        self.npages = target;
        if chunks < self.chunks.len() {
            self.chunks.truncate(chunks);
            self.chunks.shrink_to_fit();
            self.written.shrink_to_fit();
        }
        Ok(())
    }

    /// Stores a page in a slot, and returns the work in pages moved. A page beyond the size of the pool is dropped:
    /// the client sent it before it learned that the pool is smaller.
    #[inline]
    pub(crate) fn store(&mut self, slot: SlotIndex, page: &[u8; PAGE_SIZE]) -> u32 {
        self.counters.sends += 1;
        let slot = slot.0 as usize;
        if slot >= self.npages {
            return 1;
        }
        let work = self.write_work(slot);
        self.chunks[slot / CHUNK_PAGES].page_mut(slot % CHUNK_PAGES).copy_from_slice(page);
        self.written[slot / 64] |= 1 << (slot % 64);
        work
    }

    /// Returns the work of writing to a slot, in pages moved. It is more where the host has to find memory.
    #[inline]
    fn write_work(&self, slot: usize) -> u32 {
        if self.chunks[slot / CHUNK_PAGES].holds_memory() { 1 } else { FIRST_WRITE_WORK }
    }

    /// Returns whether the slot holds a page. Counts this as a request for the page.
    #[inline]
    pub(crate) fn request(&mut self, slot: SlotIndex) -> bool {
        let held = self.holds(slot.0 as usize);
        *(if held { &mut self.counters.gets } else { &mut self.counters.not_found }) += 1;
        held
    }

    /// Returns the memory of a slot that held a page when it was requested, or `None` beyond the size.
    ///
    /// A slot whose page was moved away in the meantime still has the bytes: the reply was due before the move.
    #[inline]
    pub(crate) fn requested_page(&self, slot: SlotIndex) -> Option<&[u8; PAGE_SIZE]> {
        let slot = slot.0 as usize;
        Some(self.chunks.get(slot / CHUNK_PAGES)?.page(slot % CHUNK_PAGES))
    }

    /// Moves the page of slot `from` to another slot `to`, and returns the work in pages moved. Afterwards `from` is
    /// empty. If `from` was empty, `to` is empty too. Does nothing if both are the same slot.
    pub(crate) fn relocate(&mut self, from: SlotIndex, to: SlotIndex) -> u32 {
        self.counters.moves += 1;
        let (from, to) = (from.0 as usize, to.0 as usize);
        if from == to {
            return 1;
        }
        if !self.holds(from) {
            if to < self.npages {
                self.clear(to, to + 1);
            }
            return 1;
        }
        let mut work = 1;
        if to < self.npages {
            work = self.write_work(to);
            let page = *self.chunks[from / CHUNK_PAGES].page(from % CHUNK_PAGES);
            *self.chunks[to / CHUNK_PAGES].page_mut(to % CHUNK_PAGES) = page;
            self.written[to / 64] |= 1 << (to % 64);
        }
        self.clear(from, from + 1);
        work
    }

    fn holds(&self, slot: usize) -> bool {
        self.written.get(slot / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    /// Clears the bits `first..end`, which must not be empty.
    fn clear(&mut self, first: usize, end: usize) {
        let (first_word, last_word) = (first / 64, (end - 1) / 64);
        let from_first = u64::MAX << (first % 64);
        let to_last = u64::MAX >> (63 - (end - 1) % 64);
        if first_word == last_word {
            self.written[first_word] &= !(from_first & to_last);
            return;
        }
        self.written[first_word] &= !from_first;
        self.written[first_word + 1..last_word].fill(0);
        self.written[last_word] &= !to_last;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::config::PageLocking;

    #[derive(Clone, Debug)]
    enum Operation {
        Resize(u32),
        Store(u32, u8),
        Request(u32),
        Relocate(u32, u32),
    }

    const QUOTA: u32 = 1_600;

    fn operation() -> impl Strategy<Value = Operation> {
        let slot = || prop_oneof![6 => 0u32..200, 3 => 0u32..2_100, 1 => any::<u32>()];
        prop_oneof![
            1 => prop_oneof![0u32..200, 0u32..2_100].prop_map(Operation::Resize),
            6 => (slot(), any::<u8>()).prop_map(|(slot, byte)| Operation::Store(slot, byte)),
            6 => slot().prop_map(Operation::Request),
            3 => (slot(), slot()).prop_map(|(from, to)| Operation::Relocate(from, to)),
        ]
    }

    /// What a pool should hold, in the simplest form.
    #[derive(Default)]
    struct Model {
        npages: u32,
        pages: HashMap<u32, u8>,
    }

    impl Model {
        fn apply(&mut self, operation: &Operation) {
            match *operation {
                Operation::Resize(npages) => {
                    self.npages = npages;
                    self.pages.retain(|slot, _| *slot < npages);
                }
                Operation::Store(slot, byte) if slot < self.npages => drop(self.pages.insert(slot, byte)),
                Operation::Store(..) | Operation::Request(_) => {}
                Operation::Relocate(from, to) if from == to => {}
                Operation::Relocate(from, to) => match self.pages.remove(&from) {
                    Some(byte) if to < self.npages => drop(self.pages.insert(to, byte)),
                    _ => drop(self.pages.remove(&to)),
                },
            }
        }
    }

    fn apply(pool: &mut Pool, operation: &Operation) -> Result<(), ResizeRefusal> {
        match *operation {
            Operation::Resize(npages) => pool.resize(PageCount(npages))?,
            Operation::Store(slot, byte) => drop(pool.store(SlotIndex(slot), &[byte; PAGE_SIZE])),
            Operation::Request(_) => {}
            Operation::Relocate(from, to) => drop(pool.relocate(SlotIndex(from), SlotIndex(to))),
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Tests two pools on an arena too small for both at their largest: each holds exactly what its model does.
        #[test]
        fn pools_hold_what_was_stored(
            operations in prop::collection::vec((any::<bool>(), operation()), 1..150),
        ) {
            let arena = Arena::new(5 << 21, PageLocking::Unlocked, &mut |_| ()).expect("10 MiB");
            let mut pools = [(); 2].map(|()| (Pool::new(Arc::clone(&arena), PageCount(QUOTA)), Model::default()));
            for (which, operation) in operations {
                let chunks = |pool: &Pool| pool.npages().0.div_ceil(512);
                let others = chunks(&pools[usize::from(!which)].0);
                let (pool, model) = &mut pools[usize::from(which)];
                let available = pool.available().0;
                prop_assert_eq!(available, (QUOTA - model.npages).min((5 - others) * 512 - model.npages));
                let result = apply(pool, &operation);
                match operation {
                    Operation::Resize(npages) if npages > QUOTA => prop_assert_eq!(result, Err(ResizeRefusal::Quota)),
                    Operation::Resize(npages) if npages > model.npages + available => {
                        prop_assert_eq!(result, Err(ResizeRefusal::NoMemory));
                    }
                    _ => {
                        prop_assert_eq!(result, Ok(()));
                        model.apply(&operation);
                    }
                }
                prop_assert_eq!(pool.npages().0, model.npages);
                prop_assert_eq!(pool.written_pages(), model.pages.len() as u64);
                if let Operation::Request(slot) | Operation::Store(slot, _) = operation {
                    let held = pool.request(SlotIndex(slot));
                    prop_assert_eq!(held, model.pages.contains_key(&slot));
                }
            }
            for (pool, model) in &mut pools {
                for slot in 0..2_100 {
                    prop_assert_eq!(pool.request(SlotIndex(slot)), model.pages.contains_key(&slot));
                }
                for (slot, byte) in &model.pages {
                    prop_assert_eq!(pool.requested_page(SlotIndex(*slot)), Some(&[*byte; PAGE_SIZE]));
                }
            }
        }
    }

    #[test]
    fn memory_that_had_another_owner_is_unreachable() {
        let arena = Arena::new(1 << 21, PageLocking::Locked, &mut |_| ()).expect("2 MiB");
        let mut first = Pool::new(Arc::clone(&arena), PageCount(512));
        first.resize(PageCount(512)).expect("all of it");
        for slot in 0..512 {
            first.store(SlotIndex(slot), &[0xee; PAGE_SIZE]);
        }
        drop(first);
        let mut second = Pool::new(arena, PageCount(512));
        second.resize(PageCount(512)).expect("all of it");
        let seen = second.requested_page(SlotIndex(3)).expect("in range");
        assert_eq!(*seen, [0xee; PAGE_SIZE], "the memory itself is not zeroed, so the next line means something");
        assert!((0..512).all(|slot| !second.request(SlotIndex(slot))));
    }

    #[test]
    fn what_is_cut_off_does_not_come_back() {
        let arena = Arena::new(1 << 21, PageLocking::Unlocked, &mut |_| ()).expect("2 MiB");
        let mut pool = Pool::new(arena, PageCount(512));
        pool.resize(PageCount(100)).expect("room");
        for slot in 0..100 {
            pool.store(SlotIndex(slot), &[1; PAGE_SIZE]);
        }
        pool.resize(PageCount(70)).expect("smaller");
        pool.resize(PageCount(100)).expect("larger");
        assert!((0..70).all(|slot| pool.request(SlotIndex(slot))));
        assert!((70..100).all(|slot| !pool.request(SlotIndex(slot))));
    }

    #[test]
    fn the_first_write_to_memory_that_the_host_must_find_is_more_work() {
        for locking in [PageLocking::Unlocked, PageLocking::Locked] {
            let arena = Arena::new(2 << 21, locking, &mut |_| ()).expect("4 MiB");
            let first_work = if arena.gives_back() { FIRST_WRITE_WORK } else { 1 };
            let mut pool = Pool::new(arena, PageCount(1024));
            pool.resize(PageCount(1024)).expect("room");
            let page = [1; PAGE_SIZE];
            assert_eq!([0, 1, 511].map(|slot| pool.store(SlotIndex(slot), &page)), [first_work, 1, 1]);
            assert_eq!(
                [(0, 512), (512, 0), (0, 512)].map(|(from, to)| pool.relocate(SlotIndex(from), SlotIndex(to))),
                [first_work, 1, 1]
            );
            // Taken again before its memory is given back: the host need not find any.
            pool.resize(PageCount(0)).expect("smaller");
            pool.resize(PageCount(1024)).expect("room");
            assert_eq!([5, 600].map(|slot| pool.store(SlotIndex(slot), &page)), [1, 1]);
        }
    }
}
