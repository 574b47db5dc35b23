//! Mapped memory: that of the arena, and that of a mapped pool, which is mapped only to be locked and joined into huge pages.
//!
//! Called by the arena and by `memfile.rs`. The only unsafe code of this crate that makes mappings is here: the pages are the
//! kernel's, not Rust's.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use remoca_core::units::PAGE_SIZE;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap, mmap_anonymous, munlock, munmap};

use crate::error::StartError;
use crate::host;
use crate::status::Backing;

/// Bytes in a chunk: one huge page.
pub(crate) const CHUNK_BYTES: usize = 2 << 20;
const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);
/// Chunks that are locked in one system call.
pub(crate) const PIECE_CHUNKS: usize = 8;

/// A mapped range, aligned to chunks.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<c_void>,
    length: usize,
    pub(crate) backing: Backing,
}

// SAFETY: a mapping is plain memory, valid in every thread; access to it goes through chunks, which have one owner each.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives no access to the memory except through `chunk`, whose result its caller owns alone.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps huge pages that the operator has set aside; they are all there at once, and never swapped. Returns `None`
    /// if there are not enough, or this process may not use them.
    pub(crate) fn set_aside_huge_pages(
        memory_bytes: u64,
        length: usize,
        progress: &mut dyn FnMut(u64),
    ) -> Option<Self> {
        if host::free_huge_page_bytes() < memory_bytes {
            return None;
        }
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        let base = map_anonymous(length, READ_WRITE, flags).ok()?;
        let map = Self { base, length, backing: Backing::HugeTlb };
        map.advise(Advice::LinuxDontDump);
        let populated = map.in_pieces(0, progress, |start, length| {
            // SAFETY: the range was just mapped and nothing refers to it.
            unsafe { madvise(start, length, Advice::LinuxPopulateWrite) }
        });
        match refusal(populated) {
            None => Some(map),
            Some(error) => {
                tracing::warn!(
                    %error,
                    "the huge pages that are set aside cannot be used (is there a limit, such as hugetlb.2MB.max of the control \
                     group?): taking ordinary memory"
                );
                None
            }
        }
    }

    /// Maps ordinary memory, in transparent huge pages where the host allows it.
    pub(crate) fn ordinary(length: usize) -> Result<Self, Errno> {
        let base = map_aligned(length, READ_WRITE, MapFlags::PRIVATE)?;
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

    /// Locks all of the memory but the first `outside` chunks.
    pub(crate) fn lock(
        &self,
        memory_bytes: u64,
        outside: usize,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), StartError> {
        let limit = host::raised_lock_limit();
        // SAFETY: the range is mapped, and locking changes nothing of its content.
        let locked = self.in_pieces(outside, progress, |start, length| unsafe { mlock(start, length) });
        locked.map_err(|errno| match limit {
            Some(limit_bytes) if limit_bytes < memory_bytes && matches!(errno, Errno::NOMEM | Errno::PERM) => {
                StartError::LockLimit { memory_bytes, limit_bytes }
            }
            _ => StartError::Lock { memory_bytes, source: errno.into() },
        })
    }

    /// Calls `make` for all of the memory from chunk `first` on, piece by piece, until one fails. Calls `progress` with the
    /// bytes done.
    fn in_pieces(
        &self,
        first: usize,
        progress: &mut dyn FnMut(u64),
        make: impl Fn(*mut c_void, usize) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        progress(0);
        for index in (first..self.length / CHUNK_BYTES).step_by(PIECE_CHUNKS) {
            let start = index * CHUNK_BYTES;
            let length = (self.length - start).min(PIECE_CHUNKS * CHUNK_BYTES);
            // SAFETY: the offset lies in the mapping.
            make(unsafe { self.base.byte_add(start) }.as_ptr(), length)?;
            progress((start + length) as u64);
        }
        Ok(())
    }

    /// Gives the memory of chunk `index`, which has no owner, back to the host.
    pub(crate) fn give_back(&self, index: u32) {
        // SAFETY: nobody has the chunk while it is given back, so no reference into it is left, and pages that are gone read as zero.
        let given_back = unsafe { madvise(self.chunk(index).as_ptr().cast(), CHUNK_BYTES, Advice::LinuxDontNeed) };
        if let Err(error) = given_back {
            tracing::warn!(%error, "memory of a freed pool could not be given back to the host");
        }
    }

    /// Unlocks the memory of chunk `index`, which has no owner, and gives it back to the host.
    pub(crate) fn unlock(&self, index: u32) {
        // SAFETY: the chunk lies in the mapping, and unlocking changes nothing of its content.
        if let Err(error) = unsafe { munlock(self.chunk(index).as_ptr().cast(), CHUNK_BYTES) } {
            tracing::warn!(%error, "memory could not be unlocked");
        }
        self.give_back(index);
    }

    /// Has the host find memory for chunk `index` again, and locks it.
    pub(crate) fn lock_again(&self, index: u32) -> Result<(), Errno> {
        // SAFETY: as in `unlock`.
        unsafe { mlock(self.chunk(index).as_ptr().cast(), CHUNK_BYTES) }
    }

    /// Returns the start of chunk `index`.
    pub(crate) fn chunk(&self, index: u32) -> NonNull<[u8; PAGE_SIZE]> {
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

/// Returns why huge pages that were mapped cannot be used, or `None` if they can.
///
/// The mapping reserves them, also those that a limit of the control group forbids: the first write to one of these would end this
/// process. Kernels before 5.14 do not know the advice that finds out, and have the pages there when they are used.
fn refusal(populated: Result<(), Errno>) -> Option<Errno> {
    populated.err().filter(|error| *error != Errno::INVAL)
}

fn map_anonymous(length: usize, prot: ProtFlags, flags: MapFlags) -> Result<NonNull<c_void>, Errno> {
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), length, prot, flags) }?;
    NonNull::new(base).ok_or(Errno::NOMEM)
}

/// Maps `length` bytes, aligned to chunks.
fn map_aligned(length: usize, prot: ProtFlags, flags: MapFlags) -> Result<NonNull<c_void>, Errno> {
    let padded = map_anonymous(length + CHUNK_BYTES, prot, flags)?;
    let before = padded.as_ptr().align_offset(CHUNK_BYTES);
    let after = CHUNK_BYTES - before;
    // SAFETY: both ranges lie in the mapping just made (`before <= CHUNK_BYTES`), page-aligned as the mapping is, and nothing
    // refers to them. An empty range is not unmapped.
    unsafe {
        let base = padded.byte_add(before);
        if before > 0 {
            munmap(padded.as_ptr(), before)?;
        }
        if after > 0 {
            munmap(base.byte_add(length).as_ptr(), after)?;
        }
        Ok(base)
    }
}

/// A file in memory, mapped only because the kernel locks mappings, and joins pages of mappings, not files. Nothing here reads
/// or writes through it, so what others do to the file cannot harm this process.
#[derive(Debug)]
pub(crate) struct FileMapping {
    base: NonNull<c_void>,
    length: usize,
}

// SAFETY: the mapping is never accessed, and all that is done with it is possible from every thread.
unsafe impl Send for FileMapping {}
// SAFETY: as above; `&FileMapping` gives no access to the memory.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps the first `length` bytes of a file, a multiple of a page, at an address at which its chunks can be huge pages.
    pub(crate) fn new(file: BorrowedFd<'_>, length: usize) -> Result<Self, Errno> {
        // What cannot be accessed is no memory that the host promises, whatever its rule for overcommitting is.
        let reserved = map_aligned(length, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)?;
        let map = Self { base: reserved, length };
        // SAFETY: the new mapping takes the place of the one just made, to which nothing refers.
        unsafe { mmap(map.base.as_ptr(), length, ProtFlags::READ, MapFlags::SHARED | MapFlags::FIXED, file, 0) }?;
        // SAFETY: the range was just mapped; the advice keeps the content.
        let _advised = unsafe { madvise(map.base.as_ptr(), length, Advice::LinuxDontDump) };
        Ok(map)
    }

    /// Makes the pages of each chunk from `start` on one huge page. Each chunk must have a page that is there. Linux 6.1 can
    /// do this, whatever the host's setting for huge pages in shared memory is, but for `deny`.
    ///
    /// # Errors
    /// If the host has no huge page, or allows none. What was not joined is as before.
    pub(crate) fn join(&self, start: usize, length: usize) -> std::io::Result<()> {
        let range = self.range(start, length)?;
        // SAFETY: the range lies in the mapping, and joining changes nothing of its content.
        match unsafe { libc::madvise(range, length, libc::MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }

    /// Locks `length` bytes from `start` on. Pages that are not there are allocated.
    pub(crate) fn lock(&self, start: usize, length: usize) -> Result<(), Errno> {
        let range = self.range(start, length)?;
        // SAFETY: the range lies in the mapping, and locking changes nothing of its content.
        unsafe { mlock(range, length) }
    }

    /// Unlocks `length` bytes from `start` on.
    pub(crate) fn unlock(&self, start: usize, length: usize) -> Result<(), Errno> {
        let range = self.range(start, length)?;
        // SAFETY: as in `lock`.
        unsafe { munlock(range, length) }
    }

    /// Returns whether chunks of the file lie at addresses at which they can be huge pages.
    #[cfg(test)]
    pub(crate) fn is_aligned(&self) -> bool {
        self.base.addr().get().is_multiple_of(CHUNK_BYTES)
    }

    fn range(&self, start: usize, length: usize) -> Result<*mut c_void, Errno> {
        match start.checked_add(length) {
            // SAFETY: the offset lies in the mapping.
            Some(end) if end <= self.length => Ok(unsafe { self.base.byte_add(start) }.as_ptr()),
            _ => Err(Errno::INVAL),
        }
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping. Unmapping unlocks.
        let unmapped = unsafe { munmap(self.base.as_ptr(), self.length) };
        debug_assert!(unmapped.is_ok(), "the mapping was ours");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_that_may_not_be_used_are_not_taken() {
        assert_eq!(refusal(Ok(())), None);
        assert_eq!(refusal(Err(Errno::INVAL)), None, "the kernel does not know the advice");
        for error in [Errno::FAULT, Errno::NOMEM, Errno::HWPOISON] {
            assert_eq!(refusal(Err(error)), Some(error));
        }
    }
}
