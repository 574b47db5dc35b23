//! The log of pages that this back end writes, for a front end that migrates its VM (VHOST_F_LOG_ALL, LOG_SHMFD).
//!
//! The log is a bitmap in shared memory, one bit for each 4 KiB of guest memory, which the front end reads and clears while
//! the guest runs. Every region of guest memory has a [`RegionLog`] as its bitmap, so whatever is written through
//! `GuestMemory` is logged: data, status bytes and used rings alike, by the request that was in flight when logging was
//! switched on as well as by the next.
//!
//! 1. A page is marked after it was written, so a front end that cleared the mark earlier sees it again.
//! 2. Pages beyond the end of the log are not marked. Nothing outside the mapping is touched, whatever the front end
//!    said.

use remoca_io::handover::Pass;
use remoca_protocol::guests::PageLog;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use vm_memory::bitmap::{Bitmap, BitmapSlice, NewBitmap, WithBitmapSlice};
use vm_memory::mmap::MmapRegion;
use vm_memory::{FileOffset, VolatileMemory};

/// Bytes of guest memory that one bit stands for.
const LOG_PAGE_BYTES: u64 = 4096;

/// Why a log is refused.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("a log of {bytes} bytes at {offset} is not within its file")]
    Size { bytes: u64, offset: u64 },
    #[error("cannot map the log")]
    Map(#[source] std::io::Error),
}

/// A mapped log.
#[derive(Debug)]
pub(crate) struct DirtyLog {
    mapping: MmapRegion<()>,
}

impl DirtyLog {
    pub fn open(file: File, bytes: u64, offset: u64) -> Result<Self, LogError> {
        let end = offset.checked_add(bytes);
        let covered = end.is_some_and(|end| file.metadata().is_ok_and(|file| file.is_file() && file.len() >= end));
        let size = usize::try_from(bytes).ok().filter(|size| covered && *size > 0);
        let size = size.ok_or(LogError::Size { bytes, offset })?;
        let mapping = MmapRegion::from_file(FileOffset::new(file, offset), size);
        Ok(Self { mapping: mapping.map_err(|error| LogError::Map(std::io::Error::other(error)))? })
    }

    fn mark(&self, address: u64, length: u64) {
        let Some(last) = length.checked_sub(1).map(|rest| address.saturating_add(rest)) else { return };
        for page in address / LOG_PAGE_BYTES..=last / LOG_PAGE_BYTES {
            let byte = usize::try_from(page / 8).ok().filter(|byte| *byte < self.mapping.size());
            let Some(byte) = byte.and_then(|byte| self.mapping.get_atomic_ref::<AtomicU8>(byte).ok()) else { return };
            // Release: a reader that sees the mark also sees the written data.
            byte.fetch_or(1 << (page % 8), Ordering::Release);
        }
    }
}

/// Whether and where one device logs what it writes.
#[derive(Debug, Default)]
pub(crate) struct LogSwitch {
    /// Whether logging is on and there is a log. A write looks at nothing else while the VM is not migrating.
    on: AtomicBool,
    /// The I/O thread locks it for each write while the VM migrates. Nobody holds it for longer than it takes to change it.
    state: Mutex<LogState>,
}

#[derive(Debug, Default)]
struct LogState {
    wanted: bool,
    log: Option<DirtyLog>,
}

impl LogSwitch {
    pub fn set_wanted(&self, wanted: bool) {
        self.change(|state| state.wanted = wanted);
    }

    pub fn set_log(&self, log: DirtyLog) {
        self.change(|state| state.log = Some(log));
    }

    /// Returns the log, for a program that maps it as well, or `None` if there is none. Its file is what `pass` returns
    /// for it.
    pub fn pass<G>(&self, pass: &mut Pass<'_, G>) -> io::Result<Option<PageLog<G>>> {
        let (file, bytes) = {
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(DirtyLog { mapping }) = &state.log else { return Ok(None) };
            (mapping.file_offset().expect("a log is a mapped file").clone(), mapping.size() as u64)
        };
        // Without the lock: `pass` may wait for the service manager, and the I/O thread marks pages meanwhile.
        Ok(Some(PageLog { file: pass(file.file().as_fd())?, file_offset: file.start(), bytes }))
    }

    /// Forgets the log after the front end has disconnected.
    pub fn reset(&self) {
        self.change(|state| *state = LogState::default());
    }

    fn change(&self, change: impl FnOnce(&mut LogState)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state);
        self.on.store(state.wanted && state.log.is_some(), Ordering::Relaxed);
    }

    /// Marks `length` bytes at the guest's `address` as written.
    pub fn mark(&self, address: u64, length: u64) {
        if !self.on.load(Ordering::Relaxed) {
            return;
        }
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(log) = &state.log {
            log.mark(address, length);
        }
    }
}

/// The bitmap of one region of guest memory, which starts at guest address `start`.
#[derive(Debug, Default)]
pub(crate) struct RegionLog {
    switch: Arc<LogSwitch>,
    start: u64,
}

impl RegionLog {
    pub fn new(switch: Arc<LogSwitch>, start: u64) -> Self {
        Self { switch, start }
    }
}

/// A part of a region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartLog<'a> {
    switch: &'a LogSwitch,
    start: u64,
}

impl<'a> WithBitmapSlice<'a> for RegionLog {
    type S = PartLog<'a>;
}

impl Bitmap for RegionLog {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.slice_at(offset).mark_dirty(0, len);
    }

    fn dirty_at(&self, _offset: usize) -> bool {
        // Only the front end reads the log.
        false
    }

    fn slice_at(&self, offset: usize) -> PartLog<'_> {
        PartLog { switch: &self.switch, start: self.start + offset as u64 }
    }
}

/// Memory without a front end logs nothing.
impl NewBitmap for RegionLog {
    fn with_len(_len: usize) -> Self {
        Self::default()
    }
}

impl WithBitmapSlice<'_> for PartLog<'_> {
    type S = Self;
}

impl BitmapSlice for PartLog<'_> {}

impl Bitmap for PartLog<'_> {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.switch.mark(self.start + offset as u64, len as u64);
    }

    fn dirty_at(&self, _offset: usize) -> bool {
        false
    }

    fn slice_at(&self, offset: usize) -> Self {
        PartLog { switch: self.switch, start: self.start + offset as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::unix::fs::FileExt;

    fn file(bytes: u64) -> File {
        let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, bytes).unwrap();
        file
    }

    fn content(file: &File, bytes: usize) -> Vec<u8> {
        let mut content = vec![0; bytes];
        file.read_exact_at(&mut content, 0).unwrap();
        content
    }

    #[test]
    fn pages_are_marked_bit_by_bit_and_only_within_the_log() {
        let file = file(4096);
        let switch = LogSwitch::default();
        switch.mark(0, 4096);
        switch.set_log(DirtyLog::open(file.try_clone().unwrap(), 2, 0).unwrap());
        switch.mark(0, 4096);
        assert_eq!(content(&file, 2), [0, 0], "switched off");
        switch.set_wanted(true);
        switch.mark(4095, 2);
        switch.mark(7 * 4096, 4096);
        switch.mark(9 * 4096, 0);
        assert_eq!(content(&file, 2), [0b1000_0011, 0]);
        switch.mark(15 * 4096 + 5, u64::MAX);
        switch.mark(u64::MAX, 1);
        assert_eq!(content(&file, 4), [0b1000_0011, 0b1000_0000, 0, 0], "the log has two bytes");
        let part = RegionLog::new(Arc::new(switch), 8 * 4096);
        part.slice_at(4096).slice_at(4095).mark_dirty(1, 1);
        assert_eq!(content(&file, 2), [0b1000_0011, 0b1000_0100]);
        part.switch.reset();
        part.mark_dirty(0, 1);
        assert_eq!(content(&file, 2), [0b1000_0011, 0b1000_0100], "the front end is gone");
    }

    /// Whoever takes the file may wait, for the service manager, say.
    #[test]
    fn pages_are_marked_while_the_log_is_passed_on() {
        let file = file(4096);
        let switch = LogSwitch::default();
        switch.set_log(DirtyLog::open(file.try_clone().unwrap(), 1, 0).unwrap());
        switch.set_wanted(true);
        let passed = switch.pass(&mut |_| {
            switch.mark(0, 1);
            Ok(content(&file, 1))
        });
        assert_eq!(passed.unwrap().unwrap().file, [1]);
    }

    #[test]
    fn a_log_that_its_file_does_not_cover_is_refused() {
        for (bytes, offset) in [(4097, 0), (1, 4096), (0, 0), (u64::MAX, 1), (4096, 4096)] {
            assert!(
                matches!(DirtyLog::open(file(4096), bytes, offset), Err(LogError::Size { .. })),
                "{bytes} {offset}"
            );
        }
        assert!(matches!(DirtyLog::open(file(8192), 10, 1), Err(LogError::Map(_))), "an odd offset cannot be mapped");
    }
}
