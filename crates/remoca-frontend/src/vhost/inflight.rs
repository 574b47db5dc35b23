//! The record of requests in flight, in memory that the front end keeps while no back end is running (INFLIGHT_SHMFD).
//!
//! The layout is that of the vhost-user specification for split rings, with one region for each queue, followed by a
//! few bytes of our own. A request is marked before anything is done about it and unmarked after the guest can see its
//! completion; a crash between those two is what `last_batch_head` and `used_idx` are for.
//!
//! ```text
//! queue region, aligned to 64          descriptor state, 16 bytes for each descriptor
//!   0  features: u64 = 0                 0  inflight: u8
//!   8  version: u16 = 1                  6  next: u16      (head of the rest of its batch)
//!  10  desc_num: u16                     8  counter: u64   (order of arrival)
//!  12  last_batch_head: u16
//!  14  used_idx: u16                   trailer: magic: u64, writeback: u8
//!  16  descriptor states
//! ```

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vm_memory::mmap::MmapRegion;

use remoca_io::undumped;
use remoca_protocol::guests::InflightRecord;
use vm_memory::{AtomicInteger, FileOffset, VolatileMemory};

use super::config::{QUEUE_COUNT_MAX, QUEUE_SIZE_MAX};
use remoca_io::handover::Pass;

const HEADER_BYTES: usize = 16;
const STATE_BYTES: usize = 16;
const ALIGNMENT: usize = 64;
const TRAILER_BYTES: usize = 64;
const TRAILER_MAGIC: u64 = u64::from_le_bytes(*b"REMOCAWC");
/// Value of `writeback` while no queue has used the record yet.
const UNUSED: u8 = 2;
const VERSION: u16 = 1;

/// Why a record of requests in flight is refused.
#[derive(Debug, thiserror::Error)]
pub enum InflightError {
    #[error("a record of {queues} queues of {size}: at most 64 of 1024 are possible")]
    Shape { queues: u16, size: u16 },
    #[error("a record of {actual} bytes, {needed} are needed")]
    Size { actual: u64, needed: usize },
    #[error("a record of version {version} with features {features:#x} for {descriptors} descriptors")]
    Layout { version: u16, features: u64, descriptors: u16 },
    #[error(
        "a queue of {ring} entries, and the hypervisor's record of requests in flight is for {record}: have the guest make all queues \
         of its disk as large as the first one"
    )]
    Ring { record: u16, ring: u16 },
    #[error("cannot make or map the record")]
    Map(#[source] std::io::Error),
}

/// The mapped record of one device.
pub(crate) struct InflightRegion {
    mapping: MmapRegion<()>,
    queues: u16,
    size: u16,
    has_trailer: bool,
}

impl InflightRegion {
    /// Creates a record as a file for the front end to keep, and returns it with its size.
    pub fn create(queues: u16, size: u16, writeback: bool) -> Result<(File, u64), InflightError> {
        check_shape(queues, size)?;
        let bytes = queues_bytes(queues, size) + TRAILER_BYTES;
        let bytes_u64 = bytes as u64;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("remoca-inflight", flags).map_err(from_errno)?);
        ftruncate(&file, bytes_u64).map_err(from_errno)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(from_errno)?;
        let keep = file.try_clone().map_err(InflightError::Map)?;
        let region = Self::map(keep, bytes, 0, queues, size, true)?;
        region.at::<AtomicU64>(region.trailer()).store(TRAILER_MAGIC, Ordering::Relaxed);
        let trailer = region.at::<AtomicU8>(region.trailer() + 8);
        trailer.store(if writeback { UNUSED } else { 0 }, Ordering::Relaxed);
        Ok((file, bytes_u64))
    }

    /// Maps a record that the front end kept.
    pub fn open(file: File, bytes: u64, offset: u64, queues: u16, size: u16) -> Result<Self, InflightError> {
        check_shape(queues, size)?;
        let needed = queues_bytes(queues, size);
        let end = offset.checked_add(bytes);
        let covered = end.is_some_and(|end| file.metadata().is_ok_and(|file| file.is_file() && file.len() >= end));
        let length = usize::try_from(bytes).ok().filter(|length| covered && *length >= needed);
        let length = length.ok_or(InflightError::Size { actual: bytes, needed })?;
        let has_room = length >= needed + TRAILER_BYTES;
        let mut region = Self::map(file, length, offset, queues, size, has_room)?;
        region.has_trailer = has_room && region.find_trailer();
        Ok(region)
    }

    /// Returns whether the record has a trailer. One for more queues than the front end has, or for larger ones, was made with its
    /// trailer at the end. That is copied to where the queues end: programs that never made such a record look there.
    fn find_trailer(&self) -> bool {
        let is_at = |trailer| self.at::<AtomicU64>(trailer).load(Ordering::Relaxed) == TRAILER_MAGIC;
        let (here, end) = (self.trailer(), self.mapping.size() - TRAILER_BYTES);
        if !is_at(here) && end.is_multiple_of(ALIGNMENT) && is_at(end) {
            let writeback = self.at::<AtomicU8>(end + 8).load(Ordering::Relaxed);
            self.at::<AtomicU8>(here + 8).store(writeback, Ordering::Relaxed);
            self.at::<AtomicU64>(here).store(TRAILER_MAGIC, Ordering::Release);
        }
        is_at(here)
    }

    /// Returns the record, for a program that maps it as well. Its file is what `pass` returns for it.
    pub fn pass<G>(&self, pass: &mut Pass<'_, G>) -> io::Result<InflightRecord<G>> {
        let file = self.mapping.file_offset().expect("a record is a mapped file");
        let bytes = self.mapping.size() as u64;
        let (queues, queue_size) = (self.queues, self.size);
        Ok(InflightRecord { file: pass(file.file().as_fd())?, file_offset: file.start(), bytes, queues, queue_size })
    }

    fn map(
        file: File,
        bytes: usize,
        offset: u64,
        queues: u16,
        size: u16,
        has_trailer: bool,
    ) -> Result<Self, InflightError> {
        let mapping = MmapRegion::from_file(FileOffset::new(file, offset), bytes);
        let mapping = mapping.map_err(|error| InflightError::Map(std::io::Error::other(error)))?;
        // SAFETY: the range is the mapping's; the advice changes nothing of what it holds.
        unsafe { undumped::leave_out(mapping.as_ptr().cast(), mapping.size()) };
        Ok(InflightRegion { mapping, queues, size, has_trailer })
    }

    /// Returns whether the guest had its write cache on when the record was last in use. Returns `None` if the record
    /// does not say.
    pub fn writeback(&self) -> Option<bool> {
        let writeback = self.has_trailer.then(|| self.at::<AtomicU8>(self.trailer() + 8).load(Ordering::Relaxed));
        writeback.filter(|writeback| *writeback != UNUSED).map(|writeback| writeback != 0)
    }

    pub fn set_writeback(&self, writeback: bool) {
        if self.has_trailer {
            self.at::<AtomicU8>(self.trailer() + 8).store(u8::from(writeback), Ordering::Relaxed);
        }
    }

    /// Returns whether there is a record of queue `number`.
    pub fn has(&self, number: usize) -> bool {
        number < usize::from(self.queues)
    }

    fn trailer(&self) -> usize {
        queues_bytes(self.queues, self.size)
    }

    fn at<T: AtomicInteger>(&self, offset: usize) -> &T {
        // Offsets are constants and checked indices within the mapping, which is page-aligned.
        self.mapping.get_atomic_ref(offset).expect("the record covers its own layout")
    }
}

/// The part of the record that belongs to one queue.
pub(crate) struct InflightQueue {
    region: Arc<InflightRegion>,
    base: usize,
    size: u16,
    counter: u64,
}

impl InflightQueue {
    pub fn set_writeback(&self, writeback: bool) {
        self.region.set_writeback(writeback);
    }

    /// Returns the record of queue `index`, or `None` if the front end's record has no such queue.
    pub fn new(region: Arc<InflightRegion>, index: u16) -> Option<Self> {
        let base = usize::from(index) * queue_bytes(region.size);
        let size = region.size;
        (index < region.queues).then_some(InflightQueue { region, base, size, counter: 0 })
    }

    /// Returns whether no back end has used the record yet.
    pub fn is_unused(&self) -> bool {
        self.version().load(Ordering::Relaxed) == 0
    }

    /// Prepares the record for a ring of `ring_size` entries whose used index is `used`. Returns the heads that are in
    /// flight, in the order of their arrival.
    pub fn recover(&mut self, used: u16, ring_size: u16) -> Result<Vec<u16>, InflightError> {
        // The size of a ring is up to the guest. Marks beyond a smaller record would be in that of another queue.
        if ring_size > self.size {
            return Err(InflightError::Ring { record: self.size, ring: ring_size });
        }
        let version = self.version().load(Ordering::Relaxed);
        let descriptors = self.descriptor_count().load(Ordering::Relaxed);
        let features = self.region.at::<AtomicU64>(self.base).load(Ordering::Relaxed);
        if self.is_unused() {
            self.set(self.descriptor_count(), self.size, Ordering::Relaxed);
            self.set(self.used_index(), used, Ordering::Relaxed);
            self.set(self.version(), VERSION, Ordering::Release);
            return Ok(Vec::new());
        }
        if version != VERSION || features != 0 || descriptors != self.size {
            return Err(InflightError::Layout { version, features, descriptors });
        }
        self.finish_last_batch(used);

        let mut heads: Vec<(u64, u16)> = (0..ring_size)
            .filter(|head| self.mark_of(*head).load(Ordering::Relaxed) != 0)
            .map(|head| (self.counter_of(head).load(Ordering::Relaxed), head))
            .collect();
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(heads.into_iter().map(|(_, head)| head).collect())
    }

    /// Removes the remaining marks of the last batch if the guest saw that batch completed, but the back end died
    /// before it had removed all of them.
    fn finish_last_batch(&self, used: u16) {
        let count = used.wrapping_sub(self.used_index().load(Ordering::Relaxed)).min(self.size);
        let mut head = self.last_batch_head().load(Ordering::Relaxed);
        for _ in 0..count {
            if head >= self.size {
                break;
            }
            self.set(self.mark_of(head), 0, Ordering::Relaxed);
            head = self.next_of(head).load(Ordering::Relaxed);
        }
        self.set(self.used_index(), used, Ordering::Release);
    }

    /// Marks `head` as in flight, ordered after all heads already marked.
    pub fn mark(&mut self, head: u16) {
        self.set(self.counter_of(head), self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.set(self.mark_of(head), 1, Ordering::Release);
    }

    /// Links the heads of `batch` in the record, as the last batch, before the used index moves past it.
    pub fn begin_publish(&self, batch: &[u16]) {
        for head in batch {
            let last = self.last_batch_head().load(Ordering::Relaxed);
            self.set(self.next_of(*head), last, Ordering::Relaxed);
            self.set(self.last_batch_head(), *head, Ordering::Release);
        }
    }

    /// Removes the marks of `batch` after the used index moved past it, to `used`.
    pub fn end_publish(&self, batch: &[u16], used: u16) {
        for head in batch {
            self.set(self.mark_of(*head), 0, Ordering::Release);
            remoca_io::narrow::passes("publish-half-cleared");
        }
        self.set(self.used_index(), used, Ordering::Release);
    }

    /// Stores `value` in `word`. The process may be killed after each of these stores.
    fn set<T: AtomicInteger>(&self, word: &T, value: T::V, order: Ordering) {
        word.store(value, order);
        #[cfg(test)]
        tests::note_store(&self.region);
    }

    fn version(&self) -> &AtomicU16 {
        self.region.at(self.base + 8)
    }

    fn descriptor_count(&self) -> &AtomicU16 {
        self.region.at(self.base + 10)
    }

    fn last_batch_head(&self) -> &AtomicU16 {
        self.region.at(self.base + 12)
    }

    fn used_index(&self) -> &AtomicU16 {
        self.region.at(self.base + 14)
    }

    fn mark_of(&self, head: u16) -> &AtomicU8 {
        self.region.at(self.state(head))
    }

    fn next_of(&self, head: u16) -> &AtomicU16 {
        self.region.at(self.state(head) + 6)
    }

    fn counter_of(&self, head: u16) -> &AtomicU64 {
        self.region.at(self.state(head) + 8)
    }

    fn state(&self, head: u16) -> usize {
        debug_assert!(head < self.size, "heads are checked against the ring, which fits the record");
        self.base + HEADER_BYTES + usize::from(head) * STATE_BYTES
    }
}

fn check_shape(queues: u16, size: u16) -> Result<(), InflightError> {
    match (1..=QUEUE_COUNT_MAX).contains(&queues) && (1..=QUEUE_SIZE_MAX).contains(&size) {
        true => Ok(()),
        false => Err(InflightError::Shape { queues, size }),
    }
}

fn queue_bytes(size: u16) -> usize {
    (HEADER_BYTES + usize::from(size) * STATE_BYTES).next_multiple_of(ALIGNMENT)
}

fn queues_bytes(queues: u16, size: u16) -> usize {
    usize::from(queues) * queue_bytes(size)
}

fn from_errno(errno: rustix::io::Errno) -> InflightError {
    InflightError::Map(errno.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::os::unix::fs::FileExt;

    const SIZE: u16 = 8;
    const NONE: [u16; 0] = [];

    fn record() -> (File, u64) {
        InflightRegion::create(2, SIZE, true).unwrap()
    }

    fn open(file: &File, bytes: u64) -> Arc<InflightRegion> {
        Arc::new(InflightRegion::open(file.try_clone().unwrap(), bytes, 0, 2, SIZE).unwrap())
    }

    fn queue(file: &File, bytes: u64) -> InflightQueue {
        InflightQueue::new(open(file, bytes), 1).unwrap()
    }

    thread_local! {
        /// The record after each store of this thread's test, while a test collects them.
        static LEFT: RefCell<Option<Vec<Vec<u8>>>> = const { RefCell::new(None) };
    }

    /// Saves the record as a process that is killed now would leave it.
    pub(super) fn note_store(region: &InflightRegion) {
        LEFT.with_borrow_mut(|left| {
            if let Some(left) = left {
                let byte = |at| region.at::<AtomicU8>(at).load(Ordering::Relaxed);
                left.push((0..region.mapping.size()).map(byte).collect());
            }
        });
    }

    /// Returns the records that a successor may find if the process is killed during `change`, the finished one last.
    fn left_by(change: impl FnOnce()) -> Vec<Vec<u8>> {
        LEFT.set(Some(Vec::new()));
        change();
        LEFT.take().unwrap()
    }

    /// Returns the heads that a successor considers in flight if it finds this record, and `used` in the guest's ring.
    /// The successor may be killed at any store, and another one may take its place.
    fn found_in(record: &[u8], used: u16) -> Vec<u16> {
        let recover = |record: &[u8]| {
            let file = File::from(memfd_create("record", MemfdFlags::CLOEXEC).unwrap());
            file.write_all_at(record, 0).unwrap();
            queue(&file, record.len() as u64).recover(used, SIZE).unwrap()
        };
        let mut found = Vec::new();
        for left in left_by(|| found = recover(record)) {
            assert_eq!(recover(&left), found, "a successor that was killed leaves something else");
        }
        found
    }

    /// Heads are taken, and completed in any order and number at a time.
    #[test]
    fn a_process_that_is_killed_between_any_two_stores_repeats_what_the_guest_has_not_seen() {
        for seed in 1..=3_u64 {
            let (file, bytes) = record();
            let mut used = u16::MAX - 20;
            let mut queue = queue(&file, bytes);
            assert_eq!(queue.recover(used, SIZE).unwrap(), NONE);
            let mut random = seed;
            let mut below = |end: usize| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                usize::try_from(random >> 33).unwrap() % end
            };
            let mut in_flight = Vec::new();
            for _ in 0..40 {
                let free: Vec<u16> = (0..SIZE).filter(|head| !in_flight.contains(head)).collect();
                if !free.is_empty() {
                    let head = free[below(free.len())];
                    let with_it = [&in_flight[..], &[head]].concat();
                    for left in left_by(|| queue.mark(head)) {
                        let found = found_in(&left, used);
                        assert!(found == in_flight || found == with_it, "{found:?}: {in_flight:?}, then {head}");
                    }
                    in_flight = with_it;
                }
                let mut batch = Vec::new();
                for _ in 0..below(in_flight.len() + 1) {
                    let head = in_flight[below(in_flight.len())];
                    if !batch.contains(&head) {
                        batch.push(head);
                    }
                }
                for left in left_by(|| queue.begin_publish(&batch)) {
                    assert_eq!(found_in(&left, used), in_flight, "the guest has not seen {batch:?}");
                }
                in_flight.retain(|head| !batch.contains(head));
                // From here on the guest sees it.
                used = used.wrapping_add(u16::try_from(batch.len()).unwrap());
                let begun = left_by(|| note_store(&queue.region));
                for left in begun.into_iter().chain(left_by(|| queue.end_publish(&batch, used))) {
                    assert_eq!(found_in(&left, used), in_flight, "the guest has seen {batch:?}");
                }
            }
        }
    }

    #[test]
    fn resubmits_in_order_of_arrival() {
        let (file, bytes) = record();
        let mut before = queue(&file, bytes);
        assert_eq!(before.recover(100, SIZE).unwrap(), NONE);
        for head in [5, 2, 7, 0] {
            before.mark(head);
        }
        before.begin_publish(&[2]);
        before.end_publish(&[2], 101);
        let mut after = queue(&file, bytes);
        assert_eq!(after.recover(101, SIZE).unwrap(), [5, 7, 0]);
        after.mark(1);
        assert_eq!(queue(&file, bytes).recover(101, SIZE).unwrap(), [5, 7, 0, 1], "counters go on");
    }

    #[test]
    fn a_batch_that_was_published_and_not_unmarked_is_not_resubmitted() {
        let (file, bytes) = record();
        let mut before = queue(&file, bytes);
        before.recover(65_534, SIZE).unwrap();
        for head in 0..6 {
            before.mark(head);
        }
        before.begin_publish(&[3]);
        before.end_publish(&[3], 65_535);
        // The used index wraps around with this batch, and then we die.
        before.begin_publish(&[4, 1, 0]);
        assert_eq!(queue(&file, bytes).recover(2, SIZE).unwrap(), [2, 5]);
        assert_eq!(queue(&file, bytes).recover(2, SIZE).unwrap(), [2, 5], "recovery can be repeated");
    }

    #[test]
    fn a_batch_that_was_not_published_is_resubmitted() {
        let (file, bytes) = record();
        let mut before = queue(&file, bytes);
        before.recover(0, SIZE).unwrap();
        before.mark(3);
        before.mark(4);
        before.begin_publish(&[4, 3]);
        assert_eq!(queue(&file, bytes).recover(0, SIZE).unwrap(), [3, 4]);
    }

    #[test]
    fn queues_do_not_share_marks() {
        let (file, bytes) = record();
        let region = open(&file, bytes);
        let mut first = InflightQueue::new(region.clone(), 0).unwrap();
        first.recover(0, SIZE).unwrap();
        first.mark(SIZE - 1);
        assert_eq!(queue(&file, bytes).recover(0, SIZE).unwrap(), NONE);
        assert_eq!(queue(&file, bytes).recover(0, SIZE).unwrap(), NONE);
        assert!(InflightQueue::new(region, 2).is_none());
    }

    #[test]
    fn garbage_is_refused_or_survived() {
        let (file, bytes) = record();
        let mut before = queue(&file, bytes);
        before.recover(0, SIZE).unwrap();
        before.mark(1);
        before.last_batch_head().store(60_000, Ordering::Relaxed);
        assert_eq!(queue(&file, bytes).recover(40_000, SIZE).unwrap(), [1]);
        before.version().store(2, Ordering::Relaxed);
        assert!(matches!(queue(&file, bytes).recover(0, SIZE), Err(InflightError::Layout { version: 2, .. })));
        let short = InflightRegion::open(file.try_clone().unwrap(), bytes + 4096, 0, 2, SIZE);
        assert!(matches!(short, Err(InflightError::Size { .. })), "a record longer than its file");
        let small = InflightRegion::open(file, 64, 0, 2, SIZE);
        assert!(matches!(small, Err(InflightError::Size { .. })), "a record shorter than its queues");
    }

    #[test]
    fn a_ring_that_is_larger_than_its_record_is_refused_before_and_after_the_record_is_used() {
        let (file, bytes) = record();
        for _ in 0..2 {
            let refused = queue(&file, bytes).recover(0, 2 * SIZE);
            assert!(matches!(refused, Err(InflightError::Ring { record: SIZE, ring: 16 })), "{refused:?}");
            assert_eq!(queue(&file, bytes).recover(0, SIZE).unwrap(), NONE);
        }
        assert_eq!(queue(&file, bytes).recover(0, SIZE / 2).unwrap(), NONE, "a smaller one is not");
    }

    #[test]
    fn remembers_the_write_cache() {
        let (file, bytes) = record();
        assert_eq!(open(&file, bytes).writeback(), None);
        open(&file, bytes).set_writeback(true);
        assert_eq!(open(&file, bytes).writeback(), Some(true));
        open(&file, bytes).set_writeback(false);
        assert_eq!(open(&file, bytes).writeback(), Some(false));
        // A record of another back end has no such bytes.
        assert_eq!(open(&file, bytes - 64).writeback(), None);
    }

    /// QEMU uses it as one for as many queues, of such a size, as it asked for.
    #[test]
    fn a_record_that_is_larger_than_its_front_end_says_remembers_all_the_same() {
        let (file, bytes) = InflightRegion::create(64, 1024, false).unwrap();
        assert_eq!(open(&file, bytes).writeback(), Some(false), "as it was made");
        let mut before = queue(&file, bytes);
        before.recover(0, SIZE).unwrap();
        before.mark(SIZE - 1);
        before.set_writeback(true);
        assert_eq!(open(&file, bytes).writeback(), Some(true));
        assert_eq!(queue(&file, bytes).recover(0, SIZE).unwrap(), [SIZE - 1]);
        // A former program of this one sees no more of it than this.
        let of_queues = queues_bytes(2, SIZE) as u64;
        assert_eq!(open(&file, of_queues + 64).writeback(), Some(true));
    }
}
