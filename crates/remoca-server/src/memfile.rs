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
use crate::mapping::LockMapping;

/// Seals of every pool. Writing and punching holes stay possible.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// Unit in which `st_blocks` counts.
const BLOCK_BYTES: u64 = 512;

#[derive(Debug)]
pub(crate) struct PoolFile {
    file: File,
    pages: PageCount,
    /// `None` if the memory is not to be locked.
    map: Option<LockMapping>,
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
        if fcntl_get_seals(&file).ok() != Some(SEALS) {
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
        let map = match locking {
            PageLocking::Locked => Some(LockMapping::new(file.as_fd(), length(pages)?)?),
            PageLocking::Unlocked => None,
        };
        Ok(Self { file: file.into(), pages, map })
    }

    /// Returns the size of the file.
    pub(crate) fn pages(&self) -> PageCount {
        self.pages
    }

    /// Allocates the pages `from..to`, and locks them if memory is locked. What they hold already stays.
    pub(crate) fn populate(&self, from: PageCount, to: PageCount) -> io::Result<()> {
        let (start, length_bytes) = (bytes(from), bytes(to) - bytes(from));
        if length_bytes == 0 {
            return Ok(());
        }
        fallocate(&self.file, FallocateFlags::empty(), start, length_bytes)?;
        match &self.map {
            Some(map) => Ok(map.lock(length(from)?, length(to)? - length(from)?)?),
            None => Ok(()),
        }
    }

    /// Unlocks all pages from `from` on, and gives their memory back to the host. They read as zeroes afterwards.
    pub(crate) fn punch(&self, from: PageCount) -> io::Result<()> {
        let length_bytes = bytes(self.pages) - bytes(from);
        if length_bytes == 0 {
            return Ok(());
        }
        if let Some(map) = &self.map {
            map.unlock(length(from)?, length(self.pages)? - length(from)?)?;
        }
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, hole, bytes(from), length_bytes)?)
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
    usize::try_from(bytes(pages)).map_err(|_| io::ErrorKind::OutOfMemory.into())
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
            pool.populate(PageCount(0), PageCount(40)).unwrap();
            assert_eq!(pool.allocated(), 40);
            pool.file.write_all_at(&[7; 4096], 39 * 4096).unwrap();
            pool.file.write_all_at(&[7; 4096], 10 * 4096).unwrap();
            pool.punch(PageCount(16)).unwrap();
            assert_eq!(pool.allocated(), 16);
            pool.populate(PageCount(16), PageCount(64)).unwrap();
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
        refused(memory(4095, SEALS));
        refused(memory(0, SEALS));
    }
}
