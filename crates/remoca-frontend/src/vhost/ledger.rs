//! Ledger file of a connection: a memfd that outlives its process in the store of the service manager. Its layout is in
//! [`remoca_protocol::ledger`].
//!
//! The process may be killed between any two stores. A successor finds the entry before a change or the one after it, or
//! that a message is under way, and then it closes the connection.

use remoca_protocol::ledger::{Entry, FAILURES_AT, LENGTH_AT, SINCE_AT, STATE_AT, TEXT_AT, TEXT_BYTES_MAX, WHOLE};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// State of a ledger within a message.
const BEGUN: u64 = 0;

pub(super) struct Ledger(File);

impl Ledger {
    /// Creates a ledger that says that a message is under way.
    pub fn create() -> io::Result<Self> {
        let ledger = Self(memfd_create("remoca-ledger", MemfdFlags::CLOEXEC)?.into());
        ledger.set(FAILURES_AT, 0)?;
        ledger.set(SINCE_AT, 0)?;
        ledger.begin()?;
        Ok(ledger)
    }

    /// Returns the ledger that a former process left in `file`.
    pub fn of(file: OwnedFd) -> Self {
        Self(file.into())
    }

    /// Notes that the front end may have begun a message.
    pub fn begin(&self) -> io::Result<()> {
        self.set(STATE_AT, BEGUN)
    }

    /// Notes that no message is under way, and the entry is right.
    pub fn end(&self) -> io::Result<()> {
        self.set(STATE_AT, WHOLE)
    }

    /// Replaces the entry by `text`. A message must be under way.
    pub fn write(&self, text: &[u8]) -> io::Result<()> {
        let length = u64::try_from(text.len()).map_err(io::Error::other)?;
        if length > TEXT_BYTES_MAX {
            return Err(io::Error::other("the description of the connection is too long"));
        }
        // In two stores: a test stops between them.
        let (first, second) = text.split_at(text.len() / 2);
        self.store(first, TEXT_AT)?;
        self.store(second, TEXT_AT + first.len() as u64)?;
        self.set(LENGTH_AT, length)
    }

    /// Returns the entry and its text, or the reason why there is none.
    pub fn read(&self) -> io::Result<(Entry, Vec<u8>)> {
        if self.get(STATE_AT)? != WHOLE {
            return Err(io::Error::other("its hypervisor was within a message"));
        }
        let length = usize::try_from(self.get(LENGTH_AT)?.min(TEXT_BYTES_MAX)).map_err(io::Error::other)?;
        let mut text = vec![0; length];
        self.0.read_exact_at(&mut text, TEXT_AT)?;
        Ok((Entry::parse(&text).map_err(io::Error::other)?, text))
    }

    /// Notes that a process has started, at `now` of the boot clock. Returns the start of the first one that has not served
    /// the front end since.
    pub fn note_start(&self, now: u64) -> io::Result<u64> {
        match self.get(SINCE_AT)? {
            0 => self.set(SINCE_AT, now).map(|()| now),
            since => Ok(since),
        }
    }

    /// Notes a failed start. Returns how many there were since the front end was served.
    pub fn note_failure(&self) -> io::Result<u64> {
        let failures = self.get(FAILURES_AT)?.saturating_add(1);
        self.set(FAILURES_AT, failures)?;
        Ok(failures)
    }

    /// Notes that the front end is served.
    pub fn note_served(&self) -> io::Result<()> {
        self.set(FAILURES_AT, 0)?;
        self.set(SINCE_AT, 0)
    }

    fn get(&self, at: u64) -> io::Result<u64> {
        let mut word = [0; 8];
        self.0.read_exact_at(&mut word, at)?;
        Ok(u64::from_le_bytes(word))
    }

    fn set(&self, at: u64, value: u64) -> io::Result<()> {
        self.store(&value.to_le_bytes(), at)
    }

    /// Stores `bytes`. The process may be killed after each store.
    fn store(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, at)?;
        #[cfg(test)]
        tests::note_store(&self.0);
        Ok(())
    }
}

impl AsFd for Ledger {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_protocol::guests::{FrontEnd, Queue};
    use std::cell::RefCell;

    thread_local! {
        /// The file after each store of this thread's test, while a test collects them.
        static LEFT: RefCell<Option<Vec<Vec<u8>>>> = const { RefCell::new(None) };
    }

    pub(super) fn note_store(file: &File) {
        LEFT.with_borrow_mut(|left| {
            if let Some(left) = left {
                let mut bytes = [0; 1 << 16];
                let count = file.read_at(&mut bytes, 0).unwrap();
                left.push(bytes[..count].to_vec());
            }
        });
    }

    fn left_by(change: impl FnOnce()) -> Vec<Vec<u8>> {
        LEFT.set(Some(Vec::new()));
        change();
        LEFT.take().unwrap()
    }

    fn found_in(bytes: &[u8]) -> Option<Entry> {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        Some(Ledger::of(file.into()).read().ok()?.0)
    }

    fn entry(queues: u32) -> Entry {
        let queue = |number| Queue {
            size: 8,
            addresses: None,
            base: 0,
            kick: Some(number),
            call: None,
            error: None,
            enabled: true,
        };
        let front_end = FrontEnd {
            socket: 1,
            features: None,
            protocol_features: None,
            offered: None,
            memory: Vec::new(),
            record: None,
            log: None,
            channel: None,
            told_bytes: None,
            queues: (0..queues).map(queue).collect(),
        };
        Entry { version: 1, device: "root".into(), write_cache: true, front_end }
    }

    #[test]
    fn a_process_that_is_killed_between_any_two_stores_leaves_a_whole_entry_or_none() {
        let ledger = Ledger::create().unwrap();
        let mut before = None;
        for queues in [3, 1, 0, 40, 40, 2] {
            let after = entry(queues);
            let message = || {
                ledger.begin().unwrap();
                ledger.write(&after.encode().unwrap()).unwrap();
                ledger.end().unwrap();
            };
            let left = left_by(message);
            assert!(left.len() > 4);
            let (last, within) = left.split_last().unwrap();
            within.iter().for_each(|bytes| assert_eq!(found_in(bytes), None, "a message is under way"));
            assert_eq!(found_in(last), Some(after.clone()));
            // Times and counts are no part of the entry.
            for bytes in left_by(|| {
                ledger.note_start(5).unwrap();
                ledger.note_failure().unwrap();
                ledger.note_served().unwrap();
            }) {
                assert_eq!(found_in(&bytes), Some(after.clone()));
            }
            assert_ne!(before.replace(after.clone()), Some(entry(7)));
        }
    }

    #[test]
    fn starts_count_until_the_front_end_is_served() {
        let ledger = Ledger::create().unwrap();
        assert_eq!((ledger.note_start(7).unwrap(), ledger.note_start(9).unwrap()), (7, 7));
        assert_eq!((ledger.note_failure().unwrap(), ledger.note_failure().unwrap()), (1, 2));
        ledger.note_served().unwrap();
        assert_eq!((ledger.note_start(11).unwrap(), ledger.note_failure().unwrap()), (11, 1));
    }

    #[test]
    fn a_file_that_is_no_ledger_has_no_entry() {
        for bytes in [&[][..], &[0; 32], b"RMLEDGER", &[WHOLE.to_le_bytes(), [0xff; 8], [0; 8], [0xff; 8]].concat()] {
            assert_eq!(found_in(bytes), None);
        }
    }
}
