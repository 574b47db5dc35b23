//! Limits the memory that a target allocates: the allocator of this crate's programs counts per thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static TAKEN: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Adds `taken` bytes to this thread's total, subtracts `given_back`, and updates the maximum. It allocates nothing,
/// and ignores threads that are ending.
fn note(taken: usize, given_back: usize) {
    let _ = TAKEN.try_with(|total| {
        // Memory allocated by another thread may be freed by this one.
        total.set(total.get().saturating_add(taken).saturating_sub(given_back));
        let _ = MOST.try_with(|most| most.set(most.get().max(total.get())));
    });
}

// SAFETY: all is left to the system's allocator, whose conditions are this one's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size(), 0);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size(), 0);
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        note(0, layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size, layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.realloc(memory, layout, size) }
    }
}

/// Runs `work`, and checks that it never holds more than this many bytes more than before.
pub fn bounded(bytes: usize, work: impl FnOnce()) {
    let before = TAKEN.get();
    MOST.set(before);
    work();
    let most = MOST.get() - before;
    assert!(most <= bytes, "it took {most} bytes, which are more than {bytes}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_was_taken_all_the_same() {
        bounded(5000, || drop(Vec::<u8>::with_capacity(4000)));
        let too_much = std::panic::catch_unwind(|| bounded(3000, || drop(Vec::<u8>::with_capacity(4000))));
        assert!(too_much.is_err());
    }
}
