//! The memory of the index. It is a private mapping, or a part of the state file that outlives the process.

use crate::undumped;
use rustix::mm::{MapFlags, MlockFlags, ProtFlags, mlock_with, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// A mapping of 32-bit words, initially zero unless they belong to a file.
pub struct IndexMemory {
    start: NonNull<u32>,
    words: usize,
    outlives_process: bool,
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
        // SAFETY: a new private mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?
        };
        Self::of_mapping(start, words, false)
    }

    /// Maps `words` words of `file` from byte `offset` on. The file must contain them, and no other process may change
    /// them or truncate the file.
    pub fn of_file(file: &File, offset: u64, words: usize) -> io::Result<Self> {
        let bytes = words.checked_mul(4).filter(|bytes| *bytes > 0).ok_or(io::ErrorKind::InvalidInput)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file, offset)? };
        Self::of_mapping(start, words, true)
    }

    /// Wraps a new mapping. Pages that were touched stay in memory, if the system allows that: each read of the guest
    /// looks into the index on the I/O thread, which must not wait for a swap device.
    fn of_mapping(start: *mut c_void, words: usize, outlives_process: bool) -> io::Result<Self> {
        // SAFETY: the mapping was just made, has so many words, and belongs to the caller.
        unsafe { undumped::leave_out(start, words * 4) };
        // SAFETY: the same; locking changes nothing of what it holds.
        if let Err(error) = unsafe { mlock_with(start, words * 4, MlockFlags::ONFAULT) } {
            tracing::debug!("the index can be swapped out: {error}");
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, words, outlives_process })
    }

    /// Returns whether the words remain available to a successor of the process.
    pub fn outlives_process(&self) -> bool {
        self.outlives_process
    }
}

/// Checks that the host has `bytes` bytes of memory available. Succeeds if the host does not report that.
pub fn check_available(bytes: usize) -> io::Result<()> {
    match available_bytes() {
        Some(available) if bytes > available => {
            let message = format!("it would take {} MiB, of {} MiB available", bytes >> 20, available >> 20);
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

    fn deref(&self) -> &[u32] {
        // SAFETY: the mapping is `words` long, page-aligned, initialised by the kernel, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl DerefMut for IndexMemory {
    fn deref_mut(&mut self) -> &mut [u32] {
        // SAFETY: as in `deref`, and `&mut self` makes the borrow the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.words) }
    }
}

impl Drop for IndexMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone and nothing borrows it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.words * 4) };
    }
}
