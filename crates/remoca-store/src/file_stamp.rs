//! An image's identity and the time of its last change, as the system reports them.

use super::ImageStamp;
use remoca_io::file_systems;
use rustix::fs::FileType;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

const DEVICE: u64 = 2;

/// Returns whether the file system is ext4, XFS, Btrfs or F2FS.
pub(super) fn is_local(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|fs| file_systems::is_local(fs.f_type))
}

/// Returns the stamp of the image as it is now, or `None` if the system does not provide it. May block for as long as
/// the file system does.
pub(super) fn stamp(file: &File) -> Option<ImageStamp> {
    let stat = rustix::fs::fstat(file).ok()?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        return Some(ImageStamp { identity: [DEVICE, stat.st_rdev, 0, 0], changed_ns: None });
    }
    let size = u64::try_from(stat.st_size).ok()?;
    let seconds = u64::try_from(stat.st_ctime).ok()?;
    let changed_ns = seconds.checked_mul(1_000_000_000)?.checked_add(stat.st_ctime_nsec)?;
    Some(ImageStamp {
        identity: [ImageStamp::FILE, stat.st_dev, stat.st_ino, size],
        changed_ns: is_local(file).then_some(changed_ns),
    })
}

/// The time of a file's last change, as `statx` reports it.
pub(super) struct ChangeTime(libc::statx);

impl Default for ChangeTime {
    fn default() -> Self {
        // SAFETY: statx is a plain C structure, for which all zero is a valid value.
        Self(unsafe { std::mem::zeroed() })
    }
}

impl PartialEq for ChangeTime {
    fn eq(&self, other: &Self) -> bool {
        self.nanoseconds() == other.nanoseconds()
    }
}

impl Eq for ChangeTime {}

impl fmt::Debug for ChangeTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChangeTime({:?})", self.nanoseconds())
    }
}

impl ChangeTime {
    /// Arguments of `statx` on an open file.
    pub(super) const FLAGS: i32 = libc::AT_EMPTY_PATH;
    pub(super) const MASK: u32 = libc::STATX_CTIME;

    /// Returns the structure that `statx` fills in.
    pub(super) fn as_mut_ptr(&mut self) -> *mut libc::statx {
        &raw mut self.0
    }

    /// Queries the change time of `file`. May block for as long as the file system does.
    pub(super) fn read(&mut self, file: &File) -> io::Result<()> {
        // SAFETY: the path is a C string, the structure is ours and outlives the call, and the descriptor is open.
        let outcome =
            unsafe { libc::statx(file.as_raw_fd(), c"".as_ptr(), Self::FLAGS, Self::MASK, self.as_mut_ptr()) };
        if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Returns the time in nanoseconds of real time, or `None` if the system did not provide it.
    pub(super) fn nanoseconds(&self) -> Option<u64> {
        let time = Some(&self.0).filter(|stat| stat.stx_mask & Self::MASK != 0)?.stx_ctime;
        u64::try_from(time.tv_sec).ok()?.checked_mul(1_000_000_000)?.checked_add(time.tv_nsec.into())
    }
}

/// Returns a text that changes when an image file is written, because another host has no other means to notice it. It begins with the
/// file's inode. For a block device, it only names the device. Returns `None` if the system does not provide it.
pub(super) fn shared(file: &File) -> Option<String> {
    let file = file.metadata().ok()?;
    match file.is_file() {
        true => Some(format!("{} {} {}.{}", file.ino(), file.size(), file.ctime(), file.ctime_nsec())),
        false => device_name(file.rdev()),
    }
}

/// Returns a WWID, a serial number, or the UUID from the device mapper, which are the same on all hosts. Returns `None`
/// if the device has none of them, as is the case for partitions.
fn device_name(device: u64) -> Option<String> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    ["wwid", "device/wwid", "dm/uuid", "serial"].iter().find_map(|attribute| {
        let text = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{attribute}")).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| format!("{attribute} {text}"))
    })
}

/// `cachestat` of Linux 6.5 and later, which the libc crate does not have.
const SYS_CACHESTAT: libc::c_long = 451;
/// Largest file that is looked through page by page, which takes half a second.
const LOOKED_THROUGH_MAX: usize = 256 << 30;
/// Bytes of a file that are looked through with one call: one byte of the answer for each page.
const WINDOW: usize = 1 << 30;

/// Returns whether the page cache has pages of the file. Returns true if the system does not say that.
pub(super) fn may_be_in_page_cache(file: &File) -> bool {
    // The range is offset and length; a length of 0 means up to the end. The counts are cached, dirty, written back,
    // evicted, recently evicted.
    let (range, mut counts) = ([0_u64; 2], [0_u64; 5]);
    // SAFETY: the call reads `range` and fills `counts`, which have the sizes that it expects and outlive it.
    let outcome = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0_u32) };
    match outcome {
        0 => counts[..3] != [0; 3],
        _ => may_have_resident_pages(file).unwrap_or(true),
    }
}

/// Returns whether the page cache has pages of the file, by `mincore`: for kernels without `cachestat`. Returns an error if the
/// system does not say that, or the file is too large.
fn may_have_resident_pages(file: &File) -> io::Result<bool> {
    let bytes = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
    if bytes > LOOKED_THROUGH_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut answer = vec![0_u8; WINDOW.min(bytes).div_ceil(rustix::param::page_size())];
    for start in (0..bytes).step_by(WINDOW) {
        let (length, offset) = (WINDOW.min(bytes - start), start as u64);
        // SAFETY: a new mapping at an address that the kernel chooses. Nothing can be read or written through it.
        let map = unsafe { mmap(std::ptr::null_mut(), length, ProtFlags::empty(), MapFlags::SHARED, file, offset)? };
        // SAFETY: the range is that of the mapping, and `answer` has a byte for each of its pages.
        let outcome = unsafe { libc::mincore(map, length, answer.as_mut_ptr()) };
        let error = io::Error::last_os_error();
        // SAFETY: the mapping was made above, and nothing refers to it.
        unsafe { munmap(map, length)? };
        if outcome != 0 {
            return Err(error);
        }
        if answer.iter().take(length.div_ceil(rustix::param::page_size())).any(|page| page & 1 != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Advice, fadvise};
    use std::os::unix::fs::FileExt;

    /// Both ways to ask agree, where the kernel has both.
    #[test]
    fn a_page_that_is_written_is_in_the_page_cache_until_it_is_dropped() {
        // Not in memory, where all pages stay.
        let folder = if std::path::Path::new("/var/tmp").is_dir() { "/var/tmp".into() } else { std::env::temp_dir() };
        let file = tempfile::tempfile_in(folder).unwrap();
        file.set_len(5 << 30).unwrap();
        assert!(!may_have_resident_pages(&file).unwrap());
        file.write_all_at(&[1], (4 << 30) + 5000).unwrap();
        assert!(may_have_resident_pages(&file).unwrap() && may_be_in_page_cache(&file));
        file.sync_all().unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        assert_eq!(may_have_resident_pages(&file).unwrap(), may_be_in_page_cache(&file));
        let end = LOOKED_THROUGH_MAX as u64 + 1;
        if file.set_len(end).is_ok() {
            assert!(may_have_resident_pages(&file).is_err());
        }
    }
}
