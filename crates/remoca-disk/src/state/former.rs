//! What outlives an index that cannot be used any more: pools that are still ours, and flushes that failed.

use super::file::{StateError, check_room, open_locked, remove_beside};
use super::header::{Header, RosterEntry, Settings};
use remoca_core::units::{DiskIndex, PageCount};
use remoca_io::address::Endpoint;
use remoca_io::small_file::with_ending;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// What a former process left beside its index.
#[derive(Debug, Default)]
pub struct Former {
    /// Memory servers that may have a pool of it.
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
    /// Reads what a locked state file says, which may be anything, of any number of disks; nothing, if it is not of
    /// this version and boot.
    pub(super) fn of(file: &File) -> Self {
        Self::read(file).unwrap_or_default()
    }

    /// Returns the bytes of the file that are not index.
    pub(super) fn header_bytes(file: &File) -> u64 {
        Self::disks(file).map_or(0, Header::bytes)
    }

    /// Makes a state file worthless for every process, without the keys to what it describes, and returns its size in bytes.
    pub(super) fn invalidate(file: &File) -> u64 {
        let bytes = file.metadata().map_or(0, |file| file.len());
        if let Some(disks) = Self::disks(file)
            && Header::bytes(disks) <= bytes
            && let Ok(header) = Header::map(file, disks)
        {
            header.set_valid(false);
            header.forget_secrets();
        }
        bytes
    }

    /// Keeps in `header` what the operator had set, for a later process that may use it.
    pub fn keep_settings(&self, header: &Header) {
        let Some(settings) = &self.settings else { return };
        for (slot, server) in self.servers.iter().enumerate() {
            header.set_server(slot, Some(server));
        }
        header.set_settings(settings);
    }

    fn disks(file: &File) -> Option<u16> {
        let mut disks = [0; 8];
        file.read_exact_at(&mut disks, Header::DISKS_AT).ok()?;
        u16::try_from(u64::from_le_bytes(disks)).ok()
    }

    fn read(file: &File) -> Option<Self> {
        let disks = Self::disks(file)?;
        if file.metadata().ok()?.len() < Header::bytes(disks) {
            return None;
        }
        let header = Header::map(file, disks).ok().filter(Header::is_valid)?;
        super::is_of_this_boot(header.boot_id(), super::boot_id()).ok()?;
        let settings = Some(header.settings());
        Some(Self { servers: header.roster(), failed_flushes: failed_flushes(&header, disks), settings })
    }
}

/// Servers, size of the cache, and whether it is on, as a former process with the same options had them last.
#[must_use]
pub fn settings_at(path: &Path, options: u64) -> Option<(Vec<Endpoint>, PageCount, bool)> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).ok()?;
    let former = super::file::is_ours(&file.metadata().ok()?).then(|| Former::of(&file))?;
    let is_whole = |settings: &Settings| settings.servers == former.servers.len() && settings.cache.0 > 0;
    let settings = former.settings.filter(|settings| settings.options == options).filter(is_whole)?;
    (!former.servers.is_empty()).then(|| {
        let servers = former.servers.iter().map(|server| server.endpoint.clone()).collect();
        (servers, settings.cache, settings.enabled)
    })
}

/// Discards the index that a former process left at `path`, and returns what else it left.
///
/// # Errors
/// If a process has it, or it is no state file of ours.
pub fn discard(path: &Path) -> Result<Former, StateError> {
    put_away(path, |path, _| std::fs::remove_file(path))
}

/// As [`discard`], but the file stays as `PATH.bad`, worthless, for whoever looks for the fault; not if there is one already, or
/// the file system has no room for another one.
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
    if let Err(error @ (StateError::InUse(_) | StateError::NotOurs(_))) = locked {
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
