//! The memory of the index. It is a private mapping, or a part of the state file that outlives the process.
//!
//! Each access of a large index is to another page of it, and the processor knows the places of few pages. So it is in huge pages where
//! the system has them: nothing else depends on that.

mod lent;

pub use lent::LentWords;

use crate::undumped;
use lent::Loan;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::{Advice, MapFlags, MlockFlags, ProtFlags, madvise, mlock_with, mmap, mmap_anonymous, munmap};
use std::cell::Cell;
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Size of a huge page. Where the system has another one, the index is in small pages.
const HUGE_PAGE: usize = 2 << 20;
/// Number of huge pages that the system may fail to make before it is not asked for more. It looks for memory each time.
const COLLAPSES_MISSED_MAX: usize = 16;

/// Addresses that nothing else uses.
struct Reserved {
    start: *mut c_void,
    bytes: usize,
}

impl Reserved {
    /// Reserves addresses for `bytes` bytes, wherever among them they begin.
    fn new(bytes: usize) -> io::Result<Self> {
        let bytes = bytes.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), flags)? };
        Ok(Self { start, bytes })
    }

    /// Returns the first address that is as far behind the start of a huge page as byte `offset` of a file.
    fn address_of(&self, offset: u64) -> io::Result<*mut c_void> {
        let within = usize::try_from(offset % HUGE_PAGE as u64).map_err(io::Error::other)?;
        Ok(self.start.wrapping_byte_add((within + HUGE_PAGE - self.start.addr() % HUGE_PAGE) % HUGE_PAGE))
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: these addresses are ours alone, and whoever has what is mapped there has this value too.
        let _ = unsafe { munmap(self.start, self.bytes) };
    }
}

/// A mapping of 32-bit words, initially zero unless they belong to a file.
pub struct IndexMemory {
    start: NonNull<u32>,
    words: usize,
    outlives_process: bool,
    /// The loan of the words, if they were lent and have not changed since.
    loan: Cell<Option<Loan>>,
    /// Addresses of the mapping, which ends with them.
    _reserved: Reserved,
}

// SAFETY: the mapping belongs to this value alone, and memory is the same for all threads.
unsafe impl Send for IndexMemory {}

impl IndexMemory {
    /// Allocates memory for `words` words.
    ///
    /// # Errors
    /// If the system has too little memory available. All of it will be used, so a mere promise of the kernel is not
    /// enough: if the kernel could not keep it, it would kill this process later.
    pub fn new(words: usize) -> io::Result<Self> {
        let bytes = words.checked_mul(4).ok_or(io::ErrorKind::OutOfMemory)?;
        check_available(bytes)?;
        let reserved = Reserved::new(bytes)?;
        let (start, access) = (reserved.address_of(0)?, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: these addresses were reserved for this mapping, so nothing else is there.
        let start = unsafe { mmap_anonymous(start, bytes, access, MapFlags::PRIVATE | MapFlags::FIXED)? };
        // SAFETY: the mapping was just made, and the advice changes nothing of what it holds.
        if let Err(error) = unsafe { madvise(start, bytes, Advice::LinuxHugepage) } {
            tracing::debug!("the index is in small pages: {error}");
        }
        Self::of_mapping(reserved, start, words, false)
    }

    /// Maps `words` words of `file` from byte `offset` on. The file must contain them, and no other process may change
    /// them or truncate the file.
    pub fn of_file(file: &File, offset: u64, words: usize) -> io::Result<Self> {
        let bytes = words.checked_mul(4).filter(|bytes| *bytes > 0).ok_or(io::ErrorKind::InvalidInput)?;
        let reserved = Reserved::new(bytes)?;
        let (start, access) = (reserved.address_of(offset)?, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: these addresses were reserved for this mapping, so nothing else is there.
        let start = unsafe { mmap(start, bytes, access, MapFlags::SHARED | MapFlags::FIXED, file, offset)? };
        Self::of_mapping(reserved, start, words, true)
    }

    /// Maps `words` words of `file` from byte `offset` on, as [`Self::of_file`] does, and allocates memory for all of them: in huge
    /// pages as far as the system has some (none before Linux 6.1, or with `shmem_enabled` at `deny`). Nothing may be there yet.
    ///
    /// # Errors
    /// If there is no room.
    pub fn allocate(file: &File, offset: u64, words: usize) -> io::Result<Self> {
        let memory = Self::of_file(file, offset, words)?;
        let (length, huge) = (memory.bytes(), HUGE_PAGE as u64);
        // To join small pages that are all there takes ten times as long as to fill what is missing beside one.
        for at in (offset.next_multiple_of(huge)..).step_by(HUGE_PAGE).take_while(|at| at + huge <= offset + length) {
            fallocate(file, FallocateFlags::empty(), at, 1)?;
        }
        memory.collapse();
        fallocate(file, FallocateFlags::empty(), offset, length)?;
        Ok(memory)
    }

    /// Makes huge pages of small ones, as far as the system has some. What is in them stays the same.
    fn collapse(&self) {
        let (start, end) = (self.start.as_ptr().cast::<c_void>(), self.start.as_ptr().addr() + self.words * 4);
        let first = start.wrapping_byte_add(start.addr().next_multiple_of(HUGE_PAGE) - start.addr());
        // One at a time: the kernel leaves all others as they are behind the first one that it has not got.
        let all = (0..).map(|at| first.wrapping_byte_add(at * HUGE_PAGE)).take_while(|at| at.addr() + HUGE_PAGE <= end);
        let mut missing = 0;
        for at in all {
            // SAFETY: the range is within the mapping, which belongs to this value, and what it holds stays the same.
            if unsafe { libc::madvise(at, HUGE_PAGE, libc::MADV_COLLAPSE) } != 0 {
                missing += 1;
                if missing == COLLAPSES_MISSED_MAX {
                    tracing::debug!("most of the index is in small pages: {}", io::Error::last_os_error());
                    return;
                }
            }
        }
    }

    fn bytes(&self) -> u64 {
        self.words as u64 * 4
    }

    /// Wraps a new mapping. Pages that were touched stay in memory, if the system allows that: each read of the guest
    /// looks into the index on the I/O thread, which must not wait for a swap device.
    fn of_mapping(reserved: Reserved, start: *mut c_void, words: usize, outlives_process: bool) -> io::Result<Self> {
        // SAFETY: the mapping was just made, has so many words, and belongs to the caller.
        unsafe { undumped::leave_out(start, words * 4) };
        // SAFETY: the same; locking changes nothing of what it holds.
        if let Err(error) = unsafe { mlock_with(start, words * 4, MlockFlags::ONFAULT) } {
            tracing::debug!("the index can be swapped out: {error}");
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, words, outlives_process, loan: Cell::new(None), _reserved: reserved })
    }

    /// Lends all words from number `first` on to another thread, which reads them as they are now. Nothing is copied unless they
    /// change, or this memory ends, before it has read them.
    ///
    /// # Panics
    /// If there are fewer words.
    pub fn lend(&self, first: usize) -> LentWords {
        self.end_loan();
        // SAFETY: the loan ends before the words may change (`deref_mut`) and before they are unmapped (`drop`). No reference
        // through which they could change exists now, for `self` is shared.
        let (lent, loan) = unsafe { LentWords::new(NonNull::from(&self[first..])) };
        self.loan.set(Some(loan));
        lent
    }

    #[cold]
    fn end_loan(&self) {
        if let Some(loan) = self.loan.take() {
            loan.end();
        }
    }

    /// Returns whether the words remain available to a successor of the process.
    pub fn outlives_process(&self) -> bool {
        self.outlives_process
    }
}

/// Checks that the host has `bytes` bytes of memory available. Succeeds if the host does not report that.
pub fn check_available(bytes: usize) -> io::Result<()> {
    check_share(bytes, 1, "of")
}

/// Checks that `bytes` bytes are at most half of the memory that the host has available. Succeeds if the host does not report that.
///
/// # Errors
/// If they are more.
pub fn check_half_available(bytes: usize) -> io::Result<()> {
    check_share(bytes, 2, "more than half of")
}

/// Checks that `bytes` bytes are at most one `part` of the memory that is available. `of` says in words what they are more than.
fn check_share(bytes: usize, part: usize, of: &str) -> io::Result<()> {
    match available_bytes() {
        Some(available) if bytes > available / part => {
            let message = format!("it would take {} MiB, {of} {} MiB available", bytes >> 20, available >> 20);
            Err(io::Error::new(io::ErrorKind::OutOfMemory, message))
        }
        _ => Ok(()),
    }
}

/// Returns the bytes that the host can provide without swapping, or `None` if it does not report them.
fn available_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

impl Deref for IndexMemory {
    type Target = [u32];

    #[inline]
    fn deref(&self) -> &[u32] {
        // SAFETY: the mapping is `words` long, page-aligned, initialised by the kernel, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl DerefMut for IndexMemory {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u32] {
        if self.loan.get_mut().is_some() {
            self.end_loan();
        }
        // SAFETY: as in `deref`, and `&mut self` makes the borrow the only one: a loan has ended.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.words) }
    }
}

impl Drop for IndexMemory {
    fn drop(&mut self) {
        self.end_loan();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    /// Returns how many bytes of the mapping that contains `address` are in huge pages.
    fn huge_bytes(address: usize) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut is_here, mut huge) = (false, 0);
        for line in maps.lines() {
            let mut words = line.split_whitespace();
            let first = words.next().unwrap_or_default();
            if let Some((start, end)) = first.split_once('-') {
                let parse = |text| usize::from_str_radix(text, 16).unwrap();
                is_here = (parse(start)..parse(end)).contains(&address);
            } else if is_here && ["ShmemPmdMapped:", "FilePmdMapped:", "AnonHugePages:"].contains(&first) {
                huge += words.next().unwrap().parse::<u64>().unwrap() << 10;
            }
        }
        huge
    }

    #[test]
    fn words_are_in_huge_pages_where_the_system_has_some_also_for_a_successor() {
        let header = 3 * 4096;
        // Two huge pages, and a part of one before and behind them.
        let words = 3 * HUGE_PAGE / 4 + 5;
        let file = File::from(rustix::fs::memfd_create("index", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len((header + words * 4) as u64).unwrap();
        let mut memory = IndexMemory::allocate(&file, header as u64, words).unwrap();
        let allocated = file.metadata().unwrap().blocks() * 512;
        let wanted = (header + words * 4).next_multiple_of(4096) as u64 - header as u64;
        // Some systems make huge pages without being asked, which reach beyond the words.
        let mode = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
        let makes_more = ["[always]", "[within_size]", "[force]"].iter().any(|chosen| mode.contains(chosen));
        assert!(allocated == wanted || makes_more && allocated > wanted, "{allocated} bytes for {wanted}");
        assert_eq!(memory.as_ptr().addr() % HUGE_PAGE, header, "as far from a huge page as in the file");
        assert!(memory.iter().all(|word| *word == 0));
        let value = |at: usize| u32::try_from(at).unwrap().wrapping_mul(0x9e37_79b9);
        for (at, word) in memory.iter_mut().enumerate() {
            *word = value(at);
        }
        // A host may have none left, or allow none.
        let huge = huge_bytes(memory.as_ptr().addr());
        assert!([0, HUGE_PAGE as u64, 2 * HUGE_PAGE as u64].contains(&huge), "{huge} bytes");
        drop(memory);
        let again = IndexMemory::of_file(&file, header as u64, words).unwrap();
        assert!(again.iter().enumerate().all(|(at, word)| *word == value(at)));
        assert_eq!(huge_bytes(again.as_ptr().addr()), huge);
        assert!(again.outlives_process());
    }

    #[test]
    fn more_than_the_system_has_is_refused_with_how_much_that_is() {
        let error = IndexMemory::new(usize::MAX / 4).map(drop).unwrap_err();
        let (kind, text) = (error.kind(), error.to_string());
        let words = format!("it would take {} MiB, of ", usize::MAX >> 20);
        assert!(kind == io::ErrorKind::OutOfMemory && text.starts_with(&words), "{text}");
        assert!(text.ends_with(" MiB available"), "{text}");
    }

    #[test]
    fn half_of_what_the_system_has_is_left() {
        let available = available_bytes().unwrap();
        assert!(check_half_available(available / 4).is_ok());
        let text = check_half_available(available / 4 * 3).unwrap_err().to_string();
        assert!(text.contains(" MiB, more than half of "), "{text}");
    }

    #[test]
    fn addresses_that_were_reserved_are_given_back() {
        let count = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        let before = count();
        for _ in 0..1000 {
            drop(IndexMemory::new(1000).unwrap());
            drop(IndexMemory::new(HUGE_PAGE).unwrap());
        }
        // Other tests map some meanwhile: each of their threads has a few.
        let after = count();
        assert!(after < before + 500, "{before} mappings became {after}");
    }
}
