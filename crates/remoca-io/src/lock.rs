//! Locks on images, compatible with QEMU's, and on whole files of our own.
//!
//! Called once when a file is opened. Locks belong to the open file description that does the I/O (OFD locks), so
//! they last until the last write of a killed process has landed, and closing another descriptor does not drop them.
//! Layout, as in QEMU's `file-posix.c` (bytes of the image that are locked; locking neither reads nor writes them):
//! ```text
//!   100 + p   "I use permission p"             read lock while used
//!   200 + p   "nobody else may use p"          read lock while not shared      p: 0 read, 1 write, 3 resize
//! ```
//! A second user takes its own read locks first, and then checks whether another process holds a conflicting byte. Of
//! two users at the same time, at least one sees the other. The locks do not protect against programs that ignore them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// How an image is protected from other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageLock {
    /// The image must be locked, or opening it fails. Waits up to `wait` for another process to release it: a killed
    /// predecessor holds the lock until its last write has landed.
    Required { wait: Duration },
    /// No lock, for file systems that cannot lock. Other processes must be kept away by other means.
    Off,
}

impl Default for ImageLock {
    fn default() -> Self {
        ImageLock::Required { wait: Duration::from_secs(2) }
    }
}

#[derive(Debug)]
pub enum LockFailure {
    InUse,
    Unsupported(io::Error),
}

const USED_BASE: i64 = 100;
const UNSHARED_BASE: i64 = 200;
const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;
/// Permissions that nobody else may use.
const UNSHARED: [i64; 2] = [WRITE, RESIZE];
const RETRY_EVERY: Duration = Duration::from_millis(10);

/// Calls `attempt` until it no longer fails with `InUse`, or `wait` has passed. Blocks, so it is for the start-up only.
pub fn retry_while_in_use<T>(
    wait: Duration,
    mut attempt: impl FnMut() -> Result<T, LockFailure>,
) -> Result<T, LockFailure> {
    let deadline = Instant::now() + wait;
    loop {
        match attempt() {
            Err(LockFailure::InUse) if Instant::now() < deadline => std::thread::sleep(RETRY_EVERY),
            outcome => return outcome,
        }
    }
}

/// Locks `file`. A writer tolerates no other writer, and a reader tolerates only other readers. After an error the file
/// must be closed, so that the locks of a failed attempt are not mistaken for those of a user.
pub fn lock(file: &File, read_only: bool) -> Result<(), LockFailure> {
    let used = used(read_only);
    for byte in used.iter().map(|p| USED_BASE + p).chain(UNSHARED.iter().map(|p| UNSHARED_BASE + p)) {
        set_read_lock(file, byte)?;
    }
    expect_no_other(file, used, &UNSHARED)
}

/// Finds out whether [`lock`] would succeed, and locks nothing, so that nobody is kept from the image meanwhile.
pub fn probe(file: &File, read_only: bool) -> Result<(), LockFailure> {
    expect_no_other(file, used(read_only), &UNSHARED)
}

/// Returns the permissions that a user of an image needs.
fn used(read_only: bool) -> &'static [i64] {
    if read_only { &[READ] } else { &[READ, WRITE] }
}

/// Fails if somebody else does not share what is `used`, or uses what is `unshared`.
fn expect_no_other(file: &File, used: &[i64], unshared: &[i64]) -> Result<(), LockFailure> {
    for byte in used.iter().map(|p| UNSHARED_BASE + p).chain(unshared.iter().map(|p| USED_BASE + p)) {
        if is_locked_by_another(file, byte)? {
            return Err(LockFailure::InUse);
        }
    }
    Ok(())
}

/// Locks all of a file that belongs to this program, for this process and for those that get its descriptor. Does not wait
/// for another owner.
///
/// # Errors
/// `WouldBlock` if another process has locked it; another error if the system refuses the lock.
pub fn lock_whole(file: &File) -> io::Result<()> {
    // A length of 0 is all of it.
    let mut request = lock_request(libc::F_WRLCK, 0, 0);
    // SAFETY: F_OFD_SETLK reads the structure, which outlives the call; the descriptor is open.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut request) } {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::EACCES) => Err(io::ErrorKind::WouldBlock.into()),
            error => Err(error),
        },
    }
}

fn set_read_lock(file: &File, byte: i64) -> Result<(), LockFailure> {
    let mut request = lock_request(libc::F_RDLCK, byte, 1);
    // SAFETY: F_OFD_SETLK reads the structure, which outlives the call; the descriptor is open.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut request) } {
        0 => Ok(()),
        _ => Err(failure(io::Error::last_os_error())),
    }
}

fn is_locked_by_another(file: &File, byte: i64) -> Result<bool, LockFailure> {
    let mut request = lock_request(libc::F_WRLCK, byte, 1);
    // SAFETY: F_OFD_GETLK reads and writes the structure, which outlives the call; the descriptor is open.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut request) } {
        0 => Ok(i32::from(request.l_type) != libc::F_UNLCK),
        _ => Err(failure(io::Error::last_os_error())),
    }
}

fn lock_request(kind: i32, start: i64, length: i64) -> libc::flock {
    // SAFETY: flock is a plain C structure, for which all zero is a valid value; l_pid must be zero for OFD locks.
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = i16::try_from(kind).expect("kinds of locks are small numbers");
    request.l_whence = i16::try_from(libc::SEEK_SET).unwrap_or(0);
    request.l_start = start;
    request.l_len = length;
    request
}

fn failure(error: io::Error) -> LockFailure {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => LockFailure::InUse,
        _ => LockFailure::Unsupported(error),
    }
}
