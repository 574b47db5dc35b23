//! A state file in the file system: locked by its process, and made beside its path before it is put in place.

use remoca_io::lock::lock_whole;
use remoca_io::show::show_size;
use remoca_io::small_file::with_ending;
use rustix::fs::OFlags;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long to wait for a previous process of this name to exit.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// Number of bytes of the file system that are left free. In a small file system it is a sixteenth.
const RESERVE_BYTES: u64 = 32 << 20;

/// Why the state file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("another process uses the state file {0}: two VM processes need two names (--name, --state)")]
    InUse(PathBuf),
    /// A file that is not ours, and why.
    #[error("{0} {1}")]
    NotOurs(PathBuf, String),
    #[error("{0} is no state file of this version of remoca: it is left as it is")]
    NotState(PathBuf),
    #[error(
        "there is no room for a state file of {} at {path}: {error}. A restart will find the cache cold. Make room, or say --state PATH",
        show_size(*bytes)
    )]
    NoRoom { path: PathBuf, bytes: u64, error: io::Error },
    #[error("the state file {0} cannot be used: {1}. A restart will find the cache cold")]
    System(PathBuf, io::Error),
    #[error(
        "there is no memory for the index of this cache: {0}. The index is in the memory of this host, about 38 bytes for each 4 KiB of \
         cache: give a smaller --cache"
    )]
    NoMemory(io::Error),
}

/// Checks that the file system of `path` has room for `bytes` bytes, and leaves some free: services make their sockets
/// there.
pub(super) fn check_room(path: &Path, bytes: u64) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let system = rustix::fs::statvfs(folder)?;
    let (available, total) =
        (system.f_bavail.saturating_mul(system.f_frsize), system.f_blocks.saturating_mul(system.f_frsize));
    if leaves_reserve(bytes, available, total) { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
}

pub(super) fn leaves_reserve(bytes: u64, available: u64, total: u64) -> bool {
    bytes.saturating_add(RESERVE_BYTES.min(total / 16)) <= available
}

/// Returns whether `path` leads to this very file.
pub(super) fn is_at(file: &File, path: &Path) -> bool {
    let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let (ours, there) = (file.metadata().map(identity), std::fs::symlink_metadata(path).map(identity));
    matches!((ours, there), (Ok(ours), Ok(there)) if ours == there)
}

pub(super) fn beside(path: &Path) -> PathBuf {
    with_ending(path, ".new")
}

/// Removes a new state file beside `path` whose process was killed before renaming it.
///
/// # Errors
/// If another process has the file locked.
pub(super) fn remove_beside(path: &Path) -> Result<(), StateError> {
    let new = beside(path);
    if let Ok(there) = open_file(&new, &mut OpenOptions::new()) {
        lock_whole(&there).map_err(|_| StateError::InUse(new.clone()))?;
    }
    let _ = std::fs::remove_file(new);
    Ok(())
}

pub(super) fn open_file(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    options.read(true).write(true).mode(0o600).custom_flags(flags.bits().cast_signed()).open(path)
}

/// Returns whether this is a regular file of this user, to which other users have no access.
pub(super) fn is_ours(metadata: &Metadata) -> bool {
    is_of_user(metadata) && metadata.mode() & 0o077 == 0
}

fn is_of_user(metadata: &Metadata) -> bool {
    metadata.is_file() && metadata.uid() == rustix::process::geteuid().as_raw()
}

/// Returns the error of a file at `path` that is not ours. `there`: what is known of it.
pub(super) fn not_ours(path: &Path, there: Option<&Metadata>) -> StateError {
    let why = match there.filter(|there| is_of_user(there)) {
        Some(there) => format!(
            "is open to others (mode {:03o}), and cannot be the state file: if it is one, `chmod 600 {}`; else say --state PATH",
            there.mode() & 0o7777,
            path.display()
        ),
        None => "is no regular file of this user, and cannot be the state file: remove it, or say --state PATH".into(),
    };
    StateError::NotOurs(path.into(), why)
}

/// Checks that the open file at `path` is ours.
///
/// # Errors
/// If it is not.
pub(super) fn check_ours(path: &Path, file: &File) -> Result<(), StateError> {
    let there = file.metadata().map_err(|error| StateError::System(path.into(), error))?;
    if is_ours(&there) { Ok(()) } else { Err(not_ours(path, Some(&there))) }
}

/// Checks that what is at `path` does not keep a process from starting with its state file there. Changes nothing.
///
/// # Errors
/// If there is a file that is not ours.
pub fn check_place(path: &Path) -> Result<(), StateError> {
    match open_file(path, &mut OpenOptions::new()) {
        Ok(there) => check_ours(path, &there),
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => Err(not_ours(path, None)),
        // There is none, or a start goes on without it.
        Err(_) => Ok(()),
    }
}

/// Opens the file at `path`, creates it if there is none, and locks it. Waits a limited time for a previous owner to end.
pub(super) fn open_locked(path: &Path) -> Result<File, StateError> {
    let give_up_at = Instant::now() + LOCK_PATIENCE;
    let system = |error| StateError::System(path.into(), error);
    loop {
        let file = match open_file(path, OpenOptions::new().create(true)) {
            Err(error) if error.raw_os_error() == Some(libc::ELOOP) => return Err(not_ours(path, None)),
            opened => opened.map_err(system)?,
        };
        check_ours(path, &file)?;
        match lock_whole(&file) {
            Ok(()) => {
                // Its previous owner may have put another file in its place just before it ended.
                if is_at(&file, path) {
                    return Ok(file);
                }
            }
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(system(error)),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
        if Instant::now() >= give_up_at {
            return Err(StateError::InUse(path.into()));
        }
    }
}
