//! Opening a raw image or a block device: checks, lock, direct I/O and its alignment.
//!
//! Called by `FileStore::open`. It blocks, so it is not used on the I/O thread once guests are served. Operations that
//! find the image shorter than it was measured fail with `EIO`.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{AtFlags, OFlags, StatxFlags};

use super::device_queue;
use super::file_stamp;
use super::file_task::ImageFacts;
use super::{Geometry, ImageStamp, OpenError, OpenErrorKind, SECTOR_SIZE};
use remoca_io::buffer::BufferPool;
use remoca_io::lock;
use remoca_io::lock::{ImageLock, LockFailure};

/// How to open an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileOptions {
    pub read_only: bool,
    pub uring: UringUse,
    pub lock: ImageLock,
    /// Whether the image is taken as it is, empty or with a part of a sector at its end, which is not used: it was served before,
    /// and may have changed its size since.
    pub any_size: bool,
}

/// Whether to use io_uring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UringUse {
    /// Use it if the kernel allows it.
    #[default]
    Auto,
    Off,
}

/// Coarsest alignment at which direct I/O is used. If it needs a coarser one, the page cache is used.
const DIRECT_ALIGNMENT_MAX: u32 = 4096;
/// Distance of a hole that is punched as a test from the end of the file.
const PROBE_DISTANCE: u64 = 1 << 30;
/// `BLKROGET` and `BLKDISCARD` of `linux/fs.h`, which the libc crate does not have.
const BLKROGET: libc::Ioctl = 0x125E;
const BLKDISCARD: libc::Ioctl = 0x1277;

/// An open, locked image.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) file: File,
    /// Geometry at opening.
    pub(super) geometry: Geometry,
    pub(super) facts: ImageFacts,
    /// Number of requests that the queue of the device below a file held when that was looked at last; 0 if it is not known.
    pub(super) device_requests: AtomicU32,
    /// Whether the image bypasses the page cache.
    pub(super) is_direct: bool,
    /// Whether the file system keeps change times that reveal writes of other processes.
    pub(super) tells_changes: bool,
    pub(super) stamp_at_opening: Option<ImageStamp>,
    pub(super) shared_stamp_at_opening: Option<String>,
}

impl Image {
    pub(super) fn open(path: &Path, options: FileOptions) -> Result<Image, OpenError> {
        let FileOptions { read_only, lock, any_size, .. } = options;
        let opening = Opening { path: path.to_owned(), read_only, any_size, is_adopted: false };
        // Checked before opening: opening some device nodes has side effects, and opening a FIFO may block.
        let is_block_device = opening.check_kind(&std::fs::metadata(path).map_err(|e| opening.explain_open(&e))?)?;
        let file = opening.open_locked(is_block_device, lock)?;
        opening.check_writable(&file)?;
        opening.finish(file)
    }

    /// Takes over an image that is already open, and locks it again, which changes nothing for other processes. A
    /// process that tries to lock the image at this moment holds locks until it sees ours; ours are kept meanwhile.
    pub(super) fn adopt(file: File, path: &Path, read_only: bool, lock: ImageLock) -> Result<Image, OpenError> {
        let opening = Opening { path: path.to_owned(), read_only, any_size: true, is_adopted: true };
        let system = |error: io::Error| opening.explain_system("go on with", &error);
        let metadata = file.metadata().map_err(system)?;
        let is_writable = rustix::fs::fcntl_getfl(&file).map_err(|error| system(error.into()))?.contains(OFlags::RDWR);
        if is_writable == read_only {
            return Err(system(io::Error::other("its descriptor was opened for another use")));
        }
        if !std::fs::metadata(path).is_ok_and(|named| is_same_file(&named, &metadata)) {
            tracing::warn!(image = %path.display(), "another file has this name now; the one that the guest knows is used on");
        }
        let is_block_device = opening.check_kind(&metadata)?;
        if let ImageLock::Required { wait } = lock
            && lock::retry_while_in_use(wait, || lock::lock(&file, read_only)).is_err()
        {
            return Err(opening.explain_in_use(is_block_device));
        }
        // Not whether it may be opened for writing now: the descriptor is, and the guest writes through it.
        opening.finish(file)
    }

    /// Notes how many requests the queue of the device below a file holds. What is below may change, as when a volume is moved.
    fn look_at_queue(&self) {
        if !self.facts.is_block_device {
            self.device_requests.store(device_queue::requests(&self.file).unwrap_or(0), Ordering::Relaxed);
        }
    }

    /// Returns the size of the image now, in bytes, and looks at the queue of its device. May block for as long as the file system does.
    pub(super) fn measure(&self) -> io::Result<u64> {
        self.look_at_queue();
        // The end of a block device is its size too. No call of ours uses the position.
        (&self.file).seek(SeekFrom::End(0))
    }

    /// Discards blocks of a block device. Blocks until the device has done it.
    pub(super) fn discard_blocks(&self, offset: u64, len: u64) -> io::Result<()> {
        let range = [offset, len];
        // SAFETY: BLKDISCARD reads two u64 from the pointer, which is valid for the call; the descriptor is open.
        match unsafe { libc::ioctl(self.file.as_raw_fd(), BLKDISCARD, range.as_ptr()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Returns whether both are the same file. For block devices the device number is compared, so a node that was made
/// again counts as the same.
fn is_same_file(a: &Metadata, b: &Metadata) -> bool {
    if a.file_type().is_block_device() && b.file_type().is_block_device() {
        return a.rdev() == b.rdev();
    }
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// The image that is being opened, for the checks and their messages.
struct Opening {
    path: PathBuf,
    read_only: bool,
    /// Whether a guest may have the image already.
    any_size: bool,
    /// Whether a guest has the image at this moment, with sectors that stay as large as they are.
    is_adopted: bool,
}

impl Opening {
    /// Determines the properties of an open, locked image.
    fn finish(&self, mut file: File) -> Result<Image, OpenError> {
        let (opening, path) = (self, &self.path);
        // The calls below may change the image's times.
        let (stamp_at_opening, shared_stamp_at_opening) = (file_stamp::stamp(&file), file_stamp::shared(&file));
        let metadata = file.metadata().map_err(|error| opening.explain_system("look at", &error))?;
        let is_block_device = opening.check_kind(&metadata)?;
        if !is_block_device {
            leave_access_time(&file);
        }
        let end = file.seek(SeekFrom::End(0)).map_err(|error| opening.explain_system("find the size of", &error))?;
        let size = opening.usable(end)?;
        let alignment = opening.direct_alignment(&file, is_block_device, size);
        if alignment.is_none() && is_direct(&file) {
            set_buffered(&file).map_err(|error| opening.explain_system("switch off direct I/O for", &error))?;
        }
        let can_discard = !self.read_only
            && if is_block_device { device_can_discard(&file) } else { file_can_punch_holes(&file, end) };
        let geometry = Geometry { can_discard, ..opening.geometry(&file, is_block_device, size, alignment) };
        // Not refused: a guest may write these bytes to its raw disk.
        if starts_with_qcow2_magic(&file) {
            tracing::warn!(image = %path.display(), "looks like qcow2, but is used as a raw image; \
                if it is qcow2, let qemu-nbd serve it and give its NBD address here");
        }
        let facts = ImageFacts {
            is_block_device,
            honours_dsync: is_block_device || file_system_honours_dsync(&file),
            may_wait: !is_block_device && !file_stamp::is_local(&file),
        };
        let is_direct = alignment.is_some();
        let tells_changes = stamp_at_opening.is_some_and(|stamp| stamp.changed_ns.is_some());
        let image = Image {
            file,
            geometry,
            facts,
            device_requests: AtomicU32::new(0),
            is_direct,
            tells_changes,
            stamp_at_opening,
            shared_stamp_at_opening,
        };
        image.look_at_queue();
        Ok(image)
    }

    /// Checks that the file is an image. Returns whether it is a block device.
    fn check_kind(&self, metadata: &Metadata) -> Result<bool, OpenError> {
        let kind = metadata.file_type();
        let path = self.path.display();
        if kind.is_dir() {
            let message = format!("{path} is a directory: give the image file or block device itself");
            return Err(OpenError::new(OpenErrorKind::NotAnImage, message));
        }
        if !kind.is_file() && !kind.is_block_device() {
            let message = format!("{path} is neither a regular file nor a block device, so it cannot hold a disk");
            return Err(OpenError::new(OpenErrorKind::NotAnImage, message));
        }
        Ok(kind.is_block_device())
    }

    /// Refuses an image to be written that its owner has protected. Root could open it all the same.
    fn check_writable(&self, file: &File) -> Result<(), OpenError> {
        let metadata = file.metadata().map_err(|error| self.explain_system("look at", &error))?;
        let kind = metadata.file_type();
        match () {
            () if self.read_only => Ok(()),
            () if kind.is_file() && metadata.mode() & 0o222 == 0 => {
                Err(self.explain_read_only("nobody may write to it"))
            }
            () if kind.is_block_device() && is_write_protected(file) => {
                Err(self.explain_read_only("the device is write-protected"))
            }
            () => Ok(()),
        }
    }

    /// Returns the size in whole sectors.
    fn usable(&self, size: u64) -> Result<u64, OpenError> {
        let sectors = size - size % u64::from(SECTOR_SIZE);
        if self.any_size {
            return Ok(sectors);
        }
        let path = self.path.display();
        if size == 0 {
            let message = format!("{path} is empty: give it a size, for example `truncate -s 10G {path}`");
            return Err(OpenError::new(OpenErrorKind::Empty, message));
        }
        if size != sectors {
            let message = format!(
                "{path} has {size} bytes, which is not a multiple of the {SECTOR_SIZE}-byte sector: is it a raw image? \
                 If so, round it up with `truncate -s %{SECTOR_SIZE} {path}`"
            );
            return Err(OpenError::new(OpenErrorKind::OddSize, message));
        }
        Ok(size)
    }

    /// Opens and locks the image. Waits for a predecessor as long as `lock` allows.
    fn open_locked(&self, is_block_device: bool, lock: ImageLock) -> Result<File, OpenError> {
        let wait = match lock {
            ImageLock::Required { wait } => wait,
            ImageLock::Off => return self.open_file(false, true).map_err(|error| self.explain_open(&error)),
        };
        // The kernel's own exclusive claim, which a mounted file system, LVM or swap has too. There may be several
        // readers.
        let exclusive = is_block_device && !self.read_only;
        let outcome = lock::retry_while_in_use(wait, || match self.open_file(exclusive, true) {
            Ok(file) => lock::lock(&file, self.read_only).map(|()| Ok(file)),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(LockFailure::InUse),
            Err(error) => Ok(Err(error)),
        });
        match outcome {
            Ok(opened) => opened.map_err(|error| self.explain_open(&error)),
            Err(LockFailure::InUse) => Err(self.explain_in_use(is_block_device)),
            Err(LockFailure::Unsupported(error)) => {
                let path = self.path.display();
                let message = format!(
                    "cannot lock {path}: {error}. Its file system does not support locks; move the image, or switch \
                     locking off if nothing else can open it"
                );
                Err(OpenError::new(OpenErrorKind::CannotLock, message))
            }
        }
    }

    fn open_file(&self, exclusive: bool, direct: bool) -> io::Result<File> {
        let flag = |wanted: bool, flag: i32| if wanted { flag } else { 0 };
        let flags = libc::O_NOCTTY | flag(exclusive, libc::O_EXCL) | flag(direct, libc::O_DIRECT);
        let opened = OpenOptions::new().read(true).write(!self.read_only).custom_flags(flags).open(&self.path);
        match opened {
            Err(error) if direct && error.raw_os_error() == Some(libc::EINVAL) => self.open_file(exclusive, false),
            opened => opened,
        }
    }

    /// Returns the alignment for direct I/O on `file`. Returns `None` if the page cache has to be used, and logs a
    /// warning with the reason.
    fn direct_alignment(&self, file: &File, is_block_device: bool, size: u64) -> Option<u32> {
        let path = self.path.display();
        if !is_direct(file) {
            tracing::warn!(image = %path, "the file system refuses direct I/O: the host's page cache is used");
            return None;
        }
        let alignment = if is_block_device { rustix::fs::ioctl_blksszget(file).ok() } else { file_alignment(file) };
        match alignment.map(|alignment| alignment.max(SECTOR_SIZE)) {
            Some(alignment) if alignment > DIRECT_ALIGNMENT_MAX || !alignment.is_power_of_two() => {
                tracing::warn!(image = %path, alignment, "direct I/O needs a coarse alignment: the host's page cache is used");
                None
            }
            Some(alignment) if !self.is_adopted && !size.is_multiple_of(u64::from(sector_for(alignment))) => {
                tracing::warn!(image = %path, alignment, size,
                    "the size does not fit direct I/O: the host's page cache is used; `truncate -s %{}` the image to avoid it",
                    sector_for(alignment));
                None
            }
            None => {
                tracing::warn!(image = %path, "found no alignment that direct I/O accepts: the host's page cache is used");
                None
            }
            alignment => alignment,
        }
    }

    fn geometry(&self, file: &File, is_block_device: bool, size: u64, alignment: Option<u32>) -> Geometry {
        let logical_sector = alignment.map_or(SECTOR_SIZE, sector_for);
        let physical_block =
            if is_block_device { rustix::fs::ioctl_blkpbszget(file).unwrap_or(logical_sector) } else { 4096 };
        Geometry {
            // The part of a sector at the end of an adopted image, which has grown, is not used.
            size: size - size % u64::from(logical_sector),
            logical_sector,
            physical_block: physical_block.max(logical_sector),
            read_only: self.read_only,
            can_discard: false,
            // If the image cannot zero a range, zeroes are written, with less traffic than the frontend would cause.
            can_write_zeroes: !self.read_only,
            // The kernel loses nothing, and the image stays locked until the kernel has finished all calls.
            may_forget: false,
            outlives_process: false,
        }
    }

    fn explain_open(&self, error: &io::Error) -> OpenError {
        let path = self.path.display();
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => {
                let message = match self.any_size {
                    true => format!(
                        "{path} does not exist, but it was served before: is its storage mounted? Create no other one, \
                         because a guest may wait for this one"
                    ),
                    false if has_scheme(&self.path) => format!(
                        "{path} does not exist as a file, and as a URI its scheme is not known: known are nbd://host:port/export and \
                         nbd+unix:///export?socket=PATH"
                    ),
                    false => format!("{path} does not exist: create it, for example with `truncate -s 10G {path}`"),
                };
                OpenError::new(OpenErrorKind::Missing, message)
            }
            Some(libc::EROFS) => self.explain_read_only("its file system or device is read-only"),
            Some(libc::EACCES | libc::EPERM) if !self.read_only && File::open(&self.path).is_ok() => {
                self.explain_read_only("this user may not write to it")
            }
            Some(libc::EACCES | libc::EPERM) => {
                let access = if self.read_only { "reading" } else { "reading and writing" };
                let message = format!(
                    "no permission to open {path} for {access}: give this user access to it and to the folders above it"
                );
                OpenError::new(OpenErrorKind::PermissionDenied, message)
            }
            _ => self.explain_system("open", error),
        }
    }

    fn explain_read_only(&self, why: &str) -> OpenError {
        let path = self.path.display();
        let message = format!("cannot open {path} for writing: {why}. Use it read-only, or make it writable");
        OpenError::new(OpenErrorKind::ReadOnly, message)
    }

    fn explain_in_use(&self, is_block_device: bool) -> OpenError {
        let path = self.path.display();
        let culprits = if is_block_device { "a mount, LVM, swap, QEMU or remoca" } else { "QEMU, qemu-img or remoca" };
        let message = format!(
            "{path} is in use by another process ({culprits}): stop that one first (`fuser -v {path}` and `lsblk` help to \
             find it), or make both use it read-only"
        );
        OpenError::new(OpenErrorKind::InUse, message)
    }

    fn explain_system(&self, verb: &str, error: &io::Error) -> OpenError {
        OpenError::new(OpenErrorKind::System, format!("cannot {verb} {}: {error}", self.path.display()))
    }
}

/// Returns whether a path looks like a URI.
fn has_scheme(path: &Path) -> bool {
    let scheme = path.to_str().and_then(|path| path.split_once("://"));
    scheme.is_some_and(|(scheme, _)| !scheme.is_empty() && !scheme.contains('/'))
}

fn sector_for(alignment: u32) -> u32 {
    if alignment <= SECTOR_SIZE { SECTOR_SIZE } else { 4096 }
}

fn is_direct(file: &File) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::DIRECT))
}

fn is_write_protected(device: &File) -> bool {
    let mut protected: libc::c_int = 0;
    // SAFETY: BLKROGET writes one int to the pointer, which is valid for the call; the descriptor is open.
    let outcome = unsafe { libc::ioctl(device.as_raw_fd(), BLKROGET, &raw mut protected) };
    outcome == 0 && protected != 0
}

fn set_buffered(file: &File) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(rustix::fs::fcntl_setfl(file, flags - rustix::fs::OFlags::DIRECT)?)
}

/// Keeps reads from changing the file's access time, which may wait for the file system's journal. Only the file's
/// owner or a process with `CAP_FOWNER` can request it.
fn leave_access_time(file: &File) {
    let _ = rustix::fs::fcntl_getfl(file).and_then(|flags| rustix::fs::fcntl_setfl(file, flags | OFlags::NOATIME));
}

fn starts_with_qcow2_magic(file: &File) -> bool {
    let Some(mut page) = BufferPool::new(4096).take(4096) else { return false };
    file.read_at(&mut page, 0).is_ok_and(|len| len >= 4) && page.starts_with(b"QFI\xFB")
}

/// Returns the alignment of direct I/O that the kernel reports for a file (Linux 6.1 and later), or the smallest one
/// that it accepts if it reports none. Returns `None` if direct I/O is not possible.
fn file_alignment(file: &File) -> Option<u32> {
    let said = rustix::fs::statx(file.as_fd(), c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    match said.filter(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0) {
        Some(stat) if stat.stx_dio_offset_align == 0 || stat.stx_dio_mem_align > DIRECT_ALIGNMENT_MAX => None,
        Some(stat) => Some(stat.stx_dio_offset_align),
        None => probed_alignment(file),
    }
}

fn probed_alignment(file: &File) -> Option<u32> {
    let mut page = BufferPool::new(4096).take(4096)?;
    [512, 1024, 2048, 4096]
        .into_iter()
        .find(|&len: &u32| page.get_mut(..len as usize).is_some_and(|target| file.read_at(target, 0).is_ok()))
}

/// Returns whether `RWF_DSYNC` is known to work on this file system. FUSE, for example, drops it from an O_DIRECT write
/// made by io_uring (seen on Linux 6.18).
fn file_system_honours_dsync(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|fs| [libc::EXT4_SUPER_MAGIC, libc::XFS_SUPER_MAGIC].contains(&fs.f_type))
}

/// Returns whether holes can be punched. If that is not known, it is tried far behind the `end` of the file, where no data
/// can be lost, even if another process is just appending some. The attempt changes the file's times.
fn file_can_punch_holes(file: &File, end: u64) -> bool {
    if file_stamp::is_local(file) {
        return true;
    }
    let mode = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, mode, end.next_multiple_of(4096) + PROBE_DISTANCE, 4096).is_ok()
}

fn device_can_discard(file: &File) -> bool {
    let Ok(device) = file.metadata().map(|metadata| metadata.rdev()) else { return false };
    let device = format!("/sys/dev/block/{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    // A partition has no queue of its own.
    ["queue", "../queue"].into_iter().any(|queue| {
        let limit = std::fs::read_to_string(format!("{device}/{queue}/discard_max_bytes"));
        limit.is_ok_and(|limit| limit.trim().parse::<u64>().is_ok_and(|bytes| bytes > 0))
    })
}
