//! The memory of a mapped pool, which this process reads and writes by itself.
//!
//! A memory server of this host makes it and passes it over its Unix socket. The owner is the process that holds the lock on a
//! description of its own; closing a connection takes nothing from it. It is read and written by system calls and never
//! mapped: memory that the server takes back reads as zeroes, and costs no signal. Decision 0039.

use remoca_core::units::{PAGE_SIZE, PAGE_SIZE_U64, PageCount, SlotIndex};
use remoca_io::lock::lock_whole;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Seals that every pool has: its size stays, and nobody can seal it against writing.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
const NO_SEALS: SealFlags = SealFlags::WRITE.union(SealFlags::FUTURE_WRITE);
/// Type of the file system that files in memory of normal pages are in. Those of huge pages cannot be written to.
const TMPFS_MAGIC: i64 = 0x0102_1994;
/// Pause between two attempts to lock memory that a process has which is about to end.
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// Identity of a file, as long as it is open anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
}

/// Why a process may not use a pool's memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("it is no memory of a pool: {0}")]
    Unfit(&'static str),
    #[error("another process uses it: each VM needs a process of its own, and a state file of its own")]
    InUse,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Memory that a server passed.
#[derive(Debug)]
pub enum Passed {
    /// This process is its owner from now on.
    New(PoolMemory),
    /// This process has been its owner before.
    Owned,
}

/// Memory of a pool that this process owns.
#[derive(Debug)]
pub struct PoolMemory {
    file: File,
    id: FileId,
    pages: PageCount,
}

impl PoolMemory {
    /// Makes this process the owner of memory that a server `passed`, unless it is that which the process has `owned`
    /// before. Waits up to `patience` for a former process to end. Blocks.
    ///
    /// # Errors
    /// If another process is the owner, or what was passed is no memory of a pool.
    pub fn take(passed: OwnedFd, owned: Option<FileId>, patience: Duration) -> Result<Passed, MemoryError> {
        let passed = Self::of(passed.into())?;
        if owned == Some(passed.id) {
            return Ok(Passed::Owned);
        }
        // The lock belongs to the open file description, and that of the server's descriptor is shared with the server.
        let path = format!("/proc/self/fd/{}", passed.file.as_raw_fd());
        let file = File::options().read(true).write(true).open(path)?;
        let deadline = Instant::now() + patience;
        loop {
            match lock_whole(&file) {
                Ok(()) => return Ok(Passed::New(Self { file, ..passed })),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error.into()),
                Err(_) if Instant::now() >= deadline => return Err(MemoryError::InUse),
                Err(_) => sleep(LOCK_RETRY),
            }
        }
    }

    /// Goes on with memory that a former program of this process owned. Its lock came with the descriptor.
    ///
    /// # Errors
    /// As for [`Self::take`].
    pub fn adopt(file: OwnedFd) -> Result<Self, MemoryError> {
        let memory = Self::of(file.into())?;
        lock_whole(&memory.file).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => MemoryError::InUse,
            _ => error.into(),
        })?;
        Ok(memory)
    }

    /// Checks a file, without a look at who owns it.
    fn of(file: File) -> Result<Self, MemoryError> {
        let seals = fcntl_get_seals(&file).map_err(|_| MemoryError::Unfit("it cannot be sealed"))?;
        if !seals.contains(SEALS) || seals.intersects(NO_SEALS) {
            return Err(MemoryError::Unfit("it has other seals"));
        }
        if fstatfs(&file).map_err(io::Error::from)?.f_type != TMPFS_MAGIC {
            return Err(MemoryError::Unfit("its pages are of another kind"));
        }
        let status = fstat(&file).map_err(io::Error::from)?;
        let length = u64::try_from(status.st_size).unwrap_or(0);
        let pages = u32::try_from(length / PAGE_SIZE_U64).unwrap_or(0);
        if pages == 0 || !length.is_multiple_of(PAGE_SIZE_U64) {
            return Err(MemoryError::Unfit("it has another size"));
        }
        Ok(Self { file, id: FileId { device: status.st_dev, inode: status.st_ino }, pages: PageCount(pages) })
    }

    /// Returns the identity of the memory.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// Returns the number of slots for which there could be memory.
    pub fn pages(&self) -> PageCount {
        self.pages
    }

    /// Copies the page of a slot out. It reads as zeroes if the server took its memory back.
    ///
    /// # Errors
    /// If the slot is beyond the memory, or the system cannot read it.
    pub fn read(&self, slot: SlotIndex, page: &mut [u8; PAGE_SIZE]) -> io::Result<()> {
        self.file.read_exact_at(page, offset(slot))
    }

    /// Copies a page into a slot.
    ///
    /// # Errors
    /// If the slot is beyond the memory, or the system has no memory for it. The slot holds any bytes then.
    pub fn write(&self, slot: SlotIndex, page: &[u8]) -> io::Result<()> {
        self.file.write_all_at(page, offset(slot))
    }
}

impl AsFd for PoolMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn offset(slot: SlotIndex) -> u64 {
    u64::from(slot.0) * PAGE_SIZE_U64
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create};

    /// Returns memory as a server makes it.
    pub(crate) fn sealed(bytes: u64, seals: SealFlags) -> OwnedFd {
        let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, bytes).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    }

    /// Returns memory of this many pages, as a server makes it.
    pub(crate) fn memory(pages: u64) -> OwnedFd {
        sealed(pages * PAGE_SIZE_U64, SEALS)
    }

    fn take(memory: &OwnedFd, owned: Option<FileId>) -> Result<Passed, MemoryError> {
        PoolMemory::take(memory.try_clone().unwrap(), owned, Duration::ZERO)
    }

    fn new(memory: &OwnedFd) -> PoolMemory {
        match take(memory, None).unwrap() {
            Passed::New(memory) => memory,
            Passed::Owned => panic!("nobody owned it"),
        }
    }

    #[test]
    fn a_pool_has_one_owner_and_an_upgrade_keeps_it() {
        let passed = memory(4);
        let owner = new(&passed);
        assert_eq!(owner.pages(), PageCount(4));
        assert!(matches!(take(&passed, None), Err(MemoryError::InUse)));
        assert!(matches!(take(&passed, Some(owner.id())), Ok(Passed::Owned)));
        let other = new(&memory(4));
        assert!(matches!(take(&passed, Some(other.id())), Err(MemoryError::InUse)));
        // What a program passes to the next one is a copy of its descriptor.
        let copy = owner.as_fd().try_clone_to_owned().unwrap();
        drop(owner);
        assert!(matches!(take(&passed, None), Err(MemoryError::InUse)), "the copy keeps the lock");
        let next = PoolMemory::adopt(copy).unwrap();
        let stranger = File::options().read(true).write(true).open(format!("/proc/self/fd/{}", passed.as_raw_fd()));
        assert!(matches!(PoolMemory::adopt(stranger.unwrap().into()), Err(MemoryError::InUse)));
        drop(next);
        drop(new(&passed));
    }

    #[test]
    fn what_is_no_memory_of_a_pool_is_refused() {
        let refused = |file: OwnedFd| assert!(matches!(take(&file, None), Err(MemoryError::Unfit(_))));
        refused(tempfile::tempfile().unwrap().into());
        refused(rustix::pipe::pipe().unwrap().0);
        refused(sealed(4096, SealFlags::SHRINK | SealFlags::GROW));
        refused(sealed(4096, SEALS | SealFlags::WRITE));
        refused(sealed(4096, SEALS | SealFlags::FUTURE_WRITE));
        refused(sealed(4095, SEALS));
        refused(sealed(0, SEALS));
    }

    #[test]
    fn pages_are_copied_and_what_is_punched_is_zero() {
        let passed = memory(3);
        let pool = new(&passed);
        let mut page = [0; PAGE_SIZE];
        for slot in 0..3_u8 {
            pool.write(SlotIndex(slot.into()), &[slot + 1; PAGE_SIZE]).unwrap();
        }
        fallocate(&passed, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 4096, 4096).unwrap();
        for (slot, content) in [(0, 1), (1, 0), (2, 3)] {
            pool.read(SlotIndex(slot), &mut page).unwrap();
            assert_eq!(page, [content; PAGE_SIZE]);
        }
        assert!(pool.read(SlotIndex(3), &mut page).is_err());
        assert!(pool.write(SlotIndex(3), &page).is_err(), "its size is sealed");
        assert!(pool.write(SlotIndex(u32::MAX), &page).is_err());
    }
}
