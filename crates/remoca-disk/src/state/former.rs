//! What outlives an index that can no longer be used: pools that are still ours, and flushes that failed.

use super::file::{StateError, check_room, open_locked, remove_beside};
use super::header::{Header, MAGIC, OptionHashes, RosterEntry, Settings, Shape};
use remoca_core::units::{DiskIndex, PageCount};
use remoca_io::address::Endpoint;
use remoca_io::small_file::with_ending;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// What a previous process left besides its index.
#[derive(Debug, Default)]
pub struct Former {
    /// Memory servers that may have a pool of that process.
    pub servers: Vec<RosterEntry>,
    pub failed_flushes: Vec<FailedFlush>,
    settings: Option<Settings>,
}

/// A flush or durable write that failed. It stays failed, whatever disk the image is now, until the state file is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedFlush {
    /// The image's identity but for its size.
    pub image: [u64; 3],
    pub errno: i32,
}

impl Former {
    /// Reads a locked state file, which may hold anything, for any number of disks. Returns an empty value if the file
    /// is not of this boot, or of another version than this one and the former.
    pub(super) fn of(file: &File) -> Self {
        Self::read(file).unwrap_or_default()
    }

    /// Returns the number of bytes before the index in the file, or 0 if the file does not say.
    pub(super) fn header_bytes(file: &File) -> u64 {
        Self::shape(file).map_or(0, |(shape, disks)| shape.bytes(disks))
    }

    /// Makes a state file invalid for every process, and clears the secrets in it. Returns its size in bytes.
    pub(super) fn invalidate(file: &File) -> u64 {
        let bytes = file.metadata().map_or(0, |file| file.len());
        if let Some((shape, disks)) = Self::shape(file)
            && shape.bytes(disks) <= bytes
            && let Ok(header) = Header::map_as(file, disks, shape)
        {
            header.set_valid(false);
            header.forget_secrets();
        }
        bytes
    }

    /// Records in `header` what the operator had set, for a later process that may use it.
    pub fn keep_settings(&self, header: &Header) {
        let Some(settings) = &self.settings else { return };
        for (slot, server) in self.servers.iter().enumerate() {
            header.set_server(slot, Some(server));
        }
        header.set_settings(settings);
    }

    /// Returns how many disk numbers the file has, or `None` if it does not say.
    pub(super) fn disk_numbers(file: &File) -> Option<u16> {
        Self::shape(file).map(|(_, disks)| disks)
    }

    /// Returns whether a file is empty, or has the header of a state file, valid or not.
    fn is_state(file: &File) -> bool {
        let mut magic = [0; 8];
        if file.metadata().is_ok_and(|file| file.len() == 0) {
            return true;
        }
        let is_read = file.read_exact_at(&mut magic, 0).is_ok();
        is_read && [0, MAGIC].contains(&u64::from_le_bytes(magic)) && Self::shape(file).is_some()
    }

    /// Returns the shape of the file's header, and its number of disk numbers.
    fn shape(file: &File) -> Option<(Shape, u16)> {
        let word = |at| {
            let mut word = [0; 8];
            file.read_exact_at(&mut word, at).ok().map(|()| u64::from_le_bytes(word))
        };
        Some((Shape::of_version(word(Header::VERSION_AT)?)?, u16::try_from(word(Header::DISKS_AT)?).ok()?))
    }

    fn read(file: &File) -> Option<Self> {
        let (shape, disks) = Self::shape(file)?;
        if file.metadata().ok()?.len() < shape.bytes(disks) {
            return None;
        }
        let header = Header::map_as(file, disks, shape).ok().filter(Header::is_valid)?;
        super::is_of_this_boot(header.boot_id(), super::boot_id()).ok()?;
        let settings = Some(header.settings());
        Some(Self { servers: header.roster(), failed_flushes: failed_flushes(&header, disks), settings })
    }
}

/// What a previous program had last: as its options said, or as `remoca set` left it.
pub struct FormerSettings {
    /// Hashes of its options, or `None` if they are not known.
    pub options: Option<OptionHashes>,
    /// Its list of servers; empty if it had none, or they are not known.
    pub listed: Vec<Endpoint>,
    pub cache: PageCount,
    /// Size of the local tier; `None` if it had no server.
    pub local: Option<PageCount>,
    pub enabled: bool,
}

/// Returns what a previous process had last. Returns `None` if the file at `path` does not say.
#[must_use]
pub fn settings_at(path: &Path) -> Option<FormerSettings> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).ok()?;
    let former = super::file::is_ours(&file.metadata().ok()?).then(|| Former::of(&file))?;
    let Settings { options, cache, local, enabled, servers } = former.settings?;
    let stay: Vec<_> = former.servers.into_iter().filter(|server| !server.leaves).collect();
    // Not if a process died after it had recorded one of the two, nor if an address is too long to be kept.
    let is_whole = stay.len() == servers + usize::from(local.is_some());
    let known = if is_whole { servers } else { 0 };
    let listed = stay.into_iter().take(known).map(|server| server.endpoint).collect();
    let settings = FormerSettings { options: Some(options), listed, cache, local, enabled };
    (servers > 0 || local.is_some()).then_some(settings)
}

/// State file of a process that is gone. It is locked as long as this exists, so no process of that VM starts.
#[derive(Debug)]
pub struct Remains {
    path: PathBuf,
    file: File,
    /// What is in the file besides the index.
    pub former: Former,
}

impl Remains {
    /// Returns where the file is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file. It is first made invalid, with the secrets in it.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn remove(&self) -> io::Result<()> {
        Former::invalidate(&self.file);
        std::fs::remove_file(&self.path)
    }
}

/// Locks the state file that a process which is gone left at `path`, and changes nothing. Returns `None` if there is no
/// file.
///
/// # Errors
/// If another process uses the file, or it is not a private regular file of this user, or no state file.
pub fn look(path: &Path) -> Result<Option<Remains>, StateError> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        _ => {
            let file = open_locked(path)?;
            if !Former::is_state(&file) {
                return Err(StateError::NotState(path.into()));
            }
            let former = Former::of(&file);
            Ok(Some(Remains { path: path.into(), file, former }))
        }
    }
}

/// Discards the index that a previous process left at `path`, and returns what else it left.
///
/// # Errors
/// If another process uses the file, or it is not a private regular file of this user.
pub fn discard(path: &Path) -> Result<Former, StateError> {
    put_away(path, |path, _| std::fs::remove_file(path))
}

/// Discards the index as [`discard`] does, but keeps the file as `PATH.bad`, invalid, for whoever looks for the fault.
/// The file is removed if there is a `PATH.bad` already, or the file system has no room for another file.
///
/// # Errors
/// As for [`discard`].
pub fn set_aside(path: &Path) -> Result<Former, StateError> {
    put_away(path, |path, bytes| {
        let bad = with_ending(path, ".bad");
        check_room(path, bytes)?;
        if bad.symlink_metadata().is_ok() { std::fs::remove_file(path) } else { std::fs::rename(path, bad) }
    })
}

fn put_away(path: &Path, put: impl FnOnce(&Path, u64) -> io::Result<()>) -> Result<Former, StateError> {
    let locked = open_locked(path);
    if let Err(error @ (StateError::InUse(_) | StateError::NotOurs(..))) = locked {
        return Err(error);
    }
    let former = locked.as_ref().map(Former::of).unwrap_or_default();
    let _ = remove_beside(path);
    let bytes = locked.as_ref().map(Former::invalidate).unwrap_or_default();
    if bytes == 0 || put(path, bytes).is_err() {
        let _ = std::fs::remove_file(path);
    }
    Ok(former)
}

fn failed_flushes(header: &Header, disks: u16) -> Vec<FailedFlush> {
    let failed = |disk| {
        let [kind, device, inode, _] = header.disk(disk).identity;
        Some(FailedFlush { image: [kind, device, inode], errno: header.flush_failed(disk)? })
    };
    (0..disks).filter_map(|disk| failed(DiskIndex(disk))).collect()
}
