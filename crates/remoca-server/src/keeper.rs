//! Mapped pools that outlive this process: the service manager keeps their memory, and a record beside each.
//!
//! Called on threads that may wait for the manager, and once at the start. A pool is kept by two descriptors: its memory, and
//! a file in memory with its record (`remoca_protocol::kept_pool`), which this process rewrites in place. A successor believes
//! a record only as a whole, and a file only if its seals and size are right; everything else it removes.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use remoca_io::descriptor_store::{DescriptorStore, Kind};
use remoca_protocol::kept_pool::{KeptPool, RECORD_BYTES};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::config::PageLocking;
use crate::memfile::PoolFile;

/// The way to the service manager, which may keep nothing.
#[derive(Clone, Default)]
pub(crate) struct Keeper {
    /// `None` if no pool is to outlive the server.
    store: Option<Arc<DescriptorStore>>,
    /// Held while the manager is waited for, so that one helper thread waits at most.
    busy: Arc<Mutex<()>>,
}

/// A pool that the manager keeps. Dropping it leaves the pool there, for a successor.
pub(crate) struct Kept {
    store: Arc<DescriptorStore>,
    /// Numbers of the two descriptors.
    record_number: u32,
    memory_number: u32,
    /// Held from when the values of a record are read until they are written: two threads write it.
    record: Mutex<File>,
}

/// A pool that a former server of this unit left.
pub(crate) struct Left {
    pub(crate) record: KeptPool,
    pub(crate) memory: PoolFile,
    pub(crate) kept: Kept,
}

impl Keeper {
    pub(crate) fn new(store: Option<DescriptorStore>) -> Self {
        Self { store: store.map(Arc::new), busy: Arc::default() }
    }

    /// Returns whether there is a manager that keeps descriptors.
    pub(crate) fn is_on(&self) -> bool {
        self.store.as_ref().is_some_and(|store| store.is_on())
    }

    /// Gives the memory of a pool to the manager, with a record that says it all. Waits for the manager.
    ///
    /// # Errors
    /// `WouldBlock` if another pool is being kept. Another one if the manager has no room, or does not confirm in time; it keeps
    /// neither part then.
    pub(crate) fn keep(&self, memory: &PoolFile, mut record: KeptPool) -> io::Result<Kept> {
        let store = self.store.as_ref().ok_or_else(|| io::Error::other("there is none"))?;
        let Ok(_waiting) = self.busy.try_lock() else { return Err(io::ErrorKind::WouldBlock.into()) };
        let file = memfd_create("remoca-pool-record", MemfdFlags::CLOEXEC)?;
        record.descriptor = store.put(memory.as_fd(), Kind::Other)?;
        let kept = keep_record(store, file, &record).inspect_err(|_| store.release(record.descriptor))?;
        match store.confirm() {
            Ok(()) => Ok(kept),
            Err(error) => {
                kept.release();
                Err(error)
            }
        }
    }

    /// Returns the pools that a former server of this unit left, as far as they can be believed. Removes everything else from
    /// the manager.
    pub(crate) fn receive(&self, locking: PageLocking) -> Vec<Left> {
        let Some(store) = &self.store else { return Vec::new() };
        let mut left = Vec::new();
        let (mut tokens, mut files) = (HashSet::new(), HashSet::new());
        for number in store.ledgers() {
            match receive_one(store, number, locking) {
                Ok(pool) if !tokens.contains(&pool.record.token) && !files.contains(&pool.record.descriptor) => {
                    tokens.insert(pool.record.token);
                    files.insert(pool.record.descriptor);
                    store.hold(number);
                    store.hold(pool.record.descriptor);
                    left.push(pool);
                }
                Ok(pool) => tracing::warn!(token = ?pool.record.token, "a second record of a pool is not believed"),
                Err(error) => tracing::warn!(%error, "a pool that a former server left cannot be used"),
            }
        }
        store.close_unused();
        left
    }
}

fn keep_record(store: &Arc<DescriptorStore>, file: OwnedFd, record: &KeptPool) -> io::Result<Kept> {
    let file = File::from(file);
    file.write_all_at(&record.encode(), 0)?;
    let record_number = store.put(file.as_fd(), Kind::Ledger)?;
    Ok(Kept { store: Arc::clone(store), record_number, memory_number: record.descriptor, record: Mutex::new(file) })
}

fn receive_one(store: &Arc<DescriptorStore>, number: u32, locking: PageLocking) -> io::Result<Left> {
    let gone = || io::Error::other("the service manager has lost a part of it");
    let file = File::from(store.copy(number).ok_or_else(gone)?);
    let mut bytes = [0; RECORD_BYTES];
    file.read_exact_at(&mut bytes, 0)?;
    let record = KeptPool::decode(&bytes).map_err(io::Error::other)?;
    let memory = PoolFile::adopt(store.copy(record.descriptor).ok_or_else(gone)?, locking)?;
    let kept = Kept {
        store: Arc::clone(store),
        record_number: number,
        memory_number: record.descriptor,
        record: Mutex::new(file),
    };
    Ok(Left { record, memory, kept })
}

impl Kept {
    /// Rewrites the record, with one system call, by what `record` returns. It needs no descriptor. If `record` returns `None`, the
    /// pool has ended.
    pub(crate) fn note(&self, record: impl FnOnce() -> Option<KeptPool>) {
        let file = self.file();
        let Some(record) = record() else { return };
        let record = KeptPool { descriptor: self.memory_number, ..record };
        if let Err(error) = file.write_all_at(&record.encode(), 0) {
            tracing::warn!(%error, "the record of a pool cannot be written");
        }
    }

    /// Empties the record, so that no successor believes it.
    pub(crate) fn void(&self) {
        let _emptied = self.file().set_len(0);
    }

    fn file(&self) -> MutexGuard<'_, File> {
        // A thread that panicked has written all of it, or nothing.
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the pool from the manager: nobody comes back for it. May wait for the manager.
    pub(crate) fn release(&self) {
        // First, in case the manager does not receive the message.
        self.void();
        self.store.release(self.record_number);
        self.store.release(self.memory_number);
    }
}
