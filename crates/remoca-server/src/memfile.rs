//! The memory of a mapped pool: a file in memory that its client reads and writes by itself.
//!
//! Made by this server, and by no client. Its size is fixed and sealed, so nobody can take mapped memory away below another
//! process; memory is taken back by punching holes, which read as zeroes. What this process maps it never accesses: the
//! mapping is there because the kernel locks mappings, not files.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use remoca_core::units::{PAGE_SIZE_U64, PageCount};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create,
};

use crate::config::PageLocking;
use crate::mapping::{CHUNK_BYTES, FileMapping, PIECE_CHUNKS};

/// Seals of every pool. Writing and punching holes stay possible.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// Seals of no pool. Others may be there: a host with `vm.memfd_noexec` seals all files in memory against execution.
const NO_SEALS: SealFlags = SealFlags::WRITE.union(SealFlags::FUTURE_WRITE);
/// Unit in which `st_blocks` counts.
const BLOCK_BYTES: u64 = 512;
const CHUNK: u64 = CHUNK_BYTES as u64;
/// Pages that are unlocked and punched at a time, with a system call for each of the two. The first keeps this whole process from
/// mapping, locking and giving back memory, and a client's write waits for the second: with pages of 4 KiB, for up to tens of
/// milliseconds.
const PIECE_PAGES: u32 = 4096;
const _: () = assert!(PIECE_PAGES as u64 * PAGE_SIZE_U64 == CHUNK * PIECE_CHUNKS as u64);

#[derive(Debug)]
pub(crate) struct PoolFile {
    file: File,
    pages: PageCount,
    map: FileMapping,
    locking: PageLocking,
}

impl PoolFile {
    /// Creates a file of `pages` pages, none of which has memory yet.
    pub(crate) fn create(pages: PageCount, locking: PageLocking) -> io::Result<Self> {
        let file = memfd_create("remoca-pool", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes(pages))?;
        fcntl_add_seals(&file, SEALS)?;
        Self::of(file, pages, locking)
    }

    /// Takes over a file that a former server created.
    ///
    /// # Errors
    /// If it is another kind of file.
    pub(crate) fn adopt(file: OwnedFd, locking: PageLocking) -> io::Result<Self> {
        let other = || io::Error::other("it is not the memory of a pool");
        let seals = fcntl_get_seals(&file).map_err(|_| other())?;
        if !seals.contains(SEALS) || seals.intersects(NO_SEALS) {
            return Err(other());
        }
        let length = rustix::fs::fstat(&file)?.st_size;
        let length = u64::try_from(length).map_err(|_| other())?;
        let pages = u32::try_from(length / PAGE_SIZE_U64).map_err(|_| other())?;
        if pages == 0 || !length.is_multiple_of(PAGE_SIZE_U64) {
            return Err(other());
        }
        Self::of(file, PageCount(pages), locking)
    }

    fn of(file: OwnedFd, pages: PageCount, locking: PageLocking) -> io::Result<Self> {
        let map = FileMapping::new(file.as_fd(), length(pages)?)?;
        Ok(Self { file: file.into(), pages, map, locking })
    }

    /// Returns the size of the file.
    pub(crate) fn pages(&self) -> PageCount {
        self.pages
    }

    /// Allocates the pages `from..to`, and locks them if memory is locked. What they hold already stays. Whole chunks become
    /// huge pages as long as `huge` says so; it is cleared when the host has none.
    pub(crate) fn populate(&self, from: PageCount, to: PageCount, huge: &mut bool) -> io::Result<()> {
        let (start, end) = (bytes(from), bytes(to));
        if start == end {
            return Ok(());
        }
        if *huge && let Err(error) = self.populate_chunks(start.next_multiple_of(CHUNK), end - end % CHUNK) {
            tracing::debug!(%error, "memory of a mapped pool is not in huge pages");
            // A page that was busy says nothing about the next piece.
            *huge = matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY));
        }
        fallocate(&self.file, FallocateFlags::empty(), start, end - start)?;
        match self.locking {
            PageLocking::Locked => Ok(self.map.lock(length(from)?, length(to)? - length(from)?)?),
            PageLocking::Unlocked => Ok(()),
        }
    }

    /// Allocates a huge page for each chunk between two places in the file.
    fn populate_chunks(&self, start: u64, end: u64) -> io::Result<()> {
        let chunks = end.saturating_sub(start) / CHUNK;
        for chunk in 0..chunks {
            // The kernel joins the pages of a chunk only if one of them is there.
            fallocate(&self.file, FallocateFlags::empty(), start + chunk * CHUNK, PAGE_SIZE_U64)?;
        }
        match chunks {
            0 => Ok(()),
            _ => self.map.join(in_memory(start)?, in_memory(chunks * CHUNK)?),
        }
    }

    /// Unlocks all pages from `from` on, and gives their memory back to the host. They read as zeroes afterwards. Waits while a
    /// client writes to the file.
    pub(crate) fn punch(&self, from: PageCount) -> io::Result<()> {
        self.punch_telling(from, &mut || ())
    }

    /// Punches as [`Self::punch`] does, and calls `progress` after each piece.
    pub(crate) fn punch_telling(&self, from: PageCount, progress: &mut dyn FnMut()) -> io::Result<()> {
        let mut tell = || {
            progress();
            true
        };
        self.punch_while(from, &mut tell).map(|_all| ())
    }

    /// Punches as [`Self::punch`] does until `goes_on`, which is called after each piece, returns false. Returns where to go on, or
    /// `None` if all is punched.
    pub(crate) fn punch_while(
        &self,
        from: PageCount,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> io::Result<Option<PageCount>> {
        let mut at = from;
        while at < self.pages {
            let next = PageCount((at.0 / PIECE_PAGES + 1).saturating_mul(PIECE_PAGES)).min(self.pages);
            self.punch_piece(at, next)?;
            at = next;
            if !goes_on() && at < self.pages {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    fn punch_piece(&self, from: PageCount, to: PageCount) -> io::Result<()> {
        let (start, count) = (bytes(from), bytes(to) - bytes(from));
        if self.locking == PageLocking::Locked {
            self.map.unlock(in_memory(start)?, in_memory(count)?)?;
        }
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, hole, start, count)?)
    }

    /// Returns the number of pages that have memory, wherever in the file, those that the host has swapped out included.
    pub(crate) fn allocated(&self) -> u64 {
        // The status of an open file in memory is always known; a wrong guess would take a pool away.
        self.file.metadata().map_or(0, |status| status.blocks() * BLOCK_BYTES / PAGE_SIZE_U64)
    }
}

impl AsFd for PoolFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn bytes(pages: PageCount) -> u64 {
    u64::from(pages.0) * PAGE_SIZE_U64
}

fn length(pages: PageCount) -> io::Result<usize> {
    in_memory(bytes(pages))
}

fn in_memory(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panics")]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn memory_comes_and_goes_and_the_size_stays() {
        for locking in [PageLocking::Unlocked, PageLocking::Locked] {
            let pool = PoolFile::create(PageCount(64), locking).unwrap();
            assert_eq!(pool.allocated(), 0);
            pool.populate(PageCount(0), PageCount(40), &mut true).unwrap();
            assert_eq!(pool.allocated(), 40);
            pool.file.write_all_at(&[7; 4096], 39 * 4096).unwrap();
            pool.file.write_all_at(&[7; 4096], 10 * 4096).unwrap();
            pool.punch(PageCount(16)).unwrap();
            assert_eq!(pool.allocated(), 16);
            pool.populate(PageCount(16), PageCount(64), &mut true).unwrap();
            assert_eq!(pool.allocated(), 64);
            let mut page = [1; 4096];
            pool.file.read_exact_at(&mut page, 39 * 4096).unwrap();
            assert_eq!(page, [0; 4096], "what was punched is zero");
            pool.file.read_exact_at(&mut page, 10 * 4096).unwrap();
            assert_eq!(page, [7; 4096]);
            assert!(ftruncate(&pool.file, 0).is_err() && ftruncate(&pool.file, 1 << 20).is_err());
            assert!(fcntl_add_seals(&pool.file, SealFlags::WRITE).is_err(), "nobody can stop the client from writing");
        }
    }

    #[test]
    fn a_file_is_punched_piece_by_piece() {
        for locking in [PageLocking::Unlocked, PageLocking::Locked] {
            let pool = PoolFile::create(PageCount(2 * PIECE_PAGES + 100), locking).unwrap();
            for page in [1, PIECE_PAGES - 1, PIECE_PAGES, 2 * PIECE_PAGES, 2 * PIECE_PAGES + 99] {
                pool.populate(PageCount(page), PageCount(page + 1), &mut false).unwrap();
            }
            let next = pool.punch_while(PageCount(1), &mut || false).unwrap();
            assert_eq!((next, pool.allocated()), (Some(PageCount(PIECE_PAGES)), 3));
            let next = pool.punch_while(PageCount(PIECE_PAGES), &mut || false).unwrap();
            assert_eq!((next, pool.allocated()), (Some(PageCount(2 * PIECE_PAGES)), 2));
            let next = pool.punch_while(PageCount(2 * PIECE_PAGES), &mut || false).unwrap();
            assert_eq!((next, pool.allocated()), (None, 0));
            assert_eq!(pool.punch_while(pool.pages(), &mut || false).unwrap(), None);
        }
    }

    /// Returns memory with three huge pages, or without them if the host has none now. Returns `None` if the host was busy
    /// with a page, and so did not join it with others.
    fn with_huge_pages(locking: PageLocking) -> Option<PoolFile> {
        let pool = PoolFile::create(PageCount(5 * 512 + 7), locking).unwrap();
        // What is not a whole chunk is not joined.
        let mut huge = true;
        pool.populate(PageCount(0), PageCount(300), &mut huge).unwrap();
        pool.file.write_all_at(&[6; 4096], 299 * 4096).unwrap();
        pool.populate(PageCount(300), PageCount(4 * 512 + 100), &mut huge).unwrap();
        assert_eq!(pool.allocated(), 4 * 512 + 100);
        assert!(pool.map.is_aligned(), "else no chunk could be a huge page");
        // Only what is locked is sure to be mapped.
        (!huge || locking == PageLocking::Unlocked || resident_huge() >= 3 * CHUNK).then_some(pool)
    }

    #[test]
    fn chunks_are_huge_pages_that_are_split_where_they_are_punched() {
        for locking in [PageLocking::Unlocked, PageLocking::Locked] {
            let pool = (0..20).find_map(|_| with_huge_pages(locking)).expect("chunks become huge pages");
            for page in [299, 1000, 1001] {
                pool.file.write_all_at(&[6; 4096], page * 4096).unwrap();
            }
            pool.punch(PageCount(1001)).unwrap();
            assert_eq!(pool.allocated(), 1001);
            let mut page = [1; 4096];
            for (at, content) in [(299, 6), (1000, 6), (1001, 0), (2000, 0)] {
                pool.file.read_exact_at(&mut page, at * 4096).unwrap();
                assert_eq!(page, [content; 4096], "page {at}");
            }
            pool.punch(PageCount(0)).unwrap();
            assert_eq!(pool.allocated(), 0);
        }
    }

    /// Returns the bytes of shared memory that this process has mapped as huge pages.
    fn resident_huge() -> u64 {
        let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:")).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
    }

    #[test]
    fn only_the_memory_of_a_pool_is_adopted() {
        let pool = PoolFile::create(PageCount(3), PageLocking::Unlocked).unwrap();
        let copy = pool.file.try_clone().unwrap();
        assert_eq!(PoolFile::adopt(copy.into(), PageLocking::Locked).unwrap().pages(), PageCount(3));
        let refused = |file: OwnedFd| assert!(PoolFile::adopt(file, PageLocking::Locked).is_err());
        refused(tempfile::tempfile().unwrap().into());
        let memory = |bytes, seals| {
            let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            ftruncate(&file, bytes).unwrap();
            fcntl_add_seals(&file, seals).unwrap();
            file
        };
        refused(memory(4096, SealFlags::SHRINK | SealFlags::GROW));
        refused(memory(4096, SEALS | SealFlags::WRITE));
        refused(memory(4096, SEALS | SealFlags::FUTURE_WRITE));
        refused(memory(4095, SEALS));
        refused(memory(0, SEALS));
    }

    /// With `vm.memfd_noexec` every file in memory is made like this, a pool's as well.
    #[test]
    fn memory_that_the_host_seals_against_execution_is_adopted() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL;
        // Linux before 6.3 has neither the flag nor the setting.
        let Ok(file) = memfd_create("test", flags) else { return };
        ftruncate(&file, 4096).unwrap();
        fcntl_add_seals(&file, SEALS).unwrap();
        assert_ne!(fcntl_get_seals(&file).unwrap(), SEALS, "the host has added its own");
        assert_eq!(PoolFile::adopt(file, PageLocking::Unlocked).unwrap().pages(), PageCount(1));
    }
}
