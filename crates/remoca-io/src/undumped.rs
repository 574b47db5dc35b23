//! Keeps memory with guests' data, or with the means to read them, out of core dumps, which would write it to a disk.

use rustix::mm::{Advice, madvise};
use std::ffi::c_void;

/// Leaves a mapping out of core dumps, if the kernel accepts the advice.
///
/// # Safety
/// `length` bytes from `start` on are mapped, and belong to the caller.
pub unsafe fn leave_out(start: *mut c_void, length: usize) {
    // SAFETY: the caller has the range, and the advice changes nothing of what it holds.
    if let Err(error) = unsafe { madvise(start, length, Advice::LinuxDontDump) } {
        tracing::debug!("the kernel would dump {length} bytes of memory: {error}");
    }
}
