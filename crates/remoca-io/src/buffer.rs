//! Page-aligned I/O buffers from a bounded pool.
//!
//! Called by the driver, the frontends and the stores. A buffer returns to its pool when it is dropped, on any thread.
//! Sizes are powers of two from one page to [`BUFFER_LEN_MAX`]. Invariants:
//! 1. The bytes of all buffers of a pool, lent or free, never exceed the pool's limit (property-tested).
//! 2. Memory of a buffer is initialised, but may hold what an earlier user of the pool left there.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_queue::ArrayQueue;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::undumped;

const BUFFER_ALIGNMENT: usize = 4096;
const CLASS_COUNT: usize = 11;
/// Longest buffer in bytes, and so the longest read or write of a store: 4 MiB.
pub const BUFFER_LEN_MAX: usize = BUFFER_ALIGNMENT << (CLASS_COUNT - 1);
/// The most free buffers kept in each class for reuse. Others are unmapped.
const FREE_PER_CLASS_MAX: usize = 1024;

/// A source of [`IoBuffer`]s with a limit on their total size. Clones share the limit.
#[derive(Clone)]
pub struct BufferPool {
    shared: Arc<Shared>,
}

impl BufferPool {
    /// Creates a pool whose buffers never exceed `limit_bytes` in total.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Self {
        let free = std::array::from_fn(|_| ArrayQueue::new(FREE_PER_CLASS_MAX));
        Self { shared: Arc::new(Shared { free, allocated_bytes: AtomicUsize::new(0), limit_bytes }) }
    }

    /// Returns a buffer of `len` bytes (1 ..= [`BUFFER_LEN_MAX`]). Returns `None` if the length is out of range, or the
    /// pool is used up; in that case try again when a buffer has been dropped.
    #[must_use]
    pub fn take(&self, len: usize) -> Option<IoBuffer> {
        let class = class_of(len)?;
        let memory = match self.shared.free[class].pop() {
            Some(memory) => memory,
            None => self.shared.allocate(class)?,
        };
        Some(IoBuffer { memory, class, len, shared: Arc::clone(&self.shared) })
    }

    /// Returns the bytes of the limit that a buffer of `len` bytes takes, or zero if a buffer cannot have that length.
    #[must_use]
    pub fn footprint(len: usize) -> usize {
        class_of(len).map_or(0, class_len)
    }

    /// Returns the maximum total bytes of all buffers.
    #[must_use]
    pub fn limit_bytes(&self) -> usize {
        self.shared.limit_bytes
    }

    /// Unmaps all free buffers.
    pub fn release_free(&self) {
        while self.shared.release_some_free().is_some() {}
    }

    /// Returns the total bytes of all buffers, lent and free.
    #[must_use]
    pub fn allocated_bytes(&self) -> usize {
        self.shared.allocated_bytes.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { limit_bytes, .. } = &*self.shared;
        f.debug_struct("BufferPool")
            .field("allocated_bytes", &self.allocated_bytes())
            .field("limit_bytes", limit_bytes)
            .finish()
    }
}

/// An owned, page-aligned piece of memory for one operation.
pub struct IoBuffer {
    memory: Memory,
    class: usize,
    len: usize,
    shared: Arc<Shared>,
}

impl IoBuffer {
    /// Shortens or lengthens the buffer within its allocation.
    ///
    /// # Panics
    /// If `len` is zero or more than the allocation holds (the power of two at or above the first length).
    pub fn set_len(&mut self, len: usize) {
        assert!((1..=class_len(self.class)).contains(&len), "an I/O buffer of class {} with {len} bytes", self.class);
        self.len = len;
    }
}

impl Deref for IoBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the memory is owned by this buffer, initialised, and at least `len` long (checked at each change).
        unsafe { std::slice::from_raw_parts(self.memory.0.as_ptr(), self.len) }
    }
}

impl DerefMut for IoBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the borrow the only one.
        unsafe { std::slice::from_raw_parts_mut(self.memory.0.as_ptr(), self.len) }
    }
}

impl Drop for IoBuffer {
    fn drop(&mut self) {
        if let Err(memory) = self.shared.free[self.class].push(Memory(self.memory.0)) {
            self.shared.release(memory, self.class);
        }
    }
}

impl fmt::Debug for IoBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoBuffer({} bytes)", self.len)
    }
}

/// Owned memory with the length of some class.
struct Memory(NonNull<u8>);

// SAFETY: the pointer is the only one to its allocation, which belongs to no thread.
unsafe impl Send for Memory {}
// SAFETY: shared access reaches the memory only through `IoBuffer::deref`, which reads.
unsafe impl Sync for Memory {}

struct Shared {
    free: [ArrayQueue<Memory>; CLASS_COUNT],
    allocated_bytes: AtomicUsize,
    limit_bytes: usize,
}

impl Shared {
    fn allocate(&self, class: usize) -> Option<Memory> {
        while !self.reserve(class_len(class)) {
            self.release_some_free()?;
        }
        let memory = map(class_len(class));
        if memory.is_none() {
            self.allocated_bytes.fetch_sub(class_len(class), Ordering::Relaxed);
        }
        memory.map(Memory)
    }

    fn reserve(&self, bytes: usize) -> bool {
        let add = |allocated: usize| allocated.checked_add(bytes).filter(|total| *total <= self.limit_bytes);
        self.allocated_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    /// Unmaps one of the longest free buffers, to make room for another class. Returns `None` if there is no free
    /// buffer.
    fn release_some_free(&self) -> Option<()> {
        let (class, memory) =
            (0..CLASS_COUNT).rev().find_map(|class| self.free[class].pop().map(|memory| (class, memory)))?;
        self.release(memory, class);
        Some(())
    }

    fn release(&self, memory: Memory, class: usize) {
        // SAFETY: the memory came from `map` with this length, and its only owner hands it over here.
        let unmapped = unsafe { munmap(memory.0.as_ptr().cast(), class_len(class)) };
        debug_assert!(unmapped.is_ok(), "the mapping was ours");
        self.allocated_bytes.fetch_sub(class_len(class), Ordering::Relaxed);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        while self.release_some_free().is_some() {}
    }
}

/// Returns the smallest class that holds `len` bytes, or `None` if `len` is zero or too long.
fn class_of(len: usize) -> Option<usize> {
    if len == 0 {
        return None;
    }
    (0..CLASS_COUNT).find(|class| len <= class_len(*class))
}

fn class_len(class: usize) -> usize {
    BUFFER_ALIGNMENT << class
}

/// Maps zeroed memory that the kernel leaves out of core dumps. The kernel merges adjacent mappings. Returns `None` if
/// it has no memory.
fn map(length: usize) -> Option<NonNull<u8>> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), length, access, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: the mapping was just made, and is ours.
    unsafe { undumped::leave_out(start, length) };
    NonNull::new(start.cast())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buffers_are_page_aligned_and_keep_their_length() {
        let pool = BufferPool::new(1 << 20);
        let mut buffer = pool.take(5000).unwrap();
        assert_eq!(buffer.len(), 5000);
        assert_eq!(buffer.as_ptr() as usize % BUFFER_ALIGNMENT, 0);
        buffer.set_len(8192);
        assert_eq!(buffer.len(), 8192);
    }

    #[test]
    fn lengths_out_of_range_are_refused() {
        let pool = BufferPool::new(usize::MAX);
        assert!(pool.take(0).is_none());
        assert!(pool.take(BUFFER_LEN_MAX + 1).is_none());
        assert!(pool.take(BUFFER_LEN_MAX).is_some());
    }

    #[test]
    fn free_buffers_of_one_class_make_room_for_another() {
        let pool = BufferPool::new(64 * 1024);
        let small: Vec<_> = (0..16).map(|_| pool.take(4096).unwrap()).collect();
        assert!(pool.take(1).is_none());
        drop(small);
        let large = pool.take(64 * 1024).unwrap();
        assert_eq!(pool.allocated_bytes(), 64 * 1024);
        assert!(pool.take(1).is_none());
        drop(large);
        assert!(pool.take(1).is_some());
        pool.release_free();
        assert_eq!(pool.allocated_bytes(), 0);
    }

    #[test]
    fn buffers_can_be_dropped_on_another_thread() {
        let pool = BufferPool::new(4096);
        let buffer = pool.take(4096).unwrap();
        std::thread::spawn(move || drop(buffer)).join().unwrap();
        assert!(pool.take(4096).is_some());
    }

    proptest! {
        #[test]
        fn the_limit_holds(limit in 0_usize..100_000, steps in prop::collection::vec((any::<bool>(), 1_usize..40_000), 1..60)) {
            let pool = BufferPool::new(limit);
            let mut lent = Vec::new();
            for (take, len) in steps {
                if take {
                    lent.extend(pool.take(len));
                } else if !lent.is_empty() {
                    lent.swap_remove(len % lent.len());
                }
                let lent_bytes: usize = lent.iter().map(|buffer: &IoBuffer| class_len(buffer.class)).sum();
                prop_assert!(lent_bytes <= pool.allocated_bytes());
                prop_assert!(pool.allocated_bytes() <= limit);
            }
        }
    }
}
