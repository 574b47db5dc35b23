//! The page arena: all the memory that this server gives, mapped once, handed out in chunks of 2 MiB.
//!
//! Called by pools when their size changes, never on the path of a page. Owns the mapping and the list of free
//! chunks.
//!
//! 1. A chunk has at most one owner; its pages are reached through that owner only.
//! 2. The memory of a chunk holds what its last owner left (or zeroes). `pool.rs` ensures that it is not read.
//! 3. Freed memory that is not locked is given back to the host by a thread of its own, one chunk at a time. A pool that
//!    frees memory makes no system call.
//!
//! 4. A chunk that is lent ([`LentChunk`]) has no memory here: a mapped pool has as much of its own instead. So the memory
//!    of the arena and of all mapped pools together never exceeds what the server promised.

use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use remoca_core::units::{PAGE_SIZE, PageCount};
use rustix::io::Errno;

use crate::config::PageLocking;
use crate::error::StartError;
use crate::free::{FreeChunks, Taken};
use crate::host;
use crate::mapping::{CHUNK_BYTES, Mapping};
use crate::status::Backing;

/// Pages in a chunk.
pub(crate) const CHUNK_PAGES: usize = CHUNK_BYTES / PAGE_SIZE;
const CHUNK_PAGES_U32: u32 = 512;
const CHUNK_BYTES_U64: u64 = 2 << 20;
/// Maximum number of chunks: the pages of an arena are counted in a `u32`.
const CHUNKS_MAX: u32 = u32::MAX / CHUNK_PAGES_U32;

const _: () = assert!(CHUNK_PAGES_U32 as usize == CHUNK_PAGES && CHUNK_BYTES_U64 == CHUNK_BYTES as u64);

/// The mapping and its free chunks.
#[derive(Debug)]
pub(crate) struct Arena {
    map: Mapping,
    chunks: u32,
    free: Mutex<Free>,
    /// Notified when a chunk was freed or given back, or when it is time to stop.
    changed: Condvar,
    locking: PageLocking,
}

#[derive(Debug)]
struct Free {
    chunks: FreeChunks,
    stopping: bool,
}

impl Arena {
    /// Maps memory as [`Self::beside`] does, of which nothing is lent.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn new(
        memory_bytes: u64,
        locking: PageLocking,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Arc<Self>, StartError> {
        Ok(Self::beside(memory_bytes, locking, 0, progress)?.0)
    }

    /// Maps `memory_bytes` of memory, and locks it if `locking` says so, but for `lent` chunks that are lent from the
    /// beginning: the memory in place of them is in use already. Calls `progress` with the bytes locked so far, first with 0:
    /// locking takes long if they are many.
    pub(crate) fn beside(
        memory_bytes: u64,
        locking: PageLocking,
        lent: usize,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(Arc<Self>, Vec<LentChunk>), StartError> {
        let chunks = chunk_count(memory_bytes)?;
        let length = chunks as usize * CHUNK_BYTES;
        let lent = lent.min(chunks as usize);
        let lent_bytes = (lent * CHUNK_BYTES) as u64;
        // Memory of mapped pools is ordinary memory: huge pages that are set aside cannot make room for it.
        let huge = if lent == 0 { Mapping::set_aside_huge_pages(memory_bytes, length, progress) } else { None };
        let map = match huge {
            Some(map) => map,
            None => {
                check_available(memory_bytes, memory_bytes - lent_bytes)?;
                let map = Mapping::ordinary(length).map_err(|errno| map_error(memory_bytes, errno))?;
                if locking == PageLocking::Locked {
                    map.lock(memory_bytes, lent, progress)?;
                }
                map
            }
        };
        let mut free = FreeChunks::all(chunks);
        let taken = match free.take(lent) {
            // The lowest come first, and these were not locked.
            Taken::Chunks(taken) => taken,
            Taken::SoonEnough | Taken::TooFew => Vec::new(),
        };
        let free = Mutex::new(Free { chunks: free, stopping: false });
        let arena = Arc::new(Self { map, chunks, free, changed: Condvar::new(), locking });
        let lent = taken
            .into_iter()
            .map(|(index, _)| LentChunk { arena: Arc::clone(&arena), index, has_memory: false })
            .collect();
        Ok((arena, lent))
    }

    /// Returns whether chunks can be lent. Huge pages that the operator has set aside are of no use to others.
    pub(crate) fn can_lend(&self) -> bool {
        self.map.backing == Backing::Ordinary
    }

    /// Takes `count` chunks. Returns `None` if there are too few. May wait until the memory of one chunk is given
    /// back to the host.
    pub(crate) fn take(self: &Arc<Self>, count: usize) -> Option<Vec<Chunk>> {
        let chunk = |(index, holds_memory)| Chunk {
            arena: Arc::clone(self),
            base: self.map.chunk(index),
            index,
            holds_memory: holds_memory || !self.gives_back(),
        };
        Some(self.take_free(count)?.into_iter().map(chunk).collect())
    }

    /// Takes `count` chunks in favour of a mapped pool. They have their memory until it is given up. Returns `None` if there
    /// are too few. May wait as [`Self::take`].
    pub(crate) fn take_to_lend(self: &Arc<Self>, count: usize) -> Option<Vec<LentChunk>> {
        let lent = |(index, _)| LentChunk { arena: Arc::clone(self), index, has_memory: true };
        Some(self.take_free(count)?.into_iter().map(lent).collect())
    }

    fn take_free(&self, count: usize) -> Option<Vec<(u32, bool)>> {
        let mut free = self.free();
        loop {
            match free.chunks.take(count) {
                Taken::Chunks(taken) => return Some(taken),
                Taken::SoonEnough => free = self.changed.wait(free).unwrap_or_else(PoisonError::into_inner),
                Taken::TooFew => return None,
            }
        }
    }

    /// Returns whether freed memory is given back to the host.
    pub(crate) fn gives_back(&self) -> bool {
        self.locking == PageLocking::Unlocked && self.map.backing == Backing::Ordinary
    }

    /// Gives freed memory back to the host until [`Self::stop_giving_back`].
    pub(crate) fn give_back(&self) {
        let mut free = self.free();
        while !free.stopping {
            let Some(index) = free.chunks.begin_giving_back() else {
                free = self.changed.wait(free).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(free);
            self.map.give_back(index);
            free = self.free();
            free.chunks.given_back();
            self.changed.notify_all();
        }
    }

    pub(crate) fn stop_giving_back(&self) {
        self.free().stopping = true;
        self.changed.notify_all();
    }

    /// Gives the memory of all free chunks to the host, and has none of them afterwards. For an arena that outlives its server.
    pub(crate) fn abandon(self: &Arc<Self>) {
        let free = self.free().chunks.count();
        self.take_to_lend(free).into_iter().flatten().for_each(|mut chunk| chunk.give_up_memory());
    }

    /// Returns the number of free pages that still hold memory of the host.
    pub(crate) fn pages_to_give_back(&self) -> PageCount {
        pages_of(self.free().chunks.used_count())
    }

    /// Returns the number of pages in free chunks.
    pub(crate) fn free_pages(&self) -> PageCount {
        pages_of(self.free().chunks.count())
    }

    /// Returns the number of all pages, free or in use.
    pub(crate) fn pages(&self) -> PageCount {
        PageCount(self.chunks * CHUNK_PAGES_U32)
    }

    pub(crate) fn backing(&self) -> Backing {
        self.map.backing
    }

    pub(crate) fn locking(&self) -> PageLocking {
        self.locking
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// 512 pages of the arena and the right to use them. Dropping it returns them to the arena.
#[derive(Debug)]
pub(crate) struct Chunk {
    arena: Arc<Arena>,
    base: NonNull<[u8; PAGE_SIZE]>,
    index: u32,
    /// Whether the chunk has memory of the host. If not, the host has to find some at the first write.
    holds_memory: bool,
}

impl Chunk {
    /// Returns whether the chunk can be written to without the host having to find memory.
    pub(crate) fn holds_memory(&self) -> bool {
        self.holds_memory
    }

    /// Returns page `index` of the chunk's [`CHUNK_PAGES`].
    pub(crate) fn page(&self, index: usize) -> &[u8; PAGE_SIZE] {
        assert!(index < CHUNK_PAGES, "a chunk has {CHUNK_PAGES} pages");
        // SAFETY: the chunk's memory is mapped while `arena` lives, is initialised (the kernel zeroes it), aligned, and
        // nobody else has it; `&self` keeps writers (`page_mut`) away.
        unsafe { self.base.add(index).as_ref() }
    }

    /// Returns page `index` for writing.
    pub(crate) fn page_mut(&mut self, index: usize) -> &mut [u8; PAGE_SIZE] {
        assert!(index < CHUNK_PAGES, "a chunk has {CHUNK_PAGES} pages");
        self.holds_memory = true;
        // SAFETY: as in `page`; `&mut self` makes this the only reference into the chunk.
        unsafe { self.base.add(index).as_mut() }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        let holds_memory = self.holds_memory && self.arena.gives_back();
        self.arena.free().chunks.put(self.index, holds_memory);
        if holds_memory {
            self.arena.changed.notify_all();
        }
    }
}

/// The right to 512 pages of the arena, in favour of a mapped pool, which has memory of its own instead. It is returned only
/// by [`LentChunk::bring_back`]; one that is dropped is lost to the arena.
#[derive(Debug)]
pub(crate) struct LentChunk {
    arena: Arc<Arena>,
    index: u32,
    /// Whether the chunk's own memory is still there.
    has_memory: bool,
}

impl LentChunk {
    /// Gives the chunk's memory to the host, in favour of as much memory elsewhere.
    pub(crate) fn give_up_memory(&mut self) {
        if std::mem::take(&mut self.has_memory) {
            match self.arena.locking {
                PageLocking::Locked => self.arena.map.unlock(self.index),
                PageLocking::Unlocked => self.arena.map.give_back(self.index),
            }
        }
    }

    /// Returns the chunk to the arena, with memory if the arena is locked. The memory that was in place of it must be given up
    /// before.
    ///
    /// # Errors
    /// The chunk, if the host has no memory for it now.
    pub(crate) fn bring_back(self) -> Result<(), Self> {
        if !self.has_memory
            && self.arena.locking == PageLocking::Locked
            && let Err(error) = self.arena.map.lock_again(self.index)
        {
            tracing::warn!(%error, "memory that a mapped pool had cannot be locked again yet");
            return Err(self);
        }
        let holds_memory = self.has_memory && self.arena.gives_back();
        self.arena.free().chunks.put(self.index, holds_memory);
        self.arena.changed.notify_all();
        Ok(())
    }
}

fn pages_of(chunks: usize) -> PageCount {
    let chunks = u32::try_from(chunks).expect("an arena has fewer than 2^23 chunks");
    PageCount(chunks * CHUNK_PAGES_U32)
}

/// Returns the number of chunks in this much memory.
///
/// # Errors
/// If no arena can have this size.
pub fn chunk_count(memory_bytes: u64) -> Result<u32, StartError> {
    if memory_bytes == 0 {
        return Err(StartError::NoMemory);
    }
    if !memory_bytes.is_multiple_of(CHUNK_BYTES_U64) {
        return Err(StartError::MemoryNotMultiple { memory_bytes });
    }
    let most_bytes = u64::from(CHUNKS_MAX) * CHUNK_BYTES_U64;
    match u32::try_from(memory_bytes / CHUNK_BYTES_U64) {
        Ok(chunks) if chunks <= CHUNKS_MAX => Ok(chunks),
        _ => Err(StartError::MemoryTooLarge { memory_bytes, most_bytes }),
    }
}

/// Checks that the host has `wanted_bytes`, which is what is missing to `memory_bytes`.
fn check_available(memory_bytes: u64, wanted_bytes: u64) -> Result<(), StartError> {
    if let Some((limit_bytes, path)) = host::group_limit()
        && limit_bytes < memory_bytes
    {
        return Err(StartError::GroupLimit { memory_bytes, limit_bytes, path });
    }
    match host::available_bytes() {
        Some(available_bytes) if available_bytes < wanted_bytes => {
            Err(StartError::NotAvailable { memory_bytes, available_bytes })
        }
        _ => Ok(()),
    }
}

fn map_error(memory_bytes: u64, errno: Errno) -> StartError {
    StartError::Map { memory_bytes, source: errno.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(chunks: u64) -> Arc<Arena> {
        Arena::new(chunks * CHUNK_BYTES_U64, PageLocking::Unlocked, &mut |_| ()).expect("a little memory")
    }

    #[test]
    fn chunks_are_given_once_and_come_back() {
        let arena = arena(3);
        let mut first = arena.take(2).expect("two of three");
        assert_eq!(arena.free_pages(), PageCount(512));
        assert!(arena.take(2).is_none());
        assert_eq!(arena.free_pages(), PageCount(512), "a refusal takes nothing");
        let mut second = arena.take(1).expect("the last one");
        assert!(arena.take(1).is_none());
        assert!(arena.take(0).is_some_and(|none| none.is_empty()));
        for (number, chunk) in (1..).zip(first.iter_mut().chain(&mut second)) {
            for page in 0..CHUNK_PAGES {
                assert_eq!(*chunk.page(page), [0; PAGE_SIZE]);
                chunk.page_mut(page).fill(number);
            }
        }
        for (number, chunk) in (1..).zip(first.iter().chain(&second)) {
            assert!((0..CHUNK_PAGES).all(|page| *chunk.page(page) == [number; PAGE_SIZE]), "chunks do not overlap");
        }
        drop((first, second));
        assert_eq!(arena.free_pages(), PageCount(3 * 512));
    }

    fn resident_chunks(arena: &Arena) -> usize {
        let length = arena.chunks as usize * CHUNK_BYTES;
        let mut resident = vec![0_u8; length / PAGE_SIZE];
        // SAFETY: the range is the arena's mapping, and the vector has a byte for each of its pages.
        let asked = unsafe { libc::mincore(arena.map.chunk(0).as_ptr().cast(), length, resident.as_mut_ptr()) };
        assert_eq!(asked, 0);
        resident.chunks(CHUNK_PAGES).filter(|chunk| chunk.iter().any(|page| page & 1 == 1)).count()
    }

    #[test]
    fn who_frees_memory_leaves_giving_it_back_to_another_thread() {
        let arena = arena(8);
        let mut chunks = arena.take(8).expect("all");
        chunks.iter_mut().take(6).for_each(|chunk| chunk.page_mut(7).fill(9));
        drop(chunks);
        assert_eq!((resident_chunks(&arena), arena.pages_to_give_back()), (6, PageCount(6 * 512)));
        assert_eq!(arena.free_pages(), PageCount(8 * 512), "they can be had meanwhile");
        drop(arena.take(8).expect("all"));
        let giving = std::thread::spawn({
            let arena = Arc::clone(&arena);
            move || arena.give_back()
        });
        // The arena waits for a chunk that is being given back.
        while arena.pages_to_give_back() > PageCount(0) {
            assert_eq!(arena.take(8).expect("all").len(), 8);
        }
        drop(arena.take(8));
        arena.stop_giving_back();
        giving.join().expect("no panic");
    }

    #[test]
    fn unlocked_memory_is_given_back_to_the_host() {
        let arena = arena(2);
        arena.take(1).expect("one")[0].page_mut(7).fill(9);
        let giving = std::thread::spawn({
            let arena = Arc::clone(&arena);
            move || arena.give_back()
        });
        while arena.pages_to_give_back() > PageCount(0) {
            std::thread::yield_now();
        }
        assert_eq!(resident_chunks(&arena), 0);
        arena.stop_giving_back();
        giving.join().expect("no panic");
        assert_eq!(*arena.take(1).expect("again")[0].page(7), [0; PAGE_SIZE]);
    }

    #[test]
    fn a_lent_chunk_has_no_memory_and_comes_back_with_it() {
        for locking in [PageLocking::Unlocked, PageLocking::Locked] {
            let arena = Arena::new(2 * CHUNK_BYTES_U64, locking, &mut |_| ()).expect("4 MiB");
            let mut chunks = arena.take(2).expect("all");
            chunks.iter_mut().for_each(|chunk| chunk.page_mut(3).fill(5));
            drop(chunks);
            let mut lent = arena.take_to_lend(2).expect("all");
            assert_eq!((resident_chunks(&arena), arena.free_pages()), (2, PageCount(0)));
            lent.iter_mut().for_each(LentChunk::give_up_memory);
            assert_eq!((resident_chunks(&arena), arena.free_pages()), (0, PageCount(0)));
            assert!(arena.take(1).is_none(), "they count as used");
            let still = lent.pop().expect("two");
            lent.pop().expect("one").bring_back().expect("memory");
            let resident = usize::from(locking == PageLocking::Locked);
            assert_eq!((resident_chunks(&arena), arena.free_pages()), (resident, PageCount(512)));
            assert_eq!(*arena.take(1).expect("again")[0].page(3), [0; PAGE_SIZE]);
            still.bring_back().expect("memory");
            assert_eq!(arena.free_pages(), PageCount(1024));
        }
    }

    #[test]
    fn chunks_that_are_lent_from_the_beginning_are_not_locked() {
        let (arena, mut lent) = Arena::beside(3 * CHUNK_BYTES_U64, PageLocking::Locked, 2, &mut |_| ()).expect("6 MiB");
        assert_eq!((lent.len(), resident_chunks(&arena), arena.free_pages()), (2, 1, PageCount(512)));
        lent.pop().expect("two").bring_back().expect("memory");
        assert_eq!((resident_chunks(&arena), arena.free_pages()), (2, PageCount(1024)));
        let (arena, lent) = Arena::beside(CHUNK_BYTES_U64, PageLocking::Locked, 7, &mut |_| ()).expect("2 MiB");
        assert_eq!((lent.len(), arena.free_pages()), (1, PageCount(0)), "not more than there are");
    }

    #[test]
    #[should_panic(expected = "a chunk has 512 pages")]
    fn a_page_beyond_a_chunk_is_a_bug() {
        arena(1).take(1).expect("one")[0].page(CHUNK_PAGES);
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let refusal =
            |bytes| Arena::new(bytes, PageLocking::Unlocked, &mut |_| ()).expect_err("impossible").to_string();
        assert!(refusal(0).contains("--memory 2G"));
        assert!(refusal(CHUNK_BYTES_U64 + 4096).contains("not a multiple of 2 MiB"));
        assert!(refusal(1 << 60).contains("more than one server can manage"));
        assert!(refusal(8 << 40).contains("8 TiB"));
    }
}
