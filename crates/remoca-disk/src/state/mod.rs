//! The state file: what outlives this process, so that the next one finds its cache warm.
//!
//! ```text
//! header (`header.rs`): key, roster of servers, a record of each disk number's image  |  the words of the index
//! ```
//! Mapped and shared, in a file system in memory (`/run`): a kill loses nothing, a reboot everything. Owned by the driver;
//! locked by its process for as long as it lives. A file that is to replace another one is made beside it and renamed.
//! 1. The file is valid only while everything in it is true: before a block is written, its entry in the index is void
//!    (the engine), and the image's record says that writes are in flight ([`StateFile::note_writes`]).
//! 2. A process that cannot use the file removes it, so that no later process finds it out of date.
//! 3. An upgrade hands the locked file over. Only then is it certain that nothing was written to the disks since.
//!
//! Decision 0020.

mod curves;
mod deaths;
mod file;
mod former;
#[cfg(feature = "testing")]
pub(crate) mod fuzz;
mod header;
mod image;
mod numbers;

pub use curves::{UnusableCurves, curves_beside, keep_curves, resume_curves};
pub use deaths::{Caution, Deaths};
pub use file::{StateError, check_place};
pub use former::{FailedFlush, Former, FormerSettings, Remains, discard, look, set_aside, settings_at};
pub use header::{Clock, DiskRecord, Header, NUMBER_MAX, OptionHashes, RosterEntry, Settings};
pub use image::{Doubt, LOOK_NS, NotYet, SETTLE_NS, judge, settled_ns};
pub use numbers::DiskIdentity;

use file::{beside, check_ours, check_room, is_at, not_ours, open_file, open_locked, remove_beside};
use remoca_core::engine::{DiskEngine, EngineConfig, layout};
use remoca_core::index::Origin;
use remoca_core::units::DiskIndex;
use remoca_io::lock::lock_whole;
use remoca_io::narrow;
use remoca_io::sizes;
use remoca_io::words::{IndexMemory, check_available};
use rustix::fs::FallocateFlags;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A state file in use.
pub struct StateFile {
    path: PathBuf,
    /// Holds the lock.
    file: File,
    header: Arc<Header>,
    disks: u16,
    words: u64,
    /// Whether it is at its path, not beside it.
    is_in_place: bool,
}

impl Drop for StateFile {
    fn drop(&mut self) {
        self.make_room_beside();
    }
}

/// The outcome of a start: an engine, and how warm it is.
pub struct EngineStart {
    pub engine: DiskEngine<IndexMemory>,
    /// `None`: nothing outlives this process.
    pub state: Option<StateFile>,
    /// Why nothing was found; `None` if the engine is warm.
    pub cold_reason: Option<String>,
    /// What is left of a previous process, whether its index is resumed or not.
    pub former: Former,
    /// Whether the engine is that of the previous program of this process, as it was when that program handed over.
    pub is_handed_over: bool,
}

/// What ran before this program.
pub enum Before {
    /// A process that has ended, or none.
    Another,
    /// A previous program of this very process, with its locked state file if it had one. Its VM keeps running,
    /// whatever became of the file.
    ThisProcess(Option<OwnedFd>),
}

impl StateFile {
    /// Starts an engine with its index in the state file at `path`. Resumes the index and key that a previous process
    /// left there if they are usable; otherwise creates a new index. Falls back to an index without a state file if the
    /// file cannot be opened or created. The caller must check that the images are unchanged.
    ///
    /// # Errors
    /// If another process uses the file, or it is not a private regular file of this user; neither applies when a
    /// running VM continues. If there is no memory for the index. If a new file cannot be renamed into place.
    pub fn start(path: &Path, config: &EngineConfig, before: Before) -> Result<EngineStart, StateError> {
        let must_go_on = matches!(before, Before::ThisProcess(_));
        let handed_over = match before {
            Before::ThisProcess(Some(fd)) => {
                Some(File::from(fd)).filter(|file| is_at(file, path) && lock_whole(file).is_ok())
            }
            Before::ThisProcess(None) | Before::Another => None,
        };
        let is_handed_over = handed_over.is_some();
        let file = match handed_over.map_or_else(|| open_locked(path), Ok) {
            Ok(file) => file,
            Err(error @ (StateError::InUse(_) | StateError::NotOurs(..))) if !must_go_on => return Err(error),
            Err(error) => return Self::without(path, config, &error, Former::default()),
        };
        let former = Former::of(&file);
        // The previous process may have ended while its index moved.
        let _ = remove_beside(path);
        let (file, cold_reason) = match Self::resume(path, file, config) {
            Ok(start) => return Ok(EngineStart { former, is_handed_over, ..start }),
            Err(unusable) => unusable,
        };
        let create = || Self::create(path, config.disks, layout(config).words());
        let created = create().or_else(|error| {
            // The worthless index may occupy the room that is needed. It is freed from its first word on, but not what
            // else the previous process left.
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let kept = Former::header_bytes(&file);
            let bytes = file.metadata().map_or(0, |file| file.len()).saturating_sub(kept);
            rustix::fs::fallocate(&file, flags, kept, bytes).map_err(|_| error).and_then(|()| create())
        });
        match created {
            Ok((mut state, words)) => {
                let engine = DiskEngine::new(config, words);
                state.put_in_place(config).map_err(|error| StateError::System(path.into(), error))?;
                let cold_reason = Some(cold_reason);
                Ok(EngineStart { engine, state: Some(state), cold_reason, former, is_handed_over: false })
            }
            Err(error) => {
                // In case it stays where it is.
                let _ = file.set_len(0);
                Self::without(path, config, &error, former)
            }
        }
    }

    /// Starts an engine without a state file. Removes what a previous process left, but not a file that is another's.
    fn without(
        path: &Path,
        config: &EngineConfig,
        error: &StateError,
        former: Former,
    ) -> Result<EngineStart, StateError> {
        if !matches!(error, StateError::InUse(_) | StateError::NotOurs(..)) {
            let _ = std::fs::remove_file(path);
        }
        let words = IndexMemory::new(layout(config).words()).map_err(StateError::NoMemory)?;
        tracing::warn!("{error}");
        let cold_reason = Some(error.to_string());
        let engine = DiskEngine::new(config, words);
        Ok(EngineStart { engine, state: None, cold_reason, former, is_handed_over: false })
    }

    /// Returns the previous process's engine, or else the locked file and the reason why it cannot be used.
    fn resume(path: &Path, file: File, config: &EngineConfig) -> Result<EngineStart, (File, String)> {
        // The file may have more numbers than are needed by now.
        let numbers = Former::disk_numbers(&file).unwrap_or(0).max(config.disks);
        match Self::map(&file, numbers) {
            Ok((header, words)) => {
                let config = EngineConfig { key: header.key(), seed: header.seed(), disks: numbers, ..*config };
                let state = |file| Self {
                    path: path.into(),
                    file,
                    words: header.index_words(),
                    header: Arc::new(header),
                    disks: config.disks,
                    is_in_place: true,
                };
                narrow::passes("index-found");
                match DiskEngine::resume(&config, words, Origin::Own) {
                    Ok(engine) => {
                        let (state, former) = (Some(state(file)), Former::default());
                        Ok(EngineStart { engine, state, cold_reason: None, former, is_handed_over: false })
                    }
                    Err(unusable) => Err((file, unusable.reason.into())),
                }
            }
            Err(reason) => Err((file, reason)),
        }
    }

    /// Maps header and index of a file that a previous process left.
    fn map(file: &File, disks: u16) -> Result<(Header, IndexMemory), String> {
        let metadata = file.metadata().map_err(|error| error.to_string())?;
        let length = metadata.len();
        if length == 0 {
            return Err("there is no state of a former process".into());
        }
        let start = Header::bytes(disks);
        if length <= start {
            return Err("the state file is cut off, or of another number of disks".into());
        }
        let header = Header::map(file, disks).map_err(|error| error.to_string())?;
        let words = header.index_words();
        if !header.is_valid() {
            return Err("the state file is damaged, or of another version of remoca".into());
        }
        is_of_this_boot(header.boot_id(), boot_id())?;
        if header.disks() != u64::from(disks) {
            return Err("the number of disks is another one".into());
        }
        if words.checked_mul(4).and_then(|bytes| bytes.checked_add(start)) != Some(length) {
            return Err("the state file is damaged: its size is wrong".into());
        }
        // If the file has holes, and there is no room to fill them, access to a word there would kill the process.
        if metadata.blocks() * 512 < length {
            rustix::fs::fallocate(file, FallocateFlags::empty(), 0, length)
                .map_err(|error| format!("the state file has holes, which cannot be filled: {error}"))?;
        }
        let words = usize::try_from(words).map_err(|error| error.to_string())?;
        let words = IndexMemory::of_file(file, start, words).map_err(|error| error.to_string())?;
        Ok((header, words))
    }

    /// Creates a file as [`Self::create`] does, for a process that is already running: it does not wait for another one
    /// to release `path`. The file's words must not be touched before they are [reserved](Self::reserve).
    ///
    /// # Errors
    /// As for [`Self::create`] and [`Self::check_free`].
    pub fn create_late(path: &Path, disks: u16, words: usize) -> Result<(Self, IndexMemory), StateError> {
        Self::check_free(path)?;
        Self::make(path, disks, words, IndexMemory::of_file)
    }

    /// Checks that a process that is running and has no state file may have one at `path`.
    ///
    /// # Errors
    /// If another process has a state file there, or the file there is not ours to replace.
    pub fn check_free(path: &Path) -> Result<(), StateError> {
        match open_file(path, &mut OpenOptions::new()) {
            Ok(there) => {
                check_ours(path, &there)?;
                lock_whole(&there).map_err(|_| StateError::InUse(path.into()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(_) => Err(not_ours(path, None)),
        }
    }

    /// Allocates the memory of these words of the index.
    ///
    /// # Errors
    /// If there is no room.
    pub fn reserve(&self, words: Range<u64>) -> Result<(), StateError> {
        let bytes = (words.end - words.start) * 4;
        check_room(&self.path, bytes)
            .and_then(|()| {
                let at = Header::bytes(self.disks) + words.start * 4;
                Ok(rustix::fs::fallocate(&self.file, FallocateFlags::empty(), at, bytes)?)
            })
            .map_err(|error| StateError::NoRoom { path: self.path.clone(), bytes, error })
    }

    /// Creates a file beside `path`, locked, of full size and not valid yet, with `words` words of index. It is removed
    /// when its owner drops it, unless it was put in place.
    ///
    /// # Errors
    /// If there is no room or memory for it, it cannot be created, or another process has locked a file beside `path`.
    pub fn create(path: &Path, disks: u16, words: usize) -> Result<(Self, IndexMemory), StateError> {
        Self::make(path, disks, words, IndexMemory::allocate)
    }

    fn make(
        path: &Path,
        disks: u16,
        words: usize,
        map: impl FnOnce(&File, u64, usize) -> io::Result<IndexMemory>,
    ) -> Result<(Self, IndexMemory), StateError> {
        let start = Header::bytes(disks);
        let bytes = start + words as u64 * 4;
        let no_room = |error| StateError::NoRoom { path: path.into(), bytes, error };
        let system = |error| StateError::System(path.into(), error);
        remove_beside(path)?;
        check_available(sizes::in_memory(bytes)).map_err(no_room)?;
        check_room(path, bytes).map_err(no_room)?;
        let file = open_file(&beside(path), OpenOptions::new().create_new(true)).map_err(system)?;
        let made = lock_whole(&file).and_then(|()| {
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, start)?;
            file.set_len(bytes)?;
            Ok((Header::map(&file, disks)?, map(&file, start, words)?))
        });
        match made {
            Ok((header, memory)) => {
                let (path, header, words) = (path.into(), Arc::new(header), words as u64);
                Ok((Self { path, file, header, disks, words, is_in_place: false }, memory))
            }
            Err(error) => {
                let _ = std::fs::remove_file(beside(path));
                Err(no_room(error))
            }
        }
    }

    /// Makes the new file the state file. Everything in it must be true, and its words must be the index of an engine
    /// of `config`.
    ///
    /// # Errors
    /// If the file is no longer the one beside its path, or cannot be renamed.
    pub fn put_in_place(&mut self, config: &EngineConfig) -> io::Result<()> {
        self.header.describe(boot_id().unwrap_or_default(), config.key, config.seed, self.disks, self.words);
        self.commit()
    }

    fn commit(&mut self) -> io::Result<()> {
        let new = beside(&self.path);
        if !is_at(&self.file, &new) {
            return Err(io::Error::other("somebody else has put a file in its place"));
        }
        self.header.set_valid(true);
        std::fs::rename(new, &self.path).inspect_err(|_| self.header.set_valid(false))?;
        self.is_in_place = true;
        Ok(())
    }

    /// Makes `new` the state file. The engine must have moved its index there, and nothing may have changed since.
    ///
    /// # Errors
    /// If `new` cannot be put in place. Neither file is then of use: the old one is removed, and `new` when it is
    /// dropped.
    pub fn replace_with(&mut self, mut new: Self) -> io::Result<()> {
        new.header.copy_from(&self.header);
        let header = &new.header;
        header.describe(self.header.boot_id(), self.header.key(), self.header.seed(), self.disks, new.words);
        let renamed = new.commit();
        if renamed.is_err() {
            self.remove();
        }
        *self = new;
        renamed
    }

    /// Returns the path where the file is, or is to be.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the header, to be shared with the link to the memory servers.
    #[must_use]
    pub fn header(&self) -> Arc<Header> {
        Arc::clone(&self.header)
    }

    /// Marks the image of `disk` as written at the time of `clock`: writes are in flight, or about to be.
    pub fn note_writes(&self, disk: DiskIndex, clock: Clock) {
        self.header.set_written(disk, clock);
    }

    /// Removes the name of a file that was not put in place. Until then no other file can be made there.
    pub fn make_room_beside(&self) {
        let new = beside(&self.path);
        if !self.is_in_place && is_at(&self.file, &new) {
            let _ = std::fs::remove_file(new);
        }
    }

    /// Removes the name of the file that another thread of this process makes beside `path`, so that another one can be made there.
    pub fn free_name_beside(path: &Path) {
        let _ = std::fs::remove_file(beside(path));
    }

    /// Makes the file invalid and removes it, so that no later process finds anything of this one.
    pub fn remove(&self) {
        self.header.set_valid(false);
        let _ = std::fs::remove_file(&self.path);
    }

    /// Returns the descriptor that holds the lock, to be handed to a successor.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }
}

/// Returns the FNV-1a hash of `texts`, for the state file to keep in one word. It is the same in every version of this
/// program.
#[must_use]
pub fn stable_hash(texts: &[&str]) -> u64 {
    // No text contains the byte 0xff, which ends it.
    let bytes = texts.iter().flat_map(|text| text.bytes().chain([0xff]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Returns the ID of the current boot, or `None` if the system does not report one.
fn boot_id() -> Option<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
}

fn is_of_this_boot(kept: [u8; 16], now: Option<[u8; 16]>) -> Result<(), &'static str> {
    match now {
        None => Err("the host does not say whether it was booted since (/proc/sys/kernel/random/boot_id)"),
        Some(now) if now != kept => Err("the host was booted since"),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests;
