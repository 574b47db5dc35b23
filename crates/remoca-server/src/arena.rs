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
//! The only unsafe code of this crate is here: the pages are mapped memory, not Rust's.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use remoca_core::units::{PAGE_SIZE, PageCount};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap_anonymous, munmap};

use crate::config::PageLocking;
use crate::error::StartError;
use crate::free::{FreeChunks, Taken};
use crate::host;
use crate::status::Backing;

/// Bytes in a chunk: one huge page.
pub(crate) const CHUNK_BYTES: usize = 2 << 20;
/// Pages in a chunk.
pub(crate) const CHUNK_PAGES: usize = CHUNK_BYTES / PAGE_SIZE;
const CHUNK_PAGES_U32: u32 = 512;
const CHUNK_BYTES_U64: u64 = 2 << 20;
/// Chunks that are locked in one system call.
const PIECE_CHUNKS: usize = 8;
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
    /// Maps `memory_bytes` of memory, and locks it if `locking` says so. Calls `progress` with the bytes locked so far,
    /// first with 0: locking takes long if they are many.
    pub(crate) fn new(
        memory_bytes: u64,
        locking: PageLocking,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Arc<Self>, StartError> {
        let chunks = chunk_count(memory_bytes)?;
        let length = chunks as usize * CHUNK_BYTES;
        let map = match Mapping::set_aside_huge_pages(memory_bytes, length, progress) {
            Some(map) => map,
            None => {
                check_available(memory_bytes)?;
                let map = Mapping::ordinary(length).map_err(|errno| map_error(memory_bytes, errno))?;
                if locking == PageLocking::Locked {
                    map.lock(memory_bytes, progress)?;
                }
                map
            }
        };
        let free = Mutex::new(Free { chunks: FreeChunks::all(chunks), stopping: false });
        Ok(Arc::new(Self { map, chunks, free, changed: Condvar::new(), locking }))
    }

    /// Takes `count` chunks. Returns `None` if there are too few. May wait until the memory of one chunk is given
    /// back to the host.
    pub(crate) fn take(self: &Arc<Self>, count: usize) -> Option<Vec<Chunk>> {
        let mut free = self.free();
        let taken = loop {
            match free.chunks.take(count) {
                Taken::Chunks(taken) => break taken,
                Taken::SoonEnough => free = self.changed.wait(free).unwrap_or_else(PoisonError::into_inner),
                Taken::TooFew => return None,
            }
        };
        drop(free);
        let chunk = |(index, holds_memory)| Chunk {
            arena: Arc::clone(self),
            base: self.map.chunk(index),
            index,
            holds_memory: holds_memory || !self.gives_back(),
        };
        Some(taken.into_iter().map(chunk).collect())
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

fn pages_of(chunks: usize) -> PageCount {
    let chunks = u32::try_from(chunks).expect("an arena has fewer than 2^23 chunks");
    PageCount(chunks * CHUNK_PAGES_U32)
}

/// A mapped range, aligned to chunks.
#[derive(Debug)]
struct Mapping {
    base: NonNull<c_void>,
    length: usize,
    backing: Backing,
}

// SAFETY: a mapping is plain memory, valid in every thread; access to it goes through chunks, which have one owner each.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives no access to the memory except through `chunk`, whose result its caller owns alone.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps huge pages that the operator has set aside; they are all there at once, and never swapped. Returns `None`
    /// if there are not enough.
    fn set_aside_huge_pages(memory_bytes: u64, length: usize, progress: &mut dyn FnMut(u64)) -> Option<Self> {
        if host::free_huge_page_bytes() < memory_bytes {
            return None;
        }
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        let base = map_anonymous(length, flags).ok()?;
        let map = Self { base, length, backing: Backing::HugeTlb };
        map.advise(Advice::LinuxDontDump);
        // Reserved by the mapping, so this cannot fail for lack of pages; kernels before 5.14 fault them in when
        // used.
        let _populated = map.in_pieces(progress, |start, length| {
            // SAFETY: the range was just mapped and nothing refers to it.
            unsafe { madvise(start, length, Advice::LinuxPopulateWrite) }
        });
        Some(map)
    }

    /// Maps ordinary memory, in transparent huge pages where the host allows it.
    fn ordinary(length: usize) -> Result<Self, Errno> {
        let padded = map_anonymous(length + CHUNK_BYTES, MapFlags::PRIVATE)?;
        let before = padded.as_ptr().align_offset(CHUNK_BYTES);
        let after = CHUNK_BYTES - before;
        // SAFETY: both ranges lie in the mapping just made (`before <= CHUNK_BYTES`), page-aligned as the mapping is, and
        // nothing refers to them. An empty range is not unmapped.
        let base = unsafe {
            let base = padded.byte_add(before);
            if before > 0 {
                munmap(padded.as_ptr(), before)?;
            }
            if after > 0 {
                munmap(base.byte_add(length).as_ptr(), after)?;
            }
            base
        };
        let map = Self { base, length, backing: Backing::Ordinary };
        [Advice::LinuxHugepage, Advice::LinuxDontDump].into_iter().for_each(|advice| map.advise(advice));
        Ok(map)
    }

    /// Gives the kernel advice that does not change the memory's content.
    fn advise(&self, advice: Advice) {
        // SAFETY: the range is ours, and callers give no advice that discards.
        if let Err(error) = unsafe { madvise(self.base.as_ptr(), self.length, advice) } {
            tracing::debug!(%error, ?advice, "the kernel does not take this advice");
        }
    }

    fn lock(&self, memory_bytes: u64, progress: &mut dyn FnMut(u64)) -> Result<(), StartError> {
        let limit = host::raised_lock_limit();
        // SAFETY: the range is mapped, and locking changes nothing of its content.
        let locked = self.in_pieces(progress, |start, length| unsafe { mlock(start, length) });
        locked.map_err(|errno| match limit {
            Some(limit_bytes) if limit_bytes < memory_bytes && matches!(errno, Errno::NOMEM | Errno::PERM) => {
                StartError::LockLimit { memory_bytes, limit_bytes }
            }
            _ => StartError::Lock { memory_bytes, source: errno.into() },
        })
    }

    /// Calls `make` for all of the memory, piece by piece, until one fails. Calls `progress` with the bytes done.
    fn in_pieces(
        &self,
        progress: &mut dyn FnMut(u64),
        make: impl Fn(*mut c_void, usize) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        progress(0);
        for index in (0..self.length / CHUNK_BYTES).step_by(PIECE_CHUNKS) {
            let start = index * CHUNK_BYTES;
            let length = (self.length - start).min(PIECE_CHUNKS * CHUNK_BYTES);
            // SAFETY: the offset lies in the mapping.
            make(unsafe { self.base.byte_add(start) }.as_ptr(), length)?;
            progress((start + length) as u64);
        }
        Ok(())
    }

    /// Gives the memory of chunk `index`, which has no owner, back to the host.
    fn give_back(&self, index: u32) {
        // SAFETY: nobody has the chunk while it is given back, so no reference into it is left, and pages that are gone read as zero.
        let given_back = unsafe { madvise(self.chunk(index).as_ptr().cast(), CHUNK_BYTES, Advice::LinuxDontNeed) };
        if let Err(error) = given_back {
            tracing::warn!(%error, "memory of a freed pool could not be given back to the host");
        }
    }

    /// Returns the start of chunk `index`.
    fn chunk(&self, index: u32) -> NonNull<[u8; PAGE_SIZE]> {
        let offset = index as usize * CHUNK_BYTES;
        assert!(offset + CHUNK_BYTES <= self.length, "a chunk lies in the mapping");
        // SAFETY: the offset lies in the mapping, as asserted.
        unsafe { self.base.byte_add(offset) }.cast()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: chunks hold their arena, so none is left, and neither is any reference to this memory.
        let unmapped = unsafe { munmap(self.base.as_ptr(), self.length) };
        debug_assert!(unmapped.is_ok(), "the mapping was ours");
    }
}

fn map_anonymous(length: usize, flags: MapFlags) -> Result<NonNull<c_void>, Errno> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), length, prot, flags) }?;
    NonNull::new(base).ok_or(Errno::NOMEM)
}

fn chunk_count(memory_bytes: u64) -> Result<u32, StartError> {
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

fn check_available(memory_bytes: u64) -> Result<(), StartError> {
    if let Some((limit_bytes, path)) = host::group_limit()
        && limit_bytes < memory_bytes
    {
        return Err(StartError::GroupLimit { memory_bytes, limit_bytes, path });
    }
    match host::available_bytes() {
        Some(available_bytes) if available_bytes < memory_bytes => {
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
        let pages = arena.map.length / PAGE_SIZE;
        let mut resident = vec![0_u8; pages];
        // SAFETY: the range is the arena's mapping, and the vector has a byte for each of its pages.
        let asked = unsafe { libc::mincore(arena.map.base.as_ptr(), arena.map.length, resident.as_mut_ptr()) };
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
